"""What ONNX Runtime can't capture as a CUDA graph: real graphs, and all models that an H200 tried to capture."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.inference import predict
from hase.inference.prediction.conditions import RunMode
from hase.ort_analysis.cuda.placement import capture_obstacle
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import journal_path, read_header
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Block
from hase.records.operators import TABLE
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
CAPTURED = RunMode(cuda_graph=True)


def value(name: str, *shape: int | str, element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto],
          weights: tuple[onnx.TensorProto, ...] = ()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def wide(joined: int) -> onnx.ModelProto:
    """A Concat of `joined` tensors after a Concat of two."""
    names = [f"x{place}" for place in range(joined)]
    return model([helper.make_node("Concat", names[:2], ["two"], "narrow", axis=1),
                  helper.make_node("Relu", ["two"], ["y2"], "relu"),
                  helper.make_node("Concat", ["y2", *names[1:]], ["y"], "wide", axis=1)],
                 [value(name, 1, 4, 8, 8) for name in names], [value("y", 1, 4 * joined + 4, 8, 8)])


def unequal_split() -> onnx.ModelProto:
    return model([helper.make_node("Split", ["x", "parts"], ["a", "b"], "split", axis=1)], [value("x", 1, 14, 8)],
                 [value("a", 1, 3, 8), value("b", 1, 11, 8)], (numpy_helper.from_array(np.array([3, 11]), "parts"),))


def choice() -> onnx.ModelProto:
    """An If, whose branches ONNX Runtime runs as separate graphs."""
    branches = {name: helper.make_graph([helper.make_node(op, ["x"], [f"z{op}"])], op, [], [value(f"z{op}", 4)])
                for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))}
    return model([helper.make_node("If", ["condition"], ["y"], "choose", **branches)],
                 [value("condition", element=TensorProto.BOOL), value("x", 4)], [value("y", 4)])


def boxes() -> onnx.ModelProto:
    """Boxes that are selected by their scores."""
    limits = [numpy_helper.from_array(np.array([number], dtype), name)
              for name, number, dtype in (("most", 5, np.int64), ("overlap", 0.5, np.float32), ("least", 0.1, np.float32))]
    return model([helper.make_node("Sigmoid", ["raw"], ["scores"], "score"),
                  helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["y"], "select")],
                 [value("boxes", 1, 40, 4), value("raw", 1, 3, 40)], [value("y", "n", 3, element=TensorProto.INT64)],
                 tuple(limits))


def chosen(op: str, inputs: list[str]) -> onnx.ModelProto:
    """A choice of elements, by their values (NonZero) or by a condition (Compress)."""
    kind = TensorProto.INT64 if op == "NonZero" else TensorProto.FLOAT
    return model([helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node(op, inputs, ["y"], "choose")],
                 [value("x", 16), *([value("keep", 16, element=TensorProto.BOOL)] if op == "Compress" else [])],
                 [value("y", *("1n" if op == "NonZero" else "n"), element=kind)])


def only_on_the_cpu() -> onnx.ModelProto:
    """An operator that the CUDA provider lacks, of which everything else is the CPU's too, so that nothing is copied."""
    return model([helper.make_node("Acos", ["x"], ["y"], "acos")], [value("x", 64)], [value("y", 64)])


def resized() -> onnx.ModelProto:
    """Sizes that are computed from a shape: half the last axis."""
    numbers = [numpy_helper.from_array(np.array([number]), name) for name, number in (("last", 1), ("two", 2), ("rest", -1))]
    return model([helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node("Shape", ["r"], ["shape"], "shape"),
                  helper.make_node("Gather", ["shape", "last"], ["width"], "width"),
                  helper.make_node("Div", ["width", "two"], ["half"], "half"),
                  helper.make_node("Concat", ["rest", "half"], ["to"], "to", axis=0),
                  helper.make_node("Reshape", ["r", "to"], ["z"], "view"), helper.make_node("Exp", ["z"], ["y"], "exp")],
                 [value("x", "batch", "width")], [value("y", "b", "w")], tuple(numbers))


WAITS = "makes the host wait for the size of its output"


