"""Reads YAML configs into validated pydantic classes, and holds the base classes of configs and records.

Errors name the file, the key, and what is allowed. A config may extend another one with `extends: other.yaml`, relative to its
own folder. Mappings are merged key by key; other values, including lists, are replaced. `--set KEY=VALUE` changes one more
value: `--set kernel.budget_s=0.1`.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from hase.utils.errors import UserError
from hase.utils.lazy import yaml

_SHORT_REPR = reprlib.Repr()  # since a few lines of YAML with nested aliases can expand to gigabytes
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 200
EXTENDS = "extends"  # the key that names the config which a config extends
C = TypeVar("C", bound=BaseModel)


class Config(BaseModel):
    """Base of every config class: immutable; a key that is not a field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
        if get_origin(current) in (Union, UnionType):  # `Config | None`
            current = next((option for option in get_args(current) if option is not type(None)), None)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _describe(error: Any, schema: type[BaseModel]) -> str:
    location = tuple(error["loc"])
    key = ".".join(str(part) for part in location) or "(the whole file)"
    if error["type"] == "extra_forbidden":
        allowed = _field_names(schema, location)
        similar = difflib.get_close_matches(str(location[-1]), allowed, 1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        return f"{key}: unknown key{hint} (allowed: {', '.join(allowed)})"
    if error["type"] == "missing":
        return f"{key}: missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{key}: {message[:1].lower()}{message[1:]} (got {_SHORT_REPR.repr(error['input'])})"


class _Layer(NamedTuple):
    """The values of one file or one `--set`, with the name of their source in errors."""

    source: str
    data: Any


def validate(data: Any, schema: type[C], where: str) -> C:
    """`data` as a `schema`."""
    return _validated([_Layer(where, data)], schema)


def read_config(path: Path, schema: type[C], changes: Sequence[str] = ()) -> C:
    """The validated config in a YAML file. `changes` are values of `--set` (`kernel.budget_s=0.1`); later ones win."""
    return _validated([*_layers(path), *map(_change_layer, changes)], schema)


def _validated(layers: Sequence[_Layer], schema: type[C]) -> C:
    """The layers merged, where later ones win, as a `schema`. Errors name the layer at fault."""
    try:
        data = layers[0].data
        for layer in layers[1:]:
            data = _merged(data, layer.data)
    except RecursionError:
        raise UserError(f"{layers[-1].source}: not a config: nested too deeply") from None
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        by_source: dict[str, list[str]] = {}
        for item in _without_consequences(error.errors()):
            source = max(reversed(layers), key=lambda layer: _depth(layer.data, item["loc"])).source
            by_source.setdefault(source, []).append(_describe(item, schema))
        raise UserError("; ".join(f"{source}: {'; '.join(lines)}" for source, lines in by_source.items())) from None


def _without_consequences(errors: Sequence[Any]) -> list[Any]:
    """pydantic's errors, without "list too short" errors that only follow from refused entries."""
    return [error for error in errors if error["type"] != "too_short" or not any(
        len(entry["loc"]) > len(error["loc"]) and entry["loc"][:len(error["loc"])] == error["loc"] for entry in errors)]


def _merged(base: Any, changed: Any) -> Any:
    """`base` overridden by `changed`: mappings key by key, anything else as a whole."""
    if not (isinstance(base, Mapping) and isinstance(changed, Mapping)):
        return changed
    return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in changed.items()}}


def _depth(data: Any, location: Sequence[int | str]) -> int:
    """How many leading parts of a location are keys in nested mappings."""
    for depth, part in enumerate(location):
        if not isinstance(data, Mapping) or part not in data:
            return depth
        data = data[part]
    return len(location)


def _layers(path: Path, extended_by: tuple[Path, ...] = ()) -> list[_Layer]:
    """A config file and the files that it extends, the first base first."""
    if os.path.realpath(path) in map(os.path.realpath, extended_by):
        circle = " extends ".join(map(str, (*extended_by, path)))
        raise UserError(f"{extended_by[-1]}: {EXTENDS}: a config can't extend itself ({circle}); remove one {EXTENDS}")
    data = _read_yaml(path, extended_by[-1] if extended_by else None)
    if not isinstance(data, dict) or EXTENDS not in data:
        return [_Layer(str(path), {} if data is None else data)]
    base = data.pop(EXTENDS)
    if not isinstance(base, str):
        raise UserError(f"{path}: {EXTENDS}: the path of another config is expected (got {_SHORT_REPR.repr(base)})")
    return [*_layers(path.parent / base, (*extended_by, path)), _Layer(str(path), data)]


def _change_layer(text: str) -> _Layer:
    """A value of `--set` as nested mappings: `kernel.budget_s=0.1` is `{"kernel": {"budget_s": 0.1}}`."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {text}: write KEY=VALUE, with dots in the key of a nested value: --set kernel.budget_s=0.1")
    data = _parse_yaml(value, f"--set {text}")
    for part in reversed(parts):
        data = {part: data}
    return _Layer(f"--set {text}", data)


def _read_yaml(path: Path, extended_by: Path | None) -> Any:
    """The YAML in a file, which `extended_by` extends."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{extended_by}: {EXTENDS}: {path}: no such config file" if extended_by else
                        f"{path}: no such config file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; a YAML config is expected") from None
    return _parse_yaml(text, str(path))


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"{source}: not a config: nested too deeply") from None
    except ValueError as error:  # an impossible date or number
        raise UserError(f"{source}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{source}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


class Frozen(BaseModel):
    """An immutable record that refuses unknown fields, NaN and infinity; fields may be given by name or alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, allow_inf_nan=False,
                              ser_json_inf_nan="constants")  # a Pad may pad with -Infinity; null could not be read again

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Like pydantic's, but without cached properties, since they were computed from the old fields."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(copy).model_fields.keys():
            del copy.__dict__[name]
        return copy
