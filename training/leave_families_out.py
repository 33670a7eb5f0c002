"""Phase 5.3: prediction errors for families of models that were held out of everything.

Reads the dataset and predictors of a GPU target (default: all targets with label `gpu`). Holds out each family in turn: its
kernels, the shapes sampled near them, and its models in the fit of the composition. Writes nothing and prints the errors of

- whole models: with all kernels predicted, with the kernels that other families share looked up, and with all as measured; at
  the host's usual pace, and at the pace measured with each model (the usual one where none was recorded);
- single kernels;
- the baselines on the same split: a line over the sum of kernel times, the roofline, and nn-Meter's random forests.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmark.records.labels import GPU_LABEL
from training.baselines import nn_meter
from training.composition.fit_pipeline import LeftOut, MeasuredTracks, can_fit, left_out_ms
from training.composition.fitting import leave_out
from training.composition.left_out import kernel_errors, predict_out_of_fold
from training.composition.measured_models import (
    MeasuredModel,
    TimesOfModels,
    known_times,
    left_out_groups,
    measured_models,
    tracks_of,
)
from training.composition.run_modes import fit_graph_replay, fit_host_io
from training.kernels.predictors import ON_GPU
from training.kernels.roofline import fit_roofline
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import read_sidecar
from training.kernels.targets import Show, add_options, for_each_target, trained_targets
from training.kernels.training_set import TrainingSet, measured_times, read_training_set
from utils import cli
from utils.config import read_config
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.timing import ErrorStatistics, error_statistics

log = get_logger("families")
Floats = npt.NDArray[np.float64]
EXAMPLES = """
python training/leave_families_out.py
python training/leave_families_out.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
python training/leave_families_out.py --without-forests
"""


def shared_times(out_of_fold: TimesOfModels, rows: TrainingSet, label: str, models: Sequence[MeasuredModel],
                 groups: Sequence[str]) -> dict[str, dict[str, float]]:
    """The out-of-fold times by model and kernel id, where kernels that another family has too, or that were sampled near no
    model, have their measured times."""
    times = {str(name): (float(time), families) for name, time, families, idle in zip(
        rows.ids, rows.times_ms[label], rows.groups, rows.idle, strict=True) if idle and np.isfinite(time)}
    found: dict[str, dict[str, float]] = {}
    for model, group in zip(models, groups, strict=True):
        name = model.record.model
        found[name] = {
            kernel: times[kernel][0] if time and kernel in times and times[kernel][1] != {group} else time
            for kernel, time in out_of_fold[name].items()}
    return found


def model_errors(what: str, predicted_ms: Floats, measured_ms: Floats) -> dict[str, Any]:
    """One row of the table of models; `what` says how they were predicted."""
    return row(what, error_statistics(predicted_ms.tolist(), measured_ms.tolist()))


def row(what: str, found: ErrorStatistics) -> dict[str, Any]:
    """Errors of models as one row of the table, in per cent."""
    return {"models by": what, "models": found.count, "MAPE_%": 100 * found.mape, "median_%": 100 * found.median,
            "within_5_%": 100 * found.within_5, "within_10_%": 100 * found.within_10, "worst_%": 100 * found.worst}


def pipeline_rows(predicted: LeftOut, looked_up: LeftOut, known: LeftOut, latency: Floats) -> list[dict[str, Any]]:
    """The rows of the two tracks: all kernels predicted, shared ones looked up, and all as measured."""
    return [
        model_errors("two tracks, all kernels predicted", predicted.usual_ms, latency),
        model_errors("two tracks, all kernels predicted, host's pace as measured", predicted.paced_ms, latency),
        model_errors("two tracks, kernels that other families share looked up", looked_up.usual_ms, latency),
        model_errors("two tracks, kernels as measured: the composition alone", known.usual_ms, latency),
        model_errors("two tracks, kernels and host's pace as measured", known.paced_ms, latency)]


def run_mode_rows(models: Sequence[MeasuredModel], groups: Sequence[str], tracks: Sequence[MeasuredTracks],
                  predicted: LeftOut) -> list[dict[str, Any]]:
    """The rows of models that were run with numpy arrays or as CUDA graphs; empty where there are none."""
    fitted = {"numpy in and out": fit_host_io(models, predicted.usual_ms, groups),
              "a CUDA graph": fit_graph_replay(models, tracks, groups)}
    return [row(f"two tracks, all kernels predicted; run with {what}", found.left_out)
            for what, found in fitted.items() if found and found.left_out]


def line_rows(models: Sequence[MeasuredModel], groups: Sequence[str], times: Mapping[str, TimesOfModels],
              latency: Floats) -> list[dict[str, Any]]:
    """One row per entry of `times`, of a line over the sum of a model's kernels, fitted without the model's group."""
    def sums_ms(of_models: TimesOfModels) -> Floats:
        return np.array([sum(of_models[model.record.model][node.kernel_id] for node in model.record.nodes) for model in models])

    return [model_errors(f"α·Σ+β, {what}", leave_out(sums_ms(of_models), latency, groups), latency)
            for what, of_models in times.items()]


def roofline_times(rows: TrainingSet, models: Sequence[MeasuredModel]) -> TimesOfModels:
    """Kernel times (ms) by model and kernel id from the roofline alone: two rates and a floor, fitted to all kernels."""
    idle = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    roofline = fit_roofline(idle.flops, idle.bytes_moved, idle.times_ms[GPU_LABEL])
    return {model.record.model: {
        name: float(roofline.bound_ms(np.array([kernel.flops]), np.array([kernel.bytes_read + kernel.bytes_written]))[0])
        if kernel.moves_data else 0.0 for name, kernel in model.record.kernels.items()} for model in models}


def evaluate(workspace: Workspace, target: str, config: TrainingConfig,
             forests: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Errors of models, one row per way of predicting, and of kernels.

    Raises:
        UserError: no dataset or predictors, no family to leave out, or none of what a GPU's two tracks need.
    """
    sidecar = read_sidecar(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    if left_out != "family" or not set(ON_GPU) <= set(sidecar.labels):
        raise UserError(f"{target}: needs models of two families at least, and kernels with label {GPU_LABEL}")
    measured = measured_times(workspace, target)
    strict = {label: predict_out_of_fold(rows, models, groups, left_out, label, sidecar.labels[label].own_types, config)
              for label in cli.progress(ON_GPU, "leaving families out")}
    shared = {label: shared_times(strict[label], rows, label, models, groups) for label in ON_GPU}
    strict_tracks, known = tracks_of(models, strict), known_times(strict, measured)
    if not can_fit(strict_tracks):
        raise UserError(f"{target}: too few models with the host's time; measure more (label {GPU_LABEL})")
    latency = np.array([model.latency_ms for model in models])
    over = {"all kernels predicted": strict[GPU_LABEL], "kernels as measured": known[GPU_LABEL],
            "roofline of each kernel": roofline_times(rows, models)}
    predicted, looked_up, as_measured = (left_out_ms(tracks, groups) for tracks in (
        strict_tracks, tracks_of(models, shared), tracks_of(models, known)))
    table = pipeline_rows(predicted, looked_up, as_measured, latency)
    table += line_rows(models, groups, over, latency)
    table += run_mode_rows(models, groups, strict_tracks, predicted)
    if forests:
        guessed = nn_meter.predict_out_of_fold(rows, models, groups, config)
        table += line_rows(models, groups, {"nn-Meter's forests, all kernels predicted": guessed}, latency)
    return table, kernel_errors(strict[GPU_LABEL], measured, GPU_LABEL)


def gpu_targets(workspace: Workspace) -> list[str]:
    """The targets whose predictors have label `gpu`.

    Raises:
        UserError: there is none.
    """
    names = [name for name in trained_targets(workspace) if set(ON_GPU) <= set(read_sidecar(workspace.predictors(name)).labels)]
    if not names:
        raise UserError(f"{workspace.predictors('')}: no target has label gpu; the others are judged by "
                        "python training/fit_composition.py")
    return names


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a target in training/predictors (default: all with label gpu)")
    parser.add_argument("--without-forests", action="store_true", help="omit nn-Meter's random forests, which take minutes")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig)

    def judge(target: str, show: Show) -> dict[str, Any]:
        models, kernels = evaluate(workspace, target, config, not args.without_forests)
        show(models, f"{target}: whole models, each family held out in turn")
        show([kernels], f"{target}: the GPU's time of their kernels, each family held out")
        return {"models": models, "kernels": kernels}

    results = for_each_target([args.target] if args.target else gpu_targets(workspace), judge, args.json)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
