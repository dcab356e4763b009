"""Train a policy with JustRL II, GRPO, PPO or another row of `algorithms.ALGORITHMS`.

One step, in the order of the method:

    1 collect   sample groups, verify, keep those with signal          rollout.collect
    2 shape     actor: reward + overlong penalty; critic: reward       shape_rewards
    3 pack      micro-batches without padding                          forward.micro_batches
    4 value     V of every token, before the critic moves              forward.score_critic
    5 advantage by the algorithm; whitening is a step of its own       compute_advantages
    6 critic    one or more updates towards the raw reward             update_critic
    7 policy    old log-probs, then one or more updates of the         forward.score_policy,
                surrogate, once the critic is warm                     update_policy
    8 books     metrics, samples, checkpoint, evaluation               train

The scalars of a step are held whole on every rank, so statistics and denominators are global
without a collective; only model forwards and backwards are shared out.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import algorithms
import distributed
import files
import losses
import rollout
from config import Config, parse, reward_weights
from data import Batch, to_batch
from distributed import print0
from forward import (
    LOSSES,
    micro_batches,
    minibatches,
    row_weights,
    score_critic,
    score_policy,
)
from rewards import has_format
from run import checkpoint, plan
from run import metrics as run_metrics
from run.checkpoint import State
from run.optimizer import at_work, optimizer_step
from run.postmortem import replay, save_replay
from run.setup import Run, set_up
from sampler.sampling import Truncation

# A run that kept no group for so many steps in a row learns nothing and stops.
EMPTY_STEPS = 3
PROMPT_END = 120  # characters shown at the start: does the prompt ask for a box?
SIGNAL_NOTE = {
    signal.SIGINT: b"\nstopping after this step (Ctrl-C again to stop at once, losing it)\n",
    signal.SIGTERM: b"\nSIGTERM: saving, then leaving\n",
}


# ---- one step


def train_step(run: Run, state: State) -> dict[str, float] | None:
    """Steps 1 to 7 of the method; returns the metrics of the step, or None if SIGTERM cut its
    rollout short and nothing has changed.
    """
    clock = run_metrics.Clock()
    before = checkpoint.position(state)
    collected = state.ahead or collect(run, state, state.step)
    if distributed.any_rank(state.sampler.interrupted):
        checkpoint.set_position(state, before, run.problems)
        return None
    with sampling_ahead(run, state, clock):
        metrics = learn(run, state, collected, clock)
    if "policy/loss" in metrics:
        with clock("refresh_sampler"), at_work(*state.part("policy"), run.device, run.config):
            distributed.copy_weights(state.policy, state.sampler.model)
            state.sampler.weight_version += 1
    state.step += 1
    state.empty_steps = 0 if collected.groups else state.empty_steps + 1
    if state.start_entropy is None:
        state.start_entropy = metrics.get("policy/entropy")
    return metrics | clock.metrics(collected)


def collect(run: Run, state: State, step: int) -> rollout.Collected:
    """Step 1, with the weights the sampler has."""
    start = time.perf_counter()
    collected = rollout.collect(
        state.sampler, run.grader, run.problems, state.order, state.buffer, run.config, step
    )
    state.buffer, collected.seconds = collected.unfinished, time.perf_counter() - start
    return collected


@contextmanager
def sampling_ahead(run: Run, state: State, clock: run_metrics.Clock) -> Iterator[None]:
    """--async-steps 1: sample the next step in a thread while the body updates the policy.

    The thread has the sampler, the order and the buffer for itself until it ends, and it ends
    before the sampler gets new weights: a rollout never sees half an update.
    """
    state.ahead = None
    if not run.config.async_steps or state.step + 1 == run.config.steps:
        yield
        return
    stream = torch.cuda.Stream() if run.device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # behind the last copy of weights

    def work() -> rollout.Collected:
        with torch.cuda.stream(stream):  # of its own, or its kernels queue behind the update
            return collect(run, state, state.step + 1)

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        try:
            yield
            with clock("wait_rollout"):
                state.ahead = future.result()
        except BaseException:
            state.sampler.interrupted = True  # nobody wants the rest
            raise


def learn(
    run: Run, state: State, collected: rollout.Collected, clock: run_metrics.Clock
) -> dict[str, float]:
    """Steps 2 to 7 on the groups of a step, and its samples; returns the metrics."""
    config = run.config
    add_overlong_penalty(collected, config)
    metrics = run_metrics.rollout_metrics(collected, config, state.sampler.weight_version)
    kept = [r for group in collected.groups for r in group]
    values = advantages = None
    on_device = lambda part: at_work(*state.part(part), run.device, config)
    if kept:
        batch = to_batch(kept, run.device, state.sampler.weight_version)
        mask = loss_mask(batch, config)
        token_rewards, raw_token_rewards = shape_rewards(batch, config)
        if state.critic is not None:
            with clock("score_critic"), on_device("critic"):
                values = score_critic(state.critic, batch, config)
        advantages, returns = compute_advantages(
            run, batch, token_rewards, raw_token_rewards, values
        )
        if state.critic is not None:
            with clock("update_critic"), on_device("critic"):
                metrics |= update_critic(run, state, batch, values, returns)
        # Behind that update, which stops the run if one of these values is not finite.
        metrics |= run_metrics.write_audit(
            run.folder, state.step + 1, batch, mask, values, advantages
        )
        warm = state.critic is None or state.step >= config.num_critic_only_steps
        if warm and mask.any():
            with clock("score_policy"), on_device("policy"):
                old_logprobs, entropy = score_policy(state.policy, batch, config)
            with clock("update_policy"), on_device("policy"):
                metrics |= update_policy(run, state, batch, advantages, old_logprobs)
            metrics |= run_metrics.score_metrics(batch, mask, old_logprobs, entropy, advantages)
    tokens = {"values": values, "advantages": advantages}
    run_metrics.write_rollouts(run.folder, config.log_samples, state.step + 1, collected, tokens)
    return metrics


def add_overlong_penalty(collected: rollout.Collected, config: Config) -> None:
    """Note the penalty of every response that ended, kept or not."""
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
    noted = [r.overlong_penalty for r in batch.rollouts]
    return torch.tensor(noted, dtype=torch.float64, device=batch.rewards.device)


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
    actor = critic = mixed_rewards(batch, config)
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
    on_last = lambda reward: losses.terminal_reward(reward.float(), batch.response_mask)
    return on_last(actor), on_last(critic)


def compute_advantages(
    run: Run, batch: Batch, token_rewards: Tensor, raw_token_rewards: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Advantages (N, T), whitened over the step if asked for, and value targets (N, T) or None."""
    advantages, returns = run.row.advantage(
        token_rewards=token_rewards,
        raw_token_rewards=raw_token_rewards,
        values=values,
        mask=batch.response_mask,
        group_ids=batch.group_ids,
        **asdict(run.config),
    )
    if run.config.overlong_injection_alpha is not None:
        decay = losses.vapo_lambda(batch.response_lengths, run.config.overlong_injection_alpha)
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
    return mask & ~batch.truncated[:, None] if config.overlong_filter else mask


