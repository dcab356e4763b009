"""What long responses cost the scheduler: slot-steps that train, that are thrown away, that idle.

    make bench-tail          # prints the tables and draws docs/figures/tail.svg
    python -m benchmarks.tail --zero-variance 0.6 --ranks 8

The project's own `collect` and `Sampler` run; only the model is left out. Each response stops at a
length that follows from its random key: lognormal, mean 10,000 and at most 128,000 tokens, both
divided by 64 so that minutes suffice. --zero-variance: share of the problems whose responses are
all right, so that their groups are dropped. --ranks: number of ranks that share the slots.
"""

import argparse
import math
import pickle
import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

import distributed
import rollout
from config import ROOT
from data import DataOrder, Problem
from model import Transformer
from rollout import Sampler, collect, has_signal
from sampler import engine, groups
from sampler.scheduler import Admitted, Scheduler
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
    # The mean of a lognormal is exp(mu + sigma^2 / 2); this is its mu
    mean = math.log(10_000 / SCALE) - SIGMA**2 / 2
    return min(CAP, max(1, round(random.Random(key).lognormvariate(mean, SIGMA))))


class StaticBatches(Scheduler):
    """Nothing starts before the longest of the last responses has ended."""

    def admit(self):
        return Admitted([], [], []) if self.running else super().admit()


class ScriptedSampler(Sampler):
    """The sampler without its model: a response ends at its drawn length."""

    def __init__(self, slots):
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1,
        )  # fmt: skip
        # The engine wants a model; this one is never called
        super().__init__(Transformer(config).requires_grad_(False), [EOS], slots)
        self.live = []

    def _forward(self, cache, pieces):
        pass

    def _decode(self, scheduler, steps, step):
        self.live.append(len(scheduler.running))
        rollouts = [row.rollout for row in scheduler.running]
        ends = [len(r.response_ids) + 1 == length_of(r.key) for r in rollouts]
        return [[EOS if end else WORD] for end in ends], [[0.0]] * len(ends)


class Grader:
    """All responses to a problem with the label "easy" are right, every second one to others."""

    def __init__(self):
        self.graded = Counter()

    def submit(self, response, label, *args):
        self.graded[label] += 1
        right = label == "easy" or self.graded[label] % 2 == 0
        future = Future()
        future.set_result(Verdict(right, "ok" if right else "wrong", None))
        return future


class Ranks:
    """Threads in place of the ranks of distributed.py, which they replace for `collect`."""

    def __init__(self, count):
        self.count, self.own = count, threading.local()
        self.barrier, self.sent = threading.Barrier(count, timeout=60), [b""] * count

    def world_size(self):
        return self.count

    ranks_here = world_size

    def rank(self):
        return self.own.rank

    def gather(self, objects):
        # As bytes, as between processes: ranks must not share objects
        self.sent[self.rank()] = pickle.dumps(objects)
        self.barrier.wait()
        # The second barrier keeps `sent` as it is until all have read it
        joined = [item for part in self.sent for item in pickle.loads(part)]
        self.barrier.wait()
        return joined

    def run(self, work):
        """What `work(rank)` returns on every rank."""

        def thread(rank):
            self.own.rank = rank
            try:
                return work(rank)
            except BaseException:
                # Or the other ranks would wait for this one until the time-out
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(thread, range(self.count)))


def lengths(groups):
    """Response lengths of all members."""
    return [len(r.response_ids) for group in groups for r in group]


