"""Sizes of dynamic dimensions that fit a model: those that its weights, its attributes and its other dimensions set.

An exporter may leave a dimension open that has only one right size, such as that of the heads in a decoder's cache. ONNX
Runtime refuses another size where a standard operator needs it, but not in the caches of its attention operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hase.ort_analysis.graph.open_shapes import Shape
from hase.ort_analysis.graph.tensor_shapes import ask, shape_of, shape_query, types_by_schema, without_weights
from hase.records.kernel_record import KernelInput
from hase.utils.errors import UserError
from hase.utils.lazy import onnx

if TYPE_CHECKING:
    import onnx

Size = int | str  # an unknown one is its name, or ""
TRIED_SIZES = (1, 32, 224, 512)  # for a dimension of which nothing is known: tokens, samples, the side of an image
CACHES = {  # by attention operator: the places of its caches of keys and values, and the attribute with their number of heads
    ("com.microsoft", "GroupQueryAttention"): ((3, 4), "kv_num_heads"),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), "num_heads"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): ((5, 6), "num_heads"),
    ("", "Attention"): ((4, 5), "kv_num_heads"),
}
QUERY_HEADS = ("q_num_heads", "num_heads")  # attributes
BROADCASTING = ("Add", "Sub", "Mul", "Div")  # a size of 1 fits too, but is seldom meant


class CacheSize(NamedTuple):
    """A size of an attention's cache, as its query and its attributes set it: the input, the axis, and the size."""

    tensor: str
    axis: int
    size: int


class _Sizes:
    """The sizes of a node's inputs and, after them, of its outputs; and its attributes of whole numbers."""

    def __init__(self, node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> None:
        self.attributes = {attribute.name: attribute.i for attribute in node.attribute}
        self._names = [*node.input, *node.output]
        self._shapes = [shapes.get(name) or () for name in self._names]

    def rank(self, place: int) -> int:
        """The rank of a tensor; 0 where it is unknown or missing."""
        return len(self._shapes[place]) if place < len(self._shapes) else 0

    def at(self, place: int, axis: int) -> Size:
        """The size of a tensor along an axis: its name where it is unknown, "" where there is none."""
        rank = self.rank(place)
        if not -rank <= axis < rank:
            return ""
        return self._shapes[place][axis] if self._shapes[place][axis] != "" else f"{self._names[place]}, axis {axis % rank}"


def cache_sizes(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> list[CacheSize]:
    """The sizes that an attention sets for its caches, of shape (batch, heads, length, size of a head).

    Args:
        node: any; only an attention with caches sets sizes.
        shapes: of the tensors, by name.
    """
    row = CACHES.get((node.domain.removeprefix("ai.onnx"), node.op_type))
    if row is None:
        return []
    sizes, (places, heads_attribute) = _Sizes(node, shapes), row
    query_heads = next((sizes.attributes[name] for name in QUERY_HEADS if name in sizes.attributes), 0)
    heads, query = sizes.attributes.get(heads_attribute, 0), sizes.at(0, -1)
    several_in_a_byte = sizes.attributes.get("kv_cache_bit_width", 0)
    if sizes.rank(0) != 3 or not isinstance(query, int) or not query_heads or not heads or several_in_a_byte:
        return []
    packed = len(node.input) < 2 or not node.input[1]  # keys and values lie beside the query
    of_key = query // (query_heads + 2 * heads if packed else query_heads)
    value = sizes.at(2, -1)
    of_value = value // heads if sizes.rank(2) == 3 and isinstance(value, int) else of_key
    return [CacheSize(node.input[place], axis, size) for place, head in zip(places, (of_key, of_value), strict=True)
            if sizes.rank(place) == 4 for axis, size in ((1, heads), (3, head))]


def refuse_other_caches(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, KernelInput],
                        open_names: Mapping[tuple[str, int], str], name: str) -> None:
    """Refuses sizes of dynamic dimensions that contradict an attention.

    Args:
        nodes: of the graph.
        tensors: with the given sizes, by name.
        open_names: the name of each dynamic dimension, by input and axis.
        name: of the model.

    Raises:
        UserError: a size can't be right; the message says which is.
    """
    if not open_names:
        return
    shapes: dict[str, Shape] = {tensor: about.shape for tensor, about in tensors.items()}
    for node in nodes:
        for cache in cache_sizes(node, shapes):
            given, dim = tensors[cache.tensor].shape[cache.axis], open_names.get((cache.tensor, cache.axis))
            if dim and given != cache.size:
                what = "heads" if cache.axis == 1 else "numbers in each head"
                raise UserError(f"{name}: {dim}={given} contradicts the model: {node.name} ({node.op_type}) has {cache.size} "
                                f"{what}; give --dim {dim}={cache.size}")


def fitting_sizes(proto: onnx.ModelProto, missing: Sequence[str], given: Mapping[str, int], name: str) -> dict[str, int]:
    """Sizes for the dynamic dimensions `missing` with which ONNX Runtime can open a model; empty where none are known.

    Args:
        proto: the model.
        missing: their names.
        given: the sizes of other dimensions.
        name: of the model.
    """
    light = without_weights(proto)
    set_by_model = _set_by_light(light, name)
    if set_by_model is None:
        return {}
    batch = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim[:1]}
    fitting: dict[str, int] = {}
    fewest: int | None = None
    for tried in TRIED_SIZES:
        sizes = {dim: set_by_model.get(dim, 1 if dim in batch else tried) for dim in missing}
        unknown = _unknown(light, {**given, **sizes}, name)
        if unknown is not None and (fewest is None or unknown < fewest):
            fitting, fewest = sizes, unknown
        if not fewest and fitting:
            break
    return fitting


