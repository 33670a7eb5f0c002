"""A model in single precision, predicted in half precision without its file being written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import printed, run_script
from conftest import small_model
from onnx import TensorProto, helper

from hase.inference import predict
from hase.inference.prediction.sources import source_record
from hase.records.kernel_record import ModelRecord
from hase.runtimes import local_flavour
from hase.utils.errors import UserError

TARGET = "nvidia-h200"


def record_in(path: Path, half: bool, no_weights: bool = False) -> ModelRecord:
    return source_record(path, local_flavour("cuda"), dtype="fp16" if half else None, no_weights=no_weights)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    onnx.save(small_model(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_it_has_the_kernels_of_a_model_in_half_precision(single: Path, tmp_path: Path) -> None:
    onnx.save(small_model(dtype="float16"), tmp_path / "half.onnx")
    made, own, usual = record_in(single, True), record_in(tmp_path / "half.onnx", False), record_in(single, False)
    assert made.kernels.keys() == own.kernels.keys()
    assert made.model == "net_fp16"
    read = [sum(kernel.weight_bytes for kernel in record.kernels.values()) for record in (made, usual)]
    assert {kernel.dtype for kernel in usual.kernels.values()} == {"float32"}  # both are remembered apart
    assert read[0] / read[1] == pytest.approx(0.5, abs=0.01)


def test_weights_in_a_file_are_not_read(single: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside.onnx"
    onnx.save(onnx.load(single), beside, save_as_external_data=True, location="weights", size_threshold=16)
    with_file = record_in(beside, True)
    assert with_file.kernels.keys() == record_in(single, True).kernels.keys()
    (tmp_path / "weights").unlink()
    assert record_in(beside, True, no_weights=True).kernels.keys() == with_file.kernels.keys()


def test_operators_that_stay_in_single_precision_get_casts(tmp_path: Path) -> None:
    """As the converter has it: TopK is one, and each of two that read one tensor has a Cast in front."""
    nodes = [helper.make_node("Relu", ["x"], ["y"]), *(
        helper.make_node("TopK", ["y", f"k{count}"], [f"values{count}", f"places{count}"]) for count in (2, 3))]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
        [helper.make_tensor_value_info(f"values{count}", TensorProto.FLOAT, [4, count]) for count in (2, 3)],
        [helper.make_tensor(f"k{count}", TensorProto.INT64, [1], [count]) for count in (2, 3)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "two.onnx")
    record = record_in(tmp_path / "two.onnx", True)
    types = {kernel.op_type: kernel.dtype for kernel in record.kernels.values()}
    assert (types["Relu"], types["TopK"], "Cast" in types) == ("float16", "float32", True)
    assert [record.kernels[node.kernel_id].op_type for node in record.nodes].count("TopK") == 2


def test_what_can_not_be_converted_is_refused(single: Path, tmp_path: Path) -> None:
    onnx.save(small_model(dtype="float16"), tmp_path / "half.onnx")
    sources: list[tuple[Any, Any, str]] = [(tmp_path / "half.onnx", "fp16", r"half\.onnx: nothing in it is float32"),
                                           (record_in(single, False), "fp16", "a record's types are fixed"),
                                           (single, "int8", "dtype='int8'")]
    for source, dtype, message in sources:
        with pytest.raises(UserError, match=message):
            source_record(source, local_flavour("cuda"), dtype=dtype)


@pytest.mark.slow
def test_the_command_prints_a_row_beside_the_other(single: Path) -> None:
    command = ("inference/predict_model_latency.py", "--model", single, "--target", TARGET, "--dtype", "fp32,fp16")
    usual, half = json.loads(printed(*command, "--json"))
    assert (usual["model"], half["model"]) == ("net", "net_fp16")
    assert half["peak_memory_mib"] < usual["peak_memory_mib"]
    assert half["latency_ms"] == pytest.approx(predict(single, target=TARGET, dtype="fp16").latency_ms)
    wrong = run_script(*command, "--trace", "t.json")
    assert (wrong.returncode, "--dtype fp16 is predicted: leave" in wrong.stderr) == (2, True)
