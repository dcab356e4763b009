"""Alarms: the ways a run can be dead while its logs look alive, each with what to do."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from config import Config
from run.metrics import warn
from run.state import State
from verify import UNDECIDED

ALARMS = "no_box no_signal verifier truncated dead_critic mismatch entropy".split()


def alarms(
    state: State, config: Config, metrics: dict[str, float], undecided: Sequence[float]
) -> dict[str, float]:
    """Print a warning for each way a run can be dead while its logs look alive, and return 0 or 1
    for each as a metric. undecided: rollout/undecided_share of the steps before.
    """
    m = defaultdict(lambda: math.nan, metrics)  # a comparison with NaN raises no alarm
    found = dict.fromkeys(ALARMS, "")
    if m["rollout/verdict_no_box"] > 0.5:
        found["no_box"] = (
            f"{m['rollout/verdict_no_box']:.0%} of the responses put nothing in \\boxed{{}}, which "
            "counts as wrong. Ask for a box in the prompt (--prompt-suffix), or raise "
            "--max-response-tokens if they are cut off before."
        )
    if state.empty_steps:
        found["no_signal"] = (
            f"no group kept of {m['rollout/groups_finished']} sampled, {state.empty_steps} steps "
            f"in a row: every group was all right ({m['rollout/all_right_share']:.0%}) or all "
            f"wrong ({m['rollout/all_wrong_share']:.0%}), so nothing was trained. Use problems of "
            "another difficulty, a larger --group-size or more --max-refills."
        )
    found["verifier"] = verifier_alarm(m, config.group_size, undecided)
    if m["rollout/truncated_share"] == 1:
        found["truncated"] = (
            "every response (100%) was cut off; raise --max-response-tokens or check the model's "
            "stop ids."
        )
    # A head of weight 0 that never moved, or a V that is the same everywhere.
    stuck = m["critic/v_std"] < 1e-6 or m["critic/head_movement"] == 0
    if m["critic/updates"] > 1 and stuck:
        found["dead_critic"] = (
            f"the critic is dead: V spreads by {m['critic/v_std']:.1e} around "
            f"{m['critic/v_mean']:.4f} after {m['critic/updates']} updates, and this step moved "
            f"its head by {m['critic/head_movement']:.1e}. Check --critic-lr ({config.critic_lr})."
        )
    if m["policy/mismatch_abs"] > 0.05:
        found["mismatch"] = mismatch_alarm(m["policy/mismatch_abs"], config)
    of_start = m["policy/entropy"] / (state.start_entropy or math.nan)
    if of_start < 0.05:
        found["entropy"] = (
            f"the entropy fell to {m['policy/entropy']:.4f} nats a token, {of_start:.1%} of its "
            "start: all responses are becoming alike. Go back to an earlier checkpoint with a "
            "lower --lr, a larger --clip-high or an --entropy-coef."
        )
    for sentence in filter(None, found.values()):
        warn(state.step, sentence)
    return {f"alarm/{name}": float(bool(sentence)) for name, sentence in found.items()}


def verifier_alarm(metrics: dict[str, float], group_size: int, earlier: Sequence[float]) -> str:
    """A sentence if the verifier's workers gave up, or left many responses undecided, or more than
    earlier in the run; else "".

    More: above the mean of at least five earlier steps by 2 points and three standard errors.
    """
    given_up = sum(metrics.get(f"rollout/verdict_{reason}", 0.0) for reason in ("timeout", "died"))
    if given_up > 0.01:
        return (
            f"the verifier gave up on {given_up:.0%} of the responses, which counts as wrong. "
            "Raise --verifier-timeout-s, and look at `reason` in rollouts.jsonl."
        )
    # A policy that learns to write what cannot be read shows as a rising share, not a high one.
    share = metrics["rollout/undecided_share"]
    responses = max(metrics["rollout/groups_finished"] * group_size, 1)
    earlier = [x for x in earlier if math.isfinite(x)]
    usual = statistics.mean(earlier) if len(earlier) >= 5 else 1.0
    # Three standard errors of a binomial share: a small step alone scatters that much.
    risen = share > usual + 0.02 + 3 * math.sqrt(usual * (1 - usual) / responses)
    if not risen and not share > 0.2:
        return ""
    before = f", up from {usual:.1%} on average before" if risen else ""
    return (
        f"the verifier could not decide {share:.1%} of the responses ({', '.join(UNDECIDED)})"
        f"{before}; they count as wrong. Sort rollouts.jsonl by `reason`, and explain one by "
        "`python verify.py RESPONSE LABEL`: either the labels cannot be read (--audit) or the "
        "policy has learnt to write what cannot be graded."
    )


def mismatch_alarm(nats: float, config: Config) -> str:
    """A sentence on the mismatch of sampler and trainer, with its possible causes in this run."""
    older = {
        "--async-steps (a lower --lr moves them less)": config.async_steps,
        "--partial-rollout (--max-staleness bounds their age)": config.partial_rollout,
    }
    flags = " and ".join(flag for flag, on in older.items() if on)
    cause = f"Older weights sample under {flags}, which is the usual cause; " if flags else ""
    return (
        f"sampler and trainer disagree by {nats:.3f} nats a token; importance weights (--is-mode "
        f"icepop) bound the harm. {cause}--dtype float32 shows whether precision is the cause."
    )
