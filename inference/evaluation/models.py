"""The models of an evaluation, with their predictions: files of models, a list with measured latencies, or a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from hase.benchmark.measuring.driver import describe_load
from hase.inference.library.predictor import Predictor, predict
from hase.inference.prediction.sources import source_record
from hase.learned.sharing import busy_share
from hase.ort_analysis.isolated.analysis import own_sizes
from hase.records.dataset_files import read_journal
from hase.records.dataset_tables import energy_warnings, model_sessions, model_table_rows
from hase.records.host_pace import paced_rows
from hase.records.kernel_record import ModelRecord
from hase.records.measurement import ENERGY, Block, Measurement
from hase.utils import files
from hase.utils.errors import UserError
from hase.utils.files import read_record
from hase.utils.fingerprint import Flavour
from hase.utils.lazy import pandas as pd
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace

if TYPE_CHECKING:
    from hase.graph_model.simulation.sharing import CoRunner
    from hase.inference.prediction.answers import Prediction
    from hase.inference.prediction.conditions import HostPace, RunMode
    from hase.inference.prediction.energy import EnergyPrediction

MANIFEST = "kinds.json"
MANIFEST_VERSION = 1
IDLE_BELOW = 0.02  # busy share: counters of an idle GPU are not exactly 0, and a probe's run is sometimes slow by itself
log = get_logger("evaluator")


class ListedModel(BaseModel):
    """One model of a `Manifest`.

    Attributes:
        kind: groups the rows of the evaluation's table.
        opset: of ONNX's own domain.
        dims: sizes of its dynamic dimensions; empty if all are fixed.
        tiny: it takes far less than a millisecond on purpose.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    file: str
    kind: str
    opset: int
    dims: dict[str, int] = {}
    tiny: bool = False


class Manifest(BaseModel):
    """A list of the models in a folder, as recipes/kinds/make_models.py writes it, with the versions of the packages that made
    them, and reasons why other models could not be made (`skipped`). Names are unique."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = MANIFEST_VERSION
    versions: dict[str, str]
    models: tuple[ListedModel, ...]
    skipped: dict[str, str] = {}

    def chosen(self, names: Sequence[str]) -> list[ListedModel]:
        """The models with these names, in the list's order; all if no name is given."""
        return [model for model in self.models if not names or model.name in names]


def read_manifest(path: Path) -> Manifest:
    """Reads the list in a file, or in a folder under its usual name."""
    file = path / MANIFEST if path.is_dir() else path
    return read_record(file, Manifest, MANIFEST_VERSION, f"python recipes/kinds/make_models.py --out {file.parent}")


class GpuLatency(BaseModel):
    """The latency of a listed model on a GPU: median and 95th percentile of `runs` runs, or why there is none (`error`).

    Attributes:
        way: `static`: its dynamic dimensions were fixed; `dynamic`: they were not.
        io: `device`: tensors stay on the device; `host`: numpy in and out.
        host_probe_us: time of the host probe meanwhile (benchmark/measuring/quiet_host.py).
    """

    model_config = ConfigDict(frozen=True)

    model: str
    way: str
    latency_ms: float | None = None
    p95_ms: float | None = None
    runs: int = 0
    io: str = ""
    host_probe_us: float | None = None
    error: str = ""


def read_latencies(path: Path) -> dict[str, GpuLatency]:
    """Reads the latencies that recipes/kinds/compare_on_gpu.py measured, by model."""
    document = files.read_json(path)
    try:
        rows = [GpuLatency.model_validate(row) for row in document["models"]]
    except (KeyError, TypeError, ValidationError):
        raise UserError(f"{path}: no latencies of listed models; make them with: python recipes/kinds/compare_on_gpu.py"
                        ) from None
    return {row.model: row for row in rows if row.latency_ms}


@dataclass
class EvaluatedModel:
    """One model to evaluate, with its predictions and measurements; ignored if `failed`.

    Attributes:
        path: its file, if it is to run.
        load, co_runner: the other work on the device, by metrics and by the sharing probe.
        with_lookup, strict: predictions with measured kernels looked up, and with all kernels predicted.
        probes_us: time of the host probe during each session.
        energies_j: valid measurements of a run's energy, by session; `energy` is the predicted one.
    """

    record: ModelRecord
    path: Path | None = None
    kind: str | None = None
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
        """Whether, as far as known, nothing else runs: no load was started, and the probe or metrics show almost none."""
        if self.level:
            return False
        if self.co_runner is None and not self.load:
            return True
        share = busy_share(self.load) if self.co_runner is None else self.co_runner.busy_share
        return share is not None and share < IDLE_BELOW

    @property
    def name(self) -> str:
        """The model's name, with the load under which it runs."""
        return self.record.model + (f" at {describe_load(self.level, self.background)}" if self.level else "")

    def next_to(self, level: float, background: str, load: Mapping[str, float], co_runner: CoRunner | None) -> EvaluatedModel:
        """The same model under another load, without results."""
        return EvaluatedModel(record=self.record, path=self.path, kind=self.kind, level=level, background=background, load=load,
                              co_runner=co_runner)


