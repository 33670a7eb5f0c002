"""How a model's latency follows from the times of its kernels, fitted for a target: latency = α·Σ + γ·nodes + β, or for a GPU a
simulation of host and GPU (kind `pipeline`).

Σ is the sum of the kernels' times under one label, or the longest path through the graph. α corrects for conditions that differ
in a model (caches, layouts). β is the cost of a run besides its kernels. γ is the cost of a node besides its kernel: the host's
dispatch, or, if negative, what the profiler added to a label. The fit minimises relative errors, so that short models count as
much as long ones; α is positive and β not negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hase.graph_model.simulation.dag import build_dag, calculate_latency
from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.learned import target_files
from hase.learned.composition.intervals import CalibratedInterval, ErrorRange
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import LONGEST_MS, Milliseconds, ModelMilliseconds
from hase.utils import files
from hase.utils.config import Frozen
from hase.utils.errors import UserError
from hase.utils.timing import ErrorStatistics, Floats

COMPOSITION_VERSION = 4  # 4: intervals follow from how long the host works
Kind = Literal["sum", "sum_nodes", "critical_path", "pipeline"]
KINDS: tuple[Kind, ...] = ("sum", "sum_nodes", "critical_path")  # the kinds that are a line over Σ or the longest path
NEARLY_ALL = 0.95  # share of measured kernel time from which on errors are as with all kernels measured
LEAST_SHARE = 0.1  # of α·Σ: the shortest latency that a negative γ can lead to
Mask = npt.NDArray[np.bool_]


class Formula(Frozen):
    """How a model's latency follows from its kernels' times under a label. `node_ms` (γ) is 0 except for kind `sum_nodes`; kind
    `pipeline` uses `costs` in place of α, β and γ."""

    label: str
    kind: Kind
    alpha: float = Field(gt=0, le=1e9)
    beta_ms: Milliseconds
    node_ms: float = Field(0.0, ge=-LONGEST_MS, le=LONGEST_MS)
    costs: PipelineCosts | None = None

    def formula_fields(self) -> dict[str, Any]:
        """The fields of `Formula` alone, by name."""
        return {name: getattr(self, name) for name in Formula.model_fields}


class Candidate(Formula):
    """A formula that was tried, and its errors as ratios.

    Attributes:
        cv_mape, cv_max: mean and largest error of held-out models; None if there are too few models.
        measured_cv_mape: as cv_mape, with measured kernels.
        fit_mape: mean error of the models in the fit.
        plain_mape: the same with α = 1, β = 0 and γ = 0.
    """

    measured_cv_mape: float | None = None
    cv_mape: float | None
    cv_max: float | None
    fit_mape: float
    plain_mape: float


class FittedModel(Frozen):
    """A model of the fit, with measured and predicted latency; for the latter its group was held out (if not the only one)."""

    model: str
    group: str
    measured_ms: ModelMilliseconds
    predicted_ms: ModelMilliseconds


class HostIo(Frozen):
    """The additional time of a run with numpy arrays: a constant, and a time for each MiB copied in and out. `left_out`: errors
    of latencies from predicted kernels, with families held out; None with only one family."""

    run_ms: float
    in_ms_per_mib: float
    out_ms_per_mib: float
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class GraphReplay(Frozen):
    """The costs of a run that was captured as a CUDA graph, in which the host does almost nothing."""

    costs: PipelineCosts
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class Composition(Formula):
    """`composition.json`: the composition used for a target, and the candidates it was chosen from.

    Attributes:
        left_out: what was held out at a time: `family`, `model`, or `nothing` if only one model was measured.
        dataset_sha256: of the kernel table that the predictors were trained on.
        host_sha256: of what was learned about the host before; empty if nothing was.
        interval, interval_measured: if all kernels are predicted, or measured; None if too few models were held out.
        calibrated: replaces both intervals. None for kinds other than `pipeline`, or if too few families were held out.
        host_io, cuda_graph: None if no models were run that way.
        assumed: label, kind and constants are defaults, since no model was measured on this machine.
        probe_us: the time of the host probe (quiet_host) at the host's usual pace; None if not recorded.
        overlap: kernels of some model overlap in its profile; if not, a run takes longer than its longest path.
        forced: the user chose the kind.
    """

    version: int = COMPOSITION_VERSION
    left_out: Literal["family", "model", "nothing"]
    dataset_sha256: str
    models_sha256: str
    predictors_created: str
    host_sha256: str = ""
    candidates: tuple[Candidate, ...]
    models: tuple[FittedModel, ...]
    interval: ErrorRange | None = None
    interval_measured: ErrorRange | None = None
    calibrated: CalibratedInterval | None = None
    host_io: HostIo | None = None
    cuda_graph: GraphReplay | None = None
    assumed: bool = False
    probe_us: float | None = None
    overlap: bool = False
    forced: bool = False

    def interval_for(self, measured_share: float) -> ErrorRange | None:
        """The interval for a prediction of which this share of the kernel time was measured."""
        return self.interval_measured if self.interval_measured and measured_share >= NEARLY_ALL else self.interval


def read_composition(folder: Path, trained_on: str | None = None) -> Composition:
    """Reads a target's composition. `trained_on`: the hash of the predictors' dataset, by default from their sidecar. Raises
    UserError: missing or damaged, or the predictors were trained on other data since."""
    composition = target_files.COMPOSITION.needed(folder)
    if trained_on is None:
        trained_on = files.read_json(target_files.PREDICTORS.path(folder)).get("dataset_sha256")
    if trained_on != composition.dataset_sha256:
        raise UserError(f"{target_files.COMPOSITION.path(folder)}: the predictors were trained on other data since it was "
                        f"fitted; fit it anew: {target_files.FIT_COMPOSITION}")
    return composition


class Line(NamedTuple):
    """latency = alpha · Σ + node_ms · nodes + beta_ms."""

    alpha: float
    beta_ms: float
    node_ms: float = 0.0


def working_nodes(record: ModelRecord) -> float:
    """The number of nodes in a run that move data. Others only rename a tensor or hold a body, and cost almost nothing."""
    return sum(node.runs for node in record.nodes
               if (kernel := record.kernel_of(node)).moves_data and not is_control_flow(kernel))


def copied_mib(record: ModelRecord) -> tuple[float, float]:
    """The MiB that a run with numpy arrays copies in and out."""
    in_mib, out_mib = (sum(tensor.bytes for tensor in tensors.values()) / 2**20 for tensors in (record.inputs, record.outputs))
    return in_mib, out_mib


def host_io_ms(costs: HostIo, copied: Sequence[float]) -> float:
    """The additional time (ms) of a run with numpy arrays that copies these MiB in and out."""
    in_mib, out_mib = copied
    return costs.run_ms + costs.in_ms_per_mib * in_mib + costs.out_ms_per_mib * out_mib


def latency_ms(line: Line | Formula, base_ms: Floats | float, nodes: Floats | float) -> Floats:
    """The latency of models (ms) from their Σ or longest path (`base_ms`) and their number of working nodes."""
    total_ms = line.alpha * np.asarray(base_ms) + line.node_ms * np.asarray(nodes) + line.beta_ms
    return np.maximum(total_ms, LEAST_SHARE * line.alpha * np.asarray(base_ms))


def base_times_ms(record: ModelRecord, times_ms: Mapping[str, float]) -> dict[Kind, float]:
    """For each of KINDS, the sum or the longest path (ms) of a model that its line is over; `times_ms` is by kernel id."""
    dag = build_dag(record)
    node_times_ms = {node.name: times_ms[node.kernel_id] for node in record.nodes}
    return {kind: calculate_latency(dag, node_times_ms, "critical_path" if kind == "critical_path" else "sum")
            for kind in KINDS}
