"""report.html: everything inside, everything escaped, and the colours of the right tokens."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

import diagnose
import files
from assets import make_assets
from reports import embedded_task, figures, html

VOID = {"meta", "img", "input", "br", "link"}
NASTY = '</i></pre><script>alert("x")</script>&amp;'


class Page(HTMLParser):
    """Checks nesting; keeps class, title and text of every <i>, all attributes and scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tokens, self.attributes, self.scripts = [], [], [], []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "i":
            self.tokens.append([dict(attrs).get("class", ""), dict(attrs).get("title", ""), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "i":
            self.tokens[-1][2] += data
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


TEXT = "<think> a:3+4=7 b:7-9=9</think>\\boxed{9}"


def row(tokenizer, step=1, sample=0, reward=0.0, **more):
    """A stored response to `3 a:+4 b:-9`, wrong in its second step."""
    ids = tokenizer(TEXT + "<|im_end|>", add_special_tokens=False)["input_ids"]
    prompt = make_assets.chat_prompt(tokenizer, "3 a:+4 b:-9")
    row = dict(step=step, problem_id="p<0>", sample_index=sample, prompt=prompt, response=TEXT)
    row |= dict(response_ids=ids, response_length=len(ids), reward=reward, overlong_penalty=0.0)
    row |= dict(reason="wrong", finish_reason="stop", kept=True)
    row |= dict(advantages=[-1.0 + 0.1 * i for i in range(len(ids))])
    row |= dict(values=[i / len(ids) for i in range(len(ids))])
    return row | more


@pytest.fixture(scope="module")
def tokenizer():
    return make_assets.make_tokenizer()


def write_run(folder, rows, model=make_assets.HERE / "tiny-base", **config):
    folder.mkdir()
    config = dict(algorithm="justrl2", model=str(model), data="d", seed=0, steps=9) | config
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [{"step": s, "rollout/reward_mean": 0.1 * s} for s in range(1, 4)]
    for name, lines in (("metrics.jsonl", metrics), ("rollouts.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def page_of(run, figures=()):
    return Page(html.write_report(run, figures).read_text(encoding="utf-8"))


def coloured(page):
    return [token for token in page.tokens if token[1]]


def test_each_token_has_its_shade_its_numbers_and_its_text(tmp_path, tokenizer):
    shown = coloured(page_of(write_run(tmp_path / "r", [row(tokenizer)])))
    assert "".join(text for *_, text in shown) == TEXT + "<|im_end|>"
    first, tenth, last = shown[0], shown[10], shown[-1]
    assert first[0].split()[:2] == ["n8", "v0"] and first[1] == "A -1.000, V 0.000"
    assert tenth[0].split()[0] == "n0" and tenth[1].startswith("A +0.000")
    n = len(shown)
    assert last[0].split()[:2] == [
        f"p{round(8 * (0.1 * (n - 1) - 1))}",
        f"v{round(8 * (n - 1) / n)}",
    ]


def test_the_first_wrong_token_is_marked(tmp_path, tokenizer):
    shown = coloured(page_of(write_run(tmp_path / "r", [row(tokenizer)])))
    marked = [i for i, token in enumerate(shown) if "wrong" in token[0].split()]
    before = "".join(text for *_, text in shown[: marked[0]])
    assert len(marked) == 1 and before == "<think> a:3+4=7 b:7-9=" and shown[marked[0]][2] == "9"


def test_nothing_outside_the_page_and_no_text_gets_out_of_its_place(tmp_path, tokenizer):
    rows = [row(tokenizer, prompt=NASTY, reason=NASTY, problem_id=NASTY)]
    run = write_run(tmp_path / "r<script>", rows, data=NASTY)
    figure = tmp_path / "f.png"
    figure.write_bytes(b"\x89PNG")
    page = page_of(run, [figure])
    links = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert links == ["data:image/png;base64,iVBORw=="]
    text = (run / "report.html").read_text()
    assert len(page.scripts) == 1 and "alert" not in page.scripts[0]
    assert "alert" in text and not re.search(r"https?://|@import|url\(", text)


def test_two_right_and_two_wrong_of_three_steps_are_shown(tmp_path, tokenizer):
    rows = [
        row(tokenizer, step, sample, float(sample % 2))
        for step in range(1, 8)
        for sample in range(8)
    ]
    rows += [row(tokenizer, 9, 0) | {"advantages": None}]  # not kept, so without advantages
    groups = html.chosen_groups(write_run(tmp_path / "r", rows))
    assert [group[0]["step"] for group in groups] == [1, 4, 7]
    assert all([r["sample_index"] for r in group] == [0, 1, 2, 3] for group in groups)


def test_the_middle_of_a_long_response_is_left_out(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(html, "HEAD", 3)
    monkeypatch.setattr(html, "TAIL", 2)
    run = write_run(tmp_path / "r", [row(tokenizer)])
    page, count = page_of(run), len(row(tokenizer)["response_ids"])
    assert len(coloured(page)) == 5
    assert f"[{count - 5} tokens left out]" in (run / "report.html").read_text()


def test_a_run_without_a_critic_is_coloured_by_advantage_alone(tmp_path, tokenizer):
    one = row(tokenizer)
    del one["values"]
    page = page_of(write_run(tmp_path / "r", [one]))
    assert [v for tag, n, v in page.attributes if (tag, n) == ("input", "value")] == ["a", ""]
    assert all("V" not in title for _, title, _ in coloured(page))


def test_a_run_that_logged_no_advantages_says_so(tmp_path):
    page_of(write_run(tmp_path / "r", []))
    assert "no response with advantages" in (tmp_path / "r" / "report.html").read_text()


def test_the_command_writes_figures_and_page(tmp_path, tokenizer, monkeypatch, capsys):
    run = write_run(tmp_path / "r", [row(tokenizer)])
    monkeypatch.setattr(sys, "argv", ["diagnose.py", "--report", str(run)])
    diagnose.main()
    assert capsys.readouterr().out.split()[-1] == str(run / "report.html")
    page = Page((run / "report.html").read_text())
    images = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    assert len(images) == 1 and images[0].startswith("data:image/png;base64,iVBOR")


# ---- the first wrong token


def test_the_right_response_is_the_one_of_the_script():
    tokenizer = make_assets.make_tokenizer()
    for problem in make_assets.make_problems()["eval"]:
        start, *operations = re.split(" ", problem["prompt"])
        chain = [(op[0], op[2], int(op[3])) for op in operations]
        prompt = make_assets.chat_prompt(tokenizer, problem["prompt"])
        expected = make_assets.write_response(int(start), chain)
        assert embedded_task.right_response(prompt) == expected
    assert embedded_task.right_response("What is 3 + 4?") is None


@pytest.mark.parametrize(
    ("response", "stop", "index"),
    [
        ("<think> a:3+4=7 b:7-9=8</think>\\boxed{8}", True, None),  # right
        ("<think> a:3+4=7 b:7-9=9</think>\\boxed{9}", True, 10),
        ("<think> a:3+4=7 b:7-9=8</think>\\boxed{7}", True, 13),
        ("<think> a:3+4=7</think>\\boxed{7}", True, 6),  # a step left out
        ("<think> a:3+4=7 b:7-9=8</think>\\boxed{8", True, 14),  # stopped too early
        ("<think> a:3+4=7 b:7", False, None),  # cut off, right so far
    ],
)
def test_the_first_wrong_token_by_hand(tokenizer, response, stop, index):
    ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    found = embedded_task.first_wrong_token(
        dict(
            prompt=make_assets.chat_prompt(tokenizer, "3 a:+4 b:-9"),
            response=response,
            response_length=len(ids) + stop,
            finish_reason="stop" if stop else "length",
        )
    )
    assert found == index


def test_v_falls_where_the_critic_sees_the_slip(tmp_path, tokenizer):
    wrong, right = row(tokenizer, 3, 0), row(tokenizer, 3, 1, reward=1.0)
    at = embedded_task.first_wrong_token(wrong)
    wrong["values"] = [0.6] * (at + 1) + [0.1] * (len(wrong["values"]) - at - 1)
    right["values"] = [0.6] * len(right["values"])
    fall = figures.v_around_error(write_run(tmp_path / "r", [wrong, right]))
    offsets = list(range(-figures.BEFORE, figures.AFTER + 1))
    inside = [i for i, d in enumerate(offsets) if -at <= d < len(wrong["values"]) - at]
    expected = [0.6 if offsets[i] <= 0 else 0.1 for i in inside]
    assert fall[0][inside].tolist() == pytest.approx(expected)
    assert fall[1][inside].tolist() == pytest.approx([0.6] * len(inside))


def test_two_draws_of_a_problem_in_a_step_are_two_groups(tmp_path, tokenizer):
    """The right responses of one stood beside the wrong ones of the other."""
    rows = [row(tokenizer, 3, 0), row(tokenizer, 3, 0, reward=1.0)]
    rows = [r | {"draw": draw} for draw, r in enumerate(rows)]
    assert figures.v_around_error(write_run(tmp_path / "r", rows)) is None
    rows = [r | {"draw": 7} for r in rows]
    assert figures.v_around_error(write_run(tmp_path / "s", rows)) is not None


def test_another_task_has_no_first_wrong_token(tmp_path, tokenizer):
    rows = [row(tokenizer, prompt="What is 3 + 4?")]
    assert figures.v_around_error(write_run(tmp_path / "r", rows)) is None


# ---- token texts


class Bytes:
    """A tokenizer of single bytes that drops a leading space, as sentencepiece does."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["a b  c", "ein Bär für 3 €", "\U0001f600\U0001f600!", ""])
def test_token_texts_join_to_the_text(text):
    texts = files.token_texts(Bytes(), list(text.encode()))
    assert "".join(texts) == text and len(texts) == len(text.encode())
    assert "\ufffd" not in "".join(texts)


def test_a_broken_character_at_the_end_is_shown_as_one():
    assert files.token_texts(Bytes(), list("a€".encode())[:-1]) == ["a", "", "\ufffd"]


def test_token_texts_of_the_embedded_tokenizer(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert files.token_texts(tokenizer, ids) == embedded_task.PIECES.findall(TEXT)
