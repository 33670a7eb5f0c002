"""Fits to known rules and to what an H100 measured: generation on a CPU, copies and graphs, sharing (MPS), a serving host."""

from __future__ import annotations

import math
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_dataset import chain, conv, relu

from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks, pipeline_ms
from hase.learned import target_files
from hase.learned.composition.fitted import read_composition
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.sidecar import copy_predictors, read_sidecar, write_sidecar
from hase.learned.llm import GenerationLoop
from hase.learned.sharing import read_mps, write_mps
from hase.records.dataset_files import read_header
from hase.records.generations import PHASES, Phase
from hase.records.host_pace import Stalls
from hase.records.kernel_record import Tensor
from hase.training.composition.formulas import fit_graph_replay, fit_host_io
from hase.training.composition.measured_models import MeasuredModel, MeasuredTracks
from hase.training.fits.generation import LoopStep, fit_loop, fit_on_cpu
from hase.training.fits.mps import MeasuredWay, MpsFit, measured_widths, read_way, records_of
from hase.training.fits.serving import (
    PacedRuns,
    fit_serving_host,
    host_pace_readings,
    host_pace_us,
    learn_serving_host,
    time_slice_results,
)
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, SHIPPED, Workspace
from hase.utils.sharing_mode import GpuSharing

LOOP = GenerationLoop(step_ms=0.02, sequence_ms=0.004, first_ms=0.3, first_layer_ms=0.01, first_sequence_ms=0.05,
                      million_logits_ms=0.6, million_other_logits_ms=0.8)


def step(family: str, phase: Phase, batch: int, prompt: int, words: int, layers: int) -> LoopStep:
    run_ms = 1e-5 * words * batch * (prompt if phase == "first" else 1)
    of = LoopStep(family, family, phase, batch, prompt, words, layers, batch * (prompt - 1) * words if phase == "first" else 0,
                  run_ms, 0.0)
    return of._replace(measured_ms=of.time_ms(LOOP))


STEPS = [step(f"w{words}l{layers}", phase, batch, prompt, words, layers)
         for words, layers in ((1000, 2), (32000, 12), (128000, 1))
         for phase in PHASES for batch, prompt in ((1, 16), (1, 512), (8, 64), (32, 16))]


def test_a_known_loop_on_a_cpu_is_found_again() -> None:
    assert fit_loop(STEPS).model_dump() == pytest.approx(LOOP.model_dump(), rel=0.02)


def test_each_family_of_a_cpu_s_loop_is_held_out() -> None:
    """One whose tokens take three times as long is off by that, and the others hardly change."""
    odd = [one._replace(measured_ms=3 * one.measured_ms) if one.family == "w1000l2" and one.phase == "token" else one
           for one in STEPS]
    learned = fit_on_cpu("some-cpu", odd, "0.18.0", "2026-01-01")
    errors = {one.family: abs(one.predicted_ms / one.measured_ms - 1) for one in learned.steps if one.phase == "token"}
    assert errors["w1000l2"] > 0.4
    assert errors["w128000l1"] < 0.2
    assert learned.left_out["first"].mape < 0.2


REPLAY = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0007, lead_ms=0.0, end_ms=0.015)


def model(name: str, mib_in: float, mib_out: float) -> MeasuredModel:
    """A model of which only the sizes of its inputs and outputs matter."""
    x, y = (Tensor(dtype="uint8", shape=(round(mib * 2**20),)) for mib in (mib_in, mib_out))
    record = chain(name, [relu()]).model_copy(update={"inputs": {"x": x}, "outputs": {"y": y}})
    latency_ms = 1.0 + mib_in
    return MeasuredModel(record, name[0], latency_ms, host_io_ms=latency_ms + 0.05 + 0.2 * mib_in + 0.4 * mib_out)


def test_the_fit_finds_the_costs_of_copies() -> None:
    models = [model(f"{family}{size}", size, out) for family in "abc" for size, out in ((0.5, 1), (2, 0.1), (9, 3), (30, 1))]
    models.append(replace(models[0], host_io_ms=math.nan))
    groups = [model.group for model in models]
    costs = fit_host_io(models, np.array([model.latency_ms for model in models]), groups)
    assert costs is not None
    assert (costs.run_ms, costs.in_ms_per_mib, costs.out_ms_per_mib) == pytest.approx((0.05, 0.2, 0.4), rel=1e-4)
    assert costs.left_out is not None
    assert (costs.models, costs.left_out.mape) == (12, pytest.approx(0.0, abs=1e-6))
    assert fit_host_io(models[:3], np.ones(3), ["a"] * 3) is None  # too few


