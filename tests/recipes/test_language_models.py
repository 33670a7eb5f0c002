"""Language models as onnxruntime-genai's builder writes them, built and measured on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import yaml
from command import run_script
from optional_packages import needs

from hase.learned import target_files
from hase.recipes.llm.networks import NETWORKS_FILE, model_folder, read_networks
from hase.records.generations import REMEDY, Generation, GenerationMemory, measured_file
from hase.utils import files
from hase.utils.paths import ROOT, Workspace

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
    networks = read_networks(NETWORKS_FILE).networks
    assert len(networks) >= 6
    for name, network in networks.items():
        assert "qwen" not in f"{name} {network.builder} {network.config}".lower()
        assert not any(judged.items() <= network.sizes.items() for judged in JUDGED), name


@pytest.mark.slow
@pytest.mark.nightly
def test_a_model_is_built_and_its_requests_are_measured(tmp_path: Path) -> None:
    needs("onnxruntime_genai", "requirements-llm.txt")
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
    chosen, = files.read_records(measured_file(workspace, "llama-int4"), Generation, REMEDY)
    assert (chosen.batch, chosen.prompt) == (1, 8)
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
    needs("onnxruntime_genai", "requirements-llm.txt")
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
    points, errors = judged["points"], {row["what"]: row for row in judged["errors"]}
    assert {what: row["count"] for what, row in errors.items()} == {"first token (ms)": 2, "further token (ms)": 2}
    assert {point["model"] for point in points} == {"llama-fp32", "llama-int4"}
    assert all(point["predicted"] > 0 for point in points)
    differences = [abs(point["again"] / point["measured"] - 1) for point in points if point["what"] == "first token (ms)"]
    assert errors["first token (ms)"]["again_%"] == pytest.approx(100 * sum(differences) / 2)
    learned = target_files.GENERATION.read(next(Workspace(out).predictors("").glob("*-cpu-*")))
    assert learned is not None
    assert {step.family for step in learned.steps} == {"few", "many"}
    assert {phase: of.count for phase, of in learned.left_out.items()} == {"first": 4, "token": 4}
