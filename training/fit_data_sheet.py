"""Learns to predict GPUs that were never measured from data sheets and public tables, and shows the errors.

Reads a table of kernels on several GPUs (--tables, as recipes/gpus/derive_tables.py makes it). Each card is left out in turn,
and predicted from the H200's times: errors by table and size of the kernel, in per cent, beside those of the ratio of rooflines
alone, and those of the other kernels once the most useful ones are measured (--replay). Writes learned/data_sheet/learned (or
--out), from which `--gpu` predicts. Takes two minutes on two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hase.learned.data_sheet.ratios import BASE, FOLDER, OWN, CardRatios, SheetRange
from hase.learned.data_sheet.work import Floats, Work, peaks_flop_s
from hase.records.devices import GpuDataSheet
from hase.training.fits import data_sheets
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.logger import progress

LONG_MS = 0.05  # a kernel that takes more is a long one
POOL = 2500  # kernels among which those to measure are chosen
BASE_TARGET = "nvidia-h200-cuda-ort1.31-all"
EXAMPLES = """
python training/fit_data_sheet.py --tables recipes/gpus/tables.csv.xz --out out/data-sheet
python training/fit_data_sheet.py --tables recipes/gpus/tables.csv.xz --out out/data-sheet --replay 30,300
python training/fit_data_sheet.py --tables recipes/gpus/tables.csv.xz --by generation
"""


class Replayed(NamedTuple):
    """Measured and predicted times (ms) of the other kernels when some are measured."""

    measured_ms: Floats
    predicted_ms: Floats


class LeftOutCard(NamedTuple):
    """Kernels of a card that was held out: its table, and measured, predicted and naive times (ms). `replayed` has the other
    kernels' times by the number of measured kernels."""

    table: str
    gpu: GpuDataSheet
    measured_ms: Floats
    predicted_ms: Floats
    naive_ms: Floats
    replayed: dict[int, Replayed]


def naive_ratio(work: Work, base: GpuDataSheet, gpu: GpuDataSheet) -> Floats:
    """The ratio of both cards' rooflines."""
    def roofline_s(card_sheet: GpuDataSheet) -> Floats:
        return np.maximum(work.moved_bytes / (card_sheet.bandwidth_gb_s * 1e9), work.flops / peaks_flop_s(work, card_sheet))

    return np.asarray(roofline_s(gpu) / roofline_s(base))


def predicted(table: data_sheets.Table, gpu: GpuDataSheet, ratios: CardRatios, counts: Sequence[int] = ()) -> LeftOutCard:
    """Predicts a card's kernels from the base card in the same table, without and with `counts` measured kernels. The kernels
    to measure are chosen by their work and their times on the base card."""
    base = data_sheets.card(BASE)
    both = np.isfinite(table.ms[BASE]) & np.isfinite(table.ms[gpu.slug])
    work, base_ms, measured_ms = table.work.rows(both), table.ms[BASE][both], table.ms[gpu.slug][both]
    replayed = {}
    to_measure = _to_measure(work, base_ms, base, max(counts)) if counts else np.zeros(0, dtype=int)
    for count in counts:
        chosen = np.zeros(len(base_ms), dtype=bool)
        chosen[to_measure[:count]] = True
        adjusted = data_sheets.adjust_ratios(ratios, work.rows(chosen), base_ms[chosen], measured_ms[chosen], base, gpu,
                                             table.name)
        others_ms = adjusted.times_ms(work.rows(~chosen), base_ms[~chosen], base, gpu, table.name)
        replayed[count] = Replayed(measured_ms[~chosen], others_ms)
    return LeftOutCard(table.name, gpu, measured_ms, ratios.times_ms(work, base_ms, base, gpu, table.name),
                   base_ms * naive_ratio(work, base, gpu), replayed)


