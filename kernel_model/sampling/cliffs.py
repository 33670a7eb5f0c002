"""Finds cliffs: two neighbouring kernels of which one is many times slower than its work explains.

The reason is that a library changes its algorithm there. Kernels are compared if they differ only in sizes: shapes, windows,
strides, dilations and groups, but not axes, types, or which inputs they have. The slower neighbour may take longer in
proportion to its bytes or its operations, whichever grow more; the rest is the height of the cliff. A kernel drawn between the
two shows on which side of it the edge lies; if none fits between them, the edge is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hase.kernel_model.sampling.draws import Families, infer_outputs, on_cuda
from hase.records.dataset_files import idle_rows, read_kernels
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_record import Kernel, KernelInput
from hase.records.kernel_types import channels_last, describe_kernel, without_defaults
from hase.records.measurement import GPU_LABEL
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.lazy import sklearn
from hase.utils.paths import Workspace
from hase.utils.timing import Floats

LEAST_HEIGHT = 3.0  # of a cliff; noise and tile sizes cause smaller jumps
LEAST_MS = 0.02  # of the slower kernel; shorter times are mostly the cost of a launch
CAPPED_QUANTILE = 0.95  # of the slower kernels' times; longer ones count as this one
NEIGHBOURS = 4  # with which each kernel is compared
SIZES = ("kernel_shape", "strides", "dilations", "pads", "group", "hidden_size", "num_groups")  # attributes that are sizes


class NothingBetween(UserError):
    """There is no kernel between two neighbours."""


class TimedKernel(NamedTuple):
    """A kernel with its measured time."""

    kernel: Kernel
    time_ms: float  # the GPU's own, idle
    families: Families = ()  # whose models hold it, or near whose kernels it was drawn
    cuda_kernels: str = ""  # names of those that ran, separated by `|`; "" if unknown


class Cliff(NamedTuple):
    """Two neighbours, and the height: the slower one's time relative to what its work explains."""

    slower: TimedKernel
    faster: TimedKernel
    height: float


def timed_kernels(workspace: Workspace, target: str) -> list[TimedKernel]:
    """Reads the kernels of a GPU target's dataset with their idle GPU times (medians over the machines)."""
    table = idle_rows(read_kernel_table(workspace, target))
    column = f"{GPU_LABEL}_ms"
    if column not in table.columns:
        raise UserError(f"{target}: its dataset has no label {GPU_LABEL}, in which cliffs are found; collect it with the label")
    table = table[(table["Status"] == "ok") & (table[column] > 0)]
    ran = table.reindex(columns=["gpu_kernels"])["gpu_kernels"].fillna("")
    names = dict(zip(table["Kernel_ID"], ran, strict=True))
    times = {str(name): float(time_ms) for name, time_ms in table.groupby("Kernel_ID")[column].median().items()}
    described = read_kernels(workspace.dataset(target), set(times))
    return [TimedKernel(entry.kernel, times[entry.kernel.id], tuple(sorted(entry.groups)), str(names.get(entry.kernel.id, "")))
            for entry in described]


def find_cliffs(timed: Iterable[TimedKernel], least_height: float = LEAST_HEIGHT) -> list[Cliff]:
    """Finds the cliffs between neighbours, the highest first; each kernel is on at most one."""
    groups: dict[str, list[TimedKernel]] = {}
    for entry in timed:
        groups.setdefault(_key_without_sizes(entry.kernel), []).append(entry)
    found = [cliff for group in groups.values() if len(group) > 1 for cliff in _cliffs_in_group(group, least_height)]
    used_ids, kept = set[str](), list[Cliff]()
    for cliff in sorted(found, key=lambda cliff: (-cliff.height, cliff.slower.kernel.id, cliff.faster.kernel.id)):
        ids = {cliff.slower.kernel.id, cliff.faster.kernel.id}
        if not ids & used_ids:
            kept.append(cliff)
            used_ids |= ids
    return kept


