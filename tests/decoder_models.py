"""Small language models for tests, with random weights: as onnxruntime-genai's builder writes them (GroupQueryAttention, rotary
embeddings, int4 or floating point), and as plain ONNX decoders with a cache of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Precision = Literal["fp32", "fp16", "int4"]
BLOCK = 32  # numbers that share a scale, in int4
MASK, PAST, PRESENT = "attention_mask", "past_key_values.{}.{}", "present.{}.{}"


@dataclass
class Graph:
    """The nodes and weights of a graph that is being written."""

    dtype: Any
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, op_type: str, inputs: Sequence[str], name: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Adds a node; returns its first output."""
        made = list(outputs) or [f"{name}/output_0"]
        domain = "com.microsoft" if op_type in ("GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization") else ""
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name, domain=domain, **attributes))
        return made[0]

    def weight(self, name: str, shape: Sequence[int]) -> str:
        """Adds random weights."""
        return self.constant(name, (self.random.standard_normal(shape) / 8).astype(self.dtype))

    def constant(self, name: str, values: np.ndarray[Any, Any]) -> str:
        """Adds a constant."""
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def product(self, tensor: str, name: str, rows: int, columns: int, precision: Precision) -> str:
        """Adds a product with a matrix of weights."""
        if precision != "int4":
            return self.node("MatMul", [tensor, self.weight(f"{name}.weight", (rows, columns))], name)
        blocks = rows // BLOCK
        packed = self.random.integers(0, 256, (columns, blocks, BLOCK // 2), dtype=np.uint8)
        return self.node("MatMulNBits", [tensor, self.constant(f"{name}.weight_Q4", packed),
                                         self.weight(f"{name}.weight_scales", (columns, blocks))], name, K=rows, N=columns,
                         bits=4, block_size=BLOCK)


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder."""

    precision: Precision = "fp16"
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128
    words: int = 512
    context: int = 2048

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def element(self) -> int:
        return int(TensorProto.FLOAT if self.precision == "fp32" else TensorProto.FLOAT16)

    def graph(self) -> Graph:
        return Graph(np.float32 if self.precision == "fp32" else np.float16)


def genai_folder(folder: Path, decoder: Decoder = Decoder(), provider: str = "cuda", **search: Any) -> Path:
    """Writes a folder as onnxruntime-genai's builder does: model.onnx with its weights beside it, and genai_config.json.

    Args:
        folder: where to; made if it is not there.
        decoder: the sizes.
        provider: `cuda` or `cpu`, for which the folder says that it was built.
        search: values of the config's `search` in place of the builder's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    options = [{"cuda": {"enable_cuda_graph": "0"}}] if provider == "cuda" else []
    config = {
        "model": {
            "context_length": decoder.context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": options},
                "filename": "model.onnx", "head_size": decoder.head_size, "hidden_size": decoder.hidden,
                "inputs": {"input_ids": "input_ids", "attention_mask": MASK, **names},
                "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
                "num_attention_heads": decoder.heads, "num_hidden_layers": decoder.layers,
                "num_key_value_heads": decoder.kv_heads},
            "type": "llama", "vocab_size": decoder.words},
        "search": {"max_length": decoder.context, "num_beams": 1, "past_present_share_buffer": True, **search}}
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    onnx.save(genai_model(decoder), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data",
              size_threshold=1024)
    return folder


def genai_model(decoder: Decoder) -> onnx.ModelProto:
    """A decoder as onnxruntime-genai's builder writes it."""
    graph, width = decoder.graph(), decoder.head_size
    one = graph.constant("one", np.array([1], np.int64))
    lengths = graph.node("ReduceSum", [MASK, one], "mask/ReduceSum", keepdims=0)
    lengths = graph.node("Cast", [graph.node("Sub", [lengths, one], "mask/Sub")], "mask/Sub/Cast", to=TensorProto.INT32)
    total = graph.node("Gather", [graph.node("Shape", [MASK], "mask/Shape"), graph.constant("axis", np.array(1, np.int64))],
                       "mask/Gather", axis=0)
    total = graph.node("Cast", [total], "mask/Gather/Cast", to=TensorProto.INT32)
    angles = np.outer(np.arange(decoder.context), 1e4 ** -np.linspace(0, 1, width // 2))
    tables = [graph.constant(f"{name}_cache", wave(angles).astype(graph.dtype)) for name, wave in
              (("cos", np.cos), ("sin", np.sin))]
    skip = graph.node("Gather", [graph.weight("embed.weight", (decoder.words, decoder.hidden)), "input_ids"], "embed/Gather")
    normed = graph.node("SimplifiedLayerNormalization", [skip, graph.weight("norm.0.weight", (decoder.hidden,))], "norm.0",
                        axis=-1, epsilon=1e-6, stash_type=1)
    query, both = decoder.heads * width, decoder.kv_heads * width
    for layer in range(decoder.layers):
        def product(tensor: str, name: str, rows: int, columns: int, layer: int = layer) -> str:
            return graph.product(tensor, f"layers.{layer}/{name}", rows, columns, decoder.precision)

        mixed = graph.node("GroupQueryAttention", [product(normed, "qkv_proj", decoder.hidden, query + 2 * both), "", "",
                                                   PAST.format(layer, "key"), PAST.format(layer, "value"), lengths, total,
                                                   *tables], f"layers.{layer}/attention",
                           [f"layers.{layer}/attention/output_0", PRESENT.format(layer, "key"), PRESENT.format(layer, "value")],
                           num_heads=decoder.heads, kv_num_heads=decoder.kv_heads, do_rotary=1)
        normed, skip = _normed(graph, decoder, skip, product(mixed, "o_proj", query, decoder.hidden), f"layers.{layer}/norm")
        gate, up = (product(normed, name, decoder.hidden, decoder.inner) for name in ("gate_proj", "up_proj"))
        active = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], f"layers.{layer}/Sigmoid")], f"layers.{layer}/act")
        product_of_both = graph.node("Mul", [active, up], f"layers.{layer}/Mul")
        normed, skip = _normed(graph, decoder, skip, product(product_of_both, "down_proj", decoder.inner, decoder.hidden),
                               f"layers.{layer}/last_norm", is_last=layer == decoder.layers - 1)
    logits = graph.product(normed, "lm_head", decoder.hidden, decoder.words, decoder.precision)
    graph.nodes[-1].output[0] = "logits" if logits else logits
    cache = ["batch_size", decoder.kv_heads, "past_sequence_length", "kv_cache_dim"]
    return _model(graph, decoder, {"input_ids": ["batch_size", "sequence_length"], MASK: ["batch_size", "total_sequence_length"]},
                  cache, ["batch_size", decoder.kv_heads, "total_sequence_length", "kv_cache_dim"],
                  ["batch_size", "sequence_length", decoder.words])


