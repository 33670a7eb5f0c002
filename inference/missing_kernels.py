"""Measures the kernels of a model that never were, on a machine that is the target, so that its latency rests on them.

The collector measures them and writes the target's dataset; then they are looked up with what was learned before, which holds
as it did. The next training learns from them too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.dataset import DatasetKernel
from inference.sources import Source, record_of
from inference.targets import Fitted, check_fit, fitted_for, local_targets
from ort_analysis.records import Kernel, ModelRecord
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.paths import ROOT, Workspace

if TYPE_CHECKING:
    from benchmark.collector_config import CollectorConfig
    from benchmark.crew import Crew
    from training.composition import Composition

log = get_logger("predict")
CONFIG = ROOT / "benchmark" / "config.yaml"


@dataclass(frozen=True)
class Filled:
    """What was measured for a prediction.

    Attributes:
        measured: number of kernels that were measured now, well or not.
        measuring_s: that this took, in seconds.
        seconds: the same with building them, waiting for the processes that measure, and noting it all down.
        left: ids of the kernels that have no measured time nonetheless.
    """

    measured: int
    measuring_s: float
    seconds: float
    left: tuple[str, ...]


def looked_up(composition: Composition) -> tuple[str, ...]:
    """What a composition looks up of each kernel: its label, and in a pipeline the launches too."""
    from training.predictor_files import ON_GPU

    return ON_GPU if composition.kind == "pipeline" else (composition.label,)


def missing_kernels(fitted: Fitted, records: Sequence[ModelRecord]) -> dict[str, Kernel]:
    """The kernels of some models, by id, of which the target's composition has to predict something."""
    from training.predictor_files import leaves_gpu_idle

    measured = fitted.predictors.measured
    return {name: kernel for record in records for name, kernel in record.kernels.items()
            if any(label not in measured.get(name, {}) and not leaves_gpu_idle(kernel, label)
                   for label in looked_up(fitted.composition))}


def build(kernels: Mapping[str, Kernel], folder: Path) -> set[str]:
    """Builds the kernels that are not in `folder` yet; returns the ids of those that are there then."""
    from kernel_model.kernel_builder import kernel_build

    there = set()
    for name, kernel in kernels.items():
        if not (folder / f"{name}.onnx").exists():
            try:
                kernel_build(kernel, folder)
            except UserError as error:
                log.warning("%s", error)
                continue
        there.add(name)
    return there


def measure_missing(source: Source, sizes: Sequence[Mapping[str, int]] = ({},), *, target: str | None = None,
                    workspace: Workspace | None = None, config: CollectorConfig | None = None, force: bool = False) -> Filled:
    """Has the kernels of a model measured that no machine of the target has measured idle; `predict` then looks them up.

    Args:
        source: as `predict` takes it.
        sizes: of its dynamic dimensions by name, each combination that will be predicted.
        target: name of the target; by default as `predict` chooses it.
        workspace: the folder that holds dataset and predictors; by default the repository. Predictors that come with Hase are
            copied into it, and a dataset that is not there begins.
        config: how to measure; by default benchmark/config.yaml. Its device, levels and labels are not looked at, and where
            there is a dataset, that one's metrics and held-out families hold.
        force: as in `predict`.

    Raises:
        UserError: this machine is not the target, the model can't be used, or the dataset lacks the label that is needed.
    """
    from benchmark.collector_config import CollectorConfig
    from benchmark.crew import start_crew
    from utils.config import load_config

    workspace = workspace or Workspace()
    fitted = fitted_for(workspace, target)
    name, flavour = fitted.target.name, fitted.target.flavour
    if fitted.target not in local_targets():
        raise UserError(f"kernels of target {name} can be measured on such a machine alone, and this one is "
                        f"{' and '.join(own.name for own in local_targets())}; predict without --measure-missing, or there")
    config = (config or load_config(CONFIG, CollectorConfig)).model_copy(update={
        "device": flavour.execution_provider, "labels": (fitted.composition.label,)})
    with start_crew(config, flavour.execution_provider, config.labels) as crew:  # it gets ready while the model is analysed
        records = _records(source, sizes, fitted, workspace, force)
        missing = missing_kernels(fitted, records)
        if not missing:
            return Filled(0, 0.0, 0.0, ())
        began = time.monotonic()
        with sole_writer(workspace.kernel_onnx):
            built = build(missing, workspace.kernel_onnx / flavour.name)
        kernels = [DatasetKernel(kernel=kernel, models=tuple(record.model for record in records if kernel.id in record.kernels))
                   for kernel in missing.values() if kernel.id in built]
        measured, measuring_s = _measure(kernels, fitted, workspace, config, crew) if kernels else (0, 0.0)
    left = tuple(missing_kernels(fitted_for(workspace, name), records))
    return Filled(measured, measuring_s, time.monotonic() - began, left)


def _records(source: Source, sizes: Sequence[Mapping[str, int]], fitted: Fitted, workspace: Workspace,
             force: bool) -> list[ModelRecord]:
    """The model's record at each of some sizes, checked; errors as of `measure_missing`."""
    flavour = fitted.target.flavour
    model = workspace.find_model(Path(source)) if isinstance(source, (str, Path)) else source
    records = [record_of(model, flavour.execution_provider, dims) for dims in sizes]
    for record in records:
        check_fit(record, fitted.target, fitted.predictors.sidecar.dtypes, force)
        if record.flavour != flavour:
            raise UserError(f"{record.model}: the record is of a {record.flavour.name} graph, and kernels can be measured here "
                            f"for {flavour.name} alone; give the model file instead")
    return records


def _measure(kernels: Sequence[DatasetKernel], fitted: Fitted, workspace: Workspace, config: CollectorConfig,
             crew: Crew) -> tuple[int, float]:
    """Has built kernels measured and looked up; returns how many were measured, and the seconds that this took."""
    from benchmark.collector import collect_kernels
    from training.predictor_files import copy_predictors, renew_measured
    from training.training_set import measured_times

    name, folder = fitted.target.name, workspace.predictors(fitted.target.name)
    totals = collect_kernels(workspace, config, kernels, crew)
    with sole_writer(workspace.predictors("")):
        if fitted.predictors.folder != folder:
            log.warning("%s: what comes with Hase for %s is copied here and added to; a training in this workspace would "
                        "replace it by what its own dataset tells", folder, name)
            copy_predictors(fitted.predictors.folder, folder)
        renew_measured(folder, measured_times(workspace, name))
    return totals["measured_kernels"], totals["measuring_s"]
