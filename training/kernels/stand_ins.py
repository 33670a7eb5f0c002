"""Stand-ins: measured operators that cost the same as operators that were never measured on a GPU.

ONNX Runtime's CUDA kernels of one kind share their code, and moving data takes most of their time: elementwise over one tensor,
elementwise over two, or a reduction. The ranges are from the H200's dataset, measured over predicted time, 5th to 95th
percentile: Tanh, HardSigmoid, HardSwish, Relu, QuickGelu and Gelu as Sigmoid 0.70 to 1.73 (7,243 kernels); Add, Sub and Div as
Mul 0.91 to 1.22 (2,271 kernels). GlobalAveragePool was not compared; its range is a choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ort_analysis.records.kernel_record import Kernel, KernelInput
from ort_analysis.records.kernel_types import describe_kernel
from training.kernels.uncertainty import Range

ONE_TENSOR = ("Abs", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "FastGelu", "Floor", "LeakyRelu", "Log", "Mish", "Neg",
              "Reciprocal", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish", "Tanh",
              "ThresholdedRelu")
TWO_TENSORS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "PRelu", "Pow", "Sub")


class StandIn(NamedTuple):
    """A kernel of a measured operator, and the range of the other kernel's time as multiples of its time."""

    kernel: Kernel
    range: Range


def stand_in(kernel: Kernel, measured: Mapping[str, object]) -> StandIn | None:
    """The stand-in of a kernel whose type was never measured on a GPU; None where there is none.

    Args:
        kernel: of an operator of ONNX or ONNX Runtime.
        measured: has the measured kernel types as keys.
    """
    shapes = [tensor for tensor in kernel.inputs if tensor.present]
    if kernel.op_type in ONE_TENSOR and len(shapes) == 1 and "float" in kernel.dtype:
        return _as("Sigmoid", kernel, Range(low=0.7, high=1.8)) if "Sigmoid" in measured else None
    if kernel.op_type in TWO_TENSORS and len(shapes) == 2:
        return _as("Mul", kernel, Range(low=0.7, high=1.8)) if "Mul" in measured else None
    if kernel.op_type == "GlobalAveragePool" and len(shapes[0].shape) > 2 and "ReduceMean" in measured:
        axes = tuple(range(2, len(shapes[0].shape)))
        reduced = describe_kernel("ReduceMean", "", 20, {}, [kernel.inputs[0], KernelInput(
            dtype="int64", shape=(len(axes),), constant=True, values=axes)], kernel.outputs)
        return StandIn(reduced, Range(low=0.4, high=4.0))
    return None


def _as(op_type: str, kernel: Kernel, within: Range) -> StandIn:
    """A kernel with the same tensors and another operator."""
    return StandIn(describe_kernel(op_type, "", 20, {}, kernel.inputs, kernel.outputs), within)
