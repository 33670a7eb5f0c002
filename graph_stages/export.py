"""Writes the stages as ONNX models and as OpenVINO's IR, for each kind of processing unit.

    onnx_models/stage2_sum_cpu_fp32.onnx               dynamic, for CPU and CUDA
    onnx_models/stage2_sum_gpu_fp16.onnx               dynamic, weights in FP16
    onnx_models/stage2_sum_npu_fp16_n1000_e2000.onnx   for one size, since NPUs need fixed shapes; weights in FP16
    ir_models/….xml, ….bin                             the same as OpenVINO's IR

All files have the same weights. They are written whether or not this machine has such a unit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from graph_stages.definition import STAGES, GraphSize, Stage
from graph_stages.layer import draw_weights
from graph_stages.onnx_models import Precision, stage_model
from model_zoo.exporting.onnx_export import is_done
from utils import cli, files
from utils.lazy import onnx, openvino
from utils.temporary import temporary_folder

EXPORTER_VERSION = 1  # files of another version are exported again
ONNX_FOLDER, IR_FOLDER = "onnx_models", "ir_models"
STAMP = "hase.stages"
Kind = str  # of a unit: `CPU`, `GPU`, `NPU` or `CUDA`


@dataclass(frozen=True)
class Form:
    """How models for a kind of unit are written: their weights' precision, and whether their sizes are fixed."""

    word: str
    precision: Precision
    static: bool


FORMS: dict[Kind, Form] = {"CPU": Form("cpu", "FP32", static=False), "GPU": Form("gpu", "FP16", static=False),
                           "NPU": Form("npu", "FP16", static=True)}
FORM_OF = FORMS | {"CUDA": FORMS["CPU"]}


def kind_of(unit: str) -> Kind:
    """`GPU` of `GPU.1`."""
    return unit.partition(".")[0]


@dataclass(frozen=True)
class ModelFile:
    """One model to export; for a dynamic one only the widths of `size` count."""

    stage: Stage
    form: Form
    size: GraphSize
    seed: int

    @property
    def stem(self) -> str:
        place = f"_{self.size.name}" if self.form.static else ""
        return f"stage{self.stage.id}_{self.stage.name}_{self.form.word}_{self.form.precision.lower()}{place}"

    @property
    def stamp(self) -> str:
        """What tells a file of these weights and widths from others of its name."""
        facts = (EXPORTER_VERSION, self.size.features, self.size.hidden, self.seed)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def onnx(self, folder: Path) -> Path:
        return folder / ONNX_FOLDER / f"{self.stem}.onnx"

    def ir(self, folder: Path) -> Path:
        return folder / IR_FOLDER / f"{self.stem}.xml"

    def has_onnx(self, folder: Path) -> bool:
        """Whether the whole file is there, with these weights."""
        return is_done(self.onnx(folder), {STAMP: self.stamp})

    def has_ir(self, folder: Path) -> bool:
        """The same of the IR; its two files are put in place one after the other, the `.xml` last."""
        path = self.ir(folder)
        return path.is_file() and path.with_suffix(".bin").is_file() and f'value="{self.stamp}"' in _end_of(path)


def _end_of(path: Path, characters: int = 4096) -> str:
    """The last characters of a file: there an IR has its properties."""
    data = path.read_bytes()
    return data[-characters:].decode(errors="replace")


def model_file(unit: str, stage: Stage, size: GraphSize, seed: int) -> ModelFile:
    """The file that a unit runs a stage from."""
    return ModelFile(stage, FORM_OF[kind_of(unit)], size, seed)


def model_files(sizes: Sequence[GraphSize], seed: int) -> Iterator[ModelFile]:
    """All models for some sizes: 14 dynamic ones, and for each size 7 static ones."""
    for form in FORMS.values():
        for size in sizes if form.static else sizes[:1]:
            yield from (ModelFile(stage, form, size, seed) for stage in STAGES)


def has_openvino() -> bool:
    return find_spec("openvino") is not None


@dataclass
class Exported:
    """How many files were written and kept, and how large all are together; without OpenVINO there is no IR."""

    onnx_written: int = 0
    onnx_kept: int = 0
    ir_written: int = 0
    ir_kept: int = 0
    megabytes: float = 0.0


def export_stages(folder: Path, models: Iterable[ModelFile]) -> Exported:
    """Writes models that are not there yet.

    Args:
        folder: gets `onnx_models` and `ir_models`.
        models: all of the same widths and seed.
    """
    done, models = Exported(), list(models)
    with_ir = has_openvino()
    weights = draw_weights(models[0].size.features, models[0].size.hidden, models[0].seed)
    for one in cli.progress(models, "export"):
        path = one.onnx(folder)
        if one.has_onnx(folder):
            done.onnx_kept += 1
        else:
            made = stage_model(one.stage, weights, one.form.precision, one.size, one.form.static, {STAMP: one.stamp})
            onnx.checker.check_model(made, full_check=True)
            files.write_bytes(path, made.SerializeToString())
            done.onnx_written += 1
        if with_ir and one.has_ir(folder):
            done.ir_kept += 1
        elif with_ir:
            write_ir(path, one.ir(folder), one.stamp)
            done.ir_written += 1
        done.megabytes += sum(found.stat().st_size for found in (path, one.ir(folder), one.ir(folder).with_suffix(".bin"))
                              if found.is_file()) / 1e6
    return done


def write_ir(source: Path, target: Path, stamp: str) -> None:
    """Writes an ONNX model as OpenVINO's IR, which keeps the precision of its weights.

    Args:
        source: the ONNX model.
        target: the `.xml`; its `.bin` lies beside it.
        stamp: is kept in the IR's properties.
    """
    model = openvino.Core().read_model(str(source))  # convert_model would store folded zeros of the output's size
    model.set_rt_info(stamp, ["hase_stages"])
    with temporary_folder() as folder:
        written = folder / target.name
        openvino.save_model(model, str(written), compress_to_fp16=False)
        del model
        for suffix in (".bin", ".xml"):  # the .xml counts, so it comes last
            files.write_bytes(target.with_suffix(suffix), written.with_suffix(suffix).read_bytes())
