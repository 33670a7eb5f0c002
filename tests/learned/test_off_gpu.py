"""CUDA sessions with nodes that the CPU provider runs: the cost of these nodes and of the copies around them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import onnx
import pytest
from command import printed
from conftest import steady_canary
from onnx import TensorProto, helper

from hase.benchmark.ort.profile import CONDITION_MS
from hase.graph_model.simulation.pipeline import NodeKind, OffGpu, PipelineCosts, Tracks, dispatched_ms, pipeline_ms, timeline
from hase.inference import Predictor, predict
from hase.inference.prediction.run import predicted_trace
from hase.learned import target_files
from hase.learned.composition.cuda_nodes import (
    EIGHT_BIT_FLOPS_PER_MS,
    HOST_KERNEL_MS,
    HOST_RANGE,
    box_selection_ms,
    guessed_host_ms,
    host_range,
    loops_with_gpu_condition,
    row_selection_ms,
)
from hase.learned.composition.fitted import read_composition
from hase.learned.composition.host_side import CopyCurve, read_host_side
from hase.learned.kernels.sidecar import copy_predictors
from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import CopyTimes, MeasuredCopies, WaitTimes, copies_path
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Tensor
from hase.records.kernel_record_files import record_path
from hase.records.kernel_types import describe_kernel
from hase.training.composition.formulas import latencies_ms
from hase.training.composition.host_fit import GPU_NODE_MS, HOST_NODE_MS, Step, fit_copies, simulated_ms
from hase.training.composition.measured_models import MeasuredModel, model_tracks
from hase.utils import files
from hase.utils.fingerprint import machine
from hase.utils.paths import SHIPPED, Workspace

TARGET = "nvidia-h200"
COSTS = PipelineCosts(node_ms=0.002, view_ms=0.001, launch_ms=0.004, start_ms=0.03, gap_ms=0.001, lead_ms=-0.003, end_ms=0.005)


def value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto],
          *constants: onnx.TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph(nodes, "-".join(node.op_type for node in nodes), inputs, outputs, constants),
                             opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def chain(*operators: str, size: int = 1 << 20) -> ModelRecord:
    """A chain of operators of one input, on float32 tensors of `size` elements."""
    names = ["x", *(f"t{place}" for place in range(len(operators) - 1)), "y"]
    nodes = [helper.make_node(op, [names[place]], [names[place + 1]], op.lower()) for place, op in enumerate(operators)]
    return analyze(model(nodes, [value("x", size)], [value("y", size)]), "cuda")


def test_the_host_waits_for_the_gpu_at_a_copy_to_it() -> None:
    """Three nodes of 1 ms each; at the second the host waits and then computes for 5 ms."""
    tracks = Tracks(np.array([1.0, 0.0, 1.0]), np.array([1.0, 0.0, 1.0]), np.full(3, NodeKind.OWN))
    waiting = OffGpu(np.array([0.0, 5.0, 0.0]), np.array([True, False, False]))
    first_done = COSTS.start_ms + COSTS.node_ms + COSTS.launch_ms + COSTS.lead_ms + 1.0 + COSTS.gap_ms
    third_dispatched = first_done + (COSTS.node_ms + 5.0) + COSTS.node_ms + COSTS.launch_ms
    at = dispatched_ms(tracks, COSTS, waiting)
    assert at.tolist() == pytest.approx([first_done, first_done + COSTS.node_ms + 5.0, third_dispatched])
    begin_ms = third_dispatched + COSTS.lead_ms
    assert timeline(tracks, COSTS, waiting)[2].gpu == pytest.approx((begin_ms, begin_ms + 1.0))
    assert pipeline_ms(tracks, COSTS, waiting) == pytest.approx(begin_ms + 1.0 + COSTS.gap_ms + COSTS.end_ms)


@pytest.mark.slow
def test_a_node_of_the_cpu_adds_its_copies_and_its_own_guessed_time() -> None:
    """The answer is a rough estimate with a reason, and the trace ends with the latency."""
    size = 1 << 24
    gpu = predict(chain("Relu", "Sigmoid", size=size), target=TARGET)
    run = Predictor(target=TARGET).run(chain("Relu", "MeanVarianceNormalization", "Sigmoid", size=size))
    mixed = run.prediction
    [folder] = SHIPPED.glob(f"*{TARGET}*")
    costs = read_host_side(folder).costs
    copies_ms = costs.to_host.at(4 * size) + costs.to_gpu.at(4 * size)
    (normalised,) = (kernel for kernel in mixed.kernels if kernel.type == "MeanVarianceNormalization")
    assert (normalised.provider, normalised.provenance) == ("cpu", "estimated")
    assert mixed.latency_ms == pytest.approx(gpu.latency_ms + copies_ms + normalised.latency_ms, rel=0.01)
    assert (mixed.estimated_operators, mixed.rough_estimate) == (("MeanVarianceNormalization",), True)
    assert any("MeanVarianceNormalization: run on the CPU in a CUDA session" in text for text in mixed.warnings)
    spans = [event for event in predicted_trace(run)["traceEvents"] if event["ph"] == "X"]
    last = max(event["ts"] + event["dur"] for event in spans) / 1000 - min(event["ts"] for event in spans) / 1000
    assert last == pytest.approx(mixed.latency_ms, rel=0.05)


def test_costs_of_copies_follow_from_graphs_with_and_without_them() -> None:
    """Latencies are simulated with known curves; to the GPU a copy of 4 KiB takes 3 µs, of 4 MiB 400 µs."""
    to_host, to_gpu = {4: 0.008, 4096: 0.009, 1 << 22: 0.09}, {4: 0.003, 4096: 0.003, 1 << 22: 0.4}
    on_cpu, on_gpu = {4: HOST_NODE_MS, 4096: 0.002, 1 << 22: 0.05}, {4: GPU_NODE_MS, 4096: GPU_NODE_MS, 1 << 22: 0.02}

    def times(size: int) -> CopyTimes:
        gpu, cpu = Step(on_gpu[size], 1.0), Step(host_ms=on_cpu[size])
        down, up = Step(to_host[size], 1.0, waits=True), Step(0.0, 1.0, to_gpu[size])
        graphs = {"one": [gpu], "gpu": [gpu, gpu], "to_host": [gpu, down, cpu], "to_gpu": [cpu, up, gpu]}
        return CopyTimes(bytes=size, samples_ms={"cpu": (0.002 + on_cpu[size],), **{
            name: (simulated_ms(steps, COSTS),) * 3 for name, steps in graphs.items()}})

    waiting = [Step(0.004, 3.0, 0.007, waits=True)]
    waits = WaitTimes(operator="NonZero", elements=64, samples_ms={
        str(count): (simulated_ms(waiting * count, COSTS),) for count in (1, 4, 8)})
    measured = MeasuredCopies(target=TARGET, machine=machine("cpu"), copies=tuple(map(times, to_host)), waits=(waits,))
    costs = fit_copies(measured, lambda wait: (0.004, 3.0), COSTS)
    assert costs.to_host.ms == pytest.approx(tuple(to_host.values()), abs=1e-4)
    assert costs.to_gpu.ms == pytest.approx(tuple(to_gpu.values()), abs=1e-4)
    assert costs.wait_ms == pytest.approx(0.007, abs=1e-6)
    assert costs.to_gpu.at(1 << 23) == pytest.approx(2 * costs.to_gpu.ms[-1])
    with pytest.raises(ValueError, match="ascend"):
        CopyCurve(bytes=(4, 2), ms=(0.1, 0.2))


@pytest.fixture(scope="module")
def with_host(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The H200's predictors, those of Sinh and Unique learned on this machine's CPU, and made-up costs of copies."""
    workspace = Workspace(tmp_path_factory.mktemp("gpu"))
    host = Workspace(workspace.root / "host")
    [target] = [path.parent.name for path in SHIPPED.glob(f"*{TARGET}*/{target_files.PREDICTORS.name}")]
    copy_predictors(SHIPPED / target, workspace.predictors(target))
    for size in range(1, 17):
        record = chain("Relu", "Sinh" if size % 2 else "Unique", "Sigmoid", size=4096 * size)
        files.write_json(record_path(workspace, record.flavour, f"{record.model}{size}"),
                         record.model_copy(update={"model": f"{record.model}{size}"}))
    costs, gpu, cpu = read_composition(SHIPPED / target).costs, Step(GPU_NODE_MS, 1.0), Step(host_ms=HOST_NODE_MS)
    assert costs is not None
    graphs = {"one": [gpu], "gpu": [gpu, gpu], "to_host": [gpu, Step(0.02, 1.0, waits=True), cpu],
              "to_gpu": [cpu, Step(0.0, 1.0, 0.005), gpu]}  # a copy takes 20 µs to the host and 5 µs to the GPU, at any size
    samples = {"cpu": (0.003,), **{name: (simulated_ms(steps, costs),) for name, steps in graphs.items()}}
    copies = tuple(CopyTimes(bytes=size, samples_ms=samples) for size in (4, 1 << 20))
    files.write_json(copies_path(workspace.dataset(target)),
                     MeasuredCopies(target=target, machine=machine("cpu"), copies=copies, waits=()))
    (workspace.root / "training.yaml").write_text(
        "folds: 2\nthreads: 1\nxgboost: {trees: 20, depth: 3}\nxgboost_class: {trees: 20}\nforest: {trees: 2}\n")
    commands = (
        ["recipes/h200/host_kernels.py", "--workspace", workspace.root, "--into", host.root],
        ["kernel_model/kernel_builder.py", "--workspace", host.root],
        ["benchmark/collector.py", "--workspace", host.root, "--config", "recipes/h200/collect_host_kernels.yaml",
         "--set", "kernel.budget_s=0.02", "--set", "attempts=1", "--set", "patience_s=0"],
        ["training/train_kernel_model.py", "--workspace", host.root, "--config", workspace.root / "training.yaml"],
        ["training/fit_host.py", "--workspace", workspace.root, "--host", host.root])
    with pytest.MonkeyPatch.context() as patch:
        steady_canary(patch)
        for command in commands:
            printed(*command)
    return workspace


