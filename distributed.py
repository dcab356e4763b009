"""The only file that knows ranks: start-up, printing, sharding, reductions, full state for
checkpoints.

One process is not a special case for its callers: every function here works without a process
group. The scalars of a step are held whole on every rank, so the only things that cross ranks are
finished rollouts (`gather`), rows of per-token results (`sum_`), and the gradients and weights that
FSDP2 moves by itself.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def rank() -> int:
    """Index of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def print0(*args: Any, **kwargs: Any) -> None:
    """Print on rank 0 only, at once."""
    if rank() == 0:
        print(*args, flush=True, **kwargs)


def relaunch(nproc: int) -> None:
    """Restart this command under the elastic launcher with `nproc` processes; no return. No-op
    inside a launcher.
    """
    if nproc <= 1 or "LOCAL_RANK" in os.environ:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # After `--`, or the launcher takes our --nproc for a short form of its own --nproc-per-node.
    os.execv(sys.executable, [*launcher, f"--nproc-per-node={nproc}", "--", *sys.argv])


def choose_device(device: str, nproc: int) -> str:
    """cpu or cuda for auto, cpu or cuda; ValueError if there are not `nproc` of them."""
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
        torch.cuda.set_device(local)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(
            "nccl" if local.type == "cuda" else "gloo",
            device_id=local if local.type == "cuda" else None,
        )
    return local


def shutdown() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(
    module: nn.Module, layers: nn.ModuleList, compute_dtype: torch.dtype, head_dtype: torch.dtype
) -> None:
    """FSDP2 over all ranks: float32 masters in shards, weights gathered layer by layer.

    Layers are gathered in `compute_dtype`; embedding, final norm and head in `head_dtype`.
    """
    if world_size() == 1:
        return
    for part in (*layers, module):
        policy = MixedPrecisionPolicy(
            param_dtype=head_dtype if part is module else compute_dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        fully_shard(part, mp_policy=policy)


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


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Whole optimizer state on the CPU, keyed by parameter name, so another number of ranks can
    load it.
    """
    if not optimizer.state:  # asking would make torch take a fake first step, and Adam count it
        return {}
    return get_optimizer_state_dict(
        module, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Put back what `optimizer_state` returned (present on every rank), but no hyper-parameter."""
    if not state:
        return
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def grad_norm(module: nn.Module, max_norm: float) -> float:
    """Clip the global gradient norm of all ranks to `max_norm`; returns the norm before."""
    return float(full(nn.utils.clip_grad_norm_(module.parameters(), max_norm)))
