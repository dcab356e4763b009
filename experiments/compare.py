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
draws the same random numbers for all. docs/results.md has the outcome, experiments/results.md all
of it.
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
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import distributed
import files
from config import ROOT
from files import config_of, read_rows, writing
from run.scores import resamples
from train import EMPTY_STEPS

LONG_TRAIN = ROOT / "assets/long-train.jsonl"
# Flags of train.py by name, as run_flags writes them. `a | b` is a with what b says otherwise.
# 128 responses per step, none drawn again: equal steps are equal tokens, but for their lengths.
COMMON = dict(
    model=f"{ROOT}/assets/tiny-long-base", eval_data=f"{ROOT}/assets/long-eval.jsonl", steps=24,
    prompts_per_step=16, group_size=8, max_refills=0, max_response_tokens=128, slots=128,
    eval_every=6, eval_samples=4, save_every=0, log_samples=0,
)  # fmt: skip
# The warm-up samples too and comes out of the same budget: 20 updates of the policy, GRPO has 24.
# These settings come from five short runs beforehand and serve every algorithm with a critic.
CRITIC = dict(num_critic_only_steps=4, critic_lr="2e-3", critic_updates_per_step=4)


class Arm(NamedTuple):
    """One row of a table: what is trained, apart from labels and seed."""

    label: str
    flags: dict[str, Any]  # of train.py, over COMMON
    rate_of: str = ""  # the label in the grid whose best learning rate it takes,
    rate: str = ""  # unless it has a rate of its own
    oracle: bool = False  # the critic knows: experiments/long_oracle.py instead of train.py

    def but(self, change: str, **flags) -> "Arm":
        """The same at the same rate with some flags changed, and that said in its label."""
        return self._replace(label=f"{self.label}, {change}", flags=self.flags | flags)


GRPO = Arm("GRPO", dict(algorithm="grpo"), "GRPO")
JUSTRL2 = Arm("JustRL II", dict(algorithm="justrl2", **CRITIC), "JustRL II")
ALGORITHMS = [
    GRPO,
    Arm("PPO, λ = 0.95", dict(algorithm="ppo", **CRITIC), "PPO, λ = 0.95"),
    Arm("PPO, λ = 1", dict(algorithm="ppo", gae_lambda=1, **CRITIC), "PPO, λ = 1"),
    JUSTRL2,
]
MUON = Arm("GRPO, Muon", dict(algorithm="grpo", optimizer="muon"), "GRPO, Muon")
RATES = ("3e-4", "6e-4", "1.2e-3")
MUON_RATES = (*RATES, "2.4e-3", "4.8e-3")  # its best was at the edge of RATES
GRID = [arm._replace(rate=rate) for arm in ALGORITHMS for rate in RATES]
GRID += [MUON._replace(rate=rate) for rate in MUON_RATES]
LONGER = [arm.but("40 steps", steps=40) for arm in ALGORITHMS]
NO_WARM_UP = JUSTRL2.but("no warm-up", num_critic_only_steps=0)
PENALTY = dict(overlong_buffer_tokens=64)  # the longer half of the chains
ABLATIONS = [
    JUSTRL2,
    JUSTRL2.but("k = 0.02", gae_lambda_k=0.02),
    JUSTRL2.but("k = 1", gae_lambda_k=1),
    NO_WARM_UP,
    JUSTRL2.but("warm-up 10", num_critic_only_steps=10),
    JUSTRL2.but("one critic pass", critic_updates_per_step=1),
    JUSTRL2.but("critic lr 5e-4", critic_lr="5e-4"),
    JUSTRL2.but("bias init 0", critic_value_bias_init=0),
    JUSTRL2.but("no whitening", whiten_advantages=False),
    JUSTRL2.but("group centred", algorithm="justrl2_group"),
    JUSTRL2.but("penalty", **PENALTY),
    JUSTRL2.but("penalty in the target", **PENALTY, critic_sees_penalty=True),
]
# An untrained critic needs no settings: V stays where it starts, or the oracle computes it.
UNTRAINED = JUSTRL2._replace(flags=dict(algorithm="justrl2", num_critic_only_steps=0))
CONSTANT = UNTRAINED.but("V = 0.5", critic_lr=0)
ORACLE = UNTRAINED.but("oracle")._replace(oracle=True)
BOUNDS = [
    GRPO,
    NO_WARM_UP,
    CONSTANT,
    ORACLE,
    # Where one update follows one rollout, PPO differs from JustRL II in λ and the critic's target.
    ORACLE.but("λ = 0", algorithm="ppo", gae_lambda=0),
]
# 64 x 2 are 128 responses a step, as in COMMON
TWO = dict(prompts_per_step=64, group_size=2)
# A critic can learn from groups that are all right or all wrong.
KEEP_ALL = dict(dynamic_sampling=False)
GROUPS_OF_TWO = [
    GRPO.but("groups of 2", **TWO),
    GRPO.but("batch mean, groups of 2", **TWO, **KEEP_ALL, algorithm="reinforce_pp"),
    JUSTRL2.but("groups of 2", **TWO, **KEEP_ALL, num_critic_only_steps=0),
    CONSTANT.but("groups of 2", **TWO, **KEEP_ALL),
    JUSTRL2.but("groups of 8", **KEEP_ALL, num_critic_only_steps=0),
]
CONTROLS = [GRPO]
CONTROLS += [GRPO.but(f"reward {x}", reward=x) for x in ("random", "majority", "format_only")]

