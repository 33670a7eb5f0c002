"""The kernels that tell most of a GPU, as the file kernels.jsonl.xz: a kernel each line, the most useful one first."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from pathlib import Path

from hase.records.kernel_record import Kernel
from hase.utils import files

CHOSEN = Path(__file__).with_name("kernels.jsonl.xz")


def write_chosen(kernels: Iterable[Kernel], path: Path = CHOSEN) -> None:
    """Writes the kernels in their order."""
    files.write_bytes(path, lzma.compress("".join(f"{kernel.model_dump_json()}\n" for kernel in kernels).encode()))


def read_chosen(count: int, path: Path = CHOSEN) -> list[Kernel]:
    """The first `count` kernels."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [Kernel.model_validate_json(line) for line, _ in zip(lines, range(count), strict=False)]
