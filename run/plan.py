"""The memory of one GPU, computed from shapes alone before anything is allocated.

    python train.py --plan --config recipes/justrl2-minicpm5-2b-128k.yaml --gpu-memory-gb 80

Every line is a number of elements times the bytes of one. What a layer holds was counted on the
operations that model.py runs; tests/test_plan.py counts them again, at full size without a GPU and
in a whole small run, and docs/performance.md explains how to read the table.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from transformers import PretrainedConfig

import distributed
from algorithms import ALGORITHMS
from config import Config, flag
from model import Layer, Transformer, head_size, load_config
from sampler.engine import PREFILL_CHUNK_TOKENS
from sampler.kvcache import GPU_SHARE, bytes_per_token

GB = 1e9  # as in "80 GB"; torch's own report for such a card is 85 of these
FLOAT = 4  # bytes of a float32 number
LOGITS_AT_ONCE = 2**30  # bytes of dlogits that kernels/ holds at a time
CUDA_CONTEXT = 1.0e9  # bytes of CUDA, NCCL and cuBLAS: an allowance, not counted
TIGHT = 0.9  # share of the memory above which fragmentation may make the difference
Parts = dict[str, float]  # name -> bytes


@dataclass
class Plan:
    """`moments`: bytes of every part on one GPU at each moment of a step; `memory`: bytes that it
    has. `host`: most bytes that --offload keeps on the host, for all GPUs together.
    """

    moments: dict[str, Parts]
    memory: float
    host: float = 0.0

    def total(self, moment: str) -> float:
        """Bytes at one moment. A layer and the head never work at once, so the larger counts."""
        parts = self.moments[moment]
        return sum(parts.values()) - min(parts["layer at work"], parts["head at work"])

    @property
    def peak(self) -> str:
        """The moment that needs most."""
        return max(self.moments, key=self.total)

    @property
    def fits(self) -> bool:
        return self.total(self.peak) <= self.memory

    def table(self) -> str:
        """One row per part, one column per moment, in GB."""
        names = {name: None for parts in self.moments.values() for name in parts}  # in order
        numbers = {n: [p.get(n, 0.0) for p in self.moments.values()] for n in names}
        numbers = {name: row for name, row in numbers.items() if any(row)}
        numbers["total"] = [self.total(moment) for moment in self.moments]
        rows = [("GB per GPU", list(self.moments))]
        for name, row in numbers.items():
            rows.append((name, [f"{x / GB:.2f}" if x else "-" for x in row]))
        return "\n".join(f"{name:<24}" + "".join(f"{x:>17}" for x in row) for name, row in rows)

    def verdict(self) -> str:
        """One line: the largest total and the memory."""
        share = self.total(self.peak) / self.memory
        word = "fits" if share <= TIGHT else "fits, but tightly" if share <= 1 else "does not fit"
        return (
            f"{self.total(self.peak) / GB:.1f} GB of {self.memory / GB:.0f} at {self.peak}: {word}"
        )


# ---- the parts


def make_plan(model: PretrainedConfig, config: Config, memory: float) -> Plan:
    """The plan of a resolved configuration for a model of this shape on GPUs of `memory` bytes."""
    e = bytes_per_activation(config)
    policy, decoder, layer = parameters(model)
    critic = decoder + model.hidden_size + 1 if ALGORITHMS[config.algorithm].critic else 0
    # Weights and optimizer moments: AdamW has two moments per weight, Muon one for its matrices.
    matrices = layer_matrices(model) if config.optimizer == "muon" else 0
    sizes = {"policy": (policy, 2 * policy - matrices)}
    if critic:
        sizes["critic"] = critic, 2 * critic - matrices
    shared = {
        "sampler copy": policy * e,
        "reference copy": policy * e if config.kl_coef else 0,
        "other": CUDA_CONTEXT,
    }
    sampling = {"KV cache": 0.0} | rollout_parts(model, config, e)
    moments = {"rollout": states(sizes, config, "") | sampling | shared}
    shared["other"] += step_scalars(config, bool(critic))
    if config.async_steps:  # the next rollout runs while this step trains
        shared["concurrent rollout"] = max(sampling["layer at work"], sampling["head at work"])
    for name in reversed(sizes):  # the critic before the policy, as in a step
        work = training_parts(model, config, e, layer, is_policy=name == "policy")
        moments[f"{name} backward"] = states(sizes, config, name) | work | shared
        # While it steps, torch's AdamW holds the square root of one moment of all its parameters.
        roots = (sizes[name][0] - matrices) / config.nproc * FLOAT
        step = {"layer at work": roots, "head at work": 0}
        moments[f"{name} step"] = states(sizes, config, name, stepping=True) | step | shared
    plan = Plan(moments, memory, host_bytes(sizes, config))
    # With async steps the cache is there at every moment, so the tightest one decides.
    free = memory - plan.total(plan.peak if config.async_steps else "rollout")
    moments["rollout"]["KV cache"] = cache_bytes(model, config, e, free)
    for parts in list(moments.values())[1:] if config.async_steps else []:
        parts["concurrent rollout"] += moments["rollout"]["KV cache"]
    return plan


def bytes_per_activation(config: Config) -> int:
    """Bytes of one number in the compute dtype: `e` in this file."""
    return 4 if config.dtype == "float32" else 2


def parameters(model: PretrainedConfig) -> tuple[int, int, int]:
    """Numbers of parameters: language model, its decoder without the head, one layer."""
    with torch.device("meta"):
        whole = Transformer(model)
    parts = (whole, whole.model, whole.model.layers[0])
    return tuple(sum(p.numel() for p in part.parameters()) for part in parts)


def layer_matrices(model: PretrainedConfig) -> int:
    """Number of parameters that --optimizer muon gives to Muon, in each of the two models."""
    with torch.device("meta"):
        layer = Layer(model)
    return model.num_hidden_layers * sum(p.numel() for p in layer.parameters() if p.ndim == 2)


def states(
    sizes: dict[str, tuple[int, int]], config: Config, working: str, stepping: bool = False
) -> Parts:
    """Float32 masters, gradients and moments of both models, sharded over the GPUs.

    Only the model `working` has gradients. --offload optimizer keeps moments on the host except
    during the optimizer step; --offload idle also keeps there the weights of the other model.
    """
    parts = {}
    for name, (size, moments) in sizes.items():
        mine, at_work = size / config.nproc, name == working
        weights_here = at_work or config.offload != "idle"
        moments_here = (at_work and stepping) or config.offload == "none"
        parts[f"{name} weights"] = mine * FLOAT * weights_here
        parts[f"{name} gradients"] = mine * FLOAT * at_work
        parts[f"{name} optimizer"] = moments / config.nproc * FLOAT * moments_here
    return parts


def host_bytes(sizes: dict[str, tuple[int, int]], config: Config) -> float:
    """Bytes that --offload keeps on the host for all GPUs at most: during a rollout, when neither
    model is at work.
    """
    without = sum(states(sizes, replace(config, offload="none"), "").values())
    return config.nproc * (without - sum(states(sizes, config, "").values()))


def cache_tokens(model: PretrainedConfig, config: Config, memory: float) -> int:
    """The plan's KV cache in tokens. A sampler that runs during an update needs this bound, because
    what is free when it starts is not what will be.
    """
    bytes_ = make_plan(model, config, memory).moments["rollout"]["KV cache"]
    return int(bytes_ / bytes_per_token(model, bytes_per_activation(config)))


def cache_bytes(model: PretrainedConfig, config: Config, e: int, free: float) -> float:
    """Most bytes that keys and values take: --kv-cache-tokens, or the sampler's share of the `free`
    bytes but at least one longest sequence; never more than all slots can fill.
    """
    token = bytes_per_token(model, e)
    bound = config.kv_cache_tokens * token or max(GPU_SHARE * free, longest(config) * token)
    return min(bound, config.slots * longest(config) * token)


def rollout_parts(model: PretrainedConfig, config: Config, e: int) -> Parts:
    """One forward over pieces of prompts, the logits of one decoding step."""
    hidden, inner = model.hidden_size, model.intermediate_size
    prefill = min(PREFILL_CHUNK_TOKENS, config.slots * longest(config))
    return {
        # Without a gradient a layer holds three rows of each width at most.
        "layer at work": prefill * 3 * e * (hidden + inner),
        # In float32 logits, log-probs and probabilities; in float64 probabilities and their sums.
        "head at work": config.slots * model.vocab_size * (3 * FLOAT + 2 * 8),
    }


def training_parts(
    model: PretrainedConfig, config: Config, e: int, layer: int, is_policy: bool
) -> Parts:
    """Weights gathered for use, activations, and the larger of one layer and the head at work.

    `layer`: parameters of one layer.
    """
    tokens, layers, hidden = micro_batch_tokens(config), model.num_hidden_layers, model.hidden_size
    embedding = model.vocab_size * hidden
    saved, working = layer_bytes(model, config, e)
    kept = e * hidden if config.activation_checkpointing else saved
    # The last hidden state: its norm, the rows of it that the head reads, and their gradient.
    head = tokens * norm_bytes(hidden, e) + 2 * tokens * e * hidden
    if is_policy:
        head += min(LOGITS_AT_ONCE, tokens * model.vocab_size * (2 if e == 2 else 8))
        head += embedding * (FLOAT + (e if e < FLOAT else 0))  # its gradient; its rounded weights
    if config.nproc > 1:
        # The root in float32, the gradient of the output matrix; two layers, one's gradient.
        root = embedding * (2 if is_policy and not model.tie_word_embeddings else 1)
        gathered = (root + embedding * is_policy) * FLOAT + layer * (3 * e + FLOAT)
    else:
        cast = layer if config.activation_checkpointing else layer * layers
        gathered = cast * e if e < FLOAT else 0
    return {
        "gathered weights": gathered,
        "activation checkpoints": layers * tokens * kept + tokens * rotary_bytes(model),
        "layer at work": tokens * (working - (0 if config.activation_checkpointing else saved)),
        "head at work": head,
    }


def norm_bytes(hidden: int, e: int) -> int:
    """Bytes that one RMSNorm saves per token: input and normalised input in float32, output."""
    return hidden * (2 * FLOAT + e)


def rotary_bytes(model: PretrainedConfig) -> int:
    """Bytes of cosine and sine of one position, float32; all layers share them."""
    return 2 * head_size(model) * FLOAT


def layer_bytes(model: PretrainedConfig, config: Config, e: int) -> tuple[float, float]:
    """Bytes per token that one layer saves for its backward, and the most it holds during it."""
    hidden, inner, d = model.hidden_size, model.intermediate_size, head_size(model)
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    norm = norm_bytes(hidden, e)
    # q and k after rotation, v, the result, one logsumexp per head
    attention = e * d * (2 * heads + 2 * kv_heads) + FLOAT * heads
    # Backward through a norm: two saved and four temporary rows in float32, two gradients.
    norm_backward = hidden * (6 * FLOAT + 2 * e)
    if model.model_type == "qwen3":  # norms of q and k, whose backward comes while all that exists
        attention += 2 * FLOAT * d * (heads + kv_heads)
        norm_backward = norm + attention + 2 * e * hidden + 4 * FLOAT * d * heads
    chunk = config.mlp_chunk_tokens
    if not chunk:
        # gate, up, silu(gate), their product; backward frees the product and adds three gradients
        saved = 2 * norm + attention + 4 * e * inner
        return saved, max(saved + 2 * e * inner + e * hidden, norm_backward)
    share = min(1.0, chunk / micro_batch_tokens(config))
    saved = norm + attention + e * hidden  # the chunks' inputs; the rest is recomputed
    working = saved + 2 * e * hidden + share * (norm + 6 * e * inner)
    return saved, max(working, norm_backward)


def longest(config: Config) -> int:
    """Tokens of the longest sequence."""
    return config.max_prompt_tokens + config.max_response_tokens


def micro_batch_tokens(config: Config) -> int:
    """Tokens of the largest micro-batch: a sequence above the budget travels alone."""
    step = config.prompts_per_step * config.group_size * longest(config)
    return max(longest(config), min(config.max_tokens_per_micro_batch, step))


def step_scalars(config: Config, critic: bool) -> float:
    """Bytes of the (N, T) tensors of a step, which every rank holds whole.

    A mask; behaviour and old log-probs, entropy, two rewards, advantages and importance weights;
    with a critic values and returns; all but the mask float32.
    """
    cells = config.prompts_per_step * config.group_size * config.max_response_tokens
    return cells * (1 + FLOAT * (9 if critic else 7))


# ---- the command


def read_shape(path: str) -> PretrainedConfig:
    """The configuration of a directory or of a hub model; of the latter nothing else is fetched."""
    if Path(path).is_dir():
        return load_config(Path(path))
    try:
        return load_config(Path(hf_hub_download(path, "config.json")).parent)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"the config.json of {path} is out of reach ({type(error).__name__}); write one into a "
            "directory and pass that as --model."
        ) from error


def gpu_memory(config: Config) -> float:
    """Bytes of one GPU: as configured, else of the first one here, else 80 GB."""
    if config.gpu_memory_gb:
        return config.gpu_memory_gb * GB
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return 80 * GB


def machine_memory(device: torch.device, nproc: int) -> float:
    """Bytes of this GPU; on a CPU one of `nproc` equal shares of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return distributed.host_memory() / nproc


