"""Train a policy with JustRL II, GRPO, PPO or another row of `losses.ALGORITHMS`.

One step, in the order of the method:

    1 collect   sample groups, verify, keep those with signal          rollout.collect
    2 shape     actor reward = mix + overlong penalty; critic: mix     shape_rewards
    3 pack      micro-batches without padding                          data.partition, data.pack
    4 value     V of every token, before the critic moves              score_critic
    5 advantage by the algorithm; whitening is a step of its own       compute_advantages
    6 critic    one or more updates towards the raw reward             update_critic
    7 policy    old log-probs, then one or more updates of the         score_policy, update_policy
                surrogate, once the critic is warm
    8 books     metrics, samples, checkpoint, evaluation               books, save_checkpoint

The scalars of a step are held whole on every rank, so statistics and denominators are global
without a collective; only model forwards and backwards are shared out.
"""

import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import books
import distributed
import losses
import rollout
from config import ROOT, Config, ConfigError, parse, reward_weights
from data import (
    Batch,
    DataOrder,
    MicroBatch,
    Problem,
    Rollout,
    load_problems,
    load_tokenizer,
    pack,
    partition,
    stop_ids,
    think_mode,
    to_batch,
)
from distributed import print0
from model import Transformer, limit_threads, local_folder
from rewards import Verifier, has_format
from scores import pass_at_k

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OBJECTIVE_OPTIONS = (
    "ratio_level clip_low clip_high dual_clip sapo_tau_pos sapo_tau_neg opsm_delta "
    "entropy_control cov_kl_coef kl_coef kl_estimator entropy_coef"
).split()


@dataclass
class State:
    """Everything a run carries from one step to the next. Models are float32 masters, sharded when
    ranks are many.
    """

    policy: Transformer
    optimizer: torch.optim.Optimizer
    sampler: rollout.Sampler  # owns a whole copy of the policy in the compute dtype
    order: DataOrder
    critic: torch.nn.Module | None = None
    critic_optimizer: torch.optim.Optimizer | None = None
    reference: Transformer | None = None  # frozen start policy, for the KL term
    buffer: list[list[Rollout]] = field(default_factory=list)
    step: int = 0  # finished steps
    critic_steps: int = 0
    stop: bool = False  # set by Ctrl-C: finish the step in hand, save, leave


@dataclass
class Run:
    """What stays the same during a run."""

    config: Config
    row: losses.Algorithm
    device: torch.device
    folder: Path
    problems: list[Problem]
    eval_problems: list[Problem]
    grader: Verifier
    report: Callable[[int, dict[str, float]], None]  # step and metrics, to --report-to


# ---- set-up


def set_up(config: Config, device: torch.device) -> tuple[Run, State]:
    """Check everything that can be wrong before anything is sampled, then build or resume models
    and optimizers.
    """
    row = losses.ALGORITHMS[config.algorithm]
    start = local_folder(config.model)
    tokenizer = load_tokenizer(start)
    read = lambda path: load_problems(
        path,
        tokenizer,
        config.max_prompt_tokens,
        config.prompt_key,
        config.label_key,
        config.prompt_suffix,
    )
    problems, dropped = read(config.data)
    eval_problems, eval_dropped = read(config.eval_data) if config.eval_data else ([], 0)
    if dropped + eval_dropped:
        print0(
            f"dropped {dropped} training and {eval_dropped} held-out prompts above "
            f"{config.max_prompt_tokens} tokens"
        )
    config.think = think_mode(config.think, problems)
    if config.reward == "majority" and {p.verifier for p in problems} - {"math", "choice"}:
        raise ConfigError("--reward majority compares answers: math and choice problems have one.")
    folder = open_run_directory(config)
    checkpoint = newest_checkpoint(folder) if config.resume else None

    compute_dtype = DTYPES[config.dtype]
    policy = Transformer.from_pretrained(
        checkpoint / "policy" if checkpoint else start, torch.float32, compute_dtype
    )
    limit_threads(policy, device)
    policy = prepare(policy, device, config, DTYPES[config.head_dtype])
    whole = Transformer.from_pretrained(start, compute_dtype).to(device).requires_grad_(False)
    for model in (policy, whole):
        model.set_head_dtype(DTYPES[config.head_dtype])
    sampler = rollout.Sampler(whole, stop_ids(start, tokenizer), config.slots, tokenizer)
    state = State(
        policy,
        adamw(policy, config.lr, config),
        sampler,
        DataOrder(len(problems), config.seed, config.max_pass_rate, config.failure_weighted),
    )
    if row.critic:
        from critic import Critic

        if checkpoint:
            critic = Critic.from_pretrained(checkpoint / "critic", compute_dtype)
        else:
            critic = Critic.from_policy(start, config.critic_value_bias_init, compute_dtype)
        # Its root is float32 always: in bfloat16 the bias of the head moves in steps of 0.004.
        state.critic = prepare(critic, device, config, torch.float32)
        state.critic_optimizer = adamw(state.critic, config.critic_lr, config)
    if config.kl_coef:
        state.reference = (
            Transformer.from_pretrained(start, compute_dtype).to(device).requires_grad_(False)
        )
    if checkpoint:
        load_state(state, checkpoint / "trainer_state", problems)
    distributed.copy_weights(state.policy, whole)
    grader = Verifier(num_workers=config.verifier_workers, timeout_s=config.verifier_timeout_s)
    report = books.open_reporter(folder, config, state.step)
    write_config(folder, config)
    return Run(config, row, device, folder, problems, eval_problems, grader, report), state


