"""The fusion detector: what ORT fused, with the same names in every model and the right operations and bytes; and a kernel's
identity across operator sets."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import run_script
from conftest import TORCH_BATCH, TORCH_MODELS, small_model, torch_model
from onnx import TensorProto, helper, numpy_helper
from small_graphs import constant, model, node, value

from hase.learned.kernels.features import KERNEL_FEATURES, kernel_features
from hase.ort_analysis.graph.analysis import analyze
from hase.records import kernel_record_files
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Tensor
from hase.records.kernel_record_files import index_path, read_index, read_model_record, read_model_records
from hase.records.kernel_types import canonical_description, describe_kernel
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.model_files import COLLECTION_KEY, GROUP_KEY
from hase.utils.paths import Workspace

PROVIDERS = ("cpu", "cuda")


@pytest.fixture(scope="module")
def records(torch_models: dict[str, Path]) -> dict[tuple[str, str], ModelRecord]:
    """The records of the torch models under each provider."""
    return {(name, provider): analyze(path, provider) for name, path in torch_models.items() for provider in PROVIDERS}


def origins(record: ModelRecord, kernel_type: str) -> list[tuple[str, ...]]:
    """The original operators in every node of a kernel type."""
    return [tuple(origin.op_type for origin in node.origins) for node in record.nodes
            if record.kernel_of(node).type == kernel_type]


def kernels_of(record: ModelRecord, kernel_type: str) -> list[Kernel]:
    return [kernel for kernel in record.kernels.values() if kernel.type == kernel_type]


@pytest.mark.slow
def test_what_is_fused_in_a_resnet(torch_models: dict[str, Path], records: dict[tuple[str, str], ModelRecord]) -> None:
    """By name: the Add and Relu in a fused node are those that follow its Conv in the exported model. On CUDA, the counts are
    those of the graph that the CUDA provider saves on a GPU."""
    record = records["resnet18", "cpu"]
    assert {name: origins(record, name) for name in ("Conv_Add_Relu", "Conv_Relu", "Conv", "MaxPool", "Gemm")} == {
        "Conv_Add_Relu": [("Conv", "Add", "Relu")] * 8, "Conv_Relu": [("Conv", "Relu")] * 9, "Conv": [("Conv",)] * 3,
        "MaxPool": [("MaxPool",)], "Gemm": [("Gemm",)]}
    sole = [entry.origins for entry in record.nodes if entry.origins]
    graph = onnx.load(str(torch_models["resnet18"]), load_external_data=False).graph
    maker, by_name = {made.output[0]: made for made in graph.node}, {made.name: made for made in graph.node}
    for part in sole:
        if len(part) == 3:
            conv, add, relu = (by_name[origin.name] for origin in part)
            assert relu.input[0] == add.output[0]
            assert conv.name in {maker[name].name for name in add.input if name in maker}
    on_cuda = records["resnet18", "cuda"]
    counts = Counter(origin for types in ("Conv", "Relu", "Add") for origin in origins(on_cuda, types))
    assert on_cuda.derived is not has_cuda()
    assert counts == {("Conv",): 20, ("Relu",): 17, ("Add",): 8}


@pytest.mark.parametrize(("provider", "types"), [("cpu", {"Conv_Relu": ("Conv", "BatchNormalization", "Relu")}),
                                                 ("cuda", {"Conv": ("Conv", "BatchNormalization"), "Relu": ("Relu",)})])
def test_a_folded_norm_is_an_origin_but_not_part_of_the_type(provider: str, types: dict[str, tuple[str, ...]]) -> None:
    numbers = {"w": np.ones((16, 3, 3, 3), np.float32)} | dict.fromkeys(("scale", "shift", "mean", "var"),
                                                                         np.ones(16, np.float32))
    normed = [node("Conv", ["x", "w"], "c", "the_conv", kernel_shape=[3, 3], pads=[1] * 4),
              node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], "b", "the_norm")]
    record = analyze(model([*normed, node("Relu", ["b"])], [value("x", 1, 3, 8, 8)], [value("y", 1, 16, 8, 8)], numbers),
                     provider)
    assert {name: origins(record, name) for name in types} == {name: [names] for name, names in types.items()}
    assert [origin.name for entry in record.nodes for origin in entry.origins][:2] == ["the_conv", "the_norm"]


@pytest.mark.slow
def test_attention(records: dict[tuple[str, str], ModelRecord]) -> None:
    products = origins(records["vit_tiny", "cuda"], "FusedMatMul")
    assert len(products) == 4
    assert all("MatMul" in part for part in products)
    assert sum("Mul" in part and "Transpose" in part for part in products) == 2  # query times key, scaled
    assert origins(records["vit_tiny", "cuda"], "SkipLayerNormalization") == [("Add", "LayerNormalization")]


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_no_original_node_is_lost_and_the_dag_is_in_the_record(
        torch_models: dict[str, Path], records: dict[tuple[str, str], ModelRecord], name: str, provider: str) -> None:
    """Every input of a node is a weight, an input of the model, or an output of an earlier node; as are the model's outputs."""
    graph, record = onnx.load(str(torch_models[name]), load_external_data=False).graph, records[name, provider]
    constant = {tensor.name for tensor in graph.initializer} | {""}
    for original in graph.node:
        if constant.issuperset(original.input):
            constant |= set(original.output)
    wanted = {(original.name, original.op_type) for original in graph.node if not constant.issuperset(original.output)}
    recorded = {(origin.name, origin.op_type) for entry in record.nodes for origin in entry.origins}
    assert wanted <= recorded <= {(original.name, original.op_type) for original in graph.node}
    made = set(record.inputs)
    for entry in record.nodes:
        for tensor_name, tensor in zip(entry.inputs, record.kernel_of(entry).inputs, strict=False):
            assert not tensor_name or tensor.constant or tensor_name in made, f"{entry.name} takes {tensor_name} too early"
        made |= set(entry.outputs)
    assert set(record.outputs) <= made


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_kernel_in_two_models_has_one_id(provider: str) -> None:
    renamed = small_model()
    for entry in renamed.graph.node:
        entry.name = f"other_{entry.name}"
    for tensor in renamed.graph.initializer:  # the kernels are the same with other weights
        if len(tensor.dims) == 4:
            tensor.CopyFrom(constant(tensor.name, numpy_helper.to_array(tensor) * np.float32(2)))
    assert set(analyze(small_model(), provider).kernels) == set(analyze(renamed, provider).kernels)


