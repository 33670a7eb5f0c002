"""Exports the networks of the collections (the pool) with dynamic dimensions, in several processes, and compares their outputs
with torch's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hase.model_zoo.exporting.onnx_export import (
    LARGEST_FILE,
    add_metadata,
    exported,
    has_metadata,
    relative_difference,
    remove_paths,
    short_message,
    silent_exporter,
)
from hase.model_zoo.exporting.torch_models import SEED, weight_bytes
from hase.model_zoo.exporting.zoo_config import Collection
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version, resolve_device
from hase.utils.lazy import onnx, torch
from hase.utils.logger import get_logger
from hase.utils.model_files import COLLECTION_KEY, DEFAULT_DIMS_KEY, GROUP_KEY
from hase.utils.ort_sessions import model_errors, open_session
from hase.utils.paths import Workspace
from hase.utils.processes import map_in_processes

log = get_logger("exporter")
InputDistribution = Literal["normal", "ones", "indices"]
EXPORTER_VERSION = 1  # files of another version are exported again
DATA_SIZED_KEY = "hase.data_sized"  # metadata: sizes in the graph depend on data
POOL_SIZES_KEY = "hase.pool_sizes"  # metadata: the sizes of each dynamic dimension at which the pool is measured
MOST_OF_A_DIMENSION = 65536
NO_SPINNING = {"session.intra_op.allow_spinning": "0"}  # other processes may be exporting at the same time
LEAST_TRACED = 2  # a traced size of 1 would stay 1
OLDER_OPSET = 17  # the last that torch's older exporter is meant for
SECOND_SIZE_FACTOR = 3  # outputs are checked at this multiple of the default size, too: a tracer may have fixed a size
# Largest difference allowed, as for torchvision's models (onnx_export.py says why). In a deep network with random weights,
# float32's rounding makes up to 0.003.
TOLERANCE = {"fp32": 0.01, "reduced": 0.1}
MODULES: dict[Collection, str] = {  # each has SOURCES, by collection
    "timm": "hase.model_zoo.networks.libraries", "transformers": "hase.model_zoo.networks.libraries",
    "torchvision": "hase.model_zoo.networks.libraries", "other": "hase.model_zoo.networks.other",
    "random": "hase.model_zoo.networks.drawn"}
OPTIONAL_PACKAGES: dict[Collection, str] = {"timm": "timm", "transformers": "transformers"}
PACKAGES = {"timm": ("timm",), "transformers": ("transformers",), "torchvision": ("torchvision",)}  # by collection


@dataclass(frozen=True)
class NetworkInput:
    """One input of a network."""

    name: str
    shape: tuple[int | str, ...]  # a size, or the name of a dynamic dimension, per axis; equal names mean equal sizes
    values: InputDistribution = "normal"  # `normal` floats, ones (a mask), or integers from 0 to `below` (such as word ids)
    below: int = 0

    def draw(self, sizes: Mapping[str, int], generator: np.random.Generator) -> np.ndarray:
        """Random values, float32 or int64, for these sizes."""
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        if self.values == "normal":
            return generator.standard_normal(shape, dtype=np.float32)
        if self.values == "ones":
            return np.ones(shape, np.int64)
        return generator.integers(0, self.below, shape)


@dataclass(frozen=True)
class Network:
    """A torch network and what is needed to export it."""

    name: str
    collection: str
    family: str  # models of one family are held out of training together
    module: torch.nn.Module  # in evaluation mode, with positional inputs; returns a tensor or a tuple of tensors
    inputs: tuple[NetworkInput, ...]
    sizes: Mapping[str, tuple[int, ...]]  # by dynamic dimension, the sizes to measure; the first is the default
    data_sized: bool = False  # output sizes depend on data, as a detector's do; outputs are not compared with torch's
    # whether torch's older exporter, which traces a run, exports it; needed for recurrent layers of any length, and detectors
    traced: bool = False

    @property
    def dims(self) -> tuple[str, ...]:
        """The dynamic dimensions, in the inputs' order."""
        return tuple(dict.fromkeys(size for spec in self.inputs for size in spec.shape if isinstance(size, str)))

    @property
    def default_sizes(self) -> dict[str, int]:
        """The default sizes of the dynamic dimensions."""
        return {dim: sizes[0] for dim, sizes in self.sizes.items()}

    def example(self) -> tuple[torch.Tensor, ...]:
        """Random inputs of the default sizes, in float32."""
        return tuple(torch.from_numpy(values) for values in self.draw(self.default_sizes, "fp32").values())

    def draw(self, sizes: Mapping[str, int], dtype: str) -> dict[str, np.ndarray]:
        """Random inputs by name, deterministic for given sizes; floats are float16 if `dtype` is fp16."""
        generator = np.random.default_rng(SEED)
        drawn = {spec.name: spec.draw(sizes, generator) for spec in self.inputs}
        return {name: values.astype(np.float16) if dtype == "fp16" and values.dtype == np.float32 else values
                for name, values in drawn.items()}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a network's output, in order; tuples, lists and dicts are searched."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def outputs_of(network: Network, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Torch's outputs for these inputs, computed in float32 on the CPU; the module's weights keep their type."""
    dtype = next((parameter.dtype for parameter in network.module.parameters() if parameter.is_floating_point()), torch.float32)
    tensors = [torch.from_numpy(array.astype(np.float32) if array.dtype == np.float16 else array) for array in inputs.values()]
    network.module.float()
    try:
        with torch.inference_mode():
            return [tensor.cpu().numpy() for tensor in tensors_in(network.module(*tensors))]
    finally:
        network.module.to(dtype)  # exact: the weights came from this type


