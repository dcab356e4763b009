"""Every kind of problem and what a policy would try on it; mixes of rewards; controls."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from helpers import HashGrader, gone_within, grade_by_hash, read_metrics, same, train_run, weights

import rewards
import rollout
import train
from algorithms import ALGORITHMS
from config import Config, ConfigError, reward_weights
from data import Problem, Rollout, to_batch
from problems import load_problems, load_tokenizer
from run import alarms
from run import metrics as run_metrics
from sampler.sampling import response_key
from verify import Verdict

code = pytest.mark.skipif(rewards.sandbox.unsupported() is not None, reason="no sandbox here")


pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module", autouse=True)
def stop_sandbox():
    yield
    rewards._child.stop()


# ---- choice and format


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("\\boxed{B}", "ok"),
        ("<think>\\boxed{A}</think> so \\boxed{\\text{(b)}}", "ok"),
        ("\\boxed{B.} or rather \\boxed{(B)}", "ok"),
        ("\\boxed{A}", "wrong"),
        ("\\boxed{A, B, C, D}", "wrong"),
        ("\\boxed{A or B}", "wrong"),
        ("\\boxed{AB}", "wrong"),
        ("\\boxed{β}", "wrong"),
        ("\\boxed{A} \\boxed{C} \\boxed{B}", "hedge"),
        ("B", "no_box"),
        ("<think>\\boxed{B}", "no_think_end"),
        ("\\boxed{}", "empty"),
    ],
)
def test_choice_takes_one_letter(response, reason):
    verdict = rewards.choice(response, " b")
    assert (verdict.reason, verdict.correct, verdict.score) == (
        reason,
        reason == "ok",
        reason == "ok",
    )


@pytest.mark.parametrize(
    ("response", "think", "reason"),
    [
        ("<think>a thought</think> so \\boxed{wrong answer}", "auto", "ok"),
        ("a thought</think> so \\boxed{1}", "require", "ok"),
        ("so \\boxed{1}", "none", "ok"),
        ("so \\boxed{1}", "auto", "tags"),
        ("so \\boxed{1}", "require", "tags"),
        ("<think>a</think> \\boxed{1}", "none", "tags"),
        ("<think></think> \\boxed{1}", "auto", "tags"),
        ("<think> \n</think> \\boxed{1}", "auto", "tags"),
        ("</think>a<think> \\boxed{1}", "auto", "tags"),
        ("<think>a</think><think>b</think> \\boxed{1}", "auto", "tags"),
        ("first, <think>a</think> \\boxed{1}", "auto", "tags"),
        ("<think>a \\boxed{1}</think>", "auto", "no_box"),
        ("<think>a</think> \\boxed{1} \\boxed{1}", "auto", "hedge"),
        ("<think>a</think> \\boxed{\\boxed{1}}", "auto", "hedge"),
        ("<think>a</think> \\boxed{ }", "auto", "empty"),
        ("<think>a</think> \\boxed{1", "auto", "unbalanced"),
    ],
)
def test_format_takes_one_thought_and_one_box(response, think, reason):
    assert rewards.well_formed(response, "", think).reason == reason
    assert rewards.has_format(response, think) == (reason == "ok")


# ---- instruction

LETTER = """# A note

The SUN rose at 7.30, and 12 birds sang. Was it cold? It wasn't!

