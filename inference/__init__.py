"""Predicts a model's latency from its kernels: `from hase.inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hase.inference.library.missing_kernels import measure_missing
    from hase.inference.library.predictor import Predictor, predict
    from hase.inference.live.watch import Watch
    from hase.inference.llm.answers import LlmPrediction
    from hase.inference.llm.predicting import predict_language_model
    from hase.inference.prediction.answers import Prediction, Predictions, check_slo
    from hase.inference.prediction.energy import EnergyPrediction
    from hase.inference.prediction.run import PredictedRun
    from hase.inference.sharing.shared_models import highest_busy_share

__all__ = ["EnergyPrediction", "LlmPrediction", "PredictedRun", "Prediction", "Predictions", "Predictor", "Watch", "check_slo",
           "highest_busy_share", "measure_missing", "predict", "predict_language_model"]
MODULES = {
    "EnergyPrediction": "prediction.energy",
    "LlmPrediction": "llm.answers",
    "PredictedRun": "prediction.run",
    "Prediction": "prediction.answers",
    "Predictions": "prediction.answers",
    "Predictor": "library.predictor",
    "Watch": "live.watch",
    "check_slo": "prediction.answers",
    "highest_busy_share": "sharing.shared_models",
    "measure_missing": "library.missing_kernels",
    "predict": "library.predictor",
    "predict_language_model": "llm.predicting",
}


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package is cheap."""
    if name in MODULES:
        return getattr(import_module(f"hase.inference.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
