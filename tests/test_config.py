"""Configuration: flags, recipes, row defaults, and one clear sentence for what cannot run."""

import json
import math
import re
from dataclasses import asdict, fields

import pytest
import yaml
from helpers import ROOT

import curate
import eval
from algorithms import ALGORITHMS
from config import CHOICES, REMOVED, Config, ConfigError, contains, parse, parse_options


def test_kebab_and_snake_flags_and_negated_booleans():
    config = parse(["--max-prompt-tokens", "5", "--max_response_tokens=7", "--no-dynamic-sampling"])
    assert (config.max_prompt_tokens, config.max_response_tokens) == (5, 7)
    assert config.dynamic_sampling is False
    assert parse(["--no_dynamic_sampling", "--dynamic-sampling"]).dynamic_sampling is True


def test_a_flag_can_switch_off_what_the_recipe_switches_on():
    """--no-partial-rollout was unknown, as its default is off already."""
    recipe = ["--config", str(ROOT / "recipes/justrl2-minicpm5-2b-128k.yaml")]
    assert parse(recipe).partial_rollout is True
    assert parse([*recipe, "--no-partial-rollout"]).partial_rollout is False


def test_flags_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("lr: 1e-6\ncritic_lr: 5.0e-6\nmodel: some dir\nwhiten_advantages: false\n")
    config = parse(["--config", str(recipe), "--lr", "3e-6"])
    assert (config.lr, config.critic_lr, config.model) == (3e-6, 5e-6, "some dir")
    assert config.whiten_advantages is False
    assert config.steps == Config.steps


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_resolves_and_names_only_config_fields(name):
    config = Config(algorithm=name).resolved(ALGORITHMS)
    for field, value in ALGORITHMS[name].defaults.items():
        assert getattr(config, field) == value


def test_the_users_value_wins_over_the_rows_default():
    assert ALGORITHMS["justrl2"].defaults["clip_high"] == 0.28
    assert Config(algorithm="justrl2", clip_high=0.5).resolved(ALGORITHMS).clip_high == 0.5
    assert (
        Config(algorithm="ppo", whiten_advantages=False).resolved(ALGORITHMS).whiten_advantages
        is False
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(algorithm="grpoo"), ["--algorithm", "grpoo", "grpo, "]),
        (
            dict(overlong_buffer_tokens=128),
            ["--overlong-buffer-tokens", "128", "max_response_tokens"],
        ),
        (dict(algorithm="grpo", group_size=1), ["--group-size", "grpo", "critic"]),
        (dict(algorithm="justrl2", group_size=1), ["--dynamic-sampling", "--group-size"]),
        (dict(gae_lambda_k=0.0), ["--gae-lambda-k", "(0, 1]"]),
        (dict(gamma=0.9), ["--gamma", "gae_lambda_k"]),
        (dict(num_critic_only_steps=40), ["--num-critic-only-steps", "steps (40)"]),
        (dict(partial_rollout=True), ["--partial-rollout", "--over-sampling"]),
        (dict(aggregation="mean"), ["--aggregation", "token-mean"]),
        (dict(temperature=0.0), ["--temperature", "[0.01, 100]"]),
        (dict(lr=-1.0), ["--lr", "negative"]),
        (dict(is_low=6.0), ["--is-low", "is_high"]),
        (dict(algorithm="ppo", gae_lambda=7.0), ["--gae-lambda", "7.0", "[0, 1]"]),
        (dict(algorithm="ppo", gae_lambda_k=0.5), ["--gae-lambda-k", "ppo", "justrl2"]),
        (dict(gae_lambda=0.9), ["--gae-lambda", "justrl2", "ppo"]),
        (dict(clip_low=-3.0), ["--clip-low", "-3"]),
        (dict(dual_clip=0.5), ["--dual-clip", "above 1"]),
        (dict(overlong_injection_alpha=0.0), ["--overlong-injection-alpha", "above 0"]),
        (dict(kv_cache_tokens=383), ["--kv-cache-tokens", "383", "384"]),
        (dict(max_staleness=1), ["--max-staleness", "--partial-rollout"]),
        (dict(partial_mask_old=True), ["--partial-mask-old", "--partial-rollout"]),
        (dict(eval_top_p=0.0), ["--eval-top-p", "(0, 1]"]),
        (dict(seed=10**30), ["--seed", "4294967295"]),
        (dict(seed=-1), ["--seed", "-1"]),
        (dict(temperature=1e-40), ["--temperature", "[0.01, 100]"]),
        (dict(over_sampling=1e30), ["--over-sampling", "[1, 100]"]),
        (dict(verifier_timeout_s=1e20), ["--verifier-timeout-s", "86400"]),
        (dict(algorithm="sapo", sapo_tau_pos=0.0), ["--sapo-tau-pos", "above 0"]),
        (dict(algorithm="sapo", sapo_tau_neg=-1.0), ["--sapo-tau-neg", "above 0"]),
        (dict(entropy_coef=-1.0), ["--entropy-coef", "negative"]),
        (dict(opsm_delta=-4.0), ["--opsm-delta", "negative"]),
        (dict(length_reward_weight=-3.0), ["--length-reward-weight", "negative"]),
        (dict(log_samples=-7), ["--log-samples", "-7"]),
        (dict(max_pass_rate=0.0), ["--max-pass-rate", "(0, 1]"]),
        (dict(clip_low=2.0), ["--clip-low", "2", "ratio"]),
    ],
)
def test_inconsistent_fields_are_refused_in_one_sentence(fields, words):
    with pytest.raises(ConfigError) as error:
        Config(**fields).resolved(ALGORITHMS)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("options", [Config, eval.Options, curate.CurateConfig])
