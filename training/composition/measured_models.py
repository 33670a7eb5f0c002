"""The measured models to which a composition is fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hase.graph_model.simulation.pipeline import OffGpu, Tracks, node_kind
from hase.learned.composition.cuda_nodes import box_selection_launches, box_selection_ms, is_box_selection
from hase.learned.composition.host_side import NodesOffGpu, read_host_side
from hase.learned.kernels.predictors import ON_GPU
from hase.learned.kernels.sidecar import Sidecar
from hase.records.dataset_files import model_table_path
from hase.records.dataset_tables import read_model_table
from hase.records.host_pace import idle_models
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import REMAKE, ModelRecord
from hase.records.kernel_record_files import read_model_record, record_path
from hase.records.measurement import COLLECT, Label
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

log = get_logger("composition")
PROFILED: tuple[Label, Label] = ("kernel_time", "node_span")
LEAST_OVERLAP = 1.05  # ratio of kernel times to spans; models on a CPU, which runs nodes one by one, have 0.74 to 0.99


@dataclass(frozen=True)
class MeasuredModel:
    """A model that was measured as a whole; unknown times are NaN.

    Attributes:
        latency_ms: idle, with tensors on the device.
        host_io_ms, cuda_graph_ms: with numpy arrays in and out, and as a CUDA graph.
        pace: the host's time as a multiple of its usual time.
        off_gpu: its nodes that are not GPU kernels; None if there are none, and on a CPU.
    """

    record: ModelRecord
    group: str
    latency_ms: float
    host_ms: float = math.nan
    host_io_ms: float = math.nan
    cuda_graph_ms: float = math.nan
    pace: float = 1.0
    off_gpu: NodesOffGpu | None = None

    @property
    def collection(self) -> str:
        """Where its architecture comes from; "" if unknown."""
        return self.record.collection


@dataclass(frozen=True)
class MeasuredTracks:
    """A measured model as two tracks, host and GPU; `host_ms` is NaN if unknown, `off_gpu` None if all nodes run on the GPU."""

    tracks: Tracks
    host_ms: float
    latency_ms: float
    pace: float = 1.0
    off_gpu: OffGpu | None = None


def measured_models(workspace: Workspace, target: str, sidecar: Sidecar, for_judging: bool = False) -> list[MeasuredModel]:
    """The models to which a composition may be fitted: measured idle, with a record, of no held-out family, without bodies.
    `for_judging` adds those with Loop, If and Scan, and those measured on a disturbed host, with its pace."""
    models = []
    host = read_host_side(workspace.predictors(target)) if sidecar.target.flavour.device == "cuda" else None
    for name, times in idle_models(read_model_table(workspace, target), for_judging).iterrows():
        path = record_path(workspace, sidecar.target.flavour, str(name))
        if not path.is_file():
            log.warning("%s: not used, since it has no record (%s); make one with: %s", name, path, REMAKE)
            continue
        record = read_model_record(path)
        if record.group in sidecar.held_out:
            continue
        bodies = any(is_control_flow(kernel) for kernel in record.kernels.values())
        if bodies and not for_judging:
            log.info("%s: not used, since it has Loop, If or Scan, whose own costs are constants and not fitted", name)
            continue
        latency_ms, host_ms, host_io_ms, cuda_graph_ms, pace = (float(times[column]) for column in (
            "median_ms", "host_ms", "host_io_ms", "cuda_graph_ms", "pace"))
        models.append(MeasuredModel(record, record.group, latency_ms, host_ms, host_io_ms, cuda_graph_ms, pace,
                                    host.off_gpu(record) if host and not bodies else None))
    if not models:
        raise UserError(f"{target}: no model with an idle latency, to which a composition could be fitted; measure models: "
                        f"{COLLECT}")
    return models


def left_out_groups(models: Sequence[MeasuredModel]) -> tuple[Literal["family", "model", "nothing"], list[str]]:
    """The kind of the groups to hold out, and each model's group: its family, or itself if there is one family."""
    if len({model.group for model in models}) > 1:
        return "family", [model.group for model in models]
    return ("model" if len(models) > 1 else "nothing"), [model.record.model for model in models]


TimesOfModels = Mapping[str, Mapping[str, float]]  # by model and kernel id


def known_times(out_of_fold: Mapping[str, TimesOfModels], measured: TimesOfModels) -> dict[str, TimesOfModels]:
    """Times by label, model and kernel id: measured ones, else those out of fold; no work on the GPU stays zero."""
    return {label: {model: {name: measured.get(name, {}).get(label, time) if time else time for name, time in times.items()}
                    for model, times in models.items()} for label, models in out_of_fold.items()}


def model_tracks(model: MeasuredModel, gpu_ms: Mapping[str, float], launches: Mapping[str, float]) -> MeasuredTracks:
    """A model's two tracks, from the GPU times (ms) and launches of its kernels by id."""
    kernels = [model.record.kernel_of(node) for node in model.record.nodes]
    times_ms = np.array([box_selection_ms(kernel) if is_box_selection(kernel) else gpu_ms[kernel.id] for kernel in kernels])
    counts = np.array([box_selection_launches(kernel) if is_box_selection(kernel) else launches[kernel.id]
                       for kernel in kernels])
    is_off = [False] * len(kernels)
    if (off := model.off_gpu) is not None:
        is_off = off.off.tolist()
        times_ms, counts = np.where(off.off, off.gpu_ms, times_ms), np.where(off.off, off.launches, counts)
    kinds = [node_kind(kernel, on_gpu=not node_is_off) for kernel, node_is_off in zip(kernels, is_off, strict=True)]
    return MeasuredTracks(Tracks(times_ms, counts, np.array(kinds, dtype=int)), host_ms=model.host_ms,
                          latency_ms=model.latency_ms, pace=model.pace, off_gpu=None if off is None else off.run)


def tracks_of(models: Sequence[MeasuredModel], times: Mapping[str, TimesOfModels]) -> list[MeasuredTracks]:
    """The two tracks of each model. `times` are its kernels' times and launches, by label, model and kernel id."""
    return [model_tracks(model, *(times[label][model.record.model] for label in ON_GPU)) for model in models]


def kernels_overlap(models: Sequence[MeasuredModel], measured: TimesOfModels) -> bool:
    """Whether the profile of some model shows that its kernels overlap; False without the labels PROFILED. A profile has the
    time of each node (`kernel_time`) and the time until the next node starts (`node_span`). If nodes run one after another, as
    in ONNX Runtime's default execution (on a CPU and in a CUDA stream), none takes longer than its span, so the times add up to
    no more than the spans."""
    for model in models:
        profiled = [times for node in model.record.nodes if (times := measured.get(node.kernel_id, {})).keys() >= set(PROFILED)]
        time_ms, span_ms = (sum(times[label] for times in profiled) for label in PROFILED)
        if time_ms > LEAST_OVERLAP * span_ms:
            return True
    return False


def models_sha256(workspace: Workspace, target: str) -> str:
    """The SHA-256 of a target's table of model latencies."""
    return files.sha256(model_table_path(workspace.dataset(target)))
