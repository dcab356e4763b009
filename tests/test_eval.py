"""The evaluation script from flags to files: what is counted, grouped, forced, picked, compared."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

import rewards
import train
import verify
from config import parse_options
from critic import Critic
from data import Problem, Rollout, pack
from eval import Options, main
from files import part_of
from model import Transformer
from problems import load_problems, load_tokenizer
from run.best_of_n import final_values
from run.forcing import CLOSING
from run.scores import paired_differences, resamples, score_problem

TINY = ROOT / "assets/tiny-base"
SOURCES = "verify verifier/latex verifier/values verifier/algebra rewards verifier/sandbox".split()
PROBLEMS = [json.loads(line) for line in open(ROOT / "assets/eval.jsonl")]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run(folder, *flags, name="out"):
    """Report and responses of an evaluation of the embedded model."""
    out, responses = folder / f"{name}.json", folder / f"{name}.jsonl"
    main(["--output", str(out), "--save-responses", str(responses), *map(str, flags)])
    return json.loads(out.read_text()), [json.loads(line) for line in open(responses)]


def sets(report, role="model"):
    return report[role]["sets"]


@pytest.fixture(scope="module")
def grader():
    with rewards.Verifier(num_workers=1) as grader:
        yield grader


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two sets of odd sizes, responses of all of them, 7 slots."""
    folder = tmp_path_factory.mktemp("eval")
    files = [write(folder / f"{n}.jsonl", PROBLEMS[:n]) for n in (11, 4)]
    return run(folder, "--data", *files, "--n", 5, "--slots", 7), files


# ---- counting


def test_every_response_of_every_problem_is_counted(report):
    (report, rows), files = report
    for file, problems in zip(files, (11, 4), strict=True):
        result = sets(report)[file]
        assert (result["problems"], result["responses"]) == (problems, 5 * problems)
        mine = {(r["problem_id"], r["sample_index"]): r for r in rows if r["set"] == file}
        assert len(mine) == 5 * problems == sum(r["set"] == file for r in rows)
        rewards, lengths = (
            [r[key] for r in mine.values()] for key in ("reward", "response_length")
        )

        def value(name, scores=result["scores"]):
            return scores[name]["value"]

        assert value("avg@5") == pytest.approx(sum(rewards) / len(rewards))
        assert value("pass@1") == value("maj@1") == pytest.approx(value("avg@5"))
        assert value("length") == pytest.approx(sum(lengths) / len(lengths))
        solved = {id for (id, _), r in mine.items() if r["reward"]}
        assert value("pass@5") == pytest.approx(len(solved) / problems)
        for row in result["per_problem"]:
            verdicts = [r["reason"] for (id, _), r in mine.items() if id == row["id"]]
            assert sum(row["verdicts"].values()) == 5 and row["right"] == verdicts.count("ok")
            assert sum(row["answers"].values()) <= 5


def test_the_settings_and_the_verifiers_version_are_in_the_report_and_above_the_table(
    report, tmp_path, capsys
):
    settings = report[0][0]["settings"]
    sources = b"".join((ROOT / f"{n}.py").read_bytes() for n in SOURCES)
    assert settings["verifier"] == hashlib.sha256(sources).hexdigest()[:12]
    wanted = dict(n=5, temperature=1.0, max_response_tokens=128, seed=0, dtype="float32")
    assert {key: settings[key] for key in wanted} == wanted
    assert settings["bands"] == {"level": 0.95, "resamples": 2000, "over": "problems", "seed": 0}
    file = write(tmp_path / "a.jsonl", PROBLEMS[:2])
    run(tmp_path, "--data", file, "--n", 2, "--temperature", 0.5, "--seed", 7, "--top-p", 0.9)
    table = capsys.readouterr().out
    words = "2 problems x 2 = 4 responses", "temperature 0.5, top_p 0.9, 128", "seed 7", "avg@2"
    assert all(word in table for word in [*words, settings["verifier"]])


