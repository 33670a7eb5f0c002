"""Blocks between canaries and loads one after another, by one actor or several, with canaries whose times are made up here."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import small_model
from fake_worker import FakeWorker

from hase.benchmark.collecting.units import ask as ask_worker
from hase.benchmark.load.stress import Stress
from hase.benchmark.measuring.blocks import Attempt, Bench, PlannedBlock, Steadiness, idle, measure_block
from hase.benchmark.measuring.driver import (
    Actor,
    BlockPlan,
    Driver,
    Finished,
    Totals,
    best_canary_ms,
    in_blocks,
    measure_loads,
    plan_blocks,
)
from hase.records.measurement import COMPUTE, Background, Block, Effort, Journal, Measurement, Status
from hase.runtimes import protocol
from hase.runtimes.protocol import Reply, Request
from hase.utils import processes as worker_process
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda
from hase.utils.ort_sessions import open_session
from hase.utils.processes import WorkerFailed


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

def test_a_block_waits_until_the_machine_is_at_its_best_again_and_does_nothing_else() -> None:
    bench = bench_with([2.0, 1.5, 1.05, 1.05], patience_s=60.0)
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).canary_before_ms == 1.05
    shares = [0.9, 0.5, 0.1]
    bench = replace(bench_with([1.0] * 4, patience_s=60.0), busy=lambda: shares.pop(0))
    measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0))
    assert not shares
    bench = bench_with([2.0, 2.0])  # no patience: the block is measured and reported as unsteady
    assert measure_block(bench, "k", list, idle(bench, best_canary_ms=1.0)).drift == pytest.approx(0.95)


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
    journal.blocks = [block for block in journal.blocks if block.level]
    started.clear()
    measure_loads(STEADY, planner("abcde", 2), time_all, journal, loads, start)
    assert started == [(0.0, "")]
    elsewhere = journal.blocks[-1].model_copy(update={"machine": "elsewhere", "canary_before_ms": 0.1})
    assert (best_canary_ms([*journal.blocks, elsewhere]), best_canary_ms([])) == (0.1, 0.0)


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
    assert {m.id for m in journal.blocks[0].measurements} == {unit.id for unit in totals.units} == {"a", "c", "d"}
    assert totals.interrupted == {"b": "No space left on device"}
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
    assert (len(begun), journal.blocks) == (3, [])


def test_disturbed_blocks_are_measured_again_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Every attempt is kept, and of each block the steadiest counts. How many stay disturbed is said once, with a count."""
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
    assert "1 of 3 blocks: kept and marked, although the machine was unsteady by more than 5 % (by up to 20 %)" in caplog.text


# the process that measures -----------------------------------------------------------------------------------------------

ODD_WORKER = """
import json, os, signal, subprocess, sys, time
for line in sys.stdin:
    device = json.loads(line)["device"]
    if device == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if device == "leaves a child":
        subprocess.Popen(["sleep", "20"])  # it keeps the pipe open
        os.kill(os.getpid(), signal.SIGKILL)
    if device == "hangs":
        time.sleep(60)
    if device == "crashes":
        os.kill(os.getpid(), signal.SIGFPE)
    lost = device == "lost"
    print(json.dumps({"error": f"{device} in {os.getpid()}", "interrupted": lost, "unusable": lost}), flush=True)
"""


def on(device: str) -> Request:
    return Request(do="alone", device=device, effort=Effort())


@pytest.fixture
def odd_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[protocol.Worker]:
    """Its devices say what it does."""
    if os.name != "posix":
        pytest.skip("it has signals")
    (tmp_path / "odd_worker.py").write_text(ODD_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker_process, "REPLY_POLL_S", 0.1)
    monkeypatch.setattr(protocol, "runtime_named", lambda name: SimpleNamespace(worker="odd_worker"))
    with protocol.Worker(timeout_s=60) as worker:
        yield worker


@pytest.mark.parametrize(("does", "status", "message"), [
    ("stops", "interrupted", "was stopped"), ("leaves a child", "interrupted", "SIGKILL"), ("crashes", "crashed", "SIGFPE"),
    pytest.param("hangs", "timeout", "no answer within", marks=pytest.mark.slow)])
def test_a_worker_that_ends_or_stops_is_noticed_at_once_and_replaced(odd_worker: protocol.Worker, does: str, status: str,
                                                                     message: str) -> None:
    assert odd_worker.ask(on("cpu")).error
    odd_worker.timeout_s, began_s = 2.0 if does == "hangs" else 60.0, time.monotonic()
    with pytest.raises(WorkerFailed, match=message) as raised:
        odd_worker.ask(on(does))
    assert raised.value.status == status
    assert time.monotonic() - began_s < 15  # the child's 20 s are not waited for
    assert odd_worker.ask(on("cpu")).error.startswith("cpu in ")


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_worker_prepares_is_not_its_next_reply(odd_worker: protocol.Worker, waits: bool) -> None:
    """Nor does one that ends over it fail what is asked of it next."""
    for does in ("loads", "crashes"):
        odd_worker.prepare(on(does))
        if waits:
            odd_worker.wait()
        assert odd_worker.ask(on("cpu")).error.startswith("cpu in ")


