"""Train a policy with JustRL II, GRPO, PPO or another row of `algorithms.ALGORITHMS`.

One step, in the order of the method:

    1 collect     sample groups of responses, verify, keep those with signal   rollout.collect
    2 shape       actor: reward + overlong penalty; critic: reward             shape_rewards
    3 values      V of every token, before the critic moves                    score_critic
    4 advantages  by the algorithm; whitening is a step of its own             compute_advantages
    5 critic      one or more updates towards the raw reward                   update_critic
    6 policy      old log-probs, then one or more updates of the surrogate,    score_policy,
                  once the critic has warmed up                                update_policy
    7 report      metrics, samples, checkpoint, evaluation                     train

Every rank holds the scalars of a step whole, so statistics and denominators are global without a
collective; only the forward and backward passes of the models are shared out.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import algorithms
import distributed
import files
import losses
import rollout
from config import Config, parse, reward_weights
from data import Batch, micro_batches, to_batch
from distributed import print0
from model import Transformer
from rewards import has_format
from run import checkpoint, plan, postmortem
from run import metrics as run_metrics
from run.alarms import alarms
from run.evaluation import evaluate, evaluate_if_missing, evaluation_is_due
from run.optimizer import optimizer_step
from run.setup import set_up
from run.signals import handle_signals
from run.state import Run, State

# A run that keeps no group for this many steps in a row learns nothing and stops.
EMPTY_STEPS = 3
PROMPT_END = 120  # characters shown at the start: does the prompt ask for a box?


# ---- one step


def train_step(run: Run, state: State) -> dict[str, float] | None:
    """One step of the method; returns its metrics, or None, changing nothing, if SIGTERM came."""
    config, clock = run.config, run_metrics.Clock()
    # 1. Groups of responses, each verified; those of one outcome are gone (dynamic sampling).
    before = checkpoint.position(state)
    collected = state.ahead or collect(run, state, state.step)
    if distributed.any_rank(state.sampler.interrupted):
        checkpoint.set_position(state, before, run.problems)
        return None
    with sampling_ahead(run, state, clock):
        add_overlong_penalty(collected, config)
        metrics = run_metrics.rollout_metrics(collected, config, state.sampler.weight_version)
        values = advantages = None
        if collected.groups:
            kept = [r for group in collected.groups for r in group]
            batch = to_batch(kept, run.device, state.sampler.weight_version)
            mask = loss_mask(batch, config)
            # 2. The policy is paid for brevity too, the critic predicts the raw reward.
            token_rewards, raw_token_rewards = shape_rewards(batch, config)
            # 3. V before the critic's update: advantages must not see what it learns from them.
            if state.critic is not None:
                with clock("score_critic"), state.on_device("critic", run):
                    values = score_critic(state.critic, batch, config)
            # 4. Advantages, and what V is regressed on.
            advantages, returns = compute_advantages(
                run, batch, token_rewards, raw_token_rewards, values
            )
            # 5. The critic learns from every batch, also while the policy waits for it.
            if state.critic is not None:
                with clock("update_critic"), state.on_device("critic", run):
                    metrics |= update_critic(run, state, batch, values, returns)
            # Not before that update, which stops the run if one of these values is not finite.
            metrics |= run_metrics.write_audit(
                run.folder, state.step + 1, batch, mask, values, advantages
            )
            # 6. The policy, once V is worth something.
            warm = state.critic is None or state.step >= config.num_critic_only_steps
            if warm and mask.any():
                with clock("score_policy"), state.on_device("policy", run):
                    old_logprobs, entropy = score_policy(state.policy, batch, config)
                with clock("update_policy"), state.on_device("policy", run):
                    metrics |= update_policy(run, state, batch, advantages, old_logprobs)
                metrics |= run_metrics.score_metrics(batch, mask, old_logprobs, entropy, advantages)
        tokens = {"values": values, "advantages": advantages}
        run_metrics.write_rollouts(
            run.folder, config.log_samples, state.step + 1, collected, tokens
        )
    # Not before: with --async-steps the thread samples the next step from the old weights.
    if "policy/loss" in metrics:
        with clock("refresh_sampler"), state.on_device("policy", run):
            distributed.copy_weights(state.policy, state.sampler.model)
            state.sampler.weight_version += 1
    state.step += 1
    state.empty_steps = 0 if collected.groups else state.empty_steps + 1
    if state.start_entropy is None:
        state.start_entropy = metrics.get("policy/entropy")
    return metrics | clock.metrics(collected)


def collect(run: Run, state: State, step: int) -> rollout.Collected:
    """Sample the groups of a step with the weights that the sampler has."""
    start = time.perf_counter()
    collected = rollout.collect(
        state.sampler, run.grader, run.problems, state.order, state.buffer, run.config, step
    )
    state.buffer, collected.seconds = collected.unfinished, time.perf_counter() - start
    return collected


@contextmanager
def sampling_ahead(run: Run, state: State, clock: run_metrics.Clock) -> Iterator[None]:
    """--async-steps 1: sample the next step in a thread while the body updates the policy.

    The thread alone uses the sampler, the order and the buffer until it ends, and it ends before
    the sampler gets new weights: no response is sampled from half an update.
    """
    state.ahead = None
    if not run.config.async_steps or state.step + 1 == run.config.steps:
        yield
        return
    stream = torch.cuda.Stream() if run.device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # the last copy of weights must be done

    def work() -> rollout.Collected:
        with torch.cuda.stream(stream):  # or its kernels would queue after those of the update
            return collect(run, state, state.step + 1)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        try:
            yield
            with clock("wait_rollout"):
                state.ahead = future.result()
        except BaseException:
            state.sampler.interrupted = True  # or the executor would wait for the whole rollout
            raise


# ---- rewards and advantages


def add_overlong_penalty(collected: rollout.Collected, config: Config) -> None:
    """Set the penalty of every response that ended, kept or not."""
    ended = [r for group in collected.finished for r in group]
    penalties = losses.overlong_penalty(
        torch.tensor([len(r.response_ids) for r in ended]),
        config.max_response_tokens,
        config.overlong_buffer_tokens,
        config.overlong_penalty_factor,
    )
    for r, penalty in zip(ended, penalties.tolist(), strict=True):
        r.overlong_penalty = penalty


def overlong_penalties(batch: Batch) -> Tensor:
    """(N,) float64, not positive."""
    penalties = [r.overlong_penalty for r in batch.rollouts]
    return torch.tensor(penalties, dtype=torch.float64, device=batch.rewards.device)


def mixed_rewards(batch: Batch, config: Config) -> Tensor:
    """(N,) float64: the weighted sum of --reward-mix, by default the raw reward itself."""
    weights = reward_weights(config.reward_mix)
    mixed = weights.get("correct", 0.0) * batch.rewards.double()
    if "format" in weights:
        formed = [has_format(r.text, config.think) for r in batch.rollouts]
        mixed = mixed + weights["format"] * mixed.new_tensor(formed)
    return mixed


def shape_rewards(batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """(actor, critic) rewards on the last token of each response, (N, T).

    Critic: the mixed reward. Actor: mixed + length reward + overlong penalty, unless the penalty
    is injected into the advantages later.
    """
    actor = critic = mixed_rewards(batch, config)  # float64: sums of shares stay exact
    if config.overlong_injection_alpha is None:
        actor = actor + overlong_penalties(batch)
    if config.critic_sees_penalty:
        critic = critic + overlong_penalties(batch)
    if config.length_reward_weight:
        actor = actor + algorithms.length_reward(
            batch.rewards > 0.5,
            batch.response_lengths,
            batch.group_ids,
            weight=config.length_reward_weight,
        )
    mask = batch.response_mask
    return losses.terminal_reward(actor.float(), mask), losses.terminal_reward(critic.float(), mask)


def compute_advantages(
    run: Run, batch: Batch, token_rewards: Tensor, raw_token_rewards: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Advantages (N, T), whitened over the step if asked for, and value targets (N, T) or None."""
    advantages, returns = run.row.advantages(
        run.config,
        token_rewards=token_rewards,
        raw_token_rewards=raw_token_rewards,
        values=values,
        mask=batch.response_mask,
        group_ids=batch.group_ids,
    )
    if run.config.overlong_injection_alpha is not None:
        decay = algorithms.vapo_lambda(batch.response_lengths, run.config.overlong_injection_alpha)
        advantages = losses.inject_terminal(
            advantages, overlong_penalties(batch), batch.response_mask, decay
        )
    mask = loss_mask(batch, run.config)
    if run.config.whiten_advantages and mask.any():
        advantages = losses.whiten(advantages, mask)
    return advantages, returns


