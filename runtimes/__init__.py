"""Runtimes: what analyses, builds, opens and runs models. A folder for each, and the table that names them."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import TYPE_CHECKING

from utils.errors import UserError

if TYPE_CHECKING:
    from runtimes.runtime import Runtime

# By name, the module that defines RUNTIME. It is loaded when it is asked for.
MODULES = {"ort": "runtimes.ort.runtime", "tvm": "runtimes.tvm.runtime", "openvino": "runtimes.openvino.runtime"}


@functools.cache
def runtime_named(name: str) -> Runtime:
    """The runtime of a name.

    Raises:
        UserError: there is none.
    """
    if name not in MODULES:
        raise UserError(f"runtime {name}: unknown to this version; it knows {', '.join(MODULES)}")
    runtime: Runtime = import_module(MODULES[name]).RUNTIME
    return runtime
