"""The work of a run, by which its energy is explained: time, operations, bytes and launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from ort_analysis.records.kernel_record import Kernel
from training.kernels.operator_classes import operator_class

EnergyClass = Literal["convolution", "product", "other"]
RUN, BYTES, LAUNCHES, BUSY, OPERATIONS = "run_s", "gb", "launches", "busy_s", "tflop"
# What a coefficient of each kind of work is, by the part of the name in front of the first ":".
UNITS = {RUN: "W", BUSY: "W", OPERATIONS: "pJ/FLOP", BYTES: "J/GB", LAUNCHES: "J"}


class Part(NamedTuple):
    """The runs of one kernel in a run of a model.

    Attributes:
        runs: how often it runs.
        time_ms: the device's time for one of them.
        launches: of one of them; 1 on a CPU.
    """

    kernel: Kernel
    runs: float
    time_ms: float
    launches: float


def energy_class(kernel: Kernel) -> EnergyClass:
    """Convolutions and products do most of a model's operations, on units of their own; all others mainly move data."""
    found = operator_class(kernel)
    return found if found in ("convolution", "product") else "other"


def work_of_run(parts: Iterable[Part], latency_ms: float) -> dict[str, float]:
    """The work of one run by name: `run_s`, `busy_s:<class>`, `tflop:<class>:<element type>`, `gb` and `launches`.

    Args:
        parts: the kernels that the device runs.
        latency_ms: of the run. If the kernels' times exceed it, they are shortened to fit, all by the same factor.
    """
    parts = list(parts)
    found: dict[str, float] = {RUN: latency_ms / 1e3, BYTES: 0.0, LAUNCHES: 0.0}
    busy_ms = sum(part.runs * part.time_ms for part in parts)
    fit = min(1.0, latency_ms / busy_ms) if busy_ms else 1.0
    for kernel, runs, time_ms, launches in parts:
        kind = energy_class(kernel)
        for name, amount in ((f"{BUSY}:{kind}", fit * time_ms / 1e3),
                             (f"{OPERATIONS}:{kind}:{kernel.dtype}", kernel.flops / 1e12),
                             (BYTES, (kernel.bytes_read + kernel.bytes_written) / 1e9), (LAUNCHES, launches)):
            if amount:
                found[name] = found.get(name, 0.0) + runs * amount
    return found


def kind_of_work(name: str) -> str:
    """`tflop` of `tflop:product:float16`."""
    return name.partition(":")[0]
