"""`Predictor`: its methods answer like the functions, it reads each file once, a run needs no second prediction, and streams
give the same answers as one by one. The records are of real models, the predictors those that ship for an H200."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest
from trained_workspace import conv_net

from hase.inference import Predictor, predict
from hase.inference.llm.requests import generation_models
from hase.inference.prediction import targets
from hase.inference.prediction.brief import BriefPrediction
from hase.inference.prediction.conditions import RunMode
from hase.inference.prediction.run import predicted_trace
from hase.inference.search import ofa
from hase.recipes.same_predictions.record import unpack_workspace
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.runtimes import local_flavour
from hase.utils.cache_folder import VARIABLE
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, Target
from hase.utils.paths import ROOT, SHIPPED, Workspace

pytestmark = pytest.mark.slow

TARGET, CPU = "nvidia-h200-cuda-ort1.31-all", "cpu-avx512"
CUDA = Flavour(device="cuda", runtime_version="1.31")
BUSY = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6}
TOLERANCE = 1e-9  # a ratio
NETWORKS = list(ofa.choices(30))


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
    return unpack_workspace(tmp_path_factory.mktemp("records"))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with its own predictors, which no other test has read."""
    made = Workspace(tmp_path)
    shutil.copytree(SHIPPED / TARGET, made.predictors(TARGET))
    return made


def record(folder: Path, name: str = "resnet18@batch=1") -> ModelRecord:
    return read_model_record(folder / "records" / "cuda" / f"{name}.json")


def test_the_function_and_the_methods_give_the_same(folder: Path) -> None:
    first, second = record(folder), record(folder, "bert_mask_static")
    predictor = Predictor(target="h200")
    assert predictor.predict(first) == predict(first, target=TARGET) == predictor.run(first).prediction
    assert predictor.predict(first, load=BUSY, host_pace=1.2) == predict(first, target=TARGET, load=BUSY, host_pace=1.2)
    assert predictor.predict_many([first, second], run_mode=RunMode(io="host")) == [
        predict(model, target=TARGET, run_mode=RunMode(io="host")) for model in (first, second)]
    assert predictor.pair(first, second).models == predictor.pair(second, first).models[::-1]
    assert Predictor(target=TARGET, strict=True).predict(first) == predict(first, target=TARGET, strict=True)


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


