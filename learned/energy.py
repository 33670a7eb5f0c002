"""How much energy a run takes: the work of a run, and the energy coefficients learned for it.

The coefficients follow physics: W while kernels of a class run, further W while they fill the device, pJ per operation by
class, J per GB moved, J per launch, and W while the model runs at all. None is negative. All element types of a class share one
coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from hase.learned.composition.intervals import ErrorRange
from hase.ort_analysis.cuda.kernel_choice import Algorithm, language_algorithm
from hase.records.devices import GpuDataSheet
from hase.records.kernel_record import Kernel
from hase.records.operators import operator_row
from hase.utils.config import Frozen
from hase.utils.timing import ErrorStatistics

EnergyClass = Literal["convolution", "product", "quantised", "other"]
RUN, BYTES, LAUNCHES, BUSY, OPERATIONS = "run_s", "gb", "launches", "busy_s", "tflop"
# A kernel on few numbers has too few threads to fill the device, and spends much of its time waiting: it draws less power. Its
# full time is its time · n / (n + half), where n are the numbers that it reads and writes, in millions. The fit chooses `half`
# among these; for an H200 it is 4.
FULL = {half: f"full_{half}m_s" for half in (1, 2, 4, 8)}
# Units of coefficients by kind of work, which is the part of the name before the first ":".
UNITS = {RUN: "W", BUSY: "W", **dict.fromkeys(FULL.values(), "W"), OPERATIONS: "pJ/FLOP", BYTES: "J/GB", LAUNCHES: "J"}
TIMED = {BUSY, *FULL.values()}  # kinds of work that are measured in a kernel's time
UNPACKED: tuple[Algorithm, ...] = ("router", "vector", "rows")
WORD = 4  # bytes; an operation on a half-precision number counts half, since a tensor core does twice as many at the same power
ENERGY_VERSION = 2


class Part(NamedTuple):
    """One kernel's share of a model's run; time and launches (1 on a CPU) are of one execution."""

    kernel: Kernel
    runs: float
    time_ms: float
    launches: float


def energy_class(kernel: Kernel) -> EnergyClass:
    """The energy class of a kernel, by the arithmetic units that it uses. Convolutions and products use units of their own,
    products that unpack quantised weights use others, and all other kernels mainly move data."""
    if language_algorithm(kernel) in UNPACKED:
        return "quantised"
    operator_class = operator_row(kernel.op_type).operator_class
    return operator_class if operator_class in ("convolution", "product") else "other"


def busy_time_ms(parts: Iterable[Part]) -> float:
    """The total time of all kernels if they run one after another."""
    return sum(part.runs * part.time_ms for part in parts)


def work_of_run(parts: Iterable[Part], latency_ms: float) -> dict[str, float]:
    """The work of one run by name: `run_s`, `busy_s:<class>`, `full_<half>m_s`, `tflop:<class>:<element type>`, `gb` and
    `launches`. If the kernels' times exceed the run's latency, all are shortened by the same factor to fit."""
    parts = list(parts)
    work: dict[str, float] = {RUN: latency_ms / 1e3, BYTES: 0.0, LAUNCHES: 0.0}
    busy_ms = busy_time_ms(parts)
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
                work[name] = work.get(name, 0.0) + runs * amount
    return work


def _words(dtype: str) -> float:
    """The size of a number in units of WORD; 1 for a type unknown to numpy."""
    if dtype == "bfloat16":
        return 2 / WORD
    try:
        return np.dtype(dtype).itemsize / WORD
    except TypeError:
        return 1.0


@cache  # there are few names, and a fit looks them up millions of times
def kind_of_work(name: str) -> str:
    """`tflop` of `tflop:product:float16`."""
    return name.partition(":")[0]


@cache
def without_type(name: str) -> str:
    """`tflop:product` of `tflop:product:float16`."""
    return ":".join(name.split(":")[:2])


def without_types(work: Mapping[str, float]) -> dict[str, float]:
    """Work with all element types of a class added up."""
    amounts: dict[str, float] = {}
    for name, amount in work.items():
        name_without_type = without_type(name)
        amounts[name_without_type] = amounts.get(name_without_type, 0.0) + amount
    return amounts


class FittedEnergy(Frozen):
    """A model used in the fit: its family, mean power, and measured and predicted energy per run. Predictions are with the
    model's family held out (unless it is the only one), from the measured and from the predicted latency. `agreement`: the
    integral of power divided by the device's energy counter; None without a counter."""

    model: str
    group: str
    power_w: float
    measured_j: float
    predicted_j: float
    with_latency_j: float | None = None
    agreement: float | None = None


class EnergyCandidate(Frozen):
    """Kinds of work, and the errors: with families held out (None: only one), and of the models in the fit."""

    name: str
    cv_mape: float | None
    fit_mape: float


