"""The collector: one row a kernel and level whatever happens: kills, crashes, hangs, other machines' datasets."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import yaml
from conftest import build_workspace, endless, small_model

from hase.benchmark.collecting.collect import collect
from hase.benchmark.collecting.config import CollectorConfig
from hase.benchmark.collecting.plans import CollectionWork, KernelItem, ModelItem, by_similar_work, carriers, find_work, plan
from hase.benchmark.collecting.units import KernelUnits, open_bench, start_workers
from hase.benchmark.measuring.blocks import idle, measure_block
from hase.benchmark.metrics.sources import open_source
from hase.benchmark.ort import worker
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
    write_journal,
)
from hase.records.dataset_tables import input_shape, kernel_rows, model_rows, model_sessions
from hase.records.dataset_writer import DatasetWriter
from hase.records.host_pace import idle_models, is_undisturbed, usual_probe_us
from hase.records.kernel_record import Kernel, KernelInput, Tensor
from hase.records.kernel_record_files import index_path, read_index, read_model_records, record_path
from hase.records.kernel_types import describe_kernel
from hase.records.measurement import (
    BACKGROUND_KINDS,
    BACKGROUND_QUEUES,
    COMPUTE,
    Background,
    Block,
    Effort,
    InputValues,
    Measurement,
    Status,
)
from hase.runtimes import local_target
from hase.runtimes.protocol import Request, Worker
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, instruction_set, machine
from hase.utils.paths import ROOT, Workspace
from hase.utils.processes import WorkerFailed

pytestmark = pytest.mark.measuring

METRICS = ["DCGM_FI_DEV_CPU_UTIL_TOTAL", "DCGM_FI_DEV_CPU_UTIL_SYS"]
LEVELS = (0.0, 0.5)
KILLS = 4
SMALLEST = -2**31  # divided by -1, its quotient is no 32-bit number: x86 raises SIGFPE, and the process dies
TINY = {
    "device": "cpu", "levels": list(LEVELS), "stress": {"settle_s": 0.1}, "metrics": METRICS, "window_s": 0.2,
    "kernel": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.005, "least_runs": 3, "most_runs": 5},
    "model": {"warmup": 1, "warmup_s": 0.0, "budget_s": 0.02, "least_runs": 4, "most_runs": 6},
    "block_kernels": 4, "canary_drift": 100.0, "patience_s": 0,
    "attempts": 1, "timeout_s": 60, "held_out": ["heldnet"],
}
needs_x86 = pytest.mark.skipif(not instruction_set().startswith("avx"), reason="only x86 traps this division")


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


@dataclass
class Collected:
    """A dataset that was collected with kills in between."""

    workspace: Workspace
    flavour: Flavour
    folder: Path
    config: Path
    final: subprocess.CompletedProcess[str]
    killed: int = 0
    orphans: list[str] = field(default_factory=list)
    blocks_after: list[int] = field(default_factory=list)  # in the journal, after each kill

    def command(self) -> list[str]:
        return [sys.executable, "benchmark/collector.py", "--config", str(self.config), "--workspace",
                str(self.workspace.root), "--json"]

    def kernels(self) -> pd.DataFrame:
        return read_table(kernel_table_path(self.folder))


def kill_once(collected: Collected, after_s: float, new_block: bool) -> None:
    """Starts the collector, kills it without warning, and waits for the processes that it had started.

    The kill comes `after_s` seconds after the start, or after the first new block, so that every run gets somewhere.
    """
    before = collected.blocks_after[-1] if collected.blocks_after else 0
    process = psutil.Popen(collected.command(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while new_block and process.poll() is None and len(files.read_lines(journal_path(collected.folder))) == before:
        time.sleep(0.01)
    try:
        process.wait(after_s)
    except psutil.TimeoutExpired:
        children = process.children(recursive=True)
        process.kill()
        process.wait()
        collected.killed += 1
        _, alive = psutil.wait_procs(children, timeout=10)
        collected.orphans += [" ".join(child.cmdline()) for child in alive if child.is_running()]
        for child in alive:
            child.kill()
    collected.blocks_after.append(len(files.read_lines(journal_path(collected.folder))))


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    workspace = Workspace(tmp_path_factory.mktemp("collector"))
    flavour = build_workspace(workspace, {
        "anet_b1": small_model(), "bnet_b1": small_model(channels=16), "heldnet_b1": small_model(side=24)})
    if instruction_set().startswith("avx"):
        add_sampled(workspace, flavour)
    config = workspace.root / "config.yaml"
    config.write_text(yaml.safe_dump(TINY))
    collection = Collected(workspace, flavour, workspace.dataset(local_target("cpu").name), config,
                           subprocess.CompletedProcess([], -1))
    moments = random.Random(7)
    for number in range(KILLS):
        kill_once(collection, moments.uniform(0.0, 0.6 if number else 3.0), new_block=number > 0)
    collection.final = subprocess.run(collection.command(), cwd=ROOT, capture_output=True, text=True)
    return collection


# a run that was killed several times -------------------------------------------------------------------------------------

@pytest.mark.slow
def test_kills_leave_no_process_behind(collected: Collected) -> None:
    assert collected.killed == KILLS
    assert collected.orphans == []
    assert collected.blocks_after == sorted(collected.blocks_after)
    assert collected.blocks_after[-1] > 0


@pytest.mark.slow
def test_no_row_is_lost_or_doubled(collected: Collected) -> None:
    index = read_index(index_path(collected.workspace, collected.flavour))
    of_models = {name for of_type in index.kernels.values() for name, entry in of_type.items()
                 if set(entry.models) != {"heldnet_b1"}}
    sampled = {CRASHES.id, CRASHES_IN_A_CARRIER.id} if instruction_set().startswith("avx") else set()
    wanted = {(name, level): 1 for name in of_models | sampled for level in LEVELS}
    table = collected.kernels()
    assert Counter(zip(table["Kernel_ID"], table["Level"], strict=True)) == wanted
    assert {*zip(table["Level"], table["Background"], strict=True)} == {(0.0, ""), (0.5, "compute")}
    models = read_table(model_table_path(collected.folder))
    assert Counter(zip(models["Model"], models["Level"], strict=True)) == {
        (name, level): 1 for name in ("anet_b1", "bnet_b1", "heldnet_b1") for level in LEVELS}
    blocks = read_journal(collected.folder)
    measured = Counter((m.subject, m.id, m.label, m.context, block.level) for block in blocks for m in block.measurements)
    assert set(measured.values()) == {1}


@pytest.mark.slow
def test_columns(collected: Collected) -> None:
    header = kernel_table_path(collected.folder).read_text().splitlines()[0].split(",")
    assert header[:6] == ["Kernel_ID", "OpType", "Input_Shape", *METRICS, "Latency_ms"]
    assert header[6:] == ["kernel_time_ms", "node_span_ms", "run_median_ms", *(f"{metric}_during" for metric in METRICS),
                          "Level", "Background", "Machine", "Context", "Models", "Canary_ms", "Drift", "Unsteady", "Inputs",
                          "Runs", "Started", "Ended", "Status", "Error", "Groups"]
    model_header = model_table_path(collected.folder).read_text().splitlines()[0].split(",")
    assert model_header[:6] == ["Model", "Level", "Background", *METRICS, "Latency_ms"]


@pytest.mark.slow
def test_rows_say_what_was_measured(collected: Collected) -> None:
    table = collected.kernels()
    good = table[table["Status"] == "ok"]
    times = ["Latency_ms", "run_median_ms", "kernel_time_ms", "node_span_ms"]
    assert (good[times] > 0).all().all()
    assert good[METRICS].notna().all().all()
    assert ((good[METRICS] >= 0) & (good[METRICS] <= 1)).all().all()
    assert set(table["Machine"]) == {machine("cpu").uuid}
    assert (good["Started"] < good["Ended"]).all()
    assert (good["Runs"] >= 3).all()
    assert good[[f"{metric}_during" for metric in METRICS]].notna().any().all()
    for block in read_journal(collected.folder):
        assert (block.stress["duty"] > 0.0) is (block.level > 0.0)  # very little, if the machine is busy
    described = {entry.kernel.id: entry for entry in read_kernels(collected.folder)}
    header = read_header(collected.folder)
    assert {model for entry in described.values() for model in entry.models} <= header.groups.keys()
    assert header.collections == dict.fromkeys(header.groups, "made up")
    for _, row in good.iterrows():
        entry = described[row["Kernel_ID"]]
        assert row["OpType"] == entry.kernel.type
        assert row["Input_Shape"] == input_shape(entry.kernel)
        assert (row["Models"], row["Groups"]) == (entry.owners, "|".join(entry.groups))
    in_models = good[good["Context"].str.contains("kernel_time:in_model")]
    assert set(in_models["Kernel_ID"]) == set(good["Kernel_ID"])


@pytest.mark.slow
def test_labels_are_a_choice(tmp_path: Path) -> None:
    """One label alone makes whole rows; what was not asked for is no column; other labels are another dataset."""
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"anet_b1": small_model()})
    wanted = TINY | {"held_out": [], "levels": [0.0], "labels": ["node_span"], "model_labels": False, "block_models": 4}
    collect(workspace, CollectorConfig.model_validate(wanted))
    folder = workspace.dataset(local_target("cpu").name)
    table = read_table(kernel_table_path(folder))
    assert set(table["Status"]) == {"ok"}
    assert set(table["Context"]) == {"node_span:carrier"}
    assert table["Latency_ms"].isna().all()
    assert (table["node_span_ms"] > 0).all()
    assert not {"kernel_time_ms", "gpu_ms", "gpu_launches"} & set(table.columns)
    assert read_header(folder).labels == ("node_span",)
    with pytest.raises(UserError, match=r"collected with labels \[node_span\], not \[run\]"):
        collect(workspace, CollectorConfig.model_validate(wanted | {"labels": ["run"]}))


@pytest.mark.slow
def test_numpy_in_and_out_is_a_variant(tmp_path: Path) -> None:
    """What a model takes with numpy arrays in and out stands beside its latency; asked for later, it is measured later."""
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"anet_b1": small_model()})
    wanted = TINY | {"held_out": [], "levels": [0.0], "labels": ["node_span"], "model_labels": False}
    folder = workspace.dataset(local_target("cpu").name)
    for variants, rows in (([], 1), (["host_io"], 2), (["host_io"], 2)):
        collect(workspace, CollectorConfig.model_validate(wanted | {"variants": variants}))
        latencies = [m for block in read_journal(folder) for m in block.measurements if m.label == "latency"]
        assert len(latencies) == rows
    [host_io] = [m for block in read_journal(folder) for m in block.measurements if m.label == "host_io"]
    table = read_table(model_table_path(folder))
    assert table["host_io_ms"].isna().to_list() == [True, False]  # of the first session, and of the second
    assert table["host_io_ms"].iloc[1] == pytest.approx(np.median(host_io.samples_ms), abs=1e-6)
    assert table["cuda_graph_ms"].isna().all()
    with pytest.raises(UserError, match="variants: cuda_graph: ONNX Runtime has no such variants on cpu"):
        collect(workspace, CollectorConfig.model_validate(wanted | {"variants": ["cuda_graph"]}))


@pytest.mark.parametrize(("latency_ms", "host_ms", "disturbance", "undisturbed"), [
    (1.0, 0.9, 0.1, True), (1.0, 0.9, 0.5, False), (1.0, 0.6, 0.5, True), (1.0, float("nan"), 0.5, False),
    (1.0, 0.9, float("nan"), True)])
def test_a_disturbed_host_does_not_matter_to_a_model_that_the_gpu_holds_up(
        latency_ms: float, host_ms: float, disturbance: float, undisturbed: bool) -> None:
    assert is_undisturbed(latency_ms, host_ms, disturbance) is undisturbed


def test_the_pace_of_the_host_beside_each_model() -> None:
    """A made-up table: the probe usually takes 300 us, the median of the readings of idle rows that went well, without those
    far above the fastest quarter."""
    rows = [  # model, latency, host time, disturbance, reading of the probe
        ("usual", 1.0, 0.9, 0.5, 300.0), ("usual, elsewhere slower", 1.0, 0.9, 0.0, 300.0),
        ("usual, elsewhere slower", 1.2, 1.0, 0.0, 330.0), ("slower", 1.0, 0.9, 0.0, 450.0),
        ("of the GPU", 1.0, 0.6, 0.0, 450.0),
        ("never probed", 1.0, 0.6, 0.5, None), ("never probed or disturbed", 1.0, 0.9, 0.1, None)]
    table = pd.DataFrame([{"Model": model, "Level": 0.0, "Status": "ok", "Latency_ms": latency, "median_ms": latency,
                           "host_ms": host, "Disturbance": disturbance, "Probe_us": probe}
                          for model, latency, host, disturbance, probe in rows])
    of_another_host = table.head(1).assign(Probe_us=1.0)
    table = pd.concat([table, of_another_host.assign(Level=0.5), of_another_host.assign(Status="failed")])
    assert usual_probe_us(table) == 300.0
    idle = idle_models(table)
    assert idle["pace"].to_dict() == pytest.approx({
        "usual": 1.0, "usual, elsewhere slower": 1.05, "of the GPU": 1.5, "never probed": 1.0,
        "never probed or disturbed": 1.0})
    assert idle["median_ms"]["usual, elsewhere slower"] == pytest.approx(1.1)
    assert idle["host_ms"]["of the GPU"] == 0.6  # beside a host whose pace is known
    assert np.isnan(idle["host_ms"]["never probed"])
    before = table.drop(columns="Probe_us")
    assert np.isnan(usual_probe_us(before))
    assert set(idle_models(before)["pace"]) == {1.0}
    assert "usual" not in idle_models(before).index  # its disturbance is all that is known then


@pytest.mark.slow
@pytest.mark.parametrize(("each_machine", "blocks"), [(True, 4), (False, 2)])
def test_what_another_machine_measured(tmp_path: Path, each_machine: bool, blocks: int) -> None:
    """Measured here too, or left as it is: two blocks, one of the model and one of its kernels."""
    workspace = Workspace(tmp_path)
    build_workspace(workspace, {"anet_b1": small_model()})
    config = CollectorConfig.model_validate(TINY | {"held_out": [], "levels": [0.0], "each_machine": each_machine, "ties": 0,
                                                    "block_kernels": 99})
    collect(workspace, config)
    folder = workspace.dataset(local_target("cpu").name)
    write_journal(folder, [block.model_copy(update={"machine": "elsewhere"}) for block in read_journal(folder)])
    collect(workspace, config)
    assert len(read_journal(folder)) == blocks


def test_the_gpu_s_own_time_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="labels: gpu: ONNX Runtime has no such labels on cpu; it has run, "):
        CollectorConfig(labels=("gpu",)).labels_on("cpu")
    assert CollectorConfig().labels_on("cpu") == ("run", "kernel_time", "node_span")
    assert CollectorConfig().labels_on("cuda") == ("run", "kernel_time", "node_span", "gpu")


def test_gpu_columns_of_a_kernel_and_a_model() -> None:
    """Measurements as a GPU's worker gives them, made up here: zero is a time where the GPU has nothing to do."""
    kernel = division((1,), 1)
    common: dict[str, Any] = {"started": "2026-01-01", "ended": "2026-01-02"}
    block = Block(
        level=0.0, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1, machine="m",
        measurements=(
            Measurement(subject="kernel", id=kernel.id, label="gpu", context="carrier", place="carrier",
                                samples_ms=(0.0, 0.0, 0.0),                                launches=0, **common),
            *(Measurement(subject="model", id="net", label=label, context="net", place="alone", samples_ms=samples_ms,
                          launches=launches, **common)
              for label, samples_ms, launches in (("host", (0.5, 0.7, 0.6), None), ("latency", (1.0, 1.0), None),
                                                  ("gpu", (0.8,), 7)))))
    row = kernel_rows([block], {kernel.id: DatasetKernel(kernel=kernel, models=(), groups=())}, "gpu")[0]
    assert (row["gpu_ms"], row["gpu_launches"], row["gpu_kernels"], row["Status"]) == (0.0, 0, "", "ok")
    model = model_rows(model_sessions([block]), {"net": "nets"})[0]
    assert (model["Latency_ms"], model["host_ms"], model["gpu_ms"], model["gpu_launches"]) == (1.0, 0.6, 0.8, 7)
    assert model["Groups"] == "nets"


