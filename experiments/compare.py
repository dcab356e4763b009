"""A fair comparison on long chains: GRPO, PPO with two lambdas and JustRL II, equal sampled tokens.

`python -m experiments.compare PART`, from the root of the project:

    grid          the same learning rates for every algorithm, one seed
    main          each at its best rate, five other seeds, clean and noisy labels
    longer        the four with two thirds more tokens, clean labels
    ablations     JustRL II with one change at a time
    bounds        JustRL II when its critic knows nothing, and when it knows all
    groups        GRPO and JustRL II with two responses to a problem
    controls      GRPO with rewards that ignore the label
    muon          GRPO with two optimizers
    real          three algorithms and a control on SmolLM2-135M, one seed
    real-groups   the same model with two responses to a problem, two seeds
    report        tables and figures from the runs that are there

`make compare` does all of it but the last two; `make compare-real` fetches their model and does the
first. A run is a directory of train.py; one that is complete is not made again. Every algorithm
starts from the same model, sees the same problems in the same order and samples as many responses
per step as the others, the steps that warm up its critic included. Seeds are paired, and evaluation
draws the same random numbers for all. docs/results.md has the outcome.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median_low
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import distributed
import files
from config import ROOT
from files import config_of, read_rows, writing
from run.scores import resamples
from train import EMPTY_STEPS

# 128 responses per step, none drawn again: equal steps are equal tokens, but for their lengths.
COMMON = f"""--model {ROOT}/assets/tiny-long-base --eval-data {ROOT}/assets/long-eval.jsonl
    --steps 24 --prompts-per-step 16 --group-size 8 --max-refills 0 --max-response-tokens 128
    --slots 128 --eval-every 6 --eval-samples 4 --save-every 0 --log-samples 0""".split()
CRITIC = "--num-critic-only-steps 4 --critic-lr 2e-3 --critic-updates-per-step 4"
GRPO, JUSTRL2 = "--algorithm grpo", f"--algorithm justrl2 {CRITIC}"
ALGORITHMS = {
    "GRPO": GRPO,
    "PPO, λ = 0.95": f"--algorithm ppo {CRITIC}",
    "PPO, λ = 1": f"--algorithm ppo --gae-lambda 1 {CRITIC}",
    "JustRL II": JUSTRL2,
}
MUON = {"GRPO, Muon": f"{GRPO} --optimizer muon"}
TUNED = ALGORITHMS | MUON
PENALTY = "--overlong-buffer-tokens 64"  # the longer half of the chains
ABLATIONS = {
    "JustRL II": JUSTRL2,
    "JustRL II, k = 0.02": f"{JUSTRL2} --gae-lambda-k 0.02",
    "JustRL II, k = 1": f"{JUSTRL2} --gae-lambda-k 1",
    "JustRL II, no warm-up": f"{JUSTRL2} --num-critic-only-steps 0",
    "JustRL II, warm-up 10": f"{JUSTRL2} --num-critic-only-steps 10",
    "JustRL II, one critic pass": f"{JUSTRL2} --critic-updates-per-step 1",
    "JustRL II, critic lr 5e-4": f"{JUSTRL2} --critic-lr 5e-4",
    "JustRL II, bias init 0": f"{JUSTRL2} --critic-value-bias-init 0",
    "JustRL II, no whitening": f"{JUSTRL2} --no-whiten-advantages",
    "JustRL II, group centred": f"{JUSTRL2} --algorithm justrl2_group",
    "JustRL II, penalty": f"{JUSTRL2} {PENALTY}",
    "JustRL II, penalty in the target": f"{JUSTRL2} {PENALTY} --critic-sees-penalty",
}
LONGER = {f"{label}, 40 steps": f"{flags} --steps 40" for label, flags in ALGORITHMS.items()}
NO_WARM_UP = "--num-critic-only-steps 0"
BOUNDS = {  # with an oracle the program is experiments/long_oracle.py
    "GRPO": GRPO,
    "JustRL II, no warm-up": ABLATIONS["JustRL II, no warm-up"],
    "JustRL II, V = 0.5": f"--algorithm justrl2 {NO_WARM_UP} --critic-lr 0",
    "JustRL II, oracle": f"--algorithm justrl2 {NO_WARM_UP}",
    # Where one update follows one rollout, PPO differs from JustRL II in λ and the critic's target.
    "JustRL II, oracle, λ = 0": f"--algorithm ppo --gae-lambda 0 {NO_WARM_UP}",
}
PAIRS = "--prompts-per-step 64 --group-size 2"
# A critic can learn from groups that are all right or all wrong.
KEEP_ALL = "--no-dynamic-sampling"
GROUPS_OF_TWO = {
    "GRPO, groups of 2": f"{GRPO} {PAIRS}",
    "GRPO, batch mean, groups of 2": f"{GRPO} --algorithm reinforce_pp {PAIRS} {KEEP_ALL}",
    "JustRL II, groups of 2": f"{JUSTRL2} {NO_WARM_UP} {PAIRS} {KEEP_ALL}",
    "JustRL II, V = 0.5, groups of 2": f"{BOUNDS['JustRL II, V = 0.5']} {PAIRS} {KEEP_ALL}",
    "JustRL II, groups of 8": f"{JUSTRL2} {NO_WARM_UP} {KEEP_ALL}",
}
CONTROLS = {"GRPO": GRPO} | {
    f"GRPO, reward {kind}": f"{GRPO} --reward {kind}"
    for kind in ("random", "majority", "format_only")
}
# A real checkpoint as far as a CPU goes; these flags follow COMMON and win.
REAL_MODEL = ROOT / "runs/smollm2-135m"
SUMS = f"""--model {REAL_MODEL} --data {ROOT}/assets/sums-train.jsonl
    --eval-data {ROOT}/assets/sums-eval.jsonl --dtype bfloat16 --steps 14 --prompts-per-step 8
    --group-size 4 --max-prompt-tokens 80 --max-response-tokens 20 --eval-every 7 --eval-samples 1
    --log-samples -1"""
SUMS_CRITIC = "--num-critic-only-steps 1 --critic-lr 2e-5 --critic-lr-warmup-steps 0"
REAL = {
    "GRPO, SmolLM2": f"--algorithm grpo {SUMS}",
    "PPO, SmolLM2": f"--algorithm ppo {SUMS} {SUMS_CRITIC}",
    "JustRL II, SmolLM2": f"--algorithm justrl2 {SUMS} {SUMS_CRITIC}",
    "GRPO, SmolLM2, reward random": f"--algorithm grpo {SUMS} --reward random --steps 7",
}
REAL_PAIRS = f"{SUMS} --prompts-per-step 16 --group-size 2"
REAL_GROUPS = {
    "GRPO, SmolLM2, groups of 2": f"--algorithm grpo {REAL_PAIRS}",
    "GRPO, batch mean, SmolLM2, groups of 2": f"--algorithm reinforce_pp {REAL_PAIRS} {KEEP_ALL}",
    "JustRL II, SmolLM2, groups of 2": f"""--algorithm justrl2 {REAL_PAIRS} {KEEP_ALL} {NO_WARM_UP}
        --critic-lr 1e-4 --critic-lr-warmup-steps 0 --critic-updates-per-step 2""",
}
REAL_RATE = "1e-5"
RATES = ("3e-4", "6e-4", "1.2e-3")
MUON_RATES = ("3e-4", "6e-4", "1.2e-3", "2.4e-3", "4.8e-3")  # its best was at the edge of RATES
GRID_SEED, SEEDS, FEW_SEEDS = 100, range(5), range(2)
NOISE = 0.15  # share of wrong labels in the noisy training problems
CRITIC_KEYS = "explained_variance_within", "mid_auc", "end_auc"


class Job(NamedTuple):
    """One run of train.py, or of the same with an oracle for a critic."""

    label: str
    variant: str  # labels: clean or noisy
    rate: str
    seed: int
    flags: str

    @property
    def program(self) -> list[str]:
        """What runs it, as arguments of Python."""
        return ["-m", "experiments.long_oracle"] if "oracle" in self.label else ["train.py"]

    def folder(self, root: Path) -> Path:
        """Where it is, or will be."""
        plain = "".join(c if c.isalnum() or c in ".=" else "-" for c in self.label)
        return root / f"{self.variant}_{plain}_lr{self.rate}_seed{self.seed}"


# ---- running


def write_noisy(path: Path) -> None:
    """The training problems, a share NOISE of the labels replaced by another digit."""
    rng = random.Random(0)
    rows = list(read_rows(ROOT / "assets/long-train.jsonl"))
    for row in rng.sample(rows, round(NOISE * len(rows))):
        row["label"] = rng.choice([d for d in "01234" if d != row["label"]])
    files.write_jsonl(path, rows)


def is_complete(folder: Path) -> bool:
    """The last step of the run is in its metrics, or train.py gave up for want of a signal."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    if not rows:
        return False
    gave_up = all(row.get("rollout/groups_kept") == 0 for row in rows[-EMPTY_STEPS:])
    return gave_up or rows[-1]["step"] == config_of(folder)["steps"]


