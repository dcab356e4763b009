"""Groups are refilled while others decode, the ranks agree, and nothing that ended is lost.

No model: a response ends at a length drawn for its key, so thousands of decode steps take a second.
"""

import pickle
import random
import threading
from collections import Counter
from concurrent.futures import Future

import pytest
from helpers import LengthGrader, WordTokenizer, collect_config, tokens
from transformers import LlamaConfig

import rollout
from benchmarks.tail import Ranks
from data import DataOrder, Problem
from model import Transformer
from rollout import Collector, Group, Sampler, collect, has_signal, new_group

BUDGET = 40
PROBLEMS = [Problem(f"p{i}", i, "", [5] * (1 + i % 3), "") for i in range(50)]


def rarely(n):
    """Right for few lengths n: two groups of four in three have no right response."""
    return n % 8 == 1


def often(n):
    return n % 2 == 0


def never(n):
    return False


class ScriptedSampler(Sampler):
    """Notes for every decode step how many rows are alive."""

    def __init__(self, slots=12, every=1):
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        super().__init__(Transformer(config).requires_grad_(False), [2], slots, page=8)
        self.tokenizer, self.check_every, self.live = WordTokenizer(), every, []

    def _forward(self, cache, pieces):
        pass

    def _decode(self, scheduler, steps, step):
        self.live += [len(scheduler.running)] * steps
        rollouts = [row.rollout for row in scheduler.running]
        left = [1 + r.key % (BUDGET + 10) - len(r.response_ids) for r in rollouts]
        tokens = [[2 if i + 1 == n else 5 for i in range(steps)] for n in left]
        return tokens, [[0.0] * steps for _ in tokens]


class SlowGrader(LengthGrader):
    """A verdict comes when it comes."""

    def submit(self, *args):
        verdict, late = super().submit(*args), Future()
        timer = threading.Timer(random.random() / 300, lambda: late.set_result(verdict.result()))
        timer.start()
        return late


def steps_of(
    monkeypatch, ranks, count, right=rarely, grader=LengthGrader, every=1, slots=12, **changes
):
    """What `collect` returns in `count` steps; all ranks hold the same."""
    crew = Ranks(ranks)
    monkeypatch.setattr(rollout, "distributed", crew)
    options = dict(max_response_tokens=BUDGET, prompts_per_step=5) | changes
    config = collect_config(**options)

    def work(rank):
        sampler, order, buffer, steps = ScriptedSampler(slots, every), DataOrder(50, 0), [], []
        for step in range(count):
            sampler.weight_version = step
            collected = collect(sampler, grader(right), PROBLEMS, order, buffer, config, step)
            steps.append(collected)
            buffer = pickle.loads(pickle.dumps(collected.unfinished))  # as a checkpoint would
        return steps, order.state_dict()

    results = crew.run(work)
    for steps, order in results[1:]:
        assert order == results[0][1]
        for one, other in zip(results[0][0], steps, strict=True):
            assert one.counts == other.counts
            for part in ("groups", "unfinished", "finished"):
                assert summary(getattr(one, part)) == summary(getattr(other, part))
    return results[0][0]


def summary(groups):
    return [(g[0].group, tokens(g), [r.reward for r in g]) for g in groups]


def flat(group):
    return not has_signal(r.reward for r in group)


# ---- refills


def test_a_dropped_group_is_replaced_while_others_decode(monkeypatch):
    """Known fault: a round ran dry to its longest response before the next one started."""
    in_hand, exchange = [], rollout.Collector.exchange

    def watched(self):
        rollouts = exchange(self)
        if not self.over:
            in_hand.append(len(self.kept) + len(self.running))
        return rollouts

    monkeypatch.setattr(rollout.Collector, "exchange", watched)
    (step,) = steps_of(monkeypatch, 1, 1, over_sampling=2.0, max_refills=9, prompts_per_step=8)
    assert len(step.groups) == 8 and step.counts["refilled"] == sum(map(flat, step.finished)) > 3
    assert set(in_hand) == {16}
    assert step.counts["aborted"] + step.counts["surplus"] == 8


