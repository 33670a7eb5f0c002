"""What is learned from onnxruntime-genai's measured steps, and how predictions are judged by them: on the archive of decoders
of a few small layers, which an H200 ran."""

from __future__ import annotations

import json
import math
import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from command import run_script
from conftest import Once

from hase.graph_model.simulation.pipeline import PipelineCosts, Runs, Tracks
from hase.kernel_model.sampling.free_shapes import sizes
from hase.learned import target_files
from hase.learned.composition.fitted import GraphReplay, read_composition
from hase.learned.composition.intervals import KNOWN, CalibratedInterval, Sources
from hase.learned.energy import Part
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.sidecar import read_sidecar
from hase.records.generations import Generation, measured_models, step_record_file
from hase.records.kernel_record_files import read_model_record
from hase.training.fits.generation import MeasuredStep, fit_captured, intervals_of, measured_steps, step_time
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.paths import ROOT, SHIPPED, Workspace

TARGET = "nvidia-h200-cuda-ort1.31-all"
NAMES = ("layers12", "words128k", "words256k", "words32k")  # of decoders


def unpack(archive: str, folder: Path, *names: str) -> None:
    """Unpacks some models of an archive, with the records of their steps where there are names."""
    files.unpack(ROOT / "recipes" / "llm" / archive, folder)
    for path in [path for part in ("models", "measured") for path in (folder / "llm" / part).iterdir()]:
        if names and path.name.partition(".")[0] not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if names:
        done = run_script("recipes/llm/record_steps.py", "--workspace", folder, "--json")
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def measured(once: Once) -> Workspace:
    """A workspace with the measured decoders in half precision, and the records of their steps."""
    return Workspace(once("measured_loops", lambda folder: unpack(
        "loop-nvidia-h200.tar.xz", folder, *(f"{name}-fp16" for name in NAMES))))


def point(**fields: object) -> Generation:
    return Generation.model_validate({
        "model": "m-fp16", "family": "m", "precision": "fp16", "batch": 1, "prompt": 8, "generated": 4, "cache": 13,
        "machine": machine("cpu"), "taken": datetime.now(UTC), **fields})


def test_a_token_counts_where_its_host_was_fastest() -> None:
    noisy = point(token_ms=[[2.0, 2.2, 5.0, 5.2, 4.8]], token_probe_us=[[300.0, 300.0, 500.0, 520.0, 510.0]])
    assert step_time(noisy, "token") == (2.1, 300.0)
    before = point(token_ms=[[2.0, 3.0], [4.0]], probe_us=[300.0, 400.0])
    assert step_time(before, "token") == (3.0, 350.0)
    # a first token has the pace of its own request
    assert step_time(point(first_ms=[9.0, 7.0, 8.0], first_probe_us=[400.0, 300.0, 350.0]), "first") == (8.0, 350.0)


@pytest.mark.slow
def test_the_loop_is_learned_and_judged(measured: Workspace, tmp_path: Path) -> None:
    """Each step of these decoders takes half a millisecond or less, so what genai's loop takes is seen clearly."""
    assert measured_models(measured) == sorted(f"{name}-fp16" for name in NAMES)
    shapes = [read_model_record(step_record_file(measured, point(
        model="words32k-fp16", batch=8, prompt=128), phase)).outputs["logits"].shape for phase in ("first", "token")]
    assert shapes == [(8, 128, 32000), (8, 1, 32000)]
    copied = shutil.copytree(SHIPPED / TARGET, Workspace(tmp_path).predictors(TARGET))
    (copied / "generation.json").unlink()
    done = run_script("training/fit_generation.py", "--workspace", tmp_path, "--target", TARGET, "--generations", measured.root)
    assert done.returncode == 0, done.stderr
    learned = target_files.GENERATION.read(copied)
    assert learned
    assert 0.03 < learned.loop.step_ms < 0.15
    assert 0.1 < learned.loop.first_ms < 0.4
    assert learned.power_limit is None  # no step is long enough to show it
    assert {phase: errors.count for phase, errors in learned.left_out.items()} == {"first": 24, "token": 24}
    assert all(errors.median < 0.25 for errors in learned.left_out.values())
    done = run_script("recipes/llm/judge.py", "--workspace", measured.root, "--model", "words32k-fp16", "--json")
    judged = {row["what"]: row for row in json.loads(done.stdout)["errors"]}
    assert {what: row["count"] for what, row in judged.items()} == {"first token (ms)": 6, "further token (ms)": 6}
    assert all(row["median_%"] < 20 for row in judged.values())


