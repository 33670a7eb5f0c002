"""Learns how the pace of a host changes while it serves requests.

Models were served alone (benchmark/served_sets.py), or beside others in time slices; of these, only runs that overlap no other
model's run count. If the host is slower than the GPU, the time of a run shows the host's pace: the one at which the simulated
run takes as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.benchmark.serving.sets import BATCH, ModelRequests, ServedModel, SetResult, read_requests, read_results
from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.serving import SLOWER
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.predictors import Predictors, read_predictors
from hase.learned.sharing import ServingHost
from hase.records.host_pace import STALL_S, MachinePace, read_pace
from hase.records.kernel_record import record_name
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition.measured_models import MeasuredModel, model_tracks
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from hase.utils.sharing_mode import SLICES
from hase.utils.timing import Floats

SIMULATED_PACES = np.linspace(0.5, 4.0, 71)  # at which runs are simulated
HOST_BOUND = 1.3  # a model is host-bound if a host slower by SLOWER slows it down by at least this factor
IDLE_MS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # borders between classes of idle times
LEAST_IDLE_MS, MOST_IDLE_MS = 1.0, 48.0  # stand for the first and the last class
QUANTILES = 12  # of the paces and stalls that are kept
LEAST_RUNS = 20  # of a model in a set; with fewer, the model does not count
STALL_RATIO = 1.5  # a stalled run exceeds the median by more than this multiple of it
APART_MS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)  # borders between classes of the time between two runs
LASTS_MS = (1.0, 3.0, 10.0, 20.0, 30.0, 50.0, 70.0, 100.0, 200.0)  # candidates for how long a pace lasts


class PacedRuns(NamedTuple):
    """The runs of a model that had the device to themselves, in order; `idle_ms` is the time since the run before (infinite for
    the first), `paces` are relative to the usual one. `host_bound`: the times show the host's pace."""

    starts_ms: Floats
    times_ms: Floats
    idle_ms: Floats
    paces: Floats
    host_bound: bool

    @property
    def stalled_ms(self) -> Floats:
        """The delay of each run against the median run; 0 for runs that were not stalled (see STALL_S, STALL_RATIO)."""
        median_ms = float(np.median(self.times_ms))
        delays_ms = self.times_ms - median_ms
        return np.where(delays_ms > max(1e3 * STALL_S, STALL_RATIO * median_ms), delays_ms, 0.0)

    def only(self, kept: npt.NDArray[np.bool_]) -> PacedRuns:
        """The runs that a mask keeps."""
        return PacedRuns(self.starts_ms[kept], self.times_ms[kept], self.idle_ms[kept], self.paces[kept], self.host_bound)


def time_slice_results(workspace: Workspace) -> tuple[Path, list[SetResult]]:
    """The file of results in a workspace, and its results in time slices: of models served alone, or of all if none was."""
    paths = sorted(workspace.served_sets("").parent.glob("*.jsonl"))
    if len(paths) != 1:
        raise UserError(f"{workspace.root}: served sets of {len(paths)} targets, where those of one are needed; measure with: "
                        "recipes/h200/measure_served_sets.sh")
    results = [result for result in read_results(paths[0]).values() if result.way == SLICES and result.status == "ok"]
    if not results:
        raise UserError(f"{paths[0]}: no model was served in time slices: add {SLICES} to the ways of the config")
    return paths[0], [result for result in results if len(result.models) == 1] or results


def host_pace_readings(workspace: Workspace) -> list[MachinePace]:
    """The readings of the host's pace in a workspace's folder `host_pace`, made before and after the served sets."""
    return [read_pace(path) for path in sorted((workspace.root / "host_pace").glob("*.json"))]


def host_pace_us(results: Iterable[SetResult], workspace: Workspace) -> float:
    """The time of the host's probe (µs): the mean of the servers' readings, or else the median of those in folder `host_pace`.
    The mean, since a host may switch between two paces every few seconds."""
    if servers_us := [probe_us for result in results for served in result.results for probe_us in served.probe_us]:
        return fmean(servers_us)
    if readings := host_pace_readings(workspace):
        return median(reading.probe_us for reading in readings)
    raise UserError(f"{workspace.root / 'host_pace'}: no reading of the host's pace; make some while models are served: "
                    "python benchmark/host_pace.py --out FILE")


