"""Learns time slicing from measured and simulated runs of models next to a background, and a baseline to compare with.

The cost of a switch between two processes is fitted to the models next to a model in a loop.

The baseline learns from kernels measured under load: their times with the metrics as features, summed, and put into α·Σ+β. Each
run is predicted by a training without its background and its model's family. Its α and β are fitted to latencies of other
families next to other backgrounds, whose sums are predicted in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.sharing import CoRunner, shared_runs_ms
from hase.learned.composition.fitted import latency_ms, read_composition
from hase.learned.kernels.estimators import KernelModel, predict_kernels
from hase.learned.kernels.interface import TrainingSet
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.predictors import ON_GPU, read_predictors
from hase.learned.sharing import (
    DEFAULT_SWITCH_MS,
    Sharing,
    SharingErrors,
    TracksAndCosts,
    busy_share,
    co_runner_probed,
    looped_co_runner,
)
from hase.records.dataset_files import kernel_table_path
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_record import record_name
from hase.records.probe_reading import ALWAYS, QUANTILES
from hase.training.composition.formulas import fit_line, left_out_costs
from hase.training.composition.held_out import predict_as_learned
from hase.training.composition.measured_models import MeasuredTracks, known_times, left_out_groups, measured_models, tracks_of
from hase.training.kernels.fitting import fit_kernel_model, parallel_map
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.logger import progress
from hase.utils.timing import Floats

if TYPE_CHECKING:
    from hase.learned.kernels.interface import TrainingConfig
    from hase.records.kernel_record import ModelRecord
    from hase.records.measurement import Background, Block, Measurement
    from hase.utils.paths import Workspace


SEED = 7
STATISTICS = ("mean", "p50", "p95")
SWITCHES_MS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # costs of a switch to choose from; about 0.2 on an H200
BASELINE_LABEL = "run"
CYCLE_MS = 20.0  # default if no background that pauses was measured
LONG_WAIT_QUANTILE = 0.9  # of a reading's waits; the largest over all readings is used as the longest wait


@dataclass(frozen=True)
class SharedRuns:
    """Runs of a model next to a background, and its median latency on the same machine while idle. The probe just before saw
    `co_runner`; `busy` is the GPU's share then, and `metrics` are by DCGM field name."""

    model: str
    background: str
    level: float
    samples_ms: Floats
    idle_ms: float
    co_runner: CoRunner
    busy: float
    metrics: Mapping[str, float]
    machine: str


def alone_ms(blocks: Iterable[Block]) -> dict[str, float]:
    """The time (ms) of each piece of the probe's work on an idle GPU, by name: the median of all runs."""
    runs: dict[str, list[float]] = defaultdict(list)
    for block in blocks:
        if block.probe and not block.level:
            runs["tiny"] += block.probe.tiny.latencies_ms
            runs["long"] += block.probe.long.latencies_ms
    if not runs:
        raise UserError("no reading of the sharing probe on an idle GPU: measure at level 0 too (levels, probe_s in the "
                        "collector's config)")
    return {name: float(np.median(times_ms)) for name, times_ms in runs.items()}


def latencies_in(block: Block) -> list[Measurement]:
    """The latencies of whole models in a block."""
    return [m for m in block.measurements if (m.subject, m.label, m.status) == ("model", "latency", "ok")]


def shared_runs(blocks: Sequence[Block], alone: Mapping[str, float]) -> list[SharedRuns]:
    """The runs of every model next to a background that the same machine also ran idle, and with the probe's reading."""
    idle: dict[tuple[str, str], list[float]] = defaultdict(list)
    for block in blocks:
        if not block.level:
            for m in latencies_in(block):
                idle[block.machine, m.id].append(float(np.median(m.samples_ms)))
    shared = []
    for block in blocks:
        busy = busy_share(block.background)
        if not block.level or block.probe is None or busy is None:
            continue
        co_runner = co_runner_probed(block.probe, alone)
        shared += [SharedRuns(m.id, block.background_name, block.level, np.array(m.samples_ms),
                              float(np.median(idle[block.machine, m.id])), co_runner, busy, block.background, block.machine)
                   for m in latencies_in(block) if (block.machine, m.id) in idle]
    return shared