def test_accuracy_equals_the_one_that_training_logs(tmp_path, no_figures):
    file, budget = write(tmp_path / "a.jsonl", PROBLEMS[:9]), ["--max-response-tokens", "64"]
    flags = "--algorithm grpo --steps 1 --no-dynamic-sampling --prompts-per-step 2 --group-size 2"
    flags += f" --eval-samples 3 --eval-data {file} --output-dir {tmp_path / 'run'}"
    train.main([*flags.split(), *budget])
    logged = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    report, _ = run(tmp_path, "--model", tmp_path / "run", "--data", file, "--n", 3, *budget)
    scores = sets(report)[file]["scores"]
    assert 0 < scores["avg@3"]["value"] == pytest.approx(logged["eval/accuracy"])
    assert scores["pass@2"]["value"] == pytest.approx(logged["eval/pass_at_2"])


# ---- answers


def scored(grader, *texts, label="1/2"):
    """score_problem of made-up responses, graded in this process."""
    problem = Problem("p", 0, "", [1], label)
    group = [Rollout(problem, 0, j, 0, [2], text=text) for j, text in enumerate(texts)]
    for r in group:
        r.correct, r.reason, r.answer = verify.verify(r.text, label)
    return score_problem(group, grader)


def test_answers_are_grouped_by_value_and_only_answers_vote(grader):
    texts = ["\\boxed{0.5}", "\\boxed{3}", "\\boxed{\\frac{1}{2}}", "no box", "\\boxed{3.0}"]
    texts += ["\\boxed{1} or \\boxed{2}", "\\boxed{}", "<think>\\boxed{3}", "\\boxed{east}"]
    row = scored(grader, *texts)
    assert list(row["answers"].items()) == [("0.5", 2), ("3", 2), ("east", 1)]
    assert row["right"] == 2 and row["verdicts"]["hedge"] == row["verdicts"]["empty"] == 1
    assert row["scores"]["maj@9"] == 0.5 and row["scores"]["pass@9"] == 1


def test_classes_do_not_grow_by_their_later_members(grader):
    # 50% is read as 1/2 or as 50, which are not equal: it must not join them.
    row = scored(grader, *(f"\\boxed{{{x}}}" for x in ("0.5", "50\\%", "50", "1/2")))
    assert row["answers"] == {"0.5": 3, "50": 1}


def test_answers_of_another_kind_are_compared_by_its_own_rule(grader):
    problem = Problem("p", 0, "", [1], "A", "choice")
    group = [Rollout(problem, 0, j, 0, [2]) for j in range(4)]
    for r, answer in zip(group, ("B", "(a)", "A", "b."), strict=True):
        r.correct, r.reason, r.answer = rewards.choice(f"\\boxed{{{answer}}}", "A")
    row = score_problem(group, grader)
    assert row["answers"] == {"B": 2, "(a)": 2} and row["scores"]["maj@4"] == 0.5


def test_part_scores_count_in_avg_and_only_whole_ones_are_right(grader):
    problem = Problem("p", 0, "", [1], "{}", "instruction")
    scores = [(1.0, "ok"), (0.75, "unmet"), (0.5, "unmet"), (0.0, "empty")]
    group = [
        Rollout(problem, 0, j, 0, [2], correct=score, reason=reason)
        for j, (score, reason) in enumerate(scores)
    ]
    row = score_problem(group, grader, vote=False, finals=[0.1, 0.9, 0.2, 0.3])
    assert row["right"] == 1 and row["scores"]["avg@4"] == 2.25 / 4
    assert row["scores"]["pass@1"] == 0.25 and row["scores"]["best@4"] == 0.75
    assert "maj@4" not in row["scores"] and row["answers"] == {}


def test_kinds_without_an_answer_have_no_majority(tmp_path, same_model, capsys):
    rows = [
        PROBLEMS[0],
        {"prompt": "Say it.", "label": {"words": [1, 999]}, "verifier": "instruction"},
    ]
    file = write(tmp_path / "a.jsonl", rows)
    report, _ = run(tmp_path, "--data", file, "--n", 2, "--compare", same_model)
    assert not any(name.startswith("maj") for name in sets(report)[file]["scores"])
    assert "no maj@k" in capsys.readouterr().out


# ---- truncated sampling


def test_truncation_flags_reach_every_draw(tmp_path):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:3])
    flags = "--data", file, "--n", 2, "--max-response-tokens", 24, "--force-budget"

    def responses(*more):
        return [r["response_ids"] for r in run(tmp_path, *flags, *more)[1]]

    greedy, whole = responses("--temperature", 0), responses()
    assert whole != greedy
    for flag, value in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1)):
        assert responses(flag, value) == greedy
    assert run(tmp_path, *flags, "--top-k", 5)[0]["settings"]["top_k"] == 5


