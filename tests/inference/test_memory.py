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
import pytest
from conftest import TORCH_MODELS
from onnx import TensorProto, helper, numpy_helper

from hase.inference.memory.buffers import (
    MIB,
    Activations,
    Arena,
    Block,
    buffers_of_run,
    layout_of,
    layouts_of,
    live_activations,
    scratch_bytes,
)
from hase.inference.memory.session import LIBRARIES_MIB, peak_memory
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor
from hase.records.kernel_types import describe_kernel
from hase.utils.fingerprint import Flavour

KIB = 1024


def vector(kib: int) -> Tensor:
    return Tensor(dtype="uint8", shape=(kib * KIB,))


def record(nodes: Sequence[tuple[str, str, str]], sizes: dict[str, int], inputs: Sequence[str], outputs: Sequence[str],
           domain: str = "") -> ModelRecord:
    """A record of nodes given as (operator, "inputs", "outputs") over tensors of `sizes` KiB; Reshape only renames."""
    kernels, made = {}, []
    for number, (op_type, reads, writes) in enumerate(nodes):
        ins = tuple(KernelInput(dtype="uint8", shape=vector(sizes[name]).shape) for name in reads.split() if name in sizes)
        outs = tuple(vector(sizes[name]) for name in writes.split())
        moves = 0 if op_type == "Reshape" else 1
        kernel = Kernel(id=f"{op_type}_{number}", type=op_type, op_type=op_type, domain=domain, opset=1, attributes={},
                        inputs=ins, outputs=outs, flops=1, bytes_read=moves, bytes_written=moves, weight_bytes=0)
        kernels[kernel.id] = kernel
        made.append(Node(name=kernel.id, kernel_id=kernel.id, provider="cpu", inputs=tuple(reads.split()),
                         outputs=tuple(writes.split())))
    return ModelRecord(
        model="m", file_stem="m", group="m",
        sha256="", dims={}, flavour=Flavour(device="cpu", runtime_version="1.31"), derived=False,
        inputs={name: vector(sizes[name]) for name in inputs}, outputs={name: vector(sizes[name]) for name in outputs},
        weight_bytes=3 * 2**20, opsets={}, kernels=kernels, nodes=tuple(made))


def alive(record: ModelRecord, keeps: bool = True) -> Activations:
    return live_activations(record, buffers_of_run(record, layouts_of(record, record.flavour.device), keeps=keeps))


def peak_kib(*args: object, **kwargs: object) -> float:
    return alive(record(*args, **kwargs)).peak_bytes / KIB  # type: ignore[arg-type]


def test_a_tensor_lives_from_its_maker_to_its_last_reader() -> None:
    # x 1, a 10, b 20, c 5: while b is made x, a and b live (31); then a goes: x, b, c (26)
    assert peak_kib([("Conv", "x", "a"), ("Conv", "a", "b"), ("Conv", "b", "c")], {"x": 1, "a": 10, "b": 20, "c": 5},
                    ["x"], ["c"]) == 31


def test_a_skip_connection_keeps_its_tensor_alive() -> None:
    # a is read again at the end: while c is made x, a, b and c live
    assert peak_kib([("Conv", "x", "a"), ("Conv", "a", "b"), ("Conv", "b", "c"), ("Concat", "a c", "y")],
                    {"x": 1, "a": 10, "b": 20, "c": 30, "y": 40}, ["x"], ["y"]) == 1 + 10 + 30 + 40
    assert peak_kib([("Conv", "x", "a"), ("Conv", "a", "b"), ("Conv", "b", "c"), ("Conv", "a c", "y")],
                    {"x": 1, "a": 10, "b": 20, "c": 30, "y": 2}, ["x"], ["y"]) == 1 + 10 + 20 + 30


def test_in_place_work_takes_no_second_buffer() -> None:
    # Relu takes over a, which nobody reads later
    assert peak_kib([("Conv", "x", "a"), ("Relu", "a", "b"), ("Conv", "b", "y")], {"x": 1, "a": 10, "b": 10, "y": 2},
                    ["x"], ["y"]) == 13
    # but not where a is read again, and not the caller's input
    assert peak_kib([("Conv", "x", "a"), ("Relu", "a", "b"), ("Conv", "a b", "y")], {"x": 1, "a": 10, "b": 10, "y": 2},
                    ["x"], ["y"]) == 23
    assert peak_kib([("Relu", "x", "a"), ("Conv", "a", "y")], {"x": 10, "a": 10, "y": 2}, ["x"], ["y"]) == 22
    # an Add works in either of its inputs
    assert peak_kib([("Conv", "x", "a"), ("Conv", "x", "b"), ("Add", "x b", "c"), ("Conv", "a c", "y")],
                    {"x": 8, "a": 1, "b": 8, "c": 8, "y": 2}, ["x"], ["y"]) == 8 + 1 + 8 + 2


