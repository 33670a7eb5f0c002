"""The sizes that depend on data, taken from one run (benchmark/sizes_of_a_run.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.runtimes.ort.profile import SUFFIX
from benchmark.runtimes.ort.runner import random_feed
from ort_analysis.graph.analysis import analyze
from ort_analysis.graph.given_sizes import SizeNotKnown
from ort_analysis.graph.parsed_nodes import bodies_of, name_nodes
from ort_analysis.graph.parsing import optimize
from ort_analysis.graph.source import read_source
from utils import files
from utils.errors import UserError
from utils.fingerprint import flavour_of
from utils.lazy import onnx
from utils.ort_sessions import model_errors, open_session
from utils.temporary import temporary_folder

if TYPE_CHECKING:
    import numpy as np

def shapes_of_a_run(model: Path, dims: Mapping[str, int], inputs: Mapping[str, np.ndarray] | None = None,
                    static: bool = False) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a model's nodes make when it runs once on this CPU, by name; those of a body are called
    `<node>/<tensor>`, and of those that it makes more than once the largest counts.

    Args:
        model: the ONNX file.
        dims: sizes of its dynamic dimensions.
        inputs: values of inputs by name; the others are as `random_feed` makes them.
        static: whether `dims` are fixed before ONNX Runtime optimises the model.

    Raises:
        UserError: ORT can't load or run it.
    """
    source = read_source(model, dims)
    with temporary_folder() as folder:
        optimized = folder / "optimized.onnx"
        optimize(source, flavour_of("cpu"), False, optimized, static)
        proto = onnx.load(str(optimized), load_external_data=False)
        name_nodes(proto.graph)
        onnx.save(proto, str(optimized))
        session = open_session(optimized, "cpu", optimize="none", name=str(model), profile_prefix=folder / "run")
        feed = random_feed(session, source.dims, source.steering) | dict(inputs or {})
        with model_errors(str(model)):
            session.run(None, feed)
        events = files.read_json(Path(session.end_profiling()))
    made = _tensors_by_node(proto.graph)
    found: dict[str, tuple[int, ...]] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith(SUFFIX):
            continue
        names = made.get(event["name"].removesuffix(SUFFIX), [])
        shapes = [tuple(shape) for kind in event["args"]["output_type_shape"] for shape in kind.values()]
        if len(names) == len(shapes):  # an event says nothing of sequences
            for name, shape in zip(names, shapes, strict=True):
                found[name] = max(found.get(name, shape), shape, key=math.prod)
    return found


def _tensors_by_node(graph: onnx.GraphProto, prefix: str = "") -> dict[str, list[str]]:
    """The tensors that each node of a graph makes, and those of its bodies, by the node's name."""
    found = {}
    for node in graph.node:
        found[node.name] = [prefix + out for out in node.output if out]
        for body in bodies_of(node).values():
            found |= _tensors_by_node(body, f"{node.name}/")
    return found


def sizes_of_a_run(model: Path, dims: Mapping[str, int], inputs: Mapping[str, np.ndarray] | None = None,
                   static: bool = False) -> dict[str, int]:
    """The sizes that depend on data, as they come out when a model runs once on this CPU, by the names under which they can be
    given: `<tensor>.<axis>`. Arguments as of `shapes_of_a_run`.

    Raises:
        UserError: as `shapes_of_a_run`, or where the model can't be analysed even with these sizes.
    """
    real = shapes_of_a_run(model, dims, inputs, static)
    sizes: dict[str, int] = {}
    while True:
        try:
            unknown: dict[str, tuple[int, ...]] = dict(analyze(model, "cpu", {**dims, **sizes}, static=static).assumed)
        except SizeNotKnown as error:
            unknown = {error.tensor: ()}
        if not unknown:
            return sizes
        found_now: dict[str, int] = {}
        for tensor, shape in unknown.items():
            found = {f"{tensor}.{axis}": size for axis, size in enumerate(real.get(tensor, ()))}
            other = {name: found[name] for name, size in zip(found, shape, strict=False) if found[name] != size}
            found_now |= other if other.keys() - sizes.keys() else found  # most axes are known
        if not found_now.keys() - sizes.keys():
            raise UserError(f"{model}: the sizes of {', '.join(unknown)} depend on data, and nothing of them was made in a run")
        sizes |= found_now
