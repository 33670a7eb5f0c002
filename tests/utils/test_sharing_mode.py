"""How a GPU is shared: with a made-up NVML, since this machine may have no GPU, and with real sockets for the MPS daemon."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hase.utils import sharing_mode
from hase.utils.errors import UserError
from hase.utils.sharing_mode import PIPE_DIRECTORY, check_sharing_mode, mps_daemon_answers, other_processes

MIG_OFF, MIG_ON = 0, 1


class FakeNvml(SimpleNamespace):
    """A pretended pynvml with one GPU; `mig` is None on a GPU that has no MIG, `mps_clients` with an old driver."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_FunctionNotFound(NVMLError):
        pass

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


@pytest.fixture(params=[socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """A socket where an MPS daemon would listen."""
    with socket.socket(socket.AF_UNIX, request.param) as listening:
        listening.bind(str(tmp_path / "control"))
        listening.listen(1)
        yield listening


@pytest.mark.parametrize(("mig", "clients", "mode"), [
    (MIG_OFF, [], "time_slices"), (None, [], "time_slices"), (MIG_ON, [], "mig"),
    (MIG_OFF, [SimpleNamespace(pid=7)], "mps"), (None, None, "time_slices"),
])
def test_modes_by_nvml(fake: FakeNvml, mig: int | None, clients: list[SimpleNamespace] | None, mode: str) -> None:
    fake.mig, fake.mps_clients = mig, clients
    assert sharing_mode.sharing_mode() == mode


def test_a_daemon_that_answers_and_then_has_ended(fake: FakeNvml, daemon: socket.socket, tmp_path: Path) -> None:
    """The next process that opens the GPU uses it, even if none has yet."""
    assert sharing_mode.sharing_mode() == "mps"
    daemon.setblocking(False)
    with pytest.raises(BlockingIOError):  # it was not disturbed
        daemon.accept()
    daemon.close()
    assert (tmp_path / "control").is_socket()
    assert sharing_mode.sharing_mode() == "time_slices"


def test_without_the_variable_cuda_looks_in_tmp(monkeypatch: pytest.MonkeyPatch, daemon: socket.socket, tmp_path: Path) -> None:
    monkeypatch.delenv(PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(sharing_mode, "DEFAULT_PIPE_DIRECTORY", str(tmp_path))
    assert mps_daemon_answers()


@pytest.mark.parametrize("question", ["gpu_facts", "nvmlDeviceGetMigMode"])
def test_an_error_of_nvml_does_not_mean_time_slices(fake: FakeNvml, question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise FakeNvml.NVMLError("GPU is lost")

    monkeypatch.setattr(sharing_mode if question == "gpu_facts" else fake, question, broken)
    with pytest.raises(UserError, match=r"does not answer \(GPU is lost\); nvidia-smi"):
        sharing_mode.sharing_mode()


def test_processes_on_the_gpu(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this one, and each once; a list that lacks this one although it uses the GPU can't be right."""
    assert other_processes(own=False) == 0
    fake.users, fake.mps_clients = [os.getpid(), 7, 8], [SimpleNamespace(pid=8), SimpleNamespace(pid=9)]
    assert (other_processes(own=False), other_processes(own=True)) == (3, 3)
    fake.mps_clients = None  # an old driver
    assert other_processes(own=True) == 2
    fake.users = [7, 8]
    assert other_processes(own=False) == 2
    with pytest.raises(UserError, match=r"does not list this process.*--pid host"):
        other_processes(own=True)
    monkeypatch.setattr(sharing_mode, "gpu_facts", dict)
    with pytest.raises(UserError, match="processes on the GPU: no NVIDIA GPU"):
        other_processes(own=False)
    with pytest.raises(UserError, match="sharing mode: no NVIDIA GPU"):
        sharing_mode.sharing_mode()


def test_only_the_measured_mode_is_accepted() -> None:
    check_sharing_mode("time_slices")
    with pytest.raises(UserError, match=r"mps: .* in time slices only; .* at the same time; stop its daemon: echo quit"):
        check_sharing_mode("mps")
    with pytest.raises(UserError, match=r"mig: .* in time slices only; .* another device .*; switch it off"):
        check_sharing_mode("mig")
