"""Finds and describes how processes share a GPU: in time slices, through MPS, or in MIG instances."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
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
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # the variable with the folder in which CUDA looks for MPS,
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # and its default (NVIDIA's guide to MPS, "Environment Variables")
UNMEASURED = {  # by mode: how it differs from time slices, and how to switch it off
    "mps": ("kernels of several processes run at the same time", "stop its daemon: echo quit | nvidia-cuda-mps-control"),
    "mig": ("each instance has a part of the GPU to itself, and is another device than the whole",
            "switch it off: sudo nvidia-smi -mig 0"),
}


def sharing_mode() -> SharingMode:
    """Finds how the first NVIDIA GPU is shared now. Not cached, since an MPS daemon may start or stop.

    Source: NVML API reference. MIG: `nvmlDeviceGetMigMode`. MPS: `nvmlDeviceGetMPSComputeRunningProcesses` lists a process on
    this GPU, or an MPS control daemon answers this process, since CUDA then uses MPS (manual page of nvidia-cuda-mps-control).
    Otherwise time slices, the driver's default.
    """
    with _first_gpu("sharing mode") as gpu:
        with _ignore_unsupported():
            if pynvml.nvmlDeviceGetMigMode(gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
                return "mig"
        return "mps" if _mps_clients(gpu) or mps_daemon_answers() else "time_slices"


@contextlib.contextmanager
def _first_gpu(purpose: str) -> Iterator[object]:
    """NVML's handle of the first NVIDIA GPU, in a block whose NVML errors become errors for users."""
    facts = gpu_facts()
    if not facts:
        raise UserError(f"{purpose}: no NVIDIA GPU that the driver can talk to on this machine (nvidia-smi should list one)")
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(facts["uuid"])
    except pynvml.NVMLError as error:
        raise driver_fails(purpose, error) from None


def _ignore_unsupported() -> contextlib.suppress:
    """A block that ignores NVML errors about features that the GPU or its driver lacks."""
    return contextlib.suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)


def _mps_clients(gpu: object) -> set[int]:
    """The ids of the processes that use a GPU through MPS."""
    with _ignore_unsupported():
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(control))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True


def other_processes(own: bool) -> int:
    """Counts the other compute processes on the first NVIDIA GPU, including MPS's clients.

    Source: NVML API reference, `nvmlDeviceGetComputeRunningProcesses` and `nvmlDeviceGetMPSComputeRunningProcesses`. With
    `own`, this process uses the GPU too and must be listed.
    """
    with _first_gpu("processes on the GPU") as gpu:
        listed = _mps_clients(gpu) | {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    if own and os.getpid() not in listed:
        raise UserError("processes on the GPU: the driver does not list this process, so others may be missing as well; in a "
                        "container, share the host's process IDs (docker run --pid host)")
    return len(listed - {os.getpid()})


def check_sharing_mode(mode: SharingMode) -> None:
    """Refuses all modes but time slices, since no other was measured."""
    if mode in UNMEASURED:
        difference, remedy = UNMEASURED[mode]
        raise UserError(f"sharing mode {mode}: how processes wait for each other was measured in time slices only; under "
                        f"{mode.upper()} {difference}; {remedy}")


def _mps_percents(text: str) -> tuple[int, ...]:
    """Parses the percentages of the GPU's threads in `mps`, `mps:50` or `mps:25/75`; none for any other text."""
    found = _MPS.fullmatch(text)
    percents = tuple(map(int, (found[1] or str(ALL_THREADS)).split("/"))) if found else ()
    return percents if all(1 <= percent <= ALL_THREADS for percent in percents) else ()


class GpuSharing(NamedTuple):
    """How a measured process and its co-runners share a GPU: in time slices, or through MPS. `percent` is the share of the
    GPU's threads (1–100) for the measured process, `co_runner_percent` that of each co-runner."""

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
        percents = _mps_percents(text)
        if len(percents) not in (1, 2):
            raise ValueError(f"{text!r} is no way of sharing a GPU: use {SLICES}, mps, mps:50 (per cent of the threads for "
                             "each process) or mps:25/75 (for what is measured, and for each co-runner)")
        return cls(True, percents[0], percents[-1])

    def co_runner_environment(self) -> Mapping[str, str]:
        """Environment variables to add for a co-runner."""
        return {THREADS: str(self.co_runner_percent)} if self.mps else {}


class SetSharing(NamedTuple):
    """How the models of a set share a GPU, each in a process of its own. Its tuples are in the order of the set."""

    mps: bool = False  # through MPS; else in time slices or instances
    percents: tuple[int, ...] = (ALL_THREADS,)  # each model's share of the GPU's threads (1–100), or one for all models
    instances: tuple[str, ...] = ()  # the kind of MIG instance per model; `parse` knows none, since none was measured

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `slices`, `mps`, `mps:50` (half of the threads per model) or `mps:25/25/50` (one share per model).

        Raises ValueError for any other text.
        """
        if text == SLICES:
            return cls()
        percents = _mps_percents(text)
        if not percents:
            raise ValueError(f"{text!r} is no way of sharing a GPU: use {SLICES}, mps, mps:50 (per cent of the threads for "
                             "each model) or mps:25/25/50 (one share for each model of a set, in its order)")
        return cls(True, percents)

    def __str__(self) -> str:
        """The text that `parse` reads; instances as `mig:…`, which it does not read."""
        if self.instances:
            return f"mig:{'/'.join(self.instances)}"
        if not self.mps:
            return SLICES
        return "mps" if self.percents == (ALL_THREADS,) else f"mps:{'/'.join(map(str, self.percents))}"

    def percent_of(self, model: int) -> int:
        """The share of the threads (1–100) for the model with this index."""
        return self.percents[model if len(self.percents) > 1 else 0]

    def fits(self, models: int) -> bool:
        """Whether it has shares for this number of models."""
        return len(self.percents) in (1, models)

    def environments(self, models: int) -> list[dict[str, str]]:
        """Environment variables to add for each model's process."""
        return [{THREADS: str(self.percent_of(model))} if self.mps else {} for model in range(models)]


def share_of_this_process() -> SetSharing:
    """Sharing through MPS where each process may use the same share of the GPU's threads as this one. Source: NVIDIA's guide to
    MPS, `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`: if unset, a client may use all threads."""
    text = os.environ.get(THREADS, str(ALL_THREADS))
    try:
        percent = float(text)  # MPS takes fractions, too
    except ValueError:
        percent = math.nan
    if not 0 < percent <= ALL_THREADS:
        raise UserError(f"{THREADS}={text}: a share of the GPU's threads is a percentage up to {ALL_THREADS}")
    return SetSharing(True, (max(1, round(percent)),))


def _parses_as(sharing: type[GpuSharing | SetSharing]) -> AfterValidator:
    """Makes pydantic refuse a text that the class cannot parse."""
    def check(text: str) -> str:
        sharing.parse(text)
        return text

    return AfterValidator(check)


SharingText = Annotated[str, _parses_as(GpuSharing)]  # in configs: how a process and its co-runners share a GPU
SetSharingText = Annotated[str, _parses_as(SetSharing)]  # in configs: how the models of a set share a GPU
