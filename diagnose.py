"""Figures of runs, a report to look at, and the algorithms side by side.

    python diagnose.py RUN_DIR [RUN_DIR ...]               figures; several runs are overlaid
    python diagnose.py --report RUN_DIR [RUN_DIR ...]      also report.html, with coloured samples
    python diagnose.py --explain                           two tables from built-in numbers
    python diagnose.py --explain --from RUN_DIR --step N   the first, of a stored group of a run

Figures go to RUN_DIR/figures and the report to RUN_DIR (of the first run). docs/critic.md says how
to read the figures of the critic.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from files import file_of, read_rows, writing
from reports.embedded_task import first_wrong_token, right_response

# Figures by file name, their panels by title, curves by label: metrics of metrics.jsonl.
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
PERCENT = np.arange(0, 101, 10)
BEFORE, AFTER = 12, 24  # tokens shown around the first wrong one


def panels(count: int):
    """A figure with room for `count` panels, and their axes: one row of up to four, else rows of
    three.
    """
    from matplotlib.figure import Figure

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
    if xlabel == "step":
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.3)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(fontsize=7)


def draw_panel(ax, title: str, metrics: dict[str, str], runs: dict[str, list[dict]]) -> None:
    """Curves of every run over steps; steps without the metric are left out."""
    for run, rows in runs.items():
        for label, metric in metrics.items():
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                label = label if len(runs) == 1 else f"{run}: {label}"
                marker = "o" if len(points) < 8 else None
                ax.plot(*zip(*points, strict=True), label=label, marker=marker)
    finish(ax, title, "step")


def draw(runs: list[Path], folder: Path) -> list[Path]:
    """Write one PNG per entry of FIGURES that has data, and audit.png; returns their paths."""
    names = [run.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    files = dict(zip(names, runs, strict=True))
    data = {name: list(read_rows(file_of(run, "metrics.jsonl"))) for name, run in files.items()}
    present = {metric for rows in data.values() for row in rows for metric in row}
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, titles in FIGURES.items():
        titles = [(title, m) for title, m in titles.items() if present & set(m.values())]
        if titles:
            figure, axes = panels(len(titles))
            for ax, (title, metrics) in zip(axes, titles, strict=True):
                draw_panel(ax, title, metrics, data)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=110)
    return written + draw_audit(files, folder / "audit.png")


# ---- the audit: curves by position


def draw_audit(runs: dict[str, Path], file: Path) -> list[Path]:
    """Write the panels for which audit.jsonl (or, for the last, rollouts.jsonl) has data."""
    stages = audit_stages(runs)
    keys = {key for rows in stages.values() for row in rows for key in row}
    falls = {name: fall for name, run in runs.items() if (fall := fall_of_v(run)) is not None}
    drawers: list[tuple[str, Callable]] = [
        ("start", draw_reliability),
        ("auc", draw_auc),
        ("v_right", draw_v_by_outcome),
        ("advantage_share", draw_advantage_share),
    ]
    todo = [(drawer, stages) for key, drawer in drawers if key in keys]
    todo += [(draw_fall, falls)] if falls else []
    if not todo:
        return []
    figure, axes = panels(len(todo))
    for ax, (drawer, data) in zip(axes, todo, strict=True):
        drawer(ax, data)
    figure.savefig(file, dpi=110)
    return [file]


def audit_stages(runs: dict[str, Path]) -> dict[str, list[dict]]:
    """Rows of audit.jsonl by label: of a single run in three stages, of several the last third of
    each.
    """
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
    """By stage, the mean over steps of the curve `key`, each step weighted by the number `count`
    behind it (all alike without); a stage that has none is left out.
    """
    means = {}
    whole = lambda row: row.get(count, 1) and None not in np.atleast_1d(row.get(key))
    for label, rows in stages.items():
        rows = [row for row in rows if whole(row)]
        if rows:
            curves = np.array([np.atleast_1d(row[key]) for row in rows], dtype=float)
            means[label] = np.average(curves, 0, [row.get(count, 1) for row in rows])
    return means


def draw_reliability(ax, stages: dict[str, list[dict]]) -> None:
    """Groups in six bins of equal number by V(s_0): pass rate, and two standard errors of it."""
    for label, rows in stages.items():
        pairs = np.array([pair for row in rows for pair in row.get("start", ())])
        if len(pairs):
            bins = np.array_split(pairs[pairs[:, 0].argsort()], min(6, len(pairs)))
            v, rate = np.array([b.mean(0) for b in bins]).T
            error = [2 * b[:, 1].std() / len(b) ** 0.5 for b in bins]
            ax.errorbar(v, rate, error, marker="o", markersize=4, capsize=2, label=label)
    ax.axline((0.5, 0.5), slope=1, color="grey", linestyle="--", linewidth=1, label="calibrated")
    ax.set_ylabel("pass rate of the group")
    finish(ax, "V(s_0) against pass rate (kept groups)", "V(s_0)")


def draw_auc(ax, stages: dict[str, list[dict]]) -> None:
    """AUC by position, and what length alone would give (the better of its two directions)."""
    lengths = pooled(stages, "length_auc", "pairs")
    for label, curve in pooled(stages, "auc", "pairs").items():
        (line,) = ax.plot(PERCENT, curve, marker=".", label=label)
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
    """V on the whole scale of what it predicts, lest noise look like knowledge."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(0, low), max(1, high))


