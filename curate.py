"""Turn a raw data set into training problems, in the three stages of the recipe.

    1 verifiable   what can be graded, once each, and not in an evaluation set   curation/rules.py
    2 label audit  solutions of one or more audit models: where they agree with  curation/
                   each other, but not with the label, the label is in doubt     label_audit.py
    3 difficulty   pass rate of the target model: what it always solves teaches  curation/
                   nothing, nor does most of what it never solves                difficulty.py

    python curate.py --model DIR --data FILE --output FILE.jsonl [--audit-model DIR ...]

Labels are never edited. Next to the output are FILE.report.json (what every stage dropped and why),
FILE.dropped.jsonl (those rows) and FILE.state.jsonl (all that was sampled): the same command resumes
a run that was killed, and other rules or thresholds sample nothing again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import distributed
import files
from config import CHOICES, ROOT, check_values, option, parse_options, refuse
from curation import rules
from curation.difficulty import find_unlearnable
from curation.label_audit import find_doubtful
from curation.rows import Drop, RawProblem, load_rows, load_texts
from curation.solving import Solver
from curation.state import StateFile
from curation.summary import summarise, table
from distributed import print0
from files import writing
from model import load_config, local_folder
from problems import load_tokenizer
from verify import Verifier

# What is written next to the output, under its name.
STATE, DROPPED, REPORT = ".state.jsonl", ".dropped.jsonl", ".report.json"


@dataclass
class CurateConfig:
    """One curation. Units: tokens, rows, shares in 0..1."""

    # fmt: off
    model: str = option(str(ROOT / "assets/tiny-base"), "target: the checkpoint that will be trained", section="What to curate")
    data: str = option(str(ROOT / "assets/train.jsonl"), "raw problems: .jsonl, .parquet or hub id")
    output: str = option("", "JSONL file to write, for train.py --data")
    prompt_key: str = option("", "column of the prompt; empty: prompt, problem, question, ...")
    label_key: str = option("", "column of the right answer; empty: label, answer, ground_truth, ...")
    prompt_suffix: str = option("", "line after every prompt, as in train.py; not written out")

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
        names = (".jsonl", STATE, DROPPED, REPORT)
        written = {Path(self.output).with_suffix(name).resolve() for name in names}
        if written & {Path(path).resolve() for path in (self.data, *self.decontaminate)}:
            refuse("output", "would overwrite an input file")
        check_values(self)
        if self.min_pass_rate >= self.max_pass_rate:
            refuse("min_pass_rate", "must be below max_pass_rate")


# What stored results depend on, apart from the model, which is in the name of their stage. A later
# run may change all other fields and use the results again.
SAMPLED = """prompt_key label_key prompt_suffix audit_samples audit_temperature samples temperature
    max_response_tokens think seed dtype""".split()


def sampling_settings(config: CurateConfig, rows: Sequence[RawProblem]) -> dict[str, Any]:
    """The fields SAMPLED, and a hash of the problems."""
    problems = json.dumps([(row.prompt, row.label) for row in rows], default=str)
    settings = {name: getattr(config, name) for name in SAMPLED}
    return settings | {"data": hashlib.sha256(problems.encode()).hexdigest()}


@dataclass
class Curation:
    """What the stages share. A stage takes the numbers of the rows that are left."""

    config: CurateConfig
    rows: list[RawProblem]
    evaluation: dict[str, str]  # place -> text of each problem that must not be among the rows
    state: StateFile
    solver: Solver
    grader: Verifier


def verifiable(curation: Curation, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 1: rows that cannot be graded, or are there twice, or are in an evaluation set."""
    config = curation.config
    return rules.find_unverifiable(
        curation.rows,
        left,
        curation.state,
        load_tokenizer(local_folder(config.model)),
        curation.evaluation,
        prompt_suffix=config.prompt_suffix,
        max_prompt_tokens=config.max_prompt_tokens,
        drop_several_values=config.drop_several_values,
        ngram=config.ngram,
        ngram_overlap=config.ngram_overlap,
        ngram_common=config.ngram_common,
    )


