"""Measures how fast this machine's host dispatches (benchmark/host_pace.py)."""

from __future__ import annotations

from datetime import UTC, datetime

from measuring.quiet_host import readings_s
from records.host_pace import MachinePace
from runtimes.ort.host_probe import host_probe
from utils.errors import UserError
from utils.fingerprint import boot_id, has_cuda, machine
from utils.timing import summarize

SECONDS = 2.0


def check_gpu() -> None:
    """Checks that this machine has a GPU.

    Raises:
        UserError: it has none.
    """
    if not has_cuda():
        raise UserError("the host's pace is that of dispatching work to a GPU: measuring it needs a GPU, and this machine has "
                        "none that the driver can talk to; a CPU target's host is the target itself, so it needs no pace")


def measure_pace(device: str = "cuda", seconds: float = SECONDS) -> MachinePace:
    """The current pace of this machine's host.

    Args:
        device: `cuda`; `cpu` in tests.
        seconds: duration of the readings; opening the probe takes longer the first time.

    Raises:
        UserError: there is no GPU.
    """
    if device == "cuda":
        check_gpu()
    found = summarize([1e3 * reading for reading in readings_s(host_probe(device), seconds)])
    return MachinePace(probe_us=round(1e3 * found.median_ms, 2), spread=round(found.spread, 4), readings=found.runs,
                       taken=datetime.now(UTC), boot_id=boot_id(), device=device,
                       machine=machine(device))
