"""The latency of models on a target, from the times of their kernels.

    from inference import predict
    print(predict("model.onnx", dims={"batch": 16}).latency_ms)

A model's time is α·Σ+β over its kernels' times, or that over the longest path through its graph, whichever the target's
composition says. A kernel's time is the measured one where this very kernel was measured (and nothing else runs), else
the predicted one, else an estimate from its FLOPs and bytes; the result says how much of it is which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from graph_model.simulation.pipeline import PipelineCosts, pipeline_ms
from graph_model.simulation.sharing import OtherWork
from graph_model.simulation.tracks import OffGpu, Tracks, node_kind
from inference.core.answers import PROVENANCES, KernelShare, Prediction, Provenance, UsedComposition
from inference.core.device_memory import device_memory_mib, memory_warnings
from inference.core.doubt import (
    CERTAIN,
    FORCED,
    OTHER_CUDNN,
    Span,
    doubt_warnings,
    fitted_span,
    host_warning,
    hosts_between,
    is_rough,
    joined,
    kernel_doubts,
    kernels_under_load_span,
    load_span,
    shortness,
)
from inference.core.host_pace import UNKNOWN, HostPace, check_host, counts, given_pace, recent_pace
from inference.core.known_kernels import (
    KnownKernel,
    Placed,
    _control_flow_kernel,
    _off_gpu_kernel,
    placed_kernels,
    runs_of_kernels,
)
from inference.core.memory import layout_of, peak_memory
from inference.core.sources import Source, record_of
from inference.core.targets import Fitted, check_fit, fitted_for, misfits
from inference.core.ways import AS_USUAL, WayOfRunning
from inference.sharing.co_runner import NotShared, ToldBy, other_work, under_load
from ort_analysis.cuda.capture import capture_obstacle
from ort_analysis.records.kernel_costs import is_control_flow
from ort_analysis.records.kernel_record import ModelRecord
from ort_analysis.records.run_order import at_guess, holds_bodies, run_order, runs_in_order, shortest_cut
from training.composition.fitted import FIT, Composition, copied_mib, host_io_ms, latency_ms, working_nodes
from training.kernels.settings import LAUNCHES
from utils.errors import UserError
from utils.paths import Workspace

if TYPE_CHECKING:
    from training.sharing.learned import Sharing


def predict(source: Source, *, dims: Mapping[str, int] | None = None,
            target: str | None = None, strict: bool = False, load: Mapping[str, float] | None = None,
            way: WayOfRunning = AS_USUAL, composition: Composition | None = None, workspace: Workspace | None = None,
            force: bool = False, notices: Sequence[str] = (), other: OtherWork | None = None,
            static: bool = False, host_pace: float | HostPace | None = None) -> Prediction:
    """The latency of one model.

    Args:
        source: an ONNX file (or a record's JSON file), a model in memory, or a record.
        dims: sizes of dynamic dimensions by name.
        target: name of the target; by default this machine, or the only one that has predictors.
        strict: predict every kernel, even those that were measured.
        load: metrics of what else runs on the device, by DCGM field name; None or empty: nothing does.
        way: how the model is run, if otherwise than with its tensors on the device, node by node.
        composition: another than the target's own.
        workspace: the folder that holds the predictors; by default the repository.
        force: predict although the element type or ONNX Runtime's minor version is not the predictors' (with a warning).
        notices: what to know about the load; put first among the prediction's warnings.
        other: what else runs on the GPU, as a probe met it (`training.sharing.learned.other_work_probed`); metrics tell less.
        static: take a model with dynamic dimensions as exported at `dims`; else as a session that takes any sizes runs it.
        host_pace: how many times as long as usual the target's host takes to dispatch, a ratio (`inference.core.host_pace`
        measures
            it, or reads it from a file). None: what benchmark/host_pace.py found on this machine not long ago, where it is the
            target; else it is not known.

    Raises:
        UserError: the model, the predictors, the load or the pace can't be used; the message says why.
    """
    return predict_many([source], dims=dims, target=target, strict=strict, load=load, way=way, composition=composition,
                        workspace=workspace, force=force, notices=notices, other=other, static=static, host_pace=host_pace)[0]


def predict_many(sources: Iterable[Source], *, dims: Mapping[str, int] | None = None,
                 target: str | None = None, strict: bool = False, load: Mapping[str, float] | None = None,
                 way: WayOfRunning = AS_USUAL, composition: Composition | None = None,
                 workspace: Workspace | None = None, force: bool = False,
                 notices: Sequence[str] = (), other: OtherWork | None = None, static: bool = False,
                 host_pace: float | HostPace | None = None) -> list[Prediction]:
    """The latencies of many models in one go, in their order; a kernel that several share is predicted once.

    Arguments and errors are those of `predict`.
    """
    workspace = workspace or Workspace()
    fitted = fitted_for(workspace, target)
    used = composition or fitted.composition
    check_way(way, used, fitted.target.name)
    pace = _pace_of(host_pace, fitted, used, way, workspace)
    provider = fitted.target.flavour.device
    records = [record_of(workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source, provider, dims,
                         static)
               for source in sources]
    from training.composition.off_gpu import is_off_gpu

    sidecar = fitted.predictors.sidecar
    notices = (*notices, *fitted.notices)
    if way.cuda_graph and host_pace is not None:
        notices = (*notices, "a CUDA graph that is replayed does not wait for its host, so the host's pace changes nothing")
    if fitted.sharing is None and (unread := sorted(set(load or {}) - set(sidecar.metrics))):
        notices = (*notices, f"the load's {', '.join(unread)} was in no training and is not looked at")
    warnings = [(*notices, *check_fit(record, fitted.target, sidecar.dtypes, force)) for record in records]
    placed = {(node.kernel_id, node.provider): record.kernel_of(node) for record in records for node in record.nodes}
    loops = {key: kernel for key, kernel in placed.items() if is_control_flow(kernel)}
    off_gpu = {key: kernel for key, kernel in placed.items()
               if provider == "cuda" and is_off_gpu(kernel, key[1]) and key not in loops}
    kernels = {key: kernel for key, kernel in placed.items() if key not in off_gpu and key not in loops}
    given = dict(load or {})
    beside = _beside(fitted, used, way, given, other)
    warnings = [(*warned, *_sharing_warning(beside)) for warned in warnings]
    of_kernels = {} if beside else given  # waiting belongs to the model's run then, not to its kernels
    times = fitted.predictors.predict(list(kernels.values()), of_kernels, used.label, strict)
    launches: Sequence[float | None] = [None] * len(kernels)
    if used.kind == "pipeline":
        launches = fitted.predictors.predict(list(kernels.values()), of_kernels, LAUNCHES, strict).latency_ms
    doubts = kernel_doubts(kernels.values(), times.provenance, fitted, used.label)
    known = {key: KnownKernel(time_ms, cast("Provenance", provenance), count, node_kind(kernel), layout_of(kernel),
                              doubts.get(kernel.id))
             for (key, kernel), time_ms, provenance, count in zip(
                 kernels.items(), times.latency_ms, times.provenance, launches, strict=True)}
    known |= {key: _off_gpu_kernel(kernel, key[1]) for key, kernel in off_gpu.items()}
    known |= {key: _control_flow_kernel(kernel, provider) for key, kernel in loops.items()}
    return [_compose(record, known, fitted, used, given, beside, strict, way, pace,
                     (*warned, *_capture_warning(record, way), *_assumed_warning(record), *_uncounted_warning(record),
                      *_guessed_warnings(record), *_range_warning(record, known)))
            for record, warned in zip(records, warnings, strict=True)]


def _pace_of(asked: float | HostPace | None, fitted: Fitted, used: Composition, way: WayOfRunning,
             workspace: Workspace) -> HostPace | None:
    """The pace of the host that predictions hold for; None where it does not count.

    Raises:
        UserError: one is asked for that can't be a ratio, or of a target that has none.
    """
    if asked is not None:
        check_host(fitted, used)
        asked = asked if isinstance(asked, HostPace) else given_pace(asked)
    if not counts(used, way):
        return None
    return recent_pace(fitted, workspace) if asked is None else asked


class Beside(NamedTuple):
    """What else runs on the GPU, what the target's sharing is like, and what told of it."""

    sharing: Sharing
    other: OtherWork
    told_by: ToldBy


