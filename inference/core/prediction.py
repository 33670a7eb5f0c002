"""Predicts the latency of models on a target: one function for each question.

    from inference import predict
    print(predict("model.onnx", dims={"batch": 16}).latency_ms)

A model's time is put together from its kernels' times in the way that the target's composition says: a simulation of host and
GPU, α·Σ+β, or α·(longest path)+β. A kernel's time is the measured one if this very kernel was measured (and nothing else
runs), else the predicted one, else an estimate from measured operators of its class. The result says how much of it is which.

Each call makes a `Predictor`, which documents the arguments. Keep a `Predictor` to ask many questions about one target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from inference.core.predictor import POINTS, Predictor
from inference.core.run_modes import AS_USUAL, RunMode
from inference.sharing.shared_models import PERCENTILE

if TYPE_CHECKING:
    from graph_model.simulation.sharing import CoRunner
    from inference.core.answers import Prediction
    from inference.core.energy import EnergyPrediction
    from inference.core.host_pace import HostPace
    from inference.core.sources import Source
    from inference.sharing.shared_models import LoadCurve, Pair, SharedModel, SloUnderLoad
    from training.composition.fitted import Composition
    from utils.paths import Workspace


def predict(source: Source, *, dims: Mapping[str, int] | None = None,
            target: str | None = None, strict: bool = False, load: Mapping[str, float] | None = None,
            run_mode: RunMode = AS_USUAL, composition: Composition | None = None, workspace: Workspace | None = None,
            force: bool = False, notices: Sequence[str] = (), co_runner: CoRunner | None = None,
            static: bool = False, host_pace: float | HostPace | None = None) -> Prediction:
    """The latency of one model.

    Args:
        source: an ONNX file (or a record's JSON file), a model in memory, or a record.
        target, strict, workspace, force: as `inference.core.predictor.Predictor` takes them.
        dims, load, run_mode, composition, notices, other, static, host_pace: see `inference.core.predictor.Options`.

    Raises:
        UserError: the model, the predictors, the load or the pace can't be used; the message says why.
    """
    return Predictor(workspace, target, strict=strict, force=force).predict(
        source, dims=dims, load=load, run_mode=run_mode, composition=composition, notices=notices, co_runner=co_runner,
        static=static, host_pace=host_pace)


def predict_energy(source: Source, *, dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                   run_mode: RunMode = AS_USUAL, workspace: Workspace | None = None, force: bool = False, static: bool = False,
                   host_pace: float | HostPace | None = None) -> EnergyPrediction:
    """`Predictor.energy`."""
    return Predictor(workspace, target, strict=strict, force=force).energy(source, dims=dims, run_mode=run_mode, static=static,
                                                                           host_pace=host_pace)


def predict_many(sources: Iterable[Source], *, dims: Mapping[str, int] | None = None,
                 target: str | None = None, strict: bool = False, load: Mapping[str, float] | None = None,
                 run_mode: RunMode = AS_USUAL, composition: Composition | None = None,
                 workspace: Workspace | None = None, force: bool = False,
                 notices: Sequence[str] = (), co_runner: CoRunner | None = None, static: bool = False,
                 host_pace: float | HostPace | None = None) -> list[Prediction]:
    """The latencies of many models in one go, in their order; a kernel that several share is predicted once.

    Arguments and errors are those of `predict`.
    """
    return Predictor(workspace, target, strict=strict, force=force).predict_many(
        sources, dims=dims, load=load, run_mode=run_mode, composition=composition, notices=notices, co_runner=co_runner,
        static=static, host_pace=host_pace)


def predict_curve(source: Source, *, points: int = POINTS, dims: Mapping[str, int] | None = None, target: str | None = None,
                  strict: bool = False, workspace: Workspace | None = None, force: bool = False,
                  static: bool = False) -> LoadCurve:
    """`Predictor.curve`."""
    return Predictor(workspace, target, strict=strict, force=force).curve(source, points, dims=dims, static=static)


def predict_pair(source: Source, shared_gpu: Source, *, dims: Mapping[str, int] | None = None,
                 beside_dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                 workspace: Workspace | None = None, force: bool = False, static: bool = False) -> Pair:
    """`Predictor.pair`."""
    return Predictor(workspace, target, strict=strict, force=force).pair(source, shared_gpu, dims=dims, two_dims=beside_dims,
                                                                         static=static)


def shared_model(source: Source, *, dims: Mapping[str, int] | None = None, target: str | None = None, strict: bool = False,
                 workspace: Workspace | None = None, force: bool = False, static: bool = False,
                 host_pace: float | None = None) -> SharedModel:
    """`Predictor.shared`."""
    return Predictor(workspace, target, strict=strict, force=force).shared(source, dims=dims, static=static,
                                                                           host_pace=host_pace)


def slo_under_load(prediction: Prediction, source: Source, limit_ms: float, percentile: float = PERCENTILE,
                   workspace: Workspace | None = None, force: bool = False, like: CoRunner | None = None) -> SloUnderLoad:
    """`Predictor.objective` for a model that was predicted before. Its run was not kept, so it is put together again.

    Args:
        prediction: of `source`.
        source: as `predict` took it.
    """
    predictor = Predictor(workspace, prediction.target, strict=prediction.strict, force=force)
    run = predictor.run(source, dims=prediction.dims, static=prediction.static, run_mode=prediction.way,
                        host_pace=prediction.host_pace)
    return predictor.objective(run._replace(prediction=prediction), limit_ms, percentile, like=like)
