"""An example: how to measure a unit that is no kernel, with power and energy.

The unit is a matrix product in numpy. A unit of your own needs the same four things: an id, a function that times units, a
canary, and a few lines that put them together. measuring does the rest.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hase.benchmark.measuring.blocks import Bench, PlannedBlock, Steadiness, close_window, open_window
from hase.benchmark.measuring.driver import Totals, measure_loads, plan_blocks
from hase.benchmark.metrics.source import MetricSource, OpenWindow
from hase.records.measurement import Block, JournalFile, Measurement, now, read_blocks, write_units

POWER = "DCGM_FI_DEV_POWER_USAGE"
PRETENDED_W = 50.0


# 1. The unit: anything that has an id -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Product:
    """A product of two square matrices of `side` numbers each way."""

    side: int

    @property
    def id(self) -> str:
        return f"product_{self.side}"

    def run_s(self) -> float:
        """Runs once and returns the seconds that took."""
        if self.side < 0:
            raise ValueError("negative dimensions are not allowed")
        matrix = np.ones((self.side, self.side))
        began_s = time.perf_counter()
        matrix @ matrix
        return time.perf_counter() - began_s


# 2. A source of power. A real one would ask the device; see benchmark/metrics -------------------------------------------

class PretendedPower(MetricSource):
    """Pretends to be a power sensor: a test has none. It always says PRETENDED_W."""

    name, minimum_window_s = "the pretended power sensor", 0.0001

    def __init__(self) -> None:
        super().__init__([POWER], None)

    def _read(self) -> Any:
        return None

    def _readings(self, before: OpenWindow, after: OpenWindow) -> Mapping[str, Sequence[float]]:
        return {POWER: [PRETENDED_W]}


# 3. Timing units: samples in ms, further quantities with their units, and a failure as a measurement with its error --------

def time_product(product: Product, power: MetricSource) -> Measurement:
    """One product: the times of its runs, and the power and energy of the window that they took."""
    started, samples_ms = now(), list[float]()
    facts: dict[str, str] = {"subject": "product", "id": product.id, "label": "run", "context": "alone", "place": "alone",
                             "started": started}
    opened = open_window(power)
    try:
        while len(samples_ms) < 5:
            samples_ms.append(1e3 * product.run_s())
    except ValueError as error:
        return Measurement.model_validate(facts | {"status": "failed", "error": str(error), "ended": now()})
    window = close_window(power, opened)
    quantities = {}  # empty for a window that is too short for the sensor
    if window.means:
        quantities = {"power_w": [window.means[POWER]], "energy_j": [window.means[POWER] * window.seconds]}
    return Measurement.model_validate(facts | {"samples_ms": samples_ms, "quantities": quantities, "ended": now()})


def canary_ms(loaded: bool) -> list[float]:
    """The canary: work that is always the same, timed a few times; more often on a loaded device."""
    return [1e3 * Product(100).run_s() for _ in range(30 if loaded else 5)]


# 4. The collector: what to measure, with what, into which journal --------------------------------------------------------

def collect(folder: Path, sides: Sequence[int], before_each: Callable[[Product], None] = lambda product: None, *,
            machine_uuid: str = "this machine", each_machine: bool = True, ties: int = 0) -> Totals[Product]:
    """Measures the products that the journal in `folder` lacks, and writes the table of all."""
    power, products = PretendedPower(), [Product(side) for side in sides]
    bench = Bench("cpu", machine_uuid, canary_ms, power, window_s=0.01,
                  steadiness=Steadiness(drift=100.0, patience_s=0.0, attempts=1))  # as unsteady as a test's machine may be
    journal = JournalFile(folder / "measurements.jsonl")

    def blocks_of(load: tuple[float, str], blocks: Sequence[Block]) -> list[PlannedBlock[Product]]:
        return plan_blocks(products, blocks, machine_uuid, size=2, each_machine=each_machine, ties=ties)

    def time_units(units: Sequence[Product], level: float) -> list[Measurement]:
        measurements = []
        for unit in units:
            before_each(unit)  # for the tests below
            measurements.append(time_product(unit, power))
        return measurements

    totals = measure_loads(bench, blocks_of, time_units, journal)
    write_units(folder / "products.csv", journal.blocks)
    return totals


# What comes of it --------------------------------------------------------------------------------------------------------

def measured(folder: Path) -> dict[str, Measurement]:
    measurements = [m for block in read_blocks(folder / "measurements.jsonl") for m in block.measurements]
    assert len({m.id for m in measurements}) == len(measurements)  # none twice
    return {m.id: m for m in measurements}


def test_units_are_measured_with_their_quantities(tmp_path: Path) -> None:
    totals = collect(tmp_path, [100, 200, 300])
    assert {unit.id for unit in totals.units} == set(measured(tmp_path)) == {"product_100", "product_200", "product_300"}
    for m in measured(tmp_path).values():
        assert (m.subject, m.place, m.status, len(m.samples_ms)) == ("product", "alone", "ok", 5)
        if m.quantities:  # the window was long enough for the sensor
            assert m.quantities["power_w"] == (PRETENDED_W,)
            assert m.quantities["energy_j"][0] >= PRETENDED_W * sum(m.samples_ms) / 1e3
    assert measured(tmp_path)["product_300"].quantities
    for block in read_blocks(tmp_path / "measurements.jsonl"):
        assert block.background == {POWER: PRETENDED_W}
        assert 0.01 <= block.background_s < 5.0
        assert block.during_s >= sum(sum(m.samples_ms) for m in block.measurements) / 1e3
        assert 0 < block.canary_best_ms <= min(block.canary_before_ms, block.canary_after_ms)


def test_an_interrupted_collection_resumes(tmp_path: Path) -> None:
    """The fourth unit is where the user presses Ctrl-C; a kill may also tear the line that is being written."""
    started: list[str] = []

    def interrupt(product: Product) -> None:
        if len(started) == 3:
            raise KeyboardInterrupt
        started.append(product.id)

    sides = [10, 20, 30, 40, 50, 60]
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, sides, interrupt)
    resumed_from = measured(tmp_path)
    assert list(resumed_from) == started[:2]  # a block is kept or lost as a whole
    with (tmp_path / "measurements.jsonl").open("a") as journal:
        journal.write('{"level": 0.0, "key": "to')
    totals = collect(tmp_path, sides)
    assert {unit.id for unit in totals.units} == {f"product_{side}" for side in sides} - set(resumed_from)
    assert measured(tmp_path).items() >= resumed_from.items()
    assert len(measured(tmp_path)) == 6
    assert not collect(tmp_path, sides).units  # nothing is left to do


def test_a_unit_that_fails_has_a_row_with_its_error(tmp_path: Path) -> None:
    collect(tmp_path, [100, -1])
    with (tmp_path / "products.csv").open() as table:
        rows = {row["Unit"]: row for row in csv.DictReader(table)}
    failed, good = rows["product_-1"], rows["product_100"]
    assert (failed["Status"], failed["Error"], failed["run_ms"]) == ("failed", "negative dimensions are not allowed", "")
    assert (good["Status"], good["Runs"], good[POWER]) == ("ok", "5", str(PRETENDED_W))
    assert float(good["run_ms"]) == pytest.approx(np.median(measured(tmp_path)["product_100"].samples_ms), abs=1e-6)
    assert not collect(tmp_path, [100, -1]).units  # it is not tried again


def test_a_second_machine_measures_the_rest_and_a_few_ties(tmp_path: Path) -> None:
    collect(tmp_path, [10, 20, 30, 40])
    totals = collect(tmp_path, [10, 20, 30, 40, 50], machine_uuid="another", each_machine=False, ties=2)
    tie_sides = {unit.side for unit in totals.units} - {50}
    assert len(totals.units) == 3
    assert len(tie_sides) == 2
    assert not collect(tmp_path, [10, 20, 30, 40, 50], machine_uuid="another", each_machine=False, ties=2).units
