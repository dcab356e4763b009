"""What a stage of curate.py dropped and why: counts and examples, for the report and to print."""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from curation.rows import DROP_REASONS, Drop, RawProblem

EXAMPLES = 3  # of each reason


def summarise(
    rows: Sequence[RawProblem], left: Sequence[int], dropped: dict[int, Drop], noted: str
) -> dict[str, Any]:
    """Counts and examples of what a stage dropped of the rows `left` before it. noted: a field that
    it noted on the rows, whose values are counted; "" for none.
    """
    by_reason: dict[str, list[int]] = defaultdict(list)
    for i in sorted(dropped):
        by_reason[dropped[i].reason].append(i)
    notes = [rows[i].notes for i in left]
    counts = Counter(note[noted] for note in notes if noted in note)
    return {
        "rows": len(left),
        "left": len(left) - len(dropped),
        "dropped": {
            reason: {
                "rows": len(found),
                "why": DROP_REASONS[reason],
                "examples": [example(rows[i], dropped[i]) for i in found[:EXAMPLES]],
            }
            for reason, found in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        },
        "noted": {noted: dict(sorted(counts.items()))} if counts else {},
    }


def example(row: RawProblem, drop: Drop) -> dict[str, str]:
    """A dropped row, cut to what tells it."""
    return {
        "where": row.where,
        "prompt": row.text[:200],
        "label": row.label[:100],
        "detail": drop.detail,
    }


def table(name: str, summary: dict[str, Any]) -> str:
    """The summary of a stage, to print."""
    lines = [f"\n{name}: {summary['rows']} rows, {summary['left']} left"]
    for noted, counts in summary["noted"].items():
        lines.append(f"  {noted}: " + ", ".join(f"{k} {v}" for k, v in counts.items()))
    for reason, found in summary["dropped"].items():
        lines.append(f"{found['rows']:7} {reason:16} {found['why']}")
        for e in found["examples"]:
            prompt = textwrap.shorten(e["prompt"], 60, placeholder=" ...")
            lines.append(f"{'':10}{e['where']}: {prompt} | label {e['label']} | {e['detail']}")
    return "\n".join(lines)
