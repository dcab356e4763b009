"""What a run reports: metrics, samples, the critic's audit, the line per step, the last lines.

Nothing here changes what is trained. docs/metrics.md defines every metric.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
import files
from config import ROOT, Config, reward_weights
from data import Batch, Rollout
from distributed import print0
from files import read_rows
from rewards import has_format
from rollout import Collected, has_signal
from run.audit import audit
from run.scores import is_repetitive, pass_at_k
from verify import UNDECIDED


class Sums:
    """Metrics as sums of numerators and denominators over micro-batches, minibatches and ranks;
    never a mean of means.
    """

    def __init__(self):
        self.pairs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, parts: dict[str, tuple]) -> None:
        """Add {name: (numerator, denominator)} of one micro-batch."""
        for name, (numerator, denominator) in parts.items():
            self.pairs[name][0] += float(numerator)
            self.pairs[name][1] += float(denominator)

    def add_optimizer_step(self, grad_norm: float) -> None:
        """Count one optimizer step, which all ranks take together: the divisor of the loss and of
        the norm.
        """
        # Every rank adds its share, because `means` sums over ranks and the norm is global already.
        share = 1 / distributed.world_size()
        # Loss 0: each micro-batch has added its share already, and this counts the divisor.
        self.add({"loss": (0.0, share), "grad_norm": (grad_norm * share, share)})

    def means(self) -> dict[str, float]:
        """Quotients over all ranks; NaN where nothing was counted."""
        names = sorted(self.pairs)  # the same order on every rank, or sums would mix metrics
        total = distributed.sum_on_device([self.pairs[n] for n in names])
        return {n: a / b if b else math.nan for n, (a, b) in zip(names, total, strict=True)}


class Clock:
    """Seconds spent in each phase of a step."""

    def __init__(self):
        self.start, self.seconds = time.perf_counter(), {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        # Kernels are queued: without a wait their time would count in a later phase.
        if torch.cuda.is_available():
            # Not the whole device: with --async-steps a rollout runs in its own stream.
            torch.cuda.current_stream().synchronize()
        self.seconds[phase] = time.perf_counter() - begin

    def metrics(self, collected: Collected) -> dict[str, float]:
        """perf/ metrics: seconds by phase, and sampled tokens per second of rollout. With
        --async-steps that rollout ran during the step before.
        """
        tokens = sum(len(r.response_ids) for group in collected.finished for r in group)
        step = time.perf_counter() - self.start
        named = {f"perf/{phase}_s": s for phase, s in self.seconds.items()}
        return named | {
            "perf/step_s": step,
            "perf/rollout_s": collected.seconds,
            "perf/rollout_tokens_per_s": tokens / collected.seconds,
        }


def group_signal(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups with every response right, with none right, and without a gradient.

    Without a gradient: population variance of the rewards below 0.01, coarser than the sampling
    filter, which keeps any difference.
    """
    flat = [statistics.mean(rewards) for rewards in groups if statistics.pvariance(rewards) < 0.01]
    total = len(groups) or math.nan
    return {
        "solve_all": sum(x > 0.99 for x in flat) / total,
        "solve_none": sum(x < 0.01 for x in flat) / total,
        "no_grad": len(flat) / total,
    }


def mean(xs: Sequence[float]) -> float:
    """The mean; NaN for an empty sequence."""
    return sum(xs) / len(xs) if xs else math.nan


def kept_and_dropped(collected: Collected) -> tuple[list[Rollout], list[Rollout]]:
    """The responses that train, and the others that ended."""
    kept = [r for group in collected.groups for r in group]
    # By the number of the draw, because one problem may be drawn twice.
    chosen = {r.group for r in kept}
    return kept, [r for group in collected.finished for r in group if r.group not in chosen]


