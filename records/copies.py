"""What copies between host and GPU cost a CUDA session: `copies.json` in the folder of a target's dataset.

recipes/cuda_kernels/measure_copies.py writes it; training reads it.
"""

from __future__ import annotations

from pathlib import Path

from hase.utils import files
from hase.utils.fingerprint import Machine
from hase.utils.frozen import Frozen

COPIES_VERSION = 1
MEASURE = "python recipes/cuda_kernels/measure_copies.py"


class CopyTimes(Frozen):
    """Latencies (ms) of small graphs of tensors of one size, by name.

    Attributes:
        bytes: of each tensor.
        samples_ms: `one`, `gpu`: one and two nodes on the GPU; `cpu`: the CPU provider's node alone; `to_host`: a node on the
            GPU, then the CPU's; `to_gpu`: the CPU's node, then one on the GPU; `through_one`, `through_four`: a node on the
            GPU, then one or four times the CPU's and another on the GPU.
    """

    bytes: int
    samples_ms: dict[str, tuple[float, ...]]


class WaitTimes(Frozen):
    """Latencies (ms) of graphs of nodes whose output size depends on data, so that the host waits for the GPU at each.

    Attributes:
        operator: of the nodes.
        elements: of their first input (sixteen for each box of NonMaxSuppression).
        samples_ms: by the number of nodes.
    """

    operator: str
    elements: int
    samples_ms: dict[str, tuple[float, ...]]


class MeasuredCopies(Frozen):
    """`copies.json`: the target's name, the machine, and the samples."""

    version: int = COPIES_VERSION
    target: str
    machine: Machine
    copies: tuple[CopyTimes, ...]
    waits: tuple[WaitTimes, ...]


def copies_path(dataset: Path) -> Path:
    """The file in the folder of a target's dataset."""
    return dataset / "copies.json"


def read_copies(dataset: Path) -> MeasuredCopies | None:
    """What was measured for a target; None where nothing was.

    Raises:
        UserError: the file can't be read.
    """
    path = copies_path(dataset)
    return files.read_record(path, MeasuredCopies, COPIES_VERSION, MEASURE) if path.is_file() else None
