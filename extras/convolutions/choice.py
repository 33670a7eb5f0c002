"""Which algorithm is best for each layer: what a model gains by it, what predicted choices lose, and which one to use in
a model that was not measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hase.extras.convolutions.algorithms import ConvShape, NotSupported, shape_of
from hase.extras.convolutions.learned import fit, predict_cases, predict_ms
from hase.extras.convolutions.tables import Case, by_run, families, group_key, named
from hase.model_zoo.exporting.torch_models import bare, check_names
from hase.utils.errors import UserError
from hase.utils.lazy import torch

if TYPE_CHECKING:
    from hase.extras.convolutions.algorithms import Convolution, Tensor

Kind = tuple[Any, ...]


def best_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One row for each layer: its best algorithm, the time, the library's own choice and what the best gains over it."""
    return [named(group_key(case)) | {
        "layer": case.layer, "best": case.best, "best_ms": case.best_ms, "library_choice": case.library_choice or None,
        "library_ms": case.library_ms,
        "gain_percent": None if case.library_ms is None else 100 * (1 - case.best_ms / case.library_ms),
        **{f"{name}_ms": case.times_ms[name] for name in sorted(case.times_ms)}} for case in cases]


def gain_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """One row for each run of a model: the time of its convolutions by the library's own choice, and by the best of each layer.

    Layers whose own choice was not measured are left out and counted.
    """
    rows = []
    for key, run in by_run(cases).items():
        known = [case for case in run if case.library_ms is not None]
        library_ms, best_ms = sum(case.library_ms or 0.0 for case in known), sum(case.best_ms for case in known)
        chosen = Counter(case.best for case in run)
        rows.append(named(key) | {
            "layers": len(run), "without_library": len(run) - len(known), "library_ms": library_ms or None,
            "best_ms": best_ms or None,
            "gain_percent": 100 * (1 - best_ms / library_ms) if library_ms else None, "best_single": _best_single(run),
            "best": ", ".join(f"{count} {name}" for name, count in chosen.most_common())})
    return rows


def _best_single(cases: Sequence[Case]) -> str | None:
    """The fastest algorithm among those that run every layer; None if there is none."""
    names = set.intersection(*(set(case.times_ms) for case in cases))
    return min(names, key=lambda name: sum(case.times_ms[name] for case in cases), default=None)


def left_out_times(cases: Sequence[Case]) -> list[dict[str, float]]:
    """For each case the predicted times (ms) of the algorithms that can run it, by predictors that never saw its family.

    A device with one family alone has none.
    """
    times: list[dict[str, float]] = [{} for _ in cases]
    for gpu in sorted({case.gpu for case in cases}):
        for family in families(case for case in cases if case.gpu == gpu):
            left_out = [place for place, case in enumerate(cases) if (case.gpu, case.family) == (gpu, family)]
            others = [case for case in cases if case.gpu == gpu and case.family != family]
            if not others:
                continue
            for place, predicted in zip(left_out, predict_cases(fit(others), [cases[at] for at in left_out]), strict=True):
                times[place] = predicted
    return times


