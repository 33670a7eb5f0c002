"""The card that a dataset is of, and what kernels take on the card that times are carried over from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hase.learned.data_sheet.work import Floats, Work, work_of
from hase.learned.kernels.predictors import Predictors
from hase.learned.kernels.settings import LAUNCHES
from hase.records.gpu_catalogue import Gpu, gpu_named, named_or_in_file
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL
from hase.utils.errors import UserError


def card_of(name: str | None, device_name: str) -> Gpu:
    """The card named by the user, as in the catalogue or in a file; by default the one with the device's name.

    Raises:
        UserError: nobody knows it, or the file can't be read.
    """
    gpu = named_or_in_file(name) if name else gpu_named(device_name)
    if gpu is None:
        raise UserError(f"{name or device_name}: no such card is known; give its data sheet with --gpu FILE.yaml (a list "
                        "`gpus:` like that of records/gpus.yaml)")
    return gpu


def on_base(kernels: Sequence[Kernel], base: Predictors, strict: bool = False) -> tuple[Work, Floats]:
    """The work of kernels, and their times on the base card (ms), measured or (all of them if `strict`) predicted."""
    times_ms, launches = (base.predict(kernels, {}, label, strict).latency_ms for label in (GPU_LABEL, LAUNCHES))
    return work_of(kernels, launches), np.array(times_ms)
