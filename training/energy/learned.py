"""What was learned of a device's energy: energy = idle power · time + Σ coefficient · work.

The coefficients are those of physics: W while kernels of a class run, further W while they fill the device, pJ per operation by
class, J per GB moved, J per launch, and W while the model runs at all. None is negative. All
element types of a class have one coefficient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from training.composition.intervals import ErrorRange
from training.energy.work import RUN, kind_of_work, without_type, without_types
from utils import files
from utils.errors import UserError
from utils.frozen import Frozen
from utils.timing import ErrorStatistics

ENERGY_VERSION = 2
FILE = "energy.json"
FIT = "python training/fit_energy.py"
MEASURE = "energy_s: 3 in the collector's config"


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
        coefficients: by kind of work (training/energy/work.py), in the unit that UNITS says; those that are 0 are left out.
        learned_from: the work in use that the models of the fit had, by name. A run with other work is a guess in that part.
        kind: the candidate in use.
        left_out: errors with each family held out in turn and the latency as measured; None where there is only one family.
        left_out_with_latency: the same with the latency that was predicted with the family held out; None where no such
            predictions are known.
        interval: of predictions with the right latency; None where too few models were held out.
        agreement: mean of the integral of power over the device's counter; None where there is no counter.
        models_sha256: of the table that the models' energies are from.
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

    def run_j(self, work: Mapping[str, float]) -> RunEnergy:
        """The energy of a run that does this work; at most what the power limit leaves."""
        kinds = {kind_of_work(name) for name in self.learned_from}
        guessed = tuple(name for name in work if kind_of_work(name) in kinds and name not in self.learned_from)
        known = {without_type(name) for name in self.learned_from}
        total_j = self.idle_w * work[RUN]
        for name, amount in without_types(work).items():
            total_j += amount * (self.coefficients.get(name, 0.0) if name in known else self._largest(kind_of_work(name)))
        limit_j = math.inf if self.limit_w is None else self.limit_w * work[RUN]
        return RunEnergy(min(total_j, limit_j), guessed, max(1.0, total_j / limit_j))

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
