"""Campaign `long`: many predictions in one process, which must take no more memory, descriptors or time in the end than in the
beginning, and give the same answers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import count as counting
from pathlib import Path

import psutil

from fuzz.damaged_models import SOUND, network
from fuzz.reading import Outcome, Parts, Reader
from hase.inference import predict
from hase.utils.lazy import onnx

CASES = 10_000  # predictions
EACH = 100  # predictions of a case
TARGET = "nvidia-h200"
MOST_GROWTH = 1.1  # of memory, from the first tenth of the predictions to the last one
_number = counting()


def many(folder: str) -> list[float]:
    """The latencies of EACH predictions: of files, at sizes that come again and others, strictly or not, and of a model in
    memory that is a new one each time."""
    paths, answers = sorted(Path(folder).glob("*.onnx")), []
    for turn in range(EACH):
        if turn % 10 == 9:
            model = network()
            model.graph.name = f"new{next(_number)}"
            answers.append(predict(model, target=TARGET).latency_ms)
        else:
            answers.append(predict(paths[turn % len(paths)], target=TARGET, strict=turn % 2 == 0,
                                   dims={"batch": turn + 1} if turn % len(paths) == 0 else None).latency_ms)
    return answers


def held() -> tuple[float, float]:
    """Memory (MiB) of this process and its children, and its file descriptors."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 2**20, process.num_fds()


def cases(count: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of each EACH predictions; the last has the memory, descriptors and time in the beginning and in the end."""
    for number, make in enumerate(SOUND[1:]):
        onnx.save(make(), folder / f"sound_{number}.onnx")
    with Reader("fuzz.long_run") as reader:
        wanted = reader.answers(("many", str(folder)))  # also loads everything
        seconds, memory = [], []
        for number in range(max(2, count // EACH)):
            outcome = reader.read(("many", str(folder)), f"predictions from {number * EACH} on", wanted)
            seconds.append(outcome.seconds)
            memory.append(reader.answers(("held",)))
            yield outcome
    tenth = max(1, len(memory) // 10)
    (mib, descriptors), (mib_then, descriptors_then) = memory[tenth - 1], memory[-1]
    ms, ms_then = (1e3 * statistics.median(part) / EACH for part in (seconds[:tenth], seconds[-tenth:]))
    grown = mib_then > MOST_GROWTH * mib or descriptors_then > descriptors
    remark = f"{mib:.0f} to {mib_then:.0f} MiB, {descriptors} to {descriptors_then} descriptors, {ms:.1f} to {ms_then:.1f} ms"
    yield Outcome("memory" if grown else "answer", "memory and descriptors in the end", remark, remark=remark)


def parts(count: int, seed: int, folder: Path) -> Parts:
    yield f"predictions in one process, each case {EACH}", cases(count, folder)
