"""Reading files of JSON lines: one object a line, with its place for messages about it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("FILE:LINE", object) for every line that is not empty.

    Raises FileNotFoundError for what is no file, ValueError with the place for a line that is not
    a JSON object in UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is a directory, not a file."
            if Path(path).is_dir()
            else f"{path} does not exist."
        )
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield (where := f"{path}:{number}"), parse(line, where)


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line; ValueError with its place `where` if it is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:  # str(error) would count lines and columns within this line
        raise ValueError(f"{where} is not JSON ({getattr(error, 'msg', error)}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object {{...}}.")
    return row
