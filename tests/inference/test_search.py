"""Searches: the best candidates and the front are those that one finds by looking at all; an interrupted search goes on; spaces
of all kinds, and records that are built without exporting a model."""

from __future__ import annotations

import csv
import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pandas
import pytest
import torch
import torchvision
from command import run_script
from optional_packages import needs
from trained_workspace import conv_net

from hase.inference import Predictor
from hase.inference.prediction.answers import chance_within
from hase.inference.search import evaluating, ofa, searching
from hase.inference.search.evaluating import SearchCandidate, SearchLimits, SearchQuestion, read_scores, table_score
from hase.inference.search.searching import Best, Front, hypervolume, search
from hase.inference.search.spaces import space_of
from hase.records.kernel_record import ModelRecord
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.paths import ROOT, Workspace

CUDA = Flavour(device="cuda", runtime_version="1.31")
H200 = "nvidia-h200"
SMALL = 4  # candidates of a batch
MY_SPACE = """
from hase.inference.search import ofa

def choices():
    yield from range(12)

def make(choice, flavour):
    if choice == 7:
        raise ValueError("seven has no network")
    return ofa.make(list(ofa.choices(12))[choice], flavour)

def score(choice):
    return -abs(choice - 3)
"""


def question(space: str = "ofa", count: int | None = 10, **others: Any) -> SearchQuestion:
    """A question for an H200, without limits unless `others` sets `limits`."""
    return SearchQuestion(ROOT, H200, space, count, 0, SearchLimits(), energy=False, score=None, host_pace=1.0,
                          force=False)._replace(**others)


def table_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as table:
        return list(csv.DictReader(table))


@pytest.fixture
def small_batches() -> Iterator[None]:
    with mock.patch.object(searching, "BATCH", SMALL):
        yield


def test_a_network_is_told_by_its_name() -> None:
    assert [ofa.network_named(name).name for name in ofa.choices(50)] == list(ofa.choices(50))
    assert list(ofa.choices(3)) == list(ofa.choices(5))[:3] != list(ofa.choices(3, seed=1))
    for wrong in ("resnet18", "ofa_r224_w1.1_33.33_33.33_33.33_33.33_33.33", "ofa_r224_w1.0_33.33_33.33_33.33_33.33_33.38"):
        with pytest.raises(UserError, match="no network of this space"):
            ofa.network_named(wrong)
    with pytest.raises(UserError, match="on a GPU"):
        ofa.make(next(ofa.choices(1)), Flavour(device="cpu", runtime_version="1.31"))


def exported(name: str) -> onnx.ModelProto:
    """A network of the space as torchvision builds it and torch exports it, for one image; its biases are no zeros."""
    choice, mobilenet = ofa.network_named(name), torchvision.models.mobilenetv3
    before, *widths = ofa.layer_channels(choice.width)
    blocks = [mobilenet.InvertedResidualConfig(before, 3, before, before, False, "RE", 1, 1, 1.0)]
    for stage, channels, of_stage in zip(ofa.STAGES, widths, choice.stages, strict=True):
        for index, block in enumerate(of_stage):
            blocks.append(mobilenet.InvertedResidualConfig(
                before, block.window, ofa.rounded_channels(block.expansion * before), channels, stage.squeeze_excitation,
                {"Relu": "RE", "HardSwish": "HS"}[stage.activation], stage.stride if index == 0 else 1, 1, 1.0))
            before = channels
    torch.manual_seed(0)
    network = mobilenet.MobileNetV3(blocks, ofa.FEATURES, ofa.CLASSES).eval()
    with torch.no_grad():
        for parameter, values in network.named_parameters():
            if parameter.endswith("bias"):
                values.normal_(std=0.1)
    program = torch.onnx.export(network, (torch.zeros(1, 3, choice.side, choice.side),), dynamo=True, external_data=False,
                                verbose=False, input_names=["input"], output_names=["output"])
    torch._dynamo.reset()  # its caches hold every model traced
    assert program is not None
    return program.model_proto


