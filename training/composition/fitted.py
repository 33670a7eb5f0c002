"""How kernel times make a model's time: latency = α·Σ + β, or α·Σ + γ·nodes + β, fitted for a target.

Σ is the sum of the kernels' times under one label, or their longest path through the graph. α stands for what kernels
meet in a model and not alone (caches, layouts), β for what a run costs besides its kernels, and γ for what a node costs
besides its kernel's time: the host's dispatch, or, where it is negative, what the profiler added to a label. All are
fitted on relative errors, so that short models count as much as long ones; α is positive and β not negative.
History of the schema: version 2 says the groups of the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from graph_model.simulation.pipeline import PipelineCosts
from ort_analysis.records.kernel_costs import is_control_flow
from ort_analysis.records.kernel_record import Frozen, ModelRecord
from utils import files
from utils.errors import UserError
from utils.paths import COMPOSITION, SIDECAR
from utils.timing import ErrorStatistics

COMPOSITION_VERSION = 2
FIT = "python training/fit_composition.py"
Kind = Literal["sum", "sum_nodes", "critical_path", "pipeline"]
KINDS: tuple[Kind, ...] = ("sum", "sum_nodes", "critical_path")  # those that are a line over Σ or over the longest path
COVERAGE = 0.9  # of an interval
NEARLY_ALL = 0.95  # of the kernel time measured: then the errors are those of models whose kernels are known
LEAST_SHARE = 0.1  # of α·Σ: a negative γ never takes more than the rest
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Formula(Frozen):
    """One way of composing: how a model's time follows from its kernels' times under a label.

    Attributes:
        alpha, beta_ms: of the line over Σ or the longest path.
        node_ms: γ, 0 but for kind `sum_nodes`.
        costs: of kind `pipeline`, which takes these and no line.
    """

    label: str
    kind: Kind
    alpha: float
    beta_ms: float
    node_ms: float = 0.0
    costs: PipelineCosts | None = None

    def formula(self) -> dict[str, Any]:
        """These fields alone, by name, of a candidate or a composition."""
        return {name: getattr(self, name) for name in Formula.model_fields}


class Candidate(Formula):
    """A formula that was tried, and how far it is off; errors are ratios, not per cent.

    Attributes:
        cv_mape, cv_max: of models that were left out of the fit; None where there are too few models to leave one out.
        fit_mape: of the models of the fit.
        plain_mape: with α = 1, β = 0 and γ = 0, for reference.
        measured_cv_mape: of kind `pipeline`, with measured kernels in place of predicted ones: the composition alone.
    """

    measured_cv_mape: float | None = None
    cv_mape: float | None
    cv_max: float | None
    fit_mape: float
    plain_mape: float


class FittedModel(Frozen):
    """A model of the fit under the composition used, its group, and its measured and left-out (or, with one model, fitted)
    latency, ms."""

    model: str
    group: str
    measured_ms: float
    predicted_ms: float


class ErrorRange(Frozen):
    """Between which multiples of the prediction a model's latency lies, in COVERAGE of all cases.

    Attributes:
        low, high: the multiples.
        coverage: the share of models that lay in an interval drawn from the other families' errors alone; a ratio.
    """

    low: float
    high: float
    coverage: float


class HostIo(Frozen):
    """What numpy arrays in and out add to a run: a part of its own, and one for each MiB copied in and out.

    Attributes:
        models: of the fit.
        left_out: errors of latencies with kernels predicted and families left out; None where there is one family.
        interval: of such predictions.
    """

    run_ms: float
    in_ms_per_mib: float
    out_ms_per_mib: float
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class GraphReplay(Frozen):
    """What a model's run costs that was captured as a CUDA graph: on both tracks, where the host does next to nothing.

    Other attributes are those of HostIo.
    """

    costs: PipelineCosts
    models: int
    left_out: ErrorStatistics | None = None
    interval: ErrorRange | None = None


class Composition(Formula):
    """`composition.json`: the composition used for a target, and the candidates that it was chosen from.

    Attributes:
        left_out: what was left out at a time: `family`, `model`, or `nothing` where only one model was measured.
        dataset_sha256: of the kernel table behind the predictors.
        models_sha256: of the table of models' latencies.
        predictors_created: when the predictors were trained whose choices it shares.
        models: of the fit.
        interval: of predictions with kernels predicted; None where too few models were left out to tell.
        interval_measured: of predictions with all kernels measured; None where that is not known.
        host_io: what numpy arrays in and out add; None where no models were run so.
        cuda_graph: the same of models captured as CUDA graphs.
        assumed: no model was ever measured on this machine: label, kind and constants are stated defaults
            (training/composition/default_composition.py).
        probe_us: what the probe of the host (quiet_host) takes at the pace that predictions hold for, in microseconds; None
            where it was not recorded.
    """

    version: int = COMPOSITION_VERSION
    left_out: Literal["family", "model", "nothing"]
    dataset_sha256: str
    models_sha256: str
    predictors_created: str
    candidates: tuple[Candidate, ...]
    models: tuple[FittedModel, ...]
    interval: ErrorRange | None = None
    interval_measured: ErrorRange | None = None
    host_io: HostIo | None = None
    cuda_graph: GraphReplay | None = None
    assumed: bool = False
    probe_us: float | None = None

    def interval_for(self, measured_share: float) -> ErrorRange | None:
        """The interval of predictions of which such a share of the kernels' time was measured: with nearly all of it, that of
        measured kernels."""
        return self.interval_measured if self.interval_measured and measured_share >= NEARLY_ALL else self.interval


def composition_path(folder: Path) -> Path:
    return folder / COMPOSITION


def read_composition(folder: Path, trained_on: str | None = None) -> Composition:
    """The composition of the target whose predictors lie in `folder`.

    Args:
        folder: the predictors' own.
        trained_on: the hash of the predictors' dataset; None: it is read from their sidecar.

    Raises:
        UserError: none was fitted, or it can't be read, or the predictors were trained on other data since.
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
    """How many nodes run that move data; the others only rename a tensor, or hold a body, and cost next to nothing."""
    return sum(node.runs for node in record.nodes
               if (kernel := record.kernel_of(node)).moves_data and not is_control_flow(kernel))


def copied_mib(record: ModelRecord) -> tuple[float, float]:
    """The MiB that a run with numpy arrays copies in and out."""
    into, out = (sum(tensor.bytes for tensor in tensors.values()) / 2**20 for tensors in (record.inputs, record.outputs))
    return into, out


def host_io_ms(costs: HostIo, copied: Sequence[float]) -> float:
    """What numpy arrays in and out add to a run that copies so many MiB in and out."""
    into, out = copied
    return costs.run_ms + costs.in_ms_per_mib * into + costs.out_ms_per_mib * out


def latency_ms(line: Line | Formula, base_ms: Floats | float, nodes: Floats | float) -> Floats:
    """The latency of models (ms) from their Σ or longest path (ms) and their number of working nodes."""
    total = line.alpha * np.asarray(base_ms) + line.node_ms * np.asarray(nodes) + line.beta_ms
    return np.maximum(total, LEAST_SHARE * line.alpha * np.asarray(base_ms))
