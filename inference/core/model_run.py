"""A model's run, put together from its kernels, and the prediction made from it: latency, uncertainty and timeline.

The interval of a prediction comes from how the latency moves when its uncertain parts do: kernels, the host's pace, and the
trips of loops (`kernels_span`, `hosts_span`, `trips_span`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hase.graph_model.simulation.pipeline import NodeSpan, OffGpu, Tracks, chrome_trace, host_work_ms, pipeline_ms, timeline
from hase.inference.core.answers import PROVENANCES, KernelShare, Prediction, Provenance, UsedComposition
from hase.inference.core.host_pace import UNKNOWN
from hase.inference.core.kernels_in_model import KernelInModel, Placed, placed_kernels, runs_of_kernels
from hase.inference.core.memory import device_memory_mib, memory_warnings, peak_memory
from hase.inference.core.model_warnings import uncounted, used_estimators
from hase.inference.core.run_modes import AS_USUAL
from hase.inference.core.targets import Fitted, holds_for, mismatches
from hase.inference.core.uncertainty import (
    BEYOND_POWER,
    CALIBRATED,
    CERTAIN,
    FORCED,
    OTHER_CUDNN,
    KernelUncertainty,
    Span,
    fitted_span,
    host_warning,
    hosts_between,
    is_rough,
    joined,
    kernels_under_load_span,
    load_span,
    shortness,
    source_warnings,
    uncertainty_warnings,
)
from hase.inference.sharing.co_runner import UnderLoad, under_load
from hase.learned.composition.fitted import copied_mib, host_io_ms, latency_ms, working_nodes
from hase.learned.composition.intervals import KNOWN, Novelty, Sources, sources
from hase.records.run_order import at_guess, run_order, runs_in_order, shortest_cut

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.inference.core.conditions import Conditions
    from hase.inference.core.run_modes import RunMode
    from hase.learned.composition.fitted import Composition
    from hase.records.kernel_record import Kernel, ModelRecord


class Composed(NamedTuple):
    """A model's latency on an otherwise idle device, and the longest path where the composition uses it; ms."""

    latency_ms: float
    critical_path_ms: float | None


