"""Host and GPU as two tracks: the closed form against a plain simulation, and costs fitted to made-up models."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import (
    NodeKind,
    NodeSpan,
    OffGpu,
    PipelineCosts,
    Tracks,
    chrome_trace,
    dispatched_ms,
    host_work_ms,
    node_kind,
    pipeline_ms,
    timeline,
)
from hase.records.kernel_record import KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.training.composition.formulas import (
    FOLLOWING,
    HOST_BOUND,
    can_fit,
    fit_pipeline,
    latencies_ms,
    left_out_ms,
    paced_runs,
)
from hase.training.composition.measured_models import MeasuredTracks

AROUND_A_VIEW = np.array([NodeKind.OWN, NodeKind.VIEW, NodeKind.OWN])
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


def test_by_hand() -> None:
    """Two kernels, a view between them: the GPU still works on the first when the second is dispatched."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=-1.0, end_ms=4.0)
    tracks = Tracks(np.array([20.0, 0.0, 5.0]), np.array([2.0, 0.0, 1.0]), AROUND_A_VIEW)
    assert dispatched_ms(tracks, costs).tolist() == [14.0, 14.5, 17.5]
    assert pipeline_ms(tracks, costs) == 13.0 - 1.0 + 20.0 + 2 * 0.25 + 5.0 + 0.25 + 4.0  # from the first launch on
    assert pipeline_ms(tracks._replace(gpu_ms=tracks.gpu_ms / 100), costs) == 17.5 + 4.0  # the host is the slower track
    assert pipeline_ms(Tracks(np.zeros(0), np.zeros(0), np.zeros(0, dtype=int)), costs) == 14.0  # an empty graph
    assert host_work_ms(tracks, costs) == 17.5
    waiting = OffGpu(np.array([0.0, 0.0, 3.0]), np.array([False, False, True]))
    assert host_work_ms(tracks, costs.at_pace(2.0), waiting) == 2 * 20.5  # not what it waits for the GPU


def test_a_librarys_call_costs_the_host_more() -> None:
    """A Conv, a Relu, a Reshape, a MatMul and an LSTM of three launches."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=-1.0, end_ms=4.0,
                          convolution_ms=7.0, product_ms=3.0, recurrent_launch_ms=0.5)
    kinds = np.array([NodeKind.CONVOLUTION, NodeKind.OWN, NodeKind.VIEW, NodeKind.PRODUCT, NodeKind.RECURRENT])
    tracks = Tracks(np.ones(5), np.array([2.0, 1.0, 0.0, 1.0, 3.0]), kinds)
    assert dispatched_ms(tracks, costs).tolist() == [21.0, 24.0, 24.5, 30.5, 37.0]
    no_library = tracks._replace(kinds=np.minimum(kinds, NodeKind.OWN))
    assert dispatched_ms(no_library, costs).tolist() == [14.0, 17.0, 17.5, 20.5, 25.5]
    twice = costs.at_pace(2.0)
    assert (twice.convolution_ms, twice.product_ms, twice.recurrent_launch_ms, twice.gap_ms) == (14.0, 6.0, 1.0, 0.25)


def test_a_reduction_or_an_einsum_costs_the_host_more_where_that_was_fitted() -> None:
    """Older files have no such costs, so predictions from them stay the same."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0)
    for kind, name in ((NodeKind.REDUCING, "reducing_ms"), (NodeKind.EINSUM, "einsum_ms")):
        tracks = Tracks(np.zeros(2), np.ones(2), np.array([NodeKind.OWN, kind]))
        assert dispatched_ms(tracks, costs).tolist() == [13.0, 16.0]
        assert dispatched_ms(tracks, costs.model_copy(update={name: 0.5})).tolist() == [13.0, 16.5]


def test_the_gpu_works_on_a_nodes_first_launches_while_the_host_makes_the_others() -> None:
    """An LSTM alone, of a hundred launches: the host is the slower track, so little is left when its last launch is made."""
    costs = PipelineCosts(node_ms=1.0, view_ms=0.0, launch_ms=5.0, start_ms=0.0, gap_ms=0.0, lead_ms=2.0, end_ms=0.0)
    alone = Tracks(np.array([200.0]), np.array([100.0]), np.array([NodeKind.RECURRENT]))
    assert pipeline_ms(alone, costs) == 1.0 + 100 * 5.0 + 2.0 + 200.0 / 100
    slow = alone._replace(gpu_ms=np.array([2000.0]))
    assert pipeline_ms(slow, costs) == 1.0 + 5.0 + 2.0 + 2000.0


@pytest.mark.parametrize(("op_type", "shapes", "kind"), [
    ("Conv", ((1, 3, 8, 8), (4, 3, 3, 3)), NodeKind.CONVOLUTION), ("MatMul", ((2, 3), (3, 4)), NodeKind.PRODUCT),
    ("Einsum", ((2, 3), (3, 4)), NodeKind.EINSUM),
    ("ReduceMean", ((2, 3),), NodeKind.REDUCING), ("SkipLayerNormalization", ((2, 3),) * 3, NodeKind.REDUCING),
    ("MaxPool", ((1, 3, 8, 8),), NodeKind.REDUCING), ("Softmax", ((2, 3),), NodeKind.REDUCING),
    ("Relu", ((2, 3),), NodeKind.OWN), ("Reshape", ((2, 3), (2,)), NodeKind.VIEW)])
