"""The comparison's bookkeeping on made-up runs: tokens, pairing, bands, choice of the rate."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import compare
from experiments.compare import PARTS, Arm, Job, jobs_of


def write_run(root, job, accuracies, steps=4, groups=10, length=50.0):
    """A complete run: `groups` groups of 8 per step, evaluated before it and after every step."""
    folder = job.folder(root)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"steps": steps, "group_size": 8}))
    rows = [{"step": 0, "eval/accuracy": accuracies[0]}]
    for step in range(1, steps + 1):
        rollout = {"groups_finished": groups, "groups_kept": 3, "response_length_mean": length}
        row = {"step": step, "eval/accuracy": accuracies[step], "perf/step_s": 2.0}
        rows.append(row | {f"rollout/{k}": v for k, v in rollout.items()})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


def job(label, seed=0, rate="1e-3", variant="clean"):
    return Job(Arm(label, {}), variant, rate, seed)


def test_tokens_of_kept_and_dropped_responses_count(tmp_path):
    write_run(tmp_path, job("GRPO"), [0, 0.1, 0.2, 0.3, 0.4])
    run = compare.read_run(job("GRPO"), tmp_path)
    assert run["tokens"] == 4 * 10 * 8 * 50
    assert run["curve"][1] == (4000, 0.1) and run["seconds"] == 8 and run["critic_seconds"] == 0


def test_runs_with_longer_responses_are_compared_at_equal_tokens(tmp_path):
    line = [0, 0.1, 0.2, 0.3, 0.4]
    write_run(tmp_path, job("GRPO"), line)
    write_run(tmp_path, job("JustRL II"), line, length=100.0)  # the same line, twice the tokens
    runs = [compare.read_run(job(label), tmp_path) for label in ("GRPO", "JustRL II")]
    grpo, justrl2 = compare.summarise(runs, "GRPO")
    assert grpo["budgets"][-1] == justrl2["budgets"][-1] == 16_000
    assert grpo["end"] == pytest.approx(0.4) and justrl2["end"] == pytest.approx(0.2)
    assert justrl2["area_difference"][0][0] == pytest.approx(-0.1)


def test_the_spread_of_seeds_leaves_a_paired_difference(tmp_path):
    jobs = []
    for seed in range(5):
        easy = 0.1 * seed  # good and bad seeds are so for both
        for label, gain in (("GRPO", 0.0), ("JustRL II", 0.02)):
            jobs.append(job(label, seed))
            write_run(tmp_path, jobs[-1], [easy + gain] * 5)
    rows = compare.summarise([compare.read_run(j, tmp_path) for j in jobs], "GRPO")
    row = next(row for row in rows if row["label"] == "JustRL II")
    mean, low, high = (x for (x,) in row["area_difference"])
    assert mean == pytest.approx(0.02) and high - low < 1e-9
    assert row["accuracy"][2][0] - row["accuracy"][1][0] > 0.1  # unpaired, the seeds hide it


def test_the_band_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(40):
        _, (low,), (high,) = compare.band(rng.normal(size=(30, 1)))
        inside += low < 0 < high
    assert 33 <= inside <= 40


def test_wrong_labels_are_a_fixed_share_and_never_the_right_one(tmp_path):
    compare.write_noisy(tmp_path / "noisy.jsonl")
    lines = (compare.ROOT / "assets/long-train.jsonl").read_text().splitlines()
    clean = [json.loads(line) for line in lines]
    noisy = [json.loads(line) for line in (tmp_path / "noisy.jsonl").read_text().splitlines()]
    wrong = sum(a["label"] != b["label"] for a, b in zip(clean, noisy, strict=True))
    assert wrong == round(0.15 * len(clean))
    assert all(a["prompt"] == b["prompt"] for a, b in zip(clean, noisy, strict=True))


def test_the_best_rate_is_that_of_the_whole_curve(tmp_path):
    for j in jobs_of(PARTS["grid"], tmp_path):
        early = j.rate == "6e-4"
        write_run(tmp_path, j, [0, 0.5, 0.6, 0.7, 0.7] if early else [0, 0, 0, 0, 0.9])
    assert set(compare.best_rates(tmp_path).values()) == {"6e-4"}
    jobs = jobs_of(PARTS["main"], tmp_path)
    assert len(jobs) == 4 * 5 * 2 == len({j.folder(tmp_path) for j in jobs})
    assert {j.rate for j in jobs} == {"6e-4"}


def test_complete_runs_are_skipped_and_others_resumed(tmp_path, monkeypatch):
    done, half, new = (job("GRPO", seed) for seed in range(3))
    write_run(tmp_path, done, [0] * 5)
    write_run(tmp_path, half, [0] * 5)
    (half.folder(tmp_path) / "config.json").write_text('{"steps": 9, "group_size": 8}')
    started = {}

    def record(command, **_):
        started[command[command.index("--seed") + 1]] = "--resume" in command
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(compare.subprocess, "run", record)
    compare.run_all([done, half, new], tmp_path, 1)
    assert started == {"1": True, "2": False}


def test_a_run_that_gave_up_for_want_of_a_signal_is_complete(tmp_path):
    """As --reward format_only does, which pays every response alike after a few steps."""
    gave_up = job("GRPO, reward format_only")
    write_run(tmp_path, gave_up, [0.3] * 7, steps=6)
    folder = gave_up.folder(tmp_path)
    rows = (folder / "metrics.jsonl").read_text().splitlines(True)[:5]
    empty = [row.replace('"rollout/groups_kept": 3', '"rollout/groups_kept": 0') for row in rows]
    for kept, expected in ((rows, False), (rows[:3] + empty[3:], False), (empty, True)):
        (folder / "metrics.jsonl").write_text("".join(kept))
        assert compare.is_complete(folder) == expected


def test_every_variation_has_the_rate_of_what_it_varies(tmp_path, monkeypatch):
    tuned = {arm.label: arm.flags["algorithm"] for arm in compare.GRID}
    monkeypatch.setattr(compare, "best_rates", lambda root: {label: label for label in tuned})
    for part in ("longer", "ablations", "controls", "muon"):
        for j in jobs_of(PARTS[part], tmp_path):
            assert j.arm.label.startswith(j.rate)
            assert tuned[j.rate] == j.arm.flags["algorithm"].removesuffix("_group")


def test_a_variation_replaces_a_flag_and_an_oracle_is_another_program(tmp_path):
    job = Job(compare.NO_WARM_UP, "noisy", "1e-3", 7)
    command = job.command(tmp_path)
    assert command[0] == "train.py" and command.count("--num-critic-only-steps") == 1
    assert command[command.index("--num-critic-only-steps") + 1] == "0"
    assert command[command.index("--data") + 1] == str(tmp_path / "noisy.jsonl")
    assert job.folder(tmp_path).name == "noisy_JustRL-II--no-warm-up_lr1e-3_seed7"
    assert job._replace(arm=compare.ORACLE).command(tmp_path)[1] == "experiments.long_oracle"
    assert "--no-whiten-advantages" in compare.run_flags(dict(whiten_advantages=False))


def test_a_run_that_fails_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(compare.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="GRPO ended with status 1; see .*log"):
        compare.run_all([job("GRPO")], tmp_path, 1)


def test_every_combination_of_flags_is_a_configuration(tmp_path, monkeypatch):
    from algorithms import ALGORITHMS
    from config import parse

    rates = {arm.label: "6e-4" for arm in compare.GRID}
    monkeypatch.setattr(compare, "best_rates", lambda root: rates)
    for part in PARTS.values():
        for j in jobs_of(part._replace(seeds=[0]), tmp_path):
            command = j.command(tmp_path)
            parse(command[command.index("--output-dir") :]).resolved(ALGORITHMS)


def test_without_a_real_model_one_sentence_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "REAL_MODEL", tmp_path / "nowhere")
    monkeypatch.setattr("sys.argv", ["compare.py", "real", "--output-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as error:
        compare.main()
    words = str(error.value) + capsys.readouterr().err
    assert "nowhere; `make compare-real` fetches it" in words


def test_all_leaves_the_real_model_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare.py", "all", "--output-dir", str(tmp_path)])
    reported = []
    monkeypatch.setattr(compare, "PARTS", dict.fromkeys(PARTS, compare.Part([], [], None)))
    monkeypatch.setattr(
        compare, "report", lambda jobs, root, name, reference: reported.append(name)
    )
    compare.main()
    assert set(reported) == set(compare.PARTS) - {"real", "real-groups"}


def test_a_report_writes_table_and_figure(tmp_path):
    jobs = [job(label, seed) for label in ("GRPO", "JustRL II") for seed in range(2)]
    for j in jobs:
        write_run(tmp_path, j, [0.1] * 5)
    compare.report([*jobs, job("GRPO", 7)], tmp_path, "main", "GRPO")  # one run is missing
    assert (tmp_path / "main.png").stat().st_size > 1000
    assert "| JustRL II | 1e-3 | 2 | 0.100 |" in (tmp_path / "main.md").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("grid --jobs 0", "--jobs must be above 0"),
        ("grid --output-dir /proc/x", "--output-dir /proc/x cannot be written"),
        ("main --output-dir /proc/x", "is not complete; run the grid first"),
    ],
)
def test_bad_input_is_one_sentence(flags, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", *flags.split()])
    with pytest.raises(SystemExit) as error:
        compare.main()
    assert words in str(error.value) + capsys.readouterr().err


def test_the_report_leaves_out_what_it_cannot_know_and_goes_on(tmp_path, monkeypatch, capsys):
    """It stopped unless all runs of the grid were complete."""
    write_run(tmp_path, jobs_of(PARTS["grid"], tmp_path)[0], [0.1] * 5)
    monkeypatch.setattr("sys.argv", ["compare.py", "report", "--output-dir", str(tmp_path)])
    compare.main()
    out = capsys.readouterr().out
    assert "grid: 1 of 17 runs are complete" in out and "muon: left out" in out
