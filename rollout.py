"""Problem in, graded groups out: the KV-cached sampler, group collection with dynamic sampling,
evaluation.

A slot whose response ends is refilled at once, and the members of a group share one prefill of
their prompt. What is drawn (draw.py) depends on none of this.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

import distributed
from data import DataOrder, Problem, Rollout
from rewards import has_format
from sampler.engine import Sampler
from sampler.sampling import MASK64, Truncation, mix, response_key

# ---- groups


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
        """Of the draw."""
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


def majority_rewards(group: Sequence[Rollout], grader: Grader, think: str) -> list[float]:
    """1 for every response whose answer equals the group's most frequent one; the label is not used
    (TTRL 2504.16084).

    Equality is the verifier's. A response that would be wrong against its own answer (two boxes
    that differ, an unfinished thought) has no vote and no reward. Of several most frequent answers
    the one of the lowest sample index wins; when all differ, that is the first.
    """
    ask = lambda r, response, label, tags: grader.submit(response, label, tags, r.problem.verifier)
    own = [ask(r, r.text, r.answer, think) if r.answer else None for r in group]
    answers = [
        r.answer if verdict and verdict.result().correct else None
        for r, verdict in zip(group, own, strict=True)
    ]
    distinct = list(dict.fromkeys(a for a in answers if a is not None))
    pending = {
        (a, b): ask(group[0], f"\\boxed{{{a}}}", b, "none") for a in distinct for b in distinct
    }
    equal = {pair for pair, verdict in pending.items() if verdict.result().correct}
    votes = {b: sum((a, b) in equal for a in answers) for b in distinct}
    winner = max(distinct, key=votes.get, default=None)  # the first of equals
    return [float((a, winner) in equal) for a in answers]


def control_rewards(kind: str, group: Sequence[Rollout], grader: Grader, think: str) -> None:
    """Put a reward that ignores the label in the place of the verifier's, in place (--reward).

    random is a fair coin of each response's own key, hence of (seed, step, draw, sample) alone.
    """
    if kind == "random":  # tokens use the counters from 1 up, the coin the key itself
        values = [float(mix(r.key & MASK64) >> 63) for r in group]
    elif kind == "format_only":
        values = [has_format(r.text, think) for r in group]
    else:
        values = majority_rewards(group, grader, think)
    for r, value in zip(group, values, strict=True):
        r.reward = value


def has_signal(rewards: Iterable[float]) -> bool:
    """Raw rewards of a group differ. Not `std > 0`: the float32 std of eight times 0.7 is 6e-8."""
    rewards = list(rewards)
    return max(rewards) - min(rewards) > 1e-8


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
    """Finish and grade groups in place."""
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


def new_group(problem: Problem, number: int, *, seed: int, step: int, size: int) -> list[Rollout]:
    """`size` empty rollouts of one draw of a problem."""
    return [Rollout(problem, number, j, response_key(seed, step, number, j)) for j in range(size)]


def is_stale(group: Sequence[Rollout], oldest: float, budget: int) -> bool:
    """A token is of a weight version before `oldest`, or a response has no room left in the budget,
    as when a run is resumed with a smaller one.
    """
    return any(
        min(r.weight_versions, default=oldest) < oldest
        or len(r.response_ids) + (not r.finished) > budget
        for r in group
    )


@dataclass
class Collected:
    """One step's kept groups, those for the next step, and the counts behind the metrics."""

    groups: list[list[Rollout]]
    unfinished: list[list[Rollout]]  # with partial rollout; first any that ended as surplus
    finished: list[list[Rollout]]  # all that ended, kept or not, in order of draw
    counts: Counter[str]
    seconds: float = 0.0  # that sampling took


LOOKS = 256  # at what has ended, while a response of the whole budget is decoded


