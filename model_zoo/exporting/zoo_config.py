"""The exporters' configs, model_zoo/config.yaml and model_zoo/pool.yaml, and the files that they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from hase.utils.config import Config, read_config
from hase.utils.errors import UserError
from hase.utils.paths import ROOT

CONFIG_FILE = ROOT / "model_zoo" / "config.yaml"
SMALLEST_IMAGE = 32  # pixels a side; below, no classification model has anything left to pool

Dtype = Literal["fp32", "fp16"]
POOL_FILE = ROOT / "model_zoo" / "pool.yaml"


def _image_size(value: Any) -> Any:
    """`224` as (224, 224), `"224x320"` as (224, 320); pydantic refuses everything else."""
    sides = str(value).lower().split("x")
    if isinstance(value, (int, str)) and len(sides) <= 2 and all(side.isdigit() for side in sides):
        return int(sides[0]), int(sides[-1])
    if isinstance(value, (list, tuple)):
        return value
    raise ValueError("an image size is written 224 or 224x320 (height x width)")


Side = Annotated[int, Field(ge=SMALLEST_IMAGE, le=8192)]
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(_image_size)]
BatchSize = Annotated[int, Field(ge=1, le=65536)]


class ZooConfig(Config):
    """See the comments in model_zoo/config.yaml."""

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
        """Every file that the config asks for, once; the files of one model come one after another."""
        for model in dict.fromkeys(self.models):
            for dtype in dict.fromkeys(self.dtypes):
                if self.dynamic is True:
                    yield Export(model, dtype, None, self.image_sizes[0], self.batch_sizes[0])
                for place, size in enumerate(dict.fromkeys(self.image_sizes) if self.dynamic == "batch" else ()):
                    yield Export(model, dtype, None, size, self.batch_sizes[0], batch_alone=True, names_size=place > 0)
                for size in dict.fromkeys(self.image_sizes) if self.fixed else ():
                    for batch in dict.fromkeys(self.batch_sizes):
                        yield Export(model, dtype, batch, size)


@dataclass(frozen=True)
class Export:
    """One ONNX file to write.

    Attributes:
        batch: the batch size; None for a dynamic file.
        size: height and width in pixels. A dynamic file is traced with them.
        default_batch: of a dynamic file: the batch size that later phases use by default.
        batch_alone: of a dynamic file: only the batch is dynamic, even if the model allows more.
        names_size: of a dynamic file: whether its name contains the image size.
    """

    model: str
    dtype: Dtype
    batch: int | None
    size: tuple[int, int]
    default_batch: int = 1
    batch_alone: bool = False
    names_size: bool = False

    @property
    def default_dims(self) -> dict[str, int]:
        """The sizes that later phases use for a dynamic file by default: the first combination in the config."""
        return {"batch": self.default_batch, "height": self.size[0], "width": self.size[1]}

    @property
    def stem(self) -> str:
        """The file's name without `.onnx`."""
        size = f"_{self.size[0]}x{self.size[1]}"
        if self.batch is None:
            return (self.model if self.dtype == "fp32" else f"{self.model}_{self.dtype}") + (size if self.names_size else "")
        return f"{self.model}_{self.dtype}_b{self.batch}{size}"


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
