"""Sizes and costs of attention: heads, tokens, and the cache of keys and values.

A GroupQueryAttention reads the number of tokens from the values of two inputs: `seqlens_k` (the index of the last token of each
row of the batch) and `total_sequence_length`. A cache may be longer: a text generator allocates one buffer for the longest text
and passes it as both past and present. Then the operator writes only the new tokens; otherwise it writes the whole cache.

The other operators are MultiHeadAttention, ONNX Runtime's Attention with fused projection, both also without padding
(PackedAttention, PackedMultiHeadAttention), and ONNX's own Attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from hase.records.kernel_record import DTYPE_BYTES, Kernel, KernelInput, Tensor, input_at
from hase.records.operators import operator_row

OPERATOR = "GroupQueryAttention"
KEY = 1  # inputs: the key; "" where the query holds keys and values, too
PAST = {3: 1, 4: 2}  # the caches of keys and of values, and the outputs that hold them with the new tokens
LAST_PLACES, TOTAL = 5, 6  # index of the last token of each row; number of tokens of the longest row
COSINES = 7  # of the rotary embedding
NORM = 14  # weights of a norm of each query's head; those of keys follow
Mask = Literal["", "keys", "added"]  # none; of the keys that count; numbers that are added to the products
MASKS: tuple[Mask, ...] = get_args(Mask)
ADDED = 10  # input: numbers that are added to the products of queries and keys
PROJECTING = ("Attention", "PackedAttention")  # with a matrix as their second input, they project the first one
TOKEN_OFFSETS = {"PackedAttention": 3, "PackedMultiHeadAttention": 4}  # inputs of shape (rows, tokens of the longest row)
OLD_KEYS = {"MultiHeadAttention": 6, "Attention": 4}  # inputs: old keys, the tokens at the last axis but one
KEY_MASKS = {"MultiHeadAttention": 4, "Attention": 3}  # inputs that say which keys count
BIAS = 3  # input of MultiHeadAttention: a bias of queries, keys and values
ONNX_MASK = 3  # input of ONNX's own Attention: numbers that are added to the products of queries and keys


class AttentionSizes(NamedTuple):
    """The sizes of one attention."""

    # batch, queries: rows, and new tokens in each row
    batch: int
    queries: int
    # heads, kv_heads, head_size: heads of queries, heads of keys and values, and numbers per head
    heads: int
    kv_heads: int
    head_size: int
    total: int  # tokens in a row, old and new
    cache: int  # capacity of the past in tokens; 0 without a past
    window: int  # the most tokens that a query attends to; 0 for no limit
    rotary: int  # rotated numbers of a head; 0 for none
    packed: bool  # queries, keys and values are in one tensor
    normed: bool = False  # the heads of queries and keys are normalised first
    causal: bool = True  # a token attends only to itself and earlier ones
    mask: Mask = ""
    unpadded: int = 0  # tokens of all rows if these are stored without padding; 0 for `batch` × `queries`

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.unpadded or self.batch * self.queries

    @property
    def past(self) -> int:
        """Tokens before the new ones."""
        return max(self.total - self.queries, 0)

    @property
    def shares_buffer(self) -> bool:
        """Whether past and present are one buffer with room for all tokens."""
        return self.cache >= self.total > 0

    @property
    def present(self) -> int:
        """The capacity of the present in tokens."""
        return max(self.cache, self.total)

    @property
    def pairs(self) -> int:
        """Pairs of a query and an attended key, in one head of one row."""
        if not self.causal:
            return self.queries * self.total
        window = self.window or self.total
        full = max(min(self.queries, self.total - max(window, self.past)), 0)  # queries that see a whole window
        first, last = self.past + 1, self.total - full  # keys that the first and the last of the others see
        return full * window + (first + last) * (last - first + 1) // 2

    @property
    def read_from_past(self) -> int:
        """Old tokens that at least one query attends to."""
        return min(self.past, self.window - 1) if self.window else self.past


def grouped_query_sizes(attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> AttentionSizes:
    """The sizes of a GroupQueryAttention; if the number of tokens is unknown, the new ones follow a full cache."""
    tensor = partial(input_at, inputs)
    batch, queries, width = (1, 1, 1, *tensor(0).shape)[-3:]
    heads, kv_heads = int(attributes.get("num_heads", 1)), int(attributes.get("kv_num_heads", 1))
    packed = not tensor(KEY).present
    past = tensor(min(PAST)).shape
    cache = past[2] if len(past) == 4 else 0
    total = tensor(TOTAL).values
    return AttentionSizes(
        batch=batch, queries=queries, heads=heads, kv_heads=kv_heads,
        head_size=width // max(heads + 2 * kv_heads if packed else heads, 1),
        total=int(total[0]) if total else cache + queries, cache=cache,
        window=max(int(attributes.get("local_window_size", -1)), 0),
        rotary=2 * tensor(COSINES).shape[-1] if attributes.get("do_rotary") and tensor(COSINES).shape else 0,
        packed=packed, normed=tensor(NORM).present, mask="added" if tensor(ADDED).present else "")


def kernel_grouped_query_sizes(kernel: Kernel) -> AttentionSizes | None:
    """The sizes if the kernel is a GroupQueryAttention, else None."""
    return grouped_query_sizes(kernel.attributes, kernel.inputs) if kernel.op_type == OPERATOR else None


def with_lengths(inputs: Sequence[KernelInput], total: int) -> list[KernelInput]:
    """The inputs of a GroupQueryAttention with values for its lengths, equal for all rows."""
    values = {LAST_PLACES: total - 1, TOTAL: total}
    return [tensor.model_copy(update={"constant": False, "values": (values[index],) * tensor.elements})
            if index in values and tensor.present else tensor for index, tensor in enumerate(inputs)]


def with_present(outputs: Sequence[Tensor], present: int) -> list[Tensor]:
    """The outputs of a GroupQueryAttention with a present of capacity `present` tokens."""
    return [tensor.model_copy(update={"shape": (*tensor.shape[:2], present, *tensor.shape[3:])})
            if index in PAST.values() and len(tensor.shape) == 4 else tensor for index, tensor in enumerate(outputs)]


def flops(sizes: AttentionSizes) -> int:
    """Operations: two products over all attended pairs, three per rotated number, four per normalised number."""
    products = 4 * sizes.tokens * sizes.heads * sizes.head_size * sizes.pairs // max(sizes.queries, 1)
    new_heads = sizes.tokens * (sizes.heads + sizes.kv_heads)
    return products + new_heads * (3 * sizes.rotary + 4 * sizes.head_size * sizes.normed)


def bytes_read(sizes: AttentionSizes, inputs: Sequence[KernelInput]) -> int:
    """Bytes of all inputs; caches and rotary tables count only as far as they are read: the attended old tokens (all of them
    if they are copied into a separate present), and a table row per new token."""
    total = 0
    for index, tensor in enumerate(inputs):
        if index in PAST and sizes.cache:
            old = sizes.read_from_past if sizes.shares_buffer else sizes.past
            total += tensor.bytes * min(old, sizes.cache) // sizes.cache
        elif index in (COSINES, COSINES + 1) and tensor.shape:
            total += tensor.bytes * min(sizes.queries, tensor.shape[0]) // max(tensor.shape[0], 1)
        else:
            total += tensor.bytes
    return total


def bytes_written(sizes: AttentionSizes, outputs: Sequence[Tensor]) -> int:
    """Bytes of all outputs; if the present shares the past's buffer, only its new tokens."""
    return sum(tensor.bytes * sizes.queries // max(sizes.present, 1) if index in PAST.values() and sizes.shares_buffer
               else tensor.bytes for index, tensor in enumerate(outputs))