# ---- budget forcing


def test_a_forced_response_keeps_its_tokens_and_gets_an_answer(tmp_path):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:6])
    flags = "--data", file, "--n", 3, "--max-response-tokens", 24, "--answer-tokens", 6
    plain, cut = run(tmp_path, *flags, name="plain")
    forced, rows = run(tmp_path, *flags, "--force-budget", name="forced")
    closing = load_tokenizer(TINY)(CLOSING, add_special_tokens=False)["input_ids"]
    changed = 0
    for before, after in zip(cut, rows, strict=True):
        ids = after["response_ids"]
        assert ids[: len(before["response_ids"])] == before["response_ids"]
        assert len(after["rollout_logprobs"]) == len(ids) == after["response_length"]
        if before["finish_reason"] == "stop" or "</think>" in before["response"]:
            assert after == before
        else:
            changed += 1
            assert ids[24 : 24 + len(closing)] == closing and len(ids) <= 30 + len(closing)
            assert after["response"].startswith(before["response"] + CLOSING)
            assert before["reason"] == "no_think_end" != after["reason"]
    assert changed > 9

    def value(report, name):
        return sets(report)[file]["scores"][name]["value"]

    assert value(forced, "forced") == pytest.approx(changed / 18)
    assert value(forced, "truncated") < value(plain, "truncated")
    assert forced["settings"]["force_budget"] and "forced" not in sets(plain)[file]["scores"]


def test_forcing_needs_thinking_tags(tmp_path, random_tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(random_tiny_model, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("</think>", "</other>"))
    with pytest.raises(SystemExit, match="--force-budget.*</think>"):
        main(["--model", str(folder), "--force-budget"])


# ---- best of n


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory):
    """A critic with a random head."""
    torch.manual_seed(0)
    critic = Critic.from_policy(TINY, 0.5)
    torch.nn.init.normal_(critic.value_head.weight)
    folder = tmp_path_factory.mktemp("critic")
    critic.save_pretrained(folder)
    return folder


def test_final_values_are_those_of_the_state_before_the_last_token(critic_folder):
    critic = Critic.from_pretrained(critic_folder).requires_grad_(False)
    problem = Problem("p", 0, "", [5, 6, 7], "1")
    group = [Rollout(problem, 0, j, 0, ids) for j, ids in enumerate(([8], [9, 10, 3], [11] * 9))]
    for budget in (1, 8, 1000):
        (values,) = final_values(critic, [group], budget)
        for r, value in zip(group, values, strict=True):
            seen = torch.tensor(problem.prompt_ids + r.response_ids[:-1])
            lengths = torch.tensor([0, len(seen)], dtype=torch.int32)
            assert value == pytest.approx(
                float(critic(seen, lengths, torch.tensor([-1]))), abs=1e-5
            )


def test_best_of_n_is_the_reward_of_the_response_with_the_highest_value(tmp_path, critic_folder):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:7])
    report, rows = run(tmp_path, "--data", file, "--n", 4, "--critic", critic_folder)
    critic = Critic.from_pretrained(critic_folder).requires_grad_(False)
    tokenizer, picked = load_tokenizer(TINY), []
    for i in range(0, len(rows), 4):
        prompt = tokenizer(rows[i]["prompt"], add_special_tokens=False)["input_ids"]
        problem = Problem("p", 0, "", prompt, "")
        group = [Rollout(problem, 0, j, 0, rows[i + j]["response_ids"]) for j in range(4)]
        values = [float(critic(*inputs(r))[-1]) for r in group]
        picked.append(rows[i + values.index(max(values))]["reward"])
    scores = sets(report)[file]["scores"]
    assert scores["best@4"]["value"] == pytest.approx(sum(picked) / 7)
    assert scores["best@1"]["value"] == pytest.approx(scores["avg@4"]["value"])


def inputs(r):
    mb = pack([r], [0])
    return mb.input_ids, mb.cu_seqlens, mb.action_index


# ---- comparison


def row(id, right, n=4):
    return {"id": id, "right": right, "n": n, "scores": {"avg@4": right / n, "pass@4": right > 0}}


