"""The profiler on a CPU with a real model: its tables, how it resumes, what fails, and the staged scripts. On a GPU with
stand-ins for cuDNN's handle, CUDA's events, and the kernels."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from command import printed, run_script
from test_forced_convolutions import PretendedCudnn, needs_cudnn

from hase.benchmark.measuring import gpu_trace
from hase.benchmark.measuring.blocks import Steadiness
from hase.benchmark.measuring.gpu_trace import Recording
from hase.extras.convolutions.profiler import UnifiedProfiler, described
from hase.extras.convolutions.profiling import engines, measure
from hase.extras.convolutions.profiling.algorithms import CPU_ALGORITHMS, GPU_ALGORITHMS, NotSupported
from hase.extras.convolutions.profiling.engines import CudnnEngine, ForcedModel, LayerPlan, TorchEngine
from hase.extras.convolutions.profiling.listing import status_rows
from hase.extras.convolutions.profiling.measure import (
    SHORTEST_HOLD_MS,
    Instruments,
    ProfileSettings,
    measure_profile,
    time_layers,
)
from hase.extras.convolutions.profiling.results import LAYERS, OVERALL, layer_rows, overall_rows, write_settings
from hase.records.measurement import read_blocks
from hase.records.traces import GpuRun, GpuWork
from hase.utils.locks import sole_writer
from hase.utils.paths import ROOT

pytestmark = pytest.mark.slow

SCRIPT = "extras/convolutions/run_profile.py"
MODEL = "squeezenet1_1"
QUICKLY = ("--model", MODEL, "--algorithm", "default", "--device", "cpu", "--test", "--min-size", "64", "--max-size", "72",
           "--energy-seconds", "0.05")
AT_ONCE = Steadiness(attempts=1, patience_s=0.0)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as table:
        return list(csv.DictReader(table))


def settings(**changes: object) -> ProfileSettings:
    facts = {"model": MODEL, "algorithm": "default", "gpu": "cpu", "device": "cpu", "device_name": "a CPU", "tf32": False,
             "input_sizes": (64,), "warmup": 1, "measure": 3}
    return ProfileSettings.model_validate(facts | changes)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torchvision.models.squeezenet1_1().eval()


def test_the_tables_and_how_a_run_resumes(tmp_path: Path) -> None:
    printed(SCRIPT, *QUICKLY, "--workspace", tmp_path)
    folder = tmp_path / "extras" / "convolutions" / "results" / "1_sanity" / f"{MODEL}_default_cpu"
    (first,) = rows(folder / f"{MODEL}_default_overall.csv")
    (again,) = json.loads(printed(SCRIPT, *QUICKLY, "--workspace", tmp_path, "--json"))  # nothing is measured
    assert len(read_blocks(folder / "measurements.jsonl")) == 1
    assert again["mean"] == float(first["mean"])
    printed(SCRIPT, *QUICKLY, "--num-sizes", "3", "--workspace", tmp_path)
    overall, layers = rows(folder / f"{MODEL}_default_overall.csv"), rows(folder / f"{MODEL}_default_layers.csv")
    assert tuple(overall[0])[:len(OVERALL)] == OVERALL
    assert tuple(layers[0])[:len(LAYERS)] == LAYERS
    assert [row["input_size"] for row in overall] == ["64", "68", "72"]
    assert overall[0] == first
    for row in overall:
        assert (row["status"], row["runs"], row["layers"], row["layers_not_supported"]) == ("ok", "5", "26", "0")
        assert float(row["min"]) <= float(row["mean"]) <= float(row["max"])
        assert bool(row["energy_per_inference_j"]) != ("power:" in row["energy_doubts"])  # a sensor, or why there is none
        shares = [float(layer["percentage"]) for layer in layers if layer["input_size"] == row["input_size"]]
        assert (len(shares), sum(shares)) == (26, pytest.approx(100, abs=0.01))
    shown = [layers[0][name] for name in (*LAYERS[:4], "stride", "height", "ran")]
    assert shown == ["features.0", "3", "64", "3x3", "2x2", "64", "default"]
    (state,) = json.loads(printed(SCRIPT, "--status", "--json", "--workspace", tmp_path))
    assert (state["state"], state["measured"], state["failed"], state["left"]) == ("done", 3, 0, 0)
    refused = run_script(SCRIPT, *QUICKLY, "--batch", "2", "--workspace", tmp_path)
    assert (refused.returncode, "holds a profile with another batch" in refused.stderr) == (1, True)


def test_the_lists(tmp_path: Path) -> None:
    def listed(*options: str) -> list[dict[str, str]]:
        rows: list[dict[str, str]] = json.loads(printed(SCRIPT, *options, "--json", "--workspace", tmp_path))
        return rows

    names = [row["model"] for row in listed("--list-models")]
    assert names[:6] == ["vgg16", "densenet121", "resnet152", "googlenet", "alexnet", "resnet50"]
    assert "mobilenet_v2" in names
    assert [row["algorithm"] for row in listed("--list-algorithms", "--device", "cpu")] == list(CPU_ALGORITHMS)
    of_gpu = {row["algorithm"]: row["runs"] for row in listed("--list-algorithms", "--device", "cuda")}  # there is none here
    assert (list(of_gpu), of_gpu["direct"]) == (list(GPU_ALGORITHMS), "never: cuDNN never implemented it")
    assert run_script(SCRIPT, "--workspace", tmp_path).returncode == 2


def test_errors_are_one_line(tmp_path: Path) -> None:
    for option, value, message in (
            ("--algorithm", "fft_tiling", "cuDNN is not available: algorithm fft tiling needs an NVIDIA GPU"),
            ("--model", "vgg61", "torchvision has no such classification model; did you mean"),
            ("--gpu", "h100", "use --gpu cpu"),
            ("--min-size", "8", f"{MODEL} at 8x8, batch 1: ")):  # too small for the model
        place = QUICKLY.index(option) if option in QUICKLY else len(QUICKLY)
        done = run_script(SCRIPT, *QUICKLY[:place], *QUICKLY[place + 2:], option, value, "--workspace", tmp_path)
        assert done.returncode == 1, done
        assert message in done.stderr.splitlines()[-1]


class OutOfMemory(TorchEngine):
    """Pretends that larger images do not fit into memory."""

    def plan(self, layer: torch.nn.Conv2d, images: torch.Tensor) -> LayerPlan:
        if images.shape[2] > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().plan(layer, images)


def test_out_of_memory_costs_one_size(tmp_path: Path, model: torch.nn.Module) -> None:
    def profiled(engine: TorchEngine, retry: bool = False) -> list[int]:
        """The sizes that were measured."""
        profiler = UnifiedProfiler(settings(input_sizes=(64, 80), batch=2), 0, AT_ONCE, retry=retry, engine=engine)
        return [unit.input_size for unit in profiler.profile(tmp_path, model).units]

    profiled(OutOfMemory())
    small, large = rows(tmp_path / f"{MODEL}_default_overall.csv")
    assert (small["status"], large["status"], large["mean"]) == ("ok", "failed", "")
    assert large["error"] == f"{MODEL} at 80x80, batch 2: out of memory; try --batch 1"
    assert profiled(TorchEngine()) == []
    assert profiled(TorchEngine(), retry=True) == [80]
    assert [row["status"] for row in rows(tmp_path / f"{MODEL}_default_overall.csv")] == ["ok", "ok"]


class NoPointwise(TorchEngine):
    """Pretends to be an algorithm of cuDNN that can't run 1x1 filters."""

    def plan(self, layer: torch.nn.Conv2d, images: torch.Tensor) -> LayerPlan:
        if layer.kernel_size == (1, 1):
            raise NotSupported("CUDNN_STATUS_NOT_SUPPORTED", "filter")
        return LayerPlan(super().plan(layer, images).run, "winograd")


