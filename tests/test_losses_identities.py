"""The objectives tied to each other and to closed forms, by enumeration on toy policies."""

import math

import pytest
import torch
from helpers import mask_of
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms
import losses
from config import Config

F64 = torch.float64
OFF_POLICY = {
    "clip": dict(objective="clip"),
    "dual_clip": dict(objective="clip", dual_clip=3.0),
    "gspo": dict(objective="clip", ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": dict(objective="clip", ratio_level="sequence-token"),
    "cispo": dict(objective="cispo", clip_low=1.0, clip_high=4.0),
    "sapo": dict(objective="sapo"),
    "gmpo": dict(objective="gmpo", clip_low=0.4, clip_high=0.4),
    "trust_mask": dict(objective="trust_mask", clip_low=0.3, clip_high=5.0),
    "reinforce": dict(objective="reinforce"),
}


def rand(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def grad_of(loss, x):
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def brute_force_gae(rewards, values, lengths, lambdas, gamma):
    """The defining sum, term by term: A_t = sum_s (gamma lambda)^s delta_{t+s}."""
    out = torch.zeros_like(values, dtype=F64)
    for i, n in enumerate(lengths):
        v = values[i, :n].tolist() + [0.0]
        delta = [float(rewards[i, t]) + gamma * v[t + 1] - v[t] for t in range(n)]
        for t in range(n):
            out[i, t] = sum((gamma * lambdas[i]) ** s * delta[t + s] for s in range(n - t))
    return out


# --- advantages --------------------------------------------------------------------------------

row_lengths = st.lists(st.integers(0, 37), min_size=1, max_size=5).filter(any)
unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))


@settings(max_examples=60, deadline=None)
@given(row_lengths, st.data(), unit, st.integers(0, 5), st.booleans())
def test_gae_is_its_defining_sum(lengths, data, gamma, padding, one_lambda):
    lambdas = [data.draw(unit)] * len(lengths) if one_lambda else [data.draw(unit) for _ in lengths]
    mask = mask_of(lengths, max(lengths) + padding)
    rewards, values = rand(*mask.shape, seed=1), rand(*mask.shape, seed=2)
    expected = brute_force_gae(rewards, values, lengths, lambdas, gamma)
    for garbage in (math.nan, math.inf, 1e30):
        r, v = rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage)
        lam = lambdas[0] if one_lambda else torch.tensor(lambdas, dtype=F64)
        advantages, returns = losses.gae(r, v, mask, lam, gamma)
        torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(returns[mask], (advantages + values)[mask])
        assert not returns[~mask].any()


@settings(max_examples=40, deadline=None)
@given(row_lengths)
def test_lambda_one_gives_return_minus_value(lengths):
    mask = mask_of(lengths)
    rewards, values = rand(*mask.shape, seed=3), rand(*mask.shape, seed=4)
    advantages, returns = losses.gae(rewards, values, mask, 1.0)
    to_go = losses.masked(rewards, mask).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, losses.masked(to_go, mask), rtol=0, atol=1e-12)
    torch.testing.assert_close(advantages, losses.masked(to_go - values, mask), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.floats(0.01, 1.0))
def test_outcome_weight_at_the_first_token_depends_on_k_only(lengths, k):
    mask = mask_of(lengths)
    rewards = losses.terminal_reward(torch.ones(len(lengths), dtype=F64), mask)
    advantages, returns = losses.justrl2_advantages(
        token_rewards=rewards,
        raw_token_rewards=rewards,
        values=torch.zeros_like(rewards),
        mask=mask,
        gae_lambda_k=k,
    )
    n = torch.tensor(lengths, dtype=F64)
    torch.testing.assert_close(advantages[:, 0], k ** ((n - 1) / n), rtol=1e-10, atol=0)
    assert torch.equal(returns, mask.double())


def test_outcome_weights_of_short_responses():
    mask = mask_of([1, 2, 3, 10])
    rewards = losses.terminal_reward(torch.ones(4), mask)
    kw = dict(
        token_rewards=rewards, raw_token_rewards=rewards, values=torch.zeros(4, 10), mask=mask
    )
    first = losses.justrl2_advantages(**kw, gae_lambda_k=0.5)[0][:, 0]
    expected = torch.tensor([1.0, 0.7071, 0.6300, 0.5359])
    torch.testing.assert_close(first, expected, rtol=0, atol=5e-5)


groups = st.integers(2, 6).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.sampled_from([0.0, 1.0, -0.4, 0.7]), min_size=2 * size, max_size=2 * size),
    )
)