def served_tracks(served: ServedModel, workspace: Workspace, predictors: Predictors) -> Tracks:
    """The host's and the GPU's track of a run of a served model at its batch."""
    name = record_name(served.model.stem, {**served.dims, BATCH: served.batch}, static=True)
    path = record_path(workspace, predictors.sidecar.target.flavour, name)
    if not path.is_file():
        raise UserError(f"{path}: no record of {name}, which was served; make it with: python ort_analysis/fusion_detector.py "
                        f"--device cuda --static --dim batch={served.batch} --model {served.model.name}")
    record = read_model_record(path)
    kernels = list(record.kernels.values())
    gpu_ms, launches = (dict(zip(record.kernels, predictors.predict(kernels, {}, label).latency_ms, strict=True))
                        for label in (GPU_LABEL, LAUNCHES))
    return model_tracks(MeasuredModel(record, record.group, np.nan), gpu_ms, launches).tracks


def served_runs(requests: Sequence[ModelRequests], run_tracks: Sequence[Tracks], costs: PipelineCosts) -> list[PacedRuns]:
    """For each model of a set, the runs that overlap no other model's; `run_tracks` are the tracks of one run of each."""
    spans_ms = [[1e3 * moments_s for moments_s in served.runs_s] for served in requests]
    paced = []
    for index, ((starts_ms, ends_ms), run) in enumerate(zip(spans_ms, run_tracks, strict=True)):
        at_paces_ms = np.array([pipeline_ms(run, costs.at_pace(pace)) for pace in SIMULATED_PACES])
        usual_ms, slower_ms = np.interp((1.0, SLOWER), SIMULATED_PACES, at_paces_ms)
        times_ms = ends_ms - starts_ms
        runs = PacedRuns(starts_ms, times_ms, np.append(np.inf, starts_ms[1:] - ends_ms[:-1]),
                         np.interp(times_ms, at_paces_ms, SIMULATED_PACES), bool(slower_ms >= HOST_BOUND * usual_ms))
        alone = np.ones(len(starts_ms), dtype=bool)
        for other_starts_ms, other_ends_ms in spans_ms[:index] + spans_ms[index + 1:]:
            ended_before = np.searchsorted(other_ends_ms, starts_ms, side="right")
            alone &= ended_before == np.searchsorted(other_starts_ms, ends_ms, side="left")  # no other run overlaps
        paced.append(runs.only(alone))
    return paced


def learn_serving_host(measured: Workspace, folder: Path) -> ServingHost:
    """Learns the host of a target from served models in the workspace `measured`; `folder` has the target's predictors and its
    name. Raises UserError: the composition is not a GPU's two tracks, no host's pace was recorded, nothing was served in time
    slices, the host is the slower track of no model, or a record is missing."""
    composition, predictors = read_composition(folder), read_predictors(folder)
    if composition.costs is None or composition.probe_us is None:
        raise UserError(f"{folder.name}: its composition knows no host's pace; it can only be learned for a GPU's two tracks "
                        "(composition pipeline)")
    path, results = time_slice_results(measured)
    runs = [served for result in results
            for served in served_runs(read_requests(path, result),
                                      [served_tracks(model, measured, predictors) for model in result.models],
                                      composition.costs)
            if len(served.times_ms) >= LEAST_RUNS]
    return fit_serving_host(runs, results[0].machine.device_name, host_pace_us(results, measured) / composition.probe_us)


