"""Every knob of a run: one dataclass whose fields are the command-line flags and the keys of a
recipe.

    python train.py --config recipes/x.yaml --lr 2e-6     flags win over the recipe, the recipe over the defaults

A field left at None takes the default of the chosen algorithm's row in `algorithms.ALGORITHMS`. The
other defaults run the embedded tiny model on a laptop CPU; the paper's values are in
recipes/justrl2-minicpm5-2b-128k.yaml.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml

from distributed import launched_rank

ROOT = Path(__file__).parent


class ConfigError(ValueError):
    """A configuration that cannot run; the message says which field, why, and what to do."""


def option(
    default: Any, help: str, allowed: str | tuple = "", needs: str = "", section: str = ""
) -> Any:
    """A field that is also a flag.

    allowed: an interval such as "(0, 1]", or a tuple of all values. needs: the field
    without which this one does nothing. section: the heading of --help that begins with this field.
    """
    metadata = {"help": help, "allowed": allowed, "needs": needs, "section": section}
    if isinstance(default, list):
        # A copy for each instance, or all would share one list.
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """One training run. Units: tokens, steps (one rollout batch each), seconds."""

    # fmt: off
    model: str = option(str(ROOT / "assets/tiny-base"), "start policy: a Hugging Face directory or hub id", section="Start with these")
    data: str = option(str(ROOT / "assets/train.jsonl"), "training problems, a prompt and a label per row: .jsonl or .parquet file, or hub data set NAME[:CONFIG][@SPLIT]")
    eval_data: str = option(str(ROOT / "assets/eval.jsonl"), "held-out problems, same formats; empty: no evaluation")
    prompt_suffix: str = option("", "text added after every prompt, on its own line, such as a request to box the answer")
    output_dir: str = option("", "run directory; empty: a new one under runs/")
    resume: bool = option(False, "continue the run in --output-dir from its newest checkpoint")
    seed: int = option(0, "seed of data order and sampling", "[0, 4294967295]")
    algorithm: str = option("justrl2", "row of algorithms.ALGORITHMS: justrl2, grpo, ppo, ...")
    steps: int = option(40, "rollout steps of the whole run, critic-only steps included", "(0, inf)")
    num_critic_only_steps: int | None = option(None, "steps at the start that train the critic alone (default: a quarter of --steps, at most 4; paper: 30); ignored without a critic", "[0, inf)")
    lr: float = option(2e-4, "policy learning rate, constant (paper, 2B model: 1e-6)", "[0, inf)")
    critic_lr: float = option(2e-3, "critic learning rate (paper, 2B model: 5e-6)", "[0, inf)")
    prompts_per_step: int = option(24, "groups kept per step", "(0, inf)")
    group_size: int | None = option(None, "responses per problem (default: 8)", "(0, inf)")
    max_prompt_tokens: int = option(256, "longer prompts are dropped and counted when the data are read", "(0, inf)")
    max_response_tokens: int = option(128, "response budget (tokens, stop token included)", "(0, inf)")
    overlong_buffer_tokens: int = option(0, "the reward falls linearly over this many last tokens of the budget; 0: off", "[0, inf)")
    temperature: float = option(1.0, "sampling temperature; trained log-probs use it too, V never does", "[0.01, 100]")
    over_sampling: float = option(1.0, "groups kept or running at any time, per group wanted; once enough are kept, the others are aborted", "[1, 100]")
    partial_rollout: bool = option(False, "resume aborted groups in the next step instead of dropping them")
    dtype: str = option("auto", "dtype of activations; auto: bfloat16 on CUDA, else float32 (master weights are always float32)", ("auto", "float32", "bfloat16"))
    nproc: int = option(1, "processes on this node, one per GPU; above 1, train.py starts them itself", "(0, inf)")
    slots: int = option(64, "responses decoded at the same time per process", "(0, inf)")
    max_tokens_per_micro_batch: int = option(8192, "prompt and response tokens per forward; changes memory and speed, never the result (but see --optimizer muon)", "(0, inf)")
    activation_checkpointing: bool = option(False, "recompute each layer in the backward pass: less memory, a third more compute")
    plan: bool = option(False, "print the memory plan of one GPU and stop; fetches nothing but the model's config.json")
    save_every: int = option(10, "steps between checkpoints; 0: only at the end", "[0, inf)")
    eval_every: int = option(5, "steps between held-out evaluations; 0: only before and after the run", "[0, inf)")
    eval_samples: int = option(4, "responses per held-out problem", "(0, inf)")

    prompt_key: str = option("", "column of --data with the prompt (text or chat messages); empty: prompt, problem, question, ...", section="Data and files")
    label_key: str = option("", "column of --data with the correct answer; empty: label, answer, ground_truth, ...")
    keep_checkpoints: int = option(2, "newest checkpoints kept; 0: all", "[0, inf)")
    eval_top_p: float = option(1.0, "evaluation draws from the likeliest tokens of this total probability; training from all tokens", "(0, 1]")
    log_samples: int = option(8, "responses per step written to rollouts.jsonl; -1: all", "[-1, inf)")
    report_to: str = option("none", "also send the metrics to TensorBoard (RUN/tensorboard) or Weights & Biases", ("none", "tensorboard", "wandb"))
    replay: str = option("", "minibatch.pt, left in its run directory by a run that met a non-finite loss: recompute that loss, say what is not finite, and stop")

    device: str = option("auto", "auto: cuda if there is a GPU, else cpu", ("auto", "cpu", "cuda"), section="Machine")
    head_dtype: str = option("auto", "dtype of the output layer's operands in trainer and sampler; auto: that of --dtype", ("auto", "float32", "bfloat16"))
    mlp_chunk_tokens: int = option(0, "tokens at a time through the feed-forward half of a layer, recomputed in backward: a lower peak for long sequences; 0: all at once", "[0, inf)")
    offload: str = option("none", "what is kept in host memory while unused; optimizer: AdamW's moments; idle: also the weights of the model that is not training", ("none", "optimizer", "idle"))
    gpu_memory_gb: float | None = option(None, "memory of one GPU (GB) for --plan; unset: that of the first GPU here, else 80", "(0, inf)")

    think: str = option("auto", "thinking tags: auto; require (no </think>, no reward: for templates that open <think> themselves); none", ("auto", "require", "none"), section="Rollout")
    dynamic_sampling: bool | None = option(None, "keep only groups whose raw rewards differ (default: true)")
    max_refills: int = option(4, "replace dropped groups until a step has started (1 + max_refills) x over_sampling x prompts_per_step groups; 0: replace none", "[0, inf)")
    max_pass_rate: float | None = option(None, "leave out problems solved at least this often so far (share; ScaleRL: 0.9); unset: off", "(0, 1]")
    kv_cache_tokens: int = option(0, "most tokens per process in the KV cache; 0: four fifths of the free GPU memory (with --async-steps: of what the plan leaves); on a CPU, a quarter of its memory",
                                  "[0, inf)")
    cuda_graphs: bool = option(False, "launch a decode step as one CUDA graph (GPU with a paged attention kernel); new: try it before a long run")
    async_steps: int = option(0, "1: a thread samples the next step, on the weights before the update, during the update; one process, needs --is-mode", (0, 1))
    partial_mask_old: bool = option(False, "leave tokens sampled by an older policy out of the policy loss", needs="partial_rollout")
    max_staleness: int | None = option(None, "restart aborted groups that have a token more than this many policy updates old; unset: no limit", "[0, inf)", needs="partial_rollout")

    reward: str = option("correct", "correct: the verifier's; or a control that ignores the label: random (a fair coin), format_only, majority (of the group's answers)",
                         ("correct", "random", "format_only", "majority"), section="Reward")
    reward_mix: str = option("correct", "what actor and critic see, as weights that sum to 1: '0.9 correct + 0.1 format'; groups are kept by the raw reward alone")
    overlong_penalty_factor: float = option(1.0, "largest overlong penalty (reward units)", "[0, inf)", needs="overlong_buffer_tokens")
    overlong_injection_alpha: float | None = option(None, "put the overlong penalty into the advantages, with lambda 1 - 1/(alpha L) (paper's ablation: 0.1); unset: into the reward", "(0, inf)",
                                                    needs="overlong_buffer_tokens")
    overlong_filter: bool = option(False, "leave truncated responses out of the policy loss")
    length_reward_weight: float = option(0.0, "bonus (reward units) for the shorter correct responses of a group whose lengths reach 10,000 tokens and differ by 8,000 (Kimi k1.5); 0: off", "[0, inf)")
    verifier_workers: int = option(1, "grading processes per rank", "(0, inf)")
    verifier_timeout_s: float = option(2.0, "seconds until a grading worker is killed and the answer counts as wrong", "(0, 86400]")

    epochs_per_step: int = option(1, "passes over a rollout batch", "(0, inf)", section="Optimisation")
    minibatches_per_step: int = option(1, "optimizer steps per pass; the paper has 1, so its clips never act", "(0, inf)")
    critic_lr_warmup_steps: int = option(2, "critic steps of linear warm-up: step j (from 0) uses critic_lr * j / warmup", "[0, inf)")
    optimizer: str = option("adamw", "muon: Muon for the matrices of the layers, AdamW for the rest, same rate; micro-batches and ranks change its steps by up to 1 % (bfloat16)", ("adamw", "muon"))
    weight_decay: float = option(0.1, "decay of matrices; norms, biases and the value head are not decayed", "[0, inf)")
    adam_beta1: float = option(0.9, "AdamW beta 1", "[0, 0.9999999]")
    adam_beta2: float = option(0.98, "AdamW beta 2", "[0, 0.9999999]")
    max_grad_norm: float = option(1.0, "global gradient norm above which gradients are scaled down, separately for policy and critic", "(0, inf]")

    critic_value_bias_init: float = option(0.5, "initial bias of the value head: the expected mean reward (paper: 0.52)", "(-inf, inf)", section="Critic")
    critic_updates_per_step: int | None = option(None, "passes of the critic over a rollout batch, per pass of the policy (default: 1)", "(0, inf)")
    critic_sees_penalty: bool = option(False, "put the overlong penalty into the value targets too; the method keeps it out, this is for comparison", needs="overlong_buffer_tokens")
    value_clip: float | None = option(None, "clip range of values around the old value, in reward units (default: 0.2)", "[0, inf]")

    gamma: float = option(1.0, "discount per token", "(0, 1]", section="Objective (unset: the default of the algorithm)")
    gae_lambda: float | None = option(None, "lambda of GAE, when not length-adaptive", "[0, 1]")
    gae_lambda_k: float | None = option(None, "length-adaptive lambda k**(1/L) for a response of L tokens", "(0, 1]")
    gae_lambda_alpha: float | None = option(None, "length-adaptive lambda 1 - 1/(alpha L) of VAPO; its paper, for thousands of tokens: 0.05", "(0, inf)")
    whiten_advantages: bool | None = option(None, "scale advantages to mean 0, variance 1 over the tokens of the step")
    group_center: bool | None = option(None, "subtract from each response's advantages the critic's mean error (reward - V) on the others of its group (justrl2_group)")
    std_normalize: bool | None = option(None, "divide group advantages by the group's standard deviation")
    std_ddof: int = option(0, "that deviation's divisor is G - std_ddof; 0: population, 1: sample (as in verl)", "[0, 1]", needs="std_normalize")
    ratio_level: str | None = option(None, "ratio that the objective clips: per token, per sequence (GSPO), or sequence-token", ("token", "sequence", "sequence-token"))
    clip_low: float | None = option(None, "lower end of the ratio clip: 1 - clip_low", "[0, inf]")
    clip_high: float | None = option(None, "upper end of the ratio clip: 1 + clip_high", "[0, inf]")
    dual_clip: float | None = option(None, "bound on ratio * |A| for A < 0, as a multiple of |A| (above 1); unset: off", "(1, inf]")
    sapo_tau_pos: float | None = option(None, "temperature of SAPO's gate for A > 0", "(0, inf)")
    sapo_tau_neg: float | None = option(None, "temperature of SAPO's gate for A < 0", "(0, inf)")
    aggregation: str | None = option(None, "how token losses become one number", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"))
    is_mode: str | None = option(None, "weight exp(old - rollout log-prob): none, tis (clamped) or icepop (0 outside the window)", ("none", "tis", "icepop"))
    is_low: float | None = option(None, "lower end of the importance weight's window (default: 0.5)", "[0, inf)", needs="is_mode")
    is_high: float | None = option(None, "upper end of the importance weight's window (default: 5)", "[0, inf]", needs="is_mode")
    opsm_delta: float | None = option(None, "drop tokens with A < 0 of responses whose mean(old - new log-prob) exceeds this (nats); unset: off", "[0, inf)")
    kl_coef: float = option(0.0, "coefficient of the KL to the start policy in the loss", "[0, inf)")
    kl_estimator: str = option("k3", "estimator of that KL; k3_is: k3, importance-corrected", ("k1", "k2", "k3", "k3_is"), needs="kl_coef")
    entropy_coef: float = option(0.0, "coefficient of the entropy bonus, through which gradients flow", "[0, inf)")
    entropy_control: str = option("none", "for the tokens that lower entropy most: clip_cov (no gradient) or kl_cov (a KL penalty)", ("none", "clip_cov", "kl_cov"))
    cov_fraction: float = option(2e-4, "share of tokens that --entropy-control acts on", "[0, 1]", needs="entropy_control")
    # fmt: on

    def resolved(self, algorithms: Mapping[str, Any]) -> "Config":
        """A checked copy with every None replaced by its row's default; `algorithms` is
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
        """Refuse a field that was changed but has no effect in this run."""
        for f in fields(self):
            name, needs = f.name, f.metadata["needs"]
            # The row's default first: what was resolved once must pass again at a resume.
            if getattr(self, name) == defaults.get(name, f.default):
                continue
            readers = [known for known, r in algorithms.items() if name in r.reads]
            if readers and self.algorithm not in readers:
                refuse(name, f"is not read by {self.algorithm}; it belongs to {', '.join(readers)}")
            if name in OF_CRITIC and not algorithms[self.algorithm].critic:
                refuse(name, f"belongs to the critic, and {self.algorithm} has none; leave it out")
            if needs and getattr(self, needs) in (None, 0, "none"):
                refuse(name, f"does nothing without {flag(needs)}; set that too, or leave it out")

    def _check_together(self, row: Any) -> None:
        """Refuse fields that contradict each other: (contradiction, field to change, reason)."""
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
             "resumes the groups that over-sampling aborts; set --over-sampling above 1 as well"),
            (0 < self.kv_cache_tokens < longest, "kv_cache_tokens",
             f"({self.kv_cache_tokens}) is less than one prompt and response, max_prompt_tokens + max_response_tokens ({longest}); raise it, or set 0"),
            (self.reward != "correct" and reward_weights(self.reward_mix) != {"correct": 1.0}, "reward_mix",
             f"mixes in correctness, which the control --reward {self.reward} ignores; leave it out"),
            (self.gae_lambda_k is not None and self.gamma != 1, "gamma",
             "must be 1 with a length-adaptive lambda (gae_lambda_k), whose value target is the undiscounted reward"),
            (row.critic and self.num_critic_only_steps >= self.steps, "num_critic_only_steps",
             f"({self.num_critic_only_steps}) must be below steps ({self.steps}), or the policy never trains"),
            (self.minibatches_per_step > self.prompts_per_step * self.group_size, "minibatches_per_step",
             "exceeds the number of responses in a step, prompts_per_step x group_size; lower it"),
            (1 < self.clip_low < math.inf and row.objective != "gmpo", "clip_low",
             f"is {self.clip_low}, but no ratio is below 0, so 1 already means no clip; use at most 1"),
            (self.is_low > self.is_high, "is_low",
             f"({self.is_low}) must not exceed is_high ({self.is_high})"),
            (self.async_steps and self.is_mode == "none", "async_steps",
             "trains on samples of an older policy, which only importance weights correct; set --is-mode tis or icepop as well"),
            (self.async_steps and self.partial_mask_old, "partial_mask_old",
             "would leave nothing to train on: with --async-steps an older policy sampled every token; leave it out"),
            (self.async_steps and self.nproc > 1, "async_steps",
             "works in one process only: collectives of the rollout could interleave with those of the update in a different order on each rank"),
            (self.async_steps and self.cuda_graphs, "cuda_graphs",
             "cannot be recorded during an update; leave it out with --async-steps"),
        ):
            if wrong:
                refuse(name, sentence)
        # fmt: on


