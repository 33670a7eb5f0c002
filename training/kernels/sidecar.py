"""The sidecar of saved predictors, `predictors.json`: their target, what they read, and their errors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from training.kernels.features import SCHEMAS
from training.kernels.roofline import Roofline
from training.kernels.schema import FeatureSchema
from utils import files
from utils.errors import UserError
from utils.fingerprint import Machine, Target, package_version
from utils.frozen import Frozen
from utils.paths import SIDECAR
from utils.safe_names import FileName

SIDECAR_VERSION = 3
TRAIN = "python training/train_kernel_model.py"
XGBOOST = ("xgboost-cpu", "xgboost")  # the names under which it is installed


class TypeErrors(Frozen):
    """Cross-validated errors of one kernel type (`all`: of every type) in one set of rows; ratios, not per cent.

    Attributes:
        rows_of: `idle`, `all levels`, `under load`, or (of times) `idle, <n> µs and more`.
        predictor: what predicts the type: `shared`, its own (the type's name), or `mixed` for all types.
        within_10: share of rows predicted within ±10 %.
        forest_mape, roofline_mape: of the random forest and the roofline, for comparison.
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


class OtherDevice(Frozen):
    """The predictors of another target that a label's predictors correct (training/kernels/transfer.py). They read the same
    features, and are copied, since that target may be trained again."""

    target: str
    file: FileName
    sha256: str
    roofline: Roofline
    type_codes: dict[str, float]
    predictor_of: dict[str, str]
    idle_load: tuple[float, ...]


class LabelPredictors(Frozen):
    """The predictors of one label. Without a `file` nothing was trained, and there is only the roofline. With `start`, they
    predict the ratio to the times of another device, and `roofline` is that of the ratios."""

    file: FileName | None
    sha256: str
    roofline: Roofline
    type_codes: dict[str, float]
    predictor_of: dict[str, str]
    errors: tuple[TypeErrors, ...]
    start: OtherDevice | None = None

    @property
    def own_types(self) -> list[str]:
        """The kernel types that have a predictor of their own."""
        return [name for name, predictor in self.predictor_of.items() if predictor == name]


class Sidecar(Frozen):
    """`predictors.json`.

    Attributes:
        target: what the predictors are valid for.
        dataset_sha256: of the kernel table they were trained on; `measured` may be of a newer one.
        packages: versions of the packages that made them.
        feature_schema, feature_version: the schema of the features.
        features: what the boosters read, in order; the code of the type and the load follow.
        metrics: names of the load's features.
        idle_load: the load of an idle device.
        load_range: least and greatest value of each metric in training; both the same where only an idle device was measured.
        dtypes: element types of the kernels in training.
        held_out: model families that nothing is fitted to.
        config: the settings of the training.
        machines: the machines that measured the dataset.
        feature_range: least and greatest value of each of `features` in training.
        measured, measured_sha256: the file of measured idle times.
        labels: by name.
    """

    version: int = SIDECAR_VERSION
    target: Target
    created: str
    dataset_sha256: str
    packages: dict[str, str]
    feature_schema: str
    feature_version: int
    features: tuple[str, ...]
    metrics: tuple[str, ...]
    idle_load: dict[str, float]
    load_range: dict[str, tuple[float, float]]
    loaded_rows: int
    dtypes: tuple[str, ...]
    held_out: tuple[str, ...]
    config: dict[str, Any]
    machines: tuple[Machine, ...]
    feature_range: tuple[tuple[float, float], ...]
    measured: FileName
    measured_sha256: str
    labels: dict[str, LabelPredictors]


def schema_of(sidecar: Sidecar) -> FeatureSchema:
    """The feature schema of a sidecar that `read_sidecar` has checked."""
    return SCHEMAS[sidecar.feature_schema, sidecar.feature_version]


def schema_fields(schema: FeatureSchema) -> dict[str, Any]:
    """The fields of a sidecar that describe a feature schema."""
    return {"feature_schema": schema.name, "feature_version": schema.version, "features": schema.names}


def sidecar_path(folder: Path) -> Path:
    return folder / SIDECAR


def installed_packages() -> dict[str, str]:
    """Versions of the packages on which it depends whether a saved predictor can be read."""
    return {"xgboost": package_version(*XGBOOST), "numpy": package_version("numpy"),
            "scikit-learn": package_version("scikit-learn")}


def read_sidecar(folder: Path) -> Sidecar:
    """The sidecar in `folder`.

    Raises:
        UserError: there is none, it is damaged, or another version of Hase or xgboost made it.
    """
    path = sidecar_path(folder)
    if not path.is_file():
        raise UserError(f"{folder}: no predictors; train them with: {TRAIN}")
    sidecar = files.read_record(path, Sidecar, SIDECAR_VERSION, TRAIN)
    check_schema(path, sidecar)
    made, here = sidecar.packages["xgboost"], package_version(*XGBOOST)  # alone: to look one up takes a millisecond
    if made.split(".")[:2] != here.split(".")[:2]:
        raise UserError(f"{path}: made with xgboost {made}, here is {here}, which may not read it; train again: {TRAIN}")
    return sidecar


def check_schema(path: Path, sidecar: Sidecar) -> None:
    """Checks that this Hase computes the features that the predictors read.

    Args:
        path: of the sidecar.
        sidecar: what it holds.

    Raises:
        UserError: this Hase has no such feature schema, or one with other features.
    """
    asked = f"{sidecar.feature_schema} {sidecar.feature_version}"
    schema = SCHEMAS.get((sidecar.feature_schema, sidecar.feature_version))
    if schema is None:
        raise UserError(f"{path}: these predictors read feature schema {asked}, which this Hase does not have (it has: "
                        f"{', '.join(map(str, SCHEMAS.values()))}); use the Hase that trained them, or train again: {TRAIN}")
    if sidecar.features != schema.names:
        odd = sorted(set(sidecar.features) ^ set(schema.names))
        raise UserError(f"{path}: made by another version of Hase, with other features in feature schema {asked} "
                        f"({', '.join(odd[:3]) or 'in another order'}{', …' if len(odd) > 3 else ''}); train again: {TRAIN}")


def read_checked(path: Path, sha256: str) -> bytes:
    """The bytes of `path`.

    Raises:
        UserError: the file is missing, or its SHA-256 is not the one that the sidecar holds.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: named in {sidecar_path(path.parent)} but missing; train again: {TRAIN}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: damaged or changed after training (its SHA-256 is not the one in {SIDECAR}); "
                        f"train again: {TRAIN}")
    return data


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Writes the sidecar, then removes the files that only the previous sidecar names."""
    files.write_json(sidecar_path(folder), sidecar)
    kept = {sidecar.measured, *(about.file for about in sidecar.labels.values()),
            *(about.start.file for about in sidecar.labels.values() if about.start)}
    for old in [*folder.glob("*-*.pkl"), *folder.glob("measured-*.json.gz")]:
        if old.name not in kept:
            old.unlink()