def measured_elsewhere(runs: Sequence[SharedRuns]) -> Floats:
    """The mean statistics of each run's model and background on other machines; shape (runs, 3), NaN without any."""
    statistics: dict[tuple[str, str, float], list[tuple[str, Floats]]] = defaultdict(list)
    for run in runs:
        statistics[run.model, run.background, run.level].append((run.machine, statistics_of(run.samples_ms)))
    others = [[values for machine, values in statistics[run.model, run.background, run.level] if machine != run.machine]
              for run in runs]
    return np.array([np.mean(values, axis=0) if values else np.full(len(STATISTICS), np.nan) for values in others])


def statistics_of(latencies_ms: Floats) -> Floats:
    """Mean, median and 95th percentile."""
    return np.array([latencies_ms.mean(), *np.percentile(latencies_ms, (50, 95))])


def errors_of(predicted: Floats, measured: Floats) -> SharingErrors:
    """Mean errors of the three statistics over the runs that have a prediction."""
    is_predicted = np.isfinite(predicted[:, 0])
    errors = np.abs(predicted[is_predicted] / measured[is_predicted] - 1.0).mean(axis=0)
    return SharingErrors(cases=int(is_predicted.sum()), **dict(zip(STATISTICS, errors.tolist(), strict=True)))


def typical(runs: Sequence[SharedRuns], slice_ms: float, alone: Mapping[str, float]) -> Sharing:
    """Learns the waits next to an average background, the longest wait, and the cycle of backgrounds that pause. Backgrounds
    are averaged quantile by quantile: a mixture would give each some long waits, with more error in 95th percentiles."""
    quantiles = np.linspace(0.0, 1.0, QUANTILES)
    readings = {id(run.co_runner): run for run in runs if len(run.co_runner.waits_ms)}.values()
    others = [run.co_runner for run in readings]
    if not others:
        raise UserError("no reading of the sharing probe waited for a background, so there is nothing to learn; measure at "
                        "levels above 0 (levels in the collector's config)")
    by_kind: dict[str, list[Floats]] = defaultdict(list)
    for run in readings:
        by_kind[run.background].append(np.quantile(run.co_runner.waits_ms, quantiles))
    waits = np.mean([np.mean(kind_waits, axis=0) for kind_waits in by_kind.values()], axis=0)
    cycles = [co_runner.cycle_ms for co_runner in others if co_runner.quiet_ms]
    long_waits_ms = [float(np.quantile(co_runner.waits_ms, LONG_WAIT_QUANTILE)) for co_runner in others]
    return Sharing(slice_ms=slice_ms, alone_ms=dict(alone), waits_ms=tuple(waits.round(4).tolist()),
                   cycle_ms=float(np.median(cycles)) if cycles else CYCLE_MS,
                   longest_wait_ms=round(max(long_waits_ms), 4), switch_ms=DEFAULT_SWITCH_MS)


@dataclass(frozen=True)
class Simulated:
    """A model ready for simulation: its tracks, the costs of a run, and a time to add to each latency (ms)."""

    tracks: Tracks
    costs: PipelineCosts
    more_ms: float = 0.0

    @property
    def run(self) -> TracksAndCosts:
        """The tracks and costs alone, as the simulations take them."""
        return self.tracks, self.costs

    def next_to(self, co_runner: CoRunner, slice_ms: float) -> Floats:
        """Mean, median and 95th percentile of its latency (ms) next to a co-runner."""
        return self.more_ms + statistics_of(shared_runs_ms(*self.run, slice_ms, co_runner, np.random.default_rng(SEED)))

    def idle_ms(self) -> float:
        return self.more_ms + pipeline_ms(*self.run)