def _beside(fitted: Fitted, used: Composition, way: WayOfRunning, load: Mapping[str, float],
            other: OtherWork | None) -> Beside | None:
    """What else runs, where the latency's distribution beside it can be told; None where nothing does, or by metrics alone
    where nothing was learned of sharing.

    Raises:
        UserError: a probe, or a way of running beside other work, for which nothing was learned.
    """
    sharing = fitted.sharing if used.kind == "pipeline" else None
    if sharing is None:
        if other is not None:
            raise NotShared(fitted.target.name)
        return None
    found = other or other_work(fitted, load)
    if found is None:
        return None
    check_beside(way)
    return Beside(sharing, found, "metrics" if other is None else "probe")


def check_beside(way: WayOfRunning) -> None:
    """Refuses ways of running that were not measured beside other work."""
    if way != AS_USUAL:
        raise UserError(f"a model run {way.in_words} was not measured beside other work; predict it with tensors on the "
                        "device, node by node, or idle")


def _sharing_warning(beside: Beside | None) -> tuple[str, ...]:
    """What to know about a latency beside work that only metrics tell of; nothing where a probe does."""
    if beside is None or beside.told_by == "probe" or not beside.sharing.probed or not beside.sharing.from_metrics:
        return ()
    return (f"metrics alone hide how long the other work's turns are: means predicted from them erred by "
            f"{beside.sharing.from_metrics.mean:.0%} on average, from a probe (--probe, or --probe-every of Prometheus's "
            f"exporter, benchmark/metrics_exporter.py) by {beside.sharing.probed.mean:.0%}",)


