"""The profiler on a CPU with a real model: its tables, how it resumes, what fails, and the staged scripts."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from command import printed, run_script

from hase.benchmark.measuring.blocks import Steadiness
from hase.benchmark.metrics.power import PowerSample, PowerSensor
from hase.extras.convolutions.profiler import UnifiedProfiler, described
from hase.extras.convolutions.profiling.algorithms import ON_CPU, ON_GPU, NotSupported
from hase.extras.convolutions.profiling.engines import ForcedModel, LayerPlan, TorchEngine
from hase.extras.convolutions.profiling.listing import state_of_all, status_rows
from hase.extras.convolutions.profiling.measure import (
    Instruments,
    LayerTimer,
    ProfileSettings,
    affordable,
    measure_profile,
    time_layers,
)
from hase.extras.convolutions.profiling.results import LAYERS, OVERALL, write_settings
from hase.records.measurement import Measurement, read_blocks
from hase.utils.locks import sole_writer
from hase.utils.paths import ROOT
from hase.utils.timing import time_runs_ms

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
    assert [row["algorithm"] for row in listed("--list-algorithms", "--device", "cpu")] == list(ON_CPU)
    of_gpu = {row["algorithm"]: row["runs"] for row in listed("--list-algorithms", "--device", "cuda")}  # there is none here
    assert (list(of_gpu), of_gpu["direct"]) == (list(ON_GPU), "never: cuDNN never implemented it")
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


def test_measurements_of_an_equal_machine_count(tmp_path: Path, model: torch.nn.Module) -> None:
    UnifiedProfiler(settings(), 0, AT_ONCE, engine=TorchEngine()).profile(tmp_path, model)
    journal = tmp_path / "measurements.jsonl"
    (block,) = read_blocks(journal)
    journal.write_text(block.model_copy(update={"machine": "another"}).model_dump_json() + "\n")
    done = UnifiedProfiler(settings(input_sizes=(64, 80)), 0, AT_ONCE, engine=TorchEngine()).profile(tmp_path, model)
    assert [unit.input_size for unit in done.units] == [80]


def test_a_slow_model_is_run_less_often(model: torch.nn.Module) -> None:
    instruments = Instruments("cpu", energy_s=0.0, longest_s=1.0)
    assert [affordable(10, run_ms, instruments) for run_ms in (0.5, 100.0, 200.0, 900.0, 5000.0)] == [10, 10, 5, 3, 3]
    assert (affordable(2, 5000.0, instruments), affordable(30, 5000.0, Instruments("cpu"))) == (2, 30)
    overall, *layers = measure_profile(settings(measure=5).units[0], ForcedModel(model, TorchEngine()),
                                       replace(instruments, longest_s=1e-6))
    assert {len(m.samples_ms) for m in (overall, *layers)} == {3}


class NoPointwise(TorchEngine):
    """Pretends to be an algorithm of cuDNN that can't run 1x1 filters."""

    def plan(self, layer: torch.nn.Conv2d, images: torch.Tensor) -> LayerPlan:
        if layer.kernel_size == (1, 1):
            raise NotSupported("CUDNN_STATUS_NOT_SUPPORTED", "filter")
        return LayerPlan(super().plan(layer, images).run, "winograd")


def test_the_error_names_the_refused_layers_and_a_fallback_runs_them(tmp_path: Path, model: torch.nn.Module) -> None:
    instruments = Instruments("cpu", energy_s=0.0)
    (unit,) = settings(algorithm="default").units
    run, *layers = measure_profile(unit, ForcedModel(model, NoPointwise()), instruments)
    assert run.error.startswith(f"Algorithm default not compatible with model {MODEL}: 17 of 26 layers "
                                "(features.3.squeeze and 16 more): CUDNN_STATUS_NOT_SUPPORTED, filter")
    assert described(run) == run.error
    assert [m.facts["layer_status"] for m in layers].count("CUDNN_STATUS_NOT_SUPPORTED") == 17
    assert not any(m.samples_ms for m in layers)
    with_fallback = settings(fallback=True)
    UnifiedProfiler(with_fallback, 0, AT_ONCE, engine=NoPointwise(), fallback=TorchEngine()).profile(tmp_path, model)
    (overall,), table = rows(tmp_path / f"{MODEL}_default_overall.csv"), rows(tmp_path / f"{MODEL}_default_layers.csv")
    assert (overall["status"], overall["layers_not_supported"]) == ("ok", "17")
    assert {(row["kernel_size"], row["ran"], row["status"]) for row in table} == {
        ("3x3", "winograd", "ok"), ("1x1", "default", "CUDNN_STATUS_NOT_SUPPORTED")}
    assert all(float(row["mean_ms"]) > 0 for row in table)


