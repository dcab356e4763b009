"""The table of algorithms, and the parts that GRPO, PPO and JustRL II do not use.

A row of ALGORITHMS (end of the file) is an advantage x objective x aggregation x off-policy weight
x filter. What GRPO, PPO and JustRL II need is in losses.py, with the notation.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from config import Config
from losses import (
    OBJECTIVES,
    approx_kl,
    decoupled_advantages,
    gae,
    group_size,
    group_sum,
    grpo_advantages,
    justrl2_advantages,
    masked,
    ppo_advantages,
    row_mean,
    same_group,
    scores,
    spread_over_tokens,
)

# --- rewards ---------------------------------------------------------------------------------


def length_reward(
    correct: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    *,
    weight: float = 0.2,
    min_spread: int = 8000,
    min_longest: int = 10000,
) -> Tensor:
    """Bonus for short correct answers, Kimi k1.5 (2501.12599): (N,) float64, to add to the reward.

    weight (1/2 - (L - L_min) / (L_max - L_min)) over the correct responses of a group, where
    L_max - L_min >= min_spread and L_max >= min_longest tokens; wrong responses get 0.
    """
    peers = same_group(group_ids) & correct[None, :]
    length = lengths.double()
    # Infinity for the others: they can be neither the longest nor the shortest.
    longest = torch.where(peers, length, -math.inf).amax(1)
    shortest = torch.where(peers, length, math.inf).amin(1)
    # max(min_spread, 1): with a spread of 0 the quotient below would be 0 / 0.
    rewarded = correct & (longest - shortest >= max(min_spread, 1)) & (longest >= min_longest)
    return masked(weight * (0.5 - (length - shortest) / (longest - shortest)), rewarded)


# --- advantages -------------------------------------------------------------------------------


def rloo_advantages(
    *, token_rewards: Tensor, mask: Tensor, group_ids: Tensor
) -> tuple[Tensor, None]:
    """r_i - mean reward of the others, RLOO (2402.14740): an unbiased baseline."""
    r = scores(token_rewards, mask, group_ids)
    # Leave one out: a baseline that contained r_i would bias the gradient.
    others = (group_sum(r, group_ids) - r) / (group_size(group_ids) - 1)
    return spread_over_tokens(r - others, mask, token_rewards.dtype)


def reward_to_go_advantages(
    *, token_rewards: Tensor, mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, None]:
    """Discounted sum of the rewards still to come, REINFORCE++ (2501.03262).

    It has no baseline: whiten over the batch afterwards.
    """
    # With V = 0 and lambda = 1 GAE is the discounted suffix sum of the rewards.
    return gae(token_rewards, torch.zeros_like(token_rewards), mask, 1.0, gamma)[0], None


def vapo_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lambda_i = max(1 - 1/(alpha L_i), 0), VAPO (2504.05118); (N,) float64.

    k^(1/L) with k = exp(-1/alpha) is the same to first order in 1/L.
    """
    if alpha <= 0:
        raise ValueError(f"alpha of lambda = 1 - 1/(alpha L) must be positive, got {alpha}")
    # clamp: responses shorter than 1/alpha tokens would get a negative lambda.
    return masked((1 - 1 / (alpha * lengths.double())).clamp(min=0), lengths > 0)


def vapo_advantages(
    *,
    token_rewards: Tensor,
    raw_token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    gae_lambda_alpha: float = 1.5,
) -> tuple[Tensor, Tensor]:
    """VAPO (2504.05118): length-adaptive lambda 1 - 1/(alpha L), decoupled value target.

    The paper's alpha 0.05 is for thousands of tokens: up to 1/alpha tokens lambda is 0.
    """
    gae_lambda = vapo_lambda(mask.sum(1), gae_lambda_alpha)
    return decoupled_advantages(gae_lambda, token_rewards, raw_token_rewards, values, mask, gamma)


# --- objectives -------------------------------------------------------------------------------


def reinforce(logprobs, log_ratio, advantages, **_):
    """A log pi: no ratio and no clip, so it is right only for the first update on a batch."""
    # No limit to reach: the clip fraction of this row is always 0.
    return advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def cispo(logprobs, log_ratio, advantages, *, clip_low, clip_high, **_):
    """sg[clip(rho, 1 - low, 1 + high)] A log pi, CISPO (2506.13585): no token is silenced."""
    # detach: the gradient flows through log pi alone, so a clipped token keeps one.
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weight * advantages * logprobs, weight != ratio


