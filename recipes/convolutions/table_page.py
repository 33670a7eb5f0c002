"""Writes a page with the full table of convolution algorithms: a table for each model, a row for each algorithm.

Reads what run_profile.py or measure_table.py measured, from a folder or an archive of pack.py. Without a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.convolutions.algorithms import ON_CPU, ON_GPU
from hase.extras.convolutions.listing import MODELS
from hase.extras.convolutions.tables import read_table, unpacked
from hase.utils import cli, files
from hase.utils.cli.printing import markdown_table
from hase.utils.lazy import pandas as pd

EXAMPLES = """
python recipes/convolutions/table_page.py --workspace out/convolutions --markdown out/convolutions/measured.md
"""
HEAD = """# Convolution algorithms: all that was measured

Written by `recipes/convolutions/table_page.py`. [The page of this subject](../../extras/convolutions/README.md) says how it was
measured, and what it shows.

Each cell has the GPU's time of all convolutions in ms; then, in brackets, the model's own time in ms, the mean power in W, and
the energy of an inference in J. Energy is measured at batch 1, where all layers can run. A dash: not measured. Where the
model's own time is far longer than its convolutions', it is the host's.

*Can't* is how many layers the algorithm can't run, and which (CUDNN_STATUS_NOT_SUPPORTED on a GPU); they ran by the library's
own choice. A star: layers waited for the host, or CUPTI's time of their kernels differs from theirs by more than a quarter, so
the time is not the GPU's alone.
"""
APART = 0.25  # between a run's layers and CUPTI's time of the same kernels: more is marked


def cell(run: Any) -> str:
    """What was measured of a model under an algorithm at a size."""
    if run.layers_not_supported == run.layers:
        return "no layer"
    if run.status != "ok":
        return str(run.status)
    energy = "" if pd.isna(run.energy_per_inference_j) else f", {run.power_mean_w:.0f} W, {run.energy_per_inference_j:.3g} J"
    star = "*" if run.late_layers > 0 or abs(run.layers_to_cupti - 1.0) > APART else ""
    return f"{shown(run.layers_ms)}{star} ({shown(run.mean)}{energy})"


def shown(time_ms: float) -> str:
    """A time with three digits, and all in front of the point."""
    return f"{time_ms:.0f}" if time_ms >= 100.0 else f"{time_ms:.3g}"


def refusals(runs: pd.DataFrame, layers: pd.DataFrame) -> str:
    """How many layers can't run an algorithm, and which: their filters and strides, and from how many pixels on if smaller ones
    can."""
    least, most, count = (int(value) for value in (runs.layers_not_supported.min(), runs.layers_not_supported.max(),
                                                   runs.layers.max()))
    if not most:
        return "0"
    if least == count:
        return "every layer"
    refused, which = layers[layers.status != "ok"], []
    for (kernel, stride), layers_alike in refused.groupby(["kernel_size", "stride"]):
        smaller = layers[(layers.status == "ok") & (layers.kernel_size == kernel) & (layers.stride == stride)]
        which.append(str(kernel) + ("" if stride == "1x1" else f" stride {str(stride).partition('x')[0]}")
                     + (f" from {layers_alike.height.min():.0f} pixels on" if len(smaller) else ""))
    return f"{least if least == most else f'{least} to {most}'} of {count}: {', '.join(which)}"


def model_rows(overall: pd.DataFrame, layers: pd.DataFrame) -> list[dict[str, Any]]:
    """The table of one model: a row for each algorithm, a column for each batch and input size."""
    columns = sorted(set(zip(overall.batch, overall.input_size, strict=True)))
    rows = []
    for name in dict.fromkeys([*ON_GPU, *ON_CPU]):
        runs = overall[overall.algorithm == name]
        if runs.empty:
            continue
        cells = {(run.batch, run.input_size): cell(run) for run in runs.itertuples()}
        row: dict[str, Any] = {"algorithm": name, "can't": refusals(runs, layers[layers.algorithm == name])}
        rows.append(row | {
            f"{size} pixels" + (f", batch {batch}" if batch > 1 else ""): cells.get((batch, size)) for batch, size in columns})
    return rows


def page(overall: pd.DataFrame, layers: pd.DataFrame) -> str:
    """The page: a table for each device and model, those of the study first."""
    parts = [HEAD]
    kinds = ["gpu", "dtype", "tf32"]
    of_layers = dict(list(layers.groupby([*kinds, "model"])))
    for kind, runs in overall.groupby(kinds):
        gpu, dtype, tf32 = kind
        for model in sorted(runs.model.unique(), key=lambda name: (name not in MODELS, name)):
            table = markdown_table(model_rows(runs[runs.model == model], of_layers[*kind, model]))
            parts.append(f"## {model} ({gpu}, {dtype}{', TF32 allowed' if tf32 else ''})\n\n{table}\n")
    return "\n".join(parts)


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--results", type=Path, metavar="DIR",
                        help="folder or archive of tables (default: extras/convolutions/results)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", required=True, help="the page to write")
    args = parser.parse_args()
    workspace = cli.start(args)
    with unpacked(args.results or workspace.convolution_results) as results:
        files.write_text(args.markdown, page(read_table(results, "overall"), read_table(results, "layers")))


if __name__ == "__main__":
    cli.run(main)
