"""The nodes of a real CUDA session, and of the graph that Hase derives without a GPU, as plain rows; and their comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from hase.kernel_model.building.dummy_data import random_floats
from hase.ort_analysis.graph.analysis import analyze, kernel_of
from hase.ort_analysis.graph.nodes import name_nodes
from hase.ort_analysis.graph.parsing import parse_graph, shape_text
from hase.ort_analysis.graph.source import read_source
from hase.ort_analysis.graph.tensor_shapes import assignments
from hase.recipes.kinds.manifest import MadeModel
from hase.records.kernel_record import numpy_dtype, session_dtype
from hase.records.operators import COPIES
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.model_files import external_files
from hase.utils.model_graphs import LARGE_BYTES
from hase.utils.ort_sessions import PROVIDER_NAMES, open_session


class NodeRow(BaseModel):
    """One node.

    Attributes:
        inside: name of the node whose body it belongs to; "" in the graph itself.
        inputs, outputs: names of tensors.
        types: of the inputs, if they are known: `float32[1,64]`.
        provider: `cpu`, `cuda`, or "" if unknown.
        kernel: id of its kernel, in a derived graph.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    op_type: str
    domain: str = ""
    inside: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    provider: str = ""
    kernel: str = ""

    @property
    def operator(self) -> str:
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    @property
    def is_copy(self) -> bool:
        return self.op_type in COPIES


