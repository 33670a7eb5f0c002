"""OpenVINO: which ONNX nodes form one kernel, kernels as separate models; kernels and models timed, whose times of layers are
means of all runs in whole microseconds; and the collector with its real worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_files import layers, saved
from optional_packages import needs

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.dataset import repeat
from hase.inference.sum_and_path import target_rows
from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.ort_analysis.graph.source import built_kernel
from hase.records.dataset_files import kernel_table_path, read_header, read_table
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.records.kernel_record_files import read_model_records, update_index
from hase.records.measurement import Effort, Measurement
from hase.runtimes import local_flavour, runtime_named
from hase.runtimes.openvino.compiling import compile_model
from hase.runtimes.openvino.recording import DOMAIN, NODES, build_kernel, parse
from hase.runtimes.openvino.runs import check_kernel, usual_us
from hase.runtimes.openvino.worker import WORK
from hase.runtimes.protocol import Reply, Request, RuntimeSetting, answer
from hase.utils import files
from hase.utils.config import validate
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

pytestmark = pytest.mark.measuring
WEIGHTS = np.random.default_rng(0)
QUICK = Effort(warmup=1, budget_s=0.01, least_runs=3, most_runs=5)
ONE_THREAD = RuntimeSetting(level="fused", threads=1)


@pytest.fixture(autouse=True)
def _openvino() -> None:
    needs("openvino", "openvino")


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


def test_copies_to_other_layouts_are_separate_kernels(tmp_path: Path) -> None:
    """A convolution reads and writes channels last on this CPU; the first one's input is copied to it."""
    record = parse(residual(tmp_path)).record
    copies = [(record.kernel_of(entry), entry) for entry in record.nodes if record.kernel_of(entry).type == "Reorder"]
    for kernel, entry in copies:
        assert (kernel.op_type, entry.origins) == ("Transpose", ())
        assert kernel.bytes_read == kernel.bytes_written == 16 * 32 * 32 * 4
        readers = [reader for reader in record.nodes if entry.outputs[0] in reader.inputs]
        assert [record.kernel_of(reader).op_type for reader in readers] == ["Conv"]


def test_a_kernel_has_one_id_in_all_models(tmp_path: Path) -> None:
    """Names of nodes and tensors are not part of the id."""
    model = residual(tmp_path)
    proto = onnx.load(model)
    for node in proto.graph.node:
        node.name = f"other_{node.output[0]}"
        node.input[:] = [f"{name}_too" for name in node.input]
        node.output[:] = [f"{name}_too" for name in node.output]
    for named in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        named.name += "_too"
    onnx.save(proto, tmp_path / "renamed.onnx")
    assert parse(model).record.kernels.keys() == parse(tmp_path / "renamed.onnx").record.kernels.keys()


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
    check_whole(record, model)
    assert types(record) == kernel_types


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
    with pytest.raises(UserError, match="batch"):
        parse(model)
    odd = saved(tmp_path / "odd.onnx", [helper.make_node("None", ["x"], ["y"], domain="nowhere")], {"x": [1]}, {"y": [1]}, {})
    with pytest.raises(UserError, match="odd: OpenVINO can't take this model"):
        parse(odd)


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