def rollout_metrics(collected: Collected, config: Config, version: int) -> dict[str, float]:
    """Metrics over all responses that ended in this step, kept or dropped, so that filtering cannot
    flatter the numbers. version: of the weights that this step trains.
    """
    count, (kept, dropped) = collected.counts, kept_and_dropped(collected)
    ended = [r for group in collected.finished for r in group]
    groups = [[r.reward for r in group] for group in collected.finished]
    signal = group_signal(groups)
    # NaN, not 0, for an empty mean: a step without a kept group has no kept length.
    reasons = Counter(r.reason for r in ended)
    spreads = [max(r.weight_versions) - min(r.weight_versions) for r in kept]
    metrics = {
        "groups_kept": len(collected.groups),
        "groups_finished": count["finished"],
        "groups_aborted": count["aborted"],
        "groups_resumed": count["resumed"],
        "groups_surplus": count["surplus"],
        "groups_regenerated": count["regenerated"],
        "responses_preempted": count["preempted"],
        "slot_occupancy": count["row_steps"] / (count["decode_steps"] * config.slots or math.nan),
        "groups_refilled": count["refilled"],
        "zero_variance_share": mean([not has_signal(rewards) for rewards in groups]),
        "all_right_share": signal["solve_all"],
        "all_wrong_share": signal["solve_none"],
        "reward_mean": mean([r.reward for r in ended]),
        "correct_mean": mean([r.correct for r in ended]),
        "kept_reward_mean": mean([r.reward for r in kept]),
        # Lengths count the stop token.
        "response_length_mean": mean([len(r.response_ids) for r in ended]),
        "response_length_max": max((len(r.response_ids) for r in ended), default=0),
        "kept_response_length_mean": mean([len(r.response_ids) for r in kept]),
        "dropped_response_length_mean": mean([len(r.response_ids) for r in dropped]),
        "overlong_penalty_mean": mean([r.overlong_penalty for r in ended]),
        "truncated_share": mean([r.finish_reason == "length" for r in ended]),
        "repetition_share": mean([is_repetitive(r.text) for r in ended]),
        "mixed_version_share": mean([len(set(r.weight_versions)) > 1 for r in kept]),
        "version_spread_max": max(spreads, default=0),
        # Mean over tokens, not responses: one response may mix versions.
        "version_lag": version - mean([v for r in kept for v in r.weight_versions]),
    }
    if "format" in reward_weights(config.reward_mix):
        metrics["format_share"] = mean([has_format(r.text, config.think) for r in ended])
    metrics["undecided_share"] = mean([r.reason in UNDECIDED for r in ended])
    # No division by 0 in a step where nothing ended: then there are no reasons either.
    metrics |= {f"verdict_{reason}": n / len(ended) for reason, n in sorted(reasons.items())}
    return {f"rollout/{name}": value for name, value in metrics.items()}


def evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Metrics of graded groups of one size n: accuracy, and pass@k for each power of two k <= n."""
    ended, n = [r for group in groups for r in group], len(groups[0])
    # A share of tests passed (code) is not a solution: only 1 counts for pass@k.
    right = [sum(r.correct == 1 for r in group) for group in groups]
    metrics = {"accuracy": mean([r.correct for r in ended])}
    for k in (2**i for i in range(n.bit_length())):
        metrics[f"pass_at_{k}"] = mean([pass_at_k(n, c, k) for c in right])
    metrics["response_length_mean"] = mean([len(r.response_ids) for r in ended])
    metrics["truncated_share"] = mean([r.finish_reason == "length" for r in ended])
    return {f"eval/{name}": value for name, value in metrics.items()}


def score_metrics(
    batch: Batch, mask: Tensor, old_logprobs: Tensor, entropy: Tensor, advantages: Tensor
) -> dict[str, float]:
    """Metrics of the policy before its update: the mean entropy of all kept tokens, and of the
    trained ones (`mask`) the advantages and the largest gap between trainer and sampler (nats).
    """
    # Both are log-probs of the same weights, unless older ones sampled: the rest is numerics.
    gap = (old_logprobs - batch.rollout_logprobs)[mask]
    return {
        "policy/entropy": float(entropy[batch.response_mask].mean()),
        "policy/mismatch_max": float(gap.abs().max()),
        "policy/advantage_mean": float(advantages[mask].mean()),
        "policy/advantage_std": float(advantages[mask].std()),
    }


def position_share(x: Tensor, mask: Tensor, lengths: Tensor) -> list[float]:
    """Share of the sum of abs(x[mask]) in each tenth of the responses: token t of L is in tenth
    floor(10 t / L). Equal everywhere: 0.1 each, for responses of ten tokens or more. NaN if x is 0
    or the mask is empty.
    """
    # (T,) against (N, 1) lengths: (N, T) numbers of tenths.
    position = torch.arange(mask.shape[1], device=mask.device)
    # clamp: integer division by 0 raises on a CPU, even in a row that the mask leaves out.
    tenth = 10 * position // lengths[:, None].clamp(min=1)
    sums = torch.bincount(tenth[mask], weights=x[mask].abs().double(), minlength=10)
    return (sums / sums.sum()).tolist()


def write_audit(
    folder: Path,
    step: int,
    batch: Batch,
    mask: Tensor,
    values: Tensor | None,
    advantages: Tensor,
) -> dict[str, float]:
    """Append the curves of the step to audit.jsonl; returns its numbers. `mask`: the trained
    tokens; a run without a critic (values None) has the advantages alone.
    """
    # Where in a response the learning signal sits: with a wrong lambda all of it is at the end.
    shares = position_share(advantages, mask, batch.response_lengths)
    numbers, curves = {}, {"advantage_share": shares}
    if values is not None:
        numbers, more = audit(values, batch.response_mask, batch.rewards, batch.group_ids)
        curves |= more
    if distributed.rank() == 0:
        files.append_jsonl(folder / "audit.jsonl", [{"step": step} | curves])
    numbers = {f"critic/{name}": value for name, value in numbers.items()}
    return numbers | {"policy/advantage_last_tenth": shares[-1]}


def sample_row(step: int, r: Rollout, kept: bool) -> dict:
    """One line of rollouts.jsonl."""
    return {
        "step": step,
        "problem_id": r.problem.id,
        "draw": r.group,  # a problem may be drawn twice in one step
        "sample_index": r.sample_index,
        "prompt": r.problem.prompt,
        "response": r.text,
        "response_ids": r.response_ids,
        "rollout_logprobs": r.rollout_logprobs,
        "reward": r.reward,  # raw: without the overlong penalty
        "correct": r.correct,
        "overlong_penalty": r.overlong_penalty,
        "reason": r.reason,
        "finish_reason": r.finish_reason,
        "response_length": len(r.response_ids),
        "kept": kept,
    }


def write_rollouts(
    folder: Path,
    log_samples: int,
    step: int,
    collected: Collected,
    tokens: dict[str, Tensor | None],
) -> None:
    """Append `log_samples` responses of the step, whole groups first and kept ones before others,
    to rollouts.jsonl.

    tokens: named (N, T) numbers of the kept responses, in their order, for keys of their own.
    """
    if distributed.rank() > 0 or log_samples == 0:
        return
    kept, dropped = kept_and_dropped(collected)
    rows = []
    # `tokens` has rows for kept responses alone, which come first: i indexes both.
    for i, r in enumerate((kept + dropped)[: None if log_samples < 0 else log_samples]):
        row = sample_row(step, r, kept=i < len(kept))
        if row["kept"]:
            row |= {
                # A float32 has about seven digits; more would only lengthen the file.
                name: [round(v, 6) for v in x[i, : row["response_length"]].tolist()]
                for name, x in tokens.items()
                if x is not None
            }
        rows.append(row)
    files.append_jsonl(folder / "rollouts.jsonl", rows)


def row_of_step(file: Path, step: int) -> dict:
    """The row of `step`; `{"step": step}` if the file has none."""
    return next((row for row in read_rows(file) if row["step"] == step), {"step": step})


def amend(file: Path, step: int, metrics: dict[str, float]) -> None:
    """Add to the row of `step` (the last one), or start it."""
    before = [row for row in read_rows(file) if row["step"] < step]
    files.write_jsonl(file, [*before, row_of_step(file, step) | metrics])


def forget_after(file: Path, step: int) -> None:
    """Cut a JSONL file back to rows up to `step`, where a resumed run continues, and drop a line
    that a kill left incomplete. One system call: another kill leaves the old file or the new one.
    """
    if distributed.rank() == 0 and file.exists():
        os.truncate(file, size_up_to(file, step))
    distributed.barrier()  # other ranks read it too, and must see what rank 0 sees


def size_up_to(file: Path, step: int) -> int:
    """Bytes of the whole lines up to `step`; ValueError for a damaged one among them."""
    size = 0
    # Binary, because truncation counts bytes, not characters.
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                # Without its end, the line was being written when the run was killed.
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number} is damaged ({error}); remove it."
                ) from error
            size += len(line)
    return size


def report_nowhere(step: int, metrics: dict[str, float]) -> None:
    """--report-to none."""


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are numbers: trackers draw NaN as a point or refuse it."""
    return {k: v for k, v in metrics.items() if math.isfinite(v)}


