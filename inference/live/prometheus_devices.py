"""Selects the series of one device, as one exporter reports it, from what a Prometheus has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.live.prometheus import FOREIGN_SERIES, PrometheusError, Server, quoted
from measuring.metrics.dcgm_names import HOST_LABEL, INDEX_LABEL, NAMES, PART_LABEL, PROFILE_LABEL, UUID_LABEL, names_of

IDENTITY = (UUID_LABEL, INDEX_LABEL, HOST_LABEL, "job", "instance")  # labels that distinguish devices and their exporters
LISTED = 8  # how many devices a message lists


@dataclass(frozen=True)
class Series:
    """Samples of one metric: `(seconds since 1970, value)`, oldest first."""

    name: str
    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def exporter(self) -> tuple[str, str]:
        return self.labels.get("job", ""), self.labels.get("instance", "")

    @property
    def device(self) -> str:
        return self.labels.get(UUID_LABEL) or device_name(self.labels)

    @property
    def whole(self) -> bool:
        """Whether it is of a whole GPU, not of a MIG instance."""
        return not self.labels.get(PART_LABEL)

    @property
    def last_s(self) -> float:
        return self.samples[-1][0]


def selector(server: Server, names: Collection[str], everyone: bool = False) -> str:
    """PromQL that selects metrics of the device in the config, or of `everyone`."""
    labels = {} if everyone else asked_for(server)
    matchers = [f"__name__=~{quoted('|'.join(names))}", *(f"{key}={quoted(value)}" for key, value in labels.items())]
    return "{" + ",".join(matchers) + "}"


def asked_for(server: Server) -> dict[str, str]:
    """The labels of the device and exporter that the config names."""
    job = server.config.job
    return server.config.gpu.labels | ({} if job is None else {"job": job})


def series_of(one: Mapping[str, Any], names: Collection[str]) -> Series:
    """A series from the API's JSON, of a matrix or a vector; a sample of a vector has the time of the answer. Values are
    strings, such as "NaN".

    Raises:
        PrometheusError: it is no series, or of no metric in `names`.
    """
    try:
        labels = dict(one["metric"])
        samples = one["values"] if "values" in one else [one["value"]]
        found = Series(labels.pop("__name__"), labels, [(float(when), float(value)) for when, value in samples])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(FOREIGN_SERIES) from None
    if not found.samples or found.name not in names:
        raise PrometheusError(FOREIGN_SERIES)
    return found


def device_name(labels: Mapping[str, str]) -> str:
    """A device in words that distinguish it from others."""
    place = [f"{what} {labels[key]}" for key, what in ((INDEX_LABEL, "index"), (HOST_LABEL, "host")) if labels.get(key)]
    if labels.get(UUID_LABEL):
        return labels[UUID_LABEL] + (f" ({', '.join(place)})" if place else "")
    return ", ".join(place) if labels.get(HOST_LABEL) else ", ".join([*place, f"instance {labels.get('instance', '?')}"])


def listed(what: Collection[str]) -> str:
    some = sorted(set(what))
    return "; ".join(some[:LISTED]) + (f"; and {len(some) - LISTED} more" if len(some) > LISTED else "")


def of_one_device(series: Sequence[Series]) -> list[Series]:
    """The series of the one device, without those of its MIG instances.

    Raises:
        PrometheusError: they are of several devices, or all of MIG instances.
    """
    devices = {one.device: device_name(one.labels) for one in series}
    if len(devices) > 1:
        raise PrometheusError(f"prometheus: metrics of several devices match: {listed(devices.values())}; set prometheus.gpu "
                              "to one's UUID, or to its index and host")
    whole = [one for one in series if one.whole]
    if not whole:
        parts = listed([f"{PART_LABEL} {one.labels[PART_LABEL]}, {one.labels.get(PROFILE_LABEL, '?')}" for one in series])
        raise PrometheusError(f"prometheus: {device_name(series[0].labels)} is split into MIG instances ({parts}), and only "
                              "these are reported; no instance's load is that of the GPU, for which predictions hold: have the "
                              "whole GPU reported too (dcgm-exporter --devices g), or switch MIG off")
    return whole


def latest_of_one_exporter(server: Server, names: Collection[str], fields: Collection[str]) -> list[Series]:
    """The series called `names` of the one device that a server's config names, as one exporter serves them now; empty where
    there are none. What an exporter stops serving is gone from the answer after its next scrape, as is everything once it is
    down.

    Args:
        server: to ask.
        names: of metrics that one of Hase's exporters serves.
        fields: of FIELDS, queried as well: if they are of another device, it is not clear whose series are meant.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: there is no answer, or there are several devices, several exporters or only MIG instances.
    """
    queried = [*names, *(name for field in fields for name in names_of(field))]
    answer = [series_of(one, {*names, *NAMES}) for one in server.query(selector(server, queried), "vector")]
    if not any(one.name in names for one in answer):
        return []
    found = [one for one in of_one_device(answer) if one.name in names]
    check_one_exporter({one.exporter for one in found}, found[0])
    return found


def of_one_exporter(server: Server, series: Sequence[Series]) -> tuple[list[Series], float]:
    """The series of the one exporter that is up, and the server's time (seconds since 1970).

    A server that has its metrics from another server may not know the exporter; then only the age of the samples shows it.

    Raises:
        PrometheusError: several exporters are up, or the only one is down.
    """
    exporters = sorted({one.exporter for one in series})
    queries = [f"up{{job={quoted(job)},instance={quoted(instance)}}}" for job, instance in exporters]
    answer = server.query(" or ".join([*queries, "vector(time())"]), "vector")
    try:
        now_s = max(float(one["value"][0]) for one in answer)  # the time at which the server computed it
        up = {(one["metric"].get("job", ""), one["metric"].get("instance", "")): float(one["value"][1]) == 1.0
              for one in answer if one["metric"]}  # vector(time()) has no labels
    except (KeyError, TypeError, ValueError, IndexError):
        raise PrometheusError(FOREIGN_SERIES) from None
    running = [exporter for exporter in exporters if up.get(exporter)] if len(exporters) > 1 else exporters
    running = running or exporters
    check_one_exporter(running, series[0])
    if up.get(running[0]) is False:
        raise PrometheusError(f"prometheus: the exporter of {device_name(series[0].labels)} can't be scraped (up is 0): "
                              f"{_described(running)}; its last samples do not show the load of now: repair the exporter")
    return [one for one in series if one.exporter == running[0]], now_s


def check_one_exporter(exporters: Collection[tuple[str, str]], one: Series) -> None:
    """Checks that the device of `one` has one exporter: one pair of job and instance.

    Raises:
        PrometheusError: it has several.
    """
    if len(exporters) > 1:
        raise PrometheusError(f"prometheus: several exporters report {device_name(one.labels)}: {_described(exporters)}; name "
                              "one's job in prometheus.job")


def _described(exporters: Collection[tuple[str, str]]) -> str:
    return listed([f"job {job}, instance {instance}" for job, instance in exporters])
