"""What a kernel takes from the arena while it runs, besides its outputs.

On a CPU few kernels take anything. On CUDA cuDNN's scratch was measured with 1,424 convolutions alone, each with an arena that
takes no more than it is asked for (ONNX Runtime 1.31, cuDNN 9.19, an H100). A convolution with a window turns its tensors into
another layout, and so takes as much as its input, weight and output together (median of 247 dense ones of images 1.0; of 204
in groups 1.0, a quarter more than 1.3). Pointwise and depthwise ones mostly take nothing (79 and 98 % of them), nor do most
that cut an image into patches or have a small window over its three channels. What recurrent layers, reductions, Einsum and
attention take was read off a hundred kernels in the same way.
"""

from __future__ import annotations

import math

from hase.inference.core.arena import MIB
from hase.ort_analysis.cuda.language_kernels import PART_COLUMNS, product_algorithm
from hase.records.attention import attended_by
from hase.records.kernel_record import DTYPE_BYTES, Kernel
from hase.records.operators import operator_row
from hase.records.plain_attention import intermediate_bytes

COPYING = {"BiasGelu", "FastGelu"}  # on a CPU
FEW_CHANNELS, SMALL_WINDOW = 4, 4
RECURRENT_MIB, GATES_TIMES = 8.0, 1.6  # of each direction, and of the gates of all steps; chosen on 88 layers
FAST_REDUCTIONS = ("ReduceMean", "ReduceSum")


def scratch_bytes(kernel: Kernel, device: str = "cpu") -> int:
    """The bytes that a kernel takes on a device (`cpu` or `cuda`)."""
    return _on_cuda(kernel) if device == "cuda" else _on_cpu(kernel)


def _on_cpu(kernel: Kernel) -> int:
    """A transposed convolution takes the columns that it multiplies out before it adds them up, for one image (ONNX Runtime's
    conv_transpose.cc: col_buffer), a Gelu with a bias a copy (bias_gelu.cc: tmp_data)."""
    if kernel.op_type in COPYING:
        return kernel.outputs[0].bytes
    if kernel.op_type != "ConvTranspose" or len(kernel.inputs) < 2 or len(kernel.inputs[1].shape) < 3:
        return 0
    image, weights = kernel.inputs[0], kernel.inputs[1]
    per_pixel = math.prod(weights.shape[1:]) * (image.bytes // max(image.elements, 1))
    return per_pixel * math.prod(image.shape[2:])


def _on_cuda(kernel: Kernel) -> int:
    operator_class = operator_row(kernel.op_type).operator_class
    if operator_class == "convolution":
        return _convolution_bytes(kernel)
    if operator_class == "recurrent":
        return _recurrent_bytes(kernel)
    if sizes := attended_by(kernel):  # the rotated queries, and a sum for each of them
        queries = sizes.batch * sizes.queries * sizes.heads
        return int(queries * (sizes.head_size * DTYPE_BYTES.get(kernel.dtype, 2) + DTYPE_BYTES["float32"]))
    if operator_row(kernel.op_type).cost == "attention":
        return intermediate_bytes(kernel.op_type, kernel.attributes, kernel.inputs)
    if kernel.op_type == "MatMulNBits" and (algorithm := product_algorithm(kernel)).startswith("dequantised"):
        columns = int(kernel.attributes.get("N", 0))
        if algorithm == "dequantised in parts":
            columns = min(columns, PART_COLUMNS)
        return int(columns * int(kernel.attributes.get("K", 0)) * DTYPE_BYTES.get(kernel.dtype, 2))
    if kernel.op_type == "Einsum":  # operands and result in another order
        return kernel.bytes_read + kernel.bytes_written
    if kernel.op_type.startswith("Reduce") and kernel.op_type not in FAST_REDUCTIONS and kernel.inputs:
        return int(kernel.inputs[0].elements * DTYPE_BYTES["float32"])
    return 0


def _convolution_bytes(kernel: Kernel) -> int:
    if len(kernel.inputs) < 2:
        return 0
    image, weight = kernel.inputs[:2]
    window, groups = weight.shape[2:], int(kernel.attributes.get("group", 1))
    if not window or max(window) == 1 or (groups > 1 and weight.shape[1] == 1):
        return 0
    patches = max(kernel.attributes.get("strides") or [1]) >= max(window)
    if image.shape[1] <= FEW_CHANNELS and (max(window) <= SMALL_WINDOW or patches):
        return 0
    return image.bytes + weight.bytes + kernel.outputs[0].bytes


def _recurrent_bytes(kernel: Kernel) -> int:
    if len(kernel.inputs) < 3 or len(kernel.inputs[0].shape) != 3 or len(kernel.inputs[2].shape) != 3:
        return 0
    (steps, rows, _), (directions, gates, _) = kernel.inputs[0].shape, kernel.inputs[2].shape
    of_gates = GATES_TIMES * steps * rows * directions * gates * DTYPE_BYTES.get(kernel.dtype, 4)
    return int(RECURRENT_MIB * MIB * directions + sum(tensor.bytes for tensor in kernel.inputs[:3]) + of_gates)
