"""Rewrites predictors of version 1 as version 2 in place, without a training: what is predicted stays the same to the last bit.

Reads and writes a folder of predictors (training/predictors/<target>/): boosters and measured times change their form, as
training/kernels/saving.py says; what was learned, measured and fitted stays as it is.
"""

from __future__ import annotations

import io
import json
import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.kernels.saving import write_boosters, write_measured
from training.kernels.sidecar import SIDECAR_VERSION, Sidecar, read_checked, sidecar_path, write_sidecar
from utils import cli, files
from utils.errors import UserError

EXAMPLES = """
python recipes/predictors_to_version_2.py --folder training/predictors/nvidia-h200-cuda-ort1.31-all
"""


class _Boosters(pickle.Unpickler):
    """Builds xgboost's Booster and plain data alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("xgboost.core", "Booster"):
            raise UserError(f"refused: the pickle holds {module}.{name}, which no saved predictor does")
        return super().find_class(module, name)


def rewrite(folder: Path) -> list[str]:
    """Rewrites the predictors in `folder`; returns the names of the files written.

    Raises:
        UserError: no predictors of version 1 there, or a damaged file.
    """
    sidecar = files.read_json(sidecar_path(folder))
    if sidecar.get("version") != 1:
        raise UserError(f"{folder}: predictors of version {sidecar.get('version')}, not of version 1")
    old = [about["file"] for about in (*sidecar["labels"].values(), {"file": sidecar["measured"]})]
    for label, about in sidecar["labels"].items():
        packed = lzma.decompress(read_checked(folder / about["file"], about["sha256"]))
        about["file"], about["sha256"] = write_boosters(folder, label, _Boosters(io.BytesIO(packed)).load())
    times = json.loads(lzma.decompress(read_checked(folder / sidecar["measured"], sidecar["measured_sha256"])))
    sidecar["measured"], sidecar["measured_sha256"] = write_measured(folder, times)
    sidecar.pop("digest", None)  # of the file as it was; the new one gets its own
    written = Sidecar.model_validate(sidecar | {"version": SIDECAR_VERSION})
    write_sidecar(folder, written)
    for name in old:
        (folder / name).unlink()
    return [written.measured, *(about.file for about in written.labels.values() if about.file)]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--folder", type=Path, required=True, help="of one target's predictors")
    args = parser.parse_args()
    cli.start(args)
    written = rewrite(args.folder)
    cli.print_table([{"file": name, "MB": (args.folder / name).stat().st_size / 1e6} for name in written], "written")
    return 0


if __name__ == "__main__":
    cli.run(main)
