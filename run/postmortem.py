"""A loss, an output or a gradient that is not finite: what the run saves of it, and --replay."""

import math
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

import distributed
import files
from algorithms import ALGORITHMS
from config import Config
from data import Batch, Problem, Rollout, micro_batches, to_batch
from distributed import print0
from model import Transformer
from problems import vocabulary_size
from run.metrics import Sums, sample_row
from run.setup import prepare
from run.state import Run, State

SAVED = "part error step config vocabulary rollouts tensors".split()  # in minibatch.pt


def check_finite(part: str, step: int, nonfinite: Tensor, loss: Tensor) -> None:
    """Raise FloatingPointError on every rank if a rank counted tokens that are not finite in its
    share of a minibatch, or has a loss that is not. Not one rank alone: the others would wait.
    """
    counts = [float(nonfinite), float(not math.isfinite(loss))]
    bad_tokens, bad_losses = distributed.sum_on_device(counts)
    if bad_tokens or bad_losses:
        raise FloatingPointError(
            f"the {part} is not finite in step {step + 1}: {bad_tokens:.0f} tokens not finite, "
            f"a loss of {float(loss)}"
        )


@contextmanager
def saves_minibatch(
    run: Run,
    state: State,
    part: str,
    batch: Batch,
    rows: Sequence[int],
    row_weights: Tensor,
    inputs: NamedTuple,
) -> Iterator[None]:
    """On a FloatingPointError within, write the weights of `part` and what its loss reads of the
    minibatch `rows` for --replay, and re-raise the error with the paths of both.

    row_weights (N,) and the fields of `inputs` (N, T) are what the loss reads besides the model.
    """
    try:
        yield
    except FloatingPointError as error:
        if run.folder is None:  # this is the replay
            raise
        tensors = {"row_weights": row_weights} | inputs._asdict()
        file = save_minibatch(run, state, part, str(error), batch, rows, tensors)
        saved = files.checkpoints(run.folder)
        newest = f"the newest checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise FloatingPointError(
            f"{error}. It changed nothing, and {newest}; look at the cause with --replay {file}"
        ) from None


def save_minibatch(
    run: Run,
    state: State,
    part: str,
    error: str,
    batch: Batch,
    rows: Sequence[int],
    tensors: dict[str, Tensor | None],
) -> Path:
    """Write minibatch.pt and, for a reader, rollouts.jsonl next to it; returns the former."""
    print0(f"\n{error}: saving the minibatch", file=sys.stderr)
    rollouts = [batch.rollouts[i] for i in rows]
    folder = run.folder / f"nonfinite_step_{state.step + 1:06d}"
    file = folder / "minibatch.pt"
    model = getattr(state, part)
    # A collective, so every rank calls it, although rank 0 alone writes.
    weights = distributed.full_state(model)
    if distributed.rank() == 0:
        model.save_pretrained(folder / part, state_dict=weights)
        saved = {
            "part": part,
            "error": error,
            "step": state.step,
            "config": asdict(run.config),
            "vocabulary": vocabulary_size(state.sampler.tokenizer),  # the replay has no tokenizer
            "rollouts": [vars(r) | {"problem": vars(r.problem)} for r in rollouts],
            "tensors": {name: x[rows].cpu() for name, x in tensors.items() if x is not None},
        }
        torch.save(saved, file)
        # A resumed run may meet the fault again in the same step, and appending would mix both.
        (folder / "rollouts.jsonl").unlink(missing_ok=True)
        readable = [sample_row(state.step + 1, r, True) for r in rollouts]
        files.append_jsonl(folder / "rollouts.jsonl", readable)
    distributed.barrier()  # a rank that left now would end rank 0 in the middle of writing
    return file


# ---- --replay

# train.policy_minibatch or train.critic_minibatch, and the type of its inputs
Step = tuple[Callable, type[NamedTuple]]


