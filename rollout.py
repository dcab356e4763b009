"""Problems in, graded groups out: step 1 of the method.

`collect` samples groups of responses, one group to a problem, and keeps those whose raw rewards
differ until it has enough (dynamic sampling). Three things save time when responses are long: a
group that is dropped is replaced while others decode; more groups run than are wanted, so nobody
waits for the longest (over-sampling); and what is unfinished goes on in the next step (partial
rollout). sampler/engine.py decodes; the verifier's processes grade at the same time.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

import distributed
from config import Config
from data import DataOrder, Problem, Rollout
from distributed import progress_bar
from rewards import has_format
from sampler.engine import Sampler
from sampler.groups import Grader, Group, evaluate, new_group, sample_groups
from sampler.sampling import MASK64, mix

# `Sampler`, `evaluate` and `sample_groups` can be imported from here too, next to `collect`.
__all__ = ["Sampler", "collect", "evaluate", "has_signal", "sample_groups"]


def has_signal(rewards: Iterable[float]) -> bool:
    """Raw rewards of a group differ. Not `std > 0`: the float32 std of eight times 0.7 is 6e-8."""
    rewards = list(rewards)
    return max(rewards) - min(rewards) > 1e-8


def is_stale(group: Sequence[Rollout], oldest: float, budget: int) -> bool:
    """A token comes from a weight version before `oldest`, or a response has no room left in the
    budget, as when a run is resumed with a smaller one.
    """
    return any(
        min(r.weight_versions, default=oldest) < oldest
        or len(r.response_ids) + (not r.finished) > budget
        for r in group
    )


@dataclass
class Collected:
    """One step's kept groups, those for the next step, and the counts for the metrics."""

    groups: list[list[Rollout]]
    unfinished: list[list[Rollout]]  # with partial rollout; surplus groups, which have ended, first
    finished: list[list[Rollout]]  # all that ended, kept or not, in order of draw
    counts: Counter[str]
    seconds: float = 0.0  # wall time of sampling


# Exchanges between ranks while the longest response is decoded. In each one ranks wait for each
# other; between two of them a dropped group is not replaced.
EXCHANGES = 256


