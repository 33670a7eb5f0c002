"""The saved form of an estimator: an entry of a JSON sidecar, and a file of arrays. Reading it runs nothing.

The entry holds what was learned as JSON. An instance of a class is an object with the class's name and its fields; the
estimator lists the classes that its form holds (`saved_classes`), and any other is refused. Arrays, and the arrays of boosters
(boosters.py), lie in a file `<name>-<hash>.npz`, which numpy reads. Boosters are read at the first prediction that needs them.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from hase.learned.kernels.boosters import SavedBoosters, as_arrays, from_arrays
from hase.learned.kernels.interface import Estimator
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.lazy import xgboost
from hase.utils.paths import FileName

E = TypeVar("E", bound=Estimator)
CLASS, FIELDS, ARRAY, BOOSTERS = "!class", "fields", "!array", "!boosters"
BOOSTER_VERSION = 1  # of the arrays in boosters.py
ESTIMATOR_PREFIX = "estimator_"  # of the files of admitted estimators, which lie beside those of the predictors;
MPS_PREFIX = "mps_"  # of what was learned of sharing through MPS, likewise
COMPRESSION = 9  # of zlib; lzma makes a file 7 % smaller, but takes five times as long to read
UNREADABLE = (OSError, EOFError, zlib.error, zipfile.BadZipFile, ValueError, KeyError, IndexError, TypeError)


class Saved(Frozen):
    """A fitted estimator.

    Attributes:
        name, version: of the estimator.
        features: its feature schema: name and version, then the features.
        learned: what it learned, as JSON.
        file, sha256: the file with its arrays; None and "" where it has none.
    """

    name: FileName
    version: int
    features: tuple[str, ...]
    learned: dict[str, Any]
    file: FileName | None = None
    sha256: str = ""


def features_of(estimator: Estimator | type[Estimator]) -> tuple[str, ...]:
    """The feature schema of an estimator, as `Saved` holds it."""
    return str(estimator.features), *estimator.features.names


def save_estimator(folder: Path, stem: str, estimator: Estimator) -> Saved:
    """Writes the arrays of a fitted estimator to `<stem>-<hash>.npz` in `folder`; returns the entry that reads them.

    Raises:
        UserError: it holds something that can't be saved, or an instance of a class that it does not list.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    learned = _encoded(estimator.saved(), estimator, estimator.name, arrays)
    file, sha256 = write_hashed(folder, stem, "npz", _packed(arrays)) if arrays else (None, "")
    return Saved(name=estimator.name, version=estimator.version, features=features_of(estimator), learned=learned, file=file,
                 sha256=sha256)


def open_estimator(saved: Saved, made: type[E], folder: Path, remedy: str) -> E:
    """The estimator that `save_estimator` saved.

    Args:
        saved: its entry.
        made: the estimator's class.
        folder: of the file with its arrays.
        remedy: what to do where it can't be read, for the message.

    Raises:
        UserError: it is of another estimator, version or feature schema, a file is missing or damaged, or it holds a class that
            the estimator does not list.
    """
    path = folder / (saved.file or "")
    for what, saved_value, value in (("name", saved.name, made.name), ("version", saved.version, made.version),
                              ("features", saved.features, features_of(made))):
        if saved_value != value:
            raise UserError(f"{path}: saved with {what} {_shown(saved_value)}, this Hase has {_shown(value)}; {remedy}")
    try:
        arrays = np.load(io.BytesIO(read_checked(path, saved.sha256, remedy)), allow_pickle=False) if saved.file else {}
        estimator = made()
        reader = _Reader({kind.__name__: kind for kind in made.saved_classes}, arrays, path, remedy)
        estimator.restore(reader.decoded(saved.learned, made.name))
    except UserError:
        raise
    except Exception as error:  # what an estimator makes of a damaged form can fail in any way
        raise UserError(f"{path}: estimator {made.name} can't read what it saved ({type(error).__name__}: {error}); "
                        f"{remedy}") from error
    return estimator


