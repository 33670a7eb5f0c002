"""Predicts models on one target: one model or many, under load, in pairs, for an objective, or live.

    from hase.inference import Predictor
    predictor = Predictor(target="nvidia-h200")
    print(predictor.predict("model.onnx", dims={"batch": 16}).latency_ms)

Predictors are read once, at the first question. For a single question there is the function `predict`.

The target's composition combines kernel times into a latency: a simulation of host and GPU, α·Σ+β, or α·(longest path)+β. A
kernel's time is measured if this exact kernel was measured (and nothing else runs), else predicted, else estimated from
operators of its class. The result states the share of each.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast

from hase.inference.prediction.answers import PERCENTILE, Prediction, Predictions
from hase.inference.prediction.batch import Batch, structure_of, table_for
from hase.inference.prediction.brief import BriefPrediction, brief_prediction, brief_predictions
from hase.inference.prediction.conditions import (
    AS_USUAL,
    Conditions,
    LoadOptions,
    Options,
    RunMode,
    check_run_mode,
    pace_of,
    shared_gpu_of,
    sharing_warning,
)
from hase.inference.prediction.energy import EnergyPrediction, energy_of
from hase.inference.prediction.run import (
    ModelRun,
    PredictedRun,
    estimator_warnings,
    model_warnings,
    predicted_run,
    weights_warning,
)
from hase.inference.prediction.sources import (
    Precision,
    Source,
    check_stack_depth,
    checked_count,
    checked_dims,
    checked_target,
    checked_workspace,
    missing_weights,
    needs_analysis,
    other_branches_record,
    source_record,
)
from hase.inference.prediction.targets import (
    CardPredictors,
    Fitted,
    check_target,
    fitted_for,
    predictor_folders,
    refuse_other_device,
)
from hase.inference.sharing.shared_models import (
    LoadCurve,
    Pair,
    SharedModel,
    SloUnderLoad,
    load_curve,
    shared_model_of,
    slo_under_load,
)
from hase.inference.sharing.ways import pair_of
from hase.learned import target_files
from hase.learned.energy import EnergyModel, scaled
from hase.ort_analysis.isolated import analysis
from hase.utils.cache_folder import keeping_no_json
from hase.utils.paths import Workspace
from hase.utils.processes import stream_in_processes
from hase.utils.sharing_mode import SetSharing

if TYPE_CHECKING:
    from hase.benchmark.collecting.config import CollectorConfig
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.library.missing_kernels import Filled
    from hase.inference.live.watch import Watch
    from hase.inference.prediction.conditions import HostPace
    from hase.learned.composition.fitted import Composition
    from hase.records.kernel_record import ModelRecord

POINTS = 21  # points of a load curve
BATCH = 256  # models per batch of a stream
TOGETHER = 64  # models whose full answers are built together
S = TypeVar("S")
T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Splits items into lists of `size`; the last may be shorter."""
    checked_count("batch", size)
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


class _Query(NamedTuple):
    """A model to predict: its record, the record with the other branches of its Ifs (None without Ifs), and warnings."""

    source: Source
    record: ModelRecord
    otherwise: ModelRecord | None
    warnings: list[str]


def _batch(conditions: Conditions, queries: Sequence[_Query]) -> Batch:
    """The records of all queries as a batch, then those with the other branches."""
    others = [query.otherwise for query in queries if query.otherwise is not None]
    return table_for(conditions).batch([*(query.record for query in queries), *others], conditions)