def test_a_comparison_names_the_moves_and_its_parts_add_up():
    before = [row("a", 0), row("b", 3), row("c", 1), row("d", 4), row("e", 0)]
    after = [row("a", 2), row("b", 0), row("c", 4), row("d", 3), row("e", 0)]
    result = paired_differences(before, after, resamples(5, 0))
    assert [(m["id"], m["before"], m["after"]) for m in result["gained"]] == [("a", 0, 2)]
    assert [(m["id"], m["before"], m["after"]) for m in result["lost"]] == [("b", 3, 0)]
    assert result["avg_change"] == pytest.approx(
        {"discovery": 0.1, "lost": -0.15, "sharpening": 0.1}
    )
    change = result["differences"]["avg@4"]
    assert change["value"] == pytest.approx(sum(result["avg_change"].values()))
    assert result["differences"]["pass@4"]["value"] == 0 and change["low"] < 0.05 < change["high"]


@pytest.fixture(scope="module")
def changed_model(tmp_path_factory):
    """The embedded model with noise on its weights."""
    model = Transformer.from_pretrained(TINY)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * p.std() * torch.randn_like(p)
    folder = tmp_path_factory.mktemp("run") / "checkpoints/step_000003/policy"
    model.save_pretrained(folder)
    load_tokenizer(TINY).save_pretrained(folder)
    return folder


def test_models_that_would_see_different_problems_are_refused_before_sampling(
    tmp_path, random_tiny_model
):
    folder = tmp_path / "model"
    shutil.copytree(random_tiny_model, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] + 11 * ' ' }}")
    file = write(tmp_path / "a.jsonl", PROBLEMS[:5])

    def length(path):
        return [len(p.prompt_ids) for p in load_problems(file, load_tokenizer(path), 999)[0]]

    limit = str(max(length(TINY)))
    assert min(length(folder)) <= int(limit) < max(length(folder))
    with pytest.raises(SystemExit, match="--max-prompt-tokens drops different problems"):
        main(["--data", file, "--compare", str(folder), "--max-prompt-tokens", limit])


@pytest.fixture(scope="module")
def same_model(tmp_path_factory):
    """A copy of the embedded model."""
    return shutil.copytree(TINY, tmp_path_factory.mktemp("copy") / "policy")


def test_the_same_weights_differ_nowhere(tmp_path, same_model):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:5])
    report, _ = run(tmp_path, "--data", file, "--n", 3, "--compare", same_model)
    comparison = report["comparison"][file]
    assert comparison["gained"] == comparison["lost"] == []
    assert all(set(band.values()) == {0.0} for band in comparison["differences"].values())


def test_a_comparison_is_the_difference_of_the_two_reports_and_draws_a_figure(
    tmp_path, changed_model, capsys
):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:8])
    report, rows = run(tmp_path, "--data", file, "--n", 4, "--compare", changed_model)
    before, after = (sets(report, role)[file]["scores"] for role in ("model", "compare"))
    assert {r["model"] for r in rows} == {str(changed_model), str(TINY)} and len(rows) == 64
    for name, band in report["comparison"][file]["differences"].items():
        assert band["value"] == pytest.approx(after[name]["value"] - before[name]["value"])
        assert band["low"] <= band["value"] <= band["high"]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert "minus" in capsys.readouterr().out


def test_without_matplotlib_the_numbers_are_kept(tmp_path, same_model, monkeypatch, capsys):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:2])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report, _ = run(tmp_path, "--data", file, "--n", 2, "--compare", same_model)
    assert "comparison" in report and "pip install matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "out.png").exists()


# ---- start


