"""Budget forcing (s1, 2501.19393): a thought that the token budget cut off is closed, and the model
is asked for its answer.

Without it, a response that was still thinking counts as wrong, whatever it had found.
"""

from collections.abc import Sequence

import distributed
from data import Rollout
from rewards import Verifier
from rollout import Sampler, sample_groups
from sampler.sampling import Truncation

# Ends the thought and opens the box: whatever follows is an answer. Needs no word of any language.
CLOSING = "\n</think>\n\\boxed{"


def force_answers(
    groups: Sequence[list[Rollout]],
    sampler: Sampler,
    grader: Verifier,
    *,
    max_response_tokens: int,
    answer_tokens: int,
    temperature: float,
    think: str,
    truncation: Truncation,
) -> list[list[Rollout]]:
    """Close the thoughts that `max_response_tokens` cut off with CLOSING, and sample up to
    `answer_tokens` more. Returns the groups of all ranks, graded again, in order.
    """
    closing = sampler.tokenizer(CLOSING, add_special_tokens=False)["input_ids"]
    mine = groups[distributed.rank() :: distributed.world_size()]
    for group in mine:
        for r in group:
            if r.finish_reason == "length" and is_thinking(r):
                append_forced(r, closing, sampler.weight_version)
    sample_groups(
        sampler,
        grader,
        mine,
        max_new_tokens=max_response_tokens + len(closing) + answer_tokens,
        temperature=temperature,
        think=think,
        truncation=truncation,
    )
    return sorted(distributed.gather(mine), key=lambda group: group[0].group)


def is_thinking(r: Rollout) -> bool:
    """Whether the last thinking tag is an opening one; the chat template may have written it."""
    text = r.problem.prompt + r.text
    return text.rfind("<think>") > text.rfind("</think>")


def append_forced(r: Rollout, ids: list[int], weight_version: int) -> None:
    """Append tokens that were not sampled, and mark the response as unfinished."""
    r.response_ids += ids
    r.rollout_logprobs += [0.0] * len(ids)  # log 1: they were certain
    r.weight_versions += [weight_version] * len(ids)
    r.finish_reason = "abort"
