"""Phase 2.2: which original nodes ORT fused into each node it runs, and every kernel of the model as a record.

Reads ONNX files (by default all in model_zoo/models). Writes one record a model to
ort_analysis/ort_kernel_record/<flavour>/<model>.json, and index.json beside them: every kernel of all models by type,
with every shape seen.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ort_analysis.kernel_types import SUM_INPUT, describe_kernel
from ort_analysis.ort_graph_parser import ParsedGraph, ParsedNode, parse_graph
from ort_analysis.records import (
    IndexEntry,
    Kernel,
    KernelIndex,
    KernelInput,
    ModelRecord,
    Node,
    Origin,
    Tensor,
    index_path,
    load_record,
    record_name,
    record_path,
)
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import Flavour
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import Workspace, model_files
from utils.processes import CRASHED, each_in_a_process

if TYPE_CHECKING:
    import onnx

log = get_logger("fusion")
BLOCKED_DOMAIN = "com.microsoft.nchwc"  # ORT's blocked CPU layout; its nodes are named `<tensor they make>_nchwc`
BLOCKED_SUFFIX = "_nchwc"
SIZE_INPUTS = {"Slice": (1, 2, 3, 4), "Range": (0, 1, 2), "ConstantOfShape": (0,), "Tile": (1,), "Pad": (1, 3),
               "Resize": (2, 3), "Upsample": (1,), "Split": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "TopK": (1,),
               "OneHot": (1,), "CenterCropPad": (1,)}  # of Reshape and Expand the outputs tell
EXAMPLES = """
python ort_analysis/fusion_detector.py
python ort_analysis/fusion_detector.py --model resnet18.onnx --dim batch=1,8,64
python ort_analysis/fusion_detector.py --model model.onnx --device cuda --json
"""


class OriginFinder:
    """Maps tensors of the optimised graph to tensors of the original, and regions between them to original nodes.

    ORT keeps a tensor's name through most fusions, so the original nodes of a fused node lie between its named outputs
    and its named inputs. Where it makes tensors of its own (blocked layouts, split fusions), neighbours that are linked
    by such tensors are taken together and share their origins.
    """

    def __init__(self, original: onnx.GraphProto, nodes: tuple[ParsedNode, ...]) -> None:
        self.producer = {name: node for node in original.node for name in node.output if name}
        self.number = {id(node): index for index, node in enumerate(original.node)}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in original.node:
            for name in node.input:
                self.consumers[name].append(node)
        self.constants = {tensor.name for tensor in original.initializer}
        self.inputs = {value.name for value in original.input} - self.constants
        self.known = set(self.producer) | self.inputs
        self.alias = self._blocked_tensors(nodes)

    def resolve(self, tensor: str) -> str | None:
        """The original's name of a tensor of the optimised graph; None for one that ORT made up."""
        return tensor if tensor in self.known else self.alias.get(tensor)

    def _blocked_tensors(self, nodes: tuple[ParsedNode, ...]) -> dict[str, str]:
        """The original tensor of each blocked one: from the node's name, then past what was fused into it later."""
        alias: dict[str, str] = {}
        for node in nodes:
            if node.domain != BLOCKED_DOMAIN:
                continue
            if node.op_type in ("ReorderInput", "ReorderOutput"):
                source, made = node.inputs[0], node.outputs[0]
                if made not in self.known and (found := source if source in self.known else alias.get(source)):
                    alias[made] = found
                continue
            base = node.name.partition(BLOCKED_SUFFIX)[0]
            if base not in self.known or not node.outputs or node.outputs[0] in self.known:
                continue
            if len(node.inputs) > SUM_INPUT["Conv"] and node.inputs[SUM_INPUT["Conv"]]:
                base = self._past(base, "Add")
            if activation := node.attributes.get("activation"):
                base = self._past(base, str(activation))
            alias[node.outputs[0]] = base
        return alias

    def _past(self, tensor: str, op_type: str) -> str:
        """The output of the `op_type` node that consumes `tensor`, or `tensor` where such a node made it or none does."""
        made_by = self.producer.get(tensor)
        if made_by is not None and made_by.op_type == op_type:
            return tensor
        after = [node for node in self.consumers[tensor] if node.op_type == op_type]
        return str(after[0].output[0]) if len(after) == 1 else tensor

    def region(self, outputs: set[str], inputs: set[str]) -> tuple[Origin, ...]:
        """The original nodes between original tensors `inputs` and `outputs`, in the original's order.

        Nodes that compute from constants alone were folded into weights and are origins too.
        """
        found: dict[int, Any] = {}
        waiting = [name for name in outputs if name not in inputs]
        seen = set(waiting)
        while waiting:
            node = self.producer.get(waiting.pop())
            if node is None:
                continue
            found[self.number[id(node)]] = node
            for name in node.input:
                if name and name not in inputs and name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return tuple(Origin(name=node.name or f"{node.op_type}_{number}", op_type=node.op_type)
                     for number, node in sorted(found.items()))

    def origins(self, nodes: tuple[ParsedNode, ...]) -> list[tuple[Origin, ...]]:
        """The original nodes that each node of the optimised graph stands for."""
        group_of = [[index] for index in range(len(nodes))]  # joined here: to import networkx takes longer than a prediction
        maker = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
        for index, node in enumerate(nodes):
            for name in node.inputs:
                if name in maker and self.resolve(name) is None and group_of[index] is not group_of[maker[name]]:
                    larger, smaller = sorted((group_of[index], group_of[maker[name]]), key=len, reverse=True)
                    larger += smaller
                    for moved in smaller:
                        group_of[moved] = larger
        result: list[tuple[Origin, ...]] = [()] * len(nodes)
        for group in {id(found): found for found in group_of}.values():
            outputs = {found for i in group for name in nodes[i].outputs if name and (found := self.resolve(name))}
            inputs = {found for i in group for name in nodes[i].inputs if name and (found := self.resolve(name))}
            region = self.region(outputs, inputs)
            for index in group:
                result[index] = region
        return result


