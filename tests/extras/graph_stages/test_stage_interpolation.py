"""Times at sizes that were not measured."""

from __future__ import annotations

import pytest

from hase.extras.graph_stages.planning.tables import estimated, surrounding
from hase.utils.errors import UserError

STEPS = (1000, 2000, 3000, 5000, 10000)
SIZES = [(nodes, edges) for nodes in STEPS for edges in STEPS if edges >= nodes]
LINEAR = {(nodes, edges): 0.05 + 2e-4 * nodes + 7e-5 * edges for nodes, edges in SIZES}


@pytest.mark.parametrize("size", [(4000, 6000), (1500, 1500), (1000, 7000), (2500, 9999), (9000, 9500)])
def test_linear_times_are_interpolated_exactly(size: tuple[int, int]) -> None:
    estimate = estimated(LINEAR, size)
    assert estimate.basis == "interpolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * size[0] + 7e-5 * size[1])


def test_only_sizes_near_it_count() -> None:
    weights = surrounding(tuple(SIZES), (2500, 4000))
    assert weights is not None
    assert set(weights) <= {(2000, 3000), (2000, 5000), (3000, 3000), (3000, 5000)}
    assert sum(weights.values()) == pytest.approx(1)


def test_a_measured_size_gives_the_measurement() -> None:
    odd = LINEAR | {(2000, 3000): 7.0}
    estimate = estimated(odd, (2000, 3000))
    assert (estimate.ms, estimate.basis) == (7.0, "measured")
    assert estimated({(1000, 1000): 2.0}, (1000, 1000)).ms == 2.0


def test_sizes_on_a_line_are_enough_along_it() -> None:
    line = {(1000, 2000): 1.0, (2000, 4000): 2.0, (4000, 8000): 4.0}
    assert estimated(line, (3000, 6000)).ms == pytest.approx(3.0)
    with pytest.raises(UserError, match=r"3000 nodes with 5000 edges lie outside .* in these pairs: 1000/2000, "):
        estimated(line, (3000, 5000))


def test_outside_is_an_error_or_marked() -> None:
    with pytest.raises(UserError, match=r"20000 nodes with 20000 edges lie outside .*1000 to 10000 nodes.*--extrapolate"):
        estimated(LINEAR, (20000, 20000))
    with pytest.raises(UserError, match="lie outside"):
        estimated(LINEAR, (5000, 1000))  # within both ranges, but not between measured sizes
    estimate = estimated(LINEAR, (20000, 30000), extrapolate=True)
    assert estimate.basis == "extrapolated"
    assert estimate.ms == pytest.approx(0.05 + 2e-4 * 20000 + 7e-5 * 30000)
    assert estimated({size: 1e-6 * size[1] for size in SIZES}, (500, 500), extrapolate=True).ms == pytest.approx(5e-4)


def test_the_sizes_around_a_size_are_searched_once() -> None:
    """However many stages and units ask: the search takes most of the time, and a runtime waits for it."""
    surrounding.cache_clear()
    for factor in (1.0, 2.0, 3.0):
        estimated({size: factor * time_ms for size, time_ms in LINEAR.items()}, (4000, 6000))
    assert surrounding.cache_info().misses == 1
