"""A lower bound of a kernel's time, from its operations and its bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from utils.config import Config

Floats = npt.NDArray[np.float64]


class Roofline(Config):
    """The rates of a device, which bound the time of a kernel by arithmetic or by memory, and a floor for every kernel.

    Attributes:
        flops_per_ms, bytes_per_ms: the rates that efficient kernels reach.
        floor_ms: the time of a kernel that does nothing.
        scale: the median ratio of measured time to the bound. A kernel of unknown type is estimated as scale times its bound.
        table_ms: the time to copy one of the tables that some kernels copy to a GPU (feature `tables`).
    """

    flops_per_ms: float
    bytes_per_ms: float
    floor_ms: float
    scale: float
    table_ms: float = 0.0

    def bound_ms(self, flops: Floats, bytes_moved: Floats, tables: Floats | float = 0.0) -> Floats:
        """The lower bound (ms) of each kernel's time."""
        return (np.maximum(flops / self.flops_per_ms, bytes_moved / self.bytes_per_ms) + self.floor_ms
                + self.table_ms * tables)


def fit_roofline(flops: Floats, bytes_moved: Floats, times_ms: Floats, tables: Floats | None = None) -> Roofline:
    """The roofline of measured idle kernels: the rates that 2 % of them exceed, and as the floor the time that 2 % stay below.
    With `tables`, the copy of a table takes the time of the floor too."""
    rates = flops / times_ms, bytes_moved / times_ms
    flops_per_ms, bytes_per_ms = (float(np.percentile(rate[rate > 0], 98)) if (rate > 0).any() else 1.0 for rate in rates)
    floor_ms = float(np.percentile(times_ms, 2))
    bare = Roofline(flops_per_ms=flops_per_ms, bytes_per_ms=bytes_per_ms, floor_ms=floor_ms, scale=1.0,
                    table_ms=0.0 if tables is None else floor_ms)
    bound_ms = bare.bound_ms(flops, bytes_moved, 0.0 if tables is None else tables)
    return bare.model_copy(update={"scale": float(np.median(times_ms / bound_ms))})
