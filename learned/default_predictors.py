"""Default predictors for a machine without training: measured times, a guessed roofline, default constants of composition.

They can predict a model as soon as its own kernels have been measured (`predict_model_latency.py --measure-missing`). The first
training and fit in the same workspace replace them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.learned import target_files
from hase.learned.composition.fitted import Composition
from hase.learned.kernels.estimators import LEAST_LAUNCHES, KernelModel, Roofline
from hase.learned.kernels.features import KERNEL_FEATURES
from hase.learned.kernels.measured import MeasuredTimes, write_measured
from hase.learned.kernels.predictors import Predictors
from hase.learned.kernels.saved_form import save_estimator
from hase.learned.kernels.sidecar import LabelPredictors, Sidecar, installed_packages, write_sidecar
from hase.records.measurement import GPU_LABEL, LAUNCHES, UNPROFILED
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target, machine
from hase.utils.paths import SHIPPED

CPU_LABEL = UNPROFILED  # a kernel's time in the model itself
# Guesses for an ordinary CPU and GPU; they serve kernels of other models, and those that could not be measured.
ROOFLINES = {"cpu": Roofline(flops_per_ms=5e7, bytes_per_ms=1e7, floor_ms=0.003, scale=1.0),
             "cuda": Roofline(flops_per_ms=2e10, bytes_per_ms=1e9, floor_ms=0.002, scale=1.0)}
DTYPES = ("float16", "bfloat16", "float32", "float64")  # all, since without training none is beyond it


def default_composition(device: str) -> Composition:
    """The composition for `cpu` or `cuda` without measurements of this machine. On a GPU, the costs of a run are those of the
    shipped one, which is a guess."""
    on_gpu = device == "cuda"
    return Composition(
        label=GPU_LABEL if on_gpu else CPU_LABEL, kind="pipeline" if on_gpu else "sum", alpha=1.0, beta_ms=0.0,
        costs=shipped_costs() if on_gpu else None, left_out="nothing",
        dataset_sha256="", models_sha256="", predictors_created="", candidates=(), models=(), assumed=True)


def shipped_costs() -> PipelineCosts:
    """The host's costs of a run on the GPU whose predictors come with Hase."""
    for path in sorted(SHIPPED.glob(f"*/{target_files.COMPOSITION.name}")):
        if costs := files.read_json(path).get("costs"):
            return PipelineCosts.model_validate(costs)
    raise UserError(f"{SHIPPED}: no composition of a GPU; measure and train on this machine instead")


def untrained(folder: Path, target: Target) -> Predictors:
    """Predictors of this machine before anything was measured. Writes nothing."""
    device = target.flavour.device
    rooflines = ({GPU_LABEL: ROOFLINES["cuda"], LAUNCHES: LEAST_LAUNCHES} if device == "cuda" else
                 {CPU_LABEL: ROOFLINES["cpu"]})
    labels = {label: LabelPredictors(**dict(save_estimator(folder, label, KernelModel(roofline=roofline))))
              for label, roofline in rooflines.items()}
    sidecar = Sidecar(
        target=target, created=datetime.now(UTC).isoformat(timespec="seconds"), dataset_sha256="",
        packages=installed_packages(), metrics=(), idle_load={}, load_range={}, loaded_rows=0, dtypes=DTYPES, held_out=(),
        config={}, machines=(machine(device),), feature_range=((-1e300, 1e300),) * len(KERNEL_FEATURES.names),  # no limits
        measured="nothing", measured_sha256="", labels=labels)
    return Predictors(folder, sidecar, MeasuredTimes(MeasuredTimes.text({})))


def save_default(folder: Path, predictors: Predictors) -> None:
    """Writes predictors without measurements, and the default composition. Measured times are added later."""
    device = predictors.sidecar.target.flavour.device
    files.write_json(target_files.COMPOSITION.path(folder), default_composition(device))
    name, digest = write_measured(folder, {})
    write_sidecar(folder, predictors.sidecar.model_copy(update={"measured": name, "measured_sha256": digest}))
