"""The predictors of a target, ready to predict."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from records.kernel_record import Kernel
from records.measurement import GPU_LABEL
from training.kernels.beyond import times_beyond
from training.kernels.boosters import SavedBoosters
from training.kernels.estimators import SHARED, KernelModel, predict_kernels
from training.kernels.measured_times import MeasuredTimes
from training.kernels.schema import FeatureSchema
from training.kernels.settings import LAUNCHES
from training.kernels.sidecar import (
    TRAIN,
    LabelPredictors,
    OtherDevice,
    Sidecar,
    read_checked,
    read_sidecar,
    schema_of,
)
from training.kernels.transfer import CORRECTION_FEATURES, OtherPredictors, Transferred
from utils import files
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import ADMITTED

if TYPE_CHECKING:
    import xgboost

    from training.admission.admitted import AdmittedEstimators

log = get_logger("predictors")
ON_GPU = (GPU_LABEL, LAUNCHES)
REMEMBERED_KERNELS = 100_000
REMEMBERED_LOADS = 64


class KernelTimes(NamedTuple):
    """The times of kernels (ms), and where each comes from: `measured`, `predicted` or `estimated`."""

    latency_ms: list[float]
    provenance: list[str]


def leaves_gpu_idle(kernel: Kernel, label: str) -> bool:
    """Whether `label` is one of the GPU and the kernel gives the GPU no work; then its time is zero, and not learned."""
    return label in ON_GPU and not kernel.moves_data


class CheckedFiles(Mapping[str, bytes]):
    """The bytes of files by name, each read and checked at its first look-up; errors as of `read_checked`.

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


