"""Learns the time of a kernel from its shape and from what else runs on the device.

Reads training/config.yaml and the datasets in benchmark/dataset (default: of every target). Writes to
training/predictors/<target>/ the estimators of each label, a sidecar that describes them, and the measured times for look-up.
Also writes training/kernel_errors/<target>.json, the error of each kernel when it is held out, for
kernel_model/kernel_sampler.py --errors.

With --start-from, the predictions of another target's predictors are corrected, where that lowers the error
(learned/kernels/estimators.py).

XGBoost learns log(time / roofline), once for all kernel types together and once per type with enough kernels. Cross-validation
chooses between the two for each type. With `estimators: [xgboost, random_forest]` in the settings a random forest predicts the
types where it is clearly better, and with `[random_forest]` it predicts all. The errors of a random forest and of the bare
roofline are always printed for comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hase.kernel_model.sampling.usefulness import KernelError, KernelErrors, write_errors
from hase.learned import target_files
from hase.learned.kernels.estimators import KernelModel
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.measured import measured_times
from hase.learned.kernels.predictors import StartFrom
from hase.learned.kernels.sidecar import Carried, Sidecar, TypeErrors, installed_packages, read_sidecar, save_predictors
from hase.records.dataset_files import collected_targets, read_kernels
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.fits.data_sheets import WithCarried, with_carried
from hase.training.kernels.fitting import learning_problem
from hase.training.kernels.label_training import Trained, train_label
from hase.training.kernels.left_out import learn_doubt, save_uncertainty
from hase.training.kernels.targets import Show, add_options, for_each_target
from hase.training.kernels.training_set import read_training_set
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

log = get_logger("training")
HEAD_COLUMNS = ("batch", "channels", "height", "width", "out_channels", "kernel_height", "stride", "log_flops", "log_bytes")
EXAMPLES = """
python training/train_kernel_model.py
python training/train_kernel_model.py --force --json
python training/train_kernel_model.py --set estimators=[xgboost,random_forest]
python training/train_kernel_model.py --start-from nvidia-h200-cuda-ort1.31-all  # needs a GPU's dataset
"""


def kept_sidecar(workspace: Workspace, rows: TrainingSet, config: TrainingConfig,
                 carried: Carried | None = None) -> Sidecar | None:
    """The sidecar on disk if training again would give the same, else None: rows (also those `carried` over from another card),
    settings and packages must be the same. The file of kernel errors must exist, too."""
    folder = workspace.predictors(rows.header.target.name)
    if not target_files.PREDICTORS.path(folder).is_file() or not workspace.kernel_errors(folder.name).is_file():
        return None
    try:
        sidecar = read_sidecar(folder)
    except UserError:  # another version, or damaged: train again
        return None
    same = (sidecar.dataset_sha256, sidecar.carried, sidecar.config, sidecar.packages, sidecar.held_out) == (
        rows.sha256, carried, config.model_dump(mode="json"), installed_packages(), rows.header.held_out)
    return sidecar if same else None


def save_errors(workspace: Workspace, rows: TrainingSet, described: Mapping[str, Kernel], trained: Trained) -> None:
    """Writes the error of one label's predictors on each kernel, held out of training."""
    header, families = rows.header, dict(zip(rows.ids.tolist(), rows.groups, strict=True))
    write_errors(workspace.kernel_errors(header.target.name), KernelErrors(
        target=header.target, label=trained.label, held_out=header.held_out, dataset_sha256=rows.sha256, kernels=tuple(
            KernelError(kernel=described[name], families=tuple(sorted(families[name] - set(header.held_out))),
                        measured_ms=measured, predicted_ms=predicted)
            for name, (measured, predicted) in trained.times_ms.items() if name in described)))


def save(workspace: Workspace, learned: TrainingSet | WithCarried, trained: list[Trained], config: TrainingConfig) -> Sidecar:
    """Writes a target's predictors, their sidecar, and their errors by kernel for label `gpu`, or else the first label."""
    rows, carried = (learned.rows, learned) if isinstance(learned, WithCarried) else (learned, None)
    described = {entry.kernel.id: entry.kernel for entry in read_kernels(
        workspace.dataset(rows.header.target.name), set(rows.ids.tolist()))}
    save_uncertainty(rows, [*described.values(), *(carried.kernels.values() if carried else ())],
                     workspace.predictors(rows.header.target.name),
                     {result.label: result.left_out for result in trained},
                     {result.label: result.forms_left_out for result in trained if result.forms_left_out})
    save_errors(workspace, rows, described, next((result for result in trained if result.label == GPU_LABEL), trained[0]))
    header = rows.header
    load_range = {name: (float(low), float(high)) for name, low, high in zip(
        rows.metrics, np.nanmin(rows.load, axis=0), np.nanmax(rows.load, axis=0), strict=True)}
    description: Mapping[str, Any] = {
        "target": header.target, "created": datetime.now(UTC).isoformat(timespec="seconds"), "dataset_sha256": rows.sha256,
        "metrics": rows.metrics, "idle_load": rows.idle_load, "load_range": load_range, "dtypes": rows.dtypes,
        "loaded_rows": int((~rows.idle).sum()), "held_out": header.held_out, "machines": tuple(header.machines.values()),
        "feature_range": tuple(zip(rows.features.min(axis=0).tolist(), rows.features.max(axis=0).tolist(), strict=True)),
        "config": config.model_dump(mode="json"), "carried": carried.about if carried else None}
    return save_predictors(workspace.predictors(header.target.name), {result.label: result.model for result in trained},
                           {result.label: result.errors for result in trained}, measured_times(workspace, header.target.name),
                           description, doubt_of(rows, trained, config.seed))