# A real checkpoint, as far as a CPU goes; its rate is not tuned.
REAL_MODEL = ROOT / "runs/smollm2-135m"
SUMS = dict(
    model=REAL_MODEL, data=f"{ROOT}/assets/sums-train.jsonl",
    eval_data=f"{ROOT}/assets/sums-eval.jsonl", dtype="bfloat16", steps=14, prompts_per_step=8,
    group_size=4, max_prompt_tokens=80, max_response_tokens=20, eval_every=7, eval_samples=1,
    log_samples=-1,
)  # fmt: skip
SUMS_CRITIC = dict(num_critic_only_steps=1, critic_lr="2e-5", critic_lr_warmup_steps=0)


def on_sums(label: str, **flags) -> Arm:
    """An arm on the real model."""
    return Arm(label, SUMS | flags, rate="1e-5")


REAL = [
    on_sums("GRPO, SmolLM2", algorithm="grpo"),
    on_sums("PPO, SmolLM2", algorithm="ppo", **SUMS_CRITIC),
    on_sums("JustRL II, SmolLM2", algorithm="justrl2", **SUMS_CRITIC),
    on_sums("GRPO, SmolLM2, reward random", algorithm="grpo", reward="random", steps=7),
]
# 16 x 2 are 32 responses a step, as in SUMS
REAL_TWO = dict(prompts_per_step=16, group_size=2)
FASTER_CRITIC = dict(
    num_critic_only_steps=0, critic_lr="1e-4", critic_lr_warmup_steps=0, critic_updates_per_step=2
)
REAL_GROUPS = [
    on_sums("GRPO, SmolLM2, groups of 2", algorithm="grpo", **REAL_TWO),
    on_sums(
        "GRPO, batch mean, SmolLM2, groups of 2",
        algorithm="reinforce_pp", **REAL_TWO, **KEEP_ALL,
    ),
    on_sums(
        "JustRL II, SmolLM2, groups of 2",
        algorithm="justrl2", **REAL_TWO, **KEEP_ALL, **FASTER_CRITIC,
    ),
]  # fmt: skip
NOISE = 0.15  # share of wrong labels in the noisy training problems
CRITIC_KEYS = "explained_variance_within", "mid_auc", "end_auc"


