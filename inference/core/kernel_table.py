"""What each kernel contributes to the models that hold it, as rows of a table, for thousands of models at a time.

A kernel is worked out once, when the first model that holds it comes. A model is then a row of numbers of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.many_runs import NOTHING, Ints, RunKernels
from hase.inference.core.kernels_in_model import KernelInModel, contributions
from hase.inference.core.model_run import novelty
from hase.inference.core.targets import FLOATING
from hase.inference.core.uncertainty import CALIBRATED, CERTAIN, KernelUncertainty
from hase.learned.energy import Part
from hase.records.kernel_costs import is_control_flow

if TYPE_CHECKING:
    from hase.inference.core.buffers import Layout
    from hase.inference.core.conditions import Conditions
    from hase.learned.energy import EnergyModel
    from hase.records.kernel_record import Kernel, ModelRecord, Node

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
MOST_KERNELS = 50_000  # in the table: it is begun anew when it holds more
InRun = tuple[str, str, str, float]  # of a node: its kernel, the provider, what it is inside of, and how often it runs
IN_RUN: Callable[[Node], InRun] = attrgetter("kernel_id", "provider", "inside", "runs")
ONCE = "", 1.0  # of a node in the main graph
CERTAINLY = KernelUncertainty("estimated", CERTAIN, CERTAIN, False)


class Contribution(NamedTuple):
    """A row of the table: a kernel's numbers, as `KernelInModel` has them, and what follows from them.

    Attributes:
        time_ms, on_host, launches, kind, waits, host_ms: as in `KernelInModel`; no launches where they are not known.
        time_low, time_high, launches_low, launches_high: the factors by which they may be off.
        rough: whether that may make a prediction a rough estimate.
        calibrated: whether a calibrated interval covers it.
        predicted, unmeasured, other_form, beyond, doubt: how much of its time counts for each source of error
            (`intervals.sources`).
        measured: whether its time was measured.
        works: whether it moves data.
        timed_j, fixed_j: the energy of a run of it that follows from its time, and the rest.
        guessed: whether no model whose energy was measured had such work.
    """

    time_ms: float = 0.0
    on_host: bool = False
    launches: float = 0.0
    kind: int = 0
    waits: bool = False
    host_ms: float = 0.0
    time_low: float = 1.0
    time_high: float = 1.0
    launches_low: float = 1.0
    launches_high: float = 1.0
    rough: bool = False
    calibrated: bool = False
    predicted: float = 0.0
    unmeasured: float = 0.0
    other_form: float = 0.0
    beyond: float = 0.0
    doubt: float = 0.0
    measured: bool = False
    works: bool = False
    timed_j: float = 0.0
    fixed_j: float = 0.0
    guessed: bool = False


COLUMN = {name: place for place, name in enumerate(Contribution._fields)}


def contribution(kernel: Kernel, known: KernelInModel, learned: EnergyModel | None) -> Contribution:
    """The row of a kernel; with its energy where that was learned."""
    unsure = known.uncertainty or CERTAINLY
    new = novelty(known)
    weights = {} if new is None else new.weights | {"doubt": new.doubt}
    timed_j, fixed_j, guessed = 0.0, 0.0, False
    if learned is not None and not known.on_host:
        launches = float(kernel.moves_data) if known.launches is None else known.launches
        timed_j, fixed_j, guessed = learned.part_j(Part(kernel, 1.0, known.gpu_ms, launches))
    return Contribution(
        known.latency_ms, known.on_host, known.launches or 0.0, int(known.kind), known.waits, known.host_ms,
        unsure.time.low, unsure.time.high, unsure.launches.low, unsure.launches.high, unsure.makes_rough,
        known.uncertainty is not None and known.uncertainty.reason in CALIBRATED, **weights,
        measured=known.provenance == "measured", works=kernel.moves_data, timed_j=timed_j, fixed_j=fixed_j, guessed=guessed)


class Columns:
    """Some rows of the table, by the names of `Contribution`; the first one is no kernel."""

    def __init__(self, rows: Floats) -> None:
        self._columns = np.ascontiguousarray(rows.T)

    def __getitem__(self, name: str) -> Floats:
        column: Floats = self._columns[COLUMN[name]]
        return column

    def mask(self, name: str) -> Mask:
        return self[name] > 0

    def kernels(self, time_times: Floats | float = 1.0, launch_times: Floats | float = 1.0) -> RunKernels:
        """The kernels as a run has them whose times, and whose launches, are so many times as long."""
        time_ms, on_host = self["time_ms"] * time_times, self.mask("on_host")
        return RunKernels(np.where(on_host, 0.0, time_ms), self["launches"] * launch_times, self["kind"].astype(int),
                          self["host_ms"] + np.where(on_host, time_ms, 0.0), self.mask("waits"))


class Batch(NamedTuple):
    """Models by the numbers of their kernels.

    Attributes:
        models: their names.
        runs: models × nodes: the number of each node's kernel in `columns`; NOTHING where a model has no more nodes.
        columns: the kernels.
    """

    models: Sequence[str]
    runs: Ints
    columns: Columns


class _Numbers(dict[InRun, int]):
    """Numbers of kernels from 1 on. A kernel gets one when it is first asked for, and is then among the `new` ones."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[InRun] = []

    def __missing__(self, key: InRun) -> int:
        self.new.append(key)
        self[key] = len(self) + 1
        return self[key]


