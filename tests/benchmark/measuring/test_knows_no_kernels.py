"""The measuring parts, and all that they import, know no kernels, no models and no runtime."""

from __future__ import annotations

import networkx as nx
from test_layers import hase_modules

FORBIDDEN = ("ort_analysis", "kernel_model", "hase.benchmark.collecting", "runtimes")


def test_measuring_knows_no_kernels() -> None:
    graph = hase_modules()[1]
    measuring = [name for name in graph if name.startswith("measuring.")]
    assert {"hase.benchmark.load.loads", "hase.benchmark.measuring.pending"} <= set(measuring)
    reached = {(name, dependency) for name in measuring for dependency in nx.descendants(graph, name)}
    assert not sorted((name, dependency) for name, dependency in reached
                      if any(dependency == part or dependency.startswith(f"{part}.") for part in FORBIDDEN))
