"""Keys and values of running sequences in pages, and attention over them.

Memory grows with the tokens that are held, not with slots x longest response, and sequences that
begin alike share the pages of their beginning: a prompt is held, and on a CPU read, once per group.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import Attend, paged_kernel


class Part(NamedTuple):
    """P pages of the pool, each with R readers; a reader is one KV head of one row."""

    pages: slice
    readers: Tensor  # (P * R,) int64: whose queries meet each page; any if there are fewer than R
    takers: Tensor  # (P * R,) int64: who gets the outcome; one behind the last for nobody


class View(NamedTuple):
    """Which pages the rows of a decode batch read. B rows, at most W pages each, H heads.

    `gather` and `scatter` are of plain decoding: scores, computed page by page, one line of `page`
    for every head that reads it, are put in the order of the rows, and back.
    """

    table: Tensor  # (B, W) int32: the pages of each row, in order
    parts: Sequence[Part] = ()
    gather: Tensor | None = None  # (B * H * W,) int64: the line of scores for head and page
    scatter: Tensor | None = None  # (lines,) int64: the opposite way


class KVCache:
    """A pool of pages of `page` tokens that grows on demand; at most `max_pages` can be taken.

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
        new = lambda: torch.zeros(1, kv_heads, page, size, dtype=dtype, device=device)
        self.keys, self.values = ([new() for _ in range(layers)] for _ in range(2))
        self.users = [1]  # of every page of the pool; page 0 stands for none and is nobody's
        self.free: list[int] = []  # ascending
        self.kernel = paged_kernel() if new().is_cuda and dtype != torch.float32 else None

    # -- pages

    @property
    def available(self) -> int:
        """Pages that can still be taken."""
        return self.max_pages + 1 - len(self.users) + len(self.free)

    def pages(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page)

    def take(self, count: int, shared: bool = False) -> list[int]:
        """Pages for one user, who will share them or not; at most `available`.

        The lowest free ones, or the highest: see `compact`.
        """
        if count > len(self.free):
            self.grow(max(2 * len(self.users), 64, len(self.users) + count - len(self.free)))
        cut = len(self.free) - count if shared else count
        low, high = self.free[:cut], self.free[cut:]
        taken, self.free = (high, low) if shared else (low, high)
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
                insort(self.free, p)

    def grow(self, pages: int) -> None:
        """Enlarge the pool to so many pages, `max_pages` and page 0 at most; layer by layer,
        because both copies of all layers may not fit.
        """
        old, new = len(self.users), min(self.max_pages + 1, pages)
        for store in (self.keys, self.values):
            for layer, tensor in enumerate(store):
                store[layer] = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, new - old))
        self.users += [0] * (new - old)
        self.free += range(old, new)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fill pages with the content of others: (source, target) pairs, all at the same time."""
        if len(pairs):
            sources, targets = torch.as_tensor(pairs, device=self.keys[0].device).T
            for tensor in self.keys + self.values:  # on a CPU 8x faster than tensor[targets] = ...
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def compact(self, holders: Iterable[list[int]]) -> None:
        """Move pages such that those of one user are the first of the pool and shared ones the
        last; `holders`, all lists of pages there are, are changed in place.

        Plain decoding reads all pages between the first and the last of a kind, so this is done
        when they lie scattered over a quarter more than they need; a kernel reads its rows' alone.
        """
        if self.kernel:
            return
        users = np.array(self.users)
        alone, shared = (users == 1).nonzero()[0], (users > 1).nonzero()[0]
        scattered = lambda pages: len(pages) and pages[-1] - pages[0] >= 1.25 * len(pages)
        if not (scattered(alone) or scattered(shared)):
            return
        where = np.arange(len(users))
        for pages, first in ((alone, 0), (shared, len(users) - len(shared))):
            places = np.arange(first, first + len(pages))
            # Those that lie elsewhere, into the places that lack one.
            where[np.setdiff1d(pages, places)] = np.setdiff1d(places, pages)
        sources = (where != np.arange(len(users))).nonzero()[0]
        self.copy(np.stack([sources, where[sources]], 1))
        moved, users[sources] = users[sources], 0
        users[where[sources]] = moved
        self.users, self.free = users.tolist(), (users == 0).nonzero()[0].tolist()
        for pages in holders:
            pages[:] = where[pages].tolist()

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
                    s.index_select(0, held).transpose(0, 1).flatten(1, 2)[:, :end]
                    for s in (keys, values)
                )
                seen = q.new_ones(end - start, end, dtype=torch.bool).tril(start)
                out.append(sdpa(query, key[None], value[None], attn_mask=seen)[0])
            return torch.cat(out, 1).transpose(0, 1)

        return attend

    def view(self, tables: Sequence[list[int]]) -> View:
        """Page table of a decode batch, given the pages of each row."""
        table = np.array(padded(tables, 0))
        tensor = partial(torch.as_tensor, device=self.keys[0].device)
        if self.kernel:
            return View(tensor(table, dtype=torch.int32))
        (rows, width), group = table.shape, self.heads // self.kv_heads
        column, kv_head = np.arange(width), np.arange(self.kv_heads)[:, None]
        held = column < np.array([len(pages) for pages in tables])[:, None]
        shared = np.array(self.users)[table] > 1
        parts, count = [], 0
        # The line of scores of a page and reader: its first head; how far on the next KV head is.
        first, apart = np.zeros_like(table), np.zeros_like(table)
        # Apart, because all pages of a part are multiplied as often as that with most readers.
        for chosen in (held & ~shared, held & shared):
            if not chosen.any():
                continue
            read = table[chosen]
            low, high = read.min(), read.max() + 1
            which, rank = read - low, readings_before(read)
            most = rank.max() + 1
            readers = np.full((high - low, most), rows)
            readers[which, rank] = chosen.nonzero()[0]
            by_head = (readers[:, None] * self.kv_heads + kv_head).ravel()
            met = by_head.clip(max=rows * self.kv_heads - 1)
            parts.append(Part(slice(low, high), tensor(met), tensor(by_head)))
            first[chosen] = count + (which * self.kv_heads * most + rank) * group
            apart[chosen] = most * group
            count += len(by_head) * group
        lines = first[:, None, None] + apart[:, None, None] * kv_head[:, None]
        lines = lines + np.arange(group)[:, None]  # (B, KV, G, W)
        order = np.arange(lines.size).reshape(lines.shape)
        held = np.broadcast_to(held[:, None, None], lines.shape)
        back = np.zeros(count, dtype=np.int64)
        back[lines[held]] = order[held]
        return View(tensor(table, dtype=torch.int32), parts, tensor(lines.ravel()), tensor(back))

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
            unseen = arange(view.table.shape[1] * page) > lengths[:, None]
            mask = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys.view(-1, size).index_copy_(0, cells, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, cells, v.reshape(-1, size))
            if self.kernel:
                return self.kernel(q, keys, values, one_each, 1, ends, view.table)
            return attention_by_page(q, keys, values, view, mask)

        return attend


def readings_before(pages: np.ndarray) -> np.ndarray:
    """pages (N,) -> how many of those before it are the same page (N,)."""
    order = np.argsort(pages, kind="stable")
    ascending = pages[order]
    before = np.empty_like(order)
    before[order] = np.arange(len(pages)) - np.searchsorted(ascending, ascending)
    return before


def padded(rows: Sequence[list[int]], fill: int) -> list[list[int]]:
    """Rows of equal length."""
    width = max(map(len, rows), default=0)
    return [row + [fill] * (width - len(row)) for row in rows]


def attention_by_page(q: Tensor, keys: Tensor, values: Tensor, view: View, mask: Tensor) -> Tensor:
    """Softmax attention of one query per row that pads no key, only scores.

    q (B, H, d); keys, values (pages, KV, page, d); mask (B, W * page) is added to the scores.
    Returns (B, H, d). Computes in at least float32.
    """
    (rows, heads, size), (_, kv_heads, page, _) = q.shape, keys.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = (q.to(wide) * size**-0.5).reshape(rows * kv_heads, -1)
    out = queries.new_zeros(len(queries) + kv_heads, queries.shape[1])
    read = lambda pool, part: pool[part.pages].flatten(0, 1).to(wide)
    scores = []
    for part in view.parts:
        k = read(keys, part)
        met = queries.index_select(0, part.readers).view(len(k), -1, size)
        scores.append(torch.bmm(met, k.mT).view(-1, page))
    counts = [len(x) for x in scores]
    by_row = torch.cat(scores).index_select(0, view.gather).view(rows, heads, -1)
    weights = by_row.add_(mask[:, None]).softmax(-1).view(-1, page).index_select(0, view.scatter)
    for part, w in zip(view.parts, weights.split(counts), strict=True):
        v = read(values, part)
        got = torch.bmm(w.view(len(v), -1, page), v).view(len(part.takers), -1)
        out.index_add_(0, part.takers, got)
    return out[: len(queries)].view(q.shape).to(q.dtype)
