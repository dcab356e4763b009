"""The algorithms side by side: `python diagnose.py --explain`.

Two tables: the advantage that GRPO, PPO and JustRL II give to the same tokens, of a made-up or a
stored group, and the weight that each objective gives to a token's gradient.
"""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import files
from algorithms import ALGORITHMS
from config import Config
from files import config_of, file_of, read_rows
from losses import OBJECTIVES, policy_loss, terminal_reward

# fmt: off
# A made-up group: tokens, reward, V(s_0) (the prompt's, so the same for all), V at the last token.
EXAMPLE = [
    (400, 1.0, 0.25, 0.85), (400, 0.0, 0.25, 0.05), (400, 0.0, 0.25, 0.85),
    (40, 0.0, 0.25, 0.05), (40, 0.0, 0.25, 0.85), (4, 0.0, 0.25, 0.05), (4, 0.0, 0.25, 0.85),
    (4000, 0.0, 0.25, 0.25),
]

# Label -> the row of ALGORITHMS whose objective and limits are shown, and changes to its settings.
WEIGHED = {
    "REINFORCE": ("rloo", {}), "clip": ("grpo", {}), "clip-higher": ("dapo", {}),
    "dual clip": ("grpo", {"dual_clip": 1.2}), "GSPO": ("gspo", {}), "CISPO": ("cispo", {}),
    "SAPO": ("sapo", {}), "GMPO": ("gmpo", {}), "trust mask": ("sao", {}),
}
RATIOS = (0.5, 1.0, 1.25, 1.5)  # pi / pi_old: below, at, and above both clip limits in use
# fmt: on


class ResponseGroup(NamedTuple):
    """The responses to one prompt, and the configuration of their run."""

    about: str
    raw: list[float]  # the verifier's rewards, for the critic
    rewards: list[float]  # with the overlong penalty, for the policy
    values: list[Tensor]  # V(s_t) of each response, (L,) float32
    config: dict


def example_group() -> ResponseGroup:
    """EXAMPLE as a group, with V on a straight line from the first to the last token."""
    tokens, rewards, first, last = zip(*EXAMPLE, strict=True)
    values = [torch.linspace(a, b, n) for n, a, b in zip(tokens, first, last, strict=True)]
    about = "Eight responses to one prompt, made up; V runs straight from first to last token."
    return ResponseGroup(about, rewards, rewards, values, {})


def stored_rows(run: Path, step: int, size: int) -> list[dict]:
    """Rows of the first complete kept group of `step` whose raw rewards differ; `size` is that of
    a group. ValueError if there is none.
    """
    groups = []
    for row in read_rows(file_of(run, "rollouts.jsonl")):
        if row["step"] == step and row["kept"]:
            # A new group at sample 0, not at another problem: where an epoch ends, a step may hold
            # the same problem twice.
            if row["sample_index"] == 0 or not groups:
                groups.append([])
            groups[-1].append(row)
    for group in groups:
        if len(group) == size and len({row["reward"] for row in group}) > 1:
            return group
    raise ValueError(
        f"rollouts.jsonl of {run} has no whole kept group of {size} with different rewards in step "
        f"{step}; choose another step, or train with --log-samples -1."
    )


@torch.no_grad()
def critic_values(checkpoint: Path, rows: list[dict]) -> list[Tensor]:
    """V (L,) of each stored response under the critic of a checkpoint."""
    # Here, since a run whose values were logged needs no model, nor critic.py.
    from critic import Critic, values
    from data import Problem, Rollout, pack
    from problems import load_tokenizer

    critic = Critic.from_pretrained(checkpoint / "critic")
    tokenizer = load_tokenizer(checkpoint / "policy")
    result = []
    for row in rows:
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        problem = Problem(row["problem_id"], 0, row["prompt"], ids, "")
        response = Rollout(problem, 0, row["sample_index"], 0, row["response_ids"])
        result.append(values(critic, pack([response], [0]))[0])
    return result


def stored_group(run: Path, step: int) -> ResponseGroup:
    """A group of rollouts.jsonl, with V as it was logged, else of the newest critic saved at or
    before `step`.
    """
    config = config_of(run)
    rows = stored_rows(run, step, config["group_size"])
    saved = [c for c in files.checkpoints(run) if (c / "critic").is_dir()]
    newest = max((p for p in saved if int(p.name.removeprefix("step_")) <= step), default=None)
    if all("values" in row for row in rows):
        values = [torch.tensor(row["values"]) for row in rows]
        source = "as logged, before the critic's update"
    elif newest:
        values = critic_values(newest, rows)
        source = f"critic of {newest.name}, as saved after that step"
    else:
        bias = config["critic_value_bias_init"]
        values = [torch.full((len(row["response_ids"]),), bias) for row in rows]
        source = f"critic_value_bias_init, since no critic was saved up to step {step}"
    about = f"Step {step} of {run}, problem {rows[0]['problem_id']}.\nV: {source}."
    rewards = [row["reward"] + row["overlong_penalty"] for row in rows]
    return ResponseGroup(about, [row["reward"] for row in rows], rewards, values, config)