def _with_value(graph: ParsedGraph, node: ParsedNode, place: int, name: str) -> KernelInput:
    """A node's input; with its value where that sets the output's size and the graph computes it from shapes."""
    tensor = graph.tensors[name]
    if tensor.constant or place not in SIZE_INPUTS.get(node.op_type, ()):
        return tensor
    return tensor.model_copy(update={"values": graph.computed.get(name)})


def kernel_of(graph: ParsedGraph, node: ParsedNode) -> Kernel:
    """The kernel of a node of the optimised graph."""
    inputs = [_with_value(graph, node, place, name) for place, name in enumerate(node.inputs)]
    while inputs and not inputs[-1].present:
        inputs.pop()
    outputs = [Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in node.outputs]
    opset = graph.opsets.get(node.domain, graph.opsets.get("ai.onnx", 1) if not node.domain else 1)
    return describe_kernel(node.op_type, node.domain, opset, node.attributes, inputs, outputs)


def origins_by_node(graph: ParsedGraph) -> dict[str, tuple[Origin, ...]]:
    """The original nodes that each node stands for, by its name; those of a body stand for nodes of that body."""
    found: dict[str, tuple[Origin, ...]] = {}
    for inside, original in {"": graph.source.graph_only.graph, **graph.bodies}.items():
        prefix = f"{inside}/" if inside else ""

        def bare(names: tuple[str, ...], prefix: str = prefix) -> tuple[str, ...]:
            return tuple(name.removeprefix(prefix) for name in names)

        nodes = tuple(replace(node, inputs=bare(node.inputs), outputs=bare(node.outputs))
                      for node in graph.nodes if node.inside == inside)
        found |= zip((node.name for node in nodes), OriginFinder(original, nodes).origins(nodes), strict=True)
    return found


def record_of(graph: ParsedGraph) -> ModelRecord:
    """The record of a parsed model."""
    origins_of = origins_by_node(graph)
    kernels = [kernel_of(graph, node) for node in graph.nodes]
    nodes = tuple(
        Node(name=node.name, kernel_id=kernel.id, provider=node.provider, inputs=node.inputs, outputs=node.outputs,
             origins=origins_of[node.name], runs=node.runs, inside=node.inside)
        for node, kernel in zip(graph.nodes, kernels, strict=True))

    def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
        return {name: Tensor(dtype=graph.tensors[name].dtype, shape=graph.tensors[name].shape) for name in names}

    return ModelRecord(
        model=record_name(graph.source.name, graph.source.dims, graph.static), sha256=graph.source.sha256,
        dims=graph.source.dims, flavour=graph.flavour, derived=graph.derived, static=graph.static, assumed=graph.assumed,
        guessed=graph.guessed,
        inputs=tensors(graph.inputs), outputs=tensors(graph.outputs),
        weight_bytes=sum(tensor.bytes for tensor in graph.tensors.values() if tensor.constant),
        opsets=graph.opsets, kernels={kernel.id: kernel for kernel in kernels}, nodes=nodes,
    )


def analyze(model: Path | onnx.ModelProto, execution_provider: str = "auto", dims: Mapping[str, int] | None = None,
            name: str | None = None, static: bool = False) -> ModelRecord:
    """The kernels of a model as `cpu` or `cuda` runs it (`auto`: what this machine has); arguments as of `parse_graph`.

    Raises:
        UserError: as `ort_graph_parser.parse_graph`.
    """
    return record_of(parse_graph(model, execution_provider, dims, name, static))


