"""Serves this machine's metrics, or replayed ones, to Prometheus where NVIDIA's dcgm-exporter is missing.

Names, labels and units are those of dcgm-exporter: the old names, or with `--names new` those since its version 4.9, some of
which have other units. The values are means over `--interval` seconds, from any source of benchmark/metrics/sources.py.
`hase_exporter_last_sample_timestamp_seconds` is the time of the latest sample, and `hase_gpu_processes` the number of other
processes that have the GPU open. Samples that can't be right are never served. If the latest good sample is older than three
intervals, the answer is HTTP 503 with the reason, so that Prometheus sees the target as down and does not take old values for
new ones.

With --probe-every, the sharing probe (benchmark/sharing_probe.py) runs regularly, and `hase_probe_…` show how long work waits
for other processes. The other metrics do not show that, so predictions from Prometheus become more accurate. With
--host-pace-every, the host pace is measured regularly (benchmark/host_pace.py) and served as `hase_host_probe_…`: small models
take longer on a slow host. A probe that fails, or whose latest result is older than three of its intervals, is left out alone.

With --web-config it speaks TLS, asks for a password, or both; docs/operating.md has an example, alert rules and a dashboard.

Reads only the device, or a file with --source replay; writes nothing. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import platform
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from prometheus_client.core import GaugeMetricFamily

from hase.benchmark.metrics.names import (
    DEVICE_LABEL,
    FIELDS,
    HOST_LABEL,
    INDEX_LABEL,
    MEANINGS,
    MODEL_LABEL,
    NAMES,
    OWN_LABELS,
    UUID_LABEL,
    TimedProbeSummary,
    new_metric_name,
    probe_to_samples,
)
from hase.benchmark.metrics.source import MetricMean, MetricSource, OpenWindow
from hase.benchmark.metrics.sources import SOURCES, open_source
from hase.benchmark.ort.probes import SharingProbe, check_gpu, measure_pace
from hase.records import host_pace
from hase.records.host_pace import HostProbeReading
from hase.records.probe_reading import summarise_probe
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine, resolve_device
from hase.utils.logger import get_logger
from hase.utils.processes import stop_event
from hase.utils.sharing_mode import other_processes
from hase.utils.web_server import LOCALHOST, gauge, scrape_server, stale_reason

EXAMPLES = """
  python benchmark/metrics_exporter.py
  python benchmark/metrics_exporter.py --probe-every 15 --host-pace-every 60
  python benchmark/metrics_exporter.py --port 9401 --interval 2 --source psutil --names new
  python benchmark/metrics_exporter.py --host 0.0.0.0 --web-config web.yml  # needs web.yml and certificates
  python benchmark/metrics_exporter.py --source replay --replay readings.jsonl --duration 60  # needs readings
"""
PORT = 9400  # dcgm-exporter's
INTERVAL_S = 5.0
LEAST_PROBE_EVERY_S = 1.0  # a probe keeps the device busy for up to a third of this
PACE_S = 0.3  # length of one measurement of the host pace
POLL_S = 3600.0  # how often the server checks for its end; rarely, since it ends with the process and a check costs CPU time
TEMPORARY = (UserError, OSError, MemoryError)  # failures of the device or machine that may pass
PROCESSES = "hase_gpu_processes"
LAST_SAMPLE = "hase_exporter_last_sample_timestamp_seconds"

log = get_logger("metrics_exporter")
_probe_lock = threading.Lock()  # probes that run at the same time would disturb each other


def log_if_new(error: Exception, previous: str, prefix: str = "") -> str:
    """Returns an error's message, and logs it after `prefix` unless it is the `previous` one; bugs with their tracebacks."""
    message = str(error) or type(error).__name__
    if message != previous:
        log.warning("%s%s", prefix, message, exc_info=None if isinstance(error, TEMPORARY) else error)
    return message


@dataclass
class Sampler:
    """Takes one sample per interval."""

    source: MetricSource
    interval_s: float
    means: dict[str, MetricMean] = field(default_factory=dict)  # the latest good sample; empty before the first
    sampled_s: float = 0.0  # its time, seconds since 1970
    error: str = ""  # why there is no newer one; "" while all is well

    def run(self, stop: threading.Event) -> None:
        """Samples until `stop` is set."""
        window: OpenWindow | None = None
        while True:
            following = None
            try:
                following = self.source.start()
                if window:
                    self.means, self.sampled_s, self.error = self.source.stop(window), time.time(), ""
            except Exception as error:  # noqa: BLE001 - without this thread the exporter would stay at HTTP 503
                self.error = log_if_new(error, self.error)
            window = following
            if stop.wait(self.interval_s):
                return

    def trouble(self) -> str:
        """Why there is nothing to serve; "" if the latest sample is recent enough."""
        return stale_reason("sound sample", self.sampled_s, self.interval_s, self.error)


