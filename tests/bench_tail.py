"""What long responses cost the scheduler: slot-steps that train, that are thrown away, that idle.

    make bench-tail          # prints the table and draws docs/figures/tail.svg

The project's own `collect` and `Sampler` run; only the model is left out. Each response stops at a
length drawn for its random key: lognormal, mean 10,000 and at most 128,000 tokens, both divided by
64 so that minutes suffice.
"""

import math
import os
import random
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

os.environ["TQDM_DISABLE"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))
from config import ROOT
from data import DataOrder, Problem
from model import Transformer
from rollout import Sampler, collect
from verify import Verdict

SCALE, SIGMA = 64, 1.3
CAP = 128_000 // SCALE
SLOTS, PROMPTS, GROUP, STEPS = 64, 32, 8, 12
EOS, WORD = 2, 5
MODES = {
    "static batches": {},
    "continuous batching": {},
    "+ over-sampling 2x": {"over_sampling": 2.0},
    "+ partial rollout": {"over_sampling": 2.0, "partial_rollout": True},
}


def length_of(key):
    """Length of the response with this random key."""
    mean = math.log(10_000 / SCALE) - SIGMA**2 / 2
    return min(CAP, max(1, round(random.Random(key).lognormvariate(mean, SIGMA))))


class ScriptedSampler(Sampler):
    """The sampler without its model: a response ends at its drawn length."""

    def __init__(self, static):
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        super().__init__(Transformer(config).requires_grad_(False), [EOS], SLOTS)
        self.static, self.live = static, []

    def run(self, rollouts, *args):
        """Static batches: nothing starts before the longest of the last ones has ended."""
        size = SLOTS if self.static else len(rollouts)
        for first in range(0, len(rollouts), size):
            super().run(rollouts[first : first + size], *args)

    def _forward(self, cache, pieces):
        pass

    def _decode(self, batch, steps, step_of):
        self.live.append(len(batch.rows))
        last = lambda r: len(r.response_ids) + 1 == length_of(r.key)
        tokens = [[EOS if last(row.rollout) else WORD] for row in batch.rows]
        return tokens, [[0.0]] * len(tokens)


class Grader:
    """Nothing to grade: lengths are the subject."""

    def submit(self, *args):
        future = Future()
        future.set_result(Verdict(True, "ok", None))
        return future


def measure(name):
    """Shares of all slot-steps, over STEPS training steps, and the rows alive in the last one."""
    sampler = ScriptedSampler(static=name == "static batches")
    fields = dict(
        prompts_per_step=PROMPTS, group_size=GROUP, max_refills=0, dynamic_sampling=False, seed=0,
        max_response_tokens=CAP, temperature=1.0, think="auto", max_staleness=None,
        over_sampling=1.0, partial_rollout=False, reward="correct",
    )  # fmt: skip
    config = SimpleNamespace(**fields | MODES[name])
    problems = [Problem(str(i), i, "", [WORD] * 4, "") for i in range(1000)]
    order, buffer = DataOrder(len(problems), 0), []
    kept, rows, decoded = [], 0, 0
    for step in range(STEPS):
        sampler.live.clear()
        collected = collect(sampler, Grader(), problems, order, buffer, config, step)
        buffer = collected.unfinished
        kept += [len(r.response_ids) for group in collected.groups for r in group]
        rows, decoded = rows + sum(sampler.live), decoded + len(sampler.live)
    waiting = sum(len(r.response_ids) for group in buffer for r in group)
    total = decoded * SLOTS
    trained, later, idle = sum(kept) / total, waiting / total, 1 - rows / total
    return {
        "trained": trained, "later": later, "thrown away": 1 - trained - later - idle,
        "idle": idle, "mean length": sum(kept) / len(kept) * SCALE,
        "steps": total / SLOTS / STEPS * SCALE, "live": list(sampler.live),
    }  # fmt: skip


def draw_figure(results, file):
    """Rows alive over one step, and where the slot-steps went."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tail"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(3, 2))
    for name, result in results.items():
        thinned = result["live"][::24]
        left.plot([24 * SCALE * i for i in range(len(thinned))], thinned, label=name, linewidth=1)
    left.set(xlabel="decode steps of the last training step", ylabel=f"rows alive, of {SLOTS}")
    left.legend(fontsize=8)
    bottom = [0.0] * len(results)
    for part, colour in zip(
        ("trained", "later", "thrown away", "idle"), ("C2", "C0", "C1", "0.85"), strict=True
    ):
        values = [result[part] for result in results.values()]
        right.barh(list(results), values, left=bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.invert_yaxis()
    right.set(xlabel="share of slot-steps", xlim=(0, 1))
    right.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=4)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main():
    torch.set_num_threads(1)
    results = {name: measure(name) for name in MODES}
    columns = ("trained", "later", "thrown away", "idle")
    print(f"{'share of slot-steps':22}" + "".join(f"{c:>12}" for c in columns), end="")
    print("  steps per training step  mean kept length")
    for name, result in results.items():
        print(f"{name:22}" + "".join(f"{result[c]:12.1%}" for c in columns), end="")
        print(f"{result['steps']:25,.0f}{result['mean length']:18,.0f}")
    draw_figure(results, ROOT / "docs/figures/tail.svg")


if __name__ == "__main__":
    main()