def sapo(log_ratio, advantages, *, sapo_tau_pos, sapo_tau_neg, **_):
    """(4 / tau) sigmoid(tau (rho - 1)) A, SAPO (2511.20347): a soft gate instead of a clip."""
    # 4 / tau makes the gradient that of rho A at rho = 1, whatever tau is.
    tau = torch.where(advantages > 0, advantages.new_tensor(sapo_tau_pos), sapo_tau_neg)
    # Two temperatures: a larger tau closes the gate sooner, by default where A <= 0.
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    return 4 / tau * gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def gmpo(log_ratio, advantages, mask, *, clip_low, clip_high, **_):
    """A exp(mean_t of the log-ratio, clipped on the side that A pushes to), GMPO (2507.20673).

    clip_low and clip_high bound the log-ratio here, not the ratio.
    """
    bounded = log_ratio.clamp(-clip_low, clip_high)
    # As in PPO's min: a token that has moved against its advantage is never held back.
    one_sided = torch.where(
        advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded)
    )
    # The mean of logs is the log of the geometric mean: one outlier moves it little.
    geometric_mean = row_mean(one_sided, mask)[:, None].exp()
    return geometric_mean * advantages, one_sided != log_ratio


def trust_mask(log_ratio, advantages, *, clip_low, clip_high, **_):
    """rho A where rho is in [1 - low, 1 + high], else 0 without gradient, SAO."""
    ratio = log_ratio.exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    # Both sides, whatever the sign of A: unlike PPO's min, no far token trains at all.
    return masked(ratio * advantages, ~outside), outside


OBJECTIVES.update(reinforce=reinforce, cispo=cispo, sapo=sapo, gmpo=gmpo, trust_mask=trust_mask)


# --- control of entropy ---------------------------------------------------------------------


def covariance_mask(
    old_logprobs: Tensor, advantages: Tensor, mask: Tensor, fraction: float
) -> Tensor:
    """(N, T) bool: the `fraction` of tokens with the largest positive covariance of log-prob and
    advantage, which are those that lower entropy most (2505.22617).

    Taken over the global batch before the update, so micro-batches do not matter. The paper draws
    Clip-Cov tokens at random from a window of covariances; the largest need no random numbers.
    """
    # d entropy / d step = -Cov(log pi, A) to first order (2505.22617).
    logp, adv = old_logprobs[mask].double(), advantages[mask].double()
    covariance = (logp - logp.mean()) * (adv - adv.mean())
    count = min(math.ceil(fraction * covariance.numel()), covariance.numel())
    # topk of nothing has no last element; a step may train no token.
    if count == 0:
        return torch.zeros_like(mask)
    threshold = covariance.topk(count).values[-1]
    # > 0: with constant advantages every covariance is 0, and all tokens would tie.
    return mask.masked_scatter(mask, (covariance >= threshold) & (covariance > 0))


# --- on-policy distillation --------------------------------------------------------------------


def distillation_advantages(
    *, old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, None]:
    """log teacher - log student at each sampled token: minus the k1 estimate of the reverse KL."""
    return -approx_kl(old_logprobs, teacher_logprobs, "k1", mask=mask), None


def topk_forward_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    k: int,
    *,
    min_logprob: float = -math.inf,
    max_kl: float = math.inf,
) -> Tensor:
    """sum over the teacher's top k of p_T (log p_T - log p_S), both normalised over the vocabulary.

    (..., V) logits -> (...). min_logprob floors both log-probs, max_kl caps the result.
    """
    # Normalised before topk: over k tokens alone both would sum to 1 and hide the tail.
    teacher, ids = teacher_logits.log_softmax(-1).topk(k, dim=-1)
    student = student_logits.log_softmax(-1).gather(-1, ids)
    # Before the floor, so that the floor does not give weight to impossible tokens.
    weight = teacher.exp()
    teacher, student = teacher.clamp(min=min_logprob), student.clamp(min=min_logprob)
    return (weight * (teacher - student)).sum(-1).clamp(max=max_kl)


# --- the table --------------------------------------------------------------------------------


# What an advantage function may name besides fields of config.Config: the tensors of a step.
TENSORS = {"token_rewards", "raw_token_rewards", "values", "mask", "group_ids"}


