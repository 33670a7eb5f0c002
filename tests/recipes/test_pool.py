"""The recipe of the pool: each model is analysed at its own sizes, and one that fails costs only itself."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from command import run_script
from onnx import helper

from hase.benchmark.collecting.plans import find_work
from hase.model_zoo.exporting.network_export import (
    COLLECTION_KEY,
    DATA_SIZED_KEY,
    POOL_SIZES_KEY,
    Network,
    NetworkInput,
    write_network,
)
from hase.model_zoo.networks.images import NormedConv
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record_files import read_model_records, record_path
from hase.runtimes import local_flavour, local_target
from hase.utils import files
from hase.utils.paths import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with a convolution of the pool, a file of another exporter, and a model whose sizes no run can show."""
    made = Workspace(tmp_path)
    made.models.mkdir(parents=True)
    network = Network("conv", "other", "convs", NormedConv(3, 8, 2, True).eval(), (NetworkInput("x", ("batch", 3, 16, 16)),),
                      {"batch": (1, 4)})
    write_network(network, "fp32", made.models / "conv.onnx", "cpu")
    foreign = onnx.load(made.models / "conv.onnx")
    properties = {prop.key: prop.value for prop in foreign.metadata_props}
    del foreign.metadata_props[:]
    onnx.save(foreign, made.models / "foreign.onnx")
    helper.set_model_props(foreign, properties | {DATA_SIZED_KEY: "yes"})
    foreign.graph.node[0].op_type = "Unknown"
    onnx.save(foreign, made.models / "unknown.onnx")
    return made


def test_models_are_analysed_at_their_own_sizes(workspace: Workspace) -> None:
    done = run_script("recipes/h200/pool_records.py", "--workspace", workspace.root, "--device", "cpu")
    assert done.returncode == 1
    assert "unknown.onnx" in done.stderr
    assert "2 records written, 1 models and sizes failed" in done.stderr
    records = read_model_records(workspace, local_flavour("cpu"))
    assert [(record.model, record.group, record.dims) for record in records] == [
        ("conv@batch=1", "convs", {"batch": 1}), ("conv@batch=4", "convs", {"batch": 4})]


def test_sizes_by_data_are_those_of_a_run_at_each_size(tmp_path: Path) -> None:
    """Half of the numbers that NonZero sees are positive; the file names two batch sizes."""
    workspace = Workspace(tmp_path)
    workspace.models.mkdir(parents=True)
    nodes = [helper.make_node("Relu", ["x"], ["above"]), helper.make_node("NonZero", ["above"], ["y"])]
    graph = helper.make_graph(nodes, "places", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 64])],
                              [helper.make_tensor_value_info("y", onnx.TensorProto.INT64, [2, None])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    helper.set_model_props(model, {COLLECTION_KEY: "other", DATA_SIZED_KEY: "yes", POOL_SIZES_KEY: '{"batch": [1, 4]}'})
    onnx.save(model, workspace.models / "places.onnx")
    done = run_script("recipes/h200/pool_records.py", "--workspace", workspace.root, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    records = read_model_records(workspace, local_flavour("cpu"))
    assert [record.dims["batch"] for record in records] == [1, 4]
    for record in records:
        assert record.assumed == {}
        assert 0 < record.outputs["y"].shape[1] < 64 * record.dims["batch"]


def test_kernels_of_the_host_are_listed_separately_and_measured_without_models(tmp_path: Path) -> None:
    workspace, into = Workspace(tmp_path), Workspace(tmp_path / "host")
    nodes = [helper.make_node(op, [f"t{place}"], [f"t{place + 1}"]) for place, op in enumerate(("Relu", "Sinh", "Sigmoid"))]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1000]) for name in ("t0", "t3")]
    graph = helper.make_graph(nodes, "sines", values[:1], values[1:])
    record = analyze(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "cuda")
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    done = run_script("recipes/h200/host_kernels.py", "--workspace", workspace.root, "--into", into.root)
    assert done.returncode == 0, done.stderr
    assert run_script("kernel_model/kernel_builder.py", "--workspace", into.root).returncode == 0
    work = find_work(into, local_target("cpu"), ())
    assert [(item.kernel.op_type, work.described[0].models) for item in work.kernels] == [("Sinh", (record.model,))]
    assert work.models == ()
