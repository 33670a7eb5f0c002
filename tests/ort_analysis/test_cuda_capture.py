"""What ONNX Runtime can't capture as a CUDA graph: real graphs, and all models that an H200 tried to capture."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from small_graphs import BOOL, INT64, graph, model, node, value

from hase.inference import predict
from hase.inference.prediction.conditions import RunMode
from hase.ort_analysis.cuda.placement import capture_obstacle
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import journal_path, read_header
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import Block
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
CAPTURED = RunMode(cuda_graph=True)


def wide(joined: int) -> onnx.ModelProto:
    """A Concat of `joined` tensors after a Concat of two."""
    names = [f"x{place}" for place in range(joined)]
    return model([node("Concat", names[:2], "two", axis=1), node("Relu", ["two"], "y2"),
                  node("Concat", ["y2", *names[1:]], name="wide", axis=1)], [value(name, 1, 4, 8, 8) for name in names])


def unequal_split() -> onnx.ModelProto:
    return model([node("Split", ["x", "parts"], ["a", "b"], axis=1)], [value("x", 1, 14, 8)], ["a", "b"], {"parts": [3, 11]})


def choice() -> onnx.ModelProto:
    """An If, whose branches ONNX Runtime runs as separate graphs."""
    branches = {name: graph([node(op, ["x"], f"z{op}")], [], [value(f"z{op}", 4)])
                for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))}
    return model([node("If", ["condition"], name="choose", **branches)], [value("condition", kind=BOOL), value("x", 4)])


def boxes() -> onnx.ModelProto:
    """Boxes that are selected by their scores."""
    return model([node("Sigmoid", ["raw"], "scores"),
                  node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], name="select")],
                 [value("boxes", 1, 40, 4), value("raw", 1, 3, 40)], [value("y", "n", 3, kind=INT64)],
                 {"most": 5, "overlap": 0.5, "least": 0.1})


def after_relu(op: str, inputs: list[str]) -> onnx.ModelProto:
    return model([node("Relu", ["x"], "r"), node(op, inputs, name="odd")],
                 [value("x", 16), *([value("keep", 16, kind=BOOL)] if "keep" in inputs else [])])


WAITS = "makes the host wait for the size of its output"


@pytest.mark.parametrize(("proto", "message"), [
    (boxes(), f"select (NonMaxSuppression) {WAITS}"), (after_relu("NonZero", ["r"]), f"odd (NonZero) {WAITS}"),
    (after_relu("Compress", ["r", "keep"]), f"odd (Compress) {WAITS}"),
    (after_relu("Acos", ["r"]), "(MemcpyToHost) copies between the host and the GPU"),  # the CUDA provider has no Acos
    (model([node("Acos", ["x"], name="acos")], [value("x", 64)]), "acos (Acos) runs on the CPU"),  # and nothing is copied
    (wide(33), "wide joins 33 inputs, and a Concat of more than 32 copies tables from the host"), (wide(32), None),
    (unequal_split(), None), (choice(), "choose (If) holds a graph of its own")])
def test_nodes_that_forbid_capture(proto: onnx.ModelProto, message: str | None) -> None:
    obstacle = capture_obstacle(analyze(proto, "cuda"))
    assert obstacle is None if message is None else (obstacle or "").endswith(message)


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
    """Half the last axis, computed from a shape."""
    nodes = [node("Relu", ["x"], "r"), node("Shape", ["r"], "shape"), node("Gather", ["shape", "last"], "width", "width"),
             node("Div", ["width", "two"], "half", "half"), node("Concat", ["rest", "half"], "to", "to", axis=0),
             node("Reshape", ["r", "to"], "z"), node("Exp", ["z"])]
    record = analyze(model(nodes, [value("x", "batch", "width")], [value("y", "b", "w")],
                           {"last": np.array([1]), "two": [2], "rest": [-1]}), "cuda", {"batch": 2, "width": 64})
    assert {"half", "to"} <= {entry.name for entry in record.nodes if entry.provider == "cpu"}
    captured = predict(record, target=TARGET, run_mode=CAPTURED)
    assert [text for text in captured.warnings if "work out sizes on the CPU (width, half …)" in text]
