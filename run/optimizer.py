"""The optimizers of a model: made, stepped, and with --offload kept on the host while they or their
model have nothing to do. On a CPU every such move is to where it is already.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

import distributed
from config import Config

HOST = torch.device("cpu")  # where --offload keeps what is not at work
Optimizers = Sequence[torch.optim.Optimizer]  # that share the parameters of one model


def make_optimizers(model: nn.Module, lr: float, config: Config) -> Optimizers:
    """AdamW with float32 state; norms, biases and the value head keep away from weight decay.

    With --optimizer muon, Muon takes the matrices of the layers and AdamW keeps the rest, embedding
    and heads among it. Muon's rate is scaled by 0.2 sqrt(longer side), so that its steps are as
    large as AdamW's (Moonlight, 2502.16982) and one --lr serves both. torch orthogonalises in
    bfloat16: a change of 1e-7 in a gradient, as another order of sums makes, changes up to a
    percent of a step (with float32 2e-5), so Muon is not free of micro-batches and ranks.
    """
    named = list(model.named_parameters())
    is_muon = lambda name, p: config.optimizer == "muon" and ".layers." in name and p.ndim == 2
    decayed = lambda name, p: p.ndim > 1 and "value_head" not in name
    rest = [(n, p) for n, p in named if not is_muon(n, p)]
    groups = [
        {"params": [p for n, p in rest if decayed(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in rest if not decayed(n, p)], "weight_decay": 0.0},
    ]
    betas = config.adam_beta1, config.adam_beta2
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8)
    if config.optimizer == "adamw":
        return [adamw]
    matrices = [p for n, p in named if is_muon(n, p)]
    scaling = {"adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(matrices, lr, weight_decay=config.weight_decay, **scaling), adamw]


def optimizer_step(model: nn.Module, optimizers: Optimizers, lr: float, config: Config) -> float:
    """Clip, step, clear; returns the gradient norm before clipping."""
    norm = distributed.grad_norm(model, config.max_grad_norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"a gradient norm of the {type(model).__name__} is {norm}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        if config.offload != "none":
            move_moments(optimizer, optimizer.param_groups[0]["params"][0].device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if config.offload != "none":
            move_moments(optimizer, HOST)
    return norm


# ---- what --offload keeps on the host


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move AdamW's two moments, or Muon's one; a step count, a scalar, always stays on the host."""
    for state in optimizer.state.values():
        state |= {name: x.to(device) for name, x in state.items() if x.ndim}


def leave(model: nn.Module, optimizers: Optimizers, config: Config) -> None:
    """Put on the host what --offload keeps there while the model does nothing."""
    if config.offload != "none":
        for optimizer in optimizers:
            move_moments(optimizer, HOST)
    if config.offload == "idle":
        model.to(HOST)


@contextmanager
def at_work(
    model: nn.Module,
    optimizers: Optimizers,
    device: torch.device,
    config: Config,
    moments: bool = False,
) -> Iterator[None]:
    """The model's weights, and on demand its optimizers' moments, on the device within."""
    if config.offload == "idle":
        model.to(device)
    if config.offload != "none" and moments:
        for optimizer in optimizers:
            move_moments(optimizer, device)
    try:
        yield
    finally:
        leave(model, optimizers, config)
