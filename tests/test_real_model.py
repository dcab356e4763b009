"""SmolLM2-135M-Instruct, when `make real-model` has fetched it: log-probs on a real chat prompt
equal `transformers`.
"""

import pytest
import torch
from helpers import ROOT, policy_logprobs
from transformers import AutoModelForCausalLM

from data import pack
from model import Transformer
from problems import load_problems, load_tokenizer, stop_ids
from rollout import Sampler

FOLDER = ROOT / "runs" / "smollm2-135m"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "model.safetensors").exists(), reason="run `make real-model` first"
)


def test_logprobs_on_a_real_chat_prompt_equal_transformers():
    tokenizer = load_tokenizer(FOLDER)
    problems, _ = load_problems(str(ROOT / "assets/word_problems.jsonl"), tokenizer, 256)
    policy = Transformer.from_pretrained(FOLDER).requires_grad_(False)
    sampler = Sampler(policy, stop_ids(FOLDER, tokenizer), slots=4, tokenizer=tokenizer)
    rollouts = sampler.generate([p.prompt_ids for p in problems[:2]], n=2, max_new_tokens=24)
    assert all(r.text.strip() for r in rollouts)
    mb = pack(rollouts, range(4))
    logprobs = policy_logprobs(policy, mb, 1.0)
    oracle = AutoModelForCausalLM.from_pretrained(FOLDER)
    for row, r in enumerate(rollouts):
        prompt, response = r.problem.prompt_ids, r.response_ids
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(logprobs[row, : len(response)], expected, atol=1e-4)
        assert torch.allclose(torch.tensor(r.rollout_logprobs), expected, atol=1e-4)


def test_a_right_answer_to_a_sum_fits_the_budgets_of_the_comparison():
    tokenizer = load_tokenizer(FOLDER)
    for split in ("train", "eval"):
        problems, dropped = load_problems(str(ROOT / f"assets/sums-{split}.jsonl"), tokenizer, 80)
        assert problems and not dropped
    right = "49 + 49 = 98. \\boxed{98}"
    assert len(tokenizer.encode(right)) + 1 <= 20  # and the end of the turn
