"""train.py end to end: an untrained model (RTM) with a stand-in grader, and the embedded one."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    ROOT,
    SMALL,
    HashGrader,
    largest_difference,
    read_metrics,
    same,
    train_run,
    weights,
)
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import eval
import train
from algorithms import ALGORITHMS
from curate import CurateConfig
from model import Transformer
from run.optimizer import make_optimizers, optimizer_step
from verify import Verdict

pytestmark = pytest.mark.usefixtures("no_figures")


# ---- the method


def test_the_critic_trains_while_the_policy_waits(random_tiny_model, tmp_path, mixed_rewards):
    flags = "--steps 4 --num-critic-only-steps 3 --critic-lr 5e-6 --critic-lr-warmup-steps 0 "
    flags += "--weight-decay 0 --critic-value-bias-init 0.52 --save-every 1 --keep-checkpoints 0"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    start = load_file(random_tiny_model / "model.safetensors")
    critics = [weights(tmp_path / "r", step, "critic") for step in (1, 2, 3, 4)]
    policies = [weights(tmp_path / "r", step) for step in (1, 2, 3, 4)]
    backbone = [{n: w for n, w in c.items() if not n.startswith("value_head")} for c in critics]
    assert critics[0]["value_head.weight"].abs().max().item() == pytest.approx(5e-6, rel=1e-2)
    assert abs(critics[0]["value_head.bias"].item() - 0.52) == pytest.approx(5e-6, rel=2e-2)
    assert same(backbone[0], start)
    assert critics[1]["value_head.weight"].abs().max().item() == pytest.approx(1e-5, rel=0.1)
    assert not same(backbone[1], start)
    assert all(same(policies[i], start) for i in range(3))
    assert not same(policies[3], start)
    assert "policy/loss" not in rows[3] and "policy/loss" in rows[4]


def test_first_critic_step_of_a_warm_up_has_learning_rate_zero(
    random_tiny_model, tmp_path, mixed_rewards
):
    flags = "--steps 3 --num-critic-only-steps 1 --critic-lr 1e-3 --critic-lr-warmup-steps 2"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert [rows[s]["critic/lr"] for s in (1, 2, 3)] == [0, 5e-4, 1e-3]


def test_a_critic_that_does_not_move_is_said_loudly(
    random_tiny_model, tmp_path, mixed_rewards, capsys
):
    flags = "--steps 4 --num-critic-only-steps 1 --critic-lr 0"
    train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert "critic is dead" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "justrl2"])
def test_on_policy_the_first_ratio_is_one_and_sampler_equals_trainer(
    algorithm, random_tiny_model, tmp_path, mixed_rewards
):
    flags = f"--steps 2 --algorithm {algorithm} --num-critic-only-steps 0 --temperature 0.7"
    for row in train_run(tmp_path / "r", *flags.split(), model=random_tiny_model).values():
        assert abs(row["policy/ratio"] - 1) < 1e-6 and abs(row["policy/approx_kl"]) < 1e-6
        assert row["policy/clip_fraction"] == 0
        assert row["policy/mismatch_max"] < 1e-5


def test_several_updates_per_step_leave_the_old_policy(random_tiny_model, tmp_path, mixed_rewards):
    flags = "--steps 1 --algorithm grpo --lr 1e-2 --epochs-per-step 3 --minibatches-per-step 2"
    (row,) = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model).values()
    assert abs(row["policy/ratio"] - 1) > 1e-3 and row["policy/clip_fraction"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "justrl2"])
def test_micro_batches_change_nothing(algorithm, random_tiny_model, tmp_path, mixed_rewards):
    flags = f"--steps 1 --algorithm {algorithm} --num-critic-only-steps 0 "
    flags += "--critic-lr-warmup-steps 0 --lr 1e-4 --critic-lr 1e-4"
    results = []
    for budget in (1, 60, 100_000):
        folder = tmp_path / str(budget)
        (row,) = train_run(
            folder, *flags.split(), "--max-tokens-per-micro-batch", budget, model=random_tiny_model
        ).values()
        results.append((row, folder))
    for row, folder in results[1:]:
        for name in ("policy/grad_norm", "policy/loss", "critic/grad_norm", "critic/loss"):
            if name in row:
                assert row[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-7), name
        assert largest_difference(weights(folder, 1), weights(results[0][1], 1)) < 1e-6
        if algorithm == "justrl2":
            assert (
                largest_difference(
                    weights(folder, 1, "critic"), weights(results[0][1], 1, "critic")
                )
                < 1e-6
            )


@pytest.mark.parametrize("critic_too", [False, True])
def test_overlong_penalty_reaches_the_actor_and_the_critic_only_if_asked(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch, critic_too
):
    seen = []
    shape = train.shape_rewards
    monkeypatch.setattr(
        train, "shape_rewards", lambda *a: seen.append((a[0], *shape(*a))) or seen[-1][1:]
    )
    train_run(
        tmp_path / "r",
        "--steps",
        1,
        "--num-critic-only-steps",
        0,
        "--overlong-buffer-tokens",
        8,
        *(["--critic-sees-penalty"] if critic_too else []),
        model=random_tiny_model,
    )
    batch, actor, critic = seen[0]
    penalty = torch.tensor(
        [min(0.0, max(-1.0, (8 - n) / 8)) for n in batch.response_lengths.tolist()]
    )
    assert torch.allclose(actor.sum(1), batch.rewards + penalty) and penalty.min() < 0
    assert torch.equal(critic.sum(1), actor.sum(1) if critic_too else batch.rewards)
    last = batch.response_lengths - 1
    assert torch.equal(actor.gather(1, last[:, None])[:, 0], actor.sum(1))


# ---- nothing to learn from


def test_bc07c_a_sampler_that_can_never_fill_ends_and_says_so(random_tiny_model, tmp_path, capsys):
    data = tmp_path / "impossible.jsonl"
    data.write_text('{"prompt": "1 a:+1", "label": "not this"}\n' * 4)
    flags = f"--steps 9 --num-critic-only-steps 1 --data {data} --max-refills 2 --save-every 1"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert sorted(rows) == [1, 2, 3]  # three empty steps end the run
    for row in rows.values():
        assert row["rollout/groups_kept"] == 0 and row["rollout/groups_finished"] == 9
        assert row["rollout/zero_variance_share"] == 1.0 and row["rollout/groups_refilled"] == 6
    err = capsys.readouterr().err
    assert "no group kept of 9 sampled" in err and "stopped" in err
    assert same(weights(tmp_path / "r", 3), load_file(random_tiny_model / "model.safetensors"))


# ---- resume and interruption


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_and_resume_equal_six_steps(
    random_tiny_model, tmp_path, mixed_rewards, optimizer
):
    flags = "--num-critic-only-steps 2 --over-sampling 2 --partial-rollout --slots 10 "
    flags += f"--lr 1e-3 --critic-lr 1e-3 --save-every 3 --optimizer {optimizer}"
    whole = train_run(tmp_path / "a", "--steps", 6, *flags.split(), model=random_tiny_model)
    train_run(tmp_path / "b", "--steps", 3, *flags.split(), model=random_tiny_model)
    resumed = train_run(
        tmp_path / "b", "--steps", 6, "--resume", *flags.split(), model=random_tiny_model
    )
    assert sum(row["rollout/groups_resumed"] for row in whole.values()) > 0
    assert resumed.keys() == whole.keys()
    for step in whole:
        for name in whole[step]:
            if not name.startswith("perf/"):
                assert resumed[step][name] == whole[step][name], (step, name)
    for part in ("policy", "critic"):
        assert same(weights(tmp_path / "a", 6, part), weights(tmp_path / "b", 6, part))
    lines = [(f / "rollouts.jsonl").read_text() for f in (tmp_path / "a", tmp_path / "b")]
    assert lines[0] == lines[1]


def test_old_tokens_leave_the_policy_loss_alone_and_staleness_is_bounded(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch
):
    seen = []
    mask = train.loss_mask

    def watched(batch, config):
        chosen = mask(batch, config)
        newest = max(v for r in batch.rollouts for v in r.weight_versions)
        for row, r in zip(chosen, batch.rollouts, strict=True):
            expected = [v == newest for v in r.weight_versions]
            assert row.tolist() == expected + [False] * (len(row) - len(expected))
        seen.append(bool((batch.response_mask & ~chosen).any()))
        return chosen

    monkeypatch.setattr(train, "loss_mask", watched)
    flags = "--steps 5 --algorithm grpo --over-sampling 2 --partial-rollout --partial-mask-old "
    flags += "--max-staleness 1 --slots 10 --kv-cache-tokens 400 --eval-top-p 0.9"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert any(seen)
    assert sum(row["rollout/groups_resumed"] for row in rows.values()) > 0
    assert max(row["rollout/version_spread_max"] for row in rows.values()) == 1
    assert all(0 < row["rollout/slot_occupancy"] <= 1 for row in rows.values())


def test_a_policy_without_its_critic_is_an_error(random_tiny_model, tmp_path, mixed_rewards):
    train_run(tmp_path / "r", "--steps", 2, "--num-critic-only-steps", 1, model=random_tiny_model)
    critic = tmp_path / "r/checkpoints/step_000002/critic"
    critic.rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="without its critic"):
        train_run(
            tmp_path / "r",
            "--steps",
            3,
            "--num-critic-only-steps",
            1,
            "--resume",
            model=random_tiny_model,
        )


def test_saving_more_often_changes_no_weight(random_tiny_model, tmp_path, mixed_rewards):
    # Known fault: asking a fresh Adam for its state made it count a step that never was.
    flags = "--steps 4 --num-critic-only-steps 2 --critic-lr-warmup-steps 0"
    for name, every in (("a", 0), ("b", 1)):
        train_run(tmp_path / name, *flags.split(), "--save-every", every, model=random_tiny_model)
    assert same(weights(tmp_path / "a", 4), weights(tmp_path / "b", 4))


def test_resume_needs_no_flag_repeated_and_takes_new_hyperparameters(
    random_tiny_model, tmp_path, mixed_rewards
):
    flags = "--steps 2 --algorithm dapo --lr 1e-6 --weight-decay 0"
    train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    train.main(["--resume", "--output-dir", str(tmp_path / "r"), "--steps", "3"])
    assert read_metrics(tmp_path / "r")[3]["policy/lr"] == 1e-6
    config = json.loads((tmp_path / "r/config.json").read_text())
    assert config["algorithm"] == "dapo" and config["weight_decay"] == 0 and config["steps"] == 3
    seen = []
    step = train.optimizer_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer_step", lambda m, o, *a: seen.append(o) or step(m, o, *a))
        more = ["--steps", "4", "--weight-decay", "0.3"]
        train.main(["--resume", "--output-dir", str(tmp_path / "r"), *more])
    assert seen[0][0].param_groups[0]["weight_decay"] == 0.3


def test_a_failed_start_leaves_the_directory_free(random_tiny_model, tmp_path, mixed_rewards):
    with pytest.raises(SystemExit, match="nowhere"):
        train_run(tmp_path / "r", "--data", "nowhere.jsonl")
    train_run(tmp_path / "r", "--steps", 1, "--algorithm", "grpo", model=random_tiny_model)


def test_everything_truncated_under_the_overlong_filter_trains_only_the_critic(
    random_tiny_model, tmp_path, mixed_rewards, capsys
):
    flags = "--steps 2 --num-critic-only-steps 0 --overlong-filter --max-response-tokens 2"
    rows = train_run(
        tmp_path / "r", *flags.split(), "--no-dynamic-sampling", model=random_tiny_model
    )
    for row in rows.values():
        assert row["rollout/truncated_share"] < 1 or "policy/loss" not in row
        assert "critic/loss" in row
    assert any("policy/loss" not in row for row in rows.values())


def test_a_verifier_that_gives_up_is_said_loudly(random_tiny_model, tmp_path, monkeypatch, capsys):
    class Late(HashGrader):
        def submit(self, response, label, think="auto", kind="math"):
            future = Future()
            future.set_result(Verdict(False, "timeout", None))
            return future

    monkeypatch.setattr("run.setup.Verifier", Late)
    train_run(tmp_path / "r", "--steps", 1, "--algorithm", "grpo", model=random_tiny_model)
    assert "the verifier gave up on 100%" in capsys.readouterr().err


def test_only_the_newest_checkpoints_are_kept(random_tiny_model, tmp_path, mixed_rewards):
    train_run(
        tmp_path / "r",
        "--algorithm",
        "grpo",
        "--steps",
        4,
        "--save-every",
        1,
        model=random_tiny_model,
    )
    names = sorted(p.name for p in (tmp_path / "r/checkpoints").iterdir())
    assert names == ["step_000003", "step_000004"]


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    folder = tmp_path / "r"
    command = [
        sys.executable,
        "train.py",
        "--output-dir",
        folder,
        "--eval-data",
        "",
        "--steps",
        "500",
        *SMALL,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.time() + 90
    while (
        not ((folder / "metrics.jsonl").exists() and read_metrics(folder))
        and time.time() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    last = max(read_metrics(folder))
    assert (folder / "checkpoints" / f"step_{last:06d}" / "policy" / "config.json").exists()
    assert "stopping after this step" in output and "--resume" in output


# ---- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "nowhere.jsonl"], ["nowhere.jsonl", "does not exist"]),
        (["--algorithm", "grpoo"], ["grpoo", "justrl2"]),
        (["--model", "nowhere/at-all"], ["nowhere/at-all"]),
        (["--overlong-buffer-tokens", "16"], ["overlong-buffer-tokens"]),
        (["--replay", "/nope"], ["--replay /nope cannot be read"]),
        (["--replay", "assets/eval.jsonl"], ["--replay assets/eval.jsonl is not a minibatch.pt"]),
        (["--output-dir", "/proc/nothing/here"], ["/proc/nothing/here", "cannot be written"]),
        (["--device", "cuda"], ["cuda"]),
    ],
)
def test_bad_input_ends_with_one_sentence(flags, words, tmp_path):
    if flags == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(SystemExit) as error:
        train_run(tmp_path / "r", *flags)
    message = str(error.value)
    assert message.startswith("error: ") and all(w in message for w in words), message
    assert "\n" not in message


def test_a_model_directory_without_tokenizer_is_named(random_tiny_model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((random_tiny_model / name).read_bytes())
    with pytest.raises(SystemExit, match="no tokenizer"):
        train_run(tmp_path / "r", model=tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [(None, "has no config.json"), ("{", "config.json is not JSON")]
)
def test_a_directory_that_is_no_checkpoint_is_not_blamed_for_its_tokenizer(tmp_path, text, words):
    """An empty directory "has no tokenizer that `transformers` can load"."""
    (tmp_path / "model").mkdir()
    if text:
        (tmp_path / "model/config.json").write_text(text)
    with pytest.raises(SystemExit, match=words):
        train_run(tmp_path / "r", model=tmp_path / "model")


def test_a_directory_that_holds_a_run_is_refused_before_the_data_are_read(tmp_path):
    """All prompts were tokenised first."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.json").write_text("{}")
    with pytest.raises(SystemExit, match="already holds a run"):
        train_run(tmp_path / "r", "--data", "nowhere.jsonl")


