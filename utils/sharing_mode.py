"""How processes share a GPU (time slices, MPS, or instances with MIG), and how many there are."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator

from hase.utils.errors import UserError
from hase.utils.fingerprint import SharingMode, driver_fails, gpu_facts
from hase.utils.lazy import pynvml

THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # a process's share of the GPU's threads under MPS
ALL_THREADS = 100
SLICES = "slices"
_MPS = re.compile(r"mps(?::(\d{1,3}(?:/\d{1,3})*))?")
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # names the folder in which CUDA looks for MPS;
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # the default (NVIDIA's guide to MPS, "Environment Variables")
UNMEASURED = {  # by mode: why it is different, and how to switch it off
    "mps": ("kernels of several processes run at the same time", "stop its daemon: echo quit | nvidia-cuda-mps-control"),
    "mig": ("each instance has a part of the GPU to itself, and is another device than the whole",
            "switch it off: sudo nvidia-smi -mig 0"),
}


def sharing_mode() -> SharingMode:
    """How the first NVIDIA GPU is shared now. Not cached, since an MPS daemon may start or stop.

    Source: NVML API reference. MIG: `nvmlDeviceGetMigMode`. MPS: `nvmlDeviceGetMPSComputeRunningProcesses` lists a process on
    this GPU, or an MPS control daemon answers this process, since CUDA then uses MPS (manual page of nvidia-cuda-mps-control).
    Otherwise time slices, the driver's default.
    """
    try:
        if facts := gpu_facts():
            return _asked(pynvml.nvmlDeviceGetHandleByUUID(facts["uuid"]))
    except pynvml.NVMLError as error:
        raise driver_fails("sharing mode", error) from None
    raise UserError("sharing mode: no NVIDIA GPU that the driver can talk to on this machine (nvidia-smi should list one)")


def _asked(gpu: object) -> SharingMode:
    """The sharing mode of a GPU, from NVML and the MPS daemon."""
    with _where_known():
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            return "mig"
    return "mps" if _mps_clients(gpu) or mps_daemon_answers() else "time_slices"


def _where_known() -> contextlib.suppress:
    """A block that ignores NVML errors about features that the GPU or its driver lacks."""
    return contextlib.suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)


def _mps_clients(gpu: object) -> set[int]:
    """The ids of the processes that use a GPU through MPS."""
    with _where_known():
        return {process.pid for process in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)}
    return set()


def mps_daemon_answers() -> bool:
    """Whether an MPS control daemon listens where CUDA in this process would look for it.

    The socket file may outlive the daemon. So a datagram socket is connected to it: if a daemon listens, Linux refuses the
    connection as the wrong type, and the daemon does not notice.
    """
    if sys.platform != "linux":  # nor does MPS run elsewhere
        return False
    control = Path(os.environ.get(PIPE_DIRECTORY) or DEFAULT_PIPE_DIRECTORY) / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(str(control))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True


def other_processes(own: bool) -> int:
    """The number of other compute processes on the first NVIDIA GPU, including MPS's clients.

    Source: NVML API reference, `nvmlDeviceGetComputeRunningProcesses` and `nvmlDeviceGetMPSComputeRunningProcesses`. With
    `own`, this process uses the GPU too and must be listed.
    """
    facts = gpu_facts()
    if not facts:
        raise UserError("processes on the GPU: no NVIDIA GPU that the driver can talk to on this machine")
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(facts["uuid"])
        listed = _mps_clients(gpu) | {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    except pynvml.NVMLError as error:
        raise driver_fails("processes on the GPU", error) from None
    if own and os.getpid() not in listed:
        raise UserError("processes on the GPU: the driver does not list this process, so others may be missing as well; in a "
                        "container, share the host's process IDs (docker run --pid host)")
    return len(listed - {os.getpid()})


def check_sharing_mode(mode: SharingMode) -> None:
    """Refuses all modes but time slices, since no other was measured."""
    if mode in UNMEASURED:
        different, leave = UNMEASURED[mode]
        raise UserError(f"sharing mode {mode}: how processes wait for each other was measured in time slices only; under "
                        f"{mode.upper()} {different}; {leave}")


def _percents_in(text: str) -> tuple[int, ...]:
    """The percentages of the GPU's threads in `mps`, `mps:50` or `mps:25/75`; none for any other text."""
    found = _MPS.fullmatch(text)
    percents = tuple(map(int, (found[1] or str(ALL_THREADS)).split("/"))) if found else ()
    return percents if all(1 <= percent <= ALL_THREADS for percent in percents) else ()


