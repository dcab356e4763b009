"""The sampler equals the trainer and the plain loop; groups are collected as specified."""

import copy
import random
import sys
from collections import Counter

import pytest
import torch
from helpers import (
    LengthGrader,
    WordTokenizer,
    collect_config,
    flash_attn_stand_in,
    policy_logprobs,
    tokens,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import distributed
import rollout
from data import DataOrder, Problem, Rollout, pack
from kernels import attention
from model import Transformer, head_size, packed_attention
from rollout import Sampler, collect, has_signal
from sampler import graphs
from sampler.sampling import GOLDEN, MASK64, Truncation, mix, response_key, sample_token, uniforms
from sampler.scheduler import Scheduler

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [20], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model(random_tiny_model):
    model = Transformer.from_pretrained(random_tiny_model).requires_grad_(False)
    with torch.no_grad():
        # An init std of 0.02 would be all but uniform: make the distribution one with shape.
        model.head_weight.mul_(60)
    return model


# ---- random numbers


def test_uniforms_are_splitmix_of_key_and_counter():
    key = response_key(1, 2, 3, 4)
    got = uniforms(torch.tensor([key] * 3), torch.tensor([0, 1, 1000]))
    exact = [(mix((key + (t + 1) * GOLDEN) & MASK64) >> 12) * 2.0**-52 for t in (0, 1, 1000)]
    assert got.tolist() == exact
    # Published first outputs of SplitMix64 with seed 0.
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF
    assert mix(2 * GOLDEN & MASK64) == 0x6E789E6AA1B965F4


def test_every_part_of_the_key_matters():
    keys = {
        response_key(*(v if i == k else 5 for i in range(4))) for k in range(4) for v in (-1, 6, 7)
    }
    assert len(keys) == 12


def test_sampled_tokens_follow_the_softmax_chi_square():
    torch.manual_seed(0)
    logits, temperature, n = torch.randn(1, 12) * 2, 0.7, 40_000
    u = uniforms(torch.full((n,), response_key(0, 0, 0, 0)), torch.arange(n))
    drawn, logprobs = sample_token(logits.expand(n, -1), temperature, u)
    expected = torch.softmax(logits[0].double() / temperature, 0) * n
    chi2 = ((torch.bincount(drawn, minlength=12) - expected) ** 2 / expected).sum()
    assert chi2 < 31.3  # 0.999 quantile with 11 degrees of freedom
    oracle = torch.log_softmax(logits.double() / temperature, -1)[0][drawn]
    assert torch.allclose(logprobs.double(), oracle, atol=1e-6)


def test_a_token_of_probability_zero_is_never_sampled():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    u = torch.tensor([0.0, 0.49999, 0.50001, 1 - 2.0**-52], dtype=torch.float64)
    drawn, _ = sample_token(logits.expand(4, -1), 1.0, u)
    assert drawn.tolist() == [1, 1, 3, 3]


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0]])