def loss_mask(batch: Batch, config: Config) -> Tensor:
    """(N, T) tokens that train the policy: all of a response, none of a truncated one under
    --overlong-filter, those of the newest policy under --partial-mask-old.
    """
    mask = batch.fresh if config.partial_mask_old else batch.response_mask
    if config.overlong_filter:  # DAPO (2503.14476), section 3.4: a cut-off response may be right
        mask = mask & ~batch.truncated[:, None]
    return mask


# ---- the models before the update


@torch.no_grad()
def score_policy(policy: Transformer, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) under the weights at hand, whole on every rank."""
    logprobs, entropy = (torch.zeros_like(batch.rollout_logprobs) for _ in range(2))
    for mb in micro_batches(batch, config.max_tokens_per_micro_batch, "log-probs"):
        logp, h = policy(
            mb.input_ids, mb.cu_seqlens, mb.action_index, mb.targets, config.temperature
        )
        logprobs[mb.rows, : mb.mask.shape[1]] = mb.unpack(logp)
        entropy[mb.rows, : mb.mask.shape[1]] = mb.unpack(h)
    return distributed.sum_(logprobs), distributed.sum_(entropy)


@torch.no_grad()
def score_critic(critic: nn.Module, batch: Batch, config: Config) -> Tensor:
    """V (N, T) under the weights at hand, whole on every rank."""
    values = torch.zeros_like(batch.rollout_logprobs)
    for mb in micro_batches(batch, config.max_tokens_per_micro_batch, "values"):
        v = critic(mb.input_ids, mb.cu_seqlens, mb.action_index)
        values[mb.rows, : mb.mask.shape[1]] = mb.unpack(v)
    return distributed.sum_(values)


# ---- updates


def minibatches(batch: Batch, config: Config, step: int, epochs: int) -> Iterator[list[int]]:
    """Rows of each optimizer step: every epoch deals all rows out anew, into minibatches of
    (almost) equal size.
    """
    for epoch in range(epochs):
        # A generator of its own, from (seed, step, epoch): resume and ranks deal out the same rows.
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step * 1_009 + epoch)
        rows = torch.randperm(len(batch.rollouts), generator=generator)
        for part in rows.tensor_split(config.minibatches_per_step):
            if len(part):
                yield part.tolist()


def minibatch_weights(
    mode: str, batch: Batch, mask: Tensor, rows: Sequence[int], constant: int | None = None
) -> Tensor:
    """Coefficient (N,) of each response's token sum in the loss of the minibatch `rows`, 0 for the
    others. Over the whole minibatch, so micro-batches and ranks cannot change the loss.
    """
    counts = mask.sum(1)
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    chosen[rows] = True
    # A response without a trained token (overlong filter) leaves every count.
    kept = chosen & (counts > 0)
    return losses.aggregation_weights(
        mode, counts, group_ids=batch.group_ids, constant=constant, kept=kept
    )


class CriticInputs(NamedTuple):
    """What the value loss reads besides V; (N, T) over the whole batch."""

    old_values: Tensor
    returns: Tensor


def update_critic(
    run: Run, state: State, batch: Batch, old_values: Tensor, returns: Tensor
) -> dict[str, float]:
    """Regress V on the returns; returns the critic's metrics."""
    config, sums, head = run.config, run_metrics.Sums(), state.critic.value_head
    inputs, updates = CriticInputs(old_values, returns), state.critic_steps
    before = distributed.full(head.weight.detach()).clone()  # a head that does not move is dead
    epochs = config.epochs_per_step * config.critic_updates_per_step
    for rows in minibatches(batch, config, state.step, epochs):
        row_weights = minibatch_weights("token-mean", batch, batch.response_mask, rows)
        lr = critic_minibatch(run, state, batch, rows, row_weights, inputs, sums)
    after = distributed.full(head.weight.detach())
    metrics = sums.means() | {
        "lr": lr,
        "updates": updates,
        "head_bias": float(distributed.full(head.bias.detach())),
        "head_weight_norm": float(after.norm()),
        "head_movement": float((after - before).norm()),
    }
    return {f"critic/{name}": value for name, value in metrics.items()}