def check_way(way: WayOfRunning, used: Composition, target: str) -> None:
    """Whether a model's run that way can be predicted.

    Raises:
        UserError: no models were run so on the target, or ONNX Runtime itself can't.
    """
    if way.cuda_graph and way.io == "host":
        raise UserError("a CUDA graph reads and writes tensors at fixed places on the device: predict it with --io device")
    for asked, fitted, what in ((way.io == "host", used.host_io, "host_io"), (way.cuda_graph, used.cuda_graph, "cuda_graph")):
        if asked and fitted is None:
            raise UserError(f"{target}: no models were run so ({what}); measure some (variants in the collector's config), and "
                            f"fit again: {FIT}")


def _compose(record: ModelRecord, known: Mapping[Placed, KnownKernel], fitted: Fitted, used: Composition,
             load: dict[str, float], beside: Beside | None, strict: bool, way: WayOfRunning, pace: HostPace | None,
             warnings: tuple[str, ...]) -> Prediction:
    """A model's time from what is known of its kernels, by id and provider."""
    counts = runs_of_kernels(record)
    totals = {key: count * known[key].latency_ms for key, count in counts.items()}
    kernel_sum_ms = sum(totals.values())
    whole_ms = kernel_sum_ms or 1.0  # a graph that is optimised away has no kernels
    by_provenance: dict[Provenance, float] = dict.fromkeys(PROVENANCES, 0.0)
    nodes_by_provenance: dict[Provenance, int] = dict.fromkeys(PROVENANCES, 0)
    for key, total_ms in totals.items():
        by_provenance[known[key].provenance] += total_ms
        nodes_by_provenance[known[key].provenance] += round(counts[key])
    shares = {name: part / whole_ms for name, part in by_provenance.items()}
    costs = used.cuda_graph.costs if way.cuda_graph and used.cuda_graph else used.costs
    usual_costs = costs
    if pace and pace.ratio is not None and costs is not None:
        costs = costs.at_pace(pace.ratio)
    composed = _composed(record, known, used, costs, way)
    latency, shared = composed.latency_ms, None
    provider = fitted.target.flavour.device
    doubts = [(record.kernels[key[0]], doubt) for key in counts if (doubt := known[key].doubt) is not None]
    moved = marking = CERTAIN
    if doubts:
        moved, marking = (_moved(record, known, used, costs, way, latency, marking_only) for marking_only in (False, True))
    trips = _trips_span(record, known, used, costs, way, latency)
    hosts = _hosts_span(record, known, used, usual_costs, way, latency, pace) if pace else CERTAIN
    short = shortness(used, latency)
    spans = [fitted_span(used, way, shares["measured"], provider), moved, trips, hosts, short.span]
    if beside and costs is not None:
        nodes = _nodes_run(record, known, shortest_cut(record))
        shared = under_load(_tracks(nodes), costs, beside.sharing, beside.other, beside.told_by)
        shared = shared.later_by(_record_ms(record, known, costs) - pipeline_ms(_tracks(nodes), costs))
        latency = shared.mean_ms
        spans.append(load_span(beside.sharing, beside.told_by))
    elif load:
        spans.append(kernels_under_load_span(fitted.predictors, used.label))
    times = (OTHER_CUDNN if fitted.other_cudnn else 1.0) * (
        FORCED if misfits(record, fitted.target, fitted.predictors.sidecar.dtypes) else 1.0)
    span = joined(spans).widened(times)
    estimated, doubtful = (tuple(sorted({kernel.type for kernel, doubt in doubts if doubt.reason in reasons}))
                           for reasons in (("estimated", "on the CPU"), ("stand-in", "other form")))
    warnings = (*warnings, *doubt_warnings(doubts, marking), *short.warnings,
                *(host_warning(hosts) if pace == UNKNOWN else ()), *(
        ["no model was ever measured on this machine: how kernels add up is a default, so the interval is wide"]
        if used.assumed else []))
    memory = peak_memory(record, layouts={key[0]: known[key].layout for key in counts})
    there_mib = device_memory_mib(fitted.target, fitted.predictors.sidecar.machines)
    return Prediction(
        model=record.model, target=fitted.target.name, flavour=record.flavour.name,
        composition=UsedComposition(label=used.label, kind=used.kind, alpha=used.alpha, beta_ms=used.beta_ms,
                                    node_ms=used.node_ms, costs=costs, assumed=used.assumed),
        way=way, latency_ms=latency, interval_ms=(span.low * latency, span.high * latency),
        rough_estimate=is_rough(marking) or is_rough(trips) or short.marks or bool(record.assumed or _uncounted(record)),
        estimated_operators=estimated, doubtful_operators=doubtful,
        sum_latency_ms=_sum_latency_ms(used, kernel_sum_ms), kernel_sum_ms=kernel_sum_ms,
        critical_path_ms=composed.critical_path_ms,
        load=load or ({} if shared else "idle"), under_load=shared,
        host_pace=pace.ratio if pace else None, host_pace_source=pace.source if pace else None,
        strict=strict, time_share=shares, kernel_count=nodes_by_provenance,
        kernels=tuple(
            KernelShare(id=key[0], type=record.kernels[key[0]].type, count=round(counts[key]),
                        latency_ms=known[key].latency_ms, total_ms=total_ms, share=total_ms / whole_ms,
                        provenance=known[key].provenance, launches=known[key].launches, provider=key[1])
            for key, total_ms in sorted(totals.items(), key=lambda item: -item[1])),
        types_without_predictor=estimated, dims=record.dims, static=record.static, batch=record.batch,
        items_per_second=record.batch / latency * 1e3 if record.batch and latency else None,
        memory=memory, peak_memory_mib=memory.peak_mib, device_memory_mib=there_mib,
        fits_memory=None if there_mib is None else memory.least_mib <= there_mib,
        warnings=(*warnings, *memory_warnings(memory.least_mib, there_mib)),
    )


