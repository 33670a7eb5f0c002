"""A search on a Ray cluster, with Ray Data: one task gives the choices, batch after batch, and actors on all machines evaluate
them, with the same `Evaluator` as without Ray.

A row of the data is a batch, pickled. Ray Data keeps the order, and takes only as many batches ahead as the actors need soon,
so that memory does not grow. What a lost machine had not finished is evaluated again elsewhere.
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

from hase.inference.core.predictor import batches
from hase.inference.search.evaluating import Candidate, Evaluator, Question
from hase.inference.search.spaces import space_of
from hase.utils.errors import UserError
from hase.utils.lazy import pyarrow, ray
from hase.utils.logger import get_logger
from hase.utils.paths import Workspace
from hase.utils.ray_cluster import RAY, connected
from hase.utils.temporary import temporary_folder

log = get_logger("search")
CODE = ("hase/__init__.py", "utils", "records", "runtimes", "model_zoo", "ort_analysis", "kernel_model", "benchmark",
        "graph_model", "overlap_simulator.py", "learned", "training", "inference")
PACKAGES = {**RAY, "pyarrow": "requirements-search.txt"}
TRAVELS = {"space": ".py", "score": ".csv"}  # the attributes of a question that may name a file, and how it then ends
SAME_PACKAGES = "install the same packages on all machines of the cluster"
COLUMN = "batch"


class Failed(NamedTuple):
    """Stands for a batch, and says for the user why there is none."""

    why: str


class Work(NamedTuple):
    """What the machines of a cluster are to do.

    Attributes:
        question: as the driver has it.
        passed: how many candidates were searched before.
        size: of a batch.
        folder: the driver's current one, from which relative paths begin.
        learned: the files that predictions are made from, by their paths in the workspace (`Evaluator.learned`).
        asked: the content of the files that the question names: the space, if it is a Python file, and a table of scores; by
            the attribute that names each.
    """

    question: Question
    passed: int
    size: int
    folder: Path
    learned: Mapping[str, bytes]
    asked: Mapping[str, bytes]


class RemoteEvaluator:
    """The actor's own side: a process of Ray that evaluates batches."""

    def __init__(self, work: Work) -> None:
        self._open = ExitStack()
        self._evaluate: Callable[[Sequence[Any]], list[Candidate]] | None = None
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
        except ImportError as error:  # of a package that is imported at its first use
            return _table(Failed(_why(error)))


def evaluated_on_ray(evaluator: Evaluator, passed: int, size: int, address: str,
                     processes: int | None = None) -> Generator[Candidate]:
    """The candidates of a space, in order, evaluated on a cluster.

    Args:
        evaluator: what would evaluate them here.
        passed: how many were searched before; these are passed over.
        size: of a batch.
        address: of the cluster, HOST:PORT, or `auto`.
        processes: how many at most; by default one for each CPU of the cluster.

    Raises:
        UserError: there is no such cluster, it lacks packages, or the space can't be used.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else Ray warns of each of Ray Data's actors
    with connected(address, CODE, PACKAGES):
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if not cpus:
            raise UserError("the Ray cluster has no CPUs that could work")
        count = min(processes or cpus, cpus)
        log.info("%d process%s on Ray", count, "es" * (count != 1))
        question = evaluator.elsewhere
        asked = {name: Path(path).read_bytes() for name in TRAVELS
                 if (path := getattr(question, name)) and path.endswith(TRAVELS[name])}
        try:
            for table in _tables(Work(question, passed, size, Path.cwd(), evaluator.learned, asked), count):
                for found in _values(table):
                    if isinstance(found, Failed):
                        raise UserError(found.why)
                    yield from found
        except ray.exceptions.RayTaskError:
            raise  # a bug, which keeps its traceback
        except (ray.exceptions.RayError, ray.data.exceptions.ExecutionTimeoutError) as error:
            why = str(error).strip().splitlines()[-1]  # the first ones say where
            raise UserError(f"--ray {address}: {type(error).__name__}: {why}" + (
                f"; {SAME_PACKAGES}" if why.startswith(ModuleNotFoundError.__name__) else "")) from None


def _tables(work: Work, count: int) -> Iterator[pyarrow.Table]:
    """The evaluated batches, in order."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # byte: each row is a block of its own, and so travels as soon as it is there
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what it logs as an error, it also raises
    warnings.filterwarnings("ignore", module=r"ray\.data")  # such as that a short search can't use all actors
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    source = _source(work._replace(learned={}))
    choices = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=0, label_selector=here)
    found = choices.map_batches(RemoteEvaluator, batch_size=None, batch_format="pyarrow", num_cpus=1,
                                fn_constructor_args=(work,), compute=ray.data.ActorPoolStrategy(size=count))
    yield from found.iter_batches(batch_size=None, batch_format="pyarrow")


def _source(work: Work) -> ray.data.Datasource:
    """The choices of a space, as Ray Data reads them: one task gives all of them."""
    class Choices(ray.data.Datasource):
        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ray.data.ReadTask]:
            about = ray.data.block.BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
            return [ray.data.ReadTask(lambda: _choices(work), about)]

        def estimate_inmemory_data_size(self) -> None:
            return None

    return Choices()


def _choices(work: Work) -> Iterator[pyarrow.Table]:
    """The choices that are left, batch after batch; on the driver's machine, so all files are there."""
    os.chdir(work.folder)
    question = work.question
    try:
        space = space_of(question.space, Workspace(question.workspace), question.most, question.seed)
        for batch in batches(islice(space.choices(), work.passed, None), work.size):
            yield _table(batch)
    except UserError as error:
        yield _table(Failed(_why(error)))


def _evaluator(work: Work, folder: Path) -> Evaluator:
    """What answers the driver's question on this machine.

    Args:
        folder: for the files that it needs; they are read later, too.

    Raises:
        UserError: the space or the predictors can't be used.
    """
    with suppress(OSError):  # where there is no such folder, no relative path is found, which the candidates' errors say
        os.chdir(work.folder)
    here: dict[str, Any] = {name: str(folder / Path(getattr(work.question, name)).name) for name in work.asked}
    for path, content in [*((here[name], content) for name, content in work.asked.items()), *work.learned.items()]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return Evaluator(work.question._replace(workspace=folder, **here))


def _why(error: Exception) -> str:
    """An error for the user."""
    return f"{platform.node()}: {error}; {SAME_PACKAGES}" if isinstance(error, ImportError) else str(error)


def _table(batch: object) -> pyarrow.Table:
    return pyarrow.table({COLUMN: pyarrow.array([pickle.dumps(batch)], pyarrow.large_binary())})


def _values(table: pyarrow.Table) -> list[Any]:
    return [pickle.loads(value) for value in table[COLUMN].to_pylist()]
