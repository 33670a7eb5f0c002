"""The protocol between a client (`Worker`) and a runtime's worker process (`serve`): one JSON object per line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from hase.records.kernel_record import record_name
from hase.records.measurement import Effort, Measurement, now
from hase.records.probe_reading import ProbeReading
from hase.records.traces import GpuRun
from hase.runtimes import runtime_named
from hase.utils.config import Frozen
from hase.utils.errors import DeviceUnavailable, UserError, lacks_resources
from hase.utils.files import disk_is_full
from hase.utils.fingerprint import DEFAULT_RUNTIME, Target
from hase.utils.processes import WorkerFailed, WorkerProcess, serve_lines

IDLE_CANARY = Effort(warmup=2, warmup_s=0.02, budget_s=0.03, least_runs=15, most_runs=15)
LOADED_CANARY = Effort(warmup=2, warmup_s=0.02, budget_s=0.3, least_runs=15, most_runs=300)


class RuntimeSetting(Frozen):
    """How a runtime runs everything, if it does not take options from each request."""

    level: str  # the flavour's optimisation
    threads: int = Field(1, ge=1)  # of the runtime
    # the first cores of the process, to which all threads are pinned together; 0: they are not pinned
    cores: int = Field(0, ge=0)
    memory_limit_mib: float = Field(0.0, ge=0)  # a model that needs more is not run; 0: no limit
    kernels: str = ""  # the folder with the functions of the flavour's kernels

    @classmethod
    def of(cls, target: Target, kernels: Path, memory_limit_mib: float = 0.0) -> RuntimeSetting | None:
        """The setting for a target, with kernels below `kernels`; None if the worker takes options from requests."""
        if not runtime_named(target.flavour.runtime).takes_setting:
            return None
        return cls(level=target.flavour.optimization, threads=max(target.threads, 1), cores=target.cores,
                   kernels=str(kernels / target.flavour.name), memory_limit_mib=memory_limit_mib)

    def take_cores(self) -> None:
        """Restricts this process to its first `cores`."""
        allowed = sorted(os.sched_getaffinity(0))
        if self.cores > len(allowed):
            raise UserError(f"cores: {self.cores}, but this process may use {len(allowed)}")
        if self.cores:
            os.sched_setaffinity(0, allowed[:self.cores])


class Request(Frozen):
    """A request to a worker: one piece of work."""

    # `alone` times a built kernel in its own session; `carrier` times several one after another in one graph; `model` times a
    # whole model and profiles its kernels, `model_labels` only profiles them; `model_gpu` traces a whole model on the GPU for
    # its label `gpu`, `model_trace` for the runs themselves; `model_graph` times it as a CUDA graph; `canary` times a fixed
    # piece of work; `sharing_probe` reads for `effort.budget_s` seconds how long tiny work waits for other processes;
    # `prepare` loads what the others need, so that none waits for it; `session` times a whole model as the evaluator does;
    # `kernels_energy` measures the energy of a batch of built kernels, one run of each after another
    do: Literal["alone", "carrier", "model", "model_labels", "model_gpu", "model_trace", "model_graph", "canary",
                "sharing_probe", "prepare", "session", "kernels_energy"]
    device: str
    effort: Effort
    paths: tuple[str, ...] = ()  # the files of the kernels, or of the model
    record: str = ""  # for a model whose kernels get labels, its record
    dims: dict[str, int] = {}  # for a model, the sizes of its dynamic dimensions
    static: bool = False  # for a model, whether they are fixed before ONNX Runtime optimises it
    inputs: str = ""  # for a model under ONNX Runtime, a file with values of its inputs; "": generated ones
    # for a carrier or a model, the labels of its kernels, of IN_MODEL_LABELS and (carrier only) `gpu`; for `prepare`, `gpu`
    # if it will be asked for; for a session, how it is run: `latency`, `host_io` or `cuda_graph`
    labels: tuple[str, ...] = ()
    host: bool = False  # for a model on a GPU, whether the host's dispatch is timed too
    host_io: bool = False  # for a model, whether runs with numpy arrays in and out are timed too
    # for a model or a batch of kernels, how long a window its energy is measured in, in seconds; 0: it is not
    energy_s: float = 0.0
    # for a model on a GPU, whether the host's probe is read between its runs: `quiet` (on an idle GPU) if only those on an
    # undisturbed host count, `all` if all do, "" if it is not read
    watch_host: Literal["", "quiet", "all"] = ""
    provider_options: dict[str, str] = {}
    turns: str = ""  # the folder of the locks for exclusive GPU access; "" for a worker that shares the GPU with none
    setting: RuntimeSetting | None = None  # how it is run, if the runtime has such settings

    @property
    def inputs_file(self) -> Path | None:
        return Path(self.inputs) if self.inputs else None

    @property
    def model_name(self) -> str:
        """The name of the model, as in its record."""
        return record_name(Path(self.paths[0]).stem, self.dims, self.static)


class Reply(Frozen):
    """The result of a request: measurements, traced runs, a probe's reading, memory (MiB) of a session, or an error of the
    unit.

    After an error of the unit the worker continues. `interrupted`: the error is not the unit's, but the machine or the process
    lacked something. `unusable`: the process can't use its device any more and must be replaced.
    """

    measurements: tuple[Measurement, ...] = ()
    runs: tuple[GpuRun, ...] = ()
    probe: ProbeReading | None = None
    memory_mib: float | None = None
    error: str = ""
    interrupted: bool = False
    unusable: bool = False
    started: str = ""
    ended: str = ""


Handlers = Mapping[str, Callable[[Request], Reply]]  # by `Request.do`; each returns the reply, without its times


def answer(work: Handlers, request: Request) -> Reply:
    """Does one piece of work and adds times to its measurements. An error of the unit becomes the reply's error."""
    started = now()
    try:
        if request.do not in work:
            raise UserError(f"this runtime has no {request.do}; it has {', '.join(work)}")
        reply = work[request.do](request)
    except DeviceUnavailable as error:
        reply = Reply(error=str(error), interrupted=True, unusable=True)
    except UserError as error:
        disk_full = disk_is_full()  # a library that can't write a file whole may not say so
        why = f" (the disk of temporary files is full: {tempfile.gettempdir()})" if disk_full else ""
        reply = Reply(error=f"{error}{why}", interrupted=disk_full or lacks_resources(error))
    except (OSError, MemoryError) as error:
        if not lacks_resources(error):
            raise
        reply = Reply(error=str(error) or "no memory left", interrupted=True)
    times = {"started": started, "ended": now()}
    return reply.model_copy(update={**times, "measurements": tuple(m.model_copy(update=times) for m in reply.measurements)})


