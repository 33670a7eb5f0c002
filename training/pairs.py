"""Two models, each in a loop of its own: what one sees is predicted from the other's predicted run, without any probe.

Fits how long a looped model keeps the GPU at most while another waits, and what a switch costs, to models measured beside
backgrounds that are themselves models in a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ort_analysis.records import record_name
from training.shared_runs import SharedRuns, Simulated
from training.sharing import ALWAYS, Sharing, in_a_loop
from utils import cli

if TYPE_CHECKING:
    from benchmark.backgrounds import Background

Floats = npt.NDArray[np.float64]
LONGEST_TURNS_MS = (1.6, 1.8, 2.0, 2.2, 2.4)  # to choose from: on an H200 about as long as a slice …
SWITCHES_MS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # … and about 0.2
TURNS = list(itertools.product(LONGEST_TURNS_MS, SWITCHES_MS))


def looped_models(backgrounds: Mapping[str, Background], known: Collection[str]) -> dict[str, str]:
    """Of the backgrounds that are a model in a loop, by name, the record's name; of those that are `known`."""
    named = {name: record_name(background.model.stem, background.dims) for name, background in backgrounds.items()
             if background.model}
    return {name: record for name, record in named.items() if record in known}


class Pairs:
    """Runs beside a model in a loop that never pauses, at every choice of the two constants.

    Attributes:
        cases: which of the runs these are.
    """

    def __init__(self, runs: Sequence[SharedRuns], measured: Floats, models: Mapping[str, Simulated], looped: Mapping[str, str],
                 learned: Sequence[Sharing]) -> None:
        """Simulates them.

        Args:
            runs: all.
            measured: their statistics, shape (runs, 3).
            models: by name of the record.
            looped: see `looped_models`.
            learned: what was learned of sharing without each run.
        """
        self.cases = [place for place, run in enumerate(runs) if run.background in looped and run.level > ALWAYS]
        self._background = [runs[place].background for place in self.cases]
        self._measured = measured[self.cases]
        self._predicted = np.array([[
            _beside(models[runs[place].model], models[looped[runs[place].background]], learned[place].model_copy(
                update={"longest_turn_ms": longest_ms, "switch_ms": switch_ms})) for longest_ms, switch_ms in TURNS]
            for place in cli.track(self.cases, "simulating pairs")])

    def best(self, kept: Sequence[int] | None = None) -> tuple[float, float]:
        """Which of TURNS errs least for all three statistics of all cases, or of some of `cases` by their place among them."""
        return TURNS[self._best(range(len(self.cases)) if kept is None else kept)]

    def _best(self, kept: Sequence[int]) -> int:
        kept = list(kept)
        errors = np.abs(self._predicted[kept] / self._measured[kept, None] - 1.0).mean(axis=(0, 2))
        return int(errors.argmin())

    def left_out(self) -> Floats:
        """Predictions with the constants fitted without the looped model, shape (cases, 3); all are kept where there is only
        one looped model."""
        found = []
        for place, background in enumerate(self._background):
            others = [i for i, other in enumerate(self._background) if other != background]
            found.append(self._predicted[place, self._best(others or range(len(self.cases)))])
        return np.array(found)


def _beside(model: Simulated, looped: Simulated, sharing: Sharing) -> Floats:
    """Statistics of a model's latency while the other one runs in a loop."""
    return model.beside(in_a_loop(looped.run, model.run, sharing), sharing.slice_ms)
