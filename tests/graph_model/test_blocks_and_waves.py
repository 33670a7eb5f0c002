"""The simulation of processes that share a GPU through MPS, against what its rules give by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.sharing import Grids, MpsProcess, MpsRules, mps_runs_ms, times_at_share, with_share

COSTS = PipelineCosts(node_ms=0.001, view_ms=0.0, launch_ms=0.001, start_ms=0.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0)
RULES = MpsRules(wave_ms=0.1, last_wave=1.0, slowdown=0.0, bandwidth_slowdown=0.0, switch_ms=0.0, share_slowdown=1.0)


def process(gpu_ms: float, width: float, kernels: int = 20, bandwidth: float = 0.0, share: float = 1.0) -> MpsProcess:
    tracks = Tracks(np.full(kernels, gpu_ms), np.ones(kernels), np.ones(kernels, dtype=int))
    return MpsProcess(tracks, COSTS, Grids(np.full(kernels, width), np.full(kernels, bandwidth)), share)


def mean_ms(model: MpsProcess, *others: MpsProcess, rules: MpsRules = RULES) -> float:
    return float(mps_runs_ms(model, others, rules, np.random.default_rng(3)).mean())


@pytest.mark.parametrize("width", [0.3, 1.0])
def test_alone_a_run_takes_as_long_as_its_tracks(width: float) -> None:
    model = process(0.5, width)
    assert mean_ms(model) == pytest.approx(pipeline_ms(model.tracks, COSTS))


def test_kernels_that_leave_room_delay_nobody() -> None:
    model = process(0.5, 0.4)
    assert mean_ms(model, process(0.5, 0.5)) == pytest.approx(mean_ms(model))


def test_kernels_that_fill_the_gpu_wait_for_each_other() -> None:
    model = process(0.5, 1.0)
    assert mean_ms(model, model) == pytest.approx(2 * mean_ms(model), rel=0.05)


def test_a_short_kernel_waits_for_the_long_one_before_it() -> None:
    """As measured beside large products: each of twenty kernels waits for one that takes 25 times as long."""
    model, large = process(0.02, 1.0), process(0.5, 1.0)
    assert mean_ms(model, large) == pytest.approx(20 * (0.02 + 0.5), rel=0.1)


def test_shares_keep_processes_apart() -> None:
    model, large = process(0.02, 1.0, share=0.5), process(0.5, 1.0, share=0.5)
    assert mean_ms(model, large) == pytest.approx(mean_ms(model))


def test_three_processes_with_half_of_the_threads_each_wait() -> None:
    model = process(0.5, 1.0, share=0.5)
    assert mean_ms(model, model) == pytest.approx(mean_ms(model))
    assert mean_ms(model, model, model) > 1.3 * mean_ms(model)


def test_a_share_makes_only_kernels_longer_that_are_wider() -> None:
    times = times_at_share(np.array([1.0, 1.0, 1.0]), np.array([0.25, 0.5, 1.0]), 0.25, RULES)
    assert times.tolist() == [1.0, 2.0, 4.0]
    model = process(0.5, 1.0)
    fewer = with_share(model.tracks, model.grids, 0.5, RULES)
    assert mean_ms(model._replace(share=0.5)) == pytest.approx(pipeline_ms(fewer, COSTS))


def test_bandwidth_is_shared() -> None:
    rules = RULES.model_copy(update={"slowdown": 0.2, "bandwidth_slowdown": 0.4})
    model, copies = process(0.5, 0.3, bandwidth=0.5), process(0.5, 0.3, bandwidth=1.0)
    assert mean_ms(model, copies, rules=rules) == pytest.approx((1.0 + 0.2 + 0.4 * 0.5) * mean_ms(model), rel=0.05)


def test_others_ask_for_no_more_than_the_bandwidth() -> None:
    rules = RULES.model_copy(update={"slowdown": 0.6})
    model, copies = process(0.5, 0.2, bandwidth=0.5), process(0.5, 0.2, bandwidth=1.0)
    beside_one = mean_ms(model, copies, rules=rules)
    assert mean_ms(model, copies, copies, rules=rules) == pytest.approx(beside_one, rel=0.03)


def test_a_kernel_of_which_half_runs_asks_for_half_of_its_bandwidth() -> None:
    """The copies fill the GPU and have half of it; narrow ones that run whole ask for all of theirs."""
    rules = RULES.model_copy(update={"slowdown": 0.6})
    model = process(0.5, 0.4, share=0.5)
    wide, narrow = (process(0.5, width, bandwidth=0.8, share=0.5) for width in (1.0, 0.4))
    assert mean_ms(model, wide, rules=rules) == pytest.approx((1.0 + 0.6 * 0.4) * mean_ms(model), rel=0.03)
    assert mean_ms(model, narrow, rules=rules) == pytest.approx((1.0 + 0.6 * 0.8) * mean_ms(model), rel=0.03)


def test_a_process_without_work_for_the_gpu_is_left_out() -> None:
    idle = process(0.0, 1.0)
    idle = idle._replace(tracks=idle.tracks._replace(launches=np.zeros(20)))
    rules = RULES.model_copy(update={"switch_ms": 0.1})
    model = process(0.5, 1.0)
    assert mean_ms(model, idle, rules=rules) == pytest.approx(mean_ms(model))
