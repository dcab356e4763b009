"""The fused head as two Triton kernels: the logits never leave the chip.

`_forward` gives each program a block of rows and one split of the vocabulary, and reduces the split
to four numbers per row. `_dlogits` computes the same tiles again, now with the logsumexp known, and
writes their gradient. Shapes: h (M, D), w (V, D), tiles of logits (BM, BV).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Tile: BM rows, BV columns, BD deep; warps; pipeline stages; loads by descriptor. With a descriptor
# the hardware of sm_90 checks the bounds; on older chips Triton emulates it and spills registers.
BLOCKS = {
    "sm90": (128, 256, 64, 8, 3, True),
    "sm80": (128, 128, 64, 8, 3, False),
    "fp32": (64, 128, 32, 8, 3, False),  # true float32 products, so no tensor cores
}
GROUP = 16  # row blocks that sweep the vocabulary together, so that what they read stays in L2
MIN_SPLITS = 8  # pieces of the vocabulary; short inputs take more of them, to fill the chip
CHUNK_ELEMENTS = 2**29  # of dlogits held at once in the backward: 1.07 GB in bf16
FAR_BELOW = tl.constexpr(-1e30)  # logit of "nothing": unlike -inf, its difference with itself is 0


@triton.jit
def _place(row_blocks, column_blocks, GROUP: tl.constexpr):
    """(row block, column block) of this program: GROUP row blocks do all columns, then the next."""
    pid = tl.program_id(0)
    first = pid // (GROUP * column_blocks) * GROUP
    size = min(row_blocks - first, GROUP)
    inside = pid % (GROUP * column_blocks)
    return first + inside % size, inside // size


@triton.jit
def _load(
    x, row, column, rows, columns, BR: tl.constexpr, BC: tl.constexpr, DESCRIPTOR: tl.constexpr
):
    """Tile (BR, BC) of a contiguous matrix (rows, columns), zero outside it."""
    if DESCRIPTOR:
        tile = x.load([row, column])
    else:
        r, c = row + tl.arange(0, BR), column + tl.arange(0, BC)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        # int64: rows * columns passes 2**31
        tile = tl.load(x + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def _logits(
    h, w, bias, row, column, M, V, D, scale,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Tile (BM, BV) of z = (h w^T + bias) / temperature, accumulated and scaled in float32."""
    z = tl.zeros((BM, BV), tl.float32)
    for k in range(0, D, BD):
        a = _load(h, row, k, M, D, BM, BD, DESCRIPTOR)
        b = _load(w, column, k, V, D, BV, BD, DESCRIPTOR)
        z = tl.dot(a, b.T, z, input_precision="ieee")
    columns = column + tl.arange(0, BV)
    if bias is not None:
        z += tl.load(bias + columns, mask=columns < V, other=0.0)[None, :]
    # Columns beyond V, in the last tile: as logits of 0 they would win when all real ones are low.
    return tl.where((columns < V)[None, :], z * scale, FAR_BELOW)


