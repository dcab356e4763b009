"""Evaluate a checkpoint, or compare two: avg@n, pass@k, maj@k and best-of-k with bootstrap bands.

    python eval.py --model DIR --data FILE [FILE ...] --n 16 [--compare DIR2] --output out.json

    1 sample    n responses to every problem, graded                  rollout.evaluate
    2 force     optional: close thoughts cut off, ask for the answer  force_answers
    3 score     every problem by itself, unbiased over its subsets    score_problem
    4 bands     means over problems, resampled over problems          band
    5 compare   the same for the difference, problem by problem       compare

docs/evaluation.md defines every number. The settings and the version of the verifier stand above
every table and in the JSON: numbers are comparable only where they agree.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
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
from data import Problem, Rollout, pack, partition
from distributed import print0
from files import part_of, settings_of, writing
from model import load_config, local_folder
from problems import load_problems, load_tokenizer, think_mode
from reports import eval_tables
from rewards import Verifier
from rollout import Sampler, evaluate, sample_groups
from run.metrics import sample_row
from run.scores import (
    ANSWERED,
    LEVEL,
    RESAMPLES,
    band,
    best_at_k,
    compare,
    count_votes,
    is_repetitive,
    maj_at_k,
    pass_at_k,
    resamples,
    subset_sizes,
)
from sampler.sampling import Truncation
from verifier import sandbox

# Ends a thought and opens the box: whatever follows is an answer. Needs no word of any language.
CLOSING = "\n</think>\n\\boxed{"


@dataclass
class Options:
    """One evaluation. Units: tokens, seconds. None: see FROM_RUN."""

    # fmt: off
    model: str = option(str(ROOT / "assets/tiny-base"), "checkpoint, hub id, or run (newest policy)", section="What to evaluate")
    data: list[str] = option([str(ROOT / "assets/eval.jsonl")], "sets: .jsonl, .parquet or hub NAME[:CONFIG][@SPLIT], one or more")
    n: int = option(16, "responses per problem", "(0, inf)")
    compare: str = option("", "second checkpoint: paired differences, --compare minus --model")
    critic: str = option("", "critic (or run): also best-of-k by the highest final V")
    output: str = option("", "JSON file to write; with --compare a figure .png beside it")
    save_responses: str = option("", "JSONL file for the responses, with the keys of rollouts.jsonl")

    prompt_key: str | None = option(None, "column of the prompt (default: the run's, else prompt, ...)", section="Problems")
    label_key: str | None = option(None, "column of the answer (default: the run's, else label, ...)")
    prompt_suffix: str | None = option(None, "line behind every prompt (default: the run's)")
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
        taken = {Path(data).resolve(): "--data" for data in self.data}
        files = {"--output": self.output, "--save-responses": self.save_responses}
        for flag, file in (files | {"the figure of --output,": self.figure}).items():
            if file and (other := taken.setdefault(Path(file).resolve(), flag)) != flag:
                raise ConfigError(f"{flag} {file} would overwrite {other}; name another file.")

    @property
    def figure(self) -> Path | None:
        """The file of the figure, if there will be one."""
        return Path(self.output).with_suffix(".png") if self.output and self.compare else None

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be drawn."""
        return Truncation(self.top_p, self.top_k, self.min_p)


# What is left unset is that of the run which --model or --compare belongs to; else this.
FROM_RUN = {
    "max_response_tokens": 128,
    "prompt_suffix": "",
    "prompt_key": "",
    "label_key": "",
    "think": "auto",
}


def take_from_run(options: Options) -> None:
    """Fill what is unset from the first of --model and --compare that is of a run, and say so."""
    stored = settings_of(options.model) or (settings_of(options.compare) if options.compare else {})
    unset = [name for name in FROM_RUN if getattr(options, name) is None]
    for name in unset:
        setattr(options, name, stored.get(name, FROM_RUN[name]))
    changed = [f"{n} {getattr(options, n)!r}" for n in unset if getattr(options, n) != FROM_RUN[n]]
    if changed:
        print0(f"as in the run: {', '.join(changed)}")


def open_files(options: Options) -> None:
    """What cannot be written fails now, not after hours; older responses there are dropped."""
    for flag, file, mode in (
        ("--output", options.output, "a"),
        ("--save-responses", options.save_responses, "w"),
    ):
        if file and distributed.rank() == 0:
            with writing(flag, file):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                open(file, mode).close()


# ---- what to evaluate


@dataclass
class Subject:
    """A checkpoint, and every set as its tokenizer sees it."""

    path: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    sets: dict[str, tuple[list[Problem], int]]  # problems, and how many were dropped as too long


