"""Rare forms of operators, and layers of rare sizes: drawn, built and run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from drawn_kernels import small_draws

from hase.kernel_model.building.kernel_models import check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import sample_free
from hase.kernel_model.sampling.draws import on_cuda
from hase.kernel_model.sampling.free_shapes import forms, layers
from hase.kernel_model.sampling.free_shapes.sizes import kernel, scalar, tensor
from hase.kernel_model.sampling.free_shapes.table import FORMS, RARE, Draw
from hase.records.kernel_record import Kernel, Tensor
from hase.utils.errors import UserError


@pytest.mark.parametrize("draw", [draw for draw, _ in (*FORMS, *RARE)])
def test_draws_run_and_put_out_what_they_describe(draw: Draw, tmp_path: Path) -> None:
    for drawn in small_draws(draw, 6):
        check_kernel(write_kernel(drawn, tmp_path), drawn, "cpu")


def test_what_a_kernel_puts_out_follows_from_its_schema() -> None:
    x = tensor("float16", 2, 6, 9)
    assert forms.inferred("ReduceSum", [x, scalar("int64", 1).model_copy(update={"shape": (1,)})], keepdims=0) == kernel(
        "ReduceSum", [x, scalar("int64", 1).model_copy(update={"shape": (1,)})], [(2, 9)], keepdims=0, noop_with_empty_axes=0)
    assert forms.inferred("ArgMax", [x], axis=2).outputs == (Tensor(dtype="int64", shape=(2, 6, 1)),)
    with pytest.raises(UserError, match="Add: the sizes drawn do not fit together"):
        forms.inferred("Add", [x, tensor("float16", 5)])


def test_convolutions_have_any_rank_groups_and_width() -> None:
    generator = np.random.default_rng(0)
    drawn = [forms.convolution("float32", 1, generator) for _ in range(200)]
    window = {(len(conv.inputs[0].shape) - 2, max(conv.attributes["kernel_shape"])) for conv in drawn}
    groups = [(conv.attributes.get("group", 1), conv.inputs[0].shape[1]) for conv in drawn]
    assert {rank for rank, _ in window} == {1, 2, 3}
    assert [max(wide for rank, wide in window if rank == of) for of in (1, 2, 3)] > [90, 25, 7]
    assert 30 <= sum(group == channels > 1 for group, channels in groups) <= 120  # each channel apart
    assert 40 <= sum(1 < group < channels for group, channels in groups) <= 120


def test_rare_layers_have_sizes_that_libraries_are_not_tuned_for() -> None:
    dense = any_that_fit(layers.rare_convolution, 100)
    assert {conv.attributes.get("group", 1) for conv in dense} == {1}
    assert {len(conv.inputs[0].shape) for conv in dense} == {3, 4, 5}
    assert 25 <= sum(conv.inputs[0].shape[1] % 8 > 0 for conv in dense) <= 75
    assert {conv.inputs[0].shape[1] for conv in any_that_fit(layers.first_layer, 60)} == {1, 2, 3, 4}
    signals = any_that_fit(layers.grouped_signal, 60)
    assert {len(conv.inputs[0].shape) for conv in signals} == {3}
    assert all(conv.attributes["group"] > 1 for conv in signals)
    assert {1, 128} <= {conv.attributes["kernel_shape"][0] for conv in signals}
    assert all(product.outputs[0].shape[0] >= 1000 and product.outputs[0].shape[1] <= 96
               for product in any_that_fit(layers.thin_product, 40))
    assert {product.inputs[0].shape[2] == 1 for product in any_that_fit(layers.attention_product, 20)} == {True, False}
    assert all(layer.attributes["hidden_size"] >= 192 for layer in any_that_fit(layers.rare_recurrent, 20))


def any_that_fit(draw: Draw, count: int) -> list[Kernel]:
    """Kernels of a draw, of any size."""
    generator, found = np.random.default_rng(4), list[Kernel]()
    while len(found) < count:
        with suppress(UserError):
            found.append(draw("float32", 2, generator))
    return found


def test_only_what_the_device_has_is_drawn() -> None:
    on_gpu, refused = sample_free(60, np.random.default_rng(1), [1], most_gflop=1.0, most_mib=8.0, kind="forms", device="cuda")
    assert len(on_gpu) == 60
    assert all(on_cuda(drawn) for drawn, _ in on_gpu.values())
    assert refused["sizes do not fit"] > 0
    assert len({drawn.op_type for drawn, _ in on_gpu.values()}) > 20
