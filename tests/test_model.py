"""The decoder against `transformers`, its cache against its packed forward, and checkpoints."""

import copy
import inspect
import json
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from kernels import attention, cpu_linear
from model import Transformer, load_weights, packed_attention, segment_positions
from rollout import Sampler

V = 83
LENGTHS = [7, 1, 30, 12]
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama biased, wide heads": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama tied, one kv head": (
        LlamaConfig,
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen2": (Qwen2Config, {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True, "sliding_window": 4}),
    "qwen3": (Qwen3Config, {"head_dim": 16, "attention_bias": True}),
    "qwen3 tied": (Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
}
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 8.0},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"factor": 2.0},
}


def make(config_class=LlamaConfig, seed=0, **fields):
    """A small `transformers` model whose every parameter matters (biases and norm weights too)."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_class(**{"vocab_size": V, **sizes, **heads, "pad_token_id": 0, **fields})
    torch.manual_seed(seed)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return theirs


def load(theirs, folder, **kwargs):
    theirs.save_pretrained(folder)
    return Transformer.from_pretrained(folder, **kwargs)


def pack(lengths=LENGTHS, seed=1):
    """Packed batch in which every token but the last of a segment is followed by an action."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (sum(lengths),), generator=generator)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    index = torch.arange(len(ids))
    return ids, cu_seqlens, index[~torch.isin(index + 1, cu_seqlens)]


