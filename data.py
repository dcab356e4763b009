"""Problems in, training tensors out: data files, chat template, resumable order, `Rollout`, and
`pack`.

`pack` is the one place where tokens are shifted: after it, index t of every per-token tensor means
"action `targets[t]`, taken in the state before it".
"""

import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

import jsonl
from distributed import print0
from rewards import check_label
from verify import REASONS, extract, verify


@dataclass
class Problem:
    """One verifiable problem; `index` is its row among the kept problems of its file."""

    id: str
    index: int
    prompt: str  # as the model sees it, after the chat template
    prompt_ids: list[int]
    label: str
    verifier: str = "math"  # kind of problem: a key of rewards.VERIFIERS

    @property
    def digest(self) -> int:
        """Tells a problem from another one in its place; its id may be no more than that place."""
        return zlib.crc32(json.dumps([self.prompt, self.label, self.verifier]).encode())


@dataclass
class Rollout:
    """One sampled response, finished or not; ids and log-probs are the sampler's own, never
    re-tokenised.
    """

    problem: Problem
    group: int  # number of the draw that put the problem on the table; unique in a run
    sample_index: int
    key: int  # of the counter-based random numbers: a hash of (seed, step, problem, sample)
    response_ids: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # policy updates behind each token
    finish_reason: str = "abort"  # until it is "stop" or "length"
    text: str = ""
    reward: float = 0.0  # raw: the verifier's score, or what --reward puts in its place
    correct: float = 0.0  # the verifier's score: 1 right, 0 wrong
    reason: str = ""  # the verifier's
    answer: str | None = None  # text of the graded box
    overlong_penalty: float = 0.0

    @property
    def finished(self) -> bool:
        """True once a stop token was drawn or the budget was used up."""
        return self.finish_reason != "abort"


def sample_row(step: int, r: Rollout, kept: bool) -> dict:
    """One line of rollouts.jsonl."""
    return {
        "step": step,
        "problem_id": r.problem.id,
        "draw": r.group,
        "sample_index": r.sample_index,
        "prompt": r.problem.prompt,
        "response": r.text,
        "response_ids": r.response_ids,
        "rollout_logprobs": r.rollout_logprobs,
        "reward": r.reward,
        "correct": r.correct,
        "overlong_penalty": r.overlong_penalty,
        "reason": r.reason,
        "finish_reason": r.finish_reason,
        "response_length": len(r.response_ids),
        "kept": kept,
    }


# ---- files


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Tokenizer of a checkpoint directory; one sentence when it has none."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileNotFoundError(
            f"{folder} has no tokenizer that `transformers` can load "
            f"({str(error).splitlines()[0]}); copy tokenizer.json and tokenizer_config.json there."
        ) from error


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id. Not `len(tokenizer)`: ids may have gaps, and a stop id behind
    one would never be drawn.
    """
    return max(tokenizer.get_vocab().values()) + 1


def stop_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends a response: those of generation_config.json and the tokenizer's own EOS.

    Nothing else of generation_config.json is used: its temperature or top-p would change the
    trained policy.
    """
    ids = {tokenizer.eos_token_id}
    if (Path(folder) / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos) if isinstance(eos, list) else {eos}
    ids.discard(None)
    if not ids:
        raise ValueError(
            f"{folder} names no end-of-sequence id, so no response could ever stop; "
            "add eos_token_id to its generation_config.json."
        )
    return sorted(ids)


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) for every row of a .jsonl or .parquet file, or of a data set."""
    if path.endswith((".jsonl", ".json")):
        yield from jsonl.read(path)
        return
    if Path(path).is_file() and not path.endswith(".parquet"):
        raise ValueError(f"{path}: end the name in .jsonl or .parquet, whichever it is.")
    rows = parquet_rows(path) if path.endswith(".parquet") else hub_rows(path)
    for number, row in enumerate(rows, 1):
        yield f"{path} row {number}", row


def parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a parquet file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs `pip install pyarrow`; a .jsonl file does not."
        ) from error
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; give --data a parquet file.")
    try:
        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file that can be read: {error}.") from error


def hub_rows(path: str) -> Iterable[dict[str, Any]]:
    """Rows of a data set on the hub or in a directory: NAME, or NAME:CONFIG, then @SPLIT if it has
    several splits.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        what = "is a directory" if Path(path).is_dir() else "is no file here"
        raise ImportError(
            f"{path} {what}; to read it as a data set, of the hub or a directory, `pip install "
            "datasets`. Names of files end in .jsonl or .parquet."
        ) from error
    name, _, split = path.partition("@")
    name, _, config = name.partition(":")
    try:
        splits = load_dataset(name, config or None)
    except Exception as error:  # the hub client raises a dozen kinds
        raise FileNotFoundError(
            f"{path} is neither a .jsonl or .parquet file nor a data set that can be read: "
            f"{str(error).splitlines()[0]}"
        ) from error
    chosen = split or next(iter(splits))
    if chosen not in splits or (not split and len(splits) > 1):
        raise ValueError(
            f"{path} has the splits {', '.join(splits)}; choose one, as in --data {name}@test."
        )
    return splits[chosen]


