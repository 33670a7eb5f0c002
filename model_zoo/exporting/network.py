"""A torch network to export, whatever it takes: its inputs with dynamic dimensions, and weights like trained ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from model_zoo.exporting.torch_models import SEED
from utils.lazy import torch

Values = Literal["normal", "ones", "indices"]


@dataclass(frozen=True)
class NetworkInput:
    """One input of a network.

    Attributes:
        shape: a size for each dimension; a name stands for a dynamic dimension, and one name is one size.
        values: `normal` floats, the integer 1 throughout (a mask), or integers from 0 to `below` (indices of words, say).
    """

    name: str
    shape: tuple[int | str, ...]
    values: Values = "normal"
    below: int = 0

    def draw(self, sizes: Mapping[str, int], generator: np.random.Generator) -> np.ndarray:
        """Random values for these sizes of the dynamic dimensions, float32 or int64."""
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        if self.values == "normal":
            return generator.standard_normal(shape, dtype=np.float32)
        if self.values == "ones":
            return np.ones(shape, np.int64)
        return generator.integers(0, self.below, shape)


@dataclass(frozen=True)
class Network:
    """A torch network and what is needed to export it.

    Attributes:
        module: in evaluation mode; takes the inputs by position, and gives a tensor or a tuple of tensors.
        collection: where it comes from: torchvision, timm, transformers, random, ….
        family: of its architecture. Models of one family are held out of training together.
        sizes: of each dynamic dimension, by name, at which the pool is measured; the first where the user gives none.
        data_sized: sizes of its outputs depend on data, as a detector's do, so that they are not compared with torch's.
        traced: exported by torch's older exporter, which traces a run: it knows recurrent layers of any length, and detectors.
    """

    name: str
    collection: str
    family: str
    module: torch.nn.Module
    inputs: tuple[NetworkInput, ...]
    sizes: Mapping[str, tuple[int, ...]]
    data_sized: bool = False
    traced: bool = False

    @property
    def dims(self) -> tuple[str, ...]:
        """The dynamic dimensions, in the order in which the inputs name them."""
        return tuple(dict.fromkeys(size for one in self.inputs for size in one.shape if isinstance(size, str)))

    @property
    def default_sizes(self) -> dict[str, int]:
        """The sizes of the dynamic dimensions where the user gives none."""
        return {dim: sizes[0] for dim, sizes in self.sizes.items()}

    def example(self) -> tuple[torch.Tensor, ...]:
        """Random inputs of the default sizes, in float32."""
        return tuple(torch.from_numpy(values) for values in self.draw(self.default_sizes, "fp32").values())

    def draw(self, sizes: Mapping[str, int], dtype: str) -> dict[str, np.ndarray]:
        """Random inputs by name, the same for the same sizes; floats are float16 where `dtype` is fp16."""
        generator = np.random.default_rng(SEED)
        drawn = {one.name: one.draw(sizes, generator) for one in self.inputs}
        return {name: values.astype(np.float16) if dtype == "fp16" and values.dtype == np.float32 else values
                for name, values in drawn.items()}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor of a network's output: those of tuples, lists and dicts in their order; what is no tensor is left out."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for one in value for tensor in tensors_in(one)] if isinstance(value, (list, tuple)) else []


def outputs_of(network: Network, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What torch computes for these inputs, in float32 on the CPU, also where the weights are float16 (they then stay so)."""
    dtype = next((one.dtype for one in network.module.parameters() if one.is_floating_point()), torch.float32)
    given = [torch.from_numpy(one.astype(np.float32) if one.dtype == np.float16 else one) for one in inputs.values()]
    network.module.float()
    try:
        with torch.inference_mode():
            return [tensor.cpu().numpy() for tensor in tensors_in(network.module(*given))]
    finally:
        network.module.to(dtype)  # exact: the weights came from this type
