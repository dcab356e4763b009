"""Checkpoints under a full disk, damage, missing parts and kills; JSONL files with torn lines."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import read_metrics, same, train_run, weights

import train
from data import DataOrder
from model import Transformer
from problems import load_problems, load_tokenizer
from run import checkpoint
from run import metrics as run_metrics
from run.state import State

FLAGS = "--num-critic-only-steps 1 --save-every 1 --keep-checkpoints 0".split()


pytestmark = pytest.mark.usefixtures("mixed_rewards", "no_figures")


@pytest.fixture
def three(random_tiny_model, tmp_path):
    """A run with the checkpoints of three steps."""
    train_run(tmp_path / "r", "--steps", 3, *FLAGS, model=random_tiny_model)
    return tmp_path / "r"


def resume(folder, steps=4):
    train.main(["--resume", "--output-dir", str(folder), "--steps", str(steps)])
    return read_metrics(folder)


@pytest.mark.parametrize("ahead", [[], "--async-steps 1 --is-mode tis --save-every 1".split()])
def test_rollouts_in_hand_are_not_attached_to_other_problems(
    ahead, random_tiny_model, tmp_path, capsys
):
    """They were found again by place alone: in an edited file of the same length, by others."""
    rows = [{"prompt": f"{i} a:+{j}", "label": str(i)} for i in range(8) for j in range(1, 9)]
    data = tmp_path / "data.jsonl"

    def write():
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    flags = f"--algorithm grpo --data {data} --over-sampling 2 --partial-rollout --slots 10"
    flags = [*flags.split(), *ahead, "--steps", 3 if ahead else 2, "--max-refills", 0]
    train_run(tmp_path / "r", *flags, model=random_tiny_model)
    if ahead:
        shutil.rmtree(tmp_path / "r/checkpoints/step_000003")

    def position(step):
        return torch.load(tmp_path / f"r/checkpoints/step_00000{step}/trainer_state")

    saved = position(2)
    held = saved["buffer"] + (saved["ahead"]["finished"] if ahead else [])
    changed = held[0][0]["problem"]
    rows[changed] = {"prompt": "9 z:+9", "label": "8"}
    write()
    copy = shutil.copytree(tmp_path / "r", tmp_path / "copy")
    problems, _ = load_problems(str(data), load_tokenizer(random_tiny_model), 256)
    order = DataOrder(len(rows), 0, digests=[p.digest for p in problems])
    state = State(None, [], SimpleNamespace(), order)
    checkpoint.set_position(state, saved, problems)
    words = "1 of its 64 problems are not what they were"
    assert words in capsys.readouterr().err
    left = state.buffer + (state.ahead.finished if ahead else [])
    assert len(left) == len(held) - 1 and all(g[0].problem.index != changed for g in left)
    assert all(r.problem is problems[r.problem.index] for group in left for r in group)
    assert sorted(resume(copy)) == [1, 2, 3, 4]
    assert words in capsys.readouterr().err


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "why"),
    [
        ("policy/model.safetensors", cut, "that were written"),
        ("critic/model.safetensors", flip, "CRC-32 differs"),
        ("trainer_state", cut, "that were written"),
        ("manifest.json", cut, "is damaged"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(
    name, harm, why, three, capsys
):
    before = {p.name: p.read_bytes() for p in three.glob("*.jsonl")}
    harm(three / "checkpoints/step_000003" / name)
    rows = resume(three, steps=3)
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "Going back" in x]
    assert f"step_000003/{name}" in line and why in line and "step_000002 is used" in line
    assert sorted(rows) == [1, 2, 3]
    assert before["rollouts.jsonl"] == (three / "rollouts.jsonl").read_bytes()  # step 3 again
    assert checkpoint.damage(three / "checkpoints/step_000003") is None  # the new one


def test_two_damaged_checkpoints_fall_back_twice_and_three_are_an_error(three):
    for step in (3, 2):
        cut(three / f"checkpoints/step_00000{step}/trainer_state")
    assert checkpoint.newest(three).name == "step_000001"
    cut(three / "checkpoints/step_000001/trainer_state")
    with pytest.raises(SystemExit, match="every checkpoint in .* is damaged"):
        resume(three)


@pytest.mark.parametrize("name", ["policy/model.safetensors", "trainer_state", "manifest.json"])
def test_a_missing_part_is_an_error_that_names_it(name, three):
    (three / "checkpoints/step_000003" / name).unlink()
    with pytest.raises(SystemExit, match=f"step_000003/{name} is missing"):
        resume(three)


def test_what_a_killed_save_left_is_cleared_at_the_next_start(three):
    left = three / "checkpoints/tmp_step_000004"
    (left / "policy").mkdir(parents=True)
    (left / "policy/model.safetensors").write_bytes(b"half")
    rows = resume(three)
    assert sorted(rows) == [1, 2, 3, 4] and not left.exists()


@pytest.mark.parametrize("part", ["policy", "critic", "trainer_state"])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    part, random_tiny_model, tmp_path, monkeypatch, capsys
):
    """A limit on the size of files stands for the full disk: the real writers meet a real error."""
    write = {
        "policy": (Transformer, "save_pretrained"),
        "critic": (__import__("critic").Critic, "save_pretrained"),
        "trainer_state": (checkpoint.torch, "save"),
    }[part]
    original, calls = getattr(*write), []

    def full_disk(*args, **kwargs):
        calls.append(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000 if len(calls) == 2 else soft, hard))
        try:
            return original(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(*write, full_disk)
    rows = train_run(tmp_path / "r", "--steps", 3, *FLAGS, model=random_tiny_model)
    names = sorted(p.name for p in (tmp_path / "r/checkpoints").iterdir())
    assert names == ["step_000001", "step_000003"] and sorted(rows) == [1, 2, 3]
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "could not be written" in x]
    assert "WARNING step 2: " in line and "step_000002" in line


def test_a_run_whose_last_checkpoint_cannot_be_written_fails(
    random_tiny_model, tmp_path, monkeypatch
):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full_disk)
    with pytest.raises(SystemExit, match="could not be written: .*No space left"):
        train_run(tmp_path / "r", "--steps", 2, *FLAGS, model=random_tiny_model)
    assert list((tmp_path / "r/checkpoints").iterdir()) == []


def test_a_second_process_is_kept_out_of_a_run(random_tiny_model, tmp_path):
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    code += "print('locked', flush=True); sys.stdin.read()"
    (tmp_path / "r").mkdir()
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path / "r/.lock"], **pipes)
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(SystemExit, match="is in use by another process"):
        train_run(tmp_path / "r", "--steps", 2, *FLAGS, model=random_tiny_model)
    other.communicate()
    train_run(tmp_path / "r", "--steps", 2, *FLAGS, model=random_tiny_model)


def test_a_kill_in_the_middle_of_the_books_is_mended(three, random_tiny_model):
    """Killed after the samples of step 4 and half of its metrics: the step is done again."""
    whole = three.with_name("whole")
    train_run(whole, "--steps", 4, *FLAGS, model=random_tiny_model)
    for name in ("rollouts.jsonl", "metrics.jsonl"):
        step_4 = [x for x in (whole / name).read_text().splitlines(True) if '"step": 4' in x]
        with open(three / name, "a") as file:
            file.write("".join(step_4)[:-40])
    resume(three)
    assert (three / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    assert sorted(read_metrics(three)) == [1, 2, 3, 4]
    for part in ("policy", "critic"):
        assert same(weights(three, 4, part), weights(whole, 4, part))


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_cut(tmp_path):
    file = tmp_path / "m.jsonl"
    text = '{"step": 1}\n{"st\x00\x00\n{"step": 2}\n'
    file.write_text(text)
    with pytest.raises(ValueError, match="m.jsonl, line 2 is damaged"):
        run_metrics.forget_after(file, 2)
    assert file.read_text() == text


def test_a_run_killed_before_its_first_checkpoint_starts_from_the_beginning(
    random_tiny_model, tmp_path
):
    whole = tmp_path / "whole"
    train_run(whole, "--steps", 2, *FLAGS, model=random_tiny_model)
    early = tmp_path / "early"
    early.mkdir()
    (early / "config.json").write_text((whole / "config.json").read_text())
    (early / "metrics.jsonl").write_text('{"step": 1, "policy/l')
    resume(early, steps=2)
    assert same(weights(early, 2), weights(whole, 2))
    assert json.loads(Path(early / "config.json").read_text())["steps"] == 2


def test_a_checkpoint_that_one_rank_sees_is_there_for_all(three, monkeypatch):
    """Or one rank would leave while the others wait in the gathering of weights."""
    nothing = SimpleNamespace(step=4)
    run = SimpleNamespace(folder=three, config=train.Config())
    monkeypatch.setattr(checkpoint.distributed, "any_rank", lambda flag: True)
    checkpoint.save(run, nothing)
    assert not (three / "checkpoints/step_000004").exists()
