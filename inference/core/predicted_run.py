"""A prediction together with the run that it is of, which is all that further questions about the model need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from inference.core.answers import PROVENANCES, KernelShare, Prediction, Provenance, UsedComposition
from inference.core.device_memory import device_memory_mib, memory_warnings
from inference.core.host_pace import UNKNOWN
from inference.core.kernels_in_model import KernelInModel, Placed, runs_of_kernels
from inference.core.memory import peak_memory
from inference.core.model_run import (
    Composed,
    ModelRun,
    hosts_span,
    kernels_span,
    sources_of,
    trips_span,
    without_calibrated,
)
from inference.core.model_warnings import uncounted
from inference.core.run_modes import AS_USUAL
from inference.core.targets import Fitted, mismatches
from inference.core.uncertainty import (
    CERTAIN,
    FORCED,
    OTHER_CUDNN,
    KernelUncertainty,
    Span,
    fitted_span,
    host_warning,
    is_rough,
    joined,
    kernels_under_load_span,
    load_span,
    shortness,
    uncertainty_warnings,
)
from inference.core.used_estimators import used_estimators
from inference.sharing.co_runner import UnderLoad, under_load

if TYPE_CHECKING:
    from inference.core.conditions import Conditions
    from records.kernel_record import Kernel, ModelRecord
    from training.composition.fitted import Composition


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


class KernelTimes(NamedTuple):
    """The times of a model's kernels, by id and provider.

    Attributes:
        counts: how often each runs.
        totals_ms: the time of all its runs.
        sum_ms: the sum over all kernels.
        whole_ms: the same, as the base of shares; 1 for an empty graph.
        shares: of whole_ms, a ratio by provenance.
        nodes: number of nodes by provenance.
    """

    counts: Mapping[Placed, float]
    totals_ms: Mapping[Placed, float]
    sum_ms: float
    whole_ms: float
    shares: dict[Provenance, float]
    nodes: dict[Provenance, int]


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
    return KernelTimes(counts, totals, kernel_sum_ms, whole_ms, shares, nodes)


def _under_load(run: ModelRun, conditions: Conditions) -> UnderLoad | None:
    """The distribution of the latency next to the co-runner; None where there is no co-runner."""
    shared_gpu = conditions.shared_gpu
    if shared_gpu is None or run.costs is None:
        return None
    shared = under_load(run.tracks, run.costs, shared_gpu.sharing, shared_gpu.co_runner, shared_gpu.told_by)
    return shared.later_by(run.off_gpu_ms(run.costs))


def _uncertainty(run: ModelRun, conditions: Conditions, latency: float, measured_share: float,
                 uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], shared: UnderLoad | None) -> Uncertainty:
    """How sure a latency is, given the part of its kernels' time that was measured (a ratio) and its uncertain kernels."""
    fitted, used, pace, record = conditions.fitted, conditions.used, conditions.pace, run.record
    of_kernels = marking = CERTAIN
    if uncertainties:
        of_kernels, marking = (kernels_span(run, latency, marking_only) for marking_only in (False, True))
    trips = trips_span(run, latency)
    hosts = hosts_span(run, latency, conditions.usual_costs, pace.ratio) if pace else CERTAIN
    short = shortness(used, latency)
    fit, moved = fitted_span(used, conditions.run_mode, measured_share, conditions.device), of_kernels
    if used.calibrated and conditions.run_mode == AS_USUAL:
        fit = Span(*used.calibrated.ends(sources_of(run, latency)))
        moved = kernels_span(without_calibrated(run), latency, False) if uncertainties else CERTAIN
    spans = [fit, moved, trips, hosts, short.span]
    if conditions.shared_gpu and shared:
        spans.append(load_span(conditions.shared_gpu.sharing, conditions.shared_gpu.told_by))
    elif conditions.load:
        spans.append(kernels_under_load_span(fitted.predictors, used.label))
    times = (OTHER_CUDNN if fitted.other_cudnn else 1.0) * (
        FORCED if mismatches(record, fitted.target, fitted.predictors.sidecar.dtypes) else 1.0)
    warnings = (*uncertainty_warnings(uncertainties, marking), *short.warnings,
                *(host_warning(hosts) if pace == UNKNOWN else ()), *(
        ["no model was ever measured on this machine: how kernels add up is a default, so the interval is wide"]
        if used.assumed else []))
    # A calibrated interval is of usual doubts about kernels; the doubt about these kernels alone may be larger.
    return Uncertainty(joined(spans).covering(of_kernels).widened(times),
                       is_rough(marking) or is_rough(trips) or short.marks or bool(record.assumed or uncounted(record)),
                       warnings)


