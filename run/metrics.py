"""The books of a run: metrics, samples, alarms, the line per step, the closing report.

Nothing here changes what is trained. README.md defines every metric.
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
from run.checkpoint import State
from run.scores import is_repetitive, pass_at_k
from verify import UNDECIDED

ALARMS = "no_box no_signal verifier truncated dead_critic mismatch entropy".split()


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
        share = 1 / distributed.world_size()
        self.add({"loss": (0.0, share), "grad_norm": (grad_norm * share, share)})

    def means(self) -> dict[str, float]:
        """Quotients over all ranks; NaN where nothing was counted."""
        names = sorted(self.pairs)
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
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a rollout beside it has its own
        self.seconds[phase] = time.perf_counter() - begin

    def metrics(self, collected: Collected) -> dict[str, float]:
        """perf/ metrics: seconds by phase and sampled tokens per second of rollout, which may have
        run beside the step before.
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

    Without: population variance of the rewards below 0.01, coarser than the sampling filter, which
    keeps any difference.
    """
    flat = [statistics.mean(rewards) for rewards in groups if statistics.pvariance(rewards) < 0.01]
    share = lambda count: count / len(groups) if groups else math.nan
    return {
        "solve_all": share(sum(x > 0.99 for x in flat)),
        "solve_none": share(sum(x < 0.01 for x in flat)),
        "no_grad": share(len(flat)),
    }


def mean(xs: Sequence[float]) -> float:
    """NaN for the mean of nothing."""
    return sum(xs) / len(xs) if xs else math.nan


def kept_and_dropped(collected: Collected) -> tuple[list[Rollout], list[Rollout]]:
    """The responses that train, and the others that ended."""
    kept = [r for group in collected.groups for r in group]
    chosen = {r.group for r in kept}
    return kept, [r for group in collected.finished for r in group if r.group not in chosen]


def rollout_metrics(collected: Collected, config: Config, version: int) -> dict[str, float]:
    """Over everything that ended in this step, kept or dropped, so that filtering cannot flatter
    the numbers. version: that of the weights which this step trains.
    """
    count, (kept, dropped) = collected.counts, kept_and_dropped(collected)
    ended = [r for group in collected.finished for r in group]
    groups = [[r.reward for r in group] for group in collected.finished]
    signal = group_signal(groups)
    reasons = Counter(r.reason for r in ended)
    spread = lambda r: max(r.weight_versions) - min(r.weight_versions)
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
        "response_length_mean": mean([len(r.response_ids) for r in ended]),
        "response_length_max": max((len(r.response_ids) for r in ended), default=0),
        "kept_response_length_mean": mean([len(r.response_ids) for r in kept]),
        "dropped_response_length_mean": mean([len(r.response_ids) for r in dropped]),
        "overlong_penalty_mean": mean([r.overlong_penalty for r in ended]),
        "truncated_share": mean([r.finish_reason == "length" for r in ended]),
        "repetition_share": mean([is_repetitive(r.text) for r in ended]),
        "mixed_version_share": mean([len(set(r.weight_versions)) > 1 for r in kept]),
        "version_spread_max": max(map(spread, kept), default=0),
        "version_lag": version - mean([v for r in kept for v in r.weight_versions]),
    }
    if "format" in reward_weights(config.reward_mix):
        metrics["format_share"] = mean([has_format(r.text, config.think) for r in ended])
    metrics["undecided_share"] = mean([r.reason in UNDECIDED for r in ended])
    metrics |= {f"verdict_{reason}": n / len(ended) for reason, n in sorted(reasons.items())}
    return {f"rollout/{name}": value for name, value in metrics.items()}


def evaluation_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Of graded groups of one size: accuracy, and pass@k for the powers of two up to that size."""
    ended, n = [r for group in groups for r in group], len(groups[0])
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
    """Scored before the policy's update: the mean entropy of all kept tokens; and of those that are
    trained (`mask`), the worst gap to the sampler and the advantages.
    """
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
    position = torch.arange(mask.shape[1], device=mask.device)
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
    shares = position_share(advantages, mask, batch.response_lengths)
    numbers, curves = {}, {"advantage_share": shares}
    if values is not None:
        from critic import audit

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
        "draw": r.group,
        "sample_index": r.sample_index,
        "prompt": r.problem.prompt,
        "response": r.text,
        "response_ids": r.response_ids,
        "rollout_logprobs": r.rollout_logprobs,
        "reward": r.reward,
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
    for i, r in enumerate((kept + dropped)[: None if log_samples < 0 else log_samples]):
        row = sample_row(step, r, kept=i < len(kept))
        if row["kept"]:
            row |= {
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
    """Add to the row of `step`, the last one, or begin it."""
    before = [row for row in read_rows(file) if row["step"] < step]
    files.write_jsonl(file, [*before, row_of_step(file, step) | metrics])


def forget_after(file: Path, step: int) -> None:
    """Cut a JSONL file back to rows up to `step`, which a resumed run goes on from; a line that a
    kill tore is cut too. In one system call, so that the next kill cannot harm it.
    """
    if distributed.rank() == 0 and file.exists():
        os.truncate(file, size_up_to(file, step))
    distributed.barrier()  # other ranks read it too, and must see what rank 0 sees


def size_up_to(file: Path, step: int) -> int:
    """Bytes of the whole lines up to `step`; ValueError for a damaged one among them."""
    size = 0
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}, line {number} is damaged ({error}); remove it."
                ) from error
            size += len(line)
    return size