@pytest.mark.parametrize(
    "truncation, warper",
    [
        (Truncation(top_k=3), TopKLogitsWarper(3)),
        (Truncation(top_p=0.7), TopPLogitsWarper(0.7)),
        (Truncation(min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_truncation_keeps_the_tokens_that_transformers_keeps(truncation, warper):
    torch.manual_seed(0)
    logits = torch.cat([LOGITS, torch.randn(20, 6) * 2])
    kept = truncation(logits.log_softmax(-1)).isfinite()
    assert torch.equal(kept, warper(None, logits).isfinite())
    n = 3000
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long))
    drawn, logprobs = sample_token(LOGITS.expand(n, -1), 1.0, u, truncation)
    assert set(drawn.tolist()) == set(kept[0].nonzero().flatten().tolist())
    # What is stored is the probability under the whole softmax, whatever was left out.
    assert torch.equal(logprobs, LOGITS.log_softmax(-1)[0, drawn])


def test_truncations_apply_one_after_another():
    kept = Truncation(top_p=0.8, top_k=3, min_p=0.5)(LOGITS.log_softmax(-1)).isfinite()
    assert kept.tolist() == [[True, False, False, False, False, False]]
    # Of equally likely tokens the lower ids stay, whatever the batch: no sort may shuffle them.
    equal = Truncation(top_p=0.5)(torch.zeros(3, 1000).log_softmax(-1)).isfinite()
    assert equal[:, :499].all() and not equal[:, 501:].any()
    everything = Truncation()(LOGITS.log_softmax(-1))
    assert torch.equal(everything, LOGITS.log_softmax(-1))


# ---- sampler equals the plain loop, the trainer, and itself


def plain_loop(model, prompt, key, max_new_tokens, temperature, stops, size=None):
    """One response without cache or batch: the whole sequence through the model for every token,
    and exact integers and float64 for the draw.
    """
    ids, logprobs = list(prompt), []
    while len(logprobs) < max_new_tokens and (not logprobs or ids[-1] not in stops):
        attend = packed_attention(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids))
        hidden = model.model(torch.tensor(ids), torch.arange(len(ids)), attend)[-1]
        logits = (model.head_weight[:size].double() @ hidden.double()) / (temperature or 1)
        p = logits.softmax(-1)
        counter = (key + (len(logprobs) + 1) * GOLDEN) & MASK64
        u = (mix(counter) >> 12) / 2**52
        token = int((p.cumsum(0) <= u).sum()) if temperature else int(p.argmax())
        ids.append(token)
        logprobs.append(float(p[token].log()))
    return ids[len(prompt) :], logprobs


@pytest.fixture(scope="module", params=[0.0, 1.3])
def plain(request, model):
    """A temperature, and what the plain loop answers at it: three responses to every prompt."""
    with torch.no_grad():
        answers = [
            plain_loop(model, ids, response_key(5, 0, p, j), 20, request.param, [2, 3])
            for p, ids in enumerate(PROMPTS)
            for j in range(3)
        ]
    return request.param, answers


def three_each():
    """The rollouts that `plain` has answered."""
    problems = [Problem("", p, "", ids, "") for p, ids in enumerate(PROMPTS)]
    return [
        Rollout(problem, problem.index, j, response_key(5, 0, problem.index, j))
        for problem in problems
        for j in range(3)
    ]


@pytest.mark.parametrize(
    "slots, tokens, chunk, page, every",
    [
        (16, 0, 8192, 32, 1),
        (5, 0, 4, 4, 1),  # prompts in chunks of four tokens
        (8, 40, 8192, 4, 1),  # memory for one response and a little more: preemption
        (12, 64, 3, 2, 5),  # and stops looked for every fifth token
        (1, 31, 1, 8, 3),
    ],
)
def test_tokens_are_those_of_the_plain_loop(model, plain, slots, tokens, chunk, page, every):
    temperature, wanted = plain
    sampler = Sampler(
        model, [2, 3], slots, kv_cache_tokens=tokens, prefill_chunk_tokens=chunk, page=page
    )
    sampler.check_every = every
    rollouts = three_each()
    sampler.run(random.Random(slots).sample(rollouts, len(rollouts)), 20, temperature)
    for r, (ids, logprobs) in zip(rollouts, wanted, strict=True):
        assert r.response_ids == ids
        assert r.rollout_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert (sampler.counts["preempted"] > 0) == (0 < tokens and slots > 1)


def test_recorded_decode_steps_give_the_tokens_of_the_plain_loop(model, plain, monkeypatch):
    # No GPU here: a "recording" runs its function again, on the same buffers, and the kernel is a
    # stand-in. What is tested is all around them: padding, page tables, a pool that stays.
    recorded, caches, padding = [], [], set()

    def record(function, pool):
        recorded.append(function)
        return function

    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_stand_in())
    monkeypatch.setattr(Sampler, "_needed_for_graphs", lambda self: "")
    new, load = Sampler._new_cache, graphs.Recorded.load

    def paged(*args):
        cache = new(*args)
        cache.kernel = attention.paged_kernel.__wrapped__()
        caches.append((cache, cache.keys[0]))
        return cache

    def count_padding(self, view):
        padding.add(len(self.table) - len(view.table))
        load(self, view)

    monkeypatch.setattr(Sampler, "_new_cache", paged)
    monkeypatch.setattr(graphs.Recorded, "load", count_padding)
    temperature, wanted = plain
    sampler = Sampler(model, [2, 3], slots=7, page=2, cuda_graphs=True)
    sampler.check_every = 3
    rollouts = three_each()
    sampler.run(rollouts, 20, temperature)
    for r, (ids, logprobs) in zip(rollouts, wanted, strict=True):
        assert r.response_ids == ids
        assert r.rollout_logprobs == pytest.approx(logprobs, abs=1e-4)
    ((cache, keys),) = caches
    assert cache.keys[0] is keys and max(padding) > 0
    assert 1 < len(recorded) < sampler.counts["decode_steps"] / 2


