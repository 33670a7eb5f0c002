"""The collector: one row a kernel and level whatever happens: kills, crashes, hangs, and time that is up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from conftest import build_workspace, endless, small_model
from fake_worker import made_up, replace_workers
from made_up_dataset import chain, conv

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import CollectionWork, KernelItem, ModelItem, carriers, find_work, plan, plan_by_usefulness
from hase.benchmark.metrics.sources import CpuSource
from hase.kernel_model.building.kernel_models import build_model, write_kernel
from hase.kernel_model.sampling.draws import SEED_FILE
from hase.ort_analysis.graph.source import KERNEL_KEY
from hase.records.dataset_files import (
    DatasetKernel,
    header_path,
    journal_path,
    kernel_table_path,
    model_table_path,
    read_header,
    read_journal,
    read_kernels,
    read_table,
)
from hase.records.dataset_tables import input_shape, kernel_table_rows, model_sessions, model_table_rows
from hase.records.host_pace import idle_models, usual_probe_us
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_record_files import index_path, read_index
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import Background, Block, Measurement, Status
from hase.runtimes import local_target
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, instruction_set, machine
from hase.utils.paths import ROOT, Workspace

METRICS = ["DCGM_FI_DEV_CPU_UTIL_TOTAL", "DCGM_FI_DEV_CPU_UTIL_SYS"]
LEVELS = (0.0, 0.5)
SMALLEST = -2**31  # divided by -1, its quotient is no 32-bit number: x86 raises SIGFPE, and the process dies
TINY: dict[str, Any] = {
    "device": "cpu", "levels": list(LEVELS), "stress": {"settle_s": 0.1}, "metrics": METRICS, "window_s": 0.2,
    "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
    "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 4, "most_runs": 6},
    "block_kernels": 4, "canary_drift": 100.0, "patience_s": 0, "attempts": 1, "timeout_s": 60, "held_out": ["heldnet"],
}
IDLE = TINY | {"held_out": [], "levels": [0.0], "block_kernels": 99, "window_s": 0.03}
X86 = instruction_set().startswith("avx")


def division(numerators: tuple[int, ...], divisor: int) -> Kernel:
    """A kernel that divides whole numbers, all of them constants."""
    inputs = [KernelInput(dtype="int32", shape=(len(values),), constant=True, values=values)
              for values in (numerators, (divisor,))]
    return describe_kernel("Div", "", 20, {}, inputs, [Tensor(dtype="int32", shape=(len(numerators),))])


CRASHES = division((SMALLEST,), -1)
CRASHES_IN_A_CARRIER = division((SMALLEST, SMALLEST), -1)


def add_sampled(workspace: Workspace, flavour: Flavour) -> None:
    """Three kernels that no model holds: one kills the process that runs it, one only the process that runs its carrier

    (the file holds a harmless graph, its description the deadly one), and one was seeded by the family held out."""
    folder = workspace.kernel_onnx / flavour.name
    write_kernel(CRASHES, folder)
    harmless = build_model(division((8, 8), 2))
    for prop in harmless.metadata_props:
        prop.value = CRASHES_IN_A_CARRIER.model_dump_json() if prop.key == KERNEL_KEY else prop.value
    files.write_bytes(folder / f"{CRASHES_IN_A_CARRIER.id}.onnx", harmless.SerializeToString())
    held = division((9, 9, 9), 3)
    write_kernel(held, folder)
    files.write_json(folder / SEED_FILE, {CRASHES.id: ["anet", "bnet", "heldnet"], CRASHES_IN_A_CARRIER.id: ["anet"],
                                          held.id: ["heldnet"]})


@dataclass(frozen=True)
class Collected:
    """A dataset that real workers collected, with a kill in between."""

    workspace: Workspace
    flavour: Flavour
    folder: Path
    orphans: list[str]  # processes that the kill left behind
    blocks_after: list[str]  # the journal's lines after it
    final: subprocess.CompletedProcess[str]
    kernels: pd.DataFrame
    models: pd.DataFrame


def killed_under_load(command: list[str], folder: Path) -> list[str]:
    """Starts the collector, kills it without warning after its first block under a load, and returns which processes stay."""
    process = psutil.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(block.level for block in read_journal(folder)):
        assert process.poll() is None, "the collector ended before it could be killed"
        time.sleep(0.02)
    children = process.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()
    assert len(children) >= 2, "a worker and a stressor"
    return [str(child) for child in alive]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    workspace = Workspace(tmp_path_factory.mktemp("collector"))
    flavour = build_workspace(workspace, {"anet_b1": small_model(), "heldnet_b1": small_model(side=24)})
    if X86:
        add_sampled(workspace, flavour)
    config, folder = workspace.root / "config.yaml", dataset_of(workspace)
    files.write_json(config, TINY)
    command = [sys.executable, "benchmark/collector.py", "--config", str(config), "--workspace", str(workspace.root), "--json"]
    orphans = killed_under_load(command, folder)
    blocks_after = files.read_lines(journal_path(folder))
    final = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    kernels, models = read_table(kernel_table_path(folder)), read_table(model_table_path(folder))
    return Collected(workspace, flavour, folder, orphans, blocks_after, final, kernels, models)


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up, and nobody needs to wait for good readings of the metrics beside them."""
    replace_workers(monkeypatch)
    monkeypatch.setattr(CpuSource, "minimum_window_s", 0.03)


