"""Computes latencies of many models at once, and their uncertainty. A single answer is a batch of one.

Each model is a row of kernel numbers, and a table holds what each kernel contributes. All variants of a latency (as predicted;
uncertain kernels at the low and at the high end of their plausible times; other paces of the host) are simulated together.
Energies are computed in the same way (energy.py). Full answers add warnings and a timeline from the same arrays (run.py).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.graph_model.simulation.pipeline import HostCosts, OffGpu, Steps, Tracks, latencies_ms
from hase.inference.memory.session import Memory, peak_memory
from hase.inference.prediction.conditions import AS_USUAL
from hase.inference.prediction.kernels import COLUMN, Contribution, KernelInModel, Keyed, contributions
from hase.inference.prediction.targets import FLOATING, mismatches
from hase.inference.prediction.uncertainty import (
    BEYOND_POWER,
    FAR_BEYOND,
    FAR_OFF,
    FORCED,
    OTHER_CUDNN,
    ROUGH,
    Span,
    fitted_span,
    hosts_between,
    kernels_under_load_span,
    load_span,
    shortness,
)
from hase.learned.composition.cuda_nodes import loops_with_gpu_condition
from hase.learned.composition.fitted import copied_mib, host_io_ms, latency_ms, working_nodes
from hase.learned.composition.intervals import KNOWN, Sources
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import at_guess, run_order, runs_in_order, shortest_cut
from hase.utils.files import cached

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.inference.memory.buffers import Layout
    from hase.inference.prediction.conditions import Conditions
    from hase.learned.energy import EnergyModel
    from hase.records.kernel_record import Kernel, ModelRecord, Node

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
Mask = npt.NDArray[np.bool_]
MOST_KERNELS = 50_000  # per table; a fuller one is replaced by a new one
NODE_FIELDS: Callable[[Node], tuple[str, str, str, float]] = attrgetter("kernel_id", "provider", "inside", "runs")
TABLES = 8  # number of cached tables
NO_KERNEL: Keyed = "", "", False
Energies = dict[int, tuple["EnergyModel", dict[Keyed, tuple[float, float, bool]]]]
ONCE = "", 1.0  # for nodes of the main graph: enclosing node, and number of runs
GROUPS = 2  # per doubling of the length: runs of similar length are simulated together


class Structure:
    """The properties of a model that follow from its record alone, such as its kernels and the order of nodes.

    Attributes:
        keys: the kernel of each node; `kernels` are the distinct ones.
        firsts, counts: the first node of each kernel, and how often the kernel runs.
        runs: how often each node runs.
        order: indices of the nodes that run, in order. Of very long loops only some trips are included.
        shorter: `order` with half as many trips; None where `order` is complete or can't be shortened.
        trips: the nodes that really run, divided by those in `order`.
        extrapolated: how many times to add the difference between `order` and `shorter`; each trip is assumed to take the same
            time.
    """

    def __init__(self, record: ModelRecord) -> None:
        self._record = weakref.ref(record)
        nodes = list(map(NODE_FIELDS, record.nodes))
        self.keys: list[Keyed] = [(name, provider, False) for name, provider, _, _ in nodes]
        self.runs: Floats = np.ones(len(nodes))
        self.order: Ints = np.arange(len(nodes))
        self.shorter: Ints | None = None
        self.trips, self.extrapolated = 1.0, 0.0
        if any(is_control_flow(kernel) for kernel in record.kernels.values()):
            waiting: Collection[str] = loops_with_gpu_condition(record) if record.flavour.device == "cuda" else ()
            self.keys = [(name, provider, name in waiting) for name, provider, _, _ in nodes]
        self.kernels: dict[Keyed, Kernel] = {key: record.kernels[key[0]] for key in self.keys}
        if any(node[2:] != ONCE for node in nodes):
            self._order_bodies(record)
        index = {key: number for number, key in enumerate(self.kernels)}
        numbers = np.array([index[key] for key in self.keys], dtype=int)
        self.firsts: Ints = np.unique(numbers, return_index=True)[1]
        self.counts = np.bincount(numbers, self.runs, len(index)).astype(float)

    def _order_bodies(self, record: ModelRecord) -> None:
        cut = shortest_cut(record)
        self.runs = np.array([node.runs for node in record.nodes])
        self.order = np.array(run_order(record, cut), dtype=int)
        if cut > 1:
            whole, kept, fewer = (runs_in_order(record, times) for times in (1, cut, 2 * cut))
            self.trips = whole / kept
            if kept != fewer:
                self.shorter = np.array(run_order(record, 2 * cut), dtype=int)
                self.extrapolated = (whole - kept) / (kept - fewer)

    @property
    def record(self) -> ModelRecord:
        record = self._record()
        assert record is not None  # callers hold the record
        return record

    @cached_property
    def working_nodes(self) -> float:
        """How many nodes of a run move data."""
        return working_nodes(self.record)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The floating-point types that its kernels compute in."""
        return frozenset(FLOATING).intersection(kernel.dtype for kernel in self.record.kernels.values())

    @cached_property
    def uncounted(self) -> list[str]:
        """The nodes whose bodies are missing in the record, so that their kernels are not counted."""
        with_bodies = {name for name, kernel in self.record.kernels.items() if kernel.subgraphs}
        known = {node.inside for node in self.record.nodes} if with_bodies else set()
        return [node.name for node in self.record.nodes if node.kernel_id in with_bodies and node.name not in known]

    def memory(self, layouts: Mapping[str, Layout]) -> Memory:
        """The peak memory of a session, given how each kernel (by id) uses memory."""
        if "_memory" not in self.__dict__:
            self._memory = peak_memory(self.record, layouts=layouts)
        return self._memory

    def longest_path_ms(self, times_ms: Floats) -> float:
        """The length of the critical path, given the time of each node."""
        from hase.graph_model.simulation.dag import build_dag, calculate_latency  # noqa: PLC0415 - most predictions do not need it

        if "dag" not in self.__dict__:
            self.dag = build_dag(self.record)
        return calculate_latency(self.dag, dict(zip((node.name for node in self.record.nodes), times_ms.tolist(), strict=True)),
                                 "critical_path")


