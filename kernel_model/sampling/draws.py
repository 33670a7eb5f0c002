"""Draws kernels near a given one: with other sizes, attributes and element types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hase.kernel_model.building.dummy_data import index_limit
from hase.kernel_model.building.kernel_models import build_model, is_cache, is_large_weight
from hase.ort_analysis.cuda.placement import cuda_kernel
from hase.records.attention import NORM, OPERATOR
from hase.records.kernel_record import Kernel, KernelInput, Tensor, session_dtype, type_code
from hase.records.kernel_types import describe_kernel
from hase.records.operators import operator_row
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.lazy import onnx
from hase.utils.ort_sessions import open_session

FLOAT_TYPES = ("float32", "float16")  # the types in which a kernel may be drawn
AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def float_types(kernel: Kernel) -> set[str]:
    """The types in FLOAT_TYPES of a kernel's tensors, except tensors with the same type in all models."""
    same_type_inputs = operator_row(kernel.op_type).single_inputs
    tensors = [t for position, t in enumerate(kernel.inputs) if position not in same_type_inputs] + list(kernel.outputs)
    return {t.dtype for t in tensors}.intersection(FLOAT_TYPES)


def in_float_type(kernel: Kernel, dtype: str) -> Kernel:
    """A kernel with all floating tensors in `dtype`, one of FLOAT_TYPES; constants are rounded to it."""
    types = float_types(kernel)
    if types <= {dtype}:
        return kernel
    if len(types) > 1:
        raise UserError(f"{kernel.id}: mixes floating types, so it has no counterpart in {dtype}")
    same_type_inputs = operator_row(kernel.op_type).single_inputs
    inputs = [t if position in same_type_inputs else _typed(t, dtype) for position, t in enumerate(kernel.inputs)]
    attributes: dict[str, Any] = {
        name: value | {"dtype": dtype} if isinstance(value, dict) and value.get("dtype") in FLOAT_TYPES else value
        for name, value in kernel.attributes.items()}
    if kernel.op_type == "Cast" and kernel.outputs[0].dtype in FLOAT_TYPES:
        attributes["to"] = type_code(dtype)
    converted = describe_kernel(kernel.op_type, kernel.domain, kernel.opset, attributes, inputs,
                                [_typed(output, dtype) for output in kernel.outputs])
    if on_cuda(kernel) and not on_cuda(converted):
        raise UserError(f"{kernel.id}: the CUDA provider has no {kernel.op_type} in {dtype}")
    return converted


def _typed(tensor: AnyTensor, dtype: str) -> AnyTensor:
    if tensor.dtype not in FLOAT_TYPES:
        return tensor
    changed: dict[str, Any] = {"dtype": dtype}
    if isinstance(tensor, KernelInput) and tensor.values is not None:
        limits = np.finfo(dtype)
        values = np.asarray(tensor.values, np.float64)
        finite = np.where(np.isfinite(values), np.clip(values, limits.min, limits.max), values)
        changed["values"] = tuple(finite.astype(dtype).tolist())
    return tensor.model_copy(update=changed)


def on_cuda(kernel: Kernel) -> bool:
    """Whether the CUDA provider has a kernel for it; otherwise the CPU provider runs it."""
    return cuda_kernel(kernel.op_type, kernel.domain, kernel.opset, [t.dtype for t in kernel.inputs],
                       [t.dtype for t in kernel.outputs]) is not None


def on_cpu(kernel: Kernel) -> bool:
    """Whether the CPU provider runs it."""
    if kernel.op_type == OPERATOR and len(kernel.inputs) > NORM:
        return False  # it opens such a model, and then refuses to run it
    try:
        open_session(without_large_weights(kernel).SerializeToString(), "cpu", optimize="none", name=kernel.id)
    except UserError:
        return False
    return True


def without_large_weights(kernel: Kernel) -> onnx.ModelProto:
    """A kernel's model with large weights as inputs, so that none is created, and outputs of unknown shape."""
    free = tuple(tensor.model_copy(update={"constant": False}) if is_large_weight(tensor) else tensor
                 for tensor in kernel.inputs)
    model = build_model(kernel.model_copy(update={"inputs": free}))
    for output in model.graph.output:
        output.ClearField("type")
    return model


# draws by operator -------------------------------------------------------------------------------------------------------

DrawnInputs = tuple[list[KernelInput], dict[str, Any]]
BLOCK = 16  # channels of a blocked tensor come in multiples of ORT's widest block
SIDES = np.array([4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224])


