"""The base class of every record that Hase writes to a file and reads from one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable record. A field that it does not know is an error, and so is NaN or an infinite number; a field may be given
    by its name or by its alias."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True, allow_inf_nan=False,
                              ser_json_inf_nan="constants")  # a Pad may pad with -Infinity; null could not be read again
