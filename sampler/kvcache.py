"""Keys and values of running responses in pages, and attention over them.

Memory grows with the tokens that are stored, not with slots x longest response, and responses that
begin alike share the pages of their beginning: a prompt is stored, and on a CPU read, once per
group. Here with pages of 4 tokens: three responses a, b, c to a prompt of 9 stored tokens share its
two full pages, and each has a copy of the ninth token in its own first page:

    page in the pool     0        1   2   3   4   5   6   7    ...    98     99
    read by           padding     a   b   c   a   c   -   -          a b c  a b c
                                 `---- one user each ----'           `- shared -'
    table of a: 98 99 1 4     table of b: 98 99 2     table of c: 98 99 3 5
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
from transformers import PretrainedConfig

from kernels.attention import Attend, paged_kernel, sdpa
from model import head_size

# Share of the memory that a cache without a bound may fill: of what is free on a GPU, where the
# rest is for activations and logits, and of all memory of the machine on a CPU.
GPU_SHARE, HOST_SHARE = 0.8, 0.25


def bytes_per_token(model: PretrainedConfig, itemsize: int) -> int:
    """Bytes of the keys and values of one token in all layers, each number of `itemsize` bytes."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * head_size(model) * itemsize


class Part(NamedTuple):
    """P neighbouring pages of the pool and who reads them.

    A reader is one KV head of one row, with the number row * KV + head: its queries are those of
    the G query heads that share the KV head. Every page is padded to R readers, the most that one
    of these pages has.
    """

    pages: slice
    queries: Tensor  # (P * KV * R,) int64: the reader whose queries meet the page; padding: any
    outputs: Tensor  # (P * KV * R,) int64: the reader who gets the result; padding: B * KV or more


