"""The order of the house: no module imports from a room that comes later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.paths import ROOT

ORDER = ("utils", "model_zoo", "ort_analysis", "kernel_model", "benchmark", "graph_model", "overlap_simulator", "training",
         "inference", "evaluator", "recipes")
FILES = [path for room in ORDER for path in (sorted((ROOT / room).glob("**/*.py")) or [ROOT / f"{room}.py"])]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first part of the name of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import; name the room"
            yield node.lineno, (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_only_earlier_rooms(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = set(ORDER[:ORDER.index(room) + 1])
    later = [f"{path}:{line} imports {name}" for line, name in imported(path) if name in ORDER and name not in allowed]
    assert not later


def test_every_room_is_a_package_or_a_script() -> None:
    missing = [room for room in ORDER if not (ROOT / room / "__init__.py").is_file() and not (ROOT / f"{room}.py").is_file()]
    assert not missing


def test_no_python_file_stands_outside_the_order() -> None:
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert rooms - {".venv", "tests"} <= set(ORDER)