class Predictor:
    """Predicts models for one target.

    Attributes:
        workspace: the folder with the predictors, and with models that are given by their bare names.
        target: the name as given, or None for this machine; `fitted.target` is the resolved target.
        strict: predict every kernel, even measured ones.
        force: predict although the element type or ONNX Runtime's minor version is not the predictors' (with a warning).
        estimators: files and folders with the code of admitted estimators of your own (docs/estimators.md); it is run.
        any_device: without a target's name, take the only target with predictors, even if it is another device, with a warning.
            Off by default, since a program may never look at warnings; commands print them.
        no_weights: predict a model although its weight files are missing (with a warning).
    """

    def __init__(self, workspace: Workspace | str | Path | None = None, target: str | None = None, *, strict: bool = False,
                 force: bool = False, estimators: Sequence[Path] = (), any_device: bool = False,
                 no_weights: bool = False) -> None:
        """Stores the options (see the class); reads no files yet. `workspace` may be a path; default: the repository."""
        self.workspace = checked_workspace(workspace)
        self.target = checked_target(target)
        self.strict = strict
        self.force = force
        self.estimators = tuple(estimators)
        self.any_device = any_device
        self.no_weights = no_weights

    @cached_property
    def fitted(self) -> Fitted:
        """The predictors of the target. Raises UserError: none can be read, or the only ones are for another device."""
        fitted = fitted_for(self.workspace, self.target, self.estimators)
        if self.target is None and not self.any_device:
            refuse_other_device(fitted.target, self.workspace)
        return fitted

    @cached_property
    def learned_energy(self) -> EnergyModel:
        """The energy model of the target. Raises UserError: it has none, or it can't be read; the message says why."""
        predictors = self.fitted.predictors
        if isinstance(predictors, CardPredictors) and predictors.base and predictors.gpu:
            return scaled(target_files.ENERGY.needed(predictors.folder), predictors.base, predictors.gpu)
        return target_files.ENERGY.needed(predictor_folders(self.workspace)[self.fitted.target.name])

    def renew(self) -> None:
        """Makes the next question read predictor files again if they changed."""
        for name in ("fitted", "learned_energy"):
            self.__dict__.pop(name, None)

    def record(self, source: Source, dims: Mapping[str, int] | None = None, static: bool = False,
               dtype: Precision | None = None) -> ModelRecord:
        """The record of a model on the target, with sizes `dims` of dynamic dimensions, in the given precision.

        Raises:
            UserError: the model can't be read or analysed, or `dims` are given for a record, whose shapes are fixed.
        """
        return source_record(self._model(source), self.fitted.target.flavour, checked_dims(dims), static, self.no_weights,
                             dtype)

    def _model(self, source: Source) -> Source:
        """Resolves the path of a model file; other sources are returned unchanged."""
        return self.workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source

    def predict(self, source: Source, **options: Unpack[Options]) -> Prediction:
        """Predicts the latency of one model: an ONNX file, a record's JSON file, a model in memory, or a record.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used; the message says why. All other methods
                that predict raise it for the same reasons.
        """
        return self.run(source, **options).prediction

    def predict_many(self, sources: Iterable[Source], **options: Unpack[Options]) -> Predictions:
        """Predicts many models, in their order. A kernel that several models share is predicted once."""
        return Predictions(run.prediction for run in self.runs(sources, **options))

    def run(self, source: Source, **options: Unpack[Options]) -> PredictedRun:
        """Predicts one model, and keeps the kernels and the simulation behind the prediction. `curve`, `pair` and `objective`
        accept the result, which saves a second prediction.
        """
        return self.runs([source], **options)[0]

    def runs(self, sources: Iterable[Source], *, dims: Mapping[str, int] | None = None, static: bool = False,
             run_mode: RunMode = AS_USUAL, composition: Composition | None = None, load: Mapping[str, float] | None = None,
             notices: Sequence[str] = (), co_runner: CoRunner | None = None, host_pace: float | HostPace | None = None,
             dtype: Precision | None = None) -> list[PredictedRun]:
        """Predicts many models as `run` does; a kernel that several models share is predicted once."""
        check_stack_depth()
        dims, sources = checked_dims(dims), list(sources)
        if "fitted" not in self.__dict__ and (analysed := [source for source in sources if needs_analysis(source)]):
            analysis.prepare(self.workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else None
                             for source in analysed)  # the analysis starts while the predictors are read
        fitted = self.fitted
        conditions = self._conditions(run_mode, composition, load, co_runner, host_pace)
        notices = (*notices, *fitted.notices)
        if run_mode.cuda_graph and host_pace is not None:
            notices = (*notices, "a CUDA graph that is replayed does not wait for its host, so the host's pace changes nothing")
        if fitted.sharing is None and (unread := sorted(set(conditions.load) - set(fitted.predictors.sidecar.metrics))):
            notices = (*notices, f"the load's {', '.join(unread)} was in no training and is ignored")
        queries = self._queries(sources, conditions, dims, static, dtype)
        runs = []
        for start in range(0, len(sources), TOGETHER):
            part = queries[start:start + TOGETHER]
            batch = _batch(conditions, part)
            answered = [ModelRun(batch, index, conditions.costs) for index in range(len(batch.records))]
            others = iter(answered[len(part):])
            for model, run in zip(part, answered, strict=False):
                about_weights = weights_warning(missing_weights(model.source)) if self.no_weights else ()
                predicted = predicted_run(run, (
                    *notices, *about_weights, *model.warnings, *sharing_warning(conditions.shared_gpu), *model_warnings(run),
                    *estimator_warnings(run)))
                runs.append(predicted if model.otherwise is None else predicted.spanning(predicted_run(next(others), ())))
        return runs

    def _queries(self, sources: Iterable[Source], conditions: Conditions, dims: Mapping[str, int], static: bool,
                 dtype: Precision | None) -> list[_Query]:
        """Records of models, checked against the target."""
        models = [self._model(source) for source in sources]
        records = [self.record(model, dims, static, dtype) for model in models]
        return [_Query(model, record, other_branches_record(model, record, static, self.no_weights, dtype),
                       check_target(record, conditions.fitted, structure_of(record).dtypes, self.force))
                for model, record in zip(models, records, strict=True)]

    def _conditions(self, run_mode: RunMode, composition: Composition | None, load: Mapping[str, float] | None,
                    co_runner: CoRunner | None, host_pace: float | HostPace | None) -> Conditions:
        """The conditions that these options describe."""
        fitted = self.fitted
        composition, load = composition or fitted.composition, dict(load or {})
        check_run_mode(run_mode, composition, fitted.target.name)
        pace = pace_of(host_pace, fitted, composition, run_mode, self.workspace)
        shared_gpu = shared_gpu_of(fitted, composition, run_mode, load, co_runner)
        return Conditions(fitted, composition, run_mode, self.strict, load, shared_gpu, pace)

    def predict_stream(self, sources: Iterable[Source], *, batch: int = BATCH,
                       **options: Unpack[Options]) -> Iterator[Prediction]:
        """Yields the predictions of many models, holding only `batch` models at a time; `sources` may be endless.

        `predict_briefly` is much faster if latencies, energies and memory are enough.
        """
        for models in batches(sources, batch):
            with keeping_no_json():
                found = self.predict_many(models, **options)
            yield from found

    def predict_briefly(self, sources: Iterable[S], *, make: Callable[[S], Source] | None = None, energy: bool = False,
                        memory: bool = False, batch: int = BATCH, processes: int = 1,
                        **options: Unpack[Options]) -> Iterator[BriefPrediction]:
        """Predicts only the main numbers, fast, for a search over thousands of models.

        They equal those of `predict_stream`, which adds warnings and tables. Several processes read a few batches ahead. They
        are spawned, so a script must guard its work with `if __name__ == "__main__"`. Sending a record to a process takes
        longer than predicting it: send something small (a path, a choice of the search) and let `make` create the model there.

        Args:
            make: creates a model from an item of `sources`; with several processes a function at the top of a module, or a
                `functools.partial` of one.
            memory: also predict peak memory, which takes longer than all other numbers together.
            batch: number of models that are predicted together.

        Raises:
            UserError: as for `predict`, or `energy` is wanted and the target has no energy model.
        """
        if processes == 1:
            predicts = self.brief(energy=energy, memory=memory, **options)
            for items in batches(sources, batch):
                yield from predicts([make(item) for item in items] if make else cast("list[Source]", items))
        else:
            checked_count("processes", processes)
            fresh = Predictor(self.workspace, self.target, strict=self.strict, force=self.force, estimators=self.estimators,
                              any_device=self.any_device, no_weights=self.no_weights)  # without what this one has read
            work = pickle.dumps((partial(fresh.brief, energy=energy, memory=memory, **options), make))
            yield from stream_in_processes(partial(_predicted_briefly, work), batches(sources, batch), processes)

    def brief(self, *, energy: bool = False, memory: bool = False,
              **options: Unpack[Options]) -> Callable[[Sequence[Source]], list[BriefPrediction]]:
        """A function that predicts a batch of models for `predict_briefly`. It caches kernels for later batches."""
        check_stack_depth()
        dims, static, dtype = checked_dims(options.get("dims")), options.get("static", False), options.get("dtype")
        conditions = self._conditions(options.get("run_mode", AS_USUAL), options.get("composition"), options.get("load"),
                                      options.get("co_runner"), options.get("host_pace"))
        learned = self.learned_energy if energy else None

        def predict_batch(sources: Sequence[Source]) -> list[BriefPrediction]:
            with keeping_no_json():
                if conditions.shared_gpu is not None:  # beside a co-runner, each latency is simulated separately
                    return [brief_prediction(run, learned, memory) for run in self.runs(sources, **options)]
                queries = self._queries(sources, conditions, dims, static, dtype)
                has_branches = [query.otherwise is not None for query in queries]
                return brief_predictions(_batch(conditions, queries), has_branches, learned, memory)

        return predict_batch

    def shared(self, model: Source | PredictedRun, **options: Unpack[Options]) -> SharedModel:
        """A model that can be predicted next to co-runners on the target's GPU. Raises NotShared: no sharing was learned."""
        return shared_model_of(self._run_of(model, options))

    def curve(self, model: Source | PredictedRun, points: int = POINTS, **options: Unpack[Options]) -> LoadCurve:
        """The latency at `points` loads: the busy share of the background goes from 0 to 1 in even steps (`load_curve`).

        Raises:
            NotShared: nothing was learned of how the target is shared.
        """
        return load_curve(self.shared(model, **options), points)

    def pair(self, first: Source | PredictedRun, second: Source | PredictedRun, *, dims: Mapping[str, int] | None = None,
             second_dims: Mapping[str, int] | None = None, static: bool = False, sharing: SetSharing | None = None) -> Pair:
        """Two models on the same GPU, each in its own process that runs it without a pause.

        `sharing` None: as this machine's GPU is shared now if it is the target, else in time slices.

        Raises:
            NotShared, NotThroughMps: nothing was learned of how the target is shared in this way.
        """
        return pair_of(self._run_of(first, {"dims": dims, "static": static}),
                       self._run_of(second, {"dims": second_dims, "static": static}), sharing)

    def objective(self, model: Source | PredictedRun, limit_ms: float, percentile: float = PERCENTILE, *,
                  like: CoRunner | None = None, **options: Unpack[Options]) -> SloUnderLoad:
        """Whether a model meets a latency objective (`percentile` % of the runs take at most `limit_ms`), and up to which load.

        The search for the highest load assumes the waits and phases of `like`, the co-runner as a probe saw it.
        """
        return slo_under_load(self._run_of(model, options), limit_ms, percentile, like)

    def energy(self, model: Source | PredictedRun, **options: Unpack[Options]) -> EnergyPrediction:
        """The energy per run and per item, and the mean power, of a model that runs alone on the device.

        Raises:
            UserError: as for `predict`, the target has no energy model, or `options` name a load.
        """
        learned = self.learned_energy
        return energy_of(self._run_of(model, options), learned)

    def watch(self, source: Source, now: Callable[[], LoadOptions], interval_s: float, limit_ms: float | None = None,
              percentile: float = PERCENTILE, **options: Unpack[Options]) -> Watch:
        """Predicts a model every `interval_s` seconds under the current load; uses new predictors after a training.

        Args:
            now: returns the options that change, such as the load, before each prediction. It may raise `UserError`.
            limit_ms, percentile: the objective, if any.
            options: the options that do not change.
        """
        from hase.inference.live.watch import Watch  # noqa: PLC0415 - most predictions do not need it

        def predicted() -> Prediction:
            self.renew()
            current: Options = {**options, **now()}
            return self.predict(source, **current)

        return Watch(predicted, interval_s, limit_ms, percentile)

    def measure_missing(self, source: Source, sizes: Sequence[Mapping[str, int]] = ({},), *,
                        config: CollectorConfig | None = None, static: bool = False,
                        inputs: Path | None = None) -> Filled:
        """Measures a model's unmeasured kernels on this machine, which must be the target (see module `missing_kernels`)."""
        from hase.inference.library.missing_kernels import measure_missing  # noqa: PLC0415 - most predictions do not need it

        filled = measure_missing(source, sizes, target=self.target, workspace=self.workspace, config=config, force=self.force,
                                 static=static, inputs=inputs)
        self.renew()
        return filled

    def _run_of(self, model: Source | PredictedRun, options: Options) -> PredictedRun:
        return model if isinstance(model, PredictedRun) else self.run(model, **options)


@cache
def _brief_of(work: bytes) -> tuple[Callable[[Sequence[Source]], list[BriefPrediction]], Callable[[Any], Source] | None]:
    """The functions that predict a batch and make sources, in a worker process; cached from batch to batch."""
    brief, make = pickle.loads(work)
    return brief(), make


def _predicted_briefly(work: bytes, items: list[Any]) -> list[BriefPrediction]:
    """Predicts a batch in a worker process."""
    predicts, make = _brief_of(work)
    return predicts([make(item) for item in items] if make else items)


def predict(source: Source, *, workspace: Workspace | str | Path | None = None, target: str | None = None, strict: bool = False,
            force: bool = False, no_weights: bool = False, **options: Unpack[Options]) -> Prediction:
    """Predicts the latency of one model; parameters as for `Predictor` and its method `predict`.

    Use a `Predictor` for many questions about a target.

    Raises:
        UserError: the model, the predictors, the load or the pace can't be used; the message says why.
    """
    return Predictor(workspace, target, strict=strict, force=force, no_weights=no_weights).predict(source, **options)
