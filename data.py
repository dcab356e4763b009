"""What training is made of: problems and their resumable order, rollouts, batches, and `pack`.

`pack` is the one place where tokens are shifted: after it, index t of every per-token tensor means
"action `targets[t]`, taken in the state before it".
"""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import distributed


@dataclass
class Problem:
    """One verifiable problem; `index` is its row among the kept problems of its file."""

    id: str
    index: int
    prompt: str  # as the model sees it, after the chat template
    prompt_ids: list[int]
    label: str
    verifier: str = "math"  # kind of problem: a key of rewards.VERIFIERS

    @property
    def digest(self) -> int:
        """Tells a problem from another one in its place; its id may be no more than that place."""
        return zlib.crc32(json.dumps([self.prompt, self.label, self.verifier]).encode())


@dataclass
class Rollout:
    """One sampled response, finished or not; ids and log-probs are the sampler's own, never
    re-tokenised.
    """

    problem: Problem
    group: int  # number of the draw that put the problem on the table; unique in a run
    sample_index: int
    key: int  # of the counter-based random numbers: a hash of (seed, step, problem, sample)
    response_ids: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)  # policy updates before each token
    finish_reason: str = "abort"  # until it is "stop" or "length"
    text: str = ""
    reward: float = 0.0  # raw: the verifier's score, or what --reward replaces it with
    correct: float = 0.0  # the verifier's score: 1 right, 0 wrong
    reason: str = ""  # of the verdict: a key of verify.REASONS
    answer: str | None = None  # text of the graded box
    overlong_penalty: float = 0.0

    @property
    def finished(self) -> bool:
        """True once a stop token was drawn or the budget was used up."""
        return self.finish_reason != "abort"


class DataOrder:
    """Endless, resumable order of the problems, from the number of draws and what became of them.

    A shuffle: epoch e visits every problem once, in the order of seed + e.
    `max_pass_rate` leaves out problems solved at least that often so far (no-positive-resampling,
    ScaleRL 2510.13786), unless that would leave none. A problem not yet tried counts as
    never solved. `digests`, one per problem, tell after a resume which are still in their place.
    """

    def __init__(
        self,
        num_problems: int,
        seed: int,
        max_pass_rate: float | None = None,
        digests: Sequence[int] = (),
    ):
        self.num_problems, self.seed, self.digests = num_problems, seed, list(digests)
        self.max_pass_rate = max_pass_rate
        self.drawn = 0
        self.tried, self.solved = [0] * num_problems, [0.0] * num_problems
        self._epoch, self._order = -1, []

    def draw(self) -> tuple[int, int]:
        """(number of the draw, index of the problem)."""
        index = self._next()
        for _ in range(2 * self.num_problems):  # as far apart as two visits may be
            if self.max_pass_rate is None or self.pass_rate(index) < self.max_pass_rate:
                break
            index = self._next()
        return self.drawn - 1, index

    def _next(self) -> int:
        epoch, position = divmod(self.drawn, self.num_problems)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self.num_problems))
            random.Random(self.seed + epoch).shuffle(self._order)
        self.drawn += 1
        return self._order[position]

    def pass_rate(self, index: int) -> float:
        """Mean raw reward of a problem so far, 0 if it was never tried."""
        return self.solved[index] / self.tried[index] if self.tried[index] else 0.0

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """Remember the raw rewards of one group."""
        self.tried[index] += len(rewards)
        self.solved[index] += sum(rewards)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the very next draw."""
        return {name: getattr(self, name) for name in ("drawn", "tried", "solved", "digests")}

    def load_state_dict(self, state: dict[str, Any]) -> set[int]:
        """Go on from `state_dict`, with as many problems; returns the places that now hold another
        problem, of which nothing is known yet.
        """
        if len(state["tried"]) != self.num_problems:
            raise ValueError(
                f"the checkpoint knows {len(state['tried'])} problems, --data holds "
                f"{self.num_problems}; resume with the data of the run."
            )
        then = state.get("digests", ())  # checkpoints of earlier versions have none
        changed = {i for i, (a, b) in enumerate(zip(then, self.digests, strict=False)) if a != b}
        self.drawn = state["drawn"]
        self.tried, self.solved = list(state["tried"]), list(state["solved"])
        for index in changed:
            self.tried[index], self.solved[index] = 0, 0.0
        return changed


# ---- tensors


@dataclass
class Batch:
    """Scalars of one step, whole on every rank: (N, T) per token, (N,) per response, T the longest
    response.
    """

    rollouts: list[Rollout]
    response_lengths: Tensor  # (N,) int64
    response_mask: Tensor  # (N, T) bool, from lengths alone
    fresh: Tensor  # (N, T) bool, tokens of the mask that the newest policy sampled
    rollout_logprobs: Tensor  # (N, T) float32
    rewards: Tensor  # (N,) float32, raw
    truncated: Tensor  # (N,) bool
    group_ids: Tensor  # (N,) int64, 0..P-1


def length_mask(lengths: Tensor, width: int | None = None) -> Tensor:
    """(N,) lengths -> (N, width) bool, true before the length. Not from ids: pad may equal EOS."""
    if width is None:
        width = int(lengths.max()) if len(lengths) else 0
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def to_batch(
    rollouts: Sequence[Rollout], device: torch.device | str = "cpu", weight_version: int = 0
) -> Batch:
    """Scalars of finished rollouts as padded tensors. weight_version: the newest policy's."""
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
    mask = length_mask(lengths)
    logprobs = torch.zeros(mask.shape, device=device)
    logprobs[mask] = torch.tensor([x for r in rollouts for x in r.rollout_logprobs], device=device)
    versions = torch.tensor([v for r in rollouts for v in r.weight_versions], device=device)
    fresh = torch.zeros_like(mask)
    fresh[mask] = versions == weight_version
    groups = torch.tensor([r.group for r in rollouts], device=device)
    return Batch(
        rollouts=list(rollouts),
        response_lengths=lengths,
        response_mask=mask,
        fresh=fresh,
        rollout_logprobs=logprobs,
        rewards=torch.tensor([r.reward for r in rollouts], device=device),
        truncated=torch.tensor([r.finish_reason == "length" for r in rollouts], device=device),
        group_ids=torch.unique(groups, return_inverse=True)[1],
    )


