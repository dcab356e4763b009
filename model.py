"""Llama, Qwen2 and Qwen3 decoders (SmolLM2 and MiniCPM5 are Llama) on packed tokens.

Parameter names are the Hugging Face names, so a checkpoint is read and written without a key map.
The decoder does not know how tokens attend to each other: the caller hands it an `attend` function,
packed causal attention for training or a view of a KV cache (sampler/kvcache.py) for sampling.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
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

from kernels import cpu_linear, logprob_entropy
from kernels.attention import Attend, sdpa, varlen_kernel

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


class Linear(nn.Linear):
    """Linear map computed in the dtype of its input, whatever dtype the weights are stored in.

    `reordered`: a copy of the weights that a CPU reads faster (see `reordered_weights`), or None.
    """

    # A plain attribute, not a buffer: state_dict never sees the copy.
    reordered: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.reordered is not None:
            return cpu_linear.linear(x, self.reordered, self.bias)
        # float32 masters with bf16 activations, without autocast: the cast is here and nowhere else
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in at least float32, returned in x's dtype.

    The weight is rounded to x's dtype first. The sampler's copy of it is, and so is the one that
    FSDP2 gathers in bfloat16; a trainer in one process must compute what they compute.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # float32 at least, float64 stays: a mean of squares in bfloat16 has 8 bits.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(x.dtype).to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(x.dtype)


class Rotary:
    """Rotary embedding (arXiv:2104.09864), for every rope type that `transformers` knows.

    Neither a module nor a buffer: `model.to(torch.bfloat16)` must never round the frequencies.
    `native_length`: longest sequence whose frequencies do not depend on its length; None: no limit.
    """

    def __init__(self, config: PretrainedConfig):
        self.config, self.rope, self.head_size = config, config.rope_parameters, head_size(config)
        self.type = self.rope["rope_type"]
        if self.type not in ("default", *ROPE_INIT_FUNCTIONS):
            known = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise ValueError(f"rope_type {self.type!r} is not supported; use one of {known}.")
        # Only these two types change all frequencies with the length of a sequence.
        self.native_length = {
            "dynamic": config.max_position_embeddings,
            "longrope": self.rope.get("original_max_position_embeddings"),
        }.get(self.type)
        self.frequencies, self.scaling = self._frequencies()
        if 2 * len(self.frequencies) != self.head_size:
            raise ValueError("partial_rotary_factor below 1 is not supported; use another model.")

    def _frequencies(self, length: int | None = None) -> tuple[Tensor, float]:
        """Angles per position (d/2,), and the factor on cos and sin, for `length` tokens."""
        with torch.device("cpu"):  # the model itself may be under construction on the meta device
            # float32: a frequency rounded to bfloat16 is off by whole turns at position 100,000.
            if self.type == "default":
                exponents = torch.arange(0, self.head_size, 2).float() / self.head_size
                return 1.0 / self.rope["rope_theta"] ** exponents, 1.0
            # A tensor, because transformers then computes in float32; a Python int would differ.
            seq_len = None if length is None else torch.tensor(length)
            return ROPE_INIT_FUNCTIONS[self.type](self.config, "cpu", seq_len=seq_len)

    def _frequencies_by_segment(self, positions: Tensor) -> Tensor:
        """Frequencies per token (M, d/2) where each packed segment has those of its own length."""
        # A segment begins where the position falls back to 0.
        starts = (positions == 0).nonzero().flatten().tolist() + [len(positions)]
        lengths = [end - start for start, end in pairwise(starts)]
        rows = [self._frequencies(n)[0].expand(n, -1) for n in lengths]
        return torch.cat(rows).to(positions.device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (M,) -> cos, sin (M, 1, d) float32, the first half of sin negated."""
        # Kept where it was moved to, so that later steps copy nothing to the device.
        self.frequencies = frequencies = self.frequencies.to(positions.device)
        # max() waits for the device; other rope types never get this far.
        if self.native_length and positions.max() >= self.native_length:
            frequencies = self._frequencies_by_segment(positions)
        angle = (positions[:, None].float() * frequencies)[:, None]
        cos, sin = angle.cos() * self.scaling, angle.sin() * self.scaling
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


