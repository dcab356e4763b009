"""Figures of runs: curves over steps, and what the critic knew by position in a response.

Needs matplotlib, which is imported where a figure is made: everything else works without it. No
model is loaded, so the figures of a run appear in seconds. docs/critic.md says how to read those of
the critic.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from files import file_of, read_rows, writing
from reports.embedded_task import first_wrong_token, right_response

# File name -> panel title -> label of the curve -> key of metrics.jsonl.
# fmt: off
FIGURES = {
    "reward": {
        "mean reward of sampled responses": {"sampled": "rollout/reward_mean"},
        "held-out accuracy": {"held-out": "eval/accuracy"},
        "policy entropy (nats per token)": {"entropy": "policy/entropy"}},
    "lengths": {
        "response length (tokens)": {
            "mean": "rollout/response_length_mean", "kept": "rollout/kept_response_length_mean",
            "max": "rollout/response_length_max"},
        "truncated, repetitive (share)": {
            "truncated": "rollout/truncated_share", "truncated, held-out": "eval/truncated_share",
            "repetitive": "rollout/repetition_share"},
        "groups without signal (share)": {
            "zero variance": "rollout/zero_variance_share",
            "all right": "rollout/all_right_share", "all wrong": "rollout/all_wrong_share"}},
    "critic": {
        "value loss": {"value loss": "critic/loss"},
        "explained variance of the outcome": {
            "all": "critic/explained_variance",
            "between problems": "critic/explained_variance_between",
            "within groups": "critic/explained_variance_within"},
        "V within groups (AUC, 0.5 knows nothing)": {
            "first token": "critic/start_auc", "half way": "critic/mid_auc",
            "last token": "critic/end_auc", "length alone": "critic/length_auc"},
        "V over tokens": {
            "mean": "critic/v_mean", "standard deviation": "critic/v_std",
            "bias": "critic/bias"},
        "V(s_0) against the group's pass rate": {
            "rank correlation": "critic/start_rank_corr",
            "calibration error": "critic/start_calibration_error"},
        "head of the critic": {
            "norm of the weight": "critic/head_weight_norm",
            "its movement per step": "critic/head_movement"}},
    "optimisation": {
        "gradient norm": {"policy": "policy/grad_norm", "critic": "critic/grad_norm"},
        "clipped tokens (share)": {
            "policy": "policy/clip_fraction", "critic": "critic/clip_fraction"},
        "sampler against trainer (nats per token)": {"mean |difference|": "policy/mismatch_abs"},
        "seconds per step": {"rollout": "perf/rollout_s", "all": "perf/step_s"}},
}
# fmt: on
PERCENT = np.arange(0, 101, 10)  # positions of the audit's curves, from first to last token
BEFORE, AFTER = 12, 24  # tokens shown around the first wrong one


def panels(count: int):
    """A figure with `count` panels, and their axes: one row of up to four, else rows of three."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    columns = count if count <= 4 else 3
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def finish(ax, title: str, xlabel: str) -> None:
    """Title, grid, and a legend if there is more than one curve."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel)
    if xlabel == "step":  # a short run would get ticks at step 1.5
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(fontsize=7)


def draw_panel(ax, title: str, metrics: dict[str, str], runs: dict[str, list[dict]]) -> None:
    """Curves of every run over steps; steps without the metric (None or absent) are left out."""
    for run, rows in runs.items():
        for label, metric in metrics.items():
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                label = label if len(runs) == 1 else f"{run}: {label}"
                # A single point makes no line, and few of them (evaluations) hide where they are.
                marker = "o" if len(points) < 8 else None
                ax.plot(*zip(*points, strict=True), label=label, marker=marker)
    finish(ax, title, "step")


def draw_runs(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Write one PNG per entry of FIGURES that has data, and audit.png, with the curves of all runs;
    returns their paths.
    """
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    folders = dict(zip(names, runs, strict=True))
    data = {name: list(read_rows(file_of(run, "metrics.jsonl"))) for name, run in folders.items()}
    present = {metric for rows in data.values() for row in rows for metric in row}
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, titles in FIGURES.items():
        shown = [(title, m) for title, m in titles.items() if present & set(m.values())]
        if shown:
            figure, axes = panels(len(shown))
            for ax, (title, metrics) in zip(axes, shown, strict=True):
                draw_panel(ax, title, metrics, data)
            file = folder / f"{name}.png"
            figure.savefig(file, dpi=110)
            written.append(file)
    return written + draw_audit(folders, folder / "audit.png")


