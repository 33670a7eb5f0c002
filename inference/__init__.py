"""Phase 7.1: a model's latency from its kernels: `from inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.missing_kernels import measure_missing
    from inference.prediction import Prediction, predict, predict_many

__all__ = ["Prediction", "measure_missing", "predict", "predict_many"]


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in __all__:
        module = "missing_kernels" if name == "measure_missing" else "prediction"
        return getattr(import_module(f"inference.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
