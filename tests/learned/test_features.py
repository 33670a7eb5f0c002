"""Features: right numbers for known kernels, a finite number for every kernel of ORT; other schemas are possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_dataset import QUICK, TARGET, conv, gemm, relu, tensor, write_workspace

from hase.learned.kernels.estimators import SHARED, predict_kernels
from hase.learned.kernels.features import KERNEL_FEATURES, OP_CLASSES, FeatureSchema, kernel_features, times_beyond
from hase.learned.kernels.predictors import read_predictors
from hase.learned.kernels.sidecar import save_predictors
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_types import describe_kernel, kernel_form
from hase.training.kernels.fitting import fit_kernel_model
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.paths import Workspace


def expect(kernel: Kernel, **values: float) -> None:
    features = dict(zip(KERNEL_FEATURES.names, kernel_features(kernel), strict=True))
    assert {name: features[name] for name in values} == values


def made(op_type: str, attributes: dict[str, Any], inputs: Sequence[KernelInput], *out: int, domain: str = "") -> Kernel:
    return describe_kernel(op_type, domain, 13, attributes, inputs, [Tensor(dtype="float32", shape=out)])


def numbers(*values: int) -> KernelInput:
    return KernelInput(dtype="int64", shape=(len(values),), constant=True, values=values)


def has(**values: float) -> dict[str, float]:
    return values


CHANNELS_LAST = made("Conv", {"kernel_shape": [3, 3]}, [tensor(1, 20, 30, 8), tensor(16, 8, 3, 3, constant=True)],
                     1, 18, 28, 16, domain="com.ms.internal.nhwc")


@pytest.mark.parametrize(("kernel", "values"), [
    (conv(batch=2, channels=16, side=32, out=64, window=3, stride=2), has(
        batch=2, channels=16, height=32, width=32, out_channels=64, out_height=16, out_width=16, kernel_height=3,
        kernel_width=3, stride=4, padding=4, group=1, group_channels=16, depthwise=0, matrices=1, m=2 * 16 * 16, n=64, k=16 * 9,
        channels_alignment=16, out_channels_alignment=64, inputs=3, activation_inputs=1, constant_inputs=2, layout=0, bits=32,
        activation=0)),
    (conv(channels=32, out=32, group=32), has(depthwise=1, matrices=32, n=1, k=9, group_channels=1)),
    (conv(domain="com.microsoft.nchwc", activation="Relu"), has(layout=1, activation=1, channels=16, m=32 * 32, k=16 * 9)),
    (CHANNELS_LAST, has(channels=8, height=20, width=30, out_channels=16, out_height=18, out_width=28, layout=2, k=72)),
    (gemm(rows=4, depth=128, columns=64), has(m=4, k=128, n=64, matrices=1, transposed=2)),
    (made("MatMul", {}, [tensor(2, 12, 50, 64), tensor(2, 12, 64, 50)], 2, 12, 50, 50), has(matrices=24, m=50, k=64, n=50)),
    (relu(batch=2, channels=8, side=4), has(batch=2, channels=8, rank=4, m=0, k=0, op_class=0,
                                             log_elements=math.log2(1 + 2 * 8 * 16))),
    (made("Softmax", {"axis": 1}, [tensor(2, 10, 7)], 2, 10, 7), has(reduced=10, axis_inner=7)),
    (made("ReduceMean", {"axes": [2, 3]}, [tensor(2, 8, 6, 5)], 2, 8, 1, 1), has(reduced=30)),
    (made("ReduceMax", {"keepdims": 0}, [tensor(2, 3, 8)]), has(reduced=48, m=1, n=1, rank=3)),  # to a scalar
    (made("Concat", {"axis": 1}, [tensor(1, 8, 6, 5), tensor(1, 4, 6, 5)], 1, 12, 6, 5),
     has(axis_inner=30, activation_inputs=2)),
    *((made("Concat", {"axis": 1}, [tensor(2, 3)] * count, 2, 3 * count), has(tables=tables))  # copied in each run
      for count, tables in ((32, 0), (33, 4))),
    *((describe_kernel("Split", "", 20, {"axis": 1}, [tensor(2, sum(parts))], [
        Tensor(dtype="float32", shape=(2, part)) for part in parts]), has(tables=tables))
      for parts, tables in (((4, 4, 4), 0), ((11, 3), 4))),  # unequal parts
    (made("ReduceSum", {"keepdims": 0}, [tensor(4, 6, 8, 10), numbers(1, 3)], 4, 8),
     has(axes=0b101, axis_size=60, log_behind_axes=1, out_rank=2)),  # one number behind
    (made("Pad", {"mode": "edge"}, [tensor(4, 6, 8, 10), numbers(0, 0, 1, 0, 0, 0, 2, 0)], 4, 6, 11, 10),
     has(axes=0b010, axis_size=8, axis_size_out=11, log_behind_axes=math.log2(11), mode=3)),
    (describe_kernel("TopK", "", 20, {"axis": 1}, [tensor(4, 6, 8, 10), numbers(2)], [
        Tensor(dtype="float32", shape=(4, 2, 8, 10))]),
     has(axes=0b100, axis_size=6, axis_size_out=2, log_behind_axes=math.log2(81))),
    (made("Mul", {}, [tensor(4, 6, 8, 10), tensor(6, 1, 1, constant=True)], 4, 6, 8, 10), has(broadcast_axes=0b1011, axes=0)),
    (made("Slice", {}, [tensor(4, 6, 8, 10), numbers(0), numbers(8), numbers(2), numbers(4)], 4, 6, 2, 10),
     has(axes=0b010, log_steps=2)),
    (made("Conv", {"kernel_shape": [5, 3, 3], "strides": [1, 1, 2]},
          [tensor(1, 4, 16, 8, 8), tensor(8, 4, 5, 3, 3, constant=True)], 1, 8, 12, 6, 3),
     has(depth=16, kernel_depth=5, last_stride=2)),
], ids=lambda value: value.op_type if isinstance(value, Kernel) else "")
def test_features(kernel: Kernel, values: dict[str, float]) -> None:
    expect(kernel, **values)


@pytest.mark.parametrize(("equation", "shapes", "result", "product"), [
    ("B G H I D, B G H J D -> B G H I J", [(2, 3, 4, 7, 5), (2, 3, 4, 6, 5)], (2, 3, 4, 7, 6), (24, 7, 6, 5)),
    ("bij,bjd->bid", [(2, 7, 6), (2, 6, 5)], (2, 7, 5), (2, 7, 5, 6)),
    ("i,j->ij", [(7,), (6,)], (7, 6), (1, 7, 6, 1))])
def test_an_einsum_is_products(equation: str, shapes: list[tuple[int, ...]], result: tuple[int, ...],
                               product: tuple[int, ...]) -> None:
    kernel = made("Einsum", {"equation": equation}, [tensor(*shape) for shape in shapes], *result)
    matrices, m, n, k = product
    assert kernel.flops == 2 * math.prod(product)
    expect(kernel, matrices=matrices, m=m, n=n, k=k)


@pytest.mark.parametrize(("shape", "perm", "blocks", "inner", "last_blocks"), [
    ((2, 3, 4, 5), [0, 2, 3, 1], 3, 1, (20, 3, 2)),  # image to channels last: batch, channels, pixels
    ((2, 3, 4, 5), [0, 2, 1, 3], 4, 5, (5, 4, 3)),  # attention's heads: rows of 5 stay whole
    ((6, 7, 2, 3, 5), [0, 1, 3, 2, 4], 4, 5, (5, 3, 2)),  # the first two go together
])
def test_transposes(shape: tuple[int, ...], perm: list[int], blocks: int, inner: int,
                    last_blocks: tuple[int, int, int]) -> None:
    block_1, block_2, block_3 = last_blocks
    expect(made("Transpose", {"perm": perm}, [tensor(*shape)], *(shape[axis] for axis in perm)), permutation=blocks,
           permutation_inner=inner, block_1=block_1, block_2=block_2, block_3=block_3)


SHAPES = [(), (0,), (1,), (5,), (0, 7), (1, 1), (3, 4), (2, 0, 4), (2, 3, 4), (2, 8, 4, 4), (1, 8, 2, 4, 4),
          (1, 2, 3, 4, 5, 6)]
ODD_OPS = (*OP_CLASSES, "NobodyKnows", "Add", "LSTM", "ReduceMax", "GlobalAveragePool", "MaxPool", "ArgMax", "FusedMatMul",
           "MatMulInteger", "ConvTranspose", "LayerNormalization", "GroupNormalization", "MultiHeadAttention", "GatherND",
           "EmbedLayerNormalization", "TreeEnsembleClassifier", "SequenceAt", "ConvInteger", "QLinearConv", "FusedConv")


@pytest.mark.parametrize("op_type", ODD_OPS)
def test_every_operation_at_every_rank(op_type: str) -> None:
    """Scalars, empty tensors and ranks that an operator never has: a finite number for each, never an error."""
    assert "Conv" in op_type or all(map(math.isfinite, kernel_features(describe_kernel(op_type, "", 20, {}, [], []))))
    for shape, result in itertools.product(SHAPES, SHAPES[::5]):
        for inputs in ([tensor(*shape), tensor(*result, constant=True)], [KernelInput(dtype="int64", shape=shape)] * 3,
                       [KernelInput(dtype="sequence(float32)")]):
            for attributes in ({}, {"axis": -1, "transA": 1}):
                operands = [*inputs, *[tensor(*result)] * (4 if "Conv" in op_type else 0)]  # ORT refuses those without weights
                kernel = describe_kernel(op_type, "", 20, attributes, operands, [Tensor(dtype="float32", shape=result)])
                features = kernel_features(kernel)
                assert len(features) == len(KERNEL_FEATURES.names)
                assert all(math.isfinite(value) for value in features), (shape, result, attributes)
                assert min(kernel.flops, kernel.bytes_read, kernel.bytes_written) >= 0


@pytest.mark.parametrize(("kernel", "form"), [
    (conv(window=3), "float32 of rank 4, dense, window to 3"),
    (conv(channels=32, out=32, window=5, group=32), "float32 of rank 4, depthwise, window to 7"),
    (relu(), "float32 of rank 4"), (gemm(), "float32"),
    *((made("ReduceMax", {}, [tensor(2, 3, 4), numbers(*axes)], 2, 1, 1), f"float32 of rank 3, along {which}")
      for axes, which in (((-1,), "the last axis"), ((0, 1), "other axes")))])
def test_forms_are_named(kernel: Kernel, form: str) -> None:
    assert kernel_form(kernel) == form


def two_numbers(kernel: Kernel) -> list[float]:
    """Rank of the first input, and its elements (log2)."""
    shape = kernel.inputs[0].shape
    return [len(shape), math.log2(math.prod(shape))]


TWO = FeatureSchema("two", 1, {"operands": ("rank",), "costs": ("log_elements",)}, two_numbers)


@pytest.mark.parametrize(("shape", "out", "behind"), [
    ((16, 2, 64, 56, 56), (16, 64, 56, 56), 64 * 56 * 56), ((2, 6, 5, 8), (2, 1, 1, 8), 8), ((4, 7), (), 1)])
def test_elements_behind_a_reduced_axis(shape: tuple[int, ...], out: tuple[int, ...], behind: int) -> None:
    kernel = describe_kernel("ReduceSum", "", 13, {}, [tensor(*shape)], [Tensor(dtype="float32", shape=out)])
    expect(kernel, axis_inner=behind)


@pytest.mark.slow
def test_estimators_learn_from_two_features_and_hase_refuses_them(workspace: Workspace, tmp_path: Path) -> None:
    low, high = np.array([2.0, 4.0]), np.array([4.0, 20.0])  # how far kernels are beyond a range: a logarithm by its power
    assert times_beyond(TWO, TWO.matrix([relu(channels=1024, side=1024), relu()]), low, high).tolist() == [2.0 ** 10, 1.0]
    write_workspace(workspace, sampled=100)
    rows = read_training_set(workspace, TARGET.name, TWO)
    model = fit_kernel_model(rows, "run", {}, QUICK.model_copy(update={"own_min_kernels": 1000}))
    assert model.boosters[SHARED].num_features() == 2 + 1 + 1  # and the type, and the metric
    activations = [relu(channels=40, side=20), relu(channels=16, side=50)]  # their time depends on their bytes
    times = predict_kernels(model, activations, TWO.matrix(activations), list(rows.idle_load.values()))
    assert times == pytest.approx([0.004 + kernel.bytes_read * 2 / 1e7 for kernel in activations], rel=0.25)
    save_predictors(tmp_path / "of_two", {"run": model}, {"run": ()}, {}, {
        "target": TARGET, "created": "", "dataset_sha256": "", "metrics": rows.metrics, "idle_load": rows.idle_load,
        "load_range": dict.fromkeys(rows.metrics, (0.0, 1.0)), "loaded_rows": 0, "dtypes": (), "held_out": (), "config": {},
        "machines": (), "feature_range": ()})
    with pytest.raises(UserError, match=r"the predictors of label run read feature schema two 1, this one kernel 5 \(they "
                                        r"differ in: activation, .*train again: python training/train_kernel_model\.py"):
        read_predictors(tmp_path / "of_two")
