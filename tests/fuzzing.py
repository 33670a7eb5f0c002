"""Damages the files of a workspace, by a seed. Hase must answer or report an error to the user, without a traceback, a crash, a
hang, or gigabytes of memory. (For models see recipes/fuzz.)

The tests run a short form. The command makes a workspace of small models first:

    python -m tests.fuzzing --files 30 --seed 1
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.fuzz.damaged_models import flipped, torn
from recipes.fuzz.reading import Outcome, Reader, serve
from utils.paths import ROOT, Workspace

ODD_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2**31, 2**63 - 1, -2**63, 10**30, 1e308, -1e308, 1e-320, math.nan, math.inf, 0.5)
ODD_VALUES: tuple[Any, ...] = (None, "", "x", "../../x", "\ud800", "a\0b", [], {}, [[]], True, "9" * 5000)


# files of a workspace ----------------------------------------------------------------------------------------------------

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
    parent = document
    for step in path[:-1]:
        parent = parent[step]
    damage = rng.choice(["odd number", "odd number", "near", "odd value", "missing", "more", "deep", "whole"])
    if damage == "whole" or not path:
        return "whole", rng.choice([[], {}, None, 1, "x", [document]])
    if damage == "missing":
        del parent[path[-1]]
    elif damage == "more":
        if isinstance(parent, dict):
            parent["unknown"] = 1
        else:
            parent.append(parent[-1])
    elif damage == "near" and isinstance(parent[path[-1]], (int, float)) and not isinstance(parent[path[-1]], bool):
        parent[path[-1]] = parent[path[-1]] * 2 + 1
    elif damage == "deep":
        nested: Any = 1
        for _ in range(rng.choice([10, 400])):
            nested = [nested]
        parent[path[-1]] = nested
    else:
        parent[path[-1]] = rng.choice(ODD_NUMBERS if "number" in damage or damage == "near" else ODD_VALUES)
    return f"{damage} at {'.'.join(map(str, path))[:60]}", document


def damaged_file(path: Path, data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The damage by name, and the damaged bytes, by the kind of the file."""
    kind = rng.random()
    if kind < 0.2 or path.suffix in (".xz", ".gz", ".npz"):
        return "flipped", flipped(data, rng)
    if kind < 0.35:
        return "torn", torn(data, rng)
    if kind < 0.4:
        return "nested 100,000 deep", b"[" * 100_000
    if path.suffix == ".csv":
        lines = data.decode().split("\n")
        number = rng.randrange(max(len(lines) - 1, 1))
        cells = lines[number].split(",")
        column = rng.randrange(len(cells))
        cells[column] = str(rng.choice(ODD_NUMBERS + ODD_VALUES)).encode("utf-8", "replace").decode()
        return f"line {number + 1}, cell {column}: {cells[column][:20]}", "\n".join(
            [*lines[:number], ",".join(cells), *lines[number + 1:]]).encode()
    if path.suffix == ".jsonl":
        lines = data.decode().splitlines()
        number = rng.randrange(len(lines))
        damage, document = damaged_document(json.loads(lines[number]), rng)
        lines[number] = json.dumps(document)
        return f"line {number + 1}: {damage}", "\n".join([*lines, ""]).encode()
    if path.suffix == ".yaml":
        import yaml

        damage, document = damaged_document(yaml.safe_load(data), rng)
        return damage, json.dumps(document).encode()  # JSON is YAML too
    damage, document = damaged_document(json.loads(data), rng)
    return damage, json.dumps(document).encode()


def commands(path: Path, root: Path, target: str) -> list[str]:
    """Lines of Python that read a file of the workspace at `root`; `answers` gathers what must not change."""
    place = path.relative_to(root).as_posix()
    quoted = repr(str(path))
    predicting = f"answers.append(predict('anet_c16.onnx', target={target!r}, workspace=workspace).latency_ms)"
    recorded = f"evaluate(workspace, [], recorded=True, target={target!r})"
    training = f"read_training_set(workspace, {target!r})"
    if path.suffix == ".yaml":
        return [f"read_config(Path({quoted}), {schema})" for schema in
                ("CollectorConfig", "TrainingConfig", "InferenceConfig", "ZooConfig")]
    if place.endswith("index.json"):
        return [f"kernels_in_file(Path({quoted}))"]
    if place.startswith("ort_analysis"):
        return [f"answers.append(predict({quoted}, target={target!r}, workspace=workspace).latency_ms)",
                f"kernels_in_file(Path({quoted}))", "read_model_records(workspace, flavour_of('cpu'))"]
    if place.startswith("training/predictors"):
        return [predicting]
    if place.startswith("training/kernel_errors"):
        return [f"read_errors(Path({quoted}))"]
    dataset = f"workspace.dataset({target!r})"
    return [recorded, training, f"read_journal({dataset})", f"read_kernels_of({dataset})"]