def prepare(
    model: torch.nn.Module, device: torch.device, config: Config, head_dtype: torch.dtype
) -> torch.nn.Module:
    """Move to the device, shard over ranks, switch on recomputation."""
    model.to(device)
    model.model.gradient_checkpointing = config.activation_checkpointing
    distributed.shard(model, model.model.layers, DTYPES[config.dtype], head_dtype)
    return model


def adamw(model: torch.nn.Module, lr: float, config: Config) -> torch.optim.AdamW:
    """AdamW with float32 state; norms, biases and the value head keep away from weight decay."""
    decayed = lambda name, p: p.ndim > 1 and "value_head" not in name
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if decayed(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named if not decayed(n, p)], "weight_decay": 0.0},
    ]
    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=config.adam_eps)


def open_run_directory(config: Config) -> Path:
    """Create the run directory, or find it again with --resume; never write into another run."""
    name = config.output_dir or str(
        ROOT / "runs" / f"{config.algorithm}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    (folder,) = set(distributed.gather([name] if distributed.rank() == 0 else []))
    folder = Path(folder)
    if (folder / "config.json").exists() and not config.resume:
        raise ConfigError(
            f"--output-dir {folder} already holds a run; add --resume or choose another directory."
        )
    distributed.barrier()  # every rank has looked before one writes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable{distributed.rank()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be written: {error}") from error
    return folder


def write_config(folder: Path, config: Config) -> None:
    """Make the directory a run: the last act of the set-up, so that a failed start leaves none
    behind.
    """
    if distributed.rank() == 0:
        (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")


# ---- checkpoints


def newest_checkpoint(folder: Path) -> Path | None:
    """Highest complete checkpoint of a run directory."""
    return max((folder / "checkpoints").glob("step_??????"), default=None)


def save_checkpoint(run: Run, state: State) -> None:
    """Write checkpoints/step_N/{policy,critic,trainer_state} under a temporary name, then rename;
    drop old ones.
    """
    final = run.folder / "checkpoints" / f"step_{state.step:06d}"
    if final.exists():
        return
    scratch = final.with_name("tmp_" + final.name)
    weights = distributed.full_state(state.policy)
    if distributed.rank() == 0:
        state.policy.save_pretrained(scratch / "policy", state_dict=weights)
        state.sampler.tokenizer.save_pretrained(scratch / "policy")
    books = {
        "step": state.step,
        "critic_steps": state.critic_steps,
        "weight_version": state.sampler.weight_version,
        "order": state.order.state_dict(),
        "optimizer": distributed.optimizer_state(state.policy, state.optimizer),
        "buffer": [
            [asdict(r) | {"problem": r.problem.index} for r in group] for group in state.buffer
        ],
    }
    if state.critic is not None:
        weights = distributed.full_state(state.critic)
        if distributed.rank() == 0:
            state.critic.save_pretrained(scratch / "critic", state_dict=weights)
        books["critic_optimizer"] = distributed.optimizer_state(
            state.critic, state.critic_optimizer
        )
    if distributed.rank() == 0:
        torch.save(books, scratch / "trainer_state")
        scratch.rename(final)
        for old in sorted(final.parent.glob("step_??????"))[: -run.config.keep_checkpoints or None]:
            if run.config.keep_checkpoints:
                remove_tree(old)
    distributed.barrier()


def remove_tree(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill in between leaves no half checkpoint of a
    good name.
    """
    shutil.rmtree(folder.rename(folder.with_name("tmp_" + folder.name)))


def load_state(state: State, file: Path, problems: Sequence[Problem]) -> None:
    """Counters, data position, optimizers and unfinished rollouts of a checkpoint."""
    books = torch.load(file, map_location="cpu", weights_only=True)
    state.step, state.critic_steps = books["step"], books["critic_steps"]
    state.sampler.weight_version = books["weight_version"]
    state.order.load_state_dict(books["order"])
    distributed.load_optimizer_state(state.policy, state.optimizer, books["optimizer"])
    if state.critic is not None:
        distributed.load_optimizer_state(
            state.critic, state.critic_optimizer, books["critic_optimizer"]
        )
    state.buffer = [
        [Rollout(**r | {"problem": problems[r["problem"]]}) for r in group]
        for group in books["buffer"]
    ]


# ---- one step


def train_step(run: Run, state: State) -> dict[str, float]:
    """Steps 1 to 7 of the method; returns the metrics of the step."""
    config, clock = run.config, books.Clock()
    with clock("rollout"):
        collected = rollout.collect(
            state.sampler, run.grader, run.problems, state.order, state.buffer, config, state.step
        )
        state.buffer = collected.unfinished
    add_overlong_penalty(collected, config)
    metrics = books.rollout_metrics(collected, config)
    kept = [r for group in collected.groups for r in group]
    values = advantages = None
    if kept:
        batch = to_batch(kept, run.device)
        token_rewards, raw_token_rewards = shape_rewards(batch, config)
        if state.critic is not None:
            with clock("score_critic"):
                values = score_critic(state.critic, batch, config)
        advantages, returns = compute_advantages(
            run, batch, token_rewards, raw_token_rewards, values
        )
        metrics |= books.write_audit(
            run.folder, state.step + 1, batch, loss_mask(batch, config), values, advantages
        )
        if state.critic is not None:
            with clock("update_critic"):
                metrics |= update_critic(run, state, batch, values, returns)
        warm = state.critic is None or state.step >= config.num_critic_only_steps
        if warm and loss_mask(batch, config).any():
            with clock("score_policy"):
                old_logprobs, entropy = score_policy(state.policy, batch, config)
            with clock("update_policy"):
                metrics |= update_policy(run, state, batch, advantages, old_logprobs)
            metrics |= books.score_metrics(batch, old_logprobs, entropy, advantages)
    tokens = {"values": values, "advantages": advantages}
    books.write_rollouts(run.folder, config.log_samples, state.step + 1, collected, tokens)
    state.step += 1
    return metrics | clock.metrics(collected)


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
    mixed = mixed_rewards(batch, config)
    actor = mixed
    if config.overlong_injection_alpha is None:
        actor = actor + overlong_penalties(batch)
    if config.length_reward_weight:
        actor = actor + losses.length_reward(
            batch.rewards > 0.5,
            batch.response_lengths,
            batch.group_ids,
            weight=config.length_reward_weight,
            min_spread=config.length_reward_min_spread,
            min_longest=config.length_reward_min_longest,
        )
    on_last = lambda reward: losses.terminal_reward(reward.float(), batch.response_mask)
    return on_last(actor), on_last(mixed)


def micro_batches(
    batch: Batch, config: Config, what: str, rows: Sequence[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of the given rows of the batch (default: all), packed; a bar named `what`
    when they take long.
    """
    rows = range(len(batch.rollouts)) if rows is None else rows
    costs = [
        len(batch.rollouts[i].problem.prompt_ids) + len(batch.rollouts[i].response_ids)
        for i in rows
    ]
    shares = partition(costs, config.max_tokens_per_micro_batch, distributed.world_size())
    mine, quiet = shares[distributed.rank()], distributed.rank() > 0
    for share in tqdm(mine, what, unit="micro-batch", leave=False, delay=2, disable=quiet):
        yield pack(batch.rollouts, [rows[i] for i in share], batch.rewards.device)


def minibatches(batch: Batch, config: Config, step: int, epochs: int) -> Iterator[list[int]]:
    """Rows of each optimizer step: every epoch deals all rows out anew, into minibatches of
    (almost) equal size.
    """
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step * 1_009 + epoch)
        rows = torch.randperm(len(batch.rollouts), generator=generator)
        yield from (
            part.tolist() for part in rows.tensor_split(config.minibatches_per_step) if len(part)
        )


def forward_policy(
    policy: Transformer, mb: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (R, T) of a micro-batch, zero outside its mask."""
    logprobs, entropy = policy(
        mb.input_ids, mb.cu_seqlens, mb.action_index, mb.targets, temperature
    )
    return mb.unpack(logprobs), mb.unpack(entropy)


@torch.no_grad()
def score_policy(policy: Transformer, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) under the weights at hand, whole on every rank."""
    logprobs, entropy = (torch.zeros_like(batch.rollout_logprobs) for _ in range(2))
    for mb in micro_batches(batch, config, "log-probs"):
        cells = mb.rows, slice(mb.mask.shape[1])
        logprobs[cells], entropy[cells] = forward_policy(policy, mb, config.temperature)
    return distributed.sum_(logprobs), distributed.sum_(entropy)


@torch.no_grad()
def score_critic(critic: torch.nn.Module, batch: Batch, config: Config) -> Tensor:
    """V (N, T) under the weights at hand, whole on every rank."""
    from critic import values as critic_values

    values = torch.zeros_like(batch.rollout_logprobs)
    for mb in micro_batches(batch, config, "values"):
        values[mb.rows, : mb.mask.shape[1]] = critic_values(critic, mb)
    return distributed.sum_(values)


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
    --overlong-filter.
    """
    if config.overlong_filter:
        return batch.response_mask & ~batch.truncated[:, None]
    return batch.response_mask


def update_critic(
    run: Run, state: State, batch: Batch, old_values: Tensor, returns: Tensor
) -> dict[str, float]:
    """Regress V on the returns; token mean over the whole minibatch, whatever the micro-batches."""
    from critic import values as critic_values

    config, sums = run.config, books.Sums()
    mask, head = batch.response_mask, state.critic.value_head
    before = distributed.full(head.weight.detach()).clone()
    for rows in minibatches(
        batch, config, state.step, config.epochs_per_step * config.critic_updates_per_step
    ):
        warm = state.critic_steps < config.critic_lr_warmup_steps
        lr = config.critic_lr * (
            state.critic_steps / config.critic_lr_warmup_steps if warm else 1.0
        )
        weights = row_weights("token-mean", batch, mask, rows)
        for mb in micro_batches(batch, config, "critic update", rows):
            width = mb.mask.shape[1]
            loss, parts = losses.value_loss(
                critic_values(state.critic, mb),
                old_values[mb.rows, :width],
                returns[mb.rows, :width],
                mb.mask,
                value_clip=config.value_clip,
                row_weights=weights[mb.rows],
            )
            check_finite("critic", loss, parts, run, state, [batch.rollouts[i] for i in mb.rows])
            distributed.backward(loss)
            sums.add(parts | {"loss": (loss.detach(), 0.0)})
        sums.add_optimizer_step(optimizer_step(state.critic, state.critic_optimizer, lr, config))
        state.critic_steps += 1
    after = distributed.full(head.weight.detach())
    metrics = sums.means() | {
        "lr": lr,
        "head_bias": float(distributed.full(head.bias.detach())),
        "head_weight_norm": float(after.norm()),
        "head_movement": float((after - before).norm()),
    }
    return {f"critic/{name}": value for name, value in metrics.items()}


def update_policy(
    run: Run, state: State, batch: Batch, advantages: Tensor, old_logprobs: Tensor
) -> dict[str, float]:
    """The surrogate objective; then the sampler gets the new weights."""
    config, sums = run.config, books.Sums()
    mask = loss_mask(batch, config)
    weights, weight_parts = losses.importance_weights(
        old_logprobs, batch.rollout_logprobs, mask, config.is_mode, config.is_low, config.is_high
    )
    cov_mask = ref_logprobs = None
    if config.entropy_control != "none":
        cov_mask = losses.covariance_mask(old_logprobs, advantages, mask, config.cov_fraction)
    if state.reference is not None:
        ref_logprobs, _ = score_policy(state.reference, batch, config)
    for rows in minibatches(batch, config, state.step, config.epochs_per_step):
        coefficients = row_weights(
            config.aggregation, batch, mask, rows, config.max_response_tokens
        )
        for mb in micro_batches(batch, config, "policy update", rows):
            cells = mb.rows, slice(mb.mask.shape[1])
            logprobs, entropy = forward_policy(state.policy, mb, config.temperature)
            loss, parts = losses.policy_loss(
                logprobs,
                old_logprobs[cells],
                advantages[cells],
                mask[cells],
                objective=run.row.objective,
                row_weights=coefficients[mb.rows],
                weights=weights[cells],
                cov_mask=None if cov_mask is None else cov_mask[cells],
                ref_logprobs=None if ref_logprobs is None else ref_logprobs[cells],
                entropy=entropy if config.entropy_coef else None,
                **{name: getattr(config, name) for name in OBJECTIVE_OPTIONS},
            )
            check_finite("policy", loss, parts, run, state, [batch.rollouts[i] for i in mb.rows])
            distributed.backward(loss)
            sums.add(parts | {"loss": (loss.detach(), 0.0)})
        sums.add_optimizer_step(optimizer_step(state.policy, state.optimizer, config.lr, config))
    distributed.copy_weights(state.policy, state.sampler.model)
    state.sampler.weight_version += 1
    metrics = (
        sums.means()
        | {name: float(a / b) for name, (a, b) in weight_parts.items()}
        | {"lr": config.lr}
    )
    return {f"policy/{name}": value for name, value in metrics.items()}


def row_weights(
    mode: str, batch: Batch, mask: Tensor, rows: Sequence[int], constant: int | None = None
) -> Tensor:
    """Coefficient (N,) of each response's token sum in the loss of the minibatch `rows`, 0 for the
    others.
    """
    counts = mask.sum(1)
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    chosen[rows] = True
    # A response without a trained token (overlong filter) leaves every count.
    kept = chosen & (counts > 0)
    return losses.aggregation_weights(
        mode, counts, group_ids=batch.group_ids, constant=constant, kept=kept
    )


def optimizer_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float, config: Config
) -> float:
    """Clip, step, clear; returns the gradient norm before clipping."""
    norm = distributed.grad_norm(model, config.max_grad_norm)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"a gradient norm of the {type(model).__name__} is {norm}; its weights were left as "
            "they were, the newest checkpoint is good."
        )
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def check_finite(
    name: str, loss: Tensor, parts: dict, run: Run, state: State, rollouts: list[Rollout]
) -> None:
    """Stop the run on a NaN or infinite loss or model output, and leave the rollouts behind it in a
    file.
    """
    if math.isfinite(loss.item()) and not parts["nonfinite"][0]:
        return
    file = run.folder / f"nonfinite_step_{state.step + 1:06d}_rank{distributed.rank()}.jsonl"
    file.write_text(
        "".join(json.dumps(books.sample_row(state.step + 1, r, True)) + "\n" for r in rollouts)
    )
    raise FloatingPointError(
        f"the {name} is not finite in step {state.step + 1} (loss {loss.item()}); "
        f"its rollouts are in {file}."
    )


# ---- the loop


def evaluate(run: Run, state: State) -> dict[str, float]:
    """Held-out accuracy at the training temperature: the verifier's mean score over all samples of
    all problems, whatever --reward trains on.
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
    )
    ended = [r for group in groups for r in group]
    sizes = [2**i for i in range(config.eval_samples.bit_length()) if 2**i <= config.eval_samples]
    right = [sum(r.correct == 1 for r in group) for group in groups]
    chance = lambda k: sum(pass_at_k(config.eval_samples, c, k) for c in right) / len(right)
    return {
        "eval/accuracy": sum(r.correct for r in ended) / len(ended),
        **{f"eval/pass_at_{k}": chance(k) for k in sizes},
        "eval/response_length_mean": sum(len(r.response_ids) for r in ended) / len(ended),
        "eval/truncated_share": sum(r.finish_reason == "length" for r in ended) / len(ended),
        "eval/seconds": time.perf_counter() - start,
    }


def train(config: Config, device: torch.device) -> Path:
    """Run to `steps` (or to Ctrl-C) and return the run directory."""
    run, state = set_up(config, device)
    print0(
        f"{config.algorithm}: {run.row.about}\n"
        f"{len(run.problems)} problems, run directory {run.folder}"
    )
    metrics_file = run.folder / "metrics.jsonl"
    for name in ("metrics.jsonl", "rollouts.jsonl", "audit.jsonl"):
        books.forget_after(run.folder / name, state.step)
    undecided = books.history(metrics_file, "rollout/undecided_share")
    with run.grader, stop_after_step(state):
        if state.step >= config.steps:
            print0(
                f"nothing to do: the run has {state.step} steps, --steps asks for {config.steps}."
            )
        if state.step == 0 and run.eval_problems and not metrics_file.exists():
            start = evaluate(run, state)
            print0(f"start: held-out accuracy {start['eval/accuracy']:.3f}")
            if distributed.rank() == 0:
                books.append(metrics_file, [{"step": 0} | start])
                run.report(0, start)
        empty_steps = 0
        progress = tqdm(
            total=config.steps,
            initial=state.step,
            desc=config.algorithm,
            disable=distributed.rank() > 0,
        )
        while state.step < config.steps and not distributed.any_rank(state.stop):
            metrics = train_step(run, state)
            last = state.step == config.steps
            if run.eval_problems and (
                last or (config.eval_every and state.step % config.eval_every == 0)
            ):
                metrics |= evaluate(run, state)
            if distributed.rank() == 0:
                books.append(metrics_file, [{"step": state.step} | metrics])
                run.report(state.step, metrics)
                progress.write(books.summary(state.step, config.steps, metrics))
            progress.update()
            empty_steps = 0 if metrics["rollout/groups_kept"] else empty_steps + 1
            books.alarms(state.step, state.critic_steps, config, metrics, undecided)
            if last or (config.save_every and state.step % config.save_every == 0):
                save_checkpoint(run, state)
            if empty_steps == 3:
                print0(
                    "stopped: three steps in a row kept no group; these problems teach nothing.",
                    file=sys.stderr,
                )
                break
        progress.close()
        save_checkpoint(run, state)
    if distributed.rank() == 0:
        books.report(run.folder, state.step, config.steps)
    return run.folder


@contextmanager
def stop_after_step(state: State) -> Iterator[None]:
    """Ctrl-C and SIGTERM finish the step in hand and save; a second Ctrl-C ends at once."""

    def handler(number, frame):
        if state.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        state.stop = True
        print0(
            "\nstopping after this step (Ctrl-C again to stop at once, losing it)", file=sys.stderr
        )

    previous = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    try:
        config = parse(argv).resolved(losses.ALGORITHMS)
        kind = distributed.choose_device(config.device, config.nproc)
        distributed.relaunch(config.nproc)
        device = distributed.init(kind)
        if config.dtype == "auto":
            config.dtype = "bfloat16" if device.type == "cuda" else "float32"
        if config.head_dtype == "auto":
            config.head_dtype = config.dtype
        train(config, device)
    except (ValueError, OSError, ImportError, ArithmeticError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped at once; the step in hand is lost.") from None
    finally:
        distributed.shutdown()


if __name__ == "__main__":
    main()
