"""What nodes take without the profiler: its part is subtracted from each, and a model's nodes add up to its latency."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import onnx
import pytest
from conftest import build_workspace
from trained_workspace import conv_net

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.ort import profile
from hase.benchmark.ort.profile import NodeEvent, ProfiledRun, profile_model, profiler_ms, unprofiled_ms
from hase.inference import measure_missing
from hase.records.dataset_files import read_header, read_journal
from hase.records.measurement import DEFAULT_LABELS, IN_MODEL_LABELS, Effort
from hase.utils.errors import UserError
from hase.utils.paths import Workspace
from tests.inference.test_missing_kernels import TARGET
from tests.inference.test_no_training import CONFIG

pytestmark = pytest.mark.measuring


def test_the_profilers_part_is_the_same_for_every_node() -> None:
    times = {"Conv": 0.100, "Add": 0.008, "Mul": 0.007}
    assert profiler_ms(times, dict.fromkeys(times, 1.0), 0.100) == pytest.approx(0.005)
    assert profiler_ms(times, {"Conv": 1.0, "Add": 3.0, "Mul": 1.0}, 0.106) == pytest.approx(0.005)  # in a Loop of three
    # a node whose profiled time is all profiler keeps a part of it, and the others make up for it
    assert profiler_ms(times, dict.fromkeys(times, 1.0), 0.0915) == pytest.approx(0.010)
    # a run that was ten times as fast says nothing of the profiler: a node's time is never more than MOST_ADDED_MS shorter
    assert profiler_ms({"Conv": 5.0, "Gemm": 4.0}, {"Conv": 1.0, "Gemm": 1.0}, 0.9) == pytest.approx(profile.MOST_ADDED_MS)


def test_each_run_keeps_its_own_times() -> None:
    """Medians add up to the run's time. A node with a body takes no time of its own."""
    nodes = ("Conv", "Loop", "Add")
    runs = [ProfiledRun(0.0, 1e4, tuple(NodeEvent(name, name, "CPUExecutionProvider", start, duration)
                                        for start, (name, duration) in enumerate(zip(nodes, times, strict=True))))
            for times in ((104.0, 60.0, 9.0), (105.0, 62.0, 7.0), (110.0, 70.0, 8.0))]
    times_ms = unprofiled_ms(runs, 0.105)
    assert times_ms == {"Conv": pytest.approx([0.100, 0.101, 0.106]), "Add": pytest.approx([0.005, 0.003, 0.004])}
    assert unprofiled_ms(runs, 0.0)["Add"] == pytest.approx([profile.LEAST_SHARE * time for time in (0.009, 0.007, 0.008)])


def test_a_models_nodes_add_up_to_its_latency(tmp_path: Path) -> None:
    """In a real session: the same one, profiled and then not. Its nodes are small, so that the profiler's part shows."""
    path = conv_net(tmp_path / "net.onnx", channels=2, size=4)
    runs, graph, plain_ms = profile_model(path, "cpu", {}, Effort(warmup=5, least_runs=40, most_runs=40), plain=True)
    assert len(plain_ms) == len(runs) == 40
    times_ms = unprofiled_ms(runs, median(plain_ms))
    assert set(times_ms) == {node.name for node in graph.nodes}
    profiled_ms = sum(median(event.duration_us for run in runs for event in run.nodes if event.node == node)
                      for node in times_ms) / 1000
    # without other work on the machine, the profiled time is the larger one, and the sum equals the plain one within 0.1 %
    assert sum(map(median, times_ms.values())) == pytest.approx(min(median(plain_ms), profiled_ms), rel=0.1)


@pytest.mark.slow
def test_a_collector_goes_on_with_its_labels(workspace: Workspace) -> None:
    """A dataset that --measure-missing began has one more label than a collection has by default."""
    with pytest.raises(UserError, match="labels: unprofiled: ONNX Runtime has no such labels on cuda"):
        CollectorConfig(labels=("unprofiled",)).labels_on("cuda")
    measure_missing(conv_net(workspace.root / "net.onnx", channels=8), target=TARGET, workspace=workspace, config=CONFIG)
    build_workspace(workspace, {"anet_b1": onnx.load(conv_net(workspace.root / "net.onnx", channels=4))})
    collect(workspace, CONFIG.model_copy(update={"levels": (0.0,), "variants": ()}))
    assert read_header(workspace.dataset(TARGET)).labels == (*DEFAULT_LABELS, "unprofiled")
    kernels = [m for block in read_journal(workspace.dataset(TARGET)) for m in block.measurements if m.subject == "kernel"]
    for context in ("carrier", "anet_b1"):
        measurements = [m for m in kernels if m.context == context]
        assert {m.label for m in measurements} == set(IN_MODEL_LABELS)
        assert all(m.status == "ok" for m in measurements)
