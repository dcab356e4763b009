"""Pages are shared, freed, grown and moved; attention over them stays that of a packed forward."""

import random
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import flash_attn_stand_in
from transformers import LlamaConfig

from kernels import attention
from kernels.attention import paged_kernel
from model import Transformer, packed_attention
from sampler.kvcache import KVCache

V, HEADS, KV_HEADS, SIZE, PAGE = 48, 6, 2, 8, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=SIZE,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, initializer_range=0.3,
    )  # fmt: skip
    return Transformer(config).requires_grad_(False)


class Session:
    """Sequences in a cache, each new hidden state checked with a packed forward of the whole."""

    def __init__(self, model, max_pages=200, dtype=torch.float32, tolerance=2e-5):
        self.model, self.tolerance = model, tolerance
        self.cache = KVCache(2, HEADS, KV_HEADS, SIZE, page=PAGE, max_pages=max_pages, dtype=dtype)
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}

    def check(self, hidden, name, count):
        ids = torch.tensor(self.tokens[name])
        attend = packed_attention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        expected = self.model.model(ids, torch.arange(len(ids)), attend)[-count:]
        torch.testing.assert_close(hidden, expected, atol=self.tolerance, rtol=self.tolerance)

    def extend(self, pieces):
        """Prefill several tokens of several sequences at once."""
        spans, ids, positions = [], [], []
        for name, new in pieces.items():
            start = len(self.tokens.setdefault(name, []))
            self.tokens[name] += new
            end = len(self.tokens[name])
            pages = self.pages.setdefault(name, [])
            pages += self.cache.take(self.cache.pages(end) - len(pages))
            spans.append((pages, start, end))
            ids += new
            positions += range(start, end)
        attend = self.cache.prefill(spans)
        hidden = self.model.model(torch.tensor(ids), torch.tensor(positions), attend)
        for name, part in zip(
            pieces, hidden.split([len(new) for new in pieces.values()]), strict=True
        ):
            self.check(part, name, len(part))

    def fork(self, source, name):
        """A second sequence with the same beginning: full pages shared, the last one copied."""
        length = len(self.tokens[source])
        full = length // PAGE
        self.tokens[name] = list(self.tokens[source])
        self.pages[name] = self.cache.share(self.pages[source][:full])
        if length % PAGE:
            self.pages[name] += self.cache.take(1)
            self.cache.copy([(self.pages[source][full], self.pages[name][full])])

    def decode(self, names, tokens):
        for name in names:
            count = self.cache.pages(len(self.tokens[name]) + 1) - len(self.pages[name])
            self.pages[name] += self.cache.take(count)
        self.cache.compact(self.pages.values())
        view = self.cache.view([self.pages[n] for n in names])
        lengths = torch.tensor([len(self.tokens[n]) for n in names])
        attend = self.cache.decode(view, lengths)
        hidden = self.model.model(torch.tensor(tokens), lengths, attend)
        for name, token, row in zip(names, tokens, hidden, strict=True):
            self.tokens[name].append(token)
            self.check(row[None], name, 1)

    def drop(self, name):
        self.cache.release(self.pages.pop(name))
        del self.tokens[name]
        for tensor in self.cache.keys + self.cache.values:  # what is left behind must not matter
            tensor[self.cache.free] = 1e4


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_the_pages_gives_the_states_of_a_packed_forward(model, seed):
    session, rng, serial = Session(model), random.Random(seed), 0

    def words(n):
        return [rng.randrange(V) for _ in range(n)]

    for _ in range(50):
        if len(session.tokens) < 6:
            session.extend({serial: words(rng.choice([1, 4, 13])), serial + 1: words(8)})
            session.fork(serial, serial + 2)
            session.fork(serial, serial + 3)
            serial += 4
        name = rng.choice(sorted(session.tokens))
        session.extend({name: words(rng.choice([1, 5, 9]))})  # a chunk after what is cached
        names = rng.sample(sorted(session.tokens), rng.randint(1, len(session.tokens)))
        session.decode(names, words(len(names)))
        while rng.random() < 0.6 and len(session.tokens) > 1:
            session.drop(rng.choice(sorted(session.tokens)))
    used = sum(users > 0 for users in session.cache.users[1:])
    assert used == len({p for pages in session.pages.values() for p in pages})
    for name in sorted(session.tokens):
        session.drop(name)
    assert session.cache.available == session.cache.max_pages


