"""`Predictor`: its methods answer like the functions, it reads each file once, and a run needs no second prediction.

The records are of real models, the predictors those that ship for an H200, which is shared in time slices.
"""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hase.inference import Predictor, predict
from hase.inference.prediction import targets
from hase.inference.prediction.conditions import RunMode
from hase.inference.prediction.run import trace_of
from hase.learned.composition.fitted import read_composition
from hase.recipes.same_predictions.record import unpacked
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.runtimes import flavour_of
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.paths import SHIPPED, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
BUSY = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6}


@contextmanager
def reads(folder: Path) -> Iterator[Counter[str]]:
    """Counts how often Python opens each file in `folder`, by its path there."""
    counts, really_open = Counter[str](), io.open

    def counted(path: Any, *options: Any, **more: Any) -> Any:
        if isinstance(path, (str, Path)) and Path(path).is_relative_to(folder):
            counts[Path(path).relative_to(folder).as_posix()] += 1
        return really_open(path, *options, **more)

    with mock.patch("io.open", counted), mock.patch("builtins.open", counted):
        yield counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("records"))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with its own predictors, which no other test has read."""
    made = Workspace(tmp_path)
    shutil.copytree(SHIPPED / TARGET, made.predictors(TARGET))
    return made


def record(folder: Path, name: str = "resnet18@batch=1") -> ModelRecord:
    return read_model_record(folder / "records" / "cuda" / f"{name}.json")


@pytest.mark.slow
def test_the_function_and_the_methods_give_the_same(folder: Path) -> None:
    first, second = record(folder), record(folder, "bert_mask_static")
    predictor = Predictor(target="h200")
    assert predictor.predict(first) == predict(first, target=TARGET) == predictor.run(first).prediction
    assert predictor.predict(first, load=BUSY, host_pace=1.2) == predict(first, target=TARGET, load=BUSY, host_pace=1.2)
    assert predictor.predict_many([first, second], run_mode=RunMode(io="host")) == [
        predict(model, target=TARGET, run_mode=RunMode(io="host")) for model in (first, second)]
    assert predictor.pair(first, second).models == predictor.pair(second, first).models[::-1]
    assert Predictor(target=TARGET, strict=True).predict(first) == predict(first, target=TARGET, strict=True)


@pytest.mark.slow
def test_files_are_read_once(folder: Path, workspace: Workspace) -> None:
    """None before the first question; a second predictor reads none of them."""
    model = record(folder)
    with reads(workspace.predictors(TARGET)) as at_first:
        predictor = Predictor(workspace, TARGET)
    assert not at_first
    with reads(workspace.predictors(TARGET)) as opened_files:
        run = predictor.run(model)
        predictor.predict(model, load=BUSY)
        predictor.curve(run, 3)
        predictor.pair(run, model)
    assert {"predictors.json", "composition.json", "sharing.json"} <= set(opened_files)
    assert set(opened_files.values()) == {1}
    with reads(workspace.predictors(TARGET)) as opened_again:
        assert Predictor(workspace, TARGET).predict(model) == run.prediction
    assert not opened_again


@pytest.mark.slow
def test_without_load_the_curve_says_what_the_prediction_says(folder: Path) -> None:
    predictor = Predictor(target=TARGET)
    run = predictor.run(record(folder), host_pace=1.0)
    latency_ms = run.prediction.latency_ms
    first = predictor.curve(run, 3).points[0]
    assert [first.mean_ms, first.p50_ms, first.p95_ms, first.p99_ms] == pytest.approx([latency_ms] * 4, rel=1e-9)
    quiet = predictor.predict(record(folder), load={"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.0}, host_pace=1.0)
    assert quiet.latency_ms == pytest.approx(latency_ms, rel=1e-9)
    for limit_ms in (1.0001 * latency_ms, 0.9999 * latency_ms):
        objective = predictor.objective(run, limit_ms)
        assert objective.met == (objective.highest_busy_share is not None)


@pytest.mark.slow
def test_another_device_is_predicted_only_if_it_is_named(folder: Path, workspace: Workspace,
                                                         monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program may never read warnings. The other device's predictors may be shipped, or in the workspace."""
    model, here = record(folder), Target(device_name="A CPU", flavour=flavour_of("cpu"), threads=2)
    monkeypatch.setattr(targets, "local_targets", lambda: (here,))
    monkeypatch.setattr(targets, "local_target", lambda *_: here)
    for place in (Workspace(tmp_path / "empty"), workspace):
        with pytest.raises(UserError, match=rf"no predictors for this machine \({here.name}\): add target=\"nvidia-h200\""):
            Predictor(place).predict(model)
        assert predict(model, workspace=place, target="nvidia-h200").target == TARGET
        warned = Predictor(place, any_device=True).predict(model)
        assert (warned.target, here.name in warned.warnings[0]) == (TARGET, True)
    h200 = Predictor(target=TARGET).fitted.target
    monkeypatch.setattr(targets, "local_targets", lambda: (h200,))
    assert predict(model).target == TARGET  # where this machine is the device, nothing need be named


