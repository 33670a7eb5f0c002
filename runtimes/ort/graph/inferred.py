"""What is known of a graph's tensors, and of the bodies that its nodes hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from records.kernel_record import KernelInput
from runtimes.ort.graph.open_shapes import Shape

if TYPE_CHECKING:
    import onnx

Values = tuple[int | float | bool, ...]


@dataclass(frozen=True)
class InferredTensors:
    """What is known of a graph's tensors.

    Attributes:
        tensors: type and shape by name, constants with their small values.
        computed: values of small integer tensors that the graph computes from shapes and constants, by name.
        providers: by node name, the provider that ORT assigned.
        assumed: by tensor name, shapes that depend on data; the largest possible ones are assumed.
        plain: by tensor name, shapes as far as ORT infers them from shapes alone: what its optimisers know.
        held: by node name, the bodies of nodes.
        used: the names of the given sizes that a tensor of this graph, or of a body in it, has.
    """

    tensors: dict[str, KernelInput]
    computed: dict[str, Values]
    providers: dict[str, str]
    assumed: dict[str, tuple[int, ...]]
    plain: dict[str, Shape]
    held: dict[str, Held] = field(default_factory=dict)
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trips:
    """How often a body runs per run of its node.

    Attributes:
        low, high: the range, as multiples of `count`, if it is a guess.
        fixed: the model itself sets it, not a given size.
    """

    count: int
    low: float = 1.0
    high: float = 1.0
    fixed: bool = True


@dataclass(frozen=True)
class Body:
    """A body as a model of its own.

    Attributes:
        attribute: of the node that holds it.
        proto: the body as a model.
        captured: the tensors that it takes from the graph around it.
        inferred: what is known of its tensors.
    """

    attribute: str
    proto: onnx.ModelProto
    captured: frozenset[str]
    inferred: InferredTensors


@dataclass(frozen=True)
class Held:
    """The bodies of a node.

    Attributes:
        trips: of the body; a branch of an If runs once.
        bodies: one; of an If, both branches.
        chosen: the attribute of the If's branch that the user chose; "" if none.
        shapes: of the node's outputs, from those of the bodies.
    """

    trips: Trips
    bodies: tuple[Body, ...]
    chosen: str
    shapes: dict[str, tuple[int, ...]]
