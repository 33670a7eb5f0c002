"""Slow packages that are imported at the top of a module but loaded only when first used.

    from hase.utils.lazy import onnx
    from hase.utils.lazy import pandas as pd

Importing torch takes seconds and onnx 0.2 s, but `--help` and a prediction of a recorded model need neither.

`importlib.util.LazyLoader` does not fit: it puts an unloaded module into `sys.modules`, where other libraries trigger its
loading; it fails with two threads (python/cpython#114763, before Python 3.11.9); and it fails at once if the package is
missing, as torch is in a light install.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import multiprocessing

    import ai3
    import argcomplete
    import bcrypt
    import jinja2
    import matplotlib.patheffects
    import matplotlib.pyplot
    import matplotlib.ticker
    import networkx
    import onnx
    import onnx.external_data_helper
    import onnx_ir
    import onnxruntime
    import onnxruntime.capi.onnxruntime_pybind11_state
    import onnxruntime.quantization.shape_inference
    import onnxruntime_genai
    import openvino
    import pandas
    import prometheus_client.core
    import pyarrow
    import pyarrow.parquet
    import pynvml
    import ray
    import ray.cluster_utils
    import ray.data
    import ray.data.exceptions
    import ray.exceptions
    import ray.util.scheduling_strategies
    import requests
    import rich.console
    import rich.progress
    import rich.table
    import scipy.optimize
    import scipy.special
    import scipy.stats
    import sklearn.ensemble
    import sklearn.exceptions
    import sklearn.gaussian_process
    import sklearn.isotonic
    import sklearn.linear_model
    import sklearn.neural_network
    import timm
    import torch
    import torch.profiler
    import torchvision
    import transformers
    import tvm
    import tvm.relax.frontend.onnx
    import tvm.relax.frontend.torch
    import tvm_ffi
    import xgboost
    import yaml

__all__ = ["ai3", "argcomplete", "bcrypt", "jinja2", "matplotlib", "multiprocessing", "networkx", "onnx", "onnx_ir",
           "onnxruntime", "onnxruntime_genai", "openvino", "pandas", "prometheus_client", "pyarrow", "pynvml", "ray",
           "requests", "rich", "scipy", "sklearn", "timm", "torch", "torchvision", "transformers", "tvm", "tvm_ffi", "xgboost",
           "yaml"]


class LazyPackage:
    """Stands for a package and imports it when an attribute is first read. A submodule is an attribute too. It looks the
    package up each time (0.5 us), so that a test may replace it in `sys.modules`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__version__":  # read by pickle, inspect and the like
            raise AttributeError(f"{self!r} has no attribute {attribute!r}")
        # __import__ as the statement does: several times faster than import_module, and it waits for an unfinished import
        package = __import__(self._name) if self._name in sys.modules else _imported(self._name)
        try:
            return getattr(package, attribute)
        except AttributeError:
            submodule = f"{self._name}.{attribute}"
            if not hasattr(package, "__path__") or find_spec(submodule) is None:
                raise
            return import_module(submodule)

    def __repr__(self) -> str:
        return f"<package {self._name!r}, loaded at its first use>"


def _imported(name: str) -> ModuleType:
    """Imports a package. Ctrl-C and SIGTERM wait until it is loaded. C++ code calls Python while it is loaded; an exception
    there may crash the process or become another error."""
    if threading.current_thread() is not threading.main_thread():
        return __import__(name)  # signal handlers run only in the main thread
    pending: list[Callable[[], object]] = []

    def deferred(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        @functools.wraps(handler)
        def wait(number: int, frame: FrameType | None) -> None:
            pending.append(lambda: handler(number, frame))
        return wait

    handlers = {number: handler for number in (signal.SIGINT, signal.SIGTERM) if callable(handler := signal.getsignal(number))}
    for number, handler in handlers.items():
        signal.signal(number, deferred(handler))
    try:
        return __import__(name)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending:
            pending[0]()


def __getattr__(name: str) -> LazyPackage:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no package {name!r}; add it to __all__")
    return LazyPackage(name)
