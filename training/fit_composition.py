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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from utils import cli
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace, targets_in

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ort_analysis.records import Kernel, ModelRecord
    from training.composition import Composition
    from training.estimators import TimePredictor, TrainingConfig
    from training.pipeline import Tracks
    from training.predictor_files import Sidecar
    from training.training_set import TrainingSet

log = get_logger("composition")
CONFIG = ROOT / "training" / "config.yaml"
LEAST_KERNELS = 20  # fewer left to learn from when a family is left out, and predictions would mean nothing
EXAMPLES = """
python training/fit_composition.py
python training/fit_composition.py --target h200-cuda-ort1.31-all --json
"""


@dataclass(frozen=True)
class MeasuredModel:
    """A model of the fit: its record, its family, its idle latency; and where they are known (else NaN) the host's time of a
    run, and the latency with numpy arrays in and out and as a CUDA graph; all ms. And how many times longer than usual the
    host took meanwhile."""

    record: ModelRecord
    family: str
    latency_ms: float
    host_ms: float = math.nan
    host_io_ms: float = math.nan
    cuda_graph_ms: float = math.nan
    pace: float = 1.0


def measured_models(workspace: Workspace, target: str, sidecar: Sidecar) -> list[MeasuredModel]:
    """The models of the dataset that may enter the fit: measured idle, with a record, of no held-out family, without Loop,
    If and Scan.

    Raises:
        UserError: there is none.
    """
    from benchmark.dataset import COLLECT, idle_models, load_model_table
    from ort_analysis.kernel_costs import is_control_flow
    from ort_analysis.records import REMAKE, family, load_record, record_path

    found = []
    for name, times in idle_models(load_model_table(workspace, target)).iterrows():
        if family(str(name)) in sidecar.held_out:
            continue
        path = record_path(workspace, sidecar.target.flavour, str(name))
        if not path.is_file():
            log.warning("%s: measured, but has no record (%s); left out. Make it with: %s", name, path, REMAKE)
            continue
        record = load_record(path)
        if any(is_control_flow(kernel) for kernel in record.kernels.values()):
            log.info("%s: holds Loop, If or Scan, whose own costs are stated and not fitted; left out", name)
            continue
        found.append(MeasuredModel(record, family(str(name)), *(float(times[column]) for column in (
            "median_ms", "host_ms", "host_io_ms", "cuda_graph_ms", "pace"))))
    if not found:
        raise UserError(f"{target}: no idle latency of a model that may enter the fit; measure models with: {COLLECT}")
    return found


def left_out_groups(models: Sequence[MeasuredModel]) -> tuple[Literal["family", "model", "nothing"], list[str]]:
    """What is left out at a time, and each model's group: its family, or itself where there is one family only."""
    if len({model.family for model in models}) > 1:
        return "family", [model.family for model in models]
    return ("model" if len(models) > 1 else "nothing"), [model.record.model for model in models]


@dataclass(frozen=True)
class Fold:
    """Some groups left out together.

    Attributes:
        groups: their names.
        models: theirs.
        kernels: of these models, by id.
        seen: which rows of the training set know nothing of them.
    """

    groups: frozenset[str]
    models: tuple[MeasuredModel, ...]
    kernels: dict[str, Kernel]
    seen: npt.NDArray[np.bool_]


def folds_of(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: str,
             most: int) -> list[Fold]:
    """Every group left out once, in at most `most` folds: several groups share one where there are more.

    With families left out, no kernel that was sampled near a family's shapes is seen either.
    """
    import numpy as np

    names = sorted(set(groups))
    found = []
    for fold in range(min(most, len(names))):
        out = frozenset(name for place, name in enumerate(names) if place % most == fold)
        held = tuple(model for model, group in zip(models, groups, strict=True) if group in out)
        kernels = {kernel.id: kernel for model in held for kernel in model.record.kernels.values()}
        seen = ~np.isin(rows.ids, list(kernels))
        if left_out == "family":
            seen &= np.array([not (families & out) for families in rows.families])
        found.append(Fold(out, held, kernels, seen))
    return found


