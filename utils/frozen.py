"""The base class of every record that Hase writes to a file and reads from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable record. A field that it does not know is an error, and so is NaN or an infinite number; a field may be given
    by its name or by its alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, allow_inf_nan=False,
                              ser_json_inf_nan="constants")  # a Pad may pad with -Infinity; null could not be read again

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but without cached properties: what they hold was computed from other fields."""
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(copy).model_fields.keys():
            del copy.__dict__[name]
        return copy
