"""--async-steps 1: the next rollout is sampled during the update, on the weights before it."""

import pytest
import torch
from helpers import read_metrics, same, train_run, weights

import train
from model import Transformer
from problems import load_tokenizer, vocabulary_size

FLAGS = "--algorithm grpo --is-mode tis --is-low 0.5 --is-high 2 --save-every 1 "
FLAGS = (FLAGS + "--keep-checkpoints 0 --over-sampling 2 --partial-rollout --slots 10").split()


pytestmark = pytest.mark.usefixtures("mixed_rewards", "no_figures")


def untimed(rows):
    return {
        step: {k: v for k, v in row.items() if not k.startswith(("perf/", "rollout/version_lag"))}
        for step, row in rows.items()
    }


def test_version_tags_and_importance_weights_are_those_of_two_weight_versions(
    random_tiny_model, tmp_path, monkeypatch
):
    seen = []
    update = train.update_policy

    def spy(run_, state, batch, advantages, old_logprobs):
        seen.append((state.sampler.weight_version, batch, old_logprobs, run_.config))
        return update(run_, state, batch, advantages, old_logprobs)

    monkeypatch.setattr(train, "update_policy", spy)
    flags = [*FLAGS, "--async-steps", 1, "--lr", 1e-2, "--steps", 4]
    flags = [f for f in flags if f != "--partial-rollout"]
    rows = train_run(tmp_path / "r", *flags, model=random_tiny_model)
    policies = [random_tiny_model] + [
        tmp_path / f"r/checkpoints/step_{s:06d}/policy" for s in (1, 2, 3)
    ]
    policies = [Transformer.from_pretrained(p) for p in policies]
    for policy in policies:  # as the run does
        policy.restrict_vocabulary(vocabulary_size(load_tokenizer(random_tiny_model)))
    for step, (version, batch, old_logprobs, config) in enumerate(seen):
        sampled_by = max(step - 1, 0)  # the first step has nothing to run beside
        tags = {v for r in batch.rollouts for v in r.weight_versions}
        assert version == step and tags == {sampled_by}
        assert rows[step + 1]["rollout/version_lag"] == step - sampled_by
        now, then = (train.score_policy(policies[i], batch, config)[0] for i in (step, sampled_by))
        mask = batch.response_mask
        gap = (old_logprobs - batch.rollout_logprobs)[mask]
        assert torch.allclose(gap, (now - then)[mask], atol=1e-5)
        assert (gap.abs().max() > 1e-2) == (step > 0)
        ratio = gap.exp().mean().item()
        assert rows[step + 1]["policy/is_ratio"] == pytest.approx(ratio, rel=1e-4)


def test_with_a_learning_rate_of_zero_it_is_the_synchronous_run(random_tiny_model, tmp_path):
    flags = [*FLAGS, "--lr", 0, "--steps", 4]
    plain = train_run(tmp_path / "a", *flags, model=random_tiny_model)
    ahead = train_run(tmp_path / "b", *flags, "--async-steps", 1, model=random_tiny_model)
    for rows in (plain, ahead):  # weights of another version are other tags, though the same
        for row in rows.values():
            del row["rollout/mixed_version_share"], row["rollout/version_spread_max"]
    assert untimed(plain) == untimed(ahead)
    lines = [(tmp_path / f / "rollouts.jsonl").read_bytes() for f in "ab"]
    assert lines[0] == lines[1]


def test_resume_is_exact_with_a_rollout_in_hand(random_tiny_model, tmp_path, monkeypatch):
    flags = [*FLAGS, "--async-steps", 1, "--lr", 1e-3, "--steps", 6]
    whole = train_run(tmp_path / "a", *flags, model=random_tiny_model)
    assert whole[6]["rollout/groups_resumed"] > 0
    step = train.train_step

    def stop_after_three(run_, state):
        state.stop = state.step == 2  # as a Ctrl-C in the third step
        return step(run_, state)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", stop_after_three)
        assert max(train_run(tmp_path / "b", *flags, model=random_tiny_model)) == 3
    train.main(["--resume", "--output-dir", str(tmp_path / "b")])
    assert untimed(read_metrics(tmp_path / "b")) == untimed(whole)
    lines = [(tmp_path / f / "rollouts.jsonl").read_bytes() for f in "ab"]
    assert lines[0] == lines[1]
    assert same(weights(tmp_path / "a", 6), weights(tmp_path / "b", 6))


def test_a_failure_beside_a_rollout_ends_both(random_tiny_model, tmp_path, monkeypatch):
    def fail(*_):
        raise FloatingPointError("the cause")

    monkeypatch.setattr(train, "update_policy", fail)
    with pytest.raises(SystemExit, match="the cause"):
        train_run(tmp_path / "r", *FLAGS, "--async-steps", 1, "--steps", 3, model=random_tiny_model)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--is-mode", "none"], "only importance weights correct"),
        (["--is-mode", "tis", "--nproc", "2"], "works in one process"),
        (
            "--is-mode tis --over-sampling 2 --partial-rollout --partial-mask-old".split(),
            "an older policy sampled every token",
        ),
        (["--is-mode", "tis", "--async-steps", "2"], "choose one of 0, 1"),
    ],
)
def test_what_cannot_be_right_is_refused(flags, words):
    with pytest.raises(SystemExit, match=words):
        train.main(["--algorithm", "grpo", "--async-steps", "1", *flags])
