"""Reads and checks a user's ONNX model, with sizes for its dynamic dimensions, perhaps in half precision."""

from __future__ import annotations

import hashlib
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from hase.ort_analysis.graph.bodies import body_sizes, outputs_within, steering_inputs
from hase.ort_analysis.graph.constants import decisive_constants
from hase.ort_analysis.graph.nodes import bodies_of
from hase.ort_analysis.graph.shapes import DETECTIONS, selects_boxes
from hase.ort_analysis.graph.sizes import BATCH, REBATCH, at_batch, fitting_sizes, fixed_batch, sizes_set_by_model
from hase.records.kernel_record import Interface, Kernel, OpenTensor, type_name
from hase.utils import files
from hase.utils.errors import OpenSizes, UserError
from hase.utils.lazy import onnx
from hase.utils.logger import get_logger
from hase.utils.model_files import (
    COLLECTION_KEY,
    DEFAULT_DIMS_KEY,
    GROUP_KEY,
    SHOWN,
    check_plain_file,
    every_tensor,
    locations,
    read_whole_model,
)
from hase.utils.model_graphs import find_tensors, hollow, is_hollow, read_as_written, read_graph
from hase.utils.ort_sessions import kind_of_file, model_errors
from hase.utils.paths import as_file_name
from hase.utils.text import first_and_count

log = get_logger("parser")
DEFAULT_DIMS = TypeAdapter(dict[str, Annotated[int, Field(strict=True, ge=1, lt=2**63)]])
TENSOR_FIELDS = ("name", "data_type", "external_data")
MOST_CALLED = 50_000  # nodes; ONNX Runtime takes half a minute to inline so many calls
DEEPEST_CALLS = 100  # functions; ONNX Runtime runs out of stack at some thousands
SHOWN_SIZES = 3  # inputs and axes of an open dimension, in an error
BATCH_NAME = re.compile(r"batch|^(n|b|bs|none|\?)$|^unk__", re.IGNORECASE)  # what exporters call a batch
NO_SIZE = "SIZE"  # in place of one, where none is known to fit
DERIVED_ENDING = re.compile(r"_token_\d+$")  # of names that ONNX Runtime derives from other names
HALF_SUFFIX = "_fp16"  # of the model's name
KERNEL_KEY = "hase.kernel"  # metadata of a built model: its Kernel as JSON


class _Reading(NamedTuple):
    """How models are read: with missing weight files allowed, or with floats in half precision."""

    no_weights: bool = False
    half: bool = False


_reading = _Reading()


@contextmanager
def reading(no_weights: bool = False, half: bool = False) -> Iterator[None]:
    """Allows missing weight files, or reads models in half precision, while the block runs."""
    global _reading
    before, _reading = _reading, _Reading(no_weights, half)
    try:
        yield
    finally:
        _reading = before


@dataclass(frozen=True)
class Source:
    """A model as the user gave it."""

    name: str  # the file's stem, or the name given for a model in memory
    group: str  # group and collection in the file, or ""
    collection: str
    graph_only: onnx.ModelProto  # the graph; its large tensors refer to files, as `hase.utils.model_graphs` describes it
    given: Path | onnx.ModelProto  # the file, or the model in memory
    # hash of the file or serialised model, with a suffix for half precision or another batch
    sha256: str
    dims: dict[str, int]  # the sizes of its dynamic dimensions, and perhaps its new batch (`hase.ort_analysis.graph.sizes`)

    @property
    def rebatched(self) -> bool:
        """Whether it has another batch than the fixed one in its file."""
        return REBATCH in self.dims and REBATCH not in self.open_names.values()

    @property
    def all_fixed(self) -> bool:
        """Whether no size was given except a new batch, so that the graph contains all sizes."""
        return not self.dims or (len(self.dims) == 1 and self.rebatched)

    @cached_property
    def loadable(self) -> Path | bytes:
        """The file or serialised model for a runtime, with all weights and names for all dynamic dimensions."""
        if self.rebatched:
            raise UserError(f"{self.name}: its file has another batch than {self.dims[REBATCH]}, so that its graph in ONNX "
                            "Runtime can be predicted, but nothing can load it: leave --batch out")
        if isinstance(self.given, Path) and not any("." in dim for dim in open_dims(self.graph_only)):
            return self.given
        whole = read_whole_model(self.given) if isinstance(self.given, Path) else self.given
        open_dims(whole)  # gives them names
        with model_errors(self.name):
            return bytes(whole.SerializeToString())

    @property
    def steering(self) -> dict[str, Any]:
        """Values for inputs that decide trips of Loops or branches of Ifs, and words that the model knows."""
        return steering_inputs(self.graph_only.graph, self.dims)

    def record_fields(self, group: str = "", collection: str = "") -> dict[str, Any]:
        """The fields of its record about the model itself. A given group or collection wins over the file's; by default a model
        is its own group."""
        stem, collection = as_file_name(self.name), collection or self.collection
        return {"file_stem": stem, "group": as_file_name(group or self.group or stem).replace("|", "_"), "sha256": self.sha256,
                "collection": as_file_name(collection) if collection else "", "dims": self.dims}

    @property
    def open_names(self) -> dict[tuple[str, int], str]:
        """The names of the dynamic dimensions, by input and axis."""
        return {(value.name, axis): dim.dim_param for value in self.graph_only.graph.input
                for axis, dim in enumerate(value.type.tensor_type.shape.dim) if dim.dim_param}


