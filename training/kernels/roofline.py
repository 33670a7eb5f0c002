"""What a kernel takes at least: by its operations and its bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from utils.config import Config

Floats = npt.NDArray[np.float64]


class Roofline(Config):
    """The time of a kernel bound by arithmetic or by memory, plus what every kernel costs.

    Attributes:
        flops_per_ms, bytes_per_ms: the rates that well-running kernels reach.
        floor_ms: the time of a kernel that does nothing.
        scale: median of measured time over the bound; what a kernel of unknown type is multiplied by.
        table_ms: the time of copying one of the tables that some kernels copy to a GPU (feature `tables`).
    """

    flops_per_ms: float
    bytes_per_ms: float
    floor_ms: float
    scale: float
    table_ms: float = 0.0

    def bound_ms(self, flops: Floats, bytes_moved: Floats, tables: Floats | float = 0.0) -> Floats:
        """The lower bound of each kernel's time, of its operations, bytes and tables."""
        return (np.maximum(flops / self.flops_per_ms, bytes_moved / self.bytes_per_ms) + self.floor_ms
                + self.table_ms * tables)


def fit_roofline(flops: Floats, bytes_moved: Floats, times_ms: Floats, tables: Floats | None = None) -> Roofline:
    """The roofline of measured idle kernels: rates that 2 % of them exceed, and the fastest 2 %'s time as the floor, which each
    of their `tables` takes too where these are copied."""
    rates = flops / times_ms, bytes_moved / times_ms
    flops_per_ms, bytes_per_ms = (float(np.percentile(rate[rate > 0], 98)) if (rate > 0).any() else 1.0 for rate in rates)
    floor_ms = float(np.percentile(times_ms, 2))
    bare = Roofline(flops_per_ms=flops_per_ms, bytes_per_ms=bytes_per_ms, floor_ms=floor_ms, scale=1.0,
                    table_ms=0.0 if tables is None else floor_ms)
    bound_ms = bare.bound_ms(flops, bytes_moved, 0.0 if tables is None else tables)
    return bare.model_copy(update={"scale": float(np.median(times_ms / bound_ms))})
