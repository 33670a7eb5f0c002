"""XGBoost's boosters in a pickle that names no class, so that reading it can't run code."""

from __future__ import annotations

import importlib
import io
import pickle
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from training.kernels.sidecar import TRAIN
from utils import cli
from utils.errors import UserError

if TYPE_CHECKING:
    import xgboost

BOOSTER_COMPRESSION = 9  # of zlib; lzma makes it a quarter smaller but takes three times as long to read
# The arrays of a tree that no prediction reads, as UBJSON names them.
UNREAD_ARRAYS = re.compile(rb"(?:base_weights|loss_changes|sum_hessian)\[\$d#([UiIlL])")
COUNT_FORMATS = {b"U": ">B", b"i": ">b", b"I": ">h", b"l": ">i", b"L": ">q"}  # UBJSON's whole numbers


class _Unpickler(pickle.Unpickler):
    """Reads plain data only. A pickle that names a class could run anything that is installed."""

    def __init__(self, data: bytes, where: Path) -> None:
        super().__init__(io.BytesIO(data))
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        raise UserError(f"{self.where}: refused: it holds {module}.{name}, which no saved predictor does; "
                        f"don't use this file, train again: {TRAIN}")


class SavedBoosters(Mapping[str, "xgboost.Booster"]):
    """The boosters in the bytes of a saved predictor, by name. Each is read at its first look-up and predicts with one thread.

    Raises:
        UserError: the bytes name a class, or are no pickled boosters; at a look-up: the entry is no booster.
    """

    def __init__(self, data: bytes, where: Path) -> None:
        try:
            packed = _Unpickler(data, where).load()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a pickle that is none can fail in any way
            raise UserError(f"{where}: not a saved predictor ({error}); train again: {TRAIN}") from None
        if not isinstance(packed, dict) or not all(isinstance(member, bytes) for member in packed.values()):
            raise UserError(f"{where}: not a saved predictor; train again: {TRAIN}")
        self._packed: dict[str, bytes] = packed
        self._read: dict[str, xgboost.Booster] = {}
        self._where = where

    def __getitem__(self, name: str) -> xgboost.Booster:
        if name not in self._read:
            self._read[name] = open_booster(self._packed[name], self._where)
        return self._read[name]

    @property
    def opened(self) -> set[str]:
        """The names of the boosters that have been read."""
        return set(self._read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def import_xgboost() -> ModuleType:
    """The package xgboost, imported without scikit-learn by Hase's commands.

    Where xgboost finds scikit-learn, it imports it too, which takes 0.9 s, for an API that Hase does not use. A program that
    imports Hase may use that API, so there it stays visible.
    """
    if cli.is_command() and "xgboost" not in sys.modules and "sklearn" not in sys.modules:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("xgboost")
        finally:
            del sys.modules["sklearn"]
    return importlib.import_module("xgboost")


def open_booster(packed: bytes, where: Path) -> xgboost.Booster:
    """The booster that `pack_booster` packed. It predicts with one thread.

    Raises:
        UserError: it is none; the message names `where` it lies.
    """
    xgboost = import_xgboost()
    try:
        booster = xgboost.Booster(model_file=bytearray(zlib.decompress(packed)))
    except (zlib.error, xgboost.core.XGBoostError, ValueError) as error:
        raise UserError(f"{where}: not a saved predictor ({error}); train again: {TRAIN}") from None
    booster.set_param({"nthread": 1})  # for a few dozen rows, starting threads would take longer than predicting
    return booster


def pack_booster(booster: xgboost.Booster) -> bytes:
    """A booster for `SavedBoosters`: XGBoost's own UBJSON, compressed; what no prediction reads is zero."""
    saved = booster.save_raw("ubj")
    at = 0
    while found := UNREAD_ARRAYS.search(saved, at):
        count_format = COUNT_FORMATS[found.group(1)]
        start = found.end() + struct.calcsize(count_format)
        at = start + 4 * struct.unpack_from(count_format, saved, found.end())[0]
        saved[start:at] = bytes(at - start)
    return zlib.compress(saved, BOOSTER_COMPRESSION)
