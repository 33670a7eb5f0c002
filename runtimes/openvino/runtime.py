"""The description of OpenVINO for the rest of Hase."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.records.kernel_record_files import write_record
from hase.runtimes.openvino.compiling import FUSED, NAME, REMAKE, check_openvino
from hase.runtimes.openvino.recording import build_kernel, parse
from hase.runtimes.openvino.runs import check_kernel
from hase.runtimes.runtime import DeviceLabels, Runtime
from hase.utils.fingerprint import Flavour, package_version
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    import onnx

LABELS = DeviceLabels(("kernel_time", "run"), ("kernel_time", "run"))


def record_model(model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int], static: bool) -> ModelRecord:
    """Analyses a model without writing its record. OpenVINO fixes all sizes, whatever `static` says."""
    return parse(model, dims).record


def write_records(workspace: Workspace, model: Path, device: str, dims: Mapping[str, int], static: bool,
                  origin: ModelOrigin) -> list[ModelRecord]:
    """Analyses a model and writes its record. `static` has no effect. Raises UserError for a device other than a CPU."""
    RUNTIME.on(device)
    return [write_record(workspace, parse(model, dims).record, origin)]


RUNTIME = Runtime(
    name=NAME, title="OpenVINO", package=NAME, version=partial(package_version, NAME), check=check_openvino, levels=(FUSED,),
    devices={"cpu": LABELS}, model_suffixes=(".onnx",), kernel_suffix=".onnx", analyze=record_model,
    write_records=write_records, read_kernel=built_kernel, build_kernel=build_kernel, check_kernel=check_kernel,
    worker="hase.runtimes.openvino.worker", analyze_with=REMAKE, build_with="python kernel_model/kernel_builder.py",
    takes_setting=True)
