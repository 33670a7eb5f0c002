"""Chooses the kernels that are most useful to measure, from what was measured and from the errors of predictions.

Training writes the errors of its cross-validation, one JSON document per target (see `Workspace.kernel_errors`), and the
sampler reads it. The document lacks the kernels that only held-out model families have, since these are in no training. It
names these families, and no kernel is sampled near theirs.

The order says what to measure first if there is no time for all kernels; a kernel is useful where predictors know little. First
comes one kernel of each kind (kernel type and element type) without measurements. Then each kind gets its share of the rest.
Within a kind, the probability of a kernel grows with its distance to the nearest one that was measured or drawn before: a new
size is likelier than another kernel of a known size. Kernels near those with bad predictions can get more weight.

docs/this_device.md compares this order with a random one.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hase.records.kernel_record import Kernel, Tensor
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.timing import Floats

AXES = 4  # number of axes of a tensor that count, the last ones
COORDINATES = 3 * AXES + 4
UNMEASURED_DISTANCE = 1.0  # distance of a kernel of an unmeasured kind: one doubling of one size
LEAST_WEIGHT = 0.05  # of a kernel near perfectly predicted ones; near the worst it is 1
NEIGHBOURS = 3  # number of measured kernels that tell how well the neighbourhood is predicted
BATCH_SHARE = 0.1  # share of the kernels drawn so far to draw at once, regardless of each other
CHUNK_ROWS = 4096  # rows of a matrix of distances
ERRORS_VERSION = 2
MOST_LOG_ERROR = 0.5  # that counts in seed_weights: 65 % too long, or 39 % too short
TIME_CAP_QUANTILE = 0.95  # quantile at which times are capped: 0.3 ms on an H200
REMAKE = "python training/train_kernel_model.py --force"


def kind_of(kernel: Kernel) -> str:
    """The kernel type and element type; kernels of one kind are compared by their sizes."""
    return f"{kernel.type} {kernel.dtype}"


def coordinates(kernel: Kernel) -> list[float]:
    """A kernel's position among those of its kind: logarithms to base 2 of its sizes. Distance 1 is one doubling."""
    present = [tensor for tensor in kernel.inputs if tensor.present]
    tensors = [*present[:2], *[None] * (2 - len(present)), kernel.outputs[0] if kernel.outputs else None]
    stride, group = math.prod(kernel.attributes.get("strides") or (0,)), int(kernel.attributes.get("group") or 0)
    sizes = [size for tensor in tensors for size in _last_axes(tensor)]
    return [math.log2(1 + size) for size in (*sizes, stride, group, kernel.flops, kernel.bytes_read + kernel.bytes_written)]


def _last_axes(tensor: Tensor | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)[-AXES:] if tensor else ()
    return (0,) * (AXES - len(shape)) + shape


class KernelPoints(NamedTuple):
    """Kernels as points: their kinds, and positions (kernels × coordinates)."""

    kinds: npt.NDArray[np.str_]
    positions: Floats

    @classmethod
    def from_kernels(cls, kernels: Sequence[Kernel]) -> KernelPoints:
        """The points of some kernels, in their order."""
        return cls(np.array([kind_of(kernel) for kernel in kernels], dtype=str),
                   np.array([coordinates(kernel) for kernel in kernels], dtype=float).reshape(len(kernels), COORDINATES))


def order_by_usefulness(candidates: KernelPoints, measured: KernelPoints, count: int, generator: np.random.Generator,
                        weights: Floats | None = None) -> npt.NDArray[np.int64]:
    """The indices of the `count` most useful candidates (or of all), best first. `weights` are the candidates' (see
    `neighbour_weights`), by default equal. For a generator with the same seed, the first indices do not depend on `count`."""
    weights = np.ones(len(candidates.kinds)) if weights is None else weights
    ranked: list[tuple[bool, float, int]] = []
    seed = int(generator.integers(2**32))
    for kind, (known, share, wanted) in _wanted_by_kind(candidates, measured, count, weights).items():
        members = np.flatnonzero(candidates.kinds == kind)
        drawn = draw_apart(candidates.positions[members], measured.positions[measured.kinds == kind], weights[members], wanted,
                           np.random.default_rng([seed, zlib.crc32(kind.encode())]))
        ranked += [(*_turn(known + turn, share), int(members[index])) for turn, index in enumerate(drawn)]
    return np.array([index for _, _, index in sorted(ranked)], dtype=np.int64)


def _turn(known: int, share: float) -> tuple[bool, float]:
    """When a kind with `known` kernels gets the next one: first if it has none, then later the more it has for its share."""
    return known > 0, (known + 0.5) / share


def _wanted_by_kind(candidates: KernelPoints, measured: KernelPoints, count: int,
                    weights: Floats) -> dict[str, tuple[int, float, int]]:
    """By kind: the number of measured kernels, its share, and the number of wanted candidates. A kind's share is the weight of
    its candidates. A kind with many measured kernels for its share waits."""
    known = Counter(measured.kinds.tolist())
    kinds, kind_index = np.unique(candidates.kinds, return_inverse=True)
    shares = dict(zip(kinds.tolist(), np.bincount(kind_index, weights).tolist(), strict=True))
    sizes = Counter(candidates.kinds.tolist())
    turns = sorted((*_turn(known[kind] + turn, share), kind) for kind, share in shares.items() if share > 0
                   for turn in range(sizes[kind]))
    wanted = Counter(kind for _, _, kind in turns[:count])
    return {kind: (known[kind], share, wanted[kind]) for kind, share in shares.items() if kind in wanted}


