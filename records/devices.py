"""GPUs by their data sheets, and the environment of this machine.

The catalogue is records/gpus.yaml; a file of the same form adds other cards. Each peak is checked against SMs, units and clock,
to find figures with sparsity or of another card.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import Field, model_validator

from hase.utils.config import Frozen, read_config
from hase.utils.fingerprint import Target, machine, slug

CATALOGUE = Path(__file__).with_name("gpus.yaml")
GpuGeneration = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"]
Positive = Annotated[float, Field(gt=0)]
# Lanes of an SM for fp32 (white papers of the generations; CUDA C++ programming guide, "Arithmetic instructions"), by compute
# capability.
FP32_LANES = {6.0: 64, 6.1: 128, 7.0: 64, 7.5: 64, 8.0: 64, 8.6: 128, 8.7: 128, 8.9: 128, 9.0: 128, 10.0: 128, 10.3: 128,
              12.0: 128}
# Multiply-adds with fp16 that the tensor cores of an SM may do in a clock. A card's sheet may give half of it (GeForce, and
# where sums are in fp32).
TENSOR_FMAS = {7.0: 512, 7.5: 512, 8.0: 1024, 8.6: 512, 8.7: 1024, 8.9: 512, 9.0: 2048, 10.0: 4096, 10.3: 4096, 12.0: 512}
TENSOR_SHARES = (1.0, 0.5, 0.25)  # the possible shares of TENSOR_FMAS that a card has
TOLERANCE = 0.16  # relative, of a peak: sheets round, and tensor cores may run at another clock
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container; it holds "max" if there is no limit
UNITS_KIB = {"K": 1, "M": 1024, "G": 1024**2}


class GpuDataSheet(Frozen):
    """The data sheet of a graphics card."""

    name: str  # as the driver shows it
    aka: tuple[str, ...] = ()  # its short and other names, in lower case; the first is used as its `slug`
    generation: GpuGeneration
    compute_capability: Positive
    sms: Annotated[int, Field(gt=0)]
    boost_mhz: Positive
    memory_gib: Positive
    bandwidth_gb_s: Positive
    # l2_mb, power_w: L2 cache and power limit
    l2_mb: Positive
    power_w: Positive
    fp32_tflop_s: Positive  # peak of the CUDA cores, 10^12 operations a second
    # fp16_tflop_s, bf16_tflop_s, tf32_tflop_s: dense peaks of the tensor cores with sums in fp32; None without such cores
    fp16_tflop_s: Positive | None = None
    bf16_tflop_s: Positive | None = None
    tf32_tflop_s: Positive | None = None
    link: Literal["pcie3", "pcie4", "pcie5", "nvlink", "soc"]
    source: Annotated[str, Field(min_length=3)]

    @model_validator(mode="after")
    def _peaks_follow(self) -> GpuDataSheet:
        lanes, fmas = FP32_LANES.get(self.compute_capability), TENSOR_FMAS.get(self.compute_capability)
        if lanes is None:
            raise ValueError(f"compute capability {self.compute_capability:g} is not known")
        lane_tflop_s = 2e-6 * self.sms * self.boost_mhz  # with one multiply-add per SM and clock
        if not _near(self.fp32_tflop_s, lanes * lane_tflop_s):
            raise ValueError(f"fp32_tflop_s {self.fp32_tflop_s:g}: {self.sms} SMs × {lanes} lanes × {self.boost_mhz:g} MHz "
                             f"make {lanes * lane_tflop_s:.4g}")
        if (self.fp16_tflop_s is None) != (fmas is None):
            raise ValueError(f"fp16_tflop_s: compute capability {self.compute_capability:g} has "
                             f"{'tensor cores' if fmas else 'no tensor cores'}")
        if self.fp16_tflop_s is not None and fmas is not None and not any(
                _near(self.fp16_tflop_s, fmas * lane_tflop_s * share) for share in TENSOR_SHARES):
            raise ValueError(f"fp16_tflop_s {self.fp16_tflop_s:g}: {self.sms} SMs × {fmas} multiply-adds × "
                             f"{self.boost_mhz:g} MHz make {fmas * lane_tflop_s:.4g}, or half or a quarter of that; was it "
                             "given with sparsity?")
        return self

    @property
    def slug(self) -> str:
        """Its first short name, or its name as in a target."""
        return self.aka[0] if self.aka else slug(self.name)

    @property
    def tensor_share(self) -> float:
        """The share of the tensor cores' speed that is usable with sums in fp32: one half on GeForce cards, else mostly 1."""
        fmas = TENSOR_FMAS.get(self.compute_capability)
        if self.fp16_tflop_s is None or fmas is None:
            return 1.0
        whole_tflop_s = 2e-6 * fmas * self.sms * self.boost_mhz
        return next(share for share in TENSOR_SHARES if _near(self.fp16_tflop_s, whole_tflop_s * share))

    def with_tensor_peaks(self, factor: float) -> GpuDataSheet:
        """A copy whose tensor cores have `factor` times the peaks."""
        return self.model_copy(update={name: factor * peak for name in ("fp16_tflop_s", "bf16_tflop_s", "tf32_tflop_s")
                                       if (peak := getattr(self, name)) is not None})

    def tensor_tflop_s(self, dtype: str) -> float | None:
        """The tensor cores' peak for products in an element type; None if they don't compute it."""
        return {"float32": self.tf32_tflop_s, "float16": self.fp16_tflop_s, "bfloat16": self.bf16_tflop_s}.get(dtype)

    def peak_tflop_s(self, dtype: str) -> float:
        """The peak for products in an element type, as ONNX Runtime computes them: by tensor cores if they can (float32 as
        TF32), otherwise by CUDA cores."""
        return self.tensor_tflop_s(dtype) or self.fp32_tflop_s


