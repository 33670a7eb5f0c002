"""The algorithms that compute convolutions, the CUDA kernels that each launches, and the shapes of convolutions.

A GPU's algorithms are cuDNN's (`cudnnConvolutionFwdAlgo_t` in the cuDNN API reference). A CPU's are torch's own and two of the
package aithree, which is imported as `ai3`.

cuDNN documents no kernel names. The patterns here come from cuDNN 9.19 on an H200, with six models in single precision at batch
1 and 16; those of fused Winograd and `scudnn` come from older GPUs and versions.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hase.utils.errors import UserError
from hase.utils.lazy import torch

if TYPE_CHECKING:
    Convolution = torch.nn.Conv2d
    Tensor = torch.Tensor


GUESS = "guess"
DEFAULT = "default"
HOPPER = (9, 0)  # compute capability
BYTES = {"fp32": 4, "fp16": 2}
Pair = tuple[int, int]
_METHODS = {  # by method: a pattern that only the names of its kernels contain
    "direct": r"direct_kernel|depthwise",
    "gemm": r"im2col|explicit_convolve",
    "implicit gemm": r"implicit_convolve",
    "implicit precomp gemm": r"fprop|scudnn(?!_winograd)",
    "fft": r"fft",
    "winograd": r"winograd",
}
_METHOD_OF = {"fft tiling": "fft", "winograd nonfused": "winograd"}  # by algorithm, if the names differ
# By algorithm: a pattern of kernels that it never launches, besides those of other methods.
_OTHER_KERNELS = {"fft": r"fft1d", "fft tiling": r"fft2d_\w+_(16x16|64x64)|DSE::", "winograd": r"nonfused"}
_MATRIX_PRODUCTS = ("gemm", "implicit gemm", "implicit precomp gemm")
_PLAIN_PRODUCT = r"gemm|cutlass"


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution; `number` is cuDNN's (None on a CPU, or if cuDNN or torch chooses)."""

    name: str
    meaning: str
    number: int | None = None


GPU_ALGORITHMS = {algorithm.name: algorithm for algorithm in (
    Algorithm("direct", "straightforward convolution; cuDNN names it but never implemented it", 3),
    Algorithm("gemm", "a matrix of all windows (im2col), then one matrix product", 2),
    Algorithm("implicit gemm", "a matrix product that reads the windows from the image", 0),
    Algorithm("implicit precomp gemm", "the same with indices that are computed first", 1),
    Algorithm("fft", "products of Fourier transforms of whole images", 4),
    Algorithm("fft tiling", "products of Fourier transforms of tiles", 5),
    Algorithm("winograd", "Winograd's transform in one kernel; 3x3 filters", 6),
    Algorithm("winograd nonfused", "Winograd's transform in several kernels; 3x3 and 5x5 filters", 7),
    Algorithm(GUESS, "cuDNN's own choice for each layer, by its heuristic"),
    Algorithm(DEFAULT, "what torch runs: cuDNN by its newer interface"),
)}
CPU_ALGORITHMS = {algorithm.name: algorithm for algorithm in (
    Algorithm(DEFAULT, "what torch runs: oneDNN"),
    Algorithm("direct", "straightforward convolution, of the package aithree"),
    Algorithm("smm", "a scalar of the filter times a matrix of the image, summed; of the package aithree"),
)}
ALGORITHMS = {"cuda": GPU_ALGORITHMS, "cpu": CPU_ALGORITHMS}  # by device
FROM_AI3 = ("direct", "smm")  # on a CPU


def algorithm_named(text: str, device: str) -> Algorithm:
    """Finds an algorithm by name; underscores and dashes count as blanks. Raises UserError if the device lacks it."""
    name = " ".join(re.split(r"[\s_-]+", text.strip().lower()))
    known = ALGORITHMS[device]
    if name in known:
        return known[name]
    if device == "cpu" and name in GPU_ALGORITHMS:
        raise UserError(f"cuDNN is not available: algorithm {name} needs an NVIDIA GPU, and this device is a CPU; its "
                        f"algorithms are {', '.join(known)}")
    near = difflib.get_close_matches(name, known, 3, 0.7)
    raise UserError(f"{text}: no such algorithm on {device}"
                    + (f"; did you mean {' or '.join(near)}?" if near else f" (it has {', '.join(known)})"))


