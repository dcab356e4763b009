"""The kinds of problem that can be graded: one function for each, with the interface of verify.py.

    math         the last box equals the label by value (verify.py)
    choice       the last box holds the letter of the label
    format       thinking tags and exactly one box, whatever is in it
    instruction  countable constraints on the answer, such as 50 to 80 words or no commas
    code         a program passes tests (verifier/sandbox.py)

A data row names its kind in the field `verifier`; without one it is `math`. Each function takes
(response, label, think) and returns a Verdict. Its docstring says how a policy would game it, and
tests/test_rewards.py holds the attempts. docs/rewards.md is the user's page.

To add a kind of problem of your own:

 1. Write its function next to the others. `verify.extract` finds the box, `verify.final_part` the
    text after the thinking part. No response may make it raise. Return a Verdict, or a PartVerdict
    to pay a share; a new reason goes into REASONS.
 2. Enter it in VERIFIERS under the name that data rows will use, and in LABELS what checks a label:
    `text_label` for one text or number, or a function that refuses, with a ValueError of one
    sentence, every label that cannot be graded or that a trivial response would satisfy. A label
    is the JSON value of the data row, or its text (command line, parquet).
 3. If its verdict holds an answer that the answer of another response can equal, add the name to
    ANSWERS: majority votes then count it.
 4. Put what a policy would try into tests/test_rewards.py, malformed labels into
    `test_malformed_labels_are_named_with_file_and_line`, and a right response into
    `test_forty_threads_grade_every_kind`, which runs it in the worker pool.

Nothing else names the kinds: loading, the pool, training and evaluation read these tables.

    python rewards.py KIND RESPONSE LABEL    one verdict
    python rewards.py --audit FILE.jsonl     check the labels of every kind before training
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import verify
from verifier import pool, sandbox
from verifier.pool import PartVerdict, Verdict

REASONS = verify.REASONS | {
    "ok": "the response is what the label asks for",
    "tags": "the thinking tags are missing, repeated, out of order or around nothing",
    "filler": "the answer repeats a handful of words",
    "unmet": "a constraint is not met",
    "no_code": "there is no closed block of Python after the thinking part",
    "crash": "the program failed on a test, or exited with a status other than 0",
    "slow": "the program ran into a time limit",
}

# --- choice and format ----------------------------------------------------------------------------

FONT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def letter(text: str) -> str | None:
    """`C` of C, c, (C), C., \\text{(C)}; None for anything else."""
    text = FONT.sub(r"\1", text).strip(" ().$")
    return text.upper() if re.fullmatch("[A-Za-z]", text, re.ASCII) else None


def choice(response: str, label: str, think: str = "auto") -> Verdict:
    """Multiple choice: the last box holds the letter of the label and nothing else.

    Gaming: several letters in a box, or several boxes, hoping that one counts: wrong. Guessing is
    right once in so many options and cannot be told from knowing: prefer many options, or hide
    them and ask for the value.
    """
    found = verify.extract(response, think)
    if found.status != "ok":
        return Verdict(False, found.status, found.answer)
    letters = {letter(text) for text in (found.answer, *found.others)}
    wanted = letter(label)
    # Whatever is not a letter is None, and None must not match None
    correct = wanted is not None and letters == {wanted}
    reason = "ok" if correct else "wrong" if len(letters) == 1 else "hedge"
    return Verdict(correct, reason, found.answer)


TAGS = {"auto": ["<think>", "</think>"], "require": ["</think>"], "none": []}


def well_formed(response: str, label: str = "", think: str = "auto") -> Verdict:
    """Format: <think>, a thought, </think>, then exactly one balanced box with something in it.

    think: "require" expects that the prompt has opened the thinking, "none" no tags at all. The
    label is not read. Gaming: any box pays, so the format alone teaches to guess quickly; give it a
    small weight next to correctness. An empty thought, a second pair of tags, a box inside the
    thought or in a box, and several boxes do not pay.
    """
    if re.findall("</?think>", response) != TAGS[think]:
        return Verdict(False, "tags", None)
    thought, _, final = response.rpartition("</think>")
    before, _, thought = thought.rpartition("<think>")
    # Text before <think> would be a thought outside of the tags
    if before.strip() or (think != "none" and not thought.strip()):
        return Verdict(False, "tags", None)
    if len(verify.BOX.findall(final)) > 1:
        return Verdict(False, "hedge", None)
    found = verify.extract(final, "none")
    return Verdict(found.status == "ok", found.status, found.answer)


# --- instruction ----------------------------------------------------------------------------------

MAX_TEXT = 100_000  # characters
# 1,000 and 3.5 are one word each, and so are don't and well-known
WORD = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['’-]\w+)*")


def matches(pattern: str, flags: re.RegexFlag = re.MULTILINE) -> Callable[[str], int]:
    """A function that counts how often the pattern occurs in a text."""
    compiled = re.compile(pattern, flags)
    return lambda text: sum(1 for _ in compiled.finditer(text))


# What is counted; the argument is [least, most], with null for no bound.
COUNTED = {
    "words": lambda text: len(WORD.findall(text)),
    # Neither 3.5 nor example.com ends a sentence
    "sentences": matches(r"[.!?]+[\"'”’)]*(?=\s|\Z)"),
    "paragraphs": lambda text: len([p for p in re.split(r"\n[ \t]*\n", text) if p.strip()]),
    "bullets": matches(r"^[ \t]*[-*•] +\S"),
    "headings": matches(r"^#{1,6} +\S"),
    # A and I are capitals in any text
    "capital_words": lambda text: sum(w.isupper() and len(w) > 1 for w in WORD.findall(text)),
    "numbers": matches(r"(?<![\w.,])\d+(?:[.,]\d+)*(?!\w)"),
}
# The argument is {text: [least, most]}.
OCCURRENCES = {
    # Not \b, which finds no end in C++
    "include": lambda text, word: matches(rf"(?<!\w){re.escape(word)}(?!\w)", re.I)(text),
    "characters": lambda text, part: text.lower().count(part.lower()),
}
# The argument is a text.
EDGES = {"starts_with": str.startswith, "ends_with": str.endswith}
CASES = {"upper": str.isupper, "lower": str.islower}
CONSTRAINTS = (*COUNTED, *OCCURRENCES, *EDGES, "letters", "json")


def in_range(number: int, bounds: Sequence[int | None]) -> bool:
    """Whether a number is within [least, most]; None is no bound."""
    least, most = bounds
    return (least is None or number >= least) and (most is None or number <= most)


def is_json(text: str) -> bool:
    """Whether the text is one JSON value, by itself or in a fenced block."""
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text, re.DOTALL)
    try:
        json.loads(fenced[1] if fenced else text)
    # Thousands of open brackets are too deep for the parser
    except (ValueError, RecursionError):
        return False
    return True


def is_met(name: str, argument: Any, text: str) -> bool:
    """Whether a text, as `readable` leaves it, meets one constraint."""
    if name in COUNTED:
        return in_range(COUNTED[name](text), argument)
    if name in OCCURRENCES:
        return all(in_range(OCCURRENCES[name](text, part), b) for part, b in argument.items())
    if name in EDGES:
        return EDGES[name](text.lower(), argument.lower())
    return CASES[argument](text) if name == "letters" else is_json(text) == argument


def readable(text: str) -> str:
    """What a reader sees: compatibility forms folded (a full-width comma is a comma), invisible
    characters gone.
    """
    text = unicodedata.normalize("NFKC", text)
    return "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc") or c in "\n\t")


def is_filler(text: str) -> bool:
    """Some 50 words in a row hold fewer than 10 different ones."""
    # A window of 50 words slides along, so that filler after a real beginning is found too
    words = WORD.findall(text.lower())
    seen = collections.Counter(words[:50])
    for old, new in zip(words, words[50:], strict=False):
        if len(seen) < 10:
            return True
        seen[new] += 1
        seen[old] -= 1
        if not seen[old]:
            del seen[old]
    return len(words) >= 50 and len(seen) < 10


def instruction(response: str, label: str, think: str = "auto") -> Verdict:
    """Countable constraints on the text after the thinking part; the label is {constraint: bounds}.

    `"score": "fraction"` in the label pays the share of constraints that are met instead of all or
    nothing. Gaming: an empty answer meets every upper bound: never right. Meeting them in the
    thoughts: only the answer counts. One word a hundred times: filler. Invisible characters in a
    forbidden word, or look-alikes of another width: folded before counting. Not stopped: fluent
    text that meets the counts and ignores the question, and letters of another script.
    """
    wanted = json.loads(label)
    fraction = wanted.pop("score", "all") == "fraction"
    final = verify.final_part(response, think)
    if final is None:
        return Verdict(False, "no_think_end", None)
    text = readable(final[: MAX_TEXT + 1]).strip()
    if max(len(final), len(text)) > MAX_TEXT:  # a compatibility form may be 18 times as long
        return Verdict(False, "too_big", None)
    if not WORD.search(text):
        return Verdict(False, "empty", None)
    if is_filler(text):
        return Verdict(False, "filler", None)
    met = [is_met(name, argument, text) for name, argument in wanted.items()]
    score = sum(met) / len(met) if fraction else float(all(met))
    return PartVerdict(all(met), "ok" if all(met) else "unmet", None, score)


# --- code -----------------------------------------------------------------------------------------

MAX_PROGRAM = 64_000  # characters
TEST_SECONDS, MAX_TEST_SECONDS = 2, 30  # of CPU for a test: by default and at most
ALL_TESTS = 10  # times the limit of one test: the limit on the clock for all tests together

# One sandbox process for this process, started by the first test: workers grade one pair at a time
_child, _lock = pool.Child(), threading.Lock()


def last_program(text: str) -> str | None:
    """The last closed fenced block marked as Python; if none is marked, the last without a mark."""
    found, mark, lines = {}, None, []
    for line in text.split("\n"):
        fence = line.strip()
        if mark is None and fence.startswith("```"):
            mark, lines = (fence.strip("`").lower().split() or [""])[0], []
        elif fence == "```":
            found["python" if mark in ("python", "python3", "py") else mark] = "\n".join(lines)
            mark = None
        else:
            lines.append(line)
    # A block that never closes was cut off and is not in `found`
    return found.get("python", found.get(""))


def lines_of(text: str) -> list[str]:
    """Lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def passes(output: str, expected: Any, function: str | None) -> bool:
    """Compare here, out of the program's reach: lines of text, or the JSON of a returned value."""
    if function is None:
        return lines_of(output) == lines_of(expected)
    try:
        # The last line: a program may print as well, but the runner prints the result after it
        return json.loads(output.rstrip("\n").rpartition("\n")[2]) == expected
    except (ValueError, RecursionError):
        return False


