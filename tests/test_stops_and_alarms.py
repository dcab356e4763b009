"""Signals, dead ranks, losses that are not finite, alarms."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, SMALL, HashGrader, read_metrics, same, train_run, weights

import train
from run import alarms
from run.signals import handle_signals

LAUNCH = [sys.executable, "train.py", "--eval-data", "", *SMALL]


pytestmark = pytest.mark.usefixtures("mixed_rewards", "no_figures")


# ---- signals


def interrupting(monkeypatch, number, when):
    """Send this process a signal as soon as `when(number of decode steps so far)`."""
    decode, calls = train.rollout.Sampler._decode, []

    def spy(self, *args):
        calls.append(1)
        if when(len(calls)):
            os.kill(os.getpid(), number)
        return decode(self, *args)

    monkeypatch.setattr(train.rollout.Sampler, "_decode", spy)
    return calls


def test_sigterm_stops_sampling_and_saves_the_last_finished_step_exactly(
    random_tiny_model, tmp_path, monkeypatch
):
    flags = "--steps 3 --num-critic-only-steps 1 --over-sampling 2 --partial-rollout --slots 10 "
    flags += "--save-every 0 --lr 1e-3"
    whole = train_run(tmp_path / "a", *flags.split(), model=random_tiny_model)
    with monkeypatch.context() as patch:
        calls = interrupting(patch, signal.SIGTERM, lambda n: n == 40)
        rows = train_run(tmp_path / "b", *flags.split(), model=random_tiny_model)
    assert len(calls) == 40  # not one token more
    done = max(rows)
    assert 0 < done < 3 and (tmp_path / f"b/checkpoints/step_{done:06d}/manifest.json").exists()
    train.main(["--resume", "--output-dir", str(tmp_path / "b")])
    resumed = read_metrics(tmp_path / "b")

    def numbers(rows):
        return {s: {k: v for k, v in row.items() if "perf/" not in k} for s, row in rows.items()}

    assert numbers(resumed) == numbers(whole)
    lines = [(tmp_path / f / "rollouts.jsonl").read_bytes() for f in "ab"]
    assert lines[0] == lines[1]
    for part in ("policy", "critic"):
        assert same(weights(tmp_path / "a", 3, part), weights(tmp_path / "b", 3, part))


def test_sigterm_in_an_update_finishes_the_step(random_tiny_model, tmp_path, monkeypatch):
    update = train.update_policy

    def preempted(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(train, "update_policy", preempted)
    rows = train_run(tmp_path / "r", "--steps", 3, "--algorithm", "grpo", model=random_tiny_model)
    assert sorted(rows) == [1] and (tmp_path / "r/checkpoints/step_000001").exists()


def test_sigterm_in_the_first_evaluation_leaves_it_to_the_next_start(
    random_tiny_model, tmp_path, monkeypatch
):
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "1 a:+1", "label": "2"}\n')
    flags = ["--steps", 1, "--algorithm", "grpo", "--eval-data", data]
    with monkeypatch.context() as patch:
        interrupting(patch, signal.SIGTERM, lambda n: n == 3)
        train.main(list(map(str, ["--output-dir", tmp_path / "r", *SMALL, *flags])))
    assert not (tmp_path / "r/metrics.jsonl").exists()
    train.main(["--resume", "--output-dir", str(tmp_path / "r")])
    rows = read_metrics(tmp_path / "r")
    assert "eval/accuracy" in rows[0] and "eval/accuracy" in rows[1]


@pytest.mark.parametrize("which", ["middle", "last"])
def test_an_evaluation_that_sigterm_cut_short_is_made_by_the_resume(
    which, random_tiny_model, tmp_path, monkeypatch
):
    """A finished run was left without its last accuracy, and no --resume ever made it."""
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "1 a:+1", "label": "2"}\n' * 3)
    flags = f"--steps 2 --eval-every 1 --algorithm grpo --lr 1e-3 --eval-data {data}".split()
    whole = train_run(tmp_path / "a", *flags, model=random_tiny_model)
    calls, evaluate = [], train.rollout.evaluate

    def preempted(*args, **options):
        calls.append(1)
        if len(calls) == (2 if which == "middle" else 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train.rollout, "evaluate", preempted)
        cut = train_run(tmp_path / "b", *flags, model=random_tiny_model)
    assert "eval/accuracy" not in cut[max(cut)] and max(cut) == (1 if which == "middle" else 2)
    train.main(["--resume", "--output-dir", str(tmp_path / "b")])

    def timeless(rows):
        return [
            {k: v for k, v in row.items() if "perf/" not in k and k != "eval/seconds"}
            for row in rows.values()
        ]

    assert timeless(read_metrics(tmp_path / "b")) == timeless(whole)
    before = (tmp_path / "b/metrics.jsonl").read_bytes()
    train.main(["--resume", "--output-dir", str(tmp_path / "b")])
    assert (tmp_path / "b/metrics.jsonl").read_bytes() == before


def test_a_signal_in_the_middle_of_a_print_is_no_reentrant_call(monkeypatch, capfd):
    """Buffered IO raises RuntimeError when a handler prints while a print is being interrupted."""

    class Busy:
        def write(self, *_):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

        flush = write

    state = SimpleNamespace(stop=False, sampler=SimpleNamespace(interrupted=False))
    with handle_signals(state, train.Config()), monkeypatch.context() as patch:
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, Busy())
        os.kill(os.getpid(), signal.SIGTERM)
    assert state.stop and state.sampler.interrupted
    assert capfd.readouterr().err == "\nSIGTERM: saving, then leaving\n"


def begin(folder, *flags):
    """Two ranks, once they have finished a step; (launcher, ids of the ranks)."""
    command = [*LAUNCH, "--output-dir", folder, "--steps", "500", "--nproc", "2", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, **pipes)
    deadline = time.time() + 120
    file = folder / "metrics.jsonl"
    while not (file.exists() and file.stat().st_size) and time.time() < deadline:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return process, list(map(int, children.split()))


def gone(pids):
    return [p for p in pids if not Path(f"/proc/{p}").exists()]


@pytest.mark.slow
def test_sigterm_to_two_ranks_saves_and_exits_0(tmp_path):
    process, ranks = begin(tmp_path / "r")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    last = max(read_metrics(tmp_path / "r"))
    assert (tmp_path / f"r/checkpoints/step_{last:06d}/manifest.json").exists()
    assert gone(ranks) == ranks and "SIGTERM: saving" in output


def launch(tmp_path, body):
    """Two ranks of a small script; (finished process, seconds)."""
    script = tmp_path / "ranks.py"
    script.write_text(
        f"import os, signal, sys, time, traceback; sys.path.insert(0, {str(ROOT)!r})\n"
        "import distributed\n"
        "distributed.launch(2)\n"
        "with distributed.joined('cpu'):\n"
        "    distributed.barrier()\n"
        "    begun, rank = time.time(), distributed.rank()\n"
        "    print(begun, flush=True) if rank == 0 else None\n" + textwrap.indent(body, "    ")
    )
    command = [sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return result, time.time() - float(result.stdout.split()[0])


def test_a_dead_rank_ends_one_that_decodes_and_waits_for_nothing(tmp_path):
    body = "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(100)\n"
    result, seconds = launch(tmp_path, body)
    assert result.returncode == 1 and seconds < 60
    assert "error: rank 1 was killed by SIGKILL, and the others were ended" in result.stderr


def test_the_launcher_passes_sigterm_on_and_waits(tmp_path):
    body = (
        "def save(*_): time.sleep(1); os.write(1, b'saved by %d\\n' % rank); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "distributed.barrier()\n"
        "os.kill(os.getppid(), signal.SIGTERM) if rank == 1 else None\n"
        "time.sleep(100)\n"
    )
    result, seconds = launch(tmp_path, body)
    assert result.returncode == 0 and seconds < 60, result.stderr
    assert "saved by 0" in result.stdout and "saved by 1" in result.stdout


def test_the_cause_is_told_before_the_lost_connections(tmp_path):
    body = (
        "try:\n"
        "    if rank == 1: raise RuntimeError('the cause')\n"
        "    distributed.barrier()\n"
        "except Exception: distributed.exit_with(traceback.format_exc())\n"
    )
    result, seconds = launch(tmp_path, body)
    assert result.returncode == 1 and seconds < 60
    assert result.stderr.startswith("rank 1: Traceback")
    assert "the cause" in result.stderr.split("rank 0: ")[0]
    # Rank 0 may fall within the same look of the launcher, which then names it.
    assert re.search(r"error: rank [01] ended with status 1, and the others", result.stderr)


def test_no_rank_reads_a_file_that_is_still_to_be_cut(tmp_path):
    """Else one rank could fail at the torn line, or skip an evaluation that the other begins."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "cut o')
    body = (
        "import pathlib\n"
        "from run import metrics\n"
        "cut = os.truncate\n"
        "os.truncate = lambda *args: (time.sleep(1), cut(*args))\n"
        f"file = pathlib.Path({str(file)!r})\n"
        "metrics.forget_after(file, 0)\n"
        "os.write(1, b'rank %d holds %r\\n' % (rank, file.stat().st_size > 0))\n"  # one piece
    )
    result, _ = launch(tmp_path, body)
    assert "rank 0 holds False" in result.stdout and "rank 1 holds False" in result.stdout


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_within_a_minute(tmp_path):
    process, ranks = begin(tmp_path / "r")
    os.kill(ranks[1], signal.SIGKILL)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=60)
    print(f"a rank was killed; all had ended {time.monotonic() - begun:.1f} s later")
    assert process.returncode == 1 and gone(ranks) == ranks
    assert "error: rank 1 was killed by SIGKILL" in output


