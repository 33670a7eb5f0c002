"""Fits how a model's latency follows from the times of its kernels, latency = α·Σ + β.

Reads the dataset, the kernel records and the predictors of each target (default: every target that has predictors). Writes
training/predictors/<target>/composition.json. Run it after training/train_kernel_model.py.

Every label is tried as a sum and as a longest path, and a GPU's host and GPU as two tracks. Each family of models is held out
in turn: its kernels are predicted by a training without the family, and its latencies by an α and β fitted without it. The
candidate with the smallest error on the held-out models becomes the target's composition. With --few-models, constants are
fitted to kernels as measured (training/composition/few_models.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
from typing import Any

import numpy as np

from records.dataset_reading import read_model_table
from records.host_pace import usual_probe_us
from training.composition.candidates import try_lines, try_pipeline
from training.composition.few_models import try_few_models
from training.composition.fitted import Composition, FittedModel, composition_path, read_composition
from training.composition.fitting import best, error_range_of
from training.composition.held_out import calibrated_interval
from training.composition.left_out import predict_as_learned
from training.composition.measured_models import left_out_groups, measured_models, models_sha256, tracks_of
from training.composition.run_modes import fit_graph_replay, fit_host_io
from training.kernels.predictors import ON_GPU, read_predictors
from training.kernels.settings import TrainingConfig
from training.kernels.sidecar import TRAIN, read_sidecar
from training.kernels.targets import Show, add_options, for_each_target, trained_targets
from training.kernels.training_set import measured_times, read_training_set
from utils import cli, files
from utils.config import read_config
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("composition")
EXAMPLES = """
python training/fit_composition.py
python training/fit_composition.py --target h200-cuda-ort1.31-all --json
python training/fit_composition.py --few-models
"""


def fit_target(workspace: Workspace, target: str, config: TrainingConfig, few_models: bool = False) -> Composition:
    """The composition of a target, from its dataset and predictors; with `few_models`, as of try_few_models.

    Raises:
        UserError: no predictors, no dataset, no measured models, or predictors of another state of the dataset.
    """
    sidecar = read_sidecar(workspace.predictors(target))
    rows = read_training_set(workspace, target)
    if rows.sha256 != sidecar.dataset_sha256:
        raise UserError(f"{target}: the dataset has changed since the predictors were trained; train again: {TRAIN}")
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    if left_out == "nothing":
        log.warning("%s: one model measured; α is fitted on it, β is 0, and there is no cross-validation", target)
    predictors = read_predictors(workspace.predictors(target))
    times = predict_as_learned(predictors, list(sidecar.labels), rows, models, groups, left_out, config, f"composing {target}")
    looked_up, held_out = measured_times(workspace, target), None if left_out == "nothing" else groups
    tracks = tracks_of(models, times) if set(ON_GPU) <= set(times) else []
    tried = try_few_models(models, times, looked_up, held_out) if few_models else try_lines(models, times, held_out)
    if tracks and held_out and not few_models:
        tried += try_pipeline(models, tracks, times, looked_up, groups)
    used, predicted, with_measured = tried[best([one.candidate for one in tried])]
    measured = np.array([model.latency_ms for model in models])
    calibrated = calibrated_interval(rows, models, times, measured_times(workspace, target), predictors, config) if (
        used.kind == "pipeline" and left_out == "family" and not few_models) else None
    interval = error_range_of(predicted, measured, groups) if left_out == "family" else None
    interval_measured = error_range_of(with_measured, measured, groups) if interval and with_measured is not None else None
    probe_us = usual_probe_us(read_model_table(workspace, target))
    return Composition(
        **used.formula(), left_out=left_out, interval=interval, interval_measured=interval_measured, calibrated=calibrated,
        host_io=fit_host_io(models, predicted, groups),
        cuda_graph=fit_graph_replay(models, tracks, groups) if used.kind == "pipeline" else None,
        probe_us=probe_us if math.isfinite(probe_us) else None, dataset_sha256=rows.sha256,
        models_sha256=models_sha256(workspace, target), predictors_created=sidecar.created,
        candidates=tuple(one.candidate for one in tried), models=tuple(
            FittedModel(model=model.record.model, group=model.group, measured_ms=model.latency_ms,
                        predicted_ms=float(predicted_ms))
            for model, predicted_ms in zip(models, predicted, strict=True)))


def kept_composition(workspace: Workspace, target: str) -> Composition | None:
    """The composition on disk, if it was fitted to the present predictors and models; else None."""
    folder = workspace.predictors(target)
    if not composition_path(folder).is_file():
        return None
    try:
        there, sidecar = read_composition(folder), read_sidecar(folder)
    except UserError:  # another version, or other predictors: fit again
        return None
    same = (there.predictors_created, there.models_sha256) == (sidecar.created, models_sha256(workspace, target))
    return there if same else None


def candidate_table(composition: Composition) -> list[dict[str, Any]]:
    """One row per candidate, errors in per cent; the one in use is marked."""
    def percent(ratio: float | None) -> float | None:
        return None if ratio is None else 100 * ratio

    return [{"label": c.label, "composition": c.kind, "CV_MAPE_%": percent(c.cv_mape), "CV_max_%": percent(c.cv_max),
             "alpha": c.alpha, "beta_ms": c.beta_ms, "node_us": 1000 * c.node_ms,
             "fit_MAPE_%": percent(c.fit_mape), "plain_MAPE_%": percent(c.plain_mape),
             "alone_MAPE_%": percent(c.measured_cv_mape),
             "used": "yes" if (c.label, c.kind) == (composition.label, composition.kind) else ""}
            for c in composition.candidates]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    parser.add_argument("--force", action="store_true", help="fit again although nothing changed since the last time")
    parser.add_argument("--few-models", action="store_true",
                        help="for a handful of models whose kernels were measured: fit fewer constants, and to kernels as "
                             "measured")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig)

    def fit(target: str, show: Show) -> dict[str, Any]:
        path = composition_path(workspace.predictors(target))
        composition = None if args.force or args.few_models else kept_composition(workspace, target)
        if composition is None:
            composition = fit_target(workspace, target, config, args.few_models)
            files.write_json(path, composition)
            log.info("saved %s", path)
        else:
            log.info("kept %s: nothing changed since", path)
        show(candidate_table(composition), f"{target}: {len(composition.models)} models, each {composition.left_out} left out "
                                           "in turn")
        return composition.model_dump(mode="json")

    with sole_writer(workspace.predictors("")):
        results = for_each_target([args.target] if args.target else trained_targets(workspace), fit, args.json)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
