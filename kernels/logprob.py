"""The fused head as two Triton kernels: the logits never leave the chip.

`forward` gives each program a block of rows and one split of the vocabulary and reduces that split to four numbers
per row; `dlogits` computes the same tiles again, now with the logsumexp known, and writes the gradient of a chunk of
rows. Shapes: h (M, D), w (V, D), tiles (BM, BV). TRITON_INTERPRET=1 runs both on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Tile: BM rows, BV columns, BD deep; then warps, pipeline stages, and whether tiles are loaded by descriptors. Those
# let the hardware check the bounds on sm_90; on older chips Triton emulates them and the registers overflow.
BLOCKS = {
    "sm90": (128, 256, 64, 8, 3, True),
    "sm80": (128, 128, 64, 8, 3, False),
    "fp32": (64, 128, 32, 8, 3, False),  # full float32 products, so no tensor cores
}
GROUP = 16  # row blocks that sweep the vocabulary together, so that what they read stays in L2
MIN_SPLITS = 8  # pieces of the vocabulary; short inputs take more, to fill the chip
CHUNK_ELEMENTS = 2**29  # of dlogits held at once in the backward: 1.07 GB in bf16
FAR_BELOW = tl.constexpr(-1e30)  # logit of a column that does not exist: not -inf, whose difference is NaN


@triton.jit
def _place(rows_blocks, columns_blocks, GROUP: tl.constexpr):
    """(row block, column block) of this program: GROUP row blocks finish all columns before the next GROUP starts."""
    pid = tl.program_id(0)
    first = pid // (GROUP * columns_blocks) * GROUP
    size = min(rows_blocks - first, GROUP)
    inside = pid % (GROUP * columns_blocks)
    return first + inside % size, inside // size


@triton.jit
def _load(x, row, column, n_rows, n_columns, BR: tl.constexpr, BC: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Tile (BR, BC) of a contiguous matrix, zero outside it."""
    if DESCRIPTOR:
        tile = x.load([row, column])
    else:
        r, c = row + tl.arange(0, BR), column + tl.arange(0, BC)
        inside = (r < n_rows)[:, None] & (c < n_columns)[None, :]
        tile = tl.load(x + r.to(tl.int64)[:, None] * n_columns + c[None, :], mask=inside, other=0.0)
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
    # Phantom columns of the last tile go before any max or exp: left at 0 they would win when all logits are low.
    return tl.where((columns < V)[None, :], z * scale, FAR_BELOW)