def label_audit(curation: Curation, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 2: rows whose label the audit models contradict."""
    config = curation.config
    if not config.audit_samples:
        return {}
    models = config.audit_model or [config.model]
    if config.model in models:
        print0(
            "the target audits labels: what it is sure of and wrong about will look like a wrong "
            "label; --audit-model takes a stronger model (docs/curation.md)"
        )
    votes = [
        curation.solver.solve(
            left,
            f"audit {number}",
            model,
            samples=config.audit_samples,
            temperature=config.audit_temperature,
            # Other random numbers for every model, and than in stage 3, which has the seed itself:
            # the same samples twice would agree with themselves.
            seed=config.seed + 1 + number,
        )
        for number, model in enumerate(models)
    ]
    return find_doubtful(
        curation.rows,
        left,
        votes,
        curation.grader,
        samples=config.audit_samples,
        majority=config.audit_majority,
        keep_hard=config.audit_keep_hard,
    )


def difficulty(curation: Curation, left: Sequence[int]) -> dict[int, Drop]:
    """Stage 3: rows that the target solves too often or too rarely."""
    config = curation.config
    if not config.samples:
        return {}
    votes = curation.solver.solve(
        left,
        "difficulty",
        config.model,
        samples=config.samples,
        temperature=config.temperature,
        seed=config.seed,
    )
    return find_unlearnable(
        curation.rows,
        left,
        votes,
        samples=config.samples,
        min_pass_rate=config.min_pass_rate,
        max_pass_rate=config.max_pass_rate,
        unsolved_share=config.unsolved_share,
        seed=config.seed,
    )


class Stage(NamedTuple):
    """A stage, and the field that it notes on every row, if the report counts its values."""

    find: Callable[[Curation, Sequence[int]], dict[int, Drop]]
    noted: str


STAGES = {
    "1 verifiable": Stage(verifiable, ""),
    "2 label audit": Stage(label_audit, "label_audit"),
    "3 difficulty": Stage(difficulty, "pass_rate"),
}


def curate(config: CurateConfig, device: torch.device) -> dict[str, Any]:
    """Run the stages, write the output and its companions, return the report."""
    output = Path(config.output)
    state_file = output.with_suffix(STATE)
    if output.exists() and not state_file.exists():
        refuse("output", f"{output} exists, and no {state_file.name} says that it was made here")
    rows = load_rows(config.data, config.prompt_key, config.label_key)
    evaluation = load_texts(config.decontaminate, config.prompt_key)
    for model in (config.model, *config.audit_model):  # a missing one: now, not after stage 1
        load_config(local_folder(model))
    with writing("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)

    left, dropped = list(range(len(rows))), {}
    report = {"settings": asdict(config), "rows": len(rows), "written": 0, "stages": {}}
    with Verifier(config.verifier_workers, config.verifier_timeout_s) as grader:
        state = StateFile(state_file, sampling_settings(config, rows), config.chunk)
        solver = make_solver(config, rows, state, grader, device)
        curation = Curation(config, rows, evaluation, state, solver, grader)
        for name, stage in STAGES.items():
            found = stage.find(curation, left)
            report["stages"][name] = summarise(rows, left, found, stage.noted)
            print0(table(name, report["stages"][name]))
            dropped |= found
            left = [i for i in left if i not in found]
    report["written"] = len(left)
    if distributed.rank() == 0:
        write(output, rows, left, dropped, report)
    print0(f"\n{len(left)} of {len(rows)} rows: {output}")
    return report


def make_solver(
    config: CurateConfig,
    rows: Sequence[RawProblem],
    state: StateFile,
    grader: Verifier,
    device: torch.device,
) -> Solver:
    """What has models solve the rows."""
    return Solver(
        rows,
        state,
        grader,
        device,
        dtype=getattr(torch, config.dtype),
        slots=config.slots,
        prompt_suffix=config.prompt_suffix,
        think=config.think,
        max_response_tokens=config.max_response_tokens,
    )


def write(
    output: Path,
    rows: Sequence[RawProblem],
    left: Sequence[int],
    dropped: dict[int, Drop],
    report: dict[str, Any],
) -> None:
    """Write the rows that are left, those that were dropped, and the report."""
    noted = [row.fields | row.notes for row in rows]
    lost = (noted[i] | drop._asdict() for i, drop in sorted(dropped.items()))
    files.write_jsonl(output.with_suffix(DROPPED), lost, default=str)
    files.write_jsonl(output, (noted[i] for i in left), default=str)
    output.with_suffix(REPORT).write_text(json.dumps(report, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped; the same command goes on from here."):
        config = parse_options(CurateConfig, __doc__, argv)
        if not curate(config, distributed.start(config))["written"]:
            raise ValueError("no problem is left; the report above says why")


if __name__ == "__main__":
    main()