def doubt_of(rows: TrainingSet, trained: list[Trained], seed: int) -> KernelModel | None:
    """An estimator of how far off the GPU's predictors may be on a kernel; None if the GPU's time was not measured."""
    times = {result.label: result.times_ms for result in trained}
    return learn_doubt(rows, times[GPU_LABEL], times.get(LAUNCHES, {}), seed) if GPU_LABEL in times else None


def head(rows: TrainingSet, label: str, count: int = 5) -> list[dict[str, Any]]:
    """The first rows as numbers: what estimators read (sizes, code of the kernel type, load), and the time that they learn."""
    codes = learning_problem(rows.rows(np.isfinite(rows.times_ms[label])), label).type_codes
    columns = [name for name in HEAD_COLUMNS if name in rows.schema.names]
    table = []
    for row_index in range(min(count, len(rows))):
        row: dict[str, Any] = {name: float(rows.features[row_index, rows.schema.index(name)]) for name in columns}
        row["type_code"] = codes.get(str(rows.types[row_index]))
        row |= {name: float(rows.load[row_index, column]) for column, name in enumerate(rows.metrics)}
        table.append(row | {f"{label}_ms": float(rows.times_ms[label][row_index])})
    return table


def error_table(label: str, errors: Sequence[TypeErrors]) -> list[dict[str, Any]]:
    """One row per kernel type and kind of rows (idle, under load …), errors in per cent."""
    return [{"label": label, "rows": e.rows_of, "type": e.type, "predictor": e.predictor, "kernels": e.kernels,
             "MAPE_%": 100 * e.mape, "median_%": 100 * e.median, "within_10_%": 100 * e.within_10,
             "forest_MAPE_%": 100 * e.forest_mape, "roofline_MAPE_%": 100 * e.roofline_mape} for e in errors]


def summary(label: str, errors: Sequence[TypeErrors]) -> str:
    """One sentence: the error of all idle kernels, and of the type with the largest one."""
    everything, *by_type = [e for e in errors if e.rows_of == errors[0].rows_of]
    worst = max(by_type, key=lambda e: e.mape)
    return (f"{label}: MAPE of all {everything.kernels:,} kernels, each held out: {100 * everything.mape:.1f} %; "
            f"worst by type: {worst.type} {100 * worst.mape:.1f} % ({worst.kernels:,} kernel{'s' * (worst.kernels != 1)})")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--force", action="store_true", help="train again although nothing changed since the last time")
    parser.add_argument("--start-from", metavar="TARGET",
                        help="correct the predictors of another target, which come with Hase or are in this workspace, where "
                             "that lowers the error (default: as the settings say, none)")
    parser.add_argument("--carried", nargs=2, type=Path, metavar=("WORKSPACE", "TABLES"),
                        help="also learn from another card's kernels, of forms (element type, rank …) that the dataset lacks. "
                             "WORKSPACE has that card's dataset; TABLES, a file like recipes/gpus/tables.csv.xz, has kernels "
                             "of both cards, by which the times are converted")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)
    if args.start_from:
        config = config.model_copy(update={"start_from": args.start_from})
    start = StartFrom.named(workspace, config.start_from) if config.start_from else None

    def train(target: str, show: Show) -> dict[str, Any]:
        rows = read_training_set(workspace, target)
        carried = with_carried(rows, Workspace(args.carried[0]), args.carried[1]) if args.carried else None
        if carried:
            rows = carried.rows
            log.info("%s: with %d further kernels, of forms that it lacks; their times are converted from %s", target,
                     carried.about.kernels, carried.about.card)
        log.info("%s: %d rows of %d kernels, %d idle", target, len(rows), len(set(rows.ids.tolist())), int(rows.idle.sum()))
        show(head(rows, next(iter(rows.times_ms))), f"{target}: the first rows as numbers")
        sidecar = None if args.force else kept_sidecar(workspace, rows, config, carried.about if carried else None)
        if sidecar is None:
            trained = [train_label(rows, label, config, start and start.for_label(target, label))
                       for label in progress(list(rows.times_ms), f"training {target}")]
            sidecar = save(workspace, carried or rows, trained, config)
            log.info("saved %s", target_files.PREDICTORS.path(workspace.predictors(target)))
        else:
            log.info("kept %s: nothing changed since", target_files.PREDICTORS.path(workspace.predictors(target)))
        for label, about in sidecar.labels.items():
            show(error_table(label, about.errors), f"{target}, label {label}: kernels left out of training")
            if about.errors and not args.json:
                print(summary(label, about.errors))
        return {"target": target, "folder": str(workspace.predictors(target)), "errors": {
            label: [errors.model_dump() for errors in about.errors] for label, about in sidecar.labels.items()}}

    with sole_writer(workspace.predictors("")):
        for_each_target([args.target] if args.target else collected_targets(workspace), train, args.json, as_list=True)
    return 0


if __name__ == "__main__":
    cli.run(main)
