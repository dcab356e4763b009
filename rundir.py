"""A run directory: its place, its rows, and the texts of single tokens."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import jsonl


@contextmanager
def writing(flag: str, path: str | Path) -> Iterator[None]:
    """Around the first use of a `path` that a flag names: ValueError if it cannot be written."""
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


def part_of(path: str, part: str) -> str:
    """`policy` or `critic` of a checkpoint, or of the newest checkpoint of a run; another path as
    it is.
    """
    newest = max((Path(path) / "checkpoints").glob("step_??????"), default=Path(path))
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
    lines = jsonl.read(file) if file.exists() else ()
    bar = tqdm(lines, f"reading {file.name}", unit="row", leave=False, delay=2, disable=None)
    return (row for _, row in bar)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of each token, joining to the text of all. A character spread over several tokens stands
    at the last of them, and the others are empty.
    """
    texts, start, read = [], 0, 0  # ids[start:read] is context: a token may lose its space alone
    decode = lambda part: tokenizer.decode(part, skip_special_tokens=False)
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:read]), decode(ids[start:end])
        whole = end == len(ids) or not now.endswith("\ufffd")
        texts.append(now[len(before) :] if whole else "")
        if whole:
            start, read = read, end
    return texts
