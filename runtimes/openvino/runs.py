"""Times models under OpenVINO: whole runs by the clock, layers by OpenVINO's own times.

OpenVINO keeps one number for each layer: the mean of all runs of a compiled model so far, each cut to whole microseconds and the
mean cut again. So a run has no times of its own, and the first runs (in which code is generated) count. They are read before and
after the runs that count, and what was there before is taken off. Both cuts lose half a microsecond on the average, which is
added again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from measuring.effort import Effort
from runtimes.openvino.layers import times_us
from runtimes.openvino.package import compile_model, refused
from utils.lazy import openvino

CUT_US = 0.5  # what cutting to whole microseconds loses, on the average
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

    def total_us(self) -> tuple[int, dict[str, float]]:
        """The number of runs so far, and what each layer took in all of them together."""
        return self._runs, {name: self._runs * (mean_us + CUT_US) for name, mean_us in times_us(self._request).items() if mean_us}

    def time(self, effort: Effort) -> Timed:
        """Times runs and layers.

        A run that other work disturbs counts in the mean of a layer. So layers are scaled by what the runs say: the median of
        their times over the mean.
        """
        one_run_ms = min(self._warmed_up(effort))
        runs_before, before_us = self.total_us()
        runs_ms = tuple(self.run_ms() for _ in range(effort.runs(1e-3 * one_run_ms)))
        runs_after, after_us = self.total_us()
        undisturbed = median(runs_ms) / fmean(runs_ms)
        counted = runs_after - runs_before
        # In a layer that has no time, runs take less than a microsecond.
        layers_ms = {name: 1e-3 * undisturbed * max((total - before_us.get(name, 0.0)) / counted + CUT_US, CUT_US)
                     for name, total in after_us.items()}
        return Timed(runs_ms, layers_ms)

    def _warmed_up(self, effort: Effort) -> list[float]:
        times_ms, began = [self.run_ms()], time.perf_counter()
        while len(times_ms) <= effort.warmup or time.perf_counter() - began < effort.warmup_s:
            times_ms.append(self.run_ms())
        return times_ms


def time_sessions(model: Any, inputs: Mapping[str, np.ndarray], name: str, effort: Effort, threads: int,
                  sessions: int = SESSIONS) -> list[Timed]:
    """The times of a model of OpenVINO that is compiled `sessions` times; together they take about as long as `effort` says.

    Raises:
        UserError: OpenVINO can't compile or run it.
    """
    return [Session(compile_model(model, name, threads), inputs, name).time(effort.part(sessions)) for _ in range(sessions)]
