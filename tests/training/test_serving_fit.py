"""What is learned of a host that serves requests: from made-up runs with known rules, and from what an H100's host did."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hase.benchmark.serving.sets import ModelRequests
from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks
from hase.records.host_pace import Stalls
from hase.training.fits.serving import (
    PacedRuns,
    host_pace_us,
    learned_from,
    learned_host,
    paces_beside,
    served_in_slices,
    served_runs,
)
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import SHIPPED, Workspace

ARCHIVE = Path(__file__).parents[2] / "recipes/h200/served-nvidia-h100.tar.xz"
TARGET = "nvidia-h200-cuda-ort1.31-all"


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
    return PacedRuns(np.array(starts[:-1]), np.array(times), np.array(idle[:-1]), np.array(paces), of_host=True)


def test_made_up_runs() -> None:
    first, second, third = (made_up(seed) for seed in (1, 2, 3))
    gpu_bound = third._replace(of_host=False)
    learned = learned_host([first, second, gpu_bound], "made up", pace=1.5)
    assert (learned.models, learned.pace) == (2, 1.5)
    assert learned.paces[1] == pytest.approx(1.2 / 1.5, rel=0.02)
    assert learned.paces[-2] == pytest.approx(1.8 / 1.5, rel=0.02)
    assert 20.0 <= learned.lasts_ms <= 50.0
    assert learned.slower[0] == 1.0
    assert learned.slower[4] == pytest.approx(1.25, rel=0.03)  # after 8 to 16 ms
    busy_ms = sum(runs.times_ms.sum() for runs in (first, second, third))
    assert learned.stalls_per_s == pytest.approx(3 * 4000 * 0.005 / busy_ms * 1e3, rel=0.3)
    assert learned.stalls_ms == pytest.approx([10.0] * 12, rel=0.1)
    with pytest.raises(UserError, match="the GPU is the slower track of all models"):
        learned_host([gpu_bound], "made up", 1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """What was served on an H100: the first eight models."""
    folder = tmp_path_factory.mktemp("served")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    path, results = served_in_slices(Workspace(folder))
    assert len(results) == 56
    path.write_text("".join(f"{result.model_dump_json()}\n" for result in results[:8]))
    return Workspace(folder)


@pytest.mark.slow
def test_a_host_is_learned_from_an_h100(served: Workspace) -> None:
    learned = learned_from(served, SHIPPED / TARGET)
    assert 0.9 < learned.middle < 1.3
    assert learned.host().paces.mean() == pytest.approx(1.0, abs=0.1)
    assert learned.host(Stalls(0.0, ())).stalls_per_s == learned.host().stalls_per_s == learned.stalls_per_s
    assert learned.host(Stalls(9.0, (8.0,))).stalls_ms.tolist() == [8.0]


@pytest.mark.slow
def test_a_host_that_changes_its_pace(served: Workspace) -> None:
    """Runs take the mean of its paces; of a few readings beside, some of which may be disturbed, the median counts."""
    result = served_in_slices(served)[1][0]
    readings_us = [reading.probe_us for reading in paces_beside(served)]
    assert host_pace_us([result], served) == pytest.approx(np.median(readings_us))
    model = result.results[0].model_copy(update={"probe_us": (300.0, 300.0, 450.0)})
    assert host_pace_us([result.model_copy(update={"results": (model,)})], served) == pytest.approx(350.0)


def test_a_workspace_without_served_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="served sets of 0 targets"):
        served_in_slices(Workspace(tmp_path))
    files.write_text(tmp_path / "benchmark/served_sets/some.jsonl", "")
    with pytest.raises(UserError, match="no model was served in time slices"):
        served_in_slices(Workspace(tmp_path))


def test_runs_that_meet_no_other_count() -> None:
    """Of the first model's runs, the second and the third meet one of the other model's, of which the last meets none."""
    tracks = Tracks(np.full(4, 0.1), np.ones(4), np.full(4, NodeKind.OWN))
    costs = PipelineCosts(node_ms=0.5, view_ms=0.0, launch_ms=0.0, start_ms=0.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0)

    def requests(starts_s: Sequence[float], took_s: float) -> ModelRequests:
        starts = tuple(starts_s)
        return ModelRequests(arrivals_s=starts, starts_s=starts, ends_s=tuple(start + took_s for start in starts),
                        counts=(1,) * len(starts))

    first, other = served_runs([requests([0.0, 0.01, 0.02, 0.03], 0.004), requests([0.008, 0.023, 0.04], 0.003)],
                               [tracks, tracks], costs)
    assert first.starts_ms == pytest.approx([0.0, 30.0])
    assert first.idle_ms == pytest.approx([np.inf, 6.0])
    assert first.paces == pytest.approx(2.0, rel=0.1)  # four nodes of 0.5 ms in 4 ms
    assert other.starts_ms == pytest.approx([40.0])