def test_work_on_several_streams_counts_as_it_was_queued() -> None:
    """Whichever machine measured it. The kernel that was never queued keeps its time, and so do other loads. Made-up times."""
    slow, other = division((1,), 1), division((2,), 1)

    def measured(kernel: Kernel, time_ms: float, queued: bool = False, status: Status = "ok") -> Measurement:
        return Measurement(subject="kernel", id=kernel.id, label="gpu", context="carrier", place="carrier", launches=5,
                           samples_ms=(time_ms,), queued=queued, status=status)

    def block(machine: str, *measurements: Measurement, level: float = 0.0) -> Block:
        return Block(level=level, key="k", background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0, attempts=1,
                     machine=machine, measurements=measurements)

    rows = kernel_rows([block("a", measured(slow, 0.8), measured(other, 0.5)), block("a", measured(slow, 0.9), level=0.5),
                        block("b", measured(slow, 0.3, queued=True), measured(other, 0.1, queued=True, status="failed"))],
                       {kernel.id: DatasetKernel(kernel=kernel, models=(), groups=()) for kernel in (slow, other)}, "gpu")
    assert {(row["Kernel_ID"], row["Machine"], row["Level"]): row.get("gpu_ms") for row in rows} == {
        (other.id, "a", 0.0): 0.5, (slow.id, "a", 0.5): 0.9, (slow.id, "b", 0.0): 0.3, (other.id, "b", 0.0): None}


