"""Writes random chains of unusual layers, to check what Hase says near the edges of what it knows.

Each model is a chain of two to a few dozen layers: convolutions of signals, images and videos in any groups, with windows up to
128 wide, strides and dilations, and channels that no library is tuned for; normalisations, activations, pools, transpositions.
A number fixes a model. In opset 22, CUDA lacks some of these layers (MaxPool, InstanceNormalization, Elu). Writes one file per
model into --out, and kinds.json, as make_models.py does: `compare_on_gpu.py` and `judge.py` are the next steps.
chains-nvidia-h200.json has what the models took on H200s: numbers 0 to 149 in opset 22, and 1000 to 1299 in opset 20.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from recipes.kinds.manifest import MANIFEST, MadeModel, Manifest
from utils import cli, files
from utils.fingerprint import package_version
from utils.lazy import onnx

T = TypeVar("T")
SEED = 77
MEASURED = ((range(150), 22), (range(1000, 1300), 20))  # numbers, and the operator set
MOST_NUMBERS, MOST_HALVES = 2 ** 22, 2 ** 23  # of an activation, in float32 and in float16
WINDOWS = {1: (128, 64), 2: (15, 11), 3: (5, 5)}  # the widest, by rank
SIDES = {1: 20_000, 2: 256, 3: 40}
ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "Elu", "HardSwish", "Softplus", "LeakyRelu", "Gelu", "Erf", "Abs")
AFTER = (("norm", 0.5), ("activation", 0.7), ("pool", 0.15), ("softmax", 0.08), ("turn", 0.12))  # and how often
EXAMPLES = """
python recipes/kinds/random_chains.py --out out/chains
python recipes/kinds/compare_on_gpu.py out/chains --out out/chains_on_gpu  # on the machine with the GPU
mkdir -p out/kinds_cpu && python recipes/kinds/judge.py out/chains --workspace out/kinds_cpu --steps h200 \\
  --gpu recipes/kinds/chains-nvidia-h200.json
