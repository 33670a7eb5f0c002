"""Sequence lengths for the inputs of a decoder's attention, chosen so that a run uses the whole cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

CACHE, LAST_PLACES, TOTAL = 3, 5, 6  # inputs of GroupQueryAttention: the cache of keys, the last place of each row, the length
COUNTED = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "ReduceSum", "ReduceMax", "Sub", "Gather")


def attention_lengths(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Values for the inputs that give GroupQueryAttention its lengths: the number of tokens in the cache and one more; 1 for a
    mask whose sum is the length. (A mask of zeros would give length 0, which the operator refuses.)

    Args:
        graph: of the model.
        dims: sizes of its dynamic dimensions.
    """
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input}
    maker = {out: node for node in graph.node for out in node.output if out}
    found = {}
    for node in graph.node:
        if node.op_type != "GroupQueryAttention" or len(node.input) <= TOTAL:
            continue
        cache = inputs.get(node.input[CACHE], ())
        cached = (cache[2].dim_value or dims.get(cache[2].dim_param, 0)) if len(cache) == 4 else 0
        for place, length in ((LAST_PLACES, cached), (TOTAL, cached + 1)):
            tensor = node.input[place]
            while tensor in maker and maker[tensor].op_type in COUNTED:
                tensor = maker[tensor].input[0]
            if tensor in inputs:
                found[tensor] = 1 if len(inputs[tensor]) > 1 else length
    return found
