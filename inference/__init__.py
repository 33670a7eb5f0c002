"""Phase 7: a model's latency from its kernels: `from inference import predict`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.core.answers import Prediction
    from inference.core.missing_kernels import measure_missing
    from inference.core.prediction import predict, predict_many
    from inference.live.watch import Watch
    from inference.sharing.load_curve import predict_curve
    from inference.sharing.pair import predict_pair
    from inference.sharing.shared_models import shared_model
    from inference.sharing.slo import check_slo, highest_busy_share, slo_under_load

__all__ = ["Prediction", "Watch", "check_slo", "highest_busy_share", "measure_missing", "predict", "predict_curve",
           "predict_many", "predict_pair", "shared_model", "slo_under_load"]
ELSEWHERE = {
    "Watch": "live.watch",
    "check_slo": "sharing.slo",
    "highest_busy_share": "sharing.slo",
    "measure_missing": "core.missing_kernels",
    "predict_curve": "sharing.load_curve",
    "predict_pair": "sharing.pair",
    "shared_model": "sharing.shared_models",
    "slo_under_load": "sharing.slo",
}  # the modules of what is not in `core.prediction`


def __getattr__(name: str) -> Any:
    """Imports the library at first use, so that importing this package costs nothing."""
    if name in __all__:
        return getattr(import_module(f"inference.{ELSEWHERE.get(name, 'core.prediction')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
