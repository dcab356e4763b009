"""Held-out accuracy during a run."""

import time

import distributed
import rollout
from distributed import print0
from run import metrics
from run.state import Run, State
from sampler.sampling import Truncation


def evaluation_is_due(run: Run, state: State) -> bool:
    """Before the first step, every --eval-every steps, and after the last."""
    config, step = run.config, state.step
    regular = config.eval_every and step % config.eval_every == 0
    return bool(run.eval_problems and (regular or step in (0, config.steps)))


def evaluate(run: Run, state: State) -> dict[str, float]:
    """Held-out accuracy at the training temperature, within --eval-top-p: the verifier's mean score
    over all samples of all problems, whatever --reward trains on. Empty if SIGTERM cut it short.
    """
    config, start = run.config, time.perf_counter()
    groups = rollout.evaluate(
        state.sampler,
        run.grader,
        run.eval_problems,
        samples=config.eval_samples,
        max_new_tokens=config.max_response_tokens,
        temperature=config.temperature,
        think=config.think,
        seed=config.seed,  # the same random numbers each time: changes are of the weights
        truncation=Truncation(config.eval_top_p),
    )
    # A signal may reach one rank after its last token: all drop this evaluation, or none.
    if distributed.any_rank(state.sampler.interrupted):
        return {}
    return metrics.evaluation_metrics(groups) | {"eval/seconds": time.perf_counter() - start}


def evaluate_if_missing(run: Run, state: State) -> None:
    """The evaluation still missing: the first, or one that SIGTERM cut short."""
    file = run.folder / "metrics.jsonl"
    # Every rank reads the file, so that all evaluate or none: sampling contains collectives.
    made = "eval/accuracy" in metrics.row_of_step(file, state.step)
    if made or not evaluation_is_due(run, state):
        return
    found = evaluate(run, state)
    if found and distributed.rank() == 0:
        when = f"step {state.step}" if state.step else "start"
        print0(f"{when}: held-out accuracy {found['eval/accuracy']:.3f}")
        metrics.amend(file, state.step, found)
        run.report(state.step, found)