def execute(job: Job, root: Path) -> None:
    """Run train.py in a process of its own; an interrupted run goes on or begins again."""
    folder = job.folder(root)
    data = root / "noisy.jsonl" if job.variant == "noisy" else ROOT / "assets/long-train.jsonl"
    command = [sys.executable, *job.program, "--output-dir", str(folder.resolve())]
    command += ["--resume"] if (folder / "config.json").exists() else []
    command += [*COMMON, "--data", str(data.resolve()), "--lr", job.rate, "--seed", str(job.seed)]
    log = root / f"{folder.name}.log"
    with open(log, "w") as out:
        one_core = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, *job.flags.split()], cwd=ROOT, stdout=out, stderr=out, env=one_core
        )
    if done.returncode:
        raise SystemExit(f"error: {job.label} ended with status {done.returncode}; see {log}.")


def run_all(jobs: Iterable[Job], root: Path, parallel: int) -> None:
    """All jobs that are not complete, `parallel` at a time."""
    with writing("--output-dir", root):
        root.mkdir(parents=True, exist_ok=True)
    write_noisy(root / "noisy.jsonl")
    waiting = [job for job in jobs if not is_complete(job.folder(root))]
    with ThreadPoolExecutor(parallel) as pool:
        done = pool.map(lambda job: execute(job, root), waiting)
        list(tqdm(done, total=len(waiting), disable=None))


