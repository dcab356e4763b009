"""Make the embedded task and its tiny base model: `python assets/make_assets.py` (5 minutes).

The task is arithmetic modulo 10 in many steps. A problem is a start digit and a chain of labelled
additions and subtractions; the answer is one line of working per operation, then a box:

    prompt    3 a:+4 b:-9
    response  <think> a:3+4=7 b:7-9=8</think>\\boxed{8}

Chains have 2 to 18 operations, responses 16 to 96 tokens, and one wrong step spoils the answer.
The base model first learns correct working, then working with slips: each of the 180 facts comes
out one too high at a rate of its own, and the slip is carried on. Sampled at temperature 1 the
model keeps to the format and solves a third of the problems, fewer the longer they are.

`python assets/make_assets.py --check` only compares the committed problems with regenerated ones.
"""

import argparse
import json
import random
import re
import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
STEP_COUNTS = range(2, 19)
PROBLEMS_PER_STEP_COUNT = {"eval": 15, "train": 200}
BATCH_SIZE, LEARNING_RATE = 64, 3e-3
MAX_NEW_TOKENS = 128

LABELS = string.ascii_lowercase[: STEP_COUNTS[-1]]
SPECIAL_TOKENS = ["<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"]
THINK_TAGS = ["<think>", "</think>"]
WORDS = ["system", "user", "assistant", "\n", " ", "=", "\\boxed{", "}", *string.digits]
WORDS += [f"{sign}{digit}" for sign in "+-" for digit in string.digits]
WORDS += [f" {label}:" for label in LABELS]
# The last alternative takes any other character, so that no text fails
PIECES = r"system|user|assistant|\\boxed\{| [a-z]:|[+-][0-9]|[\s\S]"  # how text is cut into words
RESPONSE = re.compile(r"<think>(?: [a-z]:\d[+-]\d=\d)+</think>\\boxed\{(\d)\}")
# The template ends before <think>: the model writes it
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def draw_chain(rng, steps):
    """A start digit and `steps` triples (label, sign, operand 1..9), labels in order.

    The first label is random: with `a` always first, a model finds operands by their position
    and is lost on longer chains."""
    first = rng.randint(0, len(LABELS) - steps)
    labels = LABELS[first : first + steps]
    return rng.randrange(10), [(label, rng.choice("+-"), rng.randint(1, 9)) for label in labels]


def apply_operation(value, sign, operand):
    """One step of a chain, modulo 10."""
    return (value + operand if sign == "+" else value - operand) % 10


def make_slips(seed=0):
    """The rate at which each fact (value, sign, operand) comes out one too high.

    The rate 0.7 u^5 averages 0.12 and passes one half for one fact in fifteen: sharpening the base
    model's distribution helps, but some of its beliefs must be turned over. All slips go the same
    way because +1 and -1 in one chain would cancel and reward wrong working."""
    rng = random.Random(seed)
    facts = [(v, sign, operand) for v in range(10) for sign in "+-" for operand in range(1, 10)]
    return {fact: 0.7 * rng.random() ** 5 for fact in facts}


def write_prompt(start, operations):
    """A chain as the model reads it: `3 a:+4 b:-9`."""
    return str(start) + "".join(f" {label}:{sign}{n}" for label, sign, n in operations)


def write_response(start, operations, rng=None, slips=None):
    """Working and boxed answer: correct, or with slips at the given rates, each carried on."""
    value, working = start, ""
    for label, sign, operand in operations:
        result = apply_operation(value, sign, operand)
        if slips and rng.random() < slips[value, sign, operand]:
            result = (result + 1) % 10
        working += f" {label}:{value}{sign}{operand}={result}"
        value = result
    return f"<think>{working}</think>\\boxed{{{value}}}"


def make_problems(seed=0):
    """Both splits as lists of dicts, balanced over step counts; no prompt occurs twice."""
    # A generator of its own, so that --check gets the committed problems bit for bit
    rng, seen, splits = random.Random(seed), set(), {}
    for split, count in PROBLEMS_PER_STEP_COUNT.items():
        problems = []
        for steps in sorted([*STEP_COUNTS] * count):
            start, operations = draw_chain(rng, steps)
            while write_prompt(start, operations) in seen:
                start, operations = draw_chain(rng, steps)
            prompt = write_prompt(start, operations)
            label = RESPONSE.fullmatch(write_response(start, operations))[1]
            seen.add(prompt)
            problems.append({"prompt": prompt, "label": label, "steps": steps})
        rng.shuffle(problems)
        splits[split] = [{"id": f"{split}-{i:04d}", **p} for i, p in enumerate(problems)]
    return splits


def to_jsonl(problems):
    """The text of a data file."""
    return "".join(json.dumps(problem) + "\n" for problem in problems)


def make_tokenizer(words=WORDS, pieces=PIECES):
    """Words that concatenate back to the text, 62 of them; any other piece becomes <|unk|>."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + THINK_TAGS + words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    # The words hold their own spaces; without this decoder there would be more between them
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    # Think tags are not special: decoding with skip_special_tokens must keep them.
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in THINK_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer, layers=2):
    """Randomly initialised Llama with grouped-query attention, 103k parameters in two layers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # the usual 0.02 suits wide layers; here it delays learning fourfold
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def chat_prompt(tokenizer, prompt):
    """A prompt as the user's turn, up to where the response begins."""
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def make_batch(tokenizer, rng, step_counts, slips, held_out):
    """A batch of fresh problems with their responses, as `pad` returns it."""
    rows = []
    while len(rows) < BATCH_SIZE:
        start, operations = draw_chain(rng, rng.choice(step_counts))
        prompt = write_prompt(start, operations)
        # Trained on, it would test the model's memory
        if prompt in held_out:
            continue
        response = write_response(start, operations, rng, slips) + tokenizer.eos_token
        rows.append(tokenizer([chat_prompt(tokenizer, prompt), response])["input_ids"])
    return pad(rows, tokenizer.pad_token_id)


