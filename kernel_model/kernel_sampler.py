"""Phase 3.2: samples kernels of further shapes, so that predictors learn how time depends on shape.

Reads the index of every flavour in ort_analysis/ort_kernel_record. Draws kernels of the index at random (the seeds) and changes
their sizes: batch, channels, height, width, window and stride, or rows, columns and depth of a product. ONNX Runtime decides
which are valid and what their outputs are; the others are counted. With --free, also draws kernels that are near no model. With
--errors, reads the errors that training wrote in place of the index, and draws near the kernels with the largest errors.

Writes the kernels to kernel_model/kernel_onnx/<flavour>/, next to those of the models. Its file sampled.json says which
families have the seed of each kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kernel_model.building.kernel_models import default_sources, kernel_build
from kernel_model.sampling.draws import draw_kernel
from kernel_model.sampling.free_shapes import draw_free_kernel
from kernel_model.sampling.kernel_errors import KernelErrors, draw_weights, read_errors
from kernel_model.sampling.seeds import SEED_FILE, Families, Seeds, read_seeds
from ort_analysis.records.kernel_costs import VIEW_OPS
from ort_analysis.records.kernel_record import Kernel, KernelInput
from ort_analysis.records.reading import read_index
from utils import cli, files
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.processes import process_pool

log = get_logger("sampler")
MOST_MIB = 256
FREE: Families = ()  # the families of a kernel without a seed
NEAR_SPREAD = 0.5  # of the sizes around a kernel with a large error; it is 1 around kernels of models
TRIES = 20  # at most this many draws per wanted kernel
EXAMPLES = """
python kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16
python kernel_model/kernel_sampler.py --count 5000 --most-gflop 200 --without vgg --seed 7
python kernel_model/kernel_sampler.py --count 0 --free 20000 --most-gflop 300 --jobs 8
python kernel_model/kernel_sampler.py --errors training/kernel_errors/nvidia-h200-cuda-ort1.31-all.json --count 3000
"""


Draw = tuple[list[KernelInput], dict[str, Any]]
Drawn = tuple[Kernel, Families]  # a kernel, and the families that have its seed
Sampled = tuple[dict[str, Drawn], Counter[str]]  # new kernels by id, and the number of refused draws by reason


def footprint_mib(kernel: Kernel) -> float:
    return float(kernel.bytes_read + kernel.bytes_written) / 2**20


def _families(names: Iterable[str], without: Collection[str]) -> Families:
    return tuple(sorted(set(names).difference(without)))


def sample(entries: Sequence[Drawn], count: int, generator: np.random.Generator, batches: Sequence[int],
           most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (), there: Collection[str] = ()) -> Sampled:
    """Up to `count` new kernels, drawn near kernels of models. A type is drawn in proportion to the square root of its number
    of kernels.

    Args:
        entries: the kernels of models, with the models' families.
        count: of new kernels.
        generator: of random numbers.
        batches: batch sizes to draw from.
        most_gflop, most_mib: of a kernel.
        without: families whose kernels are no seeds.
        there: ids of kernels that were sampled before.
    """
    seeds: dict[str, list[Drawn]] = {}
    for kernel, groups in entries:
        families = _families(groups, without)
        if families and kernel.op_type not in VIEW_OPS and not kernel.subgraphs:
            seeds.setdefault(kernel.type, []).append((kernel, families))
    types = sorted(seeds)
    weights = np.sqrt([len(seeds[name]) for name in types])

    def draw() -> Drawn:
        batch = int(generator.choice(batches))
        of_type = seeds[str(generator.choice(types, p=weights / weights.sum()))]
        kernel, families = of_type[int(generator.integers(len(of_type)))]
        return draw_kernel(kernel, batch, generator), families

    known = {kernel.id for kernel, _ in entries} | set(there)
    return collect_draws(draw, count if seeds else 0, most_gflop, most_mib, known)


def near_batch(kernel: Kernel, batches: Sequence[int], generator: np.random.Generator) -> int:
    """One of `batches` within a factor of two of the kernel's first dimension, or that dimension where there is none."""
    own = next((tensor.shape[0] for tensor in kernel.activations if tensor.shape), 1)
    return int(generator.choice([batch for batch in batches if own <= 2 * batch and batch <= 2 * own] or [own]))