def group_case(size, rewards):
    lengths = [1 + (3 * i) % 7 for i in range(2 * size)]
    mask = mask_of(lengths)
    ids = torch.arange(2 * size) % 2  # members of a group need not be neighbours
    token_rewards = losses.terminal_reward(torch.tensor(rewards, dtype=F64), mask)
    return dict(token_rewards=token_rewards, mask=mask, group_ids=ids)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_group_baselines_and_their_relations(group):
    size, rewards = group
    case = group_case(size, rewards)
    mean_only = losses.grpo_advantages(**case, std_normalize=False)[0][:, 0]
    rloo = algorithms.rloo_advantages(**case)[0][:, 0]
    torch.testing.assert_close(rloo, size / (size - 1) * mean_only, rtol=1e-9, atol=1e-12)
    for ddof in (0, 1):
        normalised = losses.grpo_advantages(**case, std_ddof=ddof)[0][:, 0]
        r = torch.tensor(rewards, dtype=F64)
        for g in (0, 1):
            member = case["group_ids"] == g
            for advantages in (mean_only, rloo, normalised):
                assert abs(float(advantages[member].sum())) < 1e-9
            std = r[member].std(correction=ddof)
            expected = (r[member] - r[member].mean()) / (std + 1e-6)
            torch.testing.assert_close(normalised[member], expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_justrl2_with_k_one_and_v_equal_to_the_group_mean_is_mean_only_grpo(group):
    size, rewards = group
    case = group_case(size, rewards)
    r = torch.tensor(rewards, dtype=F64)
    mean = torch.stack([r[case["group_ids"] == g].mean() for g in (0, 1)])[case["group_ids"]]
    values = mean[:, None].expand(case["mask"].shape)
    justrl2, _ = losses.justrl2_advantages(
        **case, raw_token_rewards=case["token_rewards"], values=values, gae_lambda_k=1.0
    )
    grpo, _ = losses.grpo_advantages(**case, std_normalize=False)
    torch.testing.assert_close(justrl2, grpo, rtol=0, atol=1e-12)


def test_dividing_by_the_std_weighs_prompts_by_their_spread():
    for right in range(1, 8):
        p = right / 8
        rewards = torch.tensor([[1.0]] * right + [[0.0]] * (8 - right), dtype=F64)
        kw = dict(token_rewards=rewards, mask=torch.ones(8, 1).bool(), group_ids=torch.zeros(8))
        normalised, mean_only = (
            losses.grpo_advantages(**kw, std_normalize=s)[0] for s in (True, False)
        )
        ratio = normalised / mean_only
        torch.testing.assert_close(
            ratio, torch.full_like(ratio, 1 / math.sqrt(p * (1 - p))), rtol=1e-5, atol=0
        )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1 / 3])
def test_a_group_of_equal_rewards_gives_no_advantage(reward):
    kw = dict(
        token_rewards=torch.full((8, 1), reward, dtype=torch.float32),
        mask=torch.ones(8, 1).bool(),
        group_ids=torch.zeros(8),
    )
    for advantage in (losses.grpo_advantages, algorithms.rloo_advantages):
        assert float(advantage(**kw)[0].abs().max()) < 1e-8


def test_group_centring_is_gae_with_a_corrected_terminal_reward_and_nothing_for_one_sample():
    lengths = [4, 7, 2, 5, 6, 3]
    mask = mask_of(lengths)
    values, raw = rand(*mask.shape, seed=5), torch.tensor([1.0, 0, 1, 0, 0, 1], dtype=F64)
    rewards = losses.terminal_reward(raw, mask)
    kw = dict(token_rewards=rewards, raw_token_rewards=rewards, values=values, mask=mask)
    ids = torch.tensor([0, 1, 0, 1, 1, 0])
    centred, target = losses.justrl2_advantages(**kw, group_ids=ids, group_center=True)
    last = values[torch.arange(6), torch.tensor(lengths) - 1]
    for i in range(6):
        others = [j for j in range(6) if ids[j] == ids[i] and j != i]
        correction = -sum(float(raw[j] - last[j]) for j in others) / len(others)
        lam = 0.5 ** (1 / lengths[i])
        changed = rewards.clone()
        changed[i, lengths[i] - 1] += correction
        expected = brute_force_gae(changed[i : i + 1], values[i : i + 1], [lengths[i]], [lam], 1.0)
        torch.testing.assert_close(centred[i : i + 1], expected, rtol=0, atol=1e-12)
    plain, plain_target = losses.justrl2_advantages(**kw, group_ids=ids)
    assert torch.equal(target, plain_target) and not torch.equal(centred, plain)
    alone, _ = losses.justrl2_advantages(**kw, group_ids=torch.arange(6), group_center=True)
    assert torch.equal(alone, plain)


