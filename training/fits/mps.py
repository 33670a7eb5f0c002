"""Fits how processes share a GPU through MPS.

Kernels were timed while their process had all threads, a half and a quarter of them (`sharing:` of the collector). The slowdown
shows how wide they are. The rules of the simulation are fitted to models beside models in loops, from measured kernel times.
What is predicted is the ratio to the latency alone, so that only the sharing can be wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks, dispatched_ms, node_kind
from hase.graph_model.simulation.sharing import Grids, MpsProcess, MpsRules, mps_runs_ms
from hase.learned.kernels.estimators import KernelModel
from hase.learned.kernels.interface import XgboostSettings
from hase.learned.sharing import GPU_BOUND, WITH_SHARES, WITHOUT_SHARES, SharingErrors, grids_of
from hase.records.dataset_files import read_header
from hase.records.dataset_tables import read_kernel_table, read_model_table
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import GPU_LABEL
from hase.records.probe_reading import ALWAYS
from hase.training.fits.time_slices import errors_of, looped_models
from hase.training.kernels.fitting import fit_factors
from hase.utils.errors import UserError
from hase.utils.logger import progress
from hase.utils.processes import process_pool
from hase.utils.sharing_mode import ALL_THREADS, GpuSharing
from hase.utils.timing import Floats

if TYPE_CHECKING:
    import pandas as pd

    from hase.learned.kernels.interface import TrainingSet
    from hase.records.kernel_record import ModelRecord
    from hase.utils.fingerprint import Target
    from hase.utils.paths import Workspace

SHARE_SLOWDOWN = 0.85  # of a kernel that fills the GPU, by its times with a quarter, a half and three quarters of the threads
LEAST_SLOWDOWN = 0.02  # a kernel that slows down less under a share is not wider than the share
SEED = 7
STATISTICS = ("Latency_ms", "median_ms", "p95_ms")  # columns of the table of models
FITTED_RUNS = 6  # simulated runs of each case
FOLDS = 5  # of kernels, by family, that judge the widths
FASTEST = 98  # the percentile of kernels' rates that stands for the memory's bandwidth
# values that the fit tries for the fields of MpsRules
WAVES_MS, LAST_WAVES, SLOWDOWNS = (0.01, 0.02, 0.04), (0.7, 0.85, 1.0), (0.6, 0.8, 1.0)
BANDWIDTH_SLOWDOWNS, SWITCHES_MS = (0.3, 0.9, 1.5), (0.0005, 0.0015, 0.0025)
WIDTH_SETTINGS = XgboostSettings(trees=200, depth=6, learning_rate=0.06, min_leaf_weight=4.0, objective="squarederror",
                                 own_predictors="none")


class MeasuredWay(NamedTuple):
    """Kernels and models measured under one way of sharing.

    Attributes:
        gpu_ms, launches: of each kernel, by id.
        idle_ms, host_ms: the median latency and host time of each model alone, by the record's name.
        beside: mean, median and 95th percentile (ms) beside a model in a loop without a pause, by model and background.
        looped: for each background that is a model, the record's name and the number of processes.
        probe_us: the time of the host's probe for each model alone, if it was read.
        beside_probe_us: the same beside a model in a loop, by model and background.
    """

    sharing: GpuSharing
    gpu_ms: dict[str, float]
    launches: dict[str, float]
    idle_ms: dict[str, float]
    host_ms: dict[str, float]
    beside: dict[tuple[str, str], Floats]
    looped: dict[str, tuple[str, int]]
    probe_us: Mapping[str, float] = {}
    beside_probe_us: Mapping[tuple[str, str], float] = {}


def read_way(workspace: Workspace, target: str) -> MeasuredWay:
    """Reads a dataset that was measured under one way of sharing."""
    header = read_header(workspace.dataset(target))
    kernels, models = read_kernel_table(workspace, target), read_model_table(workspace, target)
    kernels, models = kernels[(kernels["Status"] == "ok") & (kernels["Level"] == 0)], models[models["Status"] == "ok"]
    idle, loaded = models[models["Level"] == 0], models[models["Level"] > ALWAYS]
    looped = {name: (model, header.backgrounds[name].processes)
              for name, model in looped_models(header.backgrounds, set(idle["Model"])).items()}
    pair_medians = {(str(rows["Model"].iloc[0]), str(rows["Background"].iloc[0])): rows[[*STATISTICS, "Probe_us"]].median()
              for _, rows in loaded[loaded["Background"].isin(looped)].groupby(["Model", "Background"])}
    beside = {pair: medians[list(STATISTICS)].to_numpy(float) for pair, medians in pair_medians.items()}
    beside_probe_us = {pair: float(probe) for pair, medians in pair_medians.items() if (probe := medians["Probe_us"]) > 0.0}
    return MeasuredWay(GpuSharing.parse(header.sharing), _medians(kernels, "Kernel_ID", "gpu_ms"),
                       _medians(kernels, "Kernel_ID", "gpu_launches"), _medians(idle, "Model", "median_ms"),
                       _medians(idle, "Model", "host_ms"), beside, looped, _medians(idle, "Model", "Probe_us"), beside_probe_us)


def _medians(table: pd.DataFrame, by: str, column: str) -> dict[str, float]:
    """The median of a column for each name in another; names without any value are omitted."""
    medians = table.groupby(by)[column].median().dropna()
    return dict(zip(map(str, medians.index), map(float, medians.to_numpy()), strict=True))


def bytes_per_ms(records: Iterable[ModelRecord], gpu_ms: Mapping[str, float]) -> float:
    """The memory's bandwidth, as the models' most memory-bound kernels reach it; `gpu_ms` by kernel id, others don't count."""
    kernels = {kernel.id: kernel for record in records for kernel in record.kernels.values()}
    rates = [(kernel.bytes_read + kernel.bytes_written) / gpu_ms[name] for name, kernel in kernels.items()
             if gpu_ms.get(name, 0.0) > 0.0]
    return float(np.percentile(rates, FASTEST))