def by_model(fold: Fold, times_ms: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The times of a fold's kernels (by id) for each of its models."""
    return {model.record.model: {name: times_ms[name] for name in model.record.kernels} for model in fold.models}


def predict_out_of_fold(rows: TrainingSet, models: Sequence[MeasuredModel], groups: Sequence[str], left_out: str, label: str,
                        own: Sequence[str], config: TrainingConfig,
                        learn: Callable[[TrainingSet], TimePredictor] | None = None) -> dict[str, dict[str, float]]:
    """For each model, its kernels' idle times in ms by id, predicted by a training that saw none of them (see `folds_of`).

    Args:
        rows: to learn from.
        models, groups, left_out: as of `left_out_groups`.
        label: whose times.
        own: kernel types with predictors of their own.
        config: of the training.
        learn: another training than Hase's own, given the rows of a fold.
    """
    import numpy as np

    from training.estimators import fit_kernel_model, predict_kernels, side_by_side
    from training.features import kernel_features
    from training.predictor_files import leaves_gpu_idle

    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    idle_load = list(rows.idle_load.values())

    def one_fold(fold: Fold) -> dict[str, dict[str, float]]:
        seen = fold.seen
        if len(set(rows.ids[seen])) < LEAST_KERNELS:
            log.warning("%s: too few kernels are left to learn from without %s; its kernels stay in the training, so the "
                        "errors below flatter", label, ", ".join(sorted(fold.groups)))
            seen = np.ones(len(rows), dtype=bool)
        fitted: TimePredictor = (
            learn(rows.rows(seen)) if learn else fit_kernel_model(rows.rows(seen), label, own, config))
        listed = list(fold.kernels.values())
        times = predict_kernels(fitted, listed, np.array([kernel_features(kernel) for kernel in listed]), idle_load)
        return by_model(fold, {kernel.id: 0.0 if leaves_gpu_idle(kernel, label) else float(time)
                               for kernel, time in zip(listed, times, strict=True)})

    folds = folds_of(rows, models, groups, left_out, config.folds)
    return {name: times for part in side_by_side(one_fold, folds, config.workers) for name, times in part.items()}


def compose(record: ModelRecord, times_ms: dict[str, float]) -> dict[str, float]:
    """Σ and longest path (ms) of a model whose kernels take `times_ms` by id."""
    from graph_model.dag_critical_path import build_dag, calculate_latency
    from training.composition import KINDS

    dag = build_dag(record)
    by_node = {node.name: times_ms[node.kernel_id] for node in record.nodes}
    return {kind: calculate_latency(dag, by_node, "critical_path" if kind == "critical_path" else "sum") for kind in KINDS}


def fit_target(workspace: Workspace, target: str, config: TrainingConfig) -> Composition:
    """The composition of a target, from its dataset and predictors.

    Raises:
        UserError: no predictors, no dataset, no measured models, or predictors of another state of the dataset.
    """
    import numpy as np

    from benchmark.dataset import load_model_table, usual_probe_us
    from training.composition import KINDS, Composition, FittedModel, best, fit_candidate, interval_of, working_nodes
    from training.estimators import LAUNCHES
    from training.pipeline import can_fit, fit_pipeline_candidate
    from training.predictor_files import ON_GPU, TRAIN, read_sidecar
    from training.training_set import load_training_set, measured_times
    from training.ways_of_running import fit_graph_replay, fit_host_io

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


TimesOfModels = Mapping[str, Mapping[str, float]]  # by model and kernel id


def known_times(out_of_fold: Mapping[str, TimesOfModels], measured: TimesOfModels) -> dict[str, TimesOfModels]:
    """The times by label, model and kernel id that were predicted out of fold, measured ones (by kernel id and label) in
    their place; a kernel that leaves the GPU idle keeps its zero."""
    return {label: {model: {name: measured.get(name, {}).get(label, time) if time else time for name, time in times.items()}
                    for model, times in models.items()}
            for label, models in out_of_fold.items()}


def tracks(model: MeasuredModel, gpu_ms: Mapping[str, float], launches: Mapping[str, float]) -> Tracks:
    """A model's two tracks from its kernels' GPU times (ms) and launches by id."""
    import numpy as np

    from overlap_simulator import node_kind
    from training.pipeline import Tracks

    kernels = [model.record.kernel_of(node) for node in model.record.nodes]
    return Tracks(
        gpu_ms=np.array([gpu_ms[kernel.id] for kernel in kernels]),
        launches=np.array([launches[kernel.id] for kernel in kernels]),
        kinds=np.array([node_kind(kernel) for kernel in kernels], dtype=int),
        host_ms=model.host_ms, latency_ms=model.latency_ms, pace=model.pace)


def models_sha256(workspace: Workspace, target: str) -> str:
    """The hash of the table of models' latencies of a target."""
    from benchmark.dataset import model_table_path
    from utils import files

    return files.sha256(model_table_path(workspace.dataset(target)))


def kept_composition(workspace: Workspace, target: str) -> Composition | None:
    """The composition that was fitted to these very predictors and models; None where there is none."""
    from training.composition import composition_path, load_composition
    from training.predictor_files import read_sidecar

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


def targets(workspace: Workspace) -> list[str]:
    """Every target that has predictors.

    Raises:
        UserError: none has.
    """
    from training.predictor_files import TRAIN, sidecar_path

    return targets_in(workspace.predictors(""), sidecar_path(Path()).name, f"no predictors; train them with: {TRAIN}")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a target in training/predictors (default: all)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")
    parser.add_argument("--force", action="store_true", help="fit again although nothing changed since the last time")
    args = parser.parse_args()
    workspace = cli.start(args)
    from training.composition import composition_path
    from training.estimators import TrainingConfig
    from utils import files
    from utils.config import load_config

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