def test_another_device_is_predicted_only_if_it_is_named(folder: Path, workspace: Workspace,
                                                         monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program may never read warnings. The other device's predictors may be shipped, or in the workspace."""
    model, here = record(folder), Target(device_name="A CPU", flavour=local_flavour("cpu"), threads=2)
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
    """A run keeps the prediction that `widen_to_smaller_sizes` changed, and the objective is checked against it."""
    model_record, predictor = record(folder), Predictor(target=TARGET)
    asked = predictor.curve(model_record, 3), predictor.objective(model_record, 5.0), predictor.pair(model_record, model_record)
    alone, loaded = predictor.run(model_record), predictor.run(model_record, load=BUSY)
    monkeypatch.setattr(Predictor, "runs", lambda *_, **__: pytest.fail("predicted again"))
    assert (predictor.curve(alone, 3), predictor.objective(alone, 5.0), predictor.pair(alone, alone)) == asked
    raised = alone._replace(prediction=alone.prediction.model_copy(update={"latency_ms": 9.0}))
    assert predictor.objective(raised, 5.0).met is False
    assert loaded.prediction.latency_ms > loaded.alone_ms == alone.prediction.latency_ms
    assert [model.idle_ms for model in predictor.pair(loaded, alone).models] == [alone.alone_ms] * 2


def test_another_cudnn_widens_the_interval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretended: this machine is the target, with the cuDNN of its dataset, and with another one."""
    fitted = Predictor(target=TARGET).fitted
    monkeypatch.setattr(targets, "local_targets", lambda: (fitted.target,))
    widths = []
    for cudnn, other in ((fitted.predictors.sidecar.machines[-1].versions["cudnn"], False), ("1.2.3.4", True)):
        monkeypatch.setattr(targets, "package_version", lambda _, cudnn=cudnn: cudnn)
        prediction = predict(record(folder), target=TARGET, host_pace=1.0)
        assert any("the interval is widened" in text for text in prediction.warnings) == other
        widths.append(prediction.interval_ms[1] / prediction.interval_ms[0])
    assert widths[1] > 1.2 * widths[0] > 1.2


@pytest.mark.parametrize("name", ["resnet18@batch=1", "detect_one_stage_nms"])
def test_a_run_agrees_with_its_prediction(folder: Path, name: str) -> None:
    """Its tracks hold the prediction's kernels in the order of the record, and its timeline ends with its latency."""
    run = Predictor(target=TARGET).run(record(folder, name))
    times = {(kernel.id, kernel.provider): (kernel.latency_ms, kernel.launches) for kernel in run.prediction.kernels}
    of_nodes = [times[node.kernel_id, node.provider] for node in run.run.record.nodes]
    assert list(zip((node.latency_ms for node in run.run.nodes_run), run.run.tracks.launches, strict=True)) == of_nodes
    spans = [event for event in predicted_trace(run)["traceEvents"] if event["ph"] == "X"]
    costs = run.run.costs
    assert costs is not None
    begins_ms = min(event["ts"] for event in spans if event["tid"] == 1) / 1000 - costs.start_ms  # the host's first dispatch
    ends_ms = max(event["ts"] + event["dur"] for event in spans) / 1000 + costs.end_ms
    assert ends_ms - begins_ms == pytest.approx(run.alone_ms, abs=0.01)  # except for the GPU's last pause


@pytest.mark.parametrize(("options", "message"), [
    ({"host_pace": 150.0}, "host pace 150: a ratio"), ({"dims": {"batch": 3}}, "a record's shapes are fixed"),
    ({"run_mode": RunMode(io="host", cuda_graph=True)}, "predict it with --io device"),
    ({"run_mode": RunMode(cuda_graph=True), "load": BUSY}, "was not measured while the GPU was shared"),
    ({"load": {"DCGM_FI_DEV_POWER_USAGE": 300.0}}, "doesn't say how busy")])
def test_options_that_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Predictor(target=TARGET).predict(record(folder), **options)


# streams -------------------------------------------------------------------------------------------------------------------


def candidate(number: int, flavour: Flavour = CUDA) -> ModelRecord:
    """A network of a search space; the number says which. There is none below 0."""
    if number < 0:
        raise UserError("no such network")
    return ofa.make(NETWORKS[number % len(NETWORKS)], flavour)


def records_of(folder: Path, device: str) -> list[ModelRecord]:
    return [read_model_record(path) for path in sorted((folder / "records" / device).glob("*.json"))]


def close(now: float, before: float) -> bool:
    return math.isclose(now, before, rel_tol=TOLERANCE)


def check_same(predictor: Predictor, brief: BriefPrediction, record: ModelRecord, **options: Any) -> None:
    """Checks an answer of a stream against what the predictor says of the model alone."""
    run = predictor.run(record, **options)
    whole = run.prediction
    assert (brief.model, brief.rough_estimate, brief.fits_memory, brief.peak_memory_mib) == (
        whole.model, whole.rough_estimate, whole.fits_memory, whole.peak_memory_mib)
    assert close(brief.latency_ms, whole.latency_ms)
    assert all(map(close, brief.interval_ms, whole.interval_ms))
    if brief.energy is not None:
        energy = predictor.energy(run)
        assert brief.energy.rough_estimate == energy.rough_estimate
        assert close(brief.energy.energy_j, energy.energy_j)
        assert close(brief.energy.mean_power_w, energy.mean_power_w)
        assert all(map(close, brief.energy.interval_j, energy.interval_j))


@pytest.mark.parametrize(("options", "strict"), [
    ({}, False), ({"host_pace": 1.3}, True), ({"run_mode": RunMode(io="host")}, False),
    ({"load": {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6, "DCGM_FI_DEV_GPU_UTIL": 60.0}}, True)])
def test_a_gpus_brief_answers_are_those_of_predict(folder: Path, options: dict[str, Any], strict: bool) -> None:
    predictor = Predictor(target=TARGET, strict=strict)
    records = [*records_of(folder, "cuda"), *(candidate(number) for number in range(5))]
    idle = "load" not in options
    answers = list(predictor.predict_briefly(records, energy=idle, memory=True, batch=10, **options))
    for answer, record in zip(answers, records, strict=True):
        check_same(predictor, answer, record, **options)
    assert {answer.rough_estimate for answer in answers} == {False, True}


@pytest.mark.parametrize("strict", [False, True])
def test_a_cards_and_a_cpus_brief_answers_are_those_of_predict(folder: Path, strict: bool) -> None:
    for target, device, energy in (("l40s-from-data-sheet", "cuda", True), (CPU, "cpu", False)):
        predictor = Predictor(Workspace(folder), target, strict=strict, force=True)
        records = records_of(folder, device)
        for answer, record in zip(predictor.predict_briefly(records, energy=energy, memory=True), records, strict=True):
            check_same(predictor, answer, record)


def test_models_in_memory_and_their_files(tmp_path: Path) -> None:
    predictor = Predictor(target=TARGET)
    sources: list[Any] = [conv_net(tmp_path / f"{channels}.onnx", channels=channels) for channels in (8, 24)]
    sources += map(onnx.load, sources[:2])
    answers = list(predictor.predict_briefly(iter(sources), memory=True))
    assert [answer.latency_ms for answer in answers] == pytest.approx(
        [one.latency_ms for one in predictor.predict_many(sources)], rel=TOLERANCE)
    assert list(predictor.predict_stream(iter(sources), batch=3)) == predictor.predict_many(sources)


def test_several_processes_give_the_same() -> None:
    predictor = Predictor(target=TARGET)
    alone = list(predictor.predict_briefly(iter(range(12)), make=candidate, batch=4, energy=True))
    answers = list[BriefPrediction]()
    stream = predictor.predict_briefly(iter([*range(12), -1]), make=candidate, batch=4, energy=True, processes=2)
    with pytest.raises(UserError, match="no such network"):
        answers.extend(iter(stream))
    assert answers == alone
    taken = iter(range(1000))
    stream = predictor.predict_briefly(taken, make=candidate, batch=4, processes=2)
    assert next(stream).model == NETWORKS[0]
    stream.close()  # type: ignore[attr-defined]
    assert next(taken) == 16  # one batch came back, and as many as two processes and one more wait for


def test_processes_that_begin_at_once_predict_the_same(tmp_path: Path, folder: Path) -> None:
    """None of them reads half of a file that another one puts into the user's cache."""
    path = folder / "records" / "cuda" / "resnet18@batch=1.json"
    words: list[str | Path] = [sys.executable, "inference/predict_model_latency.py", "--strict", "--json", "--target", TARGET,
                               "--model", path]
    running = [subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, env=os.environ | {
        VARIABLE: str(tmp_path / "cache")}) for _ in range(3)]
    answers = [json.loads(process.communicate()[0])[0]["latency_ms"] for process in running]
    assert answers == [predict(path, target=TARGET, strict=True).latency_ms] * 3
    assert list((tmp_path / "cache").iterdir())