# ---- the audit of the critic: curves by position in the response


def draw_audit(runs: dict[str, Path], file: Path) -> list[Path]:
    """Write the panels for which audit.jsonl (or, for the last, rollouts.jsonl) has data; returns
    the file, or [] if there is none.
    """
    stages = audit_stages(runs)
    present = {key for rows in stages.values() for row in rows for key in row}
    drawers: dict[str, Callable] = {
        "start": draw_reliability,
        "auc": draw_auc,
        "v_right": draw_v_by_outcome,
        "advantage_share": draw_advantage_share,
    }
    shown = [(draw, stages) for key, draw in drawers.items() if key in present]
    around_error = {name: v_around_error(run) for name, run in runs.items()}
    around_error = {name: v for name, v in around_error.items() if v is not None}
    if around_error:
        shown.append((draw_v_around_error, around_error))
    if not shown:
        return []
    figure, axes = panels(len(shown))
    for ax, (draw, data) in zip(axes, shown, strict=True):
        draw(ax, data)
    figure.savefig(file, dpi=110)
    return [file]


def audit_stages(runs: dict[str, Path]) -> dict[str, list[dict]]:
    """Rows of audit.jsonl by label: the three thirds of a single run, the last third of several."""
    stages = {}
    for name, run in runs.items():
        rows = list(read_rows(run / "audit.jsonl"))
        bounds = [len(rows) * part // 3 for part in range(4)]
        for low, high in zip(bounds, bounds[1:], strict=False):
            if low < high and (len(runs) == 1 or high == len(rows)):
                label = f"steps {rows[low]['step']} to {rows[high - 1]['step']}"
                stages[label if len(runs) == 1 else f"{name}, {label}"] = rows[low:high]
    return stages


def pooled(stages: dict[str, list[dict]], key: str, count: str = "") -> dict[str, np.ndarray]:
    """By stage, the mean over steps of the curve `key` (or number), each step weighted by its field
    `count`, such as the number of pairs compared; without `count`, all alike. A stage that has no
    such curve is left out.
    """
    means = {}
    for label, rows in stages.items():
        # A step without a pair has None in place of numbers.
        rows = [r for r in rows if r.get(count, 1) and None not in np.atleast_1d(r.get(key))]
        if rows:
            curves = np.array([np.atleast_1d(row[key]) for row in rows], dtype=float)
            means[label] = np.average(curves, 0, [row.get(count, 1) for row in rows])
    return means


def draw_reliability(ax, stages: dict[str, list[dict]]) -> None:
    """Groups in six bins of equal number, sorted by V(s_0): mean pass rate, and two standard errors
    of it.
    """
    for label, rows in stages.items():
        pairs = np.array([pair for row in rows for pair in row.get("start", ())])
        if len(pairs):
            by_v = pairs[pairs[:, 0].argsort()]
            bins = np.array_split(by_v, min(6, len(pairs)))
            v, rate = np.array([b.mean(0) for b in bins]).T
            error = [2 * b[:, 1].std() / len(b) ** 0.5 for b in bins]
            ax.errorbar(v, rate, error, marker="o", markersize=4, capsize=2, label=label)
    ax.axline((0.5, 0.5), slope=1, color="grey", linestyle="--", linewidth=1, label="calibrated")
    ax.set_ylabel("pass rate of the group")
    finish(ax, "V(s_0) against pass rate (kept groups)", "V(s_0)")


def draw_auc(ax, stages: dict[str, list[dict]]) -> None:
    """AUC of V by position, and the AUC of length alone as a dotted line.

    A critic that has learned no more than "long is wrong" is no better than that line.
    """
    lengths = pooled(stages, "length_auc", "pairs")
    for label, curve in pooled(stages, "auc", "pairs").items():
        (line,) = ax.plot(PERCENT, curve, marker=".", label=label)
        # The better of both directions: 0.4 for "the longer one is right" is 0.6 for "the shorter".
        alone = max(lengths[label][0], 1 - lengths[label][0])
        ax.axhline(alone, color=line.get_color(), linestyle=":", linewidth=1)
    ax.plot([], [], color="grey", linestyle=":", label="length alone")
    ax.axhline(0.5, color="grey", linestyle="--", linewidth=1, label="knows nothing")
    ax.set_ylim(min(0.4, ax.get_ylim()[0]), 1.02)
    finish(ax, "right against wrong, same problem (AUC of V)", "position in the response (%)")


def draw_v_by_outcome(ax, stages: dict[str, list[dict]]) -> None:
    """Mean V along the right (solid) and the wrong responses (dashed) to the same problems."""
    wrong = pooled(stages, "v_wrong", "mixed")
    for label, curve in pooled(stages, "v_right", "mixed").items():
        (line,) = ax.plot(PERCENT, curve, label=label)
        ax.plot(PERCENT, wrong[label], "--", color=line.get_color())
    show_unit_interval(ax)
    finish(ax, "V of right (solid), wrong (dashed), same problems", "position in the response (%)")


def show_unit_interval(ax) -> None:
    """Show at least 0 to 1, the scale of what V predicts: magnified, noise looks like knowledge."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(0, low), max(1, high))


def draw_advantage_share(ax, stages: dict[str, list[dict]]) -> None:
    """Share of the sum of |A| in each tenth of the responses."""
    middles = PERCENT[:-1] + 5
    for label, curve in pooled(stages, "advantage_share").items():
        ax.plot(middles, curve, marker=".", label=label)
    ax.axhline(0.1, color="grey", linestyle="--", linewidth=1, label="the same everywhere")
    ax.set_ylim(bottom=0)
    finish(ax, "share of |A| by tenth of the response", "position in the response (%)")


# ---- V around the first wrong token of the embedded task


def v_around_error(run: Path) -> np.ndarray | None:
    """Mean V around the first wrong token of wrong responses, (2, BEFORE + 1 + AFTER): of the wrong
    ones and, at the same token numbers, of the right ones to the same problem.

    Over the last third of the logged steps. None if the run logged no values, or trained on another
    task: the first wrong token is known for the embedded task alone.
    """
    groups = logged_groups(run)
    if not groups:
        return None
    last = max(step for step, _ in groups)
    wrong_windows, right_windows = [], []
    for (step, _), group in groups.items():
        right = [row for row in group if row["reward"] > 0.5]
        if 3 * step <= 2 * last or not right:
            continue
        for row in group:
            at = first_wrong_token(row) if row["reward"] <= 0.5 else None
            if at is not None:
                wrong_windows.append(window(row["values"], at))
                same_place = [window(other["values"], at) for other in right]
                right_windows.append(mean_where_known(same_place))
    if not wrong_windows:
        return None
    return np.array([mean_where_known(wrong_windows), mean_where_known(right_windows)])


def logged_groups(run: Path) -> dict[tuple, list[dict]]:
    """Rows of rollouts.jsonl that hold values, by step and group; {} if the run's task is not the
    embedded one.
    """
    groups: dict[tuple, list[dict]] = defaultdict(list)
    # Not whole rows: with ids and log-probs of every token a long run may not fit in memory.
    used = ("prompt", "response", "finish_reason", "response_length", "reward", "values")
    for row in read_rows(run / "rollouts.jsonl"):
        if row.get("values"):
            if right_response(row["prompt"]) is None:
                return {}
            # A problem may be drawn twice in a step. Runs of earlier versions have no `draw`.
            draw = row.get("draw", row["problem_id"])
            groups[row["step"], draw].append({key: row[key] for key in used})
    return groups


def window(values: Sequence[float], at: int) -> np.ndarray:
    """V from BEFORE tokens before `at` to AFTER tokens after it; NaN outside the response."""
    low, high = max(0, at - BEFORE), min(at + AFTER + 1, len(values))
    around = np.full(BEFORE + 1 + AFTER, np.nan)
    around[low - at + BEFORE : high - at + BEFORE] = values[low:high]
    return around


def mean_where_known(windows: Sequence[np.ndarray]) -> np.ndarray:
    """Mean of windows, place by place over those that have a value there; NaN where none has."""
    return np.ma.masked_invalid(windows).mean(0).filled(np.nan)


def draw_v_around_error(ax, runs: dict[str, np.ndarray]) -> None:
    """V before and after the first wrong token."""
    offsets = np.arange(-BEFORE, AFTER + 1)
    for name, (wrong, right) in runs.items():
        prefix = f"{name}: " if len(runs) > 1 else ""
        (line,) = ax.plot(offsets, wrong, "--", label=f"{prefix}wrong responses")
        ax.plot(offsets, right, color=line.get_color(), label=f"{prefix}right ones, same problem")
    # V at 0 is that of the state in which the wrong token is chosen: the first to see it is V at 1.
    ax.axvline(0.5, color="grey", linewidth=1)
    show_unit_interval(ax)
    finish(ax, "V around the first wrong token", "tokens from it (V at 0 has not seen it)")
