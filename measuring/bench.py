"""What a machine measures with: its canary, its metrics, its sharing probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from measuring.metrics.source import MetricSource
from records.probe_reading import ProbeReading
from utils.errors import UserError
from utils.frozen import Frozen


class Steadiness(Frozen):
    """How steady the machine must be.

    Attributes:
        drift: the largest drift (`Block.drift`, a ratio) of a steady block.
        attempts, attempts_under_load: how often an unsteady block is measured at most, on an idle and on a loaded device.
        patience_s: how long to wait before a block on an idle device for the machine to be as fast as at its best.
    """

    drift: float = Field(0.05, gt=0)
    attempts: int = Field(2, ge=1)
    attempts_under_load: int = Field(2, ge=1)
    patience_s: float = Field(15.0, ge=0)


def no_probe() -> ProbeReading | None:
    """Stands for the sharing probe where there is none."""
    return None


@dataclass(frozen=True)
class Bench:
    """What blocks on this machine are measured with.

    Attributes:
        device: `cpu` or `cuda`.
        machine_uuid: of this machine (utils.fingerprint.machine).
        canary_ms: runs the canary, see `Canary.run_ms`.
        source: of the device's metrics; None where none are read.
        window_s: how long the window of metrics before a block is.
        probe: reads how long tiny work waits for what else runs on the device; None where that is not read.
        steadiness: how steady the machine must be.

    Raises:
        UserError: `window_s` is too short for the source.
    """

    device: str
    machine_uuid: str
    canary_ms: Callable[[bool], Sequence[float]]
    source: MetricSource | None = None
    window_s: float = 0.5
    probe: Callable[[], ProbeReading | None] = no_probe
    steadiness: Steadiness = field(default_factory=Steadiness)

    def __post_init__(self) -> None:
        if self.source is not None and self.window_s < self.source.minimum_window_s:
            raise UserError(f"window_s {self.window_s:g}: {self.source.name} needs at least "
                            f"{self.source.minimum_window_s:g} s")
