"""losses.py against numbers of the reference implementation, one test per family of vectors.

Deliberate differences, each checked here: lambda is float64, so k = 1 and long responses are legal;
whitening leaves 0 outside the mask.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import mask_of

import algorithms
import kernels
import losses
import rollout
from config import Config

VECTORS = {
    v["name"]: v
    for v in json.loads((Path(__file__).parent / "data/justrl2_golden.json").read_text())
}


def family(*prefixes):
    names = [name for name in VECTORS if name.startswith(prefixes)]
    assert names, prefixes
    return pytest.mark.parametrize("name", names)


def load(name):
    v = VECTORS[name]
    return v["inputs"], v["expected"], v["tolerance"]


def close(actual, expected, tolerance, **override):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        torch.as_tensor(actual).double(), expected, **{**tolerance, **override}
    )


def pad(rows, dtype=torch.float32, fill=math.nan):
    """Ragged rows -> (N, T), padded with NaN: whatever looks at padding is found out."""
    out = torch.full((len(rows), max(map(len, rows))), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def split(flat, lengths):
    rows, start = [], 0
    for n in lengths:
        rows.append(flat[start : start + n])
        start += n
    return rows


def ragged(x, lengths):
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


def flat(rows):
    return [x for row in rows for x in row]


# --- lambda, GAE -----------------------------------------------------------------------------


@family("lambda/k")
def test_lambda(name):
    x, want, _ = load(name)
    lengths = torch.tensor(x["lengths"])
    lam = losses.length_adaptive_lambda(lengths, x["k"])
    assert lam.dtype == torch.float64
    close(lam, want["lambda_exact"], {"rtol": 1e-14, "atol": 1e-15})
    close(lam.float(), want["lambda_f32"], {"rtol": 2e-7, "atol": 1e-7})
    close(
        (1 - lam)[lengths > 0],
        torch.tensor(want["one_minus_lambda_exact"])[lengths > 0],
        {"rtol": 1e-6, "atol": 0},
    )


def test_lambda_guards_reject_only_a_k_outside_the_range():
    x, want, _ = load("lambda/guards")
    for case, rejected in zip(x["cases"], want["must_raise"], strict=True):
        lengths, k = torch.tensor(case["lengths"]), case["k"]
        if not 0 < k <= 1:
            assert rejected
            with pytest.raises(ValueError, match="gae_lambda_k"):
                losses.length_adaptive_lambda(lengths, k)
        else:
            # The reference rejects k = 1, and bfloat16 or 3e7 tokens where lambda rounds to 1.
            lam = losses.length_adaptive_lambda(lengths, k)
            assert bool(((lam < 1) | (k == 1)).all())


def test_lambda_alpha_form():
    x, want, tolerance = load("lambda/alpha_equivalence")
    lengths = torch.tensor(x["lengths"])
    close(algorithms.vapo_lambda(lengths, x["alpha"]), want["old_form"], {"rtol": 1e-14, "atol": 0})
    close(losses.length_adaptive_lambda(lengths, x["k"]), want["new_form"], tolerance)


def advantages_of(x, values, rewards, mask):
    if x.get("k") is None:
        return losses.gae(rewards, values, mask, x["lambd"], x["gamma"])
    return losses.justrl2_advantages(
        token_rewards=rewards,
        raw_token_rewards=rewards,
        values=values,
        mask=mask,
        gae_lambda_k=x["k"],
    )


@family("gae/plain", "gae/single", "gae/decoupled")
@pytest.mark.parametrize("bits", [32, 64])
def test_gae(name, bits):
    x, want, tolerance = load(name)
    dtype = {32: torch.float32, 64: torch.float64}[bits]
    lengths = x["response_lengths"]
    advantages, returns = advantages_of(
        x, pad(x["values"], dtype), pad(x["token_rewards"], dtype), mask_of(lengths)
    )
    assert advantages.dtype == dtype
    close(ragged(advantages, lengths), flat(want[f"advantages_f{bits}"]), tolerance)
    close(ragged(returns, lengths), flat(want[f"returns_f{bits}"]), tolerance)


@family("gae/formula")
@pytest.mark.parametrize("mode", ["plain0.95", "k0.5"])
def test_gae_at_block_borders(name, mode):
    x, want, tolerance = load(name)
    t = torch.arange(x["L"], dtype=torch.float64)
    values = (0.5 + 0.25 * (0.37 * t).sin() * (0.011 * t).cos())[None]
    rewards = torch.zeros(1, x["L"], dtype=torch.float64)
    rewards[0, -1] = 1
    setting = {"lambd": 0.95, "gamma": 1.0, "k": 0.5 if mode == "k0.5" else None}
    for bits in (32, 64):
        cast = torch.float32 if bits == 32 else torch.float64
        a, r = advantages_of(
            setting, values.to(cast), rewards.to(cast), torch.ones(1, x["L"], dtype=torch.bool)
        )
        expected = want[f"{mode}_f{bits}"]
        close(a[0, x["positions"]], expected["at"], tolerance)
        close(a.double().sum(), expected["sum"], tolerance)
        close(a.double().square().sum(), expected["sumsq"], tolerance)
        close(r[0, [0, -1]], [expected["ret_first"], expected["ret_last"]], tolerance)


def test_gae_at_the_full_budget():
    x, want, _ = load("gae/long_126976_k0.5")
    t = torch.arange(x["L"], dtype=torch.float64)
    values = (0.52 + 0.2 * (t / 1000).sin() + 0.1 * t / x["L"])[None]
    rewards = torch.zeros(1, x["L"], dtype=torch.float64)
    rewards[0, -1] = 1
    exact = want["exact_f64_lambda"]
    for cast, atol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        a, r = advantages_of(
            x, values.to(cast), rewards.to(cast), torch.ones(1, x["L"], dtype=torch.bool)
        )
        a = a.double()
        close(a[0, x["positions"]], exact["at"], {"rtol": 0, "atol": atol})
        statistics = [a.mean(), a.std(), a.min(), a.max()]
        close(
            torch.stack(statistics),
            [exact[k] for k in ("mean", "std_ddof1", "min", "max")],
            {"rtol": 0, "atol": atol},
        )
        close(a[0, x["positions"]], want["f32"]["at"], {"rtol": 0, "atol": 3e-3})
        assert bool((r == 1).all())


@family("group_center/")
def test_group_centring(name):
    x, want, tolerance = load(name)
    lengths = x["response_lengths"]
    mask, values = mask_of(lengths), pad(x["values"])
    ids = torch.tensor(x["positions"]) // x["group_size"]
    raw = torch.tensor(x["raw_rewards_flat"])[x["positions"]]
    trained = pad(x["loss_masks"], fill=0).bool()
    # V is read at the last trained token; a fully masked response falls back to its last token.
    correction = losses.group_correction(
        raw, values, torch.where(trained.any(1, keepdim=True), trained, mask), ids
    )
    close(correction, want["correction"], tolerance)
    setting = {"k": x["k_gae"], "lambd": x["lambd"], "gamma": 1.0}
    before, returns = advantages_of(setting, values, pad(x["token_rewards"]), mask)
    close(ragged(before, lengths), flat(want["advantages_before"]), tolerance)
    close(ragged(returns, lengths), flat(want["returns"]), tolerance)
    k_inject = losses.length_adaptive_lambda(torch.tensor(lengths), x["k_inject"])
    after = losses.inject_terminal(before, correction, mask, k_inject)
    close(ragged(after, lengths), flat(want["advantages_after"]), tolerance)
    if x["k_gae"] is not None and all(map(all, x["loss_masks"])):
        # The algorithm puts the correction into the terminal reward instead: the same thing.
        row_result, _ = losses.justrl2_advantages(
            token_rewards=pad(x["token_rewards"]),
            raw_token_rewards=losses.terminal_reward(raw, mask),
            values=values,
            mask=mask,
            group_ids=ids,
            gae_lambda_k=x["k_gae"],
            group_center=True,
        )
        if 0 not in lengths:  # an empty response has no token to carry its raw reward of 1
            close(ragged(row_result, lengths), flat(want["advantages_after"]), tolerance)


# --- rewards ---------------------------------------------------------------------------------


@family("overlong/")
def test_overlong_penalty(name):
    x, want, tolerance = load(name)
    penalty = losses.overlong_penalty(
        torch.tensor(x["lengths"]), x["max_response_len"], x["buffer_len"], x["factor"]
    )
    close(penalty, want["penalty"], tolerance)


def test_actor_reward_carries_the_penalty_and_the_critic_reward_does_not():
    x, want, tolerance = load("rewards/ppo_shaped_and_critic")
    raw = torch.tensor(x["raw"], dtype=torch.float64)
    penalty = losses.overlong_penalty(
        torch.tensor(x["lengths"]), x["max_response_len"], x["buffer_len"], x["factor"]
    )
    close(raw + penalty, want["actor_rewards"], tolerance)
    close(raw, want["critic_rewards"], tolerance)


@family("olp_inject/")
def test_overlong_injection(name):
    x, want, tolerance = load(name)
    lengths = torch.tensor(x["response_lengths"])
    advantages = torch.tensor(x["advantages"])
    mask = torch.arange(advantages.shape[1]) < lengths[:, None]
    decay = algorithms.vapo_lambda(lengths, x["alpha"])
    injected = losses.inject_terminal(advantages, torch.tensor(x["penalties"]), mask, decay)
    close(injected, want["advantages"], tolerance)


@family("meshy/advantage")
def test_length_reward_and_mean_only_advantage(name):
    x, want, tolerance = load(name)
    rewards, lengths = torch.tensor(x["rewards"], dtype=torch.float64), torch.tensor(x["lengths"])
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    shaped = rewards + losses.overlong_penalty(
        lengths, x["max_response_len"], x["buffer_len"], x["factor"]
    )
    if "length_weight" in x:
        shaped += algorithms.length_reward(
            rewards == 1,
            lengths,
            ids,
            weight=x["length_weight"],
            min_spread=x["min_spread"],
            min_longest=x["budget_floor"],
        )
    close(shaped, want["shaped"], tolerance)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    a, _ = losses.grpo_advantages(
        token_rewards=shaped[:, None], mask=mask, group_ids=ids, std_normalize=False
    )
    close(a[:, 0], want["advantages"], tolerance)


# --- group advantages, whitening ---------------------------------------------------------------


@family(
    "group_adv/grpo", "group_adv/dr_grpo", "group_adv/mean_only", "group_adv/reinforce_pp_baseline"
)
def test_group_advantages(name):
    x, want, tolerance = load(name)
    if "kl" in x:
        # KL in the reward of a group-relative row: subtracted per token, after centring.
        mask = mask_of([len(kl) for kl in x["kl"]])
        rewards = losses.terminal_reward(torch.tensor([1.0, 0.0]), mask)
        a, _ = losses.grpo_advantages(
            token_rewards=rewards,
            mask=mask,
            group_ids=torch.zeros(2, dtype=torch.int64),
            std_normalize=False,
        )
        lengths = [len(kl) for kl in x["kl"]]
        close(ragged(a - x["kl_coef"] * pad(x["kl"]), lengths), flat(want["advantages"]), tolerance)
        return
    lengths = torch.tensor(x["lengths"])
    mask = mask_of(x["lengths"])
    shaped = torch.tensor(x["rewards"]) + losses.overlong_penalty(
        lengths, x["max_response_len"], x["buffer_len"]
    )
    a, returns = losses.grpo_advantages(
        token_rewards=losses.terminal_reward(shaped, mask),
        mask=mask,
        group_ids=torch.arange(len(lengths)) // x["group_size"],
        std_normalize="grpo_std" in name,
        std_ddof=1,
    )
    assert returns is None
    close(
        ragged(a, x["lengths"]),
        flat([[w] * n for w, n in zip(want["advantages"], x["lengths"], strict=True)]),
        tolerance,
    )


def test_reward_to_go_with_kl_in_the_reward():
    x, want, tolerance = load("group_adv/reinforce_pp_returns")
    mask = pad(x["loss_masks"], fill=0).bool()
    rewards = losses.terminal_reward(torch.tensor(x["rewards"]), mask) - x["kl_coef"] * pad(x["kl"])
    a, _ = algorithms.reward_to_go_advantages(token_rewards=rewards, mask=mask, gamma=x["gamma"])
    close(a, pad(want["returns"], fill=0), tolerance)


def test_on_policy_distillation_advantage():
    x, want, tolerance = load("group_adv/on_policy_distillation")
    student, teacher = (
        torch.tensor([x["student_log_probs"]]),
        torch.tensor([x["teacher_log_probs"]]),
    )
    a, _ = algorithms.distillation_advantages(
        old_logprobs=student,
        teacher_logprobs=teacher,
        mask=torch.ones_like(student, dtype=torch.bool),
    )
    close(a[0], want["advantages"], tolerance)


def test_distillation_by_the_teachers_top_k():
    x, want, tolerance = load("meshy/opd_forward_kl_topk")
    student, teacher = torch.tensor(x["student_logits"]), torch.tensor(x["teacher_logits"])
    close(algorithms.topk_forward_kl(student, teacher, x["k"]), want["kl"], tolerance)
    clamped = algorithms.topk_forward_kl(student, teacher, x["k"], min_logprob=-2.0, max_kl=0.2)
    close(clamped, want["kl_clamped"], tolerance)


@family("whiten/masked", "whiten/all_ones", "whiten/two_shards")
def test_whitening(name):
    x, want, tolerance = load(name)
    shards = [k.removeprefix("values") for k in x if k.startswith("values")]
    values = torch.tensor([x["values" + s] for s in shards])
    mask = torch.tensor([x["mask" + s] for s in shards]) if len(x) > 1 else torch.ones_like(values)
    mask = mask.bool()
    whitened = losses.whiten(values, mask)
    expected = torch.tensor(want["whitened"]).view_as(values)
    close(whitened[mask], expected[mask], tolerance)
    assert bool((whitened[~mask] == 0).all())
    if "whitened_keep_mean" in want:
        scaled = losses.whiten(values, mask, shift_mean=False)
        close(
            scaled[mask], torch.tensor(want["whitened_keep_mean"]).view_as(values)[mask], tolerance
        )


def test_whitening_one_token_and_none():
    x, want, _ = load("whiten/single_unmasked")
    whitened = losses.whiten(torch.tensor([x["values"]]), torch.tensor([x["mask"]]).bool())
    assert whitened[0, 1] == 0 == want["whitened"][1]
    x, want, _ = load("whiten/zero_mask")
    assert want["must_raise"]
    with pytest.raises(ValueError, match="masked"):
        losses.whiten(torch.tensor([x["values"]]), torch.tensor([x["mask"]]).bool())


# --- policy losses -----------------------------------------------------------------------------


@family("policy_loss/")
def test_clip(name):
    x, want, tolerance = load(name)
    log_ratio = torch.tensor(x["log_ratio"]).requires_grad_()
    per_token, limited = losses.clip(
        log_ratio,
        torch.tensor(x["advantages"]),
        clip_low=x["eps_clip"],
        clip_high=x["eps_clip_high"],
        dual_clip=x["eps_clip_c"],
    )
    close(-per_token.detach(), want["loss"], tolerance)
    (grad,) = torch.autograd.grad(-per_token.sum(), log_ratio)
    ratio = log_ratio.detach().exp()
    edge = torch.zeros_like(ratio, dtype=torch.bool)
    for r in (0.8, 1.2, 1.28):  # on an edge the rounding of exp decides
        edge |= (ratio - r).abs() < 1e-5
    close(grad[~edge], torch.tensor(want["grad_log_ratio"])[~edge], tolerance)
    close(limited[~edge].float(), torch.tensor(want["clipped"])[~edge], tolerance)


class Batch:
    """The tensors of a policy_full vector, ragged rows padded with NaN."""

    def __init__(self, x):
        self.lengths = x["response_lengths"]

        def grid(key):
            return pad(split(x[key], self.lengths))

        self.mask = pad(x["loss_masks"], fill=0).bool()
        self.advantages, self.old, self.rollout = (
            grid("advantages"),
            grid("old_log_probs"),
            grid("rollout_log_probs"),
        )
        self.new, self.ref = grid("new_log_probs").requires_grad_(), grid("ref_log_probs")


def run_policy(x, b, rows=slice(None)):
    """(loss, metrics) of some rows under the settings of vector x, the loss as a plain sum."""
    mask = b.mask[rows]
    weights, metrics = None, {}
    _, mismatch = losses.importance_weights(b.new[rows], b.rollout[rows], mask, "none")
    if x["use_tis"]:
        mode = {"icepop": "icepop", "vanilla": "tis"}[x["tis_mode"]]
        weights, metrics = losses.importance_weights(
            b.old[rows], b.rollout[rows], mask, mode, x["tis_clip_low"], x["tis_clip"]
        )
    old = b.rollout if x["use_rollout_logprobs"] else b.old
    counts = mask.sum(1).clamp(min=1)
    row_weights = torch.ones(len(counts)) if x["calculate_per_token_loss"] else 1 / counts
    estimator = "k3_is" if x["use_unbiased_kl"] else "k3"
    loss, own = losses.policy_loss(
        b.new[rows],
        old[rows],
        b.advantages[rows],
        mask,
        ratio_level="sequence" if x["advantage_estimator"] == "gspo" else "token",
        row_weights=row_weights,
        weights=weights,
        clip_low=x["eps_clip"],
        clip_high=x["eps_clip_high"],
        opsm_delta=x["opsm_delta"] if x["use_opsm"] else None,
        ref_logprobs=b.ref[rows] if x["use_kl_loss"] else None,
        kl_coef=x["kl_loss_coef"],
        kl_estimator=estimator,
    )
    return loss, own | metrics | {f"new_{k}": v for k, v in mismatch.items()}


METRICS = {
    "pg_clipfrac": "clip_fraction",
    "ppo_kl": "approx_kl",
    "ois": "ratio",
    "ess_num": "ess",
    "kl_loss": "kl",
    "tis": "is_ratio",
    "tis_clipfrac": "is_outside",
    "tis_abs": "is_abs_deviation",
    "train_rollout_logprob_abs_diff": "new_mismatch_abs",
    "train_rollout_kl": "new_mismatch_kl",
}


@family(
    *(
        f"policy_full/{n}"
        for n in ("release", "sample", "token", "no_tis", "rollout", "gspo", "kl", "opsm")
    )
)
def test_whole_policy_loss(name):
    x, want, tolerance = load(name)
    b = Batch(x)
    loss, metrics = run_policy(x, b)
    close(loss.detach(), want["sum_loss"], tolerance)
    (grad,) = torch.autograd.grad(loss, b.new)
    close(ragged(grad, b.lengths), want["grad_new_log_probs_of_sum"], tolerance)
    mode = "token-mean" if x["calculate_per_token_loss"] else "seq-mean-token-mean"
    c = losses.aggregation_weights(mode, b.mask.sum(1))
    scale = want["num_tokens"] if x["calculate_per_token_loss"] else want["num_samples"]
    close(
        c,
        1 / (scale * (torch.ones(4) if mode == "token-mean" else b.mask.sum(1).clamp(min=1))),
        {"rtol": 1e-6, "atol": 0},
    )
    if x["calculate_per_token_loss"]:
        totals = {k: n for k, (n, _) in metrics.items()}
        empty = (~b.mask.any(1)).sum()  # which the reference counts as a token each
        assert metrics["ess"][1] + empty == want["metrics_sum"]["ess_den"] == want["num_tokens"]
    else:  # the mean over samples of each sample's token mean
        per_row = [run_policy(x, b, slice(i, i + 1))[1] for i in range(len(b.lengths))]
        totals = {k: sum(m[k][0] / m[k][1].clamp(min=1) for m in per_row) for k in metrics}
    for key, own in METRICS.items():
        key = "ess_ratio" if key == "ess_num" and "ess_ratio" in want["metrics_sum"] else key
        if key in want["metrics_sum"]:
            close(totals[own].detach(), want["metrics_sum"][key], tolerance)


def test_policy_loss_with_nan_and_infinite_log_probs():
    x, want, tolerance = load("policy_full/nan_and_inf_log_probs")
    base = VECTORS[x["same_as"]]["inputs"]
    new = list(base["new_log_probs"])
    for i, value in x["replace"].items():
        new[int(i)] = float(value)
    b = Batch(base | {"new_log_probs": new})
    loss, metrics = run_policy(base, b)
    close(loss.detach(), want["sum_pg_loss"], tolerance)
    (grad,) = torch.autograd.grad(loss, b.new)
    assert bool(torch.isfinite(grad).all())
    bad = sum(bool(m) for i, m in enumerate(flat(base["loss_masks"])) if str(i) in x["replace"])
    assert metrics["nonfinite"][0] == bad > 0


@family("ess/")
def test_effective_sample_size(name):
    x, want, tolerance = load(name)
    log_ratio = pad(split(x["new_log_probs"], x["response_lengths"])) - pad(
        split(x["old_log_probs"], x["response_lengths"])
    )
    mask = pad(x["loss_masks"], fill=0).bool()
    ess = losses.effective_sample_size(log_ratio, mask)
    n = mask.sum(1).clamp(min=1)
    close(ess.sum() if "token" in name else (ess / n).sum(), want["numerator"], tolerance)


def test_importance_weights():
    x, want, tolerance = load("tis/weights_0.5_5")
    old = torch.tensor([x["log_ratio_train_minus_rollout"]])
    mask, zero = torch.ones_like(old, dtype=torch.bool), torch.zeros_like(old)
    icepop, m = losses.importance_weights(old, zero, mask, "icepop", x["low"], x["high"])
    tis, _ = losses.importance_weights(old, zero, mask, "tis", x["low"], x["high"])
    none, _ = losses.importance_weights(old, zero, mask, "none", x["low"], x["high"])
    close(icepop[0], want["icepop_weight"], tolerance)
    close(tis[0], want["tis_weight"], tolerance)
    assert bool((none == 1).all())
    close(m["is_ratio"][0], sum(want["ratio"]), tolerance)
    close(m["is_outside"][0], sum(want["icepop_clipped"]), tolerance)
    close(m["is_abs_deviation"][0], sum(want["abs_ratio_minus_1"]), tolerance)


def test_sequence_ratio():
    x, want, tolerance = load("gspo/sequence_ratio")
    lengths = x["response_lengths"]
    difference = pad(split(x["new_log_probs"], lengths)) - pad(split(x["old_log_probs"], lengths))
    mean = losses.ratio_at_level(difference, pad(x["loss_masks"], fill=0).bool(), "sequence")
    close(ragged(-mean, lengths), want["ppo_kl_per_token"], tolerance)
    close(ragged(mean.exp(), lengths), want["ratio_per_token"], tolerance)


def test_off_policy_sequence_mask():
    x, want, tolerance = load("opsm/mask")
    lengths = x["response_lengths"]

    def grid(key):
        return pad(split(x[key], lengths))

    log_ratio, mask = (
        grid("new_log_probs") - grid("old_log_probs"),
        pad(x["loss_masks"], fill=0).bool(),
    )
    stale = losses.off_policy_sequences(log_ratio, grid("advantages"), mask, x["delta"])
    close(ragged((~stale).float(), lengths), want["mask"], tolerance)
    # The vector drops nothing. With new and old swapped, rows 1 and 2 have drifted.
    stale = losses.off_policy_sequences(-log_ratio, grid("advantages"), mask, 0.1)
    expected = mask & (grid("advantages") < 0)
    expected[0] = False  # its drift is 0.01
    assert torch.equal(stale, expected) and stale.any()


@family("value_loss/")
def test_value_loss_reads_v_before_the_token(name):
    x, want, tolerance = load(name)
    stream = torch.tensor(x["head_output_per_position"]).requires_grad_()
    rows, start = [], 0
    for prompt, response in zip(x["prompt_lengths"], x["response_lengths"], strict=True):
        rows.append(stream[start + prompt - 1 : start + prompt + response - 1])
        start += prompt + response
    lengths = x["response_lengths"]
    close(torch.cat(rows).detach(), want["values_aligned"], tolerance)
    values = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    mask = pad(x["loss_masks"], fill=0).bool()
    row_weights = torch.ones(3) if "token" in name else 1 / mask.sum(1)
    loss, metrics = losses.value_loss(
        values,
        pad(split(x["old_values"], lengths)),
        pad(split(x["returns"], lengths)),
        mask,
        value_clip=x["value_clip"],
        row_weights=row_weights,
    )
    close(loss.detach(), want["sum_loss"], tolerance)
    (grad,) = torch.autograd.grad(loss, stream)
    close(grad, want["grad_head_output_of_sum"], tolerance)
    if "token" in name:
        close(metrics["clip_fraction"][0], want["clipfrac_sum"], tolerance)
        assert metrics["clip_fraction"][1] == want["num_tokens"]


def test_kl_estimators():
    x, want, tolerance = load("approx_kl/table")
    new, ref, ratio = (
        torch.tensor(x[k]) for k in ("log_probs", "base_log_probs", "importance_ratio")
    )
    for key, expected in want.items():
        estimator = key.removesuffix("_importance")
        bound = losses.KL_LOSS_BOUND if estimator == "low_var_kl" else None
        estimator = "k3" if estimator == "low_var_kl" else estimator
        kl = losses.approx_kl(
            new, ref, estimator, ratio=ratio if key.endswith("importance") else None, bound=bound
        )
        close(kl, expected, tolerance)
    x, want, tolerance = load("approx_kl/low_var_kl_grad")
    new = torch.tensor(x["log_probs"]).requires_grad_()
    (grad,) = torch.autograd.grad(
        losses.approx_kl(new, ref, "k3", bound=losses.KL_LOSS_BOUND).sum(), new
    )
    close(grad, want["grad"], tolerance)


def test_aggregation_over_micro_batches():
    x, want, tolerance = load("aggregation/micro_batches")
    per_token, mask = pad(split(x["token_loss"], x["lengths"])), pad(x["loss_masks"], fill=0).bool()
    counts = mask.sum(1)
    for mode, total, per_micro, scale in (
        ("token-mean", "token_mean", "token_sum_per_micro", sum(want["num_tokens_per_micro"])),
        ("seq-mean-token-mean", "sample_mean", "sample_mean_sum_per_micro", x["global_batch_size"]),
    ):
        c = losses.aggregation_weights(mode, counts)
        parts = [
            losses.aggregate(per_token[rows], mask[rows], row_weights=c[rows])
            for rows in x["micro_batches"]
        ]
        close(torch.stack(parts) * scale, want[per_micro], tolerance)
        close(sum(parts), want[total], tolerance)
        close(losses.aggregate(per_token, mask, mode), want[total], tolerance)


@family("meshy/policy")
def test_rollout_log_probs_as_old_with_icepop_as_a_mask(name):
    """The sampler's log-probs sit in the PPO ratio itself, and the ratio decides what is kept."""
    x, want, tolerance = load(name)
    documents = torch.tensor(x["doc_ids"][0]).bincount().tolist()

    def grid(row):
        return pad(split(row, documents))[: x["n_docs"]]

    new, old = grid(x["new_log_probs"][0]).requires_grad_(), grid(x["old_log_probs"][0])
    mask = pad(split(x["mask"][0], documents), fill=0).bool()[: x["n_docs"]]
    advantages = torch.tensor(x["advantages_per_doc"])[:, None].expand_as(new)
    weights = None
    if "icepop" in name:
        window, _ = losses.importance_weights(
            new.detach(), old, mask, "icepop", x["tis_low"], x["tis_high"]
        )
        weights = (window > 0).float()
    loss, _ = losses.policy_loss(
        new,
        old,
        advantages,
        mask,
        aggregation="token-mean" if "token_mean" in name else "seq-mean-token-mean",
        weights=weights,
        clip_low=x["eps_low"],
        clip_high=x["eps_high"],
    )
    close(loss.detach(), want["loss"], tolerance)
    (grad,) = torch.autograd.grad(loss, new)
    kept_documents = documents[: x["n_docs"]]
    close(ragged(grad, kept_documents), want["grad"][0][: sum(kept_documents)], tolerance)


