"""Llama, Qwen2 and Qwen3 decoders (SmolLM2 and MiniCPM5 are Llama) on packed tokens.

Parameter names are the Hugging Face names, so a checkpoint is read and written without a key map. The decoder
does not know how attention is done: the caller hands it an `attend` function, either packed causal attention
(training) or a view of a KV cache (sampling), and everything else is the same code in both cases.
"""

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels import logprob_entropy

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """Linear map computed in the dtype of its input, whatever dtype the weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Rotary:
    """Cosines and sines of the rotary embedding, for every rope type of `transformers`.

    Not a module and not a buffer: `model.to(torch.bfloat16)` must never round the frequencies.
    `native_length` is the longest sequence for which the frequencies are the same for all lengths (None: always).
    """

    def __init__(self, config: PretrainedConfig):
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        self.config = config
        self.type = rope.get("rope_type", rope.get("type", "default"))
        self.theta = rope.get("rope_theta") or getattr(config, "rope_theta", 10_000.0)
        if self.type != "default" and self.type not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rope_type {self.type!r} is not supported; known: default, {', '.join(ROPE_INIT_FUNCTIONS)}.")
        native = {"dynamic": config.max_position_embeddings, "longrope": rope.get("original_max_position_embeddings")}
        self.native_length = native.get(self.type)
        self.frequencies, self.scaling = self._init(None)

    def _init(self, length: int | None) -> tuple[Tensor, float]:
        with torch.device("cpu"):  # the model itself may be under construction on the meta device
            if self.type == "default":
                exponent = torch.arange(0, self.config.head_dim, 2, dtype=torch.float) / self.config.head_dim
                return 1.0 / self.theta**exponent, 1.0
            return ROPE_INIT_FUNCTIONS[self.type](self.config, "cpu", seq_len=length)

    def _by_segment(self, positions: Tensor) -> Tensor:
        """Frequencies per token (M, d/2) when some segment is longer than `native_length`."""
        starts = (positions == 0).nonzero().flatten().tolist() + [len(positions)]
        rows = [self._init(b - a)[0].expand(b - a, -1) for a, b in zip(starts, starts[1:])]
        return torch.cat(rows).to(positions.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (M,) -> cos, sin (M, 1, d) float32; sin carries the sign of the half rotation."""
        self.frequencies = self.frequencies.to(positions.device)
        frequencies = self.frequencies
        if self.native_length and positions.max() >= self.native_length:
            frequencies = self._by_segment(positions)
        angle = (positions[:, None].float() * frequencies)[:, None]
        cos, sin = angle.cos() * self.scaling, angle.sin() * self.scaling
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class Attention(nn.Module):
    """Projections, optional q/k norm (Qwen3) and rotary embedding; the attention itself is `attend`."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        size, d = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qwen2 = config.model_type == "qwen2"
        bias = qwen2 or config.attention_bias
        self.q_proj = Linear(size, heads * d, bias=bias)
        self.k_proj = Linear(size, kv_heads * d, bias=bias)
        self.v_proj = Linear(size, kv_heads * d, bias=bias)
        self.o_proj = Linear(heads * d, size, bias=bias and not qwen2)
        qk_norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        # One rotation for q and k together: decoding a small model is bound by the number of operations.
        qk = torch.cat([q, k], 1).float()
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin).to(x.dtype)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        return self.o_proj(attend(q, k, v).flatten(1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj = Linear(size, inner, bias=bias)
        self.up_proj = Linear(size, inner, bias=bias)
        self.down_proj = Linear(inner, size, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: the backbone of the policy and of the critic.

    `compute_dtype` is the dtype of the activations; `gradient_checkpointing` recomputes each layer in backward.
    """

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        check_config(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = False

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids (M,), positions (M,) -> hidden states (M, D) in `compute_dtype`.

        `attend(layer, q (M, H, d), k (M, KV, d), v (M, KV, d)) -> (M, H, d)` mixes the tokens.
        """
        x = self.embed_tokens(input_ids).to(self.compute_dtype)
        cos, sin = self.rotary(positions)
        for i, layer in enumerate(self.layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, partial(attend, i), use_reentrant=False)
            else:
                x = layer(x, cos, sin, partial(attend, i))
        return self.norm(x)


class Transformer(nn.Module):
    """Causal language model: `.model` (Decoder) and `.lm_head` (absent when tied to the embedding)."""

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.model = Decoder(config, compute_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generation_config: str | None = None  # JSON text carried from the source to the saved checkpoint

    @property
    def head_weight(self) -> Tensor:
        """Output matrix (V, D) in its storage dtype."""
        return (self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, action_index: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (A,) float32 of the actions `targets` (A,) taken after tokens `action_index` (A,).

        input_ids (M,) holds the sequences one after another, cu_seqlens (S+1,) int32 their boundaries.
        """
        positions = segment_positions(cu_seqlens, len(input_ids))
        hidden = self.model(input_ids, positions, packed_attention(cu_seqlens, int(cu_seqlens.diff().max())))
        hidden = hidden[action_index]  # before the head: prompt tokens never cost a row of V logits
        return logprob_entropy(hidden, self.head_weight.to(hidden.dtype), targets, temperature=temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V), accumulated and returned in float32 (never rounded to bf16)."""
        weight = self.head_weight.to(hidden.dtype)
        if hidden.is_cuda and hidden.dtype != torch.float32:
            rows = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32)
            return rows.unflatten(0, hidden.shape[:-1])
        return F.linear(hidden.float(), weight.float())

    @classmethod
    def from_pretrained(
        cls, path: str | Path, dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None
    ) -> "Transformer":
        """Load a local directory or hub model on the CPU: weights stored in `dtype`, activations in `compute_dtype`."""
        folder = local_folder(path)
        with torch.device("meta"):
            model = cls(load_config(folder), compute_dtype or dtype)
        load_weights(model, folder, dtype, ignore=("lm_head.weight",) if model.config.tie_word_embeddings else ())
        generation_config = folder / "generation_config.json"
        model.generation_config = generation_config.read_text() if generation_config.exists() else None
        return model

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None = None, state_dict: dict | None = None) -> None:
        """Write config.json, generation_config.json and safetensors that `transformers` and vLLM load.

        dtype: of the written weights (default: as stored). state_dict: full weights when this module holds shards.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        dtype = dtype or self.head_weight.dtype
        weights = {name: w.detach().to("cpu", dtype) for name, w in (state_dict or self.state_dict()).items()}
        save_torch_state_dict(weights, folder, max_shard_size="4GB")
        config = copy.deepcopy(self.config)
        config.dtype = dtype
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder)
        if self.generation_config:
            (folder / "generation_config.json").write_text(self.generation_config)


