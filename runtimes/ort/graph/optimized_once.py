"""Optimises a model with dynamic dimensions only once for all sizes: the optimised graph does not depend on them."""

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
    """While the block runs, optimised graphs of models with dynamic dimensions are kept and used again."""
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
    """Calls `optimize` to write a graph to `save_to`, or copies the graph that an earlier call wrote.

    Args:
        model: a file name that identifies the model and how it is optimised.
        save_to: path of the graph.
        optimize: writes the graph, and `<save_to>.weights` if it has large weights.
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
    shutil.copyfile(save_to, folder / save_to.name)  # a copy, since the graph is changed in place; weights never are
    _link(weights, folder / weights.name)


def _link(source: Path, to: Path) -> None:
    if source.exists():
        try:
            os.link(source, to)
        except OSError:  # a file system without links
            shutil.copyfile(source, to)