@dataclass(frozen=True)
class ModelRun:
    """A run of a model: its kernels, and how they are put together.

    Attributes:
        record: the model's.
        known: its kernels by id and provider; may hold others too.
        used: the composition, which puts their times together.
        run_mode: how the model is run.
        costs: of a run, where `used` simulates host and GPU as two tracks; else None.
    """

    record: ModelRecord
    known: Mapping[Placed, KernelInModel]
    used: Composition
    run_mode: RunMode
    costs: PipelineCosts | None

    def composed(self) -> Composed:
        """The model's latency from its kernels' times. On a GPU it is at least the GPU's own time for them."""
        kernel_sum_ms, critical_path_ms = sum(
            node.runs * kernel.latency_ms for node, kernel in zip(self.record.nodes, self.nodes, strict=True)), None
        if self.used.kind == "pipeline" and self.costs is not None:
            latency = max(self.pipeline_ms(self.costs),
                          sum(node.runs * kernel.gpu_ms for node, kernel in zip(self.record.nodes, self.nodes, strict=True)))
        else:
            if self.used.kind == "critical_path":
                critical_path_ms = self._longest_path_ms()
            base_ms = kernel_sum_ms if critical_path_ms is None else critical_path_ms
            latency = float(latency_ms(self.used, base_ms, working_nodes(self.record)))
        if self.run_mode.io == "host" and self.used.host_io:
            latency += host_io_ms(self.used.host_io, copied_mib(self.record))
        return Composed(latency, critical_path_ms)

    def pipeline_ms(self, costs: PipelineCosts) -> float:
        """The latency of host and GPU as two tracks, ms. Where a loop has too many trips to follow node by node, the latency is
        extrapolated from two shorter loops: each trip takes as long as the one before."""
        latency = pipeline_ms(self.tracks, costs, self.off_gpu)
        if self._cut == 1:
            return latency
        all_runs, runs_kept, fewer_runs = (runs_in_order(self.record, times) for times in (1, self._cut, 2 * self._cut))
        if runs_kept == fewer_runs:
            return latency * all_runs / runs_kept
        shorter = [self.nodes[place] for place in run_order(self.record, 2 * self._cut)]
        shorter_ms = pipeline_ms(_tracks(shorter), costs, _off_gpu(shorter))
        return latency + (latency - shorter_ms) * (all_runs - runs_kept) / (runs_kept - fewer_runs)

    def beyond_tracks_ms(self, costs: PipelineCosts) -> float:
        """How much longer the run takes than its tracks alone, ms: the time of nodes off the GPU, and of trips that `order`
        omits."""
        return self.composed().latency_ms - pipeline_ms(self.tracks, costs)

    @cached_property
    def nodes(self) -> list[KernelInModel]:
        """The kernel of each node of the record."""
        return [self.known[key] for key in placed_kernels(self.record)]

    @cached_property
    def order(self) -> Sequence[int]:
        """The index in the record of each node that runs, in order; of very long loops only some trips."""
        return run_order(self.record, self._cut)

    @property
    def nodes_run(self) -> list[KernelInModel]:
        """The kernel of each node that runs, in `order`."""
        return [self.nodes[place] for place in self.order]

    @cached_property
    def tracks(self) -> Tracks:
        """The tracks of the nodes in `order`. Needs `costs`: without them no launches are known."""
        return _tracks(self.nodes_run)

    @cached_property
    def off_gpu(self) -> OffGpu | None:
        """What the nodes in `order` do off the GPU; None where all of them run on the GPU."""
        return _off_gpu(self.nodes_run)

    @property
    def host_work_ms(self) -> float:
        """How long the host works; 0 where the run is not simulated as two tracks. Trips that `order` omits work as long."""
        if self.used.kind != "pipeline" or self.costs is None:
            return 0.0
        trips = 1.0 if self._cut == 1 else runs_in_order(self.record, 1) / runs_in_order(self.record, self._cut)
        return trips * host_work_ms(self.tracks, self.costs, self.off_gpu)

    @cached_property
    def _cut(self) -> int:
        """The factor by which loops are shortened in `order`."""
        return shortest_cut(self.record)

    def _longest_path_ms(self) -> float:
        from hase.graph_model.simulation.dag import build_dag, calculate_latency

        by_node = {node.name: node.runs * kernel.latency_ms for node, kernel in zip(self.record.nodes, self.nodes, strict=True)}
        return calculate_latency(build_dag(self.record), by_node, "critical_path")


def kernels_span(run: ModelRun, latency: float, rough_only: bool) -> Span:
    """The factors by which a latency moves if all uncertain kernels are at the low end, or all at the high end, of their
    plausible times. With `rough_only`, only kernels that may make the prediction a rough estimate count."""
    low, high = (replace(run, known={key: kernel.at(end, rough_only) for key, kernel in run.known.items()}).composed()
                 for end in ("low", "high"))
    return Span(low.latency_ms / latency, high.latency_ms / latency) if latency else CERTAIN


def sources_of(run: ModelRun, latency: float, pace: float | None) -> Sources:
    """What the error of a latency (ms) on a GPU may come from. The pace, a ratio, is the host's; None where it is unknown."""
    return sources(((node.kernel_id, node.runs * kernel.gpu_ms, novelty(kernel))
                    for node, kernel in zip(run.record.nodes, run.nodes, strict=True)), latency, run.host_work_ms,
                   1.0 if pace is None else pace)


def novelty(kernel: KernelInModel) -> Novelty | None:
    """How a kernel differs from those that were learned from; None where it was measured."""
    if kernel.provenance == "measured":
        return None
    kind = CALIBRATED.get(kernel.uncertainty.reason, KNOWN.kind) if kernel.uncertainty else KNOWN.kind
    beyond = kernel.uncertainty.time.high ** (1.0 / BEYOND_POWER) if kernel.uncertainty and kind == "beyond" else 1.0
    return Novelty(kind, beyond, kernel.doubt)


def without_calibrated(run: ModelRun) -> ModelRun:
    """The run without the uncertainties of kernels that a calibrated interval covers."""
    return replace(run, known={key: kernel._replace(uncertainty=None) if kernel.uncertainty and (
        kernel.uncertainty.reason in CALIBRATED) else kernel for key, kernel in run.known.items()})