def replay(file: Path, device: torch.device, dtype: str, steps: dict[str, Step]) -> None:
    """Compute a saved minibatch again by the code of the run and print what is not finite: weights,
    then inputs and outputs by response, then gradients.

    dtype: auto is the run's. steps: for `policy` and `critic`, the function that takes an optimizer
    step on a minibatch, and the type of its inputs.
    """
    saved = read_saved(file, device)
    config, part = Config(**saved["config"]), saved["part"]
    # Not clipped, so that the gradients are printed as the backward left them.
    config.max_grad_norm = math.inf
    model = load_part(saved, config, file.parent / part, dtype, device)
    print0(f"the run said: {saved['error']}\nreplay in {model.model.compute_dtype}:")
    # In the order in which a NaN spreads: what is named first is nearest to the cause.
    found = [say_nonfinite(f"weight {name}", p.detach()) for name, p in model.named_parameters()]
    rollouts = [Rollout(**r | {"problem": Problem(**r["problem"])}) for r in saved["rollouts"]]
    batch = to_batch(rollouts, device)
    step, inputs_type = steps[part]
    row_weights = saved["tensors"].pop("row_weights")
    inputs = inputs_type(**saved["tensors"])
    found += say_tokens(model, part, batch, saved["tensors"], config)
    # Without a folder nothing is written, without optimizers no weight changes.
    run = SimpleNamespace(config=config, row=ALGORITHMS[config.algorithm], folder=None)
    state = State(policy=None, optimizers=(), sampler=None, order=None, step=saved["step"])
    setattr(state, part, model)
    try:
        step(run, state, batch, range(len(rollouts)), row_weights, inputs, Sums())
    except FloatingPointError as error:
        print0(error)
    for name, p in model.named_parameters():
        if p.grad is not None:
            found.append(say_nonfinite(f"gradient {name}", p.grad))
    # Finite gradients can have a norm that overflows float32: their squares are summed.
    norm = float(distributed.full(distributed.grad_norm(model)))
    print0(f"gradient norm {norm}")
    if not any(found) and math.isfinite(norm):
        raise SystemExit("everything is finite: the fault did not come back.")


def load_part(
    saved: dict, config: Config, folder: Path, dtype: str, device: torch.device
) -> nn.Module:
    """The policy or the critic whose weights were saved with a minibatch."""
    compute_dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    if saved["part"] == "policy":
        model = Transformer.from_pretrained(folder, torch.float32, compute_dtype)
        # --dtype float32 asks whether precision is the cause, so it must reach the head as well.
        head_dtype = getattr(torch, config.head_dtype) if dtype == "auto" else compute_dtype
        model.set_head_dtype(head_dtype)
        model.restrict_vocabulary(saved["vocabulary"])
    else:
        from critic import Critic

        model = Critic.from_pretrained(folder, compute_dtype)
    return prepare(model, device, config)


@torch.no_grad()
def say_tokens(
    model: nn.Module, part: str, batch: Batch, tensors: dict[str, Tensor], config: Config
) -> list[bool]:
    """`say_nonfinite` of every per-token input and of the model's output, response by response."""
    found, inputs = [], {"rollout_logprobs": batch.rollout_logprobs} | tensors
    for mb in micro_batches(batch, config.max_tokens_per_micro_batch, "replay"):
        states = mb.input_ids, mb.cu_seqlens, mb.action_index
        if part == "policy":
            outputs, _ = model(*states, mb.targets, config.temperature)
        else:
            outputs = model(*states)
        # (R, T) of the micro-batch, whose rows are in another order than the batch: see `mb.rows`.
        per_token = {name: mb.rows_of(x) for name, x in inputs.items()}
        per_token[part] = mb.unpack(outputs)
        for i, row in enumerate(mb.rows.tolist()):
            r = batch.rollouts[row]
            who = f"problem {r.problem.id}, sample {r.sample_index}"
            found += [
                say_nonfinite(f"{name} of {who}", x[i, : len(r.response_ids)])
                for name, x in per_token.items()
            ]
    return found


def read_saved(file: Path, device: torch.device) -> dict:
    """What `save_minibatch` wrote; ValueError for another file."""
    try:
        # weights_only: such files are sent to others, and a pickle could run code.
        saved = torch.load(file, map_location=device, weights_only=True)
        return {name: saved[name] for name in SAVED}
    except OSError as error:
        raise ValueError(f"--replay {file} cannot be read: {error.strerror}.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(
            f"--replay {file} is not a minibatch.pt that this version of train.py saved."
        ) from error


def say_nonfinite(name: str, x: Tensor) -> bool:
    """Print how many elements are not finite, and the first of them; False if all are finite."""
    bad = (~torch.isfinite(x)).nonzero().tolist()
    if bad:
        first = bad[0]
        print0(
            f"  {name}: {len(bad)} of {x.numel()} not finite, the first at {first}: "
            f"{x[tuple(first)].item()}"
        )
    return bool(bad)
