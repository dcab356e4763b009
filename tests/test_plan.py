"""The memory plan against the published table, against bytes counted in full-size layers without a
GPU, and against the live bytes of whole small runs.
"""

import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

import distributed
import rollout
import train
from algorithms import ALGORITHMS
from config import parse
from critic import Critic
from model import Layer, Transformer
from run import plan, setup
from run.optimizer import make_optimizers
from sampler import engine

GB = 1e9
# 42 x 47.19 M + 2 x 267.4 M parameters and 43.0 kB of keys and values per token.
MINICPM5_2B = LlamaConfig(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=42, num_attention_heads=16,
    num_key_value_heads=2, head_dim=128, vocab_size=130_560, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_1_7B = Qwen3Config(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
)  # fmt: skip
QWEN2_5_0_5B = Qwen2Config(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True,
)  # fmt: skip


def recipe(name, *flags):
    path = str(ROOT / "recipes" / f"{name}.yaml")
    config = parse(["--config", path, "--dtype", "bfloat16", *flags])
    return config.resolved(ALGORITHMS)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations returned and that are still referenced."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.sizes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return result

    def count(self, storage):
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key):
        self.now -= self.sizes.pop(key)


# ---- the table


def test_parameters_and_cache_are_those_of_minicpm5_2b():
    policy, decoder, layer = plan.parameters(MINICPM5_2B)
    assert policy == pytest.approx(2.517e9, rel=1e-3) and decoder == pytest.approx(
        2.249e9, rel=1e-3
    )
    assert layer == pytest.approx(47.19e6, rel=1e-3)
    one = recipe("grpo-minicpm5-2b-128k", "--slots=1")
    one_slot = plan.cache_bytes(MINICPM5_2B, one, 2, 1e12)
    assert one_slot / (2048 + 126_976) == pytest.approx(43.0e3, rel=1e-3)


def test_the_cache_takes_its_bound_or_four_fifths_of_what_is_free():
    config = recipe("justrl2-minicpm5-2b-128k", "--slots=32")
    at_80 = plan.make_plan(MINICPM5_2B, config, 80 * GB)
    rest = at_80.total("rollout") - at_80.moments["rollout"]["KV cache"]
    assert at_80.moments["rollout"]["KV cache"] == pytest.approx(0.8 * (80 * GB - rest))
    config.kv_cache_tokens = 200_000
    bounded = plan.make_plan(MINICPM5_2B, config, 80 * GB).moments["rollout"]["KV cache"]
    assert bounded / 200_000 == pytest.approx(43.0e3, rel=1e-3)


