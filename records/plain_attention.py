"""The sizes of attention by operators other than GroupQueryAttention: MultiHeadAttention, ONNX Runtime's fused Attention with
its projection, both without padding (PackedAttention, PackedMultiHeadAttention), and ONNX's own Attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hase.records.attention import Attended, Mask
from hase.records.kernel_record import DTYPE_BYTES, Kernel, KernelInput, input_at
from hase.records.operators import operator_row

PROJECTING = ("Attention", "PackedAttention")  # with a matrix as their second input, they project the first one
TOKEN_OFFSETS = {"PackedAttention": 3, "PackedMultiHeadAttention": 4}  # inputs of shape (rows, tokens of the longest row)
OLD_KEYS = {"MultiHeadAttention": 6, "Attention": 4}  # inputs: old keys, the tokens at the last axis but one
KEY_MASKS = {"MultiHeadAttention": 4, "Attention": 3}  # inputs that say which keys count
BIAS = 3  # input of MultiHeadAttention: a bias of queries, keys and values
ONNX_MASK = 3  # input of ONNX's own Attention: numbers that are added to the products of queries and keys


def projects(op_type: str, inputs: Sequence[KernelInput]) -> bool:
    """Whether the operator makes queries, keys and values itself, by a matrix."""
    return op_type in PROJECTING and len(input_at(inputs, 1).shape) == 2


def plain_attended(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> Attended | None:
    """The sizes of attention; None where the first input has no shape.

    Args:
        op_type: one with the cost rule "attention".
        attributes, inputs: of the kernel.
    """
    tensor = partial(input_at, inputs)
    query, second, packed_rows = tensor(0), tensor(1), tensor(TOKEN_OFFSETS.get(op_type))
    if not query.shape:
        return None
    projected = projects(op_type, inputs)
    heads = int(attributes.get("num_heads") or attributes.get("q_num_heads") or 1)
    old = _size(tensor(OLD_KEYS.get(op_type)), -2)
    unpadded = 0
    if packed_rows.present:
        batch, queries = (1, 1, *packed_rows.shape)[-2:]
        unpadded = query.shape[0]
        per_token = query.elements // max(unpadded, 1) // (3 if len(query.shape) == 4 else 1)
    elif len(query.shape) == 4:  # ONNX's own, with the heads before the tokens
        batch, heads, queries, _ = query.shape
        per_token = heads * query.shape[3]
    else:
        batch, queries = (query.shape if len(query.shape) > 2 else (1, *query.shape))[:2]
        per_token = query.elements // max(batch * queries, 1) // (3 if len(query.shape) == 5 else 1)
    if projected:
        per_token = int((attributes.get("qkv_hidden_sizes") or [second.shape[1] // 3])[0])
    keys = queries if projected or packed_rows.present or not second.present else _size(
        second, -2 if op_type == "Attention" or len(second.shape) == 4 else 1)
    own = op_type == "Attention" and not projected
    added = ONNX_MASK if own else 6 if op_type == "PackedMultiHeadAttention" else 5
    masked = tensor(KEY_MASKS.get(op_type)).present
    mask: Mask = "added" if tensor(added).present else "keys" if masked else ""
    return Attended(batch=batch, queries=queries, heads=heads, kv_heads=int(attributes.get("kv_num_heads") or heads),
                    head_size=per_token // max(heads, 1), total=old + keys, cache=old, window=0, rotary=0,
                    packed=len(query.shape) == 5 or (bool(unpadded) and len(query.shape) == 4),
                    causal=bool(attributes.get("unidirectional") or attributes.get("is_causal")), mask=mask, unpadded=unpadded)


def plain_attended_by(kernel: Kernel) -> Attended | None:
    """The sizes of a kernel that is such attention; None for any other."""
    is_attention = operator_row(kernel.op_type).cost == "attention"
    return plain_attended(kernel.op_type, kernel.attributes, kernel.inputs) if is_attention else None


def intermediate_bytes(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> int:
    """Bytes that attention stores between its steps and reads again: queries, keys and values of its own projection; the same
    with a bias; and, with a mask of keys, the products of queries and keys before and after the softmax.
    ONNX Runtime's providers compute it so; without such a mask, CUDA's keeps the products on the chip."""
    sizes = plain_attended(op_type, attributes, inputs)
    if sizes is None:
        return 0
    elements = sizes.batch * sizes.heads * sizes.queries * sizes.total * 2 * (sizes.mask == "keys")
    if projects(op_type, inputs):
        elements += 2 * 3 * sizes.tokens * sizes.heads * sizes.head_size
    elif op_type == "MultiHeadAttention" and input_at(inputs, BIAS).present:
        elements += sum(tensor.elements for tensor in inputs[:3])
    return elements * int(DTYPE_BYTES.get(inputs[0].dtype, 4))


def projection_flops(inputs: Sequence[KernelInput]) -> int:
    """The product that makes queries, keys and values of the first input."""
    query, matrix = inputs[:2]
    return 2 * (query.elements // max(matrix.shape[0], 1)) * matrix.elements


def _size(tensor: KernelInput, axis: int) -> int:
    """One dimension of a tensor; 0 where it is missing."""
    return tensor.shape[axis] if tensor.present and -len(tensor.shape) <= axis < len(tensor.shape) else 0
