"""Which responses are decoded now, and how they share the memory for keys and values."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from data import Rollout
from sampler.kvcache import KVCache, View


class PrefillJob(NamedTuple):
    """Tokens of one sequence whose keys and values are to be computed and stored."""

    pages: list[int]  # of the whole sequence
    start: int  # position of the first of the tokens
    ids: list[int]


class Admitted(NamedTuple):
    """What must be stored before responses that have just been admitted can decode. The order
    counts: prompts, then copies of them, then what reads both.
    """

    prompts: list[PrefillJob]
    copies: list[tuple[int, int]]  # pages (source, target)
    resumed: list[PrefillJob]  # tokens that unfinished responses have already


@dataclass(eq=False)
class RunningResponse:
    """A row of the decode batch: a response and the pages of its keys and values."""

    rollout: Rollout
    pages: list[int]

    @property
    def last(self) -> int:
        """The newest token, which is fed next: its keys and values are not stored yet."""
        return (self.rollout.response_ids or self.rollout.problem.prompt_ids)[-1]

    @property
    def stored(self) -> int:
        """Number of tokens whose keys and values are stored: all but the last."""
        return len(self.rollout.problem.prompt_ids) + len(self.rollout.response_ids) - 1


class Scheduler:
    """The responses that are decoded, the queue of those that wait, and the memory they share.

    A prompt is computed once, and kept until the last waiting member of its group has started.
    """

    def __init__(self, cache: KVCache, slots: int, rollouts: Iterable[Rollout]):
        self.cache, self.slots = cache, slots
        self.queue: deque[Rollout] = deque()
        self.running: list[RunningResponse] = []  # oldest first
        # Both by the id() of a problem, because a Problem is not hashable.
        self.prompts: dict[int, list[int]] = {}  # pages of its prompt
        self.waiting: Counter[int] = Counter()  # its rollouts in the queue
        self.preempted = 0
        self._view: View | None = None  # of the running responses, None once they have changed
        self.enqueue(rollouts)

    def enqueue(self, rollouts: Iterable[Rollout]) -> None:
        """Put those that are not finished at the end of the queue."""
        unfinished = [r for r in rollouts if not r.finished]
        self.queue.extend(unfinished)
        self.waiting.update(id(r.problem) for r in unfinished)

    def admit(self) -> Admitted:
        """Start waiting rollouts while slots and memory last."""
        admitted = Admitted([], [], [])
        while self.queue and len(self.running) < self.slots:
            # One page is left for every running response, or one might be preempted at once.
            if self._pages_to_start(self.queue[0]) + len(self.running) > self.cache.available:
                if self.running or not self.prompts:
                    break
                # Nothing runs that would end and free pages, so prompts kept for later have to go.
                self._forget_prompts()
                continue
            self._start(self.queue.popleft(), admitted)
        return admitted

    def _pages_to_start(self, r: Rollout) -> int:
        """Pages that a waiting rollout would take: for its prompt, if that is not stored yet, and
        for its own tokens up to the next one.
        """
        prompt = len(r.problem.prompt_ids) - 1  # the last token of a prompt is fed by decoding
        own = self.cache.pages(prompt + len(r.response_ids) + 1) - prompt // self.cache.page
        return own if id(r.problem) in self.prompts else own + self.cache.pages(prompt)

    def _start(self, r: Rollout, admitted: Admitted) -> None:
        """Give a rollout its pages, and add to `admitted` what they are to be filled with."""
        problem, prompt = id(r.problem), r.problem.prompt_ids[:-1]
        full, rest = divmod(len(prompt), self.cache.page)
        if problem not in self.prompts:
            pages = self.cache.take(full, shared=True) + self.cache.take(1 if rest else 0)
            self.prompts[problem] = pages
            admitted.prompts.append(PrefillJob(pages, 0, prompt))
        self.waiting[problem] -= 1
        if self.waiting[problem]:
            row = RunningResponse(r, self.cache.share(self.prompts[problem][:full]))
            if rest:  # a page that the response goes on writing to cannot be shared
                row.pages += self.cache.take(1)
                admitted.copies.append((self.prompts[problem][full], row.pages[full]))
        else:  # the last member of the group takes over the prompt's own pages
            row = RunningResponse(r, self.prompts.pop(problem))
        row.pages += self.cache.take(self.cache.pages(row.stored) - len(row.pages))
        if r.response_ids:
            tokens = [r.problem.prompt_ids[-1], *r.response_ids[:-1]]
            admitted.resumed.append(PrefillJob(row.pages, len(prompt), tokens))
        self.running.append(row)
        self._view = None

    def reserve(self, steps: int) -> None:
        """Take pages for `steps` more tokens of every response. While there are too few, the
        youngest response goes back to the head of the queue, with the tokens it has.
        """
        missing = [
            max(0, self.cache.pages(row.stored + steps) - len(row.pages)) for row in self.running
        ]
        while sum(missing) > self.cache.available:
            if self.prompts:
                self._forget_prompts()
                continue
            missing.pop()
            row = self.running[-1]
            self.remove(row)
            self.queue.appendleft(row.rollout)
            self.waiting[id(row.rollout.problem)] += 1
            self.preempted += 1
        for row, count in zip(self.running, missing, strict=True):
            if count:
                row.pages += self.cache.take(count)
                self._view = None

    def remove(self, row: RunningResponse) -> None:
        """Stop decoding a response and free its memory."""
        self.running.remove(row)
        self.cache.release(row.pages)
        self._view = None

    def _forget_prompts(self) -> None:
        """Free the prompts kept for waiting rollouts, which will be computed again."""
        for pages in self.prompts.values():
            self.cache.release(pages)
        self.prompts.clear()

    def view(self) -> View:
        """How the running responses read the cache; the same object until something changes."""
        if self._view is None:
            tables = [row.pages for row in self.running]
            self.cache.compact([*tables, *self.prompts.values()])
            self._view = self.cache.view(tables)
        return self._view
