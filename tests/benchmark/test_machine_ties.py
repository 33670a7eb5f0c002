"""Machines of one target: which kernels tie them, and how their times compare, with known ratios and really measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import printed, run_script
from conftest import build_workspace, small_model
from made_up_dataset import MACHINE, TARGET, conv

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import CollectionWork, KernelItem, plan_load, takes_label
from hase.benchmark.dataset import compare, idle_times, machine_rows, tie_rows
from hase.benchmark.measuring.driver import choose_ties
from hase.records.dataset_files import DatasetHeader, journal_path, read_journal, read_kernels, write_journal
from hase.records.kernel_record import Kernel
from hase.records.measurement import Block, Measurement
from hase.runtimes import local_target
from hase.utils.fingerprint import machine
from hase.utils.paths import Workspace

KERNELS = [conv(side=8 + place) for place in range(40)]
ITEMS = [KernelItem(Path(f"{kernel.id}.onnx"), kernel) for kernel in KERNELS]


def takes_run(measurement: Measurement) -> bool:
    return takes_label(measurement, "run")


def block(uuid: str, *measurements: Measurement, level: float = 0.0) -> Block:
    """A block of the journal of a made-up machine."""
    return Block(level=level, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                 machine=uuid, measurements=measurements)


def timed(kernel: Kernel, time_ms: float = 1.0, **changes: Any) -> Measurement:
    """Label `run` of a kernel, around `time_ms`."""
    return Measurement.model_validate({"subject": "kernel", "id": kernel.id, "label": "run", "context": "alone",
                                       "place": "alone", "samples_ms": (0.5 * time_ms, time_ms, 3 * time_ms), **changes})


def chosen(blocks: list[Block], uuid: str, count: int) -> list[Kernel]:
    return [item.kernel for item in choose_ties(ITEMS, blocks, [uuid], count, takes_run)[uuid]]


def test_ties_are_some_of_another_machines_kernels_in_any_order() -> None:
    blocks = [block("a", *map(timed, KERNELS[:30]))]
    ties = chosen(blocks, "b", 10)
    assert len({kernel.id for kernel in ties}) == 10
    assert all(kernel in KERNELS[:30] for kernel in ties)
    assert ties != KERNELS[:10]
    backwards = choose_ties(ITEMS[::-1], [block("a", *map(timed, KERNELS[29::-1]))], ["b"], 10, takes_run)
    assert [item.kernel for item in backwards["b"]] == ties
    assert [len(chosen(blocks, *asked)) for asked in (("b", 0), ("b", 100), ("a", 10))] == [0, 30, 0]  # none of its own


def test_machines_that_measure_at_the_same_time_are_tied_by_the_same_kernels() -> None:
    """Nobody has measured anything yet: all take the same ones. A machine that joins others is tied to what they have."""
    ties = choose_ties(ITEMS, [], ["a", "b", "c"], 10, takes_run)
    assert len(ties["a"]) == 10
    assert ties["a"] == ties["b"] == ties["c"]
    done = [item.kernel for item in ties["a"]]
    rest = [kernel for kernel in KERNELS if kernel not in done]
    blocks = [block("a", *map(timed, [*done, *rest[::2]])), block("b", *map(timed, done[:4]))]
    resumed = choose_ties(ITEMS, blocks, ["a", "b"], 10, takes_run)
    assert resumed["a"] == []
    assert sorted(item.id for item in resumed["b"]) == sorted(kernel.id for kernel in done[4:])
    untied = [block("a", *map(timed, KERNELS[:20])), block("b", *map(timed, KERNELS[20:]))]
    between = choose_ties(ITEMS, untied, ["a", "b"], 10, takes_run)
    assert len({item.id for item in between["a"]} & {kernel.id for kernel in KERNELS[20:]}) == 10
    assert between["b"] == []  # tied by what the other one will measure


def test_what_ties_machines_is_planned_for_each_and_the_rest_for_any() -> None:
    work = CollectionWork(tuple(ITEMS), (), ())
    config = CollectorConfig.model_validate({"device": "cpu", "each_machine": False, "ties": 10, "block_kernels": 4})
    planned = plan_load(config, work, "cpu", ["a", "b"], 0.0, [])
    own = {uuid: {item.id for part in parts for item in part.units} for uuid, parts in planned.own.items()}
    shared = [item.id for part in planned.shared for item in part.units]
    assert own["a"] == own["b"]
    assert len(own["a"]) == 10
    assert sorted([*own["a"], *shared]) == sorted(item.id for item in ITEMS)
    each = plan_load(config.model_copy(update={"each_machine": True}), work, "cpu", ["a", "b"], 0.0, [])
    assert [sum(len(part.units) for part in parts) for parts in each.own.values()] == [len(ITEMS)] * 2
    assert not each.shared


def test_ties_are_measured_once_and_the_rest_after_an_interruption() -> None:
    blocks = [block("a", *map(timed, KERNELS))]
    ties = chosen(blocks, "b", 10)
    blocks.append(block("b", *(timed(kernel) for kernel in ties[:4]), timed(ties[4], status="crashed", samples_ms=())))
    assert chosen(blocks, "b", 10) == ties[5:]
    blocks.append(block("b", *(timed(kernel) for kernel in ties[5:])))
    assert chosen(blocks, "b", 10) == chosen(blocks, "a", 10) == []  # tied by the same kernels
    shared = [kernel for kernel in ties if kernel != ties[4]]
    assert {kernel.id for kernel in chosen(blocks, "c", 9)} == {kernel.id for kernel in shared}  # a third one, by both have
    useless = [block("a", timed(KERNELS[0], status="crashed"), timed(KERNELS[1], context="net", place="in_model"),
                     timed(KERNELS[2], label="node_span"))]
    assert chosen(useless, "b", 10) == []


def test_known_ratios() -> None:
    def net(time_ms: float, **changes: Any) -> Measurement:
        return Measurement(subject="model", id="net", label="latency", context="net", place="alone", samples_ms=(time_ms,),
                           **changes)

    blocks = [
        block("a", *(timed(kernel, 2.0) for kernel in KERNELS[:10]),
              *(timed(kernel, 1.0, label="node_span", context="net", place="in_model") for kernel in KERNELS[:2])),
        block("b", *(timed(KERNELS[place], 2.0 * ratio) for place, ratio in enumerate((0.90, 0.96, 1.00, 1.04, 1.30))),
              *(timed(kernel, 1.1, label="node_span", context="othernet", place="in_model") for kernel in KERNELS[:2]),
              timed(KERNELS[3], 9.0, label="node_span", context="carrier", place="carrier"),  # machine a has none in a carrier
              timed(KERNELS[9], status="crashed"), net(3.0)),
        block("a", net(9.0, disturbance=0.5)), block("a", net(4.0, disturbance=0.1)),
        block("b", timed(KERNELS[8], 50.0), level=0.5),  # under load
    ]
    rows = {(row["what"], row["label"], row["where"]): row for row in tie_rows(idle_times(blocks))}
    assert set(rows) == {("kernels", "run", "alone"), ("kernels", "node_span", "in_model"), ("models", "latency", "whole")}
    run = rows["kernels", "run", "alone"]
    assert (run["machine"], run["other"], run["count"]) == ("a", "b", 5)
    assert [run[name] for name in ("lower_quartile", "median", "upper_quartile", "within_5_%")] == pytest.approx(
        [0.96, 1.0, 1.04, 60.0])
    assert rows["kernels", "node_span", "in_model"]["median"] == pytest.approx(1.1)
    model = rows["models", "latency", "whole"]
    assert (model["count"], model["median"]) == (1, pytest.approx(0.75))  # against the least disturbed
    header = DatasetHeader(target=TARGET, metrics=(), machines={"a": MACHINE, "b": MACHINE, "idle": MACHINE})
    assert [(row["machine"], row["kernels"], row["models"]) for row in machine_rows(header, idle_times(blocks))] == [
        ("a", 10, 1), ("b", 5, 1), ("idle", 0, 0)]


def test_every_pair_has_its_rows() -> None:
    blocks = [block(uuid, timed(KERNELS[0], time_ms)) for uuid, time_ms in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    assert [(row["machine"], row["other"], row["median"]) for row in tie_rows(idle_times(blocks))] == [
        ("a", "b", 2.0), ("a", "c", 4.0), ("b", "c", 2.0)]
    assert tie_rows(idle_times(blocks[:1])) == []
    assert compare({"view": 0.0}, {"view": 0.0}) is None  # as label `gpu` gives for what leaves the GPU nothing to do
    assert (compare({"view": 0.0, "conv": 1.0}, {"view": 0.1, "conv": 1.0}) or {})["count"] == 1


@pytest.mark.slow
def test_exactly_the_ties_are_measured_here_too(workspace: Workspace) -> None:
    """The journal is changed to be another machine's. Then this machine measures only the ties, and only on the idle device."""
    command = ("benchmark/dataset.py", "--machines", "--workspace", workspace.root)
    assert "no datasets; measure one with: python benchmark/collector.py" in run_script(*command).stderr
    build_workspace(workspace, {"anet_b1": small_model()})
    config = CollectorConfig.model_validate({
        "device": "cpu", "levels": [0.0], "window_s": 0.2, "attempts": 1, "patience_s": 0,
        "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
        "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 4, "most_runs": 6},
        "each_machine": False, "ties": 2})
    collect(workspace, config)
    config = config.model_copy(update={"levels": (0.0, 0.5)})
    this_machine = machine("cpu").uuid
    folder = workspace.dataset(local_target("cpu").name)
    journal = journal_path(folder)
    write_journal(folder, [entry.model_copy(update={"machine": "elsewhere", **load}) for entry in read_journal(folder)
                           for load in ({}, {"level": 0.5, "background_name": "compute"})])
    items = [KernelItem(Path(), entry.kernel) for entry in read_kernels(folder)]
    expected = {item.kernel.id for item in choose_ties(items, read_journal(folder), [this_machine], 2, takes_run)[this_machine]}
    assert collect(workspace, config)["measured_kernels"] == len(expected) == 2
    new_blocks = [entry for entry in read_journal(folder) if entry.machine == this_machine]
    measurements = [m for entry in new_blocks for m in entry.measurements]
    assert {entry.level for entry in new_blocks} == {0.0}
    assert {(m.subject, m.id) for m in measurements} == {("kernel", name) for name in expected}
    assert {m.label for m in measurements} == {"run", "kernel_time", "node_span"}
    before = journal.read_bytes()
    assert collect(workspace, config)["measured_kernels"] == 0
    assert journal.read_bytes() == before

    rows = json.loads(printed(*command, "--json"))[local_target("cpu").name]["ties"]
    assert [(row["label"], row["where"], row["count"]) for row in rows] == [
        ("kernel_time", "carrier", 2), ("node_span", "carrier", 2), ("run", "alone", 2)]
    assert all({row["machine"], row["other"]} == {"elsewhere", this_machine} for row in rows)
    assert all(0.02 < row["lower_quartile"] <= row["median"] <= row["upper_quartile"] < 50 for row in rows)
    assert "\t".join(["machine", "other", "what", "label", "where", "count", "median"]) in printed(*command)
