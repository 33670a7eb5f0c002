"""Times models under OpenVINO: whole runs by the clock, layers by OpenVINO's own times.

OpenVINO keeps one number for each layer: the mean of all runs of a compiled model so far, each cut to whole microseconds, and
the mean cut again. So a single run has no times of its own, and the first runs (in which code is generated) count. The number
is read after each run: times the number of runs, it is what all took, and what the first runs took is taken off. Both cuts lose
half a microsecond on the average, which is added again. What a layer took longer than usual in some run, because other work had
the core, shows in the difference of two readings, and is taken off too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from measuring.bench import Effort
from records.kernel_record import Kernel
from runtimes.openvino.layers import times_us
from runtimes.openvino.package import compile_model, refused
from runtimes.openvino.prepared import read
from runtimes.ort.building.dummy_data import dummy_inputs
from utils.lazy import openvino
from utils.model_files import read_whole_model

CUT_US = 0.5  # what cutting to whole microseconds loses, on the average
MOST_READ = 40  # runs in which layers are timed: after more, a reading does not show what disturbs one
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
        """Times runs and then, in as many runs more (at most MOST_READ), layers."""
        self._runs_ms(effort.warmup + 1, effort.warmup_s)
        count = effort.runs(1e-3 * self.run_ms())
        runs_ms = self._runs_ms(count)
        return Timed(runs_ms, self._layers_ms(min(count, MOST_READ)) if layers else {})

    def _layers_ms(self, count: int) -> dict[str, float]:
        totals: dict[str, list[float]] = defaultdict(list)
        first = self._runs
        for _ in range(count + 1):
            for name, mean_us in times_us(self._request).items():
                totals[name].append(self._runs * (mean_us + CUT_US) if mean_us else 0.0)
            self.run_ms()
        return {name: 1e-3 * usual_us(np.array(total), first) for name, total in totals.items()}

    def _runs_ms(self, count: int, seconds: float = 0.0) -> tuple[float, ...]:
        times_ms, began = list[float](), time.perf_counter()
        while len(times_ms) < count or time.perf_counter() - began < seconds:
            times_ms.append(self.run_ms())
        return tuple(times_ms)


def usual_us(totals: np.ndarray, first: int) -> float:
    """The time of a layer in a run that nothing disturbs, in microseconds.

    Args:
        totals: what it took in all runs together, read after each run; 0 while its mean is below a microsecond.
        first: the number of runs at the first reading.
    """
    steps = np.diff(totals)
    usual = float(np.median(steps))
    # A reading is off by as many microseconds as there were runs, since the mean is cut.
    resolution = 2.0 * (first + 1 + np.arange(len(steps)))
    disturbed = np.where(steps - usual > np.maximum(usual, 2.0 * resolution), steps - usual, 0.0)
    return max(float((steps - disturbed).mean()) + CUT_US, CUT_US)


def check_kernel(path: Path, kernel: Kernel, device: str) -> None:
    """Runs a built kernel once on dummy inputs.

    Raises:
        UserError: OpenVINO can't read, compile or run it.
    """
    Session(compile_model(read(read_whole_model(path), path.stem), path.stem), dummy_inputs(kernel), path.stem).run_ms()


def time_sessions(model: Any, inputs: Mapping[str, np.ndarray], name: str, effort: Effort, threads: int,
                  layers: bool = True) -> list[Timed]:
    """The times of a model of OpenVINO in SESSIONS sessions, which together take about as long as `effort` says.

    Raises:
        UserError: OpenVINO can't compile or run it.
    """
    part = effort.part(SESSIONS)
    return [Session(compile_model(model, name, threads), inputs, name).time(part, layers) for _ in range(SESSIONS)]