def fit_serving_host(served_models: Sequence[PacedRuns], learned_on: str, pace: float) -> ServingHost:
    """Learns a host from runs of several models. Stalled runs count only as stalls. `pace` is the host's by its probe, a ratio
    to the usual one. Raises UserError: the GPU is the slower track of all models."""
    stalls_ms = np.concatenate([runs.stalled_ms for runs in served_models])
    busy_s = sum(float(runs.times_ms.sum()) for runs in served_models) / 1e3
    served_models = [runs.only(runs.stalled_ms == 0.0) for runs in served_models if runs.host_bound]
    if not served_models:
        raise UserError("the GPU is the slower track of all models that were served, so they say nothing of the host: serve "
                        "smaller ones")
    weights = np.concatenate([np.full(len(runs.paces), 1.0 / len(runs.paces)) for runs in served_models])  # equal weights
    paces, idle_ms = (np.concatenate([getattr(runs, name) for runs in served_models]) for name in ("paces", "idle_ms"))
    warm = idle_ms < LEAST_IDLE_MS
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    slower = _slower_after_idle(served_models, weights)
    middles_ms = [LEAST_IDLE_MS, *np.sqrt(np.array(IDLE_MS[:-1]) * IDLE_MS[1:]).tolist(), MOST_IDLE_MS]
    return ServingHost(
        learned_on=learned_on, models=len(served_models), runs=len(paces), pace=pace, lasts_ms=_lasts_ms(served_models, slower),
        paces=tuple((_quantiles(paces[warm], weights[warm], shares) / pace).tolist()), idle_ms=tuple(middles_ms),
        slower=tuple(slower.tolist()), stalls_per_s=float((stalls_ms > 0.0).sum()) / busy_s,
        stalls_ms=tuple(np.quantile(stalls_ms[stalls_ms > 0.0], shares).tolist()) if stalls_ms.any() else ())


def _quantiles(values: Floats, weights: Floats, shares: Floats) -> Floats:
    """Weighted quantiles."""
    order = np.argsort(values)
    return np.interp(shares, (np.cumsum(weights[order]) - weights[order] / 2.0) / weights.sum(), values[order])


def _slower_after_idle(served_models: Sequence[PacedRuns], weights: Floats) -> Floats:
    """The host's slowdown after each class of idle times, relative to the first; it never falls with the idle time. Found by
    least squares over logarithms, with a level for each model."""
    classes = np.concatenate([np.digitize(runs.idle_ms, IDLE_MS) for runs in served_models])
    models = np.repeat(np.arange(len(served_models)), [len(runs.paces) for runs in served_models])
    rows = np.zeros((len(classes), len(served_models) + len(IDLE_MS)))
    rows[np.arange(len(classes)), models] = 1.0
    later = np.flatnonzero(classes)
    rows[later, len(served_models) + classes[later] - 1] = 1.0
    logs, root = np.log(np.concatenate([runs.paces for runs in served_models])), np.sqrt(weights)
    found = np.linalg.lstsq(rows * root[:, None], logs * root, rcond=None)[0][len(served_models):]
    return np.maximum.accumulate(np.exp([0.0, *found]))


def _lasts_ms(served_models: Sequence[PacedRuns], slower: Floats) -> float:
    """How long a pace lasts: the time constant with which the correlation of two runs' paces decays exponentially. The effect
    of idle times before the runs (`slower`, by class) is removed first."""
    correlations: list[list[float]] = [[] for _ in APART_MS[1:]]  # by class of the time between two runs, one for each model
    for runs in served_models:
        logs = np.log(runs.paces / slower[np.digitize(runs.idle_ms, IDLE_MS)])
        apart_ms, products = runs.starts_ms[:, None] - runs.starts_ms, np.outer(logs - logs.mean(), logs - logs.mean())
        for class_values, least_ms, most_ms in zip(correlations, APART_MS[:-1], APART_MS[1:], strict=True):
            pairs = (apart_ms >= least_ms) & (apart_ms < most_ms)
            if pairs.any() and logs.std():
                class_values.append(float(products[pairs].mean() / logs.var()))
    known = [index for index, class_values in enumerate(correlations) if class_values]
    middles_ms = np.sqrt(np.array(APART_MS[:-1]) * APART_MS[1:])[known]
    measured = np.array([np.mean(correlations[index]) for index in known])
    return min(LASTS_MS, key=lambda lasts_ms: float(((np.exp(-middles_ms / lasts_ms) - measured) ** 2).sum()))
