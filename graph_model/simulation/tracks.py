"""A run on a GPU as it is simulated: what each node gives the GPU to do, and what it means to the host that dispatches it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ort_analysis.records.kernel_costs import calls_library
from ort_analysis.records.kernel_record import Kernel

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int_]  # the NodeKind of each node


class NodeKind(IntEnum):
    """What a node means to the host that dispatches it: it only renames a tensor, it moves data by a kernel of ONNX Runtime's
    own, or by one that cuDNN or cuBLAS is called for."""

    VIEW = 0
    OWN = 1
    LIBRARY = 2


def node_kind(kernel: Kernel, on_gpu: bool = True) -> NodeKind:
    """The kind of a node; no node that the CPU provider runs calls a GPU's library."""
    if not kernel.moves_data:
        return NodeKind.VIEW
    return NodeKind.LIBRARY if on_gpu and calls_library(kernel) else NodeKind.OWN


class Tracks(NamedTuple):
    """The nodes of a run, in the order in which they run; one entry of each array per node.

    Attributes:
        gpu_ms: the GPU's own time.
        launches: how many launches the node makes; one without any leaves the GPU nothing to do.
        kinds: the `NodeKind`.
    """

    gpu_ms: Floats
    launches: Floats
    kinds: Kinds


class OffGpu(NamedTuple):
    """What the nodes of a run do besides giving the GPU work: those that the CPU provider runs, and copies.

    Attributes:
        host_ms: how long each keeps the host busy, beyond what its dispatch costs.
        waits: whether the host waits at a node until the GPU has done all that it was given; so does a copy to the host.
    """

    host_ms: Floats
    waits: npt.NDArray[np.bool_]
