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
    """Rows of `left` whose label all audit models contradict unanimously. by_model: the votes of
    each model by row. Notes the verdict and the pass rate on every row.
    """
    dropped = {}
    for i in progress_bar(left, "verdicts"):
        votes = [of_model[i] for of_model in by_model]
        verdict = judge_label(votes, grader, samples, majority, keep_hard)
        rate = mean_share_right(votes, samples)
        rows[i].notes |= {"label_audit": verdict, "audit_pass_rate": rate}
        if verdict == "doubtful":
            # Any model's will do: a doubtful label has one answer against it.
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
    disputed    doubtful, but a share `keep_hard` of all solutions have the label: more likely a
                hard problem with a tempting wrong answer than a wrong label
    undecided   a model has no majority, or the models differ

    A majority is a share `majority` of a model's solutions, those without an answer included.
    """
    for votes in by_model:
        # Of all solutions: one vote among many that gave no answer is not a majority.
        if not votes or votes[0].count / samples < majority:
            return "undecided"
    first = [votes[0] for votes in by_model]
    if all(vote.right for vote in first):
        return "confirmed"
    # Not all are right here, so the models differ.
    if any(vote.right for vote in first):
        return "undecided"
    # By value: one model may write 0.5 and another 1/2.
    if not all(grader.equal(vote.answer, first[0].answer) for vote in first[1:]):
        return "undecided"
    # Independent solutions rarely reach a wrong label so often by chance.
    return "disputed" if mean_share_right(by_model, samples) >= keep_hard else "doubtful"


def mean_share_right(by_model: Sequence[Sequence[Vote]], samples: int) -> float:
    """Share of all solutions that equal the label."""
    return sum(share_right(votes, samples) for votes in by_model) / len(by_model)
