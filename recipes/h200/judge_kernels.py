"""Errors of the predictors for kernels that nothing was learned from, and which of them an answer would mark.

Reads the kernels of a target's dataset in --measured, and the predictors of --workspace (those that come with Hase, if it has
none). Every kernel is predicted. A kernel counts as marked where the prediction of a model in which it takes two fifths of the
latency would be a rough estimate (`inference/core/uncertainty.py`). Prints a row for each class of operators.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from typing import Any

import numpy as np
import numpy.typing as npt

from inference.core.targets import Fitted, fitted_for
from inference.core.uncertainty import FAR_OFF, kernel_uncertainties
from kernel_model.sampling.cliffs import Timed, timed_kernels
from records.measurement import GPU_LABEL
from records.operators import operator_row
from utils import cli
from utils.paths import Workspace

EXAMPLES = """
python recipes/h200/judge_kernels.py --measured out/unseen
"""
TARGET = "nvidia-h200-cuda-ort1.31-all"
SHARE = 0.4  # of a model's latency that a kernel takes
FAR, TWICE = 0.3, 1.0  # errors, as a share of the measured time or (a factor of two) of the smaller one
Floats = npt.NDArray[np.float64]


def error_rows(timed: list[Timed], fitted: Fitted) -> list[dict[str, Any]]:
    """The errors of kernels in per cent, of each class of operators and of all."""
    kernels, measured_ms = [entry.kernel for entry in timed], np.array([entry.time_ms for entry in timed])
    times = fitted.predictors.predict(kernels, {}, GPU_LABEL, strict=True)
    doubts = fitted.predictors.doubts(kernels)
    uncertain = kernel_uncertainties(kernels, times.provenance, fitted, GPU_LABEL, doubts)
    predicted_ms = np.array(times.latency_ms)
    marked = np.array([SHARE * doubts.get(kernel.id, 0.0) >= FAR_OFF or (
        kernel.id in uncertain and uncertain[kernel.id].makes_rough) for kernel in kernels])
    classes = np.array([operator_row(kernel.op_type).operator_class for kernel in kernels])
    errors = np.abs(predicted_ms / measured_ms - 1)
    factors = np.maximum(predicted_ms / measured_ms, measured_ms / predicted_ms) - 1
    rows = []
    for name in [*sorted(set(classes.tolist())), "all"]:
        of = (classes == name) | (name == "all")
        rows.append({"class": name, "kernels": int(of.sum()), "median_%": 100 * float(np.median(errors[of])),
                     "time_weighted_%": 100 * float((errors * measured_ms)[of].sum() / measured_ms[of].sum()),
                     "within_10_%": 100 * float((errors[of] <= 0.1).mean()), "marked_%": 100 * float(marked[of].mean()),
                     "off_by_over_30_%": 100 * float((errors[of] > FAR).mean()),
                     "of_these_marked_%": _share(marked[of], errors[of] > FAR),
                     "off_by_over_2x_%": 100 * float((factors[of] > TWICE).mean()),
                     "of_2x_marked_%": _share(marked[of], factors[of] > TWICE)})
    return rows


def _share(marked: npt.NDArray[np.bool_], chosen: npt.NDArray[np.bool_]) -> float | None:
    """The share of the chosen kernels that are marked, in per cent; None where none is chosen."""
    return 100 * float(marked[chosen].mean()) if chosen.any() else None


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--measured", type=Path, required=True, metavar="DIR", help="the workspace with the dataset")
    parser.add_argument("--target", default=TARGET, help=f"its target (default: {TARGET})")
    args = parser.parse_args()
    workspace = cli.start(args)
    timed = timed_kernels(Workspace(cli.existing_folder("--measured", args.measured)), args.target)
    cli.print_rows(error_rows(timed, fitted_for(workspace, args.target)), args.json, "errors, all kernels predicted")
    return 0


if __name__ == "__main__":
    cli.run(main)
