"""Times a model in a CUDA session."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from measuring.quiet_host import all_samples_ms
from measuring.run_times import Effort
from recipes.kinds.manifest import MadeModel
from recipes.kinds.node_lists import feed_of
from runtimes.ort.graph.source import read_source
from runtimes.ort.probes import host_probe
from runtimes.ort.runner import Runner, bind
from utils.ort_sessions import model_errors, open_session
from utils.timing import summarize

MOST_RUNS = 10 ** 6  # a measurement ends by time, not by the number of runs


class GpuLatency(BaseModel):
    """The latency of a model on the GPU, in ms: median and 95th percentile of `runs` runs.

    Attributes:
        io: `device`: tensors stay on the device; `host`: numpy in and out.
        host_probe_us: time of the host probe meanwhile (measuring/quiet_host.py).
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    latency_ms: float | None = None
    p95_ms: float | None = None
    runs: int = 0
    io: str = ""
    host_probe_us: float | None = None
    error: str = ""


def gpu_latency(model: MadeModel, path: Path, way: str, budget_s: float, device: str = "cuda") -> GpuLatency:
    """Times a CUDA session (in tests one of `cpu`) together with the host probe. Tensors stay on the device, unless inputs or
    outputs can't (maps, for example)."""
    probe = host_probe(device)
    session = open_session(path, device, dims=model.dims if way == "static" else None, name=model.name)
    feed = feed_of(session, model.dims, read_source(path, model.dims).steering)
    io = "device" if all(value.type.startswith("tensor(") and "string" not in value.type
                         for value in (*session.get_inputs(), *session.get_outputs())) else "host"
    runner = Runner(session=session, name=model.name, device=device, io=io,
                    run_once=bind(session, feed, device, io))
    runner.warm_up(5)
    with model_errors(model.name):
        timed = all_samples_ms(probe, runner.run_s, Effort(budget_s=budget_s, least_runs=20, most_runs=MOST_RUNS))
    statistics = summarize(timed.samples_ms)
    return GpuLatency(model=model.name, way=way, latency_ms=statistics.median_ms, p95_ms=statistics.p95_ms,
                      runs=statistics.runs, io=io, host_probe_us=timed.probe_us)
