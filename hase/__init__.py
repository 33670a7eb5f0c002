"""Predicts how long ONNX Runtime takes to run a model on a device: `hase.predict("resnet50.onnx", batch=8, on="l4")`.

In a clone, the folders of the package (`utils`, `records`, …) lie at the root of the repository, so that every phase is seen
there; `hase.utils` is found through `__path__`. The links beside this file say the same to type checkers and editors, which do
not run it. In a wheel, the folders lie beside this file.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hase.inference.library.api import (
        compare_devices,
        compare_models,
        predict,
        predict_llm,
        predict_many,
        search,
        sharing_advice,
    )
    from hase.inference.library.predictor import Predictor
    from hase.utils.errors import UserError

_ROOT = Path(__file__).resolve().parents[1]
if (_ROOT / "pyproject.toml").is_file():
    __path__ = [str(_ROOT), *__path__]

__all__ = ["Predictor", "UserError", "compare_devices", "compare_models", "predict", "predict_llm", "predict_many", "search",
           "sharing_advice"]
_MODULES = {"Predictor": "hase.inference.library.predictor", "UserError": "hase.utils.errors"}


def __getattr__(name: str) -> Any:
    """Imports the functions at their first use, so that `import hase` takes no time."""
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "hase.inference.library.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