def nodes_and_sources(record: ModelRecord) -> list[tuple[str, str, tuple[int, ...]]]:
    """Each node's kernel, its provider, and the indices of the nodes whose outputs it reads (-1: the model's input)."""
    maker = {name: index for index, node in enumerate(record.nodes) for name in node.outputs} | dict.fromkeys(record.inputs, -1)
    return [(node.kernel_id, node.provider, tuple(maker[name] for name in node.inputs if name in maker))
            for node in record.nodes]


@pytest.mark.slow
def test_a_record_that_is_built_is_that_of_the_exported_network() -> None:
    predictor, name = Predictor(target=H200), "ofa_r208_w1.2_36.74_54.36_73.33_33.36.54.76_34.34"
    built, of_file = ofa.make(name, predictor.fitted.target.flavour), predictor.record(exported(name))
    assert nodes_and_sources(built) == nodes_and_sources(of_file)
    assert (built.kernels, built.weight_bytes) == (of_file.kernels, of_file.weight_bytes)
    first, second = predictor.predict_briefly([built, of_file], energy=True, memory=True)
    assert first[1:] == second[1:]


def test_the_best_and_the_front_are_those_of_all() -> None:
    draw = random.Random(0)
    candidates = [SearchCandidate(str(number), latency_ms=draw.choice((1.0, 2.0, draw.random())), score=draw.choice((
        0.5, draw.random())), chance=draw.random()) for number in range(300)] + [SearchCandidate("broken", error="no model")]
    best, front = Best(7, 0.3), Front(0.3)
    for candidate in candidates:
        best.add(candidate)
        front.add(candidate)
    kept = [one for one in candidates if one.chance is not None and one.chance >= 0.3]
    assert best.candidates == sorted(kept, key=lambda one: (-(one.score or 0), one.latency_ms or 0))[:7]
    points = {(one.latency_ms, one.score) for one in kept if not any(
        (other.latency_ms or 0) <= (one.latency_ms or 0) and (other.score or 0) >= (one.score or 0)
        and (other.latency_ms, other.score) != (one.latency_ms, one.score) for other in kept)}
    assert [(one.latency_ms, one.score) for one in front.candidates] == sorted(points)
    assert hypervolume([(1.0, 2.0), (2.0, 3.0), (1.5, 1.0), (9.0, 9.0)], 4.0) == 2.0 * 3.0 + 1.0 * 2.0


