"""Finds estimators: files that come with Hase, entry points of installed packages, and files that the user names.

A file runs when it is read. So a file outside of Hase and outside of installed packages is only read if the user names it or
its folder: a workspace may have been made by somebody else.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from training.admission.interface import EnvironmentPattern, Estimator
from utils.errors import UserError
from utils.paths import ESTIMATORS

GROUP = "hase.estimators"  # of entry points
VARIABLE = "HASE_ESTIMATORS"  # in the environment: files and folders, as --estimators names them
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")  # becomes a part of a file's name
STATED = ("name", "features")  # what has no default


class Found(NamedTuple):
    """An estimator's class, and where it comes from.

    Attributes:
        source: for people: `Hase`, the package and its version, or the file.
        code_sha256: of the user's file; "" for Hase and packages, whose versions say what they are.
    """

    estimator: type[Estimator]
    source: str
    code_sha256: str = ""


def find_estimators(named: Sequence[Path] = ()) -> dict[str, Found]:
    """All estimators by name. Those of Hase and of installed packages are found by themselves.

    Args:
        named: the user's files, or folders whose files are read; those that the environment names are read, too.

    Raises:
        UserError: a file or a package can't be read, states too little, or two estimators have one name.
    """
    found: dict[str, Found] = {}
    for one in (*_shipped(), *_of_packages(), *_of_files([*named, *_in_environment()])):
        name = one.estimator.name
        if name in found:
            raise UserError(f"estimator {name}: two have this name, of {found[name].source} and of {one.source}; rename one")
        found[name] = one
    return found


def find_estimator(name: str, named: Sequence[Path] = ()) -> Found:
    """The estimator `name`; arguments and errors as of `find_estimators`, and there is none of this name."""
    found = find_estimators(named)
    if name not in found:
        raise UserError(f"estimator {name}: not found (there: {', '.join(sorted(found))}); name its file or folder with "
                        f"--estimators (or in {VARIABLE}), or install its package")
    return found[name]


def _shipped() -> Iterator[Found]:
    for path in sorted(ESTIMATORS.glob("[!_]*.py")):
        for estimator in _defined_in(importlib.import_module(f"training.estimators.{path.stem}"), str(path)):
            yield Found(estimator, "Hase")


def _of_packages() -> Iterator[Found]:
    """An entry point is a class or a module of classes."""
    for point in metadata.entry_points(group=GROUP):
        of = f"package {point.dist.name} {point.dist.version}" if point.dist else f"entry point {point.value}"
        try:
            loaded = point.load()
        except Exception as error:  # someone else's code can fail in any way
            raise UserError(f"{of}: its entry point {point.name} of {GROUP} can't be loaded ({_said(error)}); repair or "
                            "uninstall the package") from error
        if isinstance(loaded, ModuleType):
            yield from (Found(one, of) for one in _defined_in(loaded, of))
        elif isinstance(loaded, type) and issubclass(loaded, Estimator):
            yield Found(_checked(loaded, of), of)
        else:
            raise UserError(f"{of}: its entry point {point.name} of {GROUP} is no Estimator and no module")


def _of_files(named: Sequence[Path]) -> Iterator[Found]:
    for path in dict.fromkeys(one for place in named for one in _files_at(place)):
        code = path.read_bytes()
        sha256 = hashlib.sha256(code).hexdigest()
        found = _defined_in(_module(path, sha256), str(path))
        if not found:
            raise UserError(f"{path}: defines no Estimator (training/admission/interface.py)")
        yield from (Found(one, f"file {path.name}", sha256) for one in found)


def _in_environment() -> list[Path]:
    return [Path(place) for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]


def _files_at(place: Path) -> list[Path]:
    """A file, or the files of a folder, absolute."""
    if place.is_file():
        return [place.resolve()]
    if not place.is_dir():
        raise UserError(f"--estimators {place}: no such file or folder")
    inside = sorted(path.resolve() for path in place.glob("[!_.]*.py"))
    if not inside:
        raise UserError(f"--estimators {place}: no .py file in this folder")
    return inside


def _module(path: Path, sha256: str) -> ModuleType:
    """The file as a module, run once for each content."""
    name = f"hase_estimators_{path.stem}_{sha256[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code can fail in any way
        del sys.modules[name]
        raise UserError(f"{path}: can't be run ({_said(error)})") from error
    return module


def _defined_in(module: ModuleType, where: str) -> list[type[Estimator]]:
    """The estimators that a module itself defines; not those that it imports, nor base classes."""
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Estimator)
               and one.__module__ == module.__name__ and not inspect.isabstract(one)]
    return [_checked(one, where) for one in classes]


def _checked(estimator: type[Estimator], where: str) -> type[Estimator]:
    if missing := [name for name in STATED if not hasattr(estimator, name)]:
        raise UserError(f"{where}: estimator {estimator.__name__} does not state its {' and '.join(missing)}")
    if not NAME.fullmatch(estimator.name):
        raise UserError(f"{where}: the name {estimator.name!r} of an estimator: letters, digits, _ and -, at most 60")
    stated = estimator.environments
    if not isinstance(stated, tuple) or not all(isinstance(one, EnvironmentPattern) for one in stated):
        raise UserError(f"{where}: estimator {estimator.name}: environments is no tuple of EnvironmentPattern")
    return estimator


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