def timed_models(number: int, disturbance: dict[str, float]) -> Block:
    """Made-up latencies of models on a GPU, each beside a host so disturbed; a model's are its disturbance and `number`."""
    measurements = tuple(Measurement(subject="model", id=name, label=label, context=name, place="alone", disturbance=ratio,
                                             samples_ms=(1.0 + ratio, 1.0 + ratio), started=str(number), ended=str(number))
                         for name, ratio in disturbance.items() for label in ("latency", "host"))
    return Block(level=0.0, key=str(number), background={}, during={}, canary_before_ms=1.0, canary_after_ms=1.0,
                         attempts=1, machine="m", measurements=measurements)


def test_each_session_of_a_model_is_a_row_and_the_median_of_those_that_tell_counts() -> None:
    blocks = [timed_models(number, {"net": ratio}) for number, ratio in enumerate((0.0, 0.1, 0.5, 0.08))]
    table = pd.DataFrame(model_rows(model_sessions(blocks), {}))
    assert table["median_ms"].to_list() == [1.0, 1.1, 1.5, 1.08]
    assert table["Started"].to_list() == ["0", "1", "2", "3"]
    assert idle_models(table)["median_ms"].to_dict() == pytest.approx({"net": 1.08})


def test_sessions_with_better_inputs_replace_others() -> None:
    """An Asinh takes 1.6 times as long since inputs are standardised, and a session of before says nothing of that."""
    def with_inputs(block: Block, inputs: InputValues) -> Block:
        return block.model_copy(update={"measurements": tuple(
            m.model_copy(update={"inputs": inputs}) for m in block.measurements)})

    old, new, loaded = timed_models(1, {"net": 0.5, "other": 0.0}), timed_models(2, {"net": 0.1}), timed_models(3, {"net": 0.2})
    blocks = [old, with_inputs(new, "standardised"), loaded.model_copy(update={"level": 0.9})]
    rows = [(row["Model"], row["Level"], row["Started"]) for row in model_rows(model_sessions(blocks), {})]
    assert rows == [("other", 0.0, "1"), ("net", 0.0, "2"), ("net", 0.9, "3")]
    failed = new.model_copy(update={"measurements": tuple(
        m.model_copy(update={"inputs": "standardised", "status": "failed", "samples_ms": ()}) for m in new.measurements)})
    assert [session.block.key for session in model_sessions([old, failed]) if session.model == "net"] == ["1", "2"]


