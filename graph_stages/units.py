"""The processing units of this machine: those of OpenVINO by its own names, and NVIDIA's GPU as `CUDA`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_stages.export import has_openvino, kind_of
from graph_stages.records import UnitReport
from graph_stages.work import INFERENCE_PRECISION, OPENVINO, ORT, TORCH
from utils.errors import UserError
from utils.fingerprint import gpu_facts, machine, package_version
from utils.lazy import onnxruntime, openvino

INSTALL = "pip install -r requirements-stages.txt"
KINDS = ("CPU", "GPU", "NPU", "CUDA")
CPU_RUNTIMES = (OPENVINO, ORT, TORCH)
PACKAGES = {OPENVINO: ("openvino",), ORT: ("onnxruntime-gpu", "onnxruntime"), TORCH: ("torch",)}
NEEDS = {"GPU": "an Intel GPU with its driver (on Linux: intel-opencl-icd, and a user who may read /dev/dri)",
         "NPU": "an Intel Core Ultra with the NPU's driver (on Linux: a user who may read /dev/accel)"}


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
    found = openvino_devices() if devices is None else dict(devices)
    chosen = cpu_runtime or (OPENVINO if "CPU" in found else TORCH)
    if not runtime_version(chosen):
        raise UserError(f"--cpu-runtime {chosen}: it is not installed; {INSTALL}")
    units = [_unit("CPU", found.get("CPU") or machine("cpu").device_name, chosen)]
    for kind in ("GPU", "NPU"):
        there = [name for name in found if kind_of(name) == kind]
        units += [_unit(name, found[name], OPENVINO) for name in there] or [_absent(kind, _why_not_there(kind, found))]
    if why := _why_no_cuda():
        return [*units, _absent("CUDA", why)]
    return [*units, _unit("CUDA", gpu_facts()["name"], ORT)]


def _unit(name: str, device_name: str, runtime: str) -> UnitReport:
    return UnitReport(name=name, present=True, device_name=device_name, runtime=runtime,
                      inference_precision=INFERENCE_PRECISION[kind_of(name)])


def _absent(name: str, why: str) -> UnitReport:
    return UnitReport(name=name, present=False, why=why)


def _why_not_there(kind: str, devices: Mapping[str, str]) -> str:
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


def choose_units(found: Sequence[UnitReport], asked: Sequence[str]) -> list[UnitReport]:
    """The units to measure, in the order of `found`: those that are there and asked for; all where `asked` is empty.

    Raises:
        UserError: no such unit, or none of them is there. The message says why each is out.
    """
    names = [unit.name for unit in found]
    for name in asked:
        if name not in names and name not in KINDS:
            raise UserError(f"--units {name}: no such unit; this machine was asked for {', '.join(names)}")
    wanted = [unit for unit in found if not asked or unit.name in asked or kind_of(unit.name) in asked]
    if present := [unit for unit in wanted if unit.present]:
        return present
    raise UserError("no unit to measure: " + "; ".join(f"{unit.name}: {unit.why}" for unit in wanted))
