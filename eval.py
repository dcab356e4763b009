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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import HfArgumentParser, PreTrainedTokenizerBase

import distributed
import rewards
import sandbox
import verify
from books import append, is_repetitive, sample_row
from config import CHOICES, ROOT, ConfigError, from_flags
from data import (
    Problem,
    Rollout,
    load_problems,
    load_tokenizer,
    pack,
    partition,
    stop_ids,
    think_mode,
)
from model import Transformer, limit_threads, local_folder
from rewards import Verifier
from rollout import Sampler, Truncation, evaluate, sample_groups
from scores import (
    ANSWERED,
    LEVEL,
    RESAMPLES,
    answer_classes,
    band,
    best_at_k,
    maj_at_k,
    pass_at_k,
    resamples,
    subset_sizes,
)

KINDS = ("pass", "maj", "best")  # scores over k
# Ends a thought and opens the box: whatever follows is an answer. Needs no word of any language.
CLOSING = "\n</think>\n\\boxed{"


def _f(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    """One evaluation. Units: tokens, seconds."""

    model: str = _f(str(ROOT / "assets/tiny-base"), "checkpoint, hub id, or run (newest policy)")
    data: list[str] = field(
        default_factory=lambda: [str(ROOT / "assets/eval.jsonl")],
        metadata={"help": "sets: .jsonl, .parquet or hub NAME[:CONFIG][@SPLIT], one or more"},
    )
    n: int = _f(16, "responses per problem")
    compare: str = _f("", "second checkpoint: paired differences, --compare minus --model")
    critic: str = _f("", "critic (or run): also best-of-k by the highest final V")
    output: str = _f("", "JSON file to write; with --compare a figure .png beside it")
    save_responses: str = _f("", "JSONL file for the responses, with the keys of rollouts.jsonl")

    # Problems
    prompt_key: str = _f("", "column of the prompt; empty: prompt, problem, question, ...")
    label_key: str = _f("", "column of the right answer; empty: label, answer, ground_truth, ...")
    prompt_suffix: str = _f("", "line behind every prompt, such as a request to box the answer")
    max_prompt_tokens: int = _f(4096, "longer prompts are dropped, and counted")

    # Sampling
    max_response_tokens: int = _f(128, "response budget, stop token included")
    temperature: float = _f(1.0, "sampling temperature; 0: greedy")
    top_p: float = _f(1.0, "draw from the likeliest tokens of this total probability")
    top_k: int = _f(0, "draw from that many likeliest tokens; 0: all")
    min_p: float = _f(0.0, "draw tokens at least this likely, relative to the likeliest")
    think: str = _f("auto", "thinking tags: auto, require (no </think>, no answer) or none")
    force_budget: bool = _f(False, "close a thought that the budget cuts off, ask for the answer")
    answer_tokens: int = _f(32, "budget of the answer after a forced end")
    seed: int = _f(0, "seeds sampling and bootstrap")

    # Machine
    device: str = _f("auto", "auto, cpu or cuda")
    dtype: str = _f("auto", "float32 or bfloat16; auto: bfloat16 on CUDA, else float32")
    nproc: int = _f(1, "processes on this node, one per GPU; problems are shared out")
    slots: int = _f(64, "responses decoded at the same time per process")
    max_tokens_per_micro_batch: int = _f(8192, "tokens per forward of the critic")
    verifier_workers: int = _f(1, "grading processes per rank")
    verifier_timeout_s: float = _f(2.0, "seconds until a grading worker is killed: a wrong answer")

    def check(self) -> None:
        """ConfigError for a value out of range."""
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0.")
        for name in ("device", "dtype", "think"):
            if getattr(self, name) not in CHOICES[name]:
                raise ConfigError(f"--{name} must be one of {', '.join(CHOICES[name])}.")
        if self.temperature < 0:
            raise ConfigError("--temperature must not be negative.")
        if self.top_p > 1 or self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise ConfigError(
                "--top-p must be above 0 and at most 1, --top-k not negative, --min-p in [0, 1]."
            )

    @property
    def truncation(self) -> Truncation:
        """Which tokens may be drawn."""
        return Truncation(self.top_p, self.top_k, self.min_p)


POSITIVE = """n max_prompt_tokens max_response_tokens answer_tokens top_p nproc slots
    max_tokens_per_micro_batch verifier_workers verifier_timeout_s""".split()


# ---- what to evaluate


@dataclass
class Subject:
    """A checkpoint, and every set as its tokenizer sees it."""

    path: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    sets: dict[str, tuple[list[Problem], int]]  # problems, and how many were dropped as too long


def part_of(path: str, part: str) -> str:
    """`policy` or `critic` of a checkpoint, or of the newest checkpoint of a run; another path as
    it is.
    """
    newest = max((Path(path) / "checkpoints").glob("step_??????"), default=Path(path))
    return str(newest / part) if (newest / part).is_dir() else path


def prepare(path: str, options: Options) -> Subject:
    """Find the checkpoint and read all sets, before anything is sampled."""
    folder = local_folder(part_of(path, "policy"))
    subject = Subject(path, folder, load_tokenizer(folder), {})
    if options.force_budget and "</think>" not in subject.tokenizer.get_vocab():
        raise ConfigError(
            f"--force-budget closes the thinking with </think>, which is not a token of {folder}; "
            "leave it out for a model that does not think in tags."
        )
    for data in options.data:
        subject.sets[data] = load_problems(
            data, subject.tokenizer, options.max_prompt_tokens,
            options.prompt_key, options.label_key, options.prompt_suffix,
        )  # fmt: skip
    return subject


def check_same_problems(subjects: Sequence[Subject]) -> None:
    """Paired differences need the same problems in the same places."""
    for data in subjects[0].sets:
        if len({tuple((p.id, p.label) for p in s.sets[data][0]) for s in subjects}) > 1:
            raise ConfigError(
                f"--max-prompt-tokens drops different problems of {data} for the two models, whose "
                "tokenizers differ; raise it."
            )


# ---- scores of one problem


def score_problem(
    group: Sequence[Rollout], options: Options, grader: verify.Verifier, vote: bool = True,
    finals: Sequence[float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A row of `per_problem`: scores by name, and what they come from. vote: with maj@k. finals:
    the critic's V of each response.
    """
    n, kind, mean = len(group), group[0].problem.verifier, lambda xs: sum(xs) / len(group)
    has_answer = lambda r: kind in rewards.ANSWERS and r.reason in ANSWERED
    answers = [r.answer if has_answer(r) else None for r in group]
    # In the grader's workers, not here: a comparison of two answers can hang like any other.
    equal = lambda a, b: grader.submit(f"\\boxed{{{a}}}", b, "none", kind).result().correct
    classes = answer_classes(answers, equal)
    votes, verdicts = [len(c) for c in classes], [group[c[0]].correct == 1 for c in classes]
    right = sum(r.correct == 1 for r in group)
    scores = {f"avg@{n}": mean([r.correct for r in group])}
    for k in subset_sizes(n):
        scores[f"pass@{k}"] = pass_at_k(n, right, k)
        if vote:
            scores[f"maj@{k}"] = maj_at_k(n, votes, verdicts, k)
        if finals is not None:
            scores[f"best@{k}"] = best_at_k(finals, [r.correct for r in group], k)
    scores["truncated"] = mean([r.finish_reason == "length" for r in group])
    if options.force_budget:
        scores["forced"] = mean([len(r.response_ids) > options.max_response_tokens for r in group])
    scores["repetitive"] = mean([is_repetitive(r.text) for r in group])
    scores["length"] = mean([len(r.response_ids) for r in group])
    return {
        "id": group[0].problem.id,
        "label": group[0].problem.label,
        "n": n,
        "right": right,
        "answers": {answers[c[0]]: len(c) for c in sorted(classes, key=len, reverse=True)},
        "verdicts": dict(Counter(r.reason for r in group)),
        "scores": scores,
    }


def compare(before: Sequence[dict], after: Sequence[dict], picks: Tensor) -> dict[str, Any]:
    """Paired differences of two lists of problems (rows of `per_problem`), after minus before.

    `gained`: no response right before, at least one after; `lost`: the reverse. The change of avg
    is the sum of its parts over gained (discovery), lost, and problems solved by both (sharpening).
    """
    names = before[0]["scores"].keys()
    change = lambda name: [
        b["scores"][name] - a["scores"][name] for a, b in zip(before, after, strict=True)
    ]
    moves: dict[str, list[dict]] = {"gained": [], "lost": []}
    parts = {"discovery": 0.0, "lost": 0.0, "sharpening": 0.0}
    for a, b, gain in zip(before, after, change(f"avg@{before[0]['n']}"), strict=True):
        solved = bool(a["right"]), bool(b["right"])
        part = {(False, True): "discovery", (True, False): "lost"}.get(solved, "sharpening")
        parts[part] += gain / len(before)
        if part != "sharpening":
            row = {"id": a["id"], "before": a["right"], "after": b["right"], "n": a["n"]}
            moves["gained" if part == "discovery" else "lost"].append(row)
    differences = {name: band(change(name), picks) for name in names}
    return {"differences": differences, "avg_change": parts, **moves}


# ---- sampling


def force_answers(
    sampler: Sampler, grader: verify.Verifier, groups: list, options: Options, think: str
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


def load_sampler(subject: Subject, options: Options, device: torch.device) -> Sampler:
    """Sampler with the model of a checkpoint in the compute dtype."""
    model = Transformer.from_pretrained(subject.folder, getattr(torch, options.dtype))
    limit_threads(model, device)
    model.to(device).requires_grad_(False)
    stops = stop_ids(subject.folder, subject.tokenizer)
    return Sampler(model, stops, options.slots, subject.tokenizer)


def load_critic(options: Options, device: torch.device) -> torch.nn.Module:
    """The critic of --critic, with activations in the compute dtype."""
    from critic import Critic

    folder = part_of(options.critic, "critic")
    critic = Critic.from_pretrained(folder, getattr(torch, options.dtype))
    return critic.to(device).requires_grad_(False)


def sample_set(
    sampler: Sampler, critic: torch.nn.Module | None, grader: verify.Verifier,
    problems: Sequence[Problem], options: Options, think: str,
) -> tuple[list[list[Rollout]], list[list[float]] | None]:  # fmt: skip
    """n graded responses to every problem, and the critic's final V of each, on every rank."""
    groups = evaluate(
        sampler, grader, problems, samples=options.n, max_new_tokens=options.max_response_tokens,
        temperature=options.temperature, think=think, seed=options.seed,
        truncation=options.truncation,
    )  # fmt: skip
    if options.force_budget:
        groups = force_answers(sampler, grader, groups, options, think)
    if critic is None:
        return groups, None
    return groups, final_values(critic, groups, options.max_tokens_per_micro_batch)


def evaluate_subject(
    subject: Subject, options: Options, device: torch.device, grader: verify.Verifier
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (set, result) for every set: scores with bands, and the problems behind them. Rank 0
    scores, the others only sample.
    """
    sampler = load_sampler(subject, options, device)
    critic = load_critic(options, device) if options.critic else None
    for data, (problems, dropped) in subject.sets.items():
        think = think_mode(options.think, problems)
        groups, finals = sample_set(sampler, critic, grader, problems, options, think)
        if distributed.rank() > 0:
            continue
        if options.save_responses:
            about = {"model": subject.path, "set": data}
            rows = [about | sample_row(0, r, True) for group in groups for r in group]
            append(Path(options.save_responses), rows)
        vote = all(p.verifier in rewards.ANSWERS for p in problems)
        rows = [
            score_problem(group, options, grader, vote, finals and finals[i])
            for i, group in enumerate(groups)
        ]
        picks, names = resamples(len(rows), options.seed), rows[0]["scores"]
        result = {"problems": len(problems), "dropped": dropped, "think": think}
        result["responses"] = sum(map(len, groups))
        result["scores"] = {name: band([r["scores"][name] for r in rows], picks) for name in names}
        yield data, result | {"per_problem": rows}


def run(options: Options, device: torch.device) -> dict[str, Any]:
    """The whole evaluation: tables, files; returns the report (whole on rank 0 alone)."""
    roles = ("model", "compare") if options.compare else ("model",)
    subjects = {role: prepare(getattr(options, role), options) for role in roles}
    check_same_problems(list(subjects.values()))
    report: dict[str, Any] = {"settings": settings(options)}
    if distributed.rank() == 0:
        for file in filter(None, (options.output, options.save_responses)):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text("")  # what cannot be written fails now, not after hours
    workers, timeout = options.verifier_workers, options.verifier_timeout_s
    with Verifier(num_workers=workers, timeout_s=timeout) as grader:
        for role, subject in subjects.items():
            report[role] = {"path": subject.path, "sets": {}}
            for data, result in evaluate_subject(subject, options, device, grader):
                report[role]["sets"][data] = result
                save(options, report)
                print_result(subject.path, data, report["settings"], result)
    if options.compare and distributed.rank() == 0:
        report["comparison"] = {data: compare_set(options, report, data) for data in options.data}
        save(options, report)
        if options.output:
            draw(options, report, Path(options.output).with_suffix(".png"))
    return report


def compare_set(options: Options, report: dict, data: str) -> dict[str, Any]:
    """`compare` of one set, printed."""
    before, after = (report[role]["sets"][data]["per_problem"] for role in ("model", "compare"))
    comparison = compare(before, after, resamples(len(before), options.seed))
    print(f"\n{options.compare} minus {options.model} on {data}, paired over problems")
    print_table(report["settings"], comparison["differences"], sign="+")
    print_moves(comparison)
    return comparison


# ---- output


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


def print_result(path: str, data: str, s: dict, result: dict) -> None:
    """The table of one model on one set."""
    dropped = f", {result['dropped']} dropped: too long" if result["dropped"] else ""
    print(
        f"\n{path} on {data}: {result['problems']} problems x {s['n']} = "
        f"{result['responses']} responses{dropped}"
    )
    print_table(s | {"think": result["think"]}, result["scores"])
    if "maj@1" not in result["scores"]:
        print("no maj@k: some of these problems are of a kind that has no answer to vote for.")
    if result["scores"]["truncated"]["value"] > 0.5:
        print("WARNING: most responses were cut off; raise --max-response-tokens.")


def print_table(s: dict, scores: dict[str, dict], sign: str = "") -> None:
    """Settings, then scores with their bands: one row per k, then the others."""
    forced = f" + {s['answer_tokens']} forced" if s["force_budget"] else ""
    drawn = asdict(Truncation())
    drawn = "".join(f", {name} {s[name]:g}" for name, whole in drawn.items() if s[name] != whole)
    print(
        f"n {s['n']}, temperature {s['temperature']:g}{drawn}, "
        f"{s['max_response_tokens']} tokens{forced}, "
        f"think {s['think']}, {s['dtype']}, seed {s['seed']}, verifier {s['verifier']}; "
        f"[{LEVEL:.0%} bands over problems, {RESAMPLES} resamples]"
    )

    def cell(name: str) -> str:
        places = 1 if name == "length" else 3
        value, low, high = (  # + 0.0: a rounded -0.0 is not a loss
            f"{round(scores[name][part], places) + 0.0:{sign}.{places}f}"
            for part in ("value", "low", "high")
        )
        return f"{value} [{low}, {high}]"

    kinds = [kind for kind in KINDS if f"{kind}@1" in scores]
    row = lambda cells: "  ".join(f"{text:24}" for text in cells).rstrip()
    print(f"{'k':>12}  {row(f'{kind}@k' for kind in kinds)}")
    for k in subset_sizes(s["n"]):
        print(f"{k:12}  {row(cell(f'{kind}@{k}') for kind in kinds)}")
    for name in scores:
        if name.split("@")[0] not in kinds:
            print(f"{name:>12}  {cell(name)}")


def print_moves(comparison: dict) -> None:
    """Where the change of avg comes from, and which problems were gained and lost."""
    parts = comparison["avg_change"]
    print("avg changed by " + " ".join(f"{x:+.3f} ({name})" for name, x in parts.items()))
    for name in ("gained", "lost"):
        moved = [f"{m['id']} ({m['before']} -> {m['after']})" for m in comparison[name]]
        more = ", ..." if len(moved) > 5 else ""
        print(f"{name} {len(moved)} problems{': ' if moved else ''}{', '.join(moved[:5])}{more}")


def draw(options: Options, report: dict, file: Path) -> None:
    """Per set: scores over k of both models, their paired difference, and every problem's move."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {file}: drawing needs `pip install matplotlib`; the numbers are saved.")
        return
    figure = Figure(figsize=(13.5, 3.8 * len(options.data)), layout="tight")
    axes = figure.subplots(len(options.data), 3, squeeze=False)
    ks = subset_sizes(options.n)

    def curves(ax, scores: dict, label: str, style: str) -> None:
        for number, kind in enumerate(KINDS):
            if f"{kind}@1" in scores:
                parts = ("value", "low", "high")
                value, low, high = ([scores[f"{kind}@{k}"][p] for k in ks] for p in parts)
                ax.plot(ks, value, style, color=f"C{number}", label=f"{kind}@k {label}")
                ax.fill_between(ks, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ks, ks)
        ax.set_xlabel("k")
        ax.legend(fontsize=7, handlelength=4)

    for (left, middle, right), data in zip(axes, options.data, strict=True):
        before, after = (report[role]["sets"][data] for role in ("model", "compare"))
        curves(left, before["scores"], "before", "o--")
        curves(left, after["scores"], "after", "o-")
        left.set_title(Path(data).name, fontsize=10)
        curves(middle, report["comparison"][data]["differences"], "", "o-")
        middle.axhline(0, color="grey", linewidth=0.8)
        middle.set_title(f"after - before, paired, {LEVEL:.0%} bands", fontsize=10)
        pairs = zip(before["per_problem"], after["per_problem"], strict=True)
        moves = Counter((a["right"], b["right"]) for a, b in pairs)
        right.scatter(*zip(*moves, strict=True), s=[9 * c for c in moves.values()], alpha=0.5)
        right.plot([0, options.n], [0, options.n], color="grey", linewidth=0.8)
        right.set(xlabel=f"right of {options.n} before", ylabel=f"right of {options.n} after")
        right.set_title("problems (area: their number)", fontsize=10)
    figure.savefig(file, dpi=110)
    print(f"figure: {file}")


# ---- command line


def parse(argv: Sequence[str] | None = None) -> Options:
    """Checked options from flags; ConfigError for what cannot run."""
    about = (__doc__ or "").splitlines()[0]
    options = from_flags(HfArgumentParser(Options, allow_abbrev=False, description=about), argv)
    options.check()
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    with distributed.command("stopped; the sets that were done are in --output."):
        options = parse(argv)
        run(options, distributed.start(options))


if __name__ == "__main__":
    main()