def test_critic_targets_see_no_penalty_and_only_ppo_bootstraps():
    lengths = [4, 7, 2]
    mask = mask_of(lengths)
    values, raw = rand(*mask.shape, seed=6), torch.tensor([1.0, 0, 1], dtype=F64)
    kw = dict(
        token_rewards=losses.terminal_reward(raw - 0.5, mask),
        raw_token_rewards=losses.terminal_reward(raw, mask),
        values=values,
        mask=mask,
    )
    n = torch.tensor(lengths, dtype=F64)
    outcome = losses.masked(raw[:, None], mask)
    ppo = losses.ppo_advantages(**kw, gae_lambda=0.95)
    vapo = algorithms.vapo_advantages(**kw, gae_lambda_alpha=0.3)
    justrl2 = losses.justrl2_advantages(**kw, gae_lambda_k=0.5)
    for (a, target), lambdas, bootstraps in (
        (ppo, [0.95] * 3, True),
        (vapo, (1 - 1 / (0.3 * n)).clamp(min=0).tolist(), False),
        (justrl2, (0.5 ** (1 / n)).tolist(), False),
    ):
        shaped = brute_force_gae(kw["token_rewards"], values, lengths, lambdas, 1.0)
        plain = brute_force_gae(kw["raw_token_rewards"], values, lengths, lambdas, 1.0)
        torch.testing.assert_close(a, shaped, rtol=0, atol=1e-12)
        expected = losses.masked(plain + values, mask) if bootstraps else outcome
        torch.testing.assert_close(target, expected, rtol=0, atol=1e-12)


# --- objectives --------------------------------------------------------------------------------


def policy_case(seed=0, spread=0.3):
    lengths = [3, 7, 1, 5]
    mask = mask_of(lengths)
    old = -rand(*mask.shape, seed=seed).abs()
    new = old + spread * rand(*mask.shape, seed=seed + 1)
    advantages = rand(4, 1, seed=seed + 2).expand(mask.shape)
    return new, old, advantages, mask


@pytest.mark.parametrize("name", OFF_POLICY)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_every_objective_has_the_reinforce_gradient_at_ratio_one(name, aggregation):
    _, old, advantages, mask = policy_case()
    new = old.clone().requires_grad_()
    loss, metrics = losses.policy_loss(
        new, old, advantages, mask, **OFF_POLICY[name], aggregation=aggregation
    )
    c = losses.aggregation_weights(aggregation, mask.sum(1))
    expected = losses.masked(-c[:, None] * advantages, mask)
    torch.testing.assert_close(grad_of(loss, new), expected, rtol=1e-9, atol=1e-12)
    assert metrics["clip_fraction"][0] == 0 and metrics["ratio"][0] == mask.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_an_infinite_clip_is_no_clip(level):
    new, old, advantages, mask = policy_case(spread=2.0)
    ratio = losses.ratio_at_level(new - old, mask, level).exp()
    expected = losses.aggregate(-ratio * advantages, mask)
    for name in ("clip", "trust_mask"):
        for dual in (None, math.inf):
            loss, metrics = losses.policy_loss(
                new,
                old,
                advantages,
                mask,
                objective=name,
                ratio_level=level,
                clip_low=math.inf,
                clip_high=math.inf,
                dual_clip=dual,
            )
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            assert metrics["clip_fraction"][0] == 0


def token_gradients(ratios, advantage, **setting):
    """d(maximised objective)/d(log prob) of single-token responses at the given ratios."""
    new = torch.tensor(ratios, dtype=F64).log()[:, None].requires_grad_()
    mask = torch.ones_like(new, dtype=torch.bool)
    loss, _ = losses.policy_loss(
        new, torch.zeros_like(new), torch.full_like(new, advantage), mask, **setting
    )
    return (-len(ratios) * grad_of(loss, new))[:, 0]