def reference(theirs, ids, lengths, temperature=1.0):
    """log-softmax of `transformers`, one sequence at a time, each through an untouched copy."""
    rows = [copy.deepcopy(theirs)(x[None]).logits[0] for x in ids.split(lengths)]
    return (torch.cat(rows) / temperature).log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_transformers(family, tmp_path):
    config_class, fields = FAMILIES[family]
    theirs = make(config_class, **fields)
    ours = load(theirs, tmp_path)
    ids, cu_seqlens, index = pack()
    targets = ids[index + 1]
    logprobs, entropy = ours(ids, cu_seqlens, index, targets, temperature=0.7)
    expected = reference(theirs, ids, LENGTHS, 0.7)[index]
    torch.testing.assert_close(
        logprobs, expected.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)

    (logprobs.sum() + entropy.sum()).backward()
    rows = torch.cat([theirs(x[None]).logits[0] for x in ids.split(LENGTHS)])
    expected = (rows / 0.7).log_softmax(-1)[index]
    (expected.gather(1, targets[:, None]).sum() - (expected.exp() * expected).sum()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(grads)
    for name, parameter in ours.named_parameters():
        scale = grads[name].norm()
        assert (parameter.grad - grads[name]).norm() <= 1e-5 * scale + 1e-6, name


@pytest.mark.parametrize("rope_type", ROPES)
def test_rope_types_equal_transformers_below_and_above_the_original_length(rope_type, tmp_path):
    rope = {"rope_type": rope_type, "rope_theta": 100.0, **ROPES[rope_type]}
    theirs = make(rope_parameters=rope, max_position_embeddings=16)
    ours = load(theirs, tmp_path)
    for lengths in ([9, 16, 17, 40, 24], [3, 17], [16, 5]):
        ids, cu_seqlens, index = pack(lengths)
        targets = ids[index + 1]
        logprobs, _ = ours(ids, cu_seqlens, index, targets)
        expected = reference(theirs, ids, lengths)[index].gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    ids, _, index = pack([40])
    targets = ids[1:, None]
    expected = reference(theirs, ids, [40])[index].gather(1, targets)
    plain = make(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    unscaled = reference(plain, ids, [40])[index].gather(1, targets)
    assert (unscaled - expected).abs().max() > 1e-2, "the case does not exercise the rope type"


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_sampling_refuses_rope_types_whose_keys_change_past_the_original_length(
    rope_type, tmp_path
):
    rope = {"rope_type": rope_type, "rope_theta": 100.0, **ROPES[rope_type]}
    ours = load(make(rope_parameters=rope, max_position_embeddings=16), tmp_path)
    ours.requires_grad_(False)
    prompt = list(range(3, 13))
    (r,) = Sampler(ours, []).generate([prompt], max_new_tokens=7)  # 16 stored, the last is not
    ids, cu_seqlens, index = pack([17])
    ids[:] = torch.tensor(prompt + r.response_ids)
    logprobs, _ = ours(ids[:16], torch.tensor([0, 16], dtype=torch.int32), index[9:], ids[10:])
    torch.testing.assert_close(logprobs, torch.tensor(r.rollout_logprobs), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="17 tokens is impossible .* 16 changes all keys; limit"):
        Sampler(ours, []).generate([prompt], max_new_tokens=8)


def test_moving_the_model_to_bfloat16_does_not_round_the_rotary_frequencies(tmp_path):
    ours = load(make(), tmp_path).to(torch.bfloat16)
    cos, _ = ours.model.rotary(torch.tensor([5001]))
    exact = torch.cos(5001 * 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    torch.testing.assert_close(cos[0, 0, :4].double(), exact, atol=1e-3, rtol=0)


def test_empty_segments_change_nothing(tmp_path):
    ours = load(make(), tmp_path)
    ids, cu_seqlens, index = pack([5, 9])
    expected, _ = ours(ids, cu_seqlens, index, ids[index + 1])
    with_empty = torch.tensor([0, 0, 5, 5, 14, 14], dtype=torch.int32)
    logprobs, _ = ours(ids, with_empty, index, ids[index + 1])
    torch.testing.assert_close(logprobs, expected)


def test_gradient_checkpointing_recomputes_and_keeps_the_gradients(tmp_path):
    ours = load(make(), tmp_path)
    ids, cu_seqlens, index = pack()
    calls = []
    ours.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    grads = []
    for on in (False, True):
        ours.model.gradient_checkpointing = on
        ours.zero_grad()
        ours(ids, cu_seqlens, index, ids[index + 1])[0].sum().backward()
        grads.append([p.grad.clone() for p in ours.parameters()])
    assert len(calls) == 3  # once without, twice with
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed, atol=0, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_feed_forward_in_chunks_keeps_the_result_and_the_gradients(chunk, checkpointing, tmp_path):
    """float64, whole chunks and a remainder, alone and inside a recomputed layer."""
    ours = load(make(), tmp_path, dtype=torch.float64)
    ids, cu_seqlens, index = pack()
    outputs, gradients = [], []
    for tokens in (0, chunk):
        ours.model.gradient_checkpointing = checkpointing and tokens > 0
        for layer in ours.model.layers:
            layer.mlp_chunk_tokens = tokens
        ours.zero_grad()
        logprobs, entropy = ours(ids, cu_seqlens, index, ids[index + 1])
        (logprobs.sum() + entropy.sum()).backward()
        outputs.append(logprobs.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in ours.parameters()]))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_float32_masters_with_bfloat16_activations(tmp_path):
    theirs = make(Qwen3Config, head_dim=16)
    ours = load(theirs, tmp_path, compute_dtype=torch.bfloat16)
    ids, cu_seqlens, index = pack()
    hidden = ours.model(
        ids, segment_positions(cu_seqlens, len(ids)), packed_attention(cu_seqlens, 30)
    )
    assert hidden.dtype == torch.bfloat16
    logprobs, entropy = ours(ids, cu_seqlens, index, ids[index + 1])
    logprobs.sum().backward()
    assert logprobs.dtype == entropy.dtype == ours.logits(hidden).dtype == torch.float32
    assert {p.dtype for p in ours.parameters()} == {p.grad.dtype for p in ours.parameters()}
    assert ours.head_weight.dtype == torch.float32
    expected = reference(theirs, ids, LENGTHS)[index].gather(1, ids[index + 1][:, None])[:, 0]
    error = (logprobs - expected).abs()
    assert 1e-4 < error.mean() < 0.1  # bf16 activations, but not bf16 logits


def test_varlen_kernel_is_called_with_causal_masking_and_shared_kv_heads(monkeypatch):
    signature = inspect.signature(attention.varlen_attn)

    def on_cpu(*args, **kwargs):
        a = signature.bind(*args, **kwargs).arguments
        assert a["window_size"] == (-1, 0) and a["enable_gqa"]
        assert a["cu_seq_q"] is a["cu_seq_k"] and a["max_q"] == a["max_k"] == 5
        bounds = a["cu_seq_q"].tolist()
        rows = [[x[i:j].transpose(0, 1) for x in args[:3]] for i, j in pairwise(bounds)]
        out = [F.scaled_dot_product_attention(*r, is_causal=True, enable_gqa=True) for r in rows]
        return torch.cat(out, 1).transpose(0, 1)

    on_cpu.__signature__ = signature
    monkeypatch.setattr(attention, "varlen_attn", on_cpu)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    kernel = attention.varlen_kernel.__wrapped__()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    expected = packed_attention(cu_seqlens, 5)(0, q, k, v)
    torch.testing.assert_close(kernel(q, k, v, cu_seqlens, 5), expected)
    monkeypatch.setattr(attention, "varlen_attn", lambda query, key, value, is_causal: None)
    assert attention.varlen_kernel.__wrapped__() is None  # torch 2.10 has no such arguments


def test_saved_checkpoints_are_those_of_transformers(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5000.0, **ROPES["llama3"]}
    theirs = make(rope_parameters=rope, max_position_embeddings=99, eos_token_id=[2, 7])
    theirs.save_pretrained(tmp_path / "source")
    # As published by several models, and refused by GenerationConfig.save_pretrained: no do_sample.
    published = '{"eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9}'
    (tmp_path / "source" / "generation_config.json").write_text(published)
    ours = Transformer.from_pretrained(tmp_path / "source")
    ours.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)
    ignored = {"_name_or_path", "transformers_version"}
    before, after = theirs.config.to_dict(), again.config.to_dict()
    assert {k: v for k, v in before.items() if k not in ignored}.items() <= after.items()
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert (tmp_path / "saved" / "generation_config.json").read_text() == published
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert fields["rope_theta"] == 5000.0  # all that transformers 4 reads
    assert fields["rope_scaling"]["rope_type"] == "llama3"


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_export_of_float32_masters_and_back(tied, tmp_path):
    ours = load(make(tie_word_embeddings=tied), tmp_path / "a")
    ours.save_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    assert ours.head_weight.dtype == torch.float32
    exported = load_file(tmp_path / "b" / "model.safetensors")
    assert ("lm_head.weight" in exported) is not tied
    again = Transformer.from_pretrained(tmp_path / "b")
    for (name, before), after in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert exported[name].dtype == torch.bfloat16 and after.dtype == torch.float32
        assert torch.equal(after, before.bfloat16().float())
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