def sizes_set_by_model(proto: onnx.ModelProto, name: str) -> dict[str, int]:
    """The dynamic dimensions that have only one right size, and that size; none where ONNX Runtime can't open the model.

    Args:
        proto: the model.
        name: of the model.
    """
    return _set_by_light(without_weights(proto), name) or {}


def _set_by_light(light: onnx.ModelProto, name: str) -> dict[str, int] | None:
    """The same of a model without weights; None where ONNX Runtime can't open it: the reason is told when all sizes are given.
    Where only kernels are missing, as the CPU provider's for bfloat16, the operators' schemas say what the shapes are."""
    query = shape_query(light, {})
    try:
        shapes = ask(query, "cpu", name, fold=False).shapes
    except UserError:
        types = types_by_schema(query)
        if not types:
            return None
        shapes = {value.name: shape_of(value.type) for value in query.graph.input} | {
            tensor: shape_of(kind) for tensor, kind in types.items()}
    return _sizes_set(light, shapes)


def _unknown(proto: onnx.ModelProto, dims: Mapping[str, int], name: str) -> int | None:
    """How many tensors ONNX Runtime can't give a shape at these sizes; None where it refuses them."""
    try:
        return len(ask(shape_query(proto, dims), "cpu", name, fold=False).unknown({}))
    except UserError:
        return None


def _sizes_set(proto: onnx.ModelProto, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The named sizes that the model itself sets, by name.

    Args:
        proto: the model.
        shapes: of its tensors, with an open size as its name.
    """
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer} | dict(shapes)
    pairs = [pair for node in proto.graph.node for pair in _equal_sizes(node, shapes) if all(size != "" for size in pair)]
    sizes: dict[str, int] = {}
    while True:  # a size may be equal to an open one that is set elsewhere
        newly_set = {name: size for name, size in _set_by(pairs, sizes) if name not in sizes}
        if not newly_set:
            return sizes
        sizes |= newly_set


def _set_by(pairs: Sequence[tuple[Size, Size]], sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The names that pairs of equal sizes set, given the sizes that are known."""
    for pair in pairs:
        for name, equal in (pair, pair[::-1]):
            size = sizes.get(equal) if isinstance(equal, str) else equal
            if isinstance(name, str) and size is not None:
                yield name, size


def _equal_sizes(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> Iterator[tuple[Size, Size]]:
    """Pairs of sizes that a node needs to be equal."""
    sizes = _Sizes(node, shapes)
    at, attributes = sizes.at, sizes.attributes
    if node.op_type == "MatMul":
        yield at(0, -1), at(1, -2 if sizes.rank(1) > 1 else -1)
    elif node.op_type == "Gemm":
        yield at(0, 0 if attributes.get("transA") else 1), at(1, 1 if attributes.get("transB") else 0)
    elif node.op_type == "Conv":
        per_group = at(1, 1)
        yield at(0, 1), per_group * (attributes.get("group") or 1) if isinstance(per_group, int) else ""
    elif node.op_type in ("LSTM", "GRU", "RNN"):
        yield at(0, 2), at(1, 2)
        yield at(5, 2), at(2, 2)
    elif node.op_type in ("BatchNormalization", "InstanceNormalization"):
        yield at(0, 1), at(1, 0)
    elif node.op_type in ("LayerNormalization", "SimplifiedLayerNormalization"):
        yield at(0, -1), at(1, -1)
    elif node.op_type == "Concat" and (rank := sizes.rank(0)):
        others = set(range(rank)) - {attributes.get("axis", 0) % rank}
        for axis, place in itertools.product(others, range(len(node.input))):
            yield at(place, axis), at(len(node.input), axis)
    elif node.op_type in BROADCASTING:
        for axis in range(-min(sizes.rank(0), sizes.rank(1)), 0):
            pair = at(0, axis), at(1, axis)
            if 1 not in pair:
                yield pair
    for cache in cache_sizes(node, shapes):
        yield at(list(node.input).index(cache.tensor), cache.axis), cache.size
