"""Predicts, for a model that was not measured, which algorithm each of its convolutions should use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from convolutions.learned import fit, predict_ms
from convolutions.shapes import ConvShape, NotSupported, shape_of
from convolutions.table import Case
from model_zoo.exporting.torch_models import bare, check_names
from utils.errors import UserError
from utils.lazy import torch

if TYPE_CHECKING:
    from convolutions.shapes import Convolution, Tensor

Kind = tuple[Any, ...]


def layer_shapes(model: str, input_size: int, batch: int, dtype: str) -> list[tuple[str, ConvShape]]:
    """The convolutions of a torchvision model in the order of a run, without computing anything.

    Raises:
        UserError: no such model, or it does not work at this size.
    """
    check_names([model])
    found: list[tuple[str, ConvShape]] = []

    def note(name: str, layer: Convolution, inputs: tuple[Tensor]) -> None:
        found.append((name, shape_of(layer, inputs[0])))

    try:
        with torch.device("meta"), torch.inference_mode():
            network = bare(model, (input_size, input_size)).eval().to(torch.float16 if dtype == "fp16" else torch.float32)
            for name, layer in network.named_modules():
                if isinstance(layer, torch.nn.Conv2d):
                    layer.register_forward_pre_hook(partial(note, name))
            network(torch.empty(batch, 3, input_size, input_size, dtype=torch.float16 if dtype == "fp16" else torch.float32))
    except (RuntimeError, NotSupported) as error:
        raise UserError(f"{model} at {input_size}x{input_size}: {str(error).partition(chr(10))[0]}") from None
    return found


def kind_of(shape: ConvShape) -> Kind:
    """What decides, as far as is known, whether an algorithm can run a convolution."""
    return shape.kernel, shape.stride, shape.dilation, min(shape.groups, 2), shape.dtype


def able(cases: Sequence[Case]) -> dict[Kind, dict[str, float]]:
    """By kind of convolution, the share of the measured ones that each algorithm could run."""
    ran: dict[Kind, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for name in (*case.times_ms, *case.refused):
            ran[kind_of(case.shape)][name].append(name in case.times_ms)
    return {kind: {name: sum(those) / len(those) for name, those in names.items()} for kind, names in ran.items()}


def predicted_rows(cases: Sequence[Case], layers: Sequence[tuple[str, ConvShape]]) -> list[dict[str, Any]]:
    """One row for each layer: its predicted best algorithm and the predicted time (ms) under each that can probably run it.

    `basis` says how sure that is: `measured kind` (most layers with this filter, stride and grouping could run it, and these
    algorithms alone are considered) or `guess` (no such layer was measured, and every algorithm is considered).

    Args:
        cases: measured, of one device.
        layers: names and shapes.
    """
    model, shares = fit(cases), able(cases)
    shapes = [shape for _, shape in layers]
    times = {name: predict_ms(model, shapes, name) for name in model.type_codes}
    rows = []
    for place, (layer, shape) in enumerate(layers):
        share = shares.get(kind_of(shape))
        names = [name for name in times if share is None or share.get(name, 0.0) > 0.5]
        predicted = {name: float(times[name][place]) for name in names}
        best = min(predicted, key=predicted.__getitem__, default=None)
        rows.append({
            "layer": layer, "filter": f"{shape.kernel[0]}x{shape.kernel[1]}",
            "channels": f"{shape.in_channels} to {shape.out_channels}", "input": f"{shape.height}x{shape.width}", "best": best,
            "best_ms": predicted.get(best) if best else None, "basis": "guess" if share is None else "measured kind",
            **{f"{name}_ms": predicted.get(name) for name in sorted(times)}})
    return rows
