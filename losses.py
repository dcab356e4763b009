"""GRPO, PPO with a critic, and JustRL II: the maths of a step, one equation at a time.

An algorithm is advantage x objective x aggregation x off-policy weight; algorithms.py has the table
and the parts that only its other rows use. The order here is that of a step, in this notation:

    r      reward of a response, on its last token     V    value of the state before a token
    A      advantage of a token                        R    what V is regressed on, `returns`
    rho    pi / pi_old = exp(log_ratio)                w    pi_old / pi_rollout, importance weight
    J      what a token adds to the objective          c_i  weight of response i in the loss
    sg[x]  x without gradient

Per-token tensors are (N, T) float32, already shifted: index t is the action of token t, taken in
the state before it; V_t is the value of that state. What lies outside `mask` (NaN and infinity
included) changes no bit of a result or gradient: it is removed with `where` before any arithmetic.
Advantages take the mask of whole responses, a prefix of True per row; losses take any mask. Rows
are never cut, so a batch may be split by rows into any micro-batches. `old_logprobs` are the
trainer's at the start of the step, `rollout_logprobs` the sampler's own. Metrics are pairs
(numerator, denominator): sum both over micro-batches, then divide.
"""

import math

import torch
from torch import Tensor

# e^20 = 4.9e8 is finite in float32 with room for sums, squares and backward; e^89 is infinite, and
# 0 * infinity in the backward of a clipped token is NaN.
MAX_LOG_RATIO = 20.0
# k3 grows like e^-d: e^40 is finite in float32, and far above the bound that the loss puts on it.
MAX_KL_LOG_RATIO = 40.0
KL_LOSS_BOUND = 10.0  # one token in a million may not outweigh the rest; no gradient beyond

# --- rewards ---------------------------------------------------------------------------------


def overlong_penalty(
    lengths: Tensor, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """Soft overlong punishment, DAPO (2503.14476) eq. 13: (N,) float64 in [-factor, 0].

    0 up to max - buffer tokens, then linear down to -factor at max. buffer_tokens 0 turns it off.
    """
    if buffer_tokens <= 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=lengths.device)
    # In tokens; lengths count the stop token, as the budget does.
    free = max_response_tokens - buffer_tokens
    return (factor * (free - lengths.double()) / buffer_tokens).clamp(-factor, 0)


def terminal_reward(amounts: Tensor, mask: Tensor) -> Tensor:
    """(N,) -> (N, T): amount_i on the last token of row i, 0 elsewhere."""
    # Outcome rewards: r_t = 0 before the end, so GAE alone decides how credit flows back.
    return torch.where(last_token(mask), amounts[:, None], 0.0)


# --- generalised advantage estimation --------------------------------------------------------


def length_adaptive_lambda(lengths: Tensor, k: float) -> Tensor:
    """lambda_i = k^(1/L_i), so that lambda^L = k at every length; 0 where L = 0; (N,) float64.

    Float64 because rounding matters: with k = 0.5, bfloat16 turns it into 1 from L = 355, and
    float32 moves some advantages of a 126,976-token response by 7e-4.
    """
    if not 0 < k <= 1:
        raise ValueError(f"gae_lambda_k must be in (0, 1], got {k}")
    # An empty row divides by 0 and is masked: with k = 1 it would be NaN.
    return masked(torch.exp(math.log(k) / lengths.double()), lengths > 0)


def discounted_suffix_sum(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_i y_{t+1} for (N, T) x and (N,) decay in [0, 1]. Token by token this is

        y = x.clone()
        for t in reversed(range(T - 1)):
            y[:, t] += decay * y[:, t + 1]

    Here it takes log2(T) passes: after that of stride s, y_t is the sum of its next 2s terms.
    """
    y, weight, stride = x, decay[:, None], 1
    # y_t = sum over j < stride of decay^j x_(t+j), and weight = decay^stride, at each start.
    while stride < x.shape[1]:
        reached = y[:, :-stride] + weight * y[:, stride:]
        # The last `stride` columns already reach the end of the row: nothing to add.
        y = torch.cat([reached, y[:, -stride:]], dim=1)
        weight, stride = weight * weight, 2 * stride
    return y


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gae_lambda: float | Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438, eq. 16): (advantages, returns), both (N, T).

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1},   return = A + V.
    gae_lambda is one number or one per row. V after the last token is 0, for a truncated response
    too. Computed in float64, returned in the dtype of `values`, 0 outside the mask.
    """
    # float64: with lambda near 1 a sum over 100k tokens loses digits that whitening would magnify.
    v = masked(values, mask).double()
    # After the last token V is 0: padding of v is 0 too, so shorter rows end the same way.
    next_v = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1)
    # Masked again: padding may hold rewards that are NaN.
    delta = masked(rewards.double() + gamma * next_v - v, mask)
    decay = gamma * torch.as_tensor(gae_lambda, dtype=torch.float64, device=v.device)
    advantages = discounted_suffix_sum(delta, decay.expand(v.shape[0]))
    return advantages.to(values.dtype), (advantages + v).to(values.dtype)


