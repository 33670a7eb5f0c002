"""A model exported at a fixed batch, predicted at another one: as its export at that batch, or refused with a node's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import TORCH_MODELS, small_model, torch_model
from onnx import helper
from small_graphs import BOOL, graph, model, value

from hase.inference import predict
from hase.inference.prediction.sources import record_of
from hase.records.kernel_record import ModelRecord
from hase.runtimes import flavour_of
from hase.utils.errors import UserError


def record_at(path: Path, **dims: int) -> ModelRecord:
    return record_of(path, flavour_of("cuda"), dims)


def saved(path: Path, nodes: Sequence[onnx.NodeProto], given: Sequence[int], made: Sequence[int],
          **constants: np.ndarray) -> Path:
    """A model of these nodes with the input x and the output y, as a file."""
    onnx.save(model(nodes, [value("x", *given)], [value("y", *made)], constants, 17), path)
    return path


def node(op_type: str, inputs: Sequence[str], output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], name=f"the_{op_type.lower()}", **attributes)


@pytest.mark.parametrize("old", [1, 4])
def test_it_has_the_kernels_of_an_open_batch(old: int, tmp_path: Path) -> None:
    onnx.save(small_model(batch=old), tmp_path / "fixed.onnx")
    onnx.save(small_model(batch="batch"), tmp_path / "open.onnx")
    made = record_at(tmp_path / "fixed.onnx", rebatch=16)
    opened = record_of(tmp_path / "open.onnx", flavour_of("cuda"), {"batch": 16}, static=True)
    assert made.kernels.keys() == opened.kernels.keys()
    assert (made.model, made.static, made.inputs["input"].shape[0]) == ("fixed@rebatch=16", True, 16)
    own = record_at(tmp_path / "fixed.onnx", rebatch=old)
    assert own.kernels.keys() == record_at(tmp_path / "fixed.onnx").kernels.keys()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_of_torchvision_has_the_kernels_of_its_export(torch_models: dict[str, Path], tmp_path: Path) -> None:
    import torch

    name = "mobilenet_v3_small"
    side = TORCH_MODELS[name]
    torch.onnx.export(torch_model(name), (torch.randn(3, 3, side, side),), str(tmp_path / "at_3.onnx"), dynamo=True,
                      external_data=False, verbose=False)
    made, exported = record_at(torch_models[name], rebatch=3), record_at(tmp_path / "at_3.onnx")
    assert [each.kernel_id for each in made.nodes] == [each.kernel_id for each in exported.nodes]


@pytest.mark.slow
def test_a_class_token_for_each_item_is_refused(torch_models: dict[str, Path]) -> None:
    """torch writes the class token of a vision transformer for the batch of the export."""
    with pytest.raises(UserError, match=r"exported at batch 2, and its graph does not allow 5: .*\w+ \(|Node \(.*; export it"):
        record_at(torch_models["vit_tiny"], rebatch=5)


@pytest.mark.parametrize(("target", "made"), [([2, 12, 4], [6, 12, 4]), ([2, -1], [6, 48]), ([4, 6, 4], [12, 6, 4]),
                                              ([-1, 4], [72, 4]), ([0, -1, 2], [6, 24, 2])])
def test_constant_shapes_grow_with_the_batch(target: list[int], made: list[int], tmp_path: Path) -> None:
    """Heads may be put together with the batch, and a shape may be shared with a tensor that has no batch."""
    path = saved(tmp_path / "m.onnx", [node("Reshape", ["x", "shape"], "r"), node("Relu", ["r"])], [2, 12, 4],
                 list(np.zeros([2, 12, 4]).reshape([size or 2 for size in target]).shape), shape=np.array(target))
    record = record_at(path, rebatch=6)
    assert record.outputs["y"].shape == tuple(made)


def test_weights_in_a_file_are_not_read(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx", save_as_external_data=True, location="weights", size_threshold=16)
    with_weights = record_at(tmp_path / "net.onnx", rebatch=8)
    (tmp_path / "weights").unlink()
    without = record_of(tmp_path / "net.onnx", flavour_of("cuda"), {"rebatch": 8}, no_weights=True)
    assert without.kernels.keys() == with_weights.kernels.keys()


def test_half_precision_at_another_batch(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "net.onnx")
    onnx.save(small_model(batch=8, dtype="float16"), tmp_path / "half.onnx")
    made = record_of(tmp_path / "net.onnx", flavour_of("cuda"), {"rebatch": 8}, dtype="fp16")
    assert made.kernels.keys() == record_at(tmp_path / "half.onnx").kernels.keys()


TOKEN = np.zeros((2, 1, 4), np.float32)
REFUSED = {  # what holds the batch: the nodes, the shape of the input and of the output, constants, and a part of the message
    "a token for each item": ([node("Concat", ["token", "x"], axis=1)], [2, 3, 4], [2, 4, 4], {"token": TOKEN}, "Concat"),
    "a sum with a constant": ([node("Add", ["token", "x"])], [2, 3, 4], [2, 3, 4], {"token": TOKEN}, "the_add"),
    "the first item": ([node("Gather", ["x", "first"])], [2, 3], [3], {"first": np.array(0)},
                       "what the_gather (Gather) makes does not grow with the batch"),
    "a batch in the middle": ([node("Transpose", ["x"], "t", perm=[1, 0, 2]), node("Reshape", ["t", "shape"])],
                              [2, 3, 4], [3, 2, 2, 2], {"shape": np.array([3, 2, 2, 2])},
                              "what the_reshape (Reshape) makes does not grow"),
    "a batch of 1 that is dropped": ([node("Squeeze", ["x", "axis"])], [1, 3], [3], {"axis": np.array([0])}, "the_squeeze"),
    "an initial state": ([node("Transpose", ["x"], "t", perm=[1, 0, 2]),
                          node("GRU", ["t", "w", "r", "", "", "state"], hidden_size=2)], [2, 3, 4], [3, 1, 2, 2],
                         {"w": np.zeros((1, 6, 4), np.float32), "r": np.zeros((1, 6, 2), np.float32),
                          "state": np.zeros((1, 2, 2), np.float32)}, "state, which the_gru (GRU) reads, holds the batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_graph_that_holds_its_batch_is_refused_by_name(case: str, tmp_path: Path) -> None:
    nodes, given, made, constants, part = REFUSED[case]
    path = saved(tmp_path / "m.onnx", nodes, given, made, **constants)
    assert record_at(path).nodes
    with pytest.raises(UserError) as refusal:
        record_at(path, rebatch=5)
    message = str(refusal.value)
    assert message.startswith(f"{path}: it was exported at batch {given[0]}, and its graph does not allow 5: ")
    assert part in message
    assert message.endswith("; export it with an open batch, or at this one")
    assert "\n" not in message


def test_a_graph_within_a_node_is_refused(tmp_path: Path) -> None:
    branches = [graph([node(op, ["x"], op)], [], [value(op, 2, 3)]) for op in ("Relu", "Neg")]
    path = tmp_path / "m.onnx"
    onnx.save(model([node("If", ["flag"], then_branch=branches[0], else_branch=branches[1])],
                    [value("x", 2, 3), value("flag", kind=BOOL)], [value("y", 2, 3)], opset=17), path)
    with pytest.raises(UserError, match=r"does not allow 5: the_if \(If\) holds a graph of its own"):
        record_at(path, rebatch=5)


def test_an_open_batch_and_a_record_are_refused(tmp_path: Path) -> None:
    onnx.save(small_model(batch="n"), tmp_path / "open.onnx")
    with pytest.raises(UserError, match="no fixed batch"):
        record_at(tmp_path / "open.onnx", n=1, rebatch=2)
    onnx.save(small_model(), tmp_path / "fixed.onnx")
    with pytest.raises(UserError, match="a record's shapes are fixed"):
        record_of(record_at(tmp_path / "fixed.onnx"), flavour_of("cuda"), {"rebatch": 2})
    with pytest.raises(UserError, match=r"all its dimensions are fixed \(--rebatch 8"):
        record_at(tmp_path / "fixed.onnx", batch=8)
    with pytest.raises(UserError, match="a batch of 1 or more"):
        record_at(tmp_path / "fixed.onnx", rebatch=0)


def test_a_dimension_of_that_name_is_the_models_own(tmp_path: Path) -> None:
    onnx.save(small_model(batch="rebatch"), tmp_path / "own.onnx")
    record = record_at(tmp_path / "own.onnx", rebatch=8)
    assert (record.inputs["input"].shape[0], record.static) == (8, False)


@pytest.mark.slow
def test_the_command_has_a_row_for_each_batch(tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "fixed.onnx")
    onnx.save(small_model(batch="batch"), tmp_path / "open.onnx")
    options = ("--model", tmp_path / "fixed.onnx", "--target", "nvidia-h200", "--host-pace", "1", "--rebatch", "1,4")
    done = run_script("inference/predict_model_latency.py", *options, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert ((first["batch"], first["dims"]), (second["batch"], second["dims"])) == ((1, {"rebatch": 1}), (4, {"rebatch": 4}))
    assert second["latency_ms"] == pytest.approx(predict(tmp_path / "fixed.onnx", dims={"rebatch": 4},
                                                         target="nvidia-h200", host_pace=1.0).latency_ms)
    table = run_script("inference/predict_model_latency.py", *options).stdout
    assert "fixed: the best batch for throughput is 4" in table
    both = run_script("inference/predict_model_latency.py", *options, "--model", tmp_path / "open.onnx", "--dim", "batch=2",
                      "--json")
    assert [(row["file"].rsplit("/")[-1], row["dims"]) for row in sorted(json.loads(both.stdout), key=lambda row: row["model"])
            ] == [("fixed.onnx", {"rebatch": 1}), ("fixed.onnx", {"rebatch": 4}), ("open.onnx", {"batch": 2})]
