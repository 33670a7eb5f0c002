"""Measures what recurrent layers cost the host, and compares a composition with it.

Opens LSTM, GRU and RNN layers of many sizes, each alone in a session. Times a run, and its dispatch to an idle GPU without
waiting for it. Then it traces a run: how often it gave the GPU work, how long that took, and what the host called for it.
Writes a line of JSON for each layer, --out. Prints how far off a prediction is that takes the GPU's time and the launches as
traced, at the pace of the host meanwhile. --measured reads such a file in place of measuring.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import itertools
import lzma
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks, node_kind, pipeline_ms
from kernel_model.sampling.free_shapes.products import GATES, recurrent_layer
from measuring.gpu_trace import LAUNCHES, attribute, record, trace_events
from recipes.cuda_kernels.dispatch_times import read_probe_us, runs_of, samples_ms, written
from records.kernel_record import Kernel
from runtimes.ort.building.kernel_models import build_model
from runtimes.ort.probes import host_probe
from training.composition.fitted import read_composition
from utils import cli
from utils.errors import UserError
from utils.frozen import Frozen
from utils.paths import SHIPPED

H200 = SHIPPED / "nvidia-h200-cuda-ort1.31-all"
ROUNDS, RUNS, WARM_UP = 3, 6, 4
TRACED = 40  # layers at a time: reading a trace takes seconds
EXAMPLES = """
python recipes/cuda_kernels/measure_recurrent.py --out recurrent.jsonl --minutes 3
python recipes/cuda_kernels/measure_recurrent.py --measured recipes/cuda_kernels/recurrent-nvidia-h200.jsonl.xz
"""


class Layer(NamedTuple):
    """A recurrent layer as wide as its states; `rows` are the sequences that it works on side by side."""

    op: str
    dtype: str
    directions: int
    rows: int
    hidden: int
    steps: int

    def kernel(self) -> Kernel:
        return recurrent_layer(self.op, self.dtype, self.steps, self.rows, self.hidden, self.hidden, self.directions)


class Traced(Frozen):
    """What one run did.

    Attributes:
        launches, busy_us: how often it gave the GPU work, and for how long the GPU worked.
        calls, calls_us: of the host, by CUDA's names: how many, and their time.
        names: how often each CUDA kernel ran.
    """

    launches: int
    busy_us: float
    calls: dict[str, int]
    calls_us: dict[str, float]
    names: dict[str, int]


class MeasuredLayer(Frozen):
    """A line of the file; `dispatch_ms` and `run_ms` are raw samples. Nothing is traced without a GPU."""

    layer: Layer
    dispatch_ms: tuple[float, ...]
    run_ms: tuple[float, ...]
    probe_us: float
    traced: Traced | None = None


def layers() -> list[Layer]:
    """All of them in single precision and some LSTMs in half precision, shuffled."""
    grid = [Layer(*sizes) for sizes in itertools.product(
        GATES, ("float32", "float16"), (1, 2), (1, 2, 4, 16, 64), (64, 128, 256, 512), (24, 72))]
    chosen = [layer for layer in grid if layer.dtype == "float32" or (layer.op == "LSTM" and layer.hidden in (128, 512))]
    random.Random(0).shuffle(chosen)
    return chosen


def traced(runs: Sequence[Callable[[], Any]]) -> list[Traced]:
    """What each of some runs did, which are called once each."""
    events = trace_events(record(runs))
    of_runs = attribute(events, len(runs))
    calls: list[list[tuple[str, float]]] = [[] for _ in runs]
    for event in events:
        if event.get("cat") in LAUNCHES:
            for run, of_run in zip(of_runs, calls, strict=True):
                if run.start_us <= event["ts"] <= run.end_us:
                    of_run.append((event["name"], event["dur"]))
    return [Traced(launches=len(run.work), busy_us=round(run.busy_us, 2), calls=Counter(name for name, _ in of_run),
                   calls_us={name: round(sum(us for called, us in of_run if called == name), 1) for name in dict(of_run)},
                   names=Counter(work.name for work in run.work))
            for run, of_run in zip(of_runs, calls, strict=True)]


def measure(chosen: Iterable[Layer], device: str, seconds: float) -> Iterator[MeasuredLayer]:
    """Each layer, until the time is over."""
    began, probe = time.monotonic(), host_probe(device)
    waiting: list[tuple[MeasuredLayer, Callable[[], Any]]] = []

    def done() -> Iterator[MeasuredLayer]:
        found = traced([run for _, run in waiting]) if device == "cuda" and waiting else [None] * len(waiting)
        for (of_layer, _), what in zip(waiting, found, strict=True):
            yield of_layer.model_copy(update={"traced": what})
        waiting.clear()

    for layer in chosen:
        if time.monotonic() - began > seconds:
            break
        of_layer, run = _timed(layer, device)
        waiting.append((of_layer.model_copy(update={"probe_us": read_probe_us(probe)}), run))
        if len(waiting) == TRACED:
            yield from done()
    yield from done()


def _timed(layer: Layer, device: str) -> tuple[MeasuredLayer, Callable[[], Any]]:
    """The samples of a layer, without the probe's reading, and what runs it once."""
    kernel = layer.kernel()
    runs = runs_of(build_model(kernel).SerializeToString(), kernel, device)
    for _ in range(WARM_UP):
        runs.run()
    dispatch_ms, run_ms = [], []
    for _ in range(ROUNDS):
        dispatch_ms += samples_ms(runs.dispatch_s, RUNS)
        run_ms += samples_ms(runs.run_s, RUNS)
    return MeasuredLayer(layer=layer, dispatch_ms=tuple(dispatch_ms), run_ms=tuple(run_ms), probe_us=0.0), runs.run


