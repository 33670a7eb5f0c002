"""cuDNN's legacy convolution API, called with ctypes on the library that torch has loaded.

torch's own interface lets cuDNN choose; only this one takes the algorithm. It is deprecated since cuDNN 9 and still exported.
Source: cuDNN API reference, `cudnn_cnn` library. Descriptors can be made without a GPU; a handle needs one.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hase.extras.convolutions.algorithms import ON_GPU, ConvShape, NotSupported
from hase.utils.errors import UserError
from hase.utils.lazy import torch

if TYPE_CHECKING:
    Tensor = torch.Tensor

SUCCESS = 0
NCHW = 0  # cudnnTensorFormat_t
DTYPES = {"fp32": 0, "fp16": 2}  # cudnnDataType_t
FLOAT = DTYPES["fp32"]
CROSS_CORRELATION = 1  # cudnnConvolutionMode_t
DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3  # cudnnMathType_t; the default allows TF32 from Ampere on
MOST_CHOICES = 8  # algorithms that the heuristic ranks
MAPPED = Path("/proc/self/maps")


class _Choice(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t."""

    _fields_ = [("algorithm", c_int), ("status", c_int), ("time_ms", c_float), ("memory", c_size_t), ("determinism", c_int),
                ("math", c_int), ("reserved", c_int * 3)]


def _path_of_loaded() -> str:
    """The file of the libcudnn that this process has loaded; its plain name where that can't be seen."""
    torch.backends.cudnn.version()  # torch loads it at the latest now
    if not MAPPED.exists():
        return "libcudnn.so.9"
    paths = {line.split()[-1] for line in MAPPED.read_text(encoding="utf-8").splitlines() if "/libcudnn.so" in line}
    return min(paths, default="libcudnn.so.9")


@functools.cache
def library() -> ctypes.CDLL:
    """cuDNN, with the types of its functions.

    Raises:
        UserError: torch has no cuDNN, or that one lacks the legacy API.
    """
    if not torch.backends.cudnn.is_available():
        raise UserError("cuDNN is not available: this torch was built without it; install the wheels of requirements.txt")
    try:
        loaded = ctypes.CDLL(_path_of_loaded())
        loaded.cudnnGetErrorString.restype = c_char_p
        loaded.cudnnConvolutionForward.argtypes = [
            c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_size_t, c_void_p, c_void_p,
            c_void_p]
        loaded.cudnnGetConvolutionForwardWorkspaceSize.argtypes = [c_void_p] * 5 + [c_int, POINTER(c_size_t)]
        loaded.cudnnGetConvolutionForwardAlgorithm_v7.argtypes = [c_void_p] * 5 + [c_int, POINTER(c_int), POINTER(_Choice)]
        loaded.cudnnSetStream.argtypes = [c_void_p, c_void_p]
    except (OSError, AttributeError) as error:
        raise UserError(f"cuDNN is not available: {error}; algorithms are forced through its legacy API, which cuDNN 8 and 9 "
                        "have") from None
    return loaded


def check(status: int) -> None:
    """Raises `NotSupported` with cuDNN's status and, where it gives one, its reason, unless a call succeeded."""
    if status == SUCCESS:
        return
    name = library().cudnnGetErrorString(status).decode()
    raise NotSupported(name if "UNKNOWN" not in name else f"cuDNN status {status}", _last_error())


def _last_error() -> str:
    """cuDNN's text for the last error of this thread; "" before version 9, which has none."""
    if not hasattr(library(), "cudnnGetLastErrorString"):
        return ""
    text = ctypes.create_string_buffer(1024)
    library().cudnnGetLastErrorString(text, c_size_t(len(text)))
    return text.value.decode(errors="replace").strip()


def _free_with(owner: object, function: str, handle: c_void_p) -> None:
    """Calls cuDNN's `function` on `handle` when `owner` goes; not when Python ends, since CUDA may have ended before."""
    weakref.finalize(owner, getattr(library(), function), handle).atexit = False


