"""Phase 5.9: how far off kernels are whose operator was never measured: each measured operator left out of everything in turn.

Reads the dataset and what training wrote to training/kernel_errors. Prints a row for each operator and element type: how many
kernels were measured, how far off they are when they alone are held out (cross-validation), and when their operator is: then
the estimate comes from the other operators of its class. With --markdown, the table is written to a file too, with operators of
the CUDA provider that no dataset holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

from kernel_model.sampling.kernel_errors import REMAKE, KernelError, read_errors
from records.dataset_files import read_kernels
from records.measurement import GPU_LABEL
from training.kernels.operator_table import markdown, operator_rows, summary_rows
from training.kernels.operators_left_out import leave_operators_out
from training.kernels.settings import LAUNCHES, TrainingConfig
from training.kernels.targets import Show, add_options, for_each_target, trained_targets
from training.kernels.training_set import TrainingSet, read_training_set
from utils import cli, files
from utils.config import read_config
from utils.logger import get_logger
from utils.paths import Workspace

log = get_logger("training")
EXAMPLES = """
python training/leave_operators_out.py --target nvidia-h200-cuda-ort1.31-all
python training/leave_operators_out.py --target nvidia-h200-cuda-ort1.31-all --markdown docs/operators.md
"""


def cross_validated(workspace: Workspace, target: str, rows: TrainingSet, label: str) -> tuple[KernelError, ...]:
    """The errors of kernels held out alone in training. None, and a warning, where it wrote none of this dataset and label."""
    path = workspace.kernel_errors(target)
    found = read_errors(path) if path.is_file() else None
    if found is not None and (found.label, found.dataset_sha256) == (label, rows.sha256):
        return found.kernels
    log.warning("%s: %s, so the table has no cross-validated errors; make them with: %s", path,
                "no such file" if found is None else "not of the present dataset", REMAKE)
    return ()


def report(workspace: Workspace, target: str, config: TrainingConfig, page: Path | None, show: Show) -> dict[str, Any]:
    """The tables of one target; also writes them to `page`."""
    rows = read_training_set(workspace, target)
    kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(target))}
    label = GPU_LABEL if GPU_LABEL in rows.times_ms else next(iter(rows.times_ms))
    held_out = leave_operators_out(rows, label, config)
    operators = operator_rows(rows, label, kernels, cross_validated(workspace, target, rows, label), held_out)
    summary = summary_rows(held_out)
    launches = summary_rows(leave_operators_out(rows, LAUNCHES, config)) if LAUNCHES in rows.times_ms else []
    show(operators, f"{target}, label {label}: kernels by operator and type; errors in per cent")
    show(summary, f"{target}, label {label}: an operator left out, its time estimated from its class")
    if launches:
        show(launches, f"{target}: an operator left out, its launches estimated from its class")
    if page is not None:
        files.write_text(page, markdown(target, label, operators, summary, launches, kernels.values()))
    return {"operators": operators, "classes": summary, "launches": launches}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a dataset (default: every target with predictors)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file, for one --target")
    args = parser.parse_args()
    if args.markdown and not args.target:
        parser.error("--markdown needs a --target: a page shows one")
    workspace, config = cli.start(args), read_config(args.config, TrainingConfig, args.changes)
    targets = [args.target] if args.target else trained_targets(workspace)
    found = for_each_target(targets, lambda target, show: report(workspace, target, config, args.markdown, show), args.json)
    if args.json:
        cli.print_json(found)
    return 0


if __name__ == "__main__":
    cli.run(main)