class Attention(nn.Module):
    """Projections, q/k norm (Qwen3) and rotary embedding; the attention itself is `attend`."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        size, d = config.hidden_size, head_size(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        # Qwen2 has no attention_bias field: q, k and v have a bias, o has none.
        qwen2 = config.model_type == "qwen2"
        bias = qwen2 or config.attention_bias
        self.q_proj = Linear(size, heads * d, bias=bias)
        self.k_proj = Linear(size, kv_heads * d, bias=bias)
        self.v_proj = Linear(size, kv_heads * d, bias=bias)
        self.o_proj = Linear(heads * d, size, bias=bias and not qwen2)
        # Of the three families only Qwen3 normalises q and k, each head by itself.
        qk_norm = config.model_type == "qwen3"
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if qk_norm else nn.Identity()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        # q and k are rotated together: decoding a small model is bound by the number of operations.
        qk = torch.cat([q, k], 1).float()
        # Rotation of halves: x cos + swap(x) sin, with the minus sign already in sin.
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin).to(x.dtype)
        q, k = qk.split([self.heads, self.kv_heads], 1)
        return self.o_proj(attend(q, k, v).flatten(1))


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)  # only Llama has this field
        self.gate_proj = Linear(size, inner, bias=bias)
        self.up_proj = Linear(size, inner, bias=bias)
        self.down_proj = Linear(inner, size, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer block.

    `mlp_chunk_tokens`: how many tokens go through the feed-forward half at a time (0: all). Each
    chunk is recomputed in backward, so the wide inner activations of a whole long sequence never
    exist at once.
    """

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # In tokens. Nothing mixes tokens here, so chunks change memory and not the result.
        self.mlp_chunk_tokens = 0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        if not self.mlp_chunk_tokens:
            return x + self._feed_forward(x)
        chunks = x.split(self.mlp_chunk_tokens)
        return x + torch.cat(
            [checkpoint(self._feed_forward, chunk, use_reentrant=False) for chunk in chunks]
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: the backbone of the policy and of the critic.

    `compute_dtype`: of the activations. `gradient_checkpointing`: recompute layers in backward.
    """

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        if config.model_type not in FAMILIES:
            raise ValueError(unsupported(config.model_type))
        if getattr(config, "sliding_window", None) and "sliding_attention" in config.layer_types:
            raise ValueError("sliding-window attention is not supported; use another model.")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.compute_dtype = compute_dtype
        self.gradient_checkpointing = False

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids (M,), positions (M,) -> hidden states (M, D) in `compute_dtype`."""
        x = self.embed_tokens(input_ids).to(self.compute_dtype)
        # Once for all layers.
        cos, sin = self.rotary(positions)
        for i, layer in enumerate(self.layers):
            # Without gradients there is no backward that would recompute anything.
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, partial(attend, i), use_reentrant=False)
            else:
                x = layer(x, cos, sin, partial(attend, i))
        return self.norm(x)


