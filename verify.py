"""Grade a response against a label: text in, a verdict with a reason out.

The verifier is the reward. What it wrongly accepts is what the policy learns; what it cannot finish
ends the run. So nothing here evaluates Python or simplifies symbolically, and nothing is equal "up
to a tolerance": verifier/latex.py reads an answer into a typed value (verifier/values.py), and
verifier/algebra.py compares values exactly.

    extraction   text after the last </think>; the last box; all boxes there must agree
    verdict      readings of answer and label compared; the reason is for the metrics
    Verifier     worker processes with a hard kill, for use in a trainer (verifier/pool.py)

    python verify.py --cases FILE.jsonl       one JSON verdict per {"response", "label"} line
    python verify.py --audit FILE.jsonl       what a label file will do, before training on it
    python verify.py RESPONSE LABEL           one verdict, explained in words
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

import files
from verifier import algebra, latex, pool, values
from verifier.algebra import BUDGET
from verifier.pool import Verdict, check_think
from verifier.values import NoValue, TooBig, Unreadable, Value

REASONS = {
    "ok": "the answer equals the label",
    "wrong": "the answer was understood and differs from the label",
    "no_think_end": "the thinking part has no end, so there is no final answer",
    "no_box": "there is no \\boxed{...} after the thinking part",
    "empty": "the box or the label is empty",
    "unbalanced": "the braces of a box do not close",
    "hedge": "the boxes after the thinking part do not all have the same value",
    "parse": "the answer or the label cannot be read as a value, and their texts differ",
    "too_big": "the answer is too long, too deep or too large to evaluate",
    "timeout": "grading ran into the time limit and was killed",
    "died": "the grader itself failed on this pair: a fault to report",
}
UNDECIDED = ("parse", "too_big", "timeout", "died")  # a rising share of these is a sick verifier

MAX_BOX = 4000  # characters
MAX_BOXES = 8  # different texts in the boxes of one response
BUDGET_NS = 150_000_000  # of estimated work for one response, see algebra.Budget


class Extraction(NamedTuple):
    """Text of the last box, "ok" or a reason, and the different texts of the other boxes."""

    answer: str | None
    status: str
    others: tuple = ()


# --- Extraction -----------------------------------------------------------------------------------

# \Z: a response cut off right after \boxed has an unfinished last box; no earlier one counts
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:\{|\Z)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_part(response: str, think: str) -> str | None:
    """The text to grade, or None if the thinking part has no end."""
    check_think(think)
    if think == "none":
        return response
    # A thought opened after the last answer: the response was cut off in it, and nothing counts.
    # Under "require" the prompt opened the thought, so no end tag means the same
    end = response.rfind("</think>")
    if response.rfind("<think>") > end or (think == "require" and end < 0):
        return None
    return response[end + len("</think>") :] if end >= 0 else response


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one just before `start`; escaped braces do not count."""
    depth = 1
    for match in BRACE.finditer(text, start, start + MAX_BOX + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    # The search stopped at the limit, or the text ended with the box still open
    raise TooBig if len(text) > start + MAX_BOX else Unreadable


def extract(response: str, think: str = "auto") -> Extraction:
    """Find the last box of the final part, and what the other boxes there say -> Extraction."""
    final = final_part(response, think)
    if final is None:
        return Extraction(None, "no_think_end")
    raw, latest = {}, None  # an ordered set, last box first
    # From the back: the last box is the answer, and a sweep over all answers stops after a few
    for start in reversed([match.end() for match in BOX.finditer(final)]):
        if latest and final.startswith(latest, start):
            continue  # a response stuck in a loop has 100,000 equal boxes
        try:
            end = closing_brace(final, start)
            latest = final[start : end + 1]
            raw[latest[:-1]] = None
        except TooBig:
            return Extraction(None, "too_big")
        except Unreadable:
            return Extraction(None, "unbalanced")
        if len(raw) > 2 * MAX_BOXES:  # enough to tell a hedge
            break
    if not raw:
        return Extraction(None, "no_box")
    answer, *others = dict.fromkeys(map(clean, raw))  # each text once
    return Extraction(answer, "ok" if answer else "empty", tuple(others))


def clean(text: str) -> str:
    """Strip white space, and dollar signs or boxes that enclose the whole text."""
    for _ in range(6):
        # Wrappers nest, as in $\boxed{$3$}$. Six rounds, since a hostile answer nests thousands
        before, text = text, text.strip()
        # The outer signs of "$1$, $2$" belong to two formulas and must stay
        if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
            text = text[1:-1]
        box = BOX.match(text)
        if box and len(text) < 2 * MAX_BOX and text.endswith("}"):
            try:
                # \boxed{3}\boxed{4} begins and ends like one box, but would read as the product 12
                if closing_brace(text, box.end()) == len(text) - 1:
                    text = text[box.end() : -1]
            except (TooBig, Unreadable):
                return text
        if text == before:
            break
    return text


# --- Verdict --------------------------------------------------------------------------------------

_LOCK = threading.RLock()  # the precision and the cached constants of mpmath are global


@functools.lru_cache(2048)
def read_and_price(text: str) -> tuple[list[Value], float]:
    """All readings of a text, and the work that reading took."""
    before = BUDGET.left
    return latex.read(text), before - BUDGET.left


def read(text: str) -> list[Value]:
    """All readings. The price is charged on every use, so that the cache changes no verdict."""
    before = BUDGET.left
    readings, price = read_and_price(text)
    # Undo what a miss has charged: hit and miss must pay the same
    BUDGET.left = before
    BUDGET.charge(price)
    return readings


def compare(pred: str, label: str) -> str:
    """The reason (a key of REASONS) for two texts without their wrappings."""
    if not pred or not label:
        return "empty"
    if pred == label:  # also where nobody can read them: a label \int x dx is matched by itself
        return "ok"
    # Many labels are plain integers: the same verdict as below, without parsing
    # re.ASCII, because int() takes the digits of every script: a full-width 42 must not pass
    if all(re.fullmatch(r"-?\d{1,18}", text, re.ASCII) for text in (pred, label)):
        return "ok" if int(pred) == int(label) else "wrong"
    if max(len(pred), len(label)) > MAX_BOX:
        return "too_big"
    try:
        pairs = itertools.product(read(pred), read(label))
    # Before Unreadable, of which it is a subclass: 18 = 19 was understood and is wrong
    except NoValue:
        return "wrong"
    except Unreadable:
        return "parse"
    # An ambiguous text has several readings (48,625 is a number or a list); any pair may match
    reason = "wrong"
    for pair in pairs:
        try:
            if algebra.same(*pair):
                return "ok"
        except NoValue:
            continue
        except Unreadable:
            reason = "parse"
    return reason


def judge(pred: str, label: str) -> str:
    """`compare` without exceptions: what goes wrong is a reason too."""
    try:
        return compare(clean(pred), clean(label))
    except (TooBig, RecursionError, MemoryError, OverflowError):
        return "too_big"
    except Exception:  # a fault here must not end a training run; it is counted as `died`
        return "died"


def equal(pred: str, label: str) -> Verdict:
    """Compare two answers by value -> Verdict. Equal texts are right, an empty one never is."""
    pred, label = ("" if text is None else str(text) for text in (pred, label))
    with _LOCK:
        BUDGET.left = BUDGET_NS
        reason = judge(pred, label)
    return Verdict(reason == "ok", reason, pred)


def verify(response: str, label: str, think: str = "auto") -> Verdict:
    """Grade a whole response -> Verdict. No text makes it raise.

    think: "auto" grades what follows the last </think>, or everything if there are no tags;
    "require" is for prompts that already open the thinking part: without </think> the response is
    an unfinished thought; "none" ignores the tags.
    """
    response, label = ("" if text is None else str(text) for text in (response, label))
    found = extract(response, think)
    if found.status != "ok":
        return Verdict(False, found.status, found.answer)
    # One budget for all boxes of a response, so that more boxes buy no more work
    with _LOCK:
        BUDGET.left = BUDGET_NS
        reason = judge(found.answer, label)
        for other in found.others:
            # It must fit the label as well: 50% equals both 0.5 and 50, which are not equal
            agrees = judge(other, found.answer) == "ok" and judge(other, label) == reason
            if not agrees or len(found.others) >= MAX_BOXES:
                reason = "hedge"
                break
    return Verdict(reason == "ok", reason, found.answer)


class Verifier(pool.Verifier):
    """The worker pool of verifier/pool.py for mathematical answers."""

    script, kinds = __file__, ("math",)


@functools.cache
def version(*more: str) -> str:
    """Twelve hex digits that change with the sources of the verifier, and with the files `more`.

    Reports show it, because two numbers compare only if one verifier made both.
    """
    digest = hashlib.sha256()
    for source in (__file__, latex.__file__, values.__file__, algebra.__file__, *more):
        with open(source, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:12]


# --- Command line ---------------------------------------------------------------------------------


def rows_with(path: str, *required: tuple[str, ...]) -> list[dict]:
    """The rows of a JSONL file, each with one key at least of every group in `required`.

    Exits with one sentence where a row has none, or the file cannot be read.
    """
    rows = []
    try:
        for where, row in files.read_jsonl(path):
            rows.append(row)
            for keys in required:
                if not any(key in row for key in keys):
                    raise ValueError(f"{where} has no {' or '.join(keys)}.")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    return rows


OPTION = re.compile(r"(\\\w+\{)?\(?[A-E]\)?\}?")  # a letter: B, (B), \text{B}


def label_kind(label: str) -> tuple[str, str | None]:
    """How a label will be graded, and as what it is read: "list", "set", "text", ... or None."""
    # Not even its own text is right: the label is empty or its braces do not close
    if not verify(f"\\boxed{{{label}}}", label).correct:
        return "can never be matched", None
    with contextlib.suppress(Unreadable, TooBig, RecursionError):
        BUDGET.left = BUDGET_NS
        reading = read(clean(str(label)))[0]
        if algebra.same(reading, reading):
            return "matched by value", type(reading).__name__.lower()
    return "matched only by the same text", None


def audit(path: str) -> int:
    """Print what the labels of a file will do; 1 if one of them can never be matched."""
    rows, found = rows_with(path, ("label", "answer", "verifier")), collections.defaultdict(list)
    for row in rows:
        if row.get("verifier", "math") != "math":
            found[f"  {row['verifier']}, for rewards.py --audit"].append("")
            continue
        label = row.get("label", row.get("answer"))
        kind, value = label_kind(label)
        found["matched as words" if value == "text" else kind].append(label)
        if not clean(str(label)):
            found["  empty"].append(label)
        if value in ("list", "set"):
            found["  several values"].append(label)
        if OPTION.fullmatch(clean(str(label))):
            found["  multiple choice"].append(label)
    different = len({json.dumps(row, sort_keys=True) for row in rows})
    print(f"{len(rows)} lines, {len(rows) - different} of them repeated")
    for kind, labels in sorted(found.items(), key=lambda item: item[0].startswith(" ")):
        print(f"{len(labels):7} {kind:30} {'   '.join(str(label)[:30] for label in labels[:4])}")
    return int("can never be matched" in found)


def explain(text: str) -> str:
    """In words: how a text is read."""
    try:
        BUDGET.left = BUDGET_NS
        kinds = dict.fromkeys(reading.kind for reading in read(clean(text)))
    except (Unreadable, TooBig) as error:
        return f"cannot be read: {error}"
    return "is read as " + " or ".join(kinds)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    about = "Grade answers; see the top of verify.py."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("response", nargs="?", help="a response with a box")
    parser.add_argument("label", nargs="?", help="the right answer")
    parser.add_argument("--cases", metavar="FILE", help="JSONL of response, label[, think]")
    parser.add_argument("--audit", metavar="FILE", help="JSONL with a label (or answer) a line")
    parser.add_argument("--think", default="auto", choices=("auto", "require", "none"))
    parser.add_argument("--worker", action="store_true", help="serve a Verifier (internal)")
    args = parser.parse_args(argv)
    if args.worker:
        pool.serve({"math": verify})
        return 0
    if args.audit:
        return audit(args.audit)
    if args.cases:
        for case in rows_with(args.cases, ("response",), ("label",)):
            response, label = str(case["response"]), str(case["label"])
            verdict = verify(response, label, case.get("think", args.think))
            print(json.dumps(verdict._asdict()))
        return 0
    if args.label is None:
        parser.error("give RESPONSE and LABEL, or --cases FILE, or --audit FILE")
    verdict = verify(args.response, args.label, args.think)
    right = "right" if verdict.correct else "wrong"
    print(f"{right} ({verdict.reason}): {REASONS[verdict.reason]}")
    for role, text in (("answer", verdict.answer), ("label", args.label)):
        if text is not None:
            print(f"the {role} {text!r} {explain(text)}")
    return int(not verdict.correct)


if __name__ == "__main__":
    sys.exit(main())
