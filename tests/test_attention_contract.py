"""torch's attention kernel for pages is called as it demands: the real `varlen_attn`, down to its
operator, which is run here on the CPU with the checks and the faults of the CUDA code.
"""

import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from kernels import attention
from kernels.attention import paged_kernel, varlen_kernel

SIZE, PAGE, MULTIPROCESSORS = 64, 256, 132
pytestmark = pytest.mark.skipif(
    "num_splits" not in inspect.signature(varlen_attn).parameters, reason="torch without pages"
)


def check(condition, message):
    if not condition:
        raise RuntimeError(message)


def attend(q, k, v, causal):
    """q (L, H, d), k, v (L2, KV, d) -> (L, H, d) in float32; the last query is at the last key."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen = seen.tril(k.shape[1] - q.shape[1]) if causal else seen
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def stored(pages, table, length):
    """The first `length` keys of one sequence; pages (P, page, KV, d)."""
    return pages[table.long()].flatten(0, 1)[:length]


@pytest.fixture
def operator(monkeypatch):
    """aten::_flash_attention_forward on the CPU: mha_varlen_fwd of FlashAttention-2 in torch 2.13,
    or, with `.impl` "FA3", of FlashAttention-3. `.packed`: for every call, whether the query heads
    that share a key went into one block.
    """
    state = SimpleNamespace(impl=None, packed=[])
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    monkeypatch.setattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: state.impl, raising=False
    )
    monkeypatch.setattr(attention, "torch_version", lambda: (2, 13), raising=False)

    def forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
        seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        if state.impl == "FA3":
            check(
                cum_seq_k is None or block_table is None,
                "cu_seqlens_k is not supported with a page table",
            )
        else:
            check(
                (cum_seq_q is None) == (cum_seq_k is None),
                "cumulative_sequence_length_q and cumulative_sequence_length_k must be both set or "
                "both not set",
            )
            check(cum_seq_k.dtype == torch.int32, "cu_seqlens_k must have dtype int32")
            check(len(cum_seq_k) == len(cum_seq_q), "cu_seqlens_k must have shape (batch_size + 1)")
        check(query.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
        check(cum_seq_q.dtype == torch.int32, "cu_seqlens_q must have dtype int32")
        check(query.stride(-1) == key.stride(-1) == 1, "the last dimension must be contiguous")
        check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        check(seqused_k.dtype == torch.int32, "seqused_k must have dtype int32")
        check(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        check(key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        check(max_q >= cum_seq_q.diff().max() and max_k >= seqused_k.max(), "longer than said")
        rows, heads, kv_heads = len(seqused_k), query.shape[1], key.shape[2]
        causal = is_causal or window_size_right == 0
        packed = (
            max_q == 1 and heads > kv_heads and window_size_left < 0 and window_size_right < 0
            and not is_causal
        )  # fmt: skip
        state.packed.append(packed)
        pieces = zip(query.split(cum_seq_q.diff().tolist()), seqused_k, block_table, strict=True)
        out = [
            attend(q, stored(key, t, int(n)), stored(value, t, int(n)), causal)
            for q, n, t in pieces
        ]
        # num_splits_heuristic: few blocks are split along the keys to fill the device, and the rows
        # after the first are written to the first (o_batch_stride is 0 unless packed).
        few = rows * heads * -(-max_q // 64) < 0.8 * 2 * MULTIPROCESSORS
        if state.impl is None and not packed and num_splits != 1 and few:
            out[1:] = [torch.full_like(x, torch.nan) for x in out[1:]]
        empty = torch.zeros(0)
        return torch.cat(out).to(query.dtype), empty, empty, empty, empty

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    yield state
    library._destroy()


def run(lengths, stored_before, heads, kv_heads):
    """Result and reference of one call: `lengths[i]` new tokens after `stored_before[i]`."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    ends = torch.tensor([a + b for a, b in zip(lengths, stored_before, strict=True)])
    width = -(-int(ends.max()) // PAGE)
    count = len(lengths) * width
    pool = [rand(count + 1, kv_heads, PAGE, SIZE) for _ in range(2)]
    table = (torch.randperm(count, generator=generator) + 1).view(len(lengths), width).int()
    q = rand(sum(lengths), heads, SIZE)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    kernel = paged_kernel.__wrapped__()
    got = kernel(q, *pool, cu_seqlens, max(lengths), ends.int(), table)
    keys, values = (x.transpose(1, 2) for x in pool)
    expected = [
        attend(part, stored(keys, row, int(end)), stored(values, row, int(end)), True)
        for part, row, end in zip(q.split(lengths), table, ends, strict=True)
    ]
    return got.float(), torch.cat(expected)


CALLS = {
    "decode": ([1] * 4, [300, 5, 600, 0], 8, 2),
    "decode without shared heads": ([1] * 4, [300, 5, 600, 0], 4, 4),
    "prefill": ([7, 3, 20], [0, 0, 0], 8, 2),
    "prefill of a chunk": ([7, 3], [500, 0], 8, 2),
    "prefill of one token each": ([1, 1], [0, 0], 8, 2),
}


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("impl", [None, "FA3"])
def test_pages_are_read_without_refusal_and_every_row_is_written(operator, impl, call):
    operator.impl = impl
    got, expected = run(*CALLS[call])
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_decoding_reads_shared_keys_once_for_all_their_query_heads(operator):
    run(*CALLS["decode"])
    assert operator.packed == [True]


@torch.no_grad()
def test_num_splits_is_not_given_to_a_torch_that_refuses_it(operator, monkeypatch):
    monkeypatch.setattr(attention, "torch_version", lambda: (2, 12))
    given = []
    real = attention.varlen_attn

    def watched(*args, **options):
        given.append(options.get("num_splits"))
        return real(*args, **options)

    watched.__signature__ = inspect.signature(real)
    monkeypatch.setattr(attention, "varlen_attn", watched)
    run(*CALLS["prefill"])
    assert given == [None]


class Broken:
    """A package without the functions, as flash-attn-4 has."""


def old_flash_attn():
    """flash-attn before 2.5: no page tables."""

    def function(q, k, v):
        pass

    return SimpleNamespace(flash_attn_varlen_func=function, flash_attn_with_kvcache=function)


@pytest.mark.parametrize("package", [Broken(), old_flash_attn()], ids=["other", "old"])
def test_a_flash_attn_that_cannot_be_used_costs_one_warning(package, monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        kernels = varlen_kernel.__wrapped__(), paged_kernel.__wrapped__()
    assert all(k.__name__ == "of_torch" for k in kernels)
    assert len(caught) == 1 and "flash-attn is installed but cannot be used" in str(caught[0])


def test_a_gpu_below_compute_capability_8_gets_no_flash_kernel(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert varlen_kernel.__wrapped__() is None and paged_kernel.__wrapped__() is None
    assert len(caught) == 1 and "compute capability" in str(caught[0].message)
