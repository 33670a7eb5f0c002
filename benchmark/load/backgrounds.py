"""What a background is: the work that keeps the device busy while something else is measured, described in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from utils.config import Config
from utils.errors import UserError

Kind = Literal["compute", "memory", "mixed", "model"]
Queue = Literal["synchronised", "deep"]
KINDS: tuple[Kind, ...] = get_args(Kind)
QUEUES: tuple[Queue, ...] = get_args(Queue)
LONGEST_PERIOD_MS = 1000.0  # signals are heeded between two periods


class Background(Config):
    """A kind of load. How much of the time it keeps the device busy is its level: 1 is steady, below it is part-time.

    Attributes:
        name: what rows of a dataset call it.
        kind: `compute` multiplies matrices, `memory` copies within the device's memory, `mixed` takes turns, `model` runs an
            ONNX model in a loop, its tensors on the device.
        queue: `synchronised` waits for each burst before the next; `deep` queues bursts up to 8 ms ahead of the GPU, which
            part-time runs dry at the end of each period's share. A CPU has no such queue: there `deep` is an error.
        burst_ms: about how long a burst is on a GPU, of whole products or copies, at least one. A model's burst is one run;
            on a CPU a step is tens of microseconds.
        period_ms: part-time: from the beginning of one share to the next. A share should hold several runs of a model; on a CPU
            ONNX Runtime's threads also spin for a while after a run, so that a model takes more than its share.
        model: of kind `model`, the ONNX file; a bare name is also looked for among the exported models.
        dims: the sizes of its dynamic dimensions; of one not named the size that the file suggests, else 1.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    kind: Kind = "compute"
    queue: Queue = "synchronised"
    burst_ms: float = Field(0.5, gt=0, le=100)
    period_ms: float = Field(20.0, gt=0, le=LONGEST_PERIOD_MS)
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
        """`UserError` where `cpu` or `cuda` can't have it."""
        if device == "cpu" and self.queue == "deep":
            raise UserError(f"background {self.name}: queue deep: only a GPU has a queue to fill, and this is a CPU target; "
                            "leave queue out")


COMPUTE = Background(name="compute")
