"""What kernels that were measured on a card say of its data sheet, as a file of a workspace."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from hase.learned.data_sheet.adjusted import AdjustedRatios, Process
from hase.learned.data_sheet.ratios import OWN, CardRatios
from hase.records.gpu_catalogue import Gpu
from hase.utils import files
from hase.utils.frozen import Frozen
from hase.utils.paths import Workspace

VERSION = 1
FIT = "python training/correct_data_sheet.py"
Numbers = tuple[float, ...]


class Correction(Frozen):
    """`training/data_sheets/<card>.json`.

    Attributes:
        gpu: the card's short name.
        target: whose dataset it was learned from.
        base: the target that times are carried over from.
        created: when.
        known, pulls, means, spreads, of_card, nearby, length: of the process (`Process`).
        low, high: the multiples of a prediction between which nine of ten times of models lie.
        measured_ms: times of kernels on the card, by id, which are looked up.
    """

    version: int = VERSION
    gpu: str
    target: str
    base: str
    created: str
    known: tuple[Numbers, ...] = Field(min_length=1)
    pulls: Numbers
    means: Numbers
    spreads: Numbers
    of_card: float
    nearby: float
    length: float = Field(gt=0)
    low: float = Field(gt=0, le=1)
    high: float = Field(ge=1)
    measured_ms: dict[str, float]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        features = {len(row) for row in (*self.known, self.means, self.spreads)}
        if len(features) != 1 or len(self.known) != len(self.pulls):
            raise ValueError("the sizes of known, pulls, means and spreads differ")
        return self

    def ratios(self, learned: CardRatios, gpu: Gpu) -> AdjustedRatios:
        """The ratios that were learned of cards, corrected for this one."""
        known, pulls, means, spreads = map(np.array, (self.known, self.pulls, self.means, self.spreads))
        process = Process(known, pulls, means, spreads, self.of_card, self.nearby, self.length)
        return AdjustedRatios(learned.booster, process, gpu, OWN, self.low, self.high)


def correction_of(ratios: AdjustedRatios, target: str, base: str, measured_ms: dict[str, float]) -> Correction:
    """The file of corrected ratios; the arguments are its fields."""
    process = ratios.process
    return Correction(
        gpu=ratios.gpu.slug, target=target, base=base, created=datetime.now(UTC).isoformat(timespec="seconds"),
        known=tuple(map(tuple, process.known.tolist())), pulls=tuple(process.pulls.tolist()),
        means=tuple(process.means.tolist()), spreads=tuple(process.spreads.tolist()), of_card=process.of_card,
        nearby=process.nearby, length=process.length,
        low=ratios.low, high=ratios.high, measured_ms=measured_ms)


def correction_path(workspace: Workspace, gpu: Gpu) -> Path:
    """The file of a card."""
    return workspace.data_sheets / f"{gpu.slug}.json"


def read_correction(workspace: Workspace, gpu: Gpu) -> Correction | None:
    """What was measured of a card; None where nothing was.

    Raises:
        UserError: the file is damaged or of another version.
    """
    path = correction_path(workspace, gpu)
    return files.read_record(path, Correction, VERSION, FIT) if path.is_file() else None
