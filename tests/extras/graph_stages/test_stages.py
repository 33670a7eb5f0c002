"""The seven stages: what they compute on real graphs with torch, ONNX Runtime and OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from optional_packages import needs

from hase.extras.graph_stages.measuring.layer import (
    OUTPUT,
    STAGES,
    Array,
    Graph,
    GraphSize,
    Weights,
    compute_tensors,
    draw_features,
    draw_power_law,
    draw_uniform,
    draw_weights,
    read_cases,
    read_edge_list,
)
from hase.extras.graph_stages.measuring.models import ModelFile, export_stages, stage_model_file, stage_model_files
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session
from hase.utils.paths import ROOT

FEATURES, HIDDEN = 24, 12
GRAPHS: dict[str, Callable[[], Graph]] = {
    "uniform": lambda: draw_uniform(900, 3500), "power_law": lambda: draw_power_law(900, 4000),
    "fewer_edges_than_nodes": lambda: draw_uniform(500, 100, seed=3)}
Run = Callable[[ModelFile, Path, dict[str, Array]], Array]


def size_of(graph: Graph) -> GraphSize:
    return GraphSize(nodes=graph.nodes, edges=graph.edges, features=FEATURES, hidden=HIDDEN)


def reference(graph: Graph, weights: Weights) -> Array:
    """What torch-geometric computes."""
    needs("torch_geometric", "stages")
    import torch
    from torch_geometric.nn import SAGEConv

    layer = SAGEConv(FEATURES, HIDDEN, aggr="mean")
    with torch.inference_mode():
        layer.lin_l.weight.copy_(torch.from_numpy(weights.neighbours))
        layer.lin_l.bias.copy_(torch.from_numpy(weights.bias))
        layer.lin_r.weight.copy_(torch.from_numpy(weights.root))
        edges = torch.from_numpy(np.stack([graph.source, graph.target]))
        return np.asarray(torch.relu(layer(torch.from_numpy(draw_features(graph.nodes, FEATURES)), edges)).numpy())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported models of all graphs."""
    made = tmp_path_factory.mktemp("exported_models")
    export_stages(made, list(stage_model_files([size_of(draw()) for draw in GRAPHS.values()], 0)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("draw", GRAPHS.values(), ids=GRAPHS)
def test_torchs_stages_are_the_layer_of_torch_geometric(draw: Callable[[], Graph]) -> None:
    graph, weights = draw(), draw_weights(FEATURES, HIDDEN)
    output = compute_tensors(graph, weights)[OUTPUT]
    assert (output > 0).mean() > 0.3  # something to compare
    np.testing.assert_allclose(output, reference(graph, weights), atol=1e-5)


def by_onnx_runtime(file: ModelFile, folder: Path, inputs: dict[str, Array]) -> Array:
    """ONNX Runtime runs the models for GPU and NPU too: dynamic and static, with weights in FP32 and FP16."""
    session = open_session(file.onnx(folder), "cpu", threads=1)  # several threads lose additions to one node
    return np.asarray(session.run(None, {port.name: inputs[port.name] for port in session.get_inputs()})[0])


def by_openvino(file: ModelFile, folder: Path, inputs: dict[str, Array]) -> Array:
    """On OpenVINO's CPU device, in single precision. The models for GPU and NPU differ by their weights in FP16."""
    needs("openvino", "stages")
    import openvino

    assert file.has_ir(folder)
    core = openvino.Core()
    model = core.read_model(str(file.ir(folder)))
    assert any(port.partial_shape.is_dynamic for port in model.inputs) is not file.form.static
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return np.array(compiled({port.get_any_name(): inputs[port.get_any_name()] for port in compiled.inputs})[0])


@pytest.mark.slow
@pytest.mark.parametrize("run", [by_onnx_runtime, by_openvino])
@pytest.mark.parametrize("draw", GRAPHS.values(), ids=GRAPHS)
def test_exported_models_compute_the_layer(draw: Callable[[], Graph], run: Run, folder: Path) -> None:
    """The seven stages in a row, each on the outputs of those before it, are torch's stages, which another test compares with
    torch-geometric."""
    graph = draw()
    wanted = compute_tensors(graph, draw_weights(FEATURES, HIDDEN))
    for unit in ("CPU", "GPU", "NPU"):
        tensors = {name: wanted[name] for name in ("x", "source", "target", "node_count")}
        for stage in STAGES:
            tensors[stage.outputs[0]] = run(stage_model_file(unit, stage, size_of(graph), 0), folder, tensors)
        np.testing.assert_allclose(tensors[OUTPUT], wanted[OUTPUT], atol=1e-4 if unit == "CPU" else 2e-3)


def test_the_documented_number_of_models() -> None:
    sizes = read_cases(ROOT / "extras" / "graph_stages" / "test_cases.json")
    files = list(stage_model_files(sizes, 0))
    static = [file for file in files if file.form.static]
    assert (len(sizes), len(files) - len(static), len(static)) == (15, 14, 105)
    assert len({file.stem for file in files}) == 119
    assert {(size.features, size.hidden) for size in sizes} == {(500, 256)}


@pytest.mark.slow
def test_files_of_other_widths_or_cut_short_are_written_again(tmp_path: Path) -> None:
    size = GraphSize(nodes=10, edges=20, features=4, hidden=3)
    files = list(stage_model_files([size], 0))
    first, again = export_stages(tmp_path, files), export_stages(tmp_path, files)
    assert (first.onnx_written, first.onnx_kept) == (21, 0)
    assert (again.onnx_written, again.onnx_kept, again.ir_written) == (0, 21, 0)
    cut = files[0].onnx(tmp_path)
    cut.write_bytes(cut.read_bytes()[:50])
    assert export_stages(tmp_path, files).onnx_written == 1
    wider = list(stage_model_files([size.model_copy(update={"hidden": 5})], 0))
    assert export_stages(tmp_path, wider).onnx_written == 21


def test_an_edge_list(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("# a comment\n% another\n\n7 100\n100,7\n9\t7\t0.5\n")
    graph = read_edge_list(path)
    assert (graph.nodes, graph.source.tolist(), graph.target.tolist()) == (3, [0, 2, 1], [2, 0, 0])
    both_ways = read_edge_list(path, undirected=True)
    assert (both_ways.source.tolist(), both_ways.target.tolist()) == ([0, 2, 1, 2, 0, 0], [2, 0, 0, 0, 2, 1])
    assert graph.name.startswith("tiny-")
    assert both_ways.name != graph.name


@pytest.mark.parametrize(("content", "part"), [
    (b"1 2\n3\n", "line 2: '3' is no edge"), (b"a b\n", "line 1: 'a b' is no edge"), (b"# none\n", "holds no edges"),
    (b"\xff\xfe", "not a text file")])
def test_files_that_are_no_edge_list(content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_bytes(content)
    with pytest.raises(UserError, match=part):
        read_edge_list(tmp_path / "edges.txt")


def test_files_that_are_no_cases(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text('{"test_cases": [{"nodes": 10, "edges": 0}], "features": 3}')
    with pytest.raises(UserError, match=r"test_cases\.0\.edges: .*features: unknown key; did you mean feature_dim"):
        read_cases(path)
    with pytest.raises(UserError, match="no such"):
        read_cases(tmp_path / "none.json")
