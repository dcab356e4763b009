"""train.py on the long task with a critic that knows: `python -m experiments.long_oracle FLAG...`.

In the long task (make_long_assets.py) the digit after a step depends on the step, on the digit
before it and, for a model, on whether there was a slip so far. Ten forwards give the policy's
probabilities of each. So the chance that a response of the present policy ends in the right digit
can be computed before each of its tokens. Here that chance is V, and the critic is never trained:
a bound on what a critic could bring.
"""

import re

import torch
from torch import Tensor

import train
from assets.make_assets import chat_prompt
from experiments.make_long_assets import BASE, LONGEST, RESULTS, write_prompt, write_response
from model import packed_attention, segment_positions
from run.state import Run, State

MOST_STEPS = 40  # longer chains do not fit into 128 tokens


@torch.no_grad()
def transitions(policy, tokenizer) -> Tensor:
    """(45, 2, 5, 5) float64: P(digit after a step | step, doubt, digit before it) of the policy.

    Read off the right chains of 44 steps from each of the five digits, which together pass every
    pair (step, digit) once. Each chain is read twice: with a mark of doubt after every step, and
    after none.
    """
    digits = tokenizer.convert_tokens_to_ids([str(d) for d in range(BASE)])
    table = torch.zeros(LONGEST + 1, 2, BASE, BASE, dtype=torch.float64)
    for start in range(BASE):
        problem = start, LONGEST, 1
        prompt = tokenizer(chat_prompt(tokenizer, write_prompt(*problem)))["input_ids"]
        for doubt, mark in enumerate(".?"):
            response = write_response(*problem).replace(".", mark)
            ids = torch.tensor(prompt + tokenizer(response)["input_ids"])
            bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
            attend = packed_attention(bounds, len(ids))
            hidden = policy.model(ids, segment_positions(bounds, len(ids)), attend)
            # Over the whole vocabulary: what the digits leave over breaks the format, worth 0
            chances = policy.logits(hidden).softmax(-1)[:, digits].double()
            # The logits at a step's own token are those of its digit
            # <think>, then three tokens a step: step, digit, mark
            digit, at = start, len(prompt) + 1
            for step in range(LONGEST, 0, -1):
                table[step, doubt, digit] = chances[at]
                digit, at = RESULTS[step, digit], at + 3
    return table


def chances_to_end_right(table: Tensor, last: int, label: int) -> Tensor:
    """(45, 2, 5) float64: P(the chain down to step `last` ends in `label` | doubt, digit) before
    each step; row last - 1 is the end.
    """
    chances = torch.zeros(LONGEST + 1, 2, BASE, dtype=torch.float64)
    chances[last - 1, :, label] = 1
    for step in range(last, LONGEST + 1):
        sure, unsure = chances[step - 1]
        for digit in range(BASE):
            after = unsure.clone()  # a slip leaves doubt, and doubt stays
            after[RESULTS[step, digit]] = sure[RESULTS[step, digit]]
            chances[step, 0, digit] = table[step, 0, digit] @ after
            chances[step, 1, digit] = table[step, 1, digit] @ unsure
    return chances


def values_of(prompt: str, label: str, tokens: list[str], table: Tensor) -> list[float]:
    """V before each token of a response; 0 once it has left the format of the working."""
    digit, first, last = map(int, re.search(r"(\d) (\d+): (\d+):", prompt).groups())
    if first - last >= MOST_STEPS:
        return [0.0] * len(tokens)
    chances = chances_to_end_right(table, last, int(label))
    form = [["<think>"]]
    for step in range(first, last - 1, -1):
        form += [[f" {step}:"], [*"01234"], [*".?"]]
    form += [["</think>"], ["\\boxed{"], [label], ["}"], ["<|im_end|>"]]
    step, doubt, values = first, 0, [float(chances[first, 0, digit])]
    for token, allowed in zip(tokens, form, strict=False):
        if token not in allowed:
            values.append(0.0)
            break
        # Only a digit has five alternatives
        if len(allowed) == BASE:
            doubt |= int(token) != RESULTS[step, digit]
            digit, step = int(token), step - 1
        values.append(float(chances[step, doubt, digit]))
    # One value is left over after the last token, or some are missing after a broken format
    return (values + values[-1:] * len(tokens))[: len(tokens)]


def score_oracle(policy, tokenizer, batch) -> Tensor:
    """What train.score_critic returns: V (N, T) float32."""
    table, values = transitions(policy, tokenizer), torch.zeros_like(batch.rollout_logprobs)
    for row, r in zip(values, batch.rollouts, strict=True):
        tokens = tokenizer.convert_ids_to_tokens(r.response_ids)
        row[: len(tokens)] = torch.tensor(
            values_of(r.problem.prompt, r.problem.label, tokens, table)
        )
    return values


def main() -> None:
    """train.main with V computed, and no critic to update."""
    # train.py looks these names up at every call, so replacing them in its module is enough
    step = train.train_step

    def step_with_oracle(run: Run, state: State) -> dict[str, float] | None:
        tokenizer = state.sampler.tokenizer
        train.score_critic = lambda _, batch, __: score_oracle(state.policy, tokenizer, batch)
        return step(run, state)

    train.train_step, train.update_critic = step_with_oracle, lambda *_: {}
    train.main()


if __name__ == "__main__":
    main()