def test_the_fit_finds_the_costs_of_a_replay() -> None:
    draw = np.random.default_rng(0)
    models, tracks = [], []
    for place in range(24):
        nodes = int(draw.integers(20, 200))
        gpu_ms, launches = draw.uniform(0.002, 0.05, nodes), draw.integers(1, 4, nodes).astype(float)
        of_run = Tracks(gpu_ms, launches, np.full(nodes, NodeKind.OWN))
        replayed = pipeline_ms(of_run, REPLAY) if place else math.nan
        models.append(replace(model(f"{'abc'[place % 3]}{place}", 1, 1), cuda_graph_ms=replayed))
        tracks.append(MeasuredTracks(of_run, host_ms=math.nan, latency_ms=3.0))
    replay = fit_graph_replay(models, tracks, [model.group for model in models])
    assert replay is not None
    assert (replay.costs.gap_ms, replay.costs.end_ms) == pytest.approx((REPLAY.gap_ms, REPLAY.end_ms), rel=1e-3)
    assert replay.left_out is not None
    assert (replay.models, replay.left_out.worst) == (23, pytest.approx(0.0, abs=1e-4))


CARD = "nvidia-h100-80gb-hbm3-cuda-ort1.31-all"
TARGET = "nvidia-h200-cuda-ort1.31-all"


def way(sharing: str, **gpu_ms: float) -> MeasuredWay:
    return MeasuredWay(GpuSharing.parse(sharing), gpu_ms, dict.fromkeys(gpu_ms, 1.0), {}, {}, {}, {})


def test_the_width_of_a_kernel_shows_in_its_times_with_fewer_threads() -> None:
    ways = [way("mps", wide=1.0, half=1.0, narrow=1.0, not_again=1.0), way("mps:50", wide=1.85, half=1.0, narrow=1.01),
            way("mps:25/75", wide=3.55, half=1.85, narrow=1.0)]
    assert measured_widths(ways) == pytest.approx({"wide": 1.0, "half": 0.5, "narrow": 0.25})
    for sharings in (("mps",), ("mps:50", "mps:25/75"), ("slices",)):
        with pytest.raises(UserError, match="the width of kernels shows in their times with all threads and with less"):
            measured_widths([way(sharing, kernel=1.0) for sharing in sharings])


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an H100 measured in two of the ways, and the models' records."""
    folder = tmp_path_factory.mktemp("sharing")
    with tarfile.open(ROOT / "recipes/h200/sharing-nvidia-h100.tar.xz") as archive:
        archive.extractall(folder, [member for member in archive if member.name.startswith(("mps/", "mps-50/", "ort_"))],
                           filter="data")
    return folder


@pytest.mark.slow
def test_another_training_keeps_what_was_learned_of_mps(tmp_path: Path) -> None:
    """Files of widths lie beside those of the predictors, and are not theirs: neither a copy nor a training leaves them out."""
    copy_predictors(SHIPPED / TARGET, tmp_path)
    write_sidecar(tmp_path, read_sidecar(tmp_path))
    learned = read_mps(tmp_path)
    assert learned
    features = np.array([KERNEL_FEATURES.compute(conv())], dtype=float)
    assert 0.0 < learned.grids([conv()], features, np.array([0.01])).width[0] <= 1.0
    (tmp_path / "mps_width-0.npz").write_bytes(b"of an earlier fit")
    write_mps(tmp_path, learned.sharing)
    assert [path.name for path in tmp_path.glob("mps_width-*")] == [learned.sharing.width.file]


@pytest.mark.slow
def test_the_shipped_rules_hold_for_what_an_h100_measured(beside: Path) -> None:
    """Latencies of a model whose kernels take most of its time, beside models in loops; docs/sharing.md has all errors."""
    ways = [read_way(Workspace(beside / name), CARD) for name in ("mps", "mps-50")]
    shipped, composition = target_files.MPS.read(SHIPPED / TARGET), read_composition(SHIPPED / TARGET)
    assert shipped
    assert composition.costs
    records = records_of(Workspace(beside), read_header(Workspace(beside / "mps").dataset(CARD)).target, ways[0].idle_ms)
    ways = [way._replace(beside={(model, background): times for (model, background), times in way.beside.items()
                                 if model == "resnet50@batch=16" and background.startswith("resnet50_16")}) for way in ways]
    fit = MpsFit(ways, records, composition.costs)
    assert shipped.bytes_per_ms == pytest.approx(1.12 * fit.bytes_per_ms, rel=0.01)  # that of the H200's memory
    assert all(fit.is_gpu_bound(case) for case in fit.cases)
    gpu_bound, host_bound = fit.errors(fit.predicted(shipped.rules))
    assert not host_bound
    assert max(errors.mean for errors in gpu_bound.values()) < 0.1
    assert len(gpu_bound) == 2