def host_slowdown(ways: Sequence[MeasuredWay]) -> float:
    """The ratio of the host's time for a run through MPS to that in time slices, each relative to its probe. The mean over the
    ways; 1 if time slices or the probe were not measured."""
    def relative_to_probe(way: MeasuredWay) -> dict[str, float]:
        return {name: host_ms / way.probe_us[name] for name, host_ms in way.host_ms.items() if name in way.probe_us}

    in_slices = [relative_to_probe(way) for way in ways if not way.sharing.mps]
    through_mps = [relative_to_probe(way) for way in ways if way.sharing.mps]
    ratios = [np.median([mps[name] / slices[name] for name in mps.keys() & slices.keys()])
              for slices in in_slices for mps in through_mps if mps.keys() & slices.keys()]
    return float(np.mean(ratios)) if ratios else 1.0


def measured_widths(ways: Sequence[MeasuredWay]) -> dict[str, float]:
    """How wide each kernel is, by id: the share of the threads above which it gets no faster, from its times with fewer
    threads. Raises UserError: no way gave the kernels all threads, or none gave them fewer."""
    unlimited = [way for way in ways if way.sharing.mps and way.sharing.percent == ALL_THREADS]
    limited = {way.sharing.percent / ALL_THREADS: way for way in ways if way.sharing.percent < ALL_THREADS}
    if not unlimited or not limited:
        raise UserError("the width of kernels shows in their times with all threads and with less: measure under mps, and "
                        "under mps:50 or mps:25/75 too (recipes/h200/measure_sharing.sh)")
    widths = {}
    for kernel, all_threads_ms in unlimited[0].gpu_ms.items():
        slowdowns = {share: way.gpu_ms[kernel] / all_threads_ms - 1.0 for share, way in limited.items()
                     if all_threads_ms > 0.0 and way.gpu_ms.get(kernel, 0.0) > 0.0}
        if slowdowns:
            estimates = [share * (1.0 + slowdown / SHARE_SLOWDOWN) for share, slowdown in slowdowns.items()
                         if slowdown > LEAST_SLOWDOWN]
            widths[kernel] = min(1.0, float(np.median(estimates))) if estimates else min(slowdowns)
    return widths


class _Model(NamedTuple):
    """A model of the fit: its tracks with measured kernels, and their grids."""

    tracks: Tracks
    grids: Grids


class MpsCase(NamedTuple):
    """A model under a way of sharing (an index into the ways), beside processes that run a model in a loop."""

    way: int
    model: str
    background: str
    looped: str
    processes: int


