"""The critic of PPO and JustRL II: its own backbone with a scalar head.

V(s_t) is read at the token before response token t, always at temperature 1. The head starts at
weight 0 and bias b, so V = b everywhere and the first advantages are lambda^(L-1-t) * (r - b). The
first step moves only the head, because the gradient into the backbone is proportional to the head's
weight. run/audit.py measures what the critic has learned.
"""

import importlib
from pathlib import Path
from typing import Any

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

# No policy checkpoint has these: loading a backbone must not miss them.
HEAD = ("value_head.weight", "value_head.bias")


class Critic(nn.Module):
    """V(s): `.model` (Decoder, not shared with the policy) and `.value_head`, a Linear D -> 1 in
    float32.
    """

    def __init__(self, config: PretrainedConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.model = Decoder(config, compute_dtype)
        # With a bias, set to the mean reward: without it V would have to learn the mean first.
        self.value_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, action_index: Tensor) -> Tensor:
        """Values (A,) float32 of the states after tokens `action_index` (A,) of the packed
        sequences (see MicroBatch).
        """
        # Packed: each sequence counts positions from 0 and attends to itself alone.
        positions = segment_positions(cu_seqlens, len(input_ids))
        # In compute_dtype: the backbone rounds as the policy's does.
        hidden = self.model(
            input_ids, positions, packed_attention(cu_seqlens, int(cu_seqlens.diff().max()))
        )
        # float32: in bfloat16 V near 0.5 would move in steps of 0.004.
        return (
            hidden[action_index].float() @ self.value_head.weight[0].float()
            + self.value_head.bias.float()
        )

    @classmethod
    def from_policy(
        cls, path: str | Path, bias: float, compute_dtype: torch.dtype = torch.float32
    ) -> "Critic":
        """Backbone of a policy checkpoint and a new head: weight 0, bias the expected mean reward.

        The head is set after the load and in the float32 masters, so nothing of the LM head
        leaks into it.
        """
        folder = local_folder(path)
        with torch.device("meta"):
            critic = cls(load_config(folder), compute_dtype)
        # float32 masters: an update of 1e-6 would vanish when added to a bfloat16 weight.
        load_weights(critic, folder, torch.float32, ignore=("lm_head.weight",), fresh=HEAD)
        # The checkpoint has no value head, so it is still on the meta device, without memory.
        critic.value_head.to_empty(device="cpu")
        # A random head would put noise into the first advantages.
        nn.init.zeros_(critic.value_head.weight)
        nn.init.constant_(critic.value_head.bias, bias)
        return critic

    @classmethod
    def from_pretrained(
        cls, path: str | Path, compute_dtype: torch.dtype = torch.float32
    ) -> "Critic":
        """A critic saved by `save_pretrained`, with its head unchanged."""
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is missing: a policy without its critic cannot be resumed."
            )
        # meta: no memory and no random initialisation for weights that are loaded anyway.
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
        # contiguous: safetensors refuses views with gaps.
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


def __getattr__(name: str) -> Any:
    """`critic.audit`, where users of the first version find it; loaded only when asked for."""
    if name == "audit":
        return importlib.import_module("run.audit").audit
    raise AttributeError(f"module 'critic' has no attribute {name!r}")
