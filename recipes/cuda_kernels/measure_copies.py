"""Measures what copies between host and GPU cost a CUDA session, by the size of their tensor, and what it costs the host to
wait for the GPU at nodes whose output sizes depend on data.

Needs an NVIDIA GPU. ONNX Runtime inserts copies around nodes that only its CPU provider runs (here BitwiseNot). For each size
it times graphs alternately: `Abs → Abs` on the GPU; `BitwiseNot` alone in a session on the CPU; `Abs → BitwiseNot` with its
output on the host, which copies to the host; `BitwiseNot → Abs` with its input there, which copies to the GPU; and
`Abs → (BitwiseNot → Abs)` once and four times. Then it times one, four and eight nodes that wait for the GPU, side by side.
Writes raw samples next to the target's dataset, where training reads them (or to --out).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hase.records.dataset_files import CopyTimes, MeasuredCopies, WaitTimes, copies_path
from hase.runtimes import local_target
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda, machine
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.logger import progress
from hase.utils.ort_sessions import open_session
from hase.utils.timing import timed, turns

SIZES = tuple(4 << power for power in (0, 4, 8, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 26))  # bytes; to 256 MiB
WAITING_ELEMENTS = (256, 4096, 65536)
WAITING = ("NonZero", "Compress", "NonMaxSuppression")
WAITING_NODES = (1, 4, 8)  # in one graph
ROUNDS = 3
RUNS = 30
LONGEST_S = 0.1  # limit per graph, size and round
LEAST_RUNS = 3
EXAMPLES = """
python recipes/cuda_kernels/measure_copies.py --workspace out/pool
python recipes/cuda_kernels/measure_copies.py --out copies.json --device cpu   # a try without a GPU: nothing is copied
"""
Side = Literal["cpu", "cuda"]


class TimedGraph(NamedTuple):
    """A graph to time: the model, the device of its session, and where its inputs and outputs are."""

    model: bytes
    device: Side
    inputs_on: Side
    outputs_on: Side


def chain(operators: Sequence[str], elements: int) -> bytes:
    """A graph of one-input operators in sequence, on int32 tensors."""
    names = [f"t{index}" for index in range(len(operators) + 1)]
    nodes = [onnx.helper.make_node(op, [names[index]], [names[index + 1]], f"n{index}") for index, op in enumerate(operators)]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [elements]) for name in (names[0], names[-1])]
    return _model(nodes, values[:1], values[1:], [])


def graphs_of(elements: int, gpu: Side) -> dict[str, TimedGraph]:
    """The graphs timed at one size, by the names in `CopyTimes`."""
    def graph(device: Side, inputs_on: Side, outputs_on: Side, *operators: str) -> TimedGraph:
        return TimedGraph(chain(operators, elements), device, inputs_on, outputs_on)

    return {"gpu": graph(gpu, gpu, gpu, "Abs", "Abs"), "one": graph(gpu, gpu, gpu, "Abs"),
            "cpu": graph("cpu", "cpu", "cpu", "BitwiseNot"),
            "to_host": graph(gpu, gpu, "cpu", "Abs", "BitwiseNot"), "to_gpu": graph(gpu, "cpu", gpu, "BitwiseNot", "Abs"),
            "through_one": graph(gpu, gpu, gpu, "Abs", "BitwiseNot", "Abs"),
            "through_four": graph(gpu, gpu, gpu, "Abs", *["BitwiseNot", "Abs"] * 4)}


def waiting_graph(operator: str, elements: int, count: int, gpu: Side) -> TimedGraph:
    """`count` nodes of an operator whose output size depends on data, all with the same inputs."""
    types, helper = onnx.TensorProto, onnx.helper
    boxes = elements // 16
    shapes = {"NonZero": {"x": (types.FLOAT, [elements])},
              "Compress": {"x": (types.FLOAT, [elements]), "kept": (types.BOOL, [elements])},
              "NonMaxSuppression": {"boxes": (types.FLOAT, [1, boxes, 4]), "scores": (types.FLOAT, [1, 1, boxes])}}
    limits = [onnx.numpy_helper.from_array(np.array(100, np.int64), "most"),
              onnx.numpy_helper.from_array(np.array(0.5, np.float32), "overlap")] if operator == "NonMaxSuppression" else []
    inputs = [helper.make_tensor_value_info(name, *type_and_shape) for name, type_and_shape in shapes[operator].items()]
    names = [*shapes[operator], *(limit.name for limit in limits)]
    outs = [f"y{number}" for number in range(count)]
    nodes = [helper.make_node(operator, names, [out], f"n{out}") for out in outs]
    outputs = [helper.make_tensor_value_info(out, types.FLOAT if operator == "Compress" else types.INT64, None) for out in outs]
    return TimedGraph(_model(nodes, inputs, outputs, limits), gpu, gpu, gpu)


def _model(nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: Sequence[Any]) -> bytes:
    graph = onnx.helper.make_graph(nodes, "copies", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


def runner(timed: TimedGraph) -> Callable[[], Any]:
    """A function that runs a graph once, with inputs and outputs on their devices."""
    session = open_session(timed.model, timed.device, optimize="none", name="copies")
    binding, generator = session.io_binding(), np.random.default_rng(0)
    for value in session.get_inputs():
        if "int32" in value.type:
            array = np.arange(value.shape[0], dtype=np.int32)
        else:
            array = generator.standard_normal(value.shape, np.float32)
            array = array > 0 if "bool" in value.type else array
        binding.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(array, timed.inputs_on, 0))
    for value in session.get_outputs():
        binding.bind_output(value.name, timed.outputs_on)
    return lambda: session.run_with_iobinding(binding)


def times_ms(run: Callable[[], Any]) -> list[float]:
    """Latencies of consecutive runs after two warm-up runs; fewer than RUNS if they are long."""
    run_s = timed(run)
    for _ in range(2):
        run()
    return [round(1e3 * run_s(), 5) for _ in turns(LEAST_RUNS, LONGEST_S, RUNS)]


def samples_ms(graphs: Mapping[str, TimedGraph]) -> dict[str, tuple[float, ...]]:
    """Samples of each graph by name; the graphs take turns."""
    runs = {name: runner(timed) for name, timed in graphs.items()}
    samples_of: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            samples_of[name] += times_ms(run)
    return {name: tuple(samples) for name, samples in samples_of.items()}


def measure(gpu: Side, sizes: Sequence[int]) -> tuple[tuple[CopyTimes, ...], tuple[WaitTimes, ...]]:
    """Measures all sizes, then the nodes that wait."""
    copies = tuple(CopyTimes(bytes=size, samples_ms=samples_ms(graphs_of(size // 4, gpu)))
                   for size in progress(sizes, "copies"))
    waits = tuple(WaitTimes(operator=operator, elements=elements, samples_ms=samples_ms(
        {str(count): waiting_graph(operator, elements, count, gpu) for count in WAITING_NODES}))
        for operator in WAITING for elements in WAITING_ELEMENTS)
    return copies, waits


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, help="where the samples go (default: next to the target's dataset)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: all on the CPU, to try the command without a GPU (default: cuda)")
    parser.add_argument("--most-mib", type=cli.positive, default=256.0, help="largest tensor (default: 256)")
    args = parser.parse_args()
    workspace = cli.start(args)
    if args.device == "cuda" and not has_cuda():
        raise UserError("copies between host and GPU need an NVIDIA GPU, and the driver of this machine finds none")
    copies, waits = measure(args.device, [size for size in SIZES if size <= args.most_mib * 2**20])
    target = local_target(args.device)
    measured = MeasuredCopies(target=target.name, machine=machine(args.device), copies=copies, waits=waits)
    files.write_json(args.out or copies_path(workspace.dataset(target.name)), measured)
    cli.print_table([{"bytes": copy.bytes, **{name: round(1e3 * min(samples), 1) for name, samples in copy.samples_ms.items()}}
                     for copy in copies], "shortest run, microseconds")
    return 0


if __name__ == "__main__":
    cli.run(main)
