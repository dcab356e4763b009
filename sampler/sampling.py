"""Which token is sampled: random numbers by counter, and inverse-CDF sampling from the softmax.

The random number of a token is a hash of (seed, step, problem, sample, token) and nothing else.
A generator with a state would give a token another number whenever the batch, the slots, the ranks
or the point of a resume changed.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# SplitMix64 (Steele et al. 2014): counter k of a key has the number mix(key + k * GOLDEN). A few
# integer operations, which torch does for all rows at once.
MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: no counter repeats within 2^64


def mix(x: int) -> int:
    """Finaliser of SplitMix64: 64 bits in, 64 well-mixed bits out, one to one."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The int64 with the same bits: torch has hardly any operations for uint64."""
    return x - (1 << 64) if x >> 63 else x


def response_key(seed: int, step: int, problem: int, sample: int) -> int:
    """Random key of one response as an int64. `problem` is the number of its draw, which is unique
    over epochs; its index in the file is not.
    """
    key = 0
    for part in (seed, step, problem, sample):
        key = mix((key + GOLDEN + part) & MASK64)
    return signed(key)


def uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys (B,) int64, tokens (B,) int64 -> (B,) float64 in [0, 1): the number of counter
    tokens + 1 of each key. This is `mix` on int64, whose products wrap to the same 64 bits.
    """
    x = keys + (tokens + 1) * signed(GOLDEN)
    x = (x ^ logical_shift(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ logical_shift(x, 27)) * signed(0x94D049BB133111EB)
    x = x ^ logical_shift(x, 31)
    return logical_shift(x, 12).double() * 2.0**-52  # 52 bits: exact in float64, never rounds to 1


def logical_shift(x: Tensor, n: int) -> Tensor:
    """x >> n, filled with zeros: a plain shift of an int64 fills with its sign."""
    return (x >> n) & ((1 << (64 - n)) - 1)


@dataclass(frozen=True)
class Truncation:
    """Which tokens evaluation may sample. Training truncates nothing, because the trainer scores
    the whole softmax.

    top_k: that many of the likeliest, 0 for all. top_p: of those, the fewest likeliest with at
    least this total probability. min_p: of those, the ones at least this likely, relative to the
    likeliest.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __call__(self, logprobs: Tensor) -> Tensor:
        """logprobs (B, V) -> the same, -inf where a token must not be sampled."""
        if self.top_k:
            least = logprobs.topk(min(self.top_k, logprobs.shape[1])).values[:, -1:]
            logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
        if self.top_p < 1:
            # Stable: of equally likely tokens the lower ids stay, whatever the batch.
            p, order = logprobs.softmax(-1).sort(descending=True, stable=True)
            beyond = p.cumsum(-1) - p >= self.top_p  # likelier tokens have that mass already
            logprobs = logprobs.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
        if self.min_p:
            least = logprobs.amax(-1, keepdim=True) + math.log(self.min_p)
            logprobs = logprobs.masked_fill(logprobs < least, -torch.inf)
        return logprobs


def sample_token(
    logits: Tensor, temperature: float, u: Tensor, truncation: Truncation | None = None
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: logits (B, V) float32, u (B,) in [0, 1) -> tokens (B,) int64 and their
    log-probs (B,) float32.

    Log-probs are of softmax(logits / temperature) over the whole vocabulary, as the trainer scores
    them. Temperature 0 is greedy, with the log-probs of temperature 1.
    """
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, -1)
    if temperature > 0:
        kept = truncation(logprobs) if truncation else logprobs
        cdf = kept.exp().double().cumsum(-1)  # a float32 sum of 130k terms would move the edges
        # u times the total, because a truncated distribution does not sum to 1.
        tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)
        # With NaN the search ends past the vocabulary, and on a GPU an index out of range would
        # end the process before anybody could say why.
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
    else:
        tokens = logits.argmax(-1, keepdim=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
