"""Schemas of kernel records: kernels, models with their nodes, and indexes; the element types of their tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.frozen import Frozen
from hase.utils.lazy import onnx
from hase.utils.paths import FileName, FileNamePart, as_file_name

DTYPE_BYTES = {
    "float32": 4, "float16": 2, "float64": 8, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "string": 16, "complex64": 8, "complex128": 16,
    "float8e4m3fn": 1, "float8e5m2": 1, "int4": 0.5, "uint4": 0.5,
}
SHORT_DTYPE = {"float32": "fp32", "float16": "fp16", "float64": "fp64", "bfloat16": "bf16"}


def type_name(code: int) -> str:
    """numpy's name of an ONNX element type (ONNX's own where numpy has none)."""
    name = onnx.TensorProto.DataType.Name(code).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def type_code(dtype: str) -> int:
    """ONNX's number of an element type, given its name in the records."""
    name = {"float32": "float", "float64": "double"}.get(dtype, dtype).upper()
    return int(onnx.TensorProto.DataType.Value(name))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type for a tensor's `dtype`; strings are Python objects.

    Raises:
        UserError: numpy has no such type.
    """
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


RECORD_VERSION = 2
INDEX_VERSION = 2
REMAKE = "python ort_analysis/fusion_detector.py"


Count = Annotated[int, Field(ge=0, le=10**30)]  # of elements, operations or bytes; a larger number is damage, no float

# Attributes that costs and features of a kernel are computed from, and whether they hold several whole numbers or one.
WHOLE_ATTRIBUTES = {
    "dilations": True, "kernel_shape": True, "pads": True, "perm": True, "strides": True, "tree_roots": True, "axis": False,
    "batch_dims": False, "blocksize": False, "ceil_mode": False, "channels_last": False, "group": False, "layout": False,
    "transA": False, "transB": False}
Runs = Annotated[float, Field(ge=0, le=1e100)]  # of a node in a run of the model


class Tensor(Frozen):
    """A tensor's element type (numpy's name) and shape. `dtype` "" stands for an omitted optional input or output.

    A value that is no tensor has its type as `dtype`, for example `sequence(map(int64,float32))`. It has no shape and no size,
    because its contents are unknown; tensors that are put into it or taken out of it are counted where that happens.
    """

    dtype: str
    shape: tuple[Count, ...] = ()

    @property
    def present(self) -> bool:
        return bool(self.dtype)

    @property
    def is_tensor(self) -> bool:
        """Whether it is present and a dense tensor, not a sequence, map, optional or sparse tensor."""
        return self.present and "(" not in self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.is_tensor else 0

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * DTYPE_BYTES.get(self.dtype, 4))


class KernelInput(Tensor, allow_inf_nan=True):  # a Pad may pad with -Infinity
    """An input of a kernel.

    Attributes:
        constant: the graph holds its value (a weight, or a shape, an axis, a scale, …).
        values: the flat value of a small constant that decides what the kernel does.
        value_range: the smallest and largest value of a large integer constant, such as an index table.
    """

    constant: bool = False
    values: tuple[int | float | bool, ...] | None = None
    value_range: tuple[int, int] | None = None


def input_at(inputs: Sequence[KernelInput], place: int | None) -> KernelInput:
    """An input of a kernel by its position; one that is not present where there is none, or no position."""
    return inputs[place] if place is not None and place < len(inputs) else KernelInput(dtype="")


class Kernel(Frozen):
    """One fused operation with its attributes, types and shapes: all that is needed to build a model of this kernel alone.

    Attributes:
        id: readable and unique, `<type>_<H>x<W>_<rest>`. A kernel has the same id in all models.
        type: the canonical name of the operation, e.g. `Conv_Add_Relu`, without shapes.
        op_type, domain, opset: the ONNX operator.
        attributes: by name; a tensor is `{"dtype", "shape", "values"}`.
        flops: floating-point operations; a multiply-add counts as two.
        bytes_read, bytes_written: all inputs and all outputs, each counted once; 0 for operations that only rename a tensor.
        weight_bytes: the constant part of the inputs.
    """

    id: FileName
    type: str
    op_type: str
    domain: str
    opset: int
    attributes: dict[str, Any]
    inputs: tuple[KernelInput, ...]
    outputs: tuple[Tensor, ...]
    flops: Count
    bytes_read: Count
    bytes_written: Count
    weight_bytes: Count

    @field_validator("attributes")
    @classmethod
    def _whole_numbers_where_costs_need_them(cls, attributes: dict[str, Any]) -> dict[str, Any]:
        for name, several in WHOLE_ATTRIBUTES.items():
            if (value := attributes.get(name)) is None and name not in attributes:
                continue
            numbers = value if several and isinstance(value, (list, tuple)) else [value]
            if several != isinstance(value, (list, tuple)) or not all(isinstance(number, int) for number in numbers):
                raise ValueError(f"attribute {name} must be {'whole numbers' if several else 'a whole number'}, not "
                                 f"{str(value)[:80]}")
        return attributes

    @property
    def time_by_values(self) -> bool:
        """Whether its time on a CPU depends on the values of its inputs."""
        return operator_row(self.op_type).time_by_values

    @property
    def moves_data(self) -> bool:
        """Whether it reads or writes memory. A kernel that does not only renames a tensor and takes almost no time."""
        return self.bytes_read + self.bytes_written > 0

    @property
    def subgraphs(self) -> tuple[str, ...]:
        """The attributes that hold a graph (of If, Loop and Scan). The record keeps only a hash of them."""
        return tuple(key for key, value in sorted(self.attributes.items()) if isinstance(value, dict) and "graph" in value)

    @property
    def activations(self) -> tuple[KernelInput, ...]:
        """The inputs that are not constant."""
        return tuple(tensor for tensor in self.inputs if tensor.present and not tensor.constant)

    @property
    def dtype(self) -> str:
        """The element type of the computation: that of the first floating-point input, else of the first input; of an operator
        on quantised tensors that of the first input."""
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
    """One node of the optimised graph, in execution order.

    Attributes:
        name: unique in the graph; ORT's profile uses it.
        provider: the execution provider that ORT assigned, `cpu` or `cuda`.
        inputs, outputs: tensor names; "" for an omitted optional one.
        origins: the nodes of the exported model that were fused into this one. Where ORT split a fusion, several nodes share
            them.
        runs: how many times it runs in one run of the model. In the body of a Loop or Scan this may be more than one; the node
            that holds the body has the same number.
        inside: the name of the node whose body contains this one; "" in the main graph. Tensors made in a body are named
            `<node>/<tensor>`.
    """

    name: str
    kernel_id: str
    provider: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[Origin, ...] = ()
    runs: Runs = Field(1.0, exclude_if=lambda runs: runs == 1.0)  # omitted where it is 1, as it mostly is: files stay small
    inside: str = Field("", exclude_if=lambda inside: not inside)


BRANCHES = {"then": "then_branch", "else": "else_branch"}  # an If's attributes, by the names of dimensions


class ModelOrigin(NamedTuple):
    """Where a model comes from: its group and its collection; "" for one that is not given."""

    group: str = ""
    collection: str = ""


class GuessedRuns(Frozen):
    """The uncertain number of runs of a body.

    Attributes:
        taken: the assumed number of trips, or the assumed branch, `then` or `else`.
        low, high: the smallest and largest number of runs, as multiples of the assumed one.
    """

    taken: str
    low: Runs
    high: Runs


class ModelRecord(Frozen):
    """A model's optimised graph in one flavour, taken apart into kernels.

    Attributes:
        model: the file's stem, with the sizes of dynamic dimensions: `resnet18@batch=16,height=224,width=224`.
        file_stem: the name of the model file without its suffix.
        group: the name of the models that are variants of each other and are held out together, e.g. `resnet`. A model
            without known variants is its own group, named after its file. Contains no "|", which separates groups in tables.
        collection: where its architecture comes from, e.g. `timm`; "" where that is not known. Several collections may have a
            group of one name.
        sha256: the hash of the model file, or of the serialised model where there was no file.
        dims: the sizes given to dynamic dimensions.
        derived: whether the flavour's device is not on this machine. The graph then comes from ORT's CPU provider, which ran
            the same optimisers.
        static: whether the sizes in `dims` were fixed before ONNX Runtime optimised the model, or all sizes are fixed in the
            file. Otherwise this is the graph of a session that takes any sizes, so it contains the computation of shapes.
        assumed: shapes of tensors, by name, that depend on data. The largest shape that ONNX allows was assumed.
        guessed: the nodes, by name, whose body runs an uncertain number of times.
        inputs, outputs: of the graph, by tensor name.
        weight_bytes: bytes of constants of the optimised graph.
        opsets: the model's operator-set imports.
        kernels: by id.
        nodes: in execution order; the nodes of a body follow the node that holds it.
    """

    version: int = RECORD_VERSION
    model: FileName
    file_stem: FileName
    group: FileName
    collection: FileNamePart = Field("", exclude_if=lambda collection: not collection)
    sha256: str
    dims: dict[str, int]
    flavour: Flavour
    derived: bool
    static: bool = True
    assumed: dict[str, tuple[int, ...]] = {}
    guessed: dict[str, GuessedRuns] = Field({}, exclude_if=lambda guessed: not guessed)
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    weight_bytes: int
    opsets: dict[str, int]
    kernels: dict[str, Kernel]
    nodes: tuple[Node, ...]

    @model_validator(mode="after")
    def _names_agree(self) -> ModelRecord:
        if wrong := [name for name, kernel in self.kernels.items() if kernel.id != name]:
            raise ValueError(f"kernel {wrong[0]} has another id, {self.kernels[wrong[0]].id}")
        if missing := [node for node in self.nodes if node.kernel_id not in self.kernels]:
            raise ValueError(f"node {missing[0].name} is of kernel {missing[0].kernel_id}, which is not there")
        return self

    def kernel_of(self, node: Node) -> Kernel:
        return self.kernels[node.kernel_id]

    @property
    def dims_run(self) -> dict[str, int]:
        """The sizes for a run that does what the record describes: `dims`, and the branches that were assumed."""
        return {f"{node}.{guess.taken}": 1 for node, guess in self.guessed.items() if not guess.taken.isdigit()} | self.dims

    @property
    def dims_otherwise(self) -> dict[str, int]:
        """The sizes with which every If takes the branch that was not assumed; empty where no branch was assumed."""
        opposite = {"then": "else", "else": "then"}
        chosen = {f"{node}.{opposite[guess.taken]}": 1 for node, guess in self.guessed.items() if guess.taken in opposite}
        return chosen | self.dims if chosen else {}

    @property
    def batch(self) -> int | None:
        """The first dimension of the first input; None for a scalar or where there is no input."""
        first = next(iter(self.inputs.values()), None)
        return first.shape[0] if first and first.shape else None


class IndexEntry(Frozen):
    """A kernel of the index, and the record names of the models that contain it."""

    kernel: Kernel
    models: tuple[FileName, ...]


class KernelIndex(Frozen):
    """All kernels in the records of one flavour, by type and then by id.

    Attributes:
        groups: the group of every model, by record name.
        collections: the collection of every model that has one, by record name.
    """

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
        return [entry for of_type in self.kernels.values() for entry in of_type.values()]

    def all_kernels(self) -> list[Kernel]:
        return [entry.kernel for entry in self.entries()]


def record_name(stem: str, dims: dict[str, int], static: bool = True) -> str:
    """A model's name with the sizes given to its dynamic dimensions, usable as a file name: `resnet18@batch=16`.

    Where the sizes were not fixed before the optimisation, `resnet18@batch=16,dynamic`: another graph, with other latencies.
    """
    if not dims:
        return as_file_name(stem)
    sizes = [f"{name}={size}" for name, size in sorted(dims.items())]
    return as_file_name(stem + "@" + ",".join(sizes if static else [*sizes, "dynamic"]))


def zeros(shape: tuple[int, ...], name: str) -> np.ndarray:
    """A tensor of element type `name` filled with zeros, or with empty strings."""
    return np.full(shape, "", object) if name == "string" else np.zeros(shape, numpy_dtype(name))
