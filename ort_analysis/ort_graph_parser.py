"""Phase 2.1: the graph that ONNX Runtime really runs, node by node, with every shape known.

Reads any ONNX file (or a model in memory). ORT optimises it and saves the result to a temporary file, which is read
back; shapes come from ORT itself, since the saved graph has none and ONNX's own inference stops at ORT's operators.
Prints the nodes; writes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from model_zoo.zoo_config import DEFAULT_DIMS_KEY
from ort_analysis.bodies import Body, all_tensors, body_sizes, made_within, steering_inputs, unused_trips
from ort_analysis.cuda_optimizers import cover_pools, cuda_optimizers, runs_on_whole_numbers, uncover_pools
from ort_analysis.cuda_placement import assign_providers
from ort_analysis.cuda_rewrites import rewrite_for_cuda
from ort_analysis.flat_graph import flat_bodies
from ort_analysis.open_shapes import DETECTIONS, Shape, selects_boxes
from ort_analysis.optimized_once import keep
from ort_analysis.parsed_nodes import ParsedNode, name_nodes
from ort_analysis.records import GuessedRuns, KernelInput, Tensor
from ort_analysis.reduced_precision import as_single, holds_reduced, restore_types
from ort_analysis.tensor_shapes import Values, infer_tensors, shapes_of_any_size
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import Flavour, flavour_of, has_cuda, resolve_provider
from utils.logger import get_logger
from utils.model_files import check_plain_file, external_files, load_whole
from utils.ort_sessions import model_errors, open_session
from utils.safe_names import as_file_name
from utils.temporary import temporary_folder

if TYPE_CHECKING:
    import onnx

log = get_logger("parser")

OWN_ENDING = re.compile(r"_token_\d+$")  # of names that ONNX Runtime makes from others
SHOWN_SIZES = 3  # in a warning
EXTERNAL_BYTES = 1024  # constants above this stay outside the proto while it is analysed
EXAMPLES = """
python ort_analysis/ort_graph_parser.py --model resnet18.onnx --dim batch=1
python ort_analysis/ort_graph_parser.py --model model.onnx --device cuda --json
"""


@dataclass(frozen=True)
class Source:
    """A model as given: its graph with large weights left out, and what ORT is to load."""

    name: str
    graph_only: onnx.ModelProto
    loadable: Path | bytes
    sha256: str
    dims: dict[str, int]

    @property
    def steering(self) -> dict[str, Any]:
        """Values of its inputs that say how often a Loop runs, or which branch of an If, and words that it knows; see
        `steering_inputs`."""
        return steering_inputs(self.graph_only.graph, self.dims)

    @property
    def batch(self) -> int | None:
        """The first dimension of the first input, where it has one."""
        constants = {tensor.name for tensor in self.graph_only.graph.initializer}
        first = next((value for value in self.graph_only.graph.input if value.name not in constants), None)
        shape = first.type.tensor_type.shape.dim if first else ()
        return (self.dims[shape[0].dim_param] if shape[0].dim_param else shape[0].dim_value) if shape else None


@dataclass(frozen=True)
class ParsedGraph:
    """The optimised graph of a model in one flavour.

    Attributes:
        source: the model as given.
        derived: the flavour's provider is not on this machine; the graph comes from the CPU provider.
        static: all sizes were fixed before ORT optimised it; else it is the graph of a session that takes any.
        nodes: in execution order, named uniquely; those of a graph that a node holds follow that node.
        tensors: type and shape of every tensor by name, constants with their small values.
        inputs, outputs: the graph's own.
        opsets: operator-set versions by domain.
        proto: the optimised graph itself, large weights left out.
        computed: values of small whole-number tensors that it computes from shapes and constants, at the sizes given.
        assumed: shapes of tensors, by name, that depend on data and were taken to be the largest that ONNX allows.
        guessed: by node name, how far the number of runs of the graph that a node holds is a guess.
        bodies: by node name, the graph that a node held before the model was optimised.
    """

    source: Source
    flavour: Flavour
    derived: bool
    static: bool
    nodes: tuple[ParsedNode, ...]
    tensors: dict[str, KernelInput]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: dict[str, int]
    proto: onnx.ModelProto
    computed: dict[str, Values] = field(default_factory=dict)
    assumed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    guessed: dict[str, GuessedRuns] = field(default_factory=dict)
    bodies: dict[str, onnx.GraphProto] = field(default_factory=dict)


def open_dims(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """The dynamic dimensions of the graph's inputs by name, each with the places it stands in.

    A dimension without a name gets one: `<input>.<axis>` is written into `proto`.
    """
    found: dict[str, list[str]] = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in constants or not value.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                continue
            if not dim.dim_param:
                dim.dim_param = f"{value.name}.{axis}"
            found.setdefault(dim.dim_param, []).append(f"{value.name}, axis {axis}")
    return found


def own_sizes(model: Path, dims: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every combination of those of `dims` that are dynamic in the file `model`; at least one, which may be empty.

    Raises:
        UserError: it can't be read.
    """
    import onnx

    if not dims:
        return [{}]
    with model_errors(str(model)):
        proto = onnx.load(str(model), load_external_data=False)
        dynamic = {*open_dims(proto), *_sizes_by_data(proto, dims)}
    return cli.combinations({name: sizes for name, sizes in dims.items() if name in dynamic})