@pytest.mark.parametrize(
    "name, advantage, expected",
    [  # at ratios 0.5, 1.1 and 1.5; low = high = 0.2 unless the row says otherwise
        ("clip", 1.0, [0.5, 1.1, 0.0]),
        ("clip", -1.0, [0.0, -1.1, -1.5]),
        ("cispo", 1.0, [0.8, 1.1, 1.2]),
        ("cispo", -1.0, [-0.8, -1.1, -1.2]),
        ("reinforce", 2.0, [2.0, 2.0, 2.0]),
        ("trust_mask", 1.0, [0.0, 1.1, 0.0]),
        ("trust_mask", -1.0, [0.0, -1.1, 0.0]),
    ],
)
def test_gradient_weight_of_a_token(name, advantage, expected):
    gradients = token_gradients([0.5, 1.1, 1.5], advantage, objective=name)
    torch.testing.assert_close(gradients, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-12)


def test_gradient_weight_of_sapo_and_gmpo():
    ratios = torch.tensor([0.5, 1.1, 1.5], dtype=F64)
    for advantage, tau in ((1.0, 1.0), (-1.0, 1.05)):
        s = 1 / (1 + torch.exp(-tau * (ratios - 1)))
        expected = advantage * 4 * s * (1 - s) * ratios
        gradients = token_gradients(ratios.tolist(), advantage, objective="sapo")
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=0)
    low, high = -math.log(0.8), math.log(1.2)
    up = token_gradients([0.5, 1.1, 1.5], 1.0, objective="gmpo", clip_low=low, clip_high=high)
    down = token_gradients([0.5, 1.1, 1.5], -1.0, objective="gmpo", clip_low=low, clip_high=high)
    torch.testing.assert_close(up, torch.tensor([0.5, 1.1, 0.0], dtype=F64))
    torch.testing.assert_close(down, torch.tensor([0.0, -1.1, -1.5], dtype=F64))


def test_gmpo_without_a_clip_is_gspo_without_a_clip():
    new, old, advantages, mask = policy_case()
    wide = dict(clip_low=math.inf, clip_high=math.inf)
    gmpo, _ = losses.policy_loss(new, old, advantages, mask, objective="gmpo", **wide)
    gspo, _ = losses.policy_loss(new, old, advantages, mask, ratio_level="sequence", **wide)
    torch.testing.assert_close(gmpo, gspo, rtol=1e-12, atol=0)


def test_gspo_token_has_gspos_value_and_for_equal_advantages_its_gradient():
    new, old, advantages, mask = policy_case()
    new.requires_grad_()
    kw = dict(clip_low=10, clip_high=10)
    whole, _ = losses.policy_loss(new, old, advantages, mask, ratio_level="sequence", **kw)
    token, _ = losses.policy_loss(new, old, advantages, mask, ratio_level="sequence-token", **kw)
    torch.testing.assert_close(whole, token, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad_of(whole, new), grad_of(token, new), rtol=1e-9, atol=1e-12)
    uneven = rand(*mask.shape, seed=9)
    whole, _ = losses.policy_loss(new, old, uneven, mask, ratio_level="sequence", **kw)
    token, _ = losses.policy_loss(new, old, uneven, mask, ratio_level="sequence-token", **kw)
    s = losses.row_mean(new - old, mask)[:, None].exp()
    n = mask.sum()
    torch.testing.assert_close(
        grad_of(token, new), losses.masked(-s * uneven / n, mask).detach(), rtol=1e-9, atol=1e-12
    )
    per_row = losses.row_mean(uneven, mask)[:, None]
    torch.testing.assert_close(
        grad_of(whole, new), losses.masked(-s * per_row / n, mask).detach(), rtol=1e-9, atol=1e-12
    )


def test_stale_sequences_lose_their_negative_tokens_only():
    new, old, advantages, mask = policy_case()
    advantages = rand(*mask.shape, seed=9)
    drift = torch.tensor([-0.5, -0.5, 0.5, 0.0], dtype=F64)[:, None]
    new = (old + drift).requires_grad_()
    kw = dict(clip_low=10, clip_high=10)
    free, _ = losses.policy_loss(new, old, advantages, mask, **kw)
    held, metrics = losses.policy_loss(new, old, advantages, mask, **kw, opsm_delta=0.1)
    dropped = mask & (drift < -0.1) & (advantages < 0)
    assert torch.equal(grad_of(held, new), grad_of(free, new).masked_fill(dropped, 0))
    assert metrics["opsm_fraction"][0] == dropped.sum() > 0
    assert metrics["opsm_fraction"][1] == mask.sum()


# --- KL and entropy on a policy of three tokens --------------------------------------------------


