"""Which families seeded the sampled kernels of a folder."""

from __future__ import annotations

from pathlib import Path

from hase.utils import files
from hase.utils.errors import UserError

Families = tuple[str, ...]  # sorted names of model families
Seeds = dict[str, Families]  # by kernel id
SEED_FILE = "sampled.json"  # in the folder of the sampled kernels


def read_seeds(folder: Path) -> Seeds:
    """The families that hold the kernel that seeded each sampled kernel of a folder, by id; empty where none were sampled.

    Raises:
        UserError: an earlier version wrote the file: it knew one family alone.
    """
    path = folder / SEED_FILE
    families_of = files.read_json(path) if path.exists() else {}
    if not all(isinstance(families, list) for families in families_of.values()):
        raise UserError(f"{path}: written by another version; remove {folder}, then build and sample its kernels again: "
                        "python kernel_model/kernel_builder.py, python kernel_model/kernel_sampler.py")
    return {name: tuple(families) for name, families in families_of.items()}
