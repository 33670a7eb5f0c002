"""Campaign `files`: damages of every file of a workspace, by a seed."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fuzz.damaged_models import flipped, torn
from fuzz.reading import Outcome, Parts, Reader
from fuzz.small_workspace import trained_workspace
from hase.benchmark.collecting.config import CollectorConfig
from hase.inference import predict
from hase.inference.evaluation.evaluate import evaluate
from hase.inference.live.load import InferenceConfig
from hase.kernel_model.sampling.usefulness import read_errors
from hase.learned.kernels.interface import TrainingConfig
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.records.dataset_files import read_journal, read_kernels
from hase.records.kernel_record_files import kernels_in_file, read_model_records, update_index
from hase.runtimes import local_flavour, local_target
from hase.training.kernels.training_set import read_training_set
from hase.utils.config import Config, read_config
from hase.utils.paths import ROOT, Workspace

CASES = 30  # damages of each file
ODD_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2**31, 2**63 - 1, -2**63, 10**30, 1e308, -1e308, 1e-320, math.nan, math.inf, 0.5)
ODD_VALUES: tuple[Any, ...] = (None, "", "x", "../../x", "\ud800", "a\0b", [], {}, [[]], True, "9" * 5000)
ODD_NAMES = ("", "a/b", "..", "\x01", "\x7f", "\ud800", "x" * 5000, "name")
SCHEMAS: dict[str, type[Config]] = {"collector": CollectorConfig, "training": TrainingConfig, "inference": InferenceConfig,
                                    "zoo": ZooConfig}


def read(what: str, path: str, root: str, target: str) -> list[float]:
    """What a part of Hase reads of a file of the workspace at `root`: numbers that must be right."""
    workspace = Workspace(Path(root))
    match what:
        case "kernels":
            kernels_in_file(Path(path))
        case "records":
            read_model_records(workspace, local_flavour("cpu"))
        case "errors":
            read_errors(Path(path))
        case "latency" | "strict latency":
            return [predict(path, target=target, strict="strict" in what, workspace=root).latency_ms]
        case "evaluation":
            comparisons = evaluate(workspace, [], recorded=True, target=target).comparisons
            return [value for row in comparisons for value in (row.predicted_ms, row.strict_ms, row.measured_ms)]
        case "training set":  # a number that changes with any time, load or feature that training learns from
            rows = read_training_set(workspace, target)
            times_ms = sum(sum(times_ms[times_ms > 0]) for times_ms in rows.times_ms.values())
            return [float(times_ms + np.nansum(rows.load) + rows.features.sum())]
        case "journal":
            return [len(read_journal(workspace.dataset(target)))]
        case "kernels of a dataset":
            return [sum(entry.kernel.flops for entry in read_kernels(workspace.dataset(target)))]
        case _:
            read_config(Path(path), SCHEMAS[what])
    return []


def readers(path: Path, root: str, target: str) -> list[tuple[str, ...]]:
    """The calls that read a file of the workspace at `root`."""
    place = path.relative_to(root).as_posix()
    parts: dict[str, tuple[str, ...]] = {  # by how the place begins
        "configs": tuple(SCHEMAS), "ort_analysis": ("kernels",) if path.stem == "index" else ("latency", "kernels", "records"),
        "training/predictors": ("latency", "strict latency"), "training/kernel_errors": ("errors",),
        "benchmark": ("evaluation", "training set", "journal", "kernels of a dataset")}
    text = "anet_c16.onnx" if place.startswith("training/predictors") else str(path)
    return [("read", what, text, root, target) for begin, whats in parts.items() if place.startswith(begin) for what in whats]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(min(len(value), 20)):
            yield from _places(value[number], (*path, number))


def damaged_document(document: Any, rng: random.Random) -> tuple[str, Any]:
    """A document of JSON or YAML with a value of another kind, one missing, one too many, or one too deep."""
    document = json.loads(json.dumps(document))
    path = rng.choice([place for place in _places(document) if place] or [()])
    damage = rng.choice(["odd number", "odd number", "near", "odd value", "missing", "more", "deep", "whole", "renamed"])
    if damage == "whole" or not path:
        return "whole", rng.choice([[], {}, None, 1, "x", [document]])
    *steps, last = path
    parent = reduce(lambda part, step: part[step], steps, document)
    match damage, parent[last]:
        case "missing", _:
            del parent[last]
        case "more", _ if isinstance(parent, dict):
            parent["unknown"] = 1
        case "more", _:
            parent.append(parent[-1])
        case "renamed", _ if isinstance(parent, dict):
            parent[rng.choice(ODD_NAMES)] = parent.pop(last)
        case "near", int() | float() as value if not isinstance(value, bool):
            parent[last] = value * 2 + 1
        case "deep", _:
            parent[last] = [1]
            for _ in range(rng.choice([9, 399])):
                parent[last] = [parent[last]]
        case _:
            parent[last] = rng.choice(ODD_NUMBERS if damage in ("odd number", "near") else ODD_VALUES)
    return f"{damage} at {'.'.join(map(str, path))[:60]}", document


def damaged_line(journal: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A file of JSON lines, one of which is damaged or stands twice."""
    lines = journal.decode().splitlines()
    number = rng.randrange(len(lines))
    damage, document = damaged_document(json.loads(lines[number]), rng)
    if rng.random() < 0.33:
        damage, lines[number:number] = "twice", [lines[number]]
    else:
        lines[number] = json.dumps(document)
    return f"line {number + 1}: {damage}", "\n".join([*lines, ""]).encode()


