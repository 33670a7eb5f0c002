"""The predictors of a target, ready to predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from hase.learned import target_files
from hase.learned.kernels.estimators import KernelModel, OtherPredictors, Transferred, predict_kernels
from hase.learned.kernels.features import KERNEL_FEATURES, times_beyond
from hase.learned.kernels.saved_form import Saved, open_estimator
from hase.learned.kernels.sidecar import XGBOOST, Sidecar, estimators_of, read_measured, read_sidecar
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
T = TypeVar("T")
ON_GPU = (GPU_LABEL, LAUNCHES)  # the labels about the GPU's own work
MAX_CACHED_KERNELS = 100_000
MAX_CACHED_LOADS = 64
# All 2,640 recurrent layers of 16 steps or more that were measured on H200s launched the same number of kernels in each step
# and direction; 96 % of them launched 1 to 7 more (3 in the mean). With whole numbers per step, the mean error of the launches
# of held-out layers falls from 3.2–6.4 % to 2.7–4.3 %, by operator.
LEAST_STEPS, LAUNCHES_BESIDE_STEPS = 16, 3


class KernelTimes(NamedTuple):
    """The times of kernels, and the provenance of each: `measured`, `predicted` or `estimated`."""

    latency_ms: list[float]
    provenance: list[str]


def leaves_gpu_idle(kernel: Kernel, label: str) -> bool:
    """Whether `label` is about the GPU's own work and the kernel has none there. Such times are zero and are not learned."""
    return label in ON_GPU and not kernel.moves_data


def round_launches(kernel: Kernel, launches: float) -> float:
    """Rounds predicted launches to the same whole number for each step of a long recurrent layer; others stay as they are. A
    predicted number may be the mean of neighbours with two and with three launches per step, which never occurs."""
    step_count = steps(kernel.op_type, kernel.attributes, kernel.inputs)
    if step_count < LEAST_STEPS or len(kernel.inputs) < 2 or not kernel.inputs[1].shape:
        return launches
    all_steps = step_count * kernel.inputs[1].shape[0]  # weights have one entry per direction
    return max(1, round((launches - LAUNCHES_BESIDE_STEPS) / all_steps)) * all_steps + LAUNCHES_BESIDE_STEPS


def corrected_prediction(kernel: Kernel, label: str, predicted: float) -> float:
    """Corrects a predicted time or number of launches: zero if the kernel has no work on the GPU; `round_launches`."""
    if leaves_gpu_idle(kernel, label):
        return 0.0
    return round_launches(kernel, predicted) if label == LAUNCHES else predicted


def predict_distinct(model: TimePredictor, kernels: Sequence[Kernel], features: npt.NDArray[np.float64],
                     load: Sequence[float]) -> npt.NDArray[np.float64]:
    """Predicts kernels; those that look equal to the estimator are computed only once."""
    index_of: dict[tuple[Any, ...], int] = {}
    firsts: list[int] = []  # rows of the distinct kernels
    indices = np.empty(len(kernels), dtype=int)  # of each kernel, in `firsts`
    for row, kernel in enumerate(kernels):
        key = kernel.type, kernel.flops, kernel.bytes_read + kernel.bytes_written, features[row].tobytes()
        indices[row] = index_of.setdefault(key, len(firsts))
        if indices[row] == len(firsts):
            firsts.append(row)
    return predict_kernels(model, [kernels[row] for row in firsts], features[firsts], load)[indices]


def _cached_by_id(cache: dict[str, T], kernels: Iterable[Kernel], compute: Callable[[dict[str, Kernel]], Mapping[str, T]]
                  ) -> dict[str, T]:
    """The value of each kernel by id. Those that `cache` lacks are computed together, by id, and added to it."""
    values = {kernel.id: cache.get(kernel.id) for kernel in kernels}  # read once, since another thread may clear the cache
    if new := {kernel.id: kernel for kernel in kernels if values[kernel.id] is None}:
        computed = compute(new)
        if len(cache) > MAX_CACHED_KERNELS:
            cache.clear()
        cache.update(computed)
        values.update(computed)
    return {name: value for name, value in values.items() if value is not None}