# Columns of the table: GPUs, tokens, flags; states, checkpoints, layer peak, total (GB).
TABLE = {
    "8 GPUs": (8, 131_072, "", 9.5, 22.5, 18.5, 56.5),
    "8 GPUs, chunks": (8, 131_072, "--mlp-chunk-tokens=16384", 9.5, 22.5, 8.7, 46.6),
    "8 GPUs, 64k": (8, 65_536, "", 9.5, 11.3, 9.3, 36.0),
    "8 GPUs, 32k": (8, 32_768, "", 9.5, 5.6, 4.6, 25.7),
    "1 GPU": (1, 131_072, "", 76.3, 22.5, 18.5, 124.9),
    "1 GPU, chunks": (1, 131_072, "--mlp-chunk-tokens=16384", 76.3, 22.5, 8.7, 115.0),
    "1 GPU, 64k": (1, 65_536, "", 76.3, 11.3, 9.3, 104.3),
    "1 GPU, 32k": (1, 32_768, "", 76.3, 5.6, 4.6, 94.1),
    "1 GPU, one model at a time": (
        1, 131_072, "--mlp-chunk-tokens=16384 --offload=idle", 40.3, 22.5, 8.7, 79.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_every_row_of_the_published_table(row):
    gpus, tokens, flags, states, checkpoints, layer, total = TABLE[row]
    length = ["--max-prompt-tokens=2048", f"--max-response-tokens={tokens - 2048}"]
    length += [f"--max-tokens-per-micro-batch={tokens}", f"--nproc={gpus}"]
    length += [f"--overlong-buffer-tokens={tokens // 8}"]
    config = recipe("justrl2-minicpm5-2b-128k", *length, *flags.split())
    ours = plan.make_plan(MINICPM5_2B, config, 141 * GB)
    parts = {name: size / GB for name, size in ours.moments["policy backward"].items()}
    # The table counts gradients of both models at once; ours exist one model at a time. With
    # --offload idle it leaves the moments of the model at work on the GPU; ours visit it to step.
    both = 0.0 if config.offload == "idle" else 2.249 * 4 / gpus
    moments = 2.517 * 8 if config.offload == "idle" else 0.0
    names = [
        f"{m} {x}" for m in ("policy", "critic") for x in ("weights", "gradients", "optimizer")
    ]
    assert sum(parts.get(n, 0.0) for n in names) + both + moments == pytest.approx(states, rel=0.01)
    assert parts["activation checkpoints"] == pytest.approx(checkpoints, rel=0.02)
    # The layer: less than theirs, who hold the product while its gradient comes.
    assert 0.8 * layer < parts["layer at work"] < 1.02 * layer
    # On eight GPUs they leave the sampler's copy out of the total; on one it is their 5.0.
    sampler = parts["sampler copy"] if gpus > 1 else 0.0
    assert ours.total("policy backward") / GB + both + moments - sampler == pytest.approx(
        total, rel=0.05
    )


def test_logits_written_out_would_need_what_the_table_says():
    """131,072 x 130,560 logits at 12 bytes: the row that the fused head removes."""
    config = recipe("justrl2-minicpm5-2b-128k")
    ours = plan.make_plan(MINICPM5_2B, config, 80 * GB)
    parts = ours.moments["policy backward"]
    naive = ours.total("policy backward") - parts["layer at work"] - parts["sampler copy"]
    naive += 131_072 * MINICPM5_2B.vocab_size * 12
    assert naive / GB == pytest.approx(243, rel=0.02)
    assert parts["head at work"] < 131_072 * MINICPM5_2B.vocab_size * 12 / 25


def test_128k_fits_eight_80_gb_gpus_one_of_141_gb_and_one_of_80_gb_with_offload():
    assert plan.make_plan(MINICPM5_2B, recipe("justrl2-minicpm5-2b-128k"), 80 * GB).fits
    one = recipe("justrl2-minicpm5-2b-128k", "--nproc=1", "--mlp-chunk-tokens=16384")
    assert plan.make_plan(MINICPM5_2B, one, 141 * GB).fits
    assert not plan.make_plan(MINICPM5_2B, one, 80 * GB).fits
    one.offload = "optimizer"
    assert plan.make_plan(MINICPM5_2B, one, 80 * GB).fits


SHAPES = {"minicpm5": MINICPM5_2B, "qwen3": QWEN3_1_7B, "qwen2.5": QWEN2_5_0_5B}
MEMORY = {"minicpm5": 80, "qwen3": 141, "qwen2.5": 24}


GPU_RECIPES = [f for f in sorted((ROOT / "recipes").glob("*.yaml")) if "cpu" not in f.stem]


@pytest.mark.parametrize("file", GPU_RECIPES, ids=lambda p: p.stem)
def test_every_gpu_recipe_fits_the_hardware_it_names(file, tmp_path, capsys):
    (shape,) = (name for name in SHAPES if name in file.stem)
    assert f"{MEMORY[shape]} GB" in file.read_text()
    SHAPES[shape].save_pretrained(tmp_path)
    train.main(["--plan", "--config", str(file), "--model", str(tmp_path),
                "--gpu-memory-gb", str(MEMORY[shape])])  # fmt: skip
    assert ": fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flags", "memory", "words"),
    [
        ("justrl2-minicpm5-2b-128k", "--kv-cache-tokens=2000000", 80,
         ["--kv-cache-tokens 1000000"]),
        ("justrl2-minicpm5-2b-128k", "--nproc=1", 80,
         ["--mlp-chunk-tokens 16384", "--offload optimizer"]),
        ("justrl2-minicpm5-2b-128k", "--nproc=1", 57,
         ["--max-response-tokens", "--offload idle"]),
        ("justrl2-minicpm5-2b-128k", "--nproc=1", 5, ["--nproc", "smaller model"]),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused_with_a_change_that_makes_it_fit(
    name, flags, memory, words, tmp_path, capsys
):
    MINICPM5_2B.save_pretrained(tmp_path)
    argv = ["--plan", "--config", str(ROOT / "recipes" / f"{name}.yaml"), "--model", str(tmp_path)]
    argv += [f"--gpu-memory-gb={memory}", *flags.split()]
    with pytest.raises(SystemExit) as error:
        train.main(argv)
    sentence = str(error.value)
    assert sentence.startswith("error: ") and "\n" not in sentence
    assert all(word in sentence for word in words), sentence
    assert "does not fit" in capsys.readouterr().out
    if " set " in sentence:
        changes = sentence.split(" set ")[1].split(", which")[0].split()
        train.main([*argv, *changes])
        assert ": fits" in capsys.readouterr().out


def test_the_plan_of_a_hub_model_out_of_reach_is_one_sentence(monkeypatch):
    def offline(*_):
        raise OSError("no network")

    monkeypatch.setattr(plan, "hf_hub_download", offline)
    with pytest.raises(SystemExit, match=r"config\.json of some/model .* pass that as --model\.$"):
        train.main(["--plan", "--model", "some/model"])


# ---- counted


@pytest.mark.parametrize("model", [MINICPM5_2B, QWEN3_1_7B], ids=["minicpm5", "qwen3"])
@pytest.mark.parametrize("chunk", [0, 16384])
def test_one_layer_at_131072_tokens_holds_what_the_plan_says(model, chunk):
    """Tensors without memory: forward and backward of the real layer, every live byte counted."""
    tokens, live = 131_072, LiveBytes()
    with torch.device("meta"):
        layer = Layer(model)
    layer.mlp_chunk_tokens = chunk

    def attend(*qkv):
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in layer.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(p.shape)))
        x = torch.empty(tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        rotary = torch.empty(tokens, 1, 128), torch.empty(tokens, 1, 128)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p)
        with live:
            # In place of the next layer: the result is dropped at once, its gradient is held.
            x.register_hook(lambda g: None)
            y = layer(x, *rotary, attend)
            gradient = torch.empty_like(y)
            saved = live.now - 2 * y.untyped_storage().nbytes()
            live.peak = live.now
            y.backward(gradient)
            peak = live.peak - y.untyped_storage().nbytes()
    config = SimpleNamespace(mlp_chunk_tokens=chunk, max_tokens_per_micro_batch=tokens)
    config.max_prompt_tokens, config.max_response_tokens = 0, tokens
    config.prompts_per_step = config.group_size = 1
    expected_saved, expected_peak = plan.layer_bytes(model, config, 2)
    assert saved == pytest.approx(tokens * expected_saved, rel=0.08)
    assert peak == pytest.approx(tokens * expected_peak, rel=0.08)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """4 layers of width 128 and a small vocabulary: an activation-heavy run in seconds."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, eos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        Transformer(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "assets/tiny-base").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm grpo",
        "--algorithm grpo --activation-checkpointing",
        "--algorithm justrl2 --activation-checkpointing --mlp-chunk-tokens 256",
        "--algorithm justrl2 --activation-checkpointing --dtype bfloat16",
    ],
)
def test_two_whole_steps_need_what_the_plan_says(flags, small_model, tmp_path, monkeypatch):
    """Every live byte of set-up, scoring, updates and optimizer steps; responses are given."""
    argv = ["--model", str(small_model), "--output-dir", str(tmp_path / "r"), "--eval-data", "",
            "--prompts-per-step=2", "--group-size=8", "--max-response-tokens=160", "--steps=2",
            "--max-prompt-tokens=16", "--no-dynamic-sampling", "--num-critic-only-steps=0",
            "--device=cpu", "--max-tokens-per-micro-batch=4096", "--slots=1",
            *flags.split()]  # fmt: skip
    config = parse(argv).resolved(ALGORITHMS)
    config.dtype = "float32" if config.dtype == "auto" else config.dtype
    config.head_dtype = config.dtype

    def collect(sampler, grader, problems, *_):
        groups = [rollout.new_group(problems[i], i, seed=0, step=0, size=8) for i in range(2)]
        for r in (r for group in groups for r in group):
            r.problem = replace(r.problem, prompt_ids=list(range(10, 26)))
            r.response_ids = list(range(100, 260))
            r.rollout_logprobs, r.weight_versions = [-7.0] * 160, [0] * 160
            r.finish_reason, r.reward, r.reason = "length", float(r.sample_index % 2), "ok"
        return rollout.Collected(groups, [], groups, Counter(finished=2))

    monkeypatch.setattr(rollout, "collect", collect)
    for module in (engine, setup):  # the tokenizer is smaller than the model
        monkeypatch.setattr(module, "vocabulary_size", lambda tokenizer: 10**9)
    live = LiveBytes()
    with live:
        run, state = train.set_up(config, torch.device("cpu"))
        with run.grader:
            for _ in range(2):
                train.train_step(run, state)
    ours = plan.make_plan(plan.read_shape(str(small_model)), config, GB)
    assert live.peak == pytest.approx(ours.total(ours.peak) - plan.CUDA_CONTEXT, rel=0.15)


def test_during_an_update_the_rollout_counts_in_every_moment():
    flags = "--kv-cache-tokens=100000", "--is-mode=icepop"
    alone, concurrent = (
        plan.make_plan(
            QWEN2_5_0_5B,
            recipe("justrl2-qwen2.5-0.5b-gsm8k-1gpu", *flags, f"--async-steps={steps}"),
            24 * GB,
        )
        for steps in (0, 1)
    )
    cache = alone.moments["rollout"]["KV cache"]
    assert cache > 1 * GB and concurrent.total("rollout") == alone.total("rollout")
    for moment in list(alone.moments)[1:]:
        assert concurrent.total(moment) - alone.total(moment) >= cache


def test_a_cache_without_a_bound_leaves_room_for_the_concurrent_update(monkeypatch):
    """The sampler took four fifths of what was free before the concurrent update had begun."""
    config = recipe(
        "justrl2-qwen2.5-0.5b-gsm8k-1gpu", "--is-mode=icepop", "--async-steps=1", "--slots=2000"
    )
    whole = plan.make_plan(QWEN2_5_0_5B, config, 32 * GB)
    cache = whole.moments["rollout"]["KV cache"]
    alone = plan.make_plan(QWEN2_5_0_5B, replace(config, async_steps=0), 32 * GB)
    assert whole.fits and 0 < cache < alone.moments["rollout"]["KV cache"]
    assert cache == pytest.approx(0.8 * (32 * GB - whole.total(whole.peak) + cache))
    # The sampler on a GPU gets that bound, any other its own.
    monkeypatch.setattr(plan, "machine_memory", lambda *_: 32 * GB)

    def bound(config, kind):
        return setup.cache_bound(QWEN2_5_0_5B, config, torch.device(kind))

    assert bound(config, "cuda") == pytest.approx(cache / (24 * 2 * 2 * 64 * 2), abs=1)
    assert bound(config, "cpu") == bound(replace(config, async_steps=0), "cuda") == 0
    assert bound(replace(config, kv_cache_tokens=9999), "cuda") == 9999
    # Where not even one longest sequence has room next to the update, flags are named that fit.
    config.slots = 64
    assert not plan.make_plan(QWEN2_5_0_5B, config, 14 * GB).fits
    assert plan.advice(QWEN2_5_0_5B, config, 14 * GB).startswith("set --")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_and_what_offload_keeps_on_the_host_are_counted(optimizer, small_model):
    """Muon holds one moment, and was given two; the host's share stood nowhere."""
    config = parse(["--optimizer", optimizer, "--algorithm", "justrl2"]).resolved(ALGORITHMS)
    config.dtype = "float32"
    models = [Transformer.from_pretrained(small_model), Critic.from_policy(small_model, 0.5)]
    moments, weights = [], []
    for model in models:
        optimizers = make_optimizers(model, 1e-3, config)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for each in optimizers:
            each.step()
        states = [x for o in optimizers for s in o.state.values() for x in s.values() if x.ndim]
        moments.append(sum(x.nbytes for x in states))
        weights.append(sum(p.nbytes for p in model.parameters()))
    shape = plan.read_shape(str(small_model))

    def plan_of(**changes):
        return plan.make_plan(shape, replace(config, **changes), GB)

    parts = plan_of().moments["rollout"]
    assert [parts["policy optimizer"], parts["critic optimizer"]] == moments
    hosts = [plan_of(offload=offload).host for offload in ("none", "optimizer", "idle")]
    assert hosts == [0, sum(moments), sum(moments) + sum(weights)]
    assert plan_of(offload="idle", nproc=2).host == hosts[2]  # of all ranks together


