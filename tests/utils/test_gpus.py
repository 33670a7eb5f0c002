"""How a GPU is shared, and which one CUDA takes: with a made-up NVML, since there may be no GPU, and real sockets for MPS."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hase.utils import fingerprint, sharing_mode
from hase.utils.errors import UserError
from hase.utils.fingerprint import SharingMode
from hase.utils.sharing_mode import PIPE_DIRECTORY, check_sharing_mode, other_processes

MIG_OFF, MIG_ON = 0, 1


class FakeNvml(SimpleNamespace):
    """A pretended pynvml with one GPU; `mig` is None on a GPU that has no MIG, `mps_clients` with an old driver."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_FunctionNotFound = type("NVMLError_FunctionNotFound", (NVMLError,), {})
    NVML_DEVICE_MIG_ENABLE = MIG_ON

    def __init__(self) -> None:
        super().__init__(mig=MIG_OFF, mps_clients=[], users=[])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-0"
        return uuid

    def nvmlDeviceGetMigMode(self, gpu: str) -> list[int]:
        if self.mig is None:
            raise self.NVMLError_NotSupported
        return [self.mig, MIG_OFF]  # now, and after the next reset

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.users]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: str) -> list[SimpleNamespace]:
        if self.mps_clients is None:
            raise self.NVMLError_FunctionNotFound
        return self.mps_clients


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    """The pretended NVML, on a machine where no MPS daemon runs."""
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(sharing_mode, "gpu_facts", lambda: {"uuid": "GPU-0"})
    monkeypatch.setenv(PIPE_DIRECTORY, str(tmp_path))
    return made


@pytest.mark.parametrize(("mig", "clients", "mode"), [
    (MIG_OFF, [], "time_slices"), (None, [], "time_slices"), (MIG_ON, [], "mig"),
    (MIG_OFF, [SimpleNamespace(pid=7)], "mps"), (None, None, "time_slices"),
])
def test_modes_by_nvml(fake: FakeNvml, mig: int | None, clients: list[SimpleNamespace] | None, mode: str) -> None:
    fake.mig, fake.mps_clients = mig, clients
    assert sharing_mode.sharing_mode() == mode


def test_a_daemon_that_answers_and_then_has_ended(fake: FakeNvml, tmp_path: Path) -> None:
    """The next process that opens the GPU uses it, even if none has yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.bind(str(tmp_path / "control"))
        daemon.listen(1)
        assert sharing_mode.sharing_mode() == "mps"
        daemon.setblocking(False)
        with pytest.raises(BlockingIOError):  # it was not disturbed
            daemon.accept()
    assert (tmp_path / "control").is_socket()
    assert sharing_mode.sharing_mode() == "time_slices"


def test_an_error_of_nvml_does_not_mean_time_slices(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "nvmlDeviceGetMigMode", Mock(side_effect=FakeNvml.NVMLError("GPU is lost")))
    with pytest.raises(UserError, match=r"does not answer \(GPU is lost\); nvidia-smi"):
        sharing_mode.sharing_mode()


def test_processes_on_the_gpu(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this one, and each once; a list that lacks this one although it uses the GPU can't be right."""
    assert other_processes(own=False) == 0
    fake.users, fake.mps_clients = [os.getpid(), 7, 8], [SimpleNamespace(pid=8), SimpleNamespace(pid=9)]
    assert (other_processes(own=False), other_processes(own=True)) == (3, 3)
    fake.users, fake.mps_clients = [7, 8], None  # an old driver
    assert other_processes(own=False) == 2
    with pytest.raises(UserError, match=r"does not list this process.*--pid host"):
        other_processes(own=True)
    monkeypatch.setattr(sharing_mode, "gpu_facts", dict)
    with pytest.raises(UserError, match="processes on the GPU: no NVIDIA GPU"):
        other_processes(own=False)


def test_only_the_measured_mode_is_accepted() -> None:
    check_sharing_mode("time_slices")
    others: tuple[tuple[SharingMode, str], ...] = (("mps", "at the same time; stop its daemon: echo quit"),
                                                   ("mig", "another device .*; switch it off"))
    for mode, message in others:
        with pytest.raises(UserError, match=f"{mode}: .* in time slices only; .* {message}"):
            check_sharing_mode(mode)


UUIDS = ("GPU-aa11", "GPU-bb22")


def handle(index: int) -> int:
    if index >= len(UUIDS):
        raise RuntimeError
    return index


NVML = SimpleNamespace(  # a handle is an index
    NVMLError=RuntimeError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: len(UUIDS),
    nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetUUID=UUIDS.__getitem__, nvmlDeviceGetName=lambda gpu: f"GPU number {gpu}",
    nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1000 * kind + gpu, nvmlSystemGetDriverVersion=lambda: "580")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setattr(fingerprint, "pynvml", NVML)
    monkeypatch.delenv(fingerprint.WITHOUT_GPU, raising=False)
    fingerprint.gpu_facts.cache_clear()
    yield
    fingerprint.gpu_facts.cache_clear()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("visible", "uuid"), [
    (None, "GPU-aa11"), ("1", "GPU-bb22"), ("1,0", "GPU-bb22"), ("GPU-bb", "GPU-bb22"), ("", None), ("-1", None), ("2", None)])
def test_the_gpu_that_cuda_takes_first(visible: str | None, uuid: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv(fingerprint.VISIBLE_GPUS, raising=False)
    else:
        monkeypatch.setenv(fingerprint.VISIBLE_GPUS, visible)
    assert fingerprint.gpu_facts().get("uuid") == uuid
    assert fingerprint.has_cuda() == (uuid is not None)
    if visible == "1":
        assert fingerprint.gpu_facts() == {"name": "GPU number 1", "uuid": "GPU-bb22", "driver": "580",
                                           "clocks": "SM 1001 MHz, memory 2001 MHz at most"}
