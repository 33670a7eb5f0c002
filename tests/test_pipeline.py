"""Host and GPU as two tracks: the closed form against a plain simulation, and the costs found again from made-up models."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from overlap_simulator import NodeSpan, PipelineCosts, chrome_trace, dispatched_ms, pipeline_ms, timeline
from training.pipeline import Tracks, fit_host, fit_pipeline

COSTS = PipelineCosts(node_ms=0.002, view_ms=0.0003, launch_ms=0.004, start_ms=0.03, gap_ms=0.001, lead_ms=-0.004, end_ms=0.006)


def simulate(gpu_ms: np.ndarray, launches: np.ndarray, moves: np.ndarray, costs: PipelineCosts) -> float:
    """Node after node, as it happens."""
    host, gpu = costs.start_ms, 0.0
    for time, count, moving in zip(gpu_ms, launches, moves, strict=True):
        host += (costs.node_ms if moving else costs.view_ms) + costs.launch_ms * count
        if count:
            gpu = max(gpu, host + costs.lead_ms) + time + costs.gap_ms * count
    return max(host, gpu) + costs.end_ms


def made_up(draw: np.random.Generator, scale: float) -> Tracks:
    """A model of 30 to 300 nodes whose GPU times are around `scale` ms, with the latency and host time that COSTS give it."""
    nodes = int(draw.integers(30, 300))
    moves = draw.random(nodes) > 0.2
    launches = np.where(moves, draw.integers(1, 5, nodes), 0).astype(float)
    gpu_ms = np.where(moves, scale * draw.lognormal(0.0, 1.0, nodes), 0.0)
    host_ms = float(dispatched_ms(launches, moves, COSTS)[-1]) + 0.02
    return Tracks(gpu_ms, launches, moves, host_ms, pipeline_ms(gpu_ms, launches, moves, COSTS))


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
def test_the_closed_form_is_the_simulation(scale: float) -> None:
    """Where the host is the slower track, where neither is for long, and where the GPU is."""
    draw = np.random.default_rng(3)
    for _ in range(20):
        model = made_up(draw, scale)
        assert model.latency_ms == pytest.approx(simulate(model.gpu_ms, model.launches, model.moves, COSTS), rel=1e-9)


def test_by_hand() -> None:
    """Two kernels, a view between them: the GPU still works on the first when the second is dispatched."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=-1.0, end_ms=4.0)
    gpu, launches, moves = np.array([20.0, 0.0, 5.0]), np.array([2.0, 0.0, 1.0]), np.array([True, False, True])
    assert dispatched_ms(launches, moves, costs).tolist() == [14.0, 14.5, 17.5]
    assert pipeline_ms(gpu, launches, moves, costs) == 14.0 - 1.0 + 20.0 + 2 * 0.25 + 5.0 + 0.25 + 4.0
    assert pipeline_ms(gpu / 100, launches, moves, costs) == 17.5 + 4.0  # the host is the slower track
    assert pipeline_ms(gpu[:0], launches[:0], moves[:0], costs) == 14.0  # a graph that is optimised away


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
@pytest.mark.parametrize("lead_ms", [COSTS.lead_ms, -0.07])  # the second as fitted for an H200, longer than the first dispatch
def test_the_timeline_ends_with_the_prediction(scale: float, lead_ms: float) -> None:
    """No overlap on either track, and the same end as the formula gives."""
    draw = np.random.default_rng(8)
    model, costs = made_up(draw, scale), COSTS.model_copy(update={"lead_ms": lead_ms})
    spans = timeline(model.gpu_ms, model.launches, model.moves, costs)
    assert spans[0].host[0] == COSTS.start_ms
    assert all(before.host[1] == after.host[0] for before, after in itertools.pairwise(spans))
    work = [span.gpu for span in spans if span.gpu]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(work))
    last = max(spans[-1].host[1], work[-1][1] + COSTS.gap_ms * model.launches[model.launches > 0][-1])
    assert last + COSTS.end_ms == pytest.approx(pipeline_ms(model.gpu_ms, model.launches, model.moves, costs), rel=1e-9)
    trace = chrome_trace(["node"] * len(spans), spans)["traceEvents"]
    assert min(event["ts"] for event in trace if event["ph"] == "X") >= 0


def test_a_trace_has_both_tracks() -> None:
    found = chrome_trace(["a", "view"], [NodeSpan((0.0, 0.5), (0.25, 2.0)), NodeSpan((0.5, 0.75), None)])
    assert [event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"] == ["predicted", "host", "GPU"]
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(span["name"], span["tid"], span["ts"], span["dur"]) for span in spans] == [
        ("a", 1, 0.0, 500.0), ("view", 1, 500.0, 250.0), ("a", 2, 250.0, 1750.0)]


def test_costs_are_found_again() -> None:
    draw = np.random.default_rng(5)
    models = [made_up(draw, scale) for scale in (0.0005, 0.002, 0.005, 0.01, 0.05) for _ in range(6)]
    node, view, launch, run = fit_host(models)
    assert (node, view, launch) == pytest.approx((COSTS.node_ms, COSTS.view_ms, COSTS.launch_ms), rel=0.05)
    assert run == pytest.approx(COSTS.start_ms + 0.02, rel=0.05)
    found = fit_pipeline(models)
    errors = [abs(pipeline_ms(m.gpu_ms, m.launches, m.moves, found) / m.latency_ms - 1) for m in models]
    assert max(errors) < 0.01
    assert found.gap_ms == pytest.approx(COSTS.gap_ms, abs=2e-4)


def test_one_disturbed_model_pulls_little() -> None:
    draw = np.random.default_rng(6)
    models = [made_up(draw, scale) for scale in (0.0005, 0.002, 0.01, 0.05) for _ in range(6)]
    models[3] = replace(models[3], latency_ms=3 * models[3].latency_ms)
    found = fit_pipeline(models)
    errors = [abs(pipeline_ms(m.gpu_ms, m.launches, m.moves, found) / m.latency_ms - 1) for m in models]
    assert np.median(errors) < 0.02
