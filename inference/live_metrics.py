"""The metrics of one device from Prometheus: means over the window that ends now, of samples that can be believed.

The raw samples of all metrics come in one query, and whether their exporter is up in a second: `avg_over_time` would answer
with a number although the exporter is dead, frozen, or reported NaN or a blank in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.metric_fields import FIELDS
from benchmark.soundness import OVERSHOOT
from inference.prometheus import FOREIGN_SERIES, PrometheusConfig, PrometheusError, Server, quoted

Names = Mapping[str, Sequence[tuple[str, float]]]
SAME_NAMES: Names = {field: ((field, 1.0),) for field in FIELDS}
IDENTITY = ("UUID", "gpu", "Hostname", "job", "instance")  # labels that tell devices and their exporters apart
LONG_AGO = "1h"  # how far back the reason is looked for where the window holds nothing
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
    def last_s(self) -> float:
        return self.samples[-1][0]


def live_metrics(server: Server, fields: Collection[str], names: Names = SAME_NAMES) -> dict[str, float]:
    """The mean of each field over the config's window, in the units of FIELDS.

    Args:
        names: under which names exporters report a field, and what turns their value into FIELDS' unit by multiplication;
            where several are there, the one with the newest sample counts, else the first.

    Raises:
        UserError: the config's secrets or certificates can't be read.
        PrometheusError: no answer, several devices, or samples that are missing, too old, of a dead exporter, or no possible
            values; it says which and what to do.
    """
    config = server.config
    wanted = [name for field in fields for name, _ in names[field]]
    answer = server.query(f"{_selector(wanted, config)}[{config.window_s * 1e3:.0f}ms]", "matrix")
    series = [_series(one) for one in answer]
    if not series:
        raise _nothing(server, wanted)
    series, now_s = _of_one_exporter(server, _of_one_device(series))
    missing, means = [], {}
    for field in fields:
        factors = dict(names[field])
        found = [one for one in series if one.name in factors]
        if not found:
            missing.append(field)
            continue
        newest = max(found, key=lambda one: (one.last_s, -list(factors).index(one.name)))
        values = [value * factors[newest.name] for one in found if one.name == newest.name for _, value in one.samples]
        means[field] = _mean(field, newest, values, now_s, config)
    if missing:
        raise _missing(server, missing, names, series[0])
    return means


def _selector(names: Collection[str], config: PrometheusConfig, everyone: bool = False) -> str:
    """PromQL for metrics of the device that is asked for, or of `everyone`. GPU_I_ID is set on parts of a GPU (MIG)."""
    labels = {"GPU_I_ID": ""} if everyone else {"GPU_I_ID": "", **config.gpu.labels}
    if config.job is not None and not everyone:
        labels["job"] = config.job
    told = [f"__name__=~{quoted('|'.join(dict.fromkeys(names)))}", *(f"{key}={quoted(value)}" for key, value in labels.items())]
    return "{" + ",".join(told) + "}"


def _series(one: Mapping[str, Any]) -> Series:
    """A series of the API's JSON. Values are strings, "NaN" too."""
    try:
        labels = dict(one["metric"])
        found = Series(labels.pop("__name__"), labels, [(float(when), float(value)) for when, value in one["values"]])
    except (KeyError, TypeError, ValueError):
        raise PrometheusError(FOREIGN_SERIES) from None
    if not found.samples:
        raise PrometheusError(FOREIGN_SERIES)
    return found


def _device(labels: Mapping[str, str]) -> str:
    """A device in the user's words, which tell it from others."""
    place = [f"{what} {labels[key]}" for key, what in (("gpu", "index"), ("Hostname", "host")) if labels.get(key)]
    if labels.get("UUID"):
        return labels["UUID"] + (f" ({', '.join(place)})" if place else "")
    return ", ".join(place) if labels.get("Hostname") else ", ".join([*place, f"instance {labels.get('instance', '?')}"])


def _listed(what: Collection[str]) -> str:
    some = sorted(set(what))
    return "; ".join(some[:LISTED]) + (f"; and {len(some) - LISTED} more" if len(some) > LISTED else "")


def _of_one_device(series: Sequence[Series]) -> Sequence[Series]:
    devices = {one.labels.get("UUID") or _device(one.labels): _device(one.labels) for one in series}
    if len(devices) > 1:
        raise PrometheusError(f"prometheus: metrics of several devices match: {_listed(devices.values())}; set prometheus.gpu "
                              "to one's UUID, or to its index and host")
    return series


