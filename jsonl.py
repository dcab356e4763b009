"""Files of JSON lines, one object a line: reading, with the place of each for messages about it,
and writing, which a kill does no harm.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
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


def append(file: Path, rows: Iterable[dict], default: Callable | None = None) -> None:
    """Append rows, on the disk when this returns: no checkpoint may be older than its rows. A NaN,
    which JSON does not have, becomes null; default: what writes other values, as in json.dumps.
    """
    try:
        with open(file, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(without_nan(row), default=default) + "\n" for row in rows)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        error.filename = str(file)  # a full disk does not say of which file
        raise


def write(file: Path, rows: Iterable[dict], default: Callable | None = None) -> None:
    """Write a whole file, as `append` does. Renamed into place: a kill leaves the old one or the
    new one.
    """
    scratch = file.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    append(scratch, rows, default)
    scratch.replace(file)


def without_nan(value: Any) -> Any:
    """A JSON value with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
