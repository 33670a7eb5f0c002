"""Predictions of the shipped predictors, judged by the latencies in another machine's dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run_script
from onnx import TensorProto, helper

from inference import predict
from records.blocks import Block
from records.dataset_files import DatasetHeader, DatasetKernel, header_path, kernels_path
from records.dataset_writer import write_tables
from records.kernel_record import ModelRecord
from records.kernel_record_files import record_path
from records.measurement import Measurement
from runtimes.ort.graph.analysis import analyze
from training.composition.fitted import read_composition
from training.kernels.sidecar import read_sidecar
from utils import files
from utils.paths import SHIPPED, Workspace

SCRIPT, TARGET = "recipes/h200/judge_dataset.py", "nvidia-h200-cuda-ort1.31-all"
ELSEWHERE = "GPU-elsewhere"
PACE = 1.3


def record(name: str, *operators: str) -> ModelRecord:
    """Operators of one input after another, as a session on a GPU runs them."""
    names = ["x", *(f"t{place}" for place in range(len(operators) - 1)), "y"]
    nodes = [helper.make_node(op, [names[place]], [names[place + 1]]) for place, op in enumerate(operators)]
    values = [helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [1 << 20]) for tensor in ("x", "y")]
    graph = helper.make_graph(nodes, name, values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return analyze(model, "cuda").model_copy(update={"model": name})


@pytest.fixture(scope="module")
def records() -> list[ModelRecord]:
    return [record("long", *["Relu", "Sigmoid"] * 20), record("short", "Relu", "Sigmoid")]


def write_dataset(workspace: Workspace, records: list[ModelRecord], times_ms: dict[str, float], probe_us: float | None,
                  uuid: str = ELSEWHERE) -> None:
    """A dataset of one block with latencies of models, as the collector writes it, and their kernels with absurd times."""
    sidecar = read_sidecar(SHIPPED / TARGET)
    kernels = {name: kernel for model_record in records for name, kernel in model_record.kernels.items()}
    folder = workspace.dataset(TARGET)
    measurements = [Measurement(subject="model", id=name, label="latency", context="alone", place="alone", probe_us=probe_us,
                                samples_ms=(0.9 * time_ms, time_ms, 1.1 * time_ms)) for name, time_ms in times_ms.items()]
    measurements += [Measurement(subject="kernel", id=name, label="gpu", context="alone", place="alone", samples_ms=(1e3,) * 3)
                     for name in kernels]
    block = Block(level=0.0, key="all", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                  machine=uuid, measurements=tuple(measurements))
    header = DatasetHeader(target=sidecar.target, metrics=(), labels=("gpu",),
                           machines={uuid: sidecar.machines[0].model_copy(update={"uuid": uuid})})
    files.write_json(header_path(folder), header)
    files.write_text(kernels_path(folder), "".join(
        DatasetKernel.held_by(kernel, records).model_dump_json() + "\n" for kernel in kernels.values()))
    write_tables(folder, header, [block])
    for model_record in records:
        if model_record.model in times_ms:
            files.write_json(record_path(workspace, model_record.flavour, model_record.model), model_record)


def test_models_are_judged_without_their_own_dataset(tmp_path: Path, records: list[ModelRecord]) -> None:
    """`long` takes a tenth longer than predicted at its host's pace, `short` a hundred times as long. Kernels of that dataset
    are not looked up."""
    strict = {model_record.model: predict(model_record, target=TARGET, strict=True, host_pace=PACE) for model_record in records}
    usual_us = read_composition(SHIPPED / TARGET).probe_us
    assert usual_us is not None
    latencies_ms = {"long": 1.1 * strict["long"].latency_ms, "short": 100 * strict["short"].latency_ms}
    write_dataset(Workspace(tmp_path), records, latencies_ms, PACE * usual_us)
    done = run_script(SCRIPT, "--measured", tmp_path, "--target", TARGET, "--json")
    assert done.returncode == 0, done.stderr
    assert "learned from, too" not in done.stderr
    report = json.loads(done.stdout)
    rows = {row["model"]: row for row in report["models"]}
    for name, times, held in (("long", 1.1, "yes"), ("short", 100.0, "no")):
        assert rows[name]["error_%"] == pytest.approx(100 * (1 / times - 1), abs=1e-3)
        assert (rows[name]["from (ms)"], rows[name]["to (ms)"]) == pytest.approx(strict[name].interval_ms)
        assert rows[name]["held"] == held
        assert rows[name]["pace"] == pytest.approx(PACE)
        assert rows[name]["looked up (ms)"] < 10
    of_all, looked_up = report["errors"]
    assert (of_all["count"], looked_up["count"]) == (2, 2)
    assert of_all["MAPE_%"] == pytest.approx((100 / 11 + 99) / 2, abs=1e-3)
    assert of_all["held_%"] == 50


def test_without_the_hosts_pace_intervals_cover_any_host(tmp_path: Path, records: list[ModelRecord]) -> None:
    """A machine that the predictors were learned from is named. A model without a record is named and not judged."""
    uuid = read_sidecar(SHIPPED / TARGET).machines[0].uuid
    write_dataset(Workspace(tmp_path), records, {"long": 1.0, "unknown": 1.0}, None, uuid)
    done = run_script(SCRIPT, "--measured", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert f"measured on {uuid}, which the predictors were learned from, too" in done.stderr
    assert "unknown: measured, but without a record" in done.stderr
    (row,) = json.loads(done.stdout)["models"]
    assert row["pace"] is None
    at_usual_pace = predict(records[0], target=TARGET, strict=True, host_pace=1.0).interval_ms
    assert row["from (ms)"] < at_usual_pace[0] < at_usual_pace[1] < row["to (ms)"]


def test_a_workspace_without_such_a_dataset_is_refused(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--measured", tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path) in done.stderr