def serve(work: Handlers) -> None:
    """Answers every request until the input ends."""
    serve_lines(lambda line: answer(work, Request.model_validate_json(line)).model_dump_json())


class Worker(WorkerProcess[Request, Reply]):
    """The client's end: a process that does a runtime's work. `timeout_s` is per request."""

    def __init__(self, timeout_s: float, runtime: str = DEFAULT_RUNTIME, setting: RuntimeSetting | None = None) -> None:
        super().__init__(runtime_named(runtime).worker, Reply, timeout_s)
        self._setting = setting

    def _with_setting(self, request: Request) -> Request:
        return request if self._setting is None else request.model_copy(update={"setting": self._setting})

    def prepare(self, request: Request) -> None:
        """Starts the process with a request whose reply is not needed (`WorkerProcess.prepare`)."""
        super().prepare(self._with_setting(request))

    def ask(self, request: Request) -> Reply:
        """The worker's reply. A process that can't use its device is ended; the next request starts another."""
        reply = super().ask(self._with_setting(request))
        if reply.unusable:
            self.stop()
        return reply

    def answered(self, request: Request, what: str) -> Reply:
        """Like `ask`, but raises UserError, which names `what`, if the worker failed or its reply is an error."""
        try:
            reply = self.ask(request)
        except WorkerFailed as error:
            raise UserError(f"{what}: {error}") from None
        if reply.error:
            raise UserError(reply.error if what in reply.error else f"{what}: {reply.error}")
        return reply

    def canary_ms(self, device: str, loaded: bool = False) -> tuple[float, ...]:
        """Times (ms) of the canary on `cpu` or `cuda`; see `hase.benchmark.measuring.blocks.Canary.run_ms`."""
        reply = self.ask(Request(do="canary", device=device, effort=LOADED_CANARY if loaded else IDLE_CANARY))
        if reply.error:
            raise WorkerFailed("interrupted" if reply.interrupted else "failed", reply.error)
        return reply.measurements[0].samples_ms

    def read_sharing_probe(self, device: str, seconds: float) -> ProbeReading | None:
        """How long tiny work on `cpu` or `cuda` now waits for other processes."""
        request = Request(do="sharing_probe", device=device, effort=Effort(budget_s=seconds))
        return self.answered(request, "the sharing probe does not run").probe
