"""Data files, prompts, order, masks, packing."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from data import (
    DataOrder,
    Problem,
    Rollout,
    length_mask,
    load_problems,
    load_tokenizer,
    pack,
    partition,
    stop_ids,
    to_batch,
)


@pytest.fixture(scope="module")
def tokenizer(random_tiny_model):
    return load_tokenizer(random_tiny_model)


def rollout(prompt, response, finish="stop", group=0, j=0, reward=0.0):
    problem = Problem("p", 0, "", prompt, "1")
    logprobs = [-0.5] * len(response)
    return Rollout(
        problem, group, j, 0, response, logprobs, [0] * len(response), finish, reward=reward
    )


def write(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


# ---- files


def test_prompts_go_through_the_chat_template_once(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", {"prompt": "1 a:+2 b:+3", "label": 6})
    (problem,), dropped = load_problems(file, tokenizer, 100)
    messages = [{"role": "user", "content": "1 a:+2 b:+3"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert problem.prompt_ids == list(expected["input_ids"])
    assert problem.label == "6" and dropped == 0
    file = write(tmp_path / "b.jsonl", {"prompt": messages, "label": "6"})
    assert load_problems(file, tokenizer, 100)[0][0].prompt_ids == problem.prompt_ids


def test_long_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "1 a:+2", "label": "3"}, {"prompt": "1" * 200, "label": "3"}]
    problems, dropped = load_problems(write(tmp_path / "a.jsonl", *rows), tokenizer, 50)
    assert len(problems) == 1 and dropped == 1
    with pytest.raises(ValueError, match="max-prompt-tokens"):
        load_problems(write(tmp_path / "b.jsonl", rows[1]), tokenizer, 50)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "1", "label": "1"}, {"prompt": "2"}], [":2", "'label'"]),
        ([{"label": "1"}], [":1", "'prompt'"]),
        ([{"prompt": "1", "label": ""}], [":1", "'label'"]),
        ([{"prompt": 7, "label": "1"}], [":1", "'prompt'"]),
        ([{"prompt": [1, 2], "label": "1"}], [":1", "content"]),
        ([{"prompt": [{"role": "user"}], "label": "1"}], [":1", "content"]),
        (["{nonsense"], [":1", "JSON"]),
        (["[1]"], [":1", "JSON object"]),
        ([], ["empty"]),
    ],
)
def test_bad_rows_are_named_with_file_and_line(tmp_path, tokenizer, rows, words):
    file = write(tmp_path / "bad.jsonl", *rows)
    with pytest.raises(ValueError) as error:
        load_problems(file, tokenizer, 50)
    assert all(word in str(error.value) for word in [*words, file]), str(error.value)


def test_a_label_of_zero_is_a_label(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", {"prompt": "1 a:-1", "label": 0})
    assert load_problems(file, tokenizer, 50)[0][0].label == "0"


def test_missing_file_and_missing_tokenizer_are_named(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_problems("nowhere.jsonl", tokenizer, 50)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_every_eos_of_the_generation_config_stops_and_nothing_else_is_taken(tmp_path, tokenizer):
    settings = {"eos_token_id": [5, 9], "temperature": 0.1, "top_k": 3, "pad_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert stop_ids(tmp_path, tokenizer) == sorted({5, 9, tokenizer.eos_token_id})


# ---- order


def test_order_visits_each_problem_once_an_epoch_and_resumes_from_one_number():
    order = DataOrder(7, seed=3)
    draws = [order.draw() for _ in range(21)]
    for epoch in range(3):
        assert sorted(i for _, i in draws[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert [n for n, _ in draws] == list(range(21))
    resumed = DataOrder(7, seed=3)
    resumed.load_state_dict({"drawn": 10, "tried": [0] * 7, "solved": [0] * 7})
    assert [resumed.draw() for _ in range(11)] == draws[10:]
    assert [i for _, i in draws[:7]] != [i for _, i in draws[7:14]]


def test_solved_problems_are_left_out_unless_all_are_solved():
    order = DataOrder(4, seed=0, max_pass_rate=0.9)
    for index, rewards in enumerate(([1] * 8, [1] * 7 + [0], [1] * 10, [0] * 8)):
        order.record(index, rewards)
    assert {order.draw()[1] for _ in range(20)} == {1, 3}
    numbers = [order.draw()[0] for _ in range(20)]
    assert len(set(numbers)) == 20  # the number of a draw, part of the random key, stays unique
    for index in (1, 3):
        order.record(index, [1] * 100)
    assert {order.draw()[1] for _ in range(40)} == {0, 1, 2, 3}


def test_failure_weighted_draws_are_in_proportion_to_one_minus_pass_rate_and_resume():
    order = DataOrder(3, seed=1, failure_weighted=True)
    for index, rate in enumerate((0.0, 0.5, 1.0)):
        order.record(index, [1] * int(8 * rate) + [0] * int(8 - 8 * rate))
    draws = [order.draw()[1] for _ in range(6000)]
    shares = [draws.count(i) / 6000 for i in range(3)]
    assert shares == pytest.approx([2 / 3, 1 / 3, 0.001 / 1.5], abs=0.02)
    again = DataOrder(3, seed=1, failure_weighted=True)
    again.load_state_dict(order.state_dict() | {"drawn": 100})
    assert [again.draw()[1] for _ in range(50)] == draws[100:150]
    with pytest.raises(ValueError, match="knows 3 problems"):
        DataOrder(4, seed=1).load_state_dict(order.state_dict())


# ---- masks and packing


def test_bc01_masks_come_from_lengths_when_pad_is_eos():
    rows = [[5, 7, 2], [5, 7, 9, 4, 6], [2], [5, 7, 9, 4, 2]]
    finish = ["stop", "length", "stop", "stop"]
    batch = to_batch([rollout([2, 8, 2, 9], r, f) for r, f in zip(rows, finish, strict=True)])
    masks = ["".join(str(int(x)) for x in row) for row in batch.response_mask]
    assert masks == ["11100", "11111", "10000", "11111"]
    assert batch.response_lengths.tolist() == [3, 5, 1, 5]
    assert int(batch.response_mask.sum()) == 14
    assert batch.truncated.float().mean() == 0.25
    mb = pack(batch.rollouts, [0, 2])
    assert mb.input_ids.tolist() == [2, 8, 2, 9, 5, 7] + [2, 8, 2, 9]  # prompt separators stay in


def test_pack_shifts_once():
    rollouts = [rollout([1, 2, 3], [4, 5, 6]), rollout([7], [8]), rollout([9, 10], [11, 12])]
    mb = pack(rollouts, [2, 0, 1])
    assert mb.input_ids.tolist() == [9, 10, 11, 1, 2, 3, 4, 5, 7]
    assert mb.cu_seqlens.tolist() == [0, 3, 8, 9]
    assert mb.targets.tolist() == [11, 12, 4, 5, 6, 8]
    # The state in which a token is chosen ends with the token before it.
    before = mb.input_ids[mb.action_index].tolist()
    assert before == [10, 11, 3, 4, 5, 7]
    unpacked = mb.unpack(torch.arange(1.0, 7.0))
    assert unpacked.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]


def test_s7_sampled_ids_are_trained_even_if_the_text_would_tokenise_otherwise():
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    sampled = [0, 1, 0]
    assert tokenizer.encode(tokenizer.decode(sampled).replace(" ", "")).ids == [2, 0]
    assert pack([rollout([1], sampled)], [0]).targets.tolist() == sampled


def test_a_rank_without_work_gets_one_token_and_no_action():
    mb = pack([rollout([1], [2])], [])
    assert len(mb.input_ids) == 1 and mb.cu_seqlens.tolist() == [0, 1]
    assert len(mb.action_index) == len(mb.targets) == len(mb.rows) == 0
    assert mb.unpack(torch.zeros(0)).shape == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_partition_covers_every_row_once_within_budget_and_evenly(ranks):
    generator = torch.Generator().manual_seed(ranks)
    for n in (1, 2, 5, 40):
        costs = torch.randint(1, 100, (n,), generator=generator).tolist()
        shares = partition(costs, 120, ranks)
        assert len(shares) == ranks and len({len(s) for s in shares}) == 1
        bins = [b for share in shares for b in share]
        assert sorted(i for b in bins for i in b) == list(range(n))
        assert all(sum(costs[i] for i in b) <= 120 for b in bins)
    assert partition([500], 120) == [[[0]]]  # above the budget: alone


def test_length_mask_of_nothing():
    assert length_mask(torch.zeros(0, dtype=torch.long)).shape == (0, 0)