@pytest.mark.slow
def test_a_model_beside_a_disturbed_host_is_measured_again(collected: Collected) -> None:
    records = read_model_records(collected.workspace, collected.flavour)
    items = tuple(ModelItem(Path("m.onnx"), Path("m.json"), record, labels=True) for record in records)
    names = [record.model for record in records]
    blocks = [timed_models(1, {name: 0.5 if place == 0 else 0.05 for place, name in enumerate(names)})]
    again = [item.record.model for planned in plan(CollectionWork((), items, ()), blocks, 32, "gpu") for item in planned.units
             if isinstance(item, ModelItem)]
    assert again == names[:1]
    blocks.append(timed_models(2, {names[0]: 0.0}))
    assert plan(CollectionWork((), items, ()), blocks, 32, "gpu") == []


@pytest.mark.slow
def test_a_model_is_measured_in_as_many_sessions_as_are_wanted(collected: Collected) -> None:
    """Every model's second session comes after every model's first; one beside a disturbed host does not count, one that
    lacks a variant neither, and one that failed ends it."""
    records = read_model_records(collected.workspace, collected.flavour)
    work = CollectionWork((), tuple(ModelItem(Path("m.onnx"), Path("m.json"), record, labels=True) for record in records), ())
    names = {record.model for record in records}

    def planned(*journal: Block, variants: tuple[str, ...] = ()) -> list[str]:
        blocks = plan(work, journal, 32, "gpu", 1, variants, sessions=3)
        return [item.id for block in blocks for item in block.units]

    order = planned()
    assert [set(order[:len(names)]), set(order[len(names):2 * len(names)]), set(order[2 * len(names):])] == [names] * 3
    assert len(order) == 3 * len(names)
    first = timed_models(1, dict.fromkeys(names, 0.0))
    next_unit = order[0]
    assert Counter(planned(first, timed_models(2, {next_unit: 0.5}))) == dict.fromkeys(names, 2)
    assert Counter(planned(first, timed_models(2, {next_unit: 0.0})))[next_unit] == 1
    assert next_unit not in planned(*[first] * 3)
    assert Counter(planned(*[first] * 3, variants=("host_io",))) == dict.fromkeys(names, 3)
    failed = first.measurements[0].model_copy(update={"id": next_unit, "status": "crashed"})
    assert next_unit not in planned(first.model_copy(update={"measurements": (failed,)}))


@pytest.mark.slow
def test_the_table_follows_from_the_journal(collected: Collected) -> None:
    blocks = read_journal(collected.folder)
    runs = {(m.id, block.level): m.samples_ms for block in blocks for m in block.measurements if m.label == "run"}
    latencies = {(m.id, block.level): m.samples_ms for block in blocks for m in block.measurements if m.label == "latency"}
    for _, row in collected.kernels().iterrows():
        if row["Status"] == "ok":
            samples = runs[row["Kernel_ID"], row["Level"]]
            assert row["Latency_ms"] == pytest.approx(np.mean(samples), abs=1e-6)
            assert row["run_median_ms"] == pytest.approx(np.median(samples), abs=1e-6)
    for _, row in read_table(model_table_path(collected.folder)).iterrows():
        assert row["Latency_ms"] == pytest.approx(np.mean(latencies[row["Model"], row["Level"]]), abs=1e-6)


