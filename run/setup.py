"""The start of a run: all that can be wrong is checked, its directory opened and locked, models,
optimizers and sampler built or taken from a checkpoint.
"""

import errno
import fcntl
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

import algorithms
import distributed
from config import ROOT, Config, ConfigError
from data import DataOrder, Problem
from distributed import print0
from files import writing
from model import Transformer, limit_threads, load_config, local_folder
from problems import load_problems, load_tokenizer, stop_ids, think_mode, vocabulary_size
from rewards import ANSWERS, Verifier
from rollout import Sampler
from run import checkpoint, metrics, plan
from run.checkpoint import State
from run.optimizer import leave, make_optimizers


@dataclass
class Run:
    """What stays the same during a run."""

    config: Config
    row: algorithms.Algorithm
    device: torch.device
    folder: Path
    problems: list[Problem]
    eval_problems: list[Problem]
    grader: Verifier
    report: Callable[[int, dict[str, float]], None]  # step and metrics, to --report-to
    lock: IO | None  # held as long as the run


def set_up(config: Config, device: torch.device) -> tuple[Run, State]:
    """Check everything that can be wrong before anything is sampled, then build or resume models
    and optimizers.
    """
    folder = run_directory(config)
    start = local_folder(config.model)
    shape, tokenizer = load_config(start), load_tokenizer(start)
    read = lambda path: load_problems(
        path,
        tokenizer,
        config.max_prompt_tokens,
        config.prompt_key,
        config.label_key,
        config.prompt_suffix,
    )
    problems, dropped = read(config.data)
    eval_problems, eval_dropped = read(config.eval_data) if config.eval_data else ([], 0)
    if dropped + eval_dropped:
        print0(
            f"dropped {dropped} training and {eval_dropped} held-out prompts above "
            f"{config.max_prompt_tokens} tokens"
        )
    config.think = think_mode(config.think, problems)
    if config.head_dtype == "auto":
        config.head_dtype = config.dtype
    if config.reward == "majority" and {p.verifier for p in problems} - set(ANSWERS):
        raise ConfigError("--reward majority compares answers: math and choice problems have one.")
    ranks = distributed.world_size()
    if config.async_steps and ranks > 1:
        raise ConfigError("--async-steps works in one process; start without torchrun.")
    if concern := plan.concern(shape, config, device, ranks, distributed.ranks_here()):
        print0(f"WARNING: {concern}", file=sys.stderr)
    open_run_directory(folder)
    lock = lock_directory(folder)
    saved = checkpoint.newest(folder) if config.resume else None
    state = begin(config, device, start, tokenizer, problems, saved)
    grader = Verifier(num_workers=config.verifier_workers, timeout_s=config.verifier_timeout_s)
    report = metrics.open_reporter(folder, config, state.step)
    if state.step < config.steps:  # else no step will use what the flags change
        write_config(folder, config)
    row = algorithms.ALGORITHMS[config.algorithm]
    return Run(config, row, device, folder, problems, eval_problems, grader, report, lock), state


# ---- the directory


def run_directory(config: Config) -> Path:
    """The run directory, the same on every rank; ConfigError if it holds another run."""
    name = config.output_dir or str(
        ROOT / "runs" / f"{config.algorithm}-{datetime.now():%Y%m%d-%H%M%S}"
    )
    (folder,) = set(distributed.gather([name] if distributed.rank() == 0 else []))
    folder = Path(folder)
    if (folder / "config.json").exists() and not config.resume:
        raise ConfigError(
            f"--output-dir {folder} already holds a run; add --resume or choose another directory."
        )
    held = [name for name in ("checkpoints", "metrics.jsonl") if (folder / name).exists()]
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
        probe = folder / f".writable{distributed.rank()}"
        probe.touch()
        probe.unlink()


def lock_directory(folder: Path) -> IO | None:
    """Keep other processes out of the run directory while the returned file is open: what a killed
    launcher left behind may still be writing there.
    """
    if distributed.rank() > 0:
        return None
    lock = open(folder / ".lock", "w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(
                f"--output-dir {folder} is in use by another process; end it first."
            ) from error
        print0(f"{folder} cannot be locked ({error}): start no second run there.", file=sys.stderr)
    return lock


def write_config(folder: Path, config: Config) -> None:
    """Make the directory a run: the last act of the set-up, so that a failed start leaves none
    behind. Renamed into place, so that a kill leaves the old file or the new one.
    """
    if distributed.rank() == 0:
        scratch = folder / "tmp_config.json"
        scratch.write_text(json.dumps(asdict(config), indent=2) + "\n")
        scratch.rename(folder / "config.json")


# ---- models, optimizers, sampler


def begin(
    config: Config,
    device: torch.device,
    start: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    saved: Path | None,
) -> State:
    """Models, optimizers, sampler and position of a run, from the model directory `start` or the
    checkpoint `saved`.
    """
    compute_dtype = getattr(torch, config.dtype)
    policy = Transformer.from_pretrained(
        saved / "policy" if saved else start, torch.float32, compute_dtype
    )
    limit_threads(policy, device)
    policy = prepare(policy, device, config)
    frozen = lambda: Transformer.from_pretrained(start, compute_dtype).requires_grad_(False)
    whole = frozen().to(device)
    reference = spare_memory(frozen().to(device), config) if config.kl_coef else None
    for model in (policy, whole, reference):
        if model is not None:
            model.set_head_dtype(getattr(torch, config.head_dtype))
            model.restrict_vocabulary(vocabulary_size(tokenizer))
    sampler = Sampler(
        whole,
        stop_ids(start, tokenizer),
        config.slots,
        tokenizer,
        kv_cache_tokens=cache_bound(whole.config, config, device),
        cuda_graphs=config.cuda_graphs,
    )
    state = State(
        policy,
        make_optimizers(policy, config.lr, config),
        sampler,
        DataOrder(
            len(problems),
            config.seed,
            config.max_pass_rate,
            [p.digest for p in problems],
        ),
        reference=reference,
    )
    if algorithms.ALGORITHMS[config.algorithm].critic:
        from critic import Critic

        if saved:
            critic = Critic.from_pretrained(saved / "critic", compute_dtype)
        else:
            critic = Critic.from_policy(start, config.critic_value_bias_init, compute_dtype)
        state.critic = prepare(critic, device, config)
        state.critic_optimizers = make_optimizers(state.critic, config.critic_lr, config)
    if saved:
        checkpoint.load_trainer_state(state, saved / "trainer_state", problems)
    distributed.copy_weights(state.policy, whole)
    for model, optimizers in state.trained:
        leave(model, optimizers, config)
    return state


def cache_bound(shape: PretrainedConfig, config: Config, device: torch.device) -> int:
    """--kv-cache-tokens; where that is left to the sampler and an update runs beside it on the same
    GPU, what the plan leaves for it. 0: what is free when sampling starts.
    """
    if config.kv_cache_tokens or not config.async_steps or device.type == "cpu":
        return config.kv_cache_tokens
    return plan.cache_tokens(shape, config, plan.machine_memory(device, config.nproc))


def prepare(model: nn.Module, device: torch.device, config: Config) -> nn.Module:
    """Move to the device, shard over ranks, switch on recomputation."""
    spare_memory(model.to(device), config)
    distributed.shard(model, model.model.layers, getattr(torch, config.dtype))
    return model


def spare_memory(model: nn.Module, config: Config) -> nn.Module:
    """Switch on what keeps the activations of long sequences small."""
    model.model.gradient_checkpointing = config.activation_checkpointing
    for layer in model.model.layers:
        layer.mlp_chunk_tokens = config.mlp_chunk_tokens
    return model
