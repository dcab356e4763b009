"""Metrics against the golden numbers, and sums that are never means of means."""

import json
import math
from pathlib import Path

import pytest

import files
from run import metrics
from run.scores import is_repetitive

VECTORS = json.loads((Path(__file__).parent / "data/justrl2_golden.json").read_text())
VECTORS = {v["name"]: v for v in (VECTORS["vectors"] if isinstance(VECTORS, dict) else VECTORS)}


def groups(name):
    inputs = VECTORS[name]["inputs"]
    rewards, size = inputs["rewards"], inputs["group_size"]
    return [rewards[i : i + size] for i in range(0, len(rewards), size)], VECTORS[name]["expected"]


@pytest.mark.parametrize("name", ["metrics/group_signal", "metrics/group_signal_tiny_spread"])
def test_group_signal_equals_the_golden_vectors(name):
    rewards, expected = groups(name)
    signal = metrics.group_signal(rewards)
    assert signal == {key: expected[key] for key in signal}
    assert 1 - signal["no_grad"] == expected["effective_ratio"]
    assert signal["solve_all"] * len(rewards) == expected["all_one_count"]
    assert signal["solve_none"] * len(rewards) == expected["all_zero_count"]


def test_repetition_equals_the_golden_vector():
    numbers = " ".join(map(str, range(1, 3001)))
    texts = ["ab" * 6000, "0123456789" * 1000, "0123456789" * 1000 + "0", numbers]
    texts += ["short loop " * 50, numbers + "so the answer is 7. " * 600]
    vector = VECTORS["metrics/repetition"]
    lengths = [len(text) for text in texts]
    assert [abs(a - b) <= 1 for a, b in zip(lengths, vector["inputs"]["lengths"], strict=True)]
    assert [is_repetitive(text) for text in texts] == vector["expected"]["repetition"]


def test_sums_divide_once():
    sums = metrics.Sums()
    sums.add({"x": (4.0, 2.0), "loss": (1.0, 0.0)})
    sums.add({"x": (1.0, 8.0), "loss": (2.0, 0.0), "y": (0.0, 0.0)})
    sums.add_optimizer_step(grad_norm=3.0)
    means = sums.means()
    assert means["x"] == 0.5  # not the mean of 2 and 1/8
    assert means["loss"] == 3.0 and means["grad_norm"] == 3.0 and math.isnan(means["y"])


def test_a_nan_is_null_in_the_metrics_file(tmp_path):
    files.append_jsonl(tmp_path / "m.jsonl", [{"step": 1, "a": math.nan, "b": 2.0}])
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "a": None, "b": 2.0}


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text('{"old": 1}\n')

    def rows():
        yield {"new": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_jsonl(file, rows())
    assert file.read_text() == '{"old": 1}\n'
    files.write_jsonl(file, [{"new": 2}])  # nothing of the first attempt is in it
    assert file.read_text() == '{"new": 2}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full, on Linux")
def test_a_full_disk_says_of_which_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        files.append_jsonl(Path("/dev/full"), [{"a": 1}])


def test_an_evaluation_joins_the_row_of_its_step_or_begins_it(tmp_path):
    file = tmp_path / "m.jsonl"
    metrics.amend(file, 0, {"a": 0.5})
    files.append_jsonl(file, [{"step": 1, "b": 2.0}])
    metrics.amend(file, 1, {"a": 0.25})
    assert file.read_text() == '{"step": 0, "a": 0.5}\n{"step": 1, "b": 2.0, "a": 0.25}\n'


def test_rows_after_the_resumed_step_are_forgotten(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "cut o')
    metrics.forget_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