@dataclass
class Collector:
    """The groups of one step on all ranks, from their start to the decision to keep them.

    Every `max_response_tokens // EXCHANGES` decode steps all ranks tell each other which groups
    have finished, with the decision on each. From then on they know the same, so all decide alike
    which groups start, where, and when the step is over, without a rank in charge. Decisions follow
    from decode steps, never from a clock, or no two runs would be the same: a verdict that is late
    is waited for.
    """

    sampler: Sampler
    grader: Grader
    config: Config
    next_group: Callable[[], list[Rollout]]  # must return the same on every rank
    progress: tqdm
    # This rank's own:
    groups: dict[int, Group] = field(default_factory=dict)  # all that started here, by number
    unreported: list[Group] = field(default_factory=list)  # finished since the last exchange
    next_exchange: int = 0  # in decode steps of this rank
    # The same on every rank:
    running: dict[int, int] = field(default_factory=dict)  # number of a group -> its rank
    kept: list[int] = field(default_factory=list)  # numbers of groups, first finished first
    started: int = 0
    over: bool = False

    @property
    def most_at_once(self) -> int:
        """Groups kept or running at a time."""
        return math.ceil(self.config.prompts_per_step * self.config.over_sampling)

    @property
    def may_start(self) -> bool:
        """One more group is wanted, and neither limit is reached."""
        return (
            len(self.kept) < self.config.prompts_per_step
            and len(self.kept) + len(self.running) < self.most_at_once
            and self.started < (1 + self.config.max_refills) * self.most_at_once
        )

    @property
    def is_busy(self) -> bool:
        """This rank still decodes a group."""
        here = sum(rank == distributed.rank() for rank in self.running.values())
        return here > len(self.unreported)

    def on_finish(self, r: Rollout) -> None:
        """Have a response that has ended graded, while others decode."""
        group = self.groups[r.group]
        group.submit(r, self.grader, self.config.think)
        if group.finished:
            self.unreported.append(group)

    def next_rollouts(self) -> list[Rollout] | None:
        """What the sampler is to start on this rank now; None: the step is over."""
        steps = self.sampler.counts["decode_steps"]
        if self.is_busy and steps < self.next_exchange:
            return []
        self.next_exchange = steps + self.config.max_response_tokens // EXCHANGES
        rollouts = self.exchange()
        while not self.is_busy and not self.over:  # wait until a group of another rank has ended
            rollouts = self.exchange()
        return None if self.over else rollouts

    def exchange(self) -> list[Rollout]:
        """Tell all ranks what has finished here, and start what is wanted; returns what starts on
        this rank.

        The step is over when enough is kept, when nothing is left to wait for, or when one rank was
        interrupted.
        """
        news = [(group.number, self.grade(group)) for group in self.unreported]
        self.unreported.clear()
        for interrupted, finished in distributed.gather([(self.sampler.interrupted, news)]):
            self.over |= interrupted
            for number, is_kept in finished:
                del self.running[number]
                if is_kept:
                    self.keep(number)
        rollouts = []
        while self.may_start and not self.over:
            rollouts += self.start(Group(self.next_group()))
        self.over |= len(self.kept) >= self.config.prompts_per_step or not self.running
        return rollouts

    def grade(self, group: Group) -> bool:
        """Wait for the rewards of a finished group; whether it is to be kept."""
        group.grade()
        if self.config.reward != "correct":
            control_rewards(self.config.reward, group.rollouts, self.grader, self.config.think)
        return self.is_wanted(group)

    def is_wanted(self, group: Group) -> bool:
        """Dynamic sampling (DAPO, 2503.14476) keeps a group if its raw rewards differ: where they
        are equal, group-relative advantages are 0.
        """
        return not self.config.dynamic_sampling or has_signal(r.reward for r in group.rollouts)

    def keep(self, number: int) -> None:
        """Count a group as kept, wherever it ran."""
        self.kept.append(number)
        self.progress.update()

    def start(self, group: Group) -> list[Rollout]:
        """Give a group to the rank that has the fewest running; returns its rollouts there."""
        load = Counter(self.running.values())
        home = min(range(distributed.world_size()), key=lambda rank: load[rank])
        self.started += 1
        if not group.finished:
            self.running[group.number] = home
        elif self.is_wanted(group):  # surplus of the step before
            self.keep(group.number)
        if home != distributed.rank():
            return []
        self.groups[group.number] = group
        return group.rollouts

    def result(self, waiting: Iterable[list[Rollout]], order: DataOrder) -> Collected:
        """What came of the step, the same on every rank. waiting: groups of the buffer that did not
        start. The raw rewards of all that ended go to `order`.
        """
        config = self.config
        for group in self.groups.values():  # members that ended in groups that are cut off
            group.grade()
        everywhere = distributed.gather([group.rollouts for group in self.groups.values()])
        groups = {rollouts[0].group: rollouts for rollouts in everywhere}

        def by_number(numbers: Iterable[int]) -> list[list[Rollout]]:
            return [groups[number] for number in sorted(numbers)]

        kept = self.kept[: config.prompts_per_step]
        surplus = self.kept[config.prompts_per_step :]  # as good, but finished too late
        aborted = by_number(self.running)
        # In the next step all tokens of a surplus group are old: partial_mask_old trains none.
        later = surplus if config.partial_rollout and not config.partial_mask_old else []
        ended = by_number(groups.keys() - self.running.keys() - set(later))
        for group in ended:
            order.record(group[0].problem.index, [r.reward for r in group])
        counts = Counter(
            finished=len(ended),
            aborted=len(aborted),
            surplus=len(surplus),
            refilled=max(0, self.started - self.most_at_once),
        )
        works = distributed.gather([self.sampler.counts])
        for work in works:
            counts.update(work)
        # A rank with nothing to decode idles while the one with the most steps goes on.
        counts["decode_steps"] = len(works) * max(work["decode_steps"] for work in works)
        resume = [*by_number(later), *aborted, *waiting] if config.partial_rollout else []
        return Collected(by_number(kept), resume, ended, counts)


