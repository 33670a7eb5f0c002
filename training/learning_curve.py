"""How the error of kernels falls with the number that is measured, and how far a good order or another device helps.

Reads a dataset (default: of every target) and replays it as if only 200, 1,000, … of its kernels had been measured. Each family
of models is held out in turn: its kernels are predicted, and nothing near them is learned from. Writes nothing and prints the
errors for each order: random; useful (kernel_model/sampling/usefulness.py, as `collector.py --minutes`); errors (the same, and
after the first size, near the kernels that were predicted worst). With --start-from, also of a training that starts from the
predictors of another target (which may have seen the same models there). With --half-from-single, the kernels of half precision
are replayed alone, and those of single precision stand for another device.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from hase.learned.kernels.predictors import StartFrom
from hase.learned.kernels.settings import TrainingConfig
from hase.records.dataset_files import collected_targets, read_kernels
from hase.records.measurement import GPU_LABEL
from hase.training.kernels.replay import ORDERS, Order, Replay, errors_of, half_from_single, read_replay
from hase.training.kernels.targets import Show, add_options, for_each_target
from hase.training.kernels.training_set import TrainingSet, read_training_set
from hase.utils import cli
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("learning curve")
EXAMPLES = """
python training/learning_curve.py --workspace out/h200
python training/learning_curve.py --workspace out/h200 --sizes 200,1000,5000 --order useful --half-from-single
python training/learning_curve.py --workspace out/demo --sizes 200,1000 --start-from nvidia-h200-cuda-ort1.31-all
"""


def label_of(rows: TrainingSet, asked: str | None) -> str:
    """The label to replay: the one that is asked for, else the GPU's, else the first.

    Raises:
        UserError: the dataset does not have it.
    """
    label = asked or (GPU_LABEL if GPU_LABEL in rows.times_ms else next(iter(rows.times_ms)))
    if label not in rows.times_ms:
        raise UserError(f"label {label}: not in the dataset of {rows.header.target.name} (it has: {', '.join(rows.times_ms)})")
    return label


def replay_of(workspace: Workspace, target: str, label: str | None, config: TrainingConfig, half_from: bool,
              start: StartFrom | None) -> Replay:
    """The dataset to replay, with its folds.

    Raises:
        UserError: no family of models can be held out, or the dataset has no half precision.
    """
    rows = read_training_set(workspace, target)
    replay = read_replay(workspace, target, rows, label_of(rows, label))
    if half_from:
        kernels = {entry.kernel.id: entry.kernel for entry in read_kernels(workspace.dataset(target))}
        replay = half_from_single(replay, kernels, config.folds, config)
    else:
        start_model = start and start.of(target, replay.label)
        replay = replay.held_out(config.folds)
        replay = replace(replay, folds=tuple(replace(fold, start=start_model) for fold in replay.folds))
    if len(replay.folds) < 2:
        raise UserError(f"{target}: needs kernels of at least two families of models" + (
            ", in half precision" if half_from else ""))
    return replay


def curve(replay: Replay, sizes: Sequence[int], orders: Sequence[Order], repeats: int,
          config: TrainingConfig) -> list[dict[str, Any]]:
    """One row for each size, order and start: means over `repeats` random choices. Sizes beyond the smallest fold are left out,
    with a message."""
    most = min(int(fold.pool.sum()) for fold in replay.folds)
    if too_many := [size for size in sizes if size > most]:
        log.warning("sizes %s are left out: in one fold, only %d kernels may be learned from", too_many, most)
    fitting = sorted(size for size in sizes if size <= most)
    starts = {"": False} | {fold.start.target: True for fold in replay.folds if fold.start}
    by_case: dict[tuple[int, Order, str], list[dict[str, float]]] = {}
    for order, name, seed in cli.progress(list(itertools.product(orders, starts, range(repeats))), "replaying"):
        errors = errors_of(replay, fitting, order, config, config.seed + seed, starts[name])
        for size, of_size in zip(fitting, errors, strict=True):
            by_case.setdefault((size, order, name), []).append(of_size)
    return [{"kernels": size, "order": order, "start_from": name or "nothing",
             **{key: fmean(row_errors[key] for row_errors in several) for key in several[0]}}
            for (size, order, name), several in sorted(by_case.items(), key=lambda entry: entry[0][0])]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser, "name of a dataset in benchmark/dataset (default: all)")
    parser.add_argument("--sizes", type=cli.counts, default="200,1000,5000,20000", metavar="N,…",
                        help="numbers of kernels that are measured (default: 200,1000,5000,20000)")
    parser.add_argument("--order", choices=ORDERS, action="append",
                        help="in which they are measured (repeatable; default: all)")
    parser.add_argument("--repeats", type=cli.count, default=1, metavar="N",
                        help="random choices to take the mean of (default: 1)")
    parser.add_argument("--label", help="whose times (default: gpu, or the dataset's first)")
    start_group = parser.add_mutually_exclusive_group()
    start_group.add_argument("--start-from", metavar="TARGET", help="another target, whose predictors training starts from")
    start_group.add_argument("--half-from-single", action="store_true",
                             help="replay half precision, starting from predictors of single precision")
    args = parser.parse_args()
    workspace = cli.start(args)
    config = read_config(args.config, TrainingConfig, args.changes)
    start = StartFrom.named(workspace, args.start_from) if args.start_from else None

    def replayed(target: str, show: Show) -> list[dict[str, Any]]:
        replay = replay_of(workspace, target, args.label, config, args.half_from_single, start)
        table = curve(replay, args.sizes, args.order or ORDERS, args.repeats, config)
        show(table, f"{target}, label {replay.label}: kernels of models whose family was held out")
        return table

    results = for_each_target([args.target] if args.target else collected_targets(workspace), replayed, args.json)
    if args.json:
        cli.print_json(results)
    return 0


if __name__ == "__main__":
    cli.run(main)
