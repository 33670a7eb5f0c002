"""The record of one measurement, and the names of labels and variants."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from hase.utils.frozen import Frozen
from hase.utils.paths import FileName

LONGEST_MS = 1e12  # 30 years: a longer time is damage
Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
ModelMilliseconds = Annotated[float, Field(ge=1e-9, le=LONGEST_MS)]  # of a whole run: at least a picosecond
Place = Literal["alone", "carrier", "in_model"]
Status = Literal["ok", "failed", "crashed", "timeout", "interrupted"]
Inputs = Literal["", "standardised", "given"]


def now() -> str:
    """The current time in UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat()


class Measurement(Frozen):
    """Raw samples of one unit under one label.

    Attributes:
        subject: what kind of unit it is, e.g. `kernel` or `model`.
        id: the unit's name within its kind: a kernel's id, a model record's name.
        label: what was timed. For a kernel one of LABELS; for a whole model `latency`, `host` (dispatch alone, without waiting
            for the GPU), `gpu`, `energy`, or one of VARIANTS.
        context: the place in words: `alone`, `carrier`, or the name of the model that the unit ran in.
        place: `alone` (a session of its own), `carrier` (a graph of many kernels, which finds the caches as
            in a model) or `in_model`.
        samples_ms: one per run.
        quantities: further samples by name and unit, e.g. `energy_j` or `power_w`. They need not be one per run.
        facts: what the unit is and how it was run, by name, where its id does not lead to a description elsewhere.
        members: of a batch of kernels (subject `kernels`): their ids.
        launches: label `gpu`: kernels, copies and fills on the GPU in a run.
        cuda_kernels: label `gpu` of a kernel: their names in order; of many, see `kernel_names`.
        queued: label `gpu` of a kernel whose work runs side by side on several streams: whether all launches waited for the
            GPU, as in a model whose host is ahead. If not, how far they overlap depends on the host.
        disturbance: of a model on an idle GPU: how much other work slowed the host down meanwhile, a ratio (quiet_host).
        probe_us: of a model on a GPU: the time of the host probe meanwhile.
        inputs: of a kernel whose time depends on values (`time_by_values`), and of a model that has one: whether the inputs of
            the model, or the kernel's own, were standardised random numbers or `given` by the user; "" before this was
            recorded, and of other kernels and models.
        status: `ok`, `failed`, `crashed` or `timeout`; `error` says why; of label `energy`, what is wrong with the reading.
            `interrupted` where the machine lacked something (disk space, memory, open files), or the process could not use its
            device or was ended from outside: that says nothing of the unit, so no journal keeps it, and the unit is measured
            again.
        started, ended: UTC, ISO 8601.
    """

    subject: str
    id: FileName
    label: str
    context: str
    place: Place
    samples_ms: tuple[Milliseconds, ...] = ()
    quantities: dict[str, tuple[float, ...]] = {}
    facts: dict[str, str | int | float] = {}
    members: tuple[str, ...] = Field((), exclude_if=lambda members: not members)
    launches: int | None = None
    cuda_kernels: tuple[str, ...] = ()
    queued: bool = Field(False, exclude_if=lambda queued: not queued)
    disturbance: float | None = None
    probe_us: float | None = None
    inputs: Inputs = Field("", exclude_if=lambda inputs: not inputs)
    status: Status = "ok"
    error: str = ""
    started: str = ""
    ended: str = ""

    @model_validator(mode="after")
    def _went_well_with_samples(self) -> Self:
        if self.status == "ok" and not self.samples_ms and self.subject in ("kernel", "model"):  # tables take their medians
            raise ValueError(f"{self.subject} {self.id} has status ok and no samples of label {self.label}")
        return self


DATASET_VERSION = 2
Label = Literal["run", "kernel_time", "node_span", "unprofiled", "gpu"]
LABELS: tuple[Label, ...] = get_args(Label)
UNPROFILED, GPU_LABEL = LABELS[3:]
IN_MODEL_LABELS = LABELS[1:4]  # the time of a kernel in a model; taken in models
DEFAULT_LABELS = LABELS[:3]  # every device has these, and every kernel gets them by default
COLLECT = "python benchmark/collector.py"
DRIFT_ADMITTED = 0.05  # the largest drift of a steady block, a ratio, where a config says nothing else
BELOW_BEST = 0.05  # how much slower than at its best the canary may be, beyond the admitted drift
CPU_BUSY = "DCGM_FI_DEV_CPU_UTIL_TOTAL"  # the metric: the share of all processors' time that something runs
BUSY_ADMITTED = 0.25  # the largest on an idle CPU before a steady block: a choice; a quiet machine's services take up to 0.15
MOST_NAMES = 64  # of CUDA kernels in a measurement


def kernel_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of the CUDA kernels that one kernel launched, in order; where they are more than MOST_NAMES, each name once. A
    grouped convolution may launch 24,000, the same six again and again."""
    return tuple(names) if len(names) <= MOST_NAMES else tuple(dict.fromkeys(names))


Variant = Literal["host_io", "cuda_graph"]  # further ways to run a whole model: numpy in and out; captured and replayed
VARIANTS: tuple[Variant, ...] = get_args(Variant)
KERNELS = "kernels"  # subject of a batch of kernels whose energy is measured together
ENERGY = "energy"  # label of a whole model: what a run takes of the device's energy
# Runs for the energy may take so many times as long as for the latency: a device that works for long gets warm. Where they take
# longer, other work ran meanwhile.
SLOWDOWN_ADMITTED = 1.3
DISTURBANCE_ADMITTED = 0.12  # how far the host probe may exceed a good reading; on a disturbed host it does by 0.4


def drift_key(label: str) -> str:
    """What stands beside a measured time of `label` where it rests on an unsteady block: that block's drift, a ratio."""
    return f"{label} drift"


def inputs_key(label: str) -> str:
    """What stands beside a measured time of `label`, as 1, where the time depends on values and the inputs were realistic."""
    return f"{label} inputs"
