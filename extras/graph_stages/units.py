"""The processing units of this machine, and what is measured on them: one stage on one unit at one size.

Units have OpenVINO's names; NVIDIA's GPU is `CUDA`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hase.extras.graph_stages.graphs import GraphSize, GraphSource
from hase.extras.graph_stages.layer import STAGES, Array, Stage, Weights, all_tensors, draw_weights
from hase.extras.graph_stages.models import FORM_OF, ModelFile, has_openvino, kind_of, model_file
from hase.extras.graph_stages.records import UnitReport
from hase.utils.errors import UserError
from hase.utils.fingerprint import gpu_facts, machine, package_version
from hase.utils.frozen import Frozen
from hase.utils.lazy import onnxruntime, openvino
from hase.utils.paths import as_file_name

OPENVINO, ORT, TORCH = "openvino", "ort", "torch"
INSTALL = "pip install -r requirements-stages.txt"
KINDS = ("CPU", "GPU", "NPU", "CUDA")
CPU_RUNTIMES = (OPENVINO, ORT, TORCH)
PACKAGES = {OPENVINO: ("openvino",), ORT: ("onnxruntime-gpu", "onnxruntime"), TORCH: ("torch",)}
NEEDS = {"GPU": "an Intel GPU with its driver (on Linux: intel-opencl-icd, and a user who may read /dev/dri)",
         "NPU": "an Intel Core Ultra with the NPU's driver (on Linux: a user who may read /dev/accel)"}
INFERENCE_PRECISION = {"CPU": "f32", "CUDA": "f32", "GPU": "f16", "NPU": "f16"}  # by kind of unit; what it computes in


def openvino_devices() -> dict[str, str]:
    """OpenVINO's devices on this machine with their full names; empty without OpenVINO."""
    if not has_openvino():
        return {}
    core = openvino.Core()
    return {name: str(core.get_property(name, "FULL_DEVICE_NAME")).strip() for name in core.available_devices}


def runtime_version(runtime: str) -> str:
    """What is installed here; "" for nothing."""
    return package_version(*PACKAGES[runtime])


def find_units(cpu_runtime: str | None = None, devices: Mapping[str, str] | None = None) -> list[UnitReport]:
    """Every unit that this machine has or could have; one that is absent says why.

    Args:
        cpu_runtime: what runs stages on the CPU; by default OpenVINO or, without it, PyTorch.
        devices: OpenVINO's, in place of those that it finds.

    Raises:
        UserError: that runtime is not installed.
    """
    present = openvino_devices() if devices is None else dict(devices)
    chosen = cpu_runtime or (OPENVINO if "CPU" in present else TORCH)
    if not runtime_version(chosen):
        raise UserError(f"--cpu-runtime {chosen}: it is not installed; {INSTALL}")
    units = [_unit("CPU", present.get("CPU") or machine("cpu").device_name, chosen)]
    for kind in ("GPU", "NPU"):
        names = [name for name in present if kind_of(name) == kind]
        units += [_unit(name, present[name], OPENVINO) for name in names] or [_absent(kind, _why_absent(kind, present))]
    if why := _why_no_cuda():
        return [*units, _absent("CUDA", why)]
    return [*units, _unit("CUDA", gpu_facts()["name"], ORT)]


def _unit(name: str, device_name: str, runtime: str) -> UnitReport:
    return UnitReport(name=name, present=True, device_name=device_name, runtime=runtime,
                      inference_precision=INFERENCE_PRECISION[kind_of(name)])


def _absent(name: str, why: str) -> UnitReport:
    return UnitReport(name=name, present=False, why=why)


def _why_absent(kind: str, devices: Mapping[str, str]) -> str:
    if not devices:
        return f"the package openvino, which finds it, is not installed; {INSTALL}"
    return f"OpenVINO {runtime_version(OPENVINO)} finds none (it finds {', '.join(devices)}); it needs {NEEDS[kind]}"


def _why_no_cuda() -> str:
    """Why there is no CUDA; "" where there is."""
    if not gpu_facts():
        return "no NVIDIA GPU that the driver can talk to; nvidia-smi should list one"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this ONNX Runtime has no CUDA provider; pip install onnxruntime-gpu in place of onnxruntime"
    return ""