def test_the_start_shows_the_end_of_the_first_prompt_and_its_label(
    random_tiny_model, tmp_path, mixed_rewards, capsys
):
    """Nothing showed that a prompt did not ask for the box that the verifier looks for."""
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1 a:+1", "label": "2"}\n' * 4)
    flags = f"--algorithm grpo --steps 1 --data {data} --prompt-suffix".split()
    train_run(tmp_path / "r", *flags, "Box it.", model=random_tiny_model)
    out = capsys.readouterr()
    (line,) = [line for line in out.out.splitlines() if line.startswith("the first prompt ends")]
    assert "1 a:+1\\nBox it." in line and line.endswith("its label is '2'")
    assert "grpo:" not in out.err  # no bar of the loop in a log file


def test_a_directory_that_holds_a_run_is_refused(random_tiny_model, tmp_path, mixed_rewards):
    train_run(tmp_path / "r", "--algorithm", "grpo", "--steps", 1, model=random_tiny_model)
    before = (tmp_path / "r/metrics.jsonl").read_text()
    with pytest.raises(SystemExit, match="already holds a run; add --resume"):
        train_run(tmp_path / "r", "--algorithm", "grpo", "--steps", 1, model=random_tiny_model)
    assert (tmp_path / "r/metrics.jsonl").read_text() == before
    with pytest.raises(SystemExit, match="finds no run"):
        train_run(tmp_path / "empty", "--resume", "--algorithm", "grpo", model=random_tiny_model)


