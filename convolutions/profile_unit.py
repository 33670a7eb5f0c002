"""One profile: a model under an algorithm at one input size, and how it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from utils.errors import UserError
from utils.frozen import Frozen

VERSION = 1
REMAKE = "python convolutions/run_profile.py"
DEFAULT_SMALLEST, DEFAULT_LARGEST = 224, 1016  # 100 sizes in steps of 8


class ProfileSettings(Frozen):
    """What one folder of results holds: `profile.json`. A run that resumes must ask for the same, but for the sizes.

    Attributes:
        model: a torchvision model.
        algorithm: its name with blanks.
        gpu: a short name of the device: `h200`, `cpu`.
        device: `cuda` or `cpu`.
        device_name: in full.
        batch, dtype: of the input; `fp32` or `fp16`.
        tf32: whether single precision may be computed in TF32 (GPUs since Ampere).
        fallback: whether layers that the algorithm can't run use the library's choice.
        input_sizes: heights (and widths) of the input, in pixels.
        warmup, measure: runs before and in each measurement.
    """

    version: int = VERSION
    model: str
    algorithm: str
    gpu: str
    device: str
    device_name: str
    batch: int = 1
    dtype: str = "fp32"
    tf32: bool = True
    fallback: bool = False
    input_sizes: tuple[int, ...]
    warmup: int = 10
    measure: int = 30

    @property
    def name(self) -> str:
        """`<model>_<algorithm>`, with underscores: how the names of the tables begin."""
        return f"{self.model}_{self.algorithm.replace(' ', '_')}"

    @property
    def units(self) -> list[ProfileUnit]:
        """What is to be measured, the smallest input first."""
        return [ProfileUnit(self, size) for size in self.input_sizes]

    def same_but_sizes(self, other: ProfileSettings) -> bool:
        """Whether the measurements of `other` can go on with these settings."""
        free = {"input_sizes": (), "warmup": 0, "measure": 0, "device_name": ""}
        return self.model_copy(update=free) == other.model_copy(update=free)


@dataclass(frozen=True)
class ProfileUnit:
    """A model under an algorithm at one input size."""

    settings: ProfileSettings
    input_size: int

    @property
    def id(self) -> str:
        return f"{self.settings.name}_b{self.settings.batch}_{self.settings.dtype}_{self.input_size}"

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.settings.model} at {self.input_size}x{self.input_size}, batch {self.settings.batch}"


def even_sizes(count: int, smallest: int, largest: int) -> tuple[int, ...]:
    """`count` even numbers between two input sizes, evenly spaced; fewer where there are not so many.

    Raises:
        UserError: the smallest is larger than the largest, or they leave no even number.
    """
    if smallest > largest:
        raise UserError(f"--min-size {smallest} is larger than --max-size {largest}")
    low, high = (smallest + 1) // 2, largest // 2
    if low > high:
        raise UserError(f"there is no even input size between {smallest} and {largest}")
    steps = max(count - 1, 1)
    return tuple(sorted({2 * (low + round(place * (high - low) / steps)) for place in range(count)}))