def test_save_takes_gathered_weights_and_replaces_the_shards_of_an_earlier_save(tmp_path):
    theirs, other = make(seed=0), make(seed=5)
    ours = load(theirs, tmp_path / "a")
    other.save_pretrained(tmp_path / "b", max_shard_size="10KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    gathered = {name: p + 1 for name, p in ours.named_parameters()}
    ours.save_pretrained(tmp_path / "b", state_dict=gathered)
    for name, parameter in Transformer.from_pretrained(tmp_path / "b").named_parameters():
        assert torch.equal(parameter, gathered[name])


def test_sharded_checkpoints_load(tmp_path):
    theirs = make()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = Transformer.from_pretrained(tmp_path)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_second_copy_of_a_tied_head_and_old_rotary_buffers_are_ignored(tmp_path):
    theirs = make(tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    extra = {
        "lm_head.weight": theirs.lm_head.weight.detach().clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    ours = Transformer.from_pretrained(tmp_path)
    assert not hasattr(ours, "lm_head")
    assert torch.equal(ours.head_weight, theirs.lm_head.weight)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        (FileNotFoundError, "has no config.json; pass"),
    ),
    "bad config": (
        lambda f: (f / "config.json").write_text("{"),
        (ValueError, "config.json is not JSON"),
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        (FileNotFoundError, "model.safetensors is missing; a checkpoint is"),
    ),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-8]
        ),
        (ValueError, "model.safetensors is damaged"),
    ),
    "a run": (
        lambda f: (
            (f / "config.json").write_text('{"algorithm": "grpo"}'),
            (f / "checkpoints").mkdir(),
        ),
        (ValueError, "is a run; pass the policy of a checkpoint"),
    ),
    "other architecture": (
        lambda f: edit_config(f, model_type="gemma2"),
        (ValueError, "config.json: model_type 'gemma2' is not supported; use one of llama, qwen2"),
    ),
    "missing tensor": (
        lambda f: rewrite(f, lambda t: t.pop(NORM)),
        (ValueError, rf"missing \['{NORM}'\], not expected \[\]"),
    ),
    "surplus tensor": (
        lambda f: rewrite(f, lambda t: t.update({"model.x": torch.ones(1)})),
        (ValueError, r"missing \[\], not expected \['model.x'\]"),
    ),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({NORM: torch.ones(31)})),
        (ValueError, rf"{NORM} has shape \(31,\), but config.json describes \(32,\)"),
    ),
    "untied without head": (
        lambda f: rewrite(f, lambda t: t.pop("lm_head.weight")),
        (ValueError, r"missing \['lm_head.weight'\]"),
    ),
    "part of the head rotated": (
        lambda f: edit_config(
            f,
            rope_parameters={
                "rope_type": "linear",
                "rope_theta": 1e4,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        (ValueError, "partial_rotary_factor below 1 is not supported"),
    ),
    "unknown rope": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        (ValueError, "rope_type 'spiral' is not supported; use one of default"),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused_in_one_sentence(case, tmp_path):
    damage, (error, sentence) = BROKEN[case]
    make().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=sentence) as caught:
        Transformer.from_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value) or "rota" in sentence or "rope" in sentence


def test_missing_shard_is_named(tmp_path):
    make().save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} is missing"):
        Transformer.from_pretrained(tmp_path)


