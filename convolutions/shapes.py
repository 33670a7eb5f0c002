"""What a convolution computes: its shapes, its operations and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from utils.lazy import torch

if TYPE_CHECKING:
    Convolution = torch.nn.Conv2d
    Tensor = torch.Tensor

BYTES = {"fp32": 4, "fp16": 2}
Pair = tuple[int, int]


class NotSupported(Exception):
    """A layer can't run under an algorithm.

    Attributes:
        status: the library's word for it, e.g. `CUDNN_STATUS_NOT_SUPPORTED`.
        detail: the library's reason; "" where it gives none.
    """

    def __init__(self, status: str, detail: str = "") -> None:
        super().__init__(f"{status}: {detail}" if detail else status)
        self.status, self.detail = status, detail


@dataclass(frozen=True)
class ConvShape:
    """One 2D convolution with its input's size. Pairs are (height, width); `padding` is that of each side."""

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
        """Floating-point operations of the definition, a multiplication and an addition each."""
        out_height, out_width = self.out_size
        windows = self.batch * out_height * out_width
        return 2 * windows * self.out_channels * self.kernel[0] * self.kernel[1] * (self.in_channels // self.groups)

    @property
    def bytes_moved(self) -> int:
        """Bytes of input, weights and output."""
        out_height, out_width = self.out_size
        images = self.batch * (self.in_channels * self.height * self.width + self.out_channels * out_height * out_width)
        weights = self.out_channels * (self.in_channels // self.groups) * self.kernel[0] * self.kernel[1]
        return BYTES[self.dtype] * (images + weights)


def shape_of(layer: Convolution, images: Tensor) -> ConvShape:
    """The shape of a layer that gets `images`, batch × channels × height × width.

    Raises:
        NotSupported: it pads other than with zeros, or its sides differently.
    """
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
