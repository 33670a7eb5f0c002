"""A model's latency from its kernels: `from hase.inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hase.inference.core.answers import Prediction, Predictions
    from hase.inference.core.energy import EnergyPrediction
    from hase.inference.core.missing_kernels import measure_missing
    from hase.inference.core.model_run import PredictedRun
    from hase.inference.core.predictor import Predictor, predict
    from hase.inference.live.watch import Watch
    from hase.inference.llm.answers import LlmPrediction
    from hase.inference.llm.predicting import predict_language_model
    from hase.inference.sharing.shared_models import check_slo, highest_busy_share

__all__ = ["EnergyPrediction", "LlmPrediction", "PredictedRun", "Prediction", "Predictions", "Predictor", "Watch", "check_slo",
           "highest_busy_share", "measure_missing", "predict", "predict_language_model"]
MODULES = {
    "EnergyPrediction": "core.energy",
    "LlmPrediction": "llm.answers",
    "PredictedRun": "core.model_run",
    "Prediction": "core.answers",
    "Predictions": "core.answers",
    "Predictor": "core.predictor",
    "Watch": "live.watch",
    "check_slo": "sharing.shared_models",
    "highest_busy_share": "sharing.shared_models",
    "measure_missing": "core.missing_kernels",
    "predict": "core.predictor",
    "predict_language_model": "llm.predicting",
}


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in MODULES:
        return getattr(import_module(f"hase.inference.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
