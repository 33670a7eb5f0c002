"""Kernels and models measured under OpenVINO by the collector, with its real worker, and measured again."""

from __future__ import annotations

import pytest
from onnx_files import layers
from optional_packages import needs

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.dataset import repeat
from hase.inference.sum_and_path import comparison, short_names, target_rows
from hase.records.dataset_files import kernel_table_path, read_header, read_table
from hase.records.kernel_record import ModelOrigin
from hase.records.kernel_record_files import read_model_records, update_index
from hase.runtimes import runtime_named
from hase.runtimes.openvino.compiling import openvino_flavour
from hase.runtimes.openvino.recording import build_kernel
from hase.utils.config import validate
from hase.utils.paths import Workspace

pytestmark = [pytest.mark.measuring, pytest.mark.slow]
CONFIG = {"device": "cpu", "runtime": "openvino", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
          "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 3, "most_runs": 5},
          "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.05, "least_runs": 4, "most_runs": 10},
          "setting": {"threads": 1}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str]:
    """Two networks of two layers, taken apart and measured; and the target's name."""
    needs("openvino", "requirements-openvino.txt")
    workspace = Workspace(tmp_path_factory.mktemp("openvino"))
    workspace.models.mkdir(parents=True)
    for name, width in (("small", 128), ("large", 1024)):
        model = layers(workspace.models / f"{name}.onnx", 2, width, last_relu=False)
        runtime_named("openvino").write_records(workspace, model, "cpu", {}, True, ModelOrigin())
    for kernel in update_index(workspace, openvino_flavour()).all_kernels():
        build_kernel(kernel, workspace.kernel_onnx / openvino_flavour().name)
    return workspace, str(collect(workspace, validate(CONFIG, CollectorConfig, "test"))["target"])


def test_the_dataset_of_an_openvino_target(measured: tuple[Workspace, str]) -> None:
    """And a second measurement, which is of the same runtime."""
    workspace, target = measured
    header = read_header(workspace.dataset(target))
    assert (header.target.flavour, header.target.threads) == (openvino_flavour(), 1)
    assert set(header.labels) == {"run", "kernel_time"}
    table = read_table(kernel_table_path(workspace.dataset(target)))
    assert set(table["OpType"]) == {"MatMul_Relu", "MatMul"}
    assert set(zip(table["Status"], table["Context"], strict=True)) == {("ok", "kernel_time:in_model|run:alone")}
    for label in ("run_median_ms", "kernel_time_ms"):
        times = dict(zip(table["Input_Shape"], table[label], strict=True))
        assert times["16x1024;1024x1024"] > 4 * times["16x128;128x128"] > 0  # 64 times the work
    rows = {row["what"]: row["count"] for row in repeat(workspace, validate(CONFIG, CollectorConfig, "test"), 2, 0)}
    assert (rows["kernels"], rows["kernels in models"], rows["models"]) == (2, 4, 2)


def test_kernel_sums_are_compared_with_their_network(measured: tuple[Workspace, str]) -> None:
    workspace, name = measured
    rows = target_rows(workspace, name)
    assert {row["model"]: row["nodes"] for row in rows} == {
        record.model: len(record.nodes) for record in read_model_records(workspace, openvino_flavour())}
    assert {row["label"] for row in rows} == {"kernel_time"}
    assert all(row["sum_ms"] == pytest.approx(row["critical_path_ms"]) for row in rows)  # a chain
    target = read_header(workspace.dataset(name)).target
    pinned = target.model_copy(update={"cores": 1})
    assert short_names([target, pinned]) == [target.name, pinned.name]
    assert short_names([target]) == ["openvino"]
    of_targets = {"ort": [{"model": "a", "whole_ms": 2.0}, {"model": "b", "whole_ms": 3.0}],
                  "openvino": [{"model": "a", "whole_ms": 1.0, "predicted_ms": 1.1, "predicted_error_%": 10.0}]}
    assert comparison(of_targets) == [{
        "model": "a", "ort_ms": 2.0, "ort_predicted_ms": None, "ort_error_%": None, "openvino_ms": 1.0,
        "openvino_predicted_ms": 1.1, "openvino_error_%": 10.0}]
