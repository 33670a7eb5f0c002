"""Makes the answer for one model of a batch: shares of kernels, warnings, the latency beside other work, and the timeline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from hase.graph_model.simulation.pipeline import NodeSpan, OffGpu, Tracks, chrome_trace, pipeline_ms, timeline
from hase.inference.memory.session import device_memory_mib, memory_warnings
from hase.inference.prediction.answers import PROVENANCES, KernelShare, Prediction, Provenance, UsedComposition, UsedEstimator
from hase.inference.prediction.targets import Fitted, holds_for
from hase.inference.prediction.uncertainty import (
    CERTAIN,
    KernelUncertainty,
    host_warning,
    shortness_warnings,
    source_warnings,
    uncertainty_warnings,
)
from hase.inference.prediction.under_load import UnderLoad, under_load
from hase.ort_analysis.cuda.placement import capture_obstacle
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.graph_model.simulation.pipeline import PipelineCosts
    from hase.inference.prediction.batch import Batch
    from hase.inference.prediction.conditions import RunMode
    from hase.inference.prediction.kernels import KernelInModel, Keyed
    from hase.learned.composition.fitted import Composition
    from hase.learned.kernels.admitted import Admitted
    from hase.records.kernel_record import Kernel, ModelRecord


class ModelRun:
    """A run of one model of a batch. `costs` are None unless the composition simulates host and GPU as two tracks."""

    def __init__(self, batch: Batch, index: int, costs: PipelineCosts | None) -> None:
        self.batch, self.index, self.costs = batch, index, costs
        self.record: ModelRecord = batch.records[index]
        self.structure, self.composition = batch.structures[index], batch.conditions.used

    @property
    def latency_ms(self) -> float:
        """The latency on an otherwise idle device."""
        return float(self.batch.composed(self.costs)[0][0, self.index])

    @cached_property
    def nodes(self) -> list[KernelInModel]:
        """The kernel of each node of the record."""
        return cast("list[KernelInModel]", [self.batch.known[number] for number in self.batch.nodes[self.index].tolist()])

    @cached_property
    def known(self) -> dict[Keyed, KernelInModel]:
        """The model's distinct kernels, by key."""
        firsts = [self.nodes[first] for first in self.structure.firsts.tolist()]
        return dict(zip(self.structure.kernels, firsts, strict=True))

    def kernel(self, key: Keyed) -> Kernel:
        return self.record.kernels[key[0]]

    @cached_property
    def counts(self) -> dict[Keyed, float]:
        """How often each kernel runs."""
        return dict(zip(self.structure.kernels, self.structure.counts.tolist(), strict=True))

    @cached_property
    def totals_ms(self) -> dict[Keyed, float]:
        """The total time of all runs of each kernel."""
        return {key: count * self.known[key].latency_ms for key, count in self.counts.items()}

    @cached_property
    def kernel_sum_ms(self) -> float:
        """The sum of all kernel times, from which the composition makes the latency."""
        return float(self.batch.totals(self.batch["time_ms"])[self.index])

    def share(self, keys: Sequence[Keyed]) -> float:
        """The share (a ratio) of some kernels in the total kernel time; 0 for an empty graph."""
        return math.fsum(self.totals_ms[key] for key in keys) / (math.fsum(self.totals_ms.values()) or 1.0)

    @cached_property
    def uncertain(self) -> dict[Keyed, KernelUncertainty]:
        """The uncertainty of each uncertain kernel."""
        return {key: kernel.uncertainty for key, kernel in self.known.items() if kernel.uncertainty is not None}

    @property
    def order(self) -> Sequence[int]:
        """Indices in the record of the nodes that run, in order; of very long loops only some trips."""
        return cast("list[int]", self.structure.order.tolist())

    @property
    def nodes_run(self) -> list[KernelInModel]:
        """The kernel of each node in `order`."""
        return [self.nodes[index] for index in self.order]

    @cached_property
    def tracks(self) -> Tracks:
        """The tracks of the nodes in `order`. Only with `costs`, since else no launches are known."""
        numbers = self.batch.nodes[self.index][self.structure.order]
        return Tracks(self.batch.gpu_ms[numbers], self.batch["launches"][numbers], self.batch["kind"].astype(int)[numbers])

    @cached_property
    def off_gpu(self) -> OffGpu | None:
        """The work of nodes in `order` that is done off the GPU; None if there is none."""
        nodes = self.nodes_run
        if not any(node.on_host or node.waits for node in nodes):
            return None
        return OffGpu(np.array([node.host_ms + (node.latency_ms if node.on_host else 0.0) for node in nodes]),
                      np.array([node.waits for node in nodes], dtype=bool))

    def beyond_tracks_ms(self, costs: PipelineCosts) -> float:
        """The time that the tracks do not include: of nodes off the GPU, and of trips that `order` omits."""
        return self.latency_ms - pipeline_ms(self.tracks, costs)


