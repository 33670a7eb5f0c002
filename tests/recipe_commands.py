"""The commands of a recipe's script, and their configs. The script runs with a `python` that only notes its arguments."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from hase.benchmark.collecting.config import CollectorConfig
from hase.learned.kernels.interface import TrainingConfig
from hase.model_zoo.exporting.zoo_config import ZooConfig
from hase.runtimes.tvm.operator_sampler import OperatorSizes
from hase.utils.config import Config, read_config
from hase.utils.paths import ROOT

WORD_END, COMMAND_END = "\x1f", "\x1e"
READS: dict[str, tuple[type[Config], str]] = {  # what a command reads, and the default
    "benchmark/collector.py": (CollectorConfig, "benchmark/config.yaml"),
    "benchmark/dataset.py": (CollectorConfig, "benchmark/config.yaml"),
    "runtimes/tvm/operator_sampler.py": (OperatorSizes, "runtimes/tvm/operator_sizes.yaml"),
    "model_zoo/torchvision_exporter.py": (ZooConfig, "model_zoo/config.yaml"),
    "training/train_kernel_model.py": (TrainingConfig, "training/config.yaml"),
}


def commands_of(recipe: str, folder: Path) -> list[list[str]]:
    """The commands of a recipe, each as script and options.

    Args:
        recipe: its script, by its path in the repository.
        folder: an empty one, or one of an earlier call.
    """
    noted, python = folder / "noted", folder / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(f"#!/bin/bash\nprintf -v words '%s\\x1f' \"$@\"\nprintf '%s\\x1e' \"$words\" >> '{noted}'\n")  # in one go
    python.chmod(0o755)
    noted.write_text("")
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", ROOT / recipe, folder / "workspace"], env=environment, capture_output=True, timeout=60, check=False)
    return [command.split(WORD_END)[:-1] for command in noted.read_text().split(COMMAND_END)[:-1]]


def configs_of(recipe: str, folder: Path) -> list[Config]:
    """The configs that the commands of a recipe read, with their changes. Arguments as for `commands_of`."""
    options = argparse.ArgumentParser(allow_abbrev=False)
    options.add_argument("--config", type=Path)
    options.add_argument("--set", action="append", default=[])
    configs = []
    for script, *words in commands_of(recipe, folder):
        if script in READS:
            schema, default = READS[script]
            args, _ = options.parse_known_args(words)
            configs.append(read_config(ROOT / (args.config or default), schema, args.set))
    return configs
