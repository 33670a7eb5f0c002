"""Kernel records: kernels, models with their nodes, indexes, element types, and the order in which nodes run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from hase.records.operators import operator_row
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import onnx
from hase.utils.paths import FileName, FileNamePart, as_file_name

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "float64": 8, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "string": 16, "complex64": 8, "complex128": 16,
    "float8e4m3fn": 1, "float8e5m2": 1, "int4": 0.5, "uint4": 0.5,
}
SHORT_DTYPE = {"float32": "fp32", "float16": "fp16", "float64": "fp64", "bfloat16": "bf16"}
RECORD_VERSION = 2
INDEX_VERSION = 2
REMAKE = "python ort_analysis/fusion_detector.py"
Count = Annotated[int, Field(ge=0, le=10**30)]  # elements, operations or bytes; a larger number means damage
# Attributes from which costs and features of a kernel are computed, and whether they hold several integers or one.
INTEGER_ATTRIBUTES = {
    "dilations": True, "kernel_shape": True, "pads": True, "perm": True, "strides": True, "tree_roots": True, "axis": False,
    "batch_dims": False, "blocksize": False, "ceil_mode": False, "channels_last": False, "group": False, "layout": False,
    "transA": False, "transB": False}
RunCount = Annotated[float, Field(ge=0, le=1e100)]  # of a node in a run of the model
BRANCHES = {"then": "then_branch", "else": "else_branch"}  # an If's attributes, by the names of dimensions
TOLERANCE = 1e-6  # of sums
MOST_RUNS = 10_000  # of nodes in one order: longer loops are cut short, and the omitted trips are extrapolated


def type_name(code: int) -> str:
    """numpy's name of an ONNX element type, or ONNX's own if numpy has none."""
    name = onnx.TensorProto.DataType.Name(code).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def type_code(dtype: str) -> int:
    """ONNX's number of an element type with this name in the records."""
    name = {"float32": "float", "float64": "double"}.get(dtype, dtype).upper()
    return int(onnx.TensorProto.DataType.Value(name))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type for a tensor's `dtype`; strings are Python objects. A type that numpy lacks is a `UserError`."""
    if name == "string":
        return np.dtype(object)
    try:
        return np.dtype(name)
    except TypeError:
        raise UserError(f"element type {name}: numpy has no such type, so no dummy tensor can be made") from None


def session_dtype(text: str) -> str:
    """The element type of a session's type: `float32` for `tensor(float)`."""
    inner = text[text.find("(") + 1:text.rfind(")")] if "(" in text else text
    return {"float": "float32", "double": "float64"}.get(inner, inner)


class Tensor(Frozen):
    """A tensor's element type (numpy's name) and shape. `dtype` "" means an omitted optional input or output. A value that is
    not a tensor has its type as `dtype`, e.g. `sequence(map(int64,float32))`, and no shape or size."""

    dtype: str
    shape: tuple[Count, ...] = ()

    @property
    def present(self) -> bool:
        return bool(self.dtype)

    @property
    def is_tensor(self) -> bool:
        """Whether it is a dense tensor, not omitted, a sequence, a map, an optional or a sparse tensor."""
        return self.present and "(" not in self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.is_tensor else 0

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * DTYPE_BYTES.get(self.dtype, 4))


class KernelInput(Tensor, allow_inf_nan=True):  # a Pad may pad with -Infinity
    """An input of a kernel."""

    constant: bool = False  # the graph holds its value (a weight, a shape, an axis, a scale, …)
    values: tuple[int | float | bool, ...] | None = None  # the flat value of a small constant that affects what the kernel does
    # the smallest and largest value of a large integer constant, such as an index table
    value_range: tuple[int, int] | None = None


def input_at(inputs: Sequence[KernelInput], index: int | None) -> KernelInput:
    """The input at an index, or an omitted one if there is none."""
    return inputs[index] if index is not None and index < len(inputs) else KernelInput(dtype="")


