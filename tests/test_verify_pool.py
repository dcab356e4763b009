"""The worker pool of the verifier: order, hard kill, respawn, no orphan, no leak."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, alive, gone_within

import verify
from benchmarks.label_rewrites import pairs
from verifier import pool

CASES = [
    json.loads(line) for line in (ROOT / "tests/data/verify_cases.jsonl").open(encoding="utf-8")
]
SUMS = [(f"<think>x</think>\\boxed{{{k}}}", str(k + (k % 3 == 0))) for k in range(60)]
EXPECTED = [k % 3 != 0 for k in range(60)]

# A verifier that misbehaves on certain labels and is the real one on all others
SICK = """
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
import verify
from verifier import pool
def sick(response, label, think="auto"):
    if label == "hang":
        while True:
            pass
    if label == "sleep through alarms":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(1000)
    if label == "die":
        os._exit(3)
    if label == "eat memory":
        bytearray(3 << 30)
    if label == "environment":
        return verify.Verdict(True, "ok", json.dumps(dict(os.environ)))
    if label == "pid":
        return verify.Verdict(True, "ok", str(os.getpid()))
    if label == "chatter":
        print("a stray line", flush=True)
        os.write(1, b"another\\n")
        sys.stdin.readline()
    return verify.verify(response, label, think)
pool.serve({{"math": sick}})
"""


@pytest.fixture
def sick(tmp_path, monkeypatch):
    script = tmp_path / "sick_verify.py"
    script.write_text(SICK.format(root=str(ROOT)))
    monkeypatch.setattr(verify.Verifier, "script", str(script))
    return script


def children():
    """Pids of our child processes, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def test_verdicts_come_in_order_and_equal_those_in_process():
    before = children()
    with verify.Verifier(num_workers=2, timeout_s=20) as verifier:
        pairs = [(case["response"], case["label"]) for case in CASES]
        assert verifier.score(pairs) == [verify.verify(*pair) for pair in pairs]
        assert verifier.score(pairs[:20], think="require") == [
            verify.verify(*p, "require") for p in pairs[:20]
        ]
        assert verifier.submit("\\boxed{1/2}", "0.5").result() == (True, "ok", "1/2")
        with pytest.raises(ValueError, match="auto, require or none"):
            verifier.submit("\\boxed{1/2}", "0.5", think="yes")
        assert len(children() - before) == 2
    assert children() == before  # no process is left, not even a zombie


def test_any_text_passes_the_protocol():
    texts = [
        "\x00",
        "\ud800",
        "a\nb\r\n\u2028c",
        "\U0001f600" * 1000,
        "",
        "x" * 1_000_000,
        "\\boxed{\x00\udfff}",
    ]
    with verify.Verifier(num_workers=1, timeout_s=30) as verifier:
        assert verifier.score([(text, "3") for text in texts]) == [
            verify.verify(text, "3") for text in texts
        ]
        assert verifier.score([("\\boxed{3}", text) for text in texts]) == [
            verify.verify("\\boxed{3}", text) for text in texts
        ]
        labels = (3, np.int64(3), np.float64(3), None)  # as they come out of a parquet file
        verdicts = verifier.score([("\\boxed{3}", label) for label in labels] + [(None, "3")])
        assert [v.reason for v in verdicts] == ["ok", "ok", "ok", "empty", "no_box"]


@pytest.mark.parametrize("label", ["hang", "sleep through alarms"])
def test_a_hang_is_killed_at_the_deadline_and_the_next_pair_is_right(sick, label, timed):
    with verify.Verifier(num_workers=1, timeout_s=0.5) as verifier:
        assert verifier.submit("\\boxed{1}", "1").result().correct  # now the worker is warm
        start = time.monotonic()
        assert verifier.submit("\\boxed{1}", label).result() == (False, "timeout", None)
        assert time.monotonic() - start < 0.5 + 1.0 or not timed  # 0.5 s more on a quiet machine
        assert verifier.score(SUMS[:5]) == [verify.verify(*pair) for pair in SUMS[:5]]


def test_time_spent_in_the_queue_does_not_count(sick):
    """The deadline runs from dispatch: the pairs after a hang are graded and not timed out."""
    with verify.Verifier(num_workers=1, timeout_s=0.7) as verifier:
        verdicts = verifier.score([("", "hang"), ("", "hang"), *SUMS[:10]])
    assert [v.reason for v in verdicts[:2]] == ["timeout"] * 2
    assert [v.correct for v in verdicts[2:]] == EXPECTED[:10]


def test_death_memory_and_stray_prints_cost_one_pair_at_most(sick):
    with verify.Verifier(num_workers=1, timeout_s=10) as verifier:
        assert verifier.submit("\\boxed{1}", "die").result() == (False, "died", None)
        assert verifier.submit("\\boxed{1}", "1").result().correct
        assert verifier.submit("\\boxed{1}", "eat memory").result().reason == "died"
        assert verifier.submit("\\boxed{1}", "1").result().correct
        assert verifier.submit("\\boxed{chatter}", "chatter").result().correct
        assert verifier.submit("\\boxed{1}", "1").result().correct


def test_a_worker_stopped_from_outside_is_replaced():
    with verify.Verifier(num_workers=1, timeout_s=1) as verifier:
        assert verifier.submit("\\boxed{1}", "1").result().correct
        (worker,) = verifier.workers
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert verifier.submit("\\boxed{1}", "1").result().reason == "timeout"
        assert verifier.submit("\\boxed{1}", "1").result().correct
        worker.process.kill()
        worker.process.wait()
        assert verifier.submit("\\boxed{1}", "1").result().reason == "died"
        assert verifier.submit("\\boxed{1}", "1").result().correct