# ---- which runs


def grid_jobs(root: Path) -> list[Job]:
    """Every algorithm at every rate, with a seed that is not used again."""
    return [
        Job(label, "clean", rate, GRID_SEED, flags)
        for label, flags in TUNED.items()
        for rate in (MUON_RATES if label in MUON else RATES)
    ]


def best_rates(root: Path) -> dict[str, str]:
    """For each algorithm the rate of the grid with the largest accuracy averaged over tokens."""
    jobs = grid_jobs(root)
    if missing := [job for job in jobs if not is_complete(job.folder(root))]:
        raise ValueError(f"{missing[0].folder(root)} is not complete; run the grid first.")
    runs = [read_run(job, root) for job in jobs]
    budgets = common_budgets(runs)
    area = lambda run: accuracy_at(run, budgets).mean()
    of_label = lambda label: [run for run in runs if run["label"] == label]
    return {label: max(of_label(label), key=area)["rate"] for label in TUNED}


def main_jobs(root: Path) -> list[Job]:
    """Every algorithm at its best rate; seed by seed, so that half a comparison is paired too."""
    rates = best_rates(root)
    return [
        Job(label, variant, rates[label], seed, flags)
        for seed in SEEDS
        for variant in ("clean", "noisy")
        for label, flags in ALGORITHMS.items()
    ]


def few_jobs(root: Path, rows: dict[str, str], seeds: Iterable[int] = FEW_SEEDS) -> list[Job]:
    """Rows on some seeds of the comparison, at the best rate of the algorithm they vary, with whose
    label theirs begins.
    """
    rates = best_rates(root)
    varied = lambda label: max((name for name in rates if label.startswith(name)), key=len)
    return [
        Job(label, "clean", rates[varied(label)], seed, flags)
        for seed in seeds
        for label, flags in rows.items()
    ]


def real_jobs(rows: dict[str, str], seeds: Iterable[int]) -> list[Job]:
    """Rows on a real model, whose rate is not tuned."""
    return [
        Job(label, "clean", REAL_RATE, seed, flags)
        for seed in seeds
        for label, flags in rows.items()
    ]


# ---- reading


