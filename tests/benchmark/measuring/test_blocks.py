"""Blocks between canaries and loads one after another, with canaries whose times are made up here."""

from __future__ import annotations

import errno
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import small_model
from fake_worker import FakeWorker

from hase.benchmark.collecting.units import ask as ask_worker
from hase.benchmark.load.stress import Stress
from hase.benchmark.measuring.blocks import Bench, Canary, PlannedBlock, RunningLoad, Steadiness, idle, measure_block
from hase.benchmark.measuring.driver import best_canary_ms, in_blocks, measure_loads, pending, plan_blocks
from hase.records.measurement import COMPUTE, Background, Block, Effort, Journal, Measurement, Status
from hase.runtimes import protocol
from hase.runtimes.protocol import Reply, Request
from hase.utils import processes as worker_process
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.ort_sessions import open_session
from hase.utils.processes import WorkerFailed, WorkerProcess


@dataclass(frozen=True)
class Named:
    id: str


def timed(name: str) -> Measurement:
    return Measurement(subject="made up", id=name, label="run", context="alone", place="alone", samples_ms=(1.0,))


def time_all(named: Sequence[Named], level: float) -> list[Measurement]:
    return [timed(unit.id) for unit in named]


STEADY = Bench("cpu", "here", lambda loaded: [1.0])


def planner(names: str, size: int, machine: str = "here",
            **options: Any) -> Callable[[tuple[float, str], Sequence[Block]], list[PlannedBlock[Named]]]:
    return lambda load, blocks: plan_blocks([Named(name) for name in names], blocks, machine, size=size, **options)


def bench_with(times_ms: Sequence[float], **steadiness: float) -> Bench:
    """A bench whose canary takes these times, one after another, and fails when it is asked for more."""
    remaining_ms = list(times_ms)
    return Bench("cpu", "here", lambda loaded: [remaining_ms.pop(0)], steadiness=Steadiness.model_validate(
        {"drift": 0.05, "patience_s": 0.0, **steadiness}))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hase.benchmark.measuring.blocks.PAUSE_S", 0.001)
    monkeypatch.setattr("hase.benchmark.measuring.blocks.BUSY_ADMITTED", 0.25)  # conftest.py admits more


# one block ---------------------------------------------------------------------------------------------------------------

def test_a_block_waits_until_the_machine_is_at_its_best_again() -> None:
    bench = bench_with([2.0, 1.5, 1.05, 1.05], patience_s=60.0)
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).canary_before_ms == 1.05
    bench = bench_with([2.0, 2.0])  # no patience: the block is measured and reported as unsteady
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).drift == pytest.approx(0.95)


def test_a_block_waits_until_a_cpu_does_nothing_else() -> None:
    shares = [0.9, 0.5, 0.1]
    bench = replace(bench_with([1.0] * 4, patience_s=60.0), busy=lambda: shares.pop(0))
    measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0))
    assert not shares


def test_a_machine_that_is_always_busy_does_not_hold_everything_up() -> None:
    canary = Canary(lambda loaded: [1.0], best_ms=1.0, busy=lambda: 0.9)
    for _ in range(20):
        canary.steady_ms(0.05, 0.1)
    assert canary.in_vain == 20  # so it waited a sixteenth as long as at first
    canary.busy = lambda: 0.0
    canary.steady_ms(0.05, 0.1)
    assert canary.in_vain == 0


def test_under_load_the_canary_is_a_mean_and_has_no_best() -> None:
    loads_asked: list[bool] = []

    def canary_ms(loaded: bool) -> list[float]:
        loads_asked.append(loaded)
        return [1.0, 1.0, 4.0]

    bench = Bench("cpu", "here", canary_ms)
    load = RunningLoad(Canary(canary_ms, loaded=True), Stress(0.0), 0.5, "compute")
    block = measure_block(bench, "k", list, load)
    assert (block.canary_before_ms, block.canary_best_ms, block.load) == (2.0, 0.0, (0.5, "compute"))
    assert loads_asked == [True, True]


# many --------------------------------------------------------------------------------------------------------------------

def test_each_load_is_started_once_and_only_where_something_is_missing() -> None:
    """The best canary of an idle device is known from the journal, and only from this machine's blocks."""
    loads: list[tuple[float, Background | None]] = [(0.0, None), (0.5, COMPUTE)]
    started: list[tuple[float, str]] = []

    @contextmanager
    def start(level: float, background: Background | None) -> Iterator[Stress]:
        started.append((level, background.name if background else ""))
        yield Stress(0.0)

    journal = Journal()
    totals = measure_loads(STEADY, planner("abcde", 2), time_all, journal, loads, start)
    assert started == [(0.0, ""), (0.5, "compute")]
    assert [len(block.measurements) for block in journal.blocks] == [2, 2, 1] * 2
    assert {(block.load, m.id) for block in journal.blocks for m in block.measurements} == {
        (load, name) for load in started for name in "abcde"}
    assert (len(totals.units), totals.unsteady_blocks, totals.blocks) == (10, 0, journal.blocks)
    assert totals.measuring_s > 0
    journal.blocks = [block for block in journal.blocks if block.level]
    started.clear()
    measure_loads(STEADY, planner("abcde", 2), time_all, journal, loads, start)
    assert started == [(0.0, "")]
    elsewhere = journal.blocks[-1].model_copy(update={"machine": "elsewhere", "canary_before_ms": 0.1})
    assert best_canary_ms([*journal.blocks, elsewhere]) == 0.1
    assert best_canary_ms([]) == 0.0


