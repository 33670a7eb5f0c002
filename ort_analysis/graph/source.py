"""An ONNX model as the user gives it, with sizes for its dynamic dimensions."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from hase.ort_analysis.graph.bodies import body_sizes, made_within, steering_inputs
from hase.ort_analysis.graph.constants import read_by_value
from hase.ort_analysis.graph.fitting_sizes import fitting_sizes
from hase.ort_analysis.graph.half_precision import SUFFIX, in_half
from hase.ort_analysis.graph.new_batch import REBATCH, at_batch, fixed_batch
from hase.ort_analysis.graph.nodes import bodies_of
from hase.ort_analysis.graph.open_shapes import DETECTIONS, selects_boxes
from hase.utils import cli, files
from hase.utils.errors import OpenSizes, UserError
from hase.utils.lazy import onnx
from hase.utils.logger import get_logger
from hase.utils.model_files import (
    COLLECTION_KEY,
    DEFAULT_DIMS_KEY,
    GROUP_KEY,
    SHOWN,
    every_tensor,
    locations,
    read_whole_model,
)
from hase.utils.model_graphs import find_tensors, is_hollow, read_as_written, read_graph
from hase.utils.ort_sessions import kind_of_file, model_errors
from hase.utils.paths import as_file_name

log = get_logger("parser")
DEFAULT_DIMS = TypeAdapter(dict[str, Annotated[int, Field(strict=True, ge=1, lt=2**63)]])
TENSOR_FIELDS = ("name", "data_type", "external_data")
MOST_CALLED = 50_000  # nodes; ONNX Runtime takes half a minute to write so many calls out
DEEPEST_CALLS = 100  # functions; ONNX Runtime runs out of stack at some thousands
SHOWN_SIZES = 3  # places of an open dimension
NO_SIZE = "SIZE"  # in place of one, where none is known to fit
OWN_ENDING = re.compile(r"_token_\d+$")  # of names that ONNX Runtime derives from other names


class _Reading(NamedTuple):
    """How models are read: whether files of their weights may be missing, and whether their floats are in half precision."""

    no_weights: bool = False
    half: bool = False


_reading = _Reading()


@contextmanager
def reading(no_weights: bool = False, half: bool = False) -> Iterator[None]:
    """While the block runs, the files of models' weights may be missing, or models are read in half precision."""
    global _reading
    before, _reading = _reading, _Reading(no_weights, half)
    try:
        yield
    finally:
        _reading = before


@dataclass(frozen=True)
class Source:
    """A model as the user gave it.

    Attributes:
        name: the file's stem, or the name given for a model in memory.
        group, collection: those that the file names; "" where it names none.
        graph_only: the graph; its large tensors refer to files, as `hase.utils.model_graphs` describes it.
        given: the file, or the model in memory.
        sha256: the hash of the file, or of the serialised model; with an ending where it is read in half precision, or at
            another batch.
        dims: the sizes of its dynamic dimensions, and perhaps its new batch (`hase.ort_analysis.graph.new_batch`).
    """

    name: str
    group: str
    collection: str
    graph_only: onnx.ModelProto
    given: Path | onnx.ModelProto
    sha256: str
    dims: dict[str, int]

    @property
    def rebatched(self) -> bool:
        """Whether it is taken at another batch than the fixed one of its file."""
        return REBATCH in self.dims and REBATCH not in self.open_names.values()

    @property
    def all_fixed(self) -> bool:
        """Whether no size was given besides a new batch: its graph holds all of them."""
        return not self.dims or (len(self.dims) == 1 and self.rebatched)

    @cached_property
    def loadable(self) -> Path | bytes:
        """The file, or the serialised model, that a runtime loads: with all weights.

        Raises:
            UserError: dynamic dimensions without a name get one, and the weights can't be read, or take more than 2 GiB; or the
                model is taken at another batch than its file's.
        """
        if self.rebatched:
            raise UserError(f"{self.name}: its file has another batch than {self.dims[REBATCH]}, so that its graph in ONNX "
                            "Runtime can be predicted, but nothing can load it: leave --rebatch out")
        if isinstance(self.given, Path) and not any("." in dim for dim in open_dims(self.graph_only)):
            return self.given
        whole = read_whole_model(self.given) if isinstance(self.given, Path) else self.given
        open_dims(whole)  # gives them names
        with model_errors(self.name):
            return bytes(whole.SerializeToString())

    @property
    def steering(self) -> dict[str, Any]:
        """Values for inputs that decide how often a Loop runs or which branch of an If, and strings that the model knows (see
        `steering_inputs`)."""
        return steering_inputs(self.graph_only.graph, self.dims)

    @property
    def open_names(self) -> dict[tuple[str, int], str]:
        """The names of the dynamic dimensions, by input and axis."""
        return {(value.name, axis): dim.dim_param for value in self.graph_only.graph.input
                for axis, dim in enumerate(value.type.tensor_type.shape.dim) if dim.dim_param}


