"""Optimises a model with dynamic dimensions once for all the sizes that are asked about: a session of any sizes knows none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from utils.temporary import temporary_folder

_kept: Path | None = None  # where optimised graphs are kept, each in a folder of its own


@contextmanager
def optimized_once() -> Iterator[None]:
    """Within it, optimised graphs of sessions of any sizes are kept, and taken again for the same model."""
    global _kept
    if _kept is not None:
        yield
        return
    with temporary_folder() as folder:
        _kept = Path(folder)
        try:
            yield
        finally:
            _kept = None


def keep(model: str, save_to: Path, optimize: Callable[[], None]) -> None:
    """Has `optimize` write a graph to `save_to` and its weights beside it, or puts there what it wrote before.

    Args:
        model: names the model and how it is optimised; a file's name.
        save_to: of the graph.
        optimize: writes it, and `<save_to>.weights` where it has large weights.
    """
    if _kept is None:
        optimize()
        return
    folder, weights = _kept / model, save_to.with_name(save_to.name + ".weights")
    if folder.exists():
        shutil.copyfile(folder / save_to.name, save_to)
        _link(folder / weights.name, weights)
        return
    optimize()
    folder.mkdir()
    shutil.copyfile(save_to, folder / save_to.name)  # the graph is changed where it lies, its weights never are
    _link(weights, folder / weights.name)


def _link(source: Path, to: Path) -> None:
    if source.exists():
        try:
            os.link(source, to)
        except OSError:  # a file system without links
            shutil.copyfile(source, to)