class Transformer(nn.Module):
    """Causal language model: `.model` (Decoder) and `.lm_head` (absent when tied)."""

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.model = Decoder(config, compute_dtype)
        # Tied: a second name for one matrix would be saved a second time.
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generation_config: str | None = None  # JSON text, saved as it was loaded
        # What the head's operands are rounded to; logits accumulate in float32 in any case.
        self.head_dtype = compute_dtype
        self.vocab_size = config.vocab_size
        self.reordered_head: Tensor | None = None

    @property
    def head_weight(self) -> Tensor:
        """Output matrix (V, D) in its storage dtype."""
        weight = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        # Sliced only if need be: the gradient of a slice costs a matrix of zeros.
        full = self.vocab_size == self.config.vocab_size
        return weight.weight if full else weight.weight[: self.vocab_size]

    def restrict_vocabulary(self, tokens: int) -> None:
        """Give probability only to the tokenizer's ids: matrices are often padded beyond them
        (Qwen3: 151,936 rows, 151,669 tokens), and a padded id can be sampled but never decoded.
        """
        # The rows stay in the matrix, so a checkpoint keeps the shape that others expect.
        self.vocab_size = min(tokens, self.config.vocab_size)

    def set_head_dtype(self, dtype: torch.dtype) -> None:
        """Compute the head in `dtype`; weights stored in fewer bits are converted to it."""
        self.head_dtype = dtype
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        # Promoted, never lowered: float32 masters stay float32 under a bfloat16 head.
        head.to(torch.promote_types(head.weight.dtype, dtype))

    @contextmanager
    def reordered_weights(self) -> Iterator[None]:
        """Inside, matrices on a CPU have a second copy, in the layout it reads fastest
        (kernels/cpu_linear.py); no-op on a GPU. The weights must not change meanwhile: the copies
        would not follow.
        """
        if self.head_weight.is_cuda or not torch.backends.mkldnn.is_available():
            yield
            return
        linears = [m for m in self.model.modules() if isinstance(m, Linear)]
        try:
            for m in linears:
                # Stored in another dtype than it computes in, a matrix is cast in every forward.
                if m.weight.dtype == self.model.compute_dtype:
                    m.reordered = cpu_linear.reorder(m.weight)
            # As `logits` multiplies it: rounded to head_dtype, in float32.
            self.reordered_head = cpu_linear.reorder(self.head_weight.to(self.head_dtype).float())
            yield
        finally:
            # Also after a failure: stale copies would survive the next update.
            self.reordered_head = None
            for m in linears:
                m.reordered = None

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        action_index: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy (A,), float32, of action `targets[a]` after token `action_index[a]`.

        input_ids (M,): S sequences, one after another. cu_seqlens (S+1,) int32: their boundaries.
        action_index, targets (A,) int64.
        """
        positions = segment_positions(cu_seqlens, len(input_ids))
        attend = packed_attention(cu_seqlens, int(cu_seqlens.diff().max()))
        hidden = self.model(input_ids, positions, attend)
        # Indexed before the head: prompt tokens never cost a row of V logits.
        hidden = hidden[action_index].to(self.head_dtype)
        return logprob_entropy(hidden, self.head_weight, targets, temperature=temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) -> logits (..., V) in float32, never rounded to bf16 on the way."""
        hidden = hidden.to(self.head_dtype)
        if self.reordered_head is not None:
            return cpu_linear.linear(hidden.float(), self.reordered_head)
        weight = self.head_weight.to(self.head_dtype)
        # 16-bit operands, float32 sums: no float32 copy of the head on the GPU.
        if hidden.is_cuda and hidden.dtype != torch.float32:
            rows = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32)
            return rows.unflatten(0, hidden.shape[:-1])
        # Rounded to head_dtype first, then widened: the same operands as on a GPU.
        return F.linear(hidden.float(), weight.float())

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> "Transformer":
        """Load a directory or hub model onto the CPU, weights in `dtype`.

        compute_dtype: of the activations, default `dtype`. Raises as `load_config`, `load_weights`.
        """
        folder = local_folder(path)
        # meta: no memory and no random initialisation for weights that are loaded anyway.
        with torch.device("meta"):
            model = cls(load_config(folder), compute_dtype or dtype)
        # A tied checkpoint may contain the head too, as a copy of the embedding.
        tied = model.config.tie_word_embeddings
        load_weights(model, folder, dtype, ignore=("lm_head.weight",) if tied else ())
        file = folder / "generation_config.json"
        model.generation_config = file.read_text() if file.exists() else None
        return model

    def save_pretrained(
        self, path: str | Path, dtype: torch.dtype | None = None, state_dict: dict | None = None
    ) -> None:
        """Write a directory that `transformers` and vLLM load, weights in `dtype` (default: as is).

        state_dict: the whole weights, where this module holds only shards of them.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        # Not of `head_weight`, which may be a slice: slicing shards is a collective, which
        # would hang here because only rank 0 saves.
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        dtype = dtype or head.weight.dtype
        weights = (state_dict or self.state_dict()).items()
        weights = {name: w.detach().to("cpu", dtype) for name, w in weights}
        save_torch_state_dict(weights, folder, max_shard_size="4GB")
        save_config(self.config, folder, dtype)
        if self.generation_config:
            (folder / "generation_config.json").write_text(self.generation_config)


def limit_threads(model: nn.Module, device: torch.device) -> None:
    """One CPU thread for a small model: a second one gains nothing, and next to a busy process it
    makes a step ten times slower.
    """
    if device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 10_000_000:
        torch.set_num_threads(1)


# ---- attention over packed tokens


def segment_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position (M,) of every packed token within its own segment."""
    # output_size: without it the host would wait for a GPU to tell the sum.
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=total)
    return torch.arange(total, device=cu_seqlens.device) - starts