def _key_without_sizes(kernel: Kernel) -> str:
    """A text that is equal for kernels that differ only in sizes."""
    attributes = {name: value for name, value in kernel.attributes.items() if name not in SIZES}
    tensors = [(tensor.dtype, len(tensor.shape), tensor.constant, len(sizes) if (sizes := _constant_sizes(kernel, index)) else
                tensor.values) for index, tensor in enumerate(kernel.inputs)]
    lengths = {name: len(value) if isinstance(value, list) else 0 for name, value in _size_attributes(kernel).items()}
    results = [output.dtype for output in kernel.outputs]
    return json.dumps([kernel.op_type, kernel.domain, attributes, tensors, lengths, results], sort_keys=True, default=str)


def _size_attributes(kernel: Kernel) -> dict[str, Any]:
    """The attributes that are sizes, also those of a window that a description omits as defaults."""
    window = kernel.attributes.get("kernel_shape")
    defaults = {} if window is None else {"dilations": [1] * len(window), "pads": [0] * 2 * len(window), "group": 1}
    return defaults | {name: kernel.attributes[name] for name in SIZES if name in kernel.attributes}


def _cliffs_in_group(group: Sequence[TimedKernel], least_height: float) -> list[Cliff]:
    """The cliffs among kernels that differ only in sizes."""
    if not _all_sizes(group[0].kernel):
        return []
    points = np.log2(1.0 + np.array([_all_sizes(entry.kernel) for entry in group], dtype=float))
    count = min(NEIGHBOURS + 1, len(group))
    nearest = sklearn.neighbors.NearestNeighbors(n_neighbors=count, metric="manhattan").fit(points).kneighbors(
        return_distance=False, n_neighbors=count - 1)
    pairs = {tuple(sorted((row, int(other)))) for row, others in enumerate(nearest) for other in others}
    found = []
    for one, two in sorted(pairs):
        faster, slower = sorted((group[one], group[two]), key=lambda entry: entry.time_ms)
        if slower.time_ms >= LEAST_MS and (height := cliff_height(slower, faster)) >= least_height:
            found.append(Cliff(slower, faster, height))
    return found


def cliff_height(slower: TimedKernel, faster: TimedKernel) -> float:
    """The slower kernel's time relative to the faster one's, divided by what bytes and operations explain."""
    def ratio(slower_work: float, faster_work: float) -> float:
        return max(slower_work, 1.0) / max(faster_work, 1.0)

    a, b = slower.kernel, faster.kernel
    explained = max(ratio(a.bytes_read + a.bytes_written, b.bytes_read + b.bytes_written), ratio(a.flops, b.flops), 1.0)
    return slower.time_ms / faster.time_ms / explained


def _constant_sizes(kernel: Kernel, index: int) -> list[int]:
    """The values of an input that is a constant with sizes, such as those of a border; empty for other inputs."""
    row, tensor = operator_row(kernel.op_type), kernel.inputs[index]
    holds_sizes = (index in row.size_inputs or index == row.shape_input) and tensor.dtype.startswith("int")
    return [int(value) for value in tensor.values or ()] if holds_sizes else []


def _all_sizes(kernel: Kernel) -> list[int]:
    """All sizes of a kernel, in the same order for kernels that differ only in sizes."""
    attributes = [size for _, value in sorted(_size_attributes(kernel).items())
                  for size in (value if isinstance(value, list) else [value])]
    constants = [abs(value) for index in range(len(kernel.inputs)) for value in _constant_sizes(kernel, index)]
    return [*(size for tensor in kernel.inputs for size in tensor.shape), *attributes, *constants]


def draw_probabilities(cliffs: Sequence[Cliff]) -> Floats:
    """How probable a draw at each cliff is: it grows with the logarithm of the height, and with the time up to a limit."""
    times_ms = np.array([cliff.slower.time_ms for cliff in cliffs])
    weights = np.log([cliff.height for cliff in cliffs]) * np.minimum(times_ms, np.quantile(times_ms, CAPPED_QUANTILE)) ** 0.5
    return np.asarray(weights / weights.sum())