def critic_minibatch(
    run: Run,
    state: State,
    batch: Batch,
    rows: Sequence[int],
    row_weights: Tensor,
    inputs: CriticInputs,
    sums: run_metrics.Sums,
) -> float:
    """One optimizer step of the critic on the minibatch `rows`, whose sums over tokens the loss
    weighs by row_weights (N,); adds to `sums` and returns the learning rate.

    Raises FloatingPointError before the weights change if something is not finite.
    """
    config, total, nonfinite = run.config, 0.0, 0.0
    warmup = config.critic_lr_warmup_steps  # step j (from 0) takes j / warmup of the rate
    lr = config.critic_lr * (min(1.0, state.critic_steps / warmup) if warmup else 1.0)
    with postmortem.saves_minibatch(run, state, "critic", batch, rows, row_weights, inputs):
        for mb in micro_batches(batch, config.max_tokens_per_micro_batch, "critic update", rows):
            # V(s_t) is read at the token before action t (pack has shifted), at temperature 1.
            values = state.critic(mb.input_ids, mb.cu_seqlens, mb.action_index)
            loss, parts = losses.value_loss(
                mb.unpack(values),
                old_values=mb.rows_of(inputs.old_values),
                returns=mb.rows_of(inputs.returns),
                mask=mb.mask,
                value_clip=config.value_clip,
                row_weights=row_weights[mb.rows],
            )
            distributed.backward(loss)
            total, nonfinite = total + loss.detach(), nonfinite + parts["nonfinite"][0]
            sums.add(parts | {"loss": (loss.detach(), 0.0)})
        postmortem.check_finite("critic", state.step, nonfinite, total)
        norm = optimizer_step(state.critic, state.critic_optimizers, lr, config)
    sums.add_optimizer_step(norm)
    state.critic_steps += 1
    return lr