# --- advantages ------------------------------------------------------------------------------
#
# Each takes by keyword what it needs of a step's tensors (token_rewards, raw_token_rewards, values,
# mask, group_ids) and of the configuration, and returns the advantages (N, T) with the value
# targets (N, T), or None where there is no critic.


def scores(token_rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Reward of each response, (N,) float64, refusing groups that cannot be compared."""
    if (group_size(group_ids) < 2).any():
        raise ValueError(
            "group-relative advantages need at least two responses per prompt: "
            "raise group_size, or choose an algorithm with a critic"
        )
    return masked(token_rewards, mask).sum(1, dtype=torch.float64)


def spread_over_tokens(advantages: Tensor, mask: Tensor, dtype) -> tuple[Tensor, None]:
    """(N,) -> (N, T): each token gets its response's advantage; there is no value target."""
    return masked(advantages[:, None].to(dtype), mask), None


def grpo_advantages(
    *,
    token_rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    std_normalize: bool = True,
    std_ddof: int = 0,
) -> tuple[Tensor, None]:
    """(r_i - mean) / (std + 1e-6) within each group, GRPO (2402.03300, section 4.1.2).

    std_normalize=False keeps r_i - mean (Dr. GRPO, 2503.20783): dividing by the std weighs prompts
    by 1/sqrt(p(1-p)). std_ddof 0 is the population std, 1 the sample std. A group of equal rewards
    gives 0.
    """
    r = scores(token_rewards, mask, group_ids)
    size = group_size(group_ids)
    centred = r - group_sum(r, group_ids) / size
    if std_normalize:
        # In float64 equal float32 rewards sum exactly, so their variance is exactly 0.
        variance = group_sum(centred.square(), group_ids) / (size - std_ddof)
        centred = centred / (variance.sqrt() + 1e-6)  # 1e-6 as in the method's code: 0 / 0 gives 0
    return spread_over_tokens(centred, mask, token_rewards.dtype)


def ppo_advantages(
    *,
    token_rewards: Tensor,
    raw_token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """GAE with one lambda for all responses, PPO (1707.06347). Value target: A + V.

    The target is computed from the raw rewards: length penalties and KL are the policy's concern.
    """
    # Two passes because two rewards: the policy's carries penalties, the critic's does not.
    advantages, _ = gae(token_rewards, values, mask, gae_lambda, gamma)
    _, returns = gae(raw_token_rewards, values, mask, gae_lambda, gamma)  # A + V: bootstraps
    return advantages, returns


def group_correction(
    raw_rewards: Tensor, values: Tensor, mask: Tensor, group_ids: Tensor
) -> Tensor:
    """P_i = -mean over the other members j of (r_j - V_j at its last token); (N,) float64.

    Leave-one-out group centring of JustRL II: added to the terminal reward, it removes what the
    critic still misjudges about the prompt. A group of one gets 0, an empty response counts 0.
    """
    # V before the last token: the critic's final word on this response.
    last_values = masked(values, last_token(mask)).sum(1)
    residual = masked((raw_rewards - last_values).double(), mask.any(1))
    # Leave one out: with its own residual in the mean, a response would correct itself.
    others = group_size(group_ids) - 1
    mean = (group_sum(residual, group_ids) - residual) / others.clamp(min=1)
    return masked(-mean, others > 0)


def decoupled_advantages(
    gae_lambda: Tensor,
    token_rewards: Tensor,
    raw_token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Advantage by gae_lambda, value target by lambda = 1: the sum of raw rewards to come.

    The target does not contain V, so the critic regresses on outcomes and never on itself.
    """
    advantages, _ = gae(token_rewards, values, mask, gae_lambda, gamma)
    # With V = 0 and lambda = 1 the advantage is the plain suffix sum of rewards.
    returns, _ = gae(raw_token_rewards, torch.zeros_like(values), mask, 1.0, gamma)
    return advantages, returns


def justrl2_advantages(
    *,
    token_rewards: Tensor,
    raw_token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    group_ids: Tensor | None = None,
    gamma: float = 1.0,
    gae_lambda_k: float = 0.5,
    group_center: bool = False,
) -> tuple[Tensor, Tensor]:
    """JustRL II: length-adaptive lambda k^(1/L), decoupled value target, optional group centring.

    Length-adaptive: the first token of a response sees k^((L-1)/L) of the outcome at every length.
    """
    # Only the policy's reward is corrected: V keeps regressing on the raw outcome.
    if group_center:
        raw = masked(raw_token_rewards, mask).sum(1)
        correction = group_correction(raw, values, mask, group_ids)
        token_rewards = token_rewards + terminal_reward(correction, mask)
    gae_lambda = length_adaptive_lambda(mask.sum(1), gae_lambda_k)
    return decoupled_advantages(gae_lambda, token_rewards, raw_token_rewards, values, mask, gamma)


def inject_terminal(
    advantages: Tensor, amounts: Tensor, mask: Tensor, gae_lambda: float | Tensor
) -> Tensor:
    """A_t + amount_i lambda_i^(L_i - 1 - t): what GAE would add for that much terminal reward.

    With amounts = the overlong penalty and a lambda of its own, the penalty reaches the tokens near
    the end only and never a critic (JustRL II's analytic injection).
    """
    # GAE is linear in the rewards: with V = 0 the effect of one reward can be added on its own.
    effect, _ = gae(
        terminal_reward(amounts.double(), mask), torch.zeros_like(advantages), mask, gae_lambda
    )
    return advantages + effect


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all unmasked tokens of the batch; 0 outside the mask.

    Unbiased variance in two passes: E[x^2] - E[x]^2 can go negative for nearly constant values.
    shift_mean=False scales only. The global batch must be given, not a micro-batch.
    """
    n = int(mask.sum())
    if n == 0:
        raise ValueError("whiten: every token of the batch is masked, there is nothing to whiten")
    # float64 sums: float32 over a million tokens would depend on their order.
    mean = masked(values, mask).sum(dtype=torch.float64) / n
    centred = masked(values - mean.to(values.dtype), mask)
    # max(n - 1, 1): a single token has variance 0, not 0 / 0.
    variance = centred.square().sum(dtype=torch.float64) / max(n - 1, 1)
    scaled = centred * torch.rsqrt(variance + eps).to(values.dtype)
    return scaled if shift_mean else masked(scaled + mean.to(values.dtype), mask)


# --- the critic's loss -----------------------------------------------------------------------


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None = 0.2,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, dict]:
    """max((V - R)^2, (V_old + clamp(V - V_old, +-value_clip) - R)^2) aggregated; no factor 1/2.

    value_clip None is the plain squared error. Without row_weights: mean over these tokens. A
    difference to R or V_old that is not finite is taken as 0 and counted as `nonfinite`.
    """
    # A difference that is not finite becomes 0 here, so its NaN cannot reach the backward.
    error, usable = usable_difference(values, returns, mask)
    old_error, _ = usable_difference(old_values, returns, usable)
    moved, known = usable_difference(values, old_values, usable)
    # Without the usual 1/2, as in the method's code: the critic's learning rate fits this scale.
    squared = error.square()
    metrics = {"nonfinite": mean_pair(~known, mask)}
    if value_clip is not None:
        clipped_error = old_error + moved.clamp(-value_clip, value_clip)  # V clipped around V_old
        # The maximum is pessimistic: clipping never makes an error look smaller than it is.
        squared = torch.maximum(squared, clipped_error.square())
        metrics["clip_fraction"] = mean_pair(moved.abs() > value_clip, mask)
    return aggregate(squared, mask, row_weights=row_weights), metrics


# --- off-policy weights ----------------------------------------------------------------------


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    mode: str = "icepop",
    low: float = 0.5,
    high: float = 5.0,
) -> tuple[Tensor, dict]:
    """Weight of each token for the mismatch of sampler and trainer; (weights (N, T), metrics).

    w = exp(old - rollout), without gradient. none: 1. tis: w clamped to [low, high]. icepop: w
    inside the closed window, 0 outside. No mode changes a denominator: a rejected token still
    counts. A token whose log-probs are not finite gets weight 0 and is counted as `is_nonfinite`.
    """
    mismatch, usable = usable_difference(old_logprobs, rollout_logprobs, mask)
    # The clamp keeps the metrics finite; e^20 is far outside any sensible window.
    ratio = mismatch.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside = (ratio >= low) & (ratio <= high)
    if mode == "none":
        weights = torch.ones_like(ratio)
    elif mode == "tis":
        weights = ratio.clamp(low, high)
    elif mode == "icepop":
        weights = masked(ratio, inside)
    else:
        raise ValueError(f"unknown is_mode '{mode}': choose none, tis or icepop")
    metrics = {
        "is_ratio": mean_pair(ratio, usable),
        "is_outside": mean_pair(~inside, usable),
        "is_abs_deviation": mean_pair((ratio - 1).abs(), usable),
        "mismatch_abs": mean_pair(mismatch.abs(), usable),
        # The tokens are the sampler's, so it comes first: KL(rollout || old), by k3.
        "mismatch_kl": mean_pair(
            approx_kl(rollout_logprobs, old_logprobs, mask=mask, bound=KL_LOSS_BOUND), usable
        ),
        "is_nonfinite": mean_pair(~usable, mask),
    }
    return masked(weights, usable), metrics


def ratio_at_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """The log-ratio that an objective sees, (N, T).

    token: each token's own. sequence: the mean over the response, GSPO (2507.18071, eq. 7).
    sequence-token: the sequence's value with each token's own gradient, GSPO-token.
    """
    if level == "token":
        return log_ratio
    mean = row_mean(log_ratio, mask)[:, None].expand_as(log_ratio)
    if level == "sequence":
        return mean
    if level == "sequence-token":
        # Value of the mean; the two terms cancel in value and leave d log_ratio as the gradient.
        return mean.detach() + log_ratio - log_ratio.detach()
    raise ValueError(f"unknown ratio_level '{level}': choose token, sequence or sequence-token")


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N,) float64: (sum_t w)^2 / sum_t w^2 with w = exp(log_ratio), between 1 and the length."""
    w = masked(log_ratio.detach().double().exp(), mask)
    # float64 above: e^20 squared and summed keeps its digits. clamp: an empty row gives 0.
    return w.sum(1).square() / w.square().sum(1).clamp(min=1e-30)


def off_policy_sequences(log_ratio: Tensor, advantages: Tensor, mask: Tensor, delta: float):
    """(N, T) bool: tokens with A < 0 in sequences whose mean(old - new) exceeds delta (OPSM).

    They are dropped: pushing down what the policy has already left teaches nothing.
    """
    drifted = -row_mean(log_ratio.detach(), mask) > delta
    return mask & (advantages < 0) & drifted[:, None]


# --- objectives: (value to maximise per token, which tokens have reached their limit) ---------


def clip(log_ratio, advantages, *, clip_low, clip_high, dual_clip, **_):
    """min(rho A, clip(rho, 1 - low, 1 + high) A), PPO (1707.06347, eq. 7).

    clip_high > clip_low is clip-higher (DAPO): rare tokens may rise further than they may fall.
    dual_clip c (1912.09729) bounds the loss where A < 0, which is unbounded in rho otherwise.
    """
    unclipped = log_ratio.exp() * advantages
    clipped = log_ratio.exp().clamp(1 - clip_low, 1 + clip_high) * advantages
    # min: a token that has moved against its advantage keeps its gradient, however far it is.
    surrogate = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        floor = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, floor, surrogate)
    # Strictly less: only where the clip takes gradient away, not at every ratio outside.
    return surrogate, clipped < unclipped


OBJECTIVES = {"clip": clip}  # algorithms.py adds those of its other rows


# --- KL --------------------------------------------------------------------------------------


def approx_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str = "k3",
    mask: Tensor | None = None,
    *,
    ratio: Tensor | None = None,
    bound: float | None = None,
) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) from tokens of pi; same shape as logprobs.

    d = log pi - log pi_ref.  k1 = d,  k2 = d^2 / 2,  k3 = e^-d + d - 1, all with the KL
    as their mean (k2 nearly). As a loss their gradients differ: k1 gives 0 on average, k2 that of
    KL(pi || pi_ref), k3 that of KL(pi_ref || pi). k3 times the live `ratio` pi / pi_old gives
    KL(pi || pi_ref) exactly; estimator "k3_is" names that product. `bound` clamps to +-bound.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    d, _ = usable_difference(logprobs, ref_logprobs, mask)
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = d.square() / 2
    elif estimator in ("k3", "k3_is"):
        kl = torch.expm1(-d.clamp(min=-MAX_KL_LOG_RATIO)) + d  # expm1: no cancellation near d = 0
    else:
        raise ValueError(f"unknown kl_estimator '{estimator}': choose k1, k2, k3 or k3_is")
    kl = kl if ratio is None else ratio * kl
    # clamp has gradient 0 beyond the bound: one outlier cannot dominate the update.
    return kl if bound is None else kl.clamp(-bound, bound)


# --- aggregation -----------------------------------------------------------------------------


def aggregation_weights(
    mode: str,
    token_counts: Tensor,
    *,
    group_ids: Tensor | None = None,
    constant: float | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Coefficient c_i of each response in loss = sum_i c_i sum_t loss_it; (N,) float64.

    Computed once over the global batch, so that no split into micro-batches or ranks can change
    the loss. A response without tokens still counts (one token, one response); `kept` (N,) bool
    takes responses out of every count, as overlong filtering needs.

    token-mean               1 / sum_j n_j             DAPO (2503.14476), JustRL II
    seq-mean-token-mean      1 / (N n_i)               GRPO (2402.03300)
    seq-mean-token-sum-norm  1 / (N C), C = constant   Dr. GRPO (2503.20783)
    prompt-mean              1 / (P n_group(i))        ScaleRL (2510.13786)
    """
    kept = torch.ones_like(token_counts).double() if kept is None else kept.double()
    # An empty response counts one token: no 0 / 0, and it stays in the mean over responses.
    tokens = token_counts.clamp(min=1)
    responses = kept.sum().clamp(min=1)
    if mode == "token-mean":
        return kept / (kept * tokens).sum().clamp(min=1)
    if mode == "seq-mean-token-mean":
        return kept / (responses * tokens)
    if mode == "seq-mean-token-sum-norm":
        if not constant:
            raise ValueError("seq-mean-token-sum-norm needs constant, the length to divide by")
        return kept / (responses * constant)
    if mode == "prompt-mean":
        if group_ids is None:
            raise ValueError("prompt-mean needs group_ids, the prompt of each response")
        # Each kept response counts 1 / (kept in its group), so every prompt with any counts 1.
        prompts = (kept / group_sum(kept, group_ids).clamp(min=1)).sum().clamp(min=1)
        return kept / (prompts * group_sum(kept * token_counts, group_ids).clamp(min=1))
    raise ValueError(
        f"unknown aggregation '{mode}': choose token-mean, seq-mean-token-mean, "
        "seq-mean-token-sum-norm or prompt-mean"
    )


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    row_weights: Tensor | None = None,
    group_ids: Tensor | None = None,
    constant: float | None = None,
) -> Tensor:
    """Scalar sum_i c_i sum_t loss_it over unmasked tokens.

    row_weights are the c_i of these rows in the global batch (aggregation_weights); without them
    the rows given are taken to be the whole batch.
    """
    if row_weights is None:
        row_weights = aggregation_weights(mode, mask.sum(1), group_ids=group_ids, constant=constant)
    return (row_weights.to(per_token.dtype) * masked(per_token, mask).sum(1)).sum()


