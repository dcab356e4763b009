"""The data pipeline: what each stage drops, what it must not drop, and resumption."""

import json
import random
import re
import runpy
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT

import curate
from config import ConfigError
from curate import CurateConfig
from curation import dedup, rows, rules, solving
from curation.difficulty import find_unlearnable
from curation.label_audit import judge_label
from problems import load_tokenizer
from run.scores import Vote
from verify import Verifier, label_kind

CPU = torch.device("cpu")


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def config(tmp_path, rows=None, **fields):
    if rows is not None:
        fields["data"] = write(tmp_path / "raw.jsonl", rows)
    settings = CurateConfig(output=str(tmp_path / "kept.jsonl"), dtype="float32", **fields)
    settings.check()
    return settings


def run(tmp_path, rows, **fields):
    """(ids of the rows written, {id: reason} of the dropped, report) of a curation."""
    rows = [{"id": i} | row for i, row in enumerate(rows)]
    settings = config(tmp_path, rows, **fields)
    report = curate.curate(settings, CPU)
    dropped = {row["id"]: row["reason"] for row in read(tmp_path / "kept.dropped.jsonl")}
    return [row["id"] for row in read(tmp_path / "kept.jsonl")], dropped, report


NO_SAMPLING = dict(audit_samples=0, samples=0, max_prompt_tokens=1000)


# ---- stage 1: one problem

LONG_ANSWER = "the function is increasing on the whole line and bounded"


@pytest.mark.parametrize(
    ("prompt", "label", "reason"),
    [
        ("Compute $2+3$.", "5", None),
        ("Find all roots of $x^2+x-2$.", "1,-2", "several_values"),
        ("What is the name of the winner?", r"\text{Evelyn}", None),
        ("Find the point.", r"\left( 3, \frac{\pi}{2} \right)", None),
        # Conditions and function values are no parts, factors are none in a label
        ("Let $f$ satisfy (i) $f(1)=1$; (ii) $f(x+1)=2f(x)$. Find $f(5)$.", "16", None),
        ("Given $f(a) = 1$, $f(b) = 2$ and $a(2a+b)$ even, what is $f(a+b)$?", "3", None),
        ("A prime is greater than 2. How many divisors has it?", "2", None),
        ("Factor $x^2-3x+2$.", "(x-1)(x-2)", None),
        ("Simplify the ratio.", "1:2", None),
        ("Let $P(A)=P(B)=P(C)=1/2$ for independent $A,B,C$. Find $P(A \\cap B)$.", "1/4", None),
        # A problem may ask to show something and then for a number
        ("Show that $n^2 \\ge n$. Determine the least $n$ with equality above 0.", "1", None),
        ("Compute it.", "", "empty_label"),
        ("Compute it.", r"\boxed{}", "empty_label"),
        ("Prove that $\\sqrt{2}$ is irrational.", "1", "proof"),
        ("Find the limit.", r"\text{see the solution}", "proof"),
        ("Which? (A) 1 (B) 2 (C) 3", "2", "multiple_choice"),
        ("Which?\nA. 1\nB. 2\nC. 3", "2", "multiple_choice"),
        ("Which of them?", r"\text{(C)}", "multiple_choice"),
        ("Which of them?", "B", "multiple_choice"),
        ("(a) Find $x$. (b) Find $y$.", "5", "multi_part"),
        ("1) Compute $x$.\n2) Compute $y$.", "5", "multi_part"),
        ("Find both.", "(a) 3 (b) 5", "multi_part"),
        ("Compute it.", r"\frac{1}{", "unreadable_label"),
        ("Compute it.", "np.arcsin(10/13)", "unreadable_label"),
        ("What holds?", rf"\text{{{LONG_ANSWER}}}", "prose_label"),
    ],
)
def test_each_reason_has_its_problems_and_spares_their_lookalikes(prompt, label, reason):
    found = rules.examine(prompt, label, *label_kind(label))
    assert (found and found.reason) == reason


def test_no_problem_of_the_embedded_task_is_lost_to_stage_1(tmp_path):
    data, evaluation = str(ROOT / "assets/train.jsonl"), str(ROOT / "assets/eval.jsonl")
    settings = config(tmp_path, data=data, decontaminate=[evaluation], audit_samples=0, samples=0)
    report = curate.curate(settings, CPU)
    assert report["written"] == report["rows"] == 3400
    original = read(ROOT / "assets/train.jsonl")
    assert read(tmp_path / "kept.jsonl") == original


