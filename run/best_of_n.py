"""A critic that picks among responses: the values that best-of-k of eval.py ranks them by."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import distributed
from config import refuse
from data import Rollout, pack, partition
from files import part_of


def load_critic(path: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The critic of a run, of a checkpoint or in a folder, with activations in `dtype`. ConfigError
    if there is none.
    """
    from critic import Critic  # here, so that everything else works without critic.py

    folder = part_of(path, "critic")
    try:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is not a directory")
        critic = Critic.from_pretrained(folder, dtype)
    except (OSError, ValueError) as error:
        why = str(error).rstrip(".")
        refuse(
            "critic",
            f"{path} is not a critic: {why}; give a run that has one, or the folder `critic` of a "
            "checkpoint",
        )
    return critic.to(device).requires_grad_(False)


@torch.no_grad()
def final_values(
    critic: nn.Module, groups: Sequence[Sequence[Rollout]], budget: int
) -> list[list[float]]:
    """V of each response in the state in which its last token was chosen, for groups of one size.
    Complete on every rank. budget: tokens per forward.
    """
    from critic import values

    rollouts = [r for group in groups for r in group]
    device = critic.value_head.weight.device
    finals = torch.zeros(len(rollouts), device=device)
    costs = [len(r.problem.prompt_ids) + len(r.response_ids) for r in rollouts]
    # Every rank fills in its own responses and leaves the others at 0, so the sum has all.
    for rows in partition(costs, budget, distributed.world_size())[distributed.rank()]:
        if rows:
            micro_batch = pack(rollouts, rows, device)
            last = micro_batch.mask.sum(1, keepdim=True) - 1
            values_of_rows = values(critic, micro_batch)
            finals[micro_batch.rows] = values_of_rows.gather(1, last).squeeze(1)
    return distributed.sum_(finals).view(len(groups), -1).tolist()
