"""Prints a line for each prediction of a watch, until Ctrl-C."""

from __future__ import annotations

from typing import Any

from inference.live.prediction_exporter import export
from inference.live.watch import Watch, WatchLine
from utils import cli
from utils.logger import get_logger
from utils.processes import set_by_signal

log = get_logger("watch")


def columns(reading: WatchLine) -> dict[str, Any]:
    """A reading as a row of a table."""
    slo = reading.slo
    return {
        "time": reading.time, "busy share": None if reading.busy_share is None else f"{reading.busy_share:.0%}",
        "mean (ms)": reading.mean_ms, "p50 (ms)": reading.p50_ms, "p95 (ms)": reading.p95_ms,
        "rough estimate": None if reading.rough_estimate is None else "yes" if reading.rough_estimate else "no",
        "host pace": reading.host_pace,
        "SLO": None if slo is None else "met" if slo.met else "missed",
        "trouble": f"reading failed ({reading.failed} so far): {reading.trouble}" if reading.trouble else None}


def follow(watch: Watch, address: tuple[str, int] | None = None, as_json: bool = False) -> None:
    """Prints a line on stdout for each prediction of a watch, until Ctrl-C or SIGTERM, and serves the latest one at `address`,
    if any.

    Raises:
        UserError: the address can't be used.
    """
    over = set_by_signal()
    server = export(watch, *address) if address else None
    if server:
        log.info("the latest prediction: http://%s:%d/metrics", server.server_address[0], server.server_port)
    count = 0
    for count, reading in enumerate(watch.readings(over), 1):
        if as_json:
            print(reading.model_dump_json(), flush=True)
        else:
            cli.print_line(columns(reading), heading=count == 1)
    if server:
        server.shutdown()
        server.server_close()
    log.info("%d readings, of which %d failed", count, watch.failed)
