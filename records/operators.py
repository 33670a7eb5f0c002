"""The operator table: class, cost rule, launches and other properties of each operator, by name.

To add an operator, add one row to TABLE; all columns but the first two have defaults. A row is valid for all domains with an
operator of its name. Without a row, `operator_row` returns a default one, whose class follows from the name (`Reduce…`, `Arg…`,
`Global…` and `…Pool…` are reductions) or is "other".
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Predictors learn the indices of these names (`class_boosters.CODES`): after a change, train them again.
OperatorKind = Literal["softmax", "layer norm", "channel norm", "pool", "joint", "part", "permutation", "copy"]
OperatorClass = Literal["normalisation", "reduction", "elementwise", "movement", "gather", "product", "convolution",
                        "recurrent", "other"]
CostRule = Literal["view", "move", "elements", "convolution", "transposed convolution", "gemm", "product", "einsum",
                   "attention", "grouped attention", "experts", "recurrent", "window", "reduction", "trees",
                   "transform"]
LaunchRule = Literal["learned", "none", "one a step", "unequal parts", "many inputs"]
Dispatch = Literal["own", "convolution", "product", "recurrent", "reducing", "einsum"]
Linearity = Literal["linear", "multiplicative", "convolutional", "nonlinear"]
NetworkScale = Literal["small", "medium", "large"]
SCALES: dict[NetworkScale, float] = {"small": 50, "medium": 150, "large": float("inf")}  # the most nodes of such a network
BLOCKED_DOMAIN = "com.microsoft.nchwc"  # of operators in ONNX Runtime's blocked layout on a CPU
# On CUDA these may work in the buffer of their first input: activations, as they are registered (ONNX Runtime's
# activations.cc), and ScatterND. That Gelu, HardSwish and QuickGelu are among them follows from the blocks of an H100's
# sessions. Arithmetic and other elementwise operators always write to a buffer of their own.
IN_PLACE_ON_CUDA = frozenset({"Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "QuickGelu", "Relu", "ScatterND", "Selu",
                              "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"})


@dataclass(frozen=True)
class Operator:
    """A row of the table. Inputs are given by index, versions by the number of ONNX's operator set."""

    name: str  # ONNX's or ONNX Runtime's
    operator_class: OperatorClass  # operators of one class use memory alike, so the time of one tells that of another
    kind: OperatorKind | Literal[""] = ""  # finer than the class: operators whose CUDA kernels work alike; "" if none fits
    base: str = ""  # the operator without fused parts; "" if there are none
    # the rule for operations and bytes (`kernel_costs`). A "view" costs nothing: its output shares its input's memory. A "move"
    # has no operations
    cost: CostRule = "elements"
    # operations per element under the rule "elements". A transcendental function counts as about ten, as its polynomial
    # approximation takes. Only the order of magnitude matters, because memory limits these kernels
    element_flops: int = 1
    table_inputs: tuple[int, ...] = ()  # inputs from which a kernel reads at most as many elements as it writes
    # how often it launches work on a GPU. "learned": from measurements, at least once. "none": never, since it only reads a
    # tensor's shape, which the host knows. The others are learned, too, and add `kernel_costs.waits_between_launches`
    launches: LaunchRule = "learned"
    # what the host calls on CUDA: ONNX Runtime's "own" kernels; cuDNN for a "convolution" or "recurrent" layer; cuBLAS for a
    # "product", or for an "einsum", which it first plans; "reducing" operators use cuDNN (pools, most reductions, normalisation
    # of channels) or ONNX Runtime's kernels (softmaxes, layer normalisation)
    dispatch: Dispatch = "own"
    # its CPU time depends on input values: branches, sorting or searching, functions with several algorithms (ONNX Runtime
    # 1.31: from 1.5 to 500 times as long)
    time_by_values: bool = False
    # whether ONNX Runtime's CPU provider computes it number by number, in many steps; None: if its class is "other"
    slow_on_cpu: bool | None = None
    waits_for_size: bool = False  # its CUDA kernel copies the output's size to the host, which waits for it (ONNX Runtime 1.31)
    copies: bool = False  # it copies between host and GPU; ONNX Runtime adds it to a graph
    bodies: tuple[str, ...] = ()  # attributes with a graph, whose nodes do the computation
    size_inputs: tuple[int, ...] = ()  # inputs whose values decide the output's shape
    shape_input: int | None = None  # the input that is the output's shape
    sized_by_values: bool = False  # values decide the output's shape in another way (see `shape_needs_values`)
    float_sizes: bool = False  # small floating-point constants among its inputs decide the output's shape
    index_input: int | None = None  # the input with indices into `table_inputs`, or into the first input if there are no tables
    index_per_axis: bool = False  # the last axis of the indices has one for each of the first axes of the data
    weights_input: int | None = None  # the input with the weights of a convolution
    # what a fused convolution adds to its result: Z of FusedConv, Sum of a Conv in blocked layout (NCHWc)
    sum_input: int | None = None
    single_inputs: tuple[int, ...] = ()  # inputs that are always float32
    packed_inputs: tuple[int, ...] = ()  # integer inputs that contain quantised numbers; any value is valid
    in_whole_numbers: bool = False  # it computes in its first input's type, although its scales are floating-point numbers
    positive_inputs: bool = False  # dummy inputs must be positive, for divisions, roots or logarithms
    keeps_shape: bool = False  # its only output has the first input's shape; no session is needed to know it
    in_place: tuple[int, ...] = ()  # inputs whose buffer the output may reuse (`MayInplace` of ONNX Runtime's CPU kernels)
    typed_by_attribute: bool = False  # an attribute, not an input, gives the type of its floating-point output
    random: bool = False  # its output differs from run to run (for Dropout only in training)
    # "linear" (additions, comparisons, data movement), "multiplicative" (products, activations of single elements), "nonlinear"
    # (all others), or "convolutional": nonlinear, but usual in convolutional networks
    linearity: Linearity = "nonlinear"
    # versions that changed the meaning but not the attributes and inputs (from ONNX's changelog): scale and bias per channel,
    # not per group; a shift by half a pixel; one axis, not all from `axis` on; other names of modes; another way to count an
    # axis; sizes rounded up
    changed_in: tuple[int, ...] = ()
    ceiling_changed_in: tuple[int, ...] = ()  # the same, only for sizes that are rounded up (`ceil_mode`)
    input_since: tuple[int, str] | None = None  # the version since which an attribute is the second input, and the attribute

    @property
    def base_name(self) -> str:
        """The operator's name without fused parts."""
        return self.base or self.name

    @property
    def kind_or_class(self) -> OperatorKind | OperatorClass:
        """Its kind, or its class if it has no kind."""
        return self.kind or self.operator_class

    @property
    def shape_needs_values(self) -> bool:
        """Whether the shape of the output depends on values, so that a run on zeros would not show it."""
        return self.sized_by_values or bool(self.size_inputs or self.bodies) or self.shape_input is not None


