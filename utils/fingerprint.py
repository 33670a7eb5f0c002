"""Identifies where a number comes from: the flavour of the graph, the target, and the machine on which it was measured."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import Field

from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.lazy import pynvml
from hase.utils.paths import FileNamePart

CUDNN = "nvidia-cudnn-cu13"  # the package that contains it
WITHOUT_GPU = "HASE_WITHOUT_GPU"  # in the environment: act like a machine without a GPU
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # in the environment: the GPUs that CUDA may use, by index or UUID
MACHINE_ID = Path("/etc/machine-id")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux makes a new one at each start
SharingMode = Literal["time_slices", "mps", "mig"]  # how processes share a GPU; the first one for a CPU
DEFAULT_RUNTIME = "ort"
FROM_SHEET = "-from-data-sheet"  # suffix of the device name of a card known only by its data sheet


class Flavour(Frozen):
    """What determines an optimised graph: two machines with one flavour get the same graph of a model."""

    device: FileNamePart
    runtime: FileNamePart = DEFAULT_RUNTIME  # a name in the table of runtimes/__init__.py
    runtime_version: FileNamePart  # major and minor, e.g. `1.31`
    optimization: FileNamePart = "all"  # the runtime's graph optimisation level
    instruction_set: FileNamePart = ""  # the CPU's vector width class, which sets the block size of NCHWc layouts; "" on CUDA

    @property
    def name(self) -> str:
        parts = [self.device, self.instruction_set, f"{self.runtime}{self.runtime_version}", self.optimization]
        return "-".join(part for part in parts if part)


class Machine(Frozen):
    """The device and software of one measurement."""

    device_name: str
    uuid: str
    driver: str
    clocks: str
    cpu: str
    cores: int
    memory_gib: float
    versions: dict[str, str]


class Target(Frozen):
    """What a predictor is valid for: device model, flavour, provider options, threads and sharing mode. Only time slices were
    measured; other sharing modes are refused where they matter (utils/sharing_mode.py)."""

    device_name: str
    flavour: Flavour
    provider_options: dict[str, str] = {}
    threads: int = 0  # intra-op threads; 0 on CUDA
    cores: int = Field(0, exclude_if=lambda cores: not cores)  # number of cores that the threads are pinned to; 0: not pinned
    sharing: SharingMode = "time_slices"

    @property
    def name(self) -> str:
        parts = [slug(self.device_name)]
        if self.flavour.device == "cpu":
            parts.append(f"{self.threads}t" + (f"{self.cores}c" if self.cores else ""))
        return "-".join([*parts, self.flavour.name])


def slug(text: str) -> str:
    """`text` in lower case; everything between letters, digits and dots becomes one dash."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU that its driver can talk to."""
    return bool(gpu_facts())


def _nvml_library_exists() -> bool:
    """Whether pynvml can find the driver's library, without importing pynvml, which takes 0.1 s. True if not on Linux."""
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # the name that pynvml loads
    except OSError:
        return False
    return True