class EnergyModel(Frozen):
    """`energy.json`: what predicts the energy of a run on a target.

    Attributes:
        limit_w: the device's power limit, above which it lowers its clocks. No predicted mean power exceeds it. None if
            unknown.
        idle_w: the power with a session open and nothing running: a low quantile of the readings.
        coefficients: by kind of work, in the units of UNITS, without those that are 0.
        learned_from: the kinds of work that the measured models had. Others are guessed.
        left_out, left_out_with_latency: errors with each family held out, with the measured and with the predicted latency;
            None if unknown.
        interval: of predictions from the right latency; None if too few models were held out.
        agreement: mean of the integral of power divided by the device's energy counter; None without a counter.
        scaled_from: the card that was measured, if this model was scaled from another card.
    """

    version: int = ENERGY_VERSION
    target: str
    limit_w: float | None = None
    idle_w: float
    coefficients: dict[str, float]
    learned_from: tuple[str, ...]
    kind: str
    left_out: ErrorStatistics | None = None
    left_out_with_latency: ErrorStatistics | None = None
    interval: ErrorRange | None = None
    agreement: float | None = None
    models_sha256: str
    candidates: tuple[EnergyCandidate, ...]
    models: tuple[FittedEnergy, ...]
    scaled_from: str = Field("", exclude_if=lambda card: not card)

    def run_j(self, work: Mapping[str, float]) -> RunEnergy:
        """The energy of a run that does this work, capped by the power limit."""
        total_j, guessed = self._total_j(work)
        limit_j = math.inf if self.limit_w is None else self.limit_w * work[RUN]
        return RunEnergy(min(total_j, limit_j), guessed, max(1.0, total_j / limit_j))

    def unlimited_w(self, parts: Iterable[Part]) -> float:
        """The mean power while the device runs only these kernels, without a power limit; 0 without kernels."""
        parts = list(parts)
        busy_ms = busy_time_ms(parts)
        return self._total_j(work_of_run(parts, busy_ms))[0] / (busy_ms / 1e3) if busy_ms else 0.0

    def _total_j(self, work: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
        """The energy of a run without a power limit, and the kinds of its work that were guessed."""
        total_j, known = self.idle_w * work[RUN], {without_type(name) for name in self.learned_from}
        for name, amount in without_types(work).items():
            total_j += amount * self._coefficient(name, known)
        return total_j, self.guessed(work)

    @property
    def run_w(self) -> float:
        """The power that every run draws, whatever it does."""
        return self.idle_w + self._coefficient(RUN, self.learned_from)

    def part_j(self, part: Part) -> tuple[float, float, bool]:
        """A kernel's energy without a power limit: due to its time, the rest, and whether it was guessed."""
        work, known = work_of_run([part], busy_time_ms([part])), {without_type(name) for name in self.learned_from}
        timed_j = fixed_j = 0.0
        for name, amount in without_types(work).items():
            if kind_of_work(name) in TIMED:
                timed_j += amount * self._coefficient(name, known)
            elif name != RUN:
                fixed_j += amount * self._coefficient(name, known)
        return timed_j, fixed_j, bool(self.guessed(work))

    def guessed(self, work: Mapping[str, float]) -> tuple[str, ...]:
        """The kinds of work that no measured model had."""
        kinds = {kind_of_work(name) for name in self.learned_from}
        return tuple(name for name in work if kind_of_work(name) in kinds and name not in self.learned_from)

    def _coefficient(self, name: str, known: Collection[str]) -> float:
        """The coefficient of a kind of work without element types; `known` has the kinds of work in the fit."""
        return self.coefficients.get(name, 0.0) if name in known else self._largest(kind_of_work(name))

    def _largest(self, kind: str) -> float:
        """The coefficient for a class that no measured model had: the largest of the same kind of work."""
        return max((value for name, value in self.coefficients.items() if kind_of_work(name) == kind), default=0.0)


class RunEnergy(NamedTuple):
    """The predicted energy of a run, in J. `guessed` has the kinds of work with a coefficient of another type or class;
    `over_limit` is the energy without a power limit as a multiple, 1 below the limit."""

    energy_j: float
    guessed: tuple[str, ...]
    over_limit: float


TENSOR_CORE_WORK = (f"{OPERATIONS}:convolution", f"{OPERATIONS}:product")  # done by tensor cores if the card has any


def scaled(learned: EnergyModel, base: GpuDataSheet, gpu: GpuDataSheet) -> EnergyModel:
    """Scales the energy model of the base card to another card."""
    power_ratio = gpu.power_w / (learned.limit_w or base.power_w)

    def ratio_of(name: str) -> float:
        kind = kind_of_work(name)
        if kind == BYTES:
            return power_ratio * base.bandwidth_gb_s / gpu.bandwidth_gb_s
        if kind == OPERATIONS and name in TENSOR_CORE_WORK:
            return power_ratio * base.peak_tflop_s("float16") / gpu.peak_tflop_s("float16")
        return power_ratio * base.fp32_tflop_s / gpu.fp32_tflop_s if kind == OPERATIONS else power_ratio

    def scaled_model(model: FittedEnergy) -> FittedEnergy:
        return model.model_copy(update={"power_w": power_ratio * model.power_w})

    return learned.model_copy(update={
        "limit_w": gpu.power_w, "idle_w": power_ratio * learned.idle_w, "models": tuple(map(scaled_model, learned.models)),
        "coefficients": {name: ratio_of(name) * value for name, value in learned.coefficients.items()},
        "scaled_from": base.name})
