"""Checkpoints: everything that a run needs to continue bit for bit.

    checkpoints/step_000010/policy/         a Hugging Face directory
                            critic/         the same, with the value head
                            trainer_state   optimizers, counters, data position, unfinished rollouts
                            manifest.json   size and CRC-32 of every other file; written last

A checkpoint is written under a temporary name, flushed to the disk, then renamed: one with its
final name is complete. At the next start a *missing* file is an error (a policy must not continue
with a new critic); with a *damaged* file the previous checkpoint is used, with a warning.
"""

import json
import os
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import distributed
import files
from data import Problem, Rollout
from distributed import print0
from rollout import Collected
from run.metrics import warn
from run.optimizer import on_device
from run.state import Run, State

MANIFEST = "manifest.json"


# ---- counters, data position and rollouts


def position(state: State) -> dict:
    """Counters, data position and unfinished rollouts, in plain types. Copied, because sampling
    changes them in place.
    """
    return {
        "step": state.step,
        "critic_steps": state.critic_steps,
        "empty_steps": state.empty_steps,  # three in a row end a run, also across a resume
        "start_entropy": state.start_entropy,  # a collapse counts from the run's first update
        # The ages of tokens in the buffer count from it: --max-staleness, rollout/version_lag.
        "weight_version": state.sampler.weight_version,
        "order": copied(state.order.state_dict()),
        "buffer": [[plain(r) for r in group] for group in state.buffer],
        "ahead": state.ahead
        and {
            "finished": [[plain(r) for r in group] for group in state.ahead.finished],
            # By number: kept groups are among the finished ones, and stored once.
            "kept": [group[0].group for group in state.ahead.groups],
            "counts": dict(state.ahead.counts),
            "seconds": state.ahead.seconds,
        },
    }


def set_position(state: State, saved: dict, problems: Sequence[Problem]) -> None:
    """Go back to what `position` returned. Where an edited data file has another problem in the
    place of an old one, the old one's rollouts and pass rate are dropped, with a warning.
    """
    state.step, state.critic_steps = saved["step"], saved["critic_steps"]
    state.empty_steps, state.start_entropy = saved["empty_steps"], saved["start_entropy"]
    state.sampler.weight_version = saved["weight_version"]
    if gone := state.order.load_state_dict(saved["order"]):
        print0(
            f"WARNING: --data was edited: {len(gone)} of its {len(problems)} problems have changed;"
            " their pass rates and unfinished rollouts are dropped.",
            file=sys.stderr,
        )
    state.buffer, ahead = restored(saved["buffer"], problems, gone), saved["ahead"]
    if ahead:
        finished = restored(ahead["finished"], problems, gone)
        # The kept groups are again the same objects as in `finished`, not copies.
        by_number = {group[0].group: group for group in finished}
        kept = [by_number[number] for number in ahead["kept"] if number in by_number]
        state.ahead = Collected(
            kept, state.buffer, finished, Counter(ahead["counts"]), ahead["seconds"]
        )


def restored(
    groups: Sequence[Sequence[dict]], problems: Sequence[Problem], gone: set[int]
) -> list[list[Rollout]]:
    """Groups of rollouts as `plain` wrote them, except those of problems that are `gone`."""
    return [
        [Rollout(**r | {"problem": problems[r["problem"]]}) for r in group]
        for group in groups
        if group[0]["problem"] not in gone
    ]


def plain(rollout: Rollout) -> dict:
    """Fields of a rollout, its problem by index. Not `asdict`, which copies token by token."""
    return copied(vars(rollout)) | {"problem": rollout.problem.index}


def copied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with copies of those that are lists."""
    return {k: list(v) if isinstance(v, list) else v for k, v in fields.items()}


# ---- writing


def save(run: Run, state: State) -> None:
    """Write checkpoints/step_N of the run, then drop all but the newest --keep-checkpoints (0: drop
    none).

    Raises OSError on every rank if it cannot be written; older checkpoints stay as they are.
    """
    folder, keep = run.folder, run.config.keep_checkpoints
    final = folder / "checkpoints" / f"step_{state.step:06d}"
    if distributed.any_rank(final.exists()):  # on a network one rank may see it later than another
        return
    scratch, failure = final.with_name("tmp_" + final.name), None
    # Every rank takes part in gathering each part, even if writing has failed on rank 0.
    for write in chain(parts(run, state), [publish]):
        if distributed.rank() == 0 and failure is None:
            try:
                write(scratch)
            # A full disk, as the system, safetensors and torch.save report it.
            except (OSError, SafetensorError, RuntimeError) as error:
                failure = error
    # All raise or none: otherwise the other ranks would wait for rank 0 in their next collective.
    if distributed.any_rank(failure is not None):
        shutil.rmtree(scratch, ignore_errors=True)
        reason = failure or "rank 0 says why"
        raise OSError(f"checkpoint {final} could not be written: {reason}. Is the disk full?")
    if distributed.rank() == 0 and keep:  # only now: the new one is complete
        for old in files.checkpoints(folder)[:-keep]:
            remove(old)


def save_or_warn(run: Run, state: State) -> None:
    """Save during the run: a full disk costs this checkpoint, not the run."""
    try:
        save(run, state)
    except OSError as error:
        warn(
            state.step,
            f"{error} The run continues; until the next checkpoint a kill loses all since the "
            "last. Make room.",
        )


def parts(run: Run, state: State) -> Iterator[Callable[[Path], None]]:
    """Gather the parts of a checkpoint over the ranks, one model at a time; each as the function
    that writes it into a directory.
    """
    # One model at a time: host memory never holds both with their moments.
    trainer_state = position(state)
    for name, key in (("policy", "optimizer"), ("critic", "critic_optimizer")):
        model, optimizers = state.part(name)
        if model is not None:
            # Gathering shards is work for the device, so --offload's moments come there too.
            with on_device(model, optimizers, run.device, run.config, moments=True):
                weights = distributed.full_state(model)
                trainer_state[key] = distributed.optimizer_state(model, optimizers)
            yield partial(write_model, state, name, weights)
    # Last: only now does it hold the moments of both models.
    yield lambda folder: torch.save(trainer_state, folder / "trainer_state")


def write_model(state: State, name: str, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Policy or critic in the directory of its name, the policy with its tokenizer."""
    getattr(state, name).save_pretrained(folder / name, state_dict=weights)
    # With a tokenizer the directory is a model of its own, which eval.py can load.
    if name == "policy":
        state.sampler.tokenizer.save_pretrained(folder / name)


