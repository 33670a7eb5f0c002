"""How long one file takes on this machine: an ONNX file (a kernel or a whole model), or an operator as a function of TVM.

Reads the file, and needs no dataset. ONNX Runtime runs ONNX files, unless --runtime names another runtime. A function of TVM
(`.tvm`, by operator_sampler.py or relax_parser.py) is timed as the collector times it: built for this machine, and its time
includes neither Python nor allocation. Prints mean, median, p95, standard deviation, minimum and maximum in ms, with start and
end (UTC). Inputs are standardised random numbers, or those in a file of yours (--inputs). They lie on the device by default, so
that copies from the host do not count (IOBinding); `--io host` counts them. Writes nothing except, with `--raw`, the samples.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping
from typing import Any

from hase.benchmark.ort.runner import DEFAULT_LOOPS, DEFAULT_WARMUP, Timing, open_runner
from hase.ort_analysis.isolated.analysis import check_opens
from hase.records.measurement import Effort
from hase.runtimes import MODULES, local_target, runtime_named
from hase.runtimes.protocol import Request, RuntimeSetting, Worker
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import DEFAULT_RUNTIME, resolve_device
from hase.utils.locks import measuring
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("runner")
TIMEOUT_S = 600.0  # for another runtime, which may have to compile the file
LEAST_RUNS, MOST_RUNS = 3, 1_000_000  # with a budget of seconds
EXAMPLES = """
python benchmark/ort_kernel_runner.py --model resnet18.onnx --dim batch=1
python benchmark/ort_kernel_runner.py --model "$(ls kernel_model/kernel_onnx/*/*.onnx | head -1)" --loops 100
python benchmark/ort_kernel_runner.py --model resnet18.onnx --budget-s 5 --io host --json
python benchmark/ort_kernel_runner.py --model trees.onnx --inputs rows.npz  # needs your own
python benchmark/ort_kernel_runner.py --model kernel_model/kernel_onnx/cpu-avx512-tvm0.27-fused/Conv_Add.tvm  # needs TVM
python benchmark/ort_kernel_runner.py --model resnet18.onnx --dim batch=1 --runtime tvm  # needs TVM
"""


def measure(model: Path, device: str = "auto", *, dims: Mapping[str, int] | None = None,
            warmup: int = DEFAULT_WARMUP, loops: int | None = None, budget_s: float | None = None,
            io: str = "device", cuda_graph: bool = False, static: bool = False, inputs: Path | None = None) -> Timing:
    """Times one ONNX file in its own session."""
    return open_runner(model, device, dims=dims, io=io, cuda_graph=cuda_graph, static=static, inputs=inputs).time(
        warmup=warmup, loops=loops, budget_s=budget_s)


def runtime_of(model: Path) -> str:
    """The runtime whose kernels have files of this kind; ONNX Runtime for all others."""
    return next((name for name in MODULES if runtime_named(name).kernel_suffix == model.suffix), DEFAULT_RUNTIME)


def measure_by(runtime: str, model: Path, device: str, workspace: Workspace, dims: Mapping[str, int], effort: Effort) -> Timing:
    """Times a kernel or model under another runtime, in its own process. Raises UserError if a function is given sizes."""
    other = runtime_named(runtime)
    other.check()
    other.on(device)
    is_kernel = model.suffix == other.kernel_suffix and model.suffix not in other.model_suffixes
    if is_kernel and dims:
        raise UserError(f"{model}: a function of {other.title} has fixed sizes: leave --dim out, or make one with other "
                        "sizes (docs/tvm.md)")
    setting = RuntimeSetting.of(local_target(device, runtime), workspace.kernel_onnx)
    request = Request(do="alone" if is_kernel else "session", device=device, paths=(str(model),), dims=dict(dims),
                      effort=effort)
    with Worker(TIMEOUT_S, runtime, setting) as worker:
        reply = worker.answered(request, str(model))
    (measured,) = reply.measurements
    return Timing(model=model.stem, device=device, runtime=runtime, io="device", warmup=effort.warmup,
                  samples_ms=measured.samples_ms, started=reply.started, ended=reply.ended)


def row(timing: Timing) -> dict[str, Any]:
    """A timing as a table row."""
    statistics = timing.statistics
    runtime = {} if timing.runtime == DEFAULT_RUNTIME else {"runtime": timing.runtime}
    return {"model": timing.model, "device": timing.device, **runtime, "io": timing.io,
            **{key: value for key, value in statistics.model_dump().items() if key != "spread"},
            "started": timing.started, "ended": timing.ended}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True,
                        help="an ONNX file, or a function of TVM; a bare name is also looked for in model_zoo")
    parser.add_argument("--runtime", choices=tuple(MODULES), help="what runs a model (default: ort; tvm for its functions)")
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
    runtime = args.runtime or runtime_of(model)
    if (file_runtime := runtime_of(model)) not in (DEFAULT_RUNTIME, runtime):
        parser.error(f"{model.name} is a function of {runtime_named(file_runtime).title}, which no other runtime runs; leave "
                     "--runtime out")
    if runtime != DEFAULT_RUNTIME and (args.io != "device" or args.cuda_graph or args.static or args.inputs):
        parser.error(f"--io host, --cuda-graph, --static and --inputs are of ONNX Runtime; {model.name} is timed by {runtime}")
    runs = args.loops or DEFAULT_LOOPS
    least, most = (LEAST_RUNS, MOST_RUNS) if args.budget_s else (runs, runs)
    effort = Effort(warmup=args.warmup, budget_s=args.budget_s or 0.0, least_runs=least, most_runs=most)
    if runtime == DEFAULT_RUNTIME:
        check_opens(model, device, dims, args.static)
    with measuring(device):
        if runtime == DEFAULT_RUNTIME:
            timing = measure(model, device, dims=dims, warmup=args.warmup, loops=args.loops, budget_s=args.budget_s, io=args.io,
                             cuda_graph=args.cuda_graph, static=args.static, inputs=args.inputs)
        else:
            timing = measure_by(runtime, model, device, workspace, dims, effort)
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
