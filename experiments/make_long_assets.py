"""Make the long task and its base model: `python -m experiments.make_long_assets` (3 minutes).

A countdown. A problem is a start digit, a first step and a last step; step i permutes the digits 0
to 4 in a way of its own; the response gives the value after every step, each with a mark, three
tokens a step:

    prompt    4 17: 14:
    response  <think> 17:0. 16:3. 15:4? 14:2?</think>\\boxed{2}

Chains have 4 to 44 steps. A wrong step spoils the answer, unless a later slip mends it, which
happens to every fifth wrong chain of the base model. That model has learned working with slips: one
in seven of the pairs (step, digit) gives another digit than the right one at a rate between 0.2 and
0.8, and the slip is carried on. A policy has to learn each of these pairs by itself: there is no
rule behind them, and sharpening the base model's distribution mends half of them and ruins the
other half.

The mark is `.` up to the first slip and `?` from there on: the base model notices its own mistakes,
but goes on. So a critic has something to see, as it has in a real chain of thought; for the answer
the marks are without effect.

`python -m experiments.make_long_assets --check` only compares the committed problems with
regenerated ones.
"""

import random
import re

import torch

from assets import make_assets as short
from assets.make_assets import HERE, LEARNING_RATE, chat_prompt, fit, make_model, pad, save, warm_up

BASE = 5
STEP_COUNTS = range(4, 45)
LONGEST = STEP_COUNTS[-1]
PROBLEMS_PER_STEP_COUNT = {"eval": 3, "train": 50}
WORDS = ["system", "user", "assistant", "\n", "\\boxed{", "}", *map(str, range(10)), ".", "?"]
WORDS += [f" {step}:" for step in range(1, LONGEST + 1)]
PIECES = r"system|user|assistant|\\boxed\{| [0-9]+:|[\s\S]"
RESPONSE = re.compile(r"<think>(?: \d+:\d[.?])+</think>\\boxed\{(\d)\}")


def make_facts(seed=0):
    """{(step, digit): right result}, and {(step, digit): rate of slips}."""
    rng = random.Random(seed)
    steps = range(1, LONGEST + 1)
    # A permutation keeps different digits different: a slip is mended by another slip or never
    results = {(i, d): r for i in steps for d, r in enumerate(rng.sample(range(BASE), BASE))}
    slips = dict.fromkeys(results, 0.0)
    for pair in rng.sample(list(results), len(results) // 7):
        slips[pair] = rng.uniform(0.2, 0.8)
    return results, slips


RESULTS, SLIPS = make_facts()


def draw_problem(rng, steps):
    """Start digit, first step, last step."""
    first = rng.randint(steps, LONGEST)
    return rng.randrange(BASE), first, first - steps + 1


def write_prompt(start, first, last):
    """A countdown as the model reads it: `4 17: 14:`."""
    return f"{start} {first}: {last}:"


def write_response(start, first, last, rng=None):
    """Working and boxed answer: correct, or with slips drawn by `rng`, each carried on."""
    value, mark, working = start, ".", ""
    for step in range(first, last - 1, -1):
        # The rate belongs to the digit that the chain has reached, right or wrong
        slip = rng is not None and rng.random() < SLIPS[step, value]
        value = (RESULTS[step, value] + slip) % BASE
        mark = "?" if slip else mark
        working += f" {step}:{value}{mark}"
    return f"<think>{working}</think>\\boxed{{{value}}}"


def make_problems(seed=0):
    """Both splits as lists of dicts, balanced over step counts; no prompt is in both."""
    rng, splits, held_out = random.Random(seed), {}, set()
    for split, count in PROBLEMS_PER_STEP_COUNT.items():
        problems = []
        for steps in sorted([*STEP_COUNTS] * count):
            problem = draw_problem(rng, steps)
            while write_prompt(*problem) in held_out:
                problem = draw_problem(rng, steps)
            prompt = write_prompt(*problem)
            label = RESPONSE.fullmatch(write_response(*problem))[1]
            problems.append({"prompt": prompt, "label": label, "steps": steps})
        # Training prompts may repeat, held-out ones not: of 44 steps there are just five
        if split == "eval":
            held_out = {p["prompt"] for p in problems}
        rng.shuffle(problems)
        splits[split] = [{"id": f"long-{split}-{i:04d}", **p} for i, p in enumerate(problems)]
    return splits


def make_tokenizer():
    """66 words that concatenate back to the text, as in the short task."""
    return short.make_tokenizer(WORDS, PIECES)


def batches(tokenizer, rng, step_counts, held_out, size):
    """Without end, `size` fresh problems with their responses, as make_assets.pad returns them."""
    while True:
        rows = []
        while len(rows) < size:
            problem = draw_problem(rng, rng.choice(step_counts))
            prompt = write_prompt(*problem)
            # Trained on, it would test the model's memory
            if prompt not in held_out:
                response = write_response(*problem, rng) + tokenizer.eos_token
                rows.append(tokenizer([chat_prompt(tokenizer, prompt), response])["input_ids"])
        yield pad(rows, tokenizer.pad_token_id)


def main():
    """Command line entry."""
    splits = make_problems()
    files = {HERE / f"long-{split}.jsonl": problems for split, problems in splits.items()}
    seed = short.write_or_check("Make the long task and its tiny base model.", files)

    torch.manual_seed(seed)
    rng, held_out = random.Random(seed), {p["prompt"] for p in splits["eval"]}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=3)
    # Short chains first, as in make_assets.py, where chains are learned soonest that way
    stages = (  # name, step counts, rows of a batch, updates
        ("short chains", range(2, 7), 96, 500),
        ("all chains", STEP_COUNTS, 24, 700),
    )
    for stage, counts, size, updates in stages:
        # Without the brackets the last bits of the weights are others.
        rates = [LEARNING_RATE * (warm_up(u) * (1 - u / updates)) for u in range(updates)]
        fit(model, batches(tokenizer, rng, counts, held_out, size), rates, stage)
    save(model, tokenizer, HERE / "tiny-long-base")


if __name__ == "__main__":
    main()
