"""A composition for a handful of models: constants from measured kernels, and on a GPU one number, the pace of its host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_up_dataset import chain, draw_kernels

from hase.graph_model.simulation.pipeline import Tracks
from hase.learned.default_predictors import shipped_costs
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition.fitting import fit_pace, try_few_models
from hase.training.composition.formulas import latencies_ms
from hase.training.composition.measured_models import MeasuredModel, MeasuredTracks, tracks

KERNELS = draw_kernels(30)
RECORDS = [chain(name, KERNELS[begin:begin + 10]) for begin, name in ((0, "anet_x"), (10, "bnet_x"), (20, "cnet_x"))]
MEASURED = {kernel.id: {"run": 0.1 + 0.01 * place, GPU_LABEL: 0.01 + 0.001 * place, LAUNCHES: 1.0}
            for place, kernel in enumerate(KERNELS)}
WRONG = 3.0  # predicted over measured time of held-out kernels
SLOW = 4.0  # pace of a host that is the slower track of these models


def models(latencies_ms: list[float]) -> list[MeasuredModel]:
    return [MeasuredModel(record, record.group, latency) for record, latency in zip(RECORDS, latencies_ms, strict=True)]


def out_of_fold(*labels: str) -> dict[str, dict[str, dict[str, float]]]:
    return {label: {record.model: {name: (1.0 if label == LAUNCHES else WRONG) * MEASURED[name][label]
                                   for name in record.kernels} for record in RECORDS} for label in labels}


def sums_ms(label: str) -> np.ndarray:
    return np.array([sum(MEASURED[node.kernel_id][label] for node in record.nodes) for record in RECORDS])


def test_the_line_is_fitted_to_measured_kernels() -> None:
    latency = 1.2 * sums_ms("run") + 0.05
    [tried] = try_few_models(models(latency.tolist()), out_of_fold("run"), MEASURED, ["a", "b", "c"])
    candidate = tried.candidate
    assert (candidate.label, candidate.kind) == ("run", "sum")
    assert (candidate.alpha, candidate.beta_ms) == pytest.approx((1.2, 0.05))
    assert candidate.fit_mape == pytest.approx(0.0, abs=1e-9)
    expected = np.abs((1.2 * WRONG * sums_ms("run") + 0.05) / latency - 1)
    assert candidate.cv_mape == pytest.approx(expected.mean()), "held-out models have predicted kernels"
    assert tried.predicted_ms == pytest.approx(1.2 * WRONG * sums_ms("run") + 0.05)
    [tried] = try_few_models(models((1.5 * sums_ms("run")).tolist())[:1], out_of_fold("run"), MEASURED, None)
    assert (tried.candidate.alpha, tried.candidate.cv_mape) == (pytest.approx(1.5), None)  # nothing is held out of one model


def test_a_gpu_has_the_shipped_costs_at_the_pace_of_its_host() -> None:
    times = out_of_fold(GPU_LABEL, LAUNCHES)
    unmeasured = models([1.0] * 3)
    known_tracks = [tracks(model, *({name: MEASURED[name][label] for name in model.record.kernels}
                                    for label in (GPU_LABEL, LAUNCHES))) for model in unmeasured]
    latency = latencies_ms(known_tracks, shipped_costs().at_pace(SLOW))
    measured = [replace(model, latency_ms=float(latency_ms)) for model, latency_ms in zip(unmeasured, latency, strict=True)]
    [tried] = try_few_models(measured, times, MEASURED, ["a", "b", "c"])
    assert tried.candidate.kind == "pipeline"
    assert tried.candidate.costs is not None
    assert tried.candidate.costs.launch_ms == pytest.approx(SLOW * shipped_costs().launch_ms, rel=0.02)
    assert tried.candidate.measured_cv_mape == pytest.approx(0.0, abs=0.03)
    assert tried.candidate.cv_mape is not None
    assert tried.candidate.cv_mape > 0.2, "their kernels are predicted too long"


def test_the_pace_is_fitted_where_the_host_matters() -> None:
    for gpu_ms, paces, factor, rel in ((0.001, (0.5, 1.0, 3.0), 1.0, 0.01), (5.0, (1.0,), 1.02, 0.2)):  # host, GPU decides
        nodes = Tracks(np.full(20, gpu_ms), np.ones(20), np.ones(20, dtype=int))
        for pace in paces:
            latency = factor * latencies_ms([MeasuredTracks(nodes, float("nan"), 1.0)], shipped_costs().at_pace(pace))[0]
            fitted = fit_pace([MeasuredTracks(nodes, float("nan"), float(latency))], shipped_costs())
            assert fitted == pytest.approx(pace, rel=rel)
