"""Sizes that fit a model: dynamic dimensions determined by its weights and attributes, and other batches.

An exporter may leave a dimension open that has only one valid size, such as the head size in a decoder's cache. ONNX Runtime
refuses wrong sizes where a standard operator needs the right one, but not in the caches of its attention operators.

A model exported at a fixed batch can be analysed at another one without writing a file. The batch is the first dimension of the
inputs; constant shapes that contain it (of Reshape and Expand) are changed too. The shapes that ONNX Runtime infers prove that
the graph allows the new batch: wherever the batch matters, one dimension of a node's output grows in proportion, and everything
else stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hase.ort_analysis.graph.nodes import Shape, bodies_of
from hase.ort_analysis.graph.shapes import infer_shapes, shape_of, shape_query, types_by_schema, without_weights
from hase.records.kernel_record import KernelInput
from hase.utils.errors import UserError
from hase.utils.lazy import onnx

if TYPE_CHECKING:
    import onnx

Size = int | str  # an unknown one is its name, or ""
TRIED_SIZES = (1, 32, 224, 512)  # for an unknown dimension: tokens, samples, an image side
CACHES = {  # by attention operator: its cache inputs (keys, values), and the attribute with their number of heads
    ("com.microsoft", "GroupQueryAttention"): ((3, 4), "kv_num_heads"),
    ("com.microsoft", "MultiHeadAttention"): ((6, 7), "num_heads"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): ((5, 6), "num_heads"),
    ("", "Attention"): ((4, 5), "kv_num_heads"),
}
QUERY_HEADS = ("q_num_heads", "num_heads")  # attributes
BROADCASTING = ("Add", "Sub", "Mul", "Div")  # a size of 1 fits too, but is rarely meant
BATCH = "batch"  # among the sizes of a model: its batch, whatever name the model has for it
REBATCH = "rebatch"  # among the sizes of a model: another batch than its fixed one
RESHAPING = ("Reshape", "Expand")  # their second input is a shape
RECURRENT = ("LSTM", "GRU", "RNN")
STATES = slice(4, 7)  # lengths and initial states, one per item; ONNX Runtime checks them only in a run


class CacheSize(NamedTuple):
    """A size of an attention cache that follows from query and attributes: the input, the axis, and the size."""

    tensor: str
    axis: int
    size: int


class _Sizes:
    """The sizes of a node's inputs, then of its outputs, and its integer attributes."""

    def __init__(self, node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> None:
        self.attributes = {attribute.name: attribute.i for attribute in node.attribute}
        self._names = [*node.input, *node.output]
        self._shapes = [shapes.get(name) or () for name in self._names]

    def rank(self, index: int) -> int:
        """The rank of a tensor; 0 if unknown or missing."""
        return len(self._shapes[index]) if index < len(self._shapes) else 0

    def at(self, index: int, axis: int) -> Size:
        """A tensor's size along an axis; its name if unknown, "" if there is none."""
        rank = self.rank(index)
        if not -rank <= axis < rank:
            return ""
        return self._shapes[index][axis] if self._shapes[index][axis] != "" else f"{self._names[index]}, axis {axis % rank}"


def cache_sizes(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> list[CacheSize]:
    """The sizes that an attention requires of its caches (batch, heads, length, head size)."""
    entry = CACHES.get((node.domain.removeprefix("ai.onnx"), node.op_type))
    if entry is None:
        return []
    sizes, (indices, heads_attribute) = _Sizes(node, shapes), entry
    query_heads = next((sizes.attributes[name] for name in QUERY_HEADS if name in sizes.attributes), 0)
    heads, query = sizes.attributes.get(heads_attribute, 0), sizes.at(0, -1)
    has_packed_cache = sizes.attributes.get("kv_cache_bit_width", 0)
    if sizes.rank(0) != 3 or not isinstance(query, int) or not query_heads or not heads or has_packed_cache:
        return []
    packed = len(node.input) < 2 or not node.input[1]  # keys and values are in the same tensor as the query
    key_head = query // (query_heads + 2 * heads if packed else query_heads)
    value = sizes.at(2, -1)
    value_head = value // heads if sizes.rank(2) == 3 and isinstance(value, int) else key_head
    return [CacheSize(node.input[index], axis, size) for index, head in zip(indices, (key_head, value_head), strict=True)
            if sizes.rank(index) == 4 for axis, size in ((1, heads), (3, head))]


def refuse_other_caches(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, KernelInput],
                        open_names: Mapping[tuple[str, int], str], name: str) -> None:
    """Refuses sizes of dynamic dimensions (`open_names`, by input and axis) that contradict an attention."""
    if not open_names:
        return
    shapes: dict[str, Shape] = {tensor: entry.shape for tensor, entry in tensors.items()}
    for node in nodes:
        for cache in cache_sizes(node, shapes):
            given, dim = tensors[cache.tensor].shape[cache.axis], open_names.get((cache.tensor, cache.axis))
            if dim and given != cache.size:
                what = "heads" if cache.axis == 1 else "numbers in each head"
                raise UserError(f"{name}: {dim}={given} contradicts the model: {node.name} ({node.op_type}) has {cache.size} "
                                f"{what}; give --dim {dim}={cache.size}")


def fitting_sizes(proto: onnx.ModelProto, missing: Sequence[str], given: Mapping[str, int], name: str) -> dict[str, int]:
    """Sizes for the dynamic dimensions `missing` with which ONNX Runtime can open a model; empty if none are known."""
    without_values = without_weights(proto)
    set_by_model = _set_without_weights(without_values, name)
    if set_by_model is None:
        return {}
    batch = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim[:1]}
    fitting: dict[str, int] = {}
    fewest: int | None = None
    for size in TRIED_SIZES:
        sizes = {dim: set_by_model.get(dim, 1 if dim in batch else size) for dim in missing}
        unknown = _unknown(without_values, {**given, **sizes}, name)
        if unknown is not None and (fewest is None or unknown < fewest):
            fitting, fewest = sizes, unknown
        if not fewest and fitting:
            break
    return fitting