def test_layers_are_timed_within_the_run(model: torch.nn.Module) -> None:
    images = torch.randn(1, 3, 64, 64)
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    with torch.inference_mode():
        times = time_layers(lambda: model(images), convolutions, 4, "cpu")
        assert np.array([call.samples_ms for call in times]).shape == (26, 4)
        assert all(call.ahead_runs == 4 and call.host_ms > 0 and min(call.samples_ms) > 0 for call in times)
        with LayerTimer(convolutions, "cpu") as timer:
            (whole_ms,) = time_runs_ms(lambda: model(images))
            assert sum(call.ms for call in timer.take()) < whole_ms
        model(images)
        assert not timer.take()  # no hook is left


class PretendedSensor(PowerSensor):
    """Pretends to be a power sensor of 50 W: this machine need not have one."""

    name, averages_s = "the pretended sensor", 0.0

    def read(self) -> PowerSample:
        now_s = time.monotonic()
        return PowerSample(now_s, 50.0, 50.0 * now_s)


def test_energy_of_a_run(model: torch.nn.Module) -> None:
    forced, (unit,) = ForcedModel(model, TorchEngine()), settings().units
    run, *_ = measure_profile(unit, forced, Instruments("cpu", PretendedSensor(), 0.2, idle_w=20.0))
    assert run.quantities["power_w"] == (pytest.approx(50.0),)
    assert run.quantities["energy_agreement"] == (pytest.approx(1.0),)
    assert run.quantities["idle_power_w"] == (20.0,)
    assert 0 < run.quantities["energy_j"][0] <= 50.0 * run.quantities["energy_window_s"][0] + 1e-6  # of one run or more
    assert any(doubt in str(run.facts["energy_doubts"]) for doubt in ("too short", "no sample for"))  # of a busy machine


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
            ("waits", "", "41"), ("runs", "", "42"), ("cancelled", "", "43"), ("works", "", ""),
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

    unknown = dict.fromkeys(("waits", "runs", "cancelled", "killed"), "not known")
    assert states() == {"refused": "refused", "works": "running", **unknown}
    stand_in(tmp_path / "squeue", 'echo "41 PENDING"\necho "42 RUNNING"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert states() == {"refused": "refused", "waits": "submitted", "runs": "running", "cancelled": "stopped",
                        "killed": "stopped", "works": "running"}
    whole = Measurement(subject="profile", id="a", label="run", context="a", place="alone", status="failed", error=(
        "Algorithm direct not compatible with model vgg16: 13 of 13 layers (features.0 and 12 more): ARCH_MISMATCH"))
    out_of_memory = whole.model_copy(update={"error": "out of memory"})
    assert [state_of_all([whole]), state_of_all([whole, out_of_memory])] == ["refused", "failed"]


@pytest.mark.parametrize(("words", "message"), [
    (["vgg16", "gemm"], "no GPU named"), (["vgg16", "gemm", "a100"], "a100: no such GPU"),
    (["vgg16", "--batch", "h200"], "usage: 3_full"),
    (["vgg16", "bogus", "h200"], "bogus: no such algorithm on cuda")])
def test_wrong_arguments_of_a_stage(words: list[str], message: str, tmp_path: Path) -> None:
    done = shell(tmp_path, "3_full_run.sh", *words)
    assert done.returncode in (1, 2)
    assert message in done.stderr