_structures: dict[int, tuple[weakref.ref[ModelRecord], Structure]] = {}


def structure_of(record: ModelRecord) -> Structure:
    """The structure of a record, cached as long as the record exists."""
    number = id(record)
    kept = _structures.get(number)
    if kept is not None and kept[0]() is record:
        return kept[1]
    structure = Structure(record)
    _structures[number] = weakref.ref(record, lambda _: _structures.pop(number, None)), structure
    return structure


class KernelTable:
    """All kernels predicted so far under the same conditions, by number. Number 0 means no kernel."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._numbers: dict[Keyed, int] = {}
        self._keys: list[Keyed] = [NO_KERNEL]
        self._energies: Energies = {}
        self._known: list[KernelInModel | None] = [None]
        self._kernels: list[Kernel | None] = [None]
        self._rows = np.array([Contribution()], dtype=float)

    def batch(self, records: Sequence[ModelRecord], conditions: Conditions | None = None) -> Batch:
        """The models as a batch. `conditions` replace the table's own; kernel times must be the same under both."""
        structures = [structure_of(record) for record in records]
        with self._lock:
            new = {key: kernel for structure in structures for key, kernel in structure.kernels.items()
                   if key not in self._numbers}
            if len(self._known) + len(new) > MOST_KERNELS:
                self._begin()
                new = {key: kernel for structure in structures for key, kernel in structure.kernels.items()}
            if new:
                self._add(new)
            numbers = [np.array([self._numbers[key] for key in structure.keys], dtype=int) for structure in structures]
            used = np.unique(np.concatenate([[0], *numbers]))
            return Batch(conditions or self.conditions, records, structures,
                         [np.searchsorted(used, model_numbers) for model_numbers in numbers],
                         [self._keys[number] for number in used], [self._kernels[number] for number in used],
                         [self._known[number] for number in used], np.ascontiguousarray(self._rows[used].T), self._energies)

    def _add(self, new: Mapping[Keyed, Kernel]) -> None:
        """Adds kernels under the next free numbers."""
        known, before = contributions(new, self.conditions), len(self._known)
        after = before + len(new)
        if after > len(self._rows):  # doubles the table, so that it is rarely copied
            self._rows = np.concatenate([self._rows[:before], np.empty((after, len(COLUMN)))])
        self._rows[before:after] = np.array([Contribution.of(known[key]) for key in new], dtype=float)
        self._known += [known[key] for key in new]
        self._kernels += new.values()
        self._keys += new
        self._numbers.update(zip(new, range(before, after), strict=True))


