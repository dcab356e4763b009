"""What curate.py has sampled so far, on disk: a killed run goes on, and other thresholds need no
new samples.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import distributed
import files
from config import ConfigError
from distributed import progress_bar


class StateFile:
    """Results by stage and row, in a JSONL file.

    The first line holds the settings that the results depend on, every further one a chunk of work,
    {stage: {row: result}}: a kill loses at most the chunk in progress.
    """

    def __init__(self, file: Path, settings: dict[str, Any], chunk: int):
        """Read what is there, or start a file. chunk: rows between two writes. ConfigError if the
        file holds results of other settings.
        """
        self.file, self.chunk = file, chunk
        self.results: dict[str, dict[int, Any]] = defaultdict(dict)
        if distributed.rank() == 0 and file.exists():
            # A line that a kill cut off has no end, and the next one would be appended to it.
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        distributed.barrier()
        stored = [line for _, line in files.read_jsonl(file)] if file.exists() else []
        distributed.barrier()  # every rank has read before one writes
        if not stored:
            self._append(settings)
            return
        changed = [name for name in settings if settings[name] != stored[0].get(name)]
        if changed:
            raise ConfigError(
                f"{file} holds the samples of a run with other {', '.join(changed)}; delete it to "
                "start again, or choose another --output."
            )
        for line in stored[1:]:
            for stage, results in line.items():
                self.results[stage] |= {int(row): result for row, result in results.items()}

    def _append(self, line: dict) -> None:
        if distributed.rank() == 0:
            files.append_jsonl(self.file, [line])

    def missing(self, stage: str, left: Sequence[int]) -> Iterable[list[int]]:
        """The rows of `left` without a result, in the chunks of a run that is never killed; with a
        progress bar.
        """
        todo = [row for row in left if row not in self.results[stage]]
        chunks = [todo[start : start + self.chunk] for start in range(0, len(todo), self.chunk)]
        done = (len(left) - len(todo)) // self.chunk
        return progress_bar(chunks, stage, unit="chunk", initial=done, total=done + len(chunks))

    def add(self, stage: str, results: dict[int, Any]) -> None:
        """Store a chunk of results."""
        # Those of rank 0 for all ranks. A grader that times out on one of them would else make the
        # ranks keep different rows, and they would wait for each other forever.
        (results,) = distributed.gather([results] if distributed.rank() == 0 else [])
        self._append({stage: results})
        self.results[stage] |= results