@triton.jit
def _forward(
    h, w, bias, targets, stats, M, V, D, scale, splits,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One split of the vocabulary for BM rows -> stats (4, splits, M) = m, s, t, z_y."""
    row_block, split = _place(tl.cdiv(M, BM), splits, GROUP)
    rows = row_block * BM + tl.arange(0, BM)
    y = tl.load(targets + rows, mask=rows < M, other=-1)

    m = tl.full((BM,), FAR_BELOW, tl.float32)  # max of the logits so far
    s = tl.zeros((BM,), tl.float32)  # sum of exp(z - m)
    t = tl.zeros((BM,), tl.float32)  # sum of exp(z - m) (z - m)
    z_y = tl.zeros((BM,), tl.float32)  # logit of the target, in the one split that has it
    tiles = tl.cdiv(V, BV)
    first, last = split * tiles // splits, (split + 1) * tiles // splits
    for tile in range(first, last):
        z = _logits(h, w, bias, row_block * BM, tile * BV, M, V, D, scale, BM, BV, BD, DESCRIPTOR)
        # The online logsumexp: a new maximum rescales what was summed under the old one.
        m_new = tl.maximum(m, tl.max(z, 1))
        r = tl.exp(m - m_new)
        shifted = z - m_new[:, None]
        p = tl.exp(shifted)
        t = r * (t + (m - m_new) * s) + tl.sum(p * shifted, 1)
        s = r * s + tl.sum(p, 1)
        m = m_new
        columns = tile * BV + tl.arange(0, BV)
        z_y += tl.sum(tl.where(columns[None, :] == y[:, None], z, 0.0), 1)

    out = stats + split.to(tl.int64) * M + rows
    part = splits.to(tl.int64) * M
    tl.store(out, m, mask=rows < M)
    tl.store(out + part, s, mask=rows < M)
    tl.store(out + 2 * part, t, mask=rows < M)
    tl.store(out + 3 * part, z_y, mask=rows < M)


@triton.jit
def _dlogits(
    h, w, bias, targets, lse, slope, offset, at_target, dz, M, V, D, scale,
    BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, GROUP: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """One tile of dz (M, V) = p (slope log p + offset) + at_target onehot; slope None stands for 0."""
    row_block, tile = _place(tl.cdiv(M, BM), tl.cdiv(V, BV), GROUP)
    rows, columns = row_block * BM + tl.arange(0, BM), tile * BV + tl.arange(0, BV)
    inside = rows < M
    z = _logits(h, w, bias, row_block * BM, tile * BV, M, V, D, scale, BM, BV, BD, DESCRIPTOR)
    logp = z - tl.load(lse + rows, mask=inside, other=0.0)[:, None]
    factor = tl.load(offset + rows, mask=inside, other=0.0)[:, None]
    if slope is not None:
        factor += tl.load(slope + rows, mask=inside, other=0.0)[:, None] * logp
    y = tl.load(targets + rows, mask=inside, other=-1)[:, None]
    peak = tl.load(at_target + rows, mask=inside, other=0.0)[:, None]
    d = tl.exp(logp) * factor + tl.where(columns[None, :] == y, peak, 0.0)
    out = dz + rows.to(tl.int64)[:, None] * V + columns[None, :]
    tl.store(out, d.to(dz.dtype.element_ty), mask=inside[:, None] & (columns < V)[None, :])


def _launch(h: Tensor, w: Tensor) -> tuple:
    """What the kernels read h and w through, and their launch options."""
    key = "fp32"
    if h.dtype != torch.float32:
        # Capability 12 (consumer chips) has sm_80's shared memory, not sm_90's.
        key = "sm90" if torch.cuda.get_device_capability(h.device)[0] in (9, 10) else "sm80"
    BM, BV, BD, num_warps, num_stages, descriptor = BLOCKS[key]
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 for x in (h, w))
    options = dict(BM=BM, BV=BV, BD=BD, GROUP=GROUP, num_warps=num_warps, num_stages=num_stages)
    options["DESCRIPTOR"] = descriptor and aligned
    if options["DESCRIPTOR"]:
        h, w = TensorDescriptor.from_tensor(h, [BM, BD]), TensorDescriptor.from_tensor(w, [BV, BD])
    return h, w, options


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, logsumexp), each (M,) float32; scale is 1 / temperature."""
    (rows, depth), vocab = hidden.shape, len(weight)
    h, w, options = _launch(hidden, weight)
    row_blocks, tiles = triton.cdiv(rows, options["BM"]), triton.cdiv(vocab, options["BV"])
    chip = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 1
    splits = min(tiles, max(MIN_SPLITS, triton.cdiv(2 * chip, row_blocks)))
    stats = hidden.new_empty(4, splits, rows, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _forward[(row_blocks * splits,)](h, w, bias, targets, stats, rows, vocab, depth, scale, splits, **options)
    return _merge(*stats)


def _merge(m: Tensor, s: Tensor, t: Tensor, z_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(splits, M) numbers of the kernel -> (logprobs, entropy, logsumexp): the rescaling, for all splits at once."""
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
    targets: Tensor,
    scale: float,
    lse: Tensor,
    slope: Tensor | None,
    offset: Tensor,
    at_target: Tensor,
) -> Tensor:
    """p * (slope * log p + offset) + at_target * onehot, (n, V) in h's dtype; slope None stands for 0."""
    (rows, depth), vocab = h.shape, len(w)
    dz = h.new_empty(rows, vocab)
    hd, wd, options = _launch(h, w)
    grid = (triton.cdiv(rows, options["BM"]) * triton.cdiv(vocab, options["BV"]),)
    with torch.cuda.device_of(h):
        _dlogits[grid](hd, wd, bias, targets, lse, slope, offset, at_target, dz, rows, vocab, depth, scale, **options)
    return dz
