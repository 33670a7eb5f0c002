"""What the GPU did, by run and by kernel. The traces are made up, since this machine may have no GPU. Their form is that of
torch's profiler, their names those of ONNX Runtime's CUDA kernels."""

from __future__ import annotations

from typing import Any

import pytest

from hase.benchmark.measuring.gpu_trace import attribute, split_carrier
from hase.records.traces import GpuRun, GpuWork
from hase.utils.timing import covered_us

ABS = "void onnxruntime::cuda::_UnaryElementWise<float, float, onnxruntime::cuda::OP_Abs<float>, 256, 4>(float const*)"
RELU = ABS.replace("OP_Abs", "OP_Relu")


def annotation(number: int, start: float, duration: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"hase:{number}", "ts": start, "dur": duration}


def launch(correlation: int, at: float, category: str = "cuda_runtime") -> dict[str, Any]:
    return {"cat": category, "name": "cudaLaunchKernel", "ts": at, "dur": 2.0, "args": {"correlation": correlation}}


def kernel(name: str, correlation: int, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "args": {"correlation": correlation}}


def test_work_belongs_to_the_run_that_launched_it() -> None:
    """So does work that ends after its run's range, since the GPU lags the host; and so do copies and driver launches."""
    events = [
        kernel("late", 3, 131.0, 4.0), annotation(1, 120.0, 10.0), annotation(0, 100.0, 15.0), launch(1, 101.0),
        launch(2, 104.0, "cuda_driver"), launch(3, 125.0), kernel("first", 1, 106.0, 5.0),
        kernel("copy", 2, 112.0, 3.0, "gpu_memcpy"), {"cat": "cpu_op", "name": "aten::add", "ts": 102.0, "dur": 1.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    first, second, third = attribute(events, 3)
    assert [work.name for work in first.work] == ["first", "copy"]
    assert (first.host_us, first.busy_us, first.span_us) == (15.0, 8.0, 9.0)
    assert [work.name for work in second.work] == ["late"]
    assert (third.host_us, third.busy_us, third.span_us, third.work) == (0.0, 0.0, 0.0, ())


def test_concurrent_work_counts_once() -> None:
    """As cuDNN runs the groups of a convolution: from 1 to 4 on two streams at once, and after a pause for 2 more."""
    work = tuple(GpuWork(name, start, lasts) for name, start, lasts in (
        ("group 0", 1.0, 2.0), ("group 1", 1.5, 2.5), ("group 2", 2.0, 1.0), ("after", 10.0, 2.0)))
    run = GpuRun(host_us=20.0, work=work)
    assert (run.busy_us, run.span_us) == (5.0, 11.0)
    split = split_carrier(run, ["kernel_0"], "abs_")
    assert split is not None
    assert covered_us(split["kernel_0"]) == 5.0


def test_work_knows_its_stream_and_outside_every_run_belongs_to_none() -> None:
    events = [annotation(0, 100.0, 10.0), launch(1, 90.0), launch(2, 111.0), kernel("before", 1, 95.0, 1.0),
              kernel("after", 2, 112.0, 1.0), kernel("without a launch", 9, 105.0, 1.0)]
    assert attribute(events, 1)[0].work == ()
    events += [launch(3, 101.0), launch(4, 102.0), kernel("first", 3, 103.0, 1.0), kernel("second", 4, 104.0, 1.0)]
    events[-1]["args"]["stream"] = 7
    assert [work.stream for work in attribute(events, 1)[0].work] == [0, 7]


def run_of(*names: str) -> GpuRun:
    return GpuRun(host_us=1.0, work=tuple(GpuWork(name, float(at), 1.0) for at, name in enumerate(names)))


def test_a_carriers_work_is_split_at_the_nodes_that_write_inputs() -> None:
    """Two inputs for the first kernel, nothing on the GPU for the second, three launches for the third."""
    run = run_of(ABS, ABS, "add", ABS, ABS, "to_nhwc", "conv", "bias")
    order = ["abs_0_0", "abs_0_1", "kernel_0", "abs_1_0", "kernel_1", "abs_2_0", "kernel_2"]
    split = split_carrier(run, order, "abs_")
    assert split is not None
    assert {name: [piece.name for piece in work] for name, work in split.items()} == {
        "kernel_0": ["add"], "kernel_1": [], "kernel_2": ["to_nhwc", "conv", "bias"]}


def test_a_kernel_of_the_writers_own_operator_has_one_piece_of_work() -> None:
    order = ["abs_0_0", "kernel_0", "abs_1_0", "kernel_1", "abs_2_0", "kernel_2"]
    split = split_carrier(run_of(ABS, ABS, ABS, RELU, ABS, ABS), order, "abs_", {"kernel_0", "kernel_2"})
    assert split is not None
    assert {name: [piece.name for piece in work] for name, work in split.items()} == {
        "kernel_0": [ABS], "kernel_1": [RELU], "kernel_2": [ABS]}
    assert split_carrier(run_of(ABS, ABS, ABS, RELU, ABS), order, "abs_", {"kernel_0", "kernel_2"}) is None


def test_one_kernel_without_written_inputs_has_all_the_work() -> None:
    split = split_carrier(run_of("gather"), ["kernel_0"], "abs_")
    assert split is not None
    assert [piece.name for piece in split["kernel_0"]] == ["gather"]


@pytest.mark.parametrize(("names", "order"), [
    ((ABS, RELU, "gather"), ["abs_0_0", "kernel_0", "kernel_1"]),  # which of the two kernels did what?
    ((ABS, RELU), ["abs_0_0", "kernel_0", "abs_1_0", "kernel_1"]),  # a writer is missing
    ((ABS, RELU, ABS, RELU), ["abs_0_0", "kernel_0"]),  # one too many
    ((RELU, ABS), ["abs_0_0", "kernel_0"]),  # work before any kernel
])
def test_work_that_can_t_be_split_gives_none(names: tuple[str, ...], order: list[str]) -> None:
    assert split_carrier(run_of(*names), order, "abs_") is None