def sample_again(errors: KernelErrors, count: int, generator: np.random.Generator, batches: Sequence[int],
                 most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (),
                 there: Collection[str] = ()) -> Sampled:
    """Up to `count` new kernels near those with the largest errors, which may be sampled ones; else as `sample`.

    Seeds are drawn in proportion to `draw_weights`. A new kernel has the families of its seed: FREE where the seed has none.
    Kernels of families that are held out of the training, or in `without`, are no seeds.
    """
    held_out = {*errors.held_out, *without}
    seeds = [error for error in errors.kernels if not error.families or set(error.families) - held_out]
    weights = draw_weights(seeds)

    def draw() -> Drawn:
        seed = seeds[int(generator.choice(len(seeds), p=weights))]
        drawn = draw_kernel(seed.kernel, near_batch(seed.kernel, batches, generator), generator, NEAR_SPREAD)
        return drawn, _families(seed.families, held_out)

    known = {error.kernel.id for error in errors.kernels} | set(there)
    return collect_draws(draw, count if weights.any() else 0, most_gflop, most_mib, known)


def sample_free(count: int, generator: np.random.Generator, batches: Sequence[int], most_gflop: float,
                most_mib: float = MOST_MIB, there: Collection[str] = ()) -> Sampled:
    """Up to `count` new kernels without a seed; else as `sample`."""
    return collect_draws(lambda: (draw_free_kernel(int(generator.choice(batches)), generator), FREE), count, most_gflop,
                         most_mib, there)


