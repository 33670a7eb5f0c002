"""Forms that were left out of training: how far off their kernels are, and what an answer makes of that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_up_dataset import TARGET, conv, draw_kernels, relu, write_dataset

from hase.kernel_model.sampling.cliffs import Cliff, TimedKernel
from hase.kernel_model.sampling.free_shapes.forms import inferred
from hase.kernel_model.sampling.free_shapes.sizes import tensor
from hase.learned.kernels.interface import ForestSettings, TrainingConfig, XgboostSettings
from hase.learned.kernels.uncertainty import DEFAULT_RANGES, OTHER_FORM_OF, Uncertainty
from hase.records.kernel_types import kernel_form
from hase.training.kernels.left_out import LeftOutForm, leave_forms_out, ranges_of
from hase.training.kernels.left_out_tables import cliff_rows, form_error_rows, form_page, form_report, form_rows, never_measured
from hase.training.kernels.training_set import read_training_set
from hase.utils.errors import UserError
from hase.utils.paths import Workspace

CONFIG = TrainingConfig(folds=2, threads=1, own_min_kernels=60, xgboost=XgboostSettings(trees=15, learning_rate=0.2, bins=64),
                        forest=ForestSettings(trees=5))


def left_out(kind: str, form: str, ratios: list[float]) -> LeftOutForm:
    return LeftOutForm(kind, form, "convolution" if kind == "Conv" else "elementwise", np.ones(len(ratios)), np.array(ratios))


def test_each_form_is_left_out_once(tmp_path: Path) -> None:
    kernels = {kernel.id: kernel for kernel in draw_kernels(120)}
    write_dataset(Workspace(tmp_path), kernels, {}, {}, {0.0: 0.0})
    rows = read_training_set(Workspace(tmp_path), TARGET.name)
    forms = leave_forms_out(rows, "run", {"Conv": "Conv"}, CONFIG)
    several = {kernel.type for kernel in kernels.values()
               if len({kernel_form(other) for other in kernels.values() if other.type == kernel.type}) > 1}
    assert {form.type for form in forms} == several
    counts = Counter((kernel.type, kernel_form(kernel)) for kernel in kernels.values() if kernel.type in several)
    assert {(form.type, form.form): len(form.ratios) for form in forms} == counts
    assert all(np.isfinite(form.ratios).all() for form in forms)
    assert len(forms) == len(counts)
    with pytest.raises(UserError, match="has no label gpu"):
        form_report(Workspace(tmp_path), TARGET.name, CONFIG, None, lambda rows, title: None)


def test_the_range_of_a_form_is_learned_from_many() -> None:
    few = ranges_of([left_out("Conv", str(number), [1.0, 9.0]) for number in range(3)], {}, 12)
    assert not few  # the default stays
    many = ranges_of([left_out("Conv", str(number), [0.5, 1.0, 9.0]) for number in range(12)], {}, 12)
    assert many["convolution"].low == pytest.approx(0.55, abs=0.05)
    assert many["convolution"].high == pytest.approx(8.2, abs=0.8)
    assert ranges_of([left_out("Conv", "a", [1.0])], DEFAULT_RANGES, 3)["convolution"] == DEFAULT_RANGES[
        "convolution"].model_copy(update={"operators": 1})
    seen = conv()
    learned = Uncertainty(dataset_sha256="", ranges={}, forms={seen.type: (kernel_form(seen),)}, form_ranges={"gpu": many})
    wide = conv(window=31)
    assert learned.other_form_range(seen, "gpu") is None
    assert learned.other_form_range(wide, "gpu") == many["convolution"]
    assert learned.other_form_range(wide, "run") == OTHER_FORM_OF["convolution"]
    assert not learned.knows_form(wide)


def test_the_page() -> None:
    slow = TimedKernel(conv(window=9), 5.0, (), "Memset (Device)|void wide<float>(int)")
    fast = TimedKernel(conv(window=7), 0.1, (), "fast")
    cliffs = [Cliff(slow, fast, 30.25)]
    (row,) = cliff_rows(cliffs)
    assert (row["times"], row["slower_ran"], row["faster_ran"], row["edge"]) == (30.2, "wide", "fast", "between")
    neighbours = [TimedKernel(inferred("Relu", [tensor("float32", size)]), 1.0) for size in (8, 9)]
    assert cliff_rows([Cliff(neighbours[0], neighbours[1], 30.0)])[0]["edge"] == "known"
    forms = form_rows([slow, fast, TimedKernel(relu(), 0.1)])
    assert {row["type"]: (row["kernels"], row["forms"]) for row in forms} == {"Conv": (2, 2), "Relu": (1, 1)}
    by_class = {row["class"]: row for row in form_error_rows([left_out("Conv", "a", [1.0, 2.0, 0.5, 1.1]),
                                                              left_out("Relu", "b", [1.0, 3.0])])}
    assert {name: (row["forms"], row["kernels"], row["off_by_over_30_%"]) for name, row in by_class.items()} == {
        "convolution": (1, 4, 50), "elementwise": (1, 2, 50), "all": (2, 6, 50)}
    page = form_page("here", forms, list(by_class.values()), cliffs)
    assert "3 kernels in 3 forms, 0 of which have at least 12 kernels." in page
    assert "| 30.2 | Conv_" in page
    missing = never_measured({"Conv", "Relu"})
    assert {"Gemm", "Softmax"} <= set(missing)
    assert not {"Conv", "FusedConv", "Relu", "Reshape", "If", "QLinearConv"} & set(missing)  # the last is the CPU provider's
    assert f"{len(missing)} operators that ONNX Runtime's CUDA provider has were never measured: " in page
