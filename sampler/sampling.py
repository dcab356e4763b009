"""Which token is drawn: random numbers by counter, and inverse-CDF sampling from the softmax.

The random number behind every token depends on (seed, step, problem, sample, token) alone, so
slots, batch composition, rank count and resume change nothing about what is drawn.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
