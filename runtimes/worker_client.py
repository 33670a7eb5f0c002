"""The worker process of a runtime, as its client sees it."""

from __future__ import annotations

from measuring.canary import IDLE_EFFORT, LOADED_EFFORT
from measuring.worker_process import WorkerFailed, WorkerProcess
from runtimes import runtime_named
from runtimes.protocol import Reply, Request, Setting
from utils.fingerprint import DEFAULT_RUNTIME

__all__ = ["Worker", "WorkerFailed"]


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

    def canary_ms(self, device: str, loaded: bool = False) -> tuple[float, ...]:
        """Times of the canary on `cpu` or `cuda` in ms; see `measuring.canary.Canary.run_ms`.

        Raises:
            WorkerFailed: it does not run.
        """
        reply = self.ask(Request(do="canary", device=device, effort=LOADED_EFFORT if loaded else IDLE_EFFORT))
        if reply.error:
            raise WorkerFailed("failed", reply.error)
        return reply.measurements[0].samples_ms
