"""The sizes that a user gives to tensors whose sizes depend on data, by `--dim`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from shlex import quote

from runtimes.ort.graph.open_shapes import DETECTIONS, Shape
from utils.errors import UserError


class SizeNotKnown(UserError):
    """A shape depends on data, and ONNX sets it no bound.

    Attributes:
        tensor: the name under which its sizes can be given.
    """

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass
class GivenSizes:
    """The sizes that the user gives to tensors of one graph whose sizes depend on data.

    Attributes:
        dims: all given sizes, by name.
        prefix: of the names of a body's tensors.
        selects: the graph selects boxes; their number may set other sizes too.
        used: the names of the given sizes that were used.
    """

    dims: Mapping[str, int]
    prefix: str
    selects: bool
    used: set[str] = field(default_factory=set)

    def _take(self, *names: str) -> int | None:
        name = next((name for name in names if name in self.dims), None)
        self.used |= {name} if name else set()
        return self.dims[name] if name else None

    def shape(self, tensor: str, shape: Shape, boxes: bool) -> tuple[int, ...] | None:
        """A tensor's shape with the given sizes; None if a size is still open.

        Args:
            tensor: its name.
            shape: as far as it is known; if the rank is not known, the given sizes define it.
            boxes: the tensor's first axis is the boxes that a node selects.
        """
        if shape is None:
            rank = 0
            while any(f"{prefix}{tensor}.{rank}" in self.dims for prefix in (self.prefix, "")):
                rank += 1
            shape = ("",) * rank or None
        if shape is None:
            return None
        sizes: list[int | None] = []
        for axis, size in enumerate(shape):
            names = [f"{self.prefix}{tensor}.{axis}", f"{tensor}.{axis}"]
            if isinstance(size, int):
                self.used |= {name for name in names if self.dims.get(name) == size}
                sizes.append(size)
            else:
                sizes.append(self._take(*names, size, *([DETECTIONS] if boxes and axis == 0 else [])))
        return None if None in sizes else tuple(size for size in sizes if size is not None)

    def as_many_as_boxes(self, shape: Shape) -> tuple[int, ...] | None:
        """A shape in which every open size is the given number of boxes; None if none is given."""
        if shape is None or (number := self._take(DETECTIONS)) is None:
            return None
        return tuple(size if isinstance(size, int) else number for size in shape)

    def refusal(self, name: str, tensor: str, shape: Shape) -> SizeNotKnown:
        """The error for a shape that is not known; it says how to give the size.

        Args:
            name: of the model.
            tensor: its name.
            shape: as far as it is known.
        """
        whole = f"{self.prefix}{tensor}"
        if shape is None:
            return SizeNotKnown(
                f"{name}: the rank of tensor {whole} is not known; export the model with the shapes of its inputs, or give all "
                f"sizes of this tensor, for example, where it has two axes, {_options(whole, range(2))}", whole)
        sizes = ", ".join(str(size) or "?" for size in shape)
        options = _options(whole, [axis for axis, size in enumerate(shape) if not isinstance(size, int)])
        boxes = f", or --dim {DETECTIONS}=100 for all such sizes" if self.selects else ""
        return SizeNotKnown(f"{name}: the shape of tensor {whole} ([{sizes}]) depends on data or on an open dimension; give "
                            f"its size, for example {options}{boxes} (benchmark/sizes_of_a_run.py shows those of a run)", whole)


def _options(tensor: str, axes: Iterable[int]) -> str:
    """The options that give sizes of a tensor."""
    return " ".join(f"--dim {quote(f'{tensor}.{axis}=100')}" for axis in axes)
