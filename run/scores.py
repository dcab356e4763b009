"""Scores of one problem from n graded responses, their bands over problems, and paired differences.

pass@k, maj@k and best@k ask what k responses would have scored. Each is the mean over all C(n, k)
subsets of the n, counted in closed form: unbiased, and without the noise of drawing subsets.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

# Verdicts on an answer that can vote. Any other (no box, two answers, a time-out) is on none.
ANSWERED = ("ok", "wrong", "parse")
RESAMPLES, LEVEL = 2000, 0.95  # of the bootstrap


def subset_sizes(n: int) -> list[int]:
    """The k at which scores are given: powers of two up to n, and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k of the n samples is right, unbiased (Codex 2107.03374): 1 -
    C(n-c,k)/C(n,k).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def answer_classes(
    answers: Sequence[str | None], equal: Callable[[str, str], bool]
) -> list[list[int]]:
    """Indices of equal answers, class by class in order of their first; None is no answer.

    An answer joins the first class whose first answer it equals. Equality by reading is not
    transitive (50% equals 0.5 and 50), so classes must not grow by their later members.
    """
    classes: list[list[int]] = []
    home: dict[str, list[int]] = {}
    for i, text in enumerate(answers):
        if text is None:
            continue
        if text not in home:
            known = [c for c in classes if equal(text, answers[c[0]])]
            classes += [] if known else [[]]
            home[text] = known[0] if known else classes[-1]
        home[text].append(i)
    return classes


def count_votes(
    answers: Sequence[str | None], right: Sequence[bool], equal: Callable[[str, str], bool]
) -> list[tuple[str, int, bool]]:
    """(answer, how many responses gave it, whether it is right), the most frequent first. The class
    of equal answers goes by its first one, which also says whether it is right.
    """
    classes = sorted(answer_classes(answers, equal), key=len, reverse=True)
    return [(answers[c[0]], len(c), right[c[0]]) for c in classes]


def maj_at_k(n: int, votes: Sequence[int], right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer among k of the n responses is right. votes[i] responses
    gave answer i.

    A tie goes to each of the tied answers with the same chance. Responses without an answer, n -
    sum(votes), fill the subset but do not vote; a subset of nothing else is wrong. Exact: for every
    right answer and every number v of its votes, count the draws in which no other has more than v.
    """
    total = Fraction(0)
    for winner in (i for i, is_right in enumerate(right) if is_right):
        for v in range(1, min(votes[winner], k) + 1):
            rivals = [c for i, c in enumerate(votes) if i != winner and c >= v]
            harmless = n - votes[winner] - sum(rivals)  # responses that can neither win nor tie
            ways = {(0, 0): 1}  # (rivals' responses drawn, rivals with v votes) -> number of draws
            for c in rivals:
                longer: dict[tuple[int, int], int] = defaultdict(int)
                for (drawn, ties), count in ways.items():
                    for j in range(min(v, k - v - drawn) + 1):
                        longer[drawn + j, ties + (j == v)] += count * math.comb(c, j)
                ways = longer
            for (drawn, ties), count in ways.items():
                rest = math.comb(harmless, k - v - drawn)
                total += Fraction(math.comb(votes[winner], v) * count * rest, 1 + ties)
    return float(total / math.comb(n, k))


def best_at_k(values: Sequence[float], rewards: Sequence[float], k: int) -> float:
    """Mean reward of the response with the highest value among k of the n; ties in random order."""
    n, ranked = len(values), []
    order = sorted(range(n), key=lambda i: -values[i])
    for _, group in groupby(order, key=lambda i: values[i]):
        tied = [rewards[i] for i in group]
        ranked += [sum(tied) / len(tied)] * len(tied)
    # Rank i is the best of a subset if the other k - 1 come from the n - 1 - i behind it.
    return sum(r * math.comb(n - 1 - i, k - 1) for i, r in enumerate(ranked)) / math.comb(n, k)


def is_repetitive(text: str) -> bool:
    """Longer than 10,000 characters, and the last 10,000 shrink more than tenfold under zlib."""
    tail = text[-10_000:].encode()
    return len(text) > 10_000 and len(tail) > 10 * len(zlib.compress(tail, 9))


def resamples(problems: int, seed: int) -> Tensor:
    """(RESAMPLES, P) int64: the bootstrap's problems, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(problems, (RESAMPLES, problems), generator=generator)


def band(scores: Sequence[float], picks: Tensor) -> dict[str, float]:
    """Mean over problems with its percentile bootstrap band, in float64; picks from `resamples`.

    The band of a mean of per-problem differences is a paired one.
    """
    values = torch.tensor(scores, dtype=torch.float64)
    edges = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.quantile(values[picks].mean(1), edges).tolist()
    return {"value": float(values.mean()), "low": low, "high": high}


def compare(before: Sequence[dict], after: Sequence[dict], picks: Tensor) -> dict[str, Any]:
    """Paired differences of two lists of problems, after minus before: each problem has `id`, `n`,
    `right` of n, and `scores` by name.

    `gained`: no response right before, at least one after; `lost`: the reverse. The change of avg
    is the sum of its parts over gained (discovery), lost, and all others (sharpening).
    """
    pairs = list(zip(before, after, strict=True))
    changes = {
        name: [b["scores"][name] - a["scores"][name] for a, b in pairs]
        for name in before[0]["scores"]
    }
    gained, lost = [], []
    parts = {"discovery": 0.0, "lost": 0.0, "sharpening": 0.0}
    for (a, b), change in zip(pairs, changes[f"avg@{before[0]['n']}"], strict=True):
        part = "sharpening"
        if bool(a["right"]) != bool(b["right"]):
            part, moved = ("discovery", gained) if b["right"] else ("lost", lost)
            moved.append({"id": a["id"], "before": a["right"], "after": b["right"], "n": a["n"]})
        parts[part] += change / len(before)
    differences = {name: band(change, picks) for name, change in changes.items()}
    return {"differences": differences, "avg_change": parts, "gained": gained, "lost": lost}
