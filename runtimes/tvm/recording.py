"""Analyses models under TVM: the calls of a lowered module become kernels, and a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hase.ort_analysis.graph.source import Source
from hase.ort_analysis.isolated.messages import AS_THE_FILE_SAYS
from hase.records.kernel_record import Kernel, KernelInput, ModelOrigin, ModelRecord, Node, Origin, Tensor, record_name
from hase.records.kernel_record_files import write_record
from hase.records.kernel_types import fused_type, kernel_of_type, without_defaults
from hase.records.operators import VIEWS
from hase.runtimes.tvm.compiling import FUSED, TUNED, UNFUSED, function_hash, tvm_flavour, write_functions
from hase.runtimes.tvm.lowering import (
    Lowered,
    RelaxOperator,
    bindings,
    called_function,
    deciding_operator,
    lower,
    onnx_name,
    read_relax,
    relax_name,
    tvm_source,
)
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import tvm
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    import onnx

DOMAIN = "tvm"


class TvmModel(NamedTuple):
    """A model at one level: module, calls and record."""

    lowered: Lowered
    graph: CallGraph
    record: ModelRecord


def parse(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None,
          device: str = "cpu") -> dict[str, TvmModel]:
    """A model's operators (UNFUSED) and kernels (FUSED) on `cpu` or `cuda`; `name` is that of a model in memory."""
    source, parsed = tvm_source(model, dims, name), {}
    for level, lowered in lower(source.name, read_relax(source), device).items():
        graph = _GraphReader(source.name, lowered, device).read()
        parsed[level] = TvmModel(lowered, graph, record_of(source, graph, tvm_flavour(device, level)))
    return parsed


def parse_at(level: str, model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, device: str = "cpu") -> TvmModel:
    """A model at one of LEVELS on `cpu` or `cuda`. Tuned kernels are the fused ones with other schedules."""
    parsed = parse(model, dims, device=device)[FUSED if level == TUNED else level]
    return parsed._replace(record=parsed.record.model_copy(update={"flavour": tvm_flavour(device, level)}))


def write_parsed(workspace: Workspace, parsed: Mapping[str, TvmModel],
                 origin: ModelOrigin = AS_THE_FILE_SAYS) -> list[ModelRecord]:
    """Writes a model's records, UNFUSED and FUSED, and missing functions of its kernels; returns the records. `origin` takes
    precedence over the model's file."""
    for level in (UNFUSED, FUSED):
        _, graph, record = parsed[level]
        write_functions(workspace, record.flavour, graph.kernels, graph.functions)
    return [write_record(workspace, parsed[level].record, origin) for level in (UNFUSED, FUSED)]


@dataclass
class CallGraph:
    """The calls of a module's main function."""

    nodes: list[Node] = field(default_factory=list)  # in the order in which they run
    kernels: dict[str, Kernel] = field(default_factory=dict)  # by id
    # TVM functions by the id of the kernel that they compute. A kernel that only renames a tensor, or that TVM computes by a
    # routine of its own, has none.
    functions: dict[str, Any] = field(default_factory=dict)
    callees: dict[str, str] = field(default_factory=dict)  # kernel ids by the name of a function in the module
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by name
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _tensor(ty: Any, where: str) -> Tensor:
    """Converts a Relax type to a tensor; `where` is for errors."""
    shape = getattr(ty, "shape", None)
    if isinstance(ty, tvm.relax.TensorType) and shape is not None:
        sizes = [size.value for size in shape if hasattr(size, "value")]  # an expression of sizes has no value
        if len(sizes) == len(shape):
            return Tensor(dtype=str(ty.dtype), shape=tuple(sizes))
    raise UserError(f"{where}: TVM gives {ty}, whose size is known only when the model runs; such models can't be taken apart")


def _describe(operators: Sequence[RelaxOperator], function: str, inputs: Sequence[KernelInput],
              outputs: Sequence[Tensor]) -> Kernel:
    """The kernel of some operators that run as one function; `function` is the function's hash, or "". Its operator is the one
    that decides its time (`deciding_operator`). Its type does not name operators that only rename a tensor."""
    first = deciding_operator(operators)
    main = operators[first]
    others = [operator.name for index, operator in enumerate(operators) if index != first and operator.name not in VIEWS]
    attributes = dict(main.attributes)
    if "perm" in attributes and len(inputs[0].shape) != len(attributes["perm"]):
        # A reshape comes first in the kernel: it permutes no dimensions of the kernel's own input.
        attributes["perm"] = list(range(len(inputs[0].shape)))
    if main.name == "Conv" and len(inputs) > 1:
        attributes["kernel_shape"] = list(inputs[1].shape[2:])
    kept = without_defaults(attributes) | {"operators": [each.relax for each in operators]}
    kept |= {"function": function} if function else {}
    return kernel_of_type(fused_type(main.name, others), main.name, DOMAIN, 1, kept, inputs, outputs)


