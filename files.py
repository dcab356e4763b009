"""Files of JSON lines, and what a run directory holds.

JSON lines are read with the place of each line, for messages about it, and written so that a kill
at any moment leaves whole lines.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
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
                yield (where := f"{path}:{number}"), parse_line(line, where)


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line; ValueError with its place `where` if it is none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except ValueError as error:  # str(error) would count lines and columns within this line
        raise ValueError(f"{where} is not JSON ({getattr(error, 'msg', error)}).") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object {{...}}.")
    return row


def append_jsonl(file: Path, rows: Iterable[dict], default: Callable | None = None) -> None:
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


def write_jsonl(file: Path, rows: Iterable[dict], default: Callable | None = None) -> None:
    """Write a whole file as `append_jsonl` does. Renamed into place, so that a kill leaves the
    old file or the new one.
    """
    scratch = file.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    append_jsonl(scratch, rows, default)
    scratch.replace(file)


def without_nan(value: Any) -> Any:
    """A JSON value with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: without_nan(x) for key, x in value.items()}
    if isinstance(value, list):
        return [without_nan(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- a run directory


@contextmanager
def writing(flag: str, path: str | Path) -> Iterator[None]:
    """Wrap the first use of a `path` that a flag names: ValueError if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}.") from error


def file_of(run: Path, name: str) -> Path:
    """run/name; FileNotFoundError when the directory holds no run."""
    if not (run / name).is_file():
        raise FileNotFoundError(f"{run} holds no {name}; give the directory that train.py printed.")
    return run / name


def config_of(run: Path) -> dict[str, Any]:
    """The fields of a run; ValueError naming the file if it is damaged."""
    file = file_of(run, "config.json")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); put back a good copy.") from error


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; one being written has another name."""
    return sorted((run / "checkpoints").glob("step_??????"))


def part_of(path: str, part: str) -> str:
    """`policy` or `critic` of a checkpoint, or of the newest checkpoint of a run; another path as
    it is.
    """
    newest = max(checkpoints(Path(path)), default=Path(path))
    return str(newest / part) if (newest / part).is_dir() else path


def settings_of(path: str) -> dict[str, Any]:
    """The fields of the run that `path` is, or is a checkpoint or a policy of; {} for any other."""
    whole = Path(path).resolve()
    places = (whole, *whole.parents[1:3]) if whole.exists() else ()
    for folder in places:  # RUN, or of RUN/checkpoints/step_N, or of .../policy
        if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
            return config_of(folder)
    return {}


def read_rows(file: Path) -> Iterator[dict]:
    """Rows of a JSONL file, one at a time; none if the run has no such file. ValueError for a line
    that was cut off.
    """
    lines = read_jsonl(file) if file.exists() else ()
    bar = tqdm(lines, f"reading {file.name}", unit="row", leave=False, delay=2, disable=None)
    return (row for _, row in bar)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token; joined, they are the text of all. A character spread over several tokens
    belongs to the last of them, and the others are empty.
    """

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=False)

    # ids[start:read] is context: decoded without it, a token may lose its leading space.
    texts, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:read]), decode(ids[start:end])
        # U+FFFD: the bytes so far do not make a character.
        whole = end == len(ids) or not now.endswith("\ufffd")
        texts.append(now[len(before) :] if whole else "")
        if whole:
            start, read = read, end
    return texts