@torch.no_grad()
def test_a_prompt_is_held_once_and_pages_come_back(model):
    session = Session(model)
    session.extend({0: [1] * 9})
    for name in (1, 2, 3):
        session.fork(0, name)
    assert session.cache.max_pages - session.cache.available == 2 + 4  # 2 full, 4 last pages
    session.decode([0, 1, 2, 3], [1, 2, 3, 4])
    session.drop(0)
    session.decode([3, 1], [5, 6])
    for name in (1, 2, 3):
        session.drop(name)
    assert session.cache.available == session.cache.max_pages


@torch.no_grad()
def test_memory_grows_with_use_up_to_the_bound_and_holes_are_not_read(model):
    session = Session(model, max_pages=100)
    assert len(session.cache.keys[0]) == 1
    session.extend({name: [name] * 20 for name in range(20)})
    assert len(session.cache.users) == 101 and session.cache.available == 0
    for name in range(1, 19):
        session.drop(name)
    session.decode([0, 19], [3, 3])  # at both ends of the pool
    held = {p for pages in session.pages.values() for p in pages}
    view = session.cache.view(list(session.pages.values()))
    read = [p for part in view.parts for p in range(part.pages.start, part.pages.stop)]
    assert sorted(read) == sorted(held)  # each once, and no other


@torch.no_grad()
def test_bfloat16_decoding_stays_within_bfloat16_of_the_packed_forward(model):
    config = model.config
    rough = Transformer(config, torch.bfloat16).to(torch.bfloat16)
    rough.load_state_dict(model.state_dict())
    session = Session(rough, dtype=torch.bfloat16, tolerance=0.1)
    session.extend({0: [1, 2, 3, 4, 5], 1: [6, 7]})
    session.fork(0, 2)
    for token in range(20):
        session.decode([0, 2, 1], [token, V - 1 - token, token])


@torch.no_grad()
def test_scores_far_apart_neither_overflow_nor_vanish():
    torch.manual_seed(0)
    cache = KVCache(1, 2, 1, SIZE, page=PAGE, max_pages=4)
    tables = [cache.take(2), cache.take(2)]
    keys, values = cache.keys[0].normal_(), cache.values[0].normal_()
    keys[tables[0][1]] *= 1000  # a page whose scores beat all others by hundreds
    q, new = torch.randn(2, 2, SIZE), torch.randn(2, 1, SIZE)
    attend = cache.decode(cache.view(tables), torch.tensor([2 * PAGE - 1] * 2))
    got = attend(0, q, new, new)
    for row, pages in enumerate(tables):
        k, v = (x[pages].flatten(0, 2).double() for x in (keys, values))
        expected = (q[row].double() @ k.T * SIZE**-0.5).softmax(-1) @ v
        torch.testing.assert_close(got[row].double(), expected, atol=1e-5, rtol=1e-5)


def varlen_stand_in():
    """torch's varlen_attn over pages, by its documentation."""
    flash = flash_attn_stand_in()

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa,
        seqused_k, block_table, num_splits=None,
    ):  # fmt: skip
        # One query needs no causal window. The rest of the contract: test_attention_contract.py.
        assert window_size == ((-1, -1) if max_q == 1 else (-1, 0)) and enable_gqa
        assert cu_seq_k.dtype == torch.int32 and len(cu_seq_k) == len(cu_seq_q)
        cu_k = F.pad(seqused_k.cumsum(0), (1, 0)).int()
        return flash.flash_attn_varlen_func(
            query, key, value, cu_seq_q, cu_k, max_q, max_k, causal=True, block_table=block_table
        )

    return varlen_attn


@torch.no_grad()
@pytest.mark.parametrize("kernel", ["flash_attn", "torch"])
def test_the_kernels_get_what_they_document(model, kernel, monkeypatch):
    # No GPU here: the stand-ins check arguments and page tables, not the kernels.
    if kernel == "flash_attn":
        monkeypatch.setattr(attention, "find_spec", lambda name: True)
        monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in())
    else:
        monkeypatch.setattr(attention, "varlen_attn", varlen_stand_in())
    session = Session(model)
    session.cache.kernel = paged_kernel.__wrapped__()
    session.extend({0: [1, 2, 3, 4, 5], 1: [6]})
    session.fork(0, 2)
    session.extend({2: list(range(7)), 1: [9] * 5})
    for token in range(6):
        session.decode([2, 0, 1], [token, 7, 8])


def test_torch_without_page_tables_falls_back_to_plain_operations(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value, is_causal: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    assert paged_kernel.__wrapped__() is None