- bread
- milk and 3 eggs"""


def grade_instruction(text, think="auto", **label):
    return rewards.instruction(text, rewards.check_label("instruction", label), think)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("words", 21),
        ("sentences", 3),
        ("paragraphs", 3),
        ("bullets", 2),
        ("headings", 1),
        ("capital_words", 1),
        ("numbers", 3),
    ],
)
def test_counts_equal_those_made_by_hand(name, count):
    assert grade_instruction(LETTER, **{name: [count, count]}).correct
    assert grade_instruction(LETTER, **{name: [count, None]}).correct
    assert not grade_instruction(LETTER, **{name: [count + 1, None]}).correct
    assert not grade_instruction(LETTER, **{name: [None, count - 1]}).correct


@pytest.mark.parametrize(
    ("label", "text", "met"),
    [
        ({"include": {"sun": [1, 1]}}, LETTER, True),
        ({"include": {"bird": [1, None]}}, LETTER, False),  # birds is another word
        ({"characters": {",": [1, 1], "q": [None, 0]}}, LETTER, True),
        ({"characters": {",": [None, 0]}}, LETTER, False),
        ({"starts_with": "# a NOTE"}, LETTER, True),
        ({"ends_with": "eggs"}, LETTER + "\n", True),
        ({"ends_with": "milk"}, LETTER, False),
        ({"letters": "lower"}, "all small, 7 of them", True),
        ({"letters": "lower"}, LETTER, False),
        ({"letters": "upper"}, "LOUD", True),
        ({"json": True}, '```json\n{"a": [1]}\n```', True),
        ({"json": True}, '{"a": [1]} as you asked', False),
        ({"json": False}, LETTER, True),
    ],
)
def test_constraints_on_texts(label, text, met):
    verdict = grade_instruction(text, **label)
    assert verdict.correct == met and verdict.reason == ("ok" if met else "unmet")


@pytest.mark.parametrize(
    ("text", "label", "reason"),
    [
        ("", {"words": [None, 5]}, "empty"),
        ("\u200b\u200d \n", {"characters": {"a": [None, 0]}}, "empty"),
        ("...", {"characters": {"a": [None, 0]}}, "empty"),
        ("<think>one two three</think>", {"words": [None, 5]}, "empty"),
        ("<think>one two three</think> one", {"words": [3, 3]}, "unmet"),
        ("<think>one two three", {"words": [1, None]}, "no_think_end"),
        ("word " * 100, {"words": [100, 100]}, "filler"),
        (LETTER + " ha ho hi" * 30, {"words": [100, None]}, "filler"),
        ("a s\u200bun is a sun", {"include": {"sun": [None, 1]}}, "unmet"),
        ("a \uff53un", {"include": {"sun": [None, 0]}}, "unmet"),
        ("no comma\uff0c really", {"characters": {",": [None, 0]}}, "unmet"),
        ("x " * 60_000, {"words": [1, None]}, "too_big"),
    ],
)
def test_gaming_an_instruction_does_not_pay(text, label, reason):
    assert grade_instruction(text, **label).reason == reason
    assert grade_instruction(text, **label, score="fraction").score == 0


def test_instruction_pays_parts_only_where_the_label_says_so():
    wanted = {"words": [21, 21], "bullets": [5, None], "json": False, "numbers": [3, None]}
    assert grade_instruction(LETTER, **wanted)[:2] == (False, "unmet")
    assert grade_instruction(LETTER, **wanted).score == 0
    assert grade_instruction(LETTER, **wanted, score="fraction").score == 0.75
    del wanted["bullets"]
    assert grade_instruction(LETTER, **wanted, score="fraction").score == 1


def test_natural_text_is_not_filler():
    assert not rewards.is_filler((rewards.__doc__ + rewards.sandbox.__doc__) * 3)


# ---- code

DOUBLE = {"inputs": ["1\n", "21\n"], "outputs": ["2", "42"]}
SUM = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}


def grade_program(source, label=DOUBLE, **changes):
    text = rewards.check_label("code", label | changes)
    return rewards.program(f"<think>hm</think>\n```python\n{source}\n```\nDone.", text)


@code
@pytest.mark.parametrize(
    ("source", "label", "reason"),
    [
        ("print(2 * int(input()))", DOUBLE, "ok"),
        ("import sys\nfor x in sys.stdin: print(2 * int(x), ' \\n\\n')", DOUBLE, "ok"),
        ("print(3 * int(input()))", DOUBLE, "wrong"),
        ("print(1 / 0)", DOUBLE, "crash"),
        ("print(2 * int(input()))\nimport sys\nsys.exit(1)", DOUBLE, "crash"),
        ("print(2 * int(input()", DOUBLE, "crash"),
        ("def add(a, b):\n    print('noise')\n    return a + b", SUM, "ok"),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", SUM, "ok"),
        ("def add(a, b):\n    return a - b", SUM, "wrong"),
        ("def add(a, b):\n    return str(a + b)", SUM, "wrong"),
        (
            "import threading\nrun = lambda: print(2 * int(input()))\n"
            "threading.stack_size(1 << 26)\nthreading.Thread(target=run).start()",
            DOUBLE,
            "ok",
        ),
        ("import collections, heapq, math, numpy", DOUBLE, "crash"),
    ],
)
def test_programs_are_judged_by_their_tests(source, label, reason):
    verdict = grade_program(source, label)
    assert (verdict.reason, verdict.correct) == (reason, reason == "ok")


@code
def test_all_or_nothing_and_fractions():
    label = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "4", "4"], "seconds": 0.3}
    assert grade_program("print(input())", label)[:2] == (False, "wrong")
    assert grade_program("print(input())", label).score == 0
    assert grade_program("print(input())", label, score="fraction").score == 0.75
    slow = "x = input()\nprint(x)\nwhile x == '2': pass"
    verdict = grade_program(slow, label, score="fraction")
    assert (verdict.reason, verdict.score) == ("slow", 0.25)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n```\nwhich prints\n```\n7\n```", "a"),
        ("```python\na\n```\n```Python3 title=x\nb\nc\n```\n```text\nd\n```", "b\nc"),
        ("  ```python\n  a\n  ```", "  a"),
        ("```python\na", None),
        ("```json\n{}\n```", None),
        ("print(1)", None),
        ("```python\n" * 100_000, None),
    ],
)
def test_the_last_closed_python_block_is_the_program(text, found):
    assert rewards.last_program(text) == found


@code
def test_thoughts_and_missing_programs_do_not_run():
    label = json.dumps(DOUBLE)
    program = "```python\nprint(2 * int(input()))\n```"
    assert rewards.program(f"<think>{program}", label).reason == "no_think_end"
    assert rewards.program(f"<think>{program}</think>", label).reason == "no_code"
    assert rewards.program("```\n" + "#" * 70_000 + "\n```", label).reason == "too_big"


@code
@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "print('ok')\nprint('2 passed in 0.01s')",
        'print(\'["ok", "2"]\')\nprint(\'[true, "ok", null, 1.0]\')',
        # Every attempt to change what "equal" means changes it in the wrong process
        "class Any(str):\n    __eq__ = lambda *a: True\n    __hash__ = str.__hash__\nprint(Any())",
        "import builtins, json\njson.loads = builtins.str = lambda *a: 2\nprint('?')",
        "import sys\nsys.modules['__main__'].attempt = lambda *a: ('ok', '2')\nprint('?')",
        "import atexit, os\natexit.register(lambda: os._exit(0))",
        "import sys\nsys.stdout.close()",
        'import os\n[os.write(fd, b\'["ok", "2"]\\n\') for fd in (0, 1)]',
        # Look for the expected output in this process
        "import gc\nprint(*[o for o in gc.get_objects() if type(o) is dict and 'outputs' in o])",
        "import sys\nf = sys._getframe()\nwhile f:\n    print(f.f_locals)\n    f = f.f_back",
    ],
)
def test_success_cannot_be_faked(source):
    assert not grade_program(source).correct
    assert grade_program(source, score="fraction").score == 0
    assert grade_program("print(2 * int(input()))").correct  # the next one is judged as ever


@code
@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "class Any:\n    __eq__ = lambda *a: True\ndef add(a, b):\n    return Any()",
        "class Any(int):\n    __eq__ = lambda *a: True\ndef add(a, b):\n    return Any(0)",
        "import json\njson.dumps = lambda x: 'true'\ndef add(a, b):\n    return 0",
        "def add(a, b):\n    return float('nan')",
        "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    ],
)
def test_functions_cannot_fake_it_either(source):
    assert not grade_program(source, SUM).correct
    assert grade_program("def add(a, b):\n    return a + b", SUM).correct


# What would be possible in an ordinary process; `{path}` holds the expected outputs
BREAKOUTS = {
    "read a file": "open({path!r}).read()",
    "read the memory of the parent": "open(f'/proc/{{os.getppid()}}/maps').read()",
    "list a directory": "os.listdir('/')",
    "write here": "open('x', 'w').write('x')",
    "start a process": "os.fork() or os._exit(0)",
    "run a command": "import subprocess\n subprocess.run(['true'], check=True)",
    "leave a process behind": "os.posix_spawn('/bin/sleep', ['sleep', '0'], {{}})",
    "signal the parent": "os.kill(os.getppid(), 0)",
    "leave the process group": "os.setpgid(0, 0)",
    "a socket": "import _socket\n _socket.socket()",
    "a socket by ctypes": "import ctypes\n ok = ctypes.CDLL(None).socket(2, 1, 0) >= 0\n"
    " if not ok: raise OSError",
    "lift a limit": "import resource\n resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    "trace": "import ctypes\n ok = ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0\n"
    " if not ok: raise OSError",
    "rewrite memory": "open('/proc/self/mem', 'rb').close()",
}


@code
@pytest.mark.parametrize("name", BREAKOUTS)
def test_a_program_cannot_leave_its_process(name, tmp_path):
    secret = tmp_path / "tests.json"
    secret.write_text(json.dumps(DOUBLE))
    attempt = BREAKOUTS[name].format(path=str(secret))
    source = (
        f"import os\ntry:\n {attempt}\nexcept (OSError, ImportError, ValueError): word = 'shut'\n"
    )
    source += "else: word = 'open'\nprint(word, input())"
    plain = [sys.executable, "-c", source]
    out = subprocess.run(plain, input="1", capture_output=True, text=True, cwd=tmp_path)
    assert out.stdout == "open 1\n", out.stderr  # the attempt itself is a good one
    label = {"inputs": ["1", "2"], "outputs": ["shut 1", "shut 2"]}
    assert grade_program(source, label).reason == "ok"


HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),  # what arm64 uses
)


@pytest.mark.parametrize("column", [0, 1])
def test_system_calls_have_the_numbers_of_the_kernels_headers(column):
    if not HEADERS[column].exists():
        pytest.skip("no kernel headers here")
    text = HEADERS[column].read_text()
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    sandbox = rewards.sandbox
    wanted = sandbox.ALLOWED | {"clone": sandbox.CLONE, "clone3": sandbox.CLONE3}
    assert {name: int(numbers[name]) for name in wanted} == {
        name: pair[column] for name, pair in wanted.items()
    }


def test_without_a_filter_programs_are_refused(monkeypatch):
    monkeypatch.setattr(rewards.sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="cannot be used here: programs run on Linux on x86-64"):
        rewards.check_label("code", DOUBLE)


def session(pid):
    """Pids of the session that a process leads."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == pid:
                found.add(int(stat.parent.name))
    return found


