"""What else runs on the device while a model is to run: nothing (idle), or metrics by DCGM field name."""

from __future__ import annotations

import math
from pathlib import Path

from utils import files
from utils.config import Config
from utils.errors import UserError
from utils.paths import ROOT

CONFIG_FILE = ROOT / "inference" / "config.yaml"


class PrometheusConfig(Config):
    """A Prometheus server that knows the device's metrics; `url` None where there is none."""

    url: str | None = None


class InferenceConfig(Config):
    """`inference/config.yaml`."""

    prometheus: PrometheusConfig = PrometheusConfig()


def read_metrics(path: Path) -> dict[str, float]:
    """The metrics in a JSON file, `{"DCGM_FI_DEV_GPU_UTIL": 60, …}`.

    Raises:
        UserError: no such file, no JSON object, or a value that is no finite number.
    """
    found = files.read_json(path)
    if not isinstance(found, dict) or not found:
        raise UserError(f'{path}: a JSON object of metrics by DCGM field name is expected, {{"DCGM_FI_DEV_GPU_UTIL": 60}}')
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{path}: {name} is {value!r}; a finite number is expected")
    return {str(name): float(value) for name, value in found.items()}


def current_load(config: InferenceConfig, metrics_file: Path | None = None) -> dict[str, float]:
    """The load to predict for: that of `metrics_file`, else what the config's source says, else idle (empty).

    Raises:
        UserError: the file can't be read, or the config names a source that can't be.
    """
    if metrics_file is not None:
        return read_metrics(metrics_file)
    if config.prometheus.url is not None:
        raise UserError(f"prometheus.url {config.prometheus.url}: reading Prometheus is not part of this version; "
                        "set it to null (idle) or give the metrics with --metrics FILE")
    return {}
