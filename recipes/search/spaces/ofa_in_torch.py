"""The networks of inference/search/ofa.py as torchvision builds them and torch exports them."""

from __future__ import annotations

import contextlib
import io
import warnings

from inference.search import ofa
from utils.lazy import onnx, torch, torchvision


def network_of(name: str) -> torch.nn.Module:
    """The network with this name, with random weights. Their biases are no zeros, as those of a trained network.

    Raises:
        UserError: the space has no such network.
    """
    choice, mobilenet = ofa.choice_of(name), torchvision.models.mobilenetv3
    before, *widths = ofa.channels_of(choice.width)
    blocks = [mobilenet.InvertedResidualConfig(before, 3, before, before, False, "RE", 1, 1, 1.0)]
    for stage, channels, of_stage in zip(ofa.STAGES, widths, choice.stages, strict=True):
        for place, block in enumerate(of_stage):
            blocks.append(mobilenet.InvertedResidualConfig(
                before, block.window, ofa.rounded(block.expansion * before), channels, stage.excited,
                {"Relu": "RE", "HardSwish": "HS"}[stage.activation], stage.stride if place == 0 else 1, 1, 1.0))
            before = channels
    torch.manual_seed(0)
    network = mobilenet.MobileNetV3(blocks, ofa.FEATURES, ofa.CLASSES)
    with torch.no_grad():
        for called, values in network.named_parameters():
            if called.endswith("bias"):
                values.normal_(std=0.1)
    return network.eval()


def exported(name: str) -> onnx.ModelProto:
    """The ONNX model of a network, for one image."""
    side = ofa.choice_of(name).side
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(network_of(name), (torch.zeros(1, 3, side, side),), dynamo=True, external_data=False,
                                    verbose=False, input_names=["input"], output_names=["output"])
    torch._dynamo.reset()  # its caches hold every model traced
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    return program.model_proto