def stem_of(name: str, dtype: str) -> str:
    """The file's name without `.onnx`."""
    return name if dtype == "fp32" else f"{name}_{dtype}"


def network_stamp(name: str, collection: str, family: str, dtype: str) -> dict[str, str]:
    """The metadata of an exported file; an existing file with the same metadata is kept."""
    versions = {f"hase.{package}": package_version(package) for package in ("torch", *PACKAGES.get(collection, ()))}
    return {"hase.network_exporter": str(EXPORTER_VERSION), "hase.model": name, "hase.dtype": dtype,
            COLLECTION_KEY: collection, GROUP_KEY: family, **versions}


def trace_network(network: Network, dtype: str) -> onnx.ModelProto:
    """The network as exported by torch, with dynamic dimensions; its module is left in `dtype`."""
    if dtype == "fp16":
        network.module.half()
    size = weight_bytes(network.module)
    if size > LARGEST_FILE:
        raise UserError(f"{network.name} has {size / 1e9:.1f} GB of weights in {dtype}; one ONNX file holds 2 GB at most")
    sizes = {dim: max(LEAST_TRACED, size) for dim, size in network.default_sizes.items()}
    examples = tuple(torch.from_numpy(values) for values in network.draw(sizes, dtype).values())
    try:
        with silent_exporter():
            proto: onnx.ModelProto = (_by_older_exporter if network.traced else _by_exporter)(network, examples)
    finally:
        torch._dynamo.reset()  # its caches hold every model traced
    return remove_paths(proto)


