"""The start of a run: check everything that can be wrong, open and lock its directory, and build
models, optimizers and sampler, or load them from a checkpoint.
"""

import errno
import fcntl
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

import distributed
from algorithms import ALGORITHMS
from config import ROOT, Config, ConfigError
from data import DataOrder, Problem
from distributed import print0
from files import writing
from model import Transformer, limit_threads, load_config, local_folder
from problems import load_problems, load_tokenizer, stop_ids, think_mode, vocabulary_size
from rewards import ANSWERS, Verifier
from rollout import Sampler
from run import checkpoint, metrics, plan
from run.optimizer import make_optimizers, offload
from run.state import Run, State


def set_up(config: Config, device: torch.device) -> tuple[Run, State]:
    """Check everything that can be wrong before anything is sampled, then build or resume models
    and optimizers.
    """
    # Before the data: to tokenise all prompts only to refuse the directory would waste time.
    folder = run_directory(config)
    model_folder = local_folder(config.model)
    shape, tokenizer = load_config(model_folder), load_tokenizer(model_folder)
    problems, dropped = read_problems(config.data, tokenizer, config)
    eval_problems, eval_dropped = read_problems(config.eval_data, tokenizer, config)
    if dropped + eval_dropped:
        print0(
            f"dropped {dropped} training and {eval_dropped} held-out prompts above "
            f"{config.max_prompt_tokens} tokens"
        )
    # What "auto" became goes into config.json, so that a resume cannot decide otherwise.
    config.think = think_mode(config.think, problems)
    if config.head_dtype == "auto":
        config.head_dtype = config.dtype
    if config.reward == "majority" and {p.verifier for p in problems} - set(ANSWERS):
        raise ConfigError(
            "--reward majority compares answers; only math and choice problems have them."
        )
    ranks = distributed.world_size()
    if config.async_steps and ranks > 1:
        raise ConfigError("--async-steps works in one process; start without torchrun.")
    if concern := plan.concern(shape, config, device, ranks, distributed.ranks_here()):
        print0(f"WARNING: {concern}", file=sys.stderr)
    # From here on the disk is written to; everything that could be refused has been.
    open_run_directory(folder)
    lock = lock_directory(folder)
    # Only under the lock: it deletes half-written checkpoints, which a live run may be writing.
    saved = checkpoint.newest(folder) if config.resume else None
    state = build_state(config, device, model_folder, tokenizer, problems, saved)
    grader = Verifier(num_workers=config.verifier_workers, timeout_s=config.verifier_timeout_s)
    # Now, so that a missing tracker is named before hours of sampling.
    report = metrics.open_reporter(folder, config, state.step)
    if state.step < config.steps:  # else no step will use what the flags change
        write_config(folder, config)
    row = ALGORITHMS[config.algorithm]
    return Run(config, row, device, folder, problems, eval_problems, grader, report, lock), state


def read_problems(
    path: str, tokenizer: PreTrainedTokenizerBase, config: Config
) -> tuple[list[Problem], int]:
    """(problems, number dropped as too long) of --data or --eval-data; none for an empty path."""
    if not path:
        return [], 0
    return load_problems(
        path,
        tokenizer,
        config.max_prompt_tokens,
        config.prompt_key,
        config.label_key,
        config.prompt_suffix,
    )


# ---- the directory


