"""Makes kernels of TVM from operators of random sizes, so that predictors learn how time depends on size.

Reads the bounds of sizes (runtimes/tvm/operator_sizes.yaml). Draws small ONNX models of one operator and what is usually fused
with it, and takes them apart like any model (runtimes/tvm/relax_parser.py). Writes the functions of their kernels to
kernel_model/kernel_onnx/<flavour>/, and lists them in sampled.json there as kernels of no model. Needs TVM.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from hase.kernel_model.sampling.draws import SEED_FILE, Seeds, read_seeds
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import update_index
from hase.runtimes.tvm.compiling import FUSED, tvm_flavour, write_functions
from hase.runtimes.tvm.recording import parse
from hase.utils import cli, files
from hase.utils.config import Config, read_config
from hase.utils.lazy import onnx
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import ROOT, Workspace

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

log = get_logger("sampler")
EXAMPLES = """
python runtimes/tvm/operator_sampler.py --count 500
python runtimes/tvm/operator_sampler.py --count 200 --operators convolution,product --seed 7
"""

OPSET, IR_VERSION = 17, 10
Bounds = tuple[int, int]  # the smallest and the largest size
Draw = Callable[["OperatorSizes", np.random.Generator], "ModelProto"]
ACTIVATIONS = ("", "Relu", "Sigmoid", "Tanh")
ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Neg")


class OperatorSizes(Config):
    """Bounds of drawn sizes; see the comments in runtimes/tvm/operator_sizes.yaml."""

    batch: Bounds = (1, 16)
    channels: Bounds = (1, 512)
    side: Bounds = (4, 112)
    rows: Bounds = (1, 1024)
    inner: Bounds = (8, 16384)
    columns: Bounds = (8, 8192)
    windows: tuple[int, ...] = Field((1, 3, 5, 7), min_length=1)
    most_gflop: float = Field(0.2, gt=0)
    most_mib: float = Field(192.0, gt=0)

    @field_validator("batch", "channels", "side", "rows", "inner", "columns")
    @classmethod
    def _ascend(cls, bounds: Bounds) -> Bounds:
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError("the smallest size comes first, and is at least 1")
        return bounds


def _draw_size(bounds: Bounds, rng: np.random.Generator) -> int:
    return round(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))


def _draw_width(bounds: Bounds, rng: np.random.Generator) -> int:
    """Draws a size; half of them are 2ⁿ or 3·2ⁿ, as in real layers. Such widths are slow: the values of a column fall into few
    sets of a cache, and evict each other."""
    size = _draw_size(bounds, rng)
    if rng.random() < 0.5:
        return size
    power = 2 ** round(math.log2(size))
    near = [width for width in (power, 3 * power // 2, 3 * power // 4) if bounds[0] <= width <= bounds[1]]
    return min(near, key=lambda width: abs(math.log(width / size)), default=size)


def _model(nodes: list[NodeProto], inputs: dict[str, list[int]], weights: dict[str, list[int]], output: str) -> ModelProto:
    """Makes a model with inputs and weights of the given shapes; ONNX infers the output shape."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "drawn", [helper.make_tensor_value_info(name, float32, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, float32, None)],
        [onnx.numpy_helper.from_array(np.full(shape, 0.01, np.float32), name) for name, shape in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return onnx.shape_inference.infer_shapes(model)


def _add_activation(nodes: list[NodeProto], last: str, rng: np.random.Generator) -> str:
    """Adds a random activation or none; returns the name of the last tensor."""
    if name := str(rng.choice(ACTIVATIONS)):
        nodes.append(onnx.helper.make_node(name, [last], ["activated"]))
        return "activated"
    return last


def _convolution(sizes: OperatorSizes, rng: np.random.Generator, channels: int, out: int, groups: int) -> ModelProto:
    """Draws a convolution of images with bias, perhaps with an activation."""
    side, window, stride = _draw_size(sizes.side, rng), int(rng.choice(sizes.windows)), int(rng.integers(1, 3))
    nodes = [onnx.helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[window // 2] * 4, kernel_shape=[window] * 2,
                                   strides=[stride] * 2, group=groups)]
    weights = {"w": [out, channels // groups, window, window], "b": [out]}
    shape = [_draw_size(sizes.batch, rng), channels, side, side]
    return _model(nodes, {"x": shape}, weights, _add_activation(nodes, "y", rng))


def draw_convolution(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws a convolution, of which one in four is depthwise."""
    channels = _draw_width(sizes.channels, rng)
    if rng.random() < 0.25:
        return _convolution(sizes, rng, channels, channels, channels)
    return _convolution(sizes, rng, channels, _draw_width(sizes.channels, rng), 1)


def draw_grouped_convolution(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws a convolution with at least 2 groups of 2 to 64 channels each, and as many output channels."""
    channels = max(4, _draw_width(sizes.channels, rng))
    group_size = 2 ** int(rng.integers(1, min(6, int(math.log2(channels)) - 1) + 1))
    groups = channels // group_size
    return _convolution(sizes, rng, group_size * groups, group_size * groups, groups)


def draw_product(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws a fully connected layer of a matrix, a sequence or a channels-last image, with bias and perhaps an activation."""
    rows, inner, columns = _draw_size(sizes.rows, rng), _draw_width(sizes.inner, rng), _draw_width(sizes.columns, rng)
    height = round(math.sqrt(rows))
    shape = [[rows], [1, rows], [1, height, rows // height]][int(rng.integers(3))]
    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["p"]), onnx.helper.make_node("Add", ["p", "b"], ["y"])]
    weights = {"w": [inner, columns], "b": [columns]}
    return _model(nodes, {"x": [*shape, inner]}, weights, _add_activation(nodes, "y", rng))


def draw_elementwise(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws an elementwise operator of images or of a matrix."""
    shape = ([_draw_size(sizes.batch, rng), _draw_size(sizes.channels, rng), *[_draw_size(sizes.side, rng)] * 2]
             if rng.random() < 0.5 else [_draw_size(sizes.rows, rng), _draw_size(sizes.columns, rng)])
    name = str(rng.choice(ELEMENTWISE))
    inputs = {"a": shape, "b": shape} if name in ("Add", "Sub", "Mul", "Div") else {"a": shape}
    return _model([onnx.helper.make_node(name, list(inputs), ["y"])], inputs, {}, "y")


def draw_pool(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws a pooling of images, or a mean per channel."""
    shape = [_draw_size(sizes.batch, rng), _draw_size(sizes.channels, rng), *[_draw_size(sizes.side, rng)] * 2]
    name, window = str(rng.choice(["MaxPool", "AveragePool", "GlobalAveragePool"])), int(rng.integers(2, 4))
    attributes: dict[str, Any] = {} if name.startswith("Global") else {"kernel_shape": [window] * 2, "strides": [2, 2]}
    return _model([onnx.helper.make_node(name, ["x"], ["y"], **attributes)], {"x": shape}, {}, "y")


def draw_rows(sizes: OperatorSizes, rng: np.random.Generator) -> ModelProto:
    """Draws a softmax, mean or layer normalisation of a matrix's rows, or a transpose."""
    rows, columns = _draw_size(sizes.rows, rng), _draw_size(sizes.columns, rng)
    name = str(rng.choice(["Softmax", "ReduceMean", "LayerNormalization", "Transpose"]))
    weights = {"scale": [columns], "bias": [columns]} if name == "LayerNormalization" else {}
    attributes: dict[str, Any] = {"Transpose": {"perm": [1, 0]}, "ReduceMean": {"axes": [1]}}.get(name, {"axis": -1})
    return _model([onnx.helper.make_node(name, ["x", *weights], ["y"], **attributes)], {"x": [rows, columns]}, weights, "y")


DRAWS: dict[str, Draw] = {"convolution": draw_convolution, "grouped": draw_grouped_convolution, "product": draw_product,
                          "elementwise": draw_elementwise, "pool": draw_pool, "rows": draw_rows}


def too_large(kernel: Kernel, sizes: OperatorSizes) -> bool:
    """Whether a kernel has more operations or bytes than the config allows."""
    return kernel.flops > 1e9 * sizes.most_gflop or kernel.bytes_read + kernel.bytes_written > sizes.most_mib * 2**20


def sample(workspace: Workspace, sizes: OperatorSizes, count: int, operators: Sequence[str], seed: int,
           device: str = "cpu") -> Counter[str]:
    """Draws `count` models and writes their kernels, except those that are too large; counts the new ones per type."""
    flavour = tvm_flavour(device, FUSED)
    folder, rng, counts = workspace.kernel_onnx / flavour.name, np.random.default_rng(seed), Counter[str]()
    seeds: Seeds = read_seeds(folder)
    for number in progress(range(count), "drawing operators"):
        drawn = DRAWS[operators[number % len(operators)]](sizes, rng)
        graph = parse(drawn, name="drawn", device=device)[FUSED].graph
        for name, kernel in graph.kernels.items():
            if name not in graph.functions or name in seeds:
                continue
            if too_large(kernel, sizes):
                counts["(too large)"] += 1
                continue
            write_functions(workspace, flavour, graph.kernels, {name: graph.functions[name]})
            seeds[name] = ()
            counts[kernel.type] += 1
    files.write_json(folder / SEED_FILE, seeds)
    update_index(workspace, flavour)
    return counts


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.count, default=500, metavar="N", help="models to draw (default: 500)")
    parser.add_argument("--operators", type=lambda text: text.split(","), default=list(DRAWS), metavar="NAMES",
                        help=f"of {', '.join(DRAWS)} (default: all, in turns)")
    cli.add_config(parser, ROOT / "runtimes" / "tvm" / "operator_sizes.yaml", "most_gflop=20", "bounds of sizes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels (default: cpu)")
    parser.add_argument("--seed", type=cli.whole, default=0, metavar="N", help="of the draws (default: 0)")
    args = parser.parse_args()
    if unknown := sorted(set(args.operators) - set(DRAWS)):
        parser.error(f"--operators: {', '.join(unknown)}: choose from {', '.join(DRAWS)}")
    workspace = cli.start(args)
    with sole_writer(workspace.kernel_records):
        counts = sample(workspace, read_config(args.config, OperatorSizes, args.changes), args.count, args.operators,
                        args.seed, args.device)
    cli.print_rows([{"type": kind, "kernels": number} for kind, number in counts.most_common()], args.json, "kernels drawn")


if __name__ == "__main__":
    cli.run(main, kept="the kernels that were written")
