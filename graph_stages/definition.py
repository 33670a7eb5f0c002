"""The seven stages of a GraphSAGE layer: their inputs and outputs, and how many bytes these are.

One after another they compute `relu(SAGEConv(x, edges))` of torch-geometric with mean aggregation:

    1 gather                messages = x[source]                            one row for each edge
    2 sum                   sums = messages, added up by target             one row for each node
    3 count                 degrees = number of edges that end in a node
    4 mean                  means = sums / max(degrees, 1)
    5 transform_neighbours  neighbours = means · W_l + b
    6 transform_self        combined = x · W_r + neighbours
    7 activate              output = max(combined, 0)

Inputs and outputs are float32 (indices int64) on every unit and at every precision, so that any stage can run on any unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from utils.frozen import Frozen

HOST = "host"  # the memory that holds the inputs and the output of the layer
DType = Literal["float32", "int64"]
Dim = Literal["nodes", "edges", "features", "hidden", "one"]
BYTES: dict[DType, int] = {"float32": 4, "int64": 8}


class GraphSize(Frozen):
    """The size of a graph and the widths of the layer.

    Attributes:
        nodes, edges: of the graph; edges are directed.
        features: values of a node before the layer.
        hidden: values of a node after it.
    """

    nodes: int = Field(ge=1)
    edges: int = Field(ge=1)
    features: int = Field(500, ge=1)
    hidden: int = Field(256, ge=1)

    @property
    def name(self) -> str:
        return f"n{self.nodes}_e{self.edges}"


@dataclass(frozen=True)
class Tensor:
    """What passes between stages."""

    name: str
    dtype: DType
    dims: tuple[Dim, ...]

    def shape(self, size: GraphSize) -> tuple[int, ...]:
        return tuple(1 if dim == "one" else getattr(size, dim) for dim in self.dims)

    def bytes(self, size: GraphSize) -> int:
        count = BYTES[self.dtype]
        for length in self.shape(size):
            count *= length
        return count


TENSORS = {one.name: one for one in (
    Tensor("x", "float32", ("nodes", "features")),
    Tensor("source", "int64", ("edges",)),  # the node that each edge begins at
    Tensor("target", "int64", ("edges",)),  # and the one that it ends in
    Tensor("node_count", "int64", ("one",)),  # models of a fixed size do not take it
    Tensor("messages", "float32", ("edges", "features")),
    Tensor("sums", "float32", ("nodes", "features")),
    Tensor("degrees", "float32", ("nodes",)),
    Tensor("means", "float32", ("nodes", "features")),
    Tensor("neighbours", "float32", ("nodes", "hidden")),
    Tensor("combined", "float32", ("nodes", "hidden")),
    Tensor("output", "float32", ("nodes", "hidden")),
)}
GRAPH_INPUTS = ("x", "source", "target", "node_count")  # what the whole layer takes
OUTPUT = "output"  # what it gives


@dataclass(frozen=True)
class Stage:
    """One stage: its number (1 to 7), its name, and its tensors by name."""

    id: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def bytes_in(self, size: GraphSize) -> int:
        """Bytes of the inputs; weights do not count, since they stay where the stage runs."""
        return sum(TENSORS[name].bytes(size) for name in self.inputs)

    def bytes_out(self, size: GraphSize) -> int:
        return sum(TENSORS[name].bytes(size) for name in self.outputs)


STAGES = (
    Stage(1, "gather", ("x", "source"), ("messages",)),
    Stage(2, "sum", ("messages", "target", "node_count"), ("sums",)),
    Stage(3, "count", ("target", "node_count"), ("degrees",)),
    Stage(4, "mean", ("sums", "degrees"), ("means",)),
    Stage(5, "transform_neighbours", ("means",), ("neighbours",)),
    Stage(6, "transform_self", ("x", "neighbours"), ("combined",)),
    Stage(7, "activate", ("combined",), ("output",)),
)
