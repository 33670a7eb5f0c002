"""What training saves for a target, in training/predictors/<target>/.

- `predictors.json`, the sidecar: the target, the predictors of each label (saved_form.py), and their errors.
- `<label>-<hash>.npz`: the boosters of a label; `doubt-<hash>.npz`: that of how far off they may be.
- `measured-<hash>.json.gz`: idle times by kernel and label, for look-up. Also renewed without a training, after kernels were
  measured for one model (inference/core/missing_kernels.py).

The sidecar holds the SHA-256 of each file, which protects against damage.
"""

from __future__ import annotations

import bisect
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from hase.learned.kernels.estimators import FOREST, KernelModel
from hase.learned.kernels.saved_form import (
    ESTIMATOR_PREFIX,
    MPS_PREFIX,
    Saved,
    features_of,
    read_checked,
    save_estimator,
    write_hashed,
)
from hase.learned.kernels.transfer import Transferred
from hase.records.measurement import Milliseconds, drift_key, inputs_key
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Machine, Target, package_version
from hase.utils.frozen import Frozen
from hase.utils.paths import SIDECAR, FileName

SIDECAR_VERSION = 4
DOUBT = "doubt"
TRAIN = "python training/train_kernel_model.py"
REMEDY = f"train again: {TRAIN}"
XGBOOST = ("xgboost-cpu", "xgboost")  # the names under which it is installed
TIMES_COMPRESSION = 6  # of gzip, for measured times: somebody waits while they are renewed


class TypeErrors(Frozen):
    """Cross-validated errors of one kernel type (`all`: of every type) in one set of rows; ratios, not per cent.

    Attributes:
        rows_of: `idle`, `all levels`, `under load`, or (of times) `idle, <n> µs and more`.
        predictor: what predicts the type: `shared`, its own (the type's name), `random_forest`, or `mixed` for all types.
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


class LabelPredictors(Saved):
    """The predictors of one label: `KernelModel`, or `Transferred` where they correct those of another target.

    Attributes:
        own_types, forest_types: the kernel types that a dedicated booster or the random forest predicts.
        errors: on kernels that were held out; empty where nothing was trained, and there is only a guessed roofline.
        start: the other target, whose predictors are a part of these; "" for none.
    """

    own_types: tuple[str, ...] = ()
    forest_types: tuple[str, ...] = ()
    errors: tuple[TypeErrors, ...] = ()
    start: str = ""

    @property
    def chosen(self) -> dict[str, str]:
        """As in `fit_kernel_model`."""
        return {name: name for name in self.own_types} | dict.fromkeys(self.forest_types, FOREST)


class Carried(Frozen):
    """Kernels of another card that were carried over, for forms that nobody measured on this one.

    Attributes:
        card: that measured them.
        kernels: how many.
        dataset_sha256: of its kernel table.
    """

    card: str
    kernels: int = Field(ge=0)
    dataset_sha256: str


class Sidecar(Frozen):
    """`predictors.json`.

    Attributes:
        target: what the predictors are valid for.
        dataset_sha256: of the kernel table they were trained on; `measured` may be of a newer one.
        packages: versions of the packages that made them.
        metrics: names of the load's features.
        idle_load: the load of an idle device.
        load_range: least and greatest value of each metric in training; both the same where only an idle device was measured.
        dtypes: element types of the kernels in training.
        held_out: model families that nothing is fitted to.
        config: the settings of the training.
        machines: the machines that measured the dataset.
        feature_range: least and greatest value of each of KERNEL_FEATURES in training.
        measured, measured_sha256: the file of measured idle times.
        labels: by name.
        doubt: how far off the times of label `gpu` may be (`training/kernels/doubt.py`); None where that was not learned.
        carried: what was learned from kernels of another card; None: nothing.
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