class SimulatedModels(NamedTuple):
    """The models of the fit, by name. `strict`: with kernels predicted and the costs of a run fitted without the model's group;
    `known`: with measured kernels."""

    strict: dict[str, Simulated]
    known: dict[str, Simulated]
    groups: dict[str, str]
    records: dict[str, ModelRecord]


def simulated_models(workspace: Workspace, target: str, config: TrainingConfig) -> SimulatedModels:
    """The models of a target's fit, ready for simulation."""
    composition, predictors = read_composition(workspace.predictors(target)), read_predictors(workspace.predictors(target))
    if composition.kind != "pipeline":
        raise UserError(f"{target}: its composition is {composition.kind}; runs next to a co-runner can only be predicted with "
                        "a GPU's two tracks (composition pipeline)")
    models = measured_models(workspace, target, predictors.sidecar)
    left_out, groups = left_out_groups(models)
    rows = read_training_set(workspace, target)
    strict = predict_as_learned(predictors, ON_GPU, rows, models, groups, left_out, config, "leaving families out")
    known = known_times(strict, measured_times(workspace, target))
    names = [model.record.model for model in models]
    strict_tracks, known_tracks = tracks_of(models, strict), tracks_of(models, known)

    def simulated(tracks_of_models: Sequence[MeasuredTracks]) -> dict[str, Simulated]:
        costs = left_out_costs(tracks_of_models, groups)
        return {name: Simulated(measured.tracks, costs[group])
                for name, measured, group in zip(names, tracks_of_models, groups, strict=True)}

    return SimulatedModels(simulated(strict_tracks), simulated(known_tracks), dict(zip(names, groups, strict=True)),
                           {model.record.model: model.record for model in models})


def looped_models(backgrounds: Mapping[str, Background], known: Collection[str]) -> dict[str, str]:
    """For each background that is a model in a loop, the record's name; only of records in `known`."""
    named = {name: record_name(background.model.stem, background.dims, static=True) for name, background in backgrounds.items()
             if background.model}
    return {name: record for name, record in named.items() if record in known}


class Pairs:
    """Runs next to a model in a loop that never pauses, simulated for each of SWITCHES_MS that is below the longest wait.
    `cases` has the indices of these runs among all runs."""

    def __init__(self, runs: Sequence[SharedRuns], measured: Floats, models: Mapping[str, Simulated],
                 families: Mapping[str, str], looped: Mapping[str, str], learned: Sequence[Sharing]) -> None:
        """Simulates these runs. `measured` are their statistics, shape (runs, 3); `looped` is from `looped_models`; `learned`
        is for each run the sharing learned without its background and its family."""
        self.cases = [index for index, run in enumerate(runs) if run.background in looped and run.level > ALWAYS]
        shortest_ms = min(sharing.longest_wait_ms for sharing in learned)
        self._switches_ms = [switch_ms for switch_ms in SWITCHES_MS if switch_ms < shortest_ms] or [SWITCHES_MS[0]]
        self._left_out = [(runs[index].background, families[runs[index].model]) for index in self.cases]
        self._measured = measured[self.cases]
        self._predicted = np.array([[
            _next_to_loop(models[runs[index].model], models[looped[runs[index].background]],
                          learned[index].model_copy(update={"switch_ms": switch_ms})) for switch_ms in self._switches_ms]
            for index in progress(self.cases, "simulating pairs")])

    def switch_ms(self) -> float:
        """The cost of a switch (ms) with the smallest error over all cases."""
        return self._switches_ms[self._best(range(len(self.cases)))]

    def _best(self, kept: Sequence[int]) -> int:
        """The index of the cost with the smallest error of all three statistics over the cases `kept`."""
        kept = list(kept)
        errors = np.abs(self._predicted[kept] / self._measured[kept, None] - 1.0).mean(axis=(0, 2))
        return int(errors.argmin())

    def left_out(self) -> Floats:
        """Predictions, shape (cases, 3), with a switch fitted without the looped model and the other model's family. Fitted to
        all cases if that leaves none."""
        predicted = []
        for index, (background, family) in enumerate(self._left_out):
            others = [i for i, (looped, other) in enumerate(self._left_out) if looped != background and other != family]
            predicted.append(self._predicted[index, self._best(others or range(len(self.cases)))])
        return np.array(predicted)


