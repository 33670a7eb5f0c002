"""Explains why one model takes longer than another: the difference of two predicted runs, operator by operator."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hase.inference.prediction.answers import ReadableResult
from hase.records.operators import operator_row
from hase.utils.config import Frozen

if TYPE_CHECKING:
    from hase.inference.prediction.run import ModelRun, PredictedRun
    from hase.records.kernel_record import Kernel

By = Literal["operator", "type"]
Unit = Literal["FLOP", "byte"]
BY_FLOPS = ("product", "convolution", "recurrent")  # operator classes whose work is counted in operations; others in bytes
LEAST_CAUSE = 0.2  # share of the causes' sizes from which on a cause is mentioned
LEAST_MEASURED = 0.5  # difference of two measured shares from which on it is mentioned


class OperatorTime(Frozen):
    """The kernels of one operator in a run of a model.

    Attributes:
        runs: how often they run.
        time_ms: their predicted time.
        flops: operations of all runs.
        bytes: bytes that all runs read and write.
        measured_share: the part of `time_ms` that was measured, a ratio.
    """

    runs: float = 0.0
    time_ms: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    measured_share: float = 0.0


class OperatorDifference(Frozen):
    """How two models differ in the time of one operator. The three causes add up to `difference_ms`.

    Attributes:
        operator: ONNX's name, or a kernel type.
        a, b: the operator in each model.
        difference_ms: the time in B minus the time in A.
        share: `difference_ms` over the difference of the latencies, a ratio.
        unit: what a run's work is counted in.
        by_runs_ms: the part caused by the number of runs.
        by_work_ms: the part caused by the work of a run.
        by_rate_ms: the part caused by the time of a unit of work.
        explanation: the causes in words.
    """

    operator: str
    a: OperatorTime
    b: OperatorTime
    difference_ms: float
    share: float | None
    unit: Unit
    by_runs_ms: float
    by_work_ms: float
    by_rate_ms: float
    explanation: str


class ComparedModel(Frozen):
    """One of two models that are compared.

    Attributes:
        model, file: its name and its file.
        dims: sizes of its dynamic dimensions.
        batch: its batch size, if known.
        latency_ms, interval_ms: predicted, with the 90 % interval.
        kernel_sum_ms: the sum of its kernels' times.
        outside_kernels_ms: `latency_ms` minus `kernel_sum_ms`.
        nodes: how many nodes run; each run of a node in a loop counts.
        gpu_busy_share: the part of the latency in which the GPU works, a ratio; None on a CPU.
        rough_estimate: whether the prediction is a rough estimate.
    """

    model: str
    file: str
    dims: dict[str, int]
    batch: int | None
    latency_ms: float
    interval_ms: tuple[float, float]
    kernel_sum_ms: float
    outside_kernels_ms: float
    nodes: float
    gpu_busy_share: float | None
    rough_estimate: bool


class ModelDifference(ReadableResult):
    """How two models differ on one target. Version 1 is the first.

    Attributes:
        target: the target of both predictions.
        a, b: the models.
        cuda_graph: whether both are replayed as CUDA graphs.
        difference_ms: the latency of B minus that of A.
        ratio: the latency of B divided by that of A.
        intervals_overlap: whether the 90 % intervals overlap, so that it is unsure which model is faster.
        outside_kernels_ms: the part of the difference that is in no kernel.
        operators: the operators, the largest difference first.
    """

    version: int = 1
    target: str
    cuda_graph: bool
    a: ComparedModel
    b: ComparedModel
    difference_ms: float
    ratio: float
    intervals_overlap: bool
    outside_kernels_ms: float
    operators: tuple[OperatorDifference, ...]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each operator, the largest difference first."""
        return [{"operator": row.operator, "a_ms": row.a.time_ms, "b_ms": row.b.time_ms, "difference_ms": row.difference_ms,
                 "share": row.share, "explanation": row.explanation} for row in self.operators]


class Causes(NamedTuple):
    """The parts of a time difference due to the number of runs, the work per run, and the time per unit of work."""

    by_runs_ms: float
    by_work_ms: float = 0.0
    by_rate_ms: float = 0.0