class Composed(NamedTuple):
    """A model's time on an otherwise idle device, and the longest path where the composition uses it; ms."""

    latency_ms: float
    critical_path_ms: float | None


def _composed(record: ModelRecord, known: Mapping[Placed, KnownKernel], used: Composition, costs: PipelineCosts | None,
              way: WayOfRunning) -> Composed:
    """A model's time from its kernels'. On a GPU it is no shorter than what the GPU itself has to do."""
    nodes = [known[key] for key in placed_kernels(record)]
    kernel_sum_ms, critical_path_ms = sum(
        node.runs * found.latency_ms for node, found in zip(record.nodes, nodes, strict=True)), None
    if used.kind == "pipeline" and costs is not None:
        latency = max(_record_ms(record, known, costs),
                      sum(node.runs * found.gpu_ms for node, found in zip(record.nodes, nodes, strict=True)))
    else:
        if used.kind == "critical_path":
            from graph_model.dag.dag import build_dag, calculate_latency

            by_node = {node.name: node.runs * found.latency_ms for node, found in zip(record.nodes, nodes, strict=True)}
            critical_path_ms = calculate_latency(build_dag(record), by_node, "critical_path")
        base_ms = kernel_sum_ms if critical_path_ms is None else critical_path_ms
        latency = float(latency_ms(used, base_ms, working_nodes(record)))
    if way.io == "host" and used.host_io:
        latency += host_io_ms(used.host_io, copied_mib(record))
    return Composed(latency, critical_path_ms)


