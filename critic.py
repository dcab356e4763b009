"""The critic of PPO and JustRL II: a backbone of its own with a scalar head, and statistics that
tell if it is alive.

V(s_t) is read at the token before response token t, at temperature 1 always. The head starts at
weight 0 and bias b, so V = b everywhere and the first advantages are lambda^(L-1-t) * (r - b). The
first step moves the head alone, because the gradient into the backbone is proportional to the
head's weight.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from data import MicroBatch
from model import (
    Decoder,
    load_config,
    load_weights,
    local_folder,
    packed_attention,
    segment_positions,
)

HEAD = ("value_head.weight", "value_head.bias")
# Values closer than this are equal to the audit: the same state, packed beside other sequences,
# comes out a rounding error apart.
TIE = 1e-6


class Critic(nn.Module):
    """V(s): `.model` (Decoder, not shared with the policy) and `.value_head`, a Linear D -> 1 in
    float32.
    """

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.model = Decoder(config, compute_dtype)
        self.value_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, action_index: Tensor) -> Tensor:
        """Values (A,) float32 of the states after tokens `action_index` (A,) of the packed
        sequences (see MicroBatch).
        """
        positions = segment_positions(cu_seqlens, len(input_ids))
        hidden = self.model(
            input_ids, positions, packed_attention(cu_seqlens, int(cu_seqlens.diff().max()))
        )
        return (
            hidden[action_index].float() @ self.value_head.weight[0].float()
            + self.value_head.bias.float()
        )

    @classmethod
    def from_policy(
        cls, path: str | Path, bias: float, compute_dtype: torch.dtype = torch.float32
    ) -> "Critic":
        """Backbone of a policy checkpoint and a new head: weight 0, bias the expected mean reward.

        The head is set after the load and in the float32 masters, so nothing of the LM head can
        leak into it.
        """
        folder = local_folder(path)
        with torch.device("meta"):
            critic = cls(load_config(folder), compute_dtype)
        load_weights(critic, folder, torch.float32, ignore=("lm_head.weight",), fresh=HEAD)
        critic.value_head.to_empty(device="cpu")
        nn.init.zeros_(critic.value_head.weight)
        nn.init.constant_(critic.value_head.bias, bias)
        return critic

    @classmethod
    def from_pretrained(
        cls, path: str | Path, compute_dtype: torch.dtype = torch.float32
    ) -> "Critic":
        """A critic saved by `save_pretrained`, head included and untouched."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is missing: a policy without its critic cannot be resumed."
            )
        with torch.device("meta"):
            critic = cls(load_config(folder), compute_dtype)
        load_weights(critic, folder, torch.float32)
        return critic

    def save_pretrained(
        self, path: str | Path, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Write config.json and model.safetensors in float32. state_dict: full weights when this
        module holds shards.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: w.detach().cpu().contiguous()
            for name, w in (state_dict or self.state_dict()).items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.config.save_pretrained(folder)


def values(critic: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """V (R, T) float32 of one micro-batch, zero outside the mask."""
    return micro_batch.unpack(
        critic(micro_batch.input_ids, micro_batch.cu_seqlens, micro_batch.action_index)
    )


# ---- audit: what the critic knows, from the group structure of one batch

FRACTIONS = torch.linspace(0, 1, 11, dtype=torch.float64)  # 0, 10, ..., 100 % of a response


def audit(
    values: Tensor, mask: Tensor, rewards: Tensor, group_ids: Tensor
) -> tuple[dict[str, float], dict[str, list]]:
    """(numbers for metrics.jsonl, curves for audit.jsonl) of values, mask (N, T) against raw
    rewards 0 or 1, group_ids (N,) from 0.

    V is compared with the outcome r itself, whatever the algorithm regresses on. What cannot be
    computed (no group has right and wrong members, V or the pass rates are constant) is NaN.
    docs/critic.md defines each statistic and says what is healthy.
    """
    live, outcomes = values[mask].double(), rewards[:, None].expand_as(values)[mask].double()
    owners = group_ids[:, None].expand_as(values)[mask]
    right = rewards > 0.5
    at = at_fractions(values, mask)
    auc, pairs = within_group_auc(at, right, group_ids)
    lengths = mask.sum(1, keepdim=True).double()
    length_auc, _ = within_group_auc(-lengths, right, group_ids)
    # All members of a group start in the same state: one of them speaks for V(s_0).
    members = [group_ids == g for g in range(int(group_ids.max()) + 1)]
    starts = torch.stack([at[m, 0][0] for m in members])
    rates = torch.stack([right[m].double().mean() for m in members])
    # Only mixed groups, all alike, so that a gap is what V knows beyond the problem.
    mixed = [m for m in members if right[m].any() and not right[m].all()]
    nothing = torch.full((11,), torch.nan)
    along = lambda who: torch.stack([at[m & who].mean(0) for m in mixed] or [nothing]).mean(0)
    between, within = explained_variance_split(live, outcomes, owners)
    numbers = {
        "v_mean": live.mean(),
        "v_std": live.std(unbiased=False),
        "bias": live.mean() - outcomes.mean(),
        "explained_variance": explained_variance(live, outcomes),
        "explained_variance_between": between,
        "explained_variance_within": within,
        "start_corr": correlation(starts, rates),
        "start_rank_corr": correlation(average_ranks(starts), average_ranks(rates)),
        "start_calibration_error": calibration_error(starts, rates),
        "start_auc": auc[0],
        "mid_auc": auc[5],
        "end_auc": auc[10],
        "length_auc": length_auc[0],
    }
    curves = {
        "start": torch.stack([starts, rates], 1).tolist(),
        "auc": auc.tolist(),
        "pairs": pairs,
        "length_auc": float(length_auc[0]),
        "v_right": along(right).tolist(),
        "v_wrong": along(~right).tolist(),
        "mixed": len(mixed),
    }
    return {name: float(x) for name, x in numbers.items()}, curves


def explained_variance(values: Tensor, outcomes: Tensor) -> float:
    """1 - Var(r - V) / Var(r) over tokens (A,): 1 perfect, 0 as good as a constant, below 0 worse.
    NaN if r is constant.
    """
    variance = outcomes.var(unbiased=False)
    left = (outcomes - values).var(unbiased=False)
    return float(1 - left / variance) if variance > 0 else float("nan")


def explained_variance_split(values: Tensor, outcomes: Tensor, owners: Tensor) -> list[float]:
    """[between problems, within groups]: explained variance of the groups' token means, and of what
    each token adds to its group's mean; values, outcomes, owners (A,).

    Var = between + within holds for r and for r - V, so the two average to `explained_variance`
    with the two parts of Var(r) as weights. The group baseline has all of the first, 0 of the
    second.
    """
    counts = torch.bincount(owners).clamp(min=1).double()

    def parts(x):
        means = (torch.bincount(owners, weights=x) / counts)[owners]
        return (means - x.mean()).square().mean(), (x - means).square().mean()

    left, all_ = parts(outcomes - values), parts(outcomes)
    return [
        float(1 - e / v) if v > 1e-12 else float("nan") for e, v in zip(left, all_, strict=True)
    ]


def at_fractions(x: Tensor, mask: Tensor) -> Tensor:
    """(N, T) -> (N, 11) float64: x at 0, 10, ..., 100 % of each response, first to last token."""
    last = (mask.sum(1) - 1).clamp(min=0)
    index = (FRACTIONS.to(x.device) * last[:, None]).round().long()
    return x.gather(1, index).double()


def within_group_auc(scores: Tensor, right: Tensor, group_ids: Tensor) -> tuple[Tensor, int]:
    """((K,), pairs): share of the pairs of a right and a wrong response *to the same problem* in
    which the right one scores higher, a tie counting half; scores (N, K), right (N,) bool.

    Over all pairs of all groups; a group all right or all wrong has none.
    """
    wins, pairs = torch.zeros_like(scores[0]), 0
    for g in range(int(group_ids.max()) + 1):
        mine = group_ids == g
        difference = scores[mine & right][:, None] - scores[mine & ~right][None]
        wins += ((difference > TIE).double() + (difference.abs() <= TIE).double() / 2).sum((0, 1))
        pairs += difference.shape[0] * difference.shape[1]
    return wins / pairs if pairs else torch.full_like(wins, torch.nan), pairs


def average_ranks(x: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing their mean rank: (N,) float64."""
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's; of average ranks it is Spearman's. NaN if either is constant."""
    if len(x) < 2 or not (x.std() > 0 and y.std() > 0):
        return float("nan")
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def calibration_error(forecasts: Tensor, rates: Tensor) -> float:
    """Expected calibration error: mean over groups of the gap between mean forecast and mean pass
    rate of their bin (tenths of 0..1; a forecast outside goes to the nearest).
    """
    bins = (forecasts * 10).floor().clamp(0, 9).long()
    gaps = torch.bincount(bins, weights=forecasts - rates)
    return float(gaps.abs().sum() / len(forecasts))