class ProcessCount(NamedTuple):
    """Number of other processes on the GPU, and when they were counted (seconds since 1970)."""

    processes: int
    taken_s: float


R = TypeVar("R", bound=TimedProbeSummary | HostProbeReading | ProcessCount)  # what a probe finds, with its time


@dataclass
class RegularProbe(ABC, Generic[R]):
    """Runs a probe at intervals; its failure affects nothing else."""

    device: str
    every_s: float  # period of the probe
    latest: R | None = None  # the latest result; None before the first
    error: str = ""  # why there is no newer one; "" while all is well
    name: ClassVar[str] = ""  # in log messages

    @abstractmethod
    def probe(self) -> R:
        """Runs the probe once. UserError if it fails."""

    def run(self, stop: threading.Event) -> None:
        """Runs the probe at intervals until `stop` is set."""
        self.update()
        while not stop.wait(self.every_s):
            self.update()

    def update(self) -> None:
        """Runs the probe once; a failure is logged if it differs from the last one."""
        try:
            with _probe_lock:
                self.latest, self.error = self.probe(), ""
        except Exception as error:  # noqa: BLE001 - as in Sampler.run
            self.error = log_if_new(error, self.error, f"{self.name}: ")

    def recent(self) -> R | None:
        """The latest result, if recent enough to be served."""
        latest = self.latest
        return None if latest is None or stale_reason("reading", latest.taken_s, self.every_s, self.error) else latest


@dataclass
class ProbeSampler(RegularProbe[TimedProbeSummary]):
    """Runs the sharing probe, with sessions that stay open."""

    _session: SharingProbe | None = None
    name: ClassVar[str] = "the sharing probe"

    def probe(self) -> TimedProbeSummary:
        self._session = self._session or SharingProbe(self.device)  # if memory was full before, try again
        return TimedProbeSummary(summarise_probe(self._session.read()), time.time())


@dataclass
class PaceSampler(RegularProbe[HostProbeReading]):
    """Measures the host pace, with a session that stays open."""

    name: ClassVar[str] = "the host pace"

    def probe(self) -> HostProbeReading:
        return HostProbeReading(measure_pace(self.device, PACE_S).probe_us, time.time())


@dataclass
class ProcessSampler(RegularProbe[ProcessCount]):
    """Counts the other processes on the GPU."""

    own_probes: Sequence[RegularProbe[Any]] = ()  # probes that this process runs on the device
    name: ClassVar[str] = "the count of processes"

    def probe(self) -> ProcessCount:
        return ProcessCount(other_processes(own=any(probe.latest for probe in self.own_probes)), time.time())


@dataclass(frozen=True, eq=False)  # a registry keeps it by identity
class DeviceMetrics:
    """The metrics to serve, as a collector of `prometheus_client`."""

    sampler: Sampler
    labels: dict[str, str]
    new_names: bool = False
    probes: ProbeSampler | None = None
    paces: PaceSampler | None = None
    counts: ProcessSampler | None = None

    def collect(self) -> Iterator[Any]:
        """Metric families of the latest sample and of recent probe results."""
        for name, mean in self.sampler.means.items():
            shown = new_metric_name(name) if self.new_names else name
            yield gauge(shown, f"{FIELDS[name].meaning} ({NAMES[shown].unit})", mean.value / NAMES[shown].scale, self.labels)
        yield GaugeMetricFamily(LAST_SAMPLE, "time of the latest good sample (s since 1970)", value=self.sampler.sampled_s)
        if count := self.counts and self.counts.recent():
            yield gauge(PROCESSES, "processes that have the GPU open to compute, without the exporter", count.processes,
                        self.labels)
        if pace := self.paces and self.paces.recent():
            for name, value in ((host_pace.PROBE, pace.probe_us / 1e6), (host_pace.TAKEN, pace.taken_s)):
                yield gauge(name, host_pace.PACE_MEANINGS[name], value, self.labels)
        probed = self.probes and self.probes.recent()
        if not probed:
            return
        families = {name: GaugeMetricFamily(name, meaning, labels=[*self.labels, *OWN_LABELS[name]])
                    for name, meaning in MEANINGS.items()}
        for sample in probe_to_samples(probed):
            families[sample.name].add_metric([*self.labels.values(), *sample.labels.values()], sample.value)
        yield from families.values()


