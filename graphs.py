"""The decode step as a CUDA graph: one launch in place of several hundred small ones.

A graph replays fixed kernels on fixed addresses. So rows and the width of their page table are
padded to powers of two and copied into buffers first, and after the pool of pages has grown, and
moved, all is recorded anew. Rows of padding read and write page 0 of the pool, which is nobody's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvcache import KVCache, View

# step(view, last, lengths, keys, counts) -> tokens, log-probs; all (B,)
Step = Callable[[View, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def record(function: Callable[[], None]) -> Callable[[], None]:
    """`function` as a CUDA graph; it must return nothing, allocate freely and never wait."""
    function()  # libraries choose and allocate on their first call, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    # Thread-local: with --async-steps another thread allocates at the same time.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay


class Recorded:
    """One recording: `step` for up to `rows` rows with up to `width` pages each."""

    def __init__(self, step: Step, rows: int, width: int, device: torch.device):
        self.state = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.step, self.replay = step, None

    def load(self, view: View) -> None:
        """Take over a page table; all further rows are padding."""
        self.state.zero_()
        self.table.zero_()
        self.table[: view.table.shape[0], : view.table.shape[1]] = view.table

    def __call__(self, *state: Tensor) -> tuple[Tensor, Tensor]:
        """last, lengths, keys, counts (B,) -> tokens, log-probs (B,)."""
        count = len(state[0])
        for buffer, values in zip(self.state, state, strict=True):
            buffer[:count] = values
        if self.replay is None:
            self.replay = record(self._run)
        self.replay()
        return self.tokens[:count].clone(), self.logprobs[:count].clone()

    def _run(self) -> None:
        tokens, logprobs = self.step(View(self.table), *self.state)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)


class Graphs:
    """The recordings of one run of the sampler, made as they are needed."""

    def __init__(self, step: Step, cache: KVCache):
        self.step, self.cache = step, cache
        self.recorded: dict[tuple[int, int], Recorded] = {}
        self.pool = cache.keys[0]  # where it was when they were made

    def __call__(self, view: View) -> Recorded:
        """The recording for the rows of a view."""
        if self.pool is not self.cache.keys[0]:
            self.recorded.clear()
            self.pool = self.cache.keys[0]
        rows, width = size = tuple(1 << (n - 1).bit_length() for n in view.table.shape)
        if size not in self.recorded:
            self.recorded[size] = Recorded(self.step, rows, width, view.table.device)
        self.recorded[size].load(view)
        return self.recorded[size]
