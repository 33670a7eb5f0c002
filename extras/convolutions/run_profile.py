"""Profiles a model under one convolution algorithm: time, power and energy of the model, and the time of each layer.

Every nn.Conv2d of a torchvision model runs under the named algorithm: on a GPU through cuDNN, on a CPU by torch or by the
package aithree. A layer that can't run under it is recorded with the library's status; then the model is refused, or, with
--fallback, such layers run under the algorithm that the library chooses.

Writes to extras/convolutions/results/<stage>/<model>_<algorithm>_<gpu>/ (or to --output-dir); the stage is 1_sanity (--test),
2_quick (--quick) or 3_full:
  <model>_<algorithm>_overall.csv   one row for each input size: time, power, energy
  <model>_<algorithm>_layers.csv    one row for each layer and input size
  measurements.jsonl                every sample; the same command resumes where it was stopped
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.benchmark.measuring.blocks import Steadiness
from hase.extras.convolutions.profiler import UnifiedProfiler
from hase.extras.convolutions.profiling.algorithms import ALGORITHMS, algorithm_named
from hase.extras.convolutions.profiling.listing import (
    CPU,
    GPUS,
    MODELS,
    algorithm_rows,
    checked_gpu,
    cuda_row,
    gpu_name,
    model_rows,
    status_rows,
)
from hase.extras.convolutions.profiling.measure import DEFAULT_LARGEST, DEFAULT_SMALLEST, ProfileSettings, even_sizes
from hase.extras.convolutions.profiling.results import finished_rows
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import graph_device, machine, resolve_device
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

EXAMPLES = """
python extras/convolutions/run_profile.py --model vgg16 --algorithm gemm --test
python extras/convolutions/run_profile.py --model vgg16 --algorithm "implicit gemm" --quick --fallback
python extras/convolutions/run_profile.py --model densenet121 --algorithm guess --num-sizes 50 --warmup 5 --measure 15
python extras/convolutions/run_profile.py --list-algorithms --device cuda
"""
log = get_logger("profiler")


class ProfileStage(NamedTuple):
    """How much to measure: folder name, input sizes, and runs before and in each measurement."""

    folder: str
    sizes: int
    warmup: int
    measure: int


STAGES = {"test": ProfileStage("1_sanity", 1, 2, 5), "quick": ProfileStage("2_quick", 10, 5, 15),
          "full": ProfileStage("3_full", 100, 10, 30)}


def settings_of(args: argparse.Namespace) -> ProfileSettings:
    """Settings from the command line. Raises UserError if this machine has another device."""
    device, stage = resolve_device(args.device), STAGES[args.stage]
    gpu = checked_gpu(args.gpu, device) if args.gpu else gpu_name(device)
    algorithm = algorithm_named(args.algorithm, device)
    sizes = even_sizes(args.num_sizes or stage.sizes, args.min_size, args.max_size)
    return ProfileSettings(
        model=args.model, algorithm=algorithm.name, gpu=gpu, device=device, device_name=machine(device).device_name,
        batch=args.batch, dtype=args.dtype, tf32=device == "cuda" and not args.no_tf32, fallback=args.fallback,
        input_sizes=sizes, warmup=args.warmup or stage.warmup, measure=args.measure or stage.measure)


def folder_of(args: argparse.Namespace, workspace: Workspace, gpu: str, algorithm: str) -> Path:
    """The results folder."""
    if args.output_dir is not None:
        return Path(args.output_dir)
    return workspace.convolution_results / STAGES[args.stage].folder / f"{args.model}_{algorithm.replace(' ', '_')}_{gpu}"


def planned_folder(args: argparse.Namespace, workspace: Workspace) -> Path:
    """The results folder for the device of --gpu, which need not be in this machine."""
    gpu = args.gpu or gpu_name(resolve_device(args.device))
    if gpu not in (*GPUS, CPU):
        raise UserError(f"{gpu}: no such device; known are {', '.join(GPUS)} and {CPU}")
    algorithm = algorithm_named(args.algorithm, "cpu" if gpu == CPU else "cuda")
    return folder_of(args, workspace, gpu, algorithm.name)


def print_information(args: argparse.Namespace, workspace: Workspace) -> bool:
    """Prints what one of the options --list-models … --print-folder asks for; False if none of them is given."""
    if args.list_models:
        cli.print_rows(model_rows(), args.json)
    elif args.list_algorithms:
        cli.print_rows(algorithm_rows(graph_device(args.device)), args.json)
    elif args.check_cuda:
        cli.print_rows([cuda_row()], args.json)
    elif args.status:
        root = args.output_dir or workspace.convolution_results
        rows = status_rows(root)
        if not rows:
            log.info("%s: nothing has been measured yet; begin with: extras/convolutions/1_sanity_check.sh vgg16 gemm h200",
                     root)
        cli.print_rows(rows, args.json)
    elif args.print_folder:
        print(planned_folder(args, workspace))
    else:
        return False
    return True


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", help=f"a torchvision classification model: {', '.join(MODELS)}, or another")
    parser.add_argument("--algorithm", help=f"on a GPU {', '.join(ALGORITHMS['cuda'])}; on a CPU "
                        f"{', '.join(ALGORITHMS['cpu'])} (blanks, underscores and dashes are the same)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--gpu", help=f"the device that should be here: {', '.join(GPUS)} or {CPU}")
    stages = parser.add_mutually_exclusive_group()
    for name, stage in STAGES.items():
        stages.add_argument(f"--{name}", dest="stage", action="store_const", const=name, default="full",
                            help=f"{stage.sizes} input size{'s' * (stage.sizes > 1)}, {stage.measure} runs each"
                            + " (the default)" * (name == "full"))
    parser.add_argument("--num-sizes", type=cli.count, metavar="N", help="number of input sizes, in place of the stage's")
    parser.add_argument("--min-size", type=cli.count, default=DEFAULT_SMALLEST, metavar="PIXELS",
                        help=f"default: {DEFAULT_SMALLEST}")
    parser.add_argument("--max-size", type=cli.count, default=DEFAULT_LARGEST, metavar="PIXELS",
                        help=f"default: {DEFAULT_LARGEST}")
    parser.add_argument("--warmup", type=cli.count, metavar="N", help="runs before a measurement, in place of the stage's")
    parser.add_argument("--measure", type=cli.count, metavar="N", help="runs in a measurement, in place of the stage's")
    parser.add_argument("--batch", type=cli.count, default=1, metavar="N", help="images in a run (default: 1)")
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--no-tf32", action="store_true", help="fp32 without TF32, which torch and cuDNN use since Ampere")
    parser.add_argument("--fallback", action="store_true",
                        help="layers that can't run under --algorithm run under the library's own choice")
    parser.add_argument("--energy-seconds", type=float, default=3.0, metavar="S",
                        help="window in which power and energy are measured (default: 3; 0: none)")
    parser.add_argument("--retry-failed", action="store_true", help="measure sizes again that failed earlier")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="write there, in place of extras/convolutions/results/…")
    parser.add_argument("--print-folder", action="store_true", help="check the names, print the folder of the results, and end")
    parser.add_argument("--list-models", action="store_true", help="print the models, and end")
    parser.add_argument("--list-algorithms", action="store_true",
                        help="print the device's algorithms, and why some never run there, and end; --device cuda works on "
                             "a machine without a GPU, too")
    parser.add_argument("--check-cuda", action="store_true", help="print the GPU and its libraries, and end")
    parser.add_argument("--status", action="store_true", help="print what has been measured so far, and end")
    args = parser.parse_args()
    listing = args.list_models or args.list_algorithms or args.check_cuda or args.status
    if not listing and not (args.model and args.algorithm):
        parser.error("--model and --algorithm are needed; --list-models and --list-algorithms show them")
    if args.energy_seconds < 0:
        parser.error(f"--energy-seconds {args.energy_seconds:g}: 0 or more")
    workspace = cli.start(args)
    if print_information(args, workspace):
        return
    settings = settings_of(args)
    folder = folder_of(args, workspace, settings.gpu, settings.algorithm)
    steadiness = Steadiness(attempts=1, patience_s=0.0) if args.stage == "test" else None
    UnifiedProfiler(settings, args.energy_seconds, steadiness, args.retry_failed).profile(folder)
    rows = finished_rows(folder, settings)
    cli.print_rows(rows, args.json)
    failed = [row for row in rows if row["status"] != "ok"]
    if len(failed) == len(rows):
        raise UserError(failed[0]["error"])
    if failed:
        log.warning("%d of %d input sizes failed (column error); --retry-failed measures them again", len(failed), len(rows))
    log.info("tables: %s", folder)


if __name__ == "__main__":
    cli.run(main, kept="what was measured")
