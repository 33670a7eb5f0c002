"""The errors of a target's predictors on held-out kernels, and which kernels are worth sampling near.

Training writes the errors while it cross-validates, one JSON document per target (see `Workspace.kernel_errors`); the sampler
reads them. Kernels that only held-out families have are not in training and so not in the document either. It names the
held-out families, so that the sampler does not draw near their kernels. History of the schema: version 2 names the target's
runtime.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ort_analysis.records.kernel_record import Frozen, Kernel
from utils import files
from utils.errors import UserError
from utils.fingerprint import Target

ERRORS_VERSION = 2
MOST_LOG_ERROR = 0.5  # larger errors count as this one in draw_weights: 65 % too long, or 39 % too short
LONG = 0.95  # quantile of the times; longer times count as this one (0.3 ms on an H200)
REMAKE = "python training/train_kernel_model.py --force"


class KernelError(Frozen):
    """A kernel's measured time, and the time predicted by a training without the kernel.

    Attributes:
        kernel: its full description, since sampled kernels are in no index.
        families: the model families that have it, or near whose shapes it was sampled, sorted; empty if it is near no model.
        measured_ms: on an idle device; the median over the machines that measured it.
        predicted_ms: for an idle device.
    """

    kernel: Kernel
    families: tuple[str, ...]
    measured_ms: float
    predicted_ms: float

    @property
    def log_error(self) -> float:
        """The logarithm of predicted over measured."""
        return float(np.log(self.predicted_ms / self.measured_ms))


class KernelErrors(Frozen):
    """The errors of a target's kernels.

    Attributes:
        target: of the predictors.
        label: of the times.
        held_out: model families that are not in training.
        dataset_sha256: of the kernel table that was cross-validated.
        kernels: all kernels with an idle time under the label.
    """

    version: int = ERRORS_VERSION
    target: Target
    label: str
    held_out: tuple[str, ...]
    dataset_sha256: str
    kernels: tuple[KernelError, ...]


def write_errors(path: Path, errors: KernelErrors) -> None:
    """Writes the file that `read_errors` reads; omits default values, which halves the file."""
    document = errors.model_dump(mode="json", exclude_defaults=True) | {"version": errors.version}
    files.write_text(path, json.dumps(document, separators=(",", ":")) + "\n")


def read_errors(path: Path) -> KernelErrors:
    """The errors in `path`; `UserError` where they are missing, damaged or of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a training writes it: {REMAKE}")
    return files.read_record(path, KernelErrors, ERRORS_VERSION, REMAKE)


def draw_weights(errors: Sequence[KernelError]) -> npt.NDArray[np.float64]:
    """The share of draws for which each kernel is the seed; all zero where there is no error.

    The weight is the squared log error times the measured time, both limited so that neither outliers nor a few huge kernels
    take all draws. It was tested by choosing 3,000 kernels of the H200's dataset for training: this weight lowered the mean
    error of kernels, and the time-weighted error of the models' kernels, as much as the best of ten weights, and more than a
    random choice.
    """
    if not errors:
        return np.zeros(0)
    times = np.array([error.measured_ms for error in errors])
    log_errors = np.array([error.log_error for error in errors])
    weights = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) ** 2 * np.minimum(times, np.quantile(times, LONG))
    return weights / total if (total := weights.sum()) else weights