_tables: dict[tuple[Any, ...], KernelTable] = {}


def table_for(conditions: Conditions) -> KernelTable:
    """The cached table of kernels under these conditions."""
    fitted, used = conditions.fitted, conditions.used
    key = (id(fitted.predictors), id(fitted.host), id(fitted.uncertainty), used.label, used.kind, conditions.strict,
           tuple(sorted(conditions.kernel_load.items())))  # kernels with equal keys share a table
    table: KernelTable = cached(_tables, key, lambda: KernelTable(conditions), TABLES)
    return table


class Spans(NamedTuple):
    """A `Span` for each model."""

    low: Floats
    high: Floats

    def covering(self, others: Spans) -> Spans:
        """The smallest spans that contain both."""
        return Spans(np.minimum(self.low, others.low), np.maximum(self.high, others.high))

    def of_model(self, index: int) -> Span:
        return Span(float(self.low[index]), float(self.high[index]))

    @property
    def rough(self) -> Mask:
        """Whether uncertain kernels that move latencies by these spans make them rough estimates."""
        return (self.high > 1.0 + ROUGH) | (self.low < 1.0 - ROUGH)


def stack_spans(spans: Iterable[tuple[float, float]]) -> Spans:
    """Stacks one span per model into arrays."""
    low, high = np.array(list(spans), dtype=float).reshape(-1, 2).T
    return Spans(np.ascontiguousarray(low), np.ascontiguousarray(high))


def joined_spans(spans: Sequence[Spans]) -> Spans:
    """Combines independent sources of error for each model, as `uncertainty.joined`."""
    with np.errstate(divide="ignore"):
        low = np.sqrt(sum(np.log(np.minimum(span.low, 1.0)) ** 2 for span in spans))
    return Spans(np.exp(-low), np.exp(np.sqrt(sum(np.log(np.maximum(span.high, 1.0)) ** 2 for span in spans))))


class Latencies(NamedTuple):
    """The predicted latency of each model of a batch on an otherwise idle device, and its uncertainty."""

    latency_ms: Floats
    critical_path_ms: Floats | None  # where the composition uses it
    spans: Spans  # the factors by which the latency may be off
    rough: Mask  # whether it is a rough estimate
    by_rough: Spans  # the factors due to kernels that can make it a rough estimate
    by_trips: Spans  # the factors due to guessed numbers of trips of loops
    by_host: Spans  # the factors due to other plausible paces of the host
    sources: Sequence[Sources]  # of its error
    shorter: Floats  # how many times shorter it is than any model from which the cost of a run was learned; at least 1


