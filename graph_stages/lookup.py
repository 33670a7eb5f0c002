"""`results/lookup_table.json`: the times of each stage on each unit at each size, for planners; in ms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from graph_stages.records import StageRecord
from graph_stages.regression import Regression
from utils import files
from utils.errors import UserError
from utils.frozen import Frozen

LOOKUP = "lookup_table.json"
REMAKE = "python graph_stages/profile_stages.py --analyze"


class LookupKey(NamedTuple):
    """What a record is of. As text `{nodes},{edges},{unit},{stage}`, stages count from 1."""

    nodes: int
    edges: int
    unit: str
    stage: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class LookupRecord(Frozen):
    """Times in ms; None where they are not known, and `reason` says why.

    Attributes:
        total_time: mean of the runs with inputs and outputs in the host's memory.
        std: of the runs, around that mean.
        transfer_time: the part that moves data; `transfer_by` says how it is known. `measured`: total less the mean of the runs
            with the data in the unit's own memory. `regression`: slope · bytes, which also has the unit's own reading and
            writing in it.
        compute_time: total less transfer.
        median_time: of the runs that total_time is the mean of.
        resident_median_time: of those with the data in the unit's own memory. Plans are made of medians, since a few slow runs
            spoil a mean.
        runtime, ran_on: what really ran it. "": the table does not say, as one from elsewhere.
        reason: why values are missing.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # tables of other tools may say more

    compute_time: float | None
    transfer_time: float | None
    total_time: float | None
    std: float | None
    transfer_by: Literal["measured", "regression", ""] = ""
    median_time: float | None = None
    resident_median_time: float | None = None
    runtime: str = ""
    ran_on: str = ""
    reason: str = ""


def lookup_table(records: Iterable[StageRecord], fits: Mapping[tuple[str, int], Regression],
                 no_fit: str) -> dict[LookupKey, LookupRecord]:
    """The table of all records, failed ones too.

    Args:
        records: the measurements.
        fits: by unit and stage.
        no_fit: why there is no regression where `fits` has none.

    Raises:
        UserError: a size was measured on several graphs, which the table's keys can't tell apart.
    """
    table: dict[LookupKey, LookupRecord] = {}
    graphs: dict[LookupKey, str] = {}
    for record in records:
        key = LookupKey(record.nodes, record.edges, record.unit, record.stage)
        if key in table:
            raise UserError(f"{key}: measured twice, on the graphs {graphs[key]} and {record.graph}; measure them in two "
                            "workspaces (--workspace)")
        table[key], graphs[key] = _looked_up(record, fits.get((record.unit, record.stage)), no_fit), record.graph
    return table


def _looked_up(record: StageRecord, fit: Regression | None, no_fit: str) -> LookupRecord:
    facts: dict[str, Any] = {"runtime": record.runtime, "ran_on": record.ran_on}
    if not record.samples_ms:
        return LookupRecord(compute_time=None, transfer_time=None, total_time=None, std=None,
                            reason=f"{record.status}: {record.error}", **facts)
    total_ms, std_ms = record.statistics["mean"], record.statistics["std"]
    facts |= {"median_time": record.statistics["median"], "resident_median_time": record.resident_statistics.get("median")}
    if record.resident_samples_ms:
        compute_ms = min(record.resident_statistics["mean"], total_ms)
        return LookupRecord(compute_time=compute_ms, transfer_time=total_ms - compute_ms, total_time=total_ms, std=std_ms,
                            transfer_by="measured", **facts)
    transfer_ms = fit.transfer_ms(record.bytes_in + record.bytes_out, total_ms) if fit else None
    if transfer_ms is None:
        return LookupRecord(compute_time=None, transfer_time=None, total_time=total_ms, std=std_ms,
                            reason=fit.reason if fit else no_fit, **facts)
    return LookupRecord(compute_time=total_ms - transfer_ms, transfer_time=transfer_ms, total_time=total_ms, std=std_ms,
                        transfer_by="regression", **facts)


def write_lookup(folder: Path, table: Mapping[LookupKey, LookupRecord]) -> Path:
    path = folder / LOOKUP
    files.write_json(path, {str(key): record.model_dump() for key, record in table.items()})
    return path


def read_lookup(folder: Path) -> dict[LookupKey, LookupRecord]:
    """The table in a folder of results.

    Raises:
        UserError: it is missing or damaged.
    """
    path = folder / LOOKUP
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with: {REMAKE}")
    try:
        table = TypeAdapter(dict[str, LookupRecord]).validate_python(files.read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: damaged at {where}: {first['msg']}; make it anew: {REMAKE}") from None
    return {_key(path, text): record for text, record in table.items()}


def _key(path: Path, text: str) -> LookupKey:
    try:
        nodes, edges, unit, stage = text.split(",")
        return LookupKey(int(nodes), int(edges), unit, int(stage))
    except ValueError:
        raise UserError(f"{path}: the key {text!r} is not nodes,edges,unit,stage; make the table anew: {REMAKE}") from None
