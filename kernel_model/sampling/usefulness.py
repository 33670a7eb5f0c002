"""Which kernels are worth measuring: errors of predictors on unseen kernels, and an order by usefulness.

Training writes the errors of its cross-validation, one JSON document per target (see `Workspace.kernel_errors`), and the
sampler reads it. Kernels only of held-out families are in no training, so not in it; it names the held-out families, which seed
nothing.

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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hase.records.kernel_record import Kernel, Tensor
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target

AXES = 4  # of a tensor's shape, the last ones
SIZES = 3 * AXES + 4  # numbers in a position
FAR = 1.0  # distance of a kernel of an unmeasured kind: one doubling of one size
LEAST_WEIGHT = 0.05  # of a kernel near perfectly predicted ones; near the worst it is 1
NEAREST = 3  # number of measured kernels that tell how well the neighbourhood is predicted
BATCH = 0.1  # share of the kernels drawn so far to draw at once, regardless of each other
CHUNK = 4096  # rows of a matrix of distances
Floats = npt.NDArray[np.float64]
ERRORS_VERSION = 2
MOST_LOG_ERROR = 0.5  # that counts in seed_weights: 65 % too long, or 39 % too short
LONG = 0.95  # quantile at which times are capped: 0.3 ms on an H200
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


class KernelPoints:
    """Kernels as points: their kinds, and positions (kernels × sizes)."""

    def __init__(self, kinds: Sequence[str], positions: Floats) -> None:
        self.kinds = np.array(kinds, dtype=str)
        self.positions = positions

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> KernelPoints:
        """The points of some kernels, in their order."""
        return cls([kind_of(kernel) for kernel in kernels],
                   np.array([coordinates(kernel) for kernel in kernels], dtype=float).reshape(len(kernels), SIZES))

    def __len__(self) -> int:
        return len(self.kinds)

    def only(self, indices: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> KernelPoints:
        """Some of the points."""
        return KernelPoints(self.kinds[indices], self.positions[indices])  # type: ignore[arg-type]


def order_by_usefulness(candidates: KernelPoints, measured: KernelPoints, count: int, generator: np.random.Generator,
                        weights: Floats | None = None) -> npt.NDArray[np.int64]:
    """The indices of the `count` most useful candidates (or of all), best first. `weights` are the candidates' (see
    `neighbour_weights`), by default equal. For a generator with the same seed, the first indices do not depend on `count`."""
    weights = np.ones(len(candidates)) if weights is None else weights
    ranked: list[tuple[bool, float, int]] = []
    seed = int(generator.integers(2**32))
    wanted = _wanted_by_kind(candidates, measured, count, weights)
    for kind, (rank, share, wanted_here) in wanted.items():
        measured_positions = measured.positions[measured.kinds == kind]
        members = np.flatnonzero(candidates.kinds == kind)
        drawn = draw_apart(candidates.positions[members], measured_positions, weights[members], wanted_here,
                           np.random.default_rng([seed, zlib.crc32(kind.encode())]))
        ranked += [(rank + turn > 0, (rank + turn + 0.5) / share, int(members[index])) for turn, index in enumerate(drawn)]
    return np.array([index for _, _, index in sorted(ranked)], dtype=np.int64)


def _wanted_by_kind(candidates: KernelPoints, measured: KernelPoints, count: int,
                    weights: Floats) -> dict[str, tuple[int, float, int]]:
    """By kind: the number of measured kernels, its share, and the number of wanted candidates. A kind's share is the weight of
    its candidates. A kind with many measured kernels for its share waits."""
    ranked, counts = [], dict(zip(*np.unique(measured.kinds, return_counts=True), strict=True))
    kinds, kind_index = np.unique(candidates.kinds, return_inverse=True)
    shares, sizes = np.bincount(kind_index, weights), np.bincount(kind_index)
    for index, kind in enumerate(kinds.tolist()):
        if shares[index] > 0:
            rank = int(counts.get(kind, 0))
            ranked += [(rank + turn > 0, (rank + turn + 0.5) / shares[index], kind) for turn in range(sizes[index])]
    wanted: dict[str, int] = {}
    for _, _, kind in sorted(ranked)[:count]:
        wanted[kind] = wanted.get(kind, 0) + 1
    return {kind: (int(counts.get(kind, 0)), float(share), wanted[kind])
            for kind, share in zip(kinds.tolist(), shares, strict=True) if kind in wanted}


def draw_apart(points: Floats, measured: Floats, weights: Floats, count: int, generator: np.random.Generator) -> list[int]:
    """The indices of `count` points, drawn one after another by weight × √(distance to the nearest `measured` or drawn point).

    k-means++ (Arthur and Vassilvitskii, 2007) seeds like this, but with squared distances, and so prefers outliers. For 200
    kernels of the H200's dataset, distances themselves gave a larger error than their roots.
    """
    distances = nearest_distances(points, measured) if len(measured) else np.full(len(points), np.inf)
    drawn: list[int] = []
    left = weights > 0
    while len(drawn) < count and left.any():
        chances = np.where(left, weights * np.sqrt(np.where(np.isinf(distances), FAR, distances)), 0.0)
        if not chances.any():  # the rest are as those that are known
            chances = np.where(left, weights, 0.0)
        batch = min(max(1, int(BATCH * len(drawn))), int((chances > 0).sum()))
        indices = generator.choice(len(points), size=batch, replace=False, p=chances / chances.sum())
        drawn += indices.tolist()
        left[indices] = False
        distances = np.minimum(distances, nearest_distances(points, points[indices]))
    return drawn[:count]


def nearest_distances(points: Floats, others: Floats) -> Floats:
    """The distance of each point to the nearest of `others`."""
    return np.concatenate([np.zeros(0), *(_distances(points[begin:begin + CHUNK], others).min(axis=1)
                                          for begin in range(0, len(points), CHUNK))])


def _distances(points: Floats, others: Floats) -> Floats:
    squares = (points**2).sum(axis=1)[:, None] - 2.0 * points @ others.T + (others**2).sum(axis=1)[None, :]
    return np.sqrt(np.maximum(squares, 0.0))


def neighbour_weights(candidates: KernelPoints, measured: KernelPoints, log_errors: Floats) -> Floats:
    """A weight per candidate, LEAST_WEIGHT to 1, from the prediction errors of the nearest measured kernels of its kind."""
    size = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) / MOST_LOG_ERROR
    weights = np.ones(len(candidates))
    for kind in np.unique(candidates.kinds):
        members, known = np.flatnonzero(candidates.kinds == kind), measured.kinds == kind
        if not known.any():
            continue
        near = min(NEAREST, int(known.sum()))
        for begin in range(0, len(members), CHUNK):
            rows = members[begin:begin + CHUNK]
            distances = _distances(candidates.positions[rows], measured.positions[known])
            nearest = np.argpartition(distances, near - 1, axis=1)[:, :near]
            weights[rows] = size[known][nearest].mean(axis=1)
    return np.maximum(weights, LEAST_WEIGHT)


def useful_kernels(candidates: Sequence[Kernel], measured: Sequence[Kernel], count: int, generator: np.random.Generator,
                   errors: Sequence[KernelError] = ()) -> list[Kernel]:
    """The `count` most useful candidates, best first. `errors` are those of a training; empty before the first one."""
    points, weights = KernelPoints.of(candidates), None
    if errors:
        weights = neighbour_weights(points, KernelPoints.of([error.kernel for error in errors]),
                                np.array([error.log_error for error in errors]))
    return [candidates[index] for index in order_by_usefulness(points, KernelPoints.of(measured), count, generator, weights)]


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
    """Writes errors to a file without default values, which halves its size."""
    document = errors.model_dump(mode="json", exclude_defaults=True) | {"version": errors.version}
    files.write_text(path, json.dumps(files.with_digest(document), separators=(",", ":")) + "\n")


def read_errors(path: Path) -> KernelErrors:
    """The errors in a file; a `UserError` if it is missing, damaged or of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a training writes it: {REMAKE}")
    return files.read_record(path, KernelErrors, ERRORS_VERSION, REMAKE)


def seed_weights(errors: Sequence[KernelError]) -> npt.NDArray[np.float64]:
    """How often each kernel seeds another one, as shares of 1; all zero without errors.

    A weight is the squared log error times the measured time, both limited, so that neither outliers nor a few giants dominate.
    For 3,000 kernels picked from the rest of the H200's dataset, this reduced the plain error of kernels, and the time-weighted
    one of those of models, as much as the best of ten weights, and more than chance.
    """
    if not errors:
        return np.zeros(0)
    times = np.array([error.measured_ms for error in errors])
    log_errors = np.array([error.log_error for error in errors])
    weights = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) ** 2 * np.minimum(times, np.quantile(times, LONG))
    return weights / total if (total := weights.sum()) else weights