def dataset_of(workspace: Workspace) -> Path:
    return workspace.dataset(local_target("cpu").name)


# a run that was killed, with real workers --------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_kill_leaves_no_process_behind_and_loses_no_block(collected: Collected) -> None:
    assert collected.orphans == []
    lines = files.read_lines(journal_path(collected.folder))
    assert lines[:len(collected.blocks_after)] == collected.blocks_after
    assert len(lines) > len(collected.blocks_after)


@pytest.mark.slow
def test_no_row_is_lost_or_doubled(collected: Collected) -> None:
    """Of the family held out, the model is measured, and its kernels are not, but those that another model has."""
    index = read_index(index_path(collected.workspace, collected.flavour))
    owners = {name: set(entry.models) for of_type in index.kernels.values() for name, entry in of_type.items()}
    assert all(models in owners.values() for models in ({"anet_b1", "heldnet_b1"}, {"heldnet_b1"}))
    of_models = {name for name, models in owners.items() if models != {"heldnet_b1"}}
    wanted = of_models | ({CRASHES.id, CRASHES_IN_A_CARRIER.id} if X86 else set())
    kernels, models = collected.kernels, collected.models
    assert Counter(zip(kernels["Kernel_ID"], kernels["Level"], strict=True)) == {
        (name, level): 1 for name in wanted for level in LEVELS}
    assert {*zip(kernels["Level"], kernels["Background"], strict=True)} == {(0.0, ""), (0.5, "compute")}
    assert Counter(zip(models["Model"], models["Level"], strict=True)) == {
        (name, level): 1 for name in ("anet_b1", "heldnet_b1") for level in LEVELS}
    assert not kernels["Models"].str.contains("heldnet").any()
    assert read_header(collected.folder).held_out == ("heldnet",)