def toy_policies():
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=F64).requires_grad_()
    reference = torch.tensor([-0.2, 0.7, 0.1], dtype=F64).log_softmax(0)
    return logits, reference


def expected_gradient(logits, *, old=None, **setting):
    """Exact E_{a ~ old}[gradient of policy_loss]: each token is a row with its probability."""
    logp = logits.log_softmax(0)[:, None]
    old = logp.detach() if old is None else old[:, None]
    loss, _ = losses.policy_loss(
        logp,
        old,
        setting.pop("advantages", torch.zeros(3, 1, dtype=F64)),
        torch.ones(3, 1, dtype=torch.bool),
        row_weights=old.exp()[:, 0],
        **setting,
    )
    return grad_of(loss, logits)


def kl_gradient(logits, p, q):
    return grad_of((p.exp() * (p - q)).sum(), logits)


def test_gradient_of_each_kl_estimator_by_enumeration():
    logits, reference = toy_policies()
    kw = dict(ref_logprobs=reference[:, None], kl_coef=1.0)
    logp = logits.log_softmax(0)
    reverse = kl_gradient(logits, logp, reference)
    forward = kl_gradient(logits, reference, logits.log_softmax(0))
    tolerance = dict(rtol=1e-9, atol=1e-12)
    for estimator, exact in (
        ("k1", 0 * reverse),
        ("k2", reverse),
        ("k3", forward),
        ("k3_is", reverse),
    ):
        gradient = expected_gradient(logits, **kw, kl_estimator=estimator)
        torch.testing.assert_close(gradient, exact, **tolerance)
    assert float((reverse - forward).abs().max()) > 0.01


def test_corrected_k3_stays_exact_off_policy():
    logits, reference = toy_policies()
    behaviour = torch.tensor([0.8, 0.1, -0.3], dtype=F64).log_softmax(0)
    kw = dict(ref_logprobs=reference[:, None], kl_coef=1.0, old=behaviour)
    reverse = kl_gradient(logits, logits.log_softmax(0), reference)
    corrected = expected_gradient(logits, **kw, kl_estimator="k3_is")
    torch.testing.assert_close(corrected, reverse, rtol=1e-9, atol=1e-12)
    plain = expected_gradient(logits, **kw, kl_estimator="k2")
    assert float((plain - reverse).abs().max()) > 0.01