CHOICES = {
    f.name: f.metadata["allowed"]
    for f in fields(Config)
    if isinstance(f.metadata["allowed"], tuple)
}
# Fields that do nothing without a critic.
OF_CRITIC = "value_clip critic_updates_per_step critic_sees_penalty".split()
# A resumed run with another value would be a different experiment under the same name, or could not
# load its checkpoint.
FIXED_ON_RESUME = """algorithm model data prompt_key label_key prompt_suffix max_prompt_tokens think
    seed group_size reward reward_mix optimizer""".split()
# Fields of earlier versions, with the one value that each still has. A run that had another value
# cannot continue here unchanged.
REMOVED = {
    "failure_weighted": False,
    "length_reward_min_spread": 8000,
    "length_reward_min_longest": 10000,
    "prefill_chunk_tokens": 8192,
    "adam_eps": 1e-8,
    "eval_top_k": 0,
    "eval_min_p": 0.0,
    "cov_kl_coef": 1.0,
}


# ---- checks

# How an error words an interval; one that is not here is shown as it is written.
IN_WORDS = {
    "(0, inf)": "be above 0",
    "(0, inf]": "be above 0",
    "[0, inf)": "not be negative",
    "[0, inf]": "not be negative",
    "(1, inf]": "be above 1, or unset",
}


