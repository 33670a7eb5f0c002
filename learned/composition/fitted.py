"""How a model's latency follows from the times of its kernels: latency = α·Σ + β, or α·Σ + γ·nodes + β, fitted for a target.

Σ is the sum of the kernels' times under one label, or the longest path through the graph. α corrects for conditions that
differ in a model (caches, layouts). β is the cost of a run besides its kernels. γ is the cost of a node besides its kernel: the
host's dispatch, or, if negative, what the profiler added to a label. The fit minimises relative errors, so that short models
count as much as long ones; α is positive and β not negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from hase.graph_model.simulation.pipeline import PipelineCosts
from hase.learned.composition.intervals import CalibratedInterval, ErrorRange
from hase.records.kernel_costs import is_control_flow
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import LONGEST_MS, Milliseconds, ModelMilliseconds
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.frozen import Frozen
from hase.utils.paths import COMPOSITION, SIDECAR
from hase.utils.timing import ErrorStatistics

COMPOSITION_VERSION = 4  # 4: intervals follow from how long the host works
FIT = "python training/fit_composition.py"
Kind = Literal["sum", "sum_nodes", "critical_path", "pipeline"]
KINDS: tuple[Kind, ...] = ("sum", "sum_nodes", "critical_path")  # the kinds that are a line over Σ or the longest path
NEARLY_ALL = 0.95  # share of the kernel time that is measured; from here on, errors are as with all kernels measured
LEAST_SHARE = 0.1  # of α·Σ, below which a negative γ never takes a latency
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Formula(Frozen):
    """How a model's latency follows from its kernels' times under a label.

    Attributes:
        alpha, beta_ms: of the line over Σ or the longest path.
        node_ms: γ; 0 except for kind `sum_nodes`.
        costs: only for kind `pipeline`, which uses them in place of a line.
    """

    label: str
    kind: Kind
    alpha: float = Field(gt=0, le=1e9)
    beta_ms: Milliseconds
    node_ms: float = Field(0.0, ge=-LONGEST_MS, le=LONGEST_MS)
    costs: PipelineCosts | None = None

    def formula(self) -> dict[str, Any]:
        """The fields of `Formula` alone, by name."""
        return {name: getattr(self, name) for name in Formula.model_fields}


class Candidate(Formula):
    """A formula that was tried, and its errors as ratios.

    Attributes:
        cv_mape, cv_max: mean and largest error of held-out models; None where there are too few models to hold one out.
        fit_mape: mean error of the models of the fit.
        plain_mape: the same with α = 1, β = 0 and γ = 0, for comparison.
        measured_cv_mape: as cv_mape, with measured kernels in place of predicted ones.
    """

    measured_cv_mape: float | None = None
    cv_mape: float | None
    cv_max: float | None
    fit_mape: float
    plain_mape: float


class FittedModel(Frozen):
    """A model of the fit: its group, its measured latency (ms), and the latency (ms) predicted with its group held out (or with
    the model in the fit, where it is the only one)."""

    model: str
    group: str
    measured_ms: ModelMilliseconds
    predicted_ms: ModelMilliseconds


class HostIo(Frozen):
    """What a run with numpy arrays takes longer: a constant, and a time for each MiB copied in and out.

    Attributes:
        models: how many were fitted to.
        left_out: errors of latencies with kernels predicted and families held out; None where there is only one family.
        interval: of such predictions.
    """

    run_ms: float
    in_ms_per_mib: float
    out_ms_per_mib: float
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class GraphReplay(Frozen):
    """The costs of a run that was captured as a CUDA graph; the host does next to nothing. The other attributes are those of
    `HostIo`."""

    costs: PipelineCosts
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class Composition(Formula):
    """`composition.json`: the composition used for a target, and the candidates that it was chosen from.

    Attributes:
        left_out: what was held out at a time: `family`, `model`, or `nothing` where only one model was measured.
        dataset_sha256: of the kernel table that the predictors were trained on.
        models_sha256: of the table of models' latencies.
        predictors_created: when the predictors that it was fitted with were trained.
        host_sha256: of what was learned of the host before; empty where nothing was.
        models: of the fit.
        interval: of predictions with all kernels predicted; None where too few models were held out.
        interval_measured: of predictions with all kernels measured; None where it is not known.
        calibrated: an interval that follows from what a prediction rests on; where it is there, it takes the place of the other
            two. None where too few families were held out, and for kinds other than `pipeline`.
        host_io: what runs with numpy arrays take longer; None where no models were run that way.
        cuda_graph: costs of models captured as CUDA graphs; None likewise.
        assumed: whether no model was ever measured on this machine, so that label, kind and constants are defaults
            (training/composition/default_composition.py).
        probe_us: what the host probe (quiet_host) takes at the host's usual pace, in microseconds; None where it was not
            recorded.
        overlap: whether kernels of some model overlap in its profile; where none do, a run takes longer than its longest path.
        forced: whether the user named the kind; else it was chosen among the candidates.
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
        """The interval of a prediction, given the share of its kernel time that was measured: `interval_measured` if that is
        nearly all, else `interval`."""
        return self.interval_measured if self.interval_measured and measured_share >= NEARLY_ALL else self.interval


def composition_path(folder: Path) -> Path:
    return folder / COMPOSITION


def read_composition(folder: Path, trained_on: str | None = None) -> Composition:
    """The composition of the target whose predictors lie in `folder`.

    Args:
        folder: of the predictors.
        trained_on: the hash of the predictors' dataset; None: it is read from their sidecar.

    Raises:
        UserError: there is none, it can't be read, or the predictors have been trained on other data since.
    """
    path = composition_path(folder)
    if not path.is_file():
        raise UserError(f"{folder}: no composition; fit one with: {FIT}")
    composition = files.read_record(path, Composition, COMPOSITION_VERSION, FIT)
    if trained_on is None:
        trained_on = files.read_json(folder / SIDECAR).get("dataset_sha256")
    if trained_on != composition.dataset_sha256:
        raise UserError(f"{path}: the predictors were trained on other data since it was fitted; fit it anew: {FIT}")
    return composition


class Line(NamedTuple):
    """latency = alpha · Σ + node_ms · nodes + beta_ms."""

    alpha: float
    beta_ms: float
    node_ms: float = 0.0


def working_nodes(record: ModelRecord) -> float:
    """How many nodes of a run move data. The others only rename a tensor or hold a body, and cost next to nothing."""
    return sum(node.runs for node in record.nodes
               if (kernel := record.kernel_of(node)).moves_data and not is_control_flow(kernel))


def copied_mib(record: ModelRecord) -> tuple[float, float]:
    """How many MiB a run with numpy arrays copies in and out."""
    into, out = (sum(tensor.bytes for tensor in tensors.values()) / 2**20 for tensors in (record.inputs, record.outputs))
    return into, out


def host_io_ms(costs: HostIo, copied: Sequence[float]) -> float:
    """How much longer (ms) a run with numpy arrays takes that copies these MiB in and out."""
    into, out = copied
    return costs.run_ms + costs.in_ms_per_mib * into + costs.out_ms_per_mib * out


def latency_ms(line: Line | Formula, base_ms: Floats | float, nodes: Floats | float) -> Floats:
    """The latency of models (ms) from their Σ or longest path (ms) and their number of working nodes."""
    total = line.alpha * np.asarray(base_ms) + line.node_ms * np.asarray(nodes) + line.beta_ms
    return np.maximum(total, LEAST_SHARE * line.alpha * np.asarray(base_ms))