@pytest.mark.slow
def test_rows_say_what_was_measured(collected: Collected) -> None:
    table, blocks = collected.kernels, read_journal(collected.folder)
    good = table[table["Status"] == "ok"]
    assert (good[["Latency_ms", "run_median_ms", "kernel_time_ms", "node_span_ms"]] > 0).all().all()
    assert ((good[METRICS] >= 0) & (good[METRICS] <= 1)).all().all()
    assert good[[f"{metric}_during" for metric in METRICS]].notna().any().all()
    assert set(table["Machine"]) == {machine("cpu").uuid}
    assert ((good["Started"] < good["Ended"]) & (good["Runs"] >= 3)).all()
    described = {entry.kernel.id: entry for entry in read_kernels(collected.folder)}
    samples = {(m.id, m.label, block.level): m.samples_ms for block in blocks for m in block.measurements}
    for _, row in good.iterrows():
        entry, of_row = described[row["Kernel_ID"]], samples[row["Kernel_ID"], "run", row["Level"]]
        assert (row["OpType"], row["Input_Shape"], row["Models"], row["Groups"]) == (
            entry.kernel.type, input_shape(entry.kernel), entry.owners, "|".join(entry.groups))
        assert (row["Latency_ms"], row["run_median_ms"]) == pytest.approx((np.mean(of_row), np.median(of_row)), abs=1e-6)
    for _, row in collected.models.iterrows():
        assert row["Latency_ms"] == pytest.approx(np.mean(samples[row["Model"], "latency", row["Level"]]), abs=1e-6)
    for block in blocks:
        assert (block.stress["duty"] > 0.0) is (block.level > 0.0)  # very little, if the machine is busy
        assert block.background_s >= 0.2
        assert (block.during_s > 0.2) is bool(block.during)  # a window too short to be valid is left empty


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="only x86 traps this division")
def test_a_kernel_that_crashes_costs_only_its_row(collected: Collected) -> None:
    table = collected.kernels.set_index("Kernel_ID")
    crashed, in_carrier = table.loc[CRASHES.id], table.loc[CRASHES_IN_A_CARRIER.id]
    assert set(crashed["Status"]) == set(in_carrier["Status"]) == {"crashed"}
    assert crashed["Error"].str.contains("SIGFPE").all()
    assert crashed["Latency_ms"].isna().all()
    assert (in_carrier["Latency_ms"] > 0).all()  # alone it runs
    assert set(crashed["Models"]) == {"sampled:anet|sampled:bnet"}
    assert set(table.drop([CRASHES.id, CRASHES_IN_A_CARRIER.id])["Status"]) == {"ok"}
    assert collected.final.returncode == 1
    assert set(json.loads(collected.final.stdout)["failed"]) == {CRASHES.id, CRASHES_IN_A_CARRIER.id}
    assert "Traceback" not in collected.final.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("fake_workers")
def test_a_second_run_has_nothing_to_do_and_another_config_is_refused(collected: Collected) -> None:
    paths = [path_of(collected.folder) for path_of in (journal_path, kernel_table_path, model_table_path)]
    before = [path.read_bytes() for path in paths]
    result = collect(collected.workspace, CollectorConfig.model_validate(TINY))
    assert result["kernel_rows"] == len(collected.kernels)
    for change, message in (
            ({"held_out": ["heldnet", "bnet"]}, "collected with held_out"),
            ({"labels": ["run"]}, r"collected with labels \[run, kernel_time, node_span\], not \[run\]"),
            ({"metrics": ["DCGM_FI_DEV_SM_CLOCK"]}, "can't read it here; it has .*CPU_UTIL_TOTAL"),
            ({"window_s": 0.01}, r"window_s 0\.01: psutil needs at least 0\.03 s"),
            ({"labels": ["gpu"]}, "labels: gpu: ONNX Runtime has no such labels on cpu; it has run, "),
            ({"variants": ["cuda_graph"]}, "variants: cuda_graph: ONNX Runtime has no such variants on cpu")):
        with pytest.raises(UserError, match=message):
            collect(collected.workspace, CollectorConfig.model_validate(TINY | change))
    assert [path.read_bytes() for path in paths] == before


# what is measured ---------------------------------------------------------------------------------------------------------

@pytest.mark.usefixtures("fake_workers")
def test_numpy_in_and_out_is_a_variant(workspace: Workspace) -> None:
    """What a model takes with numpy arrays in and out stands beside its latency; asked for later, it is measured later. Models
    alone need no built kernels."""
    build_workspace(workspace, {"anet_b1": small_model()})
    shutil.rmtree(workspace.kernel_onnx)
    for variants, rows in (([], 1), (["host_io"], 2), (["host_io"], 2)):
        totals = collect(workspace, CollectorConfig.model_validate(
            IDLE | {"kernel_levels": [], "model_labels": False, "variants": variants}))
        assert (totals["kernel_rows"], totals["model_rows"]) == (0, rows)
    table = read_table(model_table_path(dataset_of(workspace)))
    expected_ms = np.median(made_up("model", "anet_b1", "host_io", "anet_b1", "alone").samples_ms)
    assert table["host_io_ms"].to_list() == [pytest.approx(np.nan, nan_ok=True), pytest.approx(expected_ms)]


