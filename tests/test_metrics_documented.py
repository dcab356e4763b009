"""docs/metrics.md defines every metric under its full key, and none that does not exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

import train

PAGE = Path(__file__).parent.parent / "docs/metrics.md"
PREFIXES = "rollout policy critic perf eval alarm".split()
# Keys that are open at the end, as the page names them; what they stand for was logged.
FAMILIES = {
    "rollout/verdict_REASON": r"rollout/verdict_[a-z_]+",
    "eval/pass_at_K": r"eval/pass_at_\d+",
}
# Together these runs log every key there is: each feature that adds one is on somewhere.
RUNS = [
    "--algorithm justrl2 --num-critic-only-steps 1 --eval-every 1 --opsm-delta 0.1 "
    "--over-sampling 2 --partial-rollout --max-staleness 2",
    "--algorithm justrl2 --async-steps 1 --reward-mix '0.9 correct + 0.1 format'",
    "--algorithm grpo --overlong-buffer-tokens 8 --overlong-filter",
    "--algorithm ppo --kl-coef 0.1 --entropy-coef 0.01 --entropy-control kl_cov --cov-fraction 0.1",
]
SMALL = "--steps 2 --prompts-per-step 4 --group-size 4 --log-samples 0 --save-every 0"


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Every key in metrics.jsonl of short runs of the embedded model."""
    folder, keys = tmp_path_factory.mktemp("runs"), set()
    problem = folder / "eval.jsonl"
    problem.write_text('{"prompt": "1 a:+1", "label": "2"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("run.metrics.draw_figures", lambda folder: None)
        for number, flags in enumerate(RUNS):
            where = ["--output-dir", str(folder / str(number)), "--eval-data", str(problem)]
            train.main([*where, *shlex.split(f"{SMALL} {flags}")])
            for line in (folder / str(number) / "metrics.jsonl").read_text().splitlines():
                keys |= json.loads(line).keys()
    return keys - {"step"}


@pytest.fixture(scope="module")
def documented():
    """The keys that begin a row of the page's tables; a mention in a sentence defines nothing."""
    keys = re.findall(rf"^\| `((?:{'|'.join(PREFIXES)})/\w+)` \|", PAGE.read_text(), re.M)
    assert len(keys) == len(set(keys)), "docs/metrics.md defines a metric twice; keep one row."
    return set(keys)


def test_the_runs_log_what_each_feature_adds(logged):
    """Else a feature that is switched off would take its keys out of both tests below."""
    assert {f"{prefix}/" for prefix in PREFIXES} == {key[: key.index("/") + 1] for key in logged}
    added = "policy/kl policy/opsm_fraction rollout/format_share perf/wait_rollout_s eval/accuracy"
    assert set(added.split()) <= logged
    assert all(any(re.fullmatch(p, key) for key in logged) for p in FAMILIES.values())


def test_every_logged_metric_is_documented(logged, documented):
    """Once a key counted as defined if its last part stood anywhere: `loss`, `lr` always did."""
    families = [pattern for key, pattern in FAMILIES.items() if key in documented]
    missing = {
        key for key in logged - documented if not any(re.fullmatch(p, key) for p in families)
    }
    assert not missing, (
        f"{', '.join(sorted(missing))}: logged, but not in docs/metrics.md. Add a row with the "
        "full key in back-ticks, its formula, unit and healthy range to the table of its prefix."
    )


def test_every_documented_metric_is_logged(logged, documented):
    gone = documented - logged - FAMILIES.keys()
    assert not gone, (
        f"{', '.join(sorted(gone))}: in docs/metrics.md, but no run of this test logs it. Remove "
        "the row if the metric is gone; if a flag switches it on, add that flag to RUNS."
    )
