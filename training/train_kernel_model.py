"""Phase 5.1: learns the time of a kernel from its shape and from what else runs on the device.

Reads the datasets in benchmark/dataset (by default of every target) and training/config.yaml. Writes
training/predictors/<target>/: boosters for each label, a sidecar that describes them, and the measured times for look-up;
and training/kernel_errors/<target>.json: how far off they are on each kernel when it is left out, which the sampler draws by.

XGBoost learns log(time / roofline), once for all kernel types together and once for each type with enough kernels;
cross-validation picks between the two for each type. A random forest and the bare roofline are reported beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmark.records.files import collected_targets, read_kernels
from benchmark.records.labels import GPU_LABEL
from kernel_model.sampling.kernel_errors import KernelError, KernelErrors, write_errors
from training.kernels import estimators
from training.kernels.doubt import save_doubt
from training.kernels.estimators import SHARED, KernelModel, fit_kernel_model, pose
from training.kernels.saving import save_predictors
from training.kernels.settings import LAUNCHES, TrainingConfig
from training.kernels.sidecar import Sidecar, TypeErrors, installed_packages, read_sidecar, schema_of, sidecar_path
from utils import cli
from utils.config import load_config
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace
from utils.timing import error_statistics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.kernels.training_set import TrainingSet

    Floats = npt.NDArray[np.float64]

log = get_logger("training")
CONFIG = ROOT / "training" / "config.yaml"
OWN_MARGIN = 0.97  # a type's own predictor must err this much less than the shared one: each costs a call
HEAD_COLUMNS = ("batch", "channels", "height", "width", "out_channels", "kernel_height", "stride", "log_flops", "log_bytes")
EXAMPLES = """
python training/train_kernel_model.py
python training/train_kernel_model.py --target h200-cuda-ort1.31-all --json
"""


@dataclass(frozen=True)
class Trained:
    """One label's predictors, and how far off they are on kernels that they did not see."""

    label: str
    model: KernelModel
    errors: tuple[TypeErrors, ...]
    times_ms: dict[str, tuple[float, float]]  # of each kernel idle: measured, and predicted by a training that saw none of it


@dataclass(frozen=True)
class LeftOut:
    """Times in ms that each estimator gives the rows of the fold it was not trained on; NaN where it gives none."""

    shared: Floats
    own: Floats
    forest: Floats
    roofline: Floats

    def shipped(self, rows: TrainingSet, own: Sequence[str]) -> Floats:
        """Those of the estimators that are saved where the types in `own` get predictors of their own."""
        return np.where(np.isin(rows.types, own) & np.isfinite(self.own), self.own, self.shared)


def cross_validate(rows: TrainingSet, label: str, own: list[str], config: TrainingConfig) -> LeftOut:
    """Every row predicted by estimators that saw none of its kernel's rows."""
    folds = estimators.assign_folds(rows.ids, rows.types, config.folds, config.seed)

    def one_fold(fold: int) -> tuple[npt.NDArray[np.bool_], Floats]:
        test = folds == fold
        train, left = rows.rows(~test), rows.rows(test)
        problem = estimators.pose(train, label)
        model = estimators.fit_kernel_model(train, label, own, config, problem)
        alone = replace(model, predictor_of=dict.fromkeys(problem.type_codes, estimators.SHARED))
        bound = problem.roofline.bound_ms(left.flops, left.bytes_moved, estimators.table_counts(left.schema, left.features))
        seen = estimators.design_matrix(left.types, left.features, left.load, problem.type_codes)
        forest = estimators.train_forest(problem.matrix, problem.log_ratios, config.forest, config.seed)
        has_own = np.array([model.predictor_of.get(name, estimators.SHARED) != estimators.SHARED for name in left.types])
        return test, np.column_stack([
            estimators.predict_rows(alone, left), np.where(has_own, estimators.predict_rows(model, left), np.nan),
            bound * np.exp(forest.predict(seen)), bound * problem.roofline.scale])

    predicted = np.full((len(rows), 4), np.nan)
    for test, times in estimators.side_by_side(one_fold, sorted(set(folds.tolist())), config.workers):
        predicted[test] = times
    return LeftOut(*predicted.T)


def choose_own(rows: TrainingSet, label: str, left_out: LeftOut, candidates: list[str]) -> list[str]:
    """The kernel types whose own predictor errs clearly less than the shared one on idle rows."""
    measured, chosen = rows.times_ms[label], []
    for name in candidates:
        mask = (rows.types == name) & rows.idle & np.isfinite(left_out.own)
        own, shared = (np.abs(times[mask] / measured[mask] - 1).mean() if mask.any() else np.inf
                       for times in (left_out.own, left_out.shared))
        if own < OWN_MARGIN * shared:
            chosen.append(name)
    return chosen


