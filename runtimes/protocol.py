"""The protocol between a client and a runtime's worker process: requests and replies, one JSON object per line, and both ends.

`Worker` is the client's end, and `serve` the process's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from hase.benchmark.measuring.gpu_trace import GpuRun
from hase.benchmark.measuring.run_times import Effort
from hase.records.kernel_record import record_name
from hase.records.measurement import Measurement, now
from hase.records.probe_reading import ProbeReading
from hase.runtimes import runtime_named
from hase.utils.errors import DeviceUnavailable, UserError, machine_lacks
from hase.utils.fingerprint import DEFAULT_RUNTIME, Target
from hase.utils.frozen import Frozen
from hase.utils.processes import serve_lines
from hase.utils.temporary import no_room
from hase.utils.worker_process import WorkerFailed, WorkerProcess

IDLE_CANARY = Effort(warmup=2, warmup_s=0.02, budget_s=0.03, least_runs=15, most_runs=15)
LOADED_CANARY = Effort(warmup=2, warmup_s=0.02, budget_s=0.3, least_runs=15, most_runs=300)


class Setting(Frozen):
    """How a runtime is to run everything that it is asked for; for runtimes that do not take it from a request's options.

    Attributes:
        level: the flavour's optimisation.
        threads: of the runtime.
        cores: the first cores of the process, to which all threads are pinned together; 0: they are not pinned.
        memory_limit_mib: a model that needs more is not run; 0: no limit.
        kernels: the folder with the functions of the flavour's kernels.
    """

    level: str
    threads: int = Field(1, ge=1)
    cores: int = Field(0, ge=0)
    memory_limit_mib: float = Field(0.0, ge=0)
    kernels: str = ""

    @classmethod
    def of(cls, target: Target, kernels: Path, memory_limit_mib: float = 0.0) -> Setting | None:
        """How a worker is to run everything for a target, whose built kernels are in a folder below `kernels`; None for a
        runtime whose worker takes that from requests."""
        if not runtime_named(target.flavour.runtime).takes_setting:
            return None
        return cls(level=target.flavour.optimization, threads=max(target.threads, 1), cores=target.cores,
                   kernels=str(kernels / target.flavour.name), memory_limit_mib=memory_limit_mib)


class Request(Frozen):
    """One piece of work.

    Attributes:
        do: `alone` times a built kernel in its own session; `carrier` times several one after another in one graph; `model`
            times a whole model and profiles its kernels, `model_labels` only profiles them; `model_gpu` traces a whole model
            on the GPU for its label `gpu`, `model_trace` for the runs themselves; `model_graph` times it as a CUDA graph;
            `canary` times a fixed piece of work; `sharing_probe` reads for `effort.budget_s` seconds how long tiny work
            waits for other processes; `prepare` loads what the others need, so that none waits for it; `session` times a
            whole model as the evaluator does; `kernels_energy` measures the energy of a batch of built kernels, one run of
            each after another.
        paths: the files of the kernels, or of the model.
        record: for a model whose kernels get labels, its record.
        dims: for a model, the sizes of its dynamic dimensions.
        static: for a model, whether they are fixed before ONNX Runtime optimises it.
        inputs: for a model under ONNX Runtime, a file with values of its inputs; "": made-up ones.
        labels: for a carrier or a model, the labels of its kernels, of IN_MODEL_LABELS and (carrier only) `gpu`;
            for `prepare`, `gpu` if it will be asked for; for a session, how it is run: `latency`, `host_io` or `cuda_graph`.
        host: for a model on a GPU, whether the host's dispatch is timed too.
        host_io: for a model, whether runs with numpy arrays in and out are timed too.
        energy_s: for a model or a batch of kernels, how long a window its energy is measured in, in seconds; 0: it is not.
        watch_host: for a model on a GPU, whether the host's probe is read between its runs: `quiet` (on an idle GPU) if only
            those on an undisturbed host count, `all` if all do, "" if it is not read.
        turns: the folder of the locks for exclusive GPU access; "" for a worker that shares the GPU with none.
        setting: how it is run, where the runtime has such settings.
    """

    do: Literal["alone", "carrier", "model", "model_labels", "model_gpu", "model_trace", "model_graph", "canary",
                "sharing_probe", "prepare", "session", "kernels_energy"]
    device: str
    effort: Effort
    paths: tuple[str, ...] = ()
    record: str = ""
    dims: dict[str, int] = {}
    static: bool = False
    inputs: str = ""
    labels: tuple[str, ...] = ()
    host: bool = False
    host_io: bool = False
    energy_s: float = 0.0
    watch_host: Literal["", "quiet", "all"] = ""
    provider_options: dict[str, str] = {}
    turns: str = ""
    setting: Setting | None = None

    @property
    def inputs_file(self) -> Path | None:
        return Path(self.inputs) if self.inputs else None

    @property
    def model_name(self) -> str:
        """The name of a request's model, which its record bears too."""
        return record_name(Path(self.paths[0]).stem, self.dims, self.static)


