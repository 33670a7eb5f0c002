"""GPUs by their data sheets: what decides how long a kernel takes on a card that nobody measured.

The catalogue is records/gpus.yaml; a file of the same form adds cards of one's own. A record is checked: a peak is what SMs,
units and clock make, so that a figure with sparsity, or of another card, is found.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from hase.utils.config import read_config
from hase.utils.fingerprint import slug
from hase.utils.frozen import Frozen

CATALOGUE = Path(__file__).with_name("gpus.yaml")
Generation = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]
Positive = Annotated[float, Field(gt=0)]
# Lanes of an SM for fp32 (white papers of the generations; CUDA C++ programming guide, "Arithmetic instructions"), by compute
# capability.
FP32_LANES = {6.0: 64, 6.1: 128, 7.0: 64, 7.5: 64, 8.0: 64, 8.6: 128, 8.7: 128, 8.9: 128, 9.0: 128, 10.0: 128, 10.3: 128,
              12.0: 128}
# Multiply-adds with fp16 that the tensor cores of an SM may do in a clock. A card's sheet may give half of it (GeForce, and
# where sums are in fp32).
TENSOR_FMAS = {7.0: 512, 7.5: 512, 8.0: 1024, 8.6: 512, 8.7: 1024, 8.9: 512, 9.0: 2048, 10.0: 4096, 10.3: 4096, 12.0: 512}
SHARES = (1.0, 0.5, 0.25)  # of the tensor cores' peak that a card may have
TOLERANCE = 0.16  # of a peak: sheets round, and tensor cores may run at another clock than the one that is given


class Gpu(Frozen):
    """One card.

    Attributes:
        name: as the driver shows it.
        aka: other names, in lower case.
        compute_capability: of CUDA.
        sms, boost_mhz: streaming multiprocessors, and their clock.
        memory_gib, bandwidth_gb_s, l2_mb, power_w: memory, its bandwidth, the second cache, and the power limit.
        fp32_tflop_s: peak of the CUDA cores, 10^12 operations a second.
        fp16_tflop_s, bf16_tflop_s, tf32_tflop_s: dense peaks of the tensor cores with sums in fp32; None: it has none for it.
        link: to the host.
        source: where the figures come from.
    """

    name: str
    aka: tuple[str, ...] = ()
    generation: Generation
    compute_capability: Positive
    sms: Annotated[int, Field(gt=0)]
    boost_mhz: Positive
    memory_gib: Positive
    bandwidth_gb_s: Positive
    l2_mb: Positive
    power_w: Positive
    fp32_tflop_s: Positive
    fp16_tflop_s: Positive | None = None
    bf16_tflop_s: Positive | None = None
    tf32_tflop_s: Positive | None = None
    link: Literal["pcie3", "pcie4", "pcie5", "nvlink", "soc"]
    source: Annotated[str, Field(min_length=3)]

    @model_validator(mode="after")
    def _peaks_follow(self) -> Gpu:
        lanes, fmas = FP32_LANES.get(self.compute_capability), TENSOR_FMAS.get(self.compute_capability)
        if lanes is None:
            raise ValueError(f"compute capability {self.compute_capability:g} is not known")
        tflop_s = 2e-6 * self.sms * self.boost_mhz
        if not _near(self.fp32_tflop_s, lanes * tflop_s):
            raise ValueError(f"fp32_tflop_s {self.fp32_tflop_s:g}: {self.sms} SMs × {lanes} lanes × {self.boost_mhz:g} MHz "
                             f"make {lanes * tflop_s:.4g}")
        if (self.fp16_tflop_s is None) != (fmas is None):
            raise ValueError(f"fp16_tflop_s: compute capability {self.compute_capability:g} has "
                             f"{'tensor cores' if fmas else 'no tensor cores'}")
        if self.fp16_tflop_s is not None and fmas is not None and not any(
                _near(self.fp16_tflop_s, fmas * tflop_s * share) for share in SHARES):
            raise ValueError(f"fp16_tflop_s {self.fp16_tflop_s:g}: {self.sms} SMs × {fmas} multiply-adds × "
                             f"{self.boost_mhz:g} MHz make {fmas * tflop_s:.4g}, or half or a quarter of that; was it given "
                             "with sparsity?")
        return self

    @property
    def slug(self) -> str:
        """Its first short name, or its name as a target has it."""
        return self.aka[0] if self.aka else slug(self.name)

    @property
    def tensor_share(self) -> float:
        """The share of what its tensor cores could do that the card lets them do with sums in fp32: half on GeForce cards; 1
        where it has none."""
        fmas = TENSOR_FMAS.get(self.compute_capability)
        if self.fp16_tflop_s is None or fmas is None:
            return 1.0
        whole_tflop_s = 2e-6 * fmas * self.sms * self.boost_mhz
        return next(share for share in SHARES if _near(self.fp16_tflop_s, whole_tflop_s * share))

    def with_tensor_peaks(self, times: float) -> Gpu:
        """The card with `times` the peaks of its tensor cores."""
        return self.model_copy(update={name: times * peak for name in ("fp16_tflop_s", "bf16_tflop_s", "tf32_tflop_s")
                                       if (peak := getattr(self, name)) is not None})

    def tensor_tflop_s(self, dtype: str) -> float | None:
        """The peak of the tensor cores for products in an element type; None where they don't compute them."""
        return {"float32": self.tf32_tflop_s, "float16": self.fp16_tflop_s, "bfloat16": self.bf16_tflop_s}.get(dtype)

    def peak_tflop_s(self, dtype: str) -> float:
        """The peak of products in an element type, as ONNX Runtime computes them: TF32 for float32 where the card has it,
        tensor cores for half precision, and otherwise the CUDA cores."""
        return self.tensor_tflop_s(dtype) or self.fp32_tflop_s


def _near(given: float, made: float) -> bool:
    return abs(given / made - 1.0) <= TOLERANCE


class Catalogue(Frozen):
    """A file of cards."""

    gpus: tuple[Gpu, ...]


def read_gpus(path: Path) -> tuple[Gpu, ...]:
    """The cards in a file.

    Raises:
        UserError: there is no such file, or a record in it can't be right.
    """
    return read_config(path, Catalogue).gpus


@functools.cache
def catalogue() -> tuple[Gpu, ...]:
    """The cards that Hase knows."""
    return read_gpus(CATALOGUE)


def gpu_named(name: str, further: Sequence[Gpu] = ()) -> Gpu | None:
    """The card with a name (as the driver, a target or people write it), one's own first; None where there is none."""
    wanted = slug(name)
    return next((gpu for gpu in (*further, *catalogue()) if wanted in (slug(gpu.name), *map(slug, gpu.aka))), None)


def named_or_in_file(name: str) -> Gpu | None:
    """The card with a name, or the first one of a YAML file; None where nobody knows the name.

    Raises:
        UserError: the file can't be read.
    """
    return read_gpus(Path(name))[0] if name.endswith((".yaml", ".yml")) else gpu_named(name)


def gpu_memory_mib(name: str) -> float | None:
    """The memory of the card with this name, MiB; None where it is not known."""
    gpu = gpu_named(name)
    return None if gpu is None else 1024.0 * gpu.memory_gib