@pytest.mark.slow
def test_a_rank_that_raises_tells_its_traceback_first(tmp_path):
    script = tmp_path / "poisoned.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import train\n"
        "step = train.train_step\n"
        "def poisoned(run, state):\n"
        "    if state.step == 1 and train.distributed.rank() == 1:\n"
        "        raise RuntimeError('the cause')\n"
        "    return step(run, state)\n"
        "train.train_step = poisoned\n"
        "train.main()\n"
    )
    command = [sys.executable, script, *LAUNCH[2:], "--nproc", "2", "--output-dir", tmp_path / "r"]
    begun = time.monotonic()
    result = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    print(f"started, failed and ended in {time.monotonic() - begun:.1f} s")
    assert result.returncode == 1
    first = result.stderr.index("Traceback")
    assert result.stderr[:first].endswith("rank 1: ")
    assert "RuntimeError: the cause" in result.stderr[first:].split("rank 0: ")[0]
    assert "error: rank 1 ended with status 1" in result.stderr


# ---- losses that are not finite


def poison(monkeypatch, part, change):
    """Call `change(state)` before the second update of a part."""
    update, calls = getattr(train, f"update_{part}"), []

    def poisoned(run_, state, *args):
        calls.append(1)
        if len(calls) == 2:
            change(state, *args)
        return update(run_, state, *args)

    monkeypatch.setattr(train, f"update_{part}", poisoned)


