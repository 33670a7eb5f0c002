"""What is known of a graph's tensors, and of the bodies that its nodes hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ort_analysis.graph.open_shapes import Shape
from ort_analysis.records.kernel_record import KernelInput

if TYPE_CHECKING:
    import onnx

Values = tuple[int | float | bool, ...]


@dataclass(frozen=True)
class InferredTensors:
    """What is known of a graph's tensors.

    Attributes:
        tensors: type and shape by name, constants with their small values.
        computed: values of small whole-number tensors that the graph computes from shapes and constants, by name.
        providers: by node name, the provider that ORT assigned.
        assumed: by tensor name, shapes that depend on data and were taken to be the largest possible.
        plain: by tensor name, shapes as far as ORT infers them from shapes alone, which is what its optimisers know.
        held: by node name, what nodes with bodies hold.
        used: names of the sizes given that a tensor of this graph has, or of a body in it.
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
    """How often a body runs each time its node does; where that is a guess, between which multiples of it.

    Attributes:
        fixed: the model itself says so, and no size that the user gives.
    """

    count: int
    low: float = 1.0
    high: float = 1.0
    fixed: bool = True


@dataclass(frozen=True)
class Body:
    """A body as a model of its own.

    Attributes:
        attribute: of the node, that holds it.
        proto: the model.
        captured: the tensors that it takes from the graph around it.
        inferred: what is known of its tensors.
    """

    attribute: str
    proto: onnx.ModelProto
    captured: frozenset[str]
    inferred: InferredTensors


@dataclass(frozen=True)
class Held:
    """What a node with bodies holds.

    Attributes:
        trips: of its body; of an If's branch, once.
        bodies: one, of an If both.
        chosen: the If's branch that the user named, by attribute; "" where none.
        shapes: of the node's outputs, as they follow from the bodies.
    """

    trips: Trips
    bodies: tuple[Body, ...]
    chosen: str
    shapes: dict[str, tuple[int, ...]]
