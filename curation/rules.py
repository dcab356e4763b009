"""Why curate.py leaves a problem out, and its rules that need no model: what can be graded, once
each, and not in an evaluation set.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from tqdm import tqdm

import distributed
from curation import dedup
from problems import (
    LABEL_COLUMNS,
    PROMPT_COLUMNS,
    final_answer,
    find_column,
    flatten,
    is_prompt,
    read_rows,
)
from verify import OPTION, clean, equal


class Drop(NamedTuple):
    """Why a row is left out; `detail` is what it was found to be."""

    reason: str  # a key of REASONS
    detail: str = ""


REASONS = {
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


def bar(things: Iterable, what: str, **kwargs: Any) -> Iterable:
    """A progress bar on rank 0, if a terminal is there to show it."""
    return tqdm(things, what, disable=distributed.rank() > 0 or None, **kwargs)


# ---- rows


@dataclass
class Row:
    """A raw problem, and what the stages note about it."""

    where: str  # its place, for messages
    fields: dict[str, Any]  # as they stand in the file
    prompt: Any  # text or chat messages, if it is a prompt at all
    label: str  # "" if there is none
    kind: str  # of rewards.VERIFIERS
    notes: dict[str, Any] = field(default_factory=dict)  # fields to add

    @property
    def text(self) -> str:
        """What the prompt says; "" for what is no prompt."""
        return prompt_text(self.prompt) if is_prompt(self.prompt) else ""


def load_rows(path: str, prompt_key: str, label_key: str) -> list[Row]:
    """All rows of a data set. A key that is "" is found in the first row. ValueError if there is no
    row, or no such column.
    """
    raw = list(bar(read_rows(path), "rows"))
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
    text = lambda label: "" if label is None else final_answer(str(label))
    return [
        Row(where, fields, f.get(prompt_key), text(f.get(label_key)), f.get("verifier") or "math")
        for (where, fields), f in zip(raw, flat, strict=True)
    ]


def prompt_text(prompt: str | list[dict]) -> str:
    """What a prompt says: all of it, or all messages but those of the system."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(m["content"] for m in prompt if m["role"] != "system")


def load_texts(paths: Sequence[str], prompt_key: str) -> dict[str, str]:
    """What every prompt of evaluation sets says, by its place; prompt_key where a row has it."""
    texts = {}
    for where, row in (pair for path in paths for pair in read_rows(path)):
        row = flatten(row)
        prompt = row.get(prompt_key if prompt_key in row else find_column(row, PROMPT_COLUMNS))
        if not is_prompt(prompt):
            raise ValueError(f"{where} has no prompt; --prompt-key names its column.")
        texts[where] = prompt_text(prompt)
    return texts


# ---- one problem by itself

# A part is a marker and a request: "(ii) f(x + y) = f(x)" alone is a condition.
REQUEST = (
    r"(?:find|compute|calculate|determine|evaluate|solve|simplify|express|write|give|state|"
    r"prove|show|explain|what|how|hence|for (?:what|which))\b"
)
PARTS = re.compile(
    rf"(?:\s\(?(?:b|ii)\)|\s\(2\)|\bpart (?:b|ii|2)[.:)]?|^\s*(?:b|ii|2)[.:)])\s*{REQUEST}",
    re.IGNORECASE | re.MULTILINE,
)
LABEL_PARTS = re.compile(r"\(?(?:a|i|1)\)\s.*\s\(?(?:b|ii|2)\)\s", re.IGNORECASE | re.DOTALL)
OPTIONS = re.compile(
    r"(?<!\w)\(A\).*(?<!\w)\(B\).*(?<!\w)\(C\)|^\s*A[.):]\s.*^\s*B[.):]\s.*^\s*C[.):]\s",
    re.DOTALL | re.MULTILINE,
)
PROOF = re.compile(r"\b(?:prove|disprove|demonstrate|show that)\b", re.IGNORECASE)
QUESTION = re.compile(
    r"\?|\b(?:find|compute|calculate|determine|evaluate|solve|simplify|what is|how many)\b",
    re.IGNORECASE,
)
PROOF_LABEL = re.compile(r"\b(?:proof|proved|proven|q\.?e\.?d|see (?:the )?\w+)\b", re.IGNORECASE)
LABEL_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # no command of LaTeX
MAX_LABEL_WORDS = 6