def test_without_kernels_or_models_the_command_before_is_named(workspace: Workspace) -> None:
    config = CollectorConfig.model_validate(TINY)
    with pytest.raises(UserError, match=r"no such file|fusion_detector\.py"):
        collect(workspace, config)
    flavour = build_workspace(workspace, {"anet_b1": small_model()})
    (workspace.models / "anet_b1.onnx").unlink()
    with pytest.raises(UserError, match="the model of record anet_b1 is gone"):
        collect(workspace, config)
    for path in (workspace.kernel_onnx / flavour.name).glob("*.onnx"):
        path.unlink()
    with pytest.raises(UserError, match=r"no kernels built for .*python kernel_model/kernel_builder\.py"):
        collect(workspace, config)


def test_carriers_are_bounded_and_hold_one_version_of_a_domain() -> None:
    """Relu means the same since operator set 14 and is described as of 20; Softmax of 12 means something else."""
    def item_of(elements: int, opset: int = 20, op_type: str = "Relu") -> KernelItem:
        x = KernelInput(dtype="float32", shape=(elements,))
        return KernelItem(Path(), describe_kernel(op_type, "", opset, {}, [x], [x]))

    items = [item_of(4), item_of(4, 18), item_of(4, 12, "Softmax"), *(item_of(mib << 18) for mib in (150, 100, 400))]
    groups = [[(i.kernel.opset, i.kernel.inputs[0].elements >> 18) for i in group] for group in carriers(items, 512 << 20)]
    assert groups == [[(20, 0), (20, 0)], [(11, 0)], [(20, 150)], [(20, 100)], [(20, 400)]]


# rows of made-up measurements ---------------------------------------------------------------------------------------------

def block_of(*measurements: Measurement, level: float = 0.0, **fields: Any) -> Block:
    return Block(**{"level": level, "key": "k", "background": {}, "during": {}, "canary_before_ms": 1.0, "canary_after_ms": 1.0,
                    "attempts": 1, "machine": "m", "measurements": measurements} | fields)


def of_model(name: str, label: str, *samples_ms: float, **fields: Any) -> Measurement:
    return Measurement(subject="model", id=name, label=label, context=name, place="alone", samples_ms=samples_ms, **fields)


def gpu_rows(blocks: list[Block], *kernels: Kernel) -> list[dict[str, Any]]:
    described = {kernel.id: DatasetKernel(kernel=kernel, models=(), groups=()) for kernel in kernels}
    return kernel_table_rows(blocks, described, "gpu")


def of_gpu(kernel: Kernel, time_ms: float, launches: int = 5, queued: bool = False, status: Status = "ok") -> Measurement:
    return Measurement(subject="kernel", id=kernel.id, label="gpu", context="carrier", place="carrier", launches=launches,
                       samples_ms=(time_ms,) * 3, queued=queued, status=status)


def test_gpu_columns_of_a_kernel_and_a_model() -> None:
    """Zero is a time where the GPU has nothing to do."""
    kernel = division((1,), 1)
    block = block_of(of_gpu(kernel, 0.0, launches=0), of_model("net", "host", 0.5, 0.7, 0.6),
                     of_model("net", "latency", 1.0, 1.0), of_model("net", "gpu", 0.8, launches=7))
    [row] = gpu_rows([block], kernel)
    assert (row["gpu_ms"], row["gpu_launches"], row["gpu_kernels"], row["Status"]) == (0.0, 0, "", "ok")
    model = model_table_rows(model_sessions([block]), {"net": "nets"})[0]
    assert (model["Latency_ms"], model["host_ms"], model["gpu_ms"], model["gpu_launches"]) == (1.0, 0.6, 0.8, 7)
    assert model["Groups"] == "nets"