def update_critic(
    run: Run, state: State, batch: Batch, old_values: Tensor, returns: Tensor
) -> dict[str, float]:
    """Regress V on the returns; token mean over the whole minibatch, whatever the micro-batches."""
    config, sums = run.config, run_metrics.Sums()
    mask, head, updates = batch.response_mask, state.critic.value_head, state.critic_steps
    before = distributed.full(head.weight.detach()).clone()
    given = {"old_values": old_values, "returns": returns}
    warmup = config.critic_lr_warmup_steps
    epochs = config.epochs_per_step * config.critic_updates_per_step
    for rows in minibatches(batch, config, state.step, epochs):
        lr = config.critic_lr * (min(1.0, state.critic_steps / warmup) if warmup else 1.0)
        given["row_weights"] = row_weights("token-mean", batch, mask, rows)
        update(run, state, "critic", batch, rows, given, lr, sums)
        state.critic_steps += 1
    after = distributed.full(head.weight.detach())
    metrics = sums.means() | {
        "lr": lr,
        "updates": updates,
        "head_bias": float(distributed.full(head.bias.detach())),
        "head_weight_norm": float(after.norm()),
        "head_movement": float((after - before).norm()),
    }
    return {f"critic/{name}": value for name, value in metrics.items()}


def update_policy(
    run: Run, state: State, batch: Batch, advantages: Tensor, old_logprobs: Tensor
) -> dict[str, float]:
    """The surrogate objective, weighted for the distance between sampler and trainer."""
    config, sums = run.config, run_metrics.Sums()
    mask = loss_mask(batch, config)
    weights, weight_parts = losses.importance_weights(
        old_logprobs, batch.rollout_logprobs, mask, config.is_mode, config.is_low, config.is_high
    )
    given = {"old_logprobs": old_logprobs, "advantages": advantages, "mask": mask}
    given["weights"] = weights
    if config.entropy_control != "none":
        given["cov_mask"] = algorithms.covariance_mask(
            old_logprobs, advantages, mask, config.cov_fraction
        )
    if state.reference is not None:
        given["ref_logprobs"], _ = score_policy(state.reference, batch, config)
    if bad := int(weight_parts["is_nonfinite"][0]):
        rows = range(len(batch.rollouts))
        given["row_weights"] = row_weights("token-mean", batch, mask, rows)
        reason = (
            f"{bad} log-probs of the sampler or of the policy before its update are not finite in "
            f"step {state.step + 1}"
        )
        raise nonfinite_error(run, state, "policy", reason, batch, rows, given)
    for rows in minibatches(batch, config, state.step, config.epochs_per_step):
        given["row_weights"] = row_weights(
            config.aggregation, batch, mask, rows, config.max_response_tokens
        )
        update(run, state, "policy", batch, rows, given, config.lr, sums)
    metrics = (
        sums.means()
        | {name: float(a / b) for name, (a, b) in weight_parts.items()}
        | {"lr": config.lr}
    )
    return {f"policy/{name}": value for name, value in metrics.items()}


