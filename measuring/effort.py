"""How long and how often something is timed."""

from __future__ import annotations

import math

from utils.frozen import Frozen


class Effort(Frozen):
    """How long to measure one thing.

    Attributes:
        warmup: untimed runs at first.
        warmup_s: how long these last at least, in seconds: threads that slept take a while to spread over the processors.
        budget_s: seconds of timed runs.
        least_runs, most_runs: limits of the number of timed runs.
    """

    warmup: int = 2
    warmup_s: float = 0.0
    budget_s: float = 0.05
    least_runs: int = 5
    most_runs: int = 50

    def part(self, parts: int) -> Effort:
        """An effort of which `parts` together are as this one, or a little more."""
        return self.model_copy(update={"budget_s": self.budget_s / parts, "least_runs": math.ceil(self.least_runs / parts),
                                       "most_runs": math.ceil(self.most_runs / parts)})

    def runs(self, one_run_s: float) -> int:
        """The number of runs that fits the budget when one takes `one_run_s` seconds."""
        return max(self.least_runs, min(self.most_runs, int(self.budget_s / max(one_run_s, 1e-6))))