def type_errors(rows: TrainingSet, label: str, left_out: LeftOut, own: list[str], short_ms: float) -> tuple[TypeErrors, ...]:
    """Errors on left-out kernels, of all types and of each: idle, idle without the shortest (where the label is a time), and at
    all levels."""
    measured = rows.times_ms[label]
    shipped = left_out.shipped(rows, own)
    sets: dict[str, Any] = {"idle": rows.idle}
    if label != LAUNCHES:
        idle_time = dict(zip(rows.ids[rows.idle], measured[rows.idle], strict=True))
        long = np.array([idle_time.get(name, time) >= short_ms for name, time in zip(rows.ids, measured, strict=True)])
        sets[f"idle, {short_ms * 1000:g} µs and more"] = rows.idle & long
    if not rows.idle.all():
        sets |= {"all levels": np.ones(len(rows), dtype=bool), "under load": ~rows.idle}
    found = []
    for rows_of, chosen in sets.items():
        counts = {name: len(set(rows.ids[chosen & (rows.types == name)])) for name in sorted(set(rows.types.tolist()))}
        for name in ["all", *sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])]:
            mask = chosen if name == "all" else chosen & (rows.types == name)
            if not mask.any():
                continue
            errors, forest, roofline = (error_statistics(times[mask], measured[mask])
                                        for times in (shipped, left_out.forest, left_out.roofline))
            found.append(TypeErrors(
                type=name, rows_of=rows_of, kernels=len(set(rows.ids[mask])), mape=errors.mape, median=errors.median,
                within_10=errors.within_10, forest_mape=forest.mape, roofline_mape=roofline.mape,
                predictor=("mixed" if own else SHARED) if name == "all" else name if name in own else SHARED))
    return tuple(found)


def idle_times(rows: TrainingSet, label: str, predicted: Floats) -> dict[str, tuple[float, float]]:
    """The measured idle time of each kernel by id, and that in `predicted` (of each row); medians over the machines."""
    import pandas as pd

    both = pd.DataFrame({"measured": rows.times_ms[label], "predicted": predicted})[rows.idle]
    return {str(name): (float(measured), float(told))
            for name, measured, told in both.groupby(rows.ids[rows.idle]).median().itertuples()}


def train_label(rows: TrainingSet, label: str, config: TrainingConfig) -> Trained:
    """The predictors of one label, picked and judged by cross-validation, then trained on all of its rows.

    Raises:
        UserError: fewer kernels than folds.
    """
    rows = rows.rows(np.isfinite(rows.times_ms[label]))
    kernels = sorted(set(zip(rows.ids.tolist(), rows.types.tolist(), strict=True)))
    if len(kernels) < config.folds:
        raise UserError(f"{rows.header.target.name}, label {label}: {len(kernels)} kernels measured, but cross-validation in "
                        f"{config.folds} folds needs as many; measure more, or set fewer folds in {CONFIG.name}")
    counts: dict[str, int] = {}
    for _, name in kernels:
        counts[name] = counts.get(name, 0) + 1
    which = config.booster(label).own_predictors
    candidates = [name for name, count in counts.items() if which != "none" and count >= config.own_min_kernels]
    left_out = cross_validate(rows, label, candidates, config)
    own = choose_own(rows, label, left_out, candidates) if which == "better" else candidates
    log.info("%s: %d rows of %d kernels; predictors of their own: %s", label, len(rows), len(kernels), ", ".join(own) or "none")
    errors = type_errors(rows, label, left_out, own, config.short_ms)
    if errors[0].forest_mape < errors[0].mape:
        log.info("%s: the forest errs less on left-out kernels, %.1f %% against %.1f %%; it is not saved, being "
                 "a hundred times the size", label, 100 * errors[0].forest_mape, 100 * errors[0].mape)
    return Trained(label, fit_kernel_model(rows, label, own, config), errors,
                   idle_times(rows, label, left_out.shipped(rows, own)))


def kept_sidecar(workspace: Workspace, rows: TrainingSet, config: TrainingConfig) -> Sidecar | None:
    """The sidecar of predictors that were trained on these very rows, with these settings, features and packages; or None, also
    where their errors are gone."""
    folder = workspace.predictors(rows.header.target.name)
    if not sidecar_path(folder).is_file() or not workspace.kernel_errors(folder.name).is_file():
        return None
    try:
        there = read_sidecar(folder)
    except UserError:  # of another version, or damaged: made anew
        return None
    same = (there.dataset_sha256, there.config, schema_of(there), there.packages, there.held_out) == (
        rows.sha256, config.model_dump(mode="json"), rows.schema, installed_packages(), rows.header.held_out)
    return there if same else None


