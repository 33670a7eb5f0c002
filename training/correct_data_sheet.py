"""Corrects what a data sheet says of a GPU by kernels that were measured on it.

Reads the dataset of the GPU (--target) in the workspace. Writes training/data_sheets/<card>.json, which `--gpu` then uses:
measured kernels are looked up, and what they say corrects the others. Prints the errors of the measured kernels, predicted from
the data sheet alone, and corrected by all of them but the one that is predicted. At most --most kernels correct, drawn by a
fixed seed. recipes/this_device --start-from data-sheet measures such kernels in a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from typing import Any

import numpy as np

from hase.learned.data_sheet.ratios import correction_path, read_sheet
from hase.learned.data_sheet.work import Floats
from hase.learned.kernels.measured import measured_times, times_under
from hase.learned.kernels.predictors import read_predictors
from hase.records.dataset_files import read_header, read_kernels
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL
from hase.training.fits.data_sheets import adjust_ratios, chosen_card, saved_correction, work_on_base
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.locks import sole_writer
from hase.utils.paths import SHIPPED, Workspace

LEAST = 10  # kernels: fewer say nothing of how far off the others are
EXAMPLES = """
python training/correct_data_sheet.py --target nvidia-geforce-rtx-4090-cuda-ort1.31-all  # needs its dataset
python training/correct_data_sheet.py --target my-card-cuda-ort1.31-all --gpu my_card.yaml  # needs its dataset
"""


def kernels_measured(workspace: Workspace, target: str, most: int) -> dict[str, tuple[Kernel, float]]:
    """Kernels of a dataset and their times on the GPU (ms) by id; at most `most`, drawn by a fixed seed."""
    times_ms = times_under(GPU_LABEL, measured_times(workspace, target))
    if len(times_ms) < LEAST:
        raise UserError(f"{target}: {len(times_ms)} kernels have a time on the GPU; {LEAST} are needed to correct a data sheet")
    names = sorted(times_ms)
    if len(names) > most:
        names = np.random.default_rng(0).choice(names, most, replace=False).tolist()
    return {entry.kernel.id: (entry.kernel, times_ms[entry.kernel.id])
            for entry in read_kernels(workspace.dataset(target), set(names))}


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="of the dataset")
    parser.add_argument("--gpu", help="its card: a name or a file (default: by the device's name)")
    parser.add_argument("--most", type=cli.count, default=1000, help="kernels that correct (default: 1000)")
    args = parser.parse_args()
    workspace = cli.start(args)
    gpu, (model, learned) = chosen_card(args.gpu, read_header(workspace.dataset(args.target)).target.device_name), read_sheet()
    base = read_predictors(SHIPPED / model.base)
    base_gpu = chosen_card(None, base.sidecar.target.device_name)
    if gpu.slug == base_gpu.slug:
        raise UserError(f"{gpu.name}: was measured itself; predict for it with --target")
    measured = kernels_measured(workspace, args.target, args.most)
    kernels, times_ms = [kernel for kernel, _ in measured.values()], np.array([time for _, time in measured.values()])
    work, base_ms = work_on_base(kernels, base)
    adjusted = adjust_ratios(learned, work, base_ms, times_ms, base_gpu, gpu)
    with sole_writer(workspace.data_sheets):
        files.write_json(correction_path(workspace, gpu), saved_correction(adjusted, args.target, model.base, {
            name: time for name, (_, time) in measured.items()}))
    sheet_ms = learned.times_ms(work, base_ms, base_gpu, gpu)
    cli.print_rows([error_row("data sheet alone", sheet_ms, times_ms),
                    error_row("corrected, each left out", times_ms / np.exp(adjusted.left_out), times_ms)], args.json,
                   f"{gpu.name}: {len(kernels)} measured kernels; nine of ten models within {adjusted.low:.2f} to "
                   f"{adjusted.high:.2f} times the prediction")
    return 0


def error_row(predicted: str, predicted_ms: Floats, measured_ms: Floats) -> dict[str, Any]:
    """A row of the table, with errors in per cent."""
    errors = 100 * np.abs(predicted_ms / measured_ms - 1)
    return {"predicted": predicted, "kernels": len(errors), "mean_error_%": float(errors.mean()),
            "median_error_%": float(np.median(errors))}


if __name__ == "__main__":
    cli.run(main)