def _to_measure(work: Work, base_ms: Floats, base: GpuDataSheet, count: int) -> npt.NDArray[np.int_]:
    """The indices of the kernels to measure, the most useful first, from a random selection."""
    pool = np.random.default_rng(0).choice(len(base_ms), min(POOL, len(base_ms) // 2), replace=False)
    pool_work = work.rows(pool), base_ms[pool]
    return np.asarray(pool[data_sheets.most_useful(*pool_work, *pool_work, base, count)])


def row(left_out: LeftOutCard, others: Sequence[LeftOutCard]) -> dict[str, Any]:
    """Errors of all and of long kernels, and the share of times in the range from other cards, in per cent."""
    errors, naive = (np.abs(times / left_out.measured_ms - 1.0) for times in (left_out.predicted_ms, left_out.naive_ms))
    long = left_out.measured_ms > LONG_MS
    return {"table": left_out.table, "left_out": left_out.gpu.name, "kernels": len(errors),
            "MAPE_%": _percent(errors), "median_%": 100 * float(np.median(errors)),
            f"over_{1e3 * LONG_MS:g}_us_%": _percent(errors[long]), "rooflines_%": _percent(naive),
            f"rooflines_over_{1e3 * LONG_MS:g}_us_%": _percent(naive[long]), **_range_columns(left_out, others),
            **_replay_columns(left_out)}


def _range_columns(left_out: LeftOutCard, others: Sequence[LeftOutCard]) -> dict[str, float]:
    """The share of times (per cent) in the range from the same table's other cards, and its width; empty without other
    cards."""
    same_table = [other for other in others if other.table == left_out.table and other.gpu.slug != left_out.gpu.slug]
    if not same_table:
        return {}
    expected, ratios = range_of(same_table), left_out.measured_ms / left_out.predicted_ms
    return {"held_%": _percent((ratios >= expected.low) & (ratios <= expected.high)),
            "high_over_low": round(expected.high / expected.low, 2)}


def _replay_columns(left_out: LeftOutCard) -> dict[str, float]:
    """Errors in per cent when some kernels are measured: of all others, and of long ones."""
    columns: dict[str, float] = {}
    for count, (measured_ms, predicted_ms) in left_out.replayed.items():
        errors = np.abs(predicted_ms / measured_ms - 1.0)
        columns |= {f"with_{count}_%": _percent(errors),
                    f"with_{count}_over_{1e3 * LONG_MS:g}_us_%": _percent(errors[measured_ms > LONG_MS])}
    return columns


def _percent(errors: npt.NDArray[Any]) -> float:
    return round(100 * float(errors.mean()), 1) if len(errors) else float("nan")


def range_of(left_out: Sequence[LeftOutCard]) -> SheetRange:
    """The multiples of predictions that contain 90 % of the times: the mean over cards, plus a standard deviation. Each table
    of a card counts equally. The standard deviation allows for cards that err more than these."""
    log_ranges: dict[str, list[Floats]] = {}
    for result in left_out:
        ratios = result.measured_ms / result.predicted_ms
        log_ranges.setdefault(result.gpu.slug, []).append(np.log(np.quantile(ratios, (0.05, 0.95))))
    log_ends = np.array([np.mean(table_ranges, axis=0) for table_ranges in log_ranges.values()])
    low, high = np.exp(log_ends.mean(axis=0) + log_ends.std(axis=0) * [-1.0, 1.0]).tolist()
    return SheetRange(low=min(low, 1.0), high=max(high, 1.0))


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--tables", type=Path, required=True, help="kernels on several GPUs")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where what is learned goes (default: what ships with Hase)")
    parser.add_argument("--replay", type=cli.counts, default=(), metavar="N,…",
                        help="also show the errors once so many kernels of the card are measured, e.g. 30,300")
    parser.add_argument("--by", choices=("card", "generation"), default="card",
                        help="what is left out: each card, or with it all others of its generation; with generation, nothing "
                             "is written (default: card)")
    args = parser.parse_args()
    cli.start(args)
    tables = data_sheets.read_card_tables(args.tables)
    names = sorted({name for table in tables if BASE in table.ms for name in table.ms} - {BASE})
    if not names:
        raise UserError(f"{args.tables}: no table has {BASE} and another card")
    results: list[LeftOutCard] = []
    all_names = {name for table in tables for name in table.ms} - {BASE}
    for name in progress(names, "cards left out"):
        gpu = data_sheets.card(name)
        same_generation = [other for other in all_names
                           if args.by == "generation" and data_sheets.card(other).generation == gpu.generation]
        ratios = data_sheets.fit_card_ratios(tables, without=(name, *same_generation))
        results += [predicted(table, gpu, ratios, args.replay) for table in tables if {BASE, name} <= set(table.ms)]
    own_names = tuple(sorted({BASE, *(name for table in tables if table.name == OWN for name in table.ms)}))
    capabilities = {data_sheets.card(name).compute_capability for name in own_names}
    ranges = [range_of([result for result in results if (result.gpu.compute_capability in capabilities) == known])
              for known in (True, False)]
    if args.by == "card":
        data_sheets.write_sheet(args.out, data_sheets.fit_card_ratios(tables), BASE_TARGET, (*names, BASE), own_names, *ranges)
    results.sort(key=lambda result: (result.table == OWN, result.table))
    cli.print_rows([row(result, results) for result in results], args.json,
                   f"errors of each {args.by} left out; nine of ten times within {ranges[0].low:.2f} to {ranges[0].high:.2f} "
                   f"times the prediction, for other compute capabilities {ranges[1].low:.2f} to {ranges[1].high:.2f}")
    return 0


if __name__ == "__main__":
    cli.run(main)
