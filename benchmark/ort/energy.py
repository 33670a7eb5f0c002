"""The energy of a model's runs, or of a batch of kernels: they run again and again in one long window, while the power is
sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hase.benchmark.measuring.quiet_host import off_the_workers_cores
from hase.benchmark.metrics.power import PowerMonitor, energy_of_runs
from hase.benchmark.metrics.power_sensors import open_power_sensor
from hase.benchmark.ort.runner import Runner, open_runner
from hase.records.measurement import ENERGY, KERNELS, Measurement
from hase.runtimes.protocol import Reply, Request
from hase.utils.errors import UserError
from hase.utils.ort_sessions import model_errors
from hase.utils.timing import pause

REST_S = 0.5  # of the idle window: the session is open, and nothing runs
CALM_S = 0.3  # before it: the sensor still shows what ran


def energy_of_model(runner: Runner, model: str, seconds: float) -> Measurement:
    """Label `energy` of a model: what one run takes of the device's energy when runs follow each other without a pause.

    Args:
        runner: the open session, warmed up.
        model: the record's name.
        seconds: of the window.
    """
    facts = {"subject": "model", "id": model, "label": ENERGY, "context": model, "place": "alone"}
    return _energy(facts, runner.device, runner.run_once, seconds)


def energy_of_kernels(request: Request) -> Reply:
    """Label `energy` of a batch of built kernels, each in a session of its own: of one run of each, one after another. A kernel
    alone is too short for a power sensor, and its energy would drown in that of its dispatch.

    Raises:
        UserError: a kernel can't be opened or run.
    """
    runners = [open_runner(Path(path), request.device, provider_options=request.provider_options) for path in request.paths]
    for runner in runners:
        runner.warm_up(request.effort.warmup + 1)

    def run_each() -> None:
        for runner in runners:
            runner.run_once()

    members = tuple(Path(path).stem for path in request.paths)
    facts = {"subject": KERNELS, "id": f"{len(members)} from {members[0]}", "label": ENERGY, "context": "alone",
             "place": "alone", "members": members}
    return Reply(measurements=(_energy(facts, request.device, run_each, request.energy_s),))


def _energy(facts: dict[str, Any], device: str, run: Callable[[], Any], seconds: float) -> Measurement:
    """A measurement of the energy of one `run`.

    Its quantities are `energy_j` (of a run), `counter_j` (the same by the device's own counter, if there is one), `power_w`
    (mean), `idle_w` (with the session open and nothing running), `window_s` and `runs`; its only sample is a run's mean time.
    What is doubtful about the readings is its `error`. Where the power can't be read, it failed, and its error says why.
    """
    try:
        with PowerMonitor(open_power_sensor(device)) as monitor, model_errors(facts["id"]), off_the_workers_cores(device):
            pause(CALM_S + monitor.sensor.averages_s)
            idle = monitor.rest(REST_S)
            measured = energy_of_runs(monitor, run, seconds)
    except UserError as error:
        return Measurement.model_validate(facts | {"status": "failed", "error": str(error)})
    used, runs = measured.used, len(measured.samples_ms)
    quantities = {"energy_j": measured.energy_j, "power_w": used.mean_w, "idle_w": idle.mean_w, "window_s": used.seconds,
                  "runs": float(runs)}
    if used.counter_j is not None:
        quantities["counter_j"] = used.counter_j / runs
    return Measurement.model_validate(facts | {
        "samples_ms": (round(1e3 * used.seconds / runs, 6),), "error": "; ".join(used.warnings),
        "quantities": {name: (float(f"{value:.7g}"),) for name, value in quantities.items()}})
