"""An evolutionary search with Optuna over the networks of inference/search/ofa.py, beside a random one.

To use a searcher of your own, `chosen` and `evolved` below show all that is needed: asking it for networks, and telling it
their numbers. Both searches look for networks with many operations and a short latency. Operations stand for how much a network
can learn, not for its accuracy: replace them by an estimate of your own.

Prints a row per search: the number of networks, the size of the Pareto front, and its hypervolume, the area of the plane of
latency and operations that the front dominates, up to a latency (the larger the better). With --out, the networks of the fronts
are written, too.

Needs Optuna: pip install '.[search]'
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from hase.inference.library.predictor import BATCH, Predictor, batches
from hase.inference.search import ofa
from hase.inference.search.searching import hypervolume
from hase.utils import cli
from hase.utils.files import write_csv
from hase.utils.lazy import optuna

TARGET, USUAL_PACE = "nvidia-h200", 1.0
POPULATION = 100
EXAMPLES = """
python recipes/search/evolve.py --count 2000  # needs Optuna
python recipes/search/evolve.py --count 5000 --random-count 100000 --out fronts.csv --json  # needs Optuna
"""
Numbers = tuple[float, float]  # of a network: latency in ms, and 10⁹ operations
Predict = Callable[[Sequence[str]], list[Numbers]]


def chosen(trial: optuna.Trial) -> str:
    """The network that an Optuna trial chooses."""
    stages = []
    for stage in range(len(ofa.STAGES)):
        depth = trial.suggest_categorical(f"depth {stage}", ofa.DEPTHS)
        stages.append(tuple(ofa.OfaBlock(trial.suggest_categorical(f"window {stage} {block}", ofa.WINDOWS),
                                      trial.suggest_categorical(f"expansion {stage} {block}", ofa.EXPANSIONS))
                            for block in range(depth)))
    return ofa.OfaNetwork(trial.suggest_categorical("side", ofa.SIDES), trial.suggest_categorical("width", ofa.WIDTHS),
                      tuple(stages)).name


def evolved(predict: Predict, count: int, seed: int) -> dict[str, Numbers]:
    """The networks that NSGA-II tries, in order of generations, with their numbers."""
    sampler = optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=seed)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    numbers_of: dict[str, Numbers] = {}
    while count > 0:
        trials = [study.ask() for _ in range(min(POPULATION, count))]
        networks = [chosen(trial) for trial in trials]
        for trial, network, numbers in zip(trials, networks, predict(networks), strict=True):
            study.tell(trial, numbers)
            numbers_of[network] = numbers
        count -= len(trials)
    return numbers_of


def drawn(predict: Predict, count: int, seed: int) -> dict[str, Numbers]:
    """Random networks, with their numbers."""
    return {network: numbers for networks in batches(ofa.choices(count, seed), BATCH)
            for network, numbers in zip(networks, predict(networks), strict=True)}


def predictions() -> Predict:
    """The function that predicts the numbers of networks."""
    predictor = Predictor(target=TARGET)
    predicts, flavour = predictor.brief(host_pace=USUAL_PACE), predictor.fitted.target.flavour

    def predict(networks: Sequence[str]) -> list[Numbers]:
        records = [ofa.make(name, flavour) for name in networks]
        return [(answer.latency_ms, sum(record.kernel_of(node).flops for node in record.nodes) / 1e9)
                for record, answer in zip(records, predicts(records), strict=True)]

    return predict


def front_of(networks: dict[str, Numbers]) -> dict[str, Numbers]:
    """The Pareto front: networks such that no other is as fast with as many operations, fastest first."""
    front: dict[str, Numbers] = {}
    most = 0.0
    for name, (latency_ms, gflop) in sorted(networks.items(), key=lambda item: (item[1][0], -item[1][1])):
        if gflop > most:
            front[name], most = (latency_ms, gflop), gflop
    return front


def option_parser() -> argparse.ArgumentParser:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.count, default=2000, help="networks of a search (default: 2000)")
    parser.add_argument("--random-count", type=cli.count, metavar="N", help="of the random search (default: as many)")
    parser.add_argument("--seeds", type=cli.count, default=1, help="of each search (default: 1)")
    parser.add_argument("--slowest-ms", type=cli.positive, default=2.0, help="where the hypervolume ends (default: 2 ms)")
    parser.add_argument("--out", type=cli.out_file, metavar="FILE", help="write the networks of the fronts to this CSV")
    return parser


def main() -> int:
    args = option_parser().parse_args()
    cli.start(args)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    predict = predictions()
    searches = ("random", drawn, args.random_count or args.count), ("evolutionary", evolved, args.count)
    for seed in range(args.seeds):
        for name, search, count in searches:
            began = time.monotonic()
            front = front_of(search(predict, count, seed))
            rows.append({"search": name, "seed": seed, "networks": count, "on the front": len(front),
                         "hypervolume (ms · GFLOP)": hypervolume(list(front.values()), args.slowest_ms),
                         "took (s)": time.monotonic() - began})
            networks += [{"search": name, "seed": seed, "network": network, "latency_ms": latency_ms, "gflop": gflop}
                         for network, (latency_ms, gflop) in front.items()]
    if args.out:
        write_csv(args.out, list(networks[0]), networks)
    cli.print_rows(rows, args.json, f"searches for operations and a short latency on {TARGET}")
    return 0


if __name__ == "__main__":
    cli.run(main)