def advantages(group: ResponseGroup, name: str) -> tuple[Tensor, dict]:
    """(N, T) advantages of a row of ALGORITHMS, not whitened, and the settings behind them."""
    # A column shows the run's own settings where the run used that row, else the row's defaults.
    own = group.config if group.config.get("algorithm") == name else {}
    settings = vars(Config()) | ALGORITHMS[name].defaults
    settings |= {k: v for k, v in own.items() if v is not None}
    mask = pad_sequence([torch.ones(len(v), dtype=torch.bool) for v in group.values], True)
    result, _ = ALGORITHMS[name].advantages(
        SimpleNamespace(**settings),
        values=pad_sequence(group.values, True),
        mask=mask,
        token_rewards=terminal_reward(torch.tensor(group.rewards), mask),
        raw_token_rewards=terminal_reward(torch.tensor(group.raw), mask),
        group_ids=torch.zeros(len(mask), dtype=torch.long),
    )
    return result, settings


def cells(numbers, width: int = 7) -> str:
    """Numbers in columns of `width`."""
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return "".join(f"{round(float(x), 3) + 0.0:{width}.3f}" for x in numbers)


def advantage_table(group: ResponseGroup) -> str:
    """One line per response: V and advantages at its first, middle and last token."""
    grpo, by_group = advantages(group, "grpo")
    ppo, fixed = advantages(group, "ppo")
    justrl2, adaptive = advantages(group, "justrl2")
    at = "  first    mid   last"
    over_std = " / std" if by_group["std_normalize"] else ""
    decay, k = fixed["gae_lambda"], adaptive["gae_lambda_k"]
    lines = [
        group.about,
        "Advantage of the first, middle and last of its L tokens, before whitening (which PPO and",
        "JustRL II do next: mean 0 and variance 1 over the tokens of the batch).",
        f"  GRPO       (r - mean){over_std} of the group, the same for every token",
        f"  PPO        GAE, lambda = {decay:g}: what happens n tokens later counts {decay:g}^n",
        f"  JustRL II  GAE, lambda = {k:g}^(1/L): the outcome counts {k:g}^((L-1)/L) at token 1\n",
        f"{'':16} |{'V':^21} |{'GRPO':>7} |{'PPO':^21} |{'JustRL II':^21}",
        f" # reward      L |{at} |    all |{at} |{at}",
    ]
    for i, (reward, values) in enumerate(zip(group.rewards, group.values, strict=True)):
        shown = [0, (len(values) - 1) // 2, len(values) - 1]
        columns = values[shown], grpo[i, :1], ppo[i, shown], justrl2[i, shown]
        lines.append(f"{i + 1:2}{reward:7.3f}{len(values):7} |" + " |".join(map(cells, columns)))
    return "\n".join(lines)


def objective_limits(label: str) -> dict:
    """The settings that an objective reads: its keyword-only arguments."""
    name, changed = WEIGHED[label]
    row = ALGORITHMS[name]
    read = inspect.getfullargspec(OBJECTIVES[row.objective]).kwonlyargs
    return {k: v for k, v in (row.defaults | changed).items() if k in read and v is not None}


def gradient_weights(label: str, advantage: float) -> list[float]:
    """(-d loss / d log pi) / A at each of RATIOS, for responses of one token; REINFORCE has 1."""
    name, _ = WEIGHED[label]
    row = ALGORITHMS[name]
    logprobs = torch.tensor(RATIOS, dtype=torch.float64).log()[:, None].requires_grad_()
    old, ones = torch.zeros_like(logprobs), torch.ones_like(logprobs)
    how = dict(objective=row.objective, ratio_level=row.defaults["ratio_level"])
    how |= objective_limits(label) | dict(row_weights=ones[:, 0])
    policy_loss(logprobs, old, advantage * ones, ones.bool(), **how)[0].backward()
    return (-logprobs.grad[:, 0] / advantage).tolist()


def weight_table() -> str:
    """One line per objective: its gradient weights for A = +1 and A = -1."""
    at = "".join(f"{ratio:6g}" for ratio in RATIOS)
    lines = [
        "Weight of A grad log pi(token) in the gradient of each objective, at ratio pi / pi_old,",
        "by autograd (GSPO and GMPO: when all tokens of the response have that ratio).\n",
        f"{'':45} |{'A = +1':^24} |{'A = -1':^24}",
        f"{'objective':12}{'row':6}{'limits':27} |{at} |{at}",
    ]
    for label, (name, _) in WEIGHED.items():
        limits = ", ".join(f"{k} {v:g}" for k, v in objective_limits(label).items())
        limits = re.sub("clip_|_clip|sapo_", "", limits)
        columns = (cells(gradient_weights(label, a), 6) for a in (1.0, -1.0))
        lines.append(f"{label:12}{name:6}{limits:27} |" + " |".join(columns))
    return "\n".join(lines)
