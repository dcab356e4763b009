"""Benchmark of the verifier beside math-verify (if installed) on the same pairs.

    python -m benchmarks.verify [NUMBER_OF_PAIRS]

Pairs come from label_rewrites.py. math-verify gets the text after </think> and default settings.
"""

import sys
import time

import verify
from benchmarks.label_rewrites import pairs


def math_verify_grader():
    """(response, label) -> whether math-verify calls it correct. Raises ImportError without it."""
    from math_verify import parse
    from math_verify import verify as compare

    def grade(response, label):
        gold = label if "$" in label or "\\boxed" in label else f"${label}$"
        return bool(compare(parse(gold), parse(response.rpartition("</think>")[2])))

    return grade


def measure(name, grade, graded):
    """Print accuracy and milliseconds per pair of a grader; an exception counts as an error."""
    wrong, times = {True: 0, False: 0}, []
    for response, label, expected, _ in graded:
        start = time.perf_counter()
        try:
            correct = grade(response, label)
        except Exception as error:
            correct = f"raised {type(error).__name__}"
        times.append(1000 * (time.perf_counter() - start))
        wrong[expected] += correct is not expected
    times.sort()
    same = sum(expected for _, _, expected, _ in graded)
    accuracy = 1 - sum(wrong.values()) / len(graded)
    errors = f"FN {wrong[True]}/{same}  FP {wrong[False]}/{len(graded) - same}"
    median, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    speed = f"median {median:.2f} ms  p99 {p99:.1f} ms  worst {times[-1]:.1f} ms"
    print(f"{name:12} accuracy {accuracy:.4f}  {errors}  {speed}")


if __name__ == "__main__":
    graded = pairs(int(sys.argv[1]) if len(sys.argv) > 1 else 6000)
    measure("verify", lambda response, label: verify.verify(response, label).correct, graded)
    try:
        measure("math-verify", math_verify_grader(), graded)
    except ImportError:
        print("math-verify is not installed (pip install math-verify[antlr4_13_2])")
