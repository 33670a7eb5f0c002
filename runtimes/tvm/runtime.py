"""Apache TVM as a runtime of Hase: its record of functions and facts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.runtimes.runtime import DeviceLabels, Runtime
from hase.runtimes.tvm.compiling import FUSED, SUFFIX, TUNED, UNFUSED, check_tvm, read_kernel
from hase.runtimes.tvm.lowering import TORCH_SUFFIX
from hase.runtimes.tvm.recording import parse, parse_at, write_parsed
from hase.utils.fingerprint import Flavour, package_version
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    import onnx

RUN_ONLY = DeviceLabels(("run",), ("run",))  # each kernel is timed in a session of its own, since TVM has fused it before


def version() -> str:
    return package_version("apache-tvm")


def record_model(model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int], static: bool) -> ModelRecord:
    """The record of a model, not written to a file. `static` has no effect, since TVM always fixes all sizes."""
    return parse_at(flavour.optimization, model, dims, flavour.device).record


def write_records(workspace: Workspace, model: Path, device: str, dims: Mapping[str, int], static: bool,
                  origin: ModelOrigin) -> list[ModelRecord]:
    """Writes the kernels' functions, and records of the levels that need no tuning. `static` has no effect."""
    return write_parsed(workspace, parse(model, dims, device=device), origin)


RUNTIME = Runtime(
    name="tvm", title="TVM", package="apache-tvm", version=version, check=check_tvm, levels=(FUSED, UNFUSED, TUNED),
    runs_as={TUNED: FUSED}, devices=dict.fromkeys(("cpu", "cuda"), RUN_ONLY), model_suffixes=(".onnx", TORCH_SUFFIX),
    kernel_suffix=SUFFIX, analyze=record_model, write_records=write_records, read_kernel=read_kernel,
    worker="hase.runtimes.tvm.worker", analyze_with="python runtimes/tvm/relax_parser.py",
    build_with="python runtimes/tvm/relax_parser.py", takes_setting=True, analysis_limit_s=600.0)  # it compiles each kernel