def _prediction(run: ModelRun, conditions: Conditions, composed: Composed, times: KernelTimes,
                uncertainties: Sequence[tuple[Kernel, KernelUncertainty]], shared: UnderLoad | None, unsure: Uncertainty,
                warnings: Sequence[str]) -> Prediction:
    record, fitted, used, pace = run.record, conditions.fitted, conditions.used, conditions.pace
    latency = shared.mean_ms if shared else composed.latency_ms
    estimated, uncertain = (tuple(sorted({kernel.type for kernel,
                                         uncertainty in uncertainties if uncertainty.reason in reasons}))
                           for reasons in (("estimated", "on the CPU"), ("other form",)))
    memory = peak_memory(record, layouts={key[0]: run.known[key].layout for key in times.counts})
    there_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
    return Prediction(
        model=record.model, target=fitted.target.name, flavour=record.flavour.name,
        composition=UsedComposition(label=used.label, kind=used.kind, alpha=used.alpha, beta_ms=used.beta_ms,
                                    node_ms=used.node_ms, costs=run.costs, assumed=used.assumed),
        way=run.run_mode, latency_ms=latency, interval_ms=(unsure.span.low * latency, unsure.span.high * latency),
        rough_estimate=unsure.rough, estimated_operators=estimated, doubtful_operators=uncertain,
        sum_latency_ms=_sum_latency_ms(used, times.sum_ms), kernel_sum_ms=times.sum_ms,
        critical_path_ms=composed.critical_path_ms,
        load=conditions.load or ({} if shared else "idle"), under_load=shared,
        host_pace=pace.ratio if pace else None, host_pace_source=pace.source if pace else None,
        strict=conditions.strict, time_share=times.shares, kernel_count=times.nodes, kernels=_kernel_shares(run, times),
        types_without_predictor=estimated, estimators=used_estimators(record, run.known, conditions),
        dims=record.dims, static=record.static, batch=record.batch,
        items_per_second=record.batch / latency * 1e3 if record.batch and latency else None,
        memory=memory, peak_memory_mib=memory.peak_mib, device_memory_mib=there_mib,
        fits_memory=None if there_mib is None else memory.least_mib <= there_mib,
        warnings=(*warnings, *unsure.warnings, *memory_warnings(memory.least_mib, there_mib)),
    )


def _kernel_shares(run: ModelRun, times: KernelTimes) -> tuple[KernelShare, ...]:
    """The model's kernels, those with the most time first."""
    record, known = run.record, run.known
    return tuple(
        KernelShare(id=key[0], type=record.kernels[key[0]].type, count=round(times.counts[key]),
                    latency_ms=known[key].latency_ms, total_ms=total_ms, share=total_ms / times.whole_ms,
                    provenance=known[key].provenance, launches=known[key].launches, provider=key[1])
        for key, total_ms in sorted(times.totals_ms.items(), key=lambda item: -item[1]))


def _sum_latency_ms(used: Composition, kernel_sum_ms: float) -> float | None:
    """α·Σ+β with the α and β that were fitted for the sum, ms; None where none were fitted."""
    fits = [used] if used.kind == "sum" else [c for c in used.candidates if (c.label, c.kind) == (used.label, "sum")]
    return fits[0].alpha * kernel_sum_ms + fits[0].beta_ms if fits else None
