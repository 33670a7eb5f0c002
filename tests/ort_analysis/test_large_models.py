"""Models whose weights are larger than the memory: only the graph is read. Files of weights consist of holes."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import DECODERS, SMALL, WEIGHTS, Precision, write_decoder
from onnx import TensorProto, helper
from small_graphs import BOOL, HALF, INT64, constant, graph, model, node, unranked, value

from hase.inference import Predictor
from hase.inference.prediction.sources import source_record
from hase.ort_analysis.cuda.reduced_precision import to_single_precision
from hase.ort_analysis.graph import constants, parsing
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.nodes import attribute_value
from hase.ort_analysis.graph.source import reading
from hase.ort_analysis.isolated import analysis
from hase.runtimes import local_flavour
from hase.utils.errors import UserError
from hase.utils.model_files import BYTES, every_tensor, locations, tensor_array, varint
from hase.utils.model_graphs import is_hollow, read_graph, values_of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "device", "gigabytes"), [
    ("8B", "bf16", "cuda", 16), ("8B", "int4-fp32", "cpu", 6.8), ("70B", "int4", "cuda", 41)])
def test_a_model_of_any_size(tmp_path: Path, name: str, precision: Precision, device: str, gigabytes: float) -> None:
    size = DECODERS[name]
    path = write_decoder(tmp_path, size, precision)
    record = analyze(path, device, size.dims(1, 1, 100))
    stored = path.with_name(WEIGHTS).stat().st_size
    assert stored == pytest.approx(gigabytes * 1e9, rel=0.05)
    assert record.weight_bytes == pytest.approx(stored, abs=64)  # and the constants in the graph
    types = Counter(record.kernel_of(entry).op_type for entry in record.nodes)
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


@pytest.mark.slow
def test_an_answer_says_that_weights_are_missing(tmp_path: Path) -> None:
    path, dims = write_decoder(tmp_path, SMALL, "fp16"), SMALL.dims(1, 1, 31)
    reads, does_without = (Predictor(target="nvidia-h200", no_weights=no_weights) for no_weights in (False, True))
    whole = reads.predict(path, dims=dims)
    assert does_without.predict(path, dims=dims) == whole
    path.with_name(WEIGHTS).unlink()
    with pytest.raises(UserError, match="--no-weights"):
        reads.predict(path, dims=dims)
    told = does_without.predict(path, dims=dims)
    assert [warning for warning in told.warnings if warning not in whole.warnings] == [
        f"its weights were not read (--no-weights), since {WEIGHTS} is missing: what is in it counts as zeros"]
    assert analysis.graph_of(path, "cpu", dims, False, no_weights=True)["nodes"]


def test_weights_that_decide_or_that_no_file_can_hold(tmp_path: Path) -> None:
    """x + w, in a shape that a constant gives."""
    path, weights = tmp_path / "m.onnx", tmp_path / "m.weights"
    made = model([node("Add", ["x", "w"], "sum"), node("Reshape", ["sum", "to"])], [value("x", 8, 64)], [unranked("y")],
                 {"to": [16, 32], "w": np.ones((8, 64), np.float32)})
    onnx.save(made, path, save_as_external_data=True, location="m.weights", size_threshold=0)
    assert analyze(path, "cpu").outputs["y"].shape == (16, 32)  # small values are read
    proto, content = onnx.load(path, load_external_data=False), weights.read_bytes()
    weights.unlink()
    with reading(no_weights=True), pytest.raises(UserError, match=r"m\.weights: no such file; .* depends on its to"):
        analyze(path, "cpu")
    weights.write_bytes(content)
    proto.graph.initializer[1].dims[:] = [1 << 30, 1 << 30]
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"m\.weights: too short for weight w, which takes 4611686018427387904 bytes"):
        analyze(path, "cpu")
    proto.graph.initializer[0].CopyFrom(constant("to", [16, 32]))
    path.write_bytes(proto.SerializeToString())
    weights.unlink()
    with reading(no_weights=True), pytest.raises(UserError, match=r"a weight of 4\.19e\+06 TiB"):
        analyze(path, "cpu")


def test_half_precision_is_read_where_its_values_decide(tmp_path: Path) -> None:
    """A size is the largest number of a large table. The other weights are not read."""
    path, table = tmp_path / "m.onnx", np.zeros(4096, np.float16)
    table[1000] = 128
    nodes = [node("Mul", ["table", "two"], "doubled"), node("ReduceMax", ["doubled", "axes"], "most"),
             node("Cast", ["most"], "size", to=INT64), node("MatMul", ["x", "w"], "p"), node("Expand", ["p", "size"])]
    made = model(nodes, [value("x", 4, 64, kind=HALF)], [unranked("y", HALF)],
                 {"table": table, "two": np.float16(2), "axes": [0], "w": np.ones((64, 1), np.float16)})
    assert constants.decisive_constants(made.graph) == {"table", "two", "doubled", "axes", "most"}
    onnx.save(made, path, save_as_external_data=True, location="m.weights")
    for source in (onnx.load(path), path):
        assert analyze(source, "cuda").outputs["y"].shape == (4, 256)
    path.with_name("m.weights").unlink()
    with reading(no_weights=True), pytest.raises(UserError, match=r"m\.onnx: what it computes depends on its table, whose"):
        analyze(path, "cuda")


def tied(kind: Any) -> onnx.ModelProto:
    """Products with a table that is also looked up, with a scaled one, and a Gemm with a turned one."""
    rng = np.random.default_rng(0)
    tensors = {"table": rng.standard_normal((1024, 512)), "scale": rng.standard_normal((512, 512)),
               "g": rng.standard_normal((512, 512)), "two": np.array(2.0)}
    nodes = [node("Gather", ["table", "ids"], "x"), node("Mul", ["scale", "two"], "scaled"),
             node("MatMul", ["x", "scaled"], "h"), node("Transpose", ["g"], "turned", perm=[1, 0]),
             node("Gemm", ["h", "turned"], "k"),
             node("Transpose", ["table"], "back", perm=[1, 0]), node("MatMul", ["k", "back"])]
    return model(nodes, [value("ids", 6, kind=INT64)], [unranked("y", helper.np_dtype_to_tensor_dtype(np.dtype(kind)))],
                 {name: array.astype(kind) for name, array in tensors.items()})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_large_constants_are_folded_without_values(kind: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = analyze(tied(kind), device)
    folded: list[set[str]] = []

    def fold(made: onnx.ModelProto) -> None:
        before = {out for entry in made.graph.node for out in entry.output}
        constants.fold_large(made, most_bytes=0)
        folded.append(before - {out for entry in made.graph.node for out in entry.output})

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
    gather = graph([node("Gather", ["w", "x"])], [value("x", 4, kind=INT64)], [value("y", 4, 1024, kind=HALF)],
                   {"small": [3]}).SerializeToString()
    tensor = varint(5 << 3 | BYTES) + varint(len(head) + length) + head
    begins = helper.make_model(onnx.GraphProto(), ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    begins.ClearField("graph")
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.write(begins.SerializeToString() + varint(7 << 3 | BYTES) + varint(len(gather) + len(tensor) + length))
        file.write(gather + tensor)
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
    body = graph([node("Add", ["x", "inner"], "out")], [], [value("out", 1000)], {"inner": values + 1})
    nodes = [node("Constant", [], "made", value=constant("value", values + 2)),
             node("If", ["condition"], "chosen", then_branch=body, else_branch=body),
             node("Odd", ["made"], table=constant("table", values + 3), domain="odd"),
             node("Sum", ["chosen", "numbers", "raw"], "z")]
    made = model(nodes, [value("x", 1000)], [value("z", 1000)], {"numbers": in_numbers, "raw": values + 4, "short": values[:8]})
    onnx.save(made, tmp_path / "m.onnx")
    read, originals = ([tensor for tensor in every_tensor(held) if tensor.name]
                       for held in (read_graph(tmp_path / "m.onnx"), made))
    assert {tensor.name: bool(locations(tensor)) for tensor in read} == {
        "numbers": True, "raw": True, "short": False, "value": True, "inner": True, "table": False}
    for tensor, original in zip(read, originals, strict=True):
        np.testing.assert_array_equal(tensor_array(values_of(tensor)), tensor_array(original))


def test_a_record_does_not_depend_on_where_a_model_lies(tmp_path: Path) -> None:
    """Bodies are part of their kernels' names, and hold weights."""
    branch = graph([node("MatMul", ["x", "w"], "z")], [], [value("z", 4, 64)], {"w": np.ones((64, 64), np.float32)})
    records = []
    for folder in (tmp_path / "here", tmp_path / "there_in_another_folder"):
        folder.mkdir()
        onnx.save(model([node("If", ["c"], then_branch=branch, else_branch=branch)],
                        [value("x", 4, 64), value("c", kind=BOOL)], [value("y", 4, 64)]), folder / "m.onnx")
        records.append(source_record(folder / "m.onnx", local_flavour("cpu"), {"then": 1}))
    assert records[0] == records[1]
    assert records[0].weight_bytes >= 64 * 64 * 4


