"""What this machine is, which devices can be predicted, what is missing, and what to do about it.

Reads the installed packages, the workspace and the cache. Prints a row for each check; a row that needs something names the
command. Writes nothing. Exit status 1: something is broken, so that predictions fail or are wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from typing import Literal, NamedTuple

from hase.inference.prediction.targets import local_targets, predictor_folders
from hase.records.devices import catalogue
from hase.utils import cli
from hase.utils.cache_folder import cache_folder
from hase.utils.commands import as_typed
from hase.utils.fingerprint import allowed_cores, cpu_name, gpu_facts, ort_version, package_version
from hase.utils.lazy import onnxruntime
from hase.utils.paths import IN_CLONE, SHIPPED, Workspace

EXAMPLES = """
python inference/doctor.py
python inference/doctor.py --json
"""
ORT_PACKAGES = ("onnxruntime", "onnxruntime-gpu")  # both install into the folder onnxruntime
FOR_EXTRA = re.compile(r"([\w.-]+).*; extra == ['\"](\w+)['\"]")  # a package's requirement of an extra


class Check(NamedTuple):
    """A row of the report. `missing` is no fault: something optional can't be used yet."""

    what: str
    state: Literal["ok", "missing", "broken"]
    found: str
    do: str = ""


def installed_in(package: str) -> str:
    """The folder that a package is installed in; "" if it is not."""
    try:
        return str(metadata.distribution(package).locate_file(""))
    except metadata.PackageNotFoundError:
        return ""


def machine_checks() -> Iterator[Check]:
    """The processor, the GPU and ONNX Runtime."""
    yield Check("processor", "ok", f"{cpu_name()}, {allowed_cores() or os.cpu_count()} cores for this process")
    gpu, version = gpu_facts(), ort_version()
    if gpu:
        yield Check("NVIDIA GPU", "ok", f"{gpu['name']}, driver {gpu['driver']}")
    else:
        yield Check("NVIDIA GPU", "missing", "none here")
    supported = sorted(SHIPPED.glob("*"))[0].name.partition("-ort")[2].partition("-")[0]
    if not version:
        yield Check("ONNX Runtime", "broken", "not installed", f"pip install onnxruntime=={supported}.*")
        return
    if len(folders := [folder for name in ORT_PACKAGES if (folder := installed_in(name))]) > len(set(folders)):
        yield Check("ONNX Runtime", "broken", "onnxruntime and onnxruntime-gpu are both installed, in the same folder",
                    "pip uninstall --yes onnxruntime onnxruntime-gpu, and install one of them")
    elif not version.startswith(f"{supported}."):
        yield Check("ONNX Runtime", "broken", f"{version}; what comes with Hase was measured with {supported}",
                    f"pip install onnxruntime=={supported}.*, or predict with --force")
    else:
        yield Check("ONNX Runtime", "ok", version)
    if gpu and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        yield Check("measuring on the GPU", "missing", "this ONNX Runtime has no CUDA provider",
                    f"pip uninstall --yes onnxruntime && pip install onnxruntime-gpu=={version}")


def target_checks(workspace: Workspace) -> Iterator[Check]:
    """What can be predicted: this machine, targets with predictors, cards from data sheets."""
    folders = predictor_folders(workspace)
    for local in local_targets():
        if local.name in folders:
            yield Check(f"this machine's {local.flavour.device}", "ok", local.name)
        else:
            yield Check(f"this machine's {local.flavour.device}", "missing", f"nothing was measured of {local.name}",
                        "python recipes/this_device/measure_this_device.py, or for one model python "
                        "inference/predict_model_latency.py --measure-missing")
    for name, folder in folders.items():
        yield Check("predictors", "ok", f"{name}, {'which come with Hase' if folder.parent == SHIPPED else folder}")
    yield Check("GPUs from data sheets", "ok", f"{len(catalogue())}, such as {', '.join(gpu.slug for gpu in catalogue()[-6:])}")


def folder_checks(workspace: Workspace) -> Iterator[Check]:
    """The workspace and the cache, and whether they can be written."""
    cache = cache_folder()
    for what, folder in (("workspace", workspace.root), ("cache", cache)):
        if folder is None:
            yield Check(what, "missing", "off: every model is analysed again", "unset HASE_CACHE")
            continue
        nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if os.access(nearest, os.W_OK):
            yield Check(what, "ok", str(folder))
        else:
            yield Check(what, "missing", f"{folder} can't be written", f"make it writable, or name another one with "
                        f"{'--workspace' if what == 'workspace' else 'HASE_CACHE'}")


def package_checks() -> Iterator[Check]:
    """Hase itself, Python, and the extras."""
    place = "a clone" if IN_CLONE else "a package"
    try:
        version, requirements = metadata.version("hase"), metadata.requires("hase") or []
    except metadata.PackageNotFoundError:
        version, requirements = "not installed", []
    yield Check("Hase", "ok", f"{version}, {place}; Python {platform.python_version()}")
    needed: dict[str, list[str]] = defaultdict(list)
    for requirement in filter(None, map(FOR_EXTRA.match, requirements)):
        needed[requirement[2]] += [requirement[1]] if requirement[1] != "hase" else []
    for extra, packages in needed.items():
        if missing := [package for package in packages if not package_version(package)]:
            yield Check(f"extra {extra}", "missing", f"{', '.join(missing)} not installed", f"pip install '.[{extra}]'")
        else:
            yield Check(f"extra {extra}", "ok", ", ".join(packages))


def main() -> int:
    args = cli.parser(__doc__, EXAMPLES).parse_args()
    workspace = cli.start(args)
    checks = [*package_checks(), *machine_checks(), *target_checks(workspace), *folder_checks(workspace)]
    cli.print_rows([check._asdict() | {"do": as_typed(check.do)} for check in checks], args.json, "this machine")
    return 1 if any(check.state == "broken" for check in checks) else 0


if __name__ == "__main__":
    cli.run(main)
