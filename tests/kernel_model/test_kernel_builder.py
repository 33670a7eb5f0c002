"""Kernels as separate models: each computes the same as its node in the whole model, and runs on made-up inputs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command import run_script
from conftest import TORCH_MODELS, small_model
from onnx import helper, numpy_helper
from small_graphs import BOOL, INT32, INT64, graph, model, node, value

from hase.kernel_model.building import kernel_models
from hase.kernel_model.building.dummy_data import dummy_inputs, dummy_tensor, input_name, output_name
from hase.kernel_model.building.kernel_models import INLINE_BYTES, build_model, check_kernel, write_kernel
from hase.kernel_model.sampling.free_shapes.sizes import tensor as input_of
from hase.ort_analysis.graph.analysis import analyze, record_of
from hase.ort_analysis.graph.parsing import parse_graph
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Tensor
from hase.records.kernel_record_files import build_index
from hase.records.kernel_types import describe_kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.model_graphs import at_root, values_of
from hase.utils.ort_sessions import open_session
from hase.utils.paths import Workspace

CASES = [(name, provider) for name in TORCH_MODELS for provider in ("cpu", "cuda")]
Traced = tuple[ModelRecord, dict[str, np.ndarray]]  # and the value that every tensor of the optimised graph had in one run


def trace(path: Path, provider: str, folder: Path) -> Traced:
    """Runs the optimised graph unchanged, with every tensor as an output."""
    parsed = parse_graph(path, provider, folder=folder)
    record, proto = record_of(parsed), parsed.proto
    assert [entry.name for entry in proto.graph.node] == [entry.name for entry in record.nodes]
    values = {tensor.name: numpy_helper.to_array(values_of(tensor)) for tensor in proto.graph.initializer}
    outputs = {output.name for output in proto.graph.output}
    for entry in proto.graph.node:
        proto.graph.output.extend(helper.ValueInfoProto(name=name) for name in entry.output if name and name not in outputs)
    session = open_session(proto.SerializeToString(), "cpu" if record.derived else provider, optimize="none", entries=at_root())
    generator = np.random.default_rng(0)
    values |= {name: generator.standard_normal(tensor.shape).astype(tensor.dtype) for name, tensor in record.inputs.items()}
    names = [output.name for output in session.get_outputs()]
    return record, values | dict(zip(names, session.run(names, {name: values[name] for name in record.inputs}), strict=True))


@pytest.fixture(scope="module")
def traced(torch_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Traced]:
    """Every case, run once."""
    return {(name, provider): trace(torch_models[name], provider, tmp_path_factory.mktemp(name)) for name, provider in CASES}


def run_kernel(kernel: Kernel, values: Sequence[np.ndarray | None], provider: str) -> list[np.ndarray]:
    """The outputs of the kernel as a separate model, for these inputs (None where one is left out), without those left out."""
    present = [(position, tensor, values[position]) for position, tensor in enumerate(kernel.inputs) if tensor.present]
    constants = {position: array for position, tensor, array in present if tensor.constant and array is not None}
    feed = {input_name(position): array for position, tensor, array in present if not tensor.constant}
    session = open_session(build_model(kernel, constants).SerializeToString(), provider, optimize="none", name=kernel.id)
    return [np.asarray(output) for output in session.run(None, feed)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "provider"), CASES)
def test_a_kernel_computes_the_same_as_its_node(traced: dict[tuple[str, str], Traced], name: str, provider: str) -> None:
    """For every node: the inputs that it has in the whole model give the same outputs. The record describes all these tensors:
    their types, shapes, and the small constants kept by value."""
    (record, values), kept_by_value = traced[name, provider], 0
    for entry in record.nodes:
        kernel, inputs = record.kernel_of(entry), [values[name] if name else None for name in entry.inputs]
        outputs = run_kernel(kernel, inputs, "cpu" if record.derived else provider)
        wanted = [values[name] if name else None for name in entry.outputs]
        for output, expected in zip(outputs, [array for array in wanted if array is not None], strict=True):
            assert (output.dtype, output.shape) == (expected.dtype, expected.shape), entry.name
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5, err_msg=entry.name)
        for array, tensor in [*zip(inputs, kernel.inputs, strict=False), *zip(wanted, kernel.outputs, strict=True)]:
            assert tensor.present == (array is not None)
            if array is not None:
                assert (str(array.dtype), array.shape) == (tensor.dtype, tensor.shape), entry.name
                if isinstance(tensor, KernelInput) and tensor.values is not None:
                    assert tensor.values == tuple(array.ravel().tolist())
                    kept_by_value += 1
    assert kept_by_value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "provider"), CASES)
def test_every_kernel_runs_on_made_up_inputs(traced: dict[tuple[str, str], Traced], tmp_path: Path, name: str,
                                             provider: str) -> None:
    """It loads from its file, runs and gives no NaN. The file is named after it and holds its whole description."""
    record, _ = traced[name, provider]
    for kernel in record.kernels.values():
        path = write_kernel(kernel, tmp_path)
        height, width = (1, 1, *kernel.inputs[0].shape)[-2:]
        assert re.match(rf"{kernel.type}_{height}x{width}_.+\.onnx$", path.name)
        assert built_kernel(path) == kernel
        check_kernel(path, kernel, "cpu" if record.derived else provider)
    assert len(list(tmp_path.glob("*.onnx"))) == len(record.kernels)
    assert max(path.stat().st_size for path in tmp_path.glob("*.onnx")) < 2 * INLINE_BYTES + 16384


def test_made_up_inputs_suit_the_operator(tmp_path: Path) -> None:
    """Operators that don't take every number: indices, logarithms, powers, divisors, a large index table."""
    nodes = [node("Gather", ["embedding", "tokens"], "e"), node("Gather", ["e", "which"], "g", axis=2),
             node("ReduceSum", ["g"], "total", keepdims=0), node("Log", ["e"], "l"), node("Sqrt", ["e"], "s"),
             node("Pow", ["e", "s"], "p"), node("Div", ["l", "p"], "d"), node("Gather", ["wide", "table"], "t"),
             node("ReduceSum", ["t"], "other", keepdims=0), node("Add", ["total", "other"], "both"), node("Mul", ["d", "both"])]
    embedding = np.random.default_rng(0).uniform(0.1, 1.0, (9, 16)).astype(np.float32)
    odd = model(nodes, [value("tokens", 2, 6, kind=INT64), value("which", 3, kind=INT32), value("wide", 50, 2)],
                [value("y", 2, 6, 16)], {"embedding": embedding, "table": np.arange(200, dtype=np.int64)[::-1] % 50})
    record = analyze(odd, "cpu")
    assert {kernel.op_type for kernel in record.kernels.values()} >= {"Gather", "Log", "Sqrt", "Pow", "Div"}
    for kernel in record.kernels.values():
        check_kernel(write_kernel(kernel, tmp_path), kernel, "cpu")
        first, again, other = (dummy_inputs(kernel, seed) for seed in (0, 0, 1))
        assert all(np.array_equal(array, again[name]) for name, array in first.items())
        for array in (*first.values(), *other.values()):
            assert not np.issubdtype(array.dtype, np.floating) or np.abs(array).min() >= 1e-4  # no denormals, no zeros
    gathers = [kernel for kernel in record.kernels.values() if kernel.op_type == "Gather"]
    limits = {kernel.inputs[0].shape: kernel.inputs[0].shape[kernel.attributes.get("axis", 0)] for kernel in gathers}
    assert limits == {(9, 16): 9, (2, 6, 16): 16, (50, 2): 50}
    for kernel in gathers:
        indices = dummy_tensor(kernel, 1)
        assert indices.min() >= 0
        assert indices.max() < limits[kernel.inputs[0].shape]
    assert next(k.inputs[1].value_range for k in gathers if k.inputs[0].shape == (50, 2)) == (0, 49)


