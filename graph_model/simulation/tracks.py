"""A run on a GPU as it is simulated: what each node gives the GPU to do, and what it means to the host that dispatches it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from records.kernel_record import Kernel
from records.operators import operator_row

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int_]  # the NodeKind of each node


class NodeKind(IntEnum):
    """What a node costs the host that dispatches it: it only renames a tensor (VIEW), it runs a kernel of ONNX Runtime's own
    (OWN), it calls a library: cuDNN for a convolution (CONVOLUTION) or for a recurrent layer (RECURRENT), cuBLAS for a matrix
    product (PRODUCT), or it reduces or normalises, with cuDNN or without (REDUCING)."""

    VIEW = 0
    OWN = 1
    CONVOLUTION = 2
    PRODUCT = 3
    RECURRENT = 4
    REDUCING = 5


def node_kind(kernel: Kernel, on_gpu: bool = True) -> NodeKind:
    """The kind of a node; no node that the CPU provider runs calls a GPU's library."""
    if not kernel.moves_data:
        return NodeKind.VIEW
    return NodeKind[operator_row(kernel.op_type).dispatch.upper()] if on_gpu else NodeKind.OWN


class Tracks(NamedTuple):
    """The nodes of a run, in the order in which they run; one entry of each array per node.

    Attributes:
        gpu_ms: the GPU's own time.
        launches: number of kernel launches; a node without any gives the GPU no work.
        kinds: the `NodeKind`.
    """

    gpu_ms: Floats
    launches: Floats
    kinds: Kinds


class OffGpu(NamedTuple):
    """What the nodes of a run do on the host apart from giving the GPU work; one entry of each array per node.

    Attributes:
        host_ms: how long a node keeps the host busy, in addition to its dispatch: a node of the CPU provider, or a copy.
        waits: whether the host waits at the node until the GPU has done all its work, as at a copy to the host.
    """

    host_ms: Floats
    waits: npt.NDArray[np.bool_]