class PredictedRun(NamedTuple):
    """A prediction, and what it was made from."""

    prediction: Prediction
    run: ModelRun
    alone_ms: float  # the latency on an otherwise idle device
    fitted: Fitted

    def at_pace(self, pace: float) -> PredictedRun:
        """The same run on a host that takes `pace` times as long. `prediction` stays as it is."""
        if self.run.costs is None or pace == 1.0:
            return self
        run = ModelRun(self.run.batch, self.run.index, self.run.costs.at_pace(pace))
        return self._replace(run=run, alone_ms=run.latency_ms)

    def spanning(self, other: PredictedRun) -> PredictedRun:
        """This run, with an interval that also contains that of `other`, the model with the other branches of its Ifs."""
        low_ms, high_ms = zip(self.prediction.interval_ms, other.prediction.interval_ms, strict=True)
        return self._replace(prediction=self.prediction.model_copy(update={"interval_ms": (min(low_ms), max(high_ms))}))


def predicted_run(run: ModelRun, warnings: Sequence[str]) -> PredictedRun:
    """Makes the whole answer for a model; `warnings` come before its own."""
    batch, record, composition, conditions = run.batch, run.record, run.composition, run.batch.conditions
    fitted, pace, latencies = conditions.fitted, conditions.pace, batch.latencies
    alone_ms, span = float(latencies.latency_ms[run.index]), latencies.spans.of_model(run.index)
    shared = _under_load(run, alone_ms)
    latency_ms = shared.mean_ms if shared else alone_ms
    estimated, doubtful = (tuple(sorted({run.kernel(key).type for key, uncertainty in run.uncertain.items()
                                          if uncertainty.reason in reasons}))
                            for reasons in (("estimated", "on the CPU"), ("other form", "by values")))
    by_provenance: dict[Provenance, list[Keyed]] = {name: [] for name in PROVENANCES}
    for key, kernel in run.known.items():
        by_provenance[kernel.provenance].append(key)
    memory, device_mib = batch.memory(run.index), device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
    prediction = Prediction(
        model=record.model, target=fitted.target.name, flavour=record.flavour.name, holds_for=holds_for(record, fitted),
        composition=UsedComposition(**composition.formula_fields() | {"costs": run.costs}, assumed=composition.assumed),
        way=conditions.run_mode, latency_ms=latency_ms, interval_ms=(span.low * latency_ms, span.high * latency_ms),
        rough_estimate=bool(latencies.rough[run.index]), estimated_operators=estimated, doubtful_operators=doubtful,
        sum_latency_ms=_sum_latency_ms(composition, run.kernel_sum_ms), kernel_sum_ms=run.kernel_sum_ms,
        critical_path_ms=None if latencies.critical_path_ms is None else float(latencies.critical_path_ms[run.index]),
        load=conditions.load or ({} if shared else "idle"), under_load=shared,
        host_pace=pace.ratio if pace else None, host_pace_source=pace.source if pace else None,
        strict=conditions.strict, time_share={name: run.share(keys) for name, keys in by_provenance.items()},
        kernel_count={name: sum(round(run.counts[key]) for key in keys) for name, keys in by_provenance.items()},
        unsteady_share=run.share([key for key, uncertainty in run.uncertain.items() if uncertainty.reason == "unsteady"]),
        kernels=_kernel_shares(run),
        estimators=used_estimators(run),
        dims=record.dims, static=record.static, batch=record.batch,
        items_per_second=record.batch / latency_ms * 1e3 if record.batch and latency_ms else None,
        memory=memory, peak_memory_mib=memory.peak_mib, device_memory_mib=device_mib,
        fits_memory=None if device_mib is None else memory.peak_mib <= device_mib,
        warnings=(*warnings, *_uncertainty_warnings(run), *memory_warnings(memory, device_mib)),
    )
    return PredictedRun(prediction, run, alone_ms, fitted)


def _under_load(run: ModelRun, alone_ms: float) -> UnderLoad | None:
    """The distribution of the latency beside the co-runner; None without one."""
    shared_gpu = run.batch.conditions.shared_gpu
    if shared_gpu is None or run.costs is None:
        return None
    shared = under_load(run.tracks, run.costs, shared_gpu.sharing, shared_gpu.co_runner, shared_gpu.load_source)
    return shared.longer_by(alone_ms - pipeline_ms(run.tracks, run.costs))


