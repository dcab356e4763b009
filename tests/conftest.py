"""For every test: the root on the path, one thread, no GPU, and the fixtures of several files.

GPUs are hidden, because many tests start commands whose device is "auto", with golden numbers of a
CPU and more ranks than there may be GPUs. `TEST_ON_GPU=1 pytest ...` lets the tests see them.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

if not os.environ.get("TEST_ON_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the commands that tests start, too

sys.path.insert(0, str(Path(__file__).parent.parent))

import helpers  # noqa: E402 (it imports from the root)

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_tiny_model(tmp_path_factory):
    """Directory of an untrained Llama (hidden 32, 2 layers, 4 heads, init std 0.02) with the
    embedded tokenizer.
    """
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("random-tiny")
    tokenizer = AutoTokenizer.from_pretrained(helpers.ROOT / "assets" / "tiny-base")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=max(64, len(tokenizer)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.02,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def mixed_rewards(monkeypatch):
    """Runs whose groups have a signal, though the model is untrained."""
    helpers.grade_by_hash(monkeypatch)


@pytest.fixture
def no_figures(monkeypatch, request):
    """Runs that draw no figures, except in tests marked `figures`."""
    if "figures" not in request.keywords:
        helpers.draw_no_figures(monkeypatch)


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["untimed", "timed"]
)
def timed(request):
    """Whether to assert on seconds: only among the slow tests, since a busy machine is late."""
    return request.param