@pytest.mark.parametrize("over, group", [(1.75, 4), (3.0, 2)])
def test_no_slot_idles_while_groups_are_wanted_and_allowed(monkeypatch, over, group):
    """So many groups are in hand that each of 8 slots has one, however many are kept already."""
    sampler = ScriptedSampler(slots=8)
    config = collect_config(
        max_response_tokens=BUDGET, prompts_per_step=10, over_sampling=over, group_size=group,
        max_refills=20,
    )  # fmt: skip
    order, grader = DataOrder(50, 0), LengthGrader(rarely)
    step = collect(sampler, grader, PROBLEMS, order, [], config, 0)
    assert len(step.groups) == 10 and step.counts["refilled"] > 5
    assert set(sampler.live) == {8} and len(sampler.live) == step.counts["decode_steps"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("refills, over", [(0, 1.0), (0, 1.5), (2, 1.0), (2, 1.5)])
def test_the_groups_of_a_step_are_bounded(monkeypatch, ranks, refills, over):
    (step,) = steps_of(monkeypatch, ranks, 1, never, max_refills=refills, over_sampling=over)
    at_a_time = {1.0: 5, 1.5: 8}[over]
    assert step.groups == [] and step.counts["finished"] == at_a_time * (1 + refills)
    assert step.counts["refilled"] == at_a_time * refills and step.counts["aborted"] == 0


def test_groups_that_finish_first_are_kept_first(monkeypatch):
    (step,) = steps_of(
        monkeypatch, 1, 1, over_sampling=2.0, slots=100, partial_rollout=True,
        dynamic_sampling=False,
    )  # fmt: skip

    def longest(group):
        return min(BUDGET, max(1 + r.key % (BUDGET + 10) for r in group))

    kept = max(map(longest, step.groups))
    assert all(longest(g) >= kept for g in step.unfinished)


# ---- ranks


def test_without_over_sampling_any_number_of_ranks_collects_the_same(monkeypatch):
    """With the filter at work: what is drawn depends on how many groups are dropped alone."""
    one, two, five = (steps_of(monkeypatch, n, 3, max_refills=9) for n in (1, 2, 5))
    assert sum(s.counts["refilled"] for s in one) > 5
    for a, b, c in zip(one, two, five, strict=True):
        assert len(a.groups) == 5 and a.counts["surplus"] == a.counts["aborted"] == 0
        for part in ("groups", "finished", "unfinished"):
            x, y, z = (summary(getattr(s, part)) for s in (a, b, c))
            assert x == y == z


@pytest.mark.parametrize("exchanges", [256, 8])
@pytest.mark.parametrize("ranks", [1, 3])
def test_late_verdicts_change_nothing(monkeypatch, ranks, exchanges):
    monkeypatch.setattr(rollout, "EXCHANGES", exchanges)
    options = dict(over_sampling=2.0, partial_rollout=True, every=3, max_refills=9, slots=7)
    prompt = steps_of(monkeypatch, ranks, 3, **options)
    late = steps_of(monkeypatch, ranks, 3, grader=SlowGrader, **options)
    for a, b in zip(prompt, late, strict=True):
        assert a.counts == b.counts
        for part in ("groups", "finished", "unfinished"):
            assert summary(getattr(a, part)) == summary(getattr(b, part))


def test_ranks_share_the_work_and_stop_together(monkeypatch):
    """Known fault: a rank whose own groups had no signal ran dry while others still had plenty."""
    lives = {}
    decode = ScriptedSampler._decode

    def watched(self, *args):
        lives[threading.get_ident()] = self.live
        return decode(self, *args)

    monkeypatch.setattr(ScriptedSampler, "_decode", watched)
    (step,) = steps_of(
        monkeypatch, 4, 1, over_sampling=2.0, max_refills=9, slots=4, prompts_per_step=24
    )
    assert len(step.groups) == 24
    assert all(set(live) == {4} for live in lives.values())
    assert len({len(live) for live in lives.values()}) == 1 and len(lives) == 4


def test_a_new_group_goes_to_the_rank_with_the_fewest_running(monkeypatch):
    monkeypatch.setattr(rollout, "distributed", Ranks(3))
    rollout.distributed.own.rank = 1
    collector = Collector(None, None, None, None, None, running={0: 0, 1: 0, 2: 1, 3: 2, 4: 2})
    groups = [new_group(PROBLEMS[0], n, seed=0, step=0, size=2) for n in (5, 6, 7)]
    assert [collector.start(Group(g)) for g in groups] == [groups[0], [], groups[2]]
    assert [collector.running[n] for n in (5, 6, 7)] == [1, 0, 1]
    assert list(collector.groups) == [5, 7] and collector.is_busy


def test_a_rank_without_work_idles_in_the_count_of_steps(monkeypatch):
    """Slots looked as if in use while seven of eight ranks waited for the last group of one."""
    options = dict(prompts_per_step=1, dynamic_sampling=False)
    (one,), (four,) = (steps_of(monkeypatch, n, 1, **options) for n in (1, 4))
    assert one.counts["decode_steps"] > 0
    assert four.counts["decode_steps"] == 4 * one.counts["decode_steps"]
    assert four.counts["row_steps"] == one.counts["row_steps"]


def test_an_interrupted_rank_stops_all(monkeypatch):
    decode = ScriptedSampler._decode

    def interruptible(self, *args):
        self.interrupted = rollout.distributed.rank() == 1 and len(self.live) == 15
        return decode(self, *args)

    monkeypatch.setattr(ScriptedSampler, "_decode", interruptible)
    (step,) = steps_of(monkeypatch, 3, 1, never, max_refills=1000, partial_rollout=True)
    assert step.counts["decode_steps"] <= 3 * 17 and step.unfinished


# ---- nothing is lost

# Ends are looked for every eighth step and with many slots, so several groups end at once.
LATE = dict(right=often, every=8, slots=40, over_sampling=2.0, max_refills=9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_partial_rollout_every_group_is_trained_or_dropped_once_or_waits(monkeypatch, ranks):
    """Known fault: 60 prompts on 8 ranks finished 64 groups and threw four away in every step."""
    monkeypatch.setattr(rollout, "EXCHANGES", 4)
    steps = steps_of(monkeypatch, ranks, 6, partial_rollout=True, **LATE)
    ended = [g for step in steps for g in step.finished]
    waiting = steps[-1].unfinished
    numbers = [g[0].group for g in [*ended, *waiting]]
    assert sorted(numbers) == list(range(len(numbers)))
    trained = {g[0].group for step in steps for g in step.groups}
    assert trained == {g[0].group for g in ended if not flat(g)}
    assert sum(s.counts["surplus"] for s in steps) > 2
    for now, then in zip(steps, steps[1:], strict=False):
        assert len(now.groups) == 5
        surplus = now.unfinished[: now.counts["surplus"]]
        assert all(r.finished for g in surplus for r in g)
        # They are the first of the next step, as they were.
        assert {g[0].group for g in surplus} <= {g[0].group for g in then.groups}
        again = [g for g in then.finished if g[0].group in {s[0].group for s in surplus}]
        assert summary(again) == summary(sorted(surplus, key=lambda g: g[0].group))


def test_the_buffer_is_first_in_first_out(monkeypatch):
    buffer = [new_group(PROBLEMS[n], n, seed=0, step=0, size=4) for n in range(20)]
    config = collect_config(
        max_response_tokens=BUDGET, prompts_per_step=5, over_sampling=1.6, partial_rollout=True
    )
    sampler, order = ScriptedSampler(), DataOrder(50, 0)
    step = collect(sampler, LengthGrader(often), PROBLEMS, order, buffer, config, 1)
    begun = [any(r.response_ids for r in g) for g in step.unfinished]
    assert any(begun) and not all(begun) and order.drawn == 0
    numbers = [g[0].group for g in step.unfinished]
    assert numbers == sorted(set(range(20)) - {g[0].group for g in step.finished})


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_group_that_still_waits_is_not_counted_as_resumed_and_aborted(monkeypatch, ranks):
    """It was in every step in which it waited, and the counts told of work that nobody did."""
    options = dict(over_sampling=6.0, prompts_per_step=1, partial_rollout=True, max_refills=9)
    options |= dict(dynamic_sampling=False, every=8, slots=40)
    steps = steps_of(monkeypatch, ranks, 6, **options)
    waited = 0
    for now, then in zip(steps, steps[1:], strict=False):
        count = then.counts
        assert len(then.groups) == count["finished"] == 1
        if all(r.finished for r in now.unfinished[0]):  # surplus fills the step at once
            assert count["resumed"] == 1 and count["aborted"] == count["surplus"] == 0
            assert summary(then.unfinished) == summary(now.unfinished[1:])
            waited += len(then.unfinished)
        else:
            assert count["resumed"] == len(now.unfinished)
            assert count["aborted"] + count["surplus"] == len(then.unfinished)
    assert waited > 3


def test_the_order_hears_of_every_group_once(monkeypatch):
    heard = Counter()
    monkeypatch.setattr(DataOrder, "record", lambda self, i, rewards: heard.update({i: 1}))
    steps = steps_of(monkeypatch, 1, 6, partial_rollout=True, **LATE)
    assert sum(s.counts["surplus"] for s in steps) > 2
    assert heard == Counter(g[0].problem.index for s in steps for g in s.finished)


def test_surplus_that_is_stale_starts_anew(monkeypatch):
    steps = steps_of(monkeypatch, 1, 6, partial_rollout=True, max_staleness=0, **LATE)
    for number, step in enumerate(steps):
        assert {v for g in step.groups for r in g for v in r.weight_versions} == {number}
    late = [g for s in steps[:-1] for g in s.unfinished[: s.counts["surplus"]]]
    assert late and sum(s.counts["regenerated"] for s in steps) >= len(late)


@pytest.mark.parametrize("options", [{}, dict(partial_rollout=True, partial_mask_old=True)])
def test_surplus_that_could_not_be_trained_later_counts_as_finished(monkeypatch, options):
    steps = steps_of(monkeypatch, 1, 6, **LATE, **options)
    surplus = 0
    for step in steps:
        assert not any(all(r.finished for r in g) for g in step.unfinished)
        assert step.unfinished == [] or options
        kept = {g[0].group for g in step.groups}
        late = [g for g in step.finished if not flat(g) and g[0].group not in kept]
        assert len(late) == step.counts["surplus"]
        surplus += len(late)
    assert surplus > 2