# Where known layouts keep things, in any case; the first that a file has counts. In turn: ours,
# AIME and MATH-500, GSM8K, UltraData, verl and DAPO; a `solution` holds the label in a box.
PROMPT_COLUMNS = ("prompt", "problem", "question", "query")
LABEL_COLUMNS = (
    *("label", "answer", "ground_truth", "expected_answer", "reward_model.ground_truth"),
    "solution",
)
ID_COLUMNS = ("id", "unique_id", "uuid", "extra_info.index")


def flatten(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with what a column of dictionaries holds as columns `outer.inner` beside it."""
    nested = {
        f"{outer}.{inner}": value
        for outer, values in row.items()
        if isinstance(values, dict)
        for inner, value in values.items()
    }
    return nested | row


def find_column(row: dict[str, Any], known: Sequence[str]) -> str:
    """The row's name for the first of the `known` columns that it has; else the first known one."""
    names = {name.lower(): name for name in row}
    return next((names[name] for name in known if name in names), known[0])


def final_answer(text: str) -> str:
    """The answer in a label: what follows #### (GSM8K), the last box of a worked solution (MATH),
    or all of it.
    """
    text = text.rpartition("####")[2].strip()
    return extract(text, "none").answer or text


def gradable(kind: str, label: Any) -> str:
    """The label of a data row as its verifier takes it; ValueError with one sentence for a label
    that no response could match.
    """
    text = check_label(kind, label)
    if kind != "math":
        return text
    answer = final_answer(text)
    verdict = verify(f"\\boxed{{{answer}}}", answer, "none")
    if not verdict.correct:
        raise ValueError(
            f"no answer can match the label {text[:60]!r} ({verdict.reason}: "
            f"{REASONS[verdict.reason]}); curate.py leaves such rows out"
        )
    return answer


def render_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict]) -> str:
    """The prompt as one user turn (or the given messages) through the chat template, ready for the
    answer.

    A tokenizer without a chat template, as base models have, takes plain text as it is.
    """
    if isinstance(prompt, str) and tokenizer.chat_template is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def with_suffix(prompt: str | list[dict], suffix: str) -> str | list[dict]:
    """The prompt with `suffix` on a line of its own behind the text, or the last message."""
    if not suffix:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n{suffix}"
    return [*prompt[:-1], prompt[-1] | {"content": f"{prompt[-1]['content']}\n{suffix}"}]


def is_prompt(value: Any) -> bool:
    """Text, or chat messages with role and content."""
    text = lambda x: isinstance(x, str)
    messages = isinstance(value, list) and all(isinstance(m, dict) for m in value)
    return text(value) or (
        messages and all(text(m.get("role")) and text(m.get("content")) for m in value)
    )


def load_problems(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    prompt_key: str = "",
    label_key: str = "",
    prompt_suffix: str = "",
) -> tuple[list[Problem], int]:
    """(problems, number dropped because the prompt is longer than `max_prompt_tokens`).

    Columns that are not named are found by PROMPT_COLUMNS and LABEL_COLUMNS, from the first row.
    The optional column `verifier` names the kind of a problem (rewards.py). Raises ValueError
    naming file and line for a row without prompt or label or with a label that its verifier cannot
    grade, and for a file that leaves no problem.
    """
    problems: list[Problem] = []
    dropped, id_key = 0, ""
    rows = tqdm(read_rows(path), f"reading {path}", unit="row", leave=False, delay=2, disable=None)
    for where, row in rows:
        row = flatten(row)
        if not id_key:
            id_key = find_column(row, ID_COLUMNS)
            prompt_key = prompt_key or find_column(row, PROMPT_COLUMNS)
            label_key = label_key or find_column(row, LABEL_COLUMNS)
            if (prompt_key, label_key) != (PROMPT_COLUMNS[0], LABEL_COLUMNS[0]):
                print0(f"{path}: prompts from column {prompt_key!r}, labels from {label_key!r}")
        kind = row.get("verifier") or "math"
        for name in (prompt_key, *([label_key] if kind != "format" else [])):
            if row.get(name) in (None, "", []):
                raise ValueError(
                    f"{where} has no {name!r}; every row needs a prompt and a label (columns: "
                    f"{', '.join(row)}; --prompt-key and --label-key choose)."
                )
        try:
            label = gradable(kind, row.get(label_key))
        except ValueError as error:
            raise ValueError(f"{where}: {error}.") from error
        if not is_prompt(row[prompt_key]):
            raise ValueError(
                f"{where}: {prompt_key!r} must be text, or a list of chat messages that each have "
                "a text `role` and a text `content`."
            )
        try:
            prompt = render_prompt(tokenizer, with_suffix(row[prompt_key], prompt_suffix))
            prompt.encode()  # tokenizers do not say what they have against half a surrogate pair
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        except (TemplateError, ValueError, TypeError) as error:
            raise ValueError(
                f"{where}: the chat template or the tokenizer refuses the prompt: {error}."
            ) from error
        if len(ids) > max_prompt_tokens:
            dropped += 1
            continue
        index, name = len(problems), row.get(id_key)
        name = str(index if name is None else name)
        problems.append(Problem(name, index, prompt, ids, label, kind))
    if not problems:
        why = (
            f"all {dropped} prompts are longer than --max-prompt-tokens"
            if dropped
            else "it is empty"
        )
        raise ValueError(f"{path} leaves no problem to work on: {why}.")
    return problems, dropped