@pytest.mark.parametrize(("error", "interrupted"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True), (MemoryError(), True),
    (UserError("onnxruntime: open file fails: Too many open files"), True), (UserError("no such operator"), False)])
def test_what_the_machine_lacks_is_not_the_units_fault(error: Exception, interrupted: bool,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> Reply:
        raise error

    reply = protocol.answer({"alone": fail}, on("cpu"))
    assert ask_worker(FakeWorker(reply=reply), on("cpu"))[1] == ("interrupted" if interrupted else "failed")
    monkeypatch.setattr(protocol, "disk_is_full", lambda: True)
    assert protocol.answer({"alone": fail}, on("cpu")).interrupted  # a file that was cut short may look damaged


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # the CPU's provider opens the one, and refuses the other
def test_a_cuda_provider_that_does_not_come_up_is_not_the_units_fault(dtype: str) -> None:
    """As in one of eight processes on an H200, where kernels counted as failed."""
    def open_it(request: Request) -> Reply:
        open_session(small_model(dtype=dtype).SerializeToString(), "cuda")
        return Reply()

    reply = protocol.answer({"alone": open_it}, on("cuda"))
    assert reply.error.startswith("the CUDA provider of ONNX Runtime did not come up")
    assert (reply.interrupted, reply.unusable) == (True, True)


def test_a_process_that_can_not_use_its_device_is_replaced(odd_worker: protocol.Worker) -> None:
    replies = [ask_worker(odd_worker, on(device)) for device in ("lost", "cpu", "cpu")]
    assert [status for _, status in replies] == ["interrupted", "failed", "failed"]
    first, second, third = (reply.error.rpartition(" ")[2] for reply, _ in replies)  # their processes
    assert first != second == third


def test_the_order_mixes_kinds_and_is_the_same_each_time() -> None:
    units = [Named(f"{kind}{number}") for kind in "ab" for number in range(20)]
    planned = in_blocks(units, 10)
    assert planned == in_blocks(units, 10)
    assert all({unit.id[0] for unit in block.units} == {"a", "b"} for block in planned)


# several actors ----------------------------------------------------------------------------------------------------------

A, B, C = Actor("a", "gpu a", "host 1"), Actor("b", "gpu b", "host 1"), Actor("c", "gpu c", "host 2")


@dataclass
class StandIns:
    """Actors of which each measures a block while the driver waits once, for the GPUs that are not here."""

    members: list[Actor]
    blocks_each: int = 2
    lost_at: Mapping[Actor, int] = field(default_factory=dict)  # at which of its blocks, counted from 0
    status: Mapping[Actor, Status] = field(default_factory=dict)
    together: list[list[tuple[Actor, Attempt[Named]]]] = field(default_factory=list)  # what was under way at each wait
    under_way: list[tuple[Actor, Attempt[Named]]] = field(default_factory=list)
    begun: dict[Actor, int] = field(default_factory=dict)

    @contextmanager
    def loaded(self, level: float, background: Background | None, best_canary_ms: Mapping[str, float],
               stop_at_s: float) -> Iterator[None]:
        yield

    def begin(self, actor: Actor, attempt: Attempt[Named]) -> None:
        assert actor in self.members
        self.under_way.append((actor, attempt))

    def wait(self) -> Sequence[Finished[Named]]:
        self.together.append(list(self.under_way))
        finished = []
        for actor in [*dict.fromkeys(actor for actor, _ in self.under_way)]:
            attempt = next(attempt for other, attempt in self.under_way if other == actor)
            number = self.begun[actor] = self.begun.get(actor, -1) + 1
            if number == self.lost_at.get(actor):
                self.under_way = [(other, of_other) for other, of_other in self.under_way if other != actor]
                finished.append(Finished(actor, attempt, None, lost=UserError("its node has ended")))
                continue
            self.under_way.remove((actor, attempt))
            finished.append(Finished(actor, attempt, self.block(actor, attempt), 1.0))
        return finished

    def block(self, actor: Actor, attempt: Attempt[Named]) -> Block:
        status = self.status.get(actor, "ok")
        came: dict[str, Any] = {} if status == "ok" else {"samples_ms": (), "error": "no memory left"}
        measurements = tuple(timed(unit.id).model_copy(update={"status": status, **came}) for unit in attempt.planned.units)
        return Block(level=0.0, key=attempt.planned.key, background={}, during={}, canary_before_ms=1.0,
                     canary_after_ms=1.0, attempts=attempt.number, machine=actor.machine, measurements=measurements)


def blocks(names: Iterable[str]) -> list[PlannedBlock[Named]]:
    return [PlannedBlock(name, [Named(name)]) for name in names]


def measure(actors: StandIns, plan: BlockPlan[Named], journal: Journal | None = None) -> tuple[Totals[Named], list[Block]]:
    """Blocks of a name `gpu…` may be measured while another device of the host measures."""
    journal = journal or Journal()
    driver = Driver[Named](actors, journal, Steadiness(attempts=1))
    shared = [planned._replace(shares_host=planned.key.startswith("gpu")) for planned in plan.shared]
    driver.measure(0.0, None, BlockPlan(plan.own, shared))
    return driver.finish(), journal.blocks


def who_measured(measured: Iterable[Block]) -> dict[str, list[str]]:
    return {block.key: [other.machine for other in measured if other.key == block.key] for block in measured}


def test_actors_share_the_blocks_and_each_has_two_at_a_time() -> None:
    actors = StandIns([A, C])
    totals, measured = measure(actors, BlockPlan({}, blocks("rstuvw")))
    assert {key: len(machines) for key, machines in who_measured(measured).items()} == dict.fromkeys("rstuvw", 1)
    assert [(actor, attempt.planned.key) for actor, attempt in actors.together[0]] == [(A, "r"), (C, "s"), (A, "t"), (C, "u")]
    assert (totals.left, totals.lost, totals.measuring_s, len(totals.units)) == (0, [], 6.0, 6)


def test_a_lost_actor_costs_only_what_it_had_been_given(caplog: pytest.LogCaptureFixture) -> None:
    actors = StandIns([A, C], lost_at={C: 1})
    totals, measured = measure(actors, BlockPlan({}, blocks("rstuvwxy")))
    assert {key: len(machines) for key, machines in who_measured(measured).items()} == dict.fromkeys("rstuvwxy", 1)
    assert [block.machine for block in measured].count("gpu c") == 1
    assert (totals.lost, totals.left) == (["c"], 0)
    assert "c is lost, and others measure what it had not finished: its node has ended" in caplog.text


def test_what_only_a_lost_machine_could_measure_is_left(caplog: pytest.LogCaptureFixture) -> None:
    totals, measured = measure(StandIns([A, C], lost_at={C: 0}), BlockPlan({"gpu a": blocks("rs"), "gpu c": blocks("tu")}))
    assert ([block.key for block in measured], totals.left) == (["r", "s"], 2)
    assert "2 units are not measured, since the actors of their machine are lost" in caplog.text
    twin = Actor("c2", "gpu c", "host 2")  # a second actor of the machine
    totals, measured = measure(StandIns([C, twin], lost_at={C: 0}), BlockPlan({"gpu c": blocks("tu")}))
    assert sorted(block.key for block in measured) == ["t", "u"]


def test_the_last_actors_error_ends_all_and_what_was_measured_is_kept() -> None:
    journal = Journal()
    with pytest.raises(UserError, match="its node has ended"):
        measure(StandIns([A, C], lost_at={A: 1, C: 2}), BlockPlan({}, blocks("rstuvwxy")), journal)
    assert len(journal.blocks) == 3


def test_an_actor_whose_blocks_are_all_interrupted_is_given_up() -> None:
    totals, measured = measure(StandIns([A, C], status={C: "interrupted"}), BlockPlan({}, blocks("rstuvwxyz")))
    assert (totals.lost, {block.machine for block in measured}, len(totals.interrupted)) == (["c"], {"gpu a"}, 3)
    assert {block.key for block in measured} | totals.interrupted.keys() == set("rstuvwxyz")


def test_actors_of_one_host_measure_together_only_what_may_share_it() -> None:
    """Beside another block, nobody of its host measures. Another host does not matter."""
    actors, names = StandIns([A, B, C]), ["model 1", "gpu 1", "gpu 2", "model 2", "gpu 3", "gpu 4", "model 3"]
    _, measured = measure(actors, BlockPlan({}, blocks(names)))
    assert sorted(block.key for block in measured) == sorted(names)
    for moment in actors.together:
        on_host_1 = {actor: [attempt.planned.key for other, attempt in moment if other == actor] for actor in (A, B)}
        if all(on_host_1.values()):
            assert all(key.startswith("gpu") for keys in on_host_1.values() for key in keys)
    actors = StandIns([A, B])
    measure(actors, BlockPlan({}, blocks(["gpu 1", "gpu 2", "gpu 3"])))
    assert {actor for actor, _ in actors.together[0]} == {A, B}
