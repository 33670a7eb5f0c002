"""Where the candidates of a search come from: a folder of models, a list of them, a Python file, or a space that comes with
Hase.

A Python file defines `choices()`, a generator of models: paths, models in memory or kernel records. It may define
`make(choice, flavour)`, which makes a model of what `choices` gives (text or numbers, for example). Then a search in several
processes makes the models in all of them, and an interrupted search passes over those that it has without making them. It may
also define `score(choice)`, a number that is the larger the better, such as an estimated accuracy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hase.inference.core.sources import Source
from hase.inference.search import ofa
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

COUNT = 10_000  # networks of a space that has more than anybody can try
LISTS = (".txt", ".lst")
Choice = Any


class Space(NamedTuple):
    """The candidates of a search.

    Attributes:
        choices: begins the candidates anew, always in the same order.
        total: how many there are; None where that is not known beforehand.
        make: makes a model of a choice for the flavour of the target.
        score: how good a choice is by its own measure, the larger the better; None where there is none.
    """

    choices: Callable[[], Iterator[Choice]]
    total: int | None
    make: Callable[[Choice, Flavour], Source]
    score: Callable[[Choice], float] | None = None


def space_of(name: str, workspace: Workspace, count: int | None = None, seed: int = 0) -> Space:
    """The space with this name.

    Args:
        name: `ofa`, a folder of models (.onnx), a list of them (.txt, one path a line), or a Python file (.py).
        workspace: where bare names of models are looked for.
        count: take so many candidates, the first ones; by default all, and COUNT of a space that is drawn from.
        seed: of a space that is drawn from.

    Raises:
        UserError: there is no such space, or it holds nothing.
    """
    path = Path(name)
    if name == ofa.PREFIX:
        drawn = COUNT if count is None else count
        return Space(lambda: ofa.choices(drawn, seed), drawn, ofa.make)
    if path.suffix == ".py" and path.is_file():
        return _of_file(path, count)
    if path.suffix in LISTS and path.is_file():
        models = [Path(line.strip()) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif path.is_dir():
        models = workspace.find_models([path])
    else:
        raise UserError(f"{name}: no space to search; give a folder of .onnx models, a list of them ({', '.join(LISTS)}), a "
                        f"Python file with a generator choices(), or {ofa.PREFIX}")
    if not models:
        raise UserError(f"{name}: names no models; write a path on each line")
    models = models[:count]
    return Space(lambda: iter(models), len(models), _itself)


def _itself(choice: Choice, flavour: Flavour) -> Source:
    """A choice that is a model."""
    source: Source = choice
    return source


def _of_file(path: Path, count: int | None) -> Space:
    """The space that a Python file defines.

    Raises:
        UserError: it can't be run, or has no generator `choices`.
    """
    module = _imported(path)
    choices = getattr(module, "choices", None)
    if not callable(choices):
        raise UserError(f"{path}: defines no function choices() that gives the candidates, one after another")
    return Space(lambda: islice(_guarded(path, "choices", choices), count), count, getattr(module, "make", _itself),
                 getattr(module, "score", None))


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"search_space_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise failed(path, "its code", error) from error
    return module


def _guarded(path: Path, function: str, choices: Callable[[], Iterator[Choice]]) -> Iterator[Choice]:
    try:
        yield from choices()
    except Exception as error:  # the user's code may raise anything
        raise failed(path, function, error) from error


def failed(what: object, function: str, error: Exception) -> UserError:
    """What the user's code raised, as one line."""
    return UserError(f"{what}: {function} failed with {type(error).__name__}: {error}")