class Part(NamedTuple):
    """The runs of one table, and the label that its differences are to."""

    arms: list[Arm]
    seeds: Iterable[int]
    reference: str | None
    variants: tuple[str, ...] = ("clean",)  # of the training labels: clean or noisy


SEEDS, FEW_SEEDS = range(5), range(2)
PARTS = {
    # Its seed is not used again. Its rates have no pairs, so it has no differences.
    "grid": Part(GRID, [100], None),
    "main": Part(ALGORITHMS, SEEDS, "GRPO", ("clean", "noisy")),
    "longer": Part(LONGER, SEEDS, "GRPO, 40 steps"),
    "ablations": Part(ABLATIONS, FEW_SEEDS, "JustRL II"),
    "bounds": Part(BOUNDS, SEEDS, "GRPO"),
    "groups": Part(GROUPS_OF_TWO, SEEDS, "GRPO, groups of 2"),
    "controls": Part(CONTROLS, FEW_SEEDS, "GRPO"),
    "muon": Part([GRPO, MUON], FEW_SEEDS, "GRPO"),
    "real": Part(REAL, [0], "GRPO, SmolLM2"),
    "real-groups": Part(REAL_GROUPS, FEW_SEEDS, "GRPO, SmolLM2, groups of 2"),
}


class Job(NamedTuple):
    """One run of train.py, or of the same with an oracle for a critic."""

    arm: Arm
    variant: str
    rate: str
    seed: int

    def folder(self, root: Path) -> Path:
        """Where it is, or will be."""
        # All that tells runs apart is in the name, so that parts with a run in common make it once
        plain = "".join(c if c.isalnum() or c in ".=" else "-" for c in self.arm.label)
        return root / f"{self.variant}_{plain}_lr{self.rate}_seed{self.seed}"

    def command(self, root: Path) -> list[str]:
        """What runs it, as arguments of Python; an interrupted run goes on or begins again."""
        program = ["-m", "experiments.long_oracle"] if self.arm.oracle else ["train.py"]
        folder = self.folder(root)
        data = root / "noisy.jsonl" if self.variant == "noisy" else LONG_TRAIN
        run = dict(data=data.resolve(), lr=self.rate, seed=self.seed)
        resume = ["--resume"] if (folder / "config.json").exists() else []
        where = ["--output-dir", str(folder.resolve())]
        return [*program, *where, *resume, *run_flags(COMMON | run | self.arm.flags)]


def run_flags(flags: dict[str, Any]) -> list[str]:
    """Arguments of train.py: `steps=24` is --steps 24, True is --name, False is --no-name."""
    arguments = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", str(value)]
    return arguments


# ---- running


def write_noisy(path: Path) -> None:
    """The training problems, a share NOISE of the labels replaced by another digit."""
    # The same wrong labels for all algorithms and seeds
    rng = random.Random(0)
    rows = list(read_rows(LONG_TRAIN))
    for row in rng.sample(rows, round(NOISE * len(rows))):
        row["label"] = rng.choice([d for d in "01234" if d != row["label"]])
    files.write_jsonl(path, rows)


