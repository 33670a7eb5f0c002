"""Finds out without a GPU which nodes the CUDA provider runs, where ONNX Runtime inserts copies, and whether CUDA can capture
the graph.

The rules are those of ONNX Runtime 1.31. A node goes to the CUDA provider if that has a kernel, except for a few that it
refuses (`CUDAExecutionProvider::GetCapability` in cuda_execution_provider.cc) and shape computations, which stay on the CPU
(`GetCpuPreferredNodes` in fallback_cpu_capability.cc). Copies follow `MemcpyTransformer` (transformer_memcpy.cc).

The table of kernels, cuda_kernels.json, comes from sessions on an NVIDIA H200 (recipes/cuda_kernels/probe_kernels.py), one per
operator with a schema in ONNX Runtime 1.31. Control flow and operators on sequences can't be tried that way; they are from the
source (core/providers/cuda/controlflow and the kernel list in cuda_execution_provider.cc).
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hase.records.kernel_costs import LAUNCHED_INPUTS, waits_between_launches
from hase.records.kernel_record import KernelInput, ModelRecord, Node
from hase.records.operators import operator_row
from hase.utils.lazy import onnx

TABLE = Path(__file__).with_name("cuda_kernels.json")
CONTRIB = "com.microsoft"
# Operators, by domain and name, with kernels that the table lacks: the indices of their inputs and outputs in host memory. The
# source has a kernel for NhwcConv, but the CUDA provider refused the small node with which the table was made.
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
SMALL_ELEMENTS = 100  # a computation on shapes may stay on the CPU with constants of up to this many elements
NEVER_MOVED_TO_CPU = ("float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz")
RECURRENT_ACTIVATIONS = {  # those that cuDNN has, in ONNX's order, for one direction and for both
    "LSTM": ("sigmoid", "tanh", "tanh", "sigmoid", "tanh", "tanh"), "RNN": ("tanh", "tanh"),
    "GRU": ("sigmoid", "tanh", "sigmoid", "tanh"),
}
PEEPHOLE_INPUT = 7  # the index of an input of LSTM that cuDNN does not support
GPU_COPY, HOST_COPY = "_on_the_gpu", "_on_the_host"  # suffixes of copied tensors


class CudaKernel(NamedTuple):
    """A kernel of the CUDA provider: the indices of inputs and outputs that it keeps in host memory."""

    host_inputs: tuple[int, ...]
    host_outputs: tuple[int, ...]


@functools.cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def cuda_kernel(op_type: str, domain: str, opset: int, inputs: Sequence[str], outputs: Sequence[str]) -> CudaKernel | None:
    """The CUDA provider's kernel for an operator; None if it has none, so that the CPU provider runs the node. `opset` is the
    model's version of the domain; `inputs` and `outputs` are element types by numpy's names, "" for a missing tensor."""
    if (domain, op_type) in FROM_SOURCE:
        return CudaKernel(*FROM_SOURCE[domain, op_type])
    if (domain, op_type) in BFLOAT16_AS_HALF:
        inputs, outputs = (["float16" if dtype == "bfloat16" else dtype for dtype in dtypes] for dtypes in (inputs, outputs))
    versions = _table()["kernels"].get(domain, {}).get(op_type, {})
    version = max((int(since) for since in versions if int(since) <= opset), default=None)
    kernel = versions.get(str(version))
    if kernel is None or not any(_accepts(kernel, types, inputs, outputs) for types in kernel["types"]):
        return None
    return CudaKernel(tuple(kernel["host_inputs"]), tuple(kernel["host_outputs"]))


def cuda_operators() -> frozenset[str]:
    """The names of all operators with a kernel in the CUDA provider."""
    return frozenset(name for operators in _table()["kernels"].values() for name in operators)


def _accepts(kernel: Mapping[str, Any], types: Mapping[str, Sequence[str]], inputs: Sequence[str],
             outputs: Sequence[str]) -> bool:
    """Whether a kernel accepts tensors of these types; a variadic operator's last input stands for all further ones."""
    for formal, given in ((kernel["inputs"], inputs), (kernel["outputs"], outputs)):
        for index, dtype in enumerate(given):
            if not dtype or not formal:
                continue
            allowed = types.get(formal[min(index, len(formal) - 1)])
            if allowed is not None and dtype not in allowed:
                return False
    return True