def test_every_number_has_a_range_that_holds_its_default(options):
    for f in fields(options):
        kind, allowed = str(f.type), f.metadata["allowed"]
        assert allowed or not ("int" in kind or "float" in kind), f.name
        if f.default is not None and allowed:
            inside = f.default in allowed if f.name in CHOICES else contains(allowed, f.default)
            assert inside, f.name


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("(0, 1]", [1e-9, 1], [0, 1.1, math.nan, math.inf]),
        ("[-1, inf)", [-1, 7], [-2, math.inf, math.nan]),
        ("(1, inf]", [2, math.inf], [1, -math.inf]),
    ],
)
def test_an_interval_holds_what_it_says(interval, inside, outside):
    assert all(contains(interval, x) for x in inside)
    assert not any(contains(interval, x) for x in outside)


FLOATS = [f.name for f in fields(Config) if "float" in str(f.type)]


@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_is_not_finite_is_refused_by_name(name):
    """NaN and infinity passed in 13 fields, to fail after the first rollout without naming one."""
    limits = "clip_low clip_high dual_clip value_clip is_high max_grad_norm".split()
    for value in (math.nan, math.inf, -math.inf):
        if value == math.inf and name in limits:
            assert getattr(Config(**{name: value}).resolved(ALGORITHMS), name) == value
        else:
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is .*{value}"):
                Config(**{name: value}).resolved(ALGORITHMS)


