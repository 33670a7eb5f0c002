"""The path of every artifact, and safe file names.

Names of kernels, models, flavours or predictors that are read from a file are not trusted. A field of a schema that becomes a
file name is a `FileName`, which refuses names that point to another folder. Names from a model go through `as_file_name`.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from hase.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]  # holds the package's folders: the repository, or `hase` in a wheel's site-packages
IN_CLONE = (ROOT / "pyproject.toml").is_file()
IMPORTED_FROM = ROOT if IN_CLONE else ROOT.parent  # where Python finds `hase`
SHIPPED = ROOT / "learned" / "shipped"  # predictors that come with Hase, in the same layout as those of a workspace
ESTIMATORS = ROOT / "training" / "estimators"  # estimators that come with Hase, a file each
COMPOSITION = "composition.json"  # how kernel times add up to a model's time
OPTIMIZED_SUFFIX = ".ort.onnx"  # ORT's optimised graph of a model: `<model>.<flavour>.ort.onnx`; never taken for a model
LONGEST_BYTES = 240  # of a name: file systems allow 255, and a suffix is added
_UNSAFE = re.compile(r'[/\\\x00-\x1f\x7f]')  # separates folders, or is not printable


def default_root() -> Path:
    """The root of the default workspace."""
    return ROOT if IN_CLONE else Path.cwd()


@dataclass(frozen=True)
class Workspace:
    """A folder for what the phases write, with the layout of the repository. By default the repository itself, or the current
    folder where Hase is installed as a package."""

    root: Path = field(default_factory=default_root)

    @property
    def log_file(self) -> Path:
        return self.root / "logs" / "hase.log"

    @property
    def models(self) -> Path:
        """Exported models and ORT's optimised graphs. Written by the exporters of model_zoo; read by every later phase."""
        return self.root / "model_zoo" / "models"

    @property
    def kernel_records(self) -> Path:
        """`<flavour>/<model>.json` and `<flavour>/index.json`. Written by fusion_detector; read by every later phase."""
        return self.root / "ort_analysis" / "ort_kernel_record"

    @property
    def kernel_onnx(self) -> Path:
        """`<flavour>/<kernel id>.onnx` with `<kernel id>.json`. Written by kernel_builder, kernel_sampler and
        predict_model_latency --measure-missing; read by ort_kernel_runner and collector."""
        return self.root / "kernel_model" / "kernel_onnx"

    def dataset(self, target: str) -> Path:
        """Measurements of one target. Written by collector, merge_datasets and predict_model_latency --measure-missing; read by
        dataset.py, label_table, training, the predictor and evaluator."""
        return self.root / "benchmark" / "dataset" / target

    def served_sets(self, target: str) -> Path:
        """Request latencies of sets of models: a line per set and way of sharing, with the samples in a folder beside it.
        Written by served_sets."""
        return self.root / "benchmark" / "served_sets" / f"{target}.jsonl"

    @property
    def host_pace(self) -> Path:
        """The latest measurement of this machine's host pace. Written by host_pace; read by the predictor."""
        return self.root / "benchmark" / "host_pace.json"

    @property
    def convolution_results(self) -> Path:
        """`<stage>/<model>_<algorithm>_<gpu>/`: times of convolution algorithms. Written by run_profile; read by
        choose_algorithms."""
        return self.root / "extras" / "convolutions" / "results"

    @property
    def stage_models(self) -> Path:
        """`onnx_models/` and `ir_models/`: the stages of a graph network. Written and read by profile_stages."""
        return self.root / "extras" / "graph_stages" / "exported_models"

    @property
    def stage_results(self) -> Path:
        """Times and bandwidths of the stages of a graph network. Written by profile_stages; read by plan_stages."""
        return self.root / "extras" / "graph_stages" / "results"

    @property
    def this_device(self) -> Path:
        """How long measuring this device took so far. Written and read by recipes/this_device."""
        return self.root / "benchmark" / "this_device" / "spent.json"

    def model_dag(self, flavour: str) -> Path:
        """DAG files of one flavour. Written by dag_critical_path for people; overlap_simulator builds its own graphs."""
        return self.root / "graph_model" / "model_DAG" / flavour

    def predictors(self, target: str) -> Path:
        """What is learned for one target: `learned/target_files.py` lists the files with their writers and readers."""
        return self.root / "training" / "predictors" / target

    @property
    def data_sheets(self) -> Path:
        """Corrections of GPUs' data sheets, one file per GPU. Written by correct_data_sheet; read by the predictor."""
        return self.root / "training" / "data_sheets"

    def kernel_errors(self, target: str) -> Path:
        """The predictors' error on each held-out kernel; not shipped. Written by train_kernel_model; read by kernel_sampler."""
        return self.root / "training" / "kernel_errors" / f"{target}.json"

    @property
    def evaluation(self) -> Path:
        """Predicted and measured latencies: CSV, JSON, plot. Written by evaluator; read by people."""
        return self.root / "evaluation"

    def find_model(self, name: Path) -> Path:
        """The model file `name`; a bare name is also looked for among the exported models."""
        for candidate in (name, self.models / name):
            if os.path.isfile(candidate):  # Path.is_file raises an error for a name that no file can have
                return candidate
        if os.path.isdir(name):
            inside = [path.name for path in model_files([name])]
            raise UserError(f"{name}: a folder, not a model; name " + (f"one of its models: {', '.join(inside)}" if inside else
                            "an .onnx file (this folder holds none)"))
        exported = ", ".join(path.name for path in model_files([self.models])) if self.models.is_dir() else ""
        raise UserError(
            f"{name}: no such model, here or in {self.models}"
            + (f" (exported: {exported})" if exported else "; export some with: python model_zoo/torchvision_exporter.py")
        )

    def find_models(self, names: Iterable[Path]) -> list[Path]:
        """The model files for `names`: files, folders, or patterns; a bare `models` is also looked for in model_zoo."""
        models: list[Path] = []
        for name in names:
            folder = next((p for p in (name, self.root / "model_zoo" / name) if os.path.isdir(p)), None)
            if folder is None:
                models += self._matching(name) or [self.find_model(name)]
                continue
            inside = model_files([folder])
            if not inside:
                raise UserError(f"{folder}: no .onnx models in this folder; export some with: "
                                "python model_zoo/torchvision_exporter.py")
            models += inside
        return models

    def _matching(self, pattern: Path) -> list[Path]:
        """The models whose paths match a pattern, sorted; possibly none. A bare pattern also searches the exported models."""
        if not glob.has_magic(str(pattern)) or os.path.isfile(pattern):
            return []
        matches = (map(Path, glob.glob(str(path))) for path in (pattern, self.models / pattern))
        return next((models for paths in matches if (models := sorted(filter(is_model_file, paths)))), [])


