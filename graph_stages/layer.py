"""The stages as torch runs them, and the weights of the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graph_stages.definition import STAGES, Stage
from graph_stages.graphs import Graph, draw_features
from utils.lazy import torch

Array = np.ndarray[Any, Any]
TensorByName = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Weights:
    """Of a layer, as torch-geometric's SAGEConv holds them.

    Attributes:
        neighbours: `lin_l.weight`, (hidden, features).
        bias: `lin_l.bias`, (hidden,).
        own: `lin_r.weight`, (hidden, features).
    """

    neighbours: Array
    bias: Array
    own: Array

    def rounded(self) -> Weights:
        """What is left of them where a file stores them in FP16; float32 again."""
        return Weights(*(one.astype(np.float16).astype(np.float32) for one in (self.neighbours, self.bias, self.own)))


def draw_weights(features: int, hidden: int, seed: int = 0) -> Weights:
    """Random weights, uniform within ±1/√features as in torch's linear layers; float32."""
    random, bound = np.random.default_rng(seed), features ** -0.5

    def draw(*shape: int) -> Array:
        return random.uniform(-bound, bound, shape).astype(np.float32)

    return Weights(draw(hidden, features), draw(hidden), draw(hidden, features))


def stage_function(stage: Stage, weights: Weights, device: str = "cpu") -> Callable[[TensorByName], torch.Tensor]:
    """What a stage computes: its inputs by name, on `device`, give its output there."""
    linear = torch.nn.functional.linear
    neighbours, bias, own = (torch.from_numpy(one).to(device) for one in (weights.neighbours, weights.bias, weights.own))

    def add_up(given: TensorByName) -> torch.Tensor:
        messages = given["messages"]
        sums = torch.zeros(int(given["node_count"]), messages.shape[1], device=messages.device)
        return sums.scatter_add_(0, given["target"][:, None].expand_as(messages), messages)  # as torch-geometric does

    def count(given: TensorByName) -> torch.Tensor:
        target = given["target"]
        ones = torch.ones(len(target), device=target.device)
        return torch.zeros(int(given["node_count"]), device=target.device).scatter_add_(0, target, ones)

    functions: dict[str, Callable[[TensorByName], torch.Tensor]] = {
        "gather": lambda given: given["x"].index_select(0, given["source"]),
        "sum": add_up,
        "count": count,
        "mean": lambda given: given["sums"] / given["degrees"].clamp(min=1.0)[:, None],
        "transform_neighbours": lambda given: linear(given["means"], neighbours, bias),
        "transform_self": lambda given: linear(given["x"], own) + given["neighbours"],
        "activate": lambda given: torch.relu(given["combined"]),
    }
    return functions[stage.name]


def all_tensors(graph: Graph, weights: Weights, seed: int = 0) -> dict[str, Array]:
    """Every tensor of the layer by name, computed by torch on the CPU: the inputs of each stage, and what it should give."""
    features = weights.own.shape[1]
    found = {"x": torch.from_numpy(draw_features(graph.nodes, features, seed)), "source": torch.from_numpy(graph.source),
             "target": torch.from_numpy(graph.target), "node_count": torch.tensor([graph.nodes])}
    with torch.inference_mode():
        for stage in STAGES:
            found[stage.outputs[0]] = stage_function(stage, weights)(found)
    return {name: tensor.numpy() for name, tensor in found.items()}