def test_checkpoints_without_their_config_are_not_taken_for_a_new_run(
    random_tiny_model, tmp_path, mixed_rewards
):
    """It began again, found the names of its checkpoints taken, and saved nothing."""
    flags = ["--algorithm", "grpo", "--steps", 1]
    train_run(tmp_path / "r", *flags, model=random_tiny_model)
    (tmp_path / "r/config.json").unlink()
    with pytest.raises(SystemExit, match="checkpoints and metrics.jsonl .* no config.json"):
        train_run(tmp_path / "r", *flags, model=random_tiny_model)


def test_a_finished_run_keeps_the_config_that_its_steps_used(
    random_tiny_model, tmp_path, mixed_rewards
):
    train_run(tmp_path / "r", "--algorithm", "grpo", "--steps", 1, model=random_tiny_model)
    before = (tmp_path / "r/config.json").read_text()
    train.main(["--resume", "--output-dir", str(tmp_path / "r"), "--lr", "1"])
    assert (tmp_path / "r/config.json").read_text() == before
    train.main(["--resume", "--output-dir", str(tmp_path / "r"), "--lr", "1e-3", "--steps", "2"])
    assert json.loads((tmp_path / "r/config.json").read_text())["lr"] == 1e-3


# ---- the run directory, and learning on the embedded task


