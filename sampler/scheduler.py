"""Which responses are decoded now, and how they share the memory for keys and values."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from data import Rollout
from sampler.kvcache import KVCache, View

Job = tuple[list[int], int, list[int]]  # pages, position of the first token, token ids to compute


@dataclass(eq=False)
class Row:
    """A response that is being decoded, and the pages of its keys and values."""

    rollout: Rollout
    pages: list[int]

    @property
    def last(self) -> int:
        """The newest token, which is fed next: its keys and values are not stored yet."""
        return (self.rollout.response_ids or self.rollout.problem.prompt_ids)[-1]

    @property
    def stored(self) -> int:
        """Tokens with keys and values: all but the last."""
        return len(self.rollout.problem.prompt_ids) + len(self.rollout.response_ids) - 1


class Batch:
    """The rows being decoded, oldest first, the queue behind them, and the memory they share.

    A prompt is computed once, and kept until the last waiting member of its group has started.
    """

    def __init__(self, cache: KVCache, slots: int, rollouts: Iterable[Rollout]):
        self.cache, self.slots = cache, slots
        self.queue: deque[Rollout] = deque()
        self.rows: list[Row] = []
        self.prompts: dict[int, list[int]] = {}  # id of a problem -> pages of its prompt
        self.waiting: Counter[int] = Counter()  # id of a problem -> its rollouts in the queue
        self.preempted = 0
        self._view: View | None = None
        self.extend(rollouts)

    def extend(self, rollouts: Iterable[Rollout]) -> None:
        """Put those that are not finished at the end of the queue."""
        unfinished = [r for r in rollouts if not r.finished]
        self.queue.extend(unfinished)
        self.waiting.update(id(r.problem) for r in unfinished)

    def admit(self) -> tuple[list[Job], list[tuple[int, int]], list[Job]]:
        """Start waiting rollouts while slots and memory last.

        Returns what is to be computed, in this order: prompts, copies of pages (source, target),
        and the tokens that resumed responses have already.
        """
        prompts: list[Job] = []
        copies: list[tuple[int, int]] = []
        resumed: list[Job] = []
        while self.queue and len(self.rows) < self.slots:
            r, known = self.queue[0], id(self.queue[0].problem) in self.prompts
            prompt = r.problem.prompt_ids[:-1]
            new = 0 if known else self.cache.pages(len(prompt))
            own = self.cache.pages(len(prompt) + len(r.response_ids) + 1)
            own -= len(prompt) // self.cache.page
            # One page for every running row is left, or a row might be preempted at once.
            if own + new + len(self.rows) > self.cache.available:
                if self.rows or not self.prompts:
                    break
                self._forget_prompts()
                continue
            self.queue.popleft()
            if not known:
                full = len(prompt) // self.cache.page
                pages = self.cache.take(full, shared=True) + self.cache.take(new - full)
                self.prompts[id(r.problem)] = pages
                prompts.append((self.prompts[id(r.problem)], 0, prompt))
            row, copied = self._start(r)
            copies += copied
            if r.response_ids:
                tokens = [r.problem.prompt_ids[-1], *r.response_ids[:-1]]
                resumed.append((row.pages, len(prompt), tokens))
        return prompts, copies, resumed

    def _start(self, r: Rollout) -> tuple[Row, list[tuple[int, int]]]:
        """Give a rollout the pages of its prompt; returns its row and the pages to be copied."""
        problem, copied = id(r.problem), []
        full, rest = divmod(len(r.problem.prompt_ids) - 1, self.cache.page)
        self.waiting[problem] -= 1
        if self.waiting[problem]:
            row = Row(r, self.cache.share(self.prompts[problem][:full]))
            if rest:
                row.pages += self.cache.take(1)
                copied = [(self.prompts[problem][full], row.pages[full])]
        else:  # the last one keeps the pages
            row = Row(r, self.prompts.pop(problem))
        row.pages += self.cache.take(self.cache.pages(row.stored) - len(row.pages))
        self.rows.append(row)
        self._view = None
        return row, copied

    def reserve(self, steps: int) -> None:
        """Pages for so many more tokens per row; where they lack, the youngest row goes back to
        the queue, with the tokens it has.
        """
        need = lambda row: max(0, self.cache.pages(row.stored + steps) - len(row.pages))
        while sum(map(need, self.rows)) > self.cache.available:
            if self.prompts:
                self._forget_prompts()
                continue
            row = self.rows[-1]
            self.leave(row)
            self.queue.appendleft(row.rollout)
            self.waiting[id(row.rollout.problem)] += 1
            self.preempted += 1
        for row in self.rows:
            if count := need(row):
                row.pages += self.cache.take(count)
                self._view = None

    def leave(self, row: Row) -> None:
        """Take a row out and free its memory."""
        self.rows.remove(row)
        self.cache.release(row.pages)
        self._view = None

    def _forget_prompts(self) -> None:
        """Those still wanted will be computed again."""
        for pages in self.prompts.values():
            self.cache.release(pages)
        self.prompts.clear()

    def view(self) -> View:
        """Page table of the rows."""
        if self._view is None:
            tables = [row.pages for row in self.rows]
            self.cache.compact([*tables, *self.prompts.values()])
            self._view = self.cache.view(tables)
        return self._view
