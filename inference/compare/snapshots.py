"""Snapshots of predictions, which later states of the models are compared with (`hase gate`).

A snapshot is a small, sorted JSON file with a line for each kernel, so it can lie in a repository, and its changes can be read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from hase.graph_model.simulation.pipeline import HostCosts, Steps
from hase.inference.prediction.conditions import AS_USUAL, RunMode
from hase.inference.prediction.uncertainty import NORMAL_90
from hase.learned import target_files
from hase.learned.composition.differences import KernelCost, RunCosts
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.inference.prediction.kernels import Keyed
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.prediction.targets import Fitted
    from hase.inference.prediction.uncertainty import Span
    from hase.learned.data_sheet.ratios import SheetRange

SNAPSHOT_VERSION = 1
# The doubts of kernels on a CPU, by provenance, where none was learned. On two cores of an Intel Xeon, kernels timed alone were
# 18 % off what they take in a model, for caches; predictions of held-out ones were 20 % off.
ON_CPU = {"measured": 0.15, "predicted": 0.2, "estimated": 0.5}
LEAST_MS = 1e-6  # of a latency: a graph that only renames tensors takes none on a CPU, and ratios need one
DIGITS = 5  # significant digits that are kept of a number: fewer differ by rounding alone
MAKE = "hase gate --model … --write FILE"
_LIST = re.compile(r"\[\n([^\[\]{}]*)\]")  # of numbers and words


class ModelSnapshot(Frozen):
    """The prediction of a model at one size.

    Attributes:
        file, sizes: which it is; the sizes of dynamic dimensions by name.
        sha256: of the file, without weights in other files.
        latency_ms, interval_ms: as predicted.
        host_span: the factors to the latency with the fastest and with the slowest plausible host; 1 where the pace is known.
        peak_memory_mib: as predicted.
        rough_estimate: whether the prediction is marked as one.
        kernels: by id: type, runs, the time and the host's work of a run (ms), provenance and doubt (`KernelCost`).
    """

    file: str
    sizes: dict[str, int]
    sha256: str
    latency_ms: float
    interval_ms: tuple[float, float]
    host_span: tuple[float, float]
    peak_memory_mib: float
    rough_estimate: bool
    kernels: dict[str, KernelCost]

    @property
    def costs(self) -> RunCosts:
        """What `ratio_interval` needs."""
        return RunCosts(self.latency_ms, self.kernels, self.host_span)


class Conditions(Frozen):
    """What two snapshots must have in common to be compared.

    Attributes:
        target: that was predicted for.
        hase: the version of Hase.
        predictors: a digest of what was learned for the target.
        way: how the models are run.
        static, strict: as the options of these names.
        host_pace: how many times as long as usual the host takes; None: any plausible host.
    """

    target: str
    hase: str
    predictors: str
    way: RunMode = AS_USUAL
    static: bool = False
    strict: bool = False
    host_pace: float | None = None


class Snapshot(Frozen):
    """Predictions of some models under the same conditions; `models` by their file and sizes. Version 1 is the first."""

    version: int = SNAPSHOT_VERSION
    conditions: Conditions
    models: dict[str, ModelSnapshot]


def conditions_of(fitted: Fitted, way: RunMode, static: bool, strict: bool, host_pace: float | None) -> Conditions:
    """The conditions of predictions for a target."""
    folder = fitted.predictors.folder
    learned = [files.cached_sha256(path) for file in (target_files.PREDICTORS, target_files.COMPOSITION, target_files.HOST)
               if (path := file.path(folder)).is_file()]
    return Conditions(target=fitted.target.name, hase=hase_version(), predictors=files.content_digest(learned)[:16], way=way,
                      static=static, strict=strict, host_pace=host_pace)


def hase_version() -> str:
    """Hase's version; "" in a clone that was not installed, where `predictors` alone tells states apart."""
    try:
        return version("hase")
    except PackageNotFoundError:
        return ""


def name_in_snapshot(file: Path, sizes: Mapping[str, int]) -> str:
    """The name under which snapshots hold a model: its path from the current folder, and its sizes."""
    return " ".join([shown_path(file), *(f"{name}={size}" for name, size in sorted(sizes.items()))])