def test_rows_without_prompt_label_or_room_are_dropped(tmp_path):
    rows = [
        {"prompt": "1 a:+1", "label": 2, "kept": [1, "a"]},
        {"prompt": "", "label": "2"},
        {"label": "2"},
        {"prompt": 7, "label": "2"},
        {"prompt": [{"role": "system", "content": "3"}, {"role": "user", "content": " "}]},
        {"prompt": "1 a:+2"},
        {"prompt": "1 " * 40, "label": "3"},
    ]
    kept, dropped, report = run(tmp_path, rows, **NO_SAMPLING | dict(max_prompt_tokens=50))
    assert kept == [0] and read(tmp_path / "kept.jsonl") == [{"id": 0} | rows[0]]
    expected = ["no_prompt"] * 4 + ["empty_label", "long_prompt"]
    assert dropped == dict(enumerate(expected, 1))
    stage = report["stages"]["1 verifiable"]
    assert stage["rows"] == 7 and stage["left"] == 1
    assert stage["dropped"]["no_prompt"]["rows"] == 4
    assert all(found["examples"] for found in stage["dropped"].values())
    assert json.loads((tmp_path / "kept.report.json").read_text()) == json.loads(json.dumps(report))


# ---- stage 1: repeated problems

AREA = (
    "A right triangle has legs of length 6 and 8 inches. A circle is drawn around the triangle so "
    "that all three corners lie on it. What is the area of this circle, in square inches?"
)
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def other_numbers(text, a, b):
    return text.replace("6", str(a)).replace("8", str(b))


def test_of_equally_near_texts_the_earliest_comes_first_whatever_the_hash_seed():
    # Sets of hashes have another order in every process: which row was named changed by chance.
    texts = []
    for block in range(12):
        words = [f"w{block}x{k}" for k in range(24)]
        texts += [words[:12], words[12:], words]
    found = list(dedup.near(texts, 5, 0.6, 20))
    assert found[2::3] == [[i, i + 1] for i in range(0, 36, 3)]


def test_near_duplicates_are_found_and_templates_spared(tmp_path):
    rows = [
        {"prompt": AREA, "label": "25\\pi"},
        {"prompt": AREA.upper().replace(" 6 ", " $6$ ") + "  ", "label": "25\\pi"},
        {"prompt": AREA.replace("drawn around", "circumscribed about"), "label": "25 \\pi"},
        {"prompt": other_numbers(AREA, 5, 12), "label": "\\frac{169\\pi}{4}"},
        {"prompt": other_numbers(AREA, 5, 12).replace("area", "circumference"), "label": "13\\pi"},
        # The same words but one, the same numbers, another question: the label tells
        {"prompt": AREA.replace("area of", "circumference of"), "label": "10\\pi"},
        {"prompt": "Compute $2 + 3$.", "label": "5"},
        {"prompt": "Compute $2 - 3$.", "label": "-1"},
        {"prompt": "Compute $2-3$", "label": "-1"},
        {"prompt": "Compute $4 + 3$.", "label": "7"},
        {"prompt": "Compute $4 + 3$", "label": "8"},
        {"prompt": "\u2603", "label": "1"},
        {"prompt": "\u2602", "label": "2"},
    ]
    kept, dropped, _ = run(tmp_path, rows, **NO_SAMPLING)
    assert dropped == {
        1: "duplicate", 2: "near_duplicate", 8: "duplicate", 9: "conflict", 10: "conflict"
    }  # fmt: skip
    assert kept == [0, 3, 4, 5, 6, 7, 11, 12]


def test_decontamination_finds_reworded_problems_behind_an_instruction(tmp_path):
    numbered = [
        {"prompt": other_numbers(AREA, 3 * i, 4 * i) + INSTRUCTION, "label": str(i)}
        for i in range(2, 40)
    ]
    rows = [
        {"prompt": AREA.replace("drawn around", "circumscribed about") + INSTRUCTION, "label": "1"},
        {"prompt": "Compute 2 + 3." + INSTRUCTION, "label": "5"},
        {"prompt": "Compute 2 + 4." + INSTRUCTION, "label": "6"},
        *numbered[1:],
    ]
    evaluation = [{"question": AREA}, {"question": "compute $2+3$"}]
    files = [write(tmp_path / "eval.jsonl", evaluation)]
    kept, dropped, _ = run(tmp_path, rows, decontaminate=files, **NO_SAMPLING)
    assert dropped == {0: "contaminated", 1: "contaminated"} and len(kept) == len(rows) - 2


