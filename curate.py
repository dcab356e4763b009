"""Turn a raw data set into training problems, in the three stages of the recipe.

    1 verifiable   what can be graded, once each, and not in an evaluation set   find_unverifiable
    2 label audit  k independent solutions by one or more audit models: where    find_doubtful
                   they agree, but not with the label, the label is in doubt
    3 difficulty   pass rate of the target model: what it always solves teaches  find_unlearnable
                   nothing, nor does most of what it never solves

    python curate.py --model DIR --data FILE --output FILE.jsonl [--audit-model DIR ...]

The rules of stage 1 are in rules.py. Labels are never edited. Beside the output lie
FILE.report.json (what every stage dropped and why), FILE.dropped.jsonl (those rows) and
FILE.state.jsonl (all that was sampled): the same command goes on with a run that was killed, and
other rules or thresholds sample nothing again.
"""

import hashlib
import json
import os
import random
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

import distributed
import files
from config import CHOICES, ROOT, ConfigError, check_values, option, parse_options, refuse
from curation import rules
from curation.rules import REASONS, Drop, Row, bar
from data import Problem, Rollout
from distributed import print0
from files import writing
from model import load_config, local_folder
from problems import load_tokenizer, render_prompt, think_mode, with_suffix
from rollout import Sampler, evaluate
from run.scores import ANSWERED, count_votes
from verify import Verifier, label_kind

COMPANIONS = STATE, DROPPED, REPORT = ".state.jsonl", ".dropped.jsonl", ".report.json"


@dataclass
class CurateConfig:
    """One curation. Units: tokens, rows, shares in 0..1."""

    # fmt: off
    model: str = option(str(ROOT / "assets/tiny-base"), "target: the checkpoint that will be trained", section="What to curate")
    data: str = option(str(ROOT / "assets/train.jsonl"), "raw problems: .jsonl, .parquet or hub id")
    output: str = option("", "JSONL file to write, for train.py --data")
    prompt_key: str = option("", "column of the prompt; empty: prompt, problem, question, ...")
    label_key: str = option("", "column of the right answer; empty: label, answer, ground_truth, ...")
    prompt_suffix: str = option("", "line behind every prompt, as in train.py; not written out")

    decontaminate: list[str] = option([], "evaluation files whose problems must not be in the output", section="1 verifiable")
    max_prompt_tokens: int = option(256, "longer prompts are dropped", "(0, inf)")
    drop_several_values: bool = option(False, "drop labels that are a list or a set (1, -2) as well")
    ngram: int = option(5, "words of an n-gram", "(0, inf)")
    ngram_overlap: float = option(0.6, "share of common n-grams that makes a near-duplicate", "[0, 1]")
    ngram_common: int = option(20, "what so many problems share is a template and does not count", "(0, inf)")

    audit_model: list[str] = option([], "checkpoints that solve the problems; empty: --model", section="2 label audit")
    audit_samples: int = option(8, "solutions per problem and audit model; 0: no audit", "[0, inf)")
    audit_temperature: float = option(1.0, "sampling temperature of the audit models", "[0, inf]")
    audit_majority: float = option(0.6, "share of a model's solutions that one answer needs", "(0.5, 1]")
    audit_keep_hard: float = option(0.25, "a doubted label stays if this share of solutions has it", "[0, 1]")

    samples: int = option(8, "responses of the target per problem; 0: no difficulty stage", "[0, inf)", section="3 difficulty")
    temperature: float = option(1.0, "sampling temperature of the target, as in its training", "[0, inf]")
    min_pass_rate: float = option(0.0, "problems solved at most this often are too hard", "[0, 1]")
    max_pass_rate: float = option(1.0, "problems solved at least this often are too easy", "[0, 1]")
    unsolved_share: float = option(0.1, "share of the output that may be too hard, label confirmed", "[0, 1)")

    max_response_tokens: int = option(128, "response budget, stop token included", "(0, inf)", section="Sampling and machine")
    think: str = option("auto", "thinking tags: auto, require or none, as in train.py", CHOICES["think"])
    seed: int = option(0, "seeds sampling and the choice among problems that are too hard", "(-inf, inf)")
    chunk: int = option(256, "problems between two writes of the state file", "(0, inf)")
    slots: int = option(64, "responses decoded at the same time per process", "(0, inf)")
    device: str = option("auto", "auto, cpu or cuda", CHOICES["device"])
    dtype: str = option("auto", "float32 or bfloat16; auto: bfloat16 on CUDA, else float32", CHOICES["dtype"])
    nproc: int = option(1, "processes on this node, one per GPU", "(0, inf)")
    verifier_workers: int = option(1, "grading processes per rank", "(0, inf)")
    verifier_timeout_s: float = option(2.0, "seconds until a grading worker is killed", "(0, inf]")
    # fmt: on

    def check(self) -> None:
        """ConfigError, in one sentence, for what cannot run."""
        if not self.output.endswith(".jsonl"):
            refuse("output", "must name a .jsonl file")
        files = {Path(self.output).with_suffix(s).resolve() for s in (".jsonl", *COMPANIONS)}
        if files & {Path(path).resolve() for path in (self.data, *self.decontaminate)}:
            refuse("output", "would overwrite an input file")
        check_values(self)
        if self.min_pass_rate >= self.max_pass_rate:
            refuse("min_pass_rate", "must be below max_pass_rate")


