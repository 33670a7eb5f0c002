"""Features: right numbers for known kernels, and a finite number for every kernel of ORT."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from made_up_dataset import conv, gemm, relu, tensor

from hase.learned.kernels.features import KERNEL_FEATURES, OP_CLASSES, kernel_features
from hase.ort_analysis.graph.analysis import analyze
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel, kernel_form


def named(kernel: Kernel) -> dict[str, float]:
    return dict(zip(KERNEL_FEATURES.names, kernel_features(kernel), strict=True))


def expect(kernel: Kernel, **values: float) -> None:
    features = named(kernel)
    assert {name: features[name] for name in values} == values


def test_convolution() -> None:
    expect(conv(batch=2, channels=16, side=32, out=64, window=3, stride=2), batch=2, channels=16, height=32, width=32,
           out_channels=64, out_height=16, out_width=16, kernel_height=3, kernel_width=3, stride=4, padding=4, group=1,
           group_channels=16, depthwise=0, matrices=1, m=2 * 16 * 16, n=64, k=16 * 9, channels_alignment=16,
           out_channels_alignment=64, inputs=3, activation_inputs=1, constant_inputs=2, layout=0, bits=32)


def test_tiles_and_how_well_a_product_fills_them() -> None:
    features = named(conv(batch=1, channels=16, side=12, out=33, window=1))  # m = 144, n = 33: 2 × 1 tiles of 128
    assert features["log_tiles_128"] == 1.0
    assert features["fill_128"] == pytest.approx(144 * 33 / (2 * 128 * 128))


def test_depthwise_and_fused_convolutions() -> None:
    expect(conv(channels=32, out=32, group=32), depthwise=1, matrices=32, n=1, k=9, group_channels=1)
    blocked = conv(domain="com.microsoft.nchwc", activation="Relu")
    expect(blocked, layout=1, activation=1, channels=16, m=32 * 32, k=16 * 9)
    assert named(conv())["activation"] == 0


def test_convolution_with_channels_last() -> None:
    inputs = [tensor(1, 20, 30, 8), tensor(16, 8, 3, 3, constant=True)]
    kernel = describe_kernel("Conv", "com.ms.internal.nhwc", 11, {"kernel_shape": [3, 3]}, inputs,
                             [Tensor(dtype="float32", shape=(1, 18, 28, 16))])
    expect(kernel, channels=8, height=20, width=30, out_channels=16, out_height=18, out_width=28, layout=2, k=72)


def test_products() -> None:
    expect(gemm(rows=4, depth=128, columns=64), m=4, k=128, n=64, matrices=1, transposed=2)
    attention = describe_kernel("MatMul", "", 13, {}, [tensor(2, 12, 50, 64), tensor(2, 12, 64, 50)],
                                [Tensor(dtype="float32", shape=(2, 12, 50, 50))])
    expect(attention, matrices=24, m=50, k=64, n=50)
    shared_weights = describe_kernel("MatMul", "", 13, {}, [tensor(2, 50, 64), tensor(64, 10, constant=True)],
                                     [Tensor(dtype="float32", shape=(2, 50, 10))])
    expect(shared_weights, matrices=1, m=100, k=64, n=10)


@pytest.mark.parametrize(("equation", "shapes", "result", "product"), [
    ("B G H I D, B G H J D -> B G H I J", [(2, 3, 4, 7, 5), (2, 3, 4, 6, 5)], (2, 3, 4, 7, 6), (24, 7, 6, 5)),
    ("bij,bjd->bid", [(2, 7, 6), (2, 6, 5)], (2, 7, 5), (2, 7, 5, 6)),
    ("i,j->ij", [(7,), (6,)], (7, 6), (1, 7, 6, 1))])
def test_an_einsum_is_products(equation: str, shapes: list[tuple[int, ...]], result: tuple[int, ...],
                               product: tuple[int, ...]) -> None:
    kernel = describe_kernel("Einsum", "", 12, {"equation": equation}, [tensor(*shape) for shape in shapes],
                             [Tensor(dtype="float32", shape=result)])
    matrices, m, n, k = product
    assert kernel.flops == 2 * math.prod(product)
    expect(kernel, matrices=matrices, m=m, n=n, k=k)


@pytest.mark.parametrize("equation", ["bij,bjd", "...ij,...jd->...id", "bij->bji"])
def test_an_einsum_of_another_kind_is_counted_by_element(equation: str) -> None:
    inputs = [tensor(2, 7, 6), tensor(2, 6, 5)][:2 if "," in equation else 1]
    kernel = describe_kernel("Einsum", "", 12, {"equation": equation}, inputs, [Tensor(dtype="float32", shape=(2, 7, 5))])
    assert kernel.flops == 84


def transpose(shape: tuple[int, ...], perm: list[int]) -> Kernel:
    return describe_kernel("Transpose", "", 13, {"perm": perm}, [tensor(*shape)],
                           [Tensor(dtype="float32", shape=tuple(shape[axis] for axis in perm))])


@pytest.mark.parametrize(("shape", "perm", "blocks", "inner", "last_blocks"), [
    ((2, 3, 4, 5), [0, 1, 2, 3], 1, 120, (120, 0, 0)),
    ((2, 3, 4, 5), [0, 2, 3, 1], 3, 1, (20, 3, 2)),  # image to channels last: batch, channels, pixels
    ((2, 3, 4, 5), [0, 2, 1, 3], 4, 5, (5, 4, 3)),  # attention's heads: rows of 5 stay whole
    ((1, 3, 4, 5), [0, 2, 3, 1], 2, 1, (20, 3, 0)),  # an axis of size 1 moves nothing
    ((6, 7, 2, 3, 5), [0, 1, 3, 2, 4], 4, 5, (5, 3, 2)),  # the first two go together
])
def test_transposes(shape: tuple[int, ...], perm: list[int], blocks: int, inner: int,
                    last_blocks: tuple[int, int, int]) -> None:
    block_1, block_2, block_3 = last_blocks
    expect(transpose(shape, perm), permutation=blocks, permutation_inner=inner,
           block_1=block_1, block_2=block_2, block_3=block_3)


def test_tables_copied_in_each_run() -> None:
    """A Split into unequal parts and a Concat of more than 32 inputs make four more copies than others."""
    def split(*parts: int) -> Kernel:
        return describe_kernel("Split", "", 20, {"axis": 1}, [tensor(2, sum(parts))],
                               [Tensor(dtype="float32", shape=(2, part)) for part in parts])

    def concat(inputs: int) -> Kernel:
        return describe_kernel("Concat", "", 20, {"axis": 1}, [tensor(2, 3)] * inputs,
                               [Tensor(dtype="float32", shape=(2, 3 * inputs))])

    expect(split(4, 4, 4), tables=0)
    expect(split(11, 3), tables=4)
    expect(concat(32), tables=0)
    expect(concat(33), tables=4)


def test_axes() -> None:
    softmax = describe_kernel("Softmax", "", 13, {"axis": 1}, [tensor(2, 10, 7)], [Tensor(dtype="float32", shape=(2, 10, 7))])
    expect(softmax, reduced=10, axis_inner=7)
    mean = describe_kernel("ReduceMean", "", 13, {"axes": [2, 3]}, [tensor(2, 8, 6, 5)],
                           [Tensor(dtype="float32", shape=(2, 8, 1, 1))])
    expect(mean, reduced=30)
    concat = describe_kernel("Concat", "", 13, {"axis": 1}, [tensor(1, 8, 6, 5), tensor(1, 4, 6, 5)],
                             [Tensor(dtype="float32", shape=(1, 12, 6, 5))])
    expect(concat, axis_inner=30, activation_inputs=2)


def test_element_wise_and_unknown_operations() -> None:
    expect(relu(batch=2, channels=8, side=4), batch=2, channels=8, rank=4, m=0, k=0, op_class=0,
           log_elements=math.log2(1 + 2 * 8 * 16))
    scalar = describe_kernel("NobodyKnows", "org.example", 1, {"mode": "odd"}, [KernelInput(dtype="int64")], [])
    assert all(math.isfinite(value) for value in kernel_features(scalar))
    nothing = describe_kernel("NobodyKnows", "org.example", 1, {}, [], [])
    assert all(math.isfinite(value) for value in kernel_features(nothing))


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_every_kernel_of_real_models(torch_models: dict[str, Path], provider: str) -> None:
    kernels_by_features: dict[tuple[float, ...], Kernel] = {}
    for path in torch_models.values():
        for kernel in analyze(path, provider).kernels.values():
            features = kernel_features(kernel)
            assert len(features) == len(KERNEL_FEATURES.names)
            assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in features), kernel.id
            kernels_by_features[(*features, hash(kernel.type))] = kernel
    assert len(kernels_by_features) > 60


SHAPES = [(), (0,), (1,), (5,), (0, 7), (1, 1), (3, 4), (2, 0, 4), (2, 3, 4), (2, 8, 4, 4), (1, 8, 2, 4, 4),
          (1, 2, 3, 4, 5, 6)]
ODD_OPS = (*OP_CLASSES, "Add", "LSTM", "ReduceMax", "GlobalAveragePool", "MaxPool", "ArgMax", "FusedMatMul", "MatMulInteger",
           "ConvTranspose", "LayerNormalization", "GroupNormalization", "MultiHeadAttention", "GatherND",
           "EmbedLayerNormalization", "TreeEnsembleClassifier", "SequenceAt", "ConvInteger", "QLinearConv", "FusedConv")


@pytest.mark.parametrize("op_type", ODD_OPS)
def test_every_operation_at_every_rank(op_type: str) -> None:
    """Scalars, empty tensors and ranks that an operator never has: a finite number for each, never an error."""
    for shape, result in itertools.product(SHAPES, SHAPES[::3]):
        for inputs in ([tensor(*shape)], [tensor(*shape), tensor(*result, constant=True)],
                       [KernelInput(dtype="int64", shape=shape)] * 3, [KernelInput(dtype="sequence(float32)")], []):
            for attributes in ({}, {"axis": 1}, {"axis": -1, "transA": 1}):
                operands = [*inputs, *[tensor(*result)] * (4 if "Conv" in op_type else 0)]  # ORT refuses those without weights
                kernel = describe_kernel(op_type, "", 20, attributes, operands, [Tensor(dtype="float32", shape=result)])
                features = kernel_features(kernel)
                assert len(features) == len(KERNEL_FEATURES.names)
                assert all(math.isfinite(value) for value in features), (shape, result, attributes)
                assert min(kernel.flops, kernel.bytes_read, kernel.bytes_written) >= 0


def test_a_reduction_to_a_scalar() -> None:
    kernel = describe_kernel("ReduceMax", "", 20, {"keepdims": 0}, [tensor(2, 3, 8)], [Tensor(dtype="float32")])
    expect(kernel, reduced=48, m=1, n=1, rank=3)


def test_the_form_of_an_operator() -> None:
    x = tensor(4, 6, 8, 10)
    summed = describe_kernel("ReduceSum", "", 20, {"keepdims": 0}, [x, numbers(1, 3)],
                             [Tensor(dtype="float32", shape=(4, 8))])
    expect(summed, axes=0b101, axis_size=60, log_behind_axes=1, out_rank=2)  # one number behind
    padded = describe_kernel("Pad", "", 20, {"mode": "edge"}, [x, numbers(0, 0, 1, 0, 0, 0, 2, 0)],
                             [Tensor(dtype="float32", shape=(4, 6, 11, 10))])
    expect(padded, axes=0b010, axis_size=8, axis_size_out=11, log_behind_axes=math.log2(11), mode=3)
    largest = describe_kernel("TopK", "", 20, {"axis": 1}, [x, numbers(2)], [Tensor(dtype="float32", shape=(4, 2, 8, 10))])
    expect(largest, axes=0b100, axis_size=6, axis_size_out=2, log_behind_axes=math.log2(81))
    channel = describe_kernel("Mul", "", 20, {}, [x, tensor(6, 1, 1, constant=True)], [Tensor(dtype="float32", shape=x.shape)])
    expect(channel, broadcast_axes=0b1011, axes=0)
    steps = describe_kernel("Slice", "", 20, {}, [x, numbers(0), numbers(8), numbers(2), numbers(4)],
                            [Tensor(dtype="float32", shape=(4, 6, 2, 10))])
    expect(steps, axes=0b010, log_steps=2)
    video = describe_kernel("Conv", "", 20, {"kernel_shape": [5, 3, 3], "strides": [1, 1, 2]},
                            [tensor(1, 4, 16, 8, 8), tensor(8, 4, 5, 3, 3, constant=True)],
                            [Tensor(dtype="float32", shape=(1, 8, 12, 6, 3))])
    expect(video, depth=16, kernel_depth=5, last_stride=2)
    expect(gemm(rows=24, columns=96), m_alignment=8, n_alignment=32)


def numbers(*values: int) -> KernelInput:
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


@pytest.mark.parametrize(("kernel", "form"), [
    (conv(window=3), "float32 of rank 4, dense, window to 3"),
    (conv(channels=32, out=32, window=5, group=32), "float32 of rank 4, depthwise, window to 7"),
    (conv(channels=32, out=32, group=4), "float32 of rank 4, grouped, window to 3"),
    (relu(), "float32 of rank 4"), (gemm(), "float32")])
def test_forms_are_named(kernel: Kernel, form: str) -> None:
    assert kernel_form(kernel) == form


def test_forms_of_reductions_name_their_axes() -> None:
    def reduced(*axes: int) -> str:
        return kernel_form(describe_kernel("ReduceMax", "", 20, {}, [tensor(2, 3, 4), numbers(*axes)],
                                       [Tensor(dtype="float32", shape=(2, 1, 1))]))

    assert reduced(-1) == reduced(1, 2) == "float32 of rank 3, along the last axis"
    assert reduced(0, 1) == "float32 of rank 3, along other axes"
