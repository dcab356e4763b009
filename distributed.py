"""The only file that knows ranks: start-up, printing, sharding, reductions, full state for
checkpoints.

One process is not a special case for its callers: every function here works without a process
group. The scalars of a step are held whole on every rank, so the only things that cross ranks are
rollouts and word of which have ended (`gather`), rows of per-token results (`sum_`), and the
gradients and weights that FSDP2 moves by itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
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

# A collective may wait for the rank with the longest rollout, an hour and more at 128k tokens. Dead
# ranks are found by their launcher, which watches processes, so this limit is for hung ones alone.
LONGEST_WAIT = timedelta(days=1)


def rank() -> int:
    """Index of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_here() -> int:
    """Number of processes on this machine, of which there may be several."""
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
        print(*args, flush=True, **kwargs)


@contextmanager
def command(stopped: str) -> Iterator[None]:
    """Around all that a command does. What a user can mend ends it with one sentence, a Ctrl-C with
    `stopped`, any other fault with its traceback.
    """
    try:
        yield
        shutdown()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        leave(f"error: {error}")
    except KeyboardInterrupt:
        leave(stopped)
    except Exception:
        if world_size() == 1:
            raise
        leave(traceback.format_exc())


def start(options: Any) -> torch.device:
    """Start the processes that a command's fields `device`, `nproc` and `dtype` ask for, and settle
    a dtype that is auto; returns this rank's device.
    """
    kind = choose_device(options.device, options.nproc)
    launch(options.nproc)
    device = init(kind)
    if options.dtype == "auto":
        options.dtype = "bfloat16" if device.type == "cuda" else "float32"
    return device


def launch(nproc: int) -> None:
    """Run this command in `nproc` processes of its own, and exit when they have; no-op for one
    process, and inside a launcher (a bare `torchrun -- train.py --nproc 8`, which starts one
    process, gets its eight).

    What torchrun does on one node, but for two things. SIGINT and SIGTERM are passed on and then
    waited for: torchrun kills after 30 s, in the middle of a step or a save. And when a rank dies
    the others have 10 s to say what they saw, then they are killed: a rank that decodes or waits in
    a collective would notice nothing for hours.
    """
    if nproc <= 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, rank 0 opens none
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    ranks: list[subprocess.Popen] = []
    pass_on = lambda number, _: [p.send_signal(number) for p in ranks if p.poll() is None]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    for rank_ in range(nproc):
        env = {"OMP_NUM_THREADS": "1"} | os.environ | shared
        env |= {"RANK": str(rank_), "LOCAL_RANK": str(rank_)}
        # A session of its own: a Ctrl-C in the terminal reaches it once, from here.
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, start_new_session=True))
    raise SystemExit(wait_for(ranks))


def wait_for(ranks: Sequence[subprocess.Popen]) -> int | str:
    """Exit status of a run: 0 when every rank ended well, else a sentence about the first that did
    not; the others are killed after ten seconds.
    """
    running = lambda: any(p.poll() is None for p in ranks)
    failed = lambda: [r for r, p in enumerate(ranks) if p.poll()]
    while running() and not failed():
        time.sleep(0.02)
    if not failed():
        return 0
    # A signal is a cause; status 1 beside it may be the connection that was lost with that rank.
    first = min(failed(), key=lambda r: ranks[r].returncode > 0)
    deadline = time.monotonic() + 10
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    for p in ranks:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
            p.wait()
    code = ranks[first].returncode
    why = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return f"error: rank {first} {why}, and the others were ended with it."


def leave(message: str) -> NoReturn:
    """End this process with a message and status 1.

    One rank of several leaves at once and without clean-up: closing the process group would make
    the others report a lost connection before the cause is told, and NCCL would wait for them.
    """
    if world_size() == 1:
        raise SystemExit(message)
    sys.stderr.write(f"rank {rank()}: {message}\n")  # print would write the line's end apart
    sys.stderr.flush()
    os._exit(1)


def choose_device(device: str, nproc: int) -> str:
    """cpu or cuda for auto, cpu or cuda; ValueError if there are not enough for the processes of
    this machine: `nproc`, or what torchrun started in their place.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
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
            "a process needs one of its own."
        )
    return device


def init(device: str) -> torch.device:
    """Join the process group if a launcher started us; returns this rank's device, cpu or cuda."""
    local = (
        torch.device(device, int(os.environ.get("LOCAL_RANK", 0)))
        if device == "cuda"
        else torch.device("cpu")
    )
    if local.type == "cuda":
        grow_segments()
        torch.cuda.set_device(local)
    if "LOCAL_RANK" in os.environ and sys.platform == "linux":
        # PR_SET_PDEATHSIG: a rank whose launcher is killed saves and leaves, it is no orphan.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(
            "nccl" if local.type == "cuda" else "gloo",
            device_id=local if local.type == "cuda" else None,
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
    """FSDP2 over all ranks: float32 masters in shards, weights gathered layer by layer.

    Layers are gathered in `compute_dtype`. Embedding, final norm and head stay float32, so their
    gradients are rounded no more than in one process: in bfloat16 a frequent token's rows would
    add up in steps of 1/256, and the bias of a value head move in steps of 0.004.
    """
    if world_size() == 1:
        return
    # Without a mesh FSDP2 moves the shards to a GPU if the machine has one, even under gloo.
    mesh = init_device_mesh(_collective_device().type, (world_size(),))
    for part in (*layers, module):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.float32 if part is module else compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(part, mesh=mesh, mp_policy=policy)


def backward(loss: Tensor) -> None:
    """Gradients of the sum of all ranks' losses, whose denominators are global already.

    FSDP2 averages gradients; its own sum (set_gradient_divide_factor) does not exist on gloo.
    """
    (loss * world_size()).backward()


def gather(objects: list) -> list:
    """The lists of all ranks, joined in rank order, on every rank."""
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
    return sum_(torch.tensor(numbers, dtype=torch.float64, device=_collective_device())).tolist()


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def any_rank(flag: bool) -> bool:
    """True on every rank if it is true on one: how a Ctrl-C on one rank stops all after the same
    step.
    """
    return sum_on_device([float(flag)])[0] > 0


def _collective_device() -> torch.device:
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def full(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor (a collective); other tensors as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of a (sharded) module into a whole one of another dtype, one tensor at a
    time.
    """
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        ours.copy_(full(theirs))


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Whole float32 weights on the CPU, one tensor gathered at a time; complete on every rank.

    Copied: what `full` returns may be a view of padded storage, which safetensors refuses.
    """
    return {
        name: full(value).detach().to("cpu", copy=True)
        for name, value in module.state_dict().items()
    }


def optimizer_state(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict:
    """Whole state of a module's optimizers on the CPU, keyed by parameter name, so another number
    of ranks can load it.
    """
    # Asked before the first step, torch would take a fake one, and Adam count it.
    if not all(o.state for o in optimizers):
        return {}
    return get_optimizer_state_dict(
        module, optimizers, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def load_optimizer_state(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: dict
) -> None:
    """Put back what `optimizer_state` returned (present on every rank), but no hyper-parameter."""
    if not state:
        return
    groups = lambda: [g for o in optimizers for g in o.param_groups]  # loading makes new ones
    settings = [{k: v for k, v in g.items() if k != "params"} for g in groups()]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizers, optim_state_dict=state, options=options)
    for group, setting in zip(groups(), settings, strict=True):
        group.update(setting)


def grad_norm(module: nn.Module) -> Tensor:
    """Global gradient norm of all ranks, a scalar; sharded like the gradients, see `full`."""
    return nn.utils.get_total_norm(p.grad for p in module.parameters() if p.grad is not None)