class Kernel(Frozen):
    """One fused operation with attributes, types and shapes: everything needed to build a model of this kernel alone."""

    id: FileName  # readable and unique, `<type>_<H>x<W>_<rest>`, the same in all models
    type: str  # the canonical name of the operation without shapes, e.g. `Conv_Add_Relu`
    op_type: str
    domain: str
    opset: int
    attributes: dict[str, Any]  # by name; a tensor is `{"dtype", "shape", "values"}`
    inputs: tuple[KernelInput, ...]
    outputs: tuple[Tensor, ...]
    flops: Count  # floating-point operations; a multiply-add counts as two
    # bytes_read, bytes_written: all inputs and outputs, each counted once; 0 for operations that only rename a tensor
    bytes_read: Count
    bytes_written: Count
    weight_bytes: Count

    @field_validator("attributes")
    @classmethod
    def _integers_if_costs_need_them(cls, attributes: dict[str, Any]) -> dict[str, Any]:
        for name, several in INTEGER_ATTRIBUTES.items():
            if (value := attributes.get(name)) is None and name not in attributes:
                continue
            numbers = value if several and isinstance(value, (list, tuple)) else [value]
            if several != isinstance(value, (list, tuple)) or not all(isinstance(number, int) for number in numbers):
                raise ValueError(f"attribute {name} must be {'whole numbers' if several else 'a whole number'}, not "
                                 f"{str(value)[:80]}")
        return attributes

    @property
    def time_by_values(self) -> bool:
        """Whether its CPU time depends on the values of its inputs."""
        return operator_row(self.op_type).time_by_values

    @property
    def moves_data(self) -> bool:
        """Whether it reads or writes memory. Otherwise it only renames a tensor and takes almost no time."""
        return self.bytes_read + self.bytes_written > 0

    @property
    def subgraphs(self) -> tuple[str, ...]:
        """The attributes with a graph (of If, Loop and Scan), of which the record keeps only a hash."""
        return tuple(sorted(key for key, value in self.attributes.items() if isinstance(value, dict) and "graph" in value))

    @property
    def activations(self) -> tuple[KernelInput, ...]:
        """The inputs that are not constant."""
        return tuple(tensor for tensor in self.inputs if tensor.present and not tensor.constant)

    @property
    def dtype(self) -> str:
        """The element type of the computation: of the first floating-point input, else of the first input. For operators on
        quantised tensors, always that of the first input."""
        if operator_row(self.op_type).in_whole_numbers:
            return input_at(self.inputs, 0).dtype
        first = ""
        for tensor in (*self.inputs, *self.outputs):
            if "float" in tensor.dtype:
                return tensor.dtype
            first = first or tensor.dtype
        return first


class Origin(Frozen):
    """A node of the model as exported."""

    name: str
    op_type: str


class Node(Frozen):
    """One node of the optimised graph."""

    name: str  # unique in the graph, also in ORT's profile
    kernel_id: str
    provider: str  # ORT's execution provider, `cpu` or `cuda`
    # inputs, outputs: tensor names; "" for an omitted optional one
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[Origin, ...] = ()  # nodes of the exported model that were fused into this one; shared if ORT split a fusion
    # runs per run of the model; may exceed one in the body of a Loop or Scan, and then also for the node of the body
    runs: RunCount = Field(1.0, exclude_if=lambda runs: runs == 1.0)  # omitted if 1, as in most cases, so that files stay small
    # the node whose body contains this one; "" in the main graph. Tensors of a body are named `<node>/<tensor>`
    inside: str = Field("", exclude_if=lambda inside: not inside)


class ModelOrigin(NamedTuple):
    """A model's group and collection; "" if not given."""

    group: str = ""
    collection: str = ""


class GuessedRuns(Frozen):
    """The assumed number of runs of a body, if it is uncertain."""

    taken: str  # the assumed number of trips, or the assumed branch, `then` or `else`
    # low, high: bounds, as multiples of the assumed number of runs
    low: RunCount
    high: RunCount