def test_an_explicit_default_is_the_same_kernel_and_another_value_is_not() -> None:
    plain, spelled, strided = small_model(), small_model(), small_model()
    del spelled.graph.node[0].attribute[:]
    spelled.graph.node[0].attribute.extend([helper.make_attribute(key, value) for key, value in {
        "pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1], "group": 1, "auto_pad": "NOTSET"}.items()])
    assert set(analyze(spelled, "cuda").kernels) == set(analyze(plain, "cuda").kernels)
    strided.graph.node[0].attribute.append(helper.make_attribute("strides", [2, 2]))
    assert not {kernel.id for kernel in kernels_of(analyze(strided, "cuda"), "Conv")} & set(analyze(plain, "cuda").kernels)


def test_the_file_names_the_group_and_collection_of_a_model(tmp_path: Path) -> None:
    """Or that the caller names; a model without either is its own group."""
    plain, stamped, path = small_model(), small_model(), tmp_path / "net@b.onnx"
    helper.set_model_props(stamped, {GROUP_KEY: "wide|nets", COLLECTION_KEY: "timm"})
    for proto, group, collection, named in (
            (plain, "", "", ("net@b", "")), (stamped, "", "", ("wide_nets", "timm")),  # "|" separates groups
            (stamped, "mine", "ours", ("mine", "ours"))):
        onnx.save(proto, path)
        record = analyze(path, "cpu", group=group, collection=collection)
        assert (record.group, record.collection, record.file_stem) == (*named, "net@b")


def test_operations_and_bytes_by_hand() -> None:
    record = analyze(small_model(channels=8, side=16), "cuda")
    first = next(kernel for kernel in kernels_of(record, "Conv") if kernel.inputs[0].shape == (1, 3, 16, 16))
    flatten = next(kernel for kernel in record.kernels.values() if kernel.op_type in ("Flatten", "Reshape"))
    for kernel, flops, bytes_read, bytes_written, weight_bytes in (
            (first, 2 * (8 * 16 * 16) * 27, 4 * (3 * 16 * 16 + 8 * 27), 4 * 8 * 16 * 16, 4 * 8 * 27),
            (kernels_of(record, "Gemm")[0], 4 * (2 * 8 + 1), 4 * (8 + 8 * 4 + 4), 4 * 4, 4 * (8 * 4 + 4)),
            (kernels_of(record, "Add")[0], 8 * 256, 2 * 4 * 8 * 256, 4 * 8 * 256, 0), (flatten, 0, 0, 0, 0)):
        assert (kernel.flops, kernel.bytes_read, kernel.bytes_written) == (flops, bytes_read, bytes_written), kernel.id
        assert kernel is flatten or kernel.weight_bytes == weight_bytes
    assert record.weight_bytes >= 4 * (8 * 27 + 8 * 8 * 9 + 8 * 4 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_operations_agree_with_torchs_counter(records: dict[tuple[str, str], ModelRecord], name: str) -> None:
    """Convolutions and products, which torch counts without their biases; on the graph whose channels are not padded."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    side = TORCH_MODELS[name]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the products, not one fused operator
        torch_model(name)(torch.randn(TORCH_BATCH, 3, side, side))
    record = records[name, "cuda"]
    kernels = [record.kernel_of(node) for node in record.nodes]
    counted = sum(kernel.flops for kernel in kernels if kernel.op_type in ("Conv", "Gemm", "MatMul", "FusedMatMul"))
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def detect(workspace: Workspace, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script("ort_analysis/fusion_detector.py", "--workspace", workspace.root, *options)


@pytest.mark.slow
def test_the_command_writes_records_and_index_and_continues_after_a_bad_model(workspace: Workspace) -> None:
    """One record per combination of sizes, whichever process made it."""
    files.write_bytes(workspace.models / "net.onnx", small_model(batch="batch").SerializeToString())
    (workspace.models / "broken.onnx").write_text("no model")
    done = detect(workspace, "--device", "cpu", "--dim", "batch=1,3", "--jobs", "2", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == ["broken.onnx"] * 2
    assert "2 of 4 models failed: broken.onnx, broken.onnx" in done.stderr
    flavour = local_flavour("cpu")
    written = read_model_records(workspace, flavour)
    assert [(record.model, record.dims) for record in written] == [
        (f"net@batch={batch},dynamic", {"batch": batch}) for batch in (1, 3)]
    index = read_index(index_path(workspace, flavour))
    assert {kernel.id for kernel in index.all_kernels()} == {name for record in written for name in record.kernels}
    assert all(entry.models == tuple(record.model for record in written if name in record.kernels)
               for entries in index.kernels.values() for name, entry in entries.items())
    (workspace.models / "broken.onnx").unlink()
    assert detect(workspace, "--device", "cpu", "--model", "net.onnx", "--dim", "batch=3").returncode == 0
    assert len(read_index(index_path(workspace, flavour)).all_kernels()) == len(index.all_kernels())
    on_gpu = detect(workspace, "--model", "net.onnx", "--dim", "batch=3", "--device", "cuda", "--group", "asked",
                    "--collection", "asked too", "--json")  # needs no GPU
    flavour = local_flavour("cuda")
    assert [row["flavour"] for row in json.loads(on_gpu.stdout)["records"]] == [flavour.name]
    [record], index = read_model_records(workspace, flavour), read_index(index_path(workspace, flavour))
    assert (record.group, record.collection) == ("asked", "asked too")
    assert index.collections == {record.model: "asked too"}
    assert {index.groups_of(entry) for entry in index.entries()} == {("asked",)}


def test_records_of_another_version_and_none(workspace: Workspace) -> None:
    record = analyze(small_model(), "cpu", name="anet")
    path = kernel_record_files.record_path(workspace, record.flavour, record.model)
    files.write_json(path, record)
    assert read_model_record(path) == record
    path.write_text(json.dumps(files.with_digest(json.loads(path.read_text()) | {"version": 99})))
    with pytest.raises(UserError, match=r"version 99, .*python ort_analysis/fusion_detector\.py"):
        read_model_record(path)
    with pytest.raises(UserError, match="no kernel records of flavour"):
        read_model_records(workspace, local_flavour("cuda"))


def test_an_index_of_records_and_of_another_index() -> None:
    """Each model is named once, those of the index first; what a record says of its model wins."""
    record = analyze(small_model(), "cpu", name="one")
    two = record.model_copy(update={"model": "two", "group": "older", "collection": "first"})
    earlier = kernel_record_files.build_index(record.flavour, [two, record])
    three = record.model_copy(update={"model": "three", "collection": "third"})
    newer = two.model_copy(update={"group": "newer", "collection": ""})
    index = kernel_record_files.build_index(record.flavour, [newer, three], [earlier])
    assert [entry.models for entry in index.entries()] == [("two", "one", "three")] * len(record.kernels)
    assert index.groups == {"two": "newer", "one": record.group, "three": record.group}
    assert index.collections == {"two": "first", "three": "third"}


def cell(opset: int) -> onnx.ModelProto:
    """A piece of MobileNetV2 (Conv, Clip, a mean, Gemm) beside a Split, a Cast and a pool, as exported at an operator set."""
    weight = np.random.default_rng(0).standard_normal
    mean: Any = (["c6", "axes"], {}) if opset >= 18 else (["c6"], {"axes": [2, 3]})
    parts: Any = {"num_outputs": 2} if opset >= 18 else {}
    nodes = [node("Conv", ["x", "w"], "c", pads=[1, 1, 1, 1]), node("Clip", ["c", "low", "high"], "c6"),
             node("ReduceMean", mean[0], "m", keepdims=0, **mean[1]), node("Gemm", ["m", "head"]),
             node("Split", ["c6"], ["left", "right"], axis=1, **parts),
             node("AveragePool", ["left"], "pool", kernel_shape=[2, 2]), node("Cast", ["right"], "half", to=TensorProto.DOUBLE)]
    return model(nodes, [value("x", 2, 4, 8, 8)], ["y", "pool", "half"], {
        "w": weight((8, 4, 3, 3)).astype(np.float32), "head": weight((8, 5)).astype(np.float32), "axes": [2, 3], "low": 0.0,
        "high": 6.0}, opset)


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_a_model_has_the_same_kernels_at_every_operator_set(provider: str) -> None:
    reference = set(analyze(cell(20), provider).kernels)
    assert len(reference) >= 7
    for opset in (13, 17, 18, 19, 21, 22, 23, 24):
        assert set(analyze(cell(opset), provider).kernels) == reference, opset


def version(op_type: str, opset: int, inputs: Sequence[Any] = ("float32",), outputs: int = 1, **attributes: Any) -> int:
    """The operator set in the description of a node from operator set `opset`."""
    tensors = [KernelInput(dtype=dtype, shape=(2, 4)) for dtype in inputs]
    return canonical_description(op_type, "", opset, attributes, tensors, [Tensor(dtype="float32", shape=(2, 4))] * outputs)[0]


def test_operators_whose_meaning_changed_keep_their_version() -> None:
    assert [version("Relu", opset) for opset in (6, 13, 14, 20, 24)] == [20] * 5
    assert [version("Softmax", opset, axis=1) for opset in (11, 13, 18)] == [11, 20, 20]
    three_inputs = ("float32",) * 3
    assert [version("GroupNormalization", opset, three_inputs, num_groups=2) for opset in (18, 20, 21, 23)] == [20, 20, 21, 21]
    assert [version("AveragePool", opset, kernel_shape=[2], ceil_mode=ceil) for opset, ceil in ((17, 0), (17, 1), (22, 1))] == [
        20, 11, 20]
    assert [version("Mish", 22, [dtype]) for dtype in ("float32", "bfloat16")] == [20, 22]  # 20 does not take bfloat16
    assert [version("Cast", 24, to=1, saturate=1, round_mode=mode) for mode in ("up", "down")] == [20, 24]
    assert canonical_description("Conv", "com.microsoft.nchwc", 1, {}, [], [])[0] == 1
    assert version("NobodyKnows", 18) == 18


def test_bounds_and_axes_that_were_attributes() -> None:
    x = KernelInput(dtype="float32", shape=(2, 4))
    outputs = [Tensor(dtype="float32", shape=(2, 4))]
    for op_type, given, attributes, inputs in (
            ("Clip", 6, {"min": 0.0, "max": 6.0}, [None, (0.0,), (6.0,)]),
            ("Clip", 6, {"min": 0.0, "max": 3.4028234663852886e38}, [None, (0.0,)]),
            ("Squeeze", 11, {"axes": [0]}, [None, (0,)])):
        opset, left, tensors, *_ = canonical_description(op_type, "", given, attributes, [x], outputs)
        assert (opset, left, [tensor.values for tensor in tensors]) == (20, {}, inputs)


def test_a_gather_costs_as_much_as_it_reads() -> None:
    """A small table is read once."""
    for rows, read in ((10_000_000, 32), (8, 8)):
        gather = describe_kernel("Gather", "", 20, {"axis": 0}, [
            KernelInput(dtype="float32", shape=(rows, 64), constant=True), KernelInput(dtype="int64", shape=(32,))],
            [Tensor(dtype="float32", shape=(32, 64))])
        assert (gather.bytes_read, gather.weight_bytes) == (read * 64 * 4 + 32 * 8, rows * 64 * 4)


def lstm(sequence: int, batch: int, layout: int = 0) -> Kernel:
    """16 hidden units of 8 numbers."""
    constants = [KernelInput(dtype="float32", shape=shape, constant=True) for shape in ((2, 64, 8), (2, 64, 16), (2, 128))]
    return describe_kernel("LSTM", "", 22, {"direction": "bidirectional", "hidden_size": 16, "layout": layout}, [
        KernelInput(dtype="float32", shape=(batch, sequence, 8) if layout else (sequence, batch, 8)), *constants],
        [Tensor(dtype="float32", shape=(sequence, 2, batch, 16))])


def test_a_recurrent_layer_costs_its_steps() -> None:
    layer = lstm(sequence=30, batch=3)
    assert layer.flops == 2 * 2 * 30 * 3 * 4 * 16 * (8 + 16)
    assert lstm(sequence=30, batch=3, layout=1).flops == layer.flops
    assert layer.bytes_read - lstm(sequence=29, batch=3).bytes_read == 3 * 8 * 4 + 2 * 4 * 16 * 16 * 4  # an input, and R again
    waits = [kernel_features(kernel)[KERNEL_FEATURES.index("tables")] for kernel in (layer, lstm(30, 3, layout=1), lstm(1, 3))]
    assert waits == [29, 29, 0]
