"""Rows of a raw data set as they are read, and the reasons why one is left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distributed import progress_bar
from problems import (
    LABEL_COLUMNS,
    PROMPT_COLUMNS,
    final_answer,
    find_column,
    flatten,
    is_prompt,
    read_rows,
)


class Drop(NamedTuple):
    """Why a row is left out; `detail` is what it was found to be."""

    reason: str  # a key of DROP_REASONS
    detail: str = ""


DROP_REASONS = {
    "no_prompt": "the prompt is missing, empty, or neither text nor chat messages",
    "long_prompt": "the prompt is longer than --max-prompt-tokens",
    "other_kind": "the field `verifier` names another kind than math, which no stage can judge",
    "empty_label": "the label is missing or empty",
    "proof": "a proof is asked for, or the label points to one",
    "multiple_choice": "options are listed, or the label is the letter of one",
    "multi_part": "several questions are asked",
    "unreadable_label": "the label cannot be read as a value",
    "prose_label": "the label is a sentence: only the very same words would be right",
    "several_values": "the label is a list or a set",
    "contaminated": "an evaluation set holds this problem, or nearly",
    "conflict": "the same text occurs with different labels, of which one at most is right",
    "duplicate": "the same text came before",
    "near_duplicate": "nearly the same text, with the same numbers and label, came before",
    "doubtful_label": "the audit models agree with each other and not with the label",
    "too_easy": "the target solves it too often to learn from it",
    "too_hard": "the target solves it too rarely, and no audit confirms the label",
    "hard_surplus": "as too_hard, label confirmed, but beyond --unsolved-share",
}


@dataclass
class RawProblem:
    """A row of the data set, and what the stages note about it."""

    where: str  # FILE:LINE or the like, for messages
    fields: dict[str, Any]  # as they stand in the file
    prompt: Any  # text or chat messages, if it is a prompt at all
    label: str  # "" if there is none
    kind: str  # of rewards.VERIFIERS
    notes: dict[str, Any] = field(default_factory=dict)  # fields to add to the output

    @property
    def text(self) -> str:
        """What the prompt says; "" for what is not a prompt."""
        return prompt_text(self.prompt) if is_prompt(self.prompt) else ""


def load_rows(path: str, prompt_key: str, label_key: str) -> list[RawProblem]:
    """All rows of a data set. A key that is "" is found in the first row. ValueError if there is no
    row, or no such column.
    """
    raw = list(progress_bar(read_rows(path), "rows"))
    if not raw:
        raise ValueError(f"{path} is empty: there is no row to curate.")
    flat = [flatten(fields) for _, fields in raw]
    prompt_key = prompt_key or find_column(flat[0], PROMPT_COLUMNS)
    label_key = label_key or find_column(flat[0], LABEL_COLUMNS)
    for name, key in (("prompt", prompt_key), ("label", label_key)):
        if not any(key in columns for columns in flat):
            raise ValueError(
                f"no row of {path} has {key!r} (columns: {', '.join(flat[0])}); name the column "
                f"with --{name}-key."
            )
    return [
        RawProblem(
            where,
            fields,
            prompt=columns.get(prompt_key),
            label=label_text(columns.get(label_key)),
            kind=columns.get("verifier") or "math",
        )
        for (where, fields), columns in zip(raw, flat, strict=True)
    ]


def label_text(value: Any) -> str:
    """The answer in a label column; "" if there is none."""
    return "" if value is None else final_answer(str(value))


def prompt_text(prompt: str | list[dict]) -> str:
    """What a prompt says: all of it, or all messages but those of the system."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(m["content"] for m in prompt if m["role"] != "system")


def load_texts(paths: Sequence[str], prompt_key: str) -> dict[str, str]:
    """Text of every prompt of evaluation sets, by its place. Its column is prompt_key in rows that
    have it, else found. ValueError for a row without a prompt.
    """
    texts = {}
    for path in paths:
        for where, fields in read_rows(path):
            columns = flatten(fields)
            key = prompt_key if prompt_key in columns else find_column(columns, PROMPT_COLUMNS)
            if not is_prompt(columns.get(key)):
                raise ValueError(f"{where} has no prompt; --prompt-key names its column.")
            texts[where] = prompt_text(columns[key])
    return texts
