"""Groups: several responses to one problem, sampled and graded, with no choice among them.

Evaluation needs no more than this. Training chooses which groups to start and to keep: rollout.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

import distributed
from data import Problem, Rollout
from distributed import progress_bar
from sampler.engine import Sampler
from sampler.sampling import Truncation, response_key


class Grader(Protocol):
    """What grading needs of `rewards.Verifier`."""

    def submit(self, response: str, label: str, think: str = "auto", kind: str = "math") -> Any:
        """A future of a `verify.Verdict`."""


@dataclass
class Group:
    """The responses to one draw of one problem, and the pending verdict of each finished one."""

    rollouts: list[Rollout]
    verdicts: dict[int, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of the draw."""
        return self.rollouts[0].group

    @property
    def finished(self) -> bool:
        return all(r.finished for r in self.rollouts)

    def submit(self, r: Rollout, grader: Grader, think: str) -> None:
        """Hand a finished member to the verifier's workers, which grade it while others decode."""
        self.verdicts[r.sample_index] = grader.submit(
            r.text, r.problem.label, think, r.problem.verifier
        )

    def grade(self) -> None:
        """Wait for the verdicts of all finished members and write their rewards."""
        for j, future in self.verdicts.items():
            verdict, r = future.result(), self.rollouts[j]
            r.reward = r.correct = verdict.score
            r.reason, r.answer = verdict.reason, verdict.answer
        self.verdicts.clear()


def new_group(problem: Problem, number: int, *, seed: int, step: int, size: int) -> list[Rollout]:
    """`size` empty rollouts of one draw of a problem."""
    return [Rollout(problem, number, j, response_key(seed, step, number, j)) for j in range(size)]


def evaluate(
    sampler: Sampler,
    grader: Grader,
    problems: Sequence[Problem],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    think: str,
    seed: int,
    truncation: Truncation | None = None,
) -> list[list[Rollout]]:
    """`samples` graded responses to every problem, in order, shared over ranks. The random numbers
    are the same every time.
    """
    # Step -1 keeps the keys apart from those of training.
    groups = [new_group(p, p.index, seed=seed, step=-1, size=samples) for p in problems]
    mine = groups[distributed.rank() :: distributed.world_size()]
    options = {"total": len(mine), "unit": "problem", "leave": False}
    with progress_bar(what="evaluation", **options) as progress:
        sample_groups(
            sampler, grader, mine, max_new_tokens=max_new_tokens, temperature=temperature,
            think=think, truncation=truncation, progress=progress,
        )  # fmt: skip
    return sorted(distributed.gather(mine), key=lambda group: group[0].group)


def sample_groups(
    sampler: Sampler,
    grader: Grader,
    groups: Sequence[list[Rollout]],
    *,
    max_new_tokens: int,
    temperature: float,
    think: str,
    truncation: Truncation | None = None,
    progress: tqdm | None = None,
) -> None:
    """Finish and grade all groups, in place."""
    tracked = {rollouts[0].group: Group(rollouts) for rollouts in groups}

    def on_finish(r: Rollout) -> None:
        group = tracked[r.group]
        group.submit(r, grader, think)
        if group.finished and progress is not None:
            progress.update()

    every = [r for rollouts in groups for r in rollouts]
    sampler.run(every, max_new_tokens, temperature, on_finish, truncation)
    for group in tracked.values():
        group.grade()
