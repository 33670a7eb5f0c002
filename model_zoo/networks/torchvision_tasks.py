"""torchvision's models for other tasks than classification: segmentation, detection, video."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from hase.model_zoo.exporting.network_export import Network, NetworkInput, tensors_in
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.utils.errors import UserError

COLLECTION = "torchvision"
CLASSES = 21


@dataclass(frozen=True)
class Task:
    """How one model is built: its input, what its constructor is given, whether it is a detector, and torchvision's name of it
    where that differs."""

    shape: tuple[int | str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    detects: bool = False
    architecture: str = ""


_NO_WEIGHTS = {"weights": None, "weights_backbone": None}


def _detector(size: int, architecture: str = "", **thresholds: float) -> Task:
    """A detector of images of one size. With a threshold of 0 it finds boxes although its weights are random."""
    options = {**_NO_WEIGHTS, "num_classes": CLASSES, "min_size": size, "max_size": size, **thresholds}
    return Task((1, 3, size, size), options, True, architecture)


TASKS: Mapping[str, Task] = {
    "fcn_resnet50": Task(("batch", 3, 224, 224), {**_NO_WEIGHTS, "num_classes": CLASSES}),
    "lraspp_mobilenet_v3_large": Task(("batch", 3, 320, 320), {**_NO_WEIGHTS, "num_classes": CLASSES}),
    "retinanet_resnet50_fpn": _detector(320, score_thresh=0.0),
    "retinanet_resnet50_fpn_480": _detector(480, "retinanet_resnet50_fpn", score_thresh=0.0),
    "retinanet_resnet50_fpn_640": _detector(640, "retinanet_resnet50_fpn", score_thresh=0.0),
    "ssdlite320_mobilenet_v3_large": Task((1, 3, 320, 320), _NO_WEIGHTS, True),
    "ssd300_vgg16": Task((1, 3, 300, 300), {**_NO_WEIGHTS, "num_classes": CLASSES}, True),
    "fasterrcnn_mobilenet_v3_large_fpn": _detector(320, box_score_thresh=0.0),
    "fasterrcnn_mobilenet_v3_large_fpn_480": _detector(480, "fasterrcnn_mobilenet_v3_large_fpn", box_score_thresh=0.0),
    "fasterrcnn_resnet50_fpn_480": _detector(480, "fasterrcnn_resnet50_fpn", box_score_thresh=0.0),
    "fcos_resnet50_fpn_320": _detector(320, "fcos_resnet50_fpn", score_thresh=0.0),
    "fcos_resnet50_fpn_512": _detector(512, "fcos_resnet50_fpn", score_thresh=0.0),
    "r3d_18": Task(("batch", 3, 8, 112, 112), {"weights": None}),
    "mc3_18": Task(("batch", 3, 8, 112, 112), {"weights": None}),
    "s3d": Task(("batch", 3, 16, 224, 224), {"weights": None}),
    "mvit_v1_b": Task(("batch", 3, 16, 224, 224), {"weights": None}),
    "swin3d_t": Task(("batch", 3, 8, 224, 224), {"weights": None}),
}


class FirstOutput(nn.Module):
    """A model with its first output alone (that of segmentation is a dict), or with all that a detector finds in one image."""

    def __init__(self, inner: nn.Module, all_of_them: bool) -> None:
        super().__init__()
        self.inner, self.all_of_them = inner, all_of_them

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(tensors_in(self.inner(image)))
        return outputs if self.all_of_them else outputs[:1]


def check_names(names: Iterable[str]) -> None:
    """Checks that there is a model of each name; `UserError` where there is none."""
    for name in names:
        if name not in TASKS:
            raise UserError(f"{name}: not among torchvision's models that are built here, which are {', '.join(TASKS)}")


def build_network(name: str, family: str) -> Network:
    """One of TASKS, in float32. A detector takes one image, and what it finds in it depends on the data."""
    task = TASKS[name]
    torch.manual_seed(SEED)
    module = torchvision.models.get_model(task.architecture or name, **task.options)
    sizes = {"batch": (1, 4)} if "batch" in task.shape else {}
    inputs = (NetworkInput("input", task.shape),)
    network = Network(name, COLLECTION, family, FirstOutput(module, task.detects), inputs, sizes,
                      data_sized=task.detects, traced=task.detects)
    make_like_trained(network.module, network.example)
    return network
