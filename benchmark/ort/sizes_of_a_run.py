"""Finds sizes that depend on data, from one run (benchmark/sizes_of_a_run.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hase.benchmark.ort.profile import SUFFIX
from hase.benchmark.ort.runner import random_feed
from hase.ort_analysis.graph.analysis import analyze
from hase.ort_analysis.graph.bodies import body_sizes, given_branch
from hase.ort_analysis.graph.nodes import SizeNotKnown, bodies_of
from hase.ort_analysis.graph.parsing import optimize
from hase.ort_analysis.graph.source import read_source
from hase.records.kernel_record import BRANCHES
from hase.runtimes import local_flavour
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import model_errors, open_session

if TYPE_CHECKING:
    import numpy as np


class SeenRun(NamedTuple):
    """The sizes and branches in one run of a model."""

    # of the tensors that its nodes wrote, by name; those of a body are called `<node>/<tensor>`, and if a tensor was written
    # more than once, its largest shape counts
    shapes: dict[str, tuple[int, ...]]
    branches: list[str]  # the branch that each If took more often: `<node>.then` or `<node>.else`


def see_a_run(model: Path, dims: Mapping[str, int], inputs: Mapping[str, np.ndarray] | None = None,
              static: bool = False) -> SeenRun:
    """Runs a model once on this CPU, with `inputs` by name (others as from `random_feed`)."""
    source = read_source(model, dims)
    with temporary_folder() as folder:
        optimized = folder / "optimized.onnx"
        proto = optimize(source, local_flavour("cpu"), optimized, static)
        session = open_session(optimized, "cpu", optimize="none", name=str(model), profile_prefix=folder / "run")
        feed = random_feed(session, source.dims, source.steering, source.graph_only.graph) | dict(inputs or {})
        with model_errors(str(model)):
            session.run(None, feed)
        events = [event for event in files.read_json(Path(session.end_profiling()))
                  if event.get("cat") == "Node" and event["name"].endswith(SUFFIX)]
    written = _tensors_by_node(proto.graph)
    largest: dict[str, tuple[int, ...]] = {}
    runs: Counter[str] = Counter()
    for event in events:
        name = event["name"].removesuffix(SUFFIX)
        runs[name] += 1
        names = written.get(name, [])
        shapes = [tuple(shape) for output in event["args"]["output_type_shape"] for shape in output.values()]
        if len(names) == len(shapes):  # an event says nothing of sequences
            for tensor, shape in zip(names, shapes, strict=True):
                largest[tensor] = max(largest.get(tensor, shape), shape, key=math.prod)
    return SeenRun(largest, [name for name in _branches(proto.graph, runs) if name in body_sizes(source.graph_only.graph)])


def _branches(graph: onnx.GraphProto, run_counts: Mapping[str, int]) -> Iterator[str]:
    """The branch that each If took most often, including nested Ifs; nothing for an If that never ran. `run_counts` are by node
    name. A branch without nodes ran whenever its If did not take the other."""
    for node in graph.node:
        bodies = bodies_of(node)
        if node.op_type == "If" and run_counts.get(node.name, 0):
            counts = {branch: max((run_counts.get(inner.name, 0) for inner in bodies[attribute].node), default=None)
                      for branch, attribute in BRANCHES.items()}
            times = {branch: run_counts[node.name] - sum(count or 0 for count in counts.values()) if count is None else count
                     for branch, count in counts.items()}
            yield f"{node.name}.{max(times, key=lambda branch: times[branch])}"
        for body in bodies.values():
            yield from _branches(body, run_counts)


def _tensors_by_node(graph: onnx.GraphProto, prefix: str = "") -> dict[str, list[str]]:
    """The tensors that each node of a graph and of its bodies writes, by node name."""
    tensors = {}
    for node in graph.node:
        tensors[node.name] = [prefix + out for out in node.output if out]
        for body in bodies_of(node).values():
            tensors |= _tensors_by_node(body, f"{node.name}/")
    return tensors


def sizes_of_a_run(model: Path, dims: Mapping[str, int], inputs: Mapping[str, np.ndarray] | None = None,
                   static: bool = False) -> dict[str, int]:
    """Sizes that depend on data, from one run on this CPU, by their names `<tensor>.<axis>`. If data decides an If, the branch
    that ran is included: `<node>.then` or `<node>.else`, with value 1."""
    seen = see_a_run(model, dims, inputs, static)
    branches = [name for name in seen.branches if not given_branch(name.rpartition(".")[0], dims)]
    sizes: dict[str, int] = {}
    while True:
        try:
            record = analyze(model, "cpu", {**dims, **sizes}, static=static)
        except SizeNotKnown as error:
            unknown: dict[str, tuple[int, ...]] = {error.tensor: ()}
        else:
            unknown = dict(record.assumed)
            if not unknown and not (record.guessed and set(branches) - set(sizes)):
                return sizes
        new_sizes = dict.fromkeys(branches, 1)
        for tensor, shape in unknown.items():
            observed = {f"{tensor}.{axis}": size for axis, size in enumerate(seen.shapes.get(tensor, ()))}
            differing = {name: observed[name] for name, size in zip(observed, shape, strict=False) if observed[name] != size}
            new_sizes |= differing if differing.keys() - sizes.keys() else observed  # most axes are known
        if not new_sizes.keys() - sizes.keys():
            raise UserError(f"{model}: the sizes of {', '.join(unknown)} depend on data, and nothing of them was made in a run")
        sizes |= new_sizes
