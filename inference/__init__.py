"""Phase 7.1: a model's latency from its kernels: `from inference import predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.prediction import Prediction, predict, predict_many

__all__ = ["Prediction", "predict", "predict_many"]


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in __all__:
        from inference import prediction

        return getattr(prediction, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
