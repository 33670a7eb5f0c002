"""Draws further kernels around those of the models, so that predictors learn how time follows shape.

Reads the index of every flavour in ort_analysis/ort_kernel_record. Draws kernels of the index at random and changes their
sizes: batch, channels, height and width, kernel and stride, or rows, columns and depth of a product. ONNX Runtime says which
are valid and what their outputs are; the others are counted. With --free, also draws kernels of no model; where there is no
index, for this machine. With --errors, reads what training wrote instead of the index, and draws near those kernels that it
predicted worst when it left them out. With --cliffs, reads a dataset, and draws between neighbours of which one takes many
times as long as its work explains, to find out where a library changes its algorithm. Writes the kernels to
kernel_model/kernel_onnx/<flavour>/, next to those of models, and to sampled.json there the families of models that hold the
kernel that each was drawn from.
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

from hase.kernel_model.building.kernel_models import write_kernel
from hase.kernel_model.sampling import draws
from hase.kernel_model.sampling.cliffs import Cliff, draw_probabilities, find_cliffs, kernel_between, timed_kernels
from hase.kernel_model.sampling.free_shapes.table import TABLES, Kind, draw_free_kernel
from hase.kernel_model.sampling.usefulness import KernelErrors, read_errors, seed_weights
from hase.records.dataset_files import read_header
from hase.records.kernel_record import Kernel
from hase.records.kernel_record_files import index_paths, read_index
from hase.records.operators import operator_row
from hase.runtimes import local_flavour
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import Flavour, resolve_device
from hase.utils.locks import sole_writer
from hase.utils.logger import get_logger, progress
from hase.utils.paths import Workspace
from hase.utils.processes import process_pool

log = get_logger("sampler")
MOST_MIB = 256
FREE: draws.Families = ()  # of a kernel that was not drawn near one of a model
NEAR_SPREAD = 0.5  # of sizes near a badly predicted kernel; 1 near kernels of models
TYPES = (*draws.FLOAT_TYPES, "bfloat16")  # bfloat16 only for kernels of language models
MAX_TRIES = 20  # draws for each wanted kernel
EXAMPLES = """
python kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16
python kernel_model/kernel_sampler.py --count 5000 --most-gflop 200 --without vgg --seed 7
python kernel_model/kernel_sampler.py --count 40000 --dtypes float32,float16
python kernel_model/kernel_sampler.py --count 0 --free 20000 --most-gflop 300 --jobs 8
python kernel_model/kernel_sampler.py --count 0 --free 5000 --free-kind language --most-gflop 4000 --most-mib 2048 --jobs 8
python kernel_model/kernel_sampler.py --count 0 --free 20000 --free-kind forms --most-gflop 100 --most-mib 1024 --jobs 8
python kernel_model/kernel_sampler.py --errors training/kernel_errors/*.json --count 3000
python kernel_model/kernel_sampler.py --cliffs nvidia-h200-cuda-ort1.31-all --count 2000 --most-gflop 100 --most-mib 512
"""


Drawn = tuple[Kernel, draws.Families]  # a kernel, and the families that hold its seed, the kernel that it was drawn near
Sampled = tuple[dict[str, Drawn], Counter[str]]  # new kernels by id, and how many draws were refused, by reason
Sampler = Callable[[int, np.random.Generator], Sampled]  # takes the number of kernels


def _families_without(names: Iterable[str], without: Collection[str]) -> draws.Families:
    return tuple(sorted(set(names).difference(without)))


def sample_near_models(entries: Sequence[Drawn], count: int, generator: np.random.Generator, batches: Sequence[int],
                       most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (),
                       existing: Collection[str] = (), dtypes: Sequence[str] = ()) -> Sampled:
    """Samples up to `count` new kernels near those of models.

    Args:
        entries: kernels of models, with the models' groups.
        without: families whose kernels seed nothing.
        existing: ids of kernels sampled before.
        dtypes: floating types to draw in; empty for the seed's own.
    """
    seeds: dict[str, list[Drawn]] = {}
    for kernel, groups in entries:
        families, row = _families_without(groups, without), operator_row(kernel.op_type)
        if families and row.cost != "view" and not row.copies and not kernel.subgraphs:  # copies are measured separately
            seeds.setdefault(kernel.type, []).append((kernel, families))
    types = sorted(seeds)
    weights = np.sqrt([len(seeds[name]) for name in types])  # so that rare kernel types are drawn more often than in models

    def draw() -> Drawn:
        batch = int(generator.choice(batches))
        type_seeds = seeds[str(generator.choice(types, p=weights / weights.sum()))]
        kernel, families = type_seeds[int(generator.integers(len(type_seeds)))]
        dtype = str(generator.choice(dtypes)) if dtypes else ""
        return draws.draw_kernel(kernel, batch, generator, dtype=dtype), families

    known = {kernel.id for kernel, _ in entries} | set(existing)
    return collect_draws(draw, count if seeds else 0, most_gflop, most_mib, known)


def near_batch(kernel: Kernel, batches: Sequence[int], generator: np.random.Generator) -> int:
    """One of `batches` within a factor of two of the kernel's first dimension, or that dimension if there is none."""
    size = next((tensor.shape[0] for tensor in kernel.activations if tensor.shape), 1)
    near = [batch for batch in batches if size <= 2 * batch and batch <= 2 * size]
    return int(generator.choice(near or [size]))


def sample_near_errors(errors: KernelErrors, count: int, generator: np.random.Generator, batches: Sequence[int],
                       most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (),
                       existing: Collection[str] = ()) -> Sampled:
    """Like `sample_near_models`, near the kernels with the worst predictions, including sampled ones. `seed_weights` says how
    often a kernel is a seed. Families held out of the training, or in `without`, seed nothing."""
    held_out = {*errors.held_out, *without}
    seeds = [error for error in errors.kernels if not error.families or set(error.families) - held_out]
    weights = seed_weights(seeds)

    def draw() -> Drawn:
        seed = seeds[int(generator.choice(len(seeds), p=weights))]
        drawn = draws.draw_kernel(seed.kernel, near_batch(seed.kernel, batches, generator), generator, NEAR_SPREAD)
        return drawn, _families_without(seed.families, held_out)

    known = {error.kernel.id for error in errors.kernels} | set(existing)
    return collect_draws(draw, count if weights.any() else 0, most_gflop, most_mib, known)


def sample_free(count: int, generator: np.random.Generator, batches: Sequence[int], most_gflop: float,
                most_mib: float = MOST_MIB, existing: Collection[str] = (), kind: Kind = "networks", dtypes: Sequence[str] = (),
                device: str = "cpu") -> Sampled:
    """Samples up to `count` new kernels of no model (FREE). Kernels of language models are drawn in one of the floating types
    `dtypes` (by default those that GPUs run them in). Except for kind `networks`, only kernels that the provider of `device`
    supports are drawn."""
    def draw() -> Drawn:
        kernel = draw_free_kernel(int(generator.choice(batches)), generator, kind, dtypes if kind == "language" else ())
        if kind != "networks" and not (draws.on_cuda(kernel) if device == "cuda" else draws.on_cpu(kernel)):
            raise UserError(f"{kernel.id}: the provider of {device} lacks it")
        return kernel, FREE

    return collect_draws(draw, count, most_gflop, most_mib, existing)


def collect_draws(draw: Callable[[], Drawn], count: int, most_gflop: float, most_mib: float, known: Collection[str]) -> Sampled:
    """Draws until `count` kernels are found that are new and small enough, at most MAX_TRIES times as often."""
    kept: dict[str, Drawn] = {}
    refused: Counter[str] = Counter()
    for _ in progress(range(count * MAX_TRIES), "sampling"):
        if len(kept) >= count:
            break
        try:
            drawn, families = draw()
        except (UserError, ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            log.debug("%s", error)  # random sizes often do not fit together
            refused["sizes do not fit"] += 1
            continue
        if drawn.flops > most_gflop * 1e9 or draws.footprint_mib(drawn) > most_mib:
            refused["too large"] += 1
        elif drawn.id in known or drawn.id in kept:
            refused["built already"] += 1
        else:
            kept[drawn.id] = (drawn, families)
    return kept, refused


def sample_between_cliffs(cliffs: Sequence[Cliff], count: int, generator: np.random.Generator, most_gflop: float,
                          most_mib: float = MOST_MIB, without: Sequence[str] = (), existing: Collection[str] = ()) -> Sampled:
    """Like `sample_near_models`, between the neighbours of cliffs. Kernels only of families in `without` are no neighbours."""
    cliffs = [cliff for cliff in cliffs if all(not end.families or set(end.families).difference(without)
                                               for end in (cliff.slower, cliff.faster))]
    weights = draw_probabilities(cliffs) if cliffs else np.zeros(0)

    def draw() -> Drawn:
        slower, faster, _ = cliffs[int(generator.choice(len(cliffs), p=weights))]
        drawn = kernel_between(slower.kernel, faster.kernel, float(generator.uniform(0.15, 0.85)))
        return drawn, _families_without({*slower.families, *faster.families}, without)

    return collect_draws(draw, count if cliffs else 0, most_gflop, most_mib, existing)


def draw_and_build(sampler: Sampler, count: int, generator: np.random.Generator,
                   folder: Path) -> tuple[draws.Seeds, Counter[str]]:
    """Samples and builds `count` kernels; returns the families of their seeds by id, and refused draws by reason."""
    drawn, refused = sampler(count, generator)
    for kernel, _ in progress(list(drawn.values()), "building"):
        write_kernel(kernel, folder)
    return {name: families for name, (_, families) in drawn.items()}, refused


def sample_in_parallel(sampler: Sampler, count: int, seed: Sequence[int], folder: Path,
                       jobs: int) -> tuple[draws.Seeds, Counter[str]]:
    """Runs `draw_and_build` in `jobs` processes with different seeds; a kernel that several found counts once."""
    if jobs == 1:
        return draw_and_build(sampler, count, np.random.default_rng(seed), folder)
    seeds: draws.Seeds = {}
    refused: Counter[str] = Counter()
    with process_pool(jobs) as pool:
        parts = [pool.submit(draw_and_build, sampler, (count + job) // jobs, np.random.default_rng([*seed, job]), folder)
                 for job in range(jobs)]
        for part in parts:
            part_seeds, part_refused = part.result()
            refused["built already"] += len(seeds.keys() & part_seeds.keys())
            seeds |= part_seeds
            refused += part_refused
    return seeds, refused


def indexed_kernels(path: Path) -> tuple[Flavour, list[Drawn]]:
    """The flavour of an index, and its kernels with the groups of their models. For a CUDA flavour, without kernels that the
    CUDA provider lacks: the CPU provider runs them."""
    index = read_index(path)
    cuda = index.flavour.device == "cuda"
    return index.flavour, [(entry.kernel, index.groups_of(entry)) for entry in index.entries()
                           if not cuda or draws.on_cuda(entry.kernel)]


class DrawStep(NamedTuple):
    """What to draw: `sampled` kernels (near existing ones) or `free` ones, the sampler, and how many."""

    kind: str
    sampler: Sampler
    wanted: int


def draw_steps(args: argparse.Namespace, source: KernelErrors | Sequence[Cliff] | None, entries: Sequence[Drawn], folder: Path,
               seeds: draws.Seeds, device: str) -> list[DrawStep]:
    """What to draw for one flavour.

    Args:
        source: training errors or cliffs to draw near; None to draw near kernels of the index.
        seeds: of the kernels sampled before.
    """
    options: dict[str, Any] = {"most_gflop": args.most_gflop, "most_mib": args.most_mib}
    if source is not None:
        options |= {"existing": frozenset(path.stem for path in folder.glob("*.onnx")),  # held-out families' kernels too
                    "without": args.without}
        return [DrawStep("sampled", partial(sample_near_errors, source, batches=args.batch_sizes, **options) if isinstance(
            source, KernelErrors) else partial(sample_between_cliffs, source, **options), args.count)]
    options |= {"batches": args.batch_sizes, "existing": frozenset(seeds), "dtypes": args.dtypes}
    near = partial(sample_near_models, entries, without=args.without, **options)
    free = partial(sample_free, kind=args.free_kind, device=device, **options)
    free_before = sum(families == FREE for families in seeds.values())
    return [DrawStep("sampled", near, args.count - (len(seeds) - free_before)), DrawStep("free", free, args.free - free_before)]


def sample_flavour(folder: Path, seeds: draws.Seeds, steps: Iterable[DrawStep], seed: int, jobs: int) -> dict[str, Any]:
    """Draws and builds kernels in a flavour's folder, and adds them to `seeds` and its file; returns a table row."""
    row: dict[str, Any] = {"flavour": folder.name, "sampled": 0, "free": 0, "there_before": len(seeds)}
    refusals: Counter[str] = Counter()
    for kind, sampler, wanted in steps:
        if wanted <= 0:
            continue
        drawn, refused = sample_in_parallel(sampler, wanted, [seed, len(seeds), kind == "free"], folder, jobs)
        seeds |= drawn
        files.write_json(folder / draws.SEED_FILE, seeds)
        row[kind] = len(drawn)
        refusals += refused
        if len(drawn) < wanted:
            log.warning("%s: only %d of %d kernels (%s) found", folder.name, len(drawn), wanted, kind)
    return row | {f"refused: {why}": number for why, number in sorted(refusals.items())}


def read_cliffs(workspace: Workspace, target: str) -> list[Cliff]:
    """The cliffs in a target's dataset; a `UserError` if there are none."""
    cliffs = find_cliffs(timed_kernels(workspace, target))
    if not cliffs:
        raise UserError(f"{target}: none of its kernels takes much longer than its work and its neighbours explain, so "
                        "--cliffs has nothing to draw near")
    log.info("%s: %d cliffs, up to %.0f times as long as their neighbours and their work explain", target, len(cliffs),
             cliffs[0].height)
    return cliffs


def float_type_names(text: str) -> tuple[str, ...]:
    """An option that is a list of floating types, separated by commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in TYPES]:
        raise argparse.ArgumentTypeError(f"unknown type {unknown[0]!r}; choose from {', '.join(TYPES)}")
    return names


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=cli.whole, default=1000,
                        help="kernels around those of models, those of earlier calls too (default: 1000)")
    parser.add_argument("--free", type=cli.whole, default=0, metavar="N",
                        help="kernels of no model, sizes drawn from the usual ranges, those of earlier calls too (default: 0)")
    parser.add_argument("--free-kind", choices=list(TABLES), default="networks",
                        help="what they are the operators of: networks of all kinds; language models as ONNX Runtime runs "
                             "them, with sizes around those of families of 0.5 to 14 billion parameters; any operator in "
                             "forms that are rare: of any rank, along any axes, with any groups and wide windows, of odd and "
                             "huge sizes; rare: layers of networks at rare sizes, such as odd channels, first layers, signals "
                             "in groups, products of a few columns, wide recurrent layers; standard: what ONNX's own sets have "
                             "for language models since 23, quantised networks, and networks in bfloat16; or host: what the "
                             "CPU runs in a CUDA session, since CUDA lacks it, where there is no index (default: networks)")
    parser.add_argument("--errors", type=Path, metavar="FILE",
                        help="what training wrote to training/kernel_errors: --count further kernels, those of earlier calls "
                             "not counted, around those that are predicted worst")
    parser.add_argument("--cliffs", metavar="TARGET",
                        help="a GPU target whose dataset is in the workspace: --count further kernels, those of earlier calls "
                             "not counted, between neighbours of which one takes three times as long as its work explains, or "
                             "longer")
    parser.add_argument("--batch-sizes", type=cli.counts, default="1,2,4,8,16", metavar="N,…",
                        help="batch sizes to draw from; with --cliffs, those between the neighbours' are")
    parser.add_argument("--most-gflop", type=cli.positive, default=2.0, help="largest kernel, in 10^9 operations (default: 2)")
    parser.add_argument("--most-mib", type=cli.positive, default=MOST_MIB,
                        help=f"largest kernel, all that it reads and writes (default: {MOST_MIB})")
    parser.add_argument("--without", action="append", default=[], metavar="FAMILY",
                        help="a model family whose kernels seed nothing (repeatable), e.g. vgg")
    parser.add_argument("--dtypes", type=float_type_names, default=(), metavar="TYPE,…",
                        help="floating types to draw the kernels around those of models in, e.g. float32,float16: a kernel of "
                             "a model in single precision is then drawn in half precision too (default: its own), and those "
                             "of language models (default: float16 and bfloat16)")
    parser.add_argument("--seed", type=cli.whole, default=0)
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="processes that draw side by side (default: 1)")


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    _add_options(parser)
    args = parser.parse_args()
    if args.count + args.free < 1:
        parser.error("--count and --free can't both be 0")
    if args.errors and args.dtypes:
        parser.error("--errors and --dtypes don't go together: a kernel that is predicted badly is drawn in its own type")
    if args.cliffs and args.dtypes:
        parser.error("--cliffs and --dtypes don't go together: a kernel between two others is drawn in their type")
    if (args.errors and args.cliffs) or ((args.errors or args.cliffs) and args.free):
        parser.error("--errors, --cliffs and --free don't go together: call the sampler once for each")
    if args.count and set(args.dtypes) - set(draws.FLOAT_TYPES):
        parser.error("--dtypes bfloat16 is for kernels of language models: give --count 0 and --free-kind language")
    workspace = cli.start(args)
    source: KernelErrors | list[Cliff] | None = None
    flavours: Iterable[tuple[Flavour, Sequence[Drawn]]]
    if args.errors:
        source = read_errors(args.errors)
        flavours = [(source.target.flavour, ())]
    elif args.cliffs:
        source = read_cliffs(workspace, args.cliffs)
        flavours = [(read_header(workspace.dataset(args.cliffs)).target.flavour, ())]
    elif args.count or any(workspace.kernel_records.glob("*/index.json")):
        flavours = map(indexed_kernels, index_paths(workspace))
    else:
        flavours = [(local_flavour("cpu" if args.free_kind == "host" else resolve_device("auto")), ())]
    rows = []
    with sole_writer(workspace.kernel_onnx):
        for flavour, entries in flavours:
            folder = workspace.kernel_onnx / flavour.name
            seeds = draws.read_seeds(folder)
            steps = draw_steps(args, source, entries, folder, seeds, flavour.device)
            rows.append(sample_flavour(folder, seeds, steps, args.seed, args.jobs))
    cli.print_rows(rows, args.json, "sampled kernels")
    return 0


if __name__ == "__main__":
    cli.run(main)
