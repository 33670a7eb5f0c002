"""The card of the catalogue that a dataset is of."""

from __future__ import annotations

from pathlib import Path

from records.gpu_catalogue import Gpu, gpu_named, read_gpus
from utils.errors import UserError


def card_of(name: str | None, device_name: str) -> Gpu:
    """The card named by the user, as in the catalogue or in a file; by default the one with the device's name.

    Raises:
        UserError: nobody knows it, or the file can't be read.
    """
    if name and name.endswith((".yaml", ".yml")):
        return read_gpus(Path(name))[0]
    gpu = gpu_named(name or device_name)
    if gpu is None:
        raise UserError(f"{name or device_name}: no such card is known; give its data sheet with --gpu FILE.yaml (a list "
                        "`gpus:` like that of records/gpus.yaml)")
    return gpu