def test_no_block_begins_when_the_time_is_over() -> None:
    journal = Journal()
    for stop_at_s, left in ((0.0, 3), (math.inf, 0)):
        totals = measure_loads(STEADY, planner("abc", 1), time_all, journal, stop_at_s=stop_at_s)
        assert (totals.left, len(journal.blocks)) == (left, 3 - left)


def failing(name: str, status: Status, label: str = "run") -> Measurement:
    return timed(name).model_copy(update={"label": label, "status": status, "samples_ms": (),
                                          "error": "No space left on device"})


def test_a_unit_that_was_interrupted_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is kept, or it would count as measured. A unit that failed by itself is kept."""
    journal, lacking = Journal(), True

    def time_units(named: Sequence[Named], level: float) -> list[Measurement]:
        measurements = [failing(unit.id, "failed") if unit.id == "d" else timed(unit.id) for unit in named]
        return [*measurements, failing("b", "interrupted", "gpu")] if lacking else measurements

    totals = measure_loads(STEADY, planner("abcd", 4), time_units, journal)
    assert {m.id for m in journal.blocks[0].measurements} == {"a", "c", "d"}
    assert totals.interrupted == {"b": "No space left on device"}
    assert {unit.id for unit in totals.units} == {"a", "c", "d"}
    assert "1 units were interrupted" in caplog.text
    lacking = False
    totals = measure_loads(STEADY, planner("abcd", 4), time_units, journal)
    assert [m.id for m in journal.blocks[1].measurements] == ["b"]
    assert not totals.interrupted


def test_where_everything_is_interrupted_measuring_ends() -> None:
    journal, begun = Journal(), list[str]()

    def time_units(named: Sequence[Named], level: float) -> list[Measurement]:
        begun.append(named[0].id)
        return [failing(unit.id, "interrupted") for unit in named]

    with pytest.raises(UserError, match=r"the last 3 blocks were interrupted: No space left on device; .* same command again"):
        measure_loads(STEADY, planner("abcdefg", 1), time_units, journal)
    assert len(begun) == 3
    assert not journal.blocks


def test_disturbed_blocks_are_measured_again_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Every attempt is kept, and of each block the steadiest counts. How many stay disturbed is said once, with a count."""
    caplog.set_level("INFO")
    journal, runs = Journal(), itertools.count(1)

    def time_units(named: Sequence[Named], level: float) -> list[Measurement]:
        return [timed(f"{named[0].id} in run {next(runs)}")]

    #                   a             b         c             a again     c again       a again
    bench = bench_with([1.0, 1.3,  1.0, 1.0,  1.0, 1.2,  1.0, 1.2,  1.0, 1.01,  1.0, 1.4], attempts=3)
    planned = [PlannedBlock(name, [Named(name)]) for name in "abc"]
    totals = measure_loads(bench, lambda load, blocks: planned, time_units, journal)
    assert [(block.measurements[0].id, block.attempts) for block in journal.blocks] == [
        ("a in run 1", 1), ("b in run 2", 1), ("c in run 3", 1), ("a in run 4", 2), ("c in run 5", 2), ("a in run 6", 3)]
    assert [block.measurements[0].id for block in totals.blocks] == ["a in run 4", "b in run 2", "c in run 5"]
    assert (totals.unsteady_blocks, [unit.id for unit in totals.units]) == (1, ["a", "b", "c"])
    assert caplog.text.count("unsteady") == 1
    assert "1 of 3 blocks kept, and marked, although the machine was unsteady by more than 5 % (by up to 20 %)" in caplog.text


# the process that measures -----------------------------------------------------------------------------------------------

class Asked(Frozen):
    do: str


class Done(Frozen):
    did: str


ODD_WORKER = """
import json, os, signal, subprocess, sys, time
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if do == "leave a child":
        subprocess.Popen(["sleep", "20"])  # it keeps the pipe open
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "crash":
        os.kill(os.getpid(), signal.SIGFPE)
    print(json.dumps({"did": do}), flush=True)
"""


@pytest.fixture
def odd_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess[Asked, Done]]:
    if os.name != "posix":
        pytest.skip("it has signals")
    (tmp_path / "odd_worker.py").write_text(ODD_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker_process, "LOOK_EVERY_S", 0.1)
    with WorkerProcess[Asked, Done]("odd_worker", Done, timeout_s=60) as worker:
        yield worker