def check_values(options: Any) -> None:
    """Compare each field with what its `option` allows; None, for a field that is unset, passes.

    Raises ConfigError for the first wrong field.
    """
    for f in fields(options):
        value, allowed = getattr(options, f.name), f.metadata["allowed"]
        if value is None or not allowed:
            continue
        if isinstance(allowed, tuple):
            if value not in allowed:
                refuse(f.name, f"is {value!r}; choose one of {', '.join(map(str, allowed))}")
        elif not contains(allowed, value):
            finite = abs(value) < math.inf  # False for NaN too
            must = IN_WORDS.get(allowed, f"be in {allowed}") if finite else "be a finite number"
            refuse(f.name, f"is {value}; it must {must}")


def contains(interval: str, x: float) -> bool:
    """Whether x is in an interval such as "(0, 1]"; NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    at_edge = (x == low and interval[0] == "[") or (x == high and interval[-1] == "]")
    return low < x < high or at_edge


def flag(name: str) -> str:
    """The flag of a field: --group-size for group_size."""
    return f"--{name.replace('_', '-')}"


def refuse(name: str, sentence: str) -> NoReturn:
    """Raise ConfigError about one field."""
    raise ConfigError(f"{flag(name)} {sentence}.")


def reward_weights(mix: str) -> dict[str, float]:
    """{"correct": 0.9, "format": 0.1} for "0.9 correct + 0.1 format"; ConfigError for a text that
    is not such a sum.
    """
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
    # Decimal weights need not sum to exactly 1 in binary.
    if abs(total - 1) > 1e-9:
        refuse("reward_mix", f"{mix!r} has weights that sum to {total:g}, not 1")
    return weights


# ---- flags


class Parser(argparse.ArgumentParser):
    """The flags of a dataclass, under the sections of its options in --help.

    No flag can be abbreviated, a flag that is not given sets no attribute, and what
    argparse finds wrong is a ConfigError.
    """

    def __init__(self, options: type, usage: str = "%(prog)s [--flag value ...]", **kwargs: Any):
        # SUPPRESS: a default must not look like a value that was given and win over a recipe.
        kwargs |= {"argument_default": argparse.SUPPRESS, "allow_abbrev": False}
        super().__init__(usage=usage, **kwargs)
        hints, group = get_type_hints(options), self
        for f in fields(options):
            if f.metadata["section"]:
                group = self.add_argument_group(f.metadata["section"])
            add_flag(group, f, hints[f.name])

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message}; `--help` lists the flags.")


def add_flag(group: Any, f: Field, hint: Any) -> None:
    """Add the flag of a field whose type `hint` is T, T | None or list[T]."""
    # Of T | None and of list[T] alike, T is the first argument.
    kind = get_args(hint)[0] if get_args(hint) else hint
    allowed = f.metadata["allowed"]
    metavar = "|".join(map(str, allowed)) if isinstance(allowed, tuple) else kind.__name__
    settings = {"help": help_text(f), "metavar": metavar, "type": kind}
    if get_origin(hint) is list:
        settings["nargs"] = "+"
    if kind is bool:
        # Every switch also has a --no-x: the algorithm or a recipe may have turned it on.
        settings |= {"nargs": "?", "const": True, "metavar": "true|false", "type": switch}
        group.add_argument(
            flag(f"no_{f.name}"), action="store_false", dest=f.name, help=argparse.SUPPRESS
        )
    group.add_argument(flag(f.name), **settings)


def help_text(f: Field) -> str:
    """The help of a field with its default, unless it says that itself or is empty when unset."""
    default = f.default_factory() if f.default is MISSING else f.default
    text = f.metadata["help"]
    if default not in (None, "", []) and "(default" not in text:
        shown = " ".join(default) if isinstance(default, list) else str(default)
        text += f" (default: {shown})".replace(f"{ROOT}/", "")  # no path of this machine
    return text.replace("%", "%%")  # argparse expands %-formats


def switch(text: str) -> bool:
    """The value of a switch; raises what argparse turns into an error."""
    if text.lower() in ("true", "t", "yes", "y", "1"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def read_flags(parser: Parser, argv: Sequence[str] | None) -> dict[str, Any]:
    """The fields that the flags give (argv None: those of this process).

    Raises ConfigError for an unknown flag or a bad value.
    """
    argv = [dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(f"unknown arguments: {' '.join(unknown)}; `--help` lists the flags.")
    return vars(found)


def dashed(word: str) -> str:
    """--group_size=8 as --group-size=8; a word that is not a flag as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def parse_options(options: type, about: str, argv: Sequence[str] | None = None) -> Any:
    """An instance of the dataclass `options` from flags (argv None: those of this process), checked
    by its own `check`. Raises ConfigError. --help begins with the first line of `about`.
    """
    parser = Parser(options, description=about.splitlines()[0])
    parsed = options(**read_flags(parser, argv))
    parsed.check()
    return parsed