@functools.cache
def gpu_facts() -> dict[str, str]:
    """Name, uuid, driver and clocks of CUDA's first NVIDIA GPU; empty without one, or if WITHOUT_GPU is set."""
    if os.environ.get(WITHOUT_GPU):
        return {}
    if "pynvml" not in sys.modules and not _nvml_library_exists():
        return {}
    try:
        pynvml.nvmlInit()
        handle = _first_visible_gpu()
    except pynvml.NVMLError:
        return {}
    if handle is None:
        return {}
    clocks = [pynvml.nvmlDeviceGetMaxClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "uuid": pynvml.nvmlDeviceGetUUID(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "clocks": f"SM {clocks[0]} MHz, memory {clocks[1]} MHz at most",
    }


def _first_visible_gpu() -> Any:
    """NVML's handle of the first GPU that VISIBLE_GPUS allows, or None. NVML itself ignores the variable."""
    first = os.environ.get(VISIBLE_GPUS, "0").split(",")[0].strip()
    if first.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if first and pynvml.nvmlDeviceGetUUID(handle).startswith(first):  # CUDA accepts shortened UUIDs, too
            return handle
    return pynvml.nvmlDeviceGetHandleByUUID(first) if first.startswith("MIG-") else None


def driver_fails(whose: str, error: Exception) -> UserError:
    """The error for a failed NVML call, for example if the GPU was lost; its message begins with `whose`."""
    return UserError(f"{whose}: the driver does not answer ({error}); nvidia-smi should list the GPU")


@functools.cache
def _cpu_info() -> tuple[str, frozenset[str]]:
    """The CPU's model name and its feature flags."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = frozenset(value.split())
                break
    return name, flags


def cpu_name() -> str:
    """The CPU's model name."""
    return _cpu_info()[0]


def physical_cores() -> int:
    """The number of the CPU's cores, without hyperthreads, that this process may use."""
    cores = psutil.cpu_count(logical=False) or 1
    return min(cores, allowed_cores() or cores)


def allowed_cores() -> int:
    """How many logical cores this process is restricted to (e.g. by taskset); 0 if it may use all, or if unknown."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return allowed if allowed < (psutil.cpu_count() or 1) else 0


def instruction_set() -> str:
    """The widest vector class of this CPU for which ORT has dedicated CPU kernels."""
    flags = _cpu_info()[1]
    for name, flag in (("avx512", "avx512f"), ("avx2", "avx2"), ("avx", "avx"), ("neon", "asimd")):
        if flag in flags:
            return name
    return platform.machine()


def package_version(*names: str) -> str:
    """The version of the first installed distribution among `names`, or ""."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def ort_version() -> str:
    """ONNX Runtime's full version, from its package metadata if possible, without importing it."""
    import_path = None
    try:
        spec = find_spec("onnxruntime")
        import_path = Path(spec.origin).parent if spec and spec.origin else None
    except (ImportError, ValueError):
        pass
    if import_path is not None:  # the package that `import` finds is the one that runs
        text = (import_path / "__init__.py").read_text(encoding="utf-8")
        match = re.search(r'__version__ = "([^"]+)"', text)
        if match:
            return match.group(1)
    return package_version("onnxruntime-gpu", "onnxruntime")


def resolve_device(device: str) -> str:
    """The device, `cuda` or `cpu`, that `auto`, `cuda` or `cpu` means on this machine."""
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if device == "cuda" and not has_cuda():
        raise UserError("device cuda: no NVIDIA GPU that the driver can talk to on this machine "
                        "(nvidia-smi should list one); use --device cpu or auto")
    return device


def graph_device(device: str) -> str:
    """The device whose graph `auto`, `cuda` or `cpu` means. CUDA graphs can also be derived without a GPU."""
    return resolve_device(device) if device == "auto" else device


def boot_id() -> str:
    """An identifier of the operating system's current run; a restart changes it."""
    return BOOT_ID.read_text(encoding="utf-8").strip() if BOOT_ID.exists() else f"since {psutil.boot_time():.0f}"


def machine(device: str) -> Machine:
    """This machine, described as its `cpu` or its `cuda` device."""
    cpu = cpu_name()
    gpu = gpu_facts() if device == "cuda" else {}
    identity = MACHINE_ID.read_text(encoding="utf-8").strip() if MACHINE_ID.exists() else ""  # may exist and be empty
    frequency = psutil.cpu_freq()
    return Machine(
        device_name=gpu.get("name", cpu), uuid=gpu.get("uuid") or identity or platform.node() or "unknown",
        driver=gpu.get("driver", platform.release()),
        clocks=gpu.get("clocks") or (f"{frequency.max or frequency.current:.0f} MHz" if frequency else "unknown"),
        cpu=cpu, cores=psutil.cpu_count() or 1, memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        versions={
            "python": platform.python_version(), "onnxruntime": ort_version(), "onnx": package_version("onnx"),
            "torch": package_version("torch"), "cudnn": package_version(CUDNN),
        },
    )
