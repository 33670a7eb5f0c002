"""Times models under OpenVINO: whole runs by the clock, layers by OpenVINO's own times.

OpenVINO gives one number per layer: the mean over all runs of a compiled model so far. Each run's time is cut to whole
microseconds, and so is the mean. So single runs have no times, and the first runs (in which code is generated) are included.
Therefore the number is read several times: multiplied by the number of runs it is the total, from which that of the first runs
is subtracted. Each cut loses 0.5 us on average, which is added back. Extra time between two readings, when other work had the
core, is subtracted too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hase.kernel_model.building.dummy_data import dummy_inputs
from hase.kernel_model.building.kernel_models import read_built
from hase.records.kernel_record import Kernel
from hase.records.measurement import Effort
from hase.runtimes.openvino.compiling import compile_model, openvino_error, read_model, times_us
from hase.utils.lazy import openvino
from hase.utils.timing import timed, turns

CUT_US = 0.5  # average loss by cutting to whole microseconds
# Time between two readings. A reading takes a millisecond in Python, which leaves the next run with cold caches: read after
# each run, MobileNetV3's layers took half as long again.
BLOCK_MS = 40.0
LEAST_BLOCKS, MOST_BLOCKS = 4, 12
SESSIONS = 3  # times that a model is compiled: each gives one mean time of each layer


class SessionTimes(NamedTuple):
    """Times (ms) of runs of a compiled model, and the time (ms) of each of its layers in one run."""

    runs_ms: tuple[float, ...]
    layers_ms: dict[str, float]


class TimedSession:
    """A compiled model with set inputs. No other session may run it, since layer times include all runs."""

    def __init__(self, compiled: Any, inputs: Mapping[str, np.ndarray], name: str) -> None:
        self._name, self._runs = name, 0
        self._request = compiled.create_infer_request()
        self._run_s = timed(partial(self._request.infer, share_outputs=True))
        for port in compiled.inputs:
            self._request.set_tensor(port, openvino.Tensor(np.ascontiguousarray(inputs[port.any_name])))

    def run_ms(self) -> float:
        """Runs the model once; returns the time in ms."""
        try:
            run_s = self._run_s()
        except RuntimeError as error:
            raise openvino_error(self._name, error) from error
        self._runs += 1
        return 1e3 * run_s

    def time(self, effort: Effort, layers: bool = True) -> SessionTimes:
        """Times runs, then layers for about as long."""
        self._runs_ms(effort.warmup + 1, effort.warmup_s)
        runs_ms = self._runs_ms(effort.runs(1e-3 * self.run_ms()))
        if not layers:
            return SessionTimes(runs_ms, {})
        block_runs = math.ceil(BLOCK_MS / min(runs_ms))
        blocks = round(1e3 * effort.budget_s / (block_runs * min(runs_ms)))
        return SessionTimes(runs_ms, self._layers_ms(block_runs, min(max(blocks, LEAST_BLOCKS), MOST_BLOCKS)))

    def _layers_ms(self, block_runs: int, blocks: int) -> dict[str, float]:
        means_us: dict[str, list[float]] = defaultdict(list)
        runs = [self._runs + block * block_runs for block in range(blocks + 1)]
        for block in range(blocks + 1):
            for name, mean_us in times_us(self._request).items():
                means_us[name].append(mean_us)
            if block < blocks:
                self._runs_ms(block_runs)
        return {name: 1e-3 * usual_us(np.array(readings_us), np.array(runs)) for name, readings_us in means_us.items()}

    def _runs_ms(self, count: int, seconds: float = 0.0) -> tuple[float, ...]:
        return tuple(self.run_ms() for _ in turns(count, seconds))


def usual_us(means_us: np.ndarray, runs: np.ndarray) -> float:
    """The time (us) of a layer in an undisturbed run, from OpenVINO's readings. `means_us` are the cut means of all runs so far
    (0 below a microsecond), `runs` the numbers of runs until then, at even distances."""
    totals_us = np.where(means_us > 0, runs * (means_us + CUT_US), 0.0)
    steps_us = np.diff(totals_us) / np.diff(runs)
    usual = float(np.median(steps_us))
    resolution = 2.0 * runs[1:] / np.diff(runs)  # of a step, since a mean is cut
    disturbed = steps_us - usual > np.maximum(usual, resolution)
    return max(float(np.where(disturbed, usual, steps_us).mean()) + CUT_US, CUT_US)


def check_kernel(path: Path, kernel: Kernel, device: str) -> None:
    """Runs a built kernel once on dummy inputs."""
    TimedSession(compile_model(read_model(read_built(path)[0], path.stem), path.stem), dummy_inputs(kernel), path.stem).run_ms()


def time_sessions(model: Any, inputs: Mapping[str, np.ndarray], name: str, effort: Effort, threads: int) -> list[SessionTimes]:
    """The times of an OpenVINO model in SESSIONS sessions, which together take about as long as `effort`."""
    part = effort.part(SESSIONS)
    return [TimedSession(compile_model(model, name, threads), inputs, name).time(part) for _ in range(SESSIONS)]
