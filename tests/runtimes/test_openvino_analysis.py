"""Models taken apart under OpenVINO: which ONNX nodes form one kernel, and kernels as separate models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_files import saved
from optional_packages import needs

from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.runtimes import runtime_named
from hase.runtimes.openvino.recording import DOMAIN, NODES, build_kernel, parse
from hase.runtimes.openvino.runs import check_kernel
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

WEIGHTS = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _openvino() -> None:
    needs("openvino", "requirements-openvino.txt")


def floats(*shape: int) -> np.ndarray:
    return WEIGHTS.uniform(0.1, 1.0, shape).astype(np.float32)


def residual(folder: Path, side: int = 32) -> Path:
    """Convolutions with additions and activations, a pool, and a layer whose product has lost its name to its bias."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "same", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b1"], ["c2"], "same", pads=[1, 1, 1, 1]),  # the same name again
        helper.make_node("Add", ["c2", "r1"], ["a"]), helper.make_node("Relu", ["a"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"]), helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w3"], ["m"]), helper.make_node("Add", ["m", "b3"], ["y"])]
    return saved(folder / "residual.onnx", nodes, {"x": [1, 16, side, side]}, {"y": [1, 10]},
                 {"w1": floats(16, 16, 3, 3), "w2": floats(16, 16, 3, 3), "b1": floats(16), "w3": floats(16, 10),
                  "b3": floats(10)})


def types(record: ModelRecord) -> list[str]:
    """The types of the kernels that take time, in the order in which they run; without copies."""
    kernels = [record.kernel_of(node) for node in record.nodes]
    return [kernel.type for kernel in kernels if kernel.moves_data and kernel.type != "Reorder"]


def check_whole(record: ModelRecord, model: Path) -> None:
    """Checks that each ONNX node is in one kernel, and that each kernel reads what an earlier one wrote."""
    origins = [(origin.name, origin.op_type) for node in record.nodes for origin in node.origins]
    nodes = [(node.name or node.output[0], node.op_type) for node in onnx.load(model).graph.node if node.op_type != "Constant"]
    assert sorted(origins) == sorted(nodes)
    made = set(record.inputs)
    for node in record.nodes:
        kernel = record.kernel_of(node)
        assert len(node.inputs) == len(kernel.inputs)
        read = {name for name, tensor in zip(node.inputs, kernel.inputs, strict=True) if name and not tensor.constant}
        assert read <= made
        made |= set(node.outputs)
    assert set(record.outputs) <= made


def test_fused_kernels_have_the_types_of_their_operators(tmp_path: Path) -> None:
    model = residual(tmp_path)
    record = parse(model).record
    assert types(record) == ["Conv_Relu", "Conv_Add_Relu", "GlobalAveragePool", "MatMul_Add"]
    check_whole(record, model)
    conv = next(record.kernel_of(node) for node in record.nodes if record.kernel_of(node).type == "Conv_Add_Relu")
    assert (conv.op_type, conv.domain, conv.attributes["kernel_shape"]) == ("Conv", DOMAIN, [3, 3])
    assert conv.flops == 32 * 32 * 16 * (2 * 16 * 9 + 1)  # with the bias
    assert [part["op_type"] for part in conv.attributes[NODES]] == ["Conv", "Add", "Relu"]
    assert record.flavour.name == f"{record.flavour.device}-{record.flavour.instruction_set}-openvino" \
                                  f"{record.flavour.runtime_version}-fused"
    # a convolution reads and writes channels last on this CPU; copies to other layouts are separate kernels
    for node in (node for node in record.nodes if record.kernel_of(node).type == "Reorder"):
        kernel = record.kernel_of(node)
        assert (kernel.op_type, node.origins) == ("Transpose", ())
        assert kernel.bytes_read == kernel.bytes_written == 16 * 32 * 32 * 4
        readers = [candidate for candidate in record.nodes if node.outputs[0] in candidate.inputs]
        assert [record.kernel_of(reader).op_type for reader in readers] == ["Conv"]


def test_a_kernel_has_one_id_in_all_models(tmp_path: Path) -> None:
    """Names of nodes and tensors are not part of the id."""
    first = parse(residual(tmp_path)).record
    proto = onnx.load(tmp_path / "residual.onnx")
    for node in proto.graph.node:
        node.name = f"other_{node.output[0]}"
        node.input[:] = [f"{name}_too" for name in node.input]
        node.output[:] = [f"{name}_too" for name in node.output]
    for named in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        named.name += "_too"
    onnx.save(proto, tmp_path / "renamed.onnx")
    second = parse(tmp_path / "renamed.onnx").record
    assert first.kernels.keys() == second.kernels.keys()


NORMALISED = [helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"]),
              helper.make_node("MatMul", ["n", "w"], ["y"])]
