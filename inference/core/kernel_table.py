"""What each kernel contributes to the models that hold it, as rows of a table, for thousands of models at a time.

A kernel is worked out once, when the first model that holds it comes. A model is then a row of numbers of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.simulation.many_runs import NOTHING, Ints, RunKernels
from inference.core.kernels_in_model import KernelInModel, Placed, contributions
from inference.core.model_run import novelty
from inference.core.targets import FLOATING
from inference.core.uncertainty import CALIBRATED, CERTAIN, KernelUncertainty
from records.kernel_costs import is_control_flow
from training.energy.learned import Part

if TYPE_CHECKING:
    from inference.core.buffers import Layout
    from inference.core.conditions import Conditions
    from records.kernel_record import Kernel, ModelRecord
    from training.energy.learned import EnergyModel

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
MOST_KERNELS = 50_000  # in the table: it is begun anew when it holds more
CERTAINLY = KernelUncertainty("estimated", CERTAIN, CERTAIN, False)


class Contribution(NamedTuple):
    """A row of the table: a kernel's numbers, as `KernelInModel` has them, and what follows from them.

    Attributes:
        time_ms, on_host, launches, kind, waits, host_ms: as in `KernelInModel`; no launches where they are not known.
        time_low, time_high, launches_low, launches_high: the factors by which they may be off.
        rough: whether that may make a prediction a rough estimate.
        calibrated: whether a calibrated interval covers it.
        known, unmeasured, other_form, beyond, doubt: how much of its time counts for each source of error
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
    known: float = 0.0
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
    weights = dict.fromkeys(("known", "unmeasured", "other_form", "beyond", "doubt"), 0.0)
    if new is not None:
        weights |= {new.kind.replace(" ", "_"): 1.0, "doubt": new.doubt}
        if new.kind == "beyond":
            weights |= {"known": 1.0, "beyond": math.log(new.times)}
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
        records: the models.
        runs: models × nodes: the number of each node's kernel in `columns`; NOTHING where a model has no more nodes.
        columns: the kernels.
    """

    records: Sequence[ModelRecord]
    runs: Ints
    columns: Columns


class KernelTable:
    """The kernels of all models so far."""

    def __init__(self, conditions: Conditions, learned: EnergyModel | None) -> None:
        self._conditions, self._learned = conditions, learned
        self._dtypes = set(FLOATING) - set(conditions.fitted.predictors.sidecar.dtypes)
        self._begin()

    def _begin(self) -> None:
        self._numbers: dict[Placed, int] = {}
        self._unusual: set[Placed] = set()
        self.known: list[KernelInModel | None] = [None]
        self._rows = np.array([Contribution()], dtype=float)

    def usual(self, record: ModelRecord) -> bool:
        """Whether the nodes of a model run once each, in the order of the record, and are what the predictors hold for. Others
        are predicted one by one.

        Call it after `add`.
        """
        if record.guessed or record.assumed or not self._of_target(record) or any(
                node.inside or node.runs != 1.0 for node in record.nodes):
            return False
        keys = {(node.kernel_id, node.provider) for node in record.nodes}
        return self._unusual.isdisjoint(keys) and len({name for name, _ in keys}) == len(record.kernels)

    def _of_target(self, record: ModelRecord) -> bool:
        """Whether a model's graph is of the runtime that the predictors hold for."""
        graph, trained = record.flavour, self._conditions.fitted.target.flavour
        return (graph.device, graph.runtime, graph.runtime_version) == (
            trained.device, trained.runtime, trained.runtime_version)

    def add(self, records: Sequence[ModelRecord]) -> None:
        """Works out the kernels of models that are not in the table yet."""
        if len(self.known) > MOST_KERNELS:
            self._begin()
        numbers, unusual = self._numbers, self._unusual
        placed = {key: record.kernels[key[0]] for record in records
                  for key in {(node.kernel_id, node.provider) for node in record.nodes}
                  if key not in numbers and key not in unusual}
        self._unusual |= {key for key, kernel in placed.items()
                          if is_control_flow(kernel) or kernel.subgraphs or kernel.dtype in self._dtypes}
        new = {key: kernel for key, kernel in placed.items() if key not in self._unusual}
        if not new:
            return
        contributed = contributions(new, self._conditions)
        rows = [contribution(kernel, contributed[key], self._learned) for key, kernel in new.items()]
        self._numbers |= {key: number for number, key in enumerate(new, len(self.known))}
        if len(self.known) + len(rows) > len(self._rows):  # room for as many again, so that few additions copy the table
            self._rows = np.concatenate([self._rows[:len(self.known)], np.empty((len(self.known) + len(rows),
                                                                                 len(COLUMN)))])
        self._rows[len(self.known):len(self.known) + len(rows)] = np.array(rows, dtype=float)
        self.known += [contributed[key] for key in new]

    def batch(self, records: Sequence[ModelRecord]) -> Batch:
        """Models whose kernels are in the table, by the numbers of these."""
        numbers = self._numbers
        of_models = [[numbers[node.kernel_id, node.provider] for node in record.nodes] for record in records]
        runs = np.full((len(records), max(map(len, of_models), default=0)), NOTHING)
        for row, of_model in zip(runs, of_models, strict=True):
            row[:len(of_model)] = of_model
        used = np.zeros(len(self.known), dtype=bool)
        used[runs] = used[NOTHING] = True
        places = np.flatnonzero(used)
        renumbered = np.zeros(len(self.known), dtype=int)
        renumbered[places] = np.arange(len(places))
        return Batch(records, renumbered[runs], Columns(self._rows[places]))

    def layouts(self, record: ModelRecord) -> Mapping[str, Layout]:
        """How the kernels of a model in the table use memory, by id."""
        return {node.kernel_id: known.layout for node in record.nodes
                if (known := self.known[self._numbers[node.kernel_id, node.provider]]) is not None}