def test_a_kernel_with_a_subgraph_is_refused() -> None:
    branches = {name: graph([node(op, ["x"], op)], [], [value(op, 4)])
                for name, op in (("then_branch", "Relu"), ("else_branch", "Neg"))}
    record = analyze(model([node("If", ["condition"], **branches)], [value("condition", kind=BOOL), value("x", 4)]), "cpu")
    kernel = next(kernel for kernel in record.kernels.values() if kernel.op_type == "If")
    with pytest.raises(UserError, match="holds a subgraph"):
        build_model(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_a_carrier_runs_all_kernels(traced: dict[tuple[str, str], Traced], name: str) -> None:
    kernels = list(traced[name, "cpu"][0].kernels.values())
    carrier, feed, weights, _ = kernel_models.build_carrier(kernels, "cpu")
    session = open_session(carrier.SerializeToString(), "cpu", optimize="none", name="carrier", weights=weights)
    shapes = session.run(None, feed)
    wanted = [tensor.shape for kernel in kernels for tensor in kernel.outputs if tensor.present]
    assert [tuple(shape.tolist()) for shape in shapes] == wanted
    names = {entry.name: entry.op_type for entry in carrier.graph.node}
    assert [names[kernel_models.node_name(number)] for number in range(len(kernels))] == [kernel.op_type for kernel in kernels]
    assert sum(map(kernel_models.carrier_bytes, kernels)) >= sum(tensor.nbytes for tensor in feed.values())


def test_a_file_needs_no_other_one(tmp_path: Path) -> None:
    """ONNX Runtime by itself makes the weights of a copied file before its first run, and gives what Hase's session gives."""
    kernel = next(kernel for kernel in analyze(small_model(channels=64), "cpu").kernels.values()
                  if kernel.weight_bytes > INLINE_BYTES)
    built = write_kernel(kernel, tmp_path / "built")
    path = tmp_path / "copied.onnx"
    shutil.copy(built, path)
    assert kernel.weight_bytes > INLINE_BYTES > path.stat().st_size
    inputs = dummy_inputs(kernel)
    plain = onnxruntime.SessionOptions()
    plain.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    outputs = onnxruntime.InferenceSession(path, plain).run(None, inputs)
    assert not {"Tile", "Reshape"} & {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    session = kernel_models.open_kernel(path, "cpu", kernel, save_to=tmp_path / "unchanged.onnx")
    unchanged = onnx.load(tmp_path / "unchanged.onnx", load_external_data=False)
    assert [node.op_type for node in unchanged.graph.node] == [kernel.op_type]
    for output, output_of_hase in zip(outputs, session.run(None, inputs), strict=True):
        assert output == pytest.approx(output_of_hase, rel=1e-3, abs=1e-3)
    stored = onnx.numpy_helper.to_array(next(
        tensor for tensor in kernel_models.read_built(path)[0].graph.initializer if tensor.name == input_name(1)))
    assert len(np.unique(stored)) >= 64
    check_kernel(path, kernel, "cpu")


def test_given_weights_are_written_into_the_file(tmp_path: Path) -> None:
    kernel = next(kernel for kernel in analyze(small_model(), "cpu").kernels.values() if kernel.type == "Conv_Add_Relu")
    weights = {1: np.zeros(kernel.inputs[1].shape, np.float32)}
    weights |= {2: np.zeros(kernel.inputs[2].shape, np.float32)} if kernel.inputs[2].present else {}
    path = write_kernel(kernel, tmp_path, weights)
    assert path.stat().st_size > kernel.inputs[1].bytes
    inputs = dummy_inputs(kernel)
    inputs |= {name: np.zeros_like(array) for name, array in inputs.items() if name == input_name(3)}
    assert not open_session(path, "cpu", optimize="none").run([output_name(0)], inputs)[0].any()


@pytest.mark.parametrize(("name", "message"), [("model", r"not a kernel that kernel_builder\.py wrote"),
                                               ("text", "not an ONNX model"), ("none", "no such file")])
def test_files_that_are_no_kernels(name: str, message: str, tmp_path: Path) -> None:
    onnx.save(small_model(), tmp_path / "model.onnx")
    (tmp_path / "text.onnx").write_text("no model at all")
    with pytest.raises(UserError, match=message):
        built_kernel(tmp_path / f"{name}.onnx")


def build(workspace: Workspace, *options: str) -> subprocess.CompletedProcess[str]:
    return run_script("kernel_model/kernel_builder.py", "--workspace", workspace.root, *options)


@pytest.mark.slow
def test_the_command_takes_a_kernel_a_record_and_the_index(workspace: Workspace) -> None:
    record = analyze(small_model(), "cpu", name="small")
    kernel = next(iter(record.kernels.values()))
    files.write_json(workspace.root / "one.json", kernel)
    of_kernel = build(workspace, "--kernel", str(workspace.root / "one.json"), "--check", "--json")
    assert of_kernel.returncode == 0, of_kernel.stderr
    if not has_cuda():
        assert [Path(row["file"]).name for row in json.loads(of_kernel.stdout)["built"]] == [f"{kernel.id}.onnx"]
        assert (workspace.kernel_onnx / record.flavour.name / f"{kernel.id}.onnx").is_file()
    folder = workspace.kernel_records / record.flavour.name
    files.write_json(folder / "small.json", record)
    files.write_json(folder / "index.json", build_index(record.flavour, [record]))
    of_record = json.loads(build(workspace, "--record", str(folder / "small.json"), "--json").stdout)
    of_index = json.loads(build(workspace, "--check", "--json").stdout)
    assert [row["kernel"] for row in of_record["built"]] == list(record.kernels)
    assert {row["kernel"] for row in of_index["built"]} == set(record.kernels)
    assert all(row["kept"] for row in of_index["built"])  # built a moment ago
    assert of_index["failed"] == []


@pytest.mark.parametrize(("text", "message"), [
    ('{"op_type": "Conv"}', "not a kernel: "), ("[", "not valid JSON"), ("", "python ort_analysis/fusion_detector.py")])
def test_the_command_and_bad_json_or_no_records(workspace: Workspace, text: str, message: str) -> None:
    path = workspace.root / "bad.json"
    path.write_text(text)
    done = build(workspace, *(["--kernel", str(path)] if text else []))
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert message in done.stderr


def test_a_kernel_has_the_same_output_shapes_as_in_its_model(tmp_path: Path) -> None:
    """Kernels whose output size depends on data, run alone and in a carrier, where an Abs writes their inputs."""
    kernels = [describe_kernel(op, "", 17, attributes, inputs, [Tensor(dtype=dtype, shape=shape)]) for
               op, attributes, inputs, dtype, shape in (
        ("NonZero", {}, [input_of("float32", 8, 50)], "int64", (2, 137)),
        ("Compress", {"axis": 1}, [input_of("float32", 3, 90), input_of("bool", 90)], "float32", (3, 17)),
        ("Unique", {}, [input_of("int64", 40, 5)], "int64", (23,)),
        ("NonMaxSuppression", {}, [input_of("float32", 1, 300, 4), input_of("float32", 1, 1, 300), *(
            KernelInput(dtype=dtype, shape=(), constant=True, values=(number,))
            for dtype, number in (("int64", 300), ("float32", 0.5)))], "int64", (61, 3)))]
    for kernel in kernels:
        [made] = run_kernel(kernel, list(dummy_inputs(kernel).values()) + [None] * sum(
            x.constant for x in kernel.inputs), "cpu")[:1]
        assert made.shape == kernel.outputs[0].shape, kernel.type
    model, feed, weights, _ = kernel_models.build_carrier(kernels, "cpu")
    shapes = open_session(model.SerializeToString(), "cpu", optimize="none", name="carrier", weights=weights).run(None, feed)
    assert [tuple(shape) for shape in shapes] == [kernel.outputs[0].shape for kernel in kernels]
