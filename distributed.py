"""Ranks: starting and ending them, printing, sharding, reductions, full state for checkpoints.

The only file that calls torch.distributed or reads a launcher's environment variables; other files
ask it for `rank()` and `world_size()`. One process is not a special case for them: every function
here works without a process group. Every rank has all scalars of a step, so only
three things cross ranks: rollouts and the list of those that have ended (`gather`), rows of
per-token results (`sum_`), and the gradients and weights that FSDP2 moves by itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

# A collective may wait for the rank with the longest rollout, an hour and more at 128k tokens. The
# launcher watches the processes and finds dead ranks, so this limit only matters for hung ones.
LONGEST_WAIT = timedelta(days=1)


def rank() -> int:
    """Index of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_here() -> int:
    """Number of processes on this machine; `world_size` counts those of all machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if world_size() > 1 else 1


def launched_rank() -> int:
    """The rank that a launcher gave this process, known before `init`; 0 without a launcher."""
    return int(os.environ.get("RANK", 0))


def host_memory() -> int:
    """Bytes of memory of this machine, for all its processes together."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def print0(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only, at once."""
    if rank() == 0:
        # At once: `exit_with` ends a rank by os._exit, which drops what is buffered.
        print(*args, flush=True, **kwargs)


def progress_bar(things: Iterable | None = None, what: str = "", **options: Any) -> tqdm:
    """A tqdm bar on rank 0 alone, and only where a terminal shows it: a log file would fill with
    its redraws. options: of tqdm, such as `total` if there are no `things`.
    """
    # disable=None is tqdm's way to ask whether stderr is a terminal.
    return tqdm(things, what, disable=rank() > 0 or None, **options)


@contextmanager
def command(stopped: str) -> Iterator[None]:
    """Wrap all that a command does. An error that a user can fix ends it with one sentence, a
    Ctrl-C with the message `stopped`, any other error with its traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        exit_with(f"error: {error}")
    except KeyboardInterrupt:
        exit_with(stopped)
    except Exception:
        if world_size() == 1:
            raise
        exit_with(traceback.format_exc())
    finally:  # also after a SystemExit: a live group can abort the interpreter as it ends
        shutdown()


def start(options: Any) -> torch.device:
    """Start the processes that the fields `device` and `nproc` of a command ask for, and replace a
    dtype of "auto" in `options`. Returns this rank's device.
    """
    kind = choose_device(options.device, options.nproc)
    launch(options.nproc)
    device = init(kind)
    if options.dtype == "auto":
        options.dtype = "bfloat16" if device.type == "cuda" else "float32"
    return device


def launch(nproc: int) -> None:
    """Run this command in `nproc` processes and exit when they have ended.

    Does nothing for one process, or if a launcher has already started several. (`torchrun train.py
    --nproc 8` starts one process, which then starts the eight.)

    Works like torchrun on one node, with two differences. SIGINT and SIGTERM are passed on, and the
    ranks may take as long as they need: torchrun kills after 30 s, in the middle of a step or a
    save. And when a rank dies, the others have 10 s to report what they saw before they are killed:
    a rank that decodes or waits in a collective would notice nothing for hours.
    """
    if nproc <= 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return
    # Port 0: the system picks a free one, so two runs on one machine do not collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store lives here; rank 0 opens none
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    ranks: list[subprocess.Popen] = []

    def pass_on(number: int, _: Any) -> None:
        for p in ranks:
            if p.poll() is None:
                p.send_signal(number)

    # Before any rank exists: a signal in between would end this process alone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    for rank_ in range(nproc):
        # One thread each, as under torchrun, unless the user says otherwise: ranks share the cores.
        env = {"OMP_NUM_THREADS": "1"} | os.environ | shared
        env |= {"RANK": str(rank_), "LOCAL_RANK": str(rank_)}
        # In a session of its own, so that a Ctrl-C in the terminal reaches it only once, from here.
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, start_new_session=True))
    raise SystemExit(wait_for(ranks))


def wait_for(ranks: Sequence[subprocess.Popen]) -> int | str:
    """Wait until all ranks have ended well, or the first has failed; then kill the others after ten
    seconds. Returns 0, or a sentence about the rank that failed.
    """

    def running() -> bool:
        return any(p.poll() is None for p in ranks)

    def failed() -> list[int]:
        # poll: None while it runs, 0 after a good end, negative if a signal killed it.
        return [r for r, p in enumerate(ranks) if p.poll()]

    while running() and not failed():
        time.sleep(0.02)
    if not failed():
        return 0
    # If one was killed by a signal (a negative code), that is the cause: the others may have ended
    # with status 1 because they lost the connection to it.
    first = min(failed(), key=lambda r: ranks[r].returncode > 0)
    # monotonic: a correction of the wall clock must not end them early.
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    for p in ranks:
        if p.poll() is None:
            # The group of its session, with the children that it has there.
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    code = ranks[first].returncode
    why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"error: rank {first} {why}, so the others were stopped."


def exit_with(message: str) -> NoReturn:
    """End this process with a message and status 1.

    One rank of several ends at once and without clean-up: if it closed the process group, the
    others would report a lost connection before the cause is printed, and NCCL would wait for them.
    """
    if world_size() == 1:
        raise SystemExit(message)
    sys.stderr.write(f"rank {rank()}: {message}\n")  # print writes text and newline separately
    sys.stderr.flush()
    os._exit(1)


def choose_device(device: str, nproc: int) -> str:
    """The kind of device, "cpu" or "cuda", for --device auto, cpu or cuda.

    ValueError if this machine has fewer GPUs than processes: `nproc`, or as many as torchrun
    started instead.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # A recipe for 8 processes must also run under torchrun --nproc-per-node 4.
        nproc = int(os.environ.get("LOCAL_WORLD_SIZE", nproc))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda, but torch sees no CUDA device; use --device cpu or install a CUDA "
            "build of torch."
        )
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise ValueError(
            f"--nproc {nproc}, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "each process needs its own; lower --nproc."
        )
    return device


