"""Parses an ONNX model into ONNX Runtime's optimised graph, with the type and shape of every tensor."""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hase.ort_analysis.cuda.placement import assign_providers
from hase.ort_analysis.cuda.reduced_precision import SinglePrecisionModel, restore_types, to_single_precision
from hase.ort_analysis.cuda.rewrites import (
    check_gpu_only_nodes,
    cover_gpu_only,
    cover_pools,
    cuda_optimizers,
    has_gpu_only_nodes,
    has_quantised_operators,
    rewrite_for_cuda,
    uncover_gpu_only,
    uncover_pools,
)
from hase.ort_analysis.graph.bodies import all_tensors, flat_bodies, outputs_within, unused_trips
from hase.ort_analysis.graph.constants import fold_large
from hase.ort_analysis.graph.nodes import Body, InferredTensors, ParsedNode, Shape, Values, bodies_of, name_nodes
from hase.ort_analysis.graph.shapes import (
    FRESH,
    add_fresh_input,
    infer_tensors,
    remove_fresh_input,
    shape_query,
    shapes_of_any_size,
    types_by_schema,
    without_weights,
)
from hase.ort_analysis.graph.sizes import refuse_other_caches
from hase.ort_analysis.graph.source import Source, open_dims, read_source, tensor_of_size
from hase.records.kernel_record import GuessedRuns, KernelInput, Tensor
from hase.runtimes import local_flavour
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.fingerprint import Flavour, graph_device, has_cuda
from hase.utils.lazy import onnx
from hase.utils.logger import get_logger
from hase.utils.model_graphs import (
    LARGE_BYTES,
    MOST_LOADED_BYTES,
    at_root,
    bytes_in_files,
    put_zeros,
    read_graph,
    read_saved,
    weights_beside,
)
from hase.utils.ort_sessions import open_session

_kept: Path | None = None  # the folder of cached optimised graphs (`kept_in`)
log = get_logger("parser")
SHOWN_SIZES = 3  # in a warning
PACKED_AXES = 5  # batch, token, head, which of queries, keys and values, and number
TOO_LARGE = "Protobuf serialization failed"  # in ORT's message if it created constants of more than 2 GiB
NO_PREPACKING = {"session.disable_prepacking": "1"}  # a session that only optimises need not lay weights out again


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """Caches optimised graphs of models with dynamic dimensions in a folder while the block runs."""
    global _kept
    folder.mkdir(exist_ok=True)
    outer, _kept = _kept, folder
    try:
        yield
    finally:
        _kept = outer


def optimise_once(model: str, save_to: Path, optimize: Callable[[], None]) -> None:
    """Makes `optimize` write a graph to `save_to`, or reuses the one of an earlier call. The file must not be changed. `model`
    is a file name that identifies the model and its optimisation. Large weights may be beside the graph."""
    if _kept is None:
        optimize()
        return
    cached, beside = _kept / model, weights_beside(save_to)
    if cached.exists():
        _link(cached / save_to.name, save_to)
        _link(cached / beside.name, beside)
        return
    optimize()
    unfinished = cached.with_name(f"{cached.name}.unfinished")  # left over by a process that was killed before the rename
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    _link(save_to, unfinished / save_to.name)
    _link(beside, unfinished / beside.name)
    unfinished.rename(cached)


def _link(source: Path, to: Path) -> None:
    if source.exists():
        try:
            os.link(source, to)
        except OSError:  # a file system without links
            shutil.copyfile(source, to)