@code
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "slow"),
        ("import time\ntime.sleep(1000)", "slow"),
        (
            "import threading\ndef f():\n while True: pass\nthreading.Thread(target=f).start()",
            "slow",
        ),
        ("import signal\nsignal.signal(signal.SIGXCPU, lambda *a: 0)\nwhile True: pass", "slow"),
        ("x = bytearray(3 << 30)", "crash"),
        ("while True: print('x' * 1000)", "crash"),
        ("import threading\nwhile True: threading.Thread(target=input, daemon=True).start()", None),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", None),
    ],
)
def test_resources_are_bounded_and_nothing_survives(source, reason, timed):
    assert grade_program("print(2 * int(input()))").correct
    launcher, start = rewards._child.process.pid, time.monotonic()
    verdict = grade_program(source, seconds=0.3)
    assert not verdict.correct and reason in (verdict.reason, None)
    assert time.monotonic() - start < 4 or not timed  # at most 1 s, and more on a busy machine
    assert session(launcher) == {launcher}
    assert grade_program("print(2 * int(input()))").correct


@code
def test_a_verdict_on_chance_does_not_change_on_repetition():
    source = (
        "import random\nprint({str(i) for i in range(50)}, random.random(), hash('a'), input())"
    )
    rewards._child.stop()
    seen = []
    for _ in range(2):
        if rewards._child.process is None:
            assert grade_program("print(2 * int(input()))").correct
        seen.append(rewards.run_test(source, None, "1", 2))
        rewards._child.stop()
    assert seen[0] == seen[1] and seen[0][0] == "ok"