class MpsFit:
    """Fits the rules of sharing to models beside models in loops, under every way through MPS, and measures their errors."""

    def __init__(self, ways: Sequence[MeasuredWay], records: Mapping[str, ModelRecord], costs: PipelineCosts) -> None:
        """Prepares models and cases. `costs`: of a run on the target; the host's pace under each way is fitted."""
        self._ways, self._records = ways, records
        self.widths = measured_widths(ways)
        unlimited = next(way for way in ways if way.sharing.mps and way.sharing.percent == ALL_THREADS)
        self.bytes_per_ms = bytes_per_ms(records.values(), unlimited.gpu_ms)
        self._models = {name: self._model(record, unlimited) for name, record in records.items()}
        self._costs = [costs.at_pace(self._pace(way, costs)) for way in ways]
        self.cases = [MpsCase(index, model, background, *way.looped[background]) for index, way in enumerate(ways)
                       if way.sharing.mps for model, background in way.beside
                       if model in self._models and way.looped[background][0] in self._models]

    def _model(self, record: ModelRecord, unlimited: MeasuredWay) -> _Model:
        kernels = [record.kernels[node.kernel_id] for node in record.nodes]
        gpu_ms = np.array([unlimited.gpu_ms.get(kernel.id, 0.0) for kernel in kernels])
        launches = np.array([unlimited.launches.get(kernel.id, 0.0) if kernel.moves_data else 0.0 for kernel in kernels])
        widths = np.array([self.widths.get(kernel.id, 1.0) for kernel in kernels])
        moved = np.array([float(kernel.bytes_read + kernel.bytes_written) for kernel in kernels])
        kinds = np.array([int(node_kind(kernel)) for kernel in kernels])
        return _Model(Tracks(gpu_ms, launches, kinds), grids_of(widths, moved, gpu_ms, self.bytes_per_ms))

    def _pace(self, way: MeasuredWay, costs: PipelineCosts) -> float:
        """The host's time under a way as a multiple of that from `costs`: the median over the models."""
        return float(np.median([way.host_ms[name] / float(dispatched_ms(model.tracks, costs)[-1])
                                for name, model in self._models.items() if way.host_ms.get(name, 0.0) > 0.0]))

    def process(self, way: int, name: str, percent: int) -> MpsProcess:
        """A model in a process with a share of the threads, at the host's pace under a way."""
        model = self._models[name]
        return MpsProcess(model.tracks, self._costs[way], model.grids, percent / ALL_THREADS)

    def predicted(self, rules: MpsRules) -> Floats:
        """Mean, median and 95th percentile (ms) of each case from the measured latency alone; shape (cases, 3)."""
        alone: dict[tuple[int, str], float] = {}
        statistics = []
        for case in self.cases:
            way = self._ways[case.way]
            key = case.way, case.model
            if key not in alone:
                process = self.process(case.way, case.model, way.sharing.percent)
                alone[key] = float(np.median(mps_runs_ms(process, (), rules, np.random.default_rng(SEED), 2)))
            model = self.process(case.way, case.model, way.sharing.percent)
            others = [self.process(case.way, case.looped, way.sharing.co_runner_percent)] * case.processes
            runs = mps_runs_ms(model, others, rules, np.random.default_rng(SEED), FITTED_RUNS)
            statistics.append(np.array([runs.mean(), *np.percentile(runs, (50, 95))]) * way.idle_ms[case.model] / alone[key])
        return np.array(statistics)

    @property
    def measured(self) -> Floats:
        """Measured mean, median and 95th percentile (ms) of each case; shape (cases, 3)."""
        return np.array([self._ways[case.way].beside[case.model, case.background] for case in self.cases])

    def is_gpu_bound(self, case: MpsCase) -> bool:
        """Whether the model's kernels take at least GPU_BOUND of its latency alone under the case's way."""
        way = self._ways[case.way]
        nodes = self._records[case.model].nodes
        return sum(way.gpu_ms.get(node.kernel_id, 0.0) for node in nodes) >= GPU_BOUND * way.idle_ms[case.model]

    @property
    def _have_shares(self) -> npt.NDArray[np.bool_]:
        return np.array([self._ways[case.way].sharing.percent < ALL_THREADS for case in self.cases])

    def fit(self, jobs: int) -> tuple[MpsRules, dict[str, SharingErrors], dict[str, SharingErrors]]:
        """The best rules for all cases, and the held-out errors for GPU-bound models and for others. Each case is predicted by
        the best rules for GPU-bound models of other families beside other models. The best rules have the smallest mean error,
        in which cases with and without shares count equally. Raises UserError: no model was measured beside a model in a
        loop."""
        if not self.cases:
            raise UserError("no model was measured under MPS beside a model in a loop that never pauses: add backgrounds of "
                            "kind model and level 1 to the collector's config")
        tried = candidates()
        with process_pool(jobs) as pool:
            predicted = np.array(list(progress(pool.map(self.predicted, tried), "rules", len(tried))))
        measured, bound = self.measured, np.array([self.is_gpu_bound(case) for case in self.cases])
        errors = np.abs(np.log(predicted / measured)).mean(axis=2)  # rules × cases

        shares = self._have_shares

        def best(kept: npt.NDArray[np.bool_]) -> int:
            kinds = [kind for with_or_without in (shares, ~shares) if (kind := kept & bound & with_or_without).any()]
            return int(sum(errors[:, kind].mean(axis=1) for kind in kinds).argmin())

        families = np.array([self._records[case.model].group for case in self.cases])
        looped = np.array([case.looped for case in self.cases])
        left_out = np.array([
            predicted[best(others if (others & bound).any() else bound), index] for index in range(len(self.cases))
            for others in [(families != families[index]) & (looped != looped[index])]])
        gpu_bound, host_bound = self.errors(left_out)
        return tried[best(np.ones(len(bound), dtype=bool))], gpu_bound, host_bound

    def errors(self, predicted: Floats) -> tuple[dict[str, SharingErrors], dict[str, SharingErrors]]:
        """The errors for GPU-bound models and for others, by whether they have shares; `predicted` as from `predicted()`."""
        bound, shares = np.array([self.is_gpu_bound(case) for case in self.cases]), self._have_shares

        def by_shares(kept: npt.NDArray[np.bool_]) -> dict[str, SharingErrors]:
            return {name: errors_of(predicted[kept & of_kind], self.measured[kept & of_kind])
                    for name, of_kind in ((WITHOUT_SHARES, ~shares), (WITH_SHARES, shares)) if (kept & of_kind).any()}

        return by_shares(bound), by_shares(~bound)




