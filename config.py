"""Every knob of a run: one dataclass whose fields are the command line flags and the keys of a
recipe.

    python train.py --config recipes/x.yaml --lr 2e-6     flags win over the recipe, the recipe over the defaults

A field left at None takes the default of the chosen algorithm's row in `algorithms.ALGORITHMS`. The
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


def option(default: Any, help: str, allowed: str | tuple = "", needs: str = "") -> Any:
    """A field. allowed: an interval such as "(0, 1]", or all the values there are; needs: the field
    without which it does nothing.
    """
    metadata = {"help": help, "allowed": allowed, "needs": needs}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """One training run. Units: tokens, steps (one rollout batch each), seconds."""

    # fmt: off
    # What to train, on what, where to
    model: str = option(str(ROOT / "assets/tiny-base"), "Hugging Face directory or hub id of the start policy")
    data: str = option(str(ROOT / "assets/train.jsonl"), "training problems: .jsonl, .parquet or hub data set NAME[:CONFIG][@SPLIT]; prompt and label per row")
    eval_data: str = option(str(ROOT / "assets/eval.jsonl"), "held-out problems in the same format; empty: no evaluation")
    prompt_key: str = option("", "column of --data with the prompt (text, or chat messages); empty: prompt, problem, question, ...")
    label_key: str = option("", "column of --data with the right answer; empty: label, answer, ground_truth, ...")
    prompt_suffix: str = option("", "text put on a line of its own behind every prompt, such as a request to box the answer")
    output_dir: str = option("", "run directory; empty: a new one under runs/")
    algorithm: str = option("justrl2", "row of algorithms.ALGORITHMS: grpo, ppo, justrl2, ...")
    steps: int = option(40, "rollout steps of the whole run, critic-only steps included", "(0, inf)")
    seed: int = option(0, "seeds data order and sampling", "[0, 4294967295]")
    resume: bool = option(False, "continue the run in --output-dir from its newest checkpoint")
    replay: str = option("", "minibatch.pt that a loss which was not finite left in its run directory: compute it again, say what is not finite, and end")

    # Machine
    device: str = option("auto", "auto, cpu or cuda", ("auto", "cpu", "cuda"))
    dtype: str = option("auto", "dtype of activations: float32 or bfloat16; auto: bfloat16 on CUDA, else float32 (masters are always float32)", ("auto", "float32", "bfloat16"))
    head_dtype: str = option("auto", "dtype of the output layer's operands in trainer and sampler: float32, bfloat16, or auto: that of --dtype", ("auto", "float32", "bfloat16"))
    nproc: int = option(1, "processes on this node, one per GPU; above 1 train.py starts so many of itself", "(0, inf)")
    activation_checkpointing: bool = option(False, "recompute each layer in backward: less memory, a third more compute")
    mlp_chunk_tokens: int = option(0, "tokens at a time through the feed-forward half of a layer, recomputed in backward: a lower peak for long sequences; 0: all at once", "[0, inf)")
    offload: str = option("none", "keep on the host what is not at work: none; optimizer: AdamW's moments outside its step; idle: the weights of the model that does not train as well", ("none", "optimizer", "idle"))
    plan: bool = option(False, "print the memory plan of one GPU and stop; fetches nothing but the model's config.json")
    gpu_memory_gb: float | None = option(None, "memory of one GPU (GB) for the plan; unset: that of the first GPU here, else 80", "(0, inf)")
    max_tokens_per_micro_batch: int = option(8192, "tokens (prompt + response) per forward; changes memory and speed, never the result (but see --optimizer muon)", "(0, inf)")

    # Rollout
    prompts_per_step: int = option(24, "kept groups per step", "(0, inf)")
    group_size: int | None = option(None, "responses per problem (default 8)", "(0, inf)")
    max_prompt_tokens: int = option(256, "longer prompts are dropped when the data are read, and counted", "(0, inf)")
    max_response_tokens: int = option(128, "response budget, stop token included", "(0, inf)")
    temperature: float = option(1.0, "sampling temperature; trained log-probs use it too, V never does", "[0.01, 100]")
    think: str = option("auto", "thinking tags: auto; require (no </think>, no reward: for templates that open <think> themselves); none", ("auto", "require", "none"))
    slots: int = option(64, "responses decoded at the same time per process", "(0, inf)")
    kv_cache_tokens: int = option(0, "most tokens per process whose keys and values are held while sampling; 0: what four fifths of the free GPU memory hold (with --async-steps: of what the plan leaves free), or a quarter of the CPU's", "[0, inf)")
    prefill_chunk_tokens: int = option(8192, "most prompt tokens the sampler computes in one forward; changes memory, never the result", "(0, inf)")
    cuda_graphs: bool = option(False, "on a GPU with a paged attention kernel: launch a decode step as one CUDA graph; new, try it before a long run")
    dynamic_sampling: bool | None = option(None, "keep only groups whose raw rewards differ (default true)")
    max_pass_rate: float | None = option(None, "leave out problems solved at least this often so far (ScaleRL: 0.9); unset: off", "(0, 1]")
    failure_weighted: bool = option(False, "draw problems in proportion to 1 - their pass rate so far")
    over_sampling: float = option(1.0, "groups kept or running at any time, per group wanted; those running when enough are kept are aborted", "[1, 100]")
    max_refills: int = option(4, "a dropped group is replaced while others run, until a step has started (1 + this) x over_sampling x prompts_per_step groups; 0: none is replaced", "[0, inf)")
    async_steps: int = option(0, "1: sample the next step on the weights before the update, in a thread beside it; one process, needs an --is-mode", (0, 1))
    partial_rollout: bool = option(False, "resume aborted groups in the next step instead of dropping them")
    partial_mask_old: bool = option(False, "leave tokens that an older policy sampled out of the policy loss", needs="partial_rollout")
    max_staleness: int | None = option(None, "aborted groups with a token sampled more than this many policy updates ago start anew; unset: no bound", "[0, inf)", needs="partial_rollout")

    # Reward
    reward: str = option("correct", "correct: the verifier's; controls that ignore the label: random (a fair coin), format_only, majority (of the group's answers)", ("correct", "random", "format_only", "majority"))
    reward_mix: str = option("correct", "what actor and critic see, as weights that sum to 1: '0.9 correct + 0.1 format'; groups are kept by the raw reward alone")
    overlong_buffer_tokens: int = option(0, "the reward falls linearly over the last tokens of the budget; 0: off", "[0, inf)")
    overlong_penalty_factor: float = option(1.0, "largest overlong penalty (reward units)", "[0, inf)", needs="overlong_buffer_tokens")
    overlong_injection_alpha: float | None = option(None, "put the overlong penalty into the advantages with lambda 1 - 1/(alpha L) instead of the reward (paper's arm: 0.1); unset: in the reward", "(0, inf)", needs="overlong_buffer_tokens")
    overlong_filter: bool = option(False, "leave truncated responses out of the policy loss")
    length_reward_weight: float = option(0.0, "bonus among the right responses of a group, largest for the shortest (Kimi); 0: off", "[0, inf)")
    length_reward_min_spread: int = option(8000, "least difference of right lengths for that bonus (tokens)", "[0, inf)", needs="length_reward_weight")
    length_reward_min_longest: int = option(10000, "least longest right length for that bonus (tokens)", "[0, inf)", needs="length_reward_weight")
    verifier_workers: int = option(1, "grading processes per rank", "(0, inf)")
    verifier_timeout_s: float = option(2.0, "seconds until a grading worker is killed and the answer counts as wrong", "(0, 86400]")

    # Optimisation
    epochs_per_step: int = option(1, "passes over a rollout batch", "(0, inf)")
    minibatches_per_step: int = option(1, "optimizer steps per pass; the paper has 1, so its clips never act", "(0, inf)")
    lr: float = option(2e-4, "policy learning rate, constant (paper, 2B model: 1e-6)", "[0, inf)")
    critic_lr: float = option(2e-3, "critic learning rate (paper, 2B model: 5e-6)", "[0, inf)")
    critic_lr_warmup_steps: int = option(2, "critic steps of linear warm-up: step j (from 0) uses critic_lr * j / warmup", "[0, inf)")
    optimizer: str = option("adamw", "adamw; or muon: Muon for the matrices of the layers, AdamW for the rest, both at the same rate. Muon's steps change by up to a percent with micro-batches and ranks: torch orthogonalises in bfloat16, which enlarges the rounding of sums", ("adamw", "muon"))
    weight_decay: float = option(0.1, "decay of matrices; norms, biases and the value head are not decayed", "[0, inf)")
    adam_beta1: float = option(0.9, "AdamW beta 1", "[0, 0.9999999]")
    adam_beta2: float = option(0.98, "AdamW beta 2", "[0, 0.9999999]")
    adam_eps: float = option(1e-8, "AdamW epsilon", "(0, inf)")
    max_grad_norm: float = option(1.0, "global gradient norm clip, policy and critic apart", "(0, inf]")

    # Critic
    critic_value_bias_init: float = option(0.5, "expected mean reward: bias of the value head at the start (paper: 0.52)", "(-inf, inf)")
    num_critic_only_steps: int | None = option(None, "first steps that train the critic alone (default: a quarter of --steps, at most 4; paper: 30); ignored without a critic", "[0, inf)")
    critic_updates_per_step: int | None = option(None, "passes of the critic over a rollout batch, per pass of the policy (default 1)", "(0, inf)")
    critic_sees_penalty: bool = option(False, "value targets contain the overlong penalty too; the method keeps it out, this is for comparison", needs="overlong_buffer_tokens")
    value_clip: float | None = option(None, "value clip range around the old value (default 0.2)", "[0, inf]")

    # Objective: None takes the default of the algorithm's row
    gamma: float = option(1.0, "discount per token", "(0, 1]")
    gae_lambda: float | None = option(None, "lambda of GAE, when not length-adaptive", "[0, 1]")
    gae_lambda_k: float | None = option(None, "length-adaptive lambda k**(1/L) for a response of L tokens", "(0, 1]")
    gae_lambda_alpha: float | None = option(None, "length-adaptive lambda 1 - 1/(alpha L) of VAPO; its paper, for thousands of tokens: 0.05", "(0, inf)")
    whiten_advantages: bool | None = option(None, "advantages to mean 0, variance 1 over the tokens of the step")
    group_center: bool | None = option(None, "add to each response's advantages what the critic misjudged on the others of its group, negated (justrl2_group)")
    std_normalize: bool | None = option(None, "divide group advantages by the group's standard deviation")
    std_ddof: int = option(0, "that deviation's divisor is G - std_ddof: 0 population, 1 sample", "[0, 1]", needs="std_normalize")
    ratio_level: str | None = option(None, "what the objective compares: token, sequence (GSPO) or sequence-token", ("token", "sequence", "sequence-token"))
    clip_low: float | None = option(None, "ratio clip: 1 - clip_low", "[0, inf]")
    clip_high: float | None = option(None, "ratio clip: 1 + clip_high", "[0, inf]")
    dual_clip: float | None = option(None, "bound on ratio * |A| for A < 0 (above 1); unset: off", "(1, inf]")
    sapo_tau_pos: float | None = option(None, "temperature of SAPO's gate for A > 0", "(0, inf)")
    sapo_tau_neg: float | None = option(None, "temperature of SAPO's gate for A < 0", "(0, inf)")
    aggregation: str | None = option(None, "token-mean, seq-mean-token-mean, seq-mean-token-sum-norm or prompt-mean", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"))
    is_mode: str | None = option(None, "weight exp(old - rollout log-prob): none, tis (clamped) or icepop (0 outside the window)", ("none", "tis", "icepop"))
    is_low: float | None = option(None, "lower edge of the importance weight's window (default 0.5)", "[0, inf)", needs="is_mode")
    is_high: float | None = option(None, "upper edge of the importance weight's window (default 5)", "[0, inf]", needs="is_mode")
    opsm_delta: float | None = option(None, "drop tokens with A < 0 of responses whose mean(old - new log-prob) exceeds this; unset: off", "[0, inf)")
    kl_coef: float = option(0.0, "coefficient of the KL to the start policy in the loss", "[0, inf)")
    kl_estimator: str = option("k3", "k1, k2, k3, or k3_is (importance-corrected)", ("k1", "k2", "k3", "k3_is"), needs="kl_coef")
    entropy_coef: float = option(0.0, "coefficient of the entropy bonus (its gradient is live)", "[0, inf)")
    entropy_control: str = option("none", "none, or clip_cov / kl_cov: detach / hold the tokens that lower entropy most", ("none", "clip_cov", "kl_cov"))
    cov_fraction: float = option(2e-4, "share of tokens that entropy_control acts on", "[0, 1]", needs="entropy_control")
    cov_kl_coef: float = option(1.0, "coefficient of kl_cov's penalty", "[0, inf)", needs="entropy_control")

    # Evaluation, checkpoints, metrics
    save_every: int = option(10, "steps between checkpoints; 0: only at the end", "[0, inf)")
    keep_checkpoints: int = option(2, "newest checkpoints kept; 0: all", "[0, inf)")
    eval_every: int = option(5, "steps between held-out evaluations; 0: only before and after", "[0, inf)")
    eval_samples: int = option(4, "responses per held-out problem", "(0, inf)")
    eval_top_p: float = option(1.0, "evaluation draws from the likeliest tokens of this total probability; training from all", "(0, 1]")
    eval_top_k: int = option(0, "evaluation draws from that many likeliest tokens; 0: all", "[0, inf)")
    eval_min_p: float = option(0.0, "evaluation draws tokens at least this likely, relative to the likeliest", "[0, 1]")
    log_samples: int = option(8, "responses per step written to rollouts.jsonl; -1: all", "[-1, inf)")
    report_to: str = option("none", "also send the metrics to: none, tensorboard (RUN/tensorboard) or wandb", ("none", "tensorboard", "wandb"))
    # fmt: on

    def resolved(self, algorithms: Mapping[str, Any]) -> "Config":
        """A checked copy in which every None took its row's default; `algorithms` is
        `algorithms.ALGORITHMS`.
        """
        if self.algorithm not in algorithms:
            refuse(
                "algorithm", f"{self.algorithm} is unknown; choose one of {', '.join(algorithms)}"
            )
        row = algorithms[self.algorithm]
        # A quarter of a short run, so that `--steps 2` needs no second flag.
        defaults = {"num_critic_only_steps": min(4, self.steps // 4)} | row.defaults
        config = replace(self, **{k: v for k, v in defaults.items() if getattr(self, k) is None})
        check_values(config)
        reward_weights(config.reward_mix)
        config._check_use(defaults, algorithms)
        config._check_together(row)
        return config

    def _check_use(self, defaults: Mapping[str, Any], algorithms: Mapping[str, Any]) -> None:
        """No field that was changed may do nothing."""
        for f in fields(self):
            name, needs = f.name, f.metadata["needs"]
            if getattr(self, name) == defaults.get(name, f.default):
                continue
            readers = [known for known, r in algorithms.items() if name in r.reads]
            if readers and self.algorithm not in readers:
                refuse(name, f"is not read by {self.algorithm}; it belongs to {', '.join(readers)}")
            if name in OF_CRITIC and not algorithms[self.algorithm].critic:
                refuse(name, f"is of the critic, and {self.algorithm} has none; leave it out")
            if needs and getattr(self, needs) in (None, 0, "none"):
                refuse(name, f"does nothing without {flag(needs)}; set that too, or leave it out")

    def _check_together(self, row: Any) -> None:
        """Fields that cannot go together: when, the field to change, and why."""
        longest = self.max_prompt_tokens + self.max_response_tokens
        # fmt: off
        for wrong, name, sentence in (
            (self.overlong_buffer_tokens >= self.max_response_tokens, "overlong_buffer_tokens",
             f"({self.overlong_buffer_tokens}) must be below max_response_tokens ({self.max_response_tokens}); the paper uses a fifth of the budget"),
            (self.group_size == 1 and not row.critic, "group_size",
             f"is 1, but {self.algorithm} compares the responses of a group and would learn nothing; use at least 2, or an algorithm with a critic"),
            (self.group_size == 1 and self.dynamic_sampling, "dynamic_sampling",
             "drops every group of one response; set --no-dynamic-sampling or a larger --group-size"),
            (self.partial_rollout and self.over_sampling == 1, "partial_rollout",
             "resumes what over-sampling aborts; set --over-sampling above 1 as well"),
            (0 < self.kv_cache_tokens < longest, "kv_cache_tokens",
             f"({self.kv_cache_tokens}) holds less than one prompt and response of max_prompt_tokens + max_response_tokens ({longest}); raise it, or set 0"),
            (self.reward != "correct" and reward_weights(self.reward_mix) != {"correct": 1.0}, "reward_mix",
             f"mixes correctness; with the control --reward {self.reward} it must be left out"),
            (self.std_ddof >= self.group_size > 1, "std_ddof",
             f"({self.std_ddof}) must be below group_size ({self.group_size})"),
            (self.gae_lambda_k is not None and self.gamma != 1, "gamma",
             "must be 1 with a length-adaptive lambda (gae_lambda_k): its value target is the undiscounted reward"),
            (row.critic and self.num_critic_only_steps >= self.steps, "num_critic_only_steps",
             f"({self.num_critic_only_steps}) must be below steps ({self.steps}), or the policy never trains"),
            (self.minibatches_per_step > self.prompts_per_step * self.group_size, "minibatches_per_step",
             "exceeds the number of responses in a step"),
            (1 < self.clip_low < math.inf and row.objective != "gmpo", "clip_low",
             f"is {self.clip_low}; no ratio is below 0, so 1 is no clip already"),
            (self.is_low > self.is_high, "is_low",
             "must not exceed is_high"),
            (self.async_steps and self.is_mode == "none", "async_steps",
             "trains on samples of an older policy, which only importance weights make right; set --is-mode tis or icepop as well"),
            (self.async_steps and self.partial_mask_old, "partial_mask_old",
             "would leave nothing to train on: with --async-steps every token is of an older policy"),
            (self.async_steps and self.nproc > 1, "async_steps",
             "works in one process: beside the collectives of an update, those of a rollout would meet in any order"),
            (self.async_steps and self.cuda_graphs, "cuda_graphs",
             "cannot be recorded beside an update; leave it out"),
        ):
            if wrong:
                refuse(name, sentence)
        # fmt: on


# How a message puts an interval; others it shows as they are.
IN_WORDS = {
    "(0, inf)": "be above 0",
    "(0, inf]": "be above 0",
    "[0, inf)": "not be negative",
    "[0, inf]": "not be negative",
    "(1, inf]": "be above 1, or unset",
}
CHOICES = {
    f.name: f.metadata["allowed"]
    for f in fields(Config)
    if isinstance(f.metadata["allowed"], tuple)
}
# Fields that do nothing without a critic.
OF_CRITIC = "value_clip critic_updates_per_step critic_sees_penalty".split()
# What a resumed run may not change: it would be another run under the same name, or could not use
# what is saved.
FIXED_ON_RESUME = """algorithm model data prompt_key label_key prompt_suffix max_prompt_tokens think
    seed group_size reward reward_mix optimizer""".split()


def check_values(options: Any) -> None:
    """ConfigError for the first field, each by itself, that is not what its `option` allows; None,
    where a field can be unset, is always right.
    """
    for f in fields(options):
        value, allowed = getattr(options, f.name), f.metadata["allowed"]
        if value is None or not allowed:
            continue
        if isinstance(allowed, tuple):
            if value not in allowed:
                refuse(f.name, f"is {value!r}; choose one of {', '.join(map(str, allowed))}")
        elif not contains(allowed, value):
            finite = abs(value) < math.inf  # and no NaN
            must = IN_WORDS.get(allowed, f"be in {allowed}") if finite else "be a finite number"
            refuse(f.name, f"is {value}; it must {must}")


def contains(interval: str, x: float) -> bool:
    """Whether x is in an interval such as "(0, 1]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    at_edge = (x == low and interval[0] == "[") or (x == high and interval[-1] == "]")
    return low < x < high or at_edge


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
    if unknown := sorted(recipe.keys() - vars(Config()).keys()):
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

    def __init__(self, options: type, usage: str = "%(prog)s [--flag value ...]", **kwargs: Any):
        heading, self.headings, self.groups = "Flags", {}, {}
        lines = re.findall(r"^    (?:# (?!fmt)(.+)|(\w+):)", inspect.getsource(options), re.M)
        for comment, name in lines:
            heading = comment or heading
            self.headings[name] = heading
        super().__init__(options, usage=usage, allow_abbrev=False, formatter_class=Help, **kwargs)

    def add_argument(self, *names: str, **kwargs: Any) -> argparse.Action:
        """Into the group of its heading. A switch needs no value and has a --no-x, whatever its
        default: the algorithm or a recipe may have set it.
        """
        name = kwargs.get("dest") or names[0].lstrip("-")
        heading = self.headings.get(name)
        if heading is None:
            return super().add_argument(*names, **kwargs)
        if heading not in self.groups:
            self.groups[heading] = self.add_argument_group(heading)
        for rule in ("allowed", "needs"):
            kwargs.pop(rule, None)
        if kwargs.get("type") is string_to_bool and kwargs.get("default") is not True:
            kwargs |= {"nargs": "?", "const": True}
            off = {"action": "store_false", "dest": name, "help": argparse.SUPPRESS}
            super().add_argument(f"--no_{name}", f"--no-{name.replace('_', '-')}", **off)
        return self.groups[heading].add_argument(*names, **kwargs)

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        raise ConfigError(f"{message}; `--help` lists the flags.")