def hosts_span(run: ModelRun, latency: float, usual_costs: PipelineCosts | None, pace: float | None) -> Span:
    """The factors by which a latency moves with a faster and with a slower host than the one for which it is predicted. It
    stays CERTAIN for default constants, whose range of error covers other hosts.

    Args:
        run: the model's.
        latency: its latency, ms.
        usual_costs: of a run, at the host's usual pace.
        pace: of the host, a ratio; None where it is unknown.
    """
    if usual_costs is None or not latency or run.used.assumed:
        return CERTAIN
    latencies_ms = [replace(run, costs=usual_costs.at_pace(end)).composed().latency_ms for end in hosts_between(pace)]
    return Span(min(latencies_ms) / latency, max(latencies_ms) / latency)


def trips_span(run: ModelRun, latency: float) -> Span:
    """The factors by which a latency moves if bodies whose number of runs is a guess run as rarely, or as often, as they
    may."""
    if not run.record.guessed or not latency:
        return CERTAIN
    low, high = (replace(run, record=at_guess(run.record, end)).composed().latency_ms for end in ("low", "high"))
    return Span(low / latency, high / latency)


def _tracks(nodes: Sequence[KernelInModel]) -> Tracks:
    return Tracks(np.array([node.gpu_ms for node in nodes]), np.array([node.launches for node in nodes]),
                  np.array([node.kind for node in nodes], dtype=int))


def _off_gpu(nodes: Sequence[KernelInModel]) -> OffGpu | None:
    if not any(node.on_host or node.waits for node in nodes):
        return None
    return OffGpu(np.array([node.host_ms + (node.latency_ms if node.on_host else 0.0) for node in nodes]),
                  np.array([node.waits for node in nodes], dtype=bool))


class PredictedRun(NamedTuple):
    """A prediction, and what it was made from.

    Attributes:
        prediction: the answer.
        run: the model's kernels, tracks and costs.
        alone_ms: the latency on an otherwise idle device.
        fitted: what was learned for the target.
    """

    prediction: Prediction
    run: ModelRun
    alone_ms: float
    fitted: Fitted

    def at_pace(self, pace: float) -> PredictedRun:
        """The same run where the host takes `pace` times as long; its prediction stays as it is."""
        if self.run.costs is None or pace == 1.0:
            return self
        run = replace(self.run, costs=self.run.costs.at_pace(pace))
        return self._replace(run=run, alone_ms=run.composed().latency_ms)

    def spanning(self, otherwise: PredictedRun) -> PredictedRun:
        """The same with an interval that holds that of `otherwise` too: the model with the other branches of its Ifs."""
        low_ms, high_ms = zip(self.prediction.interval_ms, otherwise.prediction.interval_ms, strict=True)
        return self._replace(prediction=self.prediction.model_copy(update={"interval_ms": (min(low_ms), max(high_ms))}))


class KernelTimes(NamedTuple):
    """The times of a model's kernels, by id and provider.

    Attributes:
        counts: how often each runs.
        totals_ms: the time of all its runs.
        sum_ms: the sum over all kernels.
        whole_ms: the same, as the base of shares; 1 for an empty graph.
        shares: of whole_ms, a ratio by provenance.
        nodes: number of nodes by provenance.
        unsteady: the share of kernels that were measured while the machine was unsteady.
    """

    counts: Mapping[Placed, float]
    totals_ms: Mapping[Placed, float]
    sum_ms: float
    whole_ms: float
    shares: dict[Provenance, float]
    nodes: dict[Provenance, int]
    unsteady: float


class Uncertainty(NamedTuple):
    """The factors by which a latency may be off, whether that makes it a rough estimate, and the warnings about it."""

    span: Span
    rough: bool
    warnings: tuple[str, ...]


def predicted_run(record: ModelRecord, known: Mapping[Placed, KernelInModel], conditions: Conditions,
                  warnings: Sequence[str]) -> PredictedRun:
    """Predicts a model from what is known of its kernels.

    Args:
        record: the model's.
        known: its kernels by id and provider; may hold others too.
        conditions: what the prediction holds for.
        warnings: those that come first.
    """
    known = {key: known[key] for key in runs_of_kernels(record)}  # what follows moves all of them, several times
    run = ModelRun(record, known, conditions.used, conditions.run_mode, conditions.costs)
    composed, times = run.composed(), kernel_times(record, known)
    uncertainties = [(record.kernels[key[0]],
                      uncertainty) for key in times.counts if (uncertainty := known[key].uncertainty) is not None]
    shared = _under_load(run, conditions)
    unsure = _uncertainty(run, conditions, composed.latency_ms, times.shares["measured"], uncertainties, shared)
    prediction = _prediction(run, conditions, composed, times, uncertainties, shared, unsure, warnings)
    return PredictedRun(prediction, run, composed.latency_ms, conditions.fitted)