class View(NamedTuple):
    """How the B rows of a decode batch read the pool; at most W pages each, H query heads.

    Only the table is needed by a kernel. Plain attention multiplies page by page, so that a shared
    page is read once for all its readers, but takes the softmax over whole rows. The scores of one
    query head on one page are a line of `page` numbers, and the lines are moved between two orders:

        by page: (part, page, KV head, reader, query head of that reader)   from the multiplication
        by row:  (row, query head, column of the table)                     for the softmax
    """

    table: Tensor  # (B, W) int32: the pages of each row, in order; padding: page 0
    parts: Sequence[Part] = ()
    to_rows: Tensor | None = None  # (B * H * W,) int64: for each line by row, its number by page
    to_pages: Tensor | None = None  # (lines by page,) int64: for each of these, its number by row


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
        # Zeros, not empty: masked cells meet a weight of 0, and 0 times a stray NaN is NaN.
        first = torch.zeros(1, kv_heads, page, size, dtype=dtype, device=device)
        # A tensor per layer, so that growing needs one layer twice and not the whole pool.
        self.keys = [first.clone() for _ in range(layers)]
        self.values = [first.clone() for _ in range(layers)]
        self.users = [1]  # how many hold each page; page 0 is padding in tables, never handed out
        self.free: list[int] = []  # ascending
        # The kernels take CUDA tensors in 16 bits only.
        self.kernel = paged_kernel() if first.is_cuda and dtype != torch.float32 else None

    # -- pages

    @property
    def available(self) -> int:
        """Pages that can still be taken."""
        # + 1: page 0 is in `users`, but max_pages does not count it.
        return self.max_pages + 1 - len(self.users) + len(self.free)

    def pages(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page)

    def take(self, count: int, shared: bool = False) -> list[int]:
        """`count` free pages, at most `available`, for one user.

        The lowest ones, or the highest if they are to be shared: see `compact`.
        """
        if count > len(self.free):
            # Doubled, because growing copies the whole pool.
            self.grow(max(2 * len(self.users), 64, len(self.users) + count - len(self.free)))
        # `free` is ascending, so its two ends are the lowest and the highest pages.
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
        """One user fewer; a page without a user is free."""
        for p in pages:
            self.users[p] -= 1
            if not self.users[p]:
                # Kept ascending: `take` hands out its ends.
                insort(self.free, p)

    def grow(self, pages: int) -> None:
        """Enlarge the pool to this many pages, page 0 included, but not beyond `max_pages` + 1.

        Layer by layer, because the old and the new tensors of all layers may not fit together.
        """
        old, new = len(self.users), min(self.max_pages + 1, pages)
        for store in (self.keys, self.values):
            for layer, tensor in enumerate(store):
                # F.pad counts from the last dimension: only the first, pages, grows.
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
        """Move pages together: those of one user to the start of the pool, shared ones to its end.
        `holders`, every list of pages that anybody has, are changed in place.

        Plain attention reads all pages between the first and the last of a kind (`Part.pages` is
        a slice, because gathering pages would copy them in every layer and step). So pages are
        moved as soon as a kind lies scattered over a quarter more than it needs. A kernel reads
        only the pages in its table.
        """
        if self.kernel:
            return
        users = np.array(self.users)
        single, shared = (users == 1).nonzero()[0], (users > 1).nonzero()[0]
        if not (is_scattered(single) or is_scattered(shared)):
            return
        moved_to = np.arange(len(users))
        for pages, start in ((single, 0), (shared, len(users) - len(shared))):
            places = np.arange(start, start + len(pages))
            # Only what lies elsewhere moves, to the places that do not hold such a page yet.
            moved_to[np.setdiff1d(pages, places)] = np.setdiff1d(places, pages)
        sources = (moved_to != np.arange(len(users))).nonzero()[0]
        targets = moved_to[sources]
        self.copy(np.stack([sources, targets], 1))
        counts = users[sources]
        users[sources] = 0  # first: a target may be the source of another move
        users[targets] = counts
        self.users, self.free = users.tolist(), (users == 0).nonzero()[0].tolist()
        # In place: rows and kept prompts hold these very lists.
        for pages in holders:
            pages[:] = moved_to[pages].tolist()

    # -- attention

    @torch.no_grad()
    def prefill(self, pieces: Sequence[tuple[list[int], int, int]]) -> Attend:
        """Causal attention of new tokens over their sequence so far; also stores them.

        A piece (pages, start, end) belongs to one sequence: its tokens start..end - 1 are the new
        ones, packed in the input, and those before `start` are in the pages already.
        """
        tensor = partial(torch.tensor, device=self.keys[0].device)
        lengths = [end - start for _, start, end in pieces]
        position = [t for _, start, end in pieces for t in range(start, end)]
        # The page and the offset in it of each new token.
        place = tensor([p[t // self.page] for p, a, b in pieces for t in range(a, b)])
        offset = tensor(position) % self.page
        bounds = [0, *accumulate(lengths)]
        cu_seqlens = tensor(bounds, dtype=torch.int32)
        ends = tensor([end for _, _, end in pieces], dtype=torch.int32)
        table = tensor(padded([p for p, _, _ in pieces]), dtype=torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            # Stored first: the kernel reads the new keys from the pages too.
            keys[place, :, offset] = k
            values[place, :, offset] = v
            if self.kernel:
                return self.kernel(q, keys, values, cu_seqlens, max(lengths), ends, table)
            out = []
            for i, (_, start, end) in enumerate(pieces):
                new = slice(bounds[i], bounds[i + 1])
                # Given three dimensions SDPA is up to 8x slower.
                query, key, value = (x[new].transpose(0, 1)[None] for x in (q, k, v))
                # Nothing stored before: the new keys are all there is, no pages to gather.
                if start == 0:
                    out.append(sdpa(query, key, value, is_causal=True)[0])
                    continue
                held = table[i, : self.pages(end)]
                key, value = (
                    s.index_select(0, held).transpose(0, 1).flatten(1, 2)[:, :end]
                    for s in (keys, values)
                )
                # tril(start): query i, at position start + i, sees keys 0 .. start + i.
                seen = q.new_ones(end - start, end, dtype=torch.bool).tril(start)
                out.append(sdpa(query, key[None], value[None], attn_mask=seen)[0])
            return torch.cat(out, 1).transpose(0, 1)

        return attend

    def view(self, tables: Sequence[list[int]]) -> View:
        """How the rows of a decode batch read the pool, given the pages of each row."""
        table = np.array(padded(tables))
        tensor = partial(torch.as_tensor, device=self.keys[0].device)
        if self.kernel:
            return View(tensor(table, dtype=torch.int32))
        (rows, width), group = table.shape, self.heads // self.kv_heads
        held = np.arange(width) < np.array([len(pages) for pages in tables])[:, None]
        # By users now: a page that lost its other readers counts as single again.
        shared = np.array(self.users)[table] > 1
        kv_head = np.arange(self.kv_heads)
        parts, lines = [], 0
        # The line by page of the first query head of each reader. It stays 0 where a row has no
        # page: those scores are masked.
        line = np.zeros((rows, width, self.kv_heads), dtype=np.int64)
        # Two parts, because every page of a part costs as much as the one with the most readers.
        for chosen in (held & ~shared, held & shared):
            if not chosen.any():
                continue
            pages = table[chosen]
            low, high = pages.min(), pages.max() + 1
            page, rank = pages - low, occurrences_before(pages)  # rank among the page's readers
            most = rank.max() + 1
            reading_row = np.full((high - low, most), rows)  # padding: one row too far
            reading_row[page, rank] = chosen.nonzero()[0]
            readers = (reading_row[:, None] * self.kv_heads + kv_head[:, None]).ravel()
            # A padded reader needs some valid queries; its results go past the last row.
            queries = readers.clip(max=rows * self.kv_heads - 1)
            parts.append(Part(slice(low, high), tensor(queries), tensor(readers)))
            # Padded readers take lines too, or a page's lines would not form a rectangle.
            before = (page[:, None] * self.kv_heads + kv_head) * most + rank[:, None]
            line[chosen] = lines + before * group
            lines += len(readers) * group
        by_row = line.transpose(0, 2, 1)[:, :, None] + np.arange(group)[:, None]  # (B, KV, G, W)
        number = np.arange(by_row.size).reshape(by_row.shape)
        held = np.broadcast_to(held[:, None, None], by_row.shape)
        by_page = np.zeros(lines, dtype=np.int64)  # padded readers keep 0: their result is dropped
        by_page[by_row[held]] = number[held]
        return View(
            tensor(table, dtype=torch.int32), parts, tensor(by_row.ravel()), tensor(by_page)
        )

    @torch.no_grad()
    def decode(self, view: View, lengths: Tensor) -> Attend:
        """Attention of one new token per row: row i is stored at, and sees up to, position
        lengths[i]. Nothing here waits for the device.
        """
        kv_heads, page, size = self.kv_heads, self.page, self.size
        arange = partial(torch.arange, device=lengths.device)
        # Where the new key of each row and KV head goes in the pool seen as (cells, d).
        # cells = ((page * KV + head) * page size + offset): one index for keys of all heads.
        places = view.table.gather(1, (lengths // page)[:, None]) * kv_heads + arange(kv_heads)
        cells = (places * page + (lengths % page)[:, None]).flatten()
        if self.kernel:
            # + 1: the kernel counts the new token, which sees itself.
            ends = (lengths + 1).to(torch.int32)
            one_each = arange(len(lengths) + 1, dtype=torch.int32)
        else:
            unseen = arange(view.table.shape[1] * page) > lengths[:, None]
            # Also masks what earlier users left in a page, and all of the padding.
            mask = torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, -torch.inf)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            # view, not reshape: a copy would be written to and lost.
            keys.view(-1, size).index_copy_(0, cells, k.reshape(-1, size))
            values.view(-1, size).index_copy_(0, cells, v.reshape(-1, size))
            if self.kernel:
                return self.kernel(q, keys, values, one_each, 1, ends, view.table)
            return attention_by_page(q, keys, values, view, mask)

        return attend


def attention_by_page(q: Tensor, keys: Tensor, values: Tensor, view: View, mask: Tensor) -> Tensor:
    """Softmax attention of one query per row, which pads no key, only scores.

    q (B, H, d); keys, values (pages, KV, page, d); mask (B, W * page) is added to the scores.
    Returns (B, H, d). Computes in at least float32. `View` has the orders of the scores.
    """
    (rows, heads, size), (_, kv_heads, page, _) = q.shape, keys.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    # Scaled before the product: usually fewer numbers than the scores.
    queries = (q.to(wide) * size**-0.5).reshape(rows * kv_heads, -1)  # one line per reader: (G * d)
    scores = []
    for part in view.parts:
        k = keys[part.pages].flatten(0, 1).to(wide)  # (P * KV, page, d)
        met = queries.index_select(0, part.queries).view(len(k), -1, size)  # (P * KV, R * G, d)
        scores.append(torch.bmm(met, k.mT).view(-1, page))
    lines = [len(x) for x in scores]
    by_row = torch.cat(scores).index_select(0, view.to_rows).view(rows, heads, -1)
    # Whole rows at once: softmax needs no running maximum over pages.
    weights = by_row.add_(mask[:, None]).softmax(-1).view(-1, page).index_select(0, view.to_pages)
    # One extra row, KV lines: padded readers leave their results there.
    out = queries.new_zeros(len(queries) + kv_heads, queries.shape[1])
    for part, w in zip(view.parts, weights.split(lines), strict=True):
        v = values[part.pages].flatten(0, 1).to(wide)
        result = torch.bmm(w.view(len(v), -1, page), v).view(len(part.outputs), -1)
        # A row's pages lie in several places: their weighted values add up to its attention.
        out.index_add_(0, part.outputs, result)
    return out[: len(queries)].view(q.shape).to(q.dtype)


def is_scattered(pages: np.ndarray) -> bool:
    """Whether ascending page numbers span at least a quarter more pages than there are."""
    return len(pages) > 0 and pages[-1] - pages[0] >= 1.25 * len(pages)


def occurrences_before(values: np.ndarray) -> np.ndarray:
    """values (N,) -> (N,): how many of the values before each one equal it."""
    # stable: equal values stay in their order, so the place in the run is the count.
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    before = np.empty_like(order)
    before[order] = np.arange(len(values)) - np.searchsorted(ascending, ascending)
    return before


def padded(tables: Sequence[list[int]]) -> list[list[int]]:
    """Lists of pages, filled up to equal length with page 0, which belongs to no response."""
    width = max(map(len, tables), default=0)
    return [pages + [0] * (width - len(pages)) for pages in tables]