@dataclass(frozen=True)
class ParsedGraph:
    """The optimised graph of a model in one flavour."""

    source: Source  # the model as given
    flavour: Flavour
    derived: bool  # this machine lacks the flavour's provider, so the graph is derived from the CPU provider's
    static: bool  # all sizes were fixed before ORT optimised the model; else the session takes any sizes
    nodes: tuple[ParsedNode, ...]  # in execution order, with unique names; the nodes of a body follow the node that holds it
    tensors: dict[str, KernelInput]  # type and shape of every tensor by name, constants with their small values
    inputs: tuple[str, ...]  # inputs, outputs: the graph's own
    outputs: tuple[str, ...]
    opsets: dict[str, int]  # operator-set versions by domain
    proto: onnx.ModelProto  # the optimised graph itself, without large weights
    # values of small integer tensors that it computes from shapes and constants, at the given sizes
    computed: dict[str, Values] = field(default_factory=dict)
    # by tensor name, shapes that depend on data; the largest that ONNX allows are assumed
    assumed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # by node name, the range of its body's runs, if uncertain
    guessed: dict[str, GuessedRuns] = field(default_factory=dict)
    bodies: dict[str, onnx.GraphProto] = field(default_factory=dict)  # by node name, its body before the model was optimised


def _check_sizes_by_data(source: Source, used: Iterable[str], tensors: Iterable[str]) -> None:
    """Warns of given tensor sizes that have no effect; refuses those of unknown tensors. `used` are names of sizes in the
    optimised graph, `tensors` its tensors."""
    names = {*tensors, *outputs_within(source.graph_only.graph.node)}
    given = source.dims.keys() - open_dims(source.graph_only).keys()
    unused = sorted(name for name in given - set(used) if tensor_of_size(name))
    for name in unused:
        if tensor_of_size(name) not in names:
            raise UserError(f"{source.name}: no dynamic dimension {name}: there is no tensor {tensor_of_size(name)}")
    if unused:
        more = f" and {len(unused) - SHOWN_SIZES} more" if len(unused) > SHOWN_SIZES else ""
        log.warning("%s: %s%s changes nothing: the model itself says how large these tensors are, or ONNX Runtime left "
                    "them out", source.name, ", ".join(f"{name}={source.dims[name]}" for name in unused[:SHOWN_SIZES]), more)


def optimize(source: Source, flavour: Flavour, save_to: Path, static: bool) -> onnx.ModelProto:
    """Makes ORT optimise `source` and save the graph, with named nodes, to `save_to`; returns it. With `static`, dynamic
    dimensions are fixed first, so that ORT folds computations on them. Constants over 1 KiB are written to a second file."""
    open_session(source.loadable, flavour.device, optimize=flavour.optimization, dims=source.dims if static else {},
                 save_to=save_to, name=source.name, entries=_external_weights(save_to))
    proto = onnx.load(str(save_to), load_external_data=False)
    name_nodes(proto.graph)
    onnx.save(proto, str(save_to))
    return read_graph(save_to)


def _external_weights(save_to: Path) -> dict[str, str]:
    """The session entries that put large constants into a file beside the graph."""
    return {"session.optimized_model_external_initializers_file_name": weights_beside(save_to).name,
            "session.optimized_model_external_initializers_min_size_in_bytes": str(LARGE_BYTES)}


def _optimized(source: Source, changed: onnx.ModelProto, flavour: Flavour, derived: bool, static: bool,
               folder: Path) -> onnx.ModelProto:
    """Makes ORT optimise the graph `changed` of a model, perhaps with other types, and names the nodes. Large weights are read
    only if an optimiser needs them; in the result they refer to `folder`."""
    path, original = folder / "optimized.onnx", source.graph_only.graph
    if derived:
        if has_gpu_only_nodes(original):
            changed = cover_gpu_only(changed, types_by_schema(shape_query(without_weights(changed), {})))
        if has_quantised_operators(original):
            cover_pools(changed.graph)
    fold_large(changed)
    put_zeros(changed, _kept or folder)
    level, disabled = cuda_optimizers(original) if derived else (flavour.optimization, ())

    def save(graph: onnx.ModelProto, dims: Mapping[str, int]) -> None:
        entries = {**at_root(), **NO_PREPACKING}
        open_at = partial(open_session, graph.SerializeToString(), "cpu" if derived else flavour.device, optimize=level,
                          disabled=disabled, dims=dims, save_to=path, name=source.name, plan_memory=False)
        try:
            open_at(entries=entries)
        except UserError as error:
            if TOO_LARGE not in str(error):
                raise
            open_at(entries={**entries, **_external_weights(path)})

    def write() -> None:
        dims = source.dims if static else {}
        save(changed, dims)
        if _is_untouched(path, changed):
            add_fresh_input(changed.graph)
            save(changed, {FRESH: 1, **dims})
            _restore_bodies(path, changed)

    if static or source.all_fixed:
        write()
    else:
        optimise_once(f"{source.sha256}-{flavour.name}", path, write)
    proto = read_saved(path)
    if derived:
        uncover_gpu_only(proto.graph, original)
    name_nodes(proto.graph)
    if derived:
        uncover_pools(proto.graph)
    return proto


