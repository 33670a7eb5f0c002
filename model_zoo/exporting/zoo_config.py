"""The configs of the exporters (model_zoo/config.yaml and model_zoo/pool.yaml), and the files that they ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

CONFIG_FILE = ROOT / "model_zoo" / "config.yaml"
POOL_FILE = ROOT / "model_zoo" / "pool.yaml"
SMALLEST_IMAGE = 32  # pixels a side; classification models have nothing left to pool in smaller ones

Dtype = Literal["fp32", "fp16"]
Side = Annotated[int, Field(ge=SMALLEST_IMAGE, le=8192)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]
Collection = Literal["timm", "transformers", "torchvision", "other", "random"]
COLLECTIONS: tuple[Collection, ...] = get_args(Collection)
Families = dict[str, tuple[str, ...]]


def _image_size(value: Any) -> Any:
    """Parses `224` to (224, 224), and `"224x320"` to (224, 320). Pydantic checks the sides."""
    sides = str(value).lower().split("x")
    if isinstance(value, (int, str)) and len(sides) <= 2 and all(side.isdigit() for side in sides):
        return int(sides[0]), int(sides[-1])
    if isinstance(value, (list, tuple)):
        return value
    raise ValueError("an image size is written 224 or 224x320 (height x width)")


ImageSize = Annotated[tuple[Side, Side], BeforeValidator(_image_size)]


class ZooConfig(Config):
    """Which models to export, and in which sizes and types; see the comments in model_zoo/config.yaml."""

    models: tuple[str, ...] = Field(("resnet18",), min_length=1)
    image_sizes: tuple[ImageSize, ...] = Field(((224, 224), (320, 320), (512, 512)), min_length=1)
    batch_sizes: tuple[BatchSize, ...] = Field((16, 64, 128), min_length=1)
    dtypes: tuple[Dtype, ...] = Field(("fp32",), min_length=1)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dynamic: bool | Literal["batch"] = True
    fixed: bool = True

    @model_validator(mode="after")
    def _something_to_write(self) -> ZooConfig:
        if not (self.dynamic or self.fixed):
            raise ValueError("dynamic and fixed are both false: nothing would be written")
        return self

    def exports(self) -> Iterator[Export]:
        """Every file that the config asks for, once; files of one model are consecutive."""
        sizes, batches = dict.fromkeys(self.image_sizes), dict.fromkeys(self.batch_sizes)
        for model, dtype in itertools.product(dict.fromkeys(self.models), dict.fromkeys(self.dtypes)):
            if self.dynamic is True:
                yield Export(model, dtype, None, self.image_sizes[0], self.batch_sizes[0])
            if self.dynamic == "batch":
                for index, size in enumerate(sizes):
                    yield Export(model, dtype, None, size, self.batch_sizes[0], batch_alone=True, names_size=index > 0)
            if self.fixed:
                for size, batch in itertools.product(sizes, batches):
                    yield Export(model, dtype, batch, size)


@dataclass(frozen=True)
class Export:
    """One ONNX file to write."""

    model: str
    dtype: Dtype
    batch: int | None  # None for a dynamic file
    size: tuple[int, int]  # height and width in pixels; a dynamic file is traced with them
    default_batch: int = 1  # of a dynamic file, for later phases
    batch_alone: bool = False  # only the batch is dynamic, even if the model allows more
    names_size: bool = False  # the name of a dynamic file contains the image size

    @property
    def default_dims(self) -> dict[str, int]:
        """The sizes of a dynamic file that later phases use by default: the first ones in the config."""
        return {"batch": self.default_batch, "height": self.size[0], "width": self.size[1]}

    @property
    def stem(self) -> str:
        """The file's name without `.onnx`."""
        size = f"_{self.size[0]}x{self.size[1]}"
        if self.batch is None:
            return (self.model if self.dtype == "fp32" else f"{self.model}_{self.dtype}") + (size if self.names_size else "")
        return f"{self.model}_{self.dtype}_b{self.batch}{size}"


class PoolConfig(Config):
    """The models of each collection, by family; see the comments in model_zoo/pool.yaml."""

    timm: Families = {}
    transformers: Families = {}
    torchvision: Families = {}
    other: Families = {}
    random: Families = {}

    def family_of(self, collection: Collection) -> dict[str, str]:
        """The family of each model of a collection, in the file's order."""
        families: Families = getattr(self, collection)
        return {name: family for family, names in families.items() for name in names}

    def chosen(self, collection: Collection, names: list[str]) -> dict[str, str]:
        """The family of each of `names`, or of all models if there are none. An unlisted model is its own family."""
        listed = self.family_of(collection)
        if not names and not listed:
            raise UserError(f"the pool lists no models of {collection}; name some with --model")
        return {name: listed.get(name, name) for name in names or listed}


def read_pool(path: Path = POOL_FILE) -> PoolConfig:
    """Reads and validates the pool in `path`."""
    return read_config(path, PoolConfig)
