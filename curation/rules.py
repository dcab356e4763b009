"""Stage 1 of curate.py, which needs no model: the rows that can be graded, once each, and not in an
evaluation set.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from curation import dedup
from curation.rows import Drop, RawProblem
from curation.solving import make_problem
from curation.state import StateFile
from distributed import progress_bar
from verify import OPTION, clean, equal, label_kind


def find_unverifiable(
    rows: Sequence[RawProblem],
    left: Sequence[int],
    state: StateFile,
    tokenizer: Any,
    evaluation: dict[str, str],
    *,
    prompt_suffix: str,
    max_prompt_tokens: int,
    drop_several_values: bool,
    ngram: int,
    ngram_overlap: float,
    ngram_common: int,
) -> dict[int, Drop]:
    """Rows of `left` (numbers into `rows`) that cannot be graded, are there twice, or are in an
    evaluation set (`load_texts`).
    """
    dropped: dict[int, Drop] = {}
    for i in progress_bar(left, "prompts"):
        row = rows[i]
        if not row.text.strip():
            dropped[i] = Drop("no_prompt")
        elif row.kind != "math":
            dropped[i] = Drop("other_kind", row.kind)
        else:
            length = len(make_problem(i, row, tokenizer, prompt_suffix).prompt_ids)
            if length > max_prompt_tokens:
                dropped[i] = Drop("long_prompt", f"{length} tokens")

    readable = [i for i in left if i not in dropped]
    # In the state file, since reading the labels of a large set takes minutes.
    for chunk in state.missing("labels", readable):
        state.add("labels", {i: list(label_kind(rows[i].label)) for i in chunk})
    for i in readable:
        found = examine(rows[i].text, rows[i].label, *state.results["labels"][i])
        if found and (found.reason != "several_values" or drop_several_values):
            dropped[i] = found

    gradable = {i: rows[i] for i in readable if i not in dropped}
    return dropped | find_repeated(gradable, evaluation, ngram, ngram_overlap, ngram_common)


# ---- one problem by itself

# A part is a marker and a request: "(ii) f(x + y) = f(x)" alone is a condition of the problem.
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
LABEL_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")  # not a command of LaTeX
MAX_LABEL_WORDS = 6


def examine(text: str, label: str, kind: str, value: str | None) -> Drop | None:
    """What is wrong with a problem on its own, if anything. kind, value: of its label, by
    `verify.label_kind`.
    """
    label = clean(label)
    if not label:
        return Drop("empty_label")
    if PROOF_LABEL.search(label) or (PROOF.search(text) and not QUESTION.search(text)):
        return Drop("proof")
    if OPTION.fullmatch(label) or OPTIONS.search(text):
        return Drop("multiple_choice")  # a guess is right too often
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
    rows: dict[int, RawProblem], evaluation: dict[str, str], ngram: int, share: float, common: int
) -> dict[int, Drop]:
    """Rows whose problem came before, or is in an evaluation set (`load_texts`), in the same words
    or nearly: with `share` of the n-grams, apart from those that `common` texts hold.
    """
    texts = [*evaluation.values(), *(row.text for row in rows.values())]
    # Lines that one text in a hundred has are instructions, such as a request to box the answer.
    contents = dedup.contents(texts, max(common, len(texts) // 100))
    known = dict(zip(contents, evaluation, strict=False))  # words -> place in an evaluation set
    words = dict(zip(rows, contents[len(evaluation) :], strict=True))
    dropped = {
        i: Drop("contaminated", f"the text of {known[w]}") for i, w in words.items() if w in known
    }
    # Each step gets what the one before it has left: a dropped row cannot make another one drop.
    left = {i: w for i, w in words.items() if i not in dropped}
    dropped |= find_equal(rows, left)
    left = {i: w for i, w in words.items() if i not in dropped}
    return dropped | find_near(rows, left, known, ngram, share, common)


def find_equal(rows: dict[int, RawProblem], words: dict[int, Words]) -> dict[int, Drop]:
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
    rows: dict[int, RawProblem],
    words: dict[int, Words],
    known: dict[Words, str],
    ngram: int,
    share: float,
    common: int,
) -> dict[int, Drop]:
    """Rows that nearly equal an evaluation problem, or an earlier row of the same label. known:
    place of each evaluation problem by its words.
    """
    numbers, places = list(words), list(known.values())
    texts = [*known, *words.values()]  # the evaluation problems, then the rows
    near = progress_bar(dedup.near(texts, ngram, share, common), "overlap", total=len(texts))
    dropped: dict[int, Drop] = {}
    for position, earlier in enumerate(near):
        if position < len(places):
            continue  # an evaluation problem: it is compared with, not judged
        i = numbers[position - len(places)]
        for other in earlier:
            if other < len(places):
                dropped[i] = Drop("contaminated", f"nearly {places[other]}")
                break
            j = numbers[other - len(places)]
            # Another label means another question in nearly the same words.
            if j not in dropped and same_label(rows[i], rows[j]):
                dropped[i] = Drop("near_duplicate", f"of {rows[j].where}")
                break
    return dropped


def same_label(a: RawProblem, b: RawProblem) -> bool:
    """Whether two rows have equal labels."""
    return equal(a.label, b.label).correct