def _sizes_by_data(proto: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """Those of some names that may stand for a size within the graph: a name that it gives it, `<tensor>.<axis>`, the boxes
    that NonMaxSuppression selects, or trips and branches of graphs that nodes hold. What ORT takes out of a branch or a
    function, it calls by other names, which end in the model's own."""
    graph = proto.graph
    named = {dim.dim_param for value in (*graph.output, *graph.value_info) for dim in value.type.tensor_type.shape.dim}
    named |= body_sizes(graph)
    if selects_boxes(graph):
        named.add(DETECTIONS)
    made = tuple(made_within(graph.node)) + tuple(out for function in proto.functions for out in made_within(function.node))

    def stands_for_a_size(name: str) -> bool:
        tensor = _tensor_of(name)
        return bool(tensor) and OWN_ENDING.sub("", tensor).endswith(made)

    return {name for name in names if name in named or stands_for_a_size(name)}


def _tensor_of(name: str) -> str:
    """The tensor in `<tensor>.<axis>`; "" of another name of a size."""
    tensor, _, axis = name.rpartition(".")
    return tensor if axis.isdigit() else ""


def _check_sizes_by_data(source: Source, used: Iterable[str], tensors: Iterable[str]) -> None:
    """Warns of sizes that were given to tensors and change nothing.

    Args:
        source: the model, with the sizes that were given.
        used: names of those that a tensor of the optimised graph has.
        tensors: of the optimised graph.

    Raises:
        UserError: one is given to a tensor that neither the model nor the optimised graph has.
    """
    there = {*tensors, *made_within(source.graph_only.graph.node)}
    given = source.dims.keys() - open_dims(source.graph_only).keys()
    unused = sorted(name for name in given - set(used) if _tensor_of(name))
    for name in unused:
        if _tensor_of(name) not in there:
            raise UserError(f"{source.name}: no dynamic dimension {name}: there is no tensor {_tensor_of(name)}")
    if unused:
        more = f" and {len(unused) - SHOWN_SIZES} more" if len(unused) > SHOWN_SIZES else ""
        log.warning("%s: %s%s changes nothing: the model itself says how large these tensors are, or ONNX Runtime left "
                    "them out", source.name, ", ".join(f"{name}={source.dims[name]}" for name in unused[:SHOWN_SIZES]), more)


def default_dims(proto: onnx.ModelProto) -> dict[str, int]:
    """The sizes that the exporter stamped into a dynamic model for use where the user gives none; else nothing."""
    for prop in proto.metadata_props:
        if prop.key == DEFAULT_DIMS_KEY:
            return {str(name): int(size) for name, size in json.loads(prop.value).items()}
    return {}


def read_source(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None) -> Source:
    """A model made ready: readable, not empty, every dynamic dimension given a size.

    Raises:
        UserError: no such file, no ONNX, no nodes, weights missing, an unknown dimension, or one left open.
    """
    import onnx

    given = dict(dims or {})
    if isinstance(model, Path):
        shown = str(model)
        check_plain_file(model)
        with model_errors(shown):
            proto = onnx.load(str(model), load_external_data=False)
        external_files(model, proto)
        digest, stem = files.kept_sha256(model), model.stem
    else:
        proto, shown, stem = model, name or model.graph.name or "model", name or model.graph.name or "model"
        external_files(Path(as_file_name(shown)), proto)
        digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    if not proto.graph.node:
        raise UserError(f"{shown}: no ONNX model with nodes in it (an empty graph)")
    unnamed_before = proto.SerializeToString() if not isinstance(model, Path) else b""
    dynamic = open_dims(proto)
    unknown = sorted(set(given) - set(dynamic) - _sizes_by_data(proto, given))
    if unknown:
        there = f"its dynamic dimensions are {', '.join(sorted(dynamic))}" if dynamic else "all its dimensions are fixed"
        within = sorted(body_sizes(proto.graph))
        there += f"; of Loops and Ifs {', '.join(within)} can be given" if within else ""
        raise UserError(f"{shown}: no dynamic dimension {', '.join(unknown)}; {there}")
    stamped = {dim: size for dim, size in default_dims(proto).items() if dim in dynamic and dim not in given}
    if stamped:
        log.info("%s: %s, as its file suggests (--dim says otherwise)", stem,
                 ", ".join(f"{dim}={size}" for dim, size in stamped.items()))
    given |= stamped
    missing = [f"{dim} ({'; '.join(places)})" for dim, places in dynamic.items() if dim not in given]
    if missing:
        option = shlex.quote(f"{next(d for d in dynamic if d not in given)}=1")
        raise UserError(f"{shown}: dimension {', '.join(missing)} is open; give its size, for example --dim {option}")
    renamed = any("." in dim for dim in dynamic)
    if isinstance(model, Path) and not renamed:
        loadable: Path | bytes = model
    elif isinstance(model, Path):
        whole = load_whole(model)
        open_dims(whole)
        loadable = whole.SerializeToString()
    else:
        loadable = proto.SerializeToString() if renamed else unnamed_before
    return Source(name=name or stem, graph_only=proto, loadable=loadable, sha256=digest, dims=given)


def optimize(source: Source, flavour: Flavour, derived: bool, save_to: Path, static: bool) -> None:
    """Has ORT optimise `source` and save the graph to `save_to`, with weights over 1 KiB in a file beside it.

    Where `static`, dynamic dimensions are fixed before: what ORT then computes from them, it folds into constants.
    """
    dims = source.dims if static else {}
    entries = {
        "session.optimized_model_external_initializers_file_name": save_to.name + ".weights",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(EXTERNAL_BYTES),
    }
    if derived:
        level, disabled = cuda_optimizers(source.graph_only.graph)
        open_session(source.loadable, "cpu", optimize=level, disabled=disabled, dims=dims, save_to=save_to,
                     name=source.name, entries=entries)
    else:
        open_session(source.loadable, flavour.execution_provider, optimize=flavour.optimization, dims=dims,
                     save_to=save_to, name=source.name, entries=entries)


def parse_graph(model: Path | onnx.ModelProto, execution_provider: str = "auto", dims: Mapping[str, int] | None = None,
                name: str | None = None, static: bool = False) -> ParsedGraph:
    """The optimised graph of a model for `cpu` or `cuda` (`auto`: what this machine has).

    A model with dynamic dimensions is optimised as a session does that takes any sizes, which keeps the computation of shapes;
    all shapes are then those at `dims`. Where `static`, it is optimised as though it had been exported at these sizes.

    Asked for `cuda` on a machine without it, the graph comes from the CPU provider with the CUDA provider's optimisers,
    and is marked as derived.

    Raises:
        UserError: as `read_source`, and where ORT can't load the model.
    """
    with temporary_folder() as folder:
        return parse_into(folder / "optimized.onnx", model, execution_provider, dims, name, static)


def parse_into(path: Path, model: Path | onnx.ModelProto, execution_provider: str = "auto",
               dims: Mapping[str, int] | None = None, name: str | None = None, static: bool = False) -> ParsedGraph:
    """Like `parse_graph`, and leaves the optimised graph in `path` (its weights beside it), nodes named as in the result.

    ORT makes up other names for the nodes it inserts each time, so a graph and its description must come together.

    Raises:
        UserError: as `read_source`, and where ORT can't load the model.
    """
    import onnx

    provider = resolve_provider(execution_provider) if execution_provider == "auto" else execution_provider
    flavour = flavour_of(provider)
    derived = provider == "cuda" and not has_cuda()
    source = read_source(model, dims, name)
    reduced = as_single(source.loadable, source.name) if derived and holds_reduced(source.graph_only.graph) else None
    loadable = reduced.model if reduced else source.loadable
    if derived and runs_on_whole_numbers(source.graph_only.graph):
        loadable = cover_pools(loadable)
    work = partial(optimize, replace(source, loadable=loadable), flavour, derived, path, static)
    if static or not source.dims:
        work()
    else:
        keep(f"{source.sha256}-{flavour.name}-{path.name}", path, work)
    proto = onnx.load(str(path), load_external_data=False)
    name_nodes(proto.graph)
    uncover_pools(proto.graph)
    onnx.save(proto, str(path))
    inferred = infer_tensors(proto, "cpu" if derived else provider, source.name, path.parent, source.dims)
    for unused in unused_trips(inferred.held, {dim: size for dim, size in source.dims.items() if dim not in open_dims(proto)}):
        log.warning("%s: %s=%d changes nothing: the model itself says how often its loops run", source.name, unused,
                    source.dims[unused])
    _check_sizes_by_data(source, inferred.used, all_tensors(inferred))
    tensors, original, fixed = inferred.tensors, source.graph_only.graph, static or not source.dims

    def on_provider(proto: onnx.ModelProto, tensors: dict[str, KernelInput], original: onnx.GraphProto,
                    shapes_known: Callable[[], Mapping[str, Shape]], outside: frozenset[str] = frozenset(),
                    told: Mapping[str, str] | None = None) -> tuple[dict[str, KernelInput], list[str]]:
        """Makes a graph that of the flavour's provider; its tensors, and who runs each node."""
        if not derived:
            found = {**(told or {}), **inferred.providers}
            return tensors, [found.get(node.name, provider) for node in proto.graph.node]
        rewrite_for_cuda(proto, original, tensors, shapes_known)
        tensors = restore_types(proto, reduced, tensors) if reduced else tensors
        return tensors, [*assign_providers(proto, tensors, outside)]

    def finish(body: Body, original: onnx.GraphProto) -> tuple[dict[str, KernelInput], list[str]]:
        return on_provider(body.proto, body.inferred.tensors, original, lambda: body.inferred.plain, body.captured,
                           body.inferred.providers)

    tensors, assigned = on_provider(proto, tensors, original,
                                    lambda: inferred.plain if fixed else shapes_of_any_size(proto, source.name))
    if derived:
        onnx.save(proto, str(path))
    flat = flat_bodies(proto.graph.node, assigned, inferred.held, original, finish)
    tensors = tensors | flat.tensors | {"": KernelInput(dtype="")}
    constants = {tensor.name for tensor in proto.graph.initializer}
    return ParsedGraph(
        source=source, flavour=flavour, derived=derived, static=fixed, nodes=tuple(flat.nodes),
        tensors=tensors,
        inputs=tuple(value.name for value in proto.graph.input if value.name not in constants),
        outputs=tuple(value.name for value in proto.graph.output),
        opsets={entry.domain: entry.version for entry in proto.opset_import}, proto=proto,
        computed=inferred.computed | flat.computed, assumed=inferred.assumed | flat.assumed, guessed=flat.guessed,
        bodies=flat.originals,
    )


def shape_text(tensor: Tensor) -> str:
    """`float32[16,64,56,56]`, or a dash for an input left out."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]" if tensor.present else "-"


def node_rows(graph: ParsedGraph) -> list[dict[str, Any]]:
    """One row a node: number, name, operator, provider, shapes of inputs and outputs, attributes."""
    return [
        {"#": number, "node": node.name, "op_type": (f"{node.domain}." if node.domain else "") + node.op_type,
         "provider": node.provider, "inputs": " ".join(shape_text(graph.tensors[i]) for i in node.inputs),
         "outputs": " ".join(shape_text(graph.tensors[o]) for o in node.outputs),
         "attributes": " ".join(f"{k}={v}" for k, v in node.attributes.items())}
        for number, node in enumerate(graph.nodes)]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--model", type=Path, required=True, help="an ONNX file; a bare name is also looked for in model_zoo")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto",
                        help="whose graph; cuda also works without a GPU (default: auto)")
    cli.add_dim(parser)
    cli.add_static(parser)
    args = parser.parse_args()
    workspace = cli.start(args)
    graph = parse_graph(workspace.find_model(args.model), args.device, cli.one_size_dims(args.dim), static=args.static)
    if graph.derived:
        log.info("no GPU here: this is the graph that the CUDA provider would run, derived on the CPU provider")
    rows = node_rows(graph)
    if args.json:
        cli.print_json({"model": graph.source.name, "flavour": graph.flavour.name, "derived": graph.derived,
                        "static": graph.static,
                        "dims": graph.source.dims, "nodes": rows})
    else:
        sizes = "" if graph.static else ", sizes left open"
        cli.print_table(rows, f"{graph.source.name} as {graph.flavour.name} runs it{sizes}: {len(rows)} nodes")
    return 0


if __name__ == "__main__":
    cli.run(main)
