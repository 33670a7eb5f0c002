"""Compares the CUDA graphs that Hase derives without a GPU with those of real sessions, node by node.

On a machine with an NVIDIA GPU, opens a CUDA session for each model that make_models.py wrote (with fixed sizes, and with
dynamic dimensions), lists its nodes with their providers and the copies between host and GPU, and times the model together with
the host probe (evaluator.py --measured predicts it at that pace). Derives the same graphs as on a machine without a GPU, and
prints the differences. Writes into --out: on_gpu.json (latencies and host probes), real_nodes.json.gz and differences.json.
With --derive-only no GPU is needed: the script derives the graphs again and compares them with an existing real_nodes.json.gz.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import gzip
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from hase.benchmark.measuring.quiet_host import all_samples_ms
from hase.benchmark.ort.probes import host_probe
from hase.benchmark.ort.runner import Runner, bind
from hase.inference.evaluation.models import GpuLatency, ListedModel, read_manifest
from hase.kernel_model.building.dummy_data import random_floats
from hase.ort_analysis.graph.analysis import analyze, kernel_of
from hase.ort_analysis.graph.nodes import name_nodes
from hase.ort_analysis.graph.parsing import parse_graph, shape_text
from hase.ort_analysis.graph.shapes import assignments
from hase.ort_analysis.graph.source import read_source
from hase.records.kernel_record import numpy_dtype, session_dtype
from hase.records.measurement import Effort
from hase.records.operators import COPIES
from hase.utils import cli, files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.fingerprint import WITHOUT_GPU, gpu_facts, package_version
from hase.utils.lazy import onnx, onnxruntime
from hase.utils.logger import get_logger
from hase.utils.model_files import external_files
from hase.utils.model_graphs import LARGE_BYTES
from hase.utils.ort_sessions import PROVIDER_NAMES, model_errors, open_session
from hase.utils.paths import ROOT
from hase.utils.timing import summarize

log = get_logger("kinds")

Work = Literal["real", "derived", "times"]
REAL = "real_nodes.json.gz"
PACKAGES = ("onnxruntime-gpu", "torch", "torchvision", "onnxscript", "onnx")  # that influence graphs and times
MOST_RUNS = 10 ** 6  # of a model; a measurement ends by time, not by the number of runs
TABLE_ROWS = 60  # of differences on the console; the file has all
EXAMPLES = """
python recipes/kinds/compare_on_gpu.py out/kinds --out out/kinds_on_gpu --jobs 8
python recipes/kinds/compare_on_gpu.py out/kinds --out out/kinds_on_gpu --derive-only
"""


class NodeRow(Frozen):
    """One node; `inside` is the node whose body holds it ("" in the main graph), `types` are like `float32[1,64]`."""

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


class NodeList(Frozen):
    """The nodes of one model, in execution order."""

    model: str
    way: str  # `static`: all sizes are fixed before the graph is optimised; `dynamic`: a session with dynamic dimensions
    opsets: dict[str, int] = {}  # versions by domain
    nodes: tuple[NodeRow, ...] = ()
    kernels: dict[str, int] = {}  # number of nodes by kernel id, in Hase's record of the model
    error: str = ""  # why there are no nodes


def ways_of(model: ListedModel) -> tuple[str, ...]:
    """The ways to open sessions of a model, see `NodeList`."""
    return ("static", "dynamic") if model.dims else ("static",)


def feed_of(session: onnxruntime.InferenceSession, dims: Mapping[str, int],
            steering: Mapping[str, int | bool] | None = None) -> dict[str, Any]:
    """Inputs like the runner's, for a session that may have open dimensions; inputs in `steering` get that value."""
    feed = {}
    for value in session.get_inputs():
        shape = tuple(dims.get(size, 1) if isinstance(size, str) else size or 1 for size in value.shape)
        dtype = session_dtype(value.type)
        feed[value.name] = random_floats(shape, dtype) if "float" in dtype else np.zeros(shape, numpy_dtype(dtype))
        if value.name in (steering or {}):
            feed[value.name] = np.full(shape, (steering or {})[value.name], numpy_dtype(dtype))
    return feed