INDEX_AFTER = 2000  # searches for kernels: from here on it is worth the 20 ms to find where all lines start
OF_KERNEL = TypeAdapter(dict[str, Milliseconds])  # by label
OF_ALL = TypeAdapter(dict[str, dict[str, Milliseconds]])  # by kernel and label
T = TypeVar("T")
class MeasuredTimes(Mapping[str, dict[str, float]]):
    """Idle times (ms) by kernel id and label (and `drift_key`, `inputs_key`), from JSON with one line per kernel, sorted,
    between a line `{` and a line `}`. Only the lines that are looked up are parsed.

    Raises:
        UserError: at a look-up, the kernel's line is damaged.
    """

    def __init__(self, text: bytes, path: Path | None = None) -> None:
        """The times in some JSON; `path` is its file, for errors."""
        self._text, self._path = text, path
        self._searches = 0
        self._starts: list[int] = []  # of the lines; found at the INDEX_AFTER-th search

    def __getitem__(self, kernel: str) -> dict[str, float]:
        text, key = self._text, _line_start(kernel)
        if self._searches >= INDEX_AFTER:
            return self._by_index(kernel, key)
        self._searches += 1
        low, high = text.find(b"\n") + 1, text.rfind(b"\n") + 1  # the lines to search
        while low < high:
            start = max(text.rfind(b"\n", low, (low + high) // 2) + 1, low)
            end = text.index(b"\n", start)
            line = text[start:end]
            if line.startswith(key):
                return self._checked(OF_KERNEL, line[len(key):].removesuffix(b","), kernel)
            low, high = (end + 1, high) if line < key else (low, start)
        raise KeyError(kernel)

    def _by_index(self, kernel: str, key: bytes) -> dict[str, float]:
        """The same for one of many look-ups: the places where lines start are known."""
        text = self._text
        if not self._starts:
            self._starts = (np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n")) + 1).tolist()
        starts = self._starts
        line = bisect.bisect_left(range(len(starts)), key, key=lambda place: text[starts[place]:starts[place] + len(key)])
        if line == len(starts) or not text.startswith(key, starts[line]):
            raise KeyError(kernel)
        start = starts[line]
        return self._checked(OF_KERNEL, text[start + len(key):text.index(b"\n", start)].removesuffix(b","), kernel)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return max(self._text.count(b"\n") - 1, 0)

    def whole(self) -> dict[str, dict[str, float]]:
        """All times, parsed at once."""
        return self._checked(OF_ALL, self._text)

    def _checked(self, of_schema: TypeAdapter[T], text: bytes, *kernel: str) -> T:
        try:
            return of_schema.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (*kernel, *first["loc"])))
            raise UserError(f"{self._path or 'measured times'}: damaged at {where}: {first['msg']}; {REMEDY}") from None

    @staticmethod
    def text(times: Mapping[str, Mapping[str, float]]) -> bytes:
        """The JSON that this class reads."""
        lines = sorted(_line_start(kernel) + json.dumps(dict(of_kernel), separators=(",", ":")).encode()
                       for kernel, of_kernel in times.items())
        return b"\n".join([b"{", *([b",\n".join(lines)] if lines else []), b"}"])


def _line_start(kernel: str) -> bytes:
    return json.dumps(kernel).encode() + b":"


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
    for label, about in estimators_of(sidecar).items():
        check_features(path, label, about)
    if len(sidecar.feature_range) != len(KernelModel.features.names):
        raise UserError(f"{path}: damaged at feature_range: it has {len(sidecar.feature_range)} features; {REMEDY}")
    made = sidecar.packages.get("xgboost", "(not known)")
    here = package_version(*XGBOOST)  # alone: to look one up takes a millisecond
    if made.split(".")[:2] != here.split(".")[:2]:
        raise UserError(f"{path}: made with xgboost {made}, which the installed {here} may not read; train again: {TRAIN}")
    return sidecar


def estimators_of(sidecar: Sidecar) -> dict[str, Saved]:
    """All estimators that were saved with a sidecar, by label, and under DOUBT that of the doubt."""
    return {**sidecar.labels, **({DOUBT: sidecar.doubt} if sidecar.doubt else {})}


def check_features(path: Path, label: str, saved: Saved) -> None:
    """Checks that this Hase computes the features that the predictors of a label read.

    Args:
        path: of the sidecar.
        label: their label.
        saved: what the sidecar says of them.

    Raises:
        UserError: they read others.
    """
    if saved.features == (here := features_of(KernelModel)):
        return
    odd = sorted(set(saved.features[1:]) ^ set(here[1:]))
    raise UserError(f"{path}: made by another version of Hase: the predictors of label {label} read feature schema "
                    f"{saved.features[0] if saved.features else 'none'}, this one {here[0]} (they differ in: "
                    f"{', '.join(odd[:3]) or 'what the values mean, or their order'}{', …' if len(odd) > 3 else ''}); {REMEDY}")


def save_predictors(folder: Path, models: Mapping[str, KernelModel | Transferred], errors: Mapping[str, Sequence[TypeErrors]],
                    measured: Mapping[str, Mapping[str, float]], about: Mapping[str, Any],
                    doubt: KernelModel | None = None) -> Sidecar:
    """Saves a target's predictors. The sidecar is written last: until then, the old predictors stay valid.

    Args:
        folder: of the target.
        models, errors: by label.
        measured: idle times (ms) by kernel id and label.
        about: the other fields of the sidecar.
        doubt: how far off times may be, if that was learned.
    """
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
    """The measured idle times (ms) by kernel id and label.

    Raises:
        UserError: their file is missing or damaged.
    """
    path = folder / sidecar.measured
    try:
        return MeasuredTimes(gzip.decompress(read_checked(path, sidecar.measured_sha256, REMEDY)), path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}); {REMEDY}") from None