def test_a_blocked_convolution_adds_in_place() -> None:
    nodes = [("Conv", "x", "a"), ("Conv", "x", "b"), ("Conv", "b w z a", "c"), ("Conv", "c", "y")]
    sizes = {"x": 1, "a": 10, "b": 10, "c": 10, "y": 2}
    assert peak_kib(nodes, sizes, ["x"], ["y"], domain="com.microsoft.nchwc") == 1 + 10 + 10
    assert peak_kib(nodes, sizes, ["x"], ["y"]) == 1 + 10 + 10 + 10


def test_a_renaming_shares_its_input() -> None:
    # r is a under another name: a lives until r's last reader, once
    assert peak_kib([("Conv", "x", "a"), ("Reshape", "a shape", "r"), ("Conv", "r", "b"), ("Conv", "r b", "y")],
                    {"x": 1, "a": 10, "r": 10, "b": 3, "y": 2}, ["x"], ["y"]) == 1 + 10 + 3 + 2


def test_outputs_stay_and_unread_tensors_go() -> None:
    assert peak_kib([("Split", "x", "y unread"), ("Conv", "x", "b"), ("Conv", "b", "z")],
                    {"x": 1, "y": 10, "unread": 5, "b": 20, "z": 4}, ["x"], ["y", "z"]) == 1 + 10 + 20 + 4


def test_a_buffer_is_kept_for_the_next_tensor_of_its_shape() -> None:
    # c gets the buffer of a, which therefore lives while b and e do, although nobody reads a any more
    nodes = [("Conv", "x", "a"), ("Conv", "a", "b"), ("Conv", "b", "e"), ("Conv", "e", "c"), ("Conv", "c", "y")]
    sizes = {"x": 1, "a": 10, "b": 20, "e": 25, "c": 10, "y": 2}
    model = record(nodes, sizes, ["x"], ["y"])
    assert alive(model).peak_bytes == (1 + 10 + 20 + 25) * KIB
    assert alive(record(nodes, {**sizes, "c": 11}, ["x"], ["y"])).peak_bytes == (1 + 20 + 25) * KIB
    run = buffers_of_run(model, layouts_of(model))
    assert [[name for name, _ in buffers.made] for buffers in run] == [["a"], ["b"], ["e"], [], []]
    assert [buffers.freed for buffers in run] == [[], [], ["b"], ["e"], ["a"]]


def test_on_cuda_arithmetic_has_a_buffer_of_its_own() -> None:
    model = record([("Conv", "x", "a"), ("Relu", "a", "b"), ("Add", "b w", "c"), ("Conv", "c", "y")],
                   {"x": 1, "a": 10, "b": 10, "c": 10, "y": 2}, ["x"], ["y"])
    cuda = model.model_copy(update={"flavour": Flavour(device="cuda", runtime_version="1.31")})
    assert [alive(each).intermediate_peak_bytes for each in (model, cuda)] == [10 * KIB, 20 * KIB]


def test_how_much_of_an_arena_is_in_use() -> None:
    arena = Arena()
    first, second = arena.allocate(3 * MIB), arena.allocate(2 * MIB)  # each of a region of 4 MiB; the first one is not split
    arena.free(first)
    arena.free(second)
    assert (arena.taken, arena.used) == (8 * MIB, 5 * MIB)
    arena.allocate(3 * MIB)
    assert (arena.taken, arena.used) == (8 * MIB, 5 * MIB)
    arena.allocate(7 * MIB)
    assert (arena.taken, arena.used) == (16 * MIB, 12 * MIB)


def test_a_tensor_lies_in_the_smallest_gap_of_a_block() -> None:
    block = Block()
    places = [block.allocate(size * KIB) for size in (8, 1, 4, 1)]
    block.free(places[0])
    block.free(places[2])
    assert block.allocate(3 * KIB) == (9 * KIB, 12 * KIB)
    assert block.allocate(9 * KIB) == (14 * KIB, 23 * KIB)
    assert block.size == 23 * KIB