@pytest.mark.slow
def test_held_out_families_are_measured_whole_and_not_their_kernels(collected: Collected) -> None:
    records = read_model_records(collected.workspace, collected.flavour)
    held = next(set(record.kernels) for record in records if record.model == "heldnet_b1")
    measured_kernels = {name for record in records if record.model != "heldnet_b1" for name in record.kernels}
    table = collected.kernels()
    assert held - measured_kernels
    assert not (held - measured_kernels) & set(table["Kernel_ID"])
    assert not table["Models"].str.contains("heldnet").any()
    assert held & measured_kernels <= set(table["Kernel_ID"])
    assert read_header(collected.folder).held_out == ("heldnet",)


@pytest.mark.slow
@needs_x86
def test_a_kernel_that_crashes_costs_only_its_row(collected: Collected) -> None:
    table = collected.kernels().set_index("Kernel_ID")
    crashed = table.loc[CRASHES.id]
    assert set(crashed["Status"]) == {"crashed"}
    assert crashed["Error"].str.contains("SIGFPE").all()
    assert crashed["Latency_ms"].isna().all()
    in_carrier = table.loc[CRASHES_IN_A_CARRIER.id]
    assert set(in_carrier["Status"]) == {"crashed"}
    assert (in_carrier["Latency_ms"] > 0).all()  # alone it runs
    assert set(table.drop([CRASHES.id, CRASHES_IN_A_CARRIER.id])["Status"]) == {"ok"}
    result = json.loads(collected.final.stdout)
    assert collected.final.returncode == 1
    assert set(result["failed"]) == {CRASHES.id, CRASHES_IN_A_CARRIER.id}
    assert set(crashed["Models"]) == {"sampled:anet|sampled:bnet"}
    assert "Traceback" not in collected.final.stderr


@pytest.mark.slow
def test_a_second_run_has_nothing_to_do(collected: Collected) -> None:
    paths = [journal_path(collected.folder), kernel_table_path(collected.folder),
             model_table_path(collected.folder)]
    before = [path.read_bytes() for path in paths]
    result = collect(collected.workspace, read_config(collected.config, CollectorConfig))
    assert [path.read_bytes() for path in paths] == before
    assert result["kernel_rows"] == len(collected.kernels())


# refusals ----------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [
    ({"held_out": ["heldnet", "bnet"]}, "collected with held_out"), ({"metrics": METRICS[:1]}, "collected with metrics"),
    ({"metrics": ["DCGM_FI_DEV_SM_CLOCK"]}, "can't read it here; it has .*CPU_UTIL_TOTAL"),
    ({"window_s": 0.01}, r"window_s 0\.01: psutil needs at least 0\.2 s")])
def test_another_config_is_refused(collected: Collected, change: dict[str, object], message: str) -> None:
    before = journal_path(collected.folder).read_bytes()
    with pytest.raises(UserError, match=message):
        collect(collected.workspace, CollectorConfig.model_validate(TINY | change))
    assert journal_path(collected.folder).read_bytes() == before


@pytest.mark.slow
def test_a_dataset_of_another_target_is_refused(collected: Collected, tmp_path: Path) -> None:
    header = read_header(collected.folder)
    of_more_threads = header.model_copy(update={"target": header.target.model_copy(update={"threads": 96})})
    files.write_json(header_path(tmp_path), of_more_threads)
    before = header_path(tmp_path).read_bytes()
    with pytest.raises(UserError, match=rf"is of \S*-96t-\S*, not of {header.target.name};"):
        DatasetWriter(tmp_path, header, [])
    assert header_path(tmp_path).read_bytes() == before


@pytest.mark.slow
def test_another_machine_of_the_target_joins_the_dataset(collected: Collected, tmp_path: Path) -> None:
    header = read_header(collected.folder)
    (here,) = header.machines.values()
    files.write_json(header_path(tmp_path), header)
    entries = read_kernels(collected.folder)
    second_machine = here.model_copy(update={"uuid": "another"})
    joined = DatasetWriter(tmp_path, header.model_copy(update={"machines": {"another": second_machine}}), entries[:2]).header
    assert set(joined.machines) == {here.uuid, "another"}
    DatasetWriter(tmp_path, header, entries[1:4])
    assert {entry.kernel.id for entry in read_kernels(tmp_path)} == {entry.kernel.id for entry in entries[:4]}


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


def test_models_alone_need_no_built_kernels(workspace: Workspace) -> None:
    build_workspace(workspace, {"anet_b1": small_model()})
    shutil.rmtree(workspace.kernel_onnx)
    totals = collect(workspace, CollectorConfig.model_validate(TINY | {"kernel_levels": [], "model_labels": False}))
    assert (totals["kernel_rows"], totals["model_rows"]) == (0, len(LEVELS))


def test_a_damaged_file_of_a_models_kernel_is_still_a_row(workspace: Workspace) -> None:
    """Its description comes from the index; that it does not load is what its row will say."""
    flavour = build_workspace(workspace, {"anet_b1": small_model()})
    path = next((workspace.kernel_onnx / flavour.name).glob("*.onnx"))
    path.write_bytes(b"no model")
    work = find_work(workspace, local_target("cpu"), ())
    assert path.stem in {item.kernel.id for item in work.kernels}


