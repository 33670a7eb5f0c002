"""Turns the measured tables of a machine into planning problems at any size.

Times at other sizes than those measured are interpolated, or extrapolated and marked as such.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from hase.extras.graph_stages.measuring.analysis import LookupKey, LookupRecord, read_lookup
from hase.extras.graph_stages.measuring.layer import GRAPH_INPUTS, HOST, OUTPUT, STAGES, TENSORS, GraphSize
from hase.extras.graph_stages.measuring.records import REMAKE, TransferTable, read_raw, read_transfers
from hase.extras.graph_stages.planning.chains import ChainRecord, ChainTimes, CopyKey, CopyRecord, read_chains
from hase.extras.graph_stages.planning.plans import PlanningProblem, StageCost, StageData
from hase.utils.errors import UserError
from hase.utils.lazy import scipy
from hase.utils.logger import get_logger

Size: TypeAlias = "tuple[int, int]"  # nodes, edges
Basis: TypeAlias = Literal["measured", "interpolated", "extrapolated"]
BASES: tuple[Basis, ...] = ("measured", "interpolated", "extrapolated")  # the most certain first
log = get_logger("plan_stages")
Key = TypeVar("Key")
NUMBERS = ("node_count",)  # inputs that are known on both sides, and never copied


@dataclass(frozen=True)
class Estimate:
    """A time in ms, and what it is based on."""

    ms: float
    basis: Basis


@functools.lru_cache(maxsize=4096)  # all stages are usually measured at the same sizes
def surrounding(sizes: tuple[Size, ...], wanted: Size) -> dict[Size, float] | None:
    """Measured sizes, as near as possible, whose weighted mean is the wanted size; None if it lies outside all of them.

    Weights are positive and sum to 1. They minimise the sum of weight × squared distance, where distance is in ratios of nodes
    and of edges (twice 1000 is as far as twice 5000).
    """
    if wanted in sizes:
        return {wanted: 1.0}
    points = np.array(sizes, float)
    distances = (np.log(points / np.array(wanted, float)) ** 2).sum(axis=1)
    scale = np.array(wanted, float)
    balance = np.vstack([(points / scale).T, np.ones(len(sizes))])
    solved = scipy.optimize.linprog(distances, A_eq=balance, b_eq=np.ones(3), bounds=(0, None), method="highs")
    if not solved.success:
        return None
    return {size: float(weight) for size, weight in zip(sizes, solved.x, strict=True) if weight > 1e-9}


def estimated(times_ms: Mapping[Size, float], wanted: Size, extrapolate: bool = False) -> Estimate:
    """The time at a size: measured, interpolated, or with `extrapolate` extrapolated.

    A trend, b + n·nodes + e·edges with no negative coefficient, is fitted to all sizes with equal relative error. It is
    corrected by the weighted geometric mean of the ratios of surrounding times to their trend. So linear times are exact, and
    so are bends (for instance at a full cache) that surrounding sizes show, too.

    An extrapolation is only the trend, a guess: caches make times grow faster than sizes, and large sizes may not fit into
    memory.

    Raises UserError for a size outside those measured, without `extrapolate`.
    """
    if not times_ms:
        raise UserError("no size was measured")
    if wanted in times_ms:
        return Estimate(times_ms[wanted], "measured")
    sizes = tuple(sorted(times_ms))
    weights = surrounding(sizes, wanted)
    if weights is None and not extrapolate:
        raise UserError(outside(sizes, wanted))
    ms = _trend(times_ms, wanted)
    if weights is None:
        return Estimate(ms, "extrapolated")
    if min(times_ms[size] for size in weights) <= 0 or ms <= 0:  # for instance the deviation of a single run
        return Estimate(sum(weight * times_ms[size] for size, weight in weights.items()), "interpolated")
    ratios = [weight * math.log(times_ms[size] / _trend(times_ms, size)) for size, weight in weights.items()]
    return Estimate(ms * math.exp(sum(ratios)), "interpolated")


def _trend(times_ms: Mapping[Size, float], wanted: Size) -> float:
    """The fitted time at a size, in ms."""
    sizes, measured = np.array([(1.0, *size) for size in times_ms]), np.array(list(times_ms.values()))
    return float(np.array([1.0, *wanted]) @ np.array(_coefficients(sizes.tobytes(), measured.tobytes())))


@functools.lru_cache(maxsize=4096)
def _coefficients(points: bytes, times: bytes) -> tuple[float, ...]:
    """Coefficients of b + n·nodes + e·edges, from rows of (1, nodes, edges) and the times, both as bytes of float arrays."""
    measured = np.frombuffer(times)
    rows = np.frombuffer(points).reshape(len(measured), -1)
    scale = rows.max(axis=0)
    weights = 1.0 / np.maximum(measured, 1e-3 * measured.max() or 1.0)
    factors, _ = scipy.optimize.nnls(rows / scale * weights[:, None], measured * weights)
    return tuple(factors / scale)


def outside(sizes: Sequence[Size], wanted: Size) -> str:
    """The message for a size that is not among or between those measured."""
    nodes, edges = zip(*sizes, strict=True)
    within = min(nodes) <= wanted[0] <= max(nodes) and min(edges) <= wanted[1] <= max(edges)
    near = ", ".join(f"{n}/{e}" for n, e in sizes)
    return (f"{wanted[0]} nodes with {wanted[1]} edges lie outside the sizes that were measured "
            f"({min(nodes)} to {max(nodes)} nodes, {min(edges)} to {max(edges)} edges"
            + (f", in these pairs: {near}" if within else "")
            + "); measure larger ones, or allow a guess with --extrapolate")


@dataclass(frozen=True)
class StageTimes:
    """Times of a stage on a unit over all sizes: in the unit's own memory if measured, else in the host's.

    `after_ms` has the times after a stage on another unit, by that unit; for `memory` and `processor` see `StageCost`.
    """

    ms: Mapping[Size, float]
    std_ms: Mapping[Size, float]
    memory: str
    processor: str
    after_ms: Mapping[str, Mapping[Size, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """A planning problem at one size; `basis` is the least certain of its times, `left_out` the stages that cannot run."""

    problem: PlanningProblem
    basis: Basis
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageTables:
    """Times of stages on units by stage number (from 0), and of copies; chain times of copies take precedence."""

    times: Mapping[tuple[str, int], StageTimes]
    widths: tuple[int, int] = (0, 0)
    copies: TransferTable = field(default_factory=lambda: TransferTable(records=()))
    chain_copies_ms: Mapping[CopyKey, Mapping[Size, float]] = field(default_factory=dict)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(unit for unit, _ in self.times))

    @property
    def sizes(self) -> list[Size]:
        """All sizes with any measurement."""
        return sorted({size for times in self.times.values() for size in times.ms})

    def of_sizes(self, sizes: Set[Size]) -> StageTables:
        """The tables as if only these sizes had been measured."""
        def selected(ms: Mapping[Size, float]) -> dict[Size, float]:
            return {size: value for size, value in ms.items() if size in sizes}

        restricted = {key: replace(times, ms=selected(times.ms), std_ms=selected(times.std_ms),
                                   after_ms={unit: selected(ms) for unit, ms in times.after_ms.items()})
                      for key, times in self.times.items()}
        return replace(self, times=restricted, chain_copies_ms={key: selected(ms) for key, ms in self.chain_copies_ms.items()})

    def setting(self, size: Size, extrapolate: bool = False) -> Setting:
        """The planning problem at a size. Raises UserError if it needs extrapolation, or copies that were not measured."""
        costs, left_out = {}, []
        bases: set[Basis] = {"measured"}
        for (unit, stage), times in self.times.items():
            try:
                estimate = estimated(times.ms, size, extrapolate)
                spread = estimated(times.std_ms, size, extrapolate)
                after_ms = {previous: estimated(ms, size, extrapolate).ms for previous, ms in times.after_ms.items()}
            except UserError as error:
                left_out.append(f"stage {stage + 1} on {unit}: {error}")
                continue
            costs[unit, stage] = StageCost(estimate.ms, times.memory, times.processor, spread.ms, after_ms)
            bases.add(estimate.basis)
        if len({stage for _, stage in costs}) < len(STAGES):
            raise UserError(outside(self.sizes, size) if self.sizes else "no stage was measured")
        problem = PlanningProblem(
            tuple(StageData(moved(stage.inputs), moved(stage.outputs)) for stage in STAGES), moved(GRAPH_INPUTS), (OUTPUT,),
            self.units, costs, *self._copies(size, {cost.memory for cost in costs.values()} - {HOST}, extrapolate))
        return Setting(problem, max(bases, key=BASES.index), tuple(left_out))

    def _copies(self, size: Size, memories: Iterable[str], extrapolate: bool) -> tuple[
            dict[tuple[str, str], float], dict[tuple[str, str], float]]:
        """Copy times of each tensor to each memory, and back."""
        keys = [(memory, tensor) for memory in memories for tensor in TENSORS]
        return ({(memory, tensor): self._copy_ms((memory, "to_device", tensor), size, extrapolate) for memory, tensor in keys},
                {(memory, tensor): self._copy_ms((memory, "to_host", tensor), size, extrapolate) for memory, tensor in keys})

    def _copy_ms(self, key: CopyKey, size: Size, extrapolate: bool) -> float:
        """Copy time in chains if measured at every size, else by the tensor's bytes."""
        in_chains_ms = self.chain_copies_ms.get(key, {})
        if in_chains_ms.keys() >= set(self.sizes):
            return estimated(in_chains_ms, size, extrapolate).ms
        memory, direction, tensor = key
        graph = GraphSize(nodes=size[0], edges=size[1], features=self.widths[0], hidden=self.widths[1])
        return self.copies.copy_ms(memory, direction, TENSORS[tensor].bytes(graph))