"""


class Chain:
    """A chain that is being drawn.

    Attributes:
        shape: of its last tensor.
    """

    def __init__(self, number: int) -> None:
        self._draw = np.random.default_rng([SEED, number])
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._rank = self._one_of((1, 1, 1, 2, 2, 3))
        self._half = self._draw.random() < 0.3
        batch, channels = self._one_of((1, 1, 1, 2, 3, 4, 8, 8, 16, 32)), self._between(12, 640)
        if self._draw.random() < 0.7:
            channels = max(8, channels // 8 * 8)
        most = MOST_HALVES if self._half else MOST_NUMBERS
        side = int(max(8, min((most / batch / channels) ** (1 / self._rank), SIDES[self._rank])))
        side = max(6, self._between(max(6, side // 30), side))
        others = [max(4, int(side * self._draw.uniform(0.5, 1.3))) for _ in range(self._rank - 1)]
        self._last = "x"
        self.shape = [batch, channels, side, *others]
        self._first = list(self.shape)
        for _ in range(self._between(2, 7)):
            self._convolution()
            for name, chance in AFTER:
                if self._draw.random() < chance:
                    getattr(self, f"_{name}")()
        self._end()

    def model(self, number: int, opset: int) -> onnx.ModelProto:
        """The chain as a model."""
        helper, dtype = onnx.helper, onnx.TensorProto.FLOAT16 if self._half else onnx.TensorProto.FLOAT
        graph = helper.make_graph(self._nodes, f"chain_{number}", [helper.make_tensor_value_info("x", dtype, self._first)],
                                  [helper.make_tensor_value_info(self._last, dtype, self.shape)], self._constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)

    def _between(self, low: float, high: float) -> int:
        """A whole number, all magnitudes alike."""
        return round(math.exp(self._draw.uniform(math.log(low), math.log(high))))

    def _one_of(self, choices: Sequence[T]) -> T:
        return choices[int(self._draw.integers(len(choices)))]

    def _constant(self, values: np.ndarray) -> str:
        self._constants.append(onnx.numpy_helper.from_array(values, f"w{len(self._constants)}"))
        return self._constants[-1].name

    def _weight(self, shape: Sequence[int], scale: float = 0.0) -> str:
        scale = scale or (int(np.prod(shape[1:])) or 1) ** -0.5
        return self._constant((self._draw.standard_normal(shape) * scale).astype(self._dtype))

    def _ones(self, count: int) -> str:
        return self._constant(np.ones(count, self._dtype))

    @property
    def _dtype(self) -> type:
        return np.float16 if self._half else np.float32

    def _add(self, op_type: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> None:
        name = f"t{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(op_type, [self._last, *inputs], [name], **attributes))
        self._last, self.shape = name, list(shape)

    def _convolution(self) -> None:
        """A convolution of any form; none where it would be too large."""
        batch, channels, *sides = self.shape
        rank, (widest, wide) = self._rank, WINDOWS[self._rank]
        form = self._one_of(("plain", "grouped", "depthwise", "depthwise", "transposed", "pointwise"))
        window = min(self._one_of((3, 5, 7, 9, self._between(2, widest), self._between(2, wide))), max(1, min(sides)))
        if form == "pointwise":
            window = 1
        groups = 1
        if form == "grouped":
            groups = self._one_of([size for size in range(2, channels) if channels % size == 0] or [1])
        if form == "depthwise":
            groups = channels
        dilation = 1 if form == "transposed" else self._one_of((1, 1, 1, 2, self._between(1, 9)))
        if (window - 1) * dilation + 1 > min(sides) * 2:
            dilation = 1
        stride = self._one_of((1, 1, 1, 2)) if min(sides) >= 12 else 1
        out = channels if form == "depthwise" else max(
            groups, self._between(max(8, channels // 3), min(900, channels * 3)) // groups * groups)
        weights = out * (channels // groups) * window ** rank
        if np.prod(sides) * batch * weights > 6e10 or weights > 6e6:
            return
        pad = dilation * (window - 1) // 2
        about = {"kernel_shape": [window] * rank, "strides": [stride] * rank, "pads": [pad] * (2 * rank)}
        if form == "transposed":
            groups = self._one_of((1, 1, groups))
            groups = 1 if channels % groups or out % groups else groups
            sides = [(side - 1) * stride - 2 * pad + window for side in sides]
        else:
            sides = [(side + 2 * pad - dilation * (window - 1) - 1) // stride + 1 for side in sides]
            about["dilations"] = [dilation] * rank
        if min(sides) < 1 or np.prod(sides) * batch * out > 3e7:
            return
        square = (window,) * rank
        weight = self._weight((channels, out // groups, *square), (channels // groups * window ** rank) ** -0.5) if (
            form == "transposed") else self._weight((out, channels // groups, *square))
        bias = [self._weight((out,), 0.1)] if self._draw.random() < 0.7 else []
        op_type = "ConvTranspose" if form == "transposed" else "Conv"
        self._add(op_type, [weight, *bias], [batch, out, *sides], group=groups, **about)

    def _norm(self) -> None:
        channels, form = self.shape[1], self._one_of(("batch", "layer", "instance"))
        if form == "batch":
            self._batch_norm()
        elif form == "instance":
            self._add("InstanceNormalization", [self._ones(channels), self._weight((channels,), 0.1)], self.shape)
        else:
            width = self.shape[-1]
            self._add("LayerNormalization", [self._ones(width), self._weight((width,), 0.1)], self.shape, axis=-1)

    def _batch_norm(self) -> None:
        channels = self.shape[1]
        scale, bias, mean = self._ones(channels), self._weight((channels,), 0.1), self._weight((channels,), 0.1)
        self._add("BatchNormalization", [scale, bias, mean, self._ones(channels)], self.shape)

    def _activation(self) -> None:
        self._add(self._one_of(ACTIVATIONS), [], self.shape)

    def _pool(self) -> None:
        sides, widest = self.shape[2:], {1: 200, 2: 30, 3: 8}[self._rank]
        window = min(self._one_of((2, 3, self._between(2, widest))), min(sides))
        stride = self._one_of((1, 2)) if min(sides) >= 8 else 1
        sides = [(side - window) // stride + 1 for side in sides]
        if min(sides) >= 3:
            self._add(self._one_of(("MaxPool", "AveragePool")), [], [*self.shape[:2], *sides],
                      kernel_shape=[window] * self._rank, strides=[stride] * self._rank)

    def _softmax(self) -> None:
        self._add("Softmax", [], self.shape, axis=self._one_of((1, len(self.shape) - 1)))

    def _turn(self) -> None:
        """Exchanges the channels and the last side."""
        last = len(self.shape) - 1
        order = [{1: last, last: 1}.get(axis, axis) for axis in range(len(self.shape))]
        if self.shape[last] <= 900:
            self._add("Transpose", [], [self.shape[axis] for axis in order], perm=order)

    def _end(self) -> None:
        """Means of the channels and a product, in a third of the chains."""
        if self._one_of(("mean", "flat", "none")) == "mean":
            axes = self._constant(np.arange(2, len(self.shape), dtype=np.int64))
            self._add("ReduceMean", [axes], self.shape[:2], keepdims=0)
            if self._draw.random() < 0.5:
                self._batch_norm()
            columns = self._between(4, 1000)
            self._add("MatMul", [self._weight((self.shape[1], columns))], [self.shape[0], columns])
        if not self._nodes:
            self._activation()


def write_chains(folder: Path, numbers: Iterable[int], opset: int) -> list[MadeModel]:
    """Writes the chains of some numbers into a folder; returns their descriptions."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number in numbers:
        path = folder / f"chain_{number}.onnx"
        with files.replacing(path) as temporary:
            onnx.save(Chain(number).model(number, opset), temporary)
        made.append(MadeModel(name=path.stem, file=path.name, kind="random chain", opset=opset))
    return made


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the models go")
    parser.add_argument("--count", type=cli.whole, metavar="N", help="the first N of each operator set alone (default: all)")
    args = parser.parse_args()
    cli.start(args)
    made = [model for numbers, opset in MEASURED for model in write_chains(args.out, numbers[:args.count], opset)]
    files.write_json(args.out / MANIFEST, Manifest(versions={"onnx": package_version("onnx")}, models=tuple(made)))
    cli.print_rows([{"folder": str(args.out), "models": len(made)}], args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