def think_mode(think: str, problems: Sequence[Problem]) -> str:
    """`think`; "require" instead of "auto" where the template opens the thinking in every prompt:
    there a thought cut off must not count as an answer.
    """
    opened = all(p.prompt.rstrip().endswith("<think>") for p in problems)
    return "require" if think == "auto" and opened else think


class DataOrder:
    """Endless, resumable order of the problems, from the number of draws and what became of them.

    By default a shuffle: epoch e visits every problem once, in the order of seed + e.
    `max_pass_rate` leaves out problems solved at least that often so far (no-positive-resampling,
    ScaleRL 2510.13786), unless that would leave none. `failure_weighted` draws with replacement in
    proportion to 1 - pass rate instead. A problem not yet tried counts as never solved.
    `digests`, one per problem, tell after a resume which are still in their place.
    """

    def __init__(
        self,
        num_problems: int,
        seed: int,
        max_pass_rate: float | None = None,
        failure_weighted: bool = False,
        digests: Sequence[int] = (),
    ):
        self.num_problems, self.seed, self.digests = num_problems, seed, list(digests)
        self.max_pass_rate, self.failure_weighted = max_pass_rate, failure_weighted
        self.drawn = 0
        self.tried, self.solved = [0] * num_problems, [0.0] * num_problems
        self._epoch, self._order = -1, []

    def draw(self) -> tuple[int, int]:
        """(number of the draw, index of the problem)."""
        index = self._weighted() if self.failure_weighted else self._next()
        for _ in range(2 * self.num_problems):  # as far apart as two visits may be
            if self.max_pass_rate is None or self.pass_rate(index) < self.max_pass_rate:
                break
            index = self._weighted() if self.failure_weighted else self._next()
        return self.drawn - 1, index

    def _next(self) -> int:
        epoch, position = divmod(self.drawn, self.num_problems)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.num_problems))
            random.Random(self.seed + epoch).shuffle(self._order)
        self.drawn += 1
        return self._order[position]

    def _weighted(self) -> int:
        # 1e-3: a problem solved every time is still looked at now and then, it may be unlearnt.
        weights = [1 - self.pass_rate(i) + 1e-3 for i in range(self.num_problems)]
        generator = random.Random(f"{self.seed}:{self.drawn}")
        self.drawn += 1
        return generator.choices(range(self.num_problems), weights)[0]

    def pass_rate(self, index: int) -> float:
        """Mean raw reward of a problem so far, 0 if it was never tried."""
        return self.solved[index] / self.tried[index] if self.tried[index] else 0.0

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """Remember the raw rewards of one group."""
        self.tried[index] += len(rewards)
        self.solved[index] += sum(rewards)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the very next draw."""
        return {name: getattr(self, name) for name in ("drawn", "tried", "solved", "digests")}

    def load_state_dict(self, state: dict[str, Any]) -> set[int]:
        """Go on from `state_dict`, with as many problems; returns the places that hold another one
        than then, of which nothing is known.
        """
        if len(state["tried"]) != self.num_problems:
            raise ValueError(
                f"the checkpoint knows {len(state['tried'])} problems, --data holds "
                f"{self.num_problems}; resume with the data of the run."
            )
        then = state.get("digests", ())  # checkpoints of earlier versions have none
        changed = {i for i, (a, b) in enumerate(zip(then, self.digests, strict=False)) if a != b}
        still = lambda counts: [0 if i in changed else n for i, n in enumerate(counts)]
        self.drawn = state["drawn"]
        self.tried, self.solved = still(state["tried"]), still(state["solved"])
        return changed


# ---- tensors


@dataclass
class Batch:
    """Scalars of one step, whole on every rank: (N, T) per token, (N,) per response, T the longest
    response.
    """

    rollouts: list[Rollout]
    response_lengths: Tensor  # (N,) int64
    response_mask: Tensor  # (N, T) bool, from lengths alone
    fresh: Tensor  # (N, T) bool, those of them that the newest policy sampled
    rollout_logprobs: Tensor  # (N, T) float32
    rewards: Tensor  # (N,) float32, raw
    truncated: Tensor  # (N,) bool
    group_ids: Tensor  # (N,) int64, 0..P-1


def length_mask(lengths: Tensor, width: int | None = None) -> Tensor:
    """(N,) lengths -> (N, width) bool, true before the length. Ids play no part: pad may equal
    EOS.
    """
    if width is None:
        width = int(lengths.max()) if len(lengths) else 0
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def to_batch(
    rollouts: Sequence[Rollout], device: torch.device | str = "cpu", weight_version: int = 0
) -> Batch:
    """Scalars of finished rollouts as padded tensors. weight_version: the newest policy's."""
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
    mask = length_mask(lengths)
    logprobs = torch.zeros(mask.shape, device=device)
    logprobs[mask] = torch.tensor([x for r in rollouts for x in r.rollout_logprobs], device=device)
    versions = torch.tensor([v for r in rollouts for v in r.weight_versions], device=device)
    fresh = torch.zeros_like(mask)
    fresh[mask] = versions == weight_version
    groups = torch.tensor([r.group for r in rollouts], device=device)
    return Batch(
        rollouts=list(rollouts),
        response_lengths=lengths,
        response_mask=mask,
        fresh=fresh,
        rollout_logprobs=logprobs,
        rewards=torch.tensor([r.reward for r in rollouts], device=device),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts], device=device),
        group_ids=torch.unique(groups, return_inverse=True)[1],
    )


