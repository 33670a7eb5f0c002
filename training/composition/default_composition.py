"""What predicts on a machine of which nothing was learned: look-ups, a guessed roofline, and a composition of stated constants.

With them a model can be answered as soon as its own kernels were measured (`predict_model_latency.py --measure-missing`). The
first training and fit in the same workspace replace them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from benchmark.records.labels import GPU_LABEL, UNPROFILED
from graph_model.simulation.pipeline import PipelineCosts
from training.composition.fitted import Composition, composition_path
from training.kernels.estimators import LEAST_LAUNCHES
from training.kernels.features import KERNEL_FEATURES
from training.kernels.measured_times import MeasuredTimes
from training.kernels.predictors import Predictors
from training.kernels.roofline import Roofline
from training.kernels.saving import write_measured
from training.kernels.settings import LAUNCHES
from training.kernels.sidecar import LabelPredictors, Sidecar, installed_packages, schema_fields, write_sidecar
from utils import files
from utils.errors import UserError
from utils.fingerprint import Target, machine
from utils.paths import SHIPPED

CPU_LABEL = UNPROFILED  # on a CPU: what the kernels take in the model itself, added up
# What a CPU or a GPU of a usual kind reaches: a guess, for kernels of other models and those that could not be measured.
ROOFLINES = {"cpu": Roofline(flops_per_ms=5e7, bytes_per_ms=1e7, floor_ms=0.003, scale=1.0),
             "cuda": Roofline(flops_per_ms=2e10, bytes_per_ms=1e9, floor_ms=0.002, scale=1.0)}
DTYPES = ("float16", "bfloat16", "float32", "float64")  # nothing was trained, so none is strange
NO_RANGE = (-1e300, 1e300)


def default_composition(device: str) -> Composition:
    """The composition for `cpu` or `cuda` that is fitted to nothing of this machine.

    On a GPU the costs of a run are those of the GPU whose predictors come with Hase: a guess for any other one.

    Raises:
        UserError: no GPU's composition comes with Hase.
    """
    on_gpu = device == "cuda"
    return Composition(
        label=GPU_LABEL if on_gpu else CPU_LABEL, kind="pipeline" if on_gpu else "sum", alpha=1.0, beta_ms=0.0,
        costs=shipped_costs() if on_gpu else None, left_out="nothing",
        dataset_sha256="", models_sha256="", predictors_created="", candidates=(), models=(), assumed=True)


def shipped_costs() -> PipelineCosts:
    """What a run costs on the two tracks of the GPU that comes with Hase; errors as of `default_composition`."""
    for path in sorted(SHIPPED.glob(f"*/{composition_path(Path()).name}")):
        if costs := files.read_json(path).get("costs"):
            return PipelineCosts.model_validate(costs)
    raise UserError(f"{SHIPPED}: no composition of a GPU; measure and train on this machine instead")


def untrained(folder: Path, target: Target) -> Predictors:
    """Predictors of `target`, which this machine is, that know nothing yet; nothing is written."""
    device = target.flavour.device
    rooflines = {GPU_LABEL: ROOFLINES["cuda"], LAUNCHES: LEAST_LAUNCHES} if device == "cuda" else {
        CPU_LABEL: ROOFLINES["cpu"]}
    sidecar = Sidecar(
        target=target, created=datetime.now(UTC).isoformat(timespec="seconds"), dataset_sha256="",
        packages=installed_packages(), **schema_fields(KERNEL_FEATURES), metrics=(), idle_load={}, load_range={}, loaded_rows=0,
        dtypes=DTYPES, held_out=(), config={}, machines=(machine(device),),
        feature_range=(NO_RANGE,) * len(KERNEL_FEATURES.names), measured="nothing",
        measured_sha256="", labels={
            label: LabelPredictors(file=None, sha256="", roofline=roofline, type_codes={}, predictor_of={}, errors=())
            for label, roofline in rooflines.items()})
    return Predictors(folder, sidecar, MeasuredTimes(MeasuredTimes.text({})), {})


def save_default(folder: Path, predictors: Predictors) -> None:
    """Writes predictors that know nothing yet, and the default composition; what is measured is added to them."""
    device = predictors.sidecar.target.flavour.device
    files.write_json(composition_path(folder), default_composition(device))
    name, digest = write_measured(folder, {})
    write_sidecar(folder, predictors.sidecar.model_copy(update={"measured": name, "measured_sha256": digest}))
