"""Parses an ONNX model: the optimised graph that ONNX Runtime runs, with the type and shape of every tensor."""

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

from hase.ort_analysis.cuda.gpu_only import check_on_gpu, cover, holds_gpu_only, uncover
from hase.ort_analysis.cuda.placement import assign_providers
from hase.ort_analysis.cuda.reduced_precision import Reduced, as_single, holds_reduced, restore_types
from hase.ort_analysis.cuda.rewrites import cover_pools, cuda_optimizers, rewrite_for_cuda, runs_on_whole_numbers, uncover_pools
from hase.ort_analysis.graph.bodies import all_tensors, flat_bodies, made_within, unused_trips
from hase.ort_analysis.graph.constants import fold_large
from hase.ort_analysis.graph.fitting_sizes import refuse_other_caches
from hase.ort_analysis.graph.nodes import ParsedNode, bodies_of, name_nodes
from hase.ort_analysis.graph.open_shapes import Body, InferredTensors, Shape, Values
from hase.ort_analysis.graph.source import Source, open_dims, read_source, tensor_of_size
from hase.ort_analysis.graph.tensor_shapes import (
    FRESH,
    add_fresh_input,
    infer_tensors,
    remove_fresh_input,
    shape_query,
    shapes_of_any_size,
    types_by_schema,
    without_weights,
)
from hase.records.kernel_record import GuessedRuns, KernelInput, Tensor
from hase.runtimes import flavour_of
from hase.utils.errors import UserError
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
from hase.utils.temporary import temporary_folder

_kept: Path | None = None  # where optimised graphs are kept, each in a folder of its own (`kept_in`)
log = get_logger("parser")
SHOWN_SIZES = 3  # in a warning
PACKED_AXES = 5  # batch, place, head, which of queries, keys and values, and number
TOO_LARGE = "Protobuf serialization failed"  # what ORT says where it made constants of more than 2 GiB
AS_THEY_LIE = {"session.disable_prepacking": "1"}  # a session that only optimises does not lay weights out anew


@contextmanager
def kept_in(folder: Path) -> Iterator[None]:
    """While the block runs, optimised graphs of models with dynamic dimensions are kept in a folder and used again."""
    global _kept
    folder.mkdir(exist_ok=True)
    before, _kept = _kept, folder
    try:
        yield
    finally:
        _kept = before


def keep(model: str, save_to: Path, optimize: Callable[[], None]) -> None:
    """Calls `optimize` to write a graph to `save_to`, or takes the graph that an earlier call wrote.

    Args:
        model: a file name that identifies the model and how it is optimised.
        save_to: path of the graph, which nobody may change.
        optimize: writes the graph, and perhaps large weights beside it.
    """
    if _kept is None:
        optimize()
        return
    kept, beside = _kept / model, weights_beside(save_to)
    if kept.exists():
        _link(kept / save_to.name, save_to)
        _link(kept / beside.name, beside)
        return
    optimize()
    unfinished = kept.with_name(f"{kept.name}.unfinished")  # what a process leaves that is ended meanwhile
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    _link(save_to, unfinished / save_to.name)
    _link(beside, unfinished / beside.name)
    unfinished.rename(kept)


def _link(source: Path, to: Path) -> None:
    if source.exists():
        try:
            os.link(source, to)
        except OSError:  # a file system without links
            shutil.copyfile(source, to)


