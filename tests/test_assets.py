"""The embedded task and base model: right labels, sound tokenizer, reproducible, room to learn."""

import json
import random
import re
import runpy
import string
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).parent.parent / "assets"
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
