"""The energy of whole models: measured by the worker with real sessions, kept in the journal, and shown in the table.

The power sensor is pretended, since this machine may have none: 40 W idle, 90 W while something runs.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from conftest import build_workspace, small_model

from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import LEAST_IN_BATCH, MOST_IN_BATCH, energy_batches, find_work, plan
from hase.benchmark.metrics import power
from hase.benchmark.metrics.power import NoPowerSensor, PowerSample, PowerSensor
from hase.benchmark.ort import worker
from hase.benchmark.ort.worker import answer
from hase.records.dataset_files import DatasetHeader, model_table_path, read_table
from hase.records.dataset_tables import energy_warnings
from hase.records.dataset_writer import DatasetWriter, joined_header
from hase.records.measurement import ENERGY, Block, Effort, Measurement
from hase.runtimes import local_target
from hase.runtimes.protocol import Request
from hase.utils.fingerprint import machine
from hase.utils.paths import Workspace

EFFORT = Effort(warmup=1, budget_s=0.01, least_runs=4, most_runs=4)


class Standing(PowerSensor):
    """90 W while `busy`, else 40 W; the counter agrees."""

    name, averages_s = "a pretended sensor", 0.0
    busy = False

    def __init__(self) -> None:
        self._last_s, self._counter_j = time.monotonic(), 0.0

    def read(self) -> PowerSample:
        now_s, power_w = time.monotonic(), 90.0 if Standing.busy else 40.0
        self._counter_j += power_w * (now_s - self._last_s)
        self._last_s = now_s
        return PowerSample(now_s, power_w, self._counter_j)


@pytest.fixture
def sensor(monkeypatch: pytest.MonkeyPatch) -> None:
    really = power.energy_of_runs

    def while_busy(*args: object, **options: object) -> power.RunsEnergy:
        monkeypatch.setattr(Standing, "busy", True)
        return really(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "open_power_sensor", lambda device: Standing())
    monkeypatch.setattr(worker, "energy_of_runs", while_busy)
    monkeypatch.setattr(Standing, "busy", False)
    for module, name, value in ((worker, "REST_S", 0.1), (worker, "CALM_S", 0.0), (power, "SETTLE_S", 0.1)):
        monkeypatch.setattr(module, name, value)


def measured(path: Path, energy_s: float) -> dict[str, Measurement]:
    reply = answer(Request(do="model", device="cpu", paths=(str(path),), effort=EFFORT, energy_s=energy_s))
    assert not reply.error
    return {m.label: m for m in reply.measurements}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_workspace(Workspace(tmp_path), {"anet_1": small_model()})
    return Workspace(tmp_path).models / "anet_1.onnx"


def block_of(key: str, uuid: str, *measurements: Measurement) -> Block:
    return Block(level=0.0, key=key, background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                 machine=uuid, measurements=measurements)


@pytest.mark.slow
def test_the_energy_of_a_run_is_a_part_of_its_window(model: Path, sensor: None) -> None:
    by_label = measured(model, 0.4)
    assert set(by_label) == {"latency", ENERGY}
    read = {name: value for name, (value,) in by_label[ENERGY].quantities.items()}
    assert (read["power_w"], read["idle_w"]) == pytest.approx((90.0, 40.0), rel=0.01)
    assert read["window_s"] >= 0.4
    run_s = read["window_s"] / read["runs"]
    assert read["energy_j"] == pytest.approx(90.0 * run_s, rel=0.01)
    assert read["counter_j"] == pytest.approx(read["energy_j"], rel=0.05)
    assert by_label[ENERGY].samples_ms == pytest.approx((1e3 * run_s,), rel=1e-3)
    assert "too short for the sensor" in by_label[ENERGY].error  # 0.4 s is no 3 s


def test_without_a_sensor_the_latency_is_still_measured(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker, "open_power_sensor", Mock(side_effect=NoPowerSensor("power: none here")))
    by_label = measured(model, 0.1)
    assert (by_label["latency"].status, by_label[ENERGY].status, by_label[ENERGY].error) == ("ok", "failed", "power: none here")
    assert set(measured(model, 0.0)) == {"latency"}
    monkeypatch.setattr(power.RaplPower.__init__, "__defaults__", (tmp_path,))
    with caplog.at_level(logging.WARNING):
        assert CollectorConfig(energy_s=3.0).with_energy_on("cpu") == CollectorConfig()
    assert "no energy is measured: power: this CPU's energy can't be read" in caplog.text


@pytest.mark.slow
def test_the_table_has_the_energy_only_where_it_was_measured(model: Path, sensor: None, tmp_path: Path) -> None:
    this_machine = machine("cpu")
    plain = DatasetHeader(target=local_target("cpu"), metrics=(), machines={this_machine.uuid: this_machine},
                          groups={"anet_1": "anet"})
    folder = tmp_path / "dataset"
    writer = DatasetWriter(folder, plain, [])
    writer.append(block_of("before", this_machine.uuid, *measured(model, 0.0).values()))
    writer.write_tables()
    assert "energy_j" not in read_table(model_table_path(folder)).columns
    writer = DatasetWriter(folder, plain.model_copy(update={"energy": True}), [])  # the collector again, now with energy
    writer.append(block_of("after", this_machine.uuid, *measured(model, 0.3).values()))
    writer.write_tables()
    table = read_table(model_table_path(folder))
    assert (pd.isna(table["power_w"][0]), "too short" in table["energy_doubts"][1]) == (True, True)
    assert table["power_w"][1] == pytest.approx(90.0, rel=0.01)
    assert table["energy_j"][1] == pytest.approx(table["power_w"][1] * table["energy_s"][1] / table["energy_runs"][1], rel=0.01)
    assert joined_header(folder, plain).energy  # a later run without energy keeps the columns


@pytest.mark.slow
def test_kernels_are_measured_in_batches_of_one_operator_and_never_singly(model: Path, sensor: None, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {f"anet_{channels}": small_model(channels) for channels in (16, 24, 32)})
    batches = energy_batches(find_work(workspace, local_target("cpu"), ()).kernels, "cpu")
    assert batches
    for batch in batches:
        assert LEAST_IN_BATCH <= len(batch) <= MOST_IN_BATCH
        assert len({(item.kernel.op_type, item.kernel.dtype) for item in batch}) == 1
    batch = batches[0]
    [measurement] = answer(Request(do="kernels_energy", device="cpu", paths=tuple(str(item.path) for item in batch),
                                   effort=EFFORT, energy_s=0.3)).measurements
    assert (measurement.subject, measurement.members) == ("kernels", tuple(item.id for item in batch))
    read = {name: value for name, (value,) in measurement.quantities.items()}
    assert read["energy_j"] == pytest.approx(90.0 * read["window_s"] / read["runs"], rel=0.01)  # of one run of each


def test_runs_that_other_work_slowed_down_give_a_warning() -> None:
    latency, energy = (Measurement(subject="model", id="m", label=label, context="m", place="alone", samples_ms=samples)
                       for label, samples in (("latency", (0.9, 1.0, 5.0)), (ENERGY, (1.2,))))
    slow = energy.model_copy(update={"samples_ms": (2.5,)})
    assert [energy_warnings(of, latency) for of in (energy, slow)] == [
        "", "its runs took 2.5 times as long as for its latency"]


@pytest.mark.parametrize(("energy_s", "planned"), [(0.0, []), (3.0, ["anet_1"])])
def test_a_model_without_its_energy_is_measured_again(model: Path, tmp_path: Path, energy_s: float, planned: list[str]) -> None:
    work = find_work(Workspace(tmp_path), local_target("cpu"), ())
    latency = Measurement(subject="model", id="anet_1", label="latency", context="anet_1", place="alone", samples_ms=(1.0,))
    labels = CollectorConfig(variants=(), energy_s=energy_s).model_labels_on("cpu")
    assert [item.id for part in plan(work, [block_of("", "", latency)], 32, variants=labels) for item in part.units
            if item in work.models] == planned
