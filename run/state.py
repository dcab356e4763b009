"""What stays the same during a run (Run), and what it carries from step to step (State)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from algorithms import Algorithm
from config import Config
from data import DataOrder, Problem, Rollout
from model import Transformer
from rewards import Verifier
from rollout import Collected, Sampler
from run.optimizer import Optimizers, on_device


@dataclass
class Run:
    """What stays the same during a run."""

    config: Config
    row: Algorithm
    device: torch.device
    folder: Path | None  # None: nothing is to be written, as in --replay
    problems: list[Problem]
    eval_problems: list[Problem]
    grader: Verifier
    report: Callable[[int, dict[str, float]], None]  # step and metrics, to --report-to
    lock: IO | None  # held until the run ends


@dataclass
class State:
    """Everything a run carries from one step to the next. Models are float32 masters, sharded when
    there are several ranks.
    """

    policy: Transformer
    optimizers: Optimizers
    sampler: Sampler  # owns a complete copy of the policy in the compute dtype
    order: DataOrder
    critic: torch.nn.Module | None = None
    critic_optimizers: Optimizers = ()
    reference: Transformer | None = None  # frozen start policy, for the KL term
    buffer: list[list[Rollout]] = field(default_factory=list)  # unfinished groups
    ahead: Collected | None = None  # --async-steps: the groups of the next step, sampled already
    step: int = 0  # finished steps
    critic_steps: int = 0  # optimizer steps of the critic, which its warm-up counts
    empty_steps: int = 0  # the latest steps in a row that kept no group
    start_entropy: float | None = None  # of the first policy update: the reference for a collapse
    stop: bool = False  # set by a signal: save and leave

    @property
    def trained(self) -> list[tuple[torch.nn.Module, Optimizers]]:
        """The models that train, each with its optimizers."""
        return [self.part(p) for p in ("policy", "critic") if getattr(self, p) is not None]

    def part(self, name: str) -> tuple[torch.nn.Module, Optimizers]:
        """`policy` or `critic`, with its optimizers."""
        return getattr(self, name), self.optimizers if name == "policy" else self.critic_optimizers

    def on_device(self, name: str, run: Run) -> AbstractContextManager[None]:
        """Inside, `policy` or `critic` is on the run's device, wherever --offload keeps it."""
        return on_device(*self.part(name), run.device, run.config)
