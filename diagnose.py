"""Figures from run directories: `python diagnose.py RUN_DIR [RUN_DIR ...]`; several runs are
overlaid.

Figures go to RUN_DIR/figures (of the first run): one panel per question, each a metric of
metrics.jsonl over steps.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple


class Panel(NamedTuple):
    """One set of axes: a title and the metrics drawn in it, by label."""

    title: str
    metrics: dict[str, str]


FIGURES = {
    "reward": [
        Panel("mean reward of sampled responses", {"sampled": "rollout/reward_mean"}),
        Panel("held-out accuracy", {"held-out": "eval/accuracy"}),
        Panel("policy entropy (nats per token)", {"entropy": "policy/entropy"}),
    ],
    "lengths": [
        Panel(
            "response length (tokens)",
            {
                "mean": "rollout/response_length_mean",
                "kept": "rollout/kept_response_length_mean",
                "max": "rollout/response_length_max",
            },
        ),
        Panel(
            "truncated share",
            {"sampled": "rollout/truncated_share", "held-out": "eval/truncated_share"},
        ),
        Panel(
            "groups without signal (share)",
            {
                "zero variance": "rollout/zero_variance_share",
                "all right": "rollout/all_right_share",
                "all wrong": "rollout/all_wrong_share",
            },
        ),
    ],
    "critic": [
        Panel("value loss", {"value loss": "critic/loss"}),
        Panel("explained variance of V", {"explained variance": "critic/explained_variance"}),
        Panel(
            "V within groups (AUC, 0.5 knows nothing)",
            {"right against wrong, last token": "critic/end_auc"},
        ),
        Panel("V over tokens", {"mean": "critic/v_mean", "standard deviation": "critic/v_std"}),
    ],
    "optimisation": [
        Panel("gradient norm", {"policy": "policy/grad_norm", "critic": "critic/grad_norm"}),
        Panel(
            "clipped tokens (share)",
            {"policy": "policy/clip_fraction", "critic": "critic/clip_fraction"},
        ),
        Panel(
            "sampler against trainer (nats per token)", {"mean |difference|": "policy/mismatch_abs"}
        ),
        Panel("seconds per step", {"rollout": "perf/rollout_s", "all": "perf/step_s"}),
    ],
}


def read_metrics(run: Path) -> list[dict]:
    """Rows of metrics.jsonl; one sentence when the directory holds no run."""
    file = run / "metrics.jsonl"
    if not file.exists():
        raise SystemExit(
            f"error: {run} holds no metrics.jsonl; give the directory that train.py printed."
        )
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def draw(runs: list[Path], folder: Path) -> list[Path]:
    """Write one PNG per entry of FIGURES that has data; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = {run.name: read_metrics(run) for run in runs}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panels in FIGURES.items():
        present = {metric for rows in data.values() for row in rows for metric in row}
        panels = [p for p in panels if present & set(p.metrics.values())]
        if not panels:
            continue
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False
        )
        for ax, panel in zip(axes[0], panels, strict=True):
            for run, rows in data.items():
                for label, metric in panel.metrics.items():
                    points = [
                        (row["step"], row[metric]) for row in rows if row.get(metric) is not None
                    ]
                    if points:
                        label = label if len(data) == 1 else f"{run}: {label}"
                        ax.plot(
                            *zip(*points, strict=True),
                            label=label,
                            marker="o" if len(points) < 8 else None,
                        )
            ax.set(title=panel.title, xlabel="step")
            ax.title.set_fontsize(10)
            ax.grid(alpha=0.3)
            if len(ax.lines) > 1:
                ax.legend(fontsize=7)
        figure.tight_layout()
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
        pyplot.close(figure)
    return written


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the figures (default: RUN_DIR/figures of the first run)",
    )
    args = parser.parse_args()
    for file in draw(args.runs, args.output or args.runs[0] / "figures"):
        print(file)


if __name__ == "__main__":
    main()
