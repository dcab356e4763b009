"""Training and evaluation on a pretended GPU: no operation brings tensors of two devices together.

The project is developed on machines without a GPU, and this is the fault that none of the other
tests can see.
"""

import sys
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, flash_attn_stand_in
from pretended_gpu import CPU, GPU, down, pretended_gpu, up
from torch.utils._pytree import tree_map

import algorithms
import eval as evaluation
import model as model_file
import train
from config import parse
from kernels import attention
from sampler import kvcache

FEW = """--device cuda --eval-data= --steps 2 --num-critic-only-steps 0 --prompts-per-step 2
    --group-size 2 --no-dynamic-sampling --max-response-tokens 16 --save-every 0"""


def test_the_pretended_gpu_refuses_what_cuda_refuses(monkeypatch):
    with pretended_gpu(monkeypatch) as gpu:
        a, b = torch.ones(3, device=gpu).requires_grad_(), torch.ones(3)
        assert a.is_cuda and a.device == GPU and (a * 2).device == GPU and b.device == CPU
        for operation in (
            lambda: a + b,
            lambda: torch.cat([a, b]),
            lambda: b[torch.ones(2, dtype=torch.int64, device=gpu)],
            lambda: a.detach().index_copy_(0, torch.tensor([0]), b[:1]),
            lambda: torch.nn.functional.linear(a, torch.ones(2, 3)),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                operation()
        with pytest.raises(TypeError, match="numpy"):
            a.detach().numpy()
        assert (a.cpu() + b).device == CPU and (b.to(a) + a).device == GPU
        assert torch.equal(a[torch.tensor([1])].cpu(), torch.ones(1))
        a.sum().backward()
        assert a.grad.device == GPU
    assert not torch.ones(3).is_cuda


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for flash-attn where pages are read; the functions themselves are not watched."""

    def unwatched(function):
        @wraps(function)
        def call(*args, **kwargs):
            return up(function(*tree_map(down, args), **tree_map(down, kwargs)))

        return call

    functions = {name: unwatched(f) for name, f in vars(flash_attn_stand_in()).items()}
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(**functions))
    monkeypatch.setattr(attention, "find_spec", lambda name: True)
    monkeypatch.setattr(attention, "too_old_a_gpu", lambda: False)  # only for Triton it is old
    monkeypatch.setattr(kvcache, "paged_kernel", attention.paged_kernel.__wrapped__)
    monkeypatch.setattr(model_file, "varlen_kernel", lambda: None)


def few_steps(folder, flags):
    return [*FEW.split(), *flags.split(), "--output-dir", str(folder)]


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype float32 --entropy-control clip_cov --optimizer muon",
        "--dtype bfloat16 --offload optimizer --algorithm grpo --kl-coef 0.1",
        "--dtype bfloat16 --partial-rollout --over-sampling 2 --head-dtype float32",
        "--dtype float32 --async-steps 1 --steps 3 --is-mode tis --algorithm ppo",
    ],
)
def test_training_keeps_to_one_device(flags, kernels, monkeypatch, tmp_path):
    with pretended_gpu(monkeypatch) as gpu:
        train.train(parse(few_steps(tmp_path, flags)).resolved(algorithms.ALGORITHMS), gpu)


def test_resume_and_evaluation_keep_to_one_device(kernels, monkeypatch, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data.jsonl"
    data.write_text("".join((ROOT / "assets/eval.jsonl").read_text().splitlines(True)[:3]))
    with pretended_gpu(monkeypatch) as gpu:
        for steps in ("--steps 1", "--steps 2 --resume"):
            flags = f"--dtype bfloat16 --log-samples -1 {steps}"
            train.train(parse(few_steps(run, flags)).resolved(algorithms.ALGORITHMS), gpu)
        checkpoint = run / "checkpoints/step_000002"
        argv = f"""--model {checkpoint}/policy --data {data} --n 2 --max-response-tokens 12
            --device cuda --top-p 0.9 --critic {checkpoint}/critic --force-budget
            --output {tmp_path}/eval.json"""
        evaluation.main(argv.split())
