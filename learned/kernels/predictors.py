"""The predictors of a target, ready to predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from hase.learned import target_files
from hase.learned.kernels.estimators import KernelModel, OtherPredictors, Transferred, predict_kernels
from hase.learned.kernels.features import KERNEL_FEATURES, times_beyond
from hase.learned.kernels.saved_form import Saved, open_estimator
from hase.learned.kernels.sidecar import (
    XGBOOST,
    Sidecar,
    estimators_of,
    read_measured,
    read_sidecar,
)
from hase.learned.target_files import TRAIN_AGAIN
from hase.records.kernel_costs import steps
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL, LAUNCHES, drift_key, inputs_key
from hase.utils import files
from hase.utils.cache_folder import code_version, entry_key, kept_json
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version
from hase.utils.logger import get_logger
from hase.utils.paths import SHIPPED, Workspace

if TYPE_CHECKING:
    from hase.learned.kernels.admitted import AdmittedEstimators
    from hase.learned.kernels.interface import TimePredictor

log = get_logger("predictors")
ON_GPU = (GPU_LABEL, LAUNCHES)
REMEMBERED_KERNELS = 100_000
REMEMBERED_LOADS = 64
NOT_MEASURED: Mapping[str, float] = {}
# Of 2,640 recurrent layers of 16 steps or more on H200s, all launched as many kernels in each step and direction, and 96 % of
# them 1 to 7 beside these (3 in the mean). Each layer held out, whole numbers bring the mean error of launches from 3.2 to
# 6.4 % down to 2.7 to 4.3 %, by operator.
LEAST_STEPS, LAUNCHES_BESIDE_STEPS = 16, 3


class KernelTimes(NamedTuple):
    """The times of kernels (ms), and the origin of each: `measured`, `predicted` or `estimated`."""

    latency_ms: list[float]
    provenance: list[str]


def leaves_gpu_idle(kernel: Kernel, label: str) -> bool:
    """Whether the GPU has no work for the kernel and `label` is one of the GPU; such times are zero and not learned."""
    return label in ON_GPU and not kernel.moves_data


def whole_launches(kernel: Kernel, launches: float) -> float:
    """A kernel's predicted launches, rounded so that each step of a long recurrent layer has the same whole number. Neighbours
    with two and three launches per step have a mean that never occurs."""
    step_count = steps(kernel.op_type, kernel.attributes, kernel.inputs)
    if step_count < LEAST_STEPS or len(kernel.inputs) < 2 or not kernel.inputs[1].shape:
        return launches
    all_steps = step_count * kernel.inputs[1].shape[0]  # weights have one entry per direction
    return max(1, round((launches - LAUNCHES_BESIDE_STEPS) / all_steps)) * all_steps + LAUNCHES_BESIDE_STEPS


def as_label_has_it(kernel: Kernel, label: str, predicted: float) -> float:
    """A predicted time or number of launches, with zero for kernels without GPU work and `whole_launches` applied."""
    if leaves_gpu_idle(kernel, label):
        return 0.0
    return whole_launches(kernel, predicted) if label == LAUNCHES else predicted


def predict_distinct(model: TimePredictor, kernels: Sequence[Kernel], features: npt.NDArray[np.float64],
                     load: Sequence[float]) -> npt.NDArray[np.float64]:
    """Predicts kernels, each set of rows that look equal to the estimator only once."""
    index_of: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []  # indices of the distinct kernels
    indices = np.empty(len(kernels), dtype=int)
    for row, kernel in enumerate(kernels):
        key = kernel.type, kernel.flops, kernel.bytes_read + kernel.bytes_written, features[row].tobytes()
        indices[row] = index_of.setdefault(key, len(firsts))
        if indices[row] == len(firsts):
            firsts.append(row)
    return predict_kernels(model, [kernels[row] for row in firsts], features[firsts], load)[indices]


def _features(kernel: Kernel) -> npt.NDArray[np.float64]:
    return np.array(KERNEL_FEATURES.compute(kernel), dtype=float)


@dataclass
class Predictors:
    """The predictors of a target, ready to predict. A booster is read at the first prediction that needs it. `measured` has
    idle times (ms) by kernel id and label, with values of `drift_key` and `inputs_key`."""

    folder: Path
    sidecar: Sidecar
    measured: Mapping[str, dict[str, float]]
    admitted: AdmittedEstimators | None = None
    _models: dict[str, KernelModel | Transferred] = field(default_factory=dict, repr=False)
    _doubt: KernelModel | None = field(default=None, repr=False)
    _doubts: dict[str, float] = field(default_factory=dict, repr=False)
    _features: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _looked_up: dict[str, Mapping[str, float]] = field(default_factory=dict, repr=False)
    _times: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = field(default_factory=dict, repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.sidecar.labels)

    def kernel_model(self, label: str) -> KernelModel | Transferred:
        """Opens the predictors of a label."""
        if label not in self.sidecar.labels:
            raise UserError(f"label {label}: not measured on {self.sidecar.target.name} (measured: {', '.join(self.labels)})")
        if label not in self._models:
            about = self.sidecar.labels[label]
            self._models[label] = (open_estimator(about, Transferred, self.folder, TRAIN_AGAIN) if about.start else
                                   open_estimator(about, KernelModel, self.folder, TRAIN_AGAIN))
        return self._models[label]

    def load_vector(self, load: Mapping[str, float]) -> tuple[float, ...]:
        """The load as numbers in the order of the sidecar's metrics; an empty mapping means an idle device. Raises UserError: a
        metric is missing or is no finite number, or nothing was measured under load."""
        sidecar = self.sidecar
        if not load:
            return tuple(sidecar.idle_load.values())
        if not sidecar.loaded_rows:
            raise UserError(f"{self.folder}: trained on an idle device only, so it can't predict under load; measure "
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
        """The time of each kernel under a load: measured if known, else predicted.

        Args:
            kernels: may contain duplicates.
            load: metrics of the background by DCGM field name; empty: idle.
            label: which time (records/measurement.py); by default the first label that was trained.
            strict: don't look up measured times.

        Raises:
            UserError: the label is unknown, or the load lacks a metric.
        """
        label = label if label is not None else self.labels[0]
        vector = self.load_vector(load)
        known = files.cached(self._times, (label, vector, bool(load), strict), dict, REMEMBERED_LOADS)
        times = {kernel.id: known.get(kernel.id) for kernel in kernels}  # first, since another thread may clear the cache
        new = {kernel.id: kernel for kernel in kernels if times[kernel.id] is None}
        if new:
            new_times = self._time(new, vector, label, look_up=not load and not strict)
            if len(known) > REMEMBERED_KERNELS:
                known.clear()
            known.update(new_times)
            times.update(new_times)
        pairs = [pair for kernel in kernels if (pair := times[kernel.id])]
        return KernelTimes([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def _measured_of(self, name: str) -> Mapping[str, float]:
        """The measured times of a kernel by label, cached; empty if it was not measured."""
        return cast("Mapping[str, float]", files.cached(self._looked_up, name, lambda: self.measured.get(name) or NOT_MEASURED,
                                                        REMEMBERED_KERNELS))

    def features_of(self, kernels: Sequence[Kernel]) -> npt.NDArray[np.float64]:
        """kernels × KERNEL_FEATURES, cached for each kernel."""
        return np.array([files.cached(self._features, kernel.id, partial(_features, kernel), REMEMBERED_KERNELS)
                         for kernel in kernels], dtype=float)

    def drift_of(self, kernel: Kernel, label: str) -> float:
        """How unsteady the machine was, a ratio, when a kernel was measured; 0 for a steady machine."""
        return self._measured_of(kernel.id).get(drift_key(label), 0.0)

    def inputs_realistic(self, kernel: Kernel, label: str) -> bool:
        """Whether a kernel whose time depends on values was measured with realistic ones."""
        return inputs_key(label) in self._measured_of(kernel.id)

    def beyond_range(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """The factor by which kernels exceed the range of the training, by kernel id; only kernels beyond the range."""
        moving = [kernel for kernel in kernels if kernel.moves_data]
        if not moving:
            return {}
        low, high = np.array(self.sidecar.feature_range).T
        times = times_beyond(KERNEL_FEATURES, self.features_of(moving), low, high)
        return {kernel.id: float(factor) for kernel, factor in zip(moving, times, strict=True) if factor > 1.0}

    def doubts(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """The mean error of the GPU's predicted times of kernels, as logarithms, by kernel id; empty if not learned."""
        if self.sidecar.doubt is None or not kernels:
            return {}
        doubts = {kernel.id: self._doubts.get(kernel.id) for kernel in kernels}  # first, since another thread may clear them
        if new := list({kernel.id: kernel for kernel in kernels if doubts[kernel.id] is None}.values()):
            found = kept_json(self._key(self.sidecar.doubt, new), lambda: self._doubts_of(new))
            if len(self._doubts) > REMEMBERED_KERNELS:
                self._doubts.clear()
            self._doubts.update(found)
            doubts |= found
        return {name: doubt for name, doubt in doubts.items() if doubt is not None}

    def _doubts_of(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """The doubts of kernels, for predictors that learned them."""
        if self._doubt is None and self.sidecar.doubt is not None:
            self._doubt = open_estimator(self.sidecar.doubt, KernelModel, self.folder, TRAIN_AGAIN)
        if self._doubt is None:
            return {}
        factors = predict_distinct(self._doubt, kernels, self.features_of(kernels), tuple(self.sidecar.idle_load.values()))
        return {kernel.id: max(math.log(factor), 0.0) for kernel, factor in zip(kernels, factors.tolist(), strict=True)}

    def _key(self, about: Saved, kernels: Sequence[Kernel]) -> str:
        """The key in the user's cache for an estimator's predictions of kernels on an idle device."""
        return entry_key("kernels", about, sorted(self.sidecar.idle_load.items()), sorted(kernel.id for kernel in kernels),
                      package_version(*XGBOOST), code_version("learned", "ort_analysis", "records", "utils"))

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        """Time and origin of each kernel by id; all kernels of one predictor are predicted in one call."""
        times: dict[str, tuple[float, str]] = {
            name: (0.0, "measured") for name, kernel in kernels.items() if leaves_gpu_idle(kernel, label)}
        if look_up:
            times |= {name: (measured[label], "measured") for name in kernels
                      if name not in times and label in (measured := self._measured_of(name))}
        rest = [kernel for name, kernel in kernels.items() if name not in times]
        about = self.sidecar.labels.get(label)
        if not rest:
            return times
        if about is None or self.admitted or load != tuple(self.sidecar.idle_load.values()):
            return times | self._predicted(rest, load, label)
        kept = kept_json(self._key(about, rest), lambda: self._predicted(rest, load, label))
        return times | {name: (float(time_ms), str(origin)) for name, (time_ms, origin) in kept.items()}

    def _predicted(self, kernels: Sequence[Kernel], load: tuple[float, ...], label: str) -> dict[str, tuple[float, str]]:
        """The predicted time of each kernel by id, and whether it is predicted or estimated."""
        times: dict[str, tuple[float, str]] = {}
        model = self.kernel_model(label)
        predicted = predict_distinct(model, kernels, self.features_of(kernels), load)
        if self.admitted:
            predicted = self._by_admitted(self.admitted, kernels, predicted, load, label)
        for kernel, time_ms in zip(kernels, predicted.tolist(), strict=True):
            known = kernel.type in model.predictor_of
            if not known and not kernel.moves_data:  # a kernel of any type that only renames a tensor costs almost nothing
                times[kernel.id] = (model.roofline.floor_ms, "predicted")
            else:
                times[kernel.id] = (as_label_has_it(kernel, label, time_ms), "predicted" if known else "estimated")
        return times

    def _by_admitted(self, admitted: AdmittedEstimators, kernels: Sequence[Kernel], predicted: npt.NDArray[np.float64],
                     load: tuple[float, ...], label: str) -> npt.NDArray[np.float64]:
        """The kernels' times (ms), with those of admitted estimators in place of the boosters' (`predicted`) for some types.
        Under a load, estimators' times are multiplied by the slowdown that the boosters predict."""
        times, entry_of, idle_load = predicted.copy(), admitted.by_type(label), tuple(self.sidecar.idle_load.values())
        for entry in {entry.file: entry for entry in entry_of.values()}.values():
            rows = [row for row, kernel in enumerate(kernels) if entry_of.get(kernel.type) == entry and kernel.moves_data]
            if rows:
                served = [kernels[row] for row in rows]
                times[rows] = admitted.predict_ms(entry, served)
                if load != idle_load:
                    idle = predict_kernels(self.kernel_model(label), served, self.features_of(served), idle_load)
                    times[rows] *= predicted[rows] / idle
        return times


def read_predictors(folder: Path, estimators: Sequence[Path] = ()) -> Predictors:
    """The predictors in `folder`. Each file is checked against the sidecar when it is read. Boosters and admitted estimators
    are read, and may raise errors, at the first prediction that needs them. `estimators`: the user's files and folders with
    code of estimators."""
    sidecar = read_sidecar(folder)
    for about in estimators_of(sidecar).values():
        if about.file and not (folder / about.file).is_file():
            raise UserError(f"{folder / about.file}: named in {target_files.PREDICTORS.path(folder)} but missing; "
                            f"{TRAIN_AGAIN}")
    predictors = Predictors(folder, sidecar, read_measured(folder, sidecar))
    if target_files.ESTIMATORS.path(folder).is_file():
        from hase.learned.kernels.admitted import read_admitted  # noqa: PLC0415 - most predictions do not need it

        predictors.admitted = read_admitted(folder, sidecar.target, estimators)
    return predictors


class StartFrom(NamedTuple):
    """Another target's predictors."""

    target: str
    predictors: Predictors

    @classmethod
    def named(cls, workspace: Workspace, name: str) -> StartFrom:
        """The predictors of target `name` in the workspace, or else those that come with Hase."""
        folders = [folder for folder in (workspace.predictors(name), SHIPPED / name)
                   if target_files.PREDICTORS.path(folder).is_file()]
        if not folders:
            shipped = sorted(path.parent.name for path in SHIPPED.glob(f"*/{target_files.PREDICTORS.name}"))
            raise UserError(f"--start-from {name}: no predictors of that target in {workspace.predictors('')}, nor with Hase "
                            f"(which has: {', '.join(shipped) or 'none'})")
        return cls(name, read_predictors(folders[0]))

    def for_label(self, target: str, label: str) -> OtherPredictors | None:
        """The predictors to start from for a label of `target`: those of the same label, else of the other target's first
        label. None for the target itself, and if the labels differ in meaning: launches are no times. Raises UserError: the
        predictors start from another target themselves."""
        labels = self.predictors.labels
        theirs = label if label in labels else labels[0]
        if target == self.target or (label == LAUNCHES) != (theirs == LAUNCHES):
            return None
        model = self.predictors.kernel_model(theirs)
        if not isinstance(model, KernelModel):
            raise UserError(f"--start-from {self.target}: its predictors start from {model.start.target} themselves; name that "
                            "target instead")
        return OtherPredictors(self.target, model)