def _uncertainty_warnings(run: ModelRun) -> tuple[str, ...]:
    """Warnings about the uncertainty of the latency."""
    latencies, index, pace = run.batch.latencies, run.index, run.batch.conditions.pace
    uncertainties = [(run.kernel(key), uncertainty) for key, uncertainty in run.uncertain.items()]
    moved = latencies.by_rough.of_model(index) if uncertainties else CERTAIN
    return (*uncertainty_warnings(uncertainties, moved),
            *source_warnings(latencies.sources[index]),
            *shortness_warnings(float(latencies.shorter[index])),
            *(host_warning(latencies.by_host.of_model(index)) if pace and not pace.known else ()),
            *(["no model was ever measured on this machine: how kernels add up is a default, so the interval is wide"]
              if run.composition.assumed else []))


def _kernel_shares(run: ModelRun) -> tuple[KernelShare, ...]:
    """The model's kernels, longest total time first."""
    whole_ms = run.kernel_sum_ms or 1.0
    return tuple(
        KernelShare(id=key[0], type=run.kernel(key).type, count=round(run.counts[key]), latency_ms=kernel.latency_ms,
                    total_ms=total_ms, share=total_ms / whole_ms, provenance=kernel.provenance, launches=kernel.launches,
                    provider=key[1], unsteady=kernel.unsteady)
        for key, total_ms in sorted(run.totals_ms.items(), key=lambda item: -item[1]) for kernel in (run.known[key],))


def _sum_latency_ms(composition: Composition, kernel_sum_ms: float) -> float | None:
    """The latency by composition `sum`, α·Σ+β; None if it was not fitted."""
    fits = [composition] if composition.kind == "sum" else [
        candidate for candidate in composition.candidates if (candidate.label, candidate.kind) == (composition.label, "sum")]
    return fits[0].alpha * kernel_sum_ms + fits[0].beta_ms if fits else None


def node_spans(predicted: PredictedRun) -> list[NodeSpan]:
    """The start and end of each node in a predicted run, in order.

    Composition `pipeline` has a host track and a GPU track. Other compositions know no host: there, kernels follow one another.
    Of very long loops only some trips are included.
    """
    run = predicted.run
    if run.costs is None:
        times = [node.latency_ms for node in run.nodes_run]
        return [NodeSpan((float(end - time), float(end)), None) for end, time in zip(np.cumsum(times), times, strict=True)]
    return timeline(run.tracks, run.costs, run.off_gpu)


def predicted_trace(predicted: PredictedRun) -> dict[str, Any]:
    """The timeline of a predicted run in Chrome's trace-event format."""
    record = predicted.run.record
    nodes = [record.nodes[index] for index in predicted.run.order]
    return chrome_trace([f"{node.name} ({record.kernel_of(node).type})" for node in nodes], node_spans(predicted))


def model_warnings(run: ModelRun) -> tuple[str, ...]:
    """All warnings about a model's graph. Raises UserError if a CUDA graph is wanted and ONNX Runtime can't capture it."""
    record = run.record
    return (*_capture_warning(record, run.batch.conditions.run_mode), *_assumed_warning(record),
            *_uncounted_warning(run.structure.uncounted), *_guessed_warnings(record), *_range_warning(run),
            *_unsteady_warning(run))


def weights_warning(missing: Sequence[Path]) -> tuple[str, ...]:
    """A warning if files of a model's weights are missing."""
    if not missing:
        return ()
    names = ", ".join(path.name for path in missing)
    return (f"its weights were not read (--no-weights), since {names} is missing: what is in it counts as zeros",)


def _capture_warning(record: ModelRecord, run_mode: RunMode) -> tuple[str, ...]:
    """A warning if a CUDA graph is wanted and some nodes run on the CPU. Raises UserError if it can't be captured at all."""
    if not run_mode.cuda_graph:
        return ()
    if (obstacle := capture_obstacle(record)) is not None:
        raise UserError(f"{record.model}: ONNX Runtime can't capture it as a CUDA graph: {obstacle}; predict it without "
                        "--cuda-graph")
    on_cpu = [node.name for node in record.nodes if node.provider == "cpu"]
    if not on_cpu:
        return ()
    return (f"{len(on_cpu)} of its nodes work out sizes on the CPU ({_first_names(on_cpu)}): a captured graph keeps the "
            "sizes of the run that was captured",)


