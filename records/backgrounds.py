"""Backgrounds: the work that keeps the device busy while something else is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from hase.utils.config import Config
from hase.utils.errors import UserError

Kind = Literal["compute", "memory", "mixed", "model"]
Queue = Literal["synchronised", "deep"]
KINDS: tuple[Kind, ...] = get_args(Kind)
QUEUES: tuple[Queue, ...] = get_args(Queue)
LONGEST_PERIOD_MS = 1000.0  # signals are handled between two periods


class Background(Config):
    """A kind of background work. Its level is the share of time for which it keeps the device busy: 1 is all the time.

    Attributes:
        name: in the rows of a dataset.
        kind: `compute` multiplies matrices, `memory` copies within the device's memory, `mixed` alternates both, `model` runs
            an ONNX model in a loop with its tensors on the device.
        queue: `synchronised` waits for each burst before the next; `deep` queues bursts up to 8 ms ahead of the GPU. Below
            level 1 the queue is empty at the end of each share. A CPU has no such queue: there `deep` is an error.
        burst_ms: approximate length of a burst on a GPU, of whole products or copies, at least one. A model's burst is one run;
            on a CPU a step takes tens of microseconds.
        period_ms: below level 1, the time from the start of one share to the next. A share should hold several runs of a model;
            on a CPU ONNX Runtime's threads also spin for a while after a run, so a model takes more than its share.
        processes: that do this work, each on its own.
        model: for kind `model`, the ONNX file; a bare name is also looked for among the exported models.
        dims: the sizes of its dynamic dimensions; the default is the size that the file suggests, else 1.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Kind = "compute"
    queue: Queue = "synchronised"
    burst_ms: float = Field(0.5, gt=0, le=100)
    period_ms: float = Field(20.0, gt=0, le=LONGEST_PERIOD_MS)
    processes: int = Field(1, ge=1, le=8, exclude_if=lambda processes: processes == 1)
    model: Path | None = Field(None, validate_default=True)
    dims: dict[str, Annotated[int, Field(ge=1)]] = {}

    @field_validator("name")
    @classmethod
    def _no_empty_cell(cls, name: str) -> str:
        if name.lower() in ("na", "nan", "none", "null"):
            raise ValueError("a table would read this name as an empty cell")
        return name

    @field_validator("model")
    @classmethod
    def _of_kind_model(cls, model: Path | None, given: ValidationInfo) -> Path | None:
        kind = given.data.get("kind", "model" if model else "compute")
        if kind == "model" and model is None:
            raise ValueError("kind model needs one, an ONNX file")
        if kind != "model" and model is not None:
            raise ValueError(f"a model is run by kind model, not by kind {kind}")
        return model

    @field_validator("dims")
    @classmethod
    def _of_a_model(cls, dims: dict[str, int], given: ValidationInfo) -> dict[str, int]:
        if dims and given.data.get("model", True) is None:
            raise ValueError("these are sizes of a model's dimensions, and there is no model")
        return dims

    def check_on(self, device: str) -> None:
        """`UserError` if the device (`cpu` or `cuda`) can't run this background."""
        if device == "cpu" and self.queue == "deep":
            raise UserError(f"background {self.name}: queue deep: only a GPU has a queue to fill, and this is a CPU target; "
                            "leave queue out")


COMPUTE = Background(name="compute")