# --- the policy's loss -----------------------------------------------------------------------


# fmt: off
def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *,
    # what is maximised: J of a token, and the limits that it reads
    objective: str = "clip", ratio_level: str = "token",
    clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None,
    sapo_tau_pos: float = 1.0, sapo_tau_neg: float = 1.05,
    # how tokens count: w of each, c of each response
    weights: Tensor | None = None, opsm_delta: float | None = None,
    row_weights: Tensor | None = None, aggregation: str = "token-mean",
    # what is added
    entropy_control: str = "none", cov_mask: Tensor | None = None, cov_kl_coef: float = 1.0,
    ref_logprobs: Tensor | None = None, kl_coef: float = 0.0, kl_estimator: str = "k3",
    entropy: Tensor | None = None, entropy_coef: float = 0.0,
) -> tuple[Tensor, dict]:
    # fmt: on
    """Scalar loss of one micro-batch, and its metrics.

    loss = sum_i c_i sum_t (-w J + kl_coef KL - entropy_coef H) with J = OBJECTIVES[objective],
    w = `weights`, c = `row_weights` (without them `aggregation` over these rows). `cov_mask`: the
    tokens that entropy_control detaches (clip_cov) or ties to the old policy (kl_cov). A log-ratio,
    advantage or reference log-prob that is not finite counts as 0 here and as `nonfinite` in the
    metrics, so that one such token stops the run with a count and not with a NaN of unknown origin.
    """
    log_rho, usable = usable_difference(logprobs, old_logprobs, mask)
    log_rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # no gradient beyond
    finite = usable & torch.isfinite(advantages)
    advantages = masked(advantages, mask & torch.isfinite(advantages))
    logp, level = masked(logprobs, usable), ratio_at_level(log_rho, mask, ratio_level)
    limits = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    limits |= {"sapo_tau_pos": sapo_tau_pos, "sapo_tau_neg": sapo_tau_neg}
    gain, at_limit = OBJECTIVES[objective](
        logprobs=logp, log_ratio=level, advantages=advantages, mask=mask, **limits
    )
    metrics = movement(log_rho, level, mask) | {"clip_fraction": mean_pair(at_limit, mask)}
    if weights is not None:
        gain = gain * masked(weights, mask)
    if opsm_delta is not None:
        stale = off_policy_sequences(log_rho, advantages, mask, opsm_delta)
        gain = masked(gain, ~stale)
        metrics["opsm_fraction"] = mean_pair(stale, mask)
    loss = -gain
    if entropy_control == "clip_cov":
        loss = torch.where(cov_mask, loss.detach(), loss)
    elif entropy_control == "kl_cov":
        # k3 with the roles swapped: on tokens of the old policy it estimates KL(old || new).
        moved = approx_kl(old_logprobs, logprobs, mask=mask, bound=KL_LOSS_BOUND)
        loss = loss + cov_kl_coef * masked(moved, cov_mask)
    if ref_logprobs is not None:
        ratio = log_rho.exp() if kl_estimator == "k3_is" else None
        kl = approx_kl(logprobs, ref_logprobs, kl_estimator, mask, ratio=ratio, bound=KL_LOSS_BOUND)
        loss = loss + kl_coef * kl
        finite = finite & torch.isfinite(ref_logprobs)
        metrics["kl"] = mean_pair(kl, mask)
    if entropy is not None:
        if entropy_coef:  # 0 times an infinite entropy would be NaN
            loss = loss - entropy_coef * entropy
        metrics["entropy"] = mean_pair(entropy, mask)
    metrics["nonfinite"] = mean_pair(~finite, mask)
    return aggregate(loss, mask, aggregation, row_weights=row_weights), metrics


