"""Costs of a kernel: floating-point operations, bytes read and written, and sequential steps.

They follow from the operator's row in the table (operators.py), attributes and shapes. Training and prediction recompute them,
and ignore the costs in files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hase.records import attention
from hase.records.kernel_record import Kernel, KernelInput, Tensor, input_at
from hase.records.operators import operator_row

# A step down a decision tree counts as this many operations, because it waits for memory. Measured on two cores of an AMD
# EPYC: 2.8 ns per step (64 rows, 200 trees of a scikit-learn forest).
STEP_FLOPS = 100
LAUNCHED_INPUTS = 32  # the launch of a Concat carries tables of so many inputs; with more, it copies them from the host
MOST_ALIGNMENT = 64


def flops(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Floating-point operations of one run. A multiply-add counts as two, data movement as none.

    A recurrent layer multiplies input and previous state by the weights of all gates (W and R in ONNX) in every step: 2 ·
    directions · steps · batch · gates · hidden · (input + hidden).
    """
    row = operator_row(op_type)
    out = outputs[0].elements if outputs else 0
    first, second = input_at(inputs, 0), input_at(inputs, 1)
    match row.cost:
        case "view" | "move":
            return 0
        case "convolution":
            weights = input_at(inputs, row.weights_input)
            added = inputs[2:4] if row.weights_input == 1 else inputs[8:]  # quantised tensors have scales and zero points
            return out * (2 * math.prod(weights.shape[1:]) + sum(tensor.present for tensor in added))
        case "transposed convolution":
            return 2 * first.elements * math.prod(second.shape[1:])
        case "gemm":
            inner = _size(first, 0 if attributes.get("transA") else -1)
            return out * (2 * inner + input_at(inputs, 2).present)
        case "product":
            return 2 * out * _size(first, -2 if attributes.get("transA") else -1)
        case "einsum" if product := einsum_product(attributes, inputs):
            return 2 * math.prod(product)
        case "attention":
            if (sizes := attention.attention_sizes(op_type, attributes, inputs)) is None:
                return 0
            # Unpadded rows count as if of equal length.
            return attention.flops(sizes) + (attention.projection_flops(inputs) if attention.projects(op_type, inputs) else 0)
        case "grouped attention":
            return attention.flops(attention.grouped_query_sizes(attributes, inputs))
        case "experts":
            return 2 * math.prod(first.shape[:-1]) * experts_used(attributes) * _expert_elements(attributes, inputs)
        case "recurrent":  # without the activations of the cells, about 1 % of the products
            return 2 * math.prod(first.shape[:2]) * sum(tensor.elements for tensor in inputs[1:3])
        case "window":
            return out * math.prod(attributes.get("kernel_shape", [1]))
        case "reduction":
            return first.elements
        case "trees":
            return round(_size(first, 0) * tree_steps(attributes) * STEP_FLOPS)
        case "transform":
            length, transforms = _transforms(op_type, attributes, inputs, outputs)
            return transforms * transform_flops(length)
    return max(out, first.elements) * row.element_flops


def transform_flops(length: int) -> int:
    """Operations of a Fourier transform of `length` numbers: 5 N log2 N for a power of two, as customary (benchFFT). For other
    lengths ONNX Runtime's CPU provider uses Bluestein's algorithm: three transforms of the next power of two from 2N - 1."""
    if length < 2:
        return 0
    if length & (length - 1):
        return 3 * transform_flops(1 << (2 * length - 2).bit_length())
    return 5 * length * (length.bit_length() - 1)


def _transforms(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput],
                outputs: Sequence[Tensor]) -> tuple[int, int]:
    """Length and number of the Fourier transforms of a DFT or STFT. An unknown axis is the last one with numbers."""
    shape = outputs[0].shape if outputs else ()
    if op_type == "STFT":
        length = _number(inputs, 3) or _size(input_at(inputs, 2), 0)
        return length, math.prod(shape[:-2])
    axis = attributes.get("axis")
    axis = _number(inputs, 2) if axis is None else int(axis)
    axis = -2 if axis is None else axis
    length = _number(inputs, 1) or _size(input_at(inputs, 0), axis)
    return length, math.prod(shape[:-1]) // max(_size(Tensor(dtype="", shape=shape), axis), 1)


