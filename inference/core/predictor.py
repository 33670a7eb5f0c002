"""Answers all questions about models on one target: one model, many, a curve over the load, a pair, an objective, a watch.

    from inference import Predictor
    predictor = Predictor(target="nvidia-h200")
    print(predictor.predict("model.onnx", dims={"batch": 16}).latency_ms)

What was learned for the target is read once, at the first question. `predict` is for a single one.

A model's time is put together from its kernels' times in the way that the target's composition says: a simulation of host and
GPU, α·Σ+β, or α·(longest path)+β. A kernel's time is the measured one if this very kernel was measured (and nothing else
runs), else the predicted one, else an estimate from measured operators of its class. The result says how much of it is which.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

from hase.inference.core.answers import Prediction, Predictions
from hase.inference.core.arguments import check_calls, checked_count, checked_dims, checked_target, workspace_at
from hase.inference.core.brief import BriefPrediction, BriefPredictions, Wanted
from hase.inference.core.conditions import Conditions, check_run_mode, pace_of, shared_gpu_of, sharing_warning
from hase.inference.core.energy import EnergyPrediction, energy_of
from hase.inference.core.from_data_sheet import CardPredictors
from hase.inference.core.kernels_in_model import kernels_in_models
from hase.inference.core.model_run import PredictedRun, predicted_run
from hase.inference.core.model_warnings import estimator_warnings, model_warnings, weights_warning
from hase.inference.core.run_modes import AS_USUAL, RunMode
from hase.inference.core.sources import Precision, Source, missing_weights, needs_analysis, record_of, record_otherwise
from hase.inference.core.targets import Fitted, check_target, fitted_for, predictor_folders, refuse_other_device
from hase.inference.sharing.shared_models import (
    PERCENTILE,
    LoadCurve,
    Pair,
    SharedModel,
    SloUnderLoad,
    load_curve,
    objective_of,
    shared_model_of,
)
from hase.inference.sharing.ways import pair_of
from hase.learned.energy import EnergyModel, read_energy
from hase.learned.scaled_energy import scaled
from hase.ort_analysis.isolated import analysis
from hase.utils.cache_folder import keeping_no_json
from hase.utils.paths import Workspace
from hase.utils.processes import in_processes
from hase.utils.sharing_mode import SetSharing

if TYPE_CHECKING:
    from hase.benchmark.collecting.config import CollectorConfig
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.core.host_pace import HostPace
    from hase.inference.core.missing_kernels import Filled
    from hase.inference.live.watch import Watch
    from hase.learned.composition.fitted import Composition
    from hase.records.kernel_record import ModelRecord

POINTS = 21  # of a curve over the load
BATCH = 256  # models that a stream predicts together
S = TypeVar("S")
T = TypeVar("T")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`, the last one shorter.

    Raises:
        UserError: `size` is no number of models.
    """
    checked_count("batch", size)
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


class LoadOptions(TypedDict, total=False):
    """The options of a prediction that say what else runs and how fast the host is; every key is optional.

    Attributes:
        load: metrics of the load on the device, by DCGM field name; None or empty: the device is idle.
        notices: what the reader should know about the load; the prediction's first warnings.
        co_runner: what else runs on the GPU, as a probe saw it (`hase.learned.sharing.slices.co_runner_probed`). It says more than
            metrics do.
        host_pace: how many times as long as usual the target's host takes to dispatch, a ratio (`hase.inference.core.host_pace`
            measures it, or reads it from a file). None: the pace that benchmark/host_pace.py measured on this machine shortly
            before, if it is the target; else it is unknown.
    """

    load: Mapping[str, float] | None
    notices: Sequence[str]
    co_runner: CoRunner | None
    host_pace: float | HostPace | None


class Options(LoadOptions, total=False):
    """What a prediction is for, apart from the model and the target; every key is optional.

    Attributes:
        dims: sizes of dynamic dimensions by name.
        static: take a model with dynamic dimensions as if it were exported with `dims`; otherwise as a session runs it that
            takes any sizes.
        run_mode: how the model is run; by default with its tensors on the device, node by node.
        composition: another one than the target's own.
        dtype: `fp16`: what a model in single precision would take in half precision, converted as onnxconverter-common does.
    """

    dims: Mapping[str, int] | None
    static: bool
    run_mode: RunMode
    composition: Composition | None
    dtype: Precision | None


