"""Phase 5.2: fits how kernel times make a model's time on a target, latency = α·Σ + β.

Reads the dataset, the kernel records and the predictors of each target (by default of all that have predictors). Writes
training/predictors/<target>/composition.json. Run it after training/train_kernel_model.py.

Σ is made of kernels predicted out of fold: what predicts a model's kernels saw none of its family's, just as with a model
that nobody measured. Each label is tried as a sum and as a longest path; each family of models is left out of the fit of
α and β in turn, and the candidate that errs least on what was left out is the target's composition.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.records.host_pace import usual_probe_us
from benchmark.records.reading import load_model_table
from graph_model.dag.dag import build_dag, calculate_latency
from training.composition.fit_pipeline import can_fit, fit_pipeline_candidate
from training.composition.fitted import KINDS, Composition, FittedModel, composition_path, load_composition, working_nodes
from training.composition.fitting import best, fit_candidate, interval_of
from training.composition.left_out import predict_out_of_fold
from training.composition.measured_models import known_times, left_out_groups, measured_models, models_sha256, targets, tracks
from training.kernels.predictors import ON_GPU
from training.kernels.settings import LAUNCHES, TrainingConfig
from training.kernels.sidecar import TRAIN, read_sidecar
from utils import cli, files
from utils.config import load_config
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace

if TYPE_CHECKING:
    from ort_analysis.records.kernel_record import ModelRecord

log = get_logger("composition")
CONFIG = ROOT / "training" / "config.yaml"
EXAMPLES = """
python training/fit_composition.py
python training/fit_composition.py --target h200-cuda-ort1.31-all --json
"""


def compose(record: ModelRecord, times_ms: dict[str, float]) -> dict[str, float]:
    """Σ and longest path (ms) of a model whose kernels take `times_ms` by id."""
    dag = build_dag(record)
    by_node = {node.name: times_ms[node.kernel_id] for node in record.nodes}
    return {kind: calculate_latency(dag, by_node, "critical_path" if kind == "critical_path" else "sum") for kind in KINDS}


def fit_target(workspace: Workspace, target: str, config: TrainingConfig) -> Composition:
    """The composition of a target, from its dataset and predictors.

    Raises:
        UserError: no predictors, no dataset, no measured models, or predictors of another state of the dataset.
    """
    from training.composition.ways_of_running import fit_graph_replay, fit_host_io
    from training.kernels.training_set import load_training_set, measured_times

    sidecar = read_sidecar(workspace.predictors(target))
    rows = load_training_set(workspace, target)
    if rows.sha256 != sidecar.dataset_sha256:
        raise UserError(f"{target}: the dataset has changed since the predictors were trained; train again: {TRAIN}")
    models = measured_models(workspace, target, sidecar)
    left_out, groups = left_out_groups(models)
    if left_out == "nothing":
        log.warning("%s: one model measured; α is fitted on it, β is 0, and there is no cross-validation", target)
    measured = np.array([model.latency_ms for model in models])
    nodes = np.array([working_nodes(model.record) for model in models], dtype=float)
    candidates, predictions, by_label = [], [], {}
    for label, about in cli.track(list(sidecar.labels.items()), f"composing {target}"):
        times = by_label[label] = predict_out_of_fold(rows, models, groups, left_out, label, about.own_types, config)
        if label == LAUNCHES:
            continue
        composed = [compose(model.record, times[model.record.model]) for model in models]
        for kind in KINDS:
            bases = np.array([sums[kind] for sums in composed])
            candidate, predicted = fit_candidate(label, kind, bases, measured, nodes, None if left_out == "nothing" else groups)
            candidates.append(candidate)
            predictions.append(predicted)
    if set(ON_GPU) <= set(by_label) and left_out != "nothing":
        known = known_times(by_label, measured_times(workspace, target))
        strict, looked_up = ([tracks(model, *(times[label][model.record.model] for label in ON_GPU)) for model in models]
                             for times in (by_label, known))
        if can_fit(strict):
            candidate, latencies, with_measured = fit_pipeline_candidate(strict, looked_up, groups)
            candidates.append(candidate)
            predictions.append(latencies)
    chosen = best(candidates)
    used = candidates[chosen]
    interval = interval_of(predictions[chosen], measured, groups) if left_out == "family" else None
    interval_measured = interval_of(with_measured, measured, groups) if interval and used.kind == "pipeline" else None
    probe_us = usual_probe_us(load_model_table(workspace, target))
    return Composition(
        label=used.label, kind=used.kind, alpha=used.alpha, beta_ms=used.beta_ms, node_ms=used.node_ms, costs=used.costs,
        left_out=left_out, interval=interval, interval_measured=interval_measured,
        host_io=fit_host_io(models, predictions[chosen], groups),
        cuda_graph=fit_graph_replay(models, strict, groups) if used.kind == "pipeline" else None,
        probe_us=probe_us if math.isfinite(probe_us) else None, dataset_sha256=rows.sha256,
        models_sha256=models_sha256(workspace, target), predictors_created=sidecar.created,
        candidates=tuple(candidates), models=tuple(
            FittedModel(model=model.record.model, measured_ms=model.latency_ms, predicted_ms=float(predicted))
            for model, predicted in zip(models, predictions[chosen], strict=True)))


def kept_composition(workspace: Workspace, target: str) -> Composition | None:
    """The composition that was fitted to these very predictors and models; None where there is none."""
    folder = workspace.predictors(target)
    if not composition_path(folder).is_file():
        return None
    try:
        there, sidecar = load_composition(folder), read_sidecar(folder)
    except UserError:  # of another version, or of other predictors: fitted anew
        return None
    same = (there.predictors_created, there.models_sha256) == (sidecar.created, models_sha256(workspace, target))
    return there if same else None


def candidate_table(composition: Composition) -> list[dict[str, Any]]:
    """The candidates as rows to print, errors in per cent; the one used is marked."""
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
    parser.add_argument("--target", help="name of a target in training/predictors (default: all)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")
    parser.add_argument("--force", action="store_true", help="fit again although nothing changed since the last time")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = load_config(args.config, TrainingConfig)
    results = {}
    with sole_writer(workspace.predictors("")):
        for target in [args.target] if args.target else targets(workspace):
            path = composition_path(workspace.predictors(target))
            composition = None if args.force else kept_composition(workspace, target)
            if composition is None:
                composition = fit_target(workspace, target, config)
                files.write_json(path, composition)
                log.info("saved %s", path)
            else:
                log.info("kept %s: nothing changed since", path)
            results[target] = composition.model_dump(mode="json")
            if not args.json:
                cli.print_table(candidate_table(composition), f"{target}: {len(composition.models)} models, "
                                                              f"each {composition.left_out} left out in turn")
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