class Descriptors:
    """cuDNN's descriptors of one convolution. They are freed with this object.

    Raises:
        NotSupported: cuDNN refuses the shape.
    """

    def __init__(self, shape: ConvShape, tf32: bool) -> None:
        self.math = TENSOR_OP_MATH if shape.dtype == "fp16" else DEFAULT_MATH if tf32 else FMA_MATH
        dtype = DTYPES[shape.dtype]
        self.images, self.output = self._made("Tensor"), self._made("Tensor")
        self.weights, self.convolution = self._made("Filter"), self._made("Convolution")
        check(library().cudnnSetTensor4dDescriptor(
            self.images, NCHW, dtype, shape.batch, shape.in_channels, shape.height, shape.width))
        check(library().cudnnSetFilter4dDescriptor(
            self.weights, dtype, NCHW, shape.out_channels, shape.in_channels // shape.groups, *shape.kernel))
        check(library().cudnnSetConvolution2dDescriptor(
            self.convolution, *shape.padding, *shape.stride, *shape.dilation, CROSS_CORRELATION, FLOAT))
        check(library().cudnnSetConvolutionGroupCount(self.convolution, shape.groups))
        self.set_math(self.math)
        sizes = [c_int() for _ in range(4)]
        check(library().cudnnGetConvolution2dForwardOutputDim(self.convolution, self.images, self.weights, *map(byref, sizes)))
        self.output_shape = tuple(size.value for size in sizes)
        check(library().cudnnSetTensor4dDescriptor(self.output, NCHW, dtype, *self.output_shape))

    @property
    def handles(self) -> tuple[c_void_p, ...]:
        """In the order in which cuDNN's functions take them."""
        return self.images, self.weights, self.convolution, self.output

    def _made(self, kind: str) -> c_void_p:
        descriptor = c_void_p()
        check(getattr(library(), f"cudnnCreate{kind}Descriptor")(byref(descriptor)))
        _free_with(self, f"cudnnDestroy{kind}Descriptor", descriptor)
        return descriptor

    def set_math(self, math: int) -> None:
        """Sets cudnnMathType_t."""
        check(library().cudnnSetConvolutionMathType(self.convolution, math))


class Choice(NamedTuple):
    """An algorithm that cuDNN's heuristic names, and the math type that goes with it."""

    algorithm: str
    math: int


class Cudnn:
    """A handle of cuDNN on the current GPU.

    Raises:
        UserError: there is no GPU, or no cuDNN.
    """

    def __init__(self) -> None:
        self._handle = c_void_p()
        try:
            check(library().cudnnCreate(byref(self._handle)))
        except NotSupported as error:
            raise UserError(f"cuDNN is not available: {error}") from None
        _free_with(self, "cudnnDestroy", self._handle)

    def use_stream(self) -> None:
        """From now on cuDNN works on torch's current stream."""
        check(library().cudnnSetStream(self._handle, torch.cuda.current_stream().cuda_stream))

    def workspace_bytes(self, descriptors: Descriptors, number: int) -> int:
        """Bytes that an algorithm needs.

        Raises:
            NotSupported: it can't compute this convolution.
        """
        size = c_size_t()
        check(library().cudnnGetConvolutionForwardWorkspaceSize(
            self._handle, *descriptors.handles, number, byref(size)))
        return size.value

    def choices(self, descriptors: Descriptors) -> list[Choice]:
        """The algorithms that cuDNN's heuristic names for a convolution, the best first."""
        ranked, count = (_Choice * MOST_CHOICES)(), c_int()
        check(library().cudnnGetConvolutionForwardAlgorithm_v7(
            self._handle, *descriptors.handles, MOST_CHOICES, byref(count), ranked))
        names = {choice.number: name for name, choice in ON_GPU.items() if choice.number is not None}
        return [Choice(names[choice.algorithm], choice.math) for choice in ranked[:count.value]
                if choice.status == SUCCESS and choice.algorithm in names]

    def forward(self, descriptors: Descriptors, number: int, images: Tensor, weights: Tensor, output: Tensor,
                workspace: Tensor | None) -> None:
        """Computes `output`; does not wait for the GPU.

        Raises:
            NotSupported: cuDNN refuses.
        """
        check(library().cudnnConvolutionForward(
            self._handle, byref(_ONE), descriptors.images, images.data_ptr(), descriptors.weights, weights.data_ptr(),
            descriptors.convolution, number, workspace.data_ptr() if workspace is not None else None,
            workspace.numel() if workspace is not None else 0, byref(_ZERO), descriptors.output, output.data_ptr()))


_ONE, _ZERO = c_float(1.0), c_float(0.0)
