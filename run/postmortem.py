"""A loss, an output or a gradient that is not finite: what the run saves of it, and --replay."""

import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import distributed
import files
from config import Config, without_removed
from data import Batch, Problem, Rollout, to_batch
from distributed import print0
from forward import LOSSES, forward_critic, forward_policy, micro_batches, of_rows
from model import Transformer
from problems import vocabulary_size
from run.checkpoint import State
from run.metrics import sample_row
from run.setup import Run, prepare

SAVED = "part error config vocabulary rollouts given".split()  # in minibatch.pt


def save_replay(
    run: Run,
    state: State,
    part: str,
    error: str,
    batch: Batch,
    rows: Sequence[int],
    given: dict[str, Tensor],
) -> Path:
    """Write the weights of `part` and all that its loss reads of the minibatch `rows`; returns the
    file for --replay. rollouts.jsonl beside it is for reading.
    """
    print0(f"\n{error}: saving the minibatch", file=sys.stderr)
    rollouts = [batch.rollouts[i] for i in rows]
    folder = run.folder / f"nonfinite_step_{state.step + 1:06d}"
    file = folder / "minibatch.pt"
    model = getattr(state, part)
    weights = distributed.full_state(model)
    if distributed.rank() == 0:
        model.save_pretrained(folder / part, state_dict=weights)
        saved = {
            "part": part,
            "error": error,
            "config": asdict(run.config),
            "vocabulary": vocabulary_size(state.sampler.tokenizer),
            "rollouts": [vars(r) | {"problem": vars(r.problem)} for r in rollouts],
            "given": {name: x[rows].cpu() for name, x in given.items()},
        }
        torch.save(saved, file)
        (folder / "rollouts.jsonl").unlink(missing_ok=True)
        readable = [sample_row(state.step + 1, r, True) for r in rollouts]
        files.append_jsonl(folder / "rollouts.jsonl", readable)
    distributed.barrier()  # a rank that leaves now would end rank 0 in the middle of it
    return file


def replay(file: Path, device: torch.device, dtype: str) -> None:
    """Compute the loss of a saved minibatch again, by the code of the run, and print what is not
    finite: weights, then inputs and outputs by response, then gradients. dtype: auto is the run's.
    """
    saved = read_saved(file, device)
    config = Config(**without_removed(saved["config"], str(file)))
    part, given = saved["part"], saved["given"]
    compute_dtype = getattr(torch, config.dtype if dtype == "auto" else dtype)
    rollouts = [Rollout(**r | {"problem": Problem(**r["problem"])}) for r in saved["rollouts"]]
    if part == "policy":
        model = Transformer.from_pretrained(file.parent / part, torch.float32, compute_dtype)
        model.set_head_dtype(
            getattr(torch, config.head_dtype) if dtype == "auto" else compute_dtype
        )
        model.restrict_vocabulary(saved["vocabulary"])
    else:
        from critic import Critic

        model = Critic.from_pretrained(file.parent / part, compute_dtype)
    model = prepare(model, device, config)
    print0(f"the run said: {saved['error']}\nreplay in {compute_dtype}:")
    found = [say_nonfinite(f"weight {name}", p.detach()) for name, p in model.named_parameters()]
    batch = to_batch(rollouts, device)
    inputs = {"rollout_logprobs": batch.rollout_logprobs} | given
    for mb in micro_batches(batch, config, "replay"):
        loss, parts = LOSSES[part](model, mb, given, config)
        distributed.backward(loss)
        print0(f"micro-batch: loss {loss.item()}, {parts['nonfinite'][0]:.0f} tokens not finite")
        with torch.no_grad():
            if part == "policy":
                outputs, _ = forward_policy(model, mb, config.temperature)
            else:
                outputs = forward_critic(model, mb)
        per_token = {n: x for n, x in of_rows(inputs, mb).items() if x.ndim == 2} | {part: outputs}
        for i, row in enumerate(mb.rows.tolist()):
            r = rollouts[row]
            who = f"problem {r.problem.id}, sample {r.sample_index}"
            found += [
                say_nonfinite(f"{name} of {who}", x[i, : len(r.response_ids)])
                for name, x in per_token.items()
            ]
    for name, p in model.named_parameters():
        if p.grad is not None:
            found.append(say_nonfinite(f"gradient {name}", p.grad))
    norm = distributed.grad_norm(model, math.inf)
    print0(f"gradient norm {norm}")
    if not any(found) and math.isfinite(norm):
        raise SystemExit("everything is finite: the fault did not come back.")


def read_saved(file: Path, device: torch.device) -> dict:
    """What `save_replay` wrote; ValueError for another file."""
    try:
        saved = torch.load(file, map_location=device, weights_only=True)
        return {name: saved[name] for name in SAVED}
    except OSError as error:
        raise ValueError(f"--replay {file} cannot be read: {error.strerror}.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"--replay {file} is no minibatch.pt that train.py left.") from error


def say_nonfinite(name: str, x: Tensor) -> bool:
    """Print how many elements are not finite, the first and where; False if there is none."""
    bad = (~torch.isfinite(x)).nonzero().tolist()
    if bad:
        first = bad[0]
        print0(
            f"  {name}: {len(bad)} of {x.numel()} not finite, the first at {first}: "
            f"{x[tuple(first)].item()}"
        )
    return bool(bad)
