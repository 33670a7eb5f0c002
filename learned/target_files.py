"""The files of a target: everything that was learned for it, with the class, the writer and the readers of each.

They are in `training/predictors/<target>/` of a workspace, or in `learned/shipped/<target>/`. The JSON files are those below.
They name further files, whose names contain a part of their SHA-256:

- `<label>-<hash>.npz`, `doubt-<hash>.npz`: the boosters of a label, and those of its errors (`predictors.json`).
- `measured-<hash>.json.gz`: idle times by kernel and label, for look-up (`predictors.json`). Also rewritten without a training,
  after kernels were measured for one model.
- `estimator_<name>-<hash>.npz`: of admitted estimators (`estimators.json`).
- `mps_width-<hash>.npz`: how wide kernels are (`mps.json`).
- `host/`: a folder like this one for the CPU of a machine with that GPU, for kernels that a CUDA session runs on its CPU
  provider. Written by fit_host.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from pydantic import BaseModel

from hase.utils import files, paths
from hase.utils.errors import UserError

if TYPE_CHECKING:
    from hase.learned.composition.fitted import Composition
    from hase.learned.composition.host_side import CopyCosts
    from hase.learned.energy import EnergyModel
    from hase.learned.kernels.admitted import AdmittedFile
    from hase.learned.kernels.sidecar import Sidecar
    from hase.learned.kernels.uncertainty import Uncertainty
    from hase.learned.llm import LearnedGeneration
    from hase.learned.sharing import MpsSharing, ServingHost, Sharing

Record = TypeVar("Record", bound=BaseModel)
TRAIN = "python training/train_kernel_model.py"
TRAIN_AGAIN = f"train again: {TRAIN}"
FIT_COMPOSITION, FIT_HOST = "python training/fit_composition.py", "python training/fit_host.py"
FIT_SHARING, FIT_MPS, FIT_SERVING = (f"python training/fit_{what}.py" for what in ("sharing", "mps", "serving"))
FIT_ENERGY, FIT_GENERATION = "python training/fit_energy.py", "python training/fit_generation.py"
CHECK_ESTIMATOR = "python training/check_estimator.py"
MEASURE_ENERGY = "energy_s: 3 in the collector's config"


@dataclass(frozen=True)
class LearnedFile(Generic[Record]):
    """A target's versioned JSON file; `holds` is its class, as `module:name` in `hase.learned`, imported at the first read.
    Errors name `writer`, the command that writes it, or say `absent`."""

    name: str
    holds: str
    writer: str
    readers: str
    absent: str = ""

    def path(self, folder: Path) -> Path:
        return folder / self.name

    def read(self, folder: Path) -> Record | None:
        """Reads the file in a target's folder; None if it is missing."""
        path = self.path(folder)
        if not path.is_file():
            return None
        module, _, name = self.holds.partition(":")
        schema = cast("type[Record]", getattr(import_module(f"hase.learned.{module}"), name))
        return files.read_record(path, schema, schema.model_fields["version"].default, self.writer)

    def needed(self, folder: Path) -> Record:
        """Reads the file in a target's folder, which must exist."""
        record = self.read(folder)
        if record is None:
            raise UserError(f"{folder}: {self.absent}")
        return record

    def write(self, folder: Path, record: Record) -> Path:
        """Writes the file and returns its path."""
        files.write_json(self.path(folder), record)
        return self.path(folder)


# Written last by a training: without it, a folder holds no predictors.
PREDICTORS: LearnedFile[Sidecar] = LearnedFile(
    "predictors.json", "kernels.sidecar:Sidecar", TRAIN, "all predictions and fits", f"no predictors; train them with: {TRAIN}")
UNCERTAINTY: LearnedFile[Uncertainty] = LearnedFile(
    "uncertainty.json", "kernels.uncertainty:Uncertainty", TRAIN, "all predictions")
ESTIMATORS: LearnedFile[AdmittedFile] = LearnedFile(
    "estimators.json", "kernels.admitted:AdmittedFile", CHECK_ESTIMATOR, "all predictions")
COMPOSITION: LearnedFile[Composition] = LearnedFile(
    paths.COMPOSITION, "composition.fitted:Composition", FIT_COMPOSITION, "all predictions, further fits",
    f"no composition; fit one with: {FIT_COMPOSITION}")
HOST: LearnedFile[CopyCosts] = LearnedFile(
    "host.json", "composition.host_side:CopyCosts", FIT_HOST, "predictions of CUDA sessions, fit_composition")
SHARING: LearnedFile[Sharing] = LearnedFile(
    "sharing.json", "sharing:Sharing", FIT_SHARING, "predictions under load")
MPS: LearnedFile[MpsSharing] = LearnedFile("mps.json", "sharing:MpsSharing", FIT_MPS, "predictions through MPS")
SERVING: LearnedFile[ServingHost] = LearnedFile(
    "serving.json", "sharing:ServingHost", FIT_SERVING, "advice on sharing: requests to served models")
ENERGY: LearnedFile[EnergyModel] = LearnedFile(
    "energy.json", "energy:EnergyModel", FIT_ENERGY, "predictions of energy",
    f"nothing was learned of its energy; measure models there with {MEASURE_ENERGY}, then learn from them: {FIT_ENERGY} "
    "(docs/energy.md)")
GENERATION: LearnedFile[LearnedGeneration] = LearnedFile(
    "generation.json", "llm:LearnedGeneration", FIT_GENERATION, "predictions of language models")
GENERATION_ENERGY: LearnedFile[EnergyModel] = LearnedFile(
    "generation_energy.json", "energy:EnergyModel", FIT_GENERATION, "predictions of language models' energy")