# --- the head and the filter, which live in other files ------------------------------------------


@family("logprob_entropy/temp")
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_log_probs_are_taken_at_the_sampling_temperature(name, impl):
    x, want, tolerance = load(name)
    logits = torch.tensor(x["logits"]).requires_grad_()
    head = torch.eye(logits.shape[1])  # hidden states are the logits
    logprobs, entropy = kernels.logprob_entropy(
        logits, head, torch.tensor(x["tokens"]), temperature=x["temperature"], impl=impl
    )
    close(logprobs.detach(), want["log_probs"], tolerance)
    close(entropy.detach(), want["entropy"], tolerance)
    upstream = torch.tensor(x["upstream_grad"])
    (grad,) = torch.autograd.grad(logprobs, logits, upstream)
    close(grad, want["grad_logits"], tolerance)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_entropy_has_its_own_gradient(impl):
    x, want, tolerance = load("logprob_entropy/entropy_grad")
    logits = torch.tensor(x["logits"]).requires_grad_()
    targets = torch.zeros(len(logits), dtype=torch.int64)
    _, entropy = kernels.logprob_entropy(logits, torch.eye(logits.shape[1]), targets, impl=impl)
    close(entropy.detach(), want["entropy"], tolerance)
    (grad,) = torch.autograd.grad(entropy, logits, torch.tensor(x["upstream_grad"]))
    close(grad, want["grad_logits"], tolerance)


