"""Saves and reads what training learns for a target, in training/predictors/<target>/.

- `predictors.json`, the sidecar: the target, the predictors of each label (saved_form.py), their errors, and each file's
  SHA-256.
- `<label>-<hash>.npz`: the boosters of a label; `doubt-<hash>.npz`: the booster of their doubt.
- `measured-<hash>.json.gz`: idle times by kernel and label, for look-up. Also rewritten without a training, after kernels were
  measured for one model (inference/library/missing_kernels.py).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, model_validator

from hase.learned import target_files
from hase.learned.kernels.estimators import FOREST, KernelModel, Transferred
from hase.learned.kernels.measured import MeasuredTimes, write_measured
from hase.learned.kernels.saved_form import ESTIMATOR_PREFIX, MPS_PREFIX, Saved, features_of, read_checked, save_estimator
from hase.learned.target_files import TRAIN_AGAIN
from hase.records.measurement import drift_key, inputs_key
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, Target, package_version
from hase.utils.paths import FileName

SIDECAR_VERSION = 4
DOUBT = "doubt"
XGBOOST = ("xgboost-cpu", "xgboost")  # names of its packages


class TypeErrors(Frozen):
    """Cross-validated errors of one kernel type (`all`: of every type) in one set of rows; ratios, not per cent.

    Attributes:
        rows_of: `idle`, `all levels`, `under load`, or (of times) `idle, <n> µs and more`.
        predictor: what predicts the type: `shared`, its own (the type's name), `random_forest`, or `mixed` for all types.
        within_10: share of rows predicted within ±10 %.
    """

    type: str
    rows_of: str
    predictor: str
    kernels: int
    mape: float
    median: float
    within_10: float
    forest_mape: float
    roofline_mape: float


class LabelPredictors(Saved):
    """The predictors of one label: `KernelModel`, or `Transferred` with a `start`. `own_types` have a dedicated booster,
    `forest_types` the random forest; `errors` are of held-out kernels."""

    own_types: tuple[str, ...] = ()
    forest_types: tuple[str, ...] = ()
    errors: tuple[TypeErrors, ...] = ()
    start: str = ""

    @property
    def chosen(self) -> dict[str, str]:
        """The predictors chosen for kernel types, as `fit_kernel_model` takes them."""
        return {name: name for name in self.own_types} | dict.fromkeys(self.forest_types, FOREST)


class Carried(Frozen):
    """Kernels converted from another card, for forms that were not measured; `dataset_sha256`: of that card's kernels."""

    card: str
    kernels: int = Field(ge=0)
    dataset_sha256: str


class Sidecar(Frozen):
    """`predictors.json`: a target's predictors and their errors.

    Attributes:
        dataset_sha256: of the kernel table they were trained on; `measured` may be of a newer one.
        packages: versions of the packages that made them.
        metrics: names of the load's features.
        load_range, feature_range: least and greatest value of each metric, and of each of KERNEL_FEATURES, in training.
        held_out: model families that nothing is fitted to.
        doubt: how far off the times of label `gpu` may be (`training/kernels/left_out.py`); None if not learned.
        carried: what was learned from kernels of another card, if anything.
    """

    version: int = SIDECAR_VERSION
    target: Target
    created: str
    dataset_sha256: str
    packages: dict[str, str]
    metrics: tuple[FileName, ...]
    idle_load: dict[FileName, float]
    load_range: dict[FileName, tuple[float, float]]
    loaded_rows: int = Field(ge=0)
    dtypes: tuple[str, ...]
    held_out: tuple[str, ...]
    config: dict[str, Any]
    machines: tuple[Machine, ...]
    feature_range: tuple[tuple[float, float], ...]
    measured: FileName
    measured_sha256: str
    labels: dict[FileName, LabelPredictors] = Field(min_length=1)
    doubt: Saved | None = None
    carried: Carried | None = None

    @model_validator(mode="after")
    def _metrics_agree(self) -> Self:
        if tuple(self.idle_load) != self.metrics or self.load_range.keys() != set(self.metrics):
            raise ValueError(f"idle_load and load_range are not of the metrics {', '.join(self.metrics)}")
        return self


T = TypeVar("T")


def installed_packages() -> dict[str, str]:
    """Versions of the packages on which reading a saved predictor depends."""
    return {"xgboost": package_version(*XGBOOST), "numpy": package_version("numpy"),
            "scikit-learn": package_version("scikit-learn")}


def read_sidecar(folder: Path) -> Sidecar:
    """Reads the sidecar in a target's folder and checks that this Hase can use its predictors. Raises UserError: it is missing,
    damaged, or from another version of Hase or xgboost."""
    path, sidecar = target_files.PREDICTORS.path(folder), target_files.PREDICTORS.needed(folder)
    for label, saved in estimators_of(sidecar).items():
        check_features(path, label, saved)
    if len(sidecar.feature_range) != len(KernelModel.features.names):
        raise UserError(f"{path}: damaged at feature_range: it has {len(sidecar.feature_range)} features; {TRAIN_AGAIN}")
    trained_with = sidecar.packages.get("xgboost", "(not known)")
    installed = package_version(*XGBOOST)  # one package only: each look-up takes a millisecond
    if trained_with.split(".")[:2] != installed.split(".")[:2]:
        raise UserError(f"{path}: made with xgboost {trained_with}, which the installed {installed} may not read; "
                        f"{TRAIN_AGAIN}")
    return sidecar


def estimators_of(sidecar: Sidecar) -> dict[str, Saved]:
    """All estimators saved with a sidecar, by label, and the doubt under DOUBT."""
    return {**sidecar.labels, **({DOUBT: sidecar.doubt} if sidecar.doubt else {})}


def check_features(path: Path, label: str, saved: Saved) -> None:
    """Checks that this Hase computes the features that the predictors of a label read."""
    if saved.features == (installed := features_of(KernelModel)):
        return
    different = sorted(set(saved.features[1:]) ^ set(installed[1:]))
    raise UserError(f"{path}: made by another version of Hase: the predictors of label {label} read feature schema "
                    f"{saved.features[0] if saved.features else 'none'}, this one {installed[0]} (they differ in: "
                    f"{', '.join(different[:3]) or 'what the values mean, or their order'}"
                    f"{', …' if len(different) > 3 else ''}); {TRAIN_AGAIN}")


def save_predictors(folder: Path, models: Mapping[str, KernelModel | Transferred], errors: Mapping[str, Sequence[TypeErrors]],
                    measured: Mapping[str, Mapping[str, float]], about: Mapping[str, Any],
                    doubt: KernelModel | None = None) -> Sidecar:
    """Saves a target's predictors. The sidecar is written last: until then, the old predictors stay valid. `measured` has idle
    times (ms) by kernel id and label, `about` the other fields of the sidecar."""
    labels = {}
    for label, model in models.items():
        saved, start = save_estimator(folder, label, model), model.start.target if isinstance(model, Transferred) else ""
        dedicated_types = tuple(name for name, booster in model.predictor_of.items() if booster == name)
        forest_types = tuple(name for name, booster in model.predictor_of.items() if booster == FOREST)
        labels[label] = LabelPredictors(**dict(saved), own_types=dedicated_types, forest_types=forest_types,
                                        errors=tuple(errors[label]), start=start)
    name, sha256 = write_measured(folder, measured)
    sidecar = Sidecar(packages=installed_packages(), measured=name, measured_sha256=sha256, labels=labels,
                      doubt=save_estimator(folder, DOUBT, doubt) if doubt else None, **about)
    write_sidecar(folder, sidecar)
    return sidecar


def read_measured(folder: Path, sidecar: Sidecar) -> MeasuredTimes:
    """The measured idle times (ms) by kernel id and label."""
    path = folder / sidecar.measured
    try:
        return MeasuredTimes(gzip.decompress(read_checked(path, sidecar.measured_sha256, TRAIN_AGAIN)), path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); {TRAIN_AGAIN}") from None


def renew_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> Sidecar:
    """Adds (or replaces) idle times (ms) for look-up. Hash and predictors stay, so the next training sees a newer dataset."""
    sidecar = read_sidecar(folder)
    times = read_measured(folder, sidecar).whole()
    for kernel, new_times in measured.items():
        replaced = {key for label in new_times for key in (label, drift_key(label), inputs_key(label))}
        times[kernel] = {key: value for key, value in times.get(kernel, {}).items() if key not in replaced} | dict(new_times)
    name, sha256 = write_measured(folder, times)
    sidecar = sidecar.model_copy(update={"measured": name, "measured_sha256": sha256})
    write_sidecar(folder, sidecar)
    return sidecar


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Writes the sidecar, then removes the files that neither it nor the previous sidecar names. The previous ones stay until
    the next writing, since a process may have read that sidecar and not yet its boosters."""
    in_use = _files_named(folder) | _files_of(sidecar)
    target_files.PREDICTORS.write(folder, sidecar)
    for path in _written_files(folder):
        if path.name not in in_use:
            path.unlink()


def _files_of(sidecar: Sidecar) -> set[str]:
    """The names of the files that a sidecar names."""
    return {sidecar.measured, *(saved.file for saved in estimators_of(sidecar).values() if saved.file)}


def _files_named(folder: Path) -> set[str]:
    """The files that the sidecar in `folder` names; none if it is missing, damaged or of another version."""
    try:
        return _files_of(read_sidecar(folder))
    except UserError:
        return set()


def _written_files(folder: Path) -> list[Path]:
    """The files in `folder` that a sidecar names or once named."""
    return [path for path in (*folder.glob("*-*.npz"), *folder.glob("measured-*.json.gz"))
            if not path.name.startswith((ESTIMATOR_PREFIX, MPS_PREFIX))]


def copy_predictors(source: Path, folder: Path, label: str | None = None) -> None:
    """Copies everything learned for a target (only for `label`, if given), with its composition and its host's kernels. The
    sidecar is copied last, which makes the copy valid. Files that only the previous sidecar names are left out."""
    one_label = None
    if label is not None:
        sidecar = read_sidecar(source)
        one_label = sidecar.model_copy(update={"labels": {label: sidecar.labels[label]}})
    needed = _files_of(one_label) if one_label else _files_named(source)
    left_out = {path.name for path in _written_files(source)} - needed
    paths = [path for path in source.iterdir()
             if not path.name.startswith(".") and path.name not in left_out]  # without locks and unfinished files
    for path in sorted(paths, key=lambda path: (path == target_files.PREDICTORS.path(source), path)):
        if path.is_dir():
            copy_predictors(path, folder / path.name)
        elif one_label and path == target_files.PREDICTORS.path(source):
            write_sidecar(folder, one_label)
        else:
            files.write_bytes(folder / path.name, path.read_bytes())