class ModelRecord(Frozen):
    """A model's optimised graph in one flavour, split into kernels."""

    version: int = RECORD_VERSION
    model: FileName  # the file's stem with sizes of dynamic dimensions: `resnet18@batch=16,height=224,width=224`
    file_stem: FileName
    # shared by variants of one model, which are held out together, e.g. `resnet`; by default the file's name. Without "|",
    # which separates groups in tables
    group: FileName
    # source of the architecture, e.g. `timm`; "" if unknown. Collections may share names of groups
    collection: FileNamePart = Field("", exclude_if=lambda collection: not collection)
    sha256: str  # hash of the model file, or of the serialised model
    dims: dict[str, int]
    flavour: Flavour
    derived: bool  # this machine lacks the flavour's device; the graph comes from ORT's CPU provider with the same optimisers
    # sizes were fixed before ONNX Runtime optimised the model. Otherwise the graph takes any sizes and contains the computation
    # of shapes
    static: bool = True
    assumed: dict[str, tuple[int, ...]] = {}  # tensor shapes, by name, that depend on data; the largest that ONNX allows
    # by name, the nodes whose body runs an uncertain number of times
    guessed: dict[str, GuessedRuns] = Field({}, exclude_if=lambda guessed: not guessed)
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    weight_bytes: int  # bytes of constants of the optimised graph
    opsets: dict[str, int]
    kernels: dict[str, Kernel]
    nodes: tuple[Node, ...]  # in execution order; the nodes of a body follow its node

    @model_validator(mode="after")
    def _names_agree(self) -> ModelRecord:
        if wrong := [name for name, kernel in self.kernels.items() if kernel.id != name]:
            raise ValueError(f"kernel {wrong[0]} has another id, {self.kernels[wrong[0]].id}")
        if missing := [node for node in self.nodes if node.kernel_id not in self.kernels]:
            raise ValueError(f"node {missing[0].name} is of kernel {missing[0].kernel_id}, which is not there")
        return self

    def kernel_of(self, node: Node) -> Kernel:
        return self.kernels[node.kernel_id]

    def same_kernels(self, other: ModelRecord) -> bool:
        """Whether another record has the same kernels in the same order."""
        return [node.kernel_id for node in self.nodes] == [node.kernel_id for node in other.nodes]

    @property
    def dims_run(self) -> dict[str, int]:
        """The sizes for a run as in the record: `dims` and the assumed branches."""
        return {f"{node}.{guess.taken}": 1 for node, guess in self.guessed.items() if not guess.taken.isdigit()} | self.dims

    @property
    def dims_otherwise(self) -> dict[str, int]:
        """The sizes with which every If takes the branch that was not assumed; empty if no branch was assumed."""
        opposite = {"then": "else", "else": "then"}
        chosen = {f"{node}.{opposite[guess.taken]}": 1 for node, guess in self.guessed.items() if guess.taken in opposite}
        return chosen | self.dims if chosen else {}

    @property
    def batch(self) -> int | None:
        """The first dimension of the first input, or None."""
        first = next(iter(self.inputs.values()), None)
        return first.shape[0] if first and first.shape else None


class IndexEntry(Frozen):
    """A kernel of the index, and the record names of the models with it."""

    kernel: Kernel
    models: tuple[FileName, ...]


class KernelIndex(Frozen):
    """All kernels of a flavour's records, by type and id; groups and collections by record name."""

    version: int = INDEX_VERSION
    flavour: Flavour
    groups: dict[str, FileName]
    collections: dict[str, FileName] = Field({}, exclude_if=lambda collections: not collections)
    kernels: dict[str, dict[str, IndexEntry]]

    @model_validator(mode="after")
    def _names_agree(self) -> KernelIndex:
        wrong = [name for entries in self.kernels.values() for name, entry in entries.items() if entry.kernel.id != name]
        if wrong:
            raise ValueError(f"kernel {wrong[0]} has another id")
        models = {model for entries in self.kernels.values() for entry in entries.values() for model in entry.models}
        if unknown := models - self.groups.keys():
            raise ValueError(f"the group of model {min(unknown)} is not there")
        return self

    def groups_of(self, entry: IndexEntry) -> tuple[str, ...]:
        """The groups of the models that contain a kernel, sorted."""
        return tuple(sorted({self.groups[model] for model in entry.models}))

    def entries(self) -> list[IndexEntry]:
        return [entry for by_id in self.kernels.values() for entry in by_id.values()]

    def all_kernels(self) -> list[Kernel]:
        return [entry.kernel for entry in self.entries()]


def record_name(stem: str, dims: dict[str, int], static: bool = True) -> str:
    """A model's name with its sizes, usable as a file name: `resnet18@batch=16`. If sizes were not fixed before the
    optimisation, `resnet18@batch=16,dynamic`: another graph with other latencies."""
    if not dims:
        return as_file_name(stem)
    sizes = [f"{name}={size}" for name, size in sorted(dims.items())]
    return as_file_name(stem + "@" + ",".join(sizes if static else [*sizes, "dynamic"]))


def zeros(shape: tuple[int, ...], name: str) -> np.ndarray:
    """A tensor of element type `name` filled with zeros, or with empty strings."""
    return np.full(shape, "", object) if name == "string" else np.zeros(shape, numpy_dtype(name))


# declared inputs and outputs ----------------------------------------------------------------------------------------------

class OpenTensor(Frozen):
    """A tensor's element type (numpy's name) and shape; a dynamic dimension is its name, an unknown rank an empty shape."""

    dtype: str
    shape: tuple[int | str, ...]


class Interface(Frozen):
    """A model's inputs and outputs by name. `set_by_model`: dynamic dimensions whose only valid size follows from the model's
    weights and attributes."""

    inputs: dict[str, OpenTensor]
    outputs: dict[str, OpenTensor]
    set_by_model: dict[str, int]