def _number(inputs: Sequence[KernelInput], index: int) -> int | None:
    """The value of the input at `index`, a single number; None if unknown."""
    values = input_at(inputs, index).values
    return int(values[0]) if values else None


def bytes_read(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Bytes of all inputs, each counted once; 0 if a tensor is only renamed.

    Of a table, at most the gathered elements count; of a table of scales, one number per block of them. A recurrent layer reads
    its state's weights (R) in every step. Of experts, only as many count as tokens can choose.
    """
    row = operator_row(op_type)
    if row.cost == "view":
        return 0
    if row.cost == "grouped attention":
        return attention.bytes_read(attention.grouped_query_sizes(attributes, inputs), inputs)
    total = sum(tensor.bytes for tensor in inputs)
    out = outputs[0].elements if outputs else 0
    for index in row.table_inputs:
        if index >= len(inputs):
            continue
        table = inputs[index]
        used = out if index == row.table_inputs[0] else -(-out // int(attributes.get("block_size", 1)))
        if index in row.packed_inputs and table.dtype == "uint8":
            used = -(-used * int(attributes.get("bits", 8)) // 8)
        if table.elements > used:
            total -= table.bytes - table.model_copy(update={"shape": (used,)}).bytes
    if row.cost == "attention":
        total += attention.intermediate_bytes(op_type, attributes, inputs)
    if row.cost == "recurrent" and len(inputs) > 2:
        total += (max(steps(op_type, attributes, inputs), 1) - 1) * inputs[2].bytes
    if row.cost == "experts" and len(inputs) > 1:
        experts = max(_size(inputs[1], -1), 1)
        idle = max(experts - math.prod(inputs[0].shape[:-1]) * experts_used(attributes), 0)
        total -= sum(tensor.bytes for tensor in inputs[2:]) * idle // experts
    return total


def bytes_written(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Bytes of all outputs; 0 if a tensor is only renamed."""
    match operator_row(op_type).cost:
        case "view":
            return 0
        case "grouped attention":
            return attention.bytes_written(attention.grouped_query_sizes(attributes, inputs), outputs)
        case "attention":
            return sum(tensor.bytes for tensor in outputs) + attention.intermediate_bytes(op_type, attributes, inputs)
    return sum(tensor.bytes for tensor in outputs)


def steps(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[Tensor]) -> int:
    """The number of sequential steps: the sequence length of a recurrent layer; 1 for other kernels."""
    if operator_row(op_type).cost != "recurrent" or not inputs:
        return 1
    return _size(inputs[0], 1 if attributes.get("layout") else 0)


def tree_steps(attributes: Mapping[str, Any]) -> float:
    """The steps of one row through all trees of an ensemble, if the trees are balanced."""
    if "tree_roots" in attributes:  # TreeEnsemble of ai.onnx.ml 5
        trees, nodes = len(attributes["tree_roots"]), 2 * len(attributes.get("nodes_splits", ())) + 1
    else:
        trees, nodes = len(set(attributes.get("nodes_treeids", (0,)))), len(attributes.get("nodes_modes", (0,)))
    return trees * max(1.0, math.log2(max(nodes / max(trees, 1), 2)))


def is_control_flow(kernel: Kernel) -> bool:
    """Whether it is a Loop, an If or a Scan, whose bodies' nodes are nodes of the model."""
    return bool(operator_row(kernel.op_type).bodies) and not kernel.domain


def with_current_costs(kernel: Kernel) -> Kernel:
    """A kernel read from a file, with recomputed costs."""
    operation = kernel.op_type, kernel.attributes, kernel.inputs, kernel.outputs
    return kernel.model_copy(update={"flops": flops(*operation), "bytes_read": bytes_read(*operation),
                                     "bytes_written": bytes_written(*operation)})


def waits_between_launches(kernel: Kernel) -> int:
    """How often a kernel makes the GPU wait after its first launch.

    Four times for a Split into unequal parts, and for a Concat with more inputs than one launch can carry: ONNX Runtime copies
    four tables to the GPU (traced on an H200). Once for each further step of a recurrent layer, which needs the state of the
    step before (not measured).
    """
    match operator_row(kernel.op_type).launches:
        case "one a step":
            return max(steps(kernel.op_type, kernel.attributes, kernel.inputs) - 1, 0)
        case "unequal parts":
            return 4 if len({tensor.shape for tensor in kernel.outputs if tensor.present}) > 1 else 0
        case "many inputs":
            return 4 if len(kernel.inputs) > LAUNCHED_INPUTS else 0
    return 0


def einsum_product(attributes: Mapping[str, Any], inputs: Sequence[Tensor]) -> tuple[int, int, int, int] | None:
    """The matrix products of an Einsum of two tensors as (matrices, m, n, k): `matrices` products of m×k by k×n. None for
    another number of tensors, an ellipsis, or no explicit output."""
    terms, arrow, result = str(attributes.get("equation", "")).replace(" ", "").partition("->")
    operands = terms.split(",")
    if not arrow or "." in terms or len(operands) != 2 or len(inputs) != 2 or any(
            len(indices) != len(tensor.shape) for indices, tensor in zip(operands, inputs, strict=True)):
        return None
    size = {index: length for indices, tensor in zip(operands, inputs, strict=True)
            for index, length in zip(indices, tensor.shape, strict=True)}
    first, second = operands

    def elements(indices: Iterable[str]) -> int:
        return math.prod(size[index] for index in indices)

    return (elements(i for i in size if i in first and i in second and i in result),
            elements(i for i in size if i in first and i not in second), elements(i for i in size if i not in first),
            elements(i for i in size if i in first and i in second and i not in result))


def experts_used(attributes: Mapping[str, Any]) -> int:
    """How many experts compute each token."""
    return int(attributes.get("k", 1))


def _expert_elements(attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> int:
    """Weights in the matrices of one expert; a byte may hold several."""
    matrices = [tensor for tensor in inputs[2:] if len(tensor.shape) == 3]
    packed = [tensor for tensor in matrices if tensor.dtype == "uint8"]  # beside these, 3-D tensors are scales of blocks
    per_byte = 8 // int(attributes.get("expert_weight_bits", 4)) if packed else 1
    return per_byte * sum(math.prod(tensor.shape[1:]) for tensor in packed or matrices)


def _size(tensor: Tensor, axis: int) -> int:
    """One dimension of a tensor; 1 if missing."""
    return tensor.shape[axis] if -len(tensor.shape) <= axis < len(tensor.shape) else 1


class MatrixProduct(NamedTuple):
    """The matrix product behind a convolution, MatMul or Gemm: `matrices` products of m×k by k×n. `transposed` is 1 if the left
    matrices are stored by columns, plus 2 if the right ones are."""

    matrices: int
    m: int
    n: int
    k: int
    transposed: int


def matrix_product(kernel: Kernel) -> MatrixProduct:
    """The product of a MatMul or Gemm whose result has at least two dimensions."""
    inputs, out = [tensor for tensor in kernel.inputs if tensor.dtype], kernel.outputs[0].shape
    by_columns, transposed_b = (bool(kernel.attributes.get(name)) for name in ("transA", "transB"))
    shape: Sequence[int] = inputs[0].shape if inputs else ()
    k = shape[-2 if by_columns else -1] if len(shape) >= 2 else math.prod(shape)
    matrices, m = math.prod(out[:-2]), out[-2]
    if matrices > 1 and len(inputs) > 1 and len(inputs[1].shape) == 2:  # one matrix for the whole batch: one product
        matrices, m = 1, m * matrices
    return MatrixProduct(matrices, m, out[-1], k, int(by_columns) + 2 * int(transposed_b))


def alignment(size: int) -> int:
    """The largest power of two that divides a size, at most MOST_ALIGNMENT; 0 for 0."""
    return min(size & -size, MOST_ALIGNMENT)