def kernel_between(one: Kernel, two: Kernel, share: float = 0.5) -> Kernel:
    """Makes the kernel between two that differ only in sizes. Each size is at `share` of the way in logarithms (0.5: geometric
    mean). Raises NothingBetween if there is no such kernel."""
    other = _size_attributes(two)
    sizes = {name: _middle(value, other[name], share) for name, value in _size_attributes(one).items()}
    attributes = without_defaults(one.attributes | sizes)
    inputs = [_middle_tensor(*pair, share) for pair in zip(one.inputs, two.inputs, strict=True)]
    if operator_row(one.op_type).operator_class == "convolution":
        inputs = _fit_convolution(one, inputs, attributes)
    if operator_row(one.op_type).cost == "recurrent":
        inputs = _fit_recurrent(one, inputs, int(attributes["hidden_size"]))
    seed = one.model_copy(update={"inputs": tuple(inputs)})
    middle = describe_kernel(one.op_type, one.domain, one.opset, attributes, inputs, infer_outputs(seed, inputs, attributes))
    if middle.id in (one.id, two.id):
        raise NothingBetween(f"{one.id}, {two.id}: no kernel lies between them")
    if on_cuda(one) and not on_cuda(middle):
        raise UserError(f"{middle.id}: the CUDA provider lacks it")
    return middle


def _middle(one: Any, two: Any, share: float) -> Any:
    """The integer between two sizes, or between each two of two lists."""
    if isinstance(one, list):
        return [_middle(*pair, share) for pair in zip(one, two, strict=True)]
    return int(one) if one == two else round(math.exp((1 - share) * math.log(1 + one) + share * math.log(1 + two))) - 1


def _middle_tensor(one: KernelInput, two: KernelInput, share: float) -> KernelInput:
    if one.values is not None and two.values is not None and one.values != two.values:
        if not all(isinstance(value, int) and value >= 0 for value in (*one.values, *two.values)):
            raise UserError("nothing lies between two constants that are no sizes")
        return one.model_copy(update={"values": tuple(_middle(list(one.values), list(two.values), share))})
    return one.model_copy(update={"shape": tuple(_middle(list(one.shape), list(two.shape), share))})


def _fit_convolution(seed: Kernel, inputs: Sequence[KernelInput], attributes: Mapping[str, Any]) -> list[KernelInput]:
    """Changes the channels of a convolution's inputs so that they fit its groups and weights."""
    if len(inputs) > 3 or operator_row(seed.op_type).weights_input != 1 or channels_last(seed):
        raise UserError(f"{seed.id}: nothing is drawn between convolutions of its kind")
    x, weights, *bias = inputs
    group, window = int(attributes.get("group", 1)), attributes.get("kernel_shape", weights.shape[2:])
    transposed = "Transpose" in seed.op_type
    before = max(1, round((weights.shape[0] if transposed else x.shape[1]) / group))
    after = max(1, round(weights.shape[1] if transposed else weights.shape[0] / group))
    first, second = (group * before, after) if transposed else (group * after, before)
    return [x.model_copy(update={"shape": (x.shape[0], group * before, *x.shape[2:])}),
            weights.model_copy(update={"shape": (first, second, *window)}),
            *(tensor.model_copy(update={"shape": (group * after,)}) if tensor.present else tensor for tensor in bias)]


def _fit_recurrent(seed: Kernel, inputs: Sequence[KernelInput], hidden: int) -> list[KernelInput]:
    """Changes the weights among a recurrent layer's inputs so that they fit its hidden size."""
    gates = seed.inputs[1].shape[1] // int(seed.attributes["hidden_size"]) * hidden
    ends = {1: (gates, inputs[1].shape[2]), 2: (gates, hidden), 3: (2 * gates,), 5: (inputs[0].shape[1], hidden),
            6: (inputs[0].shape[1], hidden)}
    return [tensor.model_copy(update={"shape": (tensor.shape[0], *ends[index])}) if index in ends and tensor.present else tensor
            for index, tensor in enumerate(inputs)]
