"""The operators for which ONNX Runtime's CUDA provider has kernels: versions, types, and what they keep in host memory.

The table, cuda_kernels.json, comes from sessions on an NVIDIA H200 (recipes/cuda_kernels/probe_kernels.py), one for every
operator for which ONNX Runtime 1.31 has a schema. Control flow and operators on sequences can't be tried that way; they are
from ONNX Runtime's source (core/providers/cuda/controlflow and the list of kernels in cuda_execution_provider.cc).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("cuda_kernels.json")
# Operators with kernels that the table lacks: inputs and outputs that they keep in host memory.
FROM_SOURCE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "If": ((0,), ()), "Loop": ((0, 1), ()), "Scan": ((), ()),
    "SequenceAt": ((1,), ()), "SequenceErase": ((1,), ()), "SequenceInsert": ((2,), ()), "SequenceLength": ((), (0,)),
    "SequenceConstruct": ((), ()), "SequenceEmpty": ((), ()), "ConcatFromSequence": ((), ()),
}


class CudaKernel(NamedTuple):
    """A kernel of the CUDA provider: the positions of the inputs and outputs that it keeps in host memory."""

    host_inputs: tuple[int, ...]
    host_outputs: tuple[int, ...]


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def cuda_kernel(op_type: str, domain: str, opset: int, inputs: Sequence[str], outputs: Sequence[str]) -> CudaKernel | None:
    """The CUDA provider's kernel for an operator; None if it has none, so that the CPU provider runs the node.

    Args:
        op_type, domain: the operator; "" is ONNX's own domain.
        opset: the version of the domain's operator set that the model imports.
        inputs, outputs: element types by numpy's names, "" for one that is missing.
    """
    if not domain and op_type in FROM_SOURCE:
        return CudaKernel(*FROM_SOURCE[op_type])
    versions = _table()["kernels"].get(domain, {}).get(op_type, {})
    version = max((int(one) for one in versions if int(one) <= opset), default=None)
    kernel = versions.get(str(version))
    if kernel is None or not any(_takes(kernel, types, inputs, outputs) for types in kernel["types"]):
        return None
    return CudaKernel(tuple(kernel["host_inputs"]), tuple(kernel["host_outputs"]))


def cuda_operators() -> frozenset[str]:
    """The names of all operators of ONNX and of ONNX Runtime that the CUDA provider has a kernel for."""
    return frozenset(name for operators in _table()["kernels"].values() for name in operators)


def _takes(kernel: Mapping[str, Any], types: Mapping[str, Sequence[str]], inputs: Sequence[str],
           outputs: Sequence[str]) -> bool:
    """Whether a kernel takes tensors of these types; a variadic operator's last input stands for all that follow."""
    for formal, given in ((kernel["inputs"], inputs), (kernel["outputs"], outputs)):
        for place, dtype in enumerate(given):
            if not dtype or not formal:
                continue
            allowed = types.get(formal[min(place, len(formal) - 1)])
            if allowed is not None and dtype not in allowed:
                return False
    return True
