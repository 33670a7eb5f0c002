"""The saved form of an estimator: gzipped JSON, read without running anything.

An instance of a class is an object with the class's name and its fields. The estimator lists the classes that its form holds
(`saved_classes`); any other is refused. History of the form: version 1 is the first.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from training.admission.interface import Estimator
from utils.errors import UserError
from utils.frozen import Frozen

FORM_VERSION = 1
CLASS, FIELDS = "!class", "fields"
CHECK = "python training/check_estimator.py"


class SavedArray(Frozen):
    """A numpy array of numbers, exact to the last bit; an estimator lists it in `saved_classes` where it saves one."""

    dtype: str
    shape: tuple[int, ...]
    data: str

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> SavedArray:
        return cls(dtype=values.dtype.str, shape=values.shape, data=base64.b64encode(values.tobytes()).decode())

    @property
    def values(self) -> npt.NDArray[Any]:
        return np.frombuffer(base64.b64decode(self.data), np.dtype(self.dtype)).reshape(self.shape)


def to_bytes(estimator: Estimator) -> bytes:
    """What a fitted estimator learned.

    Raises:
        UserError: it holds something that can't be saved, or an instance of a class that it does not list.
    """
    schema = estimator.features
    document = {"version": FORM_VERSION, "estimator": estimator.name, "estimator_version": estimator.version,
                "feature_schema": [schema.name, schema.version, *schema.names],
                "learned": _encoded(estimator.saved(), estimator)}
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def from_bytes(data: bytes, made: type[Estimator], where: Path) -> Estimator:
    """The estimator that `to_bytes` saved.

    Args:
        data: of the file.
        made: the estimator's class.
        where: the file, for errors.

    Raises:
        UserError: it is damaged, of another version or schema, of another estimator, or holds a class that is not listed.
    """
    try:
        document = json.loads(gzip.decompress(data))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UserError(f"{where}: not a saved estimator ({error}); check it again: {CHECK} {made.name}") from None
    schema = made.features
    wanted = {"version": FORM_VERSION, "estimator": made.name, "estimator_version": made.version,
              "feature_schema": [schema.name, schema.version, *schema.names]}
    for key, value in wanted.items():
        if not isinstance(document, dict) or document.get(key) != value:
            there = document.get(key) if isinstance(document, dict) else None
            raise UserError(f"{where}: saved with {key} {there}, here is {value}; check it again: {CHECK} {made.name}")
    estimator = made()
    registered = {one.__name__: one for one in made.saved_classes}
    try:
        estimator.restore(_decoded(document.get("learned"), registered, where))
    except UserError:
        raise
    except Exception as error:  # what an estimator makes of a damaged form can fail in any way
        raise UserError(f"{where}: estimator {made.name} can't read what it saved ({type(error).__name__}: {error}); check it "
                        f"again: {CHECK} {made.name}") from error
    return estimator


def _encoded(value: Any, estimator: Estimator) -> Any:
    if isinstance(value, BaseModel):
        if type(value) not in estimator.saved_classes:
            raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}, which its saved_classes do not list")
        return {CLASS: type(value).__name__, FIELDS: value.model_dump(mode="json")}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) or CLASS in value:
            raise UserError(f"estimator {estimator.name}: saves a dictionary whose keys are not text, or one is {CLASS}")
        return {key: _encoded(one, estimator) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(one, estimator) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"estimator {estimator.name}: saves a {type(value).__name__}; only numbers, text, lists, dictionaries and "
                    "its saved_classes (pydantic models) can be saved")


def _decoded(value: Any, registered: Mapping[str, type[BaseModel]], where: Path) -> Any:
    if isinstance(value, list):
        return [_decoded(one, registered, where) for one in value]
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        return {key: _decoded(one, registered, where) for key, one in value.items()}
    name = value[CLASS]
    if not isinstance(name, str) or name not in registered:
        raise UserError(f"{where}: refused: it holds a {name}, which its estimator does not list in saved_classes "
                        f"({', '.join(registered) or 'none'})")
    try:
        return registered[name].model_validate(value.get(FIELDS))
    except ValidationError as error:
        raise UserError(f"{where}: damaged: {name}: {error.errors()[0]['msg']}") from None
