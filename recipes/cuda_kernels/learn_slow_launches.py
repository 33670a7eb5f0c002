"""Learns from the names of CUDA kernels which products of matrices, and which recurrent layers, are slow to launch.

Reads the dataset of a GPU target, label `gpu`. Learns two decision trees from kernels that neither belong to a model nor were
drawn near one that does, so that errors of models stay honest, whatever is held out. Prints how often the trees are right for
all other kernels, and writes them to --out, which ort_analysis/cuda/kernel_choice.py reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hase.ort_analysis.cuda.kernel_choice import TABLE, DecisionTree, SlowLaunches, product_numbers, recurrent_numbers
from hase.records.dataset_files import read_kernels
from hase.records.dataset_tables import read_kernel_table
from hase.records.kernel_record import Kernel
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.lazy import sklearn
from hase.utils.paths import Workspace

SLOW = ("sm90_xmma_gemm", "sm80_xmma_gemm", "nvjet")  # in the names of kernels of products
SLOW_IN_STEPS = ("sm90_xmma_gemm",)  # the same for products in the steps of a recurrent layer
CELL = "RNN"  # in the names of kernels of a recurrent layer's cells
NO_PRODUCT = ("onnxruntime", "Mem", "splitK")  # in the names of other kernels around the product of a step
LEAST_IN_LEAF = 5
# Of the trees, for products (False) and for recurrent layers (True). With a fifth of the examples left out, they are right in
# 90 % of cases; deeper ones in hardly more.
DEPTHS = {False: 8, True: 6}
EXAMPLES = """
python recipes/cuda_kernels/learn_slow_launches.py --workspace out/h200 --target nvidia-h200-cuda-ort1.31-all
"""


class Example(NamedTuple):
    """A kernel that ran, with its sizes (`numbers`); `slow` if one of its CUDA kernels is slow to launch, `of_model` if it
    belongs to a model or was drawn near one."""

    kernel: Kernel
    numbers: tuple[float, ...]
    recurrent: bool
    slow: bool
    of_model: bool


def step_product(names: Sequence[str]) -> str:
    """Name of the CUDA kernel that multiplies in each step of a recurrent layer; "" if no cell kernel ran.

    It is the first product after a cell's kernel; if there is none, the last product before it.
    """
    cell = next((index for index, name in enumerate(names) if CELL in name and NO_PRODUCT[0] not in name), None)
    if cell is None:
        return ""
    before, after = ([name for name in names_around if CELL not in name and not any(word in name for word in NO_PRODUCT)]
                     for names_around in (names[:cell], names[cell + 1:]))
    return (after[:1] or before[-1:] or [""])[0]


def examples(workspace: Workspace, target: str) -> Iterator[Example]:
    """The products and recurrent layers of a dataset whose CUDA kernels have names."""
    table = read_kernel_table(workspace, target)
    if "gpu_kernels" not in table.columns:
        raise UserError(f"{target}: has no label gpu, hence no names of CUDA kernels")
    named = table[["Kernel_ID", "gpu_kernels", "Groups"]].dropna(subset=["gpu_kernels"]).drop_duplicates("Kernel_ID")
    ran = {str(name): (str(kernels).split("|"), isinstance(groups, str) and bool(groups))
           for name, kernels, groups in named.itertuples(index=False)}
    for entry in read_kernels(workspace.dataset(target), ran.keys()):
        kernel = entry.kernel
        product, recurrent = product_numbers(kernel), recurrent_numbers(kernel)
        if not (product or recurrent):
            continue
        names, of_model = ran[kernel.id]
        slow = (any(word in step_product(names) for word in SLOW_IN_STEPS) if recurrent
                else any(word in name for name in names for word in SLOW))
        yield Example(kernel, product or recurrent or (), recurrent is not None, slow, of_model)


def learn(same_kind: Sequence[Example], depth: int) -> DecisionTree:
    """Fits a tree to the examples of one kind that neither belong to a model nor were drawn near one."""
    training = [example for example in same_kind if not example.of_model]
    fitted = sklearn.tree.DecisionTreeClassifier(max_depth=depth, min_samples_leaf=LEAST_IN_LEAF, random_state=0).fit(
        np.array([example.numbers for example in training]), np.array([example.slow for example in training]))
    tree, slow_class = fitted.tree_, list(fitted.classes_).index(True)
    return DecisionTree(
        feature=tuple(int(max(feature, -1)) for feature in tree.feature), threshold=tuple(map(float, tree.threshold)),
        left=tuple(map(int, tree.children_left)), right=tuple(map(int, tree.children_right)),
        slow=tuple(bool(value[0].argmax() == slow_class) for value in tree.value))


def right_rows(same_kind: Sequence[Example], tree: DecisionTree) -> list[dict[str, Any]]:
    """Accuracy of the tree by operator and type, for kernels of models and sampled near them."""
    groups: dict[tuple[str, str], list[Example]] = {}
    for example in same_kind:
        if example.of_model:
            groups.setdefault((example.kernel.op_type, example.kernel.dtype), []).append(example)
    return [{"operator": op_type, "type": dtype, "kernels": len(group),
             "slow_%": 100 * float(np.mean([example.slow for example in group])),
             "right_%": 100 * float(np.mean([tree.answer(example.numbers) == example.slow for example in group]))}
            for (op_type, dtype), group in sorted(groups.items())]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", required=True, help="name of a dataset with label gpu")
    parser.add_argument("--out", type=cli.out_file, default=TABLE, metavar="FILE",
                        help=f"where the trees go (default: {TABLE.name}, which Hase uses)")
    args = parser.parse_args()
    workspace = cli.start(args)
    all_examples = list(examples(workspace, args.target))
    kinds = {recurrent: [example for example in all_examples if example.recurrent is recurrent] for recurrent in (False, True)}
    trees = {recurrent: learn(same_kind, DEPTHS[recurrent]) for recurrent, same_kind in kinds.items()}
    count = sum(not example.of_model for example in all_examples)
    files.write_json(args.out, SlowLaunches(source=f"{count} kernels of no model in the dataset {args.target}",
                                            products=trees[False], recurrent=trees[True]))
    cli.print_rows([row for recurrent in kinds for row in right_rows(kinds[recurrent], trees[recurrent])], args.json,
                   f"kernels of models, by trees learned from {count} others")
    return 0


if __name__ == "__main__":
    cli.run(main)
