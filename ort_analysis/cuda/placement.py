"""Which nodes of a graph the CUDA provider takes, and the copies to and from the GPU, derived on a machine without a GPU.

Follows ONNX Runtime 1.31: a node goes to the CUDA provider if that has a kernel for it, except for a few that it refuses
(`CUDAExecutionProvider::GetCapability` in cuda_execution_provider.cc), and for computations on shapes, which stay on the CPU
(`GetCpuPreferredNodes` in fallback_cpu_capability.cc). Copies are inserted as by its `MemcpyTransformer`
(transformer_memcpy.cc).

The table of its kernels, cuda_kernels.json, comes from sessions on an NVIDIA H200 (recipes/cuda_kernels/probe_kernels.py), one
for every operator for which ONNX Runtime 1.31 has a schema. Control flow and operators on sequences can't be tried that way;
they are from ONNX Runtime's source (core/providers/cuda/controlflow and the list of kernels in cuda_execution_provider.cc).
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hase.records.kernel_record import KernelInput
from hase.utils.lazy import onnx

TABLE = Path(__file__).with_name("cuda_kernels.json")
CONTRIB = "com.microsoft"
# Operators, by domain and name, with kernels that the table lacks: inputs and outputs that they keep in host memory. That of
# NhwcConv is registered in ONNX Runtime's source, but the CUDA provider refused the small node with which the table was made.
FROM_SOURCE: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("", "If"): ((0,), ()), ("", "Loop"): ((0, 1), ()), ("", "Scan"): ((), ()),
    ("", "SequenceAt"): ((1,), ()), ("", "SequenceErase"): ((1,), ()), ("", "SequenceInsert"): ((2,), ()),
    ("", "SequenceLength"): ((), (0,)), ("", "SequenceConstruct"): ((), ()), ("", "SequenceEmpty"): ((), ()),
    ("", "ConcatFromSequence"): ((), ()), (CONTRIB, "NhwcConv"): ((), ()),
}
# Operators whose CUDA kernels take bfloat16, although the table does not say so: the CPU's schema check refused the small node
# with which it was made. Traces of language models on an H200 show the kernel (cuApplyLayerNorm<BFloat16, …>).
BFLOAT16_AS_HALF = (("", "SimplifiedLayerNormalization"),)
Provider = Literal["cpu", "cuda"]
SMALL_CONSTANT = 100  # a computation on shapes may stay on the CPU with constants of up to this many elements
NEVER_MOVED_TO_CPU = ("float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
RECURRENT_ACTIVATIONS = {  # those that cuDNN has, in ONNX's order, for one direction and for both
    "LSTM": ("sigmoid", "tanh", "tanh", "sigmoid", "tanh", "tanh"), "RNN": ("tanh", "tanh"),
    "GRU": ("sigmoid", "tanh", "sigmoid", "tanh"),
}
PEEPHOLE = 7  # an input of LSTM that cuDNN does not support
ON_DEVICE = "_on_the_gpu"  # suffix of the copy of a host tensor
ON_HOST = "_on_the_host"


class CudaKernel(NamedTuple):
    """A kernel of the CUDA provider: the positions of the inputs and outputs that it keeps in host memory."""

    host_inputs: tuple[int, ...]
    host_outputs: tuple[int, ...]


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def cuda_kernel(op_type: str, domain: str, opset: int, inputs: Sequence[str], outputs: Sequence[str]) -> CudaKernel | None:
    """The CUDA provider's kernel for an operator; None if it has none, so that the CPU provider runs the node.

    Args:
        op_type, domain: the operator; "" is ONNX's own domain.
        opset: the version of the domain's operator set that the model imports.
        inputs, outputs: element types by numpy's names, "" for one that is missing.
    """
    if (domain, op_type) in FROM_SOURCE:
        return CudaKernel(*FROM_SOURCE[domain, op_type])
    if (domain, op_type) in BFLOAT16_AS_HALF:
        inputs, outputs = (["float16" if dtype == "bfloat16" else dtype for dtype in dtypes] for dtypes in (inputs, outputs))
    versions = _table()["kernels"].get(domain, {}).get(op_type, {})
    version = max((int(since) for since in versions if int(since) <= opset), default=None)
    kernel = versions.get(str(version))
    if kernel is None or not any(_takes(kernel, types, inputs, outputs) for types in kernel["types"]):
        return None
    return CudaKernel(tuple(kernel["host_inputs"]), tuple(kernel["host_outputs"]))


def cuda_operators() -> frozenset[str]:
    """The names of all operators of ONNX and of ONNX Runtime that the CUDA provider has a kernel for."""
    return frozenset(name for operators in _table()["kernels"].values() for name in operators)


def _takes(kernel: Mapping[str, Any], types: Mapping[str, Sequence[str]], inputs: Sequence[str],
           outputs: Sequence[str]) -> bool:
    """Whether a kernel takes tensors of these types; a variadic operator's last input stands for all that follow."""
    for formal, given in ((kernel["inputs"], inputs), (kernel["outputs"], outputs)):
        for place, dtype in enumerate(given):
            if not dtype or not formal:
                continue
            allowed = types.get(formal[min(place, len(formal) - 1)])
            if allowed is not None and dtype not in allowed:
                return False
    return True