def brute_force(texts, n, threshold, common):
    """Pairs by the definition, every text against every earlier one."""
    grams = [{tuple(t[i : i + n]) for i in range(max(1, len(t) - n + 1))} for t in texts]
    known = [{g for g in own if sum(g in other for other in grams) < common} for own in grams]
    pairs = set()
    for i, a in enumerate(known):
        for j, b in enumerate(known[:i]):
            digits = [sorted(w for w in texts[k] if w in "0123456789+-<>") for k in (i, j)]
            if a & b and len(a & b) >= threshold * min(len(a), len(b)) and digits[0] == digits[1]:
                pairs.add((i, j))
    return pairs


@pytest.mark.parametrize("seed", range(5))
def test_overlap_equals_brute_force(seed):
    rng = random.Random(seed)
    texts = []
    for _ in range(80):
        words = rng.choices("abcdefgh12+", k=rng.randint(1, 14))
        if texts and rng.random() < 0.5:  # a copy of an earlier text with a few words replaced
            words = list(rng.choice(texts))
            for _ in range(rng.randint(0, 2)):
                words[rng.randrange(len(words))] = rng.choice("abcdefgh12+")
        texts.append(words)
    for n, threshold, common in ((2, 0.6, 6), (3, 0.5, 80), (5, 0.8, 3)):
        found = dedup.near(texts, n, threshold, common)
        pairs = {(i, j) for i, near in enumerate(found) for j in near}
        assert pairs == brute_force(texts, n, threshold, common)
        assert pairs


def test_rows_that_share_a_template_do_not_overlap_and_take_near_linear_time(timed):
    def seconds(rows):
        rng = random.Random(0)
        texts = [
            dedup.tokens(other_numbers(AREA, rng.randrange(10**6), rng.randrange(10**6)))
            for _ in range(rows)
        ]
        start = time.process_time()
        assert not any(dedup.near(texts, 5, 0.6, 20))
        return time.process_time() - start

    seconds(100)
    few = seconds(500)
    if timed:  # a quadratic one needs 64 times as long
        assert seconds(4000) < 16 * few + 0.5


# ---- stage 2: the verdict on a label


class EqualText:
    """A grader that knows texts alone."""

    def equal(self, a, b):
        return a == b


@pytest.mark.parametrize(
    ("by_model", "verdict"),
    [
        ([[["4", 8, 1]]], "confirmed"),
        ([[["4", 6, 1], ["5", 4, 0]]], "confirmed"),
        ([[["5", 8, 0]]], "doubtful"),
        ([[["5", 6, 0], ["6", 2, 0], ["4", 2, 1]]], "doubtful"),
        ([[["5", 6, 0], ["4", 3, 1]]], "disputed"),
        ([[["5", 5, 0], ["6", 5, 0]]], "undecided"),
        ([[["5", 5, 0]]], "undecided"),  # five of ten: the others gave no answer
        ([[]], "undecided"),
        ([[["5", 8, 0]], [["5", 9, 0]]], "doubtful"),
        ([[["5", 8, 0]], [["6", 9, 0]]], "undecided"),
        ([[["5", 8, 0]], [["4", 9, 1]]], "undecided"),
        ([[["4", 8, 1]], [["4", 9, 1]]], "confirmed"),
        ([[["4", 8, 1]], [["4", 4, 1]]], "undecided"),
    ],
)
def test_a_label_falls_only_to_one_voice(by_model, verdict):
    votes = [[Vote(*vote) for vote in of_model] for of_model in by_model]
    found = judge_label(votes, EqualText(), samples=10, majority=0.6, keep_hard=0.25)
    assert found == verdict


def test_votes_group_answers_by_value_and_leave_out_what_gives_none():
    def said(answer, reason, correct=0.0):
        return SimpleNamespace(answer=answer, reason=reason, correct=correct)

    group = [
        said("0.5", "ok", 1.0),
        said("2", "wrong"),
        said("\\frac{4}{2}", "wrong"),
        said("\\frac12", "ok", 1.0),
        said("2.0", "wrong"),
        said("3", "wrong"),
        said(None, "no_box"),
        said("0.5", "hedge"),
    ]
    with Verifier(1) as grader:
        votes = solving.votes_of(group, grader)
    assert votes == [("2", 3, 0), ("0.5", 2, 1), ("3", 1, 0)]
    assert solving.share_right(votes, len(group)) == 0.25


def test_models_see_the_suffix_and_the_output_does_not(tmp_path):
    raw = [{"prompt": "What is 2+3?", "label": "5"}]
    settings = config(tmp_path, raw, prompt_suffix="Box it.", **NO_SAMPLING)
    tokenizer = load_tokenizer(settings.model)
    (row,) = rows.load_rows(settings.data, "", "")
    seen = solving.make_problem(0, row, tokenizer, settings.prompt_suffix).prompt
    assert "What is 2+3?\nBox it." in seen
    curate.curate(settings, CPU)
    assert read(tmp_path / "kept.jsonl") == raw
    with pytest.raises(ConfigError, match="other prompt_suffix"):
        curate.curate(config(tmp_path, prompt_suffix="", data=settings.data, **NO_SAMPLING), CPU)