# ---- problems in, results on disk


def make_problem(number: int, row: Row, tokenizer: Any, suffix: str) -> Problem:
    """A row as a model sees it. Random numbers hang on its index, the number of the row: what other
    rows are dropped changes no sample.
    """
    try:
        prompt = render_prompt(tokenizer, with_suffix(row.prompt, suffix))
    except TemplateError as error:
        sentence = f"{row.where}: the chat template refuses the prompt: {error}."
        raise ValueError(sentence) from error
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return Problem(str(number), number, prompt, ids, row.label)


# What the stored results depend on, beside the model, which the name of the stage holds. The other
# fields are rules, which a later run may change.
SAMPLED = """prompt_key label_key prompt_suffix audit_samples audit_temperature samples temperature
    max_response_tokens think seed dtype""".split()


class State:
    """Results by stage and row in a JSONL file: one line, so all or nothing, per chunk of work."""

    def __init__(self, file: Path, config: CurateConfig, rows: Sequence[Row]):
        self.file, self.chunk = file, config.chunk
        self.results: dict[str, dict[int, Any]] = defaultdict(dict)
        settings = {name: getattr(config, name) for name in SAMPLED}
        stated = json.dumps([(row.prompt, row.label) for row in rows], default=str)
        settings["data"] = hashlib.sha256(stated.encode()).hexdigest()
        if distributed.rank() == 0 and file.exists():
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # a line that a kill cut off
        distributed.barrier()
        stored = [line for _, line in files.read_jsonl(file)] if file.exists() else []
        distributed.barrier()  # every rank has read before one writes
        if not stored:
            self._append(settings)
            return
        changed = [name for name in settings if settings[name] != stored[0].get(name)]
        if changed:
            raise ConfigError(
                f"{file} holds the samples of a run with other {', '.join(changed)}; delete it to "
                "start again, or choose another --output."
            )
        for stage, results in (item for line in stored[1:] for item in line.items()):
            self.results[stage] |= {int(i): result for i, result in results.items()}

    def _append(self, line: dict) -> None:
        if distributed.rank() == 0:
            files.append_jsonl(self.file, [line])

    def missing(self, stage: str, left: Sequence[int]) -> Iterable[list[int]]:
        """The rows without a result, in chunks: those that one run from start to end would have."""
        todo = [i for i in left if i not in self.results[stage]]
        chunks = [todo[start : start + self.chunk] for start in range(0, len(todo), self.chunk)]
        done = (len(left) - len(todo)) // self.chunk
        return bar(chunks, stage, unit="chunk", initial=done, total=done + len(chunks))

    def add(self, stage: str, results: dict[int, Any]) -> None:
        """Store a chunk. What rank 0 found counts, so that all ranks decide alike."""
        (results,) = distributed.gather([results] if distributed.rank() == 0 else [])
        self._append({stage: results})
        self.results[stage] |= results


@dataclass
class Run:
    """What all stages share. A stage takes the numbers of the rows that are left."""

    config: CurateConfig
    device: torch.device
    rows: list[Row]
    state: State
    grader: Verifier
    evaluation: dict[str, str]  # where -> what the prompt says: must not be among the rows


# ---- stage 1: verifiable


