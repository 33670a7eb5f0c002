"""The order in which kernels are measured when there is no time for all."""

from __future__ import annotations

import numpy as np
import pytest

from hase.kernel_model.sampling.usefulness import (
    LEAST_WEIGHT,
    KernelPoints,
    coordinates,
    nearest_distances,
    neighbour_weights,
    order_by_usefulness,
    useful_kernels,
)
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel


def unary(op_type: str, *shape: int, dtype: str = "float32") -> Kernel:
    return describe_kernel(op_type, "", 20, {}, [KernelInput(dtype=dtype, shape=shape)], [Tensor(dtype=dtype, shape=shape)])


def line(kind: str, *values: float) -> KernelPoints:
    """Points of one kind on a line."""
    return KernelPoints([kind] * len(values), np.array(values, dtype=float).reshape(-1, 1))


def joined(*parts: KernelPoints) -> KernelPoints:
    return KernelPoints([kind for part in parts for kind in part.kinds], np.concatenate([part.positions for part in parts]))


NOTHING = KernelPoints([], np.zeros((0, 1)))


def generator() -> np.random.Generator:
    return np.random.default_rng(3)


def test_a_doubled_size_is_a_distance_of_one() -> None:
    small, large = (np.array(coordinates(unary("Relu", 1, 64, 8, side))) for side in (7, 15))
    assert sorted((large - small)[large != small].round(2)) == [1.0, 1.0, 1.1, 1.1]  # the axis in and out, operations, bytes


def test_kinds_that_were_never_measured_come_first() -> None:
    candidates = joined(line("Conv", *range(50)), line("Gemm", 1.0, 2.0), line("Pow", 5.0))
    order = order_by_usefulness(candidates, line("Conv", 3.5, 7.5), 20, generator())
    assert {str(candidates.kinds[place]) for place in order[:2]} == {"Gemm", "Pow"}
    assert all(candidates.kinds[place] == "Conv" for place in order[2:10]), "then each kind in proportion"


def test_every_candidate_comes_once_and_the_order_is_the_same_each_time() -> None:
    candidates = joined(line("Conv", *range(30)), line("Gemm", *range(10)))
    order = order_by_usefulness(candidates, NOTHING, 100, generator())
    assert sorted(order) == list(range(40))
    np.testing.assert_array_equal(order, order_by_usefulness(candidates, NOTHING, 100, generator()))
    np.testing.assert_array_equal(order[:12], order_by_usefulness(candidates, NOTHING, 12, generator())[:12])


def test_a_kernel_like_a_measured_one_comes_last() -> None:
    candidates, measured = line("Conv", 1.0, 1.0, 9.0, 17.0), line("Conv", 1.0)
    assert set(order_by_usefulness(candidates, measured, 2, generator())) == {2, 3}
    assert set(order_by_usefulness(candidates, measured, 4, generator())) == {0, 1, 2, 3}


def test_kernels_near_badly_predicted_ones_weigh_more() -> None:
    measured = joined(line("Conv", 0.0, 0.1, 0.2, 10.0, 10.1, 10.2), line("Gemm", 0.0))
    errors = np.log([1.0, 1.0, 1.0, 3.0, 1 / 3.0, 3.0, 1.25])
    candidates = joined(line("Conv", 0.1, 10.1), line("Gemm", 5.0), line("Pow", 0.0))
    weights = neighbour_weights(candidates, measured, errors)
    assert weights.tolist() == pytest.approx([LEAST_WEIGHT, 1.0, np.log(1.25) / 0.5, 1.0])
    order = [order_by_usefulness(candidates.only(np.array([0, 1])), measured, 1, np.random.default_rng(seed),
                                 weights[:2])[0] for seed in range(100)]
    assert np.mean(order) > 0.85
    assert order_by_usefulness(candidates, NOTHING, 4, generator(), np.array([0.0, 1.0, 0.0, 0.0])).tolist() == [1]


def test_distances_in_pieces_equal_those_at_once() -> None:
    points, measured = np.random.default_rng(0).normal(size=(9000, 3)), np.random.default_rng(1).normal(size=(7, 3))
    expected = np.linalg.norm(points[:, None] - measured[None], axis=2).min(axis=1)
    np.testing.assert_allclose(nearest_distances(points, measured), expected, atol=1e-7)


def test_kernels_are_ordered_by_their_shapes() -> None:
    measured = [unary("Relu", 1, 64, 56, 56)]
    candidates = [unary("Relu", 1, 64, 56, 56), unary("Relu", 1, 64, 57, 57), unary("Sigmoid", 1, 8),
                  unary("Relu", 16, 512, 7, 7)]
    assert useful_kernels(candidates, measured, 2, generator())[0] == candidates[2]
    assert useful_kernels(candidates, measured, 4, generator())[-1] == candidates[0]