@pytest.mark.parametrize(
    ("given", "needs"),
    [
        (dict(algorithm="rloo", clip_high=0.3), "grpo"),
        (dict(algorithm="rloo", std_normalize=True), "grpo"),
        (dict(algorithm="grpo", sapo_tau_pos=3.0), "sapo"),
        (dict(algorithm="grpo", gamma=0.9), "reinforce_pp, ppo"),
        (dict(algorithm="cispo", dual_clip=3.0), "grpo"),
        (dict(algorithm="grpo", value_clip=0.9), "critic"),
        (dict(algorithm="grpo", critic_updates_per_step=2), "critic"),
        (dict(is_mode="none", is_low=0.9), "--is-mode"),
        (dict(algorithm="grpo", is_high=9.0), "--is-mode"),
        (dict(kl_estimator="k1"), "--kl-coef"),
        (dict(cov_fraction=0.1), "--entropy-control"),
        (dict(overlong_penalty_factor=2.0), "--overlong-buffer-tokens"),
        (dict(overlong_injection_alpha=0.1), "--overlong-buffer-tokens"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused(given, needs):
    """It was accepted, stored in config.json and read by nobody."""
    (name,) = given.keys() - {"algorithm", "is_mode"}
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} .*{needs}"):
        Config(**given).resolved(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_row_resolved_to_is_accepted_again(name):
    """A resumed run and one with a default spelt out give no knob that does nothing."""
    once = Config(algorithm=name).resolved(ALGORITHMS)
    assert once.resolved(ALGORITHMS) == once


def test_a_short_run_has_few_critic_only_steps():
    """`--steps 2` was refused for the four critic-only steps of the default."""
    for steps, expected in ((1, 0), (2, 0), (4, 1), (15, 3), (16, 4), (1000, 4)):
        assert Config(steps=steps).resolved(ALGORITHMS).num_critic_only_steps == expected


def test_resume_takes_the_fields_of_the_run_and_lets_only_some_change(tmp_path):
    with pytest.raises(ConfigError, match="--output-dir"):
        parse(["--resume"])
    with pytest.raises(ConfigError, match="finds no run"):
        parse(["--resume", "--output-dir", str(tmp_path)])
    stored = Config(algorithm="ppo", lr=1e-6, steps=5).resolved(ALGORITHMS)
    (tmp_path / "config.json").write_text(json.dumps(asdict(stored)))
    resume = ["--resume", "--output-dir", str(tmp_path)]
    config = parse([*resume, "--steps", "9"])
    assert (config.algorithm, config.lr, config.gae_lambda, config.steps) == ("ppo", 1e-6, 0.95, 9)
    assert config.resolved(ALGORITHMS).group_size == 8
    with pytest.raises(ConfigError, match="--algorithm was ppo"):
        parse([*resume, "--algorithm", "grpo"])
    with pytest.raises(ConfigError, match="--optimizer was adamw"):  # its state is of another shape
        parse([*resume, "--optimizer", "muon"])


def test_a_recipe_edited_before_a_resume_is_said_to_be_ignored(tmp_path, capsys):
    stored = Config(algorithm="ppo", lr=1e-6, think="require").resolved(ALGORITHMS)
    (tmp_path / "config.json").write_text(json.dumps(asdict(stored)))
    recipe = tmp_path / "r.yaml"
    resume = ["--resume", "--output-dir", str(tmp_path), "--config", str(recipe)]
    recipe.write_text("algorithm: ppo\nlr: 1e-6\nthink: auto\n")
    parse(resume)
    assert capsys.readouterr().err == ""
    recipe.write_text("algorithm: ppo\nlr: 2e-6\nseed: 5\ncritic_lr: 1.0\n")
    assert parse([*resume, "--critic-lr", "3"]).lr == 1e-6
    (line,) = capsys.readouterr().err.splitlines()
    assert "lr 1e-06, not 2e-06; seed 0, not 5 from" in line and "critic_lr" not in line


def test_a_recipe_does_not_set_what_the_run_to_resume_left_unset(tmp_path, capsys):
    """config.json says null for it, and the edited recipe changed the objective without a word."""
    (tmp_path / "config.json").write_text(json.dumps(asdict(Config().resolved(ALGORITHMS))))
    recipe = tmp_path / "r.yaml"
    recipe.write_text("dual_clip: 3\n")
    resume = ["--resume", "--output-dir", str(tmp_path), "--config", str(recipe)]
    assert parse(resume).dual_clip is None
    assert "keeps dual_clip None, not 3.0" in capsys.readouterr().err
    assert parse([*resume, "--dual-clip", "4"]).dual_clip == 4


def test_a_run_of_an_earlier_version_resumes_if_its_removed_fields_had_their_defaults(tmp_path):
    old = asdict(Config(algorithm="grpo", lr=1e-6).resolved(ALGORITHMS)) | REMOVED
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = parse(["--resume", "--output-dir", str(tmp_path)])
    assert config.lr == 1e-6 and not vars(config).keys() & REMOVED.keys()


OTHER_VALUES = {
    "failure_weighted": True,
    "length_reward_min_spread": 1,
    "length_reward_min_longest": 1,
    "prefill_chunk_tokens": 512,
    "adam_eps": 1e-6,
    "eval_top_k": 9,
    "eval_min_p": 0.1,
    "cov_kl_coef": 0.5,
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_run_or_recipe_with_a_removed_field_is_refused_in_one_sentence(name, tmp_path):
    """Else the run would go on with another objective, or end in a traceback."""
    old = asdict(Config(algorithm="grpo").resolved(ALGORITHMS)) | REMOVED
    (tmp_path / "config.json").write_text(json.dumps(old | {name: OTHER_VALUES[name]}))
    with pytest.raises(ConfigError, match=f"config.json has {name} .*; continue with the version"):
        parse(["--resume", "--output-dir", str(tmp_path)])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{name}: {OTHER_VALUES[name]}\n")
    with pytest.raises(ConfigError, match=f"r.yaml sets {name}, .*; remove that line"):
        parse(["--config", str(recipe)])


def test_a_recipe_of_an_earlier_version_may_give_removed_fields_their_defaults(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(REMOVED | {"lr": 1e-6}))
    assert parse(["--config", str(recipe)]) == Config(lr=1e-6)


def test_critic_mode_accepts_group_size_one():
    config = Config(algorithm="ppo", group_size=1, dynamic_sampling=False).resolved(ALGORITHMS)
    assert config.group_size == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("lrr: 1\n", ["lrr", "unknown"]), ("- a\n", ["field: value"]), ("a: [", ["cannot be read"])],
)
def test_bad_recipes_are_named(tmp_path, text, words):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse(["--config", str(recipe)])
    assert all(word in str(error.value) for word in [*words, str(recipe)])


def test_missing_recipe_and_unknown_flag_are_named():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        parse(["--config", "nowhere.yaml"])
    with pytest.raises(ConfigError, match="--max-prompt-tok"):  # no silent prefix matching
        parse(["--max-prompt-tok", "5"])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_parses_and_is_consistent(recipe):
    config = parse(["--config", str(recipe)]).resolved(ALGORITHMS)
    assert config.steps > 0 and recipe.read_text().startswith("#")


def test_the_paper_recipe_holds_the_papers_values():
    config = parse(["--config", str(ROOT / "recipes/justrl2-minicpm5-2b-128k.yaml")])
    config = config.resolved(ALGORITHMS)
    paper = dict(
        prompts_per_step=60, group_size=8, epochs_per_step=1, minibatches_per_step=1,
        max_response_tokens=126_976, overlong_buffer_tokens=25_395, overlong_penalty_factor=1.0,
        gae_lambda_k=0.5, gamma=1.0, clip_low=0.2, clip_high=0.28, dual_clip=None, value_clip=0.2,
        whiten_advantages=True, group_center=None, is_mode="icepop", is_low=0.5, is_high=5.0,
        aggregation="token-mean", kl_coef=0.0, entropy_coef=0.0, lr=1e-6, critic_lr=5e-6,
        critic_lr_warmup_steps=10, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.98,
        max_grad_norm=1.0, num_critic_only_steps=30, critic_value_bias_init=0.52, temperature=1.0,
    )  # fmt: skip
    assert {name: getattr(config, name) for name in paper} == paper


def test_only_evaluation_can_truncate_the_distribution():
    # The trainer scores the whole softmax: a truncated draw would be of another policy.
    names = {name for name in vars(Config()) if name.endswith(("top_p", "top_k", "min_p"))}
    assert names == {"eval_top_p"}
    with pytest.raises(ConfigError, match="--top-p"):
        parse(["--top-p", "0.9"])


def test_a_bad_value_is_one_sentence_that_names_the_recipe(tmp_path):
    """It printed 65 lines of usage, and never the recipe."""
    with pytest.raises(ConfigError, match=r"^argument --steps: invalid int value: 'x'; `--help`"):
        parse(["--steps", "x"])
    recipe = tmp_path / "r.yaml"
    recipe.write_text("lr: fast\n")
    with pytest.raises(ConfigError, match=rf"^--config {recipe}: argument --lr: .*'fast'"):
        parse(["--config", str(recipe)])


def test_a_damaged_config_of_the_run_to_resume_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"lr": 1e-')
    with pytest.raises(ConfigError, match=f"{tmp_path}/config.json is damaged"):
        parse(["--resume", "--output-dir", str(tmp_path)])


def test_help_has_every_flag_once_under_a_heading_and_no_path_of_this_machine(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    out = capsys.readouterr().out
    for name in vars(Config()):
        assert len(re.findall(f"^  --{name.replace('_', '-')} ", out, re.M)) == 1, name
    headings = re.findall(r"^(\w.*):$", out, re.M)
    assert {"Machine", "Rollout", "Reward", "Optimisation", "Critic"} < set(headings)
    assert str(ROOT) not in out and "(default: None)" not in out and len(out.splitlines()) < 280


def test_help_leads_with_the_thirty_flags_of_a_first_run(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    first, _, _ = capsys.readouterr().out.partition("Data and files:")
    shown = re.findall(r"^  --(\S+)", first, re.M)
    assert len(shown) == 30
    assert {"config", "model", "data", "algorithm", "steps", "lr", "nproc", "resume"} < set(shown)


@pytest.mark.parametrize("options", [eval.Options, curate.CurateConfig])
def test_the_help_of_the_other_commands_has_every_flag_under_a_heading(options, capsys):
    with pytest.raises(SystemExit):
        parse_options(options, "About.", ["--help"])
    general, _, rest = capsys.readouterr().out.partition(" to ")
    assert re.findall(r"^  (-\S+)", general, re.M) == ["-h,"]
    for f in fields(options):
        assert len(re.findall(f"^  --{f.name.replace('_', '-')} ", rest, re.M)) == 1, f.name
