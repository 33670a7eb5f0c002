"""CUDA sessions with nodes that the CPU provider runs: what they and the copies around them cost."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from graph_model.simulation.pipeline import PipelineCosts, dispatched_ms, pipeline_ms, timeline
from graph_model.simulation.tracks import NodeKind, OffGpu, Tracks
from inference import Predictor, predict
from inference.core.answers import Prediction
from inference.core.timeline import trace_of
from ort_analysis.graph.analysis import analyze
from ort_analysis.records.kernel_record import ModelRecord
from training.composition.off_gpu import HOST_RANGE, TO_GPU_BYTES_PER_MS, TO_HOST_BYTES_PER_MS

TARGET = "nvidia-h200"
COSTS = PipelineCosts(node_ms=0.002, view_ms=0.001, launch_ms=0.004, start_ms=0.03, gap_ms=0.001, lead_ms=-0.003, end_ms=0.005)


def chain(*operators: str, size: int = 1 << 20) -> ModelRecord:
    """Operators of one input after another, on float32 tensors of `size` elements."""
    names = ["x", *(f"t{place}" for place in range(len(operators) - 1)), "y"]
    nodes = [helper.make_node(op, [names[place]], [names[place + 1]], op.lower()) for place, op in enumerate(operators)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "-".join(operators), values[:1], values[1:])
    return analyze(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "cuda")


def predicted(record: ModelRecord) -> Prediction:
    return predict(record, target=TARGET)


def test_the_host_waits_for_the_gpu_at_a_copy_to_it() -> None:
    """Three nodes of 1 ms each; at the second the host waits and then computes for 5 ms."""
    tracks = Tracks(np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]), np.full(3, NodeKind.OWN))
    free = OffGpu(np.zeros(3), np.zeros(3, dtype=bool))
    assert pipeline_ms(tracks, COSTS, free) == pytest.approx(pipeline_ms(tracks, COSTS))
    waiting = OffGpu(np.array([0.0, 5.0, 0.0]), np.array([True, False, False]))
    first_done = COSTS.start_ms + COSTS.node_ms + COSTS.launch_ms + COSTS.lead_ms + 1.0 + COSTS.gap_ms
    third_dispatched = first_done + (COSTS.node_ms + 5.0) + COSTS.node_ms + COSTS.launch_ms
    at = dispatched_ms(tracks, COSTS, waiting)
    assert at.tolist() == pytest.approx([first_done, first_done + COSTS.node_ms + 5.0, third_dispatched])
    whole = third_dispatched + COSTS.lead_ms + 1.0 + COSTS.gap_ms + COSTS.end_ms
    assert pipeline_ms(tracks, COSTS, waiting) == pytest.approx(whole)
    assert timeline(tracks, COSTS, waiting)[2].gpu == pytest.approx((whole - COSTS.end_ms - COSTS.gap_ms - 1.0,
                                                                     whole - COSTS.end_ms - COSTS.gap_ms))


def test_a_node_of_the_cpu_adds_its_copies_and_its_own_guessed_time() -> None:
    size = 1 << 24
    gpu, mixed = predicted(chain("Relu", "Sigmoid", size=size)), predicted(chain("Relu", "Sinh", "Sigmoid", size=size))
    copies_ms = 4 * size / TO_HOST_BYTES_PER_MS + 4 * size / TO_GPU_BYTES_PER_MS
    (sinh,) = (kernel for kernel in mixed.kernels if kernel.type == "Sinh")
    assert (sinh.provider, sinh.provenance) == ("cpu", "estimated")
    assert mixed.latency_ms == pytest.approx(gpu.latency_ms + copies_ms + sinh.latency_ms, rel=0.01)


def test_a_model_that_the_cpu_decides_is_a_rough_estimate_and_says_why() -> None:
    mixed = predicted(chain("Relu", "Sinh", "Sigmoid"))
    assert mixed.rough_estimate
    assert mixed.estimated_operators == ("Sinh",)
    assert [text for text in mixed.warnings if "Sinh: run on the CPU in a CUDA session" in text]
    assert mixed.interval_ms[1] / mixed.latency_ms > 0.5 * HOST_RANGE[1]
    assert predicted(chain("Relu", "Sigmoid")).estimated_operators == ()


def test_the_trace_of_such_a_run_ends_with_its_latency() -> None:
    run = Predictor(target=TARGET).run(chain("Relu", "Sinh", "Sigmoid"))
    mixed = run.prediction
    spans = [event for event in trace_of(run)["traceEvents"] if event["ph"] == "X"]
    last = max(event["ts"] + event["dur"] for event in spans) / 1000 - min(event["ts"] for event in spans) / 1000
    assert mixed.composition.costs is not None
    assert last == pytest.approx(mixed.latency_ms, rel=0.05)


def test_reading_a_shape_takes_no_time_and_is_no_guess() -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"])]
    graph = helper.make_graph(nodes, "shape", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 8])],
                              [helper.ValueInfoProto(name=name) for name in ("s",)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = predict(model, target=TARGET, dims={"rows": 4})
    (shape,) = found.kernels
    assert (shape.type, shape.latency_ms, shape.provenance) == ("Shape", 0.0, "measured")
    assert found.estimated_operators == ()