# the campaign -------------------------------------------------------------------------------------------------------------

NAMES = """
from pathlib import Path
from benchmark.collecting.config import CollectorConfig
from records.dataset_files import read_journal, read_kernels as read_kernels_of
from inference.evaluation.evaluate import evaluate
from inference import predict
from inference.live.load import InferenceConfig
from records.kernel_record_files import kernels_in_file
from kernel_model.sampling.kernel_errors import read_errors
from model_zoo.exporting.zoo_config import ZooConfig
from records.kernel_record_files import read_model_records
from training.kernels.settings import TrainingConfig
from training.kernels.training_set import read_training_set
from utils.config import read_config
from runtimes import flavour_of
"""  # what `commands` calls


def fuzz_files(root: Path, target: str, paths: list[Path], count: int, seed: int) -> Iterator[Outcome]:
    """Reads each file of a workspace with `count` damages, and puts it back."""
    reader = Reader(("-m", "tests.fuzzing", "--serve", str(root)))
    for path in paths:
        lines = commands(path, root, target)
        data = path.read_bytes()
        wanted = {line: reader.answers(line) for line in lines if path.suffix != ".yaml"}
        try:
            for number in range(count):
                damage, changed = damaged_file(path, data, random.Random(f"{seed} {path.name} {number}"))
                if changed == data:
                    continue
                path.write_bytes(changed)
                for line in lines:
                    yield reader.read(line, f"{path.relative_to(root)}: {damage}: {line[:40]}", wanted.get(line))
        finally:
            path.write_bytes(data)
    reader.close()


def files_of(workspace: Path, target: str) -> list[Path]:
    """A file of every kind that a workspace holds but its models, and the configs that come with Hase."""
    import shutil

    records = sorted((workspace / "ort_analysis" / "ort_kernel_record").glob("*/*.json"))
    configs = workspace / "configs"
    configs.mkdir(exist_ok=True)
    for config in [*ROOT.glob("*/config.yaml"), ROOT / "benchmark" / "config.yaml"]:
        shutil.copy(config, configs / f"{config.parent.name}.yaml")
    of_target = [workspace / "benchmark" / "dataset" / target, workspace / "training" / "predictors" / target]
    return [*[path for path in records if path.stem in ("anet_c16", "index")],
            *[path for folder in of_target for path in sorted(folder.iterdir()) if not path.name.startswith(".")],
            *sorted((workspace / "training" / "kernel_errors").glob("*.json")), *sorted(configs.glob("*.yaml"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=int, default=30, help="damages of each other file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzzing", help="the workspace")
    args = parser.parse_args()
    if args.serve:
        names: dict[str, Any] = {"workspace": Workspace(args.serve)}
        exec(NAMES, names)
        serve(names)
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from trained_workspace import train

    from records.kernel_record_files import update_index
    from runtimes import flavour_of, local_target

    target = local_target("cpu").name
    if not (args.out / "training" / "predictors" / target / "composition.json").exists():
        train(args.out)
    update_index(Workspace(args.out), flavour_of("cpu"))
    counts: Counter[str] = Counter()
    slowest_s = largest_mib = 0.0
    for outcome in fuzz_files(args.out, target, files_of(args.out, target), args.files, args.seed):
        counts[outcome.what] += 1
        slowest_s, largest_mib = max(slowest_s, outcome.seconds), max(largest_mib, outcome.peak_mib)
        if outcome.fault:
            print(f"{outcome.what}: {outcome.damage}: {outcome.message.strip()[-700:]}\n", flush=True)
    print(f"{dict(counts)}, slowest {slowest_s:.1f} s, most memory {largest_mib:.0f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
