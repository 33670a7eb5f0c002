"""A workspace with small real models, a made-up dataset of their kernels, and predictors really trained on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hase.ort_analysis.graph.analysis import analyze
from hase.records.dataset_files import DatasetHeader, DatasetKernel, header_path, write_journal, write_kernels
from hase.records.dataset_tables import write_dataset_tables
from hase.records.kernel_record import Kernel, ModelRecord
from hase.records.kernel_record_files import record_path
from hase.records.measurement import DEFAULT_LABELS, Block, Measurement
from hase.runtimes import local_target
from hase.utils import files
from hase.utils.fingerprint import machine
from hase.utils.model_files import GROUP_KEY
from hase.utils.paths import ROOT, Workspace

METRIC = "DCGM_FI_DEV_CPU_UTIL_TOTAL"  # a CPU has it, so a collector can continue the dataset
LEVELS = {0.0: 0.0, 0.5: 0.5}  # stress level: the metric in the background
HELD_OUT = "heldnet"
TRAINING = """
folds: 2
threads: 1
xgboost: {trees: 60, depth: 4}
forest: {trees: 5}
"""
OPSETS = [helper.make_opsetid("", 17)]


def conv_net(path: Path, batch: int | str = 1, channels: int = 16, size: int = 16, element: int = TensorProto.FLOAT,
             extra: str = "") -> Path:
    """x → Conv → Relu → Conv → Relu (→ `extra`, an operator of one input) → GlobalAveragePool → Flatten → Gemm → y."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    weights = {"w1": (channels, 8, 3, 3), "w2": (channels, channels, 3, 3), "w3": (channels, 10), "b3": (10,)}
    pads: Any = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], **pads), helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], **pads), helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node(extra or "Identity", ["r2"], ["e"]), helper.make_node("GlobalAveragePool", ["e"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]), helper.make_node("Gemm", ["f", "w3", "b3"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, path.stem, [helper.make_tensor_value_info("x", element, [batch, 8, size, size])],
        [helper.make_tensor_value_info("y", element, [batch, 10])],
        [numpy_helper.from_array(rng.standard_normal(shape).astype(dtype) * np.array(0.1, dtype), name)
         for name, shape in weights.items()])
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=OPSETS, ir_version=10)
    helper.set_model_props(model, {GROUP_KEY: path.stem.split("_")[0]})
    onnx.save(model, path)
    return path


def made_up_ms(kernel: Kernel, metric: float = 0.0) -> float:
    """The time that the made-up dataset gives a kernel."""
    return (0.002 + kernel.flops / 2e8 + (kernel.bytes_read + kernel.bytes_written) / 5e7) * (1 + metric)


def model_ms(record: ModelRecord, metric: float = 0.0) -> float:
    """The time that the made-up dataset gives a model: 1.2 · Σ + 0.05 ms."""
    return 1.2 * sum(made_up_ms(record.kernel_of(node), metric) for node in record.nodes) + 0.05 * (1 + metric)


def copies_ms(record: ModelRecord) -> float:
    """The time that the made-up dataset adds for numpy arrays in and out: 0.03 ms, and 2 ms for each MiB in."""
    return 0.03 + 2.0 * sum(tensor.bytes for tensor in record.inputs.values()) / 2**20


def make_dataset(workspace: Workspace, records: list[ModelRecord]) -> None:
    """Writes the dataset of this machine's CPU: every kernel and model at every level, times made up."""
    target = local_target("cpu")
    folder = workspace.dataset(target.name)
    kernels = {kernel.id: kernel for record in records for kernel in record.kernels.values()}
    this_machine = machine("cpu").model_copy(update={"uuid": "made-up"})  # its canary is made up too, so nothing waits for it

    def measured(subject: str, name: str, label: str, *samples_ms: float) -> Measurement:
        return Measurement.model_validate({
            "subject": subject, "id": name, "label": label, "context": "alone", "place": "alone", "samples_ms": samples_ms,
            "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:00:01+00:00"})

    blocks = []
    for level, metric in LEVELS.items():
        measurements = [measured("kernel", name, label, *(made_up_ms(kernel, metric),) * 3)
                        for name, kernel in kernels.items() for label in DEFAULT_LABELS]
        measurements += [measured("model", record.model, "latency", 0.9 * time_ms, time_ms, 1.1 * time_ms)
                         for record in records for time_ms in [model_ms(record, metric)]]
        measurements += [measured("model", record.model, "host_io", *(model_ms(record) + copies_ms(record),) * 3)
                         for record in records if level == 0]
        blocks.append(Block(level=level, key="all", background={METRIC: metric}, during={METRIC: metric}, canary_before_ms=1.0,
                            canary_after_ms=1.0, attempts=1, machine=this_machine.uuid, measurements=tuple(measurements)))
    header = DatasetHeader(target=target, metrics=(METRIC,), machines={this_machine.uuid: this_machine}, held_out=(HELD_OUT,),
                           groups={record.model: record.group for record in records})
    files.write_json(header_path(folder), header)
    write_journal(folder, blocks)
    write_kernels(folder, (DatasetKernel.held_by(kernel, records).model_dump_json() for kernel in kernels.values()))
    write_dataset_tables(folder, header, blocks)


def make_models(workspace: Workspace) -> list[ModelRecord]:
    """Exports the small models and writes their records; `dynnet` has a dynamic batch and is in no dataset."""
    paths = [conv_net(workspace.models / f"{name}_c{channels}.onnx", channels=channels, batch=batch)
             for name, batch in (("anet", 1), ("bnet", 2), ("cnet", 4)) for channels in (8, 16, 24, 32, 48, 64)]
    paths.append(conv_net(workspace.models / f"{HELD_OUT}_c40.onnx", channels=40))
    records = [analyze(path, "cpu") for path in paths]
    for record in records:
        files.write_json(record_path(workspace, record.flavour, record.model), record)
    conv_net(workspace.models / "dynnet.onnx", batch="batch", channels=16)
    return records


def make_workspace(root: Path) -> Workspace:
    """Makes the workspace at `root`: models, their records, their dataset, and the config of a training."""
    workspace = Workspace(root)
    make_dataset(workspace, make_models(workspace))
    files.write_text(root / "training.yaml", TRAINING)
    return workspace


def learning(root: Path) -> list[list[str | Path]]:
    """The commands that learn from the dataset: each script, and its options. A model's made-up latency is α·Σ+β."""
    return [["training/train_kernel_model.py", "--workspace", root, "--quiet", "--config", root / "training.yaml"],
            ["training/fit_composition.py", "--workspace", root, "--quiet", "--composition", "sum"]]


def trained_workspace(root: Path) -> Workspace:
    """The workspace at `root` with predictors; it is made where it is not there."""
    workspace = Workspace(root)
    if not (workspace.predictors(local_target("cpu").name) / "composition.json").exists():
        make_workspace(root)
        for command in learning(root):
            subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return workspace