def convolutions(path: Path, channels: int = 16, side: int = 32) -> Path:
    """Two convolutions with the same sizes, each with a Relu."""
    weights = np.random.default_rng(0).normal(0, 0.1, (channels, channels, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
             helper.make_node("Conv", ["r", "w"], ["d"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["d"], ["y"])]
    shape = [1, channels, side, side]
    return saved(path, nodes, {"x": shape}, {"y": shape}, {"w": weights})


def ask(do: str, *paths: Path, **more: object) -> Reply:
    request = Request.model_validate({"do": do, "device": "cpu", "effort": QUICK, "paths": tuple(map(str, paths)),
                                      "setting": ONE_THREAD, **more})
    return answer(WORK, request)


def by_label(reply: Reply) -> dict[str, list[Measurement]]:
    assert reply.error == ""
    assert min(sample for measured in reply.measurements for sample in measured.samples_ms) > 0
    return {label: [m for m in reply.measurements if m.label == label] for label in {m.label for m in reply.measurements}}


FIRST, BLOCK, RUNS = 4, 10, 124  # runs before the first reading, between two, and altogether


def read_back(times_us: np.ndarray) -> float:
    """The usual time in µs, from OpenVINO's readings: the mean of the runs so far, cut to whole microseconds like each run."""
    runs = np.arange(FIRST, RUNS + 1, BLOCK)
    return usual_us(np.array([np.floor(np.floor(times_us[:count]).mean()) for count in runs]), runs)


@pytest.mark.parametrize("usual", [0.3, 12.2, 480.0])
def test_the_time_of_a_layer_is_known_to_a_microsecond(usual: float) -> None:
    times = np.random.default_rng(1).normal(usual, 0.1 * usual, RUNS)
    times[0] = 20 * usual + 3000.0  # code is generated
    assert read_back(times) == pytest.approx(times[FIRST:].mean(), abs=1.0)


@pytest.mark.slow
def test_a_model_has_a_latency_and_the_times_of_its_kernels(tmp_path: Path) -> None:
    model, record_file = convolutions(tmp_path / "two.onnx"), tmp_path / "two.json"
    record = parse(model).record
    files.write_json(record_file, record)
    labels = by_label(ask("model", model, record=str(record_file), labels=("kernel_time",)))
    [latency] = labels["latency"]
    assert (latency.subject, latency.id, latency.place) == ("model", "two", "alone")
    assert {(measured.id, measured.place) for measured in labels["kernel_time"]} == {
        (node.kernel_id, "in_model") for node in record.nodes if record.kernel_of(node).moves_data}
    paths = [build_kernel(kernel, tmp_path) for kernel in record.kernels.values()]
    [alone] = by_label(ask("alone", paths[0]))["run"]
    assert (alone.id, alone.place) == (next(iter(record.kernels)), "alone")
    carried = by_label(ask("carrier", *paths))["kernel_time"]
    assert sorted((measured.id, measured.place) for measured in carried) == sorted((name, "carrier") for name in record.kernels)
    session = ask("session", model)
    assert (by_label(session).keys(), session.memory_mib is not None) == ({"latency"}, True)
    files.write_json(record_file, parse(convolutions(tmp_path / "other.onnx", side=16)).record)
    assert "OpenVINO's graph is not the one in its record" in ask("model", model, record=str(record_file)).error
    assert "memory_limit_mib" in ask("session", model, setting=RuntimeSetting(level="fused", memory_limit_mib=10)).error
    assert "cores: 4096" in ask("session", model, setting=RuntimeSetting(level="fused", cores=4096)).error


def test_it_computes_in_float32(tmp_path: Path) -> None:
    """With bfloat16, OpenVINO's default on CPUs that have it, outputs are off by a hundredth."""
    model = convolutions(tmp_path / "two.onnx", channels=64)
    image = np.random.default_rng(2).normal(0, 1, (1, 64, 32, 32)).astype(np.float32)
    compiled = compile_model(parse(model).model, "two")
    [output] = compiled({"x": image}).values()
    [expected] = onnxruntime.InferenceSession(model).run(None, {"x": image})
    assert np.abs(output - expected).max() < 1e-4


CONFIG = {"device": "cpu", "runtime": "openvino", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10},
          "setting": {"threads": 1}}


@pytest.mark.slow
def test_the_collector_measures_and_measures_again(workspace: Workspace) -> None:
    """Two networks of two layers, taken apart and measured; sums of their kernels are compared with them."""
    workspace.models.mkdir(parents=True)
    for name, width in (("small", 128), ("large", 1024)):
        model = layers(workspace.models / f"{name}.onnx", 2, width, last_relu=False)
        runtime_named("openvino").write_records(workspace, model, "cpu", {}, True, ModelOrigin())
    with pytest.raises(UserError, match="device cuda: OpenVINO is supported on cpu only"):
        runtime_named("openvino").write_records(workspace, model, "cuda", {}, True, ModelOrigin())
    for kernel in update_index(workspace, local_flavour("cpu", "openvino")).all_kernels():
        build_kernel(kernel, workspace.kernel_onnx / local_flavour("cpu", "openvino").name)
    config = validate(CONFIG, CollectorConfig, "test")
    target = str(collect(workspace, config)["target"])
    header = read_header(workspace.dataset(target))
    assert (header.target.flavour, header.target.threads) == (local_flavour("cpu", "openvino"), 1)
    assert set(header.labels) == {"run", "kernel_time"}
    table = read_table(kernel_table_path(workspace.dataset(target)))
    assert set(table["OpType"]) == {"MatMul_Relu", "MatMul"}
    assert set(zip(table["Status"], table["Context"], strict=True)) == {("ok", "kernel_time:in_model|run:alone")}
    for label in ("run_median_ms", "kernel_time_ms"):
        times = dict(zip(table["Input_Shape"], table[label], strict=True))
        assert times["16x1024;1024x1024"] > 4 * times["16x128;128x128"] > 0  # 64 times the work
    again = {row["what"]: row["count"] for row in repeat(workspace, config, 2, 0)}
    assert (again["kernels"], again["kernels in models"], again["models"]) == (2, 4, 2)
    rows = target_rows(workspace, target)
    assert {row["model"]: row["nodes"] for row in rows} == {
        record.model: len(record.nodes) for record in read_model_records(workspace, local_flavour("cpu", "openvino"))}
    assert all(row["sum_ms"] == pytest.approx(row["critical_path_ms"]) for row in rows)  # a chain
