"""Graphs of large language models as onnxruntime-genai's builder writes them, with weights of any size that take no disk.

The weights lie in a file beside the graph that consists of holes: it has the right length, and reads as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hase.utils import files
from hase.utils.lazy import onnx

Precision = Literal["fp16", "bf16", "fp32", "int4", "int4-fp32"]  # the last one as for a CPU: all but the weights is float32
CONTRIB = "com.microsoft"
BLOCK = 32  # numbers that share a scale, in int4
WEIGHTS = "model.onnx.data"
MASK = "/model/attn_mask_reformat/attn_mask_subgraph"
CACHE = ("key", "value")


@dataclass(frozen=True)
class DecoderSize:
    """What sets the size of a decoder: numbers of layers, of words, and of heads of queries and of keys, and its widths."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    words: int
    positions: int = 8192

    @property
    def head(self) -> int:
        """The numbers of one head."""
        return self.hidden // self.heads

    def dims(self, batch: int, length: int, past: int) -> dict[str, int]:
        """The sizes of the dynamic dimensions for `length` tokens after `past` tokens."""
        return {"batch_size": batch, "sequence_length": length, "past_sequence_length": past,
                "total_sequence_length": past + length, "kv_cache_dim": self.head}


DECODERS = {
    "1B": DecoderSize(layers=22, hidden=2048, intermediate=5632, heads=32, key_heads=4, words=64000),
    "8B": DecoderSize(layers=32, hidden=4096, intermediate=14336, heads=32, key_heads=8, words=128256),
    "70B": DecoderSize(layers=80, hidden=8192, intermediate=28672, heads=64, key_heads=8, words=128256),
}
SMALL = DecoderSize(layers=2, hidden=256, intermediate=512, heads=8, key_heads=2, words=4096, positions=2048)