def test_a_group_is_kept_when_its_raw_rewards_differ():
    x, want, _ = load("filter/nonzero_std")
    assert [rollout.has_signal(group) for group in x["groups"]] == want["keep"]


# --- acceptance: one whole step ------------------------------------------------------------------


@family("step/on_policy", "step/off_policy")
def test_whole_actor_step(name):
    x, want, tolerance = load(name)
    lengths = x["response_lengths"]
    mask, values = mask_of(lengths), pad(x["values"])
    raw = torch.tensor(x["raw_rewards"], dtype=torch.float32)
    penalty = losses.overlong_penalty(
        torch.tensor(lengths), x["max_response_len"], x["buffer_len"], x["factor"]
    )
    close(raw + penalty, want["actor_rewards"], tolerance)
    row = algorithms.ALGORITHMS["justrl2"]
    assert (row.defaults["clip_low"], row.defaults["clip_high"]) == (
        x["eps_clip"],
        x["eps_clip_high"],
    )
    assert (row.defaults["is_low"], row.defaults["is_high"]) == (x["tis_low"], x["tis_high"])
    assert row.defaults["is_mode"] == "icepop" and row.defaults["whiten_advantages"]
    advantages, returns = row.advantages(
        Config(**row.defaults),
        token_rewards=losses.terminal_reward(raw + penalty, mask),
        raw_token_rewards=losses.terminal_reward(raw, mask),
        values=values,
        mask=mask,
        group_ids=torch.arange(len(lengths)) // x["group_size"],
    )
    close(ragged(advantages, lengths), flat(want["advantages_raw"]), tolerance)
    close(ragged(returns, lengths), flat(want["critic_returns"]), tolerance)
    advantages = losses.whiten(advantages, mask)
    close(ragged(advantages, lengths), flat(want["advantages_whitened"]), tolerance)

    old, rollout = pad(x["old_log_probs"]), pad(x["rollout_log_probs"])
    new = (
        old.clone() if isinstance(x["new_log_probs"], str) else pad(x["new_log_probs"])
    ).requires_grad_()
    weights, is_metrics = losses.importance_weights(
        old, rollout, mask, "icepop", x["tis_low"], x["tis_high"]
    )
    loss, metrics = losses.policy_loss(
        new,
        old,
        advantages,
        mask,
        objective=row.objective,
        aggregation=row.defaults["aggregation"],
        weights=weights,
        clip_low=x["eps_clip"],
        clip_high=x["eps_clip_high"],
    )
    close(loss.detach(), want["policy_loss"], tolerance)
    (grad,) = torch.autograd.grad(loss, new)
    close(ragged(grad, lengths), flat(want["grad_new_log_probs"]), tolerance)
    _, mismatch = losses.importance_weights(new, rollout, mask, "none")
    metrics |= is_metrics | {f"new_{k}": v for k, v in mismatch.items()}
    assert metrics["ratio"][1] == want["num_tokens"]
    means = {k: n / d for k, (n, d) in metrics.items()}
    close(means["ess"], want["ess_ratio"], tolerance)
    for key, own in METRICS.items():
        if key in want["metrics"]:
            close(means[own].detach(), want["metrics"][key], tolerance)