def _by_exporter(network: Network, examples: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    dims = {dim: torch.export.Dim(dim, min=1, max=MOST_OF_A_DIMENSION) for dim in network.dims}
    axes = [{axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in network.inputs]
    kinds = [parameter.kind for parameter in inspect.signature(network.module.forward).parameters.values()]
    singles = len(kinds) - (inspect.Parameter.VAR_POSITIONAL in kinds)  # inputs for `*inputs` are adjacent
    shapes: tuple[Any, ...] = (*axes[:singles], *([tuple(axes[singles:])] if singles < len(axes) else []))
    proto = exported(network.module, examples, [spec.name for spec in network.inputs], shapes if dims else None)
    for spec, graph_input in zip(network.inputs, proto.graph.input, strict=True):
        for size, dim in zip(spec.shape, graph_input.type.tensor_type.shape.dim, strict=True):
            if isinstance(size, str) and dim.dim_param != size:
                raise RuntimeError(f"torch.export fixed dimension {size} of input {spec.name}")
    return proto


def _by_older_exporter(network: Network, examples: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    buffer = io.BytesIO()
    axes = {spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in network.inputs}
    torch.onnx.export(network.module, examples, buffer, dynamo=False, dynamic_axes=axes,  # type: ignore[arg-type]
                      opset_version=OLDER_OPSET, input_names=[spec.name for spec in network.inputs])
    return onnx.load_model_from_string(buffer.getvalue())


def check_network(path: Path, network: Network, dtype: str, device: str, sizes: Mapping[str, int]) -> float:
    """Runs the file at these sizes; returns the difference from torch's outputs, relative to the largest value of each."""
    inputs = network.draw(sizes, dtype)
    session = open_session(path, device, name="the exported graph", entries=NO_SPINNING)
    accepted = {graph_input.name for graph_input in session.get_inputs()}  # the exporter drops those that change nothing
    with model_errors("the exported graph"):
        outputs = session.run(None, {name: values for name, values in inputs.items() if name in accepted})
    expected = outputs_of(network, inputs)
    if network.data_sized:
        return 0.0 if len(outputs) == len(expected) else float("inf")
    if len(outputs) != len(expected):
        raise UserError(f"it has {len(outputs)} outputs, torch's has {len(expected)}")
    worst = 0.0
    for output, by_torch in zip(outputs, expected, strict=True):
        if not np.isfinite(by_torch).all() or not by_torch.any():
            raise UserError(f"{network.name}: an output of torch's own is all zero or not finite, "
                            "so nothing can be compared with it")
        worst = max(worst, relative_difference(output, by_torch))
    tolerance = TOLERANCE["fp32" if dtype == "fp32" and device == "cpu" else "reduced"]
    if not worst <= tolerance:  # also true for NaN
        raise UserError(f"its outputs differ from torch's by {worst:.2g} of the largest; {tolerance:g} is allowed")
    return worst


def write_network(network: Network, dtype: str, path: Path, device: str) -> float:
    """Writes a network's file after onnx.checker and runs at two sets of sizes; returns the largest difference."""
    proto = trace_network(network, dtype)
    dims = {DEFAULT_DIMS_KEY: json.dumps(network.default_sizes), POOL_SIZES_KEY: json.dumps(dict(network.sizes))}
    dims |= {DATA_SIZED_KEY: "yes"} if network.data_sized else {}
    add_metadata(proto, network_stamp(network.name, network.collection, network.family, dtype) | dims)
    with files.replacing(path) as temporary:
        onnx.save(proto, temporary)
        del proto
        onnx.checker.check_model(str(temporary))
        larger = {dim: SECOND_SIZE_FACTOR * size for dim, size in network.default_sizes.items()}
        size_sets = [network.default_sizes, *([larger] if network.dims else [])]
        return max(check_network(temporary, network, dtype, device, sizes) for sizes in size_sets)


class NetworkSource(NamedTuple):
    """A collection's networks: `check_names` raises `UserError` for unknown names; `build_network` takes name and family."""

    check_names: Callable[[Iterable[str]], None]
    build_network: Callable[[str, str], Network]


def network_source(collection: Collection) -> NetworkSource:
    """The source of a collection's networks; a `UserError` if a required package is not installed."""
    package = OPTIONAL_PACKAGES.get(collection)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed here; install it with: pip install '.[pool]'")
    source: NetworkSource = importlib.import_module(MODULES[collection]).SOURCES[collection]
    return source


@dataclass(frozen=True)
class NetworkExport:
    """One network to export in one or two data types."""

    name: str
    family: str
    dtypes: tuple[str, ...]


def _row(export: NetworkExport, path: Path, status: str, difference: float | None = None, error: str = "") -> dict[str, Any]:
    mb = round(path.stat().st_size / 1e6, 2) if status != "failed" else None
    return {"model": export.name, "file": str(path), "status": status, "mb": mb, "difference": difference, "error": error}


def export_network(folder: Path, collection: Collection, device: str, force: bool, jobs: int,
                   export: NetworkExport) -> list[dict[str, Any]]:
    """Writes the missing files of one network; returns a row for each, with the reason if it failed."""
    if "OMP_NUM_THREADS" not in os.environ:  # else torch follows it
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    rows, network = [], None
    for dtype in export.dtypes:
        path = folder / f"{stem_of(export.name, dtype)}.onnx"
        if not force and has_metadata(path, network_stamp(export.name, collection, export.family, dtype)):
            rows.append(_row(export, path, "kept"))
            continue
        try:
            network = network or network_source(collection).build_network(export.name, export.family)
            rows.append(_row(export, path, "written", write_network(network, dtype, path, device)))
        except Exception as error:  # any library's failure affects only one model
            log.debug("%s", path.name, exc_info=True)
            rows.append(_row(export, path, "failed", error=short_message(error)))
    return rows


def _crashed(folder: Path, export: NetworkExport) -> list[dict[str, Any]]:
    path = folder / f"{stem_of(export.name, export.dtypes[0])}.onnx"
    for temporary in folder.glob(f".{export.name}*.tmp.onnx"):
        temporary.unlink(missing_ok=True)
    return [_row(export, path, "failed", error="the exporting process died, most likely for lack of memory")]


def export_networks(workspace: Workspace, collection: Collection, families: Mapping[str, str], dtypes: Sequence[str],
                    device: str, jobs: int, force: bool = False) -> list[dict[str, Any]]:
    """Writes `<name>.onnx` and `<name>_fp16.onnx` of each network; returns a row per file. A failure affects only its network.
    `families` are by network; the files are checked on `device` (`auto`, `cpu` or `cuda`), in `jobs` processes, each for one
    network at a time. With `force` it also exports files that exist."""
    checked_on = resolve_device(device)
    network_source(collection).check_names(families)
    workspace.models.mkdir(parents=True, exist_ok=True)
    exports = [NetworkExport(name, family, tuple(dict.fromkeys(dtypes))) for name, family in families.items()]
    task = partial(export_network, workspace.models, collection, checked_on, force, jobs)
    done = map_in_processes(task, exports, jobs, partial(_crashed, workspace.models), "exporting")
    rows = [row for part in done for row in part]
    for row in rows:
        if row["status"] == "failed":
            log.error("%s: %s", Path(row["file"]).name, row["error"])
    return rows
