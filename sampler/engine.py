"""The KV-cached sampler: prompts in, responses and their log-probs out.

A slot whose response ends is refilled at once, and the members of a group share one prefill of
their prompt. What is sampled (sampling.py) depends on none of this.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import distributed
from data import Problem, Rollout
from kernels.attention import paged_kernel
from model import Transformer, head_size, limit_threads
from problems import stop_ids, vocabulary_size
from sampler.graphs import Graphs, Step
from sampler.kvcache import GPU_SHARE, HOST_SHARE, KVCache, View, bytes_per_token
from sampler.sampling import Truncation, response_key, sample_token, uniforms
from sampler.scheduler import PrefillJob, Scheduler

# Most prompt tokens in one forward; changes memory, never the result. The memory plan counts on it.
PREFILL_CHUNK_TOKENS = 8192


class Sampler:
    """Continuous batching on `slots` rows. `model` is complete on this rank: decoding uses no
    collectives, so ranks need not decode in step.

    kv_cache_tokens: most tokens whose keys and values are held at a time; 0: what memory allows.
    prefill_chunk_tokens: most prompt tokens in one forward. page: tokens per page.
    cuda_graphs: launch a decode step as one CUDA graph; ValueError where that is not possible.
    """

    def __init__(
        self,
        model: Transformer,
        eos_ids: Iterable[int],
        slots: int = 64,
        tokenizer: Any = None,
        *,
        kv_cache_tokens: int = 0,
        prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
        page: int | None = None,
        cuda_graphs: bool = False,
    ):
        self.model, self.eos_ids, self.slots = model, set(eos_ids), slots
        self.tokenizer = tokenizer
        # A padded id could be drawn, but the tokenizer has no text for it.
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
        # Written on every token: partial rollouts mix tokens of several versions.
        self.weight_version = 0
        self.interrupted = False  # set from outside: stop before the next token
        self.counts: Counter[str] = Counter()  # of the work done, see `run`; the caller clears it

    @classmethod
    def from_pretrained(
        cls, folder: Path, tokenizer: Any, slots: int, dtype: torch.dtype, device: torch.device
    ) -> "Sampler":
        """A sampler of the model in `folder`, frozen, computing in `dtype`; stop tokens are those
        of the folder.
        """
        model = Transformer.from_pretrained(folder, dtype).requires_grad_(False)
        limit_threads(model, device)
        return cls(model.to(device), stop_ids(folder, tokenizer), slots, tokenizer)

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
            # A key per response: its tokens do not depend on slots, order or company.
            rollouts += [Rollout(problem, p, j, response_key(seed, 0, p, j)) for j in range(n)]
        self.run(rollouts, max_new_tokens, temperature, truncation=truncation)
        return rollouts

    @torch.inference_mode()
    def run(
        self,
        rollouts: Sequence[Rollout],
        max_new_tokens: int,
        temperature: float,
        on_finish: Callable[[Rollout], None] = lambda rollout: None,
        truncation: Truncation | None = None,
        next_rollouts: Callable[[], Iterable[Rollout] | None] = lambda: (),
        problems: Iterable[Problem] = (),
    ) -> None:
        """Continue every rollout to its end, in place, started in the order given.

        Unfinished rollouts continue from the tokens they have. `on_finish(rollout)` is called for
        each that ends, in the order of the decode steps. `next_rollouts()` is called before free
        slots are filled: the rollouts that it returns, of any of `problems`, go to the end of the
        queue; None ends the run and leaves all as they are. Adds to `counts`: decode_steps,
        row_steps (the sum of the rows over them), prefill_tokens, preempted. Frees its memory.
        """
        # All problems that may still arrive: a prompt too long is refused now, not hours later.
        known = [*problems, *(r.problem for r in rollouts)]
        scheduler = Scheduler(self._new_cache(known, max_new_tokens), self.slots, rollouts)
        step: Step = partial(self._step, scheduler.cache, temperature, truncation)
        if self.cuda_graphs:
            step = Graphs(step, self.slots)
        with self.model.reordered_weights():
            while not self.interrupted:
                arrived = next_rollouts()
                if arrived is None:
                    break
                scheduler.enqueue(arrived)
                # Only after next_rollouts: what it returns may be the only work left.
                if not scheduler.queue and not scheduler.running:
                    break
                self._start_waiting(scheduler)
                # Not past the budget of any row: up to there the cache is sure to have room.
                left = [max_new_tokens - len(row.rollout.response_ids) for row in scheduler.running]
                steps = min(self.check_every, *left)
                scheduler.reserve(steps)
                # After reserve, which may preempt some. A copy, because `remove` edits the list.
                rows = list(scheduler.running)
                self.counts.update(decode_steps=steps, row_steps=steps * len(rows))
                tokens, logprobs = self._decode(scheduler, steps, step)
                for row, ids, values in zip(rows, tokens, logprobs, strict=True):
                    self._extend(row.rollout, ids, values, max_new_tokens)
                    if row.rollout.finished:
                        scheduler.remove(row)
                        on_finish(row.rollout)
        self.counts["preempted"] += scheduler.preempted
        del scheduler, step  # they hold the cache
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer wants the memory

    def _needed_for_graphs(self) -> str:
        """What a recorded decode step needs and does not have here, or ""."""
        decoder = self.model.model
        # In float32 there is no kernel, and plain attention depends on lists of pages.
        if self.device.type != "cuda" or decoder.compute_dtype == torch.float32:
            return "a GPU and a 16-bit --dtype"
        if paged_kernel() is None:
            return "flash-attn, or a torch whose varlen_attn takes page tables (2.13 does)"
        if decoder.rotary.native_length:  # looks at the lengths on the host in every step
            return f"another rope type than {decoder.rotary.type}"
        return ""

    def _new_cache(self, problems: Sequence[Problem], max_new_tokens: int) -> KVCache:
        """An empty cache that any one response to any of the problems fits in, or ValueError."""
        if any(not p.prompt_ids for p in problems):
            raise ValueError(
                "a prompt has no tokens; the first response token needs a state to be chosen in."
            )
        # Room for any one response alone: then preempting the others always lets it finish.
        longest = max((len(p.prompt_ids) for p in problems), default=0) + max_new_tokens
        native = self.model.model.rotary.native_length
        if native and longest > native + 1:  # the last token is never fed
            raise ValueError(
                f"a cache of {longest - 1} tokens is impossible with this rope type: every token "
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
        if self.cuda_graphs:  # allocated at once, so no more than all slots can fill
            pages = min(pages, self.slots * (-(-longest // self.page) + 1))
        config = self.model.config
        cache = KVCache(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_size(config),
            page=self.page,
            max_pages=pages,
            dtype=self.model.model.compute_dtype,
            device=self.device,
        )
        if self.cuda_graphs:  # recordings keep the addresses of the pool, so it must not grow later
            cache.grow(pages)
        return cache

    def _affordable_tokens(self) -> int:
        """Tokens in the share of this rank's memory that a cache may fill."""
        per_token = bytes_per_token(self.model.config, self.model.model.compute_dtype.itemsize)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the trainer has left in torch's own pool is free too
            return int(GPU_SHARE * torch.cuda.mem_get_info(self.device)[0]) // per_token
        return int(HOST_SHARE * distributed.host_memory()) // distributed.ranks_here() // per_token

    def _start_waiting(self, scheduler: Scheduler) -> None:
        """Fill free slots from the queue, and store what the new rows have to attend to."""
        admitted = scheduler.admit()
        # In this order: copies read what prompts have stored, resumed tokens attend to both.
        self._prefill(scheduler.cache, admitted.prompts)
        scheduler.cache.copy(admitted.copies)
        self._prefill(scheduler.cache, admitted.resumed)

    def _prefill(self, cache: KVCache, jobs: Sequence[PrefillJob]) -> None:
        """Store keys and values of the jobs' tokens, at most `chunk` of them in one forward."""
        pieces: list[PrefillJob] = []
        room = self.chunk
        for pages, start, ids in jobs:
            # A long prompt is cut: later pieces read the earlier ones from the cache.
            while ids:
                pieces.append(PrefillJob(pages, start, ids[:room]))
                start, ids, room = start + room, ids[room:], room - len(ids[:room])
                if not room:
                    self._forward(cache, pieces)
                    pieces, room = [], self.chunk
        if pieces:
            self._forward(cache, pieces)

    def _forward(self, cache: KVCache, pieces: Sequence[PrefillJob]) -> None:
        """One forward over pieces of sequences; its hidden states are not needed."""
        spans = [(pages, start, start + len(ids)) for pages, start, ids in pieces]
        ids = torch.tensor([i for piece in pieces for i in piece.ids], device=self.device)
        positions = torch.tensor([t for _, a, b in spans for t in range(a, b)], device=self.device)
        # Without the head: nothing is drawn here, decoding feeds the last token itself.
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
        counters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The next token of every row, and its log-prob.

        (B,) int64 each: last, the token to feed; lengths, the tokens stored before it; keys and
        counters, from which the random numbers come.
        """
        # A row's `lengths` tokens occupy 0 .. lengths - 1, so it is the new token's position too.
        hidden = self.model.model(last, lengths, cache.decode(view, lengths))
        logits, u = self.model.logits(hidden), uniforms(keys, counters)
        return sample_token(logits, temperature, u, truncation)

    def _decode(
        self, scheduler: Scheduler, steps: int, step: Step
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The next `steps` tokens of every row, and their log-probs.

        The host waits for the device once, at the end: a row that stops early is decoded on, and
        `_extend` drops what comes after. Raises FloatingPointError if a log-prob is not finite.
        """
        state = [
            (row.last, row.stored, row.rollout.key, len(row.rollout.response_ids))
            for row in scheduler.running
        ]
        # One copy to the device for all four; int64, because keys fill 64 bits.
        last, lengths, keys, counters = torch.tensor(state, device=self.device).T.contiguous()
        view = scheduler.view()
        sampled = []
        for i in range(steps):
            last, logprob = step(view, last, lengths + i, keys, counters + i)
            sampled.append((last, logprob))
        tokens, logprobs = (torch.stack(x, 1).cpu() for x in zip(*sampled, strict=True))
        # A NaN row would go on drawing the last id of the vocabulary and pass for a response.
        finite = logprobs.isfinite().all(1)
        if not finite.all():
            problem = scheduler.running[int(finite.int().argmin())].rollout.problem
            raise FloatingPointError(
                f"a sampled log-prob of problem {problem.id} is not finite: the weights are not, "
                "or the logits overflow. In training, go back to a checkpoint and lower --lr."
            )
        return tokens.tolist(), logprobs.tolist()

    def _extend(
        self, r: Rollout, tokens: Sequence[int], logprobs: Sequence[float], max_new_tokens: int
    ) -> None:
        """Append tokens up to the first stop token or the end of the budget."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            r.response_ids.append(token)
            r.rollout_logprobs.append(logprob)
            r.weight_versions.append(self.weight_version)
            if token in self.eos_ids or len(r.response_ids) == max_new_tokens:
                # A stop token on the last place of the budget is a stop, not a truncation.
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
