"""The form of the project: levels, sizes, docstrings, and commands that exist.

A file imports only from lower levels, also inside functions, so that it can be read with nothing in
mind but what stands below it, and a part can be taken out without the parts under it.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from helpers import ROOT

# A file of the top level by its name, every file of a folder by the folder's.
LEVELS = dict(
    losses=0, kernels=0, distributed=0, files=0,
    config=0.1,
    algorithms=0.5,
    verifier=1, model=1,
    verify=1.5,
    rewards=1.6,
    data=2,
    problems=2.5,
    sampler=3, critic=3,
    rollout=4,
    run=4.5,
    reports=4.6, curation=4.6,
    train=5, eval=5, curate=5, diagnose=5, sft=5,
    assets=5.5,
    experiments=6, benchmarks=6,
)  # fmt: skip
METHOD = ("train.py", "losses.py", "critic.py", "rollout.py", "data.py")


@cache
def tracked():
    """Files of the project, new ones included; everything that is here where git is not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0:
        files = [ROOT / line for line in result.stdout.splitlines()]
    else:
        skipped = {".venv", ".git", "runs", "__pycache__"}
        files = [f for f in ROOT.rglob("*") if not skipped.intersection(f.parts)]
    return sorted(f.relative_to(ROOT) for f in files if f.is_file())


@cache
def sources():
    """Parsed modules by path, without tests."""
    paths = [p for p in tracked() if p.suffix == ".py" and p.parts[0] != "tests"]
    return {p.as_posix(): ast.parse((ROOT / p).read_text()) for p in paths}


def place(path):
    """ "run" for "run/setup.py", "train" for "train.py"."""
    return path.split("/")[0].removesuffix(".py")


def file_of(module):
    """The file of a module of this project, None for others."""
    path = module.replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in sources()), None)


def imports(path):
    """(line, file of this project) of every import in a file, also within functions."""
    for node in ast.walk(sources()[path]):
        if isinstance(node, ast.Import):
            files = [file_of(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or place(path)  # `from . import chunked` in a folder
            # `from run import setup` imports the file setup, `from data import pack` a name.
            files = [file_of(f"{module}.{alias.name}") or file_of(module) for alias in node.names]
        else:
            continue
        yield from ((node.lineno, file) for file in files if file)


# ---- levels


def test_the_top_level_is_short_enough_to_choose_from():
    top = [path for path in sources() if "/" not in path]
    later = {"sft.py", "environments.py"}
    assert len(set(top) - later) <= 16, sorted(top)


def test_every_place_has_a_level():
    for path in sources():
        assert place(path) in LEVELS, (
            f"{path} has no level: add {place(path)!r} to LEVELS in tests/test_house.py, above "
            "everything that it imports and below everything that imports it"
        )


def test_a_file_imports_only_from_lower_levels():
    upward = [
        f"{path}:{line} imports {target}"
        for path in sources()
        for line, target in imports(path)
        if place(path) != place(target)
        and LEVELS.get(place(target), 0) >= LEVELS.get(place(path), 9)
    ]
    assert not upward, "\n".join(upward)


def test_no_files_import_each_other():
    graph = {path: {target for _, target in imports(path)} for path in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_test_file_imports_no_other():
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text()
        found = re.findall(r"^\s*(?:from|import) (test_\w+|conftest)", text, re.M)
        assert not found, f"{path.name} imports {found[0]}: what both need belongs in helpers.py"


def test_grpo_works_without_the_file_of_the_critic(tmp_path):
    for path in tracked():
        if path.parts[0] not in ("docs", "tests") and path.name != "critic.py":
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)

    def train(algorithm):
        flags = "--steps 1 --prompts-per-step 2 --group-size 2 --max-response-tokens 8 --eval-data="
        command = [sys.executable, "train.py", *flags.split(), "--no-dynamic-sampling"]
        command += ["--algorithm", algorithm, "--output-dir", f"runs/{algorithm}"]
        options = dict(capture_output=True, text=True, timeout=300)
        one_core = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=tmp_path, env=one_core, **options)

    result = train("grpo")
    assert result.returncode == 0, result.stderr
    (row,) = map(json.loads, (tmp_path / "runs/grpo/metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and "policy/loss" in row
    assert (tmp_path / "runs/grpo/checkpoints/step_000001/policy").is_dir()

    result = train("ppo")
    last = result.stderr.strip().splitlines()[-1]
    assert result.returncode == 1 and last.startswith("error: ") and "critic" in last
    assert "Traceback" not in result.stderr


# ---- sizes and docstrings


def test_the_method_can_be_read_in_an_evening():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in METHOD}
    assert sum(lines.values()) <= 2200, lines


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long, "\n".join(long)


def is_recipe(node):
    """A recipe of benchmarks/label_rewrites.py, whose name says it all."""
    return isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == ["rng"]


def test_every_module_public_function_and_class_has_a_docstring():
    bare = [
        f"{path} {getattr(node, 'name', '')}"
        for path, tree in sources().items()
        for node in [tree, *tree.body]
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and not getattr(node, "name", "").startswith("_")
        and not ast.get_docstring(node)
        and not (path == "benchmarks/label_rewrites.py" and is_recipe(node))
    ]
    assert not bare, "\n".join(bare)


# ---- text


def test_no_note_to_self_and_no_path_of_one_machine():
    # The pattern does not match itself: this file is searched too.
    pattern = re.compile(r"\bTO[D]O\b|\bFIX[M]E\b|/(?:work|home|Users|root|mnt)/\w|\.\./share[d]")
    for path in tracked():
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ""} and path.name != "LICENSE":
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                assert not pattern.search(line), f"{path}:{number}: {line.strip()}"


def targets():
    """The command lines of every target of the Makefile."""
    found, rules = {}, []
    for line in (ROOT / "Makefile").read_text().splitlines():
        if line.startswith("\t"):
            for name in rules:
                found[name].append(line.strip())
        elif match := re.match(r"([^\s:=#]+):(?!=)", line):
            rules = [match[1]]
            found[match[1]] = []
    return found


def missing(command):
    """What a command line runs that does not exist."""
    runs = r"(?:\bpython3?|\$\(PYTHON\)|torchrun(?: -\S+ \S+| -\S+=\S+)*) "
    for flag, name in re.findall(runs + r"(?:-u )?(-m )?([\w./-]+)", command):
        if flag:
            known = file_of(name) or importlib.util.find_spec(name.split(".")[0])
            if not known:
                yield f"module {name}"
        elif name.endswith(".py") and not (ROOT / name).is_file():
            yield name
    for name in re.findall(r"\bpytest .*?(tests/\w+\.py)", command):
        if not (ROOT / name).is_file():
            yield name
    for name in re.findall(r"\bmake ([a-z][\w-]*)", command):
        if name not in targets():
            yield f"make {name}"


def test_every_target_of_the_makefile_runs_what_exists():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.M)[1].split()
    assert set(phony) <= set(targets())
    for name, commands in targets().items():
        for command in commands:
            assert not list(missing(command)), f"make {name}: {command}"


def documents():
    return [p for p in tracked() if p.suffix == ".md"]


def anchors(path):
    """The fragments that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_link_of_the_documents_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / path).read_text()):
        if not re.match(r"https?:", link):
            file, _, anchor = link.partition("#")
            target = (ROOT / path).parent / file if file else ROOT / path
            assert target.exists(), f"{path}: {link}"
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_command_of_the_documents_exists(path):
    text = (ROOT / path).read_text()
    blocks = re.findall(r"^```.*?^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for code in [*blocks, *spans]:
        code = code.replace("\\\n", " ")
        assert not list(missing(code)), f"{path}: {code}"
