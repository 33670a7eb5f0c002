"""How long and how often something is timed."""

from __future__ import annotations

from utils.frozen import Frozen


class Effort(Frozen):
    """How long to measure one thing: untimed runs first, `warmup` of them and for `warmup_s` seconds at least (threads that
    slept take a while to spread over the processors), then for `budget_s` seconds, between the two numbers of runs."""

    warmup: int = 2
    warmup_s: float = 0.0
    budget_s: float = 0.05
    least_runs: int = 5
    most_runs: int = 50

    def runs(self, one_run_s: float) -> int:
        """The number of runs that fits the budget when one takes `one_run_s` seconds."""
        return max(self.least_runs, min(self.most_runs, int(self.budget_s / max(one_run_s, 1e-6))))
