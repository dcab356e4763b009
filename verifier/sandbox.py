"""Run programs of unknown intent: one forked process per test, behind a filter of system calls.

    python -P -s -S sandbox.py    [code, function, argument, seconds] in, [outcome, output] out

This process imports what programs may import, then forks for every test. The fork gives up every
system call that is not in ALLOWED before it compiles the first line of the program, and nothing can
bring them back: no file is opened (not even for an import), no socket, no other process started or
signalled, no name space changed. Its input and its output are memory files, its limits those of
`confine`. It is told the input of one test and never an expected output, so there is nothing to
read, to patch or to fake: the comparison happens in another process (rewards.py).

A program can still burn CPU up to the limit, tell the time, and attack the kernel through
the allowed calls or through the Python interpreter. Code from a policy that is trained to attack
belongs in a virtual machine.

Nothing of the project is imported here, and nothing of a program ever runs in this process itself.
"""

import ctypes
import gc
import json
import os
import platform
import resource
import signal
import struct
import sys
import tempfile

# What programs may import. Modules that these bring along (os, sys, ...) are importable too.
MODULES = """abc array ast bisect calendar cmath collections contextlib copy dataclasses datetime
    decimal enum fractions functools hashlib heapq inspect io itertools math numbers operator pprint
    queue random re statistics string textwrap threading time traceback types typing unicodedata
    zlib""".split()
MEMORY = 1 << 30  # bytes of address space
OUTPUT = 1 << 20  # bytes of output

# Numbers of the allowed system calls on x86-64 and on arm64
# What is not named is refused, so that calls of later kernels need no entry
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "close": (3, 57),
    "ioctl": (16, 29),  # isatty; only memory files and /dev/null are open
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getrusage": (98, 165),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
CLONE, CLONE3 = (56, 220), (435, 435)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_...
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x10000, 0x10000000, 0x40000000, 0x8000000
SET_DEATH_SIGNAL, GET_SECCOMP, SET_SECCOMP, NO_NEW_PRIVILEGES = 1, 21, 22, 38  # of prctl


def unsupported() -> str | None:
    """Why programs cannot be run on this machine, or None."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return "programs run on Linux on x86-64 or arm64 only, behind a filter of system calls"
    if ctypes.CDLL(None).prctl(GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "this kernel cannot filter system calls (seccomp), so programs are not run at all"
    return None


def filter_program() -> tuple[bytes, int]:
    """The filter and its number of instructions, as classic BPF over struct seccomp_data: nr at
    byte 0, arch at 4, arguments at 16.

    Threads are allowed (clone with CLONE_THREAD), processes are not. The flags of clone3 are out of
    a filter's reach: it "does not exist", so that the C library takes clone.
    """
    column, architecture = ARCHITECTURES[platform.machine()]
    # BPF: load a word, jump if equal, jump if a bit is set, return. Of the two numbers after the
    # code the first is how far to jump if so, the second if not
    load, equal, has_bits, answer = 0x20, 0x15, 0x45, 0x06
    # What the kernel does: allow; fail with EPERM; fail with ENOSYS; kill the process
    allow, refuse, missing, kill = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38, 0x80000000
    # The architecture first: in 32-bit mode the same numbers are other system calls
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    for numbers in ALLOWED.values():
        lines += [(equal, 0, 1, numbers[column]), (answer, 0, 0, allow)]
    lines += [(equal, 0, 1, CLONE3[column]), (answer, 0, 0, missing)]
    # Everything else ends at `refuse`: the program sees PermissionError and can go on
    lines += [(equal, 1, 0, CLONE[column]), (answer, 0, 0, refuse), (load, 0, 0, 16)]
    lines += [(has_bits, 0, 1, CLONE_THREAD), (answer, 0, 0, allow), (answer, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *line) for line in lines), len(lines)


def install_filter(libc: ctypes.CDLL) -> None:
    """Leave this process the allowed system calls only, for good; OSError if that fails."""
    code, length = filter_program()
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", length, ctypes.addressof(text))
    # Without NO_NEW_PRIVILEGES the kernel takes a filter from root only
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SET_SECCOMP, 2, program, 0, 0):
        raise OSError("the kernel refuses the filter")


def confine(libc: ctypes.CDLL, server: int, source: int, sink: int, seconds: float) -> None:
    """Turn a fresh fork into the sandbox: memory files for input and output, limits, filter.

    server: pid of the parent. source, sink: descriptors of the memory files. seconds: of CPU.
    """
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.closerange(3, 64)  # the lowest are given out first, and few are open
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != server:  # the parent died before the line above could take effect
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    # RLIMIT_NPROC counts all processes of the user, ours included: the filter does its work.
    # RLIMIT_CPU is in whole seconds: rounded up
    limits = {"CPU": int(seconds + 0.999), "AS": MEMORY, "FSIZE": OUTPUT, "NOFILE": 3, "CORE": 0}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    install_filter(libc)


def run(code: str, function: str | None, argument: str | list) -> None:
    """Execute the program; with a function, call it (or the method of class Solution) and print
    what it returned as the last line.
    """
    # Loaded before by `serve`: from here on no import can open a file
    import random

    random.seed(0)  # a verdict should not change on repetition
    scope = {"__name__": "__main__"}
    exec(compile(code, "answer.py", "exec"), scope)
    if function:
        call = scope.get(function) or getattr(scope["Solution"](), function)
        print("\n" + json.dumps(call(*argument)), flush=True)


def attempt(
    libc: ctypes.CDLL, code: str, function: str | None, argument: str | list, seconds: float
) -> tuple[str, str]:
    """One test in a process of its own -> (outcome, output); outcome: ok, crash or slow.

    argument: the text on standard input, or the list of arguments of the function. seconds: of CPU;
    three times as many on the clock.
    """
    # Files and not pipes: nobody reads while the program runs, and RLIMIT_FSIZE bounds the output
    source, sink, server = os.memfd_create("input"), os.memfd_create("output"), os.getpid()
    if function is None:
        os.write(source, argument.encode("utf-8", "replace"))
        os.lseek(source, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        confine(libc, server, source, sink, seconds)
        run(code, function, argument)
        sys.exit()  # waits for threads, flushes output
    # SIGCHLD is blocked here (see serve), so that this call takes it, and none is lost
    ended = signal.sigtimedwait({signal.SIGCHLD}, 3 * seconds)
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if ended is None:  # a SIGCHLD that came between the two must not end the next test
        signal.sigtimedwait({signal.SIGCHLD}, 0)
    output = os.pread(sink, OUTPUT, 0).decode("utf-8", "replace")
    os.close(source)
    os.close(sink)
    slow = ended is None or status in (-signal.SIGXCPU, -signal.SIGKILL)
    return "slow" if slow else "crash" if status else "ok", output


def serve() -> None:
    """Answer requests until standard input ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in MODULES:
        __import__(name)
    home = tempfile.mkdtemp()
    os.chdir(home)
    os.rmdir(home)  # an empty working directory in which nothing can be made
    # Where the kernel permits it there is no network to begin with; the filter does not rely on it.
    libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC)
    libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)  # after unshare, which clears it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    probe = "try:\n open('/')\nexcept PermissionError:\n print('closed')"
    if attempt(libc, probe, None, "", 10) != ("ok", "closed\n"):
        raise SystemExit("the filter of system calls does not work on this machine")
    print("ready", flush=True)
    gc.freeze()  # a collection in a fork would copy every page that it touches
    for line in sys.stdin.buffer:
        print(json.dumps(attempt(libc, *json.loads(line))), flush=True)


if __name__ == "__main__":
    sys.exit(unsupported() or serve())
