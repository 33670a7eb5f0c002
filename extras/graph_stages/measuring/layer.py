"""A GraphSAGE layer in seven stages: its tensors, its weights, and the graphs on which it is measured.

Together, the stages compute `relu(SAGEConv(x, edges))` of torch-geometric with mean aggregation:

    1 gather                messages = x[source]                            one row for each edge
    2 sum                   sums = messages, added up by target             one row for each node
    3 count                 degrees = number of edges that end in a node
    4 mean                  means = sums / max(degrees, 1)
    5 transform_neighbours  neighbours = means · W_l + b
    6 transform_self        combined = x · W_r + neighbours
    7 activate              output = max(combined, 0)

Graphs are random or read from a list of edges, never made of zeros: which nodes the edges join decides how caches are used.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from hase.utils.config import Config, Frozen, read_config
from hase.utils.errors import UserError
from hase.utils.lazy import torch
from hase.utils.paths import as_file_name

DEGREE_EXPONENT = 2.5  # of a power-law graph: P(degree = k) ~ k^-2.5; real networks have 2 to 3 (Barabási and Albert, 1999)
Indices = np.ndarray[Any, np.dtype[np.int64]]


class GraphSize(Frozen):
    """The nodes and directed edges of a graph, and the values per node before (`features`) and after (`hidden`) the layer."""

    nodes: int = Field(ge=1)
    edges: int = Field(ge=1)
    features: int = Field(500, ge=1)
    hidden: int = Field(256, ge=1)

    @property
    def name(self) -> str:
        return f"n{self.nodes}_e{self.edges}"


@dataclass(frozen=True)
class Graph:
    """A directed graph: edge i leads from node `source[i]` to node `target[i]`.

    `name` is a key of GRAPH_KINDS, or the name of a file with a hash.
    """

    name: str
    nodes: int
    source: Indices
    target: Indices

    @property
    def edges(self) -> int:
        return len(self.source)


def draw_uniform(nodes: int, edges: int, seed: int = 0) -> Graph:
    """Draws both ends of each edge uniformly from all nodes."""
    random = np.random.default_rng(seed)
    return Graph("uniform", nodes, random.integers(0, nodes, edges), random.integers(0, nodes, edges))


def draw_power_law(nodes: int, edges: int, seed: int = 0) -> Graph:
    """Draws a graph in which a few nodes have many edges (the model of Chung and Lu, 2002).

    The expected degree of the i-th node is proportional to i^(-1 / (γ - 1)), γ = DEGREE_EXPONENT. Node numbers are shuffled.
    """
    random = np.random.default_rng(seed)
    weights = np.arange(1, nodes + 1) ** (-1.0 / (DEGREE_EXPONENT - 1.0))
    order = random.permutation(nodes)
    ends = order[random.choice(nodes, size=(2, edges), p=weights / weights.sum())]
    return Graph("power_law", nodes, ends[0], ends[1])


GRAPH_KINDS: dict[str, Callable[[int, int, int], Graph]] = {"uniform": draw_uniform, "power_law": draw_power_law}


def read_edge_list(path: Path, undirected: bool = False) -> Graph:
    """Reads a graph from a text file with one edge per line: two node numbers, separated by blanks, tabs or a comma.

    Further columns, and lines that begin with `#` or `%`, are ignored. Nodes are renumbered from 0 in their old order. With
    `undirected`, each line stands for both directions.
    """
    pairs = np.array(list(_read_edges(path)), dtype=np.int64).reshape(-1, 2)
    if not len(pairs):
        raise UserError(f"{path}: holds no edges; write the numbers of two nodes on each line")
    if undirected:
        pairs = np.concatenate([pairs, pairs[:, ::-1]])
    known, ends = np.unique(pairs, return_inverse=True)
    source, target = ends.reshape(-1, 2).astype(np.int64).T
    digest = hashlib.sha256(np.ascontiguousarray(ends).tobytes()).hexdigest()[:8]
    return Graph(as_file_name(f"{path.stem}-{digest}"), len(known), np.ascontiguousarray(source), np.ascontiguousarray(target))


def _read_edges(path: Path) -> Iterator[tuple[int, int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; write the numbers of two nodes on each line") from None
    for number, line in enumerate(lines, 1):
        parts = re.split(r"[\s,;]+", line.strip())
        if parts == [""] or parts[0][0] in "#%":
            continue
        try:
            yield int(parts[0]), int(parts[1])
        except (ValueError, IndexError):
            raise UserError(f"{path}, line {number}: {line.strip()[:60]!r} is no edge; write the numbers of two "
                            "nodes") from None


class GraphSource(Frozen):
    """How to get a graph: read from the edge list `path`, or drawn with `seed` as `kind` (a key of GRAPH_KINDS)."""

    kind: str = "uniform"
    path: str = ""
    undirected: bool = False
    seed: int = 0

    def graph(self, nodes: int, edges: int) -> Graph:
        """Reads or draws the graph. A graph from a file has its own size, whatever `nodes` and `edges` are."""
        if self.path:
            return read_edge_list(Path(self.path), self.undirected)
        return GRAPH_KINDS[self.kind](nodes, edges, self.seed)


def draw_features(nodes: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Draws standard normal features, float32 of shape (nodes, width)."""
    return np.random.default_rng(seed + 1).standard_normal((nodes, width), dtype=np.float32)


class GraphCase(Config):
    """The nodes and edges of one graph to measure."""

    nodes: int = Field(ge=1)
    edges: int = Field(ge=1)