def test_run_directory_holds_what_the_readme_says(random_tiny_model, tmp_path, mixed_rewards):
    train_run(tmp_path / "r", "--steps", 2, "--num-critic-only-steps", 1, model=random_tiny_model)
    names = {p.name for p in (tmp_path / "r/checkpoints/step_000002").iterdir()}
    assert names == {"policy", "critic", "trainer_state", "manifest.json"}
    config = json.loads((tmp_path / "r/config.json").read_text())
    assert config["algorithm"] == "justrl2" and config["clip_high"] == 0.28
    row = json.loads((tmp_path / "r/rollouts.jsonl").read_text().splitlines()[0])
    keys = "step problem_id draw sample_index prompt response response_ids rollout_logprobs reward "
    assert row.keys() == set(
        (
            keys
            + "correct overlong_penalty reason finish_reason response_length kept values advantages"
        ).split()
    )
    assert row["response_length"] == len(row["response_ids"]) == len(row["rollout_logprobs"])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = tmp_path / "r/checkpoints/step_000002/policy"
    assert AutoModelForCausalLM.from_pretrained(policy).config.vocab_size == 64
    assert AutoTokenizer.from_pretrained(policy).chat_template


@pytest.mark.figures
def test_figures_are_drawn_at_the_end(random_tiny_model, tmp_path, mixed_rewards):
    train_run(tmp_path / "r", "--steps", 2, "--num-critic-only-steps", 1, model=random_tiny_model)
    names = {p.name for p in (tmp_path / "r/figures").iterdir()}
    assert {"reward.png", "lengths.png", "critic.png"} <= names
    assert all(p.stat().st_size > 5_000 for p in (tmp_path / "r/figures").iterdir())


