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

import argparse
import random
import re

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from assets import make_assets as short
from assets.make_assets import HERE, chat_prompt, make_model, save, to_jsonl

BASE = 5
STEP_COUNTS = range(4, 45)
LONGEST = STEP_COUNTS[-1]
PROBLEMS_PER_STEP_COUNT = {"eval": 3, "train": 50}
WORDS = ["system", "user", "assistant", "\n", "\\boxed{", "}", *map(str, range(10)), ".", "?"]
WORDS += [f" {step}:" for step in range(1, LONGEST + 1)]
RESPONSE = re.compile(r"<think>(?: \d+:\d[.?])+</think>\\boxed\{(\d)\}")


def make_facts(seed=0):
    """{(step, digit): right result}, and {(step, digit): rate of slips}."""
    rng = random.Random(seed)
    steps = range(1, LONGEST + 1)
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
        if split == "eval":
            held_out = {p["prompt"] for p in problems}
        rng.shuffle(problems)
        splits[split] = [{"id": f"long-{split}-{i:04d}", **p} for i, p in enumerate(problems)]
    return splits


def make_tokenizer():
    """66 words that concatenate back to the text, after the manner of the short task."""
    words = short.SPECIAL_TOKENS + short.THINK_TAGS + WORDS
    vocab = {token: i for i, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    pieces = Regex(r"system|user|assistant|\\boxed\{| [0-9]+:|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in short.SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in short.THINK_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=short.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_batch(tokenizer, rng, step_counts, held_out, rows):
    """(B, T) int64 input ids and labels of fresh problems; -100 on prompt and padding."""
    pairs = []
    while len(pairs) < rows:
        problem = draw_problem(rng, rng.choice(step_counts))
        prompt = write_prompt(*problem)
        if prompt not in held_out:
            response = write_response(*problem, rng) + tokenizer.eos_token
            pairs.append(tokenizer([chat_prompt(tokenizer, prompt), response])["input_ids"])
    length = max(len(p) + len(r) for p, r in pairs)
    input_ids = torch.full((rows, length), tokenizer.pad_token_id)
    labels = torch.full((rows, length), -100)
    for i, (p, r) in enumerate(pairs):
        input_ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return input_ids, labels


def train(model, batches, updates, stage):
    """AdamW with a rate that falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    running = 1.0
    for update in (bar := tqdm(range(updates), desc=stage)):
        warm = min(1, (update + 1) / 50) * (1 - update / updates)
        optimizer.param_groups[0]["lr"] = short.LEARNING_RATE * warm
        input_ids, labels = batches()
        logits = model(input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += 0.05 * (loss.item() - running)
        bar.set_postfix(loss=f"{running:.4f}")


def main():
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Make the long task and its tiny base model.")
    parser.add_argument("--check", action="store_true", help="compare the committed problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model")
    args = parser.parse_args()

    splits = make_problems()
    files = {split: HERE / f"long-{split}.jsonl" for split in splits}
    if args.check:
        stale = [s for s, file in files.items() if file.read_text() != to_jsonl(splits[s])]
        raise SystemExit(f"assets differ from the script: {', '.join(stale)}" if stale else 0)
    for split, file in files.items():
        file.write_text(to_jsonl(splits[split]))

    torch.manual_seed(args.seed)
    rng, held_out = random.Random(args.seed), {p["prompt"] for p in splits["eval"]}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=3)
    stages = (  # name, step counts, rows of a batch, updates
        ("short chains", range(2, 7), 96, 500),
        ("all chains", STEP_COUNTS, 24, 700),
    )
    for stage, counts, rows, updates in stages:
        batches = lambda c=counts, r=rows: make_batch(tokenizer, rng, c, held_out, r)
        train(model, batches, updates, stage)
    save(model, tokenizer, HERE / "tiny-long-base")


if __name__ == "__main__":
    main()
