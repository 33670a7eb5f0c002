"""What the rest of Hase knows of a runtime: its facts, and the functions that analyse and build under it.

A runtime analyses models, builds kernels, opens them and runs them. Each has a folder in runtimes/ with a module `runtime` that
defines RUNTIME, and a line in the table of runtimes/__init__.py. Nothing outside of these compares a runtime's name: what
differs between runtimes is a field here.
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
    """Takes a model apart in memory.

    Raises:
        UserError: the model can't be read, or the runtime can't take it apart.
    """

    def __call__(self, model: Path | onnx.ModelProto, flavour: Flavour, dims: Mapping[str, int],
                 static: bool) -> ModelRecord: ...


class WriteRecords(Protocol):
    """Takes a model apart, and writes its records and, where the runtime makes both at once, its kernels. What `origin` gives
    wins over what the model's file says.

    Raises:
        UserError: the model can't be read, or the runtime can't take it apart.
    """

    def __call__(self, workspace: Workspace, model: Path, device: str, dims: Mapping[str, int], static: bool,
                 origin: ModelOrigin) -> list[ModelRecord]: ...


@dataclass(frozen=True)
class DeviceLabels:
    """What a runtime's worker measures on one device.

    Attributes:
        labels: of kernels, all that it takes. The first of those that are asked for says whether a kernel was measured.
        default_labels: those that every kernel gets where the config names none.
        variants: further ways to run a whole model.
        default_variants: those that are taken where the config names none.
    """

    labels: tuple[Label, ...]
    default_labels: tuple[Label, ...]
    variants: tuple[Variant, ...] = ()
    default_variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """A runtime.

    Attributes:
        name: in flavours, targets and configs.
        title: for people.
        package: its name in a machine's versions.
        version: gives the full version that is installed; "" where it is not.
        check: checks that the runtime is installed, else raises a UserError that says how to install it.
        levels: of optimisation, the usual one first.
        runs_as: of a level whose kernels may be built in part, the level whose kernels run in place of the others.
        devices: what is measured on `cpu` and `cuda`; a device that is missing is not supported.
        model_suffixes: of the model files that it reads.
        kernel_suffix: of the files of built kernels.
        analyze, write_records: take models apart.
        read_kernel: the kernel that a built file holds.
        build_kernel: builds a kernel that a record describes into a folder; None where analysing a model builds its kernels.
        check_kernel: runs a built kernel once on `cpu` or `cuda`, and raises a UserError if it fails; None as for build_kernel.
        worker: the module that a worker process runs; it speaks runtimes/protocol.py.
        takes_setting: whether threads, cores and a memory limit can be set (`Setting`).
        measures_energy, probes_sharing: whether its worker can measure the energy of runs, and read the sharing probe.
        keeps_arena: whether its sessions keep memory beyond weights and live activations, as ONNX Runtime's arena does.
        uses_cudnn: whether times on a GPU depend on the version of cuDNN.
        analysis_limit_s: how long taking a small model apart may take (see `hase.ort_analysis.isolated.analysis`).
        analyze_with, build_with: the commands that make records and built kernels.
    """

    name: str
    title: str
    package: str
    version: Callable[[], str]
    check: Callable[[], None]
    levels: tuple[str, ...]
    devices: Mapping[str, DeviceLabels]
    model_suffixes: tuple[str, ...]
    kernel_suffix: str
    analyze: Analyze
    write_records: WriteRecords
    read_kernel: Callable[[Path], Kernel]
    worker: str
    analyze_with: str
    build_with: str
    build_kernel: Callable[[Kernel, Path], object] | None = None
    check_kernel: Callable[[Path, Kernel, str], None] | None = None
    runs_as: Mapping[str, str] = field(default_factory=dict)
    takes_setting: bool = False
    measures_energy: bool = False
    probes_sharing: bool = False
    keeps_arena: bool = False
    uses_cudnn: bool = False
    analysis_limit_s: float = 50.0

    def on(self, device: str) -> DeviceLabels:
        """What it measures on `cpu` or `cuda`.

        Raises:
            UserError: it does not support this device.
        """
        if device not in self.devices:
            raise UserError(f"device {device}: {self.title} is supported on {', '.join(self.devices)} only")
        return self.devices[device]