@pytest.mark.slow
def test_kernels_of_the_host_are_measured_and_learned(with_host: Workspace) -> None:
    measured, relative, unknown = (chain("Relu", op, "Sigmoid", size=size) for op, size in (
        ("Sinh", 4096 * 7), ("Sinh", 50_000), ("Cosh", 50_000)))
    predictions = [predict(record, target=TARGET, workspace=with_host) for record in (measured, relative, unknown)]
    origins = [next(kernel.provenance for kernel in prediction.kernels if kernel.type in ("Sinh", "Cosh"))
               for prediction in predictions]
    assert origins == ["measured", "predicted", "estimated"]
    assert [prediction.rough_estimate for prediction in predictions] == [False, True, True]
    width = [prediction.interval_ms[1] / prediction.latency_ms for prediction in predictions]
    assert width[0] < 2 < width[1] < width[2]  # known, predicted and guessed: the host takes most of the time


@pytest.mark.slow
def test_copies_take_their_measured_time_in_predictions_and_compositions(with_host: Workspace) -> None:
    record = chain("Relu", "Sinh", "Sigmoid", size=4096 * 7)
    prediction = predict(record, target=TARGET, workspace=with_host)
    copies = {kernel.type: kernel.latency_ms for kernel in prediction.kernels if "Memcpy" in kernel.type}
    assert copies == pytest.approx({"MemcpyToHost": 0.02, "MemcpyFromHost": 0.005}, abs=2e-4)
    [target] = [path.name for path in with_host.predictors("").iterdir() if path.is_dir()]
    host = read_host_side(with_host.predictors(target))
    by_id = {entry.id: entry for entry in prediction.kernels}
    gpu_ms, launches = ({name: (of(by_id[name]) or 0.0) if name in by_id else 0.0 for name in record.kernels}
                        for of in (attrgetter("latency_ms"), attrgetter("launches")))
    fitted = model_tracks(MeasuredModel(record, "sines", 1.0, off_gpu=host.off_gpu(record, strict=False)), gpu_ms, launches)
    assert prediction.composition.costs is not None
    assert latencies_ms([fitted], prediction.composition.costs)[0] == pytest.approx(prediction.latency_ms, rel=1e-3)
    assert fitted.off_gpu is not None
    assert fitted.off_gpu.host_ms[[node.provider == "cpu" for node in record.nodes].index(True)] > 0