def _next_to_loop(model: Simulated, looped: Simulated, sharing: Sharing) -> Floats:
    """Statistics of a model's latency (ms) while the other one runs in a loop."""
    return model.next_to(looped_co_runner([looped.run], model.run, sharing), sharing.slice_ms)


# the baseline ------------------------------------------------------------------------------------------------------------

def measured_under_load(workspace: Workspace, target: str) -> TrainingSet | None:
    """The kernels of the dataset with label `run`; None if no kernel was measured next to a background."""
    if not kernel_table_path(workspace.dataset(target)).exists() or read_kernel_table(workspace, target).empty:
        return None
    rows = read_training_set(workspace, target)
    if BASELINE_LABEL not in rows.times_ms or rows.idle.all():
        return None
    return rows.rows(np.isfinite(rows.times_ms[BASELINE_LABEL]))


def summed_ms(rows: TrainingSet, runs: Sequence[SharedRuns], records: Mapping[str, ModelRecord],
              families: Mapping[str, str], config: TrainingConfig) -> Floats:
    """The mean latency (ms) that the baseline predicts for each run; NaN where data for that are missing. `rows` are kernels
    with label `run`, idle and next to backgrounds. α and β of each run are fitted to the others."""
    measured, backgrounds = set(rows.ids.tolist()), set(rows.backgrounds.tolist())
    groups = defaultdict[tuple[str, str], list[int]](list)
    for index, run in enumerate(runs):
        if (run.background in backgrounds and set(rows.metrics) <= set(run.metrics)
                and run.model in records and set(records[run.model].kernels) <= measured):
            groups[run.background, families[run.model]].append(index)
    sums = np.full(len(runs), np.nan)

    def sums_of(key: tuple[str, str]) -> list[float]:
        background, family = key
        kernels_of_family = {name for record in records.values() if families[record.model] == family for name in record.kernels}
        seen = (rows.backgrounds != background) & ~np.isin(rows.ids, list(kernels_of_family))
        seen &= np.array([family not in names for names in rows.groups])
        if not (seen & ~rows.idle).any():
            return [np.nan] * len(groups[key])
        model = fit_kernel_model(rows.rows(seen), BASELINE_LABEL, {}, config)
        return [_sum_ms(model, rows, records[runs[index].model], runs[index].metrics) for index in groups[key]]

    keys = sorted(groups)
    for key, predicted in zip(keys, parallel_map(sums_of, keys, config.workers), strict=True):
        sums[groups[key]] = predicted
    means = np.array([run.samples_ms.mean() for run in runs])
    predicted_ms = np.full(len(runs), np.nan)
    for (background, family), indices in groups.items():
        others = [index for key in keys if key[0] != background and key[1] != family for index in groups[key]
                  if np.isfinite(sums[index])]
        if others:
            predicted_ms[indices] = latency_ms(fit_line(sums[others], means[others]), sums[indices], 0.0)
    return predicted_ms


def _sum_ms(model: KernelModel, rows: TrainingSet, record: ModelRecord, metrics: Mapping[str, float]) -> float:
    """Σ over a model's nodes of their kernels' times (ms) under a load with these metrics."""
    kernels = [record.kernel_of(node) for node in record.nodes]
    return float(predict_kernels(model, kernels, rows.schema.matrix(kernels), [metrics[name] for name in rows.metrics]).sum())
