"""Cliffs: neighbours of which one takes many times as long as its work explains, since a library changed its algorithm.

Two kernels can be compared where they differ in sizes alone: in shapes, windows, strides, dilations and groups, not in axes,
types, or which inputs they have. Of two neighbours the slower one may take as many times as long as the other as it moves more
bytes, or computes more, whichever is more. What it takes beyond that is the height of the cliff. A kernel drawn between the two
shows on which side of it the edge lies; where no kernel fits between them, the edge is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.kernel_model.sampling.draws import infer_outputs, on_cuda
from hase.kernel_model.sampling.seeds import Families
from hase.records.dataset_files import idle_rows, read_kernels
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_record import Kernel, KernelInput
from hase.records.kernel_types import channels_last, describe_kernel, normalize
from hase.records.measurement import GPU_LABEL
from hase.records.operators import operator_row
from hase.utils.errors import UserError
from hase.utils.lazy import sklearn
from hase.utils.paths import Workspace

LEAST_HEIGHT = 3.0  # from here on a jump is a cliff: noise, and how well sizes fit tiles, make less
LEAST_MS = 0.02  # of the slower kernel; shorter ones are mostly the cost of a launch
LONG = 0.95  # quantile of the slower kernels' times beyond which a longer one counts no more
NEIGHBOURS = 4  # that each kernel is compared with
SIZES = ("kernel_shape", "strides", "dilations", "pads", "group", "hidden_size", "num_groups")  # attributes that are sizes
Floats = npt.NDArray[np.float64]


class NothingBetween(UserError):
    """No kernel lies between two neighbours."""


class Timed(NamedTuple):
    """A kernel with its measured time.

    Attributes:
        kernel: the kernel.
        time_ms: the GPU's own, idle.
        families: that hold it, or near whose kernels it was drawn.
        cuda_kernels: the names of those that ran, separated by `|`; "" where they are not known.
    """

    kernel: Kernel
    time_ms: float
    families: Families = ()
    cuda_kernels: str = ""


class Cliff(NamedTuple):
    """Two neighbours, and how many times as long the slower one takes as its work explains."""

    slower: Timed
    faster: Timed
    height: float


def timed_kernels(workspace: Workspace, target: str) -> list[Timed]:
    """The kernels of a GPU target's dataset with their idle times, the GPU's own; medians over the machines.

    Raises:
        UserError: there is no dataset, it is damaged, or not of a GPU.
    """
    table = idle_rows(read_kernel_table(workspace, target))
    column = f"{GPU_LABEL}_ms"
    if column not in table.columns:
        raise UserError(f"{target}: its dataset has no label {GPU_LABEL}, by which cliffs are looked for")
    table = table[(table["Status"] == "ok") & (table[column] > 0)]
    ran = table.reindex(columns=["gpu_kernels"])["gpu_kernels"].fillna("")
    names = dict(zip(table["Kernel_ID"], ran, strict=True))
    times = {str(name): float(time_ms) for name, time_ms in table.groupby("Kernel_ID")[column].median().items()}
    described = read_kernels(workspace.dataset(target), set(times))
    return [Timed(entry.kernel, times[entry.kernel.id], tuple(sorted(entry.groups)), str(names.get(entry.kernel.id, "")))
            for entry in described]


def find_cliffs(timed: Iterable[Timed], least_height: float = LEAST_HEIGHT) -> list[Cliff]:
    """The cliffs between neighbours, the highest first; each kernel is on at most one."""
    groups: dict[str, list[Timed]] = {}
    for entry in timed:
        groups.setdefault(comparable(entry.kernel), []).append(entry)
    found = [cliff for group in groups.values() if len(group) > 1 for cliff in _in_group(group, least_height)]
    taken, kept = set[str](), list[Cliff]()
    for cliff in sorted(found, key=lambda cliff: (-cliff.height, cliff.slower.kernel.id, cliff.faster.kernel.id)):
        ids = {cliff.slower.kernel.id, cliff.faster.kernel.id}
        if not ids & taken:
            kept.append(cliff)
            taken |= ids
    return kept


def comparable(kernel: Kernel) -> str:
    """A text that kernels share which differ in sizes alone."""
    attributes = {name: value for name, value in kernel.attributes.items() if name not in SIZES}
    tensors = [(tensor.dtype, len(tensor.shape), tensor.constant, len(sizes) if (sizes := _sizes_given(kernel, place)) else
                tensor.values) for place, tensor in enumerate(kernel.inputs)]
    lengths = {name: len(value) if isinstance(value, list) else 0 for name, value in _sized(kernel).items()}
    results = [output.dtype for output in kernel.outputs]
    return json.dumps([kernel.op_type, kernel.domain, attributes, tensors, lengths, results], sort_keys=True, default=str)


def _sized(kernel: Kernel) -> dict[str, Any]:
    """The attributes that are sizes; for a window, those too that a description omits since they are as by default."""
    window = kernel.attributes.get("kernel_shape")
    usual = {} if window is None else {"dilations": [1] * len(window), "pads": [0] * 2 * len(window), "group": 1}
    return usual | {name: kernel.attributes[name] for name in SIZES if name in kernel.attributes}


def _in_group(group: Sequence[Timed], least_height: float) -> list[Cliff]:
    """The cliffs of kernels that differ in sizes alone."""
    if not _sizes(group[0].kernel):
        return []
    places = np.log2(1.0 + np.array([_sizes(entry.kernel) for entry in group], dtype=float))
    count = min(NEIGHBOURS + 1, len(group))
    nearest = sklearn.neighbors.NearestNeighbors(n_neighbors=count, metric="manhattan").fit(places).kneighbors(
        return_distance=False, n_neighbors=count - 1)
    pairs = {tuple(sorted((row, int(other)))) for row, others in enumerate(nearest) for other in others}
    found = []
    for one, two in sorted(pairs):
        faster, slower = sorted((group[one], group[two]), key=lambda entry: entry.time_ms)
        if slower.time_ms >= LEAST_MS and (height := cliff_height(slower, faster)) >= least_height:
            found.append(Cliff(slower, faster, height))
    return found


def cliff_height(slower: Timed, faster: Timed) -> float:
    """How many times as long as the faster one a kernel takes, beyond what its bytes and operations explain."""
    def times(of_slower: float, of_faster: float) -> float:
        return max(of_slower, 1.0) / max(of_faster, 1.0)

    a, b = slower.kernel, faster.kernel
    explained = max(times(a.bytes_read + a.bytes_written, b.bytes_read + b.bytes_written), times(a.flops, b.flops), 1.0)
    return slower.time_ms / faster.time_ms / explained


def _sizes_given(kernel: Kernel, place: int) -> list[int]:
    """The values of a constant that gives sizes, such as those of a border; none of other inputs."""
    row, tensor = operator_row(kernel.op_type), kernel.inputs[place]
    given = place in row.size_inputs or place == row.shape_input
    return [int(value) for value in tensor.values or ()] if given and tensor.dtype.startswith("int") else []


def _sizes(kernel: Kernel) -> list[int]:
    """All sizes of a kernel, in an order that comparable kernels share."""
    attributes = [size for _, value in sorted(_sized(kernel).items())
                  for size in (value if isinstance(value, list) else [value])]
    constants = [abs(value) for place in range(len(kernel.inputs)) for value in _sizes_given(kernel, place)]
    return [*(size for tensor in kernel.inputs for size in tensor.shape), *attributes, *constants]


def draw_weights(cliffs: Sequence[Cliff]) -> Floats:
    """How often to draw between the kernels of each cliff, as shares of 1: as the height's logarithm and the time say, the
    latter up to a limit, so that the slowest do not take all."""
    times_ms = np.array([cliff.slower.time_ms for cliff in cliffs])
    weights = np.log([cliff.height for cliff in cliffs]) * np.minimum(times_ms, np.quantile(times_ms, LONG)) ** 0.5
    return np.asarray(weights / weights.sum())


def between(one: Kernel, two: Kernel, share: float = 0.5) -> Kernel:
    """The kernel whose sizes lie between those of two others.

    Args:
        one, two: two that are `comparable`.
        share: of the way from the one to the other, in logarithms; 0.5 gives geometric means.

    Raises:
        NothingBetween: no kernel lies between them.
        UserError: its sizes do not fit together, or it can't be drawn.
    """
    other = _sized(two)
    attributes = normalize(one.attributes | {name: _middle(value, other[name], share) for name, value in _sized(one).items()})
    inputs = [_middle_tensor(*pair, share) for pair in zip(one.inputs, two.inputs, strict=True)]
    if operator_row(one.op_type).operator_class == "convolution":
        inputs = _fitted_convolution(one, inputs, attributes)
    if operator_row(one.op_type).cost == "recurrent":
        inputs = _fitted_recurrent(one, inputs, int(attributes["hidden_size"]))
    seed = one.model_copy(update={"inputs": tuple(inputs)})
    middle = describe_kernel(one.op_type, one.domain, one.opset, attributes, inputs, infer_outputs(seed, inputs, attributes))
    if middle.id in (one.id, two.id):
        raise NothingBetween(f"{one.id}, {two.id}: no kernel lies between them")
    if on_cuda(one) and not on_cuda(middle):
        raise UserError(f"{middle.id}: the CUDA provider lacks it")
    return middle


def _middle(one: Any, two: Any, share: float) -> Any:
    """A whole number between two sizes, or one for each pair of two lists."""
    if isinstance(one, list):
        return [_middle(*pair, share) for pair in zip(one, two, strict=True)]
    return int(one) if one == two else round(math.exp((1 - share) * math.log(1 + one) + share * math.log(1 + two))) - 1


def _middle_tensor(one: KernelInput, two: KernelInput, share: float) -> KernelInput:
    if one.values is not None and two.values is not None and one.values != two.values:
        if not all(isinstance(value, int) and value >= 0 for value in (*one.values, *two.values)):
            raise UserError("two constants that are no sizes have nothing between them")
        return one.model_copy(update={"values": tuple(_middle(list(one.values), list(two.values), share))})
    return one.model_copy(update={"shape": tuple(_middle(list(one.shape), list(two.shape), share))})


def _fitted_convolution(seed: Kernel, inputs: Sequence[KernelInput], attributes: Mapping[str, Any]) -> list[KernelInput]:
    """The inputs of a convolution with as many channels as its groups and weights say."""
    if len(inputs) > 3 or operator_row(seed.op_type).weights_input != 1 or channels_last(seed):
        raise UserError(f"{seed.id}: nothing is drawn between convolutions of its kind")
    x, weights, *bias = inputs
    group, window = int(attributes.get("group", 1)), attributes.get("kernel_shape", weights.shape[2:])
    transposed = "Transpose" in seed.op_type
    before = max(1, round((weights.shape[0] if transposed else x.shape[1]) / group))
    after = max(1, round(weights.shape[1] if transposed else weights.shape[0] / group))
    first, second = (group * before, after) if transposed else (group * after, before)
    made = [x.model_copy(update={"shape": (x.shape[0], group * before, *x.shape[2:])}),
            weights.model_copy(update={"shape": (first, second, *window)})]
    return [*made, *(tensor.model_copy(update={"shape": (group * after,)}) if tensor.present else tensor for tensor in bias)]


def _fitted_recurrent(seed: Kernel, inputs: Sequence[KernelInput], hidden: int) -> list[KernelInput]:
    """The inputs of a recurrent layer whose weights are as many as its hidden size says."""
    gates = seed.inputs[1].shape[1] // int(seed.attributes["hidden_size"]) * hidden
    ends = {1: (gates, inputs[1].shape[2]), 2: (gates, hidden), 3: (2 * gates,), 5: (inputs[0].shape[1], hidden),
            6: (inputs[0].shape[1], hidden)}
    return [tensor.model_copy(update={"shape": (tensor.shape[0], *ends[place])}) if place in ends and tensor.present else tensor
            for place, tensor in enumerate(inputs)]