def test_workers_are_recycled(sick, monkeypatch):
    monkeypatch.setattr(pool, "PAIRS_PER_WORKER", 2)
    with verify.Verifier(num_workers=1, timeout_s=10) as verifier:
        pids = [verdict.answer for verdict in verifier.score([("", "pid")] * 5)]
    assert pids[0] == pids[1] and pids[2] == pids[3] and len(set(pids)) == 3


def test_workers_see_neither_the_devices_nor_the_process_group(sick, monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "1")
    with verify.Verifier(num_workers=1) as verifier:
        seen = json.loads(verifier.submit("", "environment").result().answer)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(seen)
    assert seen["CUDA_VISIBLE_DEVICES"] == "" and seen["OMP_NUM_THREADS"] == "1"


def test_forty_threads_and_power_towers(sick):
    """Every tenth pair hangs; each thread gets its own right verdicts."""
    handler = signal.getsignal(signal.SIGALRM)
    results = {}
    with verify.Verifier(num_workers=2, timeout_s=1) as verifier:

        def work(k):
            pair = ("\\boxed{1}", "hang") if k % 10 == 5 else SUMS[k]
            results[k] = verifier.score([pair, SUMS[k]])

        threads = [threading.Thread(target=work, args=(k,)) for k in range(40)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for k in range(40):
        assert results[k][1].correct == EXPECTED[k]
        assert results[k][0].reason == ("timeout" if k % 10 == 5 else results[k][1].reason)
    assert signal.getsignal(signal.SIGALRM) == handler


def test_the_alarm_of_the_worker_ends_a_hang_without_the_parent(sick):
    process = subprocess.Popen(
        [sys.executable, str(sick)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    process.stdin.write(json.dumps(["", "hang", "auto", "math", 0.3]).encode() + b"\n")
    process.stdin.flush()
    assert process.wait(timeout=10) == -signal.SIGALRM


PARENT = """
import sys, threading, time
sys.path.insert(0, {root!r})
import verify
verify.Verifier.script = {script!r}
verifier = verify.Verifier(num_workers=1, timeout_s=600)
print(verifier.submit("", "pid").result().answer, flush=True)
verifier.submit("", "hang")
time.sleep(600)
"""


def test_kill_9_of_the_trainer_leaves_no_orphan(sick):
    code = PARENT.format(root=str(ROOT), script=str(sick))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    assert alive(child)
    parent.kill()
    parent.wait()
    assert gone_within(child, 5)


def test_a_parent_without_standard_streams(tmp_path):
    code = f"""
import os, sys
os.close(0); os.close(1); os.close(2)
sys.path.insert(0, {str(ROOT)!r})
import verify
with verify.Verifier(num_workers=2, timeout_s=30) as verifier:
    verdicts = verifier.score([("\\\\boxed{{1/2}}", "0.5"), ("\\\\boxed{{3}}", "4")])
open({str(tmp_path / "out")!r}, "w").write(repr([v.reason for v in verdicts]))
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
    assert (tmp_path / "out").read_text() == "['ok', 'wrong']"


def test_descriptors_above_1023():
    """select() raises on them, and a trainer with many shards open has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("the limit on open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with verify.Verifier(num_workers=1, timeout_s=30) as verifier:
            assert verifier.submit("\\boxed{1}", "1").result().correct
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_cannot_start_is_an_error_and_not_a_reward_of_zero(tmp_path, monkeypatch):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(verify.Verifier, "script", str(script))
    with (
        verify.Verifier(num_workers=1) as verifier,
        pytest.raises(RuntimeError, match="does not start"),
    ):
        verifier.score(SUMS[:1])


def usage(pid):
    """Resident MiB and CPU seconds of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, seconds


@pytest.mark.slow
def test_memory_is_flat_and_800_checks_a_second_fit_two_cores():
    """Over 25,000 checks. CPU time, because wall time says little on a shared machine."""
    graded = [(response, label) for response, label, _, _ in pairs(5000)]
    with verify.Verifier(num_workers=2) as verifier:
        verifier.score(graded)
        pids = [worker.process.pid for worker in verifier.workers]
        before, start, cpu = list(map(usage, pids)), time.monotonic(), time.process_time()
        for _ in range(5):
            verifier.score(graded)
        after, wall = list(map(usage, pids)), time.monotonic() - start
    growth = max(b[0] - a[0] for a, b in zip(before, after, strict=True))
    cpu = time.process_time() - cpu + sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    count = 5 * len(graded)
    print(f"{1000 * cpu / count:.2f} ms CPU a check, {count / wall:.0f}/s, growth {growth:.1f} MiB")
    assert growth < 10
    assert 2 / (cpu / count) > 800


RANK = """
import sys
sys.path.insert(0, {root!r})
import distributed, verify
with distributed.joined("cpu"), verify.Verifier(num_workers=2, timeout_s=5) as verifier:
    tower = "\\\\boxed{{9^{{9^{{9^{{9}}}}}}}}"
    pairs = [("\\\\boxed{{%d}}" % k if k % 10 else tower, str(k)) for k in range(40)]
    right = [v.correct for v in verifier.score(pairs)] == [k % 10 > 0 for k in range(40)]
    distributed.barrier()
    print("rank", distributed.rank(), right, flush=True)
"""


@pytest.mark.slow
def test_under_torchrun_with_two_ranks(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANK.format(root=str(ROOT)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29731",
        str(script),
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "rank 0 True" in out.stdout and "rank 1 True" in out.stdout, out.stderr[-2000:]
