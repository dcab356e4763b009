"""Scores over k against the enumeration of all subsets; bands against the truth they must cover."""

import json
import math
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from run.scores import (
    LEVEL,
    band,
    best_at_k,
    count_votes,
    maj_at_k,
    pass_at_k,
    resamples,
    subset_sizes,
)

VECTORS = json.loads((Path(__file__).parent / "data/justrl2_golden.json").read_text())
VECTORS = {v["name"]: v for v in (VECTORS["vectors"] if isinstance(VECTORS, dict) else VECTORS)}


def over_subsets(n, k, score):
    """Mean of score(indices) over all subsets of k of n: the definition."""
    subsets = list(combinations(range(n), k))
    return sum(map(score, subsets)) / len(subsets)


def vote(answers, right):
    """Chance that a vote over `answers` (None: no answer) is right, ties broken at random."""
    given = [a for a in answers if a is not None]
    most = max(map(given.count, given), default=0)
    tied = {a for a in given if given.count(a) == most}
    return len(tied & right) / len(tied) if tied else 0.0


def test_pass_at_k_equals_the_golden_vector_and_the_textbook_case():
    inputs, expected = (VECTORS["metrics/pass_at_k"][part] for part in ("inputs", "expected"))
    rewards, size = inputs["rewards"], inputs["group_size"]
    groups = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    for name, value in expected.items():
        k = int(name.split("@")[1])
        ours = sum(pass_at_k(len(g), sum(g), k) for g in groups) / len(groups)
        assert ours == pytest.approx(value, rel=1e-12)
    assert pass_at_k(16, 3, 4) == pytest.approx(0.607143, abs=1e-6)


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                exact = over_subsets(n, k, lambda s, c=c: float(any(i < c for i in s)))
                assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12)


# Each response gives answer 0..3 or none; any set of answers may be right.
responses = st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(responses, st.sets(st.integers(0, 3)), st.integers(1, 9))
def test_maj_at_k_is_the_mean_over_all_subsets(answers, right, k):
    n, k = len(answers), min(k, len(answers))
    votes = [answers.count(a) for a in range(4)]
    ours = maj_at_k(n, votes, [a in right for a in range(4)], k)
    exact = over_subsets(n, k, lambda s: vote([answers[i] for i in s], right))
    assert ours == pytest.approx(exact, abs=1e-12)


def test_maj_at_k_in_closed_form():
    # Two answers, 5 right of 8 votes: right if at least 2 of 3 are, half if 2 of 4 are.
    def chance(j, k):
        return math.comb(5, j) * math.comb(3, k - j) / math.comb(8, k)

    assert maj_at_k(8, [5, 3], [True, False], 3) == pytest.approx(chance(2, 3) + chance(3, 3))
    by_hand = chance(2, 4) / 2 + chance(3, 4) + chance(4, 4)
    assert maj_at_k(8, [5, 3], [True, False], 4) == pytest.approx(by_hand)
    assert maj_at_k(8, [2, 1], [True, False], 1) == 2 / 8  # five without an answer
    assert maj_at_k(8, [2, 1], [True, False], 8) == 1  # which do not vote
    assert maj_at_k(4, [], [], 2) == 0
    assert maj_at_k(4, [2, 2], [True, False], 4) == 0.5
    for votes in ([3, 2, 2], [1, 6, 1], [4, 4]):  # a vote of two decides nothing
        n, right = sum(votes), [True] + [False] * (len(votes) - 1)
        assert maj_at_k(n, votes, right, 2) == pytest.approx(votes[0] / n)


def test_maj_at_k_is_quick_for_64_different_answers(timed):
    start = time.perf_counter()
    spread = [24] + [1] * 20 + [2] * 6 + [4] * 2
    scores = [maj_at_k(64, spread, [True] + [False] * 28, k) for k in subset_sizes(64)]
    assert scores[-1] == 1 and scores == sorted(scores)
    assert time.perf_counter() - start < 5 or not timed


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_best_at_k_is_the_mean_over_all_subsets_and_never_above_pass_at_k(pairs, k):
    values, rewards = zip(*pairs, strict=True)
    n, k = len(pairs), min(k, len(pairs))

    def best(subset):
        top = max(values[i] for i in subset)
        tied = [rewards[i] for i in subset if values[i] == top]
        return sum(tied) / len(tied)

    ours, ceiling = best_at_k(values, rewards, k), pass_at_k(n, sum(rewards), k)
    assert ours == pytest.approx(over_subsets(n, k, best), abs=1e-12)
    assert ours <= ceiling + 1e-12
    assert best_at_k(rewards, rewards, k) == pytest.approx(ceiling)  # a perfect critic
    assert best_at_k([0.5] * n, rewards, k) == pytest.approx(sum(rewards) / n)  # a dead one


def test_sizes_are_powers_of_two_and_n():
    assert [subset_sizes(n) for n in (1, 2, 5, 16)] == [
        [1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8, 16],
    ]  # fmt: skip


# ---- bands


def test_bands_cover_the_true_mean_as_often_as_they_say():
    # Problems with Beta(1, 2) pass rates and 4 responses each: scores as an evaluation has them.
    generator, problems, trials = torch.Generator().manual_seed(0), 60, 400
    beta = 1 - torch.rand(trials, problems, generator=generator).sqrt()
    right = torch.rand(trials, problems, 4, generator=generator) < beta[..., None]
    covered = 0
    for trial, scores in enumerate(right.double().mean(-1)):
        b = band(scores.tolist(), resamples(problems, trial))
        assert b["low"] < b["value"] < b["high"]
        covered += b["low"] <= 1 / 3 <= b["high"]
    assert abs(covered / trials - LEVEL) < 0.035  # three standard errors, and a little of its bias


def test_a_band_has_the_width_of_the_normal_one_for_many_problems():
    torch.manual_seed(0)
    scores = torch.rand(3000, dtype=torch.float64)
    b = band(scores.tolist(), resamples(3000, 1))
    half = 1.96 * float(scores.std()) / 3000**0.5
    assert b["value"] == pytest.approx(float(scores.mean()))
    assert (b["high"] - b["low"]) / 2 == pytest.approx(half, rel=0.06)


def test_a_paired_band_is_narrower_than_the_scores_apart():
    torch.manual_seed(0)
    before, picks = torch.rand(200), resamples(200, 0)
    after = before + 0.05 + 0.02 * torch.randn(200)

    def width(b):
        return b["high"] - b["low"]

    paired = band((after - before).tolist(), picks)
    assert paired["low"] > 0.04 and width(paired) < width(band(after.tolist(), picks)) / 5


def test_bands_are_repeatable_and_flat_where_all_problems_agree():
    assert torch.equal(resamples(7, 3), resamples(7, 3))
    assert not torch.equal(resamples(7, 3), resamples(7, 4))
    assert band([0.5] * 7, resamples(7, 3)) == {"value": 0.5, "low": 0.5, "high": 0.5}


def test_votes_are_counted_by_class_and_the_most_frequent_comes_first():
    answers = ["2", "1", None, "1.0", "3", "2", "2.0"]
    right = [False, True, False, True, False, False, False]
    votes = count_votes(answers, right, lambda a, b: float(a) == float(b))
    assert votes == [("2", 3, False), ("1", 2, True), ("3", 1, False)]
    assert count_votes([None, None], [False, False], None) == []