def open_reporter(
    folder: Path, config: Config, step: int
) -> Callable[[int, dict[str, float]], None]:
    """report(step, metrics) to what --report-to names; `step`: finished steps of the run so far.

    A resumed run goes on in the same event directory, where steps sampled again replace the old
    ones, or under the same wandb id (kept in folder/wandb_id), where both stay. Raises ImportError
    when the package is missing.
    """
    finite = lambda metrics: {k: v for k, v in metrics.items() if math.isfinite(v)}
    if config.report_to == "none" or distributed.rank() > 0:
        return lambda step, metrics: None
    if config.report_to == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("--report-to tensorboard needs `pip install tensorboard`.") from error
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
    id_ = note.read_text() if note.exists() else None
    run = wandb.init(dir=folder, name=folder.name, config=asdict(config), id=id_, resume="allow")
    note.write_text(run.id)
    # An axis of our own: wandb's counter refuses the steps that a resumed run does again.
    run.define_metric("*", step_metric="step")
    return lambda step, metrics: run.log({"step": step} | finite(metrics))


def history(file: Path, key: str) -> list[float]:
    """The values of one metric in the steps so far, for a run that is resumed."""
    values = [row.get(key) for row in read_rows(file)]
    return [value for value in values if value is not None]


def verifier_alarm(metrics: dict[str, float], group_size: int, earlier: Sequence[float]) -> str:
    """A sentence if the verifier's workers gave up, or left many responses undecided, or more than
    earlier in the run; else "".

    More: above the mean of at least five earlier steps by 2 points and three standard errors.
    """
    given_up = sum(metrics.get(f"rollout/verdict_{reason}", 0.0) for reason in ("timeout", "died"))
    if given_up > 0.01:
        return (
            f"the verifier gave up on {given_up:.0%} of the responses, which counts as wrong. "
            "Raise --verifier-timeout-s, and look at `reason` in rollouts.jsonl."
        )
    share = metrics["rollout/undecided_share"]
    responses = max(metrics["rollout/groups_finished"] * group_size, 1)
    earlier = [x for x in earlier if math.isfinite(x)]
    usual = statistics.mean(earlier) if len(earlier) >= 5 else 1.0
    risen = share > usual + 0.02 + 3 * math.sqrt(usual * (1 - usual) / responses)
    if not risen and not share > 0.2:
        return ""
    before = f", up from {usual:.1%} on average before" if risen else ""
    return (
        f"the verifier could not decide {share:.1%} of the responses ({', '.join(UNDECIDED)})"
        f"{before}; they count as wrong. Sort rollouts.jsonl by `reason`, and explain one by "
        "`python verify.py RESPONSE LABEL`: either the labels cannot be read (--audit) or the "
        "policy has learnt to write what cannot be graded."
    )


