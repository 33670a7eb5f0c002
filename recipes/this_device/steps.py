"""Steps of measure_this_device.py: its time budget, the scripts that it runs, the errors to expect, and the most informative
kernels of a GPU.
"""

from __future__ import annotations

import json
import lzma
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from hase.inference import predict
from hase.kernel_model.building.kernel_models import write_kernel
from hase.kernel_model.sampling.draws import SEED_FILE, read_seeds
from hase.learned.composition.fitted import Composition, read_composition
from hase.learned.kernels.sidecar import Sidecar, read_sidecar
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import read_model_record, record_path
from hase.training.fits.data_sheets import chosen_card
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import Target
from hase.utils.locks import sole_writer
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import die_with_parent

TRAINING_SHARE = 0.25  # of the minutes, for training and composition
LEAST_MEASURING_SHARE = 0.2  # of the minutes, even where the analysis has used up the rest …
LEAST_MEASURING_S = 10.0  # … and at least this long: the processes that measure need a few seconds to start
SAMPLING_SHARE = 0.1  # of the minutes, for drawing and building samples
# Rates to plan with, per second and process: samples that are drawn and built, and kernels that are measured. Measured on two
# cores of an AMD EPYC and on an H200; a device that is faster measures all samples before its time is over.
DRAWN_PER_S = 60.0
MEASURED_PER_S = {"cpu": 25.0, "cuda": 60.0}
MORE_THAN_MEASURED = 1.5  # samples to choose from, for each that there is time to measure
SPENT_VERSION = 1
CHOSEN = Path(__file__).with_name("kernels.jsonl.xz")  # the most informative kernels of a GPU, in order
CHOSEN_PER_MINUTE = 300  # of them, built for each minute; a GPU whose host has 16 cores measures 500 of them
SCRIPT_ENDS_WITHIN_S = 2.0  # after a signal
HELD_OUT = {"family": "models, each family held out", "model": "models, each held out",
            "nothing": "models (one alone can't be held out)"}


class Spent(Frozen):
    """What earlier calls in this workspace did; `analysed` is a text that identifies the analysed models and sizes."""

    version: int = SPENT_VERSION
    seconds: float = 0.0
    analysed: str = ""
    measured: bool = False


def read_spent(path: Path) -> Spent:
    """What earlier calls did; empty without a file."""
    return files.read_record(path, Spent, SPENT_VERSION, f"rm {path}") if path.is_file() else Spent()