def moved(names: Iterable[str]) -> tuple[str, ...]:
    """The tensors among the names that must be copied."""
    return tuple(name for name in names if name not in NUMBERS)


def read_tables(folders: Sequence[tuple[str, Path]], alone: bool = False) -> StageTables:
    """The tables of one or several results folders of one machine.

    A folder's label is appended to its unit names: `CPU` of the folder labelled `torch` is `CPU-torch`. With `alone`, times of
    stages that ran alone are used even if the first folder has chain times of all units.
    """
    merged = StageTables({})
    for label, folder in folders:
        merged = _merged(merged, _read_folder(label, folder), folder)
    return merged if alone else in_chains(merged, read_chains(folders[0][1]))


def in_chains(tables: StageTables, measured: ChainTimes) -> StageTables:
    """The tables with chain times instead of times alone; unchanged if a stage lacks chain times at one of its sizes."""
    medians_ms = _medians_ms(((record.unit, record.stage - 1, record.previous), record) for record in measured.stages)
    without_chains = [(unit, stage) for (unit, stage), times in tables.times.items()
                      if not times.ms.keys() <= medians_ms.get((unit, stage, unit), {}).keys()]
    if without_chains:
        if measured.stages:
            log.warning("%d stages were not timed in chains at each size, so none of these times is used; add --time-chains",
                        len(without_chains))
        return tables
    chained = {
        (unit, stage): replace(times, ms={size: medians_ms[unit, stage, unit][size] for size in times.ms},
                               after_ms={previous: ms for (name, number, previous), ms in medians_ms.items()
                                         if (name, number) == (unit, stage) and previous in tables.units and previous != unit})
        for (unit, stage), times in tables.times.items()}
    copies_ms = _medians_ms(((record.memory, record.direction, record.tensor), record) for record in measured.copies)
    return replace(tables, times=chained, chain_copies_ms=copies_ms)