class CaseFile(Config):
    """A file of graphs to measure, such as test_cases.json, with the values per node before and after the layer."""

    feature_dim: int = Field(500, ge=1)
    hidden_dim: int = Field(256, ge=1)
    test_cases: tuple[GraphCase, ...] = Field(min_length=1)


def read_cases(path: Path, features: int | None = None, hidden: int | None = None) -> list[GraphSize]:
    """Reads the sizes in a `CaseFile`, without duplicates. `features` and `hidden` replace those of the file."""
    cases = read_config(path, CaseFile)
    return list(dict.fromkeys(GraphSize(nodes=case.nodes, edges=case.edges, features=features or cases.feature_dim,
                                        hidden=hidden or cases.hidden_dim) for case in cases.test_cases))


HOST = "host"  # the memory that holds the layer's inputs and output
DType = Literal["float32", "int64"]
Dim = Literal["nodes", "edges", "features", "hidden", "one"]
BYTES: dict[DType, int] = {"float32": 4, "int64": 8}
Array = np.ndarray[Any, Any]
TensorByName = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that passes between stages."""

    name: str
    dtype: DType
    dims: tuple[Dim, ...]

    def shape(self, size: GraphSize) -> tuple[int, ...]:
        return tuple(1 if dim == "one" else getattr(size, dim) for dim in self.dims)

    def bytes(self, size: GraphSize) -> int:
        return BYTES[self.dtype] * math.prod(self.shape(size))


TENSORS = {tensor.name: tensor for tensor in (
    LayerTensor("x", "float32", ("nodes", "features")),
    LayerTensor("source", "int64", ("edges",)),  # the node where each edge begins
    LayerTensor("target", "int64", ("edges",)),  # the node where it ends
    LayerTensor("node_count", "int64", ("one",)),  # no input of models with a fixed size
    LayerTensor("messages", "float32", ("edges", "features")),
    LayerTensor("sums", "float32", ("nodes", "features")),
    LayerTensor("degrees", "float32", ("nodes",)),
    LayerTensor("means", "float32", ("nodes", "features")),
    LayerTensor("neighbours", "float32", ("nodes", "hidden")),
    LayerTensor("combined", "float32", ("nodes", "hidden")),
    LayerTensor("output", "float32", ("nodes", "hidden")),
)}
GRAPH_INPUTS = ("x", "source", "target", "node_count")  # inputs of the whole layer
OUTPUT = "output"  # the layer's result


@dataclass(frozen=True)
class LayerStage:
    """One stage: its number (1 to 7), its name, and the names of its tensors."""

    id: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def bytes_in(self, size: GraphSize) -> int:
        """Bytes of the inputs. Weights do not count, since they stay where the stage runs."""
        return sum(TENSORS[name].bytes(size) for name in self.inputs)

    def bytes_out(self, size: GraphSize) -> int:
        return sum(TENSORS[name].bytes(size) for name in self.outputs)


STAGES = (
    LayerStage(1, "gather", ("x", "source"), ("messages",)),
    LayerStage(2, "sum", ("messages", "target", "node_count"), ("sums",)),
    LayerStage(3, "count", ("target", "node_count"), ("degrees",)),
    LayerStage(4, "mean", ("sums", "degrees"), ("means",)),
    LayerStage(5, "transform_neighbours", ("means",), ("neighbours",)),
    LayerStage(6, "transform_self", ("x", "neighbours"), ("combined",)),
    LayerStage(7, "activate", ("combined",), ("output",)),
)


@dataclass(frozen=True)
class Weights:
    """The weights of a layer, as in torch-geometric's SAGEConv."""

    neighbours: Array  # `lin_l.weight`, (hidden, features): for the mean of a node's neighbours
    bias: Array  # `lin_l.bias`, (hidden,)
    root: Array  # `lin_r.weight`, (hidden, features): for the node's own features

    def rounded(self) -> Weights:
        """The weights rounded to FP16 (as files store them), and converted back to float32."""
        return Weights(*(values.astype(np.float16).astype(np.float32) for values in (self.neighbours, self.bias, self.root)))


def draw_weights(features: int, hidden: int, seed: int = 0) -> Weights:
    """Draws float32 weights, uniform within ±1/√features as in torch's linear layers."""
    random, bound = np.random.default_rng(seed), features ** -0.5

    def draw(*shape: int) -> Array:
        return random.uniform(-bound, bound, shape).astype(np.float32)

    return Weights(draw(hidden, features), draw(hidden), draw(hidden, features))


def stage_function(stage: LayerStage, weights: Weights, device: str = "cpu") -> Callable[[TensorByName], torch.Tensor]:
    """Returns a function that computes a stage on `device` from a mapping of its inputs by name."""
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


def compute_tensors(graph: Graph, weights: Weights, seed: int = 0) -> dict[str, Array]:
    """Computes every tensor of the layer, by name, with torch on the CPU: inputs and expected outputs of all stages."""
    features = weights.root.shape[1]
    tensors = {"x": torch.from_numpy(draw_features(graph.nodes, features, seed)), "source": torch.from_numpy(graph.source),
               "target": torch.from_numpy(graph.target), "node_count": torch.tensor([graph.nodes])}
    with torch.inference_mode():
        for stage in STAGES:
            tensors[stage.outputs[0]] = stage_function(stage, weights)(tensors)
    return {name: tensor.numpy() for name, tensor in tensors.items()}
