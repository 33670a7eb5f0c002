"""How much energy a run takes: the work of a run, the coefficients learned for it, and their tables and page.

The coefficients are those of physics: W while kernels of a class run, further W while they fill the device, pJ per operation by
class, J per GB moved, J per launch, and W while the model runs at all. None is negative. All element types of a class have one
coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from hase.learned.composition.intervals import ErrorRange
from hase.ort_analysis.cuda.language_kernels import Algorithm, language_algorithm
from hase.records.kernel_record import Kernel
from hase.records.operators import operator_row
from hase.utils import files
from hase.utils.cli.printing import markdown_table
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.timing import ErrorStatistics, error_statistics

EnergyClass = Literal["convolution", "product", "quantised", "other"]
RUN, BYTES, LAUNCHES, BUSY, OPERATIONS = "run_s", "gb", "launches", "busy_s", "tflop"
# A kernel on few numbers has too few threads to fill the device, and spends much of its time waiting: it draws less power. Its
# full time is its time · n / (n + half), where n are the numbers that it reads and writes, in millions. The fit chooses `half`
# among these; for an H200 it is 4.
FULL = {half: f"full_{half}m_s" for half in (1, 2, 4, 8)}
# What a coefficient of each kind of work is, by the part of the name in front of the first ":".
UNITS = {RUN: "W", BUSY: "W", **dict.fromkeys(FULL.values(), "W"), OPERATIONS: "pJ/FLOP", BYTES: "J/GB", LAUNCHES: "J"}
TIMED = {BUSY, *FULL.values()}  # kinds of work that are as much as a kernel's time
UNPACKED: tuple[Algorithm, ...] = ("router", "vector", "rows")
WORD = 4  # bytes; an operation on a half-precision number counts half, since a tensor core does twice as many at the same power
ENERGY_VERSION = 2
FILE = "energy.json"
FIT = "python training/fit_energy.py"
MEASURE = "energy_s: 3 in the collector's config"
MUCH = 2.0  # times idle power, which an H200 draws when it works for more than half of the time


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
    """Convolutions and products do most of a model's operations, on units of their own; products whose quantised matrix is
    unpacked on the way do so on other units; all others mainly move data."""
    if language_algorithm(kernel) in UNPACKED:
        return "quantised"
    operator_class = operator_row(kernel.op_type).operator_class
    return operator_class if operator_class in ("convolution", "product") else "other"


def busy_time_ms(parts: Iterable[Part]) -> float:
    """The time of kernels that run one after another, over all their runs."""
    return sum(part.runs * part.time_ms for part in parts)


def work_of_run(parts: Iterable[Part], latency_ms: float) -> dict[str, float]:
    """The work of one run by name: `run_s`, `busy_s:<class>`, `full_<half>m_s`, `tflop:<class>:<element type>`, `gb` and
    `launches`.

    Args:
        parts: the kernels that the device runs.
        latency_ms: of the run. If the kernels' times exceed it, they are shortened to fit, all by the same factor.
    """
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
    """The size of a number in units of WORD; 1 for a type that numpy does not know."""
    if dtype == "bfloat16":
        return 2 / WORD
    try:
        return np.dtype(dtype).itemsize / WORD
    except TypeError:
        return 1.0


@cache  # names are few, and a fit asks for them millions of times
def kind_of_work(name: str) -> str:
    """`tflop` of `tflop:product:float16`."""
    return name.partition(":")[0]


@cache
def without_type(name: str) -> str:
    """`tflop:product` of `tflop:product:float16`: all element types of a class have one coefficient."""
    return ":".join(name.split(":")[:2])


def without_types(work: Mapping[str, float]) -> dict[str, float]:
    """Work with the element types of a class added up."""
    amounts: dict[str, float] = {}
    for name, amount in work.items():
        shared = without_type(name)
        amounts[shared] = amounts.get(shared, 0.0) + amount
    return amounts


class FittedEnergy(Frozen):
    """A model of the fit: its family, its measured mean power, and its energy per run, measured and predicted with its family
    held out (or with the model in the fit, where there is only one family), from the measured latency and from the predicted
    one (None where that is not known). `agreement`: the integral of power over the device's counter; None without a counter."""

    model: str
    group: str
    power_w: float
    measured_j: float
    predicted_j: float
    with_latency_j: float | None = None
    agreement: float | None = None


class EnergyCandidate(Frozen):
    """Kinds of work that were tried together, and their errors as ratios: `cv_mape` with families held out (None where there is
    only one), `fit_mape` of the models of the fit."""

    name: str
    cv_mape: float | None
    fit_mape: float