def examine(text: str, label: str, kind: str, value: str | None) -> Drop | None:
    """What is wrong with a problem on its own; `verify.label_kind` gave its label this kind, and
    this kind of value.
    """
    label = clean(label)
    if not label:
        return Drop("empty_label")
    if PROOF_LABEL.search(label) or (PROOF.search(text) and not QUESTION.search(text)):
        return Drop("proof")
    if OPTION.fullmatch(label) or OPTIONS.search(text):
        return Drop("multiple_choice")
    if PARTS.search(text) or LABEL_PARTS.match(label):
        return Drop("multi_part")
    if kind != "matched by value":
        return Drop("unreadable_label", kind)
    if len(LABEL_WORD.findall(label)) > MAX_LABEL_WORDS:
        return Drop("prose_label")
    return Drop("several_values") if value in ("list", "set") else None


# ---- problems that are there twice

Words = tuple[str, ...]  # of dedup.contents


def find_repeated(
    rows: dict[int, Row], evaluation: dict[str, str], ngram: int, share: float, common: int
) -> dict[int, Drop]:
    """Rows whose problem came before, or is in an evaluation set (`load_texts`), in the same words
    or nearly: with `share` of the n-grams, but for those that `common` texts hold.
    """
    texts = [*evaluation.values(), *(row.text for row in rows.values())]
    contents = dedup.contents(texts, max(common, len(texts) // 100))
    known = dict(zip(contents, evaluation, strict=False))  # words -> place
    words = dict(zip(rows, contents[len(evaluation) :], strict=True))
    dropped = {
        i: Drop("contaminated", f"the text of {known[w]}") for i, w in words.items() if w in known
    }
    left = lambda: {i: w for i, w in words.items() if i not in dropped}
    dropped |= find_equal(rows, left())
    texts = [*known, *left().values()]
    near = bar(dedup.near(texts, ngram, share, common), "overlap", total=len(texts))
    return dropped | find_near(rows, list(left()), list(known.values()), near)


def find_equal(rows: dict[int, Row], words: dict[int, Words]) -> dict[int, Drop]:
    """Rows with the very words of another: all but the first, or all if their labels differ."""
    dropped, alike = {}, defaultdict(list)
    for i, w in words.items():
        alike[w].append(i)
    for first, *again in alike.values():
        if all(same_label(rows[i], rows[first]) for i in again):
            dropped |= {i: Drop("duplicate", f"of {rows[first].where}") for i in again}
        else:
            places = ", ".join(rows[i].where for i in (first, *again))
            dropped |= {i: Drop("conflict", places) for i in (first, *again)}
    return dropped


def find_near(
    rows: dict[int, Row], numbers: Sequence[int], known: Sequence[str], near: Iterable[list[int]]
) -> dict[int, Drop]:
    """Rows that nearly equal an evaluation problem, or an earlier row of the same label.

    near: of `dedup.near` for texts that are the evaluation problems in the places `known`, then
    the rows `numbers`.
    """
    dropped = {}
    for i, earlier in zip(numbers, islice(near, len(known), None), strict=True):
        for position in earlier:
            if position < len(known):
                dropped[i] = Drop("contaminated", f"nearly {known[position]}")
                break
            other = numbers[position - len(known)]
            if other not in dropped and same_label(rows[i], rows[other]):
                dropped[i] = Drop("near_duplicate", f"of {rows[other].where}")
                break
    return dropped


def same_label(a: Row, b: Row) -> bool:
    """Whether two rows have equal labels."""
    return equal(a.label, b.label).correct