def assign_providers(proto: onnx.ModelProto, tensors: dict[str, KernelInput],
                     captured: frozenset[str] = frozenset()) -> list[Provider]:
    """Inserts copies between host and GPU into an optimised graph and `tensors`; returns each resulting node's provider.
    `captured` are tensors that a body captures. They are not its inputs, and ONNX Runtime copies them without a node."""
    no_inputs = {tensor.name for tensor in proto.graph.initializer} | captured
    kernels = place_nodes(proto.graph.node, tensors, {entry.domain: entry.version for entry in proto.opset_import},
                          {value.name for value in proto.graph.input} - no_inputs)
    return _insert_copies(proto.graph, kernels, tensors, captured)


def cuda_refuses(node: onnx.NodeProto) -> bool:
    """Whether the CUDA provider refuses a node although it has a kernel."""
    if node.domain or node.op_type not in {*RECURRENT_ACTIVATIONS, "ConvTranspose", "Cast"}:
        return False
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "Cast":
        return bool(attributes["to"] == onnx.TensorProto.STRING)
    if node.op_type == "ConvTranspose":
        pads = attributes.get("pads", [])
        half = len(pads) // 2
        return pads[:half] != pads[half:] or attributes.get("auto_pad") in (b"SAME_UPPER", b"SAME_LOWER")
    activations = [name.decode().lower() for name in attributes.get("activations", [])]
    if {"activation_alpha", "activation_beta", "clip"} & attributes.keys() or any(
            name != known for name, known in zip(activations, RECURRENT_ACTIVATIONS[node.op_type], strict=False)):
        return True
    if node.op_type == "LSTM":
        return attributes.get("input_forget", 0) != 0 or any(node.input[PEEPHOLE_INPUT:PEEPHOLE_INPUT + 1])
    return node.op_type == "GRU" and attributes.get("linear_before_reset") != 1


def place_nodes(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, KernelInput], opsets: Mapping[str, int],
                graph_inputs: Set[str]) -> list[CudaKernel | None]:
    """The kernel with which the CUDA provider runs each node in a session; None for those of the CPU provider. `nodes` are in
    topological order."""
    def types(names: Sequence[str]) -> list[str]:
        return [tensors[name].dtype if name in tensors else "" for name in names]

    def opset(domain: str) -> int:
        return opsets.get(domain) or (opsets.get("ai.onnx", 1) if not domain else 1)

    kernels: list[CudaKernel | None] = [
        None if cuda_refuses(node) else cuda_kernel(
            node.op_type, "" if node.domain == "ai.onnx" else node.domain, opset(node.domain), types(node.input),
            types(node.output)) for node in nodes]
    on_cpu = (_prefer_cpu(nodes, kernels, tensors, graph_inputs) - _added_by_fusions(nodes)) | _layout_changes(nodes)
    return [None if index in on_cpu else kernel for index, kernel in enumerate(kernels)]


def _layout_changes(nodes: Sequence[onnx.NodeProto]) -> set[int]:
    """The indices of Transposes that ONNX Runtime inserts around the CPU's quantised, channels-last convolutions. They also run
    on the CPU, whatever reads the tensor."""
    channels_last = [node for node in nodes
                     if any(attribute.name == "channels_last" and attribute.i for attribute in node.attribute)]
    read = {name for node in channels_last for name in node.input}
    written = {name for node in channels_last for name in node.output}
    return {index for index, node in enumerate(nodes)
            if node.op_type == "Transpose" and (node.input[0] in written or node.output[0] in read)}


def _added_by_fusions(nodes: Sequence[onnx.NodeProto]) -> set[int]:
    """The indices of nodes that ONNX Runtime adds with a Slice when it replaces Gather and Range (`GatherToSliceFusion`). This
    happens after the assignment to providers, so they get the provider of the Gather."""
    return {index for index, node in enumerate(nodes)
            if node.op_type == "Unsqueeze" and any(name.startswith("UnsqueezeAxesInitializer") for name in node.input)}