def test_work_on_several_streams_counts_as_it_was_queued() -> None:
    """Whichever machine measured it. The kernel that was never queued keeps its time, and so do other loads."""
    slow, other = division((1,), 1), division((2,), 1)
    rows = gpu_rows([
        block_of(of_gpu(slow, 0.8), of_gpu(other, 0.5), machine="a"), block_of(of_gpu(slow, 0.9), level=0.5, machine="a"),
        block_of(of_gpu(slow, 0.3, queued=True), of_gpu(other, 0.1, queued=True, status="failed"), machine="b")], slow, other)
    assert {(row["Kernel_ID"], row["Machine"], row["Level"]): row.get("gpu_ms") for row in rows} == {
        (other.id, "a", 0.0): 0.5, (slow.id, "a", 0.5): 0.9, (slow.id, "b", 0.0): 0.3, (other.id, "b", 0.0): None}


def timed_models(number: int, disturbance: dict[str, float]) -> Block:
    """Latencies of models on a GPU, each beside a host so disturbed; a model's are its disturbance and `number`."""
    return block_of(*(of_model(name, label, 1.0 + ratio, 1.0 + ratio, disturbance=ratio, started=str(number), ended=str(number))
                      for name, ratio in disturbance.items() for label in ("latency", "host")), key=str(number))


def test_each_session_of_a_model_is_a_row_and_the_median_of_those_that_tell_counts() -> None:
    blocks = [timed_models(number, {"net": ratio}) for number, ratio in enumerate((0.0, 0.1, 0.5, 0.08))]
    table = pd.DataFrame(model_table_rows(model_sessions(blocks), {}))
    assert table["median_ms"].to_list() == [1.0, 1.1, 1.5, 1.08]
    assert idle_models(table)["median_ms"].to_dict() == pytest.approx({"net": 1.08})


def test_sessions_with_better_inputs_replace_others() -> None:
    """An Asinh takes 1.6 times as long since inputs are standardised, and a session of before says nothing of that."""
    old, new, loaded = timed_models(1, {"net": 0.5, "other": 0.0}), timed_models(2, {"net": 0.1}), timed_models(3, {"net": 0.2})
    better = tuple(m.model_copy(update={"inputs": "standardised"}) for m in new.measurements)
    blocks = [old, new.model_copy(update={"measurements": better}), loaded.model_copy(update={"level": 0.9})]
    assert [(row["Model"], row["Level"], row["Started"]) for row in model_table_rows(model_sessions(blocks), {})] == [
        ("other", 0.0, "1"), ("net", 0.0, "2"), ("net", 0.9, "3")]


def test_a_model_is_measured_in_as_many_sessions_as_are_wanted() -> None:
    """Every model's second session comes after every model's first; one beside a disturbed host does not count, one that
    lacks a variant neither, and one that failed ends it."""
    names = {"a", "b", "c"}
    items = tuple(ModelItem(Path("m.onnx"), Path("m.json"), chain(name, [conv()]), measures_kernels=True)
                  for name in sorted(names))

    def planned(*journal: Block, variants: tuple[str, ...] = (), sessions: int = 3) -> list[str]:
        blocks = plan(CollectionWork((), items, ()), journal, 32, "gpu", 1, variants, sessions)
        return [item.id for block in blocks for item in block.units]

    order = planned()
    assert [set(order[:3]), set(order[3:6]), set(order[6:9]), order[9:]] == [names, names, names, []]
    first, next_unit = timed_models(1, dict.fromkeys(names, 0.05)), order[0]
    assert planned(timed_models(1, {"a": 0.5, "b": 0.05, "c": 0.05}), sessions=1) == ["a"]
    assert [planned(first, timed_models(2, {next_unit: ratio})).count(next_unit) for ratio in (0.0, 0.5)] == [1, 2]
    assert Counter(planned(*[first] * 3, variants=("host_io",))) == dict.fromkeys(names, 3)
    failed = first.measurements[0].model_copy(update={"id": next_unit, "status": "crashed"})
    assert next_unit not in planned(block_of(failed))


