"""The architectures of Hugging Face's transformers, small and with random weights, built from their Config classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput, tensors_in
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.utils.errors import UserError

COLLECTION = "transformers"
TOKEN = "_token"  # ends the name of a decoder that takes one token and a cache of keys and values
PREFILL = "_prefill"  # ends the name of a decoder that takes a whole prompt
WORDS = 16000
LAYERS = 4  # enough to tell the kernels of a layer from those of the first and the last layer
TEXT_SIZES = {"batch": (1, 8), "sequence": (128, 512)}
TOKEN_SIZES = {"batch": (1, 8), "past": (64, 1024, 4096)}
_SIZED = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": LAYERS}
_TEXT = {**_SIZED, "vocab_size": WORDS}
_WORDS = NetworkInput("input_ids", ("batch", "sequence"), "indices", WORDS)
_MASK = NetworkInput("attention_mask", ("batch", "sequence"), "ones")
_KINDS = NetworkInput("token_type_ids", ("batch", "sequence"), "indices", 2)


@dataclass(frozen=True)
class Architecture:
    """How to build one architecture.

    Attributes:
        config: what its Config class is given; the rest is left as it is there.
        inputs: of the model, under the names of its `forward`.
        sizes: see `Network`.
        model_class: the class of transformers that builds it.
        options: what else its `forward` is given.
    """

    config: Mapping[str, Any]
    inputs: tuple[NetworkInput, ...]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: TEXT_SIZES)
    model_class: str = "AutoModel"
    options: Mapping[str, Any] = field(default_factory=dict)


def _pixels(size: int) -> tuple[NetworkInput, ...]:
    return (NetworkInput("pixel_values", ("batch", 3, size, size)),)


def _seen(name: str, config: Mapping[str, Any], size: int, model_class: str = "AutoModel") -> tuple[str, Architecture]:
    return name, Architecture(config, _pixels(size), {"batch": (1, 8)}, model_class)


def _heard(name: str) -> tuple[str, Architecture]:
    """A second of sound at 16 kHz, by default."""
    samples = NetworkInput("input_values", ("batch", "samples"))
    return name, Architecture(_SIZED, (samples,), {"batch": (1, 4), "samples": (16000, 80000)})


_TWO_TOWERS = {"text_config": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
                               "num_hidden_layers": LAYERS, "vocab_size": WORDS, "max_position_embeddings": 512,
                               "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
               "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
                                 "num_hidden_layers": LAYERS, "image_size": 224, "patch_size": 32}}
_TWO_INPUTS = (_WORDS, *(NetworkInput("pixel_values", ("images", 3, 224, 224)),))
_TWO_SIZES = {"batch": (1, 8), "sequence": (64,), "images": (1, 8)}
_SMALL_RESNET = {"model_type": "resnet", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic",
                 "embedding_size": 64, "out_features": ["stage4"]}

ARCHITECTURES: Mapping[str, Architecture] = {
    "albert": Architecture({**_TEXT, "embedding_size": 128}, (_WORDS, _MASK, _KINDS)),
    "mpnet": Architecture(_TEXT, (_WORDS, _MASK)),
    "mobilebert": Architecture({"num_hidden_layers": 2 * LAYERS, "vocab_size": WORDS}, (_WORDS, _MASK, _KINDS)),
    "squeezebert": Architecture({**_TEXT, "embedding_size": 768}, (_WORDS, _MASK, _KINDS)),
    "funnel": Architecture({"block_sizes": [2, 2, 2], "num_decoder_layers": 1, "vocab_size": WORDS, "d_model": 512, "n_head": 8,
                            "d_head": 64, "d_inner": 2048},  # torch's exporter fixes the length, as its pooling halves it
                           tuple(replace(spec, shape=("batch", 256)) for spec in (_WORDS, _MASK)), {"batch": (1, 8)},
                           "FunnelModel"),
    "xlnet": Architecture({"d_model": 768, "n_layer": LAYERS, "n_head": 12, "d_inner": 3072, "vocab_size": WORDS},
                          (_WORDS, _MASK), options={"use_mems": False}),
    "bart": Architecture({"d_model": 512, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 8,
                          "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": WORDS},
                         (_WORDS, _MASK), options={"use_cache": False}),
    "opt": Architecture({"hidden_size": 768, "num_hidden_layers": LAYERS, "ffn_dim": 3072, "num_attention_heads": 12,
                         "word_embed_proj_dim": 768, "vocab_size": WORDS}, (_WORDS, _MASK), options={"use_cache": False}),
    "gpt_neo": Architecture({"hidden_size": 768, "num_layers": LAYERS, "num_heads": 12, "vocab_size": WORDS,
                             "attention_types": [[["global", "local"], LAYERS // 2]]}, (_WORDS, _MASK),
                            options={"use_cache": False}),
    "gpt_neox": Architecture({**_TEXT, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
                             (_WORDS, _MASK), options={"use_cache": False}),
    "bloom": Architecture({"hidden_size": 1024, "n_layer": LAYERS, "n_head": 16, "vocab_size": WORDS}, (_WORDS, _MASK),
                          options={"use_cache": False}),
    "llama": Architecture({**_TEXT, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
                           "intermediate_size": 2816}, (_WORDS,), model_class="AutoModelForCausalLM"),
    "mistral": Architecture({**_TEXT, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
                             "head_dim": 128, "intermediate_size": 4096, "sliding_window": None}, (_WORDS,),
                            model_class="AutoModelForCausalLM"),
    "qwen2": Architecture({**_TEXT, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
                           "intermediate_size": 4864}, (_WORDS,), model_class="AutoModelForCausalLM"),
    "gemma": Architecture({**_TEXT, "hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                           "intermediate_size": 4096}, (_WORDS,), model_class="AutoModelForCausalLM"),
    "phi": Architecture({**_TEXT, "num_key_value_heads": 12}, (_WORDS,), model_class="AutoModelForCausalLM"),
    "falcon": Architecture({"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": LAYERS, "vocab_size": WORDS,
                            "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "alibi": False},
                           (_WORDS,), model_class="AutoModelForCausalLM"),
    **dict([
        _seen("vit", {**_SIZED, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}, 224),
        _seen("dinov2", {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 2 * LAYERS, "image_size": 224},
              224),
        _seen("segformer", {}, 512, "AutoModelForSemanticSegmentation"),
        _seen("yolos", {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 2 * LAYERS,
                        "image_size": [512, 512], "num_detection_tokens": 100, "use_mid_position_embeddings": False}, 512,
              "AutoModelForObjectDetection"),
        _seen("detr", {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": _SMALL_RESNET,
                       "encoder_layers": LAYERS, "decoder_layers": LAYERS}, 480, "AutoModelForObjectDetection"),
        _heard("wav2vec2"), _heard("hubert")]),
    "clip": Architecture(_TWO_TOWERS, (*_TWO_INPUTS, _MASK), _TWO_SIZES),
    "siglip": Architecture({**_TWO_TOWERS, "text_config": {**_TWO_TOWERS["text_config"], "projection_size": 768}},
                           _TWO_INPUTS, _TWO_SIZES),
    "whisper": Architecture(
        {"d_model": 384, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 6,
         "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": WORDS,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        (NetworkInput("input_features", ("batch", 80, 3000)),
         NetworkInput("decoder_input_ids", ("batch", "sequence"), "indices", WORDS)),
        {"batch": (1, 4), "sequence": (32,)}, options={"use_cache": False}),
}
DECODERS = frozenset(name for name, made in ARCHITECTURES.items() if made.model_class == "AutoModelForCausalLM")


class ByPosition(nn.Module):
    """A model with its inputs by position, and its outputs as a tuple of tensors."""

    def __init__(self, inner: nn.Module, names: list[str], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.names, self.options = inner, names, dict(options)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.inner(**dict(zip(self.names, inputs, strict=True)), **self.options, return_dict=True)
        return tuple(tensor for tensor in tensors_in(outputs) if tensor.is_floating_point())


class WithCache(nn.Module):
    """A decoder that takes words and, where `cached`, keys and values of earlier ones; gives the last word's logits and the
    keys and values of all words."""

    def __init__(self, inner: nn.Module, cached: bool) -> None:
        super().__init__()
        self.inner, self.cached = inner, cached

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache(list(zip(past[0::2], past[1::2], strict=True))) if self.cached else None
        outputs = self.inner(input_ids=input_ids, past_key_values=cache, use_cache=True, return_dict=True, logits_to_keep=1)
        kept = [tensor for layer in outputs.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (outputs.logits, *kept)


def names() -> list[str]:
    """Every model that can be built: a decoder as two, one that takes a prompt and one that takes one token and a cache."""
    return [model for name in ARCHITECTURES
            for model in ((name + PREFILL, name + TOKEN) if name in DECODERS else (name,))]


def check_names(wanted: Iterable[str]) -> None:
    """Checks that there is a model of each name; `UserError` where there is none."""
    known = names()
    for name in wanted:
        if name not in known:
            raise UserError(f"{name}: not among the architectures that are built here, which are {', '.join(known)}")


def build_network(name: str, family: str) -> Network:
    """One of `names()`, in float32. A decoder's cache is [batch, heads, past, size of a head], for keys and values of each
    layer."""
    base = name.removesuffix(TOKEN).removesuffix(PREFILL)
    made = ARCHITECTURES[base]
    torch.manual_seed(SEED)
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(base, **made.config)
    of = getattr(transformers, made.model_class)
    module = of.from_config(config) if made.model_class.startswith("Auto") else of(config)
    inputs, sizes = made.inputs, made.sizes
    if base in DECODERS:
        taker: nn.Module = WithCache(module, name.endswith(TOKEN))
        if name.endswith(TOKEN):
            heads = 1 if base == "falcon" else config.num_key_value_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            caches = [NetworkInput(f"past_{layer}_{part}", ("batch", heads, "past", size))
                      for layer in range(config.num_hidden_layers) for part in ("key", "value")]
            inputs, sizes = (NetworkInput("input_ids", ("batch", 1), "indices", WORDS), *caches), TOKEN_SIZES
    else:
        taker = ByPosition(module, [spec.name for spec in inputs], made.options)
    network = Network(name, COLLECTION, family, taker, inputs, sizes)
    make_like_trained(taker, network.example)
    return network