def test_the_error_names_the_refused_layers_and_a_fallback_runs_them(tmp_path: Path, model: torch.nn.Module) -> None:
    run, *layers = measure_profile(settings().units[0], ForcedModel(model, NoPointwise()), Instruments("cpu", energy_s=0.0))
    assert run.error.startswith(f"Algorithm default not compatible with model {MODEL}: 17 of 26 layers "
                                "(features.3.squeeze and 16 more): CUDNN_STATUS_NOT_SUPPORTED, filter")
    assert described(run) == run.error
    assert [m.facts["layer_status"] for m in layers].count("CUDNN_STATUS_NOT_SUPPORTED") == 17
    assert not any(m.samples_ms for m in layers)
    UnifiedProfiler(settings(fallback=True), 0, AT_ONCE, engine=NoPointwise(), fallback=TorchEngine()).profile(tmp_path, model)
    (overall,), table = rows(tmp_path / f"{MODEL}_default_overall.csv"), rows(tmp_path / f"{MODEL}_default_layers.csv")
    assert (overall["status"], overall["layers_not_supported"]) == ("ok", "17")
    assert {(row["kernel_size"], row["ran"], row["status"]) for row in table} == {
        ("3x3", "winograd", "ok"), ("1x1", "default", "CUDNN_STATUS_NOT_SUPPORTED")}
    assert all(float(row["mean_ms"]) > 0 for row in table)