@family("step/critic")
def test_whole_critic_step(name):
    x, want, tolerance = load(name)
    lengths, old = x["response_lengths"], pad(x["old_values"])
    current = old.clone() if isinstance(x["current_values"], str) else pad(x["current_values"])
    current.requires_grad_()
    returns = torch.tensor(x["returns_per_sample"], dtype=torch.float32)[:, None].expand_as(old)
    loss, metrics = losses.value_loss(
        current, old, returns, mask_of(lengths), value_clip=x["value_clip"]
    )
    close(loss.detach(), want["value_loss"], tolerance)
    close(
        metrics["clip_fraction"][0] / metrics["clip_fraction"][1], want["value_clipfrac"], tolerance
    )
    (grad,) = torch.autograd.grad(loss, current)
    close(ragged(grad, lengths), flat(want["grad_current_values"]), tolerance)


def test_constant_value_head():
    x, want, tolerance = load("step/constant_value_head")
    lengths = x["response_lengths"]
    mask = mask_of(lengths)
    rewards = losses.terminal_reward(torch.tensor(x["terminal_rewards"], dtype=torch.float32), mask)
    advantages, returns = advantages_of(x, torch.full(mask.shape, x["bias"]), rewards, mask)
    close(ragged(advantages, lengths), flat(want["advantages"]), tolerance)
    close(ragged(returns, lengths), flat(want["returns"]), tolerance)
