"""The oracle of the long task: exact on a made-up policy, calibrated on the base model."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

from experiments import long_oracle
from experiments.make_long_assets import RESULTS


@pytest.fixture(scope="module")
def table():
    """A policy that gives any digit anywhere, with other chances where it doubts."""
    return torch.rand(45, 2, 5, 5, generator=torch.Generator().manual_seed(0)).double().softmax(-1)


def chance_by_enumeration(table, digit, doubt, steps, label):
    total = 0.0
    for path in itertools.product(range(5), repeat=len(steps)):
        chance, before, unsure = 1.0, digit, doubt
        for step, after in zip(steps, path, strict=True):
            chance *= float(table[step, int(unsure), before, after])
            unsure, before = unsure or after != RESULTS[step, before], after
        total += chance * (before == label)
    return total


@pytest.mark.parametrize("doubt", [False, True])
def test_values_are_the_sum_over_all_ways_to_go_on(table, doubt):
    chances = long_oracle.chances_to_end_right(table, 9, 3)
    for digit in range(5):
        expected = chance_by_enumeration(table, digit, doubt, [12, 11, 10, 9], 3)
        assert float(chances[12, int(doubt), digit]) == pytest.approx(expected, abs=1e-12)


def test_a_value_belongs_to_the_state_before_its_token(table):
    """It changes after a digit and nowhere else, is 1 or 0 after the last digit, and stays 0 after
    a token that is out of place.
    """
    tokens = ["<think>", " 7:", "2", "?", " 6:", "4", "?", "</think>", "\\boxed{", "4", "}"]
    v = long_oracle.values_of("1 7: 6:", "4", tokens, table)
    assert len(v) == 11 and v[0] == v[1] == v[2] and v[3] == v[4] == v[5] and v[6:] == [1.0] * 5
    slipped = RESULTS[7, 1] != 2
    assert v[0] == pytest.approx(chance_by_enumeration(table, 1, False, [7, 6], 4))
    assert v[3] == pytest.approx(chance_by_enumeration(table, 2, slipped, [6], 4))
    assert long_oracle.values_of("1 7: 6:", "3", tokens, table)[6:] == [0.0] * 5
    broken = long_oracle.values_of("1 7: 6:", "4", [*tokens[:4], "5", *tokens[5:]], table)
    assert broken[:5] == v[:5] and broken[5:] == [0.0] * 6
    assert long_oracle.values_of("1 44: 4:", "4", tokens, table) == [0.0] * 11


def test_a_run_with_the_oracle_has_a_critic_that_knows(tmp_path):
    flags = f"""--model {ROOT}/assets/tiny-long-base --data {ROOT}/assets/long-train.jsonl --steps 1
        --num-critic-only-steps 0 --prompts-per-step 24 --max-refills 0 --eval-data= --save-every 0
        --no-dynamic-sampling --log-samples 0 --output-dir {tmp_path}"""
    command = [sys.executable, "-m", "experiments.long_oracle", *flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["critic/start_auc"] == 0.5 and row["critic/end_auc"] > 0.95
        assert row["critic/mid_auc"] > 0.6 and abs(row["critic/bias"]) < 0.08
        assert row["critic/explained_variance_within"] > 0.2
        assert row["critic/explained_variance_between"] > 0.8
        assert "critic/loss" not in row and row["policy/grad_norm"] > 0