def collect_draws(draw: Callable[[], Drawn], count: int, most_gflop: float, most_mib: float, known: Collection[str]) -> Sampled:
    """Draws until there are `count` new kernels that are not too large, or `count` · TRIES draws were made."""
    found: dict[str, Drawn] = {}
    refused: Counter[str] = Counter()
    for _ in cli.progress(range(count * TRIES), "sampling"):
        if len(found) >= count:
            break
        try:
            drawn, families = draw()
        except (UserError, ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            log.debug("%s", error)  # random sizes often do not fit together
            refused["sizes do not fit"] += 1
            continue
        if drawn.flops > most_gflop * 1e9 or footprint_mib(drawn) > most_mib:
            refused["too large"] += 1
        elif drawn.id in known or drawn.id in found:
            refused["there already"] += 1
        else:
            found[drawn.id] = (drawn, families)
    return found, refused


Sampler = Callable[[int, np.random.Generator], Sampled]


def draw_and_build(sampler: Sampler, count: int, generator: np.random.Generator,
                   folder: Path) -> tuple[Seeds, Counter[str]]:
    """Samples and builds `count` kernels; returns the families of their seeds by kernel id, and refused draws by reason."""
    found, refused = sampler(count, generator)
    for kernel, _ in cli.progress(list(found.values()), "building"):
        kernel_build(kernel, folder)
    return {name: families for name, (_, families) in found.items()}, refused


def sample_in_parallel(sampler: Sampler, count: int, seed: Sequence[int], folder: Path, jobs: int) -> tuple[Seeds,
                                                                                                            Counter[str]]:
    """`draw_and_build` in `jobs` processes with different random numbers; kernels that several of them find count once."""
    if jobs == 1:
        return draw_and_build(sampler, count, np.random.default_rng(seed), folder)
    seeds: Seeds = {}
    refused: Counter[str] = Counter()
    with process_pool(jobs) as pool:
        parts = [pool.submit(draw_and_build, sampler, (count + job) // jobs, np.random.default_rng([*seed, job]), folder)
                 for job in range(jobs)]
        for part in parts:
            drawn, why = part.result()
            refused["there already"] += len(seeds.keys() & drawn.keys())
            seeds |= drawn
            refused += why
    return seeds, refused


def indexed(path: Path) -> tuple[str, list[Drawn]]:
    """The name of an index's flavour, and its kernels with the families of the models that have them."""
    index = read_index(path)
    return index.flavour.name, [(entry.kernel, index.groups_of(entry)) for entry in index.entries()]


class Step(NamedTuple):
    """One kind of draw, `sampled` (near a seed) or `free`; the function that draws, and how many kernels are wanted."""

    kind: str
    sampler: Sampler
    wanted: int


def steps_of(args: argparse.Namespace, errors: KernelErrors | None, entries: Sequence[Drawn], folder: Path,
             seeds: Seeds) -> list[Step]:
    """The draws for one flavour.

    Args:
        args: of the command.
        errors: of a training, whose kernels are the seeds; None: those of the index are.
        entries: the kernels of the index.
        folder: of the built kernels.
        seeds: of the kernels that were sampled before.
    """
    limits: dict[str, Any] = {"batches": args.batch_sizes, "most_gflop": args.most_gflop, "most_mib": args.most_mib}
    if errors:
        built = frozenset(path.stem for path in folder.glob("*.onnx"))  # held-out families' kernels too
        return [Step("sampled", partial(sample_again, errors, without=args.without, there=built, **limits), args.count)]
    limits["there"] = frozenset(seeds)
    free = sum(seeded_by == FREE for seeded_by in seeds.values())
    near = partial(sample, entries, without=args.without, **limits)
    return [Step("sampled", near, args.count - (len(seeds) - free)),
            Step("free", partial(sample_free, **limits), args.free - free)]


def sample_flavour(folder: Path, seeds: Seeds, steps: Iterable[Step], seed: int, jobs: int) -> dict[str, Any]:
    """Draws and builds kernels into the folder of a flavour, and adds them to `seeds` and its file. Returns a row to print.

    Args:
        folder: of the built kernels.
        seeds: of the kernels that were sampled before.
        steps: what to draw.
        seed: of the random numbers.
        jobs: processes.
    """
    row: dict[str, Any] = {"flavour": folder.name, "sampled": 0, "free": 0, "there_before": len(seeds)}
    refusals: Counter[str] = Counter()
    for kind, sampler, wanted in steps:
        if wanted <= 0:
            continue
        drawn, refused = sample_in_parallel(sampler, wanted, [seed, len(seeds), kind == "free"], folder, jobs)
        seeds |= drawn
        files.write_json(folder / SEED_FILE, seeds)
        row[kind] = len(drawn)
        refusals += refused
        if len(drawn) < wanted:
            log.warning("%s: only %d of %d kernels (%s) found", folder.name, len(drawn), wanted, kind)
    return row | {f"refused: {why}": number for why, number in sorted(refusals.items())}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--count", type=cli.whole, default=1000,
                        help="kernels near those of models, including those of earlier calls (default: 1000)")
    parser.add_argument("--free", type=cli.whole, default=0, metavar="N",
                        help="kernels near no model, of usual sizes, including those of earlier calls (default: 0)")
    parser.add_argument("--errors", type=Path, metavar="FILE",
                        help="a file in training/kernel_errors: draw --count further kernels, not including those of earlier "
                             "calls, near the kernels with the largest errors")
    parser.add_argument("--batch-sizes", type=cli.counts, default="1,2,4,8,16", metavar="N,…",
                        help="batch sizes to draw from")
    parser.add_argument("--most-gflop", type=cli.positive, default=2.0, help="largest kernel, in 10^9 operations (default: 2)")
    parser.add_argument("--most-mib", type=cli.positive, default=MOST_MIB,
                        help=f"largest kernel, in MiB that it reads and writes (default: {MOST_MIB})")
    parser.add_argument("--without", action="append", default=[], metavar="FAMILY",
                        help="a model family whose kernels are not drawn from (repeatable), e.g. vgg")
    parser.add_argument("--seed", type=cli.whole, default=0)
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="processes that draw in parallel (default: 1)")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    add_options(parser)
    args = parser.parse_args()
    if args.count + args.free < 1:
        parser.error("--count and --free can't both be 0")
    if args.errors and args.free:
        parser.error("--errors and --free don't go together: call the sampler once for each")
    workspace = cli.start(args)
    errors = read_errors(args.errors) if args.errors else None
    sources = [(errors.target.flavour.name, ())] if errors else map(indexed, default_sources(workspace))
    rows = []
    with sole_writer(workspace.kernel_onnx):
        for flavour, entries in sources:
            folder = workspace.kernel_onnx / flavour
            seeds = read_seeds(folder)
            steps = steps_of(args, errors, entries, folder, seeds)
            rows.append(sample_flavour(folder, seeds, steps, args.seed, args.jobs))
    cli.print_rows(rows, args.json, "sampled kernels")
    return 0


if __name__ == "__main__":
    cli.run(main)