def test_the_pace_of_the_host_beside_each_model() -> None:
    """The probe usually takes 300 us, the median of the readings of idle rows that went well, without those far above the
    fastest quarter. Where no host was probed, a model counts beside a disturbed one only if the GPU holds it up."""
    rows = [  # model, latency, host time, disturbance, reading of the probe
        ("usual", 1.0, 0.9, 0.5, 300.0), ("elsewhere slower", 1.0, 0.9, 0.0, 300.0), ("elsewhere slower", 1.2, 1.0, 0.0, 330.0),
        ("slower", 1.0, 0.9, 0.0, 450.0), ("of the GPU", 1.0, 0.6, 0.0, 450.0), ("never probed", 1.0, 0.6, 0.5, None),
        ("never probed or disturbed", 1.0, 0.9, 0.1, None)]
    table = pd.DataFrame([{"Model": model, "Level": 0.0, "Status": "ok", "Latency_ms": latency, "median_ms": latency,
                           "host_ms": host, "Disturbance": disturbance, "Probe_us": probe}
                          for model, latency, host, disturbance, probe in rows])
    odd = table.head(1).assign(Probe_us=1.0)
    table = pd.concat([table, odd.assign(Level=0.5), odd.assign(Status="failed")])
    assert usual_probe_us(table) == 300.0
    idle, before = idle_models(table), idle_models(table.drop(columns="Probe_us"))
    assert idle["pace"].to_dict() == pytest.approx({
        "usual": 1.0, "elsewhere slower": 1.05, "of the GPU": 1.5, "never probed": 1.0, "never probed or disturbed": 1.0})
    assert idle["median_ms"]["elsewhere slower"] == pytest.approx(1.1)
    assert idle["host_ms"]["of the GPU"] == 0.6  # beside a host whose pace is known
    assert set(before["pace"]) == {1.0}
    assert "usual" not in before.index  # its disturbance is all that is known then


@pytest.mark.slow
def test_a_worker_that_hangs_dies_with_the_collector(tmp_path: Path) -> None:
    """Even where the collector is killed without warning and the worker never comes to read the end of its input."""
    endless(tmp_path / "hangs.onnx")
    script = f"""
from hase.records.measurement import Effort
from hase.runtimes.protocol import Request, Worker
with Worker(60) as worker:
    worker.ask(Request(do="canary", device="cpu", effort=Effort()))
    print("ready", flush=True)
    worker.ask(Request(do="alone", device="cpu", effort=Effort(), paths=({str(tmp_path / "hangs.onnx")!r},)))
"""
    parent = psutil.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    (worker,) = parent.children()
    busy = worker.cpu_times().user
    while worker.cpu_times().user < busy + 0.3:  # it is in the loop
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([worker], timeout=5)
    for process in alive:
        process.kill()
    assert not alive


# kinds of load -----------------------------------------------------------------------------------------------------------

BACKGROUNDS = [{"name": "products"}, {"name": "net", "kind": "model", "model": "other.onnx", "dims": {"batch": 2}},
               {"name": "copies", "kind": "memory", "period_ms": 10}]
KINDS_OF_LOAD = TINY | {"held_out": [], "labels": ["run"], "levels": [0.0, 0.6], "block_kernels": 32, "block_models": 4,
                        "held_out_backgrounds": ["net"]}


def kinds_of_load(count: int = 3, **changes: object) -> CollectorConfig:
    return CollectorConfig.model_validate(
        KINDS_OF_LOAD | {"stress": {"settle_s": 0.1, "backgrounds": BACKGROUNDS[:count]}} | changes)


@pytest.fixture(scope="module")
def under_load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """Made-up times of a model and its kernels, idle and beside two real loads, one of them a second model, held out."""
    workspace = Workspace(tmp_path_factory.mktemp("load"))
    build_workspace(workspace, {"anet_b1": small_model()})
    files.write_bytes(workspace.models / "other.onnx", small_model(batch="batch", channels=16).SerializeToString())
    with pytest.MonkeyPatch.context() as patch:
        replace_workers(patch)
        collect(workspace, kinds_of_load(2))
        yield workspace


