"""Estimators that are known, and those of them that were admitted for a target.

Known are the files that come with Hase, entry points of installed packages, and files that the user names. A file runs when it
is read. So a file outside of Hase and outside of installed packages is only read if the user names it or its folder: a
workspace may have been made by somebody else.

`estimators.json` in the folder of a target's predictors lists the admitted ones. An estimator that was admitted for a kernel
type predicts the kernels of that type that were not measured. Its code is looked for at the first such prediction: without it,
or with other code than was checked, there is no prediction but an error that says what to do.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.kernels.estimators import KernelModel
from hase.learned.kernels.interface import EnvironmentPattern, Estimator
from hase.learned.kernels.saved_form import ESTIMATOR_PREFIX, Saved, open_estimator, save_estimator
from hase.learned.kernels.schema import KernelRows
from hase.records.kernel_record import Kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.frozen import Frozen
from hase.utils.paths import ADMITTED, ESTIMATORS
from hase.utils.timing import ErrorStatistics

ADMITTED_VERSION = 2
CHECK = "python training/check_estimator.py"
GROUP = "hase.estimators"  # of entry points
VARIABLE = "HASE_ESTIMATORS"  # in the environment: files and folders, as --estimators names them
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")  # becomes a part of a file's name
Floats = npt.NDArray[np.float64]


class Admitted(Saved):
    """An admitted estimator, with its errors on held-out kernels.

    Attributes:
        source, code_sha256: where its code comes from, as `KnownEstimator` says.
        label: which time of a kernel it predicts.
        types: the kernel types that it predicts.
        hold_out: what was held out together: `family` or `kernel`.
        errors, errors_before, errors_of_roofline: of the estimator, of what it replaced, and of a roofline, on the same
            kernels.
        true_over_predicted: the range that held 90 % of these kernels.
        forced: whether it was admitted although it is not better than what it replaced.
        dataset_sha256: of the kernel table that it was checked on.
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
    def said(self) -> str:
        """A sentence about it, for the answer."""
        forced = "; forced: it is not better, so the prediction is less sure" if self.forced else ""
        return (f"{', '.join(self.types)}: predicted by the estimator {self.name} ({self.source}), which was off by "
                f"{self.errors.mape:.1%} on {self.errors.count} held-out measurements (what it replaced: "
                f"{self.errors_before.mape:.1%}){forced}")

    def outdated(self, target: str, dataset_sha256: str) -> str:
        """A sentence where `target`'s predictors were trained on another dataset than it was checked on; else ""."""
        return "" if self.dataset_sha256 == dataset_sha256 else (
            f"the estimator {self.name} was checked on another dataset than the predictors were trained on; check it again: "
            f"{CHECK} {self.name} --target {target}")


class AdmittedFile(Frozen):
    """`estimators.json`. A kernel type has at most one estimator for each label."""

    version: int = ADMITTED_VERSION
    estimators: tuple[Admitted, ...] = ()


@dataclass
class AdmittedEstimators:
    """The admitted estimators of a target, ready to predict.

    Attributes:
        folder: of the target's predictors.
        target: whose they are.
        entries: what `estimators.json` lists.
        named: the user's files and folders with estimators.
    """

    folder: Path
    target: Target
    entries: tuple[Admitted, ...] = ()
    named: Sequence[Path] = ()
    _opened: dict[str, Estimator] = field(default_factory=dict, repr=False)

    def of(self, label: str) -> dict[str, Admitted]:
        """By kernel type, what predicts the times of a label."""
        return {name: entry for entry in self.entries if entry.label == label for name in entry.types}

    def predict_ms(self, entry: Admitted, kernels: Sequence[Kernel]) -> Floats:
        """The idle times of kernels.

        Raises:
            UserError: the estimator's code is not there or another one, its file is damaged, or it predicts no times.
        """
        if entry.name not in self._opened:
            self._opened[entry.name] = self._open(entry)
        estimator = self._opened[entry.name]
        return checked_times(estimator, KernelRows.of(kernels, estimator.features.matrix(kernels)))

    def _open(self, entry: Admitted) -> Estimator:
        path = self.folder / ADMITTED
        remedy = (f"check it again: {CHECK} {entry.name} --target {self.target.name}, or do without it: {CHECK} --remove "
                  f"{entry.name} --target {self.target.name}")
        try:
            known = find_estimator(entry.name, self.named)
        except UserError as error:
            raise UserError(f"{path}: {error}; or do without it: {CHECK} --remove {entry.name} --target "
                            f"{self.target.name}") from None
        if (known.code_sha256, known.estimator.version) != (entry.code_sha256, entry.version):
            raise UserError(f"{path}: estimator {entry.name} was checked as version {entry.version} of {entry.source}, but the "
                            f"code of {known.source}, version {known.estimator.version}, has changed since; {remedy}")
        if not known.estimator.holds_for(self.target):
            raise UserError(f"{path}: estimator {entry.name} does not hold for {self.target.name}; {remedy}")
        return open_estimator(entry, known.estimator, self.folder, remedy)


