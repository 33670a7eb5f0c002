"""Which CUDA kernels belong to which convolution algorithm of cuDNN, by their names.

cuDNN documents none of these names. They are those that cuDNN 9.19 launched on an H200 in six models in single precision, at
batch 1 and 16; those of fused Winograd and `scudnn` are of older GPUs and versions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_METHODS = {  # what computes a convolution, and a pattern that the names of its kernels alone contain
    "direct": r"direct_kernel|depthwise",
    "gemm": r"im2col|explicit_convolve",
    "implicit gemm": r"implicit_convolve",
    "implicit precomp gemm": r"fprop|scudnn(?!_winograd)",
    "fft": r"fft",
    "winograd": r"winograd",
}
_METHOD_OF = {"fft tiling": "fft", "winograd nonfused": "winograd"}  # where it is not the algorithm's own name
_NEVER_BESIDES = {"fft": r"fft1d", "fft tiling": r"fft2d_\w+_(16x16|64x64)|DSE::", "winograd": r"nonfused"}
_PRODUCTS = ("gemm", "implicit gemm", "implicit precomp gemm")
_PLAIN_PRODUCT = r"gemm|cutlass"


def unexpected(algorithm: str, kernels: Iterable[str], pointwise: bool = False) -> str:
    """What is wrong with the CUDA kernels that a layer launched under `algorithm`; "" if they are what it should launch.

    Args:
        algorithm: that ran; one without kernels of its own may launch any.
        kernels: the names.
        pointwise: whether the filter is 1x1 with stride 1 and no padding. Then the windows are the image itself, and a plain
            matrix product is what each algorithm of that kind comes to.
    """
    names = list(dict.fromkeys(kernels))
    own = _METHOD_OF.get(algorithm, algorithm)
    if own not in _METHODS:
        return ""
    others = [pattern for method, pattern in _METHODS.items() if method != own]
    never = "|".join([*others, *filter(None, [_NEVER_BESIDES.get(algorithm)])])
    if strange := [name for name in names if re.search(never, name, re.IGNORECASE)]:
        return f"{algorithm} launched {', '.join(strange)}"
    should = _METHODS[own] + (f"|{_PLAIN_PRODUCT}" if pointwise and algorithm in _PRODUCTS else "")
    if not any(re.search(should, name, re.IGNORECASE) for name in names):
        return f"no kernel of {algorithm} among {', '.join(names) or 'none'}"
    return ""


def counted(kernels: Iterable[str]) -> tuple[str, ...]:
    """Each name once, with how often it was launched if more than once (`3 x name`), in the order of the first launches.

    A layer may launch thousands of kernels of a few names. Names that have their count stay as they are.
    """
    return tuple(name if count == 1 else f"{count} x {name}" for name, count in Counter(kernels).items())