def test_a_worker_that_was_ended_or_stopped_from_outside_is_noticed_at_once(odd_worker: WorkerProcess[Asked, Done]) -> None:
    for do, status, message in (("stop", "interrupted", "was stopped"), ("leave a child", "interrupted", "SIGKILL"),
                                ("crash", "crashed", "SIGFPE")):
        assert odd_worker.ask(Asked(do="something")).did == "something"
        began_s = time.monotonic()
        with pytest.raises(WorkerFailed, match=message) as raised:
            odd_worker.ask(Asked(do=do))
        assert raised.value.status == status
        assert time.monotonic() - began_s < 15  # the child's 20 s are not waited for


def test_what_a_worker_prepares_is_not_its_next_reply(odd_worker: WorkerProcess[Asked, Done]) -> None:
    """Nor does one that ends over it fail what is asked of it next."""
    odd_worker.prepare(Asked(do="load"))
    assert odd_worker.ask(Asked(do="something")).did == "something"
    odd_worker.prepare(Asked(do="load"))
    odd_worker.wait()
    assert odd_worker.ask(Asked(do="else")).did == "else"
    for waits in (False, True):
        odd_worker.prepare(Asked(do="crash"))
        if waits:
            odd_worker.wait()
        assert odd_worker.ask(Asked(do="something")).did == "something"


@pytest.mark.parametrize(("error", "interrupted"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True), (MemoryError(), True),
    (UserError("onnxruntime: open file fails: Too many open files"), True), (UserError("no such operator"), False)])
def test_what_the_machine_lacks_is_not_the_units_fault(error: Exception, interrupted: bool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> Reply:
        raise error

    request = Request(do="alone", device="cpu", effort=Effort())
    reply = protocol.answer({"alone": fail}, request)
    assert (reply.interrupted, bool(reply.error)) == (interrupted, True)
    assert ask_worker(FakeWorker(reply=reply), request)[1] == ("interrupted" if interrupted else "failed")
    monkeypatch.setattr(protocol, "no_room", lambda: True)
    assert protocol.answer({"alone": fail}, request).interrupted  # a file that was cut short may look damaged
    error = OSError(errno.EBADF, "bad file descriptor")
    with pytest.raises(OSError, match="bad file descriptor"):  # none of these stays a bug
        protocol.answer({"alone": fail}, request)


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # the CPU's provider opens the one, and refuses the other
def test_a_cuda_provider_that_does_not_come_up_is_not_the_units_fault(dtype: str) -> None:
    """As in one of eight processes on an H200, where kernels counted as failed."""
    model = small_model(dtype=dtype)

    def open_it(request: Request) -> Reply:
        open_session(model.SerializeToString(), "cuda")
        return Reply()

    reply = protocol.answer({"alone": open_it}, Request(do="alone", device="cuda", effort=Effort()))
    assert reply.error.startswith("the CUDA provider of ONNX Runtime did not come up")
    assert (reply.interrupted, reply.unusable) == (True, True)


UNUSABLE_WORKER = """
import json, os, sys
for line in sys.stdin:
    unusable = json.loads(line)["device"] == "cuda"
    print(json.dumps({"error": str(os.getpid()), "interrupted": unusable, "unusable": unusable}), flush=True)
"""


def test_a_process_that_can_not_use_its_device_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stands in for one whose device was lost."""
    (tmp_path / "unusable_worker.py").write_text(UNUSABLE_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(protocol, "runtime_named", lambda name: SimpleNamespace(worker="unusable_worker"))
    with protocol.Worker(timeout_s=60) as worker:
        first, second, third, fourth = (ask_worker(worker, Request(do="alone", device=device, effort=Effort()))
                                        for device in ("cuda", "cuda", "cpu", "cpu"))
    assert [status for _, status in (first, second, third, fourth)] == ["interrupted", "interrupted", "failed", "failed"]
    assert first[0].error != second[0].error != third[0].error == fourth[0].error  # their processes


def test_the_order_mixes_kinds_and_is_the_same_each_time() -> None:
    units = [Named(f"{kind}{number}") for kind in "ab" for number in range(20)]
    planned = in_blocks(units, 10)
    assert planned == in_blocks(units, 10)
    assert {unit for block in planned for unit in block.units} == set(units)
    assert all({unit.id[0] for unit in block.units} == {"a", "b"} for block in planned)
    assert planned[0].key == f"{planned[0].units[0].id} and 9 more"


def test_the_caller_says_what_counts_as_measured() -> None:
    """A unit with only its label `energy` still lacks its label `run`."""
    energy = timed("a").model_copy(update={"label": "energy"})
    bench = bench_with([1.0, 1.0])
    block = measure_block(bench, "k", lambda: [energy, timed("b")], idle(bench))
    units = [Named("a"), Named("b"), Named("c")]
    assert pending(units, [block]) == [Named("c")]
    assert pending(units, [block], lambda m: m.label == "run") == [Named("a"), Named("c")]


def test_a_second_machine_measures_the_rest_and_a_few_ties() -> None:
    journal, of_another = Journal(), planner("abcde", 2, "another", each_machine=False, ties=2)
    measure_loads(STEADY, planner("abcd", 2), time_all, journal)
    totals = measure_loads(replace(STEADY, machine_uuid="another"), of_another, time_all, journal)
    assert len(totals.units) == 3
    assert Named("e") in totals.units
    assert not of_another((0.0, ""), journal.blocks)
