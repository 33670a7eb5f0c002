"""Defines ONNX Runtime as a runtime of Hase: its functions and what it measures on each device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hase.kernel_model.building.kernel_models import check_kernel, write_kernel
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.source import built_kernel
from hase.records.kernel_record import ModelOrigin, ModelRecord
from hase.records.kernel_record_files import record_path
from hase.records.measurement import DEFAULT_LABELS, GPU_LABEL, UNPROFILED, VARIANTS
from hase.runtimes.runtime import DeviceLabels, Runtime
from hase.utils import files
from hase.utils.fingerprint import Flavour, ort_version
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    import onnx


def record_model(model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int], static: bool) -> ModelRecord:
    return analyze(model, flavour.device, dims, static=static)


def write_records(workspace: Workspace, model: Path, device: str, dims: Mapping[str, int], static: bool,
                  origin: ModelOrigin) -> list[ModelRecord]:
    record = analyze(model, device, dims, static=static, group=origin.group, collection=origin.collection)
    files.write_json(record_path(workspace, record.flavour, record.model), record)
    return [record]


def check() -> None:
    """Does nothing: requirements.txt installs ONNX Runtime."""


RUNTIME = Runtime(
    name="ort", title="ONNX Runtime", package="onnxruntime", version=ort_version, check=check, levels=("all",),
    devices={"cpu": DeviceLabels((*DEFAULT_LABELS, UNPROFILED), DEFAULT_LABELS, VARIANTS[:1], VARIANTS[:1]),
             "cuda": DeviceLabels((*DEFAULT_LABELS, GPU_LABEL), (*DEFAULT_LABELS, GPU_LABEL), VARIANTS, VARIANTS)},
    model_suffixes=(".onnx",), kernel_suffix=".onnx", analyze=record_model, write_records=write_records,
    read_kernel=built_kernel, build_kernel=write_kernel, check_kernel=check_kernel, worker="hase.benchmark.ort.worker",
    analyze_with="python ort_analysis/fusion_detector.py", build_with="python kernel_model/kernel_builder.py",
    measures_energy=True, probes_sharing=True, keeps_arena=True, uses_cudnn=True)
