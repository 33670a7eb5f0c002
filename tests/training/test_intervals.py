"""Held-out collections, and intervals calibrated on them: they have the stated coverage, and widen with their sources."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from conftest import small_model
from forgotten_types import forget
from made_up_dataset import TARGET, conv, gemm, write_workspace

from hase.graph_model.simulation.pipeline import OffGpu
from hase.inference import predict
from hase.inference.prediction.targets import fitted_for
from hase.learned.composition.host_side import NodesOffGpu
from hase.learned.composition.intervals import ALWAYS, KNOWN, CalibratedInterval, Novelty, Sources, for_any_host, sources
from hase.records.dataset_files import header_path, read_header
from hase.records.measurement import GPU_LABEL, LAUNCHES
from hase.training.composition.calibration import (
    LEAST_FAMILIES,
    HeldOutCase,
    calibrate,
    fitted_to,
    interval_score,
    intervals_held_out,
)
from hase.training.composition.held_out import Fold, HeldOut, folds_of, novelties_of
from hase.training.composition.measured_models import MeasuredModel
from hase.training.kernels.training_set import read_training_set
from hase.utils import files
from hase.utils.paths import Workspace

COLLECTION_OF = {"anet": "timm", "bnet": "transformers", "cnet": "transformers", "secretnet": "timm"}
H200 = "nvidia-h200-cuda-ort1.31-all"


def made_up_cases(collections: int, families: int, each: int, seed: int = 0) -> list[HeldOutCase]:
    """Errors of a known size: 2 %, and more where unmeasured operators have a larger share of the latency."""
    draw = np.random.default_rng(seed)
    cases = []
    for collection in range(collections):
        for family in range(families):
            common = draw.normal(0, 0.01)
            for _ in range(each):
                share = float(draw.choice([0.0, 0.0, 0.3, 0.6]))
                error = common + draw.laplace(0, math.hypot(0.02, 0.4 * share))
                cases.append(HeldOutCase(str(collection), f"{collection} {family}", Sources(1 - share, share), error))
    return cases


def calibrated(cases: list[HeldOutCase]) -> CalibratedInterval:
    interval = calibrate(cases)
    assert interval is not None
    return interval


@pytest.mark.slow
def test_intervals_of_a_new_collection_cover_nine_of_ten() -> None:
    """For all sources alike, since intervals with unmeasured operators are wider."""
    cases = made_up_cases(4, 15, 12)
    ends = intervals_held_out(cases)
    inside = np.array([low <= math.exp(case.error) <= high for (low, high), case in zip(ends, cases, strict=True)])
    width = np.array([math.log(high / low) for low, high in ends])
    share = np.array([case.sources.unmeasured for case in cases])
    for part in (share == 0, share > 0, share == 0.6):
        assert 0.84 < inside[part].mean() < 0.96
    assert width[share == 0.6].min() > 4 * width[share == 0].max()
    interval = calibrated(cases)
    assert interval.coverage == pytest.approx(inside.mean())  # all families have equally many models
    assert (interval.left_out, interval.families) == ("collection", 60)
    assert interval.reach["unmeasured"] == pytest.approx(0.4, rel=0.25)
    assert calibrated(made_up_cases(1, 30, 10)).left_out == "family"  # there is one collection
    assert calibrate(made_up_cases(1, LEAST_FAMILIES - 1, 10)) is None


def laplace_cases(families: int, models: int, spread: float) -> list[HeldOutCase]:
    """Predictions of which nothing but their errors is made up."""
    generator = np.random.default_rng(0)
    return [HeldOutCase("", f"f{family}", Sources(predicted=1.0), float(generator.laplace(0.0, spread)))
            for family in range(families) for _ in range(models)]


@pytest.mark.slow
def test_an_interval_is_fitted_to_models_of_another_sort() -> None:
    """It holds nine of ten of their errors, however large these are, and reaches as far to both sides."""
    interval, ends = calibrated(laplace_cases(40, 25, 0.1)), []
    for spread in (0.05, 0.2):
        of_others = fitted_to(interval, laplace_cases(200, 10, spread))
        assert of_others is not None
        assert (0.86 < of_others.coverage < 0.94, of_others.low, of_others.holds_paces) == (True, -of_others.high, True)
        ends.append(math.log(of_others.ends(Sources(predicted=1.0))[1]))
    assert ends == pytest.approx([0.05 * math.log(10), 0.2 * math.log(10)], rel=0.08)  # of a Laplace distribution
    assert fitted_to(interval, laplace_cases(1, 50, 0.1)) is None


def test_scores_paces_and_sources_by_hand() -> None:
    ends = [(math.exp(-0.1), math.exp(0.2)), (math.exp(-0.2), math.exp(0.4)), (math.exp(-0.1), math.exp(0.2))]
    assert interval_score(ends, np.exp([0.1, 0.1, 0.25])).tolist() == pytest.approx([0.3, 0.6, 0.3 + 20 * 0.05])
    low, high = for_any_host((math.exp(-0.3), math.exp(0.3)), math.exp(-0.4), 1.0, math.exp(0.4))  # widens in quadrature
    assert (math.log(low), math.log(high)) == pytest.approx((-0.5, 0.5))
    assert for_any_host((0.9, 1.2), 1.0, 1.0, 1.0) == pytest.approx((0.9, 1.2))  # the host does not matter
    # the GPU works for 8 of 10 ms: 2 of them measured, 1 known, 2 of unmeasured operators, 3 four times beyond the data
    kernels = [("a", 2.0, None), ("b", 1.0, KNOWN), ("c", 2.0, Novelty("unmeasured")), ("d", 3.0, Novelty("beyond", 4.0))]
    assert sources(kernels, 10.0, 6.0, 2.0) == pytest.approx(Sources(
        predicted=0.4, unmeasured=0.2, other_form=0.0, beyond=0.3 * math.log(4), host=0.36, pace=0.36 * math.log(2)))
    assert sources([("a", 1.0, KNOWN)], 0.5, 0.0) == pytest.approx(Sources(predicted=1.0))  # never more than the whole latency
    assert sources([], 1.0, 1.0) == Sources(host=1.0)


def test_a_fold_leaves_out_all_kernels_of_its_collection(workspace: Workspace) -> None:
    """Also those of its models that were not measured as a whole, and those sampled near its families."""
    records = write_workspace(workspace, families=tuple(COLLECTION_OF), sampled=40)
    folder = workspace.dataset(TARGET.name)
    collections = {name: COLLECTION_OF[record.group] for name, record in records.items()}
    files.write_json(header_path(folder), read_header(folder).model_copy(update={
        "groups": {name: record.group for name, record in records.items()}, "collections": collections}))
    rows = read_training_set(workspace, TARGET.name)
    models = [MeasuredModel(record.model_copy(update={"collection": collections[name]}), record.group, 1.0)
              for name, record in records.items() if record.group != "secretnet"]  # not measured
    folds = {min(fold.groups): fold for fold in folds_of(rows, models, [model.collection for model in models], "collection", 5)}
    assert folds.keys() == {"timm", "transformers"}
    for name, fold in folds.items():
        theirs = {kernel for model, record in records.items() if collections[model] == name for kernel in record.kernels}
        assert set(rows.ids[~fold.seen].tolist()) == theirs
        assert fold.seen.any()


def test_novelties_of_a_fold(workspace: Workspace) -> None:
    """An operator and a form that only the held-out models have, a size beyond the data, and a kernel like the others."""
    write_workspace(workspace, sampled=60)
    rows = read_training_set(workspace, TARGET.name)
    far, usual = conv(side=32 * 64), conv()
    fold = Fold(frozenset({"x"}), (), {kernel.id: kernel for kernel in (far, usual, gemm())}, rows.types != "Gemm")
    novelties = novelties_of(fold, rows, "run")
    assert {name: novelty.kind for name, novelty in novelties.items()} == {far.id: "beyond", gemm().id: "unmeasured"}
    assert novelties[far.id].times > 4
    batched = usual.model_copy(update={"inputs": (usual.inputs[0].model_copy(update={"dtype": "float16"}), *usual.inputs[1:])})
    novelties = novelties_of(Fold(frozenset({"x"}), (), {batched.id: batched}, rows.idle), rows, "run")
    assert novelties[batched.id].kind == "other form"


@pytest.mark.slow
def test_cases_of_held_out_models(workspace: Workspace) -> None:
    """A measured kernel is no source of error, a predicted one is. A model with work on the CPU is no case."""
    records = list(write_workspace(workspace, families=("anet", "bnet", "cnet"), sampled=40).values())
    rows = read_training_set(workspace, TARGET.name)
    models = [MeasuredModel(record, record.group, 0.5 + 0.1 * place) for place, record in enumerate(records)]
    ones = np.ones(len(records[-1].nodes))
    models[-1] = replace(models[-1], off_gpu=NodesOffGpu(ones > 0, ones, ones, OffGpu(ones, ones > 1)))
    times = {record.model: dict.fromkeys(record.kernels, 0.04) for record in records}
    groups = [model.group for model in models]
    times_of_rows = {name: {GPU_LABEL: 0.04, LAUNCHES: 1.0} for name in rows.ids}
    held_out = HeldOut("family", models, groups, replace(rows, times_ms={GPU_LABEL: rows.times_ms["run"]}),
                       folds_of(rows, models, groups, "family", 3), times_of_rows,
                       {GPU_LABEL: times, LAUNCHES: {model: dict.fromkeys(names, 1.0) for model, names in times.items()}})
    predicted, measured = held_out.cases("predicted"), held_out.cases("measured")
    assert [case.family for case in predicted] == groups[:-1]
    for latencies, of, shown in ((held_out.predicted, predicted, True), (held_out.as_measured, measured, False)):
        errors = np.log(held_out.latency_ms / latencies.paced_ms)[:-1]
        assert [case.error for case in of] == pytest.approx(errors.tolist())
        assert all((case.sources.predicted > 0.2) == shown for case in of)
        host_shares = np.minimum(1.0, latencies.host_work_ms / latencies.paced_ms)[:-1]
        assert [case.sources.host for case in of] == pytest.approx((host_shares ** 2).tolist())


@pytest.mark.slow
def test_a_prediction_takes_its_calibrated_interval(tmp_path: Path) -> None:
    """Its ends follow from the reach of its sources. An unknown pace still widens it, and so does a doubtful kernel."""
    used = fitted_for(Workspace(), H200).composition
    wide, narrow = (used.model_copy(update={"calibrated": CalibratedInterval(
        reach={ALWAYS: always}, low=-2.0, high=3.0, left_out="collection", families=50)}) for always in (0.2, 0.02))
    model = onnx.parser.parse_model(  # kernels like many of the dataset
        '<ir_version: 10, opset_import: ["" : 20]> g (float[32,256,56,56] x) => (float[32,256,56,56] y) {'
        "a = Relu(x) b = Add(a, x) c = Relu(b) d = Add(c, b) e = Relu(d) y = Add(e, d)}")
    for composition, always in ((wide, 0.2), (narrow, 0.02)):
        prediction = predict(model, target=H200, composition=composition, host_pace=1.0)
        low, high = (end / prediction.latency_ms for end in prediction.interval_ms)
        assert (math.log(low), math.log(high)) == pytest.approx((-2 * always, 3 * always), rel=0.15)
    unmeasured = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[32,256,56,56] x) => (float[32,256,56,56] y) {'
        "a = Relu(x) y = LRN <size = 5> (a)}")
    forget(Workspace(tmp_path), H200, "LRN")
    doubtful = predict(unmeasured, workspace=tmp_path, target=H200, composition=narrow, host_pace=1.0)
    assert doubtful.estimated_operators == ("LRN",)
    assert doubtful.interval_ms[1] > 1.2 * doubtful.latency_ms
    usual, unknown = (predict(small_model(), target=H200, composition=narrow, host_pace=pace) for pace in (1.0, None))
    assert unknown.interval_ms[1] > 1.2 * usual.interval_ms[1]