def counted_loads(folder: Path) -> dict[tuple[float, str], int]:
    """How many kernels each load has a row of, all of them good; the model has one at each load too."""
    kernels, models = read_table(kernel_table_path(folder)), read_table(model_table_path(folder))
    assert not kernels.duplicated(["Kernel_ID", "Level", "Background"]).any()
    assert set(kernels["Status"]) == {"ok"}
    assert set(zip(models["Level"], models["Background"], strict=True)) == {*zip(
        kernels["Level"], kernels["Background"], strict=True)}
    return Counter(zip(kernels["Level"], kernels["Background"], strict=True))


@pytest.mark.slow
def test_every_background_is_used_at_each_level(under_load: Workspace) -> None:
    """Rows beside one that is held out are not learned from."""
    folder = dataset_of(under_load)
    counts, header, table = counted_loads(folder), read_header(folder), read_table(kernel_table_path(folder))
    assert counts == dict.fromkeys([(0.0, ""), (0.6, "products"), (0.6, "net")], counts[0.0, ""])
    for block in read_journal(folder):
        assert bool(block.background_name) == (block.stress["duty"] > 0.0) == (block.level > 0)
        assert set(block.background) == set(METRICS)  # alone, beside the window of the runs
    assert list(header.backgrounds) == ["products", "net"]
    assert header.backgrounds["net"] == Background(name="net", kind="model", model=Path("other.onnx"), dims={"batch": 2})
    rows = read_training_set(under_load, folder.name)
    assert len(rows) == len(table[table["Background"] != "net"])
    assert sorted(rows.times_ms["run"][~rows.idle]) == sorted(table[table["Background"] == "products"]["Latency_ms"])


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [
    ({"stress": {"backgrounds": [{"name": "products", "kind": "mixed"}, BACKGROUNDS[1]]}}, "background products has changed"),
    ({"held_out_backgrounds": []}, "background net was held out when this dataset"),
    ({"held_out_backgrounds": ["net", "products"]}, "background products was not held out"),
    ({"stress": {"backgrounds": [*BACKGROUNDS[:2], {"name": "lost", "kind": "model", "model": "lost.onnx"}]}}, "no such model"),
])
def test_another_background_is_refused(under_load: Workspace, change: dict[str, object], message: str) -> None:
    before = header_path(dataset_of(under_load)).read_bytes()
    with pytest.raises(UserError, match=message):
        collect(under_load, kinds_of_load(2, **change))
    assert header_path(dataset_of(under_load)).read_bytes() == before


@pytest.mark.slow
def test_a_further_background_is_measured_where_the_others_are_there(under_load: Workspace, tmp_path: Path) -> None:
    workspace = Workspace(shutil.copytree(under_load.root, tmp_path / "copy"))
    folder = dataset_of(workspace)
    before = journal_path(folder).read_text()
    collect(workspace, kinds_of_load(2))
    assert journal_path(folder).read_text() == before
    collect(workspace, kinds_of_load(3))
    assert journal_path(folder).read_text().startswith(before)
    assert {block.load for block in read_journal(folder)[len(before.splitlines()):]} == {(0.6, "copies")}
    assert len(set(counted_loads(folder).values())) == 1
    collect(workspace, kinds_of_load(1, held_out_backgrounds=[], levels=[0.0]))  # what it does not name stays
    assert list(read_header(folder).backgrounds) == ["products", "net", "copies"]


# tables ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("column", "value", "shown"), [
    ("Latency_ms", None, "nan"), ("Latency_ms", 0, "0.0"), ("Latency_ms", "inf", "inf"), ("Latency_ms", "fast", "fast"),
    ("kernel_time_ms", -1, "-1.0")])