def named(path: Path) -> bytes | Path:
    """The model with a name for every node, also in bodies; the file itself if its weights are separate."""
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
    """Nodes of a graph and its bodies, each with the name of the node that holds its body ("" in the main graph)."""
    for node in graph.node:
        yield node, inside
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g, node.name)


def real_nodes(model: ListedModel, path: Path, way: str, folder: Path) -> NodeList:
    """Nodes of a CUDA session: the graph that ONNX Runtime saves, with providers from the profile of a run."""
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
    """Providers of nodes that ORT saved without a unique name, as in functions.

    These nodes get names in `proto`, and a session of that graph shows their providers.
    """
    before = Counter(node.name for node in proto.graph.node)
    unclear = [node for node in proto.graph.node if not node.name or before[node.name] > 1]
    if not unclear:
        return {}
    name_nodes(proto.graph)
    onnx.save(proto, str(saved))  # in the folder of its weights
    session = open_session(saved, "cuda", optimize="none", entries={"session.record_ep_graph_assignment_info": "1"}, name=name)
    providers = dict(assignments(session))
    return {node.name: providers.get(node.name, "") for node in unclear}


def recorded_kernels(model: ListedModel, path: Path, way: str) -> dict[str, int]:
    """Kernels in Hase's record of a model on CUDA; none if it cannot be analysed."""
    try:
        record = analyze(path, "cuda", model.dims, static=way == "static")
    except UserError:
        return {}
    return dict(Counter(node.kernel_id for node in record.nodes))


def derived_nodes(model: ListedModel, path: Path, way: str) -> NodeList:
    """Nodes of the graph that Hase derives for CUDA without a GPU, with both branches of an If."""
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


class Difference(Frozen):
    """A node that differs between the graphs; `what` is `provider`, `operator`, `only real` or `only derived`."""

    model: str
    what: str
    operator: str
    opset: int | None = None
    types: str = ""
    derived: str = ""
    real: str = ""
    tensor: str = ""


class Compared(Frozen):
    """A model's derived graph compared with the real one."""

    model: str
    way: str = ""  # see `NodeList`
    nodes: int = 0  # of the real graph, without copies
    same: int = 0  # of these, how many the derived graph has with the same operator and provider
    copies: tuple[int, int] = (0, 0)  # MemcpyToHost and MemcpyFromHost
    derived_copies: tuple[int, int] = (0, 0)
    kernels: int = 0  # that Hase finds in the real graph
    same_kernels: int = 0  # of these, how many the derived graph has
    error: str = ""  # why nothing could be compared
    differences: tuple[Difference, ...] = ()

    @property
    def agrees(self) -> bool:
        return not self.error and self.nodes == self.same and self.copies == self.derived_copies

    def columns(self) -> dict[str, Any]:
        """The comparison as a table row."""
        return {"model": self.model, "session": self.way, "nodes": self.nodes, "same": self.same,
                "copies to / from the host": f"{self.copies[0]} / {self.copies[1]}",
                "derived": f"{self.derived_copies[0]} / {self.derived_copies[1]}",
                "kernels": self.kernels, "same kernels": self.same_kernels, "error": self.error or None}


