"""What programs ask, a function for each command: `import hase; hase.predict("resnet50.onnx", batch=8, on="l4")`.

Each reads what was learned anew; a `Predictor` keeps it for many questions about one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hase.benchmark.serving.sets import ServedModel
from hase.inference.compare.devices import DeviceComparison, compare_on
from hase.inference.compare.model_differences import By, ModelDifference, compare_runs
from hase.inference.library.predictor import Predictor
from hase.inference.llm.answers import LlmPrediction
from hase.inference.llm.predicting import predict_language_model
from hase.inference.prediction.answers import PERCENTILE, Prediction, Predictions
from hase.inference.prediction.conditions import Io, RunMode
from hase.inference.prediction.sources import Precision, Source, checked_count, checked_dims, checked_workspace, shown
from hase.inference.search.evaluating import SearchLimits, SearchQuestion
from hase.inference.search.searching import SearchResult
from hase.inference.search.searching import search as search_space
from hase.inference.sharing.advice import BATCHES, SharingAdvice, advise_sharing
from hase.utils.config import validate
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.inference.prediction.conditions import HostPace
    from hase.utils.paths import Workspace

Folder = Path | str | None


def sizes_with(batch: int | None, dims: Mapping[str, int] | None) -> dict[str, int]:
    """The sizes `dims` with the batch, whatever the model calls it. Raises UserError: wrong sizes, or a batch given twice."""
    sizes = checked_dims(dims)
    if batch is None:
        return sizes
    if "batch" in sizes:
        raise UserError(f"batch={shown(batch)}: dims has a batch, too; leave one of them out")
    return sizes | {"batch": checked_count("batch", batch)}


def predict(model: Source, *, batch: int | None = None, dims: Mapping[str, int] | None = None, on: str | None = None,
            dtype: Precision | None = None, static: bool = False, io: Io = "device", cuda_graph: bool = False,
            load: Mapping[str, float] | None = None, host_pace: float | HostPace | None = None, strict: bool = False,
            force: bool = False, no_weights: bool = False, workspace: Folder | Workspace = None) -> Prediction:
    """Predicts how long ONNX Runtime takes to run a model on a device.

    Args:
        model: the path of an ONNX file, an `onnx.ModelProto`, or a kernel record.
        batch: the model's batch, whatever its dimension is called; another one than a fixed batch where the graph allows it.
        dims: sizes of dynamic dimensions by name.
        on: the device: `h200`, a card of records/gpus.yaml (`l4`, `rtx-4090`), a YAML file with one's own, a trained target;
            None: this machine.
        dtype: `fp16`: with its float32 converted to half precision; None: as it is.
        static: as exported at these sizes; otherwise as a session runs it that accepts any sizes.
        io: `device`: tensors stay on the device; `host`: numpy arrays in and out.
        cuda_graph: captured once as a CUDA graph, and replayed.
        load: what else runs on the device: metrics by DCGM field name; None: nothing.
        host_pace: how many times as long as usual the GPU's host takes to dispatch; None: not known.
        strict: predict every kernel, even measured ones.
        force: predict although the element type or ONNX Runtime's version is not that of the predictors.
        no_weights: the files of its weights may be missing.
        workspace: the folder with one's own predictors and models.

    Raises:
        UserError: the model, the device or an option can't be used; the message says why.
    """
    return predict_many([model], batch=batch, dims=dims, on=on, dtype=dtype, static=static, io=io, cuda_graph=cuda_graph,
                        load=load, host_pace=host_pace, strict=strict, force=force, no_weights=no_weights,
                        workspace=workspace)[0]


def predict_many(models: Iterable[Source], *, batch: int | None = None, dims: Mapping[str, int] | None = None,
                 on: str | None = None, dtype: Precision | None = None, static: bool = False, io: Io = "device",
                 cuda_graph: bool = False, load: Mapping[str, float] | None = None,
                 host_pace: float | HostPace | None = None, strict: bool = False, force: bool = False,
                 no_weights: bool = False, workspace: Folder | Workspace = None) -> Predictions:
    """Predicts several models in their order; a kernel that they share is predicted once. Arguments as for `predict`."""
    if isinstance(models, (str, Path)):
        raise UserError(f"models={shown(models)}: give a list of models, or call predict for one")
    predictor = Predictor(workspace, on, strict=strict, force=force, no_weights=no_weights)
    return predictor.predict_many(models, dims=sizes_with(batch, dims), dtype=dtype, static=static, load=load,
                                  host_pace=host_pace, run_mode=RunMode(io=io, cuda_graph=cuda_graph))


def compare_devices(model: Source, on: Sequence[str], *, batch: int | Sequence[int] | None = None,
                    dims: Mapping[str, int] | None = None, dtype: Precision | None = None, static: bool = False,
                    io: Io = "device", cuda_graph: bool = False, host_pace: float | None = None,
                    prices: Mapping[str, float] | None = None, workspace: Folder | Workspace = None) -> DeviceComparison:
    """Predicts a model on several devices, the cheapest or fastest first.

    Args:
        on: names of devices as `predict` takes them.
        batch: one or several.
        prices: per hour by the devices' names, in any currency.

    Raises:
        UserError: as for `predict`.
    """
    if isinstance(on, str):
        raise UserError(f"on={shown(on)}: give a list of devices, or call predict for one")
    batches = [batch] if batch is None or isinstance(batch, int) else list(batch)
    return compare_on({name: Predictor(workspace, name) for name in on}, model, [sizes_with(one, dims) for one in batches],
                      prices or {}, dtype=dtype, static=static, host_pace=host_pace,
                      run_mode=RunMode(io=io, cuda_graph=cuda_graph))


def compare_models(a: Source, b: Source, *, batch: int | None = None, dims: Mapping[str, int] | None = None,
                   b_batch: int | None = None, b_dims: Mapping[str, int] | None = None, on: str | None = None,
                   by: By = "operator", static: bool = False, io: Io = "device", cuda_graph: bool = False,
                   host_pace: float | HostPace | None = None, workspace: Folder | Workspace = None) -> ModelDifference:
    """Explains operator by operator why model B takes longer than model A.

    Args:
        b_batch, b_dims: sizes of B, where they differ from those of A.
        by: `operator`: Conv, with whatever is fused into it; `type`: Conv, Conv_Relu, …

    Raises:
        UserError: as for `predict`.
    """
    predictor = Predictor(workspace, on)
    sizes = sizes_with(batch, dims)
    runs = [predictor.run(model, dims=given, static=static, host_pace=host_pace, run_mode=RunMode(io=io, cuda_graph=cuda_graph))
            for model, given in ((a, sizes), (b, sizes | sizes_with(b_batch, b_dims)))]
    return compare_runs(runs[0], runs[1], (_name(a, runs[0].prediction), _name(b, runs[1].prediction)), by)


def _name(model: Source, prediction: Prediction) -> str:
    return str(model) if isinstance(model, (str, Path)) else prediction.model


def predict_llm(model: str | Path, *, prompt: int, generate: int, batch: int = 1, max_length: int | None = None,
                decode_model: str | Path | None = None, dims: Mapping[str, int] | None = None, on: str | None = None,
                host_pace: float | HostPace | None = None, strict: bool = False, force: bool = False,
                no_weights: bool = False, workspace: Folder | Workspace = None) -> LlmPrediction:
    """Predicts a request to a language model: the first token, each further one, memory, energy.

    Args:
        model: a folder of onnxruntime-genai's builder, or a decoder's ONNX file.
        prompt, generate, batch: tokens of each prompt, tokens generated for it, and number of prompts.
        max_length: tokens of prompt and answer for which the cache is made; None: as genai_config.json says.
        decode_model: the file that runs further tokens, if `model` runs prompts only.
        dims: sizes of dimensions whose role is not known, by name.

    Raises:
        UserError: as for `predict`.
    """
    return predict_language_model(model, prompt=prompt, generate=generate, batch=batch, max_length=max_length,
                                  decode=decode_model, dims=dims, target=on, host_pace=host_pace, strict=strict, force=force,
                                  no_weights=no_weights, workspace=workspace)


def sharing_advice(models: Sequence[ServedModel | Mapping[str, Any]], *, batches: Sequence[int] = BATCHES,
                   percentile: float = PERCENTILE, on: str | None = None, host_pace: float | HostPace | None = None,
                   workspace: Folder | Workspace = None) -> SharingAdvice:
    """Finds the way of sharing a GPU in which several served models meet their latency objectives.

    Args:
        models: each with `model`, `rate_per_s` and `slo_ms`, and `dims` where it has further dynamic dimensions.
        batches: to choose from.
        percentile: of the requests, in per cent, must keep to the objectives.

    Raises:
        UserError: as for `predict`, or nothing was learned of how the device is shared.
    """
    served = [one if isinstance(one, ServedModel) else validate({"batch": max(batches), **one}, ServedModel, "models")
              for one in models]
    return advise_sharing(Predictor(workspace, on), served, [batches] * len(served), percentile, host_pace)


def search(space: str | Path, *, latency_ms: float | None = None, memory_mib: float | None = None,
           energy_j: float | None = None, chance: float = 0.5, score: str | None = None, count: int | None = None,
           top: int = 10, seed: int = 0, out: str | Path | None = None, processes: int = 1, on: str | None = None,
           host_pace: float | HostPace | None = None, workspace: Folder | Workspace = None) -> SearchResult:
    """Searches many models for the best ones that keep to limits.

    Args:
        space: a folder of models, a list of paths (.txt), a Python file that makes them, or `ofa`.
        latency_ms, memory_mib, energy_j: limits of a run; None: no limit.
        chance: how likely a candidate must keep to them, 0 to 1.
        score: what makes a candidate good: the space's own score, operations, weights, or a table of scores.
        count: how many candidates to try; None: all.
        out: the table of all candidates, CSV or Parquet; an interrupted search goes on from there.

    Raises:
        UserError: as for `predict`, or the space can't be used.
    """
    question = SearchQuestion(checked_workspace(workspace).root, on, str(space), count, seed,
                              SearchLimits(latency_ms, memory_mib, energy_j, chance), energy_j is not None, score, host_pace,
                              force=False)
    return search_space(question, top, None if out is None else Path(out), processes)
