"""Packs the measurements of convolution algorithms, or writes a page of them: a table per model, a row per algorithm.

Reads what run_profile.py or measure_table.py measured. No GPU is needed. `pack` first writes the tables in
extras/convolutions/results/ again from their journals, so that they have today's columns, then puts the tables into
<output-dir>/<name>.tar.xz, which choose_algorithms.py --results reads unpacked, and every sample into <name>-samples.tar.xz,
from which measuring goes on. `page` reads the tables from a folder or from such an archive, and writes Markdown.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hase.extras.convolutions.choosing.tables import read_table, unpacked
from hase.extras.convolutions.profiling.algorithms import CPU_ALGORITHMS, GPU_ALGORITHMS
from hase.extras.convolutions.profiling.listing import MODELS
from hase.extras.convolutions.profiling.results import JOURNAL, SETTINGS, read_settings, write_tables
from hase.records.measurement import read_blocks
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger
from hase.utils.text import markdown_table

EXAMPLES = """
python recipes/convolutions/publish_table.py pack --workspace out/convolutions --name nvidia-h200
python recipes/convolutions/publish_table.py page --workspace out/convolutions --markdown out/convolutions/measured.md
"""
MEASURE = "python recipes/convolutions/measure_table.py"
log = get_logger("convolutions")
HEAD = """# Convolution algorithms: all that was measured

Written by `recipes/convolutions/publish_table.py`. [The page of this subject](../../extras/convolutions/README.md) says how it
was measured, and what it shows.

Each cell has the GPU's time of all convolutions in ms; then, in brackets, the model's own time in ms, the mean power in W, and
the energy of an inference in J. Energy is measured at batch 1, where all layers can run. A dash: not measured. Where the
model's own time is far longer than its convolutions', it is the host's.

*Can't* is how many layers the algorithm can't run, and which (CUDNN_STATUS_NOT_SUPPORTED on a GPU); they ran by the library's
own choice. A star: layers waited for the host, or CUPTI's time of their kernels differs from theirs by more than a quarter, so
the time is not the GPU's alone.
"""
LARGEST_DIFFERENCE = 0.25  # between a run's layers and CUPTI's time of the same kernels; a larger one is marked


def cell(run: Any) -> str:
    """The measurement of a model under an algorithm at one size, as text."""
    if run.layers_not_supported == run.layers:
        return "no layer"
    if run.status != "ok":
        return str(run.status)
    energy = "" if pd.isna(run.energy_per_inference_j) else f", {run.power_mean_w:.0f} W, {run.energy_per_inference_j:.3g} J"
    star = "*" if run.late_layers > 0 or abs(run.layers_to_cupti - 1.0) > LARGEST_DIFFERENCE else ""
    return f"{time_text(run.layers_ms)}{star} ({time_text(run.mean)}{energy})"


def time_text(time_ms: float) -> str:
    """A time with three significant digits, or more if it has more before the point."""
    return f"{time_ms:.0f}" if time_ms >= 100.0 else f"{time_ms:.3g}"


def refusals(runs: pd.DataFrame, layers: pd.DataFrame) -> str:
    """How many layers an algorithm cannot run, and which: filters, strides, and the smallest size if smaller ones can run."""
    least, most, count = (int(value) for value in (runs.layers_not_supported.min(), runs.layers_not_supported.max(),
                                                   runs.layers.max()))
    if not most:
        return "0"
    if least == count:
        return "every layer"
    refused, descriptions = layers[layers.status != "ok"], []
    for (kernel, stride), group in refused.groupby(["kernel_size", "stride"]):
        smaller = layers[(layers.status == "ok") & (layers.kernel_size == kernel) & (layers.stride == stride)]
        descriptions.append(str(kernel) + ("" if stride == "1x1" else f" stride {str(stride).partition('x')[0]}")
                            + (f" from {group.height.min():.0f} pixels on" if len(smaller) else ""))
    return f"{least if least == most else f'{least} to {most}'} of {count}: {', '.join(descriptions)}"


def model_rows(overall: pd.DataFrame, layers: pd.DataFrame) -> list[dict[str, Any]]:
    """The table of one model: a row per algorithm, a column per batch and input size."""
    columns = sorted(set(zip(overall.batch, overall.input_size, strict=True)))
    rows = []
    for name in dict.fromkeys([*GPU_ALGORITHMS, *CPU_ALGORITHMS]):
        runs = overall[overall.algorithm == name]
        if runs.empty:
            continue
        cells = {(run.batch, run.input_size): cell(run) for run in runs.itertuples()}
        row: dict[str, Any] = {"algorithm": name, "can't": refusals(runs, layers[layers.algorithm == name])}
        rows.append(row | {
            f"{size} pixels" + (f", batch {batch}" if batch > 1 else ""): cells.get((batch, size)) for batch, size in columns})
    return rows


def page(overall: pd.DataFrame, layers: pd.DataFrame) -> str:
    """The page: a table per device and model, models of the study first."""
    parts = [HEAD]
    kinds = ["gpu", "dtype", "tf32"]
    layers_by_model = dict(list(layers.groupby([*kinds, "model"])))
    for kind, runs in overall.groupby(kinds):
        gpu, dtype, tf32 = kind
        for model in sorted(runs.model.unique(), key=lambda name: (name not in MODELS, name)):
            table = markdown_table(model_rows(runs[runs.model == model], layers_by_model[*kind, model]))
            parts.append(f"## {model} ({gpu}, {dtype}{', TF32 allowed' if tf32 else ''})\n\n{table}\n")
    return "\n".join(parts)


def rewrite_tables(results: Path) -> None:
    """Writes the tables of all journals below `results` again."""
    journals = sorted(results.glob(f"**/{JOURNAL}"))
    if not journals:
        raise UserError(f"{results}: no results of convolution algorithms; measure some with {MEASURE}")
    for journal in journals:
        if (settings := read_settings(journal.parent)) is None:
            raise UserError(f"{journal.parent}: a journal without {SETTINGS}; remove the folder and measure again")
        write_tables(journal.parent, settings.name, read_blocks(journal))


def pack(results: Path, patterns: tuple[str, ...], archive: Path) -> None:
    """Packs the files below `results` that match one of `patterns`, under the folder's own name."""
    paths = sorted(path for pattern in patterns for path in results.glob(f"**/{pattern}"))
    files.pack(archive, ((str(Path(results.name, path.relative_to(results))), path.read_bytes()) for path in paths))
    log.info("%s: %.2f MB", archive, archive.stat().st_size / 1e6)


def main() -> None:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("what", choices=("pack", "page"))
    parser.add_argument("--name", default="convolutions", help="how the archives' names begin (default: convolutions)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="of the archives (default: the workspace)")
    parser.add_argument("--results", type=Path, metavar="DIR",
                        help="folder or archive of tables for the page (default: extras/convolutions/results)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page to write")
    args = parser.parse_args()
    if args.what == "page" and not args.markdown:
        parser.error("page needs --markdown")
    workspace = cli.start(args)
    if args.what == "page":
        with unpacked(args.results or workspace.convolution_results) as results:
            files.write_text(args.markdown, page(read_table(results, "overall"), read_table(results, "layers")))
        return
    rewrite_tables(workspace.convolution_results)
    folder = args.output_dir or workspace.root
    pack(workspace.convolution_results, ("*.csv",), folder / f"{args.name}.tar.xz")
    pack(workspace.convolution_results, (JOURNAL, SETTINGS), folder / f"{args.name}-samples.tar.xz")


if __name__ == "__main__":
    cli.run(main)