def update(
    run: Run,
    state: State,
    part: str,
    batch: Batch,
    rows: Sequence[int],
    given: dict[str, Tensor],
    lr: float,
    sums: run_metrics.Sums,
) -> None:
    """One optimizer step of the policy or the critic on a minibatch.

    Raises FloatingPointError on a loss, model output or gradient that is not finite, before this
    step changes the weights; weights and minibatch are saved for --replay.
    """
    model, optimizers = state.part(part)
    try:
        for mb in micro_batches(batch, run.config, f"{part} update", rows):
            loss, parts = LOSSES[part](model, mb, given, run.config)
            bad = [float(parts["nonfinite"][0]), float(not math.isfinite(loss.item()))]
            tokens, bad_losses = distributed.sum_on_device(bad)  # on all ranks, or they part ways
            if tokens or bad_losses:
                raise FloatingPointError(
                    f"the {part} is not finite in step {state.step + 1}: {tokens:.0f} tokens of a "
                    f"micro-batch, loss {loss.item()}"
                )
            distributed.backward(loss)
            sums.add(parts | {"loss": (loss.detach(), 0.0)})
        sums.add_optimizer_step(optimizer_step(model, optimizers, lr, run.config))
    except FloatingPointError as error:
        raise nonfinite_error(run, state, part, str(error), batch, rows, given) from None


def nonfinite_error(
    run: Run,
    state: State,
    part: str,
    reason: str,
    batch: Batch,
    rows: Sequence[int],
    given: dict[str, Tensor],
) -> FloatingPointError:
    """Save what --replay needs; the error to raise, which says where the run stands."""
    file = save_replay(run, state, part, reason, batch, rows, given)
    saved = checkpoint.complete(run.folder)
    newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
    return FloatingPointError(
        f"{reason}. Nothing was changed by it, and {newest}; look at the cause with --replay {file}"
    )


# ---- the loop


def evaluation_is_due(run: Run, state: State) -> bool:
    """Before the first step, every --eval-every steps, and after the last."""
    config, step = run.config, state.step
    regular = config.eval_every and step % config.eval_every == 0
    return bool(run.eval_problems and (regular or step in (0, config.steps)))


def catch_up(run: Run, state: State, metrics_file: Path) -> None:
    """The evaluation that the finished steps lack: the first, or one that SIGTERM cut short."""
    made = "eval/accuracy" in run_metrics.row_of_step(metrics_file, state.step)
    if made or not evaluation_is_due(run, state):
        return
    metrics = evaluate(run, state)
    if metrics and distributed.rank() == 0:
        when = f"step {state.step}" if state.step else "start"
        print0(f"{when}: held-out accuracy {metrics['eval/accuracy']:.3f}")
        run_metrics.amend(metrics_file, state.step, metrics)
        run.report(state.step, metrics)


