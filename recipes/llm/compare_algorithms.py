"""Which CUDA kernels ran for the operators of language models, beside those that ONNX Runtime's rules say.

Reads the dataset of a target that was collected with label `gpu`, which holds the names of the CUDA kernels. Prints how many of
the measured kernels of each algorithm (runtimes/ort/cuda/language_kernels.py) ran each one, by their names.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from records.dataset_files import collected_targets, read_journal, read_kernels
from records.kernel_record import Kernel
from records.measurement import GPU_LABEL
from runtimes.ort.cuda.language_kernels import language_algorithm
from utils import cli
from utils.errors import UserError

EXAMPLES = """
python recipes/llm/compare_algorithms.py --workspace out/llm
"""
SEEN: tuple[tuple[str, str], ...] = (  # in the names of CUDA kernels: the first that fits says which algorithm ran
    ("xqa", r"kernel_mha"), ("cudnn", r"cudnn.*(sdpa|flash|mha|attention)|sdpa"), ("flash", r"flash_fwd"),
    ("memory efficient", r"fmha|attention_kernel_batched"), ("unfused", r"[Uu]nfused|SoftmaxWithRawMask"),
    ("router", r"RouterKernel"), ("rows", r"BatchedKernel|KernelSmallM|KernelBatched"),
    ("vector", r"KernelM1|MatMulFloatInt4Kernel\b"), ("dequantised", r"[Dd]equantize"))
SAME = {"flash decoding": "flash", "dequantised in parts": "dequantised"}  # not told apart by name


def algorithm_seen(names: Sequence[str]) -> str:
    """The algorithm that the names of a kernel's CUDA kernels show; "other" where they show none."""
    return next((algorithm for algorithm, pattern in SEEN if any(re.search(pattern, name) for name in names)), "other")


def compare(measured: Iterable[tuple[Kernel, Sequence[str]]]) -> list[dict[str, Any]]:
    """A row for each algorithm by the rules and by the names, with the number of kernels; operators with one way are left out.

    Args:
        measured: kernels, and the names of the CUDA kernels that ran.
    """
    counted = Counter((kernel.op_type, rule, algorithm_seen(names)) for kernel, names in measured
                      if (rule := language_algorithm(kernel)))
    return [{"operator": operator, "by the rules": rule, "by the names": seen, "kernels": count,
             "same": SAME.get(rule, rule) == seen} for (operator, rule, seen), count in sorted(counted.items())]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--target", help="which dataset (default: the only one)")
    args = parser.parse_args()
    workspace = cli.start(args)
    targets = [args.target] if args.target else collected_targets(workspace)
    if len(targets) != 1:
        raise UserError(f"{workspace.root}: {len(targets)} datasets; name one with --target" if targets else
                        f"{workspace.root}: no dataset; measure with: recipes/h200/collect_kernels.sh language")
    folder = workspace.dataset(targets[0])
    kernels = {described.kernel.id: described.kernel for described in read_kernels(folder)}
    measured = {m.id: m.cuda_kernels for block in read_journal(folder) for m in block.measurements
                if m.label == GPU_LABEL and m.subject == "kernel" and m.status == "ok" and m.id in kernels}
    rows = compare((kernels[name], names) for name, names in measured.items())
    if not rows:
        raise UserError(f"{folder}: no attention and no MatMulNBits with label gpu; measure with: "
                        "recipes/h200/collect_kernels.sh language")
    cli.print_rows(rows, args.json, "algorithms")
    return 0


if __name__ == "__main__":
    cli.run(main)