def run_test(source: str, function: str | None, argument: Any, seconds: float) -> tuple[str, str]:
    """(outcome, output) of one test, by the sandbox process of this worker."""
    try:
        if _child.process is None:
            script = os.path.abspath(sandbox.__file__)
            # A fixed hash seed, or the order of sets would make verdicts change on repetition
            # -P -s -S: nothing but the standard library. Of the environment nothing gets in
            command, env = [sys.executable, "-P", "-s", "-S", script], {"PYTHONHASHSEED": "0"}
            _child.start(command, env, cwd="/", stderr=subprocess.DEVNULL)
        request = json.dumps([source, function, argument, seconds]).encode() + b"\n"
        # The sandbox itself ends a test after 3 times its seconds; 5 s more, and it must be stuck
        reply = _child.exchange(request, time.monotonic() + 3 * seconds + 5)
        return tuple(json.loads(reply))
    except BaseException:  # after a lost reply the next one would be taken for this test's
        _child.stop()
        raise


def outcomes(source: str, tests: dict[str, Any]) -> Iterator[str]:
    """Yield ok, wrong, crash or slow for each test, up to the one that decides."""
    function, seconds = tests.get("fn_name"), tests.get("seconds", TEST_SECONDS)
    deadline = time.monotonic() + ALL_TESTS * seconds
    for argument, expected in zip(tests["inputs"], tests["outputs"], strict=True):
        outcome, output = run_test(source, function, argument, seconds)
        if outcome == "ok" and not passes(output, expected, function):
            outcome = "wrong"
        # A slow test ends it even where shares are paid, or each of the others could take as long
        late = outcome == "slow" or time.monotonic() > deadline
        yield "slow" if late else outcome
        if late or (outcome != "ok" and tests.get("score") != "fraction"):
            return