def _prefer_cpu(nodes: Sequence[onnx.NodeProto], kernels: Sequence[CudaKernel | None], tensors: Mapping[str, KernelInput],
                graph_inputs: Set[str]) -> set[int]:
    """The indices of nodes with CUDA kernels that stay on the CPU, since all their inputs are there. Such inputs are: outputs
    that a CUDA kernel leaves in host memory (those of Shape), results of these, small constants, and graph inputs."""
    consumers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        for name in dict.fromkeys(node.input):
            consumers[name].append(index)
    on_host = {node.output[slot] for node, kernel in zip(nodes, kernels, strict=True) if kernel
               for slot in kernel.host_outputs if slot < len(node.output)}
    waiting = sorted({consumer for name in on_host for consumer in consumers[name]})  # a heap of indices of nodes
    on_cpu: set[int] = set()
    seen: set[int] = set()
    while waiting:
        index = heapq.heappop(waiting)
        if index in seen:
            continue
        seen.add(index)
        node, kernel = nodes[index], kernels[index]
        if kernel is not None:
            if not _all_on_host(node, kernel, tensors, on_host, graph_inputs):
                continue
            on_cpu.add(index)
        on_host.update(node.output)
        for consumer in (consumer for name in node.output for consumer in consumers[name]):
            heapq.heappush(waiting, consumer)
    return on_cpu


def _all_on_host(node: onnx.NodeProto, kernel: CudaKernel, tensors: Mapping[str, KernelInput], on_host: set[str],
                 graph_inputs: Set[str]) -> bool:
    """Whether a node reads only host tensors, and none that its CUDA kernel wants in host memory anyway."""
    for slot, name in enumerate(node.input):
        tensor = tensors.get(name)
        if not name or tensor is None or tensor.dtype in NEVER_MOVED_TO_CPU:
            return False
        if (tensor.constant and math.prod(tensor.shape) <= SMALL_ELEMENTS) or name in graph_inputs:
            continue
        if name not in on_host or slot in kernel.host_inputs:
            return False
    return True


def _insert_copies(graph: onnx.GraphProto, kernels: Sequence[CudaKernel | None], tensors: dict[str, KernelInput],
                   captured: frozenset[str]) -> list[Provider]:
    """Inserts MemcpyToHost and MemcpyFromHost where needed; returns each node's provider, in the new order.

    A tensor is copied once for all readers. Constants need no copy: each side has its own. A graph input is placed where it is
    read, and copied if both sides read it. The session, not a node, copies graph outputs.
    """
    sides = [(_sides(node.input, kernel and kernel.host_inputs), _sides(node.output, kernel and kernel.host_outputs))
             for node, kernel in zip(graph.node, kernels, strict=True)]
    copies = _copies(graph, sides, tensors, captured)
    ordered: list[onnx.NodeProto] = []
    providers: list[Provider] = []
    copied: set[str] = set()
    for node, kernel, (input_sides, _) in zip(list(graph.node), kernels, sides, strict=True):
        for slot, (name, side) in enumerate(zip(list(node.input), input_sides, strict=True)):
            copy = copies.get(name)
            if copy is None or side != ("cpu" if copy.op_type == "MemcpyToHost" else "cuda"):
                continue
            if name not in copied:
                copied.add(name)
                ordered.append(copy)
                providers.append("cuda")  # the CUDA provider runs both kinds of copy
            node.input[slot] = copy.output[0]
        ordered.append(node)
        providers.append("cpu" if kernel is None else "cuda")
    if copies:
        del graph.node[:]
        graph.node.extend(ordered)
    return providers


def _sides(names: Sequence[str], host_slots: Sequence[int] | None) -> list[Provider]:
    """The side (host or GPU) where a node has each of its inputs or outputs. `host_slots` are those that its CUDA kernel keeps
    in host memory; None if the node runs on the CPU."""
    return ["cpu" if host_slots is None or slot in host_slots else "cuda" for slot in range(len(names))]


