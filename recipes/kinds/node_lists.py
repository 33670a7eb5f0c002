"""The nodes of a CUDA session as it really runs, and of the graph that Hase derives without a GPU, as plain rows to compare."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from pydantic import BaseModel, ConfigDict

from benchmark.measuring.effort import Effort
from benchmark.measuring.quiet_host import all_samples_ms
from benchmark.runtimes.ort.host_probe import host_probe
from benchmark.runtimes.ort.runner import Runner, bind
from kernel_model.building.dummy_data import random_floats
from ort_analysis.cuda.capture import COPIES
from ort_analysis.graph.analysis import analyze, kernel_of
from ort_analysis.graph.parsed_nodes import name_nodes
from ort_analysis.graph.parsing import EXTERNAL_BYTES, parse_graph, shape_text
from ort_analysis.graph.shape_query import assignments
from ort_analysis.graph.source import read_source
from ort_analysis.records.elements import numpy_dtype, session_dtype
from recipes.kinds.manifest import MadeModel
from utils.errors import UserError
from utils.fingerprint import package_version
from utils.model_files import external_files
from utils.ort_sessions import PROVIDER_NAMES, model_errors, open_session
from utils.timing import summarize

if TYPE_CHECKING:
    import onnx
    import onnxruntime

MOST_RUNS = 10 ** 6  # the time ends a measurement, not their number


class NodeRow(BaseModel):
    """One node.

    Attributes:
        inside: name of the node whose body it belongs to; "" in the graph itself.
        inputs, outputs: names of tensors.
        types: of the inputs, where they are known: `float32[1,64]`.
        provider: `cpu`, `cuda`, or "" where nothing says.
        kernel: id of its kernel, of a derived graph.
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
        way: `static`: every size fixed before the graph is optimised; `dynamic`: as a session with dynamic dimensions runs.
        opsets: versions by domain.
        kernels: ids of the kernels as Hase analyses the model, with how often each stands there.
        error: why there is none.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    opsets: dict[str, int] = {}
    nodes: tuple[NodeRow, ...] = ()
    kernels: dict[str, int] = {}
    error: str = ""


