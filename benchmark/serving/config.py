"""What served_sets measures: sets of models, with the rates of their requests, under several ways of sharing a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from hase.utils.config import Config
from hase.utils.errors import UserError
from hase.utils.files import digest_of
from hase.utils.sharing_mode import SetSharing, SetSharingText
from hase.utils.timing import Floats

BATCH = "batch"  # the dimension by which requests are put together, as the exporters name it


class ServedModel(Config):
    """A model of a set, and the requests that come for it, each with one input.

    Attributes:
        model: the ONNX file, with a dynamic dimension `batch`; a bare name is also looked for among the exported models.
        dims: the sizes of its other dynamic dimensions.
        batch: the most requests that one run takes. Each run has this size, whether it is full or not.
        rate_per_s: requests per second, on average.
        slo_ms: the latency within which a request should be answered.
    """

    model: Path
    dims: dict[str, Annotated[int, Field(ge=1)]] = {}
    batch: int = Field(ge=1, le=1024)
    rate_per_s: float = Field(gt=0, le=1e5)
    slo_ms: float = Field(gt=0, le=1e6)

    @field_validator("dims")
    @classmethod
    def _without_batch(cls, dims: dict[str, int]) -> dict[str, int]:
        if BATCH in dims:
            raise ValueError("the size of batch has an entry of its own; leave it out")
        return dims


ModelSet = Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=16)]


class ServedSetsConfig(Config):
    """The config of served_sets.

    Attributes:
        device: `auto`, `cuda` or `cpu`.
        ways: of sharing it. One with a share for each model is measured for sets of so many models.
        seconds: for which requests are counted.
        warmup_s: for which they come before that.
        seed: of the arrivals.
        provider_options: of ONNX Runtime's CUDA provider.
        sets: the models that are served at the same time.
    """

    device: Literal["auto", "cuda", "cpu"] = "auto"
    ways: Annotated[tuple[SetSharingText, ...], Field(min_length=1)] = ("slices",)
    seconds: float = Field(5.0, gt=0, le=3600)
    warmup_s: float = Field(0.5, ge=0, le=600)
    seed: int = Field(0, ge=0)
    provider_options: dict[str, str] = {}
    sets: Annotated[tuple[ModelSet, ...], Field(min_length=1)]

    def check_on(self, device: str) -> None:
        """`UserError` if the device (`cpu` or `cuda`) can't be shared in these ways."""
        for way in self.ways if device == "cpu" else ():
            if SetSharing.parse(way).mps:
                raise UserError(f"sharing {way}: this is a way of sharing a GPU, and the target is a CPU; leave it out")


def arrivals_s(models: Sequence[ServedModel], number: int, config: ServedSetsConfig) -> Floats:
    """The moments at which requests arrive for one model of a set, ascending, in seconds from the beginning of the counted
    time (negative ones come in the warm-up): a Poisson process. It depends on nothing but the set, the model's place in it, and
    the config's times and seed, so each way of sharing gets the same requests."""
    of_set = int(digest_of([model.model_dump(mode="json") for model in models])[:16], 16)
    generator = np.random.default_rng([config.seed, of_set, number])
    count = generator.poisson(models[number].rate_per_s * (config.warmup_s + config.seconds))
    return np.sort(generator.uniform(-config.warmup_s, config.seconds, count))
