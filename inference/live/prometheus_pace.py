"""What tells the pace of a device's host, as a Prometheus has it of an exporter with --host-pace-every."""

from __future__ import annotations

import math
from collections.abc import Collection

from benchmark.load.pace_reading import MEANINGS, PROBE, TAKEN
from benchmark.metrics.dcgm_names import NAMES, names_of
from inference.live.prometheus import PrometheusError, Server
from inference.live.prometheus_devices import check_one_exporter, device_name, of_one_device, selector, series_of


def latest_host_probe(server: Server, fields: Collection[str]) -> tuple[float, float] | None:
    """What the probe of the host took (µs) beside the device that a server's config names, and how long ago that was (s); None
    where there is no reading.

    Args:
        fields: of FIELDS, which are asked for as well: where they are another device's, it is not clear whose host is meant.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: there is no answer, there are several devices, exporters or only parts of a device, or the samples are
            no reading.
    """
    names = [*MEANINGS, *(name for field in fields for name in names_of(field))]
    answer = [series_of(one, {*MEANINGS, *NAMES}) for one in server.query(selector(server, names), "vector")]
    if not any(one.name in MEANINGS for one in answer):
        return None
    found = [one for one in of_one_device(answer) if one.name in MEANINGS]
    check_one_exporter({one.exporter for one in found}, found[0])
    values = {one.name: one.samples[-1][1] for one in found}
    probe_s, taken_s = (values.get(name, math.nan) for name in (PROBE, TAKEN))
    whose = device_name(found[0].labels)
    if not (0.0 < probe_s < math.inf and math.isfinite(taken_s)):
        raise PrometheusError(f"prometheus: {PROBE} and {TAKEN} of {whose} are no reading ({probe_s:g} and {taken_s:g}); "
                              "mend its exporter (benchmark/metrics_exporter.py --host-pace-every), or do "
                              "without it: prometheus.host_pace_max_age_s: null")
    return (1e6 * probe_s, found[0].last_s - taken_s)