class Budget:
    """The minutes that all calls in a workspace may take together; `spent` is what earlier calls took."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.total_s = path, 60.0 * minutes
        self.spent = read_spent(path)
        self._began_s = time.monotonic()

    def used_s(self) -> float:
        """Seconds of this call and earlier ones."""
        return self.spent.seconds + time.monotonic() - self._began_s

    def save(self, **changes: Any) -> None:
        """Saves the time used so far, and `changes` of other fields of `spent`."""
        now_s = time.monotonic()
        self.spent = self.spent.model_copy(update={"seconds": self.spent.seconds + now_s - self._began_s, **changes})
        self._began_s = now_s
        files.write_json(self.path, self.spent)

    def samples(self, device: str, own_kernels: int, jobs: int) -> int:
        """How many kernels to sample: as many as fit in their share of the time, but not many more than can be measured."""
        measurable = self.measuring_s() * MEASURED_PER_S[device] - own_kernels
        return max(0, int(min(MORE_THAN_MEASURED * measurable, SAMPLING_SHARE * self.total_s * DRAWN_PER_S * jobs)))

    def measuring_s(self) -> float:
        """Seconds for measuring, after what training needs; the first measurement gets some time in any case."""
        left_s = self.total_s * (1.0 - TRAINING_SHARE) - self.used_s()
        return max(left_s, 0.0 if self.spent.measured else max(LEAST_MEASURING_SHARE * self.total_s, LEAST_MEASURING_S))


def run_json(workspace: Workspace, script: str, *options: str) -> Any:
    """The JSON that a script prints; partly done work counts as success. Raises UserError if it prints none."""
    command = [sys.executable, script, "--workspace", str(workspace.root.absolute()), "--json", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                          preexec_fn=partial(die_with_parent, signal.SIGTERM) if sys.platform == "linux" else None) as process:
        try:
            out, _ = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(SCRIPT_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    try:
        return json.loads(out)
    except ValueError:
        raise UserError(f"{script} ended with exit code {process.returncode} and no result; the lines above say why") from None


def expected_errors(workspace: Workspace, target: str) -> list[dict[str, Any]]:
    """One row per kind of prediction; errors in percent, None if nothing could be held out."""
    folder = workspace.predictors(target)
    sidecar, composition = read_sidecar(folder), read_composition(folder)
    return [_kernel_errors(sidecar, composition), _model_errors(composition), _fitted_errors(workspace, sidecar, composition)]


def _row(predicted: str, errors: Sequence[float]) -> dict[str, Any]:
    return {"predicted": predicted, "count": len(errors), "mean_error_%": 100 * mean(errors) if errors else None,
            "median_error_%": 100 * median(errors) if errors else None}


def _kernel_errors(sidecar: Sidecar, composition: Composition) -> dict[str, Any]:
    errors = sidecar.labels[composition.label].errors[0]
    return {"predicted": "kernels, each held out", "count": errors.kernels, "mean_error_%": 100 * errors.mape,
            "median_error_%": 100 * errors.median}


def _model_errors(composition: Composition) -> dict[str, Any]:
    """Errors of models whose kernels are all predicted by a training without them."""
    held_out = composition.models if composition.left_out != "nothing" else ()
    return _row(f"{HELD_OUT[composition.left_out]}, with predicted kernels",
                [abs(model.predicted_ms / model.measured_ms - 1) for model in held_out])


def _fitted_errors(workspace: Workspace, sidecar: Sidecar, composition: Composition) -> dict[str, Any]:
    """Errors of measured models as they are predicted now: kernels looked up, and constants fitted to these models."""
    errors = []
    for model in composition.models:
        record = read_model_record(record_path(workspace, sidecar.target.flavour, model.model))
        predicted = predict(record, target=sidecar.target.name, workspace=workspace)
        errors.append(abs(predicted.latency_ms / model.measured_ms - 1))
    return _row("your models, with measured kernels (these fitted the constants)", errors)


def write_chosen(kernels: Iterable[Kernel], path: Path = CHOSEN) -> None:
    """Writes the list of the most informative kernels, in order."""
    files.write_bytes(path, lzma.compress("".join(f"{kernel.model_dump_json()}\n" for kernel in kernels).encode()))


def read_chosen(count: int, path: Path = CHOSEN) -> list[Kernel]:
    """The first `count` kernels of the list."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [Kernel.model_validate_json(line) for line, _ in zip(lines, range(count), strict=False)]


def build_chosen(workspace: Workspace, target: Target, gpu: str | None, minutes: float) -> int:
    """Builds the most informative kernels of a GPU, as many as can be measured in `minutes`; returns how many."""
    chosen_card(gpu, target.device_name)
    folder = workspace.kernel_onnx / target.flavour.name
    chosen = read_chosen(round(CHOSEN_PER_MINUTE * minutes))
    with sole_writer(workspace.kernel_onnx):
        seeds = read_seeds(folder)
        for kernel in chosen:
            if kernel.id not in seeds:
                write_kernel(kernel, folder)
        files.write_json(folder / SEED_FILE, seeds | {kernel.id: () for kernel in chosen})
    return len(chosen)


def correct(workspace: Workspace, target: Target, gpu: str | None) -> tuple[list[dict[str, Any]], str]:
    """Corrects a GPU's data sheet by measurements; returns the errors to expect, and the card's name for `--gpu`."""
    rows: list[dict[str, Any]] = run_json(workspace, "training/correct_data_sheet.py", "--target", target.name,
                                          *(["--gpu", gpu] if gpu else []))
    return rows, gpu or chosen_card(None, target.device_name).slug
