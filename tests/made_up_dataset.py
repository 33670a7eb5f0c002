"""Kernels described by hand and a dataset whose times follow a known formula: it stands in for a device with known errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.learned.kernels.interface import ForestSettings, TrainingConfig, TrainingSet, XgboostSettings
from hase.model_zoo.exporting.torch_models import group_of
from hase.records.dataset_files import (
    DatasetHeader,
    DatasetKernel,
    header_path,
    kernel_table_path,
    model_table_path,
    write_digests,
    write_kernels,
)
from hase.records.dataset_tables import input_shape, kernel_columns, model_columns
from hase.records.dataset_writer import DatasetWriter
from hase.records.kernel_record import Kernel, KernelInput, ModelRecord, Node, Tensor
from hase.records.kernel_record_files import record_path
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import Block, Measurement
from hase.training.kernels.label_training import train_label
from hase.training.kernels.training_set import read_training_set
from hase.training.train_kernel_model import save
from hase.utils import files
from hase.utils.fingerprint import Flavour, Machine, Target
from hase.utils.paths import Workspace

FLAVOUR = Flavour(device="cpu", runtime_version="1.31", instruction_set="avx2")
TARGET = Target(device_name="Made Up", flavour=FLAVOUR, threads=2)
MACHINE = Machine(device_name="Made Up", uuid="0", driver="", clocks="", cpu="Made Up", cores=2, memory_gib=1.0, versions={})
METRIC = "DCGM_FI_DEV_GPU_UTIL"
NOISE = 0.03
QUICK = TrainingConfig(folds=2, threads=1, own_min_kernels=60, forest=ForestSettings(trees=3),
                       xgboost=XgboostSettings(trees=60, learning_rate=0.2, bins=64),
                       xgboost_class=XgboostSettings(trees=20, learning_rate=0.3, bins=64))


def tensor(*shape: int, constant: bool = False, dtype: str = "float32") -> KernelInput:
    return KernelInput(dtype=dtype, shape=shape, constant=constant)


def conv(batch: int = 1, channels: int = 16, side: int = 32, out: int = 32, window: int = 3, stride: int = 1, group: int = 1,
         domain: str = "", **attributes: Any) -> Kernel:
    """A convolution with a bias and padding that keeps the side (divided by the stride)."""
    attributes = {"kernel_shape": [window] * 2, "strides": [stride] * 2, "pads": [window // 2] * 4, "group": group,
                  **attributes}
    inputs = [tensor(batch, channels, side, side), tensor(out, channels // group, window, window, constant=True),
              tensor(out, constant=True)]
    output = Tensor(dtype="float32", shape=(batch, out, -(-side // stride), -(-side // stride)))
    return describe_kernel("Conv", domain, 11, attributes, inputs, [output])


def relu(batch: int = 1, channels: int = 16, side: int = 32) -> Kernel:
    x = tensor(batch, channels, side, side)
    return describe_kernel("Relu", "", 14, {}, [x], [Tensor(dtype="float32", shape=x.shape)])


def gemm(rows: int = 1, depth: int = 128, columns: int = 64) -> Kernel:
    inputs = [tensor(rows, depth), tensor(columns, depth, constant=True), tensor(columns, constant=True)]
    return describe_kernel("Gemm", "", 13, {"transB": 1}, inputs, [Tensor(dtype="float32", shape=(rows, columns))])


def true_ms(kernel: Kernel, metric: float = 0.0) -> float:
    """The made-up device: a floor, arithmetic at a rate that small channel counts lower, memory, and a slowdown by load."""
    slow = 1.0 + 8.0 / kernel.outputs[0].shape[1] if kernel.op_type == "Conv" else 1.0
    time_ms = 0.004 + slow * kernel.flops / 5e7 + (kernel.bytes_read + kernel.bytes_written) / 1e7
    return time_ms * (1.0 + metric / 100.0)


def draw_kernels(count: int, seed: int = 0) -> list[Kernel]:
    """Different kernels of three types: convolutions, activations and products."""
    draw = np.random.default_rng(seed)
    kernels: dict[str, Kernel] = {}

    def choose(*choices: int) -> int:
        return int(draw.choice(choices))

    makers: list[Callable[[], Kernel]] = [
        lambda: conv(choose(1, 2, 4), choose(8, 16, 24, 32, 48, 64), choose(8, 14, 16, 28, 32, 56), choose(8, 16, 32, 64, 96),
                     choose(1, 3, 5), choose(1, 2)),
        lambda: relu(choose(1, 2, 4), choose(8, 16, 24, 32, 48, 64), choose(8, 14, 16, 28, 32, 56)),
        lambda: gemm(choose(1, 2, 4, 8), choose(64, 128, 256, 512), choose(10, 100, 500, 1000)),
    ]
    while len(kernels) < count:
        kernel = makers[int(draw.choice(3, p=[0.7, 0.2, 0.1]))]()
        kernels[kernel.id] = kernel
    return list(kernels.values())


def chain(name: str, kernels: Sequence[Kernel]) -> ModelRecord:
    """A model that runs `kernels` one after another; its group follows from its name by `group_of`."""
    nodes = tuple(Node(name=f"n{place}", kernel_id=kernel.id, provider="cpu", inputs=(f"t{place}",), outputs=(f"t{place + 1}",))
                  for place, kernel in enumerate(kernels))
    return ModelRecord(
        model=name, file_stem=name, group=group_of(name),
        sha256="0" * 64, dims={}, flavour=FLAVOUR, derived=False, weight_bytes=0, opsets={"ai.onnx": 14},
        inputs={"t0": Tensor(dtype="float32", shape=kernels[0].inputs[0].shape)},
        outputs={f"t{len(kernels)}": kernels[-1].outputs[0]}, kernels={kernel.id: kernel for kernel in kernels}, nodes=nodes)


def _described(kernel: Kernel, owners: Sequence[str]) -> DatasetKernel:
    models = tuple(name for name in owners if not name.startswith("sampled:"))
    groups = {group_of(name.removeprefix("sampled:")) for name in owners}
    return DatasetKernel(kernel=kernel, models=models, groups=tuple(sorted(groups)), sampled=len(models) < len(owners))


def write_dataset(workspace: Workspace, kernels: Mapping[str, Kernel], owners: Mapping[str, Sequence[str]],
                  models: Mapping[str, float], levels: Mapping[float, float], held_out: tuple[str, ...] = (),
                  failed: Sequence[str] = (), noise: float = NOISE,
                  time_ms_of: Callable[[Kernel, float], float] | None = None) -> None:
    """The tables that the collector would write: of kernels by id, their owners (models, or `sampled:` and a group), models'
    idle latency (ms), the metric at each level, ids of kernels that crashed, and the times' relative standard deviation."""
    folder, draw = workspace.dataset(TARGET.name), np.random.default_rng(1)
    stamps = {"Started": "2026-01-01T00:00:00+00:00", "Ended": "2026-01-01T00:00:01+00:00", "Machine": "0"}
    described = {name: _described(kernel, owners.get(name, ())) for name, kernel in kernels.items()}
    rows: list[dict[str, Any]] = []
    for level, metric in levels.items():
        for name, kernel in kernels.items():
            row = {"Kernel_ID": name, "OpType": kernel.type, "Input_Shape": input_shape(kernel), "Level": level,
                   "Models": described[name].owners, "Groups": "|".join(described[name].groups), "Status": "ok",
                   METRIC: metric + draw.normal(0, 0.5), **stamps}
            if name in failed:
                row |= {"Status": "crashed", "Error": "signal 11"}
            else:
                time_ms = (time_ms_of or true_ms)(kernel, metric) * float(np.exp(draw.normal(0, noise)))
                mean, median = (1.0, 0.8) if level else (1.1, 1.0)  # the mean adds up under load, the median idle
                row |= {"Latency_ms": mean * time_ms, "run_median_ms": median * time_ms, "kernel_time_ms": 0.9 * time_ms,
                        "Runs": 3}
            rows.append(row)
    header = DatasetHeader(target=TARGET, metrics=(METRIC,), machines={"0": MACHINE}, held_out=held_out)
    files.write_json(header_path(folder), header)
    write_kernels(folder, (entry.model_dump_json() for entry in described.values()))
    files.write_csv(kernel_table_path(folder), kernel_columns([METRIC]), rows)
    files.write_csv(model_table_path(folder), model_columns([METRIC]), (
        {"Model": name, "Level": 0.0, METRIC: 0.0, "Latency_ms": 1.1 * time_ms, "median_ms": time_ms, "Status": "ok",
         "Groups": group_of(name), **stamps} for name, time_ms in models.items()))
    write_digests(folder)


