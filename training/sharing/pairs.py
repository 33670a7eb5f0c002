"""Two models on one GPU, each in a loop of its own: predicted from the two models alone, without a probe.

The cost of a switch between them is fitted to models that were measured next to a background that is itself a model in a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from records.kernel_record import record_name
from records.probe_reading import ALWAYS
from training.sharing.learned import Sharing, in_a_loop
from training.sharing.shared_runs import SharedRuns, Simulated
from utils import cli

if TYPE_CHECKING:
    from records.backgrounds import Background

Floats = npt.NDArray[np.float64]
SWITCHES_MS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # costs of a switch to choose from; about 0.2 on an H200


def looped_models(backgrounds: Mapping[str, Background], known: Collection[str]) -> dict[str, str]:
    """The record's name of each background that is a model in a loop, by the background's name; only of records in `known`."""
    named = {name: record_name(background.model.stem, background.dims, static=True) for name, background in backgrounds.items()
             if background.model}
    return {name: record for name, record in named.items() if record in known}


class Pairs:
    """Runs next to a model in a loop that never pauses, simulated for each of SWITCHES_MS that is below the longest wait.

    Attributes:
        cases: the places of these runs among all runs.
    """

    def __init__(self, runs: Sequence[SharedRuns], measured: Floats, models: Mapping[str, Simulated],
                 families: Mapping[str, str], looped: Mapping[str, str], learned: Sequence[Sharing]) -> None:
        """Simulates them.

        Args:
            runs: all runs.
            measured: their statistics, shape (runs, 3).
            models, families: by the record's name.
            looped: see `looped_models`.
            learned: for each run, what was learned of sharing without its background and its family.
        """
        self.cases = [place for place, run in enumerate(runs) if run.background in looped and run.level > ALWAYS]
        shortest_ms = min(sharing.longest_wait_ms for sharing in learned)
        self._switches_ms = [switch_ms for switch_ms in SWITCHES_MS if switch_ms < shortest_ms] or [SWITCHES_MS[0]]
        self._left_out = [(runs[place].background, families[runs[place].model]) for place in self.cases]
        self._measured = measured[self.cases]
        self._predicted = np.array([[
            _next_to_loop(models[runs[place].model], models[looped[runs[place].background]],
                          learned[place].model_copy(update={"switch_ms": switch_ms})) for switch_ms in self._switches_ms]
            for place in cli.progress(self.cases, "simulating pairs")])

    def switch_ms(self) -> float:
        """The switch with the smallest error over all cases."""
        return self._switches_ms[self._best(range(len(self.cases)))]

    def _best(self, kept: Sequence[int]) -> int:
        """The place of the switch with the smallest error of all three statistics; `kept`: the cases that count, by place."""
        kept = list(kept)
        errors = np.abs(self._predicted[kept] / self._measured[kept, None] - 1.0).mean(axis=(0, 2))
        return int(errors.argmin())

    def left_out(self) -> Floats:
        """Predictions, shape (cases, 3), with a switch that was fitted without the looped model and without the family of the
        other model; fitted to all cases where that leaves none."""
        found = []
        for place, (background, family) in enumerate(self._left_out):
            others = [i for i, (other, of) in enumerate(self._left_out) if other != background and of != family]
            found.append(self._predicted[place, self._best(others or range(len(self.cases)))])
        return np.array(found)


def _next_to_loop(model: Simulated, looped: Simulated, sharing: Sharing) -> Floats:
    """Statistics of a model's latency (ms) while the other one runs in a loop."""
    return model.next_to(in_a_loop(looped.run, model.run, sharing), sharing.slice_ms)