def test_an_index_alone_gives_kernels_without_models(workspace: Workspace) -> None:
    """As where the records of a model stay on another machine, and its kernels alone are measured on this one."""
    flavour = build_workspace(workspace, {"anet_b1": small_model()})
    both = find_work(workspace, local_target("cpu"), ())
    record_path(workspace, flavour, "anet_b1").unlink()
    alone = find_work(workspace, local_target("cpu"), ())
    assert [model.id for model in both.models] == ["anet_b1"]
    assert alone.models == ()
    assert alone.kernels == both.kernels
    assert alone.described == both.described


# blocks ------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_block_has_canaries_windows_and_all_labels(collected: Collected, tmp_path: Path) -> None:
    """No drift is small enough here, so the block is unsteady."""
    config = CollectorConfig.model_validate(TINY | {"canary_drift": 1e-9, "window_s": 0.2})
    target = local_target("cpu")
    item = find_work(collected.workspace, target, ()).kernels[-1]
    with start_workers(config, "cpu", config.labels_on("cpu")) as workers:
        bench = open_bench(config, "cpu", "here", open_source("cpu", METRICS), workers.worker)
        block = measure_block(bench, "one", lambda: KernelUnits(config, target, workers).time([item]), idle(bench))
    assert block.unsteady
    assert {m.label for m in block.measurements} == {"run", "kernel_time", "node_span"}
    assert set(block.background) == set(METRICS)
    assert block.during == {} or set(block.during) == set(METRICS)  # a window too short to be valid is left empty
    assert (block.during_s > 0.2) is bool(block.during)
    assert block.background_s >= 0.2


def test_drift() -> None:
    block = Block(level=0, key="", background={}, during={}, canary_before_ms=2.0, canary_after_ms=2.5, attempts=1,
                          machine="", measurements=())
    assert block.drift == 0.25
    disturbed = Measurement(subject="model", id="m", label="latency", context="m", place="alone",
                            samples_ms=(2.0, 2.0, 1.0, 1.0))
    assert block.model_copy(update={"measurements": (disturbed,)}).drift == 0.5


def test_carriers_are_bounded_and_hold_one_version_of_a_domain() -> None:
    """Relu means the same since operator set 14 and is described as of 20; Softmax of 12 means something else."""
    def item(opset: int, mib: int = 0, op_type: str = "Relu") -> KernelItem:
        x = KernelInput(dtype="float32", shape=(mib << 18,) if mib else (4,))
        return KernelItem(Path(), describe_kernel(op_type, "", opset, {}, [x], [x]))

    groups = [[(i.kernel.opset, i.kernel.inputs[0].elements >> 18) for i in group]
              for group in carriers([item(20), item(18), item(12, op_type="Softmax"), item(20, 150), item(20, 100),
                                     item(20, 400)], 512 << 20)]
    assert groups == [[(20, 0), (20, 0)], [(11, 0)], [(20, 150)], [(20, 100)], [(20, 400)]]


def test_kernels_that_share_a_carrier_take_about_as_long() -> None:
    """Of small ones all are alike; the others are within a factor of four."""
    def item(elements: int) -> KernelItem:
        x = KernelInput(dtype="float32", shape=(elements,))
        return KernelItem(Path(), describe_kernel("Relu", "", 20, {}, [x], [x]))

    groups = by_similar_work([item(elements) for elements in (1 << 20, 4, 1 << 16, 3 << 16, 500, 7 << 20)])
    sizes = [[i.kernel.inputs[0].elements for i in group] for group in groups]
    assert sizes == [[4, 500], [1 << 16, 3 << 16], [1 << 20], [7 << 20]]


# the worker process ------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_a_worker_that_hangs_or_crashes_is_replaced(tmp_path: Path) -> None:
    canary = Request(do="canary", device="cpu", effort=Effort())
    hangs, crashes = tmp_path / "hangs.onnx", write_kernel(CRASHES, tmp_path)
    endless(hangs)
    before = set(psutil.Process().children())

    def children() -> set[psutil.Process]:
        return set(psutil.Process().children()) - before

    with Worker(timeout_s=60) as worker:
        assert min(worker.ask(canary).measurements[0].samples_ms) > 0
        worker.timeout_s = 1
        with pytest.raises(WorkerFailed, match="no answer within 1 s") as raised:
            worker.ask(Request(do="alone", device="cpu", effort=Effort(), paths=(str(hangs),)))
        assert raised.value.status == "timeout"
        assert not children()
        worker.timeout_s = 60
        if instruction_set().startswith("avx"):
            with pytest.raises(WorkerFailed, match="SIGFPE") as raised:
                worker.ask(Request(do="alone", device="cpu", effort=Effort(), paths=(str(crashes),)))
            assert raised.value.status == "crashed"
        reply = worker.ask(Request(do="alone", device="cpu", effort=Effort(), paths=(str(tmp_path / "none.onnx"),)))
        assert "no such file" in reply.error
        (worker_process,) = children()
    assert not psutil.wait_procs([worker_process], timeout=10)[1]


@pytest.mark.slow
def test_what_a_worker_prepares_is_not_its_next_reply() -> None:
    """Nor does one that can't prepare, or that ends over it, fail what is asked of it next."""
    canary = Request(do="canary", device="cpu", effort=Effort(least_runs=3, most_runs=3, budget_s=0.001))
    preparing = canary.model_copy(update={"do": "prepare"})
    with Worker(60) as worker:
        worker.prepare(preparing)
        assert len(worker.ask(canary).measurements[0].samples_ms) == 3
        worker.prepare(preparing)
        worker.wait()
        assert worker.ask(preparing).measurements == ()
        worker.prepare(Request(do="alone", device="cpu", effort=Effort(), paths=("none.onnx",)))
        assert worker.ask(canary).error == ""
        [process] = [child for child in psutil.Process().children() if "hase.benchmark.ort.worker" in child.cmdline()]
        process.suspend()  # or it might have answered by the time it is killed
        worker.prepare(preparing)
        process.kill()
        assert worker.ask(canary).error == ""


