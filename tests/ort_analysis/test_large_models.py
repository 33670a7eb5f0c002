"""Models whose weights are larger than the memory: only the graph is read. Files of weights consist of holes."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DECODERS, SMALL, WEIGHTS, Precision, write_decoder
from onnx import TensorProto, helper, numpy_helper

from hase.inference import Predictor
from hase.inference.prediction.sources import record_of
from hase.ort_analysis.cuda.reduced_precision import as_single
from hase.ort_analysis.graph import constants, parsing
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.nodes import attribute_value
from hase.ort_analysis.graph.source import reading
from hase.ort_analysis.isolated import analysis
from hase.records.kernel_record import ModelRecord
from hase.runtimes import flavour_of
from hase.utils.errors import UserError
from hase.utils.model_files import BYTES, every_tensor, locations, tensor_array, varint, with_contents
from hase.utils.model_graphs import is_hollow, read_graph, values_of


def types_of(record: ModelRecord) -> Counter[str]:
    return Counter(record.kernel_of(node).op_type for node in record.nodes)


@pytest.mark.parametrize(("name", "precision", "device", "gigabytes"), [
    ("1B", "fp16", "cuda", 2.4), ("8B", "bf16", "cuda", 16), ("70B", "fp16", "cuda", 141), ("70B", "int4", "cuda", 41),
    ("8B", "int4-fp32", "cpu", 6.8), ("8B", "fp32", "cpu", 32)])
def test_a_model_of_any_size(tmp_path: Path, name: str, precision: Precision, device: str, gigabytes: float) -> None:
    size = DECODERS[name]
    path = write_decoder(tmp_path, size, precision)
    record = analyze(path, device, size.dims(1, 1, 100))
    stored = path.with_name(WEIGHTS).stat().st_size
    assert stored == pytest.approx(gigabytes * 1e9, rel=0.05)
    assert record.weight_bytes == pytest.approx(stored, abs=64)  # and the constants in the graph
    types = types_of(record)
    assert types["MatMulNBits" if "int4" in precision else "MatMul"] == 5 * size.layers + 1
    assert types["GroupQueryAttention"] == size.layers
    assert record.outputs["logits"].shape == (1, 1, size.words)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp16", "int4-fp32"])
def test_weights_may_be_missing(tmp_path: Path, precision: Precision, device: str) -> None:
    path = write_decoder(tmp_path, SMALL, precision)
    whole = analyze(path, device, SMALL.dims(2, 8, 0))
    path.with_name(WEIGHTS).unlink()
    with pytest.raises(UserError, match=rf"{WEIGHTS}, which is missing from .*\(--no-weights\)"):
        analyze(path, device, SMALL.dims(2, 8, 0))
    with reading(no_weights=True):
        assert analyze(path, device, SMALL.dims(2, 8, 0)) == whole


def test_an_answer_says_that_weights_are_missing(tmp_path: Path) -> None:
    path, dims = write_decoder(tmp_path, SMALL, "fp16"), SMALL.dims(1, 1, 31)
    reads, does_without = (Predictor(target="nvidia-h200", no_weights=no_weights) for no_weights in (False, True))
    whole = reads.predict(path, dims=dims)
    assert does_without.predict(path, dims=dims) == whole
    path.with_name(WEIGHTS).unlink()
    with pytest.raises(UserError, match="--no-weights"):
        reads.predict(path, dims=dims)
    told = does_without.predict(path, dims=dims)
    assert told.latency_ms == whole.latency_ms
    assert [warning for warning in told.warnings if warning not in whole.warnings] == [
        f"its weights were not read (--no-weights), since {WEIGHTS} is missing: what is in it counts as zeros"]
    assert analysis.graph_of(path, "cpu", dims, False, no_weights=True)["nodes"]


def decided_by(tensor: onnx.TensorProto, *more: onnx.TensorProto) -> onnx.ModelProto:
    """x + w, in a shape that a constant gives."""
    nodes = [helper.make_node("Add", ["x", "w"], ["sum"]), helper.make_node("Reshape", ["sum", tensor.name], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 64])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [tensor, *more])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_nothing_is_said_where_shapes_depend_on_a_missing_file(tmp_path: Path) -> None:
    model = decided_by(numpy_helper.from_array(np.array([16, 32]), "to"),
                       numpy_helper.from_array(np.ones((8, 64), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.weights", size_threshold=0)
    assert analyze(tmp_path / "m.onnx", "cpu").outputs["y"].shape == (16, 32)  # small values are read
    (tmp_path / "m.weights").unlink()
    with reading(no_weights=True), pytest.raises(UserError, match=r"m\.weights: no such file; .* depends on its to"):
        analyze(tmp_path / "m.onnx", "cpu")


def test_half_precision_is_read_where_its_values_decide(tmp_path: Path) -> None:
    """A size is the largest number of a large table. The other weights are not read."""
    table = np.zeros(4096, np.float16)
    table[1000] = 128
    numbers = {"table": table, "two": np.array(2, np.float16), "axes": np.array([0]), "w": np.ones((64, 1), np.float16)}
    nodes = [helper.make_node("Mul", ["table", "two"], ["doubled"]),
             helper.make_node("ReduceMax", ["doubled", "axes"], ["most"]),
             helper.make_node("Cast", ["most"], ["size"], to=TensorProto.INT64),
             helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Expand", ["product", "size"], ["y"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [4, 64])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)],
                              [numpy_helper.from_array(value, name) for name, value in numbers.items()])
    assert constants.decisive_constants(graph) == {"table", "two", "doubled", "axes", "most"}
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    assert analyze(model, "cuda").outputs["y"].shape == (4, 256)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.weights")
    assert analyze(tmp_path / "m.onnx", "cuda").outputs["y"].shape == (4, 256)
    (tmp_path / "m.weights").unlink()
    with reading(no_weights=True), pytest.raises(
            UserError, match=r"m\.onnx: what it computes depends on its table, whose file is "):
        analyze(tmp_path / "m.onnx", "cuda")


def tied(kind: Any) -> onnx.ModelProto:
    """Products with a table that is also looked up, with a scaled one, and a Gemm with a turned one."""
    rng = np.random.default_rng(0)
    tensors = {"table": rng.standard_normal((1024, 512)), "scale": rng.standard_normal((512, 512)),
               "g": rng.standard_normal((512, 512)), "two": np.array(2.0)}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"]), helper.make_node("Mul", ["scale", "two"], ["scaled"]),
             helper.make_node("MatMul", ["x", "scaled"], ["h"]), helper.make_node("Transpose", ["g"], ["turned"], perm=[1, 0]),
             helper.make_node("Gemm", ["h", "turned"], ["k"]), helper.make_node("Transpose", ["table"], ["back"], perm=[1, 0]),
             helper.make_node("MatMul", ["k", "back"], ["y"])]
    graph = helper.make_graph(nodes, "tied", [helper.make_tensor_value_info("ids", TensorProto.INT64, [6])],
                              [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)],
                              [numpy_helper.from_array(value.astype(kind), name) for name, value in tensors.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_large_constants_are_folded_without_values(kind: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = analyze(tied(kind), device)
    folded: list[set[str]] = []

    def fold(model: onnx.ModelProto) -> None:
        before = {out for node in model.graph.node for out in node.output}
        constants.fold_large(model, most_bytes=0)
        folded.append(before - {out for node in model.graph.node for out in node.output})

    monkeypatch.setattr(constants, "LARGE_RESULT_BYTES", 1 << 10)
    monkeypatch.setattr(parsing, "fold_large", fold)
    assert analyze(tied(kind), device) == computed
    assert folded == [{"scaled", "back"} if device == "cuda" or kind is np.float32 else {"back"}]


def test_weights_in_the_models_file_stay_there(tmp_path: Path) -> None:
    """1.9 GB of zeros, in a file with a hole."""
    rows = 950_000
    about = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[rows, 1024]).SerializeToString()
    length = rows * 1024 * 2
    head = about + varint(9 << 3 | BYTES) + varint(length)  # then come the raw data
    graph = helper.make_graph([helper.make_node("Gather", ["w", "x"], ["y"])], "g",
                              [helper.make_tensor_value_info("x", TensorProto.INT64, [4])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [4, 1024])],
                              [numpy_helper.from_array(np.array([3]), "small")]).SerializeToString()
    tensor = varint(5 << 3 | BYTES) + varint(len(head) + length) + head
    begins = helper.make_model(onnx.GraphProto(), ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    begins.ClearField("graph")
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.write(begins.SerializeToString() + varint(7 << 3 | BYTES) + varint(len(graph) + len(tensor) + length))
        file.write(graph + tensor)
        offset = file.tell()
        file.truncate(offset + length)
    proto = read_graph(path)
    assert proto.ByteSize() < 1000
    large = proto.graph.initializer[1]
    assert {entry.key: entry.value for entry in large.external_data} == {
        "location": str(path).removeprefix("/"), "offset": str(offset), "length": str(length)}
    assert list(large.dims) == [rows, 1024]
    assert tensor_array(proto.graph.initializer[0]).tolist() == [3]
    with path.open("ab") as file:
        file.truncate(2**31)
    with pytest.raises(UserError, match="larger than 2 GiB"):
        read_graph(path)


def test_every_place_of_a_constant(tmp_path: Path) -> None:
    """In the graph, in a body, in a Constant, as raw bytes and as numbers; other attributes and short constants stay."""
    values = np.arange(1000, dtype=np.float32)
    in_numbers = helper.make_tensor("numbers", TensorProto.FLOAT, [1000], values)
    assert not in_numbers.raw_data
    body = helper.make_graph([helper.make_node("Add", ["x", "inner"], ["out"])], "then", [], [
        helper.make_tensor_value_info("out", TensorProto.FLOAT, [1000])], [numpy_helper.from_array(values + 1, "inner")])
    nodes = [helper.make_node("Constant", [], ["made"], value=numpy_helper.from_array(values + 2, "value")),
             helper.make_node("If", ["condition"], ["chosen"], then_branch=body, else_branch=body),
             helper.make_node("Odd", ["made"], ["y"], table=numpy_helper.from_array(values + 3, "table"), domain="odd"),
             helper.make_node("Sum", ["chosen", "numbers", "raw"], ["z"])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000])], [
        helper.make_tensor_value_info("z", TensorProto.FLOAT, [1000])], [
        in_numbers, numpy_helper.from_array(values + 4, "raw"), numpy_helper.from_array(values[:8], "short")])
    model = helper.make_model(graph, ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    proto = read_graph(tmp_path / "m.onnx")
    read, originals = ([tensor for tensor in every_tensor(held) if tensor.name] for held in (proto, model))
    assert {tensor.name: bool(locations(tensor)) for tensor in read} == {
        "numbers": True, "raw": True, "short": False, "value": True, "inner": True, "table": False}
    for tensor, original in zip(read, originals, strict=True):
        np.testing.assert_array_equal(tensor_array(values_of(tensor)), tensor_array(original))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    content = with_contents(7, b"\xff" * 3000)
    (tmp_path / "damaged.onnx").write_bytes(content)
    with pytest.raises(UserError, match="not an ONNX model, or cut short"):
        read_graph(tmp_path / "damaged.onnx")


def test_a_gpu_need_not_load_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, which is made up here."""
    size = replace(DECODERS["1B"], layers=1)
    path = write_decoder(tmp_path, size, "fp16")
    wanted = analyze(path, "cuda", size.dims(1, 1, 100))
    monkeypatch.setattr(parsing, "has_cuda", lambda: True)
    monkeypatch.setattr(parsing, "MOST_LOADED_BYTES", 1 << 20)
    assert analyze(path, "cuda", size.dims(1, 1, 100)) == wanted
    assert wanted.derived


