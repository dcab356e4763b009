"""Make the embedded default task and its tiny base model: `python assets/make_assets.py`.

The task is mental arithmetic in several steps. A problem is a start digit and a chain of lettered additions and
subtractions modulo 10; the model writes one line of working per operation, then the last value in a box:

    prompt    3 a:+4 b:-9
    response  <think> a:3+4=7 b:7-9=8</think>\\boxed{8}

A chain has 2 to 18 operations (16 to 96 response tokens), and one wrong step spoils the answer. The base model
learns on correct working first, then on working in which each result is wrong with probability ERROR_RATE and the
error is carried on. It therefore knows the format, errs about that often when sampled at temperature 1, and has the
right digit as its likeliest choice: room for reinforcement learning, and groups with mixed outcomes.

`python assets/make_assets.py --check` only regenerates the problems and compares them with the committed files.
"""

import argparse
import json
import random
import re
import string
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
STEP_COUNTS = range(2, 19)
TRAIN_PER_STEP_COUNT, EVAL_PER_STEP_COUNT = 200, 15
ERROR_RATE = 0.13
# Each stage ends at its target loss. The arithmetic appears soonest on single operations; the last stage makes
# the model err.
STAGES = [
    dict(stage="one step", step_counts=range(1, 2), error_rate=0.0, updates=2000, target_loss=0.01),
    dict(stage="short", step_counts=range(2, 6), error_rate=0.0, updates=2000, target_loss=0.01),
    dict(stage="all lengths", step_counts=STEP_COUNTS, error_rate=0.0, updates=2000, target_loss=0.005),
    dict(stage="imperfect", step_counts=STEP_COUNTS, error_rate=ERROR_RATE, updates=300, target_loss=None),
]
BATCH_SIZE, LEARNING_RATE = 64, 3e-3
MAX_NEW_TOKENS = 128

