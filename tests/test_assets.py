"""The embedded task and base model: right labels, sound tokenizer, reproducible, room to learn."""

import json
import random
import re
import runpy
import string
from collections import Counter

import pytest
import torch
from helpers import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from verify import verify

ASSETS = ROOT / "assets"
BASE = ASSETS / "tiny-base"


def read(split):
    return [json.loads(line) for line in (ASSETS / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ASSETS / "make_assets.py"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE)


def chat(tokenizer, prompt):
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def test_committed_files_are_small():
    assert (BASE / "model.safetensors").stat().st_size <= 3e6
    assert sum((ASSETS / f"{split}.jsonl").stat().st_size for split in ("train", "eval")) < 600e3


@pytest.mark.parametrize("split, smallest, largest", [("train", 2000, 5000), ("eval", 200, 256)])
def test_problems_have_the_pinned_keys_and_balanced_steps(split, smallest, largest):
    problems = read(split)
    assert smallest <= len(problems) <= largest
    assert len({p["id"] for p in problems}) == len(problems)
    for p in problems:
        assert [type(p[key]) for key in ("id", "prompt", "label", "steps")] == [str, str, str, int]
    counts = Counter(p["steps"] for p in problems)
    assert min(counts) == 2 and max(counts) >= 12 and len(set(counts.values())) == 1


def test_labels_equal_the_chains_summed_as_one_integer():
    for p in read("train") + read("eval"):
        start, *terms = re.findall(r"[+-]?\d", p["prompt"])
        assert len(terms) == p["steps"]
        assert p["label"] == str((int(start) + sum(map(int, terms))) % 10)


def test_no_prompt_is_repeated_within_or_across_splits():
    prompts = [p["prompt"] for p in read("train") + read("eval")]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_script_regenerates_the_committed_problems_bit_for_bit(script, split):
    text = script["to_jsonl"](script["make_problems"]()[split])
    assert (ASSETS / f"{split}.jsonl").read_bytes() == text.encode()


def test_committed_tokenizer_is_the_one_the_script_makes(script, tokenizer, tmp_path):
    script["make_tokenizer"]().save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()
    assert tokenizer.chat_template == script["CHAT_TEMPLATE"]


def test_tokenizer_round_trips_every_problem_with_its_working(script, tokenizer):
    operations = [("c", "+", 4), ("d", "-", 9)]
    response = script["write_response"](3, operations)
    assert response == r"<think> c:3+4=7 d:7-9=8</think>\boxed{8}"
    texts = [chat(tokenizer, p["prompt"]) for p in read("eval")] + [response]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text


def test_any_text_encodes_without_failing(tokenizer):
    for text in (string.printable, "", "naïve ∑ \U0001f600"):
        ids = tokenizer.encode(text)
        assert all(0 <= i < len(tokenizer) for i in ids)
    assert tokenizer.unk_token_id in tokenizer.encode("W")


def test_decoding_without_special_tokens_keeps_the_think_tags(tokenizer):
    ids = tokenizer.encode(r"<think> a:1+1=2</think>\boxed{2}<|im_end|><|pad|>")
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == r"<think> a:1+1=2</think>\boxed{2}"


def test_chat_template_renders_every_role_and_leaves_think_to_the_model(tokenizer):
    turns = [{"role": r, "content": c} for r, c in (("system", "1"), ("user", "2"))]
    reply = {"role": "assistant", "content": "3"}
    opened = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    closed = tokenizer.apply_chat_template([*turns, reply], tokenize=False)
    assert opened == (
        "<|im_start|>system\n1<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert closed == opened + "3<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(closed)) == closed


def test_special_ids_agree_between_tokenizer_and_model(tokenizer, model):
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.vocab_size == len(tokenizer) <= 64


def test_slips_never_cancel_within_a_chain(script):
    # A wrong step must spoil the answer: otherwise reward teaches wrong working.
    write_response, slips = script["write_response"], dict.fromkeys(script["make_slips"](), 1.0)
    for steps in range(1, 10):
        operations = [("a", "+", 1), ("b", "-", 3), ("c", "+", 9)] * 3
        right = write_response(0, operations[:steps])
        assert write_response(0, operations[:steps], random.Random(0), slips)[-2] != right[-2]


def test_base_model_keeps_the_format_and_leaves_room_to_learn(script, tokenizer, model):
    torch.manual_seed(0)
    problems = read("eval")
    chats = [chat(tokenizer, p["prompt"]) for p in problems]
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=128, do_sample=True, top_k=0)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    matches = [script["RESPONSE"].match(text) for text in texts]
    ended = [
        match is not None and text[match.end() :].startswith("<|im_end|>")
        for match, text in zip(matches, texts, strict=True)
    ]
    correct = [
        match is not None and match[1] == problem["label"]
        for match, problem in zip(matches, problems, strict=True)
    ]
    assert sum(ended) > 0.97 * len(problems)
    # One sample a problem: standard error 0.03.
    assert 0.15 < sum(correct) / len(problems) < 0.5

    lengths = [len(tokenizer.encode(text.split("<|im_end|>")[0])) + 1 for text in texts]
    assert min(lengths) <= 20 and max(lengths) >= 6 * min(lengths)


