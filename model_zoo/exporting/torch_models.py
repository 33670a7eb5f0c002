"""torchvision's classification models: by name, with random weights that behave like trained ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.lazy import torch, torchvision

SEED = 0
CALIBRATION_SIZE = 224
SMALL = 0.02  # standard deviation of what torchvision starts at zero
CHUNK = 8  # images that torch computes at a time for a reference

# Architectures built for one image size, and what their constructor calls it.
SIZED = {"vit": "image_size", "maxvit": "input_size"}


def group_of(name: str) -> str:
    """The group of a torchvision model, `resnet` for `wide_resnet50_2`: its variants, which are held out together."""
    match = re.match(r"[a-zA-Z]+", name.removeprefix("wide_"))
    return match.group(0).lower() if match else name


def check_names(names: Iterable[str]) -> None:
    """Checks that torchvision has a classification model of each name.

    Raises:
        UserError: it has not; near matches are listed.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 4, 0.5)
            raise UserError(f"{name}: torchvision has no such classification model"
                            + (f"; did you mean {', '.join(near)}?" if near else f" (it has {', '.join(known)})"))


def is_sized(name: str) -> bool:
    """Whether a model is built for one image size."""
    return _architecture(name) in SIZED


def _architecture(name: str) -> str:
    return name.split("_")[0]


def build(name: str, dtype: str, size: tuple[int, int]) -> torch.nn.Module:
    """The model in eval mode, without auxiliary heads, its weights random but the same every time.

    Values do not change latency, so none are downloaded, as long as they are like trained ones. None may be all zero: a
    bias of zeros, as layers start with, is dropped on export, and the kernel that would add it with it. Activations
    must stay in range, or fp16 overflows and a comparison of outputs says nothing: BatchNorms are set by a random batch.

    Args:
        name: a torchvision classification model.
        dtype: `fp32` or `fp16`.
        size: height and width; only models built for one size heed it.

    Raises:
        UserError: the model can't be built for this size.
    """
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
    if is_sized(name):
        architecture = _architecture(name)
        if architecture == "vit" and size[0] != size[1]:
            raise UserError(f"{name} takes square images, not {size[0]}x{size[1]}")
        options[SIZED[architecture]] = size[0] if architecture == "vit" else size
    torch.manual_seed(SEED)
    try:
        model = torchvision.models.get_model(name, weights=None, **options)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{name} can't be built for {size[0]}x{size[1]}: {error}") from None
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=SMALL)
        _calibrate(model, size if is_sized(name) else (CALIBRATION_SIZE, CALIBRATION_SIZE))
    return model.eval().half() if dtype == "fp16" else model.eval()


def _calibrate(model: torch.nn.Module, size: tuple[int, int]) -> None:
    """Makes every BatchNorm scale its input to a root mean square of 1, as it finds it in one pass of a random batch.

    Means are left at 0: random images look alike to a random model, and with their mean taken away little but rounding
    errors would be left to compare.
    """
    def scale(norm: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        norm.running_var.copy_(inputs[0].square().mean((0, 2, 3)))  # type: ignore[operator]

    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(scale) for norm in norms]
    if norms:
        model.eval()(torch.randn(2, 3, *size))
    for hook in hooks:
        hook.remove()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def reference(model: torch.nn.Module, images: np.ndarray, device: str) -> np.ndarray:
    """torch's outputs for `images` in float32, computed a few images at a time, so that memory stays low.

    An fp16 model computes in float32 with its fp16 weights: torch's fp16 lacks operators on CPUs, and rounding then
    counts once, not on both sides of a comparison. On a GPU it computes without TF32.
    """
    torch_device = torch.device("cuda" if device == "cuda" else "cpu")
    dtype = next(model.parameters()).dtype
    model.to(torch_device, torch.float32)
    try:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            chunks = (torch.from_numpy(images[first:first + CHUNK]) for first in range(0, len(images), CHUNK))
            return np.concatenate([model(chunk.to(torch_device, torch.float32)).cpu().numpy() for chunk in chunks])
    finally:
        model.to("cpu", dtype)  # exact: the weights came from this type
