"""Measures an estimator of kernel times on held-out kernels, and admits it if it is better (docs/estimators.md).

Reads the dataset and predictors of a target. Holds out families of models in turn (or kernels), fits the estimator, a roofline
and the predictors in use to the rest, and prints their errors on the same kernels. If the estimator's error is clearly smaller
than that of the predictors in use for a kernel type, it is fitted to all kernels and written to training/predictors/<target>/:
from then on it predicts this type. With --force it is admitted anyway, and predictions that rest on it are less sure.

Without a name, all estimators are compared, and nothing is written. Exit status 1: admitted for no type.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.admitted import KnownEstimator, find_estimator, find_estimators, read_entries
from hase.learned.kernels.interface import TrainingConfig, TrainingSet
from hase.learned.kernels.sidecar import Sidecar, read_sidecar
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.estimators.in_use import InUseEstimator
from hase.training.kernels import checking
from hase.training.kernels.targets import add_training_config, trained_targets
from hase.training.kernels.training_set import read_training_set
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace
from hase.utils.timing import Floats

log = get_logger("estimators")
EXAMPLES = """
python training/check_estimator.py --types Softmax,Transpose
python training/check_estimator.py random_forest --types Softmax
python training/check_estimator.py softmax_by_bytes --estimators out/mine/estimators --workspace out/mine
python training/check_estimator.py --list
python training/check_estimator.py --remove random_forest
"""


def option_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("name", nargs="?", help="the estimator to check (default: compare all)")
    parser.add_argument("--target", help="name of a target with a dataset and predictors (default: the only one)")
    cli.add_estimators(parser)
    parser.add_argument("--types", type=lambda text: text.split(","), metavar="TYPE,…",
                        help="kernel types, such as Softmax,Conv_Relu (default: all that the estimator is for)")
    parser.add_argument("--hold-out", choices=("family", "kernel"),
                        help="what is held out together (default: families of models, or kernels where there are too few)")
    parser.add_argument("--label", help="which time of a kernel (default: the one that predictions are made from)")
    add_training_config(parser)
    parser.add_argument("--force", action="store_true", help="admit it although it is not better")
    parser.add_argument("--dry-run", action="store_true", help="only say whether it would be admitted")
    parser.add_argument("--list", action="store_true", help="print the estimators that are there and those that are admitted")
    parser.add_argument("--remove", metavar="NAME", help="do without an admitted estimator from now on")
    return parser


def only_target(workspace: Workspace, name: str | None) -> str:
    """The named target, or the only one with predictors."""
    if name:
        return name
    targets = trained_targets(workspace)
    if len(targets) > 1:
        raise UserError(f"which target? give --target: {', '.join(targets)}")
    return targets[0]


def label_of(folder: Path, sidecar: Sidecar, rows: TrainingSet, wanted: str | None) -> str:
    """The named label, else that of the composition, else the GPU's or the first."""
    has_composition = target_files.COMPOSITION.path(folder).is_file()
    label = wanted or (read_composition(folder, sidecar.dataset_sha256).label if has_composition else
                       GPU_LABEL if GPU_LABEL in rows.times_ms else next(iter(rows.times_ms)))
    if label == LAUNCHES or label not in rows.times_ms or label not in sidecar.labels:
        measured = [name for name in rows.times_ms if name != LAUNCHES]
        raise UserError(f"label {label}: not a time that was measured on {sidecar.target.name} (measured: "
                        f"{', '.join(measured)})")
    return label


def wanted_by(candidates: Sequence[KnownEstimator], types: Sequence[str] | None, kernel_type: str) -> bool:
    """Whether kernels of a type are estimated: an estimator is for it, and the user wants it."""
    return (types is None or kernel_type in types) and any(known.estimator.is_for(kernel_type) for known in candidates)


def check_types(types: Sequence[str], candidates: Sequence[KnownEstimator], rows: TrainingSet) -> None:
    """Checks the types that the user named."""
    for kernel_type in types:
        if kernel_type not in rows.types:
            raise UserError(f"--types {kernel_type}: no kernel of this type was measured on {rows.header.target.name}")
        if not wanted_by(candidates, types, kernel_type):
            names = ", ".join(known.estimator.name for known in candidates)
            raise UserError(f"--types {kernel_type}: estimator {names} is not for it")


