"""Problem in, graded groups out: the KV-cached sampler, group collection with dynamic sampling,
evaluation.

A slot whose response ends is refilled at once, and the members of a group share one prefill of
their prompt. The random number behind every token depends on (seed, step, problem, sample, token)
alone, so slots, batch composition, rank count and resume change nothing about what is drawn.
"""

import math
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

import distributed
from data import DataOrder, Problem, Rollout, vocabulary_size
from graphs import Graphs
from kvcache import KVCache, View, paged_kernel
from model import Transformer, head_size
from rewards import has_format
from scheduler import Batch, Job

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


@dataclass(frozen=True)
class Truncation:
    """Which tokens evaluation may draw; training has none, its log-probs are of the whole softmax.

    top_k: the likeliest so many, 0 for all. top_p: the smallest set of that mass among those.
    min_p: those at least that likely as the likeliest.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, logprobs: Tensor) -> Tensor:
        """logprobs (B, V) -> the same, -inf where not to be drawn."""
        if self.top_k:
            least = logprobs.topk(min(self.top_k, logprobs.shape[1])).values[:, -1:]
            logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
        if self.top_p < 1:
            p, order = logprobs.softmax(-1).sort(descending=True, stable=True)
            beyond = p.cumsum(-1) - p >= self.top_p  # likelier tokens have that mass already
            logprobs = logprobs.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
        if self.min_p:
            least = logprobs.amax(-1, keepdim=True) + math.log(self.min_p)
            logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
        return logprobs


def draw(
    logits: Tensor, temperature: float, u: Tensor, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: logits (B, V) float32, u (B,) -> tokens (B,) int64 and their log-probs
    (B,) float32.

    Log-probs are of softmax(logits / temperature) over the whole vocabulary, as the trainer scores
    them. Temperature 0 is greedy, with the log-probs of temperature 1.
    """
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
    if temperature > 0:
        kept = truncation(logprobs) if truncation else logprobs
        cdf = kept.exp().double().cumsum(-1)  # a float32 sum of 130k terms would move the edges
        tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        # NaN lies behind all: on a GPU an index out of range would end the process for good.
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
    else:
        tokens = logits.argmax(-1, keepdim=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


# ---- the sampler


class Sampler:
    """Continuous batching on `slots` rows. `model` is whole on this rank: decoding does no
    collective.

    kv_cache_tokens: most tokens with keys and values at a time; 0: what the memory allows.
    prefill_chunk_tokens: most prompt tokens in one forward. page: tokens per page.
    cuda_graphs: launch a decode step as one CUDA graph, where a paged kernel runs.
    """

    def __init__(
        self,
        model: Transformer,
        eos_ids: Iterable[int],
        slots: int = 64,
        tokenizer: Any = None,
        *,
        kv_cache_tokens: int = 0,
        prefill_chunk_tokens: int = 8192,
        page: int | None = None,
        cuda_graphs: bool = False,
    ):
        self.model, self.eos_ids, self.slots = model, set(eos_ids), slots
        self.tokenizer = tokenizer
        if tokenizer is not None:
            model.restrict_vocabulary(vocabulary_size(tokenizer))
        self.device = model.head_weight.device
        on_gpu = self.device.type == "cuda"
        self.kv_cache_tokens, self.chunk = kv_cache_tokens, prefill_chunk_tokens
        self.cuda_graphs = cuda_graphs
        if cuda_graphs and (lacking := self._needed_for_graphs()):
            raise ValueError(f"--cuda-graphs needs {lacking}; leave it out.")
        self.page = page or (256 if on_gpu else 32)  # flash-attn wants a multiple of 256
        self.check_every = 8 if on_gpu else 1  # decode steps between looks at what has stopped
        self.weight_version = 0
        self.interrupted = False  # set from outside: leave everything before the next token
        self.counts: Counter[str] = Counter()  # of work done: see `run`

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
        truncation: Truncation | None = None,
    ) -> list[Rollout]:
        """n responses to each prompt (token ids), in order: n of the first, n of the second, ...

        max_new_tokens counts the stop token. Raises ValueError for an empty prompt.
        """
        rollouts = []
        for p, ids in enumerate(prompts):
            problem = Problem(str(p), p, "", list(ids), "")
            rollouts += [Rollout(problem, p, j, response_key(seed, 0, p, j)) for j in range(n)]
        self.run(rollouts, max_new_tokens, temperature, truncation=truncation)
        return rollouts

    @torch.inference_mode()
    def run(
        self,
        rollouts: Sequence[Rollout],
        max_new_tokens: int,
        temperature: float,
        on_finish: Callable[[Rollout], bool] = lambda rollout: False,
        truncation: Truncation | None = None,
    ) -> None:
        """Continue every rollout to its end, in place, started in the order given.

        Unfinished rollouts go on from the tokens they have. `on_finish(rollout)` is called for each
        that ends, in the order of the decode steps; once it returns True the rest is left as it is,
        unfinished. Adds to `counts`: decode steps, row_steps (sum of rows over them), prefill
        tokens, preempted rollouts. Holds no memory afterwards.
        """
        batch = Batch(
            self._new_cache(rollouts, max_new_tokens),
            self.slots,
            [r for r in rollouts if not r.finished],
        )
        step = partial(self._step, batch.cache, temperature, truncation)
        # step_of(view) is the step for the rows of that view.
        step_of = Graphs(step, self.slots) if self.cuda_graphs else partial(partial, step)
        left = lambda row: max_new_tokens - len(row.rollout.response_ids)
        stop = False
        with self.model.packed_weights():
            while (batch.queue or batch.rows) and not stop and not self.interrupted:
                prompts, copies, rests = batch.admit()
                self._prefill(batch.cache, prompts)
                batch.cache.copy(copies)
                self._prefill(batch.cache, rests)
                steps = min(self.check_every, *map(left, batch.rows))
                batch.reserve(steps)
                rows = list(batch.rows)
                self.counts.update(decode_steps=steps, row_steps=steps * len(rows))
                tokens, logprobs = self._decode(batch, steps, step_of)
                for row, ids, values in zip(rows, tokens, logprobs, strict=True):
                    self._extend(row.rollout, ids, values, max_new_tokens)
                    if row.rollout.finished:
                        batch.leave(row)
                        stop = on_finish(row.rollout) or stop
        self.counts["preempted"] += batch.preempted
        del batch, step, step_of
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer wants the memory

    def _needed_for_graphs(self) -> str:
        """What a recorded decode step needs and does not have, or nothing."""
        decoder = self.model.model
        if self.device.type != "cuda" or decoder.compute_dtype == torch.float32:
            return "a GPU and a 16-bit --dtype"
        if paged_kernel() is None:
            return "flash-attn, or a torch whose varlen_attn takes page tables (2.13 does)"
        if decoder.rotary.native_length:  # a look at the lengths, on the host, at every step
            return f"another rope type than {decoder.rotary.type}"
        return ""

    def _new_cache(self, rollouts: Sequence[Rollout], max_new_tokens: int) -> KVCache:
        """An empty cache that any one of the rollouts fits in, or ValueError."""
        if any(not r.problem.prompt_ids for r in rollouts):
            raise ValueError(
                "a prompt has no tokens; the first response token needs a state to be chosen in."
            )
        config, dtype = self.model.config, self.model.model.compute_dtype
        heads = config.num_attention_heads, config.num_key_value_heads, head_size(config)
        longest = max((len(r.problem.prompt_ids) for r in rollouts), default=0) + max_new_tokens
        native = self.model.model.rotary.native_length
        if native and longest > native + 1:  # the last token is never fed
            raise ValueError(
                f"a cache of {longest - 1} tokens is impossible with this rope type, every token "
                f"past {native} changes all keys; limit prompt + response to that."
            )
        limit = self.kv_cache_tokens or self._affordable_tokens()
        if longest > limit:
            raise ValueError(
                f"a prompt and a response of {longest} tokens together do not fit in a KV cache of "
                f"{limit} tokens; raise --kv-cache-tokens or lower --max-response-tokens."
            )
        # One page more than asked for: the last member of a group may copy a page of its prompt.
        pages = -(-limit // self.page) + 1
        if self.cuda_graphs:  # all of them at once, so no more than all slots can fill
            pages = min(pages, self.slots * (-(-longest // self.page) + 1))
        cache = KVCache(
            config.num_hidden_layers, *heads, page=self.page, max_pages=pages, dtype=dtype,
            device=self.device,
        )  # fmt: skip
        if self.cuda_graphs:
            cache.grow(pages)
        return cache

    def _affordable_tokens(self) -> int:
        """Tokens in four fifths of the free GPU memory, or in a quarter of all CPU memory."""
        config = self.model.config
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config)
        per_token *= self.model.model.compute_dtype.itemsize
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the trainer has left in torch's own pool is free too
            return int(0.8 * torch.cuda.mem_get_info(self.device)[0]) // per_token
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return memory // 4 // distributed.world_size() // per_token

    def _prefill(self, cache: KVCache, jobs: Sequence[Job]) -> None:
        """Store keys and values of the jobs' tokens, at most `chunk` of them in one forward."""
        pieces: list[Job] = []
        room = self.chunk
        for pages, start, ids in jobs:
            while ids:
                pieces.append((pages, start, ids[:room]))
                start, ids, room = start + room, ids[room:], room - len(ids[:room])
                if not room:
                    self._forward(cache, pieces)
                    pieces, room = [], self.chunk
        if pieces:
            self._forward(cache, pieces)

    def _forward(self, cache: KVCache, pieces: Sequence[Job]) -> None:
        """One forward over pieces of prompts."""
        spans = [(pages, start, start + len(ids)) for pages, start, ids in pieces]
        ids = torch.tensor([i for *_, ids in pieces for i in ids], device=self.device)
        positions = torch.tensor([t for _, a, b in spans for t in range(a, b)], device=self.device)
        self.model.model(ids, positions, cache.prefill(spans))
        self.counts["prefill_tokens"] += len(ids)

    def _step(
        self,
        cache: KVCache,
        temperature: float,
        truncation: Truncation | None,
        view: View,
        last: Tensor,
        lengths: Tensor,
        keys: Tensor,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of every row, and its log-prob."""
        hidden = self.model.model(last, lengths, cache.decode(view, lengths))
        return draw(self.model.logits(hidden), temperature, uniforms(keys, counts), truncation)

    def _decode(
        self, batch: Batch, steps: int, step_of: Callable[[View], Callable]
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The next `steps` tokens of every row, and their log-probs.

        The host waits for the device once, at the end: a row that stops early is decoded on, and
        `_extend` drops what comes after. Raises FloatingPointError if a log-prob is not finite.
        """
        state = [
            (row.last, row.stored, row.rollout.key, len(row.rollout.response_ids))
            for row in batch.rows
        ]
        last, lengths, keys, counts = torch.tensor(state, device=self.device).T.contiguous()
        step, drawn = step_of(batch.view()), []
        for i in range(steps):
            drawn.append(step(last, lengths + i, keys, counts + i))
            last = drawn[-1][0]
        tokens, logprobs = (torch.stack(x, 1).tolist() for x in zip(*drawn, strict=True))
        for row, values in zip(batch.rows, logprobs, strict=True):
            if not all(map(math.isfinite, values)):
                raise FloatingPointError(
                    f"a sampled log-prob of problem {row.rollout.problem.id} is not finite: the "
                    "weights are not, or the logits overflow. In training, go back to a checkpoint "
                    "and lower --lr."
                )
        return tokens, logprobs

    def _extend(
        self, r: Rollout, tokens: Sequence[int], logprobs: Sequence[float], max_new_tokens: int
    ) -> None:
        """Append tokens up to the first stop token or the end of the budget."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            r.response_ids.append(token)
            r.rollout_logprobs.append(logprob)
            r.weight_versions.append(self.weight_version)
            if token in self.eos_ids or len(r.response_ids) == max_new_tokens:
                r.finish_reason = "stop" if token in self.eos_ids else "length"
                r.text = self._text(r)
                return

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
    truncation: Truncation | None = None,
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
    the next step if `partial_rollout` is set. A group of the buffer with a token that is more than
    `max_staleness` weight versions old, or with no room left in the budget, starts anew.
    """
    wanted = config.prompts_per_step
    oldest = -math.inf  # weight version a resumed token may have
    if config.max_staleness is not None:
        oldest = sampler.weight_version - config.max_staleness
    stale = lambda group: is_stale(group, oldest, config.max_response_tokens)
    start = lambda problem, number: new_group(
        problem, number, seed=config.seed, step=step, size=config.group_size
    )
    waiting = deque(start(g[0].problem, g[0].group) if stale(g) else g for g in buffer)
    counts: dict[str, int] = defaultdict(int, regenerated=sum(map(stale, buffer)))
    counts["resumed"] = len(buffer) - counts["regenerated"]
    sampler.counts.clear()
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
            groups.append(start(problems[index], number))
        # A rank stops when its share of the missing groups is kept: decoding does no collective.
        share = math.ceil(missing / ranks)
        mine = groups[rank::ranks]
        sample_groups(
            sampler, grader, mine, max_new_tokens=config.max_response_tokens,
            temperature=config.temperature, think=config.think, reward=config.reward,
            enough=lambda finished, share=share: sum(map(keep, finished)) >= share,
            progress=progress,
        )  # fmt: skip
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
    for work in distributed.gather([dict(sampler.counts)]):
        for name, count in work.items():
            counts[name] += count
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
        disable=distributed.rank() > 0,
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