def targets_in(folder: Path, holding: str, none: str) -> list[str]:
    """The targets, by name, whose folders in `folder` hold the file `holding`."""
    targets = sorted(path.parent.name for path in folder.glob(f"*/{holding}") if path.is_file())
    if not targets:
        raise UserError(f"{folder}: {none}")
    return targets


def model_files(folders: Iterable[Path], suffixes: Sequence[str] = (".onnx",)) -> list[Path]:
    """The models directly in `folders`, sorted; without ORT's optimised graphs and files that are being written."""
    return sorted(path for folder in folders for suffix in suffixes for path in folder.glob(f"*{suffix}")
                  if is_model_file(path, suffixes))


def is_model_file(path: Path, suffixes: Sequence[str] = (".onnx", ".json")) -> bool:
    """Whether a file name is that of a model or record, not of ORT's optimised graph or an unfinished file."""
    return path.name.endswith(tuple(suffixes)) and not path.name.endswith(OPTIMIZED_SUFFIX) and not path.name.startswith(".")


def _checked(name: str) -> str:
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} can't be the name of a file")
    return _checked_part(name)


def _checked_part(name: str) -> str:
    if unsafe := _UNSAFE.search(name):
        raise ValueError(f"{name[:80]!r} can't be the name of a file: it holds {unsafe.group()!r}")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name[:80]!r} can't be the name of a file: it is no valid text") from None
    if length > LONGEST_BYTES:
        raise ValueError(f"{name[:80]!r}… can't be the name of a file: it is longer than {LONGEST_BYTES} bytes")
    return name


FileName = Annotated[str, AfterValidator(_checked)]
FileNamePart = Annotated[str, AfterValidator(_checked_part)]  # a part of a file name; may be empty


def as_file_name(name: str) -> str:
    """`name` as a `FileName`: forbidden characters become "_", and a long name is cut and gets a hash."""
    safe = _UNSAFE.sub("_", name).encode("utf-8", "replace").decode()
    if safe in ("", ".", ".."):
        safe = f"_{safe}"
    if len(safe.encode()) <= LONGEST_BYTES:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return safe.encode()[:LONGEST_BYTES - 9].decode("utf-8", "ignore") + "~" + digest
