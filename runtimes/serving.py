"""The loop of a worker process: requests on its standard input, replies on its standard output."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from records.measurement import now
from runtimes.protocol import Reply, Request
from utils.errors import UserError
from utils.processes import serve_lines

Work = Mapping[str, Callable[[Request], Reply]]  # by `Request.do`; each returns the reply, without its times


def answer(work: Work, request: Request) -> Reply:
    """Does one piece of work, and stamps its measurements. An error of the unit itself is the reply's error."""
    started = now()
    try:
        if request.do not in work:
            raise UserError(f"this runtime has no {request.do}; it has {', '.join(work)}")
        reply = work[request.do](request)
    except UserError as error:
        reply = Reply(error=str(error))
    times = {"started": started, "ended": now()}
    return reply.model_copy(update={**times, "measurements": tuple(m.model_copy(update=times) for m in reply.measurements)})


def serve(work: Work) -> None:
    """Answers every request until the input ends."""
    serve_lines(lambda line: answer(work, Request.model_validate_json(line)).model_dump_json())