class Reply(Frozen):
    """The result of a request: measurements, traced runs, a probe's reading, the memory (MiB) that a session held, or an error
    of the unit itself (the worker goes on). `interrupted`: the error is that the machine or the process lacked something, not
    the unit's. `unusable`: the process can't use its device any more, and is to be replaced."""

    measurements: tuple[Measurement, ...] = ()
    runs: tuple[GpuRun, ...] = ()
    probe: ProbeReading | None = None
    memory_mib: float | None = None
    error: str = ""
    interrupted: bool = False
    unusable: bool = False
    started: str = ""
    ended: str = ""


Work = Mapping[str, Callable[[Request], Reply]]  # by `Request.do`; each returns the reply, without its times


def answer(work: Work, request: Request) -> Reply:
    """Does one piece of work, and stamps its measurements. An error of the unit itself is the reply's error."""
    started = now()
    try:
        if request.do not in work:
            raise UserError(f"this runtime has no {request.do}; it has {', '.join(work)}")
        reply = work[request.do](request)
    except DeviceUnavailable as error:
        reply = Reply(error=str(error), interrupted=True, unusable=True)
    except UserError as error:
        full = no_room()  # a library that can't write a file whole may not say so
        why = f" (the disk of temporary files is full: {tempfile.gettempdir()})" if full else ""
        reply = Reply(error=f"{error}{why}", interrupted=full or machine_lacks(error))
    except (OSError, MemoryError) as error:
        if not machine_lacks(error):
            raise
        reply = Reply(error=str(error) or "no memory left", interrupted=True)
    times = {"started": started, "ended": now()}
    return reply.model_copy(update={**times, "measurements": tuple(m.model_copy(update=times) for m in reply.measurements)})


def serve(work: Work) -> None:
    """Answers every request until the input ends."""
    serve_lines(lambda line: answer(work, Request.model_validate_json(line)).model_dump_json())


class Worker(WorkerProcess[Request, Reply]):
    """A worker process that speaks runtimes/protocol.py.

    Args:
        timeout_s: for one request.
        runtime: whose work it does, by name.
        setting: of every request.
    """

    def __init__(self, timeout_s: float, runtime: str = DEFAULT_RUNTIME, setting: Setting | None = None) -> None:
        super().__init__(runtime_named(runtime).worker, Reply, timeout_s)
        self._setting = setting

    def _send(self, request: Request) -> None:
        super()._send(request if self._setting is None else request.model_copy(update={"setting": self._setting}))

    def ask(self, request: Request) -> Reply:
        """The worker's reply; a process that can't use its device is ended, so that the next request starts another.

        Raises:
            WorkerFailed: see `WorkerProcess.ask`.
        """
        reply = super().ask(request)
        if reply.unusable:
            self.stop()
        return reply

    def canary_ms(self, device: str, loaded: bool = False) -> tuple[float, ...]:
        """Times of the canary on `cpu` or `cuda` in ms; see `hase.benchmark.measuring.bench.Canary.run_ms`.

        Raises:
            WorkerFailed: it does not run.
        """
        reply = self.ask(Request(do="canary", device=device, effort=LOADED_CANARY if loaded else IDLE_CANARY))
        if reply.error:
            raise WorkerFailed("interrupted" if reply.interrupted else "failed", reply.error)
        return reply.measurements[0].samples_ms
