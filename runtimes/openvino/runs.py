"""Times models under OpenVINO: whole runs by the clock, layers by OpenVINO's own times.

OpenVINO keeps one number for each layer: the mean of all runs of a compiled model so far, each cut to whole microseconds, and
the mean cut again. So a single run has no times of its own, and the first runs (in which code is generated) count. The number
is read several times: times the number of runs, it is what all took, and what the first runs took is taken off. Both cuts lose
half a microsecond on the average, which is added again. What a layer took longer than usual between two readings, because other
work had the core, is taken off too.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hase.benchmark.measuring.run_times import Effort
from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import read_built
from hase.records.kernel_record import Kernel
from hase.runtimes.openvino.layers import times_us
from hase.runtimes.openvino.package import compile_model, refused
from hase.runtimes.openvino.prepared import read
from hase.utils.lazy import openvino

CUT_US = 0.5  # what cutting to whole microseconds loses, on the average
# Time between two readings. A reading takes a millisecond in Python, which leaves the next run with cold caches: read after
# each run, MobileNetV3's layers took half as long again.
BLOCK_MS = 40.0
LEAST_BLOCKS, MOST_BLOCKS = 4, 12
SESSIONS = 3  # times that a model is compiled anew: each gives one mean time of each layer


class Timed(NamedTuple):
    """The times (ms) of runs of a compiled model, and the time (ms) of each of its layers in one of them."""

    runs_ms: tuple[float, ...]
    layers_ms: dict[str, float]


class Session:
    """A compiled model with its inputs in place."""

    def __init__(self, compiled: Any, inputs: Mapping[str, np.ndarray], name: str) -> None:
        """Opens a model.

        Args:
            compiled: the model; no other session may run it, since its layers' times are those of all runs.
            inputs: by name.
            name: for messages.
        """
        self._name, self._runs = name, 0
        self._request = compiled.create_infer_request()
        for port in compiled.inputs:
            self._request.set_tensor(port, openvino.Tensor(np.ascontiguousarray(inputs[port.any_name])))

    def run_ms(self) -> float:
        """Runs once; the ms that took.

        Raises:
            UserError: OpenVINO can't run it.
        """
        start = time.perf_counter()
        try:
            self._request.infer(share_outputs=True)
        except RuntimeError as error:
            raise refused(self._name, error) from error
        self._runs += 1
        return 1e3 * (time.perf_counter() - start)

    def time(self, effort: Effort, layers: bool = True) -> Timed:
        """Times runs, and then layers in about as long a time."""
        self._runs_ms(effort.warmup + 1, effort.warmup_s)
        runs_ms = self._runs_ms(effort.runs(1e-3 * self.run_ms()))
        if not layers:
            return Timed(runs_ms, {})
        block_runs = math.ceil(BLOCK_MS / min(runs_ms))
        blocks = round(1e3 * effort.budget_s / (block_runs * min(runs_ms)))
        return Timed(runs_ms, self._layers_ms(block_runs, min(max(blocks, LEAST_BLOCKS), MOST_BLOCKS)))

    def _layers_ms(self, block_runs: int, blocks: int) -> dict[str, float]:
        means_us: dict[str, list[float]] = defaultdict(list)
        runs = [self._runs + block * block_runs for block in range(blocks + 1)]
        for block in range(blocks + 1):
            for name, mean_us in times_us(self._request).items():
                means_us[name].append(mean_us)
            if block < blocks:
                self._runs_ms(block_runs)
        return {name: 1e-3 * usual_us(np.array(read), np.array(runs)) for name, read in means_us.items()}

    def _runs_ms(self, count: int, seconds: float = 0.0) -> tuple[float, ...]:
        times_ms, began = list[float](), time.perf_counter()
        while len(times_ms) < count or time.perf_counter() - began < seconds:
            times_ms.append(self.run_ms())
        return tuple(times_ms)


def usual_us(means_us: np.ndarray, runs: np.ndarray) -> float:
    """The time of a layer in a run that nothing disturbs, in microseconds.

    Args:
        means_us: what OpenVINO said at each reading: the mean of all runs so far, cut; 0 where it is below a microsecond.
        runs: the number of runs at each reading, at even distances.
    """
    totals_us = np.where(means_us > 0, runs * (means_us + CUT_US), 0.0)
    steps_us = np.diff(totals_us) / np.diff(runs)
    usual = float(np.median(steps_us))
    resolution = 2.0 * runs[1:] / np.diff(runs)  # of a step, since a mean is cut
    disturbed = steps_us - usual > np.maximum(usual, resolution)
    return max(float(np.where(disturbed, usual, steps_us).mean()) + CUT_US, CUT_US)


def check_kernel(path: Path, kernel: Kernel, device: str) -> None:
    """Runs a built kernel once on dummy inputs.

    Raises:
        UserError: OpenVINO can't read, compile or run it.
    """
    Session(compile_model(read(read_built(path)[0], path.stem), path.stem), dummy_inputs(kernel), path.stem).run_ms()


def time_sessions(model: Any, inputs: Mapping[str, np.ndarray], name: str, effort: Effort, threads: int,
                  layers: bool = True) -> list[Timed]:
    """The times of a model of OpenVINO in SESSIONS sessions, which together take about as long as `effort` says.

    Raises:
        UserError: OpenVINO can't compile or run it.
    """
    part = effort.part(SESSIONS)
    return [Session(compile_model(model, name, threads), inputs, name).time(part, layers) for _ in range(SESSIONS)]
