"""Advice on sharing a GPU: real predictions for an H200 with made-up sharing, and ways with made-up times."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import yaml
from command import printed, run_script

from hase.benchmark.serving.sets import BATCH, ServedModel
from hase.inference.library.predictor import Predictor
from hase.inference.prediction.conditions import HostPace
from hase.inference.prediction.run import PredictedRun
from hase.inference.prediction.uncertainty import CERTAIN, Span
from hase.inference.prediction.under_load import NotShared, UnderLoad
from hase.inference.reporting.comparisons import share_chart
from hase.inference.sharing.advice import SharingAdvice, advice_rows, advice_verdict, advise_sharing
from hase.inference.sharing.shared_models import Pair
from hase.inference.sharing.ways import MIG, MPS, MPS_SHARES, NotThroughMps, WayTimes
from hase.learned import target_files
from hase.learned.sharing import Sharing
from hase.records.host_pace import MachinePace
from hase.utils import files
from hase.utils.cli import EXIT_SLO_MISSED
from hase.utils.errors import UserError
from hase.utils.fingerprint import machine
from hase.utils.paths import SHIPPED, Workspace
from hase.utils.sharing_mode import SLICES, THREADS, SetSharing, share_of_this_process

pytestmark = pytest.mark.slow

TARGET = "nvidia-h200-cuda-ort1.31-all"
SHARING = Sharing(slice_ms=2.0, alone_ms={"tiny": 0.016, "long": 0.5}, waits_ms=(0.3, 0.7, 2.4), cycle_ms=20.0,
                  longest_wait_ms=2.42, switch_ms=0.26)
SCRIPT, PAIR = "inference/sharing_advice.py", "inference/pair_latency.py"
NET = "resnet18.onnx"


class MadeUp:
    """A way with made-up times: what a run takes with each share, and how many times longer beside so many others."""

    def __init__(self, alone_ms: Mapping[int, float], slowdown: Callable[[int], float], *choices: SetSharing) -> None:
        self._alone_ms, self._slowdown, self._choices = alone_ms, slowdown, choices

    def choices(self, models: int) -> list[SetSharing]:
        return [choice for choice in self._choices if choice.fits(models)]

    def alone_ms(self, model: PredictedRun, percent: int) -> float:
        return self._alone_ms[percent]

    def beside(self, model: PredictedRun, percent: int, others: Sequence[tuple[PredictedRun, int]]) -> tuple[float, UnderLoad]:
        alone_ms = self.alone_ms(model, percent)
        return alone_ms, UnderLoad.from_runs(np.array([alone_ms * self._slowdown(len(others))]), 1.0, "prediction")

    def span(self, model: PredictedRun, percent: int, alone_ms: float) -> Span:
        return CERTAIN


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, torch_models: dict[str, Path]) -> Workspace:
    """The predictors that ship for an H200 with made-up sharing, and a model with a dynamic batch."""
    made = Workspace(tmp_path_factory.mktemp("advice"))
    shutil.copytree(SHIPPED / TARGET, made.predictors(TARGET), ignore=shutil.ignore_patterns("mps*", "serving*"))
    files.write_json(target_files.SHARING.path(made.predictors(TARGET)), SHARING)
    made.models.mkdir(parents=True)
    dynamic = onnx.load(torch_models["resnet18"])
    del dynamic.graph.value_info[:]  # they state the batch
    for value in (dynamic.graph.input[0], dynamic.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    onnx.save(dynamic, made.models / NET)
    return made


@pytest.fixture
def predictor(workspace: Workspace) -> Predictor:
    return Predictor(workspace, TARGET)


@contextmanager
def shipped_too(workspace: Workspace, what: str) -> Iterator[Predictor]:
    """With what was learned of something else for the H200, as files whose names begin so."""
    added = [Path(shutil.copy(path, workspace.predictors(TARGET))) for path in (SHIPPED / TARGET).glob(f"{what}*")]
    try:
        yield Predictor(workspace, TARGET)
    finally:
        for path in added:
            path.unlink()


@pytest.fixture
def through_mps(workspace: Workspace) -> Iterator[Predictor]:
    with shipped_too(workspace, "mps") as predictor:
        yield predictor


def net(rate_per_s: float, slo_ms: float) -> ServedModel:
    return ServedModel(model=Path(NET), batch=1, rate_per_s=rate_per_s, slo_ms=slo_ms)


def with_ways(monkeypatch: pytest.MonkeyPatch, ways: Mapping[str, WayTimes | None]) -> None:
    monkeypatch.setattr("hase.inference.sharing.advice.ways_of", lambda fitted: dict(ways))


def test_a_model_alone(predictor: Predictor) -> None:
    """Its requests wait for nothing but each other."""
    advice = advise_sharing(predictor, [net(100.0, 5.0)], [[1]])
    only, = advice.ways[0].models
    assert (only.alone_ms, only.run_ms) == pytest.approx((predictor.run(NET, dims={"batch": 1}).alone_ms,) * 2)
    assert only.headroom == 1.0 - (only.p95_ms or math.nan) / 5.0
    low_ms, high_ms = only.between_ms
    assert (low_ms or math.nan) < (only.p95_ms or math.nan) < (high_ms or math.nan)
    assert (advice.advised, advice.meets, only.percent) == (SLICES, True, None)
    assert advice.not_learned == (MPS, MPS_SHARES, MIG)


def test_on_a_host_that_serves(workspace: Workspace, predictor: Predictor) -> None:
    """Its pace changes from run to run. One that stalls often makes an answer a rough estimate."""
    steady = advise_sharing(predictor, [net(20.0, 5.0)], [[1]]).ways[0].models[0]
    with shipped_too(workspace, "serving") as serving:
        for per_s, rough in ((0.5, False), (9.0, True)):
            pace = MachinePace(probe_us=300.0, spread=0.1, readings=10, stalls_per_s=per_s, stalls_ms=(8.0,),
                               taken=datetime.now(UTC), boot_id="", device="cuda", machine=machine("cpu"))
            advice = advise_sharing(serving, [net(20.0, 5.0)], [[1]], host_pace=HostPace(1.0, "given", pace))
            (only,) = advice.ways[0].models
            assert only.run_ms > 1.05 * only.alone_ms
            assert (only.p95_ms or 0.0) > 1.2 * (only.p50_ms or math.inf) > 1.2 * steady.run_ms
            assert only.rough_estimate == rough == any("the host stalls 9 times a second" in line for line in advice.warnings)


def test_two_models_through_mps(through_mps: Predictor) -> None:
    """The host takes a little longer through MPS. With half of the threads, kernels take longer, and overlap less."""
    size = {"batch": 16}
    pairs = {sharing: through_mps.pair(NET, NET, dims=size, second_dims=size, sharing=SetSharing.parse(sharing))
             for sharing in ("mps", "mps:50", "mps:25/75")}
    alone_ms = through_mps.run(NET, dims=size).alone_ms
    whole, half, uneven = (pair.models[0] for pair in pairs.values())
    assert alone_ms < whole.idle_ms < 1.05 * alone_ms < half.idle_ms < uneven.idle_ms
    assert 1.3 < whole.under_load.mean_ms / whole.idle_ms < 2.1  # they wait for each other's kernels
    assert 1.0 < half.under_load.mean_ms / half.idle_ms < whole.under_load.mean_ms / whole.idle_ms
    assert all(any("learned on nvidia-h100-80gb-hbm3-cuda-ort1.31-all, and not on" in line for line in pair.warnings)
               for pair in pairs.values())


def test_two_models_over_their_shares(through_mps: Predictor, tmp_path: Path) -> None:
    """The more of the threads, the faster; the plot holds both models, and the first in time slices."""
    plot, ways = tmp_path / "shares.svg", "slices,mps:75/25,mps:25/75"
    done = printed(PAIR, "--workspace", through_mps.workspace.root, "--target", TARGET, "--model", NET, "--beside-model", NET,
                   "--dim", "batch=16", "--beside-dim", "batch=4", "--sharing", ways, "--plot", plot, "--json")
    pairs = [Pair.model_validate(pair) for pair in json.loads(done)]
    assert [pair.sharing for pair in pairs] == ways.split(",")
    slices, much, little = (pair.models[0].under_load.mean_ms for pair in pairs)
    assert much < little
    assert pairs[1].models[1].under_load.mean_ms > pairs[2].models[1].under_load.mean_ms
    chart = share_chart(pairs)
    assert (list(chart.series[0].x), list(chart.series[0].y)) == ([25.0, 75.0], [little, much])
    assert [limit.y for limit in chart.limits] == [slices]
    assert plot.read_text().startswith("<svg")


@pytest.mark.parametrize(("options", "complaint"), [
    (("--sharing", "mig"), "is no way of sharing a GPU"),
    (("--sharing", "mps:50,mps", "--plot", "a.svg"), "at least two ways with a share for each model")])
def test_options_that_do_not_fit(options: tuple[str, ...], complaint: str) -> None:
    done = run_script(PAIR, "--model", NET, "--beside-model", NET, *options)
    assert (done.returncode, complaint in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("share", ["half", "0", "101"])
def test_a_share_that_is_none(monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    monkeypatch.setenv(THREADS, share)
    with pytest.raises(UserError, match=f"{THREADS}={share}: a share of the GPU's threads is a percentage up to 100"):
        share_of_this_process()


def test_the_advice_knows_mps_and_instances(through_mps: Predictor) -> None:
    """Instances were never measured, so they come last, and are marked."""
    advice = advise_sharing(through_mps, [net(100.0, 20.0), net(50.0, 20.0)], [[4], [1]])
    assert {way.way for way in advice.ways} == {SLICES, MPS, MPS_SHARES, MIG}
    shares = next(way for way in advice.ways if way.way == MPS_SHARES)
    assert sum(model.percent or 0 for model in shares.models) == 100
    last = advice.ways[-1]
    assert (last.way, {model.percent for model in last.models}) == (MIG, {57, 43})
    assert all(model.rough_estimate for model in last.models)
    assert [row["note"] for row in advice_rows(advice)][-2:] == ["never measured"] * 2
    assert any("instances (MIG) were never measured" in warning for warning in advice.warnings)
    for model in last.models:  # nobody else is in its instance
        assert model.run_ms == pytest.approx(model.alone_ms, rel=0.2)  # the pace of a host that serves changes it


def test_the_batch_that_keeps_up_is_chosen(predictor: Predictor) -> None:
    advice, single = (advise_sharing(predictor, [net(3000.0, 10.0)], [batches]) for batches in ([1, 2, 4, 8, 16], [1]))
    only, alone = advice.ways[0].models[0], single.ways[0].models[0]
    assert (advice.meets, only.stable, single.meets, alone.stable) == (True, True, False, False)
    assert (alone.latency_ms, single.ways[0].headroom) == (None, None)
    assert "gets more than it can serve" in advice_verdict(single)


def test_the_way_with_the_most_headroom_wins(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that help the model with the tighter objective, whose runs take longer with less of the GPU. That this GPU is
    shared through MPS now does not matter."""
    monkeypatch.setattr("hase.inference.prediction.under_load.is_here", lambda target: True)
    monkeypatch.setattr("hase.inference.prediction.under_load.sharing_mode", lambda: "mps")
    halves, uneven = SetSharing(True, (50,)), SetSharing(True, (75, 25))
    with_ways(monkeypatch, {
        SLICES: MadeUp({100: 2.0}, lambda _: 3.0, SetSharing()), MPS: None,
        MPS_SHARES: MadeUp({25: 4.0, 50: 3.0, 75: 2.0}, lambda _: 1.0, halves, uneven)})
    advice = advise_sharing(predictor, [net(100.0, 5.0), net(20.0, 20.0)], [[1], [1]])
    assert [way.sharing for way in advice.ways] == ["mps:75/25", SLICES]
    first, second = advice.ways
    assert [model.percent for model in first.models] == [75, 25]
    assert [model.run_ms for model in first.models] == pytest.approx([2.0, 4.0])
    assert first.headroom == min(1.0 - (model.p95_ms or math.inf) / model.slo_ms for model in first.models)
    assert (second.headroom or 0.0) < (first.headroom or 0.0)
    assert advice.not_learned == (MPS,)


