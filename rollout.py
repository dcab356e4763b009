"""Problem in, graded groups out: the KV-cached sampler, group collection with dynamic sampling,
evaluation.

A slot whose response ends is refilled at once, and the members of a group share one prefill of
their prompt. The random number behind every token depends on (seed, step, problem, sample, token)
alone, so slots, batch composition, rank count and resume change nothing about what is drawn.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
from data import DataOrder, Problem, Rollout
from model import KVCache, Transformer
from rewards import has_format

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Finaliser of SplitMix64 (Steele et al. 2014): 64 bits in, 64 well-stirred bits out."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x


def response_key(seed: int, step: int, problem: int, sample: int) -> int:
    """Random key of one response as an int64; `problem` is the number of the draw, unique over
    epochs.
    """
    key = 0
    for part in (seed, step, problem, sample):
        key = mix((key + GOLDEN + part) & MASK64)
    return signed(key)


def uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys (B,) int64, tokens (B,) int64 -> (B,) float64 in [0, 1): `mix` of key and counter, in
    wrapping int64.
    """
    shift = lambda x, n: (x >> n) & ((1 << (64 - n)) - 1)  # int64 >> alone would keep the sign
    x = keys + (tokens + 1) * signed(GOLDEN)
    x = (x ^ shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * signed(0x94D049BB133111EB)
    x = x ^ shift(x, 31)
    return shift(x, 12).double() * 2.0**-52


def draw(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: logits (B, V) float32, u (B,) -> tokens (B,) int64 and their log-probs
    (B,) float32.

    Log-probs are of softmax(logits / temperature) over the whole vocabulary, as the trainer scores
    them. Temperature 0 is greedy, with the log-probs of temperature 1.
    """
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
    if temperature > 0:
        cdf = (
            logprobs.double().exp().cumsum(-1)
        )  # float64: a float32 sum of 130k terms would move the edges
        tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
    else:
        tokens = logits.argmax(-1, keepdim=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


class Sampler:
    """Continuous batching on `slots` cache rows. `model` is whole on this rank: decoding does no
    collective.
    """

    def __init__(
        self, model: Transformer, eos_ids: Iterable[int], slots: int = 64, tokenizer: Any = None
    ):
        self.model, self.eos_ids, self.slots = model, set(eos_ids), slots
        self.tokenizer = tokenizer
        self.device = model.head_weight.device
        self.weight_version = 0
        self.interrupted = (
            False  # set from outside: leave everything as it is before the next token
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[Rollout]:
        """n responses to each prompt (token ids), in order: n of the first, n of the second, ...

        max_new_tokens counts the stop token. Raises ValueError for an empty prompt.
        """
        rollouts = []
        for p, ids in enumerate(prompts):
            problem = Problem(str(p), p, "", list(ids), "")
            rollouts += [Rollout(problem, p, j, response_key(seed, 0, p, j)) for j in range(n)]
        self.run(rollouts, max_new_tokens, temperature)
        return rollouts

    @torch.inference_mode()
    def run(
        self,
        rollouts: Sequence[Rollout],
        max_new_tokens: int,
        temperature: float,
        on_finish: Callable[[Rollout], bool] = lambda rollout: False,
    ) -> None:
        """Continue every rollout to its end, in place, in the order given.

        Unfinished rollouts go on from the tokens they have. `on_finish(rollout)` is called for each
        that ends, in the order of the decode steps; once it returns True the rest is left as it is,
        unfinished.
        """
        if any(not r.problem.prompt_ids for r in rollouts):
            raise ValueError(
                "a prompt has no tokens; the first response token needs a state to be chosen in."
            )
        queue = deque(r for r in rollouts if not r.finished)
        cache = KVCache(self.model.config, self.slots, self.model.model.compute_dtype, self.device)
        running: dict[int, Rollout] = {}  # slot -> rollout
        stop = False
        while (queue or running) and not stop and not self.interrupted:
            if queue and len(running) < self.slots:
                free = [s for s in range(self.slots) if s not in running]
                admitted = {s: queue.popleft() for s in free[: len(queue)]}
                self._prefill(cache, admitted)
                running = dict(sorted((running | admitted).items()))
            tokens, logprobs = self._decode(cache, running, temperature)
            for (slot, r), token, logprob in zip(
                list(running.items()), tokens, logprobs, strict=True
            ):
                r.response_ids.append(token)
                r.rollout_logprobs.append(logprob)
                r.weight_versions.append(self.weight_version)
                if token in self.eos_ids or len(r.response_ids) == max_new_tokens:
                    r.finish_reason = "stop" if token in self.eos_ids else "length"
                    r.text = self._text(r)
                    del running[slot]
                    stop = on_finish(r) or stop

    def _prefill(self, cache: KVCache, admitted: dict[int, Rollout]) -> None:
        """Fill the cache with all tokens of each admitted rollout but the last, which `_decode`
        will feed.

        Rollouts with the same tokens so far (a group at its start) are computed once and copied.
        """
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for slot, r in admitted.items():
            alike[tuple(r.problem.prompt_ids + r.response_ids)[:-1]].append(slot)
        sources = {slots[0]: ids for ids, slots in alike.items() if ids}
        if sources:
            lengths = torch.tensor([0, *map(len, sources.values())])
            cu_seqlens = lengths.cumsum(0).to(self.device, torch.int32)
            ids = torch.tensor([i for ids in sources.values() for i in ids], device=self.device)
            positions = torch.cat(
                [torch.arange(n, device=self.device) for n in lengths[1:].tolist()]
            )
            attend = cache.prefill(
                torch.tensor(list(sources), device=self.device), cu_seqlens, int(lengths.max())
            )
            self.model.model(ids, positions, attend)
        for ids, slots in alike.items():
            if ids and len(slots) > 1:
                cache.copy(slots[0], torch.tensor(slots[1:], device=self.device), len(ids))

    def _decode(
        self, cache: KVCache, running: dict[int, Rollout], temperature: float
    ) -> tuple[list[int], list[float]]:
        """One token for every running rollout."""
        rollouts = running.values()
        tensor = lambda x: torch.tensor(x, device=self.device)
        last = tensor([(r.response_ids or r.problem.prompt_ids)[-1] for r in rollouts])
        lengths = tensor([len(r.problem.prompt_ids) + len(r.response_ids) - 1 for r in rollouts])
        u = uniforms(
            tensor([r.key for r in rollouts]), tensor([len(r.response_ids) for r in rollouts])
        )
        hidden = self.model.model(last, lengths, cache.decode(tensor(list(running)), lengths))
        tokens, logprobs = draw(self.model.logits(hidden), temperature, u)
        return tokens.tolist(), logprobs.tolist()

    def _text(self, rollout: Rollout) -> str:
        """Text without the stop token; special tokens stay, they may be the thinking tags."""
        if self.tokenizer is None:
            return ""
        ids = rollout.response_ids
        return self.tokenizer.decode(
            ids[:-1] if rollout.finish_reason == "stop" else ids, skip_special_tokens=False
        )


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
    def finished(self) -> bool:
        return all(r.finished for r in self.rollouts)

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
    """Raw rewards of a group differ. Not `std > 0`: the float32 std of eight times 0.7 is 6e-8
    (BC-07).
    """
    rewards = list(rewards)
    return max(rewards) - min(rewards) > 1e-8


@dataclass
class Collected:
    """One step's kept groups, the groups to resume, and the counts behind the rollout metrics."""

    groups: list[list[Rollout]]
    unfinished: list[list[Rollout]]
    finished: list[list[Rollout]]  # all that ended, kept or not, in order of draw
    counts: dict[str, int]
    seconds: float = 0.0  # that sampling took


def sample_groups(
    sampler: Sampler,
    grader: Grader,
    groups: Sequence[list[Rollout]],
    *,
    max_new_tokens: int,
    temperature: float,
    think: str,
    reward: str = "correct",
    enough: Callable[[list[list[Rollout]]], bool] = lambda finished: False,
    progress: tqdm | None = None,
) -> None:
    """Finish and grade groups in place. Once `enough(finished groups so far)` is true the rest is
    aborted. `reward` other than "correct" is a control, see `control_rewards`.

    A response is graded by the verifier's workers while others decode.
    """
    tracked = {r.group: Group(rollouts) for rollouts in groups for r in rollouts}
    finished: list[list[Rollout]] = []

    def on_finish(r: Rollout) -> bool:
        group = tracked[r.group]
        problem = r.problem
        group.verdicts[r.sample_index] = grader.submit(
            r.text, problem.label, think, problem.verifier
        )
        if not group.finished:
            return False
        group.grade()
        if reward != "correct":
            control_rewards(reward, group.rollouts, grader, think)
        finished.append(group.rollouts)
        if progress is not None:
            progress.update()
        return enough(finished)

    sampler.run(
        [r for rollouts in groups for r in rollouts], max_new_tokens, temperature, on_finish
    )
    for group in tracked.values():
        group.grade()


def new_group(problem: Problem, number: int, *, seed: int, step: int, size: int) -> list[Rollout]:
    """`size` empty rollouts of one draw of a problem."""
    return [Rollout(problem, number, j, response_key(seed, step, number, j)) for j in range(size)]


def collect(
    sampler: Sampler,
    grader: Grader,
    problems: Sequence[Problem],
    order: DataOrder,
    buffer: Sequence[list[Rollout]],
    config: Any,
    step: int,
) -> Collected:
    """Sample until `prompts_per_step` groups are kept, at most 1 + `max_refills` rounds.

    Every round starts over_sampling times the groups still wanted, those of the buffer first. With
    dynamic sampling a group is kept if its raw rewards differ. Groups that finish first are kept
    first; those still running when enough are kept are aborted, and returned in `unfinished` for
    the next step if `partial_rollout` is set.
    """
    wanted, waiting = config.prompts_per_step, deque(buffer)
    counts: dict[str, int] = defaultdict(int, resumed=len(buffer))
    keep = lambda group: not config.dynamic_sampling or has_signal(r.reward for r in group)
    kept: list[list[Rollout]] = []
    ended: list[list[Rollout]] = []
    ranks, rank = distributed.world_size(), distributed.rank()
    progress = tqdm(
        total=wanted, desc=f"step {step} rollout", unit="group", leave=False, disable=rank > 0
    )
    for round_ in range(1 + config.max_refills):
        missing = wanted - len(kept)
        if missing <= 0:
            break
        number_started = math.ceil(missing * config.over_sampling)
        groups = [waiting.popleft() for _ in range(min(len(waiting), number_started))]
        while len(groups) < number_started:
            number, index = order.draw()
            groups.append(
                new_group(
                    problems[index], number, seed=config.seed, step=step, size=config.group_size
                )
            )
        # A rank stops when its share of the missing groups is kept: decoding does no collective.
        share = math.ceil(missing / ranks)
        mine = groups[rank::ranks]
        sample_groups(
            sampler,
            grader,
            mine,
            max_new_tokens=config.max_response_tokens,
            temperature=config.temperature,
            think=config.think,
            reward=config.reward,
            enough=lambda finished, share=share: sum(map(keep, finished)) >= share,
            progress=progress,
        )
        aborted = []
        for group in sorted(distributed.gather(mine), key=lambda group: group[0].group):
            complete = all(r.finished for r in group)
            (ended if complete else aborted).append(group)
            if complete and keep(group):
                kept.append(group)
        # First in, first out: the aborted were started before those still waiting.
        waiting.extendleft(reversed(aborted))
        counts["rounds"] = round_ + 1
    progress.close()
    for group in ended:
        order.record(group[0].problem.index, [r.reward for r in group])
    counts |= {
        "finished": len(ended),
        "aborted": len(waiting),
        "surplus": max(0, len(kept) - wanted),
    }
    resume = list(waiting) if config.partial_rollout else []
    return Collected(kept[:wanted], resume, ended, dict(counts))


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
        disable=distributed.rank() > 0,
    ) as progress:
        sample_groups(
            sampler,
            grader,
            mine,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            think=think,
            progress=progress,
        )
    return sorted(distributed.gather(mine), key=lambda group: group[0].group)