def packed_attention(cu_seqlens: Tensor, max_seqlen: int) -> Attend:
    """Causal self-attention within each segment of a packed batch; cu_seqlens (S+1,) int32."""
    # On the host once, not in every layer.
    lengths = cu_seqlens.diff().tolist()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_cuda and q.dtype != torch.float32 and (kernel := varlen_kernel()):
            return kernel(q, k, v, cu_seqlens, max_seqlen)
        # One call per segment, nothing padded. Given three dimensions SDPA is up to 8x slower.
        q, k, v = (x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v))
        # SDPA wants (1, H, tokens, d), the packed layout is (tokens, H, d).
        out = [sdpa(*part, is_causal=True) for part in zip(q, k, v, strict=True)]
        return torch.cat(out, 2)[0].transpose(0, 1)

    return attend


# ---- Hugging Face checkpoints


def unsupported(model_type: str | None) -> str:
    """The message for a model that this file would compute wrongly."""
    return f"model_type {model_type!r} is not supported; use one of {', '.join(FAMILIES)}."


def head_size(config: PretrainedConfig) -> int:
    """Size d of one attention head; Qwen2 configurations do not state it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def local_folder(path: str | Path) -> Path:
    """Directory of a checkpoint: `path` itself, or the downloaded hub model of that name."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(str(path), allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path} is neither a directory nor a reachable hub model ({type(error).__name__}); "
            "pass the directory of a Hugging Face checkpoint."
        ) from error


def load_config(folder: Path) -> PretrainedConfig:
    """The configuration of a checkpoint directory; never runs code from the checkpoint."""
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no config.json; pass a Hugging Face checkpoint.")
    try:
        model_type = json.loads(file.read_text()).get("model_type")
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); copy it again.") from error
    # A likely slip: the folder of a run, whose config.json has no model_type.
    if model_type is None and (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} is a run; pass the policy of a checkpoint, checkpoints/step_N/policy in it."
        )
    if model_type not in FAMILIES:
        raise ValueError(f"{file}: {unsupported(model_type)}")
    return FAMILIES[model_type].from_pretrained(folder)


def save_config(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, readable by transformers 4 and 5 and by vLLM."""
    # The model keeps its own: only the file gets another dtype and architecture.
    config = copy.deepcopy(config)
    config.dtype = dtype
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    # transformers 4 ignores rope_parameters: every model would silently run with theta 10000.
    fields["rope_theta"] = config.rope_parameters["rope_theta"]
    if config.rope_parameters["rope_type"] != "default":
        fields["rope_scaling"] = config.rope_parameters
    file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def load_hf_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in a checkpoint directory, one at a time."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    # A single file wins: the index may be left from an earlier, sharded save.
    if not files[0].exists() and index.exists():
        shards = json.loads(index.read_text())["weight_map"].values()
        files = [folder / shard for shard in sorted(set(shards))]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"{file} is missing; a checkpoint is model.safetensors or all shards of its index."
            )
        try:
            with safe_open(file, "pt") as tensors:
                # A generator: source and converted copy exist together for one tensor only.
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); copy it again.") from error


def load_weights(
    module: nn.Module,
    folder: Path,
    dtype: torch.dtype,
    ignore: tuple[str, ...] = (),
    fresh: tuple[str, ...] = (),
) -> None:
    """Fill `module` (on any device, meta too) with the weights of a checkpoint, stored in `dtype`.

    Raises ValueError unless names and shapes agree, apart from `ignore`, names in the files that
    are skipped, and `fresh`, parameters that the files do not have.
    """
    expected = {name: p.shape for name, p in module.named_parameters() if name not in fresh}
    loaded = {}
    for name, tensor in load_hf_tensors(folder):
        # inv_freq: a buffer that old checkpoints hold; Rotary computes it.
        if name in ignore or name.endswith("rotary_emb.inv_freq"):
            continue
        if tensor.shape != expected.get(name, tensor.shape):
            raise ValueError(
                f"{folder}: {name} has shape {tuple(tensor.shape)}, but config.json describes "
                f"{tuple(expected[name])}; weights and config.json belong to different models."
            )
        # copy: a view of the mapped file would change when a later save overwrites it.
        loaded[name] = tensor.to(dtype, copy=True)
    missing, surplus = expected.keys() - loaded.keys(), loaded.keys() - expected.keys()
    if missing or surplus:
        raise ValueError(
            f"{folder}: the weights are not those of the model config.json describes; "
            f"missing {sorted(missing)[:4]}, not expected {sorted(surplus)[:4]}."
        )
    # assign, because parameters on the meta device have no memory to copy into.
    # strict would refuse `fresh`; the names were compared above.
    module.load_state_dict(loaded, strict=False, assign=True)
