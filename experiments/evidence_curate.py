"""Does the curation work? `make curate-evidence`, or with a run that exists already:

    python -m experiments.evidence_curate [RUN]

RUN is a run of the demo with checkpoints at 20, 40 and 80 steps; without one it is trained first.
430 embedded problems, most of them short, get a wrong label in 15 % of the cases. The target is
the policy after 20 steps; three audit models of rising strength look for the wrong labels. Then
the target is trained for a few steps on the problems before and after curation.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHORT, LONG = range(2, 4), range(12, 19)
ROWS, SHORT_SHARE, WRONG_SHARE = 430, 0.92, 0.15
TRAIN = "--steps 80 --seed 1 --save-every 20 --keep-checkpoints 0 --eval-every 20"
# The critic alone for five steps, then one of the policy: the target hardly moves.
FIRST_STEPS = "--steps 6 --num-critic-only-steps 5 --eval-every 0"


def python(*arguments):
    """Run a script of the project, its output on ours."""
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True)


def rows_of(file):
    """The rows of a JSON lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def plant(problems, rng):
    """Problems of a skewed mix, 15 % of them with another digit as label; `true` keeps the right
    one.
    """
    short, long = ([p for p in problems if p["steps"] in steps] for steps in (SHORT, LONG))
    count = round(ROWS * SHORT_SHARE)
    rows = [dict(row) for row in rng.sample(short, count) + rng.sample(long, ROWS - count)]
    wrong = set(rng.sample(range(ROWS), round(ROWS * WRONG_SHARE)))
    for i, row in enumerate(rows):
        row["true"] = row["label"]
        if i in wrong:
            row["label"] = str((int(row["label"]) + rng.randint(1, 9)) % 10)
    rng.shuffle(rows)
    return rows


def zero_variance(data, target, folder):
    """Share of groups without signal in the first steps of training."""
    flags = f"--model {target} --data {data} --output-dir {folder} {FIRST_STEPS}".split()
    python("train.py", *flags, "--eval-data", "")
    steps = rows_of(folder / "metrics.jsonl")
    groups = [m["rollout/groups_finished"] for m in steps]
    flat = [m["rollout/zero_variance_share"] * m["rollout/groups_finished"] for m in steps]
    return sum(flat) / sum(groups), sum(groups)


def main():
    """Command line entry."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else scratch / "run"
        if not run.exists():
            python("train.py", *TRAIN.split(), "--output-dir", run)
        target, middle, last = (run / f"checkpoints/step_{s:06d}/policy" for s in (20, 40, 80))
        raw = scratch / "raw.jsonl"
        rows = plant(rows_of(ROOT / "assets/train.jsonl"), random.Random(0))
        raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
        wrong = sum(row["label"] != row["true"] for row in rows)
        lines = [f"{len(rows)} problems, {wrong} wrong labels"]
        auditors = {"base": ROOT / "assets/tiny-base", "step 40": middle, "step 80": last}
        for name, auditor in auditors.items():
            output = scratch / f"{name.replace(' ', '-')}.jsonl"
            samples = 16 if auditor == last else 0  # only its output is trained on
            flags = f"--model {target} --audit-model {auditor} --data {raw} --samples {samples}"
            python("curate.py", *flags.split(), "--max-pass-rate", 0.85, "--output", output)
            dropped = rows_of(output.with_suffix(".dropped.jsonl"))
            doubtful = [row for row in dropped if row["reason"] == "doubtful_label"]
            caught = sum(row["label"] != row["true"] for row in doubtful) / wrong
            lost = sum(row["label"] == row["true"] for row in doubtful) / (len(rows) - wrong)
            lines.append(
                f"audit by {name:8} caught {caught:.3f} of the wrong labels, "
                f"lost {lost:.3f} of the good ones"
            )
        kept = rows_of(output)
        left = sum(row["label"] != row["true"] for row in kept)
        lines.append(f"{len(kept)} rows written, {left} of them wrong")
        before, groups = zero_variance(raw, target, scratch / "before")
        after, groups_after = zero_variance(output, target, scratch / "after")
        lines.append(
            f"zero-variance share {before:.3f} ({groups} groups) -> {after:.3f} ({groups_after})"
        )
    print("\n" + "\n".join(lines))
    ok = caught >= 0.9 and lost <= 0.03 and before > 0.55 and after < 0.3
    raise SystemExit(0 if ok else "the numbers miss their targets")


if __name__ == "__main__":
    main()