def test_other_kinds_are_left_out_under_their_own_reason(tmp_path):
    rows = [{"prompt": "What is 2+3?", "label": "5", "verifier": "math"}]
    rows += [{"prompt": "Which letter?", "label": "C", "verifier": "choice"}]
    rows += [{"prompt": "Write.", "label": {"words": [1, 9]}, "verifier": "instruction"}]
    kept, dropped, _ = run(tmp_path, rows, **NO_SAMPLING)
    assert kept == [0] and dropped == {1: "other_kind", 2: "other_kind"}


# ---- stage 3: difficulty


def test_band_and_share_of_the_unsolved():
    # 16 in the band, 4 always solved, 10 never: 6 of these with a confirmed label
    rates = [0.5] * 16 + [1.0] * 4 + [0.0] * 10
    votes = {i: [Vote("1", int(8 * rate), 1)] for i, rate in enumerate(rates)}

    def dropped(unsolved_share, min_pass_rate=0.0, seed=0):
        audits = ["confirmed" if i < 26 else "undecided" for i in range(len(rates))]
        noted = [SimpleNamespace(notes={"label_audit": audit}) for audit in audits]
        return find_unlearnable(
            noted,
            range(len(rates)),
            votes,
            samples=8,
            min_pass_rate=min_pass_rate,
            max_pass_rate=1.0,
            unsolved_share=unsolved_share,
            seed=seed,
        )

    found = dropped(unsolved_share=0.2)
    reasons = [drop.reason for drop in found.values()]
    assert reasons.count("too_easy") == 4 and reasons.count("too_hard") == 4
    assert reasons.count("hard_surplus") == 2
    assert sum(i not in found for i in range(20, 26)) == 4  # 4 of 20 rows
    assert found == dropped(unsolved_share=0.2)
    assert found != dropped(unsolved_share=0.2, seed=3)
    assert len(dropped(unsolved_share=0.0)) == 14
    assert len(dropped(min_pass_rate=0.5, unsolved_share=0.0)) == 30


# ---- the whole, on the embedded task


@pytest.fixture(scope="module")
def sure_problems():
    """Short problems whose facts the base model knows, and one whose fact it has wrong."""
    script = runpy.run_path(str(ROOT / "assets/make_assets.py"))
    slips, rng = script["make_slips"](), random.Random(0)
    sure, unsure = [], []
    while len(sure) < 60 or len(unsure) < 4:
        start, operations = script["draw_chain"](rng, 2)
        value, rates = start, []
        for _, sign, operand in operations:
            rates.append(slips[value, sign, operand])
            value = script["apply_operation"](value, sign, operand)
        row = {"prompt": script["write_prompt"](start, operations), "label": str(value)}
        if max(rates) < 0.02:
            sure.append(row)
        elif sorted(rates)[0] < 0.01 and max(rates) > 0.6:
            unsure.append(row)
    return sure[:60], unsure[:4]