def prepare(path: str, options: Options) -> Subject:
    """Find the checkpoint and read all sets, before anything is sampled."""
    folder = local_folder(part_of(path, "policy"))
    load_config(folder)  # says more of a directory that is no checkpoint than the next line would
    subject = Subject(path, folder, load_tokenizer(folder), {})
    if options.force_budget and "</think>" not in subject.tokenizer.get_vocab():
        refuse(
            "force_budget",
            f"closes the thinking with </think>, which is not a token of {folder}; leave it out "
            "for a model that does not think in tags",
        )
    for data in options.data:
        subject.sets[data] = load_problems(
            data, subject.tokenizer, options.max_prompt_tokens,
            options.prompt_key, options.label_key, options.prompt_suffix,
        )  # fmt: skip
    return subject


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


# ---- scores


def score_problem(
    group: Sequence[Rollout], options: Options, grader: Verifier, vote: bool = True,
    finals: Sequence[float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A row of `per_problem`: scores by name, and what they come from. vote: with maj@k. finals:
    the critic's V of each response.
    """
    n, problem = len(group), group[0].problem
    mean = lambda xs: sum(xs) / n
    right, credit = [r.correct == 1 for r in group], [r.correct for r in group]
    has_answer = lambda r: problem.verifier in rewards.ANSWERS and r.reason in ANSWERED
    answers = [r.answer if has_answer(r) else None for r in group]
    votes = count_votes(answers, right, lambda a, b: grader.equal(a, b, problem.verifier))
    counts, winners = [count for _, count, _ in votes], [is_right for *_, is_right in votes]
    scores = {f"avg@{n}": mean(credit)}
    for k in subset_sizes(n):
        scores[f"pass@{k}"] = pass_at_k(n, sum(right), k)
        if vote:
            scores[f"maj@{k}"] = maj_at_k(n, counts, winners, k)
        if finals is not None:
            scores[f"best@{k}"] = best_at_k(finals, credit, k)
    scores["truncated"] = mean([r.finish_reason == "length" for r in group])
    if options.force_budget:
        scores["forced"] = mean([len(r.response_ids) > options.max_response_tokens for r in group])
    scores["repetitive"] = mean([is_repetitive(r.text) for r in group])
    scores["length"] = mean([len(r.response_ids) for r in group])
    return {
        "id": problem.id,
        "label": problem.label,
        "n": n,
        "right": sum(right),
        "answers": {answer: count for answer, count, _ in votes},
        "verdicts": dict(Counter(r.reason for r in group)),
        "scores": scores,
    }


def score_set(
    groups: Sequence[Sequence[Rollout]], finals: Sequence[Sequence[float]] | None,
    options: Options, grader: Verifier,
) -> dict[str, Any]:  # fmt: skip
    """Scores of a set with their bands, and the problems behind them."""
    vote = all(group[0].problem.verifier in rewards.ANSWERS for group in groups)
    rows = [
        score_problem(group, options, grader, vote, values)
        for group, values in zip(groups, finals or [None] * len(groups), strict=True)
    ]
    picks = resamples(len(rows), options.seed)
    scores = {
        name: band([row["scores"][name] for row in rows], picks) for name in rows[0]["scores"]
    }
    return {"responses": sum(map(len, groups)), "scores": scores, "per_problem": rows}


# ---- sampling


def force_answers(
    sampler: Sampler, grader: Verifier, groups: list, options: Options, think: str
) -> list[list[Rollout]]:
    """Budget forcing (s1, 2501.19393): a thought that the budget cut off is closed with CLOSING,
    and the response goes on for at most `answer_tokens`. Graded again, in order.

    Forced tokens get log-prob 0: they were certain.
    """
    closing = sampler.tokenizer(CLOSING, add_special_tokens=False)["input_ids"]
    mine = groups[distributed.rank() :: distributed.world_size()]
    for r in (r for group in mine for r in group if r.finish_reason == "length"):
        text = r.problem.prompt + r.text
        if text.rfind("<think>") > text.rfind("</think>"):
            r.response_ids += closing
            r.rollout_logprobs += [0.0] * len(closing)
            r.weight_versions += [sampler.weight_version] * len(closing)
            r.finish_reason = "abort"
    budget = options.max_response_tokens + len(closing) + options.answer_tokens
    sample_groups(
        sampler, grader, mine, max_new_tokens=budget, temperature=options.temperature, think=think,
        truncation=options.truncation,
    )  # fmt: skip
    return sorted(distributed.gather(mine), key=lambda group: group[0].group)


@torch.no_grad()
def final_values(
    critic: torch.nn.Module, groups: Sequence[Sequence[Rollout]], budget: int
) -> list[list[float]]:
    """V of each response in the state in which its last token was chosen; whole on every rank.

    budget: tokens per forward.
    """
    from critic import values as critic_values

    rollouts, device = [r for group in groups for r in group], critic.value_head.weight.device
    finals = torch.zeros(len(rollouts), device=device)
    costs = [len(r.problem.prompt_ids) + len(r.response_ids) for r in rollouts]
    shares = partition(costs, budget, distributed.world_size())
    for rows in filter(None, shares[distributed.rank()]):
        mb = pack(rollouts, rows, device)
        last = mb.mask.sum(1, keepdim=True) - 1
        finals[mb.rows] = critic_values(critic, mb).gather(1, last).squeeze(1)
    return distributed.sum_(finals).view(len(groups), -1).tolist()


def load_critic(options: Options, device: torch.device) -> torch.nn.Module:
    """The critic of --critic, with activations in the compute dtype."""
    from critic import Critic

    folder = part_of(options.critic, "critic")
    try:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no directory")
        critic = Critic.from_pretrained(folder, getattr(torch, options.dtype))
    except (OSError, ValueError) as error:
        why = str(error).rstrip(".")
        refuse(
            "critic",
            f"{options.critic} is no critic: {why}; give a run that has one, or the folder "
            "`critic` of a checkpoint",
        )
    return critic.to(device).requires_grad_(False)


def evaluate_subject(
    subject: Subject, critic: torch.nn.Module | None, options: Options, device: torch.device,
    grader: Verifier,
) -> Iterator[tuple[str, dict[str, Any]]]:  # fmt: skip
    """Yield (set, result) for every set. Rank 0 scores, the others only sample."""
    dtype = getattr(torch, options.dtype)
    sampler = Sampler.from_pretrained(
        subject.folder, subject.tokenizer, options.slots, dtype, device
    )
    for data, (problems, dropped) in subject.sets.items():
        think = think_mode(options.think, problems)
        groups = evaluate(
            sampler, grader, problems, samples=options.n, seed=options.seed, think=think,
            max_new_tokens=options.max_response_tokens, temperature=options.temperature,
            truncation=options.truncation,
        )  # fmt: skip
        if options.force_budget:
            groups = force_answers(sampler, grader, groups, options, think)
        finals = None
        if critic is not None:
            finals = final_values(critic, groups, options.max_tokens_per_micro_batch)
        if distributed.rank() > 0:
            continue
        if options.save_responses:
            about = {"model": subject.path, "set": data}
            rows = [about | sample_row(0, r, True) for group in groups for r in group]
            files.append_jsonl(Path(options.save_responses), rows)
        result = {"problems": len(problems), "dropped": dropped, "think": think}
        yield data, result | score_set(groups, finals, options, grader)


# ---- the whole


def run(options: Options, device: torch.device) -> dict[str, Any]:
    """The whole evaluation: tables, files; returns the report (whole on rank 0 alone)."""
    take_from_run(options)
    roles = ("model", "compare") if options.compare else ("model",)
    subjects = {role: prepare(getattr(options, role), options) for role in roles}
    check_pair(list(subjects.values()))
    report: dict[str, Any] = {"settings": settings(options)}
    critic = load_critic(options, device) if options.critic else None
    open_files(options)
    workers, timeout = options.verifier_workers, options.verifier_timeout_s
    with Verifier(num_workers=workers, timeout_s=timeout) as grader:
        for role, subject in subjects.items():
            report[role] = {"path": subject.path, "sets": {}}
            for data, result in evaluate_subject(subject, critic, options, device, grader):
                report[role]["sets"][data] = result
                save(options, report)
                eval_tables.print_result(report, role, data)
    if options.compare and distributed.rank() == 0:
        report["comparison"] = {}
        for data in options.data:
            before, after = (report[role]["sets"][data]["per_problem"] for role in roles)
            comparison = compare(before, after, resamples(len(before), options.seed))
            report["comparison"][data] = comparison
            eval_tables.print_comparison(report, data)
        save(options, report)
        if options.figure:
            eval_tables.draw(report, options.figure)
    return report


def settings(options: Options) -> dict[str, Any]:
    """What two numbers must share to be comparable."""
    places = "model data compare output save_responses device nproc slots".split()
    how = {name: value for name, value in asdict(options).items() if name not in places}
    bands = {"level": LEVEL, "resamples": RESAMPLES, "over": "problems", "seed": options.seed}
    sources = rewards.__file__, sandbox.__file__
    return how | {"verifier": verify.version(*sources), "bands": bands}


def save(options: Options, report: dict) -> None:
    """Write the report as far as it has come: a set that is done is not lost with the next."""
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped; the sets that were done are in --output."):
        options = parse_options(Options, __doc__, argv)
        run(options, distributed.start(options))


if __name__ == "__main__":
    main()
