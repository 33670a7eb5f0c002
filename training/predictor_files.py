"""What training saves for a target and the predictor reads: boosters, a sidecar that describes them, measured times.

In training/predictors/<target>/:
- `predictors.json`, the sidecar: what the predictors hold for, what they read, how far off they are, and the files below
  with their SHA-256.
- `<label>-<hash>.pkl`: the boosters of one label: a pickle of bytes by name, each a booster as XGBoost saves it (UBJSON),
  compressed by zlib; so a prediction opens those that its model needs. What only training and explanations read (each
  node's gain, cover and base weight) is zero: that makes the file half as large, and changes no prediction.
- `measured-<hash>.json.gz`: idle times by kernel and label, for look-up; renewed without a training where kernels were
  measured for one model (inference/missing_kernels.py). A line a kernel, sorted, so that a look-up reads one line.

The hash guards against damage. Against attack, unpickling admits no class at all. History of the schema: in version 1, the
first, a file of boosters was one compressed pickle of xgboost's Booster, and the times were compressed by lzma.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import pickle
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmark.dataset import GPU_LABEL
from ort_analysis.records import Frozen, Kernel
from training.estimators import LAUNCHES, SHARED, KernelModel, Roofline, predict_kernels
from training.features import FEATURES, kernel_features
from training.stand_ins import StandIn, stand_in
from utils import files
from utils.errors import UserError
from utils.fingerprint import Machine, Target, package_version
from utils.logger import get_logger
from utils.safe_names import FileName

if TYPE_CHECKING:
    import xgboost

log = get_logger("predictors")
SIDECAR_VERSION = 2
TRAIN = "python training/train_kernel_model.py"
ON_GPU = (GPU_LABEL, LAUNCHES)
REMEMBERED_KERNELS = 100_000
REMEMBERED_LOADS = 64
SLACK = 1e-6  # of a feature beyond its range: what rounding may do
LOGARITHMIC = np.array([name.startswith("log_") for name in FEATURES])  # features that are logarithms to base 2
BOOSTER_COMPRESSION = 9  # zlib's: lzma saves a quarter more and takes three times as long to read
TIMES_COMPRESSION = 6  # for measured times, whose renewal somebody waits for
UNREAD_ARRAYS = re.compile(rb"(?:base_weights|loss_changes|sum_hessian)\[\$d#([UiIlL])")  # of a tree, as UBJSON names them
COUNT_FORMATS = {b"U": ">B", b"i": ">b", b"I": ">h", b"l": ">i", b"L": ">q"}  # UBJSON's whole numbers


class TypeErrors(Frozen):
    """Cross-validated errors of one kernel type (`all`: of every type) in one set of rows; ratios, not per cent.

    Attributes:
        rows_of: `idle`, `all levels`, `under load`, or (of times) `idle, <n> µs and more`.
        predictor: what predicts the type: `shared`, its own (the type's name), or `mixed` for all types.
        within_10: share of rows predicted within ±10 %.
        forest_mape, roofline_mape: of the two that the shipped predictor is compared with.
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


class LabelPredictors(Frozen):
    """What the sidecar says of one label's predictors; without a `file` nothing was trained, and the roofline is all there
    is."""

    file: FileName | None
    sha256: str
    roofline: Roofline
    type_codes: dict[str, float]
    predictor_of: dict[str, str]
    errors: tuple[TypeErrors, ...]

    @property
    def own_types(self) -> list[str]:
        """The kernel types that have a predictor of their own."""
        return [name for name, predictor in self.predictor_of.items() if predictor == name]


class Sidecar(Frozen):
    """`predictors.json`.

    Attributes:
        target: what the predictors hold for.
        dataset_sha256: of the kernel table they were trained on; `measured` may be of a newer one.
        packages: versions of what made them.
        features: that the boosters read, in order; the type's code and the load follow.
        metrics: names of the load's features.
        idle_load: the load that stands for an idle device.
        load_range: least and greatest value of each metric in training; the same where only the idle device was measured.
        dtypes: that the kernels of the training compute in.
        held_out: model families that are in no fit.
        config: the settings of the training.
        machines: that were measured.
        feature_range: least and greatest value of each of `features` in training.
        measured, measured_sha256: the file of measured idle times.
        labels: by name.
    """

    version: int = SIDECAR_VERSION
    target: Target
    created: str
    dataset_sha256: str
    packages: dict[str, str]
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


class KernelTimes(NamedTuple):
    """The time of each kernel asked for (ms), and where it comes from: `measured`, `predicted` or `estimated`."""

    latency_ms: list[float]
    provenance: list[str]


def leaves_gpu_idle(kernel: Kernel, label: str) -> bool:
    """Whether `label` tells of the GPU and the kernel gives it nothing to do, so that its time is zero and not learned."""
    return label in ON_GPU and not kernel.moves_data


def sidecar_path(folder: Path) -> Path:
    return folder / "predictors.json"


def installed_packages() -> dict[str, str]:
    """Versions of the packages that decide whether a saved predictor can be read."""
    return {"xgboost": package_version("xgboost-cpu", "xgboost"), "numpy": package_version("numpy"),
            "scikit-learn": package_version("scikit-learn")}


def read_sidecar(folder: Path) -> Sidecar:
    """The sidecar in `folder`.

    Raises:
        UserError: there is none, it is damaged, or made by another version of Hase or of xgboost.
    """
    path = sidecar_path(folder)
    if not path.is_file():
        raise UserError(f"{folder}: no predictors; train them with: {TRAIN}")
    sidecar = files.read_record(path, Sidecar, SIDECAR_VERSION, TRAIN)
    if sidecar.features != FEATURES:
        raise UserError(f"{path}: made by another version of Hase, with other features; train again: {TRAIN}")
    made, here = (packages["xgboost"] for packages in (sidecar.packages, installed_packages()))
    if made.split(".")[:2] != here.split(".")[:2]:
        raise UserError(f"{path}: made with xgboost {made}, here is {here}, which may not read it; train again: {TRAIN}")
    return sidecar


def read_checked(path: Path, sha256: str) -> bytes:
    """The bytes of `path`.

    Raises:
        UserError: the file is missing, or its SHA-256 is not the one that the sidecar holds.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: named in {path.parent / 'predictors.json'} but missing; train again: {TRAIN}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: damaged or changed after training (its SHA-256 is not the one in predictors.json); "
                        f"train again: {TRAIN}")
    return data


class CheckedFiles(Mapping[str, bytes]):
    """The bytes of files by name, each read and checked when it is first asked for; errors as of `read_checked`.

    Args:
        files: by name, each file and the SHA-256 that it must have.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str]]) -> None:
        self._files = dict(files)
        self._read: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._read:
            self._read[name] = read_checked(*self._files[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class _Unpickler(pickle.Unpickler):
    """Builds plain data alone: a pickle can otherwise name, and so run, anything that is installed."""

    def __init__(self, data: bytes, where: Path) -> None:
        super().__init__(io.BytesIO(data))
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        raise UserError(f"{self.where}: refused: it holds {module}.{name}, which no saved predictor does; "
                        f"don't use this file, train anew: {TRAIN}")


class SavedBoosters(Mapping[str, "xgboost.Booster"]):
    """The boosters in the bytes of a saved predictor, by name. Each is read when it is first asked for, and predicts with one
    thread.

    Raises:
        UserError: the bytes name a class, or are no pickled boosters; from a look-up: what lies under the name is none.
    """

    def __init__(self, data: bytes, where: Path) -> None:
        try:
            packed = _Unpickler(data, where).load()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a pickle that is none can fail in any way
            raise UserError(f"{where}: not a saved predictor ({error}); train again: {TRAIN}") from None
        if not isinstance(packed, dict) or not all(isinstance(member, bytes) for member in packed.values()):
            raise UserError(f"{where}: not a saved predictor; train again: {TRAIN}")
        self._packed: dict[str, bytes] = packed
        self._read: dict[str, xgboost.Booster] = {}
        self._where = where

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._read:
            self._read[name] = self._open(self._packed[name])
        return self._read[name]

    @property
    def opened(self) -> set[str]:
        """The names of those that were read."""
        return set(self._read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def _open(self, packed: bytes) -> xgboost.Booster:
        import xgboost

        try:
            booster = xgboost.Booster(model_file=bytearray(zlib.decompress(packed)))
        except (zlib.error, xgboost.core.XGBoostError, ValueError) as error:
            raise UserError(f"{self._where}: not a saved predictor ({error}); train again: {TRAIN}") from None
        booster.set_param({"nthread": 1})  # a few dozen rows: starting threads would take longer than predicting
        return booster


def pack_booster(booster: xgboost.Booster) -> bytes:
    """A booster for `SavedBoosters`: XGBoost's own UBJSON, what no prediction reads set to zero, compressed."""
    saved = booster.save_raw("ubj")
    at = 0
    while found := UNREAD_ARRAYS.search(saved, at):
        count_format = COUNT_FORMATS[found.group(1)]
        start = found.end() + struct.calcsize(count_format)
        at = start + 4 * struct.unpack_from(count_format, saved, found.end())[0]
        saved[start:at] = bytes(at - start)
    return zlib.compress(saved, BOOSTER_COMPRESSION)


class MeasuredTimes(Mapping[str, dict[str, float]]):
    """Idle times (ms) by kernel id and label, from JSON that has a line for each kernel, sorted, between one with `{` and one
    with `}`; only lines that are asked for are parsed."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def __getitem__(self, kernel: str) -> dict[str, float]:
        text, key = self._text, _line_start(kernel)
        low, high = text.find(b"\n") + 1, text.rfind(b"\n") + 1  # the lines that it may be among
        while low < high:
            start = max(text.rfind(b"\n", low, (low + high) // 2) + 1, low)
            end = text.index(b"\n", start)
            line = text[start:end]
            if line.startswith(key):
                times: dict[str, float] = json.loads(line[len(key):].removesuffix(b","))
                return times
            low, high = (end + 1, high) if line < key else (low, start)
        raise KeyError(kernel)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return max(self._text.count(b"\n") - 1, 0)

    def whole(self) -> dict[str, dict[str, float]]:
        """All times, parsed at once."""
        times: dict[str, dict[str, float]] = json.loads(self._text)
        return times

    @staticmethod
    def text(times: Mapping[str, Mapping[str, float]]) -> bytes:
        """The JSON that this class reads."""
        lines = sorted(_line_start(kernel) + json.dumps(dict(found), separators=(",", ":")).encode()
                       for kernel, found in times.items())
        return b"\n".join([b"{", *([b",\n".join(lines)] if lines else []), b"}"])


def _line_start(kernel: str) -> bytes:
    return json.dumps(kernel).encode() + b":"


@dataclass
class Predictors:
    """The predictors of a target, ready to predict. A booster is read at the first prediction that needs it.

    Attributes:
        folder: where they lie.
        sidecar: what they are.
        measured: idle times (ms) by kernel id and label.
        pickles: the bytes of each label's boosters, checked when they are read.
    """

    folder: Path
    sidecar: Sidecar
    measured: Mapping[str, dict[str, float]]
    pickles: Mapping[str, bytes]
    _models: dict[str, KernelModel] = field(default_factory=dict, repr=False)
    _features: dict[str, list[float]] = field(default_factory=dict, repr=False)
    _times: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = field(default_factory=dict, repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.sidecar.labels)

    def kernel_model(self, label: str) -> KernelModel:
        """The predictors of a label.

        Raises:
            UserError: no such label, or a file that holds something else.
        """
        if label not in self.sidecar.labels:
            raise UserError(f"label {label}: not measured on {self.sidecar.target.name} (there: {', '.join(self.labels)})")
        if label not in self._models:
            about = self.sidecar.labels[label]
            boosters: Mapping[str, xgboost.Booster] = {}
            if about.file is not None:
                boosters = SavedBoosters(self.pickles[label], self.folder / about.file)
            if about.file and (absent := sorted({SHARED, *about.predictor_of.values()} - set(boosters))):
                raise UserError(f"{self.folder / about.file}: predictor {absent[0]} is missing; train again: {TRAIN}")
            self._models[label] = KernelModel(about.roofline, about.type_codes, about.predictor_of, boosters,
                                              tuple(self.sidecar.idle_load.values()))
        return self._models[label]

    def load_vector(self, load: Mapping[str, float]) -> tuple[float, ...]:
        """The load in the order of the sidecar's metrics; an empty mapping is the idle device.

        Raises:
            UserError: a metric is missing or no finite number, or nothing was measured under load.
        """
        sidecar = self.sidecar
        if not load:
            return tuple(sidecar.idle_load.values())
        if not sidecar.loaded_rows:
            raise UserError(f"{self.folder}: trained on an idle device alone, so it can't predict under load; measure "
                            "more levels (benchmark/config.yaml) and train again")
        missing = [name for name in sidecar.metrics if not math.isfinite(load.get(name, math.nan))]
        if missing:
            raise UserError(f"the load lacks {', '.join(missing)}; these predictors need {', '.join(sidecar.metrics)}, each "
                            "a finite number")
        outside = [f"{name} {load[name]:.4g} (measured: {low:.4g} to {high:.4g})"
                   for name, (low, high) in sidecar.load_range.items() if not low <= load[name] <= high]
        if outside:
            log.warning("load beyond what was measured, taken as its edge: %s", "; ".join(outside))
        return tuple(load[name] for name in sidecar.metrics)

    def predict(self, kernels: Sequence[Kernel], load: Mapping[str, float], label: str | None = None,
                strict: bool = False) -> KernelTimes:
        """The time of each kernel.

        Args:
            kernels: in any number, also repeated.
            load: background metrics by DCGM field name; empty: idle.
            label: which time, as in DESIGN's words; by default the first that was trained.
            strict: don't look up measured times.

        Raises:
            UserError: an unknown label, or a load that the predictors don't know.
        """
        label = label if label is not None else self.labels[0]
        vector = self.load_vector(load)
        known = files.cached(self._times, (label, vector, bool(load), strict), dict, REMEMBERED_LOADS)
        found = {kernel.id: known.get(kernel.id) for kernel in kernels}  # another thread may clear what is known
        new = {kernel.id: kernel for kernel in kernels if found[kernel.id] is None}
        if new:
            made = self._time(new, vector, label, look_up=not load and not strict)
            if len(known) > REMEMBERED_KERNELS:
                known.clear()
            known.update(made)
            found.update(made)
        pairs = [pair for kernel in kernels if (pair := found[kernel.id])]
        return KernelTimes([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def features_of(self, kernels: Sequence[Kernel]) -> npt.NDArray[np.float64]:
        """kernels × FEATURES, each kernel's worked out once."""
        return np.array([files.cached(self._features, kernel.id, partial(kernel_features, kernel), REMEMBERED_KERNELS)
                         for kernel in kernels], dtype=float)

    def beyond_range(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """Those kernels of which a feature is smaller or greater than any in training, by id: how many times, at most."""
        moving = [kernel for kernel in kernels if kernel.moves_data]
        if not moving:
            return {}
        features, (low, high) = self.features_of(moving), np.array(self.sidecar.feature_range).T
        beyond = (features < low - SLACK) | (features > high + SLACK)
        sizes, least, most = (np.where(LOGARITHMIC, values, np.log2(1.0 + np.abs(values))) for values in (features, low, high))
        doublings = np.where(beyond, np.maximum(sizes - most, least - sizes), 0.0).max(axis=1)
        return {kernel.id: float(2.0 ** max(found, 0.0)) for kernel, found, out in zip(
            moving, doublings, beyond.any(axis=1), strict=True) if out}

    def meant(self, kernel: Kernel, label: str) -> Kernel:
        """The kernel that is predicted for `kernel`: itself, or where its type was never measured, what stands for it."""
        found = self.stand_in(kernel, label)
        return kernel if found is None else found.kernel

    def stand_in(self, kernel: Kernel, label: str) -> StandIn | None:
        """What stands for a kernel of the GPU whose type was never measured; None where it was, or nothing does."""
        known = self.sidecar.labels[label].predictor_of
        return None if label not in ON_GPU or kernel.type in known else stand_in(kernel, known)

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        """Time and provenance of each kernel by id, those of one predictor in one call."""
        times: dict[str, tuple[float, str]] = {
            name: (0.0, "measured") for name, kernel in kernels.items() if leaves_gpu_idle(kernel, label)}
        if look_up:
            times |= {name: (found[label], "measured") for name in kernels
                      if name not in times and (found := self.measured.get(name)) and label in found}
        rest = [kernel for name, kernel in kernels.items() if name not in times]
        if not rest:
            return times
        model = self.kernel_model(label)
        meant = [self.meant(kernel, label) for kernel in rest]
        predicted = predict_kernels(model, meant, self.features_of(meant), load)
        for kernel, taken, time_ms in zip(rest, meant, predicted.tolist(), strict=True):
            known = taken.type in model.predictor_of
            if not known and not kernel.moves_data:  # of whatever type, it only renames a tensor: that costs next to nothing
                times[kernel.id] = (model.roofline.floor_ms, "predicted")
            else:
                times[kernel.id] = (time_ms, "predicted" if known else "estimated")
        return times


def read_measured(folder: Path, sidecar: Sidecar) -> MeasuredTimes:
    """The measured idle times (ms) by kernel id and label; errors as of `read_checked`."""
    return MeasuredTimes(gzip.decompress(read_checked(folder / sidecar.measured, sidecar.measured_sha256)))


def load_predictors(folder: Path) -> Predictors:
    """The predictors in `folder`. Every file is checked against the sidecar when it is read: boosters are at the first
    prediction that needs them, where that raises as this does.

    Raises:
        UserError: none there, another version's, a file that is missing or damaged.
    """
    sidecar = read_sidecar(folder)
    for about in sidecar.labels.values():
        if about.file and not (folder / about.file).is_file():
            read_checked(folder / about.file, about.sha256)
    return Predictors(folder, sidecar, read_measured(folder, sidecar), CheckedFiles({
        label: (folder / about.file, about.sha256) for label, about in sidecar.labels.items() if about.file}))


def save_predictors(folder: Path, models: Mapping[str, KernelModel], errors: Mapping[str, Sequence[TypeErrors]],
                    measured: Mapping[str, Mapping[str, float]], about: Mapping[str, Any]) -> Sidecar:
    """Saves a target's predictors; the sidecar, written last, makes them count, so that the old ones hold until then.

    Args:
        folder: of the target.
        models, errors: by label.
        measured: idle times (ms) by kernel id and label.
        about: the remaining fields of the sidecar.
    """
    labels = {}
    for label, model in models.items():
        used = {name: model.boosters[name] for name in sorted({SHARED, *model.predictor_of.values()})}
        name, digest = write_boosters(folder, label, used)
        labels[label] = LabelPredictors(
            file=name, sha256=digest, roofline=model.roofline, type_codes=dict(model.type_codes),
            predictor_of=dict(model.predictor_of), errors=tuple(errors[label]))
    name, digest = write_measured(folder, measured)
    sidecar = Sidecar(features=FEATURES, packages=installed_packages(), measured=name, measured_sha256=digest, labels=labels,
                      **about)
    write_sidecar(folder, sidecar)
    return sidecar


def renew_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> Sidecar:
    """Adds measured times to those that are looked up. What was learned stays as it is, and what it was learned from stays on
    record, so that the next training sees that the dataset is newer.

    Args:
        folder: of the target's predictors.
        measured: idle times (ms) by kernel id and label; they replace those that are there.

    Raises:
        UserError: no predictors there, another version's, or a damaged file.
    """
    sidecar = read_sidecar(folder)
    there = read_measured(folder, sidecar).whole()
    name, digest = write_measured(folder, there | {kernel: there.get(kernel, {}) | dict(times)
                                                    for kernel, times in measured.items()})
    sidecar = sidecar.model_copy(update={"measured": name, "measured_sha256": digest})
    write_sidecar(folder, sidecar)
    return sidecar


def copy_predictors(source: Path, folder: Path) -> None:
    """Copies what was learned for a target, composition and all; the sidecar, copied last, makes the copy count."""
    there = [path for path in source.iterdir() if not path.name.startswith(".")]  # neither a lock nor what is being written
    for path in sorted(there, key=lambda path: (path == sidecar_path(source), path)):
        files.write_bytes(folder / path.name, path.read_bytes())


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    """Writes the sidecar, then removes the files of the one before."""
    files.write_json(sidecar_path(folder), sidecar)
    kept = {sidecar.measured, *(about.file for about in sidecar.labels.values())}
    for old in [*folder.glob("*-*.pkl"), *folder.glob("measured-*.json.gz")]:
        if old.name not in kept:
            old.unlink()


def write_boosters(folder: Path, label: str, boosters: Mapping[str, xgboost.Booster]) -> tuple[str, str]:
    """Writes the boosters of a label; returns the file's name and its SHA-256."""
    packed = {name: pack_booster(booster) for name, booster in boosters.items()}
    return _write_hashed(folder, label, "pkl", pickle.dumps(packed, protocol=5))


def write_measured(folder: Path, measured: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Writes the times to look up; returns the file's name and its SHA-256."""
    return _write_hashed(folder, "measured", "json.gz", gzip.compress(MeasuredTimes.text(measured), TIMES_COMPRESSION, mtime=0))


def _write_hashed(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, str]:
    """Writes `data` under a name that holds a part of its SHA-256; returns the name and the whole hash."""
    digest = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{digest[:8]}.{suffix}"
    files.write_bytes(folder / name, data)
    return name, digest