def test_a_start_counts_the_ranks_of_torchrun(monkeypatch):
    """Under torchrun --nproc is 1, and a run on eight GPUs would be warned of as if on one."""
    monkeypatch.setattr(plan, "machine_memory", lambda *_: 80 * GB)
    config = recipe("justrl2-minicpm5-2b-128k", "--nproc=1")

    def concern(ranks):
        return plan.concern(MINICPM5_2B, config, torch.device("cuda"), ranks, ranks)

    assert concern(8) == "" and "does not fit" in concern(1)


def test_the_memory_of_a_machine_is_shared_by_the_ranks_on_it_alone(monkeypatch):
    """Two machines of eight ranks were warned of as if all sixteen shared the memory of one."""
    monkeypatch.setattr(distributed, "world_size", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert distributed.ranks_here() == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # started by neither torchrun nor us
    assert distributed.ranks_here() == 16
    config = recipe("justrl2-minicpm5-2b-128k", "--nproc=1", "--offload=idle")

    def concern(kind, here):
        return plan.concern(MINICPM5_2B, config, torch.device(kind), 16, here)

    # On CPUs a rank, which needs 53 GB, has its share of the RAM.
    monkeypatch.setattr(distributed, "host_memory", lambda: 8 * 60 * GB)
    assert concern("cpu", 8) == ""
    assert "52.7 GB of 30 at policy backward" in concern("cpu", 16)
    # On GPUs, of the 57 GB that --offload parks on hosts, one holds what its own ranks park.
    monkeypatch.setattr(plan, "machine_memory", lambda *_: 80 * GB)
    monkeypatch.setattr(distributed, "host_memory", lambda: 30 * GB)
    assert concern("cuda", 8) == "" and "keeps 57.2 GB on the host" in concern("cuda", 16)


def test_a_start_warns_of_a_plan_that_does_not_fit_and_goes_on(
    random_tiny_model, tmp_path, monkeypatch, capsys, no_figures
):
    flags = f"--model {random_tiny_model} --eval-data= --steps 1 --algorithm grpo --slots 8"
    flags += " --prompts-per-step 2 --group-size 2 --max-response-tokens 16 --max-refills 0"

    def begin(name, *more):
        train.main([*flags.split(), *more, "--output-dir", str(tmp_path / name)])

    begin("fits")
    assert "by plan" not in capsys.readouterr().err
    monkeypatch.setattr(plan, "machine_memory", lambda *_: 0.5 * GB)
    begin("does-not")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "by plan" in line)
    verdict, command = line.removeprefix("WARNING: by plan ").split(" shows")[0].split("; ")
    with pytest.raises(SystemExit, match="this does not fit"):
        begin("plan", *command.split())
    assert verdict in capsys.readouterr().out and "does not fit" in verdict
    assert (tmp_path / "does-not/checkpoints/step_000001").exists()
    monkeypatch.setattr(plan, "machine_memory", lambda *_: 80 * GB)
    monkeypatch.setattr(distributed, "host_memory", lambda: 1e5)
    begin("host", "--offload", "idle")
    assert "--offload idle keeps" in capsys.readouterr().err