def scaled(size: int, generator: np.random.Generator, multiple: int = 1, spread: float = 1.0) -> int:
    """`size` times a random factor between 2^−spread and 2^spread, rounded to a positive multiple of `multiple`."""
    wanted = size * 2.0 ** generator.uniform(-spread, spread)
    return max(multiple, round(wanted / multiple) * multiple)


def side(size: int, generator: np.random.Generator, spread: float = 1.0) -> int:
    """A usual image side near `size`: from a little less than 2^−spread to 2^spread times."""
    near = SIDES[(size * 0.9 * 2.0**-spread <= SIDES) & (size * 2.0**spread >= SIDES)]
    return int(generator.choice(near)) if near.size else size


def channel_multiple(kernel: Kernel) -> int:
    return BLOCK if kernel.domain.endswith("nchwc") else 8


def axis_multiple(kernel: Kernel, size: int) -> int:
    """A new size of an axis must be a multiple of this number, so that blocks and vectors stay whole."""
    return channel_multiple(kernel) if size % 8 == 0 or kernel.op_type == "ReorderInput" else 1


def resize(tensor: KernelInput, shape: Sequence[int]) -> KernelInput:
    """The tensor with another shape."""
    return tensor.model_copy(update={"shape": tuple(int(size) for size in shape)})