class EnergyModel(Frozen):
    """`energy.json`: what a run takes of a target's energy.

    Attributes:
        limit_w: the device's power limit, above which it lowers its clocks; None if it is not known. No mean power is above it.
        idle_w: the device's power with a session open and nothing running: a low quantile of the readings.
        coefficients: by kind of work (learned/energy.py), in the unit that UNITS says; those that are 0 are left out.
        learned_from: the work in use that the models of the fit had, by name. A run with other work is a guess in that part.
        kind: the candidate in use.
        left_out: errors with each family held out in turn and the latency as measured; None where there is only one family.
        left_out_with_latency: the same with the latency that was predicted with the family held out; None where no such
            predictions are known.
        interval: of predictions with the right latency; None where too few models were held out.
        agreement: mean of the integral of power over the device's counter; None where there is no counter.
        models_sha256: of the table that the models' energies are from.
        scaled_from: the card that was measured, where this is of another one (learned/scaled_energy.py).
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
        """The energy of a run that does this work; at most what the power limit leaves."""
        total_j, guessed = self._total_j(work)
        limit_j = math.inf if self.limit_w is None else self.limit_w * work[RUN]
        return RunEnergy(min(total_j, limit_j), guessed, max(1.0, total_j / limit_j))

    def unlimited_w(self, parts: Iterable[Part]) -> float:
        """The mean power of a device without a power limit while it does nothing but these kernels; 0 without any."""
        parts = list(parts)
        busy_ms = busy_time_ms(parts)
        return self._total_j(work_of_run(parts, busy_ms))[0] / (busy_ms / 1e3) if busy_ms else 0.0

    def _total_j(self, work: Mapping[str, float]) -> tuple[float, tuple[str, ...]]:
        """The energy of a run without a power limit, and the kinds of its work that no measured model had."""
        total_j, known = self.idle_w * work[RUN], {without_type(name) for name in self.learned_from}
        for name, amount in without_types(work).items():
            total_j += amount * self._coefficient(name, known)
        return total_j, self._guessed(work)

    @property
    def run_w(self) -> float:
        """What a run takes for its time alone, whatever it does."""
        return self.idle_w + self._coefficient(RUN, self.learned_from)

    def part_j(self, part: Part) -> tuple[float, float, bool]:
        """What the runs of a kernel add to the energy of a run without a power limit: what follows from its time, and the rest;
        and whether it is work that no measured model had."""
        work, known = work_of_run([part], busy_time_ms([part])), {without_type(name) for name in self.learned_from}
        timed_j = fixed_j = 0.0
        for name, amount in without_types(work).items():
            if kind_of_work(name) in TIMED:
                timed_j += amount * self._coefficient(name, known)
            elif name != RUN:
                fixed_j += amount * self._coefficient(name, known)
        return timed_j, fixed_j, bool(self._guessed(work))

    def _guessed(self, work: Mapping[str, float]) -> tuple[str, ...]:
        """The kinds of work that no measured model had."""
        kinds = {kind_of_work(name) for name in self.learned_from}
        return tuple(name for name in work if kind_of_work(name) in kinds and name not in self.learned_from)

    def _coefficient(self, name: str, known: Collection[str]) -> float:
        """The coefficient of a work by its name without the element type; `known`: the work of the fit by such names."""
        return self.coefficients.get(name, 0.0) if name in known else self._largest(kind_of_work(name))

    def _largest(self, kind: str) -> float:
        """A coefficient for work of a class that no model of the fit had: the largest of the same kind."""
        return max((value for name, value in self.coefficients.items() if kind_of_work(name) == kind), default=0.0)


class RunEnergy(NamedTuple):
    """The energy of a run in J.

    Attributes:
        guessed: the kinds of work whose coefficient was taken from another type or class.
        over_limit: how many times as much the work would take without the power limit; 1 below the limit.
    """

    energy_j: float
    guessed: tuple[str, ...]
    over_limit: float


def energy_path(folder: Path) -> Path:
    return folder / FILE


def read_energy(folder: Path) -> EnergyModel:
    """What was learned of the energy of the target whose predictors lie in `folder`.

    Raises:
        UserError: nothing was, or the file can't be read.
    """
    path = energy_path(folder)
    if not path.is_file():
        raise UserError(f"{folder.name}: nothing was learned of its energy; measure models there with {MEASURE}, then learn "
                        f"from them: {FIT} (docs/energy.md)")
    return files.read_record(path, EnergyModel, ENERGY_VERSION, FIT)


def coefficient_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """One row per coefficient, with its unit."""
    checked = [] if fitted.agreement is None else [
        {"what": "measured: integral of power over the energy counter", "value": fitted.agreement, "unit": "ratio"}]
    return [*checked, {"what": "idle power", "value": fitted.idle_w, "unit": "W"}, *(
        {"what": name, "value": value, "unit": UNITS[kind_of_work(name)]}
        for name, value in sorted(fitted.coefficients.items()))]


def error_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """Errors of models whose family was held out, with the latency as measured and as predicted. The latter also for models
    that leave the device idle for much of the time, whose latency depends on the host, and for the others."""
    def with_latency(least_w: float, below_w: float) -> ErrorStatistics | None:
        pairs = [(model.with_latency_j, model.measured_j) for model in fitted.models
                 if model.with_latency_j is not None and least_w <= model.power_w < below_w]
        return error_statistics(*(list(column) for column in zip(*pairs, strict=True))) if pairs else None

    bound_w = MUCH * fitted.idle_w
    return [_error_row("latency as measured", fitted.left_out), _error_row("latency predicted", fitted.left_out_with_latency),
            _error_row(f"… models above {bound_w:.0f} W", with_latency(bound_w, math.inf)),
            _error_row(f"… models below {bound_w:.0f} W", with_latency(0.0, bound_w))]


def _error_row(what: str, errors: ErrorStatistics | None) -> dict[str, Any]:
    """A row of errors in per cent; no cells where nothing is known."""
    if errors is None:
        return {"what": f"{what}: not known"}
    return {"what": what, "count": errors.count, "MAPE": f"{errors.mape:.1%}", "median": f"{errors.median:.1%}",
            "within ±10 %": f"{errors.within_10:.0%}", "worst": f"{errors.worst:.1%}"}


def model_rows(fitted: EnergyModel) -> list[dict[str, Any]]:
    """One row per model: its mean power, its energy, and the errors of the energies that were predicted without its family."""
    return [{"model": model.model, "family": model.group, "mean (W)": f"{model.power_w:.0f}",
             "measured (J)": f"{model.measured_j:.4g}", "predicted (J)": f"{model.predicted_j:.4g}",
             "error": f"{model.predicted_j / model.measured_j - 1:+.1%}", "error, latency predicted":
             None if model.with_latency_j is None else f"{model.with_latency_j / model.measured_j - 1:+.1%}"}
            for model in fitted.models]


def page(fitted: EnergyModel) -> str:
    """The page about the energy of a target."""
    agreements = [model.agreement for model in fitted.models if model.agreement is not None]
    lines = [
        "# Energy of models, measured and predicted", "",
        f"Of `{fitted.target}`. Written by `recipes/h200/learn.sh` (`training/fit_energy.py --markdown FILE`). "
        "[energy.md](energy.md) says how energy is measured and predicted.", "",
        f"{len(fitted.models)} models and sizes ran for three seconds each. Idle with a session open, the device draws "
        f"{fitted.idle_w:.0f} W; the models drew {min(model.power_w for model in fitted.models):.0f} to "
        f"{max(model.power_w for model in fitted.models):.0f} W" + (
            "." if fitted.limit_w is None else f", and its power limit is {fitted.limit_w:.0f} W.")]
    if agreements:
        apart = sorted(abs(agreement - 1.0) for agreement in agreements)
        lines += [f"The integral of power and the device's energy counter differ by {apart[len(apart) // 2]:.1%} (median), and "
                  f"by {apart[-1]:.1%} at most."]
    lines += ["", "## Errors", "", "The family of each model was held out of the fit of energy. *Latency predicted*: with the "
              "family held out of the composition, too.", "",
              markdown_table([row for row in error_rows(fitted) if "count" in row]), ""]
    if fitted.interval:
        lines += [f"A 90 % interval is {fitted.interval.low:.2f} to {fitted.interval.high:.2f} times the prediction, if the "
                  "latency is right. Made from the errors of the other families, it held "
                  f"{fitted.interval.coverage:.0%} of the models.", ""]
    lines += ["## What the energy is made of", "", f"{fitted.kind[0].upper()}{fitted.kind[1:]}.", "",
              markdown_table([{**row, "value": f"{row['value']:.4g}"} for row in coefficient_rows(fitted)]), "",
              "Other combinations, and their errors on families that were held out:", "",
              markdown_table([
                  {"combination": candidate.name, "MAPE": None if candidate.cv_mape is None else f"{candidate.cv_mape:.1%}"}
                  for candidate in fitted.candidates]), "",
              "## Each model, its family held out", "", markdown_table(model_rows(fitted)), ""]
    return "\n".join(lines)
