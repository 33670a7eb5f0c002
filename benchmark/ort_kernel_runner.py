"""How long ONNX Runtime takes to run an ONNX file, a kernel or a whole model.

Reads the file; prints mean, median, p95, standard deviation, minimum and maximum in ms, with start and end (UTC). Inputs are
standardised random numbers, or those in a file of yours (--inputs). They lie on the device by default, so that copies from the
host do not count (IOBinding); `--io host` counts them. Writes nothing except, with `--raw`, the samples.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping
from typing import Any

from runtimes.analysis import check_opens
from runtimes.ort.runner import DEFAULT_LOOPS, DEFAULT_WARMUP, Timing, open_runner
from utils import cli, files
from utils.fingerprint import resolve_device
from utils.locks import measuring
from utils.logger import get_logger

log = get_logger("runner")
EXAMPLES = """
python benchmark/ort_kernel_runner.py --model resnet18.onnx --dim batch=1
python benchmark/ort_kernel_runner.py --model "$(ls kernel_model/kernel_onnx/*/*.onnx | head -1)" --loops 100
python benchmark/ort_kernel_runner.py --model resnet18.onnx --budget-s 5 --io host --json
python benchmark/ort_kernel_runner.py --model trees.onnx --inputs rows.npz  # needs your own
"""


def measure(model: Path, device: str = "auto", *, dims: Mapping[str, int] | None = None,
            warmup: int = DEFAULT_WARMUP, loops: int | None = None, budget_s: float | None = None,
            io: str = "device", cuda_graph: bool = False, static: bool = False, inputs: Path | None = None) -> Timing:
    """Times one ONNX file in a session of its own: opens it with `open_runner` and times it with `Runner.time`.

    Raises:
        UserError: the model can't be loaded or run.
    """
    return open_runner(model, device, dims=dims, io=io, cuda_graph=cuda_graph, static=static, inputs=inputs).time(
        warmup=warmup, loops=loops, budget_s=budget_s)


def row(timing: Timing) -> dict[str, Any]:
    """A timing as one row of a table."""
    statistics = timing.statistics
    return {"model": timing.model, "device": timing.device, "io": timing.io,
            **{key: value for key, value in statistics.model_dump().items() if key != "spread"},
            "started": timing.started, "ended": timing.ended}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="an ONNX file; a bare name is also looked for in model_zoo")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    cli.add_run_mode(parser)
    parser.add_argument("--warmup", type=cli.whole, default=DEFAULT_WARMUP, help="untimed runs first; 0 turns them off")
    parser.add_argument("--no-warmup", action="store_const", const=0, dest="warmup", help="the same as --warmup 0")
    parser.add_argument("--loops", type=cli.count, help=f"timed runs (default: {DEFAULT_LOOPS})")
    parser.add_argument("--budget-s", type=cli.positive, help="time for this many seconds instead of a number of runs")
    parser.add_argument("--raw", type=cli.out_file, metavar="FILE", help="write the raw samples as JSON")
    cli.add_dim(parser)
    cli.add_static(parser)
    cli.add_inputs(parser)
    args = parser.parse_args()
    if args.loops and args.budget_s:
        parser.error("give --loops or --budget-s, not both")
    workspace = cli.start(args)
    device = resolve_device(args.device)
    if args.device == "auto" and device == "cpu":
        log.info("no NVIDIA GPU here: running on the CPU")
    model, dims = workspace.find_model(args.model), cli.one_size_dims(args.dim)
    check_opens(model, device, dims, args.static)
    with measuring(device):
        timing = measure(model, device, dims=dims, warmup=args.warmup, loops=args.loops, budget_s=args.budget_s, io=args.io,
                         cuda_graph=args.cuda_graph, static=args.static, inputs=args.inputs)
    if timing.statistics.unstable:
        log.warning("unstable: half of the runs differ by %.0f %% of the median; close other work on this device, "
                    "or run longer (--loops, --budget-s)", 100 * timing.statistics.spread)
    if args.raw:
        files.write_json(args.raw, timing)
    if args.json:
        cli.print_json(row(timing) | {"samples_ms": timing.samples_ms})
    else:
        cli.print_table([row(timing)])
    return 0


if __name__ == "__main__":
    cli.run(main)
