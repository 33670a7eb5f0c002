"""Finds estimators of kernel times, and reads those that were admitted for a target.

Estimators come with Hase, as entry points of installed packages, or in files that the user names. Other files are not read,
since reading one runs its code, and a workspace may come from somebody else.

`estimators.json` in the folder of a target's predictors lists the admitted estimators. Each predicts the unmeasured kernels of
its types. Its code is found at the first such prediction. If it is missing, or has changed since it was checked, the prediction
fails with an error that says what to do.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from hase.learned import target_files
from hase.learned.kernels.features import KernelRows
from hase.learned.kernels.interface import EnvironmentPattern, Estimator
from hase.learned.kernels.saved_form import Saved, open_estimator
from hase.learned.target_files import CHECK_ESTIMATOR
from hase.records.kernel_record import Kernel
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import ESTIMATORS
from hase.utils.timing import ErrorStatistics, Floats

ADMITTED_VERSION = 2
GROUP = "hase.estimators"  # of entry points
VARIABLE = "HASE_ESTIMATORS"  # of the environment: files and folders, as for --estimators
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")  # becomes a part of a file's name


class Admitted(Saved):
    """An admitted estimator, with its errors on held-out kernels.

    Attributes:
        hold_out: what was held out as a whole: `family` or `kernel`.
        errors, errors_before, errors_of_roofline: of the estimator, of what it replaced, and of a roofline, on the same
            kernels.
        true_over_predicted: the range that contains 90 % of these kernels.
        forced: admitted although it is not better than what it replaced.
    """

    source: str
    code_sha256: str = ""
    label: str
    types: tuple[str, ...]
    hold_out: str
    errors: ErrorStatistics
    errors_before: ErrorStatistics
    errors_of_roofline: ErrorStatistics
    true_over_predicted: tuple[float, float]
    forced: bool = False
    dataset_sha256: str
    created: str

    @property
    def sentence(self) -> str:
        """What a prediction says about the estimator that it used."""
        forced = "; forced: it is not better, so the prediction is less sure" if self.forced else ""
        return (f"{', '.join(self.types)}: predicted by the estimator {self.name} ({self.source}), which was off by "
                f"{self.errors.mape:.1%} on {self.errors.count} held-out measurements (what it replaced: "
                f"{self.errors_before.mape:.1%}){forced}")

    def outdated(self, target: str, dataset_sha256: str) -> str:
        """A warning if the estimator was checked on another dataset than the target's predictors were trained on; else ""."""
        return "" if self.dataset_sha256 == dataset_sha256 else (
            f"the estimator {self.name} was checked on another dataset than the predictors were trained on; check it again: "
            f"{CHECK_ESTIMATOR} {self.name} --target {target}")


class AdmittedFile(Frozen):
    """`estimators.json`. A kernel type has at most one estimator per label."""

    version: int = ADMITTED_VERSION
    estimators: tuple[Admitted, ...] = ()


@dataclass
class AdmittedEstimators:
    """The admitted estimators of a target, ready to predict; `given` are the user's files and folders with estimators."""

    folder: Path
    target: Target
    entries: tuple[Admitted, ...] = ()
    given: Sequence[Path] = ()
    _opened: dict[str, Estimator] = field(default_factory=dict, repr=False)

    def by_type(self, label: str) -> dict[str, Admitted]:
        """The estimators for a label, by kernel type."""
        return {name: entry for entry in self.entries if entry.label == label for name in entry.types}

    def predict_ms(self, entry: Admitted, kernels: Sequence[Kernel]) -> Floats:
        """The idle times (ms) that an admitted estimator predicts. Raises UserError: its code is missing or changed, its file
        is damaged, or it predicts no times."""
        if entry.name not in self._opened:
            self._opened[entry.name] = self._open(entry)
        estimator = self._opened[entry.name]
        return checked_times(estimator, KernelRows.of(kernels, estimator.features.matrix(kernels)))

    def _open(self, entry: Admitted) -> Estimator:
        path = target_files.ESTIMATORS.path(self.folder)
        do_without = f"or do without it: {CHECK_ESTIMATOR} --remove {entry.name} --target {self.target.name}"
        remedy = f"check it again: {CHECK_ESTIMATOR} {entry.name} --target {self.target.name}, {do_without}"
        try:
            known = find_estimator(entry.name, self.given)
        except UserError as error:
            raise UserError(f"{path}: {error}; {do_without}") from None
        if (known.code_sha256, known.estimator.version) != (entry.code_sha256, entry.version):
            raise UserError(f"{path}: estimator {entry.name} was checked as version {entry.version} of {entry.source}, but the "
                            f"code of {known.source}, version {known.estimator.version}, has changed since; {remedy}")
        if not known.estimator.holds_for(self.target):
            raise UserError(f"{path}: estimator {entry.name} does not hold for {self.target.name}; {remedy}")
        return open_estimator(entry, known.estimator, self.folder, remedy)


def checked_times(estimator: Estimator, kernels: KernelRows) -> Floats:
    """An estimator's predictions (ms). Raises UserError if they are not one positive number for each row."""
    times_ms = np.asarray(estimator.predict_ms(kernels), dtype=float)
    if times_ms.shape != (len(kernels),) or not (np.isfinite(times_ms) & (times_ms > 0)).all():
        raise UserError(f"estimator {estimator.name}: must predict a positive number of ms for each of {len(kernels)} kernels")
    return times_ms