def _moved(record: ModelRecord, known: Mapping[Placed, KnownKernel], used: Composition, costs: PipelineCosts | None,
           way: WayOfRunning, latency: float, marking_only: bool) -> Span:
    """By what factors a latency moves when all doubtful kernels are at the low, or at the high end of their plausible times."""
    low, high = (_composed(record, {key: kernel.at(end, marking_only) for key, kernel in known.items()}, used, costs, way)
                 for end in ("low", "high"))
    return Span(low.latency_ms / latency, high.latency_ms / latency) if latency else CERTAIN


def _hosts_span(record: ModelRecord, known: Mapping[Placed, KnownKernel], used: Composition, costs: PipelineCosts | None,
                way: WayOfRunning, latency: float, pace: HostPace) -> Span:
    """By what factors a latency moves beside a faster host and beside a slower one than the one it is predicted for. Constants
    that were fitted on no model of this machine are so far off already that hosts are among what their range holds."""
    if costs is None or not latency or used.assumed:
        return CERTAIN
    found = [_composed(record, known, used, costs.at_pace(end), way).latency_ms for end in hosts_between(pace.ratio)]
    return Span(min(found) / latency, max(found) / latency)


def _trips_span(record: ModelRecord, known: Mapping[Placed, KnownKernel], used: Composition,
                costs: PipelineCosts | None, way: WayOfRunning, latency: float) -> Span:
    """By what factors a latency moves where bodies whose number of runs is a guess run as rarely, or as often, as they may."""
    if not record.guessed or not latency:
        return CERTAIN
    low, high = (_composed(at_guess(record, end), known, used, costs, way).latency_ms for end in ("low", "high"))
    return Span(low / latency, high / latency)


def _guessed_warnings(record: ModelRecord) -> list[str]:
    """What to know about bodies whose number of runs is a guess."""
    warnings = []
    for name, guess in record.guessed.items():
        if guess.taken.isdigit() and guess.high == 1.0:
            warnings.append(f"{name} may end before its {guess.taken} trips, by what its body computes; all are counted: say "
                            f"how many with --dim {name}.trips=N")
        elif guess.taken.isdigit():
            warnings.append(f"how often {name} runs its body can't be known; {guess.taken} trips are taken, a guess: say how "
                            f"many with --dim {name}.trips=N")
        else:
            other = "else" if guess.taken == "then" else "then"
            warnings.append(f"which branch {name} takes can't be known; the more expensive one, {guess.taken}, is counted: "
                            f"say otherwise with --branch {name}={other}")
    return warnings


def _assumed_warning(record: ModelRecord) -> tuple[str, ...]:
    """What to know about sizes that depend on data and were taken to be the largest possible; nothing where there are none."""
    if not record.assumed:
        return ()
    tensor, shape = next(iter(record.assumed.items()))
    sizes = "×".join(map(str, shape))
    return (f"sizes that depend on data are taken to be the largest possible, so the latency is an upper estimate: tensor "
            f"{tensor} is {sizes}{f', and {len(record.assumed) - 1} more' * (len(record.assumed) > 1)}; say how large with "
            f"--dim {tensor}.<axis>=SIZE",)


def _uncounted(record: ModelRecord) -> list[str]:
    """The nodes that hold graphs of their own whose nodes are not in the record: in one of an older Hase Loops, Ifs, too."""
    held = {node.inside for node in record.nodes}
    return [node.name for node in record.nodes if record.kernel_of(node).subgraphs and node.name not in held]


