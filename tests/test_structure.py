"""The house rules of CONTRIBUTING.md that a program can check: folders, imports, sizes."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
import networkx as nx
import pytest

from hase.utils.paths import ROOT

MOST_LINES, MOST_FUNCTION_LINES = 800, 100  # of a module, of a function
# The budget of the project; the aim: 68,000 lines.
MOST_IN_ALL = {"lines": 70_000, "modules": 350, "lines of tests": 30_000, "words of docs": 48_000, "lines of the README": 135}


@functools.cache
def package() -> dict[str, str]:
    """The text of every module of the package, by its path from the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in listed
            if name and not name.startswith("tests/") and (ROOT / name).is_file() and not (ROOT / name).is_symlink()}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in package().items()}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


@pytest.mark.slow
def test_imports_keep_to_the_contracts() -> None:
    """Those of pyproject.toml: folders import downwards only, and the subjects of a folder do not import each other."""
    done = subprocess.run([Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_no_modules_import_each_other() -> None:
    imports = grimp.build_graph("hase", cache_dir=None, exclude_type_checking_imports=True)
    graph = nx.DiGraph([(name, other) for name in imports.modules for other in imports.find_modules_directly_imported_by(name)])
    assert not [sorted(modules) for modules in nx.strongly_connected_components(graph) if len(modules) > 1]


@pytest.mark.slow
def test_no_module_imports_from_a_script() -> None:
    scripts = {name.removesuffix(".py").replace("/", ".") for name, text in package().items()
               if re.search(r"^    cli\.run\(main\b", text, re.MULTILINE)}
    assert {"evaluator", "training.train_kernel_model", "inference.predict_model_latency"} <= scripts
    imported = {(name, str(node.module).removeprefix("hase.")) for name, tree in trees().items() for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)}
    assert not {f"{name} imports {module}" for name, module in imported if module in scripts}


def test_the_links_are_the_package() -> None:
    """hase/ has a link to each folder and module of the package, for type checkers and editors."""
    top = {name.partition("/")[0] for name in package()} - {"hase"}
    assert {path.name for path in (ROOT / "hase").iterdir() if path.is_symlink()} == top
    assert all((ROOT / "hase" / name).resolve() == ROOT / name for name in top)


@pytest.mark.slow
def test_no_module_and_no_function_is_long() -> None:
    """Loose on purpose: they stop what grows without end, and are no reason to split what is read together."""
    assert not {name: lines for name, text in package().items() if (lines := len(text.splitlines())) > MOST_LINES}
    assert not {f"{name}:{function.name}": lines for name, tree in trees().items() for function in functions(tree)
                if (lines := (function.end_lineno or 0) - function.lineno + 1) > MOST_FUNCTION_LINES}


def test_the_whole_stays_readable() -> None:
    lines = {name: len(text.splitlines()) for name, text in package().items()}
    tests = list((ROOT / "tests").rglob("*.py"))
    sizes = {"lines": sum(lines.values()), "modules": sum(bool(count > 1) for count in lines.values()),
             "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
             "words of docs": sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md")),
             "lines of the README": len((ROOT / "README.md").read_text(encoding="utf-8").splitlines())}
    assert not {what: size for what, size in sizes.items() if size > MOST_IN_ALL[what]}
