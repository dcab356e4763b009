"""The tables and figures of diagnose.py: printed numbers against closed forms, stored groups."""

import json
import math
import subprocess
import sys

import pytest
import torch

import algorithms
import diagnose
import losses
from critic import Critic
from problems import load_tokenizer
from reports import explain, figures


def numbers(table):
    """Columns of the lines below the header, without the bars: [[#, reward, L, V x 3, ...], ...]"""
    lines = table.replace("|", " ").splitlines()
    return [[float(x) for x in line.split()] for line in lines if line[:2].strip().isdigit()]


def weights_by_label(table):
    """{objective: (weights for A = +1, weights for A = -1)} as printed."""
    rows = [line.split("|") for line in table.splitlines() if line.count("|") == 2][2:]
    return {r[0][:12].strip(): tuple([float(x) for x in c.split()] for c in r[1:]) for r in rows}


def run_diagnose(monkeypatch, capsys, *arguments):
    """Standard output of `python diagnose.py ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["diagnose.py", *map(str, arguments)])
    diagnose.main()
    return capsys.readouterr().out


def line_gae(tokens, reward, first, last, decay, t):
    """GAE with V on a straight line, by the geometric series: the slope of V is the TD error of
    every token but the last.
    """
    slope, left = (last - first) / (tokens - 1), tokens - 1 - t
    return slope * (1 - decay**left) / (1 - decay) + decay**left * (reward - last)


# ---- the tables


def test_the_explained_group_has_the_advantages_of_the_closed_forms():
    rows = numbers(explain.advantage_table(explain.example_group()))
    assert len(rows) == 8
    for row, (tokens, reward, first, last) in zip(rows, explain.EXAMPLE, strict=True):
        at = [0, (tokens - 1) // 2, tokens - 1]
        # One right of eight: mean 1/8, standard deviation sqrt(7)/8.
        grpo = math.sqrt(7) if reward else -1 / math.sqrt(7)
        decays = (0.95, 0.5 ** (1 / tokens))
        gae = [line_gae(tokens, reward, first, last, d, t) for d in decays for t in at]
        assert row[6:] == pytest.approx([grpo, *gae], abs=6e-4)
    assert rows[0][6] == 2.646  # 2.6458 in docs/objectives.md


def test_every_objective_has_weight_one_at_ratio_one():
    weights = weights_by_label(explain.weight_table())
    at = explain.RATIOS.index(1.0)
    assert all(up[at] == down[at] == 1.0 for up, down in weights.values())


def test_no_objective_is_missing_from_the_weights():
    shown = {algorithms.ALGORITHMS[name].objective for name, _ in explain.WEIGHED.values()}
    assert shown == set(losses.OBJECTIVES)
    assert set(weights_by_label(explain.weight_table())) == set(explain.WEIGHED)


def sapo_weight(tau, ratio):
    """4 s (1 - s) ratio with s = sigmoid(tau (ratio - 1)), and 4 s (1 - s) = 1 / cosh^2."""
    return ratio / math.cosh(tau * (ratio - 1) / 2) ** 2


# At ratios 0.5, 1.25 and 1.5: what is left of the ratio by each paper's clip.
CLOSED_FORMS = {
    "REINFORCE": ([1, 1, 1], [1, 1, 1]),
    "clip": ([0.5, 0, 0], [0, 1.25, 1.5]),
    "clip-higher": ([0.5, 1.25, 0], [0, 1.25, 1.5]),
    "dual clip": ([0.5, 0, 0], [0, 0, 0]),
    "GSPO": ([0.5, 0, 0], [0, 1.25, 1.5]),
    "CISPO": ([0.5, 1.25, 1.5], [0.5, 1.25, 1.5]),
    "SAPO": tuple([sapo_weight(tau, r) for r in (0.5, 1.25, 1.5)] for tau in (1.0, 1.05)),
    "GMPO": ([0.5, 1.25, 0], [0, 1.25, 1.5]),
    "trust mask": ([0, 1.25, 1.5], [0, 1.25, 1.5]),
}


@pytest.mark.parametrize("label", CLOSED_FORMS)
def test_the_weight_beside_ratio_one_is_the_papers(label):
    for printed, expected in zip(
        weights_by_label(explain.weight_table())[label], CLOSED_FORMS[label], strict=True
    ):
        assert printed[:1] + printed[2:] == pytest.approx(expected, abs=6e-4)


def test_the_weights_follow_the_objective_and_not_a_stored_table(monkeypatch):
    monkeypatch.setitem(losses.OBJECTIVES, "clip", algorithms.reinforce)
    assert explain.gradient_weights("clip", 1.0) == pytest.approx([1] * len(explain.RATIOS))


def test_the_tables_fit_one_screen(monkeypatch, capsys):
    lines = run_diagnose(monkeypatch, capsys, "--explain").splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 40


# ---- a stored group


LENGTHS = (3, 5, 4)


def write_run(folder, rewards=((0, 0, 0), (1, 0, 0)), penalty=0.0, **config):
    """A run directory with the given groups in step 4, each of three responses of LENGTHS."""
    folder.mkdir()
    config = {"group_size": 3, "critic_value_bias_init": 0.25, "algorithm": "grpo"} | config
    (folder / "config.json").write_text(json.dumps(config))
    rows = [
        {
            "step": 4,
            "problem_id": f"p{g}",
            "sample_index": i,
            "prompt": "1+1=",
            "response_ids": list(range(5, 5 + LENGTHS[i])),
            "reward": float(reward),
            "overlong_penalty": penalty,
            "kept": True,
        }
        for g, group in enumerate(rewards)
        for i, reward in enumerate(group)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_stored_group_without_critic_has_constant_v(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    out = run_diagnose(monkeypatch, capsys, "--explain", "--from", run, "--step", 4)
    assert "problem p1" in out and "V: critic_value_bias_init" in out
    rows = numbers(out)
    assert [row[2] for row in rows] == list(LENGTHS)
    assert [row[6] for row in rows] == pytest.approx(
        [math.sqrt(2)] + [-math.sqrt(0.5)] * 2, abs=6e-4
    )
    for row, length, reward in zip(rows, LENGTHS, (1, 0, 0), strict=True):
        assert row[3:6] == [0.25] * 3
        faded = [0.5 ** (left / length) for left in (length - 1, length - 1 - (length - 1) // 2, 0)]
        assert row[10:] == pytest.approx([f * (reward - 0.25) for f in faded], abs=6e-4)


def test_the_overlong_penalty_reaches_the_policy(tmp_path):
    group = explain.stored_group(write_run(tmp_path / "run", penalty=-0.5), 4)
    ppo, _ = explain.advantages(group, "ppo")
    assert ppo[0, 2].item() == pytest.approx(1 - 0.5 - 0.25)


def test_the_column_of_the_runs_own_algorithm_uses_its_settings(tmp_path):
    run = write_run(tmp_path / "run", algorithm="justrl2", gae_lambda_k=1.0, gae_lambda=0.1)
    table = explain.advantage_table(explain.stored_group(run, 4))
    assert "lambda = 1^(1/L)" in table and "lambda = 0.95:" in table
    assert [row[10] for row in numbers(table)] == [0.75, -0.25, -0.25]


@pytest.fixture(scope="module")
def saved_critic(random_tiny_model, tmp_path_factory):
    """A checkpoint of step 4 whose critic is not constant."""
    folder = tmp_path_factory.mktemp("saved") / "step_000004"
    critic = Critic.from_policy(random_tiny_model, bias=0.3)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.value_head.weight, std=0.1)
    critic.save_pretrained(folder / "critic")
    load_tokenizer(random_tiny_model).save_pretrained(folder / "policy")
    return critic, folder


def test_v_is_that_of_the_critic_saved_at_or_before_the_step(tmp_path, saved_critic):
    critic, folder = saved_critic
    run = write_run(tmp_path / "run")
    checkpoints = run / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "step_000004").symlink_to(folder)
    (checkpoints / "step_000005" / "critic").mkdir(parents=True)  # later, and broken
    group = explain.stored_group(run, 4)
    assert "critic of step_000004" in group.about
    prompt = load_tokenizer(folder / "policy")("1+1=", add_special_tokens=False)["input_ids"]
    for i, length in enumerate(LENGTHS):
        # V before response token t, by one forward over its prefix alone.
        for t in range(length):
            prefix = torch.tensor(prompt + list(range(5, 5 + t)))
            ends = torch.tensor([0, len(prefix)], dtype=torch.int32)
            alone = critic(prefix, ends, torch.tensor([len(prefix) - 1])).item()
            assert group.values[i][t].item() == pytest.approx(alone, abs=1e-5)


def test_v_is_as_logged_where_it_was_logged(tmp_path):
    run = write_run(tmp_path / "run", rewards=((1, 0, 0),))
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        row["values"] = [0.1 * i for i in row["response_ids"]]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = explain.stored_group(run, 4)
    assert "as logged" in group.about
    assert [v.tolist() for v in group.values] == [pytest.approx(row["values"]) for row in rows]


def test_a_problem_drawn_twice_in_a_step_makes_two_groups(tmp_path):
    run = write_run(tmp_path / "run", rewards=((0, 0, 0), (0, 1, 0)))
    file = run / "rollouts.jsonl"
    file.write_text(file.read_text().replace('"p1"', '"p0"'))
    assert explain.stored_group(run, 4).raw == [0, 1, 0]


# ---- what is missing is named


@pytest.mark.parametrize("name", ["config.json", "rollouts.jsonl"])
def test_a_missing_file_is_named(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds no {name}; give the directory"):
        explain.stored_group(run, 4)


@pytest.mark.parametrize("rewards", [((0, 0, 0),), ((1, 1, 1),), ((1, 0),)])
def test_a_step_without_a_whole_mixed_group_says_what_to_do(tmp_path, rewards):
    with pytest.raises(ValueError, match="no whole kept group of 3.*--log-samples -1"):
        explain.stored_group(write_run(tmp_path / "run", rewards), 4)


def test_a_step_that_was_not_logged_is_named(tmp_path):
    with pytest.raises(ValueError, match="in step 9"):
        explain.stored_group(write_run(tmp_path / "run"), 9)


def test_a_line_that_was_cut_off_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    with open(run / "rollouts.jsonl", "a") as file:
        file.write('{"step": 4, "prob')
    with pytest.raises(ValueError, match="rollouts.jsonl:7 is not JSON"):
        explain.stored_group(run, 4)


def test_a_checkpoint_without_its_weights_is_one_sentence(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    (run / "checkpoints" / "step_000004" / "critic").mkdir(parents=True)
    with pytest.raises(SystemExit, match="^error: .*step_000004"):
        run_diagnose(monkeypatch, capsys, "--explain", "--from", run, "--step", 4)


def test_a_folder_that_cannot_be_written_and_a_damaged_config_are_named(
    tmp_path, monkeypatch, capsys
):
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SystemExit, match="^error: --output /proc/x cannot be written"):
        run_diagnose(monkeypatch, capsys, run, "--output", "/proc/x")
    (run / "config.json").write_text("{")
    with pytest.raises(SystemExit, match="^error: .*run/config.json is damaged"):
        run_diagnose(monkeypatch, capsys, "--explain", "--from", run, "--step", 4)


def test_steps_are_marked_by_whole_numbers(tmp_path):
    """Short runs had ticks at step 1.5."""
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    figures.draw_panel(ax, "", {"x": "x"}, {"run": [{"step": s, "x": s} for s in (1, 2, 3)]})
    assert all(tick == int(tick) for tick in ax.get_xticks())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--explain", "RUN"],
        ["--explain", "--step", "1"],
        ["--explain", "--output", "F"],
        ["RUN", "--from", "R", "--step", "1"],
    ],
)
def test_flags_that_do_not_fit_together_are_refused(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit):
        run_diagnose(monkeypatch, capsys, *arguments)
    assert "--explain --from RUN_DIR --step N" in capsys.readouterr().err


# ---- figures


def write_metrics(folder, steps=3):
    folder.mkdir()
    rows = [
        {"step": s, "rollout/reward_mean": 0.1 * s, "eval/accuracy": None} for s in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_figures_are_written_for_metrics_that_are_there_and_runs_are_overlaid(
    tmp_path, monkeypatch, capsys
):
    runs = [write_metrics(tmp_path / name) for name in ("a", "b")]
    out = run_diagnose(monkeypatch, capsys, *runs)
    assert out.split() == [str(tmp_path / "a" / "figures" / "reward.png")]
    assert (tmp_path / "a" / "figures" / "reward.png").read_bytes()[:4] == b"\x89PNG"


def test_figures_of_a_run_do_not_import_the_model(tmp_path):
    code = (
        "import sys, pathlib, diagnose; from reports import figures; "
        f"run = pathlib.Path({str(write_metrics(tmp_path / 'a'))!r}); "
        "assert figures.draw_runs([run], run); "
        "assert not {'model', 'critic', 'data', 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=diagnose.__file__.rpartition("/")[0], check=True
    )


def write_audit(folder, steps, pairs=4, shift=0.0):
    """metrics.jsonl and audit.jsonl of `steps` steps; curves rise with the step."""
    write_metrics(folder, steps)
    rows = [
        {
            "step": s,
            "start": [[0.2, 0.25], [0.6, 0.5]],
            "auc": [0.5 + shift + 0.01 * s] * 11,
            "pairs": pairs * s,
            "length_auc": 0.4,
            "v_right": [0.7] * 11,
            "v_wrong": [0.3] * 11,
            "mixed": 2,
            "advantage_share": [0.1] * 10,
        }
        for s in range(1, steps + 1)
    ]
    (folder / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def fast(monkeypatch):
    """Draws everything but writes no pixels."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, dpi: None)


