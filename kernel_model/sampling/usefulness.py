"""The order in which to measure kernels when there is no time for all of them: the most useful ones first.

A kernel is useful where predictors know little. So the first kernels are one of each kind (kernel type and element type) of
which nothing was measured. Then each kind gets its share of the rest. Within a kind, a kernel is drawn with a probability that
grows with its distance to the nearest one that was measured or drawn before: a new size is more likely than another kernel of a
known size. Kernels near those that are predicted badly can be given more weight.

training/learning_curve.py compares this order with a random one; docs/this_device.md has the figures.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hase.kernel_model.sampling.kernel_errors import MOST_LOG_ERROR, KernelError
from hase.records.kernel_record import Kernel, Tensor

AXES = 4  # of a tensor's shape, the last ones
SIZES = 3 * AXES + 4  # numbers in a position
FAR = 1.0  # the distance of a kernel of whose kind nothing was measured: one doubling of one size
LEAST_WEIGHT = 0.05  # of a kernel near those that are predicted perfectly, where 1 is the weight of the worst
NEAREST = 3  # measured kernels that say how well the neighbourhood is predicted
BATCH = 0.1  # share of the kernels drawn so far that are drawn at once, without a look at each other
CHUNK = 4096  # rows of a matrix of distances
Floats = npt.NDArray[np.float64]


def kind_of(kernel: Kernel) -> str:
    """Kernels of one kind are compared by their sizes: the kernel type and the element type."""
    return f"{kernel.type} {kernel.dtype}"


def position(kernel: Kernel) -> list[float]:
    """Where a kernel lies among those of its kind: logarithms to base 2 of its sizes. A distance of 1 is one doubling."""
    present = [tensor for tensor in kernel.inputs if tensor.present]
    tensors = [*present[:2], *[None] * (2 - len(present)), kernel.outputs[0] if kernel.outputs else None]
    stride, group = math.prod(kernel.attributes.get("strides") or (0,)), int(kernel.attributes.get("group") or 0)
    sizes = [size for tensor in tensors for size in _last_axes(tensor)]
    return [math.log2(1 + size) for size in (*sizes, stride, group, kernel.flops, kernel.bytes_read + kernel.bytes_written)]


def _last_axes(tensor: Tensor | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)[-AXES:] if tensor else ()
    return (0,) * (AXES - len(shape)) + shape


class Points:
    """Kernels as points.

    Attributes:
        kinds: of each kernel.
        positions: kernels × sizes.
    """

    def __init__(self, kinds: Sequence[str], positions: Floats) -> None:
        self.kinds = np.array(kinds, dtype=str)
        self.positions = positions

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> Points:
        """The points of some kernels, in their order."""
        return cls([kind_of(kernel) for kernel in kernels],
                   np.array([position(kernel) for kernel in kernels], dtype=float).reshape(len(kernels), SIZES))

    def __len__(self) -> int:
        return len(self.kinds)

    def only(self, places: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Points:
        """Some of the points."""
        return Points(self.kinds[places], self.positions[places])  # type: ignore[arg-type]


def order_by_usefulness(candidates: Points, measured: Points, count: int, generator: np.random.Generator,
                        weights: Floats | None = None) -> npt.NDArray[np.int64]:
    """The places of `count` candidates (or of all, if there are fewer), the most useful one first.

    With a generator of the same seed, the first places do not depend on `count`.

    Args:
        candidates: that could be measured; none of them was.
        measured: kernels that were measured.
        count: how many are wanted.
        generator: of the random numbers.
        weights: of the candidates (see `error_weights`); by default all alike.
    """
    weights = np.ones(len(candidates)) if weights is None else weights
    ranked: list[tuple[bool, float, int]] = []
    seed = int(generator.integers(2**32))
    wanted = _places_by_kind(candidates, measured, count, weights)
    for kind, (rank, share, places) in wanted.items():
        measured_positions = measured.positions[measured.kinds == kind]
        of_kind = np.flatnonzero(candidates.kinds == kind)
        drawn = draw_apart(candidates.positions[of_kind], measured_positions, weights[of_kind], places,
                           np.random.default_rng([seed, zlib.crc32(kind.encode())]))
        ranked += [(rank + turn > 0, (rank + turn + 0.5) / share, int(of_kind[place])) for turn, place in enumerate(drawn)]
    return np.array([place for _, _, place in sorted(ranked)], dtype=np.int64)


def _places_by_kind(candidates: Points, measured: Points, count: int, weights: Floats) -> dict[str, tuple[int, float, int]]:
    """For each kind: how many kernels of it were measured, its share, and how many of its candidates are wanted.

    The share of a kind is the weight of its candidates. A kind that has many measured kernels for its share waits.
    """
    ranked, counts = [], dict(zip(*np.unique(measured.kinds, return_counts=True), strict=True))
    kinds, of_kind = np.unique(candidates.kinds, return_inverse=True)
    shares, sizes = np.bincount(of_kind, weights), np.bincount(of_kind)
    for place, kind in enumerate(kinds.tolist()):
        if shares[place] > 0:
            rank = int(counts.get(kind, 0))
            ranked += [(rank + turn > 0, (rank + turn + 0.5) / shares[place], kind) for turn in range(sizes[place])]
    wanted: dict[str, int] = {}
    for _, _, kind in sorted(ranked)[:count]:
        wanted[kind] = wanted.get(kind, 0) + 1
    return {kind: (int(counts.get(kind, 0)), float(share), wanted[kind])
            for kind, share in zip(kinds.tolist(), shares, strict=True) if kind in wanted}


def draw_apart(points: Floats, measured: Floats, weights: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """The places of `count` of the points, drawn one after another: the probability is a point's weight times the square root
    of its distance to the nearest of the `measured` points and those drawn before.

    This is the seeding of k-means++ (Arthur and Vassilvitskii, 2007), which takes squares of distances and so prefers outliers.
    Of 200 kernels of the H200's dataset, distances themselves gave a larger error than their roots.
    """
    distances = nearest_distances(points, measured) if len(measured) else np.full(len(points), np.inf)
    drawn: list[int] = []
    left = weights > 0
    while len(drawn) < count and left.any():
        chances = np.where(left, weights * np.sqrt(np.where(np.isinf(distances), FAR, distances)), 0.0)
        if not chances.any():  # the rest are as those that are known
            chances = np.where(left, weights, 0.0)
        batch = min(max(1, int(BATCH * len(drawn))), int((chances > 0).sum()))
        places = generator.choice(len(points), size=batch, replace=False, p=chances / chances.sum())
        drawn += places.tolist()
        left[places] = False
        distances = np.minimum(distances, nearest_distances(points, points[places]))
    return drawn[:count]


def nearest_distances(points: Floats, others: Floats) -> Floats:
    """The distance of each point to the nearest of `others`."""
    return np.concatenate([np.zeros(0), *(_distances(points[begin:begin + CHUNK], others).min(axis=1)
                                          for begin in range(0, len(points), CHUNK))])


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] - 2.0 * points @ others.T + (others**2).sum(axis=1)[None, :]
    return np.sqrt(np.maximum(squares, 0.0))


def error_weights(candidates: Points, measured: Points, log_errors: Floats) -> Floats:
    """A weight of each candidate between LEAST_WEIGHT and 1: how badly the nearest measured kernels of its kind are predicted.

    Args:
        candidates: that could be measured.
        measured: kernels that were measured.
        log_errors: logarithms of predicted over measured time, of each measured kernel, by predictors that did not see it.
    """
    size = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) / MOST_LOG_ERROR
    weights = np.ones(len(candidates))
    for kind in np.unique(candidates.kinds):
        of_kind, known = np.flatnonzero(candidates.kinds == kind), measured.kinds == kind
        if not known.any():
            continue
        near = min(NEAREST, int(known.sum()))
        for begin in range(0, len(of_kind), CHUNK):
            rows = of_kind[begin:begin + CHUNK]
            distances = _distances(candidates.positions[rows], measured.positions[known])
            nearest = np.argpartition(distances, near - 1, axis=1)[:, :near]
            weights[rows] = size[known][nearest].mean(axis=1)
    return np.maximum(weights, LEAST_WEIGHT)


def useful_kernels(candidates: Sequence[Kernel], measured: Sequence[Kernel], count: int, generator: np.random.Generator,
                   errors: Sequence[KernelError] = ()) -> list[Kernel]:
    """`count` of the candidates, the most useful one first.

    Args:
        candidates: that could be measured.
        measured: kernels that were measured.
        count: how many are wanted.
        generator: of the random numbers.
        errors: what a training wrote of the kernels that it held out; none before the first training.
    """
    points, weights = Points.of(candidates), None
    if errors:
        weights = error_weights(points, Points.of([error.kernel for error in errors]),
                                np.array([error.log_error for error in errors]))
    return [candidates[place] for place in order_by_usefulness(points, Points.of(measured), count, generator, weights)]
