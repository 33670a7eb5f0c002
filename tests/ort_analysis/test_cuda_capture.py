"""What ONNX Runtime can't capture as a CUDA graph: real graphs, and all models that an H200 tried to capture."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from inference import predict
from inference.core.run_modes import RunMode
from records.blocks import Block
from records.dataset_files import journal_path, read_header
from records.kernel_record import ModelRecord
from records.kernel_record_files import read_model_record, record_path
from runtimes.ort.cuda.capture import capture_obstacle
from runtimes.ort.graph.analysis import analyze
from utils.errors import UserError
from utils.paths import ROOT, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
CAPTURED = RunMode(cuda_graph=True)


def value(name: str, *shape: int, element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
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


@pytest.mark.parametrize(("proto", "message"), [
    (wide(32), None), (wide(33), "wide joins 33 inputs, and a Concat of more than 32 copies tables from the host"),
    (unequal_split(), None), (choice(), "choose (If) holds a graph of its own")])
def test_nodes_that_forbid_capture(proto: onnx.ModelProto, message: str | None) -> None:
    assert capture_obstacle(analyze(proto, "cuda")) == message


def on_the_cpu(record: ModelRecord, op_type: str = "Relu") -> ModelRecord:
    """The record with its Relu put on the CPU provider, as no GPU is here to assign it, and its operator renamed."""
    node = next(node for node in record.nodes if node.name == "relu")
    kernels = {**record.kernels, node.kernel_id: record.kernel_of(node).model_copy(update={"op_type": op_type})}
    nodes = tuple(entry.model_copy(update={"provider": "cpu"}) if entry is node else entry for entry in record.nodes)
    return record.model_copy(update={"kernels": kernels, "nodes": nodes})


def test_copies_forbid_capture_but_cpu_nodes_do_not() -> None:
    record = analyze(wide(32), "cuda")
    assert capture_obstacle(on_the_cpu(record)) is None
    for copy in ("MemcpyToHost", "MemcpyFromHost"):
        assert capture_obstacle(on_the_cpu(record, copy)) == f"relu ({copy}) copies between the host and the GPU"


@pytest.mark.slow
def test_every_model_of_the_shipped_dataset(tmp_path: Path) -> None:
    """For the shipped dataset, exactly the models whose capture failed have an obstacle."""
    with tarfile.open(ROOT / "recipes" / "h200" / f"{TARGET}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    workspace = Workspace(tmp_path)
    folder = workspace.dataset(TARGET)
    flavour = read_header(folder).target.flavour
    lines = journal_path(folder).read_text().splitlines()
    captures = [m for line in lines if '"cuda_graph"' in line for m in Block.model_validate_json(line).measurements
                if m.label == "cuda_graph"]
    failed = {m.id for m in captures if m.status != "ok"}
    obstacles = {name: capture_obstacle(read_model_record(record_path(workspace, flavour, name)))
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
    captured = predict(on_the_cpu(analyze(wide(32), "cuda")), target=TARGET, run_mode=CAPTURED)
    assert [text for text in captured.warnings if "sizes on the CPU (relu)" in text]
