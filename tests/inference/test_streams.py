"""Streams of predictions: the same answers as one by one, for models of all kinds, and no memory that grows."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest
from conftest import Once
from trained_workspace import conv_net

from hase.inference import Predictor
from hase.inference.prediction import batch as numeric_core
from hase.inference.prediction import targets
from hase.inference.prediction.brief import BriefPrediction
from hase.inference.prediction.conditions import RunMode
from hase.inference.search import ofa
from hase.recipes.same_predictions.record import CPU_WORKSPACE, RECORDS
from hase.records.kernel_record import ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.utils.cache_folder import VARIABLE
from hase.utils.errors import UserError
from hase.utils.files import unpack
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

CUDA = Flavour(device="cuda", runtime_version="1.31")
H200, CPU = "nvidia-h200", "cpu-avx512"
TOLERANCE = 1e-9  # a ratio
NETWORKS = list(ofa.choices(30))


def candidate(number: int, flavour: Flavour = CUDA) -> ModelRecord:
    """A network of a search space; the number says which. There is none below 0."""
    if number < 0:
        raise UserError("no such network")
    return ofa.make(NETWORKS[number % len(NETWORKS)], flavour)


@pytest.fixture(scope="module")
def workspace(once: Once) -> Workspace:
    """Records of many kinds of models, for CUDA and for a CPU, and predictors of a CPU."""
    return Workspace(once("streams", lambda folder: [unpack(archive, folder) for archive in (RECORDS, CPU_WORKSPACE)]))


def records_of(workspace: Workspace, device: str) -> list[ModelRecord]:
    return [read_model_record(path) for path in sorted((workspace.root / "records" / device).glob("*.json"))]


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


@pytest.mark.slow
@pytest.mark.parametrize(("options", "strict"), [
    ({}, False), ({"host_pace": 1.3}, True), ({"run_mode": RunMode(io="host")}, False),
    ({"load": {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6, "DCGM_FI_DEV_GPU_UTIL": 60.0}}, True)])
def test_a_gpus_brief_answers_are_those_of_predict(workspace: Workspace, options: dict[str, Any], strict: bool) -> None:
    predictor = Predictor(target=H200, strict=strict)
    records = [*records_of(workspace, "cuda"), *(candidate(number) for number in range(5))]
    idle = "load" not in options
    answers = list(predictor.predict_briefly(records, energy=idle, memory=True, batch=10, **options))
    for answer, record in zip(answers, records, strict=True):
        check_same(predictor, answer, record, **options)
    assert {answer.rough_estimate for answer in answers} == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_cards_and_a_cpus_brief_answers_are_those_of_predict(workspace: Workspace, strict: bool) -> None:
    for target, device, energy in (("l40s-from-data-sheet", "cuda", True), (CPU, "cpu", False)):
        predictor = Predictor(workspace, target, strict=strict, force=True)
        records = records_of(workspace, device)
        for answer, record in zip(predictor.predict_briefly(records, energy=energy, memory=True), records, strict=True):
            check_same(predictor, answer, record)


@pytest.mark.slow
def test_models_in_memory_and_their_files(tmp_path: Path) -> None:
    predictor = Predictor(target=H200)
    sources: list[Any] = [conv_net(tmp_path / f"{channels}.onnx", channels=channels) for channels in (8, 24)]
    sources += map(onnx.load, sources[:2])
    answers = list(predictor.predict_briefly(iter(sources), memory=True))
    assert [answer.latency_ms for answer in answers] == pytest.approx(
        [one.latency_ms for one in predictor.predict_many(sources)], rel=TOLERANCE)
    assert list(predictor.predict_stream(iter(sources), batch=3)) == predictor.predict_many(sources)


@pytest.mark.slow
def test_several_processes_give_the_same() -> None:
    predictor = Predictor(target=H200)
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


def test_a_model_may_come_in_any_company() -> None:
    predictor = Predictor(target=H200)
    records = [candidate(number) for number in range(12)]
    together = list(predictor.predict_briefly(records))
    with mock.patch.object(numeric_core, "MOST_KERNELS", 100):  # so that the table is begun anew again and again
        for one, other in zip(predictor.predict_briefly(records, batch=2), together, strict=True):
            assert one.model == other.model
            assert close(one.latency_ms, other.latency_ms)


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    predictor, text = Predictor(target=H200), candidate(0).model_dump_json()

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


@pytest.mark.slow
def test_streams_leave_the_users_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workspace: Workspace) -> None:
    """Another search has other kernels, and would push out what commands ask for again."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_fitted", {})  # else the process may remember these kernels' times from another test
    predictor = Predictor(target=H200)
    records = [ofa.make(name, CUDA) for name in ofa.choices(9, seed=987)]
    list(predictor.predict_briefly(records[:4], energy=True, memory=True))
    list(predictor.predict_stream(iter(records[4:8])))
    list(Predictor(workspace, CPU, force=True).predict_briefly(records_of(workspace, "cpu")[:2]))
    assert not (tmp_path / "cache").exists()
    predictor.predict(records[8])
    assert list((tmp_path / "cache").iterdir()), "a single prediction keeps its kernels' times"


def test_what_is_wrong_is_said() -> None:
    predictor, forcing = Predictor(target=H200), Predictor(target=H200, force=True)
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