class Algorithm(NamedTuple):
    """One row: `defaults` are the configuration fields it sets unless the user has.

    advantage: keyword arguments from TENSORS and the fields of config.Config; returns
    (advantages (N, T), value targets (N, T) or None). objective: a key of OBJECTIVES.
    """

    advantage: Callable
    objective: str
    critic: bool
    about: str
    defaults: dict

    def advantages(self, config: Config, **tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Call `advantage` with the tensors of a step and the fields that its signature names.

        So a new function has only to name what it needs, and `row` refuses a name that is neither.
        """
        names = inspect.signature(self.advantage).parameters
        given = {n: tensors[n] if n in TENSORS else getattr(config, n) for n in names}
        return self.advantage(**given)

    @property
    def reads(self) -> set[str]:
        """Names of the configuration fields that the advantage or the objective takes."""
        # An objective's keyword-only arguments are its fields; the others are tensors.
        objective = inspect.signature(OBJECTIVES[self.objective]).parameters.values()
        limits = {p.name for p in objective if p.kind is p.KEYWORD_ONLY}
        return limits | inspect.signature(self.advantage).parameters.keys() - TENSORS


def row(
    advantage: Callable, objective: str, about: str, critic: bool = False, **defaults: Any
) -> Algorithm:
    """An Algorithm whose defaults are COMMON overlaid with the given ones; TypeError for a name
    that a configuration does not have.
    """
    algorithm = Algorithm(advantage, objective, critic, about, COMMON | defaults)
    # At import: a misspelt name would otherwise fail after the first rollout, or do nothing.
    known = {field.name for field in fields(Config)}
    if unknown := sorted((algorithm.reads | defaults.keys()) - known):
        raise TypeError(
            f"the row of {advantage.__name__} names {', '.join(unknown)}: neither a tensor of a "
            f"step ({', '.join(sorted(TENSORS))}) nor a field of config.Config; correct it there."
        )
    return algorithm


# Defaults of every row unless it says otherwise.
# fmt: off
COMMON = dict(
    aggregation="token-mean", ratio_level="token", clip_low=0.2, clip_high=0.2, dual_clip=None,
    std_normalize=False, whiten_advantages=False, is_mode="none", is_low=0.5, is_high=5.0,
    group_size=8, dynamic_sampling=True, critic_updates_per_step=1, value_clip=0.2,
)
# GRPO's own form: each response counts 1, so a token of a long one counts less.
PER_RESPONSE = dict(aggregation="seq-mean-token-mean", std_normalize=True)
CRITIC = dict(critic=True, whiten_advantages=True)
# clip-higher as in DAPO; icepop drops tokens on which sampler and trainer disagree.
JUSTRL2 = CRITIC | dict(gae_lambda_k=0.5, clip_high=0.28, is_mode="icepop")

ALGORITHMS = {
    "grpo": row(grpo_advantages, "clip", "group mean and std (2402.03300)", **PER_RESPONSE),
    "dr_grpo": row(grpo_advantages, "clip", "GRPO without std and length bias (2503.20783)",
        aggregation="seq-mean-token-sum-norm"),
    "dapo": row(grpo_advantages, "clip", "GRPO with token mean and clip-higher (2503.14476)",
        std_normalize=True, clip_high=0.28),
    "rloo": row(rloo_advantages, "reinforce", "the others' mean as baseline (2402.14740)",
        aggregation="seq-mean-token-sum-norm"),
    "reinforce_pp": row(reward_to_go_advantages, "clip",
        "reward to go, normalised over the batch (2501.03262)", whiten_advantages=True),
    "reinforce_pp_baseline": row(grpo_advantages, "clip",
        "group mean removed, normalised over the batch (2501.03262)", whiten_advantages=True),
    "rgra": row(grpo_advantages, "reinforce", "GRPO without ratio and clip", **PER_RESPONSE),
    # The mean log-ratio of a response hardly moves: hence a window far narrower than 0.2.
    "gspo": row(grpo_advantages, "clip", "one ratio per response, clipped whole (2507.18071)",
        **PER_RESPONSE, ratio_level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": row(grpo_advantages, "clip", "GSPO with each token's own gradient (2507.18071)",
        **PER_RESPONSE, ratio_level="sequence-token", clip_low=3e-4, clip_high=4e-4),
    # 1 - clip_low = 0: no lower bound on the weight, only the upper one of 5.
    "cispo": row(grpo_advantages, "cispo", "clipped ratio as a weight only (2506.13585)",
        std_normalize=True, clip_low=1.0, clip_high=4.0),
    "sapo": row(grpo_advantages, "sapo", "a sigmoid gate in place of the clip (2511.20347)",
        **PER_RESPONSE, sapo_tau_pos=1.0, sapo_tau_neg=1.05),
    "gmpo": row(grpo_advantages, "gmpo", "geometric mean of the token ratios (2507.20673)",
        **PER_RESPONSE, clip_low=0.4, clip_high=0.4),
    "ppo": row(ppo_advantages, "clip", "GAE with one lambda, target A + V (1707.06347)",
        **CRITIC, gae_lambda=0.95),
    "vapo": row(vapo_advantages, "clip", "lambda 1 - 1/(alpha L), target the outcome (2504.05118)",
        **CRITIC, gae_lambda_alpha=1.5, clip_high=0.28),
    # A group of one has no spread of rewards, so dynamic sampling would keep nothing.
    "sao": row(ppo_advantages, "trust_mask", "one response per problem, far tokens dropped",
        **CRITIC, gae_lambda=0.95, clip_low=0.3, clip_high=5.0, group_size=1,
        dynamic_sampling=False, critic_updates_per_step=2),
    "justrl2": row(justrl2_advantages, "clip", "lambda k^(1/L), target the outcome, IcePop",
        **JUSTRL2),
    "justrl2_group": row(justrl2_advantages, "clip", "JustRL II minus the group's critic error",
        **JUSTRL2, group_center=True),
}
# fmt: on