def test_graphs_are_refused_where_they_cannot_be_recorded(model):
    with pytest.raises(ValueError, match="--cuda-graphs needs a GPU and a 16-bit --dtype"):
        Sampler(model, [2, 3], cuda_graphs=True)


class NoLookAtTheDevice(TorchDispatchMode):
    """Fails at operations that wait for the device, which a recording cannot hold."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("item", "_local_scalar_dense", "nonzero", "masked_select"), name
        return function(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("truncation", [None, Truncation(0.9, 5, 0.01)])
def test_a_decode_step_does_not_wait_for_the_device(model, truncation):
    sampler = Sampler(model, [2, 3], page=4)
    cache = sampler._new_cache([Problem("", 0, "", [5], "")], 8)
    view, state = cache.view([cache.take(2)]), torch.tensor([[5], [0], [7], [0]])
    with NoLookAtTheDevice():
        sampler._step(cache, 1.0, truncation, view, *state)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_diverged_policy_is_named_and_no_index_runs_out_of_range(model, value):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.norm.weight.fill_(value)
    with pytest.raises(FloatingPointError, match="log-prob of problem 0 is not finite"):
        Sampler(broken, [2, 3]).generate([[5, 6, 7]], max_new_tokens=4)


def check_pages(scheduler):
    """Every page has as many users as rows and prompts hold it, and a row writes to its own."""
    cache, rows = scheduler.cache, scheduler.running
    tables = [*(row.pages for row in rows), *scheduler.prompts.values()]
    held = Counter(page for pages in tables for page in pages)
    assert cache.users == [1] + [held[p] for p in range(1, len(cache.users))]
    assert sorted(cache.free) == [p for p, users in enumerate(cache.users) if not users]
    assert len(cache.users) <= cache.max_pages + 1
    for row in rows:
        assert all(cache.users[p] == 1 for p in row.pages[row.stored // cache.page :])
        assert row.stored // cache.page < len(row.pages)
    for kind in (lambda users: users == 1, lambda users: users > 1):  # no gaps are read, or few
        pages = [p for p, users in enumerate(cache.users) if kind(users)]
        assert not pages or pages[-1] - pages[0] < 1.25 * len(pages)
    assert +scheduler.waiting == Counter(id(r.problem) for r in scheduler.queue)


def random_history(model, rng, answers):
    """Run random prompts, some begun elsewhere, through a random sampler that is stopped at random
    places; returns the rollouts and the times one was preempted. answers: memory of `plain_loop`.
    """
    page, budget = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 16])
    lengths = [1, 1, 2, page, page + 1, 2 * page, 2 * page + 1, 17]
    problems = [
        Problem("", p, "", [rng.randrange(64) for _ in range(rng.choice(lengths))], "")
        for p in range(3)
    ]
    longest = max(len(p.prompt_ids) for p in problems) + budget
    room = rng.choice([0, longest, longest + page, longest + rng.randrange(3 * longest)])
    slots, chunk = rng.choice([1, 3, 5, 30]), rng.choice([1, 3, 8192])
    sampler = Sampler(
        model, [2, 3], slots, kv_cache_tokens=room, prefill_chunk_tokens=chunk, page=page
    )
    sampler.check_every = rng.choice([1, 2, 5, 8])
    rollouts = [
        Rollout(p, p.index, j, response_key(0, 0, p.index, j)) for p in problems for j in range(5)
    ]
    rng.shuffle(rollouts)
    for r in rollouts:
        ids, logprobs = plain_loop(model, r.problem.prompt_ids, r.key, budget, 1.0, [2, 3])
        answers[id(r)] = ids, logprobs
        begun = rng.choice([0, 0, rng.randrange(len(ids))])
        r.response_ids, r.rollout_logprobs = ids[:begun], logprobs[:begun]
    decode, steps = sampler._decode, iter(())

    def interruptible(*args):
        sampler.interrupted = next(steps, None) == 0
        return decode(*args)

    sampler._decode = interruptible
    while not all(r.finished for r in rollouts):
        steps = iter(range(rng.randint(1, 20), -1, -1))
        sampler.interrupted = False
        ended = []
        sampler.run(
            rollouts,
            budget,
            1.0,
            on_finish=lambda r, ended=ended: ended.append(rng.random() < 0.1),
            next_rollouts=lambda ended=ended: None if any(ended) else (),
        )
    return rollouts, sampler.counts["preempted"]


@torch.no_grad()
def test_no_history_of_stops_and_preemptions_changes_a_token_or_loses_a_page(model, monkeypatch):
    view = Scheduler.view

    def checked(scheduler):
        result = view(scheduler)
        check_pages(scheduler)
        return result

    monkeypatch.setattr(Scheduler, "view", checked)
    preempted = 0
    for seed in range(12):
        answers = {}
        rollouts, times = random_history(model, random.Random(seed), answers)
        preempted += times
        for r in rollouts:
            ids, logprobs = answers[id(r)]
            assert r.response_ids == ids, seed
            assert r.rollout_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert preempted > 10


def test_a_response_larger_than_the_cache_is_refused(model):
    sampler = Sampler(model, [2], kv_cache_tokens=30)
    with pytest.raises(ValueError, match="31 tokens together do not fit in a KV cache of 30"):
        sampler.generate([[5] * 11], max_new_tokens=20)
    assert sampler.generate([[5] * 11], max_new_tokens=19)[0].finished


def test_memory_that_training_has_left_in_the_pool_of_torch_counts_as_free(model, monkeypatch):
    # From the second step on the sampler saw next to no free memory and refused to start.
    sampler, free = Sampler(model, [2]), [10_000]
    sampler.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(10_000_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[-1], 0))
    config = model.config
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_size(config)
    assert sampler._affordable_tokens() == 8_000_000 // token


def test_ranks_of_another_machine_take_no_memory_from_this_one(model, monkeypatch):
    """Two machines of two ranks gave each rank half of its share of the RAM."""
    alone = Sampler(model, [2])._affordable_tokens()
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Sampler(model, [2])._affordable_tokens() == alone // 2


def test_memory_is_bounded_and_a_prompt_is_computed_and_held_once(model, monkeypatch):
    caches = []
    new = Sampler._new_cache
    monkeypatch.setattr(Sampler, "_new_cache", lambda *a: caches.append(new(*a)) or caches[-1])
    prompts = [[5 + p] * 41 for p in range(3)]
    sampler = Sampler(model, [2, 3], slots=7, page=4)
    sampler.generate(prompts, n=8, max_new_tokens=16)
    assert sampler.counts["prefill_tokens"] == 3 * 40  # not 24 * 40
    # At most the prompts (10 full pages each) and, per slot, a copied page and 16 new tokens.
    (cache,) = caches
    assert len(cache.users) <= 65 and cache.keys[0].shape[0] == len(cache.users)
    assert not any(cache.users[1:])
    bounded = Sampler(model, [2, 3], slots=7, page=4, kv_cache_tokens=100)
    bounded.generate(prompts, n=8, max_new_tokens=16)
    assert len(caches[1].users) <= 27


def test_ids_beyond_the_tokenizer_are_never_drawn(random_tiny_model):
    model = Transformer.from_pretrained(random_tiny_model).requires_grad_(False)

    class Tokenizer(WordTokenizer):
        def get_vocab(self):  # with gaps: an id after one is still a token
            return {str(i): i for i in (0, 3, 19)}

    rollouts = Sampler(model, [], slots=8, tokenizer=Tokenizer()).generate(
        PROMPTS, n=8, max_new_tokens=16
    )
    assert {i for r in rollouts for i in r.response_ids} == set(range(20))
    mb = pack(rollouts, range(len(rollouts)))
    logprobs = policy_logprobs(model, mb, 1.0)
    stored = mb.unpack(torch.tensor([x for r in rollouts for x in r.rollout_logprobs]))
    assert (logprobs - stored).abs().max() < 1e-5


def test_sampled_first_tokens_follow_the_softmax_chi_square(model):
    n, prompt = 4000, PROMPTS[0]
    rollouts = Sampler(model, [], slots=500).generate(
        [prompt], n=n, max_new_tokens=1, temperature=3.0, seed=3
    )
    attend = packed_attention(torch.tensor([0, 3], dtype=torch.int32), 3)
    hidden = model.model(torch.tensor(prompt), torch.arange(3), attend)[-1:]
    expected = (model.logits(hidden)[0].double() / 3).softmax(-1) * n
    observed = torch.bincount(torch.tensor([r.response_ids[0] for r in rollouts]), minlength=64)
    rare = expected < 5
    cells = [*zip(observed[~rare], expected[~rare], strict=True)]
    cells.append((observed[rare].sum(), expected[rare].sum()))
    chi2 = sum((o - e) ** 2 / e for o, e in cells if e > 0)
    k = len(cells) - 1
    assert 10 < k and chi2 < k * (1 - 2 / (9 * k) + 3.09 * (2 / (9 * k)) ** 0.5) ** 3  # 0.999


def test_stored_logprobs_equal_teacher_forcing_with_ragged_prompts_and_reused_slots(model):
    for temperature in (0.7, 1.0, 1.6):
        sampler = Sampler(model, eos_ids=[2, 3, 4], slots=3)
        rollouts = sampler.generate(
            PROMPTS, n=4, max_new_tokens=24, temperature=temperature, seed=1
        )
        assert (
            len({len(r.response_ids) for r in rollouts}) > 3
        )  # ragged, so slots were reused at odd times
        mb = pack(rollouts, range(len(rollouts)))
        with torch.no_grad():
            logprobs = policy_logprobs(model, mb, temperature)
        stored = mb.unpack(torch.tensor([x for r in rollouts for x in r.rollout_logprobs]))
        assert (logprobs - stored).abs().max() < 1e-5


def test_samples_do_not_depend_on_slots_order_or_company(model):
    wanted = tokens(
        Sampler(model, [2, 3], slots=16).generate(PROMPTS, n=3, max_new_tokens=20, seed=5)
    )
    for slots in (1, 2, 5):
        assert (
            tokens(
                Sampler(model, [2, 3], slots=slots).generate(
                    PROMPTS, n=3, max_new_tokens=20, seed=5
                )
            )
            == wanted
        )
    alone = Sampler(model, [2, 3], slots=4).generate(PROMPTS[:1], n=2, max_new_tokens=20, seed=5)
    assert tokens(alone) == wanted[:2]
    other = Sampler(model, [2, 3], slots=16).generate(PROMPTS, n=3, max_new_tokens=20, seed=6)
    assert tokens(other) != wanted


def test_an_interrupted_response_goes_on_as_if_nothing_had_happened(model):
    sampler = Sampler(model, [2, 3], slots=4)
    wanted = sampler.generate(PROMPTS, n=3, max_new_tokens=20, seed=5)
    rollouts = []
    for p, ids in enumerate(PROMPTS):
        rollouts += [
            rollout.Rollout(Problem("", p, "", ids, ""), p, j, response_key(5, 0, p, j))
            for j in range(3)
        ]
    rounds = 0
    while any(not r.finished for r in rollouts):
        ended = []  # stop at the first

        def next_rollouts(ended=ended):
            return None if ended else ()

        sampler.run(rollouts, 20, 1.0, ended.append, next_rollouts=next_rollouts)
        rounds += 1
    assert rounds > 2
    assert tokens(rollouts) == tokens(wanted)
    for a, b in zip(rollouts, wanted, strict=True):
        assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-5)
        assert a.finish_reason == b.finish_reason and len(a.weight_versions) == len(a.response_ids)


def test_s3_greedy_tokens_equal_transformers_one_at_a_time(model, tmp_path):
    model.save_pretrained(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path)
    got = Sampler(model, eos_ids=[2], slots=3).generate(PROMPTS, max_new_tokens=16, temperature=0)
    for prompt, r in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([prompt])
        out = oracle.generate(
            ids, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert r.response_ids == out[0, len(prompt) :].tolist()
        logits = oracle(torch.tensor([prompt + r.response_ids])).logits[0, len(prompt) - 1 : -1]
        scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(r.response_ids)[:, None])[
            :, 0
        ]
        assert r.rollout_logprobs == pytest.approx(scored.tolist(), abs=1e-4)


def test_every_stop_id_ends_a_response_and_is_its_last_token(model):
    stops = [2, 3, 4, 5, 6]
    rollouts = Sampler(model, stops, slots=8).generate(PROMPTS, n=16, max_new_tokens=30, seed=2)
    last = Counter(r.response_ids[-1] for r in rollouts if r.finish_reason == "stop")
    assert len(last) > 2  # several of the ids really occurred
    for r in rollouts:
        assert not set(r.response_ids[:-1]) & set(stops)
        assert (r.finish_reason == "stop") == (r.response_ids[-1] in stops)
        assert r.finish_reason == "stop" or len(r.response_ids) == 30


def test_a_stop_token_on_the_last_place_of_the_budget_is_a_stop(model):
    (r,) = Sampler(model, range(64)).generate(PROMPTS[:1], max_new_tokens=1)
    assert r.finish_reason == "stop" and len(r.response_ids) == 1


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="no tokens"):
        Sampler(model, [2]).generate([[]])


def test_a_model_of_one_layer_shares_prompts_within_a_group():
    # Known fault: copying one slot of a one-layer cache onto others was refused as overlapping.
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Transformer(config).requires_grad_(False)
    wanted = tokens(Sampler(model, [2], slots=1).generate(PROMPTS, n=3, max_new_tokens=8))
    assert tokens(Sampler(model, [2], slots=12).generate(PROMPTS, n=3, max_new_tokens=8)) == wanted


# ---- groups


def test_bc07a_a_group_has_signal_only_if_rewards_differ():
    for flat in ([0.7] * 8, [0.1] * 8, [1 / 3] * 3, [0.2] * 3, [0.0] * 8, [1.0] * 8):
        assert not has_signal(flat)
    assert has_signal([0.1] * 7 + [0.2]) and has_signal([1.0] + [0.0] * 7)


PROBLEMS = [Problem(f"p{i}", i, "", PROMPTS[i % 4], "") for i in range(10)]


def run_collect(model, grader, buffer=(), step=0, order=None, **changes):
    sampler = Sampler(model, range(2, 12), slots=12, tokenizer=WordTokenizer())
    order = order or DataOrder(len(PROBLEMS), 0)
    return collect(sampler, grader, PROBLEMS, order, buffer, collect_config(**changes), step)


def test_kept_groups_are_whole_graded_and_have_signal(model):
    collected = run_collect(model, LengthGrader())
    assert len(collected.groups) == 4 and len(collected.finished) > 4
    for group in collected.groups:
        assert [r.sample_index for r in group] == [0, 1, 2, 3]
        assert has_signal(r.reward for r in group)
        for r in group:
            expected = len(r.response_ids) - (r.finish_reason == "stop")
            assert r.reward == (expected % 2 == 0) and r.reason in ("ok", "wrong")
    numbers = [group[0].group for group in collected.groups]
    assert numbers == sorted(numbers)


def test_refills_are_bounded_when_nothing_can_be_kept(model):
    grader = LengthGrader(verdict=lambda n: False)
    collected = run_collect(model, grader)
    assert collected.groups == [] and collected.counts["refilled"] == 12
    assert collected.counts["finished"] == 16
    assert not any(has_signal(r.reward for r in group) for group in collected.finished)
    assert grader.graded == 16 * 4


def test_without_dynamic_sampling_every_group_is_kept(model):
    collected = run_collect(model, LengthGrader(verdict=lambda n: False), dynamic_sampling=False)
    assert len(collected.groups) == 4 and collected.counts["refilled"] == 0


def test_surplus_is_aborted_and_resumed_without_losing_a_token(model):
    order = DataOrder(len(PROBLEMS), 0)
    options = dict(
        over_sampling=2.0, dynamic_sampling=False, partial_rollout=True, prompts_per_step=2
    )
    first = run_collect(model, LengthGrader(), order=order, **options)
    assert len(first.groups) == 2 and first.counts["aborted"] >= 1
    aborted = first.unfinished
    before = {(r.group, r.sample_index): list(r.response_ids) for group in aborted for r in group}
    assert any(before.values())
    second = run_collect(model, LengthGrader(), buffer=aborted, step=1, order=order, **options)
    resumed = [
        r
        for group in [*second.finished, *second.unfinished]
        for r in group
        if (r.group, r.sample_index) in before
    ]
    assert len(resumed) == len(before)
    for r in resumed:
        start = before[r.group, r.sample_index]
        assert r.response_ids[: len(start)] == start and len(r.response_ids) <= 24
    # The draw is that of the step in which the response began.
    whole = run_collect(
        model, LengthGrader(), over_sampling=1.0, dynamic_sampling=False, prompts_per_step=4
    )
    wanted = {(r.group, r.sample_index): r.response_ids for group in whole.groups for r in group}
    for r in resumed:
        assert not r.finished or r.response_ids == wanted[r.group, r.sample_index]


@pytest.mark.parametrize("age, fresh", [(2, False), (3, True)])
def test_stale_groups_of_the_buffer_start_anew(model, age, fresh):
    options = dict(dynamic_sampling=False, partial_rollout=True, prompts_per_step=2)
    first = run_collect(model, LengthGrader(), over_sampling=2.0, **options)
    (stale, *rest), sampler = first.unfinished, Sampler(model, range(2, 12), 12, WordTokenizer())
    assert any(r.response_ids for r in stale)
    ids = [list(r.response_ids) for r in stale]
    sampler.weight_version = age
    config = collect_config(max_staleness=2, **options)
    order = DataOrder(len(PROBLEMS), 0)
    second = collect(sampler, LengthGrader(), PROBLEMS, order, [stale, *rest], config, 1)
    assert second.counts["regenerated"] == (fresh * (1 + len(rest)))
    assert second.counts["resumed"] == (not fresh) * (1 + len(rest))
    (again,) = (g for g in second.finished if g[0].group == stale[0].group)
    assert [r.problem for r in again] == [r.problem for r in stale]
    versions = {v for r in again for v in r.weight_versions}
    if fresh:
        assert versions == {age}
    else:
        assert 0 in versions
        assert all(r.response_ids[: len(old)] == old for r, old in zip(again, ids, strict=True))


def test_groups_of_the_buffer_longer_than_a_smaller_budget_start_anew(model):
    options = dict(dynamic_sampling=False, partial_rollout=True, prompts_per_step=2)
    first = run_collect(model, LengthGrader(), over_sampling=2.0, **options)
    budget = max(len(r.response_ids) for group in first.unfinished for r in group) - 1
    second = run_collect(
        model, LengthGrader(), first.unfinished, 1, max_response_tokens=budget, **options
    )
    assert second.counts["regenerated"] >= 1
    lengths = [len(r.response_ids) for group in second.finished for r in group]
    assert max(lengths) <= budget


def test_counts_of_the_samplers_work_are_those_of_the_step(model):
    counts = run_collect(model, LengthGrader(), dynamic_sampling=False).counts
    sampled = 4 * 4  # groups x members
    assert counts["preempted"] == 0 and counts["row_steps"] >= sampled
    assert 0 < counts["row_steps"] / counts["decode_steps"] <= 12


def test_without_partial_rollout_the_surplus_is_dropped(model):
    collected = run_collect(
        model, LengthGrader(), over_sampling=2.0, dynamic_sampling=False, prompts_per_step=2
    )
    assert collected.counts["aborted"] >= 1 and collected.unfinished == []


def test_evaluation_is_the_same_every_time_and_in_order(model):
    def run(slots):
        sampler = Sampler(model, [2, 3, 4], slots=slots, tokenizer=WordTokenizer())
        return rollout.evaluate(
            sampler, LengthGrader(), PROBLEMS,
            samples=3, max_new_tokens=24, temperature=1.0, think="auto", seed=0,
        )  # fmt: skip

    first, second = run(4), run(64)
    assert [g[0].problem.id for g in first] == [p.id for p in PROBLEMS]
    assert [tokens(g) for g in first] == [tokens(g) for g in second]


def test_the_benchmark_of_long_tails_drives_the_real_collection(monkeypatch):
    """A change of `collect` must not break the benchmark, nor switch off what it compares."""
    from benchmarks import tail

    for name, value in {"STEPS": 2, "PROMPTS": 3, "CAP": 100, "SLOTS": 8}.items():
        monkeypatch.setattr(tail, name, value)
    shares_of = {mode: tail.measure(mode) for mode in tail.MODES}
    for shares in shares_of.values():
        parts = [shares[part] for part in ("trained", "later", "thrown away", "idle")]
        assert sum(parts) == pytest.approx(1) and min(parts) > -1e-9 and shares["trained"] > 0
    idle = {mode: shares["idle"] for mode, shares in shares_of.items()}
    assert idle["static batches"] > idle["continuous batching"]