def kernel_times(record: ModelRecord, known: Mapping[Placed, KernelInModel]) -> KernelTimes:
    """The times of a model's kernels, and how much of them is measured, predicted and estimated."""
    counts = runs_of_kernels(record)
    totals = {key: count * known[key].latency_ms for key, count in counts.items()}
    by_provenance: dict[Provenance, float] = dict.fromkeys(PROVENANCES, 0.0)
    nodes: dict[Provenance, int] = dict.fromkeys(PROVENANCES, 0)
    for key, total_ms in totals.items():
        by_provenance[known[key].provenance] += total_ms
        nodes[known[key].provenance] += round(counts[key])
    kernel_sum_ms = sum(totals.values())
    whole_ms = kernel_sum_ms or 1.0
    shares = {name: part / whole_ms for name, part in by_provenance.items()}
    unsteady = sum(total_ms for key, total_ms in totals.items() if known[key].unsteady) / whole_ms
    return KernelTimes(counts, totals, kernel_sum_ms, whole_ms, shares, nodes, unsteady)


def _under_load(run: ModelRun, conditions: Conditions) -> UnderLoad | None:
    """The distribution of the latency next to the co-runner; None where there is no co-runner."""
    shared_gpu = conditions.shared_gpu
    if shared_gpu is None or run.costs is None:
        return None
    shared = under_load(run.tracks, run.costs, shared_gpu.sharing, shared_gpu.co_runner, shared_gpu.load_source)
    return shared.later_by(run.beyond_tracks_ms(run.costs))


def _uncertainty(run: ModelRun, conditions: Conditions, latency: float, measured_share: float,
                 uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], shared: UnderLoad | None) -> Uncertainty:
    """How sure a latency is, given the part of its kernels' time that was measured (a ratio) and its uncertain kernels."""
    fitted, used, pace, record = conditions.fitted, conditions.used, conditions.pace, run.record
    of_kernels = moved_by_rough = CERTAIN
    if uncertainties:
        of_kernels, moved_by_rough = (kernels_span(run, latency, rough_only) for rough_only in (False, True))
    trips = trips_span(run, latency)
    hosts = hosts_span(run, latency, conditions.usual_costs, pace.ratio) if pace else CERTAIN
    short = shortness(used, latency)
    fit, moved = fitted_span(used, conditions.run_mode, measured_share, conditions.device), of_kernels
    origins = sources_of(run, latency, pace.ratio if pace else None)
    if used.calibrated and conditions.run_mode == AS_USUAL:
        fit = Span(*used.calibrated.ends(origins))
        hosts = CERTAIN if used.calibrated.holds_paces and pace != UNKNOWN else hosts
        moved = kernels_span(without_calibrated(run), latency, False) if uncertainties else CERTAIN
    spans = [fit, moved, trips, hosts, short.span]
    if fitted.sheet_range:
        spans.append(Span(fitted.sheet_range.low, fitted.sheet_range.high))
    if conditions.shared_gpu and shared:
        spans.append(load_span(conditions.shared_gpu.sharing, conditions.shared_gpu.load_source))
    elif conditions.load:
        spans.append(kernels_under_load_span(fitted.predictors, used.label))
    times = (OTHER_CUDNN if fitted.other_cudnn else 1.0) * (
        FORCED if mismatches(record, fitted.target, fitted.predictors.sidecar.dtypes) else 1.0)
    warned = source_warnings(origins)
    warnings = (*uncertainty_warnings(uncertainties, moved_by_rough), *warned, *short.warnings,
                *(host_warning(hosts) if pace == UNKNOWN else ()), *(
        ["no model was ever measured on this machine: how kernels add up is a default, so the interval is wide"]
        if used.assumed else []))
    # A calibrated interval holds for kernels of usual uncertainty; that of this model's kernels may be larger.
    return Uncertainty(joined(spans).covering(of_kernels).widened(times),
                       any(map(is_rough, (moved_by_rough, trips))) or bool(warned) or short.makes_rough
                       or bool(record.assumed or uncounted(record)), warnings)