class GpuSharing(NamedTuple):
    """How a measured process and its co-runners share a GPU: in time slices, or through MPS.

    `percent` is the share of the GPU's threads (1–100) for the measured process, `co_runner_percent` that of each co-runner.
    """

    mps: bool = False
    percent: int = ALL_THREADS
    co_runner_percent: int = ALL_THREADS

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `slices`, `mps`, `mps:50` (half of the threads per process) or `mps:25/75` (measured process, each co-runner).

        Raises ValueError for any other text.
        """
        if text == SLICES:
            return cls()
        percents = _percents_in(text)
        if len(percents) not in (1, 2):
            raise ValueError(f"{text!r} is no way of sharing a GPU: use {SLICES}, mps, mps:50 (per cent of the threads for "
                             "each process) or mps:25/75 (for what is measured, and for each co-runner)")
        return cls(True, percents[0], percents[-1])

    def co_runner_environment(self) -> Mapping[str, str]:
        """The additional environment variables of a co-runner."""
        return {THREADS: str(self.co_runner_percent)} if self.mps else {}


def _checked(text: str) -> str:
    GpuSharing.parse(text)
    return text


SharingText = Annotated[str, AfterValidator(_checked)]  # a way of sharing, as people write it


class SetSharing(NamedTuple):
    """How the models of a set, each in its own process, share a GPU.

    Attributes:
        mps: through MPS; otherwise in time slices or instances.
        percents: the share of the GPU's threads (1–100) per model, in the set's order, or one for all models.
        instances: the kind of MIG instance per model, in the set's order, or none. They can't be measured yet, so `parse` does
            not know them.
    """

    mps: bool = False
    percents: tuple[int, ...] = (ALL_THREADS,)
    instances: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `slices`, `mps`, `mps:50` (half of the threads per model) or `mps:25/25/50` (one share per model).

        Raises ValueError for any other text.
        """
        if text == SLICES:
            return cls()
        percents = _percents_in(text)
        if not percents:
            raise ValueError(f"{text!r} is no way of sharing a GPU: use {SLICES}, mps, mps:50 (per cent of the threads for "
                             "each model) or mps:25/25/50 (one share for each model of a set, in its order)")
        return cls(True, percents)

    def __str__(self) -> str:
        """The text that `parse` reads (instances excepted)."""
        if self.instances:
            return f"mig:{'/'.join(self.instances)}"
        if not self.mps:
            return SLICES
        return "mps" if self.percents == (ALL_THREADS,) else f"mps:{'/'.join(map(str, self.percents))}"

    def percent_of(self, model: int) -> int:
        """The share of the threads for a model of the set, by its index."""
        return self.percents[model if len(self.percents) > 1 else 0]

    def fits(self, models: int) -> bool:
        """Whether it has shares for this number of models."""
        return len(self.percents) in (1, models)

    def environments(self, models: int) -> list[dict[str, str]]:
        """The additional environment variables of each model's process."""
        return [{THREADS: str(self.percent_of(model))} if self.mps else {} for model in range(models)]


def share_of_this_process() -> SetSharing:
    """Sharing through MPS in which each process may use the same share of the GPU's threads as this one. Source: NVIDIA's guide
    to MPS, `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`: if unset, a client may use all threads."""
    text = os.environ.get(THREADS, str(ALL_THREADS))
    try:
        percent = float(text)  # MPS takes fractions, too
    except ValueError:
        percent = math.nan
    if not 0 < percent <= ALL_THREADS:
        raise UserError(f"{THREADS}={text}: a share of the GPU's threads is a percentage up to {ALL_THREADS}")
    return SetSharing(True, (max(1, round(percent)),))


def _checked_of_set(text: str) -> str:
    SetSharing.parse(text)
    return text


SetSharingText = Annotated[str, AfterValidator(_checked_of_set)]  # how the models of a set share a GPU, in user input
