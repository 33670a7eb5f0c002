"""Runs next to another process on one GPU: turns, how long a run waits, and what a probe and metrics show of it.

No GPU is here: tracks are made up, and the expected values are from an H200 (ResNet-18 and -50 next to bursts).
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hase.graph_model.simulation.pipeline import NodeKind, PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.sharing import CoRunner, gpu_work_ms, shared_runs_ms
from hase.learned.sharing import (
    DEFAULT_SWITCH_MS,
    Sharing,
    TracksAndCosts,
    busy_share,
    co_runner_from_latencies,
    co_runner_guessed,
    co_runner_probed,
    co_runner_summarised,
    looped_co_runner,
)
from hase.records.dataset_files import DatasetHeader, header_path
from hase.records.measurement import Background, Block
from hase.records.probe_reading import summarise_probe
from hase.runtimes import local_target
from hase.training.fit_sharing import SLICES_MS, SharingEvaluation, backgrounds_of
from hase.training.fits.time_slices import Pairs, SharedRuns, Simulated, SimulatedModels, alone_ms, typical
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.paths import ROOT, Workspace

COSTS = PipelineCosts(node_ms=0.002, view_ms=0.0, launch_ms=0.004, start_ms=0.02, gap_ms=0.001, lead_ms=-0.01, end_ms=0.01)
SHARING = Sharing(slice_ms=2.0, alone_ms={"tiny": 0.016, "long": 0.5}, waits_ms=(0.3, 0.7, 2.4), cycle_ms=20.0,
                  longest_wait_ms=2.4, switch_ms=DEFAULT_SWITCH_MS)


def alike(gpu_ms: float, nodes: int, launches: float) -> Tracks:
    """Equal nodes that take the GPU `gpu_ms` together."""
    return Tracks(np.full(nodes, gpu_ms / nodes), np.full(nodes, launches), np.full(nodes, NodeKind.OWN))


def runs(gpu_ms: float, co_runner: CoRunner) -> npt.NDArray[np.float64]:
    """Runs of a model of 60 equal nodes that takes the GPU `gpu_ms`."""
    return shared_runs_ms(alike(gpu_ms, 60, 2.0), COSTS, 2.0, co_runner, np.random.default_rng(0))


def idle(gpu_ms: float) -> float:
    return pipeline_ms(alike(gpu_ms, 60, 2.0), COSTS)


def always(wait_ms: float) -> CoRunner:
    return CoRunner(1.0, 0.0, np.array([wait_ms]))


NOTHING = CoRunner(0.0, 1.0, np.zeros(0))


@pytest.mark.parametrize(("gpu_ms", "nodes"), [(0.1, 60), (3.0, 400)])
@pytest.mark.parametrize("lead_ms", [-0.5, -0.01, 0.05])  # with a lead of −0.5 ms the GPU's track begins before the run does
def test_without_other_work_a_run_is_as_long_as_on_an_idle_gpu(gpu_ms: float, nodes: int, lead_ms: float) -> None:
    costs, tracks = COSTS.model_copy(update={"lead_ms": lead_ms}), alike(gpu_ms, nodes, 2.0)
    alone, beside = (shared_runs_ms(tracks, costs, 2.0, co_runner, np.random.default_rng(0))
                     for co_runner in (NOTHING, always(2.4)))
    assert alone == pytest.approx(pipeline_ms(tracks, costs), rel=1e-9)
    assert beside.min() > alone.max() + 1.0


def test_waits_of_a_run() -> None:
    for gpu_ms, waits in ((1.0, 1), (3.0, 2), (5.5, 3)):  # once at its start, and once for each full slice
        runs_ms = runs(gpu_ms, always(2.4))
        assert runs_ms.std() == pytest.approx(0, abs=1e-9)
        assert runs_ms.mean() == pytest.approx(idle(gpu_ms) + waits * 2.4, rel=0.05)
    assert runs(0.1, always(0.3)).mean() < idle(0.1) + 0.2  # the host, the slower track, continues to dispatch
    assert runs(0.1, always(2.4)).mean() > 2.4
    runs_ms = runs(1.0, CoRunner(10.0, 10.0, np.array([0.7])))  # beside pauses a mixture
    assert np.percentile(runs_ms, 5) == pytest.approx(idle(1.0), rel=0.01)
    assert np.percentile(runs_ms, 97) == pytest.approx(idle(1.0) + 0.7, rel=0.05)
    assert idle(1.0) < runs_ms.mean() < idle(1.0) + 0.5


def test_a_probe_separates_phases() -> None:
    """Four periods of 20 ms, the other process busy in the first 8 ms of each with bursts of 0.74 ms."""
    never = co_runner_from_latencies(np.arange(100) * 0.02, np.full(100, 0.016), 0.016)
    assert (never.busy_ms, len(never.waits_ms)) == (0.0, 0)
    without_pause = co_runner_from_latencies(np.arange(50) * 2.45, np.full(50, 2.436), 0.016)
    assert without_pause.quiet_ms == 0
    assert without_pause.waits_ms == pytest.approx(np.full(50, 2.42))
    starts_ms, latencies_ms, now_ms = [], [], 0.0
    while now_ms < 80.0:
        run_ms = 0.74 if now_ms % 20.0 < 8.0 else 0.016
        starts_ms.append(now_ms)
        latencies_ms.append(run_ms)
        now_ms += run_ms
    phases = co_runner_from_latencies(starts_ms, latencies_ms, 0.016)
    assert (phases.busy_ms, phases.quiet_ms) == pytest.approx((8.0, 12.0), abs=0.75)
    assert phases.waits_ms == pytest.approx(np.full(len(phases.waits_ms), 0.724))


def test_a_summary_gives_the_same_as_its_reading() -> None:
    """Readings of H200s, idle and next to all measured loads. In one of them a run takes 0.490 ms, exactly the border of
    waiting: only the summary has its quiet phase in two parts."""
    with tarfile.open(ROOT / "recipes" / "h200" / "beside-nvidia-h200.tar.xz") as opened:
        journal = opened.extractfile("benchmark/dataset/nvidia-h200-cuda-ort1.31-all/measurements.jsonl")
        assert journal is not None
        blocks = [block for line in journal if (block := Block.model_validate_json(line)).probe]
    alone, at_the_border = alone_ms(blocks), 0
    for block in blocks:
        assert block.probe is not None
        probed, summary = co_runner_probed(block.probe, alone), summarise_probe(block.probe)
        from_summary = co_runner_summarised(summary, alone)
        assert (from_summary.busy_ms == 0.0, from_summary.quiet_ms == 0.0) == (probed.busy_ms == 0.0, probed.quiet_ms == 0.0)
        assert from_summary.busy_ms == pytest.approx(probed.busy_ms, rel=0.05)
        at_the_border += from_summary.quiet_ms != pytest.approx(probed.quiet_ms, rel=0.05)
        assert from_summary.quiet_ms == pytest.approx(probed.quiet_ms, rel=0.2)
        if len(probed.waits_ms):
            assert from_summary.waits_ms.mean() == pytest.approx(probed.waits_ms.mean(), rel=0.05)
    assert {block.level for block in blocks} >= {0.0, 0.25, 0.5, 1.0}
    assert at_the_border == 1


def test_metrics_show_how_busy_the_gpu_is() -> None:
    assert busy_share({"DCGM_FI_DEV_GPU_UTIL": 60.0}) == 0.6
    assert busy_share({"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.3, "DCGM_FI_DEV_GPU_UTIL": 60.0}) == 0.3
    assert busy_share({"DCGM_FI_DEV_POWER_USAGE": 300.0}) is None
    guessed = co_runner_guessed(0.25, SHARING)
    assert (guessed.busy_ms, guessed.quiet_ms, guessed.waits_ms.tolist()) == (5.0, 15.0, [0.3, 0.7, 2.4])
    assert co_runner_guessed(0.99, SHARING).quiet_ms == 0
    assert co_runner_guessed(0.0, SHARING).busy_ms == 0


def shared(model: str, machine: str, latencies_ms: list[float], wait_ms: float = 0.7) -> SharedRuns:
    return SharedRuns(model, "compute", 0.5, np.array(latencies_ms), 1.0, CoRunner(10.0, 10.0, np.array([wait_ms])), 0.5, {},
                      machine)


def track(gpu_ms: float) -> Tracks:
    """Ten nodes that are dispatched together."""
    return alike(gpu_ms, 10, 1e-6)


def test_one_name_for_two_backgrounds_is_refused(tmp_path: Path) -> None:
    target = local_target("cpu")

    def workspace(name: str, burst_ms: float) -> Workspace:
        made = Workspace(tmp_path / name)
        files.write_json(header_path(made.dataset(target.name)), DatasetHeader(
            target=target, metrics=(), machines={}, backgrounds={"bursts": Background(name="bursts", burst_ms=burst_ms)}))
        return made

    short, equal, long = workspace("one", 0.5), workspace("same", 0.5), workspace("other", 2.0)
    assert list(backgrounds_of([short, equal], target.name)) == ["bursts"]
    with pytest.raises(UserError, match=r"other.*background bursts differs"):
        backgrounds_of([short, long], target.name)


def test_waits_are_those_beside_average_work() -> None:
    """The average of two kinds, however often each was read, and not a mixture of both. The longest is that of all readings."""
    short, short_again, long = (replace(shared("a", "one", [1.0], wait_ms), background=name)
                                for name, wait_ms in (("short", 0.5), ("short", 0.5), ("long", 2.5)))
    sharing = typical([short, short_again, long], 2.0, SHARING.alone_ms)
    assert set(sharing.waits_ms) == {1.5}
    assert (sharing.longest_wait_ms, sharing.slice_ms, sharing.cycle_ms) == (2.5, 2.0, 20.0)
    with pytest.raises(UserError, match="no reading of the sharing probe waited"):
        typical([], 2.0, SHARING.alone_ms)


@pytest.mark.parametrize(("slice_ms", "warns"), [(SLICES_MS[0], True), (2.0, False)])
def test_a_slice_at_the_edge_of_the_tried_ones_gives_a_warning(slice_ms: float, warns: bool,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    """The fit to a run simulated with a slice finds this slice."""
    model = Simulated(track(7.3), COSTS)
    run = shared("a", "one", [1.0], 2.4)
    run = replace(run, idle_ms=model.idle_ms(), samples_ms=model.next_to(run.co_runner, slice_ms)[:1])
    evaluation = SharingEvaluation([run], SimulatedModels({"a": model}, {"a": model}, {"a": "a"}, {}), SHARING.alone_ms)
    with caplog.at_level("WARNING"):
        assert evaluation.learned().slice_ms == slice_ms
    assert (f"a slice of {slice_ms:g} ms gives the smallest error" in caplog.text) is warns


def test_a_switch_is_fitted_without_the_looped_model_and_without_the_family() -> None:
    """Runs next to one looped model have a switch of 0.1 ms, next to the other model of 0.3 ms. Each is predicted with the
    other one's switch."""
    models = {name: Simulated(track(gpu_ms), COSTS) for name, gpu_ms in (
        ("a", 1.0), ("b", 1.5), ("short", 0.5), ("long", 3.0))}
    runs = [replace(shared(model, "one", [1.0]), background=background, level=1.0)
            for background in ("s", "l") for model in ("a", "b")]
    names = {"s": "short", "l": "long"}

    def next_to(place: int, switch_ms: float) -> npt.NDArray[np.float64]:
        sharing = SHARING.model_copy(update={"switch_ms": switch_ms})
        model, looped_model = models[runs[place].model], models[names[runs[place].background]]
        return model.next_to(looped_co_runner([looped_model.run], model.run, sharing), sharing.slice_ms)

    measured = np.array([next_to(0, 0.1), next_to(1, 0.1), next_to(2, 0.3), next_to(3, 0.3)])
    pairs = Pairs(runs, measured, models, {"a": "a", "b": "b"}, names, [SHARING] * 4)
    assert pairs.left_out() == pytest.approx(np.array([next_to(0, 0.3), next_to(1, 0.3), next_to(2, 0.1), next_to(3, 0.1)]))


def looped(gpu_ms: float) -> TracksAndCosts:
    return track(gpu_ms), COSTS.model_copy(update={"gap_ms": 0.0})


def test_turns_of_models_in_loops() -> None:
    """A short model has one turn per run. A run longer than the longest turn is cut, and its rest has a turn too."""
    sharing = SHARING.model_copy(update={"switch_ms": 0.2})
    short, long = (looped_co_runner([looped(gpu_ms)], looped(1.0), sharing) for gpu_ms in (0.5, 3.0))
    assert (short.busy_ms, short.quiet_ms) == (1.0, 0.0)
    assert short.waits_ms.max() == pytest.approx(0.5 + 0.2, rel=0.05)
    assert (long.waits_ms.min(), long.waits_ms.max()) == pytest.approx((0.8 + 0.2, 2.4), rel=0.05)
    assert gpu_work_ms(*looped(3.0)) == pytest.approx(3.0)
    both = looped_co_runner([looped(0.5), looped(3.0)], looped(1.0), sharing).waits_ms  # a run waits for a turn of each
    for of in (np.mean, np.max):
        assert of(both) == pytest.approx(of(short.waits_ms) + of(long.waits_ms), rel=0.02)
