"""Builds torchvision's classification models by name, with random weights that behave like trained ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from hase.utils.errors import UserError
from hase.utils.lazy import torch, torchvision

SEED = 0
CALIBRATION_SIZE = 224
SMALL = 0.02  # standard deviation of the weights that torchvision initialises with zeros
CHUNK = 8  # batch size of torch's reference outputs
MOST_LISTED = 100  # names in an error

# Architectures that are built for one image size, and the name of that argument.
SIZED = {"vit": "image_size", "maxvit": "input_size"}


def group_of(name: str) -> str:
    """The group that a torchvision model shares with its variants: `resnet` for `wide_resnet50_2`."""
    match = re.match(r"[a-zA-Z]+", name.removeprefix("wide_"))
    return match.group(0).lower() if match else name


def check_names(names: Iterable[str]) -> None:
    """Checks that torchvision has a classification model of each name."""
    known = torchvision.models.list_models(module=torchvision.models)
    check_known(names, known, "torchvision has no such classification model")


def check_known(names: Iterable[str], known: Collection[str], missing: str) -> None:
    """Raises `UserError` for an unknown name: `missing` says what is wrong, and similar names (or else all) what there is."""
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(name, known, 4, 0.5)
            offer = f"did you mean {', '.join(similar)}?" if similar else f"there are {', '.join(sorted(known)[:MOST_LISTED])}"
            raise UserError(f"{name}: {missing}; {offer}")


def is_sized(name: str) -> bool:
    """Whether a model is built for one image size."""
    return _architecture(name) in SIZED


def _architecture(name: str) -> str:
    return name.split("_")[0]


def build(name: str, dtype: str, size: tuple[int, int]) -> torch.nn.Module:
    """The model in eval mode, without auxiliary heads, with reproducible random weights.

    Weights do not change the latency, so nothing is downloaded. But they must be like trained ones: export would remove a bias
    of zeros, the initial value of many layers, together with the kernel that adds it. And activations must stay in range, or
    fp16 overflows and outputs can't be compared: so BatchNorms are calibrated with a random batch. `size` matters only for
    models with one size.
    """
    torch.manual_seed(SEED)
    model = bare(name, size)
    image_size = size if is_sized(name) else (CALIBRATION_SIZE, CALIBRATION_SIZE)
    make_like_trained(model, lambda: (torch.randn(2, 3, *image_size),))
    return model.half() if dtype == "fp16" else model


def bare(name: str, size: tuple[int, int]) -> torch.nn.Module:
    """The model as torchvision initialises it, in torch's device context (`meta`: only shapes)."""
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
    if is_sized(name):
        architecture = _architecture(name)
        if architecture == "vit" and size[0] != size[1]:
            raise UserError(f"{name} takes square images, not {size[0]}x{size[1]}")
        options[SIZED[architecture]] = size[0] if architecture == "vit" else size
    try:
        return torchvision.models.get_model(name, weights=None, **options)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{name} can't be built for {size[0]}x{size[1]}: {error}") from None


def make_like_trained(model: torch.nn.Module, draw_inputs: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    """Puts a model with random weights in evaluation mode, and makes its weights like trained ones.

    No weight stays all zero, and every BatchNorm scales its input to a root mean square of 1, measured in a run on
    `draw_inputs()`. Means stay 0: to a random model all random images look alike, and without their mean little more than
    rounding errors would remain to compare.
    """
    def scale(norm: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
        norm.running_var.copy_(inputs[0].square().mean(axes))  # type: ignore[operator]

    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=SMALL)
        norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
                 and module.running_var is not None]
        hooks = [norm.register_forward_pre_hook(scale) for norm in norms]
        if norms:
            model(*draw_inputs())
        for hook in hooks:
            hook.remove()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def reference(model: torch.nn.Module, images: np.ndarray, device: str) -> np.ndarray:
    """torch's outputs for `images` in float32, in small batches to save memory. An fp16 model computes in float32 with its fp16
    weights: torch lacks fp16 operators on CPUs, and so only one side of a comparison is rounded. On a GPU, TF32 is off."""
    torch_device = torch.device("cuda" if device == "cuda" else "cpu")
    dtype = next(model.parameters()).dtype
    model.to(torch_device, torch.float32)
    try:
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            chunks = (torch.from_numpy(images[first:first + CHUNK]) for first in range(0, len(images), CHUNK))
            return np.concatenate([model(chunk.to(torch_device, torch.float32)).cpu().numpy() for chunk in chunks])
    finally:
        model.to("cpu", dtype)  # exact, since the weights had this type before
