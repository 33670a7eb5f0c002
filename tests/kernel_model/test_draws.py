"""Shapes drawn near a kernel's: operators with related sizes get related sizes, and run."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import free_kernel

from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import build_model
from hase.kernel_model.sampling.draws import draw_kernel
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel
from hase.utils.errors import UserError
from hase.utils.ort_sessions import open_session

MOST_WORK = 2e8  # operations and bytes of a kernel that is run here, so that the tests stay short


@pytest.mark.parametrize("op_type", ["LSTM", "GRU", "ConvTranspose", "InstanceNormalization", "BatchNormalization", "Expand",
                                     "Einsum", "DepthToSpace", "SpaceToDepth", "Resize"])
def test_kernels_with_related_sizes_are_drawn_near_and_run(op_type: str) -> None:
    seed, generator = free_kernel(op_type, "float32"), np.random.default_rng(2)
    drawn = [draw_kernel(seed, 4, generator, 0.5) for _ in range(20)]
    assert len({kernel.id for kernel in drawn}) > 5
    assert all(kernel.type == seed.type for kernel in drawn)
    for kernel in drawn:
        if kernel.flops + kernel.bytes_read < MOST_WORK:
            runs_as_described(kernel)


def runs_as_described(kernel: Kernel) -> None:
    session = open_session(build_model(kernel).SerializeToString(), "cpu", optimize="none")
    assert [value.shape for value in session.run(None, dummy_inputs(kernel))] == [output.shape for output in kernel.outputs]


def of_ints(*values: int) -> KernelInput:
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def test_regions_name_existing_images_and_columns_keep_their_blocks() -> None:
    generator = np.random.default_rng(2)
    image, regions = KernelInput(dtype="float32", shape=(1, 16, 20, 20)), KernelInput(dtype="float32", shape=(10, 4))
    align = describe_kernel("RoiAlign", "", 16, {"output_height": 7, "output_width": 7}, [
        image, regions, KernelInput(dtype="int64", shape=(10,))], [Tensor(dtype="float32", shape=(10, 16, 7, 7))])
    columns = describe_kernel("Col2Im", "", 18, {}, [KernelInput(dtype="float32", shape=(2, 32, 100)), of_ints(20, 20),
                                                     of_ints(2, 2)], [Tensor(dtype="float32", shape=(2, 8, 20, 20))])
    columns = columns.model_copy(update={"attributes": {"strides": [2, 2]}})
    for seed in (align, columns):
        for _ in range(5):
            runs_as_described(draw_kernel(seed, 3, generator))


def test_a_gather_outside_its_axis_is_refused() -> None:
    seed = describe_kernel("Gather", "", 20, {"axis": 0}, [KernelInput(dtype="float32", shape=(30, 8)), of_ints(29)],
                           [Tensor(dtype="float32", shape=(1, 8))])
    generator = np.random.default_rng(0)
    shrunk = seed.model_copy(update={"inputs": (seed.inputs[0].model_copy(update={"shape": (20, 8)}), seed.inputs[1])})
    with pytest.raises(UserError, match="holds an index outside of its axis"):
        draw_kernel(shrunk, 4, generator, spread=0.1)
    assert draw_kernel(seed, 4, generator, spread=0.0).inputs[0].shape == (30, 8)
