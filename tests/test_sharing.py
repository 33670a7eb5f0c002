"""Runs beside another process on one GPU: whose turn it is, how long a run waits, and what a probe and metrics tell of it.

No GPU is here: tracks are made up, and what they should give was seen on an H200 (ResNet-18 and -50 beside bursts).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from benchmark.backgrounds import Background
from overlap_simulator import OtherWork, PipelineCosts, gpu_work_ms, pipeline_ms, shared_runs_ms
from training.pairs import longest_wait_ms, looped_models, with_turns
from training.shared_runs import SharedRuns, measured_elsewhere
from training.sharing import (
    PipelineTracks,
    Sharing,
    busy_share,
    in_a_loop,
    other_work_guessed,
    other_work_seen,
    read_sharing,
    sharing_path,
)
from utils import files
from utils.errors import UserError

COSTS = PipelineCosts(node_ms=0.002, view_ms=0.0, launch_ms=0.004, start_ms=0.02, gap_ms=0.001, lead_ms=-0.01, end_ms=0.01)
SHARING = Sharing(slice_ms=2.0, alone_ms={"tiny": 0.016, "long": 0.5}, waits_ms=(0.3, 0.7, 2.4), cycle_ms=20.0)


def runs(gpu_ms: float, other: OtherWork, nodes: int = 60, launches: float = 2.0) -> npt.NDArray[np.float64]:
    """Runs of a model of equal nodes that takes the GPU `gpu_ms`."""
    return shared_runs_ms(np.full(nodes, gpu_ms / nodes), np.full(nodes, launches), np.ones(nodes, dtype=bool), COSTS, 2.0,
                          other, np.random.default_rng(0))


def idle(gpu_ms: float, nodes: int = 60, launches: float = 2.0) -> float:
    return pipeline_ms(np.full(nodes, gpu_ms / nodes), np.full(nodes, launches), np.ones(nodes, dtype=bool), COSTS)


def always(wait_ms: float) -> OtherWork:
    return OtherWork(1.0, 0.0, np.array([wait_ms]))


@pytest.mark.parametrize("gpu_ms", [0.1, 0.7, 3.0, 9.0])
@pytest.mark.parametrize("nodes", [5, 60, 400])
def test_beside_nothing_a_run_is_as_long_as_on_an_idle_gpu(gpu_ms: float, nodes: int) -> None:
    nothing = OtherWork(0.0, 1.0, np.zeros(0))
    assert runs(gpu_ms, nothing, nodes) == pytest.approx(idle(gpu_ms, nodes), rel=1e-4)


def test_a_run_waits_once_before_it_and_once_more_for_each_slice_that_it_fills() -> None:
    for gpu_ms, waits in ((1.0, 1), (3.0, 2), (5.5, 3)):
        found = runs(gpu_ms, always(2.4))
        assert found.std() == pytest.approx(0, abs=1e-9)
        assert found.mean() == pytest.approx(idle(gpu_ms) + waits * 2.4, rel=0.05)


def test_a_host_that_is_the_slower_track_hides_part_of_a_wait() -> None:
    """While the run waits the host goes on dispatching, and what it dispatched is then done without pauses."""
    alone = idle(0.1)
    assert alone > 5 * 0.1
    assert runs(0.1, always(0.3)).mean() < alone + 0.2
    assert runs(0.1, always(2.4)).mean() > 2.4


def test_beside_pauses_a_run_is_a_mixture() -> None:
    found = runs(1.0, OtherWork(10.0, 10.0, np.array([0.7])))
    assert np.percentile(found, 5) == pytest.approx(idle(1.0), rel=0.01)
    assert np.percentile(found, 97) == pytest.approx(idle(1.0) + 0.7, rel=0.05)
    assert idle(1.0) < found.mean() < idle(1.0) + 0.5


def test_a_probe_that_never_waited_saw_nothing() -> None:
    seen = other_work_seen(np.arange(100) * 0.02, np.full(100, 0.016), 0.016)
    assert (seen.busy_ms, len(seen.waits_ms)) == (0.0, 0)


def test_a_probe_that_always_waited_saw_work_without_pauses() -> None:
    seen = other_work_seen(np.arange(50) * 2.45, np.full(50, 2.436), 0.016)
    assert seen.quiet_ms == 0
    assert seen.waits_ms == pytest.approx(np.full(50, 2.42))


def test_a_probe_tells_phases_apart() -> None:
    """Four periods of 20 ms, the other process busy in the first 8 ms of each with bursts of 0.74 ms."""
    starts, latencies, now = [], [], 0.0
    while now < 80.0:
        took = 0.74 if now % 20.0 < 8.0 else 0.016
        starts.append(now)
        latencies.append(took)
        now += took
    seen = other_work_seen(starts, latencies, 0.016)
    assert (seen.busy_ms, seen.quiet_ms) == (pytest.approx(8.0, abs=0.75), pytest.approx(12.0, abs=0.75))
    assert seen.waits_ms == pytest.approx(np.full(len(seen.waits_ms), 0.724))


def test_metrics_tell_how_busy_the_gpu_is() -> None:
    assert busy_share({"DCGM_FI_DEV_GPU_UTIL": 60.0}) == 0.6
    assert busy_share({"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.3, "DCGM_FI_DEV_GPU_UTIL": 60.0}) == 0.3
    assert busy_share({"DCGM_FI_DEV_POWER_USAGE": 300.0}) is None
    guessed = other_work_guessed(0.25, SHARING)
    assert (guessed.busy_ms, guessed.quiet_ms, guessed.waits_ms.tolist()) == (5.0, 15.0, [0.3, 0.7, 2.4])
    assert other_work_guessed(0.99, SHARING).quiet_ms == 0
    assert other_work_guessed(0.0, SHARING).busy_ms == 0


def test_a_load_guessed_to_be_like_a_probed_one_has_its_waits_and_phases() -> None:
    like = OtherWork(5.0, 3.0, np.array([0.7, 0.8]))
    guessed = other_work_guessed(0.25, SHARING, like)
    assert (guessed.busy_ms, guessed.quiet_ms, guessed.waits_ms.tolist()) == (2.0, 6.0, [0.7, 0.8])
    steady = other_work_guessed(0.25, SHARING, OtherWork(1.0, 0.0, np.array([0.7])))
    assert (steady.busy_ms, steady.quiet_ms, steady.waits_ms.tolist()) == (5.0, 15.0, [0.7])  # no phases to be seen
    nothing = other_work_guessed(0.25, SHARING, OtherWork(0.0, 1.0, np.zeros(0)))
    assert nothing.waits_ms.tolist() == [0.3, 0.7, 2.4]


def test_what_was_learned_is_read_as_written(tmp_path: Path) -> None:
    assert read_sharing(tmp_path) is None
    files.write_json(sharing_path(tmp_path), SHARING)
    assert read_sharing(tmp_path) == SHARING
    sharing_path(tmp_path).write_text(sharing_path(tmp_path).read_text().replace('"version": 1', '"version": 2').replace(
        '"version":1', '"version":2'))
    with pytest.raises(UserError, match=r"version 2, .*fit_sharing\.py"):
        read_sharing(tmp_path)


def shared(model: str, machine: str, latencies_ms: list[float], wait_ms: float = 0.7) -> SharedRuns:
    return SharedRuns(model, "compute", 0.5, np.array(latencies_ms), 1.0, OtherWork(10.0, 10.0, np.array([wait_ms])), 0.5, {},
                      machine)


def test_what_another_machine_measured() -> None:
    found = measured_elsewhere([shared("a", "one", [1.0]), shared("a", "two", [2.0]), shared("a", "three", [4.0]),
                                shared("b", "one", [9.0])])
    assert found[:, 0].tolist()[:3] == [3.0, 2.5, 1.5]
    assert np.isnan(found[3]).all()


def test_backgrounds_that_are_a_known_model_in_a_loop() -> None:
    backgrounds = {one.name: one for one in (
        Background(name="compute"), Background(name="r50", kind="model", model=Path("zoo/resnet50.onnx"), dims={"batch": 16}),
        Background(name="other", kind="model", model=Path("other.onnx")))}
    assert looped_models(backgrounds, {"resnet50@batch=16", "resnet50"}) == {"r50": "resnet50@batch=16"}


def test_the_longest_wait_is_a_turn_and_a_switch() -> None:
    wait_ms = longest_wait_ms([shared("a", "one", [1.0]), shared("a", "one", [1.0], 2.4)])
    assert wait_ms == 2.4
    found = with_turns(SHARING, wait_ms, 0.2)
    assert (found.longest_turn_ms, found.switch_ms, found.slice_ms) == (pytest.approx(2.2), 0.2, SHARING.slice_ms)


def test_a_model_in_a_loop_as_another_meets_it() -> None:
    """A short one has its turn run by run; one longer than the longest turn is cut, the rest of it a turn as well."""
    sharing = SHARING.model_copy(update={"longest_turn_ms": 2.2, "switch_ms": 0.2})

    def run(gpu_ms: float) -> PipelineTracks:
        return np.full(10, gpu_ms / 10), np.zeros(10) + 1e-6, np.ones(10, dtype=bool), COSTS.model_copy(update={"gap_ms": 0.0})

    short, long = (in_a_loop(run(gpu_ms), run(1.0), sharing) for gpu_ms in (0.5, 3.0))
    assert (short.busy_ms, short.quiet_ms) == (1.0, 0.0)
    assert short.waits_ms.max() == pytest.approx(0.5 + 0.2, rel=0.05)
    assert long.waits_ms.max() == pytest.approx(2.4)
    assert long.waits_ms.min() == pytest.approx(0.8 + 0.2, rel=0.05)
    assert gpu_work_ms(*run(3.0)) == pytest.approx(3.0)