def open_dims(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """The dynamic dimensions of a graph's inputs by name, each with its inputs and axes. Gives unnamed ones in `proto` the name
    `<input>.<axis>`."""
    locations_of: dict[str, list[str]] = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in constants or not value.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                continue
            if not dim.dim_param:
                dim.dim_param = f"{value.name}.{axis}"
            locations_of.setdefault(dim.dim_param, []).append(f"{value.name}, axis {axis}")
    return locations_of


def batch_names(proto: onnx.ModelProto) -> set[str]:
    """The dynamic dimensions that are surely the batch: the first ones of the inputs whose names say so or that have none."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    firsts = {value.name: value.type.tensor_type.shape.dim[0].dim_param for value in proto.graph.input
              if value.name not in constants and value.type.tensor_type.shape.dim}
    return {dim for name, dim in firsts.items() if dim == f"{name}.0" or BATCH_NAME.search(dim)}


def with_batch(given: Mapping[str, int], proto: onnx.ModelProto) -> dict[str, int]:
    """Sizes in which `batch` has the name that the model gives its batch, or is a new batch where that is fixed."""
    if BATCH not in given or BATCH in open_dims(proto):
        return dict(given)
    others = {name: size for name, size in given.items() if name != BATCH}
    if (names := batch_names(proto)) and not names & set(given):
        return others | dict.fromkeys(sorted(names), given[BATCH])
    fixed = fixed_batch(proto)
    if fixed and REBATCH not in given:
        return others if fixed == given[BATCH] else others | {REBATCH: given[BATCH]}
    return dict(given)


def dynamic_names(model: Path, names: Iterable[str]) -> set[str]:
    """The `names` that are dynamic dimensions of the file `model`, or may be sizes inside its graph."""
    proto = read_as_written(model)
    check_sound(proto, str(model))
    own_names = set(open_dims(proto))
    own_names |= ({REBATCH} if fixed_batch(proto) else set()) | ({BATCH} if batch_names(proto) else set())
    return (own_names & set(names)) | _sizes_by_data(proto, names)


def _sizes_by_data(proto: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """The `names` that may be a size inside the graph.

    That is a named size, `<tensor>.<axis>`, the number of boxes selected by NonMaxSuppression, the trips of a Loop, or a branch
    of an If. If ORT moves tensors out of a branch or function, their longer names end in the model's own.
    """
    graph = proto.graph
    size_names = {dim.dim_param for value in (*graph.output, *graph.value_info) for dim in value.type.tensor_type.shape.dim}
    size_names |= body_sizes(graph)
    if selects_boxes(graph):
        size_names.add(DETECTIONS)
    tensors = (*outputs_within(graph.node), *(out for function in proto.functions for out in outputs_within(function.node)))

    def stands_for_a_size(name: str) -> bool:
        tensor = tensor_of_size(name)
        return bool(tensor) and DERIVED_ENDING.sub("", tensor).endswith(tensors)

    return {name for name in names if name in size_names or stands_for_a_size(name)}


def tensor_of_size(name: str) -> str:
    """The tensor in `<tensor>.<axis>`; "" for another name."""
    tensor, _, axis = name.rpartition(".")
    return tensor if axis.isdigit() else ""


def default_dims(proto: onnx.ModelProto, shown: str) -> dict[str, int]:
    """The default sizes that the exporter wrote into a dynamic model, possibly none; `shown` is its name in errors."""
    for prop in proto.metadata_props:
        if prop.key == DEFAULT_DIMS_KEY:
            try:
                return DEFAULT_DIMS.validate_json(prop.value)
            except ValidationError as error:
                raise UserError(f"{shown}: its metadata {DEFAULT_DIMS_KEY} is damaged ({error.errors()[0]['msg']}); export it "
                                "anew, or remove that entry and give its sizes") from None
    return {}


def damage_in(message: Any) -> str:
    """What is wrong with names (not text) or element types (unknown) in a part of a model; "" if nothing."""
    if isinstance(message, onnx.TensorProto):  # without its values, which would be copied
        fields = [(message.DESCRIPTOR.fields_by_name[name], getattr(message, name)) for name in TENSOR_FIELDS]
    else:
        fields = message.ListFields()
    for field, content in fields:
        values = (content,) if isinstance(content, (str, bytes)) or not hasattr(content, "__len__") else content
        if field.type == field.TYPE_STRING:
            if wrong := [name for name in values if not isinstance(name, str)]:  # protobuf returns such names as bytes
                return f"the name {wrong[0][:SHOWN]!r} is not UTF-8"
        elif field.type != field.TYPE_MESSAGE and field.name in ("data_type", "elem_type", "key_type"):
            if content not in onnx.TensorProto.DataType.values():
                return f"its element type {content} is unknown"
        elif field.type == field.TYPE_MESSAGE and (damage := next(filter(None, map(damage_in, values)), "")):
            return damage
    return ""


def nodes_called(proto: onnx.ModelProto, shown: str) -> int:
    """The number of nodes of the main graph with all function calls inlined; nodes in bodies count."""
    functions = {(function.domain, function.name): function for function in proto.functions}
    counted: dict[tuple[str, str], int] = {}

    def count(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        if depth > DEEPEST_CALLS:
            raise UserError(f"{shown}: its functions call each other more than {DEEPEST_CALLS} deep")
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in functions and key not in counted:
                counted[key] = count(functions[key].node, depth + 1)
            total += counted.get(key, 1) + sum(count(body.node, depth) for body in bodies_of(node).values())
        return total

    return count(proto.graph.node, 0) if functions else 0


def check_sound(proto: onnx.ModelProto, shown: str) -> None:
    """Checks the assumptions of ONNX Runtime and Hase: names are text, element types known, functions not recursive."""
    if damage := damage_in(proto):
        raise UserError(f"{shown}: damaged, or of a newer version of ONNX: {damage}")
    if nodes_called(proto, shown) > MOST_CALLED:
        raise UserError(f"{shown}: its functions call each other so often that they stand for more than {MOST_CALLED:,} nodes")


def read_source(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None) -> Source:
    """Reads a model; checks that it has nodes and sizes for all dynamic dimensions. `name` is that of a model in memory."""
    given = dict(dims or {})
    if isinstance(model, Path):
        shown, stem = str(model), model.stem
        proto = read_graph(model, _reading.no_weights)
        digest = files.cached_sha256(model)
    else:
        proto, shown, stem = model, name or model.graph.name or "model", name or model.graph.name or "model"
        digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
        if any(map(locations, every_tensor(model))):
            proto = onnx.ModelProto()
            proto.CopyFrom(model)
            find_tensors(proto, Path(as_file_name(shown)), _reading.no_weights)
    check_sound(proto, shown)
    if not proto.graph.node:
        kind = kind_of_file(model) if isinstance(model, Path) else ""
        raise UserError(f"{shown}: no ONNX model with nodes in it ({f'this is {kind}' if kind else 'an empty graph'})")
    if _reading.half:
        proto, name, digest = in_half_precision(proto, shown), f"{name or stem}{HALF_SUFFIX}", f"{digest}{HALF_SUFFIX}"
    dynamic = open_dims(proto)
    given = with_batch(given, proto)
    if REBATCH in given and REBATCH not in dynamic:
        proto, digest = at_batch(proto, given[REBATCH], shown), f"{digest}_{REBATCH}{given[REBATCH]}"
    missing_weights = {tensor.name for tensor in proto.graph.initializer if is_hollow(tensor)}
    if missing_weights and (decisive := sorted(missing_weights & decisive_constants(proto.graph))):
        raise UserError(f"{shown}: what it computes depends on its {decisive[0]}, whose file is missing")
    unknown = sorted(set(given) - set(dynamic) - {REBATCH} - _sizes_by_data(proto, given))
    if unknown:
        available = f"its dynamic dimensions are {', '.join(sorted(dynamic))}" if dynamic else (
            "all its dimensions are fixed (--batch 8 takes it at a batch of 8, where its graph allows that)")
        body_names = sorted(body_sizes(proto.graph))
        available += f"; of Loops and Ifs {', '.join(body_names)} can be given" if body_names else ""
        raise UserError(f"{shown}: no dynamic dimension {', '.join(unknown)}; {available}")
    defaults = {dim: size for dim, size in default_dims(proto, shown).items() if dim in dynamic and dim not in given}
    if defaults:
        log.info("%s: %s, as its file suggests (--dim says otherwise)", stem,
                 ", ".join(f"{dim}={size}" for dim, size in defaults.items()))
    given |= defaults
    if missing := [dim for dim in dynamic if dim not in given]:
        fitting = fitting_sizes(proto, missing, given, stem)
        options = " ".join(f"--dim {shlex.quote(f'{dim}={fitting.get(dim, NO_SIZE)}')}" for dim in missing)
        single = f"dimension {missing[0]} ({'; '.join(dynamic[missing[0]][:SHOWN_SIZES])}) is open; give its size"
        plural = f"{len(missing)} dimensions are open ({first_and_count(missing)}); give their sizes"
        raise OpenSizes(f"{shown}: {single if len(missing) == 1 else plural}", options)
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    return Source(name=name or stem, group=metadata.get(GROUP_KEY, ""), collection=metadata.get(COLLECTION_KEY, ""),
                  graph_only=proto, given=model, sha256=digest, dims=given)


def in_half_precision(proto: onnx.ModelProto, shown: str) -> onnx.ModelProto:
    """A model with float32 replaced by float16, by ONNX Runtime's converter (that of onnxconverter-common). It puts Casts
    around operators that stay in single precision. Values of large weights are lost; only their sizes matter."""
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415 - most predictions do not need it

    logging.getLogger("onnxruntime.transformers").setLevel(logging.ERROR)  # it warns of each number that is rounded to 0
    single = onnx.TensorProto.FLOAT
    if not any(value.type.tensor_type.elem_type == single for value in (*proto.graph.input, *proto.graph.output)) and not any(
            tensor.data_type == single for tensor in proto.graph.initializer):
        raise UserError(f"{shown}: nothing in it is float32, so it can't be predicted in half precision; leave --dtype out")
    converted = onnx.ModelProto()
    converted.CopyFrom(proto)
    external = [tensor for tensor in proto.graph.initializer if any(locations(tensor))]  # the converter would read their values
    external_names = {tensor.name for tensor in external}
    inside = [tensor for tensor in converted.graph.initializer if tensor.name not in external_names]
    declared = [value for value in converted.graph.input if value.name not in external_names]
    _set_messages(converted.graph.initializer, inside)
    _set_messages(converted.graph.input, [*declared, *(onnx.helper.make_tensor_value_info(
        tensor.name, tensor.data_type, list(tensor.dims)) for tensor in external)])
    converted = convert_float_to_float16(converted, keep_io_types=False)
    types = {value.name: value.type.tensor_type.elem_type for value in converted.graph.input}
    _set_messages(converted.graph.input, [value for value in converted.graph.input if value.name not in external_names])
    _set_messages(converted.graph.node, _without_repeated_casts(converted.graph.node))
    for tensor in external:
        added = converted.graph.initializer.add()
        added.CopyFrom(tensor)
        if types[tensor.name] != tensor.data_type:
            added.data_type = types[tensor.name]
            hollow(added)  # its file holds numbers of another length
    return converted


def _without_repeated_casts(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes without repeated Casts: the converter adds one for each single-precision operator that reads a tensor."""
    casts, unique = set[bytes](), []
    for node in nodes:
        if node.op_type == "Cast":
            if (same := node.SerializeToString(deterministic=True)) in casts:
                continue
            casts.add(same)
        unique.append(node)
    return unique


def _set_messages(repeated: Any, values: Iterable[Any]) -> None:
    """Replaces the messages in a repeated protobuf field."""
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del repeated[:]
    repeated.extend(copies)


def interface_of(model: Path) -> Interface:
    """The inputs and outputs of an ONNX file, read without weights. Unnamed dynamic dimensions get `<input>.<axis>`."""
    check_plain_file(model)
    with model_errors(str(model)):
        proto = onnx.load(str(model), load_external_data=False)
    check_sound(proto, str(model))
    open_dims(proto)
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in constants]
    return Interface(inputs=_tensors(inputs), outputs=_tensors(proto.graph.output),
                     set_by_model=sizes_set_by_model(proto, model.stem))


def _tensors(values: Iterable[onnx.ValueInfoProto]) -> dict[str, OpenTensor]:
    """Those of a graph's inputs or outputs that are tensors, by name."""
    return {value.name: OpenTensor(dtype=type_name(value.type.tensor_type.elem_type),
                                   shape=tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim))
            for value in values if value.type.HasField("tensor_type")}


def built_kernel(path: Path) -> Kernel:
    """The kernel in a file of `kernel_build`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with model_errors(str(path)):
        model = onnx.load(str(path), load_external_data=False)
    kernel = kernel_in(model, str(path))
    if kernel is None:
        raise UserError(f"{path}: an ONNX model, but not a kernel that kernel_builder.py wrote")
    return kernel


def kernel_in(model: onnx.ModelProto, name: str) -> Kernel | None:
    """The kernel described in a built model's metadata; None for any other model."""
    saved = [prop.value for prop in model.metadata_props if prop.key == KERNEL_KEY]
    try:
        return Kernel.model_validate_json(saved[0]) if saved else None
    except ValidationError as error:
        raise UserError(f"{name}: the description of its kernel is damaged ({error.errors()[0]['msg']}); build it anew: "
                        "python kernel_model/kernel_builder.py --force") from None