def find_unverifiable(run: Run, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 1: rows that cannot be graded, or are there twice, or belong to an evaluation set."""
    config, rows, state = run.config, run.rows, run.state
    tokenizer = load_tokenizer(local_folder(config.model))
    dropped: dict[int, Drop] = {}
    for i in bar(left, "prompts"):
        if not rows[i].text.strip():
            dropped[i] = Drop("no_prompt")
        elif rows[i].kind != "math":
            dropped[i] = Drop("other_kind", rows[i].kind)
        else:
            problem = make_problem(i, rows[i], tokenizer, config.prompt_suffix)
            if len(problem.prompt_ids) > config.max_prompt_tokens:
                dropped[i] = Drop("long_prompt", f"{len(problem.prompt_ids)} tokens")
    readable = [i for i in left if i not in dropped]
    for chunk in state.missing("labels", readable):
        state.add("labels", {i: list(label_kind(rows[i].label)) for i in chunk})
    for i in readable:
        found = rules.examine(rows[i].text, rows[i].label, *state.results["labels"][i])
        if found and (found.reason != "several_values" or config.drop_several_values):
            dropped[i] = found
    once = {i: rows[i] for i in readable if i not in dropped}
    return dropped | rules.find_repeated(
        once, run.evaluation, config.ngram, config.ngram_overlap, config.ngram_common
    )


# ---- sampling


# Answer, how many responses gave it, 1 if it equals the label; the most frequent answer first.
Votes = list[list]


def votes_of(group: Sequence[Rollout], grader: Verifier) -> Votes:
    """Graded responses to one problem by answer, equal answers together."""
    answers = [r.answer if r.reason in ANSWERED else None for r in group]
    right = [int(r.correct) for r in group]
    verdict = dict(zip(answers, right, strict=True))
    # Right answers equal the label, and so each other.
    equal = lambda a, b: verdict[a] == verdict[b] and (verdict[a] or grader.equal(a, b))
    return [list(vote) for vote in count_votes(answers, right, equal)]


def solve(
    run: Run, left: Sequence[int], stage: str, model: str, samples: int, temperature: float,
    seed: int,
) -> dict[int, Votes]:  # fmt: skip
    """Votes of a model on every row, from `samples` responses to each; what the state file has is
    not sampled again.
    """
    config, stage = run.config, f"{stage} by {model}"
    done = run.state.results[stage]
    if all(i in done for i in left):
        return {i: done[i] for i in left}
    folder, dtype = local_folder(model), getattr(torch, config.dtype)
    tokenizer = load_tokenizer(folder)
    sampler = Sampler.from_pretrained(folder, tokenizer, config.slots, dtype, run.device)
    problems = {i: make_problem(i, run.rows[i], tokenizer, config.prompt_suffix) for i in left}
    think = think_mode(config.think, list(problems.values()))
    for chunk in run.state.missing(stage, left):
        groups = evaluate(
            sampler, run.grader, [problems[i] for i in chunk], samples=samples,
            max_new_tokens=config.max_response_tokens, temperature=temperature, think=think,
            seed=seed,
        )  # fmt: skip
        votes = [votes_of(group, run.grader) for group in groups]
        run.state.add(stage, dict(zip(chunk, votes, strict=True)))
    return {i: done[i] for i in left}


def share_right(votes: Votes, samples: int) -> float:
    """Share of the responses that equal the label."""
    return sum(count * right for _, count, right in votes) / samples


# ---- stage 2: label audit


def judge_label(by_model: Sequence[Votes], config: CurateConfig, grader: Verifier) -> str:
    """What the solutions of the audit models say of a label.

    confirmed   every model has a majority, and it is the label
    doubtful    every model has a majority, all the same, and it is not the label
    disputed    doubtful, but `audit_keep_hard` of all solutions have the label: rather a hard
                problem with a tempting wrong answer than a wrong label
    undecided   a model has no majority, or the models differ
    """
    n = config.audit_samples
    enough = lambda votes: votes and votes[0][1] / n >= config.audit_majority
    if not all(map(enough, by_model)):
        return "undecided"
    answers, _, right = zip(*(votes[0] for votes in by_model), strict=True)
    if all(right):
        return "confirmed"
    if any(right) or not all(grader.equal(answer, answers[0]) for answer in answers[1:]):
        return "undecided"
    label_share = sum(share_right(votes, n) for votes in by_model) / len(by_model)
    return "disputed" if label_share >= config.audit_keep_hard else "doubtful"


def find_doubtful(run: Run, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 2: rows whose label all audit models contradict with one voice."""
    config, n = run.config, run.config.audit_samples
    if not n:
        return {}
    models = config.audit_model or [config.model]
    if config.model in models:
        print0(
            "the target audits labels: what it is sure of and wrong about will look like a wrong "
            "label; --audit-model takes a stronger model (docs/curation.md)"
        )
    seed = config.seed + 1  # difficulty has the seed itself
    votes = [
        solve(run, left, f"audit {m}", model, n, config.audit_temperature, seed + m)
        for m, model in enumerate(models)
    ]
    dropped = {}
    for i in bar(left, "verdicts"):
        by_model = [of_model[i] for of_model in votes]
        verdict = judge_label(by_model, config, run.grader)
        rate = sum(share_right(v, n) for v in by_model) / len(by_model)
        run.rows[i].notes |= {"label_audit": verdict, "audit_pass_rate": rate}
        if verdict == "doubtful":
            dropped[i] = Drop("doubtful_label", f"the audit's answer is {by_model[0][0][0]}")
    return dropped


# ---- stage 3: difficulty


def find_unlearnable(run: Run, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 3: rows that the target solves too often or too rarely, but for a share of the hard."""
    config, n = run.config, run.config.samples
    if not n:
        return {}
    votes = solve(run, left, "difficulty", config.model, n, config.temperature, config.seed)
    dropped, hard = {}, []
    for i in left:
        notes = run.rows[i].notes
        rate = notes["pass_rate"] = share_right(votes[i], n)
        if rate >= config.max_pass_rate:
            dropped[i] = Drop("too_easy", f"pass rate {rate:g}")
        elif rate <= config.min_pass_rate:
            dropped[i] = Drop("too_hard", f"pass rate {rate:g}")
            if notes.get("label_audit") == "confirmed":
                hard.append(i)
    # Of the output: hard / (in band + hard) = unsolved_share
    in_band, share = len(left) - len(dropped), config.unsolved_share
    room = int(in_band * share / (1 - share) + 1e-9)
    random.Random(config.seed).shuffle(hard)
    for i in hard[:room]:
        del dropped[i]
    for i in hard[room:]:
        dropped[i] = dropped[i]._replace(reason="hard_surplus")
    return dropped


# ---- the whole

# Name: the function, and the field that it notes on every row.
STAGES = {
    "1 verifiable": (find_unverifiable, ""),
    "2 label audit": (find_doubtful, "label_audit"),
    "3 difficulty": (find_unlearnable, "pass_rate"),
}
EXAMPLES = 3  # of every reason, in the report


def stage_report(run: Run, left: Sequence[int], dropped: dict[int, Drop], noted: str) -> dict:
    """Counts and examples of what a stage dropped, and counts of what it noted on all its rows."""
    by_reason: dict[str, list[int]] = defaultdict(list)
    for i in sorted(dropped):
        by_reason[dropped[i].reason].append(i)

    def example(i: int) -> dict[str, str]:
        row = run.rows[i]
        said = {"where": row.where, "prompt": row.text[:200], "label": row.label[:100]}
        return said | {"detail": dropped[i].detail}

    notes = [run.rows[i].notes for i in left]
    counts = Counter(note[noted] for note in notes if noted in note)
    return {
        "rows": len(left),
        "left": len(left) - len(dropped),
        "dropped": {
            reason: {
                "rows": len(found),
                "why": REASONS[reason],
                "examples": [example(i) for i in found[:EXAMPLES]],
            }
            for reason, found in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        },
        "noted": {noted: dict(sorted(counts.items()))} if counts else {},
    }


def table(name: str, report: dict[str, Any]) -> str:
    """The report of a stage, to print."""
    lines = [f"\n{name}: {report['rows']} rows, {report['left']} left"]
    for field_, counts in report["noted"].items():
        lines.append(f"  {field_}: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    for reason, found in report["dropped"].items():
        lines.append(f"{found['rows']:7} {reason:16} {found['why']}")
        for e in found["examples"]:
            prompt = textwrap.shorten(e["prompt"], 60, placeholder=" ...")
            lines.append(f"{'':10}{e['where']}: {prompt} | label {e['label']} | {e['detail']}")
    return "\n".join(lines)


def curate(config: CurateConfig, device: torch.device) -> dict[str, Any]:
    """Run the stages, write the output and its companions, return the report."""
    output = Path(config.output)
    state_file = output.with_suffix(STATE)
    if output.exists() and not state_file.exists():
        refuse("output", f"{output} exists, and no {state_file.name} says that it was made here")
    rows = rules.load_rows(config.data, config.prompt_key, config.label_key)
    evaluation = rules.load_texts(config.decontaminate, config.prompt_key)
    for model in (config.model, *config.audit_model):  # before hours of sampling, not after
        load_config(local_folder(model))
    with writing("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
    left, dropped = list(range(len(rows))), {}
    report = {"settings": asdict(config), "rows": len(rows), "written": 0, "stages": {}}
    with Verifier(config.verifier_workers, config.verifier_timeout_s) as grader:
        state = State(state_file, config, rows)
        run = Run(config, device, rows, state, grader, evaluation)
        for name, (stage, noted) in STAGES.items():
            found = stage(run, left)
            report["stages"][name] = stage_report(run, left, found, noted)
            print0(table(name, report["stages"][name]))
            dropped |= found
            left = [i for i in left if i not in found]
    report["written"] = len(left)
    if distributed.rank() == 0:
        row = lambda i: rows[i].fields | rows[i].notes
        lost = (row(i) | drop._asdict() for i, drop in sorted(dropped.items()))
        files.write_jsonl(output.with_suffix(DROPPED), lost, default=str)
        files.write_jsonl(output, map(row, left), default=str)
        output.with_suffix(REPORT).write_text(json.dumps(report, indent=2) + "\n")
    print0(f"\n{len(left)} of {len(rows)} rows: {output}")
    return report


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped; the same command goes on from here."):
        config = parse_options(CurateConfig, __doc__, argv)
        if not curate(config, distributed.start(config))["written"]:
            raise ValueError("no problem is left; the report above says why")


if __name__ == "__main__":
    main()
