"""The order of packages: no module imports from a package that comes later, from a script, or in a cycle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx as nx
import pytest

from hase.utils.paths import ROOT

ORDER = ("utils", "records", "measuring", "runtimes", "model_zoo", "ort_analysis", "kernel_model", "tvm_analysis", "benchmark",
         "graph_model", "overlap_simulator", "training", "inference", "evaluator", "convolutions", "graph_stages", "recipes")
FILES = [path for package in ORDER for path in (sorted((ROOT / package).glob("**/*.py")) or [ROOT / f"{package}.py"])]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first part of the name of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import; name the package"
            yield node.lineno, (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_only_earlier_packages(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = set(ORDER[:ORDER.index(package) + 1])
    later = [f"{path}:{line} imports {name}" for line, name in imported(path) if name in ORDER and name not in allowed]
    assert not later


def test_the_order_names_packages_and_scripts() -> None:
    missing = [name for name in ORDER if not (ROOT / name / "__init__.py").is_file() and not (ROOT / f"{name}.py").is_file()]
    assert not missing


def test_every_python_file_is_in_the_order() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/*.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert packages - {".venv", "tests"} <= set(ORDER)


def module_name(path: Path, root: Path) -> str:
    """`a.b` for `a/b.py`, `a` for `a/__init__.py`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_graph(files: Mapping[str, str]) -> nx.DiGraph[str]:
    """The imports between modules, given as text by name, including those in functions and for annotations (TYPE_CHECKING)."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                full_names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [full_name if full_name in files else str(node.module) for full_name in full_names]
            else:
                continue
            graph.add_edges_from((name, module) for module in modules if module in files and module != name)
    return graph


def cycles(graph: nx.DiGraph[str]) -> list[list[str]]:
    return sorted(sorted(modules) for modules in nx.strongly_connected_components(graph) if len(modules) > 1)


def scripts(files: Mapping[str, str]) -> set[str]:
    """The modules that can be run."""
    return {name for name, text in files.items() if re.search(r"^    cli\.run\(main\b", text, re.MULTILINE)}


@functools.cache
def hase_modules() -> tuple[dict[str, str], nx.DiGraph[str]]:
    """The text of every module by its name, and which imports which."""
    files = {module_name(path, ROOT): path.read_text(encoding="utf-8") for path in FILES}
    return files, import_graph(files)


def test_no_modules_import_each_other() -> None:
    assert not cycles(hase_modules()[1])


def test_no_module_imports_from_a_script() -> None:
    files, graph = hase_modules()
    runnable = scripts(files)
    assert {"evaluator", "overlap_simulator", "hase.training.train_kernel_model", "hase.inference.predict_model_latency"} <= runnable
    assert not [f"{module} imports {script}" for module, script in graph.edges if script in runnable]


def test_cycles_and_imports_from_scripts_are_detected() -> None:
    """In a function and for an annotation; modules of the same package in both notations."""
    files = {
        "a.one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.two import Two\n",
        "a.two": "def late():\n    from a import three\n",
        "a.three": "import a.one\n",
        "a": "",
        "a.four": "from a.script import rows\n",
        "a.script": "from a.one import one\nif __name__ == '__main__':\n    cli.run(main, 'all rows')\n",
    }
    graph = import_graph(files)
    assert cycles(graph) == [["a.one", "a.three", "a.two"]]
    assert scripts(files) == {"a.script"}
    assert ("a.four", "a.script") in graph.edges