# ---- attention over packed tokens, and over a cache


def segment_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position (M,) of every packed token within its own segment."""
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def packed_attention(cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """Causal self-attention within each segment of a packed batch; cu_seqlens (S+1,) int32."""
    lengths = cu_seqlens.diff().tolist()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_cuda and q.dtype != torch.float32 and (kernel := varlen_kernel()):
            return kernel(q, k, v, cu_seqlens, max_seqlen)
        # (1, heads, M, d): with three dimensions SDPA takes a path that is up to 8 times slower.
        segments = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)))
        sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        return torch.cat([sdpa(*segment) for segment in segments], 2)[0].transpose(0, 1)

    return attend


@cache
def varlen_kernel() -> Callable | None:
    """The fused variable-length attention of this installation, or None."""
    try:
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v, cu, n: flash_attn_varlen_func(q, k, v, cu, cu, n, n, causal=True)
    except ImportError:
        pass
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None
    causal = {"window_size": (-1, 0), "enable_gqa": True}
    return lambda q, k, v, cu, n: varlen_attn(q, k, v, cu, cu, n, n, **causal)


class KVCache:
    """Keys and values of `slots` sequences, (layers, slots, kv_heads, capacity, d); capacity grows on demand."""

    def __init__(self, config: PretrainedConfig, slots: int, dtype: torch.dtype, device: torch.device | str):
        shape = config.num_hidden_layers, slots, config.num_key_value_heads, 0, config.head_dim
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.native_length = Rotary(config).native_length

    def _reserve(self, length: int) -> None:
        """Make room for `length` tokens per slot, at least doubling so that growth costs O(1) per token."""
        if self.native_length and length > self.native_length:
            raise ValueError(
                f"the rope type of this model changes all keys beyond {self.native_length} tokens, so a cache cannot "
                f"hold {length}; limit prompt + response to {self.native_length} tokens."
            )
        if length > (capacity := self.keys.shape[3]):
            extra = max(length, capacity * 5 // 4, 32) - capacity
            self.keys = F.pad(self.keys, (0, 0, 0, extra))
            self.values = F.pad(self.values, (0, 0, 0, extra))

    @torch.no_grad()
    def prefill(self, slots: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Attend:
        """Packed causal attention that also stores segment i at positions 0.. of slot slots[i]."""
        self._reserve(max_seqlen)
        # A masked position still enters softmax(..) @ values with weight 0, and 0 * NaN is NaN: leave nothing behind.
        self.keys[:, slots] = 0
        self.values[:, slots] = 0
        total = int(cu_seqlens[-1])
        row = torch.repeat_interleave(slots, cu_seqlens.diff(), output_size=total)
        column = segment_positions(cu_seqlens, total)
        packed = packed_attention(cu_seqlens, max_seqlen)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer][row, :, column] = k
            self.values[layer][row, :, column] = v
            return packed(layer, q, k, v)

        return attend

    @torch.no_grad()
    def copy(self, source: int, slots: Tensor, length: int) -> None:
        """Give every slot of `slots` (B,) the first `length` positions of slot `source`, and nothing else."""
        for store in (self.keys, self.values):
            store[:, slots, :, :length] = store[:, source, None, :, :length]
            store[:, slots, :, length:] = 0

    @torch.no_grad()
    def decode(self, slots: Tensor, lengths: Tensor) -> Attend:
        """One token per row: row i is stored at position lengths[i] of slot slots[i] and sees positions 0..lengths[i]."""
        longest = int(lengths.max()) + 1
        self._reserve(longest)
        _, _, kv_heads, capacity, size = self.keys.shape
        # Rows of slots that lie side by side are read in one stream; a gap after each halves the speed on a CPU.
        seen = capacity if 2 * longest > capacity else longest
        heads = (slots[:, None] * kv_heads + torch.arange(kv_heads, device=slots.device)).flatten()
        length = lengths.repeat_interleave(kv_heads)
        cell = heads * capacity + length  # of the new token in a layer seen as (slots * kv_heads * capacity, d)
        first = int(heads[0])
        run = torch.equal(heads, torch.arange(first, first + len(heads), device=heads.device))
        mask = torch.zeros(len(heads), 1, seen, device=lengths.device)
        mask.masked_fill_((torch.arange(seen, device=lengths.device) > length[:, None])[:, None], -torch.inf)

        def store(cache: Tensor, new: Tensor) -> Tensor:
            """Write one token per row, return (B * KV, seen, d): a view of a run of slots, a copy of other subsets."""
            cache.view(-1, size).index_copy_(0, cell, new.reshape(-1, size))
            cache = cache.flatten(0, 1)[:, :seen]
            return cache[first : first + len(heads)] if run else cache.index_select(0, heads)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = store(self.keys[layer], k), store(self.values[layer], v)
            rows = q.reshape(len(heads), -1, size)  # the query heads of one kv head become rows: no repeated keys
            scores = torch.add(mask, torch.bmm(rows, keys.mT).float(), alpha=size**-0.5)
            return torch.bmm(scores.softmax(-1).to(q.dtype), values).view(q.shape)

        return attend


# ---- Hugging Face checkpoints


def check_config(config: PretrainedConfig) -> None:
    """Raise ValueError, in one sentence, for a model this file would compute wrongly."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not supported; use one of {', '.join(FAMILIES)}.")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "sliding_window", None) and "sliding_attention" in layer_types:
        raise ValueError("sliding-window attention is not supported; use a checkpoint with use_sliding_window: false.")


