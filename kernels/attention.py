"""Which attention kernel a GPU uses: flash-attn where it is installed, else torch's `varlen_attn`.

Two uses, each with its own signature that hides whose kernel runs: sequences packed end to end
(training, model.py) and keys and values in pages (sampling, sampler/kvcache.py). Both kernels take
CUDA tensors in 16 bits only; for everything else, and where these functions return None, the caller
has a path of plain torch operations.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# attend(layer, q (M, H, d), k (M, KV, d), v (M, KV, d)) -> (M, H, d): how M new tokens attend to
# each other and to what is stored. The decoder is given one and knows nothing else of attention.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# How varlen_attn is told "causal" (everything to the left, nothing to the right), and that several
# query heads share a head of keys and values.
CAUSAL = {"window_size": (-1, 0), "enable_gqa": True}


@cache
def varlen_kernel() -> Callable | None:
    """kernel(q (M, H, d), k, v (M, KV, d), cu_seqlens (S + 1,) int32, max_seqlen) -> (M, H, d):
    causal attention within each of S packed sequences. None: no kernel is installed.
    """
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func

        def flash(q, k, v, cu_seqlens, longest):
            # The same boundaries twice: queries and keys are the same tokens.
            return flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
            )

        return flash
    if not CAUSAL.keys() <= inspect.signature(varlen_attn).parameters.keys():
        return None  # torch 2.10 has neither argument

    def of_torch(q, k, v, cu_seqlens, longest):
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **CAUSAL)

    return of_torch


@cache
def paged_kernel() -> Callable | None:
    """kernel(q (M, H, d), keys, values (P, KV, page, d), cu_seqlens (S + 1,), longest, ends (S,),
    table (S, W)) -> (M, H, d): causal attention of S packed pieces of sequences over their pages.

    longest: most queries of one sequence. ends: stored tokens of each sequence, its own new ones
    included; a query of a piece sees all before it. table: the pages of each sequence, in order.
    All three integer tensors are int32. None: no kernel is installed.
    """
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        def flash(q, keys, values, cu_seqlens, longest, ends, table):
            keys, values = by_token(keys), by_token(values)
            if longest == 1:  # this one splits long sequences over the device
                out = flash_attn_with_kvcache(
                    q[:, None], keys, values, cache_seqlens=ends, block_table=table, causal=True
                )
                return out[:, 0]
            # An upper bound: the most keys that a table of this width can hold.
            reach = table.shape[1] * keys.shape[1]
            # This call wants running sums of the stored tokens, `ends` are of each sequence alone.
            cu_ends = F.pad(ends.cumsum(0), (1, 0)).int()
            return flash_attn_varlen_func(
                q, keys, values, cu_seqlens, cu_ends, longest, reach,
                causal=True, block_table=table,
            )  # fmt: skip

        return flash
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None  # torch 2.13 has page tables

    def of_torch(q, keys, values, cu_seqlens, longest, ends, table):
        reach = table.shape[1] * keys.shape[2]
        return varlen_attn(
            q, by_token(keys), by_token(values), cu_seqlens, None, longest, reach,
            seqused_k=ends, block_table=table, **CAUSAL,
        )  # fmt: skip

    return of_torch


def by_token(pages: Tensor) -> Tensor:
    """(P, KV, page, d) -> (P, page, KV, d), as the kernels want it.

    A view: they take any stride but that of the last dimension.
    """
    return pages.transpose(1, 2)