LABELS = string.ascii_lowercase[: STEP_COUNTS[-1]]
SPECIAL_TOKENS = ["<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["system", "user", "assistant", "\n", " ", "=", "\\boxed{", "}", *string.digits]
WORDS += [f"{sign}{digit}" for sign in "+-" for digit in string.digits]
WORDS += [f" {label}:" for label in LABELS]
RESPONSE = re.compile(r"<think>(?: [a-z]:\d[+-]\d=\d)+</think>\\boxed\{(\d)\}")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def draw_chain(rng, steps):
    """A start digit and `steps` triples (label, sign, operand 1..9); labels are consecutive from a random one.

    With the first label always `a` a model may find operands by position, and fails on longer chains."""
    first = rng.randint(0, len(LABELS) - steps)
    labels = LABELS[first : first + steps]
    return rng.randrange(10), [(label, rng.choice("+-"), rng.randint(1, 9)) for label in labels]


def apply_operation(value, sign, operand):
    return (value + operand if sign == "+" else value - operand) % 10


def write_prompt(start, operations):
    return str(start) + "".join(f" {label}:{sign}{operand}" for label, sign, operand in operations)


def write_response(start, operations, rng=None, error_rate=0.0):
    """Working and boxed answer; each result is replaced by a wrong digit with probability `error_rate`."""
    value, working = start, ""
    for label, sign, operand in operations:
        result = apply_operation(value, sign, operand)
        if error_rate and rng.random() < error_rate:
            result = (result + rng.randint(1, 9)) % 10
        working += f" {label}:{value}{sign}{operand}={result}"
        value = result
    return f"<think>{working}</think>\\boxed{{{value}}}"


def make_problems(seed=0):
    """Both splits as lists of dicts, balanced over step counts, no prompt twice."""
    rng, seen, splits = random.Random(seed), set(), {}
    for split, count in (("eval", EVAL_PER_STEP_COUNT), ("train", TRAIN_PER_STEP_COUNT)):
        problems = []
        for steps in STEP_COUNTS:
            while sum(p["steps"] == steps for p in problems) < count:
                start, operations = draw_chain(rng, steps)
                prompt = write_prompt(start, operations)
                if prompt in seen:
                    continue
                seen.add(prompt)
                label = start
                for _, sign, operand in operations:
                    label = apply_operation(label, sign, operand)
                problems.append({"prompt": prompt, "label": str(label), "steps": steps})
        rng.shuffle(problems)
        splits[split] = [{"id": f"{split}-{i:04d}", **p} for i, p in enumerate(problems)]
    return splits


def to_jsonl(problems):
    return "".join(json.dumps(problem) + "\n" for problem in problems)


def make_tokenizer():
    """Word-level tokenizer whose tokens concatenate back to the text; unknown characters become <|unk|>."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + ["<think>", "</think>"] + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    pieces = Regex(r"system|user|assistant|\\boxed\{| [a-z]:|[+-][0-9]|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    # The think tags are ordinary added tokens: decoding with skip_special_tokens must keep them.
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer):
    """Randomly initialised two-layer Llama with grouped-query attention: about 100 thousand parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # the usual 0.02 is for wide layers; here it delays learning sixfold
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def chat_prompt(tokenizer, prompt):
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def make_batch(tokenizer, rng, step_counts, error_rate, held_out):
    """(B, T) input ids and targets on fresh problems; targets are -100 on prompt and padding."""
    rows = []
    while len(rows) < BATCH_SIZE:
        start, operations = draw_chain(rng, rng.choice(step_counts))
        prompt = write_prompt(start, operations)
        if prompt in held_out:
            continue
        prompt_ids = tokenizer.encode(chat_prompt(tokenizer, prompt))
        response = write_response(start, operations, rng, error_rate) + tokenizer.eos_token
        rows.append((prompt_ids, tokenizer.encode(response)))
    length = max(len(p) + len(r) for p, r in rows)
    input_ids = torch.full((BATCH_SIZE, length), tokenizer.pad_token_id)
    targets = torch.full((BATCH_SIZE, length), -100)
    for i, (p, r) in enumerate(rows):
        input_ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        targets[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return input_ids, targets


def train(model, tokenizer, rng, held_out, stage, step_counts, error_rate, updates, target_loss):
    """At most `updates` AdamW steps; stops once the running loss is below `target_loss`.

    Raises SystemExit if a stage with a target loss misses it: a base model that cannot add is useless."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    running = 5.0
    for update in (bar := tqdm(range(updates), desc=stage)):
        warmup, decay = (update + 1) / 50, 1 - update / updates
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, warmup, decay if target_loss is None else 1)
        input_ids, targets = make_batch(tokenizer, rng, step_counts, error_rate, held_out)
        logits = model(input_ids).logits[:, :-1]
        loss = F.cross_entropy(logits.transpose(1, 2), targets[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += 0.05 * (loss.item() - running)
        bar.set_postfix(loss=f"{running:.4f}")
        if target_loss is not None and running < target_loss:
            return
    if target_loss is not None:
        raise SystemExit(f"stage '{stage}' ended at loss {running:.3f}, above {target_loss}; try another --seed")


@torch.no_grad()
def measure(model, tokenizer, problems, samples):
    """Print accuracy by number of steps, share ended by EOS and lengths; samples=0 decodes greedily."""
    tokenizer.padding_side = "left"
    chats = [chat_prompt(tokenizer, p["prompt"]) for p in problems]
    inputs = tokenizer(chats, return_tensors="pt", padding=True)
    how = dict(do_sample=True, top_k=0, num_return_sequences=samples) if samples else dict(do_sample=False)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **how)
    ids = output[:, inputs["input_ids"].shape[1] :]
    correct, ended, lengths, well_formed = defaultdict(list), [], [], []
    for i, row in enumerate(ids):
        problem = problems[i // max(1, samples)]
        row = row[row != tokenizer.pad_token_id]
        text = tokenizer.decode(row, skip_special_tokens=True)
        match = RESPONSE.fullmatch(text)
        correct[problem["steps"]].append(bool(match) and match[1] == problem["label"])
        ended.append(row[-1].item() == tokenizer.eos_token_id)
        well_formed.append(bool(match))
        lengths.append(len(row))
    everything = sum(correct.values(), [])
    print(f"{f'{samples} samples at T=1' if samples else 'greedy'}: accuracy {mean(everything):.3f}, "
          f"ended {mean(ended):.3f}, well formed {mean(well_formed):.3f}, "
          f"tokens mean {mean(lengths):.1f} min {min(lengths)} max {max(lengths)}")
    print("  accuracy by steps: " + "  ".join(f"{n}: {mean(c):.2f}" for n, c in sorted(correct.items())))


def main():
    parser = argparse.ArgumentParser(description="Make the default task and its tiny base model.")
    parser.add_argument("--check", action="store_true", help="only compare the committed problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and its training text")
    args = parser.parse_args()

    splits = make_problems()
    if args.check:
        stale = [s for s, p in splits.items() if (HERE / f"{s}.jsonl").read_text() != to_jsonl(p)]
        raise SystemExit(f"differs from the committed file: {stale}" if stale else 0)
    for split, problems in splits.items():
        (HERE / f"{split}.jsonl").write_text(to_jsonl(problems))

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    held_out = {p["prompt"] for p in splits["eval"]}
    for stage in STAGES:
        train(model, tokenizer, rng, held_out, **stage)
    tokenizer.save_pretrained(HERE / "tiny-base")
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(HERE / "tiny-base")
    for samples in (4, 0):
        measure(model, tokenizer, splits["eval"], samples)


if __name__ == "__main__":
    main()
