"""Converts predictors of version 1 to version 2: boosters and measured times get another form (training/kernels/saving.py)."""

from __future__ import annotations

import io
import json
import lzma
import pickle
from pathlib import Path
from typing import Any

from training.kernels.saving import write_boosters, write_measured
from training.kernels.sidecar import read_checked
from utils.errors import UserError


class _Boosters(pickle.Unpickler):
    """Unpickles xgboost's Booster and plain data, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("xgboost.core", "Booster"):
            raise UserError(f"refused: the pickle holds {module}.{name}, which no saved predictor does")
        return super().find_class(module, name)


def to_version_2(folder: Path, sidecar: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Writes the files of version 2. Those of version 1 stay.

    Args:
        folder: of the predictors.
        sidecar: the contents of their `predictors.json`, version 1.

    Returns:
        The sidecar of version 2, and the paths of the files of version 1.

    Raises:
        UserError: a file is missing or damaged.
    """
    old = [folder / about["file"] for about in (*sidecar["labels"].values(), {"file": sidecar["measured"]})]
    labels = {}
    for label, about in sidecar["labels"].items():
        packed = lzma.decompress(read_checked(folder / about["file"], about["sha256"]))
        file, sha256 = write_boosters(folder, label, _Boosters(io.BytesIO(packed)).load())
        labels[label] = about | {"file": file, "sha256": sha256}
    times = json.loads(lzma.decompress(read_checked(folder / sidecar["measured"], sidecar["measured_sha256"])))
    measured, measured_sha256 = write_measured(folder, times)
    return sidecar | {"version": 2, "labels": labels, "measured": measured, "measured_sha256": measured_sha256}, old