# order of nodes, and uncertain runs ----------------------------------------------------------------------------------------

def holds_bodies(record: ModelRecord) -> bool:
    """Whether a record contains nodes of bodies."""
    return any(node.inside for node in record.nodes)


def _children(record: ModelRecord) -> Mapping[str, list[int]]:
    """Indices of nodes, by the name of the node whose body contains them."""
    positions: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(record.nodes):
        positions[node.inside].append(index)
    return positions


def _body_runs(record: ModelRecord, indices: Sequence[int]) -> float:
    """How often a body with these nodes runs. A node in it that has a body itself runs as often as that body."""
    return min((record.nodes[index].runs for index in indices if record.nodes[index].runs), default=0.0)


def run_order(record: ModelRecord, cut: int = 1) -> list[int]:
    """The indices in `record.nodes` of the nodes that run, in order. Each trip of a body adds its nodes, and then the node of
    the body, which checks for another trip. `cut` divides the number of trips of every body; at least one trip remains."""
    if not holds_bodies(record):
        return list(range(len(record.nodes)))
    children = _children(record)

    def ordered(indices: list[int], outer_runs: float) -> list[int]:
        order: list[int] = []
        for index in indices:
            inner = children.get(record.nodes[index].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                order += [index] if record.nodes[index].runs else []
                continue
            trips = max(1, round(runs / outer_runs))
            order += [*ordered(inner, runs), index] * max(1, trips // cut)
        return order

    return ordered(children[""], 1.0)


def runs_in_order(record: ModelRecord, cut: int = 1) -> int:
    """The length of `run_order`, without building it."""
    children = _children(record)

    def count(indices: list[int], outer_runs: float) -> int:
        total = 0
        for index in indices:
            inner = children.get(record.nodes[index].name)
            runs = _body_runs(record, inner or ())
            if not inner or not runs or not outer_runs:
                total += bool(record.nodes[index].runs)
                continue
            total += max(1, max(1, round(runs / outer_runs)) // cut) * (count(inner, runs) + 1)
        return total

    return count(children[""], 1.0)


def shortest_cut(record: ModelRecord) -> int:
    """The smallest `cut` with at most MOST_RUNS nodes in order, or else the one with the shortest order; 1 without bodies."""
    cut = 1
    if holds_bodies(record):
        while (runs := runs_in_order(record, cut)) > MOST_RUNS and runs > runs_in_order(record, 2 * cut):
            cut *= 2
    return cut


def _costs(record: ModelRecord) -> dict[str, float]:
    """The costs of nodes by name, including bodies: operations plus bytes plus 1 per node."""
    costs: dict[str, float] = {}
    for node in reversed(record.nodes):  # a node comes before its body
        kernel = record.kernel_of(node)
        costs[node.name] = costs.get(node.name, 0.0) + node.runs * (kernel.flops + kernel.bytes_read + kernel.bytes_written + 1)
        if node.inside:
            costs[node.inside] = costs.get(node.inside, 0.0) + costs[node.name]
    return costs


def at_guess(record: ModelRecord, end: Literal["low", "high"]) -> ModelRecord:
    """The record with every uncertain number of runs at its lowest or highest. If the other branch of an If may be cheaper,
    only so many nodes of this branch remain that they cost as much as the other one."""
    factor = {"": 1.0}  # of bodies, by the node that holds them; a node comes before its body
    costs_left: dict[str, float] = {}  # costs that the nodes of a branch may still use up
    costs = _costs(record) if record.guessed else {}
    nodes = []
    for node in record.nodes:
        multiple = factor[node.inside]
        if node.inside in costs_left:
            is_kept = costs[node.name] <= costs_left[node.inside] * (1 + TOLERANCE)
            costs_left[node.inside] -= costs[node.name] * is_kept
            multiple *= is_kept
        guess = record.guessed.get(node.name)
        share = getattr(guess, end) if guess is not None else 1.0
        if guess is not None and guess.taken in BRANCHES and share < 1.0:
            costs_left[node.name] = share * sum(costs[inner.name] for inner in record.nodes if inner.inside == node.name)
        elif guess is not None and guess.taken in BRANCHES:
            factor[node.name] = multiple * share
            nodes.append(node.model_copy(update={"runs": multiple * node.runs}))
            continue
        else:
            multiple *= share
        factor[node.name] = multiple
        nodes.append(node.model_copy(update={"runs": multiple * node.runs}))
    return record.model_copy(update={"nodes": tuple(nodes)})
