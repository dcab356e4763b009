"""The decode step as a CUDA graph: one launch in place of several hundred small ones.

A graph replays fixed kernels on fixed addresses. So the pool of pages is as large as it may get
from the start, and rows and the width of their page table are padded to powers of two and copied
into buffers. Rows of padding read and write page 0 of the pool, which is nobody's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sampler.kvcache import View

# step(view, last, lengths, keys, counts) -> tokens, log-probs; all (B,)
Step = Callable[[View, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def record(function: Callable[[], None], pool: Any) -> Callable[[], None]:
    """`function` as a CUDA graph, which takes its memory from `pool`. It may allocate; it must not
    return anything, nor wait for the device.
    """
    function()  # libraries choose and allocate on their first call, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog asks for events in a thread of its own.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay


class Recorded:
    """One recording: `step` for up to `rows` rows with up to `width` pages each."""

    def __init__(self, step: Step, rows: int, width: int, device: torch.device, pool: Any):
        self.state = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.step, self.pool, self.replay = step, pool, None

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
            self.replay = record(self._run, self.pool)
        self.replay()
        return self.tokens[:count].clone(), self.logprobs[:count].clone()

    def _run(self) -> None:
        tokens, logprobs = self.step(View(self.table), *self.state)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)


class Graphs:
    """The recordings of one run of the sampler, made as they are needed."""

    def __init__(self, step: Step, slots: int):
        self.step, self.slots = step, slots
        self.recorded: dict[tuple[int, int], Recorded] = {}
        # One pool for all: they run one after another, and nothing in it outlives a replay.
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def __call__(self, view: View) -> Recorded:
        """The recording for the rows of a view."""
        rows, width = (1 << (n - 1).bit_length() for n in view.table.shape)
        rows = min(rows, self.slots)
        if (rows, width) not in self.recorded:
            made = Recorded(self.step, rows, width, view.table.device, self.pool)
            self.recorded[rows, width] = made
        self.recorded[rows, width].load(view)
        return self.recorded[rows, width]
