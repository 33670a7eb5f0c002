"""A GraphSAGE layer in seven stages: the tensors between them, its weights, and what torch computes.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hase.extras.graph_stages.graphs import Graph, GraphSize, draw_features
from hase.utils.lazy import torch

HOST = "host"  # the memory that holds the inputs and the output of the layer
DType = Literal["float32", "int64"]
Dim = Literal["nodes", "edges", "features", "hidden", "one"]
BYTES: dict[DType, int] = {"float32": 4, "int64": 8}
Array = np.ndarray[Any, Any]
TensorByName = Mapping[str, "torch.Tensor"]


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


TENSORS = {tensor.name: tensor for tensor in (
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


@dataclass(frozen=True)
class Weights:
    """Of a layer, as torch-geometric's SAGEConv holds them.

    Attributes:
        neighbours: `lin_l.weight`, (hidden, features), for the mean of its neighbours.
        bias: `lin_l.bias`, (hidden,).
        root: `lin_r.weight`, (hidden, features), for a node's features.
    """

    neighbours: Array
    bias: Array
    root: Array

    def rounded(self) -> Weights:
        """What is left of them where a file stores them in FP16; float32 again."""
        return Weights(*(values.astype(np.float16).astype(np.float32) for values in (self.neighbours, self.bias, self.root)))


def draw_weights(features: int, hidden: int, seed: int = 0) -> Weights:
    """Random weights, uniform within ±1/√features as in torch's linear layers; float32."""
    random, bound = np.random.default_rng(seed), features ** -0.5

    def draw(*shape: int) -> Array:
        return random.uniform(-bound, bound, shape).astype(np.float32)

    return Weights(draw(hidden, features), draw(hidden), draw(hidden, features))


def stage_function(stage: Stage, weights: Weights, device: str = "cpu") -> Callable[[TensorByName], torch.Tensor]:
    """What a stage computes: its inputs by name, on `device`, give its output there."""
    linear = torch.nn.functional.linear
    neighbours, bias, root = (torch.from_numpy(values).to(device)
                              for values in (weights.neighbours, weights.bias, weights.root))

    def add_up(inputs: TensorByName) -> torch.Tensor:
        messages = inputs["messages"]
        sums = torch.zeros(int(inputs["node_count"]), messages.shape[1], device=messages.device)
        return sums.scatter_add_(0, inputs["target"][:, None].expand_as(messages), messages)  # as torch-geometric does

    def count(inputs: TensorByName) -> torch.Tensor:
        target = inputs["target"]
        ones = torch.ones(len(target), device=target.device)
        return torch.zeros(int(inputs["node_count"]), device=target.device).scatter_add_(0, target, ones)

    functions: dict[str, Callable[[TensorByName], torch.Tensor]] = {
        "gather": lambda inputs: inputs["x"].index_select(0, inputs["source"]),
        "sum": add_up,
        "count": count,
        "mean": lambda inputs: inputs["sums"] / inputs["degrees"].clamp(min=1.0)[:, None],
        "transform_neighbours": lambda inputs: linear(inputs["means"], neighbours, bias),
        "transform_self": lambda inputs: linear(inputs["x"], root) + inputs["neighbours"],
        "activate": lambda inputs: torch.relu(inputs["combined"]),
    }
    return functions[stage.name]


def all_tensors(graph: Graph, weights: Weights, seed: int = 0) -> dict[str, Array]:
    """Every tensor of the layer by name, computed by torch on the CPU: the inputs of each stage, and what it should give."""
    features = weights.root.shape[1]
    tensors = {"x": torch.from_numpy(draw_features(graph.nodes, features, seed)), "source": torch.from_numpy(graph.source),
               "target": torch.from_numpy(graph.target), "node_count": torch.tensor([graph.nodes])}
    with torch.inference_mode():
        for stage in STAGES:
            tensors[stage.outputs[0]] = stage_function(stage, weights)(tensors)
    return {name: tensor.numpy() for name, tensor in tensors.items()}