@dataclass(frozen=True)
class Placement:
    """The providers of a graph's nodes.

    Attributes:
        providers: of each node, in the graph's order.
        kernels: the CUDA kernel of each node that has one; None for the others.
    """

    providers: tuple[Provider, ...]
    kernels: tuple[CudaKernel | None, ...]


def assign_providers(proto: onnx.ModelProto, tensors: dict[str, KernelInput],
                     outside: frozenset[str] = frozenset()) -> list[Provider]:
    """Inserts copies between host and GPU into a graph, and returns the provider of each node of the result.

    Args:
        proto: an optimised graph, in topological order; changed in place.
        tensors: type and shape of every tensor by name; gets those of the copies.
        outside: of a body, the tensors that it takes from the graph around it. They are not inputs of the body, and ONNX
            Runtime copies them without a node.
    """
    constants = {tensor.name for tensor in proto.graph.initializer} | outside
    placement = place(proto.graph.node, tensors, {entry.domain: entry.version for entry in proto.opset_import},
                      [value.name for value in proto.graph.input if value.name not in constants])
    return insert_copies(proto.graph, placement, tensors, outside)


def refuses(node: onnx.NodeProto) -> bool:
    """Whether the CUDA provider refuses a node although it has a kernel for its types."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.domain:
        return False
    if node.op_type in RECURRENT_ACTIVATIONS:
        if {"activation_alpha", "activation_beta", "clip"} & set(attributes):
            return True
        given = [text.decode().lower() for text in attributes["activations"].strings] if "activations" in attributes else []
        if any(name != known for name, known in zip(given, RECURRENT_ACTIVATIONS[node.op_type], strict=False)):
            return True
        if node.op_type == "LSTM":
            input_forget = "input_forget" in attributes and attributes["input_forget"].i != 0
            return input_forget or (len(node.input) > PEEPHOLE and bool(node.input[PEEPHOLE]))
        return node.op_type == "GRU" and ("linear_before_reset" not in attributes or attributes["linear_before_reset"].i != 1)
    if node.op_type == "ConvTranspose":
        pads = list(attributes["pads"].ints) if "pads" in attributes else []
        half = len(pads) // 2
        automatic = attributes["auto_pad"].s.decode() if "auto_pad" in attributes else "NOTSET"
        return pads[:half] != pads[half:] or automatic in ("SAME_UPPER", "SAME_LOWER")
    return node.op_type == "Cast" and attributes["to"].i == 8  # TensorProto.STRING


def place(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, KernelInput], opsets: Mapping[str, int],
          graph_inputs: Sequence[str]) -> Placement:
    """The provider of each node of a graph in a CUDA session.

    Args:
        nodes: in topological order.
        tensors: type of every tensor by name; constants are marked.
        opsets: versions of operator sets by domain; ONNX's own is "" or `ai.onnx`.
        graph_inputs: names of the graph's inputs.
    """
    def types(names: Sequence[str]) -> list[str]:
        return [tensors[name].dtype if name in tensors else "" for name in names]

    def opset(domain: str) -> int:
        return opsets.get(domain) or (opsets.get("ai.onnx", 1) if not domain else 1)

    kernels: list[CudaKernel | None] = [
        None if refuses(node) else cuda_kernel(node.op_type, "" if node.domain == "ai.onnx" else node.domain,
                                               opset(node.domain), types(node.input), types(node.output)) for node in nodes]
    on_cpu = _prefer_cpu(nodes, kernels, tensors, set(graph_inputs)) - _made_by_fusions(nodes)
    on_cpu |= _layout_changes(nodes)
    providers: tuple[Provider, ...] = tuple(
        "cuda" if kernel is not None and number not in on_cpu else "cpu" for number, kernel in enumerate(kernels))
    return Placement(providers, tuple(kernels))


def _layout_changes(nodes: Sequence[onnx.NodeProto]) -> set[int]:
    """The indices of the Transposes that ONNX Runtime inserts around the CPU's quantised convolutions, which work channels
    last. They run on the CPU too, whatever reads the tensor."""
    channels_last = {number for number, node in enumerate(nodes)
                     if any(attribute.name == "channels_last" and attribute.i for attribute in node.attribute)}
    read = {name for number in channels_last for name in nodes[number].input}
    made = {name for number in channels_last for name in nodes[number].output}
    return {number for number, node in enumerate(nodes)
            if node.op_type == "Transpose" and (node.input[0] in made or node.output[0] in read)}


def _made_by_fusions(nodes: Sequence[onnx.NodeProto]) -> set[int]:
    """The indices of the nodes that ONNX Runtime adds with a Slice when it replaces Gather and Range (`GatherToSliceFusion`).
    It does so after the assignment to providers, and they get the provider of the Gather."""
    return {number for number, node in enumerate(nodes)
            if node.op_type == "Unsqueeze" and any(name.startswith("UnsqueezeAxesInitializer") for name in node.input)}


def _prefer_cpu(nodes: Sequence[onnx.NodeProto], kernels: Sequence[CudaKernel | None], tensors: Mapping[str, KernelInput],
                graph_inputs: set[str]) -> set[int]:
    """The indices of the nodes with CUDA kernels that stay on the CPU, since all their inputs are there: outputs that a CUDA
    kernel leaves in host memory (those of Shape), what is computed from these, small constants, and inputs of the graph."""
    consumers: dict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        for name in dict.fromkeys(node.input):
            consumers[name].append(number)
    on_host: set[str] = set()
    waiting: list[int] = []
    for node, kernel in zip(nodes, kernels, strict=True):
        for slot in (slot for slot in (kernel.host_outputs if kernel else ()) if slot < len(node.output)):
            on_host.add(node.output[slot])
            for consumer in consumers[node.output[slot]]:
                heapq.heappush(waiting, consumer)
    on_cpu: set[int] = set()
    seen: set[int] = set()
    while waiting:
        number = heapq.heappop(waiting)
        if number in seen:
            continue
        seen.add(number)
        node, kernel = nodes[number], kernels[number]
        if kernel is not None and not _all_on_host(node, kernel, tensors, on_host, graph_inputs):
            continue
        if kernel is not None:
            on_cpu.add(number)
        on_host.update(node.output)
        for consumer in (consumer for name in node.output for consumer in consumers[name]):
            heapq.heappush(waiting, consumer)
    return on_cpu


def _all_on_host(node: onnx.NodeProto, kernel: CudaKernel, tensors: Mapping[str, KernelInput], on_host: set[str],
                 graph_inputs: set[str]) -> bool:
    """Whether a node reads only host tensors, and none that its CUDA kernel wants in host memory anyway."""
    for slot, name in enumerate(node.input):
        tensor = tensors.get(name)
        if not name or tensor is None:
            return False
        if tensor.dtype in NEVER_MOVED_TO_CPU:
            return False
        if (tensor.constant and math.prod(tensor.shape) <= SMALL_CONSTANT) or name in graph_inputs:
            continue
        if name not in on_host or slot in kernel.host_inputs:
            return False
    return True


def insert_copies(graph: onnx.GraphProto, placement: Placement, tensors: dict[str, KernelInput],
                  outside: frozenset[str] = frozenset()) -> list[Provider]:
    """Inserts MemcpyToHost and MemcpyFromHost where a tensor is needed on the other side; returns the provider of each node, in
    the new order.

    A tensor is copied once, however many nodes read it. Constants need no copy: each side has its own. An input of the graph is
    placed where it is read, and copied if both sides read it. An output of the graph is copied by the session, not by a node.

    Args:
        graph: changed in place: copies are added, and nodes read them.
        placement: of the graph's nodes.
        tensors: gets the types and shapes of the copies.
        outside: as in `assign_providers`.
    """
    wanted = [_wanted_sides(node, provider, kernel) for node, provider, kernel in zip(
        graph.node, placement.providers, placement.kernels, strict=True)]
    copies = _copies(graph, placement, wanted, tensors, outside)
    if not copies:
        return list(placement.providers)
    ordered: list[Any] = []
    providers: list[Provider] = []
    placed: set[str] = set()
    for node, provider, sides in zip(list(graph.node), placement.providers, wanted, strict=True):
        for slot, (name, side) in enumerate(zip(list(node.input), sides, strict=True)):
            copy = copies.get(name)
            if copy is None or side != ("cpu" if copy.op_type == "MemcpyToHost" else "cuda"):
                continue
            if name not in placed:
                placed.add(name)
                ordered.append(copy)
                providers.append("cuda")  # the CUDA provider runs both kinds of copy
            node.input[slot] = copy.output[0]
        ordered.append(node)
        providers.append(provider)
    del graph.node[:]
    graph.node.extend(ordered)
    return providers


def _wanted_sides(node: onnx.NodeProto, provider: Provider, kernel: CudaKernel | None) -> tuple[Provider, ...]:
    """The side on which a node wants each of its inputs."""
    on_gpu = kernel if provider == "cuda" else None
    return tuple("cpu" if on_gpu is None or slot in on_gpu.host_inputs else "cuda" for slot in range(len(node.input)))


def _copies(graph: onnx.GraphProto, placement: Placement, wanted: Sequence[tuple[Provider, ...]],
            tensors: dict[str, KernelInput], outside: frozenset[str]) -> dict[str, onnx.NodeProto]:
    """The copies that a graph needs, by the name of the copied tensor; their outputs are added to `tensors`.

    Args:
        wanted: for each node, the side on which it wants each of its inputs.
    """
    made_on: dict[str, Provider] = {}
    read_on: dict[str, set[Provider]] = defaultdict(set)
    for node, provider, kernel, sides in zip(graph.node, placement.providers, placement.kernels, wanted, strict=True):
        on_gpu = kernel if provider == "cuda" else None
        for name, side in zip(node.input, sides, strict=True):
            read_on[name].add(side)
        for slot, name in enumerate(node.output):
            made_on[name] = "cpu" if on_gpu is None or slot in on_gpu.host_outputs else "cuda"
    graph_inputs = {value.name for value in graph.input} - outside
    copies = {}
    for name, readers in read_on.items():
        tensor = tensors.get(name)
        if not name or tensor is None or tensor.constant:
            continue
        if name in made_on and readers - {made_on[name]}:
            to_host = made_on[name] == "cuda"
        elif name in graph_inputs and name not in made_on and len(readers) > 1:
            to_host = False
        else:
            continue
        copied = name + (ON_HOST if to_host else ON_DEVICE)
        op_type = "MemcpyToHost" if to_host else "MemcpyFromHost"
        copies[name] = onnx.helper.make_node(op_type, [name], [copied], name=f"{op_type}_{name}")
        tensors[copied] = tensor
    return copies
