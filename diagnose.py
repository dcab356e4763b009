"""Figures of runs, a report to look at, and the algorithms side by side.

    python diagnose.py RUN_DIR [RUN_DIR ...]               figures; several runs are overlaid
    python diagnose.py --report RUN_DIR [RUN_DIR ...]      also report.html, with coloured samples
    python diagnose.py --explain                           two tables from built-in numbers
    python diagnose.py --explain --from RUN_DIR --step N   the first, of a stored group of a run

Figures go to RUN_DIR/figures and the report to RUN_DIR (of the first run). docs/critic.md says how
to read the figures of the critic.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from reports import figures, html


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags and run directories; exits with a usage message if they do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories to draw")
    parser.add_argument("--output", type=Path, help="folder of the figures")
    parser.add_argument("--report", action="store_true", help="also write RUN_DIR/report.html")
    parser.add_argument("--explain", action="store_true", help="print the tables")
    parser.add_argument("--from", dest="source", type=Path, help="run with a stored group")
    parser.add_argument("--step", type=int, help="step of that group")
    args = parser.parse_args(argv)
    if args.explain:
        of_figures = args.runs or args.report or args.output
        fits = not of_figures and (args.source is None) == (args.step is None)
    else:
        fits = args.runs and args.source is None and args.step is None
    if not fits:
        parser.error(
            "give [--report] RUN_DIR ..., or --explain, or --explain --from RUN_DIR --step N"
        )
    return args


def print_tables(run: Path | None, step: int | None) -> None:
    """The tables of --explain: of a stored group, or both of built-in numbers."""
    from reports import explain  # here: it imports torch, which figures do without

    if run:
        print(explain.advantage_table(explain.stored_group(run, step)))
    else:
        group = explain.example_group()
        print(explain.advantage_table(group), explain.weight_table(), sep="\n\n")


def write_figures(runs: Sequence[Path], folder: Path, report: bool) -> None:
    """Draw the runs, and write report.html of the first if asked for; print every file."""
    files = figures.draw_runs(runs, folder)
    print(*files, sep="\n")
    if report:
        print(html.write_report(runs[0], files))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    args = parse(argv)
    try:
        if args.explain:
            print_tables(args.source, args.step)
        else:
            write_figures(args.runs, args.output or args.runs[0] / "figures", args.report)
    except (OSError, ValueError, ImportError) as error:  # a file is missing or broken, or a package
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