@pytest.mark.slow
def test_candidates_have_the_numbers_of_predictions_and_the_chance_to_keep_to_limits() -> None:
    limits = SearchLimits(latency_ms=1.4, memory_mib=213.0, energy_j=0.2, least_chance=0.2)
    found, admitted = search(question(count=40, limits=limits), top=40), []
    for answer in Predictor(target=H200).predict_briefly([ofa.make(name, CUDA) for name in ofa.choices(40)], energy=True,
                                                         memory=True, host_pace=1.0):
        assert answer.energy is not None
        chance = chance_within(answer.latency_ms, answer.interval_ms, 1.4) * chance_within(
            answer.energy.energy_j, answer.energy.interval_j, 0.2)
        if chance >= 0.2 and (answer.peak_memory_mib or 0.0) <= 213.0:
            admitted.append((answer.model, answer.latency_ms, *answer.interval_ms, answer.energy.energy_j,
                             answer.peak_memory_mib, chance))
    assert 3 < len(admitted) == found.admitted < found.searched == 40
    for one, (name, *numbers) in zip(sorted(found.best), sorted(admitted), strict=True):
        assert one.model == name
        assert [one.latency_ms, one.latency_low_ms, one.latency_high_ms, one.energy_j, one.peak_memory_mib,
                one.chance] == pytest.approx(numbers)
    record = ofa.make(found.best[0].model, CUDA)
    assert found.best[0].gflop == found.best[0].score == sum(record.kernel_of(node).flops for node in record.nodes) / 1e9


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    asked, out, whole = question(limits=SearchLimits(latency_ms=1.2)), tmp_path / "found.csv", tmp_path / "whole.csv"
    before, calls = search(asked, 3, whole), itertools.count()

    def interrupted(*arguments: Any) -> list[SearchCandidate]:
        """Ctrl-C in the third batch."""
        if next(calls) == 2:
            raise KeyboardInterrupt
        return evaluating.evaluate_choices(*arguments)

    with mock.patch.object(searching, "evaluate_choices", interrupted), pytest.raises(KeyboardInterrupt):
        search(asked, 3, out)
    assert not out.exists()
    with pytest.raises(UserError, match="another search"):
        search(asked._replace(seed=1), 3, out)
    part = tmp_path / "found.csv.part"
    with part.open("a") as lines:
        lines.write('{"candidates": [["cut short by a ki')
    with mock.patch.object(searching, "evaluate_choices", wraps=evaluating.evaluate_choices) as counted:
        after = search(asked, 3, out)
    assert counted.call_count == 1  # the third batch of the ten
    assert (after, out.read_text()) == (before, whole.read_text())
    assert not part.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_what_was_found_is_not_trusted_blindly(tmp_path: Path) -> None:
    asked, out = question(), tmp_path / "found.csv"
    part = searching.PartFile(out, asked)
    part.begin()
    part.add([SearchCandidate("another network", chance=1.0, score=1.0, latency_ms=1.0)])
    with pytest.raises(UserError, match="gives other candidates now"):
        search(asked, 3, out)
    part.path.write_text(part.path.read_text().replace("another", "an other"))
    with pytest.raises(UserError, match=r"found.csv.part, line 2: damaged"):
        search(asked, 3, out)
    part.path.write_text('{"version": 1, "search": {"spa')
    assert search(asked, 3, out).searched == 10


def test_a_table_has_a_row_per_candidate(tmp_path: Path) -> None:
    asked = question(limits=SearchLimits(latency_ms=1.2))
    found = search(asked, 3, tmp_path / "found.csv")
    rows = table_of(tmp_path / "found.csv")
    assert [row["model"] for row in rows] == list(ofa.choices(10))
    assert {row["model"] for row in rows if row["rank"]} == {one.model for one in found.best}
    assert {row["model"] for row in rows if row["front"] == "True"} == {one.model for one in found.front}
    needs("pyarrow", "search")
    search(asked, 3, tmp_path / "found.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "found.parquet"), pandas.read_csv(tmp_path / "found.csv"),
                                      check_dtype=False)


@pytest.mark.slow
def test_a_python_file_is_a_space(tmp_path: Path) -> None:
    space = tmp_path / "mine.py"
    space.write_text(MY_SPACE)
    found = search(question(str(space), None), top=3, out=tmp_path / "found.csv")
    assert [one.model for one in found.best] in (["3", "2", "4"], ["3", "4", "2"])
    assert (found.searched, found.failed, found.first_error) == (12, 1, "7: make failed with ValueError: seven has no network")
    assert table_of(tmp_path / "found.csv")[7]["error"] == found.first_error
    example = search(question(str(ROOT / "recipes/search/spaces/few_blocks.py"), 20), top=1)
    assert example.best[0].score == max(-sum(map(len, ofa.network_named(name).stages)) for name in ofa.choices(20, seed=7))
    space.write_text(MY_SPACE.replace("-abs(choice - 3)", 'float("nan")'))
    assert "is no finite number" in search(question(str(space), 2), top=1).first_error
    for code, message in (("x = 1", "defines no function choices"), ("def choices(:", "its code failed with SyntaxError"),
                          ("def choices():\n    yield 1 / 0", "choices failed with ZeroDivisionError")):
        space.write_text(code)
        with pytest.raises(UserError, match=message):
            search(question(str(space), None), top=1)


