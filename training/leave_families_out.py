"""Phase 5.3: how far off latencies are for families of models that nothing was learned from.

Reads the datasets and predictors of a GPU target (all that have label `gpu`, by default). Each family in turn is left out of
everything: its kernels, the shapes sampled near them, the fit of the composition. Prints the errors of whole models, with
all kernels predicted, with those that other families share looked up, and with all as measured; at the host's usual pace,
and at the pace that was measured beside each model (the same where it was not recorded); of single kernels; and, on the
same split, of a line over the sum, of the roofline and of nn-Meter's random forests. Writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.records.labels import GPU_LABEL
from training.composition.fit_pipeline import MeasuredTracks, can_fit, left_out_ms
from training.composition.fitting import leave_out
from training.composition.left_out import kernel_errors, predict_out_of_fold
from training.composition.measured_models import (
    MeasuredModel,
    TimesOfModels,
    known_times,
    left_out_groups,
    measured_models,
    targets,
    tracks,
)
from training.kernels.predictors import ON_GPU
from training.kernels.roofline import fit_roofline
from training.kernels.settings import LAUNCHES, TrainingConfig
from training.kernels.sidecar import read_sidecar
from utils import cli
from utils.config import load_config
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import ROOT, Workspace
from utils.timing import ErrorStatistics, error_statistics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.kernels.training_set import TrainingSet

    Floats = npt.NDArray[np.float64]

log = get_logger("families")
EXAMPLES = """
python training/leave_families_out.py
python training/leave_families_out.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all --json
python training/leave_families_out.py --without-forests
"""


def shared_times(out_of_fold: TimesOfModels, rows: TrainingSet, label: str, models: Sequence[MeasuredModel],
                 groups: Sequence[str]) -> dict[str, dict[str, float]]:
    """The out-of-fold times by model and kernel id, measured ones in the place of kernels that another family has too, or
    that were sampled near no model at all."""
    times = {str(name): (float(time), families) for name, time, families, idle in zip(
        rows.ids, rows.times_ms[label], rows.families, rows.idle, strict=True) if idle and np.isfinite(time)}
    found: dict[str, dict[str, float]] = {}
    for model, group in zip(models, groups, strict=True):
        name = model.record.model
        found[name] = {
            kernel: times[kernel][0] if time and kernel in times and times[kernel][1] != {group} else time
            for kernel, time in out_of_fold[name].items()}
    return found


def model_errors(what: str, predicted_ms: Floats, measured_ms: Floats) -> dict[str, Any]:
    """A row of the table of models."""
    return row(what, error_statistics(predicted_ms.tolist(), measured_ms.tolist()))


def row(what: str, found: ErrorStatistics) -> dict[str, Any]:
    """Errors of models as a row of the table, in per cent."""
    return {"models by": what, "models": found.count, "MAPE_%": 100 * found.mape, "median_%": 100 * found.median,
            "within_5_%": 100 * found.within_5, "within_10_%": 100 * found.within_10, "worst_%": 100 * found.worst}


def evaluate(workspace: Workspace, target: str, config: TrainingConfig,
             forests: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Errors of models, a row a way of predicting, and of kernels.

    Raises:
        UserError: no dataset or predictors, no family to leave out, or none of what a GPU's two tracks need.
    """
    from training.baselines import nn_meter
    from training.composition.ways_of_running import fit_graph_replay, fit_host_io
    from training.kernels.training_set import load_training_set, measured_times

    sidecar = read_sidecar(workspace.predictors(target))
    rows = load_training_set(workspace, target)
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    if left_out != "family" or not set(ON_GPU) <= set(sidecar.labels):
        raise UserError(f"{target}: needs models of two families at least, and kernels with label {GPU_LABEL}")
    measured = measured_times(workspace, target)
    strict = {label: predict_out_of_fold(rows, models, groups, left_out, label, sidecar.labels[label].own_types, config)
              for label in cli.track(ON_GPU, "leaving families out")}
    shared = {label: shared_times(strict[label], rows, label, models, groups) for label in ON_GPU}
    latency = np.array([model.latency_ms for model in models])

    def tracks_of(times: Mapping[str, TimesOfModels]) -> list[MeasuredTracks]:
        return [tracks(model, times[GPU_LABEL][model.record.model], times[LAUNCHES][model.record.model]) for model in models]

    strict_tracks, known = tracks_of(strict), known_times(strict, measured)
    if not can_fit(strict_tracks):
        raise UserError(f"{target}: too few models with the host's time; measure more (label {GPU_LABEL})")
    predicted, looked_up, as_measured = (left_out_ms(of_models, groups) for of_models in (
        strict_tracks, tracks_of(shared), tracks_of(known)))

    def line_over(times: TimesOfModels) -> Floats:
        return leave_out(np.array([sum(times[model.record.model][node.kernel_id] for node in model.record.nodes)
                                   for model in models]), latency, groups)

    idle = rows.rows(rows.idle & np.isfinite(rows.times_ms[GPU_LABEL]))
    roofline = fit_roofline(idle.flops, idle.bytes_moved, idle.times_ms[GPU_LABEL])  # two rates and a floor, of all kernels
    bound = {model.record.model: {
        name: float(roofline.bound_ms(np.array([kernel.flops]), np.array([kernel.bytes_read + kernel.bytes_written]))[0])
        if kernel.moves_data else 0.0 for name, kernel in model.record.kernels.items()} for model in models}
    table = [
        model_errors("two tracks, all kernels predicted", predicted.usual_ms, latency),
        model_errors("two tracks, all kernels predicted, host's pace as measured", predicted.paced_ms, latency),
        model_errors("two tracks, kernels that other families share looked up", looked_up.usual_ms, latency),
        model_errors("two tracks, kernels as measured: the composition alone", as_measured.usual_ms, latency),
        model_errors("two tracks, kernels and host's pace as measured", as_measured.paced_ms, latency),
        model_errors("α·Σ+β, all kernels predicted", line_over(strict[GPU_LABEL]), latency),
        model_errors("α·Σ+β, kernels as measured", line_over(known[GPU_LABEL]), latency),
        model_errors("α·Σ+β, roofline of each kernel", line_over(bound), latency),
    ]
    ways = {"numpy in and out": fit_host_io(models, predicted.usual_ms, groups),
            "a CUDA graph": fit_graph_replay(models, strict_tracks, groups)}
    table += [row(f"two tracks, all kernels predicted; run with {what}", found.left_out)
              for what, found in ways.items() if found and found.left_out]
    if forests:
        table.append(model_errors("α·Σ+β, nn-Meter's forests, all kernels predicted",
                                  line_over(nn_meter.predict_out_of_fold(rows, models, groups, config)), latency))
    return table, kernel_errors(strict[GPU_LABEL], measured, GPU_LABEL)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a target in training/predictors (default: all with label gpu)")
    parser.add_argument("--config", type=Path, default=ROOT / "training" / "config.yaml",
                        help="settings (default: training/config.yaml)")
    parser.add_argument("--without-forests", action="store_true", help="leave nn-Meter's forests out, which take minutes")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = load_config(args.config, TrainingConfig)
    names = [args.target] if args.target else [
        name for name in targets(workspace) if set(ON_GPU) <= set(read_sidecar(workspace.predictors(name)).labels)]
    if not names:
        raise UserError(f"{workspace.predictors('')}: no target has label gpu; the others are judged by "
                        "python training/fit_composition.py")
    results = {}
    for name in names:
        models, kernels = evaluate(workspace, name, config, not args.without_forests)
        results[name] = {"models": models, "kernels": kernels}
        if not args.json:
            cli.print_table(models, f"{name}: whole models, each family left out of everything in turn")
            cli.print_table([kernels], f"{name}: the GPU's time of their kernels, each family left out")
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
