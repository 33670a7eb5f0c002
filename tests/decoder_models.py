"""Small language models for tests: folders as onnxruntime-genai's builder writes them, and plain ONNX decoders with a cache of
keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
from decoders import CACHE, DecoderSize, Precision, write_decoder
from onnx import TensorProto, helper, numpy_helper

TINY = DecoderSize(layers=2, hidden=64, intermediate=128, heads=4, key_heads=2, words=512, positions=2048)
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"


def genai_folder(folder: Path, size: DecoderSize = TINY, precision: Precision = "fp16", provider: str = "cuda",
                 cuda_graph: bool = False, **search: Any) -> Path:
    """Writes a folder as onnxruntime-genai's builder does: a model with its weights beside it, and genai_config.json.
    `provider`: `cuda` or `cpu`; `cuda_graph`: whether it asks for CUDA graphs; `search`: values in place of the builder's."""
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


def plain_decoder(size: DecoderSize = TINY, *, cached: bool = True, past: str = PAST, present: str = PRESENT,
                  name_of: Callable[[str], str] = lambda role: role) -> onnx.ModelProto:
    """A decoder of standard operators, in float32, which appends to its cache with Concat. Each head has keys of its own.
    Without a cache it runs the prompts of a pair of files. `past`, `present`: names of the caches, with places for the layer
    and for `key` or `value`; `name_of`: the name of the dimension `batch`, `sequence`, `past` or `total`."""
    hidden, nodes = size.hidden, ["h0 = Gather(embed, input_ids)"]
    shapes = {"embed": (size.words, hidden), "lm_head": (hidden, size.words)}
    for layer in range(size.layers):
        shapes |= {f"l{layer}_{part}_weight": (hidden, hidden) for part in ("query", *CACHE, "out")}
        kept = {part: f'"{past.format(layer, part)}", ' if cached else "" for part in CACHE}
        made = {part: f'"{present.format(layer, part)}"' for part in CACHE}
        nodes += [text.replace("@", f"l{layer}_") for text in (
            *(f"@{part}_product = MatMul(h{layer}, @{part}_weight) @{part}_heads = Reshape(@{part}_product, split) "
              f"@{part} = Transpose <perm = [0, 2, 1, 3]> (@{part}_heads)" for part in ("query", *CACHE)),
            *(f"{made[part]} = Concat <axis = 2> ({kept[part]}@{part})" for part in CACHE),
            f"@turned = Transpose <perm = [0, 1, 3, 2]> ({made['key']}) @scores = MatMul(@query, @turned)",
            f"@shares = Softmax <axis = -1> (@scores) @mixed = MatMul(@shares, {made['value']})",
            "@back = Transpose <perm = [0, 2, 1, 3]> (@mixed) @joined = Reshape(@back, join)",
            f"@out = MatMul(@joined, @out_weight) h{layer + 1} = Add(h{layer}, @out)")]
    graph = onnx.parser.parse_graph(f"decoder () => () {{ {' '.join(nodes)} logits = MatMul(h{size.layers}, lm_head) }}")
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    weights |= {"split": np.array([0, 0, size.heads, size.head]), "join": np.array([0, 0, hidden])}
    graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    value, floating = helper.make_tensor_value_info, TensorProto.FLOAT
    batch, sequence, length, total = map(name_of, ("batch", "sequence", "past", "total"))
    caches = [(layer, part) for layer in range(size.layers) for part in CACHE]
    graph.input.append(value("input_ids", TensorProto.INT64, [batch, sequence]))
    if cached:
        graph.input.extend(value(past.format(*each), floating, [batch, size.heads, length, size.head]) for each in caches)
    in_cache: list[str | int] = [batch, size.heads, total if cached else sequence, size.head]
    graph.output.extend([value("logits", floating, [batch, sequence, size.words]),
                         *(value(present.format(*each), floating, in_cache) for each in caches)])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 22)])
