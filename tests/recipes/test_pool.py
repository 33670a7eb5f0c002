"""The recipe of the pool: each model is analysed at its own sizes, and one that can't be costs only itself."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from command import run_script
from onnx import helper

from model_zoo.exporting.network import Network, NetworkInput
from model_zoo.exporting.network_export import DATA_SIZED_KEY, write_network
from model_zoo.networks.other import NormedConv
from ort_analysis.records.reading import read_model_records
from utils.fingerprint import flavour_of
from utils.paths import ROOT, Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """One with a convolution of the pool, a file of another exporter, and one whose sizes no run can tell."""
    made = Workspace(tmp_path)
    made.models.mkdir(parents=True)
    network = Network("conv", "other", "convs", NormedConv(3, 8, 2, True).eval(), (NetworkInput("x", ("batch", 3, 16, 16)),),
                      {"batch": (1, 4)})
    write_network(network, "fp32", made.models / "conv.onnx", "cpu")
    foreign = onnx.load(made.models / "conv.onnx")
    kept = {prop.key: prop.value for prop in foreign.metadata_props}
    del foreign.metadata_props[:]
    onnx.save(foreign, made.models / "foreign.onnx")
    helper.set_model_props(foreign, kept | {DATA_SIZED_KEY: "yes"})
    foreign.graph.node[0].op_type = "Unknown"
    onnx.save(foreign, made.models / "unknown.onnx")
    return made


def test_models_are_analysed_at_their_own_sizes(workspace: Workspace) -> None:
    done = run_script("recipes/h200/pool_records.py", "--workspace", workspace.root, "--device", "cpu")
    assert done.returncode == 1
    assert "unknown.onnx" in done.stderr
    assert "2 records written, 1 models and sizes failed" in done.stderr
    records = read_model_records(workspace, flavour_of("cpu"))
    assert [(record.model, record.group, record.dims) for record in records] == [
        ("conv@batch=1", "convs", {"batch": 1}), ("conv@batch=4", "convs", {"batch": 4})]


def test_the_recipe_names_models_of_the_pool() -> None:
    text = (ROOT / "recipes" / "h200" / "collect_pool.sh").read_text()
    pool = (ROOT / "model_zoo" / "pool.yaml").read_text()
    in_half = text.partition('in_half="')[2].partition('"')[0].split()
    assert len(in_half) > 20
    assert all(name in pool for name in in_half)