def sizes_set_by_model(proto: onnx.ModelProto, name: str) -> dict[str, int]:
    """The dynamic dimensions with only one valid size, and that size; none if ONNX Runtime can't open the model."""
    return _set_without_weights(without_weights(proto), name) or {}


def _set_without_weights(light: onnx.ModelProto, name: str) -> dict[str, int] | None:
    """Like `sizes_set_by_model`, for a model without weights; None if ONNX Runtime can't open it. If only kernels are missing,
    such as the CPU provider's for bfloat16, shapes come from the operators' schemas."""
    query = shape_query(light, {})
    try:
        shapes = infer_shapes(query, "cpu", name, fold=False).shapes
    except UserError:
        types = types_by_schema(query)
        if not types:
            return None
        shapes = {value.name: shape_of(value.type) for value in query.graph.input} | {
            tensor: shape_of(kind) for tensor, kind in types.items()}
    return _named_sizes(light, shapes)


def _unknown(proto: onnx.ModelProto, dims: Mapping[str, int], name: str) -> int | None:
    """The number of tensors without a known shape at these sizes; None if ONNX Runtime refuses the sizes."""
    try:
        return len(infer_shapes(shape_query(proto, dims), "cpu", name, fold=False).unknown({}))
    except UserError:
        return None


def _named_sizes(proto: onnx.ModelProto, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The sizes that a model itself determines, by name; `shapes` has the names of open sizes."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer} | dict(shapes)
    pairs = [pair for node in proto.graph.node for pair in _equal_sizes(node, shapes) if all(size != "" for size in pair)]
    sizes: dict[str, int] = {}
    while True:  # a size may be equal to an open one that is set elsewhere
        newly_set = {name: size for name, size in _newly_set(pairs, sizes) if name not in sizes}
        if not newly_set:
            return sizes
        sizes |= newly_set


def _newly_set(pairs: Sequence[tuple[Size, Size]], sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Names with the sizes that follow from pairs of equal sizes, if `sizes` are known."""
    for pair in pairs:
        for name, equal in (pair, pair[::-1]):
            size = sizes.get(equal) if isinstance(equal, str) else equal
            if isinstance(name, str) and size is not None:
                yield name, size


def _equal_sizes(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> Iterator[tuple[Size, Size]]:
    """Pairs of sizes that must be equal for a node."""
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
        for axis, index in itertools.product(others, range(len(node.input))):
            yield at(index, axis), at(len(node.input), axis)
    elif node.op_type in BROADCASTING:
        for axis in range(-min(sizes.rank(0), sizes.rank(1)), 0):
            pair = at(0, axis), at(1, axis)
            if 1 not in pair:
                yield pair
    for cache in cache_sizes(node, shapes):
        yield at(list(node.input).index(cache.tensor), cache.axis), cache.size


def fixed_batch(proto: onnx.ModelProto) -> int | None:
    """The fixed first dimension of a model's first input; None if there is none, or if it is dynamic."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    first = next((value for value in proto.graph.input if value.name not in weights), None)
    sizes = first.type.tensor_type.shape.dim if first is not None else ()
    return int(sizes[0].dim_value) or None if sizes else None


def at_batch(proto: onnx.ModelProto, batch: int, shown: str) -> onnx.ModelProto:
    """A copy of a model at another batch than its fixed one; `shown` is its name in errors."""
    old = fixed_batch(proto)
    if old is None:
        raise UserError(f"{shown}: the first dimension of its first input is no fixed batch, so {REBATCH} can't change it; "
                        "where it is open, give its size with --dim")
    if batch < 1:
        raise UserError(f"{shown}: {REBATCH}={batch}: a batch of 1 or more is expected")
    if batch == old:
        return proto
    obstacle = next((f"{_node_name(node)} holds a graph of its own" for node in proto.graph.node if bodies_of(node)), "")
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    if not obstacle:
        before = _shapes(proto, shown)
        _change(changed.graph, before, old, batch)
        try:
            obstacle = _obstacle(changed.graph, before, _shapes(changed, shown), old, batch)
        except UserError as error:
            obstacle = str(error).removeprefix(f"{shown}: ")
    if obstacle:
        raise UserError(f"{shown}: it was exported at batch {old}, and its graph does not allow {batch}: {obstacle}; export it "
                        "with an open batch, or at this one")
    return changed


def _shapes(proto: onnx.ModelProto, shown: str) -> dict[str, Shape]:
    """The shapes of all tensors of a model, as ONNX Runtime infers them."""
    return infer_shapes(shape_query(without_weights(proto), {}), "cpu", shown, fold=True).shapes


def _change(graph: onnx.GraphProto, before: Mapping[str, Shape], old: int, batch: int) -> None:
    """Changes the batch of a graph's inputs, and of constant shapes that depend on it; each becomes its own constant. In a
    shape without a -1, the first size grows with the batch; in one with a -1, only if it is the batch itself."""
    constants = {tensor.name: tensor for tensor in graph.initializer} | {
        node.output[0]: attribute.t for node in graph.node if node.op_type == "Constant"
        for attribute in node.attribute if attribute.name == "value"}
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    changed = set[str]()
    for value in graph.input:
        sizes = value.type.tensor_type.shape.dim
        if value.name not in constants and sizes and sizes[0].dim_value == old:
            sizes[0].dim_value = batch
            changed.add(value.name)
    for index, node in enumerate(graph.node):
        if node.op_type in ("Shape", "Size") or not changed.intersection(node.input):
            continue
        changed.update(filter(None, node.output))
        target = constants.get(node.input[1]) if node.op_type in RESHAPING and len(node.input) > 1 else None
        shape = before.get(node.output[0])
        if target is None or not target.dims or not shape:
            continue
        first, *rest = onnx.numpy_helper.to_array(target).tolist()
        if first == shape[0] and first % old == 0 and (first == old or -1 not in rest):
            name = f"{node.input[1]}/{REBATCH}/{index}"
            graph.initializer.append(onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(target) * ([batch] + [old] * len(rest)) // old, name))
            node.input[1] = name


def _obstacle(graph: onnx.GraphProto, before: Mapping[str, Shape], after: Mapping[str, Shape], old: int, batch: int) -> str:
    """Why a changed graph does not compute the same per item of the new batch; "" if it does."""

    def grows(tensor: str) -> bool:
        """Whether one dimension of a tensor grew with the batch."""
        old_shape, new_shape = before.get(tensor) or (), after.get(tensor) or ()
        grown = [(size, new_size) for size, new_size in zip(old_shape, new_shape, strict=False) if size != new_size]
        return len(old_shape) == len(new_shape) and len(grown) == 1 and all(
            isinstance(size, int) and isinstance(new_size, int) and size * batch == new_size * old for size, new_size in grown)

    for node in graph.node:
        for tensor in filter(None, node.output):
            if before.get(tensor) != after.get(tensor) and not grows(tensor):
                return (f"what {_node_name(node)} makes would be {_shape_in_words(after.get(tensor))} instead of "
                        f"{_shape_in_words(before.get(tensor))}")
        if node.op_type in ("Shape", "Size") or not any(map(grows, node.input)):
            continue
        if node.op_type in RECURRENT and (fixed := [name for name in node.input[STATES] if name and not grows(name)]):
            return f"{fixed[0]}, which {_node_name(node)} reads, holds the batch"
        if not any(map(grows, node.output)):
            return f"what {_node_name(node)} makes does not grow with the batch"
    return ""


def _node_name(node: onnx.NodeProto) -> str:
    return f"{node.name or next(filter(None, node.output), 'a node')} ({node.op_type})"


def _shape_in_words(shape: Shape) -> str:
    return "of an unknown shape" if shape is None else f"[{', '.join(map(str, shape))}]"