class Predictor:
    """Predicts models for one target.

    Attributes:
        workspace: the folder with the predictors, and with models that are given by their bare names.
        target: the name that was given; `fitted.target` is the target that was found for it.
        strict: predict every kernel, even measured ones.
        force: predict although the element type or ONNX Runtime's minor version is not the predictors' (with a warning).
        estimators: files and folders with the code of admitted estimators of your own (docs/estimators.md); it is run.
        any_device: without a target's name, take the only target with predictors, even if it is another device (with a
            warning).
        no_weights: predict a model although files of its weights are missing (with a warning).
    """

    def __init__(self, workspace: Workspace | str | Path | None = None, target: str | None = None, *, strict: bool = False,
                 force: bool = False, estimators: Sequence[Path] = (), any_device: bool = False,
                 no_weights: bool = False) -> None:
        """Makes a predictor; nothing is read yet.

        Args:
            workspace: or the path of its folder; by default the repository.
            target: the target's name, or a part of it; by default this machine.
            strict: predict every kernel, even measured ones.
            force: predict although the element type or ONNX Runtime's minor version is not the predictors' (with a warning).
            estimators: files and folders with the code of admitted estimators of your own (docs/estimators.md); it is run.
            any_device: without a target's name, take the only target with predictors, even if it is another device (with a
                warning). Commands print warnings, so they do; a program may never look at them.
            no_weights: predict a model although files of its weights are missing (with a warning).

        Raises:
            UserError: `workspace` is no folder, or `target` no name.
        """
        self.workspace = workspace_at(workspace)
        self.target = checked_target(target)
        self.strict = strict
        self.force = force
        self.estimators = tuple(estimators)
        self.any_device = any_device
        self.no_weights = no_weights

    @cached_property
    def fitted(self) -> Fitted:
        """What was learned for the target.

        Raises:
            UserError: there are no predictors for it, or they can't be read; or no target was named, and the only one is
                another device.
        """
        fitted = fitted_for(self.workspace, self.target, self.estimators)
        if self.target is None and not self.any_device:
            refuse_other_device(fitted.target, self.workspace)
        return fitted

    @cached_property
    def learned_energy(self) -> EnergyModel:
        """What was learned of the target's energy.

        Raises:
            UserError: there are no predictors for it, or they can't be read; or nothing was learned of its energy, and the
                message says how to change that.
        """
        predictors = self.fitted.predictors
        if isinstance(predictors, CardPredictors) and predictors.base and predictors.gpu:
            return scaled(read_energy(predictors.folder), predictors.base, predictors.gpu)
        return read_energy(predictor_folders(self.workspace)[self.fitted.target.name])

    def renew(self) -> None:
        """Looks at the predictors' files again at the next question, and reads those that changed."""
        for name in ("fitted", "learned_energy"):
            self.__dict__.pop(name, None)

    def record(self, source: Source, dims: Mapping[str, int] | None = None, static: bool = False,
               dtype: Precision | None = None) -> ModelRecord:
        """The record of a model for the target, with dynamic dimensions of the sizes `dims`, as it is or in half precision.

        Raises:
            UserError: the model can't be read or analysed, or `dims` are given for a record, whose shapes are fixed.
        """
        return record_of(self._model(source), self.fitted.target.flavour, checked_dims(dims), static, self.no_weights, dtype)

    def _model(self, source: Source) -> Source:
        """The same with the path of a model file as it is found."""
        return self.workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source

    def predict(self, source: Source, **options: Unpack[Options]) -> Prediction:
        """The latency of one model.

        Args:
            source: an ONNX file (or a record's JSON file), a model in memory, or a record.
            options: what the prediction is for.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used; the message says why.
        """
        return self.run(source, **options).prediction

    def predict_many(self, sources: Iterable[Source], **options: Unpack[Options]) -> Predictions:
        """The latencies of many models, in their order. A kernel that several models share is predicted once.

        Args:
            sources: ONNX files (or records' JSON files), models in memory, or records.
            options: what the predictions are for, the same for all models.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used; the message says why.
        """
        return Predictions(run.prediction for run in self.runs(sources, **options))

    def run(self, source: Source, **options: Unpack[Options]) -> PredictedRun:
        """As `predict`, together with what the prediction was made from. `curve`, `pair` and `objective` take it in place of a
        model, and then need no second prediction.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used.
        """
        return self.runs([source], **options)[0]

    def runs(self, sources: Iterable[Source], *, dims: Mapping[str, int] | None = None, static: bool = False,
             run_mode: RunMode = AS_USUAL, composition: Composition | None = None, load: Mapping[str, float] | None = None,
             notices: Sequence[str] = (), co_runner: CoRunner | None = None, host_pace: float | HostPace | None = None,
             dtype: Precision | None = None) -> list[PredictedRun]:
        """As `predict_many`, together with what the predictions were made from.

        Raises:
            UserError: a model, the predictors, the load or the pace can't be used.
        """
        check_calls()
        dims, sources = checked_dims(dims), list(sources)
        if "fitted" not in self.__dict__ and (analysed := [source for source in sources if needs_analysis(source)]):
            analysis.prepare(self.workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else None
                             for source in analysed)  # it starts while the predictors are read
        fitted = self.fitted
        conditions = self._conditions(run_mode, composition, load, co_runner, host_pace)
        load = conditions.load
        models = [self._model(source) for source in sources]
        records = [self.record(model, dims, static, dtype) for model in models]
        otherwise = [record_otherwise(model, record, static, self.no_weights, dtype)
                     for model, record in zip(models, records, strict=True)]
        without_weights = [weights_warning(missing_weights(model)) if self.no_weights else () for model in models]
        notices = (*notices, *fitted.notices)
        if run_mode.cuda_graph and host_pace is not None:
            notices = (*notices, "a CUDA graph that is replayed does not wait for its host, so the host's pace changes nothing")
        if fitted.sharing is None and (unread := sorted(set(load) - set(fitted.predictors.sidecar.metrics))):
            notices = (*notices, f"the load's {', '.join(unread)} was in no training and is ignored")
        mismatches = [check_target(record, fitted.target, fitted.predictors.sidecar.dtypes, self.force) for record in records]
        known = kernels_in_models([*records, *filter(None, otherwise)], conditions)
        runs = [predicted_run(record, known, conditions, (
            *notices, *without, *of_record, *sharing_warning(conditions.shared_gpu), *model_warnings(record, known, run_mode),
            *estimator_warnings(record, known, conditions)))
            for record, of_record, without in zip(records, mismatches, without_weights, strict=True)]
        return [run if record is None else run.spanning(predicted_run(record, known, conditions, ()))
                for run, record in zip(runs, otherwise, strict=True)]

    def _conditions(self, run_mode: RunMode, composition: Composition | None, load: Mapping[str, float] | None,
                    co_runner: CoRunner | None, host_pace: float | HostPace | None) -> Conditions:
        """What predictions with these options hold for.

        Raises:
            UserError: the predictors, the load or the pace can't be used.
        """
        fitted = self.fitted
        used, load = composition or fitted.composition, dict(load or {})
        check_run_mode(run_mode, used, fitted.target.name)
        pace = pace_of(host_pace, fitted, used, run_mode, self.workspace)
        return Conditions(fitted, used, run_mode, self.strict, load, shared_gpu_of(fitted, used, run_mode, load, co_runner),
                          pace)

    def predict_stream(self, sources: Iterable[Source], *, batch: int = BATCH,
                       **options: Unpack[Options]) -> Iterator[Prediction]:
        """As `predict_many`, one after another: it takes `batch` models at a time, and holds no more of them. Where latencies,
        energies and memory are enough, `predict_briefly` takes a small part of the time.

        Args:
            sources: as for `predict_many`; they may be made while they are taken, and may never end.
            batch: number of models that are predicted together.
            options: as for `predict_many`.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used; the message says why.
        """
        for models in batches(sources, batch):
            with keeping_no_json():
                found = self.predict_many(models, **options)
            yield from found

    def predict_briefly(self, sources: Iterable[S], *, make: Callable[[S], Source] | None = None, energy: bool = False,
                        memory: bool = False, batch: int = BATCH, processes: int = 1,
                        **options: Unpack[Options]) -> Iterator[BriefPrediction]:
        """The main numbers of predictions, for a search over many thousands of models: the same as `predict_stream` has,
        without warnings and tables, in a small part of the time. It takes `batch` models at a time.

        With several processes it takes a few batches ahead. They are spawned, so a script that asks for them must keep what it
        does when it is run under `if __name__ == "__main__"`. To hand a record over takes longer than to predict it: give what
        is small (a path, a choice of the search), and `make`, which then works in all processes at the same time.

        Args:
            sources: as for `predict_stream`; or with `make`, anything it takes.
            make: makes each source of what `sources` gives; for several processes a function at the top of a module, or a
                `functools.partial` of one.
            energy: whether energies are wanted.
            memory: whether peak memories are wanted, which take longer than all other numbers together.
            batch: number of models that are predicted together.
            processes: that share the work.
            options: as for `predict_many`.

        Raises:
            UserError: the model, the predictors, the load or the pace can't be used, or nothing was learned of the target's
                energy; the message says why.
        """
        if processes == 1:
            predicts = self.brief(energy=energy, memory=memory, **options)
            for items in batches(sources, batch):
                yield from predicts([make(item) for item in items] if make else cast("list[Source]", items))
        else:
            checked_count("processes", processes)
            fresh = Predictor(self.workspace, self.target, strict=self.strict, force=self.force, estimators=self.estimators,
                              any_device=self.any_device, no_weights=self.no_weights)  # without what was read
            work = pickle.dumps((partial(fresh.brief, energy=energy, memory=memory, **options), make))
            yield from in_processes(partial(_predicted_briefly, work), batches(sources, batch), processes)

    def brief(self, *, energy: bool = False, memory: bool = False,
              **options: Unpack[Options]) -> Callable[[Sequence[Source]], list[BriefPrediction]]:
        """What predicts a batch of models for `predict_briefly`. What it learns of kernels it keeps for the next batch.

        Raises:
            UserError: the predictors, the load or the pace can't be used, or nothing was learned of the target's energy.
        """
        check_calls()
        dims, static, dtype = checked_dims(options.get("dims")), options.get("static", False), options.get("dtype")
        conditions = self._conditions(options.get("run_mode", AS_USUAL), options.get("composition"), options.get("load"),
                                      options.get("co_runner"), options.get("host_pace"))
        wanted = Wanted(self.learned_energy if energy else None, memory)
        predictions = BriefPredictions(conditions, wanted, partial(self.run, **options))

        def predict_batch(sources: Sequence[Source]) -> list[BriefPrediction]:
            with keeping_no_json():
                return predictions.of([(source, self.record(source, dims, static, dtype)) for source in sources])

        return predict_batch

    def shared(self, model: Source | PredictedRun, **options: Unpack[Options]) -> SharedModel:
        """A model that can be put next to co-runners on the target.

        Raises:
            UserError: the model, predictors, load, pace or the way in which this machine's GPU is shared can't be used.
            NotShared: nothing was learned of how the target is shared.
        """
        return shared_model_of(self._run_of(model, options))

    def curve(self, model: Source | PredictedRun, points: int = POINTS, **options: Unpack[Options]) -> LoadCurve:
        """The latency of a model for `points` loads: the background's busy share goes from 0 to 1 in even steps. From 0.95 on
        the background never pauses (`hase.records.probe_reading.ALWAYS`).

        Raises:
            UserError: the model, predictors, load, pace or the way in which this machine's GPU is shared can't be used.
            NotShared: nothing was learned of how the target is shared.
        """
        return load_curve(self.shared(model, **options), points)

    def pair(self, first: Source | PredictedRun, second: Source | PredictedRun, *, dims: Mapping[str, int] | None = None,
             second_dims: Mapping[str, int] | None = None, static: bool = False, sharing: SetSharing | None = None) -> Pair:
        """Two models on the same GPU, each in a process of its own that runs it again and again without a pause.

        Args:
            first, second: the models; they may be the same.
            dims, second_dims: sizes of their dynamic dimensions by name.
            static: take models with dynamic dimensions as if they were exported with these sizes.
            sharing: how they share the GPU; None: as it is shared now where it is this machine's, else in time slices.

        Raises:
            UserError: a model, the predictors or the way in which this machine's GPU is shared can't be used.
            NotShared, NotThroughMps: nothing was learned of how the target is shared in this way.
        """
        return pair_of(self._run_of(first, {"dims": dims, "static": static}),
                       self._run_of(second, {"dims": second_dims, "static": static}), sharing)

    def objective(self, model: Source | PredictedRun, limit_ms: float, percentile: float = PERCENTILE, *,
                  like: CoRunner | None = None, **options: Unpack[Options]) -> SloUnderLoad:
        """Whether a model meets a latency objective, and up to which load it still does.

        Args:
            model: a model, or its run.
            limit_ms, percentile: the objective: `percentile` % of the runs take at most `limit_ms`.
            like: the co-runner as a probe saw it; the highest load is taken to have the same waits and phases.
            options: what the prediction is for.

        Raises:
            UserError: the model, predictors, load, pace or the way in which this machine's GPU is shared can't be used.
        """
        return objective_of(self._run_of(model, options), limit_ms, percentile, like)

    def energy(self, model: Source | PredictedRun, **options: Unpack[Options]) -> EnergyPrediction:
        """The energy of a model's run, per run and per item, and the mean power; the device does nothing else.

        Raises:
            UserError: the model or the predictors can't be used, nothing was learned of the target's energy, or `options` name
                a load.
        """
        learned = self.learned_energy
        return energy_of(self._run_of(model, options), learned)

    def watch(self, source: Source, now: Callable[[], LoadOptions], interval_s: float, limit_ms: float | None = None,
              percentile: float = PERCENTILE, **options: Unpack[Options]) -> Watch:
        """Predicts a model again every `interval_s` seconds, under the load of that moment. If the target is trained anew
        meanwhile, the new predictors are used.

        Args:
            source: an ONNX file (or a record's JSON file), a model in memory, or a record.
            now: returns what changes, such as the load; called before each prediction. It may raise `UserError`.
            interval_s: seconds between two predictions.
            limit_ms, percentile: the objective, if any.
            options: what stays the same.
        """
        from hase.inference.live.watch import Watch

        def predicted() -> Prediction:
            self.renew()
            at_once: Options = {**options, **now()}
            return self.predict(source, **at_once)

        return Watch(predicted, interval_s, limit_ms, percentile)

    def measure_missing(self, source: Source, sizes: Sequence[Mapping[str, int]] = ({},), *,
                        config: CollectorConfig | None = None, static: bool = False,
                        inputs: Path | None = None) -> Filled:
        """Measures the kernels of a model that were never measured, on this machine, which must be the target. Later
        predictions look them up.

        Args:
            source: an ONNX file (or a record's JSON file), a model in memory, or a record.
            sizes: of its dynamic dimensions by name, each combination that will be predicted.
            config: how to measure; by default benchmark/config.yaml.
            static: take a model with dynamic dimensions as if it were exported with these sizes.
            inputs: a file with values of the model's inputs, as numpy.savez writes them.

        Raises:
            UserError: this machine is not the target, the model or `inputs` can't be used, or the dataset lacks the label that
                is needed.
        """
        from hase.inference.core.missing_kernels import measure_missing

        filled = measure_missing(source, sizes, target=self.target, workspace=self.workspace, config=config, force=self.force,
                                 static=static, inputs=inputs)
        self.renew()
        return filled

    def _run_of(self, model: Source | PredictedRun, options: Options) -> PredictedRun:
        return model if isinstance(model, PredictedRun) else self.run(model, **options)


