"""Where the networks of each collection come from, and what they need."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import NamedTuple

from model_zoo.exporting.network import Network
from model_zoo.exporting.pool_config import Collection
from utils.errors import UserError

MODULES: dict[Collection, str] = {
    "timm": "model_zoo.networks.from_timm", "transformers": "model_zoo.networks.from_transformers",
    "torchvision": "model_zoo.networks.torchvision_tasks", "other": "model_zoo.networks.other",
    "random": "model_zoo.networks.drawn"}
OPTIONAL_PACKAGES: dict[Collection, str] = {"timm": "timm", "transformers": "transformers"}


class NetworkSource(NamedTuple):
    """What a module of model_zoo/networks offers.

    Attributes:
        check_names: raises `UserError` for a name that it does not know.
        build_network: makes the network of a name, which belongs to a family.
    """

    check_names: Callable[[Iterable[str]], None]
    build_network: Callable[[str, str], Network]


def network_source(collection: Collection) -> NetworkSource:
    """The source of a collection's networks; `UserError` where a package that it needs is not installed."""
    package = OPTIONAL_PACKAGES.get(collection)
    if package and importlib.util.find_spec(package) is None:
        raise UserError(f"{package} is not installed here; install it with: pip install -r requirements-pool.txt")
    module = importlib.import_module(MODULES[collection])
    return NetworkSource(module.check_names, module.build_network)
