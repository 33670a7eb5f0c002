"""Campaign `models`: wrong ONNX files, by a seed. Some are damaged, some made to do harm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from fuzz.damaged_models import HARMFUL, SOUND, damaged_model
from fuzz.reading import Reader
from fuzz.reporting import Outcome, titled
from hase.inference import predict
from hase.ort_analysis.isolated.analysis import check_opens, graph_of, own_sizes

CASES = 500
TARGET = "nvidia-h200"  # predictors for it come with Hase, so nothing has to be trained
MODULE = "fuzz.wrong_models"
PATIENT = ("constants folded for hours", "20,000 nodes", "constants of 7 GiB in parts", "2^16 calls")  # many seconds each


def predicted_ms(path: str) -> float:
    return predict(path, target=TARGET, force=True).latency_ms


def looked_at(path: str) -> None:
    """What commands ask of a model besides its record."""
    own_sizes(Path(path), {"batch": [1, 2]})
    graph_of(Path(path), "cuda", {"batch": 2}, True)


def opened(path: str) -> None:
    """What commands that run a model ask before."""
    check_opens(Path(path), "cpu", {"batch": 2}, False)


def questions(path: Path, number: int) -> str:
    """What is asked of the file with this number, as a line of Python."""
    if number % 5 == 3:
        return f"looked_at({str(path)!r})"
    if number % 5 == 4:
        return f"opened({str(path)!r})"
    return f"answers.append(predicted_ms({str(path)!r}))"


def damaged_files(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Damaged models, each by its damage and its file in `folder`."""
    sound = [(make.__name__, make().SerializeToString()) for make in SOUND]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        name, data = rng.choice(sound)
        damage, changed = damaged_model(data, rng)
        path = folder / f"damaged_{number}.onnx"
        path.write_bytes(changed)
        yield f"{number}: {name}: {damage}", path


def damaged(count: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of damaged models. The files that give faults are left in `folder`."""
    with Reader(MODULE) as reader:
        for number, (case, path) in enumerate(damaged_files(folder, count, seed)):
            outcome = reader.read(questions(path, number), case)
            if not outcome.fault:
                path.unlink()
            yield outcome


def harmful(patient: bool, folder: Path) -> Iterator[Outcome]:
    """The outcomes of models that are made to do harm; those of PATIENT only on request."""
    with Reader(MODULE) as reader:
        for name, make in HARMFUL.items():
            if patient or name not in PATIENT:
                path = folder / "harmful.onnx"
                path.write_bytes(make().SerializeToString())
                yield reader.read(questions(path, 0), name)
                path.unlink()


def outcomes(count: int, seed: int, folder: Path) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of `count` damaged models and of the harmful ones, whose slowest run only where all CASES are asked for."""
    yield from titled("damaged models", damaged(count, seed, folder))
    yield from titled("models made to do harm", harmful(count >= CASES, folder))
