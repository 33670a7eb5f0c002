"""The models to learn from, besides torchvision's classification models: model_zoo/pool.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from utils.config import Config, read_config
from utils.errors import UserError
from utils.paths import ROOT

POOL_FILE = ROOT / "model_zoo" / "pool.yaml"
Collection = Literal["timm", "transformers", "torchvision", "other", "random"]
COLLECTIONS: tuple[Collection, ...] = get_args(Collection)
Families = dict[str, tuple[str, ...]]


class PoolConfig(Config):
    """See the comments in model_zoo/pool.yaml: for each collection, its families and the names of their models."""

    timm: Families = {}
    transformers: Families = {}
    torchvision: Families = {}
    other: Families = {}
    random: Families = {}

    def family_of(self, collection: Collection) -> dict[str, str]:
        """The family of each model of a collection by its name, in the file's order."""
        families: Families = getattr(self, collection)
        return {name: family for family, names in families.items() for name in names}

    def chosen(self, collection: Collection, names: list[str]) -> dict[str, str]:
        """`family_of` for some names, or for all where there are none. The family of a name that is not listed is its own.

        Raises:
            UserError: no names, and the pool lists none of this collection.
        """
        listed = self.family_of(collection)
        if not names and not listed:
            raise UserError(f"the pool lists no models of {collection}; name some with --model")
        return {name: listed.get(name, name) for name in names or listed}


def read_pool(path: Path | None = None) -> PoolConfig:
    """The pool in `path` (by default model_zoo/pool.yaml); `UserError` where it does not fit."""
    return read_config(path or POOL_FILE, PoolConfig)