def compare_runs(a: PredictedRun, b: PredictedRun, files: tuple[str, str], by: By = "operator") -> ModelDifference:
    """The difference of two models that were predicted for the same idle target.

    `by` groups kernels by operator (`Conv`), or by type, with what is fused into it (`Conv_Add_Relu`).
    """
    first, second = _compared_model(a, files[0]), _compared_model(b, files[1])
    whole_ms = second.latency_ms - first.latency_ms
    times_a, times_b, none = _operator_times(a.run, by), _operator_times(b.run, by), OperatorTime()
    kernels = [*a.run.record.kernels.values(), *b.run.record.kernels.values()]
    units = {_operator_name(kernel, by): _unit_of(kernel) for kernel in reversed(kernels)}  # of the first with a name
    rows = [_difference(name, times_a.get(name, none), times_b.get(name, none), whole_ms, units[name])
            for name in dict.fromkeys([*times_a, *times_b])]
    rows = sorted((row for row in rows if row.a.time_ms or row.b.time_ms), key=lambda row: -abs(row.difference_ms))
    return ModelDifference(
        target=a.prediction.target, cuda_graph=a.prediction.way.cuda_graph, a=first, b=second, difference_ms=whole_ms,
        ratio=second.latency_ms / first.latency_ms,
        intervals_overlap=first.interval_ms[0] <= second.interval_ms[1] and second.interval_ms[0] <= first.interval_ms[1],
        outside_kernels_ms=second.outside_kernels_ms - first.outside_kernels_ms, operators=tuple(rows))


def _operator_times(run: ModelRun, by: By) -> dict[str, OperatorTime]:
    """The time of each operator of a model, by its name."""
    sums: dict[str, tuple[float, ...]] = {}
    for node, known in zip(run.record.nodes, run.nodes, strict=True):
        kernel, time_ms = run.record.kernel_of(node), node.runs * known.latency_ms
        name = _operator_name(kernel, by)
        amounts = (node.runs, time_ms, node.runs * kernel.flops, node.runs * (kernel.bytes_read + kernel.bytes_written),
                   time_ms if known.provenance == "measured" else 0.0)
        sums[name] = tuple(map(operator.add, sums.get(name, (0.0,) * 5), amounts))
    return {name: OperatorTime(runs=runs, time_ms=time_ms, flops=flops, bytes=moved,
                               measured_share=measured_ms / time_ms if time_ms else 0.0)
            for name, (runs, time_ms, flops, moved, measured_ms) in sums.items()}


def _operator_name(kernel: Kernel, by: By) -> str:
    """The name under which a kernel's time is counted."""
    return kernel.type if by == "type" else operator_row(kernel.op_type).base or kernel.op_type


def _causes(a: OperatorTime, b: OperatorTime, unit: Unit) -> Causes:
    """Divides a time difference among its causes, without a remainder.

    A time is runs · work per run · time per unit of work. Each of the three gets a part by the logarithm of its ratio (the
    logarithmic mean Divisia index). If the work is unknown, only the runs and the time per run count.
    """
    difference_ms = b.time_ms - a.time_ms
    if not (a.runs and b.runs and a.time_ms and b.time_ms):
        return Causes(difference_ms)
    times = math.log(b.time_ms / a.time_ms)
    mean_ms = difference_ms / times if abs(times) > 1e-12 else a.time_ms
    runs = math.log(b.runs / a.runs)
    work_a, work_b = _work_per_run(a, unit), _work_per_run(b, unit)
    work = math.log(work_b / work_a) if work_a and work_b else 0.0
    return Causes(mean_ms * runs, mean_ms * work, mean_ms * (times - runs - work))


def _work_per_run(time: OperatorTime, unit: Unit) -> float:
    return (time.flops if unit == "FLOP" else time.bytes) / time.runs if time.runs else 0.0


def _unit_of(kernel: Kernel) -> Unit:
    return "FLOP" if operator_row(kernel.op_type).operator_class in BY_FLOPS else "byte"


def _difference(name: str, a: OperatorTime, b: OperatorTime, whole_ms: float, unit: Unit) -> OperatorDifference:
    parts, difference_ms = _causes(a, b, unit), b.time_ms - a.time_ms
    return OperatorDifference(
        operator=name, a=a, b=b, difference_ms=difference_ms, share=difference_ms / whole_ms if whole_ms else None, unit=unit,
        **parts._asdict(), explanation=_explanation(a, b, parts, unit))