def device_labels(device: str, replay: Path | None) -> dict[str, str]:
    """dcgm-exporter's labels for the device `cuda` or `cpu`, or for a replayed file."""
    if replay is not None:  # each file counts as a device
        index, uuid, name, model = "0", f"replay-{replay.stem}", "replay", replay.stem
    elif device == "cpu":  # a machine's identifier must not be published
        index, uuid, name, model = "", platform.node(), "cpu", machine(device).device_name
    else:
        this_machine = machine(device)
        index, uuid, name, model = "0", this_machine.uuid, "nvidia0", this_machine.device_name
    return {INDEX_LABEL: index, UUID_LABEL: uuid, DEVICE_LABEL: name, MODEL_LABEL: model, HOST_LABEL: platform.node()}


def serve(args: argparse.Namespace) -> None:
    """Serves until a signal, or for the time that the arguments give."""
    stop = stop_event()
    device = "cpu" if args.source == "psutil" else resolve_device("auto")
    source = open_source(device, source=args.source, dcgm_address=args.dcgm_address, replay=args.replay,
                         replay_step_s=args.replay_step)
    if args.interval < source.minimum_window_s:
        raise UserError(f"--interval {args.interval:g}: {source.name} needs {source.minimum_window_s:g} s at least")
    sampler = Sampler(source, args.interval)
    if args.host_pace_every and device != "cuda":
        check_gpu()
    probes = ProbeSampler(device, args.probe_every) if args.probe_every else None
    paces = PaceSampler(device, args.host_pace_every) if args.host_pace_every else None
    on_gpu = device == "cuda" and args.replay is None
    counts = ProcessSampler(device, args.interval, own_probes=[probe for probe in (probes, paces) if probe]) if on_gpu else None
    metrics = DeviceMetrics(sampler, device_labels(device, args.replay), args.names == "new", probes, paces, counts)
    server = scrape_server(metrics, sampler.trouble, args.host, args.port, args.web_config)
    for running in (sampler, probes, paces, counts):
        if running:
            threading.Thread(target=running.run, args=(stop,), daemon=True).start()
    threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
    if args.json:
        cli.print_json({"url": server.url, "source": source.name, "fields": list(source.fields)})
    else:
        print(f"{server.url}: {source.name}, every {args.interval:g} s")
    sys.stdout.flush()
    began_s, used_s = time.monotonic(), time.process_time()
    stop.wait(args.duration)
    lasted_s, used_s = time.monotonic() - began_s, time.process_time() - used_s
    log.info("served for %.0f s, which took %.2f %% of a core", lasted_s, 100 * used_s / lasted_s)
    server.server_close()


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--port", type=cli.port, default=PORT, help=f"0: a free one (default: {PORT})")
    parser.add_argument("--host", default=LOCALHOST, metavar="ADDRESS",
                        help=f"address to listen on; 0.0.0.0: all addresses of this machine (default: {LOCALHOST})")
    cli.add_web_config(parser)
    parser.add_argument("--interval", type=cli.positive, default=INTERVAL_S, metavar="S",
                        help=f"each value is a mean over this many seconds (default: {INTERVAL_S:g})")
    parser.add_argument("--source", choices=SOURCES, default="auto",
                        help="source of the metrics (default: auto, which logs its choice)")
    parser.add_argument("--names", choices=("old", "new"), default="old",
                        help="names of dcgm-exporter before 4.9, or since (default: old)")
    parser.add_argument("--dcgm-address", metavar="HOST[:PORT]", help="address of a running nv-hostengine, for --source dcgm")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="samples to replay, for --source replay")
    parser.add_argument("--replay-step", type=cli.positive, metavar="S",
                        help="seconds between two samples of it (default: by their timestamps)")
    parser.add_argument("--probe-every", type=cli.positive, metavar="S",
                        help="run the sharing probe every S seconds and serve its results; it keeps the device busy with small "
                             "work for a fifth of a second each time, and uses some of its memory (default: never)")
    parser.add_argument("--host-pace-every", type=cli.positive, metavar="S",
                        help="measure the host pace every S seconds and serve it; it dispatches small work to the GPU for a "
                             "third of a second each time (default: never)")
    parser.add_argument("--duration", type=cli.positive, metavar="S", help="seconds to serve (default: until a signal)")
    args = parser.parse_args()
    for option, every_s in (("--probe-every", args.probe_every), ("--host-pace-every", args.host_pace_every)):
        if every_s and every_s < LEAST_PROBE_EVERY_S:
            parser.error(f"{option} {every_s:g}: {LEAST_PROBE_EVERY_S:g} s at least, since each run of the probe keeps the "
                         "device busy for a part of a second")
        if every_s and args.source == "replay":
            parser.error(f"{option}: --source replay has no device to probe, only a file; leave {option} out")
    cli.start(args)
    serve(args)
    return 0


if __name__ == "__main__":
    cli.run(main)
