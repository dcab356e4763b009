"""Data files and chat templates in, `Problem`s out."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

import files
from data import Problem
from distributed import print0
from rewards import check_label
from verify import REASONS, extract, verify


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
    """One more than the largest id. Not `len(tokenizer)`: ids may have gaps, and a stop id after
    a gap would never be drawn.
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
        yield from files.read_jsonl(path)
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
    """Rows of a data set on the hub or in a directory.

    `path` is NAME[:CONFIG][@SPLIT]: openai/gsm8k:main@test is the split test of the configuration
    main of openai/gsm8k. SPLIT may be left out if there is only one.
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
    """The prompt with `suffix` on a line of its own after the text, or after the last message."""
    if not suffix:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n{suffix}"
    return [*prompt[:-1], prompt[-1] | {"content": f"{prompt[-1]['content']}\n{suffix}"}]


def is_prompt(value: Any) -> bool:
    """Text, or chat messages with role and content."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
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
        label = checked_label(where, row, kind, prompt_key, label_key)
        prompt, ids = tokenized(where, tokenizer, with_suffix(row[prompt_key], prompt_suffix))
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


def checked_label(
    where: str, row: dict[str, Any], kind: str, prompt_key: str, label_key: str
) -> str:
    """The label of a row as its verifier takes it; ValueError naming the place for a row without
    prompt or label, or with one that cannot be used.
    """
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
    return label


def tokenized(
    where: str, tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict]
) -> tuple[str, list[int]]:
    """The rendered prompt and its ids; ValueError naming the place if either step refuses it."""
    try:
        text = render_prompt(tokenizer, prompt)
        text.encode()  # tokenizers raise nothing readable for half a surrogate pair
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]
    except (TemplateError, ValueError, TypeError) as error:
        raise ValueError(
            f"{where}: the chat template or the tokenizer refuses the prompt: {error}."
        ) from error


def think_mode(think: str, problems: Sequence[Problem]) -> str:
    """`think`; "require" instead of "auto" where the template opens the thinking in every prompt:
    there a thought cut off must not count as an answer.
    """
    opened = all(p.prompt.rstrip().endswith("<think>") for p in problems)
    return "require" if think == "auto" and opened else think
