"""Times a session as a user opens it, and the memory that it takes, for the evaluator."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil
import pynvml

from measuring.quiet_host import quiet_samples_ms
from records.measurement import Measurement
from runtimes.ort.host_probe import host_probe
from runtimes.ort.runner import open_runner
from runtimes.protocol import Reply, Request
from utils.fingerprint import gpu_facts


def time_session(request: Request) -> Reply:
    """Times a whole model's runs as the request's one label says, and the memory that opening and running it took.

    The label is `latency`, `host_io` (numpy arrays in and out) or `cuda_graph`.
    """
    (label,) = request.labels or ("latency",)
    path, device, effort = Path(request.paths[0]), request.device, request.effort
    # opened first, so that its session does not count as the model's memory
    probe = host_probe(device) if request.watch_host else None
    before_mib = memory_in_use_mib(device)
    runner = open_runner(path, device, dims=request.dims, io="host" if label == "host_io" else "device",
                         cuda_graph=label == "cuda_graph", static=request.static)
    if probe:
        runner.warm_up(effort.warmup)
        found = quiet_samples_ms(probe, {label: runner.run_s}, effort)[label]._asdict()
    else:
        found = {"samples_ms": runner.time(warmup=effort.warmup, budget_s=effort.budget_s).samples_ms}
    name = request.model_name
    return Reply(measurements=(Measurement(subject="model", id=name, label=label, context=name, place="alone", **found),),
                 memory_mib=memory_in_use_mib(device) - before_mib)


def memory_in_use_mib(device: str) -> float:
    """Memory that this process holds on the CPU, or that all processes hold on the GPU, in MiB."""
    if device == "cuda":
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu_facts()["uuid"])).used / 2**20
    with suppress(OSError, AttributeError):  # without malloc_trim, memory figures are rough
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # give back what earlier models left, or it hides what this one takes
    return psutil.Process().memory_info().rss / 2**20