def concern(
    model: PretrainedConfig, config: Config, device: torch.device, ranks: int, here: int
) -> str:
    """A sentence if this machine has too little memory by plan, else "". Nothing is refused: a plan
    is not a measurement. ranks: how many there are in all (torchrun may have started them), `here`
    of them on this machine.
    """
    config = replace(config, nproc=ranks)
    plan = make_plan(model, config, machine_memory(device, here))
    if not plan.fits:
        command = f"--plan --device {device.type} --gpu-memory-gb {plan.memory / GB:.3g}"
        return f"by plan {plan.verdict()}; {command} shows where it goes and what to change."
    host, available = plan.host * here / ranks, distributed.host_memory()
    if host > available:
        return (
            f"--offload {config.offload} keeps {host / GB:.1f} GB on the host, which has "
            f"{available / GB:.0f}; --plan shows the rest."
        )
    return ""


def next_change(config: Config, moment: str) -> dict:
    """The cheapest change, as fields and values, that lowers the need at this moment and has not
    been made yet; {}: none is left.
    """
    cached = config.kv_cache_tokens
    if (moment == "rollout" or config.async_steps) and cached > longest(config):
        return {"kv_cache_tokens": max(longest(config), cached // 2)}
    if moment.endswith("backward"):
        if micro_batch_tokens(config) > longest(config):
            return {"max_tokens_per_micro_batch": longest(config)}
        if not config.activation_checkpointing:
            return {"activation_checkpointing": True}
        if not config.mlp_chunk_tokens:
            return {"mlp_chunk_tokens": 16384}
    if config.offload != "idle":
        stronger = moment.endswith("backward") and config.offload == "none"
        return {"offload": "optimizer" if stronger else "idle"}
    # One sequence is never split over GPUs, so the last resort is a shorter one.
    if config.max_response_tokens < 2:
        return {}
    shorter = {"max_response_tokens": config.max_response_tokens // 2}
    if config.overlong_buffer_tokens:
        shorter["overlong_buffer_tokens"] = config.overlong_buffer_tokens // 2
    return shorter


def advice(model: PretrainedConfig, config: Config, memory: float) -> str:
    """Changes under which the run fits, as the rest of a sentence."""
    changes: dict = {}
    plan = make_plan(model, config, memory)
    while not plan.fits:
        change = next_change(config, plan.peak)
        if not change:
            return "use more GPUs (--nproc) or a smaller model"
        changes |= change
        config = replace(config, **change)
        plan = make_plan(model, config, memory)
    flags = " ".join(f"{flag(name)} {value}" for name, value in changes.items())
    return f"set {flags}, which needs {plan.total(plan.peak) / GB:.1f} GB"


def run(config: Config) -> None:
    """Print the plan; SystemExit with a sentence if it cannot fit."""
    if config.dtype == "auto":
        config = replace(config, dtype="float32" if config.device == "cpu" else "bfloat16")
    model, memory = read_shape(config.model), gpu_memory(config)
    plan = make_plan(model, config, memory)
    policy, decoder, _ = parameters(model)
    print(
        f"{config.model}: {policy / 1e9:.3f} B parameters, {decoder / 1e9:.3f} B without the head\n"
        f"{config.algorithm} on {config.nproc} GPU(s), micro-batches of at most "
        f"{micro_batch_tokens(config)} tokens\n\n{plan.table()}\n\n{plan.verdict()}"
    )
    if plan.host:
        print(f"--offload {config.offload} keeps up to {plan.host / GB:.1f} GB on the host")
    if not plan.fits:
        raise SystemExit(f"error: this does not fit; {advice(model, config, memory)}.")
