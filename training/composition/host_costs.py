"""What copies between host and GPU cost a CUDA session, and what it costs the host to wait for the GPU: `host.json`.

`training/fit_host.py` writes it into the folder of a target's predictors. Targets without it have defaults, which were measured
once on an NVIDIA H200 (ONNX Runtime 1.31.1, Intel Xeon host). A copy to the host is part of the GPU's stream, writes to pinned
memory, and the host waits for it. A copy to the GPU reads pageable memory, which keeps the host busy. Besides, either costs as
much as a node with one launch.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import model_validator

from utils import files
from utils.frozen import Frozen

HOST_VERSION = 1
FILE = "host.json"
FIT = "python training/fit_host.py"


class CopyCurve(Frozen):
    """How long copies in one direction take, by their size.

    Attributes:
        bytes: sizes, ascending.
        ms: the time at each.
    """

    bytes: tuple[int, ...]
    ms: tuple[float, ...]

    @model_validator(mode="after")
    def _is_a_curve(self) -> CopyCurve:
        if len(self.bytes) != len(self.ms) or not self.bytes or min(self.bytes) < 1:
            raise ValueError("a curve needs a time for each of its sizes, which are positive")
        if any(one >= other for one, other in pairwise(self.bytes)) or any(one > other for one, other in pairwise(self.ms)):
            raise ValueError("sizes of a curve ascend, and times don't descend")
        return self

    def at(self, size: float) -> float:
        """The time of a copy of `size` bytes, ms: between two measured sizes on a straight line, below the smallest as at the
        smallest, beyond the largest in proportion to it."""
        if size > self.bytes[-1]:
            return self.ms[-1] * size / self.bytes[-1]
        return float(np.interp(size, self.bytes, self.ms))


class HostCosts(Frozen):
    """`host.json`.

    Attributes:
        to_host: the GPU's time for a copy to the host, the waiting for it included.
        to_gpu: the host's time for a copy to the GPU.
        wait_ms: the host's time at a node that waits for the GPU inside, besides its dispatch and the GPU's work.
        measured: whether they were measured on this target; else they are defaults.
    """

    version: int = HOST_VERSION
    to_host: CopyCurve
    to_gpu: CopyCurve
    wait_ms: float
    measured: bool = True


# 54 GB/s from 16 to 256 MiB to the host, 12.4 GB/s from 1 to 16 MiB to the GPU. A NonZero takes 30 µs, of which its dispatch
# with five launches takes 25.
DEFAULT_COSTS = HostCosts(to_host=CopyCurve(bytes=(54,), ms=(1e-6,)), to_gpu=CopyCurve(bytes=(124,), ms=(1e-5,)), wait_ms=0.005,
                          measured=False)


def read_host_costs(folder: Path) -> HostCosts:
    """The costs in the folder of a target's predictors; DEFAULT_COSTS where there are none.

    Raises:
        UserError: the file can't be read.
    """
    path = folder / FILE
    return files.read_record(path, HostCosts, HOST_VERSION, FIT) if path.is_file() else DEFAULT_COSTS