class _GraphReader:
    """Reads the calls of a lowered module's main function."""

    def __init__(self, name: str, lowered: Lowered, device: str) -> None:
        self.name, self.lowered, self.device, self.graph = name, lowered, device, CallGraph()
        self.functions = {gv.name_hint: function for gv, function in lowered.module.functions.items()}
        self.names: dict[Any, tuple[str, ...]] = {}  # names of the tensors in each variable

    def read(self) -> CallGraph:
        main = self.functions["main"]
        for number, parameter in enumerate(main.params):
            self._add_tensors(parameter, (str(parameter.name) or f"input{number}",), [parameter.ty])
        self.graph.inputs = tuple(name for parameter in main.params for name in self.names[parameter])
        for binding in bindings(main):
            self._bind(binding.var, binding.value)
        self.graph.outputs = self._tensors(main.body.body)
        return self.graph

    def _add_tensors(self, variable: Any, names: Sequence[str], types: Sequence[Any]) -> None:
        """Adds the tensors in a variable."""
        self.names[variable] = tuple(names)
        for name, ty in zip(names, types, strict=True):
            self.graph.tensors[name] = _tensor(ty, f"{self.name}, {name}")

    def _tensors(self, value: Any) -> tuple[str, ...]:
        """The names of the tensors in a value: "" for a constant, nothing for other types."""
        if isinstance(value, tvm.relax.Tuple):
            return tuple(name for part in value.fields for name in self._tensors(part))
        if isinstance(value, tvm.relax.TupleGetItem):
            return (self._tensors(value.tuple_value)[value.index],)
        if isinstance(value, tvm.relax.Var):
            return self.names[value]
        return ("",) if isinstance(getattr(value, "ty", None), tvm.relax.TensorType) else ()

    def _inputs(self, value: Any) -> list[tuple[str, KernelInput]]:
        """The tensors that a call reads, with names."""
        if isinstance(value, tvm.relax.Tuple):
            return [kernel_input for part in value.fields for kernel_input in self._inputs(part)]
        names = self._tensors(value)
        if names == ("",):
            tensor = _tensor(value.ty, self.name)
            return [("", KernelInput(dtype=tensor.dtype, shape=tensor.shape, constant=True))]
        return [(name, KernelInput(dtype=self.graph.tensors[name].dtype, shape=self.graph.tensors[name].shape))
                for name in names]

    def _bind(self, variable: Any, value: Any) -> None:
        """Adds a call as a node; a value without computation becomes another name of known tensors."""
        if isinstance(value, (tvm.relax.Var, tvm.relax.Tuple, tvm.relax.TupleGetItem)):
            self.names[variable] = self._tensors(value)
            return
        if not isinstance(value, tvm.relax.Call):
            if isinstance(value, tvm.relax.If):
                raise UserError(f"{self.name}: has a branch that depends on data; such models can't be taken apart under TVM")
            self.names[variable] = ()  # a shape or a number
            return
        callee = called_function(value)
        arguments = value.args[1:] if callee or relax_name(value).startswith("relax.call_") else value.args
        inputs = [kernel_input for argument in arguments for kernel_input in self._inputs(argument)]
        node = f"{len(self.graph.nodes):04d}_{callee or relax_name(value).rpartition('.')[2]}"
        types = list(variable.ty.fields) if isinstance(variable.ty, tvm.relax.TupleType) else [variable.ty]
        outputs = [node] if len(types) == 1 else [f"{node}.{index}" for index in range(len(types))]
        self._add_tensors(variable, outputs, types)
        self._add_node(node, callee, value, inputs, outputs)

    def _add_node(self, node: str, callee: str, value: Any, inputs: Sequence[tuple[str, KernelInput]],
                  outputs: Sequence[str]) -> None:
        graph, function = self.graph, self.functions.get(callee)
        operators = self.lowered.operators.get(callee) or (RelaxOperator(onnx_name(relax_name(value)), {}, relax_name(value)),)
        kernel = _describe(operators, function_hash(function) if function is not None else "",
                           [kernel_input for _, kernel_input in inputs], [graph.tensors[name] for name in outputs])
        graph.kernels[kernel.id] = kernel
        if function is not None:
            graph.functions[kernel.id], graph.callees[callee] = function, kernel.id
        graph.nodes.append(Node(
            name=node, kernel_id=kernel.id, provider=self.device,
            inputs=tuple(name for name, _ in inputs), outputs=tuple(outputs),
            origins=tuple(Origin(name=f"{node}.{index}", op_type=operator.relax) for index, operator in enumerate(operators))))


def record_of(source: Source, graph: CallGraph, flavour: Flavour) -> ModelRecord:
    """A model's record under TVM."""
    weights = {(kernel.id, index): tensor.bytes for kernel in graph.kernels.values()
               for index, tensor in enumerate(kernel.inputs) if tensor.constant}
    return ModelRecord(
        model=record_name(source.name, source.dims), **source.record_fields(),
        flavour=flavour, derived=False, inputs={name: graph.tensors[name] for name in graph.inputs},
        outputs={name: graph.tensors[name] for name in graph.outputs if name},
        weight_bytes=sum(size for node in graph.nodes for (kernel, _), size in weights.items() if kernel == node.kernel_id),
        opsets={DOMAIN: 1}, kernels=graph.kernels, nodes=tuple(graph.nodes))