def _is_untouched(path: Path, before: onnx.ModelProto) -> bool:
    """Whether a session did not change the nodes of a graph, and so saved them in order, without default attributes."""
    saved = read_saved(path).graph.node
    return len(saved) == len(before.graph.node) and all(map(operator.eq, saved, before.graph.node))


def _restore_bodies(path: Path, before: onnx.ModelProto) -> None:
    """Restores the original bodies of a saved graph's nodes, and removes the extra input that made ORT rewrite them."""
    proto = onnx.load(str(path), load_external_data=False)
    original_bodies = {(node.op_type, out): bodies_of(node) for node in before.graph.node for out in node.output if out}
    for node in proto.graph.node:
        for attribute, body in bodies_of(node).items():
            body.CopyFrom(original_bodies[node.op_type, next(filter(None, node.output))][attribute])
    remove_fresh_input(proto.graph)
    onnx.save(proto, str(path))


def _check_trips(source: Source, inferred: InferredTensors, proto: onnx.ModelProto) -> None:
    """Warns of given numbers of trips that have no effect."""
    given = {dim: size for dim, size in source.dims.items() if dim not in open_dims(proto)}
    for unused in unused_trips(inferred.held, given):
        log.warning("%s: %s=%d changes nothing: the model itself says how often its loops run", source.name, unused,
                    source.dims[unused])


def _check_packed(name: str, nodes: Iterable[ParsedNode], tensors: Mapping[str, KernelInput]) -> None:
    """Refuses attention with queries, keys and values in one tensor of PACKED_AXES axes, as in models optimised for CUDA. The
    CPU provider opens it, but can't run it."""
    for node in nodes:
        packed = any(len(tensors[read].shape) == PACKED_AXES for read in node.inputs[:2])
        if node.provider == "cpu" and node.op_type == "MultiHeadAttention" and packed:
            raise UserError(f"{name}: ONNX Runtime refuses to run it on a CPU: {node.name}: MultiHeadAttention with keys and "
                            "values in one tensor is for GPUs only; export the model for a CPU")


def parse_graph(model: Path | onnx.ModelProto, device: str = "auto", dims: Mapping[str, int] | None = None,
                name: str | None = None, static: bool = False, folder: Path | None = None) -> ParsedGraph:
    """The optimised graph of a model for `cpu` or `cuda` (`auto`: what this machine has).

    A model with dynamic dimensions is optimised for any sizes, which keeps shape computations; then shapes are inferred at
    `dims`. With `static`, it is optimised as if exported at these sizes.

    For `cuda` without a GPU, or with more weights than a GPU should load only for this, the graph comes from the CPU provider
    with the optimisers of the CUDA provider, and is marked as derived. `name` is that of a model in memory. Large constants
    that ORT created are in a file in `folder`; without a folder they are lost.
    """
    provider = graph_device(device)
    flavour, source = local_flavour(provider), read_source(model, dims, name)
    derived = provider == "cuda" and (not has_cuda() or bytes_in_files(source.graph_only) > MOST_LOADED_BYTES)
    reduced = to_single_precision(source.graph_only, source.name) if derived else None
    changed = onnx.ModelProto()
    changed.CopyFrom(reduced.model if reduced else source.graph_only)
    with nullcontext(folder) if folder else temporary_folder() as weights_folder:
        return _parsed(source, _optimized(source, changed, flavour, derived, static, weights_folder), flavour, reduced, derived,
                       static)