def read(path: Path) -> list[MeasuredLayer]:
    """What an earlier run wrote, packed by xz or not.

    Raises:
        UserError: there is no such file, or it is of another kind.
    """
    try:
        with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
            return [MeasuredLayer.model_validate_json(line) for line in lines]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (lzma.LZMAError, UnicodeDecodeError, ValidationError):
        raise UserError(f"{path}: not a file that this command wrote with --out") from None


def compared(measured: Sequence[MeasuredLayer], costs: PipelineCosts, probe_us: float) -> list[dict[str, Any]]:
    """How far the composition is off, by the kind of the node and its steps; the host's time for a launch at its usual pace.

    Args:
        measured: layers that were traced.
        costs: of a run, at the usual pace of the host.
        probe_us: of the host's probe at that pace.
    """
    of_rows: dict[tuple[NodeKind, int], list[tuple[float, float]]] = {}
    for each in measured:
        if each.traced:
            kind = node_kind(each.layer.kernel())
            gpu_ms, launches = each.traced.busy_us / 1e3, float(each.traced.launches)
            tracks = Tracks(np.array([gpu_ms]), np.array([launches]), np.array([int(kind)]))
            pace = each.probe_us / probe_us
            error = pipeline_ms(tracks, costs.at_pace(pace)) / median(each.run_ms) - 1
            launch_us = 1e3 * median(each.dispatch_ms) / launches / pace
            of_rows.setdefault((kind, each.layer.steps), []).append((100 * error, launch_us))
    return [{"node": kind.name.lower(), "steps": steps, "layers": len(errors), "launch_us": median(launch_us),
             "median_error_%": median(errors), "MAPE_%": float(np.abs(errors).mean())}
            for (kind, steps), row in sorted(of_rows.items()) for errors, launch_us in [zip(*row, strict=True)]]


def options() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out", type=cli.out_file, metavar="FILE", help="measure; where the lines of JSON go")
    source.add_argument("--measured", type=Path, metavar="FILE",
                        help="read what an earlier run wrote, packed by xz or not")
    parser.add_argument("--predictors", type=Path, default=H200, metavar="DIR",
                        help="whose composition is compared (default: that of the H200's, which come with Hase)")
    parser.add_argument("--minutes", type=cli.positive, default=5.0, help="stop measuring then (default: 5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: to try the command without a GPU (default: cuda)")
    return parser


def main() -> int:
    args = options().parse_args()
    cli.start(args)
    composition = read_composition(args.predictors)
    if composition.costs is None or composition.probe_us is None:
        raise UserError(f"{args.predictors}: its composition knows no costs of a GPU's host, or not at which pace of the host")
    if args.measured:
        measured = read(args.measured)
    else:
        rows = (layer.model_dump(mode="json") for layer in measure(
            cli.progress(layers(), "measuring"), args.device, 60 * args.minutes))
        measured = [MeasuredLayer.model_validate(row) for row in written(rows, args.out)]
    cli.print_rows(compared(measured, composition.costs, composition.probe_us), args.json, f"{len(measured)} layers")
    return 0


if __name__ == "__main__":
    cli.run(main)
