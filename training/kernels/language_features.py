"""Numbers that decide the time of the operators of language models, as the last groups of KERNEL_FEATURES.

With them, kernels that were held out err less, on an H200: attention by 9.0 in place of 21.8 % in the mean, products with int4
and int8 weights by 7.0 in place of 8.8 % (cross-validated on the kernels of recipes/llm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from records.attention import attended_by
from records.kernel_record import Kernel
from runtimes.ort.cuda.language_kernels import (
    ALGORITHMS,
    H200,
    Gpu,
    group_size,
    language_algorithm,
    product_rows,
    splits,
    thread_blocks,
)

LANGUAGE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("algorithm", "splits"),
    "attention": ("log_queries", "log_attended", "log_cache", "log_pairs", "heads_per_key_head", "key_heads", "head_size",
                  "attention_window", "rotated", "normed", "shares_buffer", "log_blocks", "log_waves", "wave_fill"),
    "quantised": ("weight_bits", "weight_block", "zero_points", "log_rows")}


def language_features(kernel: Kernel, gpu: Gpu = H200) -> list[float]:
    """The values of LANGUAGE_GROUPS, in its order; 0 for what a kernel does not have.

    Args:
        kernel: any.
        gpu: that runs it.
    """
    algorithm = language_algorithm(kernel, gpu)
    of_attention, of_product = [0.0] * len(LANGUAGE_GROUPS["attention"]), [0.0] * len(LANGUAGE_GROUPS["quantised"])
    parts = 0
    if sizes := attended_by(kernel):
        parts = splits(sizes, algorithm, gpu)
        lengths = (sizes.queries, sizes.total, sizes.cache, sizes.pairs)
        blocks = thread_blocks(sizes, algorithm, parts)
        waves = math.ceil(blocks / gpu.multiprocessors)
        of_attention = [*(math.log2(1 + length) for length in lengths), group_size(sizes), sizes.kv_heads, sizes.head_size,
                        sizes.window, sizes.rotary, float(sizes.normed), float(sizes.shares_buffer), math.log2(1 + blocks),
                        math.log2(1 + waves), blocks / (gpu.multiprocessors * max(waves, 1))]
    elif kernel.op_type == "MatMulNBits":
        zeros = len(kernel.inputs) > 3 and kernel.inputs[3].present
        of_product = [float(kernel.attributes.get("bits", 4)), float(kernel.attributes.get("block_size", 32)), float(zeros),
                      math.log2(1 + product_rows(kernel))]
    return [float(ALGORITHMS.index(algorithm)), float(parts), *of_attention, *of_product]
