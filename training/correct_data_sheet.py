"""Corrects predictions from a GPU's data sheet by kernels that were measured on that GPU.

Reads the dataset of the GPU (--target) in the workspace. Writes training/data_sheets/<card>.json, which `--gpu` then uses:
measured kernels are looked up, and their errors correct the others. Prints the errors of the measured kernels, predicted from
the data sheet alone, and corrected by all others (each left out in turn). At most --most kernels are used, drawn by a fixed
seed. recipes/this_device --start-from data-sheet measures such kernels in a minute.
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

LEAST_KERNELS = 10  # fewer do not tell how far off the others are
EXAMPLES = """
python training/correct_data_sheet.py --target nvidia-geforce-rtx-4090-cuda-ort1.31-all  # needs its dataset
python training/correct_data_sheet.py --target my-card-cuda-ort1.31-all --gpu my_card.yaml  # needs its dataset
"""


def measured_kernels(workspace: Workspace, target: str, most: int) -> tuple[list[Kernel], Floats]:
    """Kernels of a dataset and their times on the GPU (ms); at most `most`, drawn by a fixed seed."""
    times_ms = times_under(GPU_LABEL, measured_times(workspace, target))
    if len(times_ms) < LEAST_KERNELS:
        raise UserError(f"{target}: {len(times_ms)} kernels have a time on the GPU, {LEAST_KERNELS} are needed to correct a "
                        "data sheet; measure more")
    names = sorted(times_ms)
    if len(names) > most:
        names = np.random.default_rng(0).choice(names, most, replace=False).tolist()
    kernels = [entry.kernel for entry in read_kernels(workspace.dataset(target), set(names))]
    return kernels, np.array([times_ms[kernel.id] for kernel in kernels])


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="whose dataset")
    parser.add_argument("--gpu", help="its card: a name, or a file with its data sheet (default: by the device's name)")
    parser.add_argument("--most", type=cli.count, default=1000, metavar="N", help="use at most N kernels (default: 1000)")
    args = parser.parse_args()
    workspace = cli.start(args)
    gpu = chosen_card(args.gpu, read_header(workspace.dataset(args.target)).target.device_name)
    model, ratios = read_sheet()
    base = read_predictors(SHIPPED / model.base)
    base_gpu = chosen_card(None, base.sidecar.target.device_name)
    if gpu.slug == base_gpu.slug:
        raise UserError(f"{gpu.name}: was measured itself and needs no data sheet; predict with --target {model.base}")
    kernels, times_ms = measured_kernels(workspace, args.target, args.most)
    work, base_ms = work_on_base(kernels, base)
    adjusted = adjust_ratios(ratios, work, base_ms, times_ms, base_gpu, gpu)
    measured_ms = dict(zip((kernel.id for kernel in kernels), times_ms.tolist(), strict=True))
    with sole_writer(workspace.data_sheets):
        files.write_json(correction_path(workspace, gpu), saved_correction(adjusted, args.target, model.base, measured_ms))
    sheet_ms = ratios.times_ms(work, base_ms, base_gpu, gpu)
    cli.print_rows([error_row("data sheet alone", sheet_ms, times_ms),
                    error_row("corrected, each left out", times_ms / np.exp(adjusted.left_out), times_ms)], args.json,
                   f"{gpu.name}: {len(kernels)} measured kernels; nine of ten models within {adjusted.low:.2f} to "
                   f"{adjusted.high:.2f} times the prediction")
    return 0


def error_row(predicted: str, predicted_ms: Floats, measured_ms: Floats) -> dict[str, Any]:
    """A row of the printed table."""
    errors = 100 * np.abs(predicted_ms / measured_ms - 1)
    return {"predicted": predicted, "kernels": len(errors), "mean_error_%": float(errors.mean()),
            "median_error_%": float(np.median(errors))}


if __name__ == "__main__":
    cli.run(main)
