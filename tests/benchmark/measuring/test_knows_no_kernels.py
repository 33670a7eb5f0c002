"""The measuring parts, and all that they import, know no kernels, no models and no runtime."""

from __future__ import annotations

import networkx as nx
from test_layers import hase_modules

FORBIDDEN = ("ort_analysis", "kernel_model", "benchmark.collecting", "runtimes")


def test_measuring_knows_no_kernels() -> None:
    graph = hase_modules()[1]
    measuring = [name for name in graph if name.startswith("measuring.")]
    assert {"measuring.loads", "measuring.pending"} <= set(measuring)
    reached = {(name, other) for name in measuring for other in nx.descendants(graph, name)}
    assert not sorted((name, other) for name, other in reached
                      if any(other == part or other.startswith(f"{part}.") for part in FORBIDDEN))
