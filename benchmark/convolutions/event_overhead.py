"""What a pair of CUDA events adds to the time of the work between them."""

from __future__ import annotations

import statistics

from benchmark.convolutions.timing import hold_for_trace, time_layers
from measuring.gpu_trace import in_range, read, record_ranges
from measuring.run_times import wait_for
from utils.lazy import torch
from utils.logger import get_logger

LAYERS, RUNS, NUMBERS = 50, 10, 2**20  # of the reference: layers of one kernel of a few microseconds each
log = get_logger("convolutions")


def event_overhead_ms() -> float | None:
    """The difference between the time by events, as layers are timed, and CUPTI's time, of layers that launch one CUDA kernel.

    Returns:
        Milliseconds, 0.004 on an H200; None, with a warning, where such a layer can't be timed.
    """
    layers = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(LAYERS)))
    numbers = torch.ones(NUMBERS, device="cuda")

    def run_traced() -> None:
        for number, layer in enumerate(layers):
            hold_for_trace()
            with in_range(number):
                layer(numbers)
        wait_for("cuda")

    with torch.inference_mode():
        layers(numbers)
        wait_for("cuda")
        timed = [call for call in time_layers(lambda: layers(numbers), layers, RUNS, "cuda") if call.ahead_runs]
        traced = [run.busy_us / 1e3 for run in read(record_ranges(run_traced, LAYERS)) if len(run.work) == 1]
    if not timed or not traced:
        log.warning("what CUDA events add to the time of a layer could not be measured; layers' times hold it")
        return None
    return statistics.median(time for call in timed for time in call.samples_ms) - statistics.median(traced)