def projects(op_type: str, inputs: Sequence[KernelInput]) -> bool:
    """Whether the operator computes queries, keys and values itself by a matrix product."""
    return op_type in PROJECTING and len(input_at(inputs, 1).shape) == 2


def attention_sizes(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> AttentionSizes | None:
    """The sizes of an operator with the cost rule "attention"; None if the shape of its first input is unknown."""
    tensor = partial(input_at, inputs)
    query, second, packed_rows = tensor(0), tensor(1), tensor(TOKEN_OFFSETS.get(op_type))
    if not query.shape:
        return None
    projected = projects(op_type, inputs)
    heads = int(attributes.get("num_heads") or attributes.get("q_num_heads") or 1)
    old_keys = _size(tensor(OLD_KEYS.get(op_type)), -2)
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
    from_onnx = op_type == "Attention" and not projected
    added_mask = ONNX_MASK if from_onnx else 6 if op_type == "PackedMultiHeadAttention" else 5
    has_key_mask = tensor(KEY_MASKS.get(op_type)).present
    mask: Mask = "added" if tensor(added_mask).present else "keys" if has_key_mask else ""
    return AttentionSizes(
        batch=batch, queries=queries, heads=heads, kv_heads=int(attributes.get("kv_num_heads") or heads),
        head_size=per_token // max(heads, 1), total=old_keys + keys, cache=old_keys, window=0, rotary=0,
        packed=len(query.shape) == 5 or (bool(unpadded) and len(query.shape) == 4),
        causal=bool(attributes.get("unidirectional") or attributes.get("is_causal")), mask=mask, unpadded=unpadded)


def kernel_attention_sizes(kernel: Kernel) -> AttentionSizes | None:
    """The sizes if the kernel's cost rule is "attention", else None."""
    is_attention = operator_row(kernel.op_type).cost == "attention"
    return attention_sizes(kernel.op_type, kernel.attributes, kernel.inputs) if is_attention else None


def intermediate_bytes(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> int:
    """Bytes that attention stores between its steps and reads again, as ONNX Runtime's providers compute it.

    These are queries, keys and values of its own projection, or with a bias; and, with a mask of keys, the query-key products
    before and after the softmax. Without such a mask, CUDA keeps the products on the chip.
    """
    sizes = attention_sizes(op_type, attributes, inputs)
    if sizes is None:
        return 0
    elements = sizes.batch * sizes.heads * sizes.queries * sizes.total * 2 * (sizes.mask == "keys")
    if projects(op_type, inputs):
        elements += 2 * 3 * sizes.tokens * sizes.heads * sizes.head_size
    elif op_type == "MultiHeadAttention" and input_at(inputs, BIAS).present:
        elements += sum(tensor.elements for tensor in inputs[:3])
    return elements * int(DTYPE_BYTES.get(inputs[0].dtype, 4))


def projection_flops(inputs: Sequence[KernelInput]) -> int:
    """Operations of the product that computes queries, keys and values."""
    query, matrix = inputs[:2]
    return 2 * (query.elements // max(matrix.shape[0], 1)) * matrix.elements


def _size(tensor: KernelInput, axis: int) -> int:
    """One dimension of a tensor; 0 if missing."""
    return tensor.shape[axis] if tensor.present and -len(tensor.shape) <= axis < len(tensor.shape) else 0
