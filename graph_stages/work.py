"""One stage on one unit at one size: what is measured, and where it is found in the journal."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from graph_stages.definition import STAGES, GraphSize, Stage
from graph_stages.export import FORM_OF, ModelFile, kind_of, model_file
from graph_stages.graphs import DRAWN, Graph, read_edge_list
from graph_stages.layer import Array, Weights, all_tensors, draw_weights
from utils.frozen import Frozen
from utils.safe_names import as_file_name

OPENVINO, ORT, TORCH = "openvino", "ort", "torch"
INFERENCE_PRECISION = {"CPU": "f32", "CUDA": "f32", "GPU": "f16", "NPU": "f16"}  # by kind of unit; what it computes in


class GraphSource(Frozen):
    """Where a graph comes from.

    Attributes:
        kind: how it is drawn, a name of DRAWN; "" for a file.
        path: of an edge list; "" for a drawn graph.
        undirected: whether a line of the file stands for both directions.
        seed: of a drawn graph, the features and the weights.
    """

    kind: str = "uniform"
    path: str = ""
    undirected: bool = False
    seed: int = 0

    def graph(self, nodes: int, edges: int) -> Graph:
        """The graph; a file has its own size.

        Raises:
            UserError: the file can't be read.
        """
        return read_edge_list(Path(self.path), self.undirected) if self.path else DRAWN[self.kind](nodes, edges, self.seed)


class StageUnit(Frozen):
    """What is measured.

    Attributes:
        size: of the graph and the layer.
        source: of the graph.
        graph: its name.
        unit: OpenVINO's name of it, or `CUDA`.
        stage: 1 to 7.
        runtime: what is to run it: `openvino`, `ort` or `torch`.
        runtime_version: so that another version is measured anew.
        threads: on the CPU; 0 for the runtime's own choice.
        warmup, runs: before and in the measurement.
        models: the folder with `onnx_models` and `ir_models`.
    """

    size: GraphSize
    source: GraphSource = GraphSource()
    graph: str
    unit: str
    stage: int
    runtime: str
    runtime_version: str = ""
    threads: int = 0
    warmup: int = 10
    runs: int = 50
    models: str

    @property
    def id(self) -> str:
        """Says all that matters, so that other settings are other units of the journal."""
        size = self.size
        parts = (self.unit, f"stage{self.stage}", size.name, f"f{size.features}", f"h{size.hidden}", self.graph,
                 f"s{self.source.seed}", f"{self.runtime}{self.runtime_version}", f"t{self.threads}", f"w{self.warmup}",
                 f"r{self.runs}")
        return as_file_name("_".join(parts))

    @property
    def definition(self) -> Stage:
        return STAGES[self.stage - 1]

    @property
    def folder(self) -> Path:
        """Of the models."""
        return Path(self.models)

    @property
    def file(self) -> ModelFile:
        """Its model."""
        return model_file(self.unit, self.definition, self.size, self.source.seed)

    @property
    def precision(self) -> str:
        """Of the weights: `FP32` or `FP16`."""
        return FORM_OF[kind_of(self.unit)].precision

    @property
    def inference_precision(self) -> str:
        return INFERENCE_PRECISION[kind_of(self.unit)]

    @property
    def weights(self) -> Weights:
        """As the unit's files store them."""
        drawn = draw_weights(self.size.features, self.size.hidden, self.source.seed)
        return drawn if self.precision == "FP32" else drawn.rounded()

    @property
    def tensors(self) -> dict[str, Array]:
        """All tensors of the layer on this graph: the stage's inputs, and what it should give."""
        return _tensors(self.size, self.source, self.precision)


@functools.lru_cache(maxsize=1)  # the stages of one size come one after another
def _tensors(size: GraphSize, source: GraphSource, precision: str) -> dict[str, Array]:
    weights = draw_weights(size.features, size.hidden, source.seed)
    graph = source.graph(size.nodes, size.edges)
    return all_tensors(graph, weights if precision == "FP32" else weights.rounded(), source.seed)


def facts_of(unit: StageUnit) -> dict[str, Any]:
    """What a measurement of it says of the unit, by the fields of `StageRecord`."""
    size, stage = unit.size, unit.definition
    return {"nodes": size.nodes, "edges": size.edges, "features": size.features, "hidden": size.hidden, "graph": unit.graph,
            "unit": unit.unit, "stage": stage.id, "stage_name": stage.name, "precision": unit.precision,
            "bytes_in": stage.bytes_in(size), "bytes_out": stage.bytes_out(size)}