def operator_row(name: str) -> Operator:
    """The row of an operator of ONNX or ONNX Runtime; a default row if the table has none."""
    return OPERATORS.get(name) or _default_row(name)


@functools.cache
def _default_row(name: str) -> Operator:
    if name.startswith(("Reduce", "Arg", "Global")):
        return Operator(name, "reduction", cost="reduction")
    return Operator(name, "reduction" if "Pool" in name else "other")


TABLE = (
    # convolution
    Operator("Conv", "convolution", cost="convolution", dispatch="convolution", weights_input=1, sum_input=3,
             linearity="convolutional"),
    Operator("ConvInteger", "convolution", cost="convolution", weights_input=1),
    Operator("ConvTranspose", "convolution", cost="transposed convolution", dispatch="convolution", weights_input=1,
             linearity="convolutional"),
    Operator("FusedConv", "convolution", base="Conv", cost="convolution", dispatch="convolution", weights_input=1, sum_input=3,
             in_place=(3,), linearity="convolutional"),
    Operator("NhwcConv", "convolution", cost="convolution", dispatch="convolution", weights_input=1, linearity="convolutional"),
    Operator("NhwcFusedConv", "convolution", cost="convolution", dispatch="convolution", weights_input=1,
             linearity="convolutional"),
    Operator("QLinearConv", "convolution", cost="convolution", weights_input=3, in_whole_numbers=True),
    # product
    Operator("Attention", "product", cost="attention", dispatch="product"),
    Operator("DecoderMaskedMultiHeadAttention", "product"),
    Operator("DynamicQuantizeMatMul", "product", cost="product"),
    Operator("Einsum", "product", cost="einsum", dispatch="einsum", linearity="multiplicative"),
    Operator("FusedGemm", "product", base="Gemm", cost="gemm", dispatch="product", linearity="multiplicative"),
    Operator("FusedMatMul", "product", cost="product", dispatch="product", linearity="multiplicative"),
    Operator("FusedMatMulActivation", "product", cost="product"),
    Operator("Gemm", "product", cost="gemm", dispatch="product", linearity="multiplicative"),
    Operator("GroupQueryAttention", "product", cost="grouped attention"),
    Operator("MatMul", "product", cost="product", dispatch="product", linearity="multiplicative"),
    Operator("MatMulInteger", "product", cost="product"),
    Operator("MatMulIntegerToFloat", "product", cost="product"),
    Operator("MatMulNBits", "product", cost="product", packed_inputs=(1, 3)),
    Operator("MoE", "product", cost="experts"),
    Operator("MultiHeadAttention", "product", cost="attention", dispatch="product"),
    Operator("PackedAttention", "product", cost="attention"),
    Operator("PackedMultiHeadAttention", "product", cost="attention"),
    Operator("QAttention", "product"),
    Operator("QGemm", "product", cost="gemm", in_whole_numbers=True),
    Operator("QLinearMatMul", "product", cost="product", in_whole_numbers=True),
    Operator("QMoE", "product", cost="experts", packed_inputs=(2, 5, 8)),
    Operator("TransposeMatMul", "product", cost="product", dispatch="product", linearity="multiplicative"),
    # recurrent
    Operator("DynamicQuantizeLSTM", "recurrent", cost="recurrent", dispatch="recurrent", launches="one a step"),
    Operator("GRU", "recurrent", cost="recurrent", dispatch="recurrent", launches="one a step"),
    Operator("LSTM", "recurrent", cost="recurrent", dispatch="recurrent", launches="one a step"),
    Operator("Loop", "recurrent", cost="move", bodies=("body",)),
    Operator("RNN", "recurrent", cost="recurrent", dispatch="recurrent", launches="one a step"),
    Operator("Scan", "recurrent", cost="move", bodies=("body",)),
    # normalisation
    Operator("BiasSoftmax", "normalisation", kind="softmax", element_flops=14, dispatch="reducing", keeps_shape=True),
    Operator("LogSoftmax", "normalisation", kind="softmax", element_flops=14, dispatch="reducing", keeps_shape=True,
             in_place=(0,), changed_in=(13,)),
    Operator("Softmax", "normalisation", kind="softmax", element_flops=13, dispatch="reducing", keeps_shape=True, in_place=(0,),
             changed_in=(13,)),
    Operator("EmbedLayerNormalization", "normalisation", kind="layer norm", table_inputs=(2, 3, 4), dispatch="reducing",
             index_input=0),
    Operator("LayerNormalization", "normalisation", kind="layer norm", element_flops=8, dispatch="reducing"),
    Operator("RMSNormalization", "normalisation", kind="layer norm"),
    Operator("SimplifiedLayerNormalization", "normalisation", kind="layer norm", dispatch="reducing"),
    Operator("SkipLayerNormalization", "normalisation", kind="layer norm", element_flops=9, dispatch="reducing"),
    Operator("SkipSimplifiedLayerNormalization", "normalisation", kind="layer norm", dispatch="reducing"),
    Operator("BatchNormalization", "normalisation", kind="channel norm", element_flops=2, dispatch="reducing",
             positive_inputs=True, linearity="convolutional"),
    Operator("GroupNorm", "normalisation", kind="channel norm", element_flops=8),
    Operator("GroupNormalization", "normalisation", kind="channel norm", changed_in=(21,)),
    Operator("InstanceNormalization", "normalisation", kind="channel norm", element_flops=8, dispatch="reducing"),
    Operator("SkipGroupNorm", "normalisation", kind="channel norm"),
    Operator("LRN", "normalisation", element_flops=12, linearity="convolutional"),
    Operator("LpNormalization", "normalisation"),
    Operator("MeanVarianceNormalization", "normalisation"),
    # reduction
    Operator("AveragePool", "reduction", kind="pool", cost="window", dispatch="reducing", linearity="convolutional",
             ceiling_changed_in=(19,)),
    Operator("GlobalAveragePool", "reduction", kind="pool", cost="reduction", dispatch="reducing", linearity="convolutional"),
    Operator("GlobalLpPool", "reduction", kind="pool", cost="reduction"),
    Operator("GlobalMaxPool", "reduction", kind="pool", cost="reduction", dispatch="reducing"),
    Operator("LpPool", "reduction", kind="pool", changed_in=(18,)),
    Operator("MaxPool", "reduction", kind="pool", cost="window", dispatch="reducing", linearity="convolutional"),
    Operator("ArgMax", "reduction", cost="reduction"),
    Operator("ArgMin", "reduction", cost="reduction"),
    Operator("CumSum", "reduction"),
    Operator("MaxRoiPool", "reduction"),
    Operator("NhwcMaxPool", "reduction"),
    Operator("QLinearAveragePool", "reduction", in_whole_numbers=True),
    Operator("QLinearGlobalAveragePool", "reduction", in_whole_numbers=True),
    Operator("ReduceL1", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceL2", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceLogSum", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceLogSumExp", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceMax", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceMean", "reduction", cost="reduction", dispatch="reducing", linearity="linear", input_since=(18, "axes")),
    Operator("ReduceMin", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceProd", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    Operator("ReduceSum", "reduction", cost="reduction", dispatch="reducing", linearity="linear", input_since=(13, "axes")),
    Operator("ReduceSumInteger", "reduction", cost="reduction"),
    Operator("ReduceSumSquare", "reduction", cost="reduction", dispatch="reducing", input_since=(18, "axes")),
    # elementwise
    Operator("Abs", "elementwise", keeps_shape=True, in_place=(0,)),
    Operator("Acos", "elementwise", slow_on_cpu=True),
    Operator("Add", "elementwise", in_place=(0, 1), linearity="linear"),
    Operator("And", "elementwise", linearity="linear"),
    Operator("Asin", "elementwise", slow_on_cpu=True),
    Operator("Atan", "elementwise", slow_on_cpu=True),
    Operator("BiasAdd", "elementwise"),
    Operator("BiasGelu", "elementwise", element_flops=16, keeps_shape=True, linearity="multiplicative"),
    Operator("BiasSplitGelu", "elementwise"),
    Operator("BitShift", "elementwise"),
    Operator("Ceil", "elementwise", in_place=(0,)),
    Operator("Celu", "elementwise"),
    Operator("Clip", "elementwise", keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Cos", "elementwise"),
    Operator("Cosh", "elementwise", time_by_values=True, slow_on_cpu=True),
    Operator("Div", "elementwise", positive_inputs=True, in_place=(0, 1), linearity="multiplicative"),
    Operator("Dropout", "elementwise", random=True),
    Operator("Elu", "elementwise", keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Equal", "elementwise", linearity="linear"),
    Operator("Erf", "elementwise", element_flops=10, keeps_shape=True, linearity="multiplicative"),
    Operator("Exp", "elementwise", element_flops=10, keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("FastGelu", "elementwise", element_flops=15, keeps_shape=True, linearity="multiplicative"),
    Operator("Floor", "elementwise", in_place=(0,)),
    Operator("Gelu", "elementwise", element_flops=15, keeps_shape=True, linearity="multiplicative"),
    Operator("Greater", "elementwise", linearity="linear"),
    Operator("GreaterOrEqual", "elementwise", linearity="linear"),
    Operator("HardSigmoid", "elementwise", element_flops=3, keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("HardSwish", "elementwise", element_flops=4, keeps_shape=True, linearity="multiplicative"),
    Operator("IsInf", "elementwise"),
    Operator("IsNaN", "elementwise"),
    Operator("LeakyRelu", "elementwise", keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Less", "elementwise", linearity="linear"),
    Operator("LessOrEqual", "elementwise", linearity="linear"),
    Operator("Log", "elementwise", element_flops=10, positive_inputs=True, keeps_shape=True, in_place=(0,)),
    Operator("Max", "elementwise", linearity="multiplicative"),
    Operator("Mean", "elementwise", linearity="linear"),
    Operator("Min", "elementwise", linearity="multiplicative"),
    Operator("Mish", "elementwise", linearity="multiplicative"),
    Operator("Mod", "elementwise", positive_inputs=True),
    Operator("Mul", "elementwise", in_place=(0, 1), linearity="multiplicative"),
    Operator("Neg", "elementwise", keeps_shape=True, in_place=(0,), linearity="linear"),
    Operator("Not", "elementwise", in_place=(0,), linearity="linear"),
    Operator("Or", "elementwise", linearity="linear"),
    Operator("PRelu", "elementwise", time_by_values=True, linearity="multiplicative"),
    Operator("Pow", "elementwise", element_flops=10, positive_inputs=True, linearity="multiplicative"),
    Operator("QLinearAdd", "elementwise", in_whole_numbers=True),
    Operator("QLinearLeakyRelu", "elementwise", in_whole_numbers=True),
    Operator("QLinearMul", "elementwise", in_whole_numbers=True),
    Operator("QLinearSigmoid", "elementwise", in_whole_numbers=True),
    Operator("QuickGelu", "elementwise", element_flops=12, keeps_shape=True, linearity="multiplicative"),
    Operator("Reciprocal", "elementwise", positive_inputs=True, keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Relu", "elementwise", keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("RotaryEmbedding", "elementwise", element_flops=3, table_inputs=(2, 3), index_input=1),
    Operator("Round", "elementwise"),
    Operator("Selu", "elementwise", in_place=(0,), linearity="multiplicative"),
    Operator("Shrink", "elementwise", time_by_values=True),
    Operator("Sigmoid", "elementwise", element_flops=10, keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Sign", "elementwise"),
    Operator("Silu", "elementwise", linearity="multiplicative"),
    Operator("Sin", "elementwise"),
    Operator("Sinh", "elementwise", time_by_values=True, slow_on_cpu=True),
    Operator("Softplus", "elementwise", keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("Softsign", "elementwise", in_place=(0,)),
    Operator("Sqrt", "elementwise", element_flops=4, positive_inputs=True, keeps_shape=True, in_place=(0,),
             linearity="multiplicative"),
    Operator("Sub", "elementwise", in_place=(0, 1), linearity="linear"),
    Operator("Sum", "elementwise", in_place=(0,), linearity="linear"),
    Operator("Swish", "elementwise", linearity="multiplicative"),
    Operator("Tan", "elementwise", time_by_values=True, slow_on_cpu=True),
    Operator("Tanh", "elementwise", element_flops=10, keeps_shape=True, in_place=(0,), linearity="multiplicative"),
    Operator("ThresholdedRelu", "elementwise", in_place=(0,)),
    Operator("Where", "elementwise", linearity="linear"),
    Operator("Xor", "elementwise"),
    # movement
    Operator("Concat", "movement", kind="joint", cost="move", launches="many inputs", linearity="linear"),
    Operator("Split", "movement", kind="joint", cost="move", launches="unequal parts", size_inputs=(1,), linearity="linear",
             input_since=(13, "split")),
    Operator("Expand", "movement", kind="part", cost="move", shape_input=1, linearity="linear"),
    Operator("Pad", "movement", kind="part", cost="move", size_inputs=(1, 3), linearity="linear"),
    Operator("Slice", "movement", kind="part", cost="move", size_inputs=(1, 2, 3, 4), linearity="linear"),
    Operator("Tile", "movement", kind="part", cost="move", size_inputs=(1,), linearity="linear"),
    Operator("DepthToSpace", "movement", kind="permutation", cost="move"),
    Operator("SpaceToDepth", "movement", kind="permutation", cost="move"),
    Operator("Transpose", "movement", kind="permutation", cost="move", linearity="linear"),
    Operator("Cast", "movement", kind="copy", cost="move", in_place=(0,), linearity="linear"),
    Operator("ConstantOfShape", "movement", kind="copy", size_inputs=(0,), linearity="linear", typed_by_attribute=True),
    Operator("DequantizeLinear", "movement", kind="copy"),
    Operator("QuantizeLinear", "movement", kind="copy"),
    Operator("EyeLike", "movement", typed_by_attribute=True),
    Operator("MemcpyFromHost", "movement", cost="move", copies=True),
    Operator("MemcpyToHost", "movement", cost="move", copies=True),
    Operator("Range", "movement", size_inputs=(0, 1, 2), linearity="linear"),
    Operator("ReorderInput", "movement", cost="move", linearity="linear"),
    Operator("ReorderOutput", "movement", cost="move", linearity="linear"),
    Operator("ReverseSequence", "movement"),
    Operator("Trilu", "movement"),
    # gather
    Operator("Compress", "gather", time_by_values=True, sized_by_values=True, waits_for_size=True),
    Operator("Gather", "gather", cost="move", table_inputs=(0,), index_input=1, linearity="linear"),
    Operator("GatherBlockQuantized", "gather", cost="move", table_inputs=(0, 2, 3), index_input=1, packed_inputs=(0, 3)),
    Operator("GatherElements", "gather", table_inputs=(0,), index_input=1, linearity="linear"),
    Operator("GatherND", "gather", table_inputs=(0,), index_input=1, index_per_axis=True, linearity="linear"),
    Operator("GridSample", "gather", changed_in=(20,)),
    Operator("Resize", "gather", size_inputs=(2, 3), float_sizes=True, single_inputs=(2,), changed_in=(11, 13, 18, 19)),
    Operator("RoiAlign", "gather", index_input=2, changed_in=(16,)),
    Operator("Scatter", "gather"),
    Operator("ScatterElements", "gather", index_input=1),
    Operator("ScatterND", "gather", index_input=1, index_per_axis=True),
    Operator("TensorScatter", "gather"),
    Operator("Upsample", "gather", size_inputs=(1,), float_sizes=True, changed_in=(9, 10)),
    # other
    Operator("Acosh", "other", time_by_values=True),
    Operator("AffineGrid", "other", sized_by_values=True),
    Operator("ArrayFeatureExtractor", "other", table_inputs=(0,)),
    Operator("Asinh", "other", time_by_values=True),
    Operator("Atanh", "other", time_by_values=True),
    Operator("Bernoulli", "other", sized_by_values=True, typed_by_attribute=True, random=True),
    Operator("BlackmanWindow", "other", sized_by_values=True),
    Operator("CenterCropPad", "other", size_inputs=(1,)),
    Operator("Col2Im", "other", sized_by_values=True, slow_on_cpu=False),
    Operator("Constant", "other", typed_by_attribute=True),
    Operator("Crop", "other", sized_by_values=True),
    Operator("DFT", "other", cost="transform", sized_by_values=True, changed_in=(20,)),
    Operator("DynamicQuantizeLinear", "other", slow_on_cpu=False),
    Operator("Flatten", "other", cost="view", linearity="linear"),
    Operator("HammingWindow", "other", sized_by_values=True),
    Operator("HannWindow", "other", sized_by_values=True),
    Operator("Hardmax", "other", time_by_values=True, changed_in=(13,)),
    Operator("Identity", "other", cost="view", linearity="linear"),
    Operator("If", "other", cost="move", bodies=("then_branch", "else_branch")),
    Operator("MaxUnpool", "other", sized_by_values=True),
    Operator("MelWeightMatrix", "other", sized_by_values=True),
    Operator("Multinomial", "other", typed_by_attribute=True, random=True),
    Operator("NonMaxSuppression", "other", time_by_values=True, sized_by_values=True, waits_for_size=True),
    Operator("NonZero", "other", time_by_values=True, sized_by_values=True, waits_for_size=True),
    Operator("OneHot", "other", size_inputs=(1,)),
    Operator("RandomNormal", "other", typed_by_attribute=True, random=True),
    Operator("RandomNormalLike", "other", typed_by_attribute=True, random=True),
    Operator("RandomUniform", "other", typed_by_attribute=True, random=True),
    Operator("RandomUniformLike", "other", typed_by_attribute=True, random=True),
    Operator("Reshape", "other", cost="view", shape_input=1, linearity="linear"),
    Operator("Rsqrt", "other", linearity="multiplicative"),
    Operator("STFT", "other", cost="transform", sized_by_values=True),
    Operator("Shape", "other", cost="move", launches="none"),
    Operator("Size", "other", launches="none"),
    Operator("SplitToSequence", "other", sized_by_values=True),
    Operator("Squeeze", "other", cost="view", size_inputs=(1,), linearity="linear", input_since=(13, "axes")),
    Operator("StringSplit", "other", sized_by_values=True),
    Operator("TopK", "other", time_by_values=True, size_inputs=(1,)),
    Operator("TreeEnsemble", "other", time_by_values=True, cost="trees"),
    Operator("TreeEnsembleClassifier", "other", time_by_values=True, cost="trees"),
    Operator("TreeEnsembleRegressor", "other", time_by_values=True, cost="trees"),
    Operator("Unique", "other", time_by_values=True, sized_by_values=True),
    Operator("Unsqueeze", "other", cost="view", size_inputs=(1,), linearity="linear", input_since=(13, "axes")),
)
OPERATORS = {operator.name: operator for operator in TABLE}
VIEWS = frozenset(operator.name for operator in TABLE if operator.cost == "view")
COPIES = frozenset(operator.name for operator in TABLE if operator.copies)
CONTROL_FLOW = frozenset(operator.name for operator in TABLE if operator.bodies)


def linearity_class(name: str) -> Literal["linear", "multiplicative", "nonlinear"]:
    """The class of an operator in the user's document on TVM.

    The document counts activations twice, as multiplicative and as nonlinear. Since its fully connected networks have only
    linear and multiplicative operators, activations are multiplicative here.
    """
    linearity = operator_row(name).linearity
    return "nonlinear" if linearity == "convolutional" else linearity


def furthest_from_linear(names: Iterable[str]) -> Literal["linear", "multiplicative", "nonlinear"]:
    """The class of a kernel with several operators."""
    classes = {linearity_class(name) for name in names}
    return "nonlinear" if "nonlinear" in classes else "multiplicative" if "multiplicative" in classes else "linear"


def network_kind(names: Iterable[str]) -> Literal["fully connected", "convolutional", "other"]:
    """The kind of network in the user's document on TVM, from its operator names. A final softmax does not change the kind."""
    rows = [operator_row(name) for name in set(names) - {"Softmax", "LogSoftmax"}]
    if any(row.dispatch == "convolution" for row in rows):
        return "other" if any(row.linearity == "nonlinear" for row in rows) else "convolutional"
    return "other" if furthest_from_linear(row.name for row in rows) == "nonlinear" else "fully connected"


def network_scale(nodes: int) -> NetworkScale:
    """The size of a network in the user's document on TVM, from its number of graph nodes. AlexNet, ResNet-18 and SqueezeNet
    are small, MobileNet and GoogLeNet medium, RegNet and DenseNet large."""
    return next(scale for scale, most in SCALES.items() if nodes <= most)
