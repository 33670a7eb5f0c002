"""Host and GPU as two tracks: the closed form against a plain simulation, and costs fitted to made-up models."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hase.graph_model.simulation import pipeline
from hase.graph_model.simulation.pipeline import NodeKind, OffGpu, PipelineCosts, Tracks, dispatched_ms, pipeline_ms, timeline
from hase.records.kernel_record import KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.training.composition.formulas import FOLLOWING, HOST_BOUND, can_fit, fit_pipeline, latencies_ms, paced_runs
from hase.training.composition.measured_models import MeasuredTracks

COSTS = PipelineCosts(node_ms=0.002, view_ms=0.0003, launch_ms=0.004, start_ms=0.008, gap_ms=0.001, lead_ms=-0.004,
                      end_ms=0.006, **{name: share * 0.004 for name, share in FOLLOWING.items()})


def simulate(tracks: Tracks, costs: PipelineCosts) -> float:
    """The latency in ms, computed launch by launch."""
    host, gpu = costs.start_ms, 0.0
    for time, count, kind in zip(*tracks, strict=True):
        host += costs.node_ms if kind else costs.view_ms
        host += {NodeKind.CONVOLUTION: costs.convolution_ms, NodeKind.PRODUCT: costs.product_ms,
                 NodeKind.REDUCING: costs.reducing_ms, NodeKind.EINSUM: costs.einsum_ms,
                 NodeKind.RECURRENT: costs.recurrent_ms, NodeKind.SLOW_RECURRENT: costs.recurrent_ms,
                 NodeKind.SLOW_PRODUCT: costs.product_ms + costs.slow_product_ms}.get(kind, 0.0)
        for _ in range(int(count)):
            host += costs.launch_ms + {NodeKind.RECURRENT: costs.recurrent_launch_ms, NodeKind.SLOW_RECURRENT: (
                costs.recurrent_launch_ms + costs.slow_recurrent_launch_ms)}.get(kind, 0.0)
            gpu = max(gpu, host + costs.lead_ms) + time / count + costs.gap_ms
    return max(host, gpu) + costs.end_ms


def made_up(draw: np.random.Generator, scale: float, pace: float = 1.0) -> MeasuredTracks:
    """A model of 30 to 300 nodes whose GPU times are around `scale` ms, with the latency and host time that COSTS give it where
    the host takes `pace` times as long as usual."""
    nodes = int(draw.integers(30, 300))
    kinds = np.where(draw.random(nodes) > 0.2, draw.integers(1, len(NodeKind), nodes), NodeKind.VIEW)
    launches = np.where(kinds, draw.integers(1, 5, nodes), 0).astype(float)
    gpu_ms = np.where(kinds, scale * draw.lognormal(0.0, 1.0, nodes), 0.0)
    costs = COSTS.at_pace(pace)
    tracks = Tracks(gpu_ms, launches, kinds)
    return MeasuredTracks(tracks, float(dispatched_ms(tracks, costs)[-1]), pipeline_ms(tracks, costs), pace)


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
def test_the_closed_form_equals_the_simulation(scale: float) -> None:
    """Where the host is the slower track, where neither is for long, and where the GPU is."""
    draw = np.random.default_rng(3)
    for _ in range(20):
        model = made_up(draw, scale)
        assert model.latency_ms == pytest.approx(simulate(model.tracks, COSTS), rel=1e-9)


BY_HAND = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=-1.0, end_ms=4.0)
VIEW_BETWEEN = Tracks(np.array([20.0, 0.0, 5.0]), np.array([2.0, 0.0, 1.0]),
                      np.array([NodeKind.OWN, NodeKind.VIEW, NodeKind.OWN]))  # two kernels, a view between them


def test_by_hand() -> None:
    """The GPU still works on the first kernel when the second is dispatched."""
    tracks, costs = VIEW_BETWEEN, BY_HAND
    assert dispatched_ms(tracks, costs).tolist() == [14.0, 14.5, 17.5]
    assert pipeline_ms(tracks, costs) == 13.0 - 1.0 + 20.0 + 2 * 0.25 + 5.0 + 0.25 + 4.0  # from the first launch on
    assert pipeline_ms(tracks._replace(gpu_ms=tracks.gpu_ms / 100), costs) == 17.5 + 4.0  # the host is the slower track
    assert pipeline_ms(Tracks(np.zeros(0), np.zeros(0), np.zeros(0, dtype=int)), costs) == 14.0  # an empty graph
    assert pipeline.host_work_ms(tracks, costs) == 17.5
    waiting = OffGpu(np.array([0.0, 0.0, 3.0]), np.array([False, False, True]))
    assert pipeline.host_work_ms(tracks, costs.at_pace(2.0), waiting) == 2 * 20.5  # not what it waits for the GPU
    # everything on a slower host takes longer, the GPU's pauses do not
    assert costs.at_pace(2.0) == PipelineCosts(
        node_ms=4.0, view_ms=1.0, launch_ms=2.0, start_ms=20.0, gap_ms=0.25, lead_ms=-2.0, end_ms=8.0, off_gpu=2.0)


def test_the_gpu_works_on_a_nodes_first_launches_while_the_host_makes_the_others() -> None:
    """An LSTM alone, of a hundred launches: the host is the slower track, so little is left when its last launch is made."""
    costs = PipelineCosts(node_ms=1.0, view_ms=0.0, launch_ms=5.0, start_ms=0.0, gap_ms=0.0, lead_ms=2.0, end_ms=0.0)
    alone = Tracks(np.array([200.0]), np.array([100.0]), np.array([NodeKind.RECURRENT]))
    assert pipeline_ms(alone, costs) == 1.0 + 100 * 5.0 + 2.0 + 200.0 / 100
    slow = alone._replace(gpu_ms=np.array([2000.0]))
    assert pipeline_ms(slow, costs) == 1.0 + 5.0 + 2.0 + 2000.0


@pytest.mark.parametrize(("op_type", "shapes", "kind"), [
    ("Conv", ((1, 3, 8, 8), (4, 3, 3, 3)), NodeKind.CONVOLUTION), ("MatMul", ((2, 3), (3, 4)), NodeKind.PRODUCT),
    ("Einsum", ((2, 3), (3, 4)), NodeKind.EINSUM), ("SkipLayerNormalization", ((2, 3),) * 3, NodeKind.REDUCING),
    ("Relu", ((2, 3),), NodeKind.OWN), ("Reshape", ((2, 3), (2,)), NodeKind.VIEW)])
def test_the_kind_of_a_node(op_type: str, shapes: tuple[tuple[int, ...], ...], kind: NodeKind) -> None:
    """Kernels on the CPU provider call no library of the GPU."""
    inputs = [KernelInput(dtype="float32" if place == 0 or op_type != "Reshape" else "int64", shape=shape)
              for place, shape in enumerate(shapes)]
    kernel = describe_kernel(op_type, "", 17, {}, inputs, [Tensor(dtype="float32", shape=(6,))])
    assert pipeline.node_kind(kernel) == kind
    assert pipeline.node_kind(kernel, on_gpu=False) == min(kind, NodeKind.OWN)


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
@pytest.mark.parametrize("lead_ms", [COSTS.lead_ms, -0.07])  # the second is an H200's, longer than the first dispatch
def test_the_timeline_ends_with_the_prediction(scale: float, lead_ms: float) -> None:
    """No overlap on either track, no work before its dispatch, and the same end as the formula gives, except for a pause."""
    draw = np.random.default_rng(8)
    model, costs = made_up(draw, scale), COSTS.model_copy(update={"lead_ms": lead_ms})
    spans = timeline(model.tracks, costs)
    assert spans[0].host[0] == COSTS.start_ms
    assert all(before.host[1] == after.host[0] for before, after in itertools.pairwise(spans))
    work = [span.gpu for span in spans if span.gpu]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(work))
    assert all(span.gpu[0] >= span.host[0] for span in spans if span.gpu)
    last = max(spans[-1].host[1], work[-1][1] + COSTS.gap_ms)
    assert last + COSTS.end_ms == pytest.approx(pipeline_ms(model.tracks, costs), rel=1e-9, abs=COSTS.gap_ms)
    trace = pipeline.chrome_trace(["node"] * len(spans), spans)["traceEvents"]
    assert min(event["ts"] for event in trace if event["ph"] == "X") == pytest.approx(1000 * COSTS.start_ms)


def test_the_timeline_draws_work_shorter_rather_than_before_its_dispatch() -> None:
    """Two nodes of 1 ms, dispatched from 0.008 to 0.02 ms. The lead would place the first at −0.056 ms, before the run."""
    costs, kinds = COSTS.model_copy(update={"lead_ms": -0.07, "end_ms": 0.0}), np.full(2, NodeKind.OWN)
    tracks = Tracks(np.array([1.0, 1.0]), np.ones(2), kinds)
    assert pipeline_ms(tracks, costs) == pytest.approx(0.014 - 0.07 + 2 * 1.001)
    shorter = (0.014 - 0.07 + 2 * 1.001 - 0.008) / (2 * 1.001)  # from the first dispatch to the end of the run
    first, second = timeline(tracks, costs)
    assert first.gpu == pytest.approx((0.008, 0.008 + shorter))
    assert second.gpu == pytest.approx((0.008 + 1.001 * shorter, pipeline_ms(tracks, costs) - 0.001 * shorter))
    assert timeline(Tracks(tracks.gpu_ms[:0], tracks.launches[:0], tracks.kinds[:0]), costs) == []


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
def test_many_runs_at_once_are_as_one_by_one(scale: float) -> None:
    """Hosts of several paces, a run without nodes, one of views only, and one with nodes off the GPU."""
    draw = np.random.default_rng(4)
    models = [made_up(draw, scale, pace) for pace in (0.85, 1.0, 1.6) for _ in range(5)]
    nothing, views = np.zeros(0), np.zeros(3)
    off_gpu = OffGpu(draw.random(len(models[0].tracks.kinds)), draw.random(len(models[0].tracks.kinds)) < 0.1)
    models += [replace(models[0], off_gpu=off_gpu, pace=1.3),
               MeasuredTracks(Tracks(views, views, views.astype(int)), math.nan, 1.0, pace=1.2),
               MeasuredTracks(Tracks(nothing, nothing, nothing.astype(int)), math.nan, 1.0)]
    costs = COSTS.model_copy(update={"lead_ms": -0.03, "recurrent_launch_ms": 0.003})
    runs = paced_runs(models[::-1])
    assert runs.latencies_ms(costs)[::-1] == pytest.approx(
        [pipeline_ms(model.tracks, costs.at_pace(model.pace), model.off_gpu) for model in models], rel=1e-12)
    assert runs.hosts_ms(costs)[:0:-1] == pytest.approx(
        [dispatched_ms(model.tracks, costs.at_pace(model.pace), model.off_gpu)[-1] for model in models[:-1]], rel=1e-12)
    assert paced_runs([]).latencies_ms(costs).size == 0


@pytest.mark.slow
def test_the_fit_finds_the_costs() -> None:
    """At any pace of the host. Host times of models that are bound by the GPU do not count."""
    draw = np.random.default_rng(5)
    models = [made_up(draw, scale, draw.uniform(0.95, 1.6)) for scale in (0.0005, 0.002, 0.005, 0.01, 0.05) for _ in range(4)]
    models = [replace(m, host_ms=1.3 * m.host_ms) if m.host_ms < 0.5 * m.latency_ms else m for m in models]
    assert 3 < sum(m.host_ms < HOST_BOUND * m.latency_ms for m in models) < 15
    fitted = fit_pipeline(models)
    for name in ("node_ms", "view_ms", "launch_ms", "start_ms", "gap_ms", "convolution_ms"):
        assert getattr(fitted, name) == pytest.approx(getattr(COSTS, name), rel=0.02)
    assert (fitted.lead_ms, fitted.end_ms) == pytest.approx((COSTS.lead_ms, COSTS.end_ms), abs=5e-4)
    assert [can_fit(known) for known in (models, [replace(m, host_ms=math.nan) for m in models])] == [True, False]
    draw = np.random.default_rng(9)  # one of these models is disturbed
    models = [made_up(draw, scale) for scale in (0.0005, 0.002, 0.005, 0.01, 0.05) for _ in range(6)]
    fitted = fit_pipeline([*models[:3], replace(models[3], latency_ms=3 * models[3].latency_ms), *models[4:]])
    assert np.median(np.abs(latencies_ms(models, fitted) / [m.latency_ms for m in models] - 1)) < 0.02


def test_the_work_of_a_node_at_which_the_host_waits_counts_once() -> None:
    """One node of 5 ms inside which the host waits, then 0.5 ms of its own, then nothing."""
    costs = COSTS.model_copy(update={"lead_ms": -0.05, "end_ms": 0.0})
    tracks = Tracks(np.array([5.0]), np.array([1.0]), np.array([NodeKind.OWN]))
    waits = OffGpu(np.array([0.5]), np.array([True]))
    latency_ms = costs.start_ms + 5.0 + costs.gap_ms + 0.5
    assert pipeline_ms(tracks, costs, waits) == pytest.approx(latency_ms)
    (span,) = timeline(tracks, costs, waits)
    assert span.gpu is not None
    assert (span.host[1], span.gpu[1] - span.gpu[0]) == pytest.approx((latency_ms, 5.0))
