"""The models of an evaluation: analysed, predicted, and read from the dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hase.benchmark.load.loads import describe_load
from hase.inference.core.predictor import Predictor, predict
from hase.inference.core.sources import record_of
from hase.learned.sharing.slices import busy_share
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.records.blocks import Block
from hase.records.dataset_files import read_journal
from hase.records.dataset_tables import energy_warnings, model_rows, model_sessions
from hase.records.host_pace import paced_rows
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import ENERGY, Measurement
from hase.utils import cli
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.core.answers import Prediction
    from hase.inference.core.energy import EnergyPrediction
    from hase.inference.core.host_pace import HostPace
    from hase.inference.core.run_modes import RunMode

log = get_logger("evaluator")
IDLE_BELOW = 0.02  # share of the time: counters of an idle GPU are not exactly 0, and a probe's run is sometimes slow by itself


@dataclass
class EvaluatedModel:
    """One model to evaluate: its record, its file if it is to run, what else runs (by metrics, and by the sharing probe), the
    host pace for its prediction (as for `predict`), and the results. A model that `failed` is left out. `probes_us`: time of
    the host probe during each session. `energies_j`: of a run, measured soundly in sessions; `energy`: the predicted one."""

    record: ModelRecord
    path: Path | None = None
    level: float = 0.0
    background: str = ""
    load: Mapping[str, float] = field(default_factory=dict)
    co_runner: CoRunner | None = None
    host_pace: HostPace | None = None
    with_lookup: Prediction | None = None
    strict: Prediction | None = None
    samples_ms: list[float] = field(default_factory=list)
    memory_mib: float | None = None
    canaries: list[float] = field(default_factory=list)
    probes_us: list[float] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)
    energy: EnergyPrediction | None = None
    failed: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing else runs, as far as is known: no load was started, and probe or metrics show almost none."""
        if self.level or (self.co_runner is None and not self.load):
            return not self.level
        share = busy_share(self.load) if self.co_runner is None else self.co_runner.busy_share
        return share is not None and share < IDLE_BELOW

    @property
    def name(self) -> str:
        """The model's name, with the level and background under which it runs."""
        return self.record.model + (f" at {describe_load(self.level, self.background)}" if self.level else "")

    def next_to(self, level: float, background: str, load: Mapping[str, float], co_runner: CoRunner | None) -> EvaluatedModel:
        """The same model, not measured yet, together with other work."""
        return EvaluatedModel(record=self.record, path=self.path, level=level, background=background, load=load,
                              co_runner=co_runner)


class Failures(dict[str, str]):
    """Why models failed, by name; each failure is logged when it happens."""

    def add(self, name: str, reason: UserError) -> None:
        self[name] = str(reason)
        log.error("%s", reason if name in str(reason) else f"{name}: {reason}")

    @contextmanager
    def costing(self, name: str, model: EvaluatedModel | None = None) -> Iterator[None]:
        """A block in which an error is recorded as the failure of one model. A bug in Hase also leaves its traceback in the
        log.

        Args:
            name: of the model.
            model: marked as failed, if it exists already.
        """
        try:
            yield
        except UserError as error:
            reason = error
        except Exception as fault:  # one model must not end the evaluation; the report and the exit code show it
            log.exception("%s: a bug in Hase", name)
            reason = UserError(f"{name}: {type(fault).__name__}: {fault} (a bug in Hase; the log has its traceback)")
        else:
            return
        if model:
            model.failed = True
        self.add(name, reason)


def models_of(paths: Iterable[Path], dims: Mapping[str, Sequence[int]], flavour: Flavour,
              failures: Failures, static: bool = False) -> list[EvaluatedModel]:
    """The models of `paths`, analysed: one per combination of the sizes in `dims` that are dynamic in the model.

    Raises:
        UserError: one of `dims` is dynamic in no model.
    """
    models: list[EvaluatedModel] = []
    unused = set(dims)
    sized: list[tuple[Path, dict[str, int]]] = []
    for path in dict.fromkeys(paths):
        with failures.costing(path.name):
            sizes = own_sizes(path, dims)
            unused -= set(sizes[0])
            sized += [(path, size) for size in sizes]
    for path, size in cli.progress(sized, "analysing"):
        with failures.costing(path.name):
            models.append(EvaluatedModel(record=record_of(path, flavour, size, static), path=path))
    if unused and models:
        raise UserError(f"--dim {', '.join(sorted(unused))}: not a dynamic dimension of any of these models")
    return models


def models_in_dataset(folder: Path, records: Mapping[str, ModelRecord], metrics: Sequence[str],
                      label: str) -> list[EvaluatedModel]:
    """The good measurements by `label` in the dataset in `folder`: one entry per model of `records`, level, background and
    machine. Idle measurements on a disturbed host are left out."""
    sessions = [session for session in model_sessions(read_journal(folder)) if "latency" in session.labels]
    if not sessions:
        return []
    rows = paced_rows(pd.DataFrame(model_rows(sessions, {})))
    held_up = set(rows.index[~rows["undisturbed"]])
    if held_up:
        log.warning("%d latencies from a disturbed host are left out; the collector measures them again", len(held_up))
    measured: dict[tuple[str, tuple[float, str], str], list[tuple[Block, Measurement]]] = defaultdict(list)
    energies_j: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if (of_runs := session.labels.get(ENERGY)) and label == "latency" and of_runs.status == "ok" and not (
                energy_warnings(of_runs, session.labels["latency"])):
            energies_j[session.model] += of_runs.quantities["energy_j"]
    for place, (model, block, labels) in enumerate(sessions):
        measurement = labels.get(label)
        if place not in held_up and measurement and measurement.status == "ok" and measurement.samples_ms and model in records:
            measured[model, block.load, block.machine].append((block, measurement))
    models = []
    for (model, (level, background), _), of_model in measured.items():
        metrics_before = of_model[-1][0].background
        load = {name: metrics_before[name] for name in metrics if name in metrics_before} if level else {}
        models.append(EvaluatedModel(record=records[model], level=level, background=background, load=load,
                                     samples_ms=[sample for _, measurement in of_model for sample in measurement.samples_ms],
                                     energies_j=[] if level else energies_j.get(model, [])))
    return sorted(models, key=lambda model: (model.level, model.background, model.record.model))


def predict_model(model: EvaluatedModel, target: str, run_mode: RunMode, workspace: Workspace, force: bool,
                  failures: Failures, with_energy: bool = False) -> None:
    """Adds the predictions of a model: with look-up, and strict; `with_energy` also its energy with look-up, if that was
    measured."""
    with failures.costing(model.name, model):
        model.with_lookup, model.strict = (
            predict(model.record, target=target, strict=strict, load=model.load, run_mode=run_mode, workspace=workspace,
                    force=force, co_runner=model.co_runner, host_pace=model.host_pace)
            for strict in (False, True))
        if with_energy and model.energies_j:
            model.energy = Predictor(workspace, target, force=force).energy(model.record, run_mode=run_mode,
                                                                            host_pace=model.host_pace)
