"""Measures how much time a node that only the CPU provider runs costs a CUDA session, by the size of its tensor.

Needs an NVIDIA GPU. For each size two graphs are timed alternately: `Abs → Abs`, all on the GPU, and `Abs → BitwiseNot → Abs`,
where BitwiseNot runs on the CPU between a copy to the host and one back. Writes raw samples, ONNX Runtime's profile of each
graph and the CPU node's own time:

    python recipes/cuda_kernels/measure_copies.py --out copies.json
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import tempfile
import time
from typing import Any

import numpy as np

from utils import cli, files
from utils.fingerprint import machine
from utils.lazy import onnx, onnxruntime
from utils.ort_sessions import open_session

SIZES = (4, 64, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864, 268435456)  # bytes
ROUNDS = 5
RUNS = 30
LONGEST_S = 1.0  # of one graph at one size, in each round
EXAMPLES = "python recipes/cuda_kernels/measure_copies.py --out copies.json"


def graph_of(elements: int, through_host: bool, chained: int) -> bytes:
    """`Abs → (BitwiseNot → Abs) × chained`, or the same without the CPU's nodes, on int32 tensors of `elements`."""
    nodes, tensor = [onnx.helper.make_node("Abs", ["x"], ["a0"], name="abs0")], "a0"
    for number in range(chained):
        if through_host:
            nodes.append(onnx.helper.make_node("BitwiseNot", [tensor], [f"b{number}"], name=f"not{number}"))
            tensor = f"b{number}"
        nodes.append(onnx.helper.make_node("Abs", [tensor], [f"a{number + 1}"], name=f"abs{number + 1}"))
        tensor = f"a{number + 1}"
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [elements]) for name in ("x", tensor)]
    graph = onnx.helper.make_graph(nodes, "copies", values[:1], values[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def bound(session: Any, elements: int, device: str) -> Any:
    """An IOBinding with input and output on `device`."""
    binding = session.io_binding()
    values = np.arange(elements, dtype=np.int32)
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(values, device, 0))
    binding.bind_ortvalue_output(session.get_outputs()[0].name,
                                 onnxruntime.OrtValue.ortvalue_from_shape_and_type([elements], np.int32, device, 0))
    return binding


def times_us(session: Any, binding: Any) -> list[float]:
    """Latencies of consecutive runs, after three warm-up runs; fewer than RUNS if they are long."""
    for _ in range(3):
        session.run_with_iobinding(binding)
    found: list[float] = []
    end = time.perf_counter() + LONGEST_S
    while len(found) < RUNS and (time.perf_counter() < end or len(found) < 3):
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        found.append(round(1e6 * (time.perf_counter() - begin), 2))
    return found


def profiled(model: bytes, elements: int, folder: Path) -> list[dict[str, Any]]:
    """Node events of the last of six runs under ONNX Runtime's profiler: name, start and duration in microseconds."""
    session = open_session(model, "cuda", optimize="none", name="copies", profile_prefix=folder / f"p{elements}")
    binding = bound(session, elements, "cuda")
    for _ in range(6):
        session.run_with_iobinding(binding)
    events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    last = nodes[-len(nodes) // 6:]
    return [{"name": event["name"], "ts": event["ts"], "dur": event["dur"], "provider": event["args"].get("provider")}
            for event in last]


def measure(chained: int, folder: Path) -> list[dict[str, Any]]:
    """Measures all sizes, with `chained` nodes on the host in one run."""
    found = []
    for size in SIZES:
        elements = size // 4
        models = {"gpu": graph_of(elements, False, chained), "host": graph_of(elements, True, chained)}
        sessions = {name: open_session(model, "cuda", optimize="none", name=name) for name, model in models.items()}
        sessions["cpu"] = open_session(models["host"], "cpu", optimize="none", name="cpu")
        bindings = {name: bound(session, elements, "cpu" if name == "cpu" else "cuda") for name, session in sessions.items()}
        samples: dict[str, list[list[float]]] = {name: [] for name in sessions}
        for _ in range(ROUNDS):
            for name, session in sessions.items():
                samples[name].append(times_us(session, bindings[name]))
        found.append({"bytes": size, "chained": chained, "samples_us": samples,
                      "profile": profiled(models["host"], elements, folder)})
    return found


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, help="where the samples go")
    args = parser.parse_args()
    cli.start(args)
    with tempfile.TemporaryDirectory(prefix="hase-") as folder:
        found = [one for chained in (1, 4) for one in measure(chained, Path(folder))]
    files.write_json(args.out, {"machine": machine("cuda").model_dump(mode="json"), "sizes": found})
    rows = [{"bytes": one["bytes"], "chained": one["chained"],
             **{name: min(min(part) for part in parts) for name, parts in one["samples_us"].items()}} for one in found]
    cli.print_table(rows, "shortest run, microseconds")
    return 0


if __name__ == "__main__":
    cli.run(main)
