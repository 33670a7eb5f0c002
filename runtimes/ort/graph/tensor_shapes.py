"""Type and shape of every tensor of an optimised graph, as ONNX Runtime itself infers them.

The graph that ORT saves has no shapes, and ONNX's own inference does not know ORT's operators. So a shape query asks ORT. If
shapes depend on integers that the graph computes from other shapes, ORT's constant folding computes these. If they depend on
data, they are the given ones, or the largest possible ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from records.kernel_record import KernelInput
from runtimes.ort.graph.bodies import captured, hold
from runtimes.ort.graph.constants import constant_inputs
from runtimes.ort.graph.given_sizes import GivenSizes
from runtimes.ort.graph.inferred import Held, InferredTensors, Values
from runtimes.ort.graph.open_shapes import SIZED_BY_VALUES, keeps_its_shape, largest_shapes, selects_boxes, shapes_when_run
from runtimes.ort.graph.parsed_nodes import ONNX_DOMAINS, bodies_of
from runtimes.ort.graph.shape_query import ShapeAnswer, ask, declare_shapes, shape_query
from utils.errors import UserError
from utils.lazy import onnx

Shapes = dict[str, tuple[int, ...]]  # by tensor
HeldBy = Callable[["onnx.NodeProto", Mapping[str, KernelInput], Mapping[str, Values]], "Held | None"]


def infer_tensors(proto: onnx.ModelProto, device: str, name: str, folder: Path,
                  dims: Mapping[str, int] | None = None, inside: str = "") -> InferredTensors:
    """Type and shape of every tensor of an optimised graph, and the provider of every node, as ORT knows them.

    Args:
        proto: the graph; its nodes have unique names.
        device: `cpu` or `cuda`.
        name: of the model, for errors.
        folder: of its external weights.
        dims: sizes of its dynamic dimensions, and of tensors whose sizes depend on data.
        inside: the name of the node whose body it is; "" for the main graph.

    Raises:
        UserError: a shape depends on data without a bound, or a rank is not known; the message names the tensor.
    """
    constants = constant_inputs(proto.graph, folder)
    query = shape_query(proto, dims or {})
    answer = ask(query, device, name, fold=False)
    providers, plain = answer.providers, answer.shapes
    if answer.unknown(constants):
        answer = ask(query, device, name, fold=True)
    assumed: Shapes = {}
    declared: Shapes = {}
    sizes = GivenSizes(dims or {}, f"{inside}/" if inside else "", selects_boxes(proto.graph))

    def infer_body(body: onnx.ModelProto, holder: str) -> InferredTensors:
        return infer_tensors(body, device, f"{name}: {holder}", folder, dims, holder)

    def held_by(node: onnx.NodeProto, tensors: Mapping[str, KernelInput], values: Mapping[str, Values]) -> Held | None:
        return hold(node, proto, tensors, values, dims or {}, infer_body)

    while answer.unknown(constants):
        found, bounds = _found_shapes(answer, proto, constants, name, sizes, held_by)
        assumed |= bounds
        declared |= found | bounds
        declare_shapes(query, found | bounds, answer.dtypes)
        answer = ask(query, device, name, fold=True)
        for tensor, shape in declared.items():  # ORT does not use every declared shape
            if tensor in answer.shapes and answer.is_open(tensor):
                answer.shapes[tensor] = shape
    tensors = constants | _known_tensors(answer, constants.keys())
    computed = {tensor: values for tensor, values in answer.values.items() if tensor in tensors and tensor not in constants}
    held = {node.name: one for node in proto.graph.node if (one := held_by(node, tensors, computed)) is not None}
    used = sizes.used.union(*(body.inferred.used for each in held.values() for body in each.bodies))
    return InferredTensors(tensors, computed, providers, assumed, plain, held, frozenset(used))


def _found_shapes(answer: ShapeAnswer, proto: onnx.ModelProto, constants: Mapping[str, KernelInput], name: str,
                  sizes: GivenSizes, held_by: HeldBy) -> tuple[Shapes, Shapes]:
    """Shapes that ORT leaves open, of at least one tensor: of the outputs of each node whose inputs do not depend on open
    shapes.

    A later size may be computed from these shapes, so ORT is asked again when they are known.

    Returns:
        The certain or given shapes, and the largest possible ones.

    Raises:
        UserError: a shape can't be found; the message names the tensor.
    """
    waiting = set(answer.unknown(constants))
    _check_inputs(answer, proto, waiting, name)
    known = {**constants, **_known_tensors(answer, constants.keys() | waiting)}
    found: Shapes = {}
    bounds: Shapes = {}
    open_before: set[str] = set()  # open tensors, and those computed from them
    for node in proto.graph.node:
        outputs = waiting & set(node.output)
        bodies = bodies_of(node)
        if open_before & {*node.input, *(read for body in bodies.values() for read in captured(body))}:
            open_before.update(node.output)
            continue
        open_before |= outputs
        if not outputs:
            continue
        held = held_by(node, known, answer.values) if bodies else None
        if held is not None:
            found |= {out: shape for out, shape in held.shapes.items() if out in outputs}
            continue
        sure, largest = _output_shapes(node, outputs, answer, known, proto, name, sizes)
        found |= sure
        bounds |= largest
    return found, bounds


def _check_inputs(answer: ShapeAnswer, proto: onnx.ModelProto, waiting: set[str], name: str) -> None:
    """Refuses a graph with an input whose shape is open."""
    made = {out for node in proto.graph.node for out in node.output}
    for tensor in sorted(waiting - made):
        what = "rank" if answer.shapes[tensor] is None else "shape"
        raise UserError(f"{name}: the {what} of tensor {tensor}, an input, is not known; export the model with the shapes of "
                        "its inputs")


def _known_tensors(answer: ShapeAnswer, besides: AbstractSet[str]) -> dict[str, KernelInput]:
    """The tensors of an answer except `besides`; their shapes must be known."""
    return {tensor: KernelInput(dtype=dtype, shape=tuple(int(size) for size in answer.shapes[tensor] or ()))
            for tensor, dtype in answer.dtypes.items() if tensor not in besides}


def _output_shapes(node: onnx.NodeProto, outputs: set[str], answer: ShapeAnswer, known: Mapping[str, KernelInput],
                   proto: onnx.ModelProto, name: str, sizes: GivenSizes) -> tuple[Shapes, Shapes]:
    """The certain or given shapes of a node's open `outputs`, and the largest possible ones; its inputs are `known`.

    Raises:
        UserError: a shape can't be found; the message names the tensor.
    """
    selects = node.op_type == "NonMaxSuppression"
    found = {out: shape for out in sorted(outputs) if (shape := sizes.shape(out, answer.shapes[out], selects)) is not None}
    if keeps_its_shape(node):
        found |= {node.output[0]: known[node.input[0]].shape}
    left = sorted(outputs - set(found))
    bounds: Shapes = {}
    by_values = node.op_type in SIZED_BY_VALUES or any(answer.shapes[out] is not None for out in left)
    if node.domain in ONNX_DOMAINS and by_values:
        largest = largest_shapes(node, answer.shapes, known, answer.values)
        for out in left:
            if out in largest:
                bounds[out] = largest[out]
            elif (shape := sizes.as_many_as_boxes(answer.shapes[out])) is not None:
                found[out] = shape
            else:
                raise sizes.refusal(name, out, answer.shapes[out])
    elif left:
        found |= {out: shape for out, shape in shapes_when_run(node, proto, known, name).items() if out in left}
        if left[0] not in found:
            raise sizes.refusal(name, left[0], answer.shapes[left[0]])
    return found, bounds
