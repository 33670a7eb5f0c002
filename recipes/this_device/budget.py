"""How recipes/this_device spends its minutes, and what it has spent in earlier calls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from utils import files
from utils.frozen import Frozen

TRAINING_SHARE = 0.25  # of the minutes, for training and composition
LEAST_MEASURING_SHARE = 0.2  # of the minutes, even where the analysis has used up the rest …
LEAST_MEASURING_S = 10.0  # … and at least this long: the processes that measure need a few seconds to start
SAMPLING_SHARE = 0.1  # of the minutes, for drawing and building samples
# Rates to plan with, per second and process: samples that are drawn and built, and kernels that are measured. Measured on two
# cores of an AMD EPYC and on an H200; a device that is faster measures all samples before its time is over.
DRAWN_PER_S = 60.0
MEASURED_PER_S = {"cpu": 25.0, "cuda": 60.0}
MORE_THAN_MEASURED = 1.5  # samples to choose from, for each that there is time to measure
SPENT_VERSION = 1


class Spent(Frozen):
    """What earlier calls in this workspace did.

    Attributes:
        seconds: how long they took, together.
        analysed: the models and sizes that they analysed, as a text that changes with them.
        measured: whether one measured until its time was over or nothing was left.
    """

    version: int = SPENT_VERSION
    seconds: float = 0.0
    analysed: str = ""
    measured: bool = False


def read_spent(path: Path) -> Spent:
    """What earlier calls did; nothing where the file is not there.

    Raises:
        UserError: the file is damaged.
    """
    return files.read_record(path, Spent, SPENT_VERSION, f"rm {path}") if path.is_file() else Spent()


class Budget:
    """The minutes of all calls in a workspace together.

    Attributes:
        spent: by earlier calls.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.total_s = path, 60.0 * minutes
        self.spent = read_spent(path)
        self._began_s = time.monotonic()

    def used_s(self) -> float:
        """Seconds of this call and the earlier ones."""
        return self.spent.seconds + time.monotonic() - self._began_s

    def save(self, **changes: Any) -> None:
        """Writes down what was used until now."""
        now_s = time.monotonic()
        self.spent = self.spent.model_copy(update={"seconds": self.spent.seconds + now_s - self._began_s, **changes})
        self._began_s = now_s
        files.write_json(self.path, self.spent)

    def samples(self, device: str, own_kernels: int, jobs: int) -> int:
        """How many kernels to sample, besides those of the models: as many as can be drawn in their share of the time, and at
        most a few more than can be measured."""
        measurable = self.measuring_s() * MEASURED_PER_S[device] - own_kernels
        return max(0, int(min(MORE_THAN_MEASURED * measurable, SAMPLING_SHARE * self.total_s * DRAWN_PER_S * jobs)))

    def measuring_s(self) -> float:
        """Seconds left for measuring: what training does not need. Something is measured in any case, once."""
        left_s = self.total_s * (1.0 - TRAINING_SHARE) - self.used_s()
        return max(left_s, 0.0 if self.spent.measured else max(LEAST_MEASURING_SHARE * self.total_s, LEAST_MEASURING_S))
