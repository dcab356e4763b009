"""--offload without a GPU: nothing is forgotten, used while it is away, or changed."""

import pytest
import torch
from helpers import draw_no_figures, grade_by_hash, largest_difference, weights
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import distributed
import train
from algorithms import ALGORITHMS
from run.optimizer import offload

FLAGS = "--prompts-per-step=3 --group-size=4 --max-response-tokens=16 --steps=3 --eval-data= "
FLAGS += "--num-critic-only-steps=1 --critic-lr-warmup-steps=0"


def start(model, folder, offload):
    return [f"--model={model}", f"--output-dir={folder}", f"--offload={offload}", *FLAGS.split()]


pytestmark = pytest.mark.usefixtures("mixed_rewards", "no_figures")


@pytest.fixture(scope="module")
def plain(random_tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "r"
    with pytest.MonkeyPatch.context() as patch:
        grade_by_hash(patch)
        draw_no_figures(patch)
        train.main(start(random_tiny_model, folder, "none"))
    return folder


@pytest.mark.parametrize("offload", ["optimizer", "idle"])
def test_nothing_is_used_while_it_is_away(offload, random_tiny_model, plain, tmp_path, monkeypatch):
    """Moves are only noted, under a made-up host; every forward, optimizer step and checkpoint then
    checks that what it needs is here. The run is the plain run, bit for bit.
    """
    host, away, seen, trips = torch.device("meta"), set(), set(), []
    module_to, whole_state = torch.nn.Module.to, distributed.optimizer_state

    def note(thing, device):
        trips.append((type(thing).__name__, device.type))
        (away.add if device == host else away.discard)(id(thing))
        if isinstance(thing, torch.optim.Optimizer):
            seen.add(id(thing))

    def to(self, where, *rest):
        if not isinstance(where, torch.device):
            return module_to(self, where, *rest)
        note(self, where)
        return self

    def optimizer_state(module, optimizers):
        assert not {id(module), *map(id, optimizers)} & away
        assert seen - away == set(map(id, optimizers))  # the plan has room for one model's
        return whole_state(module, optimizers)

    def here(thing, *_):
        assert id(thing) not in away, type(thing).__name__

    monkeypatch.setattr("run.optimizer.HOST", host)
    monkeypatch.setattr(torch.nn.Module, "to", to)
    monkeypatch.setattr("run.optimizer.move_moments", note)
    monkeypatch.setattr(distributed, "optimizer_state", optimizer_state)
    hooks = register_module_forward_pre_hook(here), register_optimizer_step_pre_hook(here)
    try:
        train.main(start(random_tiny_model, tmp_path / "r", offload))
    finally:
        for hook in hooks:
            hook.remove()
    assert ("AdamW", "meta") in trips and ("AdamW", "cpu") in trips
    assert (
        (("Critic", "meta") in trips) == (("Transformer", "meta") in trips) == (offload == "idle")
    )
    for part in ("policy", "critic"):
        assert largest_difference(weights(plain, 3, part), weights(tmp_path / "r", 3, part)) == 0


def test_leaving_takes_every_weight_and_moment_along(random_tiny_model, tmp_path, monkeypatch):
    config = train.parse(start(random_tiny_model, tmp_path / "r", "none")).resolved(ALGORITHMS)
    config.dtype = config.head_dtype = "float32"
    run, state = train.set_up(config, torch.device("cpu"))
    train.train_step(run, state)
    train.train_step(run, state)
    monkeypatch.setattr("run.optimizer.HOST", torch.device("meta"))
    config.offload = "idle"
    for model, optimizers in state.trained:
        offload(model, optimizers, config)
        assert all(p.is_meta for p in model.parameters())
        (optimizer,) = optimizers
        moments = [x for s in optimizer.state.values() for x in s.values() if x.ndim]
        assert len(moments) == 2 * len(list(model.parameters())) and all(x.is_meta for x in moments)
        steps = [s["step"] for s in optimizer.state.values()]
        assert steps and not any(x.is_meta for x in steps)
