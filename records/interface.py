"""The inputs and outputs of a model as its file declares them, with dynamic dimensions by name."""

from __future__ import annotations

from hase.utils.frozen import Frozen


class OpenTensor(Frozen):
    """A tensor's element type (numpy's name) and shape; a dynamic dimension is its name, and an unknown rank an empty shape."""

    dtype: str
    shape: tuple[int | str, ...]


class Interface(Frozen):
    """A model's inputs and outputs by name.

    Attributes:
        set_by_model: dynamic dimensions that have only one right size, which the model's weights and attributes set.
    """

    inputs: dict[str, OpenTensor]
    outputs: dict[str, OpenTensor]
    set_by_model: dict[str, int]