def damaged_file(path: Path, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The damage by name, and the damaged bytes, by the kind of the file."""
    kind = rng.random()
    if kind < 0.2 or path.suffix in (".xz", ".gz", ".npz", ".csv"):
        return "flipped", flipped(data, rng)
    if kind < 0.35:
        return "torn", torn(data, rng)
    if kind < 0.4:
        return "nested 100,000 deep", b"[" * 100_000
    if path.suffix == ".jsonl":
        return damaged_line(data, rng)
    damage, document = damaged_document(yaml.safe_load(data) if path.suffix == ".yaml" else json.loads(data), rng)
    return damage, json.dumps(document).encode()  # JSON is YAML too


def damaged(root: Path, target: str, paths: Sequence[Path], count: int, seed: int) -> Iterator[Outcome]:
    """The outcomes of `count` damages of each file of a workspace, which is put back each time."""
    with Reader("fuzz.damaged_workspace") as reader:
        for path in paths:
            calls = readers(path, str(root), target)
            before = path.read_bytes()
            wanted = [reader.answers(call) if path.suffix != ".yaml" else None for call in calls]
            for number in range(count):
                damage, changed = damaged_file(path, before, random.Random(f"{seed} {path.name} {number}"))
                try:
                    path.write_bytes(changed)
                    for call, right in zip(calls, wanted, strict=True):
                        yield reader.read(call, f"{path.relative_to(root)}: {damage}: {call[1]}", right)
                finally:
                    path.write_bytes(before)


def files_of(workspace: Path, target: str) -> list[Path]:
    """A file of every kind that a workspace holds but its models, and the configs that come with Hase."""
    update_index(Workspace(workspace), local_flavour("cpu"))
    records = sorted((workspace / "ort_analysis" / "ort_kernel_record").glob("*/*.json"))
    configs = workspace / "configs"
    configs.mkdir(exist_ok=True)
    for config in ROOT.glob("*/config.yaml"):
        shutil.copy(config, configs / f"{config.parent.name}.yaml")
    of_target = [workspace / "benchmark" / "dataset" / target, workspace / "training" / "predictors" / target]
    return [*[path for path in records if path.stem in ("anet_c16", "index")],
            *[path for folder in of_target for path in sorted(folder.iterdir()) if not path.name.startswith(".")],
            *sorted((workspace / "training" / "kernel_errors").glob("*.json")), *sorted(configs.glob("*.yaml"))]


def parts(count: int, seed: int, folder: Path) -> Parts:
    """`count` damages of each file of a small workspace, which is made in `folder`."""
    target = local_target("cpu").name
    root = trained_workspace(folder / "workspace").root
    yield "damaged files", damaged(root, target, files_of(root, target), count, seed)