def draw_advantage_share(ax, stages: dict[str, list[dict]]) -> None:
    """Share of the sum of |A| in each tenth of the responses."""
    for label, curve in pooled(stages, "advantage_share").items():
        ax.plot(PERCENT[:-1] + 5, curve, marker=".", label=label)
    ax.axhline(0.1, color="grey", linestyle="--", linewidth=1, label="the same everywhere")
    ax.set_ylim(bottom=0)
    finish(ax, "share of |A| by tenth of the response", "position in the response (%)")


def fall_of_v(run: Path) -> np.ndarray | None:
    """Mean V around the first wrong token of wrong responses: (2, BEFORE + 1 + AFTER), the wrong
    ones and, at the same token numbers, the right ones to the same problem.

    Of the last third of the logged steps; None if the run has no values, or another task, whose
    first wrong token is not known.
    """
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for row in read_rows(run / "rollouts.jsonl"):
        if row.get("values"):
            if right_response(row["prompt"]) is None:
                return None
            kept = ("prompt", "response", "finish_reason", "response_length", "reward", "values")
            draw = row.get("draw", row["problem_id"])  # not in runs of earlier versions
            groups[row["step"], draw].append({key: row[key] for key in kept})
    last = max((step for step, _ in groups), default=0)
    wrongs, rights = [], []
    for (step, _), group in groups.items():
        right = [row for row in group if row["reward"] > 0.5]
        wrong = [row for row in group if row["reward"] <= 0.5] if 3 * step > 2 * last else []
        for row in wrong if right else ():
            if (at := first_wrong_token(row)) is not None:
                wrongs.append(window(row["values"], at))
                rights.append(mean([window(other["values"], at) for other in right]))
    return np.array([mean(wrongs), mean(rights)]) if wrongs else None


def window(values: Sequence[float], at: int) -> np.ndarray:
    """V from BEFORE tokens before `at` to AFTER tokens behind it; NaN outside the response."""
    low, high = max(0, at - BEFORE), min(at + AFTER + 1, len(values))
    around = np.full(BEFORE + 1 + AFTER, np.nan)
    around[low - at + BEFORE : high - at + BEFORE] = values[low:high]
    return around


def mean(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Mean of windows, place by place over those that have a value there; NaN where none has."""
    return np.ma.masked_invalid(rows).mean(0).filled(np.nan)


def draw_fall(ax, falls: dict[str, np.ndarray]) -> None:
    """V before and after the first wrong token; V at 0 has not seen it yet."""
    for name, (wrong, right) in falls.items():
        prefix = f"{name}: " if len(falls) > 1 else ""
        offsets = np.arange(-BEFORE, AFTER + 1)
        (line,) = ax.plot(offsets, wrong, "--", label=f"{prefix}wrong responses")
        ax.plot(offsets, right, color=line.get_color(), label=f"{prefix}right ones, same problem")
    ax.axvline(0.5, color="grey", linewidth=1)
    show_unit_interval(ax)
    finish(ax, "V around the first wrong token", "tokens from it (V at 0 has not seen it)")


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories to draw")
    parser.add_argument("--output", type=Path, help="folder of the figures")
    parser.add_argument("--report", action="store_true", help="also write RUN_DIR/report.html")
    parser.add_argument("--explain", action="store_true", help="print the tables")
    parser.add_argument("--from", dest="source", type=Path, help="run with a stored group")
    parser.add_argument("--step", type=int, help="step of that group")
    args = parser.parse_args()
    if args.explain:
        of_figures = args.runs or args.report or args.output
        fits = not of_figures and (args.source is None) == (args.step is None)
    else:
        fits = args.runs and args.source is None and args.step is None
    if not fits:
        parser.error(
            "give [--report] RUN_DIR ..., or --explain, or --explain --from RUN_DIR --step N"
        )
    try:
        if args.explain:
            from reports import explain

            if args.source:
                print(explain.advantage_table(explain.stored_group(args.source, args.step)))
            else:
                group = explain.example_group()
                print(explain.advantage_table(group), explain.weight_table(), sep="\n\n")
        else:
            figures = draw(args.runs, args.output or args.runs[0] / "figures")
            print(*figures, sep="\n")
            if args.report:
                from reports import html

                print(html.write(args.runs[0], figures))
    except (OSError, ValueError, ImportError) as error:  # a file is missing or broken, or a package
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
