"""Takes models apart under TVM, and writes their records and the functions of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from records.kernel_record import ModelOrigin, ModelRecord
from records.kernel_record_files import record_path
from runtimes.ort.graph.source import Source
from runtimes.tvm.functions import write_functions
from runtimes.tvm.kernels import Graph, graph_of, record_of
from runtimes.tvm.loading import read_relax, source_of
from runtimes.tvm.lowering import Lowered, lower
from runtimes.tvm.package import FUSED, TUNED, UNFUSED, tvm_flavour
from utils import files
from utils.paths import Workspace

if TYPE_CHECKING:
    import onnx

NOTHING_GIVEN = ModelOrigin()


class Parsed(NamedTuple):
    """A model at one level: its module, its calls and its record."""

    lowered: Lowered
    graph: Graph
    record: ModelRecord


def parse(model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, name: str | None = None,
          device: str = "cpu") -> dict[str, Parsed]:
    """A model's operators (UNFUSED) and kernels (FUSED) on `cpu` or `cuda`; `name` is that of a model in memory.

    Raises:
        UserError: TVM is not installed, or can't take this model apart; the model can't be read, or a dynamic dimension is
            unknown or has no size.
    """
    source = source_of(model, dims, name)
    return parse_relax(source, read_relax(source), device)


def parse_relax(source: Source, module: Any, device: str = "cpu") -> dict[str, Parsed]:
    """As `parse`, for a module that was read already. `source` says what it is."""
    parsed = {}
    for level, lowered in lower(source.name, module, device).items():
        graph = graph_of(source.name, lowered, device)
        parsed[level] = Parsed(lowered, graph, record_of(source, graph, tvm_flavour(device, level)))
    return parsed


def parse_at(level: str, model: Path | onnx.ModelProto, dims: Mapping[str, int] | None = None, device: str = "cpu") -> Parsed:
    """A model at one of LEVELS on `cpu` or `cuda`. Tuned kernels are the fused ones, with other schedules.

    Raises:
        UserError: TVM is not installed, or can't take this model apart; the model can't be read, or a dynamic dimension is
            unknown or has no size.
    """
    parsed = parse(model, dims, device=device)[FUSED if level == TUNED else level]
    return parsed._replace(record=parsed.record.model_copy(update={"flavour": tvm_flavour(device, level)}))


def write_parsed(workspace: Workspace, parsed: Mapping[str, Parsed],
                 origin: ModelOrigin = NOTHING_GIVEN) -> list[ModelRecord]:
    """Writes a model's records, UNFUSED and FUSED, and the functions of its kernels where there is none yet; returns the
    records. `origin` wins over what the model's file says."""
    records = []
    for level in (UNFUSED, FUSED):
        _, graph, record = parsed[level]
        record = record.model_copy(update={name: text for name, text in origin._asdict().items() if text})
        files.write_json(record_path(workspace, record.flavour, record.model), record)
        write_functions(workspace, record.flavour, graph.kernels, graph.functions)
        records.append(record)
    return records