def shown_path(file: Path) -> str:
    """A path from the current folder, for a file below it."""
    return Path(os.path.relpath(file) if file.absolute().is_relative_to(Path.cwd()) else file).as_posix()


def model_snapshot(run: PredictedRun, file: Path, sizes: Mapping[str, int]) -> ModelSnapshot:
    """The snapshot of a predicted run."""
    prediction, costs = run.prediction, costs_of(run)
    return ModelSnapshot(
        file=shown_path(file), sizes=dict(sizes), sha256=files.cached_sha256(file), latency_ms=_rounded(costs.latency_ms),
        interval_ms=(_rounded(prediction.interval_ms[0]), _rounded(prediction.interval_ms[1])), host_span=costs.host_span,
        peak_memory_mib=_rounded(prediction.peak_memory_mib), rough_estimate=prediction.rough_estimate,
        kernels=dict(costs.kernels))


def costs_of(run: PredictedRun) -> RunCosts:
    """What a predicted run costs, kernel by kernel."""
    model, kernels = run.run, dict[str, KernelCost]()
    host_ms, of_card = _host_ms(run), _mean_error(run.fitted.sheet_range)
    for key, known in model.known.items():
        name = key[0] if key[0] not in kernels else f"{key[0]} on {key[1]}"
        doubt = max(known.doubt, _mean_error(known.uncertainty and known.uncertainty.time),
                    0.0 if host_ms else ON_CPU[known.provenance])
        kernels[name] = KernelCost(model.kernel(key).type, _rounded(model.counts[key]), _rounded(known.gpu_ms),
                                   _rounded(host_ms.get(key, 0.0)), known.provenance, _rounded(math.hypot(doubt, of_card)))
    span = model.batch.latencies.by_host.of_model(model.index)
    return RunCosts(max(run.alone_ms, LEAST_MS), kernels, (_rounded(span.low), _rounded(span.high)))


def _mean_error(span: Span | SheetRange | None) -> float:
    """The mean size of errors, as a logarithm, of which nine of ten are within a span of factors."""
    return math.log(span.high / span.low) / 2 / NORMAL_90 if span else 0.0


def _host_ms(run: PredictedRun) -> dict[Keyed, float]:
    """The host's work for a run of each kernel, ms; empty where the host is not simulated."""
    model = run.run
    if model.costs is None:
        return {}
    steps = Steps.of(model.tracks, HostCosts.at(model.costs), model.off_gpu)
    work_ms: dict[Keyed, list[float]] = {}
    for place, node_ms in zip(model.order, (steps.before_ms + steps.busy_ms)[0].tolist(), strict=True):
        work_ms.setdefault(model.structure.keys[place], []).append(node_ms)
    return {key: math.fsum(of_nodes) / len(of_nodes) for key, of_nodes in work_ms.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot, sorted and with a line for each kernel."""
    document = files.with_digest(snapshot.model_dump(mode="json"))
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False)
    files.write_text(path, _LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")


def read_snapshot(path: Path) -> Snapshot:
    """Reads a snapshot. Raises UserError: it is missing, damaged, or of another version of the format."""
    return files.read_record(path, Snapshot, SNAPSHOT_VERSION, MAKE)


def check_alike(baseline: Conditions, now: Conditions, path: Path) -> None:
    """Raises UserError unless two snapshots were made under the same conditions; `path`: the baseline's file."""
    if baseline.target != now.target:
        raise UserError(f"{path}: made for {baseline.target}, and this is for {now.target}; give that target, or make a "
                        f"baseline for this one: {MAKE}")
    if (baseline.hase, baseline.predictors) != (now.hase, now.predictors):
        raise UserError(f"{path}: made by another Hase or with other predictors ({baseline.hase or 'a clone'}, now "
                        f"{now.hase or 'a clone'}), so times may differ although no model does; make it again from the same "
                        f"models: {MAKE}")
    before, after = (conditions.model_dump() for conditions in (baseline, now))
    if differing := [name for name in before if before[name] != after[name]]:
        raise UserError(f"{path}: made with other options ({', '.join(differing)}); give the same ones, or make it again: "
                        f"{MAKE}")