def _prediction(run: ModelRun, conditions: Conditions, composed: Composed, times: KernelTimes,
                uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], shared: UnderLoad | None, unsure: Uncertainty,
                warnings: Sequence[str]) -> Prediction:
    record, fitted, used, pace = run.record, conditions.fitted, conditions.used, conditions.pace
    latency = shared.mean_ms if shared else composed.latency_ms
    estimated, uncertain = (tuple(sorted({kernel.type for kernel,
                                         uncertainty in uncertainties if uncertainty.reason in reasons}))
                           for reasons in (("estimated", "on the CPU"), ("other form", "by values")))
    memory = peak_memory(record, layouts={key[0]: run.known[key].layout for key in times.counts})
    device_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
    return Prediction(
        model=record.model, target=fitted.target.name, flavour=record.flavour.name, holds_for=holds_for(record, fitted),
        composition=UsedComposition(label=used.label, kind=used.kind, alpha=used.alpha, beta_ms=used.beta_ms,
                                    node_ms=used.node_ms, costs=run.costs, assumed=used.assumed),
        way=run.run_mode, latency_ms=latency, interval_ms=(unsure.span.low * latency, unsure.span.high * latency),
        rough_estimate=unsure.rough, estimated_operators=estimated, doubtful_operators=uncertain,
        sum_latency_ms=_sum_latency_ms(used, times.sum_ms), kernel_sum_ms=times.sum_ms,
        critical_path_ms=composed.critical_path_ms,
        load=conditions.load or ({} if shared else "idle"), under_load=shared,
        host_pace=pace.ratio if pace else None, host_pace_source=pace.source if pace else None,
        strict=conditions.strict, time_share=times.shares, kernel_count=times.nodes, unsteady_share=times.unsteady,
        kernels=_kernel_shares(run, times),
        estimators=used_estimators(record, run.known, conditions),
        dims=record.dims, static=record.static, batch=record.batch,
        items_per_second=record.batch / latency * 1e3 if record.batch and latency else None,
        memory=memory, peak_memory_mib=memory.peak_mib, device_memory_mib=device_mib,
        fits_memory=None if device_mib is None else memory.peak_mib <= device_mib,
        warnings=(*warnings, *unsure.warnings, *memory_warnings(memory, device_mib)),
    )


def _kernel_shares(run: ModelRun, times: KernelTimes) -> tuple[KernelShare, ...]:
    """The model's kernels, those with the most time first."""
    record, known = run.record, run.known
    return tuple(
        KernelShare(id=key[0], type=record.kernels[key[0]].type, count=round(times.counts[key]),
                    latency_ms=known[key].latency_ms, total_ms=total_ms, share=total_ms / times.whole_ms,
                    provenance=known[key].provenance, launches=known[key].launches, provider=key[1],
                    unsteady=known[key].unsteady)
        for key, total_ms in sorted(times.totals_ms.items(), key=lambda item: -item[1]))


def _sum_latency_ms(used: Composition, kernel_sum_ms: float) -> float | None:
    """α·Σ+β with the α and β that were fitted for the sum, ms; None where none were fitted."""
    fits = [used] if used.kind == "sum" else [c for c in used.candidates if (c.label, c.kind) == (used.label, "sum")]
    return fits[0].alpha * kernel_sum_ms + fits[0].beta_ms if fits else None


def spans_of(predicted: PredictedRun) -> list[NodeSpan]:
    """When each node of a predicted run is at work, in the order in which they run.

    With composition `pipeline` there is one track for the host and one for the GPU. The other compositions do not know the
    host, so the kernels stand one after another, each as long as its label says. Of very long loops only some trips are there.
    """
    run = predicted.run
    if run.costs is None:
        times = [node.latency_ms for node in run.nodes_run]
        return [NodeSpan((float(end - time), float(end)), None) for end, time in zip(np.cumsum(times), times, strict=True)]
    return timeline(run.tracks, run.costs, run.off_gpu)


def trace_of(predicted: PredictedRun) -> dict[str, Any]:
    """The timeline of a predicted run in Chrome's trace-event format."""
    record = predicted.run.record
    nodes = [record.nodes[place] for place in predicted.run.order]
    return chrome_trace([f"{node.name} ({record.kernel_of(node).type})" for node in nodes], spans_of(predicted))