def _near(stated: float, computed: float) -> bool:
    return abs(stated / computed - 1.0) <= TOLERANCE


class GpuCatalogue(Frozen):
    """The contents of a file of cards."""

    gpus: tuple[GpuDataSheet, ...]


def read_gpus(path: Path) -> tuple[GpuDataSheet, ...]:
    """Reads the cards in a file. Raises UserError if an entry is implausible."""
    return read_config(path, GpuCatalogue).gpus


@functools.cache
def catalogue() -> tuple[GpuDataSheet, ...]:
    """The cards that Hase knows."""
    return read_gpus(CATALOGUE)


def gpu_named(name: str) -> GpuDataSheet | None:
    """The card with a name as in a driver, a target or common use (`RTX 4090`, `rtx4090`, `4090`, `A100-80GB`); None if
    unknown."""
    wanted = slug(name)
    for gpu in catalogue():
        if wanted in (slug(gpu.name), *map(slug, gpu.aka)):
            return gpu
    return _gpus_by_loose_name().get(_loose_name(name))


def _loose_name(name: str) -> str:
    """A card's name as its letters and digits, without the words that people leave out."""
    return re.sub("[^a-z0-9]|nvidia|geforce|tesla|quadro|rtx", "", name.lower())


@functools.cache
def _gpus_by_loose_name() -> dict[str, GpuDataSheet]:
    """Cards by their loose names, with and without their memory (`a10080gb`); names that several cards have are left out."""
    named = [(f"{_loose_name(name)}{memory}", gpu) for gpu in catalogue() for name in (gpu.name, *gpu.aka)
             for memory in ("", f"{gpu.memory_gib:g}gb", f"{gpu.memory_gib:g}")]
    return {name: gpu for name, gpu in named if {gpu.name} == {other.name for other_name, other in named if other_name == name}}


def named_or_in_file(name: str) -> GpuDataSheet | None:
    """The card with a name, or the first one of a YAML file; None if the name is unknown."""
    return read_gpus(Path(name))[0] if name.endswith((".yaml", ".yml")) else gpu_named(name)


def gpu_memory_mib(name: str) -> float | None:
    """The memory of the card with this name in MiB; None if unknown."""
    gpu = gpu_named(name)
    return None if gpu is None else 1024.0 * gpu.memory_gib


class Environment(Frozen):
    """The processor and its limits, as features for estimators of several environments."""

    cpu: str
    threads: int
    cores: int  # available to the runtime's threads
    mhz: float  # the highest frequency, or the current one if that is unknown, or 0
    memory_limit_mib: float  # the smallest of the config's limit, the container's and the machine's memory
    # l1_kib, l2_kib, l3_kib: data caches of a core; 0 if unknown
    l1_kib: int = 0
    l2_kib: int = 0
    l3_kib: int = 0


def cache_kib(folder: Path = CACHES) -> dict[int, int]:
    """The sizes of the data caches by level, in KiB; empty if unknown."""
    sizes_kib = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in UNITS_KIB:
            sizes_kib[int(level)] = int(size[:-1]) * UNITS_KIB[size[-1]]
    return sizes_kib


def container_limit_mib(path: Path = MEMORY_LIMIT) -> float | None:
    """The memory limit of this container, or None."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else "max"
    return int(text) / 2**20 if text.isdigit() else None


def current_environment(target: Target, limit_mib: float = 0.0) -> Environment:
    """This machine's environment (for a GPU, its host's); `limit_mib` is the config's memory limit, 0 for none."""
    frequency, caches = psutil.cpu_freq(), cache_kib()
    limits = [psutil.virtual_memory().total / 2**20, container_limit_mib(), limit_mib or None]
    return Environment(
        cpu=machine("cpu").cpu, threads=target.threads, cores=target.cores or psutil.cpu_count() or 1,
        mhz=round(frequency.max or frequency.current, 1) if frequency else 0.0,
        memory_limit_mib=round(min(limit for limit in limits if limit is not None), 1),
        l1_kib=caches.get(1, 0), l2_kib=caches.get(2, 0), l3_kib=caches.get(3, 0))
