"""The sizes that stages are measured at: `test_cases.json`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from graph_stages.definition import GraphSize
from utils.config import Config, read_config


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