def compare(real: NodeList, derived: NodeList) -> Compared:
    """Compares a model's derived graph with that of a real session."""
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
    """Pairs of matching nodes (real, derived), then the unmatched real and derived nodes.

    Nodes match by tensor name and operator; then by operator and provider, by operator, and finally by tensor name.
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


def _copies(nodes: NodeList) -> tuple[int, int]:
    counts = Counter(node.op_type for node in nodes.nodes)
    return counts["MemcpyToHost"], counts["MemcpyFromHost"]


def _difference(real: NodeList, what: str, node: NodeRow | None, derived: NodeRow | None) -> Difference:
    present = [listed for listed in (node, derived) if listed is not None]

    def side(listed: NodeRow | None) -> str:
        return "" if listed is None else f"{listed.operator} {listed.provider}" if what == "operator" else listed.provider

    return Difference(model=real.model, what=what, operator=present[0].operator, opset=real.opsets.get(present[0].domain),
                      types=" ".join(next((listed.types for listed in present if listed.types), ())), derived=side(derived),
                      real=side(node), tensor=next(iter(present[0].outputs), ""))


def gpu_latency(model: ListedModel, path: Path, way: str, budget_s: float, device: str = "cuda") -> GpuLatency:
    """Times a CUDA session (`cpu` in tests) with the host probe; tensors stay on the device where possible."""
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


def results_of(work: Work, model: ListedModel, folder: Path, budget_s: float) -> list[dict[str, Any]]:
    """Does one piece of work for one model in this process; a failure is a result too."""
    path, results = folder / model.file, []
    for way in ways_of(model):
        made: Any
        try:
            with temporary_folder() as scratch:
                if work == "real":
                    made = real_nodes(model, path, way, scratch)
                elif work == "derived":
                    made = derived_nodes(model, path, way)
                else:
                    made = gpu_latency(model, path, way, budget_s)
        except Exception as error:  # noqa: BLE001 - whatever fails, the other models go on
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            made = GpuLatency(model=model.name, way=way, error=message) if work == "times" else NodeList(
                model=model.name, way=way, error=message)
        results.append(made.model_dump(mode="json"))
    return results


def work_through(work: Work, models: Sequence[ListedModel], folder: Path, lines: Path, budget_s: float, limit_s: int) -> None:
    """Does a piece of work for several models, one output line each. A model that hangs ends this process (SIGALRM)."""
    for model in models:
        signal.alarm(limit_s)
        results = results_of(work, model, folder, budget_s)
        signal.alarm(0)
        files.append_line(lines, json.dumps({"model": model.name, "found": results}))


def in_processes(work: Work, names: Sequence[str], folder: Path, scratch: Path, jobs: int, budget_s: float,
                 limit_s: int) -> list[dict[str, Any]]:
    """Does a piece of work for models in `jobs` processes. If a process dies, only the model at fault is lost."""
    def chunk(number: int) -> dict[str, list[dict[str, Any]]]:
        left, lines = list(names[number::jobs]), scratch / f"{work}{number}.jsonl"
        results: dict[str, list[dict[str, Any]]] = {}
        while left:
            options = ["--work", work, "--lines", str(lines), "--budget-s", str(budget_s), "--limit-s", str(limit_s), "--only"]
            environment = os.environ | ({WITHOUT_GPU: "1"} if work == "derived" else {})
            done = subprocess.run([sys.executable, __file__, str(folder), "--out", str(scratch), *options, *left], cwd=ROOT,
                                  env=environment, capture_output=True, text=True)
            results = {line["model"]: line["found"] for line in map(json.loads, files.read_lines(lines))}
            left = [name for name in left if name not in results]
            if left:
                last = (done.stderr.strip().splitlines() or [""])[-1][:300]
                log.warning("%s, %s: its process ended with %d %s", left[0], work, done.returncode, last)
                failed = {"model": left[0], "way": work, "error": f"its process ended with {done.returncode} {last}"}
                files.append_line(lines, json.dumps({"model": left[0], "found": [failed]}))
                results[left.pop(0)] = [failed]
        return results

    with ThreadPoolExecutor(jobs) as pool:
        every = {name: results for part in pool.map(chunk, range(jobs)) for name, results in part.items()}
    return [row for name in names for row in every.get(name, ())]


def read_real(path: Path) -> list[NodeList]:
    """The nodes of real sessions; `UserError` if there is no such file."""
    if not path.exists():
        raise UserError(f"{path}: no such file; run without --derive-only on a machine with an NVIDIA GPU, and copy it here")
    return [NodeList.model_validate(row) for row in json.loads(gzip.decompress(path.read_bytes()))["sessions"]]


def compare_all(real: Sequence[NodeList], derived: Sequence[NodeList]) -> list[Compared]:
    """Compares each derived graph with the real session of the same model and kind (static or dynamic), if any."""
    sessions = {(session.model, session.way): session for session in real}
    return [compare(sessions[graph.model, graph.way], graph) for graph in derived if (graph.model, graph.way) in sessions]


def difference_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Differences of all models; equal ones are counted."""
    alike: Counter[tuple[Any, ...]] = Counter()
    where: dict[tuple[Any, ...], set[str]] = {}
    for model in compared:
        for difference in model.differences:
            dtypes = " ".join(text.partition("[")[0] or "-" for text in difference.types.split())
            key = (difference.what, difference.operator, difference.opset, dtypes, difference.derived, difference.real)
            alike[key] += 1
            where.setdefault(key, set()).add(model.model)
    return [dict(zip(("difference", "operator", "opset", "types", "derived", "real"), key, strict=True))
            | {"nodes": count, "models": ", ".join(sorted(where[key])[:4])} for key, count in alike.most_common()]


