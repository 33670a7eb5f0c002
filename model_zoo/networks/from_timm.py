"""timm's models, as they are made for export."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import timm
import torch

from hase.model_zoo.exporting.network_export import Network, NetworkInput
from hase.model_zoo.exporting.torch_models import SEED, make_like_trained
from hase.utils.errors import UserError

COLLECTION = "timm"


def check_names(names: Iterable[str]) -> None:
    """Checks that timm has a model of each name; `UserError` with near matches where it has not."""
    known = timm.list_models()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 4, 0.5)
            raise UserError(f"{name}: timm has no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))


def build_network(name: str, family: str) -> Network:
    """A timm model at its own image size, in float32."""
    torch.manual_seed(SEED)
    module = timm.create_model(name, pretrained=False, exportable=True)
    shape = timm.data.resolve_data_config({}, model=module)["input_size"]
    make_like_trained(module, lambda: (torch.randn(2, *shape),))
    return Network(name, COLLECTION, family, module, (NetworkInput("input", ("batch", *shape)),), {"batch": (1, 16)})
