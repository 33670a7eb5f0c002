"""Language models as onnxruntime-genai's builder writes them, built and measured on a CPU; and what is learned from its
measured steps, and how predictions are judged by them, on the archive of decoders of a few small layers, which an H200 ran."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from command import run_script
from conftest import Once
from optional_packages import needs

from hase.graph_model.simulation.pipeline import PipelineCosts, Runs, Tracks
from hase.learned import target_files
from hase.learned.composition.fitted import GraphReplay, read_composition
from hase.learned.kernels.sidecar import read_sidecar
from hase.recipes.llm.networks import NETWORKS_FILE, LanguageNetworks, model_folder
from hase.records.generations import REMEDY, Generation, GenerationMemory, measured_file, measured_model_names
from hase.training.fits.generation import MeasuredStep, fit_captured, step_time
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.fingerprint import machine
from hase.utils.paths import ROOT, SHIPPED, Workspace

JUDGED = ({"hidden_size": 2048, "intermediate_size": 8192}, {"hidden_size": 3072, "intermediate_size": 8192},
          {"hidden_size": 1024, "intermediate_size": 3072})
NETWORKS = """
networks:
  llama:
    builder: LlamaModel
    config: LlamaConfig
    sizes: {num_hidden_layers: 2, hidden_size: 64, intermediate_size: 96, num_attention_heads: 4, num_key_value_heads: 2,
            vocab_size: 512, max_position_embeddings: 128}