# ---- recipes and runs


def parse(argv: Sequence[str] | None = None) -> Config:
    """Config from flags (argv None: those of this process) and an optional --config recipe.

    Flags win over the stored fields of a run to resume, those over the recipe, and that over the
    defaults. Raises ConfigError.
    """
    parser = Parser(Config, usage="%(prog)s [--config RECIPE.yaml] [--flag value ...]")
    parser.add_argument("--config", metavar="RECIPE.yaml", help="YAML recipe of the fields below")
    flags = read_flags(parser, argv)
    path = flags.pop("config", None)
    recipe = typed(parser, f"--config {path}", read_recipe(path)) if path else {}
    wanted = Config(**recipe | flags)
    if not wanted.resume:
        return wanted
    stored = read_stored(parser, wanted.output_dir)
    config = Config(**recipe | stored | flags)
    for name in FIXED_ON_RESUME:
        # A run of an earlier version may lack the field: it had what is the default now.
        new, old = getattr(config, name), stored.get(name, getattr(Config, name))
        if new != old:
            refuse(name, f"was {old} when this run began, and a resumed run keeps it, not {new}")
    warn_of_unused(recipe, wanted, config, path)
    return config


def warn_of_unused(recipe: Mapping[str, Any], wanted: Config, config: Config, path: str) -> None:
    """Print which fields of an edited recipe the resumed run ignores."""
    unused = [
        f"{name} {getattr(config, name)}, not {getattr(wanted, name)}"
        for name, value in recipe.items()
        # The run stores what "auto" became, so a difference there is not an edit.
        if value != "auto" and getattr(wanted, name) != getattr(config, name)
    ]
    if unused and launched_rank() == 0:
        print(
            f"WARNING: the resumed run keeps {'; '.join(unused)} from {path}. Use a flag to change a "
            "field of a run.",
            file=sys.stderr,
        )


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The fields of a YAML recipe as written; ConfigError naming the file if it is
    unreadable, has an unknown field, or gives a removed one another value than the one left.
    """
    try:
        # safe_load: a recipe is data, and must not construct objects.
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"--config {path} has no `field: value` lines.")
    for name in recipe.keys() & REMOVED.keys():
        if recipe.pop(name) != REMOVED[name]:
            raise ConfigError(
                f"--config {path} sets {name}, which this version no longer has (it always uses "
                f"{REMOVED[name]}); remove that line."
            )
    # str, because a key of YAML may also be a number or a date.
    if unknown := sorted(map(str, recipe.keys() - vars(Config()).keys())):
        raise ConfigError(f"--config {path} has unknown fields: {', '.join(unknown)}.")
    return recipe


def read_stored(parser: Parser, output_dir: str) -> dict[str, Any]:
    """The fields of the run to resume, from its config.json; ConfigError if there is none."""
    file = Path(output_dir, "config.json")
    if not output_dir:
        refuse("resume", "needs --output-dir, the run to continue")
    if not file.exists():
        refuse("resume", f"finds no run in {output_dir}; leave it out to start one there")
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is damaged ({error}); put back a good copy.") from error
    stored = without_removed(stored, str(file))
    given = typed(parser, str(file), stored)
    # A field that the run left unset stays unset: a recipe may not set it now.
    return {name: getattr(Config, name) for name in stored} | given


def without_removed(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The stored fields that this version knows; ConfigError if one that it no longer has differs
    from the only value left.
    """
    for name, value in REMOVED.items():
        if stored.get(name, value) != value:
            raise ConfigError(
                f"{where} has {name} {stored[name]}, but this version no longer has that field and "
                f"always uses {value}; continue with the version that wrote it, or start a new run."
            )
    return {name: value for name, value in stored.items() if name not in REMOVED}


def typed(parser: Parser, where: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a file `where`, converted and checked as if they were flags, so that YAML's "1e-6"
    (a text, since it has no dot) is a number; null counts as left out. ConfigError names the file.
    """
    try:
        # With `=`, or a value that begins with a dash would be read as a flag.
        return read_flags(parser, [f"{flag(k)}={v}" for k, v in stored.items() if v is not None])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