def program(response: str, label: str, think: str = "auto") -> Verdict:
    """Code: the last Python block passes all tests, in the sandbox of verifier/sandbox.py.

    The label is {"inputs": [...], "outputs": [...]}: texts for standard input and output or, with
    "fn_name", lists of arguments and returned JSON values. "seconds": CPU limit of a test, 2 by
    default. "score": "fraction" pays the share of tests passed.

    Gaming: sys.exit(0) or os._exit(0), printing a marker of success, patching == or assert: nothing
    but the expected output passes, and that is compared in another process. Reading it: a program
    can open no file and is told one input at a time. Printing a constant: a label needs two
    different outputs (check_label); under "fraction" the commonest output does pay its share. Tests
    shown in the prompt can be memorised: keep some hidden. Loops, memory, output and processes are
    limited, and nothing a program starts survives it.
    """
    tests = json.loads(label)
    final = verify.final_part(response, think)
    if final is None:
        return Verdict(False, "no_think_end", None)
    source = last_program(final)
    if source is None:
        return Verdict(False, "no_code", None)
    if len(source) > MAX_PROGRAM:
        return Verdict(False, "too_big", None)
    with _lock:
        found = list(outcomes(source, tests))
    passed, total = found.count("ok"), len(tests["outputs"])
    reason = next((outcome for outcome in found if outcome != "ok"), "ok")
    # Of all tests: one that was not reached counts as failed
    score = passed / total if tests.get("score") == "fraction" else float(passed == total)
    return PartVerdict(passed == total, reason, None, score)


