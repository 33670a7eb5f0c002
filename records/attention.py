"""What attention attends to: its heads, its tokens, and its cache of keys and values; and the sizes and costs of a
GroupQueryAttention. The sizes of other operators are read in plain_attention.py.

A GroupQueryAttention learns from the values of two inputs how many tokens there are: `seqlens_k` (for each row of the batch,
the place of its last token) and `total_sequence_length`. A cache may be longer than that: who generates text makes one buffer
for the longest text, gives it as the past, and takes it back as the present. Then the operator writes only the new tokens.
Otherwise it writes the whole cache anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from hase.records.kernel_record import Kernel, KernelInput, Tensor, input_at

OPERATOR = "GroupQueryAttention"
KEY = 1  # inputs: the key; "" where the query holds keys and values, too
PAST = {3: 1, 4: 2}  # the caches of keys and of values, and the outputs that hold them with the new tokens
LAST_PLACES, TOTAL = 5, 6  # the place of the last token of each row; the number of tokens of the longest row
COSINES = 7  # of the rotary embedding
NORM = 14  # weights of a norm of each query's head; those of keys follow
Mask = Literal["", "keys", "added"]  # none; of the keys that count; numbers that are added to the products
MASKS: tuple[Mask, ...] = get_args(Mask)
ADDED = 10  # input: numbers that are added to the products of queries and keys


class Attended(NamedTuple):
    """The sizes of attention.

    Attributes:
        batch, queries: rows, and new tokens of each.
        heads, kv_heads, head_size: heads of the queries; of keys and values; numbers in each.
        total: tokens of a row, old and new.
        cache: tokens for which the past has room; 0 without a past.
        window: tokens that a query attends to at most; 0: all before it.
        rotary: numbers of a head that are rotated; 0: none.
        packed: whether keys and values lie beside the query in one tensor.
        normed: whether the heads of queries and keys get a norm first.
        causal: whether a token attends only to itself and those before it.
        mask: besides that.
        unpadded: tokens of all rows where these lie one after another without padding; 0: `batch` × `queries`.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_size: int
    total: int
    cache: int
    window: int
    rotary: int
    packed: bool
    normed: bool = False
    causal: bool = True
    mask: Mask = ""
    unpadded: int = 0

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
        """Whether past and present are one buffer, with room for all tokens."""
        return self.cache >= self.total > 0

    @property
    def present(self) -> int:
        """Tokens for which the present has room."""
        return max(self.cache, self.total)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, in one head of one row: all, or its own token and those before it."""
        if not self.causal:
            return self.queries * self.total
        window = self.window or self.total
        full = max(min(self.queries, self.total - max(window, self.past)), 0)  # queries that see a whole window
        first, last = self.past + 1, self.total - full  # keys that the first and the last of the others see
        return full * window + (first + last) * (last - first + 1) // 2

    @property
    def read_from_past(self) -> int:
        """Old tokens that some query attends to."""
        return min(self.past, self.window - 1) if self.window else self.past

    @property
    def token_elements(self) -> int:
        """Numbers of the keys, or of the values, of a token in all rows."""
        return self.batch * self.kv_heads * self.head_size


def attended(attributes: Mapping[str, Any], inputs: Sequence[KernelInput]) -> Attended:
    """The sizes of a GroupQueryAttention. Where nothing says how many tokens there are, the new ones follow a full cache.

    Args:
        attributes, inputs: of the kernel.
    """
    tensor = partial(input_at, inputs)
    batch, queries, width = (1, 1, 1, *tensor(0).shape)[-3:]
    heads, kv_heads = int(attributes.get("num_heads", 1)), int(attributes.get("kv_num_heads", 1))
    packed = not tensor(KEY).present
    past = tensor(min(PAST)).shape
    cache = past[2] if len(past) == 4 else 0
    total = tensor(TOTAL).values
    return Attended(batch=batch, queries=queries, heads=heads, kv_heads=kv_heads,
                    head_size=width // max(heads + 2 * kv_heads if packed else heads, 1),
                    total=int(total[0]) if total else cache + queries, cache=cache,
                    window=max(int(attributes.get("local_window_size", -1)), 0),
                    rotary=2 * tensor(COSINES).shape[-1] if attributes.get("do_rotary") and tensor(COSINES).shape else 0,
                    packed=packed, normed=tensor(NORM).present, mask="added" if tensor(ADDED).present else "")


def attended_by(kernel: Kernel) -> Attended | None:
    """The sizes of a kernel that is a GroupQueryAttention; None for any other."""
    return attended(kernel.attributes, kernel.inputs) if kernel.op_type == OPERATOR else None


def with_lengths(inputs: Sequence[KernelInput], total: int) -> list[KernelInput]:
    """The inputs of a GroupQueryAttention with the values of its lengths, all rows being as long as the longest."""
    values = {LAST_PLACES: total - 1, TOTAL: total}
    return [tensor.model_copy(update={"constant": False, "values": (values[place],) * tensor.elements})
            if place in values and tensor.present else tensor for place, tensor in enumerate(inputs)]


def with_present(outputs: Sequence[Tensor], present: int) -> list[Tensor]:
    """The outputs of a GroupQueryAttention, whose present has room for `present` tokens."""
    return [tensor.model_copy(update={"shape": (*tensor.shape[:2], present, *tensor.shape[3:])})
            if place in PAST.values() and len(tensor.shape) == 4 else tensor for place, tensor in enumerate(outputs)]


def flops(sizes: Attended) -> int:
    """Two products over the pairs of tokens that attend to each other, three operations for each number that is rotated, and
    four for each one that is normed."""
    products = 4 * sizes.tokens * sizes.heads * sizes.head_size * sizes.pairs // max(sizes.queries, 1)
    new_heads = sizes.tokens * (sizes.heads + sizes.kv_heads)
    return products + new_heads * (3 * sizes.rotary + 4 * sizes.head_size * sizes.normed)


def bytes_read(sizes: Attended, inputs: Sequence[KernelInput]) -> int:
    """All inputs; of the caches and the tables of the rotary embedding, only what is used: the old tokens that are attended to,
    or all of them where they are copied into a present of their own; a row of the tables for each new token."""
    total = 0
    for place, tensor in enumerate(inputs):
        if place in PAST and sizes.cache:
            old = sizes.read_from_past if sizes.shares_buffer else sizes.past
            total += tensor.bytes * min(old, sizes.cache) // sizes.cache
        elif place in (COSINES, COSINES + 1) and tensor.shape:
            total += tensor.bytes * min(sizes.queries, tensor.shape[0]) // max(tensor.shape[0], 1)
        else:
            total += tensor.bytes
    return total


def bytes_written(sizes: Attended, outputs: Sequence[Tensor]) -> int:
    """All outputs; of a present that is the past's buffer, only the new tokens."""
    return sum(tensor.bytes * sizes.queries // max(sizes.present, 1) if place in PAST.values() and sizes.shares_buffer
               else tensor.bytes for place, tensor in enumerate(outputs))
