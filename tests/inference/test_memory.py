"""Peak memory: live activations counted by hand, and against what ONNX Runtime really holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from hase.inference.memory.buffers import buffers_of_run, layouts_of, live_activations
from hase.inference.memory.session import LIBRARIES_MIB, peak_memory
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor
from hase.utils.fingerprint import Flavour

KIB = 1024


def record(text: str, outputs: Sequence[str] = "y", domain: str = "", **kib: int) -> ModelRecord:
    """A record of nodes, "output = Operator input input; ...", over tensors of `kib` KiB. What no node makes is an input of the
    model, or a constant where it has no size; Reshape only renames."""
    kernels, nodes, tensors = {}, [], {name: Tensor(dtype="uint8", shape=(size * KIB,)) for name, size in kib.items()}
    for number, (writes, op_type, *reads) in enumerate(part.replace(" =", "").split() for part in text.split(";")):
        made = tuple(writes.split(","))
        moves = 0 if op_type == "Reshape" else 1
        kernel = Kernel(id=f"{op_type}_{number}", type=op_type, op_type=op_type, domain=domain, opset=1, attributes={},
                        inputs=tuple(KernelInput(dtype="uint8", shape=(kib[name] * KIB,)) for name in reads if name in kib),
                        outputs=tuple(tensors[name] for name in made), flops=1, bytes_read=moves, bytes_written=moves,
                        weight_bytes=0)
        kernels[kernel.id] = kernel
        nodes.append(Node(name=kernel.id, kernel_id=kernel.id, provider="cpu", inputs=tuple(reads), outputs=made))
    inputs = kib.keys() - {name for node in nodes for name in node.outputs}
    return ModelRecord(
        model="m", file_stem="m", group="m", sha256="", dims={}, flavour=Flavour(device="cpu", runtime_version="1.31"),
        derived=False, inputs={name: tensors[name] for name in inputs}, outputs={name: tensors[name] for name in outputs},
        weight_bytes=3 * 2**20, opsets={}, kernels=kernels, nodes=tuple(nodes))


@pytest.mark.parametrize(("model", "peak_kib"), [
    # a tensor lives from its maker to its last reader: x, a and b; then a goes
    (record("a = Conv x; b = Conv a; y = Conv b", x=1, a=10, b=20, y=5), 1 + 10 + 20),
    # a skip connection keeps it alive
    (record("a = Conv x; b = Conv a; c = Conv b; y = Concat a c", x=1, a=10, b=20, c=30, y=40), 1 + 10 + 30 + 40),
    # Relu takes over a, which nobody reads later; but not where a is read again, and not the caller's input
    (record("a = Conv x; b = Relu a; y = Conv b", x=1, a=10, b=10, y=2), 1 + 10 + 2),
    (record("a = Conv x; b = Relu a; y = Conv a b", x=1, a=10, b=10, y=2), 1 + 10 + 10 + 2),
    (record("a = Relu x; y = Conv a", x=10, a=10, y=2), 10 + 10 + 2),
    # an Add works in either of its inputs, and a convolution in blocks adds in place
    (record("a = Conv x; b = Conv x; c = Add x b; y = Conv a c", x=8, a=1, b=8, c=8, y=2), 8 + 1 + 8 + 2),
    (record("a = Conv x; b = Conv x; c = Conv b w z a; y = Conv c", x=1, a=10, b=10, c=10, y=2,
            domain="com.microsoft.nchwc"), 1 + 10 + 10),
    (record("a = Conv x; b = Conv x; c = Conv b w z a; y = Conv c", x=1, a=10, b=10, c=10, y=2), 1 + 10 + 10 + 10),
    # r is a under another name: a lives until r's last reader, once
    (record("a = Conv x; r = Reshape a shape; b = Conv r; y = Conv r b", x=1, a=10, r=10, b=3, y=2), 1 + 10 + 3 + 2),
    # outputs stay, and what nobody reads goes
    (record("y,unread = Split x; b = Conv x; z = Conv b", outputs="yz", x=1, y=10, unread=5, b=20, z=4), 1 + 10 + 20 + 4),
    # c gets the buffer of a, of its size, which therefore lives while b and e do, although nobody reads a any more
    (record("a = Conv x; b = Conv a; e = Conv b; c = Conv e; y = Conv c", x=1, a=10, b=20, e=25, c=10, y=2), 1 + 10 + 20 + 25),
    (record("a = Conv x; b = Conv a; e = Conv b; c = Conv e; y = Conv c", x=1, a=10, b=20, e=25, c=11, y=2), 1 + 20 + 25)])
def test_what_is_alive(model: ModelRecord, peak_kib: int) -> None:
    assert live_activations(model, buffers_of_run(model, layouts_of(model))).peak_bytes == peak_kib * KIB


def test_the_parts_add_up() -> None:
    # x and y are the caller's; a, b and c are the arena's: 4, 3 and 2 MiB in a region each, then a block of 7 MiB in a fourth
    model = record("a = Conv x; b = Conv x a; c = Conv a b; y = Conv c", x=1024, a=4096, b=3072, c=2048, y=2048)
    memory = peak_memory(model)
    assert memory.model_dump() == pytest.approx({
        "weights_mib": 3, "activations_mib": 1 + 9, "arena_mib": 2 + 9, "workspace_mib": 2.444, "loading_mib": 2,
        "peak_mib": 3 + 10 + 11 + 2.444})
    assert peak_memory(model, 5.0).peak_mib == pytest.approx(24 + 5)


def test_on_cuda_the_arena_takes_whole_regions() -> None:
    # 4 MiB for a and as many for y; then the block of the second run fits where a was, but y needs a further region, of 8 MiB,
    # since the first one is still there
    on_cuda = record("a = Add x; y = Add a", x=1024, a=4096, y=4096).model_copy(
        update={"flavour": Flavour(device="cuda", runtime_version="1.31")})
    assert peak_memory(on_cuda).model_dump() == {
        "weights_mib": 3, "activations_mib": 9, "arena_mib": 16 + 1 - 9 - 3, "workspace_mib": LIBRARIES_MIB, "loading_mib": 0,
        "peak_mib": 16 + 1 + LIBRARIES_MIB}


MEASURE = """
import json, sys
import numpy as np, onnxruntime
from pathlib import Path

