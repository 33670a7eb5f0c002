"""A model's record as a graph of kernels, and the longest path through it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hase.records.kernel_record import REMAKE, ModelRecord, RunCount
from hase.records.kernel_record_files import read_model_record
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import networkx as nx
from hase.utils.paths import FileName, Workspace

DAG_VERSION = 2  # 2: how often nodes run
MAKE_DAG = "python graph_model/dag_critical_path.py"


class DagNode(Frozen):
    """A node of the DAG: its name in ORT's profile, its kernel's id and type, and how often it runs in one run of the model."""

    name: str
    kernel_id: str
    type: str
    runs: RunCount = Field(1.0, exclude_if=lambda runs: runs == 1.0)


class DagEdge(Frozen):
    """A tensor of `bytes` that node `producer` writes and node `consumer` reads."""

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

    @model_validator(mode="after")
    def _edges_join_nodes(self) -> Self:
        names = {node.name for node in self.nodes}
        if len(names) < len(self.nodes):
            raise ValueError("two nodes have the same name")
        if stray := {name for edge in self.edges for name in (edge.producer, edge.consumer)} - names:
            raise ValueError(f"an edge names {min(stray)!r}, which is no node")
        return self


def dag_file(record: ModelRecord) -> DagFile:
    """The DAG of a record, from the tensor names of its nodes. The nodes of a body (of a Loop, If or Scan) wait for the node
    that contains it, and nodes that read that node's outputs wait for its body."""
    produced_by: dict[str, tuple[str, int]] = {}
    within: dict[str, list[str]] = defaultdict(list)  # nodes of bodies, by the node that contains them
    for node in record.nodes:
        if node.inside:
            within[node.inside].append(node.name)

    def all_within(name: str) -> Iterator[str]:
        for body_node in within.get(name, ()):
            yield body_node
            yield from all_within(body_node)

    edges = []
    for node in record.nodes:
        if node.inside:
            edges.append(DagEdge(producer=node.inside, consumer=node.name, tensor="", bytes=0))
        for tensor in dict.fromkeys(node.inputs):
            if tensor in produced_by:
                producer, size = produced_by[tensor]
                edges.append(DagEdge(producer=producer, consumer=node.name, tensor=tensor, bytes=size))
                edges += [DagEdge(producer=body_node, consumer=node.name, tensor=tensor, bytes=0)
                          for body_node in all_within(producer)]
        outputs = record.kernel_of(node).outputs
        produced_by |= {tensor: (node.name, output.bytes)
                        for tensor, output in zip(node.outputs, outputs, strict=False) if tensor}
    nodes = (DagNode(name=node.name, kernel_id=node.kernel_id, type=record.kernel_of(node).type, runs=node.runs)
             for node in record.nodes)
    return DagFile(model=record.model, flavour=record.flavour.name, nodes=tuple(nodes), edges=tuple(edges))


def dag_of(dag: DagFile) -> nx.DiGraph:
    """A DAG file as a graph: nodes have the attributes `kernel_id` and `type`, edges have `bytes`."""
    graph: nx.DiGraph = nx.DiGraph(model=dag.model, flavour=dag.flavour)
    graph.add_nodes_from((node.name, {"kernel_id": node.kernel_id, "type": node.type}) for node in dag.nodes)
    for edge in dag.edges:
        bytes_before = graph.edges[edge.producer, edge.consumer]["bytes"] if graph.has_edge(edge.producer, edge.consumer) else 0
        graph.add_edge(edge.producer, edge.consumer, bytes=bytes_before + edge.bytes)
    return graph


def build_dag(record: ModelRecord) -> nx.DiGraph:
    """The graph of a record; attributes as in `dag_of`."""
    return dag_of(dag_file(record))


def read_dag(path: Path) -> DagFile:
    """Reads a file that `dag_critical_path.py` wrote."""
    return files.read_record(path, DagFile, DAG_VERSION, MAKE_DAG)


def record_of_dag(path: Path, workspace: Workspace) -> Path:
    """The kernel record that a DAG file was made from, which describes its kernels. Raises UserError: the file can't be read,
    the workspace has no such record, or the record has changed since."""
    dag = read_dag(path)
    record = workspace.kernel_records / dag.flavour / f"{dag.model}.json"
    if not record.is_file():
        raise UserError(f"{path}: {record}, which describes its kernels, is missing; make both anew: {REMAKE}, then {MAKE_DAG}")
    if dag_file(read_model_record(record)) != dag:
        raise UserError(f"{path}: {record} has changed since the DAG was made of it; make it anew: {MAKE_DAG}")
    return record


def longest_path(dag: nx.DiGraph, latency_ms: Mapping[Any, float]) -> tuple[float, list[Any]]:
    """The critical path of an acyclic graph: its length in ms and its nodes, first to last. Linear in nodes and edges.

    Raises:
        UserError: a node without a time, or a cycle.
    """
    finished: dict[Any, float] = {}
    predecessor: dict[Any, Any] = {}
    try:
        for node in nx.topological_sort(dag):
            last = max(dag.predecessors(node), key=finished.__getitem__, default=None)
            predecessor[node] = last
            finished[node] = _time_of(latency_ms, node) + (finished[last] if last is not None else 0.0)
    except nx.NetworkXUnfeasible:
        raise UserError(f"{dag.graph.get('model', 'the graph')}: holds a cycle, so no order of its nodes can run") from None
    if not finished:
        return 0.0, []
    node = max(finished, key=finished.__getitem__)
    length, path = finished[node], []
    while node is not None:
        path.append(node)
        node = predecessor[node]
    return length, path[::-1]


def calculate_latency(dag: nx.DiGraph, latency_ms: Mapping[Any, float],
                      composition: Literal["sum", "critical_path"] = "sum") -> float:
    """The time of a run in ms, from the time of each node. It is the sum (one kernel after another, as in ONNX Runtime's
    stream) or the longest path (all independent kernels at the same time). Arguments and errors as for `longest_path`."""
    if composition == "critical_path":
        return longest_path(dag, latency_ms)[0]
    return sum(_time_of(latency_ms, node) for node in dag)


def _time_of(latency_ms: Mapping[Any, float], node: Any) -> float:
    try:
        return latency_ms[node]
    except KeyError:
        raise UserError(f"node {node}: no time given for it") from None


def record_paths(workspace: Workspace) -> list[Path]:
    """Every record of every flavour."""
    return sorted(path for path in workspace.kernel_records.glob("*/*.json") if path.name != "index.json")
