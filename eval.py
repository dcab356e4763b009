"""Evaluate a checkpoint, or compare two: avg@n, pass@k, maj@k and best-of-k with bootstrap bands.

    python eval.py --model DIR --data FILE [FILE ...] --n 16 [--compare DIR2] --output out.json

    1 sample    n responses to every problem, graded                  rollout.evaluate
    2 force     optional: close thoughts cut off, ask for the answer  run/forcing.py
    3 score     every problem by itself, unbiased over its subsets    run/scores.py: score_problem
    4 bands     means over problems, resampled over problems          run/scores.py: band
    5 compare   two models: differences, problem by problem           run/scores.py: paired_differences

docs/evaluation.md defines every number. The settings and the version of the verifier stand above
every table and in the JSON: numbers are comparable only where they agree.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import distributed
import files
import rewards
import verify
from config import CHOICES, ROOT, ConfigError, check_values, option, parse_options, refuse
from data import Problem, Rollout
from distributed import print0
from files import part_of, settings_of, writing
from model import load_config, local_folder
from problems import load_problems, load_tokenizer, think_mode
from reports import eval_tables
from rewards import Verifier
from rollout import Sampler, evaluate
from run.best_of_n import final_values, load_critic
from run.forcing import force_answers
from run.metrics import sample_row
from run.scores import LEVEL, RESAMPLES, paired_differences, resamples, score_set
from sampler.sampling import Truncation
from verifier import sandbox


@dataclass
class Options:
    """One evaluation. Units: tokens, seconds. None: see FROM_RUN."""

    # fmt: off
    model: str = option(str(ROOT / "assets/tiny-base"), "checkpoint, hub id, or run (newest policy)", section="What to evaluate")
    data: list[str] = option([str(ROOT / "assets/eval.jsonl")], "sets: .jsonl, .parquet or hub NAME[:CONFIG][@SPLIT], one or more")
    n: int = option(16, "responses per problem", "(0, inf)")
    compare: str = option("", "second checkpoint: paired differences, --compare minus --model")
    critic: str = option("", "critic (or run): also best-of-k by the highest final V")
    output: str = option("", "JSON file to write; with --compare a figure .png next to it")
    save_responses: str = option("", "JSONL file for the responses, with the keys of rollouts.jsonl")

    prompt_key: str | None = option(None, "column of the prompt (default: the run's, else prompt, ...)", section="Problems")
    label_key: str | None = option(None, "column of the answer (default: the run's, else label, ...)")
    prompt_suffix: str | None = option(None, "line after every prompt (default: the run's)")
    max_prompt_tokens: int = option(4096, "longer prompts are dropped, and counted", "(0, inf)")

    max_response_tokens: int | None = option(None, "response budget (default: the run's, else 128)", "(0, inf)", section="Sampling")
    temperature: float = option(1.0, "sampling temperature; 0: greedy", "[0, inf]")
    top_p: float = option(1.0, "draw from the likeliest tokens of this total probability", "(0, 1]")
    top_k: int = option(0, "draw from that many likeliest tokens; 0: all", "[0, inf)")
    min_p: float = option(0.0, "draw tokens at least this likely, relative to the likeliest", "[0, 1]")
    think: str | None = option(None, "thinking tags: auto, require or none (default: the run's)", CHOICES["think"])
    force_budget: bool = option(False, "close a thought that the budget cuts off, ask for the answer")
    answer_tokens: int = option(32, "budget of the answer after a forced end", "(0, inf)")
    seed: int = option(0, "seeds sampling and bootstrap", "(-inf, inf)")

    device: str = option("auto", "auto, cpu or cuda", CHOICES["device"], section="Machine")
    dtype: str = option("auto", "float32 or bfloat16; auto: bfloat16 on CUDA, else float32", CHOICES["dtype"])
    nproc: int = option(1, "processes on this node, one per GPU; problems are shared out", "(0, inf)")
    slots: int = option(64, "responses decoded at the same time per process", "(0, inf)")
    max_tokens_per_micro_batch: int = option(8192, "tokens per forward of the critic", "(0, inf)")
    verifier_workers: int = option(1, "grading processes per rank", "(0, inf)")
    verifier_timeout_s: float = option(2.0, "seconds until a grading worker is killed: a wrong answer", "(0, inf]")
    # fmt: on

    def check(self) -> None:
        """ConfigError for a value out of range, or files in each other's place."""
        check_values(self)
        if len(set(self.data)) < len(self.data):
            refuse("data", f"names a set twice: {' '.join(self.data)}")
        owner = {Path(data).resolve(): "--data" for data in self.data}
        written = {
            "--output": self.output,
            "--save-responses": self.save_responses,
            "the figure of --output,": self.figure,
        }
        for flag, file in written.items():
            if file:
                other = owner.setdefault(Path(file).resolve(), flag)
                if other != flag:
                    raise ConfigError(f"{flag} {file} would overwrite {other}; name another file.")

    @property
    def figure(self) -> Path | None:
        """The file of the figure, if there will be one."""
        return Path(self.output).with_suffix(".png") if self.output and self.compare else None

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be drawn."""
        return Truncation(self.top_p, self.top_k, self.min_p)


# A flag that is not given has the value of the run that --model or --compare belongs to, else this:
# a model that was trained with a suffix or another budget is not itself without them.
FROM_RUN = {
    "max_response_tokens": 128,
    "prompt_suffix": "",
    "prompt_key": "",
    "label_key": "",
    "think": "auto",
}


def take_from_run(options: Options) -> None:
    """Fill what is unset from the first of --model and --compare that belongs to a run, and print
    it.
    """
    stored = settings_of(options.model) or (settings_of(options.compare) if options.compare else {})
    unset = [name for name in FROM_RUN if getattr(options, name) is None]
    for name in unset:
        setattr(options, name, stored.get(name, FROM_RUN[name]))
    changed = [f"{n} {getattr(options, n)!r}" for n in unset if getattr(options, n) != FROM_RUN[n]]
    if changed:
        print0(f"as in the run: {', '.join(changed)}")


def open_files(options: Options) -> None:
    """Fail now, not after hours, if a file cannot be written; empty that of the responses."""
    if distributed.rank() > 0:
        return
    for flag, file, mode in (
        ("--output", options.output, "a"),  # an older report stays until there is a new one
        ("--save-responses", options.save_responses, "w"),
    ):
        if file:
            with writing(flag, file):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                open(file, mode).close()


# ---- what to evaluate


@dataclass
class Subject:
    """A checkpoint to evaluate, and every set as its tokenizer sees it."""

    path: str  # as the flag names it
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    sets: dict[str, tuple[list[Problem], int]]  # problems, and how many were dropped as too long


def load_subject(path: str, options: Options) -> Subject:
    """Find a checkpoint and read all sets, before anything is sampled."""
    folder = local_folder(part_of(path, "policy"))
    load_config(folder)  # its error is clearer than the tokenizer's if this is not a checkpoint
    tokenizer = load_tokenizer(folder)
    if options.force_budget and "</think>" not in tokenizer.get_vocab():
        refuse(
            "force_budget",
            f"closes the thinking with </think>, which is not a token of {folder}; leave it out "
            "for a model that does not think in tags",
        )
    sets = {
        data: load_problems(
            data,
            tokenizer,
            options.max_prompt_tokens,
            options.prompt_key,
            options.label_key,
            options.prompt_suffix,
        )
        for data in options.data
    }
    return Subject(path, folder, tokenizer, sets)


def check_pair(subjects: Sequence[Subject]) -> None:
    """Paired differences need two checkpoints, and the same problems in the same places."""
    if len(subjects) > len({s.folder.resolve() for s in subjects}):
        refuse(
            "compare", f"is the checkpoint of --model ({subjects[0].folder}); no score would differ"
        )
    for data in subjects[0].sets:
        if len({tuple((p.id, p.label) for p in s.sets[data][0]) for s in subjects}) > 1:
            refuse(
                "max_prompt_tokens",
                f"drops different problems of {data} for the two models, whose tokenizers differ; "
                "raise it",
            )


# ---- the evaluation


def evaluate_models(options: Options, device: torch.device) -> dict[str, Any]:
    """The whole evaluation with its tables and files; returns the report (complete on rank 0)."""
    take_from_run(options)
    roles = ("model", "compare") if options.compare else ("model",)
    subjects = {role: load_subject(getattr(options, role), options) for role in roles}
    check_pair(list(subjects.values()))
    critic = None
    if options.critic:
        critic = load_critic(options.critic, getattr(torch, options.dtype), device)
    open_files(options)
    report: dict[str, Any] = {"settings": settings(options)}
    with Verifier(options.verifier_workers, options.verifier_timeout_s) as grader:
        for role, subject in subjects.items():
            evaluate_subject(role, subject, critic, options, device, grader, report)
    if options.compare and distributed.rank() == 0:
        add_comparison(report, options)
    return report


def settings(options: Options) -> dict[str, Any]:
    """What must agree for two numbers to be comparable."""
    places = "model data compare output save_responses device nproc slots".split()
    how = {name: value for name, value in asdict(options).items() if name not in places}
    bands = {"level": LEVEL, "resamples": RESAMPLES, "over": "problems", "seed": options.seed}
    version = verify.version(rewards.__file__, sandbox.__file__)
    return how | {"verifier": version, "bands": bands}


def evaluate_subject(
    role: str,
    subject: Subject,
    critic: torch.nn.Module | None,
    options: Options,
    device: torch.device,
    grader: Verifier,
    report: dict[str, Any],
) -> None:
    """Fill report[role], print and save it set by set. All ranks sample, rank 0 scores."""
    # Local to this call: the first model has left the memory when the second one is loaded.
    sampler = Sampler.from_pretrained(
        subject.folder, subject.tokenizer, options.slots, getattr(torch, options.dtype), device
    )
    report[role] = {"path": subject.path, "sets": {}}
    for data, (problems, dropped) in subject.sets.items():
        think = think_mode(options.think, problems)
        groups = sample_set(sampler, grader, problems, options, think)
        finals = None
        if critic is not None:
            finals = final_values(critic, groups, options.max_tokens_per_micro_batch)
        if distributed.rank() > 0:
            continue
        if options.save_responses:
            about = {"model": subject.path, "set": data}
            rows = [about | sample_row(0, r, True) for group in groups for r in group]
            files.append_jsonl(Path(options.save_responses), rows)
        budget = options.max_response_tokens if options.force_budget else None
        scores = score_set(groups, grader, seed=options.seed, finals=finals, budget=budget)
        counts = {"problems": len(problems), "dropped": dropped, "think": think}
        report[role]["sets"][data] = counts | scores
        save(report, options)  # now: a set that is done is not lost with the next one
        eval_tables.print_result(report, role, data)


def sample_set(
    sampler: Sampler,
    grader: Verifier,
    problems: Sequence[Problem],
    options: Options,
    think: str,
) -> list[list[Rollout]]:
    """n graded responses to every problem of a set, complete on every rank."""
    groups = evaluate(
        sampler,
        grader,
        problems,
        samples=options.n,
        max_new_tokens=options.max_response_tokens,
        temperature=options.temperature,
        think=think,
        seed=options.seed,
        truncation=options.truncation,
    )
    if not options.force_budget:
        return groups
    return force_answers(
        groups,
        sampler,
        grader,
        max_response_tokens=options.max_response_tokens,
        answer_tokens=options.answer_tokens,
        temperature=options.temperature,
        think=think,
        truncation=options.truncation,
    )


def add_comparison(report: dict[str, Any], options: Options) -> None:
    """Compare the two models on every set; print, save and draw it."""
    report["comparison"] = {}
    for data in options.data:
        before, after = (report[role]["sets"][data]["per_problem"] for role in ("model", "compare"))
        # The resamples of a set are those of its own bands: the same problems, drawn alike.
        picks = resamples(len(before), options.seed)
        report["comparison"][data] = paired_differences(before, after, picks)
        eval_tables.print_comparison(report, data)
    save(report, options)
    if options.figure:
        eval_tables.draw_comparison(report, options.figure)


def save(report: dict[str, Any], options: Options) -> None:
    """Write the report, as far as it has come, to --output."""
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped; the sets that were done are in --output."):
        options = parse_options(Options, __doc__, argv)
        evaluate_models(options, distributed.start(options))


if __name__ == "__main__":
    main()