@triton.jit
def _forward(
    h, w, bias, targets, stats, M, V, D, scale, splits,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """BM rows, one split of the vocabulary -> stats (splits, 4, M) float32: m, s, t, z_y."""
    row_block, split = _place(tl.cdiv(M, BM), splits, GROUP)
    rows = row_block * BM + tl.arange(0, BM)
    y = tl.load(targets + rows, mask=rows < M, other=-1)

    # The online logsumexp. After any number of tiles, over the logits z seen so far:
    m = tl.full((BM,), FAR_BELOW, tl.float32)  # max z
    s = tl.zeros((BM,), tl.float32)  # sum exp(z - m)
    t = tl.zeros((BM,), tl.float32)  # sum exp(z - m) (z - m)
    z_y = tl.zeros((BM,), tl.float32)  # z of the target
    tiles = tl.cdiv(V, BV)
    for tile in range(split * tiles // splits, (split + 1) * tiles // splits):
        z = _logits(
            h, w, bias, row_block * BM, tile * BV, M, V, D, scale, BM, BV, BD, DESCRIPTOR
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(z, 1))
        r = tl.exp(m - m_new)  # what was summed under the old max shrinks by r
        shifted = z - m_new[:, None]
        p = tl.exp(shifted)
        t = r * (t + (m - m_new) * s) + tl.sum(p * shifted, 1)
        s = r * s + tl.sum(p, 1)
        m = m_new
        is_target = (tile * BV + tl.arange(0, BV))[None, :] == y[:, None]
        z_y += tl.sum(tl.where(is_target, z, 0.0), 1)

    out = stats + split.to(tl.int64) * 4 * M + rows
    tl.store(out, m, mask=rows < M)
    tl.store(out + M, s, mask=rows < M)
    tl.store(out + 2 * M, t, mask=rows < M)
    tl.store(out + 3 * M, z_y, mask=rows < M)


@triton.jit
def _dlogits(
    h, w, bias, targets, lse, slope, offset, at_target, dz, M, V, D, scale,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One tile of dz (M, V) = p (slope log p + offset) + at_target onehot; slope None means 0."""
    row_block, tile = _place(tl.cdiv(M, BM), tl.cdiv(V, BV), GROUP)
    rows, columns = row_block * BM + tl.arange(0, BM), tile * BV + tl.arange(0, BV)
    z = _logits(h, w, bias, row_block * BM, tile * BV, M, V, D, scale, BM, BV, BD, DESCRIPTOR)
    inside = rows < M
    logp = z - tl.load(lse + rows, mask=inside, other=0.0)[:, None]
    factor = tl.load(offset + rows, mask=inside, other=0.0)[:, None]
    if slope is not None:
        factor += tl.load(slope + rows, mask=inside, other=0.0)[:, None] * logp
    y = tl.load(targets + rows, mask=inside, other=-1)[:, None]
    at_y = tl.load(at_target + rows, mask=inside, other=0.0)[:, None]
    value = tl.exp(logp) * factor + tl.where(columns[None, :] == y, at_y, 0.0)
    out = dz + rows.to(tl.int64)[:, None] * V + columns[None, :]
    mask = inside[:, None] & (columns < V)[None, :]
    tl.store(out, value.to(dz.dtype.element_ty), mask=mask)


def _launch(h: Tensor, w: Tensor) -> tuple:
    """What the kernels read h and w through (descriptors or tensors), and their launch options."""
    key = "fp32"
    if h.dtype != torch.float32:
        # Consumer chips of capability 12 have the shared memory of sm_80, not of sm_90.
        key = "sm90" if torch.cuda.get_device_capability(h.device)[0] in (9, 10) else "sm80"
    BM, BV, BD, num_warps, num_stages, descriptor = BLOCKS[key]
    descriptor &= all(x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 for x in (h, w))
    if descriptor:
        h = TensorDescriptor.from_tensor(h, [BM, BD])
        w = TensorDescriptor.from_tensor(w, [BV, BD])
    options = dict(BM=BM, BV=BV, BD=BD, GROUP=GROUP, DESCRIPTOR=descriptor)
    return h, w, options | dict(num_warps=num_warps, num_stages=num_stages)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, logsumexp), each (M,) float32; scale is 1 / temperature."""
    (M, D), V = hidden.shape, len(weight)
    h, w, options = _launch(hidden, weight)
    row_blocks, tiles = triton.cdiv(M, options["BM"]), triton.cdiv(V, options["BV"])
    chip = 1
    if hidden.is_cuda:
        chip = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    splits = min(tiles, max(MIN_SPLITS, triton.cdiv(2 * chip, row_blocks)))
    stats = hidden.new_empty(splits, 4, M, dtype=torch.float32)
    grid = (row_blocks * splits,)
    with torch.cuda.device_of(hidden):
        _forward[grid](h, w, bias, targets, stats, M, V, D, scale, splits, **options)

    # The splits are merged like the tiles in the kernel, all at once.
    m, s, t, z_y = stats.unbind(1)
    peak = m.amax(0)
    r = (m - peak).exp()
    t = (r * (t + (m - peak) * s)).sum(0)
    s = (r * s).sum(0)
    return z_y.sum(0) - peak - s.log(), s.log() - t / s, peak + s.log()


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Rows of dlogits held at once in the backward, whole row blocks."""
    return max(128, CHUNK_ELEMENTS // vocab // 128 * 128)


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
    (M, D), V = h.shape, len(w)
    dz = h.new_empty(M, V)
    h, w, options = _launch(h, w)
    grid = (triton.cdiv(M, options["BM"]) * triton.cdiv(V, options["BV"]),)
    per_row = (targets, lse, slope, offset, at_target)
    with torch.cuda.device_of(dz):
        _dlogits[grid](h, w, bias, *per_row, dz, M, V, D, scale, **options)
    return dz
