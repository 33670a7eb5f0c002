"""The language models of a file such as networks.yaml, and where their folders and measurements lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.paths import Workspace

NETWORKS_FILE = Path(__file__).with_name("networks.yaml")
PRECISIONS = ("fp16", "int4", "bf16")
Point = tuple[PositiveInt, PositiveInt]


class LanguageNetwork(Frozen):
    """One network.

    Attributes:
        builder: the class of onnxruntime-genai's builder.
        config: the class of transformers that describes it.
        sizes: what that class is given.
    """

    builder: str
    config: str
    sizes: dict[str, Any]


class LanguageNetworks(Frozen):
    """The networks by name, and what is measured of each.

    Attributes:
        networks: by name, which is also their family.
        points: batch and length of the prompt, in tokens.
        energy_points: of `points`, those of which energy is measured, too.
        memory_points: those of which memory is measured, in a process of its own each.
        generate: tokens after the prompt.
    """

    networks: dict[str, LanguageNetwork]
    points: tuple[Point, ...]
    energy_points: tuple[Point, ...] = ()
    memory_points: tuple[Point, ...]
    generate: PositiveInt

    def chosen(self, names: list[str]) -> dict[str, LanguageNetwork]:
        """The networks of these names; all if none is named.

        Raises:
            UserError: there is no such network.
        """
        if unknown := sorted(set(names) - self.networks.keys()):
            raise UserError(f"no network {', '.join(unknown)}; there are {', '.join(self.networks)}")
        return {name: network for name, network in self.networks.items() if not names or name in names}


def read_networks(path: Path) -> LanguageNetworks:
    """The networks of a file.

    Raises:
        UserError: it can't be read.
    """
    return read_config(path, LanguageNetworks)


def model_folder(workspace: Workspace, name: str, precision: str) -> Path:
    """The folder of a built model."""
    return workspace.root / "llm" / "models" / f"{name}-{precision}"