class Batch:
    """Models that are predicted together.

    Attributes:
        nodes: the kernel of each node of each model, by its number in the batch.
        keys, kernels, known: by number; None for 0, which is no kernel.
        energies: cached energies of the table's kernels, by energy model (energy.py).
    """

    def __init__(self, conditions: Conditions, records: Sequence[ModelRecord], structures: Sequence[Structure],
                 nodes: Sequence[Ints], keys: Sequence[Keyed], kernels: Sequence[Kernel | None],
                 known: Sequence[KernelInModel | None], columns: Floats, energies: Energies) -> None:
        self.conditions, self.records, self.structures, self.nodes = conditions, records, structures, nodes
        self.keys, self.kernels, self.known, self._columns, self.energies = keys, kernels, known, columns, energies
        # Models with a guessed number of body runs are also computed at both ends of the guess: the last rows below.
        self._guessed = [index for index, record in enumerate(records) if record.guessed]
        ends = [[at_guess(records[index], end) for index in self._guessed] for end in ("low", "high")]
        self._at_ends = [*ends[0], *ends[1]]  # keeps the records alive: a structure does not
        self._runs = [*structures, *map(Structure, self._at_ends)]
        self._run_nodes = [*nodes, *(nodes[index] for _ in ends for index in self._guessed)]
        # The kernels of all models in one array. Each model also gets the empty kernel 0, so that none has an empty range.
        self._flat = np.concatenate([np.append(numbers[run.firsts], 0) for numbers, run in zip(
            self._run_nodes, self._runs, strict=True)])
        self._flat_counts = np.concatenate([np.append(run.counts, 0.0) for run in self._runs])
        self._starts = np.cumsum([0, *(len(run.firsts) + 1 for run in self._runs)])[:-1]

    def __getitem__(self, name: str) -> Floats:
        """A column of the kernel table, by its name in `Contribution`."""
        column: Floats = self._columns[COLUMN[name]]
        return column

    def mask(self, name: str) -> Mask:
        """The kernels for which a column of the kernel table is true."""
        return self[name] > 0

    def memory(self, index: int) -> Memory:
        """The peak memory of a session of one model."""
        layouts = {self.keys[number][0]: kernel.layout for number in dict.fromkeys(self.nodes[index].tolist())
                   if (kernel := self.known[number]) is not None}
        return self.structures[index].memory(layouts)

    @cached_property
    def gpu_ms(self) -> Floats:
        """The GPU's time for each kernel; on a CPU, the CPU's."""
        return np.where(self.mask("on_host"), 0.0, self["time_ms"])

    def totals(self, amounts: Floats) -> Floats:
        """The sum of an amount per kernel over each model's run: the same to the last digit in any batch."""
        return self._totals(amounts)[..., :len(self.records)]

    def _totals(self, amounts: Floats) -> Floats:
        """`totals`, followed by those of the models at both ends of guesses."""
        total: Floats = np.add.reduceat(amounts[..., self._flat] * self._flat_counts, self._starts, axis=-1)
        return total

    def any(self, kernels: Mask) -> Mask:
        """Whether each model has one of these kernels."""
        return np.asarray(np.logical_or.reduceat(kernels[self._flat], self._starts)[:len(self.records)])

    def composed(self, costs: PipelineCosts | None, paces: Sequence[float] = (1.0,), times: Floats | None = None,
                 launches: Floats | None = None) -> tuple[Floats, Floats | None]:
        """Latencies and, where the composition uses them, critical paths: cases × models (ms). Models at both ends of guesses
        come last. On a GPU a latency is at least the GPU's own time for the kernels.

        Args:
            costs: of a run, where the composition simulates host and GPU as two tracks.
            paces: of the host in each case.
            times, launches: cases × kernels: factors on each kernel's time and launches.
        """
        used, on_host = self.conditions.used, self.mask("on_host")
        time_ms = self["time_ms"] * (np.ones((len(paces), 1)) if times is None else times)
        paths: Floats | None = None
        if used.kind == "pipeline" and costs is not None:
            gpu_ms, waits = np.where(on_host, 0.0, time_ms), self.mask("waits")
            tracks = Tracks(gpu_ms, self["launches"] * (1.0 if launches is None else launches), self["kind"].astype(int))
            off_gpu = OffGpu(self["host_ms"] + np.where(on_host, time_ms, 0.0), waits) if on_host.any() or waits.any() else None
            hosts = HostCosts.at(costs, paces)
            latency = np.maximum(self._simulated(Steps.of(tracks, hosts, off_gpu), hosts), self._totals(gpu_ms))
        else:
            base_ms = self._totals(time_ms)
            if used.kind == "critical_path":
                runs = list(zip(self._runs, self._run_nodes, strict=True))
                base_ms = paths = np.array([[run.longest_path_ms(run.runs * case_ms[nodes]) for run, nodes in runs]
                                            for case_ms in time_ms])
            latency = latency_ms(used, base_ms, np.array([run.working_nodes for run in self._runs])
                                 if used.kind == "sum_nodes" else 0.0)
        if self.conditions.run_mode.io == "host" and used.host_io:
            latency = latency + np.array([host_io_ms(used.host_io, copied_mib(run.record)) for run in self._runs])
        return latency, paths

    def _simulated(self, steps: Steps, hosts: HostCosts) -> Floats:
        """Simulated latencies with host and GPU as two tracks: cases × runs, ms."""
        simulated = np.empty((len(steps.work_ms), len(self._runs), 2))
        for rows, is_shorter, orders in self._orders:
            simulated[:, rows, is_shorter] = latencies_ms(steps.taken(orders), hosts)
        latency, shorter = simulated[..., 0], simulated[..., 1]
        for index, run in enumerate(self._runs):
            if run.shorter is not None:
                latency[:, index] += (latency[:, index] - shorter[:, index]) * run.extrapolated
            elif run.trips != 1.0:
                latency[:, index] *= run.trips
        return latency

    @cached_property
    def _orders(self) -> list[tuple[list[int], int, Ints]]:
        """Runs by groups of similar length: their indices, whether the orders are the shorter ones (0 or 1), and the kernel
        numbers in order: runs × nodes, filled up with 0."""
        groups: dict[tuple[int, int], list[tuple[int, Ints]]] = {}
        for index, (run, nodes) in enumerate(zip(self._runs, self._run_nodes, strict=True)):
            for is_shorter, order in enumerate((run.order, run.shorter)):
                if order is not None:
                    groups.setdefault((round(GROUPS * math.log2(len(order) + 1)), is_shorter), []).append((index, nodes[order]))
        filled = []
        for (_, is_shorter), rows in groups.items():
            orders = np.zeros((len(rows), max(len(order) for _, order in rows)), dtype=int)
            for row, (_, order) in zip(orders, rows, strict=True):
                row[:len(order)] = order
            filled.append(([index for index, _ in rows], is_shorter, orders))
        return filled

    @cached_property
    def latencies(self) -> Latencies:
        """The latency of each model, with its uncertainty."""
        conditions, used, pace = self.conditions, self.conditions.used, self.conditions.pace
        count, usual = len(self.records), self.conditions.usual_costs
        calibrated = used.calibrated if conditions.run_mode == AS_USUAL else None
        uncertain, pace_now = self.mask("uncertain"), pace.ratio if pace and pace.ratio is not None else 1.0
        # cases: kernels at the ends of their plausible times, and other paces of the host
        cases: dict[str, Mask] = {"kernels": uncertain, "rough": uncertain & self.mask("rough")}
        if calibrated is not None:
            cases["others"] = uncertain & ~self.mask("calibrated")
        cases = {name: kernels for name, kernels in cases.items() if kernels.any()}
        paces = [pace_now] * (1 + 2 * len(cases))
        by_pace = pace is not None and usual is not None and not used.assumed and not (
            calibrated is not None and calibrated.holds_paces and pace.known)
        if by_pace and pace is not None:
            paces += hosts_between(pace.ratio)
        times, launches = np.ones((len(paces), len(uncertain))), np.ones((len(paces), len(uncertain)))
        for case, kernels in enumerate(cases.values()):
            for row, end in ((1 + 2 * case, "low"), (2 + 2 * case, "high")):
                times[row] = np.where(kernels, self[f"time_{end}"], 1.0)
                launches[row] = np.where(kernels, self[f"launches_{end}"], 1.0)
        all_ms, paths = self.composed(usual, paces, times, launches)
        latency = all_ms[0, :count]

        def relative(low_ms: Floats, high_ms: Floats) -> Spans:
            """Other latencies as multiples of the predicted ones; 1 for a model that takes no time."""
            return Spans(*(np.divide(end_ms, latency, out=np.ones(count), where=latency > 0) for end_ms in (low_ms, high_ms)))

        certain = Spans(np.ones(count), np.ones(count))
        by_case = {name: relative(all_ms[1 + 2 * case, :count], all_ms[2 + 2 * case, :count])
                   for case, name in enumerate(cases)}
        by_kernels, by_rough = by_case.get("kernels", certain), by_case.get("rough", certain)
        by_host = relative(all_ms[-2:, :count].min(axis=0), all_ms[-2:, :count].max(axis=0)) if by_pace else certain
        by_trips = certain
        if self._guessed:
            ends_ms = [latency.copy(), latency.copy()]
            for end_ms, guessed_ms in zip(ends_ms, np.split(all_ms[0, count:], 2), strict=True):
                end_ms[self._guessed] = guessed_ms
            by_trips = relative(*ends_ms)
        sources = self._sources(latency)
        fit = self._composition_spans() if calibrated is None else stack_spans(calibrated.ends(source) for source in sources)
        shorter = shortness(used, latency)
        short = shorter ** BEYOND_POWER
        spans = [fit, by_kernels if calibrated is None else by_case.get("others", certain), by_trips, by_host,
                 Spans(1.0 / short, short),
                 *(Spans(np.full(count, span.low), np.full(count, span.high)) for span in self._common_spans())]
        widening = (OTHER_CUDNN if conditions.fitted.other_cudnn else 1.0) * np.where(self._forced, FORCED, 1.0)
        # a calibrated interval assumes the usual uncertainty of kernels; this model's may be larger
        joined = joined_spans(spans).covering(by_kernels)
        rough = (by_rough.rough | by_trips.rough | (shorter >= FAR_BEYOND)
                 | np.array([bool(source.other_form > ROUGH or source.doubt >= FAR_OFF or record.assumed or structure.uncounted)
                             for source, record, structure in zip(sources, self.records, self.structures, strict=True)]))
        return Latencies(latency, None if paths is None else paths[0, :count],
                         Spans(joined.low ** widening, joined.high ** widening), rough, by_rough, by_trips, by_host,
                         sources, shorter)

    def _common_spans(self) -> list[Span]:
        """Uncertainties that are the same for all models: another card, or a load."""
        conditions, fitted, spans = self.conditions, self.conditions.fitted, []
        if fitted.sheet_range:
            spans.append(Span(fitted.sheet_range.low, fitted.sheet_range.high))
        if conditions.shared_gpu:
            spans.append(load_span(conditions.shared_gpu.sharing, conditions.shared_gpu.load_source))
        elif conditions.load:
            spans.append(kernels_under_load_span(fitted.predictors, conditions.used.label))
        return spans

    @cached_property
    def _forced(self) -> Mask:
        """Whether each model has another minor version or other element types than the predictors (allowed by `force`)."""
        fitted = self.conditions.fitted
        return np.array([mismatches(record, fitted.target, structure.dtypes, fitted.predictors.sidecar.dtypes) != []
                         for record, structure in zip(self.records, self.structures, strict=True)], dtype=bool)

    def _sources(self, latency: Floats) -> list[Sources]:
        """The sources of each model's error."""
        usual, pace = self.conditions.usual_costs, self.conditions.pace
        ratio = pace.ratio if pace and pace.ratio else 1.0
        doubts_ms = self._flat_counts * (self.gpu_ms * self["doubt"])[self._flat]  # summed over the nodes of a kernel
        doubt_ms = np.sqrt(np.add.reduceat(doubts_ms ** 2, self._starts))[:len(self.records)]
        weighted_ms = np.array([self.totals(self.gpu_ms * self[name]) for name in KNOWN.weights]).T
        work_ms = self._host_work_ms(usual, ratio) if self.conditions.used.kind == "pipeline" and usual else 0.0 * latency
        return [Sources.of(total, dict(zip(KNOWN.weights, weighted, strict=True)), doubt, latency_ms, work, ratio)
                for total, weighted, doubt, latency_ms, work in zip(
                    self.totals(self.gpu_ms).tolist(), weighted_ms.tolist(), doubt_ms.tolist(), latency.tolist(),
                    work_ms.tolist(), strict=True)]

    def _host_work_ms(self, costs: PipelineCosts, pace: float) -> Floats:
        """The host's work time in a run of each model. Trips that an order omits are assumed to take the same time."""
        hosts = HostCosts.at(costs, (pace,))
        steps = Steps.of(Tracks(self.gpu_ms, self["launches"], self["kind"].astype(int)), hosts, OffGpu(
            self["host_ms"] + np.where(self.mask("on_host"), self["time_ms"], 0.0), self.mask("waits")))
        kernel_ms = (steps.before_ms + steps.busy_ms)[0]
        work_ms = np.array([kernel_ms[nodes[structure.order]].sum() for nodes, structure in
                            zip(self.nodes, self.structures, strict=True)])
        trips = np.array([structure.trips for structure in self.structures])
        total: Floats = trips * (hosts["start_ms"][0] + work_ms)
        return total

    def _composition_spans(self) -> Spans:
        """The errors of held-out models in the composition's fit, by the measured share of their time."""
        conditions, times = self.conditions, self["time_ms"]
        total_ms, measured_ms = self.totals(times), self.totals(times * self["measured"])
        shares = np.divide(measured_ms, total_ms, out=np.zeros_like(total_ms), where=total_ms > 0)
        spans: dict[Any, Span] = {}
        ends = []
        for share in shares.tolist():
            kind = id(conditions.used.interval_for(share))
            if kind not in spans:
                spans[kind] = fitted_span(conditions.used, conditions.run_mode, share, conditions.device)
            ends.append(spans[kind])
        return stack_spans(ends)