def draw_conv(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A convolution with other sizes; depthwise ones stay depthwise, and groups keep their width."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    multiple = channel_multiple(kernel)
    x, w = inputs[0].shape, inputs[1].shape
    group = int(attributes.get("group", 1))
    height, width = side(x[2], generator, spread), side(x[3], generator, spread)
    if x[2] == x[3] or generator.random() < 0.7:
        width = height
    if group == 1:
        cin = x[1] if x[1] < 8 else scaled(x[1], generator, multiple, spread)
        cout = scaled(w[0], generator, multiple, spread)
    elif w[1] == 1:
        cin = cout = group = scaled(group, generator, multiple, spread)
        attributes["group"] = group
    else:
        group = scaled(group, generator, spread=spread)
        cin, cout = group * (x[1] // int(attributes["group"])), group * (w[0] // int(attributes["group"]))
        attributes["group"] = group
    kh, kw = w[2], w[3]
    if generator.random() < 0.15 * spread and kh == kw and kh > 1:
        kh = kw = int(generator.choice([3, 5, 7]))
        attributes["kernel_shape"], attributes["pads"] = [kh, kw], [kh // 2] * 4
    if generator.random() < 0.1 * spread and "strides" in attributes:
        attributes["strides"] = [int(generator.choice([1, 2]))] * 2
    inputs[0] = resize(inputs[0], (batch, cin, height, width))
    inputs[1] = resize(inputs[1], (cout, cin // group, kh, kw))
    if len(inputs) > 2 and inputs[2].present:
        inputs[2] = resize(inputs[2], (cout,))
    if len(inputs) > 3 and inputs[3].present:
        steps, pads = attributes.get("strides", [1, 1]), attributes.get("pads", [0] * 4)
        dilation = attributes.get("dilations", [1, 1])
        out = [(size + pads[i] + pads[i + 2] - dilation[i] * (k - 1) - 1) // steps[i] + 1
               for i, (size, k) in enumerate(((height, kh), (width, kw)))]
        inputs[3] = resize(inputs[3], (batch, cout, *out))
    return inputs, attributes


def draw_gemm(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A matrix product with other rows, columns and depth."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    a, b = inputs[0].shape, inputs[1].shape
    rows, depth = (a[1], a[0]) if attributes.get("transA") else a
    columns = b[0] if attributes.get("transB") else b[1]
    rows = batch if rows <= 64 and generator.random() < 0.5 else scaled(rows, generator, spread=spread)
    depth, columns = scaled(depth, generator, 8, spread), scaled(columns, generator, 8, spread)
    inputs[0] = resize(inputs[0], (depth, rows) if attributes.get("transA") else (rows, depth))
    inputs[1] = resize(inputs[1], (columns, depth) if attributes.get("transB") else (depth, columns))
    if len(inputs) > 2 and inputs[2].present:
        inputs[2] = resize(inputs[2], (columns,) if len(inputs[2].shape) <= 1 else (1, columns))
    return inputs, attributes


def draw_matmul(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A (batched) matrix product with other sizes; common leading dimensions stay common."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    a, b = list(inputs[0].shape), list(inputs[1].shape)
    if len(a) < 2 or len(b) < 2:
        return draw_axes(kernel, batch, generator, spread)
    left, right = int(bool(attributes.get("transA"))), int(bool(attributes.get("transB")))
    rows, depth, columns = a[-1] if left else a[-2], a[-2] if left else a[-1], b[-2] if right else b[-1]
    rows, depth = scaled(rows, generator, 1, spread), scaled(depth, generator, 8, spread)
    columns = scaled(columns, generator, 1, spread)
    lead = [batch if axis == 0 else scaled(size, generator, spread=0.5 * spread) for axis, size in enumerate(a[:-2])]
    shared = a[:-2] == b[:-2]
    inputs[0] = resize(inputs[0], (*lead, *((depth, rows) if left else (rows, depth))))
    inputs[1] = resize(inputs[1], (*(lead if shared else b[:-2]), *((columns, depth) if right else (depth, columns))))
    return inputs, attributes


def draw_axes(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """Any other operator: scales every axis by one factor for all inputs with the same size there; sizes of 1 stay. Inputs are
    aligned at their last axis, as in broadcasting. The axis that an operator joins or splits stays."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    tensors = [tensor for tensor in inputs if tensor.present and tensor.values is None]
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    fixed = attributes.get("axis") if operator_row(kernel.op_type).kind == "joint" else None
    fixed = fixed % rank if isinstance(fixed, int) and rank else None
    image = rank == 4
    new: dict[tuple[int, int], int] = {}
    for axis in range(rank):
        for size in {(1,) * (rank - len(t.shape)) + t.shape for t in tensors}:
            old = size[axis]
            if old == 1 and not (axis == 0 and image):
                new[axis, old] = 1
            elif axis == fixed:
                new[axis, old] = old
            elif axis == 0 and image:
                new[axis, old] = batch if old != 1 or len({t.shape[0] for t in tensors if len(t.shape) == 4}) == 1 else 1
            elif image and axis >= 2:
                new[axis, old] = new.get((2, old)) or side(old, generator, spread)
            else:
                new.setdefault((axis, old), scaled(old, generator, axis_multiple(kernel, old), spread))
    for position, tensor in enumerate(inputs):
        if tensor.present and tensor.values is None:
            offset = rank - len(tensor.shape)
            inputs[position] = resize(tensor, [new[offset + axis, size] for axis, size in enumerate(tensor.shape)])
    if "channels" in attributes and image:  # ReorderOutput: how many of the blocked channels are real
        attributes["channels"] = inputs[0].shape[1]
    return inputs, attributes


def draw_other_conv(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A convolution of a signal or video, or a transposed one: other channels and sizes, same window."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    x, w = inputs[0].shape, inputs[1].shape
    group = int(attributes.get("group", 1))
    transposed = kernel.op_type == "ConvTranspose"
    cin = x[1] if x[1] < 8 else scaled(x[1], generator, 8, spread)
    cout = scaled(w[1] if transposed else w[0], generator, 8, spread)
    if group > 1 and group in (x[1], w[0]):  # depthwise
        cin = group = cout = scaled(group, generator, 8, spread)
        attributes["group"] = group
    elif group > 1:
        cin, cout = (max(1, round(size / group)) * group for size in (cin, cout))
    inner = [scaled(size, generator, spread=spread) if len(x) == 3 else side(size, generator, spread) for size in x[2:]]
    if x[-1] == x[-2] and len(x) > 3:
        inner[-2] = inner[-1]
    inputs[0] = resize(inputs[0], (batch, cin, *inner))
    inputs[1] = resize(inputs[1], (cin, cout // group, *w[2:]) if transposed else (cout, cin // group, *w[2:]))
    if len(inputs) > 2 and inputs[2].present:
        inputs[2] = resize(inputs[2], (cout,))
    return inputs[:3], attributes  # what a fused Conv adds has the size of its output


def draw_any_conv(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A convolution of a signal, an image or a video."""
    image = len(kernel.inputs[0].shape) == 4 and kernel.op_type != "ConvTranspose"
    return (draw_conv if image else draw_other_conv)(kernel, batch, generator, spread)


def draw_recurrent(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A recurrent layer with other steps, rows, input width and hidden size."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    (steps, _, width), hidden = inputs[0].shape, inputs[2].shape[2]
    gates = inputs[2].shape[1] // hidden
    as_wide = width == hidden
    steps, hidden = scaled(steps, generator, spread=spread), scaled(hidden, generator, 8, spread)
    width = hidden if as_wide else scaled(width, generator, 8 if width % 8 == 0 else 1, spread)
    directions = inputs[1].shape[0]
    shapes = {0: (steps, batch, width), 1: (directions, gates * hidden, width), 2: (directions, gates * hidden, hidden),
              3: (directions, 2 * gates * hidden), 4: (batch,), 5: (directions, batch, hidden), 6: (directions, batch, hidden),
              7: (directions, 3 * hidden)}
    inputs = [resize(tensor, shapes[position]) if tensor.present else tensor for position, tensor in enumerate(inputs)]
    return inputs, attributes | {"hidden_size": hidden}


def draw_channel_norm(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A normalisation of channels (the second axis); its scales follow them."""
    drawn, attributes = draw_axes(kernel.model_copy(update={"inputs": kernel.inputs[:1]}), batch, generator, spread)
    first = resize(drawn[0], (batch, *drawn[0].shape[1:]))
    return [first, *(resize(tensor, first.shape[1:2]) for tensor in kernel.inputs[1:])], attributes


def draw_repeat(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """An Expand with other sizes along the axes that are not repeated."""
    old, wanted = kernel.inputs[0].shape, kernel.inputs[1]
    drawn, attributes = draw_axes(kernel.model_copy(update={"inputs": kernel.inputs[:1]}), batch, generator, spread)
    if wanted.values is None:
        return [drawn[0], wanted], attributes
    offset = len(wanted.values) - len(old)
    sizes = tuple(drawn[0].shape[axis - offset] if axis >= offset and size != 1 and size == old[axis - offset] else size
                  for axis, size in enumerate(wanted.values))
    return [drawn[0], wanted.model_copy(update={"values": sizes})], attributes


def draw_einsum(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """An Einsum with another size per index of its equation; the first index of the first operand is the batch."""
    terms = str(kernel.attributes.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    old = {index: size for term, tensor in zip(terms, kernel.inputs, strict=True)
           for index, size in zip(term, tensor.shape, strict=True)}
    new = {index: size if size == 1 else scaled(size, generator, axis_multiple(kernel, size), spread)
           for index, size in old.items()}
    if not kernel.inputs[0].constant:
        new[terms[0][0]] = batch
    return [resize(tensor, [new[index] for index in term]) for term, tensor in zip(terms, kernel.inputs, strict=True)], dict(
        kernel.attributes)


def draw_blocks(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """DepthToSpace or SpaceToDepth with other numbers of channels and pixels; blocks stay whole."""
    block = int(kernel.attributes["blocksize"])
    _, channels, *sides = kernel.inputs[0].shape
    channel_step = block**2 if kernel.op_type == "DepthToSpace" else 1
    side_step = 1 if kernel.op_type == "DepthToSpace" else block
    shape = (batch, scaled(channels, generator, channel_step, spread),
             *(scaled(size, generator, side_step, spread) for size in sides))
    return [resize(kernel.inputs[0], shape)], dict(kernel.attributes)


def draw_resize(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A Resize of another image by the seed's factors."""
    inputs, attributes = draw_axes(kernel, batch, generator, spread)
    old, new, wanted = kernel.inputs[0].shape, inputs[0].shape, inputs[-1]
    if len(inputs) == 4 and wanted.values is not None and len(wanted.values) == len(old):
        sizes = tuple(max(1, round(new[axis] * size / old[axis])) for axis, size in enumerate(wanted.values))
        inputs[-1] = wanted.model_copy(update={"values": sizes})
    return inputs, attributes


def draw_regions(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A RoiAlign with another number of regions and other image sizes, but the seed's number of images."""
    inputs = list(kernel.inputs)
    images, channels, *sides = inputs[0].shape
    regions = scaled(inputs[1].shape[0], generator, spread=spread)
    shapes = ((images, scaled(channels, generator, 8, spread), *(side(size, generator, spread) for size in sides)),
              (regions, 4), (regions,))
    return [resize(tensor, shape) for tensor, shape in zip(inputs, shapes, strict=True)], dict(kernel.attributes)


def draw_columns(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> DrawnInputs:
    """A Col2Im of more or fewer channels into images of the same size."""
    columns, blocks = kernel.inputs[0], kernel.inputs[2].values
    if blocks is None:
        raise ValueError("the size of its blocks is not a constant")
    block = int(np.prod(blocks))
    shape = (batch, block * scaled(columns.shape[1] // block, generator, spread=spread), columns.shape[2])
    return [resize(columns, shape), *kernel.inputs[1:]], dict(kernel.attributes)


DRAWS: dict[str, Callable[[Kernel, int, np.random.Generator, float], DrawnInputs]] = {
    "Conv": draw_any_conv, "ConvTranspose": draw_other_conv, "Gemm": draw_gemm, "MatMul": draw_matmul,
    "FusedMatMul": draw_matmul, "LSTM": draw_recurrent, "GRU": draw_recurrent, "RNN": draw_recurrent,
    "BatchNormalization": draw_channel_norm, "InstanceNormalization": draw_channel_norm, "Expand": draw_repeat,
    "Einsum": draw_einsum, "DepthToSpace": draw_blocks, "SpaceToDepth": draw_blocks, "Resize": draw_resize,
    "RoiAlign": draw_regions, "Col2Im": draw_columns}


def infer_outputs(kernel: Kernel, inputs: Sequence[KernelInput], attributes: dict[str, Any]) -> tuple[Tensor, ...]:
    """The outputs of a changed kernel, as ORT infers them."""
    if operator_row(kernel.op_type).keeps_shape:  # the CPU provider could not open a session for all of these
        return (Tensor(dtype=kernel.outputs[0].dtype, shape=inputs[0].shape),)
    model = without_large_weights(kernel.model_copy(update={"inputs": tuple(inputs), "attributes": attributes}))
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=kernel.id)
    tensors = {}
    for output in session.get_outputs():
        if any(not isinstance(size, int) or size < 1 for size in output.shape):
            raise UserError(f"{kernel.id}: sizes {output.shape} are not fixed")
        tensors[output.name] = Tensor(dtype=session_dtype(output.type), shape=tuple(output.shape))
    return tuple(tensors.get(f"y{position}", Tensor(dtype="")) for position in range(len(kernel.outputs)))


def draw_kernel(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0, dtype: str = "") -> Kernel:
    """A kernel of the same type at another batch, with each size at most about 2^spread times larger or smaller. `dtype` is one
    of FLOAT_TYPES, or "" for the seed's own."""
    kernel_floats = float_types(kernel)
    # The CPU provider, which infers a kernel's outputs, lacks many operators in half precision.
    seed = in_float_type(kernel, "float32") if kernel_floats == {"float16"} else kernel
    inputs, attributes = DRAWS.get(operator_row(seed.op_type).base_name, draw_axes)(seed, batch, generator, spread)
    outputs = infer_outputs(seed, inputs, attributes)
    drawn = describe_kernel(seed.op_type, seed.domain, seed.opset, attributes, inputs, outputs)
    for position, tensor in enumerate(drawn.inputs):
        limit = index_limit(drawn, position)
        if limit is not None and tensor.values is not None and not all(-limit <= value < limit for value in tensor.values):
            raise UserError(f"{kernel.id}: input {position} holds an index outside of its axis, which has {limit} places")
    wanted = dtype if dtype and kernel_floats else next(iter(kernel_floats)) if len(kernel_floats) == 1 else ""
    return in_float_type(drawn, wanted) if wanted else drawn


# sampled kernels ---------------------------------------------------------------------------------------------------------

def footprint_mib(kernel: Kernel) -> float:
    """Memory (MiB) of a kernel's inputs and outputs, including constants and caches that it reads only in part."""
    held = kernel.weight_bytes + sum(t.bytes for position, t in enumerate(kernel.inputs) if is_cache(kernel, position))
    return float(max(kernel.bytes_read, held) + kernel.bytes_written) / 2**20


Families = tuple[str, ...]  # sorted names of model families
Seeds = dict[str, Families]  # by kernel id
SEED_FILE = "sampled.json"  # in the folder of the sampled kernels


def read_seeds(folder: Path) -> Seeds:
    """The families of the seeds of sampled kernels in a folder, by kernel id; possibly empty."""
    path = folder / SEED_FILE
    families_of = files.read_json(path) if path.exists() else {}
    if not all(isinstance(families, list) for families in families_of.values()):
        raise UserError(f"{path}: written by another version; remove {folder}, then build and sample its kernels again: "
                        "python kernel_model/kernel_builder.py, python kernel_model/kernel_sampler.py")
    return {name: tuple(families) for name, families in families_of.items()}