@pytest.mark.parametrize("algorithm", ["justrl2", "grpo", "ppo"])
def test_learning_the_embedded_task(algorithm, tmp_path):
    flags = f"--algorithm {algorithm} --steps 12 --num-critic-only-steps 2 --lr 5e-4 "
    flags += "--eval-samples 1 --eval-every 0"
    base = ["--output-dir", str(tmp_path / "r"), "--prompts-per-step", "16"]
    train.main([*base, *flags.split()])
    rows = read_metrics(tmp_path / "r")
    assert rows[12]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.3


def test_the_command_line_helps():
    result = subprocess.run(
        [sys.executable, "train.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert result.returncode == 0 and "--gae-lambda-k" in result.stdout


# ---- --report-to


@pytest.fixture
def few(tmp_path):
    """Flags for a short run on a few problems."""
    file = tmp_path / "few.jsonl"
    rows = [{"prompt": f"{i % 10} a:+{i % 9 + 1}", "label": "0"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--data", file, "--num-critic-only-steps", 1, "--steps"]


class FakeWriter:
    """Stands in for torch.utils.tensorboard.SummaryWriter."""

    opened = []

    def __init__(self, log_dir, purge_step):
        self.log_dir, self.purge_step, self.points = log_dir, purge_step, []
        self.opened.append(self)

    def add_scalar(self, name, value, step):
        self.points.append((step, name, value))

    def flush(self):
        pass


class FakeWandb:
    """Stands in for the wandb module and for its run."""

    def __init__(self):
        self.started, self.rows = [], []

    def init(self, **options):
        self.started.append(options)
        self.id = options["id"] or "abc"
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self.rows.append(row)


def test_metrics_go_to_tensorboard_and_on_after_a_resume(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch, few
):
    module = SimpleNamespace(SummaryWriter=FakeWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(FakeWriter, "opened", [])
    flags = "--report-to", "tensorboard", *few
    train_run(tmp_path / "r", *flags, 2, model=random_tiny_model)
    rows = train_run(tmp_path / "r", *flags, 3, "--resume", model=random_tiny_model)
    first, second = FakeWriter.opened
    assert first.log_dir == second.log_dir == str(tmp_path / "r" / "tensorboard")
    # Events of steps that a resumed run does again are dropped from step 3 on.
    assert (first.purge_step, second.purge_step) == (1, 3)
    sent = {(step, name): value for step, name, value in first.points + second.points}
    stored = {(s, k): v for s, row in rows.items() for k, v in row.items() if k != "step"}
    assert sent == {where: value for where, value in stored.items() if value is not None}
    assert len(sent) == len(first.points + second.points)


def test_metrics_go_to_wandb_and_on_under_the_same_id(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch, few
):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    flags = "--report-to", "wandb", *few
    train_run(tmp_path / "r", *flags, 2, model=random_tiny_model)
    train_run(tmp_path / "r", *flags, 3, "--resume", model=random_tiny_model)
    assert [options["id"] for options in fake.started] == [None, "abc"]
    assert fake.started[0]["resume"] == "allow" and fake.started[0]["config"]["steps"] == 2
    assert [row["step"] for row in fake.rows] == [1, 2, 3]
    assert all("rollout/reward_mean" in row for row in fake.rows)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_tracker_is_named_before_anything_is_sampled(
    random_tiny_model, tmp_path, monkeypatch, few, name
):
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(train.rollout, "collect", lambda *_: pytest.fail("sampled"))
    with pytest.raises(SystemExit, match=f"--report-to {name} needs `pip install {name}`"):
        train_run(tmp_path / "r", *few, 2, "--report-to", name, model=random_tiny_model)
    assert not (tmp_path / "r" / "config.json").exists()


# ---- the audit and the tokens it is about


def test_kept_rows_hold_the_values_and_advantages_that_trained(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch, few
):
    seen = []
    compute = train.compute_advantages

    def spy(run, batch, *tensors):
        advantages, returns = compute(run, batch, *tensors)
        seen.append((batch, tensors[-1], advantages))
        return advantages, returns

    monkeypatch.setattr(train, "compute_advantages", spy)
    train_run(tmp_path / "r", *few, 6, model=random_tiny_model)
    rows = [json.loads(line) for line in (tmp_path / "r/rollouts.jsonl").read_text().splitlines()]
    assert any(not row["kept"] for row in rows)
    assert all(("values" in row) == ("advantages" in row) == row["kept"] for row in rows)
    for step, (batch, values, advantages) in enumerate(seen, 1):
        kept = [row for row in rows if row["step"] == step and row["kept"]]
        assert [row["response_ids"] for row in kept] == [r.response_ids for r in batch.rollouts]
        for i, row in enumerate(kept):
            n = row["response_length"]
            for name, x in (("values", values), ("advantages", advantages)):
                assert row[name] == pytest.approx(x[i, :n].tolist(), abs=1e-6)


def test_a_few_logged_rows_are_of_kept_groups(random_tiny_model, tmp_path, mixed_rewards, few):
    flags = "--algorithm grpo --log-samples 6".split()
    train_run(tmp_path / "r", *few, 2, *flags, model=random_tiny_model)
    rows = [json.loads(line) for line in (tmp_path / "r/rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and all(row["kept"] and "advantages" in row for row in rows)
    assert not any("values" in row for row in rows)


def test_the_audit_is_logged_each_step_and_cut_back_on_resume(
    random_tiny_model, tmp_path, mixed_rewards, few
):
    flags = "--save-every", 2, *few
    train_run(tmp_path / "r", *flags, 3, model=random_tiny_model)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step_000003")
    rows = train_run(tmp_path / "r", *flags, 4, "--resume", model=random_tiny_model)
    audit = [json.loads(line) for line in (tmp_path / "r/audit.jsonl").read_text().splitlines()]
    assert [row["step"] for row in audit] == [1, 2, 3, 4]
    assert all(rows[row["step"]]["critic/end_auc"] == row["auc"][-1] for row in audit)


def test_the_head_moves_by_what_the_metric_says(random_tiny_model, tmp_path, mixed_rewards, few):
    flags = "--save-every", 1, "--keep-checkpoints", 0
    rows = train_run(tmp_path / "r", *few, 3, *flags, model=random_tiny_model)
    heads = [weights(tmp_path / "r", s, "critic")["value_head.weight"] for s in (1, 2, 3)]
    # The first step of the critic has learning rate 0.
    assert rows[1]["critic/head_movement"] == rows[1]["critic/head_weight_norm"] == 0
    for step in (2, 3):
        moved = (heads[step - 1] - heads[step - 2]).norm().item()
        assert rows[step]["critic/head_movement"] == pytest.approx(moved, rel=1e-5) != 0


# ---- what the documents promise


def test_every_file_and_flag_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for recipe in re.findall(r"recipes/[\w.-]+\.yaml", text):
        assert (ROOT / recipe).exists(), recipe
    targets = set(re.findall(r"^make ([\w-]+)", text, re.M))
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z-]+)", text)}
    parsers = train.Config, eval.Options, CurateConfig
    fields = {name for parser in parsers for name in parser.__dataclass_fields__}
    others = {
        "config",
        "help",
        "nproc_per_node",
        "no_build_isolation",
        "audit",
        "explain",
        "from",
        "step",
        "report",
    }
    assert flags - others <= fields


def test_temperature_never_touches_v(random_tiny_model, tmp_path, mixed_rewards, monkeypatch):
    seen = []
    score = train.score_critic

    def spy(critic, batch, config):
        values = score(critic, batch, config)
        seen.append((values, score(critic, batch, replace(config, temperature=0.3))))
        return values

    monkeypatch.setattr(train, "score_critic", spy)
    flags = "--steps 3 --num-critic-only-steps 1 --critic-lr 1e-2 --critic-lr-warmup-steps 0"
    train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert seen[-1][0].std() > 0 and torch.equal(*seen[-1])


def test_norms_biases_and_the_value_head_are_not_decayed(random_tiny_model):
    from critic import Critic

    critic = Critic.from_policy(random_tiny_model, 0.5)
    (optimizer,) = make_optimizers(critic, 1e-3, train.Config())
    names = {id(p): n for n, p in critic.named_parameters()}
    decayed, free = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0
    assert all("norm" in n or "value_head" in n for n in free)
    assert all(n.endswith("_proj.weight") or "embed" in n for n in decayed)


def test_muon_takes_the_matrices_of_the_layers_and_nothing_else(random_tiny_model):
    policy = Transformer.from_pretrained(random_tiny_model)
    config = train.Config(optimizer="muon", weight_decay=0.1)
    muon, adamw = make_optimizers(policy, 1e-2, config)
    names = {id(p): name for name, p in policy.named_parameters()}
    taken = {names[id(p)] for p in muon.param_groups[0]["params"]}
    layers = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
    layers = f"{layers} mlp.gate_proj mlp.up_proj mlp.down_proj".split()
    count = len(policy.model.layers)
    assert taken == {f"model.layers.{i}.{n}.weight" for i in range(count) for n in layers}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert taken.isdisjoint(rest) and taken | rest == set(names.values())


def test_a_step_of_muon_is_the_polar_factor_of_the_gradient(random_tiny_model):
    """W <- W - lr wd W - 0.2 sqrt(longer side) lr U V', gradient U S V' (2502.16982), up to the
    loose convergence of five Newton-Schulz iterations: singular values between 0.6 and 1.3.
    """
    policy = Transformer.from_pretrained(random_tiny_model)
    config = train.Config(optimizer="muon", weight_decay=0.1, max_grad_norm=1e9)
    optimizers = make_optimizers(policy, 1e-2, config)
    weight = policy.model.layers[0].mlp.up_proj.weight
    before, gradient = weight.detach().clone(), torch.randn_like(weight)
    weight.grad = gradient.clone()
    optimizer_step(policy, optimizers, 1e-2, config)
    update = ((1 - 1e-2 * 0.1) * before - weight.detach()) / (1e-2 * 0.2 * max(weight.shape) ** 0.5)
    u, _, v = torch.linalg.svd(gradient.double(), full_matrices=False)
    inside = u.T @ update.double() @ v.T
    assert (inside.diagonal() > 0.6).all() and (inside.diagonal() < 1.3).all()
    assert (inside - inside.diagonal().diag()).abs().max() < 0.05
    assert (update - (u @ inside.diagonal().diag() @ v)).abs().max() < 0.05


def test_a_kl_term_and_an_entropy_bonus_change_the_gradient(
    random_tiny_model, tmp_path, mixed_rewards
):
    flags = "--steps 2 --algorithm grpo --lr 1e-2"
    plain = train_run(tmp_path / "a", *flags.split(), model=random_tiny_model)
    bonus = train_run(
        tmp_path / "b", *flags.split(), "--entropy-coef", 0.1, model=random_tiny_model
    )
    kl = train_run(tmp_path / "c", *flags.split(), "--kl-coef", 1.0, model=random_tiny_model)
    assert bonus[1]["policy/grad_norm"] != plain[1]["policy/grad_norm"]
    assert abs(kl[1]["policy/kl"]) < 1e-6 < kl[2]["policy/kl"]  # the reference is the start policy


def test_the_reference_computes_as_the_policy_does(
    random_tiny_model, tmp_path, mixed_rewards, monkeypatch
):
    """With a head of another dtype the KL of a policy that has not moved would be above 0."""
    update, seen = train.policy_minibatch, []

    def spy(run_, state, batch, rows, row_weights, inputs, sums):
        seen.append(inputs)
        layers = [*state.policy.model.layers, *state.reference.model.layers]
        assert all(layer.mlp_chunk_tokens == 8 for layer in layers)
        return update(run_, state, batch, rows, row_weights, inputs, sums)

    monkeypatch.setattr(train, "policy_minibatch", spy)
    flags = "--steps 1 --algorithm grpo --kl-coef 1 --dtype bfloat16 --head-dtype float32 "
    flags += "--mlp-chunk-tokens 8"
    # The head of a checkpoint in bfloat16, as most are.
    policy = Transformer.from_pretrained(random_tiny_model)
    model = shutil.copytree(random_tiny_model, tmp_path / "model")
    policy.to(torch.bfloat16).save_pretrained(model)
    train_run(tmp_path / "r", *flags.split(), model=model)
    assert torch.equal(seen[0].ref_logprobs, seen[0].old_logprobs)


def test_advantage_metrics_are_of_the_trained_tokens(random_tiny_model, tmp_path, mixed_rewards):
    flags = "--steps 1 --algorithm reinforce_pp --overlong-filter --max-response-tokens 48"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert 0 < rows[1]["rollout/truncated_share"] < 1
    assert rows[1]["policy/advantage_mean"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["policy/advantage_std"] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_row_improves_the_embedded_model(algorithm, tmp_path):
    flags = f"--algorithm {algorithm} --steps 25 --num-critic-only-steps 2 --lr 5e-4 --eval-every 0"
    flags += " --prompts-per-step 128" if algorithm == "sao" else ""
    train.main(["--output-dir", str(tmp_path / "r"), *flags.split(), "--eval-samples", "1"])
    rows = read_metrics(tmp_path / "r")
    assert rows[25]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.1


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
def test_bfloat16_compute_keeps_float32_masters(
    head_dtype, random_tiny_model, tmp_path, mixed_rewards
):
    flags = f"--steps 2 --algorithm grpo --dtype bfloat16 --head-dtype {head_dtype} --lr 1e-5"
    rows = train_run(tmp_path / "r", *flags.split(), model=random_tiny_model)
    assert all(0 < row["policy/mismatch_abs"] < 0.05 for row in rows.values())
    after, start = weights(tmp_path / "r", 2), load_file(random_tiny_model / "model.safetensors")
    assert all(w.dtype == torch.float32 for w in after.values())
    moved = largest_difference(after, start)
    assert 0 < moved <= 2.1e-5  # a bfloat16 weight of 0.02 moves in steps of 1e-4


def test_a_float32_head_lowers_the_mismatch_of_bfloat16_layers(random_tiny_model):
    from rollout import Sampler

    exact = Transformer.from_pretrained(random_tiny_model)
    errors = []
    for head in (torch.bfloat16, torch.float32):
        model = Transformer.from_pretrained(random_tiny_model, torch.bfloat16)
        model.set_head_dtype(head)
        train.distributed.copy_weights(exact, model)
        hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        errors.append((model.logits(hidden) - exact.logits(hidden.float())).abs().max().item())
    assert errors[1] < 1e-6 < errors[0]
    assert Sampler(model, [3]).generate([[5, 6]], max_new_tokens=4)[0].response_ids


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_the_update_never_holds_a_logit_for_every_token_and_word(
    tmp_path, mixed_rewards, monkeypatch
):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    vocab = 20_000
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, eos_token_id=3, **sizes)).save_pretrained(
        tmp_path / "m"
    )
    AutoTokenizer.from_pretrained(ROOT / "assets/tiny-base").save_pretrained(tmp_path / "m")
    monkeypatch.setattr(Transformer, "restrict_vocabulary", lambda self, tokens: None)
    monkeypatch.setattr(train.rollout.Sampler, "_text", lambda self, r: str(r.response_ids))
    watch, tokens = LargestTensor(), []
    update = train.update_policy

    def watched(run_, state, batch, advantages, old_logprobs):
        tokens.append(int(batch.response_mask.sum()))
        with watch:
            return update(run_, state, batch, advantages, old_logprobs)

    monkeypatch.setattr(train, "update_policy", watched)
    flags = "--steps 1 --algorithm grpo --prompts-per-step 8 --max-response-tokens 120"
    train_run(tmp_path / "r", *flags.split(), model=tmp_path / "m")
    assert tokens[0] > 3000
    assert 0 < watch.largest < tokens[0] * vocab / 4


@pytest.mark.parametrize(
    "flags",
    [
        "--overlong-buffer-tokens 8 --overlong-injection-alpha 0.5",
        "--length-reward-weight 0.5",
        "--entropy-control clip_cov --cov-fraction 0.2",
        "--entropy-control kl_cov --cov-fraction 0.2 --epochs-per-step 2",
        "--opsm-delta 0.0 --epochs-per-step 2",
        "--dual-clip 1.01 --epochs-per-step 3",
        "--is-mode tis --is-low 0.9 --is-high 0.95",
        "--aggregation prompt-mean",
    ],
)
def test_every_cross_cutting_option_reaches_the_update(
    flags, random_tiny_model, tmp_path, mixed_rewards, monkeypatch
):
    """Same seed, same samples in the first step: only the option can make the weights differ."""
    # The length reward is for thousands of tokens; the tiny model's responses have sixty.
    lowered = functools.partial(train.algorithms.length_reward, min_spread=1, min_longest=1)
    monkeypatch.setattr(train.algorithms, "length_reward", lowered)
    base = "--steps 1 --algorithm grpo --lr 1e-2 --minibatches-per-step 2 --max-response-tokens 60"
    extra = flags.split()
    epochs = extra[extra.index("--epochs-per-step") :][:2] if "--epochs-per-step" in extra else []
    train_run(tmp_path / "plain", *base.split(), *epochs, model=random_tiny_model)
    train_run(tmp_path / "option", *base.split(), *extra, model=random_tiny_model)
    assert not same(weights(tmp_path / "plain", 1), weights(tmp_path / "option", 1))