def _copies(graph: onnx.GraphProto, sides: Sequence[tuple[Sequence[Provider], Sequence[Provider]]],
            tensors: dict[str, KernelInput], captured: frozenset[str]) -> dict[str, onnx.NodeProto]:
    """The copies that a graph needs, by copied tensor; adds their outputs to `tensors`. `sides`: where each node has its inputs
    and its outputs."""
    written_on: dict[str, Provider] = {}
    read_on: dict[str, set[Provider]] = defaultdict(set)
    for node, (input_sides, output_sides) in zip(graph.node, sides, strict=True):
        for name, side in zip(node.input, input_sides, strict=True):
            read_on[name].add(side)
        written_on.update(zip(node.output, output_sides, strict=True))
    graph_inputs = {value.name for value in graph.input} - captured
    copies = {}
    for name, readers in read_on.items():
        tensor = tensors.get(name)
        if not name or tensor is None or tensor.constant:
            continue
        if name in written_on and readers - {written_on[name]}:
            to_host = written_on[name] == "cuda"
        elif name in graph_inputs and name not in written_on and len(readers) > 1:
            to_host = False
        else:
            continue
        op_type, copied = ("MemcpyToHost", name + HOST_COPY) if to_host else ("MemcpyFromHost", name + GPU_COPY)
        copies[name] = onnx.helper.make_node(op_type, [name], [copied], name=f"{op_type}_{name}")
        tensors[copied] = tensor
    return copies


def capture_obstacle(record: ModelRecord) -> str | None:
    """Why ONNX Runtime can't capture a model as a CUDA graph; None if it can.

    The reason is the first node that ONNX Runtime refuses, or that a replay would not run again. Sources for ONNX Runtime 1.31:

    First, 270 models and sizes on an H200 (recipes/h200). Capture failed for four, exactly those that this function names:

    - A Concat of more than 32 inputs is refused: DenseNet-169 fails at its first one with 33, after one of each smaller width.
      The widest Concat in a captured model has 25 inputs, in DenseNet-121.
    - A Split is not refused, although it copies tables too if its parts are unequal: 15 Swin transformers have such Splits and
      were captured. (Not checked: whether a replay computes the right values.)

    Second, inference_session.cc (`HasControlflowNodes`, `HasMemcpyNodes`), since none of those models has such nodes: nodes
    with a body (If, Loop, Scan) are refused, and so are copies between host and GPU, which ONNX Runtime inserts where nodes of
    the CPU and CUDA providers share a tensor.

    Third, limits of captured graphs. During a capture the host can't wait for the GPU, as kernels with a data-dependent output
    size do. A replay runs nothing on the host; a CPU node that computes sizes only from shapes is allowed, since the sizes
    stay.
    """
    from_data = set(record.inputs)  # tensors that depend on the values of inputs, not only on their shapes
    for node in record.nodes:
        reads_data = not from_data.isdisjoint(node.inputs) and operator_row(record.kernel_of(node).op_type).launches != "none"
        if obstacle := _obstacle(record, node, reads_data):
            return obstacle
        from_data.update(node.outputs if reads_data else ())
    return None


def _obstacle(record: ModelRecord, node: Node, reads_data: bool) -> str | None:
    """Why a node prevents the capture, or None. `reads_data`: it reads values, not only shapes."""
    kernel = record.kernel_of(node)
    row = operator_row(kernel.op_type)
    if row.copies:
        return f"{node.name} ({kernel.op_type}) copies between the host and the GPU"
    if row.waits_for_size and not kernel.domain:
        return f"{node.name} ({kernel.op_type}) makes the host wait for the size of its output"
    if node.provider == "cpu" and reads_data:
        return f"{node.name} ({kernel.op_type}) runs on the CPU"
    if kernel.subgraphs:
        return f"{node.name} ({kernel.op_type}) holds a graph of its own"
    if kernel.op_type == "Concat" and waits_between_launches(kernel):
        return (f"{node.name} joins {len(node.inputs)} inputs, and a Concat of more than {LAUNCHED_INPUTS} copies tables from "
                "the host")
    return None