def test_planted_wrong_labels_are_caught_and_good_ones_kept(tmp_path, sure_problems):
    rows, unsure = sure_problems
    wrong = set(random.Random(1).sample(range(60), 9))
    planted = [
        row | {"label": str((int(row["label"]) + 4 * (i in wrong)) % 10)}
        for i, row in enumerate(rows)
    ]
    kept, dropped, report = run(tmp_path, planted + unsure, samples=0)
    doubtful = {i for i, reason in dropped.items() if reason == "doubtful_label"}
    assert len(doubtful & wrong) >= 0.9 * 9
    assert len(doubtful - wrong - {60, 61, 62, 63}) <= 0.03 * 51
    # What the audit model is sure of and wrong about looks the same to it: why it must be strong
    assert doubtful & {60, 61, 62, 63}
    assert sum(report["stages"]["2 label audit"]["noted"]["label_audit"].values()) == 64
    written = read(tmp_path / "kept.jsonl")
    assert all(row["label"] == (planted + unsure)[row["id"]]["label"] for row in written)
    assert {row["label_audit"] for row in written} <= {"confirmed", "undecided", "disputed"}


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path, sure_problems, monkeypatch):
    rows = sure_problems[0][:24]
    fields = dict(chunk=8, audit_samples=2, samples=2, max_pass_rate=1.0, audit_majority=0.6)
    whole = tmp_path / "whole"
    whole.mkdir()
    calls, evaluate = [], solving.evaluate

    def counted(*arguments, **options):
        if len(calls) == limit:
            raise KeyboardInterrupt
        calls.append(1)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(solving, "evaluate", counted)
    limit = 99
    run(whole, rows, **fields)
    assert len(calls) == 6  # three chunks for the audit, three for the difficulty
    for stops_after in (0, 2, 3, 5):
        calls.clear()
        limit = stops_after
        part = tmp_path / f"part{stops_after}"
        part.mkdir()
        with pytest.raises(KeyboardInterrupt):
            run(part, rows, **fields)
        with open(part / "kept.state.jsonl", "a") as state:
            state.write('{"audit 0 by x": {"1": [["4"')  # the kill cut a line
        limit = 99
        run(part, rows, **fields)
        assert len(calls) == 6
        for name in ("kept.jsonl", "kept.dropped.jsonl", "kept.state.jsonl"):
            assert (part / name).read_bytes() == (whole / name).read_bytes()
    # Other rules take no new sample; other samples refuse the old state
    calls.clear()
    run(part, rows, **fields | dict(max_pass_rate=0.5, unsolved_share=0.5))
    assert not calls
    with pytest.raises(ConfigError, match="temperature"):
        run(part, rows, **fields | dict(temperature=0.5))
    with pytest.raises(ConfigError, match="data"):
        run(part, rows[:-1], **fields)


# ---- bad input


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(output=""), "--output"),
        (dict(data="a.jsonl", output="a.jsonl"), "--output"),
        (dict(data="a.dropped.jsonl", output="a.jsonl"), "overwrite"),
        (dict(audit_majority=0.5), "--audit-majority"),
        (dict(unsolved_share=1.0), "--unsolved-share"),
        (dict(min_pass_rate=0.9, max_pass_rate=0.5), "--min-pass-rate"),
        (dict(think="maybe"), "--think"),
        (dict(ngram=0), "--ngram"),
        (dict(verifier_workers=0), "--verifier-workers is 0; it must be above 0"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        CurateConfig(**dict(output="out.jsonl") | fields).check()
    assert "\n" not in str(error.value)


def test_command_line_errors_name_file_and_flag(tmp_path):
    data, output = write(tmp_path / "d.jsonl", [{"q": "1 a:+1", "a": "2"}]), tmp_path / "o.jsonl"
    command = ["--data", data, "--output", str(output), "--audit-samples=0", "--samples=0"]
    with pytest.raises(SystemExit, match="--prompt-key"):
        curate.main(command)
    with pytest.raises(SystemExit, match=r"nowhere\.jsonl"):
        curate.main([*command, "--data", "nowhere.jsonl"])
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(SystemExit, match=r"empty\.jsonl is empty"):
        curate.main([*command, "--data", empty])
    assert not list(tmp_path.glob("o.*"))
    columns = ["--prompt-key", "q", "--label-key", "a"]
    curate.main([*command, *columns])
    assert read(output) == [{"q": "1 a:+1", "a": "2"}]
    (tmp_path / "o.state.jsonl").unlink()
    with pytest.raises(SystemExit, match="exists"):  # not ours to overwrite
        curate.main([*command, *columns])
    data = write(tmp_path / "d.jsonl", [{"q": "1 a:+1", "a": ""}])
    with pytest.raises(SystemExit, match="no problem is left"):
        curate.main([*command, *columns, "--output", str(tmp_path / "p.jsonl")])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--decontaminate nowhere.jsonl", r"nowhere\.jsonl does not exist"),
        ("--audit-model nowhere/model", "nowhere/model is neither"),
        ("--output /proc/x/o.jsonl", r"--output /proc/x/o\.jsonl cannot be written"),
    ],
)
def test_what_a_later_stage_needs_is_missed_before_the_first(flags, words, tmp_path, monkeypatch):
    """A missing --audit-model was found after the whole first stage."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    not_to_be_reached = curate.Stage(None, "")
    monkeypatch.setitem(curate.STAGES, "1 verifiable", not_to_be_reached)
    command = ["--output", str(tmp_path / "o.jsonl"), *flags.split()]
    with pytest.raises(SystemExit, match=words):
        curate.main(command)


def test_every_reason_is_described():
    sources = "".join(file.read_text() for file in (ROOT / "curation").glob("*.py"))
    used = set(re.findall(r'Drop\("(\w+)"', sources))
    assert used | {"hard_surplus"} == set(rows.DROP_REASONS) and rows.Drop("x").detail == ""
