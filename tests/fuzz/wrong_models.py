"""Campaign `models`: wrong ONNX files, by a seed. Some are damaged, some made to do harm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from fuzz.damaged_models import HARMFUL, SOUND, damaged_model
from fuzz.reading import Reader
from fuzz.reporting import Outcome, Parts
from hase.inference import predict
from hase.ort_analysis.isolated.analysis import check_opens, graph_of, own_sizes

CASES = 500
MODULE = "fuzz.wrong_models"
QUESTIONS = ("predicted_ms", "predicted_ms", "predicted_ms", "looked_at", "opened")  # by the number of a model
PATIENT = ("constants folded for hours", "20,000 nodes", "constants of 7 GiB in parts", "2^16 calls")  # many seconds each


def predicted_ms(path: str) -> list[float]:
    """Predictors for an H200 come with Hase, so nothing has to be trained."""
    return [predict(path, target="nvidia-h200", force=True).latency_ms]


def looked_at(path: str) -> None:
    """What commands ask of a model besides its record."""
    own_sizes(Path(path), {"batch": [1, 2]})
    graph_of(Path(path), "cuda", {"batch": 2}, True)


def opened(path: str) -> None:
    """What commands that run a model ask before."""
    check_opens(Path(path), "cpu", {"batch": 2}, False)


def damaged(count: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """The outcomes of damaged models. The files that give faults are left in `folder`."""
    sound = [(make.__name__, make().SerializeToString()) for make in SOUND]
    with Reader(MODULE) as reader:
        for number in range(count):
            rng, path = random.Random(f"{seed} {number}"), folder / f"damaged_{number}.onnx"
            name, data = rng.choice(sound)
            damage, changed = damaged_model(data, rng)
            path.write_bytes(changed)
            outcome = reader.read((QUESTIONS[number % len(QUESTIONS)], str(path)), f"{number}: {name}: {damage}")
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
                yield reader.read(("predicted_ms", str(path)), name)
                path.unlink()


def parts(count: int, seed: int, folder: Path) -> Parts:
    """`count` damaged models and the harmful ones, whose slowest run only where all CASES are asked for."""
    yield "damaged models", damaged(count, seed, folder)
    yield "models made to do harm", harmful(count >= CASES, folder)