@dataclass
class Collector:
    """The groups of one step on all ranks, from their start to their verdict.

    Every rank keeps the same books. Every `max_response_tokens // LOOKS` decode steps all ranks
    tell each other which groups have ended, with their verdicts, and draw the same conclusions
    (`agree`). What starts, where, and what is kept follows from decode steps, never from a clock:
    a verdict that is late is waited for.
    """

    sampler: Sampler
    grader: Grader
    config: Any
    take: Callable[[], list[Rollout]]  # the next group to start, the same on every rank
    progress: tqdm
    here: dict[int, Group] = field(default_factory=dict)  # started on this rank, by number
    ended: list[Group] = field(default_factory=list)  # of these, since the last look
    busy: int = 0  # how many of these are running
    running: dict[int, int] = field(default_factory=dict)  # number of a group -> its rank
    kept: list[int] = field(default_factory=list)  # numbers of groups, first finished first
    started: int = 0
    next_look: int = 0  # in decode steps of this rank
    over: bool = False

    @property
    def most(self) -> int:
        """Groups kept or running at a time."""
        return math.ceil(self.config.prompts_per_step * self.config.over_sampling)

    @property
    def wants_more(self) -> bool:
        """A group is to be started now, and may be."""
        return (
            len(self.kept) < self.config.prompts_per_step
            and len(self.kept) + len(self.running) < self.most
            and self.started < (1 + self.config.max_refills) * self.most
        )

    def on_finish(self, r: Rollout) -> None:
        """Let a response that has ended be graded while others decode."""
        group = self.here[r.group]
        group.submit(r, self.grader, self.config.think)
        if group.finished:
            self.ended.append(group)
            self.busy -= 1

    def feed(self) -> list[Rollout] | None:
        """What starts on this rank now, or None: the step is over."""
        steps = self.sampler.counts["decode_steps"]
        if self.busy and steps < self.next_look:
            return []
        self.next_look = steps + self.config.max_response_tokens // LOOKS
        rollouts = self.agree()
        while not self.busy and not self.over:  # wait for a group of another rank to end
            rollouts = self.agree()
        return None if self.over else rollouts

    def agree(self) -> list[Rollout]:
        """Exchange what has ended, and start what is wanted; returns what starts on this rank.

        The step is over when enough is kept, when nothing is left to wait for, or when one rank was
        interrupted.
        """
        news = [(group.number, self.judge(group)) for group in self.ended]
        self.ended.clear()
        for interrupted, ended in distributed.gather([(self.sampler.interrupted, news)]):
            self.over |= interrupted
            for number, keep in ended:
                del self.running[number]
                self.settle(number, keep)
        rollouts = []
        while self.wants_more and not self.over:
            rollouts += self.start(Group(self.take()))
        self.over |= len(self.kept) >= self.config.prompts_per_step or not self.running
        return rollouts

    def judge(self, group: Group) -> bool:
        """Wait for the rewards of a group that has ended; whether it is to be kept."""
        group.grade()
        if self.config.reward != "correct":
            control_rewards(self.config.reward, group.rollouts, self.grader, self.config.think)
        return self.keeps(group)

    def keeps(self, group: Group) -> bool:
        """With dynamic sampling a group is kept if its raw rewards differ."""
        return not self.config.dynamic_sampling or has_signal(r.reward for r in group.rollouts)

    def settle(self, number: int, keep: bool) -> None:
        """Note that a group has ended somewhere."""
        if keep:
            self.kept.append(number)
            self.progress.update()

    def start(self, group: Group) -> list[Rollout]:
        """Give a group to the rank that has the fewest running; returns its rollouts there."""
        load = Counter(self.running.values())
        home = min(range(distributed.world_size()), key=lambda rank: load[rank])
        self.started += 1
        if group.finished:  # surplus of the step before
            self.settle(group.number, self.keeps(group))
        else:
            self.running[group.number] = home
        if home != distributed.rank():
            return []
        self.here[group.number] = group
        self.busy += not group.finished
        return group.rollouts


