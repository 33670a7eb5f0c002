"""Kernels of no model that are small enough for a test."""

from __future__ import annotations

import numpy as np

from hase.kernel_model.sampling.draws import footprint_mib, on_cpu
from hase.kernel_model.sampling.free_shapes.table import Draw
from hase.records.kernel_record import Kernel
from hase.utils.errors import UserError


def small_draws(draw: Draw, count: int) -> list[Kernel]:
    """The first kernels of a draw that are small enough for a test, and that the CPU provider has."""
    generator, found = np.random.default_rng(2), list[Kernel]()
    for _ in range(400):
        try:
            drawn = draw("float32", 1, generator)
        except UserError:
            continue
        if footprint_mib(drawn) < 16 and drawn.flops < 1e8 and on_cpu(drawn):
            found.append(drawn)
        if len(found) == count:
            return found
    raise AssertionError(f"{draw.__name__}: only {len(found)} of {count} fit")