def panels_of(runs):
    """Axes of the audit figure by title."""
    from matplotlib.figure import Figure

    stages = figures.audit_stages(runs)
    axes = {}
    for drawer in (figures.draw_reliability, figures.draw_auc, figures.draw_v_by_outcome):
        axes[drawer.__name__] = ax = Figure().subplots()
        drawer(ax, stages)
    return axes


def test_the_audit_of_one_run_is_drawn_in_three_stages(tmp_path, fast):
    run = write_audit(tmp_path / "a", 6)
    assert [p.name for p in figures.draw_runs([run], tmp_path)] == ["reward.png", "audit.png"]
    axes = panels_of({"a": run})
    lines = {line.get_label(): line.get_ydata() for line in axes["draw_auc"].lines}
    # Steps 1 and 2 have 4 and 8 pairs: (4 * 0.51 + 8 * 0.52) / 12.
    assert lines["steps 1 to 2"][5] == pytest.approx(0.5 + (1 * 0.01 + 2 * 0.02) / 3)
    assert lines["steps 5 to 6"][5] == pytest.approx(0.5 + (5 * 0.05 + 6 * 0.06) / 11)
    # 0.4 for "the shorter one is right" is 0.6 for the longer one.
    dotted = [line for line in axes["draw_auc"].lines if line.get_linestyle() == ":"]
    assert dotted[0].get_ydata() == pytest.approx([0.6, 0.6])
    right, wrong = axes["draw_v_by_outcome"].lines[:2]
    assert right.get_ydata()[0] == 0.7 and wrong.get_ydata()[0] == 0.3
    (first, *_) = axes["draw_reliability"].lines
    assert first.get_xydata().tolist() == [[0.2, 0.25]] * 2 + [[0.6, 0.5]] * 2


