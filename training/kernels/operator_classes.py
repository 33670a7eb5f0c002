"""Classes of operators: those of one class do the same to memory, so a measured one tells how long another takes."""

from __future__ import annotations

from typing import Literal

from records.kernel_record import Kernel
from records.kernel_types import operator_of
from training.kernels.features import CONVOLUTIONS

OperatorClass = Literal["elementwise", "reduction", "normalisation", "recurrent", "gather", "movement", "product",
                        "convolution", "other"]

NORMALISATIONS = frozenset({
    "BatchNormalization", "BiasSoftmax", "GroupNorm", "GroupNormalization", "InstanceNormalization", "LRN",
    "LayerNormalization", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization",
    "SkipGroupNorm", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax", "EmbedLayerNormalization"})
RECURRENT = frozenset({"GRU", "LSTM", "RNN", "DynamicQuantizeLSTM", "Loop", "Scan"})
GATHERS = frozenset({"Gather", "GatherElements", "GatherND", "GatherBlockQuantized", "GridSample", "Resize", "RoiAlign",
                     "Scatter", "ScatterElements", "ScatterND", "Upsample", "Compress", "TensorScatter"})
MOVEMENTS = frozenset({"Cast", "Concat", "DepthToSpace", "DequantizeLinear", "Expand", "MemcpyFromHost", "MemcpyToHost", "Pad",
                       "QuantizeLinear", "ReorderInput", "ReorderOutput", "Slice", "SpaceToDepth", "Split", "Tile", "Transpose",
                       "Trilu", "ConstantOfShape", "Range", "EyeLike", "ReverseSequence"})
PRODUCTS = frozenset({"Attention", "Einsum", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "Gemm", "GroupQueryAttention",
                      "MatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
                      "MultiHeadAttention", "PackedAttention", "QLinearMatMul", "QGemm", "QAttention", "TransposeMatMul",
                      "DecoderMaskedMultiHeadAttention"})
ELEMENTWISE = frozenset({
    "Abs", "Acos", "Add", "And", "Asin", "Atan", "BiasAdd", "BiasGelu", "BiasSplitGelu", "BitShift", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "Div", "Dropout", "Elu", "Equal", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater", "GreaterOrEqual",
    "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish",
    "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QLinearAdd",
    "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QuickGelu",
    "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Silu", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor", "RotaryEmbedding"})

# Finer than classes: operators whose CUDA kernels work alike. Those of one kind are next to each other, and of one class too.
KINDS: dict[str, frozenset[str]] = {
    "softmax": frozenset({"Softmax", "LogSoftmax", "BiasSoftmax"}),
    "layer norm": frozenset({"LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization",
                             "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization", "RMSNormalization"}),
    "channel norm": frozenset({"BatchNormalization", "InstanceNormalization", "GroupNorm", "GroupNormalization",
                               "SkipGroupNorm"}),
    "pool": frozenset({"AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"}),
    "joint": frozenset({"Concat", "Split"}), "part": frozenset({"Slice", "Pad", "Expand", "Tile"}),
    "permutation": frozenset({"Transpose", "DepthToSpace", "SpaceToDepth"}),
    "copy": frozenset({"Cast", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear"})}
CLASSES: tuple[OperatorClass, ...] = ("normalisation", "reduction", "elementwise", "movement", "gather", "product",
                                      "convolution", "recurrent", "other")
CODES = {name: float(place) for place, name in enumerate((*KINDS, *CLASSES))}  # of kinds, and of classes without kinds


def operator_class(kernel: Kernel) -> OperatorClass:
    """The class of operators that a kernel belongs to."""
    return class_of_operator(kernel.op_type)


def class_of_type(kernel_type: str) -> OperatorClass:
    """The class of a kernel type's operator."""
    return class_of_operator(operator_of(kernel_type))


def kind_of_operator(op: str) -> str:
    """The kind of an operator; its class where that has no kinds, or none of them fits."""
    return next((kind for kind, operators in KINDS.items() if op in operators), class_of_operator(op))


def class_of_operator(op: str) -> OperatorClass:
    """The class of an operator of ONNX or ONNX Runtime."""
    for kind, names in (("normalisation", NORMALISATIONS), ("recurrent", RECURRENT), ("gather", GATHERS),
                        ("movement", MOVEMENTS), ("product", PRODUCTS), ("convolution", CONVOLUTIONS),
                        ("elementwise", ELEMENTWISE)):
        if op in names:
            return kind  # type: ignore[return-value]
    return "reduction" if op.startswith(("Reduce", "Arg", "Global")) or "Pool" in op or op == "CumSum" else "other"


def form_of(kernel: Kernel) -> str:
    """Element type and rank of a kernel, such as `float32 of rank 4`; for a product the type alone, since its rank matters
    little."""
    if operator_class(kernel) == "product":
        return kernel.dtype
    first = next((tensor for tensor in kernel.inputs if tensor.dtype), None)
    return f"{kernel.dtype} of rank {len(first.shape) if first else 0}"
