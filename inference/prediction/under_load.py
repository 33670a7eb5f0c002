"""The distribution of a model's latency while another process shares the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt

from hase.benchmark.metrics.source import checked
from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks
from hase.graph_model.simulation.sharing import CoRunner, shared_runs_ms
from hase.inference.prediction.targets import Fitted, is_here, local_targets
from hase.learned.sharing import (
    BUSY_FIELDS,
    Sharing,
    busy_share,
    co_runner_guessed,
    co_runner_probed,
    co_runner_summarised,
)
from hase.learned.target_files import FIT_SHARING
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.sharing_mode import SetSharing, check_sharing_mode, share_of_this_process, sharing_mode

if TYPE_CHECKING:
    from hase.records.probe_reading import ProbeReading, ProbeSummary
    from hase.utils.fingerprint import SharingMode

SHOWN_PERCENTILES = (50, 95, 99)
LoadSource = Literal["probe", "metrics", "share", "prediction"]
SAMPLES = 20  # of a distribution, in simulations of requests
SEED = 7  # for the simulated callers, so that the same question has the same answer


class NotShared(UserError):
    """Nothing was learned about how a target's GPU is shared."""

    def __init__(self, target: str) -> None:
        super().__init__(f"{target}: nothing was learned of how it is shared, so latencies under load have no distribution; "
                         f"measure models while the GPU is shared, then: {FIT_SHARING}")


class UnderLoad(Frozen):
    """The latency of a model that a caller runs again and again while another process shares the GPU.

    Attributes:
        mean_ms: mean over the runs.
        percentiles_ms: for each whole per cent from 0 to 100.
        busy_share: of the time in which the other process has work, a ratio.
        told_by: the source of the load.
    """

    mean_ms: float
    percentiles_ms: tuple[float, ...]
    busy_share: float
    told_by: LoadSource

    @classmethod
    def from_runs(cls, runs_ms: npt.NDArray[np.float64], busy_share: float, load_source: LoadSource) -> Self:
        """The distribution of the latencies (ms) of some runs; the array may have any shape."""
        return cls(mean_ms=float(runs_ms.mean()), percentiles_ms=tuple(np.percentile(runs_ms, np.arange(101)).tolist()),
                   busy_share=busy_share, told_by=load_source)

    def percentile_ms(self, percent: float) -> float:
        """The latency that `percent` % of the runs do not exceed."""
        return float(np.interp(percent, np.arange(len(self.percentiles_ms)), self.percentiles_ms))

    def slowdowns(self, alone_ms: float) -> npt.NDArray[np.float64]:
        """SAMPLES equally likely ratios of a run's time to `alone_ms`; their mean is that of all runs."""
        samples = np.interp(100.0 * (np.arange(SAMPLES) + 0.5) / SAMPLES, np.arange(101), self.percentiles_ms)
        return samples * (self.mean_ms / alone_ms / samples.mean())

    def longer_by(self, added_ms: float) -> UnderLoad:
        """The distribution with every run longer by `added_ms`, a part of the run that the load does not slow down."""
        if not added_ms:
            return self
        return self.model_copy(update={"mean_ms": self.mean_ms + added_ms,
                                       "percentiles_ms": tuple(latency_ms + added_ms for latency_ms in self.percentiles_ms)})

    def columns(self) -> dict[str, float]:
        """The mean and SHOWN_PERCENTILES (ms) as columns of a table."""
        return {"mean (ms)": self.mean_ms} | {f"p{percent} (ms)": self.percentile_ms(percent) for percent in SHOWN_PERCENTILES}


def under_load(tracks: Tracks, costs: PipelineCosts, sharing: Sharing, co_runner: CoRunner,
               load_source: LoadSource) -> UnderLoad:
    """Simulates the latency of a run next to a co-runner."""
    runs_ms = shared_runs_ms(tracks, costs, sharing.slice_ms, co_runner, np.random.default_rng(SEED))
    return UnderLoad.from_runs(runs_ms, co_runner.busy_share, load_source)


def check_local_sharing_mode(fitted: Fitted) -> None:
    """Raises UserError if the target is this machine's GPU and is shared in a way that was not measured."""
    check_sharing_mode(_local_sharing_mode(fitted))


def _local_sharing_mode(fitted: Fitted) -> SharingMode:
    """How this machine's GPU is shared now; for another machine's GPU time slices, the driver's default."""
    return sharing_mode() if is_here(fitted.target) else "time_slices"


def local_sharing(fitted: Fitted) -> SetSharing:
    """How the target's GPU is shared now: in time slices, or through MPS with this process's share of the threads.

    Time slices for another machine's GPU. Raises UserError: this machine's is shared through MIG, which can't be predicted yet.
    """
    mode = _local_sharing_mode(fitted)
    if mode == "mps":
        return share_of_this_process()
    check_sharing_mode(mode)
    return SetSharing()


def co_runner_from_metrics(fitted: Fitted, load: Mapping[str, float]) -> CoRunner | None:
    """The co-runner that metrics describe; None without load, or if nothing was learned about sharing (then the load changes
    kernel times). Raises UserError: no metric says how busy the GPU is, one has an impossible value, or this machine's GPU is
    shared in a way that was not measured."""
    if fitted.sharing is None or not load:
        return None
    check_local_sharing_mode(fitted)
    load = {field: checked(field, value) if field in BUSY_FIELDS else value for field, value in load.items()}
    share = busy_share(load)
    if share is None:
        raise UserError(f"the load has neither {' nor '.join(BUSY_FIELDS)}, so it doesn't say how busy the GPU is: give "
                        "one of them, or a probe")
    return co_runner_guessed(share, fitted.sharing)


def co_runner_from_probe(fitted: Fitted, reading: ProbeReading | None = None) -> CoRunner:
    """The co-runner that the sharing probe saw: in `reading`, or by default in a new reading on this machine. Raises NotShared:
    nothing was learned about how the target is shared; UserError: the target is a CPU, this machine is not the target, or its
    GPU is shared in a way that was not measured."""
    if fitted.target.flavour.device == "cpu":
        raise UserError(f"{fitted.target.name}: the probe measures how a GPU is shared in time slices; a CPU's "
                        "load is described by metrics, so leave --probe out")
    if fitted.sharing is None:
        raise NotShared(fitted.target.name)
    if reading is None:
        from hase.benchmark.ort.probes import probe  # noqa: PLC0415 - most predictions do not need it

        if not is_here(fitted.target):
            raise UserError(f"the probe has to run on the GPU in question, a {fitted.target.name}, and this machine is "
                            f"{' and '.join(local.name for local in local_targets())}; run there: python "
                            "benchmark/sharing_probe.py --out reading.json, and give that file")
        reading = probe(fitted.target.flavour.device)
    return co_runner_probed(reading, fitted.sharing.alone_ms)


def co_runner_from_summary(fitted: Fitted, summary: ProbeSummary | None) -> CoRunner | None:
    """The co-runner in an exporter's summary of a probe reading; None without a summary. Raises NotShared."""
    if summary is None:
        return None
    if fitted.sharing is None:
        raise NotShared(fitted.target.name)
    return co_runner_summarised(summary, fitted.sharing.alone_ms)