class GpuLatency(BaseModel):
    """How long a model takes on the GPU, in ms: the median of `runs` runs, tensors on the device or (`io` host) not.

    Attributes:
        host_probe_us: what the probe of the host took beside these runs (benchmark/measuring/quiet_host.py); None in older
        files.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    latency_ms: float | None = None
    p95_ms: float | None = None
    runs: int = 0
    io: str = ""
    host_probe_us: float | None = None
    error: str = ""


def ways_of(model: MadeModel) -> tuple[str, ...]:
    """In which ways its sessions are opened."""
    return ("static", "dynamic") if model.dims else ("static",)


def feed_of(session: onnxruntime.InferenceSession, dims: Mapping[str, int],
            steering: Mapping[str, int | bool] | None = None) -> dict[str, Any]:
    """Inputs as the runner makes them, for a session whose dimensions may be open; `steering` ones get the value given."""
    feed = {}
    for value in session.get_inputs():
        shape = tuple(dims.get(size, 1) if isinstance(size, str) else size or 1 for size in value.shape)
        dtype = session_dtype(value.type)
        feed[value.name] = random_floats(shape, dtype) if "float" in dtype else np.zeros(shape, numpy_dtype(dtype))
        if value.name in (steering or {}):
            feed[value.name] = np.full(shape, (steering or {})[value.name], numpy_dtype(dtype))
    return feed


def named(path: Path) -> bytes | Path:
    """The model with a name for every node, those of bodies too; the file itself where its weights lie elsewhere."""
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
    """The nodes of a graph and of all bodies in it, each with the name of the node that it is inside of."""
    for node in graph.node:
        yield node, inside
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g, node.name)


def real_nodes(model: MadeModel, path: Path, way: str, folder: Path) -> NodeList:
    """What a CUDA session runs: its graph as ONNX Runtime saves it, each node's provider as its profile of a run tells."""
    saved = folder / "saved.onnx"
    entries = {
        "session.record_ep_graph_assignment_info": "1",
        "session.optimized_model_external_initializers_file_name": "saved.weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(EXTERNAL_BYTES)}
    session = open_session(named(path), "cuda", dims=model.dims if way == "static" else None, save_to=saved,
                           profile_prefix=folder / "profile", entries=entries, name=model.name)
    providers = dict(assignments(session))
    error, types = "", {}
    try:
        session.run(None, feed_of(session, model.dims, read_source(path, model.dims).steering))
    except Exception as failed:  # noqa: BLE001 - a session that opens and can't run still tells its nodes
        error = " ".join(str(failed).split())[:300]
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            providers[name] = PROVIDER_NAMES.get(event["args"]["provider"], event["args"]["provider"])
            types[name] = tuple(f"{dtype}{shape}".replace(" ", "") for one in event["args"].get("input_type_shape", ())
                                for dtype, shape in one.items())
    proto = onnx.load(str(saved), load_external_data=False)
    providers |= unnamed_providers(proto, saved, model.name)
    rows = tuple(NodeRow(
        name=node.name, op_type=node.op_type, domain=node.domain, inside=inside, inputs=tuple(node.input),
        outputs=tuple(node.output), types=types.get(node.name, ()),
        provider="cuda" if node.op_type in COPIES else providers.get(node.name, ""))
        for node, inside in every_node(proto.graph))
    return NodeList(model=model.name, way=way, nodes=rows, error=error,
                    opsets={entry.domain: entry.version for entry in proto.opset_import},
                    kernels=hases_kernels(model, path, way))


def unnamed_providers(proto: onnx.ModelProto, saved: Path, name: str) -> dict[str, str]:
    """The providers of nodes that ONNX Runtime made without a name, or with one twice, as for the body of a function. They get
    names in `proto`, and a session of the graph as it stands says who runs them."""
    before = Counter(node.name for node in proto.graph.node)
    unclear = [node for node in proto.graph.node if not node.name or before[node.name] > 1]
    if not unclear:
        return {}
    name_nodes(proto.graph)
    onnx.save(proto, str(saved))  # beside the weights that it names
    session = open_session(saved, "cuda", optimize="none", entries={"session.record_ep_graph_assignment_info": "1"}, name=name)
    found = dict(assignments(session))
    return {node.name: found.get(node.name, "") for node in unclear}


def hases_kernels(model: MadeModel, path: Path, way: str) -> dict[str, int]:
    """The kernels of Hase's own record of a model on CUDA; none where it can't be analysed."""
    try:
        record = analyze(path, "cuda", model.dims, static=way == "static")
    except UserError:
        return {}
    return dict(Counter(node.kernel_id for node in record.nodes))


def derived_nodes(model: MadeModel, path: Path, way: str) -> NodeList:
    """What Hase takes a CUDA session to run, on a machine without a GPU; both branches of an If."""
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


def gpu_latency(model: MadeModel, path: Path, way: str, budget_s: float, device: str = "cuda") -> GpuLatency:
    """Times a CUDA session (in tests one of `cpu`) as its host is, and the host's probe beside it; with numpy arrays where its
    outputs can't stay on the device (maps, say)."""
    probe = host_probe(device)
    session = open_session(path, device, dims=model.dims if way == "static" else None, name=model.name)
    feed = feed_of(session, model.dims, read_source(path, model.dims).steering)
    io = "device" if all(value.type.startswith("tensor(") and "string" not in value.type
                         for value in (*session.get_inputs(), *session.get_outputs())) else "host"
    runner = Runner(session=session, name=model.name, device=device, io=io,
                    run_once=bind(session, feed, device, io))
    runner.warm_up(5)
    with model_errors(model.name):
        timed = all_samples_ms(probe, runner.run_s, Effort(budget_s=budget_s, least_runs=20, most_runs=MOST_RUNS))
    statistics = summarize(timed.samples_ms)
    return GpuLatency(model=model.name, way=way, latency_ms=statistics.median_ms, p95_ms=statistics.p95_ms,
                      runs=statistics.runs, io=io, host_probe_us=timed.probe_us)


class Difference(BaseModel):
    """One node that is not the same in both graphs; `what` is `provider`, `operator`, `only real` or `only derived`."""

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
    """A model's derived graph against the real one.

    Attributes:
        way: how the session was opened.
        nodes: of the real graph, copies left out.
        same: of these, how many stand in the derived graph with the same operator and provider.
        copies, derived_copies: number of MemcpyToHost and of MemcpyFromHost in each.
        kernels, same_kernels: of the real graph as Hase analyses it there, and how many of them the derived one has.
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
    """The derived graph of a model against that of a real session."""
    if derived.error or not real.nodes:
        told = f"derived: {derived.error}" if derived.error else f"real: {real.error}"
        return Compared(model=real.model, way=real.way, error=told)
    left = [node for node in derived.nodes if not node.is_copy]
    waiting: list[NodeRow] = []
    differences: list[Difference] = []
    by_output = {name: node for node in left for name in node.outputs if name}
    matched: set[int] = set()
    same = 0

    def pair(node: NodeRow, other: NodeRow) -> None:
        nonlocal same
        matched.add(id(other))
        if (node.operator, node.provider) == (other.operator, other.provider):
            same += 1
            return
        what = "provider" if node.operator == other.operator else "operator"
        differences.append(_difference(real, what, node, other))

    ours = [node for node in real.nodes if not node.is_copy]
    for node in ours:
        other = next((by_output[name] for name in node.outputs if name in by_output and id(by_output[name]) not in matched
                      and by_output[name].operator == node.operator), None)
        if other is None:
            waiting.append(node)
        else:
            pair(node, other)
    still: list[NodeRow] = []
    for exact in (True, False):  # what makes tensors of other names: the same operator and provider, then the operator alone
        still = []
        for node in waiting:
            other = next((one for one in left if id(one) not in matched and one.operator == node.operator
                          and (one.provider == node.provider or not exact)), None)
            if other is None:
                still.append(node)
            else:
                pair(node, other)
        waiting = still
    for node in waiting:
        other = next((by_output[name] for name in node.outputs if name in by_output
                      and id(by_output[name]) not in matched), None)
        if other is None:
            differences.append(_difference(real, "only real", node, None))
        else:
            pair(node, other)
    differences += [_difference(real, "only derived", None, one) for one in left if id(one) not in matched]
    return Compared(
        model=real.model, way=real.way, nodes=len(ours), same=same, copies=_copies(real), derived_copies=_copies(derived),
        kernels=sum(real.kernels.values()), same_kernels=sum((Counter(real.kernels) & Counter(derived.kernels)).values()),
        differences=tuple(differences))


def _copies(of: NodeList) -> tuple[int, int]:
    counts = Counter(node.op_type for node in of.nodes)
    return counts[COPIES[0]], counts[COPIES[1]]


def _difference(real: NodeList, what: str, node: NodeRow | None, other: NodeRow | None) -> Difference:
    there = [one for one in (node, other) if one is not None]

    def told(one: NodeRow | None) -> str:
        return "" if one is None else f"{one.operator} {one.provider}" if what == "operator" else one.provider

    return Difference(model=real.model, what=what, operator=there[0].operator, opset=real.opsets.get(there[0].domain),
                      types=" ".join(next((one.types for one in there if one.types), ())), derived=told(other),
                      real=told(node), tensor=next(iter(there[0].outputs), ""))


def versions() -> dict[str, str]:
    """Of the packages that decide about graphs and times."""
    return {name: package_version(name) for name in ("onnxruntime-gpu", "torch", "torchvision", "onnxscript", "onnx")}