def draw_apart(points: Floats, measured: Floats, weights: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """The indices of `count` points, drawn one after another by weight × √(distance to the nearest `measured` or drawn point).
    k-means++ (Arthur and Vassilvitskii, 2007) seeds like this, but with squared distances, and so prefers outliers. For 200
    kernels of the H200's dataset, distances themselves gave a larger error than their roots."""
    distances = nearest_distances(points, measured) if len(measured) else np.full(len(points), np.inf)
    drawn: list[int] = []
    left = weights > 0
    while len(drawn) < count and left.any():
        chances = np.where(left, weights * np.sqrt(np.where(np.isinf(distances), UNMEASURED_DISTANCE, distances)), 0.0)
        if not chances.any():  # all that are left equal a known kernel
            chances = np.where(left, weights, 0.0)
        batch = min(max(1, int(BATCH_SHARE * len(drawn))), int((chances > 0).sum()))
        indices = generator.choice(len(points), size=batch, replace=False, p=chances / chances.sum())
        drawn += indices.tolist()
        left[indices] = False
        distances = np.minimum(distances, nearest_distances(points, points[indices]))
    return drawn[:count]


def nearest_distances(points: Floats, others: Floats) -> Floats:
    """The distance of each point to the nearest of `others`."""
    return np.concatenate([np.zeros(0), *(_distances(points[begin:begin + CHUNK_ROWS], others).min(axis=1)
                                          for begin in range(0, len(points), CHUNK_ROWS))])


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] - 2.0 * points @ others.T + (others**2).sum(axis=1)[None, :]
    return np.sqrt(np.maximum(squares, 0.0))


def neighbour_weights(candidates: KernelPoints, measured: KernelPoints, log_errors: Floats) -> Floats:
    """A weight per candidate, LEAST_WEIGHT to 1, from the prediction errors of the nearest measured kernels of its kind."""
    error_sizes = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) / MOST_LOG_ERROR  # 0 to 1
    weights = np.ones(len(candidates.kinds))
    for kind in set(candidates.kinds) & set(measured.kinds):
        members, known = np.flatnonzero(candidates.kinds == kind), measured.kinds == kind
        neighbours = min(NEIGHBOURS, int(known.sum()))
        for begin in range(0, len(members), CHUNK_ROWS):
            rows = members[begin:begin + CHUNK_ROWS]
            distances = _distances(candidates.positions[rows], measured.positions[known])
            nearest = np.argpartition(distances, neighbours - 1, axis=1)[:, :neighbours]
            weights[rows] = error_sizes[known][nearest].mean(axis=1)
    return np.maximum(weights, LEAST_WEIGHT)


def useful_kernels(candidates: Sequence[Kernel], measured: Sequence[Kernel], count: int, generator: np.random.Generator,
                   errors: Sequence[KernelError] = ()) -> list[Kernel]:
    """The `count` most useful candidates, best first. `errors` are those of a training; empty before the first one."""
    points, measured_points = KernelPoints.from_kernels(candidates), KernelPoints.from_kernels(measured)
    weights = neighbour_weights(points, KernelPoints.from_kernels([error.kernel for error in errors]),
                                np.array([error.log_error for error in errors])) if errors else None
    return [candidates[index] for index in order_by_usefulness(points, measured_points, count, generator, weights)]


class KernelError(Frozen):
    """A kernel's measured time, and its prediction by predictors that saw none of its rows."""

    kernel: Kernel  # whole, since no index holds those that were sampled
    # families of its models, or near whose kernels it was sampled, sorted; none for a kernel of no model
    families: tuple[str, ...]
    measured_ms: float  # idle; the median over the machines that measured it
    predicted_ms: float  # for the idle device

    @property
    def log_error(self) -> float:
        """The logarithm of predicted over measured."""
        return float(np.log(self.predicted_ms / self.measured_ms))


class KernelErrors(Frozen):
    """The errors of a target's kernels."""

    version: int = ERRORS_VERSION
    target: Target  # target of the predictors
    label: str  # the label whose times these are
    held_out: tuple[str, ...]  # model families that are in no fit
    dataset_sha256: str  # of the kernel table that they were cross-validated on
    kernels: tuple[KernelError, ...]  # every kernel with an idle time under the label, by id


def write_errors(path: Path, errors: KernelErrors) -> None:
    """Writes errors to a file. Omits default values, which halves its size."""
    document = errors.model_dump(mode="json", exclude_defaults=True) | {"version": errors.version}
    files.write_text(path, json.dumps(files.with_digest(document), separators=(",", ":")) + "\n")


def read_errors(path: Path) -> KernelErrors:
    """Reads the errors in a file; a `UserError` if it is missing, damaged or of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a training writes it: {REMAKE}")
    return files.read_record(path, KernelErrors, ERRORS_VERSION, REMAKE)


def seed_weights(errors: Sequence[KernelError]) -> npt.NDArray[np.float64]:
    """How often kernels are sampled near each of these, as shares of 1; all zero without errors. A weight is the squared log
    error times the measured time, both limited, so that neither outliers nor a few giants dominate. For 3,000 kernels picked
    from the rest of the H200's dataset, this reduced the plain error of kernels, and the time-weighted one of those of models,
    as much as the best of ten weights, and more than chance."""
    if not errors:
        return np.zeros(0)
    times = np.array([error.measured_ms for error in errors])
    log_errors = np.array([error.log_error for error in errors])
    weights = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) ** 2 * np.minimum(times, np.quantile(times, TIME_CAP_QUANTILE))
    return weights / total if (total := weights.sum()) else weights