@code
def test_a_dead_launcher_costs_one_verdict():
    assert grade_program("print(2 * int(input()))").correct
    os.kill(rewards._child.process.pid, signal.SIGKILL)
    with pytest.raises((EOFError, BrokenPipeError, ConnectionResetError)):
        grade_program("print(2 * int(input()))")
    assert grade_program("print(2 * int(input()))").correct


# ---- the pool


@code
def test_forty_threads_grade_every_kind():
    double = f"```python\n{'print(2 * int(input()))'}\n```"
    kinds = [
        ("math", "\\boxed{0.5}", "1/2", "auto"),
        ("choice", "\\boxed{(c)}", "C", "auto"),
        ("format", "a</think>\\boxed{?}", "", "require"),
        ("instruction", "one two", '{"words": [2, 2]}', "auto"),
        ("code", double, json.dumps(DOUBLE), "auto"),
        ("code", double.replace("2", "3"), json.dumps(DOUBLE), "auto"),
    ]
    results = {}
    with rewards.Verifier(num_workers=2, timeout_s=10) as verifier:
        with pytest.raises(ValueError, match="not 'poetry'"):
            verifier.submit("", "", kind="poetry")

        def work(k):
            kind, response, label, think = kinds[k % 6]
            results[k] = verifier.submit(response, label, think, kind).result()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(40)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for k in range(40):
        kind, response, label, think = kinds[k % 6]
        assert results[k] == rewards.VERIFIERS[kind](response, label, think)
        assert results[k].correct == (k % 6 < 5)