def checked_times(estimator: Estimator, kernels: KernelRows) -> Floats:
    """What an estimator predicts (ms).

    Raises:
        UserError: it is not a positive number for each row.
    """
    times_ms = np.asarray(estimator.predict_ms(kernels), dtype=float)
    if times_ms.shape != (len(kernels),) or not (np.isfinite(times_ms) & (times_ms > 0)).all():
        raise UserError(f"estimator {estimator.name}: must predict a positive number of ms for each of "
                        f"{len(kernels)} kernels")
    return times_ms


def read_entries(folder: Path) -> tuple[Admitted, ...]:
    """What `estimators.json` in a target's folder lists; nothing where it is not there.

    Raises:
        UserError: it is damaged or of another version.
    """
    path = folder / ADMITTED
    return files.read_record(path, AdmittedFile, ADMITTED_VERSION, CHECK).estimators if path.is_file() else ()


def read_admitted(folder: Path, target: Target, named: Sequence[Path]) -> AdmittedEstimators | None:
    """The admitted estimators of a target, None where there are none.

    Raises:
        UserError: `estimators.json` is damaged or of another version.
    """
    entries = read_entries(folder)
    return AdmittedEstimators(folder, target, entries, named) if entries else None


def admit(folder: Path, estimator: Estimator, about: Mapping[str, object]) -> Admitted:
    """Saves a fitted estimator and lists it. It takes over its types from estimators that predicted them before.

    Args:
        folder: of the target's predictors.
        estimator: fitted to all kernels.
        about: the fields of `Admitted` that are not of `Saved`.
    """
    saved = save_estimator(folder, f"{ESTIMATOR_PREFIX}{estimator.name}", estimator)
    entry = Admitted.model_validate({**about, **dict(saved)})
    kept = []
    for before in read_entries(folder):
        types = tuple(name for name in before.types if name not in entry.types)
        if before.label != entry.label:
            kept.append(before)
        elif types and before.name != entry.name:
            kept.append(before.model_copy(update={"types": types}))
    _write(folder, [*kept, entry])
    return entry


def remove(folder: Path, name: str) -> None:
    """Takes an estimator off the list, so that the predictors predict its types again.

    Raises:
        UserError: it is not on the list.
    """
    entries = read_entries(folder)
    if name not in (admitted := sorted({entry.name for entry in entries})):
        raise UserError(f"{folder / ADMITTED}: estimator {name} is not admitted (admitted: {', '.join(admitted) or 'none'})")
    _write(folder, [entry for entry in entries if entry.name != name])


def _write(folder: Path, entries: Sequence[Admitted]) -> None:
    """Writes the list, then removes the files that it no longer names."""
    files.write_json(folder / ADMITTED, AdmittedFile(estimators=tuple(entries)))
    for old in folder.glob(f"{ESTIMATOR_PREFIX}*-*.npz"):
        if old.name not in {entry.file for entry in entries}:
            old.unlink()


class KnownEstimator(NamedTuple):
    """An estimator's class, and where it comes from.

    Attributes:
        source: for people: `Hase`, the package and its version, or the file.
        code_sha256: of the user's file; "" for Hase and packages, whose versions say what they are.
    """

    estimator: type[Estimator]
    source: str
    code_sha256: str = ""


