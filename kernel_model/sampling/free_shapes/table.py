"""Draws kernels that belong to no model: tables of which kinds, how often, and with which element types.

Sampled kernels near one model family say little about other families: without RegNet, nothing is near a grouped convolution
with 24 channels per group. These kernels name no family, and no measurement affects how they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hase.kernel_model.sampling.free_shapes import elementwise, forms, language, layers, movement, on_host
from hase.kernel_model.sampling.free_shapes.sizes import Generator
from hase.records.kernel_record import Kernel

WELL_KNOWN = {"Relu", "Sigmoid", "Gelu", "QuickGelu", "HardSwish", "HardSigmoid", "Clip"}  # often measured in image models
Draw = Callable[[str, int, Generator], Kernel]
# Convolutions are drawn most often: their times follow their shapes least simply.
DRAWS: tuple[tuple[Draw, float], ...] = (  # how often, relative to each other
    (layers.convolution, 100), (layers.signal_convolution, 50), (layers.video_convolution, 40),
    (layers.transposed_convolution, 22), (layers.pool, 20), (layers.global_pool, 14),
    (layers.gemm, 30), (layers.layer_product, 44), (layers.batched_product, 44), (layers.attention_sum, 4),
    (layers.sum_of_products, 22),
    (layers.layer_norm, 62), (layers.instance_norm, 22), (layers.batch_norm, 14),
    (layers.softmax, 40), (layers.biased_softmax, 18),
    (layers.mean, 6), (layers.norm, 4), (layers.reduction, 80), (layers.largest_index, 22),
    (layers.running_sum, 20), (layers.largest, 30),
    (movement.embedding, 16), (movement.taken, 20), (movement.taken_elements, 18), (movement.taken_slices, 18),
    (movement.put_slices, 22), (movement.put_elements, 22), (movement.resize, 24), (movement.sampled_image, 8),
    (movement.transpose, 14), (movement.any_order, 36), (movement.join, 6), (movement.join_any, 20), (movement.cut, 5),
    (movement.cut_any, 22), (movement.part, 22), (movement.pad, 5), (movement.pad_any, 20), (movement.repeat, 26),
    (movement.blocks, 20), (movement.triangle, 12),
    (layers.recurrent, 56),
    (elementwise.activation, 8), (elementwise.arithmetic, 8), (elementwise.power, 12), (elementwise.several, 16),
    (elementwise.slopes, 14), (elementwise.biased_gelu, 24), (elementwise.choice, 18), (elementwise.on_masks, 30),
    (elementwise.cast, 26),
    *((draw, 5 if name in WELL_KNOWN else 9) for name, draw in elementwise.UNARY.items()),
    *((draw, 20 if name in ("Add", "Mul") else 12) for name, draw in elementwise.BINARY.items()))
LANGUAGE: tuple[tuple[Draw, float], ...] = (  # by the time that these operators take; attention is hard to predict
    (language.grouped_attention, 300), (language.quantised_product, 240), (language.matrix_product, 200),
    (language.sum_and_norm, 40), (language.norm, 30), (language.apart, 12), (language.activation, 30),
    (language.elementwise, 25), (language.attention, 240), (language.fused_attention, 150), (language.packed_attention, 60),
    (language.rotary, 15), (language.embedding, 10), (language.quantised_embedding, 10), (language.first_layer, 8),
    (language.sum_and_layer_norm, 8), (language.mixture, 50), (language.quantised_mixture, 100), (language.quantise, 12))
FORMS: tuple[tuple[Draw, float], ...] = (  # by the number of algorithms in libraries
    (forms.convolution, 340), (forms.transposed_convolution, 60), (forms.pool, 80), (forms.channel_norm, 60),
    (forms.layer_norm, 45), (forms.other_norm, 15), (forms.softmax, 50), (forms.reduction, 110), (forms.along_an_axis, 50),
    (forms.unary, 110), (forms.binary, 130), (forms.where, 25), (forms.cast, 50), (forms.transpose, 50), (forms.concat, 30),
    (forms.split, 30), (forms.slice_axes, 40), (forms.pad, 30), (forms.expand_or_tile, 30), (forms.gather_or_scatter, 40),
    (forms.resize, 35),
    (forms.matrix_product, 90), (forms.gemm, 60), (forms.recurrent, 40))
RARE: tuple[tuple[Draw, float], ...] = (  # by the errors of predictions for held-out models
    (layers.convolution, 180), (layers.rare_convolution, 280), (layers.rare_transposed_convolution, 60),
    (layers.first_layer, 120),
    (layers.grouped_signal, 140), (layers.grouped_image, 90), (layers.thin_product, 90), (layers.deep_product, 40),
    (layers.attention_product, 90), (layers.rare_softmax, 80), (layers.rare_recurrent, 120), (layers.rare_channel_norm, 30))
STANDARD: tuple[tuple[Draw, float], ...] = (
    (language.onnx_attention, 340), (language.rms_norm, 40), (language.onnx_rotary, 40), (language.integer_product, 120),
    (language.quantised_activation, 80), (language.quantised_weight, 80), (language.in_bfloat16, 200))
HOST: tuple[tuple[Draw, float], ...] = (  # by how often quantisers write them, and how much their times depend on sizes
    (on_host.quantised_convolution, 300), (on_host.quantised_product, 200), (on_host.integer_product, 200),
    (on_host.rounded_while_running, 80), (on_host.quantised_arithmetic, 100), (on_host.quantised_activation, 60),
    (on_host.quantised_pool, 50), (on_host.moved_channels, 60), (on_host.bias, 30), (on_host.unary, 150),
    (on_host.any_form, 200), (on_host.newer_version, 300), (on_host.spectrum, 100), (on_host.distinct, 80),
    (on_host.drawn_classes, 40), (on_host.pool, 40), (on_host.other, 60), (on_host.table_of_features, 120),
    (on_host.on_shapes, 160))
Kind = Literal["networks", "language", "forms", "rare", "standard", "host"]


@dataclass(frozen=True)
class DrawTable:
    """Functions that draw kernels, with their relative frequencies, and the element types, all equally frequent."""

    draws: tuple[tuple[Draw, float], ...]
    dtypes: tuple[str, ...]

    @property
    def probabilities(self) -> np.ndarray:
        return np.array([weight for _, weight in self.draws]) / sum(weight for _, weight in self.draws)


TABLES: dict[Kind, DrawTable] = {"networks": DrawTable(DRAWS, ("float32", "float16")),
                             "language": DrawTable(LANGUAGE, ("float16", "float16", "bfloat16")),
                             "forms": DrawTable(FORMS, ("float32", "float16")),
                             "rare": DrawTable(RARE, ("float32", "float32", "float16")),
                             "standard": DrawTable(STANDARD, ("float16", "float32", "bfloat16")),
                             "host": DrawTable(HOST, ("float32", "float16"))}


def draw_free_kernel(batch: int, generator: Generator, kind: Kind = "networks", dtypes: Sequence[str] = ()) -> Kernel:
    """A kernel of no model, drawn from the table of a kind, in one of `dtypes` or else of the table's. Raises ValueError if the
    drawn sizes give an empty output."""
    table = TABLES[kind]
    draw, _ = table.draws[int(generator.choice(len(table.draws), p=table.probabilities))]
    kernel = draw(str(generator.choice(dtypes or table.dtypes)), batch, generator)
    if not all(output.elements for output in kernel.outputs if output.present):
        raise ValueError(f"{kernel.id}: no output")
    return kernel