def publish(scratch: Path) -> None:
    """Record size and CRC of every file, flush all to the disk, only then give the final name."""
    written = sorted(file for file in scratch.rglob("*") if file.is_file())
    sums = {str(file.relative_to(scratch)): [file.stat().st_size, crc32(file)] for file in written}
    (scratch / MANIFEST).write_text(json.dumps(sums, indent=1) + "\n")
    # Directories too: a name that is not flushed is lost with the power.
    for path in (*scratch.rglob("*"), scratch):
        flush(path)
    scratch.rename(scratch.with_name(scratch.name.removeprefix("tmp_")))
    flush(scratch.parent)  # the rename, which is an entry of that directory


def crc32(file: Path) -> int:
    """CRC-32 of the contents, about 1 GB/s."""
    total = 0
    with open(file, "rb") as data:
        while block := data.read(1 << 20):
            total = zlib.crc32(block, total)
    return total


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Renamed first, so that a kill in between does not leave half of it under
    its final name.
    """
    shutil.rmtree(folder.rename(folder.with_name("tmp_" + folder.name)))


# ---- reading


def newest(folder: Path) -> Path | None:
    """The newest undamaged checkpoint of the run in `folder`, on every rank; None if there is none
    yet.

    Warns about each that it skips. Raises FileNotFoundError for a missing file, ValueError if
    every checkpoint is damaged.
    """
    # One rank looks for all. On a network file system each might see another newest checkpoint.
    found = []
    if distributed.rank() == 0:
        for leftover in (folder / "checkpoints").glob("tmp_*"):  # of a save that was killed
            shutil.rmtree(leftover)
        found = [newest_undamaged(folder)]
    return distributed.gather(found)[0]


def newest_undamaged(folder: Path) -> Path | None:
    """The newest checkpoint whose files are what was written; newer, damaged ones are renamed to
    damaged_step_N.
    """
    damaged: list[tuple[Path, str]] = []
    # From the newest, and no further than needed: a CRC reads every byte.
    for candidate in reversed(files.checkpoints(folder)):
        if problem := damage(candidate):
            damaged.append((candidate, problem))
            continue
        # Renamed only now that a good one is found: if all are damaged, they stay where they are.
        for path, problem in damaged:
            away = path.with_name("damaged_" + path.name)
            shutil.rmtree(away, ignore_errors=True)
            path.rename(away)
            print0(
                f"WARNING: {problem}. Going back: {candidate} is used, the damaged one is kept as "
                f"{away.name}.",
                file=sys.stderr,
            )
        return candidate
    if damaged:
        raise ValueError(
            f"every checkpoint in {folder / 'checkpoints'} is damaged ({damaged[0][1]}); put back "
            "a good copy, or delete them all to start this run again."
        )
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, if anything; FileNotFoundError if one is
    missing.
    """
    require(checkpoint, MANIFEST)
    try:
        sums = json.loads((checkpoint / MANIFEST).read_text())
    except ValueError:
        return f"{checkpoint / MANIFEST} is damaged"
    # All names before any contents: a missing file must stop the run, not fall back silently.
    for name in sums:
        require(checkpoint, name)
    for name, (written, crc) in sums.items():
        file = checkpoint / name
        # The size first: it needs no reading.
        if (size := file.stat().st_size) != written:
            return f"{file} has {size} bytes, not the {written} that were written"
        if crc32(file) != crc:
            return f"{file} is not what was written (its CRC-32 differs)"
    return None


def require(checkpoint: Path, name: str) -> None:
    """FileNotFoundError unless the checkpoint has the file."""
    if not (checkpoint / name).exists():
        raise FileNotFoundError(
            f"{checkpoint / name} is missing: a checkpoint without its {Path(name).parts[0]} "
            f"cannot be resumed. Put it back, or delete {checkpoint} to use the one before."
        )


def load_trainer_state(state: State, file: Path, problems: Sequence[Problem]) -> None:
    """Position and optimizers of a checkpoint."""
    # weights_only: plain types and tensors, since a pickle could run code.
    saved = torch.load(file, map_location="cpu", weights_only=True)
    set_position(state, saved, problems)
    distributed.load_optimizer_state(state.policy, state.optimizers, saved["optimizer"])
    if state.critic is not None:
        distributed.load_optimizer_state(
            state.critic, state.critic_optimizers, saved["critic_optimizer"]
        )
