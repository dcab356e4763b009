"""Every knob of a run: one dataclass whose fields are the command line flags and the keys of a
recipe.

    python train.py --config recipes/x.yaml --lr 2e-6     flags win over the recipe, the recipe over the defaults

A field left at None takes the default of the chosen algorithm's row in `losses.ALGORITHMS`. The
other defaults run the embedded tiny model on a laptop CPU; the paper's values are in
recipes/justrl2-minicpm5-2b-128k.yaml.
"""

import argparse
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

ROOT = Path(__file__).parent


class ConfigError(ValueError):
    """A configuration that cannot run; the message says which field, why, and what to do."""


def _f(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class Config:
    """One training run. Units: tokens, steps (one rollout batch each), seconds."""

    # fmt: off
    # What to train, on what, where to
    model: str = _f(str(ROOT / "assets/tiny-base"), "Hugging Face directory or hub id of the start policy")
    data: str = _f(str(ROOT / "assets/train.jsonl"), "training problems: .jsonl, .parquet or hub data set NAME[:CONFIG][@SPLIT]; prompt and label per row")
    eval_data: str = _f(str(ROOT / "assets/eval.jsonl"), "held-out problems in the same format; empty: no evaluation")
    prompt_key: str = _f("", "column of --data with the prompt (text, or chat messages); empty: prompt, problem, question, ...")
    label_key: str = _f("", "column of --data with the right answer; empty: label, answer, ground_truth, ...")
    prompt_suffix: str = _f("", "text put on a line of its own behind every prompt, such as a request to box the answer")
    output_dir: str = _f("", "run directory; empty: a new one under runs/")
    algorithm: str = _f("justrl2", "row of losses.ALGORITHMS: grpo, ppo, justrl2, ...")
    steps: int = _f(40, "rollout steps of the whole run, critic-only steps included")
    seed: int = _f(0, "seeds data order and sampling")
    resume: bool = _f(False, "continue the run in --output-dir from its newest checkpoint")
    replay: str = _f("", "minibatch.pt that a loss which was not finite left in its run directory: compute it again, say what is not finite, and end")

    # Machine
    device: str = _f("auto", "auto, cpu or cuda")
    dtype: str = _f("auto", "dtype of activations: float32 or bfloat16; auto: bfloat16 on CUDA, else float32 (masters are always float32)")
    head_dtype: str = _f("auto", "dtype of the output layer's operands in trainer and sampler: float32, bfloat16, or auto: that of --dtype")
    nproc: int = _f(1, "processes on this node, one per GPU; above 1 train.py starts so many of itself")
    activation_checkpointing: bool = _f(False, "recompute each layer in backward: less memory, a third more compute")
    mlp_chunk_tokens: int = _f(0, "tokens at a time through the feed-forward half of a layer, recomputed in backward: a lower peak for long sequences; 0: all at once")
    offload: str = _f("none", "keep on the host what is not at work: none; optimizer: AdamW's moments outside its step; idle: the weights of the model that does not train as well")
    plan: bool = _f(False, "print the memory plan of one GPU and stop; fetches nothing but the model's config.json")
    gpu_memory_gb: float | None = _f(None, "memory of one GPU (GB) for the plan; unset: that of the first GPU here, else 80")
    max_tokens_per_micro_batch: int = _f(8192, "tokens (prompt + response) per forward; changes memory and speed, never the result (but see --optimizer muon)")

    # Rollout
    prompts_per_step: int = _f(24, "kept groups per step")
    group_size: int | None = _f(None, "responses per problem (default 8)")
    max_prompt_tokens: int = _f(256, "longer prompts are dropped when the data are read, and counted")
    max_response_tokens: int = _f(128, "response budget, stop token included")
    temperature: float = _f(1.0, "sampling temperature; trained log-probs use it too, V never does")
    think: str = _f("auto", "thinking tags: auto; require (no </think>, no reward: for templates that open <think> themselves); none")
    slots: int = _f(64, "responses decoded at the same time per process")
    kv_cache_tokens: int = _f(0, "most tokens per process whose keys and values are held while sampling; 0: what four fifths of the free GPU memory hold (with --async-steps: of what the plan leaves free), or a quarter of the CPU's")
    prefill_chunk_tokens: int = _f(8192, "most prompt tokens the sampler computes in one forward; changes memory, never the result")
    cuda_graphs: bool = _f(False, "on a GPU with a paged attention kernel: launch a decode step as one CUDA graph; new, try it before a long run")
    dynamic_sampling: bool | None = _f(None, "keep only groups whose raw rewards differ (default true)")
    max_pass_rate: float | None = _f(None, "leave out problems solved at least this often so far (ScaleRL: 0.9); unset: off")
    failure_weighted: bool = _f(False, "draw problems in proportion to 1 - their pass rate so far")
    over_sampling: float = _f(1.0, "groups kept or running at any time, per group wanted; those running when enough are kept are aborted")
    max_refills: int = _f(4, "a dropped group is replaced while others run, until a step has started (1 + this) x over_sampling x prompts_per_step groups; 0: none is replaced")
    async_steps: int = _f(0, "1: sample the next step on the weights before the update, in a thread beside it; one process, needs an --is-mode")
    partial_rollout: bool = _f(False, "resume aborted groups in the next step instead of dropping them")
    partial_mask_old: bool = _f(False, "leave tokens that an older policy sampled out of the policy loss")
    max_staleness: int | None = _f(None, "aborted groups with a token sampled more than this many policy updates ago start anew; unset: no bound")

    # Reward
    reward: str = _f("correct", "correct: the verifier's; controls that ignore the label: random (a fair coin), format_only, majority (of the group's answers)")
    reward_mix: str = _f("correct", "what actor and critic see, as weights that sum to 1: '0.9 correct + 0.1 format'; groups are kept by the raw reward alone")
    overlong_buffer_tokens: int = _f(0, "the reward falls linearly over the last tokens of the budget; 0: off")
    overlong_penalty_factor: float = _f(1.0, "largest overlong penalty (reward units)")
    overlong_injection_alpha: float | None = _f(None, "put the overlong penalty into the advantages with lambda 1 - 1/(alpha L) instead of the reward (paper's arm: 0.1); unset: in the reward")
    overlong_filter: bool = _f(False, "leave truncated responses out of the policy loss")
    length_reward_weight: float = _f(0.0, "bonus among the right responses of a group, largest for the shortest (Kimi); 0: off")
    length_reward_min_spread: int = _f(8000, "least difference of right lengths for that bonus (tokens)")
    length_reward_min_longest: int = _f(10000, "least longest right length for that bonus (tokens)")
    verifier_workers: int = _f(1, "grading processes per rank")
    verifier_timeout_s: float = _f(2.0, "seconds until a grading worker is killed and the answer counts as wrong")

    # Optimisation
    epochs_per_step: int = _f(1, "passes over a rollout batch")
    minibatches_per_step: int = _f(1, "optimizer steps per pass; the paper has 1, so its clips never act")
    lr: float = _f(2e-4, "policy learning rate, constant (paper, 2B model: 1e-6)")
    critic_lr: float = _f(2e-3, "critic learning rate (paper, 2B model: 5e-6)")
    critic_lr_warmup_steps: int = _f(2, "critic steps of linear warm-up: step j (from 0) uses critic_lr * j / warmup")
    optimizer: str = _f("adamw", "adamw; or muon: Muon for the matrices of the layers, AdamW for the rest, both at the same rate. Muon's steps change by up to a percent with micro-batches and ranks: torch orthogonalises in bfloat16, which enlarges the rounding of sums")
    weight_decay: float = _f(0.1, "decay of matrices; norms, biases and the value head are not decayed")
    adam_beta1: float = _f(0.9, "AdamW beta 1")
    adam_beta2: float = _f(0.98, "AdamW beta 2")
    adam_eps: float = _f(1e-8, "AdamW epsilon")
    max_grad_norm: float = _f(1.0, "global gradient norm clip, policy and critic apart")

    # Critic
    critic_value_bias_init: float = _f(0.5, "expected mean reward: bias of the value head at the start (paper: 0.52)")
    num_critic_only_steps: int | None = _f(None, "first steps that train the critic alone (default: a quarter of --steps, at most 4; paper: 30); ignored without a critic")
    critic_updates_per_step: int | None = _f(None, "passes of the critic over a rollout batch, per pass of the policy (default 1)")
    critic_sees_penalty: bool = _f(False, "value targets contain the overlong penalty too; the method keeps it out, this is for comparison")
    value_clip: float | None = _f(None, "value clip range around the old value (default 0.2)")

    # Objective: None takes the default of the algorithm's row
    gamma: float = _f(1.0, "discount per token")
    gae_lambda: float | None = _f(None, "lambda of GAE, when not length-adaptive")
    gae_lambda_k: float | None = _f(None, "length-adaptive lambda k**(1/L) for a response of L tokens")
    gae_lambda_alpha: float | None = _f(None, "length-adaptive lambda 1 - 1/(alpha L) of VAPO; its paper, for thousands of tokens: 0.05")
    whiten_advantages: bool | None = _f(None, "advantages to mean 0, variance 1 over the tokens of the step")
    group_center: bool | None = _f(None, "add to each response's advantages what the critic misjudged on the others of its group, negated (justrl2_group)")
    std_normalize: bool | None = _f(None, "divide group advantages by the group's standard deviation")
    std_ddof: int = _f(0, "that deviation's divisor is G - std_ddof: 0 population, 1 sample")
    ratio_level: str | None = _f(None, "what the objective compares: token, sequence (GSPO) or sequence-token")
    clip_low: float | None = _f(None, "ratio clip: 1 - clip_low")
    clip_high: float | None = _f(None, "ratio clip: 1 + clip_high")
    dual_clip: float | None = _f(None, "bound on ratio * |A| for A < 0 (above 1); unset: off")
    sapo_tau_pos: float | None = _f(None, "temperature of SAPO's gate for A > 0")
    sapo_tau_neg: float | None = _f(None, "temperature of SAPO's gate for A < 0")
    aggregation: str | None = _f(None, "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm or prompt-mean")
    is_mode: str | None = _f(None, "weight exp(old - rollout log-prob): none, tis (clamped) or icepop (0 outside the window)")
    is_low: float | None = _f(None, "lower edge of the importance weight's window (default 0.5)")
    is_high: float | None = _f(None, "upper edge of the importance weight's window (default 5)")
    opsm_delta: float | None = _f(None, "drop tokens with A < 0 of responses whose mean(old - new log-prob) exceeds this; unset: off")
    kl_coef: float = _f(0.0, "coefficient of the KL to the start policy in the loss")
    kl_estimator: str = _f("k3", "k1, k2, k3, or k3_is (importance-corrected)")
    entropy_coef: float = _f(0.0, "coefficient of the entropy bonus (its gradient is live)")
    entropy_control: str = _f("none", "none, or clip_cov / kl_cov: detach / hold the tokens that lower entropy most")
    cov_fraction: float = _f(2e-4, "share of tokens that entropy_control acts on")
    cov_kl_coef: float = _f(1.0, "coefficient of kl_cov's penalty")

    # Evaluation, checkpoints, metrics
    save_every: int = _f(10, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _f(2, "newest checkpoints kept; 0: all")
    eval_every: int = _f(5, "steps between held-out evaluations; 0: only before and after")
    eval_samples: int = _f(4, "responses per held-out problem")
    eval_top_p: float = _f(1.0, "evaluation draws from the likeliest tokens of this total probability; training from all")
    eval_top_k: int = _f(0, "evaluation draws from that many likeliest tokens; 0: all")
    eval_min_p: float = _f(0.0, "evaluation draws tokens at least this likely, relative to the likeliest")
    log_samples: int = _f(8, "responses per step written to rollouts.jsonl; -1: all")
    report_to: str = _f("none", "also send the metrics to: none, tensorboard (RUN/tensorboard) or wandb")
    # fmt: on

    def resolved(self, algorithms: Mapping[str, Any]) -> "Config":
        """A checked copy in which every None took its row's default; `algorithms` is
        `losses.ALGORITHMS`.
        """
        if self.algorithm not in algorithms:
            refuse(
                "algorithm", f"{self.algorithm} is unknown; choose one of {', '.join(algorithms)}"
            )
        row = algorithms[self.algorithm]
        # A quarter of a short run, so that `--steps 2` needs no second flag.
        defaults = COMMON | {"num_critic_only_steps": min(4, self.steps // 4)} | row.defaults
        config = replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})
        config._check_fields()
        changed = [
            f.name
            for f in fields(self)
            if getattr(config, f.name) != defaults.get(f.name, f.default)
        ]
        config._check_use(changed, row, algorithms)
        config._check_rollout(row)
        config._check_training(row)
        return config

    def _check_fields(self) -> None:
        """Every field by itself; None, where it is allowed, is always in range."""
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                if value != math.inf or name not in NO_BOUND:
                    refuse(name, f"is {value}; it must be a finite number")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                refuse(name, f"is {value}; it must be above 0")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                refuse(name, f"is {value}; it must not be negative")
        for name, low, high in RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                refuse(name, f"is {value}; it must be in [{low}, {high}]")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                refuse(name, f"is {value!r}; choose one of {', '.join(map(str, choices))}")
        if self.gae_lambda_k is not None and not 0 < self.gae_lambda_k <= 1:
            refuse("gae_lambda_k", f"is {self.gae_lambda_k}; it must be in (0, 1]")
        if self.dual_clip is not None and self.dual_clip <= 1:
            refuse("dual_clip", f"is {self.dual_clip}; it must be above 1, or unset")
        reward_weights(self.reward_mix)

    def _check_use(self, changed: Sequence[str], row: Any, algorithms: Mapping[str, Any]) -> None:
        """No field that was given may do nothing."""
        for name in changed:
            readers = [known for known, r in algorithms.items() if name in r.reads]
            if readers and self.algorithm not in readers:
                refuse(name, f"is not read by {self.algorithm}; it belongs to {', '.join(readers)}")
            if name in OF_CRITIC and not row.critic:
                refuse(name, f"is of the critic, and {self.algorithm} has none; leave it out")
            if name in NEEDS and getattr(self, NEEDS[name]) in (None, 0, "none"):
                refuse(
                    name, f"does nothing without {flag(NEEDS[name])}; set that too, or leave it out"
                )

    def _check_rollout(self, row: Any) -> None:
        """Fields of sampling and rewards that cannot go together."""
        if self.overlong_buffer_tokens >= self.max_response_tokens:
            refuse(
                "overlong_buffer_tokens",
                f"({self.overlong_buffer_tokens}) must be below max_response_tokens "
                f"({self.max_response_tokens}); the paper uses a fifth of the budget",
            )
        if self.group_size == 1 and not row.critic:
            refuse(
                "group_size",
                f"is 1, but {self.algorithm} compares the responses of a group and would learn "
                "nothing; use at least 2, or an algorithm with a critic",
            )
        if self.group_size == 1 and self.dynamic_sampling:
            refuse(
                "dynamic_sampling",
                "drops every group of one response; set --no-dynamic-sampling or a larger "
                "--group-size",
            )
        if self.partial_rollout and self.over_sampling == 1:
            refuse(
                "partial_rollout",
                "resumes what over-sampling aborts; set --over-sampling above 1 as well",
            )
        longest = self.max_prompt_tokens + self.max_response_tokens
        if 0 < self.kv_cache_tokens < longest:
            refuse(
                "kv_cache_tokens",
                f"({self.kv_cache_tokens}) holds less than one prompt and response of "
                f"max_prompt_tokens + max_response_tokens ({longest}); raise it, or set 0",
            )
        if self.reward != "correct" and reward_weights(self.reward_mix) != {"correct": 1.0}:
            refuse(
                "reward_mix",
                f"mixes correctness; with the control --reward {self.reward} it must be left out",
            )

    def _check_training(self, row: Any) -> None:
        """Fields of the update that cannot go together."""
        if self.std_ddof >= self.group_size > 1:
            refuse("std_ddof", f"({self.std_ddof}) must be below group_size ({self.group_size})")
        if self.gae_lambda_k is not None and self.gamma != 1:
            refuse(
                "gamma",
                "must be 1 with a length-adaptive lambda (gae_lambda_k): its value target is the "
                "undiscounted reward",
            )
        if row.critic and self.num_critic_only_steps >= self.steps:
            refuse(
                "num_critic_only_steps",
                f"({self.num_critic_only_steps}) must be below steps ({self.steps}), or the policy "
                "never trains",
            )
        if self.minibatches_per_step > self.prompts_per_step * self.group_size:
            refuse("minibatches_per_step", "exceeds the number of responses in a step")
        if 1 < self.clip_low < math.inf and row.objective != "gmpo":
            refuse("clip_low", f"is {self.clip_low}; no ratio is below 0, so 1 is no clip already")
        if self.is_low > self.is_high:
            refuse("is_low", "must not exceed is_high")
        if self.async_steps and self.is_mode == "none":
            refuse(
                "async_steps",
                "trains on samples of an older policy, which only importance weights make right; "
                "set --is-mode tis or icepop as well",
            )
        if self.async_steps and self.partial_mask_old:
            refuse(
                "partial_mask_old",
                "would leave nothing to train on: with --async-steps every token is of an older "
                "policy",
            )
        if self.async_steps and self.nproc > 1:
            refuse(
                "async_steps",
                "works in one process: beside the collectives of an update, those of a rollout "
                "would meet in any order",
            )


POSITIVE = """steps nproc max_tokens_per_micro_batch prompts_per_step group_size max_prompt_tokens
    max_response_tokens temperature slots verifier_workers verifier_timeout_s epochs_per_step
    minibatches_per_step critic_updates_per_step max_grad_norm eval_samples eval_top_p
    prefill_chunk_tokens max_pass_rate gamma gae_lambda_alpha adam_eps sapo_tau_pos sapo_tau_neg
    overlong_injection_alpha gpu_memory_gb""".split()
NOT_NEGATIVE = """lr critic_lr critic_lr_warmup_steps weight_decay num_critic_only_steps max_refills
    overlong_buffer_tokens overlong_penalty_factor kl_coef entropy_coef cov_kl_coef opsm_delta is_low
    length_reward_weight length_reward_min_spread length_reward_min_longest save_every eval_every
    keep_checkpoints kv_cache_tokens eval_top_k mlp_chunk_tokens""".split()
# Limits that infinity switches off; every other number is finite.
NO_BOUND = "clip_low clip_high dual_clip value_clip is_high max_grad_norm".split()
# Fields that do nothing without a critic.
OF_CRITIC = "value_clip critic_updates_per_step critic_sees_penalty".split()
# Fields that do nothing while the other one is unset, 0 or none.
NEEDS = {
    "max_staleness": "partial_rollout",
    "partial_mask_old": "partial_rollout",
    "overlong_penalty_factor": "overlong_buffer_tokens",
    "overlong_injection_alpha": "overlong_buffer_tokens",
    "critic_sees_penalty": "overlong_buffer_tokens",
    "length_reward_min_spread": "length_reward_weight",
    "length_reward_min_longest": "length_reward_weight",
    "std_ddof": "std_normalize",
    "is_low": "is_mode",
    "is_high": "is_mode",
    "kl_estimator": "kl_coef",
    "cov_fraction": "entropy_control",
    "cov_kl_coef": "entropy_control",
}
# What a resumed run may not change: it would be another run under the same name, or could not use
# what is saved.
FIXED_ON_RESUME = """algorithm model data prompt_key label_key prompt_suffix max_prompt_tokens think
    seed group_size reward reward_mix optimizer""".split()
# What a field left at None is in every row that does not say otherwise.
COMMON = {
    "group_size": 8,
    "dynamic_sampling": True,
    "critic_updates_per_step": 1,
    "value_clip": 0.2,
    "is_low": 0.5,
    "is_high": 5.0,
}
RANGES = (
    ("seed", 0, 2**32 - 1),
    ("temperature", 0.01, 100),
    ("over_sampling", 1, 100),
    ("verifier_timeout_s", 0, 86_400),
    ("log_samples", -1, float("inf")),
    ("gae_lambda", 0, 1),
    ("gamma", 0, 1),
    ("clip_low", 0, float("inf")),
    ("clip_high", 0, float("inf")),
    ("value_clip", 0, float("inf")),
    ("adam_beta1", 0, 0.9999999),
    ("adam_beta2", 0, 0.9999999),
    ("max_pass_rate", 0, 1),
    ("cov_fraction", 0, 1),
    ("std_ddof", 0, 1),
    ("max_staleness", 0, float("inf")),
    ("eval_top_p", 0, 1),
    ("eval_min_p", 0, 1),
)
CHOICES = {
    "async_steps": (0, 1),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16"),
    "head_dtype": ("auto", "float32", "bfloat16"),
    "optimizer": ("adamw", "muon"),
    "think": ("auto", "require", "none"),
    "offload": ("none", "optimizer", "idle"),
    "aggregation": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"),
    "is_mode": ("none", "tis", "icepop"),
    "ratio_level": ("token", "sequence", "sequence-token"),
    "entropy_control": ("none", "clip_cov", "kl_cov"),
    "kl_estimator": ("k1", "k2", "k3", "k3_is"),
    "report_to": ("none", "tensorboard", "wandb"),
    "reward": ("correct", "random", "format_only", "majority"),
}


def flag(name: str) -> str:
    """A field as it is typed."""
    return f"--{name.replace('_', '-')}"


def refuse(name: str, sentence: str) -> NoReturn:
    """ConfigError about one field."""
    raise ConfigError(f"{flag(name)} {sentence}.")


def reward_weights(mix: str) -> dict[str, float]:
    """{"correct": 0.9, "format": 0.1} for "0.9 correct + 0.1 format"; ConfigError if it is not so."""
    weights: dict[str, float] = {}
    for term in mix.split("+"):
        match = re.fullmatch(r"\s*(?:(\d*\.?\d+)\s*\*?\s*)?(correct|format)\s*", term)
        if match is None or match[2] in weights:
            refuse(
                "reward_mix",
                f"{mix!r} is not a sum like '0.9 correct + 0.1 format'; its terms are correct and "
                "format",
            )
        weights[match[2]] = float(match[1] or 1)
    total = sum(weights.values())
    if abs(total - 1) > 1e-9:
        refuse("reward_mix", f"{mix!r} has weights that sum to {total:g}, not 1")
    return weights


def read_recipe(path: str | None) -> dict[str, Any]:
    """Fields of a YAML recipe, {} without one; an unknown key or an unreadable file is a
    ConfigError.
    """
    if path is None:
        return {}
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"--config {path} holds no `field: value` lines.")
    known = {f.name: f for f in fields(Config)}
    if unknown := sorted(recipe.keys() - known.keys()):
        raise ConfigError(f"--config {path} has unknown fields: {', '.join(map(str, unknown))}.")
    return recipe


class Help(argparse.HelpFormatter):
    """A flag with the type of its value, and its default where that says something."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = {string_to_bool: "true|false", None: ""}
        kind = names.get(action.type, getattr(action.type, "__name__", ""))
        return f"{action.option_strings[-1]} {kind}".strip()

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", str(action.default).replace(f"{ROOT}/", "")
        silent = action.default in (None, "", argparse.SUPPRESS) or "(default" in text
        return text if silent else f"{text} (default: {default})".replace("%", "%%")


class Parser(HfArgumentParser):
    """The flags of a dataclass, none of them abbreviated: a bad value is a ConfigError, and --help
    has the comments between the fields for headings.
    """

    def __init__(self, options: type, **kwargs: Any):
        heading, self.headings, self.groups = "Flags", {}, {}
        lines = re.findall(r"^    (?:# (?!fmt)(.+)|(\w+):)", inspect.getsource(options), re.M)
        for comment, name in lines:
            heading = comment or heading
            self.headings[name] = heading
        how = {
            "allow_abbrev": False,
            "formatter_class": Help,
            "usage": "%(prog)s [--flag value ...]",
        }
        super().__init__(options, **how | kwargs)

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Into the group of its heading."""
        heading = self.headings.get(kwargs.get("dest") or names[0].lstrip("-"))
        if heading is None:
            return super().add_argument(*names, **kwargs)
        if heading not in self.groups:
            self.groups[heading] = self.add_argument_group(heading)
        return self.groups[heading].add_argument(*names, **kwargs)

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        raise ConfigError(f"{message}; `--help` lists the flags.")


def parse(argv: Sequence[str] | None = None) -> Config:
    """Config from flags and an optional --config recipe; raises ConfigError."""
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", help="YAML recipe of the fields below")
    known, rest = first.parse_known_args(argv)
    usage = "%(prog)s [--config RECIPE.yaml] [--flag value ...]"
    parser = Parser(Config, parents=[first], usage=usage)
    # The parser knows --no-x only for fields that are True by default; None and a recipe's true become False the same way.
    negated = {
        f"--no{sep}{f.name.replace('_', sep)}": f.name
        for f in fields(Config)
        if f.default is None or f.default is False
        for sep in "-_"
    }
    rest = [f"--{negated[flag]}=false" if flag in negated else flag for flag in rest]
    recipe = read_recipe(known.config)
    given = from_flags(parser, _as_flags(parser, f"--config {known.config}", recipe) + rest)
    if not given.resume:
        return given
    stored = read_stored(given.output_dir)
    file = str(Path(given.output_dir) / "config.json")
    config = from_flags(parser, _as_flags(parser, file, recipe | stored) + rest)
    for name in FIXED_ON_RESUME:
        new, old = getattr(config, name), stored.get(name, getattr(Config, name))
        if new != old:
            refuse(name, f"was {old} when this run began, and a resumed run keeps it, not {new}")
    unused = [
        f"{name} {getattr(config, name)}, not {getattr(given, name)}"
        for name, value in recipe.items()
        if value != "auto" and getattr(given, name) != getattr(config, name)
    ]
    if unused and os.environ.get("RANK", "0") == "0":
        print(
            f"WARNING: the run keeps {'; '.join(unused)} of {known.config}. A flag can change what "
            "may change.",
            file=sys.stderr,
        )
    return config


def read_stored(output_dir: str) -> dict[str, Any]:
    """Fields of the run to resume, as its config.json remembers them."""
    if not output_dir:
        refuse("resume", "needs --output-dir, the run to continue")
    file = Path(output_dir) / "config.json"
    if not file.exists():
        refuse("resume", f"finds no run in {output_dir}; leave it out to start one there")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); put back a good copy.") from error


def _as_flags(parser: Parser, where: str, fields_: Mapping[str, Any]) -> list[str]:
    """Fields of a file as flags, to stand before the user's own: one parser converts both, and the
    later one wins. A bad value among them is a ConfigError that names the file.
    """
    flags = [f"--{name}={value}" for name, value in fields_.items() if value is not None]
    try:
        from_flags(parser, flags)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return flags


def from_flags(parser: Parser, argv: Sequence[str] | None) -> Any:
    """The dataclass of a parser; ConfigError for an unknown flag or a bad value. None: the flags of
    this process.
    """
    options, *_, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ConfigError(f"unknown arguments: {' '.join(unknown)}; `--help` lists the flags.")
    return options