def build_index(flavour: Flavour, records: list[ModelRecord]) -> KernelIndex:
    """All kernels of `records` by type, with the models that hold each."""
    models: dict[str, list[str]] = defaultdict(list)
    kernels: dict[str, Kernel] = {}
    for record in records:
        for kernel in record.kernels.values():
            kernels[kernel.id] = kernel
            models[kernel.id].append(record.model)
    index: dict[str, dict[str, IndexEntry]] = {}
    for kernel in sorted(kernels.values(), key=lambda k: (k.type, k.id)):
        index.setdefault(kernel.type, {})[kernel.id] = IndexEntry(kernel=kernel, models=tuple(models[kernel.id]))
    return KernelIndex(flavour=flavour, kernels=index)


def update_index(workspace: Workspace, flavour: Flavour) -> KernelIndex:
    """Writes the index of a flavour from all its records."""
    folder = workspace.kernel_records / flavour.name
    records = [load_record(path) for path in sorted(folder.glob("*.json")) if path.name != "index.json"]
    index = build_index(flavour, records)
    files.write_json(index_path(workspace, flavour), index)
    return index


def summary(record: ModelRecord) -> dict[str, Any]:
    """A record in one row: nodes, unique kernels, GFLOP, weights, and how often each type stands in it."""
    counts = Counter(record.kernel_of(node).type for node in record.nodes)
    return {
        "model": record.model, "flavour": record.flavour.name, "nodes": len(record.nodes), "kernels": len(record.kernels),
        "GFLOP": sum(node.runs * record.kernel_of(node).flops for node in record.nodes) / 1e9,
        "weights_MiB": record.weight_bytes / 2**20,
        "types": " ".join(f"{name}×{count}" for name, count in counts.most_common()),
    }


def fusion_rows(record: ModelRecord) -> list[dict[str, Any]]:
    """One row a node: its kernel type, id, and the original nodes in it."""
    return [{"node": node.name, "type": record.kernel_of(node).type, "kernel": node.kernel_id,
             "origins": " + ".join(f"{o.op_type}({o.name})" for o in node.origins) or "(inserted by ORT)"}
            for node in record.nodes]


def write_record(workspace: Workspace, path: Path, device: str, dims: dict[str, int], static: bool) -> ModelRecord | UserError:
    """Analyses one model and writes its record; what is wrong with the model comes back."""
    try:
        record = analyze(path, device, dims, static=static)
    except UserError as error:
        return error
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    return record


def write_records(workspace: Workspace, work: Sequence[tuple[Path, dict[str, int]]], device: str,
                  jobs: int, static: bool = False) -> list[ModelRecord | UserError]:
    """`write_record` for models and sizes of their dynamic dimensions, `jobs` at a time, in the order of `work`. Of several,
    one that takes ONNX Runtime down costs only itself."""
    if len(work) == 1:
        return [_write_one(workspace, device, static, one) for one in work]
    return each_in_a_process(partial(_write_one, workspace, device, static), work, jobs, _crashed, "analysing")


def _write_one(workspace: Workspace, device: str, static: bool,
               one: tuple[Path, dict[str, int]]) -> ModelRecord | UserError:
    return write_record(workspace, one[0], device, one[1], static)


def _crashed(one: tuple[Path, dict[str, int]]) -> ModelRecord | UserError:
    return UserError(f"{one[0]}: {CRASHED}")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, action="append",
                        help="an ONNX file (repeatable; default: all in model_zoo/models)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="whose graph; cuda also works without a GPU (default: auto)")
    cli.add_dim(parser)
    cli.add_static(parser)
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models analysed at a time (default: 1)")
    args = parser.parse_args()
    workspace = cli.start(args)
    paths = workspace.find_models(args.model) if args.model else model_files([workspace.models])
    if not paths:
        raise UserError(f"{workspace.models}: no models; export some with: python model_zoo/torchvision_exporter.py")
    sizes = cli.parse_dims(args.dim)
    work = [(path, dims) for path in paths for dims in cli.combinations(sizes)]
    with sole_writer(workspace.kernel_records):
        done = write_records(workspace, work, args.device, args.jobs, args.static)
        records = [record for record in done if isinstance(record, ModelRecord)]
        indexes = [update_index(workspace, flavour) for flavour in {one.flavour.name: one.flavour for one in records}.values()]
    failed = [path.name for (path, _), found in zip(work, done, strict=True) if isinstance(found, UserError)]
    for error in (found for found in done if isinstance(found, UserError)):
        log.error("%s", error)
    for index in indexes:
        log.info("%s: %d kernels of %d types in the index", index_path(workspace, index.flavour),
                 len(index.all_kernels()), len(index.kernels))
    rows = [summary(record) for record in records]
    if args.json:
        cli.print_json({"records": rows, "failed": failed})
    elif len(records) == 1:
        cli.print_table(fusion_rows(records[0]), f"{records[0].model}: what ORT fused")
    else:
        cli.print_table(rows, "kernel records")
    if failed:
        log.error("%d of %d models failed: %s", len(failed), len(work), ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
