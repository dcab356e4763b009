"""Benchmark of the verifier and of math-verify, if that is installed, on the same pairs.

    python -m benchmarks.verify [NUMBER_OF_PAIRS]

Pairs come from label_rewrites.py. math-verify gets the text after </think> and default settings.
"""

import sys
import time
from collections.abc import Callable, Sequence

import verify
from benchmarks.label_rewrites import Pair, pairs

Grader = Callable[[str, str], bool]  # (response, label) -> whether it is right


def own_grader(response: str, label: str) -> bool:
    """The verifier of this project."""
    return verify.verify(response, label).correct


def math_verify_grader() -> Grader:
    """math-verify with default settings; ImportError if it is not installed."""
    from math_verify import parse
    from math_verify import verify as compare

    def grade(response: str, label: str) -> bool:
        # A label without dollar signs is not taken for LaTeX
        gold = label if "$" in label or "\\boxed" in label else f"${label}$"
        # Its time-outs are signals and work in the main thread only, where this runs
        return bool(compare(parse(gold), parse(response.rpartition("</think>")[2])))

    return grade


def measure(name: str, grade: Grader, graded: Sequence[Pair]) -> None:
    """Print accuracy and time of a grader: FN are right answers refused, FP wrong ones accepted."""
    wrong, times = {True: 0, False: 0}, []  # times in ms
    for pair in graded:
        start = time.perf_counter()
        try:
            correct = grade(pair.response, pair.label)
        except Exception:
            correct = None  # wrong either way
        times.append(1000 * (time.perf_counter() - start))
        wrong[pair.expected] += correct is not pair.expected
    times.sort()
    same = sum(pair.expected for pair in graded)
    accuracy = 1 - sum(wrong.values()) / len(graded)
    errors = f"FN {wrong[True]}/{same}  FP {wrong[False]}/{len(graded) - same}"
    median, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    speed = f"median {median:.2f} ms  p99 {p99:.1f} ms  worst {times[-1]:.1f} ms"
    print(f"{name:12} accuracy {accuracy:.4f}  {errors}  {speed}")


if __name__ == "__main__":
    graded = pairs(int(sys.argv[1]) if len(sys.argv) > 1 else 6000)
    measure("verify", own_grader, graded)
    try:
        measure("math-verify", math_verify_grader(), graded)
    except ImportError:
        print("math-verify is not installed (pip install math-verify[antlr4_13_2])")