@pytest.mark.parametrize(("proto", "message"), [
    (boxes(), f"select (NonMaxSuppression) {WAITS}"), (chosen("NonZero", ["r"]), f"choose (NonZero) {WAITS}"),
    (chosen("Compress", ["r", "keep"]), f"choose (Compress) {WAITS}"), (only_on_the_cpu(), "acos (Acos) runs on the CPU"),
    (wide(32), None), (wide(33), "wide joins 33 inputs, and a Concat of more than 32 copies tables from the host"),
    (unequal_split(), None), (choice(), "choose (If) holds a graph of its own")])
def test_nodes_that_forbid_capture(proto: onnx.ModelProto, message: str | None) -> None:
    assert capture_obstacle(analyze(proto, "cuda")) == message


def test_every_operator_that_waits_is_refused() -> None:
    """As far as the table of operators says."""
    record = analyze(wide(2), "cuda")
    relu = next(node for node in record.nodes if node.name == "relu")
    waiting = [row.name for row in TABLE if row.waits_for_size]
    assert {"NonMaxSuppression", "NonZero", "Compress"} <= set(waiting)
    for op_type in waiting:
        kernels = {**record.kernels, relu.kernel_id: record.kernel_of(relu).model_copy(update={"op_type": op_type})}
        assert capture_obstacle(record.model_copy(update={"kernels": kernels})) == f"relu ({op_type}) {WAITS}"


def test_copies_forbid_capture() -> None:
    """The CUDA provider has no Acos, so what it reads is copied to the host."""
    proto = model([helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node("Acos", ["r"], ["y"], "acos")],
                  [value("x", 64)], [value("y", 64)])
    assert str(capture_obstacle(analyze(proto, "cuda"))).endswith("(MemcpyToHost) copies between the host and the GPU")


@pytest.mark.slow
def test_every_model_of_the_shipped_dataset(h200_workspace: Workspace) -> None:
    """For the shipped dataset, exactly the models whose capture failed have an obstacle."""
    folder = h200_workspace.dataset(TARGET)
    flavour = read_header(folder).target.flavour
    lines = journal_path(folder).read_text().splitlines()
    captures = [m for line in lines if '"cuda_graph"' in line for m in Block.model_validate_json(line).measurements
                if m.label == "cuda_graph"]
    failed = {m.id for m in captures if m.status != "ok"}
    obstacles = {name: capture_obstacle(read_model_record(record_path(h200_workspace, flavour, name)))
                 for name in {m.id for m in captures}}
    assert len(obstacles) == 270
    assert {name for name, obstacle in obstacles.items() if obstacle} == failed
    assert failed == {f"densenet169@batch={batch}" for batch in (1, 4, 16, 64)}
    for m in captures:
        if m.status != "ok":  # ONNX Runtime's message: "… running Concat node. Name:'node_cat_52' …, but got 33 inputs."
            name, _, inputs = str(obstacles[m.id]).split(maxsplit=2)
            assert f"Name:'{name}'" in m.error
            assert f"got {inputs.split()[0]} inputs" in m.error


def test_a_model_that_cant_be_captured_is_refused() -> None:
    record = analyze(wide(33), "cuda")
    with pytest.raises(UserError, match=r"can't capture it as a CUDA graph: wide joins 33 inputs, and a Concat of more than 32 "
                                        r"copies tables from the host; predict it without --cuda-graph"):
        predict(record, target=TARGET, run_mode=CAPTURED)
    assert predict(record, target=TARGET).latency_ms > 0
    assert not any("capture" in text for text in predict(analyze(wide(32), "cuda"), target=TARGET, run_mode=CAPTURED).warnings)


def test_sizes_computed_on_the_cpu_give_a_warning() -> None:
    record = analyze(resized(), "cuda", {"batch": 2, "width": 64})
    assert {"half", "to"} <= {node.name for node in record.nodes if node.provider == "cpu"}
    captured = predict(record, target=TARGET, run_mode=CAPTURED)
    assert [text for text in captured.warnings if "work out sizes on the CPU (width, half …)" in text]
