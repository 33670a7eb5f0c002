"""Models of torchvision, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import detection, segmentation, video

from model_zoo.exporting.torch_models import build
from recipes.kinds.networks.exporting import export, images


def write_classifier(path: Path, name: str, opset: int = 17, size: int = 224, batch: int = 1) -> None:
    export(build(name, "fp32", (size, size)), images(batch, 3, size, size), path, opset)


class FirstOf(nn.Module):
    """A segmentation network's main output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image)["out"]


def write_segmentation(path: Path, name: str, size: int, opset: int = 17) -> None:
    made = getattr(segmentation, name)(weights=None, weights_backbone=None)
    export(FirstOf(made), images(1, 3, size, size), path, opset)


def write_detector(path: Path, name: str, size: int, opset: int = 12, **options: Any) -> None:
    made = getattr(detection, name)(weights=None, weights_backbone=None, **options)
    export(made, images(1, 3, size, size), path, opset)


def write_video(path: Path, name: str, frames: int, size: int, opset: int = 17) -> None:
    export(getattr(video, name)(weights=None), {"clip": torch.randn(1, 3, frames, size, size)}, path, opset)