def read_checked(path: Path, sha256: str, remedy: str) -> bytes:
    """The bytes of `path`.

    Raises:
        UserError: the file is missing, or its SHA-256 is not `sha256`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: damaged or changed (its SHA-256 is not the one that was noted when it was written); {remedy}")
    return data


def write_hashed(folder: Path, stem: str, suffix: str, data: bytes) -> tuple[str, str]:
    """Writes `data` to a file whose name has a part of its SHA-256; returns the name and the whole hash."""
    sha256 = hashlib.sha256(data).hexdigest()
    name = f"{stem}-{sha256[:8]}.{suffix}"
    files.write_bytes(folder / name, data)
    return name, sha256


def _packed(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """As `numpy.savez_compressed`, but the same arrays always give the same bytes: without the time of day."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array in sorted(arrays.items()):
            member = io.BytesIO()
            np.lib.format.write_array(member, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue(), zipfile.ZIP_DEFLATED, COMPRESSION)
    return out.getvalue()


def _encoded(value: Any, estimator: Estimator, place: str, arrays: dict[str, npt.NDArray[Any]]) -> Any:
    """`value` as JSON; its arrays are added to `arrays`, under names that begin with `place`."""
    if isinstance(value, BaseModel):
        if type(value) not in estimator.saved_classes:
            raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}, which its saved_classes do not list")
        return {CLASS: type(value).__name__, FIELDS: value.model_dump(mode="json")}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("!") for key in value):
            raise UserError(f"estimator {estimator.name}: saves a dictionary whose keys are not text, or one begins with !")
        if value and all(isinstance(member, xgboost.Booster) for member in value.values()):
            return {BOOSTERS: {name: _encoded_booster(booster, f"{place}/{name}", arrays)
                               for name, booster in value.items()}, "version": BOOSTER_VERSION}
        return {key: _encoded(member, estimator, f"{place}/{key}", arrays) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(member, estimator, f"{place}/{number}", arrays) for number, member in enumerate(value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        arrays[place] = value
        return {ARRAY: place}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}; only numbers, text, lists, dictionaries, "
                    "numpy arrays, dictionaries of boosters and its saved_classes (pydantic models) can be saved")


def _encoded_booster(booster: xgboost.Booster, place: str, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, float]:
    numbers, columns = as_arrays(booster)
    arrays |= {f"{place}/{column}": values for column, values in columns.items()}
    return numbers


@dataclass(frozen=True)
class _Reader:
    """Makes values of what `_encoded` made.

    Attributes:
        registered: by name, the classes that the form may hold.
        arrays: by name.
        path, remedy: the file, and what to do where it can't be read, for messages.
    """

    registered: Mapping[str, type[BaseModel]]
    arrays: Mapping[str, npt.NDArray[Any]]
    path: Path
    remedy: str

    def decoded(self, value: Any, place: str) -> Any:
        if isinstance(value, list):
            return [self.decoded(member, f"{place}/{number}") for number, member in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if ARRAY in value:
            return self.arrays[value[ARRAY]]
        if BOOSTERS in value:
            if value.get("version") != BOOSTER_VERSION:
                raise UserError(f"{self.path}: boosters of version {value.get('version')}, this Hase reads "
                                f"version {BOOSTER_VERSION}; "
                                f"{self.remedy}")
            return SavedBoosters(value[BOOSTERS], partial(self.booster, value[BOOSTERS], place))
        if CLASS in value:
            return self.instance(value[CLASS], value.get(FIELDS))
        return {key: self.decoded(member, f"{place}/{key}") for key, member in value.items()}

    def instance(self, name: Any, fields: Any) -> BaseModel:
        if not isinstance(name, str) or name not in self.registered:
            raise UserError(f"{self.path}: refused: it holds a {name}, which its estimator does not list in saved_classes "
                            f"({', '.join(self.registered) or 'none'})")
        try:
            return self.registered[name].model_validate(fields)
        except ValidationError as error:
            raise UserError(f"{self.path}: damaged: {name}: {error.errors()[0]['msg']}; {self.remedy}") from None

    def booster(self, numbers: Mapping[str, Mapping[str, float]], place: str, name: str) -> xgboost.Booster:
        start = f"{place}/{name}/"
        try:
            return from_arrays(numbers[name], {
                key.removeprefix(start): self.arrays[key] for key in self.arrays if key.startswith(start)})
        except (*UNREADABLE, xgboost.core.XGBoostError) as error:
            raise UserError(f"{self.path}: booster {name} is damaged ({error}); {self.remedy}") from None


def _shown(value: Any) -> str:
    return ", ".join(map(str, value[:4])) + (", …" if len(value) > 4 else "") if isinstance(value, tuple) else str(value)
