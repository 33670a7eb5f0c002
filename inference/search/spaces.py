"""The sources of a search's candidates: a folder of models, a list of them, a Python file, or the space that comes with Hase.

A Python file defines `choices()`, a generator of models: paths, models in memory or kernel records. Optionally it defines:

- `make(choice, flavour)`: makes a model of an item of `choices` (text or numbers, for example). Then a search in several
  processes makes models in all of them, and a resumed search skips earlier items without making them.
- `score(choice)`: a number, larger is better, such as an estimated accuracy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hase.inference.prediction.sources import Source
from hase.inference.search import ofa
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

COUNT = 10_000  # networks drawn from a space that is too large to enumerate
LISTS = (".txt", ".lst")
Choice = Any


class SearchSpace(NamedTuple):
    """The candidates of a search.

    Attributes:
        choices: returns a new iterator over the candidates, always in the same order.
        total: their number; None if not known in advance.
        make: makes a model of a choice for the flavour of the target.
        score: the space's own score of a choice; larger is better.
    """

    choices: Callable[[], Iterator[Choice]]
    total: int | None
    make: Callable[[Choice, Flavour], Source]
    score: Callable[[Choice], float] | None = None


def space_of(name: str, workspace: Workspace, count: int | None = None, seed: int = 0) -> SearchSpace:
    """The search space with this name.

    Args:
        name: `ofa`, a folder of models (.onnx), a list of them (.txt, one path a line), or a Python file (.py).
        count: use only the first ones; by default all, and COUNT of a random space (drawn with `seed`).
    """
    path = Path(name)
    if name == ofa.PREFIX:
        drawn = COUNT if count is None else count
        return SearchSpace(lambda: ofa.choices(drawn, seed), drawn, ofa.make)
    if path.suffix == ".py" and path.is_file():
        return _file_space(path, count)
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
    return SearchSpace(lambda: iter(models), len(models), _choice_itself)


def _choice_itself(choice: Choice, flavour: Flavour) -> Source:
    """Returns the choice, which is already a model."""
    source: Source = choice
    return source


def _file_space(path: Path, count: int | None) -> SearchSpace:
    """The space that a Python file defines."""
    module = _imported_module(path)
    choices = getattr(module, "choices", None)
    if not callable(choices):
        raise UserError(f"{path}: defines no function choices() that gives the candidates, one after another")
    return SearchSpace(lambda: islice(_guarded_choices(path, "choices", choices), count), count,
                       getattr(module, "make", _choice_itself), getattr(module, "score", None))


def _imported_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"search_space_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(path, "its code", error) from error
    return module


def _guarded_choices(path: Path, function: str, choices: Callable[[], Iterator[Choice]]) -> Iterator[Choice]:
    try:
        yield from choices()
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(path, function, error) from error


def user_code_error(what: object, function: str, error: Exception) -> UserError:
    """The error for an exception of the user's code, in one line."""
    return UserError(f"{what}: {function} failed with {type(error).__name__}: {error}")