@cache
def _brief_of(work: bytes) -> tuple[Callable[[Sequence[Source]], list[BriefPrediction]], Callable[[Any], Source] | None]:
    """What predicts, and what makes sources, in a process of a stream; kept from batch to batch."""
    brief, make = pickle.loads(work)
    return brief(), make


def _predicted_briefly(work: bytes, items: list[Any]) -> list[BriefPrediction]:
    """The predictions of a batch, in a process of a stream."""
    predicts, make = _brief_of(work)
    return predicts([make(item) for item in items] if make else items)


def predict(source: Source, *, workspace: Workspace | str | Path | None = None, target: str | None = None, strict: bool = False,
            force: bool = False, no_weights: bool = False, **options: Unpack[Options]) -> Prediction:
    """The latency of one model. Keep a `Predictor` to ask many questions about a target.

    Args:
        source: an ONNX file (or a record's JSON file), a model in memory, or a record.
        workspace: the folder with the predictors, or its path; by default the repository.
        target: the target's name, or a part of it; by default this machine.
        strict: predict every kernel, even measured ones.
        force: predict although the element type or ONNX Runtime's minor version is not the predictors' (with a warning).
        no_weights: predict although files of the model's weights are missing (with a warning).
        options: what else the prediction is for.

    Raises:
        UserError: the model, the predictors, the load or the pace can't be used; the message says why.
    """
    return Predictor(workspace, target, strict=strict, force=force, no_weights=no_weights).predict(source, **options)