class NodeList(BaseModel):
    """The nodes of one model, in execution order.

    Attributes:
        way: `static`: all sizes are fixed before the graph is optimised; `dynamic`: a session with dynamic dimensions.
        opsets: versions by domain.
        kernels: ids of the kernels in Hase's record of the model, with the number of nodes of each.
        error: why there are no nodes.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    opsets: dict[str, int] = {}
    nodes: tuple[NodeRow, ...] = ()
    kernels: dict[str, int] = {}
    error: str = ""


def ways_of(model: MadeModel) -> tuple[str, ...]:
    """The ways in which sessions of a model are opened, see `NodeList`."""
    return ("static", "dynamic") if model.dims else ("static",)


def feed_of(session: onnxruntime.InferenceSession, dims: Mapping[str, int],
            steering: Mapping[str, int | bool] | None = None) -> dict[str, Any]:
    """Inputs like those of the runner, for a session that may have open dimensions; inputs in `steering` get that value."""
    feed = {}
    for value in session.get_inputs():
        shape = tuple(dims.get(size, 1) if isinstance(size, str) else size or 1 for size in value.shape)
        dtype = session_dtype(value.type)
        feed[value.name] = random_floats(shape, dtype) if "float" in dtype else np.zeros(shape, numpy_dtype(dtype))
        if value.name in (steering or {}):
            feed[value.name] = np.full(shape, (steering or {})[value.name], numpy_dtype(dtype))
    return feed


def named(path: Path) -> bytes | Path:
    """The model with a name for every node, also in bodies; the file itself if its weights are in another file."""
    proto = onnx.load(str(path), load_external_data=False)
    if external_files(path, proto):
        return path
    name_nodes(proto.graph)
    for node, _ in every_node(proto.graph):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for number, inner in enumerate(attribute.g.node):
                    inner.name = f"{node.name}/{attribute.name}/{number}_{inner.op_type}"
    return proto.SerializeToString()


def every_node(graph: onnx.GraphProto, inside: str = "") -> Iterator[tuple[onnx.NodeProto, str]]:
    """The nodes of a graph and of its bodies, each with the name of the node that holds its body ("" in the main graph)."""
    for node in graph.node:
        yield node, inside
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g, node.name)


def real_nodes(model: MadeModel, path: Path, way: str, folder: Path) -> NodeList:
    """The nodes of a CUDA session: its graph as ONNX Runtime saves it, with the providers in the profile of a run."""
    saved = folder / "saved.onnx"
    entries = {
        "session.record_ep_graph_assignment_info": "1",
        "session.optimized_model_external_initializers_file_name": "saved.weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(LARGE_BYTES)}
    session = open_session(named(path), "cuda", dims=model.dims if way == "static" else None, save_to=saved,
                           profile_prefix=folder / "profile", entries=entries, name=model.name)
    providers = dict(assignments(session))
    error, types = "", {}
    try:
        session.run(None, feed_of(session, model.dims, read_source(path, model.dims).steering))
    except Exception as failed:  # noqa: BLE001 - a session that can't run still has nodes
        error = " ".join(str(failed).split())[:300]
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            providers[name] = PROVIDER_NAMES.get(event["args"]["provider"], event["args"]["provider"])
            types[name] = tuple(f"{dtype}{shape}".replace(" ", "") for tensor_type in event["args"].get("input_type_shape", ())
                                for dtype, shape in tensor_type.items())
    proto = onnx.load(str(saved), load_external_data=False)
    providers |= unnamed_providers(proto, saved, model.name)
    rows = tuple(NodeRow(
        name=node.name, op_type=node.op_type, domain=node.domain, inside=inside, inputs=tuple(node.input),
        outputs=tuple(node.output), types=types.get(node.name, ()),
        provider="cuda" if node.op_type in COPIES else providers.get(node.name, ""))
        for node, inside in every_node(proto.graph))
    return NodeList(model=model.name, way=way, nodes=rows, error=error,
                    opsets={entry.domain: entry.version for entry in proto.opset_import},
                    kernels=recorded_kernels(model, path, way))


def unnamed_providers(proto: onnx.ModelProto, saved: Path, name: str) -> dict[str, str]:
    """The providers of nodes that ONNX Runtime made without a unique name, as in the body of a function. They get names in
    `proto`, and a session of that graph shows their providers."""
    before = Counter(node.name for node in proto.graph.node)
    unclear = [node for node in proto.graph.node if not node.name or before[node.name] > 1]
    if not unclear:
        return {}
    name_nodes(proto.graph)
    onnx.save(proto, str(saved))  # in the folder of its weights
    session = open_session(saved, "cuda", optimize="none", entries={"session.record_ep_graph_assignment_info": "1"}, name=name)
    providers = dict(assignments(session))
    return {node.name: providers.get(node.name, "") for node in unclear}


def recorded_kernels(model: MadeModel, path: Path, way: str) -> dict[str, int]:
    """The kernels in Hase's record of a model on CUDA; none if it can't be analysed."""
    try:
        record = analyze(path, "cuda", model.dims, static=way == "static")
    except UserError:
        return {}
    return dict(Counter(node.kernel_id for node in record.nodes))


def derived_nodes(model: MadeModel, path: Path, way: str) -> NodeList:
    """The nodes of the graph that Hase derives for CUDA on a machine without a GPU, with both branches of an If."""
    graph = parse_graph(path, "cuda", model.dims, static=way == "static")
    branches = [{**model.dims, f"{node.name}.{branch}": 1} for node in graph.nodes if node.op_type == "If"
                for branch in ("then", "else")]
    every = {node.name: (node, graph) for graph in (
        graph, *(parse_graph(path, "cuda", dims, static=way == "static") for dims in branches)) for node in graph.nodes}
    rows = []
    for node, graph in every.values():
        prefix = f"{node.inside}/" if node.inside else ""
        rows.append(NodeRow(
            name=node.name, op_type=node.op_type, domain=node.domain, inside=node.inside,
            inputs=tuple(name.removeprefix(prefix) for name in node.inputs),
            outputs=tuple(name.removeprefix(prefix) for name in node.outputs),
            types=tuple(shape_text(graph.tensors[name]) for name in node.inputs), provider=node.provider,
            kernel="" if node.op_type in COPIES else kernel_of(graph, node).id))
    return NodeList(model=model.name, way=way, nodes=tuple(rows), opsets=graph.opsets,
                    kernels=dict(Counter(row.kernel for row in rows if row.kernel)))


def versions() -> dict[str, str]:
    """The versions of the packages that influence graphs and times."""
    return {name: package_version(name) for name in ("onnxruntime-gpu", "torch", "torchvision", "onnxscript", "onnx")}


class Difference(BaseModel):
    """One node that differs between the two graphs; `what` is `provider`, `operator`, `only real` or `only derived`."""

    model_config = ConfigDict(frozen=True)

    model: str
    what: str
    operator: str
    opset: int | None = None
    types: str = ""
    derived: str = ""
    real: str = ""
    tensor: str = ""


class Compared(BaseModel):
    """A model's derived graph compared with the real one.

    Attributes:
        way: `static` or `dynamic`, see `NodeList`.
        nodes: number of nodes of the real graph, without copies.
        same: number of these that the derived graph has with the same operator and provider.
        copies, derived_copies: numbers of MemcpyToHost and of MemcpyFromHost in each.
        kernels, same_kernels: number of kernels of the real graph as Hase analyses it there, and of those that the derived one
            has.
        error: why nothing could be compared.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str = ""
    nodes: int = 0
    same: int = 0
    copies: tuple[int, int] = (0, 0)
    derived_copies: tuple[int, int] = (0, 0)
    kernels: int = 0
    same_kernels: int = 0
    error: str = ""
    differences: tuple[Difference, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.error and self.nodes == self.same and self.copies == self.derived_copies

    def columns(self) -> dict[str, Any]:
        """As a row of a table."""
        return {"model": self.model, "session": self.way, "nodes": self.nodes, "same": self.same,
                "copies to / from the host": f"{self.copies[0]} / {self.copies[1]}",
                "derived": f"{self.derived_copies[0]} / {self.derived_copies[1]}",
                "kernels": self.kernels, "same kernels": self.same_kernels, "error": self.error or None}


def compare(real: NodeList, derived: NodeList) -> Compared:
    """Compares the derived graph of a model with that of a real session."""
    if derived.error or not real.nodes:
        error = f"derived: {derived.error}" if derived.error else f"real: {real.error}"
        return Compared(model=real.model, way=real.way, error=error)
    nodes = [node for node in real.nodes if not node.is_copy]
    pairs, only_real, only_derived = match(nodes, [node for node in derived.nodes if not node.is_copy])
    unlike = [(node, derived_node) for node, derived_node in pairs
              if (node.operator, node.provider) != (derived_node.operator, derived_node.provider)]
    differences = [_difference(real, "provider" if node.operator == derived_node.operator else "operator", node, derived_node)
                   for node, derived_node in unlike]
    differences += [_difference(real, "only real", node, None) for node in only_real]
    differences += [_difference(real, "only derived", None, derived_node) for derived_node in only_derived]
    return Compared(
        model=real.model, way=real.way, nodes=len(nodes), same=len(pairs) - len(unlike), copies=_copies(real),
        derived_copies=_copies(derived), kernels=sum(real.kernels.values()),
        same_kernels=sum((Counter(real.kernels) & Counter(derived.kernels)).values()), differences=tuple(differences))


def match(real: Sequence[NodeRow], derived: Sequence[NodeRow]) -> tuple[
        list[tuple[NodeRow, NodeRow]], list[NodeRow], list[NodeRow]]:
    """Pairs of matching nodes, the real one first; then the real and the derived nodes without a match.

    Two nodes match if they make a tensor of the same name with the same operator. The others are matched by operator and
    provider, then by operator alone, and at last by the name of a tensor alone.
    """
    left = {id(node): node for node in derived}
    by_output = {name: node for node in derived for name in node.outputs if name}
    pairs: list[tuple[NodeRow, NodeRow]] = []

    def paired(node: NodeRow, candidates: Iterable[NodeRow]) -> bool:
        matching = next((candidate for candidate in candidates if id(candidate) in left), None)
        if matching is not None:
            pairs.append((node, left.pop(id(matching))))
        return matching is not None

    def makers(node: NodeRow) -> list[NodeRow]:
        return [by_output[name] for name in node.outputs if name in by_output]

    waiting = [node for node in real if not paired(node, (
        candidate for candidate in makers(node) if candidate.operator == node.operator))]
    for exact in (True, False):
        waiting = [node for node in waiting if not paired(node, (
            candidate for candidate in derived
            if candidate.operator == node.operator and (candidate.provider == node.provider or not exact)))]
    waiting = [node for node in waiting if not paired(node, makers(node))]
    return pairs, waiting, list(left.values())


def _copies(of: NodeList) -> tuple[int, int]:
    counts = Counter(node.op_type for node in of.nodes)
    return counts["MemcpyToHost"], counts["MemcpyFromHost"]


def _difference(real: NodeList, what: str, node: NodeRow | None, derived: NodeRow | None) -> Difference:
    present = [listed for listed in (node, derived) if listed is not None]

    def side(listed: NodeRow | None) -> str:
        return "" if listed is None else f"{listed.operator} {listed.provider}" if what == "operator" else listed.provider

    return Difference(model=real.model, what=what, operator=present[0].operator, opset=real.opsets.get(present[0].domain),
                      types=" ".join(next((listed.types for listed in present if listed.types), ())), derived=side(derived),
                      real=side(node), tensor=next(iter(present[0].outputs), ""))
