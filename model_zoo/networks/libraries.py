"""Builds networks of timm, transformers and torchvision with random weights.

Those of transformers are small, built from their Config classes. Torchvision's are for segmentation, detection and video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput, NetworkSource, tensors_in
from hase.model_zoo.exporting.torch_models import SEED, check_known, make_like_trained
from hase.utils.lazy import timm, torchvision, transformers

TOKEN = "_token"  # suffix of a decoder that takes one token and a cache of keys and values
PREFILL = "_prefill"  # suffix of a decoder that takes a whole prompt
WORDS = 16000
LAYERS = 4  # enough to tell the kernels of a layer from those of the first and the last layer
TEXT_SIZES = {"batch": (1, 8), "sequence": (128, 512)}
TOKEN_SIZES = {"batch": (1, 8), "past": (64, 1024, 4096)}
_SIZED = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": LAYERS}
_TEXT = {**_SIZED, "vocab_size": WORDS}
_WORDS = NetworkInput("input_ids", ("batch", "sequence"), "indices", WORDS)
_MASK = NetworkInput("attention_mask", ("batch", "sequence"), "ones")
_KINDS = NetworkInput("token_type_ids", ("batch", "sequence"), "indices", 2)
_NO_CACHE = {"use_cache": False}
CLASSES = 21  # of torchvision's segmentation models and detectors


def build_timm_network(name: str, family: str) -> Network:
    """A timm model at its own image size, in float32."""
    torch.manual_seed(SEED)
    module = timm.create_model(name, pretrained=False, exportable=True)
    shape = timm.data.resolve_data_config({}, model=module)["input_size"]
    make_like_trained(module, lambda: (torch.randn(2, *shape),))
    return Network(name, "timm", family, module, (NetworkInput("input", ("batch", *shape)),), {"batch": (1, 16)})


@dataclass(frozen=True)
class Architecture:
    """How to build one architecture of transformers."""

    config: Mapping[str, Any]  # arguments of its Config class that differ from the defaults
    inputs: tuple[NetworkInput, ...]  # named as in its `forward`
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: TEXT_SIZES)  # see `Network`
    model_class: str = "AutoModel"  # the class of transformers that builds it
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `forward`


def _vision(config: Mapping[str, Any], size: int, model_class: str = "AutoModel") -> Architecture:
    """A model of square images."""
    return Architecture(config, (NetworkInput("pixel_values", ("batch", 3, size, size)),), {"batch": (1, 8)}, model_class)


def _decoder(config: Mapping[str, Any]) -> Architecture:
    """A decoder that can take one token and a cache."""
    return Architecture(config, (_WORDS,), model_class="AutoModelForCausalLM")


_AUDIO = Architecture(_SIZED, (NetworkInput("input_values", ("batch", "samples")),),
                      {"batch": (1, 4), "samples": (16000, 80000)})  # one and five seconds at 16 kHz
_TWO_TOWERS = {"text_config": {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048,
                               "num_hidden_layers": LAYERS, "vocab_size": WORDS, "max_position_embeddings": 512,
                               "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
               "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
                                 "num_hidden_layers": LAYERS, "image_size": 224, "patch_size": 32}}
_TWO_INPUTS = (_WORDS, NetworkInput("pixel_values", ("images", 3, 224, 224)))
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
                         (_WORDS, _MASK), options=_NO_CACHE),
    "opt": Architecture({"hidden_size": 768, "num_hidden_layers": LAYERS, "ffn_dim": 3072, "num_attention_heads": 12,
                         "word_embed_proj_dim": 768, "vocab_size": WORDS}, (_WORDS, _MASK), options=_NO_CACHE),
    "gpt_neo": Architecture({"hidden_size": 768, "num_layers": LAYERS, "num_heads": 12, "vocab_size": WORDS,
                             "attention_types": [[["global", "local"], LAYERS // 2]]}, (_WORDS, _MASK), options=_NO_CACHE),
    "gpt_neox": Architecture({**_TEXT, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
                             (_WORDS, _MASK), options=_NO_CACHE),
    "bloom": Architecture({"hidden_size": 1024, "n_layer": LAYERS, "n_head": 16, "vocab_size": WORDS}, (_WORDS, _MASK),
                          options=_NO_CACHE),
    "llama": _decoder({**_TEXT, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
                       "intermediate_size": 2816}),
    "mistral": _decoder({**_TEXT, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
                         "head_dim": 128, "intermediate_size": 4096, "sliding_window": None}),
    "qwen2": _decoder({**_TEXT, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
                       "intermediate_size": 4864}),
    "gemma": _decoder({**_TEXT, "hidden_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
                       "intermediate_size": 4096}),
    "phi": _decoder({**_TEXT, "num_key_value_heads": 12}),
    "falcon": _decoder({"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": LAYERS, "vocab_size": WORDS,
                        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "alibi": False}),
    "vit": _vision({**_SIZED, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}, 224),
    "dinov2": _vision({"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 2 * LAYERS, "image_size": 224}, 224),
    "segformer": _vision({}, 512, "AutoModelForSemanticSegmentation"),
    "yolos": _vision({"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 2 * LAYERS,
                      "image_size": [512, 512], "num_detection_tokens": 100, "use_mid_position_embeddings": False}, 512,
                     "AutoModelForObjectDetection"),
    "detr": _vision({"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": _SMALL_RESNET,
                     "encoder_layers": LAYERS, "decoder_layers": LAYERS}, 480, "AutoModelForObjectDetection"),
    "wav2vec2": _AUDIO,
    "hubert": _AUDIO,
    "clip": Architecture(_TWO_TOWERS, (*_TWO_INPUTS, _MASK), _TWO_SIZES),
    "siglip": Architecture({**_TWO_TOWERS, "text_config": {**_TWO_TOWERS["text_config"], "projection_size": 768}},
                           _TWO_INPUTS, _TWO_SIZES),
    "whisper": Architecture(
        {"d_model": 384, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 6,
         "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": WORDS,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
        (NetworkInput("input_features", ("batch", 80, 3000)),
         NetworkInput("decoder_input_ids", ("batch", "sequence"), "indices", WORDS)),
        {"batch": (1, 4), "sequence": (32,)}, options=_NO_CACHE),
}
_DECODERS = frozenset(name for name, built in ARCHITECTURES.items() if built.model_class == "AutoModelForCausalLM")


class ByPosition(nn.Module):
    """A model with positional inputs, and outputs as a tuple of tensors."""

    def __init__(self, inner: nn.Module, names: list[str], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.names, self.options = inner, names, dict(options)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self.inner(**dict(zip(self.names, inputs, strict=True)), **self.options, return_dict=True)
        return tuple(tensor for tensor in tensors_in(outputs) if tensor.is_floating_point())


class WithCache(nn.Module):
    """A decoder that returns the last token's logits, and keys and values of all tokens. With `cached` it also takes the keys
    and values of earlier tokens."""

    def __init__(self, inner: nn.Module, cached: bool) -> None:
        super().__init__()
        self.inner, self.cached = inner, cached

    def forward(self, input_ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache(list(zip(past[0::2], past[1::2], strict=True))) if self.cached else None
        outputs = self.inner(input_ids=input_ids, past_key_values=cache, use_cache=True, return_dict=True, logits_to_keep=1)
        kept = [tensor for layer in outputs.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (outputs.logits, *kept)


def transformers_names() -> list[str]:
    """Every model that can be built; a decoder counts as two: with a prompt, and with one token and a cache."""
    return [model for name in ARCHITECTURES for model in ((name + PREFILL, name + TOKEN) if name in _DECODERS else (name,))]


def build_transformers_network(name: str, family: str) -> Network:
    """One of `transformers_names()`, in float32. Each layer's keys and values are [batch, heads, past, size of a head]."""
    base = name.removesuffix(TOKEN).removesuffix(PREFILL)
    architecture = ARCHITECTURES[base]
    torch.manual_seed(SEED)
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(base, **architecture.config)
    model_class = getattr(transformers, architecture.model_class)
    module = model_class.from_config(config) if architecture.model_class.startswith("Auto") else model_class(config)
    inputs, sizes = architecture.inputs, architecture.sizes
    if base in _DECODERS:
        wrapped: nn.Module = WithCache(module, name.endswith(TOKEN))
        if name.endswith(TOKEN):
            heads = 1 if base == "falcon" else config.num_key_value_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            caches = [NetworkInput(f"past_{layer}_{part}", ("batch", heads, "past", size))
                      for layer in range(config.num_hidden_layers) for part in ("key", "value")]
            inputs, sizes = (NetworkInput("input_ids", ("batch", 1), "indices", WORDS), *caches), TOKEN_SIZES
    else:
        wrapped = ByPosition(module, [spec.name for spec in inputs], architecture.options)
    network = Network(name, "transformers", family, wrapped, inputs, sizes)
    make_like_trained(wrapped, network.example)
    return network


