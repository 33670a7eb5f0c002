"""Models of float inputs in files, for tests of runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str]


def saved(path: Path, nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Shape], outputs: Mapping[str, Shape],
          weights: Mapping[str, np.ndarray]) -> Path:
    """A model with float inputs and outputs in a file."""
    described = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in tensors.items()]
                 for tensors in (inputs, outputs)]
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, path.stem, described[0], described[1], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def layers(path: Path, depth: int, width: int = 256, last_relu: bool = True) -> Path:
    """Fully connected layers with Relu; the last one without, if asked for."""
    nodes = []
    for number in range(depth):
        nodes += [helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"p{number}"]),
                  helper.make_node("Relu", [f"p{number}"], [f"x{number + 1}"])]
    output = f"x{depth}" if last_relu else nodes.pop().input[0]
    return saved(path, nodes, {"x0": [16, width]}, {output: [16, width]},
                 {f"w{number}": np.full((width, width), 0.01, np.float32) for number in range(depth)})