def parse_to_run(path: Path, model: Path, device: str, dims: Mapping[str, int] | None = None,
                 static: bool = False) -> ParsedGraph:
    """Like `parse_graph` for a device of this machine, but also writes the graph with all weights to `path`. ORT's names for
    nodes that it inserts vary, so a graph and its description must come from one run."""
    flavour, source = local_flavour(graph_device(device)), read_source(model, dims)
    return _parsed(source, optimize(source, flavour, path, static), flavour, None, False, static)


def _parsed(source: Source, proto: onnx.ModelProto, flavour: Flavour, reduced: SinglePrecisionModel | None, derived: bool,
            static: bool) -> ParsedGraph:
    """Describes the optimised graph `proto`; `reduced` is the model in single precision, if that was optimised."""
    provider = flavour.device
    inferred = infer_tensors(proto, "cpu" if derived else provider, source.name, source.dims)
    refuse_other_caches(proto.graph.node, inferred.tensors, source.open_names, source.name)
    _check_trips(source, inferred, proto)
    _check_sizes_by_data(source, inferred.used, all_tensors(inferred))
    tensors, original, fixed = inferred.tensors, source.graph_only.graph, static or source.all_fixed

    def on_provider(proto: onnx.ModelProto, tensors: dict[str, KernelInput], original: onnx.GraphProto,
                    shapes_known: Callable[[], Mapping[str, Shape]], outside: frozenset[str] = frozenset(),
                    inner: Mapping[str, str] | None = None) -> tuple[dict[str, KernelInput], list[str]]:
        """Rewrites a graph for the flavour's provider; returns its tensors and the provider of each node."""
        if not derived:
            providers = {**(inner or {}), **inferred.providers}
            return tensors, [providers.get(node.name, provider) for node in proto.graph.node]
        rewrite_for_cuda(proto, original, tensors, shapes_known)
        tensors = restore_types(proto, reduced, tensors) if reduced else tensors
        derived_providers = assign_providers(proto, tensors, outside)
        check_gpu_only_nodes(source.name, proto.graph.node, derived_providers, tensors)
        return tensors, [*derived_providers]

    def finish(body: Body, original: onnx.GraphProto) -> tuple[dict[str, KernelInput], list[str]]:
        return on_provider(body.proto, body.inferred.tensors, original, lambda: body.inferred.plain, body.captured,
                           body.inferred.providers)

    tensors, assigned = on_provider(proto, tensors, original,
                                    lambda: inferred.plain if fixed else shapes_of_any_size(proto, source.name))
    flat = flat_bodies(proto.graph.node, assigned, inferred.held, original, finish)
    tensors = tensors | flat.tensors | {"": KernelInput(dtype="")}
    _check_packed(source.name, flat.nodes, tensors)
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
    """A tensor's type and shape as text, `float32[16,64,56,56]`; a dash for a missing input."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]" if tensor.present else "-"


def node_rows(graph: ParsedGraph) -> list[dict[str, Any]]:
    """One row per node: number, name, operator, provider, input and output shapes, attributes."""
    return [
        {"#": number, "node": node.name, "op_type": (f"{node.domain}." if node.domain else "") + node.op_type,
         "provider": node.provider, "inputs": " ".join(shape_text(graph.tensors[i]) for i in node.inputs),
         "outputs": " ".join(shape_text(graph.tensors[o]) for o in node.outputs),
         "attributes": " ".join(f"{k}={v}" for k, v in node.attributes.items())}
        for number, node in enumerate(graph.nodes)]


def graph_document(graph: ParsedGraph) -> dict[str, Any]:
    """A parsed graph as plain data: model, flavour, sizes, and a row per node."""
    return {"model": graph.source.name, "flavour": graph.flavour.name, "derived": graph.derived, "static": graph.static,
            "dims": graph.source.dims, "nodes": node_rows(graph)}
