"""Numbers that decide the time of the operators of language models, as the last groups of KERNEL_FEATURES.

With them, kernels that were held out err less, on an H200: GroupQueryAttention by 9.0 in place of 21.8 % in the mean,
products with int4 and int8 weights by 7.0 in place of 8.8 %, MultiHeadAttention by 14 in place of 16 %, Attention (with the
bytes that it stores between its steps) by 12 in place of 20 %, experts with such weights by 22 in place of 26 %
(cross-validated on the kernels of recipes/llm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hase.ort_analysis.cuda.language_kernels import (
    ALGORITHMS,
    H200,
    Gpu,
    group_size,
    language_algorithm,
    product_rows,
    splits,
    thread_blocks,
)
from hase.records.attention import MASKS, attended_by
from hase.records.kernel_costs import experts_used
from hase.records.kernel_record import Kernel, input_at
from hase.records.operators import operator_row
from hase.records.plain_attention import plain_attended_by

LANGUAGE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("algorithm", "splits"),
    "attention": ("log_queries", "log_attended", "log_cache", "log_pairs", "heads_per_key_head", "key_heads", "head_size",
                  "attention_window", "rotated", "normed", "shares_buffer", "causal", "mask", "log_blocks", "log_waves",
                  "wave_fill"),
    "quantised": ("weight_bits", "weight_block", "zero_points", "log_rows"),
    "experts": ("log_experts", "experts_per_token", "gated")}


def language_features(kernel: Kernel, gpu: Gpu = H200) -> list[float]:
    """The values of LANGUAGE_GROUPS, in its order; 0 for what a kernel does not have.

    Args:
        kernel: any.
        gpu: that runs it.
    """
    algorithm = language_algorithm(kernel, gpu)
    of_attention, of_product, of_experts = (
        [0.0] * len(LANGUAGE_GROUPS[name]) for name in ("attention", "quantised", "experts"))
    parts = 0
    if sizes := attended_by(kernel) or plain_attended_by(kernel):
        parts = splits(sizes, algorithm, gpu)
        lengths = (sizes.queries, sizes.total, sizes.cache, sizes.pairs)
        blocks = thread_blocks(sizes, algorithm, parts)
        waves = math.ceil(blocks / gpu.multiprocessors)
        of_attention = [*(math.log2(1 + length) for length in lengths), group_size(sizes), sizes.kv_heads, sizes.head_size,
                        sizes.window, sizes.rotary, float(sizes.normed), float(sizes.shares_buffer), float(sizes.causal),
                        float(MASKS.index(sizes.mask)), math.log2(1 + blocks), math.log2(1 + waves),
                        blocks / (gpu.multiprocessors * max(waves, 1))]
    elif kernel.op_type == "MatMulNBits":
        zeros = input_at(kernel.inputs, 3).present
        of_product = [float(kernel.attributes.get("bits", 4)), float(kernel.attributes.get("block_size", 32)), float(zeros),
                      math.log2(1 + product_rows(kernel))]
    elif has_unsigned_weights(kernel):
        of_product = [0.0, 0.0, 1.0, 0.0]
    elif operator_row(kernel.op_type).cost == "experts":
        of_product, of_experts = _experts(kernel)
    return [float(ALGORITHMS.index(algorithm)), float(parts), *of_attention, *of_product, *of_experts]


def has_unsigned_weights(kernel: Kernel) -> bool:
    """Whether a product multiplies by weights of whole numbers without a sign, which have a zero point."""
    return kernel.op_type == "MatMulInteger" and input_at(kernel.inputs, 1).dtype == "uint8"


def _experts(kernel: Kernel) -> tuple[list[float], list[float]]:
    """The groups `quantised` and `experts` of a mixture of experts: its rows are those that an expert computes in the mean."""
    attributes, available = kernel.attributes, kernel.inputs[1].shape[-1] if kernel.inputs[1].shape else 1
    chosen, quantised = experts_used(attributes), kernel.op_type == "QMoE"
    rows = product_rows(kernel) * chosen / max(available, 1)
    return ([float(attributes.get("expert_weight_bits", 4)) if quantised else 0.0, float(attributes.get("block_size", 0)), 0.0,
             math.log2(1 + rows)],
            [math.log2(1 + available), float(chosen), float(attributes.get("activation_type") == "swiglu")])