def stopped(folder, part, change, match, *flags, model):
    """A run of three steps that ends at the second update with this message; the file for --replay
    that it leaves.
    """
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=match):
        poison(patch, part, change)
        train_run(folder, "--steps", 3, "--num-critic-only-steps", 0, *flags, model=model)
    return folder / "nonfinite_step_000002/minibatch.pt"


@pytest.mark.parametrize(
    ("part", "parameter", "value", "words"),
    [
        ("policy", "lm_head.weight", float("nan"), ["weight lm_head.weight: 32 of", "policy of"]),
        ("policy", "model.norm.weight", 3e38, ["policy of problem", "loss"]),
        ("critic", "value_head.bias", float("inf"), ["weight value_head.bias: 1 of 1", "inf"]),
    ],
)
def test_a_loss_that_is_not_finite_stops_the_run_and_can_be_replayed(
    part, parameter, value, words, random_tiny_model, tmp_path, monkeypatch, capsys
):
    def change(state, *_):
        with torch.no_grad():
            weight = dict(getattr(state, part).named_parameters())[parameter]
            weight[7 if weight.ndim == 2 else ...] = value

    with monkeypatch.context() as patch:
        poison(patch, part, change)
        flags = "--steps 4 --num-critic-only-steps 0 --save-every 1".split()
        with pytest.raises(SystemExit, match=f"the {part} is not finite in step 2") as error:
            train_run(tmp_path / "r", *flags, model=random_tiny_model)
    folder = tmp_path / "r/nonfinite_step_000002"
    assert f"--replay {folder / 'minibatch.pt'}" in str(error.value)
    lines = (folder / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 12 and json.loads(lines[0])["response_ids"]
    tokens = str(error.value).split("step 2: ")[1].split(" tokens")[0]
    capsys.readouterr()
    train.main(["--replay", str(folder / "minibatch.pt")])
    output = capsys.readouterr().out
    assert f"{tokens} tokens not finite" in output and all(word in output for word in words)
    # The last checkpoint is good, and the run goes on from it.
    train.main(["--resume", "--output-dir", str(tmp_path / "r")])
    assert sorted(read_metrics(tmp_path / "r")) == [1, 2, 3, 4]


def test_a_value_that_is_not_finite_stops_the_run_before_the_audit(
    random_tiny_model, tmp_path, monkeypatch, capsys
):
    """The audit met it first: a traceback of torch.bincount, nothing saved, no --replay."""
    score, calls = train.score_critic, []

    def poisoned(*args):
        calls.append(1)
        values = score(*args)
        if len(calls) == 2:
            values[4, 0] = float("nan")  # of the member that speaks for V(s_0) of its group
        return values

    monkeypatch.setattr(train, "score_critic", poisoned)
    match = "the critic is not finite in step 2: 1 tokens"
    with pytest.raises(SystemExit, match=match):
        train_run(
            tmp_path / "r", *"--steps 3 --num-critic-only-steps 1".split(), model=random_tiny_model
        )
    train.main(["--replay", str(tmp_path / "r/nonfinite_step_000002/minibatch.pt")])
    assert "old_values of problem" in capsys.readouterr().out


def test_an_advantage_that_is_not_finite_is_found_by_the_replay(
    random_tiny_model, tmp_path, capsys
):
    def change(state, batch, advantages, old_logprobs):
        advantages[5, 2] = float("inf")

    grpo, match = ["--algorithm", "grpo"], "policy is not finite in step 2: 1 tokens"
    file = stopped(tmp_path / "r", "policy", change, match, *grpo, model=random_tiny_model)
    saved = torch.load(file)
    (row,) = (~torch.isfinite(saved["tensors"]["advantages"])).any(1).nonzero()[0].tolist()
    train.main(["--replay", str(file)])
    output = capsys.readouterr().out
    who = saved["rollouts"][row]
    name = f"advantages of problem {who['problem']['id']}, sample {who['sample_index']}"
    assert f"{name}: 1 of" in output and "at [2]: inf" in output
    assert "weight" not in output


def test_a_log_prob_of_the_sampler_that_is_not_finite_stops_the_run(
    random_tiny_model, tmp_path, capsys
):
    """Its token left the loss, under every --is-mode, and no metric told."""

    def change(state, batch, *_):
        batch.rollout_logprobs[5, 0] = batch.rollouts[5].rollout_logprobs[0] = float("-inf")

    flags, match = ["--algorithm", "grpo"], "1 log-probs of the sampler .* are not finite in step 2"
    file = stopped(tmp_path / "r", "policy", change, match, *flags, model=random_tiny_model)
    train.main(["--replay", str(file)])
    output = capsys.readouterr().out
    assert output.count("rollout_logprobs of problem") == 1 and "weight" not in output


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_stop_names_the_newest_checkpoint_or_says_there_is_none(
    save_every, random_tiny_model, tmp_path
):
    """It called the newest checkpoint good where none existed."""

    def change(state, batch, advantages, old_logprobs):
        advantages[0, 0] = float("nan")

    match = "newest checkpoint is .*step_000001;" if save_every else "there is no checkpoint yet;"
    flags = ["--algorithm", "grpo", "--save-every", save_every]
    stopped(tmp_path / "r", "policy", change, match, *flags, model=random_tiny_model)


def test_a_reference_that_is_not_finite_stops_the_run_and_is_named_by_the_replay(
    random_tiny_model, tmp_path, capsys
):
    """Its log-probs were taken as a KL of 0, without a word."""

    def change(state, *_):
        with torch.no_grad():
            state.reference.lm_head.weight[7] = float("nan")

    flags, match = ["--algorithm", "grpo", "--kl-coef", 0.1], "policy is not finite in step 2"
    file = stopped(tmp_path / "r", "policy", change, match, *flags, model=random_tiny_model)
    train.main(["--replay", str(file)])
    output = capsys.readouterr().out
    assert "ref_logprobs of problem" in output and "weight" not in output


def test_a_gradient_that_is_not_finite_is_replayed_too(random_tiny_model, tmp_path, capsys):
    """Finite losses whose gradient overflows: the whole minibatch is saved."""

    def change(state, batch, values, returns):
        returns.fill_(1e18)
        with torch.no_grad():
            state.critic.model.norm.weight *= 100

    flags, match = ["--value-clip", 1e30], "gradient norm of the Critic is inf"
    file = stopped(tmp_path / "r", "critic", change, match, *flags, model=random_tiny_model)
    train.main(["--replay", str(file)])
    assert "gradient norm inf" in capsys.readouterr().out


def test_a_replay_that_is_finite_says_so(random_tiny_model, tmp_path):
    def change(state, batch, advantages, old_logprobs):
        advantages[0, 0] = float("nan")

    grpo, match = ["--algorithm", "grpo"], "not finite"
    file = stopped(tmp_path / "r", "policy", change, match, *grpo, model=random_tiny_model)
    saved = torch.load(file)
    saved["tensors"]["advantages"].nan_to_num_()
    torch.save(saved, file)
    with pytest.raises(SystemExit, match="did not come back"):
        train.main(["--replay", str(file)])


# ---- alarms

HEALTHY = {
    "rollout/groups_kept": 3,
    "rollout/groups_finished": 3,
    "rollout/all_right_share": 0.0,
    "rollout/all_wrong_share": 0.0,
    "rollout/truncated_share": 0.4,
    "rollout/undecided_share": 0.1,
    "critic/updates": 5,
    "critic/v_std": 0.05,
    "critic/v_mean": 0.5,
    "critic/head_movement": 1e-5,
    "policy/mismatch_abs": 0.001,
    "policy/entropy": 0.4,
}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "no_signal",
            {"rollout/groups_kept": 0, "rollout/all_wrong_share": 1.0},
            ["100%", "refills"],
        ),
        ("no_box", {"rollout/verdict_no_box": 0.6}, ["60%", "--prompt-suffix", "\\boxed{}"]),
        ("verifier", {"rollout/verdict_timeout": 0.02}, ["2%", "--verifier-timeout-s"]),
        ("truncated", {"rollout/truncated_share": 1.0}, ["100%", "--max-response-tokens"]),
        ("dead_critic", {"critic/v_std": 1e-8}, ["1.0e-08", "--critic-lr"]),
        ("dead_critic", {"critic/head_movement": 0.0}, ["0.0e+00", "--critic-lr"]),
        ("mismatch", {"policy/mismatch_abs": 0.2}, ["0.200 nats", "--is-mode"]),
        ("entropy", {"policy/entropy": 0.01}, ["0.0100 nats", "2.5% of its start", "--lr"]),
    ],
)
def test_each_alarm_is_one_line_with_number_and_remedy_and_a_metric(name, change, words, capsys):
    found = HEALTHY | change
    empty = 0 if found["rollout/groups_kept"] else 1
    state = SimpleNamespace(step=9, empty_steps=empty, start_entropy=0.4)
    raised = alarms.alarms(state, train.Config(group_size=8), found, [])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("WARNING step 9: ") and all(word in line for word in words)
    assert [key for key, value in raised.items() if value] == [f"alarm/{name}"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, []),
        ({"async_steps": 1}, ["--async-steps"]),
        ({"partial_rollout": True}, ["--partial-rollout"]),
        ({"async_steps": 1, "partial_rollout": True}, ["--async-steps", "--partial-rollout"]),
    ],
)
def test_the_mismatch_alarm_blames_old_weights_where_a_run_has_them(options, named):
    """Precision alone was blamed, and that is rarely the cause under either option."""
    sentence = alarms.mismatch_alarm(0.2, train.Config(**options))
    flags = {"--async-steps", "--partial-rollout"}
    assert {flag for flag in flags if flag in sentence} == set(named)
    assert ("Older weights" in sentence) == bool(named) and "--dtype float32" in sentence


