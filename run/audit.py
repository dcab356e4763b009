"""What the critic knows, measured from the group structure of one batch.

The responses of a group share their problem, so what V says about them can be split into how well
it tells problems apart and how well it tells responses to the same problem apart. docs/critic.md
explains how to read each number.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Values closer than this count as equal: the same state, packed with other sequences, comes out a
# rounding error apart.
TIE = 1e-6
FRACTIONS = torch.linspace(0, 1, 11, dtype=torch.float64)  # 0, 10, ..., 100 % of a response


def audit(
    values: Tensor, mask: Tensor, rewards: Tensor, group_ids: Tensor
) -> tuple[dict[str, float], dict[str, list]]:
    """(numbers for metrics.jsonl, curves for audit.jsonl) of values, mask (N, T) against raw
    rewards 0 or 1, group_ids (N,) from 0.

    V is compared with the outcome r itself, whatever the algorithm regresses on. What cannot be
    computed (no group has right and wrong members, V or the pass rates are constant) is NaN.
    docs/critic.md defines each statistic and says what is healthy.
    """
    live, outcomes = values[mask].double(), rewards[:, None].expand_as(values)[mask].double()
    owners = group_ids[:, None].expand_as(values)[mask]
    right = rewards > 0.5
    at = at_fractions(values, mask)
    auc, pairs = within_group_auc(at, right, group_ids)
    lengths = mask.sum(1, keepdim=True).double()
    length_auc, _ = within_group_auc(-lengths, right, group_ids)
    # All members of a group start in the same state, so V(s_0) of the first is that of all.
    members = [group_ids == g for g in range(int(group_ids.max()) + 1)]
    starts = torch.stack([at[m, 0][0] for m in members])
    rates = torch.stack([right[m].double().mean() for m in members])
    # Only groups with right and wrong members, each with the same weight: the gap between the two
    # curves is what V knows beyond the problem.
    mixed = [m for m in members if right[m].any() and not right[m].all()]
    between, within = explained_variance_split(live, outcomes, owners)
    numbers = {
        "v_mean": live.mean(),
        "v_std": live.std(unbiased=False),
        "bias": live.mean() - outcomes.mean(),
        "explained_variance": explained_variance(live, outcomes),
        "explained_variance_between": between,
        "explained_variance_within": within,
        "start_corr": correlation(starts, rates),
        "start_rank_corr": correlation(average_ranks(starts), average_ranks(rates)),
        "start_calibration_error": calibration_error(starts, rates),
        "start_auc": auc[0],
        "mid_auc": auc[5],
        "end_auc": auc[10],
        "length_auc": length_auc[0],
    }
    curves = {
        "start": torch.stack([starts, rates], 1).tolist(),
        "auc": auc.tolist(),
        "pairs": pairs,
        "length_auc": float(length_auc[0]),
        "v_right": mean_curve(at, [m & right for m in mixed]),
        "v_wrong": mean_curve(at, [m & ~right for m in mixed]),
        "mixed": len(mixed),
    }
    return {name: float(x) for name, x in numbers.items()}, curves


def mean_curve(at: Tensor, members: Sequence[Tensor]) -> list[float]:
    """Mean over groups of the mean V of their `members` (N,) at each tenth of a response, `at`
    (N, 11); NaN without groups.
    """
    if not members:
        return [math.nan] * at.shape[1]
    return torch.stack([at[m].mean(0) for m in members]).mean(0).tolist()


def explained_variance(values: Tensor, outcomes: Tensor) -> float:
    """1 - Var(r - V) / Var(r) over tokens (A,): 1 perfect, 0 as good as a constant, below 0 worse.
    NaN if r is constant.
    """
    variance = outcomes.var(unbiased=False)
    left = (outcomes - values).var(unbiased=False)
    return float(1 - left / variance) if variance > 0 else float("nan")


def explained_variance_split(values: Tensor, outcomes: Tensor, owners: Tensor) -> list[float]:
    """[between problems, within groups]: explained variance of the groups' token means, and of what
    each token adds to its group's mean; values, outcomes, owners (A,).

    Var = between + within holds for r and for r - V, so the two average to `explained_variance`
    with the two parts of Var(r) as weights. The group baseline has all of the first, 0 of the
    second.
    """
    counts = torch.bincount(owners).clamp(min=1).double()

    def parts(x):
        means = (torch.bincount(owners, weights=x) / counts)[owners]
        return (means - x.mean()).square().mean(), (x - means).square().mean()

    left, all_ = parts(outcomes - values), parts(outcomes)
    return [
        float(1 - e / v) if v > 1e-12 else float("nan") for e, v in zip(left, all_, strict=True)
    ]


def at_fractions(x: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N, 11) float64: x at 0, 10, ..., 100 % of each response, first to last token."""
    last = (mask.sum(1) - 1).clamp(min=0)
    index = (FRACTIONS.to(x.device) * last[:, None]).round().long()
    return x.gather(1, index).double()


def within_group_auc(scores: Tensor, right: Tensor, group_ids: Tensor) -> tuple[Tensor, int]:
    """((K,), pairs): share of the pairs of a right and a wrong response *to the same problem* in
    which the right one scores higher, a tie counting half; scores (N, K), right (N,) bool.

    Over all pairs of all groups; a group all right or all wrong has none.
    """
    wins, pairs = torch.zeros_like(scores[0]), 0
    for g in range(int(group_ids.max()) + 1):
        mine = group_ids == g
        difference = scores[mine & right][:, None] - scores[mine & ~right][None]
        wins += ((difference > TIE).double() + (difference.abs() <= TIE).double() / 2).sum((0, 1))
        pairs += difference.shape[0] * difference.shape[1]
    return wins / pairs if pairs else torch.full_like(wins, torch.nan), pairs


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing their mean rank: (N,) float64."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation; of average ranks, Spearman's. NaN if either is constant."""
    if len(x) < 2 or not (x.std() > 0 and y.std() > 0):
        return float("nan")
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def calibration_error(forecasts: Tensor, rates: Tensor) -> float:
    """Expected calibration error: mean over groups of the gap between mean forecast and mean pass
    rate of their bin (tenths of 0..1; a forecast outside goes to the nearest).
    """
    bins = (forecasts * 10).floor().clamp(0, 9).long()
    gaps = torch.bincount(bins, weights=forecasts - rates)
    return float(gaps.abs().sum() / len(forecasts))
