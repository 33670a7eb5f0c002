"""Small language models for tests: folders as onnxruntime-genai's builder writes them, and plain ONNX decoders with a cache of
keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from decoders import CACHE, DecoderSize, Precision, write_decoder
from onnx import TensorProto, helper, numpy_helper

TINY = DecoderSize(layers=2, hidden=64, intermediate=128, heads=4, key_heads=2, words=512, positions=2048)
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"


def genai_folder(folder: Path, size: DecoderSize = TINY, precision: Precision = "fp16", provider: str = "cuda",
                 cuda_graph: bool = False, **search: Any) -> Path:
    """Writes a folder as onnxruntime-genai's builder does: a model with its weights beside it, and genai_config.json.

    Args:
        folder: where to; made if it is not there.
        size, precision: of the decoder.
        provider: `cuda` or `cpu`, for which the config says that it was built.
        cuda_graph: whether it asks for CUDA graphs.
        search: values of the config's `search` in place of the builder's.
    """
    path = write_decoder(folder, size, precision)
    config = {
        "model": {
            "context_length": size.positions,
            "decoder": {
                "session_options": {
                    "log_id": "onnxruntime-genai",
                    "provider_options": [{"cuda": {"enable_cuda_graph": str(int(cuda_graph))}}] if provider == "cuda" else []},
                "filename": path.name, "head_size": size.head, "hidden_size": size.hidden,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask",
                           "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
                "outputs": {"logits": "logits", "present_key_names": "present.%d.key",
                            "present_value_names": "present.%d.value"},
                "num_attention_heads": size.heads, "num_hidden_layers": size.layers, "num_key_value_heads": size.key_heads},
            "type": "llama", "vocab_size": size.words},
        "search": {"max_length": size.positions, "num_beams": 1, "past_present_share_buffer": True, **search}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass
class _Graph:
    """The nodes and weights of a graph that is being written."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, op_type: str, inputs: Sequence[str], name: str, output: str = "", **attributes: Any) -> str:
        """Adds a node; returns its output."""
        self.nodes.append(helper.make_node(op_type, list(inputs), [output or f"{name}/output_0"], name, **attributes))
        return output or f"{name}/output_0"

    def constant(self, name: str, values: Any) -> str:
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def product(self, tensor: str, name: str, rows: int, columns: int, output: str = "") -> str:
        """Adds a product with a matrix of random weights."""
        weights = (self.random.standard_normal((rows, columns)) / 8).astype(np.float32)
        return self.node("MatMul", [tensor, self.constant(f"{name}.weight", weights)], name, output)


def plain_decoder(size: DecoderSize = TINY, *, cached: bool = True, past: str = PAST, present: str = PRESENT,
                  name_of: Callable[[str], str] = lambda role: role) -> onnx.ModelProto:
    """A decoder of standard operators, in float32, which appends to its cache with Concat. Each head has keys of its own.

    Args:
        size: of the decoder.
        cached: whether it takes a cache; without one it runs the prompts of a pair of files.
        past, present: names of the caches, with places for the layer and for `key` or `value`.
        name_of: the name of the dimension `batch`, `sequence`, `past` or `total`.
    """
    graph, hidden = _Graph(), size.hidden
    batch, sequence, length, total = map(name_of, ("batch", "sequence", "past", "total"))
    split = graph.constant("split", np.array([0, 0, size.heads, size.head], np.int64))
    join = graph.constant("join", np.array([0, 0, hidden], np.int64))
    words = graph.constant("embed.weight", graph.random.standard_normal((size.words, hidden)).astype(np.float32))
    tensor = graph.node("Gather", [words, "input_ids"], "embed/Gather")
    for layer in range(size.layers):
        at, parts = f"layers.{layer}", {}
        for part in ("query", *CACHE):
            heads = graph.node("Reshape", [graph.product(tensor, f"{at}/{part}", hidden, hidden), split], f"{at}/{part}/heads")
            parts[part] = graph.node("Transpose", [heads], f"{at}/{part}/Transpose", perm=[0, 2, 1, 3])
        for part in CACHE:
            tensors = [past.format(layer, part), parts[part]] if cached else [parts[part]]
            parts[part] = graph.node("Concat", tensors, f"{at}/{part}/Concat", present.format(layer, part), axis=2)
        turned = graph.node("Transpose", [parts["key"]], f"{at}/turn", perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [parts["query"], turned], f"{at}/scores")
        mixed = graph.node("MatMul", [graph.node("Softmax", [scores], f"{at}/Softmax", axis=-1), parts["value"]], f"{at}/mixed")
        back = graph.node("Reshape", [graph.node("Transpose", [mixed], f"{at}/back", perm=[0, 2, 1, 3]), join], f"{at}/join")
        tensor = graph.node("Add", [tensor, graph.product(back, f"{at}/out", hidden, hidden)], f"{at}/Add")
    graph.product(tensor, "lm_head", hidden, size.words, "logits")
    value, floating = helper.make_tensor_value_info, TensorProto.FLOAT
    caches = [(layer, part) for layer in range(size.layers) for part in CACHE]
    inputs = [value("input_ids", TensorProto.INT64, [batch, sequence])]
    if cached:
        inputs += [value(past.format(*each), floating, [batch, size.heads, length, size.head]) for each in caches]
    made: list[str | int] = [batch, size.heads, total if cached else sequence, size.head]
    outputs = [value("logits", floating, [batch, sequence, size.words]),
               *(value(present.format(*each), floating, made) for each in caches)]
    return helper.make_model(helper.make_graph(graph.nodes, "decoder", inputs, outputs, graph.weights), ir_version=10,
                             opset_imports=[helper.make_opsetid("", 22)])