def held_out(task: checking.Task, candidates: Sequence[KnownEstimator], in_use: Floats) -> dict[str, Floats]:
    """The held-out times by name: of the predictors in use, the roofline, and each estimator."""
    times_ms = {checking.BEFORE: in_use}
    others = (known.estimator for known in candidates if known.estimator.name != checking.ROOFLINE)
    for estimator in progress([find_estimator(checking.ROOFLINE).estimator, *others], "checking"):
        types = [name for name in task.types if estimator.is_for(name)]
        if types and estimator.name != InUseEstimator.name:
            times_ms[estimator.name] = task.held_out_ms(estimator, types)
    return times_ms


def check(workspace: Workspace, target: str,
          args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str], checking.Task]:
    """The table of errors; for a single estimator also why it is not admitted, by kernel type ("": it is)."""
    folder, config = workspace.predictors(target), read_config(args.config, TrainingConfig, args.changes)
    sidecar, rows = read_sidecar(folder), read_training_set(workspace, target)
    candidates = [find_estimator(args.name, args.estimators)] if args.name else [
        known for known in find_estimators(args.estimators).values() if not checking.environment_error(known.estimator, rows)]
    if args.name and (error := checking.environment_error(candidates[0].estimator, rows)):
        raise UserError(error)
    if args.name == InUseEstimator.name:
        raise UserError(f"estimator {InUseEstimator.name}: it is in use already; others are compared with it")
    check_types(args.types or (), candidates, rows)
    label = label_of(folder, sidecar, rows, args.label)
    if start := sidecar.labels[label].start:
        log.warning("the predictors of %s correct those of %s; here they are compared as if they were trained without them",
                    target, start)
    task = checking.task_for(workspace, rows, label, partial(wanted_by, candidates, args.types), args.hold_out, config)
    predictors = partial(InUseEstimator, chosen=sidecar.labels[label].chosen)
    admitted = [entry for entry in read_entries(folder) if entry.name != args.name]
    times_ms = held_out(task, candidates, checking.in_use_ms(task, predictors, admitted, args.estimators))
    reasons = checking.why_not(task, times_ms[args.name], times_ms[checking.BEFORE]) if args.name else {}
    types = [name for name, reason in reasons.items() if args.force or not reason]
    if types and not args.dry_run:
        estimator, now = task.fitted_to_all(candidates[0].estimator), datetime.now(UTC).isoformat(timespec="seconds")
        with sole_writer(folder):
            forced = args.force and any(reasons.values())
            checking.admit(folder, estimator, checking.about_admitted(task, candidates[0], times_ms, types, forced, now))
    return checking.error_rows(task, times_ms), reasons, task


def report(name: str, reasons: Mapping[str, str], force: bool, dry_run: bool) -> int:
    """Prints for which types an estimator is admitted, and why not for others. Returns the exit status."""
    better = [kernel_type for kernel_type, reason in reasons.items() if not reason]
    if better:
        log.info("%s: %s for %s", name, "would be admitted" if dry_run else "admitted", ", ".join(better))
    refusal = "would not be admitted" if dry_run else "admitted by force" if force else "not admitted"
    for reason in dict.fromkeys(filter(None, reasons.values())):
        types = [kernel_type for kernel_type, type_reason in reasons.items() if type_reason == reason]
        log.warning("%s: %s for %s: %s", name, refusal, ", ".join(types), reason)
    return 0 if better or force else 1


def estimator_table(workspace: Workspace, target: str, estimator_files: Sequence[Path]) -> list[dict[str, Any]]:
    """The available estimators, and for which types they are admitted."""
    entries = {entry.name: entry for entry in read_entries(workspace.predictors(target))}
    known = find_estimators(estimator_files)
    return [{"estimator": name, "from": known[name].source if name in known else f"{entries[name].source}, not found",
             "admitted for": ", ".join(entries[name].types) if name in entries else None,
             "MAPE_%": 100 * entries[name].errors.mape if name in entries else None,
             "forced": entries[name].forced if name in entries else None} for name in sorted({*known, *entries})]


def main() -> int:
    parser = option_parser()
    args = parser.parse_args()
    if args.force and not args.name:
        parser.error("--force needs the NAME of an estimator")
    workspace = cli.start(args)
    target = only_target(workspace, args.target)
    if args.remove:
        with sole_writer(workspace.predictors(target)):
            checking.remove(workspace.predictors(target), args.remove)
        return 0
    if args.list:
        cli.print_rows(estimator_table(workspace, target, args.estimators), args.json)
        return 0
    table, reasons, task = check(workspace, target, args)
    title = (f"{target}, label {task.label}: {len(set(task.rows.ids[task.tested].tolist()))} kernels, each "
             f"{task.hold_out} held out")
    cli.print_rows(table, args.json, title)
    return report(args.name, reasons, args.force, args.dry_run) if args.name else 0


if __name__ == "__main__":
    cli.run(main)
