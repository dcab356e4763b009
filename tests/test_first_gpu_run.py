"""Faults that only a machine with GPUs, or with several ranks, would show."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import ROOT
from pretended_gpu import pretended_gpu
from torch import nn

import distributed
from model import packed_attention
from sampler.kvcache import KVCache


def test_a_padded_vocabulary_is_saved_by_one_rank_of_two(tmp_path):
    """Saving asked for a slice of the sharded head: a collective, on rank 0 alone."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/tiny-base")
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(tokenizer) < 80
    config = LlamaConfig(
        vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    flags = f"""--model {tmp_path}/model --nproc 2 --device cpu --algorithm grpo --steps 1
        --prompts-per-step 2 --group-size 2 --no-dynamic-sampling --max-response-tokens 8
        --eval-data= --output-dir {tmp_path}/run"""
    command = [sys.executable, ROOT / "train.py", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/checkpoints/step_000001/policy/model.safetensors").exists()


def test_shards_stay_on_the_device_of_the_process_group(monkeypatch):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    meshes = []
    monkeypatch.setattr(distributed, "fully_shard", lambda part, **kw: meshes.append(kw["mesh"]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        distributed.shard(nn.Linear(2, 2), nn.ModuleList(), torch.float32)
    finally:
        dist.destroy_process_group()
    assert [(mesh.device_type, mesh.shape) for mesh in meshes] == [("cpu", (2,))]


@pytest.mark.skipif("TEST_ON_GPU" in os.environ, reason="asked for GPUs")
def test_tests_see_no_gpu():
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "" and not torch.cuda.is_available()


@torch.no_grad()
def test_float32_on_a_gpu_does_not_take_the_attention_that_stores_all_scores(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention

    def watched(q, k, v, **options):
        calls.append((options.get("enable_gqa", False), q.shape[1], k.shape[1], v.shape[1]))
        return real(q, k, v, **options)

    q, k = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    expected = packed_attention(bounds, 4)(0, q, k, k)
    with pretended_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
        q, k = q.to(gpu), k.to(gpu)
        got = packed_attention(bounds.to(gpu), 4)(0, q, k, k)
        torch.testing.assert_close(got.cpu(), expected)
        cache = KVCache(1, 4, 2, 8, page=4, max_pages=4, device=gpu)
        pages = cache.take(2)
        cache.prefill([(pages, 0, 4)])(0, q[:4], k[:4], k[:4])
        cache.prefill([(pages, 4, 6)])(0, q[4:], k[4:], k[4:])  # a chunk after what is stored
    assert calls == [(False, 4, 4, 4)] * 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_gpu_memory_grows_in_place_unless_the_user_configured_it(monkeypatch, given, expected):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    at_start = []  # what the environment says when CUDA starts
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda _: at_start.append(os.environ.get("PYTORCH_ALLOC_CONF"))
    )
    distributed.init("cuda")
    assert at_start == [expected]