def regret_rows(cases: Sequence[Case], predicted: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """One row for each run of a model: what the predicted choices lose against the best measured, in per cent of the time of
    its convolutions.

    A choice is among the algorithms that can run the layer, which cuDNN says without measuring. Layers that leave no choice
    count too. Cases without a prediction are left out.
    """
    times_of = {(*group_key(case), case.layer): times for case, times in zip(cases, predicted, strict=True) if times}
    rows = []
    for key, run in by_run(case for case in cases if (*group_key(case), case.layer) in times_of).items():
        times = [times_of[*key, case.layer] for case in run]
        chosen = [min(predicted_ms, key=predicted_ms.__getitem__) for predicted_ms in times]
        best_ms = sum(case.best_ms for case in run)
        chosen_ms = sum(case.times_ms[name] for case, name in zip(run, chosen, strict=True))
        by_library = [case for case in run if case.library_ms is not None]
        errors = [abs(time_ms / case.times_ms[name] - 1) for case, predicted_ms in zip(run, times, strict=True)
                  for name, time_ms in predicted_ms.items()]
        rows.append(named(key) | {
            "layers": len(run), "algorithms": len(set().union(*map(tried, run))),
            "with_a_choice": sum(len(case.times_ms) > 1 for case in run),
            "right": sum(name == case.best for case, name in zip(run, chosen, strict=True)), "best_ms": best_ms,
            "chosen_ms": chosen_ms, "regret_percent": 100 * (chosen_ms / best_ms - 1),
            "library_regret_percent": _excess_percent(by_library), "time_error_percent": 100 * float(np.mean(errors))})
    return rows


def tried(case: Case) -> set[str]:
    """The algorithms that ran a case or were refused."""
    return {*case.times_ms, *case.refused}


def _excess_percent(cases: Sequence[Case]) -> float | None:
    """What the library's own choice loses against the best measured, in per cent; None without cases."""
    library_ms, best_ms = sum(case.library_ms or 0.0 for case in cases), sum(case.best_ms for case in cases)
    return 100 * (library_ms / best_ms - 1) if best_ms else None


def mean_regret(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over the models of the mean over a model's runs, in per cent; None without rows.

    Runs with which fewer algorithms were tried than with others of the device are not finished, and do not count.
    """
    most: dict[str, int] = defaultdict(int)
    for row in rows:
        most[row["gpu"]] = max(most[row["gpu"]], row["algorithms"])
    by_model: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["algorithms"] == most[row["gpu"]]:
            by_model[row["model"]].append(row["regret_percent"])
    return float(np.mean([np.mean(regrets) for regrets in by_model.values()])) if by_model else None


def layer_shapes(model: str, input_size: int, batch: int, dtype: str) -> list[tuple[str, ConvShape]]:
    """The convolutions of a torchvision model in the order of a run, without computing anything.

    Raises:
        UserError: no such model, or it does not work at this size.
    """
    check_names([model])
    shapes: list[tuple[str, ConvShape]] = []

    def note(name: str, layer: Convolution, inputs: tuple[Tensor]) -> None:
        shapes.append((name, shape_of(layer, inputs[0])))

    try:
        with torch.device("meta"), torch.inference_mode():
            network = bare(model, (input_size, input_size)).eval().to(torch.float16 if dtype == "fp16" else torch.float32)
            for name, layer in network.named_modules():
                if isinstance(layer, torch.nn.Conv2d):
                    layer.register_forward_pre_hook(partial(note, name))
            network(torch.empty(batch, 3, input_size, input_size, dtype=torch.float16 if dtype == "fp16" else torch.float32))
    except (RuntimeError, NotSupported) as error:
        raise UserError(f"{model} at {input_size}x{input_size}: {str(error).partition(chr(10))[0]}") from None
    return shapes


def kind_of(shape: ConvShape) -> Kind:
    """What decides, as far as is known, whether an algorithm can run a convolution."""
    return shape.kernel, shape.stride, shape.dilation, min(shape.groups, 2), shape.dtype


def shares_able(cases: Sequence[Case]) -> dict[Kind, dict[str, float]]:
    """By kind of convolution, the share of the measured ones that each algorithm could run."""
    ran: dict[Kind, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for name in (*case.times_ms, *case.refused):
            ran[kind_of(case.shape)][name].append(name in case.times_ms)
    return {kind: {name: sum(could) / len(could) for name, could in names.items()} for kind, names in ran.items()}


def predicted_rows(cases: Sequence[Case], layers: Sequence[tuple[str, ConvShape]]) -> list[dict[str, Any]]:
    """One row for each layer: its predicted best algorithm and the predicted time (ms) under each that can probably run it.

    `basis` says how sure that is: `measured kind` (most layers with this filter, stride and grouping could run it, and these
    algorithms alone are considered) or `guess` (no such layer was measured, and every algorithm is considered).

    Args:
        cases: measured, of one device.
        layers: names and shapes.
    """
    model, shares = fit(cases), shares_able(cases)
    shapes = [shape for _, shape in layers]
    times = {name: predict_ms(model, shapes, name) for name in model.type_codes}
    rows = []
    for place, (layer, shape) in enumerate(layers):
        share = shares.get(kind_of(shape))
        names = [name for name in times if share is None or share.get(name, 0.0) > 0.5]
        predicted = {name: float(times[name][place]) for name in names}
        best = min(predicted, key=predicted.__getitem__, default=None)
        rows.append({
            "layer": layer, "filter": f"{shape.kernel[0]}x{shape.kernel[1]}",
            "channels": f"{shape.in_channels} to {shape.out_channels}", "input": f"{shape.height}x{shape.width}", "best": best,
            "best_ms": predicted.get(best) if best else None, "basis": "guess" if share is None else "measured kind",
            **{f"{name}_ms": predicted.get(name) for name in sorted(times)}})
    return rows
