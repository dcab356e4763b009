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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the masked tokens: 1 perfect, 0 as good as the mean, below 0
    worse. NaN if R is constant.
    """
    values, returns = values[mask].double(), returns[mask].double()
    variance = returns.var(unbiased=False)
    return (
        float(1 - (returns - values).var(unbiased=False) / variance)
        if variance > 0
        else float("nan")
    )


def audit(
    values: Tensor, returns: Tensor, mask: Tensor, rewards: Tensor, group_ids: Tensor
) -> dict[str, float]:
    """What the critic knows, from the group structure of one batch. values, returns, mask (N, T);
    rewards, group_ids (N,).

    v_std: spread of V over tokens, 0 for a dead critic. bias: mean V - mean R. explained_variance
    as above. start_corr: correlation of V(s_0) with the pass rate of the group, over groups.
    end_auc: probability that, within a group, a right response ends with a higher V than a wrong
    one (0.5 knows nothing).
    """
    live = values[mask].double()
    last = mask.sum(1) - 1
    ends = values.gather(1, last.clamp(min=0)[:, None]).squeeze(1)
    groups = range(int(group_ids.max()) + 1)
    starts = torch.stack([values[group_ids == g, 0].mean() for g in groups])
    rates = torch.stack([rewards[group_ids == g].float().mean() for g in groups])
    wins = pairs = 0.0
    for g in groups:
        right, wrong = (
            ends[(group_ids == g) & is_right] for is_right in (rewards > 0.5, rewards <= 0.5)
        )
        difference = right[:, None] - wrong[None, :]
        wins += float((difference > 0).sum() + 0.5 * (difference == 0).sum())
        pairs += difference.numel()
    correlation = (
        torch.corrcoef(torch.stack([starts, rates]))[0, 1]
        if starts.std() > 0 < rates.std()
        else None
    )
    return {
        "v_mean": float(live.mean()),
        "v_std": float(live.std(unbiased=False)),
        "bias": float(live.mean() - returns[mask].double().mean()),
        "explained_variance": explained_variance(values, returns, mask),
        "start_corr": float("nan") if correlation is None else float(correlation),
        "end_auc": wins / pairs if pairs else float("nan"),
    }
