"""The processes that measure, started before there is anything to measure.

What they load takes a GPU's worker seconds (CUDA, torch, CUPTI), and meanwhile their caller can look for its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.tracers import Tracers
from benchmark.measuring.effort import Effort
from benchmark.records.labels import GPU_LABEL
from benchmark.runtimes.protocol import Request
from benchmark.runtimes.worker_client import Worker
from utils.locks import measuring


class Crew(NamedTuple):
    """`worker` takes every label but `gpu`, which is the tracers'."""

    worker: Worker
    tracers: Tracers

    def wait(self) -> None:
        """Waits until all are prepared, lest one that loads disturbs what another measures."""
        self.worker.wait()
        self.tracers.wait()


@contextmanager
def start_crew(config: CollectorConfig, device: str, labels: Sequence[str]) -> Iterator[Crew]:
    """The processes for some labels on `cpu` or `cuda`; none outlives the block.

    Raises:
        UserError: another process measures on this device.
    """
    request = Request(do="prepare", device=device, effort=Effort())
    with (measuring(device), Worker(config.timeout_s) as worker,
          Tracers(config.tracers, config.timeout_s) as tracers):
        worker.prepare(request)
        if GPU_LABEL in labels:
            tracers.prepare(request.model_copy(update={"labels": (GPU_LABEL,)}))
        yield Crew(worker, tracers)
