"""What a profile does on a GPU, with stand-ins for what is not here: cuDNN's handle, CUDA's events, and the kernels.

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

from benchmark.convolutions import engines, measure
from benchmark.convolutions.algorithms import ON_GPU, never_runs, unexpected
from benchmark.convolutions.engines import CudnnEngine, engine_of
from benchmark.convolutions.forced import ForcedModel
from benchmark.convolutions.measure import Instruments, measure_profile
from benchmark.convolutions.profile_unit import ProfileSettings
from benchmark.convolutions.results import layer_rows, overall_rows
from benchmark.traces import gpu_trace
from benchmark.traces.gpu_trace import GpuRun, GpuWork, Recording
from utils.fingerprint import has_cuda


class Event:
    """Pretends to be a CUDA event: the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s)


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
        """The real ranges of the run, each with one made-up kernel of half its time."""
        return [replace(run, work=(GpuWork("void im2col4d_kernel<float>", run.start_us, run.host_us / 2),))
                for run in gpu_trace.read(recording)]

    monkeypatch.setattr(measure, "read", with_kernels)
    return held


def profile(algorithm: str, fallback: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    settings = ProfileSettings(model="squeezenet1_1", algorithm=algorithm, gpu="h200", device="cuda", device_name="NVIDIA H200",
                               input_sizes=(64,), warmup=1, measure=3, fallback=fallback)
    other = CudnnEngine(ON_GPU["guess"], True) if fallback else None
    forced = ForcedModel(model, CudnnEngine(ON_GPU[algorithm], True), other)
    whole, *layers = measure_profile(settings.units[0], forced, Instruments("cuda", energy_s=0.0))
    return whole, layers


@needs_cudnn
def test_a_profile_on_a_gpu(pretended_gpu: list[int]) -> None:
    whole, layers = profile("gemm")
    assert (whole.status, whole.error) == ("ok", "")
    assert len(layers) == 26
    assert len(pretended_gpu) == 3  # before each run whose layers are timed
    assert min(pretended_gpu) > 0
    (overall,), rows = overall_rows([whole, *layers]), layer_rows([whole, *layers])
    assert (overall["layers"], overall["layers_not_supported"], overall["unexpected_kernels"]) == (26, 0, "")
    assert overall["cupti_ms"] == pytest.approx(sum(row["cupti_ms"] for row in rows), rel=1e-4)
    assert overall["layers_to_cupti"] == pytest.approx(overall["layers_ms"] / overall["cupti_ms"], rel=1e-3)
    assert {(row["ran"], row["cuda_kernels"], row["unexpected_kernels"]) for row in rows} == {
        ("gemm", "void im2col4d_kernel<float>", "")}
    assert all(row["cupti_ms"] > 0 and row["tf32"] == 1 and row["workspace_mib"] > 0 for row in rows)


@needs_cudnn
def test_cudnns_choice_is_named(pretended_gpu: list[int]) -> None:
    whole, layers = profile("guess")
    assert whole.status == "ok"
    assert {m.facts["ran"] for m in layers} == {"gemm"}


@needs_cudnn
@pytest.mark.parametrize("fallback", [False, True])
def test_an_algorithm_that_runs_nothing(fallback: bool, pretended_gpu: list[int]) -> None:
    whole, layers = profile("direct", fallback)
    assert whole.error == ("Algorithm direct not compatible with model squeezenet1_1: 26 of 26 layers "
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
    (traced,) = measure.trace_layers(forced, lambda: model(images))
    assert not unexpected(ON_GPU[call.algorithm], [work.name for work in traced.work])
