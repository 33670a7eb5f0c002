"""Which operations get a kernel of cuBLAS whose launch takes the host longer than that of others.

Before cuBLAS launches one of its `xmma` kernels, which include those made for Hopper, it asks CUDA twice for the kernel's
attributes (cudaFuncGetAttributes), as traces of the host's calls show. Kernels named `nvjet` take
longer to launch, too. Those of CUTLASS, for products with a vector (gemv), and for few rows (gemmSN) do not. A recurrent layer
multiplies in each step, so there it counts most.

cuBLAS chooses by rules that are not public. Two decision trees guess its choice from the sizes: slow_launches.json, learned by
recipes/cuda_kernels/learn_slow_launches.py from the names of the kernels that an NVIDIA H200 ran.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from hase.records.kernel_record import DTYPE_BYTES, Kernel
from hase.records.matrix_products import alignment, matrix_product
from hase.records.operators import operator_row
from hase.utils import files
from hase.utils.frozen import Frozen

TABLE = Path(__file__).with_name("slow_launches.json")
VERSION = 1
LEARN = "python recipes/cuda_kernels/learn_slow_launches.py"
PRODUCTS = ("gemm", "product")  # how the costs of an operator are counted that is one product of matrices
RECURRENT = ("GRU", "LSTM", "RNN")
PRODUCT_FEATURES = ("matrices", "m", "n", "k", "transposed", "element_bytes", "m_alignment", "n_alignment", "k_alignment")
RECURRENT_FEATURES = ("rows", "hidden_size", "columns", "directions", "element_bytes", "rows_times_columns")


class DecisionTree(Frozen):
    """A tree of yes and no; one entry of each tuple per node, the root first.

    Attributes:
        feature: the place of the number that is compared, -1 at a leaf.
        threshold: numbers up to it go left.
        left, right: the next node.
        slow: the answer at a leaf.
    """

    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    slow: tuple[bool, ...]

    def answer(self, numbers: Sequence[float]) -> bool:
        node = 0
        while (feature := self.feature[node]) >= 0:
            node = self.left[node] if numbers[feature] <= self.threshold[node] else self.right[node]
        return self.slow[node]


class SlowLaunches(Frozen):
    """`slow_launches.json`.

    Attributes:
        source: the device and the libraries whose kernels were learned from.
        products, recurrent: the trees for numbers as PRODUCT_FEATURES and RECURRENT_FEATURES have them.
    """

    version: int = VERSION
    source: str
    products: DecisionTree
    recurrent: DecisionTree


@functools.cache
def learned() -> SlowLaunches:
    return files.read_record(TABLE, SlowLaunches, VERSION, LEARN)


def product_numbers(kernel: Kernel) -> tuple[float, ...] | None:
    """PRODUCT_FEATURES of a kernel that is one product of matrices; None for others."""
    row = operator_row(kernel.op_type)
    if row.dispatch != "product" or row.cost not in PRODUCTS or not kernel.outputs or len(kernel.outputs[0].shape) < 2:
        return None
    product = matrix_product(kernel)
    return (*map(float, product), float(DTYPE_BYTES.get(kernel.dtype, 0)),
            *(float(alignment(size)) for size in (product.m, product.n, product.k)))


def recurrent_numbers(kernel: Kernel) -> tuple[float, ...] | None:
    """RECURRENT_FEATURES of a recurrent layer: in each step and direction, it multiplies `rows` by `hidden_size` numbers by as
    many rows of `columns`, those of all gates. None for other kernels, and where the sizes of the weights are not known."""
    if kernel.op_type not in RECURRENT or len(kernel.inputs) < 3 or len(kernel.inputs[2].shape) != 3:
        return None
    directions, columns, hidden_size = kernel.inputs[2].shape
    rows = kernel.inputs[0].shape[0 if kernel.attributes.get("layout") else 1]
    return tuple(map(float, (rows, hidden_size, columns, directions, DTYPE_BYTES.get(kernel.dtype, 0), rows * columns)))


def is_slow_to_launch(kernel: Kernel) -> bool:
    """Whether cuBLAS probably takes a kernel for it that takes the host longer to launch."""
    if numbers := product_numbers(kernel):
        return learned().products.answer(numbers)
    if numbers := recurrent_numbers(kernel):
        return learned().recurrent.answer(numbers)
    return False
