"""The critic: start of the head, alignment of V, save and load, statistics."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import critic as critic_module
from critic import Critic
from data import Problem, Rollout, pack

LENGTHS = [(3, 5), (7, 1), (2, 9)]


@pytest.fixture(scope="module")
def rollouts():
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(5, 60, (n,), generator=generator).tolist()

    return [
        Rollout(Problem("", i, "", ids(p), ""), i, 0, 0, ids(r)) for i, (p, r) in enumerate(LENGTHS)
    ]


def test_v_is_the_bias_everywhere_at_the_start(random_tiny_model, rollouts):
    critic = Critic.from_policy(random_tiny_model, bias=0.52)
    mb = pack(rollouts, [0, 1, 2])
    values = critic_module.values(critic, mb)
    assert (values[mb.mask] == torch.tensor(0.52)).all() and (values[~mb.mask] == 0).all()


def test_the_head_is_set_after_the_load_and_in_the_float32_master(random_tiny_model):
    # Known fault: a [1, D] head silently filled with row 0 of the LM head.
    critic = Critic.from_policy(random_tiny_model, bias=0.52, compute_dtype=torch.bfloat16)
    assert critic.value_head.weight.dtype == critic.value_head.bias.dtype == torch.float32
    assert (critic.value_head.weight == 0).all() and critic.value_head.bias.item() == pytest.approx(
        0.52, abs=1e-7
    )
    assert all(p.dtype == torch.float32 for p in critic.parameters())


def test_the_float32_bias_moves_by_one_learning_rate_under_bfloat16_compute(
    random_tiny_model, rollouts
):
    critic = Critic.from_policy(random_tiny_model, bias=0.52, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=5e-6, weight_decay=0.0)
    critic_module.values(critic, pack(rollouts, [0, 1, 2])).sum().backward()
    optimizer.step()
    assert critic.value_head.bias.item() == pytest.approx(
        0.519995, abs=1e-7
    )  # a bfloat16 bias would stay at 0.5195
    assert critic.value_head.weight.abs().max().item() == pytest.approx(5e-6, rel=1e-2)


def test_v_is_read_at_the_token_before_each_response_token(random_tiny_model, rollouts):
    critic = Critic.from_policy(random_tiny_model, bias=0.3)
    torch.manual_seed(1)
    torch.nn.init.normal_(critic.value_head.weight)
    mb = pack(rollouts, [0, 1, 2])
    values = critic_module.values(critic, mb)
    oracle = AutoModelForCausalLM.from_pretrained(random_tiny_model).model
    head = critic.value_head
    for row, r in enumerate(rollouts):
        prompt, response = r.problem.prompt_ids, r.response_ids
        hidden = oracle(torch.tensor([prompt + response])).last_hidden_state[0]
        for t in range(len(response)):
            state = hidden[len(prompt) + t - 1]  # t = 0: the last prompt token
            expected = state @ head.weight[0] + head.bias[0]
            assert values[row, t].item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_saved_critic_comes_back_with_its_own_head(random_tiny_model, tmp_path, rollouts):
    critic = Critic.from_policy(random_tiny_model, bias=0.3)
    torch.nn.init.normal_(critic.value_head.weight)
    critic.save_pretrained(tmp_path / "critic")
    again = Critic.from_pretrained(tmp_path / "critic")
    for (name, a), (_, b) in zip(critic.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(FileNotFoundError, match="without its critic"):
        Critic.from_pretrained(tmp_path / "nowhere")


def test_a_policy_directory_is_not_a_critic(random_tiny_model):
    with pytest.raises(ValueError, match="value_head"):
        Critic.from_pretrained(random_tiny_model)