def mismatch_alarm(nats: float, config: Config) -> str:
    """A sentence on sampler and trainer disagreeing, with the causes that this run can have."""
    older = {
        "--async-steps (a lower --lr moves them less)": config.async_steps,
        "--partial-rollout (--max-staleness bounds their age)": config.partial_rollout,
    }
    flags = " and ".join(flag for flag, on in older.items() if on)
    cause = f"Older weights sample under {flags}, which is the ordinary cause; " if flags else ""
    return (
        f"sampler and trainer disagree by {nats:.3f} nats a token; importance weights (--is-mode "
        f"icepop) bound the harm. {cause}--dtype float32 shows whether precision is the cause."
    )


def warn(step: int, sentence: str) -> None:
    """A loud line, on rank 0, clear of the progress bar."""
    if distributed.rank() == 0:
        tqdm.write(f"WARNING step {step}: {sentence}", file=sys.stderr)


def alarms(
    state: State, config: Config, metrics: dict[str, float], undecided: Sequence[float]
) -> dict[str, float]:
    """One loud line for each way a run can be dead while its logs look alive, and 0 or 1 for each
    as a metric. undecided: rollout/undecided_share of the steps before.
    """
    m = defaultdict(lambda: math.nan, metrics)  # a comparison with NaN raises no alarm
    found = dict.fromkeys(ALARMS, "")
    if m["rollout/verdict_no_box"] > 0.5:
        found["no_box"] = (
            f"{m['rollout/verdict_no_box']:.0%} of the responses put nothing in \\boxed{{}}, which "
            "counts as wrong. Ask for it in the prompt (--prompt-suffix), or raise "
            "--max-response-tokens if they are cut off before."
        )
    if state.empty_steps:
        found["no_signal"] = (
            f"no group kept of {m['rollout/groups_finished']} sampled, {state.empty_steps} steps "
            f"in a row: every group was all right ({m['rollout/all_right_share']:.0%}) or all "
            f"wrong ({m['rollout/all_wrong_share']:.0%}), so nothing was trained. Use problems of "
            "another difficulty, a larger --group-size or more --max-refills."
        )
    found["verifier"] = verifier_alarm(m, config.group_size, undecided)
    if m["rollout/truncated_share"] == 1:
        found["truncated"] = (
            "every response (100%) was cut off; raise --max-response-tokens or check the model's "
            "stop ids."
        )
    stuck = m["critic/v_std"] < 1e-6 or m["critic/head_movement"] == 0
    if m["critic/updates"] > 1 and stuck:
        found["dead_critic"] = (
            f"the critic is dead: V spreads by {m['critic/v_std']:.1e} around "
            f"{m['critic/v_mean']:.4f} after {m['critic/updates']} updates, and this step moved "
            f"its head by {m['critic/head_movement']:.1e}. Check --critic-lr ({config.critic_lr})."
        )
    if m["policy/mismatch_abs"] > 0.05:
        found["mismatch"] = mismatch_alarm(m["policy/mismatch_abs"], config)
    of_start = m["policy/entropy"] / (state.start_entropy or math.nan)
    if of_start < 0.05:
        found["entropy"] = (
            f"the entropy fell to {m['policy/entropy']:.4f} nats a token, {of_start:.1%} of its "
            "start: responses stop to differ. Go back to an earlier checkpoint with a lower --lr, "
            "a larger --clip-high or an --entropy-coef."
        )
    for sentence in filter(None, found.values()):
        warn(state.step, sentence)
    return {f"alarm/{name}": float(bool(sentence)) for name, sentence in found.items()}


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
    """What came of the run, and where everything is."""
    accuracies = history(folder / "metrics.jsonl", "eval/accuracy")
    if accuracies:
        print0(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if step < steps:
        print0(f"stopped after step {step}; go on with --resume --output-dir {folder}")
    print0(f"run directory: {folder}")


def draw_figures(folder: Path) -> None:
    """Figures by diagnose.py in a process of its own: a missing matplotlib costs a line, not the
    run.
    """
    command = [sys.executable, str(ROOT / "diagnose.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
        print0(f"no figures: {last}", file=sys.stderr)
