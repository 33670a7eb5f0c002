"""How a model is run."""

from __future__ import annotations

from typing import Literal

from hase.utils.frozen import Frozen

Io = Literal["device", "host"]


class RunMode(Frozen):
    """How a model is run.

    Attributes:
        io: `device`: tensors stay on the device (IOBinding); `host`: numpy arrays in and out.
        cuda_graph: captured once as a CUDA graph, and replayed.
    """

    io: Io = "device"
    cuda_graph: bool = False

    @property
    def label(self) -> str:
        """The label of whole models that were measured in this mode, in the dataset."""
        return "cuda_graph" if self.cuda_graph else "host_io" if self.io == "host" else "latency"

    @property
    def description(self) -> str:
        return "as a CUDA graph" if self.cuda_graph else "with tensors on the " + self.io


AS_USUAL = RunMode()
