"""Measures what dispatching a node costs the host, operator by operator, on this machine's GPU.

Draws small kernels of every operator that networks and language models have, and opens each in two graphs: with 8 copies of its
node, side by side, and with 40. A run is dispatched to an idle GPU without waiting for it, so the difference of both, for each
further copy, is the host's time for one node. The same difference of runs that wait says where the GPU is slower instead. Both
graphs take turns. Reads nothing; writes a line of JSON for each kernel: its description, and the raw samples in ms.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, get_args

import numpy as np

from kernel_model.sampling.draws import on_cpu, on_cuda
from kernel_model.sampling.free_shapes.table import Kind, draw_free_kernel
from recipes.cuda_kernels.dispatch_times import read_probe_us, runs_of, samples_ms, written
from records.kernel_record import Kernel
from runtimes.ort.building.kernel_models import build_model
from runtimes.ort.probes import host_probe
from utils import cli
from utils.errors import UserError
from utils.lazy import onnx
from utils.ort_sessions import model_errors

COPIES = (8, 40)
MOST_BYTES, MOST_FLOPS = 2**18, 4e6  # of a kernel, so that the GPU is done before the host is
TRIES = 60_000
ROUNDS, RUNS = 3, 8
EXAMPLES = """
python recipes/cuda_kernels/measure_dispatch.py --out dispatch.jsonl
python recipes/cuda_kernels/measure_dispatch.py --out dispatch.jsonl --each 1 --device cpu   # a try without a GPU
"""


def small_kernels(each: int, device: str, seed: int = 0) -> list[Kernel]:
    """Kernels on which a GPU works for a few microseconds: at most `each` of an operator in an element type."""
    generator, kinds = np.random.default_rng(seed), get_args(Kind)
    found: dict[str, Kernel] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for number in cli.progress(range(TRIES), "drawing"):
        try:
            kernel = draw_free_kernel(int(generator.choice([1, 1, 2, 4])), generator, kinds[number % len(kinds)])
        except (UserError, ValueError, IndexError, KeyError, ZeroDivisionError):
            continue  # sizes that do not fit together are what drawing at random gives
        of = kernel.op_type, kernel.dtype
        if (counts[of] < each and kernel.id not in found and kernel.flops < MOST_FLOPS
                and kernel.bytes_read + kernel.bytes_written < MOST_BYTES
                and (on_cuda(kernel) if device == "cuda" else on_cpu(kernel))):
            found[kernel.id] = kernel
            counts[of] += 1
    return list(found.values())


def repeated_model(kernel: Kernel, copies: int) -> bytes:
    """The kernel's node `copies` times, all of which read the same inputs; the outputs of the first are the graph's."""
    model = build_model(kernel)
    node = next(node for node in model.graph.node if node.op_type == kernel.op_type)
    for copy in range(1, copies):
        further = onnx.NodeProto()
        further.CopyFrom(node)
        further.name = f"{node.name}_{copy}"
        further.output[:] = [f"{name}_{copy}" if name else "" for name in node.output]
        model.graph.node.append(further)
    return bytes(model.SerializeToString())


def samples_of(kernel: Kernel, device: str) -> dict[str, dict[str, list[float]]]:
    """Samples by what is timed (`dispatch`, `run`) and the number of copies."""
    with model_errors(kernel.id):
        graphs = {str(copies): runs_of(repeated_model(kernel, copies), kernel, device) for copies in COPIES}
        for runs in graphs.values():
            for _ in range(3):
                runs.run()
        taken: dict[str, dict[str, list[float]]] = {what: {copies: [] for copies in graphs} for what in ("dispatch", "run")}
        for _ in range(ROUNDS):
            for copies, runs in graphs.items():
                taken["dispatch"][copies] += samples_ms(runs.dispatch_s, RUNS)
                taken["run"][copies] += samples_ms(runs.run_s, RUNS)
    return taken


def each_us(samples: dict[str, list[float]]) -> float:
    """Microseconds for each further copy of a node."""
    few, many = COPIES
    return 1e3 * (median(samples[str(many)]) - median(samples[str(few)])) / (many - few)


def measured(kernels: Sequence[Kernel], device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each kernel, until the time is over; those that the provider refuses are told apart."""
    began, probe = time.monotonic(), host_probe(device)
    for kernel in cli.progress(kernels, "measuring"):
        if time.monotonic() - began > seconds:
            return
        try:
            taken = samples_of(kernel, device)
        except UserError as error:
            yield {"kernel": kernel.model_dump(mode="json"), "refused": str(error)}
            continue
        yield {"kernel": kernel.model_dump(mode="json"), "samples_ms": taken, "probe_us": read_probe_us(probe)}


def options() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="where the lines of JSON go")
    parser.add_argument("--each", type=cli.count, default=4, help="kernels of each operator and element type (default: 4)")
    parser.add_argument("--minutes", type=cli.positive, default=60.0, help="stop then (default: 60)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: to try the command without a GPU (default: cuda)")
    return parser


def main() -> int:
    args = options().parse_args()
    cli.start(args)
    kernels = small_kernels(args.each, args.device)
    random.Random(1).shuffle(kernels)
    rows: dict[str, list[float]] = {}
    refused = 0
    for row in written(measured(kernels, args.device, 60 * args.minutes), args.out):
        if "refused" in row:
            refused += 1
        else:
            rows.setdefault(row["kernel"]["op_type"], []).append(each_us(row["samples_ms"]["dispatch"]))
    cli.print_table([{"operator": name, "kernels": len(times), "dispatch_us": round(median(times), 2)}
                     for name, times in sorted(rows.items(), key=lambda item: median(item[1]))],
                    f"the host's time for a node; {refused} kernels refused")
    return 0


if __name__ == "__main__":
    cli.run(main)
