"""Log-probability and entropy of given tokens from hidden states, without ever holding the logits.

At 128k tokens and a vocabulary of 130k the logits alone are 68 GB in float32. `logprob_entropy`
walks them in pieces, keeps three numbers per token and computes the pieces again for the gradient.

    reference.py   the specification, with the logits written out
    chunked.py     plain torch, a few rows at a time: the CPU path and the fallback
    logprob.py     Triton: the logits never leave the chip

docs/kernel.md explains the algorithm; bench.py measures all three. Two files choose operations for
other parts of the model: attention.py (flash-attn or torch's varlen_attn) and cpu_linear.py (the
layout of matrices for decoding on a CPU).
"""

import functools
import logging
import math
import os
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import chunked, reference

logger = logging.getLogger(__name__)


def logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and exact entropy of softmax((hidden weight^T + bias) / temperature).

    hidden (M, D), weight (V, D), targets (M,) int64, bias (V,) or None. Returns (logprobs, entropy)
    in nats, each (M,) float32 (float64 for float64 hidden), both differentiable once in hidden,
    weight and bias. Weight is rounded to hidden's dtype, products accumulate in float32; each
    gradient has its input's dtype, so that of a float32 master weight is never rounded to bf16.

    A row whose target is negative (-100) is ignored: both outputs 0 and no gradient, even if it
    holds NaN. impl: "reference" (logits written out), "torch" (chunks), "triton" (CUDA, or CPU with
    TRITON_INTERPRET=1 in the environment) or "auto". Raises ValueError for what does not fit.
    """
    _check(hidden, weight, targets, temperature, bias)
    kept = targets >= 0
    if not kept.all():
        some = logprob_entropy(
            hidden[kept], weight, targets[kept], temperature=temperature, bias=bias, impl=impl
        )
        return tuple(x.new_zeros(len(targets)).masked_scatter(kept, x) for x in some)
    if impl == "auto":
        impl = _choose(hidden.device, hidden.dtype)
    if impl == "reference" or not len(hidden):
        return reference.logprob_entropy(hidden, weight, bias, targets, temperature)
    backend = _backend(impl, hidden)
    return _LogprobEntropy.apply(hidden, weight, bias, targets, 1 / temperature, backend)


class _LogprobEntropy(torch.autograd.Function):
    """Forward by `backend.forward`; backward asks it for dlogits, one chunk of rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale: float, backend: ModuleType):
        h, w, b = _operands(hidden, weight, bias)
        targets = targets.contiguous()
        logprobs, entropy, lse = backend.forward(h, w, b, targets, scale)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.scale, ctx.backend = scale, backend
        ctx.set_materialize_grads(False)  # an output that nobody uses costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logprob, g_entropy):
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        h, w, b = _operands(hidden, weight, bias)
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        dh = torch.empty_like(h) if need_h else None
        dw = lse.new_zeros(weight.shape) if need_w else None  # float32: all rows add up in it
        db = lse.new_zeros(len(weight)) if need_b else None

        # dz = [g_logprob (onehot - p) - g_entropy p (log p + entropy)] / temperature
        #    = p (slope log p + offset) + at_target onehot
        at_target = torch.zeros_like(lse) if g_logprob is None else ctx.scale * g_logprob
        slope = None if g_entropy is None else -ctx.scale * g_entropy
        offset = -at_target if slope is None else slope * entropy - at_target
        rows = ctx.backend.chunk_rows(len(weight), hidden.device)
        for start in range(0, len(hidden), rows):
            i = slice(start, start + rows)
            per_row = (targets, lse, slope, offset, at_target)
            per_row = [x if x is None else x[i] for x in per_row]
            dz = ctx.backend.dlogits(h[i], w, b, ctx.scale, *per_row)
            if need_h:
                torch.mm(dz, w, out=dh[i])
            if need_w:
                _add_product(dw, dz.T, h[i])
            if need_b:
                db += dz.sum(0, dtype=db.dtype)
        grads = zip((dh, dw, db), (hidden, weight, bias), strict=True)
        return *(None if g is None else g.to(x.dtype) for g, x in grads), None, None, None


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple:
    """Hidden and weight in the dtype the products read, bias in the one they accumulate in.

    Products of 16-bit numbers with float32 sums exist on CUDA only; elsewhere they are lifted.
    """
    accumulate = torch.promote_types(hidden.dtype, torch.float32)
    dtype = hidden.dtype if hidden.is_cuda else accumulate
    b = None if bias is None else bias.to(accumulate).contiguous()
    return hidden.to(dtype).contiguous(), weight.to(hidden.dtype).to(dtype).contiguous(), b


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in total's dtype, also for 16-bit a and b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@functools.cache
def _choose(device: torch.device, dtype: torch.dtype) -> str:
    """What "auto" stands for on this device and dtype; logs it once, and warns of a 16-bit GPU run
    without the Triton kernel.

    float32 on CUDA is torch's: without tensor cores cuBLAS is the faster product.
    """
    impl, why = "torch", f"{device}, {dtype}"
    wanted = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if wanted:
        if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < 8:
            why += ", not an NVIDIA GPU of compute capability 8 or newer"
        else:
            try:
                from . import logprob  # noqa: F401

                impl = "triton"
            except ImportError as error:
                why += f", no Triton: {error}"
    level = logging.WARNING if wanted and impl == "torch" else logging.INFO
    logger.log(level, "kernels: logprob_entropy runs as %r (%s)", impl, why)
    return impl


def _backend(impl: str, hidden: Tensor) -> ModuleType:
    if impl == "torch":
        return chunked
    if impl != "triton":
        raise ValueError(f"impl is {impl!r}; choose auto, reference, torch or triton.")
    if hidden.dtype == torch.float64:
        raise ValueError("impl='triton' has no float64; use impl='torch'.")
    if not hidden.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl='triton' needs CUDA tensors, got {hidden.device}; on a CPU start Python with "
            "TRITON_INTERPRET=1 (slow, for tests)."
        )
    from . import logprob  # not at the top: a CPU needs no Triton

    return logprob


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"{shapes}: they must be (M, D) and (V, D).")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        got = f"{tuple(targets.shape)} {targets.dtype}"
        raise ValueError(
            f"targets {got}: must be int64, one for each of {len(hidden)} hidden rows."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias {tuple(bias.shape)}: must have an entry for each of {len(weight)} logits."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature}: must be positive and finite.")
    if targets.numel() and int(targets.max()) >= len(weight):
        raise ValueError(f"target {int(targets.max())}: the vocabulary ends at {len(weight) - 1}.")
