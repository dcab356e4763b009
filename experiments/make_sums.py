"""Make the problems of the comparison on a real model: `python -m experiments.make_sums`.

Sums of two numbers from 11 to 49 after one worked example, as chat turns:

    system     Answer in \\boxed{}.
    user       12 + 15
    assistant  12 + 15 = 27. \\boxed{27}
    user       19 + 47

SmolLM2-135M-Instruct boxes nothing without the example, and needs the working: asked for the box
alone it gets one answer in 25 right, with the working one in five. No held-out sum is trained,
in either order.
"""

import random
from itertools import combinations_with_replacement

from assets.make_assets import HERE, to_jsonl

SIZES = {"eval": 48, "train": 160}
EXAMPLE = 12, 15


def chat(a, b):
    """The turns before the answer."""
    c, d = EXAMPLE
    turns = [
        ("system", "Answer in \\boxed{}."),
        ("user", f"{c} + {d}"),
        ("assistant", f"{c} + {d} = {c + d}. \\boxed{{{c + d}}}"),
        ("user", f"{a} + {b}"),
    ]
    return [{"role": role, "content": text} for role, text in turns]


def make_problems(seed=0):
    """Both splits as lists of dicts; an unordered pair of numbers is drawn once at most."""
    rng = random.Random(seed)
    pairs = [p for p in combinations_with_replacement(range(11, 50), 2) if p != EXAMPLE]
    drawn = [rng.sample(pair, 2) for pair in rng.sample(pairs, sum(SIZES.values()))]
    problems = iter([{"prompt": chat(a, b), "label": str(a + b)} for a, b in drawn])
    return {
        split: [{"id": f"sums-{split}-{i:03d}"} | next(problems) for i in range(size)]
        for split, size in SIZES.items()
    }


if __name__ == "__main__":
    for split, rows in make_problems().items():
        (HERE / f"sums-{split}.jsonl").write_text(to_jsonl(rows))
