"""Stage 2 of curate.py, the label audit: labels that independent solutions contradict."""

from collections.abc import Sequence

from curation.rows import Drop, RawProblem
from curation.solving import share_right
from distributed import progress_bar
from run.scores import Vote
from verify import Verifier


def find_doubtful(
    rows: Sequence[RawProblem],
    left: Sequence[int],
    by_model: Sequence[dict[int, list[Vote]]],
    grader: Verifier,
    *,
    samples: int,
    majority: float,
    keep_hard: float,
) -> dict[int, Drop]:
    """Rows of `left` whose label all audit models contradict with one voice. by_model: the votes of
    each model by row. Notes the verdict and the pass rate on every row.
    """
    dropped = {}
    for i in progress_bar(left, "verdicts"):
        votes = [of_model[i] for of_model in by_model]
        verdict = judge_label(votes, grader, samples, majority, keep_hard)
        rate = mean_share_right(votes, samples)
        rows[i].notes |= {"label_audit": verdict, "audit_pass_rate": rate}
        if verdict == "doubtful":
            answer = votes[0][0].answer
            dropped[i] = Drop("doubtful_label", f"the audit's answer is {answer}")
    return dropped


def judge_label(
    by_model: Sequence[Sequence[Vote]],
    grader: Verifier,
    samples: int,
    majority: float,
    keep_hard: float,
) -> str:
    """What the solutions of the audit models, `samples` each, say of a label.

    confirmed   every model has a majority, and it is the label
    doubtful    every model has a majority, all the same, and it is not the label
    disputed    doubtful, but a share `keep_hard` of all solutions have the label: rather a hard
                problem with a tempting wrong answer than a wrong label
    undecided   a model has no majority, or the models differ

    A majority is a share `majority` of a model's solutions, those without an answer included.
    """
    for votes in by_model:
        if not votes or votes[0].count / samples < majority:
            return "undecided"
    first = [votes[0] for votes in by_model]
    if all(vote.right for vote in first):
        return "confirmed"
    if any(vote.right for vote in first):
        return "undecided"
    if not all(grader.equal(vote.answer, first[0].answer) for vote in first[1:]):
        return "undecided"
    return "disputed" if mean_share_right(by_model, samples) >= keep_hard else "doubtful"


def mean_share_right(by_model: Sequence[Sequence[Vote]], samples: int) -> float:
    """Share of all solutions that equal the label."""
    return sum(share_right(votes, samples) for votes in by_model) / len(by_model)
