"""The memory that a model takes under TVM: its weights, and the block of activations that TVM plans ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

from records.kernel_record import ModelRecord
from runtimes.tvm.lowering import bindings, relax_name
from utils.lazy import tvm


class Memory(NamedTuple):
    """MiB of a model's weights, of its inputs and outputs, and of the activations in between."""

    weights: float
    ends: float
    activations: float

    @property
    def peak(self) -> float:
        return self.weights + self.ends + self.activations


def planned_memory(module: Any, record: ModelRecord) -> Memory:
    """What a model's run takes at its peak, by TVM's own plan. Buffers inside of kernels are not counted.

    Args:
        module: of the calls of kernels, as `lower` gives it.
        record: of the same.
    """
    passes = tvm.relax.transform
    planned = tvm.transform.Sequential([passes.ToNonDataflow(), passes.RemovePurityChecking(), passes.CallTIRRewrite(),
                                        passes.StaticPlanBlockMemory()])(module)
    activations = sum(int(binding.value.args[0].values[0].value) for binding in bindings(planned["main"])
                      if relax_name(binding.value) == "relax.memory.alloc_storage")
    ends = sum(one.bytes for one in (*record.inputs.values(), *record.outputs.values()))
    return Memory(record.weight_bytes / 2**20, ends / 2**20, activations / 2**20)
