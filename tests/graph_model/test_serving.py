"""Simulated requests to served models against what queueing theory says of them; and processes that share a GPU through MPS
against what the simulation's rules give by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from hase.graph_model.simulation.pipeline import Floats, PipelineCosts, Tracks, pipeline_ms
from hase.graph_model.simulation.serving import PACES, SLOWER, STEADY, Case, Host, Served, busy_share, served, set_of
from hase.graph_model.simulation.sharing import Grids, MpsProcess, MpsRules, mps_runs_ms, times_at_share

ALONE = np.ones((1, 2, 2, 1))


def beside(effects: Mapping[tuple[int, ...], Sequence[float]], models: int) -> Floats:
    """How many times as long runs take at any pace: of the first model of each key beside the others of it; else they take no
    longer."""
    slowdowns = np.ones((models, 1 << models, 2, max(map(len, effects.values()), default=1)))
    for (model, *others), samples in effects.items():
        slowdowns[model, [set_of(others), set_of((model, *others))]] = samples
    return slowdowns


def one(rate_per_s: float, run_ms: float, batch: int = 1, requests: int = 20_000) -> Served:
    """A model that is served alone."""
    case = Case([rate_per_s], [batch], [np.array([run_ms])], ALONE)
    return served([case], np.random.default_rng(1), requests)[0][0]


@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_one_request_each_run(load: float) -> None:
    """M/D/1: the mean wait is ρ/(2(1 − ρ)) runs (Pollaczek and Khinchine)."""
    found = one(load * 500.0, 2.0, requests=60_000)
    assert found.mean_ms == pytest.approx(2.0 * (1.0 + load / (2.0 * (1.0 - load))), rel=0.03)
    assert (found.busy, found.run_ms, found.stable) == (pytest.approx(load, rel=0.02), pytest.approx(2.0), True)


def of_host(host: Host, rate_per_s: float) -> Served:
    """A model that is served alone and needs its host alone: 2 ms at the usual pace."""
    case = Case([rate_per_s], [1], [2.0 * np.array(PACES)], ALONE)
    return served([case], np.random.default_rng(1), 60_000, host=host)[0][0]


@pytest.mark.slow
def test_runs_that_differ() -> None:
    """M/G/1 where the host's pace is another one for each run: the mean wait is λ E[S²]/(2(1 − ρ)). Where a pace lasts, runs
    queue up meanwhile."""
    changing = Host(np.array([0.6, 1.4]), 1e-9, *STEADY[2:])
    found = of_host(changing, 300.0)
    assert found.run_ms == pytest.approx(2.0, rel=0.01)
    assert found.mean_ms == pytest.approx(2.0 + 0.3 * (1.2**2 + 2.8**2) / 2.0 / (2.0 * 0.4), rel=0.04)
    assert of_host(changing._replace(lasts_ms=100.0), 300.0).mean_ms > 1.1 * found.mean_ms
    waking = Host(np.ones(1), np.inf, np.array([1.0, 10.0]), np.array([1.0, 1.5]))  # one that was idle is slower at first
    assert [of_host(waking, rate_per_s).run_ms for rate_per_s in (10.0, 450.0)] == pytest.approx([3.0, 2.0], rel=0.05)


def test_a_host_that_stalls() -> None:
    """20 ms once in a second in which it works: the runs take as much longer, and p99 shows it. A request that finds the host
    stalled waits for the rest. The GPU goes on meanwhile: where the host does not hold it up, no run takes longer."""
    stalling = STEADY._replace(stalls_per_s=1.0, stalls_ms=np.array([20.0]))
    found = of_host(stalling, 50.0)
    per_run_ms = (1.0 - np.exp(-0.002)) * 20.0 + 0.02 * 0.9 * 10.0  # nine of ten requests find a process that was idle
    assert found.run_ms == pytest.approx(2.0 + per_run_ms, rel=0.03)
    assert found.percentile_ms(50) < 2.1
    assert found.percentile_ms(99) > 10.0
    gpu_bound = served([Case([450.0], [1], [np.array([2.0])], ALONE)], np.random.default_rng(1), 60_000, host=stalling)[0][0]
    assert gpu_bound.run_ms == pytest.approx(2.0 + 0.02 * 0.1 * 10.0, rel=0.01)


@pytest.mark.parametrize(("rate_per_s", "batch"), [(400.0, 4), (1500.0, 8), (3000.0, 16)])
def test_busy_share(rate_per_s: float, batch: int) -> None:
    assert one(rate_per_s, 2.0, batch).busy == pytest.approx(busy_share(rate_per_s, 2.0, batch), rel=0.02)
    assert [busy_share(rate, 2.0, 1) for rate in (300.0, 600.0, 0.0)] == pytest.approx([0.6, 1.0, 0.0])


@pytest.mark.slow
def test_more_requests_than_can_be_served() -> None:
    found = one(1000.0, 2.0, requests=4000)
    assert (found.stable, found.percentile_ms(95), found.busy) == (False, np.inf, pytest.approx(1.0, abs=0.01))
    assert one(1000.0, 2.0, 4, requests=4000).stable
    cases = [Case([9000.0], [batch], [np.array([run_ms])], ALONE) for batch, run_ms in ((1, 0.6), (64, 30.0), (512, 24.0))]
    results = [result for result, in served(cases, np.random.default_rng(7), 1000, 40)]  # the longest run counts for all
    assert [result.offered for result in results] == pytest.approx([5.4, 9000 * 0.03 / 64, 9000 * 0.024 / 512])
    assert [result.percentile_ms(95) < np.inf for result in results] == [False, False, True]


@pytest.mark.slow
def test_models_that_do_not_slow_each_other() -> None:
    alone = one(300.0, 2.0, requests=60_000)
    assert list(alone.percentiles_ms) == sorted(alone.percentiles_ms)
    assert alone.percentile_ms(50.5) == pytest.approx((alone.percentiles_ms[50] + alone.percentiles_ms[51]) / 2.0)
    case = Case([300.0, 900.0], [1, 8], [np.array([2.0]), np.array([4.0])], beside({}, 2))
    found = served([case], np.random.default_rng(2), 60_000)[0][0]
    assert (found.mean_ms, found.percentile_ms(95)) == pytest.approx((alone.mean_ms, alone.percentile_ms(95)), rel=0.03)


def test_beside_others_that_are_always_busy() -> None:
    """A model of 2 ms whose others have more requests than they can serve: its runs take as long as beside loops."""
    def beside_loops(effects: Mapping[tuple[int, ...], Sequence[float]], rate_per_s: float) -> list[Served]:
        others = max(max(key[1:]) for key in effects)
        case = Case([rate_per_s] + [5000.0] * others, [1] * (others + 1), [np.array([2.0])] + [np.array([3.0])] * others,
                    beside(effects, others + 1))
        return list(served([case], np.random.default_rng(4))[0])

    model, looped = beside_loops({(0, 1): [1.5]}, 100.0)
    assert model.run_ms == pytest.approx(3.0, rel=1e-3)
    assert model.mean_ms == pytest.approx(3.0 * (1.0 + 0.3 / 1.4), rel=0.03)
    assert (model.stable, looped.stable) == (True, False)
    by_turns = beside_loops({(0, 1): [1.0, 3.0]}, 1.0)[0]  # 4 ms in the mean, and the slow runs decide p95
    assert by_turns.run_ms == pytest.approx(4.0, rel=0.03)
    assert [by_turns.percentile_ms(percent) for percent in (25, 95)] == pytest.approx([2.0, 6.0], rel=0.01)
    of_three = beside_loops({(0, 1): [1.5], (0, 2): [1.25], (0, 1, 2): [2.5]}, 50.0)[0]
    assert of_three.run_ms == pytest.approx(5.0, rel=1e-3)  # not the sum of what each of them adds


@pytest.mark.parametrize(("pace", "slowdown"), [(1.0, 2.0), (SLOWER, 1.5), (SLOWER**0.5, 1.75), (0.6, 2.5), (3.0, 1.25)])
def test_a_wait_for_the_gpu_is_hidden_where_the_host_is_slow(pace: float, slowdown: float) -> None:
    """Twice as long beside the other at the usual pace, and 1.5 times at SLOWER; beyond SLOWER_RANGE as at its ends."""
    slowdowns = beside({(0, 1): [2.0]}, 2)
    slowdowns[0, :, 1] = np.where(slowdowns[0, :, 1] > 1.0, 1.5, 1.0)
    case = Case([50.0, 5000.0], [1, 1], [2.0 * np.array(PACES), np.array([3.0])], slowdowns)
    host = Host(np.array([pace]), np.inf, *STEADY[2:])
    assert served([case], np.random.default_rng(7), host=host)[0][0].run_ms == pytest.approx(2.0 * pace * slowdown, rel=1e-3)


COSTS = PipelineCosts(node_ms=0.001, view_ms=0.0, launch_ms=0.001, start_ms=0.0, gap_ms=0.0, lead_ms=0.0, end_ms=0.0)
RULES = MpsRules(wave_ms=0.1, last_wave=1.0, slowdown=0.0, bandwidth_slowdown=0.0, switch_ms=0.0, share_slowdown=1.0)


def process(gpu_ms: float, width: float, bandwidth: float = 0.0, share: float = 1.0) -> MpsProcess:
    """Twenty kernels of a process under MPS."""
    tracks = Tracks(np.full(20, gpu_ms), np.ones(20), np.ones(20, dtype=int))
    return MpsProcess(tracks, COSTS, Grids(np.full(20, width), np.full(20, bandwidth)), share)


def mps_ms(model: MpsProcess, *others: MpsProcess, rules: MpsRules = RULES) -> float:
    return float(mps_runs_ms(model, others, rules, np.random.default_rng(3)).mean())


FULL, HALF, IDLE = process(0.5, 1.0), process(0.5, 1.0, share=0.5), process(0.0, 1.0)
IDLE = IDLE._replace(tracks=IDLE.tracks._replace(launches=np.zeros(20)))


@pytest.mark.parametrize(("model", "others", "rules", "times_as_long"), [
    pytest.param(process(0.5, 0.4), [process(0.5, 0.5)], {}, 1.0, id="kernels that leave room delay nobody"),
    pytest.param(FULL, [FULL], {}, 2.0, id="kernels that fill the GPU wait for each other"),
    # as measured beside large products: each of twenty kernels waits for one that takes 25 times as long
    pytest.param(process(0.02, 1.0), [FULL], {}, 26.0, id="a short kernel waits for the long one before it"),
    pytest.param(process(0.02, 1.0, share=0.5), [HALF], {}, 1.0, id="shares keep processes apart"),
    pytest.param(process(0.5, 0.3, 0.5), [process(0.5, 0.3, 1.0)], {"slowdown": 0.2, "bandwidth_slowdown": 0.4},
                 1.0 + 0.2 + 0.4 * 0.5, id="bandwidth is shared"),
    pytest.param(process(0.5, 0.2, 0.5), [process(0.5, 0.2, 1.0)] * 2, {"slowdown": 0.6}, 1.6, id="two ask for no more"),
    pytest.param(process(0.5, 0.4, share=0.5), [process(0.5, 1.0, 0.8, 0.5)], {"slowdown": 0.6}, 1.0 + 0.6 * 0.4,
                 id="a kernel of which half runs asks for half of its bandwidth"),
    pytest.param(FULL, [IDLE], {"switch_ms": 0.1}, 1.0, id="without work for the GPU a process is left out"),
])
def test_runs_beside_others(model: MpsProcess, others: Sequence[MpsProcess], rules: dict[str, float],
                            times_as_long: float) -> None:
    assert mps_ms(FULL) == pytest.approx(pipeline_ms(FULL.tracks, COSTS))  # alone
    times = mps_ms(model, *others, rules=RULES.model_copy(update=rules))
    assert times / mps_ms(model) == pytest.approx(times_as_long, rel=1e-6 if times_as_long == 1.0 else 0.05)


def test_a_share_makes_only_kernels_longer_that_are_wider() -> None:
    times = times_at_share(np.array([1.0, 1.0, 1.0]), np.array([0.25, 0.5, 1.0]), 0.25, RULES)
    assert times.tolist() == [1.0, 2.0, 4.0]
    assert mps_ms(HALF, HALF, HALF) > 1.3 * mps_ms(HALF)  # three processes with half of the threads each wait
    assert mps_ms(HALF) == pytest.approx(pipeline_ms(HALF.tracks_alone(RULES), COSTS))