def open_reporter(
    folder: Path, config: Config, step: int
) -> Callable[[int, dict[str, float]], None]:
    """report(step, metrics) to what --report-to names; `step`: finished steps of the run so far.

    A resumed run continues in the same event directory, where steps sampled again replace the old
    ones, or under the same wandb id (kept in folder/wandb_id), where both stay. Raises ImportError
    when the package is missing.
    """
    if config.report_to == "none" or distributed.rank() > 0:
        return report_nowhere
    if config.report_to == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--report-to tensorboard needs `pip install tensorboard`.") from error
        # purge_step hides points after the checkpoint: a resumed run does those steps again.
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

        def report(step, metrics):
            for name, value in finite(metrics).items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return report
    try:
        import wandb
    except ImportError as error:
        raise ImportError("--report-to wandb needs `pip install wandb`.") from error
    note = folder / "wandb_id"
    # Without the stored id, wandb would begin a second run at a resume.
    id_ = note.read_text() if note.exists() else None
    run = wandb.init(dir=folder, name=folder.name, config=asdict(config), id=id_, resume="allow")
    note.write_text(run.id)
    # Our own axis: wandb's counter refuses the steps that a resumed run does again.
    run.define_metric("*", step_metric="step")
    return lambda step, metrics: run.log({"step": step} | finite(metrics))


def history(file: Path, key: str) -> list[float]:
    """The values of one metric in the steps so far, for a run that is resumed."""
    values = [row.get(key) for row in read_rows(file)]
    return [value for value in values if value is not None]


def warn(step: int, sentence: str) -> None:
    """Print a warning on rank 0, above the progress bar."""
    if distributed.rank() == 0:
        tqdm.write(f"WARNING step {step}: {sentence}", file=sys.stderr)


def summary(step: int, steps: int, m: dict[str, float]) -> str:
    """The metrics of a step that fit one line."""
    parts = [
        f"step {step}/{steps}",
        f"reward {m['rollout/reward_mean']:.3f}",
        f"length {m['rollout/response_length_mean']:.0f}",
        f"zero-var {m['rollout/zero_variance_share']:.2f}",
    ]
    if "policy/loss" in m:
        parts += [f"entropy {m['policy/entropy']:.3f}", f"grad {m['policy/grad_norm']:.2f}"]
    if "critic/loss" in m:
        parts += [f"V-loss {m['critic/loss']:.3f}", f"V-EV {m['critic/explained_variance']:.2f}"]
        parts += [] if "policy/loss" in m else ["critic only"]
    if "eval/accuracy" in m:
        parts.append(f"held-out {m['eval/accuracy']:.3f}")
    return " | ".join([*parts, f"{m['perf/step_s']:.1f} s"])


def report(folder: Path, step: int, steps: int) -> None:
    """The last lines of a run: its accuracy and where everything is."""
    # From the file, because a resumed run has not seen its first evaluation.
    accuracies = history(folder / "metrics.jsonl", "eval/accuracy")
    if accuracies:
        print0(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if step < steps:
        print0(f"stopped after step {step}; continue with --resume --output-dir {folder}")
    print0(f"run directory: {folder}")


def draw_figures(folder: Path) -> None:
    """Have diagnose.py draw figures in its own process: if matplotlib is missing, that costs a
    line, not the run.
    """
    command = [sys.executable, str(ROOT / "diagnose.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        # The last line of a traceback names the error.
        last = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        print0(f"no figures: {last}", file=sys.stderr)