def test_path_that_does_not_exist_is_named():
    with pytest.raises(FileNotFoundError, match="runs/x/policy is neither a directory nor"):
        Transformer.from_pretrained("runs/x/policy")


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config])
def test_sliding_windows_are_refused_only_where_a_layer_has_one(config_class, tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 4}
    make(config_class, **window, max_window_layers=1).save_pretrained(tmp_path / "active")
    with pytest.raises(ValueError, match="sliding-window attention is not supported"):
        Transformer.from_pretrained(tmp_path / "active")
    theirs = make(config_class, **window, max_window_layers=2)
    ours = load(theirs, tmp_path / "inactive")
    ids, cu_seqlens, index = pack([20])
    logprobs, _ = ours(ids, cu_seqlens, index, ids[1:])
    expected = reference(theirs, ids, [20])[index].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_ids_beyond_the_tokenizer_have_no_probability_in_trainer_and_sampler(tied, tmp_path):
    ours = load(make(tie_word_embeddings=tied), tmp_path)
    ids, cu_seqlens, index = pack([9])
    hidden = ours.model(ids, torch.arange(9), packed_attention(cu_seqlens, 9))[:-1]
    expected = ours.logits(hidden)[:, : V - 5].log_softmax(-1)
    ours.restrict_vocabulary(V - 5)
    targets = torch.arange(8) * 3
    logprobs, entropy = ours(ids, cu_seqlens, index, targets)
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    torch.testing.assert_close(ours.logits(hidden).log_softmax(-1), expected)
    logprobs.sum().backward()
    assert (
        ours.get_parameter("model.embed_tokens.weight" if tied else "lm_head.weight")
        .grad[V - 5 :]
        .abs()
        .max()
        == 0
    )


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_reordered_weights_compute_the_same_and_are_dropped(dtype, tied):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=900, hidden_size=320, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=5, num_key_value_heads=5, tie_word_embeddings=tied,
    )  # fmt: skip
    ours = Transformer(config, dtype).to(dtype)
    ours.restrict_vocabulary(890)
    for layer in ours.model.layers:
        layer.self_attn.q_proj.bias.normal_()
    ids = torch.arange(1, 8)
    attend = packed_attention(torch.tensor([0, 7], dtype=torch.int32), 7)
    hidden = ours.model(ids, torch.arange(7), attend)
    exact = hidden.float() @ ours.head_weight.float().T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    # Older CPUs multiply no bfloat16 by oneDNN; the head is multiplied in float32 everywhere.
    can = dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with ours.reordered_weights():
        reordered = [m for m in ours.modules() if getattr(m, "reordered", None) is not None]
        assert len(reordered) == 2 * 7 * can and ours.reordered_head is not None
        same = ours.model(ids, torch.arange(7), attend)
        torch.testing.assert_close(same, hidden, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(ours.logits(hidden), exact, atol=1e-4, rtol=1e-5)
    assert all(m.reordered is None for m in reordered) and ours.reordered_head is None
    torch.testing.assert_close(ours.logits(hidden), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [8, 400])
def test_matrices_that_onednn_does_not_multiply_here_are_not_reordered(size, monkeypatch):
    """Transposed, bfloat16 decoded ten times slower on a CPU without it; large float64 raised."""
    matrix = torch.ones(size, size)
    assert cpu_linear.reorder(matrix.double()) is None
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert cpu_linear.reorder(matrix.bfloat16()) is None
    assert cpu_linear.reorder(matrix) is not None


def test_new_weights_after_reordering_are_the_ones_that_count():
    """A reordered copy that outlived a step would sample from the old policy."""
    torch.manual_seed(0)
    fields = {"hidden_size": 320, "intermediate_size": 512, "num_hidden_layers": 1}
    ours = Transformer(LlamaConfig(vocab_size=500, num_attention_heads=5, **fields))
    sampler = Sampler(ours.requires_grad_(False), [2])
    before = sampler.generate([[5, 6, 7]], max_new_tokens=4, temperature=0)[0]
    ours.head_weight.neg_()
    after = sampler.generate([[5, 6, 7]], max_new_tokens=4, temperature=0)[0]
    assert before.response_ids[0] != after.response_ids[0]


def test_backbone_loads_from_a_policy_checkpoint_without_its_head(tmp_path):
    make().save_pretrained(tmp_path)
    other = Transformer(LlamaConfig.from_pretrained(tmp_path))
    other.value_head = torch.nn.Linear(32, 1)
    del other.lm_head
    fresh = other.value_head.weight.clone()
    names = ("value_head.weight", "value_head.bias")
    load_weights(other, tmp_path, torch.float32, ignore=("lm_head.weight",), fresh=names)
    policy = Transformer.from_pretrained(tmp_path)
    assert torch.equal(other.model.norm.weight, policy.model.norm.weight)
    assert torch.equal(other.value_head.weight, fresh)
