"""The tables of a results folder: `<model>_<algorithm>_overall.csv` and `<model>_<algorithm>_layers.csv`.

Both are derived from the journal `measurements.jsonl` in the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hase.extras.convolutions.profiling.algorithms import count_names, describe_unexpected
from hase.extras.convolutions.profiling.measure import CONVOLUTION, PROFILE, REMAKE, VERSION, ProfileSettings
from hase.records.measurement import Block, JournalFile, Measurement, best_measurements, read_blocks
from hase.utils import files
from hase.utils.errors import UserError

SETTINGS, JOURNAL = "profile.json", "measurements.jsonl"
OVERALL = ("model", "algorithm", "input_size", "mean", "std", "min", "max", "power_mean_w", "energy_per_inference_j")
OVERALL_MORE = ("batch", "dtype", "tf32", "gpu", "median", "runs", "layers", "layers_not_supported", "layers_ms", "cupti_ms",
                "layers_to_cupti", "layers_to_cupti_span", "event_overhead_ms", "late_layers", "energy_window_s",
                "energy_to_counter", "idle_power_w", "energy_doubts", "output_error", "unexpected_kernels", "status", "error")
LAYERS = ("layer", "in_channels", "out_channels", "kernel_size", "mean_ms", "percentage")
LAYERS_MORE = ("model", "algorithm", "input_size", "batch", "dtype", "tf32", "gpu", "ran", "status", "detail", "std_ms",
               "median_ms", "ahead_runs", "cupti_ms", "cupti_span_ms", "launches", "height", "width", "stride", "padding",
               "dilation", "groups", "flops", "bytes_moved", "workspace_mib", "output_error", "unexpected_kernels",
               "cuda_kernels")
COPIED = ("model", "algorithm", "input_size", "batch", "dtype", "tf32", "gpu")  # facts that are columns


def write_settings(folder: Path, settings: ProfileSettings) -> None:
    """Writes what the folder is for. Raises UserError if it holds measurements of something else."""
    if (saved := read_settings(folder)) is not None:
        if not settings.same_but_sizes(saved):
            different = [name for name in type(settings).model_fields if name not in ("input_sizes", "warmup", "measure")
                         and getattr(settings, name) != getattr(saved, name)]
            raise UserError(f"{folder}: holds a profile with another {' and '.join(different)}; name another --output-dir, or "
                            "remove this folder")
        sizes = tuple(sorted({*saved.input_sizes, *settings.input_sizes}))
        settings = settings.model_copy(update={"input_sizes": sizes})
    files.write_json(folder / SETTINGS, settings)


def read_settings(folder: Path) -> ProfileSettings | None:
    """What the folder is for; None if nothing was measured yet."""
    path = folder / SETTINGS
    return files.read_record(path, ProfileSettings, VERSION, REMAKE) if path.exists() else None


class ResultsJournal(JournalFile):
    """A folder's journal; it writes both tables after each block. `name` is the prefix of the tables."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / JOURNAL)
        self._folder, self._name = folder, name
        write_tables(folder, name, self.blocks)

    def append(self, block: Block) -> None:
        super().append(block)
        write_tables(self._folder, self._name, self.blocks)


def write_tables(folder: Path, name: str, blocks: Iterable[Block]) -> None:
    """Writes both tables."""
    measurements = list(best_measurements(blocks).values())
    files.write_csv(folder / f"{name}_overall.csv", (*OVERALL, *OVERALL_MORE), overall_rows(measurements))
    files.write_csv(folder / f"{name}_layers.csv", (*LAYERS, *LAYERS_MORE), layer_rows(measurements))


SHOWN = ("model", "algorithm", "input_size", "batch", "mean", "std", "min", "max", "layers_ms", "power_mean_w",
         "energy_per_inference_j", "layers", "layers_not_supported", "status", "error")  # columns of a command's table


def finished_rows(folder: Path, settings: ProfileSettings) -> list[dict[str, Any]]:
    """Rows of the sizes in `settings`, with the columns SHOWN."""
    wanted = {unit.id for unit in settings.units}
    measured = best_measurements(read_blocks(folder / JOURNAL)).values()
    measurements = [m for m in measured if m.id in wanted or m.context in wanted]
    return [{name: row.get(name) for name in SHOWN} for row in overall_rows(measurements)]


def overall_rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per profile, smallest input first; times in ms."""
    return [_overall_row(profile, [m for m in measurements if m.subject == CONVOLUTION and m.context == profile.id])
            for profile in by_size(measurements)]


def by_size(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Measurements of whole models, smallest input first."""
    return sorted((m for m in measurements if m.subject == PROFILE), key=lambda m: int(m.facts["input_size"]))


