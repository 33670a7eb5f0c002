"""Graphs to measure on: their sizes, and where their edges come from: drawn at random, or read from a list.

Where edges point decides how caches are used, so they are never zeros.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.paths import as_file_name

DEGREE_EXPONENT = 2.5  # of a power-law graph: P(degree = k) ~ k^-2.5; real networks have 2 to 3 (Barabási and Albert, 1999)
Indices = np.ndarray[Any, np.dtype[np.int64]]


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
class Graph:
    """A directed graph.

    Attributes:
        name: how it was drawn, or the name of its file with a hash of its edges.
        nodes: their number.
        source, target: of each edge, int64.
    """

    name: str
    nodes: int
    source: Indices
    target: Indices

    @property
    def edges(self) -> int:
        return len(self.source)


def draw_uniform(nodes: int, edges: int, seed: int = 0) -> Graph:
    """Both ends of each edge are any node."""
    random = np.random.default_rng(seed)
    return Graph("uniform", nodes, random.integers(0, nodes, edges), random.integers(0, nodes, edges))


def draw_power_law(nodes: int, edges: int, seed: int = 0) -> Graph:
    """A few nodes have many edges: expected degrees follow a power law (the model of Chung and Lu, 2002).

    The expected degree of the i-th node is proportional to i^(-1 / (γ - 1)), where γ is DEGREE_EXPONENT. Hubs lie anywhere
    among the nodes.
    """
    random = np.random.default_rng(seed)
    weights = np.arange(1, nodes + 1) ** (-1.0 / (DEGREE_EXPONENT - 1.0))
    order = random.permutation(nodes)
    ends = order[random.choice(nodes, size=(2, edges), p=weights / weights.sum())]
    return Graph("power_law", nodes, ends[0], ends[1])


DRAWN: dict[str, Callable[[int, int, int], Graph]] = {"uniform": draw_uniform, "power_law": draw_power_law}


def read_edge_list(path: Path, undirected: bool = False) -> Graph:
    """A graph from a text file with an edge on each line: the numbers of two nodes, separated by blanks, tabs or a comma.

    Further columns are ignored, and so are lines that begin with `#` or `%`. Nodes get new numbers from 0, in the order of the
    old ones.

    Args:
        path: the file, UTF-8.
        undirected: whether each line stands for both directions.

    Raises:
        UserError: no such file, no edges in it, or a line that is no edge.
    """
    pairs = np.array(list(_pairs(path)), dtype=np.int64).reshape(-1, 2)
    if not len(pairs):
        raise UserError(f"{path}: holds no edges; write the numbers of two nodes on each line")
    if undirected:
        pairs = np.concatenate([pairs, pairs[:, ::-1]])
    known, ends = np.unique(pairs, return_inverse=True)
    source, target = ends.reshape(-1, 2).astype(np.int64).T
    digest = hashlib.sha256(np.ascontiguousarray(ends).tobytes()).hexdigest()[:8]
    return Graph(as_file_name(f"{path.stem}-{digest}"), len(known), np.ascontiguousarray(source), np.ascontiguousarray(target))


def _pairs(path: Path) -> Iterator[tuple[int, int]]:
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
    """Where a graph comes from.

    Attributes:
        kind: how it is drawn, a name of DRAWN; "" for a file.
        path: of an edge list; "" for a drawn graph.
        undirected: whether a line of the file stands for both directions.
        seed: of a drawn graph, the features and the weights.
    """

    kind: str = "uniform"
    path: str = ""
    undirected: bool = False
    seed: int = 0

    def graph(self, nodes: int, edges: int) -> Graph:
        """The graph; a file has its own size.

        Raises:
            UserError: the file can't be read.
        """
        return read_edge_list(Path(self.path), self.undirected) if self.path else DRAWN[self.kind](nodes, edges, self.seed)


def draw_features(nodes: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Standard normal features, float32 of shape (nodes, width)."""
    return np.random.default_rng(seed + 1).standard_normal((nodes, width), dtype=np.float32)


class Case(Config):
    """Nodes and edges of one graph."""

    nodes: int = Field(ge=1)
    edges: int = Field(ge=1)


class CaseFile(Config):
    """What the file holds.

    Attributes:
        feature_dim: values of a node before the layer.
        hidden_dim: values of a node after it.
        test_cases: the graphs.
    """

    feature_dim: int = Field(500, ge=1)
    hidden_dim: int = Field(256, ge=1)
    test_cases: tuple[Case, ...] = Field(min_length=1)


def read_cases(path: Path, features: int | None = None, hidden: int | None = None) -> list[GraphSize]:
    """The sizes in a file, in its order and each once.

    Args:
        path: JSON, see `CaseFile`.
        features, hidden: widths in place of those of the file.

    Raises:
        UserError: no such file, or it holds something else.
    """
    cases = read_config(path, CaseFile)
    return list(dict.fromkeys(GraphSize(nodes=case.nodes, edges=case.edges, features=features or cases.feature_dim,
                                        hidden=hidden or cases.hidden_dim) for case in cases.test_cases))
