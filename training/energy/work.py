"""The work of a run, by which its energy is explained: time, operations, bytes and launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np

from records.kernel_record import Kernel
from records.operators import operator_row

EnergyClass = Literal["convolution", "product", "other"]
RUN, BYTES, LAUNCHES, BUSY, OPERATIONS = "run_s", "gb", "launches", "busy_s", "tflop"
# A kernel on few numbers has too few threads to fill the device, and spends much of its time waiting: it draws less power. Its
# full time is its time · n / (n + half), where n are the numbers that it reads and writes, in millions. The fit chooses `half`
# among these; for an H200 it is 4.
FULL = {half: f"full_{half}m_s" for half in (1, 2, 4, 8)}
# What a coefficient of each kind of work is, by the part of the name in front of the first ":".
UNITS = {RUN: "W", BUSY: "W", **dict.fromkeys(FULL.values(), "W"), OPERATIONS: "pJ/FLOP", BYTES: "J/GB", LAUNCHES: "J"}
WORD = 4  # bytes; an operation on a half-precision number counts half, since a tensor core does twice as many at the same power


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
    operator_class = operator_row(kernel.op_type).operator_class
    return operator_class if operator_class in ("convolution", "product") else "other"


def work_of_run(parts: Iterable[Part], latency_ms: float) -> dict[str, float]:
    """The work of one run by name: `run_s`, `busy_s:<class>`, `full_<half>m_s`, `tflop:<class>:<element type>`, `gb` and
    `launches`.

    Args:
        parts: the kernels that the device runs.
        latency_ms: of the run. If the kernels' times exceed it, they are shortened to fit, all by the same factor.
    """
    parts = list(parts)
    found: dict[str, float] = {RUN: latency_ms / 1e3, BYTES: 0.0, LAUNCHES: 0.0}
    busy_ms = sum(part.runs * part.time_ms for part in parts)
    fit = min(1.0, latency_ms / busy_ms) if busy_ms else 1.0
    for kernel, runs, time_ms, launches in parts:
        kind, time_s, words = energy_class(kernel), fit * time_ms / 1e3, _words(kernel.dtype)
        moved_gb = (kernel.bytes_read + kernel.bytes_written) / 1e9
        millions = 1e3 * moved_gb / (WORD * words)
        for name, amount in ((f"{BUSY}:{kind}", time_s),
                             *((full, time_s * millions / (millions + half)) for half, full in FULL.items()),
                             (f"{OPERATIONS}:{kind}:{kernel.dtype}", words * kernel.flops / 1e12),
                             (BYTES, moved_gb), (LAUNCHES, launches)):
            if amount:
                found[name] = found.get(name, 0.0) + runs * amount
    return found


def _words(dtype: str) -> float:
    """The size of a number in units of WORD; 1 for a type that numpy does not know."""
    if dtype == "bfloat16":
        return 2 / WORD
    try:
        return np.dtype(dtype).itemsize / WORD
    except TypeError:
        return 1.0


def kind_of_work(name: str) -> str:
    """`tflop` of `tflop:product:float16`."""
    return name.partition(":")[0]


def without_type(name: str) -> str:
    """`tflop:product` of `tflop:product:float16`: all element types of a class have one coefficient."""
    return ":".join(name.split(":")[:2])


def without_types(work: Mapping[str, float]) -> dict[str, float]:
    """Work with the element types of a class added up."""
    found: dict[str, float] = {}
    for name, amount in work.items():
        found[without_type(name)] = found.get(without_type(name), 0.0) + amount
    return found
