"""Each row of ALGORITHMS against the equations of its paper, in loops over Python numbers."""

import math
import statistics

import pytest
import torch

import algorithms
import losses
from config import Config

# Six responses to two prompts, three each; C is the length that a sum over tokens is divided by.
LENGTHS, GROUPS, RAW = [1, 2, 4, 3, 2, 5], [0, 0, 0, 1, 1, 1], [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
PENALTY, C = [0.0, 0.0, -0.3, 0.0, -0.2, -0.1], 7


def group_mean(i, size=3):
    return sum(r + p for r, p, g in zip(RAW, PENALTY, GROUPS, strict=True) if g == GROUPS[i]) / size


def group_relative(scale):
    """Advantage r - group mean, by `scale` 1 or the group's standard deviation."""

    def advantage(i, values):
        group = [RAW[j] + PENALTY[j] for j in range(6) if GROUPS[j] == GROUPS[i]]
        std = statistics.pstdev(group) + 1e-6 if scale == "std" else 1.0
        return [(RAW[i] + PENALTY[i] - group_mean(i)) / std] * LENGTHS[i], None

    return advantage


def leave_one_out(i, values):
    r = RAW[i] + PENALTY[i]
    return [r - (3 * group_mean(i) - r) / 2] * LENGTHS[i], None


def reward_to_go(i, values):
    return [RAW[i] + PENALTY[i]] * LENGTHS[i], None


def general(decay, target, centred=False):
    """GAE by its recursion with lambda = decay(L); value target A + V, or the raw reward."""

    def recursion(i, values, reward, lam):
        a, result = 0.0, []
        for t in reversed(range(LENGTHS[i])):
            last = t == LENGTHS[i] - 1
            a = (reward if last else values[i][t + 1]) - values[i][t] + lam * a
            result.insert(0, a)
        return result

    def advantage(i, values):
        lam, reward = decay(LENGTHS[i]), RAW[i] + PENALTY[i]
        others = [j for j in range(6) if GROUPS[j] == GROUPS[i] and j != i]
        if centred:
            reward -= sum(RAW[j] - values[j][LENGTHS[j] - 1] for j in others) / 2
        own = recursion(i, values, RAW[i], lam)
        targets = [x + v for x, v in zip(own, values[i], strict=False)]
        flat = [RAW[i]] * LENGTHS[i]
        return recursion(i, values, reward, lam), targets if target == "A + V" else flat

    return advantage


def bounded(x, low, high):
    return max(low, min(x, high))


def clip(low, high, level="token"):
    def objective(a, logp, log_rho):
        if level != "token":
            log_rho = [statistics.mean(log_rho)] * len(log_rho)
        rho = [math.exp(x) for x in log_rho]
        return [min(p * x, bounded(p, 1 - low, 1 + high) * x) for p, x in zip(rho, a, strict=True)]

    return objective


def reinforce(a, logp, log_rho):
    return [x * y for x, y in zip(a, logp, strict=True)]


def cispo(a, logp, log_rho):  # the weight is at most 5, and has no lower bound but 0
    return [min(math.exp(z), 5) * x * y for x, y, z in zip(a, logp, log_rho, strict=True)]


def sapo(a, logp, log_rho):
    def token(x, z):
        tau = 1.0 if x > 0 else 1.05
        return 4 / tau / (1 + math.exp(-tau * (math.exp(z) - 1))) * x

    return [token(x, z) for x, z in zip(a, log_rho, strict=True)]


def gmpo(a, logp, log_rho):
    one_sided = [min(z, 0.4) if x > 0 else max(z, -0.4) for x, z in zip(a, log_rho, strict=True)]
    return [math.exp(statistics.mean(one_sided)) * x for x in a]


def window(a, logp, log_rho):
    rho = [math.exp(z) for z in log_rho]
    return [p * x if 0.7 <= p <= 6 else 0.0 for p, x in zip(rho, a, strict=True)]


MEAN, STD = group_relative("none"), group_relative("std")
TOKENS, RESPONSES, SUMS = (lambda n: 1 / sum(LENGTHS), lambda n: 1 / (6 * n), lambda n: 1 / (6 * C))
PPO = general(lambda n: 0.95, "A + V")
# Advantage, whether it is whitened, objective, coefficient of a response of n tokens, IcePop.
PAPERS = {
    "grpo": (STD, False, clip(0.2, 0.2), RESPONSES, False),
    "dr_grpo": (MEAN, False, clip(0.2, 0.2), SUMS, False),
    "dapo": (STD, False, clip(0.2, 0.28), TOKENS, False),
    "rloo": (leave_one_out, False, reinforce, SUMS, False),
    "reinforce_pp": (reward_to_go, True, clip(0.2, 0.2), TOKENS, False),
    "reinforce_pp_baseline": (MEAN, True, clip(0.2, 0.2), TOKENS, False),
    "rgra": (STD, False, reinforce, RESPONSES, False),
    "gspo": (STD, False, clip(3e-4, 4e-4, "sequence"), RESPONSES, False),
    "gspo_token": (STD, False, clip(3e-4, 4e-4, "sequence"), RESPONSES, False),
    "cispo": (STD, False, cispo, TOKENS, False),
    "sapo": (STD, False, sapo, RESPONSES, False),
    "gmpo": (STD, False, gmpo, RESPONSES, False),
    "ppo": (PPO, True, clip(0.2, 0.2), TOKENS, False),
    "vapo": (
        general(lambda n: max(0, 1 - 1 / (1.5 * n)), "r"),
        *(True, clip(0.2, 0.28), TOKENS, False),
    ),
    "sao": (PPO, True, window, TOKENS, False),
    "justrl2": (general(lambda n: 0.5 ** (1 / n), "r"), True, clip(0.2, 0.28), TOKENS, True),
    "justrl2_group": (
        general(lambda n: 0.5 ** (1 / n), "r", centred=True),
        *(True, clip(0.2, 0.28), TOKENS, True),
    ),
}


def paper_loss(name, new, old, rollout, values):
    """(loss, value targets) of the batch above, by loops over Python numbers."""
    advantage, whitened, objective, coefficient, icepop = PAPERS[name]
    rows, targets = zip(*(advantage(i, values) for i in range(6)), strict=True)
    flat = [a for row in rows for a in row]
    if whitened:
        mean, std = statistics.mean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
        rows = [[(a - mean) / std for a in row] for row in rows]
    total = 0.0
    for i, (n, a) in enumerate(zip(LENGTHS, rows, strict=True)):
        log_rho = [x - y for x, y in zip(new[i][:n], old[i][:n], strict=True)]
        gain = objective(a, new[i][:n], log_rho)
        w = [math.exp(x - y) for x, y in zip(old[i][:n], rollout[i][:n], strict=True)]
        w = [x if 0.5 <= x <= 5 else 0.0 for x in w] if icepop else [1.0] * n
        total -= coefficient(n) * sum(x * y for x, y in zip(w, gain, strict=True))
    return total, targets


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_row_is_what_its_paper_says(name, seed):
    """The loss of a whole batch and the value targets, against the papers' equations in loops."""
    row, mask = algorithms.ALGORITHMS[name], torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    generator = torch.Generator().manual_seed(seed)

    def noise(std):
        return std * torch.randn(6, 5, generator=generator, dtype=torch.float64)

    new, values = -1 + noise(0.3), 0.5 + noise(0.3)
    old, rollout = new - noise(0.8), new + noise(1.2)
    ids, raw = torch.tensor(GROUPS), torch.tensor(RAW, dtype=torch.float64)
    rewards = losses.terminal_reward(raw + torch.tensor(PENALTY, dtype=torch.float64), mask)
    kw = dict(token_rewards=rewards, raw_token_rewards=losses.terminal_reward(raw, mask))
    advantages, targets = row.advantages(
        Config(**row.defaults), **kw, values=values, mask=mask, group_ids=ids
    )
    if row.defaults["whiten_advantages"]:
        advantages = losses.whiten(advantages, mask)
    has = row.defaults.get
    bounds = has("is_low", 0.5), has("is_high", 5.0)
    weights, _ = losses.importance_weights(old, rollout, mask, has("is_mode"), *bounds)
    c = losses.aggregation_weights(has("aggregation"), mask.sum(1), group_ids=ids, constant=C)
    limits = "ratio_level clip_low clip_high dual_clip sapo_tau_pos sapo_tau_neg".split()
    options = {k: v for k, v in row.defaults.items() if k in limits}
    given = dict(objective=row.objective, row_weights=c, weights=weights)
    loss, _ = losses.policy_loss(new, old, advantages, mask, **given, **options)
    expected, expected_targets = paper_loss(
        name, *(x.tolist() for x in (new, old, rollout, values))
    )
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert (targets is None) == (expected_targets[0] is None)
    for i, target in enumerate(expected_targets if targets is not None else ()):
        assert targets[i][mask[i]].tolist() == pytest.approx(target, rel=1e-9, abs=1e-12)


def test_what_the_loss_of_a_batch_cannot_show_of_a_row():
    gspo, token, sao = (algorithms.ALGORITHMS[n].defaults for n in ("gspo", "gspo_token", "sao"))
    # Equal in value, and in gradient too where all tokens have one advantage.
    assert (gspo["ratio_level"], token["ratio_level"]) == ("sequence", "sequence-token")
    assert (sao["group_size"], sao["dynamic_sampling"]) == (1, False)
    assert sao["critic_updates_per_step"] == 2