def candidates() -> list[MpsRules]:
    """The rules to choose from: every third of all combinations, so that all pairs of values occur."""
    values = (WAVES_MS, LAST_WAVES, SLOWDOWNS, BANDWIDTH_SLOWDOWNS, SWITCHES_MS)
    return [MpsRules(wave_ms=wave, last_wave=last, slowdown=slowdown, bandwidth_slowdown=bandwidth, switch_ms=switch,
                     share_slowdown=SHARE_SLOWDOWN)
            for indices in itertools.product(range(3), repeat=len(values)) if sum(indices) % 3 == 0
            for wave, last, slowdown, bandwidth, switch in [[row[index] for row, index in zip(values, indices, strict=True)]]]


def records_of(workspace: Workspace, target: Target, models: Iterable[str]) -> dict[str, ModelRecord]:
    """The records of models by name."""
    records = {}
    for name in models:
        path = record_path(workspace, target.flavour, name)
        if not path.is_file():
            raise UserError(f"{path}: no record of {name}, which was measured; make it with: "
                            "python ort_analysis/fusion_detector.py")
        records[name] = read_model_record(path)
    return records


def fit_widths(rows: TrainingSet, widths: Mapping[str, float], seed: int) -> tuple[KernelModel, float]:
    """The estimator of kernels' widths, and its mean error (a ratio) on unseen families, weighted by the kernels' times."""
    known = rows.rows(np.isfinite(rows.times_ms[GPU_LABEL]) & np.array([name in widths for name in rows.ids.tolist()]))
    logs = np.log(np.array([widths[name] for name in known.ids.tolist()]))
    families = [min(groups, default="") for groups in known.groups]
    fold_of = {family: index % FOLDS for index, family in enumerate(sorted(set(families)))}
    folds = np.array([fold_of[family] for family in families])
    errors = np.zeros(len(logs))
    for fold in sorted(set(folds.tolist())):
        tested = known.rows(folds == fold)
        if (folds != fold).any():
            model = fit_factors(known.rows(folds != fold), logs[folds != fold], WIDTH_SETTINGS, seed)
            errors[folds == fold] = np.log(model.predict_ms(tested.kernels)) - logs[folds == fold]
    error = float(np.average(np.abs(np.exp(errors) - 1.0), weights=known.times_ms[GPU_LABEL]))
    return fit_factors(known, logs, WIDTH_SETTINGS, seed), error
