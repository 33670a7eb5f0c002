"""One measurement record: the worker fills in all of it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from conftest import small_model

from hase.benchmark.ort.worker import answer
from hase.kernel_model.building.kernel_models import write_kernel
from hase.ort_analysis.graph.analysis import analyze
from hase.records.measurement import Block, Effort, Measurement
from hase.runtimes.protocol import Reply, Request
from hase.utils import files

EFFORT = Effort(warmup=1, budget_s=0.002, least_runs=2, most_runs=4)


def test_a_measurement_names_its_place() -> None:
    """Nothing is guessed from the context."""
    with pytest.raises(ValueError, match="place"):
        Measurement.model_validate({"subject": "kernel", "id": "x", "label": "run", "context": "alone", "samples_ms": [1.5]})


def test_a_block_keeps_quantities_and_the_length_of_its_windows() -> None:
    measured = Measurement(subject="convolution", id="c1", label="run", context="vgg16", place="in_model",
                           samples_ms=(1.0, 2.0),
                           quantities={"energy_j": (3.5,), "power_w": (300.0, 310.0)})
    block = Block(level=0.0, key="k", background={"m": 0.5}, background_s=0.25, during={"m": 0.7}, during_s=3.0,
                  canary_before_ms=1.0, canary_after_ms=1.0, attempts=1, machine="here", measurements=(measured,))
    read_back = Block.model_validate_json(block.model_dump_json())
    assert read_back == block
    assert read_back.measurements[0].quantities == {"energy_j": (3.5,), "power_w": (300.0, 310.0)}


def test_the_worker_fills_in_everything(tmp_path: Path) -> None:
    """What a kernel alone, a carrier, a model with its kernels, a session and the canary return, in this process."""
    path = tmp_path / "net.onnx"
    files.write_bytes(path, small_model().SerializeToString())
    record = analyze(path, "cpu")
    files.write_json(tmp_path / "net.json", record)
    built = [write_kernel(kernel, tmp_path) for kernel in record.kernels.values()]
    ids = set(record.kernels)

    def ask(do: str, *paths: Path, labels: tuple[str, ...] = ()) -> set[tuple[str, str, str, str, str]]:
        reply = answer(Request.model_validate({
            "do": do, "device": "cpu", "effort": EFFORT, "paths": tuple(map(str, paths)), "labels": labels,
            "record": str(tmp_path / "net.json")}))
        assert Reply.model_validate_json(reply.model_dump_json()) == reply
        assert not reply.error
        assert all(np.min(m.samples_ms) > 0 and m.status == "ok" for m in reply.measurements)
        assert {(m.started, m.ended) for m in reply.measurements} == {(reply.started, reply.ended)}
        assert datetime.fromisoformat(reply.started) < datetime.fromisoformat(reply.ended)
        return {(m.subject, m.id, m.label, m.context, m.place) for m in reply.measurements}

    first = built[0]
    assert ask("alone", first) == {("kernel", first.stem, "run", "alone", "alone")}
    assert ask("carrier", *built, labels=("node_span",)) == {
        ("kernel", name, "node_span", "carrier", "carrier") for name in ids}
    latency = ("model", "net", "latency", "net", "alone")
    assert ask("model", path, labels=("kernel_time",)) == {
        latency, *(("kernel", name, "kernel_time", "net", "in_model") for name in ids)}
    assert ask("session", path) == {latency}
    assert ask("canary") == {("canary", "canary", "run", "alone", "alone")}