def report(compared: Sequence[Compared]) -> None:
    """Prints the differences, and how many graphs and nodes agree."""
    cli.print_table([model.columns() for model in compared if not model.agrees], "graphs that differ")
    rows = difference_rows(compared)
    print()
    cli.print_table(rows[:TABLE_ROWS], "how they differ")
    nodes, same = sum(model.nodes for model in compared), sum(model.same for model in compared)
    print(f"\n{sum(model.agrees for model in compared)} of {len(compared)} graphs agree; {same} of {nodes} nodes "
          f"({same / max(1, nodes):.2%}) have the same operator and provider")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where make_models.py wrote the models")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models alone")
    parser.add_argument("--derive-only", action="store_true", help="without a GPU: compare with the real nodes in --out")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes in parallel (default: 2); "
                        "models are always timed one at a time")
    parser.add_argument("--budget-s", type=cli.positive, default=1.0, metavar="S", help="to time each session (default: 1)")
    parser.add_argument("--limit-s", type=int, default=60, metavar="S", help="for each model (default: 60)")
    parser.add_argument("--no-times", action="store_true", help="leave the latencies out")
    parser.add_argument("--work", choices=("real", "derived", "times"), help="used by the script itself: one piece of work")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="used by the script itself: output file")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be positive")
    cli.start(args)
    models = read_manifest(args.folder).chosen(args.only)
    if args.work:
        work_through(args.work, models, args.folder, args.lines, args.budget_s, args.limit_s)
        return 0
    if not args.derive_only and not gpu_facts():
        raise UserError("this machine has no NVIDIA GPU; --derive-only compares with files from a machine with one")
    names, folder = [model.name for model in models], args.folder.resolve()
    made_by = {"gpu": gpu_facts(), "versions": {name: package_version(name) for name in PACKAGES}}
    args.out.mkdir(parents=True, exist_ok=True)
    with temporary_folder() as scratch:
        def each(work: Work, jobs: int) -> list[dict[str, Any]]:
            log.info("%s: %d models", work, len(names))
            return in_processes(work, names, folder, scratch, jobs, args.budget_s, args.limit_s)

        if not args.derive_only:
            real = each("real", args.jobs)
            document = json.dumps({**made_by, "sessions": real})
            files.write_bytes(args.out / REAL, gzip.compress(document.encode()))
        times = [] if args.derive_only or args.no_times else each("times", 1)
        derived = [NodeList.model_validate(row) for row in each("derived", args.jobs)]
    compared = compare_all(read_real(args.out / REAL), derived)
    files.write_json(args.out / "differences.json", [model.model_dump(mode="json") for model in compared])
    if times:
        # the latency is that of the session that a user opens: with dynamic dimensions, if the model has any
        latest = {row["model"]: row for row in sorted(times, key=lambda row: row["way"] == "dynamic") if row.get("latency_ms")}
        files.write_json(args.out / "on_gpu.json", {**made_by, "models": list(latest.values()), "sessions": times})
    if args.json:
        cli.print_json({"graphs": [model.columns() for model in compared], "differences": difference_rows(compared)})
    else:
        report(compared)
    return 0


if __name__ == "__main__":
    cli.run(main)
