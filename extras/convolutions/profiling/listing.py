"""Lists devices, the models and algorithms that can be profiled here, and what has been profiled so far."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hase.extras.convolutions.profiling.algorithms import ALGORITHMS, DEFAULT, never_runs
from hase.extras.convolutions.profiling.engines import INCOMPATIBLE, INSTALL_AI3, ai3_missing
from hase.extras.convolutions.profiling.measure import PROFILE
from hase.extras.convolutions.profiling.results import JOURNAL, SETTINGS, read_settings
from hase.records.measurement import Measurement, read_blocks
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import gpu_facts, has_cuda, package_version, slug
from hase.utils.lazy import torch, torchvision
from hase.utils.locks import WRITER, is_held
from hase.utils.logger import get_logger

log = get_logger("profiler")
GPUS = {"l40s": "an NVIDIA L40S", "h100": "an NVIDIA H100", "h200": "an NVIDIA H200", "v100": "an NVIDIA V100"}
CPU = "cpu"
SUBMITTED = "submitted.txt"  # in a folder of results: the output of sbatch; its last word is the job's number
MODELS = ("vgg16", "densenet121", "resnet152", "googlenet", "alexnet", "resnet50")


def gpu_name(device: str) -> str:
    """Short name of this machine's device, `cpu` or `cuda`."""
    if device == "cpu":
        return CPU
    parts = slug(gpu_facts()["name"]).split("-")
    return next((name for name in GPUS if name in parts), "-".join(part for part in parts if part != "nvidia"))


def checked_gpu(gpu: str, device: str) -> str:
    """Returns `gpu` if it is this machine's device. Raises UserError otherwise."""
    if gpu not in (*GPUS, CPU, gpu_name(device)):
        raise UserError(f"--gpu {gpu}: no such device; known are {', '.join(GPUS)} and {CPU}")
    if gpu != gpu_name(device):
        here = gpu_facts()["name"] if device == "cuda" else "a CPU: no NVIDIA GPU that the driver can talk to"
        raise UserError(f"--gpu {gpu}: the device of this machine is {here}; use --gpu {gpu_name(device)}, or run on a machine "
                        f"with {GPUS.get(gpu, 'that device')} (sinfo -C gpu{gpu} lists Slurm's)")
    return gpu


def model_rows() -> list[dict[str, Any]]:
    """The models of the study, then the other classification models of torchvision."""
    others = [name for name in torchvision.models.list_models(module=torchvision.models) if name not in MODELS]
    return [{"model": name, "of the study": "yes" if name in MODELS else "no"} for name in (*MODELS, *others)]


def algorithm_rows(device: str) -> list[dict[str, Any]]:
    """The algorithms of `cpu` or `cuda`, and which can never run there. Those of a GPU are listed even without one."""
    capability = torch.cuda.get_device_capability() if device == "cuda" and torch.cuda.is_available() else None
    rows = []
    for algorithm in ALGORITHMS[device].values():
        reason = never_runs(algorithm, device, capability)
        if device == "cpu" and algorithm.name != DEFAULT and (missing := ai3_missing()):
            reason = f"{missing}; {INSTALL_AI3}"
        runs = f"never: {reason}" if reason else "where the layer allows"
        rows.append({"algorithm": algorithm.name, "runs": runs, "what": algorithm.meaning})
    return rows


def cuda_row() -> dict[str, Any]:
    """The GPU and the libraries that profiles use."""
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
    """One row per results folder below `root`: state, sizes measured, failed and left, and the last line of its log."""
    folders = {path.parent for pattern in (SETTINGS, SUBMITTED, "*.out") for path in root.glob(f"**/{pattern}")}
    jobs = slurm_jobs()
    return [_status_row(root, folder, jobs) for folder in sorted(folders)]


def slurm_jobs() -> dict[str, str] | None:
    """State of this user's jobs by number, e.g. `PENDING`; None if Slurm is absent or does not answer."""
    if shutil.which("squeue") is None:
        return None
    result = subprocess.run(["squeue", "--user", str(os.getuid()), "--noheader", "--format", "%i %T"], capture_output=True,
                            text=True, check=False)
    if result.returncode:
        log.warning("squeue failed, so the states of Slurm's jobs are not known: %s", result.stderr.strip())
        return None
    return dict(line.split() for line in result.stdout.splitlines())


def _status_row(root: Path, folder: Path, jobs: Mapping[str, str] | None) -> dict[str, Any]:
    """The row of one folder."""
    settings = read_settings(folder)
    measured = {m.id: m for block in read_blocks(folder / JOURNAL) for m in block.measurements if m.subject == PROFILE}
    ok = sum(m.status == "ok" for m in measured.values())
    logs = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
    lines = files.read_lines(logs[-1]) if logs else []
    left = max(len(settings.input_sizes) - len(measured), 0) if settings else None
    state = state_of_all(measured.values()) if left == 0 else state_of_rest(folder, lines[-1] if lines else None, jobs)
    return {"results": str(folder.relative_to(root)), "state": state, "measured": ok, "failed": len(measured) - ok,
            "left": left, "last": max((m.ended for m in measured.values()), default=None), "log": lines[-1] if lines else None}


def state_of_all(measured: Collection[Measurement]) -> str:
    """State when all sizes were tried: `done`; `failed` if none could be measured; `refused` if the algorithm cannot run."""
    if any(m.status == "ok" for m in measured):
        return "done"
    return "refused" if all(INCOMPATIBLE in m.error for m in measured) else "failed"


def state_of_rest(folder: Path, last_line: str | None, jobs: Mapping[str, str] | None) -> str:
    """The state if sizes are left: `running`, `submitted` (a waiting job), `refused`, `stopped` (without a process), or `not
    known` (a job of Slurm, on a machine without Slurm)."""
    if is_held(folder / WRITER):
        return "running"
    submitted = (files.read_lines(folder / SUBMITTED) or [""])[-1].split() if (folder / SUBMITTED).exists() else []
    if submitted and jobs is not None and submitted[-1] in jobs:
        return "running" if jobs[submitted[-1]] == "RUNNING" else "submitted"
    if last_line is not None and last_line.startswith("error: ") and not (folder / SETTINGS).exists():
        return "refused"
    return "not known" if submitted and jobs is None else "stopped"