@dataclass
class Predictors:
    """The predictors of a target, ready to predict. A booster is read at the first prediction that needs it. `measured` has
    idle times (ms) by kernel id and label, and also the values of `drift_key` and `inputs_key`."""

    folder: Path
    sidecar: Sidecar
    measured: Mapping[str, dict[str, float]]
    admitted: AdmittedEstimators | None = None
    _models: dict[str, KernelModel | Transferred] = field(default_factory=dict, repr=False)
    _doubt: KernelModel | None = field(default=None, repr=False)
    _doubts: dict[str, float] = field(default_factory=dict, repr=False)
    _features: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)
    _measured_times: dict[str, Mapping[str, float]] = field(default_factory=dict, repr=False)
    _times: dict[tuple[Any, ...], dict[str, tuple[float, str]]] = field(default_factory=dict, repr=False)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.sidecar.labels)

    def kernel_model(self, label: str) -> KernelModel | Transferred:
        """The predictors of a label, which are opened once."""
        if label not in self.sidecar.labels:
            raise UserError(f"label {label}: not measured on {self.sidecar.target.name} (measured: {', '.join(self.labels)})")
        if label not in self._models:
            saved = self.sidecar.labels[label]
            self._models[label] = (open_estimator(saved, Transferred, self.folder, TRAIN_AGAIN) if saved.start else
                                   open_estimator(saved, KernelModel, self.folder, TRAIN_AGAIN))
        return self._models[label]

    def load_vector(self, load: Mapping[str, float]) -> tuple[float, ...]:
        """The load as numbers, in the order of the sidecar's metrics. An empty `load` means an idle device. Raises UserError if
        a metric is missing or is not finite, or if nothing was measured under load."""
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
        """The time of each kernel under a load: measured if known, else predicted. Raises UserError for an unknown label.
        `load` is as for `load_vector`, by DCGM field name. By default, `label` is the first that was trained. With `strict`,
        measured times are not used."""
        label = label if label is not None else self.labels[0]
        vector = self.load_vector(load)
        cache: dict[str, tuple[float, str]] = files.cached(
            self._times, (label, vector, bool(load), strict), dict, MAX_CACHED_LOADS)
        times = _cached_by_id(cache, kernels, partial(self._time, load=vector, label=label, look_up=not load and not strict))
        pairs = [times[kernel.id] for kernel in kernels]
        return KernelTimes([time_ms for time_ms, _ in pairs], [provenance for _, provenance in pairs])

    def _look_up(self, kernel_id: str) -> Mapping[str, float]:
        """The measured times of a kernel by label, cached; empty if it was not measured."""
        return cast("Mapping[str, float]", files.cached(
            self._measured_times, kernel_id, lambda: self.measured.get(kernel_id, {}), MAX_CACHED_KERNELS))

    def features(self, kernels: Sequence[Kernel]) -> npt.NDArray[np.float64]:
        """The features of kernels, of shape (kernels, features), cached for each kernel."""
        features = _cached_by_id(self._features, kernels, lambda new: {
            name: np.array(KERNEL_FEATURES.compute(kernel), dtype=float) for name, kernel in new.items()})
        return np.array([features[kernel.id] for kernel in kernels], dtype=float)

    def measured_drift(self, kernel: Kernel, label: str) -> float:
        """How much the machine's speed changed (a ratio) while a kernel was measured; 0 if it was steady."""
        return self._look_up(kernel.id).get(drift_key(label), 0.0)

    def inputs_realistic(self, kernel: Kernel, label: str) -> bool:
        """Whether a kernel whose time depends on values was measured with realistic ones."""
        return inputs_key(label) in self._look_up(kernel.id)

    def beyond_range(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """The kernels beyond the range of the training: the factor by which each exceeds it, by kernel id."""
        moving = [kernel for kernel in kernels if kernel.moves_data]
        if not moving:
            return {}
        low, high = np.array(self.sidecar.feature_range).T
        times = times_beyond(KERNEL_FEATURES, self.features(moving), low, high)
        return {kernel.id: float(factor) for kernel, factor in zip(moving, times, strict=True) if factor > 1.0}

    def doubts(self, kernels: Sequence[Kernel]) -> dict[str, float]:
        """The doubts about kernels: the mean log error of the GPU's predicted times, by kernel id. Empty if not learned."""
        saved = self.sidecar.doubt
        if saved is None or not kernels:
            return {}
        return _cached_by_id(self._doubts, kernels, lambda new: kept_json(
            self._cache_key(saved, new.values()), lambda: self._predict_doubts(saved, list(new.values()))))

    def _predict_doubts(self, saved: Saved, kernels: Sequence[Kernel]) -> dict[str, float]:
        if self._doubt is None:
            self._doubt = open_estimator(saved, KernelModel, self.folder, TRAIN_AGAIN)
        factors = predict_distinct(self._doubt, kernels, self.features(kernels), tuple(self.sidecar.idle_load.values()))
        return {kernel.id: max(math.log(factor), 0.0) for kernel, factor in zip(kernels, factors.tolist(), strict=True)}

    def _cache_key(self, saved: Saved, kernels: Iterable[Kernel]) -> str:
        """The key in the user's cache for an estimator's predictions of kernels on an idle device."""
        return entry_key("kernels", saved, sorted(self.sidecar.idle_load.items()), sorted(kernel.id for kernel in kernels),
                         package_version(*XGBOOST), code_version("learned", "ort_analysis", "records", "utils"))

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        """The time and provenance of each kernel, by id. With `look_up`, measured times are used."""
        times: dict[str, tuple[float, str]] = {
            name: (0.0, "measured") for name, kernel in kernels.items() if leaves_gpu_idle(kernel, label)}
        if look_up:
            times |= {name: (measured[label], "measured") for name in kernels
                      if name not in times and label in (measured := self._look_up(name))}
        rest = [kernel for name, kernel in kernels.items() if name not in times]
        saved = self.sidecar.labels.get(label)
        if not rest:
            return times
        if saved is None or self.admitted or load != tuple(self.sidecar.idle_load.values()):
            return times | self._predict(rest, load, label)
        kept = kept_json(self._cache_key(saved, rest), lambda: self._predict(rest, load, label))
        return times | {name: (float(time_ms), str(origin)) for name, (time_ms, origin) in kept.items()}

    def _predict(self, kernels: Sequence[Kernel], load: tuple[float, ...], label: str) -> dict[str, tuple[float, str]]:
        """The predicted time of each kernel by id, and whether it is predicted or estimated."""
        times: dict[str, tuple[float, str]] = {}
        model = self.kernel_model(label)
        predicted = predict_distinct(model, kernels, self.features(kernels), load)
        if self.admitted:
            predicted = self._replace_by_admitted(self.admitted, kernels, predicted, load, label)
        for kernel, time_ms in zip(kernels, predicted.tolist(), strict=True):
            known = kernel.type in model.predictor_of
            if not known and not kernel.moves_data:  # a kernel that only renames a tensor costs almost nothing
                times[kernel.id] = (model.roofline.floor_ms, "predicted")
            else:
                times[kernel.id] = (corrected_prediction(kernel, label, time_ms), "predicted" if known else "estimated")
        return times

    def _replace_by_admitted(self, admitted: AdmittedEstimators, kernels: Sequence[Kernel], predicted: npt.NDArray[np.float64],
                             load: tuple[float, ...], label: str) -> npt.NDArray[np.float64]:
        """Replaces the boosters' times (`predicted`, ms) of some types by those of admitted estimators. Under a load, the
        latter are multiplied by the slowdown that the boosters predict."""
        times, entry_of, idle_load = predicted.copy(), admitted.by_type(label), tuple(self.sidecar.idle_load.values())
        for entry in {entry.file: entry for entry in entry_of.values()}.values():
            rows = [row for row, kernel in enumerate(kernels) if entry_of.get(kernel.type) == entry and kernel.moves_data]
            if rows:
                served = [kernels[row] for row in rows]
                times[rows] = admitted.predict_ms(entry, served)
                if load != idle_load:
                    idle = predict_kernels(self.kernel_model(label), served, self.features(served), idle_load)
                    times[rows] *= predicted[rows] / idle
        return times


def read_predictors(folder: Path, estimators: Sequence[Path] = ()) -> Predictors:
    """Reads the predictors in `folder`. `estimators` are the user's files and folders with code of estimators. Each file is
    checked against the sidecar when it is read. Boosters and admitted estimators are read at the first prediction that needs
    them, which may then raise errors."""
    sidecar = read_sidecar(folder)
    for saved in estimators_of(sidecar).values():
        if saved.file and not (folder / saved.file).is_file():
            raise UserError(f"{folder / saved.file}: named in {target_files.PREDICTORS.path(folder)} but missing; "
                            f"{TRAIN_AGAIN}")
    predictors = Predictors(folder, sidecar, read_measured(folder, sidecar))
    if target_files.ESTIMATORS.path(folder).is_file():
        from hase.learned.kernels.admitted import read_admitted  # noqa: PLC0415 - most predictions do not need it

        predictors.admitted = read_admitted(folder, sidecar.target, estimators)
    return predictors


class StartFrom(NamedTuple):
    """Another target's predictors, from which training starts."""

    target: str
    predictors: Predictors

    @classmethod
    def named(cls, workspace: Workspace, name: str) -> StartFrom:
        """Reads the predictors of target `name` in the workspace, or else those that come with Hase."""
        folders = [folder for folder in (workspace.predictors(name), SHIPPED / name)
                   if target_files.PREDICTORS.path(folder).is_file()]
        if not folders:
            shipped = sorted(path.parent.name for path in SHIPPED.glob(f"*/{target_files.PREDICTORS.name}"))
            raise UserError(f"--start-from {name}: no predictors of that target in {workspace.predictors('')}, nor with Hase "
                            f"(which has: {', '.join(shipped) or 'none'})")
        return cls(name, read_predictors(folders[0]))

    def for_label(self, target: str, label: str) -> OtherPredictors | None:
        """The predictors to start from for a label of `target`: those of the same label, else of the other target's first. None
        for the target itself, or if only one of the labels is a number of launches. Raises UserError if the predictors
        themselves start from another target."""
        labels = self.predictors.labels
        other_label = label if label in labels else labels[0]
        if target == self.target or (label == LAUNCHES) != (other_label == LAUNCHES):
            return None
        model = self.predictors.kernel_model(other_label)
        if not isinstance(model, KernelModel):
            raise UserError(f"--start-from {self.target}: its predictors start from {model.start.target} themselves; name that "
                            "target instead")
        return OtherPredictors(self.target, model)
