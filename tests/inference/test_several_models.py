"""Several models, and several batches of one: their ranks, and which batch to take."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import onnx
import onnx.parser
import pytest
from command import run_script
from conftest import small_model

from hase.inference import Predictor, check_slo
from hase.inference.compare.choices import best_batch_sentences, best_batches, order_of, order_sentence
from hase.inference.prediction.answers import chance_text, chance_within, chance_word

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a narrow and a wide model at batch 1, and one that takes any batch."""
    folder = tmp_path_factory.mktemp("zoo")
    for name, proto in (("narrow", small_model(8, 32)), ("wide", small_model(128, 64)), ("open", small_model(16, 32, "batch"))):
        onnx.save(proto, folder / f"{name}.onnx")
    return folder


def shell(*options: str | Path) -> subprocess.CompletedProcess[str]:
    return run_script("inference/predict_model_latency.py", "--target", "nvidia-h200", "--host-pace", "1", *options)


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the first table."""
    header, *lines = (line.split("\t") for line in text.split("\n\n")[0].splitlines() if "\t" in line)
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_a_row_for_each_model_the_fastest_first(models: Path) -> None:
    done = shell("--model", models / "wide.onnx", models / "narrow.onnx")
    assert done.returncode == 0, done.stderr
    predictor = Predictor(target="nvidia-h200")
    narrow, wide = (predictor.predict(models / f"{name}.onnx", host_pace=1.0).latency_ms for name in ("narrow", "wide"))
    shown = rows(done.stdout)
    assert [row["model"] for row in shown] == ["narrow", "wide"]
    assert [float(row["latency (ms)"]) for row in shown] == pytest.approx([narrow, wide], rel=1e-3)
    assert f"ranked by latency: narrow is {wide / narrow:.3g} times as fast as wide" in done.stdout


def test_repeated_options_folders_and_patterns_name_the_same_models(models: Path) -> None:
    first, *others = (json.loads(shell(*options, "--dim", "batch=4", "--json").stdout) for options in (
        ("--model", models), ("--model", models / "*.onnx"),
        ("--model", models / "open.onnx", "--model", models / "narrow.onnx", models / "wide.onnx", models / "open.onnx")))
    assert others == [first, first]
    per_item = [answer["latency_ms"] / answer["batch"] for answer in first]
    assert per_item == sorted(per_item)  # batches differ: only one of the models takes another than 1
    assert {answer["model"]: answer["batch"] for answer in first} == {"narrow": 1, "wide": 1, "open@batch=4,dynamic": 4}
    none = shell("--model", models, "--dim", "bacth=2")
    assert (none.returncode, "none of the 3 models has a size named bacth: check --dim" in none.stderr) == (1, True)


def test_the_order_says_whether_it_is_sure(models: Path) -> None:
    predictor = Predictor(target="nvidia-h200")
    narrow, wide = (predictor.predict(models / f"{name}.onnx", host_pace=1.0) for name in ("narrow", "wide"))
    sure = wide.model_copy(update={"latency_ms": 10 * narrow.latency_ms, "interval_ms": (5 * narrow.latency_ms, 20.0)})
    alike = wide.model_copy(update={"latency_ms": 1.01 * narrow.latency_ms, "interval_ms": narrow.interval_ms})
    assert order_sentence([narrow, sure]).endswith("10 times as fast as wide, and their intervals do not overlap")
    assert order_sentence([narrow, alike]).endswith("1.01 times as fast as wide, but their intervals overlap")
    assert order_of([sure, narrow, narrow.model_copy(update={"fits_memory": False})]) == [1, 0, 2]
    assert order_of([narrow, sure.model_copy(update={"batch": 32})]) == [1, 0]


def test_a_model_that_fails_costs_its_row_only(models: Path, tmp_path: Path) -> None:
    """Those of one name show their files."""
    (tmp_path / "text.onnx").write_text("not a model at all")
    shutil.copy2(models / "wide.onnx", tmp_path / "narrow.onnx")
    done = shell("--model", models / "narrow.onnx", tmp_path / "text.onnx", tmp_path / "narrow.onnx", "--quiet")
    assert (done.returncode, "1 of 3 models have no prediction" in done.stderr) == (1, True)
    assert [row["file"] for row in rows(done.stdout)] == [str(models / "narrow.onnx"), str(tmp_path / "narrow.onnx")]
    assert f"{tmp_path / 'text.onnx'}: not an ONNX model" in done.stderr


@pytest.mark.parametrize("options", [("--trace", "t.json"), ("--watch",), ("--measure-missing", "--inputs", "rows.npz")])
def test_options_of_one_model_refuse_several(models: Path, options: tuple[str, ...]) -> None:
    done = shell("--model", models / "narrow.onnx", models / "wide.onnx", *options)
    assert (done.returncode, done.stdout, "--model names 2: " in done.stderr) == (2, "", True), done.stderr


# sizes that go together ----------------------------------------------------------------------------------------------------


def growing(path: Path) -> Path:
    """A model of two sizes, as a decoder with a cache has them: `seq` new rows next to `past` old ones."""
    onnx.save(onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[seq, 256] new, float[past, 256] old) => (float[total, 256] out)'
        " { all = Concat <axis = 0> (old, new) out = Relu(all) }"), path)
    return path


def test_sizes_that_go_together_have_a_row_each(tmp_path: Path) -> None:
    model = growing(tmp_path / "growing.onnx")
    done = shell("--model", model, "--sizes", "seq=1,past=128", "seq=64,past=1024", "--sizes", "past=0,seq=512", "--json")
    assert done.returncode == 0, done.stderr
    sizes = [{"seq": 1, "past": 128}, {"seq": 64, "past": 1024}, {"seq": 512, "past": 0}]
    assert [answer["dims"] for answer in json.loads(done.stdout)] == sizes  # the product of all would have nine rows


@pytest.mark.parametrize(("options", "code", "message"), [
    (("--sizes", "seq=1,past=8", "--dim", "seq=2"), 1, "seq is given by --dim and by --sizes"),
    (("--sizes", "seq=1,seq=2"), 2, "'seq=1,seq=2': write NAME=SIZE,NAME=SIZE"),
    (("--sizes", "seq=1", "seq=2", "--trace", "t.json"), 2, "--trace draws one run"), (("--sizes", "seq=1"), 1, "past")])
def test_sizes_that_can_not_go_together_are_refused(tmp_path: Path, options: tuple[str, ...], code: int, message: str) -> None:
    done = shell("--model", growing(tmp_path / "growing.onnx"), *options, "--quiet")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
    assert message in done.stderr


# the best batch ------------------------------------------------------------------------------------------------------------


def test_a_chance_follows_from_the_interval() -> None:
    """Half of what is likely is below the prediction, and a twentieth is beyond each end, however far that end is."""
    interval = (8.0, 20.0)
    assert [chance_within(10.0, interval, limit) for limit in (8.0, 10.0, 20.0)] == pytest.approx([0.05, 0.5, 0.95])
    assert chance_within(10.0, interval, 15.0) == pytest.approx(0.8321, abs=1e-3)  # 1.645 · ln 1.5 / ln 2 deviations
    assert chance_within(10.0, (10.0, 12.0), 9.0) == 0.0  # nothing is likely below
    assert [chance_word(chance) for chance in (0.1, 0.2, 0.5, 0.9)] == ["very unlikely", "unlikely", "about even", "likely"]
    assert [chance_text(chance) for chance in (0.999, 0.8)] == ["very likely (over 99 %)", "likely (80 %)"]


def test_the_best_batches_stand_below_the_table(models: Path) -> None:
    options = ("--model", models / "open.onnx", "--dim", "batch=1,4,16,64")
    plain = json.loads(shell(*options, "--json").stdout)
    assert [answer["best_for"] for answer in plain] == [[], [], [], ["throughput"]]  # rates grow with the batch
    limit_ms = 1.001 * plain[2]["latency_ms"]
    done = shell(*options, "--slo-ms", str(limit_ms), "--json")
    answers = json.loads(done.stdout)
    assert (done.returncode, [answer["slo"]["met"] for answer in answers]) == (4, [True, True, True, False])
    assert answers[2]["slo"]["chance_in_words"] == "about even"
    assert answers[1]["slo"]["chance"] == pytest.approx(
        chance_within(answers[1]["latency_ms"], tuple(answers[1]["interval_ms"]), limit_ms))
    assert answers[2]["best_for"] == ["throughput_within_slo"]
    text = shell(*options, "--slo-ms", str(limit_ms)).stdout
    assert "\nopen: the best batch for throughput is 64: " in text
    assert f"\nopen: the best batch for throughput within {limit_ms:g} ms is 16: " in text


def test_a_batch_that_does_not_fit_or_is_unsure_is_not_the_best(models: Path) -> None:
    made = Predictor(target="nvidia-h200").predict(models / "open.onnx", dims={"batch": 1}, host_pace=1.0)
    ones = [made.model_copy(update={
        "batch": batch, "dims": {"batch": batch, "seq": 7}, "latency_ms": latency, "fits_memory": batch < 8,
        "interval_ms": (0.9 * latency, 1.2 * latency), "items_per_second": 1000 * batch / latency})
        for batch, latency in ((1, 4.0), (2, 5.0), (4, 9.8), (8, 10.0))]
    slos, missed = ([check_slo(one, limit_ms) for one in ones] for limit_ms in (10.0, 3.9))
    (best,) = best_batches(ones, slos, ["net"] * 4)
    assert (best.indices, best.others) == ((0, 1, 2, 3), {"seq": 7})
    assert (ones[best.throughput].batch, best.within_slo, best.surely_within_slo) == (4, 2, 1)  # 408, 408 and 400 items/s
    assert best_batch_sentences(best, ones, slos, "net")[1] == (
        f"net: the best batch for throughput within 10 ms is 4: 408.2 items/s, median 9.8 ms; that it is met is "
        f"{chance_text(slos[2].chance)}; of batch 2 it is very likely (over 99 %), with 400 items/s")
    (none,) = best_batches(ones, missed, ["net"] * 4)
    assert "net: no batch keeps to 3.9 ms; the nearest is 1, median 4 ms" in best_batch_sentences(none, ones, missed, "net")[1]
