"""Reads a YAML config into a validated pydantic class. Errors name the file, the key, and what is allowed."""

from __future__ import annotations

import difflib
import reprlib
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from utils.errors import UserError

_SHORTLY = reprlib.Repr()  # a few lines of YAML, whose aliases repeat each other, can stand for gigabytes of text
_SHORTLY.maxstring = _SHORTLY.maxother = 200


class Config(BaseModel):
    """Base of every config class: immutable; a key that is not a field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


C = TypeVar("C", bound=BaseModel)


def _field_names(schema: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed in the mapping that holds the last part of `location`."""
    current: Any = schema
    for part in location[:-1]:
        if isinstance(part, int):  # of a tuple
            current = next(iter(get_args(current)), None)
            continue
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return []
        field = current.model_fields.get(str(part))
        if field is None:
            return []
        current = field.annotation
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _describe(error: Any, schema: type[BaseModel]) -> str:
    location = tuple(error["loc"])
    key = ".".join(str(part) for part in location) or "(the whole file)"
    if error["type"] == "extra_forbidden":
        allowed = _field_names(schema, location)
        near = difflib.get_close_matches(str(location[-1]), allowed, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{key}: unknown key{hint} (allowed: {', '.join(allowed)})"
    if error["type"] == "missing":
        return f"{key}: missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{key}: {message[:1].lower()}{message[1:]} (got {_SHORTLY.repr(error['input'])})"


def validate(data: Any, schema: type[C], where: str) -> C:
    """`data` as a `schema`.

    Raises:
        UserError: naming `where`, each key that does not fit, and what is allowed.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = [_describe(item, schema) for item in error.errors()]
        raise UserError(f"{where}: " + "; ".join(lines)) from None


def read_config(path: Path, schema: type[C]) -> C:
    """The config in the YAML file `path`, validated.

    Raises:
        UserError: no such file, no YAML, or a key or value that `schema` does not allow.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; a YAML config is expected") from None
    try:
        data = yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"{path}: not a config: nested too deeply") from None
    except ValueError as error:  # a date or number that is none
        raise UserError(f"{path}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    return validate({} if data is None else data, schema, str(path))