def test_the_kind_of_a_node(op_type: str, shapes: tuple[tuple[int, ...], ...], kind: NodeKind) -> None:
    """Kernels on the CPU provider call no library of the GPU."""
    inputs = [KernelInput(dtype="float32" if place == 0 or op_type != "Reshape" else "int64", shape=shape)
              for place, shape in enumerate(shapes)]
    kernel = describe_kernel(op_type, "", 17, {}, inputs, [Tensor(dtype="float32", shape=(6,))])
    assert node_kind(kernel) == kind
    assert node_kind(kernel, on_gpu=False) == min(kind, NodeKind.OWN)


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
@pytest.mark.parametrize("lead_ms", [COSTS.lead_ms, -0.07])  # the second is an H200's, longer than the first dispatch
def test_the_timeline_ends_with_the_prediction(scale: float, lead_ms: float) -> None:
    """No overlap on either track, and the same end as the formula gives."""
    draw = np.random.default_rng(8)
    model, costs = made_up(draw, scale), COSTS.model_copy(update={"lead_ms": lead_ms})
    spans = timeline(model.tracks, costs)
    assert spans[0].host[0] == COSTS.start_ms
    assert all(before.host[1] == after.host[0] for before, after in itertools.pairwise(spans))
    work = [span.gpu for span in spans if span.gpu]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(work))
    last = max(spans[-1].host[1], work[-1][1] + COSTS.gap_ms)
    assert last + COSTS.end_ms == pytest.approx(pipeline_ms(model.tracks, costs), rel=1e-9)
    trace = chrome_trace(["node"] * len(spans), spans)["traceEvents"]
    assert min(event["ts"] for event in trace if event["ph"] == "X") >= 0


def test_a_trace_has_both_tracks() -> None:
    trace = chrome_trace(["a", "view"], [NodeSpan((0.0, 0.5), (0.25, 2.0)), NodeSpan((0.5, 0.75), None)])
    assert [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"] == ["predicted", "host", "GPU"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(span["name"], span["tid"], span["ts"], span["dur"]) for span in spans] == [
        ("a", 1, 0.0, 500.0), ("view", 1, 500.0, 250.0), ("a", 2, 250.0, 1750.0)]