def choose_units(reports: Sequence[UnitReport], asked: Sequence[str]) -> list[UnitReport]:
    """The units to measure, in the order of `reports`: those that are there and asked for; all where `asked` is empty.

    Raises:
        UserError: no such unit, or none of them is there. The message says why each is out.
    """
    names = [unit.name for unit in reports]
    for name in asked:
        if name not in names and name not in KINDS:
            raise UserError(f"--units {name}: no such unit; this machine was asked for {', '.join(names)}")
    wanted = [unit for unit in reports if not asked or unit.name in asked or kind_of(unit.name) in asked]
    if present := [unit for unit in wanted if unit.present]:
        return present
    raise UserError("no unit to measure: " + "; ".join(f"{unit.name}: {unit.why}" for unit in wanted))


class StageTask(Frozen):
    """One stage to measure on one unit, on one graph.

    Attributes:
        size: of the graph and the layer.
        source: of the graph.
        graph: its name.
        unit: OpenVINO's name of it, or `CUDA`.
        stage: 1 to 7.
        runtime: what is to run it: `openvino`, `ort` or `torch`.
        runtime_version: so that another version is measured anew.
        threads: on the CPU; 0 for the runtime's own choice.
        warmup, runs: before and in the measurement.
        models: the folder with `onnx_models` and `ir_models`.
    """

    size: GraphSize
    source: GraphSource = GraphSource()
    graph: str
    unit: str
    stage: int
    runtime: str
    runtime_version: str = ""
    threads: int = 0
    warmup: int = 10
    runs: int = 50
    models: str

    @property
    def id(self) -> str:
        """Says all that matters, so that the journal tells other settings apart."""
        size = self.size
        parts = (self.unit, f"stage{self.stage}", size.name, f"f{size.features}", f"h{size.hidden}", self.graph,
                 f"s{self.source.seed}", f"{self.runtime}{self.runtime_version}", f"t{self.threads}", f"w{self.warmup}",
                 f"r{self.runs}")
        return as_file_name("_".join(parts))

    @property
    def definition(self) -> Stage:
        return STAGES[self.stage - 1]

    @property
    def folder(self) -> Path:
        """Of the models."""
        return Path(self.models)

    @property
    def file(self) -> ModelFile:
        """Its model."""
        return model_file(self.unit, self.definition, self.size, self.source.seed)

    @property
    def precision(self) -> str:
        """Of the weights: `FP32` or `FP16`."""
        return FORM_OF[kind_of(self.unit)].precision

    @property
    def inference_precision(self) -> str:
        return INFERENCE_PRECISION[kind_of(self.unit)]

    @property
    def weights(self) -> Weights:
        """As the unit's files store them."""
        drawn = draw_weights(self.size.features, self.size.hidden, self.source.seed)
        return drawn if self.precision == "FP32" else drawn.rounded()

    @property
    def tensors(self) -> dict[str, Array]:
        """All tensors of the layer on this graph: the stage's inputs, and what it should give."""
        return _tensors(self.size, self.source, self.precision)


@functools.lru_cache(maxsize=1)  # the stages of one size come one after another
def _tensors(size: GraphSize, source: GraphSource, precision: str) -> dict[str, Array]:
    weights = draw_weights(size.features, size.hidden, source.seed)
    graph = source.graph(size.nodes, size.edges)
    return all_tensors(graph, weights if precision == "FP32" else weights.rounded(), source.seed)


def facts_of(task: StageTask) -> dict[str, Any]:
    """What every measurement of a task says of it, by the fields of `StageRecord`."""
    size, stage = task.size, task.definition
    return {"nodes": size.nodes, "edges": size.edges, "features": size.features, "hidden": size.hidden, "graph": task.graph,
            "unit": task.unit, "stage": stage.id, "stage_name": stage.name, "precision": task.precision,
            "bytes_in": stage.bytes_in(size), "bytes_out": stage.bytes_out(size)}