def pad(rows, pad_id):
    """Pairs of token ids (prompt, response) -> (B, T) int64 input ids, and labels that are -100 on
    prompts and padding, where cross_entropy ignores them.
    """
    length = max(len(p) + len(r) for p, r in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    labels = torch.full((len(rows), length), -100)
    for i, (p, r) in enumerate(rows):
        input_ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return input_ids, labels


def warm_up(update):
    """Share of the learning rate: it rises over the first 50 updates."""
    return min(1, (update + 1) / 50)


def fit(model, batches: Iterable, rates: Sequence[float], stage, target_loss=None):
    """An update of AdamW per rate, until the running loss is below `target_loss` if there is one.

    Raises SystemExit when the target is missed: a base model that cannot add is useless."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    # A running mean over some 20 updates. It starts high, so that one lucky batch ends no stage
    running, bar = 1.0, tqdm(rates, desc=stage)
    for rate, (input_ids, labels) in zip(bar, batches, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        logits = model(input_ids).logits[:, :-1]
        # Position t predicts token t + 1; cross_entropy wants the vocabulary in dimension 1
        loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += 0.05 * (loss.item() - running)
        bar.set_postfix(loss=f"{running:.4f}")
        if target_loss is not None and running < target_loss:
            return
    if target_loss is not None:
        raise SystemExit(f"stage '{stage}' ended at loss {running:.3f}; try another --seed")


@torch.no_grad()
def measure(model, tokenizer, problems, samples):
    """Print accuracy by number of steps, format and lengths; `samples` 0 means greedy decoding."""
    chats = [chat_prompt(tokenizer, p["prompt"]) for p in problems]
    # On the left, so that every row goes on from its last column
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    # top_k 0, or a default of transformers may cut off the tail of the distribution
    sampling = dict(do_sample=True, top_k=0, num_return_sequences=samples)
    how = sampling if samples else dict(do_sample=False)
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **how)

    correct, ended, well_formed, lengths = defaultdict(list), [], [], []
    for i, row in enumerate(output[:, inputs["input_ids"].shape[1] :]):
        problem = problems[i // max(1, samples)]
        row = row[row != tokenizer.pad_token_id]
        match = RESPONSE.fullmatch(tokenizer.decode(row, skip_special_tokens=True))
        correct[problem["steps"]].append(match is not None and match[1] == problem["label"])
        ended.append(row[-1].item() == tokenizer.eos_token_id)
        well_formed.append(match is not None)
        lengths.append(len(row))

    print(f"{samples} samples at temperature 1:" if samples else "greedy:")
    print(f"  accuracy {mean(sum(correct.values(), [])):.3f}")
    print("  by steps " + "  ".join(f"{n}: {mean(c):.2f}" for n, c in sorted(correct.items())))
    print(f"  ended {mean(ended):.3f}, well formed {mean(well_formed):.3f}")
    print(f"  tokens {min(lengths)} to {max(lengths)}, mean {mean(lengths):.1f}")


def save(model, tokenizer, directory):
    """Hugging Face directory that transformers 4 and 5 both load."""
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # transformers 5 writes a class name which transformers 4 does not know.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def write_or_check(description, files):
    """Write problems to their files, or with --check compare them and exit; returns --seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare the committed problems")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model")
    args = parser.parse_args()
    if args.check:
        stale = [file.stem for file, rows in files.items() if file.read_text() != to_jsonl(rows)]
        raise SystemExit(f"assets differ from the script: {', '.join(stale)}" if stale else 0)
    for file, rows in files.items():
        file.write_text(to_jsonl(rows))
    return args.seed


def main():
    """Command line entry."""
    splits = make_problems()
    files = {HERE / f"{split}.jsonl": problems for split, problems in splits.items()}
    seed = write_or_check("Make the default task and its tiny base model.", files)
    torch.manual_seed(seed)
    rng, held_out = random.Random(seed), {p["prompt"] for p in splits["eval"]}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)

    def batches(step_counts, slips=None):
        while True:
            yield make_batch(tokenizer, rng, step_counts, slips, held_out)

    # Addition is found soonest on single steps, and chains soonest on short ones.
    curriculum = {"one step": range(1, 2), "short chains": range(2, 6), "all chains": STEP_COUNTS}
    rates = [LEARNING_RATE * warm_up(update) for update in range(2000)]
    for stage, step_counts in curriculum.items():
        fit(model, batches(step_counts), rates, stage, target_loss=0.01)
    falling = [LEARNING_RATE * warm_up(update) * (1 - update / 400) for update in range(400)]
    fit(model, batches(STEP_COUNTS, make_slips()), falling, "slips")
    save(model, tokenizer, HERE / "tiny-base")
    for samples in (4, 0):
        measure(model, tokenizer, splits["eval"], samples)


if __name__ == "__main__":
    main()
