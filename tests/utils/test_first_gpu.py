"""The measured GPU is the one that CUDA takes. NVML is pretended, with two GPUs: this machine may have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hase.utils import fingerprint

UUIDS = ("GPU-aa11", "GPU-bb22")


class NVMLError(Exception):
    pass


def handle(index: int) -> int:
    if index >= len(UUIDS):
        raise NVMLError
    return index


NVML = SimpleNamespace(  # a handle is an index
    NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: len(UUIDS),
    nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetUUID=UUIDS.__getitem__, nvmlDeviceGetName=lambda gpu: f"GPU number {gpu}",
    nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1000 * kind + gpu, nvmlSystemGetDriverVersion=lambda: "580")


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    monkeypatch.setattr(fingerprint, "pynvml", NVML)
    monkeypatch.delenv(fingerprint.WITHOUT_GPU, raising=False)
    fingerprint.gpu_facts.cache_clear()
    yield
    fingerprint.gpu_facts.cache_clear()


@pytest.mark.parametrize(("visible", "uuid"), [
    (None, "GPU-aa11"), ("0", "GPU-aa11"), ("1", "GPU-bb22"), ("1,0", "GPU-bb22"), ("GPU-bb22", "GPU-bb22"),
    ("GPU-bb", "GPU-bb22"), ("", None), ("-1", None), ("2", None), ("GPU-cc", None)])
def test_the_gpu_that_cuda_takes_first(visible: str | None, uuid: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv(fingerprint.VISIBLE_GPUS, raising=False)
    else:
        monkeypatch.setenv(fingerprint.VISIBLE_GPUS, visible)
    assert fingerprint.gpu_facts().get("uuid") == uuid
    assert fingerprint.has_cuda() == (uuid is not None)


def test_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fingerprint.VISIBLE_GPUS, "1")
    assert fingerprint.gpu_facts() == {"name": "GPU number 1", "uuid": "GPU-bb22", "driver": "580",
                                       "clocks": "SM 1001 MHz, memory 2001 MHz at most"}