@dataclass(frozen=True)
class VisionTask:
    """How to build one model of torchvision."""

    shape: tuple[int | str, ...]  # of its input
    options: Mapping[str, Any]  # arguments of its constructor
    architecture: str = ""  # torchvision's name for it, if different

    @property
    def detects(self) -> bool:
        """Whether it is a detector: they take one image, the others a batch."""
        return "batch" not in self.shape


_NO_WEIGHTS = {"weights": None, "weights_backbone": None}


def _detector(size: int, architecture: str = "", **thresholds: float) -> VisionTask:
    """A detector for images of one size. With a threshold of 0 it finds boxes even with random weights."""
    options = {**_NO_WEIGHTS, "num_classes": CLASSES, "min_size": size, "max_size": size, **thresholds}
    return VisionTask((1, 3, size, size), options, architecture)


VISION_TASKS: Mapping[str, VisionTask] = {
    "fcn_resnet50": VisionTask(("batch", 3, 224, 224), {**_NO_WEIGHTS, "num_classes": CLASSES}),
    "lraspp_mobilenet_v3_large": VisionTask(("batch", 3, 320, 320), {**_NO_WEIGHTS, "num_classes": CLASSES}),
    "retinanet_resnet50_fpn": _detector(320, score_thresh=0.0),
    "retinanet_resnet50_fpn_480": _detector(480, "retinanet_resnet50_fpn", score_thresh=0.0),
    "retinanet_resnet50_fpn_640": _detector(640, "retinanet_resnet50_fpn", score_thresh=0.0),
    "ssdlite320_mobilenet_v3_large": VisionTask((1, 3, 320, 320), _NO_WEIGHTS),
    "ssd300_vgg16": VisionTask((1, 3, 300, 300), {**_NO_WEIGHTS, "num_classes": CLASSES}),
    "fasterrcnn_mobilenet_v3_large_fpn": _detector(320, box_score_thresh=0.0),
    "fasterrcnn_mobilenet_v3_large_fpn_480": _detector(480, "fasterrcnn_mobilenet_v3_large_fpn", box_score_thresh=0.0),
    "fasterrcnn_resnet50_fpn_480": _detector(480, "fasterrcnn_resnet50_fpn", box_score_thresh=0.0),
    "fcos_resnet50_fpn_320": _detector(320, "fcos_resnet50_fpn", score_thresh=0.0),
    "fcos_resnet50_fpn_512": _detector(512, "fcos_resnet50_fpn", score_thresh=0.0),
    "r3d_18": VisionTask(("batch", 3, 8, 112, 112), {"weights": None}),
    "mc3_18": VisionTask(("batch", 3, 8, 112, 112), {"weights": None}),
    "s3d": VisionTask(("batch", 3, 16, 224, 224), {"weights": None}),
    "mvit_v1_b": VisionTask(("batch", 3, 16, 224, 224), {"weights": None}),
    "swin3d_t": VisionTask(("batch", 3, 8, 224, 224), {"weights": None}),
}


