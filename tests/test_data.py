"""Data files, prompts, order, masks, packing."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from tokenizers import Tokenizer
from tokenizers.models import BPE

from config import read_recipe
from data import DataOrder, Problem, Rollout, length_mask, pack, partition, to_batch
from problems import (
    load_problems,
    load_tokenizer,
    read_rows,
    render_prompt,
    stop_ids,
    think_mode,
)
from verify import verify


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
        ([{"prompt": "1", "label": "1"}, {"prompt": "1", "label": "  "}], [":2", "empty"]),
        ([{"prompt": "1", "label": "#### "}], [":1", "'#### '", "empty", "curate.py"]),
        ([{"prompt": "1", "label": "42 ####"}], [":1", "'42 ####'", "empty"]),
        ([{"prompt": "1", "label": "\\boxed{}"}], [":1", "empty"]),
        ([{"prompt": "1", "label": "$$"}], [":1", "empty"]),
        ([{"prompt": "1", "label": "\\frac{1}{2"}], [":1", "unbalanced"]),
        ([{"prompt": "1", "label": "1" * 5000}], [":1", "too_big"]),
        ([{"prompt": "1", "label": ["3", "4"]}], [":1", "one text or number", "['3', '4']"]),
        ([{"prompt": "1", "label": {"x": 3}}], [":1", "one text or number", "{'x': 3}"]),
        ([{"prompt": "1", "label": float("nan")}], [":1", "one text or number", "nan"]),
        ([{"prompt": "1", "label": "NaN"}], [":1", "one text or number", "NaN"]),
        ([{"prompt": "1", "label": "1", "verifier": ["math"]}], [":1", "['math'] is unknown"]),
        (
            [{"prompt": "1", "label": "1", "verifier": {}}, {"prompt": "\ud800", "label": "1"}],
            [":2", "surrogates"],
        ),
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


def test_an_id_of_null_is_the_number_of_the_problem(tmp_path, tokenizer):
    """All such problems had the id 'None', and diagnose took their groups for one."""
    rows = [{"prompt": "P", "label": label, "id": id} for label, id in (("1", None), ("2", 0))]
    problems, _ = load_problems(write(tmp_path / "a.jsonl", *rows, rows[0]), tokenizer, 99)
    assert [p.id for p in problems] == ["0", "0", "2"]


@pytest.mark.parametrize("label", [0, 7.0, True, "yes", "1/0", "x = 2", "x" * 60, "A", "42"])
def test_every_other_label_is_taken_as_it_is(tmp_path, tokenizer, label):
    (problem,), _ = load_problems(
        write(tmp_path / "a.jsonl", {"prompt": "P", "label": label}), tokenizer, 99
    )
    assert problem.label == str(label)


@pytest.mark.parametrize(
    ("row", "prompt", "label", "id"),
    [
        ({"problem": "P", "solution": "S", "answer": "7", "unique_id": "test/a.json"},)
        + ("P", "7", "test/a.json"),  # MATH-500
        ({"ID": "I-1", "Problem": "P", "Solution": "S", "Answer": 204}, "P", "204", "I-1"),  # AIME
        ({"id": 60, "problem": "P", "solution": "\\boxed{204}"}, "P", "204", "60"),
        ({"problem": "P", "solution": "So \\boxed{\\frac12}. Done."}, "P", "\\frac12", "0"),
        ({"question": "P", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,002"}, "P", "1,002", "0"),  # GSM8K
        ({"uuid": "u", "query": "P", "ground_truth": "x^2"}, "P", "x^2", "u"),
        ({"prompt": [{"role": "user", "content": "P"}], "extra_info": {"index": "A-0"},
          "reward_model": {"ground_truth": "70", "style": "rule"}}, "P", "70", "A-0"),  # verl
        ({"prompt": "P", "label": "1", "problem": "Q", "answer": "2"}, "P", "1", "0"),
    ],
)  # fmt: skip
def test_known_layouts_are_read_without_naming_columns(tmp_path, tokenizer, row, prompt, label, id):
    (problem,), _ = load_problems(write(tmp_path / "a.jsonl", row), tokenizer, 99)
    expected = render_prompt(tokenizer, prompt)
    assert (problem.prompt, problem.label, problem.id) == (expected, label, id)


def test_named_columns_win_and_the_columns_are_listed_when_one_is_missing(tmp_path, tokenizer):
    row = {"prompt": "P", "label": "1", "text": "Q", "meta": {"gold": "2"}}
    file = write(tmp_path / "a.jsonl", row)
    (problem,), _ = load_problems(file, tokenizer, 99, "text", "meta.gold")
    assert problem.prompt == render_prompt(tokenizer, "Q") and problem.label == "2"
    with pytest.raises(
        ValueError, match="no 'gold'.*columns: meta.gold, prompt, label, text, meta"
    ):
        load_problems(file, tokenizer, 99, label_key="gold")


def test_a_suffix_ends_the_text_and_the_last_message_before_the_template(tmp_path, tokenizer):
    few_shot = [
        {"role": r, "content": c} for r, c in (("user", "A"), ("assistant", "B"), ("user", "P"))
    ]
    rows = [{"prompt": "P", "label": "1"}, {"prompt": few_shot, "label": "1"}]
    file = write(tmp_path / "a.jsonl", *rows)
    text, chat = load_problems(file, tokenizer, 99, prompt_suffix="Box it.")[0]
    assert text.prompt == render_prompt(tokenizer, "P\nBox it.")
    assert chat.prompt.count("Box it.") == 1
    assert chat.prompt == render_prompt(tokenizer, few_shot).replace("P<", "P\nBox it.<")


def test_parquet_rows_equal_the_rows_written(tmp_path, tokenizer):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {"problem": f"P{i}", "answer": str(i), "extra_info": {"index": f"a-{i}"}} for i in range(5)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    assert [row for _, row in read_rows(str(tmp_path / "a.parquet"))] == rows
    problems, _ = load_problems(str(tmp_path / "a.parquet"), tokenizer, 99)
    assert [(p.id, p.label) for p in problems] == [(f"a-{i}", str(i)) for i in range(5)]
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"b\.parquet"):
        list(read_rows(str(tmp_path / "b.parquet")))


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_a_missing_reader_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    path = {"pyarrow": "some.parquet", "datasets": "org/name"}[module]
    with pytest.raises(ImportError, match=f"{path}.*pip install {module}"):
        list(read_rows(path))


def test_what_is_no_known_kind_of_file_is_named(tmp_path, monkeypatch):
    """--data data.txt and --data DIR asked for `pip install datasets`, and said no more."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "data.txt").write_text("")
    for path, words in (
        (tmp_path / "data.txt", r"end the name in \.jsonl or \.parquet"),
        (tmp_path, "is a directory; to read it as a data set"),
        ("gsm8k", "is no file here; to read it as a data set"),
    ):
        with pytest.raises((ValueError, ImportError), match=f"{path}.*{words}"):
            list(read_rows(str(path)))


