"""The work of kernels on a GPU, and the least time that it takes on a card, by its data sheet.

Three things bound a kernel's time: moving its bytes, computing its operations, and the minimum time of any kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.records.devices import GpuDataSheet
from hase.records.kernel_record import Kernel
from hase.records.operators import operator_row
from hase.utils.timing import Floats

KINDS = ("product", "convolution", "attention", "elementwise", "normalisation", "reduction", "movement", "other")
PRODUCTS = ("product", "convolution", "attention")  # computed by tensor cores, if the card has them for the type
DTYPES = ("float32", "float16", "bfloat16", "plain float32")  # the last one: products of float32 without TF32
REACHED_PEAK, REACHED_BANDWIDTH = 0.7, 0.75  # shares of their sheets that large kernels of six cards reach (medians)
LAUNCH_US, LAUNCH_MHZ = 1.1, 1980.0  # the time of a launch on an H200, and its clock
# The second cache: how much of its size serves repeated work, how sharply larger work falls out of it, and bytes that each SM
# reads from it in a clock. Chosen with the products of six cards (recipes/gpus); 32 to 64 bytes make little difference.
CACHE_SHARE, CACHE_EDGE, CACHE_BYTES_PER_CLOCK = 0.4, 4.0, 48.0
TILE = 128 * 128  # numbers of a result that a block of threads computes


class Work(NamedTuple):
    """The work of kernels on a GPU, an entry for each: least bytes read and written, numbers of output elements, indices in
    KINDS and DTYPES, CUDA kernels' launches."""

    flops: Floats
    moved_bytes: Floats
    outputs: Floats
    kinds: npt.NDArray[np.int_]
    dtypes: npt.NDArray[np.int_]
    launches: Floats

    def rows(self, chosen: npt.NDArray[np.int_] | npt.NDArray[np.bool_]) -> Work:
        """The work of the chosen kernels alone."""
        return Work(self.flops[chosen], self.moved_bytes[chosen], self.outputs[chosen], self.kinds[chosen], self.dtypes[chosen],
                    self.launches[chosen])


def kind_of(op_type: str) -> str:
    """The entry of KINDS for an operator."""
    row = operator_row(op_type)
    if row.cost == "attention" or op_type == "GroupQueryAttention":
        return "attention"
    return row.operator_class if row.operator_class in KINDS else "movement" if row.operator_class == "gather" else "other"


def work_of(kernels: Sequence[Kernel], launches: Sequence[float]) -> Work:
    """The work of kernels, as ONNX Runtime computes them."""
    return Work(np.array([float(kernel.flops) for kernel in kernels]),
                np.array([float(max(kernel.bytes_read + kernel.bytes_written, 1)) for kernel in kernels]),
                np.array([float(sum(tensor.elements for tensor in kernel.outputs if tensor.present)) for kernel in kernels]),
                np.array([KINDS.index(kind_of(kernel.op_type)) for kernel in kernels], dtype=int),
                np.array([DTYPES.index(kernel.dtype) if kernel.dtype in DTYPES else 0 for kernel in kernels], dtype=int),
                np.maximum(np.array(launches, dtype=float), 1.0))


def is_product(work: Work) -> npt.NDArray[np.bool_]:
    """Which kernels run on tensor cores, if the card has them for the type."""
    return np.isin(work.kinds, [KINDS.index(kind) for kind in PRODUCTS])


def by_tensor_cores(work: Work, gpu: GpuDataSheet) -> Floats:
    """The operations of each kernel on the card's tensor cores, or 0."""
    known = np.array([gpu.tensor_tflop_s(dtype) is not None for dtype in DTYPES])[work.dtypes]
    return np.where(is_product(work) & known, work.flops, 0.0)


def peaks_flop_s(work: Work, gpu: GpuDataSheet) -> Floats:
    """The card's peak for each kernel, in operations per second."""
    product_peaks = np.array([gpu.peak_tflop_s(dtype) for dtype in DTYPES])[work.dtypes]
    return np.where(is_product(work), product_peaks, gpu.fp32_tflop_s) * 1e12