# --- labels ---------------------------------------------------------------------------------------


def require(condition: Any, sentence: str) -> None:
    """ValueError with the sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def check_bounds(name: str, bounds: Any) -> None:
    """ValueError unless bounds are [least, most]: integers or null, not both null, in order."""
    numbers = [b for b in bounds if b is not None] if isinstance(bounds, list) else []
    # type() and not isinstance(), which takes true for an integer
    ordered = numbers == sorted(numbers) and all(type(n) is int and n >= 0 for n in numbers)
    good = numbers and len(bounds) == 2 and ordered
    require(good, f"{name} takes [least, most], integers or null, not {bounds!r}")


def check_instruction(label: dict[str, Any]) -> None:
    """ValueError for constraints that do not exist or whose argument is malformed."""
    require(label.keys() - {"score"}, "an instruction label names at least one constraint")
    for name, argument in label.items():
        if name in COUNTED:
            check_bounds(name, argument)
        elif name in OCCURRENCES:
            require(
                isinstance(argument, dict) and argument and "" not in argument,
                f"{name} takes {{text: [least, most]}}, not {argument!r}",
            )
            for part, bounds in argument.items():
                check_bounds(f"{name} {part!r}", bounds)
        elif name in EDGES:
            good = isinstance(argument, str) and argument.strip() == argument != ""
            require(good, f"{name} takes a text without white space around it, not {argument!r}")
        elif name == "letters":
            require(argument in CASES, f"letters takes upper or lower, not {argument!r}")
        elif name == "json":
            require(type(argument) is bool, f"json takes true or false, not {argument!r}")
        else:
            known = ", ".join(CONSTRAINTS)
            require(name == "score", f"constraint {name!r} is unknown; choose from {known}")


def check_code(label: dict[str, Any]) -> None:
    """ValueError for tests that cannot be run, or that a program which does nothing would pass."""
    # Refused before the run starts: programs never run with less protection
    reason = sandbox.unsupported()
    require(reason is None, f"a code label cannot be used here: {reason}")
    unknown = label.keys() - {"inputs", "outputs", "fn_name", "seconds", "score"}
    require(not unknown, f"a code label has unknown fields: {', '.join(sorted(unknown))}")
    inputs, outputs, function = (label.get(name) for name in ("inputs", "outputs", "fn_name"))
    lists = isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)
    require(lists, "a code label needs `inputs` and `outputs`, two lists of the same length")
    seconds = label.get("seconds", TEST_SECONDS)
    require(
        type(seconds) in (int, float) and 0 < seconds <= MAX_TEST_SECONDS,
        f"`seconds` of a code label is above 0 and at most {MAX_TEST_SECONDS}, not {seconds!r}",
    )
    if function is None:
        texts = all(isinstance(text, str) for text in inputs + outputs)
        require(texts, "`inputs` and `outputs` of a code label without `fn_name` are texts")
        require(all(map(str.strip, outputs)), "an output is empty: doing nothing would pass it")
        outputs = ["\n".join(lines_of(output)) for output in outputs]
    else:
        name = isinstance(function, str) and function.isidentifier()
        require(name, f"`fn_name` of a code label is a name, not {function!r}")
        arguments = all(isinstance(argument, list) for argument in inputs)
        require(arguments, "with `fn_name` each of `inputs` is the list of arguments of one call")
    different = {json.dumps(output, sort_keys=True) for output in outputs}
    require(len(different) > 1, "a code label needs two different outputs, or a constant passes")


def text_label(label: Any) -> str:
    """A label that is one text or number."""
    # An empty cell of a table arrives as NaN
    value = not isinstance(label, (list, dict)) and str(label).strip().lower() != "nan"
    require(value, f"a label is one text or number, not {label!r}")
    return str(label)


def choice_label(label: Any) -> str:
    """A letter."""
    good = isinstance(label, str) and re.fullmatch("[A-Za-z]", label.strip(), re.ASCII)
    require(good, f"the label of a choice is one letter, not {label!r}")
    return label


def json_label(kind: str, label: Any, check: Callable[[dict[str, Any]], None]) -> str:
    """An object that passes `check`, as JSON text."""
    if isinstance(label, str):  # parquet columns hold JSON text
        try:
            label = json.loads(label)
        except (ValueError, RecursionError):
            label = None
    require(isinstance(label, dict), f"the label of {kind!r} must be a JSON object")
    score = label.get("score", "all")
    require(score in ("all", "fraction"), f"`score` is all or fraction, not {score!r}")
    check(label)
    return json.dumps(label)


# --- the tables -----------------------------------------------------------------------------------

# What grades a response of each kind
VERIFIERS: dict[str, pool.Grade] = {
    "math": verify.verify,
    "choice": choice,
    "format": well_formed,
    "instruction": instruction,
    "code": program,
}
# What checks the label of a data row and returns the text that the verifier takes; None: not read
LABELS: dict[str, Callable[[Any], str] | None] = {
    "math": text_label,
    "choice": choice_label,
    "format": None,
    "instruction": lambda label: json_label("instruction", label, check_instruction),
    "code": lambda label: json_label("code", label, check_code),
}
ANSWERS = ("math", "choice")  # kinds whose verdict holds an answer that another can equal


def check_label(kind: str, label: Any) -> str:
    """The label of a data row as the text that the verifiers take.

    Raises ValueError with one sentence for an unknown kind, and for a label that its verifier could
    not grade or that a trivial response would satisfy.
    """
    known = isinstance(kind, str) and kind in VERIFIERS
    require(known, f"verifier {kind!r} is unknown; choose one of {', '.join(VERIFIERS)}")
    if LABELS[kind] is None:
        return ""
    require(label not in (None, "", [], {}), "every row needs a label")
    return LABELS[kind](label)


def has_format(response: str, think: str) -> float:
    """1.0 for the right format, else 0.0: a component of --reward-mix, and --reward format_only."""
    return float(well_formed(response, "", think).correct)


class Verifier(pool.Verifier):
    """The pool of verifier/pool.py for every kind; a program gets the time of its tests on top."""

    script, kinds = __file__, tuple(VERIFIERS)

    def seconds(self, label: str, kind: str) -> float:
        """The time limit of one pair: for code also that of its tests, and of a process start."""
        if kind != "code":
            return self.timeout_s
        # A test that began before the limit of all tests may take three times its own on the clock
        test_seconds = json.loads(label).get("seconds", TEST_SECONDS)
        return self.timeout_s + 10 + (ALL_TESTS + 3) * test_seconds


# --- Command line ---------------------------------------------------------------------------------


def audit(path: str) -> int:
    """Check the labels of a file: those of other kinds here, mathematical ones by verify.audit."""
    rows, bad = verify.rows_with(path, ("label", "answer", "verifier")), 0
    for number, row in enumerate(rows, 1):
        try:
            check_label(row.get("verifier", "math"), row.get("label", row.get("answer")))
        except ValueError as error:
            bad += 1
            print(f"row {number}: {error}")
    return int(bool(verify.audit(path) or bad))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    about = "Grade answers of any kind; see the top of rewards.py."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("kind", nargs="?", choices=VERIFIERS, help="kind of problem")
    parser.add_argument("response", nargs="?", help="what a model wrote")
    parser.add_argument("label", nargs="?", help="the label of the data row")
    parser.add_argument("--audit", metavar="FILE", help="JSONL with label[, verifier] a line")
    parser.add_argument("--think", default="auto", choices=("auto", "require", "none"))
    parser.add_argument("--worker", action="store_true", help="serve a Verifier (internal)")
    args = parser.parse_args(argv)
    if args.worker:
        pool.serve(VERIFIERS)
        return 0
    if args.audit:
        return audit(args.audit)
    if args.response is None:
        parser.error("give KIND RESPONSE LABEL, or --audit FILE")
    try:
        label = check_label(args.kind, args.label)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    verdict = VERIFIERS[args.kind](args.response, label, args.think)
    right = "right" if verdict.correct else "wrong"
    print(f"{right}, score {verdict.score:g} ({verdict.reason}): {REASONS[verdict.reason]}")
    return int(not verdict.correct)


if __name__ == "__main__":
    sys.exit(main())
