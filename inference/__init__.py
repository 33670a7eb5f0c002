"""A model's latency from its kernels: `from inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.core.answers import Prediction
    from inference.core.energy import EnergyPrediction
    from inference.core.missing_kernels import measure_missing
    from inference.core.predicted_run import PredictedRun
    from inference.core.predictor import Predictor, predict
    from inference.live.watch import Watch
    from inference.sharing.slo import check_slo, highest_busy_share

__all__ = ["EnergyPrediction", "PredictedRun", "Prediction", "Predictor", "Watch", "check_slo", "highest_busy_share",
           "measure_missing", "predict"]
MODULES = {
    "EnergyPrediction": "core.energy",
    "PredictedRun": "core.predicted_run",
    "Prediction": "core.answers",
    "Predictor": "core.predictor",
    "Watch": "live.watch",
    "check_slo": "sharing.slo",
    "highest_busy_share": "sharing.slo",
    "measure_missing": "core.missing_kernels",
    "predict": "core.predictor",
}


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in MODULES:
        return getattr(import_module(f"inference.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