def test_times_that_are_none_are_refused(tmp_path: Path, column: str, value: object, shown: str) -> None:
    """Except for rows that failed."""
    path, row = tmp_path / "kernel_latency.csv", {
        "Kernel_ID": "k", "OpType": "Conv", "Input_Shape": "1x3", "Latency_ms": 0.5, "kernel_time_ms": 0.4, "Level": 0.0,
        "Models": "anet", "Groups": "anet", "Status": "ok"}
    files.write_csv(path, list(row), [row, row | {"Latency_ms": None, "Status": "crashed"}, row | {column: value}])
    with pytest.raises(UserError, match=rf"kernel_latency\.csv.*line 4: {column} is {shown} for k.*benchmark/collector\.py"):
        read_table(path)


@pytest.mark.parametrize(("text", "message"), [
    (None, "no such dataset"), ("", "not a CSV dataset"),
    ("Kernel_ID,Latency_ms\nk,1\n", "column Level, Status, OpType, Input_Shape, Models, Groups missing")])
def test_files_that_are_no_table(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(("text", "message"), [
    ("levels: [0.3, 0.3]", "levels: duplicate value"),
    ("stress: {backgrounds: [{name: a, queu: deep}]}", "stress.backgrounds.0.queu: unknown key; did you mean queue?"),
    ("stress: {backgrounds: [{name: a}, {name: a, kind: memory}]}", "stress.backgrounds: two backgrounds have the same name"),
    ("held_out_backgrounds: [net]", "held_out_backgrounds: stress.backgrounds has no net, but compute")])
def test_config_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"config\.yaml.*{message}"):
        read_config(path, CollectorConfig)


# the most useful first ---------------------------------------------------------------------------------------------------

USEFUL_FIRST = CollectorConfig.model_validate({
    "device": "cpu", "labels": ["kernel_time"], "levels": [0.0], "window_s": 0.03, "patience_s": 0, "attempts": 1,
    "block_kernels": 2, "canary_drift": 100.0})


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, list[Kernel]]:
    """A workspace with two models and six sampled convolutions."""
    workspace = Workspace(tmp_path_factory.mktemp("sampled"))
    flavour = build_workspace(workspace, {"a_net": small_model(), "b_net": small_model(channels=16)})
    drawn = [conv(side=side, out=4 * side, batch=1 + side % 3) for side in range(8, 14)]
    for kernel in drawn:
        write_kernel(kernel, workspace.kernel_onnx / flavour.name)
    files.write_json(workspace.kernel_onnx / flavour.name / SEED_FILE, {kernel.id: ["a"] for kernel in drawn})
    return workspace, drawn


def test_models_come_first_and_give_the_times_of_their_kernels(sampled: tuple[Workspace, list[Kernel]]) -> None:
    work = find_work(sampled[0], local_target("cpu"), ())
    blocks = plan_by_usefulness(USEFUL_FIRST, work, "cpu", ["here"], 0.0, []).own["here"]
    planned = [item.id for block in blocks for item in block.units]
    assert (set(planned[:2]), set(planned[2:])) == ({"a_net", "b_net"}, {kernel.id for kernel in sampled[1]})


@pytest.mark.slow
@pytest.mark.usefixtures("fake_workers")
def test_a_collector_stops_in_time_and_the_next_one_goes_on(sampled: tuple[Workspace, list[Kernel]]) -> None:
    workspace, drawn = sampled
    stopped = collect(workspace, USEFUL_FIRST, minutes=1e-6)
    assert (stopped["left"], stopped["measured_kernels"]) == (8, 0)
    done = collect(workspace, USEFUL_FIRST, minutes=5.0)
    assert (done["left"], done["failed"]) == (0, [])
    blocks, target = read_journal(Path(done["dataset"])), local_target("cpu")
    assert [block.measurements[0].subject for block in blocks] == ["model", "model", "kernel", "kernel", "kernel"]
    of_models = {kernel.id for kernel in read_index(index_path(workspace, target.flavour)).all_kernels() if kernel.moves_data}
    assert of_models | {kernel.id for kernel in drawn} <= set(read_training_set(workspace, target.name).ids.tolist())
    work, uuid = find_work(workspace, target, ()), machine("cpu").uuid
    assert not plan_by_usefulness(USEFUL_FIRST, work, "cpu", [uuid], 0.0, blocks).count, "nothing is left"