def test_a_line_that_is_no_json_is_counted_in_its_file(tmp_path):
    """The message counted within the line: `bad.jsonl:2 ... line 1 column 15`."""
    file = tmp_path / "bad.jsonl"
    for line, words in (
        (b'{"label": }', "is not JSON \\(Expecting value"),
        (b"\xff", "is not JSON"),
    ):
        file.write_bytes(b'{"label": 1}\n' + line + b"\n")
        with pytest.raises(ValueError, match=f"bad.jsonl:2 {words}") as error:
            list(read_rows(str(file)))
        assert "line 1" not in str(error.value)


def test_hub_data_sets_name_their_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config):
        asked.append((name, config))
        if name == "org/none":
            raise RuntimeError("not found\nlong story")
        one = {"test": [{"problem": "P"}]}
        return one if name == "org/one" else one | {"train": [{"problem": "Q"}]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    def read(path):
        return [row["problem"] for _, row in read_rows(path)]

    assert read("org/one") == read("org/two@test") == ["P"] and read("org/two:main@train") == ["Q"]
    assert asked == [("org/one", None), ("org/two", None), ("org/two", "main")]
    for path in ("org/two", "org/two@dev"):
        with pytest.raises(ValueError, match="splits test, train"):
            read(path)
    with pytest.raises(FileNotFoundError, match="org/none.*not found$"):
        read("org/none")


def test_a_template_that_opens_the_thinking_requires_its_end():
    def prompts(*texts):
        return [Problem("p", 0, text, [1], "1") for text in texts]

    assert think_mode("auto", prompts("a <think>", "b <think>\n")) == "require"
    assert think_mode("auto", prompts("a <think>", "b")) == "auto"
    assert think_mode("none", prompts("a <think>")) == "none"


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


def test_no_solved_problem_is_drawn_while_one_is_left():
    """Two visits of a problem may be nearly two epochs apart, and the search gave up after one."""
    for seed in range(50):
        order = DataOrder(4, seed, max_pass_rate=0.9)
        for index in range(3):
            order.record(index, [1] * 8)
        assert {order.draw()[1] for _ in range(20)} == {3}


def test_the_pass_rate_of_a_problem_is_not_that_of_another_in_its_place():
    """After an edit of the data file it was: a new hard problem counted as solved."""
    order = DataOrder(4, 0, max_pass_rate=0.9, digests=[10, 11, 12, 13])
    for index in (0, 1, 2):
        order.record(index, [1] * 8)
    state = order.state_dict()
    same, edited, unknown = (
        DataOrder(4, 0, max_pass_rate=0.9, digests=digests)
        for digests in ([10, 11, 12, 13], [10, 99, 12, 98], [])
    )
    assert same.load_state_dict(state) == unknown.load_state_dict(state) == set()
    assert same.state_dict() == state
    assert edited.load_state_dict(state) == {1, 3} and edited.drawn == order.drawn

    def rates(order):
        return [order.pass_rate(i) for i in range(4)]

    assert rates(same) == rates(order) == [1, 1, 1, 0] and rates(edited) == [1, 0, 1, 0]
    assert {same.draw()[1] for _ in range(9)} == {3}
    assert {edited.draw()[1] for _ in range(9)} == {1, 3}


def test_an_order_of_another_number_of_problems_is_refused():
    state = DataOrder(3, seed=1).state_dict()
    with pytest.raises(ValueError, match="knows 3 problems"):
        DataOrder(4, seed=1).load_state_dict(state)


# ---- masks and packing


def test_masks_come_from_lengths_when_pad_is_eos():
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


def test_tokens_of_an_older_policy_are_told_apart():
    rollouts = [rollout([1], [5, 6, 7]), rollout([1], [8]), rollout([1], [9, 9])]
    rollouts[0].weight_versions, rollouts[1].weight_versions = [2, 3, 3], [3]
    batch = to_batch(rollouts, weight_version=3)
    assert batch.fresh.tolist() == [[False, True, True], [True, False, False], [False] * 3]


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


def test_the_gsm8k_recipe_is_complete(tmp_path, tokenizer, monkeypatch):
    """It named files that nobody has, of problems that did not ask for a box."""
    answer = "She eats 3 + 4 = <<3+4=7>>7 eggs.\n#### 1,007"
    rows = [{"question": "How many eggs?", "answer": answer}]

    def hub(name, config):
        return {"train": rows, "test": rows} if config == "main" else None

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=hub))
    recipe = read_recipe(ROOT / "recipes/justrl2-qwen2.5-0.5b-gsm8k-1gpu.yaml")
    for name in ("data", "eval_data"):
        (problem,), _ = load_problems(
            recipe[name], tokenizer, 512, prompt_suffix=recipe["prompt_suffix"]
        )
        assert verify("So \\boxed{1007}.", problem.label).correct
        assert (
            "How many eggs?\nReason step by step" in problem.prompt
            and "\\boxed{}" in problem.prompt
        )