def plain_activations(record: ModelRecord) -> Activations:
    """The same by the definition, node by node in quadratic time: which buffers are read later, and how large they are. No
    buffer is kept for another tensor."""
    lasting = {*record.inputs, *record.outputs}
    sizes = {name: tensor.bytes for name, tensor in record.inputs.items()}
    buffer_of = {name: name for name in sizes}
    made_at: dict[str, int] = {}

    def reads_left(buffer: str, since: int) -> int:
        names = {name for name, its_buffer in buffer_of.items() if its_buffer == buffer}
        return sum(name in names for node in record.nodes[since:] for name in node.inputs)

    for step, node in enumerate(record.nodes):
        kernel = record.kernels[node.kernel_id]
        layout = layout_of(kernel, record.flavour.device)
        for place, (name, tensor) in enumerate(zip(node.outputs, kernel.outputs, strict=False)):
            shared: list[str] = []
            if place == 0 and name not in lasting:
                inputs = [buffer_of.get(read) for read in node.inputs]
                shared = [buffer for buffer in inputs[:1] if buffer] if layout.renames else [
                    buffer for slot in layout.in_place if slot < len(inputs) and (buffer := inputs[slot])
                    and buffer not in lasting and reads_left(buffer, step) == 1 and sizes[buffer] == tensor.bytes]
            if name:
                buffer_of[name] = shared[0] if shared else name
                if not shared:
                    sizes[name], made_at[name] = tensor.bytes, step
    intermediate, lent = ([sum(sizes[name] for name, first in made_at.items() if first <= step and (name in lasting) is caller
                               and (caller or first == step or reads_left(name, step)))
                           for step in range(len(record.nodes))] for caller in (False, True))
    inputs_bytes = sum(sizes[name] for name in record.inputs)
    return Activations(max(inputs_bytes + a + b for a, b in zip(intermediate, lent, strict=True)), max(intermediate),
                       inputs_bytes + lent[-1])


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_whole_models_against_the_definition(torch_models: dict[str, Path], name: str, provider: str) -> None:
    model = analyze(torch_models[name], provider)
    plain = plain_activations(model)
    assert alive(model, keeps=False) == plain
    assert alive(model).lent_bytes == plain.lent_bytes
    assert alive(model).peak_bytes >= plain.peak_bytes
    assert peak_memory(model, layouts=layouts_of(model, model.flavour.device)) == peak_memory(model)


def test_the_parts_add_up() -> None:
    # x and y are the caller's; a, b and c are the arena's: 4, 3 and 2 MiB in a region each, then a block of 7 MiB in a fourth
    model = record([("Conv", "x", "a"), ("Conv", "x a", "b"), ("Conv", "a b", "c"), ("Conv", "c", "y")],
                   {"x": 1024, "a": 4096, "b": 3072, "c": 2048, "y": 2048}, ["x"], ["y"])
    memory = peak_memory(model)
    assert memory.model_dump() == pytest.approx({
        "weights_mib": 3, "activations_mib": 1 + 9, "arena_mib": 2 + 9, "workspace_mib": 2.444, "loading_mib": 2,
        "peak_mib": 3 + 10 + 11 + 2.444})
    assert peak_memory(model, 5.0).peak_mib == pytest.approx(24 + 5)


def test_on_cuda_the_arena_takes_whole_regions() -> None:
    # 4 MiB for a and as many for y; then the block of the second run fits where a was, but y needs a further region, of 8 MiB,
    # since the first one is still there
    model = record([("Add", "x", "a"), ("Add", "a", "y")], {"x": 1024, "a": 4096, "y": 4096}, ["x"], ["y"])
    cuda = model.model_copy(update={"flavour": Flavour(device="cuda", runtime_version="1.31")})
    assert peak_memory(cuda).model_dump() == {
        "weights_mib": 3, "activations_mib": 9, "arena_mib": 16 + 1 - 9 - 3, "workspace_mib": LIBRARIES_MIB, "loading_mib": 0,
        "peak_mib": 16 + 1 + LIBRARIES_MIB}


