"""Writes recipes/h200/served_sets.yaml: forty sets of two or three models with rates of requests, drawn with a seed.

The rule, for each set in turn:
  models    two and three in turn, or the numbers of --models. They and the batches come from shuffled decks, each used up
            before it is shuffled again, so that any twenty sets in a row hold every model at least twice, and every batch about
            as often.
  rates     those with which a model alone on the device runs for a given share of the time, as `busy_share` has it: each run
            takes the idle time of `batch`, whether it is full or not. The shares of a set are drawn between 8 and 50 %, and add
            up to a total from 25 to 90 %, of which twenty sets in a row cover each twentieth once.
  slo_ms    between 2 and 6 times the idle time of a run of `batch`, or of 3 ms if that is more.

The idle times are the H200's in nvidia-h200-cuda-ort1.31-all.tar.xz (medians), times 1.07: so much longer does an H100 take at
the median of the 15 that sharing-nvidia-h100.tar.xz holds, too (0.98 to 1.32; most where the host is the slower track).
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import yaml

from graph_model.simulation.serving import busy_share
from utils import cli, files
from utils.lazy import scipy

T = TypeVar("T")
CONFIG = Path(__file__).with_suffix(".yaml")
EXAMPLES = """
python recipes/h200/served_sets.py --sets 40 --seed 36
python recipes/h200/served_sets.py --sets 40 --seed 38 --models 2,3,4 --out recipes/h200/served_sets_of_four.yaml
"""
IDLE_MS = {  # of runs of 1, 4 and 16 on an H200; those after the blank line were not in what the ways of sharing are fitted to
    "convnext_tiny": (1.53, 2.09, 5.17),
    "densenet121": (3.27, 3.50, 4.88),
    "efficientnet_b0": (1.86, 1.95, 2.64),
    "googlenet": (1.40, 1.44, 2.03),
    "mobilenet_v2": (0.95, 0.92, 1.70),
    "regnet_y_400mf": (2.20, 2.26, 2.32),
    "resnet18": (0.64, 0.70, 1.25),
    "resnet50": (1.34, 1.53, 3.15),
    "squeezenet1_1": (0.64, 0.64, 1.00),
    "swin_t": (2.90, 2.96, 5.93),
    "vit_b_16": (2.32, 2.89, 6.83),

    "mnasnet1_0": (0.97, 0.91, 1.59),
    "resnext50_32x4d": (1.30, 1.65, 3.79),
    "wide_resnet50_2": (1.59, 2.19, 4.61),
    "efficientnet_v2_s": (3.75, 4.12, 5.74),
    "convnext_small": (2.88, 3.73, 8.49),
    "resnet34": (1.08, 1.25, 2.04),
    "densenet169": (4.83, 5.12, 6.74),
    "shufflenet_v2_x0_5": (1.22, 1.25, 1.25),
}
H100_RATIO = 1.07
BATCHES = (1, 4, 8, 16)
LEAST_SHARE, MOST_SHARE = 0.08, 0.5  # of the time, of one model
LEAST_TOTAL, MOST_TOTAL = 0.25, 0.9  # of a set
LEAST_MEAN_SHARE = 0.083  # of the models of a set: four have a total from 33 % on
STRATA = 20
SIZES = (2, 3)  # of sets, in turn
LEAST_OWN_MS = 3.0
SLO_FACTORS = (2.0, 6.0)
WAYS = ("slices", "mps", "mps:50")
WAYS_OF_SIZE = {2: ("mps:25/75", "mps:75/25"), 3: ("mps:25/25/50", "mps:50/25/25"), 4: ("mps:25/25/25/25", "mps:40/20/20/20")}
YAML_END = "...\n"  # that of a document which is one number
HEADER = """# Sets of models that are served at the same time (benchmark/served_sets.py). Written by
#   python recipes/h200/served_sets.py --sets {sets} --seed {seed}{sizes}
# which says by which rule they were drawn.
"""


def idle_ms(model: str, batch: int) -> float:
    """The idle time of a run on an H100, in ms; between the sizes that were measured, on a line in logarithms."""
    return H100_RATIO * float(np.exp(np.interp(math.log(batch), np.log([1, 4, 16]), np.log(IDLE_MS[model]))))


def rate_per_s(share: float, run_ms: float, batch: int) -> float:
    """The rate of requests that keeps a model busy for `share` of the time (a ratio): between that with one request in each run
    and that with full runs."""
    runs_per_s = share / run_ms * 1e3
    return float(scipy.optimize.brentq(lambda rate: busy_share(rate, run_ms, batch) - share, 0.99 * runs_per_s,
                                       1.01 * batch * runs_per_s, rtol=1e-6))


def deck(cards: Sequence[T], generator: np.random.Generator) -> Iterator[T]:
    """The cards in random order, again and again."""
    while True:
        for place in generator.permutation(len(cards)):
            yield cards[place]


def distinct(cards: Iterator[str], count: int) -> list[str]:
    """So many different cards; one that is drawn twice is left out."""
    drawn: list[str] = []
    while len(drawn) < count:
        if (card := next(cards)) not in drawn:
            drawn.append(card)
    return drawn


def shares(count: int, total: float, generator: np.random.Generator) -> list[float]:
    """The shares of the models of a set, which add up to `total`."""
    while True:
        drawn = generator.uniform(LEAST_SHARE, MOST_SHARE, count)
        drawn *= total / drawn.sum()
        if drawn.min() >= LEAST_SHARE and drawn.max() <= MOST_SHARE:
            return [float(share) for share in drawn]


def draw_sets(count: int, seed: int, sizes: Sequence[int]) -> list[list[dict[str, Any]]]:
    """So many sets, as in the config, with so many models in turn."""
    generator = np.random.default_rng(seed)
    models, batches, strata = deck(list(IDLE_MS), generator), deck(BATCHES, generator), deck(range(STRATA), generator)
    sets = []
    for number in range(count):
        size = sizes[number % len(sizes)]
        least = max(LEAST_TOTAL, LEAST_MEAN_SHARE * size)
        total = least + (MOST_TOTAL - least) * (next(strata) + generator.uniform()) / STRATA
        names = distinct(models, size)
        of_set = []
        for name, share in zip(names, shares(len(names), total, generator), strict=True):
            batch = next(batches)
            factor = math.exp(generator.uniform(*np.log(SLO_FACTORS)))
            of_set.append({"model": f"{name}.onnx", "batch": batch,
                           "rate_per_s": round(rate_per_s(share, idle_ms(name, batch), batch), 1),
                           "slo_ms": round(factor * max(idle_ms(name, batch), LEAST_OWN_MS), 1)})
        sets.append(of_set)
    return sets


def config_text(count: int, seed: int, sizes: Sequence[int] = SIZES) -> str:
    """The config as YAML, one line a model."""
    ways = [*WAYS, *(way for size in sorted(sizes) for way in WAYS_OF_SIZE[size])]
    settings = {"ways": ways, "seconds": 5.0, "warmup_s": 0.5, "seed": seed}
    lines = [f"{name}: {yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix(YAML_END).strip()}\n"
             for name, value in settings.items()]
    lines.append("sets:\n")
    for of_set in draw_sets(count, seed, sizes):
        for place, model in enumerate(of_set):
            entry = yaml.safe_dump(model, default_flow_style=True, sort_keys=False, width=1000).strip()
            lines.append(f"{'  - ' if not place else '    '}- {entry}\n")
    of_sizes = "" if tuple(sizes) == SIZES else f" --models {','.join(map(str, sizes))}"
    return HEADER.format(sets=count, seed=seed, sizes=of_sizes) + "".join(lines)


def sizes_of_sets(text: str) -> tuple[int, ...]:
    """An option that is the numbers of models that sets have in turn."""
    sizes = tuple(cli.count(size) for size in text.split(","))
    if unknown := sorted(set(sizes) - WAYS_OF_SIZE.keys()):
        raise argparse.ArgumentTypeError(f"sets have {min(WAYS_OF_SIZE)} to {max(WAYS_OF_SIZE)} models, not {unknown[0]}")
    return sizes


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--sets", type=cli.count, default=40, metavar="N", help="how many sets (default: 40)")
    parser.add_argument("--seed", type=cli.whole, default=36, metavar="N", help="of draws and arrivals (default: 36)")
    parser.add_argument("--models", type=sizes_of_sets, default=SIZES, metavar="N[,N…]",
                        help=f"how many models a set has, {min(WAYS_OF_SIZE)} to {max(WAYS_OF_SIZE)}, in turn (default: 2,3)")
    parser.add_argument("--out", type=cli.out_file, default=CONFIG, metavar="FILE",
                        help=f"default: {CONFIG.name} beside this script")
    args = parser.parse_args()
    cli.start(args)
    files.write_text(args.out, config_text(args.sets, args.seed, args.models))
    print(args.out)
    return 0


if __name__ == "__main__":
    cli.run(main)