class PolicyInputs(NamedTuple):
    """What the policy loss reads besides log-probs and entropy; (N, T) over the whole batch."""

    advantages: Tensor
    old_logprobs: Tensor
    mask: Tensor  # tokens that train
    weights: Tensor  # importance weights of trainer against sampler
    cov_mask: Tensor | None = None  # tokens of --entropy-control
    ref_logprobs: Tensor | None = None  # of the start policy, with --kl-coef


def update_policy(
    run: Run, state: State, batch: Batch, advantages: Tensor, old_logprobs: Tensor
) -> dict[str, float]:
    """Maximise the surrogate objective; returns the policy's metrics."""
    config, sums, mask = run.config, run_metrics.Sums(), loss_mask(batch, run.config)
    # w = pi_old / pi_rollout: sampler and trainer compute in different precisions and orders, and
    # partial rollouts hold tokens of older weights.
    weights, weight_parts = losses.importance_weights(
        old_logprobs, batch.rollout_logprobs, mask, config.is_mode, config.is_low, config.is_high
    )
    cov_mask = ref_logprobs = None
    if config.entropy_control != "none":
        cov_mask = algorithms.covariance_mask(old_logprobs, advantages, mask, config.cov_fraction)
    if state.reference is not None:
        ref_logprobs, _ = score_policy(state.reference, batch, config)
    inputs = PolicyInputs(advantages, old_logprobs, mask, weights, cov_mask, ref_logprobs)
    bad = int(weight_parts["is_nonfinite"][0])
    if bad:  # their tokens have weight 0, so no loss would tell
        rows = range(len(batch.rollouts))
        row_weights = minibatch_weights("token-mean", batch, mask, rows)
        with postmortem.saves_minibatch(run, state, "policy", batch, rows, row_weights, inputs):
            raise FloatingPointError(
                f"{bad} log-probs of the sampler or of the policy before its update are not finite "
                f"in step {state.step + 1}"
            )
    for rows in minibatches(batch, config, state.step, config.epochs_per_step):
        row_weights = minibatch_weights(
            config.aggregation, batch, mask, rows, config.max_response_tokens
        )
        policy_minibatch(run, state, batch, rows, row_weights, inputs, sums)
    metrics = sums.means() | {name: float(a / b) for name, (a, b) in weight_parts.items()}
    metrics["lr"] = config.lr
    return {f"policy/{name}": value for name, value in metrics.items()}


