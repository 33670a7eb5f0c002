"""Phase 3.2: further kernels around those of the models, so that predictors learn how time follows shape.

Reads the index of every flavour in ort_analysis/ort_kernel_record. Draws kernels of the index at random and changes
their sizes: batch, channels, height and width, kernel and stride, or rows, columns and depth of a product. ONNX Runtime
says which are valid and what they put out; the others are counted. With --free, draws kernels of no model besides. With
--errors, reads what training wrote instead of the index, and draws near those kernels that it predicted worst when it left
them out. Writes all to kernel_model/kernel_onnx/<flavour>/ beside the models' own, and to sampled.json there which families
hold the kernel that seeded each.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kernel_model.free_shapes import draw_free_kernel
from kernel_model.kernel_builder import build_model, default_sources, kernel_build, shareable
from kernel_model.kernel_errors import KernelErrors, draw_weights, read_errors
from ort_analysis.kernel_costs import BASE_NAMES, VIEW_OPS
from ort_analysis.kernel_types import describe_kernel
from ort_analysis.records import IndexEntry, Kernel, KernelInput, Tensor, family, load_index
from ort_analysis.tensor_shapes import session_dtype
from utils import cli, files
from utils.errors import UserError
from utils.locks import sole_writer
from utils.logger import get_logger
from utils.ort_sessions import open_session
from utils.processes import process_pool

log = get_logger("sampler")
Families = tuple[str, ...]  # sorted names of model families
Seeds = dict[str, Families]  # by kernel id
SEED_FILE = "sampled.json"  # beside the sampled kernels
BLOCK = 16  # channels of a blocked tensor come in multiples of ORT's widest block
MOST_MIB = 256
FREE: Families = ()  # no model's kernel seeded this one
NEAR_SPREAD = 0.5  # of the sizes around a kernel that is predicted badly; around those of models 1
TRIES = 20  # draws for each kernel asked for, at most
SIDES = np.array([4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224])
EXAMPLES = """
python kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16
python kernel_model/kernel_sampler.py --count 5000 --most-gflop 200 --without vgg --seed 7
python kernel_model/kernel_sampler.py --count 0 --free 20000 --most-gflop 300 --jobs 8
python kernel_model/kernel_sampler.py --errors training/kernel_errors/nvidia-h200-cuda-ort1.31-all.json --count 3000
"""


# Operators with one output, of the first input's shape: no session is needed to know it, nor could the CPU provider open
# one for all of them.
LIKE_FIRST_INPUT = {"Relu", "Sigmoid", "HardSigmoid", "HardSwish", "Clip", "Gelu", "QuickGelu", "BiasGelu", "FastGelu", "Tanh",
                    "Softmax", "BiasSoftmax", "Sqrt", "Erf", "Neg", "Abs", "Exp", "Log"}


def scaled(size: int, generator: np.random.Generator, multiple: int = 1, spread: float = 1.0) -> int:
    """`size` times a random factor between 2^−spread and 2^spread, a multiple of `multiple`, at least that."""
    wanted = size * 2.0 ** generator.uniform(-spread, spread)
    return max(multiple, round(wanted / multiple) * multiple)


def side(size: int, generator: np.random.Generator, spread: float = 1.0) -> int:
    """A usual image side near `size`: from a little less than 2^−spread of it to 2^spread times."""
    near = SIDES[(size * 0.9 * 2.0**-spread <= SIDES) & (size * 2.0**spread >= SIDES)]
    return int(generator.choice(near)) if near.size else size


def channel_multiple(kernel: Kernel) -> int:
    return BLOCK if kernel.domain.endswith("nchwc") else 8


def axis_multiple(kernel: Kernel, size: int) -> int:
    """What a new size of an axis is a multiple of: blocks stay whole, and sizes of whole vectors stay so."""
    return channel_multiple(kernel) if size % 8 == 0 or kernel.op_type == "ReorderInput" else 1


def resize(tensor: KernelInput, shape: Sequence[int]) -> KernelInput:
    """The same kind of tensor with another shape."""
    return tensor.model_copy(update={"shape": tuple(int(size) for size in shape)})


Draw = tuple[list[KernelInput], dict[str, Any]]
Drawn = tuple[Kernel, Families]  # a kernel, and the families that hold the one that seeded it
Sampled = tuple[dict[str, Drawn], Counter[str]]  # new kernels by id, and how many draws were refused and why


def draw_conv(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> Draw:
    """A convolution with other sizes; depthwise stays depthwise, and groups keep their width."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    multiple = channel_multiple(kernel)
    x, w = inputs[0].shape, inputs[1].shape
    group = int(attributes.get("group", 1))
    height, width = side(x[2], generator, spread), side(x[3], generator, spread)
    if x[2] == x[3] or generator.random() < 0.7:
        width = height
    if group == 1:
        cin = x[1] if x[1] < 8 else scaled(x[1], generator, multiple, spread)
        cout = scaled(w[0], generator, multiple, spread)
    elif w[1] == 1:
        cin = cout = group = scaled(group, generator, multiple, spread)
        attributes["group"] = group
    else:
        group = scaled(group, generator, spread=spread)
        cin, cout = group * (x[1] // int(attributes["group"])), group * (w[0] // int(attributes["group"]))
        attributes["group"] = group
    kh, kw = w[2], w[3]
    if generator.random() < 0.15 * spread and kh == kw and kh > 1:
        kh = kw = int(generator.choice([3, 5, 7]))
        attributes["kernel_shape"], attributes["pads"] = [kh, kw], [kh // 2] * 4
    if generator.random() < 0.1 * spread and "strides" in attributes:
        attributes["strides"] = [int(generator.choice([1, 2]))] * 2
    inputs[0] = resize(inputs[0], (batch, cin, height, width))
    inputs[1] = resize(inputs[1], (cout, cin // group, kh, kw))
    if len(inputs) > 2 and inputs[2].present:
        inputs[2] = resize(inputs[2], (cout,))
    if len(inputs) > 3 and inputs[3].present:
        steps, pads = attributes.get("strides", [1, 1]), attributes.get("pads", [0] * 4)
        dilation = attributes.get("dilations", [1, 1])
        out = [(size + pads[i] + pads[i + 2] - dilation[i] * (k - 1) - 1) // steps[i] + 1
               for i, (size, k) in enumerate(((height, kh), (width, kw)))]
        inputs[3] = resize(inputs[3], (batch, cout, *out))
    return inputs, attributes


def draw_gemm(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> Draw:
    """A matrix product with other rows, columns and depth."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    a, b = inputs[0].shape, inputs[1].shape
    rows, depth = (a[1], a[0]) if attributes.get("transA") else a
    columns = b[0] if attributes.get("transB") else b[1]
    rows = batch if rows <= 64 and generator.random() < 0.5 else scaled(rows, generator, spread=spread)
    depth, columns = scaled(depth, generator, 8, spread), scaled(columns, generator, 8, spread)
    inputs[0] = resize(inputs[0], (depth, rows) if attributes.get("transA") else (rows, depth))
    inputs[1] = resize(inputs[1], (columns, depth) if attributes.get("transB") else (depth, columns))
    if len(inputs) > 2 and inputs[2].present:
        inputs[2] = resize(inputs[2], (columns,) if len(inputs[2].shape) <= 1 else (1, columns))
    return inputs, attributes


def draw_matmul(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> Draw:
    """A (batched) matrix product with other sizes; leading dimensions are shared where both have them."""
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    a, b = list(inputs[0].shape), list(inputs[1].shape)
    if len(a) < 2 or len(b) < 2:
        return draw_axes(kernel, batch, generator, spread)
    left, right = int(bool(attributes.get("transA"))), int(bool(attributes.get("transB")))
    rows, depth, columns = a[-1] if left else a[-2], a[-2] if left else a[-1], b[-2] if right else b[-1]
    rows, depth = scaled(rows, generator, 1, spread), scaled(depth, generator, 8, spread)
    columns = scaled(columns, generator, 1, spread)
    lead = [batch if axis == 0 else scaled(size, generator, spread=0.5 * spread) for axis, size in enumerate(a[:-2])]
    shared = a[:-2] == b[:-2]
    inputs[0] = resize(inputs[0], (*lead, *((depth, rows) if left else (rows, depth))))
    inputs[1] = resize(inputs[1], (*(lead if shared else b[:-2]), *((columns, depth) if right else (depth, columns))))
    return inputs, attributes


def draw_axes(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> Draw:
    """Any other operator: every axis is scaled, the same for all inputs that have one size there; sizes of 1 stay.

    Inputs are aligned at their last axis, as broadcasting does. The axis that an operator joins or splits stays.
    """
    inputs, attributes = list(kernel.inputs), dict(kernel.attributes)
    tensors = [tensor for tensor in inputs if tensor.present and tensor.values is None]
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    fixed = attributes.get("axis") if kernel.op_type in ("Concat", "Split") else None
    fixed = fixed % rank if isinstance(fixed, int) and rank else None
    image = rank == 4
    new: dict[tuple[int, int], int] = {}
    for axis in range(rank):
        for size in {(1,) * (rank - len(t.shape)) + t.shape for t in tensors}:
            old = size[axis]
            if old == 1 and not (axis == 0 and image):
                new[axis, old] = 1
            elif axis == fixed:
                new[axis, old] = old
            elif axis == 0 and image:
                new[axis, old] = batch if old != 1 or len({t.shape[0] for t in tensors if len(t.shape) == 4}) == 1 else 1
            elif image and axis >= 2:
                new[axis, old] = new.get((2, old)) or side(old, generator, spread)
            else:
                new.setdefault((axis, old), scaled(old, generator, axis_multiple(kernel, old), spread))
    for position, tensor in enumerate(inputs):
        if tensor.present and tensor.values is None:
            offset = rank - len(tensor.shape)
            inputs[position] = resize(tensor, [new[offset + axis, size] for axis, size in enumerate(tensor.shape)])
    if "channels" in attributes and image:  # ReorderOutput: how many of the blocked channels are real
        attributes["channels"] = inputs[0].shape[1]
    return inputs, attributes


DRAWS: dict[str, Callable[[Kernel, int, np.random.Generator, float], Draw]] = {
    "Conv": draw_conv, "Gemm": draw_gemm, "MatMul": draw_matmul, "FusedMatMul": draw_matmul}


def infer_outputs(kernel: Kernel, inputs: Sequence[KernelInput], attributes: dict[str, Any]) -> tuple[Tensor, ...]:
    """What ORT says the changed kernel puts out.

    Raises:
        UserError: the sizes do not fit together.
    """
    if kernel.op_type in LIKE_FIRST_INPUT:
        return (Tensor(dtype=kernel.outputs[0].dtype, shape=inputs[0].shape),)
    free = tuple(tensor.model_copy(update={"constant": False}) if shareable(tensor) else tensor for tensor in inputs)
    model = build_model(kernel.model_copy(update={"inputs": free, "attributes": attributes}))  # no large weight is made
    for output in model.graph.output:
        output.ClearField("type")
    session = open_session(model.SerializeToString(), "cpu", optimize="none", name=kernel.id)
    found = {}
    for output in session.get_outputs():
        if any(not isinstance(size, int) or size < 1 for size in output.shape):
            raise UserError(f"{kernel.id}: sizes {output.shape} are not fixed")
        found[output.name] = Tensor(dtype=session_dtype(output.type), shape=tuple(output.shape))
    return tuple(found.get(f"y{position}", Tensor(dtype="")) for position in range(len(kernel.outputs)))


def draw_kernel(kernel: Kernel, batch: int, generator: np.random.Generator, spread: float = 1.0) -> Kernel:
    """A kernel of the same type with other sizes: at most about 2^spread times larger or smaller each.

    Raises:
        UserError: the sizes drawn do not fit together.
    """
    base = BASE_NAMES.get(kernel.op_type, kernel.op_type)
    inputs, attributes = DRAWS.get(base, draw_axes)(kernel, batch, generator, spread)
    outputs = infer_outputs(kernel, inputs, attributes)
    return describe_kernel(kernel.op_type, kernel.domain, kernel.opset, attributes, inputs, outputs)


def footprint_mib(kernel: Kernel) -> float:
    return float(kernel.bytes_read + kernel.bytes_written) / 2**20


def _families(names: Iterable[str], without: Collection[str]) -> Families:
    return tuple(sorted(set(names).difference(without)))


def sample(entries: Sequence[IndexEntry], count: int, generator: np.random.Generator, batches: Sequence[int],
           most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (), there: Collection[str] = ()) -> Sampled:
    """Up to `count` new kernels by id, each with the families that seeded it, and how many draws were refused and why.

    A type is drawn as often as the square root of its number of kernels says; kernels of the families in `without`
    seed nothing, and the ids in `there` were sampled before.
    """
    seeds: dict[str, list[Drawn]] = {}
    for entry in entries:
        families = _families(map(family, entry.models), without)
        if families and entry.kernel.op_type not in VIEW_OPS and not entry.kernel.subgraphs:
            seeds.setdefault(entry.kernel.type, []).append((entry.kernel, families))
    types = sorted(seeds)
    weights = np.sqrt([len(seeds[name]) for name in types])

    def draw() -> Drawn:
        batch = int(generator.choice(batches))
        of_type = seeds[str(generator.choice(types, p=weights / weights.sum()))]
        kernel, families = of_type[int(generator.integers(len(of_type)))]
        return draw_kernel(kernel, batch, generator), families

    known = {entry.kernel.id for entry in entries} | set(there)
    return collect_draws(draw, count if seeds else 0, most_gflop, most_mib, known)


def near_batch(kernel: Kernel, batches: Sequence[int], generator: np.random.Generator) -> int:
    """One of `batches` within a factor of two of the kernel's own first dimension, or that dimension where none is."""
    own = next((tensor.shape[0] for tensor in kernel.activations if tensor.shape), 1)
    return int(generator.choice([batch for batch in batches if own <= 2 * batch and batch <= 2 * own] or [own]))


def sample_again(errors: KernelErrors, count: int, generator: np.random.Generator, batches: Sequence[int],
                 most_gflop: float, most_mib: float = MOST_MIB, without: Sequence[str] = (),
                 there: Collection[str] = ()) -> Sampled:
    """Up to `count` new kernels by id, near those that are predicted worst, sampled ones among them; else as `sample`.

    A kernel is drawn from as often as its `draw_weights` says. Its families go with what it seeds: FREE where it is of no
    model; families held out of the training, or in `without`, seed nothing.
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
    """Up to `count` new kernels of no model by id, each with FREE, and how many draws were refused and why."""
    return collect_draws(lambda: (draw_free_kernel(int(generator.choice(batches)), generator), FREE), count, most_gflop,
                         most_mib, there)


def collect_draws(draw: Callable[[], Drawn], count: int, most_gflop: float, most_mib: float, known: Collection[str]) -> Sampled:
    """Draws until `count` new kernels that are small enough are found; them by id, and how many were refused and why."""
    found: dict[str, Drawn] = {}
    refused: Counter[str] = Counter()
    for _ in cli.track(range(count * TRIES), "sampling"):
        if len(found) >= count:
            break
        try:
            drawn, families = draw()
        except (UserError, ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            log.debug("%s", error)  # sizes that do not fit together are what drawing at random gives
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
    """Samples and builds `count` kernels; the families that seeded each by id, and how many draws were refused and why."""
    found, refused = sampler(count, generator)
    for kernel, _ in cli.track(list(found.values()), "building"):
        kernel_build(kernel, folder)
    return {name: families for name, (_, families) in found.items()}, refused


def side_by_side(sampler: Sampler, count: int, seed: Sequence[int], folder: Path, jobs: int) -> tuple[Seeds, Counter[str]]:
    """`draw_and_build` in `jobs` processes, each with a seed of its own; what several found counts once."""
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


def read_seeds(folder: Path) -> Seeds:
    """The families that hold the kernel that seeded each sampled kernel of a folder, by id; empty where none were sampled.

    Raises:
        UserError: an earlier version wrote the file: it knew one family alone.
    """
    path = folder / SEED_FILE
    found = files.read_json(path) if path.exists() else {}
    if not all(isinstance(families, list) for families in found.values()):
        raise UserError(f"{path}: written by another version; remove {folder}, then build and sample its kernels again: "
                        "python kernel_model/kernel_builder.py, python kernel_model/kernel_sampler.py")
    return {name: tuple(families) for name, families in found.items()}


def indexed(path: Path) -> tuple[str, Sequence[IndexEntry]]:
    """The name of an index's flavour, and its kernels."""
    index = load_index(path)
    return index.flavour.name, [entry for of_type in index.kernels.values() for entry in of_type.values()]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--count", type=cli.whole, default=1000,
                        help="kernels around those of models, those of earlier calls too (default: 1000)")
    parser.add_argument("--free", type=cli.whole, default=0, metavar="N",
                        help="kernels of no model, sizes drawn from the usual ranges, those of earlier calls too (default: 0)")
    parser.add_argument("--errors", type=Path, metavar="FILE",
                        help="what training wrote to training/kernel_errors: --count further kernels, those of earlier calls "
                             "not counted, around those that are predicted worst")
    parser.add_argument("--batch-sizes", type=cli.counts, default="1,2,4,8,16", metavar="N,…",
                        help="batch sizes to draw from")
    parser.add_argument("--most-gflop", type=cli.positive, default=2.0, help="largest kernel, in 10^9 operations (default: 2)")
    parser.add_argument("--most-mib", type=cli.positive, default=MOST_MIB,
                        help=f"largest kernel, all that it reads and writes (default: {MOST_MIB})")
    parser.add_argument("--without", action="append", default=[], metavar="FAMILY",
                        help="a model family whose kernels seed nothing (repeatable), e.g. vgg")
    parser.add_argument("--seed", type=cli.whole, default=0)
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="processes that draw side by side (default: 1)")
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
            there = read_seeds(folder)
            row: dict[str, Any] = {"flavour": flavour, "sampled": 0, "free": 0, "there_before": len(there)}
            refusals: Counter[str] = Counter()
            free_before = sum(seeded_by == FREE for seeded_by in there.values())
            limits: dict[str, Any] = {"batches": args.batch_sizes, "most_gflop": args.most_gflop, "most_mib": args.most_mib}
            if errors:
                built = frozenset(path.stem for path in folder.glob("*.onnx"))  # held-out families' kernels too
                plan = [("sampled", partial(sample_again, errors, without=args.without, there=built, **limits), args.count)]
            else:
                limits["there"] = frozenset(there)
                near = partial(sample, entries, without=args.without, **limits)
                plan = [("sampled", near, args.count - len(there) + free_before),
                        ("free", partial(sample_free, **limits), args.free - free_before)]
            for what, sampler, wanted in plan:
                if wanted <= 0:
                    continue
                drawn, refused = side_by_side(sampler, wanted, [args.seed, len(there), what == "free"], folder, args.jobs)
                there |= drawn
                files.write_json(folder / SEED_FILE, there)
                row[what] = len(drawn)
                refusals += refused
                if len(drawn) < wanted:
                    log.warning("%s: only %d of %d kernels (%s) found", flavour, len(drawn), wanted, what)
            rows.append(row | {f"refused: {why}": number for why, number in sorted(refusals.items())})
    cli.print_rows(rows, args.json, "sampled kernels")
    return 0


if __name__ == "__main__":
    cli.run(main)