def _normed(graph: Graph, decoder: Decoder, skip: str, tensor: str, name: str, is_last: bool = False) -> tuple[str, str]:
    """Adds a sum and its normalisation; returns the normalised sum and the sum itself, which the last one does not give."""
    outputs = [f"{name}/output_0", *([] if is_last else ["", "", f"{name}/output_3"])]
    graph.node("SkipSimplifiedLayerNormalization", [skip, tensor, graph.weight(f"{name}.weight", (decoder.hidden,))], name,
               outputs, epsilon=1e-6)
    return outputs[0], outputs[-1]


def plain_decoder(decoder: Decoder = Decoder("fp32"), *, cached: bool = True, past: str = PAST, present: str = PRESENT,
                  dims: Callable[[str], str] = lambda role: role) -> onnx.ModelProto:
    """A decoder of standard operators, which appends to its cache with Concat.

    Args:
        decoder: the sizes; each key head has one query head.
        cached: whether it takes a cache; without one it is the prefill of a pair.
        past, present: names of the caches, with places for the layer and for `key` or `value`.
        dims: the name of the dimension `batch`, `sequence`, `past` or `total`.
    """
    graph, width, inner = decoder.graph(), decoder.head_size, decoder.hidden
    batch, sequence, length, total = map(dims, ("batch", "sequence", "past", "total"))
    split, join = (graph.constant(name, np.array(shape, np.int64)) for name, shape in
                   (("split", [0, 0, decoder.heads, width]), ("join", [0, 0, inner])))
    tensor = graph.node("Gather", [graph.weight("embed.weight", (decoder.words, inner)), "input_ids"], "embed/Gather")
    for layer in range(decoder.layers):
        parts = {}
        for part in ("query", "key", "value"):
            product = graph.product(tensor, f"layers.{layer}/{part}", inner, inner, decoder.precision)
            heads = graph.node("Reshape", [product, split], f"layers.{layer}/{part}/Reshape")
            parts[part] = graph.node("Transpose", [heads], f"layers.{layer}/{part}/Transpose", perm=[0, 2, 1, 3])
        for part in ("key", "value"):
            tensors = [past.format(layer, part), parts[part]] if cached else [parts[part]]
            parts[part] = graph.node("Concat", tensors, f"layers.{layer}/{part}/Concat", [present.format(layer, part)], axis=2)
        turned = graph.node("Transpose", [parts["key"]], f"layers.{layer}/turn", perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [parts["query"], turned], f"layers.{layer}/scores")
        shares = graph.node("Softmax", [scores], f"layers.{layer}/Softmax", axis=-1)
        mixed = graph.node("MatMul", [shares, parts["value"]], f"layers.{layer}/mixed")
        back = graph.node("Transpose", [mixed], f"layers.{layer}/back", perm=[0, 2, 1, 3])
        joined = graph.node("Reshape", [back, join], f"layers.{layer}/join")
        tensor = graph.node("Add", [tensor, graph.product(joined, f"layers.{layer}/out", inner, inner, decoder.precision)],
                            f"layers.{layer}/Add")
    graph.product(tensor, "lm_head", inner, decoder.words, decoder.precision)
    graph.nodes[-1].output[0] = "logits"
    return _model(graph, decoder, {"input_ids": [batch, sequence]},
                  [batch, decoder.heads, length, width] if cached else None,
                  [batch, decoder.heads, total if cached else sequence, width], [batch, sequence, decoder.words], past, present)


def _model(graph: Graph, decoder: Decoder, inputs: dict[str, list[Any]], cache: list[Any] | None, made: list[Any],
           logits: list[Any], past: str = PAST, present: str = PRESENT) -> onnx.ModelProto:
    """The model of a graph, with its caches as inputs and outputs."""
    pairs = [(layer, part) for layer in range(decoder.layers) for part in ("key", "value")]
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in inputs.items()]
    values += [helper.make_tensor_value_info(past.format(*pair), decoder.element, cache) for pair in pairs if cache is not None]
    outputs = [helper.make_tensor_value_info("logits", decoder.element, logits)]
    outputs += [helper.make_tensor_value_info(present.format(*pair), decoder.element, made) for pair in pairs]
    opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(graph.nodes, "decoder", values, outputs, graph.weights), opset_imports=opsets,
                             ir_version=10)