def policy_minibatch(
    run: Run,
    state: State,
    batch: Batch,
    rows: Sequence[int],
    row_weights: Tensor,
    inputs: PolicyInputs,
    sums: run_metrics.Sums,
) -> None:
    """One optimizer step of the policy on the minibatch `rows`, whose sums over tokens the loss
    weighs by row_weights (N,); adds to `sums`.

    Raises FloatingPointError before the weights change if something is not finite.
    """
    config, total, nonfinite = run.config, 0.0, 0.0
    with postmortem.saves_minibatch(run, state, "policy", batch, rows, row_weights, inputs):
        for mb in micro_batches(batch, config.max_tokens_per_micro_batch, "policy update", rows):
            # At the sampling temperature: log-probs of another one are not those of what was drawn.
            logprobs, entropy = state.policy(
                mb.input_ids, mb.cu_seqlens, mb.action_index, mb.targets, config.temperature
            )
            loss, parts = losses.policy_loss(
                mb.unpack(logprobs),
                old_logprobs=mb.rows_of(inputs.old_logprobs),
                advantages=mb.rows_of(inputs.advantages),
                mask=mb.rows_of(inputs.mask),
                weights=mb.rows_of(inputs.weights),
                row_weights=row_weights[mb.rows],
                objective=run.row.objective,
                ratio_level=config.ratio_level,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
                sapo_tau_pos=config.sapo_tau_pos,
                sapo_tau_neg=config.sapo_tau_neg,
                opsm_delta=config.opsm_delta,
                entropy_control=config.entropy_control,
                cov_mask=mb.rows_of(inputs.cov_mask),
                ref_logprobs=mb.rows_of(inputs.ref_logprobs),
                kl_coef=config.kl_coef,
                kl_estimator=config.kl_estimator,
                # Without a bonus no gradient has to flow through it.
                entropy=mb.unpack(entropy) if config.entropy_coef else None,
                entropy_coef=config.entropy_coef,
            )
            distributed.backward(loss)
            total, nonfinite = total + loss.detach(), nonfinite + parts["nonfinite"][0]
            sums.add(parts | {"loss": (loss.detach(), 0.0)})
        postmortem.check_finite("policy", state.step, nonfinite, total)
        norm = optimizer_step(state.policy, state.optimizers, config.lr, config)
    sums.add_optimizer_step(norm)


# ---- the loop


def train(config: Config, device: torch.device) -> Path:
    """Run to `steps` (or to Ctrl-C) and return the run directory."""
    run, state = set_up(config, device)
    first = run.problems[0]
    print0(
        f"{config.algorithm}: {run.row.about}\n"
        f"{len(run.problems)} problems, run directory {run.folder}\n"
        f"the first prompt ends {first.prompt[-PROMPT_END:]!r}, its label is {first.label[:80]!r}"
    )
    metrics_file = run.folder / "metrics.jsonl"
    for name in ("metrics.jsonl", "rollouts.jsonl", "audit.jsonl"):
        run_metrics.forget_after(run.folder / name, state.step)
    undecided = run_metrics.history(metrics_file, "rollout/undecided_share")
    with run.grader, handle_signals(state, config):
        evaluate_if_missing(run, state)
        if state.step >= config.steps:
            print0(
                f"nothing to do: the run has {state.step} steps, --steps asks for {config.steps}."
            )
        progress = distributed.progress_bar(
            what=config.algorithm, total=config.steps, initial=state.step
        )
        while state.step < config.steps and not distributed.any_rank(state.stop):
            metrics = train_step(run, state)
            if metrics is None:
                break
            if evaluation_is_due(run, state):
                metrics |= evaluate(run, state)
            metrics |= alarms(state, config, metrics, undecided)
            undecided.append(metrics["rollout/undecided_share"])
            if distributed.rank() == 0:
                files.append_jsonl(metrics_file, [{"step": state.step} | metrics])
                run.report(state.step, metrics)
                progress.write(run_metrics.summary(state.step, config.steps, metrics))
            progress.update()
            last = state.step == config.steps
            if config.save_every and state.step % config.save_every == 0 and not last:
                checkpoint.save_or_warn(run, state)
            if state.empty_steps >= EMPTY_STEPS:
                print0(
                    f"stopped: {state.empty_steps} steps in a row kept no group; these problems "
                    "teach nothing.",
                    file=sys.stderr,
                )
                break
        progress.close()
        checkpoint.save(run, state)
    if distributed.rank() == 0:
        if not state.sampler.interrupted:
            run_metrics.draw_figures(run.folder)
        run_metrics.report(run.folder, state.step, config.steps)
    return run.folder


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped at once; a step in hand is lost."):
        config = parse(argv).resolved(algorithms.ALGORITHMS)
        if config.plan:
            plan.run(config)
        elif config.replay:
            device = torch.device(distributed.choose_device(config.device, config.nproc))
            steps = {
                "policy": (policy_minibatch, PolicyInputs),
                "critic": (critic_minibatch, CriticInputs),
            }
            postmortem.replay(Path(config.replay), device, config.dtype, steps)
        else:
            train(config, distributed.start(config))


if __name__ == "__main__":
    main()
