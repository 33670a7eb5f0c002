"""Two models, each in a loop of its own: what one sees is predicted from the other's predicted run, without any probe.

The longest that any probe waited is the longest turn and a switch. What a switch costs is fitted to models measured beside
backgrounds that are themselves models in a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmark.probe_reading import ALWAYS
from ort_analysis.records import record_name
from training.shared_runs import SharedRuns, Simulated
from training.sharing import Sharing, in_a_loop
from utils import cli

if TYPE_CHECKING:
    from benchmark.backgrounds import Background

Floats = npt.NDArray[np.float64]
SWITCHES_MS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # to choose from: on an H200 about 0.2
LONGEST = 0.9  # quantile of a probe's waits that is taken for the longest


def looped_models(backgrounds: Mapping[str, Background], known: Collection[str]) -> dict[str, str]:
    """Of the backgrounds that are a model in a loop, by name, the record's name; of those that are `known`."""
    named = {name: record_name(background.model.stem, background.dims) for name, background in backgrounds.items()
             if background.model}
    return {name: record for name, record in named.items() if record in known}


def longest_wait_ms(runs: Sequence[SharedRuns]) -> float:
    """The longest that a probe waits for its turn."""
    return max(float(np.quantile(run.other.waits_ms, LONGEST)) for run in runs if len(run.other.waits_ms))


def with_turns(sharing: Sharing, wait_ms: float, switch_ms: float) -> Sharing:
    """The same where the longest wait and a switch are these."""
    return sharing.model_copy(update={"longest_turn_ms": round(wait_ms - switch_ms, 3), "switch_ms": switch_ms})


class Pairs:
    """Runs beside a model in a loop that never pauses, at every one of SWITCHES_MS.

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
        self._measured, self._wait_ms = measured[self.cases], longest_wait_ms(runs)
        self._predicted = np.array([[
            _beside(models[runs[place].model], models[looped[runs[place].background]],
                    with_turns(learned[place], self._wait_ms, switch_ms)) for switch_ms in SWITCHES_MS]
            for place in cli.track(self.cases, "simulating pairs")])

    def learned(self, sharing: Sharing) -> Sharing:
        """What was learned of sharing, with turns that err least for all cases."""
        return with_turns(sharing, self._wait_ms, SWITCHES_MS[self._best(range(len(self.cases)))])

    def _best(self, kept: Sequence[int]) -> int:
        """Which of SWITCHES_MS errs least for all three statistics of some of the cases, by their place among them."""
        kept = list(kept)
        errors = np.abs(self._predicted[kept] / self._measured[kept, None] - 1.0).mean(axis=(0, 2))
        return int(errors.argmin())

    def left_out(self) -> Floats:
        """Predictions with a switch fitted without the looped model, shape (cases, 3); all are kept where there is only one
        looped model."""
        found = []
        for place, background in enumerate(self._background):
            others = [i for i, other in enumerate(self._background) if other != background]
            found.append(self._predicted[place, self._best(others or range(len(self.cases)))])
        return np.array(found)


def _beside(model: Simulated, looped: Simulated, sharing: Sharing) -> Floats:
    """Statistics of a model's latency while the other one runs in a loop."""
    return model.beside(in_a_loop(looped.run, model.run, sharing), sharing.slice_ms)
