"""A profile on a GPU, with stand-ins for what this machine lacks: cuDNN's handle, CUDA's events, and the kernels.

Descriptors, plans, hooks, ranges of the trace and all that is computed from them are real. The last test needs a real GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchvision
from test_forced_convolutions import PretendedCudnn, needs_cudnn

from hase.benchmark.measuring import gpu_trace
from hase.benchmark.measuring.gpu_trace import Recording
from hase.extras.convolutions.profiling import engines, measure
from hase.extras.convolutions.profiling.algorithms import ON_GPU, never_runs, unexpected
from hase.extras.convolutions.profiling.engines import CudnnEngine, ForcedModel, engine_of
from hase.extras.convolutions.profiling.measure import (
    SHORTEST_HOLD_MS,
    Instruments,
    ProfileSettings,
    event_overhead_ms,
    measure_profile,
    time_layers,
)
from hase.extras.convolutions.profiling.results import layer_rows, overall_rows
from hase.records.traces import GpuRun, GpuWork
from hase.utils.fingerprint import has_cuda

pytestmark = pytest.mark.slow


class Event:
    """Pretends to be a CUDA event: the host's clock. The pretended GPU reaches no event before the host waits for it."""

    reached = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces what needs a GPU; returns the cycles for which the GPU was held."""
    held: list[int] = []
    monkeypatch.setattr(engines, "Cudnn", PretendedCudnn)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    monkeypatch.setattr(measure, "draw_images", lambda unit, device: torch.ones(1, 3, unit.input_size, unit.input_size))

    def with_kernels(recording: Recording) -> list[GpuRun]:
        """The real ranges of the run, each with one made-up kernel of half its time, and something set after a pause."""
        return [replace(run, work=(GpuWork("void im2col4d_kernel<float>", run.start_us, run.host_us / 2),
                                   GpuWork("", run.start_us + 0.7 * run.host_us, run.host_us / 10, "gpu_memset")))
                for run in gpu_trace.read(recording)]

    monkeypatch.setattr(measure, "read", with_kernels)
    return held


def profile(algorithm: str, fallback: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    settings = ProfileSettings(model="squeezenet1_1", algorithm=algorithm, gpu="h200", device="cuda", device_name="NVIDIA H200",
                               input_sizes=(64,), warmup=1, measure=3, fallback=fallback)
    fallback_engine = CudnnEngine(ON_GPU["guess"], True) if fallback else None
    forced = ForcedModel(model, CudnnEngine(ON_GPU[algorithm], True), fallback_engine)
    overall, *layers = measure_profile(settings.units[0], forced, Instruments("cuda", energy_s=0.0, event_overhead_ms=0.001))
    return overall, layers


@needs_cudnn
def test_a_profile_on_a_gpu(pretended_gpu: list[int]) -> None:
    run, layers = profile("gemm")
    assert (run.status, run.error) == ("ok", "")
    assert len(layers) == 26
    assert len(pretended_gpu) == 3 * 26 + 26  # before each layer in each run that is timed, and where it is traced
    assert min(pretended_gpu) > 0
    (overall,), rows = overall_rows([run, *layers]), layer_rows([run, *layers])
    assert (overall["layers"], overall["layers_not_supported"], overall["unexpected_kernels"]) == (26, 0, "")
    assert (overall["late_layers"], overall["event_overhead_ms"]) == (0, 0.001)
    assert overall["cupti_ms"] == pytest.approx(sum(row["cupti_ms"] for row in rows), rel=1e-4)
    assert overall["layers_to_cupti"] == pytest.approx(overall["layers_ms"] / overall["cupti_ms"], rel=1e-3)
    assert {(row["ran"], row["cuda_kernels"], row["unexpected_kernels"]) for row in rows} == {
        ("gemm", "void im2col4d_kernel<float>", "")}
    assert all(row["cupti_span_ms"] == pytest.approx(row["cupti_ms"] * 8 / 6, rel=0.02) for row in rows)
    assert all(row["cupti_ms"] > 0 and row["tf32"] == 1 and row["workspace_mib"] > 0 for row in rows)
    assert {(row["launches"], row["ahead_runs"]) for row in rows} == {(2, 3)}
    assert [row["mean_ms"] for row in rows] == pytest.approx([sum(m.samples_ms) / 3 - 0.001 for m in layers], rel=1e-4)
    assert overall["layers_ms"] == pytest.approx(sum(row["mean_ms"] for row in rows), rel=1e-4)


def two_layers() -> tuple[torch.nn.Sequential, torch.Tensor]:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)), torch.ones(1, 3, 32, 32)


def test_runs_in_which_the_gpu_caught_up_do_not_count(pretended_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = two_layers()
    queries = 0

    def query(self: Event) -> bool:  # of the second layer, in the first of the three runs that are timed
        nonlocal queries
        queries += 1
        return queries == 4

    monkeypatch.setattr(Event, "query", query)
    with torch.inference_mode():
        calls = time_layers(lambda: model(images), model, 3, "cuda")
        assert [(len(call.samples_ms), call.ahead_runs) for call in calls] == [(3, 3), (2, 2)]
        assert all(call.host_ms > 0 for call in calls)
        monkeypatch.setattr(Event, "query", lambda self: True)
        calls = time_layers(lambda: model(images), model, 3, "cuda")
    assert [(len(call.samples_ms), call.ahead_runs) for call in calls] == [(3, 0)] * 2  # no better times than these
    assert len(pretended_gpu) == 2 * 3 * 2
    assert min(pretended_gpu) > SHORTEST_HOLD_MS * 2e6


def test_what_events_add_to_a_layer(pretended_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of 3 us that events see as 7 us."""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count // 1024))
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: 0.007)
    work = (GpuWork("relu", 0.0, 3.0),)
    monkeypatch.setattr(measure, "read", lambda recording: [GpuRun(9.0, work)] * recording.runs)
    assert event_overhead_ms() == pytest.approx(0.004)
    monkeypatch.setattr(measure, "read", lambda recording: [GpuRun(9.0, (*work, *work))] * recording.runs)
    assert event_overhead_ms() is None


@needs_cudnn
@pytest.mark.parametrize("fallback", [False, True])
def test_an_algorithm_that_runs_nothing(fallback: bool, pretended_gpu: list[int]) -> None:
    overall, layers = profile("direct", fallback)
    assert overall.error == ("Algorithm direct not compatible with model squeezenet1_1: 26 of 26 layers "
                             "(features.0 and 25 more): CUDNN_STATUS_NOT_SUPPORTED, not this one")
    assert {m.facts["layer_status"] for m in layers} == {"CUDNN_STATUS_NOT_SUPPORTED"}
    assert not pretended_gpu


@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_each_algorithm_on_the_gpu(name: str) -> None:
    """A layer that every algorithm supports runs with torch's output, and launches the CUDA kernels that it should."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3, padding=1)).cuda().eval()
    images = torch.randn(2, 16, 32, 32, device="cuda")
    forced = ForcedModel(model, engine_of(ON_GPU[name], "cuda"))
    forced.plan(images)
    (call,) = forced.calls
    if never_runs(ON_GPU[name], "cuda", torch.cuda.get_device_capability()):
        assert call.status.startswith("CUDNN_STATUS_NOT_SUPPORTED")
        return
    assert (call.status, call.detail) == ("ok", "")
    (traced,) = measure.trace_layers(forced, lambda: model(images), [0.1])
    names = [work.name for work in traced.work]
    direct = "conv2d_grouped_direct" in str(names) and name in ("gemm", "implicit gemm")  # cuDNN's for some small layers
    assert direct or not unexpected(call.algorithm, names)
