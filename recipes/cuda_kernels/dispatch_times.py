"""Times runs of a kernel's session, until they are dispatched to an idle GPU and until they end; writes rows as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring.quiet_host import HostProbe, readings_s
from records.kernel_record import Kernel
from runtimes.ort.building.dummy_data import dummy_inputs
from runtimes.ort.runner import device_binding, queue_run, timer
from utils.ort_sessions import open_session

PROBE_S = 0.01  # of the host's probe, after each kernel


class Runs(NamedTuple):
    """Functions that run a graph once: plainly, and without waiting for the GPU and with waiting, where they return the seconds
    that took."""

    run: Callable[[], None]
    dispatch_s: Callable[[], float]
    run_s: Callable[[], float]


def runs_of(model: bytes, kernel: Kernel, device: str) -> Runs:
    """Opens a graph that reads the kernel's inputs, as it stands."""
    session = open_session(model, device, optimize="none", name=kernel.id)
    binding = device_binding(session, dummy_inputs(kernel), device)
    dispatch_s = timer(queue_run(session, binding))

    def run() -> None:
        session.run_with_iobinding(binding)

    def alone() -> float:
        binding.synchronize_outputs()
        return dispatch_s()

    return Runs(run, alone, timer(run))


def samples_ms(time_s: Callable[[], float], runs: int) -> list[float]:
    return [round(1e3 * time_s(), 5) for _ in range(runs)]


def read_probe_us(probe: HostProbe) -> float:
    """What the host's probe takes now."""
    return round(1e6 * median(readings_s(probe, PROBE_S)), 2)


def written(rows: Iterable[Mapping[str, Any]], path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows, each of which is a line of JSON in the file before the next is measured."""
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            yield row