def test_scores_of_a_table_make_the_best_and_the_front(tmp_path: Path) -> None:
    """Accuracies that say the opposite of operations; one network has none."""
    asked = question(count=12, limits=SearchLimits(latency_ms=1.5))
    first = search(asked, 12, tmp_path / "first.csv").best
    accuracies = {one.model: 0.7 + 0.01 * place for place, one in enumerate(first)}
    accuracies.pop(lacking := first[1].model)
    table = tmp_path / "accuracies.csv"
    rows = "".join(f"{name},1,{score}\n" for name, score in accuracies.items())
    table.write_text(f"model,weights,score\n{lacking},1,\n{rows}")
    found = search(asked._replace(score=str(table)), 3)
    assert [one.model for one in found.best] == [one.model for one in reversed(first) if one.model != lacking][:3]
    assert [one.score for one in found.best] == [accuracies[one.model] for one in found.best]
    assert found.front[-1].model == found.best[0].model
    assert found.failed == 12 - len(accuracies)
    assert found.first_error.endswith("has no score in accuracies.csv; add a row for it")
    of_files = {"a.onnx": 1.0, "there/a.onnx": 2.0}  # files are found by their names
    assert [table_score(of_files, f"{folder}/a.onnx", "") for folder in ("here", "there")] == [1.0, 2.0]


@pytest.mark.parametrize(("text", "message"), [
    ("model,accuracy\na,1\n", "has no column score; a table of scores has a row per candidate, with the columns"),
    ("model,score\na,good\n", "line 2: the score 'good' is no finite number"), ("model,score\na,nan\n", "no finite number"),
    ("model,score\na,1\na,2\n", "line 3: a has another score above"), ("\x00", "no column")])
def test_a_table_that_holds_no_scores(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "scores.csv"
    table.write_text(text)
    with pytest.raises(UserError, match=message):
        read_scores(table)


@pytest.mark.slow
def test_folders_and_lists_are_spaces(tmp_path: Path) -> None:
    paths = [conv_net(tmp_path / f"{channels}.onnx", channels=channels) for channels in (8, 16, 32)]
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    found = search(question(str(tmp_path), None), top=9)
    assert [one.model for one in found.best] == [str(path) for path in reversed(paths)]
    assert (found.searched, found.failed) == (4, 1)
    assert "broken.onnx" in found.first_error
    (tmp_path / "list.txt").write_text(f"{paths[1]}\n\n{paths[0]}\n")
    assert len(search(question(str(tmp_path / "list.txt"), None), top=9).best) == 2
    (tmp_path / "list.txt").write_text("\n")
    for space, message in ((str(tmp_path / "list.txt"), "names no models"), ("nowhere", "no space to search")):
        with pytest.raises(UserError, match=message):
            space_of(space, Workspace(ROOT))
    with pytest.raises(UserError, match="no score of its own"):
        search(question(score="own"), top=1)


@pytest.mark.slow
def test_the_command_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    """By Ctrl-C, once a batch is kept."""
    out, part, count = tmp_path / "found.csv", tmp_path / "found.csv.part", 1500
    command = [sys.executable, "inference/search_models.py", "--out", str(out),
               *f"--space ofa --target {H200} --latency-ms 1.1 --count {count} --top 5 --processes 2".split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (part.exists() and len(part.read_bytes().splitlines()) > 1):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in errors, out.exists()) == (130, False, False)
    assert "what was searched (with --out) is kept: run again to go on" in errors
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "candidates were searched before; going on from there" in done.stderr
    assert [row["model"] for row in table_of(out)] == list(ofa.choices(count))
    assert len(done.stdout.splitlines()) == 1 + 5


@pytest.mark.parametrize(("options", "code", "message"), [
    ("--space ofa --target nowhere", 1, "nowhere"), ("--space nowhere --target h200", 1, "no space to search"),
    ("--space ofa --chance 2", 2, "not between 0 and 1"), ("--space ofa --score size", 2, "give own, flops, weights or a"),
    ("--space ofa --target h200 --out found.txt", 1, "CSV or Parquet")])
def test_errors_of_the_command(options: str, code: int, message: str) -> None:
    done = run_script("inference/search_models.py", *options.split())
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