def test_a_run_a_checkpoint_and_a_policy_are_all_models(changed_model, tmp_path):
    checkpoint = changed_model.parent
    older = checkpoint.with_name("step_000002") / "policy"
    older.mkdir(parents=True, exist_ok=True)
    for path in (changed_model, checkpoint, checkpoint.parent.parent):
        assert part_of(str(path), "policy") == str(changed_model)
    assert part_of("org/name", "policy") == "org/name"
    assert part_of(str(tmp_path), "critic") == str(tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--n 0", ["--n", "above 0"]),
        ("--temperature -1", ["--temperature", "negative"]),
        ("--top-p 0", ["--top-p", "is 0.0", "(0, 1]"]),
        ("--top-p 1.5", ["--top-p", "is 1.5", "(0, 1]"]),
        ("--top-k -1", ["--top-k", "negative"]),
        ("--min-p 2", ["--min-p", "[0, 1]"]),
        ("--think maybe", ["--think", "maybe", "require"]),
        ("--nn 3", ["--nn", "--help"]),
        ("--data nowhere.jsonl", ["nowhere.jsonl", "does not exist"]),
        ("--model nowhere/model", ["nowhere/model", "checkpoint"]),
        ("--critic assets", ["--critic assets is not a critic", "config.json", "give a run"]),
        ("--critic /nope", ["--critic /nope is not a critic", "not a directory", "give a run"]),
        (f"--critic {TINY}", ["is not a critic", "value_head", "give a run"]),
        (f"--compare {TINY}", ["--compare is the checkpoint of --model"]),
        ("--data a.jsonl a.jsonl", ["--data names a set twice"]),
        ("--output assets", ["--output assets cannot be written", "directory"]),
        ("--compare nowhere/model", ["nowhere/model", "checkpoint"]),
        ("--output /proc/x/out.json", ["--output /proc/x"]),
        ("--save-responses /proc/x/out.jsonl", ["--save-responses /proc/x"]),
    ],
)
def test_bad_input_is_one_sentence(flags, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as error:
        main(flags.split())
    message = str(error.value)
    assert message.startswith("error: ") and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--output DATA", "--output .* would overwrite --data"),
        ("--save-responses ./DATA", "--save-responses .* would overwrite --data"),
        (
            "--output x.json --save-responses x.json",
            "--save-responses x.json would overwrite --output;",
        ),
        (
            f"--compare {ROOT} --output x.json --save-responses x.png",
            "the figure of --output, x.png",
        ),
        (f"--compare {ROOT} --output x.png", "the figure of --output, x.png would overwrite"),
    ],
)
def test_no_flag_overwrites_the_data_or_what_another_flag_writes(
    flags, words, tmp_path, monkeypatch
):
    """--data d.jsonl --output d.jsonl emptied the data file; responses went that way too."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "DATA", PROBLEMS[:2])
    with pytest.raises(SystemExit, match=f"^error: .*{words}"):
        main(["--data", str(file), *flags.split()])
    assert len((tmp_path / "DATA").read_text().splitlines()) == 2 and not list(tmp_path.glob("x*"))


def test_a_run_brings_its_budget_and_the_form_of_its_problems(tmp_path, changed_model, capsys):
    """eval.py --model RUN used 128 tokens and no suffix, whatever the run had been trained with."""
    folder = changed_model.parents[2]
    of_run = dict(max_response_tokens=17, prompt_suffix="Box it.", label_key="gold", think="none")
    (folder / "config.json").write_text(json.dumps(of_run | {"lr": 1, "prompt_key": ""}))
    rows = [{"prompt": row["prompt"], "gold": row["label"]} for row in PROBLEMS[:2]]
    file = write(tmp_path / "a.jsonl", rows)
    for path in (folder, changed_model.parent, changed_model):
        report, responses = run(tmp_path, "--model", path, "--data", file, "--n", 2)
        assert report["settings"].items() >= of_run.items()
        assert all("Box it." in row["prompt"] for row in responses)
    assert (
        "as in the run: max_response_tokens 17, prompt_suffix 'Box it.'" in capsys.readouterr().out
    )
    own = ["--max-response-tokens", 9, "--prompt-suffix", ""]
    report, responses = run(tmp_path, "--model", folder, "--data", file, "--n", 2, *own)
    assert (report["settings"]["max_response_tokens"], report["settings"]["prompt_suffix"]) == (
        9,
        "",
    )
    (folder / "config.json").unlink()


def test_flags_of_several_sets():
    flags = "--data a.jsonl org/b@test --n 4 --force-budget".split()
    options = parse_options(Options, "An evaluation.", flags)
    assert options.data == ["a.jsonl", "org/b@test"] and options.n == 4 and options.force_budget


@pytest.mark.slow
def test_ranks_change_nothing(tmp_path, critic_folder):
    file = write(tmp_path / "a.jsonl", PROBLEMS[:7])
    flags = "--n 3 --max-response-tokens 24 --force-budget --device cpu".split()
    for nproc in (1, 2, 3):
        command = [
            sys.executable,
            ROOT / "eval.py",
            "--data",
            file,
            *flags,
            "--critic",
            critic_folder,
        ]
        output = tmp_path / f"{nproc}.json"
        subprocess.run([*command, "--nproc", str(nproc), "--output", output], check=True)
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()
