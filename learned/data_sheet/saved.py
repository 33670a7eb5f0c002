"""What was learned of other cards, as files in learned/data_sheet/learned."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from hase.learned.data_sheet.ratios import CardRatios
from hase.learned.kernels.boosters import as_arrays, from_arrays
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen

FOLDER = Path(__file__).with_name("learned")
VERSION = 1
FIT = "python training/fit_data_sheet.py"


class Range(Frozen):
    """The multiples of a prediction between which nine of ten times lay, of cards that were left out."""

    low: float
    high: float


class SheetModel(Frozen):
    """`data_sheet.json`.

    Attributes:
        base: the target that times are carried over from.
        cards: those of the tables.
        own: those of them on which kernels of ONNX Runtime were measured, and not only products and attention.
        alike, unlike: errors for cards of the compute capability of one of `own`, and for others.
        booster: numbers of the saved booster; its arrays are in `booster.npz`.
        sha256: of these.
    """

    version: int = VERSION
    base: str
    cards: tuple[str, ...]
    own: tuple[str, ...]
    alike: Range
    unlike: Range
    booster: dict[str, float]
    sha256: str


def write_sheet(folder: Path, ratios: CardRatios, base: str, cards: tuple[str, ...], own: tuple[str, ...], alike: Range,
                unlike: Range) -> None:
    """Writes what was learned; the arguments are those of `SheetModel`."""
    numbers, arrays = as_arrays(ratios.booster)
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    path = folder / "booster.npz"
    files.write_bytes(path, packed.getvalue())
    files.write_json(folder / "data_sheet.json", SheetModel(
        base=base, cards=cards, own=own, alike=alike, unlike=unlike, booster=numbers, sha256=files.sha256(path)))


def read_sheet(folder: Path = FOLDER) -> tuple[SheetModel, CardRatios]:
    """What was learned.

    Raises:
        UserError: a file is missing or damaged.
    """
    model, path = files.read_record(folder / "data_sheet.json", SheetModel, VERSION, FIT), folder / "booster.npz"
    try:
        if files.sha256(path) != model.sha256:
            raise UserError(f"{path}: is not the one that data_sheet.json describes; make both with: {FIT}")
        with np.load(path, allow_pickle=False) as arrays:
            return model, CardRatios(from_arrays(model.booster, dict(arrays)))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged ({error}); make it with: {FIT}") from None
