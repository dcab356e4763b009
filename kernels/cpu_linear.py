"""Matrices in the layout that a CPU multiplies fastest by, for decoding.

A decode step multiplies few rows by every matrix of the model, so reading the matrices is most of
its time. They do not change during a rollout: a second copy in oneDNN's own layout, made once, is
read 1.3 to 2.5 times as fast as by `F.linear`. torch offers this only as the private operations to
which its inductor compiles linear layers, which have no gradient.
"""

import torch
from torch import Tensor

SMALL = 100_000  # elements; smaller matrices are transposed, not put into oneDNN's layout


def reorder(weight: Tensor) -> Tensor | None:
    """A copy of `weight` (out, in) for `linear`. None: oneDNN does not multiply this dtype here, so
    keep to `F.linear`.
    """
    supported = {torch.float32: True, torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported()}
    if not supported.get(weight.dtype):
        return None  # not transposed either: torch's own bfloat16 loops are 10x slower then
    if weight.numel() < SMALL:
        return weight.detach().T.contiguous()
    # None: the number of rows of x is not known yet.
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)


def linear(x: Tensor, reordered: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with what `reorder` returned: x (N, in) -> (N, out), without a gradient."""
    # "none", [], "": no activation fused into the product.
    if reordered.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "none", [], "")
    return torch.mm(x, reordered) if bias is None else torch.addmm(bias, x, reordered)