def write_workspace(workspace: Workspace, families: Sequence[str] = ("anet", "bnet", "cnet"), each: int = 3,
                    held_out: tuple[str, ...] = (), sampled: int = 250, levels: Mapping[float, float] | None = None,
                    alpha: float = 1.2, beta_ms: float = 0.3) -> dict[str, ModelRecord]:
    """Models of several families whose latency is α·Σ + β of their kernels' true times; records and dataset of them all."""
    drawn = draw_kernels(sampled + 12 * each * len(families))
    owners: dict[str, list[str]] = {kernel.id: ["sampled:othernet"] for kernel in drawn[:sampled]}
    records, models = {}, {}
    for place, name in enumerate(f"{family}{size}" for family in families for size in range(each)):
        kernels = drawn[sampled + 12 * place:][:12 - place % 5]
        record = chain(name, [*kernels, kernels[0]])
        for kernel in kernels:
            owners.setdefault(kernel.id, []).append(name)
        files.write_json(record_path(workspace, FLAVOUR, name), record)
        records[name] = record
        models[name] = alpha * sum(true_ms(record.kernel_of(node)) for node in record.nodes) + beta_ms
    kernels_by_id = {kernel.id: kernel for kernel in drawn if kernel.id in owners}
    write_dataset(workspace, kernels_by_id, owners, models, levels or {0.0: 0.0, 0.5: 50.0}, held_out)
    return records


