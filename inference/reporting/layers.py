"""Where a run's time goes by layer of the original model, as its exporter named them.

torch.onnx writes a node's layers into its name (`/layer1/layer1.0/conv1/Conv`), or with `dynamo=True` into its metadata
(`pkg.torch.onnx.name_scopes`: `['', 'layer1', 'layer1.0', 'layer1.0.conv1', 'conv2d_1']`). Other models have no layers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hase.utils.lazy import onnx
from hase.utils.pages.page import Part

if TYPE_CHECKING:
    from hase.inference.core.model_run import PredictedRun
    from hase.records.kernel_record import Node

SCOPES = "pkg.torch.onnx.name_scopes"
LEAST = 0.0005  # of the whole: smaller parts of a layer are put together


def time_by_layer(run: PredictedRun, file: Path) -> tuple[Part, bool]:
    """The time of a run's kernels in ms by layer, and whether the model has layers; without them it is by operator.

    Args:
        run: the prediction's.
        file: the model's; one that holds no model (a record) has no metadata.
    """
    record, scopes = run.run.record, _scopes(file)
    paths = [_path(node, record.kernel_of(node).op_type, scopes) for node in record.nodes]
    layered = len({path[0] for path in paths if len(path) > 1}) > 1
    whole = Part(record.file_stem)
    for place, (node, kernel) in enumerate(zip(record.nodes, run.run.nodes, strict=True)):
        operator = record.kernel_of(node).type
        path = (*(paths[place] if layered else (operator,)), f"{operator} ({node.name})")
        into = whole
        for name in path[:-1]:
            into = into.parts.setdefault(name, Part(name))
        into.parts[path[-1]] = Part(operator, node.runs * kernel.latency_ms, operator, f"{node.name}, {kernel.provenance}")
    return _tidied(whole, LEAST * whole.total), layered


def _path(node: Node, operator: str, scopes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The layers of a node, the outermost first. Of several nodes that were fused into it, those of the first that has the
    fused node's operator, else of the first that has any."""
    origins = sorted(node.origins, key=lambda origin: origin.op_type != operator)
    names = [*(origin.name for origin in origins), node.name]
    return next((path for name in names if (path := scopes.get(name) or _layers_in(name))), ())


def _layers_in(name: str) -> tuple[str, ...]:
    """The layers in a node's name, `/layer1/layer1.0/conv1/Conv`; none in a name without slashes."""
    parts = [part for part in name.split("/")[:-1] if part]
    return tuple(part.removeprefix(f"{before}.") for before, part in zip(["", *parts], parts, strict=False))


def _scopes(file: Path) -> dict[str, tuple[str, ...]]:
    """The layers of a model's nodes that are in their metadata, by the nodes' names."""
    if file.suffix == ".json":
        return {}
    try:
        model = onnx.load(file, load_external_data=False)
    except OSError:
        return {}  # it was there for the prediction; without it the names must do
    written = {node.name: entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == SCOPES}
    return {name: path for name, text in written.items() if (path := _layers_of(text))}


def _layers_of(text: str) -> tuple[str, ...]:
    """`["", "layer1", "layer1.0", "layer1.0.conv1", "conv2d_1"]` as `("layer1", "0", "conv1")`."""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ()
    if not isinstance(scopes, list) or not all(isinstance(scope, str) for scope in scopes):
        return ()
    layers = [scope for scope in scopes[:-1] if scope]
    return tuple(layer.removeprefix(f"{before}.") for before, layer in zip(["", *layers], layers, strict=False))


def _tidied(part: Part, least: float) -> Part:
    """The same, where a layer with one part is called by both names, and parts below `least` are put together."""
    parts = [_tidied(child, least) for child in part.parts.values()]
    if len(parts) == 1 and parts[0].parts and part.name:
        return Part(f"{part.name}.{parts[0].name}", parts=parts[0].parts)
    small = [child for child in parts if child.total < least]
    kept = {str(place): child for place, child in enumerate(parts) if child.total >= least or len(small) == 1}
    if len(small) > 1:
        kept["small"] = Part(f"{len(small)} smaller", sum(child.total for child in small), note="each below 0.05 %")
    return Part(part.name, part.amount, part.group, part.note, kept)