def _of_one_exporter(server: Server, series: Sequence[Series]) -> tuple[list[Series], float]:
    """The series of the one exporter that is up, and the server's time (seconds since 1970).

    A server that was told the metrics by another one may not know of the exporter; then only the samples' age tells.
    """
    exporters = sorted({one.exporter for one in series})
    asked = [f"up{{job={quoted(job)},instance={quoted(instance)}}}" for job, instance in exporters]
    answer = server.query(" or ".join([*asked, "vector(time())"]), "vector")
    try:
        now_s = max(float(one["value"][0]) for one in answer)  # when the server worked it out
        up = {(one["metric"].get("job", ""), one["metric"].get("instance", "")): float(one["value"][1]) == 1.0
              for one in answer if one["metric"]}  # vector(time()) has no labels
    except (KeyError, TypeError, ValueError, IndexError):
        raise PrometheusError(FOREIGN_SERIES) from None
    running = [exporter for exporter in exporters if up.get(exporter)] if len(exporters) > 1 else exporters
    running = running or exporters
    described = _listed([f"job {job}, instance {instance}" for job, instance in running])
    if len(running) > 1:
        raise PrometheusError(f"prometheus: several exporters report {_device(series[0].labels)}: {described}; name one's job "
                              "in prometheus.job")
    if up.get(running[0]) is False:
        raise PrometheusError(f"prometheus: the exporter of {_device(series[0].labels)} can't be scraped (up is 0): "
                              f"{described}; what is left of its samples is no load of now: mend the exporter")
    return [one for one in series if one.exporter == running[0]], now_s


def _mean(field: str, series: Series, values: Sequence[float], now_s: float, config: PrometheusConfig) -> float:
    """The mean of a field's values, if each can be believed; `series` holds the newest. A hair above the limit is the limit."""
    age_s = now_s - series.last_s
    if age_s > config.max_age_s:
        raise PrometheusError(f"prometheus: {series.name} of {_device(series.labels)} is stale: its newest sample is "
                              f"{age_s:.1f} s old, max_age_s is {config.max_age_s:g}; mend its exporter, or raise max_age_s if "
                              "it is scraped less often")
    limit = FIELDS[field].maximum
    for value in values:
        if not math.isfinite(value) or not 0.0 <= value <= limit * OVERSHOOT:
            raise PrometheusError(f"prometheus: {series.name} of {_device(series.labels)} was {value:g} within the last "
                                  f"{config.window_s:g} s; possible is 0 to {limit:g} {FIELDS[field].unit}: mend its exporter, "
                                  "or wait until the window has passed")
    return min(sum(values) / len(values), limit)


def _nothing(server: Server, wanted: Collection[str]) -> PrometheusError:
    """Why the window holds not one sample of the device: who was there before, and who is down."""
    config = server.config
    seen = [one["metric"] for one in server.query(
        f"count by ({', '.join(IDENTITY)}) (last_over_time({_selector(wanted, config, everyone=True)}[{LONG_AGO}]))", "vector")]
    labels = config.gpu.labels | ({"job": config.job} if config.job is not None else {})
    same = [one for one in seen if all(one.get(label) == value for label, value in labels.items())]
    down = _down(server)
    if same:
        return PrometheusError(f"prometheus: no sample of {_listed([_device(one) for one in same])} within window_s "
                               f"{config.window_s:g}, though there were some within {LONG_AGO}: its exporter is dead, no "
                               f"longer scraped, or scraped less often{down}")
    asked = ", ".join(filter(None, (str(config.gpu), config.job and f"job {config.job}")))
    if seen:
        there = _listed([f"{_device(one)}, job {one.get('job', '?')}" for one in seen])
        return PrometheusError(f"prometheus: no metrics of {asked}; there are those of {there}: set prometheus.gpu and "
                               f"prometheus.job to what is there{down}")
    return PrometheusError(f"prometheus.url {config.url}: HTTP 200, but it knows none of the metrics {', '.join(wanted)}: "
                           f"have it scrape an exporter that reports them{down}")


def _missing(server: Server, fields: Sequence[str], names: Names, other: Series) -> PrometheusError:
    """What to do about fields that are not there, though `other` is."""
    told = ", ".join(" or ".join(name for name, _ in names[field]) for field in fields)
    return PrometheusError(f"prometheus: no sample of {told} within window_s {server.config.window_s:g}, though "
                           f"{_device(other.labels)} reports {other.name}; these predictors need it: add it to the "
                           "exporter's list of metrics (dcgm-exporter leaves some out by default)")


def _down(server: Server) -> str:
    """The scrape targets that are down, as the end of a message; empty where none is."""
    found = [one["metric"] for one in server.query("up == 0", "vector")]
    down = _listed([f"job {one.get('job', '?')}, instance {one.get('instance', '?')}" for one in found])
    return f"; can't be scraped at present: {down}" if found else ""