def test_a_record_does_not_depend_on_where_a_model_lies(tmp_path: Path) -> None:
    """Bodies of Loops are part of their kernels' names, and hold weights."""
    body = helper.make_graph(
        [helper.make_node("MatMul", ["state", "w"], ["next"]), helper.make_node("Identity", ["go_on"], ["goes_on"])], "body",
        [helper.make_tensor_value_info("i", TensorProto.INT64, []),
         helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("state", TensorProto.FLOAT, [4, 64])],
        [helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("next", TensorProto.FLOAT, [4, 64])],
        [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")])
    graph = helper.make_graph([helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)], "g",
                              [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 64])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 64])],
                              [numpy_helper.from_array(np.array(3), "trips")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    records = []
    for folder in (tmp_path / "here", tmp_path / "there_in_another_folder"):
        folder.mkdir()
        onnx.save(model, folder / "loop.onnx")
        records.append(record_of(folder / "loop.onnx", flavour_of("cpu")))
    assert records[0] == records[1]
    assert records[0].weight_bytes == pytest.approx(64 * 64 * 4, abs=64)


def test_a_weight_that_no_file_can_hold(tmp_path: Path) -> None:
    model = decided_by(numpy_helper.from_array(np.array([16, 32]), "to"),
                       numpy_helper.from_array(np.ones((8, 64), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.weights")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    proto.graph.initializer[1].dims[:] = [1 << 30, 1 << 30]
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"m\.weights: too short for weight w, which takes 4611686018427387904 bytes"):
        analyze(tmp_path / "m.onnx", "cpu")
    (tmp_path / "m.weights").unlink()
    with reading(no_weights=True), pytest.raises(UserError, match=r"a weight of 4\.19e\+06 TiB"):
        analyze(tmp_path / "m.onnx", "cpu")


def test_a_body_with_short_constants_is_named_as_it_stands() -> None:
    """Kernels that were recorded before large constants were left out keep their ids."""
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "then", [],
                               [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    assert attribute_value(node.attribute[0]) == {"graph": hashlib.sha256(branch.SerializeToString()).hexdigest()[:12]}


def test_in_half_precision_only_weights_become_zeros() -> None:
    """A mask keeps its values, since fusions compare them, whether the graph or a body adds it."""
    half, whole = TensorProto.FLOAT16, TensorProto.INT64
    sizes = {"w": (64, 64), "turned": (64, 64), "scaled": (64, 64), "mask": (64, 64), "bias": (600,), "table": (64, 64),
             "inner": (64, 64), "inner_mask": (64, 64)}
    tensors = [numpy_helper.from_array(np.full(shape, 0.5, np.float16), name) for name, shape in sizes.items()]
    branch = helper.make_graph([helper.make_node("MatMul", ["s", "inner"], ["p"]),
                                helper.make_node("Add", ["p", "inner_mask"], ["r"])], "branch", [],
                               [helper.make_tensor_value_info("r", half, [64, 64])])
    nodes = [helper.make_node("Transpose", ["turned"], ["t"]), helper.make_node("Mul", ["scaled", "scaled"], ["u"]),
             helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "t"], ["b"]),
             helper.make_node("MatMul", ["b", "u"], ["c"]), helper.make_node("Gather", ["table", "ids"], ["g"]),
             helper.make_node("Sum", ["c", "g", "mask"], ["s"]), helper.make_node("Neg", ["bias"], ["k"]),
             helper.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=branch),
             helper.make_node("Identity", ["k"], ["z"])]
    graph = helper.make_graph(nodes, "g", [
        helper.make_tensor_value_info("x", half, [64, 64]), helper.make_tensor_value_info("ids", whole, [64]),
        helper.make_tensor_value_info("go", TensorProto.BOOL, [])], [
        helper.make_tensor_value_info("y", half, [64, 64]), helper.make_tensor_value_info("z", half, [600])], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    made = as_single(model, "model").model
    assert {tensor.name for tensor in made.graph.initializer if is_hollow(tensor)} == {
        "w", "turned", "scaled", "table", "inner"}
    assert {tensor.data_type for tensor in made.graph.initializer} == {TensorProto.FLOAT}
    assert {tensor.data_type for tensor in model.graph.initializer} == {half}
