"""Which models are predicted at which sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hase.ort_analysis.isolated.analysis import own_names
from hase.utils.errors import UserError


class Question(NamedTuple):
    """A model, and the sizes of its dynamic dimensions at which it is predicted."""

    model: Path
    sizes: Sequence[dict[str, int]]


def questions_of(models: Sequence[Path], sizes: Sequence[dict[str, int]]) -> list[Question]:
    """Each model with its sizes. One model is asked for all, so that a size that it lacks is an error; of several, each takes
    those sizes that it has.

    Raises:
        UserError: none of several models has one of the sizes.
    """
    if len(models) == 1:
        return [Question(models[0], sizes)]
    names = dict.fromkeys(name for size in sizes for name in size)
    own = {model: names_in(model, names) for model in models}
    if unknown := [name for name in names if not any(name in of_model for of_model in own.values())]:
        raise UserError(f"none of the {len(models)} models has a size named {', '.join(unknown)}: check --dim and --sizes")
    return [Question(model, distinct_sizes([{name: size[name] for name in size if name in own[model]} for size in sizes]))
            for model in models]


def names_in(model: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the names of sizes that stand for one in the file `model`: none in a record, whose sizes are fixed, nor in a
    file that can't be read, which the prediction says."""
    try:
        return frozenset() if model.suffix == ".json" else own_names(model, names)
    except UserError:
        return frozenset()


def distinct_sizes(sizes: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The same without repetitions."""
    return list({tuple(size.items()): size for size in sizes}.values())
