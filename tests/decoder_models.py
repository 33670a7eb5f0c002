"""Small language models for tests, with random weights: as onnxruntime-genai's builder writes them (GroupQueryAttention, rotary
embeddings, floating point or int4), and plain ONNX decoders with a cache of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCK = 32  # numbers that share a scale, in int4
MASK, PAST, PRESENT = "attention_mask", "past_key_values.{}.{}", "present.{}.{}"
CONTRIB = ("GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization")
PARTS = ("key", "value")


@dataclass(frozen=True)
class Decoder:
    """The sizes and the numbers of a decoder; `int4`: of its matrices."""

    half: bool = True
    int4: bool = False
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
        return int(TensorProto.FLOAT16 if self.half else TensorProto.FLOAT)


INT4 = Decoder(int4=True)
PLAIN = Decoder(half=False)


@dataclass
class Graph:
    """The nodes and weights of a graph that is being written."""

    decoder: Decoder
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, op_type: str, inputs: Sequence[str], name: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        """Adds a node; returns its first output."""
        made = list(outputs) or [f"{name}/output_0"]
        domain = "com.microsoft" if op_type in CONTRIB else ""
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name, domain=domain, **attributes))
        return made[0]

    def constant(self, name: str, values: Any) -> str:
        """Adds a constant."""
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def numbers(self, values: Any) -> Any:
        """Numbers of the type in which the decoder computes."""
        return np.asarray(values).astype(np.float16 if self.decoder.half else np.float32)

    def weight(self, name: str, *shape: int) -> str:
        """Adds random weights."""
        return self.constant(name, self.numbers(self.random.standard_normal(shape) / 8))

    def product(self, tensor: str, name: str, rows: int, columns: int, output: str = "") -> str:
        """Adds a product with a matrix of weights."""
        outputs = [output] if output else []
        if not self.decoder.int4:
            return self.node("MatMul", [tensor, self.weight(f"{name}.weight", rows, columns)], name, outputs)
        blocks = rows // BLOCK
        packed = self.random.integers(0, 256, (columns, blocks, BLOCK // 2), dtype=np.uint8)
        weights = self.constant(f"{name}.weight_Q4", packed), self.weight(f"{name}.weight_scales", columns, blocks)
        return self.node("MatMulNBits", [tensor, *weights], name, outputs, K=rows, N=columns, bits=4, block_size=BLOCK)

    def model(self, inputs: dict[str, list[Any]], cache: list[Any] | None, made: list[Any], logits: list[Any],
              past: str = PAST, present: str = PRESENT) -> onnx.ModelProto:
        """The model, with its caches as inputs of shape `cache` and as outputs of shape `made`."""
        element, value = self.decoder.element, helper.make_tensor_value_info
        pairs = [(layer, part) for layer in range(self.decoder.layers) for part in PARTS]
        values = [value(name, TensorProto.INT64, shape) for name, shape in inputs.items()]
        values += [value(past.format(*pair), element, cache) for pair in pairs if cache is not None]
        outputs = [value("logits", element, logits), *(value(present.format(*pair), element, made) for pair in pairs)]
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph(self.nodes, "decoder", values, outputs, self.weights)
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def genai_folder(folder: Path, decoder: Decoder = Decoder(), provider: str = "cuda", cuda_graph: bool = False,
                 **search: Any) -> Path:
    """Writes a folder as onnxruntime-genai's builder does: model.onnx with its weights beside it, and genai_config.json.

    Args:
        folder: where to; made if it is not there.
        decoder: the sizes.
        provider: `cuda` or `cpu`, for which the config says that it was built.
        cuda_graph: whether it asks for CUDA graphs.
        search: values of the config's `search` in place of the builder's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model": {
            "context_length": decoder.context,
            "decoder": {
                "session_options": {
                    "log_id": "onnxruntime-genai",
                    "provider_options": [{"cuda": {"enable_cuda_graph": str(int(cuda_graph))}}] if provider == "cuda" else []},
                "filename": "model.onnx", "head_size": decoder.head_size, "hidden_size": decoder.hidden,
                "inputs": {"input_ids": "input_ids", "attention_mask": MASK, "past_key_names": "past_key_values.%d.key",
                           "past_value_names": "past_key_values.%d.value"},
                "outputs": {"logits": "logits", "present_key_names": "present.%d.key",
                            "present_value_names": "present.%d.value"},
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
    graph, width, hidden = Graph(decoder), decoder.head_size, decoder.hidden
    one = graph.constant("one", np.array([1], np.int64))
    lengths = graph.node("Sub", [graph.node("ReduceSum", [MASK, one], "mask/ReduceSum", keepdims=0), one], "mask/Sub")
    lengths = graph.node("Cast", [lengths], "mask/Sub/Cast", to=TensorProto.INT32)
    axis = graph.constant("axis", np.array(1, np.int64))
    total = graph.node("Gather", [graph.node("Shape", [MASK], "mask/Shape"), axis], "mask/Gather", axis=0)
    total = graph.node("Cast", [total], "mask/Gather/Cast", to=TensorProto.INT32)
    angles = np.outer(np.arange(decoder.context), 1e4 ** -np.linspace(0, 1, width // 2))
    tables = [graph.constant("cos_cache", graph.numbers(np.cos(angles))),
              graph.constant("sin_cache", graph.numbers(np.sin(angles)))]
    skip = graph.node("Gather", [graph.weight("embed.weight", decoder.words, hidden), "input_ids"], "embed/Gather")
    normed = graph.node("SimplifiedLayerNormalization", [skip, graph.weight("norm.weight", hidden)], "norm", axis=-1,
                        epsilon=1e-6, stash_type=1)
    query, both = decoder.heads * width, 2 * decoder.kv_heads * width
    for layer in range(decoder.layers):
        at = f"layers.{layer}"
        attention = graph.node(
            "GroupQueryAttention",
            [graph.product(normed, f"{at}/qkv_proj", hidden, query + both), "", "",
             *(PAST.format(layer, part) for part in PARTS), lengths, total, *tables], f"{at}/attention",
            [f"{at}/attention/output_0", *(PRESENT.format(layer, part) for part in PARTS)],
            num_heads=decoder.heads, kv_num_heads=decoder.kv_heads, do_rotary=1)
        normed, skip = _normed(graph, skip, graph.product(attention, f"{at}/o_proj", query, hidden), f"{at}/norm")
        gate, up = (graph.product(normed, f"{at}/{name}", hidden, decoder.inner) for name in ("gate_proj", "up_proj"))
        active = graph.node("Mul", [gate, graph.node("Sigmoid", [gate], f"{at}/Sigmoid")], f"{at}/active")
        down = graph.product(graph.node("Mul", [active, up], f"{at}/Mul"), f"{at}/down_proj", decoder.inner, hidden)
        normed, skip = _normed(graph, skip, down, f"{at}/last_norm", is_last=layer == decoder.layers - 1)
    graph.product(normed, "lm_head", hidden, decoder.words, "logits")
    cache = ["batch_size", decoder.kv_heads, "past_sequence_length", "kv_cache_dim"]
    made = ["batch_size", decoder.kv_heads, "total_sequence_length", "kv_cache_dim"]
    return graph.model(
        {"input_ids": ["batch_size", "sequence_length"], MASK: ["batch_size", "total_sequence_length"]}, cache, made,
        ["batch_size", "sequence_length", decoder.words])


def _normed(graph: Graph, skip: str, tensor: str, name: str, is_last: bool = False) -> tuple[str, str]:
    """Adds a sum and its normalisation; returns the normalised sum and the sum itself, which the last one does not give."""
    outputs = [f"{name}/output_0", *([] if is_last else ["", "", f"{name}/output_3"])]
    weight = graph.weight(f"{name}.weight", graph.decoder.hidden)
    graph.node("SkipSimplifiedLayerNormalization", [skip, tensor, weight], name, outputs, epsilon=1e-6)
    return outputs[0], outputs[-1]


def plain_decoder(decoder: Decoder = PLAIN, *, cached: bool = True, past: str = PAST, present: str = PRESENT,
                  name_of: Callable[[str], str] = lambda role: role) -> onnx.ModelProto:
    """A decoder of standard operators, which appends to its cache with Concat. Each head has keys and values of its own.

    Args:
        decoder: the sizes.
        cached: whether it takes a cache; without one it runs the prompts of a pair of files.
        past, present: names of the caches, with places for the layer and for `key` or `value`.
        name_of: the name of the dimension `batch`, `sequence`, `past` or `total`.
    """
    graph, hidden = Graph(decoder), decoder.hidden
    batch, sequence, length, total = map(name_of, ("batch", "sequence", "past", "total"))
    split = graph.constant("split", np.array([0, 0, decoder.heads, decoder.head_size], np.int64))
    join = graph.constant("join", np.array([0, 0, hidden], np.int64))
    tensor = graph.node("Gather", [graph.weight("embed.weight", decoder.words, hidden), "input_ids"], "embed/Gather")
    for layer in range(decoder.layers):
        at, parts = f"layers.{layer}", {}
        for part in ("query", *PARTS):
            heads = graph.node("Reshape", [graph.product(tensor, f"{at}/{part}", hidden, hidden), split], f"{at}/{part}/heads")
            parts[part] = graph.node("Transpose", [heads], f"{at}/{part}/Transpose", perm=[0, 2, 1, 3])
        for part in PARTS:
            tensors = [past.format(layer, part), parts[part]] if cached else [parts[part]]
            parts[part] = graph.node("Concat", tensors, f"{at}/{part}/Concat", [present.format(layer, part)], axis=2)
        turned = graph.node("Transpose", [parts["key"]], f"{at}/turn", perm=[0, 1, 3, 2])
        scores = graph.node("MatMul", [parts["query"], turned], f"{at}/scores")
        mixed = graph.node("MatMul", [graph.node("Softmax", [scores], f"{at}/Softmax", axis=-1), parts["value"]], f"{at}/mixed")
        back = graph.node("Reshape", [graph.node("Transpose", [mixed], f"{at}/back", perm=[0, 2, 1, 3]), join], f"{at}/join")
        tensor = graph.node("Add", [tensor, graph.product(back, f"{at}/out", hidden, hidden)], f"{at}/Add")
    graph.product(tensor, "lm_head", hidden, decoder.words, "logits")
    cache = [batch, decoder.heads, length, decoder.head_size] if cached else None
    return graph.model({"input_ids": [batch, sequence]}, cache,
                       [batch, decoder.heads, total if cached else sequence, decoder.head_size],
                       [batch, sequence, decoder.words], past, present)