def conv(dtype: str, channels: int, window: int, groups: int = 1, stride: int = 1) -> Kernel:
    """A convolution of an image of 32 × 32."""
    made = 64 if groups == 1 else channels
    image, out = (1, channels, 32, 32), (1, made, 32 // stride, 32 // stride)
    return describe_kernel("Conv", "", 20, {"group": groups, "strides": [stride] * 2}, [
        KernelInput(dtype=dtype, shape=image),
        KernelInput(dtype=dtype, shape=(made, channels // groups, window, window), constant=True)],
        [Tensor(dtype=dtype, shape=out)])


def test_scratch_on_cuda() -> None:
    dense = 4 * (64 * 32 * 32 + 64 * 64 * 9 + 64 * 32 * 32)
    assert [scratch_bytes(kernel, "cuda") for kernel in (
        conv("float32", 64, 3), conv("float32", 64, 1), conv("float32", 64, 3, groups=64), conv("float32", 3, 3),
        conv("float32", 3, 16, stride=16))] == [dense, 0, 0, 0, 0]
    assert scratch_bytes(conv("float32", 3, 7), "cuda") == 4 * (3 * 32 * 32 + 64 * 3 * 49 + 64 * 32 * 32)
    assert scratch_bytes(conv("float16", 64, 3), "cuda") == dense / 2
    assert scratch_bytes(conv("float32", 64, 3)) == 0  # on a CPU


def test_memory_left_after_loading_depends_on_the_kind_of_weight() -> None:
    def left_mib(op_type: str, dtype: str, mib: int) -> float:
        weight = KernelInput(dtype=dtype, shape=(mib * 2**20 // (1 if dtype == "int8" else 4),), constant=True)
        model = record([(op_type, "x", "y")], {"x": 1, "y": 1}, ["x"], ["y"])
        kernels = {name: kernel.model_copy(update={"inputs": (*kernel.inputs, weight)})
                   for name, kernel in model.kernels.items()}
        return peak_memory(model.model_copy(update={"kernels": kernels})).loading_mib

    assert [left_mib(*case) for case in (("Conv", "float32", 10), ("MatMul", "float32", 10), ("QLinearConv", "int8", 10))] == [
        pytest.approx(2 + 18), 2 + 5, 2 + 10]
    assert left_mib("MatMul", "float32", 32) == 2  # such a large weight has its own mapping, which is given back


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
small.run(None, {"x": np.ones((1, 8), np.float32)})  # the runtime's own memory
before = held("VmRSS")
x = np.ones((2048, 2048), np.float32)
session = onnxruntime.InferenceSession(sys.argv[2], options, providers=["CPUExecutionProvider"])
Path("/proc/self/clear_refs").write_text("5")  # the peak while loading does not count
for _ in range(3):
    session.run(None, {"x": x})
print(json.dumps(held("VmHWM") - before))
"""


def measured_mib(small: Path, large: Path, how: str) -> float:
    """Resident memory that running `large` takes, at its peak."""
    done = subprocess.run([sys.executable, "-c", MEASURE, small, large, how], capture_output=True, text=True, check=True,
                          env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})  # freed tensors go back at once
    return float(json.loads(done.stdout))


def products(path: Path, side: int, count: int) -> Path:
    """A model with activations of `side` × `side`: x, `count` products of it, and their concatenation as output."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [side if side > 8 else 1, side])
    nodes = [helper.make_node("MatMul", ["x", f"w{i}"], [f"t{i}"]) for i in range(count)]
    nodes.append(helper.make_node("Concat", [f"t{i}" for i in range(count)], ["y"], axis=0))
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.random((side, side), np.float32), f"w{i}") for i in range(count)]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, path)
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is compared as Linux reports it")
def test_the_prediction_is_what_onnx_runtime_holds(tmp_path: Path) -> None:
    small, large = products(tmp_path / "small.onnx", 8, 1), products(tmp_path / "large.onnx", 2048, 3)
    predicted = peak_memory(analyze(large, "cpu"))
    assert predicted.weights_mib == pytest.approx(48, abs=0.1)
    assert predicted.activations_mib == pytest.approx(16 + 3 * 16 + 48, abs=0.1)
    assert predicted.arena_mib == pytest.approx(3 * 16, abs=0.1)
    # without the arena each tensor is its own allocation, given back after its last use: the rest is the plan itself
    assert measured_mib(small, large, "bare") == pytest.approx(predicted.weights_mib + predicted.activations_mib, rel=0.05)
    assert measured_mib(small, large, "arena") == pytest.approx(predicted.peak_mib - predicted.loading_mib, rel=0.2)