def _overall_row(profile: Measurement, layers: Sequence[Measurement]) -> dict[str, Any]:
    row: dict[str, Any] = {name: profile.facts.get(name) for name in COPIED}
    row |= {"status": profile.status, "error": profile.error, "layers": profile.facts.get("layers"),
            "layers_not_supported": profile.facts.get("refused_layers"), "output_error": profile.facts.get("output_error"),
            "idle_power_w": _mean(profile, "idle_power_w"), "energy_doubts": profile.facts.get("energy_doubts")}
    if not profile.samples_ms:
        return row
    samples = np.array(profile.samples_ms)
    layers_ms = sum(layer_ms(m, profile) for m in layers)
    cupti_ms, span_ms = (sum(_mean(m, name) or 0.0 for m in layers) for name in ("cupti_ms", "cupti_span_ms"))
    layers_with_others = [str(m.facts["layer"]) for m in layers if unexpected_kernels(m)]
    is_late = [m.facts["ahead_runs"] == 0 for m in layers if "ahead_runs" in m.facts]  # not recorded before 2026-11-22
    return row | {
        "mean": _short(samples.mean()), "std": _short(samples.std(ddof=1) if len(samples) > 1 else 0.0),
        "min": _short(samples.min()), "max": _short(samples.max()), "median": _short(np.median(samples)), "runs": len(samples),
        "power_mean_w": _mean(profile, "power_w"), "energy_per_inference_j": _mean(profile, "energy_j"),
        "energy_window_s": _mean(profile, "energy_window_s"), "energy_to_counter": _mean(profile, "energy_agreement"),
        "layers_ms": _short(layers_ms), "cupti_ms": _short(cupti_ms) if cupti_ms else None,
        "layers_to_cupti": _short(layers_ms / cupti_ms) if cupti_ms else None,
        "layers_to_cupti_span": _short(layers_ms / span_ms) if span_ms else None,
        "event_overhead_ms": _mean(profile, "event_overhead_ms"), "unexpected_kernels": " ".join(layers_with_others),
        "late_layers": sum(is_late) if is_late else None}


def layer_ms(layer: Measurement, profile: Measurement, average: Callable[[Sequence[float]], Any] = np.mean) -> float:
    """The time of a layer's call in ms, without the overhead of the events."""
    return float(average(layer.samples_ms)) - (_mean(profile, "event_overhead_ms") or 0.0)


def unexpected_kernels(layer: Measurement) -> str:
    """Describes unexpected CUDA kernels of a call; "" if there are none, or if kernels were not recorded."""
    if "cupti_ms" not in layer.quantities:
        return ""
    facts = layer.facts
    whole_windows = {"kernel": 1, "stride": 1, "padding": 0}
    pointwise = all(facts.get(f"{name}_{side}") == size for name, size in whole_windows.items() for side in "hw")
    return describe_unexpected(str(facts["ran"]), layer.cuda_kernels, pointwise)


def layer_rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per call of a convolution in each profile, in run order; times in ms."""
    rows = []
    for profile in by_size(measurements):
        layers = [m for m in measurements if m.subject == CONVOLUTION and m.context == profile.id]
        total_ms = sum(layer_ms(m, profile) for m in layers if m.samples_ms)
        rows += [_layer_row(m, profile, total_ms) for m in layers]
    return rows


def _layer_row(m: Measurement, profile: Measurement, total_ms: float) -> dict[str, Any]:
    """`percentage` is relative to the time of all convolutions of the model."""
    facts = m.facts
    row: dict[str, Any] = {name: facts.get(name) for name in (
        *COPIED, "layer", "in_channels", "out_channels", "height", "width", "groups", "flops", "bytes_moved", "ran",
        "output_error", "ahead_runs")}
    pairs = (("kernel_size", "kernel"), ("stride", "stride"), ("padding", "padding"), ("dilation", "dilation"))
    row |= {name: f"{facts[f'{key}_h']}x{facts[f'{key}_w']}" for name, key in pairs if f"{key}_h" in facts}
    row |= {"status": facts["layer_status"], "detail": facts["layer_detail"], "cupti_ms": _mean(m, "cupti_ms"),
            "cupti_span_ms": _mean(m, "cupti_span_ms"), "launches": m.launches, "unexpected_kernels": unexpected_kernels(m),
            "workspace_mib": _short(float(facts["workspace_bytes"]) / 2**20),
            "cuda_kernels": "|".join(count_names(m.cuda_kernels))}
    if not m.samples_ms:
        return row
    mean_ms = layer_ms(m, profile)
    return row | {"mean_ms": _short(mean_ms), "percentage": _short(100 * mean_ms / total_ms),
                  "std_ms": _short(np.std(m.samples_ms)), "median_ms": _short(layer_ms(m, profile, np.median))}


def _mean(m: Measurement, quantity: str) -> float | None:
    """The mean of a quantity; None without values."""
    values = m.quantities.get(quantity)
    return _short(np.mean(values)) if values else None


def _short(value: Any) -> float:
    """Rounds to six significant digits."""
    return float(f"{float(value):.6g}")