def open_dims(proto: onnx.ModelProto) -> dict[str, list[str]]:
    """The dynamic dimensions of the graph's inputs by name, each with the places where it occurs.

    Writes a name into `proto` for every dimension that has none: `<input>.<axis>`.
    """
    places: dict[str, list[str]] = {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in constants or not value.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                continue
            if not dim.dim_param:
                dim.dim_param = f"{value.name}.{axis}"
            places.setdefault(dim.dim_param, []).append(f"{value.name}, axis {axis}")
    return places


def dynamic_names(model: Path, names: Iterable[str]) -> set[str]:
    """Those of `names` that are dynamic dimensions of the file `model`, or may be sizes inside its graph.

    Raises:
        UserError: it can't be read.
    """
    proto = read_as_written(model)
    check_sound(proto, str(model))
    own = set(open_dims(proto)) | ({REBATCH} if fixed_batch(proto) else set())
    return (own & set(names)) | _sizes_by_data(proto, names)


def _sizes_by_data(proto: onnx.ModelProto, names: Iterable[str]) -> set[str]:
    """Those of `names` that may be a size inside the graph.

    Such a size has a name in the graph or is called `<tensor>.<axis>`; or it is the number of boxes that NonMaxSuppression
    selects, the trips of a Loop, or a branch of an If. Tensors that ORT moves out of a branch or a function get longer names,
    which end in the model's own.
    """
    graph = proto.graph
    named = {dim.dim_param for value in (*graph.output, *graph.value_info) for dim in value.type.tensor_type.shape.dim}
    named |= body_sizes(graph)
    if selects_boxes(graph):
        named.add(DETECTIONS)
    made = tuple(made_within(graph.node)) + tuple(out for function in proto.functions for out in made_within(function.node))

    def stands_for_a_size(name: str) -> bool:
        tensor = tensor_of_size(name)
        return bool(tensor) and OWN_ENDING.sub("", tensor).endswith(made)

    return {name for name in names if name in named or stands_for_a_size(name)}


def tensor_of_size(name: str) -> str:
    """The tensor in a name of the form `<tensor>.<axis>`; "" for another name."""
    tensor, _, axis = name.rpartition(".")
    return tensor if axis.isdigit() else ""


def default_dims(proto: onnx.ModelProto, shown: str) -> dict[str, int]:
    """The default sizes that the exporter wrote into a dynamic model; empty where there are none. `shown` is the model's name
    in errors.

    Raises:
        UserError: what is written there are no sizes.
    """
    for prop in proto.metadata_props:
        if prop.key == DEFAULT_DIMS_KEY:
            try:
                return DEFAULT_DIMS.validate_json(prop.value)
            except ValidationError as error:
                raise UserError(f"{shown}: its metadata {DEFAULT_DIMS_KEY} is damaged ({error.errors()[0]['msg']}); export it "
                                "anew, or remove that entry and give its sizes") from None
    return {}


def origin_in(proto: onnx.ModelProto) -> tuple[str, str]:
    """The group and the collection that an exporter wrote into a model; "" where there is none."""
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    return metadata.get(GROUP_KEY, ""), metadata.get(COLLECTION_KEY, "")


def damage_in(message: Any) -> str:
    """What is wrong with the names and element types in a part of a model: a name that is no text, or an unknown type; "" where
    nothing is."""
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
    """How many nodes the main graph has if every call of a function is written out; each body of a node counts.

    Raises:
        UserError: functions call each other more than DEEPEST deep, or in a circle.
    """
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
    """Checks what ONNX Runtime and the rest of Hase rely on: all names are text, all element types are known, and functions do
    not call each other without end.

    Args:
        proto: the model.
        shown: its name in errors.

    Raises:
        UserError: the model is damaged.
    """
    if damage := damage_in(proto):
        raise UserError(f"{shown}: damaged, or of a newer version of ONNX: {damage}")
    if nodes_called(proto, shown) > MOST_CALLED:
        raise UserError(f"{shown}: its functions call each other so often that they stand for more than {MOST_CALLED:,} nodes")


def read_source(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None) -> Source:
    """Reads a model and checks it: it has nodes, and every dynamic dimension has a size.

    Raises:
        UserError: no such file, no ONNX, no nodes, weights missing, an unknown dimension, or one left open.
    """
    given = dict(dims or {})
    if isinstance(model, Path):
        shown, stem = str(model), model.stem
        proto = read_graph(model, _reading.no_weights)
        digest = files.kept_sha256(model)
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
        proto, name, digest = in_half(proto, shown), f"{name or stem}{SUFFIX}", f"{digest}{SUFFIX}"
    dynamic = open_dims(proto)
    if REBATCH in given and REBATCH not in dynamic:
        proto, digest = at_batch(proto, given[REBATCH], shown), f"{digest}_{REBATCH}{given[REBATCH]}"
    unread = {tensor.name for tensor in proto.graph.initializer if is_hollow(tensor)}
    if unread and (decisive := sorted(unread & read_by_value(proto.graph))):
        raise UserError(f"{shown}: what it computes depends on its {decisive[0]}, whose file is missing")
    unknown = sorted(set(given) - set(dynamic) - {REBATCH} - _sizes_by_data(proto, given))
    if unknown:
        available = f"its dynamic dimensions are {', '.join(sorted(dynamic))}" if dynamic else (
            "all its dimensions are fixed (--rebatch 8 takes it at a batch of 8, where its graph allows that)")
        within = sorted(body_sizes(proto.graph))
        available += f"; of Loops and Ifs {', '.join(within)} can be given" if within else ""
        raise UserError(f"{shown}: no dynamic dimension {', '.join(unknown)}; {available}")
    stamped = {dim: size for dim, size in default_dims(proto, shown).items() if dim in dynamic and dim not in given}
    if stamped:
        log.info("%s: %s, as its file suggests (--dim says otherwise)", stem,
                 ", ".join(f"{dim}={size}" for dim, size in stamped.items()))
    given |= stamped
    if missing := [dim for dim in dynamic if dim not in given]:
        fitting = fitting_sizes(proto, missing, given, stem)
        options = " ".join(f"--dim {shlex.quote(f'{dim}={fitting.get(dim, NO_SIZE)}')}" for dim in missing)
        one = f"dimension {missing[0]} ({'; '.join(dynamic[missing[0]][:SHOWN_SIZES])}) is open; give its size"
        several = f"{len(missing)} dimensions are open ({cli.first_of(missing)}); give their sizes"
        raise OpenSizes(f"{shown}: {one if len(missing) == 1 else several}", options)
    group, collection = origin_in(proto)
    return Source(name=name or stem, group=group, collection=collection, graph_only=proto, given=model, sha256=digest,
                  dims=given)