def save_errors(workspace: Workspace, rows: TrainingSet, trained: Trained) -> None:
    """Writes how far off one label's predictors are on each kernel when it is left out. None of a held-out family is among
    them: `rows` holds none."""
    header, families = rows.header, dict(zip(rows.ids.tolist(), rows.families, strict=True))
    described = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(header.target.name))}
    write_errors(workspace.kernel_errors(header.target.name), KernelErrors(
        target=header.target, label=trained.label, held_out=header.held_out, dataset_sha256=rows.sha256, kernels=tuple(
            KernelError(kernel=described[name], families=tuple(sorted(families[name] - set(header.held_out))),
                        measured_ms=measured, predicted_ms=predicted)
            for name, (measured, predicted) in trained.times_ms.items())))


def save(workspace: Workspace, rows: TrainingSet, trained: list[Trained], config: TrainingConfig) -> Sidecar:
    """Writes the predictors of a target with their sidecar, and their errors by kernel: those of the GPU's own time, or of the
    first label where that was not measured."""
    from training.kernels.training_set import measured_times

    save_doubt(workspace, rows, workspace.predictors(rows.header.target.name))
    save_errors(workspace, rows, next((one for one in trained if one.label == GPU_LABEL), trained[0]))
    header = rows.header
    spans = {name: (float(low), float(high)) for name, low, high in zip(
        rows.metrics, np.nanmin(rows.load, axis=0), np.nanmax(rows.load, axis=0), strict=True)}
    about: Mapping[str, Any] = {
        "target": header.target, "created": datetime.now(UTC).isoformat(timespec="seconds"), "dataset_sha256": rows.sha256,
        "metrics": rows.metrics, "idle_load": rows.idle_load, "load_range": spans, "dtypes": rows.dtypes,
        "loaded_rows": int((~rows.idle).sum()), "held_out": header.held_out,
        "machines": tuple(header.machines.values()),
        "feature_range": tuple(zip(rows.features.min(axis=0).tolist(), rows.features.max(axis=0).tolist(), strict=True)),
        "config": config.model_dump(mode="json")}
    return save_predictors(workspace.predictors(header.target.name), {one.label: one.model for one in trained},
                           {one.label: one.errors for one in trained}, measured_times(workspace, header.target.name), about)


def head(rows: TrainingSet, label: str, count: int = 5) -> list[dict[str, Any]]:
    """The first rows as the estimators see them: sizes, the encoded type, the load; and the time to learn."""
    codes = pose(rows.rows(np.isfinite(rows.times_ms[label])), label).type_codes
    columns = [name for name in HEAD_COLUMNS if name in rows.schema.names]
    table = []
    for place in range(min(count, len(rows))):
        row: dict[str, Any] = {name: float(rows.features[place, rows.schema.index(name)]) for name in columns}
        row["type_code"] = codes.get(str(rows.types[place]))
        row |= {name: float(rows.load[place, column]) for column, name in enumerate(rows.metrics)}
        table.append(row | {f"{label}_ms": float(rows.times_ms[label][place])})
    return table


def error_table(label: str, errors: Sequence[TypeErrors]) -> list[dict[str, Any]]:
    """The errors of one label as rows to print, in per cent."""
    return [{"label": label, "rows": e.rows_of, "type": e.type, "predictor": e.predictor, "kernels": e.kernels,
             "MAPE_%": 100 * e.mape, "median_%": 100 * e.median, "within_10_%": 100 * e.within_10,
             "forest_MAPE_%": 100 * e.forest_mape, "roofline_MAPE_%": 100 * e.roofline_mape} for e in errors]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings (default: training/config.yaml)")
    parser.add_argument("--force", action="store_true", help="train again although nothing changed since the last time")
    args = parser.parse_args()
    workspace = cli.start(args)
    from training.kernels.training_set import load_training_set

    config = load_config(args.config, TrainingConfig)
    results = []
    with sole_writer(workspace.predictors("")):
        for target in [args.target] if args.target else collected_targets(workspace):
            rows = load_training_set(workspace, target)
            log.info("%s: %d rows of %d kernels, %d idle", target, len(rows), len(set(rows.ids.tolist())), int(rows.idle.sum()))
            if not args.json:
                cli.print_table(head(rows, next(iter(rows.times_ms))), f"{target}: the first rows as numbers")
            sidecar = None if args.force else kept_sidecar(workspace, rows, config)
            if sidecar is None:
                trained = [train_label(rows, label, config) for label in cli.track(list(rows.times_ms), f"training {target}")]
                sidecar = save(workspace, rows, trained, config)
                log.info("saved %s", sidecar_path(workspace.predictors(target)))
            else:
                log.info("kept %s: nothing changed since", sidecar_path(workspace.predictors(target)))
            results.append({"target": target, "folder": str(workspace.predictors(target)), "errors": {
                label: [errors.model_dump() for errors in about.errors] for label, about in sidecar.labels.items()}})
            for label, about in sidecar.labels.items() if not args.json else ():
                cli.print_table(error_table(label, about.errors), f"{target}, label {label}: kernels left out of training")
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