def measure(name, zero_variance=0.0, ranks=1):
    """Shares of all slot-steps over STEPS training steps, and the rows alive in the last step.

    The slots are spread over `ranks` ranks, threads that exchange what processes would.
    """
    fields = dict(
        prompts_per_step=PROMPTS, group_size=GROUP, max_refills=8, dynamic_sampling=True, seed=0,
        max_response_tokens=CAP, temperature=1.0, think="auto", max_staleness=None,
        over_sampling=1.0, partial_rollout=False, partial_mask_old=False, reward="correct",
    )  # fmt: skip
    config = SimpleNamespace(**fields | MODES[name])
    # The same problems for all modes
    easy = random.Random(0)
    labels = ["easy" if easy.random() < zero_variance else str(i) for i in range(1000)]
    problems = [Problem(str(i), i, "", [WORD] * 4, label) for i, label in enumerate(labels)]

    def work(rank):
        sampler, grader = ScriptedSampler(SLOTS // ranks), Grader()
        order, buffer, steps, live = DataOrder(len(problems), 0), [], [], []
        for step in range(STEPS):
            sampler.live = []
            steps.append(collect(sampler, grader, problems, order, buffer, config, step))
            buffer = steps[-1].unfinished
            live.append(sampler.live)
        return steps, live

    engine.Scheduler = StaticBatches if name == "static batches" else Scheduler
    # Both modules hold the name; they get the real one back below
    rollout.distributed = groups.distributed = crew = Ranks(ranks)
    results = crew.run(work)
    engine.Scheduler = Scheduler
    rollout.distributed = groups.distributed = distributed
    steps = results[0][0]  # the same on every rank
    # A rank that has nothing more to decode in a step waits for the one with the most steps.
    live = []  # for each step and decode step: rows alive on all ranks together
    for step in range(STEPS):
        by_rank = [rows[step] for _, rows in results]
        live.append(list(map(sum, zip_longest(*by_rank, fillvalue=0))))
    kept = lengths(group for step in steps for group in step.groups)
    finished = [group for step in steps for group in step.finished]
    dropped = lengths(group for group in finished if not has_signal(r.reward for r in group))
    total = SLOTS * sum(map(len, live))
    shares = {
        "trained": sum(kept) / total, "no signal": sum(dropped) / total,
        "later": sum(lengths(steps[-1].unfinished)) / total,
        "idle": 1 - sum(map(sum, live)) / total,
    }  # fmt: skip
    return shares | {
        # What is left: tokens of aborted responses that no step continues
        "thrown away": 1 - sum(shares.values()), "mean length": sum(kept) / len(kept) * SCALE,
        "steps": total / SLOTS / STEPS * SCALE, "live": live[-1],
    }  # fmt: skip


PARTS = ("trained", "no signal", "later", "thrown away", "idle")


def draw_figure(results, zero_variance, file):
    """Rows alive over one step, and where the slot-steps went."""
    import matplotlib

    matplotlib.use("svg")
    # Without a fixed salt the ids, and so the file, differ every time
    matplotlib.rcParams["svg.hashsalt"] = "tail"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), width_ratios=(3, 2))
    for name, result in results.items():
        thinned = result["live"][::24]
        left.plot([24 * SCALE * i for i in range(len(thinned))], thinned, label=name, linewidth=1)
    left.set(xlabel="decode steps of the last training step", ylabel=f"rows alive, of {SLOTS}")
    left.legend(fontsize=8)
    bottom = [0.0] * len(results)
    for part, colour in zip(PARTS, ("C2", "C4", "C0", "C1", "0.85"), strict=True):
        values = [result[part] for result in results.values()]
        right.barh(list(results), values, left=bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.invert_yaxis()
    right.set(xlabel="share of slot-steps", xlim=(0, 1))
    right.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=5)
    left.set_title(f"{zero_variance:.0%} of the problems without signal", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main():
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Where slot-steps go when responses are long.")
    parser.add_argument(
        "--zero-variance", type=float, nargs="+", default=[0.0, 0.5], metavar="SHARE",
        help="shares of problems without signal, a table for each; the figure shows the last",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help=f"ranks that share {SLOTS} slots")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for share in options.zero_variance:
        results = {name: measure(name, share, options.ranks) for name in MODES}
        print(f"{share:.0%} of the problems without signal, {options.ranks} rank(s), slot-steps:")
        print(" " * 22 + "".join(f"{part:>12}" for part in PARTS), end="")
        print("  steps per training step  mean kept length")
        for name, result in results.items():
            print(f"{name:22}" + "".join(f"{result[part]:12.1%}" for part in PARTS), end="")
            print(f"{result['steps']:25,.0f}{result['mean length']:18,.0f}")
        print()
    if options.ranks == 1:
        draw_figure(results, share, ROOT / "docs/figures/tail.svg")


if __name__ == "__main__":
    main()
