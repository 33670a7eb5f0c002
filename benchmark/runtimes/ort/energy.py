"""The energy of a model's runs: it runs again and again in one long window, and the device's power is sampled meanwhile."""

from __future__ import annotations

import time

from benchmark.measuring.affinity import off_the_workers_cores
from benchmark.measuring.power import PowerMonitor, energy_of_runs
from benchmark.metrics.power_sensors import open_power_sensor
from benchmark.records.labels import ENERGY
from benchmark.records.measurement import Measurement
from benchmark.runtimes.ort.runner import Runner
from utils.errors import UserError
from utils.ort_sessions import model_errors

REST_S = 0.5  # of the idle window: the session is open, and nothing runs
CALM_S = 0.3  # before it: the sensor still shows what ran


def energy_of_model(runner: Runner, model: str, seconds: float) -> Measurement:
    """Label `energy` of a model: what one run takes of the device's energy when runs follow each other without a pause.

    Its quantities are `energy_j` (of a run), `counter_j` (the same by the device's own counter, if there is one), `power_w`
    (mean), `idle_w` (with the session open and nothing running), `window_s` and `runs`; its only sample is a run's mean time.
    Doubts about the readings are its `error`. Where the power can't be read, it failed, and its error says why.

    Args:
        runner: the open session, warmed up.
        model: the record's name.
        seconds: of the window.
    """
    facts = {"subject": "model", "id": model, "label": ENERGY, "context": model, "place": "alone"}
    try:
        with PowerMonitor(open_power_sensor(runner.device)) as monitor, model_errors(model), off_the_workers_cores():
            time.sleep(CALM_S + monitor.sensor.averages_s)
            idle = monitor.rest(REST_S)
            found = energy_of_runs(monitor, runner.run_once, seconds)
    except UserError as error:
        return Measurement.model_validate(facts | {"status": "failed", "error": str(error)})
    used, runs = found.used, len(found.samples_ms)
    quantities = {"energy_j": found.energy_j, "power_w": used.mean_w, "idle_w": idle.mean_w, "window_s": used.seconds,
                  "runs": float(runs)}
    if used.counter_j is not None:
        quantities["counter_j"] = used.counter_j / runs
    return Measurement.model_validate(facts | {
        "samples_ms": (round(1e3 * used.seconds / runs, 6),), "error": "; ".join(used.doubts),
        "quantities": {name: (float(f"{value:.7g}"),) for name, value in quantities.items()}})