SHUFFLE = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Reshape", ["c", "five"], ["g"]),
           helper.make_node("Transpose", ["g"], ["t"], perm=[0, 2, 1, 3, 4]),
           helper.make_node("Reshape", ["t", "four"], ["s"]), helper.make_node("Conv", ["s", "w"], ["y"])]
GATE = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Sigmoid", ["c"], ["y"])]


@pytest.mark.parametrize(("nodes", "x", "y", "weights", "kernel_types"), [
    # OpenVINO normalises in one layer, which has no node's name, and scales in another
    pytest.param(NORMALISED, [1, 64, 256], [1, 64, 128], {"scale": floats(256), "bias": floats(256), "w": floats(256, 128)},
                 ["LayerNormalization", "MatMul"], id="parts of one node are one kernel"),
    pytest.param(SHUFFLE, [1, 64, 28, 28], [1, 64, 28, 28],
                 {"w": floats(64, 64, 1, 1), "five": np.array([1, 2, 32, 28, 28]), "four": np.array([1, 64, 28, 28])},
                 ["Conv", "Transpose", "Conv"], id="a shuffle is one kernel of three nodes"),
    # as in a network that weights its channels: the sigmoid has more operations
    pytest.param(GATE, [1, 4, 1, 1], [1, 96, 1, 1], {"w": floats(96, 4, 1, 1)}, ["Conv_Sigmoid"],
                 id="a small convolution counts more than a large activation")])
def test_which_nodes_form_a_kernel(nodes: list[onnx.NodeProto], x: list[int], y: list[int], weights: dict[str, np.ndarray],
                                   kernel_types: list[str], tmp_path: Path) -> None:
    model = saved(tmp_path / "model.onnx", nodes, {"x": x}, {"y": y}, weights)
    record = parse(model).record
    assert types(record) == kernel_types
    check_whole(record, model)


def test_sizes_that_are_computed_are_folded(tmp_path: Path) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "zero"], ["b"], axis=0),
             helper.make_node("Unsqueeze", ["b", "axes"], ["b1"]), helper.make_node("Concat", ["b1", "rest"], ["to"], axis=0),
             helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Reshape", ["r", "to"], ["f"]),
             helper.make_node("MatMul", ["f", "w"], ["y"])]
    model = saved(tmp_path / "sizes.onnx", nodes, {"x": ["batch", 8, 4, 4]}, {"y": ["batch", 10]},
                  {"zero": np.array(0), "axes": np.array([0]), "rest": np.array([-1]), "w": floats(128, 10)})
    record = parse(model, {"batch": 3}).record
    assert record.model == "sizes@batch=3"
    assert set(types(record)) == {"Relu", "MatMul"}
    assert [kernel.flops for kernel in record.kernels.values() if kernel.op_type == "MatMul"] == [2 * 3 * 128 * 10]
    with pytest.raises(UserError, match="batch"):
        parse(model)
    model = saved(tmp_path / "unknown.onnx", [helper.make_node("NoSuchOperator", ["x"], ["y"], domain="nowhere")],
                  {"x": [1, 4]}, {"y": [1, 4]}, {})
    with pytest.raises(UserError, match="unknown: OpenVINO can't take this model"):
        parse(model)


@pytest.mark.slow
def test_each_kernel_is_a_separate_model(tmp_path: Path) -> None:
    """OpenVINO runs it, and ONNX's own evaluator gives outputs of the kernel's shapes."""
    record = parse(residual(tmp_path)).record
    for kernel in record.kernels.values():
        path = build_kernel(kernel, tmp_path / "kernels")
        assert built_kernel(path) == kernel
        check_kernel(path, kernel, "cpu")
        outputs = [np.asarray(output) for output in ReferenceEvaluator(onnx.load(path)).run(None, dummy_inputs(kernel))]
        assert [output.shape for output in outputs] == [tensor.shape for tensor in kernel.outputs]
        if kernel.type.endswith("Relu"):
            assert min(output.min() for output in outputs) >= 0
    assert sorted(path.stem for path in (tmp_path / "kernels").glob("*.onnx")) == sorted(record.kernels)


def test_a_record_is_written_with_its_origin(tmp_path: Path) -> None:
    workspace, runtime = Workspace(tmp_path), runtime_named("openvino")
    [record] = runtime.write_records(workspace, residual(tmp_path), "cpu", {}, True, ModelOrigin("resnet", "zoo"))
    assert read_model_record(record_path(workspace, record.flavour, "residual")) == record
    assert (record.group, record.collection) == ("resnet", "zoo")
    with pytest.raises(UserError, match="device cuda: OpenVINO is supported on cpu only"):
        runtime.write_records(workspace, tmp_path / "residual.onnx", "cuda", {}, True, ModelOrigin())
