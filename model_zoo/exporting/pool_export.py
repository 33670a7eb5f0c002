"""Exports networks of the pool's collections, several at a time, each in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hase.model_zoo.exporting.network_export import Network, network_stamp, stem_of, write_network
from hase.model_zoo.exporting.onnx_export import is_done, short
from hase.model_zoo.exporting.zoo_config import Collection
from hase.utils.errors import UserError
from hase.utils.fingerprint import resolve_device
from hase.utils.lazy import torch
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.processes import each_in_a_process

MODULES: dict[Collection, str] = {
    "timm": "hase.model_zoo.networks.from_timm", "transformers": "hase.model_zoo.networks.from_transformers",
    "torchvision": "hase.model_zoo.networks.torchvision_tasks", "other": "hase.model_zoo.networks.other",
    "random": "hase.model_zoo.networks.drawn"}
OPTIONAL_PACKAGES: dict[Collection, str] = {"timm": "timm", "transformers": "transformers"}
log = get_logger("exporter")


class NetworkSource(NamedTuple):
    """What a module of model_zoo/networks offers.

    Attributes:
        check_names: raises `UserError` for a name that it does not know.
        build_network: makes the network of a name, which belongs to a family.
    """

    check_names: Callable[[Iterable[str]], None]
    build_network: Callable[[str, str], Network]


def network_source(collection: Collection) -> NetworkSource:
    """The source of a collection's networks; `UserError` where a package that it needs is not installed."""
    package = OPTIONAL_PACKAGES.get(collection)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed here; install it with: pip install -r requirements-pool.txt")
    module = importlib.import_module(MODULES[collection])
    return NetworkSource(module.check_names, module.build_network)


@dataclass(frozen=True)
class NetworkExport:
    """One network to write in one or two data types."""

    name: str
    family: str
    dtypes: tuple[str, ...]


def _row(export: NetworkExport, path: Path, status: str, difference: float | None = None, error: str = "") -> dict[str, Any]:
    mb = round(path.stat().st_size / 1e6, 2) if status != "failed" else None
    return {"model": export.name, "file": str(path), "status": status, "mb": mb, "difference": difference, "error": error}


def export_network(folder: Path, collection: Collection, device: str, force: bool, jobs: int,
                   export: NetworkExport) -> list[dict[str, Any]]:
    """Writes the files of one network that are missing, in this process; a row for each. One that can't be written says why."""
    if "OMP_NUM_THREADS" not in os.environ:  # else torch follows it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    rows, network = [], None
    for dtype in export.dtypes:
        path = folder / f"{stem_of(export.name, dtype)}.onnx"
        if not force and is_done(path, network_stamp(export.name, collection, export.family, dtype)):
            rows.append(_row(export, path, "kept"))
            continue
        try:
            network = network or network_source(collection).build_network(export.name, export.family)
            rows.append(_row(export, path, "written", write_network(network, dtype, path, device)))
        except Exception as error:  # whatever a library stumbles on costs one model
            log.debug("%s", path.name, exc_info=True)
            rows.append(_row(export, path, "failed", error=short(error)))
    return rows


def _crashed(folder: Path, export: NetworkExport) -> list[dict[str, Any]]:
    path = folder / f"{stem_of(export.name, export.dtypes[0])}.onnx"
    for left in folder.glob(f".{export.name}*.tmp.onnx"):
        left.unlink(missing_ok=True)
    return [_row(export, path, "failed", error="the exporting process died, most likely for lack of memory")]


def export_networks(workspace: Workspace, collection: Collection, families: Mapping[str, str], dtypes: Sequence[str],
                    device: str, jobs: int, force: bool = False) -> list[dict[str, Any]]:
    """Writes `<name>.onnx` and `<name>_fp16.onnx` of each network to the models' folder; a row a file. One that fails costs
    only itself.

    Args:
        families: the family of each network by its name.
        dtypes: `fp32`, `fp16` or both.
        device: `auto`, `cpu` or `cuda`: where the files are checked.
        jobs: networks at a time, each in a process of its own.
        force: make files anew that are there.

    Raises:
        UserError: an unknown name, a package that is not installed, or CUDA asked for where there is none.
    """
    checked_on = resolve_device(device)
    network_source(collection).check_names(families)
    workspace.models.mkdir(parents=True, exist_ok=True)
    exports = [NetworkExport(name, family, tuple(dict.fromkeys(dtypes))) for name, family in families.items()]
    task = partial(export_network, workspace.models, collection, checked_on, force, jobs)
    done = each_in_a_process(task, exports, jobs, partial(_crashed, workspace.models), "exporting")
    rows = [row for part in done for row in part]
    for row in rows:
        if row["status"] == "failed":
            log.error("%s: %s", Path(row["file"]).name, row["error"])
    return rows
