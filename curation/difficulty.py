"""Stage 3 of curate.py, difficulty: a problem whose responses are all right or all wrong gives no
advantage, so the policy learns nothing from it.
"""

import random
from collections.abc import Sequence

from curation.rows import Drop, RawProblem
from curation.solving import share_right
from run.scores import Vote


def find_unlearnable(
    rows: Sequence[RawProblem],
    left: Sequence[int],
    votes: dict[int, list[Vote]],
    *,
    samples: int,
    min_pass_rate: float,
    max_pass_rate: float,
    unsolved_share: float,
    seed: int,
) -> dict[int, Drop]:
    """Rows of `left` that the target solves too often or too rarely, apart from a share of the hard
    ones. votes: of the target, from `samples` responses to each row. Notes the pass rate on every
    row.
    """
    dropped, hard = {}, []
    for i in left:
        notes = rows[i].notes
        rate = notes["pass_rate"] = share_right(votes[i], samples)
        if rate >= max_pass_rate:
            dropped[i] = Drop("too_easy", f"pass rate {rate:g}")
        elif rate <= min_pass_rate:
            dropped[i] = Drop("too_hard", f"pass rate {rate:g}")
            # Never solved may also mean a wrong label, unless the audit has reached it.
            if notes.get("label_audit") == "confirmed":
                hard.append(i)
    # Some stay, for when the policy is better. Of the output: room / (in_band + room) = share.
    in_band = len(left) - len(dropped)
    room = int(in_band * unsolved_share / (1 - unsolved_share) + 1e-9)  # 1e-9: 3.9999... is 4
    random.Random(seed).shuffle(hard)
    for i in hard[:room]:
        del dropped[i]
    for i in hard[room:]:
        dropped[i] = dropped[i]._replace(reason="hard_surplus")
    return dropped