def conclude(collector: Collector, waiting: Iterable[list[Rollout]], order: DataOrder) -> Collected:
    """What came of a step, the same on every rank; waiting: groups of the buffer not started."""
    config, wanted = collector.config, collector.config.prompts_per_step
    for group in collector.here.values():  # members that ended in groups that are cut off
        group.grade()
    here = [group.rollouts for group in collector.here.values()]
    groups = {rollouts[0].group: rollouts for rollouts in distributed.gather(here)}
    pick = lambda numbers: [groups[number] for number in sorted(numbers)]
    kept, surplus = collector.kept[:wanted], collector.kept[wanted:]
    aborted = pick(collector.running)
    # Kept for later all its tokens are old: with partial_mask_old there is nothing left to train.
    later = surplus if config.partial_rollout and not config.partial_mask_old else []
    ended = pick(groups.keys() - collector.running.keys() - set(later))
    for group in ended:
        order.record(group[0].problem.index, [r.reward for r in group])
    counts = Counter(
        finished=len(ended),
        aborted=len(aborted),
        surplus=len(surplus),
        refilled=max(0, collector.started - collector.most),
    )
    works = distributed.gather([collector.sampler.counts])
    for work in works:
        counts.update(work)
    # A rank with nothing to decode idles while the one with the most steps goes on.
    counts["decode_steps"] = len(works) * max(work["decode_steps"] for work in works)
    resume = [*pick(later), *aborted, *waiting] if config.partial_rollout else []
    return Collected(pick(kept), resume, ended, counts)


def collect(
    sampler: Sampler,
    grader: Grader,
    problems: Sequence[Problem],
    order: DataOrder,
    buffer: Sequence[list[Rollout]],
    config: Any,
    step: int,
) -> Collected:
    """Sample until `prompts_per_step` groups are kept, at most 1 + `max_refills` times
    `over_sampling * prompts_per_step` groups.

    So many groups, those of the buffer first, are kept or running at any time: as soon as one is
    dropped another one starts. Groups that finish first are kept first; those still running when
    enough are kept are aborted. `partial_rollout` returns them in `unfinished` for the next step,
    behind groups that would have been kept but ended too late. A group of the buffer with a token
    that is more than `max_staleness` weight versions old, or with no room left in the budget,
    starts anew.
    """
    age = math.inf if config.max_staleness is None else config.max_staleness
    oldest = sampler.weight_version - age  # that a token of a resumed group may have
    stale = lambda group: is_stale(group, oldest, config.max_response_tokens)
    new = lambda problem, number: new_group(
        problem, number, seed=config.seed, step=step, size=config.group_size
    )
    waiting = deque(new(g[0].problem, g[0].group) if stale(g) else g for g in buffer)

    def take() -> list[Rollout]:
        if waiting:
            return waiting.popleft()
        number, index = order.draw()
        return new(problems[index], number)

    sampler.counts.clear()
    with tqdm(
        total=config.prompts_per_step, desc=f"step {step + 1} rollout", unit="group", leave=False,
        disable=distributed.rank() > 0 or None,
    ) as progress:  # fmt: skip
        collector = Collector(sampler, grader, config, take, progress)
        sampler.run(
            [], config.max_response_tokens, config.temperature, collector.on_finish,
            next_rollouts=collector.feed, problems=problems,
        )  # fmt: skip
    if not collector.over:  # interrupted: the other ranks are to stop as well
        collector.agree()
    collected = conclude(collector, waiting, order)
    started = buffer[: len(buffer) - len(waiting)]  # first in, first out
    collected.counts["regenerated"] = sum(map(stale, started))
    collected.counts["resumed"] = len(started) - collected.counts["regenerated"]
    return collected


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
    """`samples` graded responses to every problem, in order, shared over ranks. The same random
    numbers every time.
    """
    # Step -1 keeps the keys apart from those of training.
    groups = [new_group(p, p.index, seed=seed, step=-1, size=samples) for p in problems]
    mine = groups[distributed.rank() :: distributed.world_size()]
    with tqdm(
        total=len(mine),
        desc="evaluation",
        unit="problem",
        leave=False,
        disable=distributed.rank() > 0 or None,
    ) as progress:
        sample_groups(
            sampler,
            grader,
            mine,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            think=think,
            truncation=truncation,
            progress=progress,
        )
    return sorted(distributed.gather(mine), key=lambda group: group[0].group)