def test_mean_of_k1_and_k3_is_the_kl():
    logits, reference = toy_policies()
    p = logits.log_softmax(0).detach()
    kl = (p.exp() * (p - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (p.exp() * losses.approx_kl(p, reference, estimator)).sum()
        torch.testing.assert_close(mean, kl, rtol=1e-12, atol=0)


def test_kl_cov_has_the_exact_gradient_of_the_kl_from_the_old_policy():
    logits, behaviour = toy_policies()
    gradient = expected_gradient(
        logits,
        old=behaviour,
        entropy_control="kl_cov",
        cov_mask=torch.ones(3, 1, dtype=torch.bool),
    )
    forward = kl_gradient(logits, behaviour, logits.log_softmax(0))
    torch.testing.assert_close(gradient, forward, rtol=1e-9, atol=1e-12)


def test_entropy_bonus_has_a_gradient():
    logits, _ = toy_policies()
    logp = logits.log_softmax(0)
    entropy = -(logp.exp() * logp).sum()
    zero = torch.zeros(1, 1, dtype=F64)
    loss, metrics = losses.policy_loss(
        zero, zero, zero, zero == 0, entropy=entropy.view(1, 1), entropy_coef=0.3
    )
    expected = grad_of(-0.3 * entropy, logits)
    torch.testing.assert_close(grad_of(loss, logits), expected, rtol=1e-12, atol=0)
    assert float(expected.abs().max()) > 0.01
    torch.testing.assert_close(metrics["entropy"][0].double(), entropy.detach(), rtol=1e-6, atol=0)


def entropy_of(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def test_entropy_falls_by_the_covariance_of_log_prob_and_advantage():
    """dH = -eta Cov(log pi, A) for a step eta along the natural policy gradient (2505.22617)."""
    logits = rand(12, seed=7).requires_grad_()
    advantages = rand(12, seed=8)
    p = logits.softmax(0).detach()
    old = logits.log_softmax(0).detach()[:, None]
    loss, _ = losses.policy_loss(
        logits.log_softmax(0)[:, None],
        old,
        advantages[:, None],
        torch.ones(12, 1, dtype=torch.bool),
        row_weights=p,
    )
    fisher = torch.diag(p) - torch.outer(p, p)
    eta = 1e-6
    step = -eta * torch.linalg.pinv(fisher) @ grad_of(loss, logits)
    change = entropy_of(logits.detach() + step) - entropy_of(logits.detach())
    logp = old[:, 0]
    covariance = (p * (logp - (p * logp).sum()) * (advantages - (p * advantages).sum())).sum()
    torch.testing.assert_close(change, -eta * covariance, rtol=1e-4, atol=0)


def test_covariance_control_keeps_entropy_up():
    """Tokens picked by covariance_mask are those whose update lowers entropy."""
    logits = rand(1, 40, seed=11).mul(1.5).requires_grad_()
    p = logits.softmax(-1).detach()
    tokens = torch.multinomial(p[0], 512, True, generator=torch.Generator().manual_seed(0))
    old = logits.log_softmax(-1).detach()[:, tokens]
    advantages = old + 0.3 * rand(1, 512, seed=12)  # likely tokens do well: entropy falls
    advantages = advantages - advantages.mean()
    mask = torch.ones_like(old, dtype=torch.bool)
    chosen = algorithms.covariance_mask(old, advantages, mask, 0.2)
    assert int(chosen.sum()) >= math.ceil(0.2 * 512)

    def entropy_after_a_step(**setting):
        new = logits.log_softmax(-1)[:, tokens]
        loss, _ = losses.policy_loss(new, old, advantages, mask, **setting)
        with torch.no_grad():
            return float(entropy_of(logits - 0.5 * grad_of(loss, logits)))

    before = float(entropy_of(logits.detach()))
    free = entropy_after_a_step()
    controlled = entropy_after_a_step(entropy_control="clip_cov", cov_mask=chosen)
    assert free < controlled < before


def test_clip_cov_silences_exactly_the_chosen_tokens():
    new, old, advantages, mask = policy_case()
    new.requires_grad_()
    chosen = algorithms.covariance_mask(old, rand(*mask.shape, seed=3), mask, 0.3)
    free, _ = losses.policy_loss(new, old, advantages, mask)
    held, _ = losses.policy_loss(
        new, old, advantages, mask, entropy_control="clip_cov", cov_mask=chosen
    )
    assert torch.equal(free, held)
    expected = grad_of(free, new).masked_fill(chosen, 0)
    assert torch.equal(grad_of(held, new), expected)


# --- the rows learn ------------------------------------------------------------------------------


def tabular_step(logits, row, rng, optimizer, updates=3):
    """Sample 4 prompts x 6 responses of 1 to 4 tokens from a table of logits, then update it."""
    prompts, size = 4, row.defaults.get("group_size", 6)
    n = prompts * size
    ids = torch.arange(n) // size
    lengths = 1 + torch.arange(n) % 4
    mask = torch.arange(4) < lengths[:, None]

    def table():
        return logits[ids].log_softmax(-1)

    tokens = torch.multinomial(table().detach().exp().flatten(0, 1), 1, generator=rng).view(n, 4)

    def pick():
        return table().gather(-1, tokens[..., None])[..., 0]

    right = losses.row_mean((tokens == 0).double(), mask)
    rewards = losses.terminal_reward(right, mask)
    old = pick().detach()
    advantages, _ = row.advantages(
        Config(**row.defaults),
        token_rewards=rewards,
        raw_token_rewards=rewards,
        values=torch.full((n, 4), 0.4, dtype=F64),
        mask=mask,
        group_ids=ids,
    )
    if row.defaults["whiten_advantages"]:
        advantages = losses.whiten(advantages, mask)
    weights = losses.aggregation_weights(
        row.defaults["aggregation"], lengths, group_ids=ids, constant=4
    )
    names = ("ratio_level", "clip_low", "clip_high", "dual_clip", "sapo_tau_pos", "sapo_tau_neg")
    setting = {k: row.defaults[k] for k in names if k in row.defaults}
    for _ in range(updates):
        loss, _ = losses.policy_loss(
            pick(), old, advantages, mask, objective=row.objective, row_weights=weights, **setting
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_row_learns_a_table(name):
    row, rng = algorithms.ALGORITHMS[name], torch.Generator().manual_seed(0)
    logits = torch.zeros(4, 4, 3, dtype=F64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(25):
        tabular_step(logits, row, rng, optimizer)
    assert float(logits.detach().softmax(-1)[..., 0].mean()) > 0.6  # 1/3 at the start
