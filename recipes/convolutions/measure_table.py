"""Measures all models × convolution algorithms × input sizes in one process: about 14 minutes on an H200 for five sizes.

Each model is built once, and each combination is profiled as by extras/convolutions/run_profile.py --fallback, so that every
layer that can run under an algorithm is timed. Energy is measured only where all layers can. Models of more than 0.1 s are run
less often. Writes to extras/convolutions/results/4_table_b<batch>/<model>_<algorithm>_<gpu>/. Started again, it goes
on, also on another machine of the same kind; with --minutes it begins no combination after that time. Prints one row for each
model and algorithm, with five of its sizes (--json: all).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.benchmark.measuring.blocks import Steadiness
from hase.extras.convolutions.profiler import UnifiedProfiler, open_instruments
from hase.extras.convolutions.profiling.algorithms import ALGORITHMS, DEFAULT, algorithm_named
from hase.extras.convolutions.profiling.listing import MODELS, gpu_name
from hase.extras.convolutions.profiling.measure import DEFAULT_LARGEST, DEFAULT_SMALLEST, ProfileSettings, even_sizes
from hase.model_zoo.exporting.torch_models import build, check_names
from hase.utils import cli
from hase.utils.fingerprint import machine, resolve_device
from hase.utils.lazy import torch
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

SIZES = [224, 422, 620, 818, 1016]
EXAMPLES = """
python recipes/convolutions/measure_table.py --workspace out/convolutions --minutes 9
python recipes/convolutions/measure_table.py --workspace out/convolutions --sizes 224 --batch 16 --energy-seconds 0
python recipes/convolutions/measure_table.py --workspace out/convolutions --num-sizes 100  # takes hours
python recipes/convolutions/measure_table.py --model alexnet --algorithm default --sizes 64 --device cpu --json
"""
LONGEST_S = 1.0  # of the runs of a model that are timed together; a model of 0.1 s is still run ten times
AT_ONCE = Steadiness(attempts=1, patience_s=0.0)  # time is short; an unsteady block is marked as such
log = get_logger("convolutions")


def combinations(args: argparse.Namespace, device: str) -> Iterator[ProfileSettings]:
    """The settings to profile: model by model, each under all algorithms."""
    check_names(args.model or MODELS)
    device_name = machine(device).device_name
    algorithm_names = args.algorithm or [name for name in ALGORITHMS[device] if device == "cpu" or name != DEFAULT]
    algorithms = [algorithm_named(name, device) for name in algorithm_names]
    for model in args.model or MODELS:
        for algorithm in algorithms:
            yield ProfileSettings(
                model=model, algorithm=algorithm.name, gpu=gpu_name(device), device=device, device_name=device_name,
                batch=args.batch, dtype=args.dtype, tf32=device == "cuda", fallback=True, warmup=args.warmup,
                measure=args.measure, input_sizes=tuple(sorted(args.sizes)))


def measure(workspace: Workspace, args: argparse.Namespace, device: str) -> list[Path]:
    """Profiles what is missing; returns the folders of everything requested."""
    until_s = time.monotonic() + 60 * args.minutes
    folders, built, skipped = [], "", 0
    model: torch.nn.Module | None = None
    requested = list(combinations(args, device))
    instruments = replace(open_instruments(device, args.energy_seconds), energy_of_mixed=False, longest_s=LONGEST_S)
    for settings in progress(requested, "profiling", len(requested)):
        folder = workspace.convolution_results / f"4_table_b{settings.batch}" / f"{settings.name}_{settings.gpu}"
        folders.append(folder)
        if time.monotonic() > until_s:
            skipped += 1
            continue
        if built != settings.model:
            model, built = build(settings.model, settings.dtype, (SIZES[0], SIZES[0])), settings.model
        UnifiedProfiler(settings, args.energy_seconds, AT_ONCE).profile(folder, model, instruments)
    if skipped:
        log.warning("time limit reached, %d of %d combinations are left; run the same command again to go on", skipped,
                    len(requested))
    return folders


def summary_row(folder: Path, most_sizes: int | None = None) -> dict[str, Any] | None:
    """A combination as a row: refused layers with reasons, and time and energy at most `most_sizes` sizes.

    None if nothing was measured.
    """
    tables = [next(folder.glob(f"*_{kind}.csv"), None) for kind in ("overall", "layers")]
    if tables[0] is None or tables[1] is None:
        return None
    overall, layers = (list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) for path in tables if path)
    if not overall:
        return None
    reasons = Counter(row["status"] for row in layers if row["status"] != "ok")
    unexpected = sum(bool(row["unexpected_kernels"]) for row in layers)
    row = {"model": overall[0]["model"], "algorithm": overall[0]["algorithm"], "gpu": overall[0]["gpu"],
           "batch": int(overall[0]["batch"]), "layers": overall[0]["layers"],
           "not supported": overall[0]["layers_not_supported"], "why": ", ".join(reasons) or None,
           "other kernels than expected": unexpected}
    columns = {"(ms)": "mean", "(J)": "energy_per_inference_j", "events/CUPTI": "layers_to_cupti"}
    shown = len(overall) if most_sizes is None else min(most_sizes, len(overall))
    for run in (overall[round(index * (len(overall) - 1) / max(shown - 1, 1))] for index in range(shown)):
        row |= {f"{run['input_size']} {column}": float(run[name]) if run[name] else None for column, name in columns.items()}
    return row


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", action="append", default=[], help=f"(repeatable; default: {', '.join(MODELS)})")
    parser.add_argument("--algorithm", action="append", default=[], help="(repeatable; default: all of the device)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--sizes", type=cli.counts, default=SIZES, help=f"input sizes (default: {','.join(map(str, SIZES))})")
    sizes.add_argument("--num-sizes", type=cli.count, metavar="N", help=f"so many sizes from {DEFAULT_SMALLEST} to "
                       f"{DEFAULT_LARGEST}; 100 are those of 3_full_run.sh")
    parser.add_argument("--batch", type=cli.count, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--warmup", type=cli.count, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--measure", type=cli.count, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--energy-seconds", type=float, default=3.0, metavar="S", help="window of energy (default: 3; 0: none)")
    parser.add_argument("--minutes", type=cli.positive, default=600.0, metavar="M", help="begin nothing after so long")
    args = parser.parse_args()
    workspace = cli.start(args, begins=True)
    if args.num_sizes:
        args.sizes = even_sizes(args.num_sizes, DEFAULT_SMALLEST, DEFAULT_LARGEST)
    folders = measure(workspace, args, resolve_device(args.device))
    most_sizes = None if args.json else len(SIZES)
    cli.print_rows([row for folder in folders if (row := summary_row(folder, most_sizes))], args.json)


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