# ---- the long task


def read_long(split):
    return [json.loads(line) for line in (ASSETS / f"long-{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def long_script():
    return runpy.run_module("experiments.make_long_assets")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_long_problems_are_those_of_the_script(script, long_script, split):
    text = script["to_jsonl"](long_script["make_problems"]()[split])
    assert (ASSETS / f"long-{split}.jsonl").read_bytes() == text.encode()


def test_committed_long_tokenizer_is_the_one_the_script_makes(long_script, tmp_path):
    long_script["make_tokenizer"]().save_pretrained(tmp_path)
    committed = ASSETS / "tiny-long-base/tokenizer.json"
    assert (tmp_path / "tokenizer.json").read_bytes() == committed.read_bytes()


def test_long_labels_follow_the_table_of_the_script(long_script):
    for p in read_long("train") + read_long("eval"):
        value, first, last = map(int, re.findall(r"\d+", p["prompt"]))
        for step in range(first, last - 1, -1):
            value = long_script["RESULTS"][step, value]
        assert p["label"] == str(value) and p["steps"] == first - last + 1


def test_long_chains_have_up_to_44_steps_and_no_held_out_prompt_is_trained(long_script):
    splits = {split: read_long(split) for split in ("train", "eval")}
    for problems in splits.values():
        counts = Counter(p["steps"] for p in problems)
        assert min(counts) == 4 and max(counts) == 44 and len(set(counts.values())) == 1
    train, held_out = ({p["prompt"] for p in problems} for problems in splits.values())
    assert train.isdisjoint(held_out)


def test_every_step_of_the_long_task_permutes_the_digits(long_script):
    # Two digits with one result would hide a slip.
    results = long_script["RESULTS"]
    for step in range(1, 45):
        assert sorted(results[step, digit] for digit in range(5)) == [0, 1, 2, 3, 4]
    slips = sorted(long_script["SLIPS"].values())
    assert slips[-32] == 0 < 0.2 <= slips[-31] and slips[-1] <= 0.8


def test_a_mark_of_doubt_stays_from_the_first_slip_on(long_script):
    for seed in range(50):
        text = long_script["write_response"](1, 44, 1, random.Random(seed))
        lines = [(int(i), int(v), m) for i, v, m in re.findall(r" (\d+):(\d)([.?])", text)]
        value, doubt = 1, False
        for step, result, mark in lines:
            doubt = doubt or result != long_script["RESULTS"][step, value]
            assert mark == ("?" if doubt else "."), (seed, step)
            value = result
        assert len(lines) == 44 and text.endswith(f"\\boxed{{{value}}}")


def test_long_base_model_keeps_the_format_and_solves_a_third(long_script):
    folder = ASSETS / "tiny-long-base"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    problems = read_long("eval")
    chats = [chat(tokenizer, p["prompt"]) for p in problems]
    inputs = tokenizer(chats, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(**inputs, max_new_tokens=150, do_sample=True, top_k=0)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    matches = [long_script["RESPONSE"].match(text) for text in texts]
    right = [m is not None and m[1] == p["label"] for m, p in zip(matches, problems, strict=True)]
    assert sum(m is not None for m in matches) > 0.97 * len(problems)
    assert 0.2 < sum(right) / len(problems) < 0.5
    # What a critic can see: the model mostly doubts wrong chains and trusts right ones.
    doubt = [text.split("</think>")[0].endswith("?") for text in texts]
    assert sum(d != r for d, r in zip(doubt, right, strict=True)) > 0.75 * len(problems)


# ---- sums for a real model


@pytest.fixture(scope="module")
def sums():
    return {split: read(f"sums-{split}") for split in ("train", "eval")}


def test_sums_are_those_of_the_script():
    script = runpy.run_module("experiments.make_sums")
    for split, rows in script["make_problems"]().items():
        text = (ASSETS / f"sums-{split}.jsonl").read_text()
        assert text == script["to_jsonl"](rows)


def test_labels_of_sums_count_up_from_the_first_number(sums):
    for p in sums["train"] + sums["eval"]:
        assert [turn["role"] for turn in p["prompt"]] == ["system", "user", "assistant", "user"]
        a, b = map(int, p["prompt"][-1]["content"].split(" + "))
        assert p["label"] == str(len([*range(a), *range(b)]))


def test_no_sum_is_in_both_splits_in_either_order_nor_in_the_example(sums):
    asked = [p["prompt"][-1]["content"] for p in sums["train"] + sums["eval"]]
    pairs = [tuple(sorted(question.split(" + "))) for question in asked]
    assert len(set(pairs)) == len(pairs) == 208
    examples = {tuple(p["prompt"][1]["content"].split(" + ")) for p in sums["train"]}
    assert len(examples) == 1 and examples.isdisjoint(pairs)


def test_the_worked_example_of_a_sum_gets_the_reward(sums):
    example, answer = (turn["content"] for turn in sums["eval"][0]["prompt"][1:3])
    label = str(sum(map(int, example.split(" + "))))
    assert verify(answer, label).reason == "ok"