def read_run(job: Job, root: Path) -> dict:
    """Held-out accuracy over sampled tokens, seconds, and what the critic cost and knew."""
    folder = job.folder(root)
    rows, size = list(read_rows(folder / "metrics.jsonl")), config_of(folder)["group_size"]
    tokens, curve = 0.0, []
    for row in rows:
        # Every response counts, kept or not; without over-sampling none is aborted.
        responses = size * row.get("rollout/groups_finished", 0)
        tokens += responses * row.get("rollout/response_length_mean", 0.0)
        if "eval/accuracy" in row:
            curve.append((tokens, row["eval/accuracy"]))
    seconds = lambda *keys: sum(row.get(f"perf/{key}_s", 0.0) for row in rows for key in keys)
    run = job._asdict() | {"tokens": tokens, "curve": curve, "seconds": seconds("step")}
    run["critic_seconds"] = seconds("score_critic", "update_critic")
    for key in CRITIC_KEYS:  # over the second half of the run
        values = [row.get(f"critic/{key}") for row in rows[len(rows) // 2 :]]
        known = [value for value in values if value is not None]
        run |= {key: mean(known)} if known else {}
    return run


def common_budgets(runs: list[dict]) -> np.ndarray:
    """101 token budgets from 0 to the median of the runs' tokens.

    A run with fewer keeps its last accuracy: one whose responses collapsed must not cut all short.
    """
    return np.linspace(0, median_low(run["tokens"] for run in runs), 101)


def accuracy_at(run: dict, budgets: np.ndarray) -> np.ndarray:
    """Held-out accuracy after `budgets` sampled tokens, on straight lines between evaluations."""
    return np.interp(budgets, *zip(*run["curve"], strict=True))


def band(curves: np.ndarray) -> list[list[float]]:
    """Mean over seeds and its 95 % band by bootstrap over seeds: (S, X) -> three times (X,)."""
    means = curves[resamples(len(curves), seed=0).numpy()].mean(1)
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return [x.tolist() for x in (curves.mean(0), low, high)]


def summarise(runs: list[dict], reference: str | None) -> list[dict]:
    """One row per variant, label and rate: accuracy over tokens, its paired difference to
    `reference` over the seeds that both have, and the cost.
    """
    budgets = common_budgets(runs)
    curves = {(r["variant"], r["label"], r["seed"]): accuracy_at(r, budgets) for r in runs}
    table = []
    for key in dict.fromkeys((r["variant"], r["label"], r["rate"]) for r in runs):
        mine = [r for r in runs if (r["variant"], r["label"], r["rate"]) == key]
        accuracy = np.stack([accuracy_at(r, budgets) for r in mine])
        row = dict(zip(("variant", "label", "rate"), key, strict=True)) | {"seeds": len(mine)}
        row |= {"budgets": budgets.tolist(), "accuracy": band(accuracy)}
        row |= {"area": accuracy.mean(), "end": accuracy[:, -1].mean()}
        paired = [i for i, r in enumerate(mine) if (key[0], reference, r["seed"]) in curves]
        if paired and key[1] != reference:
            base = np.stack([curves[key[0], reference, mine[i]["seed"]] for i in paired])
            change = accuracy[paired] - base
            row |= {"difference": band(change), "area_difference": band(change.mean(1)[:, None])}
            row |= {"end_difference": band(change[:, -1:])}
        for name in ("tokens", "seconds", "critic_seconds", *CRITIC_KEYS):
            values = [r[name] for r in mine if name in r]
            row |= {name: mean(values)} if values else {}
        table.append(row)
    return table


def as_text(table: list[dict], reference: str | None) -> str:
    """The table in Markdown; `mean` is over tokens."""
    against = f"mean against {reference}|end against {reference}" if reference else "|"
    heads = f"labels|algorithm|lr|seeds|mean|end|{against}|seconds"
    heads = [*heads.split("|"), "critic's share", "EV within groups", "mid AUC", "end AUC"]
    change = lambda middle, low, high: f"{middle[0]:+.3f} ({low[0]:+.3f} to {high[0]:+.3f})"
    lines = [heads, ["---"] * len(heads)]
    for row in table:
        cells = [row["variant"], row["label"], row["rate"], str(row["seeds"])]
        cells += [f"{row['area']:.3f}", f"{row['end']:.3f}"]
        paired = "area_difference" in row
        cells += [change(*row[f"{name}_difference"]) if paired else "" for name in ("area", "end")]
        cells += [f"{row['seconds']:.0f}", f"{row['critic_seconds'] / row['seconds']:.0%}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in CRITIC_KEYS]
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(table: list[dict], path: Path, reference: str) -> None:
    """Above: accuracy over sampled tokens; below: its paired difference to `reference`."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(row["variant"] for row in table))
    names = list(dict.fromkeys((row["label"], row["rate"]) for row in table))
    figure = Figure(figsize=(5.4 * len(variants), 6.6), layout="tight")
    axes = figure.subplots(2, len(variants), squeeze=False, sharex=True, sharey="row")
    for row in table:
        column = axes[:, variants.index(row["variant"])]
        number = names.index((row["label"], row["rate"]))
        for ax, name in zip(column, ("accuracy", "difference"), strict=True):
            if name in row:
                thousands, (middle, *edges) = np.array(row["budgets"]) / 1000, row[name]
                label = f"{row['label']} (lr {row['rate']}, {row['seeds']} seeds)"
                ax.plot(thousands, middle, color=f"C{number}", label=label)
                ax.fill_between(thousands, *edges, color=f"C{number}", alpha=0.15, lw=0)
        column[0].set_title(f"{row['variant']} labels", fontsize=10)
        column[1].set_xlabel("sampled tokens (thousands)")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out accuracy")
    axes[1, 0].set_ylabel(f"difference to {reference}, same seeds")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def report(jobs: list[Job], root: Path, name: str, reference: str | None) -> None:
    """NAME.json, NAME.md and, with a reference, NAME.png from the `jobs` that are complete."""
    done = [job for job in jobs if is_complete(job.folder(root))]
    print(f"\n{name}: {len(done)} of {len(jobs)} runs are complete")
    if done:
        table = summarise([read_run(job, root) for job in done], reference)
        (root / f"{name}.json").write_text(json.dumps(table, indent=1))
        (root / f"{name}.md").write_text(text := as_text(table, reference))
        if reference:
            draw(table, root / f"{name}.png", reference)
        print(text)


PARTS = {  # the runs of each, and what they are compared with
    "grid": (grid_jobs, None),  # its rates have no pairs
    "main": (main_jobs, "GRPO"),
    "longer": (lambda root: few_jobs(root, LONGER, SEEDS), "GRPO, 40 steps"),
    "ablations": (lambda root: few_jobs(root, ABLATIONS), "JustRL II"),
    "bounds": (lambda root: few_jobs(root, BOUNDS, SEEDS), "GRPO"),
    "groups": (lambda root: few_jobs(root, GROUPS_OF_TWO, SEEDS), "GRPO, groups of 2"),
    "controls": (lambda root: few_jobs(root, CONTROLS), "GRPO"),
    "muon": (lambda root: few_jobs(root, {"GRPO": GRPO} | MUON), "GRPO"),
    "real": (lambda root: real_jobs(REAL, [0]), "GRPO, SmolLM2"),
    "real-groups": (
        lambda root: real_jobs(REAL_GROUPS, FEW_SEEDS),
        "GRPO, SmolLM2, groups of 2",
    ),
}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("part", choices=("all", *PARTS, "report"))
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/compare")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one CPU core each")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be above 0")
    with distributed.command("stopped; the same command goes on from here."):
        real = [part for part in PARTS if part.startswith("real")]
        if args.part in real and not (REAL_MODEL / "model.safetensors").exists():
            raise FileNotFoundError(f"no model in {REAL_MODEL}; `make compare-real` fetches it.")
        parts = {"all": [part for part in PARTS if part not in real], "report": PARTS}
        for part in parts.get(args.part, [args.part]):
            make(part, args.output_dir, args.jobs, args.part == "report")


def make(part: str, root: Path, jobs: int, only_report: bool) -> None:
    """The missing runs of a part, unless only what is there counts, and its report."""
    find, reference = PARTS[part]
    try:
        runs = find(root)
    except ValueError as error:  # the grid, which gives the others their rates, is not complete
        if not only_report:
            raise
        print(f"\n{part}: left out, {error}")
        return
    if not only_report:
        run_all(runs, root, jobs)
    report(runs, root, part, reference)


if __name__ == "__main__":
    main()
