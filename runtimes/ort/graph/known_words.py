"""Words for the text inputs of a model. Some operators refuse words that are not in their vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtimes.ort.graph.parsed_nodes import attribute_value
from utils.lazy import onnx

TAUGHT = ("cats_strings", "keys_strings", "classlabels_strings", "pool_strings")  # attributes of encoders and n-gram operators
UNKNOWN = ""


def first_taught(attributes: Mapping[str, Any]) -> str:
    """The first word of an operator's vocabulary; UNKNOWN if it has none."""
    return next((str(attributes[name][0]) for name in TAUGHT if attributes.get(name)), UNKNOWN)


def known_words(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """By text input that encoders read: one word per column, or one word for all columns.

    The encoders are assumed to be in the order of the columns that they read, as converters of pipelines write them.
    """
    found = {}
    for value in graph.input:
        kind = value.type.tensor_type
        if kind.elem_type != onnx.TensorProto.STRING:
            continue
        reached, words = {value.name}, []
        for node in graph.node:
            if not reached & set(node.input):
                continue
            word = first_taught({one.name: attribute_value(one) for one in node.attribute if one.name in TAUGHT})
            if word:
                words.append(word)
            else:
                reached.update(node.output)
        columns = kind.shape.dim[-1].dim_value if len(kind.shape.dim) > 1 else 1
        if words:
            found[value.name] = words[:columns] if len(words) >= columns else words[:1]
    return found
