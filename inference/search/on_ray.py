"""Runs a search on a Ray cluster, with Ray Data.

One task produces batches of choices, and actors on all machines evaluate them with the same `Evaluator` as without Ray. A row
of the data is a pickled batch. Ray Data keeps the order, and reads only a few batches ahead, so memory does not grow.
Unfinished batches of a lost machine are evaluated again elsewhere.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hase.inference.library.predictor import batches
from hase.inference.search.evaluating import Evaluator, SearchCandidate, SearchQuestion
from hase.inference.search.spaces import space_of
from hase.utils.errors import UserError
from hase.utils.files import temporary_folder
from hase.utils.lazy import pyarrow, ray
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.ray_cluster import RAY, connected

log = get_logger("search")
CODE = ("utils", "records", "runtimes", "model_zoo", "ort_analysis", "kernel_model", "benchmark",
        "graph_model", "overlap_simulator.py", "learned", "training", "inference")
PACKAGES = {**RAY, "pyarrow": "search"}
SENT_FILES = {"space": ".py", "score": ".csv"}  # attributes of a question that can name a file to send, with its suffix
SAME_PACKAGES = "install the same packages on all machines of the cluster"
COLUMN = "batch"


class Failed(NamedTuple):
    """Stands for a batch that could not be evaluated, with the reason for the user."""

    why: str


class ClusterWork(NamedTuple):
    """The work for the machines of a cluster.

    Attributes:
        skipped: number of candidates that were searched before.
        size: number of candidates in a batch.
        folder: the driver's working directory, for relative paths.
        learned: the predictors' files, by their paths in the workspace (`Evaluator.predictor_files`).
        sent: contents of the files that the question names: the space, if it is a Python file, and a table of scores.
    """

    question: SearchQuestion
    skipped: int
    size: int
    folder: Path
    learned: Mapping[str, bytes]
    sent: Mapping[str, bytes]


class RemoteEvaluator:
    """An actor (a Ray process) that evaluates batches."""

    def __init__(self, work: ClusterWork) -> None:
        self._open = ExitStack()
        self._evaluate: Callable[[Sequence[Any]], list[SearchCandidate]] | None = None
        self._failed = Failed("")
        try:
            self._evaluate = _evaluator(work, self._open.enter_context(temporary_folder()))
        except (UserError, ImportError) as error:
            self._failed = Failed(_why(error))

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """The candidates of a batch of choices."""
        [choices] = _values(table)
        if self._evaluate is None or isinstance(choices, Failed):
            return _table(choices if isinstance(choices, Failed) else self._failed)
        try:
            return _table(self._evaluate(choices))
        except ImportError as error:  # from a package that is imported at first use
            return _table(Failed(_why(error)))


def evaluated_on_ray(evaluator: Evaluator, skipped: int, size: int, address: str,
                     processes: int | None = None) -> Generator[SearchCandidate]:
    """The candidates of a space, in order, evaluated on a cluster in batches of `size`. The first `skipped` candidates are left
    out. `address` is HOST:PORT, or `auto`; `processes` is by default one for each CPU."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # otherwise Ray warns about each actor of Ray Data
    with connected(address, CODE, PACKAGES):
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if not cpus:
            raise UserError("the Ray cluster has no CPUs that could work")
        count = min(processes or cpus, cpus)
        log.info("%d process%s on Ray", count, "es" * (count != 1))
        question = evaluator.portable_question
        sent = {name: Path(path).read_bytes() for name in SENT_FILES
                if (path := getattr(question, name)) and path.endswith(SENT_FILES[name])}
        try:
            for table in _tables(ClusterWork(question, skipped, size, Path.cwd(), evaluator.predictor_files, sent), count):
                for candidates in _values(table):
                    if isinstance(candidates, Failed):
                        raise UserError(candidates.why)
                    yield from candidates
        except ray.exceptions.RayTaskError:
            raise  # a bug: keep its traceback
        except (ray.exceptions.RayError, ray.data.exceptions.ExecutionTimeoutError) as error:
            why = str(error).strip().splitlines()[-1]  # earlier lines say where
            raise UserError(f"--ray {address}: {type(error).__name__}: {why}" + (
                f"; {SAME_PACKAGES}" if why.startswith(ModuleNotFoundError.__name__) else "")) from None


def _tables(work: ClusterWork, count: int) -> Iterator[pyarrow.Table]:
    """The evaluated batches, in order."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # byte: each row is its own block, and is sent as soon as it is ready
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors that it logs are also raised
    warnings.filterwarnings("ignore", module=r"ray\.data")  # such as: a short search can't use all actors
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    source = _source(work._replace(learned={}))
    choices = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=0, label_selector=here)
    evaluated = choices.map_batches(RemoteEvaluator, batch_size=None, batch_format="pyarrow", num_cpus=1,
                                    fn_constructor_args=(work,), compute=ray.data.ActorPoolStrategy(size=count))
    yield from evaluated.iter_batches(batch_size=None, batch_format="pyarrow")


def _source(work: ClusterWork) -> ray.data.Datasource:
    """A Ray data source in which one task produces all choices."""
    class Choices(ray.data.Datasource):
        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ray.data.ReadTask]:
            metadata = ray.data.block.BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ray.data.ReadTask(lambda: _choices(work), metadata)]

        def estimate_inmemory_data_size(self) -> None:
            return None

    return Choices()


def _choices(work: ClusterWork) -> Iterator[pyarrow.Table]:
    """The remaining choices in batches. Runs on the driver's machine, where all files are."""
    os.chdir(work.folder)
    question = work.question
    try:
        space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
        for batch in batches(islice(space.choices(), work.skipped, None), work.size):
            yield _table(batch)
    except UserError as error:
        yield _table(Failed(_why(error)))


def _evaluator(work: ClusterWork, folder: Path) -> Evaluator:
    """The evaluator of the driver's question on this machine. `folder` holds the files that it needs, and must remain."""
    with suppress(OSError):  # without this folder no relative path is found, and the candidates' errors say so
        os.chdir(work.folder)
    paths: dict[str, Any] = {name: str(folder / Path(getattr(work.question, name)).name) for name in work.sent}
    for path, content in [*((paths[name], content) for name, content in work.sent.items()), *work.learned.items()]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return Evaluator(work.question._replace(workspace=folder, **paths))


def _why(error: Exception) -> str:
    """An error in one line for the user."""
    return f"{platform.node()}: {error}; {SAME_PACKAGES}" if isinstance(error, ImportError) else str(error)


def _table(batch: object) -> pyarrow.Table:
    return pyarrow.table({COLUMN: pyarrow.array([pickle.dumps(batch)], pyarrow.large_binary())})


def _values(table: pyarrow.Table) -> list[Any]:
    return [pickle.loads(value) for value in table[COLUMN].to_pylist()]
