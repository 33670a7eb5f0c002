"""Kernels that the CPU provider runs in CUDA sessions: drawn, built and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import run_script
from drawn_kernels import small_draws

from hase.kernel_model.building.kernel_models import check_kernel, write_kernel
from hase.kernel_model.sampling.draws import on_cuda
from hase.kernel_model.sampling.free_shapes import on_host
from hase.kernel_model.sampling.free_shapes.table import HOST, Draw
from hase.ort_analysis.graph.source import built_kernel

ON_EITHER = (on_host.moved_channels, on_host.on_shapes, on_host.newer_version)  # CUDA has them, but may leave them to the CPU


@pytest.mark.parametrize("draw", [draw for draw, _ in HOST])
def test_draws_run_on_the_cpu_and_put_out_what_they_describe(draw: Draw, tmp_path: Path) -> None:
    for drawn in small_draws(draw, 5):
        path = write_kernel(drawn, tmp_path)
        assert built_kernel(path) == drawn
        check_kernel(path, drawn, "cpu")
        assert draw in ON_EITHER or not on_cuda(drawn)


def test_quantised_kernels_compute_in_whole_numbers_and_cost_what_floating_ones_do() -> None:
    generator = np.random.default_rng(5)
    drawn = [on_host.quantised_convolution("float32", 2, generator) for _ in range(40)]
    assert {kernel.op_type for kernel in drawn} == {"QLinearConv", "ConvInteger"}
    for kernel in drawn:
        image, weights = kernel.inputs[0], kernel.inputs[3 if kernel.op_type == "QLinearConv" else 1]
        each = kernel.flops / kernel.outputs[0].elements
        assert kernel.dtype == image.dtype in ("uint8", "int8")
        assert 0 <= each - 2 * np.prod(weights.shape[1:]) <= 2  # a multiplication and an addition for each weight, and a bias
    products = [on_host.quantised_product("float32", 2, generator) for _ in range(20)]
    assert {kernel.op_type for kernel in products} == {"QLinearMatMul", "QGemm"}
    for kernel in products:
        depth = kernel.inputs[0].shape[-1]
        assert kernel.dtype == kernel.inputs[0].dtype
        assert 0 <= kernel.flops / kernel.outputs[0].elements - 2 * depth <= 1


def test_the_sampler_draws_them_for_a_cpu(tmp_path: Path) -> None:
    done = run_script("kernel_model/kernel_sampler.py", "--workspace", str(tmp_path), "--count", "0", "--free", "12",
                      "--free-kind", "host", "--most-gflop", "0.01", "--most-mib", "4")
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "kernel_model" / "kernel_onnx").glob("cpu-*")
    assert len(list(folder.glob("*.onnx"))) == 12