def train(workspace: Workspace, *labels: str, config: TrainingConfig = QUICK) -> TrainingSet:
    """Trains predictors of the workspace's dataset: of some labels, or of all."""
    rows = read_training_set(workspace, TARGET.name)
    save(workspace, rows, [train_label(rows, label, config) for label in labels or rows.times_ms], config)
    return rows


def train_workspace(root: Path) -> None:
    """A workspace of four families with predictors; `secretnet` is held out. For `once`: tests that write take a copy."""
    write_workspace(Workspace(root), families=("anet", "bnet", "cnet", "secretnet"), held_out=("secretnet",))
    train(Workspace(root))


def collect(root: Path, *records: ModelRecord, uuid: str = "0", labels: tuple[str, ...] = ("run",),
            target: Target = TARGET) -> Workspace:
    """A workspace with the records of these models and a dataset of their kernels, measured by one machine."""
    workspace = Workspace(root)
    machine = MACHINE.model_copy(update={"uuid": uuid})
    header = DatasetHeader(target=target, metrics=(METRIC,), machines={uuid: machine}, labels=labels,
                           groups={record.model: record.group for record in records},
                           collections={record.model: record.collection for record in records if record.collection})
    kernels = {name: kernel for record in records for name, kernel in record.kernels.items()}
    writer = DatasetWriter(workspace.dataset(target.name), header,
                           [DatasetKernel.held_by(kernel, records) for kernel in kernels.values()])
    measured = [Measurement(subject="kernel", id=name, label="run", context="alone", place="alone",
                         samples_ms=(0.5 + float(uuid), 0.25 + float(uuid)), started="2026-01-01", ended="2026-01-02")
             for name in kernels]
    writer.append(Block(level=0.0, key="k", background={METRIC: 1.0}, during={}, canary_before_ms=1.0, canary_after_ms=1.0,
                        attempts=1, machine=uuid, measurements=tuple(measured)))
    writer.write_tables()
    for record in records:
        files.write_json(record_path(workspace, target.flavour, record.model), record)
    return workspace
