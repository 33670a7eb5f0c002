"""Cliffs between neighbours, and kernels between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import run_script
from made_up_dataset import conv, gemm

from hase.kernel_model.building.kernel_models import check_kernel, write_kernel
from hase.kernel_model.kernel_sampler import sample_between_cliffs
from hase.kernel_model.sampling.cliffs import (
    Cliff,
    NothingBetween,
    TimedKernel,
    between,
    draw_weights,
    find_cliffs,
    timed_kernels,
)
from hase.kernel_model.sampling.free_shapes.sizes import inferred, kernel, numbers, tensor
from hase.records.kernel_record import Kernel
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"


def signal(channels: int, width: int, length: int = 256) -> Kernel:
    """A depthwise convolution of a signal."""
    return inferred("Conv", [tensor("float32", 1, channels, length), tensor("float32", channels, 1, width, constant=True)],
                    kernel_shape=[width], strides=[1], pads=[width // 2] * 2, dilations=[1], group=channels)


def recurrent(hidden: int) -> Kernel:
    weights = [tensor("float32", 1, 4 * hidden, 8, constant=True), tensor("float32", 1, 4 * hidden, hidden, constant=True)]
    return inferred("LSTM", [tensor("float32", 5, 2, 8), *weights], hidden_size=hidden, layout=0)


def test_cliffs_are_found_between_neighbours() -> None:
    """From a width of 31 on, a made-up library takes 50 times as long. One of images is no neighbour of a signal's."""
    timed = [TimedKernel(signal(64, width), 0.05 * (50 if width >= 31 else 1)) for width in range(3, 60, 4)]
    first, *others = find_cliffs([*timed, TimedKernel(conv(), 90.0)])
    assert (first.faster.kernel, first.slower.kernel) == (signal(64, 27), signal(64, 31))
    assert first.height == pytest.approx(50 / (31 / 27), rel=0.05)
    taken = [entry.kernel.id for cliff in (first, *others) for entry in (cliff.slower, cliff.faster)]
    assert len(taken) == len(set(taken))
    assert conv().id not in taken
    assert not find_cliffs([TimedKernel(entry.kernel, 0.01) for entry in timed])


@pytest.mark.parametrize(("one", "two"), [
    (signal(64, 3), signal(256, 63)), (conv(channels=16, out=16), conv(channels=96, out=32, group=2)), (gemm(), gemm(rows=512)),
    (recurrent(24), recurrent(100)),
    *[tuple(inferred("MaxPool", [tensor("float32", 1, channels, 40)], kernel_shape=[wide], strides=[1], pads=[0, 0],
                     dilations=[1]) for channels, wide in ((4, 3), (64, 30)))],
    (conv(channels=64, out=2, group=2), conv(channels=256, out=2, group=2)),
    (conv(channels=64, out=64, group=64), conv(channels=64, out=256, group=64)),
    *[tuple(kernel("Pad", [tensor("float32", 6, size), numbers(0, wide, 0, wide)], [(6, size + 2 * wide)], mode="constant")
            for size, wide in ((8, 1), (64, 9)))]])
def test_a_kernel_between_two_runs(one: Kernel, two: Kernel, tmp_path: Path) -> None:
    for share in (0.3, 0.5, 0.7):
        middle = between(one, two, share)
        check_kernel(write_kernel(middle, tmp_path), middle, "cpu")
        assert all(min(ends) <= size <= max(ends) for *tensors, made in zip(one.inputs, two.inputs, middle.inputs, strict=True)
                   for *ends, size in zip(*(tensor.shape for tensor in (*tensors, made)), strict=True))


def test_where_no_kernel_lies_between_the_edge_is_known() -> None:
    with pytest.raises(NothingBetween, match="no kernel lies between them"):
        between(signal(64, 30), signal(64, 31))
    axes = [kernel("Pad", [tensor("float32", 6, 8), numbers(0, before, 0, 0)], [(6, 8 + before)], mode="constant")
            for before in (-1, 3)]
    with pytest.raises(UserError, match="nothing between them"):
        between(axes[0], axes[1])


def test_higher_and_slower_cliffs_are_drawn_more_often() -> None:
    one, two = TimedKernel(signal(64, 3), 0.1), TimedKernel(signal(64, 31), 9.0)
    weights = draw_weights([Cliff(two, one, 90.0), Cliff(two._replace(time_ms=0.1), one, 90.0), Cliff(two, one, 3.0)])
    assert weights.sum() == pytest.approx(1)
    assert weights[0] > max(weights[1:])


def test_kernels_between_belong_to_the_families_of_both() -> None:
    one, two = TimedKernel(signal(64, 3), 0.1, ("anet",)), TimedKernel(signal(512, 63), 9.0, ("bnet",))
    drawn, _ = sample_between_cliffs([Cliff(two, one, 90.0)], 5, np.random.default_rng(0), most_gflop=1.0)
    assert len(drawn) == 5
    assert {families for _, families in drawn.values()} == {("anet", "bnet")}
    assert all(3 < made.attributes["kernel_shape"][0] < 63 for made, _ in drawn.values())
    held_out = Cliff(two._replace(families=("vgg",)), one, 90.0)
    of_held_out, _ = sample_between_cliffs([held_out], 5, np.random.default_rng(0), most_gflop=1.0, without=("vgg",))
    assert not of_held_out
    nothing, _ = sample_between_cliffs([], 5, np.random.default_rng(0), most_gflop=1.0)
    assert not nothing


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_draws_between_cliffs_of_a_dataset(h200_workspace: Workspace, tmp_path: Path) -> None:
    """From the shipped dataset, whose kernels were measured on an H200."""
    dataset = Workspace(tmp_path).dataset(TARGET)
    dataset.parent.mkdir(parents=True)
    dataset.symlink_to(h200_workspace.dataset(TARGET))
    done = run_script("kernel_model/kernel_sampler.py", "--workspace", tmp_path, "--cliffs", TARGET, "--count", "20", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["flavour"], row["sampled"]) == ("cuda-ort1.31-all", 20)
    cliffs = find_cliffs(timed_kernels(h200_workspace, TARGET))
    assert len(cliffs) > 500
    widest = next(cliff for cliff in cliffs if cliff.slower.kernel.op_type == "Conv")
    assert widest.height > 20
    assert widest.slower.cuda_kernels != widest.faster.cuda_kernels