@dataclass
class MicroBatch:
    """Sequences laid end to end for one forward; row r of the (R, T) scalars is row `rows[r]` of
    the Batch.
    """

    rows: Tensor  # (R,) int64
    input_ids: Tensor  # (M,) int64: prompt and response of each sequence, without its last token
    cu_seqlens: Tensor  # (R+1,) int32
    action_index: Tensor  # (A,) int64: where in the M states each response token was chosen
    targets: Tensor  # (A,) int64: the response tokens, row after row
    mask: Tensor  # (R, T) bool: A true entries

    def unpack(self, actions: Tensor) -> Tensor:
        """(A,) per action -> (R, T), zero outside the mask; differentiable."""
        return actions.new_zeros(self.mask.shape).masked_scatter(self.mask, actions)


def pack(
    rollouts: Sequence[Rollout], rows: Sequence[int], device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay rollouts[i], i in rows, end to end, and shift: response token t is read at the token
    before it.

    The last token of a sequence is only ever a target, so it is not fed. No rows at all give one
    token and no action: a rank without work still takes part in the collectives of a sharded
    forward.
    """
    inputs: list[int] = []
    index: list[int] = []
    targets: list[int] = []
    boundaries = [0]
    for i in rows:
        prompt, response = rollouts[i].problem.prompt_ids, rollouts[i].response_ids
        first = (
            len(inputs) + len(prompt) - 1
        )  # the state of the first action is the last prompt token
        index += range(first, first + len(response))
        targets += response
        inputs += prompt + response[:-1]
        boundaries.append(len(inputs))
    if not rows:
        inputs, boundaries = [0], [0, 1]
    lengths = torch.tensor(
        [len(rollouts[i].response_ids) for i in rows], dtype=torch.long, device=device
    )
    tensor = lambda x, dtype=torch.long: torch.tensor(x, dtype=dtype, device=device)
    return MicroBatch(
        rows=tensor(rows),
        input_ids=tensor(inputs),
        cu_seqlens=tensor(boundaries, torch.int32),
        action_index=tensor(index),
        targets=tensor(targets),
        mask=length_mask(lengths),
    )


def partition(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Share sequences of `costs` tokens out: `result[rank]` is that rank's list of micro-batches
    (lists of rows).

    Longest first into the first micro-batch with room, so a sequence above the budget travels
    alone. Every rank gets the same number of micro-batches (sharded weights are gathered in step),
    if need be with empty ones.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        best = next((b for b, load in enumerate(loads) if load + costs[i] <= budget), None)
        if best is None:
            bins.append([])
            loads.append(0)
            best = len(bins) - 1
        bins[best].append(i)
        loads[best] += costs[i]
    while len(bins) % ranks:
        widest = max(range(len(bins)), key=lambda b: len(bins[b]))
        bins.append(bins[widest][1::2])
        bins[widest] = bins[widest][::2]
    # Heaviest first, dealt in turn: ranks hold micro-batches of like size at the same time.
    bins.sort(key=lambda rows: -sum(costs[i] for i in rows))
    return [bins[rank::ranks] for rank in range(ranks)]