def descendants(pid):
    """Pids of all living processes below a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@code
def test_killing_a_worker_kills_the_program_it_judges():
    endless, others = "```python\nwhile True: pass\n```", descendants(os.getpid())
    with rewards.Verifier(num_workers=1, timeout_s=5) as verifier:
        assert verifier.submit("\\boxed{1}", "1").result().correct
        (worker,) = verifier.workers
        pending = verifier.submit(endless, json.dumps(DOUBLE | {"seconds": 30}), kind="code")
        pids, end = set(), time.monotonic() + 10
        while len(pids) < 2 and time.monotonic() < end:  # the launcher and the program
            time.sleep(0.05)
            pids = descendants(worker.process.pid)
        assert len(pids) == 2
        os.kill(worker.process.pid, signal.SIGKILL)
        assert pending.result().reason == "died"
        assert all(gone_within(pid, 5) for pid in pids)
        assert verifier.submit(endless, json.dumps(DOUBLE | {"seconds": 1}), kind="code").result()[
            :2
        ] == (False, "slow")
        pids = descendants(os.getpid()) - others
    assert all(gone_within(pid, 5) for pid in pids)


# ---- labels


@pytest.mark.parametrize(
    ("kind", "label", "words"),
    [
        ("poetry", "1", ["'poetry'", "instruction"]),
        ("math", "", ["label"]),
        ("choice", "AB", ["one letter", "'AB'"]),
        ("choice", 3, ["one letter"]),
        ("instruction", "{no json", ["JSON object"]),
        ("instruction", {"score": "all"}, ["at least one constraint"]),
        ("instruction", {"rhymes": [1, 2]}, ["'rhymes'", "words"]),
        ("instruction", {"words": 5}, ["words", "[least, most]"]),
        ("instruction", {"words": [5, 2]}, ["words"]),
        ("instruction", {"words": [None, None]}, ["words"]),
        ("instruction", {"include": {"sun": 1}}, ["include 'sun'"]),
        ("instruction", {"include": ["sun"]}, ["include"]),
        ("instruction", {"letters": "small"}, ["upper or lower"]),
        ("instruction", {"json": 1}, ["true or false"]),
        ("instruction", {"starts_with": ""}, ["starts_with"]),
        ("instruction", {"words": [1, 2], "score": 0.5}, ["`score`"]),
        ("code", {"inputs": ["1"]}, ["`inputs` and `outputs`"]),
        ("code", {"inputs": ["1"], "outputs": ["1", "2"]}, ["same length"]),
        ("code", DOUBLE | {"timeout": 3}, ["timeout"]),
        ("code", DOUBLE | {"seconds": 100}, ["`seconds`", "30"]),
        ("code", {"inputs": ["1", 2], "outputs": ["1", "2"]}, ["texts"]),
        ("code", {"inputs": ["1", "2"], "outputs": ["1", " "]}, ["nothing"]),
        ("code", {"inputs": ["1", "2"], "outputs": ["1", "1\n"]}, ["constant"]),
        ("code", SUM | {"inputs": [1, 2]}, ["list of arguments"]),
        ("code", SUM | {"fn_name": "a b"}, ["`fn_name`"]),
    ],
)
@code
def test_malformed_labels_are_named_with_file_and_line(
    kind, label, words, tmp_path, random_tiny_model
):
    rows = [{"prompt": "1", "label": "1"}, {"prompt": "1", "label": label, "verifier": kind}]
    file = tmp_path / "bad.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as error:
        load_problems(str(file), load_tokenizer(random_tiny_model), 100)
    assert all(word in str(error.value) for word in ["bad.jsonl:2", *words]), error.value
    assert "\n" not in str(error.value)


@code
def test_rows_choose_their_verifier(tmp_path, random_tiny_model, capsys):
    rows = [
        {"prompt": "1", "label": 7},
        {"prompt": "2", "verifier": "format"},
        {"prompt": "3", "label": "B", "verifier": "choice"},
        {"prompt": "4", "label": DOUBLE, "verifier": "code"},
        {"prompt": "5", "label": json.dumps({"words": [1, None]}), "verifier": "instruction"},
    ]
    file = tmp_path / "good.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems, _ = load_problems(str(file), load_tokenizer(random_tiny_model), 100)
    kinds = [problem.verifier for problem in problems]
    assert kinds == ["math", "format", "choice", "code", "instruction"]
    assert [p.label for p in problems[:3]] == ["7", "", "B"]
    assert json.loads(problems[3].label) == DOUBLE
    assert rewards.main(["--audit", str(file)]) == 0
    assert "5 lines" in capsys.readouterr().out
    file.write_text(json.dumps(rows[2] | {"label": "BC"}) + "\n")
    assert rewards.main(["--audit", str(file)]) == 1
    assert "row 1: the label of a choice" in capsys.readouterr().out


@code
def test_the_command_line_says_what_a_verdict_means(capsys):
    assert rewards.main(["choice", "\\boxed{C}", "C"]) == 0
    assert rewards.main(["instruction", "a b", '{"words": [1, 1], "json": false}']) == 1
    out = capsys.readouterr().out
    assert "right, score 1 (ok)" in out and "wrong, score 0 (unmet): a constraint" in out
    with pytest.raises(SystemExit, match="one letter"):
        rewards.main(["choice", "\\boxed{C}", "CD"])


# ---- mixes


def test_a_mix_is_parsed_or_refused_in_one_sentence():
    assert reward_weights("correct") == {"correct": 1.0}
    assert reward_weights("0.9 correct + 0.1 format") == {"correct": 0.9, "format": 0.1}
    assert reward_weights(".25*format+0.75*correct") == {"correct": 0.75, "format": 0.25}
    for mix, words in {
        "0.9 correct": "sum to 0.9",
        "correct + format": "sum to 2",
        "0.5 correct + 0.5 correct": "terms are",
        "0.9 correct - 0.1 format": "terms are",
        "0.9 correct + 0.1 style": "terms are",
        "": "terms are",
    }.items():
        with pytest.raises(ConfigError, match=words) as error:
            Config(reward_mix=mix).resolved(ALGORITHMS)
        assert "--reward-mix" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--reward random"):
        mix = "0.9 correct + 0.1 format"
        Config(reward="random", reward_mix=mix).resolved(ALGORITHMS)
    with pytest.raises(ConfigError, match="--reward "):
        Config(reward="best").resolved(ALGORITHMS)


def response(text, reward=0.0, j=0, group=0, label="1", kind="math", answer=None):
    problem = Problem("p", 0, "", [5], label, kind)
    key = response_key(0, 0, group, j)
    return Rollout(
        problem, group, j, key, [5] * (j + 2), [-1.0] * (j + 2), [0] * (j + 2), "stop", text,
        reward=reward, correct=reward, answer=answer,
    )  # fmt: skip


def test_a_mix_reaches_actor_and_critic_and_not_the_filter():
    good, bad = "<think>a</think>\\boxed{1}", "\\boxed{1}"
    group = [response(text, reward, j) for j, (text, reward) in enumerate(
        [(good, 1.0), (bad, 1.0), (good, 0.0), (bad, 0.0)])]  # fmt: skip
    batch = to_batch(group)
    config = Config(reward_mix="0.9 correct + 0.1 format").resolved(ALGORITHMS)
    actor, critic = train.shape_rewards(batch, config)
    expected = [1.0, 0.9, 0.1, 0.0]
    assert actor.sum(1).tolist() == pytest.approx(expected)
    assert critic.sum(1).tolist() == pytest.approx(expected)
    assert batch.rewards.tolist() == [1, 1, 0, 0]  # what groups were kept by, and the critic audit
    flat = [response(text, 0.0, j) for j, text in enumerate([good, bad])]
    assert not rollout.has_signal(r.reward for r in flat)


# ---- controls


class Direct:
    """Grades in process, by the real verifiers."""

    def __init__(self, **_):
        self.labels = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, response, label, think="auto", kind="math"):
        self.labels.append(label)
        future = Future()
        future.set_result(rewards.VERIFIERS[kind](response, label, think))
        return future


def majority(*boxes, kind="math"):
    grader, group = Direct(), []
    for j, text in enumerate(boxes):
        found = rewards.verify.extract(text)
        group.append(response(text, 0.0, j, label="the truth", kind=kind, answer=found.answer))
    rewarded = rollout.majority_rewards(group, grader, "auto")
    assert "the truth" not in grader.labels
    return rewarded


def box(text):
    return f"\\boxed{{{text}}}"


def test_majority_pays_the_most_frequent_answer_by_value():
    assert majority(box("3"), box("1/2"), box("0.5"), box("\\frac{1}{2}")) == [0, 1, 1, 1]
    assert majority(box("3"), box("4"), box("4"), box("3")) == [1, 0, 0, 1]  # a tie: sample 0 wins
    assert majority(box("7"), box("8"), box("9")) == [1, 0, 0]
    assert majority("no answer", "\\boxed{5", "") == [0, 0, 0]
    assert majority(box("5"), box("6") + box("5"), box("6")) == [1, 0, 0]  # no vote for a hedge
    assert majority("<think>" + box("5"), "<think>" + box("5"), box("6")) == [0, 0, 1]
    assert majority(box("B"), box("(b)"), box("A"), kind="choice") == [1, 1, 0]


def test_the_coin_is_fair_and_depends_on_the_key_alone():
    def coins(group):
        rollout.control_rewards("random", group, None, "auto")
        return [r.reward for r in group]

    groups = [[response("", 1.0, j, group=g) for j in range(8)] for g in range(500)]
    flips = [coins(group) for group in groups]
    heads = sum(map(sum, flips))
    assert {x for group in flips for x in group} == {0.0, 1.0}
    assert abs(heads - 2000) < 4 * 1000**0.5  # four standard deviations of 4000 fair coins
    again = [response("another text", 0.0, j, group=7) for j in (5, 3)]
    assert coins(again) == [flips[7][5], flips[7][3]]
    # Neighbours in every part of the key are as good as independent
    pairs = [(a, b) for group in flips for a, b in zip(group, group[1:], strict=False)]
    assert abs(sum(a == b for a, b in pairs) / len(pairs) - 0.5) < 0.04


class Inverted(HashGrader):
    """Right where the other stand-in says wrong."""

    def submit(self, *args):
        verdict = super().submit(*args).result()
        future = Future()
        future.set_result(Verdict(not verdict.correct, "ok", None))
        return future


def test_a_control_never_sees_the_label(random_tiny_model, tmp_path, monkeypatch):
    """Opposite verdicts, the same training: neither the filter nor the reward leaks correctness."""
    flags = "--steps 2 --algorithm grpo --lr 1e-2 --reward random".split()
    for name, grader in (("a", HashGrader), ("b", Inverted)):
        monkeypatch.setattr("run.setup.Verifier", grader)
        rows = train_run(tmp_path / name, *flags, model=random_tiny_model)
        assert rows[1]["rollout/correct_mean"] != rows[1]["rollout/reward_mean"]
    assert same(weights(tmp_path / "a", 2), weights(tmp_path / "b", 2))
    a, b = read_metrics(tmp_path / "a")[1], read_metrics(tmp_path / "b")[1]
    assert a["rollout/correct_mean"] == pytest.approx(1 - b["rollout/correct_mean"])


def test_random_rewards_do_not_change_on_resume(random_tiny_model, tmp_path, monkeypatch):
    grade_by_hash(monkeypatch)
    flags = "--algorithm grpo --reward random --steps".split()
    train_run(tmp_path / "a", *flags, 2, model=random_tiny_model)
    train_run(tmp_path / "b", *flags, 1, model=random_tiny_model)
    train.main(["--resume", "--output-dir", str(tmp_path / "b"), "--steps", "2"])

    def read(folder):
        rows = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
        return [(row["step"], row["sample_index"], row["reward"], row["correct"]) for row in rows]

    assert read(tmp_path / "a") == read(tmp_path / "b")
    with pytest.raises(SystemExit, match="--reward was random"):
        train.main(["--resume", "--output-dir", str(tmp_path / "b"), "--reward", "correct"])


def test_evaluation_is_on_true_correctness(random_tiny_model, tmp_path, monkeypatch):
    class Always(HashGrader):
        def submit(self, *_):
            future = Future()
            future.set_result(Verdict(True, "ok", None))
            return future

    monkeypatch.setattr("run.setup.Verifier", Always)
    evaluated = tmp_path / "eval.jsonl"
    evaluated.write_text('{"prompt": "1 a:+1", "label": "2"}\n')
    flags = ["--steps", 1, "--algorithm", "grpo", "--reward", "random", "--eval-data", evaluated]
    rows = train_run(tmp_path / "r", *flags, model=random_tiny_model)
    assert rows[0]["eval/accuracy"] == rows[1]["eval/accuracy"] == rows[1]["eval/pass_at_1"] == 1
    assert rows[1]["rollout/correct_mean"] == 1 and 0.2 < rows[1]["rollout/reward_mean"] < 0.8


def test_majority_needs_answers(random_tiny_model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1", "verifier": "format"}\n')
    with pytest.raises(SystemExit, match="--reward majority"):
        train_run(tmp_path / "r", "--reward", "majority", "--data", data, model=random_tiny_model)


def test_majority_and_a_mix_train_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.setattr("run.setup.Verifier", Direct)
    flags = "--steps 1 --algorithm grpo --max-response-tokens 128 --no-dynamic-sampling".split()
    (row,) = train_run(tmp_path / "a", *flags, "--reward", "majority").values()
    assert row["rollout/reward_mean"] > row["rollout/correct_mean"] > 0
    mix = ["--reward-mix", "0.9 correct + 0.1 format"]
    (row,) = train_run(tmp_path / "b", *flags, *mix).values()
    assert row["rollout/reward_mean"] == row["rollout/correct_mean"] > 0
    assert row["rollout/format_share"] > 0.5
    assert not same(weights(tmp_path / "a", 1), weights(tmp_path / "b", 1))


# ---- alarms


def test_a_rising_share_of_undecided_verdicts_is_said_with_its_number():
    def alarm(share, responses, earlier):
        metrics = {"rollout/undecided_share": share, "rollout/groups_finished": responses / 8}
        return alarms.verifier_alarm(metrics, 8, earlier)

    assert not alarm(0.0, 480, []) and not alarm(0.1, 480, [0.1] * 20)
    assert "25.0%" in alarm(0.25, 480, [0.25] * 20)
    risen = alarm(0.08, 480, [0.01] * 20)
    assert "8.0%" in risen and "up from 1.0%" in risen and "rewards" not in risen
    assert not alarm(0.08, 480, [0.01] * 4)  # too early to say what is usual
    assert not alarm(0.08, 8, [0.01] * 20)  # one response of eight may be chance
    assert not alarm(float("nan"), 0, [0.01] * 20)


def test_the_share_is_logged_remembered_and_said(random_tiny_model, tmp_path, monkeypatch, capsys):
    class Sick(HashGrader):
        def submit(self, response, *_):
            future, number = Future(), sum(response.encode())
            future.set_result(Verdict(number % 2 == 0, ("ok", "parse")[number % 2], None))
            return future

    monkeypatch.setattr("run.setup.Verifier", Sick)
    rows = train_run(tmp_path / "r", "--steps", 1, "--algorithm", "grpo", model=random_tiny_model)
    share = rows[1]["rollout/undecided_share"]
    assert share == rows[1]["rollout/verdict_parse"] > 0
    assert share == pytest.approx(1 - rows[1]["rollout/correct_mean"])
    assert f"could not decide {share:.1%}" in capsys.readouterr().err
    assert run_metrics.history(tmp_path / "r/metrics.jsonl", "rollout/undecided_share") == [share]
    assert run_metrics.history(tmp_path / "none", "x") == []