def _assumed_warning(record: ModelRecord) -> tuple[str, ...]:
    """A warning if the largest possible sizes were assumed, since they depend on data."""
    if not record.assumed:
        return ()
    tensor, shape = next(iter(record.assumed.items()))
    sizes = "×".join(map(str, shape))
    return (f"sizes that depend on data are taken to be the largest possible, so the latency is an upper estimate: tensor "
            f"{tensor} is {sizes}{f', and {len(record.assumed) - 1} more' * (len(record.assumed) > 1)}; say how large with "
            f"--dim {tensor}.<axis>=SIZE",)


def _uncounted_warning(names: Sequence[str]) -> tuple[str, ...]:
    """A warning about nodes whose bodies are not counted."""
    if not names:
        return ()
    return (f"rough estimate: {len(names)} of its nodes hold graphs of their own ({_first_names(names, 3)}), and what runs in "
            "them is not counted: it takes longer than predicted",)


def _guessed_warnings(record: ModelRecord) -> list[str]:
    """Warnings about bodies whose number of runs is a guess."""
    warnings = []
    for name, guess in record.guessed.items():
        if guess.taken.isdigit() and guess.high == 1.0:
            warnings.append(f"{name} may end before its {guess.taken} trips, by what its body computes; all are counted: say "
                            f"how many with --dim {name}.trips=N")
        elif guess.taken.isdigit():
            warnings.append(f"how often {name} runs its body can't be known; {guess.taken} trips are taken, a guess: say how "
                            f"many with --dim {name}.trips=N")
        else:
            other_branch = "else" if guess.taken == "then" else "then"
            warnings.append(f"which branch {name} takes can't be known; the more expensive one, {guess.taken}, is counted, "
                            f"and the interval holds both; say otherwise with --branch {name}={other_branch}")
    return warnings


def _unsteady_warning(run: ModelRun) -> tuple[str, ...]:
    """A warning about kernels that were measured while the machine was unsteady."""
    off = {key: uncertainty.time.high for key, uncertainty in run.uncertain.items() if uncertainty.reason == "unsteady"}
    if not off:
        return ()
    return (f"{len(off)} of its kernels, {run.share(list(off)):.1%} of the kernel time, were measured while the machine was "
            f"unsteady (by up to {max(off.values()) - 1.0:.0%}), and are less sure: {_first_names(name for name, *_ in off)}; "
            "--measure-missing measures them again",)


def _range_warning(run: ModelRun) -> tuple[str, ...]:
    """A warning about kernels that are smaller or larger than any measured one."""
    beyond = [key for key, uncertainty in run.uncertain.items() if uncertainty.reason == "beyond"]
    if not beyond:
        return ()
    return (f"{len(beyond)} of its kernels, {run.share(beyond):.1%} of the kernel time, are beyond what was measured in some "
            f"size, and less sure: {_first_names(name for name, *_ in beyond)}",)


def _first_names(names: Iterable[str], count: int = 2) -> str:
    first = list(itertools.islice(names, count + 1))
    return ", ".join(first[:count]) + (" …" if len(first) > count else "")


def _used_admitted(run: ModelRun) -> list[tuple[Admitted, tuple[str, ...]]]:
    """The admitted estimators that predicted kernels of a model, each with its kernel types."""
    admitted = run.batch.conditions.fitted.predictors.admitted
    if admitted is None:
        return []
    by_type, used = admitted.by_type(run.composition.label), dict[str, set[str]]()
    for key, known in run.known.items():
        kernel, constant = run.kernel(key), known.uncertainty is not None and known.uncertainty.reason == "control flow"
        if (entry := by_type.get(kernel.type)) and kernel.moves_data and known.provenance == "predicted" and not (
                known.on_host or constant):
            used.setdefault(entry.name, set()).add(kernel.type)
    by_name = {entry.name: entry for entry in by_type.values()}
    return [(by_name[name], tuple(sorted(types))) for name, types in sorted(used.items())]


def used_estimators(run: ModelRun) -> tuple[UsedEstimator, ...]:
    return tuple(UsedEstimator(name=entry.name, source=entry.source, types=types, mape=entry.errors.mape, forced=entry.forced)
                 for entry, types in _used_admitted(run))


def estimator_warnings(run: ModelRun) -> tuple[str, ...]:
    """A notice for each admitted estimator that was used, and a warning if the dataset changed since it was checked."""
    fitted, warnings = run.batch.conditions.fitted, []
    for entry, types in _used_admitted(run):
        warnings.append(entry.model_copy(update={"types": types}).sentence)
        if outdated := entry.outdated(fitted.target.name, fitted.predictors.sidecar.dataset_sha256):
            warnings.append(outdated)
    return tuple(warnings)
