"""Which attention kernel a GPU uses: flash-attn where it is installed, else torch's `varlen_attn`.

Two uses, each with its own signature that hides whose kernel runs: sequences packed end to end
(training, model.py) and keys and values in pages (sampling, sampler/kvcache.py). Both kernels take
CUDA tensors in 16 bits only; for everything else, and where these functions return None, the caller
has a path of plain torch operations.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# attend(layer, q (M, H, d), k (M, KV, d), v (M, KV, d)) -> (M, H, d): how M new tokens attend to
# each other and to what is stored. The decoder is given one and knows nothing else of attention.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# How varlen_attn is told "causal" (everything to the left, nothing to the right), and that several
# query heads share a head of keys and values.
CAUSAL = {"window_size": (-1, 0), "enable_gqa": True}


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """torch's attention of q (B, H, L, d) to k, v (B, KV, L', d), where H / KV heads share a k, v.

    On a GPU this runs only where no kernel of this file does: float32, or an old GPU. There torch
    serves shared heads with its "math" kernel alone, whose L x L' scores take 68 GB for 32k tokens
    and 16 heads; with repeated keys and values it has one that never stores the scores.
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **options)


def too_old_a_gpu() -> bool:
    """Whether there is a GPU, but one that cannot run FlashAttention-2; warns if so."""
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    if major >= 8:
        return False
    warnings.warn(
        f"This GPU has compute capability {major}.{minor}, FlashAttention needs 8.0; attention "
        "runs with plain torch operations, which are slower.",
        stacklevel=1,
    )
    return True


def usable_flash_attn() -> ModuleType | None:
    """The package flash-attn, version 2 with page tables; None, with a warning if there is one that
    cannot be used.
    """
    if not find_spec("flash_attn"):
        return None
    try:
        # The package of FlashAttention-4 has the name too, but not these functions, and a build for
        # another torch fails in its own way.
        import flash_attn
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
            if "block_table" not in inspect.signature(function).parameters:
                raise ImportError(f"{function.__name__} has no page tables")
    except Exception as error:
        # Both kernels below ask, but Python shows the warning of one line once.
        warnings.warn(
            f"flash-attn is installed but cannot be used ({error}); attention runs with torch's "
            "own kernel. Install flash-attn 2.6 or newer, built for this torch, or remove it.",
            stacklevel=1,
        )
        return None
    return flash_attn


def takes_cumulative_keys() -> bool:
    """Whether torch's kernel for pages wants cu_seq_k: FlashAttention-2 does (without reading it),
    FlashAttention-3 and -4, which a user may activate, refuse it.
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current is None or current() not in ("FA3", "FA4")


@cache
def varlen_kernel() -> Callable | None:
    """kernel(q (M, H, d), k, v (M, KV, d), cu_seqlens (S + 1,) int32, max_seqlen) -> (M, H, d):
    causal attention within each of S packed sequences. None: no kernel is installed.
    """
    if too_old_a_gpu():
        return None
    if package := usable_flash_attn():

        def flash(q, k, v, cu_seqlens, longest):
            # The same boundaries twice: queries and keys are the same tokens.
            return package.flash_attn_varlen_func(
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
    if too_old_a_gpu():
        return None
    if package := usable_flash_attn():

        def flash(q, keys, values, cu_seqlens, longest, ends, table):
            keys, values = by_token(keys), by_token(values)
            if longest == 1:  # this one splits long sequences over the device
                out = package.flash_attn_with_kvcache(
                    q[:, None], keys, values, cache_seqlens=ends, block_table=table, causal=True
                )
                return out[:, 0]
            # An upper bound: the most keys that a table of this width can hold.
            reach = table.shape[1] * keys.shape[1]
            # This call wants running sums of the stored tokens, `ends` are of each sequence alone.
            cu_ends = F.pad(ends.cumsum(0), (1, 0)).int()
            return package.flash_attn_varlen_func(
                q, keys, values, cu_seqlens, cu_ends, longest, reach,
                causal=True, block_table=table,
            )  # fmt: skip

        return flash
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None  # torch 2.13 has page tables

    cumulative_keys = takes_cumulative_keys()
    # From torch 2.13 on FlashAttention-2 splits long rows over the device, and where it does the
    # results of all rows but the first are never written (pytorch/pytorch#194167).
    splits_wrongly = cumulative_keys and torch_version() >= (2, 13)

    def of_torch(q, keys, values, cu_seqlens, longest, ends, table):
        reach = table.shape[1] * keys.shape[2]
        # One query sees all stored keys, so it needs no causal window; and only without one are the
        # query heads that share a key packed into one block, which reads the key once for all.
        window = (-1, -1) if longest == 1 else (-1, 0)
        packed = longest == 1 and q.shape[1] > keys.shape[1]  # there splitting is right
        options = {"num_splits": 1} if splits_wrongly and not packed else {}
        return varlen_attn(
            q, by_token(keys), by_token(values), cu_seqlens,
            cu_seqlens if cumulative_keys else None, longest, reach, window_size=window,
            enable_gqa=True, seqused_k=ends, block_table=table, **options,
        )  # fmt: skip

    return of_torch


def torch_version() -> tuple[int, int]:
    """(2, 13) for 2.13.0+cu130."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def by_token(pages: Tensor) -> Tensor:
    """(P, KV, page, d) -> (P, page, KV, d), as the kernels want it.

    A view: they take any stride but that of the last dimension.
    """
    return pages.transpose(1, 2)