def test_a_body_with_short_constants_is_named_as_it_stands() -> None:
    """Kernels that were recorded before large constants were left out keep their ids."""
    branch = graph([node("Relu", ["x"])], [], [value("y", 4)])
    entry = node("If", ["c"], then_branch=branch, else_branch=branch)
    assert attribute_value(entry.attribute[0]) == {"graph": hashlib.sha256(branch.SerializeToString()).hexdigest()[:12]}


def test_in_half_precision_only_weights_become_zeros() -> None:
    """A mask keeps its values, since fusions compare them, whether the graph or a body adds it."""
    square = ("w", "turned", "scaled", "mask", "table", "inner", "inner_mask")
    weights = {name: np.full((64, 64), 0.5, np.float16) for name in square} | {"bias": np.full(600, 0.5, np.float16)}
    branch = graph([node("MatMul", ["s", "inner"], "p"), node("Add", ["p", "inner_mask"], "r")], [],
                   [value("r", 64, 64, kind=HALF)])
    nodes = [node("Transpose", ["turned"], "t"), node("Mul", ["scaled", "scaled"], "u"), node("MatMul", ["x", "w"], "a"),
             node("MatMul", ["a", "t"], "b"), node("MatMul", ["b", "u"], "c"), node("Gather", ["table", "ids"], "g"),
             node("Sum", ["c", "g", "mask"], "s"), node("Neg", ["bias"], "k"),
             node("If", ["go"], then_branch=branch, else_branch=branch), node("Identity", ["k"], "z")]
    halved = model(nodes, [value("x", 64, 64, kind=HALF), value("ids", 64, kind=INT64), value("go", kind=BOOL)],
                   [value("y", 64, 64, kind=HALF), value("z", 600, kind=HALF)], weights)
    single = to_single_precision(halved, "model")
    assert single
    made = single.model
    assert {tensor.name for tensor in made.graph.initializer if is_hollow(tensor)} == {
        "w", "turned", "scaled", "table", "inner"}
    assert {tensor.data_type for tensor in made.graph.initializer} == {TensorProto.FLOAT}
    assert {tensor.data_type for tensor in halved.graph.initializer} == {HALF}