@contextmanager
def joined(device: str) -> Iterator[torch.device]:
    """Inside the block this process is in the process group, and however the block ends, it leaves
    the group: an interpreter that exits with a live group can abort ("terminate called ...").
    """
    try:
        yield init(device)
    finally:
        shutdown()


def init(device: str) -> torch.device:
    """Join the process group if a launcher started this process; returns its device, "cpu" or
    "cuda" with the index of its GPU. The caller must call `shutdown` later.
    """
    local = (
        torch.device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if device == "cuda"
        else torch.device("cpu")
    )
    if local.type == "cuda":
        grow_segments()
        # Or "cuda" without an index would be GPU 0 on every rank.
        torch.cuda.set_device(local)
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG: if its launcher is killed, a rank gets SIGTERM, saves and ends; else it
        # would keep the GPU as an orphan.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(
            "nccl" if local.type == "cuda" else "gloo",
            device_id=local if local.type == "cuda" else None,  # else NCCL guesses it from the rank
            timeout=LONGEST_WAIT,
        )
    return local


def grow_segments() -> None:
    """Let torch enlarge blocks of GPU memory instead of adding new ones, unless the user has
    configured its allocator. Packed batches differ in size at every step, and the holes they leave
    add up to 15 GB at 128k tokens. No effect once CUDA has started.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(module: nn.Module, layers: nn.ModuleList, compute_dtype: torch.dtype) -> None:
    """FSDP2 over all ranks: float32 master weights in shards, gathered layer by layer.

    Layers are gathered in `compute_dtype`. Embedding, final norm and head are gathered in float32,
    so that their gradients are rounded no more than in one process: summed in bfloat16, the
    gradient of a frequent token's row would grow in steps of 1/256, and that of the value head's
    bias in steps of 0.004.
    """
    if world_size() == 1:
        return
    # Without a mesh FSDP2 moves the shards to a GPU if the machine has one, even under gloo.
    mesh = init_device_mesh(_collective_device().type, (world_size(),))
    # The whole module last: FSDP2 gives it the parameters that no layer has taken.
    for part in (*layers, module):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.float32 if part is module else compute_dtype,
            reduce_dtype=torch.float32,  # or the sum over ranks would be rounded
            cast_forward_inputs=False,
        )
        fully_shard(part, mesh=mesh, mp_policy=policy)


def backward(loss: Tensor) -> None:
    """Compute the gradients of the sum of all ranks' losses; their denominators are already global.

    FSDP2 averages gradients over ranks, hence the factor. Its own switch to a sum
    (set_gradient_divide_factor) does not exist on gloo.
    """
    (loss * world_size()).backward()


def gather(objects: list) -> list:
    """The concatenated lists of all ranks, in rank order, on every rank."""
    if world_size() == 1:
        return objects
    lists: list[Any] = [None] * world_size()
    dist.all_gather_object(lists, objects)
    return [item for part in lists for item in part]


def sum_(tensor: Tensor) -> Tensor:
    """Add `tensor` over ranks, in place."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def sum_on_device(numbers: list) -> list:
    """Add a (nested) list of numbers over ranks, in float64."""
    # float64: in float32, counts of tokens above 2**24 would lose ones.
    return sum_(torch.tensor(numbers, dtype=torch.float64, device=_collective_device())).tolist()


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def any_rank(flag: bool) -> bool:
    """True on every rank if it is true on one, so that a Ctrl-C on one rank stops all of them after
    the same step.
    """
    return sum_on_device([float(flag)])[0] > 0


def _collective_device() -> torch.device:
    # NCCL takes tensors on a GPU only.
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def full(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one (a collective); other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of a (sharded) module into an unsharded one of another dtype, one tensor at
    a time.
    """
    # `full` is a collective: every rank goes through the tensors in the same order.
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        ours.copy_(full(theirs))


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Complete float32 weights on the CPU, on every rank; gathers one tensor at a time.

    They are copies, as `full` may return a view of padded storage, which safetensors refuses.
    """
    return {
        name: full(value).detach().to("cpu", copy=True)
        for name, value in module.state_dict().items()
    }


def optimizer_state(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict:
    """Whole state of a module's optimizers on the CPU, keyed by parameter name, so that a run with
    another number of ranks can load it. {} before the first step.
    """
    # To have a state to return, torch would take a fake step now, and Adam would count it.
    if not all(o.state for o in optimizers):
        return {}
    return get_optimizer_state_dict(
        module, optimizers, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def load_optimizer_state(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict
) -> None:
    """Restore what `optimizer_state` returned; every rank passes the whole state. Learning rate and
    other settings of this run stay, as a resumed run may have changed them.
    """
    # Saved before the first step, so there is nothing to restore.
    if not state:
        return

    def groups() -> list[dict]:
        return [g for o in optimizers for g in o.param_groups]

    settings = [{k: v for k, v in g.items() if k != "params"} for g in groups()]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizers, optim_state_dict=state, options=options)
    # Asked for again: loading has replaced the groups.
    for group, setting in zip(groups(), settings, strict=True):
        group.update(setting)


def grad_norm(module: nn.Module) -> Tensor:
    """Global gradient norm of all ranks, a scalar; sharded like the gradients, see `full`."""
    return nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