@dataclass
class MicroBatch:
    """Sequences laid end to end for one forward; row r of the (R, T) scalars is row `rows[r]` of
    the Batch.
    """

    rows: Tensor  # (R,) int64
    input_ids: Tensor  # (M,) int64: prompt and response of each sequence, without its last token
    cu_seqlens: Tensor  # (R+1,) int32
    action_index: Tensor  # (A,) int64: where in the M states each response token was chosen
    targets: Tensor  # (A,) int64: the response tokens, row after row
    mask: Tensor  # (R, T) bool: A true entries

    def unpack(self, actions: Tensor) -> Tensor:
        """(A,) per action -> (R, T), zero outside the mask; differentiable."""
        return actions.new_zeros(self.mask.shape).masked_scatter(self.mask, actions)

    def rows_of(self, tokens: Tensor | None) -> Tensor | None:
        """(N, T) of the Batch -> (R, T) of this micro-batch; None stays None."""
        return None if tokens is None else tokens[self.rows, : self.mask.shape[1]]


def pack(
    rollouts: Sequence[Rollout], rows: Sequence[int], device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay rollouts[i], i in rows, end to end, and shift: response token t is read at the token
    before it.

    The last token of a sequence is only ever a target, so it is not fed. No rows at all give one
    token and no action: a rank without work still takes part in the collectives of a sharded
    forward.
    """
    inputs: list[int] = []
    index: list[int] = []
    targets: list[int] = []
    boundaries = [0]
    for i in rows:
        prompt, response = rollouts[i].problem.prompt_ids, rollouts[i].response_ids
        # The shift: response[t] is chosen in the state after the token before it, and response[0]
        # after the last token of the prompt.
        first = len(inputs) + len(prompt) - 1
        index += range(first, first + len(response))
        targets += response
        inputs += prompt + response[:-1]
        boundaries.append(len(inputs))
    if not rows:
        inputs, boundaries = [0], [0, 1]
    lengths = torch.tensor(
        [len(rollouts[i].response_ids) for i in rows], dtype=torch.long, device=device
    )
    return MicroBatch(
        rows=torch.tensor(rows, dtype=torch.long, device=device),
        input_ids=torch.tensor(inputs, dtype=torch.long, device=device),
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32, device=device),
        action_index=torch.tensor(index, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        mask=length_mask(lengths),
    )


def partition(costs: Sequence[int], budget: int, ranks: int = 1) -> list[list[list[int]]]:
    """Share sequences of `costs` tokens out: `result[rank]` is that rank's list of micro-batches
    (lists of rows).

    Longest first into the first micro-batch with room, so a sequence above the budget travels
    alone. Every rank gets the same number of micro-batches (sharded weights are gathered in step),
    if need be with empty ones.
    """
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        best = next((b for b, load in enumerate(loads) if load + costs[i] <= budget), None)
        if best is None:
            bins.append([])
            loads.append(0)
            best = len(bins) - 1
        bins[best].append(i)
        loads[best] += costs[i]
    while len(bins) % ranks:
        widest = max(range(len(bins)), key=lambda b: len(bins[b]))
        bins.append(bins[widest][1::2])
        bins[widest] = bins[widest][::2]
    # Heaviest first, dealt in turn: ranks hold micro-batches of like size at the same time.
    bins.sort(key=lambda rows: -sum(costs[i] for i in rows))
    return [bins[rank::ranks] for rank in range(ranks)]


def micro_batches(
    batch: Batch, max_tokens: int, what: str, rows: Sequence[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of the given rows of the batch (default: all), packed, at most `max_tokens`
    (prompt + response) in one; shows a progress bar named `what` if it takes long.
    """
    rows = range(len(batch.rollouts)) if rows is None else rows
    rollouts = [batch.rollouts[i] for i in rows]
    costs = [len(r.problem.prompt_ids) + len(r.response_ids) for r in rollouts]
    mine = partition(costs, max_tokens, distributed.world_size())[distributed.rank()]
    bar = distributed.progress_bar(mine, what, unit="micro-batch", leave=False, delay=2)
    for share in bar:
        yield pack(batch.rollouts, [rows[i] for i in share], batch.rewards.device)
