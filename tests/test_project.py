"""Promises about the project itself: budgets, imports, documents."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from grpo import METHODS
from losses import AGGREGATIONS

ROOT = Path(__file__).parent.parent
CORE = "losses advantages grpo policy ranks rollout engines recipes config checkpoint train".split()
STUDY = "sft eval lab report plots sankey diagnostics records tiny branching agents".split()
PRODUCT = sorted([*ROOT.glob("*.py"), *ROOT.glob("envs/*.py")])


def lines(paths):
    return sum(path.read_text().count("\n") for path in paths if path.exists())


def test_parts_keep_their_line_budgets():
    assert lines(ROOT / f"{name}.py" for name in CORE) <= 2620
    assert lines(ROOT.glob("envs/*.py")) <= 2440
    assert lines(ROOT / f"{name}.py" for name in STUDY) <= 2000
    assert {path.stem for path in ROOT.glob("*.py")} <= {*CORE, *STUDY}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.name)
def test_files_functions_and_lines_keep_theirs_and_speak(path):
    text = path.read_text()
    assert text.count("\n") <= 350
    assert max(map(len, text.splitlines())) <= 119
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
            if not node.name.startswith("_") and node.end_lineno - node.lineno >= 8:
                assert ast.get_docstring(node), node.name


def test_formulas_know_nothing_of_models_or_settings():
    for name, allowed in (("losses", {"torch"}), ("advantages", {"numpy", "dataclasses"})):
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported == allowed


def test_arrows_go_one_way():
    levels = ["losses advantages recipes plots tiny ranks", "policy diagnostics", "engines grpo", "rollout"]
    levels += ["config records report", "sft sankey checkpoint", "eval lab", "train"]
    below = {"envs"}
    for level in (level.split() for level in levels):
        for name in level:
            nodes = list(ast.walk(ast.parse((ROOT / f"{name}.py").read_text())))
            ours = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
            ours |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            assert ours & {*CORE, *STUDY} <= below, name
        below |= {*level}


def test_documents_are_short_and_name_what_exists():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 40
    assert (ROOT / "CLAUDE.md").read_text().strip() == "@AGENTS.md"
    for document in ("README.md", "AGENTS.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|txt|md|html))`", (ROOT / document).read_text()):
            own = name in ("my_task.py", "hot_cold.py")  # to be written by the reader
            assert own or (ROOT / name).exists() or (ROOT / "tests" / name).exists(), f"{document}: {name}"


def test_every_name_in_the_table_from_the_paper_to_the_code_resolves():
    table = (ROOT / "README.md").read_text().partition("## From the paper to the code")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w.]+)`", table)
    assert len(names) > 30
    for name in names:
        parts = name.split(".")
        split = 2 if parts[:2] in (["envs", "sokoban"], ["envs", "alfworld"]) else 1
        found = importlib.import_module(".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, part)


def test_every_task_and_file_of_the_readme_has_its_own_line_in_a_table():
    readme = (ROOT / "README.md").read_text()
    listed = set(
        re.findall(r"`([\w/]+\.(?:py|html))`", readme.partition("| file | concept |")[2].partition("\n\n")[0])
    )
    assert {str(path.relative_to(ROOT)) for path in PRODUCT} <= listed


def test_the_readme_is_finished_and_shows_its_pictures():
    readme = (ROOT / "README.md").read_text()
    assert not re.search(r"@[A-Z_]+@", readme)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)
    assert pictures and all((ROOT / picture).exists() for picture in pictures)


def test_the_readme_names_every_method_and_aggregation():
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in (*METHODS, *AGGREGATIONS))


def test_required_packages_are_bounded_and_justified():
    readme = (ROOT / "README.md").read_text()
    files = "".join(path.read_text() for path in ROOT.glob("requirements*.txt")).splitlines()
    for line in (line for line in files if not line.startswith("-r ")):
        name = re.match(r"[\w-]+", line)[0]
        assert ">=" in line and ",<" in line, line
        assert f"| {name} |" in readme, name
