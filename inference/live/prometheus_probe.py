"""The sharing probe's last reading as a Prometheus has it, of an exporter with --probe-every.

One instant query tells: what an exporter serves no longer (waits, where nothing waited; another mode of sharing) is gone from
the answer with its next scrape, and so is all of an exporter that is down.
"""

from __future__ import annotations

from collections.abc import Collection

from benchmark.load.probe_metrics import MEANINGS, Sample, Unreadable, probed_of
from benchmark.load.probe_reading import ProbeSummary
from benchmark.metrics.dcgm_names import NAMES, names_of
from inference.live.prometheus import PrometheusError, Server
from inference.live.prometheus_devices import check_one_exporter, device_name, of_one_device, selector, series_of


def latest_probe(server: Server, fields: Collection[str]) -> tuple[ProbeSummary, float] | None:
    """The last reading on the device that a server's config names, and its age (s); None where there is none.

    Args:
        fields: of FIELDS, which are asked for as well: where they are another device's, it is not clear whose reading is meant.

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
    try:
        probed = probed_of(Sample(one.name, one.labels, one.samples[-1][1]) for one in found)
    except Unreadable as error:
        raise PrometheusError(f"prometheus: the sharing probe's reading of {device_name(found[0].labels)} is none: "
                              f"{error.fact}; mend its exporter (benchmark/metrics_exporter.py --probe-every), or do without "
                              "it: prometheus.probe_max_age_s: null") from None
    return probed.summary, found[0].last_s - probed.taken_s