def find_estimators(named: Sequence[Path] = ()) -> dict[str, KnownEstimator]:
    """All estimators by name. Those of Hase and of installed packages are found by themselves.

    Args:
        named: the user's files, or folders whose files are read; those that the environment names are read, too.

    Raises:
        UserError: a file or a package can't be read, states too little, or two estimators have one name.
    """
    known: dict[str, KnownEstimator] = {}
    for entry in (*_shipped(), *_of_packages(), *_of_files([*named, *_in_environment()])):
        name = entry.estimator.name
        if name in known:
            raise UserError(f"estimator {name}: two estimators have this name, in {known[name].source} and in "
                            f"{entry.source}; rename one of them")
        known[name] = entry
    return known


def find_estimator(name: str, named: Sequence[Path] = ()) -> KnownEstimator:
    """The estimator `name`.

    Args:
        named: the user's files, or folders whose files are read.

    Raises:
        UserError: there is none of this name, or a file or a package can't be read.
    """
    known = find_estimators(named)
    if name not in known:
        raise UserError(f"estimator {name}: not found (known: {', '.join(sorted(known))}); name its file or folder with "
                        f"--estimators (or in {VARIABLE}), or install its package")
    return known[name]


def _shipped() -> Iterator[KnownEstimator]:
    yield KnownEstimator(KernelModel, "Hase")
    for path in sorted(ESTIMATORS.glob("[!_]*.py")):
        for estimator in _defined_in(importlib.import_module(f"hase.training.estimators.{path.stem}"), str(path)):
            yield KnownEstimator(estimator, "Hase")


def _of_packages() -> Iterator[KnownEstimator]:
    """An entry point is a class or a module of classes."""
    for point in metadata.entry_points(group=GROUP):
        of = f"package {point.dist.name} {point.dist.version}" if point.dist else f"entry point {point.value}"
        try:
            loaded = point.load()
        except Exception as error:  # someone else's code can fail in any way
            raise UserError(f"{of}: its entry point {point.name} of {GROUP} can't be loaded ({_said(error)}); repair or "
                            "uninstall the package") from error
        if isinstance(loaded, ModuleType):
            yield from (KnownEstimator(estimator, of) for estimator in _defined_in(loaded, of))
        elif isinstance(loaded, type) and issubclass(loaded, Estimator):
            yield KnownEstimator(_checked(loaded, of), of)
        else:
            raise UserError(f"{of}: its entry point {point.name} of {GROUP} is neither an Estimator nor a module")


def _of_files(named: Sequence[Path]) -> Iterator[KnownEstimator]:
    for path in dict.fromkeys(path for place in named for path in _files_at(place)):
        code = path.read_bytes()
        sha256 = hashlib.sha256(code).hexdigest()
        estimators = _defined_in(_module(path, sha256), str(path))
        if not estimators:
            raise UserError(f"{path}: defines no Estimator (learned/kernels/interface.py)")
        yield from (KnownEstimator(estimator, f"file {path.name}", sha256) for estimator in estimators)


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
        raise UserError(f"{path}: not a Python file")
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
    classes = [member for member in vars(module).values() if isinstance(member, type) and issubclass(member, Estimator)
               and member.__module__ == module.__name__ and not inspect.isabstract(member)]
    return [_checked(estimator, where) for estimator in classes]


def _checked(estimator: type[Estimator], where: str) -> type[Estimator]:
    if not hasattr(estimator, "name"):
        raise UserError(f"{where}: estimator {estimator.__name__} does not state its name")
    if not NAME.fullmatch(estimator.name):
        raise UserError(f"{where}: the name {estimator.name!r} of an estimator: letters, digits, _ and -, at most 60")
    stated = estimator.environments
    if not isinstance(stated, tuple) or not all(isinstance(pattern, EnvironmentPattern) for pattern in stated):
        raise UserError(f"{where}: estimator {estimator.name}: environments must be a tuple of EnvironmentPattern")
    return estimator


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
