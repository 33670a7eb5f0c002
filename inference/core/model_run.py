"""A run of a model, put together from its kernels, and how its latency moves where the kernels or the host differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graph_model.simulation.pipeline import pipeline_ms
from graph_model.simulation.tracks import OffGpu, Tracks
from inference.core.kernels_in_model import KernelInModel, Placed, placed_kernels
from inference.core.uncertainty import BEYOND_POWER, CALIBRATED, CERTAIN, Span, hosts_between
from records.run_order import at_guess, run_order, runs_in_order, shortest_cut
from training.composition.error_sources import KNOWN, Sources, Stranger, sources
from training.composition.fitted import copied_mib, host_io_ms, latency_ms, working_nodes

if TYPE_CHECKING:
    from graph_model.simulation.pipeline import PipelineCosts
    from inference.core.run_modes import RunMode
    from records.kernel_record import ModelRecord
    from training.composition.fitted import Composition


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
            node.runs * found.latency_ms for node, found in zip(self.record.nodes, self.nodes, strict=True)), None
        if self.used.kind == "pipeline" and self.costs is not None:
            latency = max(self.pipeline_ms(self.costs),
                          sum(node.runs * found.gpu_ms for node, found in zip(self.record.nodes, self.nodes, strict=True)))
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
        every, some, fewer = (runs_in_order(self.record, times) for times in (1, self._cut, 2 * self._cut))
        if some == fewer:
            return latency * every / some
        shorter = [self.nodes[place] for place in run_order(self.record, 2 * self._cut)]
        return latency + (latency - pipeline_ms(_tracks(shorter), costs, _off_gpu(shorter))) * (every - some) / (some - fewer)

    def off_gpu_ms(self, costs: PipelineCosts) -> float:
        """How much longer the run takes than its tracks alone, ms: the time of nodes off the GPU, and of trips that `order`
        omits."""
        return self.pipeline_ms(costs) - pipeline_ms(self.tracks, costs)

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

    @cached_property
    def _cut(self) -> int:
        """The factor by which loops are shortened in `order`."""
        return shortest_cut(self.record)

    def _longest_path_ms(self) -> float:
        from graph_model.dag.dag import build_dag, calculate_latency

        by_node = {node.name: node.runs * found.latency_ms for node, found in zip(self.record.nodes, self.nodes, strict=True)}
        return calculate_latency(build_dag(self.record), by_node, "critical_path")


def kernels_span(run: ModelRun, latency: float, marking_only: bool) -> Span:
    """The factors by which a latency moves if all uncertain kernels are at the low end, or all at the high end, of their
    plausible times. With `marking_only`, only kernels that may make the prediction a rough estimate count."""
    low, high = (replace(run, known={key: kernel.at(end, marking_only) for key, kernel in run.known.items()}).composed()
                 for end in ("low", "high"))
    return Span(low.latency_ms / latency, high.latency_ms / latency) if latency else CERTAIN


def sources_of(run: ModelRun, latency: float) -> Sources:
    """What the error of a latency (ms) on a GPU may come from."""
    return sources(((node.runs * found.gpu_ms, _stranger(found))
                    for node, found in zip(run.record.nodes, run.nodes, strict=True)), latency)


def _stranger(kernel: KernelInModel) -> Stranger | None:
    """How a kernel differs from those that were learned from; None where it was measured."""
    if kernel.provenance == "measured":
        return None
    if kernel.uncertainty is None or kernel.uncertainty.reason not in CALIBRATED:
        return KNOWN
    how = CALIBRATED[kernel.uncertainty.reason]
    return Stranger(how, kernel.uncertainty.time.high ** (1.0 / BEYOND_POWER) if how == "beyond" else 1.0)


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
    found = [replace(run, costs=usual_costs.at_pace(end)).composed().latency_ms for end in hosts_between(pace)]
    return Span(min(found) / latency, max(found) / latency)


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
