"""The models at work on the responses of a step: minibatches, micro-batches shared out over ranks,
scores of every token, the loss of a micro-batch.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

import algorithms
import distributed
import losses
from config import Config
from data import Batch, MicroBatch, pack, partition
from model import Transformer

OBJECTIVE_OPTIONS = (
    "ratio_level clip_low clip_high dual_clip sapo_tau_pos sapo_tau_neg opsm_delta "
    "entropy_control kl_coef kl_estimator entropy_coef"
).split()


def minibatches(batch: Batch, config: Config, step: int, epochs: int) -> Iterator[list[int]]:
    """Rows of each optimizer step: every epoch deals all rows out anew, into minibatches of
    (almost) equal size.
    """
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step * 1_009 + epoch)
        rows = torch.randperm(len(batch.rollouts), generator=generator)
        yield from (
            part.tolist() for part in rows.tensor_split(config.minibatches_per_step) if len(part)
        )


def row_weights(
    mode: str, batch: Batch, mask: Tensor, rows: Sequence[int], constant: int | None = None
) -> Tensor:
    """Coefficient (N,) of each response's token sum in the loss of the minibatch `rows`, 0 for the
    others.
    """
    counts = mask.sum(1)
    chosen = torch.zeros_like(counts, dtype=torch.bool)
    chosen[rows] = True
    # A response without a trained token (overlong filter) leaves every count.
    kept = chosen & (counts > 0)
    return losses.aggregation_weights(
        mode, counts, group_ids=batch.group_ids, constant=constant, kept=kept
    )


def micro_batches(
    batch: Batch, config: Config, what: str, rows: Sequence[int] | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of the given rows of the batch (default: all), packed; a bar named `what`
    when they take long.
    """
    rows = range(len(batch.rollouts)) if rows is None else rows
    costs = [
        len(batch.rollouts[i].problem.prompt_ids) + len(batch.rollouts[i].response_ids)
        for i in rows
    ]
    shares = partition(costs, config.max_tokens_per_micro_batch, distributed.world_size())
    mine, quiet = shares[distributed.rank()], distributed.rank() > 0 or None  # None: a log file
    for share in tqdm(mine, what, unit="micro-batch", leave=False, delay=2, disable=quiet):
        yield pack(batch.rollouts, [rows[i] for i in share], batch.rewards.device)


def forward_policy(
    policy: Transformer, mb: MicroBatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (R, T) of a micro-batch, zero outside its mask."""
    logprobs, entropy = policy(
        mb.input_ids, mb.cu_seqlens, mb.action_index, mb.targets, temperature
    )
    return mb.unpack(logprobs), mb.unpack(entropy)


def forward_critic(critic: nn.Module, mb: MicroBatch) -> Tensor:
    """V (R, T) of a micro-batch, zero outside its mask; at temperature 1 always."""
    from critic import values

    return values(critic, mb)


@torch.no_grad()
def score_policy(policy: Transformer, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (N, T) under the weights at hand, whole on every rank."""
    logprobs, entropy = (torch.zeros_like(batch.rollout_logprobs) for _ in range(2))
    for mb in micro_batches(batch, config, "log-probs"):
        cells = mb.rows, slice(mb.mask.shape[1])
        logprobs[cells], entropy[cells] = forward_policy(policy, mb, config.temperature)
    return distributed.sum_(logprobs), distributed.sum_(entropy)


@torch.no_grad()
def score_critic(critic: nn.Module, batch: Batch, config: Config) -> Tensor:
    """V (N, T) under the weights at hand, whole on every rank."""
    values = torch.zeros_like(batch.rollout_logprobs)
    for mb in micro_batches(batch, config, "values"):
        values[mb.rows, : mb.mask.shape[1]] = forward_critic(critic, mb)
    return distributed.sum_(values)


def critic_loss(
    critic: nn.Module, mb: MicroBatch, given: dict[str, Tensor], config: Config
) -> tuple[Tensor, dict]:
    """Value loss of a micro-batch and its metrics. given: old_values and returns (N, T),
    row_weights (N,).
    """
    given = of_rows(given, mb)
    return losses.value_loss(
        forward_critic(critic, mb),
        given["old_values"],
        given["returns"],
        mb.mask,
        value_clip=config.value_clip,
        row_weights=given["row_weights"],
    )


def policy_loss(
    policy: Transformer, mb: MicroBatch, given: dict[str, Tensor], config: Config
) -> tuple[Tensor, dict]:
    """Surrogate of a micro-batch and its metrics. given: per-token arguments of
    `losses.policy_loss` (N, T), row_weights (N,).
    """
    logprobs, entropy = forward_policy(policy, mb, config.temperature)
    return losses.policy_loss(
        logprobs,
        objective=algorithms.ALGORITHMS[config.algorithm].objective,
        entropy=entropy if config.entropy_coef else None,
        **of_rows(given, mb),
        **{name: getattr(config, name) for name in OBJECTIVE_OPTIONS},
    )


LOSSES = {"critic": critic_loss, "policy": policy_loss}


def of_rows(given: dict[str, Tensor], mb: MicroBatch) -> dict[str, Tensor]:
    """The rows of a micro-batch, cut to its width."""
    return {
        name: x[mb.rows][..., : mb.mask.shape[1]] if x.ndim == 2 else x[mb.rows]
        for name, x in given.items()
    }
