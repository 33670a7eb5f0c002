"""The steps of recipes/this_device that start from the GPU's data sheet: kernels that tell most of it, and its correction."""

from __future__ import annotations

from typing import Any

from hase.kernel_model.building.kernel_models import kernel_build
from hase.kernel_model.sampling.seeds import SEED_FILE, read_seeds
from hase.recipes.this_device.chosen_kernels import read_chosen
from hase.recipes.this_device.steps import run_json
from hase.training.data_sheet.card import card_of
from hase.utils import files
from hase.utils.fingerprint import Target
from hase.utils.locks import sole_writer
from hase.utils.paths import Workspace

PER_MINUTE = 300  # kernels that are built for each minute; a GPU whose host has 16 cores measures 500 of them


def build_chosen(workspace: Workspace, target: Target, gpu: str | None, minutes: float) -> int:
    """Builds the kernels that tell most of a GPU, as many as may be measured in so many minutes; how many there are.

    Raises:
        UserError: nobody knows the GPU's data sheet.
    """
    card_of(gpu, target.device_name)
    folder = workspace.kernel_onnx / target.flavour.name
    chosen = read_chosen(round(PER_MINUTE * minutes))
    with sole_writer(workspace.kernel_onnx):
        seeds = read_seeds(folder)
        for kernel in chosen:
            if kernel.id not in seeds:
                kernel_build(kernel, folder)
        files.write_json(folder / SEED_FILE, seeds | {kernel.id: () for kernel in chosen})
    return len(chosen)


def correct(workspace: Workspace, target: Target, gpu: str | None) -> tuple[list[dict[str, Any]], str]:
    """Corrects the data sheet of a GPU by what was measured; errors to expect, and what `--gpu` calls its card."""
    rows: list[dict[str, Any]] = run_json(workspace, "training/correct_data_sheet.py", "--target", target.name,
                                          *(["--gpu", gpu] if gpu else []))
    return rows, gpu or card_of(None, target.device_name).slug
