"""Inputs of any size from one block of GPU memory, so that opening a carrier copies almost nothing to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from records.elements import numpy_dtype, session_dtype
from runtimes.ort.building.dummy_data import random_floats
from runtimes.ort.runner import device_binding

if TYPE_CHECKING:
    import onnxruntime

RANDOM_BYTES = 64 << 20  # made on the host once; a block repeats it
LEAST_BYTES = 4 * RANDOM_BYTES


class SharedMemory:
    """A block of random numbers on the GPU for each floating type. It grows as inputs need more."""

    def __init__(self) -> None:
        self._blocks: dict[str, Any] = {}

    def address(self, dtype: str, size: int) -> int:
        """The address on the GPU of at least `size` bytes of random numbers of type `dtype`. Needs torch with CUDA."""
        block = self._blocks.get(dtype)
        if block is None or block.numel() * block.element_size() < size:
            self._blocks.pop(dtype, None)
            values = torch.from_numpy(random_floats((RANDOM_BYTES // np.dtype(dtype).itemsize,), dtype)).cuda()
            self._blocks[dtype] = block = values.repeat(-(-max(size, LEAST_BYTES) // RANDOM_BYTES))
            torch.cuda.synchronize()
        return int(block.data_ptr())

    def bind(self, session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray]) -> Callable[[], Any]:
        """A function that runs the session once. Inputs that `feed` lacks are read from the start of the block."""
        # a carrier's outputs are shapes: on the GPU, each would cost a copy that belongs to no kernel
        binding = device_binding(session, feed, "cuda", outputs_on="cpu")
        shared = {value.name: (session_dtype(value.type), list(value.shape)) for value in session.get_inputs()
                  if value.name not in feed}
        largest: dict[str, int] = {}
        for dtype, shape in shared.values():
            largest[dtype] = max(largest.get(dtype, 0), int(np.prod(shape)) * np.dtype(dtype).itemsize)
        addresses = {dtype: self.address(dtype, size) for dtype, size in largest.items()}
        for name, (dtype, shape) in shared.items():
            binding.bind_input(name, "cuda", 0, numpy_dtype(dtype), shape, addresses[dtype])
        return lambda: session.run_with_iobinding(binding)
