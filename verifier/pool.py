"""Grade in worker processes, for a trainer: a hang or a crash of the grader costs one verdict.

A worker is a new program (exec) and never a fork, because the trainer holds CUDA and NCCL state.
Parent and worker exchange lines of JSON. Four guards end what does not finish:

    the deadline    the parent waits until it for a reply, then kills the worker's process group
    SIGALRM         set by the worker for itself, in case the parent stands still
    RLIMIT_AS       2 GiB of address space: a memory bomb ends its own worker only
    PDEATHSIG       the kernel kills the worker when the trainer dies, so there are no orphans

The program of the workers is verify.py or rewards.py, started with --worker; it calls `serve`.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

PAIRS_PER_WORKER = 50_000  # then a new process, so that no leak of memory can grow for weeks
START_SECONDS = 60  # imports are slow on a busy machine or from a cold disk


class Verdict(NamedTuple):
    """The judgement of one response.

    reason: a key of verify.REASONS or rewards.REASONS. answer: the text of the graded box, or None.
    """

    correct: bool
    reason: str
    answer: str | None

    @property
    def score(self) -> float:
        """The reward of the response, in [0, 1]."""
        return float(self.correct)


class PartVerdict(Verdict):
    """A Verdict whose score need not be 0 or 1, such as the share of tests passed (rewards.py)."""

    # Hides the property of Verdict, so that each verdict can hold its own
    score = 0.0

    def __new__(cls, correct: bool, reason: str, answer: str | None, score: float) -> "PartVerdict":
        """Fields of a Verdict, and the score, which does not take part in comparisons."""
        verdict = super().__new__(cls, correct, reason, answer)
        verdict.score = score
        return verdict


Grade = Callable[[str, str, str], Verdict]  # of (response, label, think)


def check_think(think: str) -> None:
    """ValueError for an unknown treatment of thinking tags."""
    if think not in ("auto", "require", "none"):
        raise ValueError(f"think must be auto, require or none, not {think!r}")


# --- In the worker --------------------------------------------------------------------------------

ADDRESS_SPACE = 2 << 30  # bytes
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


def serve(verifiers: Mapping[str, Grade]) -> None:
    """Answer [response, label, think, kind, seconds] lines by the fields of a PartVerdict.

    verifiers: what grades each kind; "math" must be one of them.
    """
    if sys.platform == "linux":
        # Without it a worker that computes while the trainer is killed lives on as an orphan
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    # Ctrl-C and a scheduler's SIGTERM are for the trainer, which still needs verdicts to finish
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # The protocol gets descriptors of its own; 0 and 1 lead nowhere from here on
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # a stray print must not break the protocol
    # The first comparison fills caches; no response should pay for that out of its time limit
    verifiers["math"]("\\boxed{\\sqrt{2}}", "\\frac{1}{2}", "none")
    print("ready", file=replies, flush=True)
    for line in requests:
        response, label, think, kind, seconds = json.loads(line)
        # With the default action the kernel kills: a Python handler would wait for bytecode to
        # run, which one long multiplication of integers never lets happen
        signal.setitimer(signal.ITIMER_REAL, seconds)
        verdict = verifiers[kind](response, label, think)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([*verdict, verdict.score]), file=replies, flush=True)


# --- In the trainer -------------------------------------------------------------------------------


class Child:
    """A process that answers lines with lines, in a process group of its own that ends with it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.rest = b""  # read from the process, but not yet a whole line

    def start(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        """Run `command` and wait for its first line, "ready"; options: of Popen."""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=env, start_new_session=True, **options
        )
        self.rest = b""
        # A child that stopped reading must not block us on a full pipe, beyond any deadline
        os.set_blocking(self.process.stdin.fileno(), False)
        try:
            self.exchange(b"", time.monotonic() + START_SECONDS)
        except (TimeoutError, EOFError):
            self.stop()
            # An error and not a verdict, or every reward of the run would be 0
            raise RuntimeError(
                f"a verifier worker does not start; run `{' '.join(command)}` to see why"
            ) from None

    def stop(self) -> None:
        """Kill the whole group: a worker for programs has a child process of its own."""
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is dead already
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def exchange(self, data: bytes, deadline: float) -> bytes:
        """Send `data` and return the next line of reply.

        deadline: on the clock time.monotonic(), in seconds. Raises TimeoutError when it has passed
        and EOFError when the process has ended; the Child is of no use after either.
        """
        stdin, stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        poll = select.poll()  # select() fails on descriptors above 1023
        poll.register(stdout, select.POLLIN)
        if data:
            poll.register(stdin, select.POLLOUT)
        while b"\n" not in self.rest:
            ready = dict(poll.poll(max(0, 1000 * (deadline - time.monotonic()))))
            if not ready:
                raise TimeoutError
            if stdin in ready:
                data = data[os.write(stdin, data[: 1 << 16]) :]
                if not data:
                    poll.unregister(stdin)
            # The end of the process shows as readable with nothing to read
            if stdout in ready:
                chunk = os.read(stdout, 1 << 16)
                if not chunk:
                    raise EOFError
                self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line


