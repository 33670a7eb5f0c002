"""What was learned of a host that serves requests: how its pace changes from run to run, and after it was idle (fitted by
serving_fit.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hase.graph_model.simulation.serving import Host
from hase.records.host_pace import Stalls
from hase.utils import files
from hase.utils.frozen import Frozen

SERVING_VERSION = 1
FILE = "serving.json"
FIT = "python training/fit_serving.py"


class ServingHost(Frozen):
    """`serving.json`: how the pace of a host changes while it serves requests.

    Attributes:
        learned_on: the target whose host it was.
        models, runs: that were learned from.
        pace: of that host by its probe, a ratio to the usual one of the target.
        paces: evenly spaced quantiles of the host's pace in runs that began as soon as the run before had ended, as ratios to
            what the probe says.
        lasts_ms, idle_ms, slower, stalls_per_s, stalls_ms: as in `hase.graph_model.simulation.serving.Host`.
    """

    version: int = SERVING_VERSION
    learned_on: str
    models: int
    runs: int
    pace: float
    paces: tuple[float, ...]
    lasts_ms: float
    idle_ms: tuple[float, ...]
    slower: tuple[float, ...]
    stalls_per_s: float
    stalls_ms: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median of `paces`: runs are predicted at so many times the pace that the probe says."""
        return float(np.median(self.paces))

    def host(self, stalls: Stalls | None = None) -> Host:
        """As the simulation takes it, for runs that are predicted at the `middle`.

        Args:
            stalls: that the host's probe saw while nothing else ran. They count where they are more frequent than those that
                were learned: a host that did not stall at all before stalled once a second while it served.
        """
        learned = Stalls(self.stalls_per_s, self.stalls_ms)
        per_s, lengths_ms = max(learned, stalls or learned, key=lambda of: of.per_s)
        return Host(np.array(self.paces) / self.middle, self.lasts_ms, np.array(self.idle_ms), np.array(self.slower),
                    per_s, np.array(lengths_ms))


def serving_path(folder: Path) -> Path:
    """The file of a target whose predictors are in `folder`."""
    return folder / FILE


def read_serving(folder: Path) -> ServingHost | None:
    """What was learned of hosts that serve a target's models; None where nothing was.

    Raises:
        UserError: a damaged file or one of another version.
    """
    path = serving_path(folder)
    return files.read_record(path, ServingHost, SERVING_VERSION, FIT) if path.exists() else None