def test_tracers_prepare_where_their_label_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is really started here: the requests that would start a GPU's processes are noted."""
    sent: list[tuple[str, str, tuple[str, ...]]] = []
    monkeypatch.setattr(Worker, "prepare", lambda self, request: sent.append(
        (request.do, request.device, request.labels)))
    config = CollectorConfig(tracers=2)
    with start_workers(config, "cuda", ("run", "gpu")) as workers:
        for process in workers.processes:
            process.wait()
    assert sent == [("prepare", "cuda", ())] + [("prepare", "cuda", ("gpu",))] * 2
    sent.clear()
    with start_workers(config, "cpu", ("run",)):
        assert sent == [("prepare", "cpu", ())]


def test_a_tracer_prepares_by_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; what would look into a GPU is replaced by something that runs what it is given."""
    traced: list[int] = []
    monkeypatch.setattr(worker, "trace", lambda runs: traced.append(len([run() for run in runs])))
    request = Request(do="prepare", device="cpu", effort=Effort())
    assert worker.answer(request).error == ""
    assert not traced
    assert worker.answer(request.model_copy(update={"labels": ("gpu",)})).error == ""
    assert traced == [1]


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
    while worker.cpu_times().user < busy + 0.5:  # it is in the loop
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
def under_load(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A model and its kernels measured idle and beside two backgrounds, one of them a second model, held out."""
    workspace = Workspace(tmp_path_factory.mktemp("load"))
    build_workspace(workspace, {"anet_b1": small_model()})
    files.write_bytes(workspace.models / "other.onnx", small_model(batch="batch", channels=16).SerializeToString())
    collect(workspace, kinds_of_load(2))
    return workspace


def copied(workspace: Workspace, tmp_path: Path) -> tuple[Workspace, Path]:
    """A copy of a workspace, and its dataset's folder."""
    shutil.copytree(workspace.root, tmp_path / "copy")
    return Workspace(tmp_path / "copy"), Workspace(tmp_path / "copy").dataset(local_target("cpu").name)


def counted_loads(folder: Path) -> Counter[tuple[float, str]]:
    """How many kernels each load has a row of; each kernel has one, and each model too."""
    kernels = read_table(kernel_table_path(folder))
    models = read_table(model_table_path(folder))
    assert not kernels.duplicated(["Kernel_ID", "Level", "Background"]).any()
    assert set(kernels["Status"]) == {"ok"}
    counts = Counter(zip(kernels["Level"], kernels["Background"], strict=True))
    assert Counter(zip(models["Level"], models["Background"], strict=True)) == dict.fromkeys(counts, 1)
    return counts


@pytest.mark.slow
def test_every_background_is_used_at_each_level(under_load: Workspace) -> None:
    folder = under_load.dataset(local_target("cpu").name)
    (count,) = set(counted_loads(folder).values())
    assert counted_loads(folder) == {(0.0, ""): count, (0.6, "products"): count, (0.6, "net"): count}
    for block in read_journal(folder):
        assert bool(block.background_name) == (block.level > 0)
        assert set(block.background) == set(METRICS)  # alone, beside the window of the runs
        assert block.during == {} or set(block.during) == set(METRICS)
        assert (block.stress["duty"] > 0.0) is (block.level > 0)
        assert all(m.samples_ms for m in block.measurements)
    header = read_header(folder)
    assert list(header.backgrounds) == ["products", "net"]
    assert header.backgrounds["net"] == Background(name="net", kind="model", model=Path("other.onnx"), dims={"batch": 2})
    assert header.held_out_backgrounds == ("net",)


@pytest.mark.slow
def test_rows_beside_a_held_out_background_are_not_learned_from(under_load: Workspace) -> None:
    folder = under_load.dataset(local_target("cpu").name)
    rows = read_training_set(under_load, folder.name)
    table = read_table(kernel_table_path(folder))
    assert len(rows) == len(table[table["Background"] != "net"])
    beside = table[table["Background"] == "products"]
    assert sorted(rows.times_ms["run"][~rows.idle]) == sorted(beside["Latency_ms"])


@pytest.mark.slow
def test_a_further_background_is_measured_where_the_others_are_there(under_load: Workspace, tmp_path: Path) -> None:
    workspace, folder = copied(under_load, tmp_path)
    before = journal_path(folder).read_text()
    collect(workspace, kinds_of_load(2))
    assert journal_path(folder).read_text() == before
    collect(workspace, kinds_of_load(3))
    assert journal_path(folder).read_text().startswith(before)
    assert {block.load for block in read_journal(folder)[len(before.splitlines()):]} == {(0.6, "copies")}
    assert len(set(counted_loads(folder).values())) == 1
    assert list(read_header(folder).backgrounds) == ["products", "net", "copies"]
    collect(workspace, kinds_of_load(1, held_out_backgrounds=[], levels=[0.0]))  # what it does not name stays
    assert list(read_header(folder).backgrounds) == ["products", "net", "copies"]
    assert read_header(folder).held_out_backgrounds == ("net",)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), [
    ({"stress": {"backgrounds": [{"name": "products", "kind": "mixed"}, BACKGROUNDS[1]]}}, "background products has changed"),
    ({"held_out_backgrounds": []}, "background net was held out when this dataset"),
    ({"held_out_backgrounds": ["net", "products"]}, "background products was not held out"),
    ({"stress": {"backgrounds": [*BACKGROUNDS[:2], {"name": "queued", "queue": "deep"}]}}, "queued: queue deep: only a GPU"),
    ({"stress": {"backgrounds": [*BACKGROUNDS[:2], {"name": "lost", "kind": "model", "model": "lost.onnx"}]}}, "no such model"),
])
def test_another_background_is_refused(under_load: Workspace, tmp_path: Path, change: dict[str, object], message: str) -> None:
    workspace, folder = copied(under_load, tmp_path)
    before = header_path(folder).read_bytes()
    with pytest.raises(UserError, match=message):
        collect(workspace, kinds_of_load(2, **change))
    assert header_path(folder).read_bytes() == before