def _explanation(a: OperatorTime, b: OperatorTime, parts: Causes, unit: Unit) -> str:
    """Explains a difference in words: its causes, largest first, and whether one side was measured and the other predicted."""
    for here, there, name in ((a, b, "A"), (b, a, "B")):
        if not there.runs:
            return f"only in {name}, {here.runs:g} {'run' if here.runs == 1 else 'runs'}"
    more = b.runs - a.runs
    causes = {f"{abs(more):g} {'more' if more > 0 else 'fewer'} {'run' if abs(more) == 1 else 'runs'}": parts.by_runs_ms}
    work_a, work_b = _work_per_run(a, unit), _work_per_run(b, unit)
    if work_a and work_b:
        causes[f"{work_b / work_a:.3g} times the {unit}s of a run"] = parts.by_work_ms
        rate = (b.time_ms / b.runs / work_b) / (a.time_ms / a.runs / work_a) if a.time_ms else 0.0
        causes[f"{rate:.3g} times the time of a {unit}"] = parts.by_rate_ms
    else:
        causes["another time of a run"] = parts.by_rate_ms
    least_ms = LEAST_CAUSE * sum(map(abs, causes.values()))
    notes = [f"{words} ({part_ms:+.3g} ms)" for words, part_ms in sorted(causes.items(), key=lambda item: -abs(item[1]))
             if abs(part_ms) >= least_ms and abs(part_ms) > 1e-9]
    if abs(a.measured_share - b.measured_share) >= LEAST_MEASURED:
        notes.append(f"measured for {a.measured_share:.0%} in A and {b.measured_share:.0%} in B")
    return "; ".join(notes) or "the same"


def _compared_model(run: PredictedRun, file: str) -> ComparedModel:
    prediction = run.prediction
    gpu_ms = sum(node.runs * known.gpu_ms for node, known in zip(run.run.record.nodes, run.run.nodes, strict=True))
    return ComparedModel(
        model=prediction.model, file=file, dims=prediction.dims, batch=prediction.batch, latency_ms=prediction.latency_ms,
        interval_ms=prediction.interval_ms, kernel_sum_ms=prediction.kernel_sum_ms,
        outside_kernels_ms=0.0 if math.isclose(prediction.latency_ms, prediction.kernel_sum_ms) else (
            prediction.latency_ms - prediction.kernel_sum_ms),
        nodes=sum(node.runs for node in run.run.record.nodes),
        gpu_busy_share=gpu_ms / prediction.latency_ms if run.run.costs is not None else None,
        rough_estimate=prediction.rough_estimate)


def difference_sentences(difference: ModelDifference, names: tuple[str, str] = ("A", "B")) -> list[str]:
    """Describes a difference in sentences: which model is faster, how certain that is, the main cause, and further notes.
    `names`: of both models in the sentences after the first.
    """
    (name_a, name_b), a, b, whole_ms = names, difference.a, difference.b, difference.difference_ms
    if not whole_ms:
        return [f"A = {a.model}, B = {b.model}: both take {a.latency_ms:.4g} ms"]
    lines = [f"A = {a.model}, B = {b.model}: B takes {abs(whole_ms):.4g} ms {'longer' if whole_ms > 0 else 'less'} than A "
             f"({a.latency_ms:.4g} and {b.latency_ms:.4g} ms, {difference.ratio:.3g} times as long)"
             + ("; their intervals overlap, so which is faster is not sure" if difference.intervals_overlap else
                "; their intervals do not overlap")]
    parts_ms = {row.operator: row.difference_ms for row in difference.operators} | {
        "outside the kernels": difference.outside_kernels_ms}
    largest = sorted(parts_ms.items(), key=lambda item: -abs(item[1]))[:3]
    lines.append("where that comes from: " + ", ".join(f"{name} {part_ms:+.3g} ms ({100 * part_ms / whole_ms:.0f} %)"
                                                       for name, part_ms in largest if part_ms))
    if a.gpu_busy_share is not None and b.gpu_busy_share is not None:
        busy = (f"the GPU works for {100 * a.gpu_busy_share:.0f} % of {name_a}'s run and {100 * b.gpu_busy_share:.0f} % of "
                f"{name_b}'s")
        lines.append(busy if difference.cuda_graph else
                     f"{busy}; else it waits for the host, which dispatches {a.nodes:g} and {b.nodes:g} nodes")
    if a.batch != b.batch:
        per_item = f"; per item they are {a.latency_ms / a.batch:.4g} and {b.latency_ms / b.batch:.4g} ms" if (
            a.batch and b.batch) else ""
        lines.append(f"{name_a} is at batch {a.batch} and {name_b} at {b.batch}: times are of whole runs{per_item}")
    if rough := [name for name, one in zip(names, (a, b), strict=True) if one.rough_estimate]:
        lines.append(f"a rough estimate: {' and '.join(rough)}")
    return lines
