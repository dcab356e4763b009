"""The optimizers of a model, and --offload, which keeps unused state on the host.

On a CPU the host is the device, so every such move is a no-op there.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

import distributed
from config import Config

HOST = torch.device("cpu")
Optimizers = Sequence[torch.optim.Optimizer]  # of one model; they divide up its parameters


def make_optimizers(model: nn.Module, lr: float, config: Config) -> Optimizers:
    """AdamW with float32 state; norms, biases and the value head are not decayed.

    With --optimizer muon, Muon takes the matrices of the layers and AdamW the rest (embedding and
    heads). Muon's rate is scaled by 0.2 sqrt(longer side), so that its steps are as large as
    AdamW's (Moonlight, 2502.16982) and one --lr serves both. torch orthogonalises in bfloat16: a
    change of 1e-7 in a gradient, as from another order of summation, changes up to a percent of a
    step (2e-5 in float32), so Muon's steps depend on micro-batches and ranks.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
    if config.optimizer == "adamw":
        matrices = []
    # By identity: `in` on a list would compare tensors element by element.
    muons = {id(p) for p in matrices}
    rest = [(name, p) for name, p in named if id(p) not in muons]
    # Decay of the value head would pull V towards 0.
    decayed = [p for name, p in rest if p.ndim > 1 and "value_head" not in name]
    plain = [p for name, p in rest if p.ndim <= 1 or "value_head" in name]
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=1e-8,
    )
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(
        matrices, lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adamw]


def optimizer_step(model: nn.Module, optimizers: Optimizers, lr: float, config: Config) -> float:
    """Clip, step, clear; returns the gradient norm before clipping.

    Raises FloatingPointError if that norm is not finite, with weights and gradients as they were.
    """
    total_norm = distributed.grad_norm(model)
    norm = float(distributed.full(total_norm))
    # Before clipping, which would multiply every gradient by NaN.
    if not math.isfinite(norm):
        raise FloatingPointError(f"a gradient norm of the {type(model).__name__} is {norm}")
    # By the norm of all ranks, each of which holds only its shards.
    nn.utils.clip_grads_with_norm_(model.parameters(), config.max_grad_norm, total_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # At every step, because the critic's rate changes during its warm-up.
            group["lr"] = lr
        if config.offload != "none":
            move_moments(optimizer, optimizer.param_groups[0]["params"][0].device)
        optimizer.step()
        # None, not zeros: the next rollout gets the memory of the gradients.
        optimizer.zero_grad(set_to_none=True)
        if config.offload != "none":
            move_moments(optimizer, HOST)
    return norm


# ---- what --offload keeps on the host


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move AdamW's two moments, or Muon's one; the step count, a scalar, stays on the host."""
    for state in optimizer.state.values():
        state |= {name: x.to(device) for name, x in state.items() if x.ndim}


def offload(model: nn.Module, optimizers: Optimizers, config: Config) -> None:
    """Move to the host what --offload keeps there while the model is not in use."""
    if config.offload != "none":
        for optimizer in optimizers:
            move_moments(optimizer, HOST)
    if config.offload == "idle":
        model.to(HOST)


@contextmanager
def on_device(
    model: nn.Module,
    optimizers: Optimizers,
    device: torch.device,
    config: Config,
    moments: bool = False,
) -> Iterator[None]:
    """Inside, the model's weights, and on request its optimizers' moments, are on the device."""
    if config.offload == "idle":
        model.to(device)
    if config.offload != "none" and moments:
        for optimizer in optimizers:
            move_moments(optimizer, device)
    try:
        yield
    finally:
        offload(model, optimizers, config)
