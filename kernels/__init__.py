"""Log-probability and entropy of given tokens straight from hidden states; the logits are never held whole.

At 128k tokens and a vocabulary of 130k the logits alone are 68 GB in float32. `logprob_entropy` walks them in
pieces, keeps three numbers per token and computes the pieces again in the backward pass. docs/kernel.md explains it.

    reference.py   the specification, logits written out
    chunked.py     plain torch, a few rows at a time: CPU and fallback
    logprob.py     Triton: the logits never leave the chip
"""

import functools
import importlib.util
import logging
import os
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import chunked, reference

IMPLEMENTATIONS = ("auto", "reference", "triton", "torch")
logger = logging.getLogger(__name__)


class _LogprobEntropy(torch.autograd.Function):
    """Forward by `backend.forward`; backward recomputes dlogits for one chunk of rows after the other."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale: float, backend: ModuleType):
        h, w, b = _operands(hidden, weight, bias)
        logprobs, entropy, lse = backend.forward(h, w, b, targets, scale)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.scale, ctx.backend = scale, backend
        ctx.set_materialize_grads(False)  # an output nobody uses costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        h, w, b = _operands(hidden, weight, bias)
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        dh = torch.empty_like(hidden) if need_h else None
        dw = lse.new_zeros(weight.shape) if need_w else None  # float32: thousands of rows add up in it
        db = lse.new_zeros(len(weight)) if need_b else None
        # dz = [g_logprob (onehot - p) - g_entropy p (log p + entropy)] / T = p (slope log p + offset) + at_target onehot
        at_target = torch.zeros_like(lse) if g_logprob is None else ctx.scale * g_logprob
        slope = None if g_entropy is None else -ctx.scale * g_entropy
        offset = -at_target if slope is None else slope * entropy - at_target
        rows = ctx.backend.chunk_rows(len(weight), hidden.device)
        for start in range(0, len(hidden), rows):
            i = slice(start, start + rows)
            slope_i = None if slope is None else slope[i]
            dz = ctx.backend.dlogits(h[i], w, b, targets[i], ctx.scale, lse[i], slope_i, offset[i], at_target[i])
            if need_h:
                dh[i] = dz @ w
            if need_w:
                _add_product(dw, dz.T, h[i])
            if need_b:
                db += dz.sum(0, dtype=db.dtype)
        dw = dw.to(weight.dtype) if need_w else None
        db = db.to(bias.dtype) if need_b else None
        return dh, dw, db, None, None, None


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden, weight and bias in the dtype the products read.

    16-bit products with float32 accumulation exist on CUDA only; elsewhere 16-bit inputs are lifted to float32.
    """
    accumulate = torch.promote_types(hidden.dtype, torch.float32)
    dtype = hidden.dtype if hidden.is_cuda else accumulate
    return hidden.to(dtype).contiguous(), weight.to(dtype).contiguous(), None if bias is None else bias.to(accumulate)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in total's dtype also when a and b are 16-bit (CUDA)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@functools.cache
def _choose(device: str, dtype: torch.dtype) -> str:
    """What `auto` means for this device and dtype; says so once."""
    impl, why = "torch", f"{device}, {dtype}"
    if device == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if importlib.util.find_spec("triton"):
            impl = "triton"
        else:
            why += ", triton is not installed"
    logger.warning("kernels: logprob_entropy runs its %r implementation (%s)", impl, why)
    return impl


def logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and exact entropy, in nats, of softmax((hidden @ weight^T + bias) / temperature).

    hidden (M, D), weight (V, D), targets (M,) int64, bias (V,) or None. Returns (logprobs, entropy), (M,) float32
    each (float64 for float64 hidden), both differentiable once in hidden, weight and bias. Products read weight in
    hidden's dtype and accumulate in float32; each gradient comes back in its input's dtype, so a float32 master
    weight gets a gradient that was never rounded to bf16.

    A row whose target is negative (-100) is ignored: log-prob 0, entropy 0, no gradient, even if it holds NaN.
    impl: "reference" (logits written out), "torch" (chunks), "triton" (CUDA, or TRITON_INTERPRET=1), or "auto".
    Raises ValueError for shapes, devices or values that do not fit.
    """
    _check(hidden, weight, targets, temperature, bias, impl)
    kept = targets >= 0
    if not kept.all():
        some = logprob_entropy(hidden[kept], weight, targets[kept], temperature=temperature, bias=bias, impl=impl)
        return tuple(x.new_zeros(len(targets)).masked_scatter(kept, x) for x in some)
    if impl == "auto":
        impl = _choose(hidden.device.type, hidden.dtype)
    if impl == "reference" or not len(hidden):
        return reference.logprob_entropy(hidden, weight, bias, targets, temperature)
    if impl == "torch":
        backend = chunked
    else:
        from . import logprob as backend  # imports triton
    return _LogprobEntropy.apply(hidden, weight, bias, targets, 1 / temperature, backend)


def _check(hidden, weight, targets, temperature, bias, impl) -> None:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; choose one of {', '.join(IMPLEMENTATIONS)}.")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (M, D) and (V, D).")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets {tuple(targets.shape)} {targets.dtype} must be int64 with one entry for each of the "
            f"{len(hidden)} rows of hidden."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have one entry for each of the {len(weight)} rows of weight.")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be positive and finite (greedy has no log-prob).")
    if targets.numel() and int(targets.max()) >= len(weight):
        raise ValueError(f"targets hold {int(targets.max())}, but the vocabulary ends at {len(weight) - 1}.")