def local_folder(path: str | Path) -> Path:
    """Directory of a checkpoint: `path` itself, or the local snapshot of the hub model of that name."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"{path} is neither a local directory nor a hub model that can be read: {reason}") from error


def load_config(folder: Path) -> PretrainedConfig:
    """The checked configuration of a checkpoint directory; never runs code from the checkpoint."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no config.json; pass the directory of a Hugging Face checkpoint.")
    model_type = json.loads(file.read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{file}: model_type {model_type!r} is not supported; use one of {', '.join(FAMILIES)}.")
    config = FAMILIES[model_type].from_pretrained(folder)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def load_hf_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in a checkpoint directory, one at a time."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if not files[0].exists() and index.exists():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing; a checkpoint needs model.safetensors or all shards of its index.")
        try:
            with safe_open(file, "pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is not a complete safetensors file ({error}); copy it again.") from error


def load_weights(
    module: nn.Module, folder: Path, dtype: torch.dtype, ignore: tuple[str, ...] = (), fresh: tuple[str, ...] = ()
) -> None:
    """Fill the parameters of `module` from a checkpoint directory, stored in `dtype`; every name must match.

    ignore: names in the files that the module does not have. fresh: names the files do not have.
    """
    expected = {name: p.shape for name, p in module.named_parameters() if name not in fresh}
    loaded = {}
    for name, tensor in load_hf_tensors(folder):
        if name in ignore or name.endswith("rotary_emb.inv_freq"):
            continue
        if tensor.shape != expected.get(name, tensor.shape):
            raise ValueError(f"{folder}: {name} has shape {tuple(tensor.shape)}, its config.json asks for {tuple(expected[name])}.")
        loaded[name] = tensor.to(dtype, copy=True)
    missing, surplus = sorted(expected.keys() - loaded.keys()), sorted(loaded.keys() - expected.keys())
    if missing or surplus:
        raise ValueError(f"{folder} does not hold the weights its config.json describes: missing {missing[:5]}, surplus {surplus[:5]}.")
    module.load_state_dict(loaded, strict=False, assign=True)