points: [[1, 8], [2, 4]]
memory_points: [[1, 8]]
generate: 3
"""


def test_networks_for_judging_are_not_learned_from() -> None:
    networks = read_config(NETWORKS_FILE, LanguageNetworks).networks
    assert len(networks) >= 6
    for name, network in networks.items():
        assert "qwen" not in f"{name} {network.builder} {network.config}".lower()
        assert not any(judged.items() <= network.sizes.items() for judged in JUDGED), name


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_is_built_and_its_requests_are_measured(tmp_path: Path) -> None:
    needs("onnxruntime_genai", "llm")
    networks, workspace = tmp_path / "networks.yaml", Workspace(tmp_path / "out")
    networks.write_text(NETWORKS)

    def run(script: str, *options: str) -> None:
        run_script(f"recipes/llm/{script}", "--workspace", workspace.root, "--networks", networks, *options)

    run("make_models.py", "--precision", "int4", "--device", "cpu")
    graph = onnx.load(model_folder(workspace, "llama", "int4") / "model.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("GroupQueryAttention") == 2
    assert operators.count("MatMulNBits") == 2 * 5 + 1  # of a layer: queries with keys and values, out, gate, up and down
    run("measure_genai.py", "--point", "1x8")
    for _ in range(2):  # the second time nothing is left to do
        run("measure_genai.py")
    run("measure_genai.py", "--memory")
    memory, = files.read_records(measured_file(workspace, "llama-int4", memory=True), GenerationMemory, REMEDY)
    assert (memory.cache, memory.failed) == (12, "")
    points = files.read_records(measured_file(workspace, "llama-int4"), Generation, REMEDY)
    assert [(point.batch, point.prompt, point.cache) for point in points] == [(1, 8, 12), (2, 4, 8)]
    for point in points:
        tokens, = point.token_ms  # of the last request
        assert not point.failed
        assert len(point.first_ms) == len(point.create_ms) == len(tokens) == 3
        assert min(*tokens, *point.first_ms) > 0


@pytest.mark.slow
@pytest.mark.nightly
def test_models_on_a_cpu_are_judged_by_their_measured_kernels(tmp_path: Path) -> None:
    needs("onnxruntime_genai", "llm")
    networks, small, out = (tmp_path / name for name in ("networks.yaml", "small.yaml", "out"))
    networks.write_text(NETWORKS.replace(", [2, 4]", ""))
    llama = (document := yaml.safe_load(NETWORKS))["networks"]["llama"]
    small.write_text(yaml.safe_dump({**document, "networks": {  # two networks, each of which the other one judges
        name: {**llama, "sizes": {**llama["sizes"], "vocab_size": words}} for name, words in (("few", 512), ("many", 2048))}}))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "recipes" / "llm" / "on_cpu.sh", out, networks, small, "--json"], env=environment,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    judged = json.loads(done.stdout)
    assert {row["what"]: row["count"] for row in judged["errors"]} == {"first token (ms)": 2, "further token (ms)": 2}
    assert {point["model"] for point in judged["points"] if point["predicted"] > 0} == {"llama-fp32", "llama-int4"}
    learned = target_files.GENERATION.read(next(Workspace(out).predictors("").glob("*-cpu-*")))
    assert learned is not None
    assert {phase: of.count for phase, of in learned.left_out.items()} == {"first": 4, "token": 4}


TARGET = "nvidia-h200-cuda-ort1.31-all"
ARCHIVE = ROOT / "recipes" / "llm" / "loop-nvidia-h200.tar.xz"
NAMES = ("layers12", "words128k", "words256k", "words32k")  # of decoders


@pytest.fixture(scope="module")
def measured(once: Once) -> Workspace:
    """A workspace with the measured decoders in half precision, and the records of their steps."""
    def make(folder: Path) -> None:
        files.unpack(ARCHIVE, folder)
        for path in [path for part in ("models", "measured") for path in (folder / "llm" / part).iterdir()]:
            if path.name.partition(".")[0] not in {f"{name}-fp16" for name in NAMES}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        done = run_script("recipes/llm/record_steps.py", "--workspace", folder, "--json")
        assert done.returncode == 0, done.stderr

    return Workspace(once("measured_loops", make))


def point(**fields: object) -> Generation:
    return Generation.model_validate({
        "model": "m-fp16", "family": "m", "precision": "fp16", "batch": 1, "prompt": 8, "generated": 4, "cache": 13,
        "machine": machine("cpu"), "taken": datetime.now(UTC), **fields})


def test_a_token_counts_where_its_host_was_fastest() -> None:
    noisy = point(token_ms=[[2.0, 2.2, 5.0, 5.2, 4.8]], token_probe_us=[[300.0, 300.0, 500.0, 520.0, 510.0]])
    assert step_time(noisy, "token") == (2.1, 300.0)
    # a first token has the pace of its own request
    assert step_time(point(first_ms=[9.0, 7.0, 8.0], first_probe_us=[400.0, 300.0, 350.0]), "first") == (8.0, 350.0)


@pytest.mark.slow
def test_the_loop_is_learned_and_judged(measured: Workspace, tmp_path: Path) -> None:
    """Each step of these decoders takes half a millisecond or less, so what genai's loop takes is seen clearly."""
    assert measured_model_names(measured) == sorted(f"{name}-fp16" for name in NAMES)
    copied = shutil.copytree(SHIPPED / TARGET, Workspace(tmp_path).predictors(TARGET))
    (copied / "generation.json").unlink()
    empty = Workspace(tmp_path / "empty")
    files.unpack(ARCHIVE, empty.root)  # without records of the steps
    done = run_script("training/fit_generation.py", "--workspace", tmp_path, "--target", TARGET, "--generations", empty.root)
    assert (done.returncode, "make it with: python recipes/llm/record_steps.py" in done.stderr) == (1, True), done.stderr
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


REPLAYED = PipelineCosts(node_ms=0.0, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0001, lead_ms=0.0, end_ms=0.0)


def captured_step(family: str, nodes: int, words: int, pace: float) -> MeasuredStep:
    """A made-up token of a CUDA graph: 0.4 µs after each launch, 50 µs of a host at its pace, 80 µs for a million logits."""
    tracks = Tracks(np.full(nodes, 0.003), np.ones(nodes), np.ones(nodes, dtype=int))
    (run_ms,) = Runs([(tracks, 1.0, None)]).latencies_ms(REPLAYED.model_copy(update={"gap_ms": 0.0004}))
    return MeasuredStep(point(family=family), "token", tracks, (), {}, words=words, layers=1,
                        measured_ms=float(run_ms) + 0.05 * pace + 0.08e-6 * words, pace=pace)


@pytest.mark.slow
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
    composition = read_composition(SHIPPED / TARGET, read_sidecar(SHIPPED / TARGET).dataset_sha256)
    graph = with_graph.composition(composition, "token").cuda_graph
    assert graph is not None
    assert graph.costs.gap_ms == learned.gap_ms