def test_without_records_the_command_to_make_them_is_named(tmp_path: Path) -> None:
    unpack("loop-nvidia-h200.tar.xz", tmp_path)
    done = run_script("training/fit_generation.py", "--workspace", tmp_path, "--target", TARGET, "--predictors",
                      SHIPPED / TARGET, "--generations", tmp_path)
    assert done.returncode == 1
    assert "make it with: python recipes/llm/record_steps.py" in done.stderr
    assert "Traceback" not in done.stderr


REPLAYED = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0001, lead_ms=0.0, end_ms=0.0)


def captured_step(family: str, nodes: int, words: int, pace: float) -> MeasuredStep:
    """A made-up token of a CUDA graph: 0.4 µs after each launch, 50 µs of a host at its pace, 80 µs for a million logits."""
    tracks = Tracks(np.full(nodes, 0.003), np.ones(nodes), np.ones(nodes, dtype=int))
    (run_ms,) = Runs([(tracks, 1.0, None)]).latencies_ms(REPLAYED.model_copy(update={"gap_ms": 0.0004}))
    return MeasuredStep(point(family=family), "token", tracks, (), {}, words=words, layers=1,
                        measured_ms=float(run_ms) + 0.05 * pace + 0.08e-6 * words, pace=pace)


def test_what_a_captured_token_takes_is_learned() -> None:
    replay = GraphReplay(models=1, costs=REPLAYED)
    steps = [captured_step(f"m{number % 4}", 5 + 40 * (number % 9), 64000 * (1 + 3 * (number % 3)), 1.0 + 0.25 * (number % 7))
             for number in range(36)]
    learned = fit_captured(steps, replay)
    assert (learned.gap_ms, learned.step_ms, learned.million_logits_ms) == pytest.approx((0.0004, 0.05, 0.08), rel=0.1)
    assert learned.left_out is not None
    assert learned.left_out.mape < 0.02
    fitted = target_files.GENERATION.read(SHIPPED / TARGET)
    assert fitted is not None
    with_graph = fitted.model_copy(update={"captured": learned})
    assert with_graph.loop_of(cuda_graph=True).step_ms == learned.step_ms
    assert with_graph.loop_of(cuda_graph=False) == fitted.loop
    composition = read_composition(SHIPPED / TARGET, read_sidecar(SHIPPED / TARGET).dataset_sha256)
    graph = with_graph.composition(composition, "token").cuda_graph
    assert graph is not None
    assert graph.costs.gap_ms == learned.gap_ms


def test_an_interval_is_fitted_to_errors_with_their_doubts() -> None:
    """Made-up tokens that err as much as their only kernel is doubted: an interval as wide as their doubt holds them."""
    kernel = sizes.kernel("Relu", (sizes.tensor("float32", 4, 8),), [(4, 8)])
    steps, predicted_ms = [], {}
    for number in range(24):
        doubt, run = 0.05 * (1 + number % 4), Part(kernel, 1.0, 1.0, 1.0)
        step = MeasuredStep(point(family=f"m{number % 4}", token_probe_us=[[300.0]]), "token",
                            Tracks(np.ones(1), np.ones(1), np.ones(1, dtype=int)), (run,),
                            {kernel.id: KNOWN._replace(doubt=doubt)}, words=1, layers=1, measured_ms=np.exp(doubt), pace=1.0)
        steps.append(step)
        predicted_ms[id(step)] = 1.0
    of_others = CalibratedInterval(reach={"doubt": 1.0}, low=-4.0, high=4.0, left_out="family", families=9)
    fitted = intervals_of(steps, predicted_ms, dict.fromkeys(predicted_ms, 0.5), of_others)["token"]
    assert fitted.ends(Sources(doubt=0.2)) == pytest.approx((math.exp(-0.2), math.exp(0.2)))


@pytest.mark.slow
def test_tokens_of_cuda_graphs_are_apart(once: Once) -> None:
    """A model whose tokens an H200 ran as CUDA graphs."""
    folder = once("captured_tokens", lambda folder: unpack("graph-nvidia-h200.tar.xz", folder, "words32kgraph-int4"))
    workspace, predictors = Workspace(folder), read_predictors(SHIPPED / TARGET)
    captured = measured_steps(workspace, predictors, 300.0, captured=True)
    assert captured
    assert {step.phase for step in captured} == {"token"}
    with pytest.raises(UserError, match="no generation was measured"):
        measured_steps(workspace, predictors, 300.0)
