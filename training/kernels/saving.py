"""What training saves for a target: boosters, a sidecar that describes them, and measured times.

In training/predictors/<target>/:
- `predictors.json`, the sidecar: the target, what the predictors read, their errors, and the files below with their SHA-256.
- `<label>-<hash>.pkl`: the boosters of one label, as a pickle of bytes by name. Each is a booster as XGBoost saves it (UBJSON),
  compressed by zlib, so that a prediction opens only those that its model needs. What no prediction reads (gain, cover and base
  weight of each node) is zero, which makes the file half as large.
- `other_<label>-<hash>.pkl`: the boosters of another device that a label's predictors correct, where they do.
- `measured-<hash>.json.gz`: idle times by kernel and label, for look-up. Has one line per kernel, sorted, so that a look-up
  reads one line. Also renewed without a training, after kernels were measured for one model
  (inference/core/missing_kernels.py).

The hash protects against damage. Against attacks, unpickling accepts no class at all. History of the schema: in version 1, the
first, a file of boosters was one compressed pickle of xgboost's Booster, and the times were compressed by lzma.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.kernels.boosters import pack_booster
from training.kernels.class_boosters import is_class
from training.kernels.estimators import SHARED, KernelModel
from training.kernels.measured_times import MeasuredTimes
from training.kernels.predictors import read_measured
from training.kernels.sidecar import (
    LabelPredictors,
    OtherDevice,
    Sidecar,
    TypeErrors,
    installed_packages,
    read_sidecar,
    schema_fields,
    sidecar_path,
    write_sidecar,
)
from training.kernels.transfer import Transferred
from utils import files
from utils.logger import get_logger

if TYPE_CHECKING:
    import xgboost

log = get_logger("predictors")
TIMES_COMPRESSION = 6  # of gzip, for measured times: somebody waits while they are renewed


def save_predictors(folder: Path, models: Mapping[str, KernelModel | Transferred], errors: Mapping[str, Sequence[TypeErrors]],
                    measured: Mapping[str, Mapping[str, float]], about: Mapping[str, Any]) -> Sidecar:
    """Saves a target's predictors. The sidecar is written last: until then, the old predictors stay valid.

    Args:
        folder: of the target.
        models, errors: by label; all models use one feature schema.
        measured: idle times (ms) by kernel id and label.
        about: the other fields of the sidecar.
    """
    labels = {}
    for label, trained in models.items():
        model = trained.correction if isinstance(trained, Transferred) else trained
        name, digest = write_boosters(folder, label, used_boosters(model))
        labels[label] = LabelPredictors(
            file=name, sha256=digest, roofline=model.roofline, type_codes=dict(model.type_codes),
            predictor_of=dict(model.predictor_of), errors=tuple(errors[label]),
            start=_save_other(folder, label, trained) if isinstance(trained, Transferred) else None)
    name, digest = write_measured(folder, measured)
    schema = next(iter(models.values())).schema
    sidecar = Sidecar(**schema_fields(schema), packages=installed_packages(), measured=name, measured_sha256=digest,
                      labels=labels, **about)
    write_sidecar(folder, sidecar)
    return sidecar


def _save_other(folder: Path, label: str, trained: Transferred) -> OtherDevice:
    """Writes the other device's boosters, which a label's predictors correct."""
    other = trained.other
    name, digest = write_boosters(folder, f"other_{label}", used_boosters(other))
    return OtherDevice(target=trained.start.target, file=name, sha256=digest, roofline=other.roofline,
                       type_codes=dict(other.type_codes), predictor_of=dict(other.predictor_of),
                       idle_load=tuple(other.idle_load))


def used_boosters(model: KernelModel) -> dict[str, xgboost.Booster]:
    """The boosters that a model's predictions may read, by name."""
    of_classes = filter(is_class, model.boosters)
    return {name: model.boosters[name] for name in sorted({SHARED, *model.predictor_of.values(), *of_classes})}


def renew_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> Sidecar:
    """Adds measured times for look-up. The predictors stay as they are, and so does the hash of the dataset that they were
    trained on, so that the next training sees that the dataset is newer.

    Args:
        folder: of the target's predictors.
        measured: idle times (ms) by kernel id and label; they replace existing ones.

    Raises:
        UserError: there are no predictors, they are of another version, or a file is damaged.
    """
    sidecar = read_sidecar(folder)
    there = read_measured(folder, sidecar).whole()
    name, digest = write_measured(folder, there | {kernel: there.get(kernel, {}) | dict(times)
                                                    for kernel, times in measured.items()})
    sidecar = sidecar.model_copy(update={"measured": name, "measured_sha256": digest})
    write_sidecar(folder, sidecar)
    return sidecar


def copy_predictors(source: Path, folder: Path) -> None:
    """Copies all that was learned for a target, its composition and its host's kernels too. The sidecar is copied last, which
    makes the copy valid."""
    there = [path for path in source.iterdir() if not path.name.startswith(".")]  # without locks and unfinished files
    for path in sorted(there, key=lambda path: (path == sidecar_path(source), path)):
        if path.is_dir():
            copy_predictors(path, folder / path.name)
        else:
            files.write_bytes(folder / path.name, path.read_bytes())


def write_boosters(folder: Path, label: str, boosters: Mapping[str, xgboost.Booster]) -> tuple[str, str]:
    """Writes the boosters of a label; returns the file's name and its SHA-256."""
    packed = {name: pack_booster(booster) for name, booster in boosters.items()}
    return _write_hashed(folder, label, "pkl", pickle.dumps(packed, protocol=5))


def write_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Writes the times to look up; returns the file's name and its SHA-256."""
    return _write_hashed(folder, "measured", "json.gz", gzip.compress(MeasuredTimes.text(measured), TIMES_COMPRESSION, mtime=0))


def _write_hashed(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, str]:
    """Writes `data` to a file whose name has a part of its SHA-256; returns the name and the whole hash."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{digest[:8]}.{suffix}"
    files.write_bytes(folder / name, data)
    return name, digest