@dataclass
class Predictors:
    """The predictors of a target, ready to predict. A booster is read at the first prediction that needs it.

    Attributes:
        folder: of the files.
        sidecar: what it says of them.
        measured: idle times (ms) by kernel id and label.
        pickles: the bytes of the files with boosters, by file name, checked when they are read.
        admitted: estimators that were admitted for some kernel types, which they predict in place of the boosters.
    """

    folder: Path
    sidecar: Sidecar
    measured: Mapping[str, dict[str, float]]
    pickles: Mapping[str, bytes]
    admitted: AdmittedEstimators | None = None
    _models: dict[str, KernelModel | Transferred] = field(default_factory=dict, repr=False)
    _features: dict[str, list[float]] = field(default_factory=dict, repr=False)
    _times: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = field(default_factory=dict, repr=False)

    @property
    def schema(self) -> FeatureSchema:
        """Of the features that the boosters read."""
        return schema_of(self.sidecar)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.sidecar.labels)

    def kernel_model(self, label: str) -> KernelModel | Transferred:
        """The predictors of a label.

        Raises:
            UserError: there is no such label, or a file holds something else.
        """
        if label not in self.sidecar.labels:
            raise UserError(f"label {label}: not measured on {self.sidecar.target.name} (there: {', '.join(self.labels)})")
        if label not in self._models:
            about, idle_load = self.sidecar.labels[label], tuple(self.sidecar.idle_load.values())
            if about.start:
                there = self._model(about.start, self.schema, about.start.idle_load)
                self._models[label] = Transferred(OtherPredictors(about.start.target, there),
                                                  self._model(about, CORRECTION_FEATURES, idle_load))
            else:
                self._models[label] = self._model(about, self.schema, idle_load)
        return self._models[label]

    def _model(self, about: LabelPredictors | OtherDevice, schema: FeatureSchema, idle_load: Sequence[float]) -> KernelModel:
        """The predictors in one file; errors as of `kernel_model`."""
        boosters: Mapping[str, xgboost.Booster] = {}
        if about.file is not None:
            boosters = SavedBoosters(self.pickles[about.file], self.folder / about.file)
        if about.file and (absent := sorted({SHARED, *about.predictor_of.values()} - set(boosters))):
            raise UserError(f"{self.folder / about.file}: predictor {absent[0]} is missing; train again: {TRAIN}")
        return KernelModel(schema, about.roofline, about.type_codes, about.predictor_of, boosters, idle_load)

    def load_vector(self, load: Mapping[str, float]) -> tuple[float, ...]:
        """The load as numbers in the order of the sidecar's metrics; an empty mapping means an idle device.

        Raises:
            UserError: a metric is missing or is no finite number, or nothing was measured under load.
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
            kernels: any number of them; the same one may come several times.
            load: metrics of the background by DCGM field name; empty: idle.
            label: which time (records/measurement.py); by default the first label that was trained.
            strict: don't look up measured times.

        Raises:
            UserError: the label is unknown, or the load lacks a metric.
        """
        label = label if label is not None else self.labels[0]
        vector = self.load_vector(load)
        known = files.cached(self._times, (label, vector, bool(load), strict), dict, REMEMBERED_LOADS)
        found = {kernel.id: known.get(kernel.id) for kernel in kernels}  # first, since another thread may clear the cache
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
        """kernels × the schema's features; those of a kernel are computed once and kept."""
        return np.array([files.cached(self._features, kernel.id, partial(self.schema.compute, kernel), REMEMBERED_KERNELS)
                         for kernel in kernels], dtype=float)

    def beyond_range(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """By what factor kernels are beyond the range of the training, the largest over their features, by kernel id. Kernels
        within the range are omitted."""
        moving = [kernel for kernel in kernels if kernel.moves_data]
        if not moving:
            return {}
        low, high = np.array(self.sidecar.feature_range).T
        times = times_beyond(self.schema, self.features_of(moving), low, high)
        return {kernel.id: float(found) for kernel, found in zip(moving, times, strict=True) if found > 1.0}

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        """Time and provenance of each kernel by id; all kernels of one predictor are predicted in one call."""
        times: dict[str, tuple[float, str]] = {
            name: (0.0, "measured") for name, kernel in kernels.items() if leaves_gpu_idle(kernel, label)}
        if look_up:
            times |= {name: (found[label], "measured") for name in kernels
                      if name not in times and (found := self.measured.get(name)) and label in found}
        rest = [kernel for name, kernel in kernels.items() if name not in times]
        if not rest:
            return times
        model = self.kernel_model(label)
        predicted = predict_kernels(model, rest, self.features_of(rest), load)
        if self.admitted:
            predicted = self._by_admitted(self.admitted, rest, predicted, load, label)
        for kernel, time_ms in zip(rest, predicted.tolist(), strict=True):
            known = kernel.type in model.predictor_of
            if not known and not kernel.moves_data:  # of any type: it only renames a tensor, which costs next to nothing
                times[kernel.id] = (model.roofline.floor_ms, "predicted")
            else:
                times[kernel.id] = (time_ms, "predicted" if known else "estimated")
        return times

    def _by_admitted(self, admitted: AdmittedEstimators, kernels: Sequence[Kernel], predicted: npt.NDArray[np.float64],
                     load: tuple[float, ...], label: str) -> npt.NDArray[np.float64]:
        """The times (ms) of kernels, those of some types by admitted estimators. Under a load, these are multiplied by the
        slowdown that the boosters predict.

        Args:
            predicted: by the boosters, under `load`.
        """
        times, entry_of, idle_load = predicted.copy(), admitted.of(label), tuple(self.sidecar.idle_load.values())
        for entry in {entry.file: entry for entry in entry_of.values()}.values():
            rows = [row for row, kernel in enumerate(kernels) if entry_of.get(kernel.type) == entry and kernel.moves_data]
            if rows:
                served = [kernels[row] for row in rows]
                times[rows] = admitted.predict_ms(entry, served)
                if load != idle_load:
                    idle = predict_kernels(self.kernel_model(label), served, self.features_of(served), idle_load)
                    times[rows] *= predicted[rows] / idle
        return times


def read_measured(folder: Path, sidecar: Sidecar) -> MeasuredTimes:
    """The measured idle times (ms) by kernel id and label; errors as of `read_checked`."""
    return MeasuredTimes(gzip.decompress(read_checked(folder / sidecar.measured, sidecar.measured_sha256)))


def read_predictors(folder: Path, estimators: Sequence[Path] = ()) -> Predictors:
    """The predictors in `folder`. Every file is checked against the sidecar when it is read. Boosters and admitted estimators
    are read at the first prediction that needs them, which then raises the same errors.

    Args:
        folder: of the target's predictors.
        estimators: the user's files and folders in which the code of admitted estimators may lie.

    Raises:
        UserError: there are none, they are of another version, or a file is missing or damaged.
    """
    sidecar = read_sidecar(folder)
    parts = [part for about in sidecar.labels.values() for part in (about, about.start) if part and part.file]
    files_of = {str(part.file): (folder / str(part.file), part.sha256) for part in parts}
    for path, sha256 in files_of.values():
        if not path.is_file():
            read_checked(path, sha256)
    predictors = Predictors(folder, sidecar, read_measured(folder, sidecar), CheckedFiles(files_of))
    if (folder / ADMITTED).is_file():
        from training.admission.admitted import read_admitted

        predictors.admitted = read_admitted(folder, sidecar.target, estimators)
    return predictors