def run_directory(config: Config) -> Path:
    """The run directory, the same on every rank; ConfigError if it is of another run."""
    name = config.output_dir or str(
        ROOT / "runs" / f"{config.algorithm}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    # The name of rank 0, as it may hold the time, and clocks of ranks differ.
    (folder,) = set(distributed.gather([name] if distributed.rank() == 0 else []))
    folder = Path(folder)
    if (folder / "config.json").exists() and not config.resume:
        raise ConfigError(
            f"--output-dir {folder} already holds a run; add --resume or choose another directory."
        )
    held = [name for name in ("checkpoints", "metrics.jsonl") if (folder / name).exists()]
    # Taken for a new run, it would find the names of its checkpoints in use and save nothing.
    if held and not (folder / "config.json").exists():
        raise ConfigError(
            f"--output-dir {folder} has {' and '.join(held)} of a run, but no config.json; put it "
            "back, or choose another directory."
        )
    distributed.barrier()  # every rank has looked before one writes
    return folder


def open_run_directory(folder: Path) -> None:
    """Create it if need be; ValueError if nothing can be written there."""
    with writing("--output-dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # mkdir also succeeds on a directory that exists and is read-only. One probe per rank.
        probe = folder / f".writable{distributed.rank()}"
        probe.touch()
        probe.unlink()


def lock_directory(folder: Path) -> IO | None:
    """Keep other processes out of the run directory while the returned file is open: the ranks of a
    launcher that was killed may still be writing there.
    """
    if distributed.rank() > 0:
        return None
    lock = open(folder / ".lock", "w")
    try:
        # The kernel releases it when the process ends, even by kill -9: no stale lock remains.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(
                f"--output-dir {folder} is in use by another process; end it first."
            ) from error
        print0(
            f"{folder} cannot be locked ({error}): do not start a second run there.",
            file=sys.stderr,
        )
    return lock


def write_config(folder: Path, config: Config) -> None:
    """Make the directory a run. The last step of the set-up, so that a failed start leaves no run;
    renamed into place, so that a kill leaves the old file or the new one.
    """
    if distributed.rank() == 0:
        scratch = folder / "tmp_config.json"
        scratch.write_text(json.dumps(asdict(config), indent=2) + "\n")
        scratch.rename(folder / "config.json")


# ---- models, optimizers, sampler


def build_state(
    config: Config,
    device: torch.device,
    model_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    saved: Path | None,
) -> State:
    """Models, optimizers, sampler and position of a run, from the start model or from the
    checkpoint `saved`.
    """
    compute_dtype = getattr(torch, config.dtype)
    # Float32 masters: a step of 1e-6 is below the spacing of most bfloat16 weights, and lost.
    policy = Transformer.from_pretrained(
        saved / "policy" if saved else model_folder, torch.float32, compute_dtype
    )
    set_head(policy, config, tokenizer)
    limit_threads(policy, device)
    policy = prepare(policy, device, config)
    # The sampler's copy gets the policy's weights below, and again after every update.
    copy = frozen_policy(model_folder, device, config, tokenizer)
    reference = None
    if config.kl_coef:
        # From the start model, also on a resume: the KL is to the policy before the whole run.
        reference = save_memory(frozen_policy(model_folder, device, config, tokenizer), config)
    state = State(
        policy=policy,
        optimizers=make_optimizers(policy, config.lr, config),
        sampler=Sampler(
            copy,
            stop_ids(model_folder, tokenizer),
            config.slots,
            tokenizer,
            kv_cache_tokens=cache_bound(copy.config, config, device),
            cuda_graphs=config.cuda_graphs,
        ),
        order=DataOrder(
            len(problems),
            config.seed,
            config.max_pass_rate,
            [p.digest for p in problems],  # tell on a resume which problems were edited
        ),
        reference=reference,
    )
    if ALGORITHMS[config.algorithm].critic:
        state.critic = prepare(load_critic(model_folder, saved, config), device, config)
        state.critic_optimizers = make_optimizers(state.critic, config.critic_lr, config)
    # After the optimizers were made: their hyper-parameters are those of the flags, not the saved.
    if saved:
        checkpoint.load_trainer_state(state, saved / "trainer_state", problems)
    distributed.copy_weights(state.policy, copy)
    for model, optimizers in state.trained:
        # Nothing trains before the first rollout, so its memory is the sampler's.
        offload(model, optimizers, config)
    return state


def frozen_policy(
    folder: Path, device: torch.device, config: Config, tokenizer: PreTrainedTokenizerBase
) -> Transformer:
    """A complete copy of the policy in the compute dtype, without gradients."""
    model = Transformer.from_pretrained(folder, getattr(torch, config.dtype)).requires_grad_(False)
    model.to(device)
    set_head(model, config, tokenizer)
    return model


def set_head(model: Transformer, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give trainer, sampler and reference the same head: its dtype, and the ids it may draw."""
    # With another head dtype, a reference equal to the policy would already have a KL above 0.
    model.set_head_dtype(getattr(torch, config.head_dtype))
    model.restrict_vocabulary(vocabulary_size(tokenizer))


def load_critic(model_folder: Path, saved: Path | None, config: Config) -> nn.Module:
    """The critic of a checkpoint, or a new one with the backbone of the start model."""
    from critic import Critic  # here, because GRPO works without critic.py

    compute_dtype = getattr(torch, config.dtype)
    if saved:
        return Critic.from_pretrained(saved / "critic", compute_dtype)
    return Critic.from_policy(model_folder, config.critic_value_bias_init, compute_dtype)


def cache_bound(shape: PretrainedConfig, config: Config, device: torch.device) -> int:
    """--kv-cache-tokens, or 0 for what is free when sampling starts. With --async-steps on a GPU an
    update runs at the same time, so there it is what the plan leaves for the cache.
    """
    if config.kv_cache_tokens or not config.async_steps or device.type == "cpu":
        return config.kv_cache_tokens
    return plan.cache_tokens(shape, config, plan.machine_memory(device, config.nproc))


def prepare(model: nn.Module, device: torch.device, config: Config) -> nn.Module:
    """Move to the device, shard over ranks, switch on recomputation."""
    save_memory(model.to(device), config)
    distributed.shard(model, model.model.layers, getattr(torch, config.dtype))
    return model


def save_memory(model: nn.Module, config: Config) -> nn.Module:
    """Switch on what keeps the activations of long sequences small."""
    model.model.gradient_checkpointing = config.activation_checkpointing
    for layer in model.model.layers:
        layer.mlp_chunk_tokens = config.mlp_chunk_tokens
    return model