def _uncounted_warning(record: ModelRecord) -> tuple[str, ...]:
    """What to know about graphs within nodes; nothing where there are none."""
    names = _uncounted(record)
    return (f"rough estimate: {len(names)} of its nodes hold graphs of their own ({', '.join(names[:3])}"
            f"{' …' if len(names) > 3 else ''}), and what runs in them is not counted: it takes longer than predicted",
            ) if names else ()


def _capture_warning(record: ModelRecord, way: WayOfRunning) -> tuple[str, ...]:
    """What to know about a model that is to be captured as a CUDA graph; nothing where all of it runs on the GPU.

    Raises:
        UserError: ONNX Runtime can't capture it.
    """
    if not way.cuda_graph:
        return ()
    if (obstacle := capture_obstacle(record)) is not None:
        raise UserError(f"{record.model}: ONNX Runtime can't capture it as a CUDA graph: {obstacle}; predict it without "
                        "--cuda-graph")
    on_cpu = [node.name for node in record.nodes if node.provider == "cpu"]
    return (f"{len(on_cpu)} of its nodes work out sizes on the CPU ({', '.join(on_cpu[:2])}{' …' if len(on_cpu) > 2 else ''}): "
            "a captured graph keeps the sizes of the run that was captured",) if on_cpu else ()


def _range_warning(record: ModelRecord, known: Mapping[Placed, KnownKernel]) -> tuple[str, ...]:
    """What to know about a model's kernels that are smaller or larger than any measured; nothing where there are none."""
    counts = runs_of_kernels(record)
    found = [key for key in counts if (doubt := known[key].doubt) is not None and doubt.reason == "beyond"]
    if not found:
        return ()
    part, total = (sum(counts[key] * known[key].latency_ms for key in keys) for keys in (found, counts))
    named = ", ".join(name for name, _ in found[:2]) + (" …" if len(found) > 2 else "")
    return (f"{len(found)} of its kernels, {part / total if total else 0.0:.1%} of the kernel time, are beyond what was "
            f"measured in some size, and less sure: {named}",)


def _nodes_run(record: ModelRecord, known: Mapping[Placed, KnownKernel], cut: int) -> list[KnownKernel]:
    """The kernel of each node that runs, in order; see `run_order`."""
    nodes = [known[key] for key in placed_kernels(record)]
    return nodes if cut == 1 and not holds_bodies(record) else [nodes[place] for place in run_order(record, cut)]


def _record_ms(record: ModelRecord, known: Mapping[Placed, KnownKernel], costs: PipelineCosts) -> float:
    """The latency of host and GPU as two tracks. Where loops are too long to be followed node by node, it is extrapolated from
    two shorter ones: each trip takes as long as the one before."""
    cut = shortest_cut(record)
    latency = _pipeline_ms(_nodes_run(record, known, cut), costs)
    if cut == 1:
        return latency
    every, some, fewer = (runs_in_order(record, times) for times in (1, cut, 2 * cut))
    if some == fewer:
        return latency * every / some
    shorter = _pipeline_ms(_nodes_run(record, known, 2 * cut), costs)
    return latency + (latency - shorter) * (every - some) / (some - fewer)


def _pipeline_ms(nodes: Sequence[KnownKernel], costs: PipelineCosts) -> float:
    """The latency of host and GPU as two tracks; `nodes`: the kernel of each, in order."""
    off_gpu = any(node.on_host or node.waits for node in nodes)
    return pipeline_ms(_tracks(nodes), costs, OffGpu(
        np.array([node.latency_ms if node.on_host else 0.0 for node in nodes]),
        np.array([node.waits for node in nodes], dtype=bool)) if off_gpu else None)


def _tracks(nodes: Sequence[KnownKernel]) -> Tracks:
    """Each node's time on the GPU (ms), its launches, and its kind."""
    return Tracks(np.array([node.gpu_ms for node in nodes]), np.array([node.launches for node in nodes]),
                  np.array([node.kind for node in nodes], dtype=int))


def _sum_latency_ms(used: Composition, kernel_sum_ms: float) -> float | None:
    """α·Σ+β with the α and β that were fitted for the sum; None where none were."""
    fits = [used] if used.kind == "sum" else [c for c in used.candidates if (c.label, c.kind) == (used.label, "sum")]
    return fits[0].alpha * kernel_sum_ms + fits[0].beta_ms if fits else None