def _medians_ms(records: Iterable[tuple[Key, ChainRecord | CopyRecord]]) -> dict[Key, dict[Size, float]]:
    """The median time of each record, by its key and size."""
    medians_ms: dict[Key, dict[Size, float]] = {}
    for key, record in records:
        medians_ms.setdefault(key, {})[record.nodes, record.edges] = float(np.median(record.samples_ms))
    return medians_ms


def _merged(tables: StageTables, further: StageTables, folder: Path) -> StageTables:
    if same := set(tables.units) & set(further.units):
        raise UserError(f"{folder}: has units that another folder has, too: {', '.join(sorted(same))}; give it a name: "
                        f"--results NAME={folder}")
    widths = {both.widths for both in (tables, further)} - {(0, 0)}
    if len(widths) > 1:
        raise UserError(f"{folder}: its layer has other widths than that of another folder; plans need the same layer")
    copies = TransferTable(records=(*tables.copies.records, *further.copies.records))
    return StageTables({**tables.times, **further.times}, next(iter(widths), (0, 0)), copies)


def _read_folder(label: str, folder: Path) -> StageTables:
    records_of: dict[tuple[str, int], dict[LookupKey, LookupRecord]] = {}
    for key, record in read_lookup(folder).items():
        if record.total_time is not None:
            records_of.setdefault((key.unit, key.stage - 1), {})[key] = record
    times = {(named(label, unit), stage): _stage_times(unit, records) for (unit, stage), records in records_of.items()}
    memories = {stage.memory for stage in times.values()} - {HOST}
    if not memories:
        return StageTables(times)
    copies = read_transfers(folder)
    if copies is None or (missing := memories - {record.memory for record in copies.records}):
        uncopied = ", ".join(sorted(memories if copies is None else missing))
        raise UserError(f"{folder}: copies between the host and {uncopied} were not measured; run: {REMAKE}")
    widths = {(record.features, record.hidden) for record in read_raw(folder).records}
    if len(widths) > 1:
        raise UserError(f"{folder}: layers of several widths; plans need one")
    return StageTables(times, widths.pop(), copies)


def named(label: str, unit: str) -> str:
    """A unit's name with the label of its folder."""
    return f"{unit}-{label}" if label else unit


def _stage_times(unit: str, records: Mapping[LookupKey, LookupRecord]) -> StageTimes:
    """Times in the unit's own memory if measured at every size; else in the host's, copies included."""
    resident = all(record.transfer_by == "measured" for record in records.values())
    ran_on = {record.ran_on or unit for record in records.values()}
    processor = ran_on.pop() if len(ran_on) == 1 else unit
    ms: dict[Size, float] = {}
    std_ms: dict[Size, float] = {}
    for key, record in records.items():
        median, mean = ((record.resident_median_time, record.compute_time) if resident
                        else (record.median_time, record.total_time))
        ms[key.nodes, key.edges] = mean or 0.0 if median is None else median  # a table from elsewhere has only means
        std_ms[key.nodes, key.edges] = record.std or 0.0
    return StageTimes(ms, std_ms, processor if resident else HOST, processor)