class Failures(dict[str, str]):
    """Why models failed, by name. Each failure is logged when it happens."""

    def add(self, name: str, reason: UserError) -> None:
        self[name] = str(reason)
        log.error("%s", reason if name in str(reason) else f"{name}: {reason}")

    @contextmanager
    def catching(self, name: str, model: EvaluatedModel | None = None) -> Iterator[None]:
        """Turns an error in a block into the failure of one model, so that the evaluation continues. Bugs log a traceback."""
        try:
            yield
        except Exception as error:  # the report and the exit code show it
            reason = error if isinstance(error, UserError) else UserError(
                f"{name}: {type(error).__name__}: {error} (a bug in Hase; the log has its traceback)")
            if reason is not error:
                log.exception("%s: a bug in Hase", name)
            if model:
                model.failed = True
            self.add(name, reason)


def models_in_files(paths: Iterable[Path], dims: Mapping[str, Sequence[int]], flavour: Flavour,
              failures: Failures, static: bool = False) -> list[EvaluatedModel]:
    """Analyses the models in files: one for each combination of the sizes in `dims` that are dynamic in the model."""
    models: list[EvaluatedModel] = []
    unused = set(dims)
    sized: list[tuple[Path, dict[str, int]]] = []
    for path in dict.fromkeys(paths):
        with failures.catching(path.name):
            sizes = own_sizes(path, dims)
            unused -= set(sizes[0])
            sized += [(path, size) for size in sizes]
    for path, size in progress(sized, "analysing"):
        with failures.catching(path.name):
            models.append(EvaluatedModel(record=source_record(path, flavour, size, static), path=path))
    if unused and models:
        raise UserError(f"--dim {', '.join(sorted(unused))}: not a dynamic dimension of any of these models")
    return models


def listed_models(models: Sequence[ListedModel], folder: Path, flavour: Flavour, failures: Failures,
                  latencies: Mapping[str, GpuLatency] | None = None) -> list[EvaluatedModel]:
    """Analyses the models of a list; with `latencies` only the measured ones, with their times."""
    evaluated = []
    for model in progress(models, "analysing"):
        with failures.catching(model.name):
            measured = latencies.get(model.name) if latencies is not None else None
            if latencies is not None and measured is None:
                raise UserError(f"{model.name}: not measured")
            path = folder / model.file
            evaluated.append(EvaluatedModel(
                record=source_record(path, flavour, model.dims), path=path, kind=model.kind,
                samples_ms=[measured.latency_ms] if measured and measured.latency_ms else [],
                probes_us=[measured.host_probe_us] if measured and measured.host_probe_us else []))
    return evaluated


def models_in_dataset(folder: Path, records: Mapping[str, ModelRecord], metrics: Sequence[str],
                      label: str) -> list[EvaluatedModel]:
    """The valid measurements with `label` in a dataset: one entry for each model of `records`, load and machine. Idle
    measurements on a disturbed host are left out."""
    sessions = [session for session in model_sessions(read_journal(folder)) if "latency" in session.labels]
    if not sessions:
        return []
    rows = paced_rows(pd.DataFrame(model_table_rows(sessions, {})))
    disturbed = set(rows.index[~rows["undisturbed"]])
    if disturbed:
        log.warning("%d latencies from a disturbed host are left out; the collector measures them again", len(disturbed))
    measured: dict[tuple[str, tuple[float, str], str], list[tuple[Block, Measurement]]] = defaultdict(list)
    energies_j: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if (energy := session.labels.get(ENERGY)) and label == "latency" and energy.status == "ok" and not (
                energy_warnings(energy, session.labels["latency"])):
            energies_j[session.model] += energy.quantities["energy_j"]
    for index, (model, block, labels) in enumerate(sessions):
        measurement = labels.get(label)
        if index in disturbed or model not in records:
            continue
        if measurement and measurement.status == "ok" and measurement.samples_ms:
            measured[model, block.load, block.machine].append((block, measurement))
    models = []
    for (model, (level, background), _), sessions_of_model in measured.items():
        metrics_before = sessions_of_model[-1][0].background
        load = {name: metrics_before[name] for name in metrics if name in metrics_before} if level else {}
        models.append(EvaluatedModel(record=records[model], level=level, background=background, load=load,
                                     samples_ms=[sample for _, measurement in sessions_of_model
                                                 for sample in measurement.samples_ms],
                                     energies_j=[] if level else energies_j.get(model, [])))
    return sorted(models, key=lambda model: (model.level, model.background, model.record.model))


def predict_model(model: EvaluatedModel, target: str, run_mode: RunMode, workspace: Workspace, force: bool,
                  failures: Failures, with_energy: bool = False) -> None:
    """Predicts a model twice, with measured kernels looked up and with all kernels predicted; `with_energy` adds the energy if
    it was measured."""
    with failures.catching(model.name, model):
        record = model.record
        source, sizes = (model.path, record.dims) if record.guessed and model.path else (record, None)
        model.with_lookup, model.strict = (
            predict(source, dims=sizes, static=sizes is not None and record.static, target=target, strict=strict,
                    load=model.load, run_mode=run_mode, workspace=workspace, force=force, co_runner=model.co_runner,
                    host_pace=model.host_pace) for strict in (False, True))
        if with_energy and model.energies_j:
            model.energy = Predictor(workspace, target, force=force).energy(model.record, run_mode=run_mode,
                                                                            host_pace=model.host_pace)
