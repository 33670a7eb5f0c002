"""How the processes on a GPU share it: in time slices, through MPS, or each in an instance of its own (MIG)."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

from utils.errors import UserError
from utils.fingerprint import SharingMode, driver_fails, gpu_facts
from utils.lazy import pynvml

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"  # names the folder in which CUDA looks for MPS …
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # … which otherwise is this one (NVIDIA's guide to MPS, "Environment Variables")
UNMEASURED = {  # what is so different, and how to leave it
    "mps": ("kernels of several processes run at the same time", "stop its daemon: echo quit | nvidia-cuda-mps-control"),
    "mig": ("each instance has a part of the GPU to itself, and is another device than the whole",
            "switch it off: sudo nvidia-smi -mig 0"),
}


def sharing_mode() -> SharingMode:
    """How the first NVIDIA GPU is shared at this moment; looked up anew each time, since a daemon may start or stop.

    Source: NVML API reference. MIG is on by `nvmlDeviceGetMigMode`. MPS is on where `nvmlDeviceGetMPSComputeRunningProcesses`
    lists a process on this GPU, or where an MPS control daemon answers to this process: CUDA then runs it through MPS
    too (manual page of nvidia-cuda-mps-control). Neither: time slices, the driver's default.

    Raises:
        UserError: there is no NVIDIA GPU, or its driver fails.
    """
    try:
        if facts := gpu_facts():
            return _asked(pynvml.nvmlDeviceGetHandleByUUID(facts["uuid"]))
    except pynvml.NVMLError as error:
        raise driver_fails("sharing mode", error) from None
    raise UserError("sharing mode: no NVIDIA GPU that the driver can talk to on this machine (nvidia-smi should list one)")


def _asked(gpu: object) -> SharingMode:
    """What NVML and the MPS daemon say of a GPU."""
    unknown_here = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)  # to this GPU or driver: it has none
    try:
        if pynvml.nvmlDeviceGetMigMode(gpu)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            return "mig"
    except unknown_here:
        pass
    try:
        clients = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(gpu)
    except unknown_here:
        clients = []
    return "mps" if clients or mps_daemon_answers() else "time_slices"


def mps_daemon_answers() -> bool:
    """Whether an MPS control daemon listens where CUDA would look for it from this process.

    Its socket stays behind when it ends, so the file alone tells nothing. A datagram socket is connected to it, which Linux
    refuses as the wrong type where somebody listens, and so the daemon never notices.
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


def check_sharing_mode(mode: SharingMode) -> None:
    """Refuses what was not measured: anything but time slices.

    Raises:
        UserError: `mode` is another.
    """
    if mode in UNMEASURED:
        different, leave = UNMEASURED[mode]
        raise UserError(f"sharing mode {mode}: how processes wait for each other was measured in time slices only; under "
                        f"{mode.upper()} {different}; {leave}")
