"""Phase 6.1: which kernel waits for which, and what a whole run takes given the time of each.

Reads kernel records (by default all of ort_analysis/ort_kernel_record). Writes one DAG a record to
graph_model/model_DAG/<flavour>/<model>.json: its nodes in execution order and the tensors between them.
History of the DAG file's schema: version 1 is the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ort_analysis.records import REMAKE, Frozen, ModelRecord, load_record
from utils import cli, files
from utils.errors import UserError
from utils.logger import get_logger
from utils.paths import Workspace
from utils.safe_names import FileName

if TYPE_CHECKING:
    import networkx as nx

log = get_logger("dag")
DAG_VERSION = 1
EXAMPLES = """
python graph_model/dag_critical_path.py
python graph_model/dag_critical_path.py --record ort_analysis/ort_kernel_record/cpu-avx2-ort1.31-all/resnet18.json --json
"""


class DagNode(Frozen):
    """A node of the DAG: its name in ORT's profile, the kernel that it runs, and that kernel's type."""

    name: str
    kernel_id: str
    type: str


class DagEdge(Frozen):
    """A tensor of `bytes` that node `producer` makes and node `consumer` reads."""

    producer: str
    consumer: str
    tensor: str
    bytes: int


class DagFile(Frozen):
    """A model's DAG; nodes in execution order."""

    version: int = DAG_VERSION
    model: FileName
    flavour: FileName
    nodes: tuple[DagNode, ...]
    edges: tuple[DagEdge, ...]


def dag_file(record: ModelRecord) -> DagFile:
    """The DAG of a record, from the tensor names of its nodes. The nodes of a body wait for the node that holds it, and who
    reads what that one makes waits for them."""
    made_by: dict[str, tuple[str, int]] = {}
    within: dict[str, list[str]] = defaultdict(list)  # the nodes of bodies by the node that holds them
    for node in record.nodes:
        if node.inside:
            within[node.inside].append(node.name)

    def every_within(name: str) -> Iterator[str]:
        for inner in within.get(name, ()):
            yield inner
            yield from every_within(inner)

    edges = []
    for node in record.nodes:
        if node.inside:
            edges.append(DagEdge(producer=node.inside, consumer=node.name, tensor="", bytes=0))
        for tensor in dict.fromkeys(node.inputs):
            if tensor in made_by:
                producer, size = made_by[tensor]
                edges.append(DagEdge(producer=producer, consumer=node.name, tensor=tensor, bytes=size))
                edges += [DagEdge(producer=inner, consumer=node.name, tensor=tensor, bytes=0)
                          for inner in every_within(producer)]
        outputs = record.kernel_of(node).outputs
        made_by |= {tensor: (node.name, made.bytes) for tensor, made in zip(node.outputs, outputs, strict=False) if tensor}
    nodes = (DagNode(name=node.name, kernel_id=node.kernel_id, type=record.kernel_of(node).type) for node in record.nodes)
    return DagFile(model=record.model, flavour=record.flavour.name, nodes=tuple(nodes), edges=tuple(edges))


def dag_of(dag: DagFile) -> nx.DiGraph:
    """A DAG file as a graph: nodes carry `kernel_id` and `type`, edges the `bytes` that pass along them."""
    import networkx as nx

    graph: nx.DiGraph = nx.DiGraph(model=dag.model, flavour=dag.flavour)
    graph.add_nodes_from((node.name, {"kernel_id": node.kernel_id, "type": node.type}) for node in dag.nodes)
    for edge in dag.edges:
        passed = graph.edges[edge.producer, edge.consumer]["bytes"] if graph.has_edge(edge.producer, edge.consumer) else 0
        graph.add_edge(edge.producer, edge.consumer, bytes=passed + edge.bytes)
    return graph


def build_dag(record: ModelRecord) -> nx.DiGraph:
    """The graph of a record's nodes, from the tensor names of its nodes; see `dag_of`."""
    return dag_of(dag_file(record))


def load_dag(path: Path) -> nx.DiGraph:
    """The graph in a DAG file.

    Raises:
        UserError: no such file, damaged, or of another version.
    """
    return dag_of(files.read_record(path, DagFile, DAG_VERSION, "python graph_model/dag_critical_path.py"))


def longest_path(dag: nx.DiGraph, latency_ms: Mapping[Any, float]) -> tuple[float, list[Any]]:
    """The critical path: its length in ms and its nodes, first to last. Linear in nodes and edges.

    Args:
        dag: any graph without cycles.
        latency_ms: the time of each node, ≥ 0.

    Raises:
        UserError: a node without a time, or a cycle.
    """
    import networkx as nx

    finished: dict[Any, float] = {}
    waited_for: dict[Any, Any] = {}
    try:
        for node in nx.topological_sort(dag):
            last = max(dag.predecessors(node), key=finished.__getitem__, default=None)
            waited_for[node] = last
            finished[node] = _time_of(latency_ms, node) + (finished[last] if last is not None else 0.0)
    except nx.NetworkXUnfeasible:
        raise UserError(f"{dag.graph.get('model', 'the graph')}: holds a cycle, so no order of its nodes can run") from None
    if not finished:
        return 0.0, []
    node = max(finished, key=finished.__getitem__)
    length, path = finished[node], []
    while node is not None:
        path.append(node)
        node = waited_for[node]
    return length, path[::-1]


def calculate_latency(dag: nx.DiGraph, latency_ms: Mapping[Any, float],
                      composition: Literal["sum", "critical_path"] = "sum") -> float:
    """The time of a run in ms, from the time of each node, in linear time.

    Args:
        dag: any graph without cycles.
        latency_ms: the time of each node, ≥ 0.
        composition: `sum`: one kernel after another, as ORT's stream runs them; `critical_path`: the longest path, as
            if whatever is independent ran at the same time.

    Raises:
        UserError: a node without a time, or a cycle.
    """
    if composition == "critical_path":
        return longest_path(dag, latency_ms)[0]
    return sum(_time_of(latency_ms, node) for node in dag)


def _time_of(latency_ms: Mapping[Any, float], node: Any) -> float:
    try:
        return latency_ms[node]
    except KeyError:
        raise UserError(f"node {node}: no time given for it") from None


def summary(dag: nx.DiGraph) -> dict[str, Any]:
    """A DAG in one row: nodes, edges, and how many nodes its longest chain has."""
    depth = int(longest_path(dag, dict.fromkeys(dag, 1.0))[0])
    return {"model": dag.graph["model"], "flavour": dag.graph["flavour"], "nodes": dag.number_of_nodes(),
            "edges": dag.number_of_edges(), "longest_chain": depth}


def record_paths(workspace: Workspace) -> list[Path]:
    """Every record of every flavour."""
    return sorted(path for path in workspace.kernel_records.glob("*/*.json") if path.name != "index.json")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--record", type=Path, action="append", metavar="FILE",
                        help="a kernel record (repeatable; default: all records of all flavours)")
    args = parser.parse_args()
    workspace = cli.start(args)
    paths = args.record or record_paths(workspace)
    if not paths:
        raise UserError(f"{workspace.kernel_records}: no kernel records; make them with: {REMAKE}")
    rows = []
    for path in cli.track(paths, "building DAGs"):
        dag = dag_file(load_record(path))
        written = workspace.model_dag(dag.flavour) / f"{dag.model}.json"
        files.write_json(written, dag)
        rows.append(summary(dag_of(dag)) | {"file": str(written)})
    cli.print_rows(rows, args.json, "DAGs")
    return 0


if __name__ == "__main__":
    cli.run(main)
