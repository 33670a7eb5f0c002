"""Drawn kernels: near one of a model, of rare forms, and those that the CPU provider runs in CUDA sessions. All run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import free_kernel
from drawn_kernels import small_draws

from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import build_model, check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import sample_free
from hase.kernel_model.sampling.draws import draw_kernel, on_cuda
from hase.kernel_model.sampling.free_shapes import on_host
from hase.kernel_model.sampling.free_shapes.sizes import tensor
from hase.kernel_model.sampling.free_shapes.table import FORMS, HOST, RARE, Draw
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session

ON_HOST = {draw for draw, _ in HOST}
ON_EITHER = {on_host.moved_channels, on_host.on_shapes, on_host.newer_version}  # CUDA has them, but may leave them to the CPU


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "ConvTranspose", "InstanceNormalization", "BatchNormalization", "Expand",
                                     "Einsum", "DepthToSpace", "SpaceToDepth", "Resize"])
def test_kernels_with_related_sizes_are_drawn_near_and_run(op_type: str) -> None:
    seed, generator = free_kernel(op_type, "float32"), np.random.default_rng(2)
    drawn = [draw_kernel(seed, 4, generator, 0.5) for _ in range(20)]
    assert len({made.id for made in drawn}) > 5
    assert all(made.type == seed.type for made in drawn)
    for made in sorted(drawn, key=lambda made: made.flops + made.bytes_read)[:4]:  # large ones take long
        assert output_shapes(made) == [output.shape for output in made.outputs]


def output_shapes(made: Kernel) -> list[tuple[int, ...]]:
    session = open_session(build_model(made).SerializeToString(), "cpu", optimize="none")
    return [array.shape for array in session.run(None, dummy_inputs(made))]


@pytest.mark.parametrize("draw", [draw for draw, _ in (*FORMS, *RARE, *HOST)])
def test_draws_run_and_put_out_what_they_describe(draw: Draw, tmp_path: Path) -> None:
    for drawn in small_draws(draw, 6):
        path = write_kernel(drawn, tmp_path)
        assert built_kernel(path) == drawn
        check_kernel(path, drawn, "cpu")
        assert draw not in ON_HOST - ON_EITHER or not on_cuda(drawn)


def of_ints(*values: int) -> KernelInput:
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def test_regions_name_existing_images_and_columns_keep_their_blocks() -> None:
    generator = np.random.default_rng(2)
    align = describe_kernel("RoiAlign", "", 16, {"output_height": 7, "output_width": 7}, [
        tensor("float32", 1, 16, 20, 20), tensor("float32", 10, 4), tensor("int64", 10)],
        [Tensor(dtype="float32", shape=(10, 16, 7, 7))])
    columns = describe_kernel("Col2Im", "", 18, {}, [tensor("float32", 2, 32, 100), of_ints(20, 20), of_ints(2, 2)],
                              [Tensor(dtype="float32", shape=(2, 8, 20, 20))])
    columns = columns.model_copy(update={"attributes": {"strides": [2, 2]}})
    for seed in (align, columns):
        for _ in range(5):
            made = draw_kernel(seed, 3, generator)
            assert output_shapes(made) == [output.shape for output in made.outputs]


def test_a_gather_outside_its_axis_is_refused() -> None:
    seed = describe_kernel("Gather", "", 20, {"axis": 0}, [tensor("float32", 30, 8), of_ints(29)],
                           [Tensor(dtype="float32", shape=(1, 8))])
    generator = np.random.default_rng(0)
    shrunk = seed.model_copy(update={"inputs": (tensor("float32", 20, 8), seed.inputs[1])})
    with pytest.raises(UserError, match="holds an index outside of its axis"):
        draw_kernel(shrunk, 4, generator, spread=0.1)
    assert draw_kernel(seed, 4, generator, spread=0.0).inputs[0].shape == (30, 8)


def test_only_what_the_device_has_is_drawn() -> None:
    on_gpu, refused = sample_free(60, np.random.default_rng(1), [1], most_gflop=1.0, most_mib=8.0, kind="forms", device="cuda")
    assert len(on_gpu) == 60
    assert all(on_cuda(drawn) for drawn, _ in on_gpu.values())
    assert refused["sizes do not fit"] > 0
    assert len({drawn.op_type for drawn, _ in on_gpu.values()}) > 20


def test_quantised_kernels_compute_in_whole_numbers_and_cost_what_floating_ones_do() -> None:
    generator = np.random.default_rng(5)
    for draw, op_types in ((on_host.quantised_convolution, {"QLinearConv", "ConvInteger"}),
                           (on_host.quantised_product, {"QLinearMatMul", "QGemm"})):
        drawn = [draw("float32", 2, generator) for _ in range(40)]
        assert {made.op_type for made in drawn} == op_types
        for made in drawn:
            weights = made.inputs[1 if made.op_type == "ConvInteger" else 3].shape
            depth = np.prod(weights[1:]) if "Conv" in made.op_type else made.inputs[0].shape[-1]
            assert made.dtype == made.inputs[0].dtype in ("uint8", "int8")
            assert 0 <= made.flops / made.outputs[0].elements - 2 * depth <= 2  # products and sums, and a bias