def is_complete(folder: Path) -> bool:
    """The last step of the run is in its metrics, or train.py gave up for want of a signal."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    if not rows:
        return False
    # Such a run would end the same way if it were made again
    gave_up = all(row.get("rollout/groups_kept") == 0 for row in rows[-EMPTY_STEPS:])
    return gave_up or rows[-1]["step"] == config_of(folder)["steps"]


def execute(job: Job, root: Path) -> None:
    """Make a run in a process and on a core of its own."""
    command = [sys.executable, *job.command(root)]
    log = root / f"{job.folder(root).name}.log"
    with open(log, "w") as out:
        one_core = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, env=one_core)
    if done.returncode:
        raise SystemExit(f"error: {job.arm.label} ended with status {done.returncode}; see {log}.")


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


def jobs_of(part: Part, root: Path) -> list[Job]:
    """The runs of a part; seed by seed, so that half a comparison is paired too.

    Raises ValueError if an arm takes its rate from the grid and the grid is not complete.
    """
    rates = {} if all(arm.rate for arm in part.arms) else best_rates(root)
    return [
        Job(arm, variant, arm.rate or rates[arm.rate_of], seed)
        for seed in part.seeds
        for variant in part.variants
        for arm in part.arms
    ]


def best_rates(root: Path) -> dict[str, str]:
    """For each label of the grid the rate with the largest accuracy averaged over tokens."""
    jobs = jobs_of(PARTS["grid"], root)
    missing = [job for job in jobs if not is_complete(job.folder(root))]
    if missing:
        raise ValueError(f"{missing[0].folder(root)} is not complete; run the grid first.")
    runs = [read_run(job, root) for job in jobs]
    budgets = common_budgets(runs)
    best = {}
    for label in dict.fromkeys(run["label"] for run in runs):
        mine = [run for run in runs if run["label"] == label]
        best[label] = max(mine, key=lambda run: accuracy_at(run, budgets).mean())["rate"]
    return best


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
    run = dict(label=job.arm.label, variant=job.variant, rate=job.rate, seed=job.seed)
    run |= dict(tokens=tokens, curve=curve, seconds=total_seconds(rows, "step"))
    run["critic_seconds"] = total_seconds(rows, "score_critic", "update_critic")
    for key in CRITIC_KEYS:  # over the second half of the run
        values = [row.get(f"critic/{key}") for row in rows[len(rows) // 2 :]]
        known = [value for value in values if value is not None]
        run |= {key: mean(known)} if known else {}
    return run


def total_seconds(rows: list[dict], *parts: str) -> float:
    """Seconds that some parts of a step took over a run."""
    return sum(row.get(f"perf/{part}_s", 0.0) for row in rows for part in parts)


def common_budgets(runs: list[dict]) -> np.ndarray:
    """101 token budgets from 0 to the median of the runs' tokens.

    A run with fewer keeps its last accuracy: one whose responses collapsed must not cut all short.
    """
    return np.linspace(0, median_low(run["tokens"] for run in runs), 101)


def accuracy_at(run: dict, budgets: np.ndarray) -> np.ndarray:
    """Held-out accuracy after `budgets` sampled tokens, on straight lines between evaluations."""
    # Flat beyond its last evaluation
    return np.interp(budgets, *zip(*run["curve"], strict=True))


def band(curves: np.ndarray) -> list[list[float]]:
    """Mean over seeds and its 95 % band by bootstrap over seeds: (S, X) -> three times (X,)."""
    # (resamples, S, X), averaged over S
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
        # With one seed all draw the same problems, so most of its luck cancels in a difference
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
    lines = [heads, ["---"] * len(heads)]
    for row in table:
        cells = [row["variant"], row["label"], row["rate"], str(row["seeds"])]
        cells += [f"{row['area']:.3f}", f"{row['end']:.3f}"]
        for name in ("area_difference", "end_difference"):
            if name in row:
                (middle,), (low,), (high,) = row[name]
                cells.append(f"{middle:+.3f} ({low:+.3f} to {high:+.3f})")
            else:
                cells.append("")
        cells += [f"{row['seconds']:.0f}", f"{row['critic_seconds'] / row['seconds']:.0%}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in CRITIC_KEYS]
        lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw_curves(table: list[dict], path: Path, reference: str) -> None:
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
        text = as_text(table, reference)
        (root / f"{name}.md").write_text(text)
        if reference:
            draw_curves(table, root / f"{name}.png", reference)
        print(text)


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
    try:
        runs = jobs_of(PARTS[part], root)
    except ValueError as error:  # the grid, which gives the others their rates, is not complete
        if not only_report:
            raise
        print(f"\n{part}: left out, {error}")
        return
    if not only_report:
        run_all(runs, root, jobs)
    report(runs, root, part, PARTS[part].reference)


if __name__ == "__main__":
    main()