def write_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Writes the times to look up; returns the file's name and its SHA-256."""
    data = gzip.compress(MeasuredTimes.text(measured), TIMES_COMPRESSION, mtime=0)
    return write_hashed(folder, "measured", "json.gz", data)


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
    times = read_measured(folder, sidecar).whole()
    for kernel, new_times in measured.items():
        replaced = {key for label in new_times for key in (label, drift_key(label), inputs_key(label))}
        times[kernel] = {key: kept for key, kept in times.get(kernel, {}).items() if key not in replaced} | dict(new_times)
    name, sha256 = write_measured(folder, times)
    sidecar = sidecar.model_copy(update={"measured": name, "measured_sha256": sha256})
    write_sidecar(folder, sidecar)
    return sidecar


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Writes the sidecar, then removes the files that neither it nor the previous sidecar names. Those of the previous one stay
    until the next writing, since a process may have read that sidecar and not yet its boosters."""
    in_use = _files_named(folder) | _files_of(sidecar)
    files.write_json(sidecar_path(folder), sidecar)
    for path in _written_files(folder):
        if path.name not in in_use:
            path.unlink()


def _files_of(sidecar: Sidecar) -> set[str]:
    """The names of the files that a sidecar names."""
    return {sidecar.measured, *(about.file for about in estimators_of(sidecar).values() if about.file)}


def _files_named(folder: Path) -> set[str]:
    """Those that the sidecar in `folder` names; none where it is missing, damaged or of another version."""
    try:
        return _files_of(read_sidecar(folder))
    except UserError:
        return set()


def _written_files(folder: Path) -> list[Path]:
    """The files in `folder` that a sidecar names or once named."""
    return [path for path in (*folder.glob("*-*.npz"), *folder.glob("measured-*.json.gz"))
            if not path.name.startswith((ESTIMATOR_PREFIX, MPS_PREFIX))]


def copy_predictors(source: Path, folder: Path, label: str | None = None) -> None:
    """Copies all that was learned for a target, its composition and its host's kernels too. The sidecar is copied last, which
    makes the copy valid. Files that only the previous sidecar names are left out.

    Args:
        source: the folder of the target's predictors.
        folder: where the copy goes.
        label: the only one whose predictors are copied; None: all.
    """
    of_label = None
    if label is not None:
        sidecar = read_sidecar(source)
        of_label = sidecar.model_copy(update={"labels": {label: sidecar.labels[label]}})
    named = _files_of(of_label) if of_label else _files_named(source)
    left_out = {path.name for path in _written_files(source)} - named
    paths = [path for path in source.iterdir()
             if not path.name.startswith(".") and path.name not in left_out]  # without locks and unfinished files
    for path in sorted(paths, key=lambda path: (path == sidecar_path(source), path)):
        if path.is_dir():
            copy_predictors(path, folder / path.name)
        elif of_label and path == sidecar_path(source):
            write_sidecar(folder, of_label)
        else:
            files.write_bytes(folder / path.name, path.read_bytes())
