"""The time of a host's probe from a Prometheus, of an exporter with --host-pace-every. The host's pace follows from it."""

from __future__ import annotations

import math
from collections.abc import Collection

from inference.live.prometheus import PrometheusError, Server
from inference.live.prometheus_devices import device_name, latest_of_one_exporter
from records.host_pace import MEANINGS, PROBE, TAKEN


def latest_host_probe(server: Server, fields: Collection[str]) -> tuple[float, float] | None:
    """The time of the host's probe (µs) for the device that a server's config names, and its age (s); None where there is none.

    Arguments and errors are those of `latest_of_one_exporter`; `PrometheusError` too where the samples are no reading.
    """
    found = latest_of_one_exporter(server, MEANINGS, fields)
    if not found:
        return None
    values = {one.name: one.samples[-1][1] for one in found}
    probe_s, taken_s = (values.get(name, math.nan) for name in (PROBE, TAKEN))
    whose = device_name(found[0].labels)
    if not (0.0 < probe_s < math.inf and math.isfinite(taken_s)):
        raise PrometheusError(f"prometheus: {PROBE} and {TAKEN} of {whose} are no reading ({probe_s:g} and {taken_s:g}); "
                              "mend its exporter (benchmark/metrics_exporter.py --host-pace-every), or do "
                              "without it: prometheus.host_pace_max_age_s: null")
    return (1e6 * probe_s, found[0].last_s - taken_s)