def made_up(seed: int, runs: int = 4000) -> PacedRuns:
    """Runs of a model that takes 1 ms at the usual pace. The pace is 1.2 or 1.8, for 30 ms on average; after 5 to 20 ms of idle
    time the host takes 1.25 times as long; one run in 200 stalls for 10 ms."""
    generator = np.random.default_rng(seed)
    starts, times, idle, paces = [0.0], list[float](), [np.inf], list[float]()
    pace, ends = 1.2, 0.0
    for _ in range(runs):
        if starts[-1] >= ends:
            pace, ends = generator.choice([1.2, 1.8]), starts[-1] + generator.exponential(30.0)
        felt = pace * (1.25 if 5.0 < idle[-1] < 20.0 else 1.0)
        paces.append(felt)
        times.append(felt + (10.0 if generator.random() < 0.005 else 0.0))
        idle.append(generator.choice([0.1, 12.0]))
        starts.append(starts[-1] + times[-1] + idle[-1])
    return PacedRuns(np.array(starts[:-1]), np.array(times), np.array(idle[:-1]), np.array(paces), host_bound=True)


@pytest.mark.slow
def test_a_host_is_learned_from_made_up_runs() -> None:
    first, second, third = (made_up(seed) for seed in (1, 2, 3))
    gpu_bound = third._replace(host_bound=False)
    learned = fit_serving_host([first, second, gpu_bound], "made up", pace=1.5)
    assert (learned.models, learned.pace) == (2, 1.5)
    assert (learned.paces[1], learned.paces[-2]) == pytest.approx((1.2 / 1.5, 1.8 / 1.5), rel=0.02)
    assert 20.0 <= learned.lasts_ms <= 50.0
    assert (learned.slower[0], learned.slower[4]) == (1.0, pytest.approx(1.25, rel=0.03))  # after 8 to 16 ms
    busy_ms = sum(runs.times_ms.sum() for runs in (first, second, third))
    assert learned.stalls_per_s == pytest.approx(3 * 4000 * 0.005 / busy_ms * 1e3, rel=0.3)
    assert learned.stalls_ms == pytest.approx([10.0] * 12, rel=0.1)
    with pytest.raises(UserError, match="the GPU is the slower track of all models"):
        fit_serving_host([gpu_bound], "made up", 1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """What was served on an H100: the first eight models."""
    folder = tmp_path_factory.mktemp("served")
    with tarfile.open(ROOT / "recipes/h200/served-nvidia-h100.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    path, results = time_slice_results(Workspace(folder))
    assert len(results) == 56
    path.write_text("".join(f"{result.model_dump_json()}\n" for result in results[:8]))
    return Workspace(folder)


@pytest.mark.slow
def test_a_host_is_learned_from_an_h100(served: Workspace) -> None:
    learned = learn_serving_host(served, SHIPPED / TARGET)
    assert 0.9 < learned.median_pace < 1.3
    assert learned.host().paces.mean() == pytest.approx(1.0, abs=0.1)
    assert learned.host(Stalls(9.0, (8.0,))).stalls_ms.tolist() == [8.0]
    # runs take the mean of its paces; of a few readings beside, some of which may be disturbed, the median counts
    result = time_slice_results(served)[1][0]
    readings_us = [reading.probe_us for reading in host_pace_readings(served)]
    assert host_pace_us([result], served) == pytest.approx(np.median(readings_us))
    model = result.results[0].model_copy(update={"probe_us": (300.0, 300.0, 450.0)})
    assert host_pace_us([result.model_copy(update={"results": (model,)})], served) == pytest.approx(350.0)


def test_a_workspace_without_served_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="served sets of 0 targets"):
        time_slice_results(Workspace(tmp_path))
    files.write_text(tmp_path / "benchmark/served_sets/some.jsonl", "")
    with pytest.raises(UserError, match="no model was served in time slices"):
        time_slice_results(Workspace(tmp_path))
