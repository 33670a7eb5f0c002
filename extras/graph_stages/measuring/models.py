"""Writes the stages as model files, ONNX and OpenVINO's IR, for each kind of processing unit.

    onnx_models/stage2_sum_cpu_fp32.onnx               dynamic, for CPU and CUDA
    onnx_models/stage2_sum_gpu_fp16.onnx               dynamic, weights in FP16
    onnx_models/stage2_sum_npu_fp16_n1000_e2000.onnx   for one size, since NPUs need fixed shapes; weights in FP16
    ir_models/….xml, ….bin                             the same as OpenVINO's IR

All files hold the same weights. They are written whether or not this machine has such a unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hase.extras.graph_stages.measuring.layer import STAGES, TENSORS, Array, GraphSize, LayerStage, Weights, draw_weights
from hase.model_zoo.exporting.onnx_export import has_metadata
from hase.utils import files
from hase.utils.files import temporary_folder
from hase.utils.lazy import onnx, openvino
from hase.utils.logger import progress

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto


OPSET = 18  # the first whose ScatterND adds up
IR_VERSION = 10
WEIGHTS = ("weight", "bias")  # the constants that an FP16 file stores in FP16
Precision = Literal["FP32", "FP16"]
EXPORTER_VERSION = 1  # files of another version are exported again
ONNX_FOLDER, IR_FOLDER = "onnx_models", "ir_models"
STAMP = "hase.stages"  # key of the metadata of a file
IR_PROPERTIES_BYTES = 4096  # at the end of an IR's .xml, which hold its stamp
UnitKind = str  # `CPU`, `GPU`, `NPU` or `CUDA`


def stage_model(file: ModelFile, weights: Weights) -> ModelProto:
    """The ONNX model of a file. In a dynamic one, the numbers of nodes and edges are open.

    Weights stored in FP16 are followed by a Cast to float32, which runtimes fold; they choose the precision of the computation.
    Inputs and outputs are always float32.
    """
    stage, size, static = file.stage, file.size, file.form.static
    nodes, constants = _body(stage, weights, size)
    casts, initializers = [], []
    for name, value in constants.items():
        if file.form.precision == "FP16" and name in WEIGHTS:
            casts.append(_node("Cast", [f"{name}_fp16"], name, to=onnx.TensorProto.FLOAT))
            initializers.append(onnx.numpy_helper.from_array(value.astype(np.float16), f"{name}_fp16"))
        else:
            initializers.append(onnx.numpy_helper.from_array(value, name))
    if static and "node_count" in stage.inputs:
        initializers.append(onnx.numpy_helper.from_array(np.array([size.nodes], np.int64), "node_count"))
    inputs = [name for name in stage.inputs if not (static and name == "node_count")]
    graph = onnx.helper.make_graph(
        [*casts, *nodes], stage.name, [_value_info(name, size, static) for name in inputs],
        [_value_info(name, size, static) for name in stage.outputs], initializers)
    model = onnx.helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    onnx.helper.set_model_props(model, {STAMP: file.stamp})
    return model


def _value_info(name: str, size: GraphSize, static: bool) -> ValueInfoProto:
    """Type and shape of an input or output; the widths are always fixed."""
    tensor = TENSORS[name]
    shape: list[int | str] = [dim if dim in ("nodes", "edges") and not static else length
                              for dim, length in zip(tensor.dims, tensor.shape(size), strict=True)]
    dtype = onnx.TensorProto.FLOAT if tensor.dtype == "float32" else onnx.TensorProto.INT64
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


def _node(op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> NodeProto:
    return onnx.helper.make_node(op_type, inputs, [output], name=output, **attributes)


def _fill_value(value: float) -> TensorProto:
    """The value that ConstantOfShape fills a tensor with."""
    return onnx.helper.make_tensor("value", onnx.TensorProto.FLOAT, [1], [value])


def _body(stage: LayerStage, weights: Weights, size: GraphSize) -> tuple[list[NodeProto], dict[str, Array]]:
    """The nodes of a stage, and its constants by name."""
    last = {"last_axis": np.array([1], np.int64)}
    bodies: dict[str, tuple[list[NodeProto], dict[str, Array]]] = {
        "gather": ([_node("Gather", ["x", "source"], "messages", axis=0)], {}),
        "sum": ([_node("Concat", ["node_count", "width"], "shape", axis=0),
                 _node("ConstantOfShape", ["shape"], "zeros", value=_fill_value(0.0)),
                 _node("Unsqueeze", ["target", "last_axis"], "rows"),
                 _node("ScatterND", ["zeros", "rows", "messages"], "sums", reduction="add")],
                last | {"width": np.array([size.features], np.int64)}),
        "count": ([_node("ConstantOfShape", ["node_count"], "zeros", value=_fill_value(0.0)),
                   _node("Shape", ["target"], "edge_count"),
                   _node("ConstantOfShape", ["edge_count"], "ones", value=_fill_value(1.0)),
                   _node("Unsqueeze", ["target", "last_axis"], "rows"),
                   _node("ScatterND", ["zeros", "rows", "ones"], "degrees", reduction="add")], last),
        "mean": ([_node("Max", ["degrees", "one"], "divisors"),
                  _node("Unsqueeze", ["divisors", "last_axis"], "column"),
                  _node("Div", ["sums", "column"], "means")], last | {"one": np.ones(1, np.float32)}),
        "transform_neighbours": ([_node("MatMul", ["means", "weight"], "product"),
                                  _node("Add", ["product", "bias"], "neighbours")],
                                 {"weight": np.ascontiguousarray(weights.neighbours.T), "bias": weights.bias}),
        "transform_self": ([_node("MatMul", ["x", "weight"], "product"),
                            _node("Add", ["product", "neighbours"], "combined")],
                           {"weight": np.ascontiguousarray(weights.root.T)}),
        "activate": ([_node("Relu", ["combined"], "output")], {}),
    }
    return bodies[stage.name]


@dataclass(frozen=True)
class Form:
    """The form of models for a kind of unit: name in the files, precision of the weights, and whether sizes are fixed."""

    name: str
    precision: Precision
    static: bool


FORMS: dict[UnitKind, Form] = {"CPU": Form("cpu", "FP32", static=False), "GPU": Form("gpu", "FP16", static=False),
                               "NPU": Form("npu", "FP16", static=True)}
FORM_OF = FORMS | {"CUDA": FORMS["CPU"]}


def unit_kind(unit: str) -> UnitKind:
    """The kind of a unit: `GPU` for `GPU.1`."""
    return unit.partition(".")[0]


@dataclass(frozen=True)
class ModelFile:
    """A model to export; a dynamic one uses only the widths of `size`."""

    stage: LayerStage
    form: Form
    size: GraphSize
    seed: int

    @property
    def stem(self) -> str:
        suffix = f"_{self.size.name}" if self.form.static else ""
        return f"stage{self.stage.id}_{self.stage.name}_{self.form.name}_{self.form.precision.lower()}{suffix}"

    @property
    def stamp(self) -> str:
        """A text that differs between files of the same name with other weights or widths."""
        facts = (EXPORTER_VERSION, self.size.features, self.size.hidden, self.seed)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def onnx(self, folder: Path) -> Path:
        return folder / ONNX_FOLDER / f"{self.stem}.onnx"

    def ir(self, folder: Path) -> Path:
        return folder / IR_FOLDER / f"{self.stem}.xml"

    def has_onnx(self, folder: Path) -> bool:
        """Whether the complete file exists, with these weights."""
        return has_metadata(self.onnx(folder), {STAMP: self.stamp})

    def has_ir(self, folder: Path) -> bool:
        """Whether both IR files exist, with these weights; the `.xml` is written last."""
        path = self.ir(folder)
        return (path.is_file() and path.with_suffix(".bin").is_file()
                and f'value="{self.stamp}"'.encode() in path.read_bytes()[-IR_PROPERTIES_BYTES:])


def stage_model_file(unit: str, stage: LayerStage, size: GraphSize, seed: int) -> ModelFile:
    """The model file from which a unit runs a stage."""
    return ModelFile(stage, FORM_OF[unit_kind(unit)], size, seed)


def stage_model_files(sizes: Sequence[GraphSize], seed: int) -> Iterator[ModelFile]:
    """All models for some sizes: 14 dynamic ones, and 7 static ones per size."""
    for form in FORMS.values():
        for size in sizes if form.static else sizes[:1]:
            yield from (ModelFile(stage, form, size, seed) for stage in STAGES)


def has_openvino() -> bool:
    return bool(find_spec("openvino"))


@dataclass
class Exported:
    """Number of files written and kept, and their total size; without OpenVINO there is no IR."""

    onnx_written: int = 0
    onnx_kept: int = 0
    ir_written: int = 0
    ir_kept: int = 0
    megabytes: float = 0.0

    def __add__(self, more: Exported) -> Exported:
        return Exported(*(getattr(self, part.name) + getattr(more, part.name) for part in fields(self)))


def export_stages(folder: Path, models: Iterable[ModelFile]) -> Exported:
    """Writes missing models into `onnx_models` and `ir_models`; all must have the same widths and seed."""
    done, models, with_ir = Exported(), list(models), has_openvino()
    weights = draw_weights(models[0].size.features, models[0].size.hidden, models[0].seed)
    for model in progress(models, "export"):
        path, ir_path = model.onnx(folder), model.ir(folder)
        if model.has_onnx(folder):
            done.onnx_kept += 1
        else:
            proto = stage_model(model, weights)
            onnx.checker.check_model(proto, full_check=True)
            files.write_bytes(path, proto.SerializeToString())
            done.onnx_written += 1
        if with_ir and model.has_ir(folder):
            done.ir_kept += 1
        elif with_ir:
            write_ir(path, ir_path, model.stamp)
            done.ir_written += 1
        done.megabytes += sum(file.stat().st_size for file in (path, ir_path, ir_path.with_suffix(".bin"))
                              if file.is_file()) / 1e6
    return done


def write_ir(source: Path, target: Path, stamp: str) -> None:
    """Converts an ONNX model to OpenVINO's IR with unchanged weight precision. The stamp is stored in the properties."""
    model = openvino.Core().read_model(str(source))  # convert_model would store folded zeros of the output's size
    model.set_rt_info(stamp, ["hase_stages"])
    with temporary_folder() as folder:
        written = folder / target.name
        openvino.save_model(model, str(written), compress_to_fp16=False)
        del model
        for suffix in (".bin", ".xml"):  # the .xml counts, so it comes last
            files.write_bytes(target.with_suffix(suffix), written.with_suffix(suffix).read_bytes())
