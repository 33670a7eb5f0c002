"""The sharing probe's last reading from a Prometheus, of an exporter with --probe-every.

One instant query is enough: what no longer holds, such as waits or another sharing mode, is gone after the exporter's next
scrape.
"""

from __future__ import annotations

from collections.abc import Collection

from inference.live.prometheus import PrometheusError, Server
from inference.live.prometheus_devices import device_name, latest_of_one_exporter
from measuring.metrics.probe_metrics import MEANINGS, Sample, Unreadable, probed_of
from records.probe_reading import ProbeSummary


def latest_probe(server: Server, fields: Collection[str]) -> tuple[ProbeSummary, float] | None:
    """The last reading on the device that a server's config names, and its age (s); None where there is none.

    Arguments and errors are those of `latest_of_one_exporter`; `PrometheusError` too where the samples are no reading.
    """
    found = latest_of_one_exporter(server, MEANINGS, fields)
    if not found:
        return None
    try:
        probed = probed_of(Sample(one.name, one.labels, one.samples[-1][1]) for one in found)
    except Unreadable as error:
        raise PrometheusError(f"prometheus: the sharing probe's reading of {device_name(found[0].labels)} is none: "
                              f"{error.fact}; mend its exporter (benchmark/metrics_exporter.py --probe-every), or do without "
                              "it: prometheus.probe_max_age_s: null") from None
    return probed.summary, found[0].last_s - probed.taken_s