def movement(log_rho: Tensor, level: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of how far the policy has moved since the start of the step; `level` is log_rho as
    the objective sees it (`ratio_at_level`).
    """
    return {
        "approx_kl": mean_pair(-log_rho, mask),  # k1: E_old[log old - log new]
        "ratio": mean_pair(level.exp(), mask),
        "ess": (effective_sample_size(level, mask).sum(), mask.sum()),
    }


# --- masks and sums --------------------------------------------------------------------------


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask, else 0. Not x * mask: NaN times 0 is NaN."""
    return torch.where(mask, x, 0.0)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N,): mean over the tokens of each row, 0 for a row without tokens."""
    return masked(x, mask).sum(1) / mask.sum(1).clamp(min=1)


def last_token(mask: Tensor) -> Tensor:
    """(N, T) bool: True at the last token of each row; an empty row has none."""
    # cumsum reaches the total at the last True and stays there; `mask &` drops what follows.
    return mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))


def usable_difference(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(a - b, usable): the difference is 0, without gradient, where masked or not finite."""
    usable = mask & torch.isfinite(a - b)
    # One test finds NaN and infinity in either operand, and inf - inf.
    return masked(a - b, usable), usable


def same_group(group_ids: Tensor) -> Tensor:
    """(N,) ids in any order -> (N, N) bool: do responses i and j belong to one prompt?"""
    return group_ids[:, None] == group_ids[None, :]


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """(N,) -> (N,) float64: sum over the group of each response."""
    # N x N is small next to N x T, and needs neither sorted ids nor groups of one size.
    return same_group(group_ids).double() @ x.double()


def group_size(group_ids: Tensor) -> Tensor:
    """(N,) -> (N,) float64: number of responses in the group of each response."""
    return group_sum(torch.ones_like(group_ids), group_ids)


def mean_pair(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over tokens, number of tokens); a row without any (filtered response) does not count."""
    # float: masks come in too, and their mean is a fraction of tokens.
    return masked(x.detach().float(), mask).sum(), mask.sum()
