"""Writes a network as an ONNX file."""

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

FIRST_DYNAMO_OPSET = 18  # older operator sets need torch's older exporter

torch.backends.mha.set_fastpath_enabled(False)  # its operators are not exported


def export(module: nn.Module, inputs: Mapping[str, Tensor], path: Path, opset: int = 18, outputs: Sequence[str] = (),
           dynamic: Mapping[str, Mapping[int, str]] | None = None) -> None:
    """Writes `module` in evaluation mode.

    Args:
        inputs: in the order of the module's arguments.
        opset: below FIRST_DYNAMO_OPSET torch's older exporter is used.
        outputs: their names; by default torch's own.
        dynamic: by input, names of dynamic dimensions by axis; the same name means the same size.
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
            each = [{axis: sizes[name] for axis, name in (dynamic or {}).get(key, {}).items()} for key in inputs]
            kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
            single = len(kinds) - (inspect.Parameter.VAR_POSITIONAL in kinds)  # inputs for `*past` form one group
            shapes = (*each[:single], *([tuple(each[single:])] if single < len(each) else []))
            program = torch.onnx.export(module, tuple(inputs.values()), dynamo=True, verbose=False,
                                        dynamic_shapes=shapes if dynamic else None, **names)
        finally:
            logging.disable(before)
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    program.save(str(path), external_data=False)


def random_inputs(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Random numbers of these shapes by name."""
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def images(*shape: int) -> dict[str, Tensor]:
    """One input, `image`."""
    return {"image": torch.randn(*shape)}
