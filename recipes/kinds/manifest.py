"""The list of models that `make_models.py` writes and the other scripts of this folder read."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hase.utils.files import read_record

MANIFEST = "kinds.json"
MANIFEST_VERSION = 1


class MadeModel(BaseModel):
    """One model file.

    Attributes:
        name: of the model; unique.
        file: its name in the manifest's folder.
        kind: of model; groups the table.
        opset: of ONNX's own domain.
        dims: sizes of its dynamic dimensions by name; empty if all are fixed.
        tiny: it takes far less than a millisecond on purpose.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    file: str
    kind: str
    opset: int
    dims: dict[str, int] = {}
    tiny: bool = False

    @property
    def dim_options(self) -> list[str]:
        """The sizes as options of Hase's commands."""
        return [word for name, size in self.dims.items() for word in ("--dim", f"{name}={size}")]


class Manifest(BaseModel):
    """Every model of one folder; version 1 is the first.

    Attributes:
        versions: of the packages that made them, by name.
        models: those that were written.
        skipped: why the others were not, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = MANIFEST_VERSION
    versions: dict[str, str]
    models: tuple[MadeModel, ...]
    skipped: dict[str, str] = {}

    def chosen(self, names: list[str]) -> list[MadeModel]:
        """The models with these names, in the manifest's order; all if no name is given."""
        return [model for model in self.models if not names or model.name in names]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises:
        UserError: it is missing, damaged, or of another version.
    """
    return read_record(folder / MANIFEST, Manifest, MANIFEST_VERSION, f"python recipes/kinds/make_models.py --out {folder}")