def test_brief_answers_have_the_interval_of_language_models() -> None:
    """It was fitted to runs at many paces, so a known pace counts in it, and not beside it."""
    predictor = Predictor(target=TARGET)
    composition = generation_models(predictor).compositions["token"]
    records = [candidate(number) for number in range(3)]
    for pace in (None, 1.0, 1.7):
        options: dict[str, Any] = {"composition": composition, **({"host_pace": pace} if pace else {})}
        for brief, record in zip(predictor.predict_briefly(records, memory=True, **options), records, strict=True):
            check_same(predictor, brief, record, **options)


def test_memory_does_not_grow() -> None:
    predictor, text = Predictor(target=TARGET), candidate(0).model_dump_json()

    def made(count: int) -> Iterator[ModelRecord]:
        for number in range(count):
            yield ModelRecord.model_validate_json(text).model_copy(update={"model": f"candidate_{number}"})

    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        try:
            assert sum(1 for _ in predictor.predict_briefly(made(count), batch=4)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(4)  # what is read once
    assert peak_bytes(32) < 1.3 * peak_bytes(8)


def test_streams_leave_the_users_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Another search has other kernels, and would push out what commands ask for again."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_fitted", {})  # else the process may remember these kernels' times from another test
    predictor = Predictor(target=TARGET)
    records = [ofa.make(name, CUDA) for name in ofa.choices(9, seed=987)]
    list(predictor.predict_briefly(records[:4], energy=True, memory=True))
    list(predictor.predict_stream(iter(records[4:8])))
    list(Predictor(Workspace(folder), CPU, force=True).predict_briefly(records_of(folder, "cpu")[:2]))
    assert not (tmp_path / "cache").exists()
    predictor.predict(records[8])
    assert list((tmp_path / "cache").iterdir()), "a single prediction keeps its kernels' times"


def test_what_is_wrong_is_said() -> None:
    predictor, forcing = Predictor(target=TARGET), Predictor(target=TARGET, force=True)
    other = candidate(0, Flavour(device="cuda", runtime_version="1.5"))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("nowhere.onnx", {}, "no such model"), (candidate(0), {"dims": {"batch": 3}}, "fixed"),
        (other, {}, "predictors hold for"), (candidate(0), {"batch": 0}, "batch="),
        (candidate(0), {"processes": 0}, "processes="), (candidate(0), {"processes": "two"}, "processes=")]
    for model, options, message in cases:
        with pytest.raises(UserError, match=message):
            list(predictor.predict_briefly([model], **options))
    (forced,) = forcing.predict_briefly([other], memory=True)
    check_same(forcing, forced, other)