# torchrun's variables: a worker that saw them could try to join the process group
GROUP = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


class Worker(Child):
    """One grading process: started when needed, killed at the deadline, replaced now and then.

    script: path of the program to run with --worker.
    """

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script, self.served = script, 0

    def launch(self) -> None:
        """Start the process without the GPUs and without a place in the process group."""
        env = {key: value for key, value in os.environ.items() if key not in GROUP}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.served = 0
        self.start([sys.executable, os.path.abspath(self.script), "--worker"], env)

    def grade(self, response: Any, label: Any, think: str, kind: str, timeout_s: float) -> Verdict:
        """One request in a living worker -> Verdict."""
        if self.process is None or self.served >= PAIRS_PER_WORKER:
            self.stop()
            self.launch()
        self.served += 1
        # A label may come out of a parquet file as a number of NumPy, which is not JSON
        response, label = (None if text is None else str(text) for text in (response, label))
        # The worker's own alarm is later than our deadline, so that we say "timeout" and not "died"
        # The deadline starts here, after `launch`: a slow start is not charged to the pair
        request = json.dumps([response, label, think, kind, 2 * timeout_s + 1]).encode() + b"\n"
        try:
            return PartVerdict(*json.loads(self.exchange(request, time.monotonic() + timeout_s)))
        except TimeoutError:
            reason = "timeout"
        except (EOFError, BrokenPipeError, ConnectionResetError):
            reason = "died"
        self.stop()
        # The next pair starts a new process: this one may still compute, or be half through a reply
        return Verdict(False, reason, None)


class Verifier:
    """A pool of worker processes for a trainer, for use from any number of threads.

    num_workers: processes. timeout_s: seconds for a pair from its dispatch to a worker; then the
    worker is killed, the verdict is (False, "timeout", None), and the next pair gets a new process.
    A subclass names the program of the workers and the kinds of problem that it grades.
    """

    script: str
    kinds: tuple[str, ...]

    def __init__(self, num_workers: int = 2, timeout_s: float = 2.0) -> None:
        self.timeout_s, self.local = timeout_s, threading.local()
        self.workers: list[Worker] = []
        # Each thread of the pool owns one worker: PDEATHSIG follows the thread that started a child
        self.pool = ThreadPoolExecutor(num_workers, "verify", self._own_worker)
        # Start all now: imports take seconds, which the first step would have to wait for
        for _ in range(num_workers):
            self.pool.submit(self._warm_up)

    def _own_worker(self) -> None:
        self.local.worker = Worker(self.script)
        self.workers.append(self.local.worker)

    def _warm_up(self) -> None:
        if self.local.worker.process is None:
            self.local.worker.launch()

    def _grade(self, response: str, label: str, think: str, kind: str) -> Verdict:
        seconds = self.seconds(label, kind)
        return self.local.worker.grade(response, label, think, kind, seconds)

    def seconds(self, label: str, kind: str) -> float:
        """The time limit of one pair."""
        return self.timeout_s

    def submit(self, response: str, label: str, think: str = "auto", kind: str = "math") -> Future:
        """Start to grade a response; `.result()` of the future is its Verdict."""
        check_think(think)
        if kind not in self.kinds:
            raise ValueError(f"this pool grades {', '.join(self.kinds)}, not {kind!r}")
        return self.pool.submit(self._grade, response, label, think, kind)

    def equal(self, a: str, b: str, kind: str = "math") -> bool:
        """Whether two answers are equal by value; in a worker, as comparing them can hang too."""
        return self.submit(f"\\boxed{{{a}}}", b, "none", kind).result().correct

    def score(
        self, pairs: Iterable[tuple[str, str]], think: str = "auto", kind: str = "math"
    ) -> list[Verdict]:
        """Grade (response, label) pairs -> list of Verdict in the same order."""
        futures = [self.submit(response, label, think, kind) for response, label in pairs]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Drop what has not started and end the worker processes."""
        self.pool.shutdown(cancel_futures=True)
        for worker in self.workers:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
