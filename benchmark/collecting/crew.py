"""The processes that measure. They start before there is anything to measure.

A GPU's worker takes seconds to load CUDA, torch and CUPTI. Meanwhile its caller can look for work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from benchmark.collecting.config import CollectorConfig
from benchmark.collecting.tracers import Tracers
from measuring.effort import Effort
from records.labels import GPU_LABEL
from runtimes.protocol import Request, Setting
from runtimes.worker_client import Worker
from utils.locks import measuring


class Crew(NamedTuple):
    """The worker takes every label but `gpu`, which is for the tracers."""

    worker: Worker
    tracers: Tracers

    def wait(self) -> None:
        """Waits until all processes are ready, because one that still loads would disturb what another measures."""
        self.worker.wait()
        self.tracers.wait()


@contextmanager
def start_crew(config: CollectorConfig, device: str, labels: Sequence[str], setting: Setting | None = None) -> Iterator[Crew]:
    """Starts the processes for some labels on `cpu` or `cuda`; they end with the block. `setting` is that of the worker, for a
    runtime that has such.

    Raises:
        UserError: another process measures on this device.
    """
    request = Request(do="prepare", device=device, effort=Effort())
    with (measuring(device), Worker(config.timeout_s, config.runtime, setting) as worker,
          Tracers(config.tracers, config.timeout_s) as tracers):
        worker.prepare(request)
        if GPU_LABEL in labels:
            tracers.prepare(request.model_copy(update={"labels": (GPU_LABEL,)}))
        yield Crew(worker, tracers)