class FirstOutput(nn.Module):
    """A model that returns only its first output (segmentation has several, in a dict), or with `detects` all outputs."""

    def __init__(self, inner: nn.Module, detects: bool) -> None:
        super().__init__()
        self.inner, self.detects = inner, detects

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(tensors_in(self.inner(image)))
        return outputs if self.detects else outputs[:1]


def build_task_network(name: str, family: str) -> Network:
    """One of VISION_TASKS, in float32. A detector takes one image; its output sizes depend on the data."""
    task = VISION_TASKS[name]
    torch.manual_seed(SEED)
    module = torchvision.models.get_model(task.architecture or name, **task.options)
    sizes = {} if task.detects else {"batch": (1, 4)}
    inputs = (NetworkInput("input", task.shape),)
    network = Network(name, "torchvision", family, FirstOutput(module, task.detects), inputs, sizes,
                      data_sized=task.detects, traced=task.detects)
    make_like_trained(network.module, network.example)
    return network


SOURCES = {
    "timm": NetworkSource(lambda names: check_known(names, timm.list_models(), "timm has no such model"), build_timm_network),
    "transformers": NetworkSource(lambda names: check_known(names, transformers_names(), "no such model of transformers here"),
                                  build_transformers_network),
    "torchvision": NetworkSource(lambda names: check_known(names, VISION_TASKS, "no such model of torchvision here"),
                                 build_task_network)}