@pytest.mark.parametrize("percentile", [0.95, 101.0, float("nan")])
def test_a_percentile_is_no_ratio(percentile: float, folder: Path) -> None:
    with pytest.raises(UserError, match="not between 1 and 100; write 95 for the 95th percentile"):
        Predictor(target=TARGET).objective(record(folder), 5.0, percentile)


def test_a_run_needs_no_second_prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps the prediction that `make_monotonic` raised, and the objective is checked against it."""
    model_record = record(folder)
    predictor = Predictor(target=TARGET)
    curve, objective = predictor.curve(model_record, 3), predictor.objective(model_record, 5.0)
    pair = predictor.pair(model_record, model_record)
    alone, loaded = predictor.run(model_record), predictor.run(model_record, load=BUSY)
    monkeypatch.setattr(Predictor, "runs", lambda *_, **__: pytest.fail("predicted again"))
    assert (predictor.curve(alone, 3), predictor.pair(alone, alone)) == (curve, pair)
    assert predictor.objective(alone, 5.0) == objective
    raised = alone._replace(prediction=alone.prediction.model_copy(update={"latency_ms": 9.0}))
    assert predictor.objective(raised, 5.0).met is False
    assert loaded.prediction.latency_ms > loaded.alone_ms == alone.prediction.latency_ms
    assert [model.idle_ms for model in predictor.pair(loaded, alone).models] == [alone.alone_ms] * 2


@pytest.mark.parametrize("name", ["resnet18@batch=1", "detect_one_stage_nms"])
def test_a_run_agrees_with_its_prediction(folder: Path, name: str) -> None:
    """Its tracks hold the prediction's kernels in the order of the record, and its timeline ends with its latency."""
    run = Predictor(target=TARGET).run(record(folder, name))
    times = {(kernel.id, kernel.provider): (kernel.latency_ms, kernel.launches) for kernel in run.prediction.kernels}
    of_nodes = [times[node.kernel_id, node.provider] for node in run.run.record.nodes]
    assert list(zip((node.latency_ms for node in run.run.nodes_run), run.run.tracks.launches, strict=True)) == of_nodes
    spans = [event for event in trace_of(run)["traceEvents"] if event["ph"] == "X"]
    costs = run.run.costs
    assert costs is not None
    begins_ms = min(event["ts"] for event in spans if event["tid"] == 1) / 1000 - costs.start_ms  # the host's first dispatch
    ends_ms = max(event["ts"] + event["dur"] for event in spans) / 1000 + costs.end_ms
    assert ends_ms - begins_ms == pytest.approx(run.alone_ms, abs=0.01)  # except for the GPU's last pause


def test_a_curve_of_a_long_loop_begins_with_its_latency(folder: Path) -> None:
    """40 000 iterations are too many to simulate node by node beside other work, so the rest is added."""
    looped = record(folder, "loop_trips_by_input@trips=20")
    nodes = tuple(node.model_copy(update={"runs": 2000 * node.runs}) if node.inside else node for node in looped.nodes)
    predictor = Predictor(target=TARGET)
    run = predictor.run(looped.model_copy(update={"nodes": nodes}))
    assert predictor.curve(run, 2).points[0].mean_ms == pytest.approx(run.prediction.latency_ms)


@pytest.mark.slow
def test_a_watch_follows_a_training(folder: Path, workspace: Workspace) -> None:
    """A predictor that is not renewed keeps the files it read."""
    model_record = record(folder)
    predictor = Predictor(workspace, TARGET)
    before = predictor.predict(model_record).latency_ms
    watch = predictor.watch(model_record, lambda: {"load": {}, "host_pace": 1.0}, 1.0)
    assert watch.read().mean_ms == before
    path = workspace.predictors(TARGET) / "composition.json"
    fitted = read_composition(path.parent)
    assert fitted.costs is not None
    files.write_json(path, fitted.model_copy(update={"costs": fitted.costs.at_pace(2.0)}))
    assert predictor.predict(model_record).latency_ms == before
    assert watch.read().mean_ms == predict(model_record, target=TARGET, host_pace=2.0).latency_ms > before


@pytest.mark.parametrize(("options", "message"), [
    ({"host_pace": 150.0}, "host pace 150: a ratio"), ({"dims": {"batch": 3}}, "a record's shapes are fixed"),
    ({"run_mode": RunMode(io="host", cuda_graph=True)}, "predict it with --io device"),
    ({"run_mode": RunMode(cuda_graph=True), "load": BUSY}, "was not measured while the GPU was shared"),
    ({"load": {"DCGM_FI_DEV_POWER_USAGE": 300.0}}, "doesn't say how busy")])
def test_options_that_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Predictor(target=TARGET).predict(record(folder), **options)