def test_audits_of_several_runs_are_overlaid_even_of_the_same_name(tmp_path, fast):
    for parent in "xy":
        (tmp_path / parent).mkdir()
    runs = [write_audit(tmp_path / "x/run", 6), write_audit(tmp_path / "y/run", 3, shift=0.3)]
    assert [p.name for p in figures.draw_runs(runs, tmp_path)] == ["reward.png", "audit.png"]
    lines = panels_of({"one": runs[0], "two": runs[1]})["draw_auc"].lines
    labels = {line.get_label(): line.get_ydata()[0] for line in lines if len(line.get_ydata())}
    assert labels["one, steps 5 to 6"] == pytest.approx(0.555, abs=1e-3)
    assert labels["two, steps 3 to 3"] == pytest.approx(0.83)


def test_steps_without_pairs_are_left_out_of_the_curves(tmp_path):
    run = write_audit(tmp_path / "a", 3)
    rows = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    rows[0] |= {"auc": [None] * 11, "length_auc": None, "pairs": 0}
    (run / "audit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = figures.audit_stages({"a": run})
    assert list(figures.pooled(stages, "auc", "pairs")) == ["steps 2 to 2", "steps 3 to 3"]


def test_a_run_without_a_critic_has_the_share_of_advantages_alone(tmp_path):
    run = write_metrics(tmp_path / "a")
    (run / "audit.jsonl").write_text('{"step": 1, "advantage_share": [0.1, 0.1]}\n')
    stages = figures.audit_stages({"a": run})
    assert not figures.pooled(stages, "auc", "pairs")
    assert figures.pooled(stages, "advantage_share")["steps 1 to 1"].tolist() == [0.1, 0.1]


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no metrics.jsonl; give the directory"):
        figures.draw_runs([tmp_path], tmp_path)
