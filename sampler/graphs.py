"""The decode step as a CUDA graph: one launch in place of several hundred small ones.

A graph replays fixed kernels on fixed addresses. So the pool of pages has its full size from the
start, and the number of rows and the width of their page table are padded to powers of two and
copied into buffers. Rows of padding read and write page 0 of the pool, which no response owns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sampler.kvcache import View

# step(view, last, lengths, keys, counters) -> tokens, log-probs; tensors (B,). See Sampler._step.
Step = Callable[[View, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def record(function: Callable[[], None], pool: Any) -> Callable[[], None]:
    """`function` as a CUDA graph, which takes its memory from `pool`. It may allocate, but must
    neither return anything nor wait for the device.
    """
    function()  # libraries choose and allocate on their first call, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    # thread_local, because NCCL's watchdog queries events in its own thread.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph.replay


class Recorded:
    """One recording: `step` for up to `rows` rows with up to `width` pages each."""

    def __init__(self, step: Step, rows: int, width: int, device: torch.device, pool: Any):
        # The addresses that the recording reads and writes: made once, only filled afterwards.
        self.state = torch.zeros(4, rows, dtype=torch.int64, device=device)
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, device=device)
        self.step, self.pool = step, pool
        self.view: View | None = None
        self.replay: Callable[[], None] | None = None

    def load(self, view: View) -> None:
        """Copy a page table into the buffers; all further rows are padding."""
        self.view = view
        # Length 0 and page 0: padding touches only a page that belongs to nobody.
        self.state.zero_()
        self.table.zero_()
        self.table[: view.table.shape[0], : view.table.shape[1]] = view.table

    def __call__(self, *state: Tensor) -> tuple[Tensor, Tensor]:
        """last, lengths, keys, counters (B,) -> tokens, log-probs (B,)."""
        count = len(state[0])
        for buffer, values in zip(self.state, state, strict=True):
            buffer[:count] = values
        # This runs the step once more. Harmless: the same keys go to the same cells.
        if self.replay is None:
            self.replay = record(self._run, self.pool)
        self.replay()
        # Copies, because the next replay writes to the same buffers.
        return self.tokens[:count].clone(), self.logprobs[:count].clone()

    def _run(self) -> None:
        # View(self.table) alone: `parts` change shape with every batch, so a kernel is needed.
        tokens, logprobs = self.step(View(self.table), *self.state)
        self.tokens.copy_(tokens)
        self.logprobs.copy_(logprobs)


class Graphs:
    """A `Step` that replays recordings of another one, made as their shapes occur."""

    def __init__(self, step: Step, slots: int):
        self.step, self.slots = step, slots
        self.recorded: dict[tuple[int, int], Recorded] = {}
        # One pool for all: they run one after another, and nothing in it outlives a replay.
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def __call__(self, view: View, *state: Tensor) -> tuple[Tensor, Tensor]:
        """As `Step`."""
        # Powers of two, so that a few recordings serve every batch.
        rows, width = (1 << (n - 1).bit_length() for n in view.table.shape)
        # Slots need not be a power of two; a full batch then has no padding.
        rows = min(rows, self.slots)
        if (rows, width) not in self.recorded:
            device = view.table.device
            self.recorded[rows, width] = Recorded(self.step, rows, width, device, self.pool)
        recorded = self.recorded[rows, width]
        if recorded.view is not view:  # else the rows and pages are those of the last step
            recorded.load(view)
        return recorded(*state)
