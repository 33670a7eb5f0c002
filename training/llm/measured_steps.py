"""The measured steps of language models: with their tracks, the host's pace that they had, and their energy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hase.graph_model.simulation.pipeline import Tracks, node_kind
from hase.learned.composition.intervals import KNOWN, Novelty
from hase.learned.energy import Part
from hase.learned.kernels.predictors import Predictors
from hase.learned.kernels.settings import LAUNCHES
from hase.records.attention import OPERATOR
from hase.records.generations import (
    PHASES,
    Generation,
    Phase,
    StepEnergy,
    measured_models,
    measured_points,
    step_record_file,
)
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import GPU_LABEL
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

RECORD = "python recipes/llm/record_steps.py"
QUIET_SHARE = 0.4  # of the tokens: those with the fastest readings of the host's probe count


@dataclass(frozen=True)
class MeasuredStep:
    """The first step of requests of one size, or their further tokens.

    Attributes:
        point: what was measured.
        phase: which step.
        tracks: of its run, with predicted times of kernels.
        parts: the kernels of the run that the device runs.
        novelties: how they differ from those that were learned from, by id; those that do not differ are left out.
        words, layers: logits for each sequence, and layers with a cache.
        measured_ms: its median time.
        pace: how many times as long as usual the host took meanwhile, a ratio.
        counted: whether errors are counted; else it is only fitted to.
    """

    point: Generation
    phase: Phase
    tracks: Tracks
    parts: tuple[Part, ...]
    novelties: Mapping[str, Novelty]
    words: int
    layers: int
    measured_ms: float
    pace: float
    counted: bool = True

    @property
    def paced(self) -> bool:
        """Whether the host's pace was read during the step, and not only before and after all of its point."""
        return bool(self.point.first_probe_us if self.phase == "first" else self.point.token_probe_us)

    @property
    def energy(self) -> StepEnergy | None:
        return self.point.first_energy if self.phase == "first" else self.point.token_energy


def step_time(point: Generation, phase: Phase) -> tuple[float, float | None]:
    """The median time of a step in ms, and what the host's probe took meanwhile, in µs; of tokens, those count during which the
    host was fastest, where that is known. A CPU has no such probe (None)."""
    before_and_after_us = median(point.probe_us) if point.probe_us else None
    if phase == "first":
        middle = sorted(range(len(point.first_ms)), key=point.first_ms.__getitem__)[len(point.first_ms) // 2]
        return point.first_ms[middle], point.first_probe_us[middle] if point.first_probe_us else before_and_after_us
    times = np.concatenate([np.array(tokens) for tokens in point.token_ms])
    if not point.token_probe_us:
        return float(np.median(times)), before_and_after_us
    probes = np.concatenate([np.array(readings) for readings in point.token_probe_us])
    quiet = probes <= np.quantile(probes, QUIET_SHARE)
    return float(np.median(times[quiet])), float(np.median(probes[quiet]))


def measured_steps(workspace: Workspace, predictors: Predictors, usual_us: float, counted: bool = True,
                   captured: bool = False) -> list[MeasuredStep]:
    """The steps that were measured in a workspace, of models whose tokens run as usual; or, with `captured`, the tokens of
    those that run them as a CUDA graph.

    Args:
        workspace: with `llm/measured` and `llm/records`.
        predictors: of the target; all kernels are predicted, since none of a language model counts as known.
        usual_us: what the host's probe takes at the usual pace.
        counted: as in `MeasuredStep`.
        captured: of which models.

    Raises:
        UserError: nothing was measured, or a record is missing.
    """
    found = list(_recorded(workspace, captured))
    if not found:
        raise UserError(f"{workspace.root}: no generation was measured; do: python recipes/llm/measure_genai.py")
    kernels = {kernel.id: kernel for _, _, record in found for kernel in record.kernels.values()}
    times, launches = (dict(zip(kernels, predictors.predict(list(kernels.values()), {}, label, strict=True).latency_ms,
                                strict=True)) for label in (GPU_LABEL, LAUNCHES))
    novelties = _novelties(list(kernels.values()), predictors)
    steps = []
    for point, phase, record in found:
        measured_ms, probe_us = step_time(point, phase)
        tracks, parts = _run(record, times, launches)
        words = max(tensor.shape[-1] for name, tensor in record.outputs.items() if "logits" in name)
        steps.append(MeasuredStep(
            point, phase, tracks, parts, novelties, words,
            layers=sum(record.kernel_of(node).op_type == OPERATOR for node in record.nodes), measured_ms=measured_ms,
            pace=1.0 if probe_us is None else probe_us / usual_us, counted=counted))
    return steps


def _recorded(workspace: Workspace, captured: bool) -> Iterator[tuple[Generation, Phase, ModelRecord]]:
    """Points that were measured, with the record of each phase.

    Raises:
        UserError: a record is missing.
    """
    for name in measured_models(workspace):
        for point in measured_points(workspace, name):
            if point.captured != captured:
                continue
            for phase in PHASES[1:] if captured else PHASES:
                path = step_record_file(workspace, point, phase)
                if not path.is_file():
                    raise UserError(f"{path}: missing; make it with: {RECORD} --workspace {workspace.root}")
                yield point, phase, read_model_record(path)


def _novelties(kernels: Sequence[Kernel], predictors: Predictors) -> dict[str, Novelty]:
    """How kernels differ from those of the training, as a prediction sees it; all their operators were measured."""
    beyond, doubts = predictors.beyond_range(kernels), predictors.doubts([kernel for kernel in kernels if kernel.moves_data])
    return {name: (Novelty("beyond", beyond[name]) if name in beyond else KNOWN)._replace(doubt=doubts.get(name, 0.0))
            for name in beyond.keys() | doubts.keys()}


def _run(record: ModelRecord, times: Mapping[str, float], launches: Mapping[str, float]) -> tuple[Tracks, tuple[Part, ...]]:
    """The tracks of a run, and the kernels that the GPU runs. The few nodes of the CPU provider only cost their dispatch."""
    gpu_ms, counts, kinds, parts = list[float](), list[float](), list[int](), list[Part]()
    for node in record.nodes:
        kernel, on_gpu = record.kernel_of(node), node.provider == "cuda"
        gpu_ms.append(times[kernel.id] if on_gpu else 0.0)
        counts.append(launches[kernel.id] if on_gpu else 0.0)
        kinds.append(int(node_kind(kernel, on_gpu)))
        if on_gpu:
            parts.append(Part(kernel, node.runs, gpu_ms[-1], counts[-1]))
    return Tracks(np.array(gpu_ms), np.array(counts), np.array(kinds)), tuple(parts)


def families(steps: Iterable[MeasuredStep]) -> list[str]:
    """The families whose errors are counted, sorted."""
    return sorted({step.point.family for step in steps if step.counted})


def without(steps: Sequence[MeasuredStep], family: str) -> list[MeasuredStep]:
    """The steps of all other families."""
    return [step for step in steps if step.point.family != family]