def shell(folder: Path, script: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script of extras/convolutions/ with the workspace `folder`, which is first on the path too."""
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HASE_PYTHON": sys.executable}
    return subprocess.run([f"extras/convolutions/{script}", *words, "--workspace", folder], cwd=ROOT, env=environment,
                          capture_output=True, text=True, check=False)


def stand_in(path: Path, script: str) -> None:
    """A command that is not here."""
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def test_a_stage_runs_in_place_without_slurm(tmp_path: Path) -> None:
    done = shell(tmp_path, "1_sanity_check.sh", MODEL, "default", "cpu", "--min-size", "64", "--energy-seconds", "0")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "extras" / "convolutions" / "results" / "1_sanity" / f"{MODEL}_default_cpu"
    (log,) = folder.glob("*.out")
    assert MODEL in log.read_text()
    assert (folder / f"{MODEL}_default_layers.csv").is_file()
    (row,) = json.loads(shell(tmp_path, "check_status.sh", "--json").stdout)
    assert row["results"] == f"1_sanity/{MODEL}_default_cpu"
    assert row["log"].startswith("tables: ")


def test_a_stage_becomes_a_job_with_slurm(tmp_path: Path) -> None:
    """`sbatch` is a stand-in that prints so and notes its arguments."""
    stand_in(tmp_path / "sbatch", f'echo "a stand-in for sbatch"\nprintf "%s\\n" "$@" > {tmp_path}/given\n')
    done = shell(tmp_path, "2_quick_sweep.sh", "vgg16", "implicit", "gemm", "l40s", "--batch", "4")
    assert done.returncode == 0, done.stderr
    assert "a stand-in for sbatch" in done.stdout
    assert "sinfo -C gpul40s" in done.stderr
    arguments = (tmp_path / "given").read_text().splitlines()
    folder = tmp_path / "extras" / "convolutions" / "results" / "2_quick" / "vgg16_implicit_gemm_l40s"
    assert folder.is_dir()
    assert (folder / "submitted.txt").read_text() == "a stand-in for sbatch\n"
    assert {"--constraint=gpul40s", "--gres=gpu:1", "--time=01:00:00", f"--output={folder}/%x_%j.out"} <= set(arguments)
    assert f"--model vgg16 --algorithm implicit\\ gemm --gpu l40s --quick --batch 4 --workspace {tmp_path}" in arguments[-1]


def test_the_status_of_runs_without_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`squeue` is a stand-in with one job that waits and one that runs."""
    for name, log, job in (
            ("refused", "starting\nerror: --gpu h100: the device of this machine is a CPU\n", ""),
            ("waits", "", "41"), ("runs", "", "42"), ("works", "", ""),
            ("killed", "measuring\nslurmstepd: error: *** JOB 44 CANCELLED DUE TO TIME LIMIT ***\n", "44")):
        folder = tmp_path / "2_quick" / name
        folder.mkdir(parents=True)
        if log:
            (folder / f"{name}_7.out").write_text(log)
        if job:
            (folder / "submitted.txt").write_text(f"Submitted batch job {job}\n")
        if name in ("works", "killed"):
            write_settings(folder, settings())

    def states() -> dict[str, str]:
        with sole_writer(tmp_path / "2_quick" / "works"):
            return {Path(row["results"]).name: row["state"] for row in status_rows(tmp_path)}

    unknown = dict.fromkeys(("waits", "runs", "killed"), "not known")
    assert states() == {"refused": "refused", "works": "running", **unknown}
    stand_in(tmp_path / "squeue", 'echo "41 PENDING"\necho "42 RUNNING"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert states() == {"refused": "refused", "waits": "submitted", "runs": "running", "killed": "stopped",
                        "works": "running"}


@pytest.mark.parametrize(("words", "message"), [
    (["vgg16", "gemm", "a100"], "a100: no such GPU"), (["vgg16", "--batch", "h200"], "usage: 3_full"),
    (["vgg16", "bogus", "h200"], "bogus: no such algorithm on cuda")])
def test_wrong_arguments_of_a_stage(words: list[str], message: str, tmp_path: Path) -> None:
    done = shell(tmp_path, "3_full_run.sh", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr


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


def profile(algorithm: str) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1().eval()
    settings = ProfileSettings(model="squeezenet1_1", algorithm=algorithm, gpu="h200", device="cuda", device_name="NVIDIA H200",
                               input_sizes=(64,), warmup=1, measure=3)
    forced = ForcedModel(model, CudnnEngine(GPU_ALGORITHMS[algorithm], True))
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
    assert overall["cupti_ms"] == pytest.approx(sum(row["cupti_ms"] for row in rows), rel=1e-4)
    assert {(row["ran"], row["cuda_kernels"], row["unexpected_kernels"]) for row in rows} == {
        ("gemm", "void im2col4d_kernel<float>", "")}
    assert all(row["cupti_span_ms"] == pytest.approx(row["cupti_ms"] * 8 / 6, rel=0.02) for row in rows)
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


@needs_cudnn
def test_an_algorithm_that_runs_nothing(pretended_gpu: list[int]) -> None:
    overall, layers = profile("direct")
    assert overall.error == ("Algorithm direct not compatible with model squeezenet1_1: 26 of 26 layers "
                             "(features.0 and 25 more): CUDNN_STATUS_NOT_SUPPORTED, not this one")
    assert {m.facts["layer_status"] for m in layers} == {"CUDNN_STATUS_NOT_SUPPORTED"}
    assert not pretended_gpu