def collect(
    sampler: Sampler,
    grader: Grader,
    problems: Sequence[Problem],
    order: DataOrder,
    buffer: Sequence[list[Rollout]],
    config: Config,
    step: int,
) -> Collected:
    """Sample until `prompts_per_step` groups are kept; at most 1 + `max_refills` times
    `over_sampling * prompts_per_step` groups start.

    That product is how many, those of the buffer first, are kept or running at any time: when one
    is dropped the next one starts. Groups that finish first are kept first; those still running
    when enough are kept are aborted. `partial_rollout` returns them in `unfinished` for the next
    step, after groups that would have been kept but finished too late. A group of the buffer with a
    token more than `max_staleness` weight versions old, or without room in the budget, starts anew.
    """
    oldest = -math.inf
    if config.max_staleness is not None:
        oldest = sampler.weight_version - config.max_staleness
    stale = [is_stale(group, oldest, config.max_response_tokens) for group in buffer]

    def empty_group(problem: Problem, number: int) -> list[Rollout]:
        return new_group(problem, number, seed=config.seed, step=step, size=config.group_size)

    waiting = deque(
        empty_group(group[0].problem, group[0].group) if is_old else group
        for group, is_old in zip(buffer, stale, strict=True)
    )

    def next_group() -> list[Rollout]:
        if waiting:
            return waiting.popleft()
        number, index = order.draw()
        return empty_group(problems[index], number)

    sampler.counts.clear()
    options = {"total": config.prompts_per_step, "unit": "group", "leave": False}
    with progress_bar(what=f"step {step + 1} rollout", **options) as progress:
        collector = Collector(sampler, grader, config, next_group, progress)
        sampler.run(
            [],
            config.max_response_tokens,
            config.temperature,
            collector.on_finish,
            next_rollouts=collector.next_rollouts,
            problems=problems,
        )
    if not collector.over:  # this rank was interrupted, and the others must hear of it
        collector.exchange()
    collected = collector.result(waiting, order)
    started = len(buffer) - len(waiting)  # of the buffer, first in, first out
    collected.counts["regenerated"] = sum(stale[:started])
    collected.counts["resumed"] = started - collected.counts["regenerated"]
    return collected


# ---- controls: rewards that ignore the label, to tell learning from its appearance


def control_rewards(kind: str, group: Sequence[Rollout], grader: Grader, think: str) -> None:
    """Put another reward in place of the verifier's, in place: --reward random, format_only or
    majority.

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


def majority_rewards(group: Sequence[Rollout], grader: Grader, think: str) -> list[float]:
    """1 for every response whose answer equals the group's most frequent one; the label is not used
    (TTRL 2504.16084).

    Equality is the verifier's. A response that would be wrong against its own answer (two boxes
    that differ, an unfinished thought) has no vote and no reward. Of several most frequent answers
    the one of the lowest sample index wins; when all differ, that is the first.
    """
    kind = group[0].problem.verifier
    own = [grader.submit(r.text, r.answer, think, kind) if r.answer else None for r in group]
    answers = [
        r.answer if verdict and verdict.result().correct else None
        for r, verdict in zip(group, own, strict=True)
    ]
    distinct = list(dict.fromkeys(a for a in answers if a is not None))
    pairs = [(a, b) for a in distinct for b in distinct]
    pending = {(a, b): grader.submit(f"\\boxed{{{a}}}", b, "none", kind) for a, b in pairs}
    equal = {pair for pair, verdict in pending.items() if verdict.result().correct}
    votes = {b: sum((a, b) in equal for a in answers) for b in distinct}
    winner = max(distinct, key=votes.get, default=None)  # the first of equals
    return [float((a, winner) in equal) for a in answers]