class Bounds(NamedTuple):
    """Lower bounds of each kernel's time on a card, in seconds."""

    memory_s: Floats
    compute_s: Floats
    shortest_s: Floats

    @property
    def longest_s(self) -> Floats:
        return np.maximum(np.maximum(self.memory_s, self.compute_s), self.shortest_s)


def bounds_of(work: Work, gpu: GpuDataSheet, shortest_us: float = LAUNCH_US) -> Bounds:
    """Lower bounds of kernels' times on a card. `shortest_us` is of a launch, at the clock LAUNCH_MHZ."""
    cache_fill = work.moved_bytes / (CACHE_SHARE * gpu.l2_mb * 1e6)
    miss_share = cache_fill**CACHE_EDGE / (1.0 + cache_fill**CACHE_EDGE)
    memory_s = (work.moved_bytes * miss_share / (gpu.bandwidth_gb_s * 1e9 * REACHED_BANDWIDTH)
                + work.moved_bytes / (gpu.sms * gpu.boost_mhz * 1e6 * CACHE_BYTES_PER_CLOCK))
    shortest_s = work.launches * shortest_us * 1e-6 * LAUNCH_MHZ / gpu.boost_mhz
    return Bounds(memory_s, work.flops / (peaks_flop_s(work, gpu) * REACHED_PEAK), shortest_s)


def ratio_of_bounds(work: Work, base_s: Floats, base: Bounds, there: Bounds, base_gpu: GpuDataSheet,
                    gpu: GpuDataSheet) -> Floats:
    """The ratio of times on a card to those on the base card, by bounds alone, weighted by squared shares of the base's time.
    The rest scales with the clock, and with the SMs for kernels that fill the card."""
    shares = [np.minimum(bound / base_s, 1.0) for bound in base]
    rest = np.clip(1.0 - np.maximum.reduce(shares), 0.0, 1.0)
    filled = np.clip(work.outputs / TILE / base_gpu.sms, 0.0, 1.0)
    ratios = [there.memory_s / base.memory_s, peaks_flop_s(work, base_gpu) / peaks_flop_s(work, gpu),
              there.shortest_s / base.shortest_s, base_gpu.boost_mhz / gpu.boost_mhz * (base_gpu.sms / gpu.sms) ** filled]
    weights = [share**2 for share in (*shares, rest)]
    return np.asarray(sum(weight * ratio for weight, ratio in zip(weights, ratios, strict=True)) / sum(weights))


def features_of(work: Work, base_s: Floats, base: Bounds, there: Bounds, base_gpu: GpuDataSheet, gpu: GpuDataSheet) -> Floats:
    """Features that explain how kernels' times on a card differ from what the bounds predict; a row for each kernel. `base_s`
    and `base` are times and bounds on the base card, `there` the bounds on the other."""
    ones, longest_s = np.ones(len(base_s)), there.longest_s

    def waves(card: GpuDataSheet) -> tuple[Floats, Floats]:
        count = np.maximum(work.outputs / TILE / card.sms, 1e-6)
        return np.log(count), np.clip(np.log(np.ceil(count) / count), 0.0, 3.0)

    (_, base_idle), (there_waves, there_idle) = waves(base_gpu), waves(gpu)
    return np.column_stack([
        np.log(base_s / base.longest_s), np.log(longest_s), there.memory_s / longest_s, there.compute_s / longest_s,
        np.minimum(base.memory_s / base_s, 2.0), np.minimum(base.compute_s / base_s, 2.0),
        np.log(ratio_of_bounds(work, base_s, base, there, base_gpu, gpu)),
        np.log(work.moved_bytes / (gpu.l2_mb * 1e6)), np.log(work.moved_bytes / (base_gpu.l2_mb * 1e6)),
        there_waves, there_idle, there_idle - base_idle,
        np.log(gpu.sms / base_gpu.sms) * ones, np.log(gpu.boost_mhz / base_gpu.boost_mhz) * ones,
        np.log(gpu.bandwidth_gb_s / base_gpu.bandwidth_gb_s) * ones, np.log(gpu.l2_mb / base_gpu.l2_mb) * ones,
        np.log(peaks_flop_s(work, gpu) / peaks_flop_s(work, base_gpu)),
        work.kinds.astype(float), work.dtypes.astype(float), np.log(work.launches)])