def test_what_is_refused(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    for sharing, error, message in (
            ("mps:50", NotThroughMps, "nothing was learned of how it is shared through MPS"),
            ("mps:25/25/50", UserError, "two models share the GPU, and there are 3 shares")):
        with pytest.raises(error, match=message):
            predictor.pair(NET, NET, dims={"batch": 1}, second_dims={"batch": 1}, sharing=SetSharing.parse(sharing))
    with pytest.raises(UserError, match="5 models: advice is for 4 at most"):
        advise_sharing(predictor, [net(1.0, 1.0)] * 5, [[1]] * 5)
    with_ways(monkeypatch, {SLICES: None, MPS: None})
    with pytest.raises(NotShared, match="nothing was learned of how it is shared"):
        advise_sharing(predictor, [net(1.0, 1.0)], [[1]])


def test_the_command(workspace: Workspace, tmp_path: Path) -> None:
    options = (SCRIPT, "--workspace", workspace.root, "--target", TARGET)
    models = ("--model", NET, "--rate", "200", "--slo-ms", "9", "--model", NET, "--rate", "50", "--slo-ms", "20")
    advice = SharingAdvice.model_validate_json(printed(*options, *models, "--batch", "1,4", "--json"))
    path = tmp_path / "set.yaml"
    path.write_text(yaml.safe_dump({"models": [
        {"model": NET, "batch": model.batch, "rate_per_s": rate, "slo_ms": slo}
        for model, rate, slo in zip(advice.ways[0].models, (200.0, 50.0), (9.0, 20.0), strict=True)]}))
    table = printed(*options, "--set", path).splitlines()
    assert [line.split("\t")[:2] for line in table[1:3]] == [[SLICES, "resnet18"]] * 2
    assert all(line.endswith("not learned for this target") for line in table[3:6])
    assert table[6] == advice_verdict(advice)
    assert table[6].startswith("slices meets all objectives, with ")
    missed = run_script(*options, "--model", NET, "--rate", "10", "--slo-ms", "0.5")
    assert missed.returncode == EXIT_SLO_MISSED
    assert "No way that was measured meets all objectives. slices comes closest: resnet18 at batch " in missed.stdout


def test_a_model_of_open_length(tmp_path: Path) -> None:
    """Its length is given by --dim; the other model does not have it."""
    for name, shape in (("tokens", "batch, seq, 64"), ("image", "batch, 64")):
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g (float[{shape}] x) => (float[{shape}] y) '
                                        "{ y = Sigmoid(x) }")
        onnx.save(model, tmp_path / f"{name}.onnx")
    models = [text for name in ("tokens", "image")
              for text in ("--model", tmp_path / f"{name}.onnx", "--rate", 10, "--slo-ms", 50)]
    advice = json.loads(printed(SCRIPT, *models, "--dim", "seq=128", "--on", "h200", "--host-pace", 1, "--json"))
    assert {model["model"] for model in advice["ways"][0]["models"]} == {"tokens", "image"}
    assert "has a size named sqe" in run_script(SCRIPT, *models, "--dim", "sqe=128", "--on", "h200").stderr
