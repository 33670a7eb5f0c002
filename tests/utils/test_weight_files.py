"""Weights in separate files beside a model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.parsing import kept_in
from hase.utils.errors import UserError
from hase.utils.model_files import BYTES, METADATA_FIELD, read_metadata, with_values


def test_weights_whose_files_have_several_names(tmp_path: Path) -> None:
    """As in the caches of model hubs; onnx's loader refuses these. In half precision all weights are read."""
    weight = numpy_helper.from_array(np.full((64, 64), 0.5, np.float16), "w")
    table = numpy_helper.from_array(np.arange(700, dtype=np.int64) % 64, "rows")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]),
             helper.make_node("Gather", ["product", "rows"], ["y"], axis=1)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", 64])],
                              [helper.ValueInfoProto(name="y")], [weight, table])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "stored.onnx", save_as_external_data=True, location="stored.weights", size_threshold=16)
    os.link(tmp_path / "stored.weights", tmp_path / "again.weights")
    for device in ("cpu", "cuda"):
        with kept_in(tmp_path / device):
            for rows in (2, 3):
                record = analyze(tmp_path / "stored.onnx", device, {"n": rows})
                assert record.outputs["y"].shape == (rows, 700)
                assert next(kernel for kernel in record.kernels.values()
                            if kernel.op_type == "Gather").inputs[1].value_range == (0, 63)
    for kind, sizes, message in (99, [1], "unknown type"), (1, [-1], "negative size"):
        damaged = onnx.TensorProto(name="w", data_location=TensorProto.EXTERNAL, data_type=kind, dims=sizes)
        damaged.external_data.add(key="location", value="stored.weights")
        with pytest.raises(UserError, match=message):
            with_values(damaged, tmp_path)
    content = (tmp_path / "stored.weights").read_bytes()
    (tmp_path / "stored.weights").unlink()
    (tmp_path / "stored.weights").write_bytes(content[:-8])
    with pytest.raises(UserError, match="too short for weight"):
        analyze(tmp_path / "stored.onnx", "cuda", {"n": 2})


def test_damaged_metadata_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(bytes([METADATA_FIELD << 3 | BYTES, 3]) + b"\xff" * 3)
    with pytest.raises(UserError, match=r"m\.onnx: not an ONNX model, or cut short"):
        read_metadata(path)