def held(key):
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith(key))

options = onnxruntime.SessionOptions()
options.enable_cpu_mem_arena = options.enable_mem_pattern = sys.argv[3] == "arena"
small = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
small.run(None, {"x": np.ones((8, 8), np.float32)})  # the runtime's own memory
before = held("VmRSS")
x = np.ones((1024, 1024), np.float32)
session = onnxruntime.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
Path("/proc/self/clear_refs").write_text("5")  # the peak while loading does not count
for _ in range(3):
    session.run(None, {"x": x})
print(json.dumps(held("VmHWM") - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is compared as Linux reports it")
def test_the_prediction_is_what_onnx_runtime_holds(tmp_path: Path) -> None:
    small, large = tmp_path / "small.onnx", tmp_path / "large.onnx"
    for path, side, count in ((small, 8, 1), (large, 1024, 3)):  # x, `count` products of it, and their concatenation
        products = " ".join(f"t{i} = MatMul(x, w{i})" for i in range(count))
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 17]> g (float[{side}, {side}] x) => (float[{side * count}, {side}] y) {{ '
            f"{products} y = Concat <axis = 0> ({', '.join(f't{i}' for i in range(count))}) }}")
        weights = np.random.default_rng(0).random((count, side, side), np.float32)
        model.graph.initializer.extend(numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights))
        onnx.save(model, path)

    def measured_mib(how: str) -> float:
        """Resident memory that running `large` takes, at its peak."""
        done = subprocess.run([sys.executable, "-c", MEASURE, small, large, how], capture_output=True, text=True, check=True,
                              env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})  # freed tensors go back at once
        return float(json.loads(done.stdout))

    predicted = peak_memory(analyze(large, "cpu"))
    assert predicted.weights_mib == pytest.approx(12, abs=0.1)
    assert predicted.activations_mib == pytest.approx(4 + 3 * 4 + 12, abs=0.1)
    assert predicted.arena_mib == pytest.approx(3 * 4, abs=0.1)
    # without the arena each tensor is its own allocation, given back after its last use: the rest is the plan itself
    assert measured_mib("bare") == pytest.approx(predicted.weights_mib + predicted.activations_mib, rel=0.05)
    assert measured_mib("arena") == pytest.approx(predicted.peak_mib - predicted.loading_mib, rel=0.2)
