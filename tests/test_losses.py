"""losses.py: masks, micro-batches, numerical traps seen in other trainers, speed, messages."""

import dataclasses
import inspect
import math
import time
from pathlib import Path

import pytest
import torch
from helpers import mask_of, rand
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms
import losses
from config import Config

INF, NAN = math.inf, math.nan
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean")
SETTINGS = [  # every objective with what can be combined with it
    dict(objective="clip", dual_clip=3.0, clip_high=0.28),
    dict(objective="clip", ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    dict(objective="clip", ratio_level="sequence-token", opsm_delta=0.01),
    dict(objective="cispo"),
    dict(objective="sapo", kl_coef=0.1, kl_estimator="k3_is"),
    dict(objective="gmpo", clip_low=0.4, clip_high=0.4, entropy_coef=0.1),
    dict(objective="trust_mask", kl_coef=0.1, kl_estimator="k2"),
    dict(objective="reinforce", entropy_control="clip_cov"),
    dict(objective="clip", entropy_control="kl_cov", kl_coef=0.1),
]


# --- padding and masks -----------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [(7.0, -3.0), (NAN, INF)])
def test_gae_does_not_look_into_padding(garbage):
    """Values after the end leak into the last real token, or the recursion starts there."""
    values = torch.tensor([[0.2, 0.4, 0.6, *garbage]])
    rewards = torch.tensor([[0.0, 0, 1, 0, 0]])
    mask = mask_of([3], 5)
    advantages, _ = losses.gae(rewards, values, mask, 0.9)
    torch.testing.assert_close(advantages, torch.tensor([[0.704, 0.56, 0.4, 0, 0]]))
    kw = dict(token_rewards=rewards, raw_token_rewards=rewards, mask=mask)
    advantages, returns = losses.justrl2_advantages(**kw, values=values, gae_lambda_k=0.5)
    expected = torch.tensor([[0.6107243, 0.5174802, 0.4, 0, 0]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-6)
    assert torch.equal(returns, torch.tensor([[1.0, 1, 1, 0, 0]]))
    # The same row beside a full one, and a response of one token.
    values = torch.cat([values, torch.rand(1, 5), torch.tensor([[0.3, NAN, NAN, NAN, NAN]])])
    rewards = torch.tensor([[0.0, 0, 1, 0, 0], [0.0, 0, 0, 0, 1], [1.0, 0, 0, 0, 0]])
    advantages, returns = losses.gae(rewards, values, mask_of([3, 5, 1]), 0.9)
    torch.testing.assert_close(advantages[0], torch.tensor([0.704, 0.56, 0.4, 0, 0]))
    torch.testing.assert_close(advantages[2], torch.tensor([0.7, 0, 0, 0, 0]))
    torch.testing.assert_close(returns[2, 0], torch.tensor(1.0))


def policy_inputs(lengths, seed=0, dtype=torch.float32):
    mask = mask_of(lengths)
    old = -rand(*mask.shape, seed=seed, dtype=dtype).abs() - 0.1

    def drift(s):
        return 0.4 * rand(*mask.shape, seed=s, dtype=dtype)

    return dict(
        logprobs=old + drift(seed + 1),
        old_logprobs=old,
        advantages=rand(*mask.shape, seed=seed + 2, dtype=dtype),
        mask=mask,
        ref_logprobs=old + drift(seed + 3),
        entropy=rand(*mask.shape, seed=seed + 4, dtype=dtype).abs(),
        weights=losses.importance_weights(old, old + 3 * drift(seed + 5), mask)[0],
        cov_mask=algorithms.covariance_mask(old, drift(seed + 6), mask, 0.2),
    )


def loss_and_gradients(inputs, setting, rows=slice(None), row_weights=None):
    part = {k: v[rows] for k, v in inputs.items()}
    live = {k: part[k].clone().requires_grad_() for k in ("logprobs", "entropy")}
    if row_weights is not None:
        row_weights = row_weights[rows]
    loss, metrics = losses.policy_loss(**(part | live), **setting, row_weights=row_weights)
    gradients = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
    return (
        loss.detach(),
        [torch.zeros_like(part["mask"]) if g is None else g for g in gradients],
        metrics,
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_masked_tokens_change_no_bit_of_the_policy_loss(setting, garbage):
    clean = policy_inputs([3, 7, 1, 5])
    mask = clean["mask"]
    dirty = {
        k: v if v.dtype == torch.bool else v.masked_fill(~mask, garbage) for k, v in clean.items()
    }
    clean = {k: v if v.dtype == torch.bool else v.masked_fill(~mask, 0) for k, v in clean.items()}
    a, b = loss_and_gradients(clean, setting), loss_and_gradients(dirty, setting)
    assert torch.equal(a[0], b[0]) and torch.isfinite(a[0])
    for x, y in zip(a[1], b[1], strict=True):
        assert torch.equal(x, y) and not x[~mask].any()
    for key, pair in a[2].items():
        assert pair[0] == b[2][key][0] and pair[1] == b[2][key][1], key


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_masked_tokens_change_no_bit_of_anything_else(garbage):
    mask = mask_of([3, 7, 0, 5])
    a, b, c = (rand(*mask.shape, seed=s) for s in range(3))

    def dirty(x):
        return x.masked_fill(~mask, garbage)

    def zero(x):
        return x.masked_fill(~mask, 0)

    ids, amounts = torch.tensor([0, 0, 1, 1]), torch.tensor([0.5, -1.0, 0.2, 1.0])
    lam = losses.length_adaptive_lambda(mask.sum(1), 0.5)

    def everything(wash):
        x, y, z = wash(a), wash(b), wash(c)
        kw = dict(token_rewards=x, raw_token_rewards=y, values=z, mask=mask, group_ids=ids)
        for row in algorithms.ALGORITHMS.values():
            group = ids if row.defaults.get("group_size") != 1 else torch.arange(4)
            config = Config(**row.defaults)
            yield from row.advantages(config, **(kw | dict(group_ids=group)))
        yield algorithms.distillation_advantages(old_logprobs=x, teacher_logprobs=y, mask=mask)[0]
        yield losses.inject_terminal(losses.masked(x, mask), amounts, mask, lam)
        yield losses.whiten(x, mask)
        yield losses.whiten(x, mask, shift_mean=False)
        yield algorithms.covariance_mask(x, y, mask, 0.3)
        for mode in ("none", "tis", "icepop"):
            weights, metrics = losses.importance_weights(x, y, mask, mode)
            yield from (weights, *(number for pair in metrics.values() for number in pair))
        for clip in (0.2, None):
            live = x.clone().requires_grad_()
            loss, metrics = losses.value_loss(live, y, z, mask, value_clip=clip)
            yield from (loss.detach(), torch.autograd.grad(loss, live)[0])
            yield from (number for pair in metrics.values() for number in pair)

    for i, (clean, soiled) in enumerate(zip(everything(zero), everything(dirty), strict=True)):
        if clean is not None:
            assert torch.equal(clean, soiled) and bool(torch.isfinite(clean).all()), i


# --- micro-batches, row order, ranks -----------------------------------------------------------

SPLITS = [
    [[0, 1], [2, 3]],
    [[0], [1, 2, 3]],
    [[0], [1], [2], [3]],
    [[0, 3], [1, 2]],
    [[3, 1, 0, 2]],
]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_one_normaliser_for_the_whole_update(splits):
    """A mean over micro-batches of means gives 1.6, 2.5 or 1.3542 instead of 1.3."""
    lengths, c = [2, 3, 5, 10], torch.tensor([4.0, 1, 2, 0.5])
    mask = mask_of(lengths)
    expected = {
        "token-mean": 26 / 20,
        "seq-mean-token-mean": 7.5 / 4,
        "seq-mean-token-sum-norm": 26 / 40,
        "prompt-mean": (11 / 5 + 15 / 15) / 2,
    }
    ids = torch.tensor([0, 0, 1, 1])
    for mode, right in expected.items():
        weights = losses.aggregation_weights(mode, mask.sum(1), group_ids=ids, constant=10)
        theta = torch.tensor(1.0, requires_grad=True)
        total = 0.0
        for rows in splits:  # a micro-batch is cut to its own longest response
            width = max(lengths[i] for i in rows)
            per_token = (theta * c[rows])[:, None].expand(-1, width)
            total = total + losses.aggregate(
                per_token, mask[rows, :width], row_weights=weights[rows]
            )
        total.backward()
        assert float(total.detach()) == pytest.approx(right, abs=1e-6)
        assert float(theta.grad) == pytest.approx(right, abs=1e-6)
        whole = losses.aggregate(c[:, None].expand_as(mask), mask, mode, group_ids=ids, constant=10)
        assert float(whole) == pytest.approx(right, abs=1e-6)
    # The critic's gradient does not scale with the number of micro-batches either.
    values = torch.zeros(mask.shape, requires_grad=True)
    targets = c.sqrt()[:, None].expand_as(mask)
    weights = losses.aggregation_weights("token-mean", mask.sum(1))
    parts = [
        losses.value_loss(
            values[r], values.detach()[r], targets[r], mask[r], row_weights=weights[r]
        )[0]
        for r in splits
    ]
    assert float(sum(parts).detach()) == pytest.approx(1.3, abs=1e-6)
    (gradient,) = torch.autograd.grad(sum(parts), values)
    torch.testing.assert_close(gradient, losses.masked(-2 * targets / 20, mask))


@settings(max_examples=30, deadline=None)
@given(
    st.permutations(range(6)), st.integers(1, 6), st.sampled_from(SETTINGS), st.sampled_from(MODES)
)
def test_rows_may_be_reordered_and_split_at_will(order, size, setting, mode):
    inputs = policy_inputs([4, 9, 1, 6, 3, 8], dtype=torch.float64)
    counts = inputs["mask"].sum(1)
    weights = losses.aggregation_weights(
        mode, counts, group_ids=torch.tensor([5, 1, 5, 1, 1, 5]), constant=12
    )
    whole = loss_and_gradients(inputs, setting, row_weights=weights)
    parts = [order[i : i + size] for i in range(0, 6, size)]
    results = [loss_and_gradients(inputs, setting, rows, weights) for rows in parts]
    torch.testing.assert_close(sum(r[0] for r in results), whole[0], rtol=1e-10, atol=1e-12)
    for k in range(2):
        gradient = torch.zeros_like(whole[1][k])
        for rows, result in zip(parts, results, strict=True):
            gradient[rows] = result[1][k]
        torch.testing.assert_close(gradient, whole[1][k], rtol=1e-10, atol=1e-12)
    for key, (numerator, denominator) in whole[2].items():
        summed = sum(r[2][key][0] for r in results), sum(r[2][key][1] for r in results)
        torch.testing.assert_close(summed[0], numerator, rtol=1e-5, atol=1e-5)
        assert summed[1] == denominator


@settings(max_examples=30, deadline=None)
@given(
    st.permutations(range(6)), st.integers(0, 40), st.sampled_from(sorted(algorithms.ALGORITHMS))
)
def test_advantages_do_not_depend_on_row_order_or_padding(order, padding, name):
    row, lengths = algorithms.ALGORITHMS[name], [4, 9, 1, 6, 3, 8]
    alone = row.defaults.get("group_size") == 1
    ids = torch.arange(6) if alone else torch.tensor([5, 1, 5, 1, 1, 5])

    def advantages(rows, width):
        mask = mask_of(lengths, width)[rows]
        noise = rand(6, 9, seed=1)
        values = torch.nn.functional.pad(noise, (0, width - 9), value=NAN)[rows]
        rewards = losses.terminal_reward(torch.tensor([1.0, 0, 1, 0, 1, 0])[rows], mask)
        kw = dict(token_rewards=rewards, raw_token_rewards=rewards, values=values, mask=mask)
        result, _ = row.advantages(Config(**row.defaults), **kw, group_ids=ids[rows])
        return losses.whiten(result, mask)[:, :9]

    shuffled = advantages(list(order), 9 + padding)
    torch.testing.assert_close(
        shuffled, advantages(list(range(6)), 9)[list(order)], rtol=1e-6, atol=1e-6
    )


def test_a_filtered_response_leaves_sum_and_count_but_an_empty_one_counts():
    counts, kept = torch.tensor([2, 3, 0, 10]), torch.tensor([True, True, True, False])
    ids = torch.tensor([0, 0, 1, 1])
    expected = {
        "token-mean": [1 / 6, 1 / 6, 1 / 6, 0],
        "seq-mean-token-mean": [1 / 6, 1 / 9, 1 / 3, 0],
        "seq-mean-token-sum-norm": [1 / 24, 1 / 24, 1 / 24, 0],
        "prompt-mean": [1 / 10, 1 / 10, 1 / 2, 0],
    }
    for mode, right in expected.items():
        c = losses.aggregation_weights(mode, counts, group_ids=ids, constant=8, kept=kept)
        torch.testing.assert_close(c, torch.tensor(right, dtype=torch.float64))
        nothing = losses.aggregation_weights(
            mode, counts, group_ids=ids, constant=8, kept=kept & ~kept
        )
        assert not nothing.any()


# --- numerical traps -----------------------------------------------------------------------------


def test_a_rejected_token_with_an_overflowing_weight():
    """exp(1000) times 0 is NaN unless the weight is removed with `where`."""
    old = torch.tensor([[1000.0, -1.0, NAN]])
    rollout = torch.tensor([[0.0, -1.0, -INF]])
    mask = torch.tensor([[True, True, False]])
    weights, metrics = losses.importance_weights(old, rollout, mask, "icepop", 0.5, 5.0)
    assert torch.equal(weights, torch.tensor([[0.0, 1, 0]]))
    new = old.clone().requires_grad_()
    loss, _ = losses.policy_loss(new, old, torch.ones(1, 3), mask, weights=weights)
    assert loss == -0.5
    (gradient,) = torch.autograd.grad(loss, new)
    assert torch.equal(gradient, torch.tensor([[0.0, -0.5, 0]]))
    assert all(bool(torch.isfinite(x)) for pair in metrics.values() for x in pair)


def test_the_windows_of_icepop_and_tis():
    ratios = torch.tensor([[0.49, 0.51, 4.9, 5.1]])
    mask = torch.ones_like(ratios, dtype=torch.bool)
    for mode, right in (("icepop", [0, 0.51, 4.9, 0]), ("tis", [0.5, 0.51, 4.9, 5.0])):
        weights, metrics = losses.importance_weights(ratios.log(), 0 * ratios, mask, mode, 0.5, 5.0)
        torch.testing.assert_close(weights, torch.tensor([right]))
        assert metrics["is_outside"][0] == 2
    closed, _ = losses.importance_weights(
        torch.zeros(1, 1), torch.zeros(1, 1), mask[:, :1], "icepop", 1, 1
    )
    assert closed == 1


def test_a_filtered_response_is_no_token_of_a_metric():
    """Three of four rows masked: a ratio of exactly 1 was reported as 0.4."""
    mask = torch.tensor([[True, True, False], *[[False] * 3] * 3])
    zero = torch.zeros(4, 3)
    _, weighted = losses.importance_weights(zero, zero, mask)
    _, trained = losses.policy_loss(zero, zero, zero + 1, mask)
    _, valued = losses.value_loss(zero, zero, zero, mask)
    for metrics in (weighted, trained, valued):
        assert {int(tokens) for _, tokens in metrics.values()} == {2}
    for part, total in (weighted["is_ratio"], trained["ratio"], trained["ess"]):
        assert part / total == 1
    _, nothing = losses.policy_loss(zero, zero, zero + 1, mask & ~mask)
    assert {tuple(map(int, pair)) for pair in nothing.values()} == {(0, 0)}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_a_log_prob_that_is_not_finite_gets_weight_zero(bad, mode):
    weights, metrics = losses.importance_weights(
        torch.tensor([[bad, -1.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2).bool(), mode
    )
    assert torch.equal(weights, torch.tensor([[0.0, 1.0]]))
    assert all(bool(torch.isfinite(x)) for pair in metrics.values() for x in pair)
    assert metrics["is_nonfinite"] == (1, 2)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("mode", ["none", "tis", "icepop"])
def test_a_log_prob_of_the_sampler_that_is_not_finite_is_counted(bad, mode):
    """It took its token out of the loss in every mode, without a word."""
    one, sampled = -torch.ones(1, 3), torch.tensor([[bad, -1.0, bad]])
    mask = torch.tensor([[True, True, False]])
    weights, metrics = losses.importance_weights(one, sampled, mask, mode)
    assert torch.equal(weights, torch.tensor([[0.0, 1.0, 0.0]]))
    assert metrics["is_nonfinite"] == (1, 2)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("jump", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_stays_finite(setting, jump, advantage):
    """new - old = 200; min(inf, 1.28) is fine, its gradient 0 * inf is not."""
    new = torch.tensor([[jump, 0.1]], requires_grad=True)
    zero = torch.zeros(1, 2)
    mask = torch.ones(1, 2).bool()
    loss, metrics = losses.policy_loss(
        new,
        zero,
        torch.full((1, 2), advantage),
        mask,
        ref_logprobs=zero,
        cov_mask=mask,
        **setting,
    )
    (gradient,) = torch.autograd.grad(loss, new)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(gradient).all())
    assert all(bool(torch.isfinite(x)) for pair in metrics.values() for x in pair)


def test_the_surrogate_at_an_overflowing_ratio():
    new = torch.tensor([[200.0]], requires_grad=True)
    zero, mask = torch.zeros(1, 1), torch.ones(1, 1).bool()
    loss, _ = losses.policy_loss(new, zero, zero + 1, mask, clip_high=0.28)
    assert loss.item() == pytest.approx(-1.28) and torch.autograd.grad(loss, new)[0] == 0
    loss, _ = losses.policy_loss(new, zero, zero - 1, mask, clip_high=0.28)
    assert loss.item() == pytest.approx(math.exp(losses.MAX_LOG_RATIO), rel=1e-6)
    loss, _ = losses.policy_loss(new, zero, zero - 1, mask, clip_high=0.28, dual_clip=3.0)
    assert loss.item() == 3 and torch.autograd.grad(loss, new)[0] == 0


def test_a_value_that_is_not_finite_is_counted_and_trains_nothing():
    values = torch.tensor([[NAN, 0.5, INF]], requires_grad=True)
    loss, metrics = losses.value_loss(
        values, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3).bool()
    )
    assert loss.item() == pytest.approx(0.64 / 3)  # V = 0.5, clipped to 0.2 around 0
    assert metrics["nonfinite"] == (2, 3)
    assert torch.equal(torch.autograd.grad(loss, values)[0], torch.zeros(1, 3))


def test_an_old_value_that_is_not_finite_is_counted():
    one, old = torch.ones(1, 3), torch.tensor([[0.0, NAN, -INF]])
    for mask, bad in (([True, True, True], 2), ([True, False, True], 1)):
        mask = torch.tensor([mask])
        _, metrics = losses.value_loss(one, old, one, mask)
        assert metrics["nonfinite"] == (bad, mask.sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_is"])
def test_a_reference_log_prob_that_is_not_finite_is_no_kl_of_zero(estimator):
    """It was taken as KL 0 and counted nowhere: a broken reference looked like a perfect policy."""
    zero, reference = torch.zeros(1, 4), torch.tensor([[-1.0, NAN, -INF, INF]])
    for mask, bad in (([True] * 4, 3), ([True, False, True, False], 1)):
        mask = torch.tensor([mask])
        loss, metrics = losses.policy_loss(
            zero, zero, zero + 1, mask, ref_logprobs=reference, kl_coef=0.1, kl_estimator=estimator
        )
        assert metrics["nonfinite"] == (bad, mask.sum()) and torch.isfinite(loss)


def test_whitening_nearly_constant_advantages_of_a_large_mean():
    """E[x^2] - E[x]^2 in float32 is negative here, and its root NaN."""
    x = 1000 + 1e-3 * rand(1, 10_000)
    mask = torch.ones_like(x, dtype=torch.bool)
    one_pass = float(x.square().mean() - x.mean().square())
    assert not 0.5 < one_pass / float(x.double().var()) < 2  # or this input would be harmless
    whitened = losses.whiten(x, mask)
    exact = (x.double() - x.double().mean()) / (x.double().var() + 1e-8).sqrt()
    torch.testing.assert_close(whitened.double(), exact, rtol=0, atol=0.05)
    assert abs(float(whitened.mean())) < 0.05 and abs(float(whitened.std()) - 1) < 0.05


def test_whitening_gives_mean_zero_and_unit_variance_over_unmasked_tokens():
    mask = mask_of([5, 30, 12])
    x = losses.whiten(rand(3, 30) * 3 + 2, mask)[mask]
    assert abs(float(x.mean())) < 1e-6 and float(x.std()) == pytest.approx(1, abs=1e-6)


def test_lambda_does_not_collapse_to_one():
    """bfloat16 rounds k^(1/L) to 1 from L = 355, float32 from about 2e7."""
    lengths = torch.tensor([354, 355, 126_976, 30_000_000])
    lam = losses.length_adaptive_lambda(lengths, 0.5)
    assert bool((lam < 1).all())
    torch.testing.assert_close(
        lam ** lengths.double(), torch.full((4,), 0.5).double(), rtol=1e-7, atol=0
    )
    assert bool((lam[:2].bfloat16() == torch.tensor([0.99609375, 1.0])).all())
    assert torch.equal(losses.length_adaptive_lambda(lengths, 1.0), torch.ones(4).double())


# --- rewards, filters, conventions ---------------------------------------------------------------


def test_the_std_convention():
    """S5: one right of eight."""
    rewards = torch.zeros(8, 1)
    rewards[3] = 1
    kw = dict(token_rewards=rewards, mask=rewards == rewards, group_ids=torch.zeros(8))
    for setting, winner, loser in (
        (dict(std_ddof=0), 2.6458, -0.3780),
        (dict(std_ddof=1), 2.4749, -0.3536),
        (dict(std_normalize=False), 0.875, -0.125),
    ):
        advantages, _ = losses.grpo_advantages(**kw, **setting)
        assert float(advantages[3]) == pytest.approx(winner, abs=1e-4)
        assert float(advantages[0]) == pytest.approx(loser, abs=1e-4)


def test_the_length_reward_is_for_groups_with_two_distinct_correct_lengths():
    lengths = torch.tensor([100, 300, 200, 900, 100, 100, 500, 700])
    correct = torch.tensor([True, True, False, False, True, True, True, False])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    kw = dict(weight=0.2, min_longest=0)
    bonus = algorithms.length_reward(correct, lengths, ids, **kw, min_spread=0)
    expected = torch.tensor([0.1, -0.1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(bonus, expected)
    assert not algorithms.length_reward(correct, lengths, ids, **kw, min_spread=201).any()
    assert not algorithms.length_reward(correct, lengths, ids, min_spread=0, min_longest=301).any()


def test_covariance_mask_is_global_and_never_marks_a_constant_advantage():
    mask = mask_of([10, 30, 20])
    old, advantages = rand(3, 30, seed=1), rand(3, 30, seed=2)
    chosen = algorithms.covariance_mask(old, advantages, mask, 0.1)
    x, y = old[mask].double(), advantages[mask].double()
    covariance = (x - x.mean()) * (y - y.mean())
    expected = torch.zeros(60, dtype=torch.bool)
    expected[covariance.argsort(descending=True)[:6]] = True
    assert torch.equal(chosen[mask], expected) and not chosen[~mask].any()
    order = [2, 0, 1]
    moved = algorithms.covariance_mask(old[order], advantages[order], mask[order], 0.1)
    assert torch.equal(moved, chosen[order])
    assert not algorithms.covariance_mask(old, torch.ones_like(old), mask, 0.1).any()
    assert not algorithms.covariance_mask(old, advantages, mask, 0.0).any()


def test_overlong_injection_is_the_penalty_as_terminal_reward_under_its_own_lambda():
    lengths = [3, 8]
    mask = mask_of(lengths)
    penalty = torch.tensor([-0.5, -1.0])
    lam = algorithms.vapo_lambda(torch.tensor(lengths), 0.5)
    injected = losses.inject_terminal(torch.zeros(2, 8), penalty, mask, lam)
    for i, n in enumerate(lengths):
        for t in range(n):
            right = float(penalty[i]) * (1 - 1 / (0.5 * n)) ** (n - 1 - t)
            assert float(injected[i, t]) == pytest.approx(right, rel=1e-6)
    assert not injected[~mask].any()


# --- speed ---------------------------------------------------------------------------------------


def test_length_adaptive_gae_of_the_full_budget_is_fast_and_exact(timed):
    length = 126_976
    mask = torch.ones(1, length, dtype=torch.bool)
    values = torch.rand(1, length, generator=torch.Generator().manual_seed(0))
    rewards = losses.terminal_reward(torch.ones(1), mask)
    kw = dict(token_rewards=rewards, raw_token_rewards=rewards, mask=mask)
    advantages, _ = losses.justrl2_advantages(**kw, values=values)
    lam = losses.length_adaptive_lambda(mask.sum(1), 0.5)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        advantages, _ = losses.gae(rewards, values, mask, lam)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05 or not timed
    v, decay, running = values[0].double().tolist() + [0.0], 0.5 ** (1 / length), 0.0
    exact = [0.0] * length
    for t in reversed(range(length)):
        running = float(t == length - 1) + v[t + 1] - v[t] + decay * running
        exact[t] = running
    error = (advantages[0].double() - torch.tensor(exact, dtype=torch.float64)).abs().max()
    assert float(error) < 1e-6


# --- messages and the table ----------------------------------------------------------------------


def test_bad_input_is_met_with_one_sentence():
    ones, mask = torch.ones(2, 3), torch.ones(2, 3).bool()
    alone = dict(token_rewards=ones, mask=mask, group_ids=torch.tensor([0, 1]))
    counts = torch.tensor([3, 3])
    for words, call in {
        "at least two responses": lambda: losses.grpo_advantages(**alone),
        "raise group_size": lambda: algorithms.rloo_advantages(**alone),
        "gae_lambda_k must be in": lambda: losses.length_adaptive_lambda(counts, 0.0),
        "alpha of lambda = .* must be positive": lambda: algorithms.vapo_lambda(counts, 0.0),
        "choose token-mean": lambda: losses.aggregation_weights("mean", counts),
        "needs constant": lambda: losses.aggregation_weights("seq-mean-token-sum-norm", counts),
        "needs group_ids": lambda: losses.aggregation_weights("prompt-mean", counts),
        "choose none, tis or icepop": lambda: losses.importance_weights(ones, ones, mask, "mis"),
        "choose k1, k2, k3": lambda: losses.approx_kl(ones, ones, "k4"),
        "choose token, sequence": lambda: losses.ratio_at_level(ones, mask, "word"),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def test_every_row_names_parts_that_exist():
    fields = {f.name for f in dataclasses.fields(Config)}
    for name, row in algorithms.ALGORITHMS.items():
        assert row.objective in losses.OBJECTIVES, name
        assert row.defaults["aggregation"] in MODES, name
        assert row.about and "\n" not in row.about, name
        # A default that is no field of Config would be dropped in silence.
        assert row.defaults.keys() <= fields, (name, row.defaults.keys() - fields)
        assert row.critic == ("values" in inspect.signature(row.advantage).parameters), name


def test_a_misspelt_argument_of_a_new_advantage_function_fails_at_once():
    """`**_` swallowed it, and the function ran on its default for ever."""

    def advantages(*, token_rewards, mask, gae_lamda=0.95):
        raise NotImplementedError

    with pytest.raises(TypeError, match="advantages names gae_lamda: neither a tensor of a step"):
        algorithms.row(advantages, "clip", "a row with a misspelt argument")
    with pytest.raises(TypeError, match="names group_sise"):
        algorithms.row(losses.grpo_advantages, "clip", "a misspelt default", group_sise=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'std_normalise'"):
        losses.grpo_advantages(token_rewards=None, mask=None, group_ids=None, std_normalise=False)


def test_the_gradient_weights_in_the_documentation():
    settings_by_label = {
        "REINFORCE": dict(objective="reinforce"),
        "clip 0.2 / 0.2": {},
        "clip 0.2 / 0.28": dict(clip_high=0.28),
        "dual clip, c = 1.2": dict(dual_clip=1.2),
        "CISPO 0.2 / 0.2": dict(objective="cispo"),
        "SAPO": dict(objective="sapo"),
        "GMPO 0.4 / 0.4": dict(objective="gmpo", clip_low=0.4, clip_high=0.4),
        "window 0.3 / 5 (SAO)": dict(objective="trust_mask", clip_low=0.3, clip_high=5.0),
    }
    text = (Path(__file__).parent.parent / "docs/objectives.md").read_text(encoding="utf-8")
    seen, advantage, ratios = set(), None, None
    for line in text.split("### Aggregation")[0].splitlines():
        label, *cells = [cell.strip().replace("−", "-") for cell in line.strip("| ").split("|")]
        if label.startswith("A = "):
            advantage, ratios = float(label.split()[2].strip(",")), [float(c) for c in cells]
        if label not in settings_by_label or ratios is None:
            continue
        new = torch.tensor(ratios, dtype=torch.float64).log()[:, None].requires_grad_()
        zero = torch.zeros_like(new)
        loss, _ = losses.policy_loss(
            new, zero, zero + advantage, zero == 0, **settings_by_label[label]
        )
        gradient = -len(ratios) * torch.autograd.grad(loss, new)[0][:, 0]
        assert [float(c) for c in cells] == pytest.approx(gradient.tolist(), abs=6e-4), line
        seen.add(label)
    assert seen == settings_by_label.keys()
