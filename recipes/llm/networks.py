"""The language models to build and measure, as in networks.yaml, and the folders of built models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

NETWORKS_FILE = Path(__file__).with_name("networks.yaml")
PRECISIONS = ("fp16", "int4", "bf16")
Point = tuple[PositiveInt, PositiveInt]


class LanguageNetwork(Frozen):
    """One network: the class of onnxruntime-genai's builder, the config class of transformers and its arguments `sizes`."""

    builder: str
    config: str
    sizes: dict[str, Any]


class LanguageNetworks(Frozen):
    """The networks by name, which is also their family, and what is measured for each."""

    networks: dict[str, LanguageNetwork]
    points: tuple[Point, ...]  # batch and prompt length, in tokens
    energy_points: tuple[Point, ...] = ()  # those of `points` whose energy is measured, too
    memory_points: tuple[Point, ...]  # whose memory is measured, each in its own process
    generate: PositiveInt  # tokens after the prompt

    def chosen(self, names: list[str]) -> dict[str, LanguageNetwork]:
        """The networks of these names, or all if none is named."""
        if unknown := sorted(set(names) - self.networks.keys()):
            raise UserError(f"no network {', '.join(unknown)}; there are {', '.join(self.networks)}")
        return {name: network for name, network in self.networks.items() if not names or name in names}


def model_folder(workspace: Workspace, name: str, precision: str) -> Path:
    """The folder of a built model."""
    return workspace.root / "llm" / "models" / f"{name}-{precision}"
