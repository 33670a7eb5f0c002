"""How far off a target's predictors are on each kernel that they did not see, and which kernels that makes worth a neighbour.

Training writes it as it cross-validates: one JSON document a target (see `Workspace.kernel_errors`). The sampler reads it.
Kernels that only held-out families hold are in no training, so they are not in it either; the families held out are named
there all the same, and seed nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hase.records.kernel_record import Kernel
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.frozen import Frozen

ERRORS_VERSION = 2
MOST_LOG_ERROR = 0.5  # that counts in error_weights: 65 % too long, or 39 % too short
LONG = 0.95  # quantile of the times beyond which a longer one counts no more: on an H200 0.3 ms
REMAKE = "python training/train_kernel_model.py --force"


class KernelError(Frozen):
    """A kernel's time, and what predictors that saw none of its rows make of it.

    Attributes:
        kernel: whole, since no index holds those that were sampled.
        families: the model families that hold it, or near whose shapes it was sampled, sorted; none for a kernel of no model.
        measured_ms: idle; the median over the machines that measured it.
        predicted_ms: for the idle device.
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
        target: whose predictors.
        label: whose times.
        held_out: model families that are in no fit.
        dataset_sha256: of the kernel table that they were cross-validated on.
        kernels: every kernel with an idle time under the label, by id.
    """

    version: int = ERRORS_VERSION
    target: Target
    label: str
    held_out: tuple[str, ...]
    dataset_sha256: str
    kernels: tuple[KernelError, ...]


def write_errors(path: Path, errors: KernelErrors) -> None:
    """Writes what `read_errors` reads; what is as by default is left out, which halves it."""
    document = errors.model_dump(mode="json", exclude_defaults=True) | {"version": errors.version}
    files.write_text(path, json.dumps(files.with_digest(document), separators=(",", ":")) + "\n")


def read_errors(path: Path) -> KernelErrors:
    """The errors in `path`; `UserError` where they are missing, damaged or of another version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a training writes it: {REMAKE}")
    return files.read_record(path, KernelErrors, ERRORS_VERSION, REMAKE)


def error_weights(errors: Sequence[KernelError]) -> npt.NDArray[np.float64]:
    """How often each kernel is to seed another, as shares of 1; all zero where nothing errs.

    The squared log error times the measured time, each up to a limit: so that no outlier takes all, nor the few giants that
    no model holds. Where 3,000 kernels of the H200's dataset were picked from the rest of it, this lowered the plain error of
    kernels, and the time-weighted one of those of models, as far as any of ten weights tried, and further than chance.
    """
    if not errors:
        return np.zeros(0)
    times = np.array([error.measured_ms for error in errors])
    log_errors = np.array([error.log_error for error in errors])
    weights = np.minimum(np.abs(log_errors), MOST_LOG_ERROR) ** 2 * np.minimum(times, np.quantile(times, LONG))
    return weights / total if (total := weights.sum()) else weights
