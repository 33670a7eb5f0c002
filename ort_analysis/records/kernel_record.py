"""The kernel records: what `fusion_detector` writes and every later phase reads.

History of the schemas: version 2 says the group of a model, the stem of its file and the runtime.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from ort_analysis.records.elements import DTYPE_BYTES, numpy_dtype
from utils.fingerprint import Flavour
from utils.frozen import Frozen
from utils.safe_names import FileName, as_file_name

RECORD_VERSION = 2
INDEX_VERSION = 2
REMAKE = "python ort_analysis/fusion_detector.py"


Count = Annotated[int, Field(ge=0, le=10**30)]  # of elements, operations, bytes: more is damage, and no floating-point number

Runs = Annotated[float, Field(ge=0, le=1e100)]  # of a node in a run of the model


class Tensor(Frozen):
    """A tensor's element type (numpy's name) and shape. `dtype` "" stands for an optional input or output left out.

    What is no tensor has its type in words as `dtype`, `sequence(map(int64,float32))`, and neither shape nor size: how much it
    holds is not known, and the tensors that go in or come out of it are counted where they are read or written.
    """

    dtype: str
    shape: tuple[Count, ...] = ()

    @property
    def present(self) -> bool:
        return bool(self.dtype)

    @property
    def is_tensor(self) -> bool:
        """Whether it is there, and no sequence, map, optional or sparse tensor."""
        return self.present and "(" not in self.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.is_tensor else 0

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * DTYPE_BYTES.get(self.dtype, 4))


class KernelInput(Tensor):
    """An input of a kernel.

    Attributes:
        constant: the graph holds its value (a weight, or a shape, an axis, a scale, …).
        values: the value itself, flat, where it is small and decides what the kernel does.
        value_range: smallest and largest value of a large whole-number constant, such as an index table.
    """

    constant: bool = False
    values: tuple[int | float | bool, ...] | None = None
    value_range: tuple[int, int] | None = None


class Kernel(Frozen):
    """One fused operation with its attributes, types and shapes; complete enough to build it as a model of its own.

    Attributes:
        id: readable and unique, `<type>_<H>x<W>_<rest>`; the same kernel in two models has one id.
        type: canonical name of what executes, e.g. `Conv_Add_Relu`; shapes are no part of it.
        op_type, domain, opset: the ONNX operator.
        attributes: by name; a tensor is `{"dtype", "shape", "values"}`.
        flops: floating-point operations (a multiply-add is two).
        bytes_read, bytes_written: of all inputs and outputs, each once; 0 for operations that only rename a tensor.
        weight_bytes: the part of the inputs that is constant.
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

    @property
    def moves_data(self) -> bool:
        """Whether it reads or writes anything; what does not only renames a tensor, and takes next to no time."""
        return self.bytes_read + self.bytes_written > 0

    @property
    def subgraphs(self) -> tuple[str, ...]:
        """The attributes that hold a graph, of which the record keeps only a hash: those of If, Loop and Scan."""
        return tuple(key for key, value in sorted(self.attributes.items()) if isinstance(value, dict) and "graph" in value)

    @property
    def activations(self) -> tuple[KernelInput, ...]:
        """The inputs that change from run to run."""
        return tuple(tensor for tensor in self.inputs if tensor.present and not tensor.constant)

    @property
    def dtype(self) -> str:
        """The element type that the kernel computes in: that of its first floating input, else of its first input."""
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
        inputs, outputs: tensor names; "" where an optional one is left out.
        origins: the original nodes that this one stands for (several nodes may share them, where ORT split a fusion).
        runs: how often it runs in a run of the model: more than once in the body of a Loop or Scan. A node that holds such a
            body counts as often as the body runs.
        inside: the name of the node in whose body it stands; "" in the main graph. What a body makes is called
            `<node>/<tensor>`.
    """

    name: str
    kernel_id: str
    provider: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[Origin, ...] = ()
    runs: Runs = Field(1.0, exclude_if=lambda runs: runs == 1.0)  # as most are: files stay as small as they were
    inside: str = Field("", exclude_if=lambda inside: not inside)


class GuessedRuns(Frozen):
    """How far the number of runs of a body is a guess.

    Attributes:
        taken: the number of trips, or the branch, `then` or `else`, that was taken.
        low, high: between which multiples of them its nodes run.
    """

    taken: str
    low: Runs
    high: Runs


class ModelRecord(Frozen):
    """A model's optimised graph in one flavour, taken apart into kernels.

    Attributes:
        model: the file's stem, with the sizes of dynamic dimensions: `resnet18@batch=16,height=224,width=224`.
        file_stem: of the model file.
        group: names the models that are variants of this one and are held out together, such as `resnet`; the file's stem where
            nothing is known of any. Never holds "|", which separates groups in tables.
        sha256: of the model file (of the serialised model where there was no file).
        dims: the sizes given to dynamic dimensions.
        derived: the flavour's provider was not there: the graph comes from another provider with the same optimisers.
        static: the sizes in `dims` were fixed before ONNX Runtime optimised the model (or all are fixed in the file); else this
            is the graph of a session that takes any sizes, with the computation of its shapes.
        assumed: shapes of tensors, by name, that depend on data and were taken to be the largest that ONNX allows.
        guessed: by node name, how far the number of runs of the body that a node holds is a guess.
        inputs, outputs: of the graph, by tensor name.
        weights: bytes of constants of the optimised graph.
        opsets: the model's operator-set imports.
        kernels: by id.
        nodes: in execution order; those of a body follow the node that holds it.
    """

    version: int = RECORD_VERSION
    model: FileName
    file_stem: FileName
    group: FileName
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
        """The sizes with which a run does what the record tells of: `dims`, and the branches that were taken by default."""
        return {f"{node}.{guess.taken}": 1 for node, guess in self.guessed.items() if not guess.taken.isdigit()} | self.dims

    @property
    def batch(self) -> int | None:
        """The first dimension of the first input, where it has one."""
        first = next(iter(self.inputs.values()), None)
        return first.shape[0] if first and first.shape else None


class IndexEntry(Frozen):
    """A kernel of the index: itself, and the models (by record name) that hold it."""

    kernel: Kernel
    models: tuple[FileName, ...]


class KernelIndex(Frozen):
    """All kernels of one flavour's records: by type, then by id, with every shape seen.

    Attributes:
        groups: of every model, by record name.
    """

    version: int = INDEX_VERSION
    flavour: Flavour
    groups: dict[str, FileName]
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
        """The groups of the models that hold a kernel, sorted."""
        return tuple(sorted({self.groups[model] for model in entry.models}))

    def entries(self) -> list[IndexEntry]:
        return [entry for of_type in self.kernels.values() for entry in of_type.values()]

    def all_kernels(self) -> list[Kernel]:
        return [entry.kernel for entry in self.entries()]


def record_name(stem: str, dims: dict[str, int], static: bool = True) -> str:
    """A model's name with the sizes given to its dynamic dimensions, fit for a file's name: `resnet18@batch=16`.

    Where they were not fixed before it was optimised, `resnet18@batch=16,dynamic`: another graph, with other latencies.
    """
    if not dims:
        return as_file_name(stem)
    sizes = [f"{name}={size}" for name, size in sorted(dims.items())]
    return as_file_name(stem + "@" + ",".join(sizes if static else [*sizes, "dynamic"]))


def zeros(shape: tuple[int, ...], name: str) -> np.ndarray:
    """A tensor of `dtype` `name` that is all zeros, or empty words."""
    return np.full(shape, "", object) if name == "string" else np.zeros(shape, numpy_dtype(name))
