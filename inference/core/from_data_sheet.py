"""Predicts for a GPU that was never measured, from its data sheet: `--gpu l40s`.

Kernels get their times on the H200, measured or predicted, carried over to the card (training/data_sheet). Launches, the host
and the way in which kernels add up stay as they are on the H200 and its host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from hase.learned.data_sheet.ratios import CardRatios
from hase.learned.data_sheet.saved import Range, SheetModel, read_sheet
from hase.learned.data_sheet.work import work_of
from hase.learned.kernels.predictors import Predictors, leaves_gpu_idle
from hase.learned.kernels.settings import LAUNCHES
from hase.records.gpu_catalogue import Gpu, catalogue, gpu_named, named_or_in_file
from hase.records.kernel_record import Kernel
from hase.records.measurement import GPU_LABEL
from hase.utils.errors import UserError
from hase.utils.fingerprint import FROM_SHEET, Target, slug

OTHERS = {"mi": "AMD's cards run ROCm or MIGraphX", "gaudi": "Intel's cards have providers of their own",
          "tpu": "TPUs do not run it", "trt": "TensorRT compiles kernels of its own",
          "tensorrt": "TensorRT compiles kernels of its own"}
WIDER = 1.5  # times as far, as logarithms, where no table has the card's generation: a choice


@dataclass
class CardPredictors(Predictors):
    """Predictors of another card, whose times are carried over.

    Attributes:
        ratios: what was learned of other cards.
        base, gpu: the card that was measured, and the one to predict for.
        seen_ms: times of kernels that were measured on that one, by id.
    """

    ratios: CardRatios | None = None
    base: Gpu | None = None
    gpu: Gpu | None = None
    seen_ms: Mapping[str, float] = field(default_factory=dict)

    def _time(self, kernels: Mapping[str, Kernel], load: tuple[float, ...], label: str,
              look_up: bool) -> dict[str, tuple[float, str]]:
        times = super()._time(kernels, load, label, look_up)
        if label != GPU_LABEL or self.ratios is None or self.base is None or self.gpu is None:
            return {name: (time, "predicted" if origin == "measured" else origin) for name, (time, origin) in times.items()}
        working = {name: kernel for name, kernel in kernels.items()
                   if not leaves_gpu_idle(kernel, label) and times[name][0] > 0}
        if working:
            counts = super()._time(working, load, LAUNCHES, look_up)
            work = work_of(list(working.values()), [counts[name][0] for name in working])
            carried = self.ratios.times_ms(work, np.array([times[name][0] for name in working]), self.base, self.gpu)
            times |= {name: (time, "predicted" if times[name][1] == "measured" else times[name][1])
                      for name, time in zip(working, carried.tolist(), strict=True)}
        return times | ({name: (self.seen_ms[name], "measured") for name in kernels if name in self.seen_ms} if look_up else {})

    def drift_of(self, kernel: Kernel, label: str) -> float:
        return 0.0 if kernel.id in self.seen_ms else super().drift_of(kernel, label)


@functools.cache
def learned() -> tuple[SheetModel, CardRatios]:
    """What was learned of cards."""
    return read_sheet()


def base_target() -> str:
    """The target that times are carried over from."""
    return learned()[0].base


def gpu_of_target(target: str | None) -> Gpu | None:
    """The card that a target's name stands for; None where it is no card by its data sheet.

    Raises:
        UserError: nobody knows the card, or its file can't be read.
    """
    if target is None or FROM_SHEET not in target:
        return None
    name = target.partition(FROM_SHEET)[0]
    if gpu := named_or_in_file(name):
        return gpu
    why = next((reason for start, reason in OTHERS.items() if slug(name).startswith(start)), None)
    raise UserError(f"--gpu {name}: " + (
        f"predictions are for ONNX Runtime with CUDA, and {why}" if why else
        f"no such card is known; choose one of {', '.join(gpu.slug for gpu in catalogue())}, or give a file with its data "
        "sheet (a list `gpus:` like that of records/gpus.yaml)"))


def carried_predictors(measured: Predictors, target: Target, gpu: Gpu, ratios: CardRatios,
                       seen_ms: Mapping[str, float] | None = None) -> CardPredictors:
    """The predictors of a card that was measured, for another one.

    Args:
        measured: of the card that was measured.
        target: that stands for the other card.
        gpu: the other card.
        ratios: what was learned of cards.
        seen_ms: times of kernels that were measured on it, by id.
    """
    own = {each.name: getattr(measured, each.name) for each in fields(Predictors) if not each.name.startswith("_")}
    own["sidecar"] = measured.sidecar.model_copy(update={"target": target, "machines": ()})
    carried = CardPredictors(**own, ratios=ratios, base=gpu_named(measured.sidecar.target.device_name), gpu=gpu,
                             seen_ms=seen_ms or {})
    carried._models = measured._models  # the same boosters, which are read once
    return carried


def sheet_range(gpu: Gpu, model: SheetModel | None = None) -> Range:
    """How far off times are that are carried over to a card: less for one of the compute capability of a card on which kernels
    of ONNX Runtime were measured, and more where no table has its generation."""
    model = model or learned()[0]
    known, own = ([card for name in names if (card := gpu_named(name))] for names in (model.cards, model.own))
    found = model.alike if any(card.compute_capability == gpu.compute_capability for card in own) else model.unlike
    if any(card.generation == gpu.generation for card in known):
        return found
    return Range(low=found.low**WIDER, high=found.high**WIDER)