def described(op_type: str, inputs: list[KernelInput], *shape: int, dtype: str = "float32", outputs: int = 1) -> Kernel:
    return describe_kernel(op_type, "", 20, {}, inputs, [Tensor(dtype=dtype, shape=shape)] * outputs)


def of(*shape: int, dtype: str = "float32", **more: Any) -> KernelInput:
    return KernelInput(dtype=dtype, shape=shape, **more)


def test_boxes_and_long_rows_are_selected_one_after_another() -> None:
    """Times of an H200: 5,295 or 10,610 kept boxes of 20,000, and rows of 33,600 numbers and of 1.2 million, in detectors."""
    boxes = [described("NonMaxSuppression", [of(1, 20000, 4), of(1, 1, 20000)], kept, 3, dtype="int64")
             for kept in (5295, 10610)]
    assert [box_selection_ms(selection) for selection in boxes] == pytest.approx([4.7, 7.39], rel=0.06)
    rows = [described("TopK", [of(numbers), of(1, dtype="int64", values=(1000,))], 1000, outputs=2)
            for numbers in (33_600, 1_209_600)]
    assert [row_selection_ms(selection) for selection in rows] == pytest.approx([0.1225, 6.37], rel=0.1)


@pytest.mark.slow
def test_a_loop_waits_only_where_its_body_makes_the_condition_on_the_gpu() -> None:
    def looping(condition: bool) -> ModelRecord:
        node = helper.make_node
        body = [node("Tanh", ["state"], ["next"]), *([node("Not", ["on"], ["off"]), node("Not", ["off"], ["on_out"])]
                                                     if condition else [])]
        graph = helper.make_graph(body, "body", [value("step", kind=TensorProto.INT64), value("on", kind=TensorProto.BOOL),
                                                 value("state", 8, 64)],
                                  [value("on_out" if condition else "on", kind=TensorProto.BOOL), value("next", 8, 64)])
        return analyze(model([node("Loop", ["trips", "go", "x"], ["y"], body=graph)], [value("x", 8, 64)], [value("y", 8, 64)],
                             helper.make_tensor("trips", TensorProto.INT64, [], [12]),
                             helper.make_tensor("go", TensorProto.BOOL, [], [True])), "cuda")

    free, reading = looping(False), looping(True)
    assert [len(loops_with_gpu_condition(record)) for record in (free, reading)] == [0, 1]
    longer_ms, free_ms = (predict(record, target=TARGET).latency_ms for record in (reading, free))
    assert longer_ms - free_ms > 12 * CONDITION_MS


def test_times_of_the_host_s_kernels_are_guessed() -> None:
    """On the host of an H200, a Multinomial of 32,000 numbers took 0.3 ms, although it moves only 0.1 MB."""
    drawn = described("Multinomial", [of(1, 32000)], 1, 1, dtype="int64")
    assert guessed_host_ms(drawn) == pytest.approx(0.3, rel=0.3)
    assert host_range(drawn)[1] > HOST_RANGE[1]
    assert guessed_host_ms(described("Gather", [of(1, 32000), of(1, dtype="int64")], 1, 1)) < 0.02
    eight_bits, floating = (
        described(op_type, [of(64, 1024, dtype=dtype), of(1024, 1024, dtype=dtype, constant=True)], 64, 1024, dtype=out)
        for op_type, dtype, out in (("MatMulInteger", "uint8", "int32"), ("MatMul", "float32", "float32")))
    assert guessed_host_ms(eight_bits) == pytest.approx(HOST_KERNEL_MS + 2 * 64 * 1024 * 1024 / EIGHT_BIT_FLOPS_PER_MS)
    assert guessed_host_ms(floating) > 2 * guessed_host_ms(eight_bits)
