"""Phase 7: a model's latency from its kernels: `from inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.load_curve import predict_curve
    from inference.missing_kernels import measure_missing
    from inference.pair_latency import predict_pair
    from inference.prediction import Prediction, predict, predict_many
    from inference.shared_models import shared_model
    from inference.slo import check_slo, highest_busy_share, slo_under_load
    from inference.watch import Watch

__all__ = ["Prediction", "Watch", "check_slo", "highest_busy_share", "measure_missing", "predict", "predict_curve",
           "predict_many", "predict_pair", "shared_model", "slo_under_load"]
ELSEWHERE = {"Watch": "watch", "check_slo": "slo", "highest_busy_share": "slo", "measure_missing": "missing_kernels",
             "predict_curve": "load_curve", "predict_pair": "pair_latency", "shared_model": "shared_models",
             "slo_under_load": "slo"}  # the modules of what is not in `prediction`


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in __all__:
        return getattr(import_module(f"inference.{ELSEWHERE.get(name, 'prediction')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
