"""`results/profiling_report.txt`: what was measured and what follows from it, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from graph_stages.definition import STAGES
from graph_stages.lookup import LookupKey, LookupRecord
from graph_stages.records import RawMeasurements
from graph_stages.regression import Regression

MEANING = """\
Bandwidth: 1000 / slope / 1024² MB/s, of latency = slope · bytes + intercept over all sizes. Bytes are those of a stage's inputs
and outputs. All that grows with them is in the slope: copies to and from the unit, and the unit's own reading and writing.
Regression alone can't tell these apart. transfer_by in lookup_table.json says "measured" where runs with the data in the unit's
own memory were timed as well: there the transfer is the difference of the two. compute_time = total_time - transfer_time."""


def report(raw: RawMeasurements, table: Mapping[LookupKey, LookupRecord], fits: Iterable[Regression], skipped: str) -> str:
    """The whole text. `skipped` says why there is no regression; "" where there is one."""
    parts = [_setting(raw), _ran(raw), _regressions(fits, skipped), _times(table), _left_out(table)]
    return "\n\n".join("\n".join(part) for part in (list(lines) for lines in parts) if part) + "\n"


def _setting(raw: RawMeasurements) -> Iterator[str]:
    yield "Stages of a GraphSAGE layer: times on the units of one machine"
    yield "=" * 62
    yield f"machine: {', '.join(f'{key} {value}' for key, value in raw.machine.items() if not isinstance(value, (dict, list)))}"
    yield f"versions: {', '.join(f'{key} {value}' for key, value in raw.versions.items())}"
    sizes = sorted({(one.nodes, one.edges) for one in raw.records})
    widths = sorted({(one.features, one.hidden) for one in raw.records})
    yield f"sizes (nodes/edges): {', '.join(f'{nodes}/{edges}' for nodes, edges in sizes)}"
    yield f"widths: {', '.join(f'{features} features to {hidden}' for features, hidden in widths)}; graphs: " + ", ".join(
        sorted({one.graph for one in raw.records}))
    yield f"runs: {raw.warmup} to warm up, {raw.runs} timed; seed {raw.seed}"


def _ran(raw: RawMeasurements) -> Iterator[str]:
    yield "Units"
    for unit in raw.units:
        if not unit.present:
            yield f"  {unit.name}: not measured: {unit.why}"
            continue
        records = [one for one in raw.records if one.unit == unit.name]
        ran = Counter(f"{one.runtime} on {one.ran_on}, {one.precision} weights, computing in {one.inference_precision}"
                      for one in records if one.samples_ms)
        yield f"  {unit.name} ({unit.device_name}): {len(records)} records"
        yield from (f"    {count} by {what}" for what, count in ran.items())
        why = Counter((one.stage, one.fallback) for one in records if one.fallback)
        yield from (f"    stage {stage} fell back at {count} sizes: {reason}" for (stage, reason), count in why.items())


def _regressions(fits: Iterable[Regression], skipped: str) -> Iterator[str]:
    yield "Bandwidth by regression"
    if skipped:
        yield f"  {skipped}"
        return
    yield f"  {'unit':<8}{'stage':<24}{'sizes':>6}{'ms per MB (95 % interval)':>34}{'intercept ms':>14}{'R²':>7}{'MB/s':>9}"
    for fit in fits:
        name = f"{fit.stage} {STAGES[fit.stage - 1].name}"
        if fit.slope_ms_per_byte is None or fit.slope_low is None or fit.slope_high is None:
            yield f"  {fit.unit:<8}{name:<24}{fit.points:>6}  none: {fit.reason}"
            continue
        slope, low, high = (f"{1024**2 * value:.4g}" for value in (fit.slope_ms_per_byte, fit.slope_low, fit.slope_high))
        bandwidth = f"{fit.bandwidth:.0f}" if fit.bandwidth else "null"
        numbers = f"{f'{slope} ({low} to {high})':>34}{fit.intercept_ms:>14.4g}{fit.r2:>7.2f}{bandwidth:>9}"
        yield f"  {fit.unit:<8}{name:<24}{fit.points:>6}{numbers}" + (f"  {fit.reason}" if fit.reason else "")
    yield ""
    yield MEANING


def _times(table: Mapping[LookupKey, LookupRecord]) -> Iterator[str]:
    yield "Times by unit and stage over all sizes, in ms"
    yield f"  {'unit':<8}{'stage':<24}{'least':>10}{'mean':>10}{'most':>10}{'of it computing':>18}"
    grouped: dict[tuple[str, int], list[LookupRecord]] = {}
    for key, record in table.items():
        if record.total_time is not None:
            grouped.setdefault((key.unit, key.stage), []).append(record)
    for (unit, stage), records in grouped.items():
        totals = [record.total_time or 0.0 for record in records]
        known = [record.compute_time for record in records if record.compute_time is not None]
        computing = f"{sum(known) / len(known):.4g}" if known else "not known"
        yield (f"  {unit:<8}{f'{stage} {STAGES[stage - 1].name}':<24}{min(totals):>10.4g}{sum(totals) / len(totals):>10.4g}"
               f"{max(totals):>10.4g}{computing:>18}")


def _left_out(table: Mapping[LookupKey, LookupRecord]) -> Iterator[str]:
    failed = {key: record.reason for key, record in table.items() if record.total_time is None}
    if failed:
        yield "Failed"
        yield from (f"  {key}: {reason}" for key, reason in failed.items())
