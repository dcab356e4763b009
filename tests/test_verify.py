"""The verifier in process: policy, cases, rewrites of labels, hostile input, command line."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
import verify
from benchmarks.label_rewrites import pairs
from verifier import algebra

HERE = Path(__file__).parent
VERIFY = HERE.parent / "verify.py"
CASES = [json.loads(line) for line in (HERE / "data" / "verify_cases.jsonl").open(encoding="utf-8")]
PAIRS = [line.split("\t") for line in (HERE / "data" / "verify_pairs.tsv").read_text().splitlines()]


def box(text):
    return f"\\boxed{{{text}}}"


def run(*arguments):
    command = [sys.executable, str(VERIFY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# --- Verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case):
    verdict = verify.verify(case["response"], case["label"])
    assert verdict.correct == case["expected"], (verdict, case["why"])
    assert verdict.reason in verify.REASONS and verdict.reason != "died"
    assert verdict.correct == (verdict.reason == "ok")


def test_pairs_follow_the_policy():
    wrong = []
    for expected, answer, label in PAIRS:
        verdict = verify.verify(box(answer), label)
        if verdict.correct != (expected == "same") or verdict.reason == "died":
            wrong.append((answer, label, verdict.reason))
    assert len(PAIRS) > 400 and not wrong


def test_rewrites_are_accepted_and_edits_are_not():
    graded = [(verify.verify(response, label), expected, answer, label)
              for response, label, expected, answer in dict.fromkeys(pairs(6500))]  # fmt: skip
    rejected = [(a, b, v.reason) for v, expected, a, b in graded if expected and not v.correct]
    accepted = [(a, b) for v, expected, a, b in graded if v.correct and not expected]
    same = sum(expected for _, expected, _, _ in graded)
    assert len(graded) >= 5000 and len(graded) - same > 2000
    assert not accepted
    assert len(rejected) <= 0.003 * same, rejected[:20]


def test_every_rewritten_label_equals_itself_as_a_value():
    labels = {label for _, label, _, _ in pairs(3000, seed=3) if "lim" not in label}
    for label in labels:
        kind, _ = verify.label_kind(label)
        assert kind == "matched by value", label


@pytest.mark.parametrize(
    ("ending", "label", "correct"),
    [
        ("\\boxed{5}. No, it is \\boxed{7}", "5", False),
        ("\\boxed{\\frac{1}{2}}", "1/2", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{-7}", "7", False),
        ("\\boxed{-7}", "-7", True),
        ("\\boxed{1{,}234}", "1234", True),
        ("\\boxed{1,234}", "1234", True),
        ("\\boxed{x=3}", "3", True),
        ("\\boxed{(1,2)}", "(2,1)", False),
        ("\\boxed{\\{1,2\\}}", "{2,1}", True),
        ("\\boxed{2\\sqrt{3}}", "sqrt(12)", True),
        ("\\boxed{}", "3", False),
        ("The answer is 3.", "3", False),
        ("so it is \\boxed{3", "3", False),
        ("\\boxed{3} and so \\boxed", "3", False),
        ("\\boxed{3}" + " as computed above." * 120, "3", True),
        ("\\boxed{0}", "0", True),
        ("\\boxed{0}", 0, True),
        ("\\boxed{2.5}", 2.5, True),
        (None, "3", False),
        ("\\boxed{None}", None, False),
    ],
)
def test_whole_responses(ending, label, correct):
    response = ending if ending is None else f"<think>\n\\boxed{{99}}\n</think>\n{ending}"
    assert verify.verify(response, label).correct == correct


@pytest.mark.parametrize(
    ("response", "think", "reason"),
    [
        ("<think>a</think>\\boxed{3}", "auto", "ok"),
        ("\\boxed{3}", "auto", "ok"),
        ("a</think>\\boxed{3}", "auto", "ok"),
        ("<think>\\boxed{3}", "auto", "no_think_end"),
        ("<think>a</think>\\boxed{3}<think>b", "auto", "no_think_end"),
        ("<think>\\boxed{3}</think>so 3", "auto", "no_box"),
        ("<think>a</think>\\boxed{4}<think>b</think>\\boxed{3}", "auto", "ok"),
        ("\\boxed{3}", "require", "no_think_end"),
        ("I think \\boxed{3}</think>", "require", "no_box"),
        ("I think</think>\\boxed{3}", "require", "ok"),
        ("<think>\\boxed{3}", "none", "ok"),
        ("\\boxed{2}</think>\\boxed{3}", "none", "hedge"),
    ],
)
def test_what_counts_as_the_final_part(response, think, reason):
    assert verify.verify(response, "3", think).reason == reason


def test_an_unknown_think_mode_is_refused():
    with pytest.raises(ValueError, match="auto, require or none"):
        verify.verify("\\boxed{3}", "3", think="yes")


@pytest.mark.parametrize(
    ("response", "label", "reason"),
    [
        ("\\boxed{3} \\boxed{4}", "4", "hedge"),
        ("\\boxed{3} \\boxed{3.0} \\boxed{6/2}", "3", "ok"),
        ("\\boxed{0.5} \\boxed{50\\%}", "50", "hedge"),  # each equals 50%, not each other
        (" ".join(box(f"{3 * k}/{k}") for k in range(1, 12)), "3", "hedge"),
        ("\\boxed{\\boxed{3}}", "3", "ok"),
        ("\\boxed{\\boxed{3}\\boxed{4}}", "12", "hedge"),
        ("\\boxed {3} \\fbox\n{3}", "3", "ok"),
        ("\\boxed{\\{3\\}", "3", "unbalanced"),
        ("\\boxed{ }", "3", "empty"),
        ("\\boxed{3}", " ", "empty"),
        ("\\boxed{3}", "$$", "empty"),
        ("\\boxed{\\sum_{k=1}^3 k}", "6", "parse"),
        ("\\boxed{\\sum_{k=1}^3 k}", "\\sum_{k=1}^3 k", "ok"),
        ("\\boxed{18=19}", "19", "wrong"),
        ("\\boxed{\\{x^2 | x>2\\}}", "(2,\\infty)", "parse"),  # read as the set of all x > 2
        ("\\boxed{{(1,2) \\choose 3}}", "3", "parse"),  # `died`, as the next one
        ("\\boxed{1/-\\begin{pmatrix} 1 & 2 \\end{pmatrix}}", "3", "parse"),
        ("\\boxed{1/0}", "19", "wrong"),
        ("\\boxed{9^{9^{9}}}", "19", "too_big"),
        (box("1" * 4001), "19", "too_big"),
    ],
)
def test_reasons(response, label, reason):
    assert verify.verify(response, label).reason == reason


def test_a_fault_in_the_grader_is_a_verdict_not_an_exception(monkeypatch):
    def broken(a, b):
        raise KeyError("a fault")

    monkeypatch.setattr(algebra, "same", broken)
    assert verify.verify("\\boxed{0.50}", "1/2") == (False, "died", "0.50")


def test_a_cached_label_changes_no_verdict_and_neither_does_repetition():
    answers = [answer for _, answer, label in PAIRS]
    labels = [label for _, answer, label in PAIRS]
    random.Random(0).shuffle(labels)
    first = [verify.equal(*pair) for pair in zip(answers, labels, strict=True)]
    again = [verify.equal(*pair) for pair in zip(answers, labels, strict=True)]
    verify.read_and_price.cache_clear()
    algebra.points.cache_clear()
    fresh = [verify.equal(*pair) for pair in zip(answers, labels, strict=True)]
    assert first == again == fresh


def test_threads_and_the_handler_of_sigalrm():
    """A grader that times out by a signal fails off the main thread, or steals the handler."""
    handler = signal.getsignal(signal.SIGALRM)
    expected = [verify.verify(c["response"], c["label"]) for c in CASES]
    results = {}

    def work(k):
        results[k] = [verify.verify(c["response"], c["label"]) for c in CASES]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(results[k] == expected for k in range(4))
    assert signal.getsignal(signal.SIGALRM) == handler


# --- Exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [25, 60, 200, 900, 2000])
@pytest.mark.parametrize("constant", ["\\sqrt{2}", "\\pi", "\\ln 3", "1+2i"])
def test_near_equal_constants_are_different(constant, digits):
    near = f"{constant} + 10^{{-{digits}}}"
    assert not verify.equal(near, constant).correct
    assert not verify.equal(constant, near).correct
    if digits < 1000:  # beyond it is refused as too big, which is never a wrong accept
        assert verify.equal(near, f"10^{{-{digits}}} + {constant}").correct


def test_near_integers_and_tiny_constants():
    assert not verify.equal("e^{\\pi\\sqrt{163}}", "262537412640768744").correct
    assert not verify.equal("e^{-2000}", "0").correct
    assert not verify.equal("e^{-2000}", "2 e^{-2000}").correct
    assert verify.equal("e^{-2000}", "(e^{-1000})^2").correct
    assert verify.equal("\\sin(\\pi)", "0").correct
    assert verify.equal("10^{300}\\sin(\\pi)", "0").correct


# --- Hostile input --------------------------------------------------------------------------------

HOSTILE = {
    "tower": box("9^{9^{9^{9}}}"),
    "factorial": box("(10^{9})!"),
    "factorials": box("((3000)!)!"),
    "nested braces": box("{" * 5000 + "4" + "}" * 5000),
    "nested brackets": box("(" * 1900 + "4" + ")" * 1900),
    "open braces": "\\boxed{" + "{" * 1_000_000,
    "open boxes": "\\boxed{" * 140_000,
    "nested boxes": "\\boxed{" * 60_000 + "4" + "}" * 60_000,
    "many boxes": "\\boxed{1}" * 110_000,
    "sweep": " ".join(map(box, range(20_000))),
    "spaces": "\\boxed" + " " * 1_000_000,
    "tags": "<think>" * 140_000,
    "digits": box("8" * 200_000),
    "long digits": box("8" * 3999),
    "sines": box("+".join(["\\sin x"] * 500)),
    "nested sines": box("\\sin " * 500 + "x"),
    "gammas": box("+".join(f"(x+{k}/7)!" for k in range(200))),
    "huge powers": box("+".join(["3^{600000}"] * 300)),
    "huge fractions": box("+".join(["(\\frac23)^{200000}+(\\frac57)^{200000}"] * 60)),
    "fractions of digits": box(f"\\frac{{{'9' * 1900}}}{{{'7' * 1900}}}+\\pi"),
    "roots": box("\\sqrt{2+" * 50 + "2" + "}" * 50),
    "x tower": box("x^{x^{x^{x^{x^{x}}}}}"),
    "plus-minus": box("\\pm" * 500 + "3"),
    "unions": box("\\cup".join(f"({k},{k + 1})" for k in range(200))),
    "chain": box("=".join(["\\sqrt{9}+\\pi"] * 100)),
    "minus signs": box("-" * 1100 + "3"),
    "long list": box(",".join(map(str, range(590)))),
    "binomials": box("+".join(["\\binom{2x}{x}"] * 70)),
    "quotients": box("1" + "/2" * 590),
    "trailing zeros": box("\\ln(10^{54})^{4046}+(10^{54})^{4046}"),
    "tiny": box("\\sqrt2+\\frac{1}{2^{1000000}}"),
    "import": box("__import__('os').system('touch /tmp/verify-was-here')"),
    "eval": box("eval('6*7')"),
    "lambda": box("(lambda: 42)()"),
    "nul": box("4\x002"),
    "surrogate": box("\ud8002"),
    "bold digits": box("\U0001d7d2\U0001d7d0"),
    "full-width digits": box("\uff14\uff12"),
    "zero-width space": box("4\u200b2"),
    "right-to-left": box("\u202e42"),
    "newline": box("4\n2"),
    "input": box("\\input{/etc/passwd}"),
    "definition": box("\\def\\x{42}\\x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_refused_in_time(name, timed):
    """Each within 0.3 s on a quiet machine; the bound has room for a slow one."""
    for label in ("42", "\\frac{\\pi^2-9}{9}", "f(x)=\\sin x", "1,2"):
        start = time.process_time()
        verdict = verify.verify(HOSTILE[name], label)
        assert time.process_time() - start < 1.0 or not timed
        assert not verdict.correct and verdict.reason != "died", verdict.reason
    assert not os.path.exists("/tmp/verify-was-here")


VOCABULARY = r"""
\frac \sqrt \binom \pi \infty \sin \log \exp ^ _ { } ( ) [ ] \{ \} | , ; : = < > \le \ge \ne \in
\cup \cap \setminus \pm \mp + - * / ! ' % \% \$ \text{ \mathrm{ \mathbb{R} \begin{pmatrix}
\end{pmatrix} & \\ \left \right \lfloor \rfloor \langle \rangle \overline \angle x y n e i 0 1 2
12 0.5 1e5 1,200 f(x) or and cm \text{cm} ^\circ ² ₁ ½ . \, \! ~ $ \boxed{ oo west \over \mid
^{9^9} 9999!
""".split()
LABELS = sorted({label for _, label, _, _ in pairs(1500, seed=1)})


def mutated(label, seed):
    rng, text = random.Random(seed), label
    for _ in range(rng.randrange(1, 5)):
        at, cut, other = rng.randrange(len(text) + 1), rng.randrange(6), rng.choice(LABELS)
        piece = rng.choice(
            (rng.choice(VOCABULARY), other[: cut + 2], text[at : at + cut] * 2, "^{" * cut)
        )
        text = text[:at] + piece + text[at + rng.choice((0, cut)) :]
    return text


def outcome(pred, label):
    """Like verify.equal, but a fault is an exception."""
    algebra.BUDGET.left = verify.BUDGET_NS
    try:
        return verify.compare(verify.clean(pred), verify.clean(label))
    except (algebra.TooBig, OverflowError):
        return "too_big"


FUZZ = os.environ.get("FUZZ_EXAMPLES")  # set by `make fuzz-verify`
answers = st.one_of(
    st.lists(st.sampled_from(VOCABULARY), max_size=25).map(" ".join),
    st.builds(mutated, st.sampled_from(LABELS), st.integers(0, 10**9)),
    st.text(max_size=30),
)


@settings(
    max_examples=int(FUZZ or 600),
    deadline=None,
    derandomize=not FUZZ,
)
@given(answers, st.one_of(st.sampled_from(LABELS), answers))
def test_fuzz_no_fault_no_hang_no_change_on_repetition(pred, label):
    start = time.process_time()
    first = outcome(pred, label)
    assert time.process_time() - start < 1.0 or not FUZZ
    verify.read_and_price.cache_clear()
    assert outcome(pred, label) == first
    assert verify.verify(box(pred), label).reason != "died"


# --- Command line and imports ---------------------------------------------------------------------


def test_neither_torch_nor_transformers_is_imported():
    code = "import sys, verify; print({'torch', 'transformers', 'sympy'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=VERIFY.parent, capture_output=True, text=True
    )
    assert out.stdout.strip() == "set()", out.stderr


def test_cases_prints_one_verdict_a_line(tmp_path):
    rows = [
        {"response": "\\boxed{3}", "label": "3"},
        {"response": "\\boxed{3}", "label": 3, "think": "require"},
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    out = run("--cases", str(file))
    assert [json.loads(line) for line in out.stdout.splitlines()] == [
        {"correct": True, "reason": "ok", "answer": "3"},
        {"correct": False, "reason": "no_think_end", "answer": None},
    ]


def test_audit_tells_what_labels_will_do(tmp_path):
    labels = ["3", "3", "1,2", "\\text{(B)}", "\\int x dx", "", "\\frac{1"]
    file = tmp_path / "labels.jsonl"
    file.write_text("\n".join(json.dumps({"label": label}) for label in labels))
    out = run("--audit", str(file))
    assert out.returncode == 1
    counts = {line[7:38].strip(): int(line[:7]) for line in out.stdout.splitlines()[1:]}
    assert "7 lines, 1 of them repeated" in out.stdout
    assert counts["matched by value"] == 3 and counts["matched only by the same text"] == 1
    assert counts["matched as words"] == 1
    assert counts["can never be matched"] == 2 and counts["empty"] == 1
    assert counts["several values"] == 1 and counts["multiple choice"] == 1
    file.write_text(json.dumps({"label": "3"}))
    assert run("--audit", str(file)).returncode == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ('{"response": "a", "label": "b"}\nnot json', "rows.jsonl:2 is not JSON"),
        ('{"response": "a"}', "rows.jsonl:1 has no label"),
        ("5", "rows.jsonl:1 is not a JSON object"),
        ('"response label"', "rows.jsonl:1 is not a JSON object"),
    ],
)
@pytest.mark.parametrize("command", ["verify --cases", "verify --audit", "rewards --audit"])
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, command, content, message):
    """A line that was JSON but not an object ended in a traceback."""
    file, (module, flag) = tmp_path / "rows.jsonl", command.split()
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        {"verify": verify, "rewards": rewards}[module].main([flag, str(file)])


def test_flags_are_not_abbreviated(tmp_path, capsys):
    """--case worked, and no other command here takes half a flag."""
    with pytest.raises(SystemExit):
        verify.main(["--case", str(tmp_path / "x.jsonl")])
    assert "unrecognized arguments: --case" in capsys.readouterr().err


def test_numbers_in_a_case_are_graded_as_text(tmp_path, capsys):
    file = tmp_path / "cases.jsonl"
    file.write_text('{"response": 5, "label": 3}\n{"response": "\\\\boxed{3}", "label": 3}\n')
    assert verify.main(["--cases", str(file)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["reason"] for row in rows] == ["no_box", "ok"]


def test_the_audit_does_not_say_that_words_are_matched_by_value(tmp_path, capsys):
    file = tmp_path / "labels.jsonl"
    file.write_text('{"label": "see solution"}\n{"label": "1/2"}\n')
    assert verify.main(["--audit", str(file)]) == 0
    counts = {
        line[7:38].strip(): int(line[:7]) for line in capsys.readouterr().out.splitlines()[1:]
    }
    assert counts == {"matched by value": 1, "matched as words": 1}


def test_one_verdict_is_explained_in_words():
    out = run("\\boxed{24 \\text{ m}}", "24\\text{ cm}")
    assert out.returncode == 1
    assert "differs from the label" in out.stdout and "a number with a unit" in out.stdout
    assert run("\\boxed{24}", "24").returncode == 0
    assert "cannot be read" in run("\\boxed{\\int}", "24").stdout