@dataclass
class _Decoder:
    """A graph that grows by nodes and weights; the weights follow each other in one file."""

    size: DecoderSize
    precision: Precision
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    length: int = 0

    @property
    def floating(self) -> int:
        """ONNX's number of the type of inputs, outputs and scales."""
        types = onnx.TensorProto
        return int({"bf16": types.BFLOAT16, "fp32": types.FLOAT, "int4-fp32": types.FLOAT}.get(self.precision, types.FLOAT16))

    def node(self, op_type: str, inputs: list[str], output: str, *more: str, domain: str = "", **attributes: Any) -> str:
        name = output.removesuffix("/output_0")
        self.nodes.append(onnx.helper.make_node(op_type, inputs, [output, *more], name, domain=domain, **attributes))
        return output

    def weight(self, name: str, *shape: int, kind: int | None = None) -> str:
        kind = self.floating if kind is None else kind
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape, data_location=onnx.TensorProto.EXTERNAL)
        taken = math.prod(shape) * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        for key, text in (("location", WEIGHTS), ("offset", str(self.length)), ("length", str(taken))):
            tensor.external_data.add(key=key, value=text)
        self.length += taken
        self.weights.append(tensor)
        return name

    def product(self, source: str, name: str, output: str, rows: int, columns: int) -> str:
        """`source` of width `rows` times the weight `name`."""
        if not self.precision.startswith("int4"):
            return self.node("MatMul", [source, self.weight(f"{name}.MatMul.weight", rows, columns)], output)
        blocks = rows // BLOCK
        packed = self.weight(f"{name}.MatMul.weight_Q4", columns, blocks, BLOCK // 2, kind=onnx.TensorProto.UINT8)
        scales = self.weight(f"{name}.MatMul.weight_scales", columns, blocks)
        return self.node("MatMulNBits", [source, packed, scales], output, domain=CONTRIB, K=rows, N=columns, bits=4,
                         block_size=BLOCK)

    def normalised(self, layer: int, name: str, skip: str, added: str, last: bool = False) -> tuple[str, str]:
        """The sum of two tensors, normalised; and the sum itself."""
        place = f"/model/layers.{layer}/{name}"
        weight = self.weight(f"model.layers.{layer}.{name}.weight", self.size.hidden)
        outputs = [f"{place}/output_0", *(() if last else ("", "", f"{place}/output_3"))]
        made = self.node("SkipSimplifiedLayerNormalization", [skip, added, weight], *outputs, domain=CONTRIB, epsilon=1e-6)
        return made, outputs[-1]

    def lengths(self) -> tuple[str, str]:
        """The lengths that attention needs, from the mask: of each sequence, less one, and of the longest."""
        ones, one = "/model/constants/INT64/[1]", "/model/constants/INT64/1"
        for name, shape in ((ones, [1]), (one, [])):
            value = onnx.helper.make_tensor(name, onnx.TensorProto.INT64, shape, [1])
            self.nodes.append(onnx.helper.make_node("Constant", [], [name], value=value))
        total = self.node("ReduceSum", ["attention_mask", ones], f"{MASK}/ReduceSum/output_0", keepdims=0)
        less = self.node("Sub", [total, ones], f"{MASK}/Sub/output_0")
        lengths = self.node("Shape", ["attention_mask"], f"{MASK}/Shape/output_0")
        longest = self.node("Gather", [lengths, one], f"{MASK}/Gather/output_0", axis=0)
        whole = onnx.TensorProto.INT32
        return (self.node("Cast", [less], f"{MASK}/Sub/Cast/output_0", to=whole),
                self.node("Cast", [longest], f"{MASK}/Gather/Cast/output_0", to=whole))

    def layer(self, number: int, skip: str, source: str, lengths: tuple[str, str]) -> tuple[str, str]:
        """Attention and the two products after it. Returns what the next layer adds, and the sum of all before."""
        size, place, name = self.size, f"/model/layers.{number}", f"model.layers.{number}"
        packed = (size.heads + 2 * size.key_heads) * size.head
        together = self.product(source, f"{name}.attn.qkv_proj", f"{place}/attn/qkv_proj/MatMul/output_0", size.hidden, packed)
        attended = f"{place}/attn/GroupQueryAttention/output_0"
        past, present = ([f"{state}.{number}.{part}" for part in CACHE] for state in ("past_key_values", "present"))
        inputs = [together, "", "", *past, *lengths, "cos_cache", "sin_cache", "", "", ""]
        self.node("GroupQueryAttention", inputs, attended, *present,
                  domain=CONTRIB, num_heads=size.heads, kv_num_heads=size.key_heads, scale=size.head ** -0.5, do_rotary=1,
                  local_window_size=-1, rotary_interleaved=0, softcap=0.0)
        projected = self.product(attended, f"{name}.attn.o_proj", f"{place}/attn/o_proj/MatMul/output_0", size.hidden,
                                 size.hidden)
        normal, skip = self.normalised(number, "post_attention_layernorm", skip, projected)
        gate, up = (self.product(normal, f"{name}.mlp.{part}_proj", f"{place}/mlp/{part}_proj/MatMul/output_0", size.hidden,
                                 size.intermediate) for part in ("gate", "up"))
        sigmoid = self.node("Sigmoid", [gate], f"{place}/mlp/act_fn/Sigmoid/output_0")
        gated = self.node("Mul", [self.node("Mul", [gate, sigmoid], f"{place}/mlp/act_fn/Mul/output_0"), up],
                          f"{place}/mlp/Mul/output_0")
        return self.product(gated, f"{name}.mlp.down_proj", f"{place}/mlp/down_proj/MatMul/output_0", size.intermediate,
                            size.hidden), skip

    def caches(self, state: str, length: str, head: int | str) -> Iterator[Any]:
        for number in range(self.size.layers):
            for part in CACHE:
                yield onnx.helper.make_tensor_value_info(f"{state}.{number}.{part}", self.floating, [
                    "batch_size", self.size.key_heads, length, head])

    def model(self) -> onnx.ModelProto:
        size = self.size
        lengths = self.lengths()
        skip = self.node("Gather", [self.weight("model.embed_tokens.weight", size.words, size.hidden), "input_ids"],
                         "/model/embed_tokens/Gather/output_0")
        scale = self.weight("model.layers.0.input_layernorm.weight", size.hidden)
        source = self.node("SimplifiedLayerNormalization", [skip, scale], "/model/layers.0/input_layernorm/output_0", axis=-1,
                           epsilon=1e-6, stash_type=1)
        for name in ("cos_cache", "sin_cache"):
            self.weight(name, size.positions, size.head // 2)
        for number in range(size.layers):
            added, skip = self.layer(number, skip, source, lengths)
            last = number + 1 == size.layers
            source, skip = self.normalised(number + 1, "final_norm_layernorm" if last else "input_layernorm", skip, added, last)
        self.product(source, "lm_head", "logits", size.hidden, size.words)
        whole, tensor = onnx.TensorProto.INT64, onnx.helper.make_tensor_value_info
        inputs = [tensor("input_ids", whole, ["batch_size", "sequence_length"]),
                  tensor("attention_mask", whole, ["batch_size", "total_sequence_length"]),
                  *self.caches("past_key_values", "past_sequence_length", "kv_cache_dim")]
        outputs = [tensor("logits", self.floating, ["batch_size", "sequence_length", size.words]),
                   *self.caches("present", "total_sequence_length", "kv_cache_dim")]
        graph = onnx.helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.weights)
        return onnx.helper.make_model(graph, ir_version=10, opset_imports=[
            onnx.helper.make_opsetid("", 22), onnx.helper.make_opsetid(CONTRIB, 1)])


def write_decoder(folder: Path, size: DecoderSize, precision: Precision, weights: bool = True) -> Path:
    """Writes a decoder to `<folder>/model.onnx`, and returns the path; with a file of `weights`, which takes no disk."""
    decoder = _Decoder(size, precision)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_bytes(folder / "model.onnx", decoder.model().SerializeToString())
    if weights:
        with (folder / WEIGHTS).open("wb") as file:
            file.truncate(decoder.length)
    return folder / "model.onnx"
