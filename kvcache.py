"""Keys and values of running sequences in pages, and attention over them.

Memory grows with the tokens that are held, not with slots x longest response, and sequences that
begin alike share the pages of their beginning: a prompt is held, and on a CPU read, once per group.
"""

import heapq
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# attend(layer, q (M, H, d), k (M, KV, d), v (M, KV, d)) -> (M, H, d)
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class View(NamedTuple):
    """Which pages the rows of a decode batch read: B rows, P pages of the pool, S shared pages."""

    table: Tensor  # (B, W) int32: the pages of each row, in order
    owners: Tensor  # (P,) int64: the one row that reads a page
    starts: Tensor  # (P,) int64: position of its first token in that row; huge: nobody reads it
    shared: Tensor  # (S,) int64: full pages that several rows read
    sharers: Tensor  # (S, R) int64: those rows, -1 where there are fewer than R


class KVCache:
    """A pool of pages of `page` tokens, at most `max_pages`, that grows on demand.

    keys[layer], values[layer]: (pages, kv_heads, page, d) in the compute dtype of the decoder.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        kv_heads: int,
        size: int,
        *,
        page: int,
        max_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.page, self.max_pages = page, max_pages
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        new = lambda: torch.zeros(0, kv_heads, page, size, dtype=dtype, device=device)
        self.keys, self.values = ([new() for _ in range(layers)] for _ in range(2))
        self.users: list[int] = []  # of every page of the pool
        self.free: list[int] = []  # heap: the lowest page first keeps the used ones together
        self.kernel = paged_kernel() if new().is_cuda and dtype != torch.float32 else None

    # -- pages

    @property
    def available(self) -> int:
        """Pages that can still be taken."""
        return self.max_pages - len(self.users) + len(self.free)

    def pages(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page)

    def take(self, count: int) -> list[int]:
        """Pages for one user; at most `available`."""
        if count > len(self.free):
            self._grow(len(self.users) + count - len(self.free))
        taken = [heapq.heappop(self.free) for _ in range(count)]
        for p in taken:
            self.users[p] = 1
        return taken

    def share(self, pages: Sequence[int]) -> list[int]:
        """The same pages for one more user."""
        for p in pages:
            self.users[p] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """One user less; a page without a user is free."""
        for p in pages:
            self.users[p] -= 1
            if not self.users[p]:
                heapq.heappush(self.free, p)

    def _grow(self, least: int) -> None:
        """Enlarge the pool by a half, layer by layer: both copies of all layers may not fit."""
        old = len(self.users)
        new = min(self.max_pages, max(least, old * 3 // 2, 64))
        for store in (self.keys, self.values):
            for layer, tensor in enumerate(store):
                store[layer] = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, new - old))
        self.users += [0] * (new - old)
        for p in range(old, new):
            heapq.heappush(self.free, p)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill pages with the content of others: (source, target) pairs."""
        if pairs:
            sources, targets = map(list, zip(*pairs, strict=True))
            for tensor in self.keys + self.values:
                tensor[targets] = tensor[sources]

    def tidy(self, tables: Sequence[list[int]]) -> None:
        """Move the used pages to the front if most are holes; `tables`, all lists of pages in use,
        follow in place. Plain decoding reads the pool up to its last used page.
        """
        used = [p for p, users in enumerate(self.users) if users]
        if self.kernel or 2 * len(used) > used[-1]:
            return
        for tensor in self.keys + self.values:
            tensor[: len(used)] = tensor[used]
        moved = {p: i for i, p in enumerate(used)}
        for table in tables:
            table[:] = [moved[p] for p in table]
        self.users = [self.users[p] for p in used] + [0] * (len(self.users) - len(used))
        self.free = list(range(len(used), len(self.users)))

    # -- attention

    @torch.no_grad()
    def prefill(self, pieces: Sequence[tuple[list[int], int, int]]) -> Attend:
        """Causal attention of new tokens over their sequence so far; also stores them.

        A piece (pages, start, end) is one sequence: tokens start..end - 1 are packed in the input,
        those before `start` are in the pages already.
        """
        tensor = partial(torch.tensor, device=self.keys[0].device)
        lengths = [end - start for _, start, end in pieces]
        position = [t for _, start, end in pieces for t in range(start, end)]
        place = tensor([p[t // self.page] for p, a, b in pieces for t in range(a, b)])
        offset = tensor(position) % self.page
        bounds = [0, *accumulate(lengths)]
        cu_seqlens = tensor(bounds, dtype=torch.int32)
        ends = tensor([end for _, _, end in pieces], dtype=torch.int32)
        table = tensor(padded([p for p, _, _ in pieces], 0), dtype=torch.int32)
        sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[place, :, offset] = k
            values[place, :, offset] = v
            if self.kernel:
                longest = max(lengths)
                return self.kernel(q, keys, values, cu_seqlens, longest, ends, table)
            out = []
            for i, (_, start, end) in enumerate(pieces):
                new = slice(bounds[i], bounds[i + 1])
                # Given three dimensions SDPA is up to 8x slower.
                query, key, value = (x[new].transpose(0, 1)[None] for x in (q, k, v))
                if start == 0:
                    out.append(sdpa(query, key, value, is_causal=True)[0])
                    continue
                held = table[i, : self.pages(end)]
                key, value = (
                    s[held].transpose(0, 1).flatten(1, 2)[:, :end] for s in (keys, values)
                )
                seen = q.new_ones(end - start, end, dtype=torch.bool).tril(start)
                out.append(sdpa(query, key[None], value[None], attn_mask=seen)[0])
            return torch.cat(out, 1).transpose(0, 1)

        return attend

    def view(self, tables: Sequence[list[int]], shared: Sequence[int]) -> View:
        """Page table of a decode batch; the first shared[i] pages of row i have other readers."""
        used = 1 + max(max(pages) for pages in tables)
        owners, starts = [0] * used, [1 << 62] * used
        sharers: dict[int, list[int]] = defaultdict(list)
        for row, (pages, count) in enumerate(zip(tables, shared, strict=True)):
            for i, p in enumerate(pages):
                if i < count:
                    sharers[p].append(row)
                else:
                    owners[p], starts[p] = row, i * self.page
        tensor = partial(torch.tensor, device=self.keys[0].device)
        return View(
            tensor(padded(tables, 0), dtype=torch.int32),
            tensor(owners),
            tensor(starts),
            tensor(list(sharers), dtype=torch.long),
            tensor(padded(list(sharers.values()), -1), dtype=torch.long),
        )

    @torch.no_grad()
    def decode(self, view: View, lengths: Tensor) -> Attend:
        """Attention of one new token per row: row i is stored at, and sees, position lengths[i].

        Nothing here waits for the device.
        """
        kv_heads, page, size = self.kv_heads, self.page, self.size
        arange = partial(torch.arange, device=lengths.device)
        places = view.table.gather(1, (lengths // page)[:, None]) * kv_heads + arange(kv_heads)
        cells = (places * page + (lengths % page)[:, None]).flatten()
        if self.kernel:
            ends = (lengths + 1).to(torch.int32)
            one_each = arange(len(lengths) + 1, dtype=torch.int32)
        else:
            parts = self._parts(view, lengths)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys.view(-1, size).index_copy_(0, cells, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, cells, v.reshape(-1, size))
            if self.kernel:
                return self.kernel(q, keys, values, one_each, 1, ends, view.table)
            read = lambda pool, pages: pool[pages].flatten(0, 1)
            chosen = [(read(keys, p), read(values, p), *rest) for p, *rest in parts]
            return attention_by_page(q.reshape(len(q) * kv_heads, -1, size), chosen).view(q.shape)

        return attend

    def _parts(self, view: View, lengths: Tensor) -> list[tuple[Tensor | slice, Tensor, Tensor]]:
        """Pages, readers and mask for `attention_by_page`: the rows' own pages, the shared ones."""
        kv_heads = torch.arange(self.kv_heads, device=lengths.device)[:, None]
        readers = lambda rows: (rows[:, None] * self.kv_heads + kv_heads).flatten()
        masked = lambda hidden: (
            torch.zeros(hidden.shape, device=hidden.device)
            .masked_fill_(hidden, -torch.inf)
            .repeat_interleave(self.kv_heads, 0)
        )
        ends = lengths[view.owners] + 1 - view.starts
        unseen = torch.arange(self.page, device=lengths.device) >= ends[:, None]
        own = readers(view.owners[:, None]), masked(unseen)[:, None]
        parts = [(slice(len(view.owners)), *own)]
        if len(view.shared):
            absent = (view.sharers < 0).repeat_interleave(self.heads // self.kv_heads, 1)
            shared = readers(view.sharers.clamp(min=0)), masked(absent)[:, :, None]
            parts.append((view.shared, *shared))
        return parts


def padded(rows: Sequence[list[int]], fill: int) -> list[list[int]]:
    """Rows of equal length."""
    width = max(map(len, rows), default=0)
    return [row + [fill] * (width - len(row)) for row in rows]


def attention_by_page(q: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Tensor:
    """Softmax attention of q (B, G, d), summed page by page: no page is copied, none is padded.

    A part is keys and values (P, page, d); readers (P * R,), the rows of q that read each page; and
    a mask added to the scores (P, R * G, page), where sizes of 1 expand. Returns (B, G, d).
    """
    rows, group, size = q.shape
    top = q.new_full((rows, group), -torch.inf, dtype=torch.float32)
    total, out = torch.zeros_like(top), top.new_zeros(rows, group * size)
    scores = []
    for keys, _, readers, mask in parts:
        queries = q.view(rows, -1).index_select(0, readers).view(len(keys), -1, size)
        score = torch.baddbmm(mask, queries.float(), keys.mT.float(), alpha=size**-0.5)
        highest = score.amax(-1).view(-1, group)
        top.scatter_reduce_(0, readers[:, None].expand(-1, group), highest, "amax")
        scores.append(score)
    for (keys, values, readers, _), score in zip(parts, scores, strict=True):
        weights = score.sub_(top.index_select(0, readers).view(len(keys), -1, 1)).exp_()
        total.index_add_(0, readers, weights.sum(-1).view(-1, group))
        out.index_add_(0, readers, torch.bmm(weights, values.float()).view(len(readers), -1))
    return (out.view(q.shape) / total[:, :, None]).to(q.dtype)


@cache
def paged_kernel() -> Callable | None:
    """kernel(q, keys, values, cu_seqlens, longest, ends, table) of flash-attn, else of torch, else
    None: causal attention of packed q over pages (P, KV, page, d). CUDA and 16 bits only.
    """
    by_token = lambda pages: pages.transpose(1, 2)  # a view: the kernels take any stride but d's
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        def kernel(q, keys, values, cu_seqlens, longest, ends, table):
            keys, values = by_token(keys), by_token(values)
            if longest == 1:  # splits long sequences over the device
                lengths = {"cache_seqlens": ends, "block_table": table, "causal": True}
                return flash_attn_with_kvcache(q[:, None], keys, values, **lengths)[:, 0]
            reach, cu_ends = table.shape[1] * keys.shape[1], F.pad(ends.cumsum(0), (1, 0)).int()
            spans = cu_seqlens, cu_ends, longest, reach
            return flash_attn_varlen_func(q, keys, values, *spans, causal=True, block_table=table)

        return kernel
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return None
    fixed = {"window_size": (-1, 0), "enable_gqa": True}
    return lambda q, keys, values, cu_seqlens, longest, ends, table: varlen_attn(
        q, by_token(keys), by_token(values), cu_seqlens, None, longest,
        table.shape[1] * keys.shape[2], seqused_k=ends, block_table=table, **fixed,
    )  # fmt: skip
