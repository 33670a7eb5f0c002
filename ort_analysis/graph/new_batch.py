"""A model exported at a fixed batch, taken at another one, without its file being written.

The batch is the first dimension of the inputs. Constant shapes that hold it (the targets of Reshape and Expand) are changed
too. That the graph allows the new batch is proved by the shapes that ONNX Runtime infers: wherever the batch comes in, one
dimension of what a node makes is as many times as large as the batch, and everything else is as before.
"""

from __future__ import annotations

from collections.abc import Mapping

from hase.ort_analysis.graph.nodes import bodies_of
from hase.ort_analysis.graph.open_shapes import Shape
from hase.ort_analysis.graph.tensor_shapes import ask, shape_query, without_weights
from hase.utils.errors import UserError
from hase.utils.lazy import onnx

REBATCH = "rebatch"  # the name, among the sizes of a model, of its new batch
RESHAPING = ("Reshape", "Expand")  # their second input is a shape
RECURRENT = ("LSTM", "GRU", "RNN")
STATES = slice(4, 7)  # their lengths and initial states, of which each item has its own; ONNX Runtime checks them in a run only


def fixed_batch(proto: onnx.ModelProto) -> int | None:
    """The fixed batch of a model: the first dimension of its first input; None where there is none, or it is open."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    first = next((value for value in proto.graph.input if value.name not in weights), None)
    sizes = first.type.tensor_type.shape.dim if first is not None else ()
    return int(sizes[0].dim_value) or None if sizes else None


def at_batch(proto: onnx.ModelProto, batch: int, shown: str) -> onnx.ModelProto:
    """A model at another batch than the fixed one that it was exported at.

    Args:
        proto: the model; its large tensors refer to files.
        batch: the new one.
        shown: its name in errors.

    Raises:
        UserError: its batch is not fixed, or its graph allows no other; the message names a node.
    """
    old = fixed_batch(proto)
    if old is None:
        raise UserError(f"{shown}: the first dimension of its first input is no fixed batch, so {REBATCH} can't change it; "
                        "where it is open, give its size with --dim")
    if batch < 1:
        raise UserError(f"{shown}: {REBATCH}={batch}: a batch of 1 or more is expected")
    if batch == old:
        return proto
    obstacle = next((f"{_named(node)} holds a graph of its own" for node in proto.graph.node if bodies_of(node)), "")
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    if not obstacle:
        before = _shapes(proto, shown)
        _change(made.graph, before, old, batch)
        try:
            obstacle = _obstacle(made.graph, before, _shapes(made, shown), old, batch)
        except UserError as error:
            obstacle = str(error).removeprefix(f"{shown}: ")
    if obstacle:
        raise UserError(f"{shown}: it was exported at batch {old}, and its graph does not allow {batch}: {obstacle}; export it "
                        "with an open batch, or at this one")
    return made


def _shapes(proto: onnx.ModelProto, shown: str) -> dict[str, Shape]:
    """The shapes of all tensors, as ONNX Runtime infers them."""
    return ask(shape_query(without_weights(proto), {}), "cpu", shown, fold=True).shapes


def _change(graph: onnx.GraphProto, before: Mapping[str, Shape], old: int, batch: int) -> None:
    """Changes the batch of a graph's inputs, and the constant shapes of nodes that follow from them, each to a constant of its
    own. Of a shape without a -1, the first size grows as the batch does; of one with a -1, only if it is the batch itself."""
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
    for number, node in enumerate(graph.node):
        if node.op_type in ("Shape", "Size") or not changed.intersection(node.input):
            continue
        changed.update(filter(None, node.output))
        target = constants.get(node.input[1]) if node.op_type in RESHAPING and len(node.input) > 1 else None
        shape = before.get(node.output[0])
        if target is None or not target.dims or not shape:
            continue
        first, *rest = onnx.numpy_helper.to_array(target).tolist()
        if first == shape[0] and first % old == 0 and (first == old or -1 not in rest):
            name = f"{node.input[1]}/{REBATCH}/{number}"
            graph.initializer.append(onnx.numpy_helper.from_array(
                onnx.numpy_helper.to_array(target) * ([batch] + [old] * len(rest)) // old, name))
            node.input[1] = name


def _obstacle(graph: onnx.GraphProto, before: Mapping[str, Shape], after: Mapping[str, Shape], old: int, batch: int) -> str:
    """What shows that a changed graph does not compute the same for each item of the new batch; "" where nothing does."""

    def grows(tensor: str) -> bool:
        """Whether one dimension of a tensor grew as the batch did."""
        was, now = before.get(tensor) or (), after.get(tensor) or ()
        grown = [(size, larger) for size, larger in zip(was, now, strict=False) if size != larger]
        return len(was) == len(now) and len(grown) == 1 and all(
            isinstance(size, int) and isinstance(larger, int) and size * batch == larger * old for size, larger in grown)

    for node in graph.node:
        for tensor in filter(None, node.output):
            if before.get(tensor) != after.get(tensor) and not grows(tensor):
                return (f"what {_named(node)} makes would be {_listed(after.get(tensor))} instead of "
                        f"{_listed(before.get(tensor))}")
        if node.op_type in ("Shape", "Size") or not any(map(grows, node.input)):
            continue
        if node.op_type in RECURRENT and (fixed := [name for name in node.input[STATES] if name and not grows(name)]):
            return f"{fixed[0]}, which {_named(node)} reads, holds the batch"
        if not any(map(grows, node.output)):
            return f"what {_named(node)} makes does not grow with the batch"
    return ""


def _named(node: onnx.NodeProto) -> str:
    return f"{node.name or next(filter(None, node.output), 'a node')} ({node.op_type})"


def _listed(shape: Shape) -> str:
    return "of an unknown shape" if shape is None else f"[{', '.join(map(str, shape))}]"