def test_a_healthy_run_raises_no_alarm(random_tiny_model, tmp_path, capsys):
    flags = "--steps 5 --num-critic-only-steps 1 --critic-lr 1e-3 --minibatches-per-step 4"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert "WARNING" not in capsys.readouterr().err
    assert all(v == 0 for row in rows.values() for k, v in row.items() if "alarm/" in k)
    assert rows[1]["critic/updates"] == 0 and rows[2]["critic/updates"] == 4


def test_a_collapse_of_the_entropy_is_seen_in_a_run(random_tiny_model, tmp_path, monkeypatch):
    def sharpen(state, *_):
        with torch.no_grad():
            state.policy.lm_head.weight *= 1000

    poison(monkeypatch, "critic", sharpen)
    flags = "--steps 2 --num-critic-only-steps 0 --is-mode none"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert [rows[s]["alarm/entropy"] for s in (1, 2)] == [0, 1]


def test_empty_steps_are_counted_over_a_resume(random_tiny_model, tmp_path, monkeypatch, capsys):
    """Three empty steps end a run, also if it was interrupted after two of them."""
    data = tmp_path / "impossible.jsonl"
    data.write_text('{"prompt": "1 a:+1", "label": "not this"}\n' * 4)
    submit = HashGrader.submit

    def always(self, response, *rest):
        return submit(self, "", *rest)  # one text for all: a group is all right or all wrong

    monkeypatch.setattr(HashGrader, "submit", always)
    flags = f"--algorithm grpo --data {data} --max-refills 0 --steps"
    train_run(tmp_path / "r", *flags.split(), 2, model=random_tiny_model)
    train.main(["--resume", "--output-dir", str(tmp_path / "r"), "--steps", "9"])
    assert sorted(read_metrics(tmp_path / "r")) == [1, 2, 3]
    assert "3 steps in a row" in capsys.readouterr().err


@pytest.mark.slow
def test_three_kills_leave_no_trace():
    command = [sys.executable, "-m", "experiments.kill9", "--kills", "3", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "3 kills in" in result.stdout, result.stderr
