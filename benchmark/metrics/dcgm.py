"""GPU metrics from NVIDIA's DCGM, through its Python bindings (`pydcgm`, not on PyPI).

DCGM runs in this process, or is asked at a network address. It reads the GPU every 0.1 s. A value describes the time before it,
so a window gets the values whose middle lies in it. A blank value is an error. (DCGM's own `DcgmReader` can't be used: it
always connects to localhost, and hides blanks.)
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hase.benchmark.metrics.names import IDS
from hase.benchmark.metrics.source import LOOKS_BACK, PROFILED, UTILISATION, MetricSource, Window
from hase.utils.errors import UserError
from hase.utils.fingerprint import gpu_facts

BINDINGS = (  # folders in which the packages of DCGM 4 and 3 put them
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
UPDATE_S = 0.1  # between two values; profiled fields are not faster
KEEP_S = 3600.0  # how long values are kept: no window is longer


class DcgmMissing(UserError):
    """DCGM is not installed here, does not answer, or does not know this GPU."""


class MetricSample(NamedTuple):
    """A value of a field, and when DCGM read it (seconds since 1970)."""

    time_s: float
    value: float


class DcgmSource(MetricSource):
    """Metrics of the first GPU (the one that `hase.utils.fingerprint` names)."""

    minimum_window_s = 0.25  # at least two values

    def __init__(self, fields: Sequence[str] | None = None, address: str | None = None) -> None:
        """Reads `fields`, or the useful ones, from the DCGM at `address` (HOST or HOST:PORT) or in this process.

        Raises:
            DcgmMissing: DCGM is not installed, does not answer, or does not know this machine's GPU.
            UserError: it lacks a field.
        """
        self.name = f"DCGM at {address}" if address else "DCGM"
        self._pydcgm = _bindings()
        self._structs, self._helpers = (importlib.import_module(name) for name in ("dcgm_structs", "dcgm_field_helpers"))
        try:
            self._handle = self._pydcgm.DcgmHandle(ipAddress=address)
        except self._structs.DCGMError as error:
            raise DcgmMissing(f"{self.name} does not answer: {error}; is nv-hostengine running there, and may this user "
                              "ask it? See: dcgmi discovery -l") from None
        self._system = self._handle.GetSystem()
        self._gpu = self._find_gpu(gpu_facts()["uuid"])
        self._group = self._system.GetGroupWithGpuIds(f"hase-{os.getpid()}-{id(self)}", [self._gpu])
        self._lock = threading.Lock()
        self._seen: dict[str, deque[MetricSample]] = {}
        not_profiled = [field for field in IDS if field not in PROFILED]
        self._watched = [watch for kind, of_kind in (("prof", PROFILED), ("dev", not_profiled))
                         if (watch := self._watch(kind, of_kind)) is not None]
        time.sleep(2 * UPDATE_S)
        self._drain()
        available = [field for field in IDS if not all(math.isnan(sample.value) for sample in self._seen.get(field, ()))]
        has_profiled = any(field in PROFILED for field in available)
        super().__init__(available, fields or [field for field in available if not (has_profiled and field in LOOKS_BACK)])

    def _find_gpu(self, uuid: str) -> int:
        """DCGM's number of the GPU."""
        for gpu in self._system.discovery.GetAllGpuIds():
            if self._system.discovery.GetGpuAttributes(gpu).identifiers.uuid == uuid:
                return gpu
        raise DcgmMissing(f"{self.name} does not know this machine's GPU {uuid}; give the address of the DCGM that watches it")

    def _watch(self, kind: str, fields: Sequence[str]) -> tuple[Any, Any] | None:
        """A group of fields that DCGM reads from now on, and the collection of their values. None if DCGM refuses: profiled
        fields on a GPU without such counters, or for a user who may not read them."""
        ids = [IDS[field] for field in fields]
        try:
            group = self._pydcgm.DcgmFieldGroup(self._handle, f"hase-{kind}-{os.getpid()}-{id(self)}", ids)
            self._group.samples.WatchFields(group, int(UPDATE_S * 1e6), KEEP_S, 0)
            self._system.UpdateAllFields(True)
        except self._structs.DCGMError:
            return None
        return group, self._helpers.DcgmFieldValueCollection(self._handle.handle, self._group.GetId())

    def _drain(self) -> None:
        """Fetches what DCGM has read since the last call; a blank becomes NaN."""
        names = {number: field for field, number in IDS.items()}
        with self._lock:
            for group, collection in self._watched:
                try:
                    collection.GetAllSinceLastCall(group)
                except self._structs.DCGMError as error:
                    raise UserError(f"{self.name} does not answer any more: {error}") from None
                for number, series in collection.values.get(self._gpu, {}).items():
                    seen = self._seen.setdefault(names[number], deque())
                    seen.extend(MetricSample(sample.ts / 1e6,
                                             math.nan if sample.isBlank else float(sample.value)) for sample in series.values)
                    while seen and seen[0].time_s < seen[-1].time_s - KEEP_S:
                        seen.popleft()
                collection.EmptyValues()

    def _read(self) -> float:
        """The current time on DCGM's clock (seconds since 1970)."""
        return time.time()

    def _readings(self, before: Window, after: Window) -> dict[str, list[float]]:
        time.sleep(2 * UPDATE_S)  # until DCGM has the value for the window's end
        self._drain()
        samples = {field: self._between(field, before.reading, after.reading) for field in (*self.fields, UTILISATION)}
        for field in self.fields:
            if blank := sum(map(math.isnan, samples[field])):
                raise UserError(f"metric {field}: {blank} of {len(samples[field])} readings of {self.name} are blank; does a "
                                "profiler hold the counters (dcgmi profile --resume gives them back)? Leave this metric out if "
                                "it stays so")
        return samples

    def _between(self, field: str, begin_s: float, end_s: float) -> list[float]:
        """The values that describe a period, given in seconds since 1970."""
        with self._lock:
            return [sample.value for sample in self._seen.get(field, ()) if begin_s < sample.time_s - UPDATE_S / 2 <= end_s]


def _bindings() -> Any:
    """The module pydcgm."""
    for folder in BINDINGS:
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.append(str(folder))  # at the end, since some of its modules have common names
    try:
        return importlib.import_module("pydcgm")
    except ImportError:
        raise DcgmMissing(f"source dcgm: no pydcgm in {' or '.join(map(str, BINDINGS))}; it comes with NVIDIA's DCGM, not from "
                          "PyPI: sudo apt-get install --install-recommends datacenter-gpu-manager-4-cuda13 (docs/packages.md "
                          "says more); put its folder on PYTHONPATH if it lies elsewhere") from None
