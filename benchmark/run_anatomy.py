"""Where the time of a run on a GPU goes: the host's dispatch, the GPU's work, and the GPU's idle time.

Reads ONNX models (files or folders). Times each whole model, and the host's dispatch alone, while a probe finds the host
undisturbed. Then another process traces a few runs, since a process that used CUPTI launches more slowly from then on. Prints
one row per model and batch; shares are of the latency without the tracer. Shares above 100 % come from the tracer, which slows
the host down: the excess is nearly all time in which the GPU waits for the host, and the GPU's own work takes as long as
before. Writes only, with --trace, the traced run.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hase.benchmark.measuring.quiet_host import PATIENCE
from hase.ort_analysis.isolated.analysis import own_sizes, record_of, weight_files
from hase.records.kernel_record import record_name
from hase.records.measurement import Effort
from hase.records.traces import PARTS, Anatomy, GpuRun, anatomy_of, measured_trace, typical_run
from hase.runtimes import local_flavour
from hase.runtimes.protocol import Request, Worker
from hase.utils import cli, files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.locks import measuring
from hase.utils.logger import get_logger, progress
from hase.utils.timing import summarize

log = get_logger("anatomy")
TIMEOUT_S = 120.0  # for opening a model and its runs, without waiting for the host
TITLES = {"kernels_us": "kernels (µs)", "copies_us": "copies (µs)", "waiting_us": "waiting for the host (µs)",
          "gaps_us": "gaps between launches (µs)", "before_us": "before the first (µs)", "after_us": "after the last (µs)"}
EXAMPLES = """
python benchmark/run_anatomy.py --model resnet18.onnx --dim batch=1,16,64
python benchmark/run_anatomy.py --model models/ --json
python benchmark/run_anatomy.py --model resnet18.onnx --dim batch=1 --trace real.json
"""


@dataclass(frozen=True)
class TracedModel:
    """A model at one size; `static`: dimensions are fixed before ONNX Runtime optimises it."""

    path: Path
    dims: dict[str, int]
    batch: int | None
    static: bool = False

    @property
    def name(self) -> str:
        return record_name(self.path.stem, self.dims, self.static or not self.dims)


class ModelAnatomy(Frozen):
    """Where a model's time goes. Printed by `--json`, with the shares of the latency."""

    model: str
    batch: int | None
    latency_ms: float  # median latency without the tracer
    host_ms: float  # median time of the dispatch alone, without the tracer and without waiting for the GPU
    disturbance: float  # by how much other work slowed the host down, a ratio (see quiet_host.py)
    traced: Anatomy  # the traced run of median length

    def share(self, part_us: float) -> float:
        """Ratio of a time to the latency."""
        return part_us / (1000 * self.latency_ms)


def runs_of(paths: Sequence[Path], dims: Mapping[str, Sequence[int]], static: bool = False) -> list[TracedModel]:
    """Every model of `paths` with every combination of its sizes. Raises UserError if none has a given dimension."""
    models, unused = [], set(dims)
    for path in dict.fromkeys(paths):
        sizes = own_sizes(path, dims)
        unused -= set(sizes[0])
        records = [record_of(path, local_flavour("cuda"), size, static, weight_files(path)) for size in sizes]
        models += [TracedModel(path.resolve(), record.dims, record.batch, static) for record in records]
    if unused:
        raise UserError(f"--dim {', '.join(sorted(unused))}: not a dynamic dimension of any of these models")
    return models


def measure(model: TracedModel, timer: Worker, tracer: Worker, effort: Effort) -> tuple[ModelAnatomy, GpuRun]:
    """Times a model in one process and traces it in another; also returns the traced run of median length."""
    request = Request(do="model", device="cuda", paths=(str(model.path),), dims=model.dims,
                      static=model.static, host=True, watch_host="quiet", effort=effort)
    timed = {m.label: m for m in timer.answered(request, str(model.path)).measurements}
    run = typical_run(tracer.answered(request.model_copy(update={"do": "model_trace"}), str(model.path)).runs)
    latency, host = timed["latency"], timed["host"]
    return ModelAnatomy(model=model.name, batch=model.batch, latency_ms=summarize(latency.samples_ms).median_ms,
                    host_ms=summarize(host.samples_ms).median_ms,
                    disturbance=max(latency.disturbance or 0.0, host.disturbance or 0.0), traced=anatomy_of(run)), run


def as_json(measured: ModelAnatomy) -> dict[str, Any]:
    """The measurement with each part's share of the latency in percent."""
    shares = {"host": 1000 * measured.host_ms, "launching": measured.traced.launching_us, "traced_run": measured.traced.run_us,
              **{part.removesuffix("_us"): getattr(measured.traced, part) for part in PARTS}}
    return measured.model_dump(mode="json") | {"share_%": {name: 100 * measured.share(time) for name, time in shares.items()}}


def row(measured: ModelAnatomy) -> dict[str, Any]:
    """The measurement as a table row: times, each with its share of the latency."""
    def with_share(time_us: float) -> str:
        return f"{time_us:.0f} ({measured.share(time_us):.0%})"

    return {"model": measured.model, "batch": measured.batch, "latency (µs)": 1000 * measured.latency_ms,
            "host alone (µs)": with_share(1000 * measured.host_ms), "host disturbed by": f"{measured.disturbance:.0%}",
            "launches": measured.traced.launches, "in launch calls (µs)": with_share(measured.traced.launching_us),
            **{title: with_share(getattr(measured.traced, part)) for part, title in TITLES.items()},
            "traced run (µs)": with_share(measured.traced.run_us)}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, nargs="+", required=True, metavar="MODEL",
                        help="ONNX files or folders of them; a bare name is also looked for in model_zoo")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="only a GPU can be traced")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, help="undisturbed time for each timing (default: 1)")
    parser.add_argument("--trace", type=cli.out_file, metavar="FILE",
                        help="write the traced run of a single model and size, to open at ui.perfetto.dev or together with a "
                        "prediction (predict_model_latency.py --beside)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    if not has_cuda():
        raise UserError("this command needs a GPU: this machine has no NVIDIA GPU that the driver can talk to")
    if args.device == "cpu":
        raise UserError("this command needs a GPU: give --device cuda")
    models = runs_of(workspace.find_models(args.model), cli.parse_dims(args.dim), args.static)
    if args.trace and len(models) > 1:
        raise UserError(f"--trace draws one run, not {len(models)}: give one model and each --dim one size")
    effort = Effort(warmup=3, warmup_s=0.05, budget_s=args.budget_s, least_runs=10, most_runs=1000)
    timeout_s = TIMEOUT_S + 2 * PATIENCE * args.budget_s
    results, failed = [], []
    with measuring("cuda"), Worker(timeout_s) as timer, Worker(timeout_s) as tracer:
        for model in progress(models, "measuring"):
            try:
                measured, run = measure(model, timer, tracer, effort)
            except UserError as error:
                log.error("%s", error)
                failed.append(model.name)
                continue
            results.append(measured)
            if args.trace:
                files.write_json(args.trace, measured_trace(run))
    if args.json:
        cli.print_json([as_json(result) for result in results])
    else:
        cli.print_table([row(result) for result in results], "where a run's time goes (shares of the latency)")
    if failed:
        log.error("%d of %d failed: %s", len(failed), len(models), ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
