"""The embedded task, for figures: the right response to a problem, and where another leaves it."""

import re
from os.path import commonprefix

# Prompts and tokens of the embedded task, as assets/make_assets.py writes them.
CHAIN = re.compile(r"\n(\d)((?: [a-z]:[+-]\d)+)<\|im_end\|>")
PIECES = re.compile(r"<\|\w+\|>|</?think>|\\boxed\{| [a-z]:|[+-]\d|[\s\S]")


def right_response(prompt: str) -> str | None:
    """The one right response to a problem of the embedded task; None for any other prompt."""
    chain = CHAIN.search(prompt)
    if chain is None:
        return None
    value, working = int(chain[1]), ""
    for label, operation in re.findall(r"( [a-z]:)([+-]\d)", chain[2]):
        result = (value + int(operation)) % 10
        working += f"{label}{value}{operation}={result}"
        value = result
    return f"<think>{working}</think>\\boxed{{{value}}}"


def first_wrong_token(row: dict) -> int | None:
    """Index of the first token of a stored response that leaves the right working.

    None if there is none, if the prompt is not of the embedded task, or if the tokens are not its.
    """
    right, response = right_response(row["prompt"]), row["response"]
    stopped = row["finish_reason"] == "stop"
    pieces = PIECES.findall(response) + ["<stop>"] * stopped
    if right is None or response == right or len(pieces) != row["response_length"]:
        return None
    left = len(commonprefix([response, right]))
    for index, piece in enumerate(pieces):
        left -= len(piece)
        if left < 0:
            return index
    return None