def test_a_slower_host_by_hand() -> None:
    """Everything on the host takes twice as long, the GPU's pauses do not. A model that is bound by the GPU hardly changes."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=-1.0, end_ms=4.0)
    slower = costs.at_pace(2.0)
    assert slower == PipelineCosts(node_ms=4.0, view_ms=1.0, launch_ms=2.0, start_ms=20.0, gap_ms=0.25, lead_ms=-2.0,
                                   end_ms=8.0, off_gpu=2.0)
    gpu, launches, moves = np.array([20.0, 0.0, 5.0]), np.array([2.0, 0.0, 1.0]), AROUND_A_VIEW
    of_gpu, of_host = (MeasuredTracks(Tracks(times, launches, moves), host_ms=35.0, latency_ms=50.0, pace=2.0)
                       for times in (gpu, gpu / 100))
    assert latencies_ms([of_gpu, of_host], costs).tolist() == [41.75, 21.5]
    waiting = 26.0 - 2.0 + 20.0 + 2 * 0.25 + 5.0 + 0.25 + 8.0
    runs = paced_runs([of_gpu, of_host])
    assert runs.latencies_ms(costs).tolist() == [waiting, 43.0]
    assert runs.hosts_ms(costs).tolist() == [35.0, 35.0]


def test_a_slower_host_takes_longer_for_what_it_does_off_the_gpu() -> None:
    """A node of the CPU provider between two kernels: 1.5 times as long, as everything on the host, but not on the GPU."""
    costs = PipelineCosts(node_ms=2.0, view_ms=0.5, launch_ms=1.0, start_ms=10.0, gap_ms=0.25, lead_ms=0.0, end_ms=4.0)
    tracks = Tracks(np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]), np.array([NodeKind.OWN] * 3))
    off_gpu = OffGpu(np.array([0.0, 20.0, 0.0]), np.array([False, False, False]))
    host_ms, gpu_ms = 10.0 + 3.0 + (2.0 + 20.0) + 3.0 + 4.0, 1.0 + 0.25
    for pace in (1.0, 1.5):
        assert pipeline_ms(tracks, costs.at_pace(pace), off_gpu) == pytest.approx(pace * host_ms + gpu_ms)


@pytest.mark.parametrize("scale", [0.0001, 0.01, 1.0])
def test_many_runs_at_once_are_as_one_by_one(scale: float) -> None:
    """Hosts of several paces, a run without nodes, one of views only, and one with nodes off the GPU."""
    draw = np.random.default_rng(4)
    models = [made_up(draw, scale, pace) for pace in (0.85, 1.0, 1.6) for _ in range(5)]
    nothing, views = np.zeros(0), np.zeros(3)
    models.insert(7, MeasuredTracks(Tracks(nothing, nothing, nothing.astype(int)), math.nan, 1.0))
    models.insert(3, MeasuredTracks(Tracks(views, views, views.astype(int)), math.nan, 1.0, pace=1.2))
    off_gpu = OffGpu(draw.random(len(models[0].tracks.kinds)), draw.random(len(models[0].tracks.kinds)) < 0.1)
    models.insert(5, replace(models[0], off_gpu=off_gpu, pace=1.3))
    costs = COSTS.model_copy(update={"lead_ms": -0.03, "recurrent_launch_ms": 0.003})
    runs = paced_runs(models)
    assert runs.latencies_ms(costs) == pytest.approx(
        [pipeline_ms(model.tracks, costs.at_pace(model.pace), model.off_gpu) for model in models], rel=1e-12)
    assert np.delete(runs.hosts_ms(costs), 9) == pytest.approx(
        [dispatched_ms(model.tracks, costs.at_pace(model.pace), model.off_gpu)[-1]
         for model in models if len(model.tracks.kinds)], rel=1e-12)
    assert paced_runs([]).latencies_ms(costs).size == 0


def test_the_fit_finds_the_costs() -> None:
    """At any pace of the host. Host times of models that are bound by the GPU do not count."""
    draw = np.random.default_rng(5)
    models = [made_up(draw, scale, draw.uniform(0.95, 1.6)) for scale in (0.0005, 0.002, 0.005, 0.01, 0.05) for _ in range(6)]
    models = [replace(m, host_ms=1.3 * m.host_ms) if m.host_ms < 0.5 * m.latency_ms else m for m in models]
    assert 5 < sum(m.host_ms < HOST_BOUND * m.latency_ms for m in models) < 20
    fitted = fit_pipeline(models)
    assert (fitted.node_ms, fitted.view_ms, fitted.launch_ms, fitted.start_ms, fitted.gap_ms) == pytest.approx(
        (COSTS.node_ms, COSTS.view_ms, COSTS.launch_ms, COSTS.start_ms, COSTS.gap_ms), rel=0.02)
    assert fitted.convolution_ms == pytest.approx(COSTS.convolution_ms, rel=0.02)
    assert fitted.lead_ms == pytest.approx(COSTS.lead_ms, abs=5e-4)
    assert fitted.end_ms == pytest.approx(COSTS.end_ms, abs=5e-4)


def test_left_out_predictions_at_the_usual_and_the_measured_pace() -> None:
    draw = np.random.default_rng(7)
    models = [made_up(draw, scale, 1.5 if place == 0 else 1.0) for scale in (0.0005, 0.002, 0.01, 0.05) for place in range(5)]
    groups = [str(place % 5) for place in range(len(models))]
    measured = np.array([m.latency_ms for m in models])
    assert left_out_ms(models, groups).paced_ms == pytest.approx(measured, rel=0.01)
    usual = [pipeline_ms(m.tracks, COSTS) for m in models]
    assert left_out_ms(models, groups).usual_ms == pytest.approx(np.array(usual), rel=0.01)
    assert usual[0] < 0.75 * measured[0]


def test_latencies_suffice_where_host_times_are_unknown() -> None:
    draw = np.random.default_rng(9)
    models = [made_up(draw, scale) for scale in (0.0005, 0.002, 0.005, 0.01, 0.05) for _ in range(6)]
    models = [m if place % 3 else replace(m, host_ms=math.nan) for place, m in enumerate(models)]
    assert can_fit(models)
    assert latencies_ms(models, fit_pipeline(models)) == pytest.approx(np.array([m.latency_ms for m in models]), rel=0.01)
    assert not can_fit([replace(m, host_ms=math.nan) for m in models])


def test_one_disturbed_model_changes_little() -> None:
    draw = np.random.default_rng(6)
    models = [made_up(draw, scale) for scale in (0.0005, 0.002, 0.01, 0.05) for _ in range(6)]
    models[3] = replace(models[3], latency_ms=3 * models[3].latency_ms)
    fitted = fit_pipeline(models)
    errors = [abs(pipeline_ms(m.tracks, fitted) / m.latency_ms - 1) for m in models]
    assert np.median(errors) < 0.02


def test_the_work_of_a_node_at_which_the_host_waits_counts_once() -> None:
    """One node of 5 ms inside which the host waits, then 0.5 ms of its own, then nothing."""
    costs = PipelineCosts(node_ms=0.002, view_ms=0.001, launch_ms=0.004, start_ms=0.01, gap_ms=0.001, lead_ms=-0.05, end_ms=0.0)
    tracks = Tracks(np.array([5.0]), np.array([1.0]), np.array([NodeKind.OWN]))
    waits = OffGpu(np.array([0.5]), np.array([True]))
    latency_ms = costs.start_ms + 5.0 + costs.gap_ms + 0.5
    assert pipeline_ms(tracks, costs, waits) == pytest.approx(latency_ms)
    (span,) = timeline(tracks, costs, waits)
    assert span.host[1] == pytest.approx(latency_ms)
    assert span.gpu is not None
    assert span.gpu[1] - span.gpu[0] == pytest.approx(5.0)