def read_entries(folder: Path) -> tuple[Admitted, ...]:
    """The entries of `estimators.json` in a target's folder; none if the file is missing."""
    listed = target_files.ESTIMATORS.read(folder)
    return listed.estimators if listed else ()


def read_admitted(folder: Path, target: Target, given: Sequence[Path]) -> AdmittedEstimators | None:
    """The admitted estimators of a target; None if there are none."""
    entries = read_entries(folder)
    return AdmittedEstimators(folder, target, entries, given) if entries else None


class KnownEstimator(NamedTuple):
    """An estimator's class and its origin: `Hase`, the package and its version, or the file."""

    estimator: type[Estimator]
    source: str
    code_sha256: str = ""


def find_estimators(given: Sequence[Path] = ()) -> dict[str, KnownEstimator]:
    """All estimators by name, from Hase, installed packages, and files or folders that the user or the environment names."""
    known: dict[str, KnownEstimator] = {}
    in_environment = [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    for entry in (*_from_hase(), *_from_packages(), *_from_files([*given, *in_environment])):
        name = entry.estimator.name
        if name in known:
            raise UserError(f"estimator {name}: two estimators have this name, in {known[name].source} and in "
                            f"{entry.source}; rename one of them")
        known[name] = entry
    return known


def find_estimator(name: str, given: Sequence[Path] = ()) -> KnownEstimator:
    """The estimator of this name. Raises UserError if there is none."""
    known = find_estimators(given)
    if name not in known:
        raise UserError(f"estimator {name}: not found (known: {', '.join(sorted(known))}); name its file or folder with "
                        f"--estimators (or in {VARIABLE}), or install its package")
    return known[name]


def _from_hase() -> Iterator[KnownEstimator]:
    for path in sorted(ESTIMATORS.glob("[!_]*.py")):
        module = importlib.import_module(f"hase.training.estimators.{path.stem}")
        yield from (KnownEstimator(estimator, "Hase") for estimator in _defined_in(module, str(path)))


def _from_packages() -> Iterator[KnownEstimator]:
    """The estimators of installed packages, whose entry points are classes or modules with classes."""
    for point in metadata.entry_points(group=GROUP):
        origin = f"package {point.dist.name} {point.dist.version}" if point.dist else f"entry point {point.value}"
        try:
            loaded = point.load()
        except Exception as error:  # someone else's code can fail in any way
            raise UserError(f"{origin}: its entry point {point.name} of {GROUP} can't be loaded ({_error_text(error)}); "
                            "repair or uninstall the package") from error
        if isinstance(loaded, ModuleType):
            yield from (KnownEstimator(estimator, origin) for estimator in _defined_in(loaded, origin))
        elif isinstance(loaded, type) and issubclass(loaded, Estimator):
            yield KnownEstimator(_checked(loaded, origin), origin)
        else:
            raise UserError(f"{origin}: its entry point {point.name} of {GROUP} is neither an Estimator nor a module")


def _from_files(given: Sequence[Path]) -> Iterator[KnownEstimator]:
    for path in dict.fromkeys(path for file_or_folder in given for path in _files_at(file_or_folder)):
        sha256 = files.sha256(path)
        estimators = _defined_in(_module(path, sha256), str(path))
        if not estimators:
            raise UserError(f"{path}: defines no Estimator (learned/kernels/interface.py)")
        yield from (KnownEstimator(estimator, f"file {path.name}", sha256) for estimator in estimators)


def _files_at(path: Path) -> list[Path]:
    """A file, or the files of a folder, as absolute paths."""
    if path.is_file():
        return [path.resolve()]
    if not path.is_dir():
        raise UserError(f"--estimators {path}: no such file or folder")
    inside = sorted(file.resolve() for file in path.glob("[!_.]*.py"))
    if not inside:
        raise UserError(f"--estimators {path}: no .py file in this folder")
    return inside


def _module(path: Path, sha256: str) -> ModuleType:
    """The file as a module. Its code runs once, and again only after a change."""
    name = f"hase_estimators_{path.stem}_{sha256[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code can fail in any way
        del sys.modules[name]
        raise UserError(f"{path}: can't be run ({_error_text(error)})") from error
    return module


def _defined_in(module: ModuleType, where: str) -> list[type[Estimator]]:
    """The estimators that a module defines itself, without imported ones and base classes."""
    return [_checked(member, where) for member in vars(module).values() if isinstance(member, type) and issubclass(
        member, Estimator) and member.__module__ == module.__name__ and not inspect.isabstract(member)]


def _checked(estimator: type[Estimator], where: str) -> type[Estimator]:
    if not hasattr(estimator, "name"):
        raise UserError(f"{where}: estimator {estimator.__name__} has no `name`; give it one")
    if not NAME.fullmatch(estimator.name):
        raise UserError(f"{where}: the name {estimator.name!r} of an estimator may have at most 60 characters: letters, "
                        "digits, _ and -")
    patterns = estimator.environments
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, EnvironmentPattern) for pattern in patterns):
        raise UserError(f"{where}: estimator {estimator.name}: environments must be a tuple of EnvironmentPattern")
    return estimator


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