# tables ------------------------------------------------------------------------------------------------------------------

def write_table(path: Path, **last_row: object) -> None:
    """A small kernel table whose last row is changed."""
    rows = [{"Kernel_ID": f"k{number}", "OpType": "Conv", "Input_Shape": "1x3", "Latency_ms": 0.5, "kernel_time_ms": 0.4,
             "Level": 0.0, "Models": "anet", "Groups": "anet", "Status": "ok"} for number in range(3)]
    files.write_csv(path, list(rows[0]), [*rows[:2], rows[2] | last_row])


@pytest.mark.parametrize(("change", "message"), [
    ({"Latency_ms": float("nan")}, "line 4: Latency_ms is nan for k2"),
    ({"Latency_ms": None}, "line 4: Latency_ms is nan for k2"),
    ({"Latency_ms": -0.25}, "line 4: Latency_ms is -0.25 for k2"),
    ({"Latency_ms": 0}, "line 4: Latency_ms is 0.0 for k2"),
    ({"Latency_ms": "inf"}, "line 4: Latency_ms is inf for k2"),
    ({"Latency_ms": "fast"}, "line 4: Latency_ms is fast for k2"),
    ({"kernel_time_ms": -1}, "line 4: kernel_time_ms is -1.0 for k2"),
    ({"kernel_time_ms": "slow"}, "line 4: kernel_time_ms is slow for k2"),
])
def test_times_that_are_none_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "kernel_latency.csv"
    write_table(path, **change)
    with pytest.raises(UserError, match=message) as raised:
        read_table(path)
    assert str(path) in str(raised.value)
    assert "python benchmark/collector.py" in str(raised.value)


def test_rows_that_failed_need_no_time(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", Latency_ms=None, kernel_time_ms=None, Status="crashed")
    assert list(read_table(tmp_path / "t.csv")["Status"]) == ["ok", "ok", "crashed"]
    write_table(tmp_path / "t.csv", kernel_time_ms=None)
    assert read_table(tmp_path / "t.csv")["kernel_time_ms"].isna().sum() == 1  # a label that was not taken


@pytest.mark.parametrize(("text", "message"), [
    ("", "not a CSV dataset"),
    ("Kernel_ID,Latency_ms\nk,1\n", "column Level, Status, OpType, Input_Shape, Models, Groups missing"),
    ("a,b\n1,2,3\n", "missing|not a CSV")])
def test_files_that_are_no_table(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "t.csv")
    with pytest.raises(UserError, match="no such dataset"):
        read_table(tmp_path / "none.csv")


def test_a_damaged_journal_is_reported(tmp_path: Path) -> None:
    journal_path(tmp_path).write_text('{"version": 1}\n')
    with pytest.raises(UserError, match=r"line 1: not a block of version 2"):
        read_journal(tmp_path)


# config ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "message"), [
    ("levls: [0]", "levls: unknown key; did you mean levels?"), ("levels: [1.5]", "levels.0: .*less than or equal to 1"),
    ("levels: []", "levels: "), ("levels: [0.3, 0.3]", "levels: duplicate value"),
    ("stress: {kind: heat}", r"stress.kind: unknown key \(allowed: backgrounds, settle_s\)"),
    ("stress: {backgrounds: [{name: a, kind: heat}]}", "stress.backgrounds.0.kind: .*compute"),
    ("stress: {backgrounds: [{name: a, queu: deep}]}", "stress.backgrounds.0.queu: unknown key; did you mean queue?"),
    ("stress: {backgrounds: []}", "stress.backgrounds: "),
    ("stress: {backgrounds: [{name: a}, {name: a, kind: memory}]}", "stress.backgrounds: two backgrounds have one name"),
    ("held_out_backgrounds: [net]", "held_out_backgrounds: stress.backgrounds has no net, but compute"),
    ("kernel: {warmup: -1}", "kernel.warmup: .*0"),
    ("device: tpu", "device: .*auto")])
def test_config_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_config(path, CollectorConfig)
    assert str(path) in str(raised.value)


def test_the_shipped_configs_under_load_are_a_gpus_and_cover_what_is_reported_of_them() -> None:
    """Families and backgrounds are left out when learning, one after another, so none is held out of the collecting."""
    beside, more, with_kernels = (read_config(ROOT / "recipes" / "h200" / f"{name}.yaml", CollectorConfig)
                                  for name in ("beside", "beside_more", "collector_under_load"))
    assert beside.stress.backgrounds == with_kernels.stress.backgrounds
    assert {background.kind for background in (*beside.stress.backgrounds, *more.stress.backgrounds)} == set(BACKGROUND_KINDS)
    assert not {background.name for background in beside.stress.backgrounds} & set(more.backgrounds_on("cuda"))
    assert {background.queue for background in beside.stress.backgrounds} == set(BACKGROUND_QUEUES)
    assert {level for level, _ in beside.loads()} == {level for level, _ in with_kernels.loads()} == {0.0, 0.25, 0.5, 1.0}
    assert {level for level, _ in more.loads()} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert beside.kernel_levels == more.kernel_levels == ()
    assert with_kernels.kernel_levels is None
    assert beside.held_out_backgrounds == more.held_out_backgrounds == with_kernels.held_out_backgrounds == ()
    with pytest.raises(UserError, match="compute_deep: queue deep: only a GPU"):
        with_kernels.backgrounds_on("cpu")


def test_the_shipped_config_is_the_plans() -> None:
    config = read_config(ROOT / "benchmark" / "config.yaml", CollectorConfig)
    assert config.levels == (0.0, 0.3, 0.6, 0.9)
    assert config.held_out == ()
    assert config.stress.backgrounds == (COMPUTE,)
    assert config.held_out_backgrounds == ()
