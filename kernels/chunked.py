"""The fused head in plain torch: a few rows of logits at a time, in reused buffers.

The CPU path, and the fallback wherever the Triton kernel does not apply.
"""

import torch
from torch import Tensor

# Logits held at once: 32 MB on a CPU; a GPU wants larger matrix products.
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
MIN_ROWS = 256


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows of logits held at once, here in the forward and by the caller in the backward."""
    return max(MIN_ROWS, CHUNK_ELEMENTS.get(device.type, 2**25) // vocab)


def _logits(h: Tensor, w: Tensor, bias: Tensor | None, scale: float, out: Tensor) -> Tensor:
    """(n, D), (V, D) -> z (n, V) written to `out`, accumulated in out's dtype."""
    if h.dtype == out.dtype:
        torch.mm(h, w.T, out=out)
    else:  # 16-bit operands on a GPU
        torch.mm(h, w.T, out_dtype=out.dtype, out=out)
    if bias is not None:
        out.add_(bias)
    return out if scale == 1 else out.mul_(scale)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, logsumexp), (M,) in at least float32; scale is 1 / temperature."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = min(chunk_rows(len(weight), hidden.device), len(hidden))
    buffers = hidden.new_empty(2, rows, len(weight), dtype=dtype)
    stats = hidden.new_empty(3, len(hidden), dtype=dtype)
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        h, y = hidden[chunk], targets[chunk, None]
        z, p = buffers[:, : len(h)]
        _logits(h, weight, bias, scale, z)
        peak = z.amax(-1, keepdim=True)
        z -= peak  # before the products: entropy keeps its digits when all logits are large
        s = torch.exp(z, out=p).sum(-1)
        z_y = z.gather(-1, y).squeeze(-1)
        t = z.mul_(p).sum(-1)  # sum adds pairwise; a dot product of 130k terms is off by 1e-3
        stats[0, chunk] = z_y - s.log()
        stats[1, chunk] = s.log() - t / s
        stats[2, chunk] = peak.squeeze(-1) + s.log()
    # Copies: FSDP2 warns about a module that returns views (here: rows of `stats`).
    return tuple(row.clone() for row in stats)


def dlogits(
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    scale: float,
    targets: Tensor,
    lse: Tensor,
    slope: Tensor | None,
    offset: Tensor,
    at_target: Tensor,
) -> Tensor:
    """dz (n, V) = p (slope log p + offset) + at_target onehot, in h's dtype; slope None means 0."""
    z = lse.new_empty(len(h), len(w))
    _logits(h, w, bias, scale, z).sub_(lse[:, None])  # log p
    if slope is None:
        z.exp_().mul_(offset[:, None])
    else:
        p = z.exp()
        torch.addcmul(offset[:, None], slope[:, None], z, out=z).mul_(p)
    z.scatter_add_(-1, targets[:, None], at_target[:, None])
    return z.to(h.dtype)
