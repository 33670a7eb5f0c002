"""Whether OpenVINO is there, and how it compiles a model for this CPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, instruction_set, package_version, physical_cores
from hase.utils.lazy import openvino

NAME = "openvino"  # of the package, and of the runtime
FUSED = "fused"  # the only level: the kernels that OpenVINO makes of operators
REMAKE = "python ort_analysis/fusion_detector.py --runtime openvino"  # makes the records of models
INSTALL = "pip install -r requirements-openvino.txt"


def version() -> str:
    """The full version that is installed; "" where it is not."""
    return package_version(NAME)


def check_openvino() -> None:
    """Checks that OpenVINO is installed.

    Raises:
        UserError: it is not.
    """
    if find_spec(NAME) is None:
        raise UserError(f"the package openvino is not installed, and this needs it; {INSTALL}")


def openvino_flavour() -> Flavour:
    """The flavour of OpenVINO's graphs on this machine."""
    return Flavour(device="cpu", runtime=NAME, runtime_version=".".join(version().split(".")[:2]), optimization=FUSED,
                   instruction_set=instruction_set())


def configuration(threads: int = 0) -> dict[str, Any]:
    """How a model is compiled, with layers that are timed; `threads` 0: one for each physical core.

    In float32, since OpenVINO takes bfloat16 by itself where the CPU has it. Threads are not pinned, as a target without
    `cores` says.
    """
    return {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False, "PERF_COUNT": True,
            "INFERENCE_NUM_THREADS": threads or physical_cores()}


def compile_model(model: Any, name: str, threads: int = 0) -> Any:
    """A model of OpenVINO, compiled for this CPU; `name` is for messages.

    Raises:
        UserError: OpenVINO can't compile it.
    """
    try:
        return openvino.Core().compile_model(model, "CPU", configuration(threads))
    except RuntimeError as error:
        raise refused(name, error) from error


def refused(name: str, error: Exception) -> UserError:
    """The error for a model that OpenVINO can't read, compile or run, with the last line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(f"{name}: OpenVINO can't take this model: {lines[-1] if lines else type(error).__name__}")
