"""The costs of a kernel: floating-point operations, bytes read and written, and steps that must run one after another.

They follow from the operator's row in the table (operators.py), its attributes and shapes alone. Training and prediction
compute them anew, whatever a file says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from records.kernel_record import Kernel, KernelInput, Tensor
from records.operators import operator_row

# A step down a decision tree counts as this many operations, because it waits for memory. Measured on two cores of an AMD
# EPYC: 2.8 ns per step (64 rows, 200 trees of a scikit-learn forest).
STEP_FLOPS = 100
LAUNCHED_INPUTS = 32  # a Concat with more inputs copies tables from the host; up to here the launch carries them


def flops(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Floating-point operations of one run. A multiply-add counts as two, data movement as none.

    In every step, a recurrent layer multiplies the input and the previous state by the weights of all gates (W and R in ONNX):
    2 · directions · steps · batch · gates · hidden · (input + hidden).
    """
    row = operator_row(op_type)
    out = outputs[0].elements if outputs else 0
    first = inputs[0] if inputs else Tensor(dtype="")
    second = inputs[1] if len(inputs) > 1 else Tensor(dtype="")
    match row.cost:
        case "view" | "move":
            return 0
        case "convolution":
            return out * (2 * math.prod(second.shape[1:]) + sum(tensor.present for tensor in inputs[2:4]))
        case "transposed convolution":
            return 2 * first.elements * math.prod(second.shape[1:])
        case "gemm":
            inner = _size(first, 0 if attributes.get("transA") else -1)
            return out * (2 * inner + (1 if len(inputs) > 2 and inputs[2].present else 0))
        case "product":
            return 2 * out * _size(first, -2 if attributes.get("transA") else -1)
        case "einsum" if product := einsum_product(attributes, inputs):
            return 2 * math.prod(product)
        case "attention":
            return _attention_flops(op_type, first, second)
        case "recurrent":  # without the activations of the cells, about 1 % of the products
            return 2 * math.prod(first.shape[:2]) * sum(tensor.elements for tensor in inputs[1:3])
        case "window":
            return out * math.prod(attributes.get("kernel_shape", [1]))
        case "reduction":
            return first.elements
        case "trees":
            return round(_size(first, 0) * tree_steps(attributes) * STEP_FLOPS)
    return max(out, first.elements) * row.element_flops


def bytes_read(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput], outputs: Sequence[Tensor]) -> int:
    """Bytes of all inputs, each counted once; 0 where a tensor is only renamed.

    Of a table, at most the gathered elements count. A recurrent layer reads the weights of its state (R) again in every step.
    """
    row = operator_row(op_type)
    if row.cost == "view":
        return 0
    total = sum(tensor.bytes for tensor in inputs)
    out = outputs[0].elements if outputs else 0
    for place in row.table_inputs:
        if place < len(inputs) and inputs[place].elements > out:
            table = inputs[place]
            total -= table.bytes - table.model_copy(update={"shape": (out,)}).bytes
    if row.cost == "recurrent" and len(inputs) > 2:
        total += (max(steps(op_type, attributes, inputs), 1) - 1) * inputs[2].bytes
    return total


def bytes_written(op_type: str, outputs: Sequence[Tensor]) -> int:
    """Bytes of all outputs; 0 where a tensor is only renamed."""
    return 0 if operator_row(op_type).cost == "view" else sum(tensor.bytes for tensor in outputs)


def steps(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[Tensor]) -> int:
    """The number of steps that must run one after another: the sequence length of a recurrent layer; 1 for other kernels."""
    if operator_row(op_type).cost != "recurrent" or not inputs:
        return 1
    return _size(inputs[0], 1 if attributes.get("layout") else 0)


def tree_steps(attributes: Mapping[str, Any]) -> float:
    """The number of steps that one row takes down all trees of an ensemble, if the trees are balanced."""
    if "tree_roots" in attributes:  # TreeEnsemble of ai.onnx.ml 5
        trees, nodes = len(attributes["tree_roots"]), 2 * len(attributes.get("nodes_splits", ())) + 1
    else:
        trees, nodes = len(set(attributes.get("nodes_treeids", (0,)))), len(attributes.get("nodes_modes", (0,)))
    return trees * max(1.0, math.log2(max(nodes / max(trees, 1), 2)))


def is_control_flow(kernel: Kernel) -> bool:
    """Whether it is a Loop, an If or a Scan. The nodes of their bodies are nodes of the model."""
    return bool(operator_row(kernel.op_type).bodies) and not kernel.domain


def recosted(kernel: Kernel) -> Kernel:
    """A kernel read from a file, with its costs computed anew."""
    return kernel.model_copy(update={
        "flops": flops(kernel.op_type, kernel.attributes, kernel.inputs, kernel.outputs),
        "bytes_read": bytes_read(kernel.op_type, kernel.attributes, kernel.inputs, kernel.outputs),
        "bytes_written": bytes_written(kernel.op_type, kernel.outputs)})


def copied_tables(kernel: Kernel) -> int:
    """How many times a kernel makes the GPU wait after its first launch.

    Four times for a Split into unequal parts, and for a Concat with more inputs than one launch can carry: ONNX Runtime then
    copies four tables to the GPU (traced on an H200). Once for each step of a recurrent layer after the first: a step needs
    the state of the step before it, so it needs at least one launch of its own (not measured).
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
    """The matrix products of an Einsum of two tensors as (matrices, m, n, k): `matrices` products of m×k by k×n.

    None for another number of tensors, and for an equation without an explicit output or with an ellipsis.
    """
    terms, arrow, result = str(attributes.get("equation", "")).replace(" ", "").partition("->")
    operands = terms.split(",")
    if not arrow or "." in terms or len(operands) != 2 or len(inputs) != 2 or any(
            len(indices) != len(tensor.shape) for indices, tensor in zip(operands, inputs, strict=True)):
        return None
    size = {index: length for indices, tensor in zip(operands, inputs, strict=True)
            for index, length in zip(indices, tensor.shape, strict=True)}
    first, second = operands

    def elements(of: Iterable[str]) -> int:
        return math.prod(size[index] for index in of)

    return (elements(i for i in size if i in first and i in second and i in result),
            elements(i for i in size if i in first and i not in second), elements(i for i in size if i not in first),
            elements(i for i in size if i in first and i in second and i not in result))


def _size(tensor: Tensor, axis: int) -> int:
    """One dimension of a tensor; 1 if the tensor has fewer dimensions."""
    return tensor.shape[axis] if -len(tensor.shape) <= axis < len(tensor.shape) else 1


def _attention_flops(op_type: str, query: Tensor, second: Tensor) -> int:
    """Two products over the sequence. ORT's fused Attention, whose second input is a matrix, also projects its input to query,
    key and value. ONNX's own Attention takes query and key as inputs, and its heads may be a separate dimension."""
    *_, sequence, hidden = (1, 1, *query.shape)
    projects = op_type == "Attention" and len(second.shape) == 2
    key_length = sequence if projects or not second.present else _size(second, -2 if op_type == "Attention" else 1)
    total = 4 * query.elements * key_length if query.shape else 0
    return total + (2 * (query.elements // max(hidden, 1)) * second.elements if projects else 0)