def parse(argv: Sequence[str] | None = None) -> Config:
    """Config from flags (None: those of this process) and an optional --config recipe; raises
    ConfigError. Flags win over the fields of a run to resume, and those over the recipe.
    """
    parser = Parser(Config, usage="%(prog)s [--config RECIPE.yaml] [--flag value ...]")
    parser.add_argument("--config", help="YAML recipe of the fields below")
    flags = read_flags(parser, argv)
    path = flags.pop("config", None)
    recipe = typed(parser, f"--config {path}", read_recipe(path))
    given = Config(**recipe | flags)
    if not given.resume:
        return given
    file = Path(given.output_dir, "config.json")
    remembered = read_stored(given.output_dir, file)
    stored = typed(parser, str(file), remembered)
    # What the run left unset a recipe cannot set either.
    added = {name: value for name, value in recipe.items() if name not in remembered}
    config = Config(**added | stored | flags)
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
            f"WARNING: the run keeps {'; '.join(unused)} of {path}. A flag can change what may "
            "change.",
            file=sys.stderr,
        )
    return config


def read_stored(output_dir: str, file: Path) -> dict[str, Any]:
    """Fields of the run to resume, as its config.json `file` remembers them."""
    if not output_dir:
        refuse("resume", "needs --output-dir, the run to continue")
    if not file.exists():
        refuse("resume", f"finds no run in {output_dir}; leave it out to start one there")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); put back a good copy.") from error


def typed(parser: Parser, where: str, fields_: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a file, read as the flags they could be; null is a field left out. A bad value is a
    ConfigError that names the file.
    """
    try:
        return read_flags(parser, [f"--{k}={v}" for k, v in fields_.items() if v is not None])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_flags(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The fields that flags give, None: the flags of this process. ConfigError for an unknown flag
    or a bad value.
    """
    # argparse puts a default only where no attribute is: what stays None was not given.
    (options,) = parser.dataclass_types
    blank = argparse.Namespace(**dict.fromkeys(f.name for f in fields(options)))
    found, unknown = parser.parse_known_args(argv, blank)
    if unknown:
        raise ConfigError(f"unknown arguments: {' '.join(unknown)}; `--help` lists the flags.")
    return {name: value for name, value in vars(found).items() if value is not None}


def parse_options(options: type, about: str, argv: Sequence[str] | None = None) -> Any:
    """The dataclass `options` from flags (None: those of this process), checked by its own `check`;
    raises ConfigError. --help begins with the first line of `about`.
    """
    parser = Parser(options, description=about.splitlines()[0])
    parsed = options(**read_flags(parser, argv))
    parsed.check()
    return parsed
