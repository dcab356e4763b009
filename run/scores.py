"""Scores of a problem from n graded responses, their bands over problems, and paired differences.

pass@k, maj@k and best@k ask what k responses would have scored. Each is the mean over all C(n, k)
subsets of the n, counted and not simulated. So it is unbiased, and two evaluations differ by their
responses alone, not also by the subsets that were drawn.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data import Rollout
from rewards import ANSWERS, Verifier

# Verdicts on a response that has one answer, which can vote. The others (no box, two answers, a
# time-out) leave none to vote for.
ANSWERED = ("ok", "wrong", "parse")
RESAMPLES, LEVEL = 2000, 0.95  # of the bootstrap


class Vote(NamedTuple):
    """An answer to a problem, and how many of its responses gave it or an equal one."""

    answer: str
    count: int
    right: bool  # or 0 and 1


def subset_sizes(n: int) -> list[int]:
    """The k at which scores are given: powers of two up to n, and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k of the n responses is right, of which `correct` are.

    Unbiased (Codex 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def answer_classes(
    answers: Sequence[str | None], equal: Callable[[str, str], bool]
) -> list[list[int]]:
    """Indices of equal answers, class by class in order of their first; None is no answer.

    An answer joins the first class whose first answer it equals.
    """
    # The later members of a class are not asked: equality by reading is not transitive (50% equals
    # both 0.5 and 50), and a class would grow to hold answers that differ.
    classes: list[list[int]] = []
    class_of: dict[str, list[int]] = {}  # the same text is compared once
    for i, text in enumerate(answers):
        if text is None:
            continue
        if text not in class_of:
            found = next((c for c in classes if equal(text, answers[c[0]])), None)
            if found is None:
                found = []
                classes.append(found)
            class_of[text] = found
        class_of[text].append(i)
    return classes


def count_votes(
    answers: Sequence[str | None], right: Sequence[bool], equal: Callable[[str, str], bool]
) -> list[Vote]:
    """Votes of all answers, the most frequent first. The first of equal answers stands for them,
    and says whether they are right.
    """
    classes = sorted(answer_classes(answers, equal), key=len, reverse=True)
    return [Vote(answers[c[0]], len(c), right[c[0]]) for c in classes]


def maj_at_k(n: int, votes: Sequence[int], right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer among k of the n responses is right. votes[i] responses
    gave answer i.

    A tie goes to each of the tied answers with the same chance. Responses without an answer, n -
    sum(votes), take places in the subset but do not vote; a subset of nothing else is wrong.

    The exact sum over right answers w and the number v of their responses in the subset:

        1 / C(n, k)  sum_{w, v}  C(votes[w], v)  sum_{d, t}  R_v(d, t) C(rest, k - v - d) / (1 + t)

    R_v(d, t): ways to draw d responses from the rivals so that w loses to none and ties with t.
    rest: the responses that neither w nor a rival gave.
    """
    wins = Fraction(0)  # subsets that a right answer wins; 1 / (1 + t) of one that t rivals tie
    for winner in [i for i, is_right in enumerate(right) if is_right]:
        for v in range(1, min(votes[winner], k) + 1):
            # Answers of fewer than v responses can neither win nor tie: they are in the rest.
            rivals = [count for i, count in enumerate(votes) if i != winner and count >= v]
            rest = n - votes[winner] - sum(rivals)
            for (drawn, tied), ways in rival_draws(rivals, v, k - v).items():
                others = ways * math.comb(rest, k - v - drawn)
                wins += Fraction(math.comb(votes[winner], v) * others, 1 + tied)
    return float(wins / math.comb(n, k))


def rival_draws(rivals: Sequence[int], v: int, places: int) -> dict[tuple[int, int], int]:
    """{(d, t): number of ways to draw d <= places responses such that no rival is drawn more than v
    times, and t of them v times}. rivals[i] responses gave rival i.
    """
    # A dynamic program, rival by rival: the pairs (d, t) are few (places * rivals at most, about),
    # the subsets too many to list (C(64, 32) is 2e18).
    ways = {(0, 0): 1}
    for available in rivals:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (drawn, tied), count in ways.items():
            for j in range(min(v, places - drawn) + 1):
                longer[drawn + j, tied + (j == v)] += count * math.comb(available, j)
        ways = longer
    return ways


def best_at_k(values: Sequence[float], rewards: Sequence[float], k: int) -> float:
    """Mean reward of the response with the highest value among k of the n; a tie goes to each of
    the tied with the same chance.
    """
    n, ranked = len(values), []  # rewards in order of falling values; equal values share their mean
    order = sorted(range(n), key=lambda i: -values[i])
    for _, group in groupby(order, key=lambda i: values[i]):
        tied = [rewards[i] for i in group]
        ranked += [sum(tied) / len(tied)] * len(tied)
    # Response i of that order is the best of C(n - 1 - i, k - 1) subsets: the others rank below it.
    return sum(r * math.comb(n - 1 - i, k - 1) for i, r in enumerate(ranked)) / math.comb(n, k)


def is_repetitive(text: str) -> bool:
    """Whether a text ends in a loop: it is longer than 10,000 characters, and the last 10,000
    shrink more than tenfold under zlib.
    """
    tail = text[-10_000:].encode()
    return len(text) > 10_000 and len(tail) > 10 * len(zlib.compress(tail, 9))


def score_problem(
    group: Sequence[Rollout],
    grader: Verifier,
    *,
    vote: bool = True,
    finals: Sequence[float] | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """Scores by name of the n responses to a problem, and what they come from: a row of
    `per_problem` in the report.

    vote: also maj@k. finals: the critic's V of each response, for best@k. budget: the tokens after
    which an answer was forced (`force_answers`), for the share `forced`.
    """
    n, problem = len(group), group[0].problem
    right, credit = [r.correct == 1 for r in group], [r.correct for r in group]
    has_answer = problem.verifier in ANSWERS
    answers = [r.answer if has_answer and r.reason in ANSWERED else None for r in group]
    votes = count_votes(answers, right, lambda a, b: grader.equal(a, b, problem.verifier))
    counts, are_right = [v.count for v in votes], [v.right for v in votes]

    scores = {f"avg@{n}": sum(credit) / n}
    for k in subset_sizes(n):
        scores[f"pass@{k}"] = pass_at_k(n, sum(right), k)
        if vote:
            scores[f"maj@{k}"] = maj_at_k(n, counts, are_right, k)
        if finals is not None:
            scores[f"best@{k}"] = best_at_k(finals, credit, k)
    lengths = [len(r.response_ids) for r in group]
    scores["truncated"] = sum(r.finish_reason == "length" for r in group) / n
    if budget is not None:
        scores["forced"] = sum(length > budget for length in lengths) / n
    scores["repetitive"] = sum(is_repetitive(r.text) for r in group) / n
    scores["length"] = sum(lengths) / n
    return {
        "id": problem.id,
        "label": problem.label,
        "n": n,
        "right": sum(right),
        "answers": {v.answer: v.count for v in votes},
        "verdicts": dict(Counter(r.reason for r in group)),
        "scores": scores,
    }


def score_set(
    groups: Sequence[Sequence[Rollout]],
    grader: Verifier,
    *,
    seed: int,
    finals: Sequence[Sequence[float]] | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """Scores of a set with their bands, and the rows of its problems. seed: of the bootstrap;
    finals, budget: as in `score_problem`.
    """
    # A mean of maj@k over only those problems whose kind has answers would be of another set.
    vote = all(group[0].problem.verifier in ANSWERS for group in groups)
    rows = [
        score_problem(group, grader, vote=vote, finals=values, budget=budget)
        for group, values in zip(groups, finals or [None] * len(groups), strict=True)
    ]
    picks = resamples(len(rows), seed)
    scores = {
        name: band([row["scores"][name] for row in rows], picks) for name in rows[0]["scores"]
    }
    return {"responses": sum(map(len, groups)), "scores": scores, "per_problem": rows}


# ---- over problems


def resamples(problems: int, seed: int) -> Tensor:
    """(RESAMPLES, P) int64: indices of problems, drawn with replacement for the bootstrap."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(problems, (RESAMPLES, problems), generator=generator)


def band(scores: Sequence[float], picks: Tensor) -> dict[str, float]:
    """Mean over problems with its percentile bootstrap band, in float64; picks from `resamples`."""
    # Problems are drawn, not responses: more responses to one problem say nothing about the others.
    values = torch.tensor(scores, dtype=torch.float64)
    edges = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.quantile(values[picks].mean(1), edges).tolist()
    return {"value": float(values.mean()), "low": low, "high": high}


def paired_differences(
    before: Sequence[dict], after: Sequence[dict], picks: Tensor
) -> dict[str, Any]:
    """Differences of two evaluations, after minus before, problem by problem. Each problem has
    `id`, `n`, `right` of n, and `scores` by name.

    `gained`: no response was right before, at least one is after; `lost`: the reverse. The change
    of avg is the sum of its parts over gained (discovery), lost, and all others (sharpening).
    """
    pairs = list(zip(before, after, strict=True))
    # A band of per-problem differences is narrower than two bands side by side: that a problem is
    # hard for both models cancels.
    changes = {
        name: [b["scores"][name] - a["scores"][name] for a, b in pairs]
        for name in before[0]["scores"]
    }
    moved: dict[str, list[dict]] = {"gained": [], "lost": []}
    parts = {"discovery": 0.0, "lost": 0.0, "sharpening": 0.0}
    for (a, b), change in zip(pairs, changes[f"avg@{before[0]['n']}"], strict=True):
        part = "sharpening"
        if bool(a["right"]) != bool(b["right"]):
            part, where = ("discovery", "gained") if b["right"] else ("lost", "lost")
            counts = {"before": a["right"], "after": b["right"], "n": a["n"]}
            moved[where].append({"id": a["id"]} | counts)
        parts[part] += change / len(before)
    differences = {name: band(change, picks) for name, change in changes.items()}
    return {"differences": differences, "avg_change": parts} | moved
