"""The simulation of processes that share a GPU through MPS, against what its rules give by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.sharing import Grids, MpsProcess, MpsRules, mps_runs_ms, times_at_share, with_share

COSTS = PipelineCosts(node_ms=0.001, view_ms=0.0, launch_ms=0.001, start_ms=0.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0)
RULES = MpsRules(wave_ms=0.1, last_wave=1.0, slowdown=0.0, bandwidth_slowdown=0.0, switch_ms=0.0, share_slowdown=1.0)


def process(gpu_ms: float, width: float, bandwidth: float = 0.0, share: float = 1.0) -> MpsProcess:
    """Twenty kernels."""
    tracks = Tracks(np.full(20, gpu_ms), np.ones(20), np.ones(20, dtype=int))
    return MpsProcess(tracks, COSTS, Grids(np.full(20, width), np.full(20, bandwidth)), share)


def mean_ms(model: MpsProcess, *others: MpsProcess, rules: MpsRules = RULES) -> float:
    return float(mps_runs_ms(model, others, rules, np.random.default_rng(3)).mean())


FULL, HALF, IDLE = process(0.5, 1.0), process(0.5, 1.0, share=0.5), process(0.0, 1.0)
IDLE = IDLE._replace(tracks=IDLE.tracks._replace(launches=np.zeros(20)))


@pytest.mark.parametrize("width", [0.3, 1.0])
def test_alone_a_run_takes_as_long_as_its_tracks(width: float) -> None:
    model = process(0.5, width)
    assert mean_ms(model) == pytest.approx(pipeline_ms(model.tracks, COSTS))


@pytest.mark.parametrize(("model", "others", "rules", "times_as_long"), [
    pytest.param(process(0.5, 0.4), [process(0.5, 0.5)], {}, 1.0, id="kernels that leave room delay nobody"),
    pytest.param(FULL, [FULL], {}, 2.0, id="kernels that fill the GPU wait for each other"),
    # as measured beside large products: each of twenty kernels waits for one that takes 25 times as long
    pytest.param(process(0.02, 1.0), [FULL], {}, 26.0, id="a short kernel waits for the long one before it"),
    pytest.param(process(0.02, 1.0, share=0.5), [HALF], {}, 1.0, id="shares keep processes apart"),
    pytest.param(HALF, [HALF], {}, 1.0, id="two halves fit"),
    pytest.param(process(0.5, 0.3, 0.5), [process(0.5, 0.3, 1.0)], {"slowdown": 0.2, "bandwidth_slowdown": 0.4},
                 1.0 + 0.2 + 0.4 * 0.5, id="bandwidth is shared"),
    pytest.param(process(0.5, 0.2, 0.5), [process(0.5, 0.2, 1.0)], {"slowdown": 0.6}, 1.6, id="one asks for all bandwidth"),
    pytest.param(process(0.5, 0.2, 0.5), [process(0.5, 0.2, 1.0)] * 2, {"slowdown": 0.6}, 1.6, id="two ask for no more"),
    pytest.param(process(0.5, 0.4, share=0.5), [process(0.5, 1.0, 0.8, 0.5)], {"slowdown": 0.6}, 1.0 + 0.6 * 0.4,
                 id="a kernel of which half runs asks for half of its bandwidth"),
    pytest.param(process(0.5, 0.4, share=0.5), [process(0.5, 0.4, 0.8, 0.5)], {"slowdown": 0.6}, 1.0 + 0.6 * 0.8,
                 id="a narrow one that runs whole asks for all of its own"),
    pytest.param(FULL, [IDLE], {"switch_ms": 0.1}, 1.0, id="without work for the GPU a process is left out"),
])
def test_runs_beside_others(model: MpsProcess, others: Sequence[MpsProcess], rules: dict[str, float],
                            times_as_long: float) -> None:
    beside = mean_ms(model, *others, rules=RULES.model_copy(update=rules))
    assert beside / mean_ms(model) == pytest.approx(times_as_long, rel=1e-6 if times_as_long == 1.0 else 0.05)


def test_three_processes_with_half_of_the_threads_each_wait() -> None:
    assert mean_ms(HALF, HALF, HALF) > 1.3 * mean_ms(HALF)


def test_a_share_makes_only_kernels_longer_that_are_wider() -> None:
    times = times_at_share(np.array([1.0, 1.0, 1.0]), np.array([0.25, 0.5, 1.0]), 0.25, RULES)
    assert times.tolist() == [1.0, 2.0, 4.0]
    assert mean_ms(HALF) == pytest.approx(pipeline_ms(with_share(FULL.tracks, FULL.grids, 0.5, RULES), COSTS))
