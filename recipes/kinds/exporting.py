"""Exports small networks with random weights as ONNX files, at any operator set. Loads torch."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import segmentation

from hase.model_zoo.networks import images, vectors
from hase.model_zoo.networks.libraries import FirstOutput

FIRST_DYNAMO_OPSET = 18  # older operator sets need torch's older exporter

torch.backends.mha.set_fastpath_enabled(False)  # its operators are not exported


def export(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, opset: int = 18, outputs: Sequence[str] = (),
           dynamic: Mapping[str, Mapping[int, str]] | None = None) -> None:
    """Writes `module` in evaluation mode, below FIRST_DYNAMO_OPSET with torch's older exporter.

    `inputs` are in the order of the module's arguments; in `dynamic`, equal names mean equal sizes.
    """
    module = module.eval()
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs) or None, "opset_version": opset}
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            if opset < FIRST_DYNAMO_OPSET:
                axes = {name: dict(open_axes) for name, open_axes in (dynamic or {}).items()}
                torch.onnx.export(module, tuple(inputs.values()), str(path), dynamo=False, dynamic_axes=axes, **names)
                return
            sizes = {name: torch.export.Dim(name, min=1, max=65536)
                     for open_axes in (dynamic or {}).values() for name in open_axes.values()}
            input_axes = [{axis: sizes[name] for axis, name in (dynamic or {}).get(key, {}).items()} for key in inputs]
            kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
            named = len(kinds) - (inspect.Parameter.VAR_POSITIONAL in kinds)  # the other inputs, for `*past`, form one tuple
            shapes = (*input_axes[:named], *([tuple(input_axes[named:])] if named < len(input_axes) else []))
            program = torch.onnx.export(module, tuple(inputs.values()), dynamo=True, verbose=False,
                                        dynamic_shapes=shapes if dynamic else None, **names)
        finally:
            logging.disable(before)
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    program.save(str(path), external_data=False)


def random_inputs(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Tensors of random numbers by name, of these shapes."""
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def write_diffusion(path: Path) -> None:
    export(images.DiffusionBlock(), {"latent": torch.randn(1, 4, 32, 32), "time": torch.ones(1, dtype=torch.int64),
                                     "text": torch.randn(1, 77, 96)}, path, 17)


def segmentation_network(name: str) -> nn.Module:
    """A segmentation network of torchvision with one output, in place of its dict of outputs."""
    return FirstOutput(getattr(segmentation, name)(weights=None, weights_backbone=None), detects=False)


def write_recommender(path: Path) -> None:
    model = vectors.Recommender(12, 20000, 32, True, each_pair_once=True, numbers=13, bottom=256, top=(512, 256))
    export(model, {"numbers": torch.randn(4, 13), "categories": torch.zeros(4, 12, dtype=torch.int64)}, path, 17, ["click"],
           {"numbers": {0: "batch"}, "categories": {0: "batch"}})


def write_memory_update(path: Path) -> None:
    """Exports a network that replaces some rows of a memory (ScatterND)."""
    export(vectors.MemoryUpdate(),
           {"memory": torch.randn(1024, 256), "rows": torch.randn(64, 256), "places": torch.arange(64)}, path, 17)


def write_decoder_prefill(path: Path, opset: int) -> None:
    export(vectors.Decoder(False), {"tokens": torch.zeros(2, 32, dtype=torch.int64)}, path, opset,
           dynamic={"tokens": {0: "batch", 1: "sequence"}})


def write_decoder_token(path: Path, opset: int) -> None:
    model = vectors.Decoder(True)
    caches = {f"past_{number // 2}_{'kv'[number % 2]}": torch.randn(2, 2, 48, 64) for number in range(2 * len(model.layers))}
    export(model, {"tokens": torch.zeros(2, 1, dtype=torch.int64), **caches}, path, opset,
           ["logits", *(f"present_{name.removeprefix('past_')}" for name in caches)],
           {"tokens": {0: "batch"}, **{name: {0: "batch", 2: "past"} for name in caches}})


def write_bert(path: Path, opset: int, dynamic: bool) -> None:
    ones = torch.ones(2, 64, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "sequence"} for name in ("tokens", "mask", "segments")} if dynamic else None
    export(vectors.Encoder(), {"tokens": 0 * ones, "mask": ones, "segments": 0 * ones}, path, opset, ["hidden", "pooled"], axes)
