"""The critic audit: every statistic against brute force, and four critics told apart.

The synthetic responses are chains of steps that can each go wrong, so that the chance of a right
answer is known in every state: that is the perfect critic.
"""

import json
import math

import pytest
import torch

from data import Problem, Rollout, length_mask, to_batch
from losses import gae, grpo_advantages, justrl2_advantages, terminal_reward
from run import metrics
from run.audit import (
    at_fractions,
    audit,
    average_ranks,
    calibration_error,
    correlation,
    explained_variance,
    explained_variance_split,
    within_group_auc,
)

GROUPS, SIZE, STEPS = 60, 8, 10


def chains():
    """Responses of STEPS steps of three tokens and a stop token, five more if a step went wrong;
    problems differ in the chance to slip.

    Returns rewards, mask, group_ids and V by critic.
    """
    generator = torch.Generator().manual_seed(0)
    n = GROUPS * SIZE
    slip = (0.02 + 0.18 * torch.rand(GROUPS, generator=generator)).repeat_interleave(SIZE)[:, None]
    slips = torch.rand(n, STEPS, generator=generator) < slip
    broken = slips.cumsum(1) > 0  # after each step
    rewards = (~broken[:, -1]).float()
    late = torch.rand(n, generator=generator) < 0.9  # a wrong response is mostly the longer one
    lengths = 3 * STEPS + 1 + 5 * (broken[:, -1] & late)
    mask = length_mask(lengths)
    t = torch.arange(mask.shape[1])
    done = (t // 3).clamp(max=STEPS)  # steps known in the state before token t
    known = torch.cat([torch.zeros(n, 1, dtype=torch.bool), broken], 1)[:, done]
    perfect = torch.where(known, 0.0, (1 - slip) ** (STEPS - done))
    # The best guess from the number of tokens alone: how often responses that get so far are right.
    by_length = torch.stack([rewards[mask[:, i]].mean() for i in t]).expand(n, -1)
    critics = {
        "perfect": perfect,
        "constant": torch.full(mask.shape, 0.5),
        "length": by_length,
        "leaking": (0.1 + 0.8 * rewards[:, None]).expand(mask.shape),
    }
    return rewards, mask, torch.arange(GROUPS).repeat_interleave(SIZE), critics


@pytest.fixture(scope="module")
def audits():
    rewards, mask, group_ids, critics = chains()
    return {name: audit(v, mask, rewards, group_ids) for name, v in critics.items()}


# What each statistic says of each critic: (low, high), or None where it has no value.
EXPECTED = {
    #                               perfect         constant       length         leaking
    "v_std": [(0.3, 0.5), (0, 0), (0.01, 0.2), (0.35, 0.45)],
    "bias": [(-0.05, 0.05), (0.05, 0.3), (-0.05, 0.05), (-0.1, 0.1)],
    "explained_variance": [(0.4, 0.9), (0, 0), (0.0, 0.1), (0.9, 1)],
    "explained_variance_between": [(0.8, 1), (0, 0), (0.0, 0.1), (0.9, 1)],
    "explained_variance_within": [(0.3, 0.9), (0, 0), (0.0, 0.1), (0.9, 1)],
    "start_rank_corr": [(0.7, 1), None, None, (0.4, 0.6)],
    "start_calibration_error": [(0, 0.06), (0.05, 0.3), (0, 0.05), (0.1, 0.5)],
    "start_auc": [(0.5, 0.5), (0.5, 0.5), (0.5, 0.5), (1, 1)],
    "mid_auc": [(0.7, 0.9), (0.5, 0.5), (0.5, 0.5), (1, 1)],
    "end_auc": [(1, 1), (0.5, 0.5), (0.9, 1), (1, 1)],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_statistic_says_of_each_critic_what_it_should(audits, name):
    for critic, expected in zip(audits, EXPECTED[name], strict=True):
        value = audits[critic][0][name]
        if expected is None:
            assert math.isnan(value), critic
        else:
            low, high = expected
            assert low - 1e-9 <= value <= high + 1e-9, (critic, value)


def test_the_auc_curves_tell_the_critics_apart(audits):
    curves = {name: torch.tensor(c["auc"], dtype=torch.float64) for name, (_, c) in audits.items()}
    length = audits["perfect"][1]["length_auc"]
    assert all(c["length_auc"] == length for _, c in audits.values()) and length > 0.9
    assert (curves["constant"] == 0.5).all() and (curves["leaking"] == 1).all()
    assert curves["perfect"][0] == 0.5 and curves["perfect"][-1] == 1
    assert (curves["perfect"].diff() > 0).all()  # it learns of a slip when it happens
    # Nothing until the first response has ended, then exactly what length alone knows.
    assert (curves["length"][:9] == 0.5).all() and curves["length"][-1].item() == length


def test_v_along_right_and_wrong_responses_starts_equal(audits):
    rewards, *_ = chains()
    rates = rewards.view(GROUPS, SIZE).mean(1)
    _, curves = audits["perfect"]
    assert curves["mixed"] == int(((rates > 0) & (rates < 1)).sum()) < GROUPS
    assert curves["v_right"][0] == pytest.approx(curves["v_wrong"][0])  # the same problems
    assert curves["v_wrong"][-1] == 0 and curves["v_right"][-1] == 1
    assert audits["leaking"][1]["v_wrong"] == pytest.approx([0.1] * 11)


# ---- each statistic against brute force


@pytest.fixture(scope="module")
def noise():
    """Values of no meaning, ragged lengths, groups of unequal size in mixed order."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (50,), generator=generator)
    mask = length_mask(lengths)
    values = torch.rand(mask.shape, generator=generator)
    rewards = (torch.rand(50, generator=generator) < 0.4).float()
    group_ids = torch.cat([torch.arange(7), torch.randint(0, 7, (43,), generator=generator)])
    return values, mask, rewards, group_ids


def test_auc_equals_a_loop_over_all_pairs(noise):
    values, mask, rewards, group_ids = noise
    values = (values * 8).round() / 8  # ties
    scores = at_fractions(values, mask)
    auc, pairs = within_group_auc(scores, rewards > 0.5, group_ids)
    for k in range(11):
        points = [
            (0.5 if scores[i, k] == scores[j, k] else float(scores[i, k] > scores[j, k]))
            for i in range(50)
            for j in range(50)
            if group_ids[i] == group_ids[j] and rewards[i] == 1 and rewards[j] == 0
        ]
        assert pairs == len(points) and auc[k].item() == pytest.approx(sum(points) / len(points))


def test_at_fractions_reads_the_first_middle_and_last_token():
    x = torch.arange(21.0).expand(3, -1)
    at = at_fractions(x, length_mask(torch.tensor([21, 11, 1]), 21))
    assert at[0].tolist() == list(range(0, 21, 2))
    assert at[1].tolist() == list(range(11)) and at[2].tolist() == [0] * 11


def test_explained_variance_and_its_parts_equal_a_loop(noise):
    values, mask, rewards, group_ids = noise
    cells = [(i, t) for i in range(50) for t in range(mask.shape[1]) if mask[i, t]]
    v, r, g = (
        [f(i, t) for i, t in cells]
        for f in (
            lambda i, t: float(values[i, t]),
            lambda i, t: float(rewards[i]),
            lambda i, t: int(group_ids[i]),
        )
    )

    def mean(xs):
        return sum(xs) / len(xs)

    def parts(xs):
        of = {k: mean([x for x, h in zip(xs, g, strict=True) if h == k]) for k in set(g)}
        between = mean([(of[k] - mean(xs)) ** 2 for k in g])
        return between, mean([(x - of[k]) ** 2 for x, k in zip(xs, g, strict=True)])

    error = parts([a - b for a, b in zip(r, v, strict=True)])
    total = parts(r)
    tensors = (torch.tensor(v, dtype=torch.float64), torch.tensor(r, dtype=torch.float64))
    split = explained_variance_split(*tensors, torch.tensor(g))
    assert split == pytest.approx([1 - e / t for e, t in zip(error, total, strict=True)])
    whole = explained_variance(*tensors)
    assert whole == pytest.approx(1 - sum(error) / sum(total))
    weighted = sum(s * t for s, t in zip(split, total, strict=True)) / sum(total)
    assert whole == pytest.approx(weighted)


def test_rank_correlation_equals_counting(noise):
    x = (noise[0][:, 0] * 5).round().double()
    y = torch.rand(50, generator=torch.Generator().manual_seed(1)).double() + x / 5

    def count(xs):
        return [sum(a < b for a in xs) + (sum(a == b for a in xs) + 1) / 2 for b in xs]

    ranks = [count(z.tolist()) for z in (x, y)]
    assert average_ranks(x).tolist() == ranks[0]
    mean_x, mean_y = (sum(r) / 50 for r in ranks)

    def dot(a, b):
        return sum((p - mean_x) * (q - mean_y) for p, q in zip(a, b, strict=True))

    pearson = dot(*ranks) / math.sqrt(dot(ranks[0], ranks[0]) * dot(ranks[1], ranks[1]))
    assert correlation(average_ranks(x), average_ranks(y)) == pytest.approx(pearson)


def test_calibration_error_by_hand():
    # Bins 0, 3 (twice) and 9, where V above 1 goes too: gaps 0.1, 0.15 and 0.2 of means.
    forecasts = torch.tensor([0.05, 0.31, 0.39, 0.95, 1.25], dtype=torch.float64)
    rates = torch.tensor([0.15, 0.1, 0.3, 1.0, 0.8], dtype=torch.float64)
    expected = (1 * 0.1 + 2 * 0.15 + 2 * 0.2) / 5
    assert calibration_error(forecasts, rates) == pytest.approx(expected)


def test_the_audit_ignores_what_lies_outside_the_mask(noise):
    values, mask, rewards, group_ids = noise
    clean = audit(torch.where(mask, values, 0), mask, rewards, group_ids)
    assert clean == audit(torch.where(mask, values, torch.nan), mask, rewards, group_ids)


def test_a_batch_without_right_or_wrong_members_has_no_auc():
    mask = torch.ones(4, 3, dtype=torch.bool)
    numbers, curves = audit(torch.rand(4, 3), mask, torch.ones(4), torch.tensor([0, 0, 1, 1]))
    missing = "explained_variance explained_variance_within start_rank_corr end_auc length_auc"
    assert all(math.isnan(numbers[name]) for name in missing.split())
    assert curves["pairs"] == curves["mixed"] == 0 and math.isnan(curves["v_wrong"][0])


def test_a_rounding_error_between_equal_states_is_a_tie():
    scores = torch.tensor([[0.3], [0.3 + 1e-8]], dtype=torch.float64)
    auc, _ = within_group_auc(scores, torch.tensor([True, False]), torch.zeros(2).long())
    assert auc.tolist() == [0.5]


# ---- share of |A| by position


def one_group(length, **kwargs):
    rewards = torch.tensor([1.0, 0.0])
    mask = torch.ones(2, length, dtype=torch.bool)
    token_rewards = terminal_reward(rewards, mask)
    ids = torch.zeros(2, dtype=torch.long)
    return dict(token_rewards=token_rewards, mask=mask, group_ids=ids), mask


def test_advantages_of_grpo_lie_evenly_and_those_of_ppo_at_the_end():
    inputs, mask = one_group(200)
    even, _ = grpo_advantages(**inputs)
    assert metrics.position_share(even, mask, mask.sum(1)) == pytest.approx([0.1] * 10)
    # V constant at 1/2: |A_t| = 0.95^(L-1-t) / 2, so the shares are a geometric series.
    late, _ = gae(inputs["token_rewards"], torch.full((2, 200), 0.5), mask, 0.95, 1.0)
    q = 0.95**20
    expected = [q ** (9 - i) * (1 - q) / (1 - q**10) for i in range(10)]
    assert metrics.position_share(late, mask, mask.sum(1)) == pytest.approx(expected, rel=1e-4)
    assert expected[-1] > 0.6


def test_advantages_of_justrl2_lie_as_its_lambda_says():
    inputs, mask = one_group(200)
    values = torch.full((2, 200), 0.5)
    inputs |= dict(raw_token_rewards=inputs["token_rewards"], values=values)
    advantages, _ = justrl2_advantages(**inputs, gae_lambda_k=0.5)
    q = 0.5**0.1
    expected = [q ** (9 - i) * (1 - q) / (1 - q**10) for i in range(10)]
    assert metrics.position_share(advantages, mask, mask.sum(1)) == pytest.approx(
        expected, rel=1e-4
    )


def test_tenths_of_ragged_responses():
    mask = length_mask(torch.tensor([10, 20, 3]))
    x = torch.zeros(3, 20)
    x[0, 9], x[1, 18], x[2, 1], x[2, 5] = -1.0, 2.0, 1.0, 100.0
    assert metrics.position_share(x, mask, mask.sum(1)) == [0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0.75]


# ---- the file


def test_the_audit_of_a_step_is_one_line_of_json(tmp_path):
    rollouts = [
        Rollout(
            Problem("", 0, "", [5], ""), g, j, 0, [6] * 4, [0.0] * 4, [0] * 4, reward=float(g == j)
        )
        for g in range(2)
        for j in range(2)
    ]
    batch = to_batch(rollouts)
    values = torch.full((4, 4), 0.5)
    numbers = metrics.write_audit(tmp_path, 7, batch, batch.response_mask, values, values - 0.4)
    assert numbers["critic/end_auc"] == 0.5
    assert math.isnan(numbers["critic/start_corr"])
    assert numbers["policy/advantage_last_tenth"] == 0  # four tokens: tenths 0, 2, 5 and 7
    row = json.loads((tmp_path / "audit.jsonl").read_text())
    assert row["step"] == 7 and row["start"] == [[0.5, 0.5]] * 2 and row["pairs"] == 2
    numbers = metrics.write_audit(tmp_path, 8, batch, batch.response_mask, None, values)
    assert list(numbers) == ["policy/advantage_last_tenth"]
    row = json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[1])
    assert set(row) == {"step", "advantage_share"}


def test_a_tokens_tenth_is_that_of_the_whole_response_where_only_some_tokens_train():
    # Known fault: a response without a trained token divided by zero.
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 7:] = True
    shares = metrics.position_share(torch.ones(2, 10), mask, torch.tensor([10, 10]))
    assert shares == pytest.approx([0] * 7 + [1 / 3] * 3)
