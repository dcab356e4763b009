"""The embedded task: the right response to a problem, and where another response goes wrong.

Its problems have one right working each, so the token at which a response goes wrong is known. The
value of a critic should fall there, which the figures show.
"""

import re
from os.path import commonprefix

# As assets/make_assets.py writes them: the digit and the labelled operations of a prompt (` a:+4`),
# and the tokens of a response.
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
    """Index of the first token of a stored response that differs from the right working.

    None if no token does, or if prompt or tokens are not those of the embedded task.
    """
    right, response = right_response(row["prompt"]), row["response"]
    # The stop token has no text in the response, but is a token, and a wrong one if it comes early.
    stopped = row["finish_reason"] == "stop"
    pieces = PIECES.findall(response) + ["<stop>"] * stopped
    if right is None or response == right or len(pieces) != row["response_length"]:
        return None
    still_right = len(commonprefix([response, right]))  # characters
    for index, piece in enumerate(pieces):
        still_right -= len(piece)
        if still_right < 0:
            return index
    return None
