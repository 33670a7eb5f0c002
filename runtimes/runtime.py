"""The interface of a runtime: facts, and functions that analyse models and build kernels.

Each runtime has a folder in runtimes/ with a module `runtime` that defines RUNTIME, and a line in the table of
runtimes/__init__.py. No other code compares a runtime's name: differences between runtimes are fields here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hase.records.kernel_record import Kernel, ModelOrigin, ModelRecord
from hase.records.measurement import Label, Variant
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    import onnx


class Analyze(Protocol):
    """Analyses a model without writing files. With `static`, it is optimised as if exported at the sizes in `dims`."""

    def __call__(self, model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int],
                 static: bool) -> ModelRecord: ...


class WriteRecords(Protocol):
    """Analyses a model and writes its records, and its kernels where the runtime has no `build_kernel`. `origin` wins over what
    the model's file says. `static` as in `Analyze`."""

    def __call__(self, workspace: Workspace, model: Path, device: str, dims: Mapping[str, int], static: bool,
                 origin: ModelOrigin) -> list[ModelRecord]: ...


@dataclass(frozen=True)
class DeviceLabels:
    """The labels that a runtime's worker measures on one device."""

    # all that it can measure of a kernel. A kernel counts as measured once it has the first of the labels that are asked for.
    labels: tuple[Label, ...]
    default_labels: tuple[Label, ...]  # those that every kernel gets where the config names none
    variants: tuple[Variant, ...] = ()  # further ways to run a whole model
    default_variants: tuple[Variant, ...] = ()  # those that every model gets where the config names none


@dataclass(frozen=True)
class Runtime:
    """A runtime: facts, and functions that analyse models and build kernels."""

    name: str  # in flavours, targets and configs
    title: str  # for people
    package: str  # its name in a machine's versions
    version: Callable[[], str]  # gives the full version that is installed; "" where it is not
    check: Callable[[], None]  # checks that the runtime is installed, else raises a UserError that says how to install it
    levels: tuple[str, ...]  # of optimisation, the usual one first
    devices: Mapping[str, DeviceLabels]  # what is measured on `cpu` and `cuda`; a device that is missing is not supported
    model_suffixes: tuple[str, ...]  # of the model files that it reads
    kernel_suffix: str  # of the files of built kernels
    analyze: Analyze  # analyze, write_records: take models apart
    write_records: WriteRecords
    read_kernel: Callable[[Path], Kernel]  # the kernel that a built file holds
    worker: str  # the module that a worker process runs; it speaks runtimes/protocol.py
    analyze_with: str  # analyze_with, build_with: the commands that make records and built kernels
    build_with: str
    # builds a kernel that a record describes into a folder; None where analysing a model builds its kernels
    build_kernel: Callable[[Kernel, Path], object] | None = None
    # runs a built kernel once on `cpu` or `cuda`, and raises a UserError if it fails; None as for build_kernel
    check_kernel: Callable[[Path, Kernel, str], None] | None = None
    # for a level at which only some kernels get built (as by TVM's search), the level at which the others run instead
    runs_as: Mapping[str, str] = field(default_factory=dict)
    takes_setting: bool = False  # whether threads, cores and a memory limit can be set (`Setting`)
    # measures_energy, probes_sharing: whether its worker can measure the energy of runs, and read the sharing probe
    measures_energy: bool = False
    probes_sharing: bool = False
    # whether its sessions keep memory beyond weights and live activations, as ONNX Runtime's arena does
    keeps_arena: bool = False
    uses_cudnn: bool = False  # whether times on a GPU depend on the version of cuDNN
    analysis_limit_s: float = 50.0  # how long taking a small model apart may take (see `hase.ort_analysis.isolated.analysis`)

    def on(self, device: str) -> DeviceLabels:
        """The labels for `cpu` or `cuda`; a `UserError` if the device is not supported."""
        if device not in self.devices:
            raise UserError(f"device {device}: {self.title} is supported on {', '.join(self.devices)} only")
        return self.devices[device]
