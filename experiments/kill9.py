"""kill -9 at random moments of a run, resume, and compare with an undisturbed run.

    python -m experiments.kill9 --kills 20

Metrics (except times), samples and weights must be equal bit for bit. Every second kill is aimed
at the short time in which a checkpoint is written. Runs are forked, so a restart costs no import.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path

import train
from config import ROOT

# Partial rollout, because half-finished responses are the hardest part of a state to bring back.
# The verifier has a minute: a time-out on a busy machine would change a reward.
FLAGS = (
    "--steps 6 --num-critic-only-steps 2 --prompts-per-step 4 --group-size 4 --slots 12 "
    "--over-sampling 1.5 --partial-rollout --eval-every 3 --eval-samples 1 --log-samples -1 "
    "--max-response-tokens 48 --verifier-timeout-s 60 --save-every 1 --lr 1e-4 --critic-lr 1e-4"
).split()


def draw_no_figures(folder: Path) -> None:
    """In place of run.metrics.draw_figures."""


def start(folder: Path, data: Path) -> int:
    """Begin or resume the run in its own process; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    # `session` finds by this what outlives a kill
    os.setsid()
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Figures are not compared
    train.run_metrics.draw_figures = draw_no_figures
    resume = ["--resume"] if (folder / "config.json").exists() else []
    try:
        train.main(["--output-dir", str(folder), "--eval-data", str(data), *FLAGS, *resume])
    # _exit, or the fork would go on in the loop of its parent
    except BaseException as error:  # reported by its status, the traceback is in the log
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)


def saving(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any(folder.glob("checkpoints/tmp_*"))


def wait(pid: int, seconds: float, until_saving: Path | None = None) -> bool:
    """True if the process ended well within `seconds`, and before the run in this folder began to
    write a checkpoint. AssertionError if it failed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (until_saving and saving(until_saving)):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0, "the run failed; see its log"
            return True
        time.sleep(0.002)
    return False


def session(pid: int) -> list[int]:
    """Living processes of the session `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name in parentheses, which may hold anything: state, parent, group, session
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[3] == str(pid) and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def kill(pid: int) -> None:
    """kill -9, and make sure that nothing outlives it."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while session(pid):
        assert time.monotonic() < deadline, f"processes outlive the run: {session(pid)}"
        time.sleep(0.05)


def finished_steps(folder: Path) -> tuple[int, int]:
    """Last step in metrics.jsonl (a torn line does not count), newest checkpoint."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(True) if file.exists() else []
    rows = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    saved = [int(p.name[-6:]) for p in folder.glob("checkpoints/step_*")]
    return max(rows, default=0), max(saved, default=0)


def result(folder: Path) -> dict:
    """All that a run leaves, without times."""
    rows = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    for row in rows:
        for key in [k for k in row if k.startswith("perf/") or k == "eval/seconds"]:
            del row[key]
    newest = max(folder.glob("checkpoints/step_*"))
    return {
        "metrics": rows,
        "samples": (folder / "rollouts.jsonl").read_bytes(),
        "weights": [
            (newest / part / "model.safetensors").read_bytes() for part in ("policy", "critic")
        ],
        "leftovers": [str(p.relative_to(folder)) for p in folder.rglob("*tmp_*")],
    }


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    base, chance = Path(tempfile.mkdtemp(prefix="kill9-")), random.Random(args.seed)
    data = base / "eval.jsonl"
    lines = (ROOT / "assets/eval.jsonl").read_text().splitlines(True)
    data.write_text("".join(lines[:8]))
    begin = time.monotonic()
    assert wait(start(base / "calm", data), 600)
    calm_s, calm = time.monotonic() - begin, result(base / "calm")
    print(f"undisturbed: {calm_s:.1f} s; logs in {base}", flush=True)
    kills = runs = 0
    while kills < args.kills:
        runs, folder = runs + 1, base / f"run{runs}"
        while True:
            pid, aimed = start(folder, data), kills % 2 == 1
            if kills == args.kills:
                ended = wait(pid, 600)
            # The second wait is seconds into the save
            elif aimed:
                ended = wait(pid, 600, until_saving=folder) or wait(pid, chance.uniform(0, 0.1))
            else:
                ended = wait(pid, chance.uniform(0, 0.7 * calm_s))
            if ended:
                break
            during = "a save" if saving(folder) else "a step"
            kill(pid)
            kills += 1
            row, saved = finished_steps(folder)
            print(f"kill {kills} in {during}: {row} steps logged, {saved} saved", flush=True)
            # A step is logged before it is saved, so one row more may be there
            assert saved <= row <= saved + 1, "more than the current step is lost"
        for name, value in result(folder).items():
            assert value == calm[name], f"{name} of {folder} differ from those of {base / 'calm'}"
    print(f"{kills} kills in {runs} runs: metrics, samples and weights equal bit for bit")


if __name__ == "__main__":
    main()
