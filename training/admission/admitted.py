"""The admitted estimators of a target: `estimators.json` in the folder of its predictors, and a file for each.

Where an estimator was admitted for a kernel type, it predicts the kernels of that type that were not measured. Its code is
looked for at the first such prediction: without it, or with other code than was checked, there is no prediction but an error
that says what to do. History of the schema: version 1 is the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from records.kernel_record import Kernel
from training.admission.finding import find_estimator
from training.admission.interface import Estimator
from training.admission.saved_form import CHECK, from_bytes, to_bytes
from utils import files
from utils.errors import UserError
from utils.fingerprint import Target
from utils.frozen import Frozen
from utils.paths import ADMITTED
from utils.safe_names import FileName
from utils.timing import ErrorStatistics

ADMITTED_VERSION = 1
Floats = npt.NDArray[np.float64]


class Admitted(Frozen):
    """An admitted estimator, with its errors on held-out kernels.

    Attributes:
        name, version: of the estimator.
        source, code_sha256: where its code comes from, as of `finding.Found`.
        label: which time of a kernel it predicts.
        types: the kernel types that it predicts.
        file, sha256: what it learned.
        hold_out: what was held out together: `family` or `kernel`.
        errors, errors_before, errors_of_roofline: of the estimator, of what it replaced, and of a roofline, on the same
            kernels.
        true_over_predicted: the range that held 90 % of these kernels.
        forced: whether it was admitted although it is not better than what it replaced.
        dataset_sha256: of the kernel table that it was checked on.
    """

    name: FileName
    version: int
    source: str
    code_sha256: str = ""
    label: str
    types: tuple[str, ...]
    file: FileName
    sha256: str
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

    def doubt(self, target: str, dataset_sha256: str) -> str:
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
        if entry.file not in self._opened:
            self._opened[entry.file] = self._open(entry)
        estimator = self._opened[entry.file]
        return checked_times(estimator, [kernel.type for kernel in kernels], estimator.features.matrix(kernels))

    def _open(self, entry: Admitted) -> Estimator:
        path = self.folder / entry.file
        remedy = (f"check it again: {CHECK} {entry.name} --target {self.target.name}, or do without it: {CHECK} --remove "
                  f"{entry.name} --target {self.target.name}")
        try:
            found = find_estimator(entry.name, self.named)
        except UserError as error:
            raise UserError(f"{path.parent / ADMITTED}: {error}; or do without it: {CHECK} --remove {entry.name} --target "
                            f"{self.target.name}") from None
        if (found.code_sha256, found.estimator.version) != (entry.code_sha256, entry.version):
            raise UserError(f"{path.parent / ADMITTED}: estimator {entry.name} was checked as version {entry.version} of "
                            f"{entry.source}, but the code of {found.source}, version {found.estimator.version}, is another; "
                            f"{remedy}")
        if not found.estimator.holds_for(self.target):
            raise UserError(f"{path.parent / ADMITTED}: estimator {entry.name} does not hold for {self.target.name}; {remedy}")
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise UserError(f"{path}: {'damaged or changed' if data else 'missing'}; {remedy}")
        return from_bytes(data, found.estimator, path)


def checked_times(estimator: Estimator, types: Sequence[str], features: Floats) -> Floats:
    """What an estimator predicts (ms).

    Raises:
        UserError: it is not a positive number for each row.
    """
    times_ms = np.asarray(estimator.predict_ms(types, features), dtype=float)
    if times_ms.shape != (len(types),) or not (np.isfinite(times_ms) & (times_ms > 0)).all():
        raise UserError(f"estimator {estimator.name}: predicts something else than a positive number of ms for each of "
                        f"{len(types)} kernels")
    return times_ms


def read_entries(folder: Path) -> tuple[Admitted, ...]:
    """What `estimators.json` in a target's folder lists; nothing where it is not there.

    Raises:
        UserError: it is damaged or of another version.
    """
    path = folder / ADMITTED
    return files.read_record(path, AdmittedFile, ADMITTED_VERSION, CHECK).estimators if path.is_file() else ()


def read_admitted(folder: Path, target: Target, named: Sequence[Path]) -> AdmittedEstimators | None:
    """The admitted estimators of a target, None where there are none; errors as of `read_entries`."""
    entries = read_entries(folder)
    return AdmittedEstimators(folder, target, entries, named) if entries else None


def admit(folder: Path, estimator: Estimator, about: Mapping[str, object]) -> Admitted:
    """Saves a fitted estimator and lists it. It takes over its types from estimators that predicted them before.

    Args:
        folder: of the target's predictors.
        estimator: fitted to all kernels.
        about: the fields of `Admitted` that are not of the file and the estimator.
    """
    data = to_bytes(estimator)
    digest = hashlib.sha256(data).hexdigest()
    entry = Admitted.model_validate({**about, "name": estimator.name, "version": estimator.version, "sha256": digest,
                                     "file": f"estimator_{estimator.name}-{digest[:8]}.json.gz"})
    files.write_bytes(folder / entry.file, data)
    kept = []
    for one in read_entries(folder):
        types = tuple(name for name in one.types if name not in entry.types)
        if one.label != entry.label:
            kept.append(one)
        elif types and one.name != entry.name:
            kept.append(one.model_copy(update={"types": types}))
    _write(folder, [*kept, entry])
    return entry


def remove(folder: Path, name: str) -> None:
    """Takes an estimator off the list, so that the predictors predict its types again.

    Raises:
        UserError: it is not on the list.
    """
    entries = read_entries(folder)
    if name not in (there := sorted({one.name for one in entries})):
        raise UserError(f"{folder / ADMITTED}: estimator {name} is not admitted (there: {', '.join(there) or 'none'})")
    _write(folder, [one for one in entries if one.name != name])


def _write(folder: Path, entries: Sequence[Admitted]) -> None:
    """Writes the list, then removes the files that it no longer names."""
    files.write_json(folder / ADMITTED, AdmittedFile(estimators=tuple(entries)))
    for old in folder.glob("estimator_*-*.json.gz"):
        if old.name not in {one.file for one in entries}:
            old.unlink()