class KernelTable:
    """The kernels of all models so far."""

    def __init__(self, conditions: Conditions, learned: EnergyModel | None) -> None:
        self._conditions, self._learned = conditions, learned
        self._dtypes = set(FLOATING) - set(conditions.fitted.predictors.sidecar.dtypes)
        self._begin()

    def _begin(self) -> None:
        self._numbers = _Numbers()
        self._unusual: set[int] = set()  # numbers
        self._layouts: list[Layout | None] = [None]
        self._rows = np.array([Contribution()], dtype=float)

    def numbers(self, records: Sequence[ModelRecord]) -> list[list[int] | None]:
        """The number of each node's kernel in the table, for each model; kernels that are new to it are worked out together.

        None for a model that must be predicted by itself: its nodes do not all run once, in the order of the record, or it is
        not what the predictors hold for.
        """
        if len(self._layouts) > MOST_KERNELS or len(self._layouts) <= len(self._numbers):  # full, or unfinished after an error
            self._begin()
        found = []
        new: dict[InRun, Kernel] = {}
        for record in records:
            found.append(list(map(self._numbers.__getitem__, map(IN_RUN, record.nodes))))
            if self._numbers.new:
                new |= {key: record.kernels[key[0]] for key in self._numbers.new}
                self._numbers.new.clear()
        if new:
            self._add(new)
        return [numbers if self._is_usual(record, numbers) else None for record, numbers in zip(records, found, strict=True)]

    def _is_usual(self, record: ModelRecord, numbers: Sequence[int]) -> bool:
        """Whether a model can be predicted together with others."""
        graph, trained = record.flavour, self._conditions.fitted.target.flavour
        if record.guessed or record.assumed or not self._unusual.isdisjoint(numbers) or (
                graph.device, graph.runtime, graph.runtime_version) != (
                trained.device, trained.runtime, trained.runtime_version):
            return False
        if len(set(numbers)) == len(record.kernels):
            return True
        of_nodes = {node.kernel_id for node in record.nodes}  # a kernel may run on both providers, or be one that no node has
        return len(of_nodes) == len(record.kernels)

    def _add(self, new: Mapping[InRun, Kernel]) -> None:
        """Adds kernels, which have the next numbers."""
        usual = {key[:2]: kernel for key, kernel in new.items() if key[2:] == ONCE and not (
            is_control_flow(kernel) or kernel.subgraphs or kernel.dtype in self._dtypes)}
        contributed = contributions(usual, self._conditions)
        rows, before = [], len(self._layouts)
        for number, (key, kernel) in enumerate(new.items(), before):
            known = contributed[key[:2]] if key[2:] == ONCE and key[:2] in usual else None
            rows.append(Contribution() if known is None else contribution(kernel, known, self._learned))
            self._layouts.append(None if known is None else known.layout)
            if known is None:
                self._unusual.add(number)
        after = before + len(rows)
        if after > len(self._rows):  # room for as many again, so that few additions copy the table
            self._rows = np.concatenate([self._rows[:before], np.empty((after, len(COLUMN)))])
        self._rows[before:after] = np.array(rows, dtype=float)

    def batch(self, models: Sequence[str], numbers: Sequence[Sequence[int]]) -> Batch:
        """Models by the numbers of their kernels in the table, with these kernels alone."""
        runs = np.full((len(models), max(map(len, numbers), default=0)), NOTHING)
        for row, of_model in zip(runs, numbers, strict=True):
            row[:len(of_model)] = of_model
        used = np.zeros(len(self._layouts), dtype=bool)
        used[runs] = used[NOTHING] = True
        places = np.flatnonzero(used)
        renumbered = np.zeros(len(self._layouts), dtype=int)
        renumbered[places] = np.arange(len(places))
        return Batch(models, renumbered[runs], Columns(self._rows[places]))

    def layouts(self, record: ModelRecord, numbers: Sequence[int]) -> dict[str, Layout]:
        """How the kernels of a model in the table use memory, by id."""
        return {node.kernel_id: layout for node, number in zip(record.nodes, numbers, strict=True)
                if (layout := self._layouts[number]) is not None}
