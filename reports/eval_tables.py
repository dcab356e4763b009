"""What eval.py shows: the table of a checkpoint, and table and figure of a comparison."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from run.scores import LEVEL, subset_sizes
from sampler.sampling import Truncation

KINDS = ("pass", "maj", "best")  # scores that are given for every k


def print_result(report: dict, role: str, data: str) -> None:
    """The table of one model (role: model or compare) on one set."""
    settings, result = report["settings"], report[role]["sets"][data]
    dropped = f", {result['dropped']} dropped: too long" if result["dropped"] else ""
    print(
        f"\n{report[role]['path']} on {data}: {result['problems']} problems x {settings['n']} = "
        f"{result['responses']} responses{dropped}"
    )
    print_table(settings | {"think": result["think"]}, result["scores"])
    if "maj@1" not in result["scores"]:
        print("no maj@k: some of these problems are of a kind that has no answer to vote for.")
    if result["scores"]["truncated"]["value"] > 0.5:
        print("WARNING: most responses were cut off; raise --max-response-tokens.")


def print_comparison(report: dict, data: str) -> None:
    """The differences on one set, where the change of avg comes from, and which problems were
    gained and lost.
    """
    before, after = report["model"]["path"], report["compare"]["path"]
    comparison = report["comparison"][data]
    print(f"\n{after} minus {before} on {data}, paired over problems")
    print_table(report["settings"], comparison["differences"], sign="+")
    parts = comparison["avg_change"]
    print("avg changed by " + " ".join(f"{x:+.3f} ({name})" for name, x in parts.items()))
    for name in ("gained", "lost"):
        moved = [f"{m['id']} ({m['before']} -> {m['after']})" for m in comparison[name]]
        more = ", ..." if len(moved) > 5 else ""
        print(f"{name} {len(moved)} problems{': ' if moved else ''}{', '.join(moved[:5])}{more}")


def print_table(settings: dict, scores: dict[str, dict], sign: str = "") -> None:
    """Settings, then scores with their bands: one row per k, then the others."""
    print(settings_line(settings))
    kinds = [kind for kind in KINDS if f"{kind}@1" in scores]
    print(f"{'k':>12}  {row_of_cells(f'{kind}@k' for kind in kinds)}")
    for k in subset_sizes(settings["n"]):
        cells = (cell(scores, f"{kind}@{k}", sign) for kind in kinds)
        print(f"{k:12}  {row_of_cells(cells)}")
    for name in scores:
        if name.split("@")[0] not in kinds:
            print(f"{name:>12}  {cell(scores, name, sign)}")


def settings_line(settings: dict) -> str:
    """What two tables must share for their numbers to be comparable."""
    forced = f" + {settings['answer_tokens']} forced" if settings["force_budget"] else ""
    whole = asdict(Truncation())
    cut = [f", {name} {settings[name]:g}" for name in whole if settings[name] != whole[name]]
    line = (
        "n {n}, temperature {temperature:g}{cut}, {max_response_tokens} tokens{forced}, "
        "think {think}, {dtype}, seed {seed}, verifier {verifier}; "
        "[{level:.0%} bands over {over}, {resamples} resamples]"
    )
    return line.format_map(settings | settings["bands"] | {"cut": "".join(cut), "forced": forced})


def cell(scores: dict[str, dict], name: str, sign: str) -> str:
    """A score and its band: value [low, high]."""
    places = 1 if name == "length" else 3
    # Adding 0.0 turns a rounded -0.0 into 0.0, lest it read as a loss.
    value, low, high = (
        f"{round(scores[name][part], places) + 0.0:{sign}.{places}f}"
        for part in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]"


def row_of_cells(cells: Iterable[str]) -> str:
    """Cells in columns of one width."""
    return "  ".join(f"{text:24}" for text in cells).rstrip()


def draw_comparison(report: dict, file: Path) -> None:
    """Per set: scores over k of both models, their paired difference, and every problem's move."""
    try:
        from matplotlib.figure import Figure
    except ImportError:  # hours of sampling must not be lost to a missing plotting package
        print(f"no {file}: drawing needs `pip install matplotlib`; the numbers are saved.")
        return
    n, sets = report["settings"]["n"], list(report["comparison"])
    figure = Figure(figsize=(13.5, 3.8 * len(sets)), layout="tight")
    axes = figure.subplots(len(sets), 3, squeeze=False)
    for (left, middle, right), data in zip(axes, sets, strict=True):
        before, after = (report[role]["sets"][data] for role in ("model", "compare"))
        draw_scores(left, n, before["scores"], "before", "o--")
        draw_scores(left, n, after["scores"], "after", "o-")
        left.set_title(Path(data).name, fontsize=10)
        draw_scores(middle, n, report["comparison"][data]["differences"], "", "o-")
        middle.axhline(0, color="grey", linewidth=0.8)
        middle.set_title(f"after - before, paired, {LEVEL:.0%} bands", fontsize=10)
        draw_moves(right, n, before["per_problem"], after["per_problem"])
    figure.savefig(file, dpi=110)
    print(f"figure: {file}")


def draw_scores(ax, n: int, scores: dict, label: str, style: str) -> None:
    """Curves of pass@k, maj@k and best@k over k, with their bands."""
    ks = subset_sizes(n)
    for number, kind in enumerate(KINDS):
        if f"{kind}@1" in scores:
            parts = ("value", "low", "high")
            value, low, high = ([scores[f"{kind}@{k}"][part] for k in ks] for part in parts)
            ax.plot(ks, value, style, color=f"C{number}", label=f"{kind}@k {label}")
            ax.fill_between(ks, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ks, ks)
    ax.set_xlabel("k")
    ax.legend(fontsize=7, handlelength=4)


def draw_moves(ax, n: int, before: list[dict], after: list[dict]) -> None:
    """Problems by how many of their n responses were right before and after."""
    moves = Counter((a["right"], b["right"]) for a, b in zip(before, after, strict=True))
    # Many problems share a point, so its area says how many.
    ax.scatter(*zip(*moves, strict=True), s=[9 * count for count in moves.values()], alpha=0.5)
    ax.plot([0, n], [0, n], color="grey", linewidth=0.8)
    ax.set(xlabel=f"right of {n} before", ylabel=f"right of {n} after")
    ax.set_title("problems (area: their number)", fontsize=10)
