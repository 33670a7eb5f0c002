"""A worker that answers at once, in this process: for tests of what asks workers, not of what they measure."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from hase.benchmark.collecting import units
from hase.benchmark.ort.probes import CANARY
from hase.records.kernel_record_files import read_model_record
from hase.records.measurement import Measurement, Placement
from hase.runtimes import protocol
from hase.runtimes.protocol import Reply, Request, Worker
from hase.utils.processes import WorkerFailed


def made_up(subject: str, name: str, label: str, context: str, place: Placement) -> Measurement:
    """Three samples of 1 to 2, as much, and 4 to 8 ms: their mean is twice their median."""
    time_ms = 1 + zlib.crc32(f"{name} {label}".encode()) % 1000 / 1000
    return Measurement(subject=subject, id=name, label=label, context=context, place=place,
                       samples_ms=(time_ms, time_ms, 4 * time_ms))


def _canary(request: Request) -> Reply:
    return Reply(measurements=(Measurement(subject=CANARY, id=CANARY, label="run", context="alone", place="alone",
                                           samples_ms=(1.0,)),))


def _alone(request: Request) -> Reply:
    return Reply(measurements=(made_up("kernel", Path(request.paths[0]).stem, "run", "alone", "alone"),))


def _carrier(request: Request) -> Reply:
    return Reply(measurements=tuple(made_up("kernel", Path(path).stem, label, "carrier", "carrier")
                                    for label in request.labels for path in request.paths))


def _model(request: Request) -> Reply:
    name, kernels = request.model_name, read_model_record(Path(request.record)).kernels
    whole = [made_up("model", name, label, name, "alone") for label in ("latency", *["host_io"] * request.host_io)]
    return Reply(measurements=(*whole, *(made_up("kernel", kernel, label, name, "in_model")
                                         for label in request.labels for kernel in kernels)))


WORK = {"canary": _canary, "alone": _alone, "carrier": _carrier, "model": _model}


class FakeWorker(Worker):
    """Gives `reply`, or raises it; by default it answers as a worker of ONNX Runtime, with times that are made up."""

    def __init__(self, *_: object, reply: Reply | WorkerFailed | None = None) -> None:
        super().__init__(timeout_s=1.0)
        self.reply, self.asked = reply, list[Request]()

    def prepare(self, request: Request) -> None:
        self.asked.append(request)

    def ask(self, request: Request) -> Reply:
        self.asked.append(request)
        if isinstance(self.reply, WorkerFailed):
            raise self.reply
        return self.reply or protocol.answer(WORK, request)


def replace_workers(patch: pytest.MonkeyPatch) -> None:
    """The collector's processes are all such workers from here on."""
    patch.setattr(units, "Worker", FakeWorker)