@dataclass(frozen=True)
class ParsedGraph:
    """The optimised graph of a model in one flavour.

    Attributes:
        source: the model as given.
        derived: this machine lacks the flavour's provider, so the graph is derived from the CPU provider's.
        static: all sizes were fixed before ORT optimised the model; else the session takes any sizes.
        nodes: in execution order, with unique names; the nodes of a body follow the node that holds it.
        tensors: type and shape of every tensor by name, constants with their small values.
        inputs, outputs: the graph's own.
        opsets: operator-set versions by domain.
        proto: the optimised graph itself, without large weights.
        computed: values of small integer tensors that it computes from shapes and constants, at the given sizes.
        assumed: by tensor name, shapes that depend on data; the largest that ONNX allows are assumed.
        guessed: by node name, the range of the number of runs of its body if that is a guess.
        bodies: by node name, its body before the model was optimised.
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


def _check_sizes_by_data(source: Source, used: Iterable[str], tensors: Iterable[str]) -> None:
    """Warns of given sizes of tensors that change nothing.

    Args:
        source: the model, with the given sizes.
        used: the names of the sizes that a tensor of the optimised graph has.
        tensors: of the optimised graph.

    Raises:
        UserError: neither the model nor the optimised graph has a tensor with that name.
    """
    names = {*tensors, *made_within(source.graph_only.graph.node)}
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
    """Lets ORT optimise `source`, and saves the graph to `save_to` as it runs, with named nodes; returns it.

    With `static`, dynamic dimensions are fixed first, so that ORT folds what it computes from them into constants. Constants
    over 1 KiB are written to a second file.
    """
    open_session(source.loadable, flavour.device, optimize=flavour.optimization, dims=source.dims if static else {},
                 save_to=save_to, name=source.name, entries=_beside(save_to))
    proto = onnx.load(str(save_to), load_external_data=False)
    name_nodes(proto.graph)
    onnx.save(proto, str(save_to))
    return read_graph(save_to)


def _beside(save_to: Path) -> dict[str, str]:
    """The entries with which a session writes large constants to a file beside the graph."""
    return {"session.optimized_model_external_initializers_file_name": weights_beside(save_to).name,
            "session.optimized_model_external_initializers_min_size_in_bytes": str(LARGE_BYTES)}


def _optimized(source: Source, changed: onnx.ModelProto, flavour: Flavour, derived: bool, static: bool,
               folder: Path) -> onnx.ModelProto:
    """Lets ORT optimise a graph, without reading its large weights unless an optimiser needs them; named nodes.

    Args:
        source: the model.
        changed: its graph as it is optimised; perhaps with other types.
        derived: whether the CPU provider stands for the GPU's.
        static: as for `parse_graph`.
        folder: where what ORT writes is kept; the graph's large constants refer to it.
    """
    path, original = folder / "optimized.onnx", source.graph_only.graph
    if derived:
        if holds_gpu_only(original):
            changed = cover(changed, types_by_schema(shape_query(without_weights(changed), {})))
        if runs_on_whole_numbers(original):
            cover_pools(changed.graph)
    fold_large(changed)
    put_zeros(changed, _kept or folder)
    level, disabled = cuda_optimizers(original) if derived else (flavour.optimization, ())

    def save(graph: onnx.ModelProto, dims: Mapping[str, int]) -> None:
        entries = {**at_root(), **AS_THEY_LIE}
        open_at = partial(open_session, graph.SerializeToString(), "cpu" if derived else flavour.device, optimize=level,
                          disabled=disabled, dims=dims, save_to=path, name=source.name, plan_memory=False)
        try:
            open_at(entries=entries)
        except UserError as error:
            if TOO_LARGE not in str(error):
                raise
            open_at(entries={**entries, **_beside(path)})

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
        keep(f"{source.sha256}-{flavour.name}", path, write)
    proto = read_saved(path)
    if derived:
        uncover(proto.graph, original)
    name_nodes(proto.graph)
    if derived:
        uncover_pools(proto.graph)
    return proto


def _is_untouched(path: Path, before: onnx.ModelProto) -> bool:
    """Whether a session changed nothing in the nodes of a graph. It then saved the graph as it was: in its order, and without
    default attributes."""
    saved = read_saved(path).graph.node
    return len(saved) == len(before.graph.node) and all(map(operator.eq, saved, before.graph.node))


def _restore_bodies(path: Path, before: onnx.ModelProto) -> None:
    """Gives the nodes of a saved graph the bodies that they had, and removes the additional input, which had ORT write the
    bodies anew too."""
    proto = onnx.load(str(path), load_external_data=False)
    had = {(node.op_type, out): bodies_of(node) for node in before.graph.node for out in node.output if out}
    for node in proto.graph.node:
        for attribute, body in bodies_of(node).items():
            body.CopyFrom(had[node.op_type, next(filter(None, node.output))][attribute])
    remove_fresh_input(proto.graph)
    onnx.save(proto, str(path))


def _check_trips(source: Source, inferred: InferredTensors, proto: onnx.ModelProto) -> None:
    """Warns of given numbers of trips that change nothing."""
    given = {dim: size for dim, size in source.dims.items() if dim not in open_dims(proto)}
    for unused in unused_trips(inferred.held, given):
        log.warning("%s: %s=%d changes nothing: the model itself says how often its loops run", source.name, unused,
                    source.dims[unused])


def _check_packed(name: str, nodes: Iterable[ParsedNode], tensors: Mapping[str, KernelInput]) -> None:
    """Refuses attention that the CPU provider opens, but never runs: with queries, keys and values in one tensor (5 axes), as
    models that were optimised for CUDA hold it.

    Raises:
        UserError: a node is of that kind.
    """
    for node in nodes:
        packed = any(len(tensors[read].shape) == PACKED_AXES for read in node.inputs[:2])
        if node.provider == "cpu" and node.op_type == "MultiHeadAttention" and packed:
            raise UserError(f"{name}: ONNX Runtime refuses to run it on a CPU: {node.name}: MultiHeadAttention with keys and "
                            "values in one tensor is for GPUs only; export the model for a CPU")


def parse_graph(model: Path | onnx.ModelProto, device: str = "auto", dims: Mapping[str, int] | None = None,
                name: str | None = None, static: bool = False, folder: Path | None = None) -> ParsedGraph:
    """The optimised graph of a model for `cpu` or `cuda` (`auto`: what this machine has).

    A model with dynamic dimensions is optimised as for a session that takes any sizes, which keeps the computation of shapes;
    then all shapes are those at `dims`. With `static`, it is optimised as if it had been exported at these sizes.

    For `cuda` on a machine without it, the graph comes from the CPU provider with the optimisers of the CUDA provider, and is
    marked as derived. So is that of a model with more weights than a GPU should load only for this.

    Args:
        model: an ONNX file, or a model in memory.
        device: `cpu`, `cuda` or `auto`.
        dims: sizes of its dynamic dimensions.
        name: of a model in memory.
        static: whether dynamic dimensions are fixed before the model is optimised.
        folder: of a file with the large constants that ORT made, to which `proto` refers; by default it is gone in the end.

    Raises:
        UserError: the model can't be read (no such file, no ONNX, no nodes, weights missing), a dynamic dimension is unknown or
            has no size, or ORT can't load the model.
    """
    provider = graph_device(device)
    flavour, source = flavour_of(provider), read_source(model, dims, name)
    derived = provider == "cuda" and (not has_cuda() or bytes_in_files(source.graph_only) > MOST_LOADED_BYTES)
    reduced = as_single(source.graph_only, source.name) if derived and holds_reduced(source.graph_only.graph) else None
    changed = onnx.ModelProto()
    changed.CopyFrom(reduced.model if reduced else source.graph_only)
    with nullcontext(folder) if folder else temporary_folder() as written:
        return _parsed(source, _optimized(source, changed, flavour, derived, static, written), flavour, reduced, derived,
                       static)


def parse_to_run(path: Path, model: Path, device: str, dims: Mapping[str, int] | None = None,
                 static: bool = False) -> ParsedGraph:
    """Like `parse_graph`, for a device that this machine has; also writes the optimised graph to `path`, with the node names of
    the result and with all weights.

    ORT gives the nodes that it inserts other names each time, so a graph and its description must come from one run.

    Raises:
        UserError: as `parse_graph`.
    """
    flavour, source = flavour_of(graph_device(device)), read_source(model, dims)
    return _parsed(source, optimize(source, flavour, path, static), flavour, None, False, static)


def _parsed(source: Source, proto: onnx.ModelProto, flavour: Flavour, reduced: Reduced | None, derived: bool,
            static: bool) -> ParsedGraph:
    """The description of an optimised graph.

    Args:
        source: the model.
        proto: the graph, with named nodes.
        reduced: the model in single precision, if that was optimised.
        derived, static: as for `parse_graph`.

    Raises:
        UserError: a shape is not known, a given size is wrong, or the provider can't run the graph.
    """
    provider = flavour.device
    inferred = infer_tensors(proto, "cpu" if derived else provider, source.name, source.dims)
    refuse_other_caches(proto.graph.node, inferred.tensors, source.open_names, source.name)
    _check_trips(source, inferred, proto)
    _check_sizes_by_data(source, inferred.used, all_tensors(inferred))
    tensors, original, fixed = inferred.tensors, source.graph_only.graph, static or source.all_fixed

    def on_provider(proto: onnx.ModelProto, tensors: dict[str, KernelInput], original: onnx.GraphProto,
                    shapes_known: Callable[[], Mapping[str, Shape]], outside: frozenset[str] = frozenset(),
                    inner: Mapping[str, str] | None = None) -> tuple[dict[str, KernelInput], list[str]]:
        """Turns a graph into that of the flavour's provider; returns its tensors and the provider of each node."""
        if not derived:
            providers = {**(inner or {}), **inferred.providers}
            return tensors, [providers.get(node.name, provider) for node in proto.graph.node]
        rewrite_for_cuda(proto, original, tensors, shapes_known)
        tensors = restore_types(proto, reduced, tensors) if reduced else tensors
        derived_providers = assign_providers(proto, tensors, outside)
        check_on_gpu(source.name, proto.graph.node, derived_providers, tensors)
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
    """`float32[16,64,56,56]`, or a dash for an input that is missing."""
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]" if tensor.present else "-"


def node_rows(graph: ParsedGraph) -> list[dict[str, Any]]:
    """One row a node: number, name, operator, provider, shapes of inputs and outputs, attributes."""
    return [
        {"#": number, "node": node.name, "op_type": (f"{node.domain}." if node.domain else "") + node.op_type,
         "provider": node.provider, "inputs": " ".join(shape_text(graph.tensors[i]) for i in node.inputs),
         "outputs": " ".join(shape_text(graph.tensors[o]) for o in node.outputs),
         "attributes": " ".join(f"{k}={v}" for k, v in node.attributes.items())}
        for number, node in enumerate(graph.nodes)]


def document(graph: ParsedGraph) -> dict[str, Any]:
    """A graph as a table of its nodes: its model, flavour and sizes, and a row for each node."""
    return {"model": graph.source.name, "flavour": graph.flavour.name, "derived": graph.derived, "static": graph.static,
            "dims": graph.source.dims, "nodes": node_rows(graph)}