def evaluate(run: Run, state: State) -> dict[str, float]:
    """Held-out accuracy at the training temperature, within --eval-top-p: the
    verifier's mean score over all samples of all problems, whatever --reward trains on. Nothing if
    SIGTERM cut it short.
    """
    config, start = run.config, time.perf_counter()
    groups = rollout.evaluate(
        state.sampler,
        run.grader,
        run.eval_problems,
        samples=config.eval_samples,
        max_new_tokens=config.max_response_tokens,
        temperature=config.temperature,
        think=config.think,
        seed=config.seed,
        truncation=Truncation(config.eval_top_p),
    )
    if distributed.any_rank(state.sampler.interrupted):
        return {}
    return run_metrics.evaluation_metrics(groups) | {"eval/seconds": time.perf_counter() - start}


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
        catch_up(run, state, metrics_file)
        if state.step >= config.steps:
            print0(
                f"nothing to do: the run has {state.step} steps, --steps asks for {config.steps}."
            )
        progress = tqdm(
            total=config.steps,
            initial=state.step,
            desc=config.algorithm,
            disable=distributed.rank() > 0 or None,  # None: no bar in a log file
        )
        while state.step < config.steps and not distributed.any_rank(state.stop):
            metrics = train_step(run, state)
            if metrics is None:
                break
            if evaluation_is_due(run, state):
                metrics |= evaluate(run, state)
            metrics |= run_metrics.alarms(state, config, metrics, undecided)
            undecided.append(metrics["rollout/undecided_share"])
            if distributed.rank() == 0:
                files.append_jsonl(metrics_file, [{"step": state.step} | metrics])
                run.report(state.step, metrics)
                progress.write(run_metrics.summary(state.step, config.steps, metrics))
            progress.update()
            last = state.step == config.steps
            if config.save_every and state.step % config.save_every == 0 and not last:
                save_or_warn(run, state)
            if state.empty_steps >= EMPTY_STEPS:
                print0(
                    f"stopped: {state.empty_steps} steps in a row kept no group; these problems "
                    "teach nothing.",
                    file=sys.stderr,
                )
                break
        progress.close()
        save(run, state)
    if distributed.rank() == 0:
        if not state.sampler.interrupted:
            run_metrics.draw_figures(run.folder)
        run_metrics.report(run.folder, state.step, config.steps)
    return run.folder


def save(run: Run, state: State) -> None:
    """A checkpoint of the step at hand; gathering shards is a device's work."""
    fetch = partial(at_work, device=run.device, config=run.config, moments=True)
    checkpoint.save(run.folder, state, run.config.keep_checkpoints, fetch)


def save_or_warn(run: Run, state: State) -> None:
    """A checkpoint on the way; a full disk costs this one, not the run."""
    try:
        save(run, state)
    except OSError as error:
        run_metrics.warn(
            state.step,
            f"{error} The run goes on; until the next checkpoint a kill loses all since the last. "
            "Make room.",
        )


@contextmanager
def handle_signals(state: State, config: Config) -> Iterator[None]:
    """Ctrl-C: finish the step in hand and save; a second one ends at once. SIGTERM, from whoever
    wants the machine back: stop sampling and save the last finished step, or finish an update that
    has begun (and with --async-steps the rollout beside it, which cannot be had again).
    """

    def handler(number, frame):
        if state.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        state.stop = True
        if number == signal.SIGTERM and not config.async_steps:
            state.sampler.interrupted = True
        if distributed.rank() == 0:
            with suppress(OSError):  # a terminal that is gone
                os.write(2, SIGNAL_NOTE[number])  # print, interrupted by itself, would raise

    previous = {s: signal.signal(s, handler) for s in SIGNAL_NOTE}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped at once; a step in hand is lost."):
        config = parse(argv).resolved(algorithms.ALGORITHMS)
        if config.plan:
            plan.run(config)
        elif config.replay:
            device = torch.device(distributed.choose_device(config.device, config.nproc))
            replay(Path(config.replay), device, config.dtype)
        else:
            train(config, distributed.start(config))


if __name__ == "__main__":
    main()
