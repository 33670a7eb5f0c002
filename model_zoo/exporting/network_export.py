"""Writes a network as an ONNX file with dynamic dimensions, checked by onnx.checker and against torch's outputs."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model_zoo.exporting.network import Network, outputs_of
from model_zoo.exporting.onnx_export import LARGEST_FILE, add_metadata, difference, quiet, without_paths
from model_zoo.exporting.torch_models import weight_bytes
from utils import files
from utils.errors import UserError
from utils.fingerprint import package_version
from utils.lazy import onnx, torch
from utils.model_files import COLLECTION_KEY, DEFAULT_DIMS_KEY, GROUP_KEY
from utils.ort_sessions import model_errors, open_session

EXPORTER_VERSION = 1  # of what is made here; files of another version are made anew
DATA_SIZED_KEY = "hase.data_sized"  # metadata: sizes in the graph depend on data
POOL_SIZES_KEY = "hase.pool_sizes"  # metadata: the sizes of each dynamic dimension at which the pool is measured
MOST_OF_A_DIMENSION = 65536
NO_SPINNING = {"session.intra_op.allow_spinning": "0"}  # others may be exporting at the same time
LEAST_TRACED = 2  # a traced size of 1 would stay 1
OLDER_OPSET = 17  # the last that torch's older exporter is meant for
CHECKED_BESIDE = 3  # times the default size: a tracer can bake a size in unseen

# Largest difference allowed, as for torchvision's models (onnx_export.py says why); of float32's rounding, a deep network with
# random weights makes up to 0.003.
TOLERANCE = {"fp32": 0.01, "reduced": 0.1}
PACKAGES = {"timm": ("timm",), "transformers": ("transformers",), "torchvision": ("torchvision",)}  # by collection


def stem_of(name: str, dtype: str) -> str:
    """The file's name without `.onnx`."""
    return name if dtype == "fp32" else f"{name}_{dtype}"


def network_stamp(name: str, collection: str, family: str, dtype: str) -> dict[str, str]:
    """What an exported file is, as its metadata: a file with the same is kept."""
    versions = {f"hase.{package}": package_version(package) for package in ("torch", *PACKAGES.get(collection, ()))}
    return {"hase.network_exporter": str(EXPORTER_VERSION), "hase.model": name, "hase.dtype": dtype,
            COLLECTION_KEY: collection, GROUP_KEY: family, **versions}


def trace_network(network: Network, dtype: str) -> onnx.ModelProto:
    """The network as torch exports it, with its dynamic dimensions; its module is left in `dtype`.

    Raises:
        UserError: it takes more than one ONNX file holds.
        Exception: torch's exporter can't export it; there are as many kinds of such errors as reasons.
    """
    if dtype == "fp16":
        network.module.half()
    size = weight_bytes(network.module)
    if size > LARGEST_FILE:
        raise UserError(f"{network.name} has {size / 1e9:.1f} GB of weights in {dtype}; one ONNX file holds 2 GB at most")
    sizes = {dim: max(LEAST_TRACED, size) for dim, size in network.default_sizes.items()}
    examples = tuple(torch.from_numpy(values) for values in network.draw(sizes, dtype).values())
    try:
        with quiet():
            proto: onnx.ModelProto = (_by_older_exporter if network.traced else _by_exporter)(network, examples)
    finally:
        torch._dynamo.reset()  # its caches hold every model traced
    return without_paths(proto)


def _by_exporter(network: Network, examples: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    dims = {dim: torch.export.Dim(dim, min=1, max=MOST_OF_A_DIMENSION) for dim in network.dims}
    each = [{axis: dims[size] for axis, size in enumerate(one.shape) if isinstance(size, str)} for one in network.inputs]
    kinds = [one.kind for one in inspect.signature(network.module.forward).parameters.values()]
    own = len(kinds) - (inspect.Parameter.VAR_POSITIONAL in kinds)  # what goes into `*inputs` stands together
    shapes: tuple[Any, ...] = (*each[:own], *([tuple(each[own:])] if own < len(each) else []))
    program = torch.onnx.export(
        network.module, examples, dynamo=True, external_data=False, verbose=False,
        input_names=[one.name for one in network.inputs], dynamic_shapes=shapes if dims else None)
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    proto: onnx.ModelProto = program.model_proto
    for one, found in zip(network.inputs, proto.graph.input, strict=True):
        for size, dim in zip(one.shape, found.type.tensor_type.shape.dim, strict=True):
            if isinstance(size, str) and dim.dim_param != size:
                raise RuntimeError(f"torch.export fixed dimension {size} of input {one.name}")
    return proto


def _by_older_exporter(network: Network, examples: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    written = io.BytesIO()
    axes = {one.name: {axis: size for axis, size in enumerate(one.shape) if isinstance(size, str)} for one in network.inputs}
    torch.onnx.export(network.module, examples, written, dynamo=False, dynamic_axes=axes,  # type: ignore[arg-type]
                      opset_version=OLDER_OPSET, input_names=[one.name for one in network.inputs])
    return onnx.load_model_from_string(written.getvalue())


def check_network(path: Path, network: Network, dtype: str, device: str, sizes: Mapping[str, int]) -> float:
    """Runs the file at these sizes, and returns how far its outputs are from torch's, relative to the largest of each.

    Raises:
        UserError: it can't be run, or its outputs are too far from torch's, or torch's own say nothing.
    """
    inputs = network.draw(sizes, dtype)
    session = open_session(path, device, name="the exported graph", entries=NO_SPINNING)
    taken = {one.name for one in session.get_inputs()}  # the exporter drops those that change nothing
    with model_errors("the exported graph"):
        found = session.run(None, {name: values for name, values in inputs.items() if name in taken})
    wanted = outputs_of(network, inputs)
    if network.data_sized:
        return 0.0 if len(found) == len(wanted) else float("inf")
    if len(found) != len(wanted):
        raise UserError(f"it has {len(found)} outputs, torch's has {len(wanted)}")
    worst = 0.0
    for one, by_torch in zip(found, wanted, strict=True):
        if not np.isfinite(by_torch).all() or not by_torch.any():
            raise UserError(f"{network.name}: an output of torch's own is all zero or not finite, "
                            "so nothing can be compared with it")
        worst = max(worst, difference(one, by_torch))
    tolerance = TOLERANCE["fp32" if dtype == "fp32" and device == "cpu" else "reduced"]
    if not worst <= tolerance:  # NaN, too
        raise UserError(f"its outputs differ from torch's by {worst:.2g} of the largest; {tolerance:g} is allowed")
    return worst


def write_network(network: Network, dtype: str, path: Path, device: str) -> float:
    """Puts the network's file in place once it passes onnx.checker and a run at two sets of sizes; the largest difference.

    Raises:
        UserError: it fails a check.
        Exception: torch's exporter can't export it.
    """
    proto = trace_network(network, dtype)
    dims = {DEFAULT_DIMS_KEY: json.dumps(network.default_sizes), POOL_SIZES_KEY: json.dumps(dict(network.sizes))}
    dims |= {DATA_SIZED_KEY: "yes"} if network.data_sized else {}
    add_metadata(proto, network_stamp(network.name, network.collection, network.family, dtype) | dims)
    with files.replacing(path) as temporary:
        onnx.save(proto, temporary)
        del proto
        onnx.checker.check_model(str(temporary))
        others = {dim: CHECKED_BESIDE * size for dim, size in network.default_sizes.items()}
        every = [network.default_sizes, *([others] if network.dims else [])]
        return max(check_network(temporary, network, dtype, device, sizes) for sizes in every)
