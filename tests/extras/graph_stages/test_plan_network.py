"""Plans of a network on a CPU and a GPU: compared with all assignments, and the command on made-up datasets."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from command import printed, run_script
from made_up_dataset import FLAVOUR, TARGET, chain, collect, conv, relu

from hase.extras.graph_stages.plan_network import CPU, GPU, most_alive, planning_problem, plans
from hase.extras.graph_stages.planning.plans import plan_cost
from hase.records.kernel_record_files import record_path
from hase.utils import files

SIZES = (8, 12, 16, 24, 28, 32)


def test_the_best_plan_beats_all_others() -> None:
    """The GPU computes faster, but each copy costs 0.05 ms: short kernels in between stay where the data is."""
    record = chain("anet1", [make(side=side) for side in SIZES[:3] for make in (conv, relu)])
    kernels = [record.kernel_of(node) for node in record.nodes]
    times_ms = {CPU: {kernel.id: 0.01 + kernel.flops / 1e7 for kernel in kernels},
                GPU: {kernel.id: 0.02 + kernel.flops / 1e9 for kernel in kernels}}
    problem = planning_problem(record, times_ms, 0.05, 1e7)
    every_cost = [plan_cost(problem, units).latency_ms for units in itertools.product((CPU, GPU), repeat=len(kernels))]
    plan_of = dict(plans(problem))
    assert plan_of["the best of all"].latency_ms == pytest.approx(min(every_cost))
    assert plan_of["all on the CPU"].latency_ms == pytest.approx(sum(times_ms[CPU].values()))
    copied = [record.inputs[name].bytes for name in record.inputs] + [record.outputs[name].bytes for name in record.outputs]
    assert plan_of["all on the GPU"].latency_ms == pytest.approx(
        sum(times_ms[GPU].values()) + sum(0.05 + size / 1e7 for size in copied))


def test_too_many_tensors_at_one_time(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    record = chain("anet1", [relu(side=side) for side in SIZES])
    last = record.nodes[-1]
    dense = record.model_copy(update={"nodes": (*record.nodes[:-1], last.model_copy(update={"inputs": tuple(
        node.outputs[0] for node in record.nodes[:-1])}))})
    times_ms = {unit: dict.fromkeys(record.kernels, 1.0) for unit in (CPU, GPU)}
    assert most_alive(planning_problem(record, times_ms, 1, 1)) == 1
    problem = planning_problem(dense, times_ms, 1, 1)
    assert most_alive(problem) == len(SIZES) - 1
    assert [name for name, _ in plans(problem)] == ["all on the CPU", "all on the GPU", "the best of all"]
    monkeypatch.setattr("hase.extras.graph_stages.plan_network.MOST_ALIVE", len(SIZES) - 2)
    assert [name for name, _ in plans(problem)] == ["all on the CPU", "all on the GPU"]
    assert "5 tensors are needed at one time" in caplog.text


def test_the_command(tmp_path: Path) -> None:
    on_gpu = TARGET.model_copy(update={
        "flavour": FLAVOUR.model_copy(update={"device": "cuda", "instruction_set": ""}), "threads": 0})
    record = chain("anet1", [conv(side=side) for side in SIZES])
    workspace = collect(tmp_path, record)
    collect(tmp_path, record, target=on_gpu)
    for target in (TARGET, on_gpu):
        files.write_json(record_path(workspace, target.flavour, "anet1"), record.model_copy(update={"flavour": target.flavour}))
    command = ("extras/graph_stages/plan_network.py", "--workspace", tmp_path, "--model", "anet1", "--copy-us", "10",
               "--copy-gb-s", "10")
    rows = json.loads(printed(*command, "--cpu", TARGET.name, "--gpu", on_gpu.name, "--json"))
    assert [row["plan"] for row in rows] == ["all on the CPU", "all on the GPU", "the best of all"]
    assert rows[2]["latency_ms"] == rows[0]["latency_ms"] < rows[1]["latency_ms"]  # as fast on both: copies do not pay
    assert (rows[1]["copies"], rows[2]["copies"], rows[2]["kernels"]) == (2, 0, "CPU 1-6")
    swapped = run_script(*command, "--cpu", on_gpu.name, "--gpu", TARGET.name)
    assert (swapped.returncode, swapped.stdout) == (1, "")
    assert "a dataset of device cuda, not cpu" in swapped.stderr
