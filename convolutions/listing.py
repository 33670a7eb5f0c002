"""What the commands list: the names of devices, the models and algorithms that can be profiled here, and what has been profiled
so far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convolutions.algorithms import DEFAULT, algorithms_of, never_runs
from convolutions.engines import AI3_REQUIREMENTS, ai3_missing
from convolutions.measure import PROFILE, ProfileSettings
from convolutions.results import JOURNAL, SETTINGS, read_settings
from records.blocks import read_blocks
from utils import files
from utils.errors import UserError
from utils.fingerprint import gpu_facts, has_cuda, package_version, slug
from utils.lazy import torch, torchvision

GPUS = {"l40s": "an NVIDIA L40S", "h100": "an NVIDIA H100", "h200": "an NVIDIA H200", "v100": "an NVIDIA V100"}
CPU = "cpu"
MODELS = ("vgg16", "densenet121", "resnet152", "googlenet", "alexnet", "resnet50")


def slurm_feature(gpu: str) -> str:
    """Slurm's feature of nodes with this GPU, e.g. `gpul40s`."""
    return f"gpu{gpu}"


def gpu_name(device: str) -> str:
    """The short name of this machine's device, `cpu` or `cuda`."""
    if device == "cpu":
        return CPU
    parts = slug(gpu_facts()["name"]).split("-")
    return next((name for name in GPUS if name in parts), "-".join(part for part in parts if part != "nvidia"))


def checked_gpu(gpu: str, device: str) -> str:
    """`gpu`, if that is the device of this machine.

    Raises:
        UserError: this machine has another device, or there is no such name.
    """
    if gpu not in (*GPUS, CPU, gpu_name(device)):
        raise UserError(f"--gpu {gpu}: no such device; known are {', '.join(GPUS)} and {CPU}")
    if gpu != gpu_name(device):
        here = gpu_facts()["name"] if device == "cuda" else "a CPU: no NVIDIA GPU that the driver can talk to"
        raise UserError(f"--gpu {gpu}: the device of this machine is {here}; use --gpu {gpu_name(device)}, or run on a machine "
                        f"with {GPUS.get(gpu, 'that device')} (sinfo -C {slurm_feature(gpu)} lists Slurm's)")
    return gpu


def model_rows() -> list[dict[str, Any]]:
    """The models of the study, then torchvision's other classification models."""
    others = [name for name in torchvision.models.list_models(module=torchvision.models) if name not in MODELS]
    return [{"model": name, "of the study": "yes" if name in MODELS else "no"} for name in (*MODELS, *others)]


def algorithm_rows(device: str) -> list[dict[str, Any]]:
    """The algorithms of `cpu` or `cuda`, and which can never run on this machine."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    rows = []
    for algorithm in algorithms_of(device).values():
        never = never_runs(algorithm, device, capability)
        if device == "cpu" and algorithm.name != DEFAULT and (missing := ai3_missing()):
            never = f"{missing}; pip install -r {AI3_REQUIREMENTS}"
        runs = f"never: {never}" if never else "where the layer allows"
        rows.append({"algorithm": algorithm.name, "runs here": runs, "what": algorithm.meaning})
    return rows


def cuda_row() -> dict[str, Any]:
    """The GPU and the libraries that profiles use.

    Raises:
        UserError: CUDA or cuDNN is not available.
    """
    if not has_cuda():
        raise UserError("cuDNN is not available: this machine has no NVIDIA GPU that the driver can talk to (nvidia-smi should "
                        "list one); on a CPU the algorithms are those of --list-algorithms")
    if not torch.cuda.is_available():
        raise UserError(f"CUDA is not available: torch {torch.__version__} can't use the GPU, though the driver "
                        f"({gpu_facts()['driver']}) lists it; install the wheels of requirements.txt")
    if not torch.backends.cudnn.is_available():
        raise UserError("cuDNN is not available: this torch was built without it; install the wheels of requirements.txt")
    major, minor = torch.cuda.get_device_capability()
    return {"gpu": gpu_facts()["name"], "driver": gpu_facts()["driver"], "compute capability": f"{major}.{minor}",
            "memory (GiB)": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1), "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "nvidia-ml-py": package_version("nvidia-ml-py")}


def status_rows(root: Path) -> list[dict[str, Any]]:
    """One row for each folder of results below `root`: sizes measured, failed and missing, and the last line of its log."""
    return [_status_row(root, path.parent) for path in sorted(root.glob(f"**/{SETTINGS}"))]


def _status_row(root: Path, folder: Path) -> dict[str, Any]:
    settings = read_settings(folder)
    assert settings is not None  # its file was just found
    measured = {m.id: m for block in read_blocks(folder / JOURNAL) for m in block.measurements if m.subject == PROFILE}
    ok = sum(m.status == "ok" for m in measured.values())
    logs = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
    lines = files.read_lines(logs[-1]) if logs else []
    return {"results": str(folder.relative_to(root)), "state": state_of(settings, ok, len(measured)), "measured": ok,
            "failed": len(measured) - ok, "left": max(len(settings.input_sizes) - len(measured), 0),
            "last": max((m.ended for m in measured.values()), default=None), "log": lines[-1] if lines else None}


def state_of(settings: ProfileSettings, ok: int, tried: int) -> str:
    """`done`, `started`, or `failed` where nothing could be measured."""
    if tried < len(settings.input_sizes):
        return "started"
    return "done" if ok else "failed"