def never_runs(algorithm: Algorithm, device: str, capability: tuple[int, int] | None = None) -> str:
    """Why no layer can run this algorithm on the device; "" if some can. `capability` is the GPU's, None if unknown."""
    if device != "cuda":
        return ""
    if algorithm.name == "direct":
        return "cuDNN never implemented it"
    if algorithm.name == "winograd" and capability is not None and capability >= HOPPER:
        return "cuDNN does not support it since Hopper (compute capability 9.0)"
    return ""


class NotSupported(Exception):
    """A layer cannot run under an algorithm. It holds the library's status (`CUDNN_STATUS_NOT_SUPPORTED`) and reason."""

    def __init__(self, status: str, detail: str = "") -> None:
        super().__init__(f"{status}: {detail}" if detail else status)
        self.status, self.detail = status, detail


@dataclass(frozen=True)
class ConvShape:
    """The shape of a 2D convolution and of its input. Pairs are (height, width); `padding` is per side."""

    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    bias: bool
    dtype: str

    @property
    def out_size(self) -> Pair:
        """Height and width of the output."""
        sizes = [(size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for size, padding, dilation, kernel, stride
                 in zip((self.height, self.width), self.padding, self.dilation, self.kernel, self.stride, strict=True)]
        return sizes[0], sizes[1]

    @property
    def flops(self) -> int:
        """Floating-point operations of a direct convolution; a multiply-add counts as two."""
        out_height, out_width = self.out_size
        windows = self.batch * out_height * out_width
        return 2 * windows * self.out_channels * self.kernel[0] * self.kernel[1] * (self.in_channels // self.groups)

    @property
    def bytes_moved(self) -> int:
        """Bytes of the input, the weights and the output."""
        out_height, out_width = self.out_size
        images = self.batch * (self.in_channels * self.height * self.width + self.out_channels * out_height * out_width)
        weights = self.out_channels * (self.in_channels // self.groups) * self.kernel[0] * self.kernel[1]
        return BYTES[self.dtype] * (images + weights)


def convolution_shape(layer: Convolution, images: Tensor) -> ConvShape:
    """The shape of a layer for a batch of images. Raises NotSupported if it does not pad with zeros, alike on both sides."""
    if layer.padding_mode != "zeros":
        raise NotSupported("PADDING", f"padding mode {layer.padding_mode}")
    kernel, dilation, padding = _pair(layer.kernel_size), _pair(layer.dilation), layer.padding
    if isinstance(padding, str):
        whole = (0, 0) if padding == "valid" else (dilation[0] * (kernel[0] - 1), dilation[1] * (kernel[1] - 1))
        if whole[0] % 2 or whole[1] % 2:
            raise NotSupported("PADDING", f"padding {padding!r} of an even kernel: its sides differ")
        padding = (whole[0] // 2, whole[1] // 2)
    return ConvShape(
        batch=images.shape[0], in_channels=layer.in_channels, out_channels=layer.out_channels, height=images.shape[2],
        width=images.shape[3], kernel=kernel, stride=_pair(layer.stride), padding=_pair(padding), dilation=dilation,
        groups=layer.groups, bias=layer.bias is not None, dtype="fp16" if images.dtype == torch.float16 else "fp32")


def _pair(sizes: tuple[int, ...]) -> Pair:
    return sizes[0], sizes[1]


def describe_unexpected(algorithm: str, kernels: Iterable[str], pointwise: bool = False) -> str:
    """Says which of a layer's CUDA kernels do not belong to `algorithm`; "" if they are as expected.

    An algorithm without kernels of its own may launch any. For a `pointwise` filter (1x1, stride 1, no padding), the windows
    are the image itself, so each matrix-product algorithm becomes a plain matrix product.
    """
    names = list(dict.fromkeys(kernels))
    method = _METHOD_OF.get(algorithm, algorithm)
    if method not in _METHODS:
        return ""
    foreign = [pattern for name, pattern in _METHODS.items() if name != method]
    if algorithm in _OTHER_KERNELS:
        foreign.append(_OTHER_KERNELS[algorithm])
    if strange := [name for name in names if re.search("|".join(foreign), name, re.IGNORECASE)]:
        return f"{algorithm} launched {', '.join(strange)}"
    own = _METHODS[method] + (f"|{_PLAIN_PRODUCT}" if pointwise and algorithm in _MATRIX_PRODUCTS else "")
    if not any(re.search(own, name, re.IGNORECASE) for name in names):
        return f"no kernel of {algorithm} among {', '.join(names) or 'none'}"
    return ""


def count_names(kernels: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in order of first launch, as `3 x name` if launched more than once; names with a count stay."""
    return tuple(name if count == 1 else f"{count} x {name}" for name, count in Counter(kernels).items())
